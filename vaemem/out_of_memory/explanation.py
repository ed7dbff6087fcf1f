"""`explain`: find the run and the tensor of an out-of-memory message, and what would have fitted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vaemem._common import MIB, OPS
from vaemem._render import Actions, Block, Bullets, Sheet, Shown, Sizer, in_gb
from vaemem._types import Op, Program
from vaemem.out_of_memory.candidates import AGREES, PLAYED, Found, Match, OtherTensor
from vaemem.out_of_memory.clues import read_clues
from vaemem.out_of_memory.graph_runs import find_graphs, name_component
from vaemem.out_of_memory.message_kinds import GRAPH, NO_TENSOR, POOL
from vaemem.out_of_memory.messages import LARGE_REQUEST, MOST_SMALL, SEGMENT_STEP, SLACK, OomMessage, read_message
from vaemem.out_of_memory.other_tensors import A_VAE, NOT_EXAMINED, find_other_tensors
from vaemem.out_of_memory.pipeline_runs import find_lacking_room, find_pipeline_runs
from vaemem.out_of_memory.scope import Scope, find_scope, has_size
from vaemem.out_of_memory.sizes import MADE_SIZES, VIDEO_SIZES, Size
from vaemem.out_of_memory.vae_runs import find_vae_runs
from vaemem.pipelines.by_diffusers import PipelinePrediction
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.predict_vae import Prediction, shell_command
from vaemem.prediction.request import Card
from vaemem.sdcpp.graphs import SDCPP_VERSION

MOST_MATCHES = 5
# {operation of a match: the part of a pipeline that it belongs to, or "" for any}; others are the VAE's.
PART_OF = {"load": "", "encode prompt": "text encoder", "denoise": "denoiser"}
ROUNDED = 10**8  # bytes: unit for memory held by others


class Explanation(Shown):
    """Result of `explain`. Printing it shows the run and what would have fitted. Sizes are in bytes.

    Attributes
    ----------
    said : dict of str to int
        Figures of the message: requested, total, free, allocated, cached.
    candidates : tuple of Match or OtherTensor
        All of `matches` and `parts`, the likeliest first: runs that a play confirms stand before others, and common
        runs before rare ones.
    matches : tuple of Match
        Runs that request it.
    parts : tuple of OtherTensor
        Weights and scores of denoisers and text encoders with as many bytes.
    notes : tuple of str
        Other conclusions from the message.
    prediction : Prediction, PipelinePrediction or None
        The likeliest run on such a card, with the memory held by others; see `Prediction.would_fit`. None if that run
        is not played, because it may not be the true one.
    is_told : bool
        Whether the message identifies the first candidate: only that one agrees best with all figures.
    command : str
        The command that predicts the likeliest run; "" without a prediction.
    """

    def __init__(
        self, said: dict[str, int], candidates: Sequence[Match | OtherTensor], notes: Sequence[str],
        prediction: Prediction | PipelinePrediction | None = None, is_told: bool = False, names_tensor: bool = True,
    ):  # fmt: skip
        self.said, self.candidates, self.notes, self.prediction = said, tuple(candidates), tuple(notes), prediction
        self.matches = tuple(one for one in candidates if isinstance(one, Match))
        self.parts = tuple(one for one in candidates if isinstance(one, OtherTensor))
        self.is_told, self._names_tensor = is_told, names_tensor

    @property
    def command(self) -> str:
        if self.prediction is None:
            return ""
        request = self.prediction.request
        return _command(request) if isinstance(request, PipelineRequest) else shell_command(request)

    def _sheet(self, size: Sizer) -> Sheet:
        rest = list(map(str, self.candidates))
        headline = f"It was most likely {rest.pop(0)}." if self.is_told else ""
        others = "It may also have been:" if headline else "It may have been one of these:"
        sizes = ", ".join(f"{name} {amount / MIB:.2f}" for name, amount in self.said.items())
        fitting = self.prediction.would_fit if self.prediction else ()
        blocks: list[Block] = [Bullets(rest, title=others if headline else "")] * bool(rest)
        blocks += [Bullets([*self.notes, *[f"The message names, in MiB: {sizes}."] * bool(sizes)])]
        whole = self.command if self.prediction and self.prediction.kind == "pipeline" else ""
        tried = [(one.describe(size), f"{whole} {one.command}" if whole else one.command) for one in fitting]
        words = shlex.split(self.command)[2:]  # the model, the operation if it is a VAE's, and the size
        named = " ".join(words[: 2 if whole else 3])
        blocks += [Actions(f"What would have fitted, for {named}:", tried)] * bool(tried)
        nothing = "No known tensor has that size." if self._names_tensor else "The message does not say which tensor."
        return Sheet(headline or (others if rest else nothing), blocks)

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
    """Find the run, its size and its tensor that an out-of-memory message is about, and what would fit.

    Parameters
    ----------
    error : str or exception
        The message, with the lines around it: PyTorch's of any version, as ComfyUI, A1111, diffusers and others show
        it; or DirectML's, Metal's, MLX's, ONNX Runtime's or ggml's; or the ``torch.OutOfMemoryError`` itself.
    model : str, optional
        A model or a pipeline. Then no other is searched.
    op, runtime : str, optional
        Known facts about a VAE's run, as for `vaemem.predict`.
    gpu : str, optional
        The card; by default one that the text names, or one with the memory that the message names.

    Returns
    -------
    Explanation
        Without matches if no tensor of a run has that size.

    Raises
    ------
    ValueError
        The text is no such message.

    Notes
    -----
    The search covers runs of one image or video by VAEs and by whole pipelines, at common sizes. PyTorch's message
    names the segment requested from the driver: 2 and 20 MiB may be for any smaller tensor.

    Examples
    --------
    >>> found = explain("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 11.76 GiB of "
    ...                 "which 1.02 GiB is free. Of the allocated memory 9.80 GiB is allocated by PyTorch, and 512.00 "
    ...                 "MiB is reserved by PyTorch but unallocated.", op="decode")
    >>> found.matches[0].height, found.matches[0].dtype
    (2048, 'float32')
    """
    text = " ".join(str(error).split())
    message = read_message(text)
    scope = find_scope(message, read_clues(text), model, op, gpu, runtime)
    notes: list[str] = []
    if scope.clues.is_unknown and model is None:
        notes.append(f"The text names {scope.clues.model}, which vaemem does not know: no run of it was searched.")
    if message.kind.size in (GRAPH, POOL) and not notes:
        return _explain_graph(message, text, scope)
    if message.kind.size == NO_TENSOR or notes:
        return _explain_whole(message, scope, notes)
    return _explain_tensor(message, scope, has_gpu=gpu is not None, has_op=op is not None)


# ---- a message about one tensor ----


def _explain_tensor(message: OomMessage, scope: Scope, has_gpu: bool, has_op: bool) -> Explanation:
    """Search the runs that request a tensor of a message's size, and the weights and scores of that size."""
    clues, through, is_weight = scope.clues, scope.clues.parts, scope.clues.is_weight
    parts = [] if message.is_small and not scope.is_named else find_other_tensors(message, scope)
    full = _find_lacking(message, scope, parts)
    runs: list[Found] = []
    if not message.is_small and "VAE" in through and not is_weight:
        runs = find_vae_runs(message, scope)
    if not (is_weight or message.is_tile or message.may_lower) and (scope.is_named or not message.is_small):
        may_denoise = "denoiser" in through and not has_op
        names = [name for name in scope.pipelines if may_denoise or (PIPELINES[name].frames and "VAE" in through)]
        for of_video in (False, True):  # if no model is named, these are searched only if nothing else agrees
            if scope.is_named or all(one.fit < (PLAYED if of_video else AGREES) for one in runs):
                some = [name for name in names if bool(PIPELINES[name].frames) == of_video]
                runs += find_pipeline_runs(message, scope, some)
        runs = [run for run in runs if PART_OF.get(run.match.op, "VAE") in (*through, "")]
        runs.sort(key=lambda one: one.order)
    ranked = _rank(message, runs, parts, bool(full), clues.sizes)
    has_vae = bool(runs) or any(part.model == A_VAE for part in parts)
    notes = list(_interpret(message, has_vae, through, is_weight))
    if runs and not has_gpu and clues.gpu is None:
        notes.append(_name_card(message, runs[0].request.card.gpu))
    is_told = _identifies_first(runs, ranked)
    if not (is_told or message.is_small):
        notes.append(NOT_EXAMINED)
    notes += [_say_lacking(full)] if full else []
    first = next((run for run in runs if run.match is ranked[0]), None) if ranked else None
    kinds = [type(one) for one in ranked]
    ranked = [one for i, one in enumerate(ranked) if kinds[:i].count(kinds[i]) < MOST_MATCHES]
    return Explanation(message.bytes, ranked, notes, _predict(message, first, clues.sizes), is_told)


