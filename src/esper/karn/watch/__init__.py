"""The live terminal view of a run. Reads its journal only, so it cannot disturb training, and works on copies.

Read first: `model.py` (a fold of the journal into what a screen shows), then `judge.py` (is anything wrong?),
`views.py` (lines of text), `app.py` (keys, screens, when to redraw). Only `app.py` and `widgets.py` need Textual.
"""
