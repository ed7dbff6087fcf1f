"""Plans of pipelines: outcomes, recommendations, what is printed and written, and each runtime's ways."""

import csv
import importlib.metadata
import io
import json
import struct
import sys
from unittest import mock

import numpy as np
import pytest
from errors import complains, refused

from vaemem import plan_pipeline, plot, predict, predict_pipeline
from vaemem.__main__ import main
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.ways import PipelinePlan, Room, outcome
from vaemem.prediction.gpus import find_gpu, present_gpu
from vaemem.prediction.phases import Phase, Way
from vaemem.prediction.process import Reading
from vaemem.prediction.seconds import Machine, Rate, machine_of, vae_work
from vaemem.sdcpp import running
from vaemem.sdcpp.graphs import DEFAULT_TILE, graph

MIB, GIB = 2**20, 2**30
MACHINE = Machine({"a": Rate(1.0, 2, "FLOP/s", "a guess")})


def way(name="x", sizes=(1, 2), seconds=10.0, **other):
    phases = tuple(
        Phase.planned(phase, MIB, (size - 1) * MIB, {"a": seconds / len(sizes)})
        for phase, size in zip(("denoise", "decode"), sizes, strict=True)
    )
    return Way(name, {}, phases, **other)


# ---- outcomes ----


def test_the_first_phase_that_does_not_fit_is_named_and_what_the_whole_run_lacks():
    found = outcome(way(sizes=(6, 9)), Room(5 * MIB), MACHINE)
    assert (found.fails_in, found.short, found.fits) == ("denoise", 4 * MIB, False)
    assert (found.verdict, found.summary) == ("does not fit", "runs out in denoise, 4 MB short")
    assert outcome(way(sizes=(5, 5)), Room(5 * MIB), None).verdict == "fits"


def test_a_way_that_is_tight_says_so():
    plan = PipelinePlan("", [way("a"), way("b", unsure="nobody knows")], Room(5 * MIB), None)
    assert [one.verdict for one in plan.outcomes] == [row["verdict"] for row in plan.rows()] == ["fits", "tight"]
    assert [one.summary for one in plan.outcomes] == ["fits", "tight: nobody knows"]
    unsure = PipelinePlan("", [way("a", unsure="nobody knows")], Room(5 * MIB), None)
    assert plan.reason == (
        "Take a. It is the only one that fits and leaves the picture as it is. b is tight: nobody knows."
    )
    assert unsure.reason == (
        "Take a. It is the only one that goes through and leaves the picture as it is. It is tight: nobody knows."
    )
    assert [row["unsure"] for row in plan.rows()] == ["", "nobody knows"]
    quicker = PipelinePlan(
        "", [way("a", seconds=8, unsure="nobody knows"), way("b", seconds=9)], Room(5 * MIB), MACHINE
    )
    assert quicker.recommended.way.name == "b" and "It is the only one that fits" in quicker.reason
    two = PipelinePlan("", [way("a", unsure="nobody knows"), way("b", unsure="nobody knows")], Room(5 * MIB), None)
    assert "It is the plainest of the 2 that go through" in two.reason
    for safe, name, more in ((True, "b", "a would take 4 s"), (False, "a", "")):
        ways = [way("a", seconds=4, unsure="nobody knows"), way("b", seconds=9)]
        plan = PipelinePlan("", ways, Room(5 * MIB), MACHINE, safe=safe)
        assert plan.recommended.way.name == name and more in plan.reason


def test_the_host_and_time_run_out_too():
    assert outcome(way(host=3 * MIB), Room(9 * MIB, 2 * MIB), None).summary == "host memory is 1 MB short"
    late = outcome(way(seconds=70.0), Room(9 * MIB, None, 60.0), MACHINE)
    assert late.fails_in == "time" and late.summary == "likely takes 10 s too long"  # 35 s at the least
    assert outcome(way(seconds=130.0), Room(9 * MIB, None, 60.0), MACHINE).summary == "takes 70 s too long"
    assert outcome(way(seconds=70.0), Room(9 * MIB, None, 60.0), None).fits, "no time is known"


def test_what_was_played_decides_where_it_was():
    """PyTorch gives cached memory back: a phase that takes more where there is room may fit."""
    assert outcome(way(sizes=(9, 9), played=True), Room(5 * MIB), None).fits
    found = outcome(way(sizes=(1, 1), played=True, out=("decode", 7)), Room(5 * MIB), None)
    assert (found.fails_in, found.short) == ("decode", 7)


# ---- recommendations ----


@pytest.mark.parametrize(
    ("ways", "name", "why"),
    [
        ([way("a")], "a", "It is the only one that fits and leaves the picture as it is."),
        ([way("a"), way("b", seconds=9)], "b", "It is the fastest of the 2 that fit"),
        (
            [way("a"), way("b", seconds=9.9)],  # as repeated runs differ
            "a",
            "Of the 2 that fit and leave the picture as it is, this way and 'b' are about as fast. It takes 10 s",
        ),
        ([way("a", changes="tiles show"), way("b", seconds=99)], "b", "the only one that fits and leaves the picture"),
        (
            [way("a", (9, 9)), way("b", changes="tiles show")],
            "b",
            "though tiles show. It takes 10 s (5 to 20). a: runs out in",
        ),
    ],
)
def test_the_recommended_way(ways, name, why):
    plan = PipelinePlan("t", ways, Room(5 * MIB), MACHINE)
    assert plan.recommended.way.name == name and why in plan.reason and plan.reason.startswith(f"Take {name}.")


TWO_RATES = Machine({"a": Rate(1.0, 2, "FLOP/s", "a guess"), "b": Rate(1.0, 2, "B/s", "another")})


def by(name, **work):
    return Way(name, {}, (Phase.planned("decode", MIB, 0, work),))


