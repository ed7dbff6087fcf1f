"""Find the images of folders, globs, WebDataset's tar files and Parquet files, in an order that never changes."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vaemem._common import need, reading
from vaemem._errors import ArgumentError, FileError, NoFileError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".tga")
CAPTIONS = (".txt", ".caption")  # next to an image, with its stem
IMAGE_COLUMNS, CAPTION_COLUMNS = ("image", "jpg", "png"), ("caption", "text")  # of Parquet files, the likeliest first
UNREADABLE = (FileNotFoundError, PermissionError)  # the faults of a file; any other OSError is the system's


@dataclass(frozen=True)
class SourceImage:
    """An image that is not read yet. Its name is the same wherever its source lies; `size` is its file's."""

    name: str
    size: int
    read: Callable[[], bytes]
    caption: Callable[[], str | None]


def list_images(sources: Iterable[str | os.PathLike[str]]) -> list[SourceImage]:
    """List the images of folders, globs, image files, ``.tar`` and ``.parquet`` files. ValueError if there are none, or
    two have one name."""
    items, seen = [item for source in sources for item in _images_of(os.fspath(source))], set[str]()
    for item in items:
        if item.name in seen:
            raise ArgumentError("images", "images with different names", f"two named {item.name!r}", "use two folders")
        seen.add(item.name)
    if not items:
        raise ArgumentError("images", f"images, such as {' '.join(SUFFIXES[:4])}", "none in these sources")
    return items


def digest_of(items: Iterable[SourceImage]) -> str:
    """Return a hash of the images' names and their files' sizes."""
    found = hashlib.sha256()
    for item in items:
        found.update(f"{item.name}\0{item.size}\n".encode())
    return found.hexdigest()


def _images_of(source: str) -> Iterator[SourceImage]:
    if not os.path.exists(source):
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise NoFileError("images", "a folder, an image, a .tar or a .parquet file, or a glob", "none", path=source)
        for match in matches:
            yield from _images_of(match)
    elif os.path.isdir(source):
        yield from _folder(Path(source))
    elif source.endswith((".tar", ".parquet")):
        yield from (_tar if source.endswith(".tar") else _parquet)(source)
    elif source.lower().endswith(SUFFIXES):
        yield _file(Path(source), os.path.basename(source))
    elif not source.endswith(CAPTIONS):  # which a shell may list too
        raise FileError("images", f"a .tar, a .parquet or one of {' '.join(SUFFIXES)}", "another file", path=source)


def _folder(folder: Path) -> Iterator[SourceImage]:
    """Yield the images below a folder, without hidden ones."""
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                one = Path(path) / name
                yield _file(one, one.relative_to(folder).as_posix())


def _file(path: Path, name: str) -> SourceImage:
    def caption() -> str | None:
        for suffix in CAPTIONS:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                return _text(path.with_suffix(suffix).read_bytes())
        return None

    size = 0  # of an unreadable file; reading it reports the error
    with contextlib.suppress(*UNREADABLE):
        size = path.stat().st_size
    return SourceImage(name, size, path.read_bytes, caption)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


def _tar(path: str) -> Iterator[SourceImage]:
    """Yield the images of an uncompressed tar file, whose captions are members with the same stem."""
    with reading("images", "an uncompressed tar file", path), tarfile.open(path, "r:") as tar:
        members = [one for one in tar if one.isfile()]
    stem_of = {one.name: os.path.splitext(one.name)[0] for one in members}
    captions = {stem_of[one.name]: one for one in members if one.name.endswith(CAPTIONS)}

    def part(member: tarfile.TarInfo) -> bytes:
        with open(path, "rb") as f:
            f.seek(member.offset_data)
            return f.read(member.size)

    def caption(stem: str) -> str | None:
        return _text(part(captions[stem])) if stem in captions else None

    for one in members:
        if one.name.lower().endswith(SUFFIXES):
            inner = "/".join(step for step in one.name.split("/") if step not in ("", ".", ".."))
            read, told = partial(part, one), partial(caption, stem_of[one.name])
            yield SourceImage(f"{os.path.basename(path)}/{inner}", one.size, read, told)


class _Rows:
    """Rows of a Parquet file. Keeps the group of rows that was read last."""

    def __init__(self, path: str, file: Any, columns: list[str]) -> None:
        self._path, self._file, self._columns, self._lock = path, file, columns, threading.Lock()
        self._group, self._table = -1, dict[str, Any]()

    def __call__(self, group: int, row: int) -> dict[str, Any]:
        with self._lock:
            if group != self._group:
                try:
                    table = self._file.read_row_group(group, columns=self._columns)
                except OSError as error:
                    if error.errno:
                        raise
                    raise FileError("images", "a Parquet file", str(error), path=self._path) from None
                self._group, self._table = group, {name: table.column(name) for name in self._columns}
            return {name: column[row].as_py() for name, column in self._table.items()}


def _parquet(path: str) -> Iterator[SourceImage]:
    """Yield the images of a Parquet file, as bytes or as a struct with ``bytes``, as the datasets library writes it."""
    parquet, types = (
        need("pyarrow.parquet", "reading Parquet", "pyarrow.types"),
        need("pyarrow.types", "reading Parquet"),
    )
    with reading("images", "a Parquet file", path):
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    found = [field.name for field in schema if holds_bytes(field.type)]
    usual = [name for name in IMAGE_COLUMNS if name in found]
    if len(found) != 1 and not usual:
        got = f"{len(found)} columns of bytes among {', '.join(schema.names)}"
        raise FileError("images", f"one column of images, or one named {' or '.join(IMAGE_COLUMNS)}", got, path=path)
    image = (usual or found)[0]
    texts = [name for name in CAPTION_COLUMNS if name in schema.names][:1]
    rows, size, number = _Rows(path, file, [image, *texts]), os.path.getsize(path), 0

    def read(group: int, row: int) -> bytes:
        value = rows(group, row)[image]
        return bytes((value["bytes"] if isinstance(value, dict) else value) or b"")

    def caption(group: int, row: int) -> str | None:
        return rows(group, row)[texts[0]] if texts else None

    for group in range(file.num_row_groups):
        for row in range(file.metadata.row_group(group).num_rows):
            name = f"{os.path.basename(path)}/{number:09d}"
            yield SourceImage(name, size, partial(read, group, row), partial(caption, group, row))
            number += 1
