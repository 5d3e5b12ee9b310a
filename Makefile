# One command per target; `make help` lists them. A second call reuses the environment and the build.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
TORCH ?= torch==2.11.0
# GPU runs: the folder of their logs, the seconds that one process of pytest, one sanitizer on one file or one family of
# benchmarks may take, and the processes that share the GPUs in `test-gpu`: 15 for each GPU of 141 GB if it has the cores,
# 11 for each of 80 GB. Tests that find no memory beside others run again alone.
OUT ?= runs/gpu
LIMIT ?= 7200
JOBS ?= 4
# Where `kernels-folder` writes.
FOLDER ?= build/kernels/folder
# Processes of `test`: most tests are calls of microseconds, which keep one core busy.
WORKERS ?= 2
# A PY of one's own needs no environment here: it has torch, and a library is in place or in build/cuda.
READY = $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.built)

SOURCES := $(shell find csrc -type f) setup.py pyproject.toml htree_ops/version.py

.PHONY: help demo docs test test-gpu test-two-gpus test-vllm vllm-environment bench bits sanitize lint format sdist wheel kernels-folder cuda-build clean preflight
.DEFAULT_GOAL := help

# A build that keeps what it prints in a log and shows what is compiled, errors and what setup.py decides:
# $(call logged,LOG,COMMAND)
SHELL := bash
define logged
@mkdir -p $(dir $(1))
@set -o pipefail; $(2) 2>&1 | tee $(1) | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\]\) .* -c \([^ ]*\).*/\1 \2/p; /\berror: /p; /^ *htree_ops: /p' \
  || { tail -n 20 $(1); echo "failed; $(1) has every line"; exit 1; }
endef

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(VENV)/.built ## train a small tree-attention language model on real text
	$(PY) examples/train_lm.py $(ARGS)

test: $(VENV)/.built ## every test that this machine can run, in WORKERS=2 processes
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-gpu: $(READY) ## the tests on the GPU, no skips allowed: OUT=folder for logs, JOBS=processes, PY=interpreter
	JOBS="$(JOBS)" tests/gpu.sh test "$(OUT)" "$(LIMIT)" "$(PY)" $(ARGS)

test-two-gpus: $(READY) ## what needs two GPUs: tests on NCCL, efficiency of context parallelism, training runs
	tests/two_gpus.sh "$(OUT)" "$(LIMIT)" "$(PY)"

# An environment of its own: vLLM for machines without a GPU, and torch as PY has it.
VLLM ?= build/vllm
vllm-environment: $(if $(READY),$(VENV)/.installed)
	@tests/vllm/environment.sh "$(abspath $(VLLM))" "$(abspath $(PY))"

test-vllm: $(READY) vllm-environment ## the attention backend in engines of vLLM, on the CPU, in an environment of its own
	@[ ! -e $(VLLM)/.installed ] || $(VLLM)/bin/python -m pytest -n 0 -p no:cacheprovider tests/vllm $(ARGS)

sanitize: $(READY) ## compute-sanitizer memcheck and racecheck over small calls of every kernel
	tests/gpu.sh sanitize "$(OUT)" "$(LIMIT)" "$(PY)" $(ARGS)

bench: $(READY) ## every benchmark beside its baseline: OUT=folder for results
	benchmarks/run.sh "$(OUT)" "$(LIMIT)" "$(PY)" $(ARGS)

bits: $(READY) ## digests of what every op computes, against those in tests/bits: ARGS=--help
	$(PY) -m tests.bits $(ARGS)

docs: $(READY) ## the pages as a site in build/docs; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -b html docs build/docs

lint: $(VENV)/.installed ## ruff, mypy and clang-format, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(VENV)/.installed ## format Python and C++ in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' | xargs $(VENV)/bin/clang-format -i

sdist: $(VENV)/.installed ## a source distribution in dist/
	$(call logged,build/sdist.log,$(PY) -m build --sdist --no-isolation --outdir dist .)
	@ls -l dist

wheel: preflight ## one wheel for several versions of torch in dist/, installed and checked: TORCHES="2.11.0 2.15.0"
	PYTHONS="$(or $(PYTHONS),$(PYTHON))" MAX_JOBS="$(or $(MAX_JOBS),2)" .ci/wheel.sh

# The ops of a folder have a namespace of their own, so its thin layer is compiled for it. With HTREE_COMMON, a folder
# with common libraries that stand compiled, it alone.
kernels-folder: $(VENV)/.installed ## what HF kernels loads without a hub, for the torch of PY: FOLDER=build/kernels/folder
	@[ -n "$(HTREE_COMMON)" ] || { rm -rf build/kernels/common; \
	  $(PY) setup.py -q build_common --build-lib build/kernels/common --build-temp build/kernels/temp-common; }
	common=$(or $(HTREE_COMMON),build/kernels/common)/htree_ops; rm -rf build/kernels/lib; \
	HTREE_PREBUILT=$$common HTREE_NAMESPACE=$$($(PY) .ci/kernels_folder.py $$common) \
	  $(PY) setup.py -q build_ext --build-lib build/kernels/lib --build-temp build/kernels/temp
	$(PY) .ci/kernels_folder.py build/kernels/lib/htree_ops "$(FOLDER)"

cuda-build: $(VENV)/.installed ## compile the CUDA kernels into build/cuda without a GPU (TORCH_CUDA_ARCH_LIST chooses)
	$(call logged,build/cuda.log,HTREE_CUDA=1 $(PY) setup.py build_ext --build-lib build/cuda --build-temp build/cuda-temp)

clean: ## remove builds, keep the environment
	rm -rf build dist htree_ops.egg-info htree_ops/*.so htree_ops/_build_info.json $(VENV)/.built

preflight:
	@command -v g++ >/dev/null || { echo "g++ is missing (Debian: apt-get install g++)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) must be 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments (Debian: apt-get install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "Python.h is missing, which torch.compile needs too (Debian: apt-get install python3-dev)"; exit 1; }

$(VENV)/.installed: pyproject.toml | preflight
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --upgrade pip
	$(PY) -m pip install $(TORCH) $$($(PY) -c 'import re, pathlib; \
	  text = pathlib.Path("pyproject.toml").read_text(); \
	  print(*re.findall(r"\"([^\"]+)\"", " ".join(re.findall(r"^(?:dev|docs) = \[(.*?)^\]", text, re.M | re.S))))')
	touch $@

# Without a GPU a checkout leaves the CUDA kernels out unless HTREE_CUDA says otherwise: half the time of compiling.
ifndef HTREE_CUDA
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c GPU),0)
$(VENV)/.built: export HTREE_CUDA := 0
endif
endif

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	@echo "compiling htree_ops; build/install.log has every line"
	$(call logged,build/install.log,$(PY) -m pip install --verbose --no-build-isolation --no-deps --editable .)
	touch $@
