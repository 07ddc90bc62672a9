"""Decisions: controllers choose when, where and what to grow. May import leyline only; reads tables, never hosts."""
