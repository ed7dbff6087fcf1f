"""Decide for diffusers' ComponentsManager which components leave the card before another one runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vaemem._errors import ArgumentTypeError
from vaemem.engine.limits import parse_size
from vaemem.pipelines.by_diffusers import PipelinePrediction
from vaemem.pipelines.pipeline_parts import PLACES
from vaemem.pipelines.recorded_modules import load_program
from vaemem.prediction.recording_files import is_recorded_component
from vaemem.pytorch.free_memory import count_bytes, find_free
from vaemem.pytorch.loading import known_components

_VAE = "Autoencoder"  # the start of the names of autoencoders' classes
MOST_SETS = 4096  # kept while sets of components are summed: all sets of 12 components


class OffloadStrategy:
    """An ``offload_strategy`` for ``enable_auto_cpu_offload`` of diffusers 0.42's ComponentsManager.

    Before a component runs, it decides which of the others leave the card. The component needs its own bytes and the
    bytes that the prediction gives to its phase besides the weights. Among all sets of components that make enough room
    it chooses the set with the fewest bytes. If no set does, all leave. With more than 12 components on the card it
    leaves out sets that are nearly as large as others, so a choice takes at most some milliseconds for each component.

    Parameters
    ----------
    request : PipelinePrediction
        The answer of `vaemem.predict_pipeline` for the pictures to make.
    margin : int or str
        Bytes to keep free while a component runs that the request does not know, such as a ControlNet. The default is
        that of diffusers' own strategy, which keeps it free for each component.

    Raises
    ------
    ValueError, TypeError
        The request is another object, or the margin is no size.

    Notes
    -----
    Components are recognised by class: a text encoder of transformers', a denoiser, an autoencoder. The manager names
    components by its own ids. Memory that PyTorch holds and does not use counts as free. No GPU has run this: tests
    fake the devices.

    Examples
    --------
    >>> import diffusers
    >>> from vaemem import predict_pipeline
    >>> strategy = OffloadStrategy(predict_pipeline("sdxl", 1024, 1024, gpu="RTX 4060"))
    >>> round(strategy.working_bytes(diffusers.AutoencoderKL()) / 2**30, 1)  # of a decode in float32
    5.8
    >>> manager = diffusers.ComponentsManager()  # doctest: +SKIP
    >>> manager.enable_auto_cpu_offload("cuda", offload_strategy=strategy)  # doctest: +SKIP
    """

    def __init__(self, request: PipelinePrediction, *, margin: int | str = "3 GB"):
        if not isinstance(request, PipelinePrediction):
            raise ArgumentTypeError("request", "an answer of predict_pipeline for diffusers", type(request).__name__)
        self._margin, asked = parse_size("margin", margin, least=0), request.request
        # Parts that stay on the card are missing from its free memory already, and the manager may move them.
        parts = tuple(
            replace(part, place=PLACES[1] if part.place == PLACES[2] else part.place)
            for part in asked.parts
            if part.role in asked.pipeline.parts
        )
        asked = replace(asked, parts=parts)
        alone = PipelinePrediction(asked.run_with("model", asked.vae, asked.vae_limit or None))
        phases = dict[str, Any]()  # of a kind the one that takes most
        for phase in alone.phases:
            phases[phase.kind] = max(phase, phases.get(phase.kind, phase), key=lambda one: one.total)
        kind, stored = asked.pipeline, {part.role: part.nbytes for part in asked.parts}
        denoise, encode = phases["denoise"], phases["encode prompt"]
        of_vae = [phases[name].total for name in ("encode image", "decode") if name in phases]
        # A converted VAE's second copy counts as work. Text encoders share a phase.
        self._working = {
            **{_class_name(kind.parts[role]): encode.added for role in kind.encoders},
            _class_name(kind.parts[kind.denoiser]): denoise.total - stored[kind.denoiser],
            _VAE: max(of_vae) - stored["vae"],
        }

    def working_bytes(self, model: torch.nn.Module) -> int:
        """Return the bytes that a component needs while it runs, besides its weights as they are loaded."""
        names = [_VAE if one.__name__.startswith(_VAE) else one.__name__ for one in type(model).__mro__]
        return next((self._working[name] for name in names if name in self._working), self._margin)

    def __call__(
        self, hooks: Sequence[Any], model_id: str, model: torch.nn.Module, execution_device: torch.device
    ) -> list[Any]:
        """Choose the hooks whose components leave; called by diffusers."""
        lacking = count_bytes(model) + self.working_bytes(model) - find_free(execution_device)
        if lacking <= 0:
            return []
        return choose_fewest([(count_bytes(hook.model), hook) for hook in hooks], lacking)


def choose_fewest(sizes: Sequence[tuple[int, Any]], lacking: int) -> list[Any]:
    """Choose the items with the fewest bytes together that reach `lacking`; all items if none do.

    Keep the sums below `lacking`, and the least sum above it. If there are more than `MOST_SETS`, keep only the largest
    of the sums that differ by less than this part of `lacking`.

    Examples
    --------
    >>> choose_fewest([(5, "a"), (3, "b"), (4, "c")], 7)
    ['b', 'c']
    """
    sets: dict[int, Any] = {0: None}  # by their bytes: the last item, and the set without it
    for size, item in sizes:
        sets |= {total + size: (item, rest) for total, rest in sets.items() if total + size not in sets}
        enough = min((total for total in sets if total >= lacking), default=None)
        less = sorted(total for total in sets if total < lacking)
        if len(less) > MOST_SETS:
            less = [*{total * MOST_SETS // lacking: total for total in less}.values()]
        sets = {total: sets[total] for total in ([*less] if enough is None else [*less, enough])}
    chosen, found = list[Any](), sets[max(sets)]  # enough, if any set is
    while found:
        item, found = found
        chosen.insert(0, item)
    return chosen


def _class_name(component: str) -> str:
    """Return the class of a denoiser or a text encoder."""
    if is_recorded_component(component):
        return load_program(component).about
    class_name, *_ = known_components()[component]
    return str(class_name.rpartition(":")[2])
