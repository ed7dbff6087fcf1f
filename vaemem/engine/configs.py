"""Read ``config.json`` files of diffusers into architectures, and write them. Which classes run here, what their keys
mean, and what people call the known models."""

from __future__ import annotations

import functools
import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import frames_factor, latent_factor, letters, meant
from vaemem._errors import ArgumentError, FileError, NoFileError
from vaemem._numpy import np
from vaemem.engine.arguments import as_path
from vaemem.engine.names import find_called

Arch = dict[str, Any]
Config = str | os.PathLike[str] | Mapping[str, Any]  # a path, or contents

CONFIG = "config.json"
LARGEST = math.ldexp(2**24 - 1, 104)  # of single precision

# The keys of diffusers' classes with their defaults.
_AUTOENCODER: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (64,)}
_AUTOENCODER |= {"layers_per_block": 1, "norm_num_groups": 32}
_AUTOENCODER |= {"norm_eps": 1e-6}  # no key of the class; accepted so that an arch is a config too
_AUTOENCODER |= {"use_quant_conv": True, "use_post_quant_conv": True, "mid_block_add_attention": True}
# Facts that a config may lack: the model's name, and how pipelines scale its latents.
_UNKNOWN: Arch = {"name": "custom", "scaling_factor": None, "shift_factor": 0.0}
UNKNOWN_ARCH: Arch = _AUTOENCODER | _UNKNOWN
_KL = _AUTOENCODER | {"scaling_factor": 0.18215, "shift_factor": None, "latents_mean": None, "latents_std": None}
_FLUX2 = _AUTOENCODER | {"latent_channels": 32, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
_FLUX2 |= {"decoder_block_out_channels": None, "batch_norm_eps": 1e-4, "patch_size": (2, 2)}
# Classes for several frames name the same things differently; `_read_frames` translates.
_QWEN: Arch = {"base_dim": 96, "z_dim": 16, "dim_mult": (1, 2, 4, 4), "num_res_blocks": 2}
_QWEN |= {key: tuple(_core.models()["qwen-image"][key]) for key in ("latents_mean", "latents_std")}
_QWEN |= {"temperal_downsample": None}
_WAN = _QWEN | {"temperal_downsample": (False, True, True), "decoder_base_dim": None, "in_channels": 3}
_WAN |= {"out_channels": 3, "is_residual": False, "patch_size": None}
_WAN |= {"scale_factor_temporal": None, "scale_factor_spatial": None}
_QWEN_21 = _WAN | {"decoder_base_dim": 144, "z_dim": 64, "dim_mult": (1, 2, 4, 8, 8), "is_residual": True}
_QWEN_21 |= {"in_channels": 4, "out_channels": 4, "temperal_downsample": (False, True, True, True)}
_QWEN_21 |= {key: tuple(_core.models()["qwen-image-2.1"][key]) for key in ("latents_mean", "latents_std")}
_HUNYUAN: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 64, "layers_per_block": 2}
_HUNYUAN |= {"block_out_channels": (128, 256, 512, 512, 1024, 1024), "spatial_compression_ratio": 32}
_HUNYUAN |= {"scaling_factor": None}
_LTX: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 128, "scaling_factor": 1.0}
_LTX |= {"block_out_channels": (256, 512, 1024, 2048), "decoder_block_out_channels": (256, 512, 1024)}
_LTX |= {"layers_per_block": (4, 6, 6, 2, 2), "decoder_layers_per_block": (5, 5, 5, 5)}
_LTX |= {"spatio_temporal_scaling": (True,) * 4, "decoder_spatio_temporal_scaling": (True,) * 3}
_LTX |= {"downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal")}
_LTX |= {"upsample_type": ("spatiotemporal",) * 3, "upsample_residual": (True,) * 3, "upsample_factor": (2, 2, 2)}
_LTX |= {"encoder_causal": True, "decoder_causal": True, "resnet_norm_eps": 1e-6}
_LTX |= {"encoder_spatial_padding_mode": "zeros", "decoder_spatial_padding_mode": "reflect"}
_LTX |= {"spatial_compression_ratio": None, "temporal_compression_ratio": None, "down_block_types": None}
_LTX |= {"decoder_inject_noise": None}
# use_midblock_gn exists in TAEF2 but not in diffusers; the last three do not affect the arithmetic.
_TINY: Arch = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "scaling_factor": 1.0, "shift_factor": 0.0}
_TINY |= {f"{half}_block_out_channels": (64,) * 4 for half in ("encoder", "decoder")}
_TINY |= {"num_encoder_blocks": (1, 3, 3, 3), "num_decoder_blocks": (3, 3, 3, 1), "use_midblock_gn": False}
_TINY |= {"latent_magnitude": 3, "latent_shift": 0.5, "block_out_channels": (64,) * 4}
# Other classes that people try, and why they do not run here.
_REFUSED = {"AutoencoderDC": "Sana's has linear attention over many channels, which is another kind of network"}
_STATISTICS = ("latents_mean", "latents_std")
_ALWAYS = (*_AUTOENCODER, "scaling_factor", "shift_factor")  # keys of every arch; other keys only if not None
_BLOCK_TYPES = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
# Keys that do not affect the arithmetic. Whoever runs the model chooses the tile size (`sample_size_of`) and the
# precision; momentum is for training.
_IGNORED = ("name", "sample_size", "force_upcast", "batch_norm_momentum")
SAMPLE_SIZES = dict.fromkeys(_core.models(), 1024) | {"sd15": 512, "hunyuanimage-2.1": 384}
SAMPLE_SIZES |= dict.fromkeys(("qwen-image", "wan2.2", "qwen-image-2.1"), 256)
SAMPLE_SIZES |= {name: 512 for name, arch in _core.models().items() if arch.get("family") in ("tiny", "ltx")}
# Repositories whose configs have another sample size than their model.
_OTHER_SAMPLE_SIZES = {"sdvaeftmse": 256, "sdvaeftema": 256}


SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 100


def shown(value: object) -> str:
    """Return what a file says for use in a message: short, on one line, without control characters."""
    plain = isinstance(value, str) and value.isprintable() and len(value) <= 200
    return str(value) if plain else SHORT_REPR.repr(value)


def _bad_config(key: str, wanted: str, got: object, advice: str = "") -> ArgumentError:
    return ArgumentError("config", wanted, SHORT_REPR.repr(got), advice, shown(key))


# Example values for keys whose default is None; a tuple's first item stands for all of its items.
_OPTIONAL: Arch = {"scaling_factor": 0.0, "shift_factor": 0.0} | dict.fromkeys(_STATISTICS, (0.0,))
_OPTIONAL |= {"decoder_block_out_channels": (1,), "decoder_base_dim": 1, "patch_size": 1}
_OPTIONAL |= {"temperal_downsample": (False,), "scale_factor_temporal": 1, "scale_factor_spatial": 1}
_OPTIONAL |= {"spatial_compression_ratio": 1, "temporal_compression_ratio": 1, "down_block_types": ("",)}
_OPTIONAL |= {"decoder_inject_noise": (False,)}
# Words for one and for several, Python's types and NumPy's, least and most.
_KINDS: dict[type, tuple[str, str, Any, str, Any, Any]] = {
    bool: ("true or false", "true or false", bool, "bool_", 0, 1),
    int: ("a positive integer below 2^31", "positive integers", int, "integer", 1, (1 << 31) - 1),
    float: ("a finite number of single precision", "finite numbers", (int, float), "floating", -LARGEST, LARGEST),
    str: ("a word", "words", str, "str_", "", "\U0010ffff"),
}


