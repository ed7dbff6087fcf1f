"""What the tensors of a weights file are called, and which architecture they make.

The core knows every tensor by one name, which is diffusers' own (``encoder.mid_block.attentions.0.to_q.weight``).
A layout is a spelling of those names, and `spell` is the only place that knows one:

=========  ===========================================================================================================
diffusers  the core's names; older files write ``query``, ``key``, ``value``, ``proj_attn`` for ``to_q`` and so on
ldm        CompVis' names, in original Stable Diffusion checkpoints under ``first_stage_model.``; with quant convs
bfl        the same names without quant convs, or with those of FLUX.2 within the halves: Black Forest Labs' files
wan        the names of Wan's authors, in ComfyUI's files of the VAEs of Qwen-Image, Wan 2.1 and Wan 2.2
hunyuan    the names of HunyuanImage's authors, which are CompVis' but for the order of a decoder's levels
taesd      the numbers of TAESD's authors, in their files of tiny autoencoders (`vaemem.engine.tiny`)
=========  ===========================================================================================================

Sources of the names: ``AutoencoderKL`` of diffusers 0.33, ``AutoencoderKLFlux2`` of its main branch in August 2026,
``ldm/modules/diffusionmodules/model.py`` of CompVis/latent-diffusion, ``flux/modules/autoencoder.py`` of
black-forest-labs/flux, for FLUX.2 diffusers' ``scripts/convert_flux2_to_diffusers.py``, ``wan/modules/vae.py`` of
Wan-Video/Wan2.1, ``vae2_2.py`` of Wan2.2, and diffusers' ``scripts/convert_hunyuan_image_to_diffusers.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import reprlib
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vaemem import _core
from vaemem._common import Message, Named, letters, meant
from vaemem.engine import tiny
from vaemem.engine.arguments import as_path

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by a tensor's name
Spelt = Mapping[str, str]
Arch = dict[str, Any]
Config = str | os.PathLike[str] | Mapping[str, Any]  # a path, or contents

LAYOUTS = ("diffusers", "ldm", "bfl", "wan", "hunyuan", tiny.AUTHORS)
PREFIXES = ("first_stage_model.", "vae.", "")
CONFIG = "config.json"
LARGEST = float(np.finfo(np.float32).max)

# ---- names ----

_QUANT = re.compile(r"(post_)?quant_conv\.")
_WITHIN_HALF = re.compile(r"(encoder|decoder)\.(?=(post_)?quant_conv\.)")
_ATTENTION = "mid_block.attentions.0."
_OLD = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}
_LDM = {"mid_block.resnets.0.": "mid.block_1.", "mid_block.resnets.1.": "mid.block_2.", ".resnets.": ".block."}
_LDM |= {_ATTENTION + "group_norm.": "mid.attn_1.norm.", _ATTENTION + "to_out.0.": "mid.attn_1.proj_out."}
_LDM |= {_ATTENTION + "to_": "mid.attn_1.", ".conv_shortcut.": ".nin_shortcut.", ".conv_norm_out.": ".norm_out."}
_LDM |= {"samplers.0.": "sample."}
# Pieces of the core's names, and the same pieces in a layout; what is in none is spelt alike.
_PIECES = {"diffusers": {}, "diffusers-old": {_ATTENTION + k: _ATTENTION + v for k, v in _OLD.items()}}
_WAN = {"mid_block.resnets.0.": "middle.0.", _ATTENTION: "middle.1.", "mid_block.resnets.1.": "middle.2."}
_WAN |= {"norm1.gamma": "residual.0.gamma", "conv1.": "residual.2.", "norm2.gamma": "residual.3.gamma"}
_WAN |= {"conv2.": "residual.6.", ".conv_shortcut.": ".shortcut."}
_WAN |= {".norm_out.": ".head.0.", ".conv_out.": ".head.2.", "coder.conv_in.": "coder.conv1."}
_WAN |= {"post_quant_conv.": "conv2.", "quant_conv.": "conv1."}
_HUNYUAN = {"mid_block.resnets.0.": "mid.block_1.", "mid_block.resnets.1.": "mid.block_2."}
_HUNYUAN |= {_ATTENTION + "proj.": "mid.attn_1.proj_out.", _ATTENTION + "to_": "mid.attn_1."}
_HUNYUAN |= {_ATTENTION: "mid.attn_1."}
_PIECES |= {"ldm": _LDM, "bfl": _LDM, "wan": _WAN, "hunyuan": _HUNYUAN}
_PIECES |= {layout: {} for layout in (tiny.AUTHORS, *tiny.HALVES)}


def spell(names: Iterable[str], layout: str, levels: int, prefix: str = "", layers: int = 2) -> dict[str, str]:
    """The core's names -> the layout's, under a prefix. Swapped, it is the way back. layers: an encoder's resnets in a
    level, which some count on through the levels, and others do not."""

    def level(found: re.Match[str]) -> str:
        """Counted from the image's side there, which is the latent's side in a decoder here."""
        side, i = found[1], int(found[2])
        return f"{side}.{levels - 1 - i if side == 'up' else i}."

    def flat(found: re.Match[str]) -> str:
        """Wan's: resnets and resamplers of a level have one list. Where the core has one list of all levels, so has
        Wan; and Wan has one of a decoder whose upsamplers are no residual's."""
        side, i = found[1], int(found[2])
        if found[3] is None:
            return f"{side}samples.{i}."
        j = int(found[4]) if found[4] else layers + (side == "up")
        if found[3] == "upsamplers.0." or (side == "up" and not residual):
            return f"upsamples.{i * (layers + 2) + j}."
        return f"{side}samples.{i}.{side}samples.{j}."

    def levelled(found: re.Match[str]) -> str:
        """HunyuanImage's: a level's resnets and its resampler, of which the core has one list."""
        side, (i, j) = found[1], divmod(int(found[2]), layers + (1 if found[1] == "down" else 2))
        return f"{side}.{i}.block.{j}." if j < layers + (side == "up") else f"{side}.{i}.{side}sample."

    spelt, names = {}, list(names)
    residual = any(".upsampler." in name or ".downsampler." in name for name in names)
    for name in names:
        theirs = tiny.spell_tiny(name, layout)
        for mine, piece in _PIECES[layout].items():
            theirs = theirs.replace(mine, piece)
        if _PIECES[layout] is _LDM:
            theirs = re.sub(r"(down|up)_blocks\.(\d+)\.", level, theirs)
        if layout == "wan":
            theirs = re.sub(
                r"(down|up)_blocks\.(\d+)\.((?:resnets\.(\d+)|(?:down|up)sampler(?:s\.0)?)\.)?", flat, theirs
            )
        if layout == "hunyuan":
            theirs = re.sub(r"(down|up)_blocks\.(\d+)\.", levelled, theirs)
        if layout == "bfl" and _QUANT.match(name):  # it is the encoder's, or the decoder's
            theirs = f"{half_of(name)}.{theirs}"
        spelt[name] = prefix + theirs
    return spelt


