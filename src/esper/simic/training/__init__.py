"""Training a policy: `config.py` says what can be set, `vectorized.py` is the loop."""
