# Everything a newcomer types. Each target does its own set-up: a virtual environment in .venv, torch's CPU build, this package.
#   make demo       train on four processes and on one, compare the curves, save, resume on two
#   make test       lint, types and a case of most promises
#   make test-all   the wide ones, two hours and more: every model under Inductor, every operator on operands that lie otherwise, longer fuzzing; TURN=2/8 the third of eight parts
#   make docs       the documentation as a site, in build/site
#   make gpu-check  one-GPU smoke test with the torch of GPU_PYTHON; touches no network

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TURN ?= 0/1
INSTALLED := $(VENV)/.installed
DOCUMENTED := $(VENV)/.documented
# The import package is spread over four folders (see pyproject.toml); here they lie together, for tools that cannot follow an editable install.
TREE := build/tree
# Modules that tests share. The tests themselves are not type-checked, nor what the fuzzer wrote.
TEST_HELPERS = $(shell find tests -name '*.py' ! -name 'test_*' ! -path 'tests/fuzz/kept/*' ! -path 'tests/fuzz/open/*' \
	| sed -e 's|\.py$$||' -e 's|/__init__$$||' -e 's|/|.|g')

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all lint types tests unit spmd dist wide docs gpu-check tree clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py $(ARGS)

test: lint types tests

test-all: wide

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) tree
	MYPYPATH=$(TREE) $(BIN)/mypy -p autopar $(TEST_HELPERS:%=-m %)

tests: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not wide" tests

unit spmd dist: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not wide" tests/$@

wide: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m wide --turn $(TURN) tests

docs: $(DOCUMENTED) tree
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(DOCUMENTED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	@touch $@

gpu-check: tree
	PYTHONPATH=$(CURDIR)/$(TREE):$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) tests/gpu/check.py $(ARGS)

tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)/autopar
	@ln -s $(CURDIR)/autopar/* $(CURDIR)/solver $(CURDIR)/passes $(CURDIR)/kernels $(TREE)/autopar/

# torch by its exact version first: the resolver would otherwise take the build that brings gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "setuptools>=77"
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[hf,loops,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
