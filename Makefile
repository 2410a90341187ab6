# `make help` lists the targets. PYTHON: the interpreter; PIP_ARGS: options for pip; GPU=1 or GPU=0: PyTorch's CUDA or
# CPU build (by default, nvidia-smi decides); ARGS: arguments for the command.
.DEFAULT_GOAL := help
.PHONY: help install run test lint proto

BIN := .venv/bin
# COMPUTING: tests that compute, run with one process per core. COMPILING: tests of kernels, which compile in parallel
# themselves. SERVING: tests that start processes and wait for them half of the time.
COMPUTING := tests/repository tests/configs tests/runtime tests/scheduler tests/router tests/worker tests/octavo \
	tests/benchmarks tests/properties
COMPILING := tests/kernels
SERVING := tests/faults tests/integration
QUESTION := What is the capital of France? Answer briefly.

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

install: ## make .venv/ with everything (quick if it is up to date)
	@PYTHON='$(PYTHON)' PIP_ARGS='$(PIP_ARGS)' GPU='$(GPU)' sh scripts/install.sh

run: install ## start a local cluster of the small model, stream a first completion, serve until Ctrl-C
	@$(BIN)/octavo up -c configs/local.yaml --first-prompt "$(QUESTION)" $(ARGS)

test: install ## run the whole test suite, or what ARGS names
ifeq ($(ARGS),)
	@failed=; \
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(SERVING) || failed="$$failed serving"; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(COMPUTING) || \
		failed="$$failed computing"; \
	$(BIN)/python -m pytest $(COMPILING) || failed="$$failed compiling"; \
	if [ -n "$$failed" ]; then echo "make test: failed groups:$$failed"; exit 1; fi
else
	@$(BIN)/python -m pytest $(ARGS)
endif

lint: install ## run ruff and pyright, and check that the generated code matches the .proto files
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/python -m pytest tests/repository/test_protos_drift.py

proto: install ## generate *_pb2* from the .proto files
	@PYTHON=$(BIN)/python scripts/gen_protos.sh