def _rank(
    message: OomMessage, runs: Sequence[Found], parts: Sequence[OtherTensor], is_lacking: bool,
    sizes: Sequence[Size],
) -> list[Match | OtherTensor]:  # fmt: skip
    """Put runs, weights and scores into one order. A weight agrees if all weights do not fit, and if little was cached:
    a cache grows with the first run. If anything has one of the sizes that the text names, leave out other sizes."""
    is_loading = is_lacking and message.bytes.get("cached", SLACK) < SLACK
    ranked: list[tuple[tuple[int, ...], Match | OtherTensor]] = [(run.order, run.match) for run in runs]
    for part in parts:
        fit = AGREES if is_loading and part.height is None else PLAYED * (is_lacking and part.height is None)
        ranked.append(((-fit, 2 + (part.height is not None), 0, 0), part))
    found = [one for _, one in sorted(ranked, key=lambda one: one[0])]
    told = {tuple(sorted(size)) for size in sizes}
    fitting = [one for one in found if one.height is None or tuple(sorted((one.height, one.width or 0))) in told]
    return fitting if any(one.height for one in fitting) else found


def _identifies_first(runs: Sequence[Found], ranked: Sequence[Match | OtherTensor]) -> bool:
    """Return whether the first run agrees with all figures of the message, and better than anything else."""
    if not runs or runs[0].match is not ranked[0] or any(isinstance(one, OtherTensor) for one in ranked[1:2]):
        return False
    is_first = all(one.fit < runs[0].fit for one in runs[1:])
    return is_first and runs[0].fit >= AGREES and (runs[0].match.bytes >= LARGE_REQUEST or runs[0].fit > AGREES)


