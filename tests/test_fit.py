"""The fit: recovers lines, agrees with other implementations, says what it leaves unexplained, draws itself."""

import io
import itertools
import json
import math

import numpy as np
import pytest
from errors import refused

from vaemem import Table, fit, seed_table
from vaemem.tables.fit import Fit

pytestmark = pytest.mark.python

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def row(size, value, dtype="float32", target="allocated_bytes", **other):
    height, width = size if isinstance(size, tuple) else (size, size)
    key = {"model": "sdxl", "op": "decode", "height": height, "width": width, "dtype": dtype}
    return key | {target: value} | other


def line(a, b, sizes=((256, 256), (512, 512), (512, 768), (1024, 1024)), dtypes=("float32",), **other):
    return Table([row((h, w), round(a * h * w * BYTES[d] + b), d, **other) for d in dtypes for h, w in sizes])


def noisy(n=12, **other):
    """A line with noise of a tenth: what a fit has to work on."""
    rng = np.random.default_rng(0)
    sides = 64 * rng.integers(2, 20, size=n)
    return Table([row(int(s), int(400 * s * s * 4 * (1 + 0.1 * rng.standard_normal()) + 1e6), **other) for s in sides])


def points(table, target="allocated_bytes"):
    x = np.array([r["height"] * r["width"] * BYTES[r["dtype"]] for r in table], dtype=float)
    return x, np.array([r[target] for r in table], dtype=float)


def test_a_line_is_found_again():
    table = line(392.0, 5_000_000, dtypes=("float32", "float16"))
    assert [(one.dtype, one.name) for one in fit(table)] == [
        ("float32", "sdxl decode float32"), ("float16", "sdxl decode float16"),
    ]  # fmt: skip
    (formula,) = fit(table, by=("model", "op"))
    assert formula.dtype is None and formula.name == "sdxl decode"
    # 8 rows of whole numbers: only the rounding of float64 sums is left, far below a byte in a and a few in b.
    assert formula.a == pytest.approx(392, rel=1e-12) and formula.b == pytest.approx(5e6, rel=1e-9)
    assert formula.r2 == pytest.approx(1, abs=1e-12) and formula.n == 8
    assert formula.max_over < 1e-9 and formula.max_under < 1e-9
    assert formula.predict(2048, 2048, "float16") == 392 * 2048 * 2048 * 2 + 5_000_000


def test_least_squares_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    table = noisy()
    want = stats.linregress(*points(table))
    (formula,) = fit(table)
    # The same sums in another order: float64 rounding times the condition of the sizes, below 1e-9.
    assert formula.a == pytest.approx(want.slope, rel=1e-9) and formula.b == pytest.approx(want.intercept, rel=1e-6)
    assert formula.a_error == pytest.approx(want.stderr, rel=1e-9)
    assert formula.b_error == pytest.approx(want.intercept_stderr, rel=1e-9)
    assert formula.r2 == pytest.approx(want.rvalue**2, rel=1e-9)


def test_residuals_and_errors_are_those_of_the_rows():
    table = noisy()
    (formula,) = fit(table)
    x, y = points(table)
    fitted = formula.a * x + formula.b
    np.testing.assert_allclose([r.residual for r in formula.rows], y - fitted, rtol=1e-9)
    assert sum(r.residual for r in formula.rows) == pytest.approx(0, abs=1e-6 * y.max())
    assert formula.max_over == pytest.approx((fitted / y - 1).max()) and formula.max_over > 0
    assert formula.max_under == pytest.approx((1 - fitted / y).max()) and formula.max_under > 0
    assert [r.constant for r in formula.rows] == pytest.approx(list(y / x))


def test_the_constant_that_people_ship():
    """1068 MiB at 512x512 in half precision: the constant 2136 of the published report."""
    table = Table([row(512, 1068 * 2**20, "float16"), row(768, 2376 * 2**20, "float16")])
    (formula,) = fit(table)
    assert [r.constant for r in formula.rows] == [2136, 2112]
    assert (formula.constant_median, formula.constant_max) == (2124, 2136)
    assert " 2136\n" in str(formula) and " 2112\n" in str(formula)
    assert json.loads(formula.to_json())["constant_max"] == 2136


