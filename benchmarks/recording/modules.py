"""The components of pipelines that record_modules.py records, as their pipelines build and call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from vaemem.pytorch.fitting import products
from vaemem.pytorch.loading import default_dtype, make_component

Sizes = Mapping[str, int]
Call = tuple[tuple[Any, ...], dict[str, Any]]
HALF = (torch.float16, torch.bfloat16)


class Module(NamedTuple):
    """A module, its call, and the sizes at which it is recorded.

    build: makes it in the default dtype on the default device
    call: (args, kwargs) of the call at some sizes in a dtype, meta tensors
    points, checks: sizes for the fit, and other ones that the fit must predict
    derived: variables that follow from others, {name: (polynomial, by, to)}: to * ceil(polynomial / by)
    cases: equations of polynomials; the call takes other steps where one holds than where it does not
    monomials: what a size may be made of, as products of variables; "" for 1
    run: (module, *args, **kwargs) -> what the pipeline keeps, where that is not all that the call returns
    tables: tensors that a first call makes and keeps, which `run` gets before the arguments: a later call is recorded
    """

    about: str
    build: Callable[[], torch.nn.Module]
    call: Callable[[Sizes, torch.dtype], Call]
    points: Sequence[Sizes]
    checks: Sequence[Sizes]
    monomials: Sequence[str]
    derived: Mapping[str, tuple[str, int, int]] = {}
    cases: Sequence[str] = ()
    dtypes: Sequence[torch.dtype] = (*HALF, torch.float32)
    run: Callable[..., Any] | None = None
    tables: Callable[[Sizes], Sequence[torch.Tensor]] | None = None


def make(module: Module, dtype: torch.dtype, device: str = "meta") -> torch.nn.Module:
    """A module in a dtype from the beginning, as from_pretrained makes it: what has another of its own keeps that."""
    with default_dtype(dtype), torch.device(device):
        return module.build().eval()


def points(names: str, *rows: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


SINGLE = ("1 n = 1",)  # what has one of a kind lies otherwise: fewer copies are made of it

# ---- UNets ----


# A latent h x w, and what halvings make of it; n counts images twice where there is guidance; t tokens.
def halved(times: int) -> dict[str, tuple[str, int, int]]:
    return {f"{side}{i + 1}": (f"1 {side}{i or ''}", 2, 1) for side in "hw" for i in range(times)}


def levels(halvings: int) -> list[str]:
    areas = [f"h{i} w{i}".replace("0", "") for i in range(halvings + 1)]
    return ["", *areas, "h", "w", *halved(halvings)]


UNET_POINTS = points(
    "n h w t",
    (2, 64, 64, 77),
    (4, 96, 72, 154),
    (2, 63, 95, 77),
    (6, 56, 122, 231),
    (3, 101, 49, 77),
    (2, 128, 37, 308),
)
# Those for layers that take the pixels of one image as they lie in memory, and copy the pixels of several images.
LINEAR_POINTS = [*UNET_POINTS, *({**point, "n": 1} for point in UNET_POINTS)]
UNET_CHECKS = points("n h w t", (2, 88, 120, 77), (8, 57, 66, 154), (1, 17, 130, 77))


def _unet_call(sizes: Sizes, dtype: torch.dtype, channels: int, time: torch.dtype, **extra: Any) -> Call:
    """The step's time is one of the scheduler's on the device: whole for PNDM, SD 1.5's, and float32 for Euler."""
    x = torch.empty(sizes["n"], 4, sizes["h"], sizes["w"], dtype=dtype)
    prompt = torch.empty(sizes["n"], sizes["t"], channels, dtype=dtype)
    return (x, torch.empty((), dtype=time)), {"encoder_hidden_states": prompt, "return_dict": False, **extra}


def _sd15_unet_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    return _unet_call(sizes, dtype, 768, torch.int64)


def _sd21_unet_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    return _unet_call(sizes, dtype, 1024, torch.int64)


