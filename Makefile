# The two commands are `make demo` and `make test`; both set up everything they need in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/tiny

.PHONY: demo test check protos format clean

demo: $(VENV)/.run
	$(BIN)/h3stream generate --model $(MODEL) --example -o clip.mp4

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.make_protos --check

protos: $(VENV)/.dev
	$(BIN)/python -m tools.make_protos

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) var clip.mp4

# A marker per set of packages: made again when what it depends on has changed.
$(VENV)/.run: pyproject.toml client/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e client -e '.[web]'
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e client -e '.[dev]'
	touch $@
