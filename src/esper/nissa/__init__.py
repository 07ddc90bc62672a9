"""Telemetry transport: the hub, its sinks, the run directory and its journal. Imports leyline, and no torch.

Read first: `recorder.py` (one recorded run), `hub.py` (from the training thread to the sinks), `journal_reader.py`.
"""
