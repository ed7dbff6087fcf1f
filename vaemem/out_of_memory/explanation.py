"""`explain`: which run and which tensor an out-of-memory message is about, and what would have fitted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vaemem._common import MIB, OPS, meant
from vaemem._render import Block, Bullets, Sheet, Shown, Sizer, Ways
from vaemem._types import Op, Program
from vaemem.engine.configs import named_model
from vaemem.out_of_memory.messages import (
    Said,
    buffer_bytes,
    host_bytes,
    loads_weights,
    models_said,
    notes_on,
    ops_said,
    parts_said,
    pool_bytes,
    programs_said,
    read_message,
)
from vaemem.out_of_memory.parts import A_VAE, NOT_EXAMINED, OtherTensor, find_parts
from vaemem.out_of_memory.refusals import AGREES
from vaemem.out_of_memory.runs import ALIKE, TELLING, Found, Match, find_runs, rounded
from vaemem.out_of_memory.sizes import MADE_SIZES
from vaemem.prediction.gpus import Gpu, coarse_names, find_gpu, gpu_names
from vaemem.prediction.predict import Prediction
from vaemem.prediction.runtimes import PROGRAM_NAMES
from vaemem.sdcpp.graphs import LATENT_CHANNELS, SDCPP_VERSION, graph

MOST_MATCHES = 5
MANY = (89, 86, 120)  # compute capabilities of the cards that most people have
USUAL_CARD = 24 << 30  # bytes: of the card that is supposed where a message does not say its size


class Explanation(Shown):
    """What `explain` gives. Printing it says which run it was, and what would have fitted. Sizes in bytes.

    Attributes
    ----------
    said : dict of str to int
        What the message says: requested, total, free, allocated, cached.
    matches : tuple of Match
        The likeliest first: those that run out there when they are played, then by how usual the size is.
    notes : tuple of str
        What follows from the message beside.
    prediction : Prediction or None
        The likeliest run on such a card, with what else was held; `Prediction.would_fit` is what would have fitted.
    parts : tuple of OtherTensor
        Weights and scores of denoisers and text encoders that have as many bytes.
    is_told : bool
        Whether the message tells the first match from all others: it alone agrees best with all figures.
    """

    def __init__(
        self, said: dict[str, int], matches: Sequence[Match], notes: Sequence[str], prediction: Prediction | None,
        parts: Sequence[OtherTensor] = (), is_told: bool = False,
    ):  # fmt: skip
        self.said, self.matches, self.notes, self.prediction = said, tuple(matches), tuple(notes), prediction
        self.parts, self.is_told = tuple(parts), is_told

    def _sheet(self, size: Sizer) -> Sheet:
        weights = [part for part in self.parts if part.height is None]
        rest: list[Any] = [*self.matches, *self.parts]
        if self.matches and not self.matches[0].played:  # nothing tells that run, and a weight has one size
            rest = [*weights, *self.matches, *(part for part in self.parts if part not in weights)]
        headline = f"It was most likely {rest.pop(0)}." if self.is_told else ""
        others = "It may also have been:" if headline else "It may have been one of these:"
        sizes = ", ".join(f"{name} {amount / MIB:.2f}" for name, amount in self.said.items())
        fitting = self.prediction.would_fit if self.prediction else ()
        blocks: list[Block] = [Bullets([*map(str, rest)], title=others if headline else "")] * bool(rest)
        blocks += [Bullets([*self.notes, *[f"The message names, in MiB: {sizes}."] * bool(sizes)])]
        tried = [(one.describe(size), one.command) for one in fitting]
        blocks += [Ways("What would have fitted, for the first run of a VAE:", tried)] * bool(tried)
        return Sheet(headline or (others if rest else "No known tensor has that size."), blocks)

    def _data(self) -> dict[str, Any]:
        return {
            "answer": "explanation",
            "message_bytes": self.said,
            "matches": [match.to_dict() for match in self.matches],
            "parts": [part._asdict() for part in self.parts],
            "is_told": self.is_told,
            "notes": list(self.notes),
            "would_fit": [one.to_dict() for one in self.prediction.would_fit] if self.prediction else [],
        }


def explain(
    error: str | BaseException, *, model: str | None = None, op: Op | None = None, gpu: str | None = None,
    runtime: Program | None = None,
) -> Explanation:  # fmt: skip
    """Which VAE's run, at which size, and which of its tensors an out-of-memory message is about; and what would fit.

    Parameters
    ----------
    error : str or exception
        A message of PyTorch's (any version, native or cudaMallocAsync), as ComfyUI, A1111, diffusers and others show
        it, with the lines around it; or stable-diffusion.cpp's. Or the ``torch.OutOfMemoryError`` itself.
    model, op, runtime : str, optional
        What is known of the run, as `vaemem.predict` takes it.
    gpu : str, optional
        The card; by default one of the memory that the message names.

    Returns
    -------
    Explanation
        With no matches where none of the VAE's tensors is of that size.

    Raises
    ------
    ValueError
        A text that is no such message.

    Notes
    -----
    Runs of one image at sizes that people make are looked at, in float32 and in half precision. PyTorch's message names
    the segment that it asked the driver for: 2 and 20 MiB stand for any smaller tensor.

    Examples
    --------
    >>> found = explain("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 11.76 GiB of "
    ...                 "which 1.02 GiB is free. Of the allocated memory 9.80 GiB is allocated by PyTorch, and 512.00 "
    ...                 "MiB is reserved by PyTorch but unallocated.", op="decode")
    >>> found.matches[0].height, found.matches[0].dtype
    (2048, 'float32')
    """
    text = " ".join(str(error).split())
    models = models_said(text) or [*ALIKE] if model is None else [named_model("model", model)]
    ops = ops_said(text) if op is None else [meant("op", op, OPS)]
    runtimes = programs_said(text) if runtime is None else [meant("runtime", runtime, PROGRAM_NAMES)]
    if (size := host_bytes(text)) is not None:
        note = f"It was the host's memory that ran out, not the card's: {size / MIB:.0f} MiB were asked for."
        return Explanation({"requested": size}, (), (note,), None)
    graphs = [name for name in models if name in LATENT_CHANNELS]
    if (size := buffer_bytes(text)) is not None:
        return _of_graphs(size, graphs, ops)
    if (size := pool_bytes(text)) is not None:
        return _of_graphs(size, graphs, ops, is_pool=True)
    said = read_message(text)
    if said is None:
        note = (
            "The message has no figures: ComfyUI's allocator cuts it, or it came from outside PyTorch's allocator (the"
            " CUDA context, cuDNN, pinned memory). vaemem fits MODEL decode HxW --gpu CARD says whether a run fits."
        )
        return Explanation({}, (), (note,), None)
    through, is_weight = parts_said(text), loads_weights(text)
    cards = _cards_of(said) if gpu is None else [find_gpu(gpu)]
    may_run = not said.is_small and "VAE" in through and not is_weight
    runs = find_runs(said, models, ops, runtimes, cards) if may_run else []
    parts = [] if said.is_small else find_parts(said, through, is_weight)
    has_vae = bool(runs) or any(part.model == A_VAE for part in parts)
    notes = list(notes_on(said, has_vae, through, is_weight))
    if runs and gpu is None:
        card = runs[0].request.card.gpu.name
        unsaid = "how large the card is" if "total" not in said.bytes else "the card"
        stands = "is supposed" if "total" not in said.bytes else "which has as much, stands for it"
        notes.append(f"The message does not say {unsaid}: {card} {stands}.")
    is_told = _is_told(runs) and not any(part.height is None for part in parts)
    if not (is_told or said.is_small):
        notes.append(NOT_EXAMINED)
    matches = [one.match for one in runs[:MOST_MATCHES]]
    is_predicted = runs and not (said.is_tile or said.is_directml or said.maker == "Apple")
    prediction = rounded(runs[0].request) if is_predicted else None
    return Explanation(said.bytes, matches, notes, prediction, parts[:MOST_MATCHES], is_told)


def _is_told(runs: Sequence[Found]) -> bool:
    """Whether the first run agrees with all figures of the message, and better than any other."""
    is_first = bool(runs) and all(one.fit < runs[0].fit for one in runs[1:])
    return is_first and runs[0].fit >= AGREES and runs[0].match.bytes >= TELLING


def _cards_of(said: Said) -> list[Gpu]:
    """Cards that have as much memory as a message says, one of each compute capability; or the nearest to it."""
    size = said.bytes.get("total", USUAL_CARD)
    names = gpu_names() if said.maker == "NVIDIA" else coarse_names(said.maker)
    cards = [find_gpu(name) for name in names] or [find_gpu(f"apple {round(size / 2**30)} GB", max(size, 1 << 30))]
    least = min(abs(card.reported_memory - size) for card in cards)
    within = max(least, said.within.get("total", 0))
    near = [card for card in cards if abs(card.reported_memory - size) <= within]
    return sorted(
        {card.sm: card for card in reversed(near)}.values(),
        key=lambda card: MANY.index(card.sm) if card.sm in MANY else len(MANY),
    )


# ---- stable-diffusion.cpp's graphs ----


def _of_graphs(size: int, models: Sequence[str], ops: Sequence[str], is_pool: bool = False) -> Explanation:
    """Of a compute buffer of so many bytes, which in another version of the program may differ by a thousandth; or of
    the pool's copy for a product."""
    matches = []
    for (height, width), model, op, direct in itertools.product(MADE_SIZES, models, ops, (False, True)):
        if height % 8 or width % 8:
            continue
        # What each takes for a pixel (`vaemem.ESTIMATORS`), before the graph is laid out.
        least = {("decode", False): 6656, ("decode", True): 2816, ("encode", False): 3382, ("encode", True): 1538}
        rough = max(least[op, direct], 160 + height * width // 1024) * height * width
        if is_pool:
            rough = 0 if direct else {"decode": 512, "encode": 256}[op] * height * width
        if 0.9 * rough - MIB < size < 1.1 * rough + MIB:
            laid = graph(f"vae-{op}r", height, width, model=model, conv_direct=direct)
            taken = laid.pool if is_pool else laid.buffer
            if abs(taken - size) <= size // 1000:
                how = "sd.cpp --vae-conv-direct" if direct else "sd.cpp"
                run = model, op, height, width, "float32", how
                what = "a product's copy in the pool" if is_pool else "the compute buffer"
                matches.append(Match(*run, what, taken, beside=None, played=True))
    matches.sort(key=lambda match: abs(match.bytes - size))
    notes = [f"Graphs are those of {SDCPP_VERSION}."]
    if matches and matches[0].runtime == "sd.cpp":
        how = "vaemem plan MODEL HxW --runtime sd.cpp says how much"
        notes.append(f"--vae-conv-direct and --vae-tiling make it smaller: {how}.")
    if not matches:
        notes.insert(0, "No VAE's graph at a usual size takes as many bytes: it was another model's, or its weights.")
    notes.append("Examined are VAEs' graphs alone, at usual sizes: neither denoisers, text encoders nor weights.")
    return Explanation({"requested": size}, matches[:MOST_MATCHES], notes, None)
