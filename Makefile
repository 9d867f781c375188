# Two commands matter: `make demo` and `make test`. Each sets up all that it needs, on Debian 12, 13 or Ubuntu 24.04.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a benchmark's PEER_... variables pass sudo, which drops what it isn't told of
SUDO := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)

# what runs the demo, and what its tests need beside
DEMO_PACKAGES := python3-venv gcc libc6-dev runc busybox-static
TEST_PACKAGES := $(DEMO_PACKAGES) crun podman musl musl-tools openssl uidmap util-linux
ENGINE := $(VENV)/containerd# unpacked, not installed: the package would start its daemon

.PHONY: demo test lint bench clean
.DEFAULT_GOAL := help
help:
	@echo "make demo   from a Pod to a GPU inside a container, on this machine, no GPU needed"
	@echo "make test   every test, with real runc and crun"
	@echo "make lint   ruff, mypy, import directions"
	@echo "make bench  the benchmarks"

demo: $(VENV)/.demo
	@scripts/packages $(DEMO_PACKAGES)
	@$(SUDO) $(BIN)/gpulet demo $(DEMO_ARGS)

test: $(VENV)/.dev
	@scripts/packages $(TEST_PACKAGES)
	@command -v containerd >/dev/null || scripts/unpacked $(ENGINE) containerd
	@$(SUDO) env PATH="$$PATH:$(CURDIR)/$(ENGINE)/usr/bin" $(BIN)/python -m pytest $(TEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	@scripts/packages $(TEST_PACKAGES)
	@command -v containerd >/dev/null || scripts/unpacked $(ENGINE) containerd
	@$(SUDO) env PATH="$$PATH:$(CURDIR)/$(ENGINE)/usr/bin" $(shell env | grep '^PEER_') $(BIN)/python -m bench $(BENCH_ARGS)

# pip's hash check covers the locked files; gpulet itself is installed editable, so a `git pull` needs no second install
$(VENV)/.demo: pyproject.toml requirements.lock scripts/venv
	@scripts/venv $(PYTHON) $(VENV) requirements.lock
	@touch $@

$(VENV)/.dev: pyproject.toml requirements-dev.lock scripts/venv
	@scripts/venv $(PYTHON) $(VENV) requirements-dev.lock
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
