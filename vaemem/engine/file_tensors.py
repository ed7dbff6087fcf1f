"""Read weights files: headers of safetensors and GGUF files, and the numbers of single tensors.

The headers are parsed here, by hand. Every count is checked against the bytes that are left before it is used.

Sources: gguf.cpp, gguf.h and ggml.h of ggml-org/ggml (August 2026); tools/convert.py of city96/ComfyUI-GGUF for
``comfy.gguf.orig_shape``.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from vaemem._common import need
from vaemem._errors import ArgumentError
from vaemem._numpy import ml_dtypes, np
from vaemem.engine.configs import shown
from vaemem.engine.layouts import Shape

# In bytes; the limit of the safetensors package. GGUF has none; 262,144 words and 500,000 merges take about 15 million.
MAX_HEADER = 100_000_000
# (as stored, little-endian; as the core takes it). NumPy has no bfloat16, so its bits are read as integers.
FLOATS = {"F32": ("<f4", "float32"), "F16": ("<f2", "float16"), "BF16": ("<u2", "bfloat16")}
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # converted to float32
FILE_NAMES = {native: name for name, (_, native) in FLOATS.items()}  # by NumPy's names
FILE_NAMES |= {native: name for name, native in FLOAT8.items()}
READABLE_FLOATS = (*FLOATS, *FLOAT8)  # in safetensors and PyTorch files
# (numbers, bytes) of a type's smallest block. First ggml's quantised types, with the sizes that its ggml-common.h
# asserts (August 2026). Then other types of the formats, which tensors outside the VAE may have.
QUANTISED = {"Q1_0": (128, 18), "Q2_0": (64, 18), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22)}
QUANTISED |= {"Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144)}
QUANTISED |= {"Q5_K": (256, 176), "Q6_K": (256, 210), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66)}
QUANTISED |= {"IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18)}
QUANTISED |= {"IQ4_XS": (256, 136), "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36)}
BLOCKS = QUANTISED | {"F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3), "BOOL": (1, 1), "BF16": (1, 2), "C64": (1, 8)}
BLOCKS |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), (1, 1))
BLOCKS |= {f"{kind}{8 * n}": (1, n) for kind in "IUF" for n in (1, 2, 4, 8) if (kind, n) != ("F", 1)}
PIECE = 1 << 16  # numbers to dequantise at once: little memory compared with a tensor


class FileTensor(NamedTuple):
    """A tensor that lies whole in its file. The tensor's size in the file follows from its type and shape."""

    name: str
    shape: Shape  # in PyTorch's order
    dtype: str  # a key of BLOCKS
    nbytes: int
    at: int  # offset of its first byte from the beginning of the file


def bytes_of(name: str, dtype: str, shape: Shape) -> int:
    """Return the bytes of a tensor from its type and shape; ValueError for too many or for part of a block."""
    numbers, size = BLOCKS[dtype]
    count = 1
    for side in shape:
        count *= side
        if count >> 64:  # stop before products get slow
            raise ArgumentError(f"header: {shown(name)}", "less than 2^64 numbers", f"shape {shown(shape)}")
    if count % numbers:
        raise ArgumentError(f"header: {shown(name)}", f"a multiple of {numbers} numbers of {dtype}", shown(shape))
    return count // numbers * size


