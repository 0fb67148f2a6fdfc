# Two commands do everything on a machine with Python >= 3.11 and make:
#   make demo    train a small network on two workers and show the result
#   make test    run the tests; `make test-all` also repeats them with other frameworks and settings
# `make test-lowest test-latest` tests each extra with its oldest and its newest versions;
# PYTHONS="python3.11 python3.13", EXTRAS="xgboost tune", and PINS="torch==2.13.0" select them.
# `make check` runs the linters and the type checker, `make bench` the benchmarks, `make docs` builds the site.
# `make conformance` runs the launcher tests of PyTorch and Accelerate with `drawbar launch`.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TESTS_AT_A_TIME ?= 3
# Write bytecode files even if the shell disables them. Otherwise each test process compiles all modules.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all test-lowest test-latest check bench conformance docs clean

demo: $(VENV)/demo
	$(BIN)/python examples/pytorch.py --storage-path demo-results

# Tests mostly wait, so several run in parallel, each process with its own Ray instance. One process
# runs all tests of a file, so that the fixtures of a file are made once. Tests that depend on the
# load of the machine run afterwards, one at a time; only their files are imported.
# A test that fails runs once more without other tests. If it passes then, it is a defect of the
# test, which the output shows, but the other changes can be tested.
RUN_FAILED_AGAIN = { [ $$? -eq 1 ] && echo 'These tests failed. They run once more, one at a time:' \
	&& $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -v; }

define RUN_TESTS
	$(BIN)/python -m pytest -m 'not alone$(1)' -n $(TESTS_AT_A_TIME) --dist loadfile || $(RUN_FAILED_AGAIN)
	$(BIN)/python -m pytest -m 'alone$(1)' $(shell grep -rl mark.alone tests)
endef

test: $(VENV)/dev
	$(call RUN_TESTS, and not nightly)

test-all: $(VENV)/dev
	$(call RUN_TESTS)

PYTHONS ?= $(PYTHON)
TEST_VERSIONS = $(VENV)-uv/bin/python tests/versions.py $(1) --python $(PYTHONS) \
	$(if $(EXTRAS),--extras $(EXTRAS)) $(if $(PINS),--pin $(PINS))

test-lowest: $(VENV)-uv/bin/uv
	$(call TEST_VERSIONS,lowest)

test-latest: $(VENV)-uv/bin/uv
	$(call TEST_VERSIONS,latest)

$(VENV)-uv/bin/uv:
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/python -m pip install --quiet uv

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks

conformance: $(VENV)/conformance
	$(BIN)/python -m conformance $(if $(PYTORCH),--pytorch $(PYTORCH))

docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict

define CREATE_VENV
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Drawbar needs Python >= 3.11; set PYTHON=...")'
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

# Each of these files marks an installed set of extras, which is updated when the metadata of the project changes.
$(VENV)/demo: pyproject.toml constraints.txt
	$(CREATE_VENV)
	@echo "installing Drawbar with PyTorch and scikit-learn into $(VENV): about a minute the first time"
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt
	$(CREATE_VENV)
	@echo "installing Drawbar and what its tests need into $(VENV): some minutes the first time"
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/bench: $(VENV)/dev
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/conformance: $(VENV)/dev
	$(PIP) --editable '.[conformance]'
	touch $@

$(VENV)/docs: $(VENV)/dev
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-uv $(VENV)-versions site dist .cache
