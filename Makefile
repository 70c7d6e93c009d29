# make setup | make demo | make test: each does the set-up itself; a second time that costs nothing.
SHELL := /bin/bash
PYTHON := .venv/bin/python
VARIANT ?= auto
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast lint
setup:
	@infra/setup.sh $(VARIANT)

demo: setup
	@$(PYTHON) -m flows demo $(ARGS)

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/lint-imports
	$(PYTHON) -m pyright

test: lint
	$(PYTHON) -m pytest -n auto $(ARGS)

test-fast: setup
	$(PYTHON) -m pytest -n auto -m "not slow" $(ARGS)
