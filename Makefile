# make demo and make test work on a machine with python3 and nothing else: each makes .venv first.
#
#   PYTHON=python3.12        the interpreter to make .venv with
#   TORCH='torch==2.12.0'    another torch than constraints.txt's, when .venv is made

PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# True where .venv already sees a torch that fits, from the interpreter it was made with.
HAS_TORCH := from importlib.metadata import version as v; \
	import sys; sys.exit(tuple(map(int, v("torch").split(".")[:2])) < (2, 10))
UNPINNED := grep -vE '^(torch|triton)=='

.PHONY: demo test lint types pytest gpu-test compile-all compile-newest fuzz fuzz-gpu fuzz-parsers fuzz-tiles \
	docs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy --strict

pytest: $(READY)
	$(BIN)/pytest -q -n 2 --dist loadfile

gpu-test: $(READY)
	$(BIN)/pytest -q -m gpu
	$(BIN)/python benchmarks/accuracy.py

compile-all: $(READY)
	$(BIN)/pytest -q -n 2 -m compile_all tests/test_compile.py tests/test_hopper.py \
	    tests/test_hopper_backward.py tests/test_bundle_hopper.py

# Minutes of random variants against the oracle, and of mutated inputs of both front ends; what is
# found is written to build/. SECONDS= and SEED= change how long and from where.
SECONDS ?= 1800
SEED ?= 0

fuzz: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/fuzz_whole.py --seconds $(SECONDS) --seed $(SEED)

# The same on a GPU: a summary with a command for each failure, in build/fuzz_gpu.json.
fuzz-gpu: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/fuzz_gpu.py --seconds $(SECONDS) --seed $(SEED)

fuzz-parsers: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/fuzz_parsers.py --seconds $(SECONDS) --seed $(SEED)

# The site, in build/site.
docs: $(READY)
	@$(BIN)/python -c 'import material' 2> /dev/null || $(BIN)/python -m pip install -qq \
		--disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Kernels of each kind under the newest release of Triton, in a folder of its own.
compile-newest: $(READY)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps --upgrade \
		--target build/triton triton
	PYTHONPATH=build/triton $(BIN)/pytest -q -n 2 tests/test_compile.py tests/test_hopper.py \
		tests/test_hopper_backward.py -k "(six and 128) or \
		(kernels_compile and (softcap or documents or same))"

fuzz-tiles: $(READY)
	SCOREMOD_TILE_EXAMPLES=30000 $(BIN)/pytest -q tests/test_tiles.py -k test_proved_tiles_are_so

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@echo "making $(VENV): a few minutes the first time"
	@$(PYTHON) -m venv --system-site-packages $(VENV)
	@if [ -n "$(TORCH)" ]; then \
		$(PYTHON) -m venv $(VENV); \
		{ $(UNPINNED) constraints.txt; echo "$(TORCH)"; } > $(VENV)/constraints.txt; \
	elif $(BIN)/python -c '$(HAS_TORCH)' 2> /dev/null; then \
		$(UNPINNED) constraints.txt > $(VENV)/constraints.txt; \
	else \
		$(PYTHON) -m venv $(VENV); \
		cp constraints.txt $(VENV)/constraints.txt; \
	fi
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		-c $(VENV)/constraints.txt -e '.[test,examples]'
	@touch $@
