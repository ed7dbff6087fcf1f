"""Whole pipelines on a simulated GPU: phases, offloading, what fits."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from errors import refused

from vaemem import OutOfMemoryError, _core, formula, plan_pipeline, predict, predict_pipeline, predict_sweep
from vaemem.pipelines import diffusers_run, recorded_modules
from vaemem.pipelines.components import PIPELINES, is_vae, weights_of
from vaemem.pipelines.phased_answer import read_phases
from vaemem.pipelines.storage import tensor_bytes
from vaemem.prediction.peak_equations import BATCHES, Point
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.runtimes import FIRST
from vaemem.prediction.verdict import GUESSES, NO_ROOM

pytestmark = pytest.mark.python

MIB, GIB = 1 << 20, 1 << 30


def phase(prediction, name):
    return next(phase for phase in prediction.phases if phase.name == name)


def stored(phase):
    """Bytes of the weights that a phase has on the card, without what the allocator rounds them up by."""
    return sum(size for name, size in phase.peak_tensors if name.startswith("weights of "))


def test_a_fit_on_cudnns_next_plans_is_told():
    """What stood in on the card is among the notes, and the verdict says what the run takes there."""
    asked = {"components": {"unet": "nf4"}, "torch_version": "2.8.0"}
    p, roomy = (predict_pipeline("sdxl", 1024, 1024, gpu=gpu, **asked) for gpu in ("RTX 4060", "RTX 4090"))
    assert p.fits and p.on_card < p.peak == roomy.peak
    assert [sum("cuDNN's next plan" in note for note in one.notes) for one in (p, roomy)] == [1, 0]
    assert (p.verdict, roomy.verdict) == ("tight", "fits") and p.judged.why == NO_ROOM
    assert p.summary.startswith(f"tight: it takes {p.on_card / GIB:.2f} of the {p.available / GIB:.2f} GB")


def test_the_upper_bound_of_a_pipeline():
    """It is never below what any cuDNN that may be would make of it, and a 16th of what is not weights more."""
    asked = {"offload": "model", "gpu": "RTX 3090"}
    told, untold = (predict_pipeline("sdxl", 512, 512, **asked, **v) for v in ({"torch_version": "2.6.0"}, {}))
    for p in (told, untold):
        assert p.peak <= p.band[1] < p.upper and p.to_dict()["upper_bytes"] == p.upper
        assert f"at most {p.upper / GIB:.2f} GB" in p.summary and p.verdict == "fits"
        assert p.spare == p.available - p.on_card
    peaks = {v: predict_pipeline("sdxl", 512, 512, **asked, cudnn_version=v) for v in ("9.8.0", "9.10.2", "9.28.0")}
    assert told.upper <= untold.upper and all(one.upper <= told.upper for one in peaks.values())
    exact = peaks["9.10.2"]
    assert exact.band == (exact.peak, exact.peak)  # this version was asked
    most = max(phase.weights + (phase.total - phase.weights) * 17 / 16 for phase in exact.phases)
    assert exact.upper == math.ceil(most) + 20 * MIB
    assert predict_pipeline("zimage-turbo", 512, 512, runtime="sd.cpp", gpu="RTX 3090").upper > 0


def test_weights_of_a_vae_are_the_models():
    for model in ("sd15", "sdxl", "flux", "zimage"):
        p = SimulatedProcess("T4")
        held = p.load(model, "float16", "diffusers")
        assert [p._script.bytes_of(at) for at in held.storages] == [
            weight.nbytes("float16") for weight in weights_of(model)
        ]


def test_phases_of_a_pipeline():
    found = predict_pipeline("sd15", 512, 512, gpu="T4")
    assert [p.name for p in found.phases] == ["load", "encode prompt", "denoise", "decode"]
    weights = {part.role: part.nbytes for part in found.parts.values()}
    assert sum(weights.values()) == 2 * (859_520_964 + 123_060_480 + 83_653_863) + 8 * 77  # int64 position_ids
    assert len({*found.phases}) == 4
    for p in found.phases:
        assert stored(p) == sum(weights.values()) < p.weights < 1.02 * stored(p)
        assert p.allocated == p.weights + p.workspace + p.activations == sum(size for _, size in p.peak_tensors)
        assert p.allocated <= p.reserved == p.total and p.fits
    decode = predict("sd15", "decode", 512, 512, gpu="T4")
    above = phase(found, "decode").allocated - phase(found, "load").allocated
    assert decode.allocated <= above <= decode.allocated + 8 * MIB + MIB  # cuBLAS's workspace is there already, or now
    assert found.peak == phase(found, "decode").reserved and found.bottleneck == "decode"
    assert found.band[0] <= found.peak <= found.band[1]
    assert max(moment.allocated for moment in found.timeline) == phase(found, "decode").allocated
    assert "decode" in repr(found)


@pytest.mark.parametrize("offload", ["none", "model", "sequential"])
@pytest.mark.parametrize("pipeline, vae", [("zimage-turbo", "zimage"), ("flux", "flux"), ("sd15", "sd15")])
def test_a_decode_takes_as_much_beside_the_weights_as_the_vae_alone(pipeline, vae, offload):
    """Plus cuBLAS's workspace and a few latents, but not what the allocator rounds 20 GB of weights up by."""
    whole = phase(predict_pipeline(pipeline, 1024, 1024, gpu="RTX 4090", offload=offload), "decode")
    alone = predict(vae, "decode", 1024, 1024, gpu="RTX 4090")
    rounded = dict(whole.peak_tensors)["[rounded up by the allocator]"]
    assert 0 < whole.activations + whole.workspace - alone.allocated < 16 * MIB
    assert rounded > 100 * MIB or (pipeline, offload) != ("zimage-turbo", "none")


@pytest.mark.parametrize("gpu", ["T4", "RTX 3060", "RTX 4090", "H100", "RTX 5090"])
def test_nothing_stands_in_for_cudnns_answers(gpu):
    found = predict_pipeline("sd15", 512, 768, gpu=gpu, torch_version="2.9.1")
    assert found.notes == () and found.band == (found.peak, found.peak)


def test_steps_beyond_the_first_ones_take_no_more():
    few, many = (predict_pipeline("sd15", 512, 512, gpu="T4", steps=steps).phases for steps in (8, 80))
    for one, other in zip(few, many, strict=True):
        same = ("name", "reserved", "where", "weights", "workspace")
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
        assert 0 <= other.allocated - one.allocated <= 512  # the scheduler's timesteps


def test_guidance_and_steps_double_the_work():
    both = phase(predict_pipeline("sd15", 512, 512, steps=10), "denoise")
    alone = phase(predict_pipeline("sd15", 512, 512, steps=10, guidance=False), "denoise")
    longer = phase(predict_pipeline("sd15", 512, 512, steps=20), "denoise")
    assert alone.activations < both.activations and both.flops == 2 * alone.flops
    assert 11 * longer.flops == 21 * both.flops  # PNDM's scheduler asks the denoiser once more
    assert longer.allocated - both.allocated <= 512


