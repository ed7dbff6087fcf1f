"""The code that runs a VAE, and the VAE that an argument means."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from vaemem import _core
from vaemem._common import ELEMENT_BYTES
from vaemem._errors import ArgumentError
from vaemem._types import Program
from vaemem.engine.configs import config_of, is_of_videos, named_model, read_config
from vaemem.engine.names import find_called
from vaemem.prediction.recording_files import find_component, is_recorded_component

DEFAULT_TORCH = "2.7.1+cu128"  # predictions were compared with measurements of this build
# Releases of diffusers with known code, 36 for 0.36. Tests run the first one and the last one. A prediction means the
# last one unless another is named.
FIRST_DIFFUSERS, LAST_DIFFUSERS = 33, 42
LAST_PARTLY_UPCAST = 35  # up to this release, upcast_vae leaves a decode's first blocks in half precision
# The first release with a class, if that is not the first one above.
SINCE = {
    "AutoencoderKLFlux2": 36, "AutoencoderKLHunyuanImage": 36, "AutoencoderKLQwenImage": 35,
    "AutoencoderKLQwenImage21": 41, "Flux2KleinPipeline": 37, "Flux2Pipeline": 36, "ZImagePipeline": 36,
}  # fmt: skip


class _Runtime(NamedTuple):
    """A program's code for VAEs, and how to call its methods; csrc/predict/vae/coders.c has their frames."""

    samples: bool = False  # encode returns latents and decode takes latents; otherwise encode returns a posterior
    host: bool = False  # inputs come from the host's memory, and results go there
    looks_at_memory: bool = False  # it cuts attention into parts if free memory is short
    tiles: bool = True
    packs: bool = False  # FLUX.2's latents have 2x2 pixels in their channels, both as input and as output


RUNTIMES = {
    "diffusers": _Runtime(),
    "bfl": _Runtime(samples=True, tiles=False),
    "comfyui": _Runtime(samples=True, host=True, packs=True),
    "a1111": _Runtime(looks_at_memory=True),
    "forge": _Runtime(samples=True, host=True),
}
# Programs that run another program's code, by model if that differs. InvokeAI has diffusers' class, and BFL's for FLUX.
# A1111 with --medvram or --lowvram keeps no other model on the card while the VAE runs.
PROGRAMS = {"invokeai": {"": "diffusers", "flux": "bfl"}, "a1111-medvram": {"": "a1111"}}
PROGRAM_NAMES: tuple[Program, ...] = get_args(Program)  # of both tables


# The name here of a video VAE with another model's tensors: its class, and so its code, differs.
WAN = "wan2.1"
WANS = WAN, "wan2.2"  # AutoencoderKLWan's


def code_of(program: str, model: str) -> str:
    """Return the code with which a program runs a model's VAE: one of `RUNTIMES`."""
    codes = PROGRAMS.get(program, {"": program})
    return codes.get(model, codes[""])


def packing(code: str, arch: Mapping[str, Any]) -> int:
    """Return how many of the VAE's latent pixels a side make one pixel of the latents in a runtime's code."""
    return int(arch["patch_size"][0]) if RUNTIMES[code].packs and "patch_size" in arch else 1


# The blocks that upcast_vae converts back to half precision before diffusers 0.36.
FIRST = ("post_quant_conv.", "decoder.conv_in.", "decoder.mid_block.")


