"""Pipelines that make videos, by name: Wan 2.1, and Wan 2.2's TI2V-5B."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
from errors import refused

from vaemem import Table, plan_pipeline, predict, predict_pipeline
from vaemem.__main__ import main
from vaemem._common import shipped
from vaemem.engine.configs import config_of
from vaemem.pipelines import components, diffusers_run, recorded_modules
from vaemem.pipelines.pipeline_text import PipelineText
from vaemem.prediction.runtimes import architecture

pytestmark = [pytest.mark.core, pytest.mark.python]

wan = partial(predict_pipeline, "wan-1.3b", 128, 192, gpu="RTX 4090")


def test_frames_are_a_size():
    few, asked, rounded = (wan(frames=frames) for frames in (5, 80, 81))
    assert asked.phases == rounded.phases and not rounded.request.made_of
    assert asked.request.made_of == "128x192, 80 frames" and asked.title == rounded.title
    assert asked.to_dict()["asked"]["frames"] == 81
    assert wan().phases == rounded.phases
    sizes = [(a.allocated, b.allocated) for a, b in zip(few.phases, rounded.phases, strict=True)]
    assert [a < b for a, b in sizes] == [False, False, True, True]
    assert {(row["way"], row["frames"]) for row in Table(few.rows())} == {("offload none, VAE whole", 5)}


def test_the_vae_stays_in_float32():
    half = wan(frames=9, components={"vae": "bfloat16"})
    whole = wan(frames=9)
    assert 2 * half.parts["vae"].nbytes == whole.parts["vae"].nbytes
    assert half.phases[-1].activations < whole.phases[-1].activations
    single = {w.name for w in components.weights_of("wan-1.3b-transformer") if w.dtype == "single"}
    assert "condition_embedder.time_embedder.linear_1.weight" in single and "scale_shift_table" in single


def test_sides_are_rounded_down():
    """As WanPipeline does it: to what a transformer's patches cover."""
    rounded, asked = (predict_pipeline("wan-14b", height, 192, frames=5) for height in (128, 136))
    assert asked.title == rounded.title and asked.request.made_of == "136x192, 5 frames"
    p = predict_pipeline("wan2.2-5b", 720, 1280, frames=5)
    assert (p.request.height, p.request.width, p.request.made_of) == (704, 1280, "720x1280, 5 frames")


def test_ways_of_a_plan():
    plan = plan_pipeline("wan-1.3b", 128, 192, frames=33, gpu="RTX 4090")
    assert all(one.way.settings["vae"] != "vaemem" for one in plan.outcomes)
    code = plan["no offload, VAE whole"].way.code
    assert 'dtype={"default": torch.bfloat16, "vae": torch.float32}' in code


@pytest.mark.parametrize(
    ("name", "asked", "made"),
    [
        ("wan-1.3b", 80, 81),
        ("wan2.2-t2v-a14b", 80, 81),
        ("hunyuan-video-1.5", 80, 77),
        ("ltx2.3", 80, 73),
        ("minimax-h3", 125, 141),
    ],
)
def test_frames_are_rounded_as_the_pipelines_code_does(name, asked, made):
    """num_frames // 4 * 4 + 1 in Wan's, (num_frames - 1) // 4 latents after the first one in others', whole clips in
    MiniMax-H3's."""
    assert predict_pipeline(name, 256, 256, frames=asked, gpu="H200").request.frames == made


def test_refusals():
    with refused("frames"):
        predict_pipeline("sd15", 512, 512, frames=9)
    with refused("frames", "0"):
        wan(frames=0)
    with refused("frames"):
        predict_pipeline("sd15", 512, 512, frames=9, runtime="sd.cpp")
    with refused("vae"):
        wan(vae="vaemem", vae_memory_limit="8 GB")
    with refused("image"):
        wan(image=True)
    with refused("pipeline"):
        predict_pipeline("wan2.1", 128, 192)


