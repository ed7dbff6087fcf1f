"""The look of an answer: a sheet of blocks, for a terminal, as Markdown and as HTML; and its data as JSON.

An answer makes its content once, as a `Sheet`. Each kind of block of a sheet can write itself in each of the three
forms.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vaemem._common import MIB, whole
from vaemem._saving import write

Sizer = Callable[[float], str]  # how a size in bytes is written
GB = 1 << 30  # as cards are sold
NARROW = 80  # columns of a paragraph, if nothing says how wide the terminal is
ANY_WIDTH = 1 << 20  # columns of a table, if its reader is no terminal
TEXT = 16  # columns that a wrapped column of text keeps
_COLOURS = {"fits": "32", "tight": "33", "does not fit": "31"}  # green, yellow, red


def in_gb(size: float) -> str:
    """A size as cards are sold: 1 GB is 1024 MiB.

    Examples
    --------
    >>> from vaemem._render import in_gb
    >>> in_gb(6530 << 20), in_gb(22 << 20)
    ('6.38 GB', '22 MB')
    """
    if abs(size) >= GB / 10:
        return f"{size / GB:.2f} GB"
    return f"{size / MIB:.0f} MB" if abs(size) >= 10 * MIB else f"{size / MIB:.2g} MB"


def in_mib(size: float) -> str:
    """A size in MiB, with two decimals if it is not a whole number of them."""
    return f"{size / MIB:.0f} MiB" if size % MIB == 0 else f"{size / MIB:.2f} MiB"


def share(part: float, whole: float, sizer: Sizer, of: str = "of") -> str:
    """Two sizes, with one unit if it is the same: ``"6.38 of 7.26 GB"``."""
    one, other = sizer(part), sizer(whole)
    return f"{one.split()[0] if one.split()[1] == other.split()[1] else one} {of} {other}"


@dataclass(frozen=True)
class Facts:
    """Labelled lines. A fact without text is left out. detail, here and below: whether only ``all=True`` shows it."""

    pairs: Sequence[tuple[str, str]]
    detail: bool = False

    @property
    def _filled(self) -> list[tuple[str, str]]:
        return [(label, text) for label, text in self.pairs if text]

    def text(self, width: int) -> str:
        cut = max((len(label) for label, _ in self._filled), default=0) + 2
        return "\n".join(_wrapped(text, width, f"  {label:<{cut}}", " " * (cut + 2)) for label, text in self._filled)

    def markdown(self) -> str:
        return "\n".join(f"- **{label}**: {_plain(text)}" for label, text in self._filled)

    def html(self) -> str:
        left = "text-align:left;vertical-align:top"  # Jupyter aligns cells to the right
        pairs = ((html.escape(label), html.escape(text)) for label, text in self._filled)
        rows = (
            f'<tr><th style="{left}">{label}</th><td style="{left};overflow-wrap:anywhere">{text}</td></tr>'
            for label, text in pairs
        )
        return f"<table>{''.join(rows)}</table>"


@dataclass(frozen=True)
class Columns:
    """A table. In a narrow terminal, texts wrap. If that is not enough, the last columns are only named, and
    ``all=True`` shows them below, after the columns that tell the rows apart. best: the index of the row that stands
    out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None
    title: str = ""
    detail: bool = False

    def text(self, width: int = ANY_WIDTH, all: bool = True) -> str:
        columns, counts = [*zip(self.header, *self.rows, strict=True)], range(1, len(self.header))
        keys = next((count for count in counts if len({tuple(row[:count]) for row in self.rows}) == len(self.rows)), 1)
        bands = [columns[:keys]]
        for column in columns[keys:]:
            if len(bands[-1]) > keys and sum(map(_least, bands[-1])) + 2 * len(bands[-1]) + _least(column) > width:
                bands.append(columns[:keys])
            bands[-1].append(column)
        tables = [_table(*_fitted(band, width)) for band in bands]
        if len(bands) > 1 and not all:
            left_out = ", ".join(column[0] for band in bands[1:] for column in band[keys:])
            tables[1:] = [_wrapped(f"--all (all=True) adds: {left_out}", width, "", "")]
        title = _wrapped(self.title, min(width, NARROW), "", "")
        return "\n".join(filter(None, [title, ("\n\n" if all else "\n").join(tables)]))

    def markdown(self) -> str:
        return "\n\n".join(filter(None, [_plain(self.title), _table(self.header, self.rows, markdown=True)]))

    def html(self) -> str:
        best = None if self.best is None else self.rows[self.best]
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        looks = ["text-align:right;white-space:nowrap" if _are_numbers(one) else "text-align:left" for one in columns]

        def line(tag: str, cells: Sequence[str]) -> str:
            style = ' style="font-weight: bold"' if cells is best else ""
            made = (f'<{tag} style="{look}">{html.escape(one)}</{tag}>' for one, look in zip(cells, looks, strict=True))
            return f"<tr{style}>{''.join(made)}</tr>"

        body = "".join(line("td", row) for row in self.rows)
        table = f"<table><thead>{line('th', self.header)}</thead><tbody>{body}</tbody></table>"
        title = f"<p>{html.escape(self.title)}</p>" * bool(self.title)
        return f'{title}<div style="overflow-x: auto">{table}</div>'