def _held_as(name: str, shape: Shape) -> Shape:
    """Another shape in which files hold a tensor of the core's, number for number: a 1x1 convolution for a matrix, a
    convolution over the one frame of an image (HunyuanImage's), and in GGUF, which has four sides at most, the first
    two of five as one (stable-diffusion.cpp's ``safetensors_io.cpp``)."""
    if is_attention_matrix(name, shape):
        return (*shape, 1, 1)
    if len(shape) == 4:
        return (*shape[:2], 1, *shape[2:])
    return (shape[0] * shape[1], *shape[2:]) if len(shape) == 5 else shape


def is_attention_matrix(name: str, shape: Shape) -> bool:
    """A (C, C) matrix of the core that some files hold as a 1x1 convolution (C, C, 1, 1)."""
    return ".attentions." in name and len(shape) == 2


_HALVES = dict.fromkeys(("encoder", "quant_conv", "conv1"), "encoder")
_HALVES |= dict.fromkeys(("decoder", "post_quant_conv", "conv2"), "decoder")


def half_of(name: str) -> str | None:
    """The half that a tensor belongs to, by its name in any layout without its prefix; None for neither."""
    return _HALVES.get(name.partition(".")[0])


# ---- architectures ----

# The keys of diffusers' two classes, with their defaults.
_AUTOENCODER: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (64,)}
_AUTOENCODER |= {"layers_per_block": 1, "norm_num_groups": 32}
_AUTOENCODER |= {"norm_eps": 1e-6}  # no key of the class, which has no other; accepted so that an arch is a config too
_AUTOENCODER |= {"use_quant_conv": True, "use_post_quant_conv": True, "mid_block_add_attention": True}
# What an arch says beside them where nothing tells it: which model it is, and how pipelines scale its latents.
_UNKNOWN: Arch = {"name": "custom", "scaling_factor": None, "shift_factor": 0.0}
_KL = {"scaling_factor": 0.18215, "shift_factor": None, "latents_mean": None, "latents_std": None}
_FLUX2 = {"latent_channels": 32, "block_out_channels": (128, 256, 512, 512), "decoder_block_out_channels": None}
_FLUX2 |= {"layers_per_block": 2, "batch_norm_eps": 1e-4, "patch_size": (2, 2)}
_CLASSES: dict[str, Arch] = {"AutoencoderKL": _AUTOENCODER | _KL, "AutoencoderKLFlux2": _AUTOENCODER | _FLUX2}
# The keys of two more, which say the same in other words. What a number stands for, and what is not built where a value
# is another.
_QWEN: Arch = {"base_dim": 96, "z_dim": 16, "dim_mult": (1, 2, 4, 4), "num_res_blocks": 2}
_QWEN |= {key: tuple(_core.models()["qwen-image"][key]) for key in ("latents_mean", "latents_std")}
_QWEN |= {"attn_scales": [], "dropout": 0.0, "temperal_downsample": None}
_WAN_KEYS = _QWEN | {"decoder_base_dim": None, "in_channels": 3, "out_channels": 3, "is_residual": False}
_WAN_KEYS |= {"patch_size": None, "scale_factor_temporal": None, "scale_factor_spatial": None}
_QWEN_21: Arch = _WAN_KEYS | {"decoder_base_dim": 144, "z_dim": 64, "dim_mult": (1, 2, 4, 8, 8), "is_residual": True}
_QWEN_21 |= {"in_channels": 4, "out_channels": 4, "temperal_downsample": (False, True, True, True)}
_QWEN_21 |= {key: tuple(_core.models()["qwen-image-2.1"][key]) for key in ("latents_mean", "latents_std")}
_OF_FRAMES: dict[str, Arch] = {
    "AutoencoderKLQwenImage": _QWEN | {"input_channels": 3},
    "AutoencoderKLWan": _WAN_KEYS | {"temperal_downsample": (False, True, True)},
    "AutoencoderKLQwenImage21": _QWEN_21,
}
# And of one that has pixel shuffles; what is not built where a value is another.
_HUNYUAN_KEYS: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 64, "layers_per_block": 2}
_HUNYUAN_KEYS |= {"block_out_channels": (128, 256, 512, 512, 1024, 1024), "spatial_compression_ratio": 32}
_HUNYUAN_KEYS |= {"scaling_factor": None, "downsample_match_channel": True, "upsample_match_channel": True}
_SHUFFLED: dict[str, Arch] = {"AutoencoderKLHunyuanImage": _HUNYUAN_KEYS}
# And of a third, whose first keys stand for numbers too. The last is TAEF2's, which diffusers has not.
_TINY: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "scaling_factor": 1.0, "shift_factor": 0.0}
_TINY |= {f"{half}_block_out_channels": (64,) * 4 for half in ("encoder", "decoder")}
_TINY |= {"num_encoder_blocks": (1, 3, 3, 3), "num_decoder_blocks": (3, 3, 3, 1), "use_midblock_gn": False}
_TINY_BUILT: Arch = {"act_fn": "relu", "upsample_fn": "nearest", "upsampling_scaling_factor": 2}
_TINY_IGNORED = ("latent_magnitude", "latent_shift", "block_out_channels")
_NO_KL = {"use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False, "norm_eps": 1e-5}
# Why not, of other classes that people try.
_REFUSED = {"AutoencoderDC": "Sana's has linear attention over many channels, which is another kind of network"}
CLASSES = (*_CLASSES, *_OF_FRAMES, *_SHUFFLED, "AutoencoderTiny")  # of diffusers, that run here
_NOT_BUILT = ("attn_scales", "dropout", "downsample_match_channel", "upsample_match_channel")
_FRAMES = ("slices", "temperal_downsample", "image_patch")  # of an arch of frames, where it is residual
_KEYS = [*dict.fromkeys(key for keys in _CLASSES.values() for key in keys), "family", *_FRAMES]
_STATISTICS = ("latents_mean", "latents_std")
_LISTS = ["block_out_channels", "decoder_block_out_channels", "patch_size", "dim_mult", *_STATISTICS]
_LISTS += [key for key, value in _TINY.items() if isinstance(value, tuple)]
_ALWAYS = (*_AUTOENCODER, "scaling_factor", "shift_factor")  # keys of every arch; it has others where they are not None
_SCALING = ("name", "norm_eps", "scaling_factor", "shift_factor", *_STATISTICS)  # what tensors cannot tell
_BLOCK_TYPES = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
# Says nothing about the arithmetic: tile size (`sample_size_of`) and precision are chosen by whoever runs the model;
# momentum is for training.
_IGNORED = ("name", "sample_size", "force_upcast", "batch_norm_momentum")
# What people call the models beside: short names, and repositories on the Hub whose VAE has that config.
_CALLED = {
    "sd15": "sd1 sd14 runwayml/stable-diffusion-v1-5 stable-diffusion-v1-5/stable-diffusion-v1-5"
    " CompVis/stable-diffusion-v1-4 stabilityai/sd-vae-ft-mse stabilityai/sd-vae-ft-ema",
    "sdxl": "stabilityai/sdxl-vae madebyollin/sdxl-vae-fp16-fix stabilityai/sdxl-turbo"
    " stabilityai/stable-diffusion-xl-base-1.0"
    " stabilityai/stable-diffusion-xl-refiner-1.0",
    "flux": "flux1 flux-dev flux-schnell black-forest-labs/FLUX.1-dev black-forest-labs/FLUX.1-schnell"
    " black-forest-labs/FLUX.1-Fill-dev black-forest-labs/FLUX.1-Kontext-dev black-forest-labs/FLUX.1-Krea-dev",
    "sd3": "sd35 stabilityai/stable-diffusion-3-medium stabilityai/stable-diffusion-3-medium-diffusers"
    " stabilityai/stable-diffusion-3.5-medium stabilityai/stable-diffusion-3.5-large"
    " stabilityai/stable-diffusion-3.5-large-turbo",
    "zimage": "zimage-turbo Tongyi-MAI/Z-Image-Turbo",
    "cogview4": "THUDM/CogView4-6B zai-org/CogView4-6B",
    "playground-v2.5": "playground playgroundai/playground-v2.5-1024px-aesthetic",
    "flux2": "flux2-dev black-forest-labs/FLUX.2-dev",
    "wan2.2": "wan22 Wan-AI/Wan2.2-TI2V-5B Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "qwen-image-2.1": "qwen21 Qwen/Qwen-Image-2.1",
    "hunyuanimage-2.1": "hunyuanimage hunyuan-image tencent/HunyuanImage-2.1"
    " hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
    "qwen-image": "qwen Qwen/Qwen-Image Qwen/Qwen-Image-Edit Qwen/Qwen-Image-2512 wan wan2.1 Wan-AI/Wan2.1-T2V-1.3B"
    " Wan-AI/Wan2.1-T2V-14B Wan-AI/Wan2.1-T2V-1.3B-Diffusers Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "taesd": "taesdxl taexl madebyollin/taesd madebyollin/taesdxl",
    "taef1": "taesd3 madebyollin/taef1 madebyollin/taesd3",
    "taef2": "madebyollin/taef2",
}
SPELT_MODELS = {
    letters(said): model
    for model, names in _CALLED.items()
    for name in names.split()
    for said in (name, name.rpartition("/")[2])
}
SAMPLE_SIZES = dict.fromkeys(_core.models(), 1024) | {"sd15": 512, "hunyuanimage-2.1": 384}
SAMPLE_SIZES |= dict.fromkeys(("qwen-image", "wan2.2", "qwen-image-2.1"), 256)
SAMPLE_SIZES |= {name: 512 for name, arch in _core.models().items() if arch.get("family") == "tiny"}
# What their configs say otherwise, of those that are called so.
_OTHER_SAMPLE_SIZES = {"sdvaeftmse": 256, "sdvaeftema": 256}
_CLASS_SAMPLE_SIZES = {"AutoencoderKL": 32, "AutoencoderKLFlux2": 1024, "AutoencoderTiny": 512}
_CLASS_SAMPLE_SIZES |= dict.fromkeys(_OF_FRAMES, 256) | {"AutoencoderKLHunyuanImage": 384}
# Where several models have the same tensors, the first of them in the core's order is found: FLUX.1, whose tensors SD3
# and Z-Image have too. But tensors of SD1.5, which are SDXL's and Playground's too, say nothing of the scaling.
_AMBIGUOUS = {"sd15": {"name": "sd", "scaling_factor": None}}


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def shown(value: object) -> str:
    """What a file says, for a message: short, on one line, and nothing that a terminal would obey."""
    plain = isinstance(value, str) and value.isprintable() and len(value) <= 200
    return str(value) if plain else _REPR.repr(value)


def _bad_config(key: str, want: str, got: object) -> ValueError:
    return ValueError(f"config: {shown(key)}: want {want}, got {_REPR.repr(got)}")


_KINDS: dict[type, tuple[str, Any, float, float]] = {  # of values: types, the least and the most
    bool: ("true or false", (bool, np.bool_), 0, 1),
    int: ("a positive integer below 2^31", (int, np.integer), 1, (1 << 31) - 1),
    float: ("a finite number of single precision", (int, float, np.floating), -LARGEST, LARGEST),
}


def _setting(key: str, value: Any, default: Any) -> Any:
    """value, checked to be of the kind that its default is."""
    if value is None and (default is None or key == "scaling_factor"):
        return 0.0 if key == "shift_factor" else None
    if key in _LISTS:
        default, what = (0.0, "finite numbers") if key in _STATISTICS else (0, "positive integers")
        if not isinstance(value, (list, tuple)) or not value:
            raise _bad_config(key, f"a list of {what}", value)
        return tuple(_setting(f"{key}[{i}]", v, default) for i, v in enumerate(value))
    kind = float if default is None else type(default)
    want, types, least, most = _KINDS[kind]
    if not (isinstance(value, types) and least <= value <= most) or (isinstance(value, bool) and kind is not bool):
        raise _bad_config(key, want, value)
    if key == "scaling_factor" and value <= 0:
        raise _bad_config(key, "more than 0", value)
    return kind(value)


def _decimal(value: Any) -> Any:
    """The shortest decimal of the core's single precision; None where there is no number."""
    if isinstance(value, tuple):
        return [_decimal(v) for v in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _known(arch: Arch, but: tuple[str, ...]) -> Arch | None:
    """The first model of the core's that an arch agrees with in all but some keys."""

    def said(one: Arch) -> list[Any]:
        return [_decimal(one.get(key)) for key in _KEYS if key not in but]

    return next((model for model in _core.models().values() if said(model) == said(arch)), None)


def _contents(config: Config) -> tuple[Mapping[str, Any], Path | None]:
    """What a config says, and the file that it came from."""
    if isinstance(config, Mapping):
        return config, None
    path = as_path(config, "config", "a path or a dict")
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"config: want a {CONFIG}, got {path}, which is no file")
    try:
        contents = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: want a JSON file, got {path}: {error}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"config: want a JSON object, got {type(contents).__name__} in {path}")
    return contents, path


