"""From what the loop has at hand to events: `emitters.py`."""
