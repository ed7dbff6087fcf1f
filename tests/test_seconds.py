"""Rates and their sources, the times that follow from them, and what measured runs change."""

import json
import math
import pickle

import pytest
from errors import refused

from vaemem import Table, predict, predict_sweep, seed_table
from vaemem.__main__ import main
from vaemem._common import shipped
from vaemem.pipelines import recorded_modules
from vaemem.pipelines.components import vae_counts
from vaemem.prediction.gpus import find_gpu, gpu_names
from vaemem.prediction.seconds import (
    Machine,
    Rate,
    cpu_rate,
    either,
    gpu_rate,
    link_rate,
    machine_of,
    memory_rate,
    peak,
    shares,
    vae_work,
)

pytestmark = pytest.mark.python

TERA = 1e12


@pytest.mark.parametrize(
    ("gpu", "dtype", "teraflops"),
    [  # NVIDIA's data sheets: dense, float32 sums; some of the list's cards report a clock of their own
        ("V100", "float16", 125),
        ("T4", "float16", 65),
        ("A100-SXM4-80GB", "float16", 312),
        ("A100-SXM4-80GB", "float32", 156),
        ("A30", "bfloat16", 165),
        ("A10", "float16", 125),
        ("A10G", "float16", 70),
        ("A40", "float16", 149.7),
        ("RTX 3090", "float16", 71),
        ("RTX A6000", "float16", 154.8),
        ("RTX 4090", "float16", 165.2),
        ("RTX 4090", "float32", 82.6),
        ("L4", "float16", 121),
        ("L40", "float16", 181),
        ("L40S", "float16", 362),
        ("RTX 6000 Ada", "bfloat16", 364.2),
        ("RTX 5090", "float16", 209.5),
    ],
)
def test_peaks_are_those_of_data_sheets(gpu, dtype, teraflops):
    assert peak(gpu, dtype) / TERA == pytest.approx(teraflops, rel=0.03)


def test_without_tensor_cores():
    assert peak("T4", "float32") / TERA == pytest.approx(8.1, rel=0.02)  # no TF32
    assert peak("V100", "bfloat16") == peak("V100", "float32")


def test_every_card_has_rates():
    for name in gpu_names():
        assert 0 < gpu_rate(name, "unet").value < peak(name) and memory_rate(name).value > 5e10


def test_no_run_reached_more_than_its_card_can():
    found = shares()
    assert len(found) > 15 and all(0.02 < run["share"] < 0.82 for run in found)
    assert all(run["source"] in json.loads(shipped("rates.json"))["sources"] for run in _measured())


def _measured():
    return json.loads(shipped("rates.json"))["measured"]


def test_a_band_covers_the_runs_that_it_came_from():
    """Each run of more than 50 ms lies within the band of its own card's rate."""
    for run in (run for run in _measured() if run["per_second"] < 20):
        data = json.loads(shipped("rates.json"))["flops"][run["module"]]
        machine = Machine({run["work"]: gpu_rate(run["gpu"], run["work"]), "memory": memory_rate(run["gpu"])})
        work = {run["work"]: run["samples"] * data["flops"]}
        if run["work"] == "vae":
            work = vae_work(data["flops"], data["attended"], data["moved"])
        took = machine.seconds(work)
        assert took.low * 0.999 <= 1 / run["per_second"] <= took.high * 1.001


def test_the_vae_of_the_seed_table_within_its_band():
    machine = machine_of("RTX 4090")
    for side, seconds in ((768, 0.083), (1024, 0.153), (2048, 0.693)):  # FLUX decode, float16
        took = machine.seconds(vae_work(*vae_counts("flux", "decode", "float16", side, side)))
        assert took.low <= seconds <= took.high and took.high < 1.3 * took.likely


def test_what_a_vae_does():
    """Bytes and FLOPs take their time one after the other; an attention's FLOPs take more of it than others."""
    machine = machine_of("RTX 4090")
    plain, attended = (machine.seconds(vae_work(1e12, part, 1e10)).likely for part in (0, 1e12))
    assert plain == pytest.approx(1e12 / machine.rates["vae"].value + 1e10 / machine.rates["memory"].value)
    assert attended - plain == pytest.approx(2e12 / machine.rates["vae"].value)


def test_what_was_not_measured_has_a_wider_band():
    """No VAE was timed on a T4: all cards' shares, and a wider band than the card's whose VAE was."""
    known, other = gpu_rate("RTX 4090", "vae"), gpu_rate("T4", "vae")
    assert other.factor > 2 * known.factor and "other compute capabilities" in other.why
    assert "seed table" in known.why


