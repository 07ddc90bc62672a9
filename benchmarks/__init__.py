"""Speed measurements, as ratios against a named reference in the same process.

Run from the repository root: `python -m benchmarks.train --help`, or `make bench`. Not part of the installed package.
"""