def _check_setting(key: str, value: Any, default: Any) -> Any:
    """Return `value` if it has the type of its default; ValueError otherwise."""
    if value is None and (default is None or key in ("scaling_factor", "decoder_base_dim")):
        return 0.0 if key == "shift_factor" else None
    like = _OPTIONAL[key] if default is None else default
    if isinstance(like, tuple):
        if not isinstance(value, (list, tuple)) or not (value or key == "temperal_downsample"):
            raise _bad_config(key, f"a list of {_KINDS[type(like[0])][1]}", value)
        return tuple(_check_setting(f"{key}[{i}]", v, like[0]) for i, v in enumerate(value))
    wanted, _, types, of_numpy, least, most = _KINDS[type(like)]
    is_kind = isinstance(value, types) or isinstance(value, getattr(np, of_numpy))
    if not (is_kind and least <= value <= most) or (isinstance(value, bool) and type(like) is not bool):
        raise _bad_config(key, wanted, value)
    if key == "scaling_factor" and value <= 0:
        raise _bad_config(key, "more than 0", value)
    return type(like)(value)


def _single(value: float) -> float:
    """Round a number to single precision."""
    unit = max(math.frexp(value)[1] - 24, -149)
    return math.ldexp(round(math.ldexp(value, -unit)), unit)


