# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: run test lint bench clean

run: $(INSTALLED)
	@$(BIN)/placewise compare llama-3-8b --cluster two-gpus-one-host --budget 5s --out out

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n 2 --doctest-modules tests src/placewise/__init__.py src/placewise/graph.py

lint: $(INSTALLED)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

bench: $(INSTALLED)
	@set -e; for script in $(filter-out bench/harness.py,$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

clean:
	@rm -rf .venv out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests bench examples -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@echo "creating .venv" >&2
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
