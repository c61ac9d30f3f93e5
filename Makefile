# gpuhub: every command a user or developer needs. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Empty: the closet's own, or builtin at its first start.
ENGINE ?=
INSTANCE ?= gpuhub
BENCH ?= all
TRACE ?=
REPEATS ?= 1
VENV := $(CURDIR)/.venv
export PATH := $(VENV)/bin:$(CURDIR)/spawners/proxy/node_modules/.bin:$(PATH)

.PHONY: help up down purge status test test-faults check bench setup setup-dev check-cluster lock

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 16

up: setup ## Install what is needed, build the images, start JupyterHub (ENGINE=slurm: the practice closet with Slurm)
	@gpuhub up --instance $(INSTANCE) $(if $(ENGINE),--engine $(ENGINE))

down: ## Stop everything that `make up` started
	@if [ -x $(VENV)/bin/gpuhub ]; then gpuhub down --instance $(INSTANCE); else echo "Nothing is installed here, so nothing runs."; fi

purge: ## Stop, and remove the practice closet's images and the wheels as well
	@gpuhub down --purge --instance $(INSTANCE)

status: ## Show what runs
	@gpuhub status --instance $(INSTANCE)

check-cluster: setup ## Say what is wrong with cluster.toml, without starting anything
	@gpuhub check

setup:
	@spawners/setup.sh run $(ENGINE)

setup-dev:
	@spawners/setup.sh dev

check: setup-dev ## Lint, strict types, imports between modules as drawn
	@ruff check .
	@ruff format --check .
	@mypy
	@lint-imports

test: setup-dev ## Pass every test (about 40 minutes on 2 cores)
	@tests/run

test-faults: setup-dev ## Inject every fault of the catalogue (docs/reliability.md; REPEATS=3: each as often)
	@python -m pytest tests/faults --repeats $(REPEATS)

bench: setup-dev ## Measure: all, or one group with BENCH=setup|spawn|launch|broker|slurm (TRACE=DIR: another trace)
	@TRACE=$(TRACE) python -m tests.bench $(BENCH)

lock: setup-dev ## Resolve the pinned versions anew
	@spawners/lock.sh
