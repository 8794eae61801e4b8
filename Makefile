# The whole developer interface. Every target needs only a POSIX shell, make and Python 3.11 or newer.
PYTHON ?= python3
JOBS ?= 2
# Tests at a time: more than cores, since much of their time is waiting for a sandbox.
WORKERS ?= 4
BIN := .venv/bin
STAMP := .venv/.setup-done
# Libraries whose own bounds do not fit the pinned set, or that bring much else. Each has an environment of its own, pinned by
# tests/interop/NAME.txt, and its tests in tests/interop/NAME. browser needs a Chromium: apt-get install -y chromium.
INTEROP := browser deepspeed harbor inspect launch openenv s3 site swebench verifiers verl vllm
# Harbor needs Python 3.12: make interop PYTHON_harbor=PROGRAM names one; without one it is left out, and that is said.
PYTHON_harbor := $(shell for python in python3.12 $(PYTHON); do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)
INTEROP_LEFT_OUT := $(if $(PYTHON_harbor),,$(filter harbor,$(INTEROP)))
INTEROP_HERE := $(filter-out $(INTEROP_LEFT_OUT),$(INTEROP))
INTEROP_STAMPS := $(INTEROP_HERE:%=.venvs/%/.setup-done)
# One thread a process: the tests run in parallel already. Offline: a test never fetches. Bytecode is kept whatever
# the machine says: every process would compile the tests, and pytest rewrite their assertions, anew.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --durations=30

.PHONY: help setup quickstart test test-promises test-sandlock test-long interop check check-types check-rest bench gpu docs site sbom clean

help:
	@echo "make setup       environment in .venv, pinned by constraints.txt"
	@echo "make quickstart  real repositories, a real model, a guarded run: runs/quickstart/report.html"
	@echo "make test        the tests, offline, on the processor"
	@echo "make test-promises  the long tests that guard what the README promises"
	@echo "make test-sandlock  what a sandbox decides, as on a machine without bubblewrap"
	@echo "make test-long   all tests that take minutes: large builds, a Ray cluster, crashes"
	@echo "make interop     what other libraries use of ours, each in an environment of its own"
	@echo "make check       lint, types, import direction, dependencies, spelling, the wheel on its own"
	@echo "make bench       one file per claim, prints its figures"
	@echo "make gpu         checks that need a GPU, one table; under 20 minutes"
	@echo "make docs        writes the pages that are made from the code"
	@echo "make site        the pages as a site: build/site/index.html"
	@echo "make sbom        what the pinned environment holds, with licences, in CycloneDX's form: build/sbom.json"
	@echo "make clean       removes what can be made again, except runs/"

setup: $(STAMP)

# Bytecode of the installed files is made by all cores, where pip would use one. Some are templates and no Python.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed and $(PYTHON) is older or missing: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[quickstart,dev]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib src || true
	$(BIN)/python -c "from composer_replication.tasks.intake.environment import prefetch_toolchain; prefetch_toolchain()"
	@touch $@

quickstart: setup
	$(BIN)/composer-rl quickstart --out runs/quickstart

# The first run proves that the folder of the guard is covered to the last branch; its tests wait for nothing, so a worker has
# a core of its own. The second is every other test: a file stays with one worker, so that what its tests share is made once,
# and tests/conftest.py has the long files begin first. What each test took is kept in build/durations. Continuous integration
# adds the long tests that guard a promise to the second run: make test MARKED="not long or promise".
MARKED ?= not long
test: setup
	$(PYTEST) -n $(JOBS) tests/unit/safety -q --cov=composer_replication.safety --cov-branch --cov-fail-under=100
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m "$(MARKED)" --ignore=tests/unit/safety

# The long tests that guard a promise alone: exact resume, two processes, sharded weights, all channels in one run,
# replicas, builds that are cut off. Only their files are read: each worker would import all others, too.
test-promises: setup
	$(PYTEST) --dist loadfile -m promise $$(grep -rl --include='test_*.py' 'mark\.promise' tests)

# The contract of a sandbox, gradings and a run, where sandlock is the only sandbox; make test holds the others to the contract.
# The modules of tests/no_bubblewrap stand before the package that brings bubblewrap, and its program before a system's.
# Most of it is one file, whose tests share nothing: all workers take from it.
test-sandlock: setup
	PATH="$(CURDIR)/tests/no_bubblewrap:$$PATH" PYTHONPATH=tests/no_bubblewrap $(PYTEST) --dist worksteal \
	  -m "not long" $(ON_SANDLOCK)
ON_SANDLOCK := tests/conformance $(addprefix tests/unit/rollouts/test_grading.py::test_, \
  the_golden_body_passes_visible_and_hidden_tests leaving_the_process_at_import_is_a_failure_of_the_candidate \
  an_answer_cannot_change_the_next_grading an_interrupted_grading_gives_no_score_and_the_grader_goes_on \
  no_reward_is_given_where_the_sandbox_shows_the_hidden_tests) \
  tests/e2e/test_tiny_recipe.py::test_a_run_leaves_everything_that_it_promises

# Builds, clusters and crashes that take minutes together: before a release.
test-long: setup
	$(PYTEST) --dist worksteal -m long

# At the same time; each shows what it said when it is through, and all are run although one fails.
# make interop INTEROP=verifiers has one, as continuous integration does; DeepSpeed, verl and vLLM bring gigabytes each.
interop: setup $(INTEROP_STAMPS)
	@$(if $(INTEROP_LEFT_OUT),echo "== $(INTEROP_LEFT_OUT) is left out: it needs Python 3.12: make interop PYTHON_harbor=PROGRAM")
	@$(if $(INTEROP_HERE),$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) $(INTEROP_HERE:%=interop-%))

interop-%: .venvs/%/.setup-done
	@$(TEST_ENV) .venvs/$*/bin/python -m pytest tests/interop/$* >.venvs/$*/tests.log 2>&1; code=$$?; \
	  echo "== $*"; cat .venvs/$*/tests.log; exit $$code

.venvs/%/.setup-done: tests/interop/%.txt pyproject.toml
	test -x .venvs/$*/bin/python || $(or $(PYTHON_$*),$(PYTHON)) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r tests/interop/$*.txt -e .
	test ! -f tests/interop/$*/unresolved.txt || \
	  .venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/interop/$*/unresolved.txt
	@touch $@

# The types take as long as all the rest: both at the same time.
check: setup
	@$(MAKE) --no-print-directory --jobs=$(JOBS) check-types check-rest

check-types:
	$(BIN)/mypy

check-rest:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --cache-dir .import_linter_cache
	$(BIN)/deptry .
	$(BIN)/codespell
	$(BIN)/python scripts/check_wheel.py

# seeds.py trains for hours and has to be told which study; command_line.py is what the others share.
bench: setup
	@for file in $(filter-out %/seeds.py %/command_line.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python "$$file" || exit 1; done

gpu: setup
	$(BIN)/python scripts/gpu_day.py

docs: setup
	$(BIN)/python scripts/write_recipe_keys.py

site: .venvs/site/.setup-done
	NO_MKDOCS_2_WARNING=1 .venvs/site/bin/python -m mkdocs build --strict --site-dir build/site

sbom: setup
	test -x .venvs/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv .venvs/sbom && \
	  .venvs/sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0; }
	mkdir -p build
	.venvs/sbom/bin/cyclonedx-py environment .venv --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json

clean:
	rm -rf build dist .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
