# `make train` and `make test` set up what is missing by themselves: a virtual environment, PyTorch,
# the build. They need python3 >= 3.10, g++ and the Python package index.

PYTHON ?= python3
TORCH ?= torch==2.11.0
VENV ?= .venv
OUT ?= runs/train
TRAIN_FLAGS ?= --compare --steps 50 --out $(OUT)
PYTEST_FLAGS ?=
TEST_JOBS ?= 2

TOOLS := numpy "setuptools>=77,<82" wheel ninja matplotlib cmake==3.31.10 pytest==9.2.0 \
	pytest-xdist==3.8.0 ruff==0.17.5 clang-format==14.0.6
# What distca integrates with; their tests skip where they are missing. 40 s, 620 MB. torchtitan
# wants datasets below 4.8.
FRAMEWORKS := transformers==5.24.0 accelerate==1.15.0 datasets==4.7.0 trl==1.16.0 \
	"torchtitan==0.3.0; python_version >= '3.11'"
BIN := $(VENV)/bin
PLANNER_BUILD := build/planner
FUZZ_BUILD := build/fuzz
FUZZ_SECONDS ?= 300
WHEELS_FLAGS ?=
FUZZ_CXX ?= $(shell command -v clang++ || echo c++)

# One stamp per torch, so that another TORCH installs it and rebuilds.
ENVIRONMENT := $(VENV)/.installed-$(subst =,-,$(TORCH))
LIBRARY := distca/_C.so
LIBRARY_SOURCES := setup.py pyproject.toml \
	$(shell find csrc -path csrc/tests -prune -o -type f -name '*.h' -print -o -name '*.cpp' -print \
	-o -name '*.cu' -print -o -name '*.cuh' -print)
PYTHON_FILES := setup.py distca tests benchmarks examples tools docs/generate.py

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: train test test-cpp test-python test-quick test-gpu test-transformers test-stacks test-megatron wheels docs fuzz tidy install format check-format clean googletest
.DELETE_ON_ERROR:

train: $(LIBRARY)
	@num_processes=4; if command -v nvidia-smi >/dev/null; then num_processes=$$($(BIN)/python -c \
		"import torch; print(torch.cuda.device_count() or 4)"); fi; \
	$(BIN)/torchrun --standalone --nproc-per-node $$num_processes examples/train.py $(TRAIN_FLAGS)

test: test-cpp test-python

test-cpp: $(ENVIRONMENT)
	@$(MAKE) --no-print-directory googletest
	$(BIN)/cmake -S csrc -B $(PLANNER_BUILD) -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build $(PLANNER_BUILD) --parallel $(TEST_JOBS)
	$(BIN)/ctest --test-dir $(PLANNER_BUILD) --output-on-failure --parallel $(TEST_JOBS)

# Under sanitizers, with libFuzzer where clang++ is installed.
fuzz: $(ENVIRONMENT)
	@$(MAKE) --no-print-directory googletest
	$(BIN)/cmake -S csrc -B $(FUZZ_BUILD) -DCMAKE_CXX_COMPILER=$(FUZZ_CXX)
	$(BIN)/cmake --build $(FUZZ_BUILD) --parallel 2 --target planner_fuzz
	cd $(FUZZ_BUILD) && ./planner_fuzz -max_total_time=$(FUZZ_SECONDS)

# The sources of core and planner, by the checks in .clang-tidy; a minute or two.
tidy:
	@command -v clang-tidy >/dev/null || $(call apt_install,clang-tidy)
	clang-tidy --quiet $$(find csrc/core csrc/planner -name "*.cpp") -- -std=c++20 -Icsrc

test-python: $(LIBRARY)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

# What starts no processes: two thirds of the code's tests in half a minute.
test-quick: $(LIBRARY)
	$(BIN)/python -m pytest -m "not processes" $(PYTEST_FLAGS)

# Tests that need a GPU for themselves run after those that share it.
test-gpu: $(LIBRARY)
	$(BIN)/python -m pytest -m "gpu and not whole_gpu" -n $(TEST_JOBS) --dist loadfile $(PYTEST_FLAGS)
	$(BIN)/python -m pytest -m whole_gpu $(PYTEST_FLAGS)

# With older releases of transformers, with stacks that train its models, and with Megatron-Core,
# each in an environment of its own. They take 10, 8 and 3 minutes; the stacks need 4 GB of packages
# and Megatron-Core 5 GB. Megatron-Core is skipped where no Python 3.12 is found.
test-transformers test-stacks test-megatron: $(LIBRARY)
	$(BIN)/python tools/stacks.py $(@:test-%=%) $(PYTEST_FLAGS)

# A wheel for each minor version of PyTorch, tested on the CPU in a fresh environment: 5 GB of
# packages and 30 minutes of processor time for each. WHEELS_FLAGS="--cpu --torch 2.15" for a check.
wheels: $(ENVIRONMENT)
	$(BIN)/python tools/wheels.py $(WHEELS_FLAGS)

# Pages and pictures that follow from the code.
docs: $(LIBRARY)
	$(BIN)/python docs/generate.py --pictures

install: $(LIBRARY)

format: $(ENVIRONMENT)
	find csrc tests benchmarks -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
		-exec $(BIN)/clang-format -i {} +
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)

check-format: $(ENVIRONMENT)
	find csrc tests benchmarks -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
		-exec $(BIN)/clang-format --dry-run --Werror {} +
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)

clean:
	rm -rf build runs distca.egg-info $(LIBRARY)

$(ENVIRONMENT): Makefile
	@$(PYTHON) -c 'import sys; sys.exit("distca needs Python >= 3.10; run make PYTHON=python3.x" \
		if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call apt_install,python3-venv)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and the tools into $(VENV); a few minutes and about 5 GB the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(TOOLS) $(FRAMEWORKS)
	@rm -f $(VENV)/.installed-*
	touch $@

$(LIBRARY): $(ENVIRONMENT) $(LIBRARY_SOURCES)
	@echo "building $(LIBRARY) and installing distca into $(VENV); a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	touch $@

googletest:
	@echo '#include <gtest/gtest.h>' | $${CXX:-c++} -x c++ -E - >/dev/null 2>&1 || \
		$(call apt_install,libgtest-dev)

# Debian packages, only where they are missing; without root it says what to install.
apt_install = { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && apt-get install -y -qq $(1); \
	else echo "missing: install the package $(1), then run make again" >&2; exit 1; fi; }
