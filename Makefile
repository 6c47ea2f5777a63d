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

.PHONY: demo test check search ready lint proto bench clean

demo: $(DEMO)/$(FRAMEWORK)
	@run=runs/demo-$$(date +%Y%m%d-%H%M%S); \
	KERAS_BACKEND=$(FRAMEWORK) $(DEMO)/bin/smaragdine run -o $$run examples/bert.py && \
	$(DEMO)/bin/smaragdine report $$run --html $$run/report.html

$(DEMO)/$(FRAMEWORK): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	@test -d $(DEMO) || { echo "making $(DEMO)"; $(PYTHON) -m venv $(DEMO); }
	@test -n "$(PACKAGES_$(FRAMEWORK))" || { echo "FRAMEWORK is one of torch, tensorflow, jax"; exit 2; }
	@echo "installing smaragdine, keras and $(PACKAGES_$(FRAMEWORK)); this takes a minute or two"
	@$(DEMO)/bin/pip install $(PIP_FLAGS) $(CONSTRAIN) --editable . keras $(PACKAGES_$(FRAMEWORK))
	@touch $@

# No verdict depends on speed, so that tests may run side by side: most wait for frameworks to start, or for
# counters, and three of them keep two cores busy.
WORKERS ?= 3

# The tests start some thousand processes of ours: compiled once, wherever the environment says otherwise.
test: export PYTHONDONTWRITEBYTECODE :=
test: ready lint
	$(TEST)/bin/python -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile tests

# What a change needs before it is committed: within two minutes.
check: ready lint
	$(TEST)/bin/python tools/check.py

# New examples for the properties and the fuzzers, for as long as one likes; it stops at what fails.
MINUTES ?= 10
search: ready
	$(TEST)/bin/python tests/search.py --minutes $(MINUTES)

# The tools come from elsewhere than the packages: both at once.
ready:
	@$(MAKE) --no-print-directory --jobs 2 $(TEST)/installed $(TEST)/tools

lint: $(TEST)/installed
	$(TEST)/bin/ruff check
	$(TEST)/bin/ruff format --check
	$(TEST)/bin/pyright --threads 2 --pythonpath $(TEST)/bin/python
	$(TEST)/bin/lint-imports --no-cache
	$(TEST)/bin/python tools/house.py

$(TEST)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	@test -x $(TEST)/bin/pip || { echo "making $(TEST)"; $(PYTHON) -m venv $(TEST); }
	@echo "installing smaragdine, the frameworks and the tools; this takes some minutes"
	@$(TEST)/bin/pip install $(PIP_FLAGS) --no-compile --constraint constraints.txt --editable '.[dev]' \
		torch tensorflow-cpu keras jax flax optax transformers lightning accelerate uv
	@$(TEST)/bin/pip install $(PIP_FLAGS) --no-compile --constraint constraints.txt --no-deps tf_keras
	@# Compiled is what the tests import, a fifth of it all.
	@for each in 'tensorflow, keras, jax, flax.nnx, optax' 'torch._dynamo, transformers, lightning, matplotlib.pyplot'; \
	do $(TEST)/bin/python -c "import $$each" >/dev/null 2>&1 & done; wait
	@touch $@

# A browser for the HTML report, promtool for Prometheus' text, npm for speedscope's schema: tests that need one
# are skipped where it is missing, and it is installed where that is allowed.
$(TEST)/tools:
	@mkdir -p $(TEST)
	@command -v chromium >/dev/null || missing="chromium"; \
	command -v promtool >/dev/null || missing="$$missing prometheus"; \
	command -v npm >/dev/null || missing="$$missing npm"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing for the tests: $$missing"; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			$$missing) >/dev/null 2>&1 || echo "some are not to be had: their tests are skipped"; \
	fi
	@touch $@

# After a change of proto/: the descriptor set and the types that the package ships.
proto: $(TEST)/installed
	$(TEST)/bin/python proto/generate.py src/smaragdine/monitor/contract

bench: $(TEST)/installed
	$(TEST)/bin/python bench/sampler.py
	$(TEST)/bin/python bench/overhead.py
	$(TEST)/bin/python bench/imports.py
	$(TEST)/bin/python bench/reading.py
	$(TEST)/bin/python bench/intervals.py
	$(TEST)/bin/python bench/accounting.py
	$(TEST)/bin/python bench/daemon.py
	$(TEST)/bin/python bench/decoupling.py
	$(TEST)/bin/python bench/tracing.py --steps 200 --layers 2 --hidden 64 --batch 4 --length 32

clean:
	rm -rf $(TEST) $(DEMO) build dist .pytest_cache .ruff_cache .hypothesis
