"""What the tests of CUDA kernels share: arguments, cuda.h's functions, memory with guards, and tolerances.

Inputs are numbers of the kernel's own type, so the errors are the kernel's. E is a rounding in float, UNIT the one to
the type that is stored; a half below 2^-14 is rounded by LEAST, and float's own subnormals may be flushed.
"""

import ctypes
import functools
import mmap
import tempfile
from ctypes import POINTER, c_bool, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

import cuda_driver
import ml_dtypes
import numpy as np
import pytest
from emulator import build

E = 2.0**-24
TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"f32": E, "f16": 2.0**-11, "bf16": 2.0**-8, "u8": 0}
SILU = {"f32": 0, "f16": 0, "bf16": 2.0**-12}  # the error of a bfloat16's SiLU, by the size of its argument (pixels.h)
LEAST = {"f32": 1e-36, "f16": 2.0**-25, "bf16": 1e-36, "u8": 0}
ROWS, F32_NCHW, U8_NHWC, F16_NCHW, BF16_NCHW = range(5)  # vm_format
FORMATS = {"rows": ROWS, "f32": F32_NCHW, "u8": U8_NHWC, "f16": F16_NCHW, "bf16": BF16_NCHW}
BLOCK, THREADS, LANES, MERGE_BLOCKS = 16, 256, 64, 4
H200 = 132  # multiprocessors
SM_75, SM_80, SM_86, SM_90 = 64 << 10, 163 << 10, 99 << 10, 227 << 10  # what a block may have of shared memory there
every_type = pytest.mark.parametrize("dtype", TYPES)
every_format = pytest.mark.parametrize("format_", [f for f in FORMATS if f != "rows"])


class Args(ctypes.Structure):
    """What a kernel takes; arrays are given as they are."""

    def __init__(self, **fields):
        super().__init__(**{n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in fields.items()})


class Ring(ctypes.Structure):
    """cuda.h's vm_ring_rows; zeros: all rows are there."""

    _fields_ = (("shift", c_uint32), ("rows", c_uint32))


class LoadArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "scale", "shift", "factor")),
        ("x_plane", c_uint64),
        *((name, c_uint32) for name in ("x_h", "x_w", "x_c", "x_pitch", "x_row")),
        ("x_ring", Ring),
        ("first_factor", c_uint32),
        *((name, c_int32) for name in ("top", "left")),
        *((name, c_uint32) for name in ("rows", "width", "channels", "format", "act")),
        *((name, c_float) for name in ("in_scale", "in_shift", "multiply")),
    )


class Clamp(ctypes.Structure):
    """kernels.h's vm_clamp."""

    _fields_ = (("from_", c_uint32), ("low", c_float), ("high", c_float))


class StoreArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("raw", "bias", "add", "y", "stats", "flags")),
        *((name, c_uint32) for name in ("y_h", "y_w", "y_c", "y_pitch", "add_pitch")),
        *((name, Ring) for name in ("y_ring", "add_ring")),
        *((name, c_uint32) for name in ("row0", "rows", "channels", "part_pixels", "up", "relu", "format")),
        ("clamp", Clamp),
        *((name, c_float) for name in ("out_scale", "out_shift", "bias_scale")),
    )


class MergeArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("stats", "gamma", "beta", "scale", "shift", "sums", "arrived")),
        *((name, c_uint32) for name in ("parts", "c", "groups")),
        ("eps", c_float),
    )


class PixelNormArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "gamma", "factor", "scale", "shift")),
        *((name, c_uint32) for name in ("first", "pixels", "ring_pixels", "c", "x_pitch")),
        *((name, c_float) for name in ("least", "under")),
    )


class BlendArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("tile", "lower", "right", "y")),
        *((name, c_uint32) for name in ("batch", "y_c", "h", "w", "step", "down", "across", "border", "lower_w")),
        *((name, c_uint32) for name in ("right_h", "y_h", "y_w", "top", "left", "format")),
        ("clamp", Clamp),
        ("cosine", c_uint32),
        ("patch", c_uint32),
    )


class AttentionArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "y")),
        *((name, c_uint32) for name in ("n", "channels", "pitch", "y_pitch")),
        ("scale", c_float),
    )


