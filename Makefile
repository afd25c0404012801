# `make demo` and `make test` set up all they need; nothing is installed anew while pyproject.toml is unchanged.
#   PYTHON=...  an interpreter, 3.11 to 3.13, with the venv module     VENV=...   the virtual environment's folder
#   PROMPT=...  what the demo asks                                     TEST_ARGS=...  arguments of pytest

VENV ?= .venv
MODEL ?= smollm2-135m
PROMPT ?= Explain in two sentences why the sky is blue.
TEST_ARGS ?= -n 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off
PLUGIN := $(shell find tests/plugin_backend -name '*.py' -o -name '*.toml' 2>/dev/null | grep -v -e /build/ -e egg-info)

# The first interpreter that can run the package and make a virtual environment.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)

.PHONY: demo test lint types format readme clean

demo: $(VENV)/.installed
	$(BIN)/frink-numba fetch $(MODEL)
	$(BIN)/frink-numba generate $(MODEL) --chat --temperature 0 --max-new-tokens 96 "$(PROMPT)"

test: $(VENV)/.installed-test
	$(BIN)/frink-numba fetch smollm2-135m
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Renders the tables of README and docs/, and the chart: environment variables from settings.py, figures from benchmarks/receipts/.
readme: $(VENV)/.installed
	$(BIN)/python -m benchmarks.render_table

clean:
	test ! -f $(VENV)/pyvenv.cfg || rm -rf $(VENV)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11, 3.12 or 3.13 with the venv module (Debian, Ubuntu:" \
		"apt install python3-venv); name another interpreter with make PYTHON=..." >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { test ! -f $(VENV)/pyvenv.cfg || rm -rf $(VENV); echo "make: $(PYTHON) could not make a virtual environment" \
		"(Debian, Ubuntu: apt install python3-venv); name another interpreter with make PYTHON=..." >&2; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[fast]"
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(PLUGIN) | $(BIN)/python
	$(PIP) -e ".[test]"
	$(PIP) --no-deps ./tests/plugin_backend
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml $(PLUGIN) | $(BIN)/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps ./tests/plugin_backend
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test
