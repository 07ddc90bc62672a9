"""Decides: controllers choose when, where and what to grow. May import leyline; sees tables, never a host."""
