"""Helpers for every folder: units, element sizes, checks of arguments, optional packages, text, files."""

from __future__ import annotations

import contextlib
import csv
import difflib
import errno
import functools
import importlib
import io
import itertools
import math
import operator
import os
import re
import shutil
import stat
import sys
import tempfile
import textwrap
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from numbers import Real
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, get_args

from vaemem._errors import ArgumentError, FileError, MissingPackageError, NoFileError
from vaemem._types import DtypeName, Op, Precision, TiledOp

if TYPE_CHECKING:
    from concurrent.futures import Executor

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__version__ = "0.1.0"

Item = TypeVar("Item")
Finished = TypeVar("Finished")
Name = TypeVar("Name", bound=str)
Content = TypeVar("Content", str, bytes)

MIB = 1 << 20
MOST_SIDE = 1 << 20  # pixels of an image's side, as the core has it
MOST_BATCH = 1 << 16  # images in a predicted run, as the core has it
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)  # the types in which models run
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SPELT_DTYPES = {  # other spellings; "float" has 32 bits in torch and 64 in NumPy
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
}  # fmt: skip
ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
OPS: tuple[Op, ...] = get_args(Op)
EXTRAS = {  # package: the extra that installs it
    "pandas": "table", "scipy": "fit", "matplotlib": "plot", "tqdm": "progress", "PIL": "image", "torch": "pytorch",
    "diffusers": "diffusers", "accelerate": "diffusers", "transformers": "diffusers", "argcomplete": "completion",
    "gguf": "gguf", "fsspec": "datasets", "pyarrow": "datasets", "ray": "ray",
}  # fmt: skip
TILED_OPS: tuple[TiledOp, ...] = get_args(TiledOp)


def latent_factor(arch: Mapping[str, Any]) -> int:
    """Return a latent pixel's side in image pixels. Levels of blocks but the last halve the side; so do patches."""
    return int(2 ** (len(arch["block_out_channels"]) - 1)) * int(arch.get("image_patch") or 1)


def encoded_channels(arch: Mapping[str, Any]) -> int:
    """Return an encoder's output channels: means and log-variances, or only latents for an AutoencoderTiny."""
    return int(arch["latent_channels"]) * (1 if arch.get("family") == "tiny" else 2)


def choose(argument: str, value: Any, among: Iterable[str]) -> None:
    """Raise ArgumentError if an argument's value is not a known one. The error advises the nearest one."""
    known = tuple(among)
    if value not in known:
        wanted = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
        folded = {name.casefold(): name for name in known}
        near = difflib.get_close_matches(str(value).casefold(), folded, 1)
        raise ArgumentError(argument, wanted, repr(value), f"did you mean {folded[near[0]]!r}?" if near else "")


def spread(
    work: Callable[[Item], Finished], tasks: Sequence[Item], executor: Executor | None, describe: Callable[[Item], str]
) -> Iterator[tuple[Item, Finished]]:
    """Yield each task with its result, in order. An executor does all of them at once, as `concurrent.futures` has it.

    If a worker dies, yield what was finished, and at last warn of the others by their descriptions. Any other exception
    of a task is raised.
    """
    if executor is None:
        yield from ((task, work(task)) for task in tasks)
        return
    from concurrent.futures import BrokenExecutor, Future  # here, so that vaemem is imported without them

    futures, lost = list[Future[Finished]](), list[str]()
    try:
        with contextlib.suppress(BrokenExecutor):  # no worker is left for the others
            for task in tasks:
                futures.append(executor.submit(work, task))
        for task, future in itertools.zip_longest(tasks, futures):
            try:
                if future:
                    yield task, future.result()
                    continue
            except BrokenExecutor:
                pass
            lost.append(describe(task))
    finally:
        for future in futures:
            future.cancel()
    if lost:
        text = f"a worker died; {len(lost)} of {len(tasks)} tasks are missing: {', '.join(distinct(lost))}"
        frame, level = sys._getframe(), 1
        while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "vaemem":
            frame, level = frame.f_back, level + 1
        warnings.warn(text, RuntimeWarning, stacklevel=level)  # at the caller's line, outside vaemem


@functools.lru_cache(maxsize=4096)
def letters(name: str) -> str:
    """Normalize a name for comparison: ignore case, spaces, dots, slashes, - and _."""
    return re.sub(r"[\s./_-]+", "", name.casefold())