def test_model_offload_keeps_one_component():
    found = predict_pipeline("sd15", 512, 512, gpu="T4", offload="model")
    parts = found.parts
    assert [p.name for p in found.phases] == ["encode prompt", "denoise", "decode"]
    assert stored(phase(found, "encode prompt")) == parts["text_encoder"].nbytes
    assert stored(phase(found, "denoise")) == parts["unet"].nbytes
    assert phase(found, "denoise").sent == parts["unet"].nbytes and phase(found, "decode").sent == parts["vae"].nbytes
    whole = predict_pipeline("sd15", 512, 512, gpu="T4")
    gone = phase(whole, "denoise").allocated - phase(found, "denoise").allocated
    others = sum(part.nbytes for part in parts.values()) - parts["unet"].nbytes
    rounded = sum(size for p in (whole, found) for name, size in phase(p, "denoise").peak_tensors if "rounded" in name)
    assert others <= gone <= others + rounded
    assert found.host == sum(part.nbytes for part in parts.values()) and whole.host == 0


def test_sequential_offload_sends_every_submodules_weights():
    found = predict_pipeline("sd15", 512, 512, gpu="T4", offload="sequential", steps=3)
    unet = found.parts["unet"]
    denoise = phase(found, "denoise")
    largest = max(sum(size for _, size in held) for held in unet.sent.values())
    left = 1024  # the text encoder's buffer stays on the card
    # PNDM calls the UNet once more than it has steps.
    assert denoise.sent == 4 * unet.nbytes and 0 < denoise.weights <= largest + left
    model = phase(predict_pipeline("sd15", 512, 512, gpu="T4", offload="model"), "denoise")
    assert denoise.allocated < model.allocated - unet.nbytes + largest + MIB


def test_sequential_offload_with_batches_tiles_and_an_image():
    """The decoder's weights come for each call of it: once whole, for each image or tile else."""
    asked = {"height": 768, "width": 512, "batch": 2, "gpu": "T4", "image": True}
    ways = ("whole", "sliced", "tiled")
    found = {how: predict_pipeline("sd15", **asked, offload="sequential", vae=how) for how in ways}
    once = sum(one.nbytes("float16") for one in weights_of("sd15") if one.name.startswith(("decoder", "post")))
    assert [phase(p, "decode").sent for p in found.values()] == [once, 2 * once, 4 * once]
    encoder = found["whole"].parts["vae"].nbytes - once
    assert [phase(p, "encode image").sent for p in found.values()] == [encoder, encoder, 4 * encoder]  # of one image
    for how, p in found.items():
        there = predict_pipeline("sd15", **asked, vae=how)
        for name in ("encode image", "decode"):
            assert phase(p, name).flops == phase(there, name).flops
            assert 0 <= phase(p, name).weights < phase(there, name).weights / 20
            rounded = 32 * MIB  # of the weights that are all there
            assert abs(phase(p, name).activations - phase(there, name).activations) < rounded


def test_sequential_offload_decodes_sdxl_in_float32():
    """As without offloading, but that each weight comes for its call; so it needs more than an RTX 2060 has, and tiles
    do not."""
    asked = {"height": 1536, "width": 1536, "gpu": "RTX 2060"}
    alone, whole = (phase(predict_pipeline("sdxl", **asked, offload=o), "decode") for o in ("sequential", "model"))
    assert abs(alone.activations - whole.activations) < 4 * MIB and alone.weights < whole.weights / 10
    plan = plan_pipeline("sdxl", **asked, types=[None])
    found = [plan[f"sequential offload, VAE {vae}"].summary for vae in ("whole", "tiled")]
    assert found == ["runs out in decode, 1.24 GB short", "fits"]


def test_the_ways_of_the_vae():
    ways = {
        way: phase(predict_pipeline("sd15", 1024, 1024, batch=2, vae=way), "decode")
        for way in ("whole", "tiled", "sliced")
    }
    assert ways["tiled"].allocated < ways["sliced"].allocated < ways["whole"].allocated
    assert ways["tiled"].flops > ways["whole"].flops == ways["sliced"].flops
    ours = predict_pipeline("sd15", 1024, 1024, vae="vaemem", vae_memory_limit="1 GiB")
    decode = phase(ours, "decode")
    assert decode.outside == 1 << 30 and decode.total == decode.reserved + (1 << 30)
    assert decode.allocated < phase(ours, "denoise").allocated
    tight = predict_pipeline("sd15", 1024, 1024, vae="vaemem", vae_memory_limit="22.5 GiB")
    assert tight.out_of_memory_at[0] == "decode" and phase(tight, "decode").fits is False


def test_weights_in_other_types():
    plain = predict_pipeline("sd15", 512, 512)
    packed = predict_pipeline("sd15", 512, 512, components={"unet": "Q8_0"})
    assert packed.parts["unet"].nbytes < 0.9 * plain.parts["unet"].nbytes  # convolutions stay
    assert packed.peak < plain.peak and any("ComfyUI-GGUF" in note for note in packed.notes)
    single = predict_pipeline("sd15", 512, 512, components={"vae": "float32"})
    assert single.parts["vae"].nbytes == 2 * plain.parts["vae"].nbytes
    assert phase(single, "decode").allocated > phase(plain, "decode").allocated
    given = predict_pipeline("sd15", 512, 512, components={"text_encoder": None})
    assert "text_encoder" not in given.parts and phase(given, "encode prompt").flops == 0


LARGE = ("transformer", "text_encoder_2")  # of FLUX.1


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_bitsandbytes_quantises_matrix_by_matrix_as_it_loads(kind):
    """On the device, one after the other: of the components' full size there is one matrix at a time."""
    both = dict.fromkeys(LARGE, f"{kind} from bf16")
    found = predict_pipeline("flux", 512, 512, offload="model", components=both, gpu="H100")
    parts = [found.parts[role] for role in both]
    load, *_ = found.phases
    quantised = sum(part.nbytes for part in parts)
    assert load.name == "load" and 0.98 * quantised < stored(load) <= quantised
    matrices = [2 * math.prod(weight.shape) for part in parts for weight in part.weights if weight.type == kind]
    assert 0.8 * max(matrices) < load.activations < max(matrices) + 64 * MIB
    whole = predict_pipeline("flux", 512, 512, offload="model", gpu="H100")
    assert [part.file_bytes for part in parts] == [whole.parts[role].nbytes for role in both]
    small = predict_pipeline("flux", 512, 512, offload="model", components=both, gpu="RTX 3080", memory="10 GB")
    assert small.out_of_memory_at[0] == "load"
    alone = predict_pipeline("flux", 512, 512, components=both, gpu="H100")
    assert alone.phases[0].reserved < 1.01 * sum(part.nbytes for part in alone.parts.values())


