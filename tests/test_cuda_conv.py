"""Convolutions by cuDNN: the plans, their limits and filters, and what is run, with the stand-in of tests/emulator; and
that an installed cuDNN, asked about a described device, has a plan for every convolution of ours."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import CONVS, models
from cuda_kernels import round_up
from cudnn_process import DTYPES, MIB, ROOT, compile_cudnn, key, process
from emulator import build
from errors import refused

from vaemem.engine.cudnn_path import find_cudnn
from vaemem.prediction.gpus import find_gpu

sys.path.insert(0, str(ROOT / "benchmarks" / "recording"))

import ask_cudnn


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """conv_cudnn.c without the rest of the backend."""
    if not (shutil.which("gcc") or os.environ.get("CC")):
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("conv") / "libconv.so"
    sources = [ROOT / "kernels/cuda/conv_cudnn.c", ROOT / "kernels/cudnn/cudnn_api.c", ROOT / "kernels/status.c"]
    flags = [*build.FLAGS, "-std=gnu11", "-Wno-missing-field-initializers", "-shared"]
    build.run(build.compiler("gcc"), *flags, "-o", out, *sources, "-ldl", "-pthread")
    return str(out)


@pytest.fixture(scope="module")
def stand_in(library, tmp_path_factory):
    return compile_cudnn(tmp_path_factory.mktemp("cudnn"))


@pytest.fixture(scope="module")
def stand_in_process(library):
    with process() as one:
        yield one


@pytest.fixture
def convs(stand_in_process, library, stand_in):
    one = stand_in_process.Convs(library, stand_in)
    one.open()
    yield one
    one.close()
    assert one.live() == 0


# ---- which plan ----

# The stand-in's engines: 100 to 102 are not to be taken, 103 wants 1 GiB, 104 cannot be made, 105 has tensor cores,
# 106 is Winograd's, 107 to 109 plain: 107 wants more than 1 MiB, 109 is of the fallback list. Workspaces grow with h.
# 99, the first for 1x1, has tensor cores and wants none.
FIRST = [
    ("float16", False, 105, 5),
    ("bfloat16", False, 105, 5),
    ("float32", True, 105, 5),
    ("float32", False, 108, 7),
]


@pytest.mark.parametrize("h", [6, 7, 8])
@pytest.mark.parametrize("dtype, tf32, engine, kib", FIRST)
def test_the_first_that_may_be_taken(convs, dtype, tf32, engine, kib, h):
    k = key(dtype, h=h, tf32=tf32)
    assert convs.name(k) is None
    assert convs.bytes(k) == (kib + h % 3) * 1024
    assert convs.name(k).startswith(f"eng{engine}_k2=")


LIMITS = [
    (2 << 30, 103, 1 << 30),
    ((1 << 30) - 1, 105, 5 << 10),
    (5 << 10, 105, 5 << 10),
    ((5 << 10) - 1, 106, 2 << 10),
    ((2 << 10) - 1, 109, 1 << 10),
    (1 << 10, 109, 1 << 10),
]


@pytest.mark.parametrize("limit, engine, bytes_", LIMITS)
def test_limit(convs, limit, engine, bytes_):
    k = key("float16", limit=limit)
    assert convs.bytes(k) == bytes_ and convs.name(k).startswith(f"eng{engine}_")


def test_plain_float32_wants_more_of_its_first_engine(convs):
    k = key(limit=2 * MIB)
    assert convs.bytes(k) == 1025 << 10 and convs.name(k).startswith("eng107_")


@pytest.mark.parametrize("limit", [0, MIB])
def test_a_plan_without_a_workspace_is_given_none(convs, limit):
    k = key("float16", r=1, limit=limit)
    x, w = tensors(k)
    assert convs.bytes(k) == 0 and convs.name(k).startswith("eng99_")
    want, sizes = exact(k, x, w)
    assert (abs(convs.run(k, x, w).astype(np.float64) - want) <= tolerance(k, want, sizes)).all()
    with refused(names=["EDEVICE", "workspace"], kind=RuntimeError):
        convs.run(key("float16"), *tensors(key("float16")), workspace=0)


def test_no_plan_within_the_limit(convs):
    convolution, limit, least = "float32 tf32 6x7x16, 32 filters 3x3, stride 1", "1023 bytes", 1024
    with refused("EDEVICE: cuDNN 92800", names=[convolution, limit, least], kind=RuntimeError):
        convs.bytes(key(tf32=True, limit=1023))
    assert convs.count() == 0


def test_a_plan_is_made_once(convs):
    one, other = key(), key(limit=2 * MIB)
    first = convs.bytes(one)
    calls = convs.calls()
    assert convs.bytes(one) == first and convs.calls() == calls and convs.count() == 1
    changes = [{"dtype": "float16"}, {"tf32": True}, {"h": 9}, {"w": 9}, {"c": 32}, {"k": 16}, {"r": 1}, {"stride": 2}]
    for i, change in enumerate(changes):
        convs.bytes(key(**change))
        assert convs.count() == 2 + i and convs.calls() > calls
    convs.bytes(other)
    assert convs.count() == 2 + len(changes)
    calls = convs.calls()
    assert convs.bytes(one) == first and convs.calls() == calls
    assert convs.version() == 92800


BAD = [{"h": 2}, {"w": 0}, {"c": 0}, {"k": -1}, {"r": 0}, {"stride": 0}, {"h": 1 << 40}, {"h": 2, "w": 2}]


@pytest.mark.parametrize("change", BAD)
def test_not_a_convolution(convs, change):
    with refused("EINVAL: conv", kind=RuntimeError):
        convs.bytes(key(**change))
    assert convs.count() == 0


def test_described_device(stand_in_process, library, stand_in):
    """Planned for, and not run on; bfloat16 is not there on compute capability 7.5."""
    turing = stand_in_process.Convs(library, stand_in, '{"deviceVer": 750}')
    turing.open()
    assert turing.bytes(key("float16")) == 5 << 10
    with refused("EDEVICE: cuDNN 92800", names=["bfloat16"], kind=RuntimeError):
        turing.bytes(key("bfloat16"))
    with refused("EINVAL: cuDNN", kind=RuntimeError):
        turing.run(key("float16"), *tensors(key("float16")))
    turing.close()
    nothing = stand_in_process.Convs(library, stand_in, "nothing")
    nothing.open()
    with refused("EDEVICE: cuDNN 92800: device properties", names=["BAD_PARAM: "], kind=RuntimeError):
        nothing.bytes(key())
    nothing.close()
    assert turing.live() == 0


# ---- numbers ----


def tensors(k, seed=0):
    """x [h][w][c] and w [k][r][r][c]."""
    dtype, _, h, w, c, filters, r, _, _ = k
    rng = np.random.default_rng(seed)
    kind = list(DTYPES.values())[dtype]
    return rng.standard_normal((h, w, c)).astype(kind), rng.standard_normal((filters, r, r, c)).astype(kind)


def exact(k, x, w):
    """In float64, and the sum of the products' sizes."""
    r, stride = k[6], k[7]
    x, w = x.astype(np.float64), w.astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(x, (r, r), axis=(0, 1))[::stride, ::stride]  # h w c r r
    return np.einsum("hwcab,kabc->hwk", windows, w), np.einsum("hwcab,kabc->hwk", abs(windows), abs(w))


