"""A decode that does not fit is done by vaemem, and the denoising before it is not lost."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import weakref
from types import SimpleNamespace

import pytest
from errors import refused, warned

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import torch_pipelines

from vaemem.pytorch import AutoencoderKL, apply, decoding, free_memory, safe_decode

MIB = 1 << 20
CARD = dict(gpu="RTX 3060", memory=12 << 30, torch_version="2.6.0", cudnn_version="9.1.0")


@pytest.fixture
def pipe(tmp_path):
    return torch_pipelines.stable_diffusion(tmp_path)


def fail_in_the_middle(monkeypatch, vae, error, made):
    """Let the decoder's end raise, with tensors alive in the frames of its calls."""

    def forward(x):
        large = torch.zeros(1000)
        made.extend(map(weakref.ref, (x, large)))
        try:
            raise ValueError("an error before the error")
        except ValueError:
            raise error from None

    monkeypatch.setattr(vae.decoder.conv_out, "forward", forward)


def refuse_cards(module, place):
    """Stand in for the drop-in's `to`. In these tests the object is the card, and the text is the CPU."""
    if place == torch.device("cpu") and not isinstance(place, (str, torch.dtype)):
        raise ImportError("no engine")
    return diffusers.ModelMixin.to(module, place)


ERRORS = {
    "PyTorch's": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."),
    "cuDNN's": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "the CPU's": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
}


@pytest.mark.each_value
@pytest.mark.parametrize("error", ERRORS.values(), ids=[*ERRORS])
@pytest.mark.parametrize("name", [*torch_pipelines.PIPELINES])
def test_memory_runs_out_in_the_middle(name, error, tmp_path, monkeypatch):
    pipe, made = torch_pipelines.PIPELINES[name](tmp_path), []
    want = torch_pipelines.pictures(pipe, name)
    with monkeypatch.context() as patched:
        safe = safe_decode(pipe)
        fail_in_the_middle(patched, pipe.vae, error, made)
        with warned(names=["CPU"]):
            got = torch_pipelines.pictures(pipe, name)
        assert len(made) == 2 and all(one() is None for one in made)  # the frames are gone, and so is the traceback
        assert error.__traceback__ is None and len(safe.notes) == 1
    assert (got - want).abs().max() < 1e-4
    safe.undo()
    assert "decode" not in vars(pipe.vae)
    assert torch.equal(torch_pipelines.pictures(pipe, name), want)


@pytest.mark.skipif(not hasattr(diffusers, "Flux2Pipeline"), reason="needs diffusers with FLUX.2")
def test_flux2_is_guarded_too(monkeypatch):
    pipe = torch_pipelines.flux2()
    want = torch_pipelines.flux2_pictures(pipe)
    safe_decode(pipe)
    fail_in_the_middle(monkeypatch, pipe.vae, ERRORS["PyTorch's"], [])
    with warned(names=["CPU"]):
        assert (torch_pipelines.flux2_pictures(pipe) - want).abs().max() < 1e-4


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_an_offloaded_vae_is_copied(offload, pipe, monkeypatch):
    want, made = torch_pipelines.pictures(pipe, "sd"), []
    if offload == "model":
        apply({"offload": "model"}, pipe, device="cpu")
    else:  # diffusers refuses a CPU
        for part in (pipe.unet, pipe.vae, pipe.text_encoder):
            accelerate.cpu_offload(part, torch.device("cpu"))
    fail_in_the_middle(monkeypatch, pipe.vae, ERRORS["PyTorch's"], made)
    safe = safe_decode(pipe)
    with pytest.warns(RuntimeWarning):
        got = torch_pipelines.pictures(pipe, "sd")
    assert (got - want).abs().max() < 1e-4 and all(one() is None for one in made)
    assert safe.latents.shape == (1, 4, 12, 8)


@pytest.mark.each_value
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("return_dict", [False, True])
def test_prediction_decides(return_dict, by_name, pipe, monkeypatch):
    """The same latents with more and less free memory: PyTorch decodes only the former."""
    z, calls, safe = torch.randn(2, 4, 40, 40), [], safe_decode(pipe)
    want = type(pipe.vae).decode(pipe.vae, z).sample.detach()
    watch = pipe.vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    free = {"free": 4 << 30}
    monkeypatch.setattr(decoding, "describe_card", lambda device: CARD | free)
    pipe.vae.enable_tiling()  # vaemem decodes whole
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 512, 256

    def decode():
        told = {"z": z} if by_name else {}
        output = pipe.vae.decode(*[] if by_name else [z], return_dict=return_dict, **told)
        return output.sample if return_dict else output[0]

    with torch.no_grad():
        assert torch.allclose(decode(), want, atol=1e-4) and calls == [1] and safe.notes == ()
        free["free"] = 3 * MIB
        with warned(names=["cpu"]):
            assert torch.allclose(decode(), want, atol=1e-4) and len(safe.notes) == 1
        monkeypatch.setattr(AutoencoderKL, "to", refuse_cards)
        with pytest.warns(RuntimeWarning):
            assert torch.allclose(decode(), want, atol=1e-4)
    assert re.search(r"cannot decode on cpu: no engine.*takes about \d+ s", safe.notes[1])
    assert calls == [1]
    watch.remove()


