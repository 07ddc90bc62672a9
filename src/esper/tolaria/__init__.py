"""Training of hosts: tasks and their data, the engine, and the evaluation of coalitions.

May import leyline and kasmina. Read first: `engine.py`, then `coalitions.py`.
"""