@dataclass(frozen=True)
class Actions:
    """A list of things to do, each with the command or the code that does it."""

    title: str
    pairs: Sequence[tuple[str, str]]
    detail: bool = False

    def text(self, width: int) -> str:
        lines = [self.title]
        for what, how in self.pairs:
            lines += [_wrapped(what, width, "  ", "    "), textwrap.indent(how, "    ")]
        return "\n".join(lines)

    def markdown(self) -> str:
        fenced = ((what, textwrap.indent(f"```\n{how}\n```", "  ")) for what, how in self.pairs)
        return "\n\n".join([self.title, *(f"- {what}\n\n{code}" for what, code in fenced)])

    def html(self) -> str:
        items = (f"<li>{html.escape(what)}{Code(how).html()}</li>" for what, how in self.pairs)
        return f"<p>{html.escape(self.title)}</p><ul>{''.join(items)}</ul>"


@dataclass(frozen=True)
class Code:
    """Lines of a program."""

    lines: str
    detail: bool = False

    def text(self, width: int) -> str:
        return textwrap.indent(self.lines, "    ")

    def markdown(self) -> str:
        return f"```\n{self.lines}\n```"

    def html(self) -> str:
        return f'<pre style="margin:0.4em 0;white-space:pre-wrap"><code>{html.escape(self.lines)}</code></pre>'


@dataclass(frozen=True)
class Bullets:
    """A list of sentences, with a title or without one."""

    items: Sequence[str]
    title: str = ""
    detail: bool = False

    def text(self, width: int) -> str:
        items = (_wrapped(item, width, "- ", "  ") for item in self.items)
        return "\n".join(filter(None, [_wrapped(self.title, width, "", ""), *items]))

    def markdown(self) -> str:
        items = "\n".join(f"- {_plain(item)}" for item in self.items)
        return "\n\n".join(filter(None, [_plain(self.title), items]))

    def html(self) -> str:
        items = "".join(f"<li>{html.escape(item)}</li>" for item in self.items)
        return f"<p>{html.escape(self.title)}</p>" * bool(self.title) + f"<ul>{items}</ul>"


