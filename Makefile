# `make demo` shows what Headrace does, `make check test` is what a change must pass. Needs make and Python >= 3.11.

ifeq ($(wildcard pyproject.toml),)
$(error run make in the folder of its Makefile: make -C FOLDER ...)
endif

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
JOBS ?= $(shell n=`nproc 2>/dev/null || echo 1`; if [ $$n -gt 4 ]; then echo 4; else echo $$n; fi)
VERSIONS := 3.11 3.12 3.13

# An environment is as good as new while pyproject.toml and the place of this folder stay what they were.
KEY := $(shell { cat pyproject.toml && pwd; } | cksum | cut -d ' ' -f 1)
RUN := $(VENV)/.run-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PIP_ROOT_USER_ACTION := ignore

# With PYTHON=... only an environment of that very Python will do; without, any that is there.
prefix = -c 'import sys; print(sys.base_prefix)'
ifneq ($(PYTHON),)
ifneq ($(shell "$(PYTHON)" $(prefix) 2>&1),$(shell $(BIN)/python $(prefix) 2>/dev/null))
REBUILD := $(shell rm -f $(VENV)/.run-* $(VENV)/.dev-*)yes
endif
endif

.PHONY: help python demo test check format soak bench notebooks test-lowest test-versions clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           generate recordings, convert, verify and load them (first run: a few minutes of installing)"
	@echo "make test           the tests, a process a core (PYTEST_ARGS='-k loaders -x' passes arguments on, JOBS=0 keeps to one)"
	@echo "make check          ruff, mypy, import-linter"
	@echo "make format         let ruff rewrite what it can"
	@echo "make soak           the long tests, with many more random examples"
	@echo "make bench          the benchmarks"
	@echo "make notebooks      run every notebook from top to bottom"
	@echo "make test-lowest    the tests with the oldest supported dependencies"
	@echo "make test-versions  the tests with each supported Python found here"
	@echo "make clean          remove environments, caches and the demo"

demo: $(RUN)
	@$(BIN)/headrace demo demo/

test: $(DEV)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

check: $(DEV)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV)
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

soak: $(DEV)
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGS)
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 3600 $(PYTEST_ARGS)

bench: $(DEV)
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

notebooks: $(RUN)
	@$(PIP) install --quiet -e '.[notebook]'
	@for file in notebooks/*.ipynb; do \
	    [ -e "$$file" ] || { echo "no notebooks yet"; break; }; \
	    $(BIN)/python -m nbconvert --to notebook --execute --output-dir build/notebooks "$$file" || exit 1; \
	done

test-lowest:
	@$(MAKE) --no-print-directory VENV=.venv-lowest PYTHON="$(or $(PYTHON),python3.11)" \
	    EXTRA=test PIP_ARGS="-c tests/lowest-requirements.txt" test

test-versions:
	@failed=; for version in $(VERSIONS); do \
	    python=`ls -d "$$HOME"/.pyenv/versions/$$version.*/bin/python 2>/dev/null | sort -V | tail -n 1`; \
	    if python$$version -c '' 2>/dev/null; then python=python$$version; fi; \
	    if [ -z "$$python" ]; then echo "== Python $$version: not found, skipped"; continue; fi; \
	    echo "== Python $$version"; \
	    $(MAKE) --no-print-directory VENV=.venv-$$version PYTHON="$$python" EXTRA=test test || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "== failed on Python$$failed"; exit 1; fi

clean:
	rm -rf .venv .venv-* build dist demo demo.work .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find pipeline tasks schemas tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------------------------

EXTRA ?= dev
PIP_ARGS ?=

$(RUN):
	@$(fresh_environment)
	@echo "Installing Headrace into $(VENV) (once; a few minutes)"
	@$(PIP) install --quiet $(PIP_ARGS) -e .
	@rm -f $(VENV)/.run-*; touch $@

$(DEV):
	@$(fresh_environment)
	@echo "Installing Headrace with its development tools into $(VENV) (once; a few minutes)"
	@$(PIP) install --quiet $(PIP_ARGS) -e '.[$(EXTRA)]'
	@rm -f $(VENV)/.run-* $(VENV)/.dev-*; touch $(RUN) $@

# Keep an environment that works; replace one of another Python, half made, or whose Python is gone.
fresh_environment = { [ -z "$(REBUILD)" ] && $(BIN)/python -m pip --version >/dev/null 2>&1; } \
	|| { python=$$(sh .ci/find-python "$(PYTHON)") && "$$python" -m venv --clear $(VENV); }

# The Python to use, or the one line that gets one.
python:
	@sh .ci/find-python "$(PYTHON)"