def meant(argument: str, value: Any, among: Iterable[Name], also: Mapping[str, str] = SPELT_DTYPES) -> Name:
    """Find the known name that a value means, in any spelling. also: {another name, in `letters`: the known name}.
    ArgumentError as `choose` raises it."""
    known = {str(name): name for name in among}
    if isinstance(value, str) and value in known:
        return known[value]
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))  # a dtype of torch's or NumPy's
    written = letters(text.removeprefix("torch."))
    found = {letters(name): name for name in known}.get(written, also.get(written, ""))
    choose(argument, found if found in known else value, known)
    return known[found]


def chosen(argument: str, values: Any, among: Sequence[Name]) -> list[Name]:
    """Return one name, or a sequence of them, as a list of known ones; ArgumentError as `choose` raises it."""
    return [meant(argument, value, among) for value in listed(values, str)]


def is_truth(value: Any) -> bool:
    """Return whether a value is True or False, also NumPy's. NumPy 1.26 takes its own for integers."""
    return isinstance(value, (bool, sys.modules["numpy"].bool_) if "numpy" in sys.modules else bool)


def flag(argument: str, value: Any) -> bool:
    """Return True or False, also for NumPy's; ArgumentError for any other value."""
    if not is_truth(value):
        raise ArgumentError(argument, "True or False", repr(value)[:80])
    return bool(value)


def whole(argument: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """Return the value as an int, also NumPy's integers; ArgumentError unless it is from `least` to `most`."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = least - 1 if is_truth(value) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(argument, f"a whole number of at least {least}", repr(value))
    if number > most:
        raise ArgumentError(argument, f"at most {most}", repr(value))
    return number


def wholes(argument: str, values: Iterable[Any], least: int = 0) -> list[int]:
    """Check each of many values as `whole` does."""
    return [value if type(value) is int and value >= least else whole(argument, value, least) for value in values]


def real(value: Any) -> float:
    """Return a number as a float, and anything else as NaN, which lies in no range."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def number_in(text: str) -> int | None:
    """Return the whole number that ASCII digits spell, or None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def listed(value: Any, single: type | tuple[type, ...]) -> list[Any]:
    """List the items of a sequence; list anything else as one item. single: iterable types that count as one item,
    such as str. NumPy's arrays without an axis always do."""
    is_one = not isinstance(value, Iterable) or isinstance(value, single) or getattr(value, "ndim", 1) == 0
    return [value] if is_one else list(value)


def distinct(values: Iterable[Any]) -> list[Any]:
    """List each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def shipped(*path: str) -> str:
    """Read the text of a file of vaemem/data."""
    return resources.files("vaemem").joinpath("data", *path).read_text("utf-8")


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Group items by key, in their order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def need(module: str, what: str, *others: str) -> Any:
    """Import an optional package for `what`, and other packages it needs later. MissingPackageError names all that are
    missing and the command that installs them."""
    failed: dict[str, ImportError] = {}
    for name in (module, *others):
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.setdefault(name.partition(".")[0], error)
    if failed:
        extras = ",".join(distinct(EXTRAS.get(package, "demo") for package in failed))
        why = "; ".join(distinct(map(str, failed.values())))
        install = f"pip install 'vaemem[{extras}]'"
        raise MissingPackageError(what, tuple(failed), install, why) from next(iter(failed.values()))
    return importlib.import_module(module)


@contextlib.contextmanager
def reading(argument: str, wanted: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise whatever a library raises about a file as a FileError, a NoFileError or a MemoryError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise NoFileError(argument, wanted, "no such file", path=path) from None
    except Exception as error:
        problem = textwrap.shorten(str(error) or type(error).__name__, 400, placeholder=" ...")
        refused = FileError(argument, wanted, "another", problem, path=path)
        raise (MemoryError(str(refused)) if isinstance(error, MemoryError) else refused) from error


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


def saved(save: Callable[..., object], *more: Any, **options: Any) -> bytes:
    """Return the bytes that a library's function writes to its first argument, a file."""
    file = io.BytesIO()
    save(file, *more, **options)
    return file.getvalue()


def png(figure: Any) -> bytes:
    """Return a matplotlib figure as a PNG file's bytes."""
    return saved(figure.savefig, format="png")


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Return rows as CSV, by default with the first row's columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextlib.contextmanager
def setting(place: Any, **values: Any) -> Iterator[None]:
    """Set attributes to other values during the block."""
    before = {name: getattr(place, name) for name in values}
    try:
        for name, value in values.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


def mib(size: float) -> str:
    """Format bytes as MiB with two decimals, without the unit."""
    return f"{round(size / MIB, 2) + 0.0:.2f}"  # + 0.0: no negative zero
