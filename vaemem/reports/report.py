"""The report on a table of memory: tables, ratios, scaling, constants, models compared, advice, and claims checked."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vaemem import plot
from vaemem._common import png, write
from vaemem.published.claims import Checked, Claim, check
from vaemem.reports import sections
from vaemem.reports.document import Document
from vaemem.reports.sections import Facts
from vaemem.tables.estimators import Comparison, compare
from vaemem.tables.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report:
    """What `vaemem.report` gives.

    Attributes
    ----------
    markdown, html : str
        The report. The Markdown refers to its figures as PNG files beside it, the HTML holds them.
    figures : dict of str to matplotlib.figure.Figure
    comparison : Comparison or None
        The shipped estimators beside the rows; None where no row can be compared.
    claims : Checked
        The published statements beside the rows.
    """

    def __init__(self, document: Document, comparison: Comparison | None, claims: Checked) -> None:
        self.markdown, self.html = document.markdown(), document.html()
        self.figures: dict[str, Figure] = document.figures
        self.comparison, self.claims = comparison, claims

    def save(self, path: str | os.PathLike[str], html: bool | str | os.PathLike[str] = True) -> list[Path]:
        """Write the report.

        Parameters
        ----------
        path : path
            The Markdown file, or a folder for ``report.md``; made if needed. The figures go beside it.
        html : bool or path
            Whether to write the HTML beside it too, or where.

        Returns
        -------
        list of pathlib.Path
            What was written.
        """
        file = Path(path)
        file = file if file.suffix == ".md" else file / "report.md"
        written = {file: self.markdown.encode()} | {
            file.parent / f"{name}.png": png(figure) for name, figure in self.figures.items()
        }
        if html:
            written[file.with_suffix(".html") if html is True else Path(html)] = self.html.encode()
        for target, content in written.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target, content)
        return list(written)

    def _repr_html_(self) -> str:
        """In a frame of its own, whose style is not the notebook's."""
        page = html.escape(self.html)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40rem; border: 1px solid #ddd"></iframe>'

    def __str__(self) -> str:
        return self.markdown


def report(
    table: Table,
    path: str | os.PathLike[str] | None = None,
    html: bool | str | os.PathLike[str] = True,
    *,
    claims: Iterable[Claim] | None = None,
    estimators: Any = None,
    plots: bool = True,
    title: str = "Memory of VAEs",
) -> Report:
    """Report on a table: what its rows hold, what follows from them, and which published statements they contradict.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Measured, estimated or predicted rows alike.
    path : path, optional
        Where to write the Markdown: a file ``*.md``, or a folder for ``report.md``. Figures go beside it.
    html : bool or path
        With a `path`, whether to write one self-contained HTML file beside the Markdown too; or where to write it.
    claims : iterable of Claim, optional
        Statements to check; by default what the published benchmark report says. ``[]`` for none.
    estimators : optional
        As `vaemem.compare` takes them; by default all that are shipped.
    plots : bool
        Whether to draw figures, which needs matplotlib (``pip install 'vaemem[plot]'``).
    title : str

    Raises
    ------
    ValueError
        The table has no rows with a model, an op and a size; bad estimators.
    ImportError
        `plots` without matplotlib.
    OSError
        The files cannot be written.

    Notes
    -----
    Every figure in every sentence is computed from the rows. Rows that ran in tiles although their op does not say
    so (allocated bytes that do not grow with the pixels) are listed, and left out of scaling, constants and fits.

    Examples
    --------
    >>> [path.name for path in report(seed_table(), plots=False).save("out")]
    ['report.md', 'report.html']
    """
    table = Table(table)
    facts = Facts(table)
    if not facts.rows:
        raise ValueError(f"table: want rows with model, op, height and width, got none in {len(table)} rows")
    comparable = Table(row for row in facts.rows if row[facts.target] and row["dtype"])
    comparison = compare(comparable, estimators, facts.target) if len(comparable) else None
    checked = check(table, claims)
    document = Document(title)
    sections.summary(document, facts, checked)
    sections.advice(document, facts, comparison)
    sections.system(document, facts)
    sections.tables(document, facts)
    if plots and comparison is not None:
        document.figure("memory", "Memory against pixels", plot.memory_vs_pixels(comparable, target=facts.target))
    sections.ratios(document, facts)
    sections.scaling(document, facts)
    sections.constants(document, facts, plots)
    sections.estimates(document, comparison, plots)
    sections.formulas(document, facts)
    sections.models(document, facts)
    sections.claims(document, checked)
    made = Report(document, comparison, checked)
    if path is not None:
        made.save(path, html)
    return made
