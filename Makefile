# The verbs. `make test` and `make demo` need nothing but Python 3.11+ and (for make test) apt on a bare machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
