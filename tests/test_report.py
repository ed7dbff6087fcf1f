"""The report: the published document's figures from its table, and reports on other tables."""

import html
import re
import statistics
from importlib import resources

import pytest
from errors import refused

from vaemem import Table, estimate_sweep, predict_sweep
from vaemem.reports.report import report
from vaemem.reports.row_statistics import constant, percentile, ratio

pytestmark = pytest.mark.python

MIB = 2**20

# What the published document states, section by section, in its own order and rounding.
RATIOS = """flux encode 1.15, flux decode 1.80, sd15 encode 1.31, sd15 decode 1.55, sd15 decode_tiled 1.57,
sdxl encode 1.31, sdxl decode 1.56, sdxl decode_tiled 1.61"""
# model dtype: the implied constant at 512, 768, 1024, 1536 and 2048, and the reserved MiB in whole ones.
CONSTANTS = """
flux float16: 2136 2112 2130 2120 2116 | 1068 2376 4260 9538 16932
flux float32: 1422 1389 1380 1312 1244 | 1422 3126 5520 11806 19904
flux bfloat16: 2136 2112 2129 2119 2116 | 1068 2376 4258 9536 16928
sd15 float16: 2036 2084 2113 2120 2124 | 1018 2344 4226 9538 16994
sd15 float32: 1532 1432 1422 1351 1284 | 1532 3222 5686 12158 20536
sd15 float32: 1554 1433 1422 1351 1283 | 1554 3224 5688 12158 20536
sdxl float16: 2176 2135 2137 2128 2124 | 1088 2402 4274 9574 16994
sdxl float32: 1532 1432 1422 1351 1284 | 1532 3222 5686 12158 20536
sdxl float32: 1554 1433 1422 1351 1283 | 1554 3224 5688 12158 20536
"""
SIDES = (512, 768, 1024, 1536, 2048)


@pytest.fixture(scope="module")
def table():
    path = resources.files("vaemem") / "data" / "seed_table.csv"
    if not path.is_file():
        pytest.skip("the published table is not in this package")
    return Table.from_csv(str(path))


@pytest.fixture(scope="module")
def made(table):
    return report(table, plots=False)


def section(markdown, title):
    """The lines from a heading to the next of its level or above."""
    lines = markdown.splitlines()
    start = next(i for i, line in enumerate(lines) if re.fullmatch(rf"#+ {title}", line))
    level = lines[start].index(" ")
    end = next((i for i in range(start + 1, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i])), len(lines))
    return lines[start + 1 : end]


