# make train    set up, then train the demo on the Python standard library's source
# make test     set up, then gates of what is stale and of a random tenth of the rest; of other tests a random tenth where all of them
#               passed on this very tree (baselines/tests.json), else all
# make test-all set up, then all tests and all gates; of planted faults a draw, as in `make test`
# make catches  set up, then every planted fault and freshly seeded mutants, which takes hours: alpha gate catches --all
# make stamp    set up, then all tests, and gates as `make test` does; where all pass, baselines/tests.json says so of this tree
# make kernels  set up with the pinned CUDA compiler from PyPI, then compile every GPU kernel and compare with what is committed
PYTHON ?= python3
# Tests run as the CPU class whose evidence ships; `make test ALPHA_CPU=` takes all that this CPU has, and measures its gates first.
test test-all catches stamp gates: export ALPHA_CPU ?= avx2
# Where CI is set, pytest explains a failed comparison by a diff without bounds: hours, for a megabyte of bytes. `pytest -vv` asks for it.
unexport CI BUILD_NUMBER
VENV := .venv
BIN := $(VENV)/bin
# Two workers: tests that must not be disturbed are marked `alone`, and the other worker waits for them (alpha/gates/plugin.py). Three were
# little faster on two cores, and what waits for a processor is then taken for what hangs.
WORKERS ?= 2
# A test that hangs is named, with every thread's stack, and its worker replaced; the slowest test takes a tenth of this.
TIMEOUT ?= 600
PYTEST := $(BIN)/python -m pytest suites -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout $(TIMEOUT) --timeout-method thread

.PHONY: setup train test test-all catches stamp nvcc kernels lint gates clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Alpha needs Python 3.10 or newer; came: " + sys.version.split()[0] + "; do: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)")'
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed. do: install the venv module of this Python (Debian: apt install python3-venv)"; exit 3; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

train: setup
	@$(BIN)/alpha train configs/demo.toml

test: setup
	@$(PYTEST)

test-all: setup
	@$(PYTEST) --all

# No test: one that plants them all takes longer than any test may.
catches: setup
	@$(BIN)/alpha gate catches --all

stamp: setup
	@$(PYTEST) --stamp

nvcc: $(VENV)/.nvcc

$(VENV)/.nvcc: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[nvcc]'
	@touch $@

# What is in .alpha/cubins under a digest of all that decides a cubin is not compiled again; one of every source file is, to prove it.
kernels: nvcc
	@$(BIN)/alpha kernels check
	@$(BIN)/alpha kernels check --fresh --sample 1 --no-audit

lint: setup
	@$(BIN)/ruff check alpha suites kernels
	@$(BIN)/mypy

# 3: the lines of evidence that changed are of another class of machines, or there is no history to tell by.
gates: setup
	@$(BIN)/alpha gate check
	@$(BIN)/alpha gate audit --changed || test $$? = 3

clean:
	rm -rf $(VENV) .alpha runs build