def _decimal(value: Any) -> Any:
    """Return floats as the shortest decimals that give the same float32; anything else unchanged."""
    if isinstance(value, tuple):
        return [_decimal(v) for v in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    single = _single(value)
    decimals = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return next(decimal for decimal in decimals if _single(decimal) == single)


def known_like(arch: Arch, but: tuple[str, ...]) -> Arch | None:
    """Return the first known model that agrees with `arch` in all keys except `but`."""

    wanted = _compared(arch, but)
    return next((dict(model) for model, compared in _known(but) if compared == wanted), None)


def _compared(arch: Arch, but: tuple[str, ...]) -> list[Any]:
    return [_decimal(arch.get(key)) for key in _ARCH_KEYS if key not in but]


@functools.cache
def _known(but: tuple[str, ...]) -> list[tuple[Arch, list[Any]]]:
    return [(model, _compared(model, but)) for model in _core.models().values()]


def _read_file(config: Config) -> tuple[Mapping[str, Any], Path | None]:
    """Return the contents of a config, and its file if it has one."""
    if isinstance(config, Mapping):
        return config, None
    path = as_path(config, "config", "a path or a dict")
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise NoFileError("config", f"a {CONFIG}", "none", path=path)
    try:
        contents = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError("config", "JSON", "another text", str(error), path=path) from None
    if not isinstance(contents, dict):
        raise FileError("config", "a JSON object", type(contents).__name__, path=path)
    return contents, path


def known_arch(model: str) -> Arch:
    """Return the architecture of a known model; ValueError for any other."""
    return _core.models()[named_model("model", model)]


def named_model(argument: str, model: Any, *others: str) -> str:
    """Return the core's name for a model that people write ``"SD 1.5"``, ``"FLUX.1-dev"`` or
    ``"stabilityai/sdxl-vae"``. A model with another model's VAE gets that model's name.

    others: further allowed names, for the message. ValueError for an unknown model.
    """
    if not isinstance(model, str) or letters(model) not in map(letters, SAMPLE_SIZES):
        if called := find_called(model):
            if called.why:
                raise ArgumentError(argument, "", f"{called.why}, got {model!r}")
            return called.vae
    return meant(argument, model, (*SAMPLE_SIZES, *others), {})


def named_sample_size(model: str) -> int:
    """Return the side in pixels of diffusers' tiles for a model, named as people write it."""
    return _OTHER_SAMPLE_SIZES.get(letters(model.rpartition("/")[2])) or SAMPLE_SIZES[named_model("model", model)]


def read_config(config: Config) -> Arch:
    """Return the architecture of a diffusers ``config.json``, in the form that ``_core.Model`` takes.

    config: the file, a directory that holds it, its contents, or an `Arch`. The name is that of the known model that
    agrees in every field, otherwise ``"custom"``. Absent keys have the defaults of diffusers' class;
    ``scaling_factor`` may be None (unknown). ValueError for an unknown key, a wrong type, or a feature that the engine
    lacks (another class, activation or block type).
    """
    return read_contents(config)[0]


def read_contents(config: Config) -> tuple[Arch, Mapping[str, Any]]:
    """Return the architecture, as `read_config` does, and the contents of the config. Read its file once."""
    contents, path = _read_file(config)
    try:
        return _parse_config(contents), contents
    except ArgumentError as error:
        if not path:
            raise
        raise FileError("config", error.wanted, error.got, error.advice, error.place, path=path) from None


def is_of_videos(config: Config) -> bool:
    """Return whether a config is of a class that makes videos, as the engine runs them."""
    contents = _read_file(config)[0]
    if contents.get("videos") or (name := _class_of(contents)) == "AutoencoderKLLTX2Video":
        return True
    if name != "AutoencoderKLWan":
        return False
    times = contents.get("temperal_downsample")  # without residuals, the architecture has no others than these
    return bool(contents.get("is_residual")) or times is None or list(times) == [i > 0 for i in range(len(times))]


def sample_size_of(config: Config | None, model: str) -> int | None:
    """Return the side in pixels of diffusers' tiles: the config's, otherwise its class's default. Without a config, or
    for an `Arch`, the size is the known model's. None if the size is unknown or no size."""
    if config is None:
        return SAMPLE_SIZES.get(model)
    contents = _read_file(config)[0]
    name = _class_of(contents)
    usual = _CLASSES[name].sample_size if name in CLASSES else 32
    size = contents.get("sample_size", SAMPLE_SIZES.get(str(contents.get("name")), usual))
    size = size[0] if isinstance(size, (list, tuple)) and size else size
    return size if type(size) is int and size > 0 else None


# The class of a config that names none: an `Arch` by its family, otherwise by a key that no other class has.
_FAMILIES = {"wan": "AutoencoderKLWan", "hunyuan_image": "AutoencoderKLHunyuanImage", "tiny": "AutoencoderTiny"}
_FAMILIES |= {"ltx": "AutoencoderKLLTX2Video"}
_MARKS = {
    "upsample_factor": "AutoencoderKLLTX2Video",
    "input_channels": "AutoencoderKLQwenImage",
    "base_dim": "AutoencoderKLWan",
}
_MARKS |= {"spatial_compression_ratio": "AutoencoderKLHunyuanImage", "num_encoder_blocks": "AutoencoderTiny"}
_MARKS |= {"patch_size": "AutoencoderKLFlux2"}


def _class_of(config: Mapping[str, Any]) -> Any:
    """Return the class that a config names, or the class that has its keys."""
    marked = next((name for key, name in _MARKS.items() if config.get(key)), "AutoencoderKL")
    named = _FAMILIES.get(str(config.get("family")), marked)
    if named == "AutoencoderKLWan" and config.get("slices") is False:
        named = "AutoencoderKLQwenImage21"
    elif named == "AutoencoderKLWan" and config.get("name") == "qwen-image" and not config.get("videos"):
        named = "AutoencoderKLQwenImage"
    return config.get("_class_name", named)


def _read_kl(said: Arch, config: Mapping[str, Any]) -> Arch:
    arch = _UNKNOWN | said
    levels, one_each = len(arch["block_out_channels"]), "one for each of"
    counts = {"decoder_block_out_channels": (levels, f"{one_each} block_out_channels"), "patch_size": (2, "two")}
    counts |= dict.fromkeys(_STATISTICS, (arch["latent_channels"], f"{one_each} the latent channels"))
    for key, (count, what) in counts.items():
        if arch.get(key) is not None and len(arch[key]) != count:
            raise _bad_config(key, f"{count} numbers, {what}", arch[key])
    mean, std = (arch.get(key) for key in _STATISTICS)
    if (mean is None) != (std is None):
        raise _bad_config("latents_std", "it together with latents_mean, or neither", std)
    if std and min(std) <= 0:
        raise _bad_config("latents_std", "numbers of more than 0", std)
    for key, block in _BLOCK_TYPES.items():
        blocks = config.get(key, [block] * levels)
        if not isinstance(blocks, (list, tuple)) or list(blocks) != [block] * levels:
            raise _bad_config(key, f"{levels} of {block}, one for each of block_out_channels", blocks)
    if arch.get("decoder_block_out_channels") == arch["block_out_channels"]:
        del arch["decoder_block_out_channels"]
    return {key: value for key, value in arch.items() if value is not None or key in _ALWAYS}


def _kl_config(arch: Mapping[str, Any]) -> Arch:
    levels = len(arch["block_out_channels"])
    config: Arch = {"act_fn": "silu", "force_upcast": True}
    config |= {key: [block] * levels for key, block in _BLOCK_TYPES.items()}
    keys = _CLASSES[_class_of(arch)].keys
    config |= {key: _decimal(arch.get(key)) for key in keys if key != "norm_eps"}
    return config | ({"shift_factor": config["shift_factor"] or None} if "shift_factor" in config else {})


def _read_frames(said: Arch, config: Mapping[str, Any]) -> Arch:
    base, mult, z_dim, patch = said["base_dim"], said["dim_mult"], said["z_dim"], said.get("patch_size")
    if mult[0] != 1:
        raise _bad_config("dim_mult", "a list that begins with 1", mult)
    if {len(said[key] or ()) for key in _STATISTICS} != {z_dim}:
        raise _bad_config("latents_mean, latents_std", f"{z_dim} numbers each", said[_STATISTICS[0]])
    if patch not in (None, 1, 2):
        raise _bad_config("patch_size", "1 or 2", patch)
    arch = UNKNOWN_ARCH | {
        "family": "wan",
        "latent_channels": z_dim,
        "block_out_channels": tuple(base * m for m in mult),
    }
    arch |= {"image_patch": 2} if patch == 2 else {}
    arch |= {"slices": False} if _class_of(config) == "AutoencoderKLQwenImage21" else {}
    if said.get("is_residual"):  # the scale factors follow; downsampling of time matters only with residuals
        times = said["temperal_downsample"] or ()
        if len(times) != len(mult) - 1:
            raise _bad_config("temperal_downsample", f"{len(mult) - 1} of true or false", times)
        arch["temperal_downsample"] = times
    for key in ("in_channels", "out_channels"):
        channels = said.get(key) or said["input_channels"]
        if patch == 2 and channels % 4:
            wanted = "four channels for each of an image, as a patch_size of 2 makes them"
            raise _bad_config(key, wanted, channels)
        arch[key] = channels // (4 if patch == 2 else 1)
    arch |= {"layers_per_block": said["num_res_blocks"], "norm_num_groups": 0, "norm_eps": 1e-12, "scaling_factor": 1.0}
    arch |= {key: said[key] for key in _STATISTICS}
    other = said.get("decoder_base_dim") or base
    return arch | ({"decoder_block_out_channels": tuple(other * m for m in mult)} if other != base else {})


def _frames_config(arch: Mapping[str, Any]) -> Arch:
    widths = _check_setting("block_out_channels", arch.get("block_out_channels"), (96,))
    decoder = _check_setting("decoder_block_out_channels", arch.get("decoder_block_out_channels") or widths, (96,))
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
    if patch:  # diffusers' WanPipeline makes the latents' size with it; its default is 8
        more["scale_factor_spatial"] = int(patch) << (len(widths) - 1)
    name = _class_of({key: value for key, value in arch.items() if key != "_class_name"})
    if name == "AutoencoderKLQwenImage21":
        more["decoder_base_dim"] = decoder[0]
    elif name == "AutoencoderKLQwenImage" and ends["in_channels"] == ends["out_channels"] and decoder[0] == base:
        more = {"input_channels": ends["in_channels"]}
    else:
        name = "AutoencoderKLWan"
    # Defaults are left out: older versions of diffusers do not know these keys.
    return {"_class_name": name} | config | {k: v for k, v in more.items() if v != _CLASSES[name].keys[k]}


def _read_hunyuan(said: Arch, config: Mapping[str, Any]) -> Arch:
    ratio, levels = said["spatial_compression_ratio"], len(said["block_out_channels"])
    if ratio != 2 ** (levels - 1):
        raise _bad_config("spatial_compression_ratio", f"{2 ** (levels - 1)}, for {levels} levels", ratio)
    arch = UNKNOWN_ARCH | {"family": "hunyuan_image", "use_quant_conv": False, "use_post_quant_conv": False}
    return arch | {key: said[key] for key in _HUNYUAN if key in arch}


def _hunyuan_config(arch: Mapping[str, Any]) -> Arch:
    config = {key: _decimal(arch[key]) for key in _HUNYUAN if key in arch}
    ratio = 2 ** (len(arch["block_out_channels"]) - 1)
    return config | {"spatial_compression_ratio": ratio, "sample_size": 384}  # the class has no default for these


def _read_tiny(said: Arch, config: Mapping[str, Any]) -> Arch:
    blocks = said["num_encoder_blocks"]
    for key, order in (("num_encoder_blocks", 1), ("num_decoder_blocks", -1)):
        if said[key] != (1, *blocks[-1:] * (len(blocks) - 1))[::order]:
            wanted = "as many blocks in each level, except one block at the image's own size, in both halves"
            raise _bad_config(key, wanted, said[key])
    widths = {half: said[f"{half}_block_out_channels"] for half in ("encoder", "decoder")}
    for half, width in widths.items():
        if width != width[:1] * len(blocks):
            wanted = f"{len(blocks)} numbers, one for each of num_{half}_blocks, all alike"
            raise _bad_config(f"{half}_block_out_channels", wanted, width)
    arch = {key: said[key] for key in ("in_channels", "out_channels", "latent_channels")}
    arch |= {"family": "tiny", "name": "custom", "block_out_channels": widths["encoder"]}
    arch |= {"layers_per_block": blocks[-1], "use_quant_conv": False, "use_post_quant_conv": False}
    arch |= {"mid_block_add_attention": False, "norm_eps": 1e-5, "norm_num_groups": 4 if said["use_midblock_gn"] else 0}
    arch |= {key: said[key] for key in ("scaling_factor", "shift_factor")}
    same = widths["decoder"] == widths["encoder"]
    return arch | ({} if same else {"decoder_block_out_channels": widths["decoder"]})


def _tiny_config(arch: Mapping[str, Any]) -> Arch:
    if arch.get("norm_num_groups") not in (0, 4):
        raise _bad_config("norm_num_groups", "4, or 0 for no norms", arch.get("norm_num_groups"))
    widths = _check_setting("block_out_channels", arch.get("block_out_channels"), (64,))
    blocks = [1] + [arch.get("layers_per_block")] * (len(widths) - 1)
    config: Arch = {"encoder_block_out_channels": list(widths)}
    config["decoder_block_out_channels"] = list(arch.get("decoder_block_out_channels") or widths)
    config |= {"num_encoder_blocks": blocks, "num_decoder_blocks": blocks[::-1]} | _CLASSES["AutoencoderTiny"].only
    keys = ("in_channels", "out_channels", "latent_channels", "scaling_factor", "shift_factor")
    config |= {key: _decimal(arch.get(key)) for key in keys}
    return config | ({"use_midblock_gn": True} if arch["norm_num_groups"] else {})


def _read_ltx(said: Arch, config: Mapping[str, Any]) -> Arch:
    down, up = len(said["block_out_channels"]), len(said["decoder_block_out_channels"])
    lists = {"downsample_type": down, "spatio_temporal_scaling": down, "layers_per_block": down + 1}
    lists |= {"upsample_type": up, "decoder_spatio_temporal_scaling": up, "decoder_layers_per_block": up + 1}
    lists |= {"upsample_residual": up, "upsample_factor": up}
    for key, count in lists.items():
        if len(said[key]) != count:
            raise _bad_config(key, f"{count} items", said[key])
    for key, one in {"down_block_types": "LTX2VideoDownBlock3D", "decoder_inject_noise": False}.items():
        if said[key] and set(said[key]) != {one}:
            raise _bad_config(key, f"only {one}, which runs here", said[key])
    for half in ("encoder", "decoder"):
        if (mode := said[f"{half}_spatial_padding_mode"]) not in ("zeros", "reflect"):
            raise _bad_config(f"{half}_spatial_padding_mode", "zeros or reflect", mode)

    def resamplers(types: str, scaling: tuple[bool, ...]) -> tuple[str, ...]:
        return tuple(kind if scales else "none" for kind, scales in zip(said[types], scaling, strict=True))

    arch = {key: said[key] for key in _LTX_SHARED}
    arch |= {"family": "ltx", "name": "custom", "videos": True, "norm_num_groups": 0, "norm_eps": 1e-8}
    arch |= {"use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False}
    arch |= {"shift_factor": 0.0, "layers_per_block": said["layers_per_block"][0]}
    arch |= {"encoder_layers_per_block": said["layers_per_block"]}
    arch |= {f"{half}_reflects": said[f"{half}_spatial_padding_mode"] == "reflect" for half in ("encoder", "decoder")}
    # diffusers' decoder reverses all lists except upsample_type.
    arch["downsample_type"] = resamplers("downsample_type", said["spatio_temporal_scaling"])
    arch["upsample_type"] = resamplers("upsample_type", said["decoder_spatio_temporal_scaling"][::-1])
    for key, ratio in _ltx_ratios(arch).items():
        if said[key] not in (None, ratio):
            raise _bad_config(key, f"{ratio}, which the blocks make", said[key])
    return arch


def _ltx_ratios(arch: Mapping[str, Any]) -> dict[str, int]:
    return {"spatial_compression_ratio": latent_factor(arch), "temporal_compression_ratio": frames_factor(arch)}


def _ltx_config(arch: Mapping[str, Any]) -> Arch:
    config: Arch = {key: _decimal(value) for key, value in arch.items() if key in _LTX_SHARED}
    config["layers_per_block"] = list(arch["encoder_layers_per_block"])
    for half, kinds, scaling in (("encoder", "downsample_type", ""), ("decoder", "upsample_type", "decoder_")):
        scales = [kind != "none" for kind in arch[kinds]]
        config[kinds] = ["spatial" if kind == "none" else kind for kind in arch[kinds]]
        config[f"{scaling}spatio_temporal_scaling"] = scales[::-1] if half == "decoder" else scales
        config[f"{half}_spatial_padding_mode"] = "reflect" if arch[f"{half}_reflects"] else "zeros"
    config["decoder_inject_noise"] = [False] * len(arch["decoder_layers_per_block"])
    config["down_block_types"] = ["LTX2VideoDownBlock3D"] * len(arch["downsample_type"])
    return config | _ltx_ratios(arch) | _ONLY_LTX


class _Class(NamedTuple):
    """A class of diffusers that runs here."""

    keys: Arch  # with their defaults
    only: Arch  # keys with one value that runs here
    sample_size: int  # side of its tiles in pixels
    read: Callable[[Arch, Mapping[str, Any]], Arch]  # (values of all keys, config) -> architecture
    config: Callable[[Mapping[str, Any]], Arch]  # the inverse: architecture -> config


_ONLY_KL = {"act_fn": "silu", "norm_eps": 1e-6}
_ONLY_FRAMES: Arch = {"attn_scales": [], "dropout": 0.0}
_ONLY_HUNYUAN = {"downsample_match_channel": True, "upsample_match_channel": True}
_ONLY_TINY = {"act_fn": "relu", "upsample_fn": "nearest", "upsampling_scaling_factor": 2}
_ONLY_LTX: Arch = {"patch_size": 4, "patch_size_t": 1, "timestep_conditioning": False}
_LTX_SHARED = (
    "in_channels", "out_channels", "latent_channels", "scaling_factor", "block_out_channels",
    "decoder_block_out_channels", "decoder_layers_per_block", "upsample_factor", "upsample_residual",
    "encoder_causal", "decoder_causal",
)  # fmt: skip
_CLASSES = {
    "AutoencoderKL": _Class(_KL, _ONLY_KL, 32, _read_kl, _kl_config),
    "AutoencoderKLFlux2": _Class(_FLUX2, _ONLY_KL, 1024, _read_kl, _kl_config),
    "AutoencoderKLQwenImage": _Class(_QWEN | {"input_channels": 3}, _ONLY_FRAMES, 256, _read_frames, _frames_config),
    "AutoencoderKLWan": _Class(_WAN, _ONLY_FRAMES, 256, _read_frames, _frames_config),
    "AutoencoderKLQwenImage21": _Class(_QWEN_21, _ONLY_FRAMES, 256, _read_frames, _frames_config),
    "AutoencoderKLHunyuanImage": _Class(_HUNYUAN, _ONLY_HUNYUAN, 384, _read_hunyuan, _hunyuan_config),
    "AutoencoderTiny": _Class(_TINY, _ONLY_TINY, 512, _read_tiny, _tiny_config),
    "AutoencoderKLLTX2Video": _Class(_LTX, _ONLY_LTX, 512, _read_ltx, _ltx_config),
}
CLASSES = tuple(_CLASSES)
_ARCH_KEYS = [*dict.fromkeys((*_KL, *_FLUX2)), "family", "slices", "temperal_downsample", "image_patch"]
_ARCH_KEYS += ["encoder_layers_per_block", "downsample_type", "upsample_type", "encoder_reflects", "decoder_reflects"]
_ARCH_KEYS += _LTX_SHARED[5:]


def _parse_config(config: Mapping[str, Any]) -> Arch:
    name = _class_of(config)
    if name not in CLASSES:
        *others, last = CLASSES
        why = _REFUSED.get(name, "") if isinstance(name, str) else ""
        raise _bad_config("_class_name", f"{', '.join(others)} or {last}", name, why)
    if str(config.get("family")) in _FAMILIES and _CLASSES[name].read is not _read_kl:
        config = config_of(config)
        name = config["_class_name"]
    kind = _CLASSES[name]
    for key, value in config.items():
        if key in kind.only and _decimal(value) != kind.only[key]:
            raise _bad_config(key, f"{kind.only[key]}, the only one that runs here", value)
        known = key in (*kind.keys, *kind.only, *_IGNORED) or str(key)[:1] == "_"
        if kind.read is _read_kl:  # an `Arch` has all keys of AutoencoderKL
            known = known or key in _BLOCK_TYPES or (key in _ARCH_KEYS and value in (None, 0))
        if not known:
            raise _bad_config(str(key), f"a key of {name}", value)
    said = {key: _check_setting(key, config.get(key, default), default) for key, default in kind.keys.items()}
    arch = kind.read(said, config)
    return known_like(arch, but=("name",)) or arch


def config_of(arch: Mapping[str, Any], sample_size: int | None = None) -> Arch:
    """Return the config that diffusers' from_pretrained reads for an architecture. An unknown scaling factor becomes
    null; an unknown sample_size is left out."""
    name = _class_of(arch)
    config = {"_class_name": name} | _CLASSES[name].config(arch)
    size = sample_size or SAMPLE_SIZES.get(str(arch.get("name")))
    has_size = size and arch.get("family") not in ("wan", "tiny", "ltx")  # their classes have no such key
    return config | ({"sample_size": size} if has_size else {})
