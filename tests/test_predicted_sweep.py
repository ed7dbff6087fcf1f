"""Predicted rows: what `predict` says, in the table that fit, compare, report and plot read."""

import functools
import io
import json

import pytest
from errors import refused

import vaemem
from vaemem import VAE, Table, compare, fit, predict, predict_pipeline, predict_sweep, report, seed_table
from vaemem.__main__ import main
from vaemem.engine.configs import config_of, known_arch
from vaemem.tables.estimators import sd15_equation

pytestmark = pytest.mark.python

CARDS = ["RTX 4090", "RTX 3060"]


@pytest.fixture(scope="module")
def table():
    sizes = [512, (512, 768), 1024]
    return predict_sweep(["sdxl", "flux"], ["encode", "decode"], sizes, ["float16", "float32"], gpu=CARDS)


def test_rows_are_what_predict_says(table):
    assert len(table) == 2 * 2 * 3 * 2 * 2 and {row["source"] for row in table} == {"predicted"}
    asked = [(m, op, h, w, dtype, gpu) for m in ("sdxl", "flux") for gpu in CARDS for dtype in ("float16", "float32")
             for op in ("encode", "decode") for h, w in ((512, 512), (512, 768), (1024, 1024))]  # fmt: skip
    for row, (model, op, height, width, dtype, gpu) in zip(table, asked, strict=True):
        p = predict(model, op, height, width, dtype, gpu=gpu, runtime=row["runtime"])
        assert (row["allocated_bytes"], row["reserved_bytes"]) == (p.allocated, p.reserved)
        assert (row["model"], row["op"], row["height"], row["width"]) == (model, op, height, width)
        assert (row["dtype"], row["batch"], row["runtime"], row["device"]) == (dtype, 1, p.runtime, p.gpu)
        assert row["versions"].startswith("torch 2.7.1+cu128, cudnn 9.7.1") and row["seconds_low"] < row["seconds"]
        assert all(text in row["versions"] for text in p.substitutions)
        (weights,) = (tensor.bytes for tensor in p.peak_tensors if tensor.name.startswith("weights of"))
        assert row["weights_bytes"] == weights


def test_what_predict_takes_is_handed_on():
    asked = {"gpu": "RTX 4060", "batch": 2, "runtime": "comfyui", "tile": 256, "torch_version": "2.6.0+cu124"}
    (row,) = predict_sweep("sdxl", "decode_tiled", 1024, "float16", **asked)
    p = predict("sdxl", "decode_tiled", 1024, 1024, "float16", **asked)
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (p.allocated, p.reserved)
    assert (row["batch"], row["runtime"], row["op"]) == (2, "comfyui", "decode_tiled")
    assert row["versions"].startswith("torch 2.6.0+cu124, cudnn 9.1.0")


def test_tiles_and_overlaps_are_swept():
    cut = {"tile": [512, 1024], "tile_overlap": [0.25, 0.5]}
    rows = predict_sweep("sdxl", ["decode", "decode_tiled"], [1024, 1536, 2048], "float16", **cut)
    assert [(row["op"], row["height"], row["tile"], row["tile_overlap"]) for row in rows] == [
        *(("decode", side, None, None) for side in (1024, 1536, 2048)),
        *(
            ("decode_tiled", side, tile, part)
            for side in (1024, 1536, 2048)
            for tile in (512, 1024)
            for part in (0.25, 0.5)
        ),
    ]
    for row in rows.filter(op="decode_tiled", height=2048):
        p = predict("sdxl", "decode_tiled", 2048, 2048, "float16", tile=row["tile"], tile_overlap=row["tile_overlap"])
        assert (row["allocated_bytes"], row["reserved_bytes"]) == (p.allocated, p.reserved)
    found = fit(rows)
    assert [one.n for one in found] == [3 + 2, 3, 3, 2, 2], "an image of one tile is a whole one"
    assert all(one.r2 > 0.9 for one in found)
    same = compare(rows, predict).find("predict")
    assert same.rows == len(rows) and same.worst_over == same.worst_under == 0
    markdown = report(rows, plots=False).markdown
    assert "### sdxl (tile 512, overlap 0.25)" in markdown and "| tile | overlap |" in markdown
    assert Table.from_csv(io.StringIO(rows.to_csv())) == rows
    (usual,) = predict_sweep("sdxl", "decode_tiled", 512, "float16")
    assert (usual["tile"], usual["tile_overlap"]) == (1024, 0.25)
    (comfyui,) = predict_sweep("sdxl", "decode_tiled", 512, "float16", runtime="comfyui")
    assert (comfyui["tile"], comfyui["tile_overlap"]) == (512, None)


