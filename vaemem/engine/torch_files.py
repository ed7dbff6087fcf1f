"""Read PyTorch's files (``torch.save``) without running anything that they name.

Such a file is an uncompressed zip archive. ``NAME/data.pkl`` is a pickle that says how to build tensors from storages;
``NAME/data`` holds the bytes of each storage. The core reads the pickle without looking up any name: a name becomes
text, and a call becomes a tuple of the name and its arguments. Files from before PyTorch 1.6 are no archives and cannot
be read.

Source: ``torch/serialization.py`` and ``torch/_utils.py`` of PyTorch 2.13.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import IO, Any

from vaemem import _core
from vaemem._errors import ArgumentError
from vaemem.engine.configs import shown
from vaemem.engine.file_tensors import BLOCKS, MAX_HEADER, FileTensor, are_sizes, bytes_of
from vaemem.engine.layouts import unwrap

ARCHIVE = b"PK\x03\x04"
_STORAGES = {"Float": "F32", "Half": "F16", "BFloat16": "BF16", "Double": "F64", "Long": "I64", "Int": "I32"}
_STORAGES |= {"Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL"}
_STORAGES = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()}
_STORAGES |= {"torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2"}
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_LOCAL_HEADER = 30  # bytes before an entry's name and its extra field


def _tensor_arguments(value: Any) -> tuple[Any, ...] | None:
    """Return the arguments that rebuild a tensor, also inside a parameter or a subclass; None for another value."""
    for _ in range(3):
        if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
            return None
        given = value[1] if len(value) == 2 and isinstance(value[1], tuple) else ()
        if value[0] == "torch._utils._rebuild_tensor_v2":
            return given
        if value[0] == "torch._utils._rebuild_tensor_v3":  # its arguments include the dtype
            return given if len(given) > 6 else ()
        if value[0] in _PARAMETERS:
            value = given[0] if given else None
        elif value[0] == "torch._tensor._rebuild_from_type_v2":
            value = (given[0], given[2]) if len(given) > 2 else None
        else:
            return None
    return None


def _tensor(name: str, value: Any, storages: Mapping[str, tuple[int, int]]) -> FileTensor | None:
    """Return a tensor of the file, or None for another value. storages: (first byte, bytes) by key."""
    if (rebuilt := _tensor_arguments(value)) is None:
        return None
    try:
        (tag, kind, key, _, _), offset, shape, strides = rebuilt[:4]
        at, size = storages[key]
        kind = rebuilt[6] if kind == "torch.storage.UntypedStorage" else kind
        good = tag == "storage" and isinstance(kind, str) and are_sizes([offset, *shape, *strides])
    except (TypeError, ValueError, KeyError, IndexError):
        good = False
    if not good or not (isinstance(shape, tuple) and isinstance(strides, tuple)) or len(shape) != len(strides):
        raise ArgumentError(shown(name), "a tensor of a storage that is there", shown(value))
    dtype = _STORAGES.get(kind, kind)
    if dtype not in BLOCKS:
        return FileTensor(name, shape, dtype, 0, 0)
    nbytes, packed = bytes_of(name, dtype, shape), 1
    for side, stride in zip(shape[::-1], strides[::-1], strict=True):
        if stride != packed and side > 1:
            raise ArgumentError(shown(name), "a contiguous tensor", f"strides {strides} for {shape}")
        packed *= side
    first = offset * BLOCKS[dtype][1]
    if first + nbytes > size:
        raise ArgumentError(shown(name), f"{first + nbytes} bytes in its storage", str(size))
    return FileTensor(name, shape, dtype, nbytes, at + first)


def torch_header(f: IO[bytes]) -> tuple[list[FileTensor], dict[str, str]]:
    """Read the tensors of the mapping that was saved, and of mappings in it that `layouts.unwrap` finds. No texts
    come with them. ValueError for a damaged file."""
    size = os.fstat(f.fileno()).st_size
    try:
        archive = zipfile.ZipFile(f)
        entries = {info.filename: info for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED}
        if any(info.header_offset < 0 for info in entries.values()):
            raise ArgumentError("", "entries that begin in the file")
        found = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1 or entries[found[0]].file_size > MAX_HEADER:
            raise ArgumentError("", f"one data.pkl of at most {MAX_HEADER} bytes", str(len(found)))
        folder = found[0].removesuffix("data.pkl")
        saved = _core.read_pickle(archive.read(found[0]), named=True)
        order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in entries else b"little"
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ArgumentError("", "a file that torch.save wrote", "", str(error)) from None
    if order != b"little":
        raise ArgumentError("", "numbers in little-endian order", shown(order))
    storages = {}
    for name, info in entries.items():
        if name.startswith(f"{folder}data/"):
            f.seek(info.header_offset)
            header = f.read(_LOCAL_HEADER)
            at = info.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
            if at + info.file_size > size:
                raise ArgumentError("", f"{at + info.file_size} bytes, up to the end of {shown(name)}", str(size))
            storages[name.removeprefix(f"{folder}data/")] = at, info.file_size
    if not isinstance(saved, dict):
        raise ArgumentError("", "a mapping of tensors", type(saved).__name__)
    return [tensor for item in unwrap(saved).items() if (tensor := _tensor(*item, storages))], {}
