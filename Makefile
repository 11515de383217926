PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
TUTORIALS := $(filter-out %/tutorial_tools.py,$(wildcard examples/tutorials/*.py))
PACKAGE := $(shell find gpflow_hybrid -name '*.py')
NOTEBOOKS := $(TUTORIALS:examples/tutorials/%.py=docs/tutorials/%.ipynb)

.DEFAULT_GOAL := test
.PHONY: .venv demo test test-slow test-oldest coverage dist examples docs format clean

.venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,examples]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gpflow_hybrid
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist=worksteal

# The oldest versions that setup.cfg declares, in an environment of their own.
OLDEST_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) $(PYTHON))
OLDEST := .venv-oldest/.installed

$(OLDEST): requirements-oldest.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-oldest.txt
	@touch $@

# Linters, documentation and notebooks are the newest versions' business.
test-oldest: $(OLDEST)
	PYTHONPATH=. .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist=worksteal --ignore tests/docs --ignore tests/tutorials

# Lines that no fast test reaches, by module; less than 95 % of all is an error.
coverage: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal --cov=gpflow_hybrid --cov-report=term-missing:skip-covered --cov-fail-under=95

# Wheel and source archive, and the wheel tried where there is nothing else.
dist:
	rm -rf dist build .venv-dist .venv-build
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python -m pip install --quiet --disable-pip-version-check build
	.venv-build/bin/python -m build --outdir dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[sklearn,examples]"
	cd dist && ../.venv-dist/bin/python ../tests/check_installed.py

# Every tutorial that is out of date in full, WORKERS at a time, as a notebook with its outputs.
examples: $(STAMP)
	$(MAKE) --jobs $(WORKERS) $(NOTEBOOKS)

# One thread each: the tutorials share the cores.
docs/tutorials/%.ipynb: examples/tutorials/%.py examples/tutorials/tutorial_tools.py $(PACKAGE)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3 \
	$(BIN)/jupytext --quiet --to ipynb --execute --run-path examples/tutorials --output $@ $<

docs: examples
	$(BIN)/sphinx-build -W --keep-going -j auto docs docs/_build/html
	$(BIN)/python -m pytest tests/docs
	@echo "The site is docs/_build/html/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-oldest .venv-dist .venv-build build dist docs/_build docs/tutorials/*.ipynb *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
