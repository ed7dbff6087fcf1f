"""The header of a GGUF file, read by hand: every count is held against the bytes that are left before it is believed.

Sources: gguf.cpp, gguf.h and ggml.h of ggml-org/ggml (August 2026); tools/convert.py of city96/ComfyUI-GGUF for
``comfy.gguf.orig_shape``.
"""

from __future__ import annotations

import math
import os
import struct
from typing import IO, Any

from vaemem.engine.file_tensors import BLOCKS, FLOATS, MAX_HEADER, QUANTISED, FileTensor, bytes_of, fill
from vaemem.engine.layouts import shown

MAGIC = b"GGUF"
READABLE = (*FLOATS, *QUANTISED)
VERSIONS = (2, 3)  # 1 had other counts, and ggml no longer reads it
ALIGNMENT_KEY, USUAL_ALIGNMENT = "general.alignment", 32
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # and a tensor's name, where rows were made longer so that blocks fit
MAX_DIMS = 5  # ggml's own are 4; files of video models have 5, which stable-diffusion.cpp reads
# The numbers of ggml_type; those that are missing were other types once.
KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K"}
KINDS |= {13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
KINDS |= {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"}
KINDS |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
# The numbers of gguf_type: the types of values beside the tensors.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, STRING, ARRAY = 4, 8, 9


class _Cursor:
    """Reads a file from its beginning on, in pieces, and never beyond its end."""

    def __init__(self, f: IO[bytes]) -> None:
        self.size = os.fstat(f.fileno()).st_size
        self.at = 0
        self._file, self._end = f, min(self.size, MAX_HEADER)
        self._from, self._held = 0, memoryview(b"")

    def room_for(self, count: int, each: int, what: str) -> int:
        """What so many take, checked before anything is made of it."""
        if count * each > self._end - self.at:
            raise ValueError(
                f"header: want {shown(count)} {what} of {each} or more bytes at byte {self.at}, got "
                f"{self._end - self.at} bytes up to the end of the file, or of {MAX_HEADER}"
            )
        return count * each

    def skip(self, count: int, each: int, what: str) -> None:
        self.at += self.room_for(count, each, what)

    def take(self, count: int, each: int, what: str) -> memoryview:
        wanted = self.room_for(count, each, what)
        if self.at + wanted > self._from + len(self._held):
            self._from, self._held = self.at, memoryview(bytearray(min(max(wanted, 1 << 16), self._end - self.at)))
            if fill(self._file, self.at, self._held) < len(self._held):
                raise ValueError("header: the file was cut while read")
        begin = self.at - self._from
        self.at += wanted
        return self._held[begin : begin + wanted]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count, struct.calcsize(f"<{kind}"), "numbers"))

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def text(self) -> str:
        at, held = self.at, self.take(self.number("Q"), 1, "letters")
        try:
            return str(held, "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"header: want a name in UTF-8 at byte {at}, got {shown(bytes(held))}") from None

    def value(self, kind: int) -> Any:
        """A number or a few of them; None for what has no meaning here: texts, and long lists."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            self.skip(self.number("Q"), 1, "letters")
            return None
        if kind != ARRAY:
            raise ValueError(f"header: want a value of a type that the format has, got {kind} before byte {self.at}")
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS and count <= MAX_DIMS:
            return self.numbers(SCALARS[kind], count)
        if kind in SCALARS:
            self.skip(count, struct.calcsize(f"<{SCALARS[kind]}"), "numbers")
        elif kind == STRING:
            self.room_for(count, 8, "texts")
            for _ in range(count):
                self.value(STRING)
        else:
            raise ValueError(f"header: want numbers or texts in a list, got type {kind} before byte {self.at}")
        return None


def _values(cursor: _Cursor, count: int) -> dict[str, tuple[int, Any]]:
    """Type and value by name."""
    cursor.room_for(count, 13, "values")  # a name's length, a type and one byte
    found: dict[str, tuple[int, Any]] = {}
    for _ in range(count):
        name, kind = cursor.text(), cursor.number("I")
        if name in found:
            raise ValueError(f"header: {shown(name)} comes twice")
        found[name] = kind, cursor.value(kind)
    return found


def _tensors(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape in PyTorch's order, type, and offset from where tensors begin, by name."""
    cursor.room_for(count, 24, "tensors")  # a name's length, a number of dimensions, a type and an offset
    found: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for _ in range(count):
        name, dims = cursor.text(), cursor.number("I")
        if name in found:
            raise ValueError(f"header: {shown(name)} comes twice")
        if dims > MAX_DIMS:
            raise ValueError(f"header: {shown(name)}: want 0 to {MAX_DIMS} dimensions, got {dims}")
        shape, kind, offset = cursor.numbers("Q", dims)[::-1], cursor.number("I"), cursor.number("Q")
        if kind not in KINDS:
            raise ValueError(f"header: {shown(name)}: want a type that ggml has, got {kind}")
        row, (numbers, _) = shape[-1] if shape else 1, BLOCKS[KINDS[kind]]
        if row % numbers:
            raise ValueError(
                f"header: {shown(name)}: want rows of a multiple of {numbers} numbers of {KINDS[kind]}, got {row}"
            )
        found[name] = shape, KINDS[kind], offset
    return found


def _original(name: str, shape: tuple[int, ...], values: dict[str, tuple[int, Any]]) -> tuple[int, ...]:
    """The shape that a tensor had before its rows were made longer."""
    if ORIGINAL_SHAPE + name not in values:
        return shape
    _, original = values[ORIGINAL_SHAPE + name]
    sides = isinstance(original, tuple) and all(type(n) is int and n >= 0 for n in original)
    if not sides or math.prod(original) != math.prod(shape):
        raise ValueError(
            f"header: {shown(ORIGINAL_SHAPE + name)}: want up to {MAX_DIMS} integers whose product is that of {shape}, "
            f"got {shown(original)}"
        )
    return original


def header(f: IO[bytes]) -> tuple[list[FileTensor], dict[str, str]]:
    """The tensors of a file; of its values none is passed on. As strict as ggml: each begins where the one before it
    ends, rounded up to the alignment; and the file ends with them."""
    cursor = _Cursor(f)
    if (magic := bytes(cursor.take(4, 1, "letters"))) != MAGIC:
        raise ValueError(f"header: want {MAGIC!r} as the first bytes, got {magic!r}")
    if (version := cursor.number("I")) not in VERSIONS:
        raise ValueError(f"header: want version 2 or 3, little-endian, got {version}")
    count, value_count = cursor.numbers("Q", 2)
    values = _values(cursor, value_count)
    kind, alignment = values.get(ALIGNMENT_KEY, (UINT32, USUAL_ALIGNMENT))
    if kind != UINT32 or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"header: {ALIGNMENT_KEY}: want a power of 2 of type {UINT32}, got {alignment} of type {kind}")

    def rounded_up(at: int) -> int:
        return -(-at // alignment) * alignment

    found = _tensors(cursor, count)
    result, end, start = [], cursor.at, rounded_up(cursor.at)
    for name, (shape, dtype, offset) in found.items():
        nbytes, at = bytes_of(name, dtype, shape), rounded_up(end)
        if start + offset != at:
            raise ValueError(
                f"header: {shown(name)}: want offset {at - start}, where the tensor before it ends, got {offset}"
            )
        end = at + nbytes
        if end > cursor.size:
            raise ValueError(f"{shown(name)}: want bytes {at} to {end}, got a file of {cursor.size} bytes")
        result.append(FileTensor(name, _original(name, shape, values), dtype, nbytes, at))
    if not end <= cursor.size <= rounded_up(end):
        raise ValueError(f"want {end} bytes, header and tensors, got {cursor.size}")
    return result, {}
