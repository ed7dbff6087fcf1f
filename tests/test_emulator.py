"""The emulator that stands in for a GPU: it runs right kernels right, and shows what is wrong with wrong ones. With
VAEMEM_TEST_GPU=1 the right ones run on the GPU, which should agree with it."""

from __future__ import annotations

from ctypes import c_size_t

import ml_dtypes
import numpy as np
import pytest
from cuda_kernels import Memory, ProbeArgs, built, emulated
from emulator import build
from errors import refused

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