def cells(lines):
    """The cells of the tables among Markdown lines, without the rules."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if not re.fullmatch(r"[-:]*", row[0])]


# ---- the published document from its table ----


def test_a_notebook_shows_it_in_a_frame_whose_style_stays_inside(made):
    frame = made._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "<style" not in frame and html.unescape(frame).count(made.html) == 1


def test_the_tables_are_those_of_the_document(table, made):
    shown = cells(section(made.markdown, "Memory and time by model and op"))
    shown = [row for row in shown if row[0] != "size"]
    assert len(shown) == len(table) == 98
    for row, line in zip(table, shown, strict=True):
        want = [f"{row['height']}x{row['width']}", row["dtype"], str(row["group"]),
                f"{row['allocated_bytes'] / MIB:.2f}", f"{row['reserved_bytes'] / MIB:.2f}",
                f"{ratio(row):.2f}", f"{row['seconds']:.3f}"]  # fmt: skip
        assert line[:7] == want


def test_the_ratios_are_those_of_the_document(made):
    shown = {
        tuple(row[:2]): row[4] for row in cells(section(made.markdown, "Reserved over allocated")) if row[2] == "all"
    }
    want = {tuple(line.split()[:2]): line.split()[2] for line in RATIOS.split(",")}
    assert shown == want
    assert "On average 1.49 over 98 rows" in made.markdown


def test_the_constants_are_those_of_the_document(table, made):
    shown = [row for row in cells(section(made.markdown, "Implied constants")) if len(row) == 7 and row[1] == "decode"]
    shown = [(row[0], row[3], row[2], row[5], row[6]) for row in shown]
    want = []
    for line in CONSTANTS.strip().splitlines():
        name, constants, sizes = re.split(r"[:|]", line)
        model, dtype = name.split()
        for side, value, size in zip(SIDES, constants.split(), sizes.split(), strict=True):
            want.append((model, dtype, f"{side}x{side}", value, size))
    assert len(want) == 45
    assert [(m, d, s, c, f"{float(r):.0f}") for m, d, s, c, r in shown] == want
    decode = [constant(row) for row in table.filter(op="decode")]
    assert (round(percentile(decode, 0.5)), round(percentile(decode, 0.95))) == (1532, 2136)
    summary = next(row for row in cells(section(made.markdown, "Implied constants")) if row[:2] == ["decode", "all"])
    assert summary[2:] == ["45", "1244", "1532", "2136", "2176"]


def test_sd15_beside_sdxl_as_in_the_document(made):
    lines = cells(section(made.markdown, "sd15 and sdxl"))
    shown = {row[1]: row for row in lines if row[0] == "decode" and row[2] == "float16"}
    for size, sd15, sdxl, more in (("1024x1024", "4226.00", "4274.00", 1), ("512x512", "1018.00", "1088.00", 7)):
        assert shown[size][4:6] == [sd15, sdxl]
        assert round(float(shown[size][6].rstrip("%"))) == more
    text = "\n".join(section(made.markdown, "sd15 and sdxl"))
    assert (
        "sdxl allocates -0.2% to +0.0% more than sd15 and reserves +0.0% to +6.9% more" in text
        and "The widest: sdxl decode 512x512 float16" in text
    )


def test_scaling_is_said_within_one_dtype_only(made):
    shown = cells(section(made.markdown, "Scaling with the pixels"))[1:]
    decode = [float(row[7]) for row in shown if row[1] == "decode"]
    assert len(decode) == 9 and all(15.9 <= value <= 16.0 for value in decode)
    encode = {(row[0], row[5]) for row in shown if row[1] == "encode"}
    assert encode == {("flux", "2048x2048"), ("sd15", "1024x1024"), ("sdxl", "1024x1024")}, "tiled rows are left out"


def test_rows_that_ran_tiled_are_marked_and_left_out(made):
    assert "**8 rows ran in tiles although the op does not say so**" in made.markdown
    assert sum(row[-1] == "ran in tiles" for row in cells(made.markdown.splitlines())) == 8
    assert len(made.comparison.left_out) == 8 and len({id(r.row) for r in made.comparison.rows}) == 90
    formulas = cells(section(made.markdown, "Formulas"))
    assert [row[3] for row in formulas if row[:3] == ["sd15", "encode", "float16"]] == ["3"]


# ---- any table ----


def test_the_advice_is_enough_for_every_row(table, made):
    text = "\n".join(section(made.markdown, "Recommendations"))
    for op, least in re.findall(r"- (\w+) with one constant for every dtype: reserve (\d+) H W e", text):
        rows = [r for r in table.filter(op=op) if r["model"] == "flux" or op == "decode" or r["height"] <= 1024]
        most = max(map(constant, rows))
        assert most <= int(least) < most + 1
    (factor,) = re.findall(r"multiply by ([\d.]+) to be safe", text)
    assert float(factor) == pytest.approx(max(map(ratio, table)), abs=0.01) and float(factor) >= max(map(ratio, table))
    mean = statistics.mean(map(ratio, table))
    assert f"too little for {sum(ratio(row) > mean for row in table)} of 98 rows" in text


def test_estimated_rows_of_the_engine():
    table = estimate_sweep(["sdxl", "flux"])
    made = report(table, plots=False)
    assert "estimated (" in made.markdown and "vaemem (" in made.markdown


def test_measured_and_predicted_rows_stay_apart(table):
    predicted = Table(row | {"source": "predicted"} for row in table.filter(model="sdxl"))
    made = report(table.filter(model="sdxl") + predicted, plots=False)
    assert "### sdxl (measured)" in made.markdown and "### sdxl (predicted)" in made.markdown
    assert len(cells(section(made.markdown, "Formulas"))) == 1 + 2 * 4


def test_rows_that_lack_much():
    bare = {"model": "my vae", "op": "decode", "height": 512, "width": 512}
    made = report(Table([bare, bare | {"allocated_bytes": 5 * MIB, "dtype": "float32", "height": 1024}]), plots=False)
    assert "5.00" in made.markdown and "Device: not said (2 rows)" in made.markdown
    with refused("table"):
        report(Table([{"model": "sdxl"}]))


@pytest.mark.parametrize("op", ["encode", "decode"])
def test_rows_in_tiles_without_a_whole_image_that_was_reserved(op):
    """Only the row in tiles has reserved bytes."""
    shared = {"model": "sdxl", "op": op, "dtype": "float16", "runtime": "diffusers"}
    whole = shared | {"height": 512, "width": 512, "allocated_bytes": 100 << 20}
    tiled = shared | {"height": 2048, "width": 2048, "allocated_bytes": 101 << 20, "reserved_bytes": 200 << 20}
    assert "1 row ran in tiles" in report(Table([whole, tiled | {"tile": 512}]), plots=False).markdown
    assert "ran in tiles" not in report(Table([whole, tiled]), plots=False).markdown


@pytest.mark.parametrize("sweep", [estimate_sweep, predict_sweep])
def test_small_images_ran_whole_whatever_they_take(sweep):
    """What a small run takes may hardly grow: the engine's 192x192 takes 1.2 times its 128x128."""
    rows = sweep("sd15", "encode", [64, 96, 128, 192])
    made = report(rows, plots=False)
    assert "ran in tiles" not in made.markdown and made.comparison is not None and not made.comparison.left_out


