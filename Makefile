# What people, CI and CONTRIBUTING.md run. `make` alone lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
TEST_PROCESSES ?= 2
# Processes share the cores; numerical libraries must not each take all of them.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long check format bench clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP)  ## Create .venv and install everything (again when its inputs change)

$(STAMP): pyproject.toml setup.py protocol/_toploc.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make setup PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt '$(TORCH)' -e '.[dev]'
	rm -rf $(VENV)/lib/python3*/site-packages/trio-stubs  # types of an old trio, which hide trio's own from mypy
	touch $@

demo: setup  ## Run a whole small swarm on this machine; its last line says where the report lies
	$(BIN)/intellect-node demo

test: setup  ## Run the tests
	$(BIN)/python -m pytest -m 'not long' -n $(TEST_PROCESSES) --dist loadfile

test-long: setup  ## Run the tests that take minutes
	$(BIN)/python -m pytest -m long

check: setup  ## Check style, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: setup  ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## Measure one figure of the docs: make bench NAME=<name>; without NAME, list them
	$(BIN)/python -m bench $(NAME)

clean:  ## Remove what builds, tests and demos left; keeps .venv
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
