"""The shipped estimators and their errors; what compare takes, leaves out and refuses."""

import functools
import math
from types import SimpleNamespace

import pytest
from errors import refused

from vaemem import Table, fit
from vaemem.tables.estimators import ESTIMATORS, Comparison, compare, sd15_equation

pytestmark = pytest.mark.python

MIB = 2**20


def row(op="decode", side=1024, dtype="float16", reserved=4274 * MIB, **other):
    key = {"model": "sdxl", "op": op, "height": side, "width": side, "dtype": dtype, "batch": 1}
    return key | {"allocated_bytes": reserved // 2, "reserved_bytes": reserved} | other


def estimate(name, **case):
    return ESTIMATORS[name](Table([row(**case)])[0])


PIXELS = 1024 * 1024
TILED = {"op": "decode_tiled", "tile": 512}
SDXL_INPUTS = 4 * 4 * 128 * 128 + 2 * 128  # bytes: the latent, and two numbers that each graph of sd.cpp holds


@pytest.mark.parametrize(
    ("name", "case", "want"),
    [
        ("comfyui", {}, 2178 * PIXELS * 2),
        ("comfyui", {"dtype": "float32", "model": "flux"}, 2178 * PIXELS * 4),
        ("comfyui", {"op": "encode", "dtype": "bfloat16"}, 1767 * PIXELS * 2),
        ("comfyui", TILED, 2178 * 512 * 512 * 2),
        ("comfyui", TILED | {"tile": 768, "width": 640}, 2178 * 768 * 640 * 2),
        ("comfyui", TILED | {"tile": None}, None),
        ("comfyui", TILED | {"op": "encode_tiled"}, None),  # it asks for the whole image
        ("comfyui", {"model": "wan2.2"}, 8000 * PIXELS * 2),
        ("invokeai", {"model": "qwen-image", "op": "encode"}, 1600 * PIXELS * 2),
        ("comfyui", {"model": "wan2.1", "op": "encode"}, 1500 * PIXELS * 2),
        ("invokeai", {"model": "wan2.1"}, 2906 * PIXELS * 2),
        ("invokeai", TILED | {"model": "wan2.2", "op": "encode_tiled"}, (1450 * 1.25 * 512**2 + 3 * PIXELS) * 2),
        ("invokeai", TILED | {"op": "encode_tiled", "dtype": "float32"}, 512**2 * 4 * 1100 * 1.25 + 250 * MIB),
        ("invokeai", {"model": "flux2"}, None),
        ("invokeai", TILED | {"model": "sd3", "op": "encode_tiled"}, None),
        ("comfyui", {"batch": 3}, 3 * 2178 * PIXELS * 2),
        ("invokeai", {}, 2200 * PIXELS * 2),
        ("invokeai", {"op": "encode"}, 1100 * PIXELS * 2),
        ("invokeai", {"dtype": "float32"}, 2200 * PIXELS * 4 + 250 * MIB),
        ("invokeai", {"dtype": "float32", "model": "flux"}, 2200 * PIXELS * 4),
        ("invokeai", TILED, 512 * 512 * 2 * 2200 * 1.25),
        ("invokeai", TILED | {"tile": 256}, 256 * 256 * 2 * 2200 * 1.25),
        ("invokeai", TILED | {"tile": None}, None),
        ("invokeai", TILED | {"model": "flux"}, None),
        ("invokeai", {"batch": 2}, None),
        ("sd15-equation", {"model": "sd15"}, None),
        ("sd15-equation", {"model": "sdxl", "op": "pipeline"}, None),
        ("sd15-equation", {"model": "sd15", "op": "pipeline", "dtype": "float32"}, None),
        ("mlx-im2col", {}, 1152 * PIXELS * 2),
        ("mlx-im2col", {"op": "encode"}, None),
        ("sd.cpp-im2col", {"dtype": "float32"}, 6656 * PIXELS + SDXL_INPUTS),  # 6656.25 MB, as its log says
        ("sd.cpp-im2col", {"op": "encode"}, 3382 * PIXELS + 12 * PIXELS + 256),
        ("sd.cpp-direct", {}, 2816 * PIXELS + SDXL_INPUTS),
        ("sd.cpp-direct", TILED | {"model": "sd3"}, None),
        ("sd.cpp-direct", {"batch": 2}, None),
        ("sd.cpp-direct", {"height": 1004}, None),
        ("comfyui", {"dtype": "int8"}, None),
        ("comfyui", {"op": "upscale"}, None),
    ],
)
def test_what_each_says(name, case, want):
    assert estimate(name, **case) == want


@pytest.mark.parametrize(
    ("name", "model", "op", "dtype", "want"),
    [
        ("comfyui", "sdxl", "decode", "bfloat16", 7682171904),
        ("comfyui", "flux2", "decode", "float16", 7682171904),
        ("comfyui", "flux2-small", "encode", "float16", 6232505856),
        ("comfyui", "qwen-image", "decode", "bfloat16", 7759769600),
        ("comfyui", "qwen-image", "encode", "float32", 10581504000),
        ("comfyui", "wan2.2", "encode", "float16", 11639654400),
        ("invokeai", "sd15", "decode_tiled", "float32", 3145728000),
        ("invokeai", "zimage", "encode", "bfloat16", 3879884800),
        ("invokeai", "cogview4", "decode", "float32", 15519539200),
        ("invokeai", "qwen-image", "decode", "float16", 10228787200),
        ("invokeai", "qwen-image", "decode_tiled", "bfloat16", 1953451520),
        ("invokeai", "qwen-image", "encode_tiled", "float16", 1059157504),
    ],
)
def test_equal_what_the_programs_own_functions_said(name, model, op, dtype, want):
    """At 1328x1328, on a CPU: the lambdas of ComfyUI's class VAE (v0.19.3, 2026-04-19; v0.38.1 reads the same), made
    from weights of each kind, and InvokeAI's vae_working_memory.py (8e71a8a, 2026-08-19), with tiles of 512."""
    tile = 512 if op.endswith("_tiled") else None
    assert int(estimate(name, model=model, op=op, dtype=dtype, side=1328, tile=tile)) == want


def test_the_whole_equation_for_sd15():
    """Term by term as its Python says them, 745 channels and all: 2.40 GiB at 512x512 with 77 tokens."""

    def said(h, w, tokens):
        vae = h * w * 3 * 2 + h * w * 3 * 2 * 3 + (h // 8) * (w // 8) * 4 * 2
        unet = (h // 8) * (w // 8) * 745 * 2 * 3 + (h // 8) * (w // 8) * tokens * 2
        return (2 * 1_066_235_307 + max(vae, unet)) * 1.2

    for h, w, tokens in ((512, 512, 77), (768, 512, 10), (1024, 1024, 231)):
        terms = sd15_equation(h, w, tokens)
        assert terms["total"] == pytest.approx(said(h, w, tokens))
        assert max(terms, key=lambda name: terms[name] * (name in ("encode image", "denoise", "decode"))) == "denoise"
        case = row(model="sd15", op="pipeline", height=h, width=w)
        assert ESTIMATORS["sd15-equation"](case | {"tokens": tokens}) == terms["total"]
    assert round(sd15_equation(512, 512)["total"] / 2**30, 2) == 2.40
    assert ESTIMATORS["sd15-equation"](Table([row(model="sd15", op="pipeline", side=512)])[0]) / 2**30 < 2.41
    with refused("prompt_tokens", 0):
        sd15_equation(512, 512, 0)


def test_sd_cpp_is_what_attention_takes_in_large_images():
    """Of 2048x2048 the scores alone are 4096 H W bytes, more than all else where convolutions are direct."""
    assert estimate("sd.cpp-direct", side=2048) // (4 * PIXELS) == 4096 + 160
    assert estimate("sd.cpp-im2col", side=2048) // (4 * PIXELS) == 6656
    assert estimate("sd.cpp-im2col", side=4096) // (16 * PIXELS) == 16384 + 160


def test_the_note_on_mlx_gives_its_own_example():
    """7.6 GiB in bf16 and 15.2 in float32 for 1536x2304, as the note has it (one decimal)."""
    for dtype, gib in (("bfloat16", 7.6), ("float32", 15.2)):
        case = Table([row(dtype=dtype, height=1536, width=2304)])[0]
        assert round(ESTIMATORS["mlx-im2col"](case) / 2**30, 1) == gib


def test_every_estimator_names_its_source():
    assert all(e.name == name and e.source and e.formula for name, e in ESTIMATORS.items())


def test_errors_are_those_of_the_rows():
    table = Table([row(side=s, reserved=m * MIB) for s, m in ((512, 1000), (768, 2500), (1024, 4400))])
    comparison = compare(table, ["comfyui"])
    want = [1089 / 1000 - 1, 2450.25 / 2500 - 1, 4356 / 4400 - 1]
    assert [r.error for r in comparison.rows] == pytest.approx(want)
    for found in (comparison.find("comfyui", "sdxl", "decode", "float16"), comparison.find("comfyui")):
        assert found.rows == 3 and found.median == pytest.approx(4356 / 4400 - 1)
        assert (found.worst_over, found.worst_under) == pytest.approx((0.089, 0.0199))
        assert (found.lowest, found.highest) == pytest.approx((-0.0199, 0.089))
    with refused("estimator", "'invokeai'"):
        comparison.find("invokeai")
    assert compare(table, "comfyui", "allocated_bytes").find("comfyui").median > 0.9


def test_an_estimator_that_is_never_too_little_has_no_worst_under():
    found = compare(Table([row(reserved=100)]), "comfyui").find("comfyui")
    assert found.worst_under == 0 and found.worst_over == found.lowest == found.highest


def test_fits_formulas_functions_and_predictions():
    table = Table([row(side=s, reserved=2000 * s * s * 2 + MIB) for s in (512, 768, 1024)])
    fitted = fit(table, "reserved_bytes")

    def twice(r):
        return 2 * r["reserved_bytes"] if r["height"] > 512 else None

    comparison = compare(table, {"fit": fitted, "formula": fitted[0], "twice": twice, "shipped": "comfyui"})
    assert comparison.find("fit").worst_over < 1e-9 and comparison.find("formula").worst_under < 1e-9
    assert (comparison.find("twice").rows, comparison.find("twice").median) == (2, 1)
    assert comparison.find("shipped").rows == 3
    # Not fitted to: another dtype, another model.
    others = Table([row(dtype="float32"), row(model="flux")])
    with refused("estimators", "fit"):
        compare(others, fitted)


def test_what_has_the_arguments_of_predict_is_asked_as_predict():
    asked = []

    def predict(model, op, height, width, dtype="float16", batch=1, runtime=None, gpu="RTX 4090"):
        asked.append((model, op, height, width, dtype, batch, runtime, gpu))
        return SimpleNamespace(allocated=100, reserved=300)

    rows = Table([row(reserved=200, device="T4", runtime="diffusers"), row(runtime="vaemem"), row(reserved=200)])
    comparison = compare(rows, predict)
    assert asked == [
        ("sdxl", "decode", 1024, 1024, "float16", 1, "diffusers", "T4"),
        ("sdxl", "decode", 1024, 1024, "float16", 1, None, "RTX 4090"),
    ]  # the engine's own row is not PyTorch's to predict
    assert comparison.find("predict").median == pytest.approx(0.5)
    assert compare(rows, predict, "allocated_bytes").find("predict").median == pytest.approx(0)
    compare(rows[:1], functools.partial(predict, gpu="A100"))
    assert asked[-1][-1] == "A100", "what a partial binds stays"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Table(),), ("table", "none")),
        ((Table([row()]), None, "seconds"), ("target", "'seconds'")),
        ((Table([row()]), "forge"), ("estimator", "'forge'")),
        ((Table([row()]), 5), ("estimator", "int")),
        ((Table([row()]), [3]), ("estimator", "int")),
        ((Table([row(), row() | {"dtype": None}]),), ("table", "none", "row 1")),
        ((Table([row(reserved=0)]),), ("table", 0, "row 0: reserved_bytes")),
        ((Table([row() | {"reserved_bytes": None}]),), ("table", "none", "row 0")),
        ((Table([row()]), ["comfyui", "comfyui"]), ("estimators",)),
        ((Table([row()]), {"mine": lambda r: math.nan}), ("estimator 'mine'", "nan")),
        ((Table([row()]), {"mine": lambda r: "many"}), ("estimator 'mine'", "'many'")),
        ((Table([row()]), fit(Table([row(), row(side=512, reserved=9)]), "allocated_bytes")), ("fit",)),
    ],
)
def test_what_cannot_be_compared_is_named(arguments, message):
    with refused(*message):
        compare(*arguments)


