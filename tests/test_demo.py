"""The demo, at a small size: everything it promises to leave is there and says what was measured."""

import numpy as np
import pytest

from vaemem import VAE, Table
from vaemem.__main__ import main

for package in ("PIL", "matplotlib", "skimage", "tqdm"):
    pytest.importorskip(package, reason="the demo needs the extra 'demo'")

from PIL import Image

from vaemem import _demo, plot

SIDE, SIZES = 64, (32, 48, 64)  # the real models, so small that a run takes a fraction of a second


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "out"
    assert _demo.run(folder, progress=False, side=SIDE, sizes=SIZES) == folder / "report.md"
    yield folder
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()  # 0.7 GB that pytest would keep for three sessions


def test_the_weights_files_load(out):
    assert VAE.load(out / "sdxl").model == "sdxl"
    assert VAE.load(out / "flux" / "ae.safetensors").model == "flux"


def test_the_photograph_went_there_and_back(out):
    photograph = np.asarray(Image.open(out / "photograph.png"))
    assert photograph.shape == (SIDE, SIDE, 3) and photograph.std() > 40, "a real picture"
    for model, channels in (("sdxl", 4), ("flux", 16)):
        latent = np.load(out / f"{model}_latent.npy")
        assert latent.shape == (1, channels, SIDE // 8, SIDE // 8) and np.isfinite(latent).all()
        decoded = np.asarray(Image.open(out / f"{model}_decoded.png"))
        assert decoded.shape == photograph.shape and decoded.std() > 0
        vae = VAE.load(out / _demo.WEIGHTS[model][0])
        again = vae.encode(photograph[None], scaled=True).mode()
        np.testing.assert_array_equal(again, latent)  # runs are bitwise repeatable
        np.testing.assert_array_equal(vae.decode(latent, scaled=True, output_type="uint8")[0], decoded)


def test_the_sweep_holds_estimates_beside_measurements(out):
    table = Table.from_csv(out / "sweep.csv")
    measured, estimated = table.filter(source="measured"), table.filter(source="estimated")
    assert len(measured) == len(estimated) == 2 * 2 * len(SIZES)
    assert [r["allocated_bytes"] for r in measured] == [r["allocated_bytes"] for r in estimated]


def test_the_report_says_what_was_measured(out):
    report = (out / "report.md").read_text("utf-8")
    measured = Table.from_csv(out / "sweep.csv").filter(source="measured")
    for row in measured:
        line = next(
            text for text in report.splitlines()
            if text.startswith(f"| {row['model']}") and row["op"] in text and f"{row['height']}x{row['width']}" in text
        )  # fmt: skip
        assert f"{row['allocated_bytes'] / 2**20:.2f}" in line and f"{row['seconds']:.2f}" in line
    assert "in 12 of 12 cases" in " ".join(report.split())
    assert "are noise" in report and measured[0]["versions"] in report
    assert "sdxl decode: allocated_bytes = " in report
    for name in ("memory.png", "timeline.png"):
        assert f"]({name})" in report and (out / name).read_bytes().startswith(b"\x89PNG")


def test_progress_says_where_everything_is(capsys):
    _demo._say(False, "nothing")
    _demo._say(True, "something")
    assert capsys.readouterr().out == "something\n"


def test_bad_output_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize("side", [0, 100, 1024])
def test_bad_side(tmp_path, side):
    with pytest.raises(ValueError, match=f"side: want .*, got {side}"):
        _demo.run(tmp_path, progress=False, side=side)


def test_the_timeline_marks_the_peak():
    run = VAE.random("sdxl", parts="decoder").estimate("decode", 512, 512)
    (axes,) = plot.timeline(run).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(run.passes)
    (text,) = axes.texts
    assert text.get_text() == f"peak {run.peak_bytes / 2**20:,.1f} MiB"
    assert run.passes[round(text.get_position()[1])] == run.peak_pass
