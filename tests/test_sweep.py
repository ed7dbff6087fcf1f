"""The sweep: it measures what was estimated and names bad arguments."""

import sys
import types

import numpy as np
import pytest
from engine import TWO_LEVELS
from errors import refused

import vaemem
from vaemem import VAE, estimate_sweep, measure_sweep

pytestmark = pytest.mark.python


@pytest.fixture(scope="module")
def vae():
    return VAE.random(config=TWO_LEVELS)


SIZES = [64, (32, 48), (16, 80)]


def test_measured_is_estimated_to_the_byte(vae):
    measured = measure_sweep(vae, sizes=SIZES)
    estimated = estimate_sweep(vae, sizes=iter(SIZES))  # once for both operations
    assert len(measured) == len(estimated) == 6
    for m, e in zip(measured, estimated, strict=True):
        assert m["seconds"] > 0 and e["seconds"] is None
        assert (m["source"], e["source"]) == ("measured", "estimated")
        assert m | {"seconds": None, "source": None} == e | {"seconds": None, "source": None}


def test_a_row_says_what_ran(vae):
    row = measure_sweep(vae, "decode", [(32, 48)], "float32", batch=2)[0]
    assert (row["model"], row["op"], row["height"], row["width"], row["batch"]) == ("custom", "decode", 32, 48, 2)
    assert (row["dtype"], row["runtime"], row["device"]) == ("float32", "vaemem", "cpu")
    run = vae.last_run
    assert row["output_bytes"] == 2 * 3 * 32 * 48 * 4 and row["weights_bytes"] == run.weights_bytes
    assert row["allocated_bytes"] == run.peak_bytes - run.weights_bytes
    assert row["allocated_bytes"] == row["activations_bytes"] + row["scratch_bytes"] + row["output_bytes"]
    assert f"vaemem {vaemem.__version__} ({run.backend}, {run.threads} threads)" in row["versions"]


def test_a_case_does_not_see_what_an_earlier_one_held(vae):
    vae.decode(np.zeros((1, 4, 64, 64), np.float32))  # leaves its arena
    rows = measure_sweep(vae, "decode", [64, 32, 64])
    assert rows[0]["reserved_bytes"] == rows[2]["reserved_bytes"] > rows[1]["reserved_bytes"]
    assert rows[1]["reserved_bytes"] < 1.1 * rows[1]["allocated_bytes"] + 2**20
    assert vae.reserved_bytes < rows[1]["weights_bytes"] + 2**20, "the arena is given back at the end"


def test_the_order_is_model_op_size(vae):
    other = VAE.random(config=TWO_LEVELS | {"latent_channels": 8})
    rows = estimate_sweep([vae, other], ["decode", "encode"], [16, 32])
    assert [(r["op"], r["height"]) for r in rows] == [
        ("decode", 16),
        ("decode", 32),
        ("encode", 16),
        ("encode", 32),
    ] * 2
    assert rows[0]["weights_bytes"] != rows[4]["weights_bytes"]


def test_seconds_are_the_median_of_repeats(vae, monkeypatch):
    times = iter([3.0, 1.0, 2.0])
    decode = VAE.decode

    def timed(self, *args, **kwargs):
        result = decode(self, *args, **kwargs)
        object.__setattr__(self.last_run, "seconds", next(times))
        return result

    monkeypatch.setattr(VAE, "decode", timed)
    assert measure_sweep(vae, "decode", 16, repeats=3)[0]["seconds"] == 2.0


def test_progress_counts_up_to_the_end(vae):
    calls: list[tuple[int, int]] = []
    measure_sweep([vae, vae], sizes=[32, 64], repeats=2, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    total = 2 * 2 * (4 + 9) * (32 * 32 + 64 * 64)
    assert done == sorted(done) and calls[-1] == (total, total) and {t for _, t in calls} == {total}


def test_a_progress_bar(vae, capsys):
    pytest.importorskip("tqdm")
    measure_sweep(vae, "encode", 32, progress=True)
    assert "sweep: 100%" in capsys.readouterr().err


def test_a_notebook_without_widgets_has_its_bar_in_the_output(vae, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=True))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    measure_sweep(vae, "encode", 32, progress=True)
    said = capsys.readouterr()
    assert "sweep: 100%" in said.out and not said.err


def test_what_progress_raises_comes_out_and_the_vae_stays_usable(vae):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sweep(vae, "decode", 64, progress=stop)
    assert len(measure_sweep(vae, "decode", 32)) == 1


def test_what_ends_a_sweep_carries_the_finished_rows(vae):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        measure_sweep(vae, "decode", [32, 32, 32, 32], progress=stop)
    assert [row["source"] for row in caught.value.table] == ["measured"] * 2
    with refused("sizes") as caught:
        measure_sweep(vae, "decode", 0)
    assert not len(getattr(caught.value, "table", ()))


def test_an_array_without_an_axis_is_one_value(vae):
    with refused("sizes"):
        estimate_sweep(vae, "decode", np.array(32))
    assert estimate_sweep(vae, np.array("decode"), 32, batch=np.array(2))[0]["batch"] == 2
    with refused("dtypes"):
        estimate_sweep(vae, "decode", 32, dtypes=np.array(5))


def test_full_models_by_name():
    """Random weights are made for the sweep; nothing runs. 512x512 holds what the README promises."""
    for row in estimate_sweep(sizes=512):
        assert row["model"] in ("sd15", "sdxl", "flux")
        assert row["allocated_bytes"] <= 3.2 * 128 * 512 * 512 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": "sd4"}, ("models", "'sd4'")),
        ({"models": [1]}, ("models", 1)),
        ({"ops": "decode_tiled"}, ("ops", "'decode_tiled'")),
        ({"sizes": [64, "512"]}, ("sizes", "'512'")),
        ({"sizes": [(64, 64, 3)]}, ("sizes", "(64, 64, 3)")),
        ({"sizes": [True]}, ("sizes", "True")),
        ({"sizes": [64.0]}, ("sizes", 64.0)),
        ({"sizes": [0]}, ("sizes", 0)),
        ({"dtypes": ["float16"]}, ("dtypes", "'float16'")),
        ({"precision": "high"}, ("precision", "'high'")),
        ({"sizes": []}, ("sizes", "none")),
        ({"batch": 0}, ("batch", 0)),
        ({"repeats": 1.5}, ("repeats", 1.5)),
    ],
)
def test_bad_arguments_are_named(vae, arguments, message):
    with refused(*message):
        measure_sweep(**({"models": vae, "sizes": 32} | arguments))


def test_what_the_plan_refuses_is_refused_before_anything_runs(vae):
    ran = []
    with refused("height", 33):
        measure_sweep(vae, sizes=[32, 33], progress=lambda *step: ran.append(step))
    decoder = VAE.random(config=TWO_LEVELS, parts="decoder")
    with refused(names=["encode"]):
        measure_sweep(decoder, ["decode", "encode"], 32, progress=lambda *step: ran.append(step))
    assert not ran
