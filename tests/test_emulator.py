"""The emulator that stands in for a GPU: it runs right kernels right, and shows what is wrong with wrong ones. With
VAEMEM_TEST_GPU=1 the right ones run on the GPU, which should agree with it."""

from __future__ import annotations

from ctypes import Structure, c_size_t, c_uint32, c_uint64, c_void_p

import cuda_driver
import ml_dtypes
import numpy as np
import pytest
from cuda_kernels import BOX, Memory, ProbeArgs, built, emulated
from emulator import build
from errors import is_about, refused

SEEDS = range(1, 9)
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}

kernels = built("probe", of=build.HERE)


def launch(kernels, name, in_, out, n=0, grid=(1,), block=(256,), shared=0, seed=1):
    """out as the kernel leaves it."""
    memory = Memory()
    in_, out = (None if x is None else memory.copy(np.asarray(x)) for x in (in_, out))
    kernels.launch(f"vm_probe_{name}", grid, block, ProbeArgs(in_=in_, out=out, n=n), shared, seed)
    memory.check()
    return out


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# ---- blocks, barriers, warps ----


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers(kernels, seed):
    x = numbers(3, 256)
    out = launch(kernels, "reverse", x, np.zeros_like(x), n=100, grid=(3,), shared=1024, seed=seed)
    np.testing.assert_array_equal(out, x[:, ::-1])


def test_indices(kernels):
    count = 2 * 3 * 4 * 5 * 6 * 7
    out = launch(kernels, "indices", None, np.zeros(count, np.uint32), grid=(2, 3, 4), block=(5, 6, 7))
    np.testing.assert_array_equal(out, np.arange(count))


@pytest.mark.parametrize("mask", [1, 2, 16, 31])
def test_shuffle(kernels, mask):
    x = numbers(256)
    np.testing.assert_array_equal(launch(kernels, "shuffle", x, np.zeros_like(x), mask), x[np.arange(256) ^ mask])


def test_ldmatrix(kernels):
    """As PTX says: of matrix m, lane i gets row i / 4, columns i % 4 * 2 and the next, in r[m]."""
    rows = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = launch(kernels, "ldmatrix", rows, np.zeros((2, 32, 4), np.uint32), block=(32,), shared=512)
    for got, matrices in zip(out, (rows, rows.transpose(0, 2, 1)), strict=True):
        want = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 32).T
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_mma(kernels, dtype, seed):
    a, b = (numbers(n, 16, seed=seed + n).astype(TYPES[dtype]) for n in (16, 8))
    d = numbers(16, 8, seed=seed)
    both = np.concatenate([a, b]).view(np.uint16)
    out = launch(kernels, f"mma_{dtype}", both, d, block=(32,), shared=1024, seed=seed)
    a, b = a.astype(np.float64), b.astype(np.float64)
    # Products of 11-bit numbers are exact in float; 17 sums are each rounded, to 2^-24 of at most the sum of sizes.
    bound = 17 * 2.0**-24 * (abs(d) + abs(a) @ abs(b).T)
    assert np.all(abs(out - (d + a @ b.T)) <= bound)


def test_groups_of_copies(kernels):
    x = np.arange(2048, dtype=np.uint32)
    assert seeds_right(kernels, "groups", x, x, shared=8192) == len(SEEDS)


# ---- pairs of blocks, boxes of tensors, warpgroups ----

needs_hopper = pytest.mark.skipif(
    cuda_driver.driver() is not None and cuda_driver.driver().target != "sm_90", reason="only compute capability 9.0"
)


class MapArgs(Structure):
    """Of tests/emulator/probe.cu."""

    _fields_ = (("map", c_uint64 * 16), ("out", c_void_p), *((name, c_uint32) for name in ("column", "part", "row")),
                ("padding", c_uint32 * 11))  # fmt: skip


