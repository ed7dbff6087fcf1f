"""Find the images of folders, globs, WebDataset's tar files and Parquet files, in an order that never changes."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import posixpath
import stat
import tarfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vaemem._common import need, reading
from vaemem._errors import ArgumentError, FileError, NoFileError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".tga")
CAPTIONS = (".txt", ".caption")  # next to an image, with its stem
IMAGE_COLUMNS, CAPTION_COLUMNS = ("image", "jpg", "png"), ("caption", "text")  # of Parquet files, the likeliest first
UNREADABLE = (FileNotFoundError, PermissionError)  # the faults of a file; any other OSError is the system's
NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ENAMETOOLONG)  # there is no such file, or cannot be
MOST_BYTES = 1 << 31  # of an image's file
MOST_PATHS = 16  # to one folder, by links
MOST_LINKS = 40  # one behind the other, as in Linux

Read = Callable[[], tuple[bytes, str | None]]  # an image's bytes and caption


@dataclass(frozen=True)
class SourceImage:
    """An image that is not read yet. The image's name does not depend on the place of its source. `size` is the size of
    the file. `open` returns the function that reads it. Images that are open at the same time share their group of
    Parquet's rows."""

    name: str
    size: int
    open: Callable[[], Read]


def list_images(sources: Iterable[str | os.PathLike[str]]) -> list[SourceImage]:
    """List the images of folders, globs, image files, ``.tar`` and ``.parquet`` files. ValueError if there are none, or
    two have one name."""
    items, seen = [_named(item) for source in sources for item in _images_of(os.fspath(source))], set[str]()
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


def _named(item: SourceImage) -> SourceImage:
    """Return an image whose name is UTF-8. If its file's is not, the bytes are escaped, and reading it is an error."""
    name = item.name.encode("utf-8", "backslashreplace").decode()
    if name == item.name:
        return item

    def refuse() -> tuple[bytes, str | None]:
        raise ArgumentError("image", "a name in UTF-8", "another", "rename the file")

    return SourceImage(name, item.size, lambda: refuse)


def _images_of(source: str) -> Iterator[SourceImage]:
    if not os.path.exists(source):
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise NoFileError("images", "a folder, an image, a .tar or a .parquet file, or a glob", "none", path=source)
        for match in matches:
            yield from _images_of(match)
    elif os.path.isdir(source):
        yield from _folder(Path(source))
    elif not os.path.isfile(source):
        raise FileError("images", "a file or a folder", "a pipe or a device", path=source)
    elif source.endswith((".tar", ".parquet")):
        yield from (_tar if source.endswith(".tar") else _parquet)(source)
    elif source.lower().endswith(SUFFIXES):
        yield _file(Path(source), os.path.basename(source))
    elif not source.endswith(CAPTIONS):  # a shell's * lists captions too
        raise FileError("images", f"a .tar, a .parquet or one of {' '.join(SUFFIXES)}", "another file", path=source)