def test_published_half_precision_decode_is_8_5_activations():
    text = "model,op,height,width,dtype,allocated_mib,reserved_mib,time_s,group\n" + "".join(
        f"FLUX,decode,{side},{side},float16,{mib},,,1\n"
        for side, mib in ((512, 546.12), (768, 1226.28), (1024, 2178.50), (1536, 4900.00), (2048, 8708.00))
    )
    (formula,) = fit(Table.from_csv(io.StringIO(text)))
    assert formula.a / 128 == pytest.approx(8.5, rel=1e-3)  # blocks that are not split make steps of up to 1 MiB
    assert formula.max_over < 0.001 and formula.max_under < 0.001


def test_one_formula_for_each_model_op_runtime_device_and_batch():
    sizes = ((64, 64), (128, 128))
    table = (
        line(1, 0, sizes, runtime="bfl") + line(2, 0, sizes, runtime="diffusers") + line(3, 0, sizes, batch=2)
        + Table([r | {"op": "encode"} for r in line(4, 0, sizes)]) + line(5, 0, sizes, device="cpu")
    )  # fmt: skip
    found = fit(table)
    assert [round(f.a) for f in found] == [1, 2, 3, 4, 5]
    assert found[0].name == "sdxl decode bfl - -" and found[2].name == "sdxl decode - - batch 2"
    assert found.find(op="encode").a == pytest.approx(4)
    assert found.predict(64, 64, "float32", runtime="diffusers") == 2 * 64 * 64 * 4
    with refused("key"):
        found.predict(64, 64, op="decode")
    with refused("key"):
        found.find(model="flux")
    with refused("key", "source"):
        found.find(source="measured")
    (pooled,) = fit(table.filter(op="decode"), by="model")
    assert (pooled.model, pooled.op, pooled.runtime, pooled.device) == ("sdxl", "decode", None, None)


@pytest.mark.parametrize(
    ("table", "arguments", "message"),
    [
        (Table(), {}, ("table", "none")),
        (line(1, 0), {"target": "model"}, ("target", "'model'")),
        (line(1, 0), {"target": "seconds"}, ("table", "none", "row 0")),
        (Table([row(512, 1) | {"height": None}]), {}, ("table", "none", "row 0")),
        (Table([row(512, 1)]), {}, ("sdxl decode",)),
        (Table([row(512, 1), row(512, 2), row((256, 1024), 3)]), {}, ("sdxl decode",)),
        (Table([row(512, 1, "int8"), row(256, 2, "int8")]), {}, ("dtype", "'int8'")),
        (line(1, 0), {"quantile": 0}, ("quantile",)),
        (line(1, 0), {"quantile": 1.1}, ("quantile",)),
        (line(1, 0), {"quantile": "high"}, ("quantile", "'high'")),
        (line(1, 0), {"quantile": math.nan}, ("quantile",)),
    ],
)
def test_what_cannot_be_fitted_is_named(table, arguments, message):
    with refused(*message):
        fit(table, **arguments)


def test_tiles_have_formulas_of_their_own():
    """Of the published encodes those that ran in tiles, and of tiled runs each side and overlap; what one tile holds is
    a run of a whole image."""
    found = fit(seed_table().filter(model="sdxl", op="encode"))
    assert all(formula.a > 0 and max(formula.max_over, formula.max_under) < 0.0002 for formula in found)
    assert [(one.name, one.n, round(one.a / 128, 3), one.tile) for one in found] == [
        ("sdxl encode float16", 3, 6.0, None), ("sdxl encode_tiled float16", 2, 0.002, 512),
        ("sdxl encode float32", 3, 5.0, None), ("sdxl encode_tiled float32", 2, 0.002, 512),
    ]  # fmt: skip
    cut = [
        row(side, 1000 * tile + side, op="decode_tiled", tile=tile, tile_overlap=part)
        for tile in (512, 1024)
        for part in (0.25, 0.5)
        for side in (512, 1024, 2048)
    ]
    found = fit(Table([*cut, *line(9, 0)]))
    assert [(one.name, one.n) for one in found] == [
        ("sdxl decode", 10), ("sdxl decode_tiled overlap 0.25", 2),
        ("sdxl decode_tiled overlap 0.5", 2),
    ]  # fmt: skip
    assert [(r["height"], r["tile"]) for r in found.left_out] == [(2048, 1024)] * 2
    assert "Rows left out: 2 in groups with one size (sdxl decode_tiled 2048x2048 float32)." in found.to_text(width=120)
    assert "Rows left out" in found._repr_markdown_()
    assert found.find(tile_overlap=0.5).tile == 512
    assert [one.op for one in fit(Table([*cut, *line(9, 0)]), by=("model", "op"))] == ["decode", "decode_tiled"]


