# make demo | test | test-all | lint | gpu-test | gpu-test-all | compiled | kernels. Needs Python 3.11 or newer with venv and pip, and nothing else.
# Each sets up .venv by itself, once; `rm -rf .venv` starts afresh. Pick an interpreter with PYTHON=python3.12.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
CONSTRAINTS := constraints/cpu.txt constraints/cuda.txt
CHOSEN := $(VENV)/constraints.txt
RUN := $(VENV)/bin/python
# PIP_USER, if set, would install beside the environment.
PIP := PIP_USER=0 $(RUN) -m pip install -qq --disable-pip-version-check --constraint $(CHOSEN) $(PIP_ARGS)

WORKERS := --numprocesses auto --maxprocesses 4 --dist worksteal --durations 20
# Most of their time is the compiler's, on CPU cores.
GPU_WORKERS := --numprocesses logical --maxprocesses 12 --dist worksteal --durations 20

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint gpu-test gpu-test-all compiled kernels in-place

help:
	@echo "make demo          answer a question with the default model"
	@echo "make test          run the tests on the CPU"
	@echo "make test-all      run those that make test leaves out too, and compile every kernel anew"
	@echo "make lint          ruff and pyright"
	@echo "make gpu-test      run the tests that need a CUDA GPU"
	@echo "make gpu-test-all  run those that make gpu-test leaves out too"
	@echo "make compiled      compile what changed of the kernels that tests hold reports of"
	@echo "make kernels       compile the prebuilt kernels and plan the built-in models' steps, after a change of theirs"

demo: $(VENV)/.ready-demo
	@$(VENV)/bin/onewave chat --message "What is the capital of France?" --stats

# More than four processes take much memory.
test: $(VENV)/.ready-dev
	@$(RUN) -m pytest $(WORKERS) $(PYTEST_ARGS)

# With the full products of parameters and the large shapes too.
test-all: $(VENV)/.ready-dev
	@$(RUN) -m pytest $(WORKERS) -m "not gpu" $(PYTEST_ARGS)

lint: $(VENV)/.ready-dev
	@$(VENV)/bin/ruff check src tests tools
	@$(VENV)/bin/ruff format --check src tests tools
	@$(VENV)/bin/pyright

gpu-test: GPU_TESTS := gpu and not slow
# With the full products of parameters too.
gpu-test-all: GPU_TESTS := gpu
# A machine with a GPU usually has a Python whose torch knows it; that one is used as it is, in one process where it has
# no pytest-xdist.
gpu-test gpu-test-all:
	@if $(PYTHON) -c 'import pytest, torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then \
		export PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}"; run="$(PYTHON)"; \
	else \
		$(MAKE) --no-print-directory $(VENV)/.ready-dev || exit; run="$(RUN)"; \
	fi; \
	workers=$$($$run -c 'import xdist' 2>/dev/null && echo "$(GPU_WORKERS)"); \
	$$run -m pytest tests -m "$(GPU_TESTS)" $$workers $(PYTEST_ARGS)

# No device is needed. Only what is stale is compiled.
compiled: $(VENV)/.ready-dev
	@PYTHONPATH=tests $(RUN) -m kit.compiled

# No GPU is needed, but the Triton that the kernels are for.
kernels: $(VENV)/.ready-dev
	@$(RUN) tools/programs.py
	@PYTHONPATH=tests $(RUN) tools/prebuild.py
	@PYTHONPATH=tests $(RUN) tools/launchers.py

# A virtual environment knows its own place: that of a clone which was moved would fail, or run another clone's code.
in-place:
	@test ! -s $(VENV)/.ready-python || test "$$(cat $(VENV)/.ready-python)" = "$(CURDIR)" || { \
		echo "error: $(VENV) was made in $$(cat $(VENV)/.ready-python); rm -rf $(VENV) and run make again" >&2; exit 2; }

$(VENV)/.ready-python: | in-place
	@$(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is missing or older than Python 3.11; name another with make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "error: $(PYTHON) -m venv failed; install Python's venv and pip (Debian: apt-get install python3-venv)" >&2; exit 2; }
	@echo "$(CURDIR)" > $@

# torch goes first: asked for together with the rest, pip may pick another build of it. Where an index has CUDA builds
# alone, the first constraints contradict themselves, as those of the second do not.
$(VENV)/.ready-torch: $(CONSTRAINTS) | in-place $(VENV)/.ready-python
	@for file in $(CONSTRAINTS); do \
		cp $$file $(CHOSEN); \
		echo "Installing PyTorch into $(VENV) ($$file)"; \
		$(PIP) torch 'triton; sys_platform == "linux"' numpy 2> $(VENV)/pip.log && break; \
		test $$file = constraints/cpu.txt && grep -q "No matching distribution\|conflicting dep" $(VENV)/pip.log || { \
			cat $(VENV)/pip.log >&2; exit 1; }; \
		echo "No such PyTorch without CUDA for this Python: the build with CUDA comes instead, some GB"; \
	done
	@touch $@

$(VENV)/.ready-demo: pyproject.toml $(VENV)/.ready-torch | in-place
	@echo "Installing onewave into $(VENV)"
	@$(PIP) --editable .
	@echo "Compiling the CPU kernels"
	@$(RUN) -m onewave.ops.cpu.precompile
	@touch $@

$(VENV)/.ready-dev: pyproject.toml $(VENV)/.ready-torch | in-place
	@echo "Installing onewave and its test tools into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.ready-demo
