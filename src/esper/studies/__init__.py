"""Studies: comparisons of training methods, and of training settings of policies, over paired worlds.

May import leyline, kasmina, tolaria, tamiyo and simic; only `commands` imports it. Read first: `contract.py`, then
`runner.py`.
"""
