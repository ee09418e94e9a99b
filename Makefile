# Every habit of the project. `make help` lists them; each target sets up what it needs, and nothing more.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q -c $(CONSTRAINTS)
# One stamp for each set of packages: the demo does not wait for the developers' tools.
LAB := $(VENV)/.ready-lab
DEV := $(VENV)/.ready-dev
DOCS := $(VENV)/.ready-docs
RELEASE := $(VENV)/.ready-release
ECOSYSTEM := $(VENV)/.ready-ecosystem
JOBS ?= 4
WORKERS ?= 2
GPU_TESTS := tests/ops tests/inference tests/pytorch tests/lab/kernels tests/lab/replicas tests/lab/tuning tests/lab/test_philox.py \
	tests/test_compat.py
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-ecosystem test-gpu test-browser test-faults test-cluster lint format docs wheel bench records clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1;\2/p' Makefile | while IFS=';' read -r target text; do \
		printf '%-18s %s\n' "$$target" "$$text"; done

$(VENV)/.ready-torch: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

$(LAB): pyproject.toml $(VENV)/.ready-torch
	$(PIP) -e ".[lab]"
	@touch $@

$(DEV): pyproject.toml $(VENV)/.ready-torch
	$(PIP) -e ".[dev]"
	@touch $(LAB) $@

$(DOCS): $(DEV)
	$(PIP) -e ".[docs]"
	@touch $@

$(RELEASE): $(DEV)
	$(PIP) -e ".[release]"
	@touch $@

$(ECOSYSTEM): $(DEV)
	$(PIP) -e ".[ecosystem]"
	@touch $@

demo: $(LAB) ## what the library is for, on images that come with it: five sentences and a page (minutes)
	$(BIN)/dcpp demo --out dcpp-demo

test: $(DEV) ## run the tests and doctests with coverage; WORKERS=8 for eight processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term --cov-fail-under=95

# The outcomes go into the records, and from there into docs/ecosystem.md.
test-ecosystem: $(ECOSYSTEM) ## train, save and export with transformers, peft, lightning, accelerate, ...; write the table of the docs
	DROPCONNECTPP_OUTCOMES=records/ecosystem/outcomes.csv $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/ecosystem tests/integrations
	$(BIN)/python tools/lay_out_outcomes.py records/ecosystem/outcomes.csv records/ecosystem
	$(BIN)/python tools/fill_docs.py

# Uses the Python that is active: a GPU machine brings its own torch.
test-gpu: ## run the tests that need a CUDA device, in the active Python; JOBS=12 for twelve processes
	PYTHONPATH=src $(PYTHON) tests/side_by_side.py --jobs $(JOBS) $(GPU_TESTS)

# The page in a real browser and the LaTeX through a real compiler; `make test` skips both where they are missing.
test-browser: $(DEV) ## install Chromium and LaTeX (as root, Debian) and test the report with them
	command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
	command -v pdflatex >/dev/null || apt-get install -y --no-install-recommends texlive-latex-base
	$(BIN)/python -m pytest -q tests/lab/report/test_report_browser.py tests/lab/report/test_report_forms.py

# The counts stay in build/faults: what was interrupted goes on. `rm -r build/faults` begins anew.
test-faults: $(DEV) ## kill commands, fill disks, cut the power and damage files, by thousands (hours; goes on where it stopped)
	$(BIN)/python tests/faults/kills.py
	$(BIN)/python tests/faults/failures.py
	$(BIN)/python tests/faults/power_cuts.py
	for kind in checkpoints stores models experiments; do $(BIN)/python tests/faults/mutations.py $$kind || exit 1; done

test-cluster: $(DEV) ## kill workers, nodes and the driver of a Ray cluster on this machine, 30 times (half an hour; goes on where it stopped)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/cluster_kills.py

lint: $(DEV) ## check style (ruff), types (mypy) and the order of imports (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(DEV) ## apply what ruff can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS) ## run every code block of the documentation and build it as a site, in site/
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "The documentation is in site/index.html"

# The wheel is built from the sdist, and then used where the repository cannot be seen.
wheel: $(RELEASE) ## build wheel and sdist into dist/, check them, and run dcpp demo from both with every Python from 3.11 on that is here
	rm -rf build dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/install_wheel.py dist --constraints $(CONSTRAINTS)

bench: $(DEV) ## print the benchmark tables: quality of gradients, time and memory of a step, deployment
	$(BIN)/python benchmarks/gradient_quality.py
	$(BIN)/python benchmarks/layer_cost.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/digits_pruning.py
	$(BIN)/python benchmarks/digits_sparsity.py
	$(BIN)/python benchmarks/mask_memory.py
	$(BIN)/python benchmarks/data_preparation.py
	$(BIN)/python benchmarks/replica_step.py
	$(BIN)/python benchmarks/deployment.py
	$(BIN)/python benchmarks/workers.py --engines process host --tasks 1000

records: $(DEV) ## make every recorded table and figure again from its rows, and compare the bytes
	$(BIN)/python tools/rebuild_records.py

clean: ## remove all that the targets make
	rm -rf $(sort $(VENV) .venv) .venv-* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* \
		build dist site dcpp-demo src/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