def test_a_quantised_file_is_loaded_to_the_cpu_unless_it_is_said():
    """Offloaded by model, two components in nf4 never lie on the card together then; loaded on the card they do."""
    asked = {"height": 1024, "width": 1024, "gpu": "RTX 3080", "memory": "10 GB", "offload": "model"}
    found = {
        place: predict_pipeline("flux", **asked, components=dict.fromkeys(LARGE, f"nf4{place}"))
        for place in ("", " on cpu", " on cuda", " kept on cuda", " from bfloat16", " from bfloat16 on cpu")
    }
    default, there, kept, quantised = (found[one] for one in ("", " on cuda", " kept on cuda", " from bfloat16"))
    assert [one.verdict for one in found.values()] == ["fits"] * 2 + ["does not fit"] * 3 + ["fits"]
    assert default.phases == found[" on cpu"].phases == found[" from bfloat16 on cpu"].phases
    assert [one.name for one in default.phases] == ["encode prompt", "denoise", "decode"]
    assert default.peak < 7.6 * 1024 * MIB
    for other in (there, quantised):
        assert [(one.name, stored(one)) for one in other.phases[1:]] == [
            (one.name, stored(one)) for one in default.phases
        ]
    both = sum(default.parts[role].nbytes for role in LARGE)
    assert 0.99 * both < stored(there.phases[0]) <= both and there.out_of_memory_at[0] == "load"
    assert not any("not quantised yet" in name for name, _ in there.phases[0].peak_tensors)
    assert any("not quantised yet" in name for name, _ in quantised.phases[0].peak_tensors)
    assert all(one.weights >= both for one in kept.phases[1:]) and kept.host == default.host - both
    assert [sum("loaded with device_map='cpu'" in note for note in one.notes) for one in (default, there)] == [2, 0]
    assert all(part.file_bytes == part.nbytes for part in default.parts.values())
    assert all(quantised.parts[role].file_bytes > 2 * default.parts[role].nbytes for role in LARGE)


def test_any_component_may_be_loaded_on_the_card():
    early, late = (
        predict_pipeline("sd15", 512, 512, gpu="T4", offload="model", components={"unet": f"float16{place}"})
        for place in (" on cuda", "")
    )
    assert [one.name for one in early.phases[1:]] == [one.name for one in late.phases]
    assert stored(early.phases[0]) == early.parts["unet"].nbytes == stored(phase(late, "denoise"))
    int8 = {"transformer": "int8"}
    moved, kept = (
        predict_pipeline("flux", 512, 512, gpu="H100", offload="model", components=one)
        for one in (int8, {"transformer": "int8 kept on cuda"})
    )
    assert moved.host - kept.host == moved.parts["transformer"].nbytes
    assert any("give 'int8 kept on cuda'" in note for note in moved.notes)


@pytest.mark.parametrize("pipeline, absent", [("flux2", "text_encoder"), ("flux", "text_encoder_2")])
def test_a_text_encoder_may_be_elsewhere(pipeline, absent):
    """It takes nothing of the card; what it gives is there all the same."""
    asked = {"height": 1024, "width": 1024, "gpu": "RTX 4090", "offload": "model"}
    here, there = (
        predict_pipeline(pipeline, **asked, components={absent: given, "transformer": "nf4"})
        for given in ("nf4", "none")
    )
    assert absent not in there.parts and f"weights of {absent}" not in dict(phase(there, "encode prompt").peak_tensors)
    held = [dict(phase(one, "denoise").peak_tensors)["prompt_embeds"] for one in (here, there)]
    assert held[0] == held[1] and abs(phase(there, "denoise").total - phase(here, "denoise").total) < 64 * MIB
    assert there.host == here.host - here.parts[absent].nbytes
    plan = plan_pipeline(pipeline, 1024, 1024, gpu="RTX 4090", components={"transformer": "nf4", absent: None})
    on_cpu = any("text encoders on CPU" in one.way.name for one in plan.outcomes)
    assert plan.recommended and on_cpu == (pipeline == "flux"), "which has another"


def test_unpacked_weights_are_there_for_their_layer():
    """What a linear layer computes with is as large as the layer was before it was packed."""
    packed = predict_pipeline("sd15", 512, 512, components={"unet": "Q8_0"}).parts["unet"]
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert packed.working[layer] == [("weight, unpacked", 2560 * 320 * 2, 0, 0, 0)]
    *_, whole = (
        predict_pipeline("sd15", 512, 512, components={"unet": "Q8_0"}, dtype="bfloat16").parts["unet"].working[layer]
    )
    assert whole == packed.working[layer][0]


def test_a_fit_that_rests_on_plans_that_are_not_known():
    p = predict_pipeline("sd15", 512, 512, gpu="RTX 3060")
    least, sure = p.least_band
    assert p.verdict == "fits" and p.on_card == p.peak and least == p.least < sure < p.peak
    for room, guesses in ((sure, False), (sure - 4 * MIB, True), (least - 4 * MIB, None)):
        other = predict_pipeline("sd15", 512, 512, gpu="RTX 3060", used=p.available - room)
        assert other.verdict == ("does not fit" if guesses is None else "tight")
        assert other.fits == (guesses is not None)
        assert other.on_card is None if not other.fits else other.on_card <= room < other.peak == p.peak
        settings = {"offload": "none", "vae": "whole"}
        way = sys.modules["vaemem.pipelines.by_diffusers"]._way(other, "", settings, "", None)
        assert way.unsure == other.tight_because and bool(way.unsure) == other.fits
        assert other.fits is False or (other.judged.why == GUESSES) == guesses
        if guesses:
            assert " it needs at least " in other.summary
    graph = predict_pipeline("sd15", 512, 512, runtime="sd.cpp", gpu="RTX 3060")
    assert (graph.verdict, graph.on_card, graph.spare) == ("fits", graph.peak, graph.available - graph.peak)


def test_where_memory_runs_out():
    for used, where in (("14 GB", "load"), ("13.3 GB", "decode")):
        found = predict_pipeline("sd15", 512, 512, gpu="T4", used=used)
        at = [p.name for p in found.phases].index(where)
        assert not found.fits and found.out_of_memory_at[0] == where and found.out_of_memory_at[1].bytes > 0
        assert [p.fits for p in found.phases] == [True] * at + [False] + [None] * (3 - at)
        assert f"it runs out in {where} at " in repr(found) and found.verdict == "does not fit"
    assert predict_pipeline("sd15", 512, 512, gpu="T4", offload="model", used="13.3 GB").fits


