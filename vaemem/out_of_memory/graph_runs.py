"""Find the graph of stable-diffusion.cpp with the bytes of a message: its compute buffer, or a product's copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from vaemem._common import MIB, grouped
from vaemem.out_of_memory.candidates import Match
from vaemem.out_of_memory.message_kinds import POOL
from vaemem.out_of_memory.messages import OomMessage
from vaemem.out_of_memory.scope import Scope
from vaemem.out_of_memory.sizes import Areas, Size, list_sizes
from vaemem.sdcpp.graphs import LATENT_CHANNELS, graph

_MOST_SIDE = 4096  # pixels of a square that is tried
_RANKS = range(4)  # of sizes: common ones, multiples of 64, and multiples of 8 in usual shapes
_CLOSE = 1000  # another version's buffer may differ by a thousandth
_WHOSE = re.compile(
    r"([\w.-]{1,40}) (?:params backend|compute) buffer|([\w.-]{1,40}): failed to allocate the compute buffer"
)


def name_component(text: str, is_weights: bool) -> str:
    """Return the component that a log names last before its buffer fails; "" if it names none."""
    found = [one[1] or one[2] for one in _WHOSE.finditer(text) if ("params" in one[0]) == is_weights]
    found = [name for name in found if name not in ("the", "alloc", "prepared")]
    return found[-1] if found else ""


def find_graphs(message: OomMessage, scope: Scope, component: str) -> list[Match]:
    """List runs of a component with a buffer of this size, the commonest first. component: "unet", or a VAE's for any
    other name."""
    size, is_pool = message.bytes["requested"], message.kind.size == POOL
    models = [name for name in scope.models if name in LATENT_CHANNELS] if scope.is_named else ["sdxl", "flux"]
    found: list[tuple[int, int, Match]] = []
    for run, options in _runs("unet" in component, models, scope.ops):
        op, name, what = run
        if is_pool and options.get("conv_direct"):
            continue
        areas = _solve(size, is_pool, what, options)
        for rank in _RANKS if areas else ():
            sizes = [one for one in list_sizes(rank, areas) if not (one[0] % _step(what) or one[1] % _step(what))]
            for alike in grouped(sizes, lambda one: one[0] * one[1]).values():
                needed = _needs(is_pool, what, alike[0], options)
                within = size // _CLOSE if rank < 2 else message.within["requested"]  # rare sizes must fit
                if abs(needed - size) <= within:
                    how = "sd.cpp" + "".join(f" {flag}" for key, flag in _FLAGS.items() if options.get(key))
                    tensor = "a product's copy in the pool" if is_pool else "the compute buffer"
                    (height, width), *others = alike
                    match = Match(
                        name, op, height, width, "float32", how, tensor, needed, None, True, also=tuple(others)
                    )  # fmt: skip
                    found.append((rank, abs(needed - size), match))
            if found and found[-1][0] == rank:
                break
    return [match for _, _, match in sorted(found, key=lambda one: one[:2])]


_FLAGS = {"conv_direct": "--vae-conv-direct", "flash": "--diffusion-fa"}


def _runs(
    is_unet: bool, models: Sequence[str], ops: Sequence[str]
) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield ((op, model, component), options) of graphs."""
    if is_unet:
        for name in ("sdxl", "sd15"):
            for flash in (False, True):
                if name in models:
                    yield ("denoise", name, f"unet-{name}"), {"flash": flash}
        return
    for name in models:
        for op in ops:
            for direct in (False, True):
                yield (op, name, f"vae-{op}r"), {"model": name, "conv_direct": direct}


def _step(component: str) -> int:
    return 8 if component.startswith("vae") else 64


def _needs(is_pool: bool, component: str, size: Size, options: dict[str, Any]) -> int:
    simulated = graph(component, *size, **options)
    return simulated.pool if is_pool else simulated.buffer


def _solve(size: int, is_pool: bool, component: str, options: dict[str, Any]) -> Areas:
    """Return the range of areas, between two squares, in which a component needs these bytes; empty if none does."""
    step = max(_step(component), 32)
    low, high = 1, _MOST_SIDE // step
    if size < 8 * MIB or _needs(is_pool, component, (_MOST_SIDE, _MOST_SIDE), options) < size * (1 - 1 / _CLOSE):
        return []
    while low < high:
        middle = (low + high) // 2
        if _needs(is_pool, component, (middle * step, middle * step), options) < size * (1 - 1 / _CLOSE):
            low = middle + 1
        else:
            high = middle
    return [(((low - 1) * step) ** 2, (low * step) ** 2)]