def known_arch(model: str) -> Arch:
    """The architecture of a model that the core has by name; ValueError for any other."""
    return _core.models()[named_model("model", model)]


def named_model(argument: str, model: Any, *others: str) -> str:
    """The name that the core has for a model, as people write it: ``"SD 1.5"``, ``"FLUX.1-dev"``, or the repository on
    the Hub, ``"stabilityai/sdxl-vae"``; ValueError where it has none. others: what else is wanted, in words."""
    return meant(argument, model, (*SAMPLE_SIZES, *others), SPELT_MODELS)


def named_sample_size(model: str) -> int:
    """The side in pixels of diffusers' tiles of a model that is named as people write it."""
    return _OTHER_SAMPLE_SIZES.get(letters(model.rpartition("/")[2])) or SAMPLE_SIZES[named_model("model", model)]


def read_config(config: Config) -> Arch:
    """The architecture, as ``_core.Model`` takes it, that a diffusers ``config.json`` (a directory that holds one, its
    contents, an `Arch`) describes. Its name is that of the model that it equals in every field, else ``"custom"``.

    Keys that are absent have the defaults of diffusers' class, ``AutoencoderKL`` or ``AutoencoderKLFlux2``;
    ``scaling_factor`` may be None (unknown). ValueError for a key that is unknown, of the wrong type, or asks for what
    the engine cannot do (another class, activation, block type).
    """
    contents, path = _contents(config)
    try:
        return _parse_config(contents)
    except ValueError as error:
        raise ValueError(f"{error} (in {path})" if path else str(error)) from None