@pytest.mark.parametrize("offload", ["none", "model", "sequential"])
def test_a_repeated_run_is_what_one_of_its_own_is(offload):
    """On devices of every size: what the core repeats is what the pipeline's code plays there."""
    p = predict_pipeline("sdxl", 768, 512, gpu="RTX 3060", offload=offload)
    for card in (*range(p.least // 2, p.peak, (p.peak - p.least // 2) // 6), p.least, p.least - 2 * MIB, p.peak):
        run = diffusers_run.PipelineRun(p.request, p.request.start(p._process.workspace, total_memory=card))
        full = None
        try:
            run.play()
        except OutOfMemoryError as error:
            full = run.process.frames[error.tag], error.requested
        again, lacking = p.request.play_on(card, p._process)
        assert lacking == full
        assert read_phases(run.process, run.names) == read_phases(again, run.names)
        assert run.process.guessed_plans == again.guessed_plans
        assert (lacking is None) == (card >= p.least)


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"pipeline": "sd16"}, ("pipeline", "'sd16'")),
        ({"height": 500}, ("height", 500)),
        ({"pipeline": "zimage-turbo", "height": 1000}, ("height", 1000)),
        ({"pipeline": "flux", "height": 8}, ("height", 8)),
        ({"vae": "tiled 12"}, ("vae", "'tiled 12'")),
        ({"vae": "tiled \u0665\u0661\u0662"}, ("vae", "'tiled \u0665\u0661\u0662'")),
        ({"vae": f"tiled {1 << 21}"}, ("vae", f"'tiled {1 << 21}'")),
        ({"vae": f"tiled {'8' * 5000}"}, ("vae",)),
        ({"vae": "tiled0"}, ("vae", "'tiled0'")),
        ({"offload": "group"}, ("offload", "'group'")),
        ({"vae": "vaemem"}, ("vae_memory_limit",)),
        ({"vae_memory_limit": "1 GB"}, ("vae_memory_limit",)),
        ({"components": {"transformer": "nf4"}}, ("components", "'transformer'")),
        ({"components": {"unet": "Q9"}}, ("components['unet']", "'Q9'")),
        ({"components": {"unet": None}}, ("components", "None")),
        ({"components": {"unet": "none"}}, ("components", "None")),
        ({"components": {"unet": "Q8_0 from float16"}}, ("components['unet']",)),
        ({"components": {"unet": "nf4 from Q8_0"}}, ("components['unet']", "'Q8_0'")),
        ({"components": {"unet": "nf4 on gpu"}}, ("components['unet']", "'nf4 on gpu'")),
        ({"components": {"vae": "Q8_0"}}, ("components['vae']", "'Q8_0'")),
        ({"dtype": "int8"}, ("dtype", "'int8'")),
        ({"components": {"unet": "nf4"}, "offload": "sequential"}, ("offload", "'sequential'")),
        ({"batch": 0}, ("batch", 0)),
        ({"prompt_tokens": 10**6}, ("prompt_tokens", 1000000)),
        ({"guidance": "yes"}, ("guidance", "'yes'")),
        ({"image": "cat.png"}, ("image", "'cat.png'")),
        ({"runtime": "sd.cpp", "guidance": 1.0}, ("guidance", 1.0)),
    ],
)
def test_bad_questions(wrong, match):
    with refused(*match):
        predict_pipeline(**{"pipeline": "sd15", "height": 512, "width": 512, **wrong})


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipelines_parts_were_recorded(name):
    for part in PIPELINES[name].parts.values():
        assert part in (*_core.models(), "wan2.1") or is_vae(part) or recorded_modules.load_program(part).weights


@pytest.mark.parametrize("gpu", ["T4", "V100", "RTX 2080 Ti"])
@pytest.mark.parametrize("pipeline", ["sd15", "flux", "zimage-turbo"])
def test_bfloat16_on_cards_without_a_fused_kernel_for_it(pipeline, gpu):
    """The denoiser writes out its scores there, in float32. The work is the same."""
    old, new = (predict_pipeline(pipeline, 512, 512, gpu=card, dtype="bfloat16") for card in (gpu, "RTX 4090"))
    for name in ("denoise", "encode prompt"):
        assert phase(old, name).flops == phase(new, name).flops
    assert phase(old, "denoise").allocated > phase(new, "denoise").allocated
    if pipeline == "flux":  # 24 heads of 1024 patches and 512 tokens: raw, after softmax, masked, safe
        scores = 24 * 1536 * 1536 * 4
        grown = phase(old, "denoise").allocated - phase(new, "denoise").allocated
        assert 3.25 * scores < grown < 3.5 * scores


def test_a_formula_of_all_phases():
    """It is above the prediction, on its grid and between, and its phases are near."""
    p = predict_pipeline("sd15", 512, 512, gpu="T4")
    found = formula(p)
    lines = {line.phase: line for line in found.allocated.lines}
    names = [
        name
        for phase in p.phases
        for name in (["decode, N=1", "decode, N>1"] if phase.name == "decode" else [phase.name])
    ]
    assert list(lines) == names == [line.phase for line in found.reserved.lines]
    for height, width in ((512, 768), (832, 1216), (1000, 520)):
        other = predict_pipeline("sd15", height, width, gpu="T4")
        for name, line in lines.items():
            if name != "decode, N>1":
                size = phase(other, name.removesuffix(", N=1")).allocated
                assert line.mebibytes(Point(height, width)) * MIB == pytest.approx(size, rel=0.06)
        assert other.peak <= found.predict(height, width) <= 1.1 * other.peak
    weights = sum(part.nbytes for part in p.parts.values())
    load = lines["load"]
    terms = sum(law.get("", 0) for name, law in load.terms.items() if name.startswith("weights"))
    assert load.kind == "exact" and terms * MIB == weights
    assert lines["decode, N=1"].where.startswith("decoder.up_blocks.")


def test_a_formula_with_the_length_of_the_prompt():
    p = predict_pipeline("flux", 512, 512, gpu="RTX 4090", offload="model")
    found = p.formula
    assert found.grid.tokens == 512 and found.grid.batches[-1] == BATCHES[-1]
    for tokens in (1, 77, 300, 512):
        other = predict_pipeline("flux", 768, 1024, 2, tokens, gpu="RTX 4090", offload="model")
        assert other.peak <= found.predict(768, 1024, 2, tokens) <= 1.05 * other.peak
    assert found.predict(512, 512) == found.predict(512, 512, 1, 512)


# Each is like another one.
ALIKE = ("sdxl-controlnet", "sd35-medium", "sd35-large", "flux-schnell", "flux-fill", "flux2", "flux2-klein-9b")
KINDS = [name for name in PIPELINES if name not in ALIKE]


@pytest.mark.one_in(60)
@pytest.mark.parametrize(("gpu", "offload"), [("T4", "none"), ("RTX 4060", "model"), ("A100 80GB", "sequential")])
@pytest.mark.parametrize("pipeline", KINDS)
def test_every_pipeline_has_a_formula(pipeline, gpu, offload):
    """No phase is without, nothing raises, and predictions lie below."""
    where = {"gpu": gpu, "offload": offload}
    p = predict_pipeline(pipeline, 1024, 1024, **where)
    found = p.formula
    assert {line.phase.partition(",")[0] for line in found.allocated.lines} == {phase.name for phase in p.phases}
    assert not found.left_out
    most = found.grid.batches[-1]
    for at in ((512, 512, 1), (1536, 1024, min(2, most)), (1024, 640, min(3, most))):
        other = predict_pipeline(pipeline, *at, **where)
        assert other.peak <= found.predict(*at)
        assert max(phase_.allocated for phase_ in other.phases) <= found.allocated.predict(*at)
    for counter in (found.reserved, found.allocated):  # no phase takes many lines; Krea 2's most of all
        assert max(Counter(line.phase.partition(",")[0] for line in counter.lines).values()) <= 5
    assert str(found) and found.latex() and json.loads(found.to_json())["reserved"]["lines"]


@pytest.mark.one_in(45)
@pytest.mark.parametrize("gpu", ["RTX 3060", "RTX 4090", "RX 7900 XTX"])
@pytest.mark.parametrize("pipeline", sorted(KINDS, key=lambda name: name != "flux3-klein"))  # it is modular
def test_every_pipeline_has_rows_and_plans(pipeline, gpu):
    """At three sizes nothing raises, no row lacks a number, and every way of a plan says whether it fits."""
    sizes = [512, (1216, 832), 1536]
    for offload in ("none", "model", "sequential"):
        for row in predict_sweep(pipeline, "pipeline", sizes, gpu=gpu, offload=offload):
            assert row["phase"] and row["tokens"] and 0 < row["allocated_bytes"] <= row["reserved_bytes"]
    for size in sizes:
        height, width = size if isinstance(size, tuple) else (size, size)
        plan = plan_pipeline(pipeline, height, width, gpu=gpu)
        assert plan.reason and all(one.verdict in ("fits", "tight", "does not fit") for one in plan.outcomes)


