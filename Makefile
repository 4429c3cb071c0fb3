# make demo         prepare the sample, train a small model, stop and resume it, score it
# make test         every test that this machine can run
# make lint         ruff and mypy
# make faults       put 200 faults into small runs and write what was lost to docs/results/faults.md
# make wheelhouse   the wheels that a GPU node without network needs
# make clean        remove the environment and what tools left behind
#
# Each of the first five first makes .venv, or brings it up to date with pyproject.toml.
#
#   PYTHON=...         interpreter for .venv: Python 3.11 or 3.12; found by itself
#   TORCH_VERSION=...  release of torch for a new .venv; with a GPU 2.11.0, else 2.13.0
#   TORCH_INDEX=...    package index to take torch from (PyTorch's install page names one for each build)

SHELL := /bin/bash
# With a GPU the release whose Triton the fastest kernels are bound to (docs/engines.md); else a newer one.
ON_GPU := 2.11.0
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU' | head -n 1)
TORCH := $(or $(TORCH_VERSION),$(if $(HAS_GPU),$(ON_GPU),2.13.0))
comma := ,
WITH := $(if $(HAS_GPU),gpu$(comma))test

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
FETCH_TORCH := $(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# An environment whose interpreter has moved away is none; gone before make looks at the stamps in it.
$(shell [ ! -e $(VENV) ] || $(VENV)/bin/python -c '' 2>/dev/null || rm -rf $(VENV))

.PHONY: demo test lint faults wheelhouse clean

demo: $(VENV)/.installed
	@$(VENV)/bin/dwslm demo

test: $(VENV)/.installed
	@$(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal

lint: $(VENV)/.installed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

faults: $(VENV)/.installed
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.faults.matrix --out docs/results/faults.md
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.runs.matrix --out docs/results/faults-runs.md

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dwslm tests -name __pycache__ -type d -prune -exec rm -rf {} +


# ---- environment ----------------------------------------------------------------------------------------

# An interpreter is tried before it is believed: a name on PATH may be a version manager's stub, and some
# distributions ship Python without ensurepip. One given by hand is used or refused, never replaced.
$(VENV)/bin/python:
	@for python in $(or $(PYTHON),python3.12 python3.11 python3); do \
	  if "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
	    >/dev/null 2>&1; then \
	    echo "setup: $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "error: no usable Python 3.11 or 3.12 (with venv and ensurepip) among:" \
	  "$(or $(PYTHON),python3.12 python3.11 python3). Install one, or say which: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# The default build of torch carries CUDA, several GB. A machine without an NVIDIA GPU gets the CPU build
# (local version +cpu) where pip knows one; elsewhere the default build, which runs on a CPU too.
$(VENV)/.torch: | $(VENV)/bin/python
	@quiet=$$([ -t 1 ] || echo -qq); \
	if [ -n "$(TORCH_INDEX)" ]; then \
	  echo "setup: torch $(TORCH) from $(TORCH_INDEX)"; \
	elif [ -n "$(HAS_GPU)" ]; then \
	  echo "setup: torch $(TORCH), CUDA build (several GB): nvidia-smi lists a GPU"; \
	elif [ "$$(uname -s)" = Darwin ]; then \
	  echo "setup: torch $(TORCH)"; \
	else \
	  echo "setup: torch $(TORCH), CPU build (200 MB): nvidia-smi lists no GPU"; \
	  if $(FETCH_TORCH) $$quiet "torch==$(TORCH)+cpu" 2>$(VENV)/torch.log; then touch $@; exit 0; fi; \
	  grep -qE 'No matching distribution|ResolutionImpossible' $(VENV)/torch.log || \
	    { cat $(VENV)/torch.log >&2; exit 1; }; \
	  echo "setup: pip finds no CPU build of torch $(TORCH). Taking the default build: it runs on a CPU"; \
	  echo "       too, but downloads several GB. For the small one, stop this and give PyTorch's CPU index:"; \
	  echo "       make $(MAKECMDGOALS) TORCH_INDEX=URL"; \
	fi; \
	$(FETCH_TORCH) $$quiet "torch==$(TORCH)" && touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "setup: dwslm and what it needs"
	@$(PIP) install $$([ -t 1 ] || echo -qq) --editable '.[$(WITH)]'
	@touch $@


# ---- wheelhouse -----------------------------------------------------------------------------------------

#   PY=...           Python of the node
#   PLATFORM=...     platform tags that its pip accepts, newest first
#   EXTRAS=...       extras of the project to collect; flash-attn and te compile against the node's torch and
#                    cannot be collected here
#   INCLUDE_TORCH=1  torch and its CUDA libraries too (several GB); by default the node is taken to have them
PY ?= 3.12
PLATFORM ?= $(foreach minor,28 27 26 25 24 17 12 5,manylinux_2_$(minor)_x86_64) \
            manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64 linux_x86_64
EXTRAS ?= gpu,test
NODE_TORCH := $(or $(TORCH_VERSION),$(ON_GPU))
ON_NODE := in an environment of Python $(PY)$(if $(INCLUDE_TORCH),, that has torch)
HOUSE := wheelhouse
FOR_NODE := --only-binary=:all: --implementation cp --python-version $(PY) $(PLATFORM:%=--platform %)

# pip cannot leave one requirement out of a download, so a torch that is on the node already is stood in for
# by an empty wheel of that name, removed at the end. The ANTLR runtime comes only as source: built first.
# setuptools is what the editable install on the node builds with.
wheelhouse: | $(VENV)/bin/python
	@set -e; \
	quiet=$$([ -t 1 ] || echo -qq); \
	work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; mkdir -p $(HOUSE) "$$work/torch"; \
	if [ "$(INCLUDE_TORCH)" = 1 ]; then \
	  echo "wheelhouse: torch $(NODE_TORCH) and its libraries for Python $(PY)"; \
	  $(PIP) download $$quiet --dest $(HOUSE) $(FOR_NODE) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	    "torch$(if $(TORCH_INDEX),==,===)$(NODE_TORCH)"; \
	  ls $(HOUSE)/torch-*.whl | sed 's/.*torch-\([^-]*\)-.*/torch===\1/' > "$$work/constraints.txt"; \
	else \
	  printf '[project]\nname = "torch"\nversion = "%s+node"\n' $(NODE_TORCH) > "$$work/torch/pyproject.toml"; \
	  $(PIP) wheel -qq --no-deps --wheel-dir "$$work" "$$work/torch"; \
	  echo "torch===$(NODE_TORCH)+node" > "$$work/constraints.txt"; \
	fi; \
	echo "wheelhouse: dwslm[$(EXTRAS)] for Python $(PY)"; \
	$(PIP) wheel -qq --no-deps --wheel-dir "$$work" .; \
	$(PIP) wheel -qq --no-deps --wheel-dir $(HOUSE) 'antlr4-python3-runtime==4.9.*'; \
	$(PIP) download $$quiet --dest $(HOUSE) $(FOR_NODE) --find-links $(HOUSE) --find-links "$$work" \
	  --constraint "$$work/constraints.txt" 'setuptools>=77' "$$(ls "$$work"/dwslm-*.whl)[$(EXTRAS)]"; \
	rm -f $(HOUSE)/torch-*+node-*.whl $(HOUSE)/dwslm-*.whl; \
	echo "wheelhouse: $$(ls $(HOUSE)/*.whl | wc -l) wheels, $$(du -sh $(HOUSE) | cut -f1), in $(HOUSE)/"; \
	echo "Copy it and the repository to the node. There, in the repository, $(ON_NODE):"; \
	echo "  python -m pip install --no-index --find-links $(HOUSE) -e '.[$(EXTRAS)]'"
