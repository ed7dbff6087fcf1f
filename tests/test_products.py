"""Products of pairs of bfloat16 (vm_products of kernels/cpu.h): plain C, AVX512_BF16 and AMX where this processor has
them, and AMX on the emulator of its instructions, beside float64 and, bit for bit, beside the order in which each adds
up.

Buffers end where readable memory does, so that a read beyond them ends the test run.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
from ctypes import POINTER, c_double, c_float, c_size_t, c_ssize_t, c_void_p

import ml_dtypes
import numpy as np
import pytest
from cases import EPS, guarded
from emulator.build import HERE, compiler, has, run

KERNELS = HERE.parents[1] / "kernels"
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DVM_HAVE_X86", "-ffp-contract=fast", "-mfma"]
AVX512 = [f"-mavx512{x}" for x in ("f", "vl", "bw", "dq", "bf16")]
AMX = [*AVX512, "-mamx-tile", "-mamx-bf16"]
EMULATED = ["-Dvm_pairs_amx=vm_pairs_amx_emulated", "-mavx2", "-DVM_EMULATE_AMX", "-iquote", str(HERE)]

if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("these kernels are of x86-64", allow_module_level=True)


class Gemm(ctypes.Structure):
    _fields_ = (
        *((name, c_size_t) for name in ("rows", "pixels", "blocks", "batches", "depth")),
        *((name, c_void_p) for name in ("x", "x_offset")),
        *((name, c_ssize_t) for name in ("x_rest", "x_row", "x_pixel")),
        ("w", c_void_p),
        ("w_block", c_ssize_t),
        *((name, c_void_p) for name in ("bias", "add")),
        *((name, c_ssize_t) for name in ("add_row", "add_pixel", "add_block")),
        ("y", c_void_p),
        *((name, c_ssize_t) for name in ("y_row", "y_pixel", "y_block")),
    )


class Products(ctypes.Structure):
    _fields_ = (
        *((name, c_size_t) for name in ("max_rows", "max_pixels", "rows", "steps")),
        ("gemm", ctypes.CFUNCTYPE(None, POINTER(Gemm))),
        ("load", c_void_p),
        ("burn", ctypes.CFUNCTYPE(c_double, c_size_t, POINTER(c_float))),
        *((name, c_void_p) for name in ("winograd", "upsampled", "strided")),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("products")
    objects = []
    sources = [("ref/ops.c", []), ("avx512bf16/gemm.c", AVX512), ("avx512bf16/load.c", AVX512)]
    sources += [("amx/gemm.c", AMX), ("amx/gemm.c", EMULATED), ("amx.c", [])]
    for source, flags in sources:
        objects.append(folder / f"{len(objects)}.o")
        run(compiler("gcc"), *FLAGS, *flags, "-c", KERNELS / source, "-o", objects[-1])
    run(compiler("gcc"), "-shared", "-o", folder / "products.so", *objects, "-lm")
    library = ctypes.CDLL(str(folder / "products.so"))
    library.vm_amx_permitted.restype = ctypes.c_bool
    return library


MANY = 1 << 16
MOST = {"ref": (1, 4), "avx512bf16": (1, 14), "amx": (MANY, MANY), "amx_emulated": (MANY, MANY)}  # rows, pixels


@pytest.fixture(params=MOST)
def products(request, library):
    if request.param == "avx512bf16" and not has("avx512_bf16"):
        pytest.skip("this processor has no AVX512_BF16")
    if request.param == "amx" and not library.vm_amx_permitted():
        pytest.skip("this processor has no AMX, or the kernel does not let it be used")
    found = Products.in_dll(library, f"vm_pairs_{request.param}")
    assert (found.max_rows, found.max_pixels) == MOST[request.param]
    found.name, found.library = request.param, library
    return found


# ---- buffers ----


def at_the_edge(a: np.ndarray) -> np.ndarray:
    """A copy whose last byte is the last one that can be read."""
    page = mmap.PAGESIZE
    pages = -(-a.nbytes // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(c_void_p(first + pages * page), c_size_t(page), 0) == 0
    copy = np.frombuffer(memory, a.dtype, a.size, pages * page - a.nbytes).reshape(a.shape)
    copy[...] = a
    return copy


def pairs(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """uint32 with two bfloat16 each."""
    halves = [a.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for a in (lower, upper)]
    return halves[0] | halves[1] << 16


def halves(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper ones, as float32."""
    return (a << 16).view(np.float32), (a & 0xFFFF0000).view(np.float32)


