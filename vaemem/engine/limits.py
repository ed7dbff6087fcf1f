"""Limits of memory: parse sizes, measure free memory, and find plans within a limit."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from vaemem import _core
from vaemem._common import MIB, latent_factor
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem.engine.arguments import as_int

Limit = int | str | None

_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgt]i?)?b)?\s*", re.ASCII | re.IGNORECASE)
LARGEST_SEARCHED = 1 << 16  # pixels a side, and images in a batch; searches end there


def parse_size(argument: str, value: Any, least: int = 1) -> int:
    """Return bytes for an integer or a text: "512 MiB" (binary), "2 GB" (decimal). Fractions of a byte are dropped."""
    wanted = "a number of bytes, or a text such as '512 MiB' or '2 GB', without a sign"
    if isinstance(value, str):
        if not (match := _SIZE.fullmatch(value)):
            raise ArgumentError(argument, wanted, repr(value[:80]))
        prefix = (match[2] or " ").lower()
        size = int(Fraction(match[1]) * (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[0]))
    else:
        try:
            size = as_int(argument, value)
        except TypeError:
            raise ArgumentTypeError(argument, wanted, repr(value)[:80]) from None
    if size < least or size.bit_length() > 63:
        least_bytes = f"{least} byte{'s' * (least != 1)}"
        raise ArgumentError(argument, f"at least {least_bytes} and less than 2^63", repr(value))
    return size


def resolve(given: Limit, held: int, device: Any) -> int:
    """Return a limit in bytes; 0 for none.

    "auto" is the memory that the VAE holds plus the free memory of the device or system, less a reserve for others: an
    eighth of the free memory, at most 1 GiB (on a GPU see `Device.room`).
    """
    if given is None:
        return 0
    if not (isinstance(given, str) and given.strip().lower() == "auto"):
        return parse_size("memory_limit", given)
    if device:
        return int(held + device.room())
    if (free := available_memory()) is None:
        raise ArgumentError("memory_limit", "bytes", "'auto', and this system does not tell its free memory")
    return held + free - min(free // 8, 1 << 30)


# ---- free memory of the system and of its cgroups ----


def _read_text(path: Path) -> str:
    """Return the contents of a kernel's file; empty if there is no file."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _read_number(path: Path, name: str = "") -> int | None:
    """Return a number from lines of "name number", or the single number of a file. None if the number is missing or
    "max"."""
    found = re.search(rf"^{name}:?\s*(\d+)", _read_text(path), re.MULTILINE)
    return int(found[1]) if found else None


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate, as Linux or Windows reports them; None if unknown."""
    if sys.platform != "win32":
        return linux_memory()
    # MEMORYSTATUSEX as 64-bit words: its size and the load; total and free physical memory; total and free commit
    # limit; addresses.
    status = (ctypes.c_uint64 * 8)(64)
    return min(status[2], status[4]) if ctypes.windll.kernel32.GlobalMemoryStatusEx(status) else None


# For each controller in a line of /proc/self/cgroup ("" in version 2): folder of groups; files of a group with limits
# and with usage; name of the cache in memory.stat.
_CGROUPS = {
    "": ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def linux_memory(root: Path = Path("/")) -> int | None:
    """Return the least memory that the system and every cgroup above this process leave; None if unknown.

    A cgroup's inactive file cache counts as free, because the kernel drops it before it kills a process.
    """
    left = []
    if system := _read_number(root / "proc/meminfo", "MemAvailable"):
        left.append(system * 1024)
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        for controller in _CGROUPS.keys() & controllers.split(","):
            folder, limits, used, cache = _CGROUPS[controller]
            # In a container the path may be the host's and missing here; the top folder is then the container's group.
            top = root / folder
            group = top / path.strip("/")
            for level in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:
                now, cached = _read_number(level / used), _read_number(level / "memory.stat", cache) or 0
                for limit in (_read_number(level / name) for name in limits):
                    if limit is not None and now is not None:
                        left.append(max(limit - max(now - cached, 0), 0))
    return min(left, default=None)


# ---- plans ----


def _mib(size: int, up: bool = False) -> str:
    """Format bytes as MiB with one decimal, rounded down or `up`; sizes below 1 MiB as bytes."""
    if size < MIB:
        return f"{size} bytes"
    tenths = -(-size * 10 // MIB) if up else size * 10 // MIB
    return f"{tenths / 10:.1f} MiB"


def needed_bytes(record: Mapping[str, Any]) -> int:
    """Return the bytes that a limit must allow for a plan."""
    return int(max(sum(record["peak"].values()), record["reserved"]))


class Plans:
    """All plans for one request: arguments of ``core.plan`` without a limit."""

    def __init__(self, core: _core.Model, request: Mapping[str, Any]) -> None:
        self._core, self.request = core, dict(request)

    def find(self, limit: int, **other: Any) -> tuple[Any, int]:
        """Return the plan with the least work within a limit, and its bytes; or None, and a limit that may do.

        limit: in bytes, 0 for none. other: replaces arguments of the request.
        """
        try:
            record = self._core.plan(**{**self.request, **other}, memory_limit=limit)
        except ValueError as error:
            if hasattr(error, "smallest"):
                return None, error.smallest
            raise
        return record, needed_bytes(record)

    def within(self, limit: int) -> Any:
        """Return the plan of `find`; raise the ValueError of `refusal` if there is none."""
        record, _ = self.find(limit)
        if not record:
            raise self.refusal(limit)
        return record

    def smaller(self, record: Any) -> Any:
        """Return the next smaller plan, or None if there is no smaller plan."""
        return self.find(needed_bytes(record) - 1)[0]

    def smallest(self) -> tuple[int, Any]:
        """Return the smallest limit that will do, and its plan."""
        # The core names the smallest plan that it met during its search. Under a limit of that plan's own bytes it
        # searches in another order, and may not meet it.
        record, limit, least = None, 0, 1
        while not record:
            limit = max(limit + 1, least)
            record, least = self.find(limit)
        while less := self.smaller(record):
            limit, record = needed_bytes(record) - 1, less
        # Some plans are found only under a limit larger than their own bytes.
        same, least = self.find(needed_bytes(record))
        return least if same else limit, record

    def curve(self) -> list[Any]:
        """List plans from the fastest to the smallest, without those that another plan beats in memory and work."""

        def work(record: Any) -> tuple[float, int]:
            """With equal FLOPs, a smaller workspace means slower kernels."""
            return record["work"], -record["peak"]["workspace"]

        found: list[Any] = []
        record = self.within(0)
        while record:
            while found and work(found[-1]) >= work(record):
                found.pop()
            if not found or needed_bytes(record) < needed_bytes(found[-1]):
                found.append(record)
            record = self.smaller(record)
        return found

    def largest(self, limit: int, aspect: float = 1.0, further: int = 0) -> tuple[int, int] | None:
        """Return (height, width) of the largest image that fits, or None. further: more sizes to try, in factors."""
        factor = latent_factor(self._core.arch)

        def fits(n: int) -> bool:
            height, width = size_of(n, factor, aspect)
            return self.find(limit, height=height, width=width)[0] is not None

        found = find_largest(fits, LARGEST_SEARCHED // factor, around=lambda n: range(n, n + further + 1))
        return size_of(found, factor, aspect) if found else None

    def largest_batch(self, limit: int) -> int:
        """Return the largest number of images that fits, or 0."""
        return find_largest(lambda n: self.find(limit, batch=n)[0] is not None, LARGEST_SEARCHED)

    def longest(self, limit: int, each: int) -> int:
        """Return the largest number of frames that fits, 1 more than a multiple of `each`, or 0."""
        found = find_largest(
            lambda n: self.find(limit, frames=(n - 1) * each + 1)[0] is not None, LARGEST_SEARCHED // each,
            around=lambda n: range(n, n + 5),
        )  # fmt: skip
        return (found - 1) * each + 1 if found else 0

    def largest_square(self, limit: int) -> str:
        """Return the largest square that fits, for a message."""
        size = self.largest(limit)
        return f"{size[0]}x{size[1]}" if size else "no size"

    def refusal(self, limit: int) -> ValueError:
        """Make the error for a limit below the smallest plan: what would do, its cost, and what would fit."""
        (least, smallest), request = self.smallest(), self.request
        op = f"{'an' if request['op'] == 'encode' else 'a'} {request['op']} of {request['height']}x{request['width']}"
        batch = f" with {request['frames']} frames" if request.get("frames", 1) > 1 else ""
        batch += f" in a batch of {request['batch']}" if request.get("batch", 1) > 1 else ""
        work = f" ({smallest['work']:.1f} times the work of an unlimited run)" if smallest["work"] > 1 else ""
        weights = smallest["peak"]["weights"]
        if limit > weights:
            fits = f"which would do for {self.largest_square(limit)}"
        else:
            fits = f"which is no more than the weights take ({_mib(weights)})"
        wanted = _mib(least, up=True)
        error = ArgumentError("memory_limit", f"at least {wanted} for {op}{batch}{work}", f"{_mib(limit)}, {fits}")
        error.smallest = least  # type: ignore[attr-defined]
        return error

    def out_of_memory(self, error: MemoryError, failed: Mapping[str, Any], device: Any) -> MemoryError:
        """Make the error for a plan that a GPU could not hold: its bytes besides the weights, the free memory, and the
        largest square that fits."""
        request, weights = self.request, device.held(failed["peak"]["weights"])
        free, total = device.backend.memory()
        run, free_of = f"{request['op']} of {request['height']}x{request['width']}", f"{_mib(free)} of {_mib(total)}"
        more = f"{_mib(needed_bytes(failed) - weights)} more and {free_of} are free on cuda:{device.number}"
        fits = f"{self.largest_square(weights + free)} would fit"
        return MemoryError(f"{error}. This {run} needs {more}: {fits}{device.in_torch()}")


def size_of(long: int, factor: int, aspect: float) -> tuple[int, int]:
    """Return (height, width) in pixels of an image with a longer side of `long` factors."""
    short = max(1, round(long * min(aspect, 1 / aspect))) * factor
    return (short, long * factor) if aspect > 1 else (long * factor, short)


def find_largest(
    fits: Callable[[int], bool], most: int, *, around: Callable[[int], range] = lambda n: range(n, n),
    every: bool = False, grain: int | None = None,
) -> int:  # fmt: skip
    """Return the largest number from 1 to `most` that fits, or 0.

    Whether a number fits is not monotone. `around` returns the numbers to try one by one around the result of
    bisection, and around the largest of them that fits, until none fits; with `every`, the result is the last one
    before the first that does not. With `grain`, bisection stops when the number is known to one part in `grain`.
    """
    # `low` fits (0 means none), `high` does not.
    low, high, fits = 0, min(64, most + 1), functools.cache(fits)
    while high <= most and fits(high):
        low, high = high, min(high * 2, most + 1)
    while high - low > 1 + (low // grain if grain else 0):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        return 0
    if every:
        also = [n for n in around(low) if n <= most and n != low]
        return next((n - 1 for n in also if not fits(n)), max([low, *also]))
    while more := next((n for n in reversed(around(low)) if low < n <= most and fits(n)), 0):
        low = more
    return low


def check_aspect(aspect: Any) -> float:
    """Return width / height as a float; TypeError or ValueError if it is none or out of range."""
    try:
        if isinstance(aspect, bool | str):
            raise TypeError
        number = float(aspect)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError("aspect", "width / height as a number", repr(aspect)[:80]) from None
    if not (math.isfinite(number) and 1 / 256 <= number <= 256):
        raise ArgumentError("aspect", "width / height from 1/256 to 256", repr(aspect))
    return number
