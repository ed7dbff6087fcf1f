"""ComfyUI's workflows as objects that vaemem/pytorch/pipeline_files.py records, like pipelines of diffusers.

A call runs ComfyUI's own code: CLIP's encode_from_tokens for the prompts, CFGGuider with Euler's steps, VAE's decode.
Models are components. They are on the card, and ComfyUI's manager loads nothing: which weights are there is placement.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from comfyui_calls import (
    ENOUGH,
    call_by_forward,
    call_by_forward_too,
    follow_chunks,
    follow_prefix,
    follow_tiles,
    let_read,
)
from comfyui_code import import_comfyui

from vaemem.engine.configs import config_of
from vaemem.prediction.runtimes import architecture
from vaemem.pytorch.loading import Undrawn, default_dtype

FOLDER = Path(__file__).parents[2] / "vaemem" / "data" / "workflows"


def read_row(name: str) -> dict[str, Any]:
    """Return a row of data/workflows. "like" names another row, whose columns it has besides its own."""
    row: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return {**(read_row(row.pop("like")) if "like" in row else {}), **row}


class Steps:
    """Takes the place of a scheduler: a step ends with a call of `step`."""

    def step(self) -> None:
        """Note the end of a step."""


class Tokens:
    """Stands for a tokenizer without files. A prompt has a given number of tokens, and those of the template and of
    pictures."""

    def __init__(self, row: Mapping[str, Any], length: int):
        self._lengths = {name: count or length for name, count in row["tokens_of"].items()}
        self._before, self._least = _template(row.get("template", 0)), row.get("least_tokens", 0)

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, images: Any = (), **_: Any) -> Any:
        seen = [{"type": "image", "data": image, "original_type": "image"} for image in images]
        lists = {name: [*self._before, *seen, *[1000] * length] for name, length in self._lengths.items()}
        return {name: [self._padded([(one, 1.0, 1) for one in tokens])] for name, tokens in lists.items()}

    def _padded(self, tokens: list[Any]) -> list[Any]:
        """Pad on the left. Recorders count what a call gets: the padding has no numbers of words, as tokens have."""
        return [(0, 1.0)] * (self._least - len(tokens)) + tokens


def _template(count: int) -> list[int]:
    """Return Qwen's tokens before a prompt: <|im_start|>, those of the system's message, <|im_start|>user and a new
    line."""
    return [151644, *[1000] * (count - 4), 151644, 872, 198] if count else []


class Workflow:
    """A workflow of ComfyUI.

    row: a file of data/workflows. Its columns:
        model: a class of comfy/supported_models.py, with its "config"
        denoisers: 2 if another one of that class does the second half of the steps, as with two sampler nodes in turn
        encoder: the text encoder's class, with "settings" and the type of its weights
        tokens_of: names of the lists of tokens that it gets, with their lengths, or 0 for the prompt's
        least_tokens: a prompt is padded on the left to this many tokens
        template: the number of tokens before each prompt, which the encoder removes, or those of the system's message
        conditions: added to the prompts
        vae, audio_vae: keys and shapes by which ComfyUI recognises them, with the "metadata" of their files; vae_name:
            the VAE's name here, if the C walk knows it
        nodes: classes of nodes that run before the sampler, each with names of what it "gives". It gets what has its
            parameters' names, or the names of "with"
        after: such nodes that run after the sampler
        picture: height and width of a picture that goes in; the call's, if they are 0
        reads: numbers that files of ComfyUI read from tensors in turn, which only a real run has
    """

    transformer: Any
    vae: Any

    def __init__(self, row: Mapping[str, Any]):
        comfy = _imported()
        self.row, self.scheduler = row, Steps()
        for name, numbers in row.get("reads", {}).items():
            let_read(resolve_name(name), numbers)
        roles = ["transformer", "transformer_2"][: row.get("denoisers", 1)]
        models = [getattr(comfy.supported_models, row["model"])(dict(row["config"])) for _ in roles]
        with Undrawn(), torch.device("meta"), default_dtype(torch.float32):
            for role, model in zip(roles, models, strict=True):
                model.set_inference_dtype(getattr(torch, row["dtype"]), None)
                setattr(self, role, model.get_model({}, device="meta"))
            kind, dtype = resolve_name(row["encoder"]), getattr(torch, row["encoder_dtype"])
            self.text_encoder = kind(device="meta", dtype=dtype, **_settings(row.get("settings", {})))
        made = ((role, row[role], row[f"{role}_dtype"]) for role in ("vae", "audio_vae") if role in row)
        self._vaes = {role: _make_vae(shapes, dtype, row.get("metadata")) for role, shapes, dtype in made}
        for role, vae in self._vaes.items():
            setattr(self, role, vae.first_stage_model)
            vae.first_stage_model = vae.patcher = None
        follow_chunks(self.vae)
        follow_tiles(self.vae)
        if "vae_name" in row:
            self.vae.config = config_of(architecture(row["vae_name"]))
        self.latent_format = self.transformer.latent_format
        self._roles = ["text_encoder", *roles, *self._vaes]
        self.model_cpu_offload_seq = "->".join(self._roles)
        for module, method in ((self.transformer, "apply_model"), (self.text_encoder, "encode_token_weights")):
            call_by_forward(type(module), method)
        call_by_forward_too(type(self.transformer.diffusion_model), "preprocess_text_embeds")
        for role in roles:
            follow_prefix(getattr(self, role))

    @property
    def components(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self._roles, "scheduler")}

    @property
    def decoder(self) -> Any:
        """ComfyUI's object around the VAE, which has its estimates."""
        return self._vaes["vae"]

    @property
    def usage(self) -> float:
        """The factor of the denoiser's estimate. The sampler packs videos with sound: they have one channel."""
        channels = self.latent_format.latent_channels if "audio_vae" in self._vaes else 1
        return float(self.transformer.memory_usage_factor) * channels

    def set_progress_bar_config(self, **_: Any) -> None:
        """ComfyUI shows none without its server."""

    def __call__(
        self, height: int, width: int, num_inference_steps: int, num_images_per_prompt: int = 1, num_frames: int = 1,
        max_sequence_length: int = 0, negative_prompt: str = "", joins: bool = False,
    ) -> Any:  # fmt: skip
        """Encode the prompts, denoise, decode. max_sequence_length: tokens of each prompt. With a negative prompt it
        guides."""
        guides = bool(negative_prompt)
        sides = [given or side for given, side in zip(self.row.get("picture", (0, 0)), (height, width), strict=True)]
        known = {
            "width": width, "height": height, "length": num_frames, "batch_size": num_images_per_prompt, "prompt": "",
            "image": torch.zeros(1, *sides, 3), "clip": self._clip(max_sequence_length),
            **{role: self._place_vae(role) for role in self._vaes},
        }  # fmt: skip
        nodes = [node for node in self.row.get("nodes", ()) if guides or "negative" not in node["gives"][:1]]
        if not any("prompt" in inspect.signature(resolve_name(node["node"]).execute).parameters for node in nodes):
            known["positive"] = known["negative"] = self._encode(known["clip"])
            if guides:
                known["negative"] = self._encode(known["clip"])
        known["latent"] = {"samples": self._latents(num_images_per_prompt, num_frames, height, width)}
        _run_nodes(nodes, known)
        prompts = [known["positive"], known["negative"]] if guides else [known["positive"]]
        known["latent"] = {"samples": self._sample(known["latent"]["samples"], prompts, num_inference_steps, joins)}
        _run_nodes(self.row.get("after", ()), known)
        samples = known["latent"]["samples"]
        first, *others = samples.unbind() if samples.is_nested else (samples,)
        return known["vae"].decode(first), [known["audio_vae"].decode(one) for one in others]

    def steps_before_change(self, steps: int) -> int:
        """Return how many steps the first denoiser does."""
        return -(-steps // sum(role.startswith("transformer") for role in self._roles))

    def _clip(self, length: int) -> Any:
        clip = _imported().sd.CLIP(no_init=True)
        clip.cond_stage_model, clip.patcher = self.text_encoder, _patcher(self.text_encoder)
        clip.layer_idx, clip.use_clip_schedule, clip.apply_hooks_to_conds = None, False, None
        clip.tokenizer, clip.tokenizer_options = Tokens(self.row, length), {}
        return clip

    def _encode(self, clip: Any) -> Any:
        return clip.encode_from_tokens_scheduled(clip.tokenize(""), add_dict=dict(self.row.get("conditions", {})))

    def _place_vae(self, role: str) -> Any:
        vae = copy.copy(self._vaes[role])
        vae.first_stage_model = getattr(self, role)
        vae.patcher, vae.device = _patcher(vae.first_stage_model), torch.device("cuda:0")
        return vae

    def _sample(self, latents: Any, prompts: Sequence[Any], steps: int, joins: bool) -> Any:
        """Run the sampler's nodes, with Euler's steps, one for each denoiser. They get and return what is in the host's
        memory."""
        comfy, sigmas = _imported(), torch.linspace(1, 0, steps + 1)
        comfy.samplers.can_concat_cond = lambda one, other: joins or one is other
        roles = [role for role in self._roles if role.startswith("transformer")]
        cut, prepare = self.steps_before_change(steps), functools.partial(comfy.sample.prepare_noise, seed=0)
        for role, part in zip(roles, (sigmas[: cut + 1], sigmas[cut:]), strict=False):
            if len(part) > 1:
                guider = comfy.samplers.CFGGuider(_patcher(getattr(self, role)))
                guider.set_conds(prompts[0], prompts[-1])
                guider.set_cfg(4.0 if len(prompts) > 1 else 1.0)
                latents = guider.sample(
                    prepare(latents), latents, comfy.samplers.ksampler("euler"), part, disable_pbar=True, seed=0,
                    callback=lambda *_: self.scheduler.step(),
                ).to(torch.device("cpu"))  # fmt: skip
            prepare = comfy.sample.prepare_empty_noise
        return latents

    def _latents(self, images: int, frames: int, height: int, width: int) -> Any:
        """Return empty latents in the host's memory, as the Empty Latent nodes make them."""
        kind, side = self.latent_format, self.latent_format.spacial_downscale_ratio
        sizes: tuple[int, ...] = (height // side, width // side)
        if kind.latent_dimensions == 3:
            sizes = (frames - 1) // kind.temporal_downscale_ratio + 1, *sizes
        return torch.zeros(images, kind.latent_channels, *sizes)


def _make_vae(shapes: Mapping[str, Sequence[int]], dtype: str, metadata: Any = None) -> Any:
    """Let ComfyUI make the VAE that has these weights. metadata: the config in the file of the weights"""
    about = {"config": json.dumps(metadata)} if metadata else None
    with Undrawn(), torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
        vae = _imported().sd.VAE(sd=state, device=torch.device("cpu"), dtype=getattr(torch, dtype), metadata=about)
    vae.first_stage_model = vae.first_stage_model.to(getattr(torch, dtype))
    return vae


def _run_nodes(nodes: Sequence[Mapping[str, Any]], known: dict[str, Any]) -> None:
    """Run nodes. They get what is known by name, and what they give is known then."""
    for node in nodes:
        execute = resolve_name(node["node"]).execute
        given = {name: known[name] for name in inspect.signature(execute).parameters if name in known}
        given |= {name: known.get(value, value) for name, value in node.get("with", {}).items()}
        known |= zip(node["gives"], execute(**given).args, strict=False)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder's settings, with types and classes in place of their names. A list names a function, whose
    result it stands for, and what that gets."""

    def read(name: str, value: Any) -> Any:
        if isinstance(value, list):
            make, *of = map(resolve_name, value)
            return make(*of)
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
    manager.get_total_memory = lambda *_, **__: ENOUGH
    manager.get_free_memory = lambda *_, torch_free_too=False: (ENOUGH, 0) if torch_free_too else ENOUGH
    return comfy