@pytest.mark.parametrize(
    ("pipeline", "how", "match"),
    [
        ("sd3", {"height": 3088}, ("height", "3088")),  # beyond its table of positions
        ("sd21", {"diffusers_version": "0.33.0"}, ("diffusers_version", "'0.33.0'")),
        ("flux-kontext", {"image": True}, ("image", "True")),
        ("sdxl-refiner", {"image": True}, ("image", "True")),
        ("flux-fill", {"offload": {"vae": "cpu"}}, ("vae",)),
        ("flux-kontext", {"vae": "vaemem", "vae_memory_limit": "1 GB"}, ("vae",)),
        ("pixart-sigma", {"dtype": "float32"}, ("dtype",)),
    ],
)
def test_what_was_not_read_or_recorded_is_refused(pipeline, how, match):
    with refused(*match):
        predict_pipeline(**{"pipeline": pipeline, "height": 1024, "width": 1024, **how})


def test_an_image_in_every_call():
    """The VAE encodes one image for all pictures. Kontext's transformer computes twice the tokens."""
    for name in ("flux-kontext", "flux-fill", "sdxl-refiner"):
        one, two = (predict_pipeline(name, 512, 512, batch, gpu="H200") for batch in (1, 2))
        assert [p.name for p in one.phases] == ["load", "encode prompt", "encode image", "denoise", "decode"]
        assert phase(one, "encode image").flops == phase(two, "encode image").flops > 0
    fill, kontext = (predict_pipeline(name, 512, 512, gpu="H200", steps=1) for name in ("flux-fill", "flux-kontext"))
    assert phase(kontext, "denoise").flops > 1.4 * phase(fill, "denoise").flops  # 512 tokens of the prompt are the same


def test_a_controlnet_stays_to_the_end():
    """With model offload it comes while the text encoder is there, and no component's call makes it leave."""
    p = predict_pipeline("sd15-controlnet", 512, 512, gpu="RTX 4060", offload="model")
    held = [
        {name.removeprefix("weights of ") for name, _ in one.peak_tensors if name.startswith("weights")}
        for one in p.phases
    ]
    assert held == [{"text_encoder"}, {"controlnet", "unet"}, {"controlnet", "vae"}]
    plain = predict_pipeline("sd15", 512, 512, gpu="RTX 4060", offload="model")
    more = [a.allocated - b.allocated for a, b in zip(p.phases, plain.phases, strict=True)]
    assert more[0] >= 0 and min(more[1:]) > p.parts["controlnet"].nbytes
    code = plan_pipeline("sdxl-controlnet", 1024, 1024, gpu="RTX 4090").recommended.way.code
    assert "controlnet = ControlNetModel.from_pretrained(" in code and "controlnet=controlnet" in code
    with refused("image", "True"):
        predict_pipeline("sd15-controlnet", 512, 512, image=True)


def test_a_picture_that_gets_another_size_is_announced():
    for name, argument in (("pixart-sigma", "use_resolution_binning"), ("flux-kontext", "max_area")):
        notes = [" ".join(predict_pipeline(name, side, side, gpu="H200").notes) for side in (768, 1024)]
        assert argument in notes[0] and argument not in notes[1]


@pytest.mark.parametrize(("name", "most"), [("flux", 512), ("sd3", 512), ("qwen-image", 1024), ("flux2", 1 << 13)])
def test_a_prompt_that_the_call_refuses_is_announced(name, most):
    for tokens in {most, min(most + 1, 1 << 13)}:
        p = predict_pipeline(name, 512, 512, gpu="H200", prompt_tokens=tokens)
        assert any(f"refuses more than {most} tokens" in note for note in p.notes) == (tokens > most)


def test_stable_diffusion_3_without_t5():
    """Its embeddings are zeros: the denoiser does the same work."""
    whole, short = (
        predict_pipeline("sd3", 1024, 1024, gpu="RTX 4090", components=how) for how in ({}, {"text_encoder_3": None})
    )
    assert phase(whole, "denoise").flops == phase(short, "denoise").flops
    saved = phase(whole, "denoise").weights - phase(short, "denoise").weights
    assert saved == pytest.approx(whole.parts["text_encoder_3"].nbytes, rel=0.01)


def test_weights_that_transformers_keeps_in_float32():
    """T5's wo, if it is loaded in float16."""
    half, other = (
        predict_pipeline("sd3", 512, 512, dtype=dtype).parts["text_encoder_3"] for dtype in ("float16", "bfloat16")
    )
    assert half.nbytes - other.nbytes == 24 * 4096 * 10240 * 2
    assert {w.type for w in half.weights if ".wo." in w.name} == {"float32"}


def test_an_image_that_the_pipeline_makes_first():
    """A hires fix: the first call's phases, and then those of image-to-image, with what the first call left."""
    for offload in ("none", "model", "leaf_level"):
        how = {"gpu": "RTX 3060", "offload": offload, "batch": 2}
        both = predict_pipeline("sd15", 1024, 768, **how, image=(512, 384))
        first = predict_pipeline("sd15", 512, 384, **how)
        second = predict_pipeline("sd15", 1024, 768, **how, image=True)
        count = len(first.phases)
        assert both.phases[:count] == first.phases
        assert [p.name for p in both.phases[count:]] == ["encode prompt 2", "encode image", "denoise 2", "decode 2"]
        for later, alone in zip(both.phases[count:], second.phases[-4:], strict=True):
            assert later.kind == alone.name and later.reserved >= alone.reserved
            assert both.work(later) or later.kind == "encode image"
            if alone.name in ("denoise", "decode"):  # both images are encoded, one alone
                # PNDM keeps four outputs of the first call, each of 4 MiB at most with what the allocator rounds up.
                assert abs(later.allocated - alone.allocated) < 16 * MIB and later.flops == alone.flops
        assert phase(both, "encode image").flops == 2 * phase(second, "encode image").flops
        assert both.to_dict()["asked"]["image"] == [512, 384] and len(both.rows()) == len(both.phases) + 1
        heights = {row["phase"]: row["height"] for row in both.rows()}
        assert (heights["denoise"], heights["denoise 2"], heights["whole"]) == (512, 1024, 1024)
    assert both.formula.predict(1024, 768, 2) >= both.peak
    plan = plan_pipeline("sd15", 1024, 768, gpu="RTX 3060", image=(512, 384))
    assert "later.enable_model_cpu_offload()" in plan["model offload, VAE whole"].way.code
    assert "after 512x384" in plan.title and plan["no offload, VAE whole"].way.peak.name == "decode 2"
    for wrong in ((512,), (511, 512), (0, 512), "512x512"):
        with refused("image"):
            predict_pipeline("sd15", 512, 512, image=wrong)


