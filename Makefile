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

.PHONY: help demo test golden docs site bench scoreboard check thorough lint asan clang pythons packages fuzz older quantised ray apps invokeai windows format wheels clean \
        build-gpu test-gpu bench-gpu check-gpu gpu-pack gpu-session reproduce drift

demo: $(VENV)/demo.stamp ## the demo's page: out/index.html
	$(BIN)/python -m vaemem demo --out out

test: $(VENV)/test.stamp ## the tests, except the thorough ones
	PYTHONSAFEPATH=1 $(BIN)/pytest

golden: $(VENV)/test.stamp ## what twenty commands print, written again to tests/golden
	VAEMEM_GOLDEN=1 $(BIN)/python -m pytest -q tests/test_golden.py

# The notebooks, run here and rendered to HTML.
docs: $(VENV)/test.stamp ## docs/notebooks, run and rendered to out/notebooks/*.html
	$(BIN)/python docs/notebooks/render.py out/notebooks

site: $(VENV)/site.stamp ## the calculator and the documents as a site: out/site/index.html, out/site/docs
	PYTHONSAFEPATH=1 $(BIN)/python docs/page/engine/build.py out/site
	PYTHONSAFEPATH=1 $(BIN)/python -m sphinx -q -W --keep-going -d build/site docs out/site/docs
	rm -rf out/site/jupyter_execute # myst-nb's, beside its output

# Ours beside PyTorch and OpenVINO in one run; writes benchmarks/results/*.csv. Under a memory limit last: it takes hours, and PyTorch 15 GiB.
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
	PYTHONSAFEPATH=1 PYTHONPATH=benchmarks $(BIN)/python benchmarks/scoreboard.py

drift: $(VENV)/test.stamp ## records pipelines again with what is installed, and reports what differs (hours; ONLY="krea2 sana")
	PYTHONSAFEPATH=1 PYTHONPATH=benchmarks COMFYUI=$(COMFYUI) $(BIN)/python benchmarks/drift.py $(ONLY)

# What a borrowed GPU is asked for, most valuable first, in calls of a few minutes (benchmarks/gpu_session.py). gpu-pack builds
# beforehand what takes long there, for that machine's Python (PACK_PYTHON) and GPU (PACK_ARCHS); gpu-session rehearses the
# calls without a GPU, at tiny sizes.
PACK_PYTHON ?= python3.12
PACK_ARCHS ?= 90

gpu-pack: $(VENV)/test.stamp ## builds what a borrowed GPU needs: build/gpu
	$(BIN)/python benchmarks/gpu_session.py pack --python $(PACK_PYTHON) --archs $(PACK_ARCHS)

gpu-session: $(VENV)/test.stamp ## rehearses the calls to a borrowed GPU without one
	$(BIN)/python benchmarks/gpu_session.py --rehearse --again first second

# These need a GPU, and use the Python that has PyTorch for it (PYTHON), as it is: built in place, nothing installed.
GPU := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR) VAEMEM_TEST_GPU=1
GPU_KERNELS := $(addprefix tests/test_,emulator.py cuda_kernels.py cuda_store.py cuda_attention.py cuda_own_conv.py)
GPU_TESTS := $(wildcard tests/test_cuda_vae*.py) tests/test_measure.py tests/test_diffusers.py
THOROUGH_TOO := -m 'not packages'
SANITIZER := compute-sanitizer --kernel-name kns=vm_ --report-api-errors no --error-exitcode 1

build-gpu: ## the extensions in place, with CUDA, for the Python that has PyTorch
	VAEMEM_CUDA=1 $(PYTHON) setup.py -q build_ext --inplace

# Kernels by name first, each file in a process of its own: a wrong address ends its context for good.
test-gpu: build-gpu ## the CUDA tests (needs a GPU)
	@for tests in $(GPU_KERNELS) "$(GPU_TESTS)"; do \
	    echo $$tests; $(GPU) $(PYTHON) -m pytest $(THOROUGH_TOO) --tb=short --maxfail=5 $$tests || exit 1; \
	done

