#!/usr/bin/env bash
# All that a machine with a GPU is asked for, in three calls of less than ten minutes each, what is worth most first:
#
#   benchmarks/gpu_session.sh           first: does it run, how fast is it, is it right
#   benchmarks/gpu_session.sh second    why it is as fast as it is; limits; PyTorch beside its prediction; faults
#   benchmarks/gpu_session.sh third     sanitizers, whole pipelines, PyTorch compiled, the rest
#   benchmarks/gpu_session.sh STEP...   any steps, in that order (first, second and third are lists of them)
#
# Uses the Python, PyTorch, setuptools, nvcc, compute-sanitizer and ncu that are there and fetches nothing; a pytest that is
# missing is installed from build/wheels, where that was brought along (pip download pytest -d build/wheels). Each step has
# its own limit, the limits of a call add up to no more than LIMIT, and a step that takes longer is stopped by SIGINT, so that Python says where it was; one that fails or takes too long leaves the
# others their turns. All that a step has written is in one archive, packed anew after each. Environment:
#   OUT             where session.log and session.tgz go, else build/gpu_session
#   PYTHON          else python3
#   LIMIT           seconds for all steps together, else 570
#   VAEMEM_COMMIT   what is measured, where there is no git
set -u
cd "$(dirname "$0")/.."
OUT="${OUT:-build/gpu_session}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
PYTHON="${PYTHON:-python3}"
LIMIT="${LIMIT:-570}"
WORK="$(mktemp -d)"
export PYTHONFAULTHANDLER=1 VAEMEM_RESULTS="$WORK" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
FIRST="versions build light headline tiles kernels repeats"
SECOND="build passes profile_own profile_cudnn limits memory faults"
THIRD="build memcheck racecheck pipelines compile ablation cudnn_profile rest"
failed=0 part=0

smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }

# within SECONDS COMMAND...: at most so long, and never past LIMIT. It prints to a file, not to a pipe, which a process that
# outlives it would keep open.
within() {
    local most=$1 left=$((LIMIT - SECONDS)) status=1 log
    shift
    part=$((part + 1))
    log="$WORK/$(printf %02d $part)-$step.log"
    echo "-- $step, at $SECONDS s, for $most s: $*"
    if ((left < 5)); then
        echo "-- no time is left for that"
    else
        timeout -s INT -k 10 $((most < left ? most : left)) "$@" >"$log" 2>&1
        status=$?
        cat "$log"
    fi
    if ((status == 124 || status == 137)); then echo "-- stopped after its time"; fi
    if ((status != 0)); then failed=1; fi
    return $status
}

pack() { # tar's 1 is a file that grows while it is read: the clocks
    tar -czf "$OUT/.session.tgz" -C "$WORK" . 2>/dev/null || (($? == 1)) || return
    mv "$OUT/.session.tgz" "$OUT/session.tgz"
}

# on_gpu SECONDS WORDS...: pytest in a process of its own, since a wrong address ends its context for good
on_gpu() {
    local most=$1
    shift
    VAEMEM_TEST_GPU=1 within "$most" "$PYTHON" -m pytest -p no:cacheprovider --tb=short --maxfail=5 -rs \
        -m "not packages" --durations=3 -o faulthandler_timeout=20 "$@" # a test that hangs says where
}

bench() {
    local most=$1
    shift
    within "$most" "$PYTHON" benchmarks/decode_gpu.py "$@"
}

ONE_DECODE='import sys, numpy, vaemem
latent, convolution = int(sys.argv[1]), sys.argv[2]
vae = vaemem.VAE.random("flux", parts="decoder", device="cuda", dtype="bfloat16", convolution=convolution)
image = vae.decode(numpy.random.default_rng(0).standard_normal((1, 16, latent, latent), dtype=numpy.float32))
print(convolution, image.shape, image.std(), vae.last_run.backend)'

sanitize() { # TOOL: only our own kernels, since a library's take too long; a small decode, and every tile of conv.cu
    VAEMEM_TEST_GPU=1 within 50 compute-sanitizer --target-processes application-only --tool "$1" --kernel-name kns=vm_ --report-api-errors no \
        --error-exitcode 1 "$PYTHON" -m pytest -p no:cacheprovider --tb=short -m "not packages" \
        tests/test_cuda_own_conv.py tests/test_cuda_vae.py -k "(test_fused and bf16) or (test_decode and odd and size1)"
}

