# make setup | make demo | make test | make docs | make prove: each does the set-up itself; a second time that costs nothing.
SHELL := /bin/bash
PYTHON := .venv/bin/python
VARIANT ?= auto
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast prove lint docs
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
	$(PYTHON) -m pytest -n auto -m "not full" $(ARGS)

test-fast: setup
	$(PYTHON) -m pytest -n auto -m "not slow and not full" $(ARGS)

# the documents as a site; a link that leads nowhere fails
docs: setup
	$(PYTHON) -m sphinx -q -E -W --keep-going -c docs . build/site
	@echo "the site begins at build/site/README.html"

# by hand before a release: every cell of the matrices of kills, layouts and moves, and the benches
prove: setup
	$(PYTHON) -m pytest -n auto $(ARGS)
