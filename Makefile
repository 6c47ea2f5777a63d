# The README's two commands. Each makes its own virtual environment on a bare machine; nothing else is needed
# than Python 3.11 or later and a C compiler for the tests (they build the libraries they test against).
PYTHON ?= python3
DEMO := .venv-demo
TEST := .venv
PIP_FLAGS := --quiet --disable-pip-version-check

# Where there is an NVIDIA GPU the demo should use it; elsewhere JAX is the lightest to install.
FRAMEWORK ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo jax)
PACKAGES_torch := torch
PACKAGES_tensorflow := tensorflow-cpu
PACKAGES_jax := jax
# The pins are for the tests; the demo takes what fits the user's machine, save for CPU-only ones.
CONSTRAIN := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints.txt)

.PHONY: demo test lint bench clean

demo: $(DEMO)/$(FRAMEWORK)
	KERAS_BACKEND=$(FRAMEWORK) $(DEMO)/bin/smaragdine run examples/bert.py

$(DEMO)/$(FRAMEWORK): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	@test -d $(DEMO) || { echo "making $(DEMO)"; $(PYTHON) -m venv $(DEMO); }
	@test -n "$(PACKAGES_$(FRAMEWORK))" || { echo "FRAMEWORK is one of torch, tensorflow, jax"; exit 2; }
	@echo "installing smaragdine, keras and $(PACKAGES_$(FRAMEWORK)); this takes a minute or two"
	@$(DEMO)/bin/pip install $(PIP_FLAGS) $(CONSTRAIN) --editable . keras $(PACKAGES_$(FRAMEWORK))
	@touch $@

test: lint
	$(TEST)/bin/python -m pytest --quiet

lint: $(TEST)/installed
	$(TEST)/bin/ruff check
	$(TEST)/bin/ruff format --check
	$(TEST)/bin/pyright --pythonpath $(TEST)/bin/python
	$(TEST)/bin/lint-imports --no-cache

$(TEST)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	@test -d $(TEST) || { echo "making $(TEST)"; $(PYTHON) -m venv $(TEST); }
	@echo "installing smaragdine, the frameworks and the tools; this takes some minutes"
	@$(TEST)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]' \
		torch tensorflow-cpu keras jax flax optax transformers lightning accelerate uv
	@$(TEST)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt --no-deps tf_keras
	@touch $@

bench: $(TEST)/installed
	$(TEST)/bin/python bench/sampler.py
	$(TEST)/bin/python bench/overhead.py
	$(TEST)/bin/python bench/imports.py
	$(TEST)/bin/python bench/reading.py
	$(TEST)/bin/python bench/intervals.py
	$(TEST)/bin/python bench/accounting.py

clean:
	rm -rf $(TEST) $(DEMO) build dist .pytest_cache .ruff_cache .hypothesis
