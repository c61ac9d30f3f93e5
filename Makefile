# gpuhub: every command a user or developer needs. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Empty: the closet's own, or builtin at its first start.
ENGINE ?=
# Empty: this machine's GPUs where it has some, else the practice closet that ran last.
CLOSET ?=
# The node of the closet that has this machine's own GPUs. Empty: as chosen last, or none with CLOSET.
REAL_GPU ?=
INSTANCE ?= gpuhub
# 1: Prometheus beside the hub; 0: without it. Empty: if it runs already.
MONITORING ?=
BENCH ?= all
TRACE ?=
REPEATS ?= 1
# Processes that inject faults side by side, each into a product of its own.
LANES ?= 3
HOURS ?= 2
# The cluster of `make test-gpu`.
CLUSTER ?=
VENV := $(CURDIR)/.venv
export PATH := $(VENV)/bin:$(CURDIR)/spawners/proxy/node_modules/.bin:$(PATH)

.PHONY: help up down install purge status check-cluster setup setup-dev dev lint lint-lab test test-unit test-integration test-acceptance test-slurm \
  test-faults test-hostile test-fresh test-gpu test-gpu-closet soak coverage bench references docs dist sbom lock

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 20

up: setup ## Install what is needed, build the images, start JupyterHub (CLOSET=practice|house|lab, ENGINE=slurm: simulated nodes; REAL_GPU=rig3: that node has this machine's GPUs; MONITORING=1: Prometheus)
	@gpuhub up --instance $(INSTANCE) $(if $(ENGINE),--engine $(ENGINE)) $(if $(CLOSET),--closet $(CLOSET)) \
	  $(if $(REAL_GPU),--real-gpu $(REAL_GPU)) \
	  $(if $(MONITORING),$(if $(filter 0,$(MONITORING)),--no-monitoring,--monitoring))

down: ## Stop everything that `make up` started
	@if [ -x $(VENV)/bin/gpuhub ]; then gpuhub down --instance $(INSTANCE); else echo "Nothing is installed here, so nothing runs."; fi

install: setup ## Have systemd start gpuhub at each boot of this machine (`gpuhub uninstall` undoes it)
	@gpuhub install --instance $(INSTANCE)

purge: ## Stop, and remove the practice closet's images and the wheels as well
	@gpuhub down --purge --instance $(INSTANCE)

status: ## Show what runs
	@gpuhub status --instance $(INSTANCE)

check-cluster: setup ## Say what is wrong with cluster.toml, without starting anything
	@gpuhub check

setup:
	@MONITORING=$(MONITORING) spawners/setup.sh run $(ENGINE)

setup-dev:
	@spawners/setup.sh dev

dev: ## Make .venv with the packages, tools and tests; needs no root
	@spawners/venv.sh dev

lint: dev ## Check format, style, strict types and the layers of packages; needs no root
	@ruff check .
	@ruff format --check .
	@mypy
	@lint-imports --no-cache

lint-lab: ## Check the JupyterLab extension's TypeScript strictly; downloads JupyterLab's packages (370 MB), needs Node.js and no root
	@cd extensions/gpuhub_lab && npm ci --include=dev && npm run check

test-unit: dev ## Pass the unit tests (under 2 minutes on 2 cores); needs no root
	@tests/run unit

test-integration: setup-dev ## Pass the tests of single parts with real programs: Docker, SSH, LDAP, Slurm's daemons …
	@tests/run contract integration

test-acceptance: setup-dev ## Pass the tests of the whole product in a browser
	@tests/run acceptance lab

test-slurm: setup-dev ## Pass the tests of the whole product with Slurm as the scheduling backend
	@tests/run slurm

test-faults: setup-dev ## Inject every fault of the catalogue (docs/reliability.md; REPEATS=3: each as often; LANES=1: one after the other)
	@PYTHONHASHSEED=0 python -m pytest tests/faults --repeats $(REPEATS) --numprocesses $(LANES) --dist worksteal --durations 15

test-hostile: setup-dev ## Attack the running product from inside a user's container
	@tests/run hostile

test-gpu: setup-dev ## Use the product on real GPUs, and compare with nvidia-smi: CLUSTER=cluster.toml (see tests/gpus/example.toml)
	@GPUHUB_TEST_CLUSTER="$(CLUSTER)" python -m pytest tests/gpus --durations=5

test-gpu-closet: setup-dev ## Use the practice closet with this machine's GPUs in one node: REAL_GPU=rig2, CLOSET=practice|house|lab
	@GPUHUB_TEST_REAL_GPU="$(or $(REAL_GPU),rig2)" GPUHUB_TEST_CLOSET="$(or $(CLOSET),practice)" python -m pytest tests/gpus --durations=5

soak: setup-dev ## Use and break the practice closet for HOURS=2, and say whether memory, files, threads or logs grow
	@python -m tests.soak --hours $(HOURS)

test: setup-dev ## Pass every check and test, except the slow fault cases, soak and real GPUs (about an hour on 2 cores)
	@tests/run

test-fresh: setup-dev ## Run README's commands on a minimal Debian 12 and 13, each in a clean room (half an hour each)
	@tests/fresh/clean_room.sh bookworm
	@tests/fresh/clean_room.sh trixie

coverage: dev ## Show which lines the unit tests reach
	@COVERAGE=1 tests/run unit

bench: setup-dev ## Measure: all, or one group with BENCH=setup|spawn|spawn-trace|storm|launch|broker|slurm|storage|network (TRACE=DIR: folder of the OpenB trace)
	@TRACE=$(TRACE) python -m tests.bench $(BENCH)

docs: dev ## Build the documentation as a site, .cache/site/docs/index.html
	@sphinx-build --quiet --fail-on-warning --keep-going -c docs -b html . .cache/site

references: dev ## Write docs/reference/ from the code
	@python -m tests.support.references

dist: dev ## Build source distributions and wheels of all distributions into dist/
	@uv build --quiet --out-dir dist spawners
	@uv build --quiet --out-dir dist extensions
	@uv build --quiet --out-dir dist extensions/gpuhub_lab
	@ls -1 dist

sbom: dev ## Write CycloneDX bills of materials of locks and of INSTANCE's images into dist/
	@python -m tests.support.sbom dist $(INSTANCE)

lock: dev ## Resolve the pinned versions again
	@spawners/lock.sh
