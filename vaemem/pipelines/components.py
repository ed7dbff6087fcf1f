"""The pipelines of diffusers, and their components."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import MOST_SIDE, letters, meant, shipped
from vaemem._errors import ArgumentError
from vaemem.engine.names import find_called
from vaemem.pipelines.recorded_modules import Weight, load_program
from vaemem.prediction.recording_files import (
    OPTIONAL_FACTS,
    component_of,
    find_component,
    is_recorded_component,
    is_recording,
    read_recording,
)
from vaemem.prediction.runtimes import LAST_DIFFUSERS, WAN, architecture, shipped_models

CLIPS = ("clip-l", "clip-l-sdxl", "clip-l-flux", "clip-l-sd3", "openclip-g", "openclip-h")
CLIP_TOKENS = 77
MOST_SEQUENCE = 512  # tokens: FluxPipeline's longest prompt; other pipelines pad prompts to this length
VAE_STRIDE = 8  # pixels of the image per side of a latent's pixel
MOST_LATENT_FRAMES = 1024  # that Wan's transformer has positions for


class Pipeline(NamedTuple):
    """Facts about a pipeline of diffusers. vaemem/data/pipelines has the rows from which
    benchmarks/recording/record_rows.py lists them (vaemem/data/generated/pipelines.json), and texts with their steps.

    about: the class, and the repository of its weights on the Hugging Face Hub
    parts: the component of each role, in the order of ``model_cpu_offload_seq``: a recorded module, or a VAE's name
    dtype: the usual one
    tokens: length of the prompt by default
    most_tokens: longest prompt in one call of the text encoder: CLIP's, or the default max_sequence_length's limit
    longest: tokens of the longest prompt that its call accepts (max_sequence_length); 0: it accepts any
    steps: by default
    guides: whether guidance takes each image through the denoiser twice
    apart: whether guidance needs two calls of the denoiser, instead of one call with twice as many images
    unguided: whether the pipeline's call has no guidance by default, because it guides only with a negative prompt
    optional: further components, which run if they are named; they stay on the device whatever is offloaded
    begins: whether it has a sibling in diffusers that begins with an image's latents
    floors: whether it rounds sides down to multiples of `stride`; others refuse such sides
    since: the first release of diffusers in which it was read, 42 for 0.42; 0 for every known one
    most_side: the image's longest side in pixels, if the denoiser has no positions beyond it
    most_batch: the most images in one call with which its denoiser was recorded; 0: any
    joined: tokens that the denoiser gets besides `tokens`: CLIP's, or the end of a template
    inputs: how many times as many numbers as the picture's latents the denoiser gets: those of other images too
    sees: whether its text encoder also gets the image. The image's tokens then go to the denoiser with the prompt's
    aside: components outside ``model_cpu_offload_seq``, each with its class and the repository of its weights. Model
        offload brings one for its first call, and leaves it there
    sized: an argument of the pipeline's call; without it the picture has about 1024x1024 pixels, whatever was asked
    frames: of its videos by default; 0 if it makes images
    vae_dtype: the usual one of its VAE, if that differs
    factor: pixels of the image per side of a latent's pixel
    times: whether each token of the denoiser has a time of its own (expand_timesteps)
    text: the pipeline that has the same text in vaemem/data/pipelines, if another has
    unit: divisor of the image's sides, if that does not follow from the denoiser
    frame_factor: frames of a video per frame of its latents, after the first one; or those of a clip
    clip: frames of a video besides those of clips; frames of latents of a clip, and besides those of clips
    sound: latents of a video's sound for a number of frames
    frame_range: the fewest and the most frames of a video; 0 for any
    workflow: of a modular pipeline, which chooses its blocks
    recording: the path of its recording, if it has one
    has_words: whether it is known with prompts of any length
    loras: whether it has load_lora_weights
    converts: whether it converts its VAE to float32, whatever the VAE's config says
    notes: of its recording
    usage: of a workflow of ComfyUI, the factor of its denoiser's estimate (memory_usage_factor)
    blocks: of a workflow, how names of its denoiser's blocks begin, if ComfyUI sends a whole block in advance
    decodes: of a workflow, its VAE's estimate of a decode: (a, b, c) for a frames of latents or more, in which a square
        of them takes (b frames + c) numbers
    owns_tiles: of a workflow, whether its VAE makes tiles by itself, and ComfyUI makes none (handles_tiling)
    """

    about: str
    parts: Mapping[str, str]
    dtype: str
    tokens: int
    most_tokens: int
    steps: int
    longest: int = 0
    guides: bool = False
    apart: bool = False
    unguided: bool = False
    optional: Mapping[str, str] = {}
    begins: bool = True
    floors: bool = False
    since: int = 0
    most_side: int = MOST_SIDE
    most_batch: int = 0
    joined: int = 0
    inputs: int = 1
    sees: bool = False
    sized: str = ""
    frames: int = 0
    vae_dtype: str = ""
    factor: int = VAE_STRIDE
    times: bool = False
    aside: Mapping[str, str] = {}
    text: str = ""
    unit: int = 0
    frame_factor: int = 4
    clip: Sequence[int] = (1, 1, 1)
    sound: Sequence[int] = (0, 1)
    frame_range: Sequence[int] = (1, 0)
    workflow: str = ""
    recording: str = ""
    has_words: bool = True
    loras: bool = True
    converts: bool = False
    notes: Sequence[str] = ()
    usage: float = 0
    blocks: str = ""
    decodes: Sequence[Sequence[Any]] = ()
    owns_tiles: bool = False

    @property
    def class_name(self) -> str:
        """Class in diffusers."""
        return self.about.split()[0]

    @property
    def repository(self) -> str:
        """Repository of its weights on the Hugging Face Hub."""
        return self.about.split()[-1]

    @property
    def is_modular(self) -> bool:
        """Whether the pipeline is modular, and so has no methods for offloading."""
        return self.class_name.endswith("ModularPipeline")

    @property
    def denoiser(self) -> str:
        """Its role."""
        others = (role for role in self.parts if role not in self.encoders and not is_vae(self.parts[role]))
        return "unet" if "unet" in self.parts else "transformer" if "transformer" in self.parts else next(others)

    @property
    def denoisers(self) -> list[str]:
        """Roles of the components that denoise in turns."""
        return [role for role in self.parts if role in (self.denoiser, f"{self.denoiser}_2")]

    @property
    def stride(self) -> int:
        """Divisor of the image's sides, in pixels: transformers read latents in squares of two."""
        return self.unit or self.factor * (2 if self.denoiser == "transformer" else 1)

    @property
    def encodes(self) -> bool:
        """Whether its VAE encodes an image in every call."""
        return self.inputs > 1 or "Img2Img" in self.class_name

    @property
    def upcasts(self) -> bool:
        """Whether the pipeline converts a VAE like SDXL's from float16 to float32 for the VAE's calls."""
        return self.converts or (self.class_name.startswith("StableDiffusionXL") and self.parts["vae"] == "sdxl")

    def most_images(self, guidance: bool) -> int:
        """Return the largest batch that is known, 0 for any. Guidance doubles the images of a call."""
        halves = guidance and self.guides and not self.recording  # a recording has pictures
        return self.most_batch // 2 if halves else self.most_batch

    @property
    def encoders(self) -> list[str]:
        return [role for role in self.parts if role.startswith("text_encoder")]


