# Every habit of the project: make demo | test | test-gpu | lint | docs | bench. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-gpu lint format docs bench clean

help:
	@echo "make demo      train, predict, prune and export on scikit-learn's digits (about a minute)"
	@echo "make test      run the tests and doctests with coverage"
	@echo "make test-gpu  run the tests that need a CUDA device, in the current Python"
	@echo "make lint      ruff and mypy"
	@echo "make docs      check that every code block of the documentation runs"
	@echo "make bench     print the benchmark tables"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/python examples/digits.py

test: $(READY)
	$(BIN)/python -m pytest --cov --cov-report=term --cov-fail-under=95

# Uses the Python that is active: a GPU machine brings its own torch.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -p no:cacheprovider -m gpu tests/test_kernels.py tests/test_gpu_training.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m pytest -q tests/test_docs.py

bench: $(READY)
	$(BIN)/python benchmarks/gradient_quality.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/digits_pruning.py
	$(BIN)/python benchmarks/data_preparation.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .coverage build dist
