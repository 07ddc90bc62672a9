"""The growing body: slots, seeds, lifecycle rules, and structural changes of a model and its optimiser.

May import leyline. Read first: `lifecycle.py` (the rules), then `slot.py` and `graft.py` (the modules).
"""
