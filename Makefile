# make            what there is to do
# make setup      for users; make setup-dev for work on nearfar. What needs one calls it; again it takes a second
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
# The version whose CPU build the project is tested with. Any source of it will do: pip's own configuration decides.
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
WEB    := $(wildcard web/package.json)

# Three sets of packages in one environment: what building and running need, what the demo shows, everything.
USER_EXTRAS := build,edge,front,grammars,routing,vulkan
DEV_EXTRAS  := build,edge,mlx,vulkan,onnx,server,limits,ray,routing,dev,docs

USER_READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
DEV_READY  := $(VENV)/.dev-ready
NPM_READY  := $(if $(WEB),web/node_modules/.ready)
NPM_DEV_READY := $(if $(WEB),web/node_modules/.dev-ready)
WEB_READY  := $(if $(WEB),web/dist/.ready)

# Targets run one after the other, but for those that a recipe names after $(SIDE): these share no folder that they
# change. What they print comes in one piece each. The system's packages have been looked for before that.
ifdef SIDE_BY_SIDE
SYSTEM     :=
SYSTEM_DEV :=
else
.NOTPARALLEL:
SYSTEM     := system
SYSTEM_DEV := system-dev
endif
SIDE = $(MAKE) --no-print-directory $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) SIDE_BY_SIDE=1

.PHONY: clients help setup setup-dev setup-python setup-web build-web system system-demo system-dev demo test test-all test-web \
	test-times mutations lint lint-python lint-web fuzz bench docs dist clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: system $(USER_READY) $(WEB_READY) ## .venv with what building and running need, the web package
	@echo "nearfar is set up: $(BIN)/nearfar --help; what works here: $(BIN)/nearfar doctor"

setup-dev: system-dev ## all that the tests, the demo and the documentation need, too
	@$(SIDE) -j2 setup-python $(if $(WEB),setup-web)

setup-python: $(DEV_READY)
	@:

# npm's packages for the tests have those for the build among them: the build begins when they are there.
setup-web: $(NPM_DEV_READY)
	@$(MAKE) --no-print-directory build-web

build-web: $(WEB_READY)
	@:

system:
	@scripts/check_system.sh

system-demo:
	@scripts/check_system.sh demo

system-dev:
	@scripts/check_system.sh dev

INSTALL := $(BIN)/python scripts/install.py

$(BIN)/python: | $(SYSTEM)
	@scripts/check_python.sh "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)

$(USER_READY): pyproject.toml hatch_build.py scripts/install.py | $(BIN)/python
	$(INSTALL) -e ".[$(USER_EXTRAS)]"
	@touch $@

$(DEMO_READY): $(USER_READY)
	$(INSTALL) "$(TORCH)" -e ".[demo]"
	@touch $@

$(DEV_READY): pyproject.toml hatch_build.py scripts/install.py | $(BIN)/python
	$(INSTALL) "$(TORCH)" -e ".[$(DEV_EXTRAS)]"
	@touch $(USER_READY) $(DEMO_READY) $@

# What the tests need is a workspace of its own, web/test, whose packages lie in the same folder.
NPM_CI := cd web && npm ci --ignore-scripts --no-audit --no-fund

$(NPM_READY): web/package.json web/package-lock.json | $(SYSTEM)
	$(NPM_CI) --workspaces=false
	@touch $@

$(NPM_DEV_READY): web/package.json web/package-lock.json web/test/package.json | $(SYSTEM_DEV)
	$(NPM_CI)
	@touch $(NPM_READY) $@