def tolerance(k, y, sizes):
    """Of each element: float sums of n products lose at most n units of their sizes' sum, TF32 factors 2^-11 each, and
    the result is rounded once (and half has a smallest number)."""
    dtype, tf32, *_, c, _, r, _, _ = k
    allowed = sizes * (c * r * r * 2.0**-24 + (2.0**-10 if dtype == 0 and tf32 else 0))
    return allowed + abs(y) * (0, 2.0**-11, 2.0**-8)[dtype] + (0, 2.0**-24, 0)[dtype]


SHAPES = [
    {"h": 6, "w": 7, "c": 16, "k": 32, "r": 3},
    {"h": 3, "w": 3, "c": 32, "k": 16, "r": 3},  # one pixel
    {"h": 5, "w": 12, "c": 48, "k": 80, "r": 3},  # tails everywhere
    {"h": 9, "w": 11, "c": 16, "k": 48, "r": 3, "stride": 2},
    {"h": 8, "w": 10, "c": 32, "k": 16, "r": 3, "stride": 2},  # a row and a column left over
    {"h": 4, "w": 5, "c": 32, "k": 128, "r": 2},  # folded upsampling
    {"h": 1, "w": 9, "c": 64, "k": 32, "r": 1},
]


@pytest.mark.parametrize("dtype, tf32", [(dtype, tf32) for dtype, tf32, *_ in FIRST])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(convs, dtype, tf32, shape):
    k = key(dtype, tf32=tf32, **shape)
    x, w = tensors(k)
    y, (want, sizes) = convs.run(k, x, w), exact(k, x, w)
    assert y.dtype == x.dtype and y.shape == want.shape
    error = abs(y.astype(np.float64) - want)
    assert (error <= tolerance(k, want, sizes)).all(), error.max()  # a NaN is not within it
    if tf32:  # and the tensor cores are taken, where they may be
        assert not (error <= tolerance(key(dtype, **shape), want, sizes)).all()
    assert (convs.run(k, x, w) == y).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(convs, dtype, bad):
    """Reaches the pixels that see it, as itself, and no others."""
    k = key(dtype, h=6, w=6)
    x, w = tensors(k)
    x[0, 0, 3] = bad
    y = convs.run(k, x, abs(w)).astype(np.float64)
    assert (np.isnan(y[0, 0]) if np.isnan(bad) else y[0, 0] == np.inf).all()
    assert np.isfinite(y.reshape(-1, y.shape[-1])[1:]).all()


