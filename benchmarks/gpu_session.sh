#!/usr/bin/env bash
# All that a machine with a GPU is asked for, in one call of less than ten minutes, what is worth most first:
#
#   benchmarks/gpu_session.sh                       build test headline passes ablation compile rest
#   benchmarks/gpu_session.sh build memory          PyTorch's memory beside its prediction
#   benchmarks/gpu_session.sh STEP...               any steps, in that order
#
# Uses the Python, PyTorch, setuptools and nvcc that are there and fetches nothing. A step that fails or takes too long
# leaves the others their turns; rows are written as they come. Environment:
#   OUT             where everything goes, else benchmarks/results
#   PYTHON          else python3
#   LIMIT           seconds for all steps together, else 570
#   VAEMEM_COMMIT   what is measured, where there is no git
set -u
cd "$(dirname "$0")/.."
OUT="${OUT:-benchmarks/results}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
PYTHON="${PYTHON:-python3}"
LIMIT="${LIMIT:-570}"
export VAEMEM_RESULTS="$OUT" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0

# within SECONDS COMMAND...: at most so long, and never past LIMIT
within() {
    local most=$1 left=$((LIMIT - SECONDS)) status=1
    shift
    echo "-- at $SECONDS s: $*"
    if ((left < 5)); then
        echo "-- no time is left for that"
    else
        timeout -k 5 $((most < left ? most : left)) "$@"
        status=$?
    fi
    if ((status == 124)); then echo "-- stopped after its time"; fi
    if ((status != 0)); then failed=1; fi
}

bench() {
    local most=$1
    shift
    within "$most" "$PYTHON" benchmarks/decode_gpu.py "$@"
}

step_build() {
    export VAEMEM_CUDA=1
    "$PYTHON" -c 'import setuptools, numpy, sys; print(sys.version, "setuptools", setuptools.__version__, "numpy", numpy.__version__)'
    within 240 "$PYTHON" setup.py -q build_ext --inplace
    within 30 "$PYTHON" -c 'import vaemem; print(*vaemem.backends(), sep="\n")'
}
step_test() { # the other files are the emulator's
    VAEMEM_TEST_GPU=1 within 150 "$PYTHON" -m pytest -p no:cacheprovider tests/test_cuda_vae*.py
    VAEMEM_TEST_GPU=1 within 30 "$PYTHON" -m pytest -p no:cacheprovider tests/test_measure.py -k gpu
}
step_headline() { bench 75 --models flux --dtypes bfloat16 --ops decode --smallest --alone --label headline; }
step_passes() {
    bench 60 --sizes 1024 --dtypes bfloat16 --parts
    bench 40 --sizes 1024 --dtypes bfloat16 --passes --convolution own --label own
}
step_ablation() { bench 120 --sizes 1024 --dtypes bfloat16 --ablation; }
step_compile() { # the second may take longer than there is
    bench 90 --models flux --dtypes bfloat16 --ops decode --sizes 1024 2048 --peers compile --label compile
    bench 60 --models flux --dtypes bfloat16 --ops decode --sizes 1024 --peers compile-autotune --label autotune
}
step_rest() { bench 400 --models sdxl flux --sizes 1024 2048 512 --case-seconds 4; }
step_memory() { within 560 "$PYTHON" benchmarks/torch_memory.py --profile; }

session() {
    if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv; fi
    for step in "$@"; do "step_$step"; done
    echo "-- at $SECONDS s: done, $([ $failed = 0 ] && echo "all well" || echo "not all well")"
    return $failed
}

(($#)) || set -- build test headline passes ablation compile rest
for step in "$@"; do
    declare -F "step_$step" >/dev/null || { echo "gpu_session: no step $step" >&2 && exit 2; }
done
session "$@" 2>&1 | tee "$OUT/session.log"
exit "${PIPESTATUS[0]}"
