"""Fuzzers (atheris, libFuzzer): `python -m tests.fuzz torch CORPUS -runs=1000000`. CORPUS is a folder, made if need be."""