# Colours of the parts of a card; people with a colour-vision deficiency tell them apart (Okabe and Ito).
COLOURS = {
    "weights": "#0072B2", "tensors": "#D55E00", "workspaces": "#E69F00", "cached": "#CC79A7", "vaemem": "#009E73",
    "pages of weights": "#F0E442", "CUDA context": "#56B4E9", "others": "#6E6E6E", "Windows": "#999999",
    "spare": "rgba(128,128,128,0.35)",
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A bar of the card's parts in bytes. A line marks the card's size if the parts exceed it. Only HTML shows the
    bar."""

    parts: Mapping[str, int]
    size: int
    sizer: Sizer = in_gb
    detail: bool = False

    def text(self, width: int) -> str:
        return ""

    def markdown(self) -> str:
        return ""

    def html(self) -> str:
        whole, left, cells, names = max(self.size, sum(self.parts.values()), 1), 0, [], []
        for name, part in self.parts.items():
            if part <= 0:
                continue
            colour, shown = COLOURS.get(name, "currentColor"), f"{html.escape(name)} {self.sizer(part)}"
            cells.append(
                f'<div title="{shown}" style="position:absolute;left:{100 * left / whole:.2f}%;top:0;bottom:0;'
                f'width:{100 * part / whole:.2f}%;background:{colour}"></div>'
            )
            names.append(f'<span style="white-space:nowrap"><span style="color:{colour}">&#9632;</span> {shown}</span>')
            left += part
        edge = f'<div title="the card, {self.sizer(self.size)}" style="position:absolute;'
        edge += f'left:{100 * self.size / whole:.2f}%;top:-4px;bottom:-4px;border-left:2px solid"></div>'
        box = "position:relative;height:1.4em;max-width:48em;background:rgba(128,128,128,0.1);margin:6px 0"
        edge = edge if left > self.size else ""
        return f'<div style="{box}">{"".join(cells)}{edge}</div><div style="margin:6px 0">{" ".join(names)}</div>'


Block = Facts | Columns | Actions | Code | Bullets | Bar


@dataclass(frozen=True)
class Sheet:
    """An answer: the headline, which begins with the verdict if there is one, and blocks."""

    headline: str
    blocks: Sequence[Block] = ()
    verdict: str = ""

    def shown(self, all: bool) -> Iterable[Block]:
        return (block for block in self.blocks if all or not block.detail)

    def text(self, all: bool = False, width: int = NARROW, colour: bool = False, tables: int = 0) -> str:
        """Return the text for a terminal of `width` columns. tables: columns for tables, if that differs."""
        headline = _wrapped(self.headline, width, "", "")
        if colour:
            cut = len(self.verdict)
            headline = f"\x1b[1;{_COLOURS.get(self.verdict, '39')}m{headline[:cut]}\x1b[22;39m{headline[cut:]}"
        blocks = [
            block.text(tables or width, all) if isinstance(block, Columns) else block.text(width)
            for block in self.shown(all)
        ]
        return "\n\n".join([headline, *filter(None, blocks)])

    def markdown(self, all: bool = False) -> str:
        cut = len(self.verdict)
        headline = f"**{self.headline[:cut]}**" * bool(cut) + _plain(self.headline[cut:])
        return "\n\n".join([headline, *filter(None, (block.markdown() for block in self.shown(all)))])

    def html(self, all: bool = False) -> str:
        cut, text = len(self.verdict), html.escape(self.headline)
        headline = f"<b>{text[:cut]}</b>{text[cut:]}"
        return f"<div><p>{headline}</p>{''.join(block.html() for block in self.shown(all))}</div>"


def _plain(text: str) -> str:
    """Escape stars, which Markdown would take for emphasis."""
    return text.replace("*", r"\*")


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(not cell or re.match(r"[+-]?[\d.…]", cell) for cell in cells)


def _least(column: Sequence[str]) -> int:
    """Return the fewest columns of a terminal that a table's column needs. Numbers do not wrap, and words do not."""
    longest = max(map(len, column))
    if _are_numbers(column[1:]):
        return longest
    return max(min(longest, TEXT), *(len(word) for cell in column for word in cell.split()), 3)


def _fitted(columns: Sequence[Sequence[str]], width: int) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Wrap the texts of a table's columns to a width, the widest column first. Return the header and the rows."""
    widths, least = [max(map(len, column)) for column in columns], [*map(_least, columns)]
    while sum(widths) + 2 * len(widths) - 2 > width and widths != least:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[widest] -= 1
    lines = []
    for row in zip(*columns, strict=True) if columns else [()]:
        cells = [textwrap.wrap(cell, max(w, 1), break_long_words=False) for cell, w in zip(row, widths, strict=True)]
        lines.append([*itertools.zip_longest(*cells, fillvalue="")] or [row])
    (header, *more), *rows = lines
    return header, [*more, *itertools.chain.from_iterable(rows)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool = False) -> str:
    """Align columns, those of numbers to the right."""
    lines = [[_plain(cell).replace("|", r"\|") if markdown else cell for cell in row] for row in (header, *rows)]
    columns = list(zip(*lines, strict=True))
    right = [_are_numbers(column[1:]) for column in columns]
    width = [max(3, *map(len, column)) for column in columns]
    padded = [[c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, width, right, strict=True)] for line in lines]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in padded)
    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(width, right, strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    """A paragraph. A number keeps its unit on its line."""
    kept = re.sub(r"(\d) (?=(?:GB|MB|MiB|s)\b)", "\\1\xa0", text)
    lines = textwrap.fill(
        kept, max(width, len(first) + 20), initial_indent=first, subsequent_indent=others, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return lines.replace("\xa0", " ")


class Shown:
    """An answer that can be printed, and written as JSON. A subclass has its data and its `Sheet`."""

    def _data(self) -> dict[str, Any]:
        raise NotImplementedError

    def _sheet(self, size: Sizer) -> Sheet:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return everything that the answer says as plain values: docs/answer.schema.json describes them.

        Examples
        --------
        >>> plan_pipeline("zimage-turbo", 1536, 1536, memory="24 GB", runtime="mlx").to_dict()["recommended"]
        '--low-ram'
        """
        return self._data()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write `to_dict` as JSON to a file, or return it as text.

        Examples
        --------
        >>> import json
        >>> json.loads(predict("sdxl", "decode", 1024, 1024, gpu="RTX 4090").to_json())["verdict"]
        'fits'
        """
        return write(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    def to_text(self, all: bool = False, exact: bool = False, width: int | None = None, colour: bool = False) -> str:
        """Return the answer for a terminal.

        Parameters
        ----------
        all : bool
            Whether to show the details, too.
        exact : bool
            Whether to show sizes in MiB. By default they are in GB of 1024 MiB, as cards are sold.
        width : int, optional
            Columns; by default the terminal's. Otherwise paragraphs have 80, and tables all that they need.
        colour : bool
            Whether to colour the verdict.

        Examples
        --------
        >>> print(predict("sdxl", "decode", 1024, 1024, gpu="RTX 4090").to_text(exact=True))
        Fits: ...
        """
        found = shutil.get_terminal_size((0, 0)).columns if width is None else whole("width", width)
        sheet = self._sheet(in_mib if exact else in_gb)
        return sheet.text(all, found or NARROW, colour, found or ANY_WIDTH)

    def to_markdown(self, all: bool = False, exact: bool = False) -> str:
        """Return the answer as Markdown, with the parameters of `to_text`.

        Examples
        --------
        >>> print(predict_pipeline("sd15", 512, 512, gpu="T4").to_markdown())
        **Fits**: ...
        """
        return self._sheet(in_mib if exact else in_gb).markdown(all)

    def _repr_html_(self) -> str:
        return self._sheet(in_gb).html()

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__


class Typeset(Shown):
    """An answer with equations, which notebooks show as Markdown. A subclass writes the equations as LaTeX."""

    def latex(self) -> str:
        raise NotImplementedError

    def to_markdown(self, all: bool = False, exact: bool = False) -> str:
        headline, _, rest = super().to_markdown(all, exact).partition("\n\n")
        return f"{headline}\n\n{self._repr_latex_()}\n\n{rest}"

    def _repr_latex_(self) -> str:
        return "$$\\begin{aligned}\n" + self.latex() + "\n\\end{aligned}$$"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    _repr_html_ = None  # type: ignore[assignment]  # notebooks typeset LaTeX in Markdown
