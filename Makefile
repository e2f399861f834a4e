# The same targets run on a developer's machine and in CI: see .ci/run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build where the index has one; any release that pyproject.toml admits will do.
TORCH ?= torch==2.13.*

.PHONY: check setup compiler lint format test clean

check: setup lint test

setup: compiler $(VENV)/.installed

# The tests compile the kernels.
compiler:
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || command -v c++ >/dev/null || { \
		echo "make: no C++ compiler found. Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)." >&2; \
		exit 1; \
	}

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)" -e ".[dev]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup
	$(BIN)/pytest -n 2

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