def encode(sizes, **other):
    return Table([row(op="encode", side=s, reserved=2 * mib * MIB, **other) for s, mib in sizes])


def test_rows_that_ran_tiled_are_left_out_and_said():
    comparison = compare(encode([(512, 384)]) + encode([(1536, 385)], tile=512), "comfyui")
    assert len(comparison.rows) == 1 and comparison.left_out[0]["height"] == 1536
    assert "Left out, because they ran in tiles: 1 row (sdxl encode 1536x1536)." in str(comparison)
    assert not compare(encode([(512, 384), (1536, 385)]), "comfyui").left_out, "whole, whatever they take"


def test_tiles_are_compared_with_their_like():
    """Errors are summed up for each tile side. Estimators for whole images do not judge runs in tiles."""
    cut = [
        row("decode_tiled", side, reserved=9 * tile * tile, tile=tile, tile_overlap=0.25, runtime="diffusers")
        for tile in (512, 1024)
        for side in (1024, 2048)
    ]
    table = Table([row(reserved=9 * 2**20), *cut])
    comparison = compare(table, ["comfyui", "mlx-im2col", "sd.cpp-direct"])
    assert comparison.find("comfyui", "sdxl", "decode_tiled", "float16", 512).rows == 2
    assert comparison.find("comfyui", "sdxl", "decode_tiled", "float16", 1024, 0.25).rows == 1
    assert comparison.find("comfyui", "sdxl", "decode", "float16").rows == 2, "a tile of 1024 holds 1024x1024"
    with refused("tile", "None", names=["512", "tile_overlap", "0.25"]):
        comparison.find("comfyui", "sdxl", "decode_tiled", "float16")
    for name in ("mlx-im2col", "sd.cpp-direct"):
        assert comparison.find(name).rows == 2
    header, lines = comparison.grid()
    assert header[3:6] == ["tile", "overlap", "rows"]
    assert [line[3:6] for line in lines[1:3]] == [["512", "0.25", "2"], ["1024", "0.25", "1"]]
    text = comparison.to_text(all=True)
    (line,) = [line.split() for line in text.splitlines() if "2048x2048" in line and " 512 " in line]
    assert line[:6] == ["sdxl", "decode_tiled", "2048x2048", "float16", "512", "0.25"]
    asked = []

    def predict(model, op, height, width, dtype, tile=1, tile_overlap=1):
        asked.append((op, height, tile, tile_overlap))
        return SimpleNamespace(reserved=1)

    compare(Table([*cut, cut[0] | {"tile": None}]), predict)
    assert asked == [
        ("decode_tiled", 1024, 512, 0.25), ("decode_tiled", 2048, 512, 0.25), ("decode", 1024, 1, 1),
        ("decode_tiled", 2048, 1024, 0.25),
    ]  # fmt: skip


