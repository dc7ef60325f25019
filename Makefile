# Two commands set everything up: `make demo` and `make test`. The rest is for who works on the code.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
# Largest prefill window of `make bench`, in (token, key) pairs; all of them: 1e12, on a GPU.
PAIRS ?= 1e7
# Words for `make mutants`: --tested where `make test` has just passed, and parts of names.
MUTANTS ?=

export PYTHONUNBUFFERED = 1
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)

# An older driver lacks functions that cuda-bindings asks for, which is no error of a kernel.
SANITIZER = PYTHONPATH=src:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
  --report-api-errors no --num-cuda-barriers 65536

.PHONY: demo test test-gpu sanitize model lint mutants bench clean

# What the project needs, pinned; an installed set is not looked at again until its list changes.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.installed: requirements/demo.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the demo needs into $(VENV) (torch is the large one) ..."
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/dev.installed: requirements/dev.txt $(VENV)/demo.installed
	@echo "Installing what the tests need into $(VENV) ..."
	$(PIP) -r requirements/dev.txt
	@touch $@

demo: $(VENV)/demo.installed  ## replay the sample trace over four ranks, about a minute
	$(VENV)/bin/msa-icp demo --report demo-report

test: $(VENV)/dev.installed  ## everything that runs without a GPU
	$(VENV)/bin/python -m pytest -m ranks_at_once
	$(VENV)/bin/python -m pytest -n auto -m "not ranks_at_once"
	TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -n auto -k triton-cpu
	EMULATE_CUDA=1 $(VENV)/bin/python -m pytest -n auto -k cuda-cpu

test-gpu:  ## the same tests on the accelerator, with the python at hand and nothing installed
	PYTHONPATH=src $(PYTHON) -m pytest -k cuda

sanitize:  ## every kernel on small inputs under the four tools of compute-sanitizer, on a GPU
	for backend in cuda triton; do for tool in memcheck racecheck initcheck synccheck; do \
	  echo "$$tool $$backend"; $(SANITIZER) --tool $$tool $(PYTHON) tests/sanitized.py $$backend || exit 1; \
	done; done

model:  ## the exchange explored exhaustively (docs/exchange.md), about a minute; needs nothing but Python
	PYTHONPATH=tests $(PYTHON) -m model

bench:  ## the scorers against their limits, with the python at hand
	PYTHONPATH=src $(PYTHON) benchmarks/decode_score.py --name local --out bench-results
	PYTHONPATH=src $(PYTHON) benchmarks/prefill.py --name local --max-pairs $(PAIRS) --out bench-results

lint: $(VENV)/dev.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

mutants: $(VENV)/dev.installed  ## planted faults, each of which must make the suite fail
	PYTHONPATH=tests $(VENV)/bin/python -m mutants $(MUTANTS)

clean:
	rm -rf $(VENV) demo-report bench-results build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
