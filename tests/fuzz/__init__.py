"""Fuzzers (atheris, libFuzzer): `python -m tests.fuzz torch CORPUS -runs=1000000` (CORPUS: a folder, new or not)."""
