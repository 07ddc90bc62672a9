"""Conversion of training state to telemetry events: `emitters.py`."""