def scale_edited(height: int, width: int) -> tuple[int, int]:
    """Return the sides of an image of these proportions as Qwen-Image-Edit scales it: about 1024x1024 pixels."""
    wide = math.sqrt(1024 * 1024 * width / height)
    return round(wide * height / width / 32) * 32, round(wide / 32) * 32


def count_seen(height: int, width: int) -> int:
    """Count the tokens of an image for Qwen2.5-VL, which takes 28x28 pixels as one."""
    return round(height / 28) * round(width / 28)


_COPIED = "dtype vae_dtype tokens steps frames frame_factor factor unit".split()
_COPIED += "most_batch has_words guides unguided converts loras longest".split()


class _Pipelines(dict[str, Pipeline]):
    """Known pipelines by their names, and recordings by their paths; a loop shows only known ones."""

    def __missing__(self, name: str) -> Pipeline:
        if not is_recording(name):
            raise KeyError(name)
        return pipeline_of(name, read_recording(name))


def pipeline_of(path: str, data: Mapping[str, Any]) -> Pipeline:
    """Return the facts in a recording. path: of its file"""
    row, parts = data["row"], {role: component_of(path, role) for role in data["roles"]}
    facts = {fact: row[fact] for fact in (*_COPIED, *OPTIONAL_FACTS) if fact in row}
    return Pipeline(
        data["about"], parts, most_tokens=MOST_SEQUENCE if row["has_words"] else row["tokens"], begins=False,
        since=LAST_DIFFUSERS, inputs=1 + row["encodes"], aside={role: "" for role in row["aside"]},
        recording=path, notes=tuple(data["notes"]), **facts,
    )  # fmt: skip


