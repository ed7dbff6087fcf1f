"""Decide what is searched for a message: models, pipelines, operations, programs and cards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from vaemem import _core
from vaemem._common import OPS, meant
from vaemem._errors import ArgumentError
from vaemem.engine.configs import named_model
from vaemem.out_of_memory.clues import Clues
from vaemem.out_of_memory.messages import OomMessage
from vaemem.pipelines.components import PIPELINES, is_vae, known_pipeline
from vaemem.prediction.gpus import Gpu, coarse_names, find_gpu, gpu_names
from vaemem.prediction.runtimes import PROGRAM_NAMES, WAN, architecture, shipped_models

COMMON_CAPABILITIES = (89, 86, 120)  # compute capabilities of the commonest cards
USUAL_CARD = 24 << 30  # bytes of the assumed card if a message does not name its size
# VAEs with different tensors: SDXL's are SD1.5's and Playground's, FLUX.1's are SD3's, Z-Image's and CogView4's.
ALIKE = {"sdxl": "SD1.5, SDXL", "flux": "FLUX.1, SD3, Z-Image", "flux2": "FLUX.2", "qwen-image": "Qwen-Image"}


@dataclass(frozen=True)
class Scope:
    """What is searched: the named or given models' VAEs and pipelines, operations, programs, and cards; and the text's
    words. is_named: whether a model was named, so that no other is searched."""

    clues: Clues
    models: list[str]
    pipelines: list[str]
    ops: list[str]
    runtimes: list[str]
    cards: list[Gpu]
    is_named: bool


def find_scope(
    message: OomMessage, clues: Clues, model: str | None, op: str | None, gpu: str | None, runtime: str | None
) -> Scope:
    """Resolve the arguments. The text's own words take the place of arguments that were not given."""
    models, pipelines = [clues.model] if clues.model else [], list(clues.pipelines)
    if model is not None:
        with contextlib.suppress(ValueError):
            pipelines = [known_pipeline("model", model)]
            models = []
        if pipelines != [model] or not model.startswith("wan"):
            try:
                models = [name for name in [named_model("model", model)] if name in shipped_models() or not pipelines]
            except ArgumentError:
                if not models and (not pipelines or pipelines == list(clues.pipelines)):
                    raise
        vaes = [name for name in map(_vae_of, pipelines) if name]
        if not models or WAN in vaes:
            models = vaes[:1]
    models = [name for name in models if name != WAN]
    is_named = bool(models or pipelines)
    ops: list[str] = list(clues.ops) if op is None else [meant("op", op, OPS)]
    runtimes: list[str] = list(clues.programs) if runtime is None else [meant("runtime", runtime, PROGRAM_NAMES)]
    if gpu is not None:
        cards = [find_gpu(gpu)]
    elif clues.gpu and message.maker == "NVIDIA" and has_size(clues.gpu, message):
        cards = [clues.gpu]
    else:
        cards = _find_cards(message)
    if not is_named:
        models, pipelines = [*ALIKE], [*PIPELINES]
    return Scope(clues, models, pipelines, ops, runtimes, cards, is_named)


def _vae_of(pipeline: str) -> str:
    """Return the name of a pipeline's VAE; "" for one without a name, which only the pipeline's runs have."""
    vae = PIPELINES[pipeline].parts["vae"]
    name = architecture(vae)["name"] if is_vae(vae) else ""
    return name if name == WAN or name in _core.models() else ""


def has_size(card: Gpu, message: OomMessage) -> bool:
    """Return whether a card has the memory that a message names."""
    total = message.bytes.get("total")
    return total is None or abs(card.reported_memory - total) < total // 20


def _find_cards(message: OomMessage) -> list[Gpu]:
    """List cards with the memory that a message names, one of each compute capability; or the nearest."""
    size = message.bytes.get("total", USUAL_CARD)
    maker = message.maker or "NVIDIA"
    names = gpu_names() if maker == "NVIDIA" else coarse_names(maker)
    cards = [find_gpu(name) for name in names] or [find_gpu(f"apple {round(size / 2**30)} GB", max(size, 1 << 30))]
    least = min(abs(card.reported_memory - size) for card in cards)
    within = max(least, message.within.get("total", 0))
    near = [card for card in cards if abs(card.reported_memory - size) <= within]
    return sorted(
        {card.sm: card for card in reversed(near)}.values(),
        key=lambda card: (
            COMMON_CAPABILITIES.index(card.sm) if card.sm in COMMON_CAPABILITIES else len(COMMON_CAPABILITIES)
        ),
    )
