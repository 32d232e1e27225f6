# install, check, test, run. Long steps say what they do; a step that is done is not done again.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
# The first that runs: a shim may stand in the path for a version that is not there.
BASE_PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do $$p -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo $$p && break; done)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Else every process of the first tests compiles the CPU kernels for itself, all at the same time.
COMPILE := $(BIN)/python -P -c "from shoal_kernels import warm; warm()"

.DEFAULT_GOAL := help
.PHONY: help install install-clients run test test-long test-gpu check proto lock lock-clients bench-kv

help:
	@echo "make run         install, start the mesh, ask one question, stay up on http://127.0.0.1:8000 (ONCE=1: exit after the answer)"
	@echo "make test        the everyday tests;  make test-long  those that take minutes (installs other people's clients first)"
	@echo "make test-gpu    those that need a CUDA device"
	@echo "make check       format, lint, types, borders, protos"
	@echo "make proto       generate protos/gen;  make lock  write constraints.txt from .venv;  make lock-clients  the clients' own"
	@echo "make bench-NAME  run tests/bench/NAME.py, write build/bench/NAME.json;  make bench-kv  all of the KV cache's"

install:
	@bash deploy/install.sh "$(BASE_PYTHON)" "$(VENV)"

# Other people's clients of the gateway, pinned, apart from what Shoal itself runs on.
install-clients:
	@bash deploy/install_clients.sh "$(BASE_PYTHON)" "$(CLIENTS)"

run: install
	@exec $(BIN)/shoal run $(if $(ONCE),--once)

test: install
	$(COMPILE)
	$(PYTEST) -n auto --dist loadfile -m "not long and not gpu"

test-long: install install-clients
	$(COMPILE)
	$(PYTEST) -m "long and not gpu"

# The model against itself in every shape once more, on the device.
test-gpu: install
	$(PYTEST) -m gpu
	SHOAL_TEST_DEVICE=cuda $(PYTEST) tests/exactness/test_one_answer.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy protos/generate.py kernels services tests
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/python protos/generate.py --check
	@bash deploy/check_breaking.sh $(BIN)/buf

proto: install
	$(BIN)/python protos/generate.py

lock:
	$(BIN)/python deploy/lock.py

lock-clients:
	$(CLIENTS)/bin/python deploy/lock.py tests/clients/constraints.txt

bench-kv: install
	@status=0; for one in index traces wire ssd nano; do $(MAKE) bench-kv-$$one || status=1; done; exit $$status

bench-%: install
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONPATH=tests $(BIN)/python -P -m bench.$(subst -,_,$*) $(ARGS)