def test_what_may_be_as_fast_is_not_called_faster():
    """b's own 8 s are 4 to 16, a's own 10 s 5 to 20: either may be faster. What both do says nothing of that."""
    plan = PipelinePlan("t", [by("a", a=60.0), by("b", a=50.0, b=8.0)], Room(None), TWO_RATES)
    assert plan.recommended.way.name == "b" and not plan.is_faster(plan["b"], plan["a"])
    assert "this way and 'a' are about as fast. It takes 58 s" in plan.reason and "fastest" not in plan.reason
    surely = PipelinePlan("t", [by("a", a=60.0), by("b", a=50.0, b=2.0), by("c", a=61.0)], Room(None), TWO_RATES)
    assert surely.is_faster(surely["b"], surely["a"]) and "It is the fastest of the 3 that fit" in surely.reason
    more = PipelinePlan("t", [by("a", a=60.0), by("b", a=50.0, b=8.0), by("c", a=200.0)], Room(None), TWO_RATES)
    assert "Of the 3 that fit and leave the picture as it is, this way and 'a' are about as" in more.reason
    assert not PipelinePlan("t", [by("a", a=1.0), by("b", a=9.0)], Room(None)).is_faster(plan["a"], plan["b"])


def test_what_was_measured_comes_before_what_may_be_as_fast():
    ways = [by("a", a=60.0), by("b", a=50.0, b=8.0), by("c", a=5.0)]
    plan = PipelinePlan("t", ways[:2], Room(None), TWO_RATES, {"a": 60.0})
    assert plan["b"].seconds.likely < plan["a"].seconds.likely and plan.recommended.way.name == "a"
    assert "this way and 'b' are about as fast. It takes 60 s" in plan.reason and " It was measured." in plan.reason
    faster = PipelinePlan("t", ways, Room(None), TWO_RATES, {"a": 60.0})
    assert faster.recommended.way.name == "c", "surely faster"
    assert " It was not measured; the fastest measured way is a, in 60 s." in faster.reason


def test_a_tight_way_that_may_be_no_faster_says_so():
    tight = by("b", a=40.0, b=8.0)._replace(unsure="nobody knows")
    plan = PipelinePlan("t", [by("a", a=60.0), tight], Room(None), TWO_RATES)
    assert " b would take 48 s" in plan.reason and ", which may be no faster, and is tight: nobody" in plan.reason


def test_loading_is_said_apart(small_card):
    """Its bytes are all weights', whatever stays on the host; its seconds are in no way's."""
    q = predict_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB")
    weights = sum(part.nbytes for part in q.parts.values())
    loaded = [one for one in small_card.outcomes if "load" in one.phase_seconds]  # at once, and not as they are called
    assert {one.way.name.partition(",")[0] for one in loaded} == {"no offload", "text encoders on CPU"}
    for one in loaded:
        assert one.way.phases[0].work == {"disk": weights} and "disk" not in one.way.work
        load = one.phase_seconds["load"]
        assert load.high / load.low > 50 and "a judgement" in load.why
    assert f"Loading reads {weights / GIB:.2f} GB of weights once, " in small_card.to_text(all=True)
    everything = by_sdcpp()["no offload, VAE whole"].way.phases
    offloaded = by_sdcpp()["--offload-to-cpu, VAE whole"].way.phases
    assert [phase.name for phase in offloaded] == ["load", "encode prompt", "denoise", "decode"]
    assert everything[0].work == offloaded[0].work == {"disk": everything[0].weights} and offloaded[0].weights == 0
    mac = plan_pipeline("zimage", 512, 512, memory="16 GB", runtime="mlx")
    for one in mac.outcomes:
        assert [phase.name for phase in one.way.phases] == ["encode prompt", "denoise", "decode"]
        assert one.seconds is None


def test_without_times_the_plainest_way_is_taken():
    plan = PipelinePlan("t", [way("a", (3, 3)), way("b", (1, 1))], Room(5 * MIB), None)
    assert plan.recommended.way.name == "a" and "plainest of the 2" in plan.reason


def test_nothing_fits():
    plan = PipelinePlan("t", [way("a", (9, 8)), way("b", (7, 8))], Room(5 * MIB), MACHINE)
    assert plan.recommended is None and plan.reason == (
        "Nothing fits. b comes nearest: runs out in denoise, 3 MB short."
    )
    late = PipelinePlan("t", [way("a", (9, 8)), way("b", seconds=99)], Room(5 * MIB, None, 9.0), MACHINE)
    assert late.reason == "Nothing fits. b comes nearest: takes 90 s too long."


def test_calibrating_moves_every_other_way():
    plan = PipelinePlan("t", [way("a"), way("b", seconds=20.0)], Room(None), MACHINE, {"a": 30.0})
    assert plan["a"].seconds.likely == pytest.approx(30, rel=0.01)
    assert plan["b"].seconds.likely == pytest.approx(60, rel=0.01) and "1 measured run" in plan.to_text(all=True)
    with refused("calibrate", "'c'"):
        PipelinePlan("t", [way("a")], Room(None), MACHINE, {"c": 1.0})


# ---- files ----


def test_what_is_written_is_what_was_found(tmp_path):
    plan = PipelinePlan("t", [way("a, b", (6, 9)), way("c")], Room(5 * MIB, MIB), MACHINE, notes=["said"])
    rows = list(csv.DictReader(io.StringIO(plan.to_csv())))
    assert [row["way"] for row in rows] == ["a, b", "c"] and rows[0]["fails_in"] == "denoise"
    assert int(rows[1]["decode_bytes"]) == 2 * MIB and rows[1]["recommended"] == "True"
    data = json.loads(plan.to_json())
    assert data["recommended"] == "c" and data["card"]["available_bytes"] == 5 * MIB and data["notes"] == ["said"]
    assert data["ways"][1]["seconds_high"] == pytest.approx(20) and "a guess" in data["rates"]["a"]
    assert plan.to_csv(tmp_path / "plan.csv") is None and plan.to_json(tmp_path / "plan.json") is None
    assert (tmp_path / "plan.csv").read_text("utf-8") == plan.to_csv()
    assert json.loads((tmp_path / "plan.json").read_text("utf-8")) == data
    assert plan.to_markdown(all=True).count("\n| ") == 8 and "Take c." in plan.to_markdown()
    assert "<br" not in plan._repr_html_() and "a, b" in plan._repr_html_()
    with refused("way", "'d'"):
        plan["d"]


