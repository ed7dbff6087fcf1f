"""What every room uses and no room owns: units, element sizes, checks of arguments, optional packages, text, files."""

from __future__ import annotations

import contextlib
import csv
import html
import importlib
import io
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from numbers import Real
from typing import Any, TypeVar

import numpy as np

__version__ = "0.1.0"

Item = TypeVar("Item")

MIB = 1 << 20
DTYPES = ("float32", "float16", "bfloat16")  # that models run in
PRECISIONS = ("highest", "high", "medium")  # of float32's products, as torch.set_float32_matmul_precision has them
ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
OPS = ("encode", "decode")
EXTRAS = {  # that bring a package
    "pandas": "table",
    "scipy": "fit",
    "matplotlib": "plot",
    "tqdm": "progress",
    "PIL": "image",
    "torch": "pytorch",
    "argcomplete": "completion",
    "gguf": "gguf",
}
TILED_OPS = (*OPS, "encode_tiled", "decode_tiled")  # what PyTorch's runtimes do beside


def latent_factor(arch: Mapping[str, Any]) -> int:
    """Image pixels a side of one latent pixel: every level of blocks but the last halves the side."""
    return int(2 ** (len(arch["block_out_channels"]) - 1))


def choose(argument: str, value: Any, among: Iterable[str]) -> None:
    """ValueError where an argument's value is not one of those that there are."""
    known = tuple(among)
    if value not in known:
        wanted = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
        raise ValueError(f"{argument}: want {wanted}, got {value!r}")


def chosen(argument: str, values: Any, among: Iterable[str]) -> list[str]:
    """One name, or a sequence of them, as a list; ValueError as `choose` raises it for any of them."""
    names, known = listed(values, str), tuple(among)
    for name in names:
        choose(argument, name, known)
    return names


def flag(argument: str, value: Any) -> bool:
    """True or False, NumPy's too; ValueError where the value is neither."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{argument}: want True or False, got {repr(value)[:80]}")
    return bool(value)


def whole(argument: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """The value as an int, NumPy's integers too; ValueError where it is no whole number from `least` to `most`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{argument}: want a whole number of at least {least}, got {value!r}")
    if number > most:
        raise ValueError(f"{argument}: want at most {most}, got {value!r}")
    return number


def real(value: Any) -> float:
    """A number as a float, and what is none as NaN, which lies in no range."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def listed(value: Any, single: type | tuple[type, ...]) -> list[Any]:
    """The items of a sequence as a list, and anything else as a list of that one thing. single: types that are taken
    for one thing although they can be gone over, such as str."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, single) else [value]


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of their first."""
    return list(dict.fromkeys(values))


def shipped(*path: str) -> str:
    """The text of a file of vaemem/data."""
    return resources.files("vaemem").joinpath("data", *path).read_text("utf-8")


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items by key, in their order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def need(module: str, what: str) -> Any:
    """Import an optional package for `what`, or raise ImportError that names the extra to install."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRAS.get(package, "demo")
        raise ImportError(f"{what} needs {package}: pip install 'vaemem[{extra}]' ({error})") from error


def typeset(equations: Iterable[str]) -> str:
    """LaTeX equation bodies, aligned at their &, as notebooks and Markdown typeset them."""
    return "$$\\begin{aligned}\n" + " \\\\\n".join(equations) + "\n\\end{aligned}$$"


def write(path: str | os.PathLike[str] | None, text: str) -> str | None:
    """Text to a file as it is; without a path it is given back."""
    if path is None:
        return text
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return None


def png(figure: Any) -> bytes:
    """A matplotlib figure as a PNG file's bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as CSV; by default with the first one's columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextlib.contextmanager
def setting(place: Any, **values: Any) -> Iterator[None]:
    """Attributes that have other values for a while."""
    before = {name: getattr(place, name) for name in values}
    try:
        for name, value in values.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


def mib(size: float) -> str:
    """Bytes as MiB with two decimals, without the unit."""
    return f"{round(size / MIB, 2) + 0.0:.2f}"  # + 0.0: no negative zero


def render(header: Iterable[str], rows: Iterable[Sequence[str]], markdown: bool = False) -> str:
    """Aligned text, or a Markdown table; columns of numbers to the right."""
    lines = [[str(cell).replace("|", r"\|") if markdown else str(cell) for cell in row] for row in (header, *rows)]
    columns = list(zip(*lines, strict=True))
    right = [all(cell[:1] in tuple("0123456789+-.…") or not cell for cell in column[1:]) for column in columns]
    width = [max(3, *map(len, column)) for column in columns]
    padded = [[c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, width, right, strict=True)] for line in lines]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in padded)
    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(width, right, strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))


def html_table(header: Iterable[str], rows: Iterable[Sequence[str]], bold: Sequence[str] | None = None) -> str:
    """A table for a notebook, in a box of its own that scrolls. bold: the one of the rows that stands out."""

    def line(tag: str, cells: Iterable[str], style: str = "") -> str:
        return f"<tr{style}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row, ' style="font-weight: bold"' if row is bold else "") for row in rows)
    table = f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x: auto">{table}</div>'
