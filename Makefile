# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin

# A few of many: see `placewise planners`.
PLANNERS := single,random,blocks-by-memory,blocks-by-load,heft,cpop,local-search,auto

.PHONY: run test lint bench pictures clean

run: .venv/.package
	@$(BIN)/placewise compare llama-3-8b --cluster two-gpus-one-host --planners $(PLANNERS) --budget 5s --out out

test: .venv/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --doctest-modules tests src/placewise/__init__.py src/placewise/graph.py

lint: .venv/.dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

bench: .venv/.dev
	@set -e; for script in $(filter-out bench/harness.py,$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

# Every picture of the docs, in some minutes. Tables beside those of `compare` are printed by the same commands.
pictures: .venv/.dev
	@$(BIN)/python docs/pictures.py
	@cd docs && PATH="$$PWD/../$(BIN):$$PATH" sh -c "$$(grep 'plot [a-z]*.svg$$' compare.md)"
	@$(BIN)/python page/picture.py
	@$(BIN)/python bench/scale.py --plot bench/scale.svg

clean:
	@rm -rf .venv out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests bench examples -name __pycache__ -prune -exec rm -rf {} +

# `make run` needs the package alone; tests also need what it imports models from.
.venv/.package .venv/.dev: pyproject.toml constraints.txt
	@echo "installing into .venv" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS)'
	@touch $@

.venv/.dev: EXTRAS := [dev]
