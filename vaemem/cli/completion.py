"""Complete arguments for Tab, beyond the choices that argparse knows. argcomplete calls this in the shell."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable

from vaemem._common import DTYPES, distinct, need
from vaemem.cli.flags import Later

_VAES, _PIPELINES, _VERSIONS = "_core:models", "pipelines.components:PIPELINES", "prediction.workspace:CUDNN_OF_TORCH"


def card_names() -> list[str]:
    """Every card as people write it: without its maker, if that names the same card."""
    from vaemem.prediction.gpus import coarse_names, gpu_names, known_gpu

    def short(name: str) -> str:
        bare = re.sub(r"^(NVIDIA|AMD|Intel|Apple) (GeForce |Radeon )?|^Tesla ", "", name)
        card = known_gpu(bare)
        return bare if card and card.name == name else name

    return [short(name) for name in (*gpu_names(), *coarse_names(""))]


# By the name of the argument: lists that are made when they are asked for, or words.
OFFERED: dict[str, tuple[Later | str, ...]] = {
    "model": (Later(_VAES),),
    "models": (Later(_VAES),),
    "pipeline": (Later(_PIPELINES),),
    "gpu": (Later("cli.completion:card_names"),),
    "offload": (Later("pipelines.offload_kinds:OFFLOADS"),),
    "vae": (Later("pipelines.offload_kinds:VAE_WAYS"),),
    "runtime": (Later("prediction.runtimes:PROGRAM_NAMES"), Later("pipelines.programs:PREDICTED_RUNTIMES")),
    "weights_dtype": DTYPES,
    "torch_version": (Later(_VERSIONS),),
    "allocator": ("native", "cudaMallocAsync", "expandable_segments:True"),
    "device": ("cpu", "cuda"),
    "link": tuple(f"PCIe {generation}.0 x16" for generation in (3, 4, 5)),
    "cpu": ("SSE4.2", "AVX", "AVX2", "no AVX2"),
}


def offer(action: argparse.Action, command: str) -> None:
    """Give an argument the method that argcomplete calls."""
    offered = OFFERED.get(action.dest)
    if not offered or action.choices:
        return
    if action.dest == "model" and command in ("formula", "fits"):
        offered = (Later(_PIPELINES), *offered)

    def complete(**_: object) -> list[str]:
        return distinct(name for one in offered for name in (one() if isinstance(one, Later) else [one]))

    action.completer = complete  # type: ignore[attr-defined]


def is_asked() -> bool:
    """Return whether the shell wants completions."""
    return "_ARGCOMPLETE" in os.environ


def answer(make: Callable[[tuple[str, ...]], argparse.ArgumentParser]) -> None:
    """Tell the shell what could come next, and end. make: gives the parser, with the flags of the commands named."""
    words = tuple(os.environ.get("COMP_LINE", "").split())
    need("argcomplete", "completion").autocomplete(make(words), validator=_begins)


def _begins(name: str, typed: str) -> bool:
    return name.casefold().startswith(typed.casefold())