# ---- a timed choice ----


def test_the_fastest_is_kept(convs):
    k = key("float16")
    x, w = tensors(k)
    assert convs.bytes(k) == 5 << 10
    assert convs.tune(k, x, w, [3.0, 1.0, 2.0]) == 3  # 105, 106 and 108
    assert convs.name(k).startswith("eng106_") and convs.bytes(k) == 2 << 10
    assert convs.count() == 1
    want, sizes = exact(k, x, w)
    assert (abs(convs.run(k, x, w).astype(np.float64) - want) <= tolerance(k, want, sizes)).all()
    assert convs.tune(k, x, w, [1.0, 2.0, 3.0]) == 0 and convs.name(k).startswith("eng106_")  # once is enough
    other = key("float16", limit=6 << 10)
    assert convs.tune(other, x, w, [1.0, 1.0]) == 2 and convs.name(other).startswith("eng105_")  # the first of equals
    third = key("float16", limit=7 << 10)
    assert convs.tune(third, x, w, [2.0, 1.0, -1.0]) == 3 and convs.name(third).startswith("eng106_")  # one fails
    strict = key("float32")
    assert convs.tune(strict, *tensors(strict), [1.0]) == 1 and convs.name(strict).startswith("eng108_")


def test_none_can_be_timed(convs):
    k = key("float16")
    assert convs.tune(k, *tensors(k), [-1.0, -1.0, -1.0]) == 3 and convs.name(k).startswith("eng105_")
    assert convs.tune(k, *tensors(k), []) == 0  # nor is it tried again


# ---- failures ----


def test_every_failure_is_said_and_nothing_leaks(convs):
    """Each of cuDNN's calls fails in turn. Where it only loses an engine, another one computes the same; else the
    sentence says what cuDNN refused."""
    k = key("float16", h=4, w=4, c=16, k=16)
    x, w = tensors(k)
    want, sizes = exact(k, x, w)
    results = convs.with_faults(k, x, w)
    said = [r for r in results if isinstance(r, str)]
    assert len(results) > 100 and len(said) > 40
    assert all(r.startswith(("EDEVICE: cuDNN 92800: ", "EDEVICE: cuDNN: making a handle: ")) for r in said)
    for what in ("making a handle", "tensor", "convolution", "operation", "operation graph", "variant pack", "stream"):
        assert any(f": {what}: CUDNN_STATUS_INTERNAL_ERROR" in r for r in said), what
    assert any("running a convolution: CUDNN_STATUS_INTERNAL_ERROR: stand-in: as the test wanted" in r for r in said)
    for y in results:
        if not isinstance(y, str):
            assert (abs(y.astype(np.float64) - want) <= tolerance(k, want, sizes)).all()