def test_notes_are_said_once():
    plan = PipelinePlan(
        "t", [way("a", notes=("one",)), way("b", notes=("one", "two"))], Room(None), None, notes=["one"]
    )
    assert plan.notes == ("one", "two") and plan.to_text(all=True).count("- one") == 1


# ---- diffusers ----


@pytest.fixture(scope="module")
def small_card():
    return plan_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB")


def test_ways_of_diffusers_are_predictions(small_card):
    """Each way is `predict_pipeline` asked so, with its phases, verdicts and bytes."""
    names = [one.way.name for one in small_card.outcomes]
    assert len(names) == 17 and names[0] == "no offload, VAE whole" and "sequential offload, VAE whole" in names
    for name, settings in (
        ("no offload, VAE whole", {}),
        ("model offload, VAE tiled", {"offload": "model", "vae": "tiled"}),
    ):
        p = predict_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB", **settings)
        found = small_card[name]
        assert [(phase.name, phase.total) for phase in found.way.phases] == [(f.name, f.total) for f in p.phases]
        assert found.fits == p.fits and found.way.host == p.host
        assert found.fails_in == (p.out_of_memory_at[0] if p.out_of_memory_at else None)
        work, last = found.way.phases[-1].work, p.phases[-1]
        assert {name: work[name] for name in ("vae", "memory")} == vae_work(last.flops, last.attended, last.moved)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("gpu, memory", [("RTX 4060", None), ("RTX 3060", "4 GB"), ("RTX 3090", None), ("H100", None)])
@pytest.mark.parametrize("pipeline", ["zimage-turbo", "sd15", "sdxl", "flux"])  # the first is tight on Windows
def test_a_plan_and_a_prediction_say_the_same_of_every_way(pipeline, gpu, memory):
    """Verdict and reason, for both runtimes."""
    os = "windows" if gpu in ("RTX 4060", "RTX 3090") else "linux"
    asked = {"height": 1024, "width": 1024, "gpu": gpu, "memory": memory, "os": os}
    for runtime in ("diffusers", "sd.cpp"):
        for one in plan_pipeline(pipeline, **asked, runtime=runtime, host_memory="999 GB").outcomes:
            settings = one.way.settings if runtime == "diffusers" else {"offload": one.way.name}
            p = predict_pipeline(pipeline, **asked, runtime=runtime, **settings)
            assert (p.verdict, p.tight_because, p.fits) == (one.verdict, one.way.unsure, one.fits), one.way.name
            if p.verdict == "does not fit":
                assert one.fails_in == p.out_of_memory_at[0]


def test_vaemems_decoder_is_tight_where_it_never_ran():
    asked = {"height": 512, "width": 512, "vae": "vaemem", "vae_memory_limit": "1 GB"}
    there, here = (predict_pipeline("sd15", gpu=gpu, **asked) for gpu in ("RTX 4090", "H100"))
    assert (there.verdict, here.verdict) == ("tight", "fits")
    assert there.summary.endswith("; vaemem's code has run on one kind of GPU only, an H100 and an H200")
    assert not predict_pipeline("sd15", gpu="RTX 4090", **asked, safe=True).fits and here.tight_because == ""


def test_what_a_way_lacks_would_have_done(small_card):
    """With that much more of a card it fits, and with 4 MiB less than that it does not."""
    short = small_card["no offload, VAE whole"].short
    available = small_card.room.card

    def fits(more):
        used = predict_pipeline("sd15", 1024, 1024, gpu="RTX 3060").available - available - more
        return predict_pipeline("sd15", 1024, 1024, gpu="RTX 3060", used=used).fits

    assert fits(short) and not fits(short - 4 * MIB)


def test_the_small_card_gets_offloading(small_card):
    assert small_card["no offload, VAE whole"].fails_in == "decode"
    assert small_card.recommended.way.name == "sequential offload, VAE whole"
    assert "model offload, VAE whole would take" in small_card.reason and "is tight: " in small_card.reason
    kept = f"{small_card.recommended.way.host / GIB:.2f} GB of weights, of 30.00 GB in an assumed machine of 32 GB"
    assert f"The host's memory keeps {kept}." in small_card.reason
    quick = plan_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB", safe=False)
    assert quick.recommended.way.name == "model offload, VAE whole"
    slow, fast = (small_card[f"{offload} offload, VAE whole"].seconds for offload in ("sequential", "model"))
    assert slow.likely > 1.2 * fast.likely and "link" in slow.why
    assert small_card["no offload, VAE tiled"].way.changes


def test_text_encoders_on_the_cpu_take_the_hosts_time(small_card):
    found = small_card["text encoders on CPU, VAE tiled"]
    encode = found.way.phases[1]
    p = predict_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB")
    assert encode.work == {"cpu": p.phases[1].flops} and found.way.host == p.parts["text_encoder"].nbytes
    rounded = p.phases[1].weights - encode.weights - p.parts["text_encoder"].nbytes
    assert "link" not in found.way.work and 0 <= rounded < 8 * MIB
    whole = small_card["no offload, VAE whole"].way.phases[1].work
    assert whole in ({"transformer": p.phases[1].flops}, {"memory": p.parts["text_encoder"].nbytes})


def test_a_card_that_is_not_named_has_no_seconds():
    plan = plan_pipeline("sd15", 512, 512, memory="12 GB")
    assert plan.machine is None and plan.recommended.way.name == "no offload, VAE whole"
    assert "No card is named: NVIDIA GeForce RTX 3060 stands for any with 12 GB." in plan.to_text(width=999)
    assert "seconds" not in str(plan), "the table's header"
    measured = plan_pipeline("sd15", 512, 512, memory="12 GB", calibrate={"no offload, VAE whole": 8.0})
    assert measured["no offload, VAE whole"].seconds.likely == pytest.approx(8, rel=0.02)


COMMANDS = ("fits sd15 decode 512", "largest sd15 decode", "fits sd15 512", "plan sd15 512",
            "fits sd15 512 --runtime sd.cpp", "plan sd15 512 --runtime sd.cpp", "formula sd15 decode",
            "formula sd15")  # fmt: skip
