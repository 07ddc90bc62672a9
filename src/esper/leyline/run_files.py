"""Names of files in a run directory that several packages read or write."""

DECISIONS = "decisions.safetensors"
"""Recorded decisions of a policy, with the policy (`tamiyo.decision_record`)."""
