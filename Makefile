# Everything is done in .venv, which the first target makes on a machine that has only Python and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The exact versions that CI ran with, on Python 3.11 to 3.13; `CONSTRAINT=` takes the newest.
CONSTRAINT ?= --constraint constraints.txt
# More arguments for pip, for example an index of CPU or CUDA builds of torch (see README).
PIP_ARGS ?=
# More arguments for `dilocox demo`, for pytest and for benchmarks/run_all.py.
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
# More arguments for `make showcase`: --quick, --minutes 15, --out FOLDER.
SHOWCASE_ARGS ?=
# Processes of `make test`: more than two cores, since many tests wait for a limit of time.
TEST_PROCESSES ?= 4
# Runs of `make chaos`, one a seed, from CHAOS_SEED on.
CHAOS_SEED ?= 1
CHAOS_SEEDS ?= 20
CHAOS_MINUTES ?= 10
# Images of containers often set it; every process would then compile tests and product again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo showcase test test-sweeps test-python test-swarm test-faults test-watch attack chaos test-image simulate lint type audit bench bench-quick clean

help:  ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(BIN)/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		$(CONSTRAINT) --editable '.[dev]'
	touch $@

install: $(BIN)/.installed  ## make .venv and install everything into it

demo: install  ## train a small model with a real swarm on this machine (about 3 minutes)
	$(BIN)/dilocox demo $(DEMO_ARGS)

showcase: install  ## an hour of a 10.9 million Llama on slow links, hurt on a schedule (root, Linux)
	$(BIN)/python benchmarks/showcase.py $(SHOWCASE_ARGS)

test: install  ## unit tests and one small swarm, in four processes (about 4 minutes)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m '(not swarm or smoke) and not sweep' $(TEST_ARGS)

test-sweeps: install  ## more cases of the unit tests: model families, seeds, moments of faults (about 3 minutes)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m sweep $(TEST_ARGS)

test-python:  ## unit tests of compression, dht and pipeline on another Python: make test-python PYTHON=python3.13
	$(MAKE) install VENV=.venv-other PYTHON=$(PYTHON)
	.venv-other/bin/python -m pytest -n 2 -m 'not swarm and not sweep' tests/compression tests/dht tests/pipeline $(TEST_ARGS)

test-faults: install  ## short runs with injected faults, chaos of one seed, one run behind routers, and the demo with its figures checked
	$(BIN)/python -m pytest -m 'faults or demo' $(TEST_ARGS)

test-watch: install  ## Chromium, Prometheus and a monitor look at swarms (the first two are not installed by this)
	$(BIN)/python -m pytest -m watch $(TEST_ARGS)

test-swarm: install  ## all swarm tests: real processes, killed, frozen and far apart (over two hours)
	$(BIN)/python -m pytest -m 'swarm' -s $(TEST_ARGS)

attack: install  ## strangers, members and 200,000 messages of nonsense attack swarms (over an hour); part of test-swarm
	$(BIN)/python -m pytest -m 'swarm' -s tests/attacks $(TEST_ARGS)

chaos: install  ## eight peers hurt at random, many at once; CHAOS_SEEDS=20 runs of CHAOS_MINUTES=10
	CHAOS_SEED=$(CHAOS_SEED) CHAOS_SEEDS=$(CHAOS_SEEDS) CHAOS_MINUTES=$(CHAOS_MINUTES) $(BIN)/python -m pytest -s -m swarm tests/swarm/test_chaos.py $(TEST_ARGS)

test-image:  ## build the container image and train with it (root; podman; about 10 minutes)
	docker/test-image.sh

simulate: install  ## 2,000 seeded schedules of faults in a swarm under a simulated clock (up to 25 minutes)
	$(BIN)/python benchmarks/simulate.py --campaign 2000

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install  ## pyright, strict over the four packages
	$(BIN)/pyright --pythonpath $(BIN)/python

audit: install  ## does the index still offer every pinned version, none of them withdrawn, and do they fit together
	$(BIN)/python -m pip check
	@found=$$($(BIN)/python -m pip install --dry-run --ignore-installed --no-deps $(PIP_ARGS) --requirement constraints.txt 2>&1) \
		|| { echo "$$found"; exit 1; }; case "$$found" in *yanked*) echo "$$found"; exit 1;; esac
	@echo "all $$(grep -c == constraints.txt) pinned versions are offered, none is withdrawn"

bench: install  ## nearly all benchmarks at reduced sizes, in about an hour; into bench-run/ (docs/reproduce.md: what it leaves out)
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

bench-quick: install  ## the same in their shortest form, but real_size.py: do they run (5 minutes)
	$(BIN)/python benchmarks/run_all.py --quick $(BENCH_ARGS)

clean:  ## remove what the other targets made
	rm -rf $(VENV) .venv-other build dist demo-run showcase-run bench-run *.egg-info .pytest_cache .ruff_cache .hypothesis
