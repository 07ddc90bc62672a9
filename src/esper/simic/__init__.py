"""Reinforcement learning of growth: seed worth, rewards, environments and the training of policies.

May import leyline, kasmina, tolaria and tamiyo. Read first: `attribution/counterfactual.py`.
"""
