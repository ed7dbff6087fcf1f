"""The models of ComfyUI that benchmarks/record_modules.py records if COMFYUI names its folder, as its nodes call them.

A denoiser is recorded with everything that apply_model does: the conversions between the sampler's float32 and the
model's type, too. Text encoders have float16 weights, and convert each for its call: they compute in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from comfyui_code import import_comfyui
from modules import (
    EVEN,
    FLUX_CHECKS,
    FLUX_POINTS,
    HALF,
    PADDED,
    PATCH_MONOMIALS,
    PATCHES,
    SINGLE,
    UNET_CHECKS,
    UNET_POINTS,
    ZIMAGE_CASES,
    ZIMAGE_CHECKS,
    ZIMAGE_MONOMIALS,
    ZIMAGE_POINTS,
    Call,
    Module,
    Sizes,
    halved,
    levels,
    points,
    products,
)

from vaemem.pytorch.loading import default_dtype

import_comfyui()
import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.supported_models
import comfy.text_encoders.flux
import comfy.text_encoders.qwen_image

# The models' own numbers.
UNET = {
    "use_checkpoint": False, "image_size": 32, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "in_channels": 4, "model_channels": 320, "use_temporal_attention": False, "use_temporal_resblock": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "SD15": {
        **UNET, "adm_in_channels": None, "num_res_blocks": [2] * 4, "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "channel_mult": [1, 2, 4, 4], "transformer_depth_middle": 1, "use_linear_in_transformer": False,
        "context_dim": 768, "transformer_depth_output": [1] * 9 + [0] * 3,
    },
    "SDXL": {
        **UNET, "adm_in_channels": 2816, "num_classes": "sequential", "num_res_blocks": [2] * 3,
        "transformer_depth": [0, 0, 2, 2, 10, 10], "channel_mult": [1, 2, 4], "transformer_depth_middle": 10,
        "use_linear_in_transformer": True, "context_dim": 2048,
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    },
    "Flux": {
        "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 768,
        "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
        "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": True,
    },
}  # fmt: skip
CONFIGS["QwenImage"] = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}
CONFIGS["Flux2"] = {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
    "context_in_dim": 15360, "hidden_size": 6144, "mlp_ratio": 3.0, "num_heads": 48, "depth": 8,
    "depth_single_blocks": 48, "axes_dim": [32] * 4, "theta": 2000, "qkv_bias": False, "guidance_embed": True,
    "global_modulation": True, "mlp_silu_act": True, "ops_bias": False, "default_ref_method": "index",
    "ref_index_scale": 10.0, "txt_ids_dims": [3],
}  # fmt: skip
CONFIGS["ZImage"] = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 3840, "cap_feat_dim": 2560, "n_layers": 30,
    "qk_norm": True, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}  # fmt: skip
CONFIGS["FluxSchnell"] = CONFIGS["Flux"] | {"guidance_embed": False}


def build_denoiser(kind: str) -> torch.nn.Module:
    """ComfyUI's model of a class of comfy/supported_models.py."""
    model = getattr(comfy.supported_models, kind)(CONFIGS[kind])
    model.set_inference_dtype(torch.get_default_dtype(), None)
    with default_dtype(torch.float32):  # of its tables
        return model.get_model({}, device="meta")


