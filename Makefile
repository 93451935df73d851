# Every target makes what it needs: a Python of 3.10 or newer with pip is all that has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST = -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
BENCHMARKS = $(wildcard benchmarks/bench_*.py)

# Where Python comes without ensurepip (Debian splits it off), its own pip puts one into the environment. A symbolic link
# leads to an environment of another checkout, which --clear would empty.
define environment
@test ! -L $(1) || { echo '$(1) is a symbolic link: remove it, or install there by hand.' >&2; exit 1; }
$(PYTHON) -m venv $(1) || { \
    $(PYTHON) -m venv --clear --without-pip $(1) && \
    $(PYTHON) -m pip install --target "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; }
endef

export HYPOTHESIS_STORAGE_DIRECTORY := .cache/hypothesis

.DEFAULT_GOAL := help
.PHONY: help test compatibility demo lint format bench bench-docs docs dist test-oldest test-newest gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: $(READY) ## run the tests; PYTEST_ARGS is handed on to pytest
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

compatibility: ## check every monitor on models and train steps of other packages; writes docs/compatibility.md
	$(call environment,$(VENV)-compatibility)
	$(VENV)-compatibility/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[compatibility]'
	$(VENV)-compatibility/bin/python $(PYTEST) -m compatibility tests/compatibility \
	    tests/gradient/test_skip_step.py tests/gradient/test_skip_packages.py tests/gradient/test_clip.py tests/scaling/test_real_models.py $(PYTEST_ARGS)

demo: $(READY) ## train a small model with a spike in it, and see what is found
	$(BIN)/python examples/demo.py

lint: $(READY) ## check format, code, docstrings and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/flake8 ignite_monitor
	$(BIN)/mypy

format: $(READY) ## format the code, and fix what ruff can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(READY) ## run benchmarks/bench_*.py
	@test -n "$(BENCHMARKS)" || echo "There are no benchmarks yet."
	@set -e; for script in $(BENCHMARKS); do echo "$$script"; $(BIN)/python "$$script"; done

bench-docs: $(READY) ## measure every table of the documentation that comes from a benchmark; takes hours
	PYTHONPATH=. $(BIN)/python benchmarks/tables.py

docs: $(VENV)/.docs ## build and check the documentation in build/docs, and run its snippets that need more packages
	rm -rf build/docs docs/api
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	$(BIN)/python docs/_ext/check_site.py build/docs
	$(BIN)/python -m pytest -q tests/test_docs.py -k 'loggers or accelerate'
	@echo 'Open build/docs/index.html'

dist: $(VENV)/.dist ## build a wheel and a source archive into dist, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Environments of their own, for what setup.cfg says is supported. Each holds a torch with CUDA: 5 to 6 GB.
test-oldest: ## run the tests with the oldest torch and Ignite
	$(call environment,$(VENV)-oldest)
	$(VENV)-oldest/bin/python -m pip install --quiet 'torch==2.6.*' 'pytorch-ignite==0.5.3' --editable '.[test]'
	$(VENV)-oldest/bin/python $(PYTEST) $(PYTEST_ARGS)

test-newest: ## run the tests with the newest of everything
	$(call environment,$(VENV)-newest)
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[test]'
	$(VENV)-newest/bin/python $(PYTEST) $(PYTEST_ARGS)

gpu: $(READY) ## run the tests and benchmarks of a GPU, and print what every monitor costs there
	$(BIN)/python -m pytest -q -m cuda tests/accelerator
	$(BIN)/python benchmarks/bench_cost.py --device cuda
	$(BIN)/python -m tests.accelerator._report

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-compatibility .cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(call environment,$(VENV))
	@echo 'Installing into $(VENV), which takes a minute or two ...'
	@$(BIN)/python -m pip install --quiet 'pip>=22.3'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(READY)
	@echo 'Installing what the documentation needs ...'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(VENV)/.dist: $(READY)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt build twine
	@touch $@
