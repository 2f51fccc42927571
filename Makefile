# Each target sets up .venv by itself; the second time that takes a moment.
.PHONY: help setup demo test test-ci test-slow test-cluster test-times lint docs bench gpu-first-hour wheels lock clean
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY := PASSIVE

help:
	@echo "make demo    asynchronous GRPO of a tiny language model, start to finish, on this machine"
	@echo "make test    the default tests; test-ci: whole runs and kills, as in CI; test-slow: fuzzers and sweeps"
	@echo "             test-cluster: real Slurm, Ray and network namespaces, as root; installs them, and nothing is skipped"
	@echo "             test-times: the thirty slowest of the default tests"
	@echo "make lint    ruff, pyright, import contracts"
	@echo "make docs    the documentation as a site, in dist/site"
	@echo "make bench   the quick form of every benchmark"
	@echo "make gpu-first-hour  steps with targets on a machine with GPUs; benchmarks/out/gpu.json and gpu.md;"
	@echo "             MINUTES=45: those that prove most a minute, and fit"
	@echo "make wheels  the packages, in dist/"
	@echo "make lock    resolve the dependencies again"

setup:
	@PYTHON=$(PYTHON) scripts/bootstrap

demo: setup
	$(BIN)/python cookbook/llm_quickstart/recipe.py

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

test-ci: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'ci and not slow'

test-times: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --durations=30 | sed -n '/slowest/,$$p'

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=search

test-cluster: setup
	tests/cluster/install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/cluster --no-skips

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

docs: setup
	scripts/site

bench: setup
	@for name in benchmarks/[a-z]*.py; do echo "== $$name"; $(BIN)/python $$name --quick || exit 1; done

gpu-first-hour: setup
	$(BIN)/python tests/gpu/first_hour.py $(if $(MINUTES),--minutes $(MINUTES))

wheels: setup
	$(BIN)/uv build --all-packages --wheel --no-sources --out-dir dist

lock: setup
	scripts/lock

clean:
	rm -rf .venv dist runs
