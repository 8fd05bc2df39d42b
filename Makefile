# make sample: install and draw pictures. make ui: the web page.
# make test: install and pass the tests, in some minutes. make test-all: the tests that take longer.
# make test-tritons: compile the kernels for sm_90 with the other Tritons, and test the oldest diffusers promised.
# make bench: measure this machine, results in benchmarks/results. make sanitize: memory and race checks on a GPU.
# make soak: 5,000 pictures whose workers are killed 20 times, its result beside those of make bench.
PYTHON ?= python3
BIN := .venv/bin
# torch is pinned in constraints.txt; a file that is newer than its stamp installs again.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: sample test test-all test-tritons ui lint format bench sanitize soak clean

sample: .venv/installed
	$(BIN)/fastdiff sample --out samples --grid --overwrite

# One worker for each core, and one thread for each worker. Bytecode is kept, for many tests start a process.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
test test-all test-tritons: export OMP_NUM_THREADS := 1
test test-all test-tritons: export PYTHONDONTWRITEBYTECODE :=

test: .venv/installed-test
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels

test-all: .venv/installed-test
	$(PYTEST) -m slow
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/kernels

# Each stands in a folder of its own, which Python searches before the one that is installed.
TRITONS := 3.6.0 3.7.1 3.8.0
DIFFUSERS := 0.38.0
OTHER := $(CURDIR)/.venv/others

test-tritons: $(TRITONS:%=$(OTHER)/triton-%) $(OTHER)/diffusers-$(DIFFUSERS)
	for version in $(TRITONS); do \
		export PYTHONPATH=$(OTHER)/triton-$$version; \
		$(BIN)/python -c "import triton; assert triton.__version__ == '$$version'" || exit; \
		$(PYTEST) -m tritons tests/kernels/host || exit; \
	done
	PYTHONPATH=$(OTHER)/diffusers-$(DIFFUSERS) $(PYTEST) -m "not slow" tests/parity/test_pipelines.py \
		tests/acceleration/test_pipelines.py

$(OTHER)/triton-%: | .venv/installed-test
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part triton==$*
	mv $@.part $@

$(OTHER)/diffusers-%: | .venv/installed-test # this one needs an older huggingface_hub
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part diffusers==$* "huggingface_hub<2"
	mv $@.part $@

ui: .venv/installed-ui
	$(BIN)/fastdiff ui

lint: .venv/installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-test
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: .venv/installed-test
	for file in $$(find benchmarks -name "bench_*.py" | sort); do echo "$$file"; $(BIN)/python "$$file" --save || exit; done
	$(BIN)/python benchmarks/plots.py

sanitize: .venv/installed-test
	$(BIN)/python benchmarks/sanitize.py --save

soak: .venv/installed-test
	$(BIN)/python -m tests.bulk.soak --save

clean:
	rm -rf .venv samples outputs

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable .
	touch $@

.venv/installed-ui: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[ui]'
	touch $@ .venv/installed

.venv/installed-test: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[test]'
	touch $@ .venv/installed
