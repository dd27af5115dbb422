# The documented commands. `setup` is fast when nothing changed, so every target starts with it.
#   make quickstart ARGS="trainer.total_training_steps=4"
#   make test ARGS="tests/unit -k proxy"
.PHONY: setup quickstart test lint format clean

setup:
	@scripts/setup.sh

quickstart: setup
	@.venv/bin/python -m rl.train +experiment=quickstart $(ARGS)

test: setup
	@.venv/bin/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder $(ARGS)

lint: setup
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/lint-imports --no-cache
	@.venv/bin/ty check --python .venv
	@.venv/bin/python scripts/budget.py

format: setup
	@.venv/bin/ruff check --fix
	@.venv/bin/ruff format

# Outputs of runs are kept: they are yours.
clean:
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis .setup.lock *.egg-info packaging/*/build packaging/*/*.egg-info
	find rl rollout rewards tests scripts -name __pycache__ -prune -exec rm -rf {} +
