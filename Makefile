# LoRay: `make serve` and `make test` set up what they need by themselves; serving needs less.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
SERVES := $(VENV)/.ready
READY := $(VENV)/.ready-dev
# Each of a server's twenty processes would compile Ray, torch and transformers for itself: starts
# take twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve test test-all test-gpu check fmt parity sweep fuzz families bench soak kills \
	test-gateways lock test-clients image-steps clean

setup: $(READY)

$(SERVES): pyproject.toml
	@echo "==> setting up $(VENV) (about a minute at the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "LoRay needs Python 3.11 or newer: make PYTHON=python3.11 ..." && exit 1)
	$(PYTHON) -m venv $(VENV)
	@# Compiling all that is installed takes longer than what a start compiles of it.
	$(PIP) --no-compile -e .
	@touch $(SERVES)

$(READY): $(SERVES)
	@echo "==> adding what tests and checks need"
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps "lorax-client==0.6.3"
	@touch $(READY)

serve: $(SERVES)
	@$(BIN)/loray serve serve_config.yaml

# CI's: without the sweeps.
test: $(READY)
	$(BIN)/python -m pytest -m "not gpu and not sweep" -n 2

# The sweeps too.
test-all: $(READY)
	$(BIN)/python -m pytest -m "not gpu" -n 2

test-gpu: $(READY)
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device here"'
	$(BIN)/python -m pytest -m "gpu or ray" -rs

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

parity: $(READY)
	$(BIN)/python -m pytest -p tests.parity_report --disable-warnings \
		--deselect tests/modeling/parity/test_doc.py \
		-o python_files="test_*.py cells.py" tests/modeling/parity
	$(BIN)/python -m tests.modeling.models.sweep

# Every causal class of the installed transformers beside transformers + PEFT: two minutes.
# ARGS=--page writes docs/models.md.
sweep: $(READY)
	$(BIN)/python -m tests.modeling.models.sweep $(ARGS)

# Random configs, files, adapters and loads beside transformers + PEFT: two minutes, or
# ARGS="--seconds N --seed S".
fuzz: $(READY)
	$(BIN)/python -m tests.modeling.models.fuzz $(ARGS)

# Five families made of transformers' modules, two adapters each, over HTTP: two minutes.
families: $(READY)
	LORAY_TEST_SYSTEMS=families $(BIN)/python -m pytest tests/end_to_end/test_five_systems.py

# BENCH=table (see docs/performance/measure.md) or one of serving|offline|kernels|all_reduce|scheduler|ingress|cpu|
# workload|loading|staging|churn|fairness|structured|local|recovery; ARGS=...: see --help.
BENCH ?= serving
bench: $(READY)
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

# 10,000 requests over 500 adapters, a third cancelled: a few minutes on a CPU.
soak: $(READY)
	$(BIN)/python -m benchmarks.soak $(ARGS)

# Random kills each 15 to 21 s under load on two replicas, every answer right: MINUTES=60.
MINUTES ?= 60
kills: $(READY)
	$(BIN)/python -m benchmarks.recovery soak --minutes $(MINUTES) $(ARGS)

# LiteLLM before LoRay, in an environment of its own: it pins older versions of LoRay's packages.
GATEWAYS := .venv-gateways
$(GATEWAYS)/.ready: Makefile
	$(PYTHON) -m venv $(GATEWAYS)
	$(GATEWAYS)/bin/python -m pip install --disable-pip-version-check --progress-bar off "litellm[proxy]==1.106.2"
	@touch $@

test-gateways: $(READY) $(GATEWAYS)/.ready
	$(BIN)/python -m pytest tests/deployments/test_litellm.py

# Clients' own test suites before the demo, unmodified, in environments of their own: some minutes.
# ARGS: names of suites (tests/client_suites/suites.yaml).
test-clients: $(READY)
	$(BIN)/python -m tests.client_suites $(ARGS)

# deploy/constraints.txt anew: the versions in the images.
lock: $(READY)
	$(PIP) --quiet --dry-run --ignore-installed --report $(VENV)/report.json ".[gpu,padded,s3,batches,otlp]"
	$(BIN)/python -m tests.deploy.lock $(VENV)/report.json

# The steps of deploy/Containerfile for CPUs, in a new Debian: some minutes, as root, with debootstrap.
# IMAGE_ROOT: a folder that is not there. BINDS: folders that pip's own settings name.
IMAGE_ROOT ?= /tmp/loray-image
image-steps: $(READY)
	$(BIN)/python -m tests.deploy.containerfile $(IMAGE_ROOT) $(BINDS)

clean:
	rm -rf $(VENV) $(GATEWAYS) .venv-clients .mypy_cache .ruff_cache .pytest_cache .hypothesis
