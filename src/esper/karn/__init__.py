"""Views of recorded events: the terminal view, the report, SQL. Reads run directories only, and imports no torch.

Read first: `summary.py`, the summary of a run's journal that all views share.
"""