def sample_size_of(config: Config | None, model: str) -> int | None:
    """The side in pixels of diffusers' tiles: what the config says, its class's where that says nothing. Without
    a config, or with an `Arch` for one, the model's own. None: unknown, or no size."""
    if config is None:
        return SAMPLE_SIZES.get(model)
    contents = _contents(config)[0]
    usual = _CLASS_SAMPLE_SIZES.get(_class_of(contents), 32)
    size = contents.get("sample_size", SAMPLE_SIZES.get(contents.get("name", ""), usual))
    size = size[0] if isinstance(size, (list, tuple)) and size else size
    return size if type(size) is int and size > 0 else None


def _class_of(config: Mapping[str, Any]) -> Any:
    """The class that a config names, or whose keys it has: a module's says no class, and an `Arch` neither."""
    family, name = config.get("family"), config.get("name")
    if family == "wan" or "base_dim" in config or "input_channels" in config:
        is_qwen = name == "qwen-image" or "input_channels" in config
        named = "AutoencoderKLQwenImage" if is_qwen else "AutoencoderKLWan"
        named = "AutoencoderKLQwenImage21" if config.get("slices") is False else named
    elif family == "hunyuan_image" or "spatial_compression_ratio" in config:
        named = "AutoencoderKLHunyuanImage"
    elif family == "tiny" or "num_encoder_blocks" in config:
        named = "AutoencoderTiny"
    else:
        named = "AutoencoderKLFlux2" if config.get("patch_size") else "AutoencoderKL"
    return config.get("_class_name", named)


def _check_keys(config: Mapping[str, Any], name: str, defaults: Arch) -> None:
    for key, value in config.items():
        if key not in defaults and key not in _IGNORED and str(key)[:1] != "_":
            raise _bad_config(str(key), f"a key of {name}", value)
        if key in _NOT_BUILT and value != defaults[key] and not (key == "attn_scales" and value == ()):
            raise _bad_config(key, f"{defaults[key]}, the only one that runs here", value)


