# Every habit of the project: make demo | test | test-gpu | lint | docs | bench. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 4
WORKERS ?= 2
GPU_TESTS := tests/ops/test_gpu.py tests/inference/test_gpu_training.py tests/pytorch/test_compile.py tests/lab/test_philox.py \
	$(wildcard tests/lab/kernels/test_*_kernels.py) tests/lab/replicas/test_convolutions.py tests/lab/replicas/test_stack.py \
	tests/lab/replicas/test_evaluation.py tests/lab/tuning/test_tuning.py
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-gpu test-browser lint format docs bench clean

help:
	@echo "make demo      Table 1 in small: four methods on embedded pictures, tables and a page (minutes)"
	@echo "make test      run the tests and doctests with coverage; WORKERS=8 for eight processes"
	@echo "make test-gpu  run the tests that need a CUDA device, in the current Python; JOBS=12 for twelve processes"
	@echo "make test-browser  install Chromium and LaTeX (as root, Debian) and test the report with them"
	@echo "make lint      ruff and mypy"
	@echo "make docs      run every code block of the documentation and build it as a site"
	@echo "make bench     print the benchmark tables"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/dcpp demo --out dcpp-demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --cov --cov-report=term --cov-fail-under=95

# Uses the Python that is active: a GPU machine brings its own torch.
test-gpu:
	PYTHONPATH=src $(PYTHON) tests/side_by_side.py --jobs $(JOBS) $(GPU_TESTS)

# The page in a real browser and the LaTeX through a real compiler; `make test` skips both where they are missing.
test-browser: $(READY)
	command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
	command -v pdflatex >/dev/null || apt-get install -y --no-install-recommends texlive-latex-base
	$(BIN)/python -m pytest -q tests/lab/report/test_report_browser.py tests/lab/report/test_report_forms.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "The documentation is in site/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/gradient_quality.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/digits_pruning.py
	$(BIN)/python benchmarks/mask_memory.py
	$(BIN)/python benchmarks/data_preparation.py
	$(BIN)/python benchmarks/replica_step.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .coverage build dist
