"""`explain`: find the run and the tensor of an out-of-memory message, and what would have fitted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vaemem._common import MIB, OPS, meant
from vaemem._render import Actions, Block, Bullets, Sheet, Shown, Sizer
from vaemem._types import Op, Program
from vaemem.engine.configs import named_model
from vaemem.out_of_memory import messages
from vaemem.out_of_memory.messages import OomMessage
from vaemem.out_of_memory.parts import A_VAE, NOT_EXAMINED, OtherTensor, find_parts
from vaemem.out_of_memory.refusals import AGREES
from vaemem.out_of_memory.runs import ALIKE, TELLING, Found, Match, find_runs, predict_rounded
from vaemem.out_of_memory.sizes import MADE_SIZES
from vaemem.prediction.gpus import Gpu, coarse_names, find_gpu, gpu_names
from vaemem.prediction.predict import Prediction
from vaemem.prediction.runtimes import PROGRAM_NAMES
from vaemem.sdcpp.graphs import LATENT_CHANNELS, SDCPP_VERSION, graph

MOST_MATCHES = 5
MANY = (89, 86, 120)  # compute capabilities of the commonest cards
USUAL_CARD = 24 << 30  # bytes of the assumed card if a message does not name its size


class Explanation(Shown):
    """Result of `explain`. Printing it shows the run and what would have fitted. Sizes are in bytes.

    Attributes
    ----------
    said : dict of str to int
        Figures of the message: requested, total, free, allocated, cached.
    matches : tuple of Match
        The likeliest first: runs that run out there when played, then by how usual the size is.
    notes : tuple of str
        Other conclusions from the message.
    prediction : Prediction or None
        The likeliest run on such a card, with the memory held by others; see `Prediction.would_fit`.
    parts : tuple of OtherTensor
        Weights and scores of denoisers and text encoders with as many bytes.
    is_told : bool
        Whether the message identifies the first match: only that one agrees best with all figures.
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
        blocks += [Actions("What would have fitted, for the first run of a VAE:", tried)] * bool(tried)
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
    """Find the VAE run, its size and its tensor that an out-of-memory message is about, and what would fit.

    Parameters
    ----------
    error : str or exception
        PyTorch's message (any version, native or cudaMallocAsync), as ComfyUI, A1111, diffusers and others show it,
        with the lines around it. Or stable-diffusion.cpp's, or the ``torch.OutOfMemoryError`` itself.
    model, op, runtime : str, optional
        Known facts about the run, as for `vaemem.predict`.
    gpu : str, optional
        The card; by default one with the memory that the message names.

    Returns
    -------
    Explanation
        Without matches if no tensor of a VAE has that size.

    Raises
    ------
    ValueError
        The text is no such message.

    Notes
    -----
    The search covers runs of one image at common sizes, in float32 and half precision. PyTorch's message names the
    segment requested from the driver: 2 and 20 MiB may be for any smaller tensor.

    Examples
    --------
    >>> found = explain("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 11.76 GiB of "
    ...                 "which 1.02 GiB is free. Of the allocated memory 9.80 GiB is allocated by PyTorch, and 512.00 "
    ...                 "MiB is reserved by PyTorch but unallocated.", op="decode")
    >>> found.matches[0].height, found.matches[0].dtype
    (2048, 'float32')
    """
    text = " ".join(str(error).split())
    models = messages.find_models(text) or [*ALIKE] if model is None else [named_model("model", model)]
    ops = messages.find_ops(text) if op is None else [meant("op", op, OPS)]
    runtimes = messages.find_programs(text) if runtime is None else [meant("runtime", runtime, PROGRAM_NAMES)]
    if (size := messages.read_host_bytes(text)) is not None:
        note = f"Host memory ran out, not the card's: {size / MIB:.0f} MiB were requested."
        return Explanation({"requested": size}, (), (note,), None)
    graphs = [name for name in models if name in LATENT_CHANNELS]
    if (size := messages.read_buffer_bytes(text)) is not None:
        return _explain_graph(size, graphs, ops)
    if (size := messages.read_pool_bytes(text)) is not None:
        return _explain_graph(size, graphs, ops, is_pool=True)
    message = messages.read_message(text)
    if message is None:
        note = (
            "The message has no figures: ComfyUI shortens it, or it is not from PyTorch's allocator (but from the CUDA"
            " context, cuDNN or pinned memory). vaemem fits MODEL decode HxW --gpu CARD says whether a run fits."
        )
        return Explanation({}, (), (note,), None)
    through, is_weight = messages.find_pipeline_parts(text), messages.loads_weights(text)
    cards = _find_cards(message) if gpu is None else [find_gpu(gpu)]
    may_run = not message.is_small and "VAE" in through and not is_weight
    runs = find_runs(message, models, ops, runtimes, cards) if may_run else []
    parts = [] if message.is_small else find_parts(message, through, is_weight)
    has_vae = bool(runs) or any(part.model == A_VAE for part in parts)
    notes = list(messages.interpret(message, has_vae, through, is_weight))
    if runs and gpu is None:
        card = runs[0].request.card.gpu.name
        has_size = "total" in message.bytes
        missing = "card" if has_size else "card's memory"
        notes.append(f"The message does not name the {missing}; assumed: {card}{' (same memory)' * has_size}.")
    is_told = _identifies_first(runs) and not any(part.height is None for part in parts)
    if not (is_told or message.is_small):
        notes.append(NOT_EXAMINED)
    matches = [one.match for one in runs[:MOST_MATCHES]]
    is_predicted = runs and not (message.is_tile or message.is_directml or message.maker == "Apple")
    prediction = predict_rounded(runs[0].request) if is_predicted else None
    return Explanation(message.bytes, matches, notes, prediction, parts[:MOST_MATCHES], is_told)


