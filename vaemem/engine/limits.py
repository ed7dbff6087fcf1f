"""Limits of memory: sizes as people write them, what a machine has left, and the plans that keep within a limit."""

from __future__ import annotations

import ctypes
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
LARGEST_SIDE = 1 << 16  # pixels: no larger image is looked for


def parse_size(argument: str, value: Any, least: int = 1) -> int:
    """Bytes: an integer, or a text such as "512 MiB" (binary) or "2 GB" (decimal); a fraction of a byte is dropped."""
    wanted = "bytes as an integer, or a text such as '512 MiB' or '2 GB'"
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
    """A limit in bytes, 0 for none. "auto" is what the VAE's weights and arena hold already and the free memory of the
    device, or the system's, less what stays for others: an eighth of that, at most 1 GiB (`Device.room`)."""
    if given is None:
        return 0
    if not (isinstance(given, str) and given.strip().lower() == "auto"):
        return parse_size("memory_limit", given)
    if device:
        return int(held + device.room())
    if (free := available_memory()) is None:
        raise ArgumentError("memory_limit", "bytes", "'auto', and this system does not tell its free memory")
    return held + free - min(free // 8, 1 << 30)


# ---- what the system and its cgroup leave ----


def _text(path: Path) -> str:
    """What a file of the kernel says; nothing where there is no file."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _field(path: Path, name: str = "") -> int | None:
    """A number by name from lines of "name number", or the number that is alone in a file. None where there is none, or
    "max"."""
    found = re.search(rf"^{name}:?\s*(\d+)", _text(path), re.MULTILINE)
    return int(found[1]) if found else None


def available_memory() -> int | None:
    """Bytes that this process may still take, as Linux or Windows says; None where nothing does."""
    if sys.platform != "win32":
        return linux_memory()
    # MEMORYSTATUSEX as 64-bit words: its own size and the load; physical memory in all, and free; what may be committed
    # in all, and still; addresses.
    status = (ctypes.c_uint64 * 8)(64)
    return min(status[2], status[4]) if ctypes.windll.kernel32.GlobalMemoryStatusEx(status) else None


# By the controllers that a line of /proc/self/cgroup names, none for version 2: the folder of groups, and in a group's
# the files with its limits and with what it uses, and the cache's name in memory.stat.
_CGROUPS = {
    "": ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def linux_memory(root: Path = Path("/")) -> int | None:
    """The least of what the system and every cgroup above this process leave; None where nothing says. A cgroup's file
    cache that was not used lately counts as free, for the kernel drops it before it kills."""
    left = []
    if system := _field(root / "proc/meminfo", "MemAvailable"):
        left.append(system * 1024)
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        for controller in _CGROUPS.keys() & controllers.split(","):
            folder, limits, used, cache = _CGROUPS[controller]
            # In a container the path may be the host's, which is not here; the top is then the container's own.
            top = root / folder
            group = top / path.strip("/")
            for level in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:
                now, cached = _field(level / used), _field(level / "memory.stat", cache) or 0
                for limit in (_field(level / name) for name in limits):
                    if limit is not None and now is not None:
                        left.append(max(limit - max(now - cached, 0), 0))
    return min(left, default=None)


# ---- plans ----


def _mib(size: int, up: bool = False) -> str:
    """With one decimal; `up`: never less than size. Bytes where that says more."""
    if size < MIB:
        return f"{size} bytes"
    tenths = -(-size * 10 // MIB) if up else size * 10 // MIB
    return f"{tenths / 10:.1f} MiB"


def taken(record: Mapping[str, Any]) -> int:
    """What a limit has to allow for a plan."""
    return int(max(sum(record["peak"].values()), record["reserved"]))


class Plans:
    """The plans that there are for one request: arguments of ``core.plan``, without a limit."""

    def __init__(self, core: _core.Model, request: Mapping[str, Any]) -> None:
        self._core, self.request = core, dict(request)

    def look(self, limit: int, **other: Any) -> tuple[Any, int]:
        """The plan with the least work that keeps within a limit, and what it takes. Where there is none: None, and a
        limit that may do. limit: in bytes, 0 for no limit. other: arguments in place of the request's."""
        try:
            record = self._core.plan(**{**self.request, **other}, memory_limit=limit)
        except ValueError as error:
            if hasattr(error, "smallest"):
                return None, error.smallest
            raise
        return record, taken(record)

    def within(self, limit: int) -> Any:
        """The plan of `look`; where there is none the ValueError of `refusal`."""
        record, _ = self.look(limit)
        if not record:
            raise self.refusal(limit)
        return record

    def smaller(self, record: Any) -> Any:
        """The next smaller plan, or None."""
        return self.look(taken(record) - 1)[0]

    def smallest(self) -> tuple[int, Any]:
        """The smallest limit that will do, and its plan."""
        # The core names the smallest plan that it met while it looked for one within the limit. Within that one's own
        # bytes it looks in another order, and may not meet it.
        record, limit, least = None, 0, 1
        while not record:
            limit = max(limit + 1, least)
            record, least = self.look(limit)
        while less := self.smaller(record):
            limit, record = taken(record) - 1, less
        # Some plans are found under a larger limit only, and not under the one that is just what they take.
        same, least = self.look(taken(record))
        return least if same else limit, record

    def curve(self) -> list[Any]:
        """From the fastest plan to the smallest, without those that another one beats in memory and in work."""

        def work(record: Any) -> tuple[float, int]:
            """With the same FLOPs, a smaller workspace means slower kernels."""
            return record["work"], -record["peak"]["workspace"]

        found: list[Any] = []
        record = self.within(0)
        while record:
            while found and work(found[-1]) >= work(record):
                found.pop()
            if not found or taken(record) < taken(found[-1]):
                found.append(record)
            record = self.smaller(record)
        return found

    def largest(self, limit: int, aspect: float = 1.0, further: int = 0) -> tuple[int, int] | None:
        """(height, width) of the largest image that fits; None where none does."""
        return largest_size(
            lambda height, width: self.look(limit, height=height, width=width)[0] is not None,
            latent_factor(self._core.arch), aspect, around=lambda n: range(n, n + further + 1),
        )  # fmt: skip

    def largest_square(self, limit: int) -> str:
        """For a message."""
        size = self.largest(limit)
        return f"{size[0]}x{size[1]}" if size else "no size"

    def refusal(self, limit: int) -> ValueError:
        """What to raise for a limit below the smallest plan: it says what would do, its cost, and what would fit."""
        (least, smallest), ask = self.smallest(), self.request
        op = f"{'an' if ask['op'] == 'encode' else 'a'} {ask['op']} of {ask['height']}x{ask['width']}"
        batch = f" in a batch of {ask['batch']}" if ask.get("batch", 1) > 1 else ""
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
        """What a plan that failed required of a GPU beside the weights, the free memory, and the largest square for
        it."""
        ask, weights = self.request, device.held(failed["peak"]["weights"])
        free, total = device.backend.memory()
        run, free_of = f"{ask['op']} of {ask['height']}x{ask['width']}", f"{_mib(free)} of {_mib(total)}"
        more = f"{_mib(taken(failed) - weights)} more and {free_of} are free on cuda:{device.number}"
        fits = f"{self.largest_square(weights + free)} would fit"
        return MemoryError(f"{error}. This {run} needs {more}: {fits}{device.in_torch()}")


def largest_size(
    fits: Callable[[int, int], bool], factor: int, aspect: float, most: int = LARGEST_SIDE, *,
    around: Callable[[int], range] = lambda n: range(n, n), every: bool = False, grain: int | None = None,
) -> tuple[int, int] | None:  # fmt: skip
    """(height, width) of the largest image that fits, sides multiples of `factor`, `most` pixels at most; None where
    none does.

    What fits does not always grow with the size. `around` has the long sides, in factors, that are to be looked at one
    by one, given the one that bisection finds: the largest of them that fits is taken, or with `every` the one up to
    which all of them do. With a `grain` bisection ends when the sides are known to that part of them, 64 for a 64th.
    """

    def size(long: int) -> tuple[int, int]:
        short = max(1, round(long * min(aspect, 1 / aspect))) * factor
        return (short, long * factor) if aspect > 1 else (long * factor, short)

    # `low` fits (0 stands for nothing at all), `high` does not.
    low, high, end = 0, 64, most // factor
    while high <= end and fits(*size(high)):
        low, high = high, min(high * 2, end + 1)
    while high - low > 1 + (low // grain if grain else 0):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(*size(middle)) else (low, middle)
    if low:
        also = [n for n in around(low) if n <= end and n != low]
        if every:
            low = next((n - 1 for n in also if not fits(*size(n))), max([low, *also]))
        else:
            low = next((n for n in reversed(also) if n > low and fits(*size(n))), low)
    return size(low) if low else None


def check_aspect(aspect: Any) -> float:
    """Width over height."""
    try:
        if isinstance(aspect, bool | str):
            raise TypeError
        number = float(aspect)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError("aspect", "width / height as a number", repr(aspect)[:80]) from None
    if not (math.isfinite(number) and 1 / 256 <= number <= 256):
        raise ArgumentError("aspect", "width / height from 1/256 to 256", repr(aspect))
    return number