# What memory limits cost: every plan from the fastest to the smallest.
LIMITS='import sys, time, numpy, vaemem
size = int(sys.argv[1])
vae = vaemem.VAE.random("sdxl", parts="decoder", device="cuda", dtype="bfloat16")
z = numpy.random.default_rng(0).standard_normal((1, 4, size, size), dtype=numpy.float32)
print("bytes reserved, bytes at the peak, seconds of the passes: medians of 5")
for plan in vae.tradeoff("decode", 8 * size, 8 * size):
    seconds = []
    for _ in range(6):
        vae.decode(z, memory_limit=plan.reserved_bytes)
        seconds.append(sum(vae.last_run.pass_seconds))
    print(plan.reserved_bytes, plan.peak_bytes, f"{numpy.median(seconds[1:]):.5f}", flush=True)'

profile() { # CONVOLUTION NCU-OPTIONS...: counters of kernels of a decode at 1024x1024; the clocks stay as they are
    local convolution=$1
    shift
    within 45 ncu --clock-control none --section SpeedOfLight --section Occupancy --section LaunchStats \
        --section WarpStateStats --section SchedulerStats --section MemoryWorkloadAnalysis \
        --section ComputeWorkloadAnalysis --section InstructionStats "$@" --csv --page raw \
        --log-file "$WORK/ncu-$convolution-$part.csv" "$PYTHON" -c "$ONE_DECODE" 128 "$convolution"
}

# ---- the first call ----

VERSIONS='import importlib.util, platform, sys
def version(name):
    return getattr(__import__(name), "__version__", "there") if importlib.util.find_spec(name) else "missing"
print(sys.version, platform.platform(), *(f"{name} {version(name)}" for name in ("numpy", "torch", "pytest", "xdist")))
if importlib.util.find_spec("torch"):
    import torch
    print("cuDNN", torch.backends.cudnn.version(), "CUDA", torch.version.cuda)'
step_versions() {
    within 20 "$PYTHON" -c "$VERSIONS"
    if ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
        within 20 "$PYTHON" -m pip install -q --no-index --find-links build/wheels pytest
    fi
}
step_build() {
    local target
    target="$(smi compute_cap | tr -d '. ')"
    export VAEMEM_CUDA=1
    if [[ $target =~ ^[0-9]+$ ]]; then export VAEMEM_CUDA_ARCHS="$target"; fi
    within 150 "$PYTHON" setup.py -q build_ext --inplace
    within 10 "$PYTHON" -c 'import vaemem; print(*vaemem.backends(), sep="\n")'
}
step_light() { # the first decodes ever: each way by itself, then beside PyTorch's in float32
    within 20 "$PYTHON" -c "$ONE_DECODE" 128 own
    within 20 "$PYTHON" -c "$ONE_DECODE" 128 cudnn
    bench 40 --models sdxl --dtypes bfloat16 --ops decode --sizes 1024 --peers eager --graphs --rounds 3 --label light
}
step_headline() {
    bench 80 --models sdxl --dtypes bfloat16 --ops decode --sizes 1024 2048 --graphs --smallest --label headline
}
step_kernels() { # by name, beside float64: what is wrong in a kernel shows here first
    local workers=()
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then workers=(-n 6); fi
    on_gpu 15 tests/test_emulator.py
    on_gpu 25 "${workers[@]}" tests/test_cuda_kernels.py
    on_gpu 25 "${workers[@]}" tests/test_cuda_store.py
    on_gpu 35 "${workers[@]}" tests/test_cuda_attention.py
    on_gpu 45 "${workers[@]}" tests/test_cuda_own_conv.py
}
REPEATS='import sys, numpy, vaemem
size, times = int(sys.argv[1]), int(sys.argv[2])
z = numpy.random.default_rng(0).standard_normal((1, 4, size, size), dtype=numpy.float32)
different = 0
for convolution in ("own", "cudnn"):
    vae = vaemem.VAE.random("sdxl", parts="decoder", device="cuda", dtype="bfloat16", convolution=convolution)
    for vae.graphs in (False, True):
        first = vae.decode(z)
        others = sum(not numpy.array_equal(first, vae.decode(z)) for _ in range(times))
        print(convolution, "graphs" if vae.graphs else "launches", f"{others} of {times} repeats have other bits")
        different += others
