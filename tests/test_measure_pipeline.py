"""Whole pipelines of diffusers measured: their phases' borders, and what is read there, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from errors import complains, refused

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import torch_pipelines
from diffusers.models.attention_processor import AttnProcessor

import vaemem.pytorch
from vaemem import SimulatedProcess, Table, compare, predict, predict_pipeline
from vaemem.__main__ import main
from vaemem.pipelines.components import CLIPS, PIPELINES
from vaemem.pipelines.offload_kinds import GroupOffload
from vaemem.prediction.request import Software, find_card
from vaemem.prediction.runtimes import architecture
from vaemem.pytorch import (
    MeasuredPhase,
    MeasuredPipeline,
    load_pipeline,
    loading,
    measure_pipeline,
    measuring_pipelines,
    recording,
)
from vaemem.pytorch.recorder import Recorder

# ---- full size on a card that is not there: storages of fake tensors, counted as they come and go ----


class Counters:
    """torch.cuda's, over what a recorder has recorded so far, which is played by a simulated process each time."""

    def __init__(self, recorder, gpu):
        self.recorder, self.gpu = recorder, gpu
        self.reset()

    def _play(self):
        """The counters now, and at the height of each step."""
        self.recorder.sweep()
        process = SimulatedProcess(self.gpu, workspace=NoWorkspace())
        for name, size in self.recorder.recording.weights:
            process.hold(name, size)
        process.call(self.recorder.recording.trace)
        return process.allocator.stats(), process.last_call

    def now(self, name):
        stats, _ = self._play()
        return stats[f"{name}_bytes.all.current"]

    def reset(self, _=None):
        self.least = {name: self.now(name) for name in ("allocated", "reserved")}
        self.since = len(self.recorder.recording.trace.steps)

    def peak(self, name):
        _, (_, *heights) = self._play()
        return max(self.least[name], *heights[name == "reserved"].tolist()[self.since :], 0)


class NoWorkspace:
    """Answers in place of cuDNN."""

    def conv(self, *_):
        return 0, "none"