def _identifies_first(runs: Sequence[Found]) -> bool:
    """Return whether the first run agrees with all figures of the message, and better than any other."""
    is_first = bool(runs) and all(one.fit < runs[0].fit for one in runs[1:])
    return is_first and runs[0].fit >= AGREES and runs[0].match.bytes >= TELLING


def _find_cards(message: OomMessage) -> list[Gpu]:
    """List cards with the memory that a message names, one of each compute capability; or the nearest."""
    size = message.bytes.get("total", USUAL_CARD)
    names = gpu_names() if message.maker == "NVIDIA" else coarse_names(message.maker)
    cards = [find_gpu(name) for name in names] or [find_gpu(f"apple {round(size / 2**30)} GB", max(size, 1 << 30))]
    least = min(abs(card.reported_memory - size) for card in cards)
    within = max(least, message.within.get("total", 0))
    near = [card for card in cards if abs(card.reported_memory - size) <= within]
    return sorted(
        {card.sm: card for card in reversed(near)}.values(),
        key=lambda card: MANY.index(card.sm) if card.sm in MANY else len(MANY),
    )


# ---- stable-diffusion.cpp's graphs ----


def _explain_graph(size: int, models: Sequence[str], ops: Sequence[str], is_pool: bool = False) -> Explanation:
    """Find VAE graphs with a compute buffer of this size, or with a product's copy of this size in the pool. Another
    version's buffer may differ by a thousandth."""
    matches = []
    for (height, width), model, op, direct in itertools.product(MADE_SIZES, models, ops, (False, True)):
        if height % 8 or width % 8:
            continue
        # Bytes for a pixel (`vaemem.ESTIMATORS`), to skip graphs before they are simulated.
        least = {("decode", False): 6656, ("decode", True): 2816, ("encode", False): 3382, ("encode", True): 1538}
        rough = max(least[op, direct], 160 + height * width // 1024) * height * width
        if is_pool:
            rough = 0 if direct else {"decode": 512, "encode": 256}[op] * height * width
        if 0.9 * rough - MIB < size < 1.1 * rough + MIB:
            simulated = graph(f"vae-{op}r", height, width, model=model, conv_direct=direct)
            needed = simulated.pool if is_pool else simulated.buffer
            if abs(needed - size) <= size // 1000:
                how = "sd.cpp --vae-conv-direct" if direct else "sd.cpp"
                run = model, op, height, width, "float32", how
                what = "a product's copy in the pool" if is_pool else "the compute buffer"
                matches.append(Match(*run, what, needed, beside=None, played=True))
    matches.sort(key=lambda match: abs(match.bytes - size))
    notes = [f"Graphs are those of {SDCPP_VERSION}."]
    if matches and matches[0].runtime == "sd.cpp":
        how = "vaemem plan MODEL HxW --runtime sd.cpp says how much"
        notes.append(f"--vae-conv-direct and --vae-tiling reduce it: {how}.")
    if not matches:
        notes.insert(0, "No VAE's graph at a usual size has as many bytes: it was another model's, or its weights.")
    notes.append("Searched: graphs of VAEs at usual sizes. Denoisers, text encoders and weights are not.")
    return Explanation({"requested": size}, matches[:MOST_MATCHES], notes, None)
