"""InvokeAI's VAEs without InvokeAI: diffusers' class, and a stand-in for what InvokeAI loads."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from errors import refused

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")

import vaemem
from vaemem.pytorch import invokeai_vae
from vaemem.pytorch.places import Place

BLOCKS = {f"{way}_block_types": [f"{name}Block2D"] * 3 for way, name in (("down", "DownEncoder"), ("up", "UpDecoder"))}


def ignore(done, total):
    pass


@pytest.fixture
def loaded():
    """A stand-in for what InvokeAI's context.models.load returns, with notes of what was locked."""
    torch.manual_seed(0)
    module = diffusers.AutoencoderKL(**BLOCKS, block_out_channels=[32, 32, 64], scaling_factor=0.2)
    locked = []

    @contextmanager
    def model_in_ram():
        locked.append("RAM")
        yield module

    @contextmanager
    def model_on_device(working_mem_bytes=None):
        locked.append(working_mem_bytes)
        yield {}, module

    return SimpleNamespace(
        model=module, compute_device=torch.device("cpu"), locked=locked, model_in_ram=model_in_ram,
        model_on_device=model_on_device,
    )  # fmt: skip


@pytest.fixture
def z():
    return torch.randn(2, 4, 6, 10, generator=torch.Generator().manual_seed(1))


def pixels(vae, z):
    """What InvokeAI makes of the first latents."""
    with torch.no_grad():
        image = (vae.decode(z[:1] / vae.config.scaling_factor).sample / 2 + 0.5).clamp(0, 1)
    return np.asarray((image[0].movedim(0, -1) * 255).round(), np.int16)


def test_images_and_latents(loaded, z):
    image = invokeai_vae.decode_whole(loaded, z, [], ignore)
    found, want = np.asarray(image, np.int16), pixels(loaded.model, z)
    assert found.shape == want.shape == (24, 40, 3) and found.std() > 5
    assert np.abs(found - want).max() <= 1  # rounded to bytes by both
    larger = Image.fromarray(np.random.default_rng(0).integers(0, 256, (29, 46, 3), np.uint8))
    latents = invokeai_vae.encode_whole(loaded, larger, ignore, Place(limit=1 << 30))
    scaled = torch.from_numpy(np.array(larger.resize((40, 24), Image.Resampling.LANCZOS), np.float32) / 127.5 - 1)
    with torch.no_grad():
        want = loaded.model.encode(scaled.movedim(-1, 0)[None]).latent_dist.mode() * 0.2
    torch.testing.assert_close(latents, want, rtol=1e-4, atol=1e-4)
    assert loaded.locked == ["RAM", "RAM"]


def test_a_card_has_room_for_the_limit(loaded, z, monkeypatch):
    """A stand-in for the card: the engine on the CPU."""
    load, opened = vaemem.VAE.load, []

    def load_here(module, parts, dtype, device="cpu"):
        opened.append((dtype, device))
        return load(module, parts=parts)

    monkeypatch.setattr(invokeai_vae.VAE, "load", load_here)
    monkeypatch.setattr(Place, "device_for", lambda place, theirs, dtype: "cuda:0")
    want = invokeai_vae.decode_whole(loaded, z, [], ignore, Place(limit=1 << 30))
    assert np.abs(np.asarray(want, np.int16) - pixels(loaded.model, z)).max() <= 1
    assert loaded.locked == [1 << 30] and opened == [("float32", "cuda:0")]


def test_refusals(loaded, z):
    with refused("vae", got="x"):
        invokeai_vae.decode_whole(loaded, z, ["x"], ignore)
    with refused("memory_limit"):
        invokeai_vae.decode_whole(loaded, z, [], ignore, Place(limit=1000))
    with refused("device"):
        invokeai_vae.decode_whole(loaded, z, [], ignore, Place("gpu"))
    loaded.model = torch.nn.Linear(1, 1)
    with refused("vae", got="Linear"):
        invokeai_vae.decode_whole(loaded, z, [], ignore)
    with refused("vae", got="Linear"):
        invokeai_vae.encode_whole(loaded, Image.new("RGB", (8, 8)), ignore)


def test_cancel(loaded, z):
    class Canceled(Exception):
        pass

    def cancel(done, total):
        raise Canceled

    with pytest.raises(Canceled):
        invokeai_vae.decode_whole(loaded, z, [], cancel)