def on_a_card(monkeypatch, pipe, name, gpu, side, **call):
    """What `measure_pipeline` says of a pipeline that runs under fake tensors, as on the card of that name."""
    recorder = Recorder(recording.Recording(), recording.find_gpu(gpu))
    counters = Counters(recorder, gpu)
    cuda = {
        "init": lambda: None, "device": lambda _: contextlib.nullcontext(), "empty_cache": lambda: None,
        "synchronize": lambda _: None, "get_device_name": lambda _: gpu, "memory_stats": lambda _: counters._play()[0],
        "mem_get_info": lambda _: (80 << 30, 80 << 30),
        "memory_allocated": lambda _: counters.now("allocated"), "memory_reserved": lambda _: counters.now("reserved"),
        "max_memory_allocated": lambda _: counters.peak("allocated"),
        "max_memory_reserved": lambda _: counters.peak("reserved"), "reset_peak_memory_stats": counters.reset,
        "get_device_properties": lambda _: types.SimpleNamespace(name=gpu, total_memory=80 << 30),
    }  # fmt: skip
    for function, value in cuda.items():
        monkeypatch.setattr(torch.cuda, function, value)
    resolve = measuring_pipelines.resolve_pipeline
    monkeypatch.setattr(measuring_pipelines, "find_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(measuring_pipelines, "Software", lambda **_: Software())
    monkeypatch.setattr(
        measuring_pipelines, "resolve_pipeline", lambda *a: replace(resolve(*a), workspace=NoWorkspace())
    )
    parts = torch.nn.ModuleDict({role: getattr(pipe, role) for role in PIPELINES[name].parts}).eval()
    return recording.record_by(
        recorder, parts, (), {}, lambda _: measure_pipeline(pipe, side, side, prompt="x", **call)
    ).output


def _modules(pipe):
    return {role: part for role, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def built(name):
    """The pipeline of full size on the device "meta", with stand-ins for tokenizer and scheduler."""
    if not (Path(__file__).parent.parent / "benchmarks").exists():
        pytest.skip("the sources are not here")
    return importlib.import_module("full_pipelines").built(name)[1]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("name", "gpu", "side", "batch"),
    [("sd15", "T4", 512, 1), ("sd15", "T4", 256, 2), ("sdxl", "RTX 4090", 768, 1), ("flux", "H200", 768, 1)],
)
def test_full_size(monkeypatch, name, gpu, side, batch):
    """Measured and predicted, allocated and reserved: each phase begins and ends where the prediction has it, but for
    the scheduler's tensors: it is a stand-in here."""
    output = "latent" if name == "sdxl" else "pt"  # a conversion of weights is not recorded
    call = {"output_type": output} | ({"negative_prompt": ""} if name == "sdxl" else {})
    measured = on_a_card(monkeypatch, built(name), name, gpu, side, batch=batch, steps=2, **call)
    assert measured.notes == () and measured.asked["device"] == gpu
    phases = ["encode prompt", "denoise", "decode"][: 2 if name == "sdxl" else 3]
    assert [phase.name for phase in measured.phases] == phases
    for phase in measured.phases:
        said = measured.predicted[phase.name]
        # A scheduler keeps a few latents, of 0.1 MiB here. The allocator rounds segments up to 2 MiB, large ones to 20.
        assert abs(said.allocated - phase.allocated) < 4 << 20, phase.name
        assert abs(said.reserved - phase.reserved) < 20 << 20, phase.name
    assert all(abs(row["reserved_error_percent"]) < 1 for row in measured._lines())  # 20 MiB of at least 2 GiB
    table = Table(measured.rows())
    assert {row["model"] for row in table} == {name} and {row["source"] for row in table} == {"measured"}
    parts = table.filter(phase=phases)
    said = compare(parts, predict)  # with workspaces, which these cards have not
    assert [row.measured for row in said.rows] == [phase.reserved for phase in measured.phases]
    assert said.rows[0].estimate == pytest.approx(said.rows[0].measured, rel=0.05)


@pytest.mark.thorough
def test_a_prompt_that_is_not_encoded_is_not_predicted(monkeypatch):
    """SDXL's negative prompt is zeros where none is given."""
    measured = on_a_card(monkeypatch, built("sdxl"), "sdxl", "RTX 4090", 256, steps=1, output_type="latent")
    assert list(measured.predicted) == ["load", "denoise", "decode"]
    assert "Encode prompt is not predicted without a negative_prompt" in measured.notes[0]


REFUSED = [
    (lambda pipe, call: call.update(callback_on_step_end=print), ["callback_on_step_end"]),
    (lambda pipe, call: None, []),
    (lambda pipe, call: pipe.unet.set_attn_processor(AttnProcessor()), ["unet", "AttnProcessor"]),
    (lambda pipe, call: pipe.unet.compile(), ["unet", "compiled"]),
    (lambda pipe, call: pipe.unet.to(memory_format=torch.channels_last), ["unet", "channels_last"]),
    (lambda pipe, call: pipe.unet.add_module("lora", torch.nn.Linear(4, 4, device="meta")), ["unet", "sd15"]),
    (lambda pipe, call: pipe.vae.decoder.conv_out.double(), ["vae", "sd15"]),
    (lambda pipe, call: pipe.text_encoder.double(), ["components['text_encoder']: "]),
    (
        lambda pipe, call: pipe.register_modules(image_encoder=pipe.vae),
        ["sd15", "image_encoder"],
    ),
    (
        lambda pipe, call: pipe.vae.register_to_config(latent_channels=5),
        ["2 latents of 1638"],
    ),
    (lambda pipe, call: pipe.vae.enable_tiling(), ["tiles", 512]),
    (
        lambda pipe, call: setattr(pipe, "__class__", diffusers.StableDiffusionPAGPipeline),
        ["StableDiffusionPAGPipeline"],
    ),
    (lambda pipe, call: call.update(card="Voodoo 2"), ["gpu: ", "Voodoo 2"]),
    (lambda pipe, call: call.update(offload="none and on cpu"), ["offload: "]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_known_is_not_predicted(monkeypatch, number):
    change, said = REFUSED[number]
    pipe, call = built("sd15"), {}
    vae = "tiled" if "tiles" in said else "whole"
    pipe.vae.tile_sample_min_size = 512 + 64 * ("tiles" in said)
    change(pipe, call)
    about = types.SimpleNamespace(name=call.pop("card", "Tesla T4"), total_memory=15 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(measuring_pipelines, "Software", lambda **_: Software())
    asked = {"height": 512, "width": 512, "batch": 1, "steps": 2, "offload": call.pop("offload", "none"), "vae": vae}
    seen = measuring_pipelines.Seen(2, 4 * 64 * 64, 77)
    look = functools.partial(measuring_pipelines._predict_phases, pipe, seen, call, torch.device("cuda", 0), 0, asked)
    if not said:
        phases, _ = look()
        assert phases["decode"] == predict_pipeline("sd15", 512, 512, gpu="T4", steps=2).phases[-1]._replace()
        return
    with refused(names=said, kind=ValueError):
        look()


# ---- small ones on the CPU, with a meter that says when it is asked ----


class Meter:
    """CpuMeter's methods. `log` has what happens, in order."""

    log: ClassVar[list[str]] = []
    total = 0

    def clear(self):
        self.log.append("clear")

    def reset(self):
        self.log.append("reset")

    def wait(self):
        self.log.append("wait")

    def after(self):
        self.log.append("read")
        Meter.total += 1
        return Meter.total << 20, Meter.total << 21


def inner(component):
    """A submodule that every call of a component calls once: a VAE's decoder, for instance."""
    names = "conv_in", "x_embedder", "decoder", "text_model", "encoder"
    return next(getattr(component, name) for name in names if hasattr(component, name))


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Makes a small pipeline whose modules say in the meter's log when they compute."""
    monkeypatch.setattr(measuring_pipelines, "CpuMeter", Meter)
    monkeypatch.setattr(Meter, "log", [])

    def make(name):
        pipe = torch_pipelines.PIPELINES[name](tmp_path)
        pipe.set_progress_bar_config(disable=True)
        for role in ("unet", "transformer", "text_encoder", "text_encoder_2", "vae"):
            if getattr(pipe, role, None) is not None:
                say(inner(getattr(pipe, role)), role)
        say(pipe.vae.encoder, "vae, encoding")
        return pipe

    def say(module, what):
        module.register_forward_pre_hook(lambda *_: Meter.log.append(what))

    return make


def measured(pipe, name="sd", **call):
    call |= {"max_sequence_length": torch_pipelines.MAX_LENGTH} if name == "flux" else {"negative_prompt": ""}
    return measure_pipeline(pipe, 48, 32, prompt="a cat", steps=2, **call)


def state(pipe):
    """What a measurement could leave behind."""
    parts = _modules(pipe)
    hooks = {role: list(part._forward_pre_hooks.values()) for role, part in parts.items()}
    own = {role: {"encode", "decode", "to", "forward"} & set(vars(part)) for role, part in parts.items()}
    offloads = {role: type(getattr(part, "_hf_hook", None)).__name__ for role, part in parts.items()}
    return hooks, own, offloads, pipe.vae.dtype, {str(p.device) for part in parts.values() for p in part.parameters()}


ENCODERS = {
    "sd": ["text_encoder"],
    "sdxl": ["text_encoder", "text_encoder_2"],
    "flux": ["text_encoder", "text_encoder_2"],
}


@pytest.mark.older
@pytest.mark.parametrize("offload", ["none", "model"])
@pytest.mark.parametrize("name", ["sd", "sdxl", "flux"])
def test_borders(small, name, offload, monkeypatch):
    """The counters are reset once a component is there and before it computes, and read when the next one is called."""
    pipe, roles = small(name), {}
    if offload == "model":
        hooks = pytest.importorskip("accelerate").hooks
        bring = hooks.CpuOffload.pre_forward
        monkeypatch.setattr(
            hooks.CpuOffload, "pre_forward",
            lambda hook, module, *a, **k: (Meter.log.append(f"bring {roles[module]}"), bring(hook, module, *a, **k))[1],
        )  # fmt: skip
        pipe.enable_model_cpu_offload(device="cpu")
    roles.update((module, role) for role, module in _modules(pipe).items())
    before = state(pipe)
    found = measured(pipe, name)
    assert state(pipe) == before
    assert found.asked["offload"] == offload and [phase.name for phase in found.phases] == [
        "encode prompt", "denoise", "decode",
    ]  # fmt: skip
    denoiser, prompts = "transformer" if name == "flux" else "unet", 1 if name == "flux" else 2

    def begins(role):
        return ["reset"] + [f"bring {role}", "wait", "reset"] * (offload == "model")

    def calls(role):
        return [f"bring {role}"] * (offload == "model") + [role]

    want = ["clear", *begins("text_encoder"), *[word for role in ENCODERS[name] for word in calls(role)] * prompts]
    want += ["read", *begins(denoiser), *calls(denoiser) * 2, "read", *begins("vae"), *calls("vae"), "read"]
    assert Meter.log == want
    first, *_ = found.phases
    assert [phase.allocated - first.allocated for phase in found.phases] == [0, 1 << 20, 2 << 20]
    assert all(phase.reserved == 2 * phase.allocated and phase.seconds > 0 for phase in found.phases)


def test_borders_with_sequential_offload(small):
    """Of what accelerate can send to a CPU: weights come after the counters are reset."""
    accelerate = pytest.importorskip("accelerate")
    pipe = small("sd")
    embeds = dict.fromkeys(("prompt_embeds", "negative_prompt_embeds"), torch.zeros(1, 8, 32))
    for part in (pipe.unet, pipe.vae):
        accelerate.cpu_offload(part, torch.device("cpu"))
    pipe.register_modules(text_encoder=None)
    before = state(pipe)
    found = measure_pipeline(pipe, 48, 32, prompt=None, steps=2, **embeds)
    assert state(pipe) == before and found.asked["offload"] == "sequential"
    assert Meter.log == ["clear", "reset", "unet", "unet", "read", "reset", "vae", "read"]


GROUPS = [
    (("leaf_level",), {}, "leaf_level"),
    (("block_level", 2), {}, "block_level 2"),
    (("leaf_level",), {"exclude_modules": ["vae"]}, "leaf_level and none"),
]


@pytest.mark.parametrize(("words", "more", "said"), GROUPS)
def test_groups_are_recognised(small, words, more, said):
    """The arguments of enable_group_offload are found again, also which components it left out."""
    pipe, place = small("sd"), torch.device("cpu")
    kind, *blocks = words
    settings = {"offload_type": kind, "num_blocks_per_group": blocks[0] if blocks else None} | more
    pipe.enable_group_offload(place, place, **settings)
    assert measured(pipe).asked["offload"] == said
    found = measuring_pipelines._groups(pipe)
    assert GroupOffload.read(found) == GroupOffload.read(settings) and not found["use_stream"]
    assert measuring_pipelines._groups(small("sd")) is None
    if not more:
        other = small("sd")
        other.unet.enable_group_offload(place, place, offload_type="leaf_level")
        other.vae.enable_group_offload(place, place, offload_type="block_level", num_blocks_per_group=1)
        with pytest.raises(ValueError):
            measuring_pipelines._groups(other)


def test_a_controlnet_begins_the_denoising(small):
    pipe = small("sd")
    control = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(16, 16, 32))
    control.conv_in.register_forward_pre_hook(lambda *_: Meter.log.append("controlnet"))
    image = pytest.importorskip("PIL.Image").new("RGB", (32, 48))
    found = measured(diffusers.StableDiffusionControlNetPipeline(**pipe.components, controlnet=control), image=image)
    assert [phase.name for phase in found.phases] == ["encode prompt", "denoise", "decode"]
    begins = Meter.log.index("controlnet")
    assert Meter.log[begins - 2 : begins + 2] == ["read", "reset", "controlnet", "unet"]


def test_tied_weights_that_sequential_offload_parts():
    """T5's embedding has two names. accelerate leaves a tensor of each on the device "meta"."""
    pipe = built("sd3")
    part = predict_pipeline("sd3", 512, 512, gpu="RTX 4090").request.part("text_encoder_3")
    encoder = pipe.text_encoder_3
    assert measuring_pipelines._has_weights(encoder, part)
    encoder.encoder.embed_tokens.weight = torch.nn.Parameter(torch.empty_like(encoder.shared.weight))
    assert len({id(weight) for weight in encoder.parameters()}) == len(part.weights) + 1
    assert measuring_pipelines._has_weights(encoder, part)
    encoder.more = torch.nn.Embedding(32128, 4096, device="meta", dtype=torch.float16)
    assert not measuring_pipelines._has_weights(encoder, part)


@pytest.mark.older
@pytest.mark.parametrize(("offload", "dtype"), [("none", torch.float16), ("model", torch.float32)])
def test_upcasting_is_part_of_the_decode(small, offload, dtype, monkeypatch):
    """Unless the VAE is converted on the CPU, before it comes."""
    pipe, there = small("sdxl"), []
    pipe.vae.to(torch.float16)
    if offload == "model":
        pytest.importorskip("accelerate")
        pipe.enable_model_cpu_offload(device="cpu")
    monkeypatch.setattr(Meter, "reset", lambda self: there.append(pipe.vae.dtype))
    found = measured(pipe)
    assert [phase.name for phase in found.phases] == ["encode prompt", "denoise", "decode"]
    assert set(there[:-1]) <= {torch.float16, dtype} and there[-1] is dtype and pipe.vae.dtype is torch.float16


def test_a_picture_to_begin_with(small):
    pipe = small("sd")
    image = pytest.importorskip("PIL.Image").new("RGB", (32, 48))
    found = measured(diffusers.StableDiffusionImg2ImgPipeline(**pipe.components), image=image, strength=1.0)
    assert [phase.name for phase in found.phases] == ["encode prompt", "encode image", "denoise", "decode"]
    text, unet = ["reset", "text_encoder", "text_encoder", "read"], ["reset", "unet", "unet", "read"]
    assert Meter.log == ["clear", *text, "reset", "vae, encoding", "read", *unet, "reset", "vae", "read"]


def test_load_is_measured_where_it_is_a_function(small):
    found = measured(lambda: small("sd"))
    assert [phase.name for phase in found.phases] == ["load", "encode prompt", "denoise", "decode"]
    assert Meter.log[:4] == ["clear", "reset", "read", "reset"]


def raiser(error, on=1):
    """A hook that raises at its so many-th call."""
    calls = iter(range(1, 100))

    def hook(*_):
        if next(calls) == on:
            raise error

    return hook


FULL = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("role", "on", "phase"), [("text_encoder", 2, "encode prompt"), ("unet", 2, "denoise"), ("vae", 1, "decode")]
)
@pytest.mark.parametrize("offload", ["none", "model"])
def test_out_of_memory_is_reported_with_what_was_measured(small, role, on, phase, offload):
    pipe = small("sdxl")
    pipe.vae.to(torch.float16)
    if offload == "model":
        pytest.importorskip("accelerate")
        pipe.enable_model_cpu_offload(device="cpu")
    handle, before = inner(getattr(pipe, role)).register_forward_pre_hook(raiser(FULL, on)), state(pipe)
    found = measured(pipe)
    assert state(pipe) == before
    assert found.out_of_memory_at == (phase, "CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert [one.fits for one in found.phases] == [True] * (len(found.phases) - 1) + [False]
    assert found.phases[-1].name == phase and found.phases[-1].allocated > 0
    assert f"Out of memory in {phase}: CUDA out of memory" in str(found)
    handle.remove()
    assert measured(pipe).out_of_memory_at is None


def test_out_of_memory_while_it_is_loaded(small):
    found = measured(raiser(FULL))
    assert found.out_of_memory_at[0] == "load" and [phase.fits for phase in found.phases] == [False]
    assert found._lines()[0]["pipeline"] is None and "A pipeline 48x32 (cpu)" in str(found)
    assert found.rows() == [] and found.to_csv() == Table().to_csv()  # what did not go through is no run


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("CUDA error: an illegal access")])
def test_whatever_stops_it_the_pipeline_is_left_as_it_was(small, error):
    pipe = small("sdxl")
    pipe.vae.to(torch.float16)
    pipe.vae.decoder.register_forward_pre_hook(raiser(error))
    before = state(pipe)
    with pytest.raises(type(error)):
        measured(pipe)
    assert state(pipe) == before and pipe.vae.dtype is torch.float16


def test_arguments_are_checked_before_anything_runs(small):
    pipe = small("sd")
    for wanted, call in (
        (("height", 0), lambda: measure_pipeline(pipe, 0, 32)),
        (("width", 36), lambda: measure_pipeline(pipe, 64, 36)),
        (("steps", 0), lambda: measure_pipeline(pipe, 64, 64, steps=0)),
        (("pipe", "str"), lambda: measure_pipeline("sd15", 64, 64)),
        (("device", "'cuda'"), lambda: measure_pipeline(pipe, 64, 64, device="cuda")),
        (("pipe", "DDPMPipeline"), lambda: measure_pipeline(diffusers.DDPMPipeline(None, None), 64, 64)),
    ):
        with refused(*wanted):
            call()
    assert "read" not in Meter.log


def test_the_process_of_a_cpu_run_is_measured(small, monkeypatch):
    pipe = small("sd")
    monkeypatch.undo()  # the meter that is one
    try:
        found = measured(pipe)
    except OSError as error:
        pytest.skip(str(error))
    assert all(phase.allocated is None and phase.reserved > 1 << 26 for phase in found.phases)
    assert found.predicted == {} and found.notes[0].startswith("Nothing is predicted, because it ran on a CPU")


# ---- what it looks like ----


def result(**more):
    asked = {"pipeline": "FluxPipeline", "height": 64, "width": 32, "batch": 1, "steps": 2, "dtype": "bfloat16",
             "offload": "model", "vae": "whole", "device": "NVIDIA L4"}  # fmt: skip
    phases = [MeasuredPhase("load", 2 << 20, 4 << 20, 1.25), MeasuredPhase("denoise", 100, 200, 0.5, False)]
    said = predict_pipeline("sd15", 64, 64, gpu="T4").phases[0]._replace(allocated=3 << 20, reserved=4 << 20)
    given = {"predicted": {"load": said, "denoise": said}, "out_of_memory": "no room", "versions": "torch 2.9.1, x 1"}
    return MeasuredPipeline(asked, phases, notes=["A note."], **given | more)


def test_rows_and_files(tmp_path):
    found, file = result(), tmp_path / "measured.csv"
    found.to_csv(file)
    assert Table.from_csv(file) == Table(found.rows())
    (load,) = Table.from_csv(file)  # nothing of the phase that did not go through, nor of the whole
    assert (load["allocated_bytes"], load["reserved_bytes"], load["seconds"]) == (2 << 20, 4 << 20, 1.25)
    assert (load["model"], load["op"], load["phase"]) == ("FluxPipeline", "pipeline", "load")
    assert (load["way"], load["device"], load["source"]) == ("offload model, VAE whole", "NVIDIA L4", "measured")
    assert load["versions"] == "torch 2.9.1, x 1, steps 2" and load["runtime"] == "diffusers"
    data = json.loads(found.to_json())
    assert data["out_of_memory_at"] == {"phase": "denoise", "message": "no room"}
    load, denoise = data["phases"]
    assert (load["allocated_error_percent"], load["reserved_error_percent"], load["seconds"]) == (50, 0, 1.25)
    assert denoise["predicted_allocated_bytes"] == 3 << 20 and denoise["allocated_error_percent"] is None
    assert not denoise["fits"] and load["offload"] == "model"
    assert "+50.0" in str(found) and "| load" in found.to_markdown() and ">+50.0</td>" in found._repr_html_()


def test_what_is_measured_is_fitted_compared_and_reported(small, tmp_path, capsys):
    """By the commands too: rows of two sizes, and what the phases of each have in common."""
    tables = [Table(measure_pipeline(small("sd"), 48, side, steps=1).rows()) for side in (32, 64)]
    table, file = tables[0] + tables[1], tmp_path / "m.csv"
    table.to_csv(file)
    assert [row["phase"] for row in tables[0]] == ["encode prompt", "denoise", "decode", "whole"]
    *phases, whole = tables[0]
    assert whole["reserved_bytes"] == max(row["reserved_bytes"] for row in phases)
    assert whole["tokens"] == torch_pipelines.MAX_LENGTH
    assert whole["seconds"] == pytest.approx(sum(row["seconds"] for row in phases), abs=1e-5)
    assert main(["fit", str(file)]) == 0
    assert "\nStableDiffusionPipeline pipeline decode " in capsys.readouterr().out
    assert main(["report", str(file), "--out", str(tmp_path / "r"), "--no-plots"]) == 0
    assert "StableDiffusionPipeline on cpu" in (tmp_path / "r" / "report.md").read_text()
    assert main(["compare", str(file), "--predict"]) == 2
    assert complains(capsys.readouterr().err, "compare", names=["StableDiffusionPipeline", "predict"])
    Table(row | {"model": "sd15", "device": "Tesla T4", "dtype": "float16", "height": 64} for row in table).to_csv(file)
    assert main(["compare", str(file), "--predict", "--all"]) == 0
    assert "pipeline denoise        64x32  float16" in capsys.readouterr().out


def test_without_a_prediction_its_columns_are_not_shown():
    text = str(result(predicted={}, out_of_memory=None))
    assert "predicted" not in text and "error" not in text and "A note." in text


# ---- the command ----


def test_the_command(small, tmp_path, monkeypatch, capsys):
    made, file = [], tmp_path / "m.csv"
    monkeypatch.setattr(vaemem.pytorch, "load_pipeline", lambda *a, **k: made.append((a, k)) or small("sd"))
    arguments = ["measure", "sd15", "48x32", "--random", "--steps", "2", "--offload", "model", "--vae", "tiled"]
    assert main([*arguments, "--dtype", "fp16", "--no-guidance", "--prompt", "a", "-o", str(file)]) == 0
    asked = {"dtype": "float16", "offload": "model", "vae": "tiled", "random": True}
    assert [(args, {key: k[key] for key in asked}) for args, k in made] == [(("sd15",), asked)]
    rows = Table.from_csv(file)
    assert [row["phase"] for row in rows] == ["load", "encode prompt", "denoise", "decode", "whole"]
    assert "vaemem 0" in rows[0]["versions"] and Meter.log.count("text_encoder") == 1
    said = capsys.readouterr()
    assert "StableDiffusionPipeline 48x32 (cpu), batch 1, steps 2" in said.out
    assert complains(said.err, "measure", names=["GPU", "CPU"])
    monkeypatch.setattr(vaemem.pytorch, "load_pipeline", lambda *_, **__: raiser(FULL)())
    assert main([*arguments]) == 1 and "Out of memory in load" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "argument", "names"),
    [
        (["sd15", "512", "--random", "--steps", "0"], "--steps", [1, 0]),
        (["sd15", "512", "--random", "--batch", "0"], "--batch", [1, 0]),
        (["sd15", "512x516", "--random"], "width", [8, "sd15", 516]),
        (["flux", "520", "--random"], "height", [16, "flux", 520]),
        (["absent", "516"], "height", [8, 516]),
        (["hidream", "512", "--random"], "source", ["'hidream'", "hidream decode 1024x1024"]),
    ],
)
def test_the_command_refuses_before_anything_is_built(arguments, argument, names, monkeypatch, capsys):
    monkeypatch.setattr(vaemem.pytorch, "load_pipeline", lambda *_, **__: pytest.fail("it was built"))
    assert main(["measure", *arguments]) == 2
    assert complains(capsys.readouterr().err, "measure", argument, names)


