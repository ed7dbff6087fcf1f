"""Helpers for every folder: units, element sizes, checks of arguments, optional packages, text, files."""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
import importlib
import io
import itertools
import math
import operator
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from vaemem._errors import ArgumentError, FileError, MissingPackageError, NoFileError
from vaemem._types import DtypeName, Op, Precision, TiledOp

if TYPE_CHECKING:
    from concurrent.futures import Executor

__version__ = "0.1.0"

Item = TypeVar("Item")
Finished = TypeVar("Finished")
Name = TypeVar("Name", bound=str)

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
    "gguf": "gguf", "av": "video", "fsspec": "datasets", "pyarrow": "datasets", "ray": "ray",
}  # fmt: skip
TILED_OPS: tuple[TiledOp, ...] = get_args(TiledOp)


def latent_factor(arch: Mapping[str, Any]) -> int:
    """Return a latent pixel's side in image pixels. Levels of blocks but the last halve the side; so do patches."""
    if arch.get("family") == "ltx":
        return int(4 * 2 ** sum(kind in ("spatial", "spatiotemporal") for kind in arch["downsample_type"]))
    return int(2 ** (len(arch["block_out_channels"]) - 1)) * int(arch.get("image_patch") or 1)


def frames_factor(arch: Mapping[str, Any]) -> int:
    """Return how many frames of a video, after the first, one frame of its latents stands for; 1 if the model is not
    of videos."""
    if arch.get("family") == "ltx":
        return int(2 ** sum(kind in ("temporal", "spatiotemporal") for kind in arch["downsample_type"]))
    if arch.get("family") != "wan":
        return 1
    levels = len(arch["block_out_channels"]) - 1
    return int(2 ** sum(arch.get("temperal_downsample", [level > 0 for level in range(levels)])))


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
