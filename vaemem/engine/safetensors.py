"""The header of a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import IO, Any

from vaemem.engine.file_tensors import BLOCKS, FLOATS, MAX_HEADER, QUANTISED, FileTensor, bytes_of, fill
from vaemem.engine.layouts import shown


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("header: a key comes twice")
    return result


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in value)


READABLE = tuple(FLOATS)
_TYPES = BLOCKS.keys() - QUANTISED
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # of a tensor: what each is, and whether it is
    "dtype": ("a type of the format", lambda value: isinstance(value, str) and value in _TYPES),
    "shape": ("a list of integers from 0 to 2^64", _are_sizes),
    "data_offsets": ("two integers from 0 to 2^64", lambda value: _are_sizes(value) and len(value) == 2),
}


def _fields(name: str, entry: Any) -> dict[str, Any]:
    for field, (wanted, good) in FIELDS.items():
        value = entry.get(field) if isinstance(entry, dict) else None
        if not good(value):
            raise ValueError(f"header: {shown(name)}: want {wanted} as {field}, got {shown(value)}")
    return entry


def header(f: IO[bytes]) -> tuple[list[FileTensor], dict[str, str]]:
    """The tensors of a file, and the texts in its ``__metadata__``. As strict as the safetensors package: the header
    lies in the file, the tensors lie end to end and fill it, and each takes what its shape says."""
    size, length = os.fstat(f.fileno()).st_size, bytearray(8)
    fill(f, 0, memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if not 2 <= header_bytes <= min(size - 8, MAX_HEADER):
        raise ValueError(f"header: want 2 to {MAX_HEADER} bytes, inside a file of {size} bytes, got {header_bytes}")
    text = bytearray(header_bytes)
    if fill(f, 8, memoryview(text)) < header_bytes or text[:1] != b"{":
        raise ValueError("header: want an object in JSON")
    entries = json.loads(text.decode(), object_pairs_hook=_once)
    about = entries.pop("__metadata__", None)
    if about is not None and not (isinstance(about, dict) and all(isinstance(v, str) for v in about.values())):
        raise ValueError("header: want texts in __metadata__")
    entries = {name: _fields(name, entry) for name, entry in entries.items()}
    tensors, end = [], start = [], 8 + header_bytes
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        tensors.append(FileTensor(name, shape, dtype, bytes_of(name, dtype, shape), end))
        begin, end = end, end + tensors[-1].nbytes
        if [start + offset for offset in entry["data_offsets"]] != [begin, end]:
            raise ValueError(
                f"header: {shown(name)}: want {end - begin} bytes for {dtype} {shown(shape)} from byte {begin - start} "
                f"on, where the tensor before it ends, got data_offsets {entry['data_offsets']}"
            )
    if end != size:
        raise ValueError(f"want {end} bytes, header and tensors, got {size}")
    return tensors, about or {}