def test_printing():
    table = Table([row(), row(op="encode", reserved=2118 * MIB), row(dtype="float32", reserved=5686 * MIB)])
    comparison = compare(table)
    assert isinstance(comparison, Comparison)
    assert str(comparison).startswith("invokeai is nearest to reserved_bytes on 3 rows: its median error is +3.9%.")
    assert max(map(len, comparison.to_text(width=80).splitlines())) <= 80
    every = comparison.to_text(all=True)
    assert "4356.00 (+1.9)" in every and "4356.00" not in str(comparison)
    header = ["model", "op", "dtype", "rows", "comfyui", "invokeai", "mlx-im2col", "sd.cpp-im2col", "sd.cpp-direct"]
    assert header in [line.split() for line in every.splitlines()]
    assert "| sdxl " in comparison.to_markdown() and ">sdxl</td>" in comparison._repr_html_()


def test_data_frames():
    pytest.importorskip("pandas")
    comparison = compare(Table([row(), row(side=512, reserved=1088 * MIB)]), ["comfyui", "invokeai"])
    groups, rows = comparison.to_pandas(), comparison.to_pandas(rows=True)
    assert list(groups["estimator"]) == ["comfyui", "comfyui", "invokeai", "invokeai"]
    assert len(rows) == 4 and rows["error"][0] == pytest.approx(4356 / 4274 - 1)


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    from vaemem import plot

    table = Table([row(), row(side=512, reserved=1088 * MIB)])
    figure = plot.estimator_errors(compare(table))
    dots = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines}
    median = compare(table).find("comfyui", "sdxl", "decode", "float16").median
    assert dots["comfyui"] == [pytest.approx(1 + median)]
    figure.savefig(tmp_path / "errors.png")
    with refused("comparison"):
        plot.estimator_errors(compare(table, {"nothing": lambda r: 0}))
    with refused("comparison", "Table", names=["vaemem.compare"]):
        plot.estimator_errors(table)
    (axes,) = plot.implied_constants(table, {"decode": {"mine": 2200}}).axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([2137, 2176])
    with refused("table", names=["reserved_bytes"]):
        plot.implied_constants(Table())
    with refused("target", "'memory'", names=["allocated_bytes"]):
        plot.implied_constants(table, target="memory")


def test_command_line(tmp_path, capsys):
    from vaemem.__main__ import main

    path = tmp_path / "table.csv"
    Table([row()]).to_csv(path)
    assert main(["compare", str(path)]) == 0
    assert "+1.9 (+1.9..+1.9)" in capsys.readouterr().out
    assert main(["compare", str(path), "--all", "--format", "markdown"]) == 0
    assert "4356.00 (+1.9)" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "none.csv")]) == 2
