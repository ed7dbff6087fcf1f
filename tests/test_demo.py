"""The demo, at a small size: everything it promises to leave is there and says what was measured."""

import re
import sys

import numpy as np
import pytest
from errors import complains, refused

from vaemem import VAE, Table, fit, predict, predict_largest
from vaemem.__main__ import main
from vaemem._common import setting
from vaemem.reports.document import MARKS

for package in ("PIL", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason="the demo needs the extra 'demo'")

from PIL import Image

from vaemem import _demo, plot
from vaemem._handmade import handmade, picture

SIDE, SIZES = 192, (32, 48, 64)  # the real models, as small as a limit can be


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "out"
    with setting(_demo, SIDE=SIDE, SLOW_SIDE=SIDE, SWEEP_SIZES=SIZES):
        assert _demo.make_demo(folder) == folder / "index.html"
    yield folder
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()  # 0.3 GB that pytest would keep for three sessions


@pytest.fixture(scope="module")
def report(out):
    return (out / "report.md").read_text("utf-8")


def cells(report: str, start: str) -> list[str]:
    line = next(line for line in report.splitlines() if line.startswith(f"| {start} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_answer_comes_first_and_is_what_predict_says(report):
    first = report.split("\n## ")[0]
    assert first.startswith("# Does it fit?")
    for card in _demo.CARDS:
        line = cells(first, card)
        asked = [predict("sdxl", "decode", side, side, "float16", gpu=card) for side in _demo.IMAGE_SIDES]
        assert line[2:-1] == [f"{MARKS[p.verdict]} {p.verdict}" for p in asked]
        assert line[-1] == "x".join(map(str, predict_largest("sdxl", "decode", "float16", gpu=card)))


def test_the_picture_went_there_and_back(out):
    vae = VAE.load(out / "weights")
    image, whole = np.hsplit(np.asarray(Image.open(out / "there_and_back.png")), 2)
    np.testing.assert_array_equal(image, picture(SIDE))
    latents = np.load(out / "latents.npy")
    np.testing.assert_array_equal(vae.encode(image[None]).mode(), latents)  # runs are bitwise repeatable
    np.testing.assert_array_equal(_demo._bytes(vae.decode(latents)[0]), whole)


def test_less_memory_is_measured(report):
    vae = handmade("sdxl")
    whole, limited, tiled = (cells(report, name) for name in ("whole", "under a limit", f"in tiles of {SIDE // 2}"))
    assert whole[1] == f"{vae.estimate('decode', SIDE, SIDE).peak_bytes / 2**20:.2f}"
    for line in (whole, limited, tiled):
        assert line[1] == line[2], "estimated and measured"
    assert float(limited[1]) < float(whole[1]) and float(limited[4]) > float(whole[4]) == 1
    assert limited[-1] == "the same bits" and re.fullmatch(r"[\d.]+ dB, up to [\d.]+ of 255 off", tiled[-1])


def test_the_sweep_holds_estimates_beside_measurements(out, report):
    table = Table.from_csv(out / "sweep.csv")
    measured, estimated = table.filter(source="measured"), table.filter(source="estimated")
    assert len(measured) == len(estimated) == 2 * 2 * len(SIZES)
    assert [r["allocated_bytes"] for r in measured] == [r["allocated_bytes"] for r in estimated]
    assert "in 12 of 12 cases" in " ".join(report.split())
    line = fit(measured).find(model="sdxl", op="decode")
    assert f"| sdxl  | decode | {line.a:.1f} H W 4 {line.b:+,.0f} " in report


def test_pytorch_runs_beside_it(report):
    pytest.importorskip("diffusers")
    if "Not measured: " in report:
        pytest.skip("this system does not let a process look at its own size")
    assert float(cells(report, "PyTorch")[1]) > 0 and float(cells(report, "PyTorch")[2]) > 0


def test_the_page_holds_every_figure(out, report):
    page = (out / "index.html").read_text("utf-8")
    names = re.findall(r"!\[[^]]*\]\((\w+)\.png\)", report)
    assert names == ["pictures", "tiles", "tradeoff", "timeline", "estimators", "memory"]
    assert page.count("data:image/png;base64,") == len(names) and 'src="http' not in page
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)


@pytest.mark.thorough
def test_weights_of_ones_own_and_no_pytorch(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "vaemem.pytorch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    VAE.random("flux").save(tmp_path / "ae.safetensors", layout="bfl")
    with setting(_demo, SIDE=64, SLOW_SIDE=64, SWEEP_SIZES=SIZES):
        page = _demo.make_demo(tmp_path / "out", tmp_path / "ae.safetensors")
    said = capsys.readouterr().out
    assert said.startswith("load ") and said.endswith(f"s. Open {page}\n") and "sweep.csv" in said
    (tmp_path / "ae.safetensors").unlink()
    text = page.read_text("utf-8")
    assert "Not measured: vaemem.pytorch needs torch: pip install 'vaemem[pytorch]'" in text
    assert "The weights are yours." in text and "made by hand, without training" not in text
    assert np.load(tmp_path / "out" / "latents.npy").shape == (1, 16, 8, 8)
    assert not (tmp_path / "out" / "weights").exists()
    assert main(["demo", "--out", str(tmp_path / "out"), "--weights", str(tmp_path / "none")]) == 2
    assert complains(capsys.readouterr().err, "demo", names=[tmp_path / "none"])


def test_bad_output_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_the_timeline_marks_the_peak():
    run = VAE.random("sdxl", parts="decoder").estimate("decode", 512, 512)
    (axes,) = plot.timeline(run).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(run.passes)
    (text,) = axes.texts
    assert text.get_text() == f"peak {run.peak_bytes / 2**20:,.1f} MiB"
    assert run.passes[round(text.get_position()[1])] == run.peak_pass
    with refused("run", names=["VAE.estimate", "VAE.last_run"]):
        plot.timeline(predict("sdxl", "decode", 512, 512))