def test_rows_without_the_target_are_left_out():
    """PyTorch's on a CPU have no allocated bytes."""
    held = [row(side, None, runtime="diffusers", source="measured") | {"reserved_bytes": 1} for side in (64, 128)]
    found = fit(Table(held) + line(9, 0, runtime="vaemem"))
    assert [(one.runtime, one.n) for one in found] == [("vaemem", 4)] and len(found.left_out) == 2
    assert "Rows left out: 2 without allocated_bytes." in str(found)


def test_two_rows_have_no_standard_error_and_equal_rows_no_r2():
    (formula,) = fit(line(3, 7, ((64, 64), (128, 128))))
    assert (formula.a_error, formula.b_error) == (None, None) and "standard errors" not in str(formula)
    (flat,) = fit(line(0, 7))
    assert flat.r2 is None and flat.a == 0 and flat.b == 7


def test_nothing_measured_has_no_relative_error():
    found = fit(Table([row(64, 0, target="scratch_bytes"), row(128, 10, target="scratch_bytes")]), "scratch_bytes")
    assert found[0].rows[0].error is None
    json.loads(found.to_json())
    str(found)


def test_bad_predictions_are_named():
    (formula,) = fit(line(1, 0))
    with refused("height", 0):
        formula.predict(0, 512)
    with refused("width", "'512'"):
        formula.predict(512, "512")
    with refused("dtype", "'fp8'"):
        formula.predict(512, 512, "fp8")
    with refused("dtype", "'float16'"):
        formula.predict(512, 512, "float16")
    assert formula.predict(512, 512, "fp32") == formula.predict(512, 512)
    with refused("by", "'size'"):
        fit(line(1, 0), by=("model", "size"))


def test_seconds_are_not_rounded():
    table = Table([row(s, 1e-8 * s * s * 4 + 0.25, target="seconds") for s in (256, 512, 1024)])
    assert fit(table, "seconds")[0].predict(256, 256) == pytest.approx(0.25 + 1e-8 * 4 * 65536)


# ---- quantiles ----


def pinball(a, b, x, y, quantile):
    residual = y - (a * x + b)
    return np.where(residual > 0, quantile * residual, (quantile - 1) * residual).sum()


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_no_line_has_less_pinball_loss(quantile):
    pytest.importorskip("scipy")
    table = noisy(9)
    x, y = points(table)
    (formula,) = fit(table, quantile=quantile)
    # A best line goes through two of the points: try them all.
    pairs = [(i, j) for i, j in itertools.combinations(range(len(x)), 2) if x[i] != x[j]]
    lines = [((y[j] - y[i]) / (x[j] - x[i]), i) for i, j in pairs]
    best = min(pinball(a, y[i] - a * x[i], x, y, quantile) for a, i in lines)
    # The solver's tolerance is 1e-7 of the largest value; a loss sums 9 of them.
    assert pinball(formula.a, formula.b, x, y, quantile) == pytest.approx(best, rel=1e-6)
    assert formula.a_error is None and formula.r2 is None


def test_quantile_one_is_the_lowest_bound():
    pytest.importorskip("scipy")
    table = noisy()
    (formula,) = fit(table, quantile=1)
    assert formula.max_under == 0 and formula.max_over > 0
    assert all(formula.predict(r["height"], r["width"]) >= r["allocated_bytes"] for r in table)
    touching = sum(abs(r.residual) < 1e-6 * r.measured for r in formula.rows)
    assert touching >= 2, "a lower line would still be a bound"


# ---- what it prints ----


@pytest.mark.parametrize(("target", "quantile"), [("allocated_bytes", None), ("allocated_bytes", 1), ("seconds", None)])
def test_python_gives_what_predict_gives(target, quantile):
    if quantile:
        pytest.importorskip("scipy")
    rows = [row(s, v, d, target, model=m) for m in ("sd1-5", "2vae") for d in ("float32", "float16")
            for s, v in ((64, 123_456), (128, 456_789), (192, 999_999))]  # fmt: skip
    found = fit(Table(rows), target, quantile, by=("model", "op"))
    names: dict = {}
    exec(found.python(), names)
    for formula, name in zip(found, (f"sd1_5_decode_{target}", f"_2vae_decode_{target}"), strict=True):
        for dtype in ("float32", "bfloat16"):
            assert names[name](640, 512, BYTES[dtype]) == formula.predict(640, 512, dtype)