def test_threads(convs):
    keys = [key(dtype, h=h, limit=limit) for dtype in DTYPES for h in (4, 5) for limit in (MIB, 2 * MIB)]

    def work(seed):
        for k in (keys * 2)[seed : seed + len(keys)]:
            x, w = tensors(k, seed)
            want, sizes = exact(k, x, w)
            y = convs.run(k, x, w, 2 * MIB).astype(np.float64)  # planned by whoever comes first
            if not (abs(y - want) <= tolerance(k, want, sizes)).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert convs.count() == len(keys)
    more = [key(h=h, w=w) for h in range(10, 30) for w in range(10, 30)]
    assert convs.bytes_at_once(more) and convs.count() == len(keys) + len(more)


FOUND = """
#include <stddef.h>
#include <stdint.h>
size_t cudnnGetVersion(void) { return VERSION; }
#define X(NAME) int NAME(void) { return 0; }
X(cudnnBackendCreateDescriptor) X(cudnnBackendDestroyDescriptor) X(cudnnBackendSetAttribute)
X(cudnnBackendGetAttribute) X(cudnnBackendFinalize) X(cudnnGetErrorString) X(cudnnGetLastErrorString)
MORE
"""
OPENED = [
    (None, [], ["libcudnn.so.9", "nowhere.so"]),
    ("", [], ["cudnnBackendCreateDescriptor"]),
    (FOUND, ["-DVERSION=81000", "-DMORE="], ["9.0", "8.10.0"]),
    (FOUND, ["-DVERSION=92800", "-DMORE=X(cublasLtCreate)"], []),
]


@pytest.mark.parametrize("source, flags, names", OPENED)
def test_a_library_that_will_not_do(library, tmp_path, source, flags, names):
    path = str(tmp_path / "nowhere.so")
    if source is not None:
        (tmp_path / "fake.c").write_text(source)
        path = compile_cudnn(tmp_path / "lib", *flags, source=tmp_path / "fake.c")
    with process() as one:
        convs = one.Convs(library, path)
        with refused("EDEVICE: cuDNN", names=names, kind=RuntimeError):
            convs.open()
        convs.close()  # of nothing


# ---- an installed cuDNN ----


@pytest.fixture(scope="module")
def installed(library):
    """Plans for a described H100."""
    path = find_cudnn()
    if path is None:
        pytest.skip("no cuDNN is installed")
    with process() as one:
        convs = one.Convs(library, path, find_gpu("H100").device_json, str(ask_cudnn.build_no_driver()))
        try:
            convs.open()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield convs
        convs.close()


def stripe(case, rows=32):
    """Of `rows` of y, as backend.c asks for it: with its padding; after nearest 2x, folded into 2x2 filters."""
    k, h, w = (2, rows // 2 + 1, case.w + 1) if case.up else (case.k, rows, case.y[2])
    h, w = ((n - 1) * case.stride + k for n in (h, w))
    filters = round_up(case.out_c) * (4 if case.up else 1)
    return {"h": h, "w": w, "c": round_up(case.in_c), "k": filters, "r": k, "stride": case.stride}


OURS = [stripe(case) for case in models(CONVS)]
OURS += [stripe(CONVS[0], 1), {"h": 3, "w": 10, "c": 16, "k": 16, "r": 3}]  # a last row, and a tiny one


@pytest.mark.parametrize("dtype, tf32", [(dtype, tf32) for dtype, tf32, *_ in FIRST])
def test_installed_cudnn_has_a_plan(installed, dtype, tf32):
    for shape in OURS:
        k = key(dtype, tf32=tf32, limit=4 * MIB, **shape)
        assert 0 <= installed.bytes(k) <= 4 * MIB, shape
        assert installed.name(k).startswith("eng"), shape


def test_installed_cudnn_says_which_convolution(installed):
    with refused("EINVAL: conv", kind=RuntimeError):
        installed.bytes(key(h=2))
