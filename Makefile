# make demo · make test · make bench · make check: each sets up all it needs.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Builds are shared between clones, one directory per lockfile.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/layerzero
export CARGO_TARGET_DIR ?= $(CACHE)/target-$(shell sha256sum Cargo.lock | cut -c1-16)
# The Python environment; only the test data's generator and the linters need one.
LZ_VENV ?= .venv
PYTHON := $(LZ_VENV)/bin/python
VENV_READY := $(LZ_VENV)/.ready-$(shell sha256sum requirements-dev.txt | cut -c1-16)

NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)

.PHONY: help demo test bench check loom venv fmt schemas testdata clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: ## detect, list, select, explain, run
	@cargo build --quiet -p lz-cli
	@bash scripts/demo.sh "$(CARGO_TARGET_DIR)/debug/layerzero"

test: venv ## every test
ifeq ($(NEXTEST),yes)
	cargo nextest run --workspace
else
	cargo test --workspace --lib --bins --tests
endif
	cargo test --workspace --doc
	$(MAKE) --no-print-directory loom
	$(PYTHON) testdata/generate.py --check

loom: ## models of the hand-written atomics
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$(CARGO_TARGET_DIR)/loom" \
	  cargo test --manifest-path crates/lz-select/loom/Cargo.toml --test models

bench: ## what selection costs here
	cargo build --release -p lz-cli
	"$(CARGO_TARGET_DIR)/release/layerzero" bench select

check: venv ## everything the gate wants: format, lints, tests, licences, generated files
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(MAKE) --no-print-directory test
	cargo run --quiet -p lz-cli -- schema capabilities --check schemas/capabilities-1.0.schema.json
	cargo run --quiet -p lz-cli -- schema device --check schemas/device.schema.json
	$(PYTHON) -m ruff check testdata && $(PYTHON) -m ruff format --check testdata
	$(PYTHON) -m mypy testdata
	cargo deny --version >/dev/null 2>&1 || cargo install --locked --quiet cargo-deny
	cargo deny check --hide-inclusion-graph bans licenses sources

venv: $(VENV_READY)

$(VENV_READY): requirements-dev.txt
	python3 -m venv "$(LZ_VENV)"
	"$(LZ_VENV)/bin/pip" install --quiet --disable-pip-version-check -r requirements-dev.txt
	rm -f "$(LZ_VENV)"/.ready-* && touch "$@"

fmt: venv ## format everything
	cargo fmt --all
	$(PYTHON) -m ruff format testdata

schemas: ## write the generated JSON Schemas
	cargo run --quiet -p lz-cli -- schema capabilities > schemas/capabilities-1.0.schema.json
	cargo run --quiet -p lz-cli -- schema device > schemas/device.schema.json

testdata: venv ## write the expected results of every operation
	$(PYTHON) testdata/generate.py

clean: ## remove this clone's build outputs
	rm -rf target .venv