def test_latex():
    pytest.importorskip("matplotlib")
    from matplotlib.mathtext import MathTextParser

    text = fit(noisy(model="my_vae")).latex()
    assert r"my\_vae" in text
    MathTextParser("agg").parse(f"${text.replace('&', '')}$")  # raises if the text is no valid mathematics
    tiny = fit(Table([row(s, 1.5e-7 * s * s * 4, target="seconds") for s in (64, 128)]), "seconds").latex()
    assert r"1.5 \times 10^{-7}\,H W e" in tiny


def test_json_holds_everything():
    table = noisy()
    found = fit(table)
    read = json.loads(found.to_json())
    assert (read["target"], read["quantile"], len(read["formulas"])) == ("allocated_bytes", None, 1)
    formula = read["formulas"][0]
    assert formula == json.loads(found[0].to_json())
    assert formula["a"] == found[0].a and formula["max_over"] == found[0].max_over and formula["n"] == len(table)
    assert [r["measured"] for r in formula["rows"]] == [r["allocated_bytes"] for r in table]


def test_printing_shows_the_formula_and_every_row():
    text = str(fit(line(392, 5_000_000)))
    assert text.splitlines()[0] == "sdxl decode: allocated_bytes = 392 * H*W*e + 5000000"
    assert " 3.062500 ± " in text and "4 rows" in text
    assert max(map(len, fit(line(392, 5_000_000)).to_text(width=80).splitlines())) <= 80
    assert all(size in text for size in ("256x256", "512x512", "512x768", "1024x1024")) and "-0.00" not in text
    assert repr(fit(line(392, 5_000_000))) == text
    assert " * H*W*e - 16384\n" in str(fit(line(4, -16384)))
    two = fit(line(392, 5_000_000) + line(392, 5_000_000, op="encode"))
    assert str(two).startswith("allocated_bytes = a * H*W*e + b, with a and b for each of 2 formulas.")
    assert "512x768" in two.to_text(all=True) and "512x768" not in str(two)


def test_a_notebook_shows_the_equation_with_its_errors():
    found = fit(seed_table().filter(op="decode", dtype="float16", model=("sdxl", "flux")))
    assert found._repr_latex_().startswith("$$\\begin{aligned}\n") and "\\pm" in found._repr_latex_()
    text = found._repr_markdown_()
    for f in found:
        assert f.latex() in text and f"| {f.name}" in text and f"{f.r2:.6f}" in text
    assert " ± " in text and text.count("*") == text.count(r"\*"), "Markdown would take a bare star for emphasis"
    (one, _) = found
    assert repr(one) == str(one) and one.latex() in one._repr_markdown_()
    assert all(f" {row.height}x{row.width} |" in one._repr_markdown_() for row in one.rows)
    seconds = fit(seed_table().filter(op="decode", model="sdxl"), target="seconds")._repr_markdown_()
    assert "b, s" in seconds and "MiB" not in seconds
    two_rows = fit(line(392, 5_000_000, sizes=((256, 256), (512, 512))))
    assert " ± " not in two_rows._repr_markdown_() and r"\pm" not in two_rows._repr_latex_()


# ---- figures ----


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    from vaemem import plot

    return plot


