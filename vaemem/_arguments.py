"""The arguments that several functions share, each described once.

`shared` puts these descriptions into functions' documentation, and the command line shows them next to its flags.

model of a VAE : str or dict
    ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"sd3"``, ``"zimage"``, ``"cogview4"``, ``"playground-v2.5"``, ``"flux2"``,
    ``"flux2-small"``, or such a name as people write it (``"SD 1.5"``, ``"stabilityai/sdxl-vae"``). A model with the
    same VAE is accepted too (``"Kwai-Kolors/Kolors"``: the answer names the VAE), and so is the config of another
    AutoencoderKL or AutoencoderKLFlux2 (a dict, or a path).
op of a VAE : str
    ``"encode"``, ``"decode"``, ``"encode_tiled"`` or ``"decode_tiled"``.
dtype of a VAE : str, optional
    The type of the run's numbers: ``"float16"``, ``"bfloat16"`` or ``"float32"``; also ``"fp16"``, ``torch.float16``.
    The default is the program's own type for that model and card (`vaemem.prediction.default_dtypes`). For example,
    diffusers converts SDXL's own VAE from float16 to float32. ComfyUI uses bfloat16 from compute capability 8.0 on.
batch of a VAE : int
    Images in one run.
runtime of a VAE : str
    The program that runs the VAE: ``"diffusers"`` (AutoencoderKL, the default), ``"bfl"`` (AutoEncoder of the flux
    repository), ``"comfyui"`` (its class VAE), ``"a1111"`` (CompVis' AutoencoderKL as A1111 changes it), ``"forge"``
    (an earlier version of ComfyUI's) or ``"invokeai"`` (diffusers' class, or BFL's for FLUX). With ``"a1111"`` the UNet
    and the text encoders stay on the card, as in A1111 by default; ``"a1111-medvram"`` moves them off the card.
    docs/PREDICTION.md lists the checks of each program.
executor : concurrent.futures.Executor, optional
    The executor whose processes or threads do the work, perhaps on other machines, such as a ``ProcessPoolExecutor`` or
    the executor of a Dask client. The executor does not change the result. If a worker dies, the finished part is
    returned, and a RuntimeWarning names the missing part.
safe : bool
    If true, a tight run does not count as fitting (`fits`, and the command's exit status).
gpu : str, optional
    A card's name, ``"RTX 4090"``, ``"A100 80GB MIG 3g.40gb"``, ``"4070 laptop"`` ..., or a compute capability,
    ``"sm_89"``, on which workspaces mostly depend. If no card is named, a card of that `memory` stands for yours.
    Without `memory`, this machine's card stands for yours, or an RTX 4090 if the machine has none. The answer's first
    line says which card stands for yours.
memory : int or str, optional
    The card's memory, in bytes or as cards are sold, ``"16 GB"`` (of 2^30 bytes here). The memory distinguishes
    variants of a card, and selects a card of a compute capability.
used : int or str
    The card's memory that others hold, such as the desktop and other models: bytes, or ``"1.5 GB"``.
os : str
    ``"linux"`` or ``"windows"``. Windows' display driver model keeps 125 to 850 MiB more of a card. A run that fits
    with 125 MiB less but not with 850 MiB less is tight. Beyond the card's memory Windows uses the host's memory, which
    is slow, and the verdict says from which size on.
cudnn_version, torch_version : str, optional
    The versions that run, such as ``"9.10.2"`` and ``"2.9.1+cu128"``. The defaults are 2.7.1+cu128 and its cuDNN,
    9.7.1, and for Volta 2.7.1+cu126 and 9.5.1. A `torch_version` without a CUDA build, ``"2.7.1"``, means PyPI's build:
    ``"2.7.1+cu126"``. Releases from 1.13 on have answers; the operators of 2.4 stand for those of older releases. Some
    versions of cuDNN (below 9.8) could not be queried. The nearest version with data then stands in, as
    `Prediction.band` and `Prediction.substitutions` say.
diffusers_version : str, optional
    The release of diffusers, from ``"0.33.0"`` to ``"0.42.1"``; the default is 0.42. When SDXL's VAE is converted to
    float32, a decode's first blocks stay in half precision before 0.36. Before 0.37 ``channels_last`` takes more
    copies.
pipeline : str
    ``"sd15"``, ``"sd15-controlnet"``, ``"sd21"``, ``"sdxl"``, ``"sdxl-controlnet"``, ``"sdxl-refiner"``, ``"sd3"``,
    ``"sd35-medium"``, ``"sd35-large"``, ``"pixart-sigma"``, ``"flux"``, ``"flux-schnell"``, ``"flux-kontext"``,
    ``"flux-fill"``, ``"chroma"``, ``"qwen-image"``, ``"qwen-image-edit"``, ``"zimage"``, ``"zimage-turbo"``,
    ``"flux2"``, ``"flux2-klein"``, ``"flux2-klein-base"``, ``"flux2-klein-9b"``, ``"flux2-klein-base-9b"``,
    ``"wan-1.3b"``, ``"wan-14b"`` or ``"wan2.2-5b"``; or a model with the same modules, such as
    ``"RunDiffusion/Juggernaut-XL-v9"``.
prompt_tokens : int, optional
    The prompt's length, at most 8192. The default is 77, or the pipeline's max_sequence_length: 512 for FLUX, Wan and
    Chroma, 256 for SD 3 (of T5's prompt), 300 for PixArt-Sigma. SD 1.5, SD 2.1 and SDXL pad to 77 and encode longer
    prompts in parts of 77. Qwen-Image pads nothing, adds a template, and cuts the result to 512 tokens.
guidance : bool, optional
    Whether SD 1.5, SD 2.1, SDXL, SD 3, PixArt-Sigma, Chroma, Qwen-Image, Z-Image, FLUX.2-klein-base and Wan
    denoise each image twice. By default Qwen-Image denoises twice only with a negative prompt, which ComfyUI's
    workflows have; the other pipelines always denoise twice. FLUX and FLUX.2 take guidance as a number; Z-Image-Turbo
    and FLUX.2-klein take no guidance.
components : dict, optional
    Storage of components' weights, by role (``"text_encoder"``, ``"text_encoder_2"``, ``"unet"``, ``"transformer"``,
    ``"controlnet"``, ``"vae"``). A value is a type that `vaemem.pipelines.storage.tensor_bytes` takes (``"nf4"``,
    ``"Q8_0"``, ``"fp8"``, ``"int8wo"``, ``"float32"``), or the path of a safetensors or GGUF file. diffusers keeps
    GGUF's blocks in denoisers only, and converts a file's floats to the dtype of the run. The value None, or
    ``"none"``, leaves a text encoder out. By default the file holds the named type and is loaded to the CPU. Words
    after the type change the loading: ``"nf4 from bfloat16"`` is quantised on the card during loading, ``"nf4 on
    cuda"`` is loaded on the card, and ``"int8 kept on cuda"`` stays on the card. SD 1.5 has its ``"safety_checker"``
    only if you name it. SDXL's VAE is stored in float16 and converted to float32 for its call unless you name the VAE's
    type.
lora : int, str, dict, or a list of these, optional
    A LoRA after ``load_lora_weights``: its safetensors file (only its header counts), or a rank such as ``16``, for the
    layers of the denoiser that diffusers' training scripts choose. A dict has ``"file"``, or ``"rank"`` and
    ``"target_modules"``. A LoRA after ``fuse_lora`` has ``"fused": True``, or is written ``"16 fused"``. A LoRA that
    was fused and unloaded takes no memory. LoRAs of SD 1.5, SDXL and FLUX.1 are known.
image : bool, or (int, int)
    Whether the VAE first encodes an image, as in image-to-image pipelines. A size means a hires fix: the same process
    first makes an image of this (height, width), and begins with this image.
steps : int, optional
    How often the denoiser runs in each call. Memory is predicted for two steps; FLOPs count all steps. With a strength
    below 1, image-to-image runs fewer steps: pass the number of those.
frames : int, optional
    Frames of a video, 81 by default. diffusers makes 4 n + 1 frames: the prediction is for the rounded number, and the
    answer names that number. Pipelines that make images take no frames.
dtype of a pipeline : str, optional
    The type of the computation: float16 for SD 1.5 and SDXL, bfloat16 for Chroma, FLUX, FLUX.2, Qwen-Image, Wan and
    Z-Image. Wan's VAE stays in float32 unless `components` names its type.
models of a sweep : names or VAE objects, or one of them
    A named model gets random weights for this sweep: memory and time do not depend on the values of weights.
ops of a sweep : str or sequence of str
    ``"encode"``, ``"decode"``.
sizes of a sweep : int or sequence of int and (int, int)
    Image sizes in pixels, multiples of 8. An int is a square, a pair is (height, width): ``(512, 768)`` alone is two
    squares, ``[(512, 768)]`` is one landscape.
dtypes of a sweep : str or sequence of str
    ``"float32"``, ``"float16"``, ``"bfloat16"``. VAE objects have their own.
device of a sweep : str
    Where named models run: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. VAE objects run on their own device.
batch of a sweep : int or sequence of int
    Images in one run.
memory_limit of a sweep : int or str, optional
    A limit for each run, as for `VAE.decode`. The columns `work` and `streamed` then show its cost.
precision of a sweep : {"highest", "high", "medium"}
    For named models in float32, as for `VAE.load`; other types need "highest". VAE objects have their own.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_ENTRY = re.compile(r"^(\S.*?)(?: of (a \w+))?( : .*)?\n((?:(?:    .*)?(?:\n|\Z))+)", re.M)
_SHARED = re.compile(r"^( *)(\S.*?)(?: of (a \w+))? : shared$", re.M)


@functools.cache
def _table() -> dict[tuple[str, str], str]:
    """Return {(name, the noun after "of"): the entry as a docstring has it}."""
    entries = _ENTRY.findall((__doc__ or "").partition("flags.\n\n")[2])
    return {
        (name, of): f"{names}{kind}\n{text}".rstrip() for names, of, kind, text in entries for name in _split(names)
    }


def _split(names: str) -> list[str]:
    return [name.lstrip("*") for name in names.split(", ")]


def shared(function: Function) -> Function:
    """Replace lines ``name, name : shared`` of a function's documentation with the descriptions above."""

    def entries(found: re.Match[str]) -> str:
        wanted = [_table().get((name, found[3] or "")) or _table()[name, ""] for name in _split(found[2])]
        return "\n".join(f"{found[1]}{line}".rstrip() for one in dict.fromkeys(wanted) for line in one.split("\n"))

    if function.__doc__:  # python -OO removes it
        function.__doc__ = _SHARED.sub(entries, function.__doc__)
    return function


def described(function: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of a function's parameters as plain text, by name."""
    parameters = (inspect.getdoc(function) or "").partition("Parameters\n----------\n")[2]
    return {
        name: " ".join(text.replace("`", "").split())
        for names, _, _, text in _ENTRY.findall(re.split(r"\n\n\S", parameters)[0] + "\n")
        for name in _split(names)
    }
