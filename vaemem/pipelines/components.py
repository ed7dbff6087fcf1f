"""The components of diffusers' pipelines, and what each pipeline says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vaemem._common import Message, Named

CLIPS = ("clip-l", "clip-l-sdxl", "clip-l-flux", "openclip-g")
CLIP_TOKENS = 77
VAE_STRIDE = 8  # pixels a side of one pixel of a latent


class Pipeline(NamedTuple):
    """A pipeline of diffusers.

    about: the class, and whose weights
    parts: what each role is played by, in the order of ``model_cpu_offload_seq``: a recorded module, or a VAE's name
    dtype: the one that it is usually run in
    width, pooled: channels of the prompt's embeddings, and of the pooled ones (0: none)
    tokens: of a prompt by default
    encoded: what prompts are padded to for the text encoder, longer ones in several calls; 0 where that is said by the
        call (FLUX's max_sequence_length)
    pads: whether the denoiser sees the padded prompt
    guides: whether guidance takes a second image through the denoiser (else it is an input of it, or there is none)
    rescales: whether the latents that are decoded take the place of the others
    steps: by default
    conditions: what is held beside the prompt while it denoises, {name: (elements, dtype)}: a polynomial in n images, t
        tokens and p image tokens; "run" is the pipeline's dtype
    passes: what is made for each call of the denoiser, in the same way
    latents: the dtype in which they are kept
    optional: further parts, there where they are named; they stay on the device whatever is offloaded
    """

    about: str
    parts: Mapping[str, str]
    dtype: str
    width: int
    pooled: int
    tokens: int
    encoded: int
    pads: bool
    guides: bool
    rescales: bool
    steps: int
    conditions: Mapping[str, tuple[str, str]] = {}
    passes: Mapping[str, tuple[str, str]] = {}
    latents: str = "run"
    optional: Mapping[str, str] = {}

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
    def pools(self) -> str:
        """The text encoder whose pooled output is kept: FLUX's first, SDXL's second."""
        return self.encoders[-1 if self.guides else 0]

    @property
    def stride(self) -> int:
        """What the image's sides are multiples of, in pixels: transformers take latents in squares of two."""
        return VAE_STRIDE * (2 if self.denoiser == "transformer" else 1)

    @property
    def encoders(self) -> list[str]:
        return [role for role in self.parts if role.startswith("text_encoder")]


_FLUX = {
    "text_ids": ("3 t", "run"), "latent_image_ids": ("3 p", "run"),
    "timestep": ("1 n", "run"),
}  # fmt: skip
_PASSED = {"timestep / 1000": ("1 n", "run")}
PIPELINES = {
    "sd15": Pipeline(
        about="StableDiffusionPipeline of stable-diffusion-v1-5",
        parts={"text_encoder": "clip-l", "unet": "sd15-unet", "vae": "sd15"}, dtype="float16",
        width=768, pooled=0, tokens=77, encoded=77, pads=True, guides=True, rescales=False, steps=50,
        optional={"safety_checker": "safety-checker"},
    ),
    "sdxl": Pipeline(
        about="StableDiffusionXLPipeline of stable-diffusion-xl-base-1.0",
        parts={"text_encoder": "clip-l-sdxl", "text_encoder_2": "openclip-g", "unet": "sdxl-unet", "vae": "sdxl"},
        dtype="float16", width=2048, pooled=1280, tokens=77, encoded=77, pads=True, guides=True, rescales=True,
        steps=50, conditions={"add_time_ids": ("6 n", "run")},
    ),
    "flux": Pipeline(
        about="FluxPipeline of FLUX.1-dev",
        parts={
            "text_encoder": "clip-l-flux", "text_encoder_2": "t5-xxl", "transformer": "flux-transformer", "vae": "flux",
        },
        dtype="bfloat16", width=4096, pooled=768, tokens=512, encoded=0, pads=True, guides=False, rescales=True,
        steps=28, conditions={**_FLUX, "guidance": ("1", "float32")}, passes=_PASSED,
    ),
    "flux-schnell": Pipeline(
        about="FluxPipeline of FLUX.1-schnell",
        parts={
            "text_encoder": "clip-l-flux", "text_encoder_2": "t5-xxl", "transformer": "flux-schnell-transformer",
            "vae": "flux",
        },
        dtype="bfloat16", width=4096, pooled=768, tokens=256, encoded=0, pads=True, guides=False, rescales=True,
        steps=4, conditions=_FLUX, passes=_PASSED,
    ),
    "zimage-turbo": Pipeline(
        about="ZImagePipeline of Z-Image-Turbo",
        parts={"text_encoder": "qwen3-4b", "transformer": "zimage-transformer", "vae": "zimage"},
        dtype="bfloat16", width=2560, pooled=0, tokens=77, encoded=512, pads=False, guides=False, rescales=True,
        steps=9, conditions={"timestep": ("1 n", "float32")}, latents="float32",
    ),
}  # fmt: skip
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
    """ValueError where something is given, and not None, that the runtime has no use for."""
    for name, value in given.items():
        if value is not None and name in WITHOUT[runtime]:
            with_runtime = Named("runtime", runtime)
            raise ValueError(
                Message(f"{name}: want none with ", with_runtime, f", which has no use for it, got {value!r}")
            )