def test_an_image_to_begin_with():
    found = predict_pipeline("sd15", 512, 512, gpu="T4", image=True)
    assert [p.name for p in found.phases] == ["load", "encode prompt", "encode image", "denoise", "decode"]
    encode = predict("sd15", "encode", 512, 512, gpu="T4")
    above = phase(found, "encode image").allocated - phase(found, "load").allocated
    assert encode.allocated <= above <= encode.allocated + 4 * MIB
    assert phase(predict_pipeline("sdxl", 512, 512, image=True), "encode image").fits  # converted, and back
    for how in ({"offload": {"vae": "cpu"}}, {"vae": "vaemem", "vae_memory_limit": "1 GB"}):
        with refused("image"):
            predict_pipeline("sd15", 512, 512, image=True, **how)


def test_what_a_pipeline_drops_of_a_posterior_is_freed():
    """The mean is a view of the first of four tensors. The others have half its size."""
    request, held = predict_pipeline("sd15", 512, 512, gpu="T4", image=True).request, {}
    for kept in (0, 1, 4):
        run = diffusers_run.PipelineRun(request, request.start())
        run.load("vae")
        before, image = run.process.allocated, run.take("image", 3 * 512 * 512 * 2)
        run.call("vae", "encode", image, kept, n=1, f=1, h=512, w=512)
        held[kept] = run.process.allocated - before
    mean = 2 * 4 * 64 * 64 * 2
    assert (held[1] - held[0], held[4] - held[1]) == (mean, 3 * mean // 2)


def test_model_offload_sends_away_what_came_before():
    """accelerate's hooks know one component before each: SDXL's first encoder comes back beside the second."""
    found = predict_pipeline("sdxl", 512, 512, offload="model")
    parts = found.parts
    assert stored(phase(found, "encode prompt")) == parts["text_encoder"].nbytes + parts["text_encoder_2"].nbytes
    assert stored(phase(found, "denoise")) == parts["unet"].nbytes
    again = predict_pipeline("sd15", 512, 512, offload="model", image=True)
    assert stored(phase(again, "encode image")) == again.parts["vae"].nbytes + again.parts["text_encoder"].nbytes


def test_stable_diffusion_cpps_phases():
    found = predict_pipeline("zimage-turbo", 1024, 1024, runtime="sd.cpp", offload="none", gpu="RTX 3060")
    assert found.out_of_memory_at[0] == "denoise" and [p.fits for p in found.phases] == [True, True, False, None]
    assert phase(found, "denoise").total == phase(found, "denoise").weights + phase(found, "denoise").activations
    less = predict_pipeline(
        "zimage-turbo", 1024, 1024, runtime="sd.cpp", offload="cond_only", vae="direct", gpu="RTX 3060"
    )
    assert (
        less.fits
        and less.host == phase(found, "load").weights - phase(less, "denoise").weights
        and ": fits: it takes " in repr(less)
    )
    for wrong, match in (
        ({"dtype": "float16"}, ("dtype", "'float16'")),
        ({"offload": "model"}, ("offload", "'model'")),
        ({"vae": "sliced"}, ("vae", "'sliced'")),
        ({"runtime": "sd.c"}, ("runtime", "'sd.c'")),
    ):
        with refused(*match):
            predict_pipeline(**{"pipeline": "sd15", "height": 512, "width": 512, "runtime": "sd.cpp", **wrong})


def test_a_prediction_as_a_table():
    p = predict_pipeline("sdxl", 1024, 1024, gpu="T4", offload="model", vae="vaemem", vae_memory_limit="1 GB")
    (note,) = (note for note in p.notes if note.startswith("vae: "))
    assert "in float16, where diffusers converts to float32" in note and "on one kind of GPU only" in note
    summary, _, run, *_ = lines = p.to_text(exact=True, width=999).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("phase "))
    header, encode, _, decode = lines[at : at + 4]
    assert summary.startswith("Tight: ") and p.title in run and p.to_markdown().count("\n|") == 5
    assert "outside" in header and " 953.67 MiB" in decode and encode.startswith("encode prompt")
    assert repr(p).startswith("<PipelinePrediction sdxl 1024x1024") and "\n" not in repr(p)
    for row, one in zip(json.loads(p.to_json())["phases"], p.phases, strict=True):
        parts = ("weights", "activations", "workspace", "cached", "outside")
        assert row["total_bytes"] == one.total == sum(row[f"{part}_bytes"] for part in parts)
        assert not (row["largest_tensor"] or "").startswith("weights of ")


def test_a_prediction_in_files(tmp_path):
    p = predict_pipeline("sd15", 512, 512, gpu="RTX 3060", memory="3 GB", used="1 GB")
    assert p.to_csv(tmp_path / "phases.csv") is None
    rows = list(csv.DictReader((tmp_path / "phases.csv").read_text("utf-8").splitlines()))
    assert [row["fits"] for row in rows] == ["False", "", "", ""] and int(rows[-1]["total_bytes"]) == p.peak
    data = json.loads(p.to_json())
    assert data["fits"] is False and data["bottleneck"] == "decode"
    assert [row["phase"] for row in data["phases"]] == [phase.name for phase in p.phases]
    assert "runs out" in str(p) and "not reached" in str(p)


def test_a_graphs_prediction_has_the_same_displays():
    p = predict_pipeline("zimage-turbo", 1024, 1024, gpu="RTX 3060", runtime="sd.cpp", offload="cond_only")
    assert "largest tensor" not in str(p) and "The host's memory keeps" in " ".join(str(p).split())
    assert p.to_csv().count("\n") == 5
    assert p.to_dict()["host_bytes"] == p.host and p.band == (p.on_card, p.peak)


def test_how_stable_diffusion_cpp_convolves_is_answered_both_ways_where_nobody_says_it():
    """Run 3 of the published benchmark of Z-Image with cond_only on 12 GB succeeded, which it could not by im2col."""
    how = {"gpu": "RTX 3060", "runtime": "sd.cpp"}
    p = predict_pipeline("zimage-turbo", 1024, 1024, offload="cond_only", **how)
    im2col = predict_pipeline("zimage-turbo", 1024, 1024, offload="cond_only, VAE whole", **how)
    direct = predict_pipeline("zimage-turbo", 1024, 1024, offload="cond_only", vae="direct", **how)
    assert (p.verdict, im2col.verdict, direct.verdict) == ("tight", "does not fit", "fits")
    assert (p.on_card, p.peak, p.upper) == (direct.peak, im2col.peak, im2col.peak)
    assert not predict_pipeline("zimage-turbo", 1024, 1024, offload="cond_only", safe=True, **how).fits
    sizes = [f"{one.phases[-1].total / GIB:.2f} GB" for one in (im2col, direct)]
    assert f"its decode takes {sizes[0]} by im2col and {sizes[1]} with --vae-conv-direct" in p.summary
    neither = predict_pipeline("zimage-turbo", 1024, 1024, **how)
    assert neither.verdict == "does not fit" and neither.least_band[0] == neither.direct.peak.total < neither.peak
    both = predict_pipeline("zimage-turbo", 1024, 1024, **{**how, "gpu": "RTX 4090"})
    assert both.verdict == "fits" and "--vae-conv-direct" in both.summary and both.on_card == both.peak
    for said in ("cond_only, VAE whole", "cond_only, VAE direct", {"--offload-mode": "cond_only"}):
        assert "--vae-conv-direct" not in predict_pipeline("zimage-turbo", 1024, 1024, offload=said, **how).summary


