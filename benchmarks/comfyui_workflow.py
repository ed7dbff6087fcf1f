"""ComfyUI's workflows as objects that vaemem/pytorch/pipeline_files.py records, like pipelines of diffusers.

A call runs ComfyUI's own code: CLIP's encode_from_tokens for the prompts, CFGGuider with Euler's steps, VAE's decode.
Models are components. They are on the card, and ComfyUI's manager loads nothing: which weights are there is placement.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from comfyui_code import import_comfyui

from vaemem.engine.configs import config_of
from vaemem.prediction.runtimes import architecture
from vaemem.pytorch.loading import Undrawn, default_dtype

FOLDER = Path(__file__).parent.parent / "vaemem" / "data" / "workflows"
ENOUGH = 1 << 60  # bytes of free memory


def read_row(name: str) -> dict[str, Any]:
    """Return a row of data/workflows. "like" names another row, whose columns it has besides its own."""
    row: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return {**(read_row(row.pop("like")) if "like" in row else {}), **row}


class Steps:
    """Takes the place of a scheduler: a step ends with a call of `step`."""

    def step(self) -> None:
        """Note the end of a step."""


class Workflow:
    """A workflow of ComfyUI.

    row: a file of data/workflows. "model" is a class of comfy/supported_models.py, with its "config"; "encoder" is the
        text encoder's class, with "settings" and the type of its weights; "tokens_of" names the lists of tokens that it
        gets, with their lengths, or 0 for the prompt's; "template" counts the tokens before each prompt that the
        encoder removes; "conditions" are added to the prompts; "vae" has keys and shapes by which ComfyUI recognises
        the VAE, and "vae_name" its name here, if the C walk knows it
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, row: Mapping[str, Any]):
        comfy = _imported()
        self.row, self.scheduler = row, Steps()
        with Undrawn(), torch.device("meta"):
            model = getattr(comfy.supported_models, row["model"])(dict(row["config"]))
            model.set_inference_dtype(getattr(torch, row["dtype"]), None)
            with default_dtype(torch.float32):
                self.transformer = model.get_model({}, device="meta")
                kind = resolve_name(row["encoder"])
                dtype = getattr(torch, row["encoder_dtype"])
                self.text_encoder = kind(device="meta", dtype=dtype, **_settings(row.get("settings", {})))
            state = {name: torch.empty(shape) for name, shape in row["vae"].items()}
            self._vae = comfy.sd.VAE(sd=state, device=torch.device("cpu"), dtype=getattr(torch, row["vae_dtype"]))
        self.vae = self._vae.first_stage_model.to(getattr(torch, row["vae_dtype"]))
        self._vae.first_stage_model = self._vae.patcher = None
        if "vae_name" in row:
            self.vae.config = config_of(architecture(row["vae_name"]))
        self.latent_format = self.transformer.latent_format
        for module, method in ((self.transformer, "apply_model"), (self.text_encoder, "encode_token_weights")):
            _call_by_forward(type(module), method)

    @property
    def components(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("text_encoder", "transformer", "vae", "scheduler")}

    def set_progress_bar_config(self, **_: Any) -> None:
        """ComfyUI shows none without its server."""

    def __call__(
        self, height: int, width: int, num_inference_steps: int, num_images_per_prompt: int = 1, num_frames: int = 1,
        max_sequence_length: int = 0, negative_prompt: str = "", joins: bool = False,
    ) -> Any:  # fmt: skip
        """Encode the prompts, denoise, decode. max_sequence_length: tokens of each prompt. With a negative prompt it
        guides."""
        comfy, card, host = _imported(), torch.device("cuda:0"), torch.device("cpu")
        clip = comfy.sd.CLIP(no_init=True)
        clip.cond_stage_model, clip.patcher = self.text_encoder, _patcher(self.text_encoder)
        clip.layer_idx, clip.use_clip_schedule, clip.apply_hooks_to_conds = None, False, None
        lengths = {name: length or max_sequence_length for name, length in self.row["tokens_of"].items()}
        before = _template(self.row.get("template", 0))
        tokens = {name: [[(one, 1.0) for one in (*before, *[1000] * length)]] for name, length in lengths.items()}
        prompts = [
            clip.encode_from_tokens_scheduled(tokens, add_dict=dict(self.row.get("conditions", {})))
            for _ in range(2 if negative_prompt else 1)
        ]
        latents = self._latents(num_images_per_prompt, num_frames, height, width)
        samples = self._sample(latents, prompts, num_inference_steps, joins)
        vae = copy.copy(self._vae)
        vae.first_stage_model, vae.patcher, vae.device = self.vae, _patcher(self.vae), card
        return vae.decode(samples.to(host))

    def _sample(self, latents: Any, prompts: Sequence[Any], steps: int, joins: bool) -> Any:
        """Run the sampler's node, with Euler's steps."""
        comfy = _imported()
        comfy.samplers.can_concat_cond = lambda one, other: joins or one is other
        guider = comfy.samplers.CFGGuider(_patcher(self.transformer))
        guider.set_conds(prompts[0], prompts[-1])
        guider.set_cfg(4.0 if len(prompts) > 1 else 1.0)
        return guider.sample(
            comfy.sample.prepare_noise(latents, 0), latents, comfy.samplers.ksampler("euler"),
            torch.linspace(1, 0, steps + 1), disable_pbar=True, callback=lambda *_: self.scheduler.step(),
        )  # fmt: skip

    def _latents(self, images: int, frames: int, height: int, width: int) -> Any:
        """Return empty latents in the host's memory, as the Empty Latent nodes make them."""
        kind, side = self.latent_format, self.latent_format.spacial_downscale_ratio
        sizes = height // side, width // side
        if kind.latent_dimensions == 3:
            sizes = (frames - 1) // kind.temporal_downscale_ratio + 1, *sizes
        return torch.zeros(images, kind.latent_channels, *sizes)


def _template(count: int) -> list[int]:
    """Return Qwen's tokens before a prompt: <|im_start|>, those of the system's message, <|im_start|>user and a new
    line."""
    return [151644, *[1000] * (count - 4), 151644, 872, 198] if count else []


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder's settings, with types and classes in place of their names."""

    def read(name: str, value: Any) -> Any:
        if name.startswith("dtype"):
            return getattr(torch, value)
        return resolve_name(value) if isinstance(value, str) and ":" in value else value

    return {name: read(name, value) for name, value in given.items()}


def _patcher(model: Any) -> Any:
    card, host = torch.device("cuda:0"), torch.device("cpu")
    return _imported().model_patcher.ModelPatcher(model, load_device=card, offload_device=host, size=1)


@functools.cache
def _imported() -> Any:
    manager = import_comfyui()
    import comfy.model_patcher
    import comfy.sample
    import comfy.samplers
    import comfy.sd
    import comfy.supported_models
    import comfy.supported_models_base

    logging.disable()
    comfy.supported_models_base.BASE.__deepcopy__ = lambda self, memo: self
    manager.load_models_gpu = lambda *_, **__: None
    manager.get_free_memory = lambda *_, torch_free_too=False: (ENOUGH, 0) if torch_free_too else ENOUGH
    return comfy


def _call_by_forward(kind: Any, method: str) -> None:
    """Let a method call the module's forward, which recorders follow, and forward run the method's code."""
    if getattr(kind, method).__name__ == method:
        kind.forward = getattr(kind, method)
        setattr(kind, method, lambda self, *args, **kwargs: self.forward(*args, **kwargs))
