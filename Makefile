# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv and then starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-flower test test-flower zoo results setup lint docs format clean

demo: $(STAMP)
	$(BIN)/fedtailor demo

demo-flower: $(STAMP)
	$(BIN)/python examples/flower_demo.py

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-flower: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m flower tests/test_flower.py

zoo: $(STAMP)  # every method on digits, half an hour on 16 cores; then the page
	$(BIN)/python bench/zoo.py --out runs/zoo
	$(BIN)/python bench/zoo.py --collect runs/zoo
	$(BIN)/python bench/results.py

results: $(STAMP)  # the pages of results, from bench/results
	$(BIN)/python bench/results.py

setup: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedtailor needs Python 3.11 or newer; name one with  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