class Case:
    """One gemm of random numbers, in buffers no longer than they must be."""

    def __init__(self, pixels, blocks, batches, depth, stride=1, rows=1, seed=0, numbers=None):
        self.rows, self.pixels, self.blocks, self.batches, self.depth = rows, pixels, blocks, batches, depth
        self.x_rest, self.x_pixel, self.x_row = 0, 16 * stride, 16 * stride * (pixels + 2)
        r = np.random.default_rng([rows, pixels, blocks, batches, depth, stride, seed])
        numbers = numbers or (lambda n: r.standard_normal(n))
        each = (rows - 1) * self.x_row + (pixels - 1) * self.x_pixel + depth
        self.offsets = (r.permutation(batches) * each).astype(np.intp)
        self.w_block = batches * depth * 16
        self.x = at_the_edge(pairs(numbers(batches * each), numbers(batches * each)))
        self.w = at_the_edge(pairs(numbers(blocks * self.w_block), numbers(blocks * self.w_block)))
        self.bias = at_the_edge(r.standard_normal(blocks * 16).astype(np.float32))
        self.add = r.standard_normal((blocks, rows, pixels, 16)).astype(np.float32)

    def steps(self):
        """The halves (lower, upper) of x [steps][1][rows][pixels][1] and of w [steps][blocks][1][1][16]."""
        first = (self.offsets[:, None] + np.arange(self.depth)).ravel()
        at = np.arange(self.rows)[:, None] * self.x_row + np.arange(self.pixels) * self.x_pixel
        x = self.x[first[:, None, None] + at][:, None, ..., None]
        w = self.w.reshape(self.blocks, -1, 1, 1, 16).swapaxes(0, 1)
        return halves(x), halves(w)

    def beside(self, begins):
        """What is added: "bias", "add" or nothing."""
        if not begins:
            return np.zeros_like(self.add)
        return np.broadcast_to(self.bias.reshape(-1, 1, 1, 16), self.add.shape) if begins == "bias" else self.add

    def exact(self, begins):
        """In float64, and the sum of all terms' sizes."""
        total = size = 0.0
        for x, w in zip(*self.steps(), strict=True):
            x, w = x[:, 0, ..., 0].astype(np.float64), w[:, :, 0, 0].astype(np.float64)
            total = total + np.einsum("srp,sol->orpl", x, w)
            size = size + np.einsum("srp,sol->orpl", np.abs(x), np.abs(w))
        return total + self.beside(begins), size + np.abs(self.beside(begins))

    def one_by_one(self, begins):
        """As plain C and vdpbf16ps add up: one product after the other, of a pair the upper one first."""
        (x_lower, x_upper), (w_lower, w_upper) = self.steps()
        total = np.zeros(self.add.shape, np.float32)
        for s in range(len(x_lower)):
            total += x_upper[s] * w_upper[s]
            total += x_lower[s] * w_lower[s]
        return total + self.beside(begins)

    def by_tiles(self, begins):
        """As tdpbf16ps adds up, to what there is: a batch's products of lower halves and those of upper ones."""
        (x_lower, x_upper), (w_lower, w_upper) = self.steps()
        total = self.beside(begins).copy()
        for first in range(0, len(x_lower), self.depth):
            lower, upper = np.zeros_like(total), np.zeros_like(total)
            for s in range(first, first + self.depth):
                lower += x_lower[s] * w_lower[s]
                upper += x_upper[s] * w_upper[s]
            total += lower + upper
        return total

    def result(self, products, begins="bias", in_place=False, pixels=None):
        """[blocks][rows][pixels][16], of the pixels (a slice) alone where given; in_place: what is added lies in y."""
        of = pixels or slice(0, self.pixels)
        n, rows = of.stop - of.start, self.rows
        y_row = n * 16 + 16
        y_block = rows * y_row + 16
        y, check = guarded(self.blocks * y_block - 32)
        y[:] = 777

        def parts(of_what):
            return [of_what[o * y_block + row * y_row :][: n * 16] for o in range(self.blocks) for row in range(rows)]

        adds = y if in_place else at_the_edge(np.full(y.size, 777, np.float32))
        if begins == "add":
            for part, numbers in zip(parts(adds), self.add[:, :, of].reshape(-1, n * 16), strict=True):
                part[:] = numbers
        g = Gemm(
            **{"rows": rows, "pixels": n, "blocks": self.blocks, "batches": self.batches, "depth": self.depth},
            **{"x": self.x[of.start * self.x_pixel :].ctypes.data, "x_offset": self.offsets.ctypes.data},
            **{"x_rest": self.x_rest, "x_row": self.x_row, "x_pixel": self.x_pixel},
            **{"w": self.w.ctypes.data, "w_block": self.w_block},
            **{"bias": self.bias.ctypes.data if begins == "bias" else None},
            **{"add": adds.ctypes.data if begins == "add" else None},
            **{"add_row": y_row, "add_pixel": 16, "add_block": y_block},
            **{"y": y.ctypes.data, "y_row": y_row, "y_pixel": 16, "y_block": y_block},
        )
        products.gemm(ctypes.byref(g))
        check()
        assert not products.library.amx_in_use()
        got = np.stack(parts(y)).reshape(self.blocks, rows, n, 16)
        for part in parts(y):
            part[:] = 777
        assert (y == 777).all(), "written between rows or blocks"
        return got