class AttentionPairsArgs(ctypes.Structure):
    """The map is 128 bytes; the structure's size is a multiple of its alignment, 64."""

    _fields_ = (("map", c_uint64 * 16), ("of", AttentionArgs), ("padding", c_uint64 * 3))


class ConvArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "scale", "shift", "factor", "bias", "w_scale")),
        *((name, c_void_p) for name in ("add", "y", "stats", "flags")),
        ("first_factor", c_uint64),
        *((name, c_uint32) for name in ("x_h", "x_w", "x_pitch", "in_c")),
        *((name, c_uint32) for name in ("y_h", "y_w", "y_pitch", "y_c", "add_pitch")),
        *((name, c_uint32) for name in ("first_item", "items")),
        *((name, Ring) for name in ("x_ring", "y_ring", "add_ring")),
        *((name, c_uint32) for name in ("k", "stride", "pad_y", "pad_x", "up", "act", "relu", "blocked")),
        *((name, c_uint32) for name in ("fp8", "lead")),
        *((name, c_uint32) for name in ("x_c", "x_rows", "held", "mirrored")),
        ("y_plane", c_uint64),
        *((name, c_int64) for name in ("row_step", "column_step", "frame_step")),
        ("format", c_uint32),
        ("clamp", Clamp),
        *((name, c_float) for name in ("out_scale", "out_shift", "multiply", "bias_scale")),
    )


class ProbeArgs(Args):
    """Of tests/emulator/probe.cu."""

    _fields_ = (("in_", c_void_p), ("out", c_void_p), ("n", c_uint32))


class AttentionShape(ctypes.Structure):
    _fields_ = (*((name, c_uint32) for name in ("queries", "keys", "ring", "threads")), ("pairs", c_bool))


class ConvTile(ctypes.Structure):
    _fields_ = tuple(
        (name, c_uint32)
        for name in ("rows", "outs", "stride", "threads", "shared", "resident", "cost", "kind", "part_rows")
    )

    @property
    def name(self):
        """(rows, outs, stride), and of conv_wgmma.cu's the rows that are measured together, which are fewer."""
        return (self.rows, self.outs, self.stride, *(self.part_rows,) * (self.part_rows != self.rows))


ARGS = {"load": LoadArgs, "store": StoreArgs, "merge": MergeArgs, "blend": BlendArgs}
ARGS |= {"pixel_norm": PixelNormArgs, "attention": AttentionArgs, "conv": ConvArgs}
HEADER = r"""
#include "cuda.h"
vm_attention_shape attention_choose(int t, size_t most, int wgmma) {
    return vm_attention_choose((vm_dtype)t, most, wgmma);
}
uint32_t attention_shared(int t, vm_attention_shape s, uint32_t c) { return vm_attention_shared((vm_dtype)t, s, c); }
size_t attention_blocks(vm_attention_shape s, size_t n) { return vm_attention_blocks(s, n); }
vm_conv_tile conv_choose(int t, const vm_conv_args *a, int in_place, size_t most, uint32_t multiprocessors) {
    return vm_conv_choose((vm_dtype)t, a, in_place, most, multiprocessors);
}
vm_conv_tile conv_tile_at(uint32_t kind, size_t most) { return vm_conv_tile_at(kind, most); }
int conv_tile_fits(vm_conv_tile t) { return vm_conv_tile_fits(t); }
const uint32_t conv_kinds = VM_CONV_ALL_KINDS;
uint32_t conv_parts(const vm_conv_args *a, vm_conv_tile t) { return vm_conv_parts(a, t); }
uint32_t conv_items(const vm_conv_args *a, vm_conv_tile t) { return vm_conv_items(a, t); }
uint32_t conv_filters(uint32_t outs) { return vm_conv_filters(outs); }
uint8_t to_e4m3(float v) { return vm_to_e4m3(v); }
uint32_t wgmma_lead(uint32_t k) { return vm_wgmma_lead(k); }
uint32_t conv_grid(const vm_conv_args *a, vm_conv_tile t, uint32_t n) { return vm_conv_grid(a, t, n); }
"""


