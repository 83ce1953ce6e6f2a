# torch is pinned here, and only here, so that the CPU build is taken where it is available.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Before 25.1 pip knows no groups.
INSTALL := -m pip install --quiet --disable-pip-version-check

TRAINERS := .venv-integrations

.PHONY: demo test test-integrations test-sanitized lint docs bench dist clean

demo: $(VENV)/.ready  ## normalizations side by side on the digits data, each at its own best rate; one to two minutes
	$(RUN) examples/digits.py

test: lint  ## lint, types, all tests
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# MODELS="--library timm --only resnet" tries some of the models, and does not write the page.
MODELS ?=

test-integrations: $(TRAINERS)/.ready  ## trainers, and models of other libraries: writes docs/measured/models.md; goes on where it was, offline once installed
	$(TRAINERS)/bin/python -m pytest tests/integrations
	PYTHONPATH=tests $(TRAINERS)/bin/python -m integrations.models $(MODELS)

# The kernels that check themselves are in a copy of the package, which nothing else imports.
SANITIZED := build/sanitized
CALLS ?= 100000
SEED ?= 0
UNDER_SANITIZERS = LD_PRELOAD="$(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:malloc_context_size=2:quarantine_size_mb=64 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZED)/lib $(RUN)

test-sanitized: $(VENV)/.ready  ## the kernels with checks of addresses and undefined behaviour: tests, CALLS random calls from SEED on, threads
	rm -rf $(SANITIZED)
	CC=gcc CXX=g++ STREAMNORM_SANITIZE=1 $(RUN) setup.py -q build --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/temp
	$(UNDER_SANITIZERS) -c "from streamnorm.backends.cpu import _native; assert '$(SANITIZED)' in _native.__file__"
	$(UNDER_SANITIZERS) -m pytest tests/test_kernels.py tests/test_sequence_kernels.py
	$(UNDER_SANITIZERS) -m pytest tests/test_conformance.py -k "cpu and not compiled"
	$(UNDER_SANITIZERS) tests/fuzz.py --calls $(CALLS) --seed $(SEED)
	$(UNDER_SANITIZERS) tests/stress_threads.py

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.ready  ## the documentation as a site, build/site/index.html; a test builds it too
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

bench: $(VENV)/.ready  ## what everything costs against torch.nn, about eight minutes; writes benchmarks/results
	MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=536870912 $(RUN) benchmarks/bench.py

# Environments with torch and the package, and nothing else.
CLEAN := build/clean
BUILD ?=

dist: $(VENV)/.ready  ## sdist and wheel: built, looked at, installed into clean environments, trained with; BUILD=--no-isolation
	rm -rf dist build/lib build/bdist.* $(CLEAN)
	STREAMNORM_KERNELS=1 $(RUN) -m build $(BUILD) --outdir dist .
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m check_wheel_contents dist/*.whl
	$(RUN) -m abi3audit --strict --verbose dist/*.whl
	ls -l dist
	for kind in whl tar.gz; do \
		$(PYTHON) -m venv $(CLEAN)/$$kind && \
		STREAMNORM_KERNELS=1 $(CLEAN)/$$kind/bin/python $(INSTALL) $(TORCH) dist/*.$$kind && \
		$(CLEAN)/$$kind/bin/python tests/installed.py --without numpy && \
		$(CLEAN)/$$kind/bin/python $(INSTALL) numpy && \
		$(CLEAN)/$$kind/bin/python tests/installed.py || exit 1; \
	done

clean:
	rm -rf $(VENV) $(TRAINERS) build dist src/*.egg-info src/streamnorm/backends/cpu/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

KERNELS := $(wildcard src/streamnorm/backends/cpu/*.cpp src/streamnorm/backends/cpu/*.h)

$(TRAINERS)/.ready: pyproject.toml setup.py $(KERNELS)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python $(INSTALL) "pip>=25.1"
	$(TRAINERS)/bin/python $(INSTALL) $(TORCH) -e . --group integrations
	touch $@

$(VENV)/.ready: pyproject.toml setup.py $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(INSTALL) "pip>=25.1"
	$(RUN) $(INSTALL) $(TORCH) -e ".[lab,cluster,streams,rl]" --group dev
	touch $@