def same_bits(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


# ---- all of them ----

ROWS_PIXELS = [(1, n) for n in (1, 2, 4, 13, 14, 15, 16, 17, 32, 33, 50, 64, 112, 128)]
ROWS_PIXELS += [(2, 16), (2, 52), (3, 33), (4, 64), (5, 7), (5, 48)]
CASES = [
    (name, rows, pixels, blocks, batches, depth, stride)
    for name, most in MOST.items()
    for rows, pixels in ROWS_PIXELS
    for blocks in (1, 2)
    for batches, depth, stride in ((9, 16, 1), (1, 2, 1), (4, 16, 2), (20, 12, 1), (27, 16, 1), (3, 1, 2))
    if rows <= most[0] and pixels <= most[1]
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("products,rows,pixels,blocks,batches,depth,stride", CASES, indirect=["products"])
def test_products(products, rows, pixels, blocks, batches, depth, stride):
    case = Case(pixels, blocks, batches, depth, stride, rows)
    for begins in ("bias", "add"):
        got = case.result(products, begins)
        want, size = case.exact(begins)
        # two terms a step, each added with one rounding, a batch's two sums and what is added: n * eps in any order
        assert (np.abs(got - want) <= (2 * batches * depth + 3) * EPS * size).all()
        assert same_bits(got, case.by_tiles(begins) if "amx" in products.name else case.one_by_one(begins))
    assert same_bits(case.result(products, "add", in_place=True), got)


def test_the_same_number_in_every_tile(products):
    """A pixel's sums are the same wherever a call begins and however many pixels it takes."""
    case = Case(130, 2, 12, 16)
    whole = np.concatenate(
        [case.result(products, pixels=slice(p, p + 1)) for p in range(130)], axis=2
    )  # the least tiles
    for n in {1, 2, 3, 8, 16, 33, 130}:
        if n > products.max_pixels:
            continue
        parts = [case.result(products, pixels=slice(p, min(p + n, 130))) for p in range(0, 130, n)]
        assert same_bits(np.concatenate(parts, axis=2), whole)


def test_without_bias_or_add(products):
    case = Case(min(products.max_pixels, 20), 2, 5, 16)
    case.bias[:] = 0
    assert same_bits(case.result(products, None), case.result(products))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_numbers_pass(products, bad):
    case = Case(3, 1, 2, 16)
    case.x[case.offsets[0] + case.x_pixel] = pairs(np.float32(1), np.float32(bad))  # the second pixel
    got = case.result(products)
    assert np.isfinite(got[:, :, [0, 2]]).all() and not np.isfinite(got[:, :, 1]).any()
    assert same_bits(got[:, :, [0, 2]], Case(3, 1, 2, 16).result(products)[:, :, [0, 2]])


def test_numbers_below_the_smallest_normal_one(products):
    """Instructions take them for zero, before and after; plain C keeps them."""
    case = Case(2, 1, 1, 2, numbers=np.zeros)
    case.x[:2] = pairs(np.float32([2**-130, 2**-70]), np.float32([0, 2**-70]))
    case.w[:] = pairs(np.float32(2**20), np.float32(2**-60))
    got = case.result(products, None)[0, 0, 0]
    # 2^-130 * 2^20 is normal, but of a number that is not; 2^-70 * 2^-60 is too small; 2^-70 * 2^20 is neither
    kept = np.float32(2**-110) + np.float32(2**-130) if products.name == "ref" else np.float32(0)
    assert (got == np.float32(2**-50) + kept).all()
    case.x[:2] = pairs(np.float32([2**-130, 0]), np.float32([0, 2**-70]))
    assert (case.result(products, None)[0, 0, 0] == kept).all()


@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "to zero"])
def test_the_threads_rounding_is_not_theirs(products, mode):
    """Instructions round to nearest whatever <fenv.h> says (with x86-64's numbers); plain C does as it is told."""
    case = Case(min(products.max_pixels, 20), 2, 3, 16)
    nearest = case.result(products, None)
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(mode) == 0
    try:
        got = case.result(products, None)
    finally:
        assert libm.fesetround(0) == 0
    assert same_bits(got, nearest) == (products.name != "ref")


