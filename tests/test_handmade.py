"""Weights made by hand: what they were made to carry comes back, through the same passes that trained ones take."""

import numpy as np
import pytest
from engine import error
from errors import refused

from vaemem import VAE
from vaemem._handmade import handmade, paint, picture

pytestmark = pytest.mark.python

SQUARE = 64  # pixels; what interpolation blurs around an edge is over within 24
COLOURS = ("navy", "blue", "green", "cyan", "red", "pink", "gold", "cream")


def squares(shade: float = 0.0) -> np.ndarray:
    """The eight colours in two rows of four, (128, 256, 3)."""
    rows = [np.concatenate([np.full((SQUARE, SQUARE, 3), paint(c, shade)) for c in four], 1)
            for four in (COLOURS[:4], COLOURS[4:])]  # fmt: skip
    return np.rint(np.concatenate(rows) * 255).astype(np.uint8)


def there_and_back(vae: VAE, image: np.ndarray) -> np.ndarray:
    latents = vae.encode(image[None]).sample(0)
    assert latents.shape == (1, vae.arch["latent_channels"], image.shape[0] // 8, image.shape[1] // 8)
    return vae.decode(latents, output_type="uint8")[0]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("model", ["sd15", "sdxl", "flux"])
def test_flat_colours_come_back_and_edges_where_they_were(model):
    image = squares()
    back = there_and_back(handmade(model), image).astype(int)
    for y in range(0, 128, SQUARE):
        for x in range(0, 256, SQUARE):
            inside = slice(y + 24, y + 40), slice(x + 24, x + 40)
            assert abs(back[inside] - image[inside]).max() <= 3
    for y in (32, 96):  # along a row, between two colours, the nearer of both changes at the edge
        for x in (SQUARE, 2 * SQUARE, 3 * SQUARE):
            left, right = image[y, x - 1].astype(int), image[y, x].astype(int)
            nearer_right = abs(back[y] - right).sum(-1) < abs(back[y] - left).sum(-1)
            assert not nearer_right[x - 20 : x - 1].any() and nearer_right[x + 1 : x + 20].all()


def test_shades_come_back():
    vae = handmade("sdxl")
    dark, light = (there_and_back(vae, squares(shade)[:SQUARE]).astype(int) for shade in (-0.06, 0.06))
    change = (light - dark)[24:40, 24:40].mean() / 255
    assert 0.9 * 0.12 < change < 1.1 * 0.12


def test_the_picture_is_one():
    image = picture(256)
    assert image.shape == (256, 256, 3) and image.dtype == np.uint8
    bright = image.astype(int)
    nearest = {min(COLOURS, key=lambda c: abs(paint(c) * 255 - p).sum()) for p in bright[::8, ::8].reshape(-1, 3)}
    assert nearest == set(COLOURS)
    back = there_and_back(handmade("sdxl"), image)
    assert (abs(back.astype(int) - bright).max(-1) < 32).mean() > 0.75, "most of it comes back"


def test_diffusers_makes_the_same_of_them(tmp_path):
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    vae = handmade("sd15")
    vae.save(tmp_path / "vae")
    theirs = diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()  # 0.3 GB that pytest would keep
    x = picture(64).transpose(2, 0, 1)[None] / np.float32(127.5) - 1
    with torch.no_grad():
        moments = theirs.encode(torch.from_numpy(x)).latent_dist
        want = theirs.decode(moments.mean).sample.numpy()
    encoded = vae.encode(x)
    # float32 on both sides; the thresholds multiply differences by up to 1 / 0.07.
    assert error(encoded.mean, moments.mean.numpy()) <= 1e-5
    assert error(vae.decode(moments.mean.numpy()), want) <= 1e-4


def test_an_unknown_model():
    with refused("model", "'sd9'"):
        handmade("sd9")
