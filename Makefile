# `make demo` and `make test` need nothing but Python 3.11-3.13: each sets up .venv by itself first. `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup demo test unit outside check format bench soak clean
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
CODE := vcache_backend benchmarks tests/soak
ARGS ?=
# Three files of tests at a time, long ones first: many wait for other processes. BESIDE= runs one after the other.
BESIDE ?= --numprocesses 3 --dist loadfile --no-loadscope-reorder

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## /  make \1\t/p' Makefile | expand -t 16

setup:  ## create .venv and install what is missing (every target does this first)
	@scripts/setup.sh

demo: setup  ## a server and two workers share KV bytes here; every byte is checked
	@$(BIN)/python examples/engine.py

test: check  ## lint, types, then all tests; ARGS="-k name" passes options on to pytest
	@scripts/setup.sh vllm
	@$(BIN)/python -m pytest $(BESIDE) $(ARGS)

unit: setup  ## the tests alone
	@scripts/setup.sh vllm
	@$(BIN)/python -m pytest $(BESIDE) $(ARGS)

outside: setup  ## vLLM's own tests, from its source archive (network), with vcache in place of a connector
	@scripts/setup.sh vllm
	@$(BIN)/python tests/outside/releases.py
	@$(BIN)/python tests/outside/run.py $(ARGS)

check: setup  ## lint, formatting and strict types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict --num-workers 2 $(CODE)

format: setup  ## put the code in its one format, repair what lint can repair
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup  ## measure this machine; ARGS are those of `python -m benchmarks`
	@$(BIN)/python -m benchmarks $(ARGS)

soak: setup  ## a quarter of an hour of kills and stops; every byte is checked; ARGS="--level death" (others: ARGS=--help)
	@PYTHONPATH=tests:tests/support $(BIN)/python -m soak $(ARGS)

clean:  ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
