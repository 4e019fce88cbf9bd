# Two commands for a fresh machine: `make bench` and `make test`. Each does all its own set-up.
PYTHON ?= python3.11
# Where torch's CPU build is found, if the package index that pip is set up for does not offer it.
TORCH_CPU_INDEX ?=

VENV := .venv
PY := $(VENV)/bin/python
# Named by the lock's content: a changed lock makes a new environment.
READY := $(VENV)/.ready-$(shell cat locks/cpu.txt pyproject.toml | sha256sum | cut -c1-16)

.PHONY: bench test lint types setup lock clean

# One engine after the other, a frozen trace, a report: results/<time>/. RATES= SCALE= OUT= and ARGS= give control.
bench: $(READY)
	$(PY) -m harness bench $(if $(RATES),--rates $(RATES)) $(if $(SCALE),--scale $(SCALE)) $(if $(OUT),--out $(OUT)) $(ARGS)

# Unit tests, the parity gate on real engines with its negative controls, and one short real pair.
test: $(READY)
	$(PY) -m pytest $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

setup: $(READY)

$(READY):
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not on PATH; install Python 3.11 or set PYTHON=" >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		$(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX)) -r locks/cpu.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

# Resolve locks/cpu.in anew.
lock: $(READY)
	$(PY) locks/resolve.py locks/cpu.in locks/cpu.txt

clean:
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
