"""The components of diffusers' pipelines, and what each pipeline says of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import Message, Named, letters, meant
from vaemem.engine.names import find_called
from vaemem.pipelines.programs import Weight, load_program
from vaemem.prediction.runtimes import architecture

CLIPS = ("clip-l", "clip-l-sdxl", "clip-l-flux", "openclip-g")
CLIP_TOKENS = 77
MOST_SEQUENCE = 512  # what FluxPipeline refuses to go beyond, and what ZImagePipeline pads to
VAE_STRIDE = 8  # pixels a side of one pixel of a latent


Made = tuple[int, str, str]  # elements, of what, dtype


class Pipeline(NamedTuple):
    """A pipeline of diffusers.

    about: the class, and whose weights
    parts: what each role is played by, in the order of ``model_cpu_offload_seq``: a recorded module, or a VAE's name
    dtype: the one that it is usually run in
    width, pooled: channels of the prompt's embeddings, and of the pooled ones (0: none)
    tokens: of a prompt by default
    encoded: what prompts are padded to for the text encoder, longer ones in several calls; 0 where that is said by the
        call (FLUX's max_sequence_length)
    steps: by default
    pads: whether the denoiser sees the padded prompt
    guides: whether guidance takes a second image through the denoiser (else it is an input of it, or there is none)
    rescales: whether the latents that are decoded take the place of the others
    asks: what a text encoder is called with, {name: (elements, of what, dtype)}: of n images, t tokens, p image tokens,
        a product of them, or "" for none; "run" is the pipeline's dtype
    conditions: what is held beside the prompt while it denoises, in the same way
    passes: what is made for each call of the denoiser
    rescalers: what is made for the latents that are decoded
    keeps_input: whether the latents of the last step but one are held until the image is there
    latents: the dtype in which they are kept
    optional: further parts, there where they are named; they stay on the device whatever is offloaded
    begins: whether there is a pipeline of its weights that begins with an image's latents
    read: the release of diffusers that it was read in
    floors: whether it makes the next smaller size where sides are no multiples of `stride`; others refuse these
    """

    about: str
    parts: Mapping[str, str]
    dtype: str
    width: int
    pooled: int
    tokens: int
    encoded: int
    steps: int
    pads: bool = True
    guides: bool = False
    rescales: bool = True
    asks: Mapping[str, Made] = {"text_input_ids": (1, "t", "int64")}
    conditions: Mapping[str, Made] = {}
    passes: Mapping[str, Made] = {}
    rescalers: Mapping[str, Made] = {}
    keeps_input: bool = False
    latents: str = "run"
    optional: Mapping[str, str] = {}
    begins: bool = True
    read: str = "0.33"
    floors: bool = False

    @property
    def class_name(self) -> str:
        """That of diffusers."""
        return self.about.split()[0]

    @property
    def denoiser(self) -> str:
        """Its role."""
        return "unet" if "unet" in self.parts else "transformer"

    def lengths(self, tokens: int) -> tuple[int, int, int]:
        """How a prompt is encoded: calls of a text encoder, tokens of each, and tokens that the denoiser sees."""
        encoded = self.encoded or tokens
        calls = -(-tokens // encoded)
        return calls, encoded, calls * encoded if self.pads else tokens

    @property
    def most_tokens(self) -> int:
        """Of a prompt, in diffusers: CLIP's, or T5's and Qwen's max_sequence_length."""
        return CLIP_TOKENS if self.encoded == CLIP_TOKENS else MOST_SEQUENCE

    @property
    def stride(self) -> int:
        """What the image's sides are multiples of, in pixels: transformers take latents in squares of two."""
        return VAE_STRIDE * (2 if self.denoiser == "transformer" else 1)

    @property
    def encoders(self) -> list[str]:
        return [role for role in self.parts if role.startswith("text_encoder")]


_FLUX = Pipeline(
    about="FluxPipeline of FLUX.1-dev",
    parts={"text_encoder": "clip-l-flux", "text_encoder_2": "t5-xxl", "transformer": "flux-transformer", "vae": "flux"},
    dtype="bfloat16", width=4096, pooled=768, tokens=512, encoded=0, steps=28,
    conditions={
        "text_ids": (3, "t", "run"), "latent_image_ids": (3, "p", "run"), "timestep": (1, "n", "run"),
        "guidance": (1, "", "float32"),
    },
    passes={"timestep / 1000": (1, "n", "run")}, floors=True,
)  # fmt: skip
_FLUX2 = Pipeline(
    about="Flux2Pipeline of FLUX.2-dev",
    parts={"text_encoder": "mistral3-flux2", "transformer": "flux2-transformer", "vae": "flux2"},
    dtype="bfloat16", width=15360, pooled=0, tokens=512, encoded=512, steps=50,
    asks={"input_ids": (1, "t", "int64"), "attention_mask": (1, "t", "int64")},
    conditions={
        "text_ids": (4, "nt", "int64"), "latent_ids": (4, "np", "int64"), "timestep": (1, "n", "run"),
        "guidance": (1, "", "float32"),
    },
    passes={"timestep / 1000": (1, "n", "run")}, rescalers={"latents_bn_std": (128, "", "run")}, keeps_input=True,
    begins=False, read="0.42", floors=True,
)  # fmt: skip
_KLEIN = _FLUX2._replace(
    about="Flux2KleinPipeline of FLUX.2-klein-4B", width=7680, steps=4,
    parts={**_FLUX2.parts, "text_encoder": "qwen3-4b-flux2", "transformer": "flux2-klein-transformer"},
    conditions={name: made for name, made in _FLUX2.conditions.items() if name != "guidance"},
)  # fmt: skip
PIPELINES = {
    "sd15": Pipeline(
        about="StableDiffusionPipeline of stable-diffusion-v1-5",
        parts={"text_encoder": "clip-l", "unet": "sd15-unet", "vae": "sd15"}, dtype="float16",
        width=768, pooled=0, tokens=77, encoded=77, steps=50, guides=True, rescales=False,
        optional={"safety_checker": "safety-checker"},
    ),
    "sdxl": Pipeline(
        about="StableDiffusionXLPipeline of stable-diffusion-xl-base-1.0",
        parts={"text_encoder": "clip-l-sdxl", "text_encoder_2": "openclip-g", "unet": "sdxl-unet", "vae": "sdxl"},
        dtype="float16", width=2048, pooled=1280, tokens=77, encoded=77, steps=50, guides=True,
        conditions={"add_time_ids": (6, "n", "run")},
    ),
    "flux": _FLUX,
    "flux-schnell": _FLUX._replace(
        about="FluxPipeline of FLUX.1-schnell",
        parts={**_FLUX.parts, "transformer": "flux-schnell-transformer"}, tokens=256, steps=4,
        conditions={name: made for name, made in _FLUX.conditions.items() if name != "guidance"},
    ),
    "zimage-turbo": Pipeline(
        about="ZImagePipeline of Z-Image-Turbo",
        parts={"text_encoder": "qwen3-4b", "transformer": "zimage-transformer", "vae": "zimage"},
        dtype="bfloat16", width=2560, pooled=0, tokens=77, encoded=512, steps=9, pads=False,
        conditions={"timestep": (1, "n", "float32")}, latents="float32", read="0.42",
    ),
    "flux2": _FLUX2,
    "flux2-klein": _KLEIN,
    "flux2-klein-9b": _KLEIN._replace(
        about="Flux2KleinPipeline of FLUX.2-klein-9B", width=12288,
        parts={**_KLEIN.parts, "text_encoder": "qwen3-8b-flux2", "transformer": "flux2-klein-9b-transformer"},
    ),
}  # fmt: skip


def known_pipeline(argument: str, name: Any) -> str:
    """The pipeline that is meant; a ValueError names the argument where there is none."""
    is_own = isinstance(name, str) and letters(name) in map(letters, PIPELINES)
    called = None if is_own else find_called(name)
    if called and called.pipeline:
        return called.pipeline
    vae = called.vae if called else next((vae for vae in _core.models() if letters(vae) == letters(str(name))), "")
    if vae and not is_own:
        known = f"only the VAE ({vae}) of this model is known, which vaemem fits and vaemem.predict answer for"
        raise ValueError(f"{argument}: want one of {', '.join(PIPELINES)}, got {name!r}: {known}")
    if called:
        raise ValueError(f"{argument}: {called.why}, got {name!r}")
    return meant(argument, name, PIPELINES, {})


# Arguments that a runtime has no use for.
WITHOUT = {
    "diffusers": ("flash", "cache_limit"),
    "sd.cpp": ("image", "cache_limit", "dtype", "vae_memory_limit", "cudnn_version", "torch_version"),
    "mlx": (
        "gpu", "host_memory", "calibrate", "time_limit", "types", "flash", "image", "steps", "prompt_tokens", "dtype",
        "cudnn_version", "torch_version",
    ),
}  # fmt: skip


def refuse(runtime: str, **given: Any) -> None:
    """ValueError where something is given, and not None or False, that the runtime has no use for."""
    for name, value in given.items():
        if value is not None and value is not False and name in WITHOUT[runtime]:
            why = f", which has no use for it, got {value!r}"
            raise ValueError(Message(f"{name}: want none with ", Named("runtime", runtime), why))


@functools.cache
def weights_of(component: str) -> tuple[Weight, ...]:
    """A component's weights, in the order in which ``Module.to`` moves them."""
    if component not in _core.models():
        return load_program(component).weights
    return tuple(Weight(*one) for one in _core.Trace.parameters(architecture(component), "diffusers"))


@functools.lru_cache(maxsize=256)
def vae_counts(
    model: str, op: str, dtype: str, height: int, width: int, batch: int = 1, tile: int = 0
) -> tuple[int, int, int]:
    """FLOPs of a VAE's run, those of them that are of its attention, and bytes that move, tiles included; sizes in
    pixels of the image."""
    trace = _core.Trace.vae(architecture(model), "diffusers", op, dtype, height, width, batch, tile)
    return trace.flops, trace.attended, trace.moved