def _of_frames(config: Mapping[str, Any], name: str) -> Arch:
    """The architecture of a class that is made for several frames."""
    defaults = _OF_FRAMES[name]
    _check_keys(config, name, defaults)
    # the scale factors follow; temperal_downsample is of time, which one frame has not, and shows in residuals alone
    said = {key: config.get(key, default) for key, default in defaults.items()}
    said |= {
        key: _setting(key, said[key], defaults[key]) for key in ("base_dim", "z_dim", "dim_mult", "num_res_blocks")
    }
    said |= {key: _setting(key, said[key], None) for key in _STATISTICS}
    base, mult = said["base_dim"], said["dim_mult"]
    if mult[0] != 1:
        raise _bad_config("dim_mult", "a list that begins with 1", mult)
    if said[_STATISTICS[0]] is None or {len(said[key] or ()) for key in _STATISTICS} != {said["z_dim"]}:
        raise _bad_config("latents_mean, latents_std", f"{said['z_dim']} numbers each", said[_STATISTICS[0]])
    arch = _AUTOENCODER | _UNKNOWN
    channels = {
        key: _setting(key, said.get(key, said.get("input_channels")), 3) for key in ("in_channels", "out_channels")
    }
    arch |= {"family": "wan", "latent_channels": said["z_dim"], "block_out_channels": tuple(base * m for m in mult)}
    patch = said.get("patch_size")
    if patch not in (None, 1, 2):
        raise _bad_config("patch_size", "1 or 2", patch)
    for key, count in channels.items():
        if patch == 2 and count % 4:
            raise _bad_config(key, "four channels for each of an image, as a patch_size of 2 makes them", count)
        channels[key] = count // (4 if patch == 2 else 1)
    arch |= {"image_patch": 2} if patch == 2 else {}
    arch |= {"slices": False} if name == "AutoencoderKLQwenImage21" else {}
    if _setting("is_residual", said.get("is_residual", False), False):
        times = said["temperal_downsample"]
        if not isinstance(times, (list, tuple)) or len(times) != len(mult) - 1 or {*map(type, times)} - {bool}:
            raise _bad_config("temperal_downsample", f"{len(mult) - 1} of true or false", times)
        arch["temperal_downsample"] = tuple(times)
    arch |= channels | {"layers_per_block": said["num_res_blocks"], "norm_num_groups": 0, "norm_eps": 1e-12}
    arch |= {"scaling_factor": 1.0} | {key: said[key] for key in _STATISTICS}
    if said.get("decoder_base_dim") not in (None, base):
        other = _setting("decoder_base_dim", said["decoder_base_dim"], base)
        arch["decoder_block_out_channels"] = tuple(other * m for m in mult)
    return _known(arch, but=("name",)) or arch


