"""What PyTorch's files hold (``torch.save``), without running anything that they name.

Such a file is a zip archive without compression: ``NAME/data.pkl``, a pickle that says how tensors are made of
storages, and each storage's bytes under ``NAME/data``. The core reads the pickle: what it names becomes text, and what
it calls a tuple of that and the arguments; nothing is looked up. Files from before PyTorch 1.6 are no archives, and not
read.

Source: ``torch/serialization.py`` and ``torch/_utils.py`` of PyTorch 2.13.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import IO, Any

from vaemem import _core
from vaemem.engine.configs import shown
from vaemem.engine.file_tensors import BLOCKS, MAX_HEADER, FileTensor, are_sizes, bytes_of

ARCHIVE = b"PK\x03\x04"
_STORAGES = {"Float": "F32", "Half": "F16", "BFloat16": "BF16", "Double": "F64", "Long": "I64", "Int": "I32"}
_STORAGES |= {"Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL"}
_STORAGES = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()}
_LOCAL_HEADER = 30  # bytes, before an entry's name and what it has besides


def _tensor(name: str, value: Any, storages: Mapping[str, tuple[int, int]]) -> FileTensor | None:
    """None where a value is no tensor. storages: the first byte of each, and how many there are."""
    if isinstance(value, tuple) and value[:1] == ("torch._utils._rebuild_parameter",):
        given = value[1] if len(value) > 1 else None
        value = given[0] if isinstance(given, tuple) and given else None
    if not isinstance(value, tuple) or value[:1] != ("torch._utils._rebuild_tensor_v2",):
        return None
    try:
        (tag, kind, key, _, _), offset, shape, strides = value[1][:4]
        at, size = storages[key]
        good = tag == "storage" and isinstance(kind, str) and are_sizes([offset, *shape, *strides])
    except (TypeError, ValueError, KeyError, IndexError):
        good = False
    if not good or len(shape) != len(strides):
        raise ValueError(f"{shown(name)}: want a tensor of a storage that is there, got {shown(value)}")
    dtype = _STORAGES.get(kind, kind)
    if dtype not in BLOCKS:
        return FileTensor(name, shape, dtype, 0, 0)
    nbytes, packed = bytes_of(name, dtype, shape), 1
    for side, stride in zip(shape[::-1], strides[::-1], strict=True):
        if stride != packed and side > 1:
            raise ValueError(f"{shown(name)}: want a contiguous tensor, got strides {strides} for {shape}")
        packed *= side
    first = offset * BLOCKS[dtype][1]
    if first + nbytes > size:
        raise ValueError(f"{shown(name)}: want {first + nbytes} bytes in its storage, got {size}")
    return FileTensor(name, shape, dtype, nbytes, at + first)


def torch_header(f: IO[bytes]) -> tuple[list[FileTensor], dict[str, str]]:
    """The tensors of a file: those of the mapping that was saved, or of the one under ``"state_dict"`` in it."""
    size = os.fstat(f.fileno()).st_size
    try:
        archive = zipfile.ZipFile(f)
        entries = {info.filename: info for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED}
        found = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1 or entries[found[0]].file_size > MAX_HEADER:
            raise ValueError(f"want one data.pkl of at most {MAX_HEADER} bytes, got {len(found)}")
        folder = found[0].removesuffix("data.pkl")
        saved = _core.read_pickle(archive.read(found[0]), named=True)
        order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in entries else b"little"
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"want a file that torch.save wrote: {error}") from None
    if order != b"little":
        raise ValueError(f"want numbers in little-endian order, got {shown(order)}")
    storages = {}
    for name, info in entries.items():
        if name.startswith(f"{folder}data/"):
            f.seek(info.header_offset)
            header = f.read(_LOCAL_HEADER)
            at = info.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
            if at + info.file_size > size:
                raise ValueError(f"want {at + info.file_size} bytes, up to the end of {shown(name)}, got {size}")
            storages[name.removeprefix(f"{folder}data/")] = at, info.file_size
    inner = saved.get("state_dict") if isinstance(saved, dict) else None
    given = inner if isinstance(inner, dict) else saved
    if not isinstance(given, dict):
        raise ValueError(f"want a mapping of tensors, got {type(given).__name__}")
    items = [(name, value) for name, value in given.items() if isinstance(name, str)]
    return [tensor for name, value in items if (tensor := _tensor(name, value, storages))], {}