PIPELINES = _Pipelines(
    (name, Pipeline(**facts)) for name, facts in json.loads(shipped("generated", "pipelines.json")).items()
)


def known_pipeline(argument: str, name: Any, among: Iterable[str] = ()) -> str:
    """Find a pipeline by its name. If there is none, a ValueError lists the names in `among`, by default all."""
    if is_recording(name):
        if among and among is not PIPELINES:
            raise ArgumentError(argument, f"one of {', '.join(among)}", repr(name), "a recording is of diffusers")
        read_recording(os.fspath(name))
        return str(os.fspath(name))
    own: list[str] = [*PIPELINES, *(one for one in among if one not in PIPELINES)]
    is_own = isinstance(name, str) and letters(name) in map(letters, own)
    called = None if is_own else find_called(name)
    vae = called.vae if called else next((vae for vae in shipped_models() if letters(vae) == letters(str(name))), "")
    if called and called.pipeline:
        return called.pipeline
    if called and called.needs:
        raise ArgumentError(argument, called.needs, repr(name))
    if vae and not is_own:
        does = "fits" if vae in shipped_models() else "estimate"
        advice = f"vaemem {does} {shlex.quote(name)} decode 1024x1024 predicts it"
        raise ArgumentError(argument, "", f"only the VAE of {name!r} is known", advice)
    if called:
        raise ArgumentError(argument, "", f"{called.why}, got {name!r}")
    return meant(argument, name, own if is_own else [*among] or PIPELINES, {})


def is_vae(component: str) -> bool:
    """Tell whether a component is a VAE, rather than a recorded module."""
    if is_recorded_component(component):
        data, role = find_component(component)
        return role in data["vaes"]
    return component == WAN or component in shipped_models()


@functools.cache
def weights_of(component: str) -> tuple[Weight, ...]:
    """List a component's weights, in the order in which ``Module.to`` moves them."""
    if not is_vae(component):
        return load_program(component).weights
    return tuple(Weight(*one) for one in _core.Trace.parameters(architecture(component), "diffusers"))


@functools.lru_cache(maxsize=256)
def vae_counts(model: str, op: str, dtype: str, height: int, width: int, **more: Any) -> tuple[int, int, int]:
    """Count a VAE run's FLOPs, its attention's FLOPs, and the bytes moved, tiles included. Sizes are in image
    pixels. more: further arguments of `Trace.vae`"""
    trace = _core.Trace.vae(architecture(model), "diffusers", op, dtype, height, width, **more)
    return trace.flops, trace.attended, trace.moved