def test_burn_counts_its_operations(products):
    sink = c_float(0)
    once, twice = (products.burn(rounds, ctypes.byref(sink)) for rounds in (10, 20))
    assert once > 0 and twice == 2 * once
    assert not products.library.amx_in_use()


@pytest.mark.parametrize("rows,pixels,stride", [(1, 4, 1), (1, 40, 2), (1, 64, 1), (3, 20, 1), (4, 32, 2), (5, 16, 1)])
def test_split_numbers_are_three_batches(products, rows, pixels, stride):
    """To the bit: of x with w, of x with w's rests, and of x's rests with w."""
    if products.name == "avx512bf16":
        pytest.skip("AVX512_BF16 multiplies no split numbers")
    n, rows, pixels = 4, min(products.max_rows, rows), min(products.max_pixels, pixels)
    three = Case(pixels, 2, 3 * n, 16, stride, rows)
    each = len(three.x) // (3 * n)
    three.offsets = np.array([i * each + o for i in range(n) for o in (0, 0, n * each)], np.intp)
    w = three.w.reshape(2, n, 3, 256)
    w[:, :, 2] = w[:, :, 0]
    split = Case(pixels, 2, n, 16, stride, rows)
    split.x, split.bias, split.x_rest, split.w_block = three.x, three.bias, n * each, n * 512
    split.w, split.offsets = at_the_edge(w[:, :, :2]), np.arange(n, dtype=np.intp) * each
    assert same_bits(split.result(products), three.result(products))


