# make sample: install and draw pictures. make ui: install and open the web page.
# make test: install and run the quick tests, in a few minutes. make test-all: run the slow tests.
# make test-tritons: compile the kernels for sm_90 with other Tritons, and test with the oldest supported diffusers.
# make package: build the wheel and the source distribution into dist, and check what PyPI and pip will read.
# make docs: build the documentation into docs/_build, where every warning is an error.
# make bench: run every benchmark; results go to benchmarks/results. make sanitize: memory and race checks on a GPU.
# make soak: draw 5,000 pictures while workers are killed 20 times; the result goes to benchmarks/results too.
PYTHON ?= python3
BIN := .venv/bin
# constraints.txt pins torch. A change of it or of pyproject.toml makes the stamps stale, so make installs again.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: sample test test-all test-tritons package docs ui lint format bench sanitize soak clean

sample: .venv/installed
	$(BIN)/fastdiff sample --out samples --grid --overwrite

# One worker per core, one thread per worker. Bytecode is kept because many tests start a Python process.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
test test-all test-tritons: export OMP_NUM_THREADS := 1
test test-all test-tritons: export PYTHONDONTWRITEBYTECODE :=

test: .venv/installed-test
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels

test-all: .venv/installed-test
	$(PYTEST) -m slow
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/kernels

# Each other version has its own folder, which PYTHONPATH puts before the installed package.
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

$(OTHER)/diffusers-%: | .venv/installed-test # this diffusers needs an older huggingface_hub
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part diffusers==$* "huggingface_hub<2"
	mv $@.part $@

package: .venv/installed-test
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# Every build reads all pages again (-E), as a page that is not read again gives no warning. -n reports names without a
# page. Nothing is downloaded.
SITE := docs/_build
docs: .venv/installed-docs
	$(BIN)/python -m sphinx --builder html --jobs auto --quiet -E -W --keep-going -n -d $(SITE)/doctrees docs $(SITE)/html
	@echo "the site is $(SITE)/html/index.html"

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
	rm -rf .venv samples outputs dist $(SITE)

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

.venv/installed-docs: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[docs]'
	touch $@ .venv/installed
