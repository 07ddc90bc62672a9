"""Slow, plain implementations that tests compare the fast ones with."""
