"""Learns to decide: what seeds are worth, rewards, and the policy's training.

May import leyline, kasmina, tolaria and tamiyo. Read first: `attribution/counterfactual.py`.
"""
