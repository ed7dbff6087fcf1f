"""Architectures as ``config.json`` files describe them: which classes of diffusers run here, what each of their keys
says, and what people call the models that are known by name."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vaemem import _core
from vaemem._common import letters, meant
from vaemem.engine.arguments import as_path

Arch = dict[str, Any]
Config = str | os.PathLike[str] | Mapping[str, Any]  # a path, or contents

CONFIG = "config.json"
LARGEST = float(np.finfo(np.float32).max)

# The keys of diffusers' two classes, with their defaults.
_AUTOENCODER: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (64,)}
_AUTOENCODER |= {"layers_per_block": 1, "norm_num_groups": 32}
_AUTOENCODER |= {"norm_eps": 1e-6}  # no key of the class, which has no other; accepted so that an arch is a config too
_AUTOENCODER |= {"use_quant_conv": True, "use_post_quant_conv": True, "mid_block_add_attention": True}
# What an arch says beside them where nothing tells it: which model it is, and how pipelines scale its latents.
_UNKNOWN: Arch = {"name": "custom", "scaling_factor": None, "shift_factor": 0.0}
UNKNOWN_ARCH: Arch = _AUTOENCODER | _UNKNOWN
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


SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 100


def shown(value: object) -> str:
    """What a file says, for a message: short, on one line, and nothing that a terminal would obey."""
    plain = isinstance(value, str) and value.isprintable() and len(value) <= 200
    return str(value) if plain else SHORT_REPR.repr(value)


def _bad_config(key: str, want: str, got: object) -> ValueError:
    return ValueError(f"config: {shown(key)}: want {want}, got {SHORT_REPR.repr(got)}")


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


def known_like(arch: Arch, but: tuple[str, ...]) -> Arch | None:
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
    arch = dict(UNKNOWN_ARCH)
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
    return known_like(arch, but=("name",)) or arch


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
    arch = UNKNOWN_ARCH | {"family": "hunyuan_image", "use_quant_conv": False, "use_post_quant_conv": False}
    arch |= {key: said[key] for key in defaults if key in arch}
    return known_like(arch, but=("name",)) or arch


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
    return known_like(arch, but=("name",)) or arch


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
    return known_like(arch, but=("name",)) or arch


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
