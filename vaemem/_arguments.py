"""Arguments that several functions take, each described once.

`shared` puts these descriptions into the documentation of functions, and the command line shows them beside its flags.

model of a VAE : str or dict
    ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"sd3"``, ``"zimage"``, ``"cogview4"``, ``"playground-v2.5"``, ``"flux2"``,
    ``"flux2-small"``, as people write them (``"SD 1.5"``, ``"stabilityai/sdxl-vae"``), a model that has the same VAE
    (``"Kwai-Kolors/Kolors"``: the answer says whose it is), or another's config, AutoencoderKL or AutoencoderKLFlux2 (a
    dict, or a path).
op of a VAE : str
    ``"encode"``, ``"decode"``, ``"encode_tiled"`` or ``"decode_tiled"``.
dtype of a VAE : str, optional
    The type of the run's numbers: ``"float16"``, ``"bfloat16"`` or ``"float32"``; also ``"fp16"``, ``torch.float16``.
    By default what the program runs that model in on that card, which `vaemem.prediction.usual` has from the programs'
    code: diffusers converts SDXL's own VAE from float16 to float32, ComfyUI takes bfloat16 from compute capability 8.0
    on.
batch of a VAE : int
    How many images there are in one run.
runtime of a VAE : str
    Whose code runs the VAE: ``"diffusers"`` (AutoencoderKL, the default), ``"bfl"`` (AutoEncoder of the flux
    repository), ``"comfyui"`` (its class VAE), ``"a1111"`` (CompVis' AutoencoderKL as A1111 changes it) or ``"forge"``
    (an earlier state of ComfyUI's); or a program that runs their code: ``"invokeai"`` (diffusers' class, for FLUX
    BFL's). With ``"a1111"`` the UNet and the text encoders stay on the card, as they do by default;
    ``"a1111-medvram"`` has them off it. docs/PREDICTION.md says how each was checked.
safe : bool
    Whether what is tight does not count as fitting (`fits`, and the command's exit status).
gpu : str, optional
    A card's name, ``"RTX 4090"``, ``"A100 80GB MIG 3g.40gb"``, ``"4070 laptop"`` ..., or a compute capability,
    ``"sm_89"``: workspaces depend on that, and hardly on anything else. If none is named, a card of that `memory`
    stands for yours; without `memory` it is this machine's card, or an RTX 4090 if it has none. The answer's first line
    says which card stands for yours.
memory : int or str, optional
    What the card has, in bytes or as cards are sold, ``"16 GB"`` (of 2^30 bytes here). It tells variants apart, and
    says which card of a compute capability is meant.
used : int or str
    What others hold of the card, the desktop and other models: bytes, or ``"1.5 GB"``.
os : str
    ``"linux"``, or ``"windows"``, whose display driver model keeps 125 to 850 MiB more of a card; what fits only with
    the least of that is tight.
cudnn_version, torch_version : str, optional
    The versions that run, such as ``"9.10.2"`` and ``"2.9.1+cu128"``. 2.7.1+cu128 and its cuDNN, 9.7.1, are taken by
    default (on Volta, which it has no kernels for, 2.7.1+cu126 and 9.5.1). A `torch_version` without a CUDA build,
    ``"2.7.1"``, is PyPI's.
    Where nobody could ask a version (below 9.8), the nearest one that was asked answers: `Prediction.band` and
    `Prediction.substitutions` say so.
pipeline : str
    ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"flux-schnell"``, ``"zimage-turbo"``, ``"flux2"``,
    ``"flux2-klein"`` or ``"flux2-klein-9b"``; or a model that has the same modules, such as
    ``"RunDiffusion/Juggernaut-XL-v9"``.
prompt_tokens : int, optional
    How long the prompt is: 77 by default, and FLUX's 512, which is its max_sequence_length, at most 8192. SD 1.5 and
    SDXL pad to 77 and encode longer prompts in parts of so many.
guidance : bool
    Whether SD 1.5 and SDXL denoise each image twice. FLUX takes guidance as a number, FLUX.2 too, Z-Image-Turbo
    and FLUX.2-klein none.
components : dict, optional
    What the weights of components are stored in, by role (``"text_encoder"``, ``"text_encoder_2"``, ``"unet"``,
    ``"transformer"``, ``"vae"``): a type as `vaemem.pipelines.storage.tensor_bytes` has them (``"nf4"``, ``"Q8_0"``,
    ``"fp8"``, ``"float32"``), or the path of a safetensors or GGUF file, whose header says them (weights stay in the
    file's types, which ``from_pretrained(torch_dtype=...)`` would change); None, or ``"none"``, for a text encoder that
    is not there. The file holds that type and is loaded to the CPU, unless words after the type say otherwise:
    ``"nf4 from bfloat16"`` is quantised on the card while it is loaded, ``"nf4 on cuda"`` is loaded on the card,
    ``"int8 kept on cuda"`` stays there.
    SD 1.5's ``"safety_checker"`` is there where it is named. SDXL's VAE is kept in float16 and converted
    to float32 for its call unless this says what it runs in.
image : bool
    Whether it begins with an image, which the VAE encodes, as the image-to-image pipelines do.
steps : int, optional
    How often the denoiser runs. Memory is that of two steps; FLOPs are those of all.
dtype of a pipeline : str, optional
    What is computed in: float16 for SD 1.5 and SDXL, bfloat16 for FLUX, FLUX.2 and Z-Image.
models of a sweep : names or VAE objects, or one of them
    A name gets random weights for this sweep: memory and time do not depend on their values.
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
    """{(name, of what): the entry as it stands in a docstring}."""
    entries = _ENTRY.findall((__doc__ or "").partition("flags.\n\n")[2])
    return {
        (name, of): f"{names}{kind}\n{text}".rstrip() for names, of, kind, text in entries for name in _split(names)
    }


def _split(names: str) -> list[str]:
    return [name.lstrip("*") for name in names.split(", ")]


def shared(function: Function) -> Function:
    """Puts the descriptions above in the place of lines ``name, name : shared`` of a function's documentation."""

    def entries(found: re.Match[str]) -> str:
        wanted = [_table().get((name, found[3] or "")) or _table()[name, ""] for name in _split(found[2])]
        return "\n".join(f"{found[1]}{line}".rstrip() for one in dict.fromkeys(wanted) for line in one.split("\n"))

    if function.__doc__:  # python -OO takes it away
        function.__doc__ = _SHARED.sub(entries, function.__doc__)
    return function


def described(function: Callable[..., Any]) -> dict[str, str]:
    """What a function's documentation says of its parameters, by their names, as plain text."""
    parameters = (inspect.getdoc(function) or "").partition("Parameters\n----------\n")[2]
    return {
        name: " ".join(text.replace("`", "").split())
        for names, _, _, text in _ENTRY.findall(re.split(r"\n\n\S", parameters)[0] + "\n")
        for name in _split(names)
    }