ABSENT = "No card is named, and none is present: NVIDIA GeForce RTX 4090 stands for yours."


@pytest.mark.each_value
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("named", "card", "said"),
    [
        ("", "RTX 4090", ABSENT),
        ("--memory 8GB", "RTX 3070", "No card is named: NVIDIA GeForce RTX 3070 stands for any with 8 GB."),
    ],
)
def test_one_question_is_answered_of_one_card(command, named, card, said, capsys):
    """Whichever command asks; if nobody named the card, the first line says so."""
    main([*command.split(), *named.split()])
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed and ("No card" in printed) == bool(said)
    main([*command.split(), "--gpu", card])
    same, shown = " ".join(capsys.readouterr().out.split()), printed.replace(f" {said}", "")
    if command.startswith("plan"):  # which tells no seconds of a card that was not named
        same, shown = (text.partition(" for ")[2].partition(" time ")[0][:99] for text in (same, shown))
    assert shown == same


def test_a_memory_that_no_listed_card_has():
    """The nearest card stands for it, with that memory."""
    for memory, name in (("13 GB", "RTX 3060"), ("200 GB", "B200")):
        for one in (predict("sd15", "decode", 512, 512, memory=memory), plan_pipeline("sd15", 512, 512, memory=memory)):
            assert name in one.assumed_card and one.assumed_card.endswith(f"stands for any with {memory}.")
        assert predict("sd15", "decode", 512, 512, memory=memory).total_memory == int(memory[:-3]) << 30


def test_this_machines_card_is_meant_if_none_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("vaemem.prediction.request.present_gpu", lambda: find_gpu("RTX 3060"))
    here = {"height": 512, "width": 512}
    for one in (predict("sd15", "decode", **here), predict_pipeline("sd15", **here), plan_pipeline("sd15", **here)):
        assert one.assumed_card == "" and "No card" not in str(one) and "RTX 3060" in str(one)
    assert plan_pipeline("sd15", **here).machine is not None, "its speed is known"
    other = plan_pipeline("sd15", **here, memory="8 GB")
    assert "RTX 3070" in other.assumed_card and other.to_dict()["card"]["assumed"] == other.assumed_card