# Ours beside PyTorch eager, channels_last and compiled, in one process; writes benchmarks/results/*.csv.
bench-gpu: build-gpu ## speed compared with PyTorch on a GPU; writes benchmarks/results (needs a GPU)
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/decode_gpu.py --peers eager channels_last compile
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/decode_gpu.py --sizes 1024 --ablation

check-gpu: build-gpu ## the CUDA tests under compute-sanitizer (needs a GPU)
	$(GPU) $(SANITIZER) --tool memcheck $(PYTHON) -m pytest $(THOROUGH_TOO) -x tests/test_cuda_vae.py -k "test_decode or test_encode"
	$(GPU) $(SANITIZER) --tool racecheck $(PYTHON) -m pytest $(THOROUGH_TOO) -x tests/test_cuda_vae.py -k "test_decode and odd"
	$(GPU) $(SANITIZER) --tool initcheck $(PYTHON) -m pytest $(THOROUGH_TOO) -x tests/test_cuda_vae.py -k "test_decode and odd"

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
$(VENV)/wheel.stamp: $(VENV)/build.stamp $(if $(filter check packages,$(MAKECMDGOALS)),$(VENV)/check.stamp)
	$(PIP) install 'ziglang==0.17.1' 'auditwheel>=6' 'abi3audit>=0.0.24' 'macholib>=1.16'
	touch $@

# ---- What CI runs beside the tests. Each is a target of its own; what a machine lacks is skipped in so many words. ----

check: lint thorough asan clang pythons older quantised ray packages fuzz ## what CI runs besides the tests: lint to fuzz in this list

# The tests that show more of what make test shows, or take long.
thorough: $(VENV)/test.stamp ## the tests that take long
	PYTHONSAFEPATH=1 $(BIN)/pytest -m thorough

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
	        --inline-suppr --suppress=missingIncludeSystem --suppress=invalidPointerCast -DVM_HAVE_X86=1 csrc/*.c csrc/predict/*.c kernels; \
	else echo "lint: cppcheck is not installed: skipped"; fi

# The sources once more under build/, built in place with other flags: $(call in_place,FOLDER,FLAGS,PYTHON). VAEMEM_FATBINS
# has the GPU kernels that make test compiled.
in_place = rm -rf build/$(1) && mkdir -p build/$(1) && cp -r setup.py pyproject.toml README.md LICENSE csrc kernels vaemem build/$(1)/ && \
	find build/$(1) -name '*.so*' -delete && cd build/$(1) && VAEMEM_WERROR=1 $(2) $(3) setup.py -q build_ext --inplace

# The core under AddressSanitizer and UndefinedBehaviorSanitizer, running the tests that need no torch. Left out is what runs
# none of it (kernels alone on the emulator, programs that are built with sanitizers of their own), and what runs the same with
# other numbers (on a GPU: its faults and arrays stay), by the thousand or in larger models: the demo, its weights, the
# notebooks, formulas over whole domains, pipelines, errors of every kind of numbers, ramps of tiles, plans of whole models, the
# README, tables and what is made of them, profiles, the command line, messages, documents, types, saves by several
# processes, and what is said of names, counts and rooms.
NOT_THE_CORE := 'cuda_[!v]*' 'cuda_vae.py' 'emulator*' 'isa*' 'fuzz*' 'threads*' 'demo*' 'handmade*' 'notebooks*' 'bound*' 'integration*' 'comfyui*' 'invokeai*' 'any_pipeline*' \
	'pipelines*' 'plan*' 'groups*' 'products*' 'module_calls*' 'whole_*' 'seconds*' 'storage*' 'ggml*' 'numbers*' 'sizes*' \
	'other_vaes*' 'predict*' 'benchmarks*' 'examples*' 'gpu_session*' 'dtypes*' 'gguf*' 'readme*' 'workspace*' 'report*' 'table*' \
	'estimators*' 'published*' 'record_profiles*' 'sweep*' 'fit*' 'formula*' 'guide*' 'command_line*' 'questions*' 'names*' 'rooms*' \
	'out_of_memory*' 'counts*' 'saves*' 'document*' 'types*' 'tab*' 'setup*' 'lines*' '32bit*' 'site*' 'page*' 'datasets*' 'spread*'
asan: $(VENV)/check.stamp ## the core under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call in_place,asan,VAEMEM_SANITIZE=1 VAEMEM_FATBINS=$(CURDIR)/build/fatbins,$(abspath $(BIN))/python)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:allocator_may_return_null=1 PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/asan \
	VAEMEM_SANITIZED=1 VAEMEM_LIMIT_CASES=30 $(BIN)/pytest -x --deselect tests/test_tiling.py::test_ramps \
	    --deselect tests/test_memory_limit.py::test_the_bar_of_the_smallest_plans \
	    $(addprefix --ignore-glob=tests/test_,$(NOT_THE_CORE))

# The older release of diffusers, in an environment of its own that finds all else in $(VENV). It cannot import its
# pipelines with transformers 5.
in_own_environment = rm -rf build/$(1) && $(BIN)/python -m venv build/$(1) && \
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(echo build/$(1)/lib/python3*/site-packages)/beside.pth" && \
	build/$(1)/bin/pip --disable-pip-version-check -q install --no-compile $(2) && PYTHONSAFEPATH=1 $(3) build/$(1)/bin/python -m pytest
