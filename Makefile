# make demo and make test do all the set-up on a fresh machine: a virtual environment in .venv, the
# package and what it needs, then the work. PYTHON chooses the interpreter, VENV the place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
SOURCES := setup.py pyproject.toml $(shell find csrc kernels vaemem -type f -not -name '*.pyc' -not -name '*.so')
C_SOURCES := $(shell find csrc kernels tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cc')
export PYTHONUNBUFFERED := 1

.PHONY: demo test bench check asan lint format wheel clean build-gpu test-gpu bench-gpu check-gpu

demo: $(VENV)/demo.stamp
	$(BIN)/python -m vaemem demo --out out

test: $(VENV)/test.stamp
	PYTHONSAFEPATH=1 $(BIN)/pytest

# Ours beside PyTorch in one run; writes benchmarks/results/*.csv.
bench: $(VENV)/test.stamp
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/passes.py

# What follows wants a GPU, and uses the Python that has PyTorch for it (PYTHON), as it is: built in place, nothing installed.
# The session script does the same and more within ten minutes, what is worth most first.
GPU := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR) VAEMEM_TEST_GPU=1
GPU_TESTS := $(wildcard tests/test_cuda_vae*.py) tests/test_measure.py
SANITIZER := compute-sanitizer --report-api-errors no --error-exitcode 1

build-gpu:
	VAEMEM_CUDA=1 $(PYTHON) setup.py -q build_ext --inplace

test-gpu: build-gpu
	$(GPU) $(PYTHON) -m pytest $(GPU_TESTS)

# Ours beside PyTorch eager, channels_last and compiled, in one process; writes benchmarks/results/*.csv.
bench-gpu: build-gpu
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/decode_gpu.py --peers eager channels_last compile
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/decode_gpu.py --sizes 1024 --ablation

check-gpu: build-gpu
	$(GPU) $(SANITIZER) --tool memcheck $(PYTHON) -m pytest -x tests/test_cuda_vae.py -k "test_decode or test_encode"
	$(GPU) $(SANITIZER) --tool racecheck $(PYTHON) -m pytest -x tests/test_cuda_vae.py -k "test_decode and odd"
	$(GPU) $(SANITIZER) --tool initcheck $(PYTHON) -m pytest -x tests/test_cuda_vae.py -k "test_decode and odd"

check: lint asan

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Reinstalled, not editable: what runs is what a user would get.
$(VENV)/demo.stamp: $(BIN)/python $(SOURCES)
	$(PIP) install '.[demo]'
	touch $@

$(VENV)/test.stamp: $(BIN)/python $(SOURCES)
	VAEMEM_WERROR=1 $(PIP) install '.[test]'
	touch $@

$(VENV)/check.stamp: $(VENV)/test.stamp
	$(PIP) install '.[check]' 'setuptools>=77'
	touch $@

# The core under AddressSanitizer and UndefinedBehaviorSanitizer, running the tests that need no torch.
asan: $(VENV)/check.stamp
	rm -rf build/asan && mkdir -p build/asan
	cp -r setup.py pyproject.toml README.md LICENSE csrc kernels vaemem build/asan/
	cd build/asan && VAEMEM_WERROR=1 VAEMEM_SANITIZE=1 ../../$(BIN)/python setup.py -q build_ext --inplace
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 PYTHONPATH=build/asan VAEMEM_SANITIZED=1 $(BIN)/pytest -x

lint: $(VENV)/check.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	@if command -v cppcheck >/dev/null; then \
	    cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,performance,portability \
	        --inline-suppr --suppress=missingIncludeSystem --suppress=invalidPointerCast -DVM_HAVE_X86=1 csrc/*.c csrc/predict/*.c kernels; \
	else echo "cppcheck is not installed: skipped"; fi

format: $(VENV)/check.stamp
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_SOURCES)

wheel: $(BIN)/python
	$(PIP) wheel --no-deps -w dist .

clean:
	rm -rf build dist out *.egg-info
