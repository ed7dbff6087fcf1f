"""A document of headings, paragraphs, lists, tables and figures, written as Markdown and as one HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vaemem._common import png
from vaemem._render import Columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --page: #fff; --line: #ddd; --rule: #888; --code: #f2f2f2;
  --yes: #1a7f37; --tight: #9a6700; --no: #c62828; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #161616; --line: #3a3a3a; --rule: #888; --code: #2a2a2a;
    --yes: #4ac26b; --tight: #e3b341; --no: #ff7b72; }
  img { border-radius: 4px; }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: var(--text);
  background: var(--page); overflow-wrap: anywhere; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; overflow-wrap: normal; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { border-bottom: 2px solid var(--rule); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.yes { color: var(--yes); }
td.tight { color: var(--tight); }
td.no { color: var(--no); }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: #fff; }
code { background: var(--code); padding: 0 .25rem; }
"""
MARKS = {"fits": "✓", "tight": "≈", "does not fit": "✗"}  # of verdicts, before them
_MARKED = {"✓": "yes", "≈": "tight", "✗": "no"}  # classes of cells that begin with one


class Document:
    """Blocks in order. Text may hold `code` and **bold**; all other marks are plain text.

    Attributes
    ----------
    title : str
    figures : dict of str to matplotlib.figure.Figure
        By name. The Markdown refers to each as NAME.png in its own folder, the HTML holds them.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.figures: dict[str, Figure] = {}
        self._blocks: list[tuple[str, str]] = []  # as Markdown, as HTML
        self.heading(title, 1)

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading."""
        self._blocks.append((f"{'#' * level} {text}", f"<h{level}>{_inline(text)}</h{level}>"))

    def text(self, text: str) -> None:
        """Add a paragraph, unless the text is empty."""
        if text:
            self._blocks.append((text, f"<p>{_inline(text)}</p>"))

    def items(self, items: Iterable[str]) -> None:
        """Add a list, unless it is empty."""
        if lines := list(items):
            whole = "".join(f"<li>{_inline(line)}</li>" for line in lines)
            self._blocks.append(("\n".join(f"- {line}" for line in lines), f"<ul>{whole}</ul>"))

    def table(self, header: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
        """Add a table, with numbers to the right. Leave out empty columns, and a table without lines."""
        if not lines:
            return
        kept = [i for i in range(len(header)) if any(line[i] not in (None, "") for line in lines)]
        header = [header[i] for i in kept]
        shown = [["" if line[i] is None else str(line[i]) for i in kept] for line in lines]
        columns = zip(header, *shown, strict=True)
        head = "".join(_cell("th", cell, all(_is_number(c) or not c for c in rest)) for cell, *rest in columns)
        body = "".join(f"<tr>{''.join(_cell('td', cell, _is_number(cell)) for cell in line)}</tr>" for line in shown)
        whole = f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        self._blocks.append((Columns(header, shown).markdown(), whole))

    def figure(self, name: str, caption: str, figure: Figure) -> None:
        """Add a figure."""
        self.figures[name] = figure
        image = base64.b64encode(png(figure)).decode()
        width = round(96 * figure.get_size_inches()[0])  # a browser's pixels; the PNG has more, for sharp screens
        source = f'width="{width}" src="data:image/png;base64,{image}"'
        whole = f'<figure><img alt="{html.escape(caption)}" {source}></figure>'
        self._blocks.append((f"![{caption}]({name}.png)", whole))

    def markdown(self) -> str:
        """Return the document as Markdown."""
        return "\n\n".join(markdown for markdown, _ in self._blocks) + "\n"

    def html(self) -> str:
        """Return the document as one HTML file that needs no other."""
        body = "\n".join(whole for _, whole in self._blocks)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self.title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
        )


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)


def _cell(tag: str, text: str, is_number: bool) -> str:
    kind = "n" if is_number else _MARKED.get(text[:1])
    return f"<{tag}{f' class={kind}' if kind else ''}>{_inline(text)}</{tag}>"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[\d,.]+%?", text) is not None
