# Each target makes its own virtual environment; nothing outside this directory is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint long bench clean

demo: $(STAMP)
	$(BIN)/ftd demo

test: $(STAMP) lint
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Minutes and gigabytes: soak tests and repeated kills.
long: $(STAMP)
	$(BIN)/python -m pytest -q -m long

# BENCH="--size-gib 2 --only publish" says what; `python -m tests.bench --help` what there is.
bench: $(STAMP)
	$(BIN)/python -m tests.bench $(BENCH)

clean:
	rm -rf $(VENV)

# constraints.txt pins torch for this environment: an unpinned one is a download of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)
