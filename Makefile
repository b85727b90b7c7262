# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv and then starts at once.
# `make` alone lists what there is: every target's line ends with what it does, after ##.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
LIGHT := $(VENV)/.installed-light# what the demo needs, a third of everything
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo demo-flower test test-flower test-ui zoo demos results ui setup lint docs format clean

help:  ## this list
	@echo "Each sets up what it needs in $(VENV):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(LIGHT)  ## four methods compared on handwritten digits, about a minute
	$(BIN)/fedtailor demo

demo-flower: $(STAMP)  ## a server and four clients as processes, held to a run on one engine
	$(BIN)/python examples/flower_demo.py

test: $(STAMP)  ## the tests, on two processor cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-flower: $(STAMP)  ## faults of a real federation, some minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m flower tests/test_flower_faults.py

zoo: $(STAMP)  ## every method on digits, half an hour on 16 cores; then the page
	$(BIN)/python bench/zoo.py --out runs/zoo
	$(BIN)/python bench/zoo.py --collect runs/zoo
	$(BIN)/python bench/results.py

demos: $(STAMP)  ## the tables "On the demo" in docs/methods, ten minutes
	$(BIN)/python bench/demos.py

results: $(STAMP)  ## the pages of results, from bench/results
	$(BIN)/python bench/results.py

# The page in a real browser. Debian's Chromium is installed where it is missing and that is possible.
BROWSER := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name) 2>/dev/null)))
test-ui: $(STAMP)  ## the page, in a real Chromium
ifeq ($(BROWSER),)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	else echo "make test-ui needs Chromium: install it (Debian: apt-get install chromium) and try again"; exit 1; fi
endif
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ui tests/test_ui_browser.py

# The page's script and style sheet, from ui/src; they are kept in the repository, so that nobody else needs node.
ui:  ## the page's script and style sheet from ui/src; needs node
	cd ui && npm install --no-save --no-audit --no-fund && npm run build

setup: $(STAMP)  ## only what the others need

lint: $(STAMP)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)  ## lets ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the documentation, into site/
	$(BIN)/mkdocs build --strict

clean:  ## removes .venv and what was built
	rm -rf $(VENV) site build dist

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedtailor needs Python 3.11 or newer; name one with  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile --editable '.[$(1)]'
endef

# Python compiles what is imported, once; pip would compile all that is installed, in one thread.
$(LIGHT): pyproject.toml constraints.txt
	$(call install,report$(comma)ui$(comma)onnx)
	touch $@

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev)
	touch $(LIGHT) $@
