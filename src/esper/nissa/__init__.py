"""Telemetry transport: the hub, its sinks, the run directory and its journal. Imports leyline, and no torch.

Read first: `hub.py` (from the training thread to the sinks), then `journal.py` (reading back).
"""
