# make demo · make test · make bench · make docs · make check: each sets up all it needs.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Builds and the Python environment are shared between clones, one directory per lockfile.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/layerzero
export CARGO_TARGET_DIR ?= $(CACHE)/target-$(shell sha256sum Cargo.lock | cut -c1-16)
LZ_VENV ?= $(CACHE)/venv-$(shell sha256sum requirements-dev.txt | cut -c1-16)
PYTHON := $(LZ_VENV)/bin/python
# What packs a wheel needs no torch, and the tools that build the documentation are many: each has an environment of its own.
LZ_BUILD_VENV ?= $(CACHE)/build-$(shell sha256sum requirements-build.txt | cut -c1-16)
LZ_DOCS_VENV ?= $(CACHE)/docs-$(shell sha256sum requirements-docs.txt | cut -c1-16)
UV := uv==0.13.7
# What mypy knows of torch and of our own files, by their contents: a new clone is checked in a second instead of twenty.
export MYPY_CACHE_DIR ?= $(CACHE)/mypy-$(shell sha256sum requirements-dev.txt | cut -c1-16)

# The package is used from the tree: the native module is built into it.
export PYTHONPATH := $(CURDIR)/python
PROFILE ?= dev
BUILT := $(CARGO_TARGET_DIR)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))/lib_native.so
NATIVE := python/layerzero/_native.abi3.so
# What ruff looks at, and what mypy looks at: typed_calls.py says of each call what its type is.
SOURCES := testdata python tests examples bench scripts
TYPED := testdata python/layerzero scripts examples/quickstart.py tests/support/typed_calls.py

NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)

.PHONY: help demo test test-rust test-python test-full test-isa bench lint generated check docs reference loom venv clone-venv develop wheel sdist check-wheel check-container lint-packaging stubs fmt schemas testdata lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: ## measure this machine, see what is chosen and why, and a report of it
	@python3 scripts/set_up.py --environment "$(LZ_VENV)" --module "$(BUILT)" --profile $(PROFILE)
	@CARGO_TERM_QUIET=true $(MAKE) --no-print-directory --silent develop
	@env -u PYTHONPATH .venv/bin/python examples/demo.py

test: test-rust test-python ## every test but the slow ones

test-rust: venv ## the Rust tests, the models of the atomics, the test data
ifeq ($(NEXTEST),yes)
	cargo nextest run --workspace
else
	cargo test --workspace --tests
endif
	cargo test --workspace --doc
	$(MAKE) --no-print-directory loom
	$(PYTHON) testdata/generate.py --check

test-python: develop ## the Python tests but those marked slow
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" tests

test-full: develop ## every Python test, slow ones too, ten times the cases, 1,000 exits (hours)
	LZ_TEST_SCALE=full $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

test-isa: develop ## the tests that run kernels or show texts, as on CPUs with fewer instruction sets (hours)
	LZ_TEST_SCALE=full $(PYTHON) -m pytest tests/ops/test_isa.py

loom: ## models of the hand-written atomics
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$(CARGO_TARGET_DIR)/loom" \
	  cargo test --manifest-path crates/lz-select/loom/Cargo.toml --test models
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$(CARGO_TARGET_DIR)/loom" \
	  cargo test --manifest-path crates/lz-resilience/loom/Cargo.toml --test models

bench: ## what a call and a selection cost here, and what tuning is worth
	@$(MAKE) --no-print-directory develop PROFILE=release
	$(PYTHON) -m layerzero bench select
	$(PYTHON) -m layerzero bench overhead
	$(PYTHON) -m layerzero bench native
	OMP_NUM_THREADS=1 $(PYTHON) -m layerzero bench cpu
	$(PYTHON) -m layerzero bench tuning

lint: venv ## formatting, lints, types, generated files: what needs no test; the quickest first
	cargo fmt --all --check
	$(PYTHON) scripts/shared_crates.py
	$(PYTHON) -m ruff check $(SOURCES) && $(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) scripts/chart.py --check
	$(PYTHON) scripts/hardware.py --check
	$(PYTHON) scripts/names.py --check
	$(PYTHON) -m mypy $(TYPED)
	cargo clippy --workspace --all-targets -- -D warnings
	$(MAKE) --no-print-directory generated

# The module has the whole command line: `cargo run -p lz-cli` would compile every crate once more, with other features.
generated: develop ## are the files that the engine writes what it would write now?
	$(PYTHON) -m layerzero schema capabilities --check schemas/capabilities-1.0.schema.json
	$(PYTHON) -m layerzero schema device --check schemas/device.schema.json
	$(PYTHON) -m layerzero schema config --check schemas/config.schema.json
	$(PYTHON) -m layerzero schema dispatch-table --check schemas/dispatch-table-1.0.schema.json
	$(PYTHON) -m layerzero config reference | diff - docs/settings.md
	$(PYTHON) scripts/stubs.py --check
	$(PYTHON) -m mypy.stubtest layerzero._native --mypy-config-file scripts/stubtest.ini --allowlist scripts/stubtest_allow.txt
	$(PYTHON) scripts/reference.py --check

check: lint ## everything a change must pass: lints, tests, licences, generated files, the documentation
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory docs
	cargo deny --version >/dev/null 2>&1 || cargo install --locked --quiet cargo-deny
	cargo deny check --hide-inclusion-graph bans licenses sources
	$(MAKE) --no-print-directory lint-packaging
	$(MAKE) --no-print-directory check-wheel
	$(MAKE) --no-print-directory check-container WHEEL="$$(ls -t dist/*.whl | head -1)"