@functools.lru_cache(maxsize=64)
def parameters_of(arch: tuple[tuple[str, Any], ...], runtime: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return each parameter's name, its shape, and "run" or the dtype that it always has, in the order of loading."""
    return _core.Trace.parameters(dict(arch), runtime)


@functools.lru_cache(maxsize=256)
def parameter_bytes(
    arch: tuple[tuple[str, Any], ...], runtime: str, dtype: str, first: str | None = None
) -> Mapping[str, int]:
    """Return each parameter's bytes by name, in the order of loading. first: the dtype of the `FIRST` blocks, if it is
    another one."""
    types = dtype, first or dtype
    return {
        name: math.prod(shape) * (ELEMENT_BYTES[types[name.startswith(FIRST)]] if own == "run" else 8)
        for name, shape, own in parameters_of(arch, runtime)
    }


@functools.lru_cache(maxsize=256)
def converted_bytes(
    arch: tuple[tuple[str, Any], ...], runtime: str, old: tuple[str, str], new: tuple[str, str]
) -> list[int]:  # fmt: skip
    """Return the bytes of each parameter that is copied to another dtype, and 0 for the others. old, new: the dtypes of
    the model and of its `FIRST` blocks."""
    changes = [ELEMENT_BYTES[after] * (before != after) for before, after in zip(old, new, strict=True)]
    return [math.prod(shape) * changes[name.startswith(FIRST)] for name, shape, _ in parameters_of(arch, runtime)]


@functools.cache
def shipped_models() -> dict[str, dict[str, Any]]:
    """Return the shipped models' arch dicts that `_core.Trace.vae` knows, made once: the core makes all of them on each
    call. Copy one before you change it."""
    return {name: arch for name, arch in _core.models().items() if arch.get("family") != "ltx"}


@functools.cache
def _written() -> frozenset[str]:
    """Return shipped arch dicts as text. They need no check, which takes a third of a prediction."""
    return frozenset(
        repr(arch) for arch in (*shipped_models().values(), shipped_models()["qwen-image"] | {"name": WAN})
    )


def architecture(model: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the arch dict of a shipped model's name, or of a path or dict that `vaemem.VAE` takes as ``config=``.

    ValueError for an unknown name, or a config of neither AutoencoderKL nor AutoencoderKLFlux2.
    """
    if isinstance(model, Mapping) and "norm_eps" in model:  # an arch dict already
        is_shipped = repr(model) in _written()
        return dict(model) if is_shipped else _traced(read_config(model)) | {"name": str(model.get("name", "custom"))}
    known = shipped_models()
    if isinstance(model, str) and is_recorded_component(model):
        data, role = find_component(model)
        return configured_architecture(data["vaes"][role])
    is_path = isinstance(model, str) and model not in known and os.path.exists(model)
    if is_path or isinstance(model, Mapping | os.PathLike):
        return _of_videos(_traced(read_config(model)), is_of_videos(model))
    return dict(_named_architecture(model))


def configured_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arch dict of a VAE's config that names its class."""
    return _of_videos(_traced(read_config(config)), config.get("_class_name") == "AutoencoderKLWan")


def _traced(arch: dict[str, Any]) -> dict[str, Any]:
    """Return an architecture whose calls in PyTorch the core knows; ValueError for another one."""
    if arch.get("family") == "ltx":
        known = (
            f"the VAE of {arch['name']} runs here, but what PyTorch needs for it alone is known only from its module"
        )
        advice = "ask vaemem.pytorch.predict_peak, or for LTX-2.3's whole pipeline: vaemem fits ltx2.3 512x768"
        raise ArgumentError("model", "", known, advice)
    return arch


@functools.lru_cache(maxsize=256)
def _named_architecture(model: str) -> dict[str, Any]:
    arch = _traced(_core.models()[named_model("model", model, "an arch dict (VAE.arch)", "a config.json")])
    called = find_called(model)
    is_wan = str(model).rpartition("/")[2].lower().startswith("wan") or bool(called and called.of == "Wan 2.1")
    return _of_videos(arch, is_wan)


def _of_videos(arch: dict[str, Any], is_wan: bool) -> dict[str, Any]:
    """Name Wan 2.1's VAE, which has Qwen-Image's architecture and makes videos."""
    return arch | {"name": WAN} if is_wan and arch["name"] == "qwen-image" else arch


def diffusers_release(version: str | None, needed: str = "") -> int:
    """Return 36 for ``"0.36.0"``, and the last known release for None. ValueError if that release is not known, or does
    not have the class `needed`."""
    if version is None:
        return LAST_DIFFUSERS
    least = SINCE.get(needed, FIRST_DIFFUSERS)
    found = re.match(r"0\.(\d+)(?![^.])", version) if isinstance(version, str) else None
    if not found or not least <= int(found[1]) <= LAST_DIFFUSERS:
        has = f", which have {needed}" if needed in SINCE else ""
        raise ArgumentError("diffusers_version", f"0.{least} to 0.{LAST_DIFFUSERS}{has}", repr(version))
    return int(found[1])


def followed(arch: Mapping[str, Any], code: str, release: int) -> str:
    """Return the class and the release that the prediction follows, if classes and releases differ; otherwise ""."""
    family = arch.get("family", "")
    frame = "one frame by " * (family == "wan")
    if code == "comfyui" and frame:
        return f"{frame}ComfyUI's WanVAE of 2026"
    if code != "diffusers":
        return ""
    branch = ", with TAEF2's branch added" * (family == "tiny" and arch["norm_num_groups"] > 0)
    return f"{frame}{config_of(dict(arch))['_class_name']} of diffusers 0.{release}{branch}"
