"""Limits of memory: sizes as people write them, what a machine has left, and the plans that keep within a limit."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from vaemem import _core
from vaemem._common import MIB, latent_factor
from vaemem.engine.arguments import as_int

Limit = int | str | None

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (i + 1) for i, prefix in enumerate("kmgt")},
}
LARGEST_SIDE = 1 << 16  # pixels: no larger image is looked for


def parse_size(argument: str, value: Any, least: int = 1) -> int:
    """Bytes: an integer, or a text such as "512 MiB" (binary) or "2 GB" (decimal); a fraction of a byte is dropped."""
    wanted = f"{argument}: want bytes as an integer, or a text such as '512 MiB' or '2 GB'"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", value, re.ASCII | re.IGNORECASE)
        if not match or match[2].lower() not in _UNITS:
            raise ValueError(f"{wanted}, got {value[:80]!r}")
        size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    else:
        try:
            size = as_int(argument, value)
        except TypeError:
            raise TypeError(f"{wanted}, got {repr(value)[:80]}") from None
    if size < least or size.bit_length() > 63:
        raise ValueError(
            f"{argument}: want at least {least} byte{'s' * (least != 1)} and less than 2^63, got {value!r}"
        )
    return size


def resolve(given: Limit, held: int, device: Any) -> int:
    """A limit in bytes, 0 for none.

    Parameters
    ----------
    given : int, str or None
        "auto" is what the VAE holds already and the free memory, less what stays for others: an eighth of the free
        memory, at most 1 GiB.
    held : int
        Bytes of the VAE's weights and arena now.
    device : Device or None
        Whose memory; None: the system's.
    """
    if given is None:
        return 0
    if not (isinstance(given, str) and given.strip().lower() == "auto"):
        return parse_size("memory_limit", given)
    free = device.backend.memory()[0] if device else available_memory()
    if free is None:
        raise ValueError("memory_limit: this system does not say what is free: want bytes instead of 'auto'")
    return held + free - min(free // 8, 1 << 30)


# ---- what the system and its cgroup leave ----


def _number(path: Path) -> int | None:
    """The number that a file of the kernel holds; None where there is no file, or it says "max"."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int:
    """A number by name from lines of "name number"; 0 where there is none."""
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", path.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def available_memory() -> int | None:
    """Bytes that this process may still take: `linux_memory`, or what Windows says is free and may be committed.

    None where nothing says.
    """
    if sys.platform != "win32":
        return linux_memory()
    # MEMORYSTATUSEX as 64-bit words: its own size and the load; physical memory in all, and free; what may be committed
    # in all, and still; addresses.
    status = (ctypes.c_uint64 * 8)(64)
    return min(status[2], status[4]) if ctypes.windll.kernel32.GlobalMemoryStatusEx(status) else None