def test_a_tiled_row_says_whether_it_is_cut():
    rows = predict_sweep("sdxl", ["decode", "decode_tiled"], [1024, (1024, 1088)], "float16")
    whole, _, one, cut = rows
    assert one["allocated_bytes"] == whole["allocated_bytes"] and "tile" not in whole["versions"]
    assert "whole, in one tile of 1024" in one["versions"] and "in tiles of 1024" in cut["versions"]


def test_a_vae_and_a_config_are_models_too():
    config = {"block_out_channels": [32, 64], "down_block_types": ["DownEncoderBlock2D"] * 2,
              "up_block_types": ["UpDecoderBlock2D"] * 2, "layers_per_block": 1, "latent_channels": 4,
              "norm_num_groups": 8}  # fmt: skip
    rows = predict_sweep([VAE.random(config=config), config], "decode", 64, "float32")
    assert rows[0] == rows[1] and rows[0]["model"] == "custom"
    assert rows[0]["allocated_bytes"] == predict(config, "decode", 64, 64, "float32").allocated


def test_files_keep_predicted_rows(table):
    assert Table.from_csv(io.StringIO(table.to_csv())) == table
    assert Table.from_json(io.StringIO(table.to_json())) == table


def test_fit(table):
    formulas = vaemem.fit(table.filter(dtype="float32"))
    assert len(formulas) == 2 * 2 * 2 and {formula.runtime for formula in formulas} == {"diffusers"}
    line = formulas.find(model="sdxl", op="decode", device="NVIDIA GeForce RTX 4090")
    assert line.n == 3 and line.r2 > 0.99


def test_compare(table):
    both = vaemem.compare(table, ["comfyui", predict])
    assert both.find("comfyui", "sdxl", "decode", "float16").rows == 6
    same = both.find("predict")  # of the row's own card
    assert same.rows == len(table) and same.worst_over == same.worst_under == 0


def test_compare_knows_a_card_by_its_capability():
    rows = predict_sweep("sdxl", "decode", 512, gpu=["sm_89", "A100 80GB MIG 3g.40gb"])
    assert rows[0]["device"].startswith("sm_89 (as NVIDIA")
    same = vaemem.compare(rows, functools.partial(predict)).find("predict")
    assert same.worst_over == same.worst_under == 0 and rows[0]["dtype"] == "float32", "from weights in float16"


def test_predicted_and_measured_rows_in_one_table():
    """The table that comes with vaemem, and a prediction of it: the same device, so that one key finds both."""
    measured = vaemem.seed_table().filter(model="flux", op="decode", dtype="bfloat16")
    sizes = [row["height"] for row in measured]
    predicted = predict_sweep("flux", "decode", sizes, "bfloat16", runtime="bfl")
    assert [(r["device"], r["runtime"]) for r in predicted] == [(r["device"], r["runtime"]) for r in measured]
    for m, p in zip(measured, predicted, strict=True):
        assert abs(p["allocated_bytes"] - m["allocated_bytes"]) <= 5243  # the benchmark's two decimals


def test_report(table):
    markdown = vaemem.report(table, plots=False).markdown
    assert "predicted" in markdown and "NVIDIA GeForce RTX 3060" in markdown


def test_plot(table):
    pytest.importorskip("matplotlib")
    from vaemem import plot

    figure = plot.memory_vs_pixels(table, target="reserved_bytes")
    names = {text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()}
    assert {f"sdxl ({device}) float16, predicted" for device in {row["device"] for row in table}} <= names
    assert plot.implied_constants(table).axes
    assert plot.estimator_errors(vaemem.compare(table)).axes


