# make parity: set up what is needed and show that the siblings agree.   make test: set up and run every test.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: parity test lint clean

parity: .venv/installed
	$(BIN)/mha-parity run

test: .venv/installed
	$(BIN)/pytest --numprocesses 2

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[jax,torch,dev]'
	touch $@

clean:
	rm -rf .venv .venv-tt build *.egg-info .pytest_cache .ruff_cache .hypothesis
