"""Evaluation of controllers: paired comparisons, no-growth baselines, and the best fixed plans of simulated worlds.

Read first: `comparison.py`.
"""