def test_rows_last_as_long_as_the_plan_says():
    plan = plan_pipeline("sdxl", 1024, 1024, gpu="RTX 3060")
    p = predict_pipeline("sdxl", 1024, 1024, gpu="RTX 3060", offload="model")
    rows = {row["phase"]: row for row in p.rows()}
    (way,) = (one for one in plan.outcomes if one.way.name == "model offload, VAE whole")
    for phase in ("encode prompt", "denoise", "decode"):
        said = way.phase_seconds[phase]
        assert (rows[phase]["seconds_low"], rows[phase]["seconds"], rows[phase]["seconds_high"]) == said[:3]
    assert rows["whole"]["seconds"] == pytest.approx(way.seconds.likely)
    assert "seconds" not in predict_pipeline("sd15", 512, 512, gpu="GTX 1080").rows()[0], "of which no speed is known"
    assert "seconds" not in predict_pipeline("sd15", 512, 512, gpu="T4").rows()[0], "loading"


def test_formulas_in_a_notebook():
    shown = predict_pipeline("sd15", 512, 512, gpu="T4").formula._repr_markdown_()
    assert shown.startswith("At ") and "\n\n$$" in shown and "aligned" in shown and r"N\*MP" in shown
    assert shown.count("\n|") == 10 + 2, "a line per phase and counter, two for decode"


def test_an_image_of_another_type_than_the_vae_is_refused():
    """FluxFillPipeline encodes images in the type of its prompt, and PyTorch refuses that by a VAE of another type."""
    with refused("components['vae']", "float16", names=["bfloat16"]):
        predict_pipeline("flux-fill", 192, 576, gpu="RTX 4090", components={"vae": "float16"})


@pytest.mark.parametrize(
    ("pipeline", "height", "given", "message"),
    [
        ("zimage-turbo", 1000, {}, ("height", 1000)),
        ("flux2-klein", 512, {"image": True}, ("image", "True")),
        ("flux2-klein", 512, {"runtime": "sd.cpp"}, ("pipeline", "'flux2-klein'")),
        ("sd15", 1 << 21, {}, ("height", 2097152)),
        ("sd15", 512, {"components": ["nf4"]}, ("components", "['nf4']")),
        ("sd15", 512, {"components": {"unet": ["nf4"]}}, ("components['unet']",)),
        ("sd15", 512, {"components": {"unet": "bool"}}, ("components['unet']",)),
        ("sd15", 512, {"vae": "vaemem", "vae_memory_limit": "10 MB"}, ("vae_memory_limit", "'10 MB'")),
    ],
)
def test_what_a_pipeline_cannot_be_is_refused(pipeline, height, given, message):
    with refused(*message):
        predict_pipeline(pipeline, height, 512, **given)


def test_sizes_as_numpy_has_them():
    sizes = np.array([512, 768])
    assert repr(predict_pipeline("sd15", *sizes)) == repr(predict_pipeline("sd15", 512, 768))


def test_components_on_the_cpu():
    whole = predict_pipeline("sd15", 512, 512, gpu="T4")
    placed = predict_pipeline("sd15", 512, 512, gpu="T4", offload={"text_encoder": "cpu", "vae": "cpu", "unet": "cuda"})
    parts = whole.parts
    assert stored(phase(placed, "load")) == parts["unet"].nbytes
    assert placed.host == parts["text_encoder"].nbytes + parts["vae"].nbytes
    for name in ("encode prompt", "decode"):
        assert (phase(placed, name).flops, phase(placed, name).host_flops) == (0, phase(whole, name).flops)
    assert phase(placed, "denoise").flops == phase(whole, "denoise").flops
    assert phase(placed, "decode").allocated < phase(placed, "denoise").allocated
    for wrong, argument in (({"vae": "disk"}, "offload['vae']"), ({"transformer": "cpu"}, "offload")):
        with refused(argument):
            predict_pipeline("sd15", 512, 512, offload=wrong)


