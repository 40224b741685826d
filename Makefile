# Each target makes what it needs in $(VENV), from $(CONSTRAINTS).
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
VENV_ARGS ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-compat quality docs

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+: .*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." is handed on: make demo ARGS="--help", make test ARGS="-m slow -k streaming"'

# Threads that wait for work would otherwise spin, and take the cores from those that have some.
demo: $(VENV)/.installed-demo ## show a trained adapter's routing, then train, save, reload and use one (writes out/)
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python recipes/demo.py $(ARGS)

test: $(VENV)/.installed-test ## run the tests; the slow and the GPU tier only when asked: ARGS="-m slow"
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)

test-compat: ## run the tests with the oldest transformers, peft and huggingface_hub, in an environment of its own
	$(MAKE) test VENV=$(VENV)-oldest CONSTRAINTS=constraints-oldest.txt

quality: $(VENV)/.installed-quality ## lint, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs ## write the API reference, out/reference/index.html
	$(VENV)/bin/python recipes/reference.py $(ARGS)

# Debian splits venv's ensurepip into a package of its own, so pip is installed by the pip that is there.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("elastic_peft needs Python 3.11 or newer, $(PYTHON) is %d.%d: set PYTHON=" % sys.version_info[:2])'
	$(PYTHON) -m venv --without-pip $(VENV_ARGS) $(VENV)
	$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet --ignore-installed pip

# setuptools warns about every editable install.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) $(VENV)/bin/pip
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$*]'
	@touch $@
