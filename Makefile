# make parity: set up the environments and show that the implementations agree.   make test: set up and run the tests.
#
# There are two environments, because JAX needs numpy>=2 and ttnn numpy<2; they exchange trace files. The second one, for tt,
# is left out if no CPython 3.12 is found, and then a line says so.
PYTHON ?= python3
PYTHON_TT ?= $(shell tools/find-python312)
BIN := .venv/bin
BIN_TT := .venv-tt/bin
# Compiled programs of JAX: most of the time of the parity run and of the tests is compilation.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/build/jax-cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
# Processes that tests start use compiled modules, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# pip would compile all modules, of which most are never imported, and look for a newer pip.
export PIP_NO_COMPILE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
TWO_WORKERS := --numprocesses 2 --dist worksteal
SHORT := -m 'not thorough and not nightly'
TESTS_TT := tests/siblings tests/ttnn_mock
IF_TT := [ ! -e .venv-tt/installed ] ||

.PHONY: parity test test-tt test-thorough budget budget-main budget-tt nightly test-cuda bench-gpu sim docs check-html dist fuzz lint clean

parity: .venv/installed .venv-tt/installed
	$(BIN)/mha-parity run --jobs 2 --allow-skipped $$($(IF_TT) echo --python tt=$(BIN_TT)/python)

# Tests that are not marked `thorough`, and of those with `@sample` the rows that it chooses. .ci/run adds
# `make test-thorough`, and `make nightly` has the rest: each row of each test runs in one of these three.
# tests/budget.json limits the cost of each file.
test: .venv/installed
	$(BIN)/pytest $(SHORT) --budget=check $(TWO_WORKERS)
	$(MAKE) --no-print-directory test-tt

# Without a card: on the mock of a board.
test-tt: .venv-tt/installed
	rm -f build/tt-n150.xml
	$(IF_TT) MHA_TT_MOCK=n150 $(BIN_TT)/pytest $(SHORT) --budget=check $(TESTS_TT) $(TWO_WORKERS) --junit-xml build/tt-n150.xml

# Thorough tests, and as many other rows as each sample has. Also tests of tt that depend on the board, on a second one,
# which accepts other programs, and on which recordings were made.
test-thorough: export SAMPLES := thorough
test-thorough: .venv/installed .venv-tt/installed
	rm -f build/tt-thorough.xml build/tt-p150.xml
	$(BIN)/pytest -m thorough $(TWO_WORKERS)
	$(IF_TT) MHA_TT_MOCK=n150 $(BIN_TT)/pytest -m thorough $(TESTS_TT) $(TWO_WORKERS) --junit-xml build/tt-thorough.xml
	$(IF_TT) MHA_TT_MOCK=p150 $(BIN_TT)/pytest -m board $(TESTS_TT) $(TWO_WORKERS) --junit-xml build/tt-p150.xml

# Rows of tests/budget.json: new and lower ones, and higher ones with a reason: make budget FILES=test_x REASON='why'.
# FILES is a part of a path. Each file runs alone, since it compiles fewer programs after other files.
budget: budget-main budget-tt

budget-main: .venv/installed
	@mkdir -p build
	$(BIN)/pytest $(SHORT) --collect-only -qq > build/test-files
	$(call EACH_FILE,build/test-files) $(BIN)/pytest $(WRITE_ROW)

budget-tt: .venv-tt/installed
	@mkdir -p build
	$(IF_TT) MHA_TT_MOCK=n150 $(BIN_TT)/pytest $(SHORT) $(TESTS_TT) --collect-only -qq > build/test-files-tt
	$(IF_TT) $(call EACH_FILE,build/test-files-tt) MHA_TT_MOCK=n150 $(BIN_TT)/pytest $(WRITE_ROW)

# A line of pytest's list is `tests/test_x.py: 12`.
EACH_FILE = sed -n 's/\.py: [0-9]*$$/.py/p' $1 | { grep -e '$(FILES)' || true; } | xargs -r -P 2 -I {} env
WRITE_ROW = -qq --no-header $(SHORT) --budget=write --budget-reason="$$REASON" {}
FILES ?= .

