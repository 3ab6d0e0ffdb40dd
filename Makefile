# What a person and CI run, and nothing else. Start with `make demo`.
#
#   make env     .venv with the `stepscope` command in it (pip; again when pyproject.toml or constraints.txt change)
#   make demo    two real four-rank training runs, where their time went, and how they differ
#   make test    the tests (the slow ones run in `make bench`)
#   make lint    ruff, mypy, import-linter
#   make bench   the slow tests and the benchmarks
#
# Where pip's torch carries CUDA, `make env PIP_FLAGS="--extra-index-url URL"` with PyTorch's CPU index is the small build.
#
# `make demo` ends in the browser; DEMO_SERVE=0 ends it after the analysis.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
DEMO_SERVE ?= 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.stepscope-installed

.DEFAULT_GOAL := help
.PHONY: help env demo test lint bench

help:
	@sed -n 's/^#   make /  make /p' $(firstword $(MAKEFILE_LIST))

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (about a minute where the packages are near) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[runtime,dev]'
	@touch $@

# Status 3 of `analyze` says "done, but the health report touches figures": worth reading, no reason to stop.
demo: env
	@set -e; PATH="$(abspath $(BIN)):$$PATH"; \
	root=runs/demo/$$(date +%Y%m%d-%H%M%S); \
	say() { printf '\n$$ %s\n' "$$*"; "$$@"; }; \
	read_run() { say stepscope analyze "$$1" --html "$$1.html" || test $$? -eq 3; }; \
	say stepscope run --dp 4 --steps 6 --out $$root/dp4; \
	say stepscope run --dp 2 --pp 2 --schedule 1f1b --microbatches 8 --steps 6 --out $$root/dp2-pp2-1f1b; \
	read_run $$root/dp4; \
	read_run $$root/dp2-pp2-1f1b; \
	say stepscope compare $$root/dp4 $$root/dp2-pp2-1f1b; \
	printf '\nTwo reports to open in a browser:\n  %s\n  %s\n' $$root/dp4.html $$root/dp2-pp2-1f1b.html; \
	if [ "$(DEMO_SERVE)" != 0 ] && stepscope dashboard --help >/dev/null 2>&1; then \
		say stepscope dashboard runs/demo; \
	fi

test: env
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p stepscope
	$(BIN)/lint-imports --no-logo

bench: env
	$(BIN)/python -m pytest -m slow || test $$? -eq 5 # 5: there is no slow test
	@set -e; for benchmark in benchmarks/*.py; do \
		test -e "$$benchmark" || continue; \
		echo "$$benchmark"; $(BIN)/python "$$benchmark"; \
	done
