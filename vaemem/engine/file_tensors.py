"""A tensor of a weights file: what the header says of it, and its numbers when they are wanted.

Formats differ in their headers alone. `safetensors` and `gguf` read one each, check it, and give a `FileTensor` for
every tensor.
"""

from __future__ import annotations

import math
from typing import IO, NamedTuple

import ml_dtypes
import numpy as np

from vaemem._common import need
from vaemem.engine.layouts import Shape, shown

# In bytes, safetensors' own limit. GGUF has none; 262,144 words and half a million merges take about 15 million.
MAX_HEADER = 100_000_000
# As stored (little-endian) and as the core takes it; numpy has no bfloat16, so its bits travel as integers.
FLOATS = {"F32": ("<f4", np.float32), "F16": ("<f2", np.float16), "BF16": ("<u2", ml_dtypes.bfloat16)}
FILE_NAMES = {np.dtype(native).name: name for name, (_, native) in FLOATS.items()}  # by NumPy's
# A type's smallest piece: how many numbers in how many bytes. First ggml's quantised types, from the sizes that its
# ggml-common.h asserts (August 2026); then what the formats know beside, which tensors that are no VAE's may have.
QUANTISED = {"Q1_0": (128, 18), "Q2_0": (64, 18), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22)}
QUANTISED |= {"Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144)}
QUANTISED |= {"Q5_K": (256, 176), "Q6_K": (256, 210), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66)}
QUANTISED |= {"IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18)}
QUANTISED |= {"IQ4_XS": (256, 136), "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36)}
BLOCKS = QUANTISED | {"F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3), "BOOL": (1, 1), "BF16": (1, 2), "C64": (1, 8)}
BLOCKS |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), (1, 1))
BLOCKS |= {f"{kind}{8 * n}": (1, n) for kind in "IUF" for n in (1, 2, 4, 8) if (kind, n) != ("F", 1)}
PIECE = 1 << 16  # numbers that are made of blocks at once: few enough to be nothing beside a tensor


class FileTensor(NamedTuple):
    """A tensor that lies whole in its file, and takes there what its type and shape say."""

    name: str
    shape: Shape  # in PyTorch's order
    dtype: str  # a key of BLOCKS
    nbytes: int
    at: int  # its first byte, from the beginning of the file


def bytes_of(name: str, dtype: str, shape: Shape) -> int:
    """What a tensor takes by its type and shape."""
    numbers, size = BLOCKS[dtype]
    count = 1
    for side in shape:
        count *= side
        if count >> 64:  # before it takes long to multiply
            raise ValueError(f"header: {shown(name)}: want less than 2^64 numbers, got shape {shown(shape)}")
    if count % numbers:
        raise ValueError(f"header: {shown(name)}: want a multiple of {numbers} numbers of {dtype}, got {shown(shape)}")
    return count // numbers * size


def fill(f: IO[bytes], at: int, into: memoryview) -> int:
    """Fills `into` from byte `at` on; how many bytes were there. Read, not mapped: a process dies of a map whose file
    shrinks."""
    f.seek(at)
    done = 0
    while done < len(into) and (got := f.readinto(into[done:])):  # type: ignore[attr-defined]
        done += got
    return done


def _fill_whole(f: IO[bytes], name: str, at: int, into: np.ndarray) -> None:
    got = fill(f, at, into.reshape(-1).view(np.uint8).data)
    if got < into.nbytes:
        raise ValueError(f"{name}: want {into.nbytes} bytes from byte {at} on, got {got}: the file was cut while read")


def read_tensor(f: IO[bytes], tensor: FileTensor, shape: Shape) -> np.ndarray:
    """A tensor's numbers in memory of their own: the one surplus that a load takes."""
    if tensor.dtype not in FLOATS:
        return _dequantise(f, tensor).reshape(shape)
    stored, native = FLOATS[tensor.dtype]
    array = np.empty(shape, stored)
    _fill_whole(f, tensor.name, tensor.at, array)
    return array.astype(array.dtype.newbyteorder("="), copy=False).view(native)


def _dequantise(f: IO[bytes], tensor: FileTensor) -> np.ndarray:
    """Blocks as float32, read and decoded a few at a time."""
    quants = need("gguf.quants", f"reading {tensor.dtype}")
    numbers, size = BLOCKS[tensor.dtype]
    array = np.empty(math.prod(tensor.shape), np.float32)
    for first in range(0, array.size, PIECE):  # a whole number of every type's blocks
        piece = array[first : first + PIECE]
        packed = np.empty(piece.size // numbers * size, np.uint8)
        _fill_whole(f, tensor.name, tensor.at + first // numbers * size, packed)
        try:
            with np.errstate(all="ignore"):  # a scale may be infinite or no number, as any weight may
                piece[:] = quants.dequantize(packed, quants.GGMLQuantizationType[tensor.dtype])
        except (KeyError, NotImplementedError):
            wanted = f"{tensor.name}: want a type that the installed gguf package decodes, got {tensor.dtype}"
            raise ValueError(f"{wanted}: pip install -U gguf, or convert the file to F16") from None
    return array
