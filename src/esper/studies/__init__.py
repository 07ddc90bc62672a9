"""Studies: comparisons of training methods over paired worlds and compute budgets.

May import leyline, kasmina, tolaria, tamiyo and simic; only `commands` imports it. Read first: `contract.py`, then
`runner.py`.
"""
