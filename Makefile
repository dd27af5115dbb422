# The documented commands. `setup` is fast when nothing changed, so every target starts with it.
#   make quickstart ARGS="trainer.total_training_steps=4"
#   make test ARGS="tests/unit -k proxy"
# `make test` is for every change. `make test-long` has what takes minutes and breaks rarely: faults of whole runs,
# experiments, SLURM, podman. `make test-learning` shows that policies learn: fine-tuning in rounds for three seeds, then
# GRPO and distillation from there. `make test-gpu-pins` runs what needs no engine with the vLLM, verl and transformers of the
# GPU extra, on the CPU.
.PHONY: setup quickstart test test-long test-learning test-gpu-pins lint format clean

# Bytecode is kept, whatever the shell says (images of containers often say that it is not): else each process of a run
# compiles our sources again, and each worker of pytest rewrites all tests.
export PYTHONDONTWRITEBYTECODE :=

setup:
	@scripts/setup.sh

quickstart: setup
	@.venv/bin/python -m rl.train +experiment=quickstart $(ARGS)

# Two for the groups that train, one for all others: with five, two cores take longer.
PYTEST = .venv/bin/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder --durations=20

test: setup
	@$(PYTEST) -m "not long and not learning" $(ARGS)

# Where long tests are (tests/conftest.py refuses one elsewhere). Each worker imports what it collects: all tests take it
# 18 s of a core, these 9.
LONG = tests/integration tests/boxes tests/property/test_http_fuzz.py tests/unit/test_ingest.py

test-long: setup
	@scripts/trainers.sh
	@scripts/llamafactory.sh
	@$(PYTEST) -m long $(if $(filter tests tests/%,$(ARGS)),,$(LONG)) $(ARGS)

# One after the other: what they share takes most of the time, and most of what they do keeps both cores busy.
test-learning: setup
	@.venv/bin/python -m pytest --durations=20 -m learning $(ARGS)

# Whole folders: a list of files could lose some.
test-gpu-pins: setup
	@scripts/gpu_pins.sh
	@PYTHONPATH=$(CURDIR)/.gpu-pins $(PYTEST) -m "not long and not learning" $(or $(ARGS),tests/unit tests/property)

lint: setup
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/lint-imports --no-cache
	@.venv/bin/ty check --python .venv --python-version 3.11
	@.venv/bin/ty check --python .venv --python-version 3.12
	@.venv/bin/python scripts/budget.py

format: setup
	@.venv/bin/ruff check --fix
	@.venv/bin/ruff format

# Outputs of runs are kept: they are yours.
clean:
	rm -rf .venv .gpu-pins .trainers .llamafactory build .pytest_cache .ruff_cache .hypothesis .setup.lock *.egg-info packaging/*/build packaging/*/*.egg-info
	find rl rollout rewards tests scripts -name __pycache__ -prune -exec rm -rf {} +