def test_links_and_memory():
    assert link_rate("PCIe 4.0 x8").value == pytest.approx(link_rate("pcie3 x16").value, rel=0.01)
    fast = link_rate("PCIe 3.0 x16")
    assert fast.value / fast.factor < 4.0 * 2**30 / 1.3 < fast.value * fast.factor  # what it was inferred from
    assert fast.value * fast.factor == pytest.approx(12e9, rel=0.01)
    for wrong in ("PCIe", "PCIe 9.0 x16", "PCIe 3.0 x3", "NVLink", None):
        with refused("link"):
            link_rate(wrong)
    assert memory_rate("RTX 4090").value < 1008e9 < memory_rate("H200").value


def test_cpus():
    assert cpu_rate("SSE4.2", 4).value < cpu_rate("AVX", 4).value < cpu_rate("AVX2", 4).value
    unknown, low, high = cpu_rate("no AVX2"), cpu_rate("SSE4.2", 2), cpu_rate("AVX", 8)
    assert unknown.value / unknown.factor == pytest.approx(low.value / low.factor)
    assert unknown.value * unknown.factor == pytest.approx(high.value * high.factor)
    with refused("cpu", "'MMX'", names=["SSE4.2"]):
        cpu_rate("MMX")


def test_either_holds_both():
    found = either([Rate(1e12, 2, "FLOP/s", "a"), Rate(9e12, 1.5, "FLOP/s", "b")], "a or b")
    assert found.value / found.factor == pytest.approx(0.5e12) and found.value * found.factor == pytest.approx(13.5e12)


def test_a_machine_adds_and_says_why():
    machine = Machine({"a": Rate(2.0, 2, "B/s", "first"), "b": Rate(1.0, 2, "B/s", "second")})
    alone, both = machine.seconds({"a": 10}), machine.seconds({"a": 10, "b": 5})
    assert (alone.low, alone.likely, alone.high) == pytest.approx((2.5, 5, 10)) and "first" in alone.why
    assert both.likely == 10 and 2 < both.high / both.likely * math.sqrt(2) < 2.9  # two that are not off together
    assert "second" in both.why and "second" not in alone.why
    assert machine.seconds({}).high == 0
    with refused("work", "c"):
        machine.seconds({"c": 1})


def test_measured_runs_are_given_back_and_others_follow():
    """Two unknowns, two runs: both solved, whatever was thought before; a third run that mixes them follows."""
    truth = {"a": 3.0, "b": 0.02}
    machine = Machine({name: Rate(1.0, 4, "FLOP/s", "a guess") for name in truth})

    def took(work):
        return sum(amount / truth[name] for name, amount in work.items())

    runs = [{"a": 60.0, "b": 1.0}, {"a": 60.0, "b": 3.0}]
    known = machine.calibrated([(work, took(work)) for work in runs])
    for work in (*runs, {"a": 90.0, "b": 2.0}):
        found = known.seconds(work)
        assert found.likely == pytest.approx(took(work), rel=0.03) and found.low < took(work) < found.high
        assert found.high / found.low < 1.25
    assert machine.seconds(runs[0]).high / machine.seconds(runs[0]).low > 4
    assert "from 2 measured runs; before: 1 FLOP/s" in str(known.rates["a"])


def test_what_no_run_used_stays_as_it_was():
    machine = Machine({"a": Rate(1.0, 2, "FLOP/s", "x"), "b": Rate(1.0, 3, "FLOP/s", "y")})
    known = machine.calibrated([({"a": 10.0}, 25.0)])
    assert known.rates["b"] == machine.rates["b"] and known.seconds({"b": 5}) == machine.seconds({"b": 5})
    assert machine.seconds({"a": 10}).likely == 10, "the first machine is left as it was"
    for runs, got in (([], "none"), ([({"a": 1}, 0.0)], "0.0"), ([({"a": 1}, 2), ({"a": 1}, math.nan)], "2, nan")):
        with refused("calibrate", names=[got]):
            machine.calibrated(runs)


def test_a_machine_whose_card_is_not_named():
    """Every card of that memory, so a wider band than any one of them has; ggml's kernels wider than PyTorch's."""
    named, unnamed = machine_of("RTX 3060"), machine_of(memory=12 << 30)
    assert unnamed.rates["unet"].factor > named.rates["unet"].factor
    assert machine_of("RTX 3060", runtime="sd.cpp").rates["unet"].factor == 2 * named.rates["unet"].factor
    assert machine_of(memory=13 << 30).rates == unnamed.rates  # no listed card has so much: the nearest stand for it
    with refused("gpu"):
        machine_of()


def test_flops_of_the_modules_are_the_recorded_ones():
    """What shares of peaks were computed with is what the recorded modules count."""
    sizes = {
        "sd15-unet": {"n": 1, "h": 64, "w": 64, "t": 77},
        "sdxl-unet": {"n": 1, "h": 128, "w": 128, "t": 77},
        "flux-transformer": {"n": 1, "h": 128, "w": 128, "t": 512},
    }
    known = json.loads(shipped("rates.json"))["flops"]
    vae = known["vae-decoder"]
    assert vae_counts("sdxl", "decode", "bfloat16", 1024, 1024) == (vae["flops"], vae["attended"], vae["moved"])
    for name, wanted in sizes.items():
        module = recorded_modules.load_program(name)
        sizes, gpu = {key: wanted[key] for key in module.variables}, find_gpu(recorded_modules.ANY_GPU)
        counted = module.trace(module.dtypes[0], gpu, **sizes).flops
        assert counted == pytest.approx(known[name]["flops"], rel=1e-3), name


