"""Carries events: the hub, its sinks, the run directory and the journal in it. Imports leyline, and no torch.

Read first: `hub.py` (from the training thread to the sinks), then `journal.py` (reading back).
"""
