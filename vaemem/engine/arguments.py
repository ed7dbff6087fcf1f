"""Check the arguments of `vaemem.VAE`. Every message says what was wanted and what came."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, Literal, get_args

from vaemem._common import choose, is_truth, need, number_in
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._numpy import np

OutputType = Literal["float", "uint8", "pil"]
Poll = Callable[[int, int], object] | None
Progress = Poll | bool
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"  # for tqdm, if the steps have no unit


class Cancelled(Exception):
    """A run that its `cancel` event ended. The run's memory is free again, and the VAE stays usable."""


def default_threads() -> int:
    """Return VAEMEM_THREADS, or by default the number of processors that this process may use."""
    text = os.environ.get("VAEMEM_THREADS")
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= (threads := number_in(text) or 0) <= 1024:
        raise ArgumentError("VAEMEM_THREADS", "a number from 1 to 1024", repr(text))
    return threads


def as_int(name: str, value: Any) -> int:
    """Return an integer of Python's or NumPy's as an int; TypeError or ValueError for anything else."""
    try:
        if is_truth(value):
            raise TypeError
        number: int = value.__index__()
    except (AttributeError, TypeError):
        raise ArgumentTypeError(name, "an integer", repr(value)) from None
    if number.bit_length() > 63:
        raise ArgumentError(name, "an integer below 2^63", f"one of {number.bit_length()} bits")
    return number


def as_path(value: object, argument: str, wanted: str = "a path") -> Path:
    """Return `value` as a path. `argument` and `wanted` go into the message of a TypeError or ValueError."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise ArgumentTypeError(argument, wanted, type(value).__name__)
    if not (path := os.fsdecode(value)):  # pathlib takes "" for the current folder
        raise ArgumentError(argument, wanted, "an empty one")
    return Path(path)


def check_mask(name: str, value: Any) -> None:
    """Raise ValueError if an array, or one of a list of arrays, has masked values.

    numpy.ma is never imported here: a masked array exists only if someone imported it. And a fork during an import
    would leave the child waiting for the import's lock.
    """
    ma = sys.modules.get("numpy.ma")
    is_masked = getattr(ma, "is_masked", None)
    if ma is None or is_masked is None:  # not imported, or its import has not ended
        return
    for array in value if isinstance(value, (list, tuple)) else (value,):
        if is_masked(array):
            got = f"{ma.count_masked(array)} masked of {np.size(array)}"
            raise ArgumentError(name, "numbers everywhere", got, f"np.ma.filled({name}, 0) gives them zeros")


def pixels_of(output_type: OutputType) -> str:
    """Return the core's name for the pixels of an output type: "float" or "uint8"."""
    choose("output_type", output_type, get_args(OutputType))
    return "float" if output_type == "float" else "uint8"


@contextlib.contextmanager
def polling(
    progress: Progress, title: str, cancel: Event | None = None, label: Callable[[], str] | None = None, **options: Any
) -> Iterator[Poll]:
    """Yield the function to call with (rows done, rows to do), or None if there is nothing to report.

    progress: the caller's function, or True for a tqdm bar, which takes the options. title: the bar's title.
    label: returns a new title each time the bar moves. Once `cancel` is set the function raises Cancelled.
    """
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise ArgumentTypeError("cancel", "a threading.Event or None", type(cancel).__name__)
    if progress is not None and not is_truth(progress) and not callable(progress):
        raise ArgumentTypeError("progress", "True, False, or a function of two numbers", repr(progress))
    poll = progress if callable(progress) else None
    with contextlib.ExitStack() as stack:
        if progress and not poll:
            # In a notebook without ipywidgets, tqdm.auto warns and draws on stderr, which notebooks show in red.
            shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
            plain = hasattr(shell, "kernel") and importlib.util.find_spec("ipywidgets") is None
            make = need("tqdm.std" if plain else "tqdm.auto", "progress=True").tqdm
            where = {"file": sys.stdout} if plain else {}
            bar = stack.enter_context(make(desc=title, unit="row", **where, **options))

            def poll(done: int, total: int) -> None:
                bar.total = total
                if label:
                    bar.set_description_str(label(), refresh=False)
                bar.update(done - bar.n)

        if cancel is None:
            yield poll
            return

        def check_cancelled(done: int, total: int) -> None:
            if cancel.is_set():
                raise Cancelled(f"{title}: cancelled after {done} of {total} rows")
            if poll:
                poll(done, total)

        if cancel.is_set():
            raise Cancelled(f"{title}: cancelled before it began")
        yield check_cancelled
