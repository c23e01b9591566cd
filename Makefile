# make demo | test | lint | nightly: each creates .venv first (Python 3.11 or newer with pip; from constraints.txt).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP = $(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt
# Two cores and four processes: more than one thread each is many times slower.
export OMP_NUM_THREADS ?= 1
DEMO ?= --model mixtral --dp 2 --tp 2 --ep 4

.PHONY: demo test lint types pytest nightly clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/train.py $(DEMO)

test: lint pytest

# Four processes fill two cores; what runs in one process runs two files at a time, in the order of
# tests/conftest.py: without the option those with the most tests come first, and what takes a minute may come last.
pytest: .venv/.installed
	$(BIN)/python -m pytest -m "gloo and not nightly"
	$(BIN)/python -m pytest -m "not gloo and not nightly" -n 2 --dist loadfile --no-loadscope-reorder

nightly: .venv/.installed
	$(BIN)/python -m pytest -m nightly --timeout 1800

lint: types
	$(BIN)/ruff check .

# mypy cannot follow setuptools' package-dir: show it the same packages as one tree.
types: .venv/.installed
	rm -rf build/types && mkdir -p build/types/moec
	ln -s $(CURDIR)/moec/* $(CURDIR)/passes $(CURDIR)/runtime build/types/moec/
	$(BIN)/mypy

# torch first: its GPU wheel brings the one triton that it wants, its CPU wheel brings none (see constraints.txt).
# --without-pip and `pip --python`: Debian's python3 has pip and venv, but ensurepip only with a further package.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	$(PIP) pip setuptools torch
	$(BIN)/python -c "import triton" 2> /dev/null || $(PIP) triton==3.6.0
	$(PIP) -e '.[dev,hf]'
	touch $@

clean:
	rm -rf build dist runs .pytest_cache .hypothesis .mypy_cache .ruff_cache