@functools.cache
def header():
    """cuda.h's functions and the layout of its structures, as the host has them."""
    offsets = ", ".join(
        f"sizeof(vm_{name}_args)" + "".join(f", offsetof(vm_{name}_args, {field})" for field, _ in args._fields_)
        for name, args in ARGS.items()
    )
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "header.c", Path(folder) / "libheader.so"
        source.write_text(f"{HEADER}const size_t layout[] = {{{offsets}}};\n")
        try:
            gcc = build.compiler("gcc")
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
        warn = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
        build.run(gcc, *warn, "-shared", "-fPIC", "-I", build.CUDA, source, "-o", library)
        h = ctypes.CDLL(str(library))
    args = POINTER(ConvArgs)
    h.to_e4m3.restype, h.to_e4m3.argtypes = ctypes.c_uint8, (c_float,)
    h.attention_choose.restype, h.attention_choose.argtypes = AttentionShape, (c_int, c_size_t, c_int)
    h.attention_shared.argtypes = (c_int, AttentionShape, c_uint32)
    h.attention_blocks.restype, h.attention_blocks.argtypes = c_size_t, (AttentionShape, c_size_t)
    h.conv_choose.restype, h.conv_choose.argtypes = ConvTile, (c_int, args, c_int, c_size_t, c_uint32)
    h.conv_tile_at.restype, h.conv_tile_at.argtypes = ConvTile, (c_uint32, c_size_t)
    h.conv_tile_fits.argtypes = (ConvTile,)
    h.conv_parts.argtypes = h.conv_items.argtypes = (args, ConvTile)
    h.conv_grid.argtypes = (args, ConvTile, c_uint32)
    return h


BOX = (64, 1, 32)  # of attention's map: channels, parts, rows


def attention_launch(kernels, dtype, largest, wgmma, args):
    """What a launch of attention takes: kernel, grid, block, arguments, bytes of shared memory."""
    shape = header().attention_choose(number(dtype), largest, wgmma)
    shared = header().attention_shared(number(dtype), shape, args.channels)
    assert 0 < shared <= largest
    name = "pairs" if shape.pairs else f"{shape.queries}x{shape.keys}"
    if shape.pairs:
        dims, strides = (args.channels, 3, args.n), (2 * args.channels, 2 * args.pitch)
        args = AttentionPairsArgs(map=kernels.map(dtype, args.x, dims, strides, BOX), of=args)
    grid = (header().attention_blocks(shape, args.of.n if shape.pairs else args.n),)
    return f"vm_attention_{dtype}_{name}", grid, (shape.threads,), args, shared


@functools.cache
def conv_tiles(most=SM_90):
    """By name, as they are where a block may have so much shared memory."""
    kinds = range(c_uint32.in_dll(header(), "conv_kinds").value)
    return {t.name: t for t in (header().conv_tile_at(kind, most) for kind in kinds)}