@pytest.mark.skipif(sys.platform == "win32", reason="the program that stands in is a shell's")
@pytest.mark.parametrize(
    ("prints", "name"),
    [
        ("NVIDIA GeForce RTX 3060, 12288", "NVIDIA GeForce RTX 3060"),
        ("NVIDIA H100 80GB HBM3, 81559\nTesla T4, 15360", "NVIDIA H100 80GB HBM3"),
        ("Voodoo 5, 12288", None),
        ("No devices were found", None),
        ("", None),
    ],
)
def test_nvidia_smi_names_the_card(prints, name, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<E\n{prints}\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = present_gpu.__wrapped__()
    assert found == (name and find_gpu(name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert present_gpu.__wrapped__() is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert present_gpu.__wrapped__() is None


def test_a_run_that_begins_with_an_image():
    plan = plan_pipeline("sd15", 512, 512, gpu="RTX 3060", image=True)
    found = {phase.name: phase for phase in plan.outcomes[0].way.phases}
    assert list(found) == ["load", "encode prompt", "encode image", "denoise", "decode"]
    assert set(found["encode image"].work) == {"vae", "memory"} and 0 < found["encode image"].work["vae"]
    assert found["encode image"].work["vae"] < found["decode"].work["vae"]


def test_batches_and_numpys_integers():
    """Slices make sense for more than one image."""
    plan = plan_pipeline("sd15", np.int64(512), 512, np.int64(2), gpu="RTX 3060")
    names = [one.way.name for one in plan.outcomes]
    assert {"no offload, VAE sliced", "sequential offload, VAE sliced"} < set(names)
    assert "2 images" in plan.title
    assert predict_pipeline("sd15", np.int64(512), np.int32(512), gpu="RTX 3060").fits


def test_smaller_types_are_tried_where_weights_are_large():
    asked = {"gpu": "RTX 3060", "memory": "3 GB"}
    assert any(one.way.name.endswith(", nf4") for one in plan_pipeline("sd15", 512, 512, **asked).outcomes)
    few = plan_pipeline("sd15", 512, 512, types="fp8", **asked)
    assert len(few) == 7 and all(one.way.changes for one in few.outcomes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpu": "RTX 3060", "runtime": "ollama"}, ("runtime", "'ollama'")),
        ({"memory": 8}, ("memory", 8)),
        ({"gpu": "RTX 3060", "host_memory": "lots"}, ("host_memory", "'lots'")),
        ({"gpu": "RTX 3060", "batch": 0}, ("batch", 0)),
        ({"gpu": "RTX 3060", "cores": 0}, ("cores", 0)),
        ({"gpu": "RTX 3060", "link": "USB"}, ("link", "'USB'")),
        ({"gpu": "RTX 3060", "calibrate": {"by hand": 3.0}}, ("calibrate", "'by hand'")),
        (
            {"gpu": "RTX 3060", "calibrate": {"no offload, VAE whole": "8"}},
            ("calibrate['no offload, VAE whole']", "'8'"),
        ),
        ({"memory": "12 GB", "calibrate": {"no offload, VAE whole": -1}}, ("calibrate['no offload, VAE whole']", -1)),
        ({"memory": "12 GB", "calibrate": 8.0}, ("calibrate", 8.0)),
        ({"memory": "12 GB", "time_limit": "10s"}, ("time_limit", "'10s'")),
        ({"gpu": "RTX 3060", "types": []}, ("types", "none")),
        *(({"memory": "12 GB", name: 1}, (name, 1)) for name in ("guidance", "image", "flash")),
        ({"runtime": "mlx"}, ("pipeline", "'sd15'")),
        ({"pipeline": "flux", "runtime": "mlx"}, ("memory", "None")),
        ({"pipeline": "flux", "runtime": "mlx", "memory": "16 GB", "gpu": "RTX 3060"}, ("gpu", "'RTX 3060'")),
        ({"runtime": "sd.cpp", "memory": "12 GB", "dtype": "float16"}, ("dtype", "'float16'")),
        ({"pipeline": "flux2", "runtime": "sd.cpp", "memory": "12 GB"}, ("pipeline", "'flux2'")),
    ],
)
def test_what_cannot_be_planned_is_refused(asked, said):
    with refused(*said):
        plan_pipeline(**{"pipeline": "sd15", "height": 512, "width": 512, **asked})


def test_flux_offloaded_leaf_by_leaf_takes_what_was_measured():
    """diffusers' benchmarks have 1.9 s for a step on an L40S whose weights all come for each layer's call, in bfloat16
    and over PCIe 4.0 x16: what computing and moving them take one after the other, at most."""
    p = predict_pipeline("flux", 1024, 1024, gpu="L40S", offload="sequential", steps=1)
    step = next(phase for phase in p.phases if phase.name == "denoise")
    took = machine_of("L40S", link="PCIe 4.0 x16").seconds({"transformer": step.flops, "link": step.sent})
    assert took.low < 1.9 < took.high and took.high / took.low < 4


def test_a_run_that_no_rate_was_taken_from():
    """pruna.ai measured 8.71 s for FLUX.1-dev at 512x512 in 50 steps on an L40S, in PyTorch without compiling."""
    plan = plan_pipeline("flux", 512, 512, gpu="L40S", steps=50, types=[None])
    took = plan["no offload, VAE whole"].seconds
    assert took.low < 8.71 < took.high and took.high / took.low < 4


def test_both_ways_are_said_first():
    """The best way with the same picture, and the fastest if the decode may differ: the headline and two first rows."""
    tiled, rounded = way("t", seconds=3, changes="tiles show"), way("r", seconds=1, changes="rounded", rounds=True)
    plan = PipelinePlan("", [way("a"), tiled, rounded, way("b", seconds=20)], Room(5 * MIB), MACHINE)
    assert (plan.recommended.way.name, plan.alternative.way.name) == ("a", "t")
    assert "If a slightly different decode is fine, take t: it takes 3 s" in plan.to_dict()["summary"]
    assert plan.to_dict()["alternative"] == "t" and "r would take 1 s" in plan.reason
    assert [one.way.name for one in plan._ranked[:2]] == ["a", "t"]
    slow = PipelinePlan("", [way("a"), way("t", seconds=9.5, changes="tiles show")], Room(5 * MIB), MACHINE)
    assert slow.alternative is None and slow.to_dict()["alternative"] is None
    assert PipelinePlan("", [way("a"), rounded], Room(5 * MIB), MACHINE).alternative is None


def test_the_hosts_memory_is_assumed_aloud(monkeypatch):
    """32 GB, unless the question is about this machine, or gives it. FLUX.1's pinned weights are 47.8 GB."""
    asked = {"height": 1024, "width": 1024}
    plan = plan_pipeline("flux", gpu="RTX 3060", **asked)
    assert plan["streamed group offload, VAE whole"].fails_in == "host" and plan.room.host == 30 << 30
    assert "of weights, of 30.00 GB in an assumed machine of 32 GB." in plan.to_dict()["summary"]
    assert plan.to_dict()["host"] == {"available_bytes": 30 << 30, "source": "30.00 GB in an assumed machine of 32 GB"}
    told = plan_pipeline("flux", gpu="RTX 3060", **asked, host_memory="64 GiB")
    assert told["streamed group offload, VAE whole"].fits and "of weights, of 64.00 GB." in told.reason
    monkeypatch.setattr("vaemem.prediction.request.present_gpu", lambda: find_gpu("RTX 3060"))
    monkeypatch.setattr("vaemem.pipelines.pipeline_arguments.available_memory", lambda: 50 * GIB)
    here = plan_pipeline("flux", **asked)
    assert here.room.host == 50 * GIB and "of weights, of 50.00 GB free in this machine." in here.reason
    assert plan_pipeline("flux", gpu="RTX 3060", **asked).room.host == 30 << 30, "another machine's card is meant"
    monkeypatch.setattr("vaemem.pipelines.pipeline_arguments.available_memory", lambda: None)
    assert plan_pipeline("flux", **asked).room.host == 30 << 30


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("flash", {"flash": "x", "runtime": "sd.cpp"}),
        ("flash", {"flash": 2, "runtime": "sd.cpp"}),
        ("flash", {"flash": True}),
        ("guidance", {"guidance": "x", "runtime": "mlx"}),
        ("components", {"components": ["vae"], "runtime": "comfyui"}),
        ("components", {"components": 5, "runtime": "sd.cpp"}),
        ("types", {"types": [5]}),
        ("types", {"types": []}),
    ],
)
def test_arguments_mean_the_same_in_all_programs(argument, given):
    with refused(argument):
        plan_pipeline("flux", 512, 512, memory="16 GB", **given)


def test_a_component_aside_may_be_in_the_pipelines_own_repository():
    plan = plan_pipeline("hunyuan-video-1.5", 480, 848, gpu="RTX 4090", frames=5, types=[None])
    assert "HunyuanVideo15Pipeline" in plan.outcomes[0].way.code


def test_a_refusal_for_the_hosts_memory_says_what_was_assumed():
    plan = plan_pipeline("flux", 1024, 1024, gpu="RTX 4060", types=[None])
    assert plan.recommended is None
    assert plan.to_dict()["summary"].endswith(" short, of 30.00 GB in an assumed machine of 32 GB.")


def test_types_of_gguf_are_for_the_denoiser():
    """Also mixtures, in any spelling."""
    for kind in ("Q4_K_M", "q8_0"):
        plan = plan_pipeline("flux", 1024, 1024, gpu="RTX 4090", types=[kind])
        assert {*plan.outcomes[0].way.settings["components"]} == {"transformer"}


def test_a_plan_says_what_it_does_not_try_with_a_lora():
    plan = plan_pipeline("sdxl", 1024, 1024, gpu="RTX 4060", lora=16)
    assert not any("group" in one.way.name for one in plan.outcomes) and "With a LoRA, group offload" in str(plan)
    assert "LoRA" not in str(plan_pipeline("sdxl", 1024, 1024, gpu="RTX 4060", types=[None]))


