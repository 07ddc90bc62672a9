"""Shows events: the terminal view, the report, SQL. Reads run directories only, and imports no torch.

Read first: `summary.py`, what a run's journal says in a form that every view shares.
"""
