# What a person types is what CI runs. `make` alone prints the list.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
# Outside the repository: such a venv takes 5 GB, and whatever walks the tree would walk it too.
TORCH_VENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/titan/torch-$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-all check format torch-venv clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s%s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## make .venv and install titan into it (with another Python: make setup PYTHON=python3.12)
	@$(VENV)/bin/python -c 'from importlib.metadata import version; from platform import python_version; \
		print("$(VENV) has titan, Python", python_version(), "and torch", version("torch") + ". Next: make train")'

train: $(INSTALLED) ## train a small Llama 3 on the Python standard library: no download, no account, no GPU
	$(VENV)/bin/titan train --preset debug

test: $(INSTALLED) ## run the tests that take seconds
	$(VENV)/bin/pytest -m "not slow"

test-slow: $(INSTALLED) ## run the tests that take longer
	$(VENV)/bin/pytest -m slow

test-all: $(INSTALLED) ## run all tests
	$(VENV)/bin/pytest

check: $(INSTALLED) ## lint, formatting, types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(INSTALLED) ## format, and fix what the linter can fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

torch-venv: ## make a venv with another torch, outside the repository: make torch-venv VERSION=2.11.0
	$(if $(VERSION),,$(error Which torch? For example: make torch-venv VERSION=2.11.0))
	@$(call make_venv,$(TORCH_VENV))
	@sed 's/^torch==.*/torch==$(VERSION)/' constraints.txt > "$(TORCH_VENV)/constraints.txt"
	@$(call install,$(TORCH_VENV),$(TORCH_VENV)/constraints.txt)
	@echo 'Run the tests with torch $(VERSION): "$(TORCH_VENV)/bin/pytest" -m "not slow"'

clean: ## remove .venv and all caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist
	find . -path ./runs -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt titan_cli/__init__.py
	@$(call make_venv,$(VENV))
	@$(call install,$(VENV),constraints.txt)
	@touch $@

# A venv whose pip does not start is one that was interrupted, or whose Python has gone: made again.
define make_venv
if ! "$(1)/bin/python" -m pip --version > /dev/null 2>&1; then \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
		echo "titan needs Python 3.11 or newer; $(PYTHON) is `"$(PYTHON)" --version 2>&1`. Name another: make setup PYTHON=python3.12" >&2; \
		exit 1; }; \
	"$(PYTHON)" -m venv --clear "$(1)"; \
fi
endef

# The build backend comes first: what pip builds in an isolated environment of its own is not held to our constraints.
# -qq prints errors only.
define install
echo "Installing into $(1): with torch 0.2 to 3 GB, minutes the first time"; \
set -e; \
"$(1)/bin/python" -m pip --disable-pip-version-check install -qq -c "$(2)" pip hatchling editables; \
"$(1)/bin/python" -m pip --disable-pip-version-check install -qq -c "$(2)" --no-build-isolation --group dev -e .
endef