sys.exit(different > 0)'
step_repeats() { within 25 "$PYTHON" -c "$REPEATS" 128 20; }

# ---- the second ----

step_passes() {
    bench 40 --sizes 1024 --dtypes bfloat16 --parts
    bench 25 --sizes 1024 --dtypes bfloat16 --passes --convolution own --label own
}
# Which tile of our convolution is fastest for each pass: the costs in kernels/cuda/cuda.h are estimates until then.
step_tiles() { within 40 "$PYTHON" benchmarks/conv_tiles.py --dtypes bfloat16; }
# 512 channels come first and 128 last: all of our convolutions, and attention.
step_profile_own() { profile own --kernel-name 'regex:^vm_(conv|attention)'; }
# A few stripes in a row (load, cuDNN's engine, store): 512 channels at 128x128 are in the first hundred launches of about
# 860, 128 channels at 1024x1024 in the last four hundred (from the sizes of stripes).
step_profile_cudnn() {
    profile cudnn --launch-skip 60 --launch-count 9
    profile cudnn --launch-skip 600 --launch-count 9
}

step_limits() { within 30 "$PYTHON" -c "$LIMITS" 128; }
step_memory() { within 90 "$PYTHON" benchmarks/torch_memory.py --profile; }
step_faults() {
    on_gpu 75 tests/test_cuda_vae*.py
    on_gpu 15 tests/test_measure.py -k gpu
}

# ---- the third ----

step_memcheck() { sanitize memcheck; }
step_racecheck() { sanitize racecheck; }
step_pipelines() { # whole ones beside their prediction
    within 30 "$PYTHON" -m vaemem measure sd15 512 --random --steps 4 -o "$WORK/pipeline_sd15.csv"
    within 50 "$PYTHON" -m vaemem measure sdxl 1024 --random --steps 4 --offload model -o "$WORK/pipeline_sdxl.csv"
}
step_compile() { # the second may take longer than there is
    bench 60 --models sdxl --dtypes bfloat16 --ops decode --sizes 1024 2048 --peers compile --label compile
    bench 40 --models sdxl --dtypes bfloat16 --ops decode --sizes 1024 --peers compile-autotune --label autotune
}
step_ablation() { bench 30 --sizes 1024 --dtypes bfloat16 --ablation; }
step_cudnn_profile() {
    mkdir -p "$WORK/profiles"
    within 50 "$PYTHON" benchmarks/record_profiles.py --capability "$(smi compute_cap)" --out "$WORK/profiles"
}
step_rest() { bench 50 --models sdxl flux --sizes 1024 2048 512 --case-seconds 4; }

session() {
    local clocks=
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv
        nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu \
            --format=csv -lms 500 >"$WORK/clocks.csv" 2>&1 &
        clocks=$!
    fi
    for step in "$@"; do
        "step_$step"
        pack
    done
    if [[ -n $clocks ]]; then kill "$clocks" 2>/dev/null; fi
    pack
    echo "-- at $SECONDS s: done, $([ $failed = 0 ] && echo "all well" || echo "not all well")"
    return $failed
}

(($#)) || set -- first
steps=()
for step in "$@"; do
    case $step in
    first) read -ra some <<<"$FIRST" ;;
    second) read -ra some <<<"$SECOND" ;;
    third) read -ra some <<<"$THIRD" ;;
    *) some=("$step") ;;
    esac
    steps+=("${some[@]}")
done
for step in "${steps[@]}"; do
    declare -F "step_$step" >/dev/null || { echo "gpu_session: no step $step" >&2 && exit 2; }
done
session "${steps[@]}" 2>&1 | tee "$OUT/session.log"
status=${PIPESTATUS[0]}
rm -rf "$WORK"
exit "$status"
