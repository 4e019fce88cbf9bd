# Two commands for a fresh machine: `make bench` and `make test`. Each does all its own set-up.
PYTHON ?= python3.11
# Where torch's CPU build is found, if the package index that pip is set up for does not offer it.
TORCH_CPU_INDEX ?=

VENV := .venv
PY := $(VENV)/bin/python
# Named by the lock's content: a changed lock makes a new environment.
READY := $(VENV)/.ready-$(shell cat locks/cpu.txt pyproject.toml | sha256sum | cut -c1-16)

.PHONY: bench bench-gpu test lint types setup lock lock-images image wheels clean

# One engine after the other, a frozen trace, a report: results/<time>/. RATES= SCALE= OUT= and ARGS= give control.
bench: $(READY)
	$(PY) -m harness bench $(if $(RATES),--rates '$(RATES)') $(if $(SCALE),--scale '$(SCALE)') $(if $(OUT),--out '$(OUT)') $(ARGS)

# The pair on this host's GPUs, every arm's engine at once: SLICE= kimi-k3 | mla. It needs vLLM's CUDA wheel in GPU_PYTHON's
# environment; with IMAGE= it serves from that image, by digest, one arm after the other. ARGS=--dry-run prints every step.
GPU_PYTHON ?= $(PY)

bench-gpu: $(if $(filter $(PY),$(GPU_PYTHON)),$(READY))
	$(GPU_PYTHON) -m harness bench --gpu $(if $(SLICE),--slice '$(SLICE)') $(if $(RATES),--rates '$(RATES)') \
		$(if $(filter-out undefined default file,$(origin IMAGE)),--image '$(IMAGE)') $(if $(OUT),--out '$(OUT)') $(ARGS)

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

# Images. TARGET= serve | serve-sm120 | serve-cpu | bench. BASE= replaces the pinned base; CA= and PIP_CONF= are files that
# the build sees as secrets; OFFLINE=1 installs from wheels/ alone. DOCKER=/usr/bin/docker if another client lacks buildx.
DOCKER ?= docker
TARGET ?= serve
IMAGE ?= kimi-k3-serve:$(TARGET)
KIMI := $(PYTHON) -m kimi_k3_serve

image:
	@test -z "$$(git status --porcelain)" || { echo "error: the tree has uncommitted changes; commit them, then make image" >&2; exit 2; }
	DOCKER_BUILDKIT=1 $(DOCKER) build --target $(TARGET) --tag $(IMAGE) \
		--build-arg TARGET=$(TARGET) --build-arg BASE="$(or $(BASE),$$($(KIMI) lock base))" \
		--build-arg LOCK_SHA256="$$($(KIMI) lock sum --target $(TARGET))" \
		--build-arg REVISION="$$(git rev-parse HEAD)" --build-arg VERSION="$$($(KIMI) version)" \
		$(if $(CA),--secret id=ca$(comma)src=$(CA)) $(if $(PIP_CONF),--secret id=pip$(comma)src=$(PIP_CONF)) \
		$(if $(OFFLINE),--build-arg PIP_NO_INDEX=1) .
	DOCKER=$(DOCKER) $(KIMI) lock verify --image $(IMAGE)

comma := ,

# What `make image OFFLINE=1` installs, from the package index that pip is set up for on this machine.
wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
		$(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX)) -r locks/build.txt --dest wheels
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
		$(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX)) -r locks/$(TARGET).txt --dest wheels

# Resolve the images' locks anew. CHECK=1 writes nothing: are they still solutions, and is every wheel offered with the
# locked hash? UV_FIND_LINKS= where torch's CPU build is, if not on the index.
lock-images: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r locks/uv.txt
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) locks/resolve_images.py $(if $(CHECK),--check)

clean:
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