def test_memory_vs_pixels(plot, tmp_path):
    measured = line(392, 5e6, source="measured") + Table([r | {"op": "encode"} for r in line(256, 1e6)])
    estimated = Table([r | {"source": "estimated"} for r in measured])
    found = fit(measured.filter(op="decode"))
    figure = plot.memory_vs_pixels(measured + estimated, found)
    decode, encode = figure.axes
    assert (decode.get_title(), encode.get_title()) == ("decode", "encode")
    labels = [text.get_text() for text in decode.get_legend().get_texts()]
    assert labels == ["sdxl float32, measured", "sdxl float32, estimated", "sdxl: 3.06 T +4.8 MiB"]
    dots = next(drawn for drawn in decode.lines if drawn.get_label() == labels[0])
    assert list(dots.get_ydata()) == [r["allocated_bytes"] for r in measured.filter(op="decode")]
    assert dots.get_ydata().max() < decode.get_ylim()[1], "nothing is cut off"
    figure.savefig(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_no_two_series_are_drawn_alike(plot):
    """Each card, batch and tile has a colour of its own, and each type of numbers a marker, predicted or measured."""
    kinds = [
        {"device": device, "dtype": dtype, "batch": batch, "source": source}
        for device in ("RTX 4090", "T4", "RTX 3060", "A100")
        for dtype in BYTES
        for batch in (1, 2)
        for source in ("measured", "predicted")
    ]
    whole = Table([row(side, 9 * side * side, **kind) for kind in kinds for side in (256, 512)])
    cut = {"device": "T4", "op": "decode_tiled", "source": "measured", "batch": 1, "tile_overlap": 0.25}
    tiled = Table([row(side, 9 * side, **cut, tile=tile) for tile in (256, 512) for side in (1024, 2048)])
    for axes, series in zip(plot.memory_vs_pixels(whole + tiled).axes, (len(kinds), 2), strict=True):
        drawn = [one for one in axes.lines if len(one.get_xdata())]
        looks = {(tuple(np.atleast_1d(one.get_color())), one.get_marker()) for one in drawn}
        assert len(drawn) == len(looks) == series
    assert "sdxl (A100, batch 2) bfloat16, measured" in [
        one.get_label() for one in plot.memory_vs_pixels(whole).axes[0].lines
    ]
    constants = plot.implied_constants(whole.filter(source="measured"), target="allocated_bytes").axes[0].lines
    assert len({(tuple(np.atleast_1d(one.get_color())), one.get_marker()) for one in constants}) == len(kinds) // 2


def test_a_legend_is_no_data(plot):
    """It lies outside the axes, so that no dot or line of it can be taken for a measurement."""
    measured = line(392, 5e6, source="measured")
    figures = (
        plot.memory_vs_pixels(measured, fit(measured)),
        plot.implied_constants(measured, {"decode": {"mine": 300}}, "allocated_bytes"),
    )
    for figure in figures:
        figure.canvas.draw()
        for axes in figure.axes:
            assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0


def test_series_that_coincide_are_both_seen(plot):
    one = line(392, 5e6, source="measured")
    both = one + Table([row | {"model": "flux"} for row in one])
    (axes,) = plot.memory_vs_pixels(both, fit(both)).axes
    dashed = [drawn for drawn in axes.lines if drawn.get_linestyle() == "--"]
    assert len(dashed) == 2 and dashed[0].get_color() != dashed[1].get_color()
    np.testing.assert_array_equal(dashed[0].get_ydata(), dashed[1].get_ydata())
    (first, gap), (second, _) = (drawn._unscaled_dash_pattern for drawn in dashed)
    assert (second - first) % sum(gap) == gap[0] == gap[1], "one's dashes fill the other's gaps"
    dots = [drawn for drawn in axes.lines if drawn.get_marker() == "o"]
    assert dots[0].get_markersize() > dots[1].get_markersize() and dots[0].zorder < dots[1].zorder


def test_rows_in_tiles_are_hollow(plot):
    rows = [row | {"source": "measured"} for row in line(392, 0)]
    biggest = max(rows, key=lambda row: row["height"] * row["width"])
    tiled = Table([row | ({"tile": 512} if row is biggest else {}) for row in rows])
    for figure in (plot.memory_vs_pixels(tiled), plot.implied_constants(tiled, target="allocated_bytes")):
        (axes,) = figure.axes
        dots = {drawn.get_fillstyle(): drawn for drawn in axes.lines if len(drawn.get_xdata())}
        assert list(dots["none"].get_xdata()) == [biggest["height"] * biggest["width"] / 1e6]
        assert len(dots["full"].get_xdata()) == len(rows) - 1
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels[-1] == "hollow: in tiles" and len(labels) == 2
        assert "hollow: in tiles" not in [
            text.get_text() for text in plot.memory_vs_pixels(Table(rows)).axes[0].get_legend().get_texts()
        ]


def test_a_notebook_shows_a_figure_without_being_told(plot):
    data, metadata = plot.memory_vs_pixels(line(392, 5e6))._repr_mimebundle_(include=None, exclude=None)
    png, shown = data["image/png"], metadata["image/png"]
    assert png.startswith(b"\x89PNG")
    assert 1.5 < int.from_bytes(png[16:20], "big") / shown["width"] < 2, "pixels for sharp screens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Table(),), ("table", "none")),
        ((line(1, 0), None, "seconds"), ("target", "'seconds'")),
        ((line(1, 0), Fit("reserved_bytes", None, ())), ("fit",)),
    ],
)
def test_what_cannot_be_drawn_is_named(plot, arguments, message):
    with refused(*message):
        plot.memory_vs_pixels(*arguments)
