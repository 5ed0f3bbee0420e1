# Every target works on a fresh clone: it makes .venv first, and again when pyproject.toml changes.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.stamp

# With tiny models on few cores, more threads per process only get in each other's way.
export OMP_NUM_THREADS ?= 1

# Without bytecode on disk every process of the tests compiles the whole package and its tests again.
export PYTHONDONTWRITEBYTECODE =

# Otherwise glibc raises this limit and keeps the memory of freed tensors, 100 MB per test process.
export MALLOC_MMAP_THRESHOLD_ ?= 1048576

# A process per core; more than a few only take memory. A process that is done takes tests of another.
SPREAD := -n auto --maxprocesses 4 --dist worksteal

# Other kernels round differently: these tests must pass with those of an older CPU as well.
OLDER_CPU := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
ROUNDING_TESTS := tests/contracts/pipelines/test_krea2.py tests/contracts/pipelines/test_policies.py \
  tests/functional/test_signal.py tests/training/matching/test_references.py

.DEFAULT_GOAL := help
.PHONY: help demo quick unit test test-all test-long pythons older-cpu matrix lint bench bench-gpu docs venv

help: ## list the targets; times are of two idle cores
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "make %-9s %s\n", $$1, $$2 }'

demo: $(STAMP) ## align the toy text-to-image model on the CPU, minutes
	$(BIN)/flowalign demo

quick: $(STAMP) ## tests of the functional core, credit and losses, 17 seconds
	$(BIN)/pytest $(SPREAD) -q tests/functional tests/credit tests/losses

unit: $(STAMP) ## the unit tests, 90 seconds
	$(BIN)/pytest $(SPREAD)

test: $(STAMP) ## lint, unit tests, and the third of the slow tests that a version draws, 12 minutes
	$(MAKE) --jobs 2 lint older-cpu
	$(BIN)/pytest $(SPREAD) -m 'not gpu' --slow-one-of 3
	$(MAKE) pythons

test-all: $(STAMP) ## lint and all tests, 21 minutes
	$(MAKE) --jobs 2 lint older-cpu
	$(BIN)/pytest $(SPREAD) -m 'not gpu'

test-long: $(STAMP) ## random stops compared bit by bit, and 40 toy steps of every method, hours
	FLOWALIGN_KILLS=14 $(BIN)/pytest -q -m 'not gpu' tests/runs/test_stops.py \
	  tests/runs/test_restarts.py tests/training/test_checkpoint.py tests/cli/test_stopped_verbs.py
	$(BIN)/pytest -q -m '' -rs tests/matrix/learn_methods.py

pythons: ## readers and the functional core in .venv-3.11, .venv-3.12 and .venv-3.13, where they exist
	@for version in 3.11 3.12 3.13; do \
	  if test -x .venv-$$version/bin/pytest; then \
	    .venv-$$version/bin/pytest -q tests/functional tests/utils/media tests/data/test_readers.py || exit 1; \
	  else echo "Python $$version is not tested: no environment .venv-$$version"; fi; done

older-cpu: $(STAMP) ## tests of rounding on the kernels of an older CPU, a minute
	$(OLDER_CPU) $(BIN)/pytest -q -m 'not gpu' -k 'test_krea2 or test_policies or not slow' $(ROUNDING_TESTS)

matrix: $(STAMP) ## check and train every method on every model at toy size, hours
	mkdir -p build
	$(BIN)/python -m tests.matrix.run --out build/matrix.jsonl --table assets/matrix.csv

lint: $(STAMP) ## ruff, pyright and the import contracts, a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(STAMP) ## time the stages of a step against bare network evaluations
	$(BIN)/flowalign bench configs/shapes.yaml

bench-gpu: $(STAMP) ## measure a GPU at published sizes, 10 minutes; without one at toy scale
	$(BIN)/python -m assets.bench.gpu

docs: $(STAMP) ## build the documentation site into build/docs, strictly
	$(BIN)/properdocs build --config-file docs/site/properdocs.yml

venv: $(STAMP) ## make .venv with everything for development

# A .venv that works is kept and brought up to date. uv does not read pip's configuration, so folders
# of wheels that it names are handed on; pip itself takes over where uv is not to be had.
$(STAMP): pyproject.toml
	@qualifies='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; \
	if $(BIN)/python -c "$$qualifies" 2>/dev/null; then exit 0; fi; \
	for python in python3.12 python3.11 python3.13 python3 python; do \
	  if "$$python" -c "$$qualifies" 2>/dev/null; then \
	    echo "making .venv with $$($$python --version)"; \
	    rm -rf .venv && exec "$$python" -m venv .venv; \
	  fi; \
	done; \
	echo "flowalign needs Python 3.11 to 3.13: python3.12, python3.11, python3.13 and python3 are none of these" >&2; \
	exit 1
	@links=$$($(BIN)/pip config get global.find-links 2>/dev/null | xargs | tr ' ' ','); \
	if [ -n "$$links" ]; then export UV_FIND_LINKS="$$links"; fi; \
	$(BIN)/pip install --quiet --disable-pip-version-check uv && \
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -e '.[dev]' || { \
	  echo "uv did not do it; installing with pip" >&2; \
	  $(BIN)/pip install --disable-pip-version-check -e '.[dev]'; \
	}
	@touch $@