$(WEB_READY): $(shell find web/src web/chat web/scripts -type f 2>/dev/null) $(wildcard web/*.json) routing/difficulty/model.json | $(NPM_READY)
	cd web && npm run build
	@touch $@

demo: system-demo setup $(DEMO_READY) ## build the sample model, ask it in Python, in headless Chromium, a server, and a client of both
	$(BIN)/python examples/demo.py

CLIENTS := out/clients

clients: $(CLIENTS)/ready ## the clients that tests/e2e/test_clients.py runs, in environments of their own: 0.5 GB

$(CLIENTS)/ready: pyproject.toml scripts/extra.py scripts/install.py tests/clients/node/package.json | setup-dev
	for name in clients instructor; do \
	  $(BIN)/python -m venv $(CLIENTS)/$$name && \
	  $(BIN)/python scripts/extra.py $$name | xargs $(CLIENTS)/$$name/bin/python scripts/install.py || exit 1; \
	done
	mkdir -p $(CLIENTS)/node && cp tests/clients/node/package.json $(CLIENTS)/node
	cd $(CLIENTS)/node && npm install --ignore-scripts --no-audit --no-fund --silent
	touch $@

lint: setup-dev ## ruff, mypy --strict, tsc, biome; whether what is generated is up to date
	@$(SIDE) -j2 lint-python $(if $(WEB),lint-web)

# What type checkers know of unchanged files outlives the clone, as tests/support/kept.py keeps compiled kernels. Both
# compare the content of files, not their times.
KEPT := $(or $(NEARFAR_TEST_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/nearfar-tests)

lint-python:
	$(BIN)/ruff check .
	$(BIN)/python scripts/plain_english.py
	$(BIN)/mypy --cache-dir "$(KEPT)/mypy"

lint-web:
	$(BIN)/python -m nearfar.format.generate --check
	cd web && npm run --silent check -- --incremental --tsBuildInfoFile "$(KEPT)/tsc/web.json" && npm run --silent lint

# The web tests run beside the linters, which leave a processor idle; then most of the Python tests side by side, and
# those that take the whole machine (tests/conftest.py) two files at a time, since they wait much. All share what they
# build. Each run writes how many CPU seconds its tests took; the last line compares them with tests/budgets.json.
TIMES := $(CURDIR)/out/test-times
# pytest keeps its rewritten assertions as byte code; without it each process rewrites all test files (12 CPU seconds).
unexport PYTHONDONTWRITEBYTECODE
test: export NEARFAR_TEST_ARTIFACTS := $(CURDIR)/out/tests
test: setup-dev ## lint and all tests, products of parameters in turns: what CI runs
	rm -rf "$(NEARFAR_TEST_ARTIFACTS)" "$(TIMES)" && mkdir -p "$(NEARFAR_TEST_ARTIFACTS)" "$(TIMES)"
	@$(SIDE) -j4 lint-python clients $(if $(WEB),lint-web test-web)
	NEARFAR_TEST_TIMES="$(TIMES)/side-by-side.json" $(BIN)/python -m pytest -rs -m "not alone" --numprocesses auto --dist loadgroup --no-loadscope-reorder
	NEARFAR_TEST_TIMES="$(TIMES)/alone.json" $(BIN)/python -m pytest -rs -m alone --numprocesses 2 --dist loadgroup --no-loadscope-reorder
	$(BIN)/python -m tests.support.budgets "$(TIMES)"/*.json

test-web:
	cd web && NEARFAR_TEST_TIMES="$(TIMES)/web.json" npm run --silent test:all

test-all: export NEARFAR_TURN := all
test-all: test ## the same with all turns: every case on every target and precision, hours

test-times: ## where the last `make test` spent its time: CPU and wall seconds by file, fixture and test
	$(BIN)/python -m tests.support.times "$(TIMES)"/*.json

mutations: setup-dev ## faults put into the code one by one (tests/mutations): the tests must find each
	$(BIN)/python -m tests.mutations

# The fuzz tests are part of `make test` with few examples; here with FUZZ times as many.
fuzz: export NEARFAR_FUZZ := $(or $(FUZZ),50)
fuzz: setup-dev ## every parser of untrusted bytes against hostile input, FUZZ times (50) as long as in CI
	$(BIN)/python -m pytest -rs tests/fuzz --numprocesses auto
ifneq ($(WEB),)
	cd web && npx vitest run test/fuzz --testTimeout 36000000
endif

BENCH_READY := $(VENV)/.bench-ready
$(BENCH_READY): $(DEV_READY)
	CMAKE_ARGS="$${CMAKE_ARGS:-$$(scripts/llama_cpp_flags.sh)}" $(BIN)/python -m pip install --quiet -e ".[$(DEV_EXTRAS),bench]"
	@touch $@

bench: setup-dev $(BENCH_READY) ## the scripts of benchmarks/, one after the other, beside their peers
	@for script in benchmarks/*.py benchmarks/routing/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: setup-dev ## the documentation as a site, with the API references: out/site/index.html
ifneq ($(WEB),)
	cd web && npm run --silent docs
endif
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: setup-dev ## the wheel and the source distribution, the same bytes each time: out/dist
	$(BIN)/pyproject-build --no-isolation --outdir out/dist .

clean: ## everything that was built or downloaded here
	rm -rf $(VENV) out web/dist web/out web/LICENSE web/node_modules .mypy_cache .ruff_cache .pytest_cache