def test_what_is_loaded_is_checked_before_it_is_built(monkeypatch, capsys):
    monkeypatch.setattr(loading, "random_pipeline", lambda *_: pytest.fail("it was built"))
    with refused("dtype"):
        load_pipeline("sd15", "int8", random=True)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "accelerate", None)
        with refused(kind=ImportError, packages=("accelerate",), install="pip install 'vaemem[diffusers]'"):
            load_pipeline("sd15", offload="model", random=True)
    assert main(["measure", "sd15", "512"]) == 2
    assert complains(capsys.readouterr().err, "measure", "source", ["--random"])


def test_a_vaes_run(monkeypatch, capsys, tmp_path):
    """`vaemem measure sdxl decode 1024`, on a GPU that is not there: next to the prediction, and for the scoreboard."""
    made = vaemem.predict("sdxl", "decode", 1024, 1024, "float16", gpu="L40S", torch_version="2.9.1+cu128")
    row = {
        "model": "sdxl", "op": "decode", "height": 1024, "width": 1024, "batch": 1, "dtype": "float16",
        "runtime": "diffusers", "device": made.gpu, "source": "measured", "versions": "torch 2.9.1+cu128, cudnn 9.10.2",
        "allocated_bytes": made.allocated, "reserved_bytes": made.reserved,
    }  # fmt: skip
    asked, place = [], types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(vaemem.pytorch.measuring, "find_device", lambda _: place)
    monkeypatch.setattr(vaemem.pytorch, "measure", lambda *a, **k: asked.append((*a, k)) or Table([row]))
    assert main(["measure", "sdxl", "decode", "1024", "--batch", "1", "-o", str(tmp_path / "m.csv")]) == 0
    assert asked == [("sdxl", "decode", [(1024, 1024)], "float16", {"batch": 1})]
    said = capsys.readouterr()
    assert "reserved MiB" in said.out and said.err.endswith("allocated +0.0%, reserved +0.0%\n")
    assert Table.from_csv(tmp_path / "m.csv") == Table([row])
    assert main(["measure", "sdxl", "decode", "1024", "--contribute"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].endswith(f"reserved above,{made.reserved},,")
    row |= {"reserved_bytes": made.reserved * 2}
    assert main(["measure", "sdxl", "decode", "1024"]) == 0
    assert complains(capsys.readouterr().err, "measure", names=["cuDNN"])
    row |= {"allocated_bytes": made.allocated * 2}
    assert main(["measure", "sdxl", "decode", "1024"]) == 0
    assert made.peak_tensors[0].name in capsys.readouterr().err

    def full(*_, **__):
        raise vaemem.pytorch.measuring.OUT_OF_MEMORY("CUDA out of memory. Tried to allocate 4.00 GiB.")

    monkeypatch.setattr(vaemem.pytorch, "measure", full)
    assert main(["measure", "sdxl", "decode", "1024"]) == 1
    assert complains(capsys.readouterr().err, "measure", names=["4.00 GiB"])
    place.type = "cpu"
    for words in (["decode", "64", "--steps", "2"], ["64", "128", "--random"], ["decode", "64", "--contribute"]):
        assert main(["measure", "sdxl", *words]) == 2
    said = capsys.readouterr().err
    assert [line.split(": ")[1] for line in said.splitlines()] == ["--steps", "size", "--contribute"]


@pytest.mark.older
def test_a_folder_is_loaded_offline(tmp_path):
    (tmp_path / "made").mkdir()
    torch_pipelines.stable_diffusion(tmp_path).save_pretrained(tmp_path / "made")
    pipe = load_pipeline(str(tmp_path / "made"), device="cpu", vae="tiled")
    assert pipe.unet.dtype is torch.float16 and pipe.vae.use_tiling
    with pytest.raises(OSError):
        load_pipeline(str(tmp_path / "nothing"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name, kind in PIPELINES.items() if not kind.recording])
def test_random_weights_are_those_of_the_named_pipeline(name, monkeypatch):
    """Built on the device "meta": what is predicted of it is the named pipeline."""
    kind, build = PIPELINES[name], loading.build_row
    monkeypatch.setattr(loading, "build_row", lambda row, device: build(row, "meta"))
    pipe = loading.random_pipeline(name, PIPELINES[name].dtype)
    noise, images = architecture(kind.parts["vae"])["latent_channels"], 1 + (kind.guides and not kind.apart)
    seen = measuring_pipelines.Seen(
        images,
        kind.inputs * noise * (512 // kind.factor) ** 2 * (kind.frames // 4 + 1),
        77 + kind.joined + measuring_pipelines._count_seen(kind, {"height": 512, "width": 512}),
    )
    question = measuring_pipelines._request(
        pipe, seen, find_card("H200"), Software(), {}, height=512, width=512, batch=1, steps=2, image=False,
    )  # fmt: skip
    assert question.name == name and question.parts == predict_pipeline(name, 512, 512, gpu="H200").request.parts
    asked = set(re.findall(r"self\.scheduler\.(\w+)", inspect.getsource(type(pipe))))
    assert all(hasattr(pipe.scheduler, one) for one in asked)
    role = kind.encoders[0]
    tokenizer = getattr(pipe, role.replace("text_encoder", "tokenizer"))
    ids = tokenizer("a cat", padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert ids.shape == (1, 77 if kind.parts[role] in CLIPS else 512) and ids.max() == 1