def test_a_table_whose_rows_all_ran_in_tiles(table):
    made = report(Table(row | {"tile": 256, "tile_overlap": 0.25} for row in table), plots=False)
    assert "**80 rows ran in tiles although the op does not say so**" in made.markdown


def test_the_shipped_table_names_its_card(tmp_path, capsys):
    from vaemem.__main__ import main

    path = resources.files("vaemem") / "data" / "seed_table.csv"
    assert main(["report", str(path), "--no-plots", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "**8 rows ran in tiles although the op does not say so**" in text


def test_names_are_text_in_html():
    rows = [{"model": "<script>x</script>", "op": "a|b", "height": s, "width": s, "dtype": "float32",
             "allocated_bytes": s * s, "reserved_bytes": s * s} for s in (64, 128)]  # fmt: skip
    made = report(Table(rows), plots=False, title="<b>")
    assert "<script>" not in made.html and "&lt;script&gt;" in made.html and "<title>&lt;b&gt;" in made.html


def test_files(table, tmp_path):
    pytest.importorskip("matplotlib")
    made = report(table, tmp_path / "all")
    written = {path.name for path in (tmp_path / "all").iterdir()}
    assert written == {"report.md", "report.html", "memory.png", "constants.png", "estimators.png"}
    text = (tmp_path / "all" / "report.md").read_text("utf-8")
    assert text == made.markdown == str(made)
    assert set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)) == {name for name in written if name.endswith(".png")}
    page = (tmp_path / "all" / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 3 and 'src="http' not in page
    # Every table of the Markdown is in the HTML, with as many lines.
    rules = [line for line in text.splitlines() if re.fullmatch(r"\| [-:| ]+\|", line)]
    lines = sum(line.startswith("|") for line in text.splitlines())
    assert page.count("<table>") == len(rules) and page.count("<tr>") == lines - len(rules)
    report(table, tmp_path / "one.md", html=False, plots=False)
    assert not (tmp_path / "one.html").exists()
    report(table, tmp_path / "one.md", html=tmp_path / "x" / "two.html", plots=False)
    assert (tmp_path / "x" / "two.html").read_text("utf-8").startswith("<!doctype html>")


def test_without_matplotlib_it_says_so(table, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused(kind=ImportError, packages=("matplotlib",), install="pip install 'vaemem[plot]'"):
        report(table)


def test_without_scipy_the_safe_line_is_said_to_be_missing(table, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "scipy" else find_spec(name, *a))
    text = report(table, plots=False).markdown
    assert "pip install 'vaemem[fit]'" in text and "safe a" not in text


def test_command_line(table, tmp_path, capsys):
    from vaemem.__main__ import main

    table.to_csv(tmp_path / "table.csv")
    assert main(["report", str(tmp_path / "table.csv"), "--out", str(tmp_path / "out"), "--no-plots"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in ("report.md", "report.html")]