OLDER := torch==2.13.0 diffusers==0.33.0 'transformers>=4.57,<5'
older: $(VENV)/test.stamp ## the tests that also run with an older diffusers, 0.33
	$(call in_own_environment,older,$(OLDER)) -rs -n logical --dist worksteal -m "older and not thorough"

# Layers of the libraries that quantise models, and of peft, in an environment of their own.
quantised: $(VENV)/test.stamp ## quantised layers and LoRAs compared with those of bitsandbytes, torchao, optimum-quanto and peft
	$(call in_own_environment,quantised,torch==2.13.0 torchao==0.18.0 optimum-quanto==0.2.7 bitsandbytes==0.50.2 peft==0.21.2) -rs -n 0 -m "" \
	    tests/test_quantising.py tests/test_lora.py

# Ray's own cluster of two nodes, in an environment of its own.
ray: $(VENV)/test.stamp ## data sets on a cluster of Ray's
	$(call in_own_environment,ray,'ray[data]==2.60.0',RAY_USAGE_STATS_ENABLED=0) -rs -n 2 --dist loadfile -m "" tests/test_ray.py "tests/test_datasets.py::test_the_document[ray]"

# Applications themselves, whose sources are elsewhere, in an environment with what they need. Left out is what wants another
# torch, and what only the browser shows.
NOT_OF_COMFYUI := ^(torch|torchvision|torchaudio|spandrel|comfyui-workflow-templates|comfyui-embedded-docs)([^a-z]|$$)
apps: $(VENV)/test.stamp ## the tests in ComfyUI itself; COMFYUI=path names its sources
	@test -f "$(COMFYUI)/main.py" || { echo "apps: COMFYUI=path names no folder of ComfyUI"; exit 1; }
	mkdir -p build && grep -vE '$(NOT_OF_COMFYUI)' "$(COMFYUI)/requirements.txt" > build/comfyui.txt
	$(call in_own_environment,apps,torch==2.13.0 -r build/comfyui.txt,COMFYUI="$(abspath $(COMFYUI))") -rs -n 0 -m apps tests/test_comfyui_nodes.py tests/test_comfyui.py tests/test_comfyui_dynamic.py

