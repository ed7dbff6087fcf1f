"""Files that are written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Content = TypeVar("Content", str, bytes)

# Errors if a file cannot be renamed onto another: the folder is not writable, or the file is a mount.
_FIXED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` if the block succeeds, and leaves no trace if it fails. The next call removes
    the files of killed processes; in a folder of many files, a later call. The new file is synced to disk, keeps the
    old permissions, and follows a link at path. If the old file cannot be replaced, its bytes are overwritten. Anything
    but a regular file, such as a pipe, is written directly, and so is a file that is already open, such as /dev/stdout.
    """
    old = os.stat(path) if os.path.exists(path) else None
    number = _descriptor(path) if old else None
    is_fixed = number is not None or os.path.abspath(os.fsdecode(path)).startswith("/proc/")
    if old and (is_fixed or not stat.S_ISREG(old.st_mode)):
        # An open file continues after its earlier content.
        with open(path if number is None else number, "ab", closefd=number is None) as f:
            yield f
        return
    if old:
        open(path, "r+b").close()  # raises if the old file is not writable
    target, part = Path(os.fsdecode(os.path.realpath(path))), None
    try:
        try:
            new = _part(target.parent)
        except OSError as error:
            if not old or error.errno not in _FIXED:
                raise
            new = _part(Path(tempfile.gettempdir()))
        part = Path(new.name)
        with new:
            if old and os.name != "nt":  # Windows can neither move nor remove a read-only file
                os.chmod(part, stat.S_IMODE(old.st_mode))
            yield new
            new.flush()
            os.fsync(new.fileno())
            if os.name == "nt":  # Windows cannot move an open file
                new.close()
            try:
                os.replace(part, target)
            except OSError as error:
                if not old or error.errno not in _FIXED:
                    raise
                _copy(part, target)
    except OSError as error:
        if error.errno and ".vaemem-" in str(error.filename or ".vaemem-"):
            error.filename = os.fspath(path)
        raise
    finally:
        if part:
            part.unlink(missing_ok=True)
    if os.name != "nt":  # Windows cannot open a folder
        with contextlib.suppress(OSError):  # some file systems refuse this; the file itself is safe
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # sync the name too
            finally:
                os.close(folder)


@contextlib.contextmanager
def writing_folder(folder: Path) -> Iterator[None]:
    """Make a folder if there is none, and admit one thread of one process at a time to the block. If the block fails,
    remove a folder made here. The system frees the lock of a killed process."""
    while True:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as is_there:
            if not is_there:  # the previous writer made the folder, failed and removed it
                continue
            try:
                yield
            except BaseException:
                if is_new:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                raise
            return


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Wait for the lock of a folder, and tell whether the folder still exists. POSIX systems lock the folder itself.
    Windows cannot open a folder, and locks an empty file in the user's folder for temporary files."""
    name = uuid.uuid5(uuid.NAMESPACE_URL, os.path.normcase(os.path.realpath(folder)))
    path = os.path.join(tempfile.gettempdir(), f"vaemem-{name}.lock") if os.name == "nt" else folder
    try:
        lock = os.open(path, os.O_RDONLY | (os.O_CREAT if os.name == "nt" else 0))
    except OSError:  # an unreadable folder has no lock
        yield folder.is_dir()
        return
    _LOCKS.add(lock)
    try:
        _take(lock)
        yield folder.is_dir() and (os.name == "nt" or os.path.samestat(os.fstat(lock), os.stat(folder)))
    finally:
        _LOCKS.discard(lock)
        os.close(lock)
        if os.name == "nt":
            with contextlib.suppress(OSError):  # another writer has it open
                os.unlink(path)


_UNLISTED = dict[Path, int]()  # by folder, the files to make there before `_part` lists it again
_LOCKS = set[int]()  # descriptors; a forked child would hold their locks until it ends


def _close_locks() -> None:
    while _LOCKS:
        os.close(_LOCKS.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


def _take(lock: int) -> None:
    """Wait for the lock on an open file. Return at once on a file system without locks."""
    if sys.platform == "win32":
        while True:
            try:
                msvcrt.locking(lock, msvcrt.LK_LOCK, 1)  # tries for ten seconds, then raises EDEADLK
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    return
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the descriptor of this process that a path names, such as /dev/stdout."""
    name = os.path.abspath(os.fsdecode(path))
    name = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}.get(name, name)
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return int(found[1]) if found else None


def _part(folder: Path) -> IO[bytes]:
    """Make a new file and lock it. Remove the unlocked files of killed writers from the folder. A folder of n files is
    listed again after n / 64 new ones, so making a million files takes linear time."""
    while True:
        file = open(folder / f".vaemem-{uuid.uuid4().hex}.part", "xb")
        if os.name == "nt":
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits for a writer that saw no lock yet and is removing the file
        except OSError:  # a file system without locks: remove nothing
            return file
        if os.path.exists(file.name):
            break
        file.close()
    if wait := _UNLISTED.get(folder, 0):
        _UNLISTED[folder] = wait - 1
        return file
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        names = os.listdir(folder)
        _UNLISTED[folder] = len(names) // 64
        for name in names:
            if not (name.startswith(".vaemem-") and name.endswith(".part")):
                continue
            left = folder / name
            with contextlib.suppress(OSError), open(left, "r+b") as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    return file


def _copy(source: Path, target: Path) -> None:
    """Copy the bytes of one file into another, in place."""
    with open(source, "rb") as new, open(target, "r+b") as f:
        shutil.copyfileobj(new, f)
        f.truncate()
        f.flush()
        os.fsync(f.fileno())


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError now if `replacing` would raise it after an hour of runs. Leave the file unchanged."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would end it for its reader
        if not os.access(path, os.W_OK) or os.path.isdir(path):
            raise OSError(errno.EACCES, "it is a folder, or may not be written", os.fspath(path))
        return
    with contextlib.suppress(InterruptedError), replacing(path):
        raise InterruptedError


def write(path: str | os.PathLike[str] | None, content: Content) -> Content | None:
    """Write text (unchanged, in UTF-8) or bytes to a file; return them if there is no path."""
    if path is None:
        return content
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return None
