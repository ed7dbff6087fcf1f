"""The components of pipelines that benchmarks/record_modules.py records, as their pipelines build and call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Sizes = Mapping[str, int]
HALF = (torch.float16, torch.bfloat16)


class Module(NamedTuple):
    """A module, its call, and the sizes at which it is recorded.

    build: makes it on the device "meta" in a dtype, of which some submodules may keep another
    call: (args, kwargs) of the call at some sizes in a dtype, meta tensors
    points, checks: sizes for the fit, and other ones that the fit must predict
    derived: variables that follow from others, {name: (polynomial, by, to)}: to * ceil(polynomial / by)
    monomials: what a size may be made of, as products of variables; "" for 1
    run: (module, *args, **kwargs) -> what the pipeline keeps, where that is not all that the call returns
    """

    about: str
    build: Callable[[torch.dtype], torch.nn.Module]
    call: Callable[[Sizes, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]
    points: Sequence[Sizes]
    checks: Sequence[Sizes]
    monomials: Sequence[str]
    derived: Mapping[str, tuple[str, int, int]] = {}
    dtypes: Sequence[torch.dtype] = (*HALF, torch.float32)
    run: Callable[..., Any] | None = None


def products(*factors: Sequence[str]) -> list[str]:
    """Every product of one of each: products(["", "n"], ["", "t"]) is ["", "t", "n", "n t"]."""
    made = [""]
    for choices in factors:
        made = [f"{one} {other}".strip() for one in made for other in choices]
    return made


def points(names: str, *rows: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# ---- UNets ----

# A latent h x w, and what three halvings make of it; n counts images twice where there is guidance; t tokens.
HALVED = {f"{side}{i + 1}": (f"1 {side}{i or ''}", 2, 1) for side in "hw" for i in range(3)}
LEVELS = ["", *(f"h{i} w{i}".replace("0", "") for i in range(4)), "h", "w", *HALVED]
UNET_POINTS = points(
    "n h w t",
    (2, 64, 64, 77),
    (4, 96, 72, 154),
    (2, 63, 95, 77),
    (6, 56, 122, 231),
    (3, 101, 49, 77),
    (2, 128, 37, 308),
)
UNET_CHECKS = points("n h w t", (2, 88, 120, 77), (8, 57, 66, 154))


def _sd15_unet(dtype: torch.dtype) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8).to(dtype)


def _unet_call(channels: int) -> Callable[[Sizes, torch.dtype], Any]:
    def call(sizes: Sizes, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = torch.empty(sizes["n"], 4, sizes["h"], sizes["w"], dtype=dtype)
        prompt = torch.empty(sizes["n"], sizes["t"], channels, dtype=dtype)
        return (x, torch.empty((), dtype=torch.int64)), {"encoder_hidden_states": prompt, "return_dict": False}

    return call


# ---- text encoders ----

TEXT_POINTS = points("n t", (1, 77), (2, 77), (3, 40), (4, 61), (2, 16), (5, 33))
TEXT_CHECKS = points("n t", (1, 64), (6, 77))
TEXT_MONOMIALS = products(["", "n"], ["", "t", "t t"])


def _clip_l(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        projection_dim=768, hidden_act="quick_gelu",
    )  # fmt: skip
    return CLIPTextModel(config).to(dtype)


def _tokens(sizes: Sizes, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.empty(sizes["n"], sizes["t"], dtype=torch.int64),), {"attention_mask": None}


# ---- VAEs ----

# One latent: of several, what attention leaves is laid out in another way, and the upsampler copies it.
VAE_POINTS = points("h w", (64, 64), (48, 72), (33, 95), (56, 122), (101, 49))
VAE_CHECKS = points("h w", (88, 120), (57, 66))


def _vae(channels: int) -> Callable[[torch.dtype], torch.nn.Module]:
    def build(dtype: torch.dtype) -> torch.nn.Module:
        from diffusers import AutoencoderKL

        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=channels, sample_size=512,
            use_quant_conv=channels == 4, use_post_quant_conv=channels == 4,
        ).to(dtype)  # fmt: skip

    return build


def _latents(channels: int) -> Callable[[Sizes, torch.dtype], Any]:
    return lambda sizes, dtype: ((torch.empty(1, channels, sizes["h"], sizes["w"], dtype=dtype),), {})


def _autoencoder(channels: int, whose: str) -> Module:
    return Module(
        f"AutoencoderKL.decode of {whose}; a latent h x w", _vae(channels), _latents(channels),
        VAE_POINTS, VAE_CHECKS, ["", "h", "w", "h w", "h h w w"],
        run=lambda vae, z: vae.decode(z).sample,
    )  # fmt: skip


MODULES = {
    "autoencoder-4": _autoencoder(4, "SD 1.5 and SDXL"),
    "autoencoder-16": _autoencoder(16, "FLUX.1 and Z-Image"),
    "sd15-unet": Module(
        "UNet2DConditionModel of stable-diffusion-v1-5; n images, twice with guidance, a latent h x w, t tokens",
        _sd15_unet, _unet_call(768), UNET_POINTS, UNET_CHECKS,
        products(["", "n"], ["", "t"], LEVELS), HALVED,
    ),
    "clip-l": Module(
        "CLIPTextModel of clip-vit-large-patch14; n prompts of t tokens",
        _clip_l, _tokens, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS,
        run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
}  # fmt: skip