def build_encoder(kind: Any, *types: torch.dtype, dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    with default_dtype(torch.float32):  # of logit_scale
        return kind(*types, device="meta", dtype=dtype)


def _call_denoiser(sizes: Sizes, dtype: torch.dtype, channels: int, width: int, **given: Any) -> Call:
    n = sizes["n"]
    x, sigma = torch.empty(n, channels, sizes["h"], sizes["w"]), torch.empty(n)
    made = {name: torch.empty(n, size) if size else torch.empty(n) for name, size in given.items()}
    return (x, sigma), {"c_crossattn": torch.empty(n, sizes["t"], width), **made}


def _apply(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.apply_model(*args, **kwargs)


def _call_qwen(sizes: Sizes, dtype: torch.dtype) -> Call:
    n = sizes["n"]
    x, sigma = torch.empty(n, 16, 1, sizes["h"], sizes["w"]), torch.empty(n)
    return (x, sigma), {"c_crossattn": torch.empty(n, sizes["t"], 3584)}


def _call_flux2(sizes: Sizes, dtype: torch.dtype) -> Call:
    n = sizes["n"]
    x, sigma = torch.empty(n, 128, sizes["h"], sizes["w"]), torch.empty(n)
    return (x, sigma), {"c_crossattn": torch.empty(n, sizes["t"], 15360), "guidance": torch.empty(n)}


def _call_zimage(sizes: Sizes, dtype: torch.dtype) -> Call:
    n, t = sizes["n"], sizes["t"]
    x, sigma = torch.empty(n, 16, sizes["h"], sizes["w"]), torch.empty(n)
    return (x, sigma), {"c_crossattn": torch.empty(n, t, 2560), "num_tokens": t}


def _tokens(count: int) -> list[list[tuple[int, float]]]:
    return [[(1000, 1.0)] * 77] * count


def _encode(model: Any, tokens: Any) -> Any:
    return model.encode_token_weights(tokens)


def _encode_alone(model: Any, tokens: Any) -> Any:
    """Encode without removing the template, which happens in the host's memory."""
    return comfy.sd1_clip.SD1ClipModel.encode_token_weights(model, tokens)


def _denoiser(kind: str, about: str, given: dict[str, Any]) -> Module:
    halvings = 2 if kind == "SDXL" else 3
    return Module(
        f"{about}, as BaseModel.apply_model runs it; n images, twice with guidance, a latent h x w, t tokens",
        partial(build_denoiser, kind), partial(_call_denoiser, **given), UNET_POINTS, UNET_CHECKS,
        products(["", "n"], ["", "t"], levels(halvings)), halved(halvings), dtypes=HALF, run=_apply,
    )  # fmt: skip


def _flux(kind: str, about: str, given: dict[str, Any]) -> Module:
    return Module(
        f"{about}, as BaseModel.apply_model runs it; n images, an even latent h x w, t tokens",
        partial(build_denoiser, kind), partial(_call_denoiser, channels=16, width=4096, y=768, **given), FLUX_POINTS,
        FLUX_CHECKS, [*PATCH_MONOMIALS, "h1", "w1"], PATCHES, (*SINGLE, *EVEN), dtypes=HALF, run=_apply,
    )  # fmt: skip


# The code loops over sections of 77 tokens: each number of them is a case.
SECTIONS = [points("n", *((n,) for n in range(1, 5)))] * 2
COUNTS = [f"1 n = {n}" for n in range(1, 5)]
COMFYUI_MODULES = {
    "sd15-unet": _denoiser("SD15", "SD 1.5's UNet", {"channels": 4, "width": 768}),
    "sdxl-unet": _denoiser("SDXL", "SDXL's UNet", {"channels": 4, "width": 2048, "y": 2816}),
    "flux-transformer": _flux("Flux", "FLUX.1-dev's transformer", {"guidance": 0}),
    "flux-schnell-transformer": _flux("FluxSchnell", "FLUX.1-schnell's transformer", {}),
    "sd15-clip": Module(
        "SD1ClipModel; up to 4 sections of 77 tokens",
        partial(build_encoder, comfy.sd1_clip.SD1ClipModel),
        lambda sizes, dtype: (({"l": _tokens(sizes["n"])},), {}), *SECTIONS, [""], cases=COUNTS,
        dtypes=HALF[:1], run=_encode,
    ),
    "sdxl-clip": Module(
        "SDXLClipModel; up to 4 sections of 77 tokens",
        partial(build_encoder, comfy.sdxl_clip.SDXLClipModel),
        lambda sizes, dtype: (({"l": _tokens(sizes["n"]), "g": _tokens(sizes["n"])},), {}), *SECTIONS, [""],
        cases=COUNTS, dtypes=HALF[:1], run=_encode,
    ),
    "qwen-image-transformer": Module(
        "Qwen-Image's transformer, as BaseModel.apply_model runs it; n images, an even latent h x w, t tokens",
        partial(build_denoiser, "QwenImage"), _call_qwen, FLUX_POINTS, FLUX_CHECKS, [*PATCH_MONOMIALS, "h1", "w1"],
        PATCHES, (*SINGLE, *EVEN), dtypes=HALF[1:], run=_apply,
    ),
    "qwen-image-clip": Module(
        "QwenImageTEModel: Qwen2.5-VL with t tokens, those of the template too; without pictures",
        partial(build_encoder, comfy.text_encoders.qwen_image.QwenImageTEModel, dtype=torch.bfloat16),
        lambda sizes, dtype: (({"qwen25_7b": [[(1000, 1.0)] * sizes["t"]]},), {}),
        points("t", (116,), (47,), (256,), (333,), (512,)), points("t", (200,), (1063,)), ["", "t", "t t"],
        dtypes=HALF[1:], run=_encode_alone,
    ),
    "flux-clip": Module(
        "FluxClipModel: T5 with t tokens, then CLIP with 77",
        partial(build_encoder, comfy.text_encoders.flux.FluxClipModel, torch.float16),
        lambda sizes, dtype: (({"l": _tokens(1), "t5xxl": [[(1000, 1.0)] * sizes["t"]]},), {}),
        points("t", (256,), (300,), (512,), (777,), (341,)), points("t", (400,), (1024,)), ["", "t", "t t"],
        dtypes=HALF[:1], run=_encode,
    ),
}  # fmt: skip
# What 0.8.0 has, and 0.3.64 has not. Its latents are an eighth of the image's sides, and two by two in a channel.
if hasattr(comfy.supported_models, "Flux2"):
    import comfy.text_encoders.z_image

    COMFYUI_MODULES |= {
        "flux2-transformer": Module(
            "FLUX.2-dev's transformer with comfy-kitchen's kernels, as BaseModel.apply_model runs it; n images, a"
            " latent h x w, t tokens",
            partial(build_denoiser, "Flux2"), _call_flux2,
            points(
                "n h w t", (1, 64, 64, 512), (1, 31, 45, 577), (1, 48, 20, 600), (1, 24, 61, 700), (2, 48, 32, 512),
                (2, 31, 45, 640), (3, 24, 61, 512), (4, 50, 25, 777), (5, 32, 32, 513),
            ),
            points("n h w t", (1, 52, 76, 512), (2, 33, 29, 900)),
            [*products(["", "n"], ["", "t", "h w"]), "h", "w"], cases=SINGLE, dtypes=HALF[1:], run=_apply,
        ),
        "zimage-transformer": Module(
            "Z-Image's transformer with comfy-kitchen's kernels, as BaseModel.apply_model runs it; n images, an even"
            " latent h x w, t tokens of each prompt",
            partial(build_denoiser, "ZImage"), _call_zimage, ZIMAGE_POINTS, ZIMAGE_CHECKS, ZIMAGE_MONOMIALS, PADDED,
            ZIMAGE_CASES, dtypes=HALF[1:], run=_apply,
        ),
        "zimage-clip": Module(
            "ZImageTEModel: Qwen3 4B with t tokens, those of the template too",
            partial(build_encoder, comfy.text_encoders.z_image.ZImageTEModel, dtype=torch.bfloat16),
            lambda sizes, dtype: (({"qwen3_4b": [[(1000, 1.0)] * sizes["t"]]},), {}),
            points("t", (116,), (47,), (256,), (333,), (512,)), points("t", (200,), (1063,)), ["", "t", "t t"],
            dtypes=HALF[1:], run=_encode,
        ),
        "flux2-clip": Module(
            "Flux2TEModel with 30 layers of Mistral 3: t tokens, those of the template too",
            partial(
                build_encoder, partial(comfy.text_encoders.flux.Flux2TEModel, model_options={"num_layers": 30}),
                dtype=torch.bfloat16,
            ),
            lambda sizes, dtype: (({"mistral3_24b": [[(1000, 1.0)] * sizes["t"]]},), {}),
            points("t", (116,), (47,), (256,), (333,), (512,)), points("t", (200,), (1063,)), ["", "t", "t t"],
            dtypes=HALF[1:], run=_encode,
        ),
    }  # fmt: skip