def _of_frames_config(arch: Mapping[str, Any]) -> Arch:
    """What `_of_frames` reads."""
    widths = _setting("block_out_channels", arch.get("block_out_channels"), (96,))
    decoder = _setting("decoder_block_out_channels", arch.get("decoder_block_out_channels") or widths, (96,))
    base, ends = widths[0], {key: int(arch.get(key) or 3) for key in ("in_channels", "out_channels")}
    if any(width % base for width in widths) or [w * base for w in decoder] != [w * decoder[0] for w in widths]:
        raise _bad_config("block_out_channels", "multiples of the first, a decoder's alike", (widths, decoder))
    config = {"base_dim": base, "z_dim": arch.get("latent_channels"), "dim_mult": [width // base for width in widths]}
    config |= {"num_res_blocks": arch.get("layers_per_block"), "attn_scales": [], "dropout": 0.0}
    times, patch = arch.get("temperal_downsample"), arch.get("image_patch")
    config |= {"temperal_downsample": list(times or [i > 0 for i in range(len(widths) - 1)])}
    config |= {key: _decimal(arch.get(key)) for key in _STATISTICS}
    more = {key: count * (4 if patch else 1) for key, count in ends.items()} | {"patch_size": patch}
    more |= {"decoder_base_dim": None if decoder[0] == base else decoder[0], "is_residual": times is not None}
    name = _class_of({key: value for key, value in arch.items() if key != "_class_name"})
    if name == "AutoencoderKLQwenImage21":
        more["decoder_base_dim"] = decoder[0]
    elif name != "AutoencoderKLWan" and len(set(ends.values())) == 1 and decoder[0] == base:
        name, more = "AutoencoderKLQwenImage", {"input_channels": ends["in_channels"]}
    else:
        name = "AutoencoderKLWan"
    # what is the class's default is left out, for older ones of diffusers have no such keys
    return {"_class_name": name} | config | {k: v for k, v in more.items() if v != _OF_FRAMES[name][k]}


def _shuffled(config: Mapping[str, Any], name: str) -> Arch:
    """The architecture of HunyuanImage's class."""
    defaults = _SHUFFLED[name]
    _check_keys(config, name, defaults)
    said = {key: _setting(key, config.get(key, default), default) for key, default in defaults.items()}
    ratio, levels = said["spatial_compression_ratio"], len(said["block_out_channels"])
    if ratio != 2 ** (levels - 1):
        raise _bad_config("spatial_compression_ratio", f"{2 ** (levels - 1)}, for {levels} levels", ratio)
    arch = _AUTOENCODER | _UNKNOWN | {"family": "hunyuan_image", "use_quant_conv": False, "use_post_quant_conv": False}
    arch |= {key: said[key] for key in defaults if key in arch}
    return _known(arch, but=("name",)) or arch


def _shuffled_config(arch: Mapping[str, Any]) -> Arch:
    """What `_shuffled` reads."""
    config = {key: _decimal(arch[key]) for key in _HUNYUAN_KEYS if key in arch}
    ratio = 2 ** (len(arch["block_out_channels"]) - 1)
    return {"_class_name": "AutoencoderKLHunyuanImage"} | config | {"spatial_compression_ratio": ratio}


def _tiny(config: Mapping[str, Any]) -> Arch:
    """The architecture of an AutoencoderTiny."""
    for key, value in config.items():
        if key not in _TINY | _TINY_BUILT and key not in _IGNORED + _TINY_IGNORED and str(key)[:1] != "_":
            raise _bad_config(str(key), "a key of AutoencoderTiny", value)
        if key in _TINY_BUILT and value != _TINY_BUILT[key]:
            raise _bad_config(key, f"{_TINY_BUILT[key]}, the only one that runs here", value)
    said = {key: _setting(key, config.get(key, default), default) for key, default in _TINY.items()}
    blocks = said["num_encoder_blocks"]
    for key, order in (("num_encoder_blocks", 1), ("num_decoder_blocks", -1)):
        if said[key] != (1, *blocks[-1:] * (len(blocks) - 1))[::order]:
            wanted = "as many blocks in each level, but for one where an image has its own size, alike in both halves"
            raise _bad_config(key, wanted, said[key])
    widths = {half: said[f"{half}_block_out_channels"] for half in ("encoder", "decoder")}
    for half, width in widths.items():
        if width != width[:1] * len(blocks):
            wanted = f"{len(blocks)} numbers, one for each of num_{half}_blocks, all alike"
            raise _bad_config(f"{half}_block_out_channels", wanted, width)
    arch = {key: said[key] for key in ("in_channels", "out_channels", "latent_channels")}
    arch |= {
        "family": "tiny",
        "name": "custom",
        "block_out_channels": widths["encoder"],
        "layers_per_block": blocks[-1],
    }
    arch |= _NO_KL | {"norm_num_groups": 4 if said["use_midblock_gn"] else 0}
    arch |= {key: said[key] for key in ("scaling_factor", "shift_factor")}
    if widths["decoder"] != widths["encoder"]:
        arch["decoder_block_out_channels"] = widths["decoder"]
    return _known(arch, but=("name",)) or arch


def _tiny_config(arch: Mapping[str, Any]) -> Arch:
    """What `_tiny` reads, which checks it."""
    if arch.get("norm_num_groups") not in (0, 4):
        raise _bad_config("norm_num_groups", "4, or 0 for no norms", arch.get("norm_num_groups"))
    widths = _setting("block_out_channels", arch.get("block_out_channels"), (64,))
    blocks = [1] + [arch.get("layers_per_block")] * (len(widths) - 1)
    config: Arch = {"_class_name": "AutoencoderTiny", "encoder_block_out_channels": list(widths)}
    config["decoder_block_out_channels"] = list(arch.get("decoder_block_out_channels") or widths)
    config |= {"num_encoder_blocks": blocks, "num_decoder_blocks": blocks[::-1]} | _TINY_BUILT
    config |= {key: _decimal(arch.get(key)) for key in _TINY if key not in config and key != "use_midblock_gn"}
    return config | ({"use_midblock_gn": True} if arch["norm_num_groups"] else {})


def _parse_config(config: Mapping[str, Any]) -> Arch:
    name = _class_of(config)
    if not isinstance(name, str) or name not in CLASSES:
        *others, last = CLASSES
        why = f": {_REFUSED[name]}" if isinstance(name, str) and name in _REFUSED else ""
        wanted = f"{', '.join(others)} or {last}"
        raise ValueError(f"{_bad_config('_class_name', wanted, name)}{why}")
    if name == "AutoencoderTiny":
        return _tiny(_tiny_config(config) if "family" in config else config)
    if name in _SHUFFLED:
        return _shuffled(_shuffled_config(config) if "family" in config else config, name)
    if name in _OF_FRAMES:
        config = _of_frames_config(config) if "family" in config else config
        return _of_frames(config, config["_class_name"] if "_class_name" in config else name)
    defaults = _CLASSES[name]
    for key, value in config.items():
        known = key in defaults or key in _BLOCK_TYPES or key in _IGNORED or key == "act_fn" or str(key)[:1] == "_"
        if not known and not (key in _KEYS and value in (None, 0)):  # an `Arch` has all keys of AutoencoderKL
            raise _bad_config(str(key), f"a key of {name}", value)
    if config.get("act_fn", "silu") != "silu":
        raise _bad_config("act_fn", "silu", config["act_fn"])
    arch = _UNKNOWN | {key: _setting(key, config.get(key, default), default) for key, default in defaults.items()}
    levels, one_each = len(arch["block_out_channels"]), "one for each of"
    counts = {"decoder_block_out_channels": (levels, f"{one_each} block_out_channels"), "patch_size": (2, "two")}
    counts |= dict.fromkeys(_STATISTICS, (arch["latent_channels"], f"{one_each} the latent channels"))
    for key, (count, what) in counts.items():
        if arch.get(key) is not None and len(arch[key]) != count:
            raise _bad_config(key, f"{count} numbers, {what}", arch[key])
    mean, std = (arch.get(key) for key in _STATISTICS)
    if (mean is None) != (std is None):
        raise _bad_config("latents_std", "it where latents_mean is, and nowhere else", std)
    if std and min(std) <= 0:
        raise _bad_config("latents_std", "numbers of more than 0", std)
    for key, block in _BLOCK_TYPES.items():
        blocks = config.get(key, [block] * levels)
        if not isinstance(blocks, (list, tuple)) or list(blocks) != [block] * levels:
            raise _bad_config(key, f"{levels} of {block}, one for each of block_out_channels", blocks)
    if np.float32(arch["norm_eps"]) != np.float32(1e-6):
        raise _bad_config("norm_eps", f"1e-6, the only one of {name}", arch["norm_eps"])
    if arch.get("decoder_block_out_channels") == arch["block_out_channels"]:
        del arch["decoder_block_out_channels"]
    arch = {key: value for key, value in arch.items() if value is not None or key in _ALWAYS}
    return _known(arch, but=("name",)) or arch


def config_of(arch: Arch, sample_size: int | None = None) -> Arch:
    """What diffusers' from_pretrained reads. An unknown scaling factor is written as null, an unknown sample_size not
    at all."""
    if arch.get("family") in ("wan", "tiny"):
        return (_of_frames_config if arch["family"] == "wan" else _tiny_config)(arch)
    if arch.get("family") == "hunyuan_image":
        usual = SAMPLE_SIZES.get(arch["name"], SAMPLE_SIZES["hunyuanimage-2.1"])  # the class has no default
        return _shuffled_config(arch) | {"sample_size": sample_size or usual}
    levels, name = len(arch["block_out_channels"]), _class_of(arch)
    config: Arch = {"_class_name": name, "act_fn": "silu", "force_upcast": True}
    config.update({key: [block] * levels for key, block in _BLOCK_TYPES.items()})
    config.update({key: _decimal(arch.get(key)) for key in _CLASSES[name] if key != "norm_eps"})
    if "shift_factor" in config:
        config["shift_factor"] = config["shift_factor"] or None
    size = sample_size or SAMPLE_SIZES.get(arch["name"])
    return config | ({"sample_size": size} if size else {})


# ---- checking ----


def ours(names: Iterable[str], prefix: str, parts: str) -> set[str]:
    """The names under prefix, without it, that are neither the other half's nor there for training alone."""
    stripped = {name[len(prefix) :] for name in names if name.startswith(prefix)}
    other = {"encoder": "decoder", "decoder": "encoder"}.get(parts, "no half")
    unused = ("loss.", "model_ema.", "bn.num_batches_tracked")  # for training
    # and convolutions over time, which one frame never meets
    return {n for n in stripped if half_of(n) != other and not n.startswith(unused) and ".time_conv." not in n}


def check_shapes(
    shapes: Shapes, wanted: Shapes, spelt: Spelt, wanted_by: str, faults: Spelt | None = None, extra: Iterable[str] = ()
) -> None:
    """ValueError unless every wanted tensor, by the core's name, which `spelt` leads to the file's, is there with its
    shape and without a fault of its dtype, and nothing extra is."""
    problems = []
    for name, shape in wanted.items():
        in_file = spelt[name]
        got = shapes.get(in_file)
        if got is None:
            problems.append(f"missing {in_file}: want {shape}, got no such tensor")
        elif got not in (shape, _held_as(name, shape)):
            problems.append(f"{in_file}: want {shape}, got {shown(got)}")
        elif faults and in_file in faults:
            problems.append(f"{in_file}: {faults[in_file]}")
    problems += [f"extra {shown(n)}: want no such tensor, got {shown(shapes[n])}" for n in sorted(extra)]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{len(problems)} tensor(s) not as {wanted_by} wants them: {'; '.join(problems[:5])}{more}")


# ---- detection ----

# What else a pipeline's files hold, by names that no VAE has: diffusers', the first authors', llama.cpp's.
_DIFFUSION = r"model\.diffusion_model|(input|output|down|up|double|single|joint|transformer)_blocks|\w+_refiner"
_TEXT = r"text_model|text_encoders|cond_stage_model|conditioner|token_embd|(enc\.)?blk|model\.layers|encoder\.block"
_OTHERS = {"a diffusion model": re.compile(rf"({_DIFFUSION})\."), "a text encoder": re.compile(rf"({_TEXT})\.")}


def find_layout(names: Iterable[str]) -> tuple[str, str]:
    """(layout, prefix) of a file's names; the layout ``"diffusers-old"`` apart from ``"diffusers"``."""
    names = list(names)
    if found := tiny.tiny_layout(names, PREFIXES):
        return found
    for prefix in PREFIXES:
        inside = [n[len(prefix) :] for n in names if n.startswith((prefix + "encoder.", prefix + "decoder."))]
        # every model has a middle block, and each family spells it in its own way; the majority decides, so that
        # one stray tensor is reported as such
        pieces = (".mid_block.", ".mid.", ".attentions.0.query.", ".attentions.0.to_q.", ".middle.")
        new, ldm, query, to_q, wan = (sum(piece in name for name in inside) for piece in pieces)
        if wan > max(new, ldm):
            return "wan", prefix
        if ldm > new:
            if "decoder.up.0.upsample.conv.weight" in inside or "encoder.down.4.downsample.conv.weight" in inside:
                return "hunyuan", prefix  # CompVis' decoders have no upsampler at 0, and no five levels
            quant = any(n.startswith((prefix + "quant_conv.", prefix + "post_quant_conv.")) for n in names)
            return "ldm" if quant else "bfl", prefix
        if new:
            return "diffusers-old" if query > to_q else "diffusers", prefix
    got = ", ".join(map(_REPR.repr, names[:3])) or "none"
    others = [what for what, spelling in _OTHERS.items() if any(map(spelling.match, names))]
    hint = f": these are {others[0]}'s tensors, and the VAE is another file" if others else ""
    raise ValueError(f"unknown layout: want a VAE's tensors as {', '.join(LAYOUTS)} name them, got {got}{hint}")


_BLOCK = re.compile(r"(encoder\.down|decoder\.up)(?:_blocks)?\.(\d{1,3})\.(?:resnets|block)\.(\d{1,3})\.")


def _length(numbers: Iterable[int]) -> int:
    """How far numbers go on from 0 without a gap: 3 where they are 0, 1, 2 and 7."""
    have = set(numbers)
    return next(i for i in itertools.count() if i not in have)


def _blocks_of(shapes: Shapes, half: str, layout: str) -> tuple[list[int], int]:
    """block_out_channels of a half, and layers_per_block."""
    blocks: dict[int, dict[int, list[int]]] = {}  # level -> layer -> first dimensions
    for name, shape in shapes.items():
        found = _BLOCK.match(name)
        if found and name.startswith(half) and shape:
            blocks.setdefault(int(found[2]), {}).setdefault(int(found[3]), []).append(shape[0])
    levels = _length(blocks)
    if not levels:
        raise ValueError(f"want the resnets of the {half}'s first block, found none")
    widths = [statistics.mode(itertools.chain(*blocks[i].values())) for i in range(levels)]
    layers = statistics.mode(_length(blocks[i]) for i in range(levels))
    if half == "encoder":
        return widths, layers
    return widths if layout in ("ldm", "bfl") else widths[::-1], layers - 1


def _find_of_frames(shapes: Shapes) -> Arch:
    """Qwen-Image's VAE, which is Wan 2.1's, Wan 2.2's or Qwen-Image-2.1's, with as many channels of an image as tensors
    show: all else that differs is found out by the check that follows. One of other widths needs its config."""
    ends = [(f"encoder.{name}.weight", 1) for name in ("conv_in", "conv1")]
    ends += [(f"decoder.{name}.weight", 0) for name in ("conv_out", "head.2")]
    pieces = (".downsampler.", ".upsampler.", "downsamples.0.downsamples.", "upsamples.0.upsamples.")
    if any(len(shapes.get(name, ())) == 4 for name, _ in ends):
        known, patch = known_arch("qwen-image-2.1"), 1
    elif any(piece in name for name in shapes for piece in pieces):
        known, patch = known_arch("wan2.2"), 4
    else:
        known, patch = known_arch("qwen-image"), 1
    usual = known["in_channels"]
    seen = (shapes[name][axis] // patch for name, axis in ends if len(shapes.get(name, ())) > axis)
    channels = next(seen, usual) or usual
    return known if channels == usual else known | {"name": "custom", "in_channels": channels, "out_channels": channels}


def _find_arch(in_file: Shapes, layout: str, prefix: str, parts: str) -> Arch:
    """The architecture of a file's tensors. Each number is what most of the tensors that show it say, so that a
    single missing, extra or misshapen one is found out by the check that follows, and named."""
    shapes = {_WITHIN_HALF.sub("", name): in_file[prefix + name] for name in ours(in_file, prefix, "all")}
    if any(name.endswith(".gamma") for name in shapes):
        return _find_of_frames(shapes)
    if layout == "hunyuan" or any(re.match(r"(en|de)coder\.(down|up)_blocks\.\d+\.conv", name) for name in shapes):
        return known_arch("hunyuanimage-2.1")  # one of other widths needs its config
    if layout.startswith(tiny.AUTHORS) or any(".layers." in name for name in shapes):
        latent_channels, normed = tiny.shown_by_shapes(shapes, layout)
        seen = known_arch("taef2" if normed else "taesd") | {"name": "custom", "latent_channels": latent_channels}
        return _known(seen, but=("name",)) or seen
    halves = {half_of(name) for name in shapes}
    half = parts if parts in halves else "decoder" if "decoder" in halves else "encoder"
    widths, layers = _blocks_of(shapes, half, layout)
    flux2 = any(name.startswith("bn.") for name in shapes)
    sides = {half: widths}
    if flux2 and parts == "all" and {"encoder", "decoder"} <= halves:  # only then may the halves differ
        sides = {each: _blocks_of(shapes, each, layout)[0] for each in ("encoder", "decoder")}

    def votes(*where: tuple[str, int, int]) -> list[int]:
        """What tensors say of one number: each is found in a tensor's shape on an axis, times a factor."""
        return [shapes[n][axis] // per for n, axis, per in where if len(shapes.get(n, ())) > axis]

    images = votes(("encoder.conv_in.weight", 1, 1)), votes(("decoder.conv_out.weight", 0, 1))
    ends = [("encoder.conv_out", 2), ("post_quant_conv", 1), ("quant_conv", 2)]
    either = [(f"{name}.{kind}", 0, per) for name, per in ends for kind in ("weight", "bias")]
    latents = votes(("decoder.conv_in.weight", 1, 1), *either)
    # a half that is not there is taken to be as the other; what no tensor shows has its default, and is then missing
    quant = {half_of(name) for name in shapes if _QUANT.match(name)}
    arch = _AUTOENCODER | _UNKNOWN
    arch |= {
        "in_channels": (images[0] or images[1] or [3])[0],
        "out_channels": (images[1] or images[0] or [3])[0],
        "latent_channels": statistics.mode(latents or [4]),
        "block_out_channels": tuple(sides.get("encoder", widths)),
        "layers_per_block": layers,
        "use_quant_conv": ("encoder" if "encoder" in halves else "decoder") in quant,
        "use_post_quant_conv": ("decoder" if "decoder" in halves else "encoder") in quant,
        "mid_block_add_attention": any(".attentions." in n or ".attn_1." in n for n in shapes if n.startswith(half)),
    }
    if flux2:
        arch |= {key: _CLASSES["AutoencoderKLFlux2"][key] for key in ("patch_size", "batch_norm_eps")}
    if sides.get("decoder", widths) != sides.get("encoder", widths):
        arch["decoder_block_out_channels"] = tuple(sides["decoder"])
    # before anything is allocated: the widest tensors must be there, so that a file bounds what its model takes
    for each, channels in sides.items():
        block, order = ("down", channels) if each == "encoder" else ("up", channels[::-1])
        wanted = {f"{each}.{block}_blocks.{i}.resnets.0.conv2.weight": (c, c, 3, 3) for i, c in enumerate(order)}
        spelt = spell(wanted, layout, len(channels), prefix)
        check_shapes(in_file, wanted, spelt, "the architecture that most of them make")
        if any(c % arch["norm_num_groups"] for c in channels):
            unseen = f"norm_num_groups cannot be seen in tensors, and the usual {arch['norm_num_groups']}"
            divides = f"does not divide block_out_channels {tuple(channels)}"
            raise ValueError(Message(f"config: {unseen} {divides}: pass ", Named("config")))
    known = _known(arch, but=_SCALING)
    return known | _AMBIGUOUS.get(known["name"], {}) if known else arch


def detect(shapes: Shapes, parts: str = "all") -> tuple[str, str, Arch]:
    """Layout, prefix of the names, and architecture of a file's tensors, of which those that are no part of the VAE are
    ignored. Where the halves might disagree, `parts` says which to look at.

    SD1.5, SDXL and Playground have the same tensors: the architecture is named ``"sd"``, with scaling_factor None.
    FLUX's tensors give ``"flux"`` with its scaling, though SD3's VAE has the same ones and another scaling (1.5305,
    shift 0.0609): pass its name or config. Any other model is ``"custom"``, with scaling_factor None.

    ValueError for an unknown layout, or tensors that fit no architecture; norm_num_groups, which leaves no trace in
    tensors, is taken to be 32, and where that does not divide the channels the error asks for ``config=``.
    """
    layout, prefix = find_layout(shapes)
    return layout.removesuffix("-old"), prefix, _find_arch(shapes, layout, prefix, parts)