def test_what_would_fit_offers_groups_and_smaller_weights():
    """Each line's command, asked so, goes through. The last line names the plan."""
    p = predict_pipeline("flux", 1024, 1024, gpu="RTX 3060")
    found = {one.what: one for one in p.would_fit}
    nf4 = {"transformer": "nf4", "text_encoder_2": "nf4"}
    for what, how in {
        "offload leaf_level stream, VAE whole": {"offload": "leaf_level stream"},
        "offload model, VAE whole, transformer in nf4, text_encoder_2 in nf4": {"offload": "model", "components": nf4},
    }.items():
        other = predict_pipeline("flux", 1024, 1024, gpu="RTX 3060", **how)
        assert (found[what].verdict, found[what].needed) == (other.verdict, other.judged.here[1]) and other.fits
    assert "--component transformer=nf4 --component text_encoder_2=nf4 --offload model" in p.to_text(width=999)
    assert "vaemem plan flux 1024x1024 --gpu 'NVIDIA GeForce RTX 3060'" in p.to_text(width=999)
    assert "vaemem plan" not in str(predict_pipeline("sd15", 512, 512, gpu="RTX 3060"))


def test_the_hosts_memory_is_in_a_predictions_first_lines():
    p = predict_pipeline("flux", 1024, 1024, gpu="RTX 3060", offload="leaf_level stream")
    assert f"The host's memory keeps {p.host / GIB:.2f} GB of weights." in p.to_text(width=999).splitlines()[0]


def test_the_host_may_be_too_small():
    plan = plan_pipeline("sd15", 512, 512, gpu="RTX 3060", host_memory="1 GB")
    assert plan["model offload, VAE whole"].fails_in == "host" and plan["no offload, VAE whole"].fits


# ---- drawn ----


def test_phases_are_drawn(small_card):
    pytest.importorskip("matplotlib")
    figure = plot.pipeline(small_card.outcomes[0], small_card.room.card)
    heights = [bar.get_height() + bar.get_y() for bar in figure.axes[0].patches]
    assert max(heights) == pytest.approx(small_card.outcomes[0].way.peak.total / MIB)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert set(labels) == {
        "the card's memory", "weights", "besides the weights",
    }  # fmt: skip
    p = predict_pipeline("sd15", 512, 512, gpu="RTX 3060", vae="vaemem", vae_memory_limit="500 MiB")
    drawn = plot.pipeline(p)
    tops = {}
    for bar in drawn.axes[0].patches:
        x = round(bar.get_x() + bar.get_width() / 2)
        tops[x] = max(tops.get(x, 0), bar.get_height() + bar.get_y())
    assert [tops[i] for i in range(len(p.phases))] == pytest.approx([phase.total / MIB for phase in p.phases])
    with refused("run"):
        plot.pipeline(Way("x", {}, ()))
    with refused("run", "Reading"):
        plot.pipeline(Way("x", {}, (Reading(0, 0, 0, 0),)))
    with refused("run", "PipelinePlan"):
        plot.pipeline(small_card)


# ---- the command line ----


