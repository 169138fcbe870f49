# make demo   set up, profile this machine, plan the bundled model over two unequal stages, run the plan
# make test         every test tier that this machine can run; two processes at once where tests are
#                   independent (make test WORKERS= for one)
# make test-all     the same with every drawn problem, CPU level and product of parameters whole
# make test-quick   what needs no torch, and one model on the CPU: a minute, for people at work
# make test-oldest  what is compiled for GPUs, by the oldest Triton that is supported
# make lint   ruff and mypy          make clean   remove what make made
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPU_INDEX := https://download.pytorch.org/whl/cpu
OUT := out/demo
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
# Tests of `cluster` wait for most of their time, for processes that start and for deadlines.
WAITING := $(subst -n 2,-n 3,$(WORKERS))
TIMES := .test-seconds
BESIDE := .test-beside
# Modules are compiled once, not by each of hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
OLDEST := .oldest
# Before and behind a tier's tests, which are a line of their own without
# a shell: so a signal to make ends them.
begun = @date +%s > .test-$@
noted = @echo "$(@:test-%=%) $$(($$(date +%s) - $$(cat .test-$@)))" >> $(TIMES); rm .test-$@

.PHONY: demo test test-all test-quick test-cpu test-interpret test-compile test-cluster test-hosts test-oldest lint clean setup
setup: $(VENV)/.installed

# torch first and pinned: an unpinned install pulls gigabytes of CUDA on a machine without a GPU.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("llmpq needs Python 3.11 or newer, got " + sys.version) if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null 2>&1 || ! $(PYTHON) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch; \
	else \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --index-url $(CPU_INDEX) --extra-index-url https://pypi.org/simple torch; \
	fi
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[run,serve,dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py --out $(OUT)

# Threads of torch spin while another process has their core: one each where two processes test.
# A file's tests stay together: they share models. In `cluster` each process has one Ray of its own.
# `cluster` waits for most of its time and begins at once, beside `cpu`. Two tiers that heed no clock
# compute beside these at the lowest priority, by one process each: whenever both wait, so a test of
# theirs may take long.
# Ctrl-C, and TERM to make, reach every tier: `&` alone would have the two ignore Ctrl-C, and `wait`
# ends early. (An `env` that cannot say so, as macOS's, runs them as they are.)
HEARS := $(shell env --default-signal=INT,QUIT true 2>/dev/null && echo env --default-signal=INT,QUIT)
test: setup
	@rm -f $(TIMES); start=$$(date +%s); \
	$(HEARS) nice -n 19 $(MAKE) -k WORKERS= test-interpret > $(BESIDE)-interpret 2>&1 & few=$$!; \
	$(HEARS) nice -n 19 $(MAKE) -k WORKERS= test-compile > $(BESIDE)-compile 2>&1 & few="$$few $$!"; \
	$(HEARS) $(MAKE) -k test-cluster > $(BESIDE)-cluster 2>&1 & few="$$few $$!"; \
	$(HEARS) $(MAKE) -k test-cpu & here=$$!; failed=0; \
	trap 'kill $$here $$few 2>/dev/null' TERM HUP; trap : INT; \
	for tier in $$here $$few; do wait $$tier || failed=$$?; done; wait; \
	cat $(BESIDE)-*; rm -f $(BESIDE)-*; \
	echo "all together $$(($$(date +%s) - start))" >> $(TIMES); \
	exit $$failed
	@echo "every tier passed; seconds: $$(cat $(TIMES) | tr '\n' ' ')"; rm -f $(TIMES)

test-all: export LLMPQ_ALL_TESTS = 1
test-all: test

# `gpu` tests skip themselves with the reason where there is no CUDA device.
test-cpu: setup
	$(begun)
	env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(WORKERS) -m 'not interpret and not compile and not cluster and not hosts_long'
	$(noted)
test-interpret: setup
	$(begun)
	env OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q $(WORKERS) --timeout 1500 -m interpret
	$(noted)
test-compile: setup
	$(begun)
	$(BIN)/python -m pytest -q $(WORKERS) --timeout 1500 -m compile
	$(noted)
test-cluster: setup
	$(begun)
	$(BIN)/python -m pytest -q $(WAITING) -m cluster
	$(noted)
# Not in `test`: what is compiled, by the oldest Triton that pyproject.toml allows.
test-oldest: setup
	test -d $(OLDEST)/triton || $(BIN)/python -m pip install -q --no-deps --target $(OLDEST) triton==3.6.0
	env PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -q $(WORKERS) -m compile
# Not in `test`: a quarter of an hour of hosts that are lost on purpose.
test-hosts: setup
	$(BIN)/python -m pytest -q -m hosts_long
test-quick: setup
	env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(WORKERS) -m quick

# Of benchmarks what a change elsewhere breaks is found: modules, names, attributes, overrides.
LOOSE := arg-type assignment call-arg misc return-value union-attr var-annotated
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd benchmarks && MYPYPATH=.:..:../tests ../$(BIN)/mypy --config-file ../pyproject.toml \
	  --no-warn-unused-ignores $(LOOSE:%=--disable-error-code=%) *.py

clean:
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf $(VENV) $(OLDEST) .test-* out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
