"""Pages of reports and of the demo: on narrow screens, in the dark, and a verdict that cannot be taken for another."""

import json
import re

import pytest
from tools import dump, wants_browser

from vaemem.prediction.verdict import DOES_NOT_FIT, FITS, TIGHT
from vaemem.reports.document import MARKS, Document

VERDICTS = (FITS, TIGHT, DOES_NOT_FIT)


@pytest.fixture
def page(tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    document = Document("Does it fit?")
    document.text(f"A path: `/{'a' * 200}` and plain {'words ' * 50}{'x' * 200}")
    document.table([f"column {i}" for i in range(20)], [[f"{i} a cell of words" for i in range(20)]])
    document.table(["card", *VERDICTS], [["RTX 4060", *(f"{MARKS[one]} {one}" for one in VERDICTS)]])
    document.figure("wide", "A wide figure", figures.Figure(figsize=(15, 4)))
    path = tmp_path / "page.html"
    path.write_text(document.html(), "utf-8")
    return path


def looked_at(page, width, *flags):
    """What the page says of itself in a frame of that width."""
    frame = page.parent / "frame.html"
    asked = """
      const d = frame.contentDocument, style = e => frame.contentWindow.getComputedStyle(e);
      document.body.textContent = JSON.stringify({
        width: d.documentElement.scrollWidth, page: style(d.body).backgroundColor, text: style(d.body).color,
        cells: [...d.querySelectorAll("td")].slice(-3).map(e => style(e).color),
        tables: [...d.querySelectorAll("table")].map(e => e.scrollWidth),
        media: d.defaultView.innerWidth})"""
    frame.write_text(f"<iframe id=frame width={width} height=800 style='border:0' src={page.name}></iframe>"
                     f"<script>frame.onload = () => {{ {asked} }}</script>")  # fmt: skip
    return json.loads(re.search(r"{.*}", dump(frame.as_uri(), *flags))[0])


def luminance(colour):
    """As WCAG has it, from 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@wants_browser
@pytest.mark.parametrize("flags", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_a_page_fits_a_phone_by_day_and_by_night(page, flags):
    seen = looked_at(page, 360, *flags)
    assert seen["width"] == 360 == seen["media"] and max(seen["tables"]) > 360, "only tables scroll, in boxes"
    assert (luminance(seen["page"]) < 0.1) == bool(flags)
    for colour in (seen["text"], *seen["cells"]):
        assert contrast(colour, seen["page"]) >= 4.5
    assert len({seen["text"], *seen["cells"]}) == 4


def test_verdicts_have_marks_of_their_own(page):
    text = page.read_text("utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert set(MARKS) == set(VERDICTS) and len(set(MARKS.values())) == 3
    cells = re.findall(r"<td class=(yes|tight|no)>. ([a-z ]+)</td>", text)
    assert cells == [("yes", FITS), ("tight", TIGHT), ("no", DOES_NOT_FIT)]