def _predict(message: OomMessage, first: Found | None, sizes: Sequence[Size]) -> Prediction | PipelinePrediction | None:
    """Predict the first run, so that advice can follow. There is none for an unusual size that the text does not name
    and the figures do not confirm; nor for tiles, and for cards whose library is not simulated."""
    if first is None or message.is_tile or (message.is_exact and message.maker != "NVIDIA"):
        return None
    size = first.match.height, first.match.width
    if message.tells and first.fit < AGREES and size not in (*MADE_SIZES, *VIDEO_SIZES, *sizes):
        return None
    if isinstance(first.request, PipelineRequest):
        return PipelinePrediction(first.request)
    card = first.request.card
    used = -(-card.used // ROUNDED) * ROUNDED  # so that a command can state it
    return Prediction(replace(first.request, card=replace(card, used=used)))


def _name_card(message: OomMessage, card: Gpu) -> str:
    has_size = "total" in message.bytes
    missing = "card" if has_size else "card's memory"
    return f"The message does not name the {missing}; assumed: {card.name}{' (same memory)' * has_size}."


def _interpret(message: OomMessage, has_matches: bool, parts: list[str], is_weight: bool) -> Iterator[str]:
    """Yield notes on a message's kind, its figures and the parts in its traceback."""
    figures, size = message.bytes, message.bytes["requested"]
    if message.kind.meaning:
        yield f"{message.kind.meaning} {message.kind.advice}"
    if message.is_small and message.is_native:
        what = "less than 10 MiB" if size == MOST_SMALL else "less than 1 MiB" if size == SEGMENT_STEP else ""
        what = f"may be for any tensor of {what}" if what else "is of a size that many tensors have"
        yield (
            f"PyTorch requested a segment of {size / MIB:g} MiB, which {what}: it does not identify the run. The card"
            " was full before that."
        )
    elif message.is_small:
        yield f"{size / MIB:.3g} MiB were requested, which many tensors have: the size does not identify the run."
    elif is_weight:
        yield "The traceback moves a weight to the card; no VAE has one of this size, so VAE runs were not searched."
    elif "VAE" not in parts:
        yield f"The traceback is in a {' and a '.join(parts)}, not in a VAE: VAE runs were not searched."
    elif not has_matches and message.is_tile:
        yield "No run of a tile has a tensor of this size, with the tiles that programs cut by default."
    elif not has_matches:
        yield (
            "No VAE's run at a usual size has a tensor of this size: it was another part of the pipeline, such as the"
            " denoiser, or another size. vaemem fits MODEL SIZE shows the memory of each part."
        )
    if message.is_tile and has_matches:
        yield "It was raised in tiles, which ComfyUI and Forge retry in: the size is a tile's."
    if "allocated" in figures and figures["allocated"] > figures.get("total", figures["allocated"]):
        yield "More was allocated than the card has: Windows' driver had already spilled to host memory."
    if figures.get("free", -1) >= size:
        yield "The card had more free than was requested: the limit was lower, or the host's page file was full."


# ---- weights that do not fit ----


def _find_lacking(message: OomMessage, scope: Scope, parts: Sequence[OtherTensor]) -> PipelineRequest | None:
    """Return the pipeline whose weights do not all fit on the card, if the message may come from loading them."""
    total = message.bytes.get("total")
    card = scope.cards[0]
    if total is None and not scope.is_named:
        return None
    if total and not has_size(card, message):
        card = card._replace(total_memory=total)
    weights = {part.model for part in parts if part.height is None}
    may_load = scope.clues.is_weight or bool(weights) or message.is_small
    if not may_load or not (scope.is_named or weights):
        return None
    for name in scope.pipelines:
        if scope.is_named or weights & set(PIPELINES[name].parts.values()):
            if full := find_lacking_room(name, Card(card)):
                return full
    return None


def _say_lacking(full: PipelineRequest) -> str:
    needed, room = sum(part.nbytes for part in full.parts), full.card.available()
    frames = f" --frames {full.frames}" * (full.frames > 1)
    run = f"vaemem plan {full.name} {full.height}x{full.width}{frames} --gpu {shlex.quote(_short(full.card.gpu))}"
    return (
        f"All weights of {full.name} do not fit: they take {in_gb(needed)}, and the card gives {in_gb(room)}."
        f" Run {run}, which compares ways that fit."
    )


def _short(gpu: Gpu) -> str:
    return gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _command(q: PipelineRequest) -> str:
    words = ["vaemem", "fits", q.name, f"{q.height}x{q.width}"]
    words += ["--frames", str(q.frames)] if q.frames > 1 else []
    return shlex.join([*words, "--gpu", _short(q.card.gpu)])


# ---- messages without one tensor's size ----


def _explain_whole(message: OomMessage, scope: Scope, notes: list[str]) -> Explanation:
    """Say what a message without a tensor's size means, and what the traceback shows."""
    kind, clues = message.kind, scope.clues
    notes += [f"{kind.meaning} {kind.advice}"] * bool(kind.meaning)
    if size := message.bytes.get("requested"):
        notes.append(f"{size / MIB:.0f} MiB were requested.")
    if clues.has_traceback and len(clues.parts) < 3:
        where = " and a ".join(clues.parts)
        op = f", in its {clues.ops[0]}" * (clues.parts == ["VAE"] and len(clues.ops) == 1)
        notes.append(f"The traceback is in a {where}{op}.")
    full = None
    if scope.is_named and kind.maker == "NVIDIA":
        name, size_of = scope.pipelines[0] if scope.pipelines else scope.models[0], clues.sizes[:1] or ((1024, 1024),)
        height, width = size_of[0]
        card = scope.cards[0]
        if not clues.is_unknown:
            words = ["vaemem", "fits", name, f"{height}x{width}", "--gpu", _short(card)]
            notes.append(f"Run {shlex.join(words)} to see the memory of each part of {name}.")
            has_card = clues.gpu is not None or "total" in message.bytes
            full = find_lacking_room(name, Card(card)) if name in PIPELINES and has_card else None
    notes += [_say_lacking(full)] if full else []
    return Explanation(message.bytes, (), notes, names_tensor=False)


def _explain_graph(message: OomMessage, text: str, scope: Scope) -> Explanation:
    """Find a component's graph with a compute buffer, or with a product's copy in the pool, of this size."""
    is_weights = "params backend buffer" in message.kind.pattern
    component = name_component(text, is_weights)
    if is_weights:
        note = (
            f"It is the buffer of the weights of {component or 'one component'}. Weights of fewer bits"
            " (--type q8_0), or --offload-to-cpu, need less of the card."
        )
        return Explanation(message.bytes, (), (note,), names_tensor=False)
    matches = find_graphs(message, scope, component)
    notes = [f"Graphs are those of {SDCPP_VERSION}."]
    if matches and matches[0].runtime == "sd.cpp" and matches[0].op in OPS:
        how = "vaemem plan MODEL HxW --runtime sd.cpp says how much"
        notes.append(f"--vae-conv-direct and --vae-tiling reduce it: {how}.")
    elif matches and matches[0].op == "denoise":
        notes.append("--diffusion-fa stores no scores of attention, and so reduces it.")
    if not matches:
        notes.insert(0, "No VAE's or UNet's graph has as many bytes: it was another model's, or its weights.")
    notes.append("Searched: graphs of VAEs, and of the UNets of SD 1.5 and SDXL if the log names one.")
    return Explanation(message.bytes, matches[:MOST_MATCHES], notes)
