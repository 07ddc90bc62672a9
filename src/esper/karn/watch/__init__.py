"""The live terminal view of a run. Reads the journal only, so it cannot disturb training, and works on copied runs.

Read first: `watched_run.py` (the run, its state and pace), then `cells.py` (texts and tables), `app.py` (keys, screens,
redraws). Only `app.py` needs Textual.
"""
