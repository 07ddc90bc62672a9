"""Policy training: `config.py` defines the settings, `vectorized.py` is the training loop."""
