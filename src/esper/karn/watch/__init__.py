"""The live terminal view of a run. Reads the journal only, so it cannot disturb training, and works on copied runs.

Read first: `model.py` (folds the journal into screen data), then `alarm_rules.py` (state and alarms), `views.py`
(lines of text), `app.py` (keys, screens, redraws). Only `app.py` and `widgets.py` need Textual.
"""
