"""Slow, plain reference implementations that tests compare the fast ones with."""
