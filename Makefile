# `make demo` and `make test` do all the set-up: find a Python, make .venv, install into it, run.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# Looked up once, and only when something has to be installed.
PYTHON = $(eval PYTHON := $$(shell scripts/find-python))$(PYTHON)
NO_PYTHON = jaxspec needs Python 3.12 or newer with venv: install it (for example `pyenv install 3.12`, or `apt install python3.12-venv`) and run make again

.PHONY: demo test slow exhaustive lint types format clean
.SILENT:

demo: $(INSTALLED)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/pytest -q -n 2

slow: $(INSTALLED)
	$(BIN)/pytest -q -n 2 -m slow

exhaustive: $(INSTALLED)
	$(BIN)/pytest -q -n 2 -m exhaustive

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml
	$(if $(PYTHON),,$(error $(NO_PYTHON)))
	echo "Installing jaxspec into $(VENV) with $(PYTHON); this is done once."
	$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
