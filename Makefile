# The documented commands. `setup` is fast when nothing changed, so every target starts with it.
#   make quickstart ARGS="trainer.total_training_steps=4"
#   make test ARGS="tests/unit -k proxy"
# `make test` is for every change. `make test-NAME` runs one group of tests more, `make test-all` every group: what they prove,
# what they cost, and whether what they depend on has changed since they last passed, says `.venv/bin/python -m tests.runner`.
.PHONY: setup quickstart test lint format clean

# Bytecode is kept, whatever the shell says (images of containers often say that it is not): else each process of a run
# compiles our sources again, and each worker of pytest rewrites all tests.
export PYTHONDONTWRITEBYTECODE :=

setup:
	@scripts/setup.sh

quickstart: setup
	@.venv/bin/python -m rl.train +experiment=quickstart $(ARGS)

test: setup
	@.venv/bin/python -m tests.runner run $(ARGS)

test-%: setup
	@.venv/bin/python -m tests.runner run --group $* $(ARGS)

lint: setup
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/lint-imports --no-cache
	@.venv/bin/ty check --python .venv --python-version 3.11
	@.venv/bin/ty check --python .venv --python-version 3.12
	@.venv/bin/python scripts/budget.py
	@.venv/bin/python -m tests.check_docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

format: setup
	@.venv/bin/ruff check --fix
	@.venv/bin/ruff format

# Outputs of runs are kept: they are yours.
clean:
	rm -rf .venv .gpu-pins .trainers .llamafactory build .pytest_cache .ruff_cache .hypothesis .setup.lock *.egg-info packaging/*/build packaging/*/*.egg-info
	find rl rollout rewards tests scripts -name __pycache__ -prune -exec rm -rf {} +
