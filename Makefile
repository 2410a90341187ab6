# What each target does: `make help`. PIP_ARGS passes options to pip, PYTHON names the interpreter, ARGS goes to the command.
.DEFAULT_GOAL := help
.PHONY: help install run test lint proto

BIN := .venv/bin
# Tests that compute, a process for each core; those of kernels, which compile beside them; and those that start processes
# of their own, and wait for them half of the time.
COMPUTING := tests/repository tests/configs tests/runtime tests/scheduler tests/router tests/worker tests/octavo \
	tests/benchmarks tests/properties
COMPILING := tests/kernels
SERVING := tests/faults tests/integration
QUESTION := What is the capital of France? Answer briefly.

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

install: ## make .venv/ with everything (quick when there is nothing to do)
	@PYTHON='$(PYTHON)' PIP_ARGS='$(PIP_ARGS)' sh scripts/install.sh

run: install ## start a local cluster of the small model, stream a first completion, serve until Ctrl-C
	@$(BIN)/octavo up -c configs/local.yaml --first-prompt "$(QUESTION)" $(ARGS)

test: install ## run the whole test suite, or what ARGS names
ifeq ($(ARGS),)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(SERVING)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(COMPUTING)
	@$(BIN)/python -m pytest $(COMPILING)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

lint: install ## ruff, pyright, and whether the generated code is that of protos/*.proto
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/python -m pytest tests/repository/test_protos_drift.py

proto: install ## generate protos/*_pb2* from protos/*.proto
	@PYTHON=$(BIN)/python scripts/gen_protos.sh