def _end_to_end(tensors: Iterable[FileTensor], end: int, size: int, alignment: int = 1) -> list[FileTensor]:
    """Return the tensors with `at` counted from the beginning of the file.

    tensors: in the order of their bytes, `at` counted from the end of the header. end: the end of the header. size: of
    the file. ValueError unless each tensor begins at the first multiple of `alignment` behind the one before it, and
    they fill the file. All in bytes.
    """

    def rounded_up(at: int) -> int:
        return -(-at // alignment) * alignment

    start, result = rounded_up(end), []
    for tensor in tensors:
        at = rounded_up(end)
        if start + tensor.at != at:
            wanted = f"offset {at - start}, where the tensor before it ends"
            raise ArgumentError(f"header: {shown(tensor.name)}", wanted, str(tensor.at))
        end = at + tensor.nbytes
        result.append(tensor._replace(at=at))
    if not end <= size <= rounded_up(end):
        cut = next((f", so that {shown(one.name)} is cut" for one in result if one.at + one.nbytes > size), "")
        raise ArgumentError("", f"{end} bytes, header and tensors", f"{size}{cut}")
    return result


def numpy_type(dtype: str) -> Any:
    """Return the type of the numbers of a tensor, which ml_dtypes has if NumPy has none."""
    native = FLOAT8[dtype] if dtype in FLOAT8 else FLOATS[dtype][1]
    return np.dtype(getattr(ml_dtypes, native, native))


def _fill(f: IO[bytes], name: str, at: int, into: np.ndarray) -> None:
    """Read into an array. A memory map would kill the process if the file shrinks."""
    f.seek(at)
    got = f.readinto(into.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
    if got < into.nbytes:
        raise ArgumentError(name, f"{into.nbytes} bytes from byte {at} on", str(got), "the file was cut while read")


def read_tensor(f: IO[bytes], tensor: FileTensor, shape: Shape) -> np.ndarray:
    """Return the numbers of a tensor in new memory, the only extra memory that loading needs."""
    if tensor.dtype in FLOAT8:
        narrow = np.empty(shape, numpy_type(tensor.dtype))
        _fill(f, tensor.name, tensor.at, narrow)
        return narrow.astype(np.float32)
    if tensor.dtype not in FLOATS:
        return _dequantise(f, tensor).reshape(shape)
    array = np.empty(shape, FLOATS[tensor.dtype][0])
    _fill(f, tensor.name, tensor.at, array)
    return array.astype(array.dtype.newbyteorder("="), copy=False).view(numpy_type(tensor.dtype))


def _dequantise(f: IO[bytes], tensor: FileTensor) -> np.ndarray:
    """Return quantised blocks as float32. Read and decode a few at a time."""
    quants = need("gguf.quants", f"reading {tensor.dtype}")
    numbers, size = BLOCKS[tensor.dtype]
    array = np.empty(math.prod(tensor.shape), np.float32)
    for first in range(0, array.size, PIECE):  # PIECE is a multiple of every type's block
        piece = array[first : first + PIECE]
        packed = np.empty(piece.size // numbers * size, np.uint8)
        _fill(f, tensor.name, tensor.at + first // numbers * size, packed)
        try:
            with np.errstate(all="ignore"):  # a scale may be infinite or NaN, as any weight may
                piece[:] = quants.dequantize(packed, quants.GGMLQuantizationType[tensor.dtype])
        except (KeyError, NotImplementedError):
            wanted, advice = (
                "a type that the installed gguf package decodes",
                "pip install -U gguf, or convert the file to F16",
            )
            raise ArgumentError(tensor.name, wanted, tensor.dtype, advice) from None
    return array


# ---- files that people mistake for weights ----

_POINTER = b"version https://git-lfs"
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM")
_PAGE = (b"<!doctype html", b"<html", b"<?xml")


def mistaken_for_weights(first: bytes) -> str:
    """Describe a file that cannot hold weights, and say what to do; otherwise return "". first: its first 64 bytes."""
    if first.startswith(_POINTER):
        return "a git-lfs pointer, which stands for the weights: fetch them with 'git lfs pull'"
    if first.lstrip().lower().startswith(_PAGE):
        return "a web page: download the file itself (on the Hub, from /resolve/ and not from /blob/)"
    if first.startswith(_PICTURES) or (first[:4], first[8:12]) == (b"RIFF", b"WEBP"):
        return "a picture: pass the file of a VAE's weights"
    return ""


# ---- safetensors ----


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ArgumentError("header", "", "a key comes twice")
    return result


def are_sizes(value: object) -> bool:
    """Return whether `value` is a list of integers from 0 to 2^64."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in value)


FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # of a tensor: words for a good value, and its check
    "dtype": ("a type of the format", lambda value: isinstance(value, str) and value in BLOCKS.keys() - QUANTISED),
    "shape": ("a list of integers from 0 to 2^64", are_sizes),
    "data_offsets": ("two integers from 0 to 2^64", lambda value: are_sizes(value) and len(value) == 2),
}


def _safetensor(name: str, entry: Any) -> FileTensor:
    for field, (wanted, good) in FIELDS.items():
        value = entry.get(field) if isinstance(entry, dict) else None
        if not good(value):
            raise ArgumentError(f"header: {shown(name)}", f"{wanted} as {field}", shown(value))
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if end - begin != (nbytes := bytes_of(name, dtype, shape)):
        wanted, got = f"{nbytes} bytes for {dtype} {shown(shape)}", f"data_offsets {entry['data_offsets']}"
        raise ArgumentError(f"header: {shown(name)}", wanted, got)
    return FileTensor(name, shape, dtype, nbytes, begin)


def safetensors_header(f: IO[bytes]) -> tuple[list[FileTensor], dict[str, str]]:
    """Read the tensors of a file and the texts of its ``__metadata__``; ValueError for a damaged header.

    As strict as the safetensors package: the tensors lie end to end and fill the file, and each has the size of its
    type and shape.
    """
    size, header_bytes = os.fstat(f.fileno()).st_size, int.from_bytes(f.read(8), "little")
    if not 2 <= header_bytes <= min(size - 8, MAX_HEADER):
        raise ArgumentError("header", f"2 to {MAX_HEADER} bytes, inside a file of {size} bytes", str(header_bytes))
    text = f.read(header_bytes)
    if len(text) < header_bytes or text[:1] != b"{":
        raise ArgumentError("header", "an object in JSON")
    entries = json.loads(text.decode(), object_pairs_hook=_refuse_repeated)
    about = entries.pop("__metadata__", None)
    if about is not None and not (isinstance(about, dict) and all(isinstance(v, str) for v in about.values())):
        raise ArgumentError("header", "texts in __metadata__")
    tensors = sorted((_safetensor(*item) for item in entries.items()), key=lambda one: (one.at, one.nbytes))
    return _end_to_end(tensors, 8 + header_bytes, size), about or {}


def safetensors_start(tensors: Iterable[tuple[str, str, Shape]], about: Mapping[str, str]) -> bytes:
    """Return what precedes the tensors in a file: the header's length in 8 bytes, and the header in JSON.

    tensors: name, type and shape of each, in the order in which they follow, end to end.
    """
    header, end = dict[str, Any](__metadata__=dict(about)), 0
    for name, dtype, shape in tensors:
        begin, end = end, end + bytes_of(name, dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text


# ---- GGUF ----

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 had other counts, and ggml no longer reads it
ALIGNMENT_KEY, USUAL_ALIGNMENT = "general.alignment", 32
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # + a tensor's name, if its rows were padded to whole blocks
MAX_DIMS = 5  # ggml has 4; files of video models have 5, which stable-diffusion.cpp reads
READABLE = (*FLOATS, *QUANTISED)
# The numbers of ggml_type. Missing numbers belonged to types that were removed.
KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K"}
KINDS |= {13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
KINDS |= {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"}
KINDS |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
# The numbers of gguf_type: the types of values that accompany the tensors.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, STRING, ARRAY = 4, 8, 9


class _Cursor:
    """Reads a file from its beginning, and never beyond its end."""

    def __init__(self, f: IO[bytes]) -> None:
        self.size, self.at = os.fstat(f.fileno()).st_size, 0
        self._file, self._end = f, min(self.size, MAX_HEADER)

    def check_room(self, count: int, each: int, what: str) -> None:
        """Raise ValueError if `count` items of `each` bytes exceed the rest of the file."""
        if count * each > self._end - self.at:
            wanted = f"{shown(count)} {what} of {each} or more bytes at byte {self.at}"
            left = f"{self._end - self.at} bytes up to the end of the file, or of {MAX_HEADER}"
            raise ArgumentError("header", wanted, left)

    def take(self, count: int, each: int, what: str) -> bytes:
        self.check_room(count, each, what)
        taken = self._file.read(count * each)
        if len(taken) < count * each:
            raise ArgumentError("header", "", "the file was cut while read")
        self.at += count * each
        return taken

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count, struct.calcsize(f"<{kind}"), "numbers"))

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def names(self, count: int, each: int, what: str) -> Iterator[str]:
        """Yield `count` different names. Before the next name, the caller must read what belongs to this one."""
        self.check_room(count, each, what)
        found = set[str]()
        for _ in range(count):
            at, text = self.at, self.take(self.number("Q"), 1, "letters")
            try:
                name = str(text, "utf-8")
            except UnicodeDecodeError:
                raise ArgumentError("header", f"a name in UTF-8 at byte {at}", shown(text)) from None
            if name in found:
                raise ArgumentError("header", "", f"{shown(name)} comes twice")
            found.add(name)
            yield name

    def value(self, kind: int) -> Any:
        """Return a number or a few of them; None for texts and long lists, which have no meaning here."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            self.take(self.number("Q"), 1, "letters")
            return None
        if kind != ARRAY:
            raise ArgumentError("header", "a value of a type that the format has", f"{kind} before byte {self.at}")
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS and count <= MAX_DIMS:
            return self.numbers(SCALARS[kind], count)
        if kind in SCALARS:
            self.take(count, struct.calcsize(f"<{SCALARS[kind]}"), "numbers")
        elif kind == STRING:
            self.check_room(count, 8, "texts")
            for _ in range(count):
                self.value(STRING)
        else:
            raise ArgumentError("header", "numbers or texts in a list", f"type {kind} before byte {self.at}")
        return None

    def tensor(self, name: str, values: dict[str, tuple[int, Any]]) -> FileTensor:
        if (dims := self.number("I")) > MAX_DIMS:
            raise ArgumentError(f"header: {shown(name)}", f"0 to {MAX_DIMS} dimensions", str(dims))
        shape, kind, offset = self.numbers("Q", dims)[::-1], self.number("I"), self.number("Q")
        if kind not in KINDS:
            raise ArgumentError(f"header: {shown(name)}", "a type that ggml has", str(kind))
        dtype, row = KINDS[kind], shape[-1] if shape else 1
        if row % (numbers := BLOCKS[dtype][0]):
            wanted = f"rows of a multiple of {numbers} numbers of {dtype}"
            raise ArgumentError(f"header: {shown(name)}", wanted, str(row))
        nbytes = bytes_of(name, dtype, shape)
        _, original = values.get(ORIGINAL_SHAPE + name, (None, shape))  # before its rows were padded
        sides = isinstance(original, tuple) and all(type(n) is int and n >= 0 for n in original)
        if not sides or math.prod(original) != math.prod(shape):
            wanted = f"up to {MAX_DIMS} integers whose product is that of {shape}"
            raise ArgumentError(f"header: {shown(ORIGINAL_SHAPE + name)}", wanted, shown(original))
        return FileTensor(name, original, dtype, nbytes, offset)


def gguf_header(f: IO[bytes]) -> tuple[list[FileTensor], dict[str, str]]:
    """Read the tensors of a file; no texts come with them. ValueError for a damaged header.

    As strict as ggml: each tensor begins where the one before it ends, rounded up to the alignment, and the file ends
    with the last one.
    """
    cursor = _Cursor(f)
    if (magic := cursor.take(4, 1, "letters")) != MAGIC:
        raise ArgumentError("header", f"{MAGIC!r} as the first bytes", repr(magic))
    if (version := cursor.number("I")) not in VERSIONS:
        raise ArgumentError("header", "version 2 or 3, little-endian", str(version))
    count, value_count = cursor.numbers("Q", 2)
    values: dict[str, tuple[int, Any]] = {}  # (type, value); each needs a name's length, a type and 1 byte or more
    for name in cursor.names(value_count, 13, "values"):
        kind = cursor.number("I")
        values[name] = kind, cursor.value(kind)
    kind, alignment = values.get(ALIGNMENT_KEY, (UINT32, USUAL_ALIGNMENT))
    if kind != UINT32 or alignment < 1 or alignment & (alignment - 1):
        raise ArgumentError(f"header: {ALIGNMENT_KEY}", f"a power of 2 of type {UINT32}", f"{alignment} of type {kind}")
    # Each needs a name's length, a number of dimensions, a type and an offset.
    tensors = [cursor.tensor(name, values) for name in cursor.names(count, 24, "tensors")]
    return _end_to_end(tensors, cursor.at, cursor.size, alignment), {}
