# Everything a newcomer needs: `make demo` and `make test` set themselves up.

PYTHON ?= python3.11
LOCK := $(shell sha256sum requirements.lock | cut -c1-12)
ENV := .envs/$(LOCK)
READY := $(ENV)/.ready
BIN := .venv/bin
NPU_MADE_OF := requirements.lock requirements-npu.lock scripts/setup_npu.sh \
	$(sort $(wildcard tests/npu/standin/*.cpp tests/npu/standin/*.h)) tests/npu/standin/build.py
NPU_ENV := .envs/npu-$(shell cat $(NPU_MADE_OF) | sha256sum | cut -c1-12)
NPU_READY := $(NPU_ENV)/.ready

.PHONY: help setup demo test check mutants bench bench-cuda test-cuda coverage soak newcomer \
	setup-npu test-npu clean

help:
	@echo "make setup    environment with all that demo and tests need, in $(ENV)"
	@echo "make demo     a real vLLM on CPU with DRAM and SSD tiers; engine and daemon are killed on the way"
	@echo "make test     planted bugs, then all tests"
	@echo "make check    ruff, formatting, mypy --strict"
	@echo "make mutants  planted bugs only"
	@echo "make bench    tierkv bench rpc, copy and fs"
	@echo "make bench-cuda tierkv bench device, on a GPU with CUDA_PYTHON=python3; without one on CPU tensors"
	@echo "make test-cuda tests of copies on a GPU, likewise; without one they are skipped"
	@echo "make coverage lines and branches that the tests without vLLM reach"
	@echo "make soak     the state machine with many more examples, traces at more sizes"
	@echo "make newcomer the tutorial in a fresh clone; URL=... clones from there"
	@echo "make setup-npu environment with the real torch-npu over a stand-in for the Ascend runtime"
	@echo "make test-npu tests of the Ascend device in that environment; needs g++, no NPU"

setup: $(READY)
	@ln -sfn $(ENV) .venv

$(READY): requirements.lock pyproject.toml scripts/setup.sh
	bash scripts/setup.sh "$(PYTHON)" "$(ENV)"
	@touch $(READY)

demo: setup
	$(BIN)/python -m tierkv.bench.demo --output build/demo.json

test: mutants
	$(BIN)/python -m pytest

# The stand-in for the Ascend runtime is C++.
HAS_COMPILER := $(shell command -v g++)

mutants: setup $(if $(HAS_COMPILER),setup-npu)
	$(BIN)/python scripts/mutants.py \
		$(if $(HAS_COMPILER),--npu "$(NPU_ENV)",--skip-npu "g++ is not installed")

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/tierkv bench rpc
	$(BIN)/tierkv bench copy
	$(BIN)/tierkv bench fs --path build

# The lock file's torch knows no GPU. Where one is, name a Python whose torch sees it, and which has
# what pyproject.toml lists: make bench-cuda CUDA_PYTHON=python3
CUDA_PYTHON ?= $(BIN)/python
CUDA_SETUP := $(if $(filter $(BIN)/python,$(CUDA_PYTHON)),setup)

bench-cuda: $(CUDA_SETUP)
	$(CUDA_PYTHON) -m tierkv.cli.main bench device --output build/bench-device.json

test-cuda: $(CUDA_SETUP)
	@$(CUDA_PYTHON) -c "import torch; torch.cuda.is_available() or print( \
		'torch', torch.__version__, 'sees no CUDA device here: tests that need one are skipped')"
	$(CUDA_PYTHON) -m pytest -rs tests/test_transfers.py $(wildcard tests/cuda)

coverage: setup
	$(BIN)/python -m coverage run -m pytest -m "not vllm"
	$(BIN)/python -m coverage report --skip-covered

soak: setup
	MACHINE_EXAMPLES=3000 $(BIN)/python -m pytest tests/test_core_machine.py
	TRACES_WHOLE=1 $(BIN)/python -m pytest tests/test_bench_replay.py

newcomer:
	bash scripts/newcomer.sh $(URL)

setup-npu: setup $(NPU_READY)

$(NPU_READY): $(NPU_MADE_OF)
	bash scripts/setup_npu.sh .venv "$(NPU_ENV)"
	@touch $(NPU_READY)

# Without the variable, `import torch` would load torch-npu everywhere.
test-npu: setup-npu
	LD_LIBRARY_PATH="$(CURDIR)/$(NPU_ENV)/standin" TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
		$(NPU_ENV)/bin/python -m pytest tests/npu

clean:
	rm -rf build .venv .envs