INVOKEAI := torch==2.13.0 invokeai==6.14.0
invokeai: $(VENV)/test.stamp ## the tests in InvokeAI itself (gigabytes to install)
	$(call in_own_environment,invokeai,$(INVOKEAI)) -rs -n 0 -m apps tests/test_invokeai_nodes.py

# A wheel for Windows, and its tests under wine, where there is one.
windows: $(BIN)/python ## dist/windows: a wheel for Windows, tested under wine (ten minutes)
	.ci/windows $(BIN)

# What another compiler warns of, and whether its kernels are right.
clang: $(VENV)/check.stamp ## the core built by clang
	@clang="$$(for v in '' -22 -21 -20 -19 -18 -17 -16 -15 -14; do command -v clang$$v && break; done)"; \
	if [ -z "$$clang" ]; then echo "clang: clang is not installed: skipped"; exit; fi; set -ex; \
	($(call in_place,clang,VAEMEM_CUDA=0 CC="$$clang",$(abspath $(BIN))/python)); \
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/clang $(BIN)/pytest -n logical --dist worksteal \
	    tests/test_kernels.py tests/test_memory.py tests/test_allocator.py

# The tests that need only NumPy, in another CPython, with NumPy 1.26 if it supports that. Left out: tests of C and its
# compilers more than of Python (kernels, plans, allocators, emulators, programs in C), formulas over whole domains, and profiles.
NOT_OF_PYTHON := 'cuda_*' 'emulator*' 'isa*' 'fuzz*' 'threads*' 'sizes*' 'kernels*' 'products*' 'numbers*' 'cpu_attention*' \
	'gpu_session*' 'bound*' 'workspace*' 'allocator*' 'trace*' 'memory_limit*' 'tiling*' 'moves*' 'frames*' 'video_runs*' 'passes_*' 'tiny*' 'other_vaes*' \
	'demo*' 'dtypes*' 'benchmarks*' 'guide*' 'published*' 'out_of_memory*' 'plan*' 'document*' 'types*' 'setup*' 'site*' 'page*'
pythons: $(VENV)/check.stamp ## the tests in another CPython
	@other="$$(.ci/other_python $(BIN)/python)"; \
	if [ -z "$$other" ]; then echo "pythons: there is no second CPython of 3.11 or later: skipped"; exit; fi; set -ex; \
	rm -rf build/python && "$$other" -m venv build/python; \
	VAEMEM_WERROR=1 VAEMEM_KERNELS=1 VAEMEM_CUDA=0 build/python/bin/pip --disable-pip-version-check -q install . \
	    "numpy$$($$other -c 'import sys; print("<2" if sys.version_info < (3, 13) else ">=2")')" 'pytest>=8' 'pytest-xdist>=3.6' 'safetensors>=0.4.3'; \
	PYTHONSAFEPATH=1 build/python/bin/pytest $(addprefix --ignore-glob=tests/test_,$(NOT_OF_PYTHON))

# The source distribution and the wheel, each built, installed into a fresh environment and used there.
packages: $(VENV)/check.stamp $(VENV)/wheel.stamp ## the source distribution and the wheel, built, installed and used
	PYTHONSAFEPATH=1 $(BIN)/pytest -m packages

FUZZ_SECONDS ?= 5
fuzz: $(VENV)/check.stamp ## every fuzz target for FUZZ_SECONDS seconds
	@if [ -f tests/fuzz/run.py ]; then $(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS); \
	else echo "fuzz: there is no tests/fuzz/run.py: skipped"; fi

format: $(VENV)/check.stamp ## formats Python and C; before a commit
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_SOURCES)

# zig compiles them here for every platform (.ci/wheels.py).
wheels: $(VENV)/wheel.stamp ## dist/wheels: a wheel for each platform, and vaemem-cuda (minutes)
	VAEMEM_CUDA_ARCHS= $(BIN)/python .ci/wheels.py

clean: ## removes what was built
	rm -rf build dist out *.egg-info