@pytest.mark.parametrize("pixels", [4, 14, 40])
def test_split_numbers(products, pixels):
    """Numbers split into two bfloat16: the error is that of what is left out."""
    if products.name == "avx512bf16":
        pytest.skip("AVX512_BF16 multiplies no split numbers")
    n, pixels = 64, min(products.max_pixels, pixels)
    r = np.random.default_rng(5)
    x, w = r.standard_normal((pixels, n)).astype(np.float32), r.standard_normal((n, 32)).astype(np.float32)

    def split(a):
        high = a.astype(ml_dtypes.bfloat16).astype(np.float32)
        return high, (a - high).astype(ml_dtypes.bfloat16).astype(np.float32)

    def planes(a):  # [n/32][pixels][16 pairs]
        return pairs(a[:, 0::2], a[:, 1::2]).reshape(pixels, n // 32, 16).transpose(1, 0, 2).ravel()

    def rows(a):  # [blocks][n/32][16 pairs][16 outputs]
        return pairs(a[0::2], a[1::2]).reshape(n // 32, 16, 2, 16).transpose(2, 0, 1, 3)

    (xh, xl), (wh, wl) = split(x), split(w)
    case = Case(pixels, 2, n // 32, 16)
    case.x = at_the_edge(np.concatenate([planes(xh), planes(xl)]))
    case.x_rest, case.offsets = n // 32 * pixels * 16, np.arange(n // 32, dtype=np.intp) * pixels * 16
    case.w, case.w_block = at_the_edge(np.stack([rows(wh), rows(wl)], axis=2).ravel()), n // 32 * 512
    got = case.result(products)
    want = (x.astype(np.float64) @ w).reshape(pixels, 2, 16).swapaxes(0, 1) + case.bias.reshape(2, 1, 16)
    size = (np.abs(x).astype(np.float64) @ np.abs(w)).reshape(pixels, 2, 16).swapaxes(0, 1)
    size += np.abs(case.bias.reshape(2, 1, 16))
    # rounding to 8 bits leaves 2^-9 of a number and that again 2^-9 of it: dropped are the product of the two rests and
    # what the rests left, each at most 2^-18 of a term; the sum adds 6 * n / 2 roundings of partial sums
    assert (np.abs(got[:, 0] - want) <= (3 * 2.0**-18 + (3 * n + 1) * EPS) * size).all()


# ---- the emulator itself ----

MISUSE = {
    "configured": ("_tile_zero(0);", "tilezero wants a configured tile"),
    "released": ("load(); _tile_release(); _tile_loadd(0, data, 64);", "tileloadd wants a configured tile"),
    "palette": ("c.palette = 2; load();", "ldtilecfg wants palette 1"),
    "rows": ("c.rows[3] = 17; load();", "ldtilecfg wants at most 16 rows"),
    "bytes": ("c.bytes[3] = 68; load();", "ldtilecfg wants at most 16 rows of at most 64 bytes"),
    "half configured": ("c.rows[3] = 0; load();", "and both or neither"),
    "reserved": ("c.reserved[5] = 1; load();", "ldtilecfg wants zeros"),
    "ninth tile": ("c.rows[8] = c.bytes[8] = 4; load();", "ldtilecfg wants zeros"),
    "depth": ("c.rows[2] = 15; load(); _tile_dpbf16ps(0, 1, 2);", "a row of w for each pair of x"),
    "pixels": ("c.rows[0] = 15; load(); _tile_dpbf16ps(0, 1, 2);", "as many rows of sums as of x"),
    "outputs": ("c.bytes[0] = 60; load(); _tile_dpbf16ps(0, 1, 2);", "as many columns as w has"),
    "twice": ("load(); _tile_dpbf16ps(0, 1, 1);", "three different tiles"),
    "whole pairs": ("c.bytes[1] = 62; load(); _tile_dpbf16ps(0, 1, 2);", "rows of whole pairs"),
}
PROGRAM = """
#include "amx.h"
static amx_config c = {{.palette = 1}};
static float data[16][16];
static void load(void) {{ _tile_loadconfig(&c); }}
int main(void) {{
    for (int t = 0; t < 8; t++) c.rows[t] = 16, c.bytes[t] = 64;
    (void)data;
    {}
    return 0;
}}
"""


@pytest.mark.parametrize("name", [*MISUSE, "nothing wrong"])
def test_the_emulator_refuses_what_the_processor_does(tmp_path, name):
    wrong, sentence = MISUSE.get(
        name, ("load(); _tile_loadd(1, data, 64); _tile_dpbf16ps(0, 1, 2); _tile_release();", "")
    )
    source, program = tmp_path / "misuse.c", tmp_path / "misuse"
    source.write_text(PROGRAM.format(wrong))
    flags = ["-std=gnu11", "-mfma", "-Wall", "-Wno-unused-function", "-iquote", HERE]
    run(compiler("gcc"), *flags, source, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert sentence in done.stderr and (done.returncode == 0) == (name == "nothing wrong")