# Every row that neither of these has, and tests of minutes. And tests that hardly any change here breaks: a thousand
# ports as others write them, and facts about other libraries. .github/workflows/nightly.yml runs them each night, and
# .ci/run does not.
nightly: export SAMPLES := all
nightly: .venv/installed .venv-tt/installed
	$(BIN)/pytest tests/nightly $(TWO_WORKERS)
	$(BIN)/pytest -m nightly $(TWO_WORKERS)
	$(IF_TT) MHA_TT_MOCK=n150 $(BIN_TT)/pytest -m nightly $(TESTS_TT) $(TWO_WORKERS)

# mha_torch's kernels for CUDA, with whichever Python has a torch for it, and every case there. CI has no GPU.
test-cuda:
	$(PYTHON) -m parity run --backends torch --device cuda --dtypes float32,bfloat16,float16 --grad --quiet
	$(PYTHON) -m pytest tests/cuda --confcutdir tests/cuda

# Every case on a GPU, then the speed compared with the framework's kernels, with counts of kernels, copies and waits. JAX
# takes part if it has a GPU. Without a GPU the first command raises an error.
bench-gpu:
	@mkdir -p build
	set -e; export XLA_PYTHON_CLIENT_PREALLOCATE=false; \
	backends=torch$$($(PYTHON) -c "import jax; jax.devices('gpu')" 2> /dev/null && echo ,jax) || true; \
	$(PYTHON) -m parity run --backends $$backends --device cuda --dtypes float32,bfloat16,float16 --grad --quiet; \
	$(PYTHON) -m parity bench --backends $$backends --device cuda --suites cores,layers,scores,varlen,decode --profile \
		--json build/bench-gpu.json

# The real kernels, without a card, on a simulator that you have: make sim SIMULATOR=/path/libttsim_bh.so. Or a few of them:
# make sim SIMULATOR=wolfpine. `tools/tt-simulator --help` lists what that downloads and trusts.
sim: .venv-tt/installed
	@[ -n "$(SIMULATOR)" ] || { echo "SIMULATOR must be given: make sim SIMULATOR=/path/libttsim_bh.so (or wolfpine)" >&2; exit 2; }
	@mkdir -p build
	tools/tt-simulator "$(SIMULATOR)" $(SIM_OPTIONS) > build/tt-simulator.environment
	if [ "$(SIMULATOR)" = wolfpine ]; then set -- pytest tests/siblings/mha_tt/test_kernels.py; \
	else set -- mha-parity run --backends tt $(CASES); fi; \
	. build/tt-simulator.environment; command=$$1; shift; $(BIN_TT)/$$command "$$@"

# The site, in build/docs/html: pages, reference, executed notebooks. Warnings are errors, dead links among them.
docs: .venv/docs-installed .venv-tt/docs-installed
	$(BIN)/python tools/docs-site/stage.py build/docs/source $(wildcard $(BIN_TT)/python)
	$(BIN)/sphinx-build -q -W --keep-going -n -j 2 -c docs build/docs/source build/docs/html
	@echo "docs: build/docs/html/index.html"

# HTML reports in headless Chromium. It comes from npm's registry: if that is not available, a line says so.
check-html: .venv/installed
	$(BIN)/python tools/check-html/check.py

# The wheel, in dist/, installed into an empty environment for each of some extras and tried there.
dist:
	rm -rf dist build/lib
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build/lib build/bdist.*
	$(PYTHON) tools/try-wheel dist/*.whl $(EXTRAS)

# Commands drawn at random, hostile files, signals, full disks, two writers at once: a short version is among the tests.
fuzz: .venv/installed
	$(BIN)/python tools/fuzz-cli

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[jax,torch,dev]'
	# Without TensorFlow, which it needs only for text.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps keras-hub
	touch $@

# pip takes PyTorch with CUDA here, which is 6 GB. The CPU build is enough:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-tt
.venv-tt/installed: pyproject.toml constraints-tt.txt
	@python="$(PYTHON_TT)"; [ -z "$$python" ] || { set -ex; \
		"$$python" -m venv .venv-tt; \
		$(BIN_TT)/python -m pip install --quiet --constraint constraints-tt.txt --editable '.[tt,torch,test]'; \
		touch $@; }

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The notebook about TTNN, and the cells of others that begin with %%ttnn, run in that environment.
.venv-tt/docs-installed: .venv-tt/installed
	$(IF_TT) { $(BIN_TT)/python -m pip install --quiet --constraint constraints-tt.txt ipykernel matplotlib && touch $@; }

clean:
	rm -rf .venv .venv-tt build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