def launch_map(kernels, name, tensor, out, at=(0, 0, 0), *, dtype="f16", pitch=None, grid=(1,), shared=0, seed=1):
    """tensor: (rows, parts, columns) of numbers of 2 bytes; out as the kernel leaves it."""
    memory, (rows, parts, columns) = Memory(), tensor.shape
    inside = memory.full((rows, pitch or parts * columns), tensor.dtype, np.nan, around=Memory.NAN)
    inside[:, : parts * columns] = tensor.reshape(rows, -1)
    out = memory.copy(out)
    strides = 2 * columns, inside.strides[0]
    map_ = kernels.map(dtype, inside.ctypes.data, (columns, parts, rows), strides, BOX)
    args = MapArgs(map_, out.ctypes.data, *at)
    kernels.launch(f"vm_probe_{name}", grid, (128,), args, shared=shared, seed=seed)
    memory.check()
    return out


@needs_hopper
@pytest.mark.parametrize("at", [(0, 0, 0), (64, 1, 32), (40, 2, 5), (128, 1, 30), (192, 0, 64), (0, 3, 0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_boxes(kernels, at, seed):
    """Both blocks get the boxes of both, with zeros outside of the tensor. A second round begins a column further."""
    rng = np.random.default_rng(0)
    tensor = rng.integers(0, 99, (60, 3, 176)).astype(np.float16)
    out = launch_map(kernels, "boxes", tensor, np.zeros((4, 2, 32, 64), np.uint16), at, pitch=3 * 176 + 24, grid=(4,),
                     shared=2 * 4096 + 16, seed=seed)  # fmt: skip
    large = np.zeros((60 + 96, 4, 176 + 256), np.uint16)
    large[:60, :3, :176] = tensor.view(np.uint16)
    column, part, row = at
    boxes = [[large[row : row + 32, part, column + 64 * i + turn :][:, :64] for i in range(2)] for turn in range(2)]
    np.testing.assert_array_equal(out, np.broadcast_to(sum(np.array(b, np.uint16) for b in boxes), out.shape))


@needs_hopper
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_products_of_a_warpgroup(kernels, dtype, seed):
    x = numbers(160, 1, 256, seed=seed).astype(TYPES[dtype])
    d = numbers(256, 64, seed=seed + 1)
    out = launch_map(kernels, f"products_{dtype}", x, np.concatenate([np.zeros((64, 64), np.float32), d]), dtype=dtype,
                     shared=8 * 4096 + 8, seed=seed)  # fmt: skip
    a, b, v = (x[rows, 0].astype(np.float64) for rows in (slice(64), slice(64, 128), slice(128, 160)))
    a, b = a[:, :64], b[:, :64]
    for got, want, size, sums in (
        (out[:64], a @ b.T, abs(a) @ abs(b).T, 64),
        (out[64:], d.T + a[:, :32] @ v, abs(d.T) + abs(a[:, :32]) @ abs(v), 33),
    ):
        assert np.all(abs(got.T - want) <= sums * 2.0**-24 * size)


@emulated
def test_wrong_pairs_and_boxes(kernels):
    tensor, out = np.zeros((32, 1, 64), np.float16), np.zeros((2, 2, 32, 64), np.uint16)
    with refused(names=["pairs", 3], kind=RuntimeError):
        launch_map(kernels, "boxes", tensor, out, grid=(3,), shared=8208)
    with refused(names=["vm_probe_boxes", "map"], kind=RuntimeError):
        kernels.launch("vm_probe_boxes", (2,), (128,), MapArgs(out=out.ctypes.data), shared=8208)
    for strides in ((128, 8), (8, 128)):
        with refused(names=["strides", 16], kind=RuntimeError):
            kernels.map("f16", tensor.ctypes.data, (64, 1, 32), strides, BOX)
    with refused(names=["swizzled", 128], kind=RuntimeError):
        kernels.map("f16", tensor.ctypes.data, (64, 1, 32), (128, 128), (32, 1, 32))
    seen = 0
    for seed in SEEDS:
        try:
            launch_map(kernels, "ends", tensor, np.zeros(1, np.uint32), grid=(2,), shared=8, seed=seed)
        except RuntimeError as fault:
            assert is_about(fault, names=["vm_probe_ends", "shared memory"])
            seen += 1
    assert seen


# ---- numbers ----


def float_patterns() -> np.ndarray:
    """Floats of every kind: all halves and bfloat16s, what lies next to and between them, anything."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    brains = np.arange(65536, dtype=np.uint32) << 16
    bits = [halves.view(np.uint32), brains, brains + 0x8000, np.random.default_rng(0).integers(0, 2**32, 2**16)]
    # midway between halves: bit 12 where they are normal, half of 2^-24 where they are not
    finite = halves[np.isfinite(halves)]
    bits += [halves.view(np.uint32) + 0x1000, (finite + np.float32(2**-25)).view(np.uint32)]
    bits = np.concatenate([np.asarray(b, np.uint32) for b in bits])
    near = np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)])
    return near[: near.size // 8 * 8].view(np.float32)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """To the bit, but for which NaN it is."""
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    unsigned = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])


@pytest.mark.parametrize("dtype", TYPES)
def test_rounding(kernels, dtype):
    x = float_patterns()
    out = launch(kernels, f"to_{dtype}", x, np.zeros(x.size, np.uint16), x.size // 8, grid=(2,)).view(TYPES[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        same(out, x.astype(TYPES[dtype]))


@pytest.mark.parametrize("dtype", TYPES)
def test_widening(kernels, dtype):
    x = np.arange(65536, dtype=np.uint16)
    out = launch(kernels, f"from_{dtype}", x, np.zeros(x.size, np.float32), x.size // 8)
    same(out, x.view(TYPES[dtype]).astype(np.float32))


# ---- wrong kernels ----


def seeds_right(kernels, name, x, want, **kwargs) -> int:
    """In how many orders of threads the kernel gives what it should."""
    outs = (launch(kernels, name, x, np.zeros_like(want), seed=seed, **kwargs) for seed in SEEDS)
    return sum(np.array_equal(out, want) for out in outs)


@emulated
@pytest.mark.parametrize("neighbour", [1, 32, 255])
def test_missing_barrier_is_seen(kernels, neighbour):
    x = numbers(256)
    assert seeds_right(kernels, "race", x, x[np.arange(256) ^ neighbour], n=neighbour) == 0


@emulated
def test_copies_not_waited_for_are_seen(kernels):
    x = np.arange(2048, dtype=np.uint32)
    assert seeds_right(kernels, "no_wait", x[:1024], x[:1024], shared=4096) == 0
    reversed_ = x[:1024].reshape(256, 4)[::-1].ravel()
    assert seeds_right(kernels, "too_early", x, reversed_, shared=4096) == 0


@emulated
def test_shared_memory_begins_as_nan(kernels):
    for name in ("uninitialised", "uninitialised_of"):
        launch(kernels, name, None, np.zeros(256, np.float32), 1)
        assert np.isnan(launch(kernels, name, None, np.zeros(256, np.float32))).all()


@emulated
@pytest.mark.parametrize(
    ("name", "n", "shared", "says"),
    [
        ("exits", 3, 0, ["__syncthreads", "of 256, 253"]),
        ("exits", 200, 0, ["200", "__syncthreads"]),
        ("two_barriers", 3, 0, ["__syncthreads"]),
        ("half_a_warp", 16, 0, ["wait"]),
        ("mixed", 16, 0, ["warp"]),
        ("beside", 1, 1024, ["illegal"]),
        ("beside", 1, 1020, ["illegal"]),
        ("beside", 0, 1020, ["1020 bytes"]),
        ("beside", 0, 0, ["shared"]),
        ("misaligned", 1, 0, ["aligned", "16 bytes"]),
        ("not_shared", 0, 0, ["shared"]),
        ("divides", 0, 0, ["division"]),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_faults(kernels, name, n, shared, says, seed):
    x = np.zeros(2048, np.uint32)
    with refused(names=[f"vm_probe_{name}, block ", *says], kind=RuntimeError):
        launch(kernels, name, x, x, n, shared=shared, seed=seed)
    test_barriers(kernels, seed)  # and the next one runs


@emulated
def test_launches_refused(kernels):
    x = np.zeros(256, np.float32)
    with refused(names=["vm_probe_none"], kind=RuntimeError):
        launch(kernels, "none", x, x)
    for grid, block in (((0,), (32,)), ((1,), (1025,)), ((1, 65536), (32,)), ((1,), (32, 1, 65)), ((1,), (64, 32))):
        with refused(names=["grid"], kind=RuntimeError):
            launch(kernels, "shuffle", x, x, 1, grid=grid, block=block)
    with refused(names=[24, 8], kind=RuntimeError):
        kernels.launch("vm_probe_shuffle", (1,), (32,), c_size_t(1))
