"""The growing body: slots, seeds, the rules of their lives, and what they do to a model and its optimiser.

May import leyline. Read first: `lifecycle.py` (the rules), then `slot.py` and `graft.py` (the modules).
"""
