PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt
PICK := $(if $(SLOW),,-m "not slow")
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: run test torture bench bench-check lint check clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/'

run: $(STAMP)  ## train a policy on embedded data for about two minutes, compare it, and write a report
	$(BIN)/esper train --preset quick

test: $(STAMP)  ## the fast tests; SLOW=1 for every test
	$(PYTEST) $(PICK)

torture: $(STAMP)  ## kill a training run 100 times; it must end as if nothing had happened
	$(BIN)/python -m tests.support.torture 100

bench: $(STAMP)  ## measure speed against references: the body, worth, hot paths, telemetry, training
	for name in body worth hot_paths hub train; do $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-check: $(STAMP)  ## compare speed ratios with the stored ones; fails on a loss of more than 15 %
	$(BIN)/python -m benchmarks.check

lint: $(STAMP)  ## ruff, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## what must hold before a commit

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e ".[dev]"
	touch $(STAMP)

clean:  ## forget the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
