# Headrace: set up, run, test. `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.yaml
PLAN_VENV := .venv-plan
PLANS ?= $(wildcard configs/plan/*.yaml)

.DEFAULT_GOAL := help
.PHONY: help setup setup-sampler run run-sglang test test-slow plan test-plan lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(VENV)/.run-installed ## make .venv and install what a run needs
	@echo "headrace: $(VENV) is ready; make run trains the quickstart"

run: $(VENV)/.run-installed ## train and evaluate the quickstart (CONFIG=... for another configuration)
	@$(BIN)/headrace train $(CONFIG)

setup-sampler: $(VENV)/.sampler-installed ## the same, and SGLang-Jax
	@echo "headrace: $(VENV) is ready; make run-sglang trains the quickstart with SGLang-Jax"

run-sglang: $(VENV)/.sampler-installed ## train and evaluate the quickstart with SGLang-Jax as its sampler
	@$(BIN)/headrace train $(CONFIG) sampler.kind=sglang_jax sampler.slots=16

test: $(VENV)/.dev-installed ## run the test suite
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest

test-slow: $(VENV)/.dev-installed ## run the test suite, slow tests included
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m "slow or not slow"

plan: $(PLAN_VENV)/.installed ## plan large models for TPU slices, without one (PLANS=... for other configurations; some minutes each)
	@for config in $(PLANS); do $(PLAN_VENV)/bin/headrace plan $$config || exit; done

test-plan: $(PLAN_VENV)/.dev-installed ## run the tests that compile for TPU slices (some minutes)
	@JAX_PLATFORMS=cpu $(PLAN_VENV)/bin/python -m pytest -m slow tests/learner/test_plan_compile.py

lint: $(VENV)/.dev-installed ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev-installed ## format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what make made: the environment and the caches; runs/ stays
	rm -rf $(VENV) $(PLAN_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second `make` instant, and a changed pyproject.toml or constraints.txt install anew.
# A development environment is a superset, so its stamp stands for all three.
$(VENV)/.run-installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "headrace: installing what a run needs into $(VENV) (a few minutes the first time)"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --prerelease if-necessary-or-explicit \
	    --constraints constraints.txt --editable '.[cpu]'
	@touch $@

$(VENV)/.sampler-installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "headrace: installing SGLang-Jax and what a run needs into $(VENV) (a few minutes the first time)"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --prerelease if-necessary-or-explicit \
	    --constraints constraints.txt --editable '.[cpu,sampler]'
	@touch $(VENV)/.run-installed $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "headrace: installing what the tests need into $(VENV) (a few minutes the first time)"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --prerelease if-necessary-or-explicit \
	    --constraints constraints.txt --editable '.[cpu,sampler,dev]'
	@touch $(VENV)/.run-installed $(VENV)/.sampler-installed $@

$(VENV)/.created: .python-version
	@echo "headrace: making a Python environment in $(VENV)"
	@set -e; python="$$(sh .ci/find-python)"; "$$python" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# The TPU compiler is large and of use to `make plan` alone.
$(PLAN_VENV)/.installed: pyproject.toml constraints.txt .python-version
	@echo "headrace: installing the TPU compiler into $(PLAN_VENV) (a few minutes the first time)"
	@set -e; python="$$(sh .ci/find-python)"; "$$python" -m venv --clear $(PLAN_VENV)
	@$(PLAN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(PLAN_VENV)/bin/uv pip install --quiet --python $(PLAN_VENV)/bin/python \
	    --prerelease if-necessary-or-explicit --constraints constraints.txt --editable '.[tpu]'
	@touch $@

$(PLAN_VENV)/.dev-installed: $(PLAN_VENV)/.installed
	@$(PLAN_VENV)/bin/uv pip install --quiet --python $(PLAN_VENV)/bin/python \
	    --prerelease if-necessary-or-explicit --constraints constraints.txt --editable '.[tpu,dev]'
	@touch $@