def _folder(folder: Path) -> Iterator[SourceImage]:
    """Yield the images below a folder, without hidden ones. OSError for a folder that cannot be read; FileError for a
    link that leads back to a folder around it, and for a folder with more than MOST_PATHS paths by links."""
    paths = Counter[tuple[int, int]]()  # by folder

    def fail(error: OSError) -> None:
        raise error

    for path, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(path)
        if any(here.samefile(one) for one in here.parents if one.is_relative_to(folder)):
            raise FileError("images", "folders without loops", "a link to a folder around it", "remove it", path=here)
        about = here.stat()
        paths[one := (about.st_dev, about.st_ino)] += 1
        if paths[one] > MOST_PATHS:  # links to folders of links would double the paths at every level
            wanted = f"at most {MOST_PATHS} paths to one folder"
            raise FileError("images", wanted, "more", "remove links to it", path=here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield _file(here / name, (here / name).relative_to(folder).as_posix())


def _file(path: Path, name: str) -> SourceImage:
    def read() -> tuple[bytes, str | None]:
        data = _bytes_of(path)
        for suffix in CAPTIONS:
            try:
                return data, _text(_bytes_of(path.with_suffix(suffix)))
            except OSError as error:
                if error.errno not in NO_FILE:
                    raise
        return data, None

    size = 0  # of an unreadable file; reading it reports the error
    with contextlib.suppress(*UNREADABLE):
        size = path.stat().st_size
    return SourceImage(name, size, lambda: read)


def _bytes_of(path: Path) -> bytes:
    """Return a file's bytes. ArgumentError for a pipe or a device, which may never end, and for a file too large."""
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        raise ArgumentError("image", "a regular file", "a pipe or a device")
    _check_bytes(about.st_size)
    return path.read_bytes()


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise ArgumentError("image", f"a file of at most {MOST_BYTES} bytes", str(size))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


def _tar(path: str) -> Iterator[SourceImage]:
    """Yield the images of an uncompressed tar file. A caption is a member with the image's stem. Links lead to other
    members."""
    with reading("images", "an uncompressed tar file", path):
        members = _members(path)
    by_name = {posixpath.normpath(one.name): one for one in members}
    stem_of = {one.name: os.path.splitext(posixpath.normpath(one.name))[0] for one in members}
    captions = {stem_of[one.name]: one for one in members if one.name.endswith(CAPTIONS)}

    def follow(one: tarfile.TarInfo | None) -> tarfile.TarInfo | None:
        for _ in range(MOST_LINKS):
            if one is None or not (one.issym() or one.islnk()):
                break
            base = posixpath.dirname(one.name) if one.issym() else ""
            one = by_name.get(posixpath.normpath(posixpath.join(base, one.linkname)))
        return one if one and one.isfile() else None

    def part(member: tarfile.TarInfo) -> bytes:
        if not (one := follow(member)):
            raise ArgumentError("image", "a file, or a link to one in the same tar file", "another member")
        _check_bytes(one.size)
        try:
            with tarfile.open(path, "r:") as tar, tarfile.ExFileObject(tar, one) as file:
                return file.read()
        except tarfile.TarError as error:  # the file has changed
            raise FileError("images", "an uncompressed tar file", str(error), path=path) from None

    def read(member: tarfile.TarInfo) -> tuple[bytes, str | None]:
        caption = captions.get(stem_of[member.name])
        return part(member), _text(part(caption)) if caption else None

    for one in members:
        if one.name.lower().endswith(SUFFIXES):
            inner = "/".join(step for step in one.name.split("/") if step not in ("", ".", ".."))
            size = held.size if (held := follow(one)) else 0
            yield SourceImage(f"{os.path.basename(path)}/{inner}", size, partial(partial, read, one))


def _members(path: str) -> list[tarfile.TarInfo]:
    """Return the members of a tar file, without folders. ValueError unless they and zeros are the whole file: tarfile
    stops without a word at a damaged header, and where the file is cut between two members."""
    members = list[tarfile.TarInfo]()
    with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for one in tar:
            if one.size < 0:
                raise ValueError(f"a size below 0 at byte {one.offset}")
            if not one.isdir():
                members.append(one)
        file.seek(tar.offset)
        first, rest = file.read(tarfile.BLOCKSIZE), iter(lambda: file.read(1 << 20), b"")
        if len(first) < tarfile.BLOCKSIZE or any(part.count(0) < len(part) for part in chain([first], rest)):
            raise ValueError(f"the file is cut or damaged at byte {tar.offset}, or another one was appended there")
    return members


class _Rows:
    """A group of rows of a Parquet file. The first row that is taken loads the columns of the whole group."""

    def __init__(self, load: Callable[[], list[Any]]) -> None:
        self._load, self._lock, self._columns = load, threading.Lock(), list[Any]()

    def take(self, row: int) -> list[Any]:
        """Return a row's values."""
        with self._lock:
            self._columns = self._columns or self._load()
        return [column[row].as_py() for column in self._columns]


def _parquet(path: str) -> Iterator[SourceImage]:
    """Yield the images of a Parquet file, as bytes or as a struct with ``bytes``, as the datasets library writes it."""
    parquet, types = (
        need("pyarrow.parquet", "reading Parquet", "pyarrow.types"),
        need("pyarrow.types", "reading Parquet"),
    )
    with reading("images", "a Parquet file", path), parquet.ParquetFile(path) as file:
        schema, metadata, size = file.schema_arrow, file.metadata, os.path.getsize(path)
    if metadata.num_rows > size:  # runs of equal rows take no space
        raise FileError("images", "a Parquet file of images", f"{metadata.num_rows} rows in {size} bytes", path=path)

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind) and (index := kind.get_field_index("bytes")) >= 0:
            kind = kind.field(index).type
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    found = [field.name for field in schema if holds_bytes(field.type)]
    usual = [name for name in IMAGE_COLUMNS if name in found]
    if len(found) != 1 and not usual:
        got = f"{len(found)} columns of bytes among {', '.join(schema.names)}"
        raise FileError("images", f"one column of images, or one named {' or '.join(IMAGE_COLUMNS)}", got, path=path)
    columns = [(usual or found)[0], *[name for name in CAPTION_COLUMNS if name in schema.names][:1]]
    if twice := [name for name in columns if schema.names.count(name) > 1]:
        raise FileError("images", f"one column named {twice[0]!r}", "several", path=path)
    # Repeated values stay dictionaries: a megabyte that is repeated a thousand times is read as one.
    leaves = map(metadata.schema.column, range(metadata.num_columns))
    kept = {*columns, f"{columns[0]}.bytes"}
    repeated = [leaf.path for leaf in leaves if leaf.path in kept and leaf.physical_type == "BYTE_ARRAY"]
    in_use = weakref.WeakValueDictionary[int, _Rows]()

    def load(group: int) -> list[Any]:
        try:
            with parquet.ParquetFile(path, metadata=metadata, pre_buffer=False, read_dictionary=repeated) as file:
                table = file.read_row_group(group, columns, use_threads=False)
        except OSError as error:
            if error.errno:
                raise
            raise FileError("images", "a Parquet file", str(error), path=path) from None  # its bytes are wrong
        return [table.column(name) for name in columns]

    def read(rows: _Rows, row: int) -> tuple[bytes, str | None]:
        image, *caption = rows.take(row)
        data = bytes((image["bytes"] if isinstance(image, dict) else image) or b"")
        return data, _caption(caption[0]) if caption else None

    def open_row(group: int, row: int) -> Read:
        return partial(read, in_use.setdefault(group, _Rows(partial(load, group))), row)

    number = 0
    for group in range(metadata.num_row_groups):
        for row in range(metadata.row_group(group).num_rows):
            yield SourceImage(f"{os.path.basename(path)}/{number:09d}", size, partial(open_row, group, row))
            number += 1


def _caption(value: Any) -> str | None:
    """Return a caption of Parquet's; ValueError if it is not text in UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, str):
        return value
    raise ArgumentError("image", "a caption of text", type(value).__name__)