def test_a_latents_pixel_covers_as_much_in_diffusers(monkeypatch):
    """The VAE's config and the random pipeline say what Wan 2.2's files on the Hub say; diffusers' defaults differ."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    from vaemem.pytorch import loading

    kind = components.PIPELINES["wan2.2-5b"]
    config = config_of(architecture("wan2.2"))
    assert config["scale_factor_spatial"] == kind.factor == 16
    assert "scale_factor_spatial" not in config_of(architecture("wan2.1"))
    small = {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1}
    make = loading.make_component

    def make_small(component):
        if component == kind.parts["vae"]:
            return diffusers.AutoencoderKLWan.from_config(config | small)
        return torch.nn.Linear(2, 2) if component in kind.parts.values() else make(component)

    monkeypatch.setattr(loading, "make_component", make_small)
    pipe = loading.random_pipeline("wan2.2-5b", "bfloat16")
    assert (pipe.vae_scale_factor_spatial, pipe.config.expand_timesteps) == (16, True)


RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
WIDTH = 64  # of the small text encoder


def narrowed(name):
    """A pipeline's text, for prompts with fewer channels than UMT5's 4096."""

    def change(line):
        return f"take {int(line[1]) * WIDTH // 4096}{line[2]}" if int(line[1]) % 4096 == 0 else line[0]

    return PipelineText(
        re.sub(r"^take (\d+)((?: \w)* t\b.*)$", change, shipped("pipelines", f"{name}.txt"), flags=re.M)
    )


@pytest.fixture(scope="module", params=["wan-1.3b", "wan2.2-5b"])
def small(request):
    """A pipeline's name, and a function that builds it with a small text encoder and transformer. Their recordings
    replace its own."""
    torch = pytest.importorskip("torch")
    diffusers, _ = pytest.importorskip("diffusers"), pytest.importorskip("accelerate")
    if not RECORDING.exists() or not hasattr(diffusers, "WanPipeline"):
        pytest.skip("needs the sources, and a diffusers with WanPipeline")
    sys.path.insert(0, str(RECORDING))
    import record_modules
    import torch_pipelines
    from modules import MODULES

    from vaemem.pytorch.loading import Undrawn, default_dtype, make_component

    tokenizer, _ = torch_pipelines.t5()
    text, kind = MODULES["umt5-xxl"], components.PIPELINES[request.param]
    transformer = MODULES[kind.parts["transformer"]]

    def call(sizes, dtype):
        args, kwargs = transformer.call(sizes, dtype)
        return args, kwargs | {"encoder_hidden_states": torch.empty(sizes["n"], sizes["t"], WIDTH, dtype=dtype)}

    layers = {"d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 4, "attention_head_dim": 32, "text_dim": WIDTH, "freq_dim": 32, "ffn_dim": 128}
    own = f"small-{request.param}"  # weights are kept by name
    modules = {
        "small-umt5": text._replace(build=partial(text.build, **layers)),
        own: transformer._replace(build=partial(transformer.build, **heads, num_layers=2), call=call),
    }
    load = recorded_modules.load_program
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(MODULES, name, module)
        made = {name: recorded_modules.Recorded(name, record_modules.record(name, lambda _: None)) for name in modules}
        for room in (recorded_modules, components):
            patch.setattr(room, "load_program", lambda name: made.get(name) or load(name))
        parts = kind.parts | {"text_encoder": "small-umt5", "transformer": own}
        patch.setitem(components.PIPELINES, request.param, kind._replace(parts=parts))
        patch.setattr(diffusers_run, "load_text", narrowed)

        def pipeline():
            with torch.device("meta"), default_dtype(torch.bfloat16), Undrawn():
                encoder, denoiser = (one.build().eval() for one in modules.values())
            with torch.device("meta"):
                vae = make_component(kind.parts["vae"])
            scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
            pipe = diffusers.WanPipeline(tokenizer, encoder, vae, scheduler, denoiser, expand_timesteps=kind.times)
            pipe.set_progress_bar_config(disable=True)
            return pipe

        yield request.param, pipeline


def place(pipe, offload):
    import torch

    if offload == "none":
        pipe.to("cuda")
    elif offload.endswith("level"):
        pipe.enable_group_offload(torch.device("cuda"), offload_type=offload, num_blocks_per_group=1)
    else:
        getattr(pipe, f"enable_{offload}_cpu_offload")(device="cuda")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("offload", "frames", "batch", "vae", "steps"),
    [
        ("none", 5, 1, "whole", 3),
        ("model", 17, 2, "tiled", 1),
        ("sequential", 9, 1, "whole", 2),
        ("leaf_level", 9, 1, "whole", 2),
        ("block_level", 9, 1, "whole", 2),
    ],
)
def test_the_pipelines_own_code_takes_as_much(small, offload, frames, batch, vae, steps):
    """To the byte, in each phase. Only there is loading a phase if nothing but prompts and tables is loaded."""
    from vaemem.pytorch import predict_pipeline as predict_any

    name, build = small
    size = {"height": 64, "width": 96} if vae == "whole" else {"height": 96, "width": 288}

    def prepare(pipe):
        if vae == "tiled":
            pipe.vae.enable_tiling()
        place(pipe, offload)

    how = {"num_frames": frames, "num_videos_per_prompt": batch, "num_inference_steps": steps}
    real = predict_any(build(), "a", **size, **how, gpu="RTX 4090", prepare=prepare)
    p = predict_pipeline(
        name, *size.values(), batch, frames=frames, gpu="RTX 4090", offload=offload, vae=vae, steps=steps
    )
    found = {phase.name: phase.allocated for phase in real.phases if phase.name != "load"}
    predicted = {phase.name: phase.allocated for phase in p.phases if phase.name != "load"}
    assert found == predicted


@pytest.mark.parametrize("model", ["wan2.1", "wan2.2"])
def test_a_vae_alone_of_a_video(model, capsys):
    """The decode of 81 frames, whole and in tiles; a video of one frame is an image."""
    asked = dict(height=480, width=832, gpu="RTX 4090")
    image = predict(model, "decode", **asked)
    video = predict(model, "decode", frames=81, **asked)
    tiled = predict(model, "decode_tiled", frames=81, **asked)
    assert max(image.allocated, tiled.allocated) < video.allocated and video.seconds is None
    assert image.request == predict(model, "decode", frames=1, **asked).request
    assert "480x832 with 81 frames" in video.to_text() and "for one frame" not in video.to_text()
    ours = next(advice for advice in video.would_fit if "vaemem" in advice.what)
    assert 2e9 < ours.needed < 11e9
    command = ["fits", model, "decode", "480x832", "--frames", "81", "--gpu", "RTX 4090"]
    assert main(command) == 0 and "81 frames" in capsys.readouterr().out


def test_frames_that_no_vae_makes():
    for model, frames, more in (
        ("sdxl", 81, {}),
        ("wan2.1", 80, {}),
        ("wan2.1", 0, {}),
        ("wan2.1", 81, {"runtime": "comfyui"}),
    ):
        with refused("frames"):
            predict(model, "decode", 480, 832, gpu="RTX 4090", frames=frames, **more)
