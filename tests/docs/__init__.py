"""Tests of the documentation: links, spelling, generated reference, examples in docstrings, notebooks."""