def test_the_command(capsys):
    asked = ["plan", "zimage-turbo", "512", "--runtime", "mlx", "--memory", "64GB"]
    asked += ["--component", "transformer=6.8 GiB"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("Take mflux without options. It is the plainest of")
    assert main([*asked, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ways"][0]["denoise_weights_bytes"] > 6.8 * GIB
    assert main([*asked[:6], "1GB"]) == 1
    assert "Nothing fits." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--measured", "no offload"])
    assert complains(capsys.readouterr().err, "plan", names=["NAME=VALUE"])


def test_the_command_is_calibrated(capsys):
    measured = "no offload, VAE whole=8.0"
    assert main(["plan", "sd15", "512", "--memory", "12GB", "--measured", measured, "--format", "csv"]) == 0
    row = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert float(row["seconds"]) == pytest.approx(8, rel=0.02)


# ---- stable-diffusion.cpp ----


def by_sdcpp(pipeline="zimage-turbo", **asked):
    return plan_pipeline(pipeline, 1024, 1024, **({"memory": "12 GB", "runtime": "sd.cpp"} | asked))


def phases(one):
    return {phase.name: phase for phase in one.way.phases}


def test_ways_of_sdcpp_are_its_graphs_and_weights():
    plan = by_sdcpp(prompt_tokens=20, components={"transformer": "Q4_0"}, flash=True)
    encoder = graph("qwen3-4b", tokens=20, weight_type="q8_0")
    denoiser = graph("zimage", tokens=20, weight_type="q4_0", flash=True)
    vae = graph("vae-decoder")
    alone = phases(plan["--offload-to-cpu, VAE whole, --diffusion-fa"])
    everything = phases(plan["no offload, VAE whole, --diffusion-fa"])
    weights = encoder.weights + denoiser.weights + vae.weights
    assert [phase.weights for phase in everything.values()] == [weights] * 4
    for name, one in (("encode prompt", encoder), ("denoise", denoiser), ("decode", vae)):
        assert everything[name].added == alone[name].added == one.buffer + one.pool
        assert alone[name].weights == one.weights
    assert alone["load"].total == 0 and plan["--offload-to-cpu, VAE whole, --diffusion-fa"].way.host == weights
    assert everything["denoise"].work == {"transformer": 9 * denoiser.flops}
    assert alone["denoise"].work["link"] == denoiser.weights and "link" not in everything["denoise"].work


def test_where_weights_are_with_each_option():
    plan = by_sdcpp()
    encoder = graph("qwen3-4b", tokens=64, weight_type="q8_0").weights
    everything = phases(plan["no offload, VAE whole"])["denoise"].weights
    server, host = phases(plan["cond_only, VAE whole"]), phases(plan["--clip-on-cpu, VAE whole"])
    assert server["encode prompt"].weights == everything and server["denoise"].weights == everything - encoder
    assert host["encode prompt"].weights == everything - encoder and host["encode prompt"].added == 0
    assert "cpu Q8_0" in host["encode prompt"].work and "transformer" not in host["encode prompt"].work
    of_size = plan_pipeline("sd15", 512, 512, gpu="RTX 3060", runtime="sd.cpp", components={"text_encoder": "246 MiB"})
    for said in (of_size, plan_pipeline("sd15", 512, 512, gpu="RTX 3060", runtime="sd.cpp")):  # float16 unless told
        assert set(phases(said["--clip-on-cpu, VAE whole"])["encode prompt"].work) == {"cpu"}
    assert plan["cond_only, VAE whole"].way.work["link"] == 2 * encoder
    freed = phases(plan["freed after use, VAE whole"])
    assert freed["load"].weights == everything and freed["decode"].weights == graph("vae-decoder").weights


def test_the_vae_of_sdcpp():
    plan = by_sdcpp()
    sizes = {one.way.name.partition(", ")[2]: phases(one)["decode"] for one in plan.outcomes[:5]}
    whole, tile = graph("vae-decoder"), graph("vae-decoder", tile=DEFAULT_TILE)
    assert sizes["VAE whole"].work == {"vae": whole.flops, "memory": whole.moved}
    assert sizes["VAE tiled"].work == {"vae": 49 * tile.flops, "memory": 49 * tile.moved}
    assert sizes["VAE tiled"].added == tile.buffer + tile.pool
    assert set(sizes["VAE direct"].work) == {"vae direct"} and sizes["VAE direct"].added < whole.buffer / 2
    on_cpu = sizes["VAE on CPU, tiled"]
    assert set(on_cpu.work) == {"cpu"} and on_cpu.added == 0
    assert plan["no offload, VAE on CPU, tiled"].way.settings == {"--vae-tiling": True, "--vae-on-cpu": True}


def test_guidance_batches_and_sizes_of_sdcpp():
    once = by_sdcpp("sd15", guidance=False)["no offload, VAE whole"].way.work
    twice = by_sdcpp("sd15", batch=3)["no offload, VAE whole"].way.work
    assert twice["unet"] == 6 * once["unet"] and twice["vae"] == 3 * once["vae"]
    assert twice["transformer"] == 2 * once["transformer"]
    sized = by_sdcpp(components={"transformer": "6.8 GiB", "text_encoder": 4 * GIB})
    assert phases(sized["--offload-to-cpu, VAE whole"])["denoise"].weights == int(6.8 * GIB)
    assert len(by_sdcpp("sd15")) == len(by_sdcpp("sdxl")) == 25


def test_every_pipeline_has_ways_of_sdcpp():
    for name in set(PIPELINES) - set(running.MODELS):
        with refused("pipeline", repr(name)):
            by_sdcpp(name, memory="24 GB")
    for name, known in running.MODELS.items():
        roles = {*known.encoders, known.role, "vae"}
        assert roles == set(PIPELINES[name].parts)
        assert by_sdcpp(name, memory="24 GB").recommended


@pytest.mark.parametrize("asked", [{}, {"flash": True, "types": "q4_0"}])
def test_a_way_of_sdcpp_is_handed_to_predict_pipeline(asked):
    """By its name and by its settings, which are options of the program, but for whose program it is."""
    size = {"height": 512, "width": 512, "gpu": "RTX 3060", "runtime": "sd.cpp"}
    flags = {"--offload-mode", "--clip-on-cpu", "--offload-to-cpu", "--vae-conv-direct", "--vae-tiling", "--vae-on-cpu"}
    flags |= {"--diffusion-fa", "--tensor-type-rules", "program"}
    for one in plan_pipeline("flux", **size, **asked).outcomes:
        for handed in (one.way.name, one.way.settings):
            found = predict_pipeline("flux", **size, offload=handed)
            assert found.way == one.way and found.title.endswith(f", {one.way.name}")
        assert set(one.way.settings) <= flags and len(one.way.settings) >= len(asked)
    assert all("ggml a8db410" in note for note in (*found.notes[:1], *one.way.notes))
    rules = "model.diffusion_model=q4_K,text_encoders.llm=q4_K"
    assert running.words_of("zimage-turbo", {"--tensor-type-rules": rules, "--vae-tiling": True}) == (
        "no offload", "tiled", "Q4_K",
    )  # fmt: skip


def test_options_of_sdcpp_that_a_plan_does_not_try():
    """The VAE on the CPU untiled, and what is said twice."""
    assert running.words_of("sd15", "--clip-on-cpu", "on CPU") == ("--clip-on-cpu", "on CPU")
    assert running.words_of("sd15", "cond_only, VAE direct", "tiled") == ("cond_only", "direct", "tiled")
    assert running.words_of("sd15", {"--vae-tiling": True, "--vae-on-cpu": False}) == ("no offload", "tiled")
    typed = "--offload-to-cpu --vae-conv-direct --vae-tiling --diffusion-fa"
    assert running.words_of("sd15", typed) == ("--offload-to-cpu", "direct", "tiled", "--diffusion-fa")


@pytest.mark.parametrize(
    ("offload", "vae", "said"),
    [
        ("model", "whole", ("offload", "'model'")),
        ("cond_only, VAE sliced", "whole", ("offload",)),
        ("cond_only --clip-on-cpu", "whole", ("offload",)),
        ("none, Q4_K, Q4_0", "whole", ("offload", "'none, Q4_K, Q4_0'")),
        (None, "whole", ("offload", "None")),
        ("", "whole", ("offload",)),
        ({"--vae-tilings": True}, "whole", ("offload", "{'--vae-tilings': True}")),
        ({"--clip-on-cpu": True, "--offload-to-cpu": True}, "whole", ("offload",)),
        ({"--offload-mode": "aggressive"}, "whole", ("offload", "{'--offload-mode': 'aggressive'}")),
        ("none", "sliced", ("vae", "'sliced'")),
        ("none", "whole tiled", ("vae",)),
        ("none", "cond_only", ("vae",)),
        ("none", ["tiled"], ("vae",)),
    ],
)
def test_what_is_no_way_of_sdcpp(offload, vae, said):
    with refused(*said):
        predict_pipeline("sd15", 512, 512, runtime="sd.cpp", offload=offload, vae=vae)


def test_smaller_types_of_sdcpp():
    """Tried by themselves where nothing fits; what is given of a component stays."""
    plan = by_sdcpp("flux", flash=True)
    assert len(plan) == 50 and plan.recommended.way.name.endswith(", Q4_K") and "rounded" in plan.reason
    named = by_sdcpp(types="Q4_0", components={"text_encoder": "F16"})
    assert len(named) == 25 and all(one.way.name.endswith(", Q4_0") for one in named.outcomes)
    found = phases(named["--offload-to-cpu, VAE whole, Q4_0"])
    assert found["denoise"].weights == graph("zimage", tokens=64, weight_type="q4_0").weights
    assert found["encode prompt"].weights == graph("qwen3-4b", tokens=64, weight_type="f16").weights


def test_a_gguf_says_what_its_weights_take(tmp_path):
    """Its header alone is read."""
    name = b"first.weight"
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    header += struct.pack("<IQQIQ", 2, 64, 32, 0, 0)
    path = tmp_path / "transformer.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(4 * 64 * 32))
    plan = by_sdcpp(components={"transformer": str(path)})
    assert phases(plan["--offload-to-cpu, VAE whole"])["denoise"].weights == 4 * 64 * 32


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"types": ["nf4"]}, ("types", "'nf4'")),
        ({"cache_limit": 1}, ("cache_limit", 1)),
        ({"components": {"unet": "Q8_0"}}, ("components", "'unet'")),
        ({"components": {"transformer": "nf4"}}, ("components['transformer']", "'nf4'")),
        ({"runtime": "diffusers", "flash": True}, ("flash", "True")),
    ],
)
def test_what_sdcpp_does_not_have_is_refused(asked, said):
    with refused(*said):
        by_sdcpp(**asked)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("memory", ["6 GB", "8 GB", "16 GB", "24 GB"])
