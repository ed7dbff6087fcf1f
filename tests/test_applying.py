"""A plan's way, set on small pipelines of diffusers, and undone."""

from __future__ import annotations

import contextlib
import functools
import weakref

import pytest
from errors import refused, warned

from vaemem import plan_pipeline

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import torch_pipelines

from vaemem.pytorch import AutoencoderKL, apply, applying
from vaemem.pytorch.measuring_pipelines import _offload

TILES = ("use_tiling", "use_slicing", "tile_sample_min_size", "tile_latent_min_size")


def state(pipe):
    """What a way changes."""
    parts = {role: part for role, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    hooks = {role: type(getattr(part, "_hf_hook", None)).__name__ for role, part in parts.items()}
    places = {role: {str(weight.device) for weight in part.parameters()} for role, part in parts.items()}
    return pipe.vae, {name: getattr(pipe.vae, name) for name in TILES}, hooks, places


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Sequential offload refuses a CPU: accelerate's hooks are put on as diffusers does, but for the device."""

    def sequential(pipe, device):
        pipe._offload_device = torch.device(device)
        for part in (pipe.unet, pipe.vae, pipe.text_encoder):
            accelerate.cpu_offload(part, torch.device(device))

    monkeypatch.setattr(diffusers.DiffusionPipeline, "enable_sequential_cpu_offload", sequential)


@functools.cache
def plan_of_sd15():
    return plan_pipeline("sd15", 1024, 1024, 2, gpu="RTX 3060", dtype="float32")


WAYS = {
    "no offload, VAE whole": ("none", "use_tiling", False),
    "no offload, VAE sliced": ("none", "use_slicing", True),
    "no offload, VAE tiled": ("none", "use_tiling", True),
    "model offload, VAE whole": ("model", "use_tiling", False),
    "model offload, VAE tiled": ("model", "use_tiling", True),
    "sequential offload, VAE sliced": ("sequential", "use_slicing", True),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_plans_way_is_set_and_undone(name, tmp_path, on_the_cpu):
    """It runs, makes the same picture, and its code is that of the plan but for the device."""
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    want, before = torch_pipelines.pictures(pipe, "sd"), state(pipe)
    way = plan_of_sd15()[name].way
    done = apply(way, pipe, device="cpu")
    offload, flag, value = WAYS[name]
    assert getattr(pipe.vae, flag) is value and _offload(pipe, torch.device("cpu")) == offload
    for line in done.code.replace('device="cpu"', "").replace('"cpu"', '"cuda"').splitlines():
        assert line in way.code.splitlines()
    got = torch_pipelines.pictures(pipe, "sd")
    assert "tiled" in name or (got - want).abs().max() < 1e-5  # blended tiles change the picture
    done.undo()
    assert state(pipe) == before and torch.equal(torch_pipelines.pictures(pipe, "sd"), want)


@pytest.mark.parametrize("name", ["group offload by block, VAE whole", "group offload by leaf, VAE sliced"])
def test_groups_are_set_and_undone(name, tmp_path):
    """Every component gets the hooks. `undo` removes them, and sets earlier hooks again."""
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    want, before = torch_pipelines.pictures(pipe, "sd"), state(pipe)

    def levels():
        configs = (applying._group_config(part) for part in (pipe.unet, pipe.vae, pipe.text_encoder))
        return [config and (config.offload_type.value, config.num_blocks_per_group) for config in configs]

    way = plan_of_sd15()[name].way
    done = apply(way, pipe, device="cpu")
    expected = [("leaf_level", None) if "leaf" in name else ("block_level", 1)] * 3
    assert levels() == expected and done.code.splitlines()[-1].replace("cpu", "cuda") == way.code.splitlines()[-1]
    assert (torch_pipelines.pictures(pipe, "sd") - want).abs().max() < 1e-5
    other = apply({"offload": "model"}, pipe, device="cpu")
    assert levels() == [None] * 3 and hasattr(pipe.unet, "_hf_hook")
    other.undo()
    assert levels() == expected and not hasattr(pipe.unet, "_hf_hook")
    done.undo()
    assert levels() == [None] * 3 and state(pipe) == before
    assert torch.equal(torch_pipelines.pictures(pipe, "sd"), want)


@pytest.mark.parametrize("offload", ["none", "model", "sequential", "leaf_level"])
def test_casting_is_set_and_undone(offload, tmp_path, on_the_cpu):
    """As diffusers' own calls do it. `undo` brings back every digit of the weights."""
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    want, before = torch_pipelines.pictures(pipe, "sd"), state(pipe)
    types = {"unet": "fp8", "text_encoder": "fp8"}
    done = apply({"components": types, "offload": offload}, pipe, device="cpu")
    assert "unet is stored in float8" in str(done) and "enable_layerwise_casting" in done.code
    got = torch_pipelines.pictures(pipe, "sd")
    kinds = {weight.dtype for part in (pipe.unet, pipe.text_encoder) for weight in part.parameters()}
    assert kinds == {torch.float8_e4m3fn, torch.float32}

    theirs = torch_pipelines.stable_diffusion(tmp_path)
    theirs.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    embeddings = (torch.nn.Embedding,)
    diffusers.hooks.apply_layerwise_casting(
        theirs.text_encoder, torch.float8_e4m3fn, torch.float32, skip_modules_classes=embeddings
    )
    assert (got - torch_pipelines.pictures(theirs, "sd")).abs().max() < 1e-5 < (got - want).abs().max()

    with refused("pipe", "fp8", names=["unet", "float32"]):
        apply({"components": {"unet": "float32"}}, pipe, device="cpu")
    again = apply({"components": types, "offload": "model"}, pipe, device="cpu")
    assert "casting" not in again.code and hasattr(pipe.unet, "_hf_hook")
    again.undo()
    done.undo()
    assert state(pipe) == before and torch.equal(torch_pipelines.pictures(pipe, "sd"), want)
    with refused("pipe", "float32", names=["vae", "fp8"]):
        apply({"components": {"vae": "fp8"}}, pipe, device="cpu")
    pipe.unet.half()  # another type than the way casts from
    with refused("pipe", "float16", names=["unet", "float32"]):
        apply({"dtype": "float32", "components": {"unet": "fp8"}}, pipe, device="cpu")


def test_our_decoder_is_set_and_undone(tmp_path):
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    want, before = torch_pipelines.pictures(pipe, "sd"), state(pipe)
    done = apply({"offload": "model", "vae": "vaemem", "vae_memory_limit": "64 MiB"}, pipe, device="cpu")
    assert isinstance(pipe.vae, AutoencoderKL) and pipe.vae.memory_limit == "64 MiB"
    assert str(done) == "vaemem decodes within 64 MiB; each component is on cpu for its call"
    assert (torch_pipelines.pictures(pipe, "sd") - want).abs().max() < 1e-4 and pipe.vae.last_run.op == "decode"
    done.undo()
    assert state(pipe) == before and torch.equal(torch_pipelines.pictures(pipe, "sd"), want)


@pytest.mark.skipif(not hasattr(diffusers, "Flux2Pipeline"), reason="needs diffusers with FLUX.2")
def test_our_decoder_of_flux2_is_set():
    pipe = torch_pipelines.flux2()
    want = torch_pipelines.flux2_pictures(pipe)
    plan = plan_pipeline("flux2", 512, 512, gpu="H100")
    ways = [one.way for one in plan.outcomes if "vaemem" in one.way.name]
    settings = {**ways[0].settings, "dtype": "float32"}  # the small pipeline's
    done = apply(settings, pipe, device="cpu")
    assert ways and set(done.code.splitlines()[:1]) <= set(ways[0].code.splitlines())
    got = torch_pipelines.flux2_pictures(pipe)
    assert (got - want).abs().max() < 1e-4 and pipe.vae.last_run.op == "decode"
    done.undo()
    assert torch.equal(torch_pipelines.flux2_pictures(pipe), want)
    pipe.vae = diffusers.VQModel(norm_num_groups=32)
    with refused("pipe", "VQModel", kind=TypeError):
        apply({**settings, "dtype": None}, pipe, device="cpu")


def test_the_original_leaves_the_card_before_our_copy_is_made(tmp_path, monkeypatch):
    pipe, done = torch_pipelines.stable_diffusion(tmp_path), []
    made = AutoencoderKL.from_module
    monkeypatch.setattr(AutoencoderKL, "from_module", lambda *args, **how: done.append("copied") or made(*args, **how))
    monkeypatch.setattr(pipe.vae, "to", lambda place: done.append(place))
    apply({"vae": "vaemem", "vae_memory_limit": "64 MiB"}, pipe, device="cpu")
    assert done == ["cpu", "copied"]


def test_text_encoders_leave_the_card_before_others_come(tmp_path, monkeypatch):
    pipe, moved = torch_pipelines.stable_diffusion_xl(tmp_path), []
    monkeypatch.setattr(applying, "find_device", torch.device)
    for role in ("vae", "text_encoder", "text_encoder_2", "unet"):
        monkeypatch.setattr(getattr(pipe, role), "to", lambda place, role=role: moved.append((role, place)))
    way = plan_pipeline("sdxl", 1024, 1024, gpu="RTX 4060", dtype="float32")["text encoders on CPU, VAE whole"].way
    code = apply(way, pipe, device="cuda:1").code
    assert sorted(moved[:2]) == [("text_encoder", "cpu"), ("text_encoder_2", "cpu")]
    assert sorted(moved[2:]) == [("unet", "cuda:1"), ("vae", "cuda:1")]
    assert sorted(code.replace("cuda:1", "cuda").splitlines()) == sorted(way.code.splitlines()[-5:])
    again = torch_pipelines.stable_diffusion(tmp_path)
    assert apply({"offload": {"vae": "cuda"}}, again, device="cpu").code == 'pipe.to("cpu")'


def test_ways_follow_each_other(tmp_path):
    """The last one counts, and each is undone to the one before it."""
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    first = apply({"offload": "model", "vae": "tiled 64"}, pipe, device="cpu")
    between = state(pipe)
    last = apply({"offload": {"text_encoder": "cpu"}, "vae": "sliced"}, pipe, device="cpu")
    assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == (False, True) and not hasattr(pipe.unet, "_hf_hook")
    assert last.steps[1] == "text_encoder stays on the CPU, and the others are on cpu"
    last.undo()
    assert state(pipe) == between and pipe.vae.tile_sample_min_size == 64
    first.undo()
    assert not pipe.vae.use_tiling and not hasattr(pipe.unet, "_hf_hook")


def test_what_cannot_be_set_changes_nothing(tmp_path, monkeypatch):
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    before = state(pipe)
    with refused("way", names=["--offload-to-cpu"]):
        apply({"--offload-to-cpu": True}, pipe, device="cpu")
    with refused("way", "int", kind=TypeError):
        apply(3, pipe, device="cpu")
    with refused("pipe", "dict", kind=TypeError):
        apply({}, {}, device="cpu")
    with refused("pipe", "float32", names=["unet", "nf4"]):
        apply({"components": {"unet": "nf4"}}, pipe, device="cpu")
    for key, value in {
        "offload": "modell", "vae": "tile", "vae_memory_limit": "1 GB", "components": 3, "dtype": "floaty",
    }.items():  # fmt: skip
        with refused("way", names=[f"way: {key}: "]):
            apply({key: value}, pipe, device="cpu")
    for offload in ({"text_encoder_2": "cpu"}, {"unet": "disk"}):
        with refused("way", names=["offload"]):
            apply({"offload": offload}, pipe, device="cpu")
    with refused("way", names=["vae_memory_limit"]):
        apply({"vae": "vaemem", "vae_memory_limit": "much"}, pipe, device="cpu")
    with refused("pipe", "float32", names=["float16"]):
        apply(plan_pipeline("sd15", 512, 512, gpu="RTX 3060"), pipe, device="cpu")
    pipe.vae.half()
    with refused("pipe", names=["force_upcast"]):
        apply({"components": {"vae": "float16"}}, pipe, device="cpu")
    pipe.vae.float()
    monkeypatch.setattr(pipe, "enable_model_cpu_offload", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        apply({"offload": "model", "vae": "tiled 64"}, pipe, device="cpu")
    assert state(pipe) == before


def run_out(monkeypatch, owner, name, times):
    """Let a method run out of memory a few times before it works."""
    call, made = getattr(owner, name), []

    def fail(*args, **kwargs):
        if len(made) == times:
            return call(*args, **kwargs)
        large = torch.zeros(1000)
        made.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(owner, name, fail)
    return made


def test_the_next_way_makes_the_same_picture(tmp_path, on_the_cpu, monkeypatch):
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    want, before = torch_pipelines.pictures(pipe, "sd"), state(pipe)
    plan = plan_of_sd15()
    done = apply(plan, pipe, device="cpu", on_out_of_memory="next")
    first, made = done.code, run_out(monkeypatch, pipe.unet, "forward", 1)
    how = dict(prompt="a cat", height=48, width=32, num_inference_steps=2, output_type="pt")
    with pytest.warns(RuntimeWarning):
        got = done(generator=torch.Generator().manual_seed(0), **how).images
    assert (got - want).abs().max() < 1e-4 and done.code != first and made[0]() is None
    assert not pipe.vae.use_tiling
    done.undo()
    assert state(pipe) == before


def test_a_call_on_windows_runs_out_where_it_would_spill(tmp_path, on_the_cpu, monkeypatch):
    """So the next way runs. Both ways are set and called within the limit."""
    pipe, within = torch_pipelines.stable_diffusion(tmp_path), []

    @contextlib.contextmanager
    def limit(device):
        within.append(True)
        yield
        within.append(False)

    monkeypatch.setattr(applying, "no_spilling", limit)
    forward, ways = pipe.unet.forward, []
    monkeypatch.setattr(pipe.unet, "forward", lambda *args, **how: ways.append(within[-1]) or forward(*args, **how))
    done = apply({}, pipe, device="cpu")
    done("a cat", height=48, width=32, num_inference_steps=2)
    assert within == [True, False] * 2 and ways and all(ways)


def test_a_way_that_cannot_be_set_has_a_next(tmp_path, on_the_cpu, monkeypatch):
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    before, plan = state(pipe), plan_pipeline("sd15", 512, 512, gpu="RTX 3060", dtype="float32")
    with monkeypatch.context() as patched:
        run_out(patched, pipe, "to", 1)
        with warned(names=["no offload, VAE by vaemem"]):
            done = apply(plan, pipe, device="cpu", on_out_of_memory="next")
        done.undo()
    assert state(pipe) == before
    with monkeypatch.context() as patched:
        run_out(patched, pipe, "to", 1)
        with pytest.raises(torch.OutOfMemoryError):
            apply(plan, pipe, device="cpu")
    assert state(pipe) == before


def test_a_way_that_fails_otherwise_is_skipped(tmp_path, on_the_cpu, monkeypatch):
    """Its warning names it. If no way can be set, the error is that memory ran out, and everything is set back."""
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    before, plan = state(pipe), plan_of_sd15()
    names = [one.way.name for one in applying._list_next(plan, pipe)]
    run = dict(prompt="a cat", height=48, width=32, num_inference_steps=2)

    def refuse(*args, **how):
        raise ImportError("no accelerate")

    with monkeypatch.context() as patched:
        done = apply(plan, pipe, device="cpu", on_out_of_memory="next")
        run_out(patched, pipe.unet, "forward", 1)
        patched.setattr(AutoencoderKL, "from_module", refuse)
        with pytest.warns(RuntimeWarning) as warned:
            done(**run)
        told = [str(one.message) for one in warned if one.filename == __file__]
        assert f"{names[0]} cannot be set, so it is skipped: no accelerate" in told and "Going on with" in told[-1]
        done.undo()
    assert state(pipe) == before and done.steps == () and done.code == ""
    with monkeypatch.context() as patched:
        done = apply(plan, pipe, device="cpu", on_out_of_memory="next")
        run_out(patched, pipe.unet, "forward", 1)
        patched.setattr(applying, "_run", refuse)
        with pytest.warns(RuntimeWarning) as warned, pytest.raises(torch.OutOfMemoryError):
            done(**run)
        assert len(warned) == len(names)
    assert state(pipe) == before and done.steps == ()


def test_the_last_way_raises(tmp_path, on_the_cpu, monkeypatch):
    """Each next way fits, leaves the picture as it is, and takes less. Other errors pass through."""
    pipe = torch_pipelines.stable_diffusion(tmp_path)
    plan = plan_of_sd15()
    outcomes = [plan.recommended, *applying._list_next(plan, pipe)]
    peaks = [one.way.peak.total for one in outcomes]
    assert len(peaks) > 2 and peaks == sorted(set(peaks), reverse=True)
    assert all(one.fits and not one.way.changes for one in outcomes)
    run_out(monkeypatch, pipe.unet, "forward", -1)
    done = apply(plan, pipe, device="cpu", on_out_of_memory="next")
    pipe.vae.half()  # as a conversion before a decode leaves it
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError):
        done("a cat", height=48, width=32, num_inference_steps=2)
    assert pipe.vae.dtype == torch.float32
    monkeypatch.setattr(pipe.unet, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        done("a cat", height=48, width=32, num_inference_steps=2)
    with refused("way", "dict", kind=TypeError):
        apply({}, pipe, on_out_of_memory="next")
    with refused("on_out_of_memory", "'last'"):
        apply({}, pipe, on_out_of_memory="last")
