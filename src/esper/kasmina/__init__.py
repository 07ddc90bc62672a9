"""The growing body: slots, seeds, and structural changes of a model and its optimiser.

May import leyline, whose `lifecycle.py` has the rules. Read first: `slot.py`, then `graft.py` and `body.py`.
"""
