"""Show the progress of a long command on standard error, without any package."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

WIDTH = 30  # characters of a whole bar


@contextlib.contextmanager
def show_progress(name: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Give the function that takes (work done, work to do) and shows it.

    On a terminal one line moves and is cleared at the end. Elsewhere, such as in a log, a line follows every 5 seconds.
    name: what the line begins with. unit: also show how many of these are done per second.
    """
    file, started = sys.stderr, time.monotonic()
    moves = file is not None and file.isatty()
    every, shown = (0.1 if moves else 5.0), started

    def tell(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if file is None or now - shown < every or not 0 < done <= total:
            return
        shown, drawn = now, WIDTH * done // total
        left = (now - started) * (total - done) / done
        picture = f"[{'#' * drawn}{'-' * (WIDTH - drawn)}] " if moves else ""
        speed = f", {done / max(now - started, 1e-9):.1f} {unit}/s" if unit else ""
        line = f"{name}: {picture}{100 * done // total}%{speed}, {left:.0f} s left"
        getattr(file, "draw", file.write)(f"\r{line}\x1b[K" if moves else f"{line}\n")
        file.flush()

    try:
        yield tell
    finally:
        if moves and shown > started:
            getattr(file, "draw", file.write)("\r\x1b[K")
            file.flush()
