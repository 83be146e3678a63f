PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-gpu lint check up lock

demo: ## train a LoRA on this machine, start to end
	@$(PYTHON) scripts/bootstrap.py demo
	@$(BIN)/qerl demo

test: ## the whole suite
	@$(PYTHON) scripts/bootstrap.py test
	@$(BIN)/python -m pytest

test-gpu: ## what needs a GPU
	@$(PYTHON) scripts/bootstrap.py test
	@$(BIN)/python -m pytest -m gpu

lint: ## format, lint, types, import rules
	@$(PYTHON) scripts/bootstrap.py dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint test ## what CI runs

up: ## the service on this machine
	@$(PYTHON) scripts/bootstrap.py demo
	@$(BIN)/qerl up

lock: ## resolve requirements.lock anew
	@$(PYTHON) scripts/bootstrap.py dev
	@$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --universal --python-version 3.11 \
		--no-annotate --no-header --no-emit-index-url --output-file requirements.lock