docs: $(LZ_DOCS_VENV)/.ready ## build the documentation into site/, fail on any warning, and check its links
	NO_MKDOCS_2_WARNING=1 $(LZ_DOCS_VENV)/bin/mkdocs build --strict
	$(LZ_DOCS_VENV)/bin/python scripts/check_site.py site

$(LZ_DOCS_VENV)/.ready:
	mkdir -p "$(dir $(LZ_DOCS_VENV))"
	flock "$(LZ_DOCS_VENV).lock" bash scripts/venv.sh "$(LZ_DOCS_VENV)" "$(UV)" requirements-docs.txt

reference: develop ## write the reference pages and the chart of the documentation
	$(PYTHON) scripts/reference.py
	$(PYTHON) scripts/chart.py

# A half-made environment is never taken for a whole one, and two clones may make it at the same time.
venv: $(LZ_VENV)/.ready
$(LZ_VENV)/.ready:
	mkdir -p "$(dir $(LZ_VENV))"
	@flock "$(LZ_VENV).lock" bash scripts/venv.sh "$(LZ_VENV)" "$(UV)" requirements-dev.txt

# This clone's own environment, for you: `source .venv/bin/activate`, then `layerzero` and `import layerzero` are this tree's.
clone-venv: venv
	@bash scripts/clone_venv.sh "$(LZ_VENV)"

develop: venv clone-venv ## build the native module into the package (PROFILE=release for speed)
	@[ -e "$(BUILT)" ] || echo "Building the native module ($(PROFILE)): about 130 crates, three to four minutes on two cores."
	cargo build --profile $(PROFILE) -p lz-python
	@cmp -s "$(BUILT)" $(NATIVE) || (cp "$(BUILT)" $(NATIVE).new && mv $(NATIVE).new $(NATIVE))

$(LZ_BUILD_VENV)/.ready:
	mkdir -p "$(dir $(LZ_BUILD_VENV))"
	@flock "$(LZ_BUILD_VENV).lock" bash scripts/venv.sh "$(LZ_BUILD_VENV)" "$(UV)" requirements-build.txt

wheel: $(LZ_BUILD_VENV)/.ready ## build the wheel into dist/
	$(LZ_BUILD_VENV)/bin/maturin build --release --locked --interpreter $(LZ_BUILD_VENV)/bin/python --out dist

sdist: $(LZ_BUILD_VENV)/.ready ## pack the sources into dist/
	$(LZ_BUILD_VENV)/bin/maturin sdist --out dist

# The wheel that `make wheel` builds, or WHEEL=FILE. PYTHONS and TORCHES say which environments, TORCH_BACKEND=cpu takes torch
# without CUDA, REQUIRE_ALL=yes fails where an interpreter is missing.
UV_COMMAND ?= $(LZ_BUILD_VENV)/bin/uv
check-wheel: $(if $(WHEEL),,wheel) $(filter %/.ready,$(UV_COMMAND:/bin/uv=/.ready)) ## install the wheel into clean environments (PYTHONS, TORCHES) and call every operation
	bash scripts/check_wheel.sh --uv $(UV_COMMAND) $(if $(WHEEL),--wheel "$(WHEEL)") \
	  $(if $(PYTHONS),--pythons "$(PYTHONS)") $(if $(TORCHES),--torches "$(TORCHES)") \
	  $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) $(if $(REQUIRE_ALL),--require-all $(REQUIRE_ALL))

check-container: $(if $(WHEEL),,wheel) ## build the CPU image where a builder is, else run its steps in a clean root
	bash scripts/check_container.sh $(WHEEL)

lint-packaging: venv ## lint the Dockerfiles, the shell scripts, the workflow and CITATION.cff
	bash scripts/lint_packaging.sh $(LZ_VENV)/bin/uvx

stubs: develop ## write the type stubs of the native module
	$(PYTHON) scripts/stubs.py

fmt: venv ## format everything
	cargo fmt --all
	$(PYTHON) -m ruff format $(SOURCES)

schemas: develop ## write the generated JSON Schemas and the reference of settings
	$(PYTHON) -m layerzero schema capabilities > schemas/capabilities-1.0.schema.json
	$(PYTHON) -m layerzero schema device > schemas/device.schema.json
	$(PYTHON) -m layerzero schema config > schemas/config.schema.json
	$(PYTHON) -m layerzero schema dispatch-table > schemas/dispatch-table-1.0.schema.json
	$(PYTHON) -m layerzero config reference > docs/settings.md
	$(PYTHON) scripts/names.py
	$(PYTHON) scripts/hardware.py

testdata: venv ## write the expected results of every operation
	$(PYTHON) testdata/generate.py

lock: venv ## pin what requirements-dev.in and requirements-docs.in ask for
	$(LZ_VENV)/bin/uv pip compile --python $(PYTHON) --no-header --no-annotate requirements-dev.in -o requirements-dev.txt
	$(LZ_VENV)/bin/uv pip compile --python $(PYTHON) --no-header --no-annotate requirements-docs.in -o requirements-docs.txt

clean: ## remove this clone's build outputs
	rm -rf target .venv dist site $(NATIVE)