def linux_memory(
    meminfo: str | os.PathLike[str] = "/proc/meminfo",
    cgroup: str | os.PathLike[str] = "/proc/self/cgroup",
    root: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> int | None:
    """Bytes that this process may still take: the least of what the system and every cgroup above it leave.

    A cgroup's file cache that was not used lately counts as free, for the kernel drops it before it kills.
    None where nothing says.
    """
    left = []
    if system := _field(Path(meminfo), "MemAvailable"):
        left.append(system * 1024)
    try:
        lines = Path(cgroup).read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if not controllers:
            top, limits = Path(root), ["memory.max", "memory.high"]
            used, cache = "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limits = Path(root) / "memory", ["memory.limit_in_bytes"]
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be the host's, which is not here; the top is then the container's own.
        group = top / path.strip("/")
        for folder in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:
            now = _number(folder / used)
            for name in limits:
                limit = _number(folder / name)
                if limit is not None and now is not None:
                    left.append(max(limit - max(now - _field(folder / "memory.stat", cache), 0), 0))
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
    return max(sum(record["peak"].values()), record["reserved"])


class Plans:
    """The plans that there are for one request.

    Parameters
    ----------
    core : _core.Model
    request : mapping
        Arguments of ``core.plan``, without a limit.
    """

    def __init__(self, core: _core.Model, request: Mapping[str, Any]) -> None:
        self._core, self.request = core, dict(request)

    def look(self, limit: int, **other: Any) -> tuple[Any, int]:
        """The plan with the least work (on a GPU: with the largest stripes) that keeps within a limit, and what it
        takes. Where there is none: None, and a limit that may do. limit: in bytes, 0 for no limit. other: arguments in
        place of the request's."""
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

        def work(record: Any) -> tuple[float, int, int]:
            """With the same FLOPs, smaller stripes mean more kernels, and a smaller workspace slower ones."""
            return record["work"], -record["stripe_bytes"], -record["peak"]["workspace"]

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

    def refusal(self, limit: int) -> ValueError:
        """What to raise for a limit below the smallest plan: it says what would do, its cost, and what would fit."""
        (least, smallest), ask = self.smallest(), self.request
        op = f"{'an' if ask['op'] == 'encode' else 'a'} {ask['op']} of {ask['height']}x{ask['width']}"
        batch = f" in a batch of {ask['batch']}" if ask.get("batch", 1) > 1 else ""
        work = f" ({smallest['work']:.1f} times the work of an unlimited run)" if smallest["work"] > 1 else ""
        weights = smallest["peak"]["weights"]
        if limit <= weights:
            fits = f"which is no more than the weights take ({_mib(weights)})"
        elif size := self.largest(limit):
            fits = f"which would do for {size[0]}x{size[1]}"
        else:
            fits = "which would do for no size"
        wanted = _mib(least, up=True)
        error = ValueError(f"memory_limit: want at least {wanted} for {op}{batch}{work}, got {_mib(limit)}, {fits}")
        error.smallest = least  # type: ignore[attr-defined]
        return error

    def out_of_memory(self, error: MemoryError, failed: Mapping[str, Any], device: Any) -> MemoryError:
        """What a plan that failed required of a GPU beside the weights, the free memory, and the largest square for
        it."""
        ask, weights = self.request, failed["peak"]["weights"]
        free, total = device.backend.memory()
        fits = self.largest(weights + free)
        return MemoryError(
            f"{error}. This {ask['op']} of {ask['height']}x{ask['width']} needs {_mib(taken(failed) - weights)} more "
            f"and {_mib(free)} of {_mib(total)} are free on cuda:{device.number}: "
            f"{f'{fits[0]}x{fits[1]}' if fits else 'no size'} would fit"
        )


def largest_size(
    fits: Callable[[int, int], bool], factor: int, aspect: float, most: int = LARGEST_SIDE, *,
    around: Callable[[int], range] = lambda n: range(n, n), every: bool = False,
) -> tuple[int, int] | None:  # fmt: skip
    """(height, width) of the largest image that fits, sides multiples of `factor`, `most` pixels at most; None where
    none does.

    What fits does not always grow with the size. `around` has the long sides, in factors, that are to be looked at one
    by one, given the one that bisection finds: the largest of them that fits is taken, or with `every` the one up to
    which all of them do.
    """

    def size(long: int) -> tuple[int, int]:
        short = max(1, round(long * min(aspect, 1 / aspect))) * factor
        return (short, long * factor) if aspect > 1 else (long * factor, short)

    # `low` fits (0 stands for nothing at all), `high` does not.
    low, high, end = 0, 64, most // factor
    while high <= end and fits(*size(high)):
        low, high = high, min(high * 2, end + 1)
    while high - low > 1:
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
        raise TypeError(f"aspect: want width / height as a number, got {repr(aspect)[:80]}") from None
    if not (math.isfinite(number) and 1 / 256 <= number <= 256):
        raise ValueError(f"aspect: want width / height from 1/256 to 256, got {aspect!r}")
    return number
