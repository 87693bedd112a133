.DEFAULT_GOAL := help
.PHONY: help setup run demo test check docs chaos bench profile page interop generate lock audit clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GENERATE := $(VENV)/generate
INTEROP := $(VENV)/interop
LANGUAGES := $(foreach language,go java typescript,$(INTEROP)/$(language)/.built)
CLIENT_SOURCES := $(wildcard protos/decideonce/v1/*) $(shell find docs/examples/clients tests/interop/go tests/interop/java tests/interop/typescript -type f)
BENCH := $(VENV)/bench
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

chaos: setup ## drive a deployment under faults, judge its history, then fuzz: [MINUTES=10] [INPUTS=100000] [SEED=…]
	@$(BIN)/python -W ignore tests/chaos/run.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python -W ignore tests/chaos/fuzz.py --inputs $(or $(INPUTS),100000) $(if $(SEED),--seed $(SEED))

PARTS := throughput idle_and_latency backlog delivery neighbours purge
LOADED := $(if $(filter throughput growth,$(or $(PART),$(PARTS))),$(BENCH)/load peers)
bench: setup $(LOADED) ## how much it does beside its peers, what else costs what: an hour, or one [PART=throughput|growth|…] [FLAGS=…]
	@set -e; for part in $(or $(PART),$(PARTS)); do \
		PYTHONPATH=tests:tests/policies $(BIN)/python -W ignore tests/bench/$$part.py $(FLAGS); done

profile: setup $(BENCH)/load peers ## where a worker's time goes
	@PYTHONPATH=tests $(BIN)/python -W ignore tests/bench/phases.py $(FLAGS)

page: setup ## write the tables of docs/performance.md from what bench and profile measured last
	@PYTHONPATH=tests $(BIN)/python tests/bench/tables.py

# Debian's package is unpacked here and not installed, so no root is needed.
$(BENCH)/load: tests/bench/load.c | $(STAMP)
	mkdir -p $(BENCH)/nghttp2
	cd $(BENCH)/nghttp2 && apt-get -qq -o APT::Sandbox::User=root download libnghttp2-dev && dpkg-deb -x libnghttp2-dev_*.deb .
	$(CC) -std=gnu11 -O2 -Wall -Wextra -Werror -I$(BENCH)/nghttp2/usr/include -o $@ $< $(BENCH)/nghttp2/usr/lib/*/libnghttp2.a

# What can't be fetched isn't measured, and said so.
.PHONY: peers
peers: | $(STAMP)
	-@$(MAKE) --no-print-directory $(BENCH)/peers/.installed
	-@$(MAKE) --no-print-directory $(BENCH)/restate/.installed

$(BENCH)/peers/.installed: requirements/bench.txt
	$(PYTHON) -m venv $(BENCH)/peers
	$(BENCH)/peers/bin/python $(PIP) --require-hashes -r $<
	@touch $@

$(BENCH)/restate/.installed: tests/bench/package.json tests/bench/package-lock.json
	mkdir -p $(BENCH)/restate
	cp $^ $(BENCH)/restate
	npm ci --silent --ignore-scripts --no-audit --no-fund --prefix $(BENCH)/restate
	@touch $@

interop: setup $(LANGUAGES) $(INTEROP)/kafka/.fetched $(INTEROP)/prometheus/.fetched $(INTEROP)/bin/.fetched $(BENCH)/load ## other languages, Apache Kafka, Prometheus, load: needs go, java, mvn, node, npm, gcc and apt
	$(BIN)/pytest -m interop

# Nothing that is there already is fetched again.
$(INTEROP)/kafka/.fetched: tests/interop/pom.xml | $(STAMP)
	mvn --quiet --batch-mode --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$(@D)
	@touch $@

$(INTEROP)/prometheus/.fetched: | $(STAMP)
	@# Unpacked here and not installed, so no root is needed.
	mkdir -p $(@D)
	cd $(@D) && apt-get -qq -o APT::Sandbox::User=root download prometheus && dpkg-deb -x prometheus_*.deb .
	@touch $@

$(INTEROP)/bin/.fetched: | $(STAMP)
	GOBIN=$(CURDIR)/$(@D) go install github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4
	GOBIN=$(CURDIR)/$(@D) go install github.com/bojand/ghz/cmd/ghz@v0.93.0
	@touch $@

$(LANGUAGES): $(INTEROP)/%/.built: tests/interop/build $(CLIENT_SOURCES) | $(INTEROP)/bin/.fetched $(GENERATE)/.installed
	tests/interop/build $*
	@touch $@

check: setup $(GENERATE)/.installed ## format, lint, types, imports, protos, stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python tests/typing
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
	cd requirements && for name in serve dev generate bench; do ../$(VENV)/lock/bin/uv pip compile --quiet --upgrade --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate $$name.in -o $$name.txt; done

audit: ## ask PyPI for known vulnerabilities of what is locked
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python $(PIP) pip-audit
	@# Of setuptools 80, which makes stubs: it could put too much into an archive, and here it makes none (docs/security.md).
	for name in serve dev generate bench; do $(VENV)/audit/bin/pip-audit --strict --disable-pip --require-hashes --ignore-vuln PYSEC-2026-3447 -r requirements/$$name.txt || exit 1; done

clean: ## remove what was made
	rm -rf $(VENV) .bench .decideonce build dist
