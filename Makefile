# make demo and make test do all the set-up on a fresh machine: a virtual environment in .venv, the
# package and what it needs, then the work. PYTHON chooses the interpreter, VENV the place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
SOURCES := setup.py pyproject.toml $(shell find csrc kernels vaemem -type f -not -name '*.pyc' -not -name '*.so*')
C_SOURCES := $(shell find csrc kernels tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cc')
export PYTHONUNBUFFERED := 1
# Bytecode is kept, whatever the caller's environment says: without it each process that imports torch and diffusers spends
# ten seconds on compiling them.
export PYTHONDONTWRITEBYTECODE :=

# For this machine alone GPU kernels are compiled for its own GPU, or for one kind where there is none: all seven kinds take
# minutes. VAEMEM_CUDA_ARCHS="80 90" asks for others and an empty one for all, as wheels have them.
VAEMEM_CUDA_ARCHS ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -oE '^[0-9]+\.[0-9]$$' | tr -d . | sort -u),90)
export VAEMEM_CUDA_ARCHS
# Where there is nvcc; pip install . builds them only if VAEMEM_CUDA=1 asks for it.
VAEMEM_CUDA ?= auto
export VAEMEM_CUDA
SAY_BUILD = echo "Installing vaemem and what it needs in $(VENV): the C core and, where there is nvcc, GPU kernels for compute capability" \
	"$(or $(VAEMEM_CUDA_ARCHS),75 to 120) (VAEMEM_CUDA_ARCHS='80 90' for others, VAEMEM_CUDA=0 for none)."

.DEFAULT_GOAL := help
help: ## this list
	@sed -nE 's/^([a-z-]+):.* ## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "make %-12s %s\n", $$1, $$2 }'

.PHONY: help demo test check lint format site bench scoreboard reproduce drift gpu wheels

demo: $(VENV)/demo.stamp ## the demo's page: out/index.html
	$(BIN)/python -m vaemem demo --out out

test: $(VENV)/test.stamp ## the tests, except the thorough ones
	PYTHONSAFEPATH=1 $(BIN)/pytest

site: $(VENV)/site.stamp ## the calculator and the documents as a site: out/site/index.html, out/site/docs
	PYTHONSAFEPATH=1 $(BIN)/python docs/page/engine/build.py out/site
	PYTHONSAFEPATH=1 $(BIN)/python -m sphinx -q -W --keep-going -d build/site docs out/site/docs
	rm -rf out/site/jupyter_execute # myst-nb's

# Ours compared with PyTorch and OpenVINO in one run; writes benchmarks/results/*.csv. Under a memory limit last: it takes hours, and PyTorch 15 GiB.
bench: $(VENV)/bench.stamp ## speed and memory compared with PyTorch and OpenVINO; writes benchmarks/results (hours)
	$(BIN)/python benchmarks/decode.py --op decode encode --precision highest high \
	    --contestants vaemem vaemem-avx2 torch torch-tuned torch-avx2 openvino
	$(BIN)/python benchmarks/decode.py --op decode encode --dtype bfloat16 \
	    --contestants vaemem vaemem-avx512bf16 vaemem-avx512 vaemem-avx2 torch torch-tuned openvino
	$(BIN)/python benchmarks/decode.py --op decode encode --size 1024 --dtype bfloat16 --rounds 3
	$(BIN)/python benchmarks/decode.py --bars
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python benchmarks/passes.py --precision high
	$(BIN)/python benchmarks/passes.py --dtype bfloat16
	$(BIN)/python benchmarks/half_errors.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/memory.py --op encode
	$(BIN)/python benchmarks/memory.py --size 2048 --rounds 0
	$(BIN)/python benchmarks/memory.py --plot

reproduce: $(VENV)/test.stamp ## judges what others published; ONLY="guide note" for a part (benchmarks/published)
	PYTHONSAFEPATH=1 PYTHONPATH=benchmarks $(BIN)/python -m published $(ONLY)

scoreboard: $(VENV)/test.stamp ## scores estimators on published measurements; writes docs/ESTIMATORS.md (seconds)
	PYTHONSAFEPATH=1 PYTHONPATH=benchmarks $(BIN)/python -m measurements

drift: $(VENV)/test.stamp ## records pipelines again with what is installed, and reports what differs (hours; ONLY="krea2 sana")
	PYTHONSAFEPATH=1 PYTHONPATH=benchmarks/recording COMFYUI=$(COMFYUI) $(BIN)/python benchmarks/recording/drift.py $(ONLY)

gpu: ## what needs a GPU; ONLY="build test check bench", or "pack session" for a borrowed one (.ci/gpu)
	$(if $(filter pack session,$(ONLY)),$(MAKE) $(VENV)/test.stamp)
	PYTHON=$(PYTHON) VENV=$(VENV) .ci/gpu $(ONLY)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/build.stamp: $(BIN)/python
	$(PIP) install --no-compile 'setuptools>=77' 'numpy>=2'
	touch $@

# Reinstalled, not editable: what runs is what a user would get. Built with the setuptools that lies here already, and
# Python compiles to bytecode what is imported, not all that is installed: that is half of pip's time. With vaemem._kernels,
# which tests and benchmarks use.
INSTALL := VAEMEM_KERNELS=1 $(PIP) install --no-build-isolation --no-compile
$(VENV)/demo.stamp: $(VENV)/build.stamp $(SOURCES)
	@$(SAY_BUILD)
	$(INSTALL) '.[demo]'
	touch $@

$(VENV)/test.stamp: $(VENV)/build.stamp $(SOURCES)
	@$(SAY_BUILD)
	VAEMEM_WERROR=1 $(INSTALL) '.[test]'
	touch $@

$(VENV)/check.stamp: $(VENV)/test.stamp
	$(INSTALL) '.[check]'
	touch $@

$(VENV)/site.stamp: $(VENV)/test.stamp
	$(INSTALL) '.[site]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp
	$(INSTALL) '.[bench]'
	touch $@

# After check.stamp where that is wanted too: two pips at once in one environment get in each other's way.
$(VENV)/wheel.stamp: $(VENV)/build.stamp $(if $(filter check,$(MAKECMDGOALS)),$(VENV)/check.stamp)
	$(PIP) install 'ziglang==0.17.1' 'auditwheel>=6' 'abi3audit>=0.0.24' 'macholib>=1.16'
	touch $@

# The whole takes hours; .github/workflows/nightly.yml runs it in parts.
check: $(VENV)/check.stamp $(VENV)/wheel.stamp ## what runs each night; ONLY="thorough asan ..." (.ci/check has the names)
	VENV=$(VENV) .ci/check $(ONLY)

lint: $(VENV)/check.stamp ## ruff, mypy, clang-format, workflows, cppcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --no-progress -q --min-severity medium .github/workflows
	@if command -v cppcheck >/dev/null; then \
	    cppcheck -j "$$(nproc)" --quiet --error-exitcode=1 --std=c11 --enable=warning,performance,portability \
	        --inline-suppr --suppress=missingIncludeSystem --suppress=invalidPointerCast -DVM_HAVE_X86=1 csrc/*.c csrc/engine csrc/predict kernels; \
	else echo "lint: cppcheck is not installed: skipped"; fi

format: $(VENV)/check.stamp ## formats Python and C; before a commit
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_SOURCES)

# zig compiles them here for every platform (.ci/wheels.py).
wheels: $(VENV)/wheel.stamp ## dist/wheels: a wheel for each platform, and vaemem-cuda (minutes)
	VAEMEM_CUDA_ARCHS= $(BIN)/python .ci/wheels.py
