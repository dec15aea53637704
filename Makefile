# Two commands do everything on a fresh machine: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test pytest lint docs audit matrix mutants bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Lint takes one core: the tests need not wait for it.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=src $(BIN)/mypy

# The documents as a site, in site/; a warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Compiles the emitted SM100 kernels with several Triton releases, each alone in its environment.
audit: $(STAMP)
	$(BIN)/python -m tilewright.tools.matrix.audit_matrix

# The demo and a part of the tests with other releases of torch, Triton and transformers; some 5 GB
# for each row, removed after it. ROWS=newest,oldest for these only, ROWS=released for PyPI's today.
matrix: $(STAMP)
	$(BIN)/python -m tilewright.tools.matrix.support_matrix --rows "$(ROWS)"

# Mutation testing: plants N random faults, one at a time, and runs the tests that should catch them.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --seed $(or $(SEED),0) --count $(or $(N),10)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) site .audit .matrix .mypy_cache .pytest_cache .ruff_cache
