# make demo: from checkpoint to answer. make test: every test. make check: what a change must pass. make models: fetch only.
# make lint: the part of make check that runs nothing.
# make conformance: every architecture against transformers and llama.cpp's own script, and all golden data of it; what
# runs models once more on ik_llama.cpp's kernels.
# make kernels: that last part.
# make bench: the table of docs/speed.md, against llama.cpp's own tools (builds them first, takes half an hour).

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
FAST := .venv/fast
# Two at a time: most tests keep one core busy, and a model that runs takes two.
PYTEST := pytest --numprocesses 2 --dist worksteal
# So that the commands that make shows are the commands that a person types.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test check lint checkpoint models conformance kernels bench clean
.DEFAULT_GOAL := demo

demo: checkpoint
	edgeinfer convert $(shell $(BIN)/python scripts/make_checkpoint.py smollm2) -t q4_k_m -o demo.gguf --overwrite
	edgeinfer run demo.gguf "Why is the sky blue?" -n 64 --temp 0

test: models
	$(PYTEST)

check: lint
	$(PYTEST) -m "not model"

lint: $(INSTALLED)
	ruff format --check --quiet .
	ruff check --quiet .
	mypy

# SmolLM2-135M-Instruct and the checkpoint made of it, in $EDGEINFER_CACHE or ~/.cache/edgeinfer.
checkpoint: $(INSTALLED)
	@$(BIN)/python scripts/make_checkpoint.py smollm2 > /dev/null

# The rest that tests need, there too: all-MiniLM-L6-v2.
models: checkpoint
	@$(BIN)/python scripts/fetch_model.py minilm > /dev/null

conformance: $(INSTALLED) kernels
	@$(BIN)/python scripts/conformance.py
	@$(BIN)/python scripts/golden_embeddings.py
	$(PYTEST) tests/conformance --all-types
	$(PYTEST) -m slow tests/convert tests/native/test_recurrent.py

# Beside the environment, because the other tests are those of a machine without it.
kernels: models $(FAST)
	PYTHONPATH=$(CURDIR)/$(FAST) $(PYTEST) --kernels ik tests/native tests/api

# Compared on x86 alone.
$(FAST): $(INSTALLED)
	@test "$$(uname -m)" != x86_64 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --upgrade --target $@ "$$($(BIN)/python -c 'from edgeinfer.native.ik_package import REQUIREMENT; print(REQUIREMENT)')"
	@mkdir -p $@ && touch $@

bench: models
	@$(BIN)/python scripts/compare.py

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("edgeinfer needs Python 3.11 or newer: make PYTHON=/path/to/python3" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing into .venv. The first time on a machine this compiles llama.cpp: about five minutes on two cores.'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@mkdir -p .venv/share/man/man1 && ln -sf ../../../../docs/edgeinfer.1 .venv/share/man/man1/
	@touch $@

clean:
	rm -rf .venv demo.gguf
