"""Tables of answers in terminals of any width, and in pipes."""

from __future__ import annotations

import pytest

from vaemem import plan_pipeline
from vaemem.__main__ import main
from vaemem._render import Columns, Sheet

pytestmark = [pytest.mark.core, pytest.mark.python]

HEADER = ("way", "outcome", "seconds", "peak", "host")
ROWS = [
    ("no offload, VAE whole", "runs out in decode, 25.84 GB short", "172 s (102 to 288)", "36.32 GB", "0 MB"),
    ("streamed group offload, VAE tiled 512", "fits", "173 s (104 to 289)", "2.30 GB", "47.83 GB"),
]


def words(text):
    return sorted(text.split())


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40])
def test_a_table_keeps_every_cell_in_any_width(width):
    table = Columns(HEADER, ROWS)
    shown = table.text(width)
    assert max(map(len, shown.splitlines())) <= width
    for word in words(table.text()):
        assert word in shown
    if width >= 80:  # texts wrap, so no column goes to another table
        assert words(shown) == words(table.text())


def test_a_short_answer_names_the_columns_that_do_not_fit():
    sheet = Sheet("It fits.", [Columns(HEADER, ROWS)])
    assert sheet.text(width=45).endswith("--all (all=True) adds: seconds, peak, host")
    assert "47.83 GB" in sheet.text(all=True, width=45) and "adds" not in sheet.text(all=True, width=45)


def test_columns_that_follow_come_after_those_that_tell_rows_apart():
    rows = [("sd15", op, dtype, f"{1e9:.0f}") for op in ("encode", "decode") for dtype in ("float16", "float32")]
    later = Columns(("model", "op", "dtype", "reserved"), rows).text(30).split("\n\n")[-1]
    assert [line.split()[:3] for line in later.splitlines()[1:]] == [list(row[:3]) for row in rows]


def test_a_pipe_gets_every_column(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    asked = ["plan", "sd15", "768", "--gpu", "RTX 3060"]
    assert main([*asked, "--all"]) == 0
    plan, printed = plan_pipeline("sd15", 768, 768, gpu="RTX 3060"), capsys.readouterr().out.splitlines()
    for one in plan.outcomes:  # each in one line, with its outcome and the memory of its decode
        found = next(line for line in printed[::-1] if line.startswith(f"{one.way.name}  "))
        assert one.summary in found and found.endswith(" GB")
    assert main(asked) == 0
    assert "adds" not in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*asked, "--all"]) == 0
    table = capsys.readouterr().out.partition("All 17 ways")[2].partition("\n\n  ")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_a_column_without_texts_is_drawn():
    assert Columns(("a", ""), [("x", ""), ("y", "")]).text(80).split() == ["a", "x", "y"]


def test_options_are_no_numbers():
    """A column of them stands to the left."""
    options = Columns(("way", "GB"), [("--low-ram", "1"), ("--vae-tiling", "22")]).text(80)
    assert options.splitlines()[1].startswith("--low-ram ")