def test_the_cache_is_freed_before_our_decode(pipe, monkeypatch):
    """vaemem has another allocator than PyTorch. It cannot use the cache until PyTorch gives it back."""
    done, copied = [], decoding._copy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(decoding, "_copy", lambda *args: done.append("copied") or copied(*args))
    monkeypatch.setattr(decoding, "explain_misfit", lambda vae, z: "because")
    safe_decode(pipe)
    with torch.no_grad(), warned(names=["because. "]):
        pipe.vae.decode(torch.zeros(1, 4, 8, 8))
    assert done == ["freed", "copied"]


@pytest.fixture
def windows(monkeypatch):
    """A card of 1000 bytes on Windows: the driver counts 600 as free, and PyTorch holds 200. The list has the bytes to
    which PyTorch was limited."""
    said, limits = {"mem_get_info": (600, 1000), "memory_reserved": 200}, [1000]
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: limits[-1] / 1000)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, index: limits.append(1000 * part))
    monkeypatch.setattr(free_memory.sys, "platform", "win32")
    return limits


def test_windows_does_not_spill(windows, monkeypatch):
    """PyTorch is limited for the call alone, to what the driver counts as free, and never beyond an earlier limit."""
    with free_memory.no_spilling("cpu"):
        assert windows == [1000]
    with pytest.raises(KeyError), free_memory.no_spilling("cuda:0"):
        assert windows[-1] == 800
        raise KeyError
    windows.append(500)
    with free_memory.no_spilling("cuda"):
        assert windows[-1] == 500
    assert windows == [1000, 800, 1000, 500, 500, 500]
    monkeypatch.setattr(free_memory.sys, "platform", "linux")
    with free_memory.no_spilling("cuda"):
        assert len(windows) == 6


def test_a_decode_on_windows_runs_out_where_it_would_spill(pipe, windows, monkeypatch):
    """So vaemem decodes. The prediction has no bytes for Windows: the driver does not count them as free."""
    asked, z = [], torch.zeros(1, 4, 8, 8)
    monkeypatch.setattr(decoding, "describe_card", lambda device: CARD | {"free": 4 << 30})
    monkeypatch.setattr(decoding, "predict", lambda *args, **how: asked.append(how) or SimpleNamespace(fits=True))
    monkeypatch.setattr(decoding, "no_spilling", lambda device: free_memory.no_spilling("cuda"))
    monkeypatch.setattr(decoding, "available_memory", lambda: None)
    safe, limited = safe_decode(pipe), []

    def fail(x):
        limited.append(windows[-1])
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(pipe.vae.decoder.conv_out, "forward", fail)
    with torch.no_grad(), pytest.warns(RuntimeWarning):
        pipe.vae.decode(z)
    assert limited == [800] and windows[-1] == 1000 and "ran out" in safe.notes[0]
    assert not asked[0].keys() & {"os", "safe"} and 7 << 30 < asked[0]["used"] < 8 << 30


def test_free_memory_counts_what_pytorch_does_not_use(monkeypatch):
    for name, value in {"memory_reserved": 70, "memory_allocated": 40, "mem_get_info": (100, 200)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory.find_free("cuda:0") == 130


def test_other_errors_pass_through(pipe, monkeypatch):
    safe = safe_decode(pipe)
    error = RuntimeError("a wrong shape")
    fail_in_the_middle(monkeypatch, pipe.vae, error, [])
    with pytest.raises(RuntimeError) as caught:
        pipe.vae.decode(torch.zeros(1, 4, 8, 8))
    assert caught.value is error
    assert safe.latents is not None


def test_a_copy_is_guarded_itself(pipe):
    z, safe = torch.ones(1, 4, 8, 8), safe_decode(pipe)
    copied = copy.deepcopy(pipe.vae)
    torch.nn.init.zeros_(copied.decoder.conv_out.weight)
    torch.nn.init.zeros_(copied.decoder.conv_out.bias)
    with torch.no_grad():
        assert not copied.decode(z).sample.any() and safe.latents is None and pipe.vae.decode(z).sample.any()
    copied.decode.undo()
    assert "decode" not in vars(copied) and pipe.vae.decode is safe
    restored, both = pickle.loads(pickle.dumps(pipe.vae)), (safe, pipe.vae)
    for guard, vae in ((restored.decode, restored), copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert vae is not pipe.vae and vae.decode is guard and guard._before is None
        with torch.no_grad():
            assert torch.equal(vae.decode(z).sample, type(vae).decode(pipe.vae, z).sample)
        assert torch.equal(guard.latents, z)
        guard.undo()
        assert "decode" not in vars(vae)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_guards_are_undone_in_any_order(order, pipe):
    """Each decode reaches the guards that are left, and no others."""
    guards, left, z = [safe_decode(pipe) for _ in range(3)], [0, 1, 2], torch.zeros(1, 4, 8, 8)
    for number in order:
        guards[number].undo()
        guards[number].undo()  # nothing more happens
        left.remove(number)
        for guard in guards:
            guard.latents = None
        with torch.no_grad():
            pipe.vae.decode(z)
        assert [i for i, guard in enumerate(guards) if guard.latents is not None] == left
    assert "decode" not in vars(pipe.vae)


def test_pipelines_without_such_a_vae_are_refused(pipe):
    with refused("pipe", "UNet2DConditionModel", kind=TypeError):
        safe_decode(pipe.unet)
    pipe.vae = AutoencoderKL.from_module(pipe.vae)
    with refused("pipe", names=["memory_limit"]):
        safe_decode(pipe)
