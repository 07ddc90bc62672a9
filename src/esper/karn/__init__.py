"""Views of recorded events: live page, report, terminal view, SQL. Reads run directories only, and imports no torch.

Read first: `run_state.py`, the fold of a run's journal that views share.
"""
