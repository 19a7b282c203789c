# make        what there is to do
# make setup  everything below needs it and calls it; a second run takes a second
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
# The version whose CPU build the project is tested with. Any source of it will do: pip's own configuration decides.
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
WEB    := $(wildcard web/package.json)

PYTHON_READY := $(VENV)/.ready
NPM_READY    := $(if $(WEB),web/node_modules/.ready)
WEB_READY    := $(if $(WEB),web/dist/.ready)

.PHONY: help setup system demo test lint fuzz bench docs clean

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: system $(PYTHON_READY) $(WEB_READY) ## system packages, .venv, the web package
	@echo "nearfar is set up: $(BIN)/nearfar --help"

system:
	@scripts/check_system.sh

$(PYTHON_READY): pyproject.toml hatch_build.py | system
	@scripts/check_python.sh "$(PYTHON)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[build,edge,mlx,vulkan,onnx,server,limits,ray,routing,dev,docs]"
	@touch $@

$(NPM_READY): web/package.json web/package-lock.json | system
	cd web && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

$(WEB_READY): $(NPM_READY) $(shell find web/src web/page web/scripts -type f 2>/dev/null) $(wildcard web/*.json) routing/difficulty/model.json
	cd web && npm run build
	@touch $@

demo: setup ## build the sample model, ask it in Python, in headless Chromium, a server, and a client of both
	$(BIN)/python examples/demo.py

lint: setup ## ruff, mypy --strict, tsc, biome; whether what is generated is up to date
	$(BIN)/ruff check .
	$(BIN)/mypy
ifneq ($(WEB),)
	$(BIN)/python -m nearfar.format.generate --check
	cd web && npm run --silent check && npm run --silent lint
endif

# Most tests run side by side; those that take the whole machine (tests/conftest.py) one by one. Both share what they build.
test: export NEARFAR_TEST_ARTIFACTS := $(CURDIR)/out/tests
test: setup lint ## lint and all tests: what CI runs
ifneq ($(WEB),)
	cd web && npm test --silent && npm run --silent test:browser
endif
	rm -rf "$(NEARFAR_TEST_ARTIFACTS)" && mkdir -p "$(NEARFAR_TEST_ARTIFACTS)"
	$(BIN)/python -m pytest -rs -m "not alone" --numprocesses auto --dist loadfile
	$(BIN)/python -m pytest -rs -m alone

# The fuzz tests are part of `make test` with few examples; here with FUZZ times as many.
fuzz: export NEARFAR_FUZZ := $(or $(FUZZ),50)
fuzz: setup ## every parser of untrusted bytes against hostile input, FUZZ times (50) as long as in CI
	$(BIN)/python -m pytest -rs tests/fuzz --numprocesses auto
ifneq ($(WEB),)
	cd web && npx vitest run test/fuzz --testTimeout 36000000
endif

BENCH_READY := $(VENV)/.bench-ready
$(BENCH_READY): $(PYTHON_READY)
	CMAKE_ARGS="$${CMAKE_ARGS:-$$(scripts/llama_cpp_flags.sh)}" $(BIN)/python -m pip install --quiet -e ".[build,edge,mlx,vulkan,onnx,server,limits,ray,routing,dev,bench]"
	@touch $@

bench: setup $(BENCH_READY) ## the scripts of benchmarks/, one after the other, beside their peers
	@for script in benchmarks/*.py benchmarks/routing/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: setup ## the documentation as a site, with the API references: out/site/index.html
ifneq ($(WEB),)
	cd web && npm run --silent docs
endif
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## everything that was built or downloaded here
	rm -rf $(VENV) out web/dist web/out web/LICENSE web/node_modules .mypy_cache .ruff_cache .pytest_cache