def _sdxl_unet_call(sizes: Sizes, dtype: torch.dtype, width: int = 2048, ids: int = 6) -> Call:
    n = sizes["n"]
    added = {"text_embeds": torch.empty(n, 1280, dtype=dtype), "time_ids": torch.empty(n, ids, dtype=dtype)}
    return _unet_call(sizes, dtype, width, torch.float32, added_cond_kwargs=added)


def _condition(sizes: Sizes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"controlnet_cond": torch.empty(sizes["n"], 3, 8 * sizes["h"], 8 * sizes["w"], dtype=dtype)}


def _sd15_controlnet_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    how = {"conditioning_scale": 0.5, "guess_mode": False}
    return _unet_call(sizes, dtype, 768, torch.int64, **_condition(sizes, dtype), **how)


def _sdxl_controlnet_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    how = {"conditioning_scale": 0.5, "guess_mode": False}
    args, kwargs = _sdxl_unet_call(sizes, dtype)
    return args, {**kwargs, **_condition(sizes, dtype), **how}


def _controlled(call: Callable[[Sizes, torch.dtype], Call], *channels: Sequence[int]) -> Any:
    """A UNet's call with a ControlNet's residuals: of these channels after 0, 1, ... halvings of the latent."""

    def controlled(sizes: Sizes, dtype: torch.dtype) -> Call:
        args, kwargs = call(sizes, dtype)
        h, w, residuals = sizes["h"], sizes["w"], list[torch.Tensor]()
        for level in channels:
            residuals += [torch.empty(sizes["n"], c, h, w, dtype=dtype) for c in level]
            h, w = -(-h // 2), -(-w // 2)
        added = {"down_block_additional_residuals": residuals[:-1], "mid_block_additional_residual": residuals[-1]}
        return args, {**kwargs, **added}

    return controlled


# ---- transformers of images, whose latents h x w are even and come as patches of 2 x 2 ----

PATCHES = halved(1)
EVEN = ("1 h = 2 h1", "1 w = 2 w1")
PATCH_MONOMIALS = products(["", "n"], ["", "t", "h1 w1"])
FLUX_POINTS = points(
    "n h w t", (1, 128, 128, 512), (1, 62, 90, 77), (1, 96, 40, 300), (1, 48, 122, 256), (2, 96, 64, 256),
    (2, 62, 90, 77), (3, 48, 122, 300), (4, 100, 50, 512), (5, 64, 64, 128),
)  # fmt: skip
FLUX_CHECKS = points("n h w t", (1, 104, 152, 512), (2, 66, 58, 128))


def _flux_call(sizes: Sizes, dtype: torch.dtype, guidance: bool, channels: int = 64) -> Call:
    n, t, patches = sizes["n"], sizes["t"], sizes["h"] // 2 * (sizes["w"] // 2)
    return (), {
        "hidden_states": torch.empty(n, patches, channels, dtype=dtype), "timestep": torch.empty(n, dtype=dtype),
        "guidance": torch.empty(1, dtype=torch.float32).expand(n) if guidance else None,
        "pooled_projections": torch.empty(n, 768, dtype=dtype),
        "encoder_hidden_states": torch.empty(n, t, 4096, dtype=dtype), "txt_ids": torch.empty(t, 3, dtype=dtype),
        "img_ids": torch.empty(patches, 3, dtype=dtype), "return_dict": False,
        "joint_attention_kwargs": {} if channels == 64 else None,
    }  # fmt: skip


# Chroma's mask has a row and a column for each token of the prompt and of the picture.
CHROMA_POINTS = [
    *FLUX_POINTS,
    *points("n h w t", (1, 80, 56, 128), (1, 40, 40, 440), (1, 112, 66, 200), (2, 128, 128, 512), (4, 30, 44, 333)),
]
CHROMA_MONOMIALS = products(["", "n"], ["", "t", "h1 w1", "t t", "t h1 w1", "h1 w1 h1 w1"])


def _chroma_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    n, t, patches = sizes["n"], sizes["t"], sizes["h"] // 2 * (sizes["w"] // 2)
    return (), {
        "hidden_states": torch.empty(n, patches, 64, dtype=dtype), "timestep": torch.empty(n, dtype=dtype),
        "encoder_hidden_states": torch.empty(n, t, 4096, dtype=dtype), "txt_ids": torch.empty(t, 3, dtype=dtype),
        "img_ids": torch.empty(patches, 3, dtype=dtype), "attention_mask": torch.empty(n, t + patches, dtype=dtype),
        "joint_attention_kwargs": {}, "return_dict": False,
    }  # fmt: skip


def _sd3_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    n = sizes["n"]
    return (), {
        "hidden_states": torch.empty(n, 16, sizes["h"], sizes["w"], dtype=dtype),
        "timestep": torch.empty((), dtype=torch.float32).expand(n),
        "encoder_hidden_states": torch.empty(n, sizes["t"], 4096, dtype=dtype),
        "pooled_projections": torch.empty(n, 2048, dtype=dtype), "joint_attention_kwargs": None, "return_dict": False,
    }  # fmt: skip


# PixArt's table of positions is for one size; it makes another one in each call for any other size.
PIXART_OWN = "1 h h + 1 w w + 32768 = 256 h + 256 w"  # h = w = 128
PIXART_POINTS = points(
    "n h w t", (1, 128, 128, 300), (1, 128, 128, 77), (1, 128, 128, 120), (1, 128, 128, 256), (2, 128, 128, 300),
    (3, 128, 128, 77), (4, 128, 128, 120), (6, 128, 128, 200), *(tuple(point.values()) for point in FLUX_POINTS[1:]),
)  # fmt: skip
PIXART_CHECKS = points("n h w t", (2, 104, 152, 300), (1, 66, 58, 128), (2, 128, 128, 40), (1, 128, 128, 300))


def _pixart_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    n, t = sizes["n"], sizes["t"]
    return (torch.empty(n, 4, sizes["h"], sizes["w"], dtype=dtype),), {
        "encoder_hidden_states": torch.empty(n, t, 4096, dtype=dtype),
        "encoder_attention_mask": torch.empty(n, t, dtype=torch.int64),
        "timestep": torch.empty(1, dtype=torch.int64).expand(n),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False,
    }  # fmt: skip


def _flux2_call(sizes: Sizes, dtype: torch.dtype, width: int, guidance: bool = False) -> Call:
    n, t, patches = sizes["n"], sizes["t"], sizes["h"] // 2 * (sizes["w"] // 2)
    return (), {
        "hidden_states": torch.empty(n, patches, 128, dtype=dtype), "timestep": torch.empty(n, dtype=dtype),
        "guidance": torch.empty(1, dtype=torch.float32).expand(n) if guidance else None,
        "encoder_hidden_states": torch.empty(n, t, width, dtype=dtype),
        "txt_ids": torch.empty(n, t, 4, dtype=torch.int64), "img_ids": torch.empty(n, patches, 4, dtype=torch.int64),
        "joint_attention_kwargs": None, "return_dict": False,
    }  # fmt: skip


def _qwen_image_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    n, t, h1, w1 = sizes["n"], sizes["t"], sizes["h"] // 2, sizes["w"] // 2
    return (), {
        "hidden_states": torch.empty(n, h1 * w1, 64, dtype=dtype), "timestep": torch.empty(n, dtype=dtype),
        "guidance": None, "encoder_hidden_states_mask": None,
        "encoder_hidden_states": torch.empty(n, t, 3584, dtype=dtype), "img_shapes": [[(1, h1, w1)]],
        "attention_kwargs": {}, "return_dict": False,
    }  # fmt: skip


def _qwen_image_tables(sizes: Sizes) -> Sequence[torch.Tensor]:
    """Return tables of positions: of all places, forwards and backwards, and those of the latent's patches."""
    return [torch.empty(n, 64, dtype=torch.complex64) for n in (4096, 4096, sizes["h"] // 2 * (sizes["w"] // 2))]


def _with_tables(transformer: Any, *tables: torch.Tensor, **kwargs: Any) -> Any:
    if tables:
        transformer.pos_embed._get_device_freqs = lambda _: tables[:2]
        transformer.pos_embed._compute_video_freqs = lambda *_: tables[2]
    return transformer(**kwargs)[0]


# Latents f x h x w.
WAN_POINTS = points(
    "n f h w t", (1, 21, 60, 104, 512), (1, 1, 62, 90, 77), (1, 5, 96, 40, 300), (1, 13, 48, 122, 256),
    (2, 9, 96, 64, 256), (2, 1, 62, 90, 77), (3, 4, 48, 122, 300), (4, 2, 100, 50, 512), (5, 3, 64, 64, 128),
)  # fmt: skip
WAN_CHECKS = points("n f h w t", (1, 21, 90, 160, 512), (2, 3, 66, 58, 128))


def _wan_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    n, f, h, w, t = (sizes[name] for name in "nfhwt")
    return (), {
        "hidden_states": torch.empty(n, 16, f, h, w, dtype=dtype),
        "timestep": torch.empty((), dtype=torch.int64).expand(n),
        "encoder_hidden_states": torch.empty(n, t, 4096, dtype=dtype), "attention_kwargs": None, "return_dict": False,
    }  # fmt: skip


def _wan_5b_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    """Each token has a time of its own (expand_timesteps)."""
    n, f, h, w = (sizes[name] for name in "nfhw")
    args, kwargs = _wan_call(sizes, dtype)
    times = torch.empty(f * (h // 2) * (w // 2)).unsqueeze(0).expand(n, -1)
    return args, kwargs | {"hidden_states": torch.empty(n, 48, f, h, w, dtype=dtype), "timestep": times}


# Z-Image pads tokens and patches to multiples of 32, where they are none; its batch is a list, of up to 4 images here
# with prompts of one length.
ZIMAGE_SIZES = (
    ((128, 128), (64, 128), (96, 160), (80, 112), (112, 64)),
    ((90, 90), (100, 130), (74, 122), (62, 90), (122, 38)),
)
ZIMAGE_TOKENS = ((32, 64, 256, 96, 160), (20, 77, 45, 200, 130))
ZIMAGE_BATCH = 4
ZIMAGE_POINTS = points(
    "n h w t",
    *(
        (n, *size, t)
        for n in range(1, ZIMAGE_BATCH + 1)
        for sizes in ZIMAGE_SIZES
        for tokens in ZIMAGE_TOKENS
        for size, t in zip(sizes, tokens, strict=True)
    ),
)
ZIMAGE_CHECKS = points("n h w t", (1, 104, 152, 52), (3, 90, 106, 128), (2, 70, 82, 40), (4, 128, 96, 192))
ZIMAGE_MONOMIALS = ["", "t", "t32", "h1 w1", "p32", "h1", "w1"]
ZIMAGE_CASES = (*(f"1 n = {n + 1}" for n in range(ZIMAGE_BATCH)), "1 t = 1 t32", "1 h1 w1 = 1 p32", *EVEN)
PADDED = PATCHES | {"t32": ("1 t", 32, 32), "p32": ("1 h1 w1", 32, 32)}


def _zimage_call(sizes: Sizes, dtype: torch.dtype) -> Call:
    n, h, w, t = (sizes[name] for name in "nhwt")
    latents = [torch.empty(16, 1, h, w, dtype=dtype) for _ in range(n)]
    prompts = [torch.empty(t, 2560, dtype=dtype) for _ in range(n)]
    return (latents, torch.empty(n, dtype=torch.float32), prompts), {
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


# ---- text encoders ----

TEXT_POINTS = points("n t", (1, 77), (2, 77), (3, 40), (4, 61), (2, 16), (5, 33))
TEXT_CHECKS = points("n t", (1, 64), (6, 77))
LONG_POINTS = points(
    "n t", (1, 512), (1, 77), (1, 256), (1, 40), (2, 256), (3, 128), (4, 77), (2, 333), (5, 40), (3, 200)
)
LONG_CHECKS = points("n t", (1, 300), (3, 512))
TEXT_MONOMIALS = products(["", "n"], ["", "t", "t t"])


def _ids(sizes: Sizes) -> torch.Tensor:
    return torch.empty(sizes["n"], sizes["t"], dtype=torch.int64)


def _tokens(sizes: Sizes, dtype: torch.dtype) -> Call:
    return (_ids(sizes),), {"attention_mask": None}


def _one_argument(sizes: Sizes, dtype: torch.dtype) -> Call:
    return (_ids(sizes),), {}


def _masked_tokens(sizes: Sizes, dtype: torch.dtype) -> Call:
    return (_ids(sizes),), {"attention_mask": torch.empty(sizes["n"], sizes["t"], dtype=torch.int64)}


def _two_arguments(sizes: Sizes, dtype: torch.dtype) -> Call:
    return (_ids(sizes), torch.empty(sizes["n"], sizes["t"], dtype=torch.int64)), {}


def _tokens_alone(sizes: Sizes, dtype: torch.dtype) -> Call:
    return (_ids(sizes),), {"output_hidden_states": False}


def _tokens_for_all_layers(sizes: Sizes, dtype: torch.dtype) -> Call:
    return (_ids(sizes),), {"output_hidden_states": True}


def _padded_tokens(sizes: Sizes, dtype: torch.dtype) -> Call:
    mask = torch.empty(sizes["n"], sizes["t"], dtype=torch.bool)
    return (), {"input_ids": _ids(sizes), "attention_mask": mask, "output_hidden_states": True}


def _counted_tokens(sizes: Sizes, dtype: torch.dtype) -> Call:
    mask = torch.empty(sizes["n"], sizes["t"], dtype=torch.int64)
    return (), {"input_ids": _ids(sizes), "attention_mask": mask, "output_hidden_states": True}


def _padded_tokens_without_cache(sizes: Sizes, dtype: torch.dtype) -> Call:
    mask = torch.empty(sizes["n"], sizes["t"], dtype=torch.int64)
    return (), {
        "input_ids": _ids(sizes), "attention_mask": mask, "output_hidden_states": True, "use_cache": False,
    }  # fmt: skip


def _three_layers(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return three layers' outputs side by side, as FLUX.2's pipelines keep them; any three will do here."""
    output = module(*args, **kwargs)
    stacked = torch.stack([output.hidden_states[layer] for layer in (9, 18, 27)], dim=1)
    return stacked.permute(0, 2, 1, 3).reshape(stacked.shape[0], stacked.shape[2], -1)


def _last_but_one(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs).hidden_states[-2]


def _pooled_and_last_but_one(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = module(*args, **kwargs)
    return output[0], output.hidden_states[-2]


def _checked(checker: Any, image: torch.Tensor) -> torch.Tensor:
    """Return the checker's result on the device; the host does the rest."""
    return checker.visual_projection(checker.vision_model(image)[1])


MODULES = {
    "safety-checker": Module(
        "StableDiffusionSafetyChecker; n images", partial(make_component, "safety-checker"),
        lambda sizes, dtype: ((torch.empty(sizes["n"], 3, 224, 224, dtype=dtype),), {}),
        points("n", (2,), (3,), (5,)), points("n", (1,), (4,)), ["", "n"], run=_checked,
    ),
    "sd15-unet": Module(
        "UNet2DConditionModel of stable-diffusion-v1-5; n images, twice with guidance, a latent h x w, t tokens",
        partial(make_component, "sd15-unet"),
        _sd15_unet_call, UNET_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(3)), halved(3),
    ),
    "sd21-unet": Module(
        "UNet2DConditionModel of stable-diffusion-2-1; n images, twice with guidance, a latent h x w, t tokens",
        partial(make_component, "sd21-unet"),
        _sd21_unet_call, LINEAR_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(3)), halved(3),
        cases=SINGLE,
    ),
    "sdxl-unet": Module(
        "UNet2DConditionModel of stable-diffusion-xl-base-1.0; n images, twice with guidance, a latent h x w, t tokens",
        partial(make_component, "sdxl-unet"),
        _sdxl_unet_call, LINEAR_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(2)), halved(2),
        cases=SINGLE,
    ),
    "sd15-controlnet": Module(
        "ControlNetModel for stable-diffusion-v1-5; n images, twice with guidance, a latent h x w, t tokens",
        partial(make_component, "sd15-controlnet"),
        _sd15_controlnet_call, UNET_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(3)), halved(3),
    ),
    "sdxl-controlnet": Module(
        "ControlNetModel for stable-diffusion-xl-base-1.0; n images, twice with guidance, a latent h x w, t tokens",
        partial(make_component, "sdxl-controlnet"),
        _sdxl_controlnet_call, LINEAR_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(2)), halved(2),
        cases=SINGLE,
    ),
    "sd15-controlled-unet": Module(
        "UNet2DConditionModel of stable-diffusion-v1-5 with a ControlNet's residuals; n images, twice with guidance,"
        " a latent h x w, t tokens", partial(make_component, "sd15-controlled-unet"),
        _controlled(_sd15_unet_call, (320,) * 3, (320, 640, 640), (640, 1280, 1280), (1280,) * 4),
        UNET_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(3)), halved(3),
    ),
    "sdxl-controlled-unet": Module(
        "UNet2DConditionModel of stable-diffusion-xl-base-1.0 with a ControlNet's residuals; n images, twice with"
        " guidance, a latent h x w, t tokens", partial(make_component, "sdxl-controlled-unet"),
        _controlled(_sdxl_unet_call, (320,) * 3, (320, 640, 640), (640, 1280, 1280, 1280)),
        LINEAR_POINTS, UNET_CHECKS, products(["", "n"], ["", "t"], levels(2)), halved(2), cases=SINGLE,
    ),
    "sdxl-refiner-unet": Module(
        "UNet2DConditionModel of stable-diffusion-xl-refiner-1.0; n images, twice with guidance, a latent h x w,"
        " t tokens", partial(make_component, "sdxl-refiner-unet"),
        partial(_sdxl_unet_call, width=1280, ids=5), LINEAR_POINTS, UNET_CHECKS,
        products(["", "n"], ["", "t"], levels(3)), halved(3), cases=SINGLE, dtypes=HALF,
    ),
    "flux-transformer": Module(
        "FluxTransformer2DModel of FLUX.1-dev; n images, an even latent h x w, t tokens",
        partial(make_component, "flux-transformer"),
        partial(_flux_call, guidance=True), FLUX_POINTS, FLUX_CHECKS, PATCH_MONOMIALS,
        PATCHES, (*SINGLE, *EVEN),
    ),
    "flux-schnell-transformer": Module(
        "FluxTransformer2DModel of FLUX.1-schnell; n images, an even latent h x w, t tokens",
        partial(make_component, "flux-schnell-transformer"),
        partial(_flux_call, guidance=False), FLUX_POINTS, FLUX_CHECKS, PATCH_MONOMIALS,
        PATCHES, (*SINGLE, *EVEN),
    ),
    "flux-fill-transformer": Module(
        "FluxTransformer2DModel of FLUX.1-Fill-dev; n images, an even latent h x w, t tokens",
        partial(make_component, "flux-fill-transformer"),
        partial(_flux_call, guidance=True, channels=384), FLUX_POINTS, FLUX_CHECKS, PATCH_MONOMIALS,
        PATCHES, (*SINGLE, *EVEN), dtypes=HALF,
    ),
    "clip-l": Module(
        "CLIPTextModel of clip-vit-large-patch14 as SD 1.5 calls it; n prompts of t tokens",
        partial(make_component, "clip-l"), _tokens, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS,
        run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
    "openclip-h": Module(
        "CLIPTextModel of OpenCLIP ViT-H as SD 2.1 calls it; n prompts of t tokens",
        partial(make_component, "openclip-h"), _tokens, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS,
        run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
    "clip-l-sdxl": Module(
        "The same as SDXL calls it: the outputs of all layers, of which it keeps the last but one",
        partial(make_component, "clip-l"),
        _tokens_for_all_layers, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS,
        run=_last_but_one,
    ),
    "clip-l-flux": Module(
        "The same as FLUX.1 calls it, which keeps one vector a prompt",
        partial(make_component, "clip-l"), _tokens_alone, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS,
        run=lambda module, *args, **kwargs: module(*args, **kwargs).pooler_output,
    ),
    "clip-l-sd3": Module(
        "CLIPTextModelWithProjection of clip-vit-large-patch14 as SD 3 calls it; n prompts of t tokens",
        partial(make_component, "clip-l-sd3"),
        _tokens_for_all_layers, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS, run=_pooled_and_last_but_one,
    ),
    "openclip-g": Module(
        "CLIPTextModelWithProjection of OpenCLIP ViT-bigG as SDXL calls it; n prompts of t tokens",
        partial(make_component, "openclip-g"),
        _tokens_for_all_layers, TEXT_POINTS, TEXT_CHECKS, TEXT_MONOMIALS, run=_pooled_and_last_but_one,
    ),
    "t5-xxl": Module(
        "T5EncoderModel of T5 v1.1 XXL as FLUX.1 calls it; n prompts of t tokens",
        partial(make_component, "t5-xxl"),
        _tokens_alone, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS, cases=SINGLE,
        dtypes=(torch.bfloat16, torch.float32),
        run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
    "t5-xxl-sd3": Module(
        "The same as SD 3 calls it; in float16 too, in which some of its weights are float32",
        partial(make_component, "t5-xxl-sd3"), _one_argument, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS, cases=SINGLE,
        run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
    "t5-xxl-masked": Module(
        "The same with a mask of the padding, as PixArt-Sigma and Chroma call it",
        partial(make_component, "t5-xxl-masked"), _masked_tokens, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS,
        cases=SINGLE, dtypes=HALF, run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
    "qwen3-4b": Module(
        "Qwen3Model of Z-Image-Turbo's text_encoder; n prompts, padded to t tokens",
        partial(make_component, "qwen3-4b"),
        _padded_tokens, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS, cases=SINGLE, run=_last_but_one,
    ),
    **{
        name: Module(
            f"{about}; n prompts, padded to t tokens", partial(make_component, name),
            _padded_tokens_without_cache, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS, cases=SINGLE, run=_three_layers,
            dtypes=HALF,
        )
        for name, about in {
            "qwen3-4b-flux2": "Qwen3ForCausalLM of FLUX.2-klein-4B's text_encoder",
            "qwen3-8b-flux2": "Qwen3ForCausalLM of FLUX.2-klein-9B's text_encoder",
            "mistral3-flux2": "Mistral3ForConditionalGeneration of FLUX.2-dev's text_encoder",
        }.items()
    },
    **{
        name: Module(
            f"Flux2Transformer2DModel of {about}; n images, an even latent h x w, t tokens",
            partial(make_component, name), partial(_flux2_call, width=width, guidance=about == "FLUX.2-dev"),
            FLUX_POINTS, FLUX_CHECKS,
            PATCH_MONOMIALS, PATCHES, (*SINGLE, *EVEN), dtypes=HALF,
        )
        for name, about, width in (
            ("flux2-transformer", "FLUX.2-dev", 15360), ("flux2-klein-transformer", "FLUX.2-klein-4B", 7680),
            ("flux2-klein-9b-transformer", "FLUX.2-klein-9B", 12288),
        )
    },
    **{
        f"{name}-transformer": Module(
            f"SD3Transformer2DModel of {about}; n images, twice with guidance, an even latent h x w, t tokens, 77 of"
            " them of CLIP's encoders", partial(make_component, f"{name}-transformer"),
            _sd3_call, FLUX_POINTS, FLUX_CHECKS, [*PATCH_MONOMIALS, "h", "w"], PATCHES, (*SINGLE, *EVEN),
        )
        for name, about in {
            "sd3": "stable-diffusion-3-medium", "sd35-medium": "stable-diffusion-3.5-medium",
            "sd35-large": "stable-diffusion-3.5-large",
        }.items()
    },
    "pixart-sigma-transformer": Module(
        "PixArtTransformer2DModel of PixArt-Sigma-XL-2-1024-MS; n images, twice with guidance, an even latent h x w,"
        " t tokens", partial(make_component, "pixart-sigma-transformer"),
        _pixart_call, PIXART_POINTS, PIXART_CHECKS, [*PATCH_MONOMIALS, "h", "w", "h1", "w1"], PATCHES,
        (*SINGLE, *EVEN, PIXART_OWN), dtypes=HALF,
    ),
    "chroma-transformer": Module(
        "ChromaTransformer2DModel of Chroma1-HD; n images, an even latent h x w, t tokens",
        partial(make_component, "chroma-transformer"),
        _chroma_call, CHROMA_POINTS, FLUX_CHECKS, CHROMA_MONOMIALS, PATCHES, (*SINGLE, *EVEN), dtypes=HALF,
    ),
    "qwen-image-transformer": Module(
        "QwenImageTransformer2DModel of Qwen-Image; n images, an even latent h x w, t tokens; not the first call, which"
        " makes tables of positions", partial(make_component, "qwen-image-transformer"),
        _qwen_image_call, FLUX_POINTS, FLUX_CHECKS, PATCH_MONOMIALS, PATCHES, (*SINGLE, *EVEN), dtypes=HALF,
        run=_with_tables, tables=_qwen_image_tables,
    ),
    "qwen2.5-vl-7b": Module(
        "Qwen2_5_VLForConditionalGeneration of Qwen-Image's text_encoder, called without a picture; n prompts of t"
        " tokens with their template", partial(make_component, "qwen2.5-vl-7b"),
        _counted_tokens, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS, cases=SINGLE, dtypes=HALF,
    ),
    "umt5-xxl": Module(
        "UMT5EncoderModel of UMT5 XXL with a mask of the padding, as Wan 2.1 calls it; n prompts of t tokens",
        partial(make_component, "umt5-xxl"), _two_arguments, LONG_POINTS, LONG_CHECKS, TEXT_MONOMIALS, cases=SINGLE,
        dtypes=(torch.bfloat16,), run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
    ),
    **{
        f"{name}-transformer": Module(
            f"WanTransformer3DModel of {about}; n videos, f latent frames of an even h x w, t tokens",
            partial(make_component, f"{name}-transformer"), call, WAN_POINTS, WAN_CHECKS,
            [*products(["", "n"], ["", "t", "f h1 w1"]), "f", "h", "w"], PATCHES, (*SINGLE, *EVEN),
            dtypes=(torch.bfloat16,), run=lambda module, *args, **kwargs: module(*args, **kwargs)[0],
        )
        for name, about, call in (
            ("wan-1.3b", "Wan2.1-T2V-1.3B", _wan_call), ("wan-14b", "Wan2.1-T2V-14B", _wan_call),
            ("wan2.2-5b", "Wan2.2-TI2V-5B", _wan_5b_call),
        )
    },
    "zimage-transformer": Module(
        "ZImageTransformer2DModel of Z-Image-Turbo; n images, an even latent h x w, t tokens of each prompt",
        partial(make_component, "zimage-transformer"),
        _zimage_call, ZIMAGE_POINTS, ZIMAGE_CHECKS, ZIMAGE_MONOMIALS, PADDED, ZIMAGE_CASES,
        dtypes=HALF,
    ),
}  # fmt: skip
