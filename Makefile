PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
# TORCH=2.10.0 installs that version instead of the pinned one
CONSTRAINTS := $(if $(TORCH),build/constraints-torch-$(TORCH).txt,constraints.txt)
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS) $(PIP_ARGS)
PICK := $(if $(SLOW),,-m "not slow")
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: run test docs torture bench bench-check lint check release-check clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/'
	@echo
	@sed -n 's/^## \{0,1\}//p' Makefile

run: $(RUN)  ## grow a network on embedded data in about a minute, compare it with others, write a report
	$(BIN)/esper grow --task rescue --epochs 30

test: $(DEV)  ## the fast tests; SLOW=1 for every test
	$(PYTEST) $(PICK)

docs: $(DEV)  ## build the documentation site into build/site; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 docs build/site
	$(BIN)/python scripts/check_site.py build/site

torture: $(DEV)  ## kill a training run 100 times; the result must be bit-identical
	$(BIN)/python -m tests.support.torture 100

bench: $(DEV)  ## measure speed against references: the body, worth, hot paths, telemetry, training
	for name in body worth hot_paths hub train ddp; do $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-check: $(DEV)  ## compare speed ratios with the stored ones; fails on a loss of more than 15 %
	$(BIN)/python -m benchmarks.check

lint: $(DEV)  ## ruff, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell src scripts examples benchmarks docs *.md

check: lint test  ## what must hold before a commit

release-check: $(DEV)  ## build wheel and sdist, install each in a fresh environment, run the quickstart, check metadata
	$(BIN)/python scripts/release_check.py --out dist --pip-args="$(PIP_ARGS)"

## Set-up: the first target creates .venv and installs what constraints.txt pins. `run` installs the package and what it
## needs (PyTorch, NumPy and a few small ones); every other target adds the tests' and tools' packages (transformers,
## ONNX, DuckDB, TensorBoard, ...). On disk: 1.0 GB for `run`, 1.9 GB with the rest, with PyTorch's CPU build.
## On Linux, PyPI's PyTorch carries CUDA and takes several GB more. To install the CPU build, add
##   PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
$(RUN): EXTRAS :=
$(DEV): EXTRAS := [dev]
$(RUN) $(DEV): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".$(EXTRAS)"
	touch $@

build/constraints-torch-$(TORCH).txt: constraints.txt
	mkdir -p build
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

clean:  ## forget the environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