# ---- of predictions ----


def test_a_prediction_has_seconds():
    """More pixels, images and tiles take longer, a faster card less long; and every row of a sweep has a band."""
    whole = predict("sdxl", "decode", 1024, 1024, "float16")
    tiled = predict("sdxl", "decode_tiled", 1024, 1024, "float16", tile=512)
    assert 1.2 < tiled.seconds.likely / whole.seconds.likely < 1.6
    two, slow = (predict("sdxl", "decode", 1024, 1024, "float16", **more) for more in ({"batch": 2}, {"gpu": "4060"}))
    assert two.seconds.likely == pytest.approx(2 * whole.seconds.likely, rel=0.05)
    assert slow.seconds.low > whole.seconds.high and "compute capability 8.9" in slow.seconds.why
    limited = predict("sdxl", "decode", 1024, 1024, "float16", gpu="RTX 4090", memory="8 GB", used="1 GB")
    assert limited.seconds == whole.seconds, "as where there is room"
    assert predict("sdxl", "decode", 512, 512, gpu="GTX 1080").seconds is None, "of which no speed is known"
    assert json.loads(whole.to_json())["seconds"]["likely"] == whole.seconds.likely
    assert f"  time      {whole.seconds}\n" in str(whole)
    for row in predict_sweep("sdxl", ["encode", "decode_tiled"], [512, 1536], "float16"):
        assert row["seconds_low"] < row["seconds"] < row["seconds_high"] < 1.4 * row["seconds"]
    pickled = pickle.loads(pickle.dumps(whole))
    assert pickled.seconds == whole.seconds


def test_a_measured_row_scales_the_seconds(tmp_path, capsys):
    row = {"model": "sdxl", "op": "decode", "height": 512, "width": 512, "dtype": "float16", "seconds": 0.25}
    asked = {"model": "sdxl", "op": "decode", "dtype": "float16", "gpu": "RTX 3060"}
    before, again, larger = (
        predict(height=side, width=side, **asked, calibrate=given).seconds
        for side, given in ((1024, None), (512, row), (1024, Table([row])))
    )
    assert again.likely == pytest.approx(0.25, rel=0.02) and "from 1 measured run; before: " in again.why
    assert 4 * again.likely < larger.likely < 4.5 * again.likely and before.low < larger.low < larger.high < before.high
    single = predict("sdxl", "decode", 512, 512, "float32", gpu="RTX 3060", calibrate=row).seconds
    assert 1.8 < single.likely / again.likely < 2.2, "a row of another type says as much of this one"
    assert predict(
        "sdxl", "decode", 512, 512, "float16", gpu="GTX 1080", calibrate=row
    ).seconds.likely == pytest.approx(0.25, rel=0.05)
    Table([row | {"device": "RTX 3060"}, row | {"device": "RTX 4090", "seconds": 0.03}]).to_csv(tmp_path / "mine.csv")
    words = ["fits", "sdxl", "decode", "512", "--dtype", "float16", "--gpu", "RTX 3060"]
    assert main([*words, "--measured", str(tmp_path / "mine.csv")]) == 0
    assert "  time      0.25 s (" in capsys.readouterr().out
    with refused("calibrate"):
        print(predict("sdxl", "decode", 512, 512, "float16", gpu="T4", calibrate=row | {"seconds": 1e-4}).seconds)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], ()),
        (seed_table(), ()),
        ([{"seconds": 1.0}], ("{'seconds': 1.0}",)),
        ("mine.csv", ("'mine.csv'",)),
        (3.0, (3.0,)),
    ],
)  # fmt: skip
def test_what_cannot_calibrate(rows, message):
    with refused("calibrate", *message):
        predict("sdxl", "decode", 512, 512, gpu="RTX 3060", calibrate=rows)


def test_a_row_in_tiles_calibrates_by_its_own_tiles():
    """Whatever its op says: its own seconds come out."""
    for row in seed_table().filter(model="sdxl", tile=512, height=1536, dtype="float16"):
        op = f"{row['op'].removesuffix('_tiled')}_tiled"
        said = predict("sdxl", op, 1536, 1536, "float16", tile=512, calibrate=row).seconds
        assert said.likely == pytest.approx(row["seconds"], rel=0.02)


def test_the_table_of_a_card_calibrates_it():
    """All 98 rows at once: no surer than one of them, and as far off as the fit is."""
    mine = predict("flux", "encode", 1024, 1024, "float16", runtime="bfl", calibrate=seed_table()).seconds
    assert mine.low < 0.079 < mine.high and mine.likely == pytest.approx(0.079, rel=0.12)