def test_progress_counts_up_to_the_end():
    calls: list[tuple[int, int]] = []
    predict_sweep("sdxl", "decode", [64, 128], gpu=CARDS, progress=lambda *step: calls.append(step))
    total = 2 * 9 * (64 * 64 + 128 * 128)
    assert len(calls) == 4 and calls[-1] == (total, total) and [d for d, _ in calls] == sorted(d for d, _ in calls)


def test_what_ends_it_carries_the_finished_rows():
    with refused("height", 513) as caught:
        predict_sweep("sdxl", "decode", [512, 513])
    assert [row["height"] for row in caught.value.table] == [512]


def test_a_config_may_be_a_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(known_arch("flux"), 1024)))
    assert predict_sweep(path, "decode", 64) == predict_sweep(str(path), "decode", 64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "cpu"}, ValueError, ("device", "decode")),
        ({"tile_overlap": 0.5}, ValueError, ("tile_overlap", "decode")),
        ({"ops": "decode_tiled", "tile": [0, 512]}, ValueError, ("tile", 0)),
        ({"height": 512}, ValueError, ("height", "decode")),
        ({"models": ["sdxl", "sd4"]}, ValueError, ("model", "'sd4'")),
        ({"models": [1]}, ValueError, ("models", 1)),
        ({"ops": "upscale"}, ValueError, ("ops", "'upscale'")),
        ({"dtypes": ["float16", "int8"]}, ValueError, ("dtypes", "'int8'")),
        ({"gpu": ["RTX 4090", "RX 7000"]}, ValueError, ("gpu",)),
        ({"gpu": [4090]}, TypeError, ("gpu", "int")),
        *(
            ({name: []}, ValueError, (name, "none"))
            for name in ("models", "ops", "sizes", "dtypes", "gpu", "batch", "tile", "tile_overlap")
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with refused(*message, kind=error) as caught:
        predict_sweep(**({"models": "sdxl", "ops": "decode", "sizes": 64} | arguments))
    assert not len(getattr(caught.value, "table", ()))


def test_fits_as_a_table(capsys):
    assert main(["fits", "sdxl", "decode", "512", "512x768", "--gpu", "RTX 3060", "--format", "csv"]) == 0
    want = predict_sweep("sdxl", "decode", [512, (512, 768)], gpu="RTX 3060")
    assert {row["dtype"] for row in want} == {"float32"}
    assert Table.from_csv(io.StringIO(capsys.readouterr().out)) == want


# ---- whole pipelines ----


def test_pipelines_are_rows():
    """A row a phase and one of the whole, by model, card, batch, size and length of the prompt; and files hold them."""
    cards, more = ["T4", "RTX 4090"], {"batch": [1, 2], "offload": "model"}
    table = predict_sweep(["sd15", "flux"], "pipeline", (512, 768), "float32", gpu=cards, **more)
    assert {(row["model"], row["device"], row["batch"]) for row in table} == {
        (model, device, batch)
        for model in ("sd15", "flux")
        for device in ("Tesla T4", "NVIDIA GeForce RTX 4090")
        for batch in (1, 2)
    }
    p = predict_pipeline("sd15", 768, 768, 2, gpu="T4", offload="model", dtype="float32")
    mine = table.filter(model="sd15", device="Tesla T4", batch=2, height=768)
    assert [(row["phase"], row["reserved_bytes"]) for row in mine] == [
        *((phase.name, phase.total) for phase in p.phases), ("whole", p.peak)
    ]  # fmt: skip
    assert list(mine) == list(Table(p.rows()))
    assert {row["way"] for row in table} == {"offload model, VAE whole"} and {row["source"] for row in table} == {
        "predicted"
    }
    assert Table.from_csv(io.StringIO(table.to_csv())) == table


def test_lengths_of_prompts():
    table = predict_sweep("flux", "pipeline", 512, gpu="RTX 4090", prompt_tokens=[64, 512], offload="model")
    encode = [row["allocated_bytes"] for row in table.filter(phase="encode prompt")]
    assert [row["tokens"] for row in table.filter(phase="whole")] == [64, 512] and encode[0] < encode[1]


def test_pipelines_are_fitted_by_phase_and_compared():
    table = predict_sweep("sd15", "pipeline", (512, 768, 1024), gpu="T4")
    lines = {line.phase: line for line in fit(table)}
    assert set(lines) == {"load", "encode prompt", "denoise", "decode", "whole"}
    assert lines["load"].a == pytest.approx(0, abs=1e-6) and lines["decode"].a / 128 == pytest.approx(9.5, rel=0.01)
    assert lines["decode"].name == "sd15 pipeline decode"
    whole = table.filter(phase="whole")
    said = compare(table, ["sd15-equation"])
    assert [row.row["phase"] for row in said.rows] == ["whole"] * 3
    want = [
        sd15_equation(side, side)["total"] / row["reserved_bytes"] - 1
        for side, row in zip((512, 768, 1024), whole, strict=True)
    ]
    assert [row.error for row in said.rows] == pytest.approx(want)
    assert not said.left_out
    both = compare(table, ["comfyui", predict])
    assert {row.estimator for row in both.rows} == {"predict"} and both.find("predict").rows == len(table)
    assert both.find("predict").lowest == both.find("predict").highest == 0
    tiled = predict_sweep("sd15", "pipeline", 512, gpu="T4", offload="model", vae="tiled", prompt_tokens=154)
    assert compare(tiled, predict).find("predict").highest == 0
    larger = compare(table.filter(phase="decode"), functools.partial(predict, gpu="RTX 4090")).find("predict")
    assert larger.lowest < 0
    with refused("estimators"):
        compare(Table([row | {"device": "cpu"} for row in table]), predict)


def test_pipelines_in_a_report():
    table = predict_sweep("sd15", "pipeline", (512, 768), gpu="T4")
    text = str(report(table, plots=False))
    assert "### sd15 on Tesla T4, offload none, VAE whole" in text and "| decode" in text and "sd15-equation" in text
    both = str(report(table + seed_table(), plots=False))
    assert "## Whole pipelines" in both and "## Implied constants" in both


def test_sdcpps_pipelines_are_rows():
    rows = predict_pipeline("zimage-turbo", 1024, 1024, gpu="RTX 3060", runtime="sd.cpp", offload="cond_only").rows()
    table = Table(rows)
    assert table[-1]["phase"] == "whole" and {row["runtime"] for row in table} == {"sd.cpp"}
    assert table[0]["way"].startswith("cond_only") and "stable-diffusion.cpp" in table[0]["versions"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": "hidream"}, ValueError, ("models", "only the VAE of 'hidream' is known")),
        ({"tile": 512}, ValueError, ("tile", "pipeline")),
        ({"ops": "decode", "offload": "model"}, ValueError, ("offload", "decode")),
        ({"batch": [1, 0]}, ValueError, ("batch", 0)),
        ({"ops": "decode", "prompt_tokens": 3}, ValueError, ("prompt_tokens", "decode")),
        ({"prompt_tokens": [0]}, ValueError, ("prompt_tokens", 0)),
    ],
)  # fmt: skip
def test_bad_sweeps_of_pipelines(arguments, error, message):
    with refused(*message, kind=error):
        predict_sweep(**({"models": "sd15", "ops": "pipeline", "sizes": 512} | arguments))


def test_sweep_command_of_pipelines(capsys):
    sweep = ["sweep", "predicted", "--sizes", "512"]
    more = ["--models", "sd15", "--ops", "pipeline", "--gpu", "T4", "RTX 3060", "--offload", "model"]
    assert main([*sweep, *more, "--format", "json"]) == 0
    want = predict_sweep("sd15", "pipeline", 512, gpu=["T4", "RTX 3060"], offload="model")
    assert Table.from_json(io.StringIO(capsys.readouterr().out)) == want
    assert main([*sweep, "--models", "sdxl", "--ops", "decode", "--format", "csv"]) == 0
    assert Table.from_csv(io.StringIO(capsys.readouterr().out)) == predict_sweep("sdxl", "decode", 512)