def test_a_card_stands_in_whose_attention_was_recorded(memory):
    """Of the cards of a size the oldest write out bfloat16's scores."""
    assert plan_pipeline("zimage-turbo", 512, 512, memory=memory).outcomes


def test_arguments_that_are_not_needed_are_checked_too():
    for wrong, match in (
        ({"time_limit": -1}, ("time_limit", -1)),
        ({"link": "USB"}, ("link", "'USB'")),
        ({"cpu": "M1"}, ("cpu", "'M1'")),
    ):
        with refused(*match):
            plan_pipeline("sd15", 512, 512, memory="8 GB", **wrong)


def test_a_vae_that_is_converted_to_float32_takes_as_long_as_in_float32():
    """SDXL's is, and the machine's rate is that of float16: its FLOPs count for as many as take so long."""
    plain, converted = (
        plan_pipeline("sdxl", 1024, 1024, gpu="RTX 4090", components=given)["no offload, VAE whole"]
        for given in ({"vae": "float16"}, None)
    )
    works = [one.way.phases[-1].work for one in (plain, converted)]
    assert works[1]["vae"] == pytest.approx(2 * works[0]["vae"], rel=0.01)
    assert works[1]["memory"] == pytest.approx(2 * works[0]["memory"], rel=0.01)


def test_a_plan_tries_a_float16_vae_and_tiles_smaller_than_the_image():
    plan = plan_pipeline("sdxl", 1024, 1024, gpu="RTX 3070", types=[None])
    fixed, tiled = (plan[f"model offload, VAE {how}"] for how in ("whole in float16", "tiled 512"))
    for one in (fixed, tiled):
        p = predict_pipeline("sdxl", 1024, 1024, gpu="RTX 3070", **one.way.settings)
        assert one.verdict == p.verdict == "fits" and [phase.total for phase in one.way.phases] == [
            phase.total for phase in p.phases
        ]
    assert fixed.way.settings == {
        "offload": "model",
        "vae": "whole",
        "dtype": "float16",
        "components": {"vae": "float16"},
    }
    assert "madebyollin/sdxl-vae-fp16-fix" in fixed.way.changes and "blended" in tiled.way.changes
    assert plan.alternative is fixed and "fine, take model offload, VAE whole in float16: it takes" in plan.reason
    names = [one.way.name for one in plan_pipeline("sdxl", 512, 512, gpu="RTX 3070", types=[None]).outcomes]
    assert not any("tiled" in name for name in names)
    told = plan_pipeline("sdxl", 1024, 1024, gpu="RTX 3070", types=[None], components={"vae": "float32"})
    assert not any("in float16" in one.way.name for one in told.outcomes)
    assert any("VAE tiled" in one.way.name for one in plan_pipeline("sd15", 1024, 1024, gpu="RTX 3070").outcomes)


@pytest.mark.parametrize(("pipeline", "batch"), [("sd15", 1), ("sdxl", 2), ("flux", 1)])
def test_the_code_of_a_way_runs(pipeline, batch, monkeypatch):
    """The script runs with diffusers' own classes. The pipelines have no weights here."""
    diffusers = pytest.importorskip("diffusers")
    from vaemem.pytorch import AutoencoderKL

    installed = importlib.metadata.version  # BitsAndBytesConfig asks for its library's version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: {"bitsandbytes": "0.50.2"}.get(name) or installed(name)
    )
    for one in plan_pipeline(pipeline, 1024, 1024, batch, gpu="RTX 3060").outcomes:
        real = getattr(diffusers, PIPELINES[pipeline].class_name)
        pipe, roles = mock.MagicMock(spec=real), {role: mock.MagicMock() for role in PIPELINES[pipeline].parts}
        roles["vae"] = mock.MagicMock(spec=diffusers.AutoencoderKL)
        pipe.configure_mock(**roles)
        monkeypatch.setattr(real, "from_pretrained", made := mock.MagicMock(return_value=pipe))
        monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", mock.MagicMock())
        monkeypatch.setattr(AutoencoderKL, "from_module", mock.MagicMock())
        monkeypatch.setattr(diffusers.FluxTransformer2DModel, "from_single_file", mock.MagicMock())
        exec(one.way.code, dict(roles))
        assert made.called, one.way.name
