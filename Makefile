# Two commands matter: `make demo` trains a small model, `make test` runs the test suite. Both create .venv first.
# `make slow` runs a share of the slow tests, `make slow SHARE=all` every one. `make faults` tries the tests themselves.
# `make docs` builds the site into build/site; open index.html there, no server is needed.
# `make engine` creates .venv-engine, in which vLLM runs on a CPU for the tests marked `engine`.
# `make hub-kernel` writes build/hub-kernel, a source of Hugging Face's kernel-builder.

PYTHON ?= python3
VENV := .venv
COMMA := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONFIG := examples/reverse_digits/config.toml
REQUIREMENTS := pyproject.toml constraints.txt

define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(1)]'
	touch $@
endef

.PHONY: demo test slow faults docs engine hub-kernel lint format bench clean

# A stamp that a later line of its rule failed after would pass for a whole environment.
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/fastrl train $(CONFIG)

# Containers often forbid bytecode: then each of the many processes that tests start would compile the package again.
test slow: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(OPTIONS)

slow: $(VENV)/.installed-test
	$(BIN)/python tests/support/run_slow.py $(SHARE)

faults: $(VENV)/.installed-test
	$(BIN)/python tests/support/run_faults.py $(ONLY)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --clean

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench
	$(BIN)/fastrl bench

$(VENV)/.installed-demo: $(REQUIREMENTS)
	$(call install,train)

# Triton interprets the kernels where there is no GPU: a CPU build of torch brings none, any other has its own.
# The CUDA C++ kernel is compiled for GPUs that are not here: a CPU build of torch brings no NVRTC (58 MB), others do.
NVRTC := nvidia-cuda-nvrtc==13.5.37

# These are read by tests and too heavy to install: their files alone, for any Python, in a folder of their own.
PEERS := verl==0.9.1 openrlhf==0.11.2 megatron-core==0.16.1 torchtitan==0.3.0
ANY_PYTHON := --only-binary :all: --platform manylinux1_x86_64 --platform manylinux_2_28_x86_64 \
	--python-version 3.11 --implementation cp --abi cp311

$(VENV)/.installed-test: $(REQUIREMENTS) Makefile
	$(call install,dev$(COMMA)train$(COMMA)lora$(COMMA)trl$(COMMA)datasets$(COMMA)math)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet --constraint constraints.txt triton
	$(BIN)/python -c 'from fastrl.backend.cuda.nvrtc import why_unavailable as why; exit(why())' 2>/dev/null \
		|| $(PIP) install --quiet $(NVRTC)
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/share/fastrl-peers $(ANY_PYTHON) $(PEERS)

$(VENV)/.installed-docs: $(REQUIREMENTS)
	$(call install,docs)

$(VENV)/.installed-bench: $(REQUIREMENTS)
	$(call install,bench$(COMMA)train)

# vLLM pins other versions than ours, so it lives apart. Nothing of it but what is pinned by hash is installed.
ENGINE := .venv-engine
ENGINE_PIP := $(ENGINE)/bin/python -m pip --disable-pip-version-check
ENGINE_REQUIREMENTS := tests/training/engines/requirements.txt

engine: $(ENGINE)/.installed

$(ENGINE)/.installed: $(ENGINE_REQUIREMENTS) $(REQUIREMENTS)
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE_PIP) install --quiet --constraint constraints.txt torch
	$(ENGINE_PIP) install --quiet --no-deps --require-hashes --requirement $(ENGINE_REQUIREMENTS)
	$(ENGINE_PIP) install --quiet --no-deps --editable .
	touch $@

hub-kernel:
	$(PYTHON) release/hub_kernel.py build/hub-kernel

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
