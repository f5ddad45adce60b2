"""Benchmarks: `python -m tests.bench` prints a table with the machine in it. `run.py` says what parts are told."""
