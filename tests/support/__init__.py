"""Code shared by test modules: model zoo, recorded runs, run processes."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository root. A subprocess needs it in `sys.path` to import from `tests`."""
