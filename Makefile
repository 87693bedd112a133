.DEFAULT_GOAL := help
.PHONY: help setup run demo test check docs chaos bench interop generate lock clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GENERATE := $(VENV)/generate
INTEROP := $(VENV)/interop
PIP := -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
# The example catalog's python policy is importable, as a team's own would be.
export PYTHONPATH := catalog/python
# Nothing of ours forks; gRPC's handlers for it crash programs that are started as another user.
export GRPC_ENABLE_FORK_SUPPORT := 0

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/' | expand -t 12

setup: $(STAMP) ## make .venv with everything, as locked

$(STAMP): requirements/dev.txt pyproject.toml client/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --require-hashes -r requirements/dev.txt
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e client -e .
	@touch $@

run: setup ## serve on an embedded Postgres, show the example decisions, keep serving
	@$(BIN)/python tools/demo.py --keep-serving

demo: setup ## the same, then stop
	@$(BIN)/python tools/demo.py

test: setup ## all tests, on a PostgreSQL of their own
	@# More than two cores' worth: many tests wait for leases, limits and processes.
	$(BIN)/pytest -n 3 --dist worksteal

docs: setup ## build the documentation site: build/site/index.html
	@$(BIN)/python tools/pages.py build/pages
	@# Silences an advertisement; what is locked here isn't MkDocs 2.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

chaos: setup ## drive a deployment under faults and judge its history: [MINUTES=10] [SEED=…]
	@$(BIN)/python -W ignore tests/chaos/run.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

bench: setup ## what purging and publishing cost, and what faults do to events: about 35 minutes
	@PYTHONPATH=tests:tests/policies $(BIN)/python tests/bench/idle_and_latency.py
	@PYTHONPATH=tests:tests/policies $(BIN)/python tests/bench/backlog.py
	@PYTHONPATH=tests:tests/policies $(BIN)/python -W ignore tests/bench/delivery.py
	@PYTHONPATH=tests:tests/policies $(BIN)/python tests/bench/purge.py

interop: setup $(INTEROP)/.fetched ## what needs Apache Kafka or Prometheus: needs java (17 or later), mvn, and Debian's apt
	$(BIN)/pytest -m interop

$(INTEROP)/.fetched: tests/interop/pom.xml Makefile | $(STAMP)
	rm -rf $(INTEROP)
	mvn --quiet --batch-mode --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$(INTEROP)/kafka
	@# Unpacked here and not installed, so no root is needed.
	mkdir -p $(INTEROP)/prometheus
	cd $(INTEROP)/prometheus && apt-get -qq -o APT::Sandbox::User=root download prometheus && dpkg-deb -x prometheus_*.deb .
	@touch $@

check: setup $(GENERATE)/.installed ## format, lint, types, imports, protos, stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf lint
	@tools/buf-breaking $(BIN)/buf
	@tools/generate $(GENERATE)/bin/python --check

generate: setup $(GENERATE)/.installed ## make the stubs from protos/
	@$(BIN)/buf format --write protos
	@tools/generate $(GENERATE)/bin/python

$(GENERATE)/.installed: requirements/generate.txt | $(STAMP)
	$(PYTHON) -m venv $(GENERATE)
	$(GENERATE)/bin/python $(PIP) --require-hashes -r requirements/generate.txt
	@touch $@

lock: ## bring the locked versions up to date
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python $(PIP) uv
	cd requirements && for name in serve dev generate; do ../$(VENV)/lock/bin/uv pip compile --quiet --upgrade --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate $$name.in -o $$name.txt; done

clean: ## remove what was made
	rm -rf $(VENV) .decideonce build dist
