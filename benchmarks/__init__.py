"""Benchmarks: each compares ways of doing one thing, in one run on one machine, and ends in ratios."""
