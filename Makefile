# Every target makes .venv from nothing when it is missing or older than its inputs. Needs python3 (3.11+) and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv-vllm/.ready
ARGS ?=
PYTEST_ARGS ?=
# A file of tests stays in one process: what its tests share is made once, and they run one after the other.
SHARED_OUT := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help quickstart test test-vllm check fix bench bench-self docs
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

quickstart: $(READY) ## build a small model, improve it by RL, show before and after (ARGS='--seed 1 --json')
	$(BIN)/groupwise quickstart $(ARGS)

test: $(READY) ## the whole test suite, slow tests included (PYTEST_ARGS='-m "not slow"' for less, -n0 for one process)
	$(BIN)/pytest $(SHARED_OUT) $(PYTEST_ARGS)

test-vllm: $(READY) $(VLLM) ## the tests with a real vLLM server, which gets an environment of its own (2 GB)
	GROUPWISE_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/pytest tests/test_vllm.py $(PYTEST_ARGS)

check: $(READY) ## lint, format, types, floors; then where a size budget is passed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/pytest -q tests/test_floors.py
	$(BIN)/python tools/budgets.py

fix: $(READY) ## mend what lint and format can mend by themselves
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

bench: $(READY) ## measure and rewrite docs/benchmarks.md (an hour and a half; keep the machine quiet)
	for one in race sweeps seeds algorithms ppo length_bias faulty_rewards code_rewards against_trl plan scaling; do $(BIN)/python -m benchmarks.$$one || exit 1; done

bench-self: $(READY) ## a training step beside that of an older commit of ours (OLD=COMMIT)
	$(BIN)/python -m benchmarks.against_older $(OLD)

docs: $(READY) ## regenerate the generated pages
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/answer_pairs.py
	$(BIN)/python tools/errors.py

# constraints.txt holds the exact version of everything, so nothing is upgraded that need not be. The stamp is written
# last: an installation that was cut short is done again.
$(READY): pyproject.toml constraints.txt tools/system_packages.sh
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	sh tools/system_packages.sh
	touch $@

$(VLLM): tools/vllm/requirements.txt tools/vllm/wheel.txt
	test -x .venv-vllm/bin/pip || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --no-deps -r tools/vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r tools/vllm/wheel.txt
	touch $@
