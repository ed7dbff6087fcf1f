"""diffusers' pipelines of full size on the device "meta". The tokenizer and the scheduler are stand-ins: the real ones
look at what tensors hold, which is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers.image_processor import VaeImageProcessor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "recording"))

from modules import MODULES, make
from torch_vaes import OneFrame, diffusers_vae

from vaemem import _core
from vaemem.pipelines.components import PIPELINES


class Tokenizer:
    """Pads to `max_length`, by default its own. Other paddings give a few tokens."""

    model_max_length, unpadded = 77, 5
    added_tokens_encoder = ()

    def __call__(self, prompt, padding=None, max_length=77, **_):
        length = max_length if padding == "max_length" else self.unpadded
        count = 1 if isinstance(prompt, str) else len(prompt)
        ids = torch.zeros(count, length, dtype=torch.int64)
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def apply_chat_template(self, messages, tokenize=False, **kwargs):
        return self([""] * len(messages), **kwargs) if tokenize else messages[0]["content"]

    def tokenize(self, prompt):
        return [prompt]


class Images(VaeImageProcessor):
    """Takes pictures of the right size as they are; the real one looks at what they hold."""

    def preprocess(self, image, *_, **__):
        return image

    def resize(self, image, *_, **__):
        return image


class Scheduler:
    """As Euler's for flow matching, in the two tensors that a step makes."""

    order, init_noise_sigma = 1, 1.0

    def __init__(self):
        self.config = {}

    def set_timesteps(self, steps=None, device=None, sigmas=None, mu=None):
        count = steps if sigmas is None else len(sigmas)
        self.timesteps = torch.arange(count, device=device, dtype=torch.float32)

    def set_begin_index(self, _):
        pass

    def scale_model_input(self, sample, _):
        return sample

    def add_noise(self, sample, noise, _):
        return noise + sample

    def scale_noise(self, sample, _, noise):
        return 0.1 * noise + 0.9 * sample

    def step(self, noise, _, sample, return_dict=False):
        return ((sample.to(torch.float32) + 0.1 * noise).to(noise.dtype),)


def built(name):
    """A module of the pipeline's components, and the pipeline that calls them, both on the device "meta"."""
    kind = PIPELINES[name]
    dtype = getattr(torch, kind.dtype)
    vae = diffusers_vae(_core.models()[kind.parts["vae"]], dtype)
    vae = vae.vae if isinstance(vae, OneFrame) else vae
    parts = {role: vae if role == "vae" else make(MODULES[part], dtype) for role, part in kind.parts.items()}
    none = {"tokenizer": None, "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)}
    if name in ("sd15", "sd15-controlnet", "sd21"):
        rest = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = getattr(diffusers, kind.class_name)(**parts, **none, **rest)
    elif name in ("sdxl", "sdxl-controlnet"):
        pipeline = getattr(diffusers, kind.class_name)(**parts, **none, tokenizer_2=None, add_watermarker=False)
    elif name == "sdxl-refiner":
        parts["vae"].register_to_config(force_upcast=False)  # it would change weights' dtype, which is not recorded
        none |= {"text_encoder": None, "tokenizer_2": None, "requires_aesthetics_score": True}
        pipeline = diffusers.StableDiffusionXLImg2ImgPipeline(**parts, **none, add_watermarker=False)
        pipeline.image_processor = Images()
    elif name.startswith("flux2"):
        own = {} if name == "flux2" else {"is_distilled": "base" not in name}
        pipeline = getattr(diffusers, kind.class_name)(**parts, **none, **own)
    elif name == "chroma":
        parts["vae"].register_to_config(shift_factor=0.1159)
        pipeline = diffusers.ChromaPipeline(**parts, **none)
    elif name.startswith("sd3"):
        parts["vae"].register_to_config(shift_factor=0.0609)
        pipeline = diffusers.StableDiffusion3Pipeline(**parts, **none, tokenizer_2=None, tokenizer_3=None)
    elif name == "pixart-sigma":
        pipeline = diffusers.PixArtSigmaPipeline(**parts, **none)
    else:
        parts["vae"].register_to_config(shift_factor=0.1159)
        pipeline = getattr(diffusers, kind.class_name)(**parts, **none, tokenizer_2=None)
        pipeline.image_processor = pipeline.mask_processor = Images()
    pipeline.control_image_processor = Images()
    pipeline.tokenizer = pipeline.tokenizer_2 = pipeline.tokenizer_3 = Tokenizer()
    pipeline.scheduler = Scheduler()
    pipeline.set_progress_bar_config(disable=True)
    return torch.nn.ModuleDict(parts).eval(), pipeline