def in_blocks(w):
    """Filters [phase][out][k][k][in] as cuda.h's vm_conv_filter_at has them; zeros beyond out and in."""
    phases, outs, k, _, channels = w.shape
    each = header().conv_filters(outs)
    tiles, chunks = -(-outs // each), -(-channels // 64)
    whole = np.zeros((phases, tiles * each, k * k, chunks * 64), w.dtype)
    whole[:, :outs, :, :channels] = w.reshape(phases, outs, k * k, channels)
    n = np.arange(each)
    column = n // 16 * 16 + n // 2 % 2 * 8 + n % 16 // 4 * 2 + n % 2
    # phase, tile, out, tap, chunk, plane, channel -> phase, tile, chunk, tap, plane, column, channel
    apart = whole.reshape(phases, tiles, each, k * k, chunks, 8, 8).transpose(0, 1, 4, 3, 5, 2, 6)
    blocks = np.empty_like(apart, order="C")
    blocks[:, :, :, :, :, column] = apart
    return blocks


def conv_kernel(dtype, name, fp8=False):
    """The kernel of a tile."""
    wgmma = "e4m3" if fp8 else "wgmma"
    return f"vm_conv_{dtype}_{wgmma}_{name[1]}" if len(name) > 3 else "vm_conv_{}_{}x{}_{}".format(dtype, *name)


def number(dtype):
    return list(TYPES).index(dtype)  # the order of vm_dtype


def built(*names, of=build.CUDA):
    """A fixture: the kernels of these .cu files, on the emulator, or with VAEMEM_TEST_GPU=1 on a GPU."""
    sources = [of / f"{name}.cu" for name in names]

    @pytest.fixture(scope="module")
    def kernels(tmp_path_factory):
        if cuda_driver.driver():
            return cuda_driver.load(sources, tmp_path_factory.mktemp("kernels"))
        try:
            return build.Kernels(sources)
        except FileNotFoundError as missing:
            pytest.skip(str(missing))

    return kernels


# What a GPU would not show, or would not survive.
emulated = pytest.mark.skipif(cuda_driver.driver() is not None, reason="the emulator's faults and orders of threads")


class Memory:
    """Arrays that kernels can use, at 64-byte boundaries between guards of `around`: FILL, or NAN, so that reading
    these shows."""

    FILL, NAN, GUARD = 0xA5, 0xFF, 256

    def __init__(self):
        self.guards = []

    def empty(self, shape, dtype, around=FILL):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        gpu, room = cuda_driver.driver(), size + 2 * self.GUARD + 64
        whole = gpu.empty(room) if gpu else np.empty(room, np.uint8)
        whole[...] = around
        first = self.GUARD + -(whole.ctypes.data + self.GUARD) % 64
        self.guards += [(whole[:first], around), (whole[first + size :], around)]
        return whole[first : first + size].view(dtype).reshape(shape)

    def full(self, shape, dtype, value, around=FILL):
        out = self.empty(shape, dtype, around)
        out[...] = value
        return out

    def copy(self, array, around=FILL):
        return self.full(array.shape, array.dtype, array, around)

    def check(self):
        assert all((guard == around).all() for guard, around in self.guards), "written beside an array"


def untouched(array):
    return (np.ascontiguousarray(array).view(np.uint8) == Memory.FILL).all()


def round_up(n):
    return -(-n // BLOCK) * BLOCK


class InRing:
    """Rows `used` of a tensor, each in the place r % rows of a ring: what a kernel is told of it, and the memory."""

    def __init__(self, used, rows):
        self.args, self.at = Ring((used[0] % rows - used[0]) % 2**32, rows), [r % rows for r in used]
        self.used, self.rows = used, rows
        assert len(used) <= rows

    def hold(self, tensor):
        """(h, ...) as a ring has it; what is not used is NaN."""
        held = np.full((self.rows, *tensor.shape[1:]), np.nan, tensor.dtype)
        held[self.at] = tensor[self.used]
        return held


def numbers(rng, shape, dtype, scale=1.0, mean=0.0):
    return (rng.standard_normal(shape) * scale + mean).astype(dtype)


def close(got, want, tolerance):
    """NaN is not close to anything."""
    error = np.abs(got.astype(np.float64) - want)
    far = ~(error <= tolerance)
    assert not far.any(), (
        f"{far.sum()} of {far.size}, error / tolerance {np.nanmax(error / np.maximum(tolerance, 1e-300))}"
    )


def far(pixels, pitch, dtype):
    """An array that is mostly never touched, so that it takes no memory."""
    if cuda_driver.driver():
        pytest.skip("a GPU would need all of it pinned")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which mmap names since 3.13
    try:
        pages = mmap.mmap(-1, pixels * pitch * dtype.itemsize, flags=flags)
    except OSError as refused:
        pytest.skip(f"no address space for it: {refused}")
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(pixels, pitch)


def run_merge(kernels, sums, gamma, beta, groups, eps, seed=1):
    memory, c = Memory(), len(gamma)
    sums, gamma, beta = (memory.copy(v) for v in (sums, gamma, beta))
    scale, shift = (memory.empty(round_up(c), np.float32) for _ in range(2))
    arrays = {"stats": sums, "gamma": gamma, "beta": beta, "scale": scale, "shift": shift}
    own, arrived = memory.empty((groups, MERGE_BLOCKS, 3), np.float64), memory.full(1, np.uint32, 0)
    args = MergeArgs(**arrays, sums=own, arrived=arrived, parts=len(sums), c=c, groups=groups, eps=eps)
    kernels.launch("vm_merge", (groups, MERGE_BLOCKS), (THREADS,), args, seed=seed)
    memory.check()
    assert arrived == 0
    assert (scale[c:] == 0).all() and (shift[c:] == 0).all()
    return scale[:c], shift[:c]
