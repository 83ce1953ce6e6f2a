# torch is pinned here, and only here, so that the CPU build is taken where it is available.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

TRAINERS := .venv-integrations

.PHONY: demo test test-integrations lint bench clean

demo: $(VENV)/.ready  ## normalizations side by side on the digits data, about a minute
	$(RUN) examples/digits.py

test: lint  ## lint, types, all tests
	$(RUN) -m pytest -n 2 --dist loadfile

test-integrations: $(TRAINERS)/.ready  ## real training runs in Lightning, Accelerate and transformers, offline once installed
	$(TRAINERS)/bin/python -m pytest tests/integrations

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.ready  ## what everything costs against torch.nn, about six minutes; writes benchmarks/results
	MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=536870912 $(RUN) benchmarks/bench.py

clean:
	rm -rf $(VENV) $(TRAINERS) build dist src/*.egg-info src/streamnorm/kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

KERNELS := $(wildcard src/streamnorm/kernels/*.cpp src/streamnorm/kernels/*.h)

$(TRAINERS)/.ready: pyproject.toml setup.py $(KERNELS)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e ".[integrations]"
	touch $@

$(VENV)/.ready: pyproject.toml setup.py $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(TORCH) -e ".[dev]"
	touch $@
