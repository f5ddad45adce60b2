"""Benchmarks: each prints a table with the machine in it. Run one by `python -m tests.bench.<name>`."""
