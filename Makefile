# make sample: install and draw pictures. make ui: the web page. make test: install and pass the tests.
# make bench: measure this machine, results in benchmarks/results. make sanitize: memory and race checks on a GPU.
# make soak: 5,000 pictures whose workers are killed 20 times, its result beside those of make bench.
PYTHON ?= python3
BIN := .venv/bin
# torch is pinned in constraints.txt; a file that is newer than its stamp installs again.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: sample test ui lint format bench sanitize soak clean

sample: .venv/installed
	$(BIN)/fastdiff sample --out samples --grid --overwrite

# A worker a core: with threads of their own they would wait for one another.
test: export OMP_NUM_THREADS := 1
test: .venv/installed-test
	$(BIN)/python -m pytest -n auto
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/kernels

ui: .venv/installed-ui
	$(BIN)/fastdiff ui

lint: .venv/installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-test
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: .venv/installed-test
	for file in benchmarks/bench_*.py; do echo "$$file"; $(BIN)/python "$$file" --save || exit; done
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