def test_import_leaves_all_for_later():
    later = "('numpy', 'torch', 'vaemem.engine', 'vaemem.prediction', 'vaemem.pipelines')"
    code = f"import sys, vaemem; assert not [m for m in sys.modules if m.startswith({later})]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_predictions_and_plans_need_no_numpy():
    code = (
        "import sys, vaemem; print(vaemem.predict('sdxl', 'decode', 512, 512, gpu='T4').to_json()[:1]);"
        " print(vaemem.plan_pipeline('sd15', 512, 512, gpu='RTX 3060'), vaemem.predict_pipeline('sdxl', 512, 512,"
        " gpu='T4', runtime='comfyui').least); assert not {'numpy', 'ml_dtypes'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("offload", ["none", "model", "sequential"])
def test_the_safety_checker_stays_on_the_device(offload):
    plain = predict_pipeline("sd15", 512, 512, gpu="T4", offload=offload)
    found = predict_pipeline("sd15", 512, 512, gpu="T4", offload=offload, components={"safety_checker": "float16"})
    checker = found.parts["safety_checker"].nbytes
    assert checker == 2 * 303_981_588 + 8 * 257  # int64 position_ids
    for name in ("encode prompt", "denoise", "decode"):
        more, less = ({n: size for n, size in phase(p, name).peak_tensors} for p in (found, plain))
        assert more["weights of safety_checker"] == checker and "weights of safety_checker" not in less
    assert phase(found, "decode").flops > phase(plain, "decode").flops


def test_a_files_own_types(tmp_path):
    """Of a GGUF file the header says what each matrix takes; other floats become the dtype of the run."""
    pytest.importorskip("gguf")
    from test_gguf import file_bytes, info, value

    def write(name, tensors):
        """A sparse file: only its header has contents. Packed convolutions have rows of 256, as by ComfyUI-GGUF."""
        infos, values, end = [], [], 0
        for weight, kind in tensors:
            shape = weight.shape
            if kind == packed and len(shape) == 4:
                shape = math.prod(shape) // 256, 256
                original = struct.pack("<IQ4i", 5, 4, *weight.shape)
                values.append(value(f"comfy.gguf.orig_shape.{weight.name}", 9, original))
            infos.append(info(weight.name, shape, kind, end))
            end += -(-tensor_bytes(shape, kind) // 32) * 32
        (tmp_path / name).write_bytes(file_bytes(infos, values))
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size + end)
        return tmp_path / name

    packed, plain = "Q8_0", "F32"
    weights = [weight for weight in recorded_modules.load_program("sd15-unet").weights if weight.dtype == "run"]
    kinds = [packed if len(weight.shape) == 2 else plain for weight in weights]
    file = write("unet.gguf", zip(weights, kinds, strict=True))
    part = predict_pipeline("sd15", 512, 512, components={"unet": file}).parts["unet"]
    numbers = [math.prod(weight.shape) for weight in weights]
    assert part.nbytes == sum(
        count * 34 // 32 if kind is packed else 2 * count for count, kind in zip(numbers, kinds, strict=True)
    )
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert part.working[layer] == [("weight, unpacked", 2560 * 320 * 2, 0, 0, 0)]
    more = [packed if weight.shape == (320, 320, 3, 3) else kind for weight, kind in zip(weights, kinds, strict=True)]
    convolutions = write("convolutions.gguf", zip(weights, more, strict=True))
    with refused("components['unet']", names=["resnets.0.conv1.weight"]):
        predict_pipeline("sd15", 512, 512, components={"unet": convolutions})
    few = write("few.gguf", [(weights[0], plain)])
    with refused("components['unet']", names=["859520964"]):
        predict_pipeline("sd15", 512, 512, components={"unet": few})
    clip = [weight for weight in recorded_modules.load_program("clip-l").weights if weight.dtype == "run"]
    text = write("clip.gguf", [(weight, packed if len(weight.shape) == 2 else plain) for weight in clip])
    with refused("components['text_encoder']", names=["clip.gguf"]):
        predict_pipeline("sd15", 512, 512, components={"text_encoder": text})


def test_sdxls_vae_is_upcast_as_a_whole_from_diffusers_0_36_on():
    """With model offload on the CPU: its weights arrive in float32, before 0.36 without the first blocks."""
    older, now = (
        predict_pipeline("sdxl", 1024, 1024, offload="model", gpu="RTX 4090", diffusers_version=name)
        for name in ("0.35.2", "0.36.0")
    )
    assert older.phases[:-1] == now.phases[:-1] and "by diffusers 0.35 (" in older.title
    first = sum(math.prod(w.shape) * 2 for w in weights_of("sdxl") if w.name.startswith(FIRST))
    assert now.phases[-1].weights - older.phases[-1].weights == pytest.approx(first, rel=0.01)
    with refused("diffusers_version", "'0.35.2'", names=["Flux2Pipeline"]):
        predict_pipeline("flux2", 1024, 1024, diffusers_version="0.35.2")
    with refused("diffusers_version", "'0.42.1'"):
        predict_pipeline("sdxl", 1024, 1024, runtime="sd.cpp", diffusers_version="0.42.1")


def test_sizes_of_numpy_are_pythons_integers():
    """Also what is cached for those that ask with plain integers later."""
    small = np.int32(512), np.int32(1024), np.int8(1)
    ours = predict_pipeline("sdxl", *small, gpu="RTX 4090", runtime="sd.cpp", prompt_tokens=np.int16(77))
    plain = predict_pipeline("sdxl", 512, 1024, gpu="RTX 4090", runtime="sd.cpp", prompt_tokens=77)
    assert str(ours) == str(plain)
    for one in (ours, plain):
        assert all(type(phase.allocated) is int for phase in one.phases)


@pytest.mark.parametrize("pipeline", ["flux", "flux-schnell", "flux2-klein"])
def test_sizes_that_diffusers_makes_smaller_are_predicted_as_it_runs_them(pipeline):
    """FluxPipeline and its like cut sides to multiples of 16: 1080x1920 becomes 1072x1920."""
    p, smaller = (predict_pipeline(pipeline, h, 1920, gpu="H100", offload="model") for h in (1080, 1072))
    assert p.phases == smaller.phases and p.rows() == smaller.rows()
    assert p.summary.startswith("fits, at 1072x1920 in place of 1080x1920: ")
    assert [note for note in p.notes if "1072x1920" in note and "multiples of 16" in note]
    assert "1080" not in repr(smaller) and not any("1072" in note for note in smaller.notes)


def test_tiles_of_a_side_of_ones_own():
    how = {"gpu": "RTX 3070", "offload": "model"}
    whole, tiled, own = (
        predict_pipeline("sdxl", 1024, 1024, vae=vae, **how) for vae in ("whole", "tiled", "tiled 512")
    )
    assert whole.phases[-1].total == tiled.phases[-1].total > own.phases[-1].total  # the config's tiles are of 1024
    usual = predict_pipeline("sd15", 1024, 1024, vae="tiled", **how)
    assert usual.phases == predict_pipeline("sd15", 1024, 1024, vae="tiled 512", **how).phases
    assert any("vae.tile_sample_min_size = 512" in note for note in own.notes)


def test_a_pipeline_with_sdxls_vae_in_float16_says_which():
    p = predict_pipeline("sdxl", 1024, 1024, gpu="RTX 3070", components={"vae": "float16"})
    fixed = "vae: madebyollin/sdxl-vae-fp16-fix in float16; SDXL's own VAE overflows there and gives black pictures"
    assert fixed in p.notes
    for given in ({}, {"components": {"vae": "float32"}}):
        assert fixed not in predict_pipeline("sdxl", 1024, 1024, gpu="RTX 3070", **given).notes


def test_z_image_is_not_its_turbo():
    """diffusers' ZImagePipeline has 50 steps and guidance by default. Turbo's model card says 9 and none."""
    for name in ("Z-Image", "Tongyi-MAI/Z-Image"):
        base = predict_pipeline(name, 512, 512, gpu="RTX 4090")
        assert (base.request.name, base.request.steps) == ("zimage", 50)
    turbo = predict_pipeline("Z-Image-Turbo", 512, 512, 2, gpu="RTX 4090")
    assert turbo.request.steps == 9
    guided, alone = (next(one for one in p.phases if one.name == "denoise") for p in (base, turbo))
    assert guided.flops / 50 == alone.flops / 9  # both call the transformer for two images
    # Besides the call, guidance holds float32 latents of one image; Turbo holds a second image's latents.
    assert abs(guided.allocated - alone.allocated) < 2**20
    assert '"Tongyi-MAI/Z-Image", dtype' in plan_pipeline("Z-Image", 512, 512, gpu="RTX 4090").recommended.way.code
    with refused("batch", 3):
        predict_pipeline("Z-Image", 512, 512, 3, gpu="RTX 4090")
    times = [
        plan_pipeline(name, 512, 512, gpu="RTX 4090", runtime="sd.cpp", steps=10).outcomes[0].way.work["transformer"]
        for name in ("zimage", "zimage-turbo")
    ]
    assert times[0] == 2 * times[1]


def test_tiles_and_slices_together():
    """Each image of a batch is decoded alone, in tiles."""
    how = {"gpu": "RTX 4090", "batch": 4}
    peak = {
        vae: phase(predict_pipeline("sd15", 1024, 1024, **how, vae=vae), "decode").activations
        for vae in ("tiled 512", "sliced", "tiled 512 and sliced")
    }
    one = phase(predict_pipeline("sd15", 1024, 1024, gpu="RTX 4090", vae="tiled 512"), "decode").activations
    assert peak["tiled 512 and sliced"] < min(peak["tiled 512"], peak["sliced"])
    images, latents = 3 * 3 * 1024 * 1024 * 2, 64 * MIB  # of the other three images; what the pipeline holds
    assert one <= peak["tiled 512 and sliced"] <= one + 2 * images + latents
    again = predict_pipeline("sd15", 1024, 1024, **how, vae="sliced and tiled")
    assert again.request.vae == "tiled and sliced"
    for wrong in ("whole and sliced", "sliced and vaemem"):
        with refused("vae"):
            predict_pipeline("sd15", 1024, 1024, **how, vae=wrong)


def test_tiles_that_cut_nothing_are_noted():
    for size, vae, is_noted in ((1024, "tiled", True), (1280, "tiled", False), (1024, "tiled 512", False),
                                (512, "tiled 512", True), (1024, "whole", False)):  # fmt: skip
        found = predict_pipeline("sdxl", size, size, gpu="RTX 4090", vae=vae)
        assert any("do not cut" in note for note in found.notes) == is_noted
