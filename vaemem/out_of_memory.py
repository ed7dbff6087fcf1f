"""`explain`: which run and which tensor an out-of-memory message is about, and what would have fitted."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, MIB, OPS, Answer, meant
from vaemem.engine.configs import named_model
from vaemem.prediction.gpus import CONTEXT, Gpu, coarse_names, find_gpu, gpu_names
from vaemem.prediction.predict import Prediction
from vaemem.prediction.process import parameter_bytes
from vaemem.prediction.question import Card, Question, ask
from vaemem.prediction.runtimes import PROGRAM_NAMES, architecture, code_of
from vaemem.sdcpp.graphs import LATENT_CHANNELS, SDCPP_VERSION, graph

# Heights and widths in pixels that people make, the commonest first; either may be the longer side.
MADE_SIZES = (
    (1024, 1024), (512, 512), (768, 768), (832, 1216), (896, 1152), (768, 1344), (640, 1536), (512, 768), (2048, 2048),
    (1536, 1536), (1280, 1280), (1024, 1536), (1080, 1920), (1088, 1920), (720, 1280), (768, 1024), (640, 640),
    (576, 1024), (1152, 2048), (1664, 2432), (1792, 2304), (1536, 2688), (1152, 1152), (1440, 1440), (1792, 1792),
    (1920, 1920), (1440, 2560), (1536, 2048), (1024, 2048), (896, 896), (960, 960), (384, 384), (448, 448), (256, 256),
    (576, 576), (704, 704), (832, 832), (512, 1024), (640, 960), (1216, 1216), (1344, 1344), (1408, 1408),
    (1600, 1600), (1664, 1664), (2304, 2304), (2560, 2560), (3072, 3072), (2160, 3840), (4096, 4096),
)  # fmt: skip
# VAEs whose tensors differ: SD1.5's are SDXL's and Playground's, FLUX.1's SD3's, Z-Image's and CogView4's.
ALIKE = {"sdxl": "SD1.5, SDXL", "flux": "FLUX.1, SD3, Z-Image"}
# By what a text says of a model; the first that it says.
NAMED = {r"flux": "flux", r"sdxl|\bxl\b": "sdxl", r"qwen": "qwen-image", r"\bwan|KLWan": "wan2.1"}
COMMON = 25  # of these: so many are made much more than the others
MOST_MATCHES = 5
LARGEST_TILE = 1024  # pixels
USUAL_CARD = 24 << 30  # bytes: of the card that is supposed where a message does not say its size
ROUNDED = 10**8  # bytes: what others held is told in so many
TELLING = 64 * MIB  # a request of less is many runs'
SMALL_SEGMENTS = (2 * MIB, 20 * MIB)  # what PyTorch asks for, whatever smaller tensor it is for
_UNITS = {"b": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40}  # by the first letter
_NUMBER = r"\d{1,12}(?:[.,]\d{1,6})?"
_SIZE = rf"({_NUMBER} ?(?:bytes|[KMGT]i?B))"
# What messages say, by the name of what it is.
_SAYS = {
    "requested": (rf"Tried to allocate {_SIZE}", rf"Requested\s*: ?{_SIZE}"),
    "total": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"Device limit\s*: ?{_SIZE}"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free;", rf"Free \(according to CUDA\)\s*: ?{_SIZE}"),
    "allocated": (
        rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated", rf"Currently allocated\s*: ?{_SIZE}",
    ),
    "cached": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} (?:reserved in total by PyTorch|cached\))",),
    "process": (rf"this process has {_SIZE} memory in use",),
}  # fmt: skip
_BUFFER = (
    r"failed to allocate \w+ buffer of size (\d{1,15})\b",
    rf"allocating ({_NUMBER}) MiB on device \d+: cudaMalloc failed",
    rf"compute buffer size: ?({_NUMBER}) MB",
)
_HOST = re.compile(r"DefaultCPUAllocator:.{0,99}? tried to allocate (\d{1,15}) bytes", re.I)
_BARE = re.compile(r"Allocation on device|(CUDA|HIP|XPU|CUDA error:) out of memory", re.I)
_BEGINS = re.compile(r"Tried to allocate|Currently allocated", re.I)  # the figures of a message
_TILED = re.compile(r"tiled_|retrying with tiled|tiled vae|vae\w*tiled", re.I)
# Whose card it is, where it is not NVIDIA's: the makers of cards that answers are coarse for.
_MAKERS_SAID = {"HIP out of memory": "AMD", "XPU out of memory": "Intel", "MPS backend out of memory": "Apple"}


class Match(NamedTuple):
    """A run that asks for what the message names, just when it has more than ever before.

    Attributes
    ----------
    models : str
        VAEs that ask for it: their tensors are alike.
    op, height, width, dtype, runtime : str or int
        The run; of a tile, where the message is about one.
    tensor : str
        The module that asks, and for what.
    bytes : int
        As the tensor is.
    beside : int or None
        Bytes that PyTorch had allocated beside the run's own tensors: weights, the VAE's too, and other models.
    played : bool
        Whether the run, played on such a card with so much beside it, runs out at that very tensor.
    """

    models: str
    op: str
    height: int
    width: int
    dtype: str
    runtime: str
    tensor: str
    bytes: int
    beside: int | None
    played: bool

    def __str__(self) -> str:
        held = "" if self.beside is None else f"; beside its tensors PyTorch held {self.beside / MIB:.0f} MiB"
        return (
            f"{self.models} {self.op} {self.height}x{self.width} {self.dtype} by {self.runtime}: {self.tensor},"
            f" {self.bytes / MIB:.0f} MiB{held}"
        )


class Explanation(Answer):
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
    """

    def __init__(
        self, said: dict[str, int], matches: Sequence[Match], notes: Sequence[str], prediction: Prediction | None
    ):
        self.said, self.matches, self.notes, self.prediction = said, tuple(matches), tuple(notes), prediction

    def _text(self, markdown: bool = False) -> str:
        is_told = self.matches and self.matches[0].bytes >= TELLING
        how = "It was most likely" if is_told else "So small a tensor is one of many runs', among them"
        lines = [f"{how} {self.matches[0]}."] if self.matches else []
        if len(self.matches) > 1:
            lines += ["It may also have been:", *(f"  {match}" for match in self.matches[1:])]
        lines += self.notes
        if self.said:
            sizes = ", ".join(f"{name} {size / MIB:.2f}" for name, size in self.said.items())
            lines.append(f"The message says, in MiB: {sizes}.")
        fitting = self.prediction.would_fit if self.prediction else ()
        if fitting:
            lines.append("What would have fitted, each tried, for the first of these:")
            lines += [f"  {one.what}: {one.says}\n    {one.command}" for one in fitting]
        return "\n".join(lines)

    def _data(self) -> dict[str, Any]:
        p = self.prediction
        return {
            "said": self.said,
            "matches": [match._asdict() for match in self.matches],
            "notes": list(self.notes),
            "would_fit": [one._asdict() for one in p.would_fit] if p else [],
        }


def explain(
    error: str | BaseException, *, model: str | None = None, op: str | None = None, gpu: str | None = None,
    runtime: str | None = None,
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
    models = _models(text) if model is None else [named_model("model", model)]
    ops = _ops(text) if op is None else [meant("op", op, OPS)]
    codes = _programs(text) if runtime is None else [meant("runtime", runtime, PROGRAM_NAMES)]
    if found := _HOST.search(text):
        size = int(found[1])
        note = f"It was the host's memory that ran out, not the card's: {size / MIB:.0f} MiB were asked for."
        return Explanation({"requested": size}, (), (note,), None)
    if buffer := _first(_BUFFER, text):
        size = round(_number(buffer) * (MIB if re.search("[.,]", buffer) else 1))
        return _of_graphs(size, [name for name in models if name in LATENT_CHANNELS], ops)
    begins = [found.start() for found in _BEGINS.finditer(text)]
    figures = text[begins[0] : begins[1] if len(begins) > 1 else None] if begins else ""
    said = {name: _bytes(told) for name, patterns in _SAYS.items() if (told := _first(patterns, figures))}
    if "requested" not in said:
        if not (_BARE.search(text) or begins):
            raise ValueError(f"error: want an out-of-memory message of PyTorch's or ggml's, got {text[:200]!r}")
        note = (
            "The message has no figures: ComfyUI's allocator cuts it, or it came from outside PyTorch's allocator (the"
            " CUDA context, cuDNN, pinned memory). vaemem fits MODEL decode HxW --gpu CARD says whether a run fits."
        )
        return Explanation({}, (), (note,), None)
    if "reserved" in said:
        said["cached"] = max(said.pop("reserved") - said.get("allocated", 0), 0)
    is_native = "tried to allocate" in figures.lower()
    # What stands before the figures is of the run that raised them; behind them, where no other message follows.
    is_tile = bool(_TILED.search(text if len(begins) == 1 else text[: begins[0]]))
    maker = next((maker for words, maker in _MAKERS_SAID.items() if words.lower() in text.lower()), "NVIDIA")
    card = _card_of(said.get("total", USUAL_CARD), maker) if gpu is None else find_gpu(gpu)
    runs: list[tuple[Match, Question]] = []
    is_small = is_native and said["requested"] in SMALL_SEGMENTS
    if not is_small:
        runs = _likeliest(_candidates(said, is_native, models, ops, codes, card), is_tile)
    notes = list(_notes(said, is_small, is_tile, bool(runs)))
    if runs and gpu is None and "total" not in said:
        notes.append(f"The message does not say how large the card is: {card.name} is supposed.")
    elif runs and gpu is None:
        notes.append(f"The message does not name the card: {card.name}, which has as much, stands for it.")
    matches = [match for match, _ in runs[:MOST_MATCHES]]
    return Explanation(said, matches, notes, _rounded(runs[0][1]) if runs and maker != "Apple" else None)


# ---- what a message says ----


def _first(patterns: Sequence[str], text: str) -> str:
    """What the first of the patterns that are found has in brackets."""
    return next((found[1] for pattern in patterns if (found := re.search(pattern, text, re.I))), "")


def _number(said: str) -> float:
    return float(said.replace(",", "."))


def _bytes(said: str) -> int:
    number, unit = re.split(r" ?(?=[A-Za-z])", said, maxsplit=1)
    return round(_number(number) * _UNITS[unit[0].lower()])


def _models(text: str) -> list[str]:
    """The models that a text may be about."""
    return [model for said, model in NAMED.items() if re.search(said, text, re.I)][:1] or [*ALIKE]


def _ops(text: str) -> list[str]:
    """The operations that a text may be about, by the functions that a traceback names."""
    named = [op for op in OPS if re.search(rf"{op}(?:_first_stage|_tiled|r\.)|vae[._ ]?{op}", text, re.I)]
    return named or ["decode", "encode"]


def _programs(text: str) -> list[str]:
    """Whose code a text may be about, by its files and lines."""
    if re.search(r"comfy", text, re.I) or "Device limit" in text:
        return ["comfyui"]
    if re.search(r"webui|decode_first_stage", text):
        return ["a1111"]
    if "diffusers" in text:
        return ["diffusers"]
    return ["diffusers", "comfyui", "a1111", "ldm"]


def _notes(said: Mapping[str, int], is_small: bool, is_tile: bool, has_matches: bool) -> Iterator[str]:
    if is_small:
        size = said["requested"] // MIB
        yield (
            f"PyTorch asked for a segment of {size} MiB, which stands for any tensor of less than"
            f" {10 if size == 20 else 1} MiB: it does not tell which run it was. The card was full before that."
        )
    elif not has_matches:
        yield (
            "No tensor of a VAE's run at a usual size is as large: it was another part of the pipeline, such as the"
            " denoiser, or another size. vaemem pipeline shows what each part takes."
        )
    if is_tile and has_matches:
        yield "It was raised in tiles, which ComfyUI and Forge retry in: the size is a tile's."
    if "allocated" in said and said["allocated"] > said.get("total", said["allocated"]):
        yield "More was allocated than the card has: Windows' driver had already spilled to the host's memory."
    if said.get("free", -1) >= said["requested"]:
        yield "The card had more free than was asked for: the limit was set lower, or the host's page file was full."


# ---- PyTorch's runs ----


def _candidates(
    said: dict[str, int], is_native: bool, models: Sequence[str], ops: Sequence[str], codes: Sequence[str], card: Gpu
) -> Iterator[tuple[Match, Question]]:
    """Runs that ask for as much when they have more than ever before, each with the question that plays it."""
    requested = said["requested"]
    slack = (1 << 30 if requested > 1 << 30 else MIB if requested > MIB else 1 << 10) // 200 + 1  # of two decimals
    for (height, width), op, code, dtype in itertools.product(MADE_SIZES, ops, codes, ("float16", "float32")):
        found: dict[tuple[str, int, int], list[str]] = {}
        for model in models:
            own = code_of(code, model)
            with contextlib.suppress(ValueError):  # a run that cannot be
                trace = _core.Trace.vae(architecture(model), own, op, dtype, height, width, sm=card.sm)
                for want in trace.wants(requested - slack, requested + slack, is_native):
                    found.setdefault(want, []).append(model)
        for (tensor, size, before), known in found.items():
            beside = said["allocated"] - before if "allocated" in said else None
            if beside is None or beside > _weights(known[0], dtype) // 2:  # what is less had no VAE
                types = dtype if dtype == "float32" else "float16 or bfloat16"
                names = "; ".join(ALIKE.get(name, name) for name in known)
                match = Match(names, op, height, width, types, code, tensor, size, beside, False)
                question = _question(said, known[0], match, dtype, card)
                is_told = {"total", "allocated", "free"} <= said.keys()
                full = Prediction(question).out_of_memory_at if is_told else None
                yield match._replace(played=full is not None and full.name == tensor), question


def _likeliest(runs: Iterable[tuple[Match, Question]], is_tile: bool) -> list[tuple[Match, Question]]:
    """Each run once, the likeliest first: one that runs out there when it is played, a decode, in the type that the
    program runs a model in, of a usual size."""

    def order(one: tuple[Match, Question]) -> tuple[bool, ...]:
        match, question = one
        is_rare = (match.height, match.width) not in MADE_SIZES[:COMMON]
        return not match.played, match.op != "decode", is_rare, not question.assumed

    found: dict[tuple[Any, ...], tuple[Match, Question]] = {}
    for match, question in sorted(runs, key=order):  # those of the commonest sizes come first
        if not is_tile or match.height * match.width <= LARGEST_TILE**2:
            run = match.op, match.height, match.width, match.dtype, match.runtime
            found.setdefault(run, (match, question))
    return list(found.values())


@functools.cache
def _weights(model: str, dtype: str) -> int:
    """Bytes of a VAE's weights."""
    return sum(parameter_bytes(tuple(sorted(architecture(model).items())), "diffusers", dtype)[0])


def _question(said: Mapping[str, int], model: str, match: Match, dtype: str, card: Gpu) -> Question:
    """The run where it has what it had there: what PyTorch held, and what was free, less what was held beside it."""
    question = ask(model, match.op, match.height, match.width, runtime=match.runtime, gpu=card)
    if ELEMENT_BYTES[question.job.dtype] != ELEMENT_BYTES[dtype]:  # it was told to take another type
        question = ask(model, match.op, match.height, match.width, dtype=dtype, runtime=match.runtime, gpu=card)
    if match.beside is None:
        return question
    others = max(match.beside - _weights(model, dtype), 0)
    room = sum(said.get(name, 0) for name in ("allocated", "cached", "free")) - others
    return replace(question, card=Card(card, max(card.reported_memory - CONTEXT - room, 0)))


def _rounded(question: Question) -> Prediction:
    """What is predicted where others hold a round figure, which a command can be given."""
    card = question.card
    return Prediction(replace(question, card=replace(card, used=-(-card.used // ROUNDED) * ROUNDED)))


def _card_of(size: int, maker: str) -> Gpu:
    """The maker's listed card whose memory is nearest to so many bytes."""
    names = gpu_names() if maker == "NVIDIA" else coarse_names(maker)
    cards = [find_gpu(name) for name in names] or [find_gpu(f"apple {round(size / 2**30)} GB", max(size, 1 << 30))]
    return min(cards, key=lambda card: abs(card.total_memory - size))


# ---- stable-diffusion.cpp's graphs ----


def _of_graphs(size: int, models: Sequence[str], ops: Sequence[str]) -> Explanation:
    """Of a compute buffer of so many bytes, which in another version of the program may differ by a thousandth."""
    matches = []
    for (height, width), model, op, direct in itertools.product(MADE_SIZES, models, ops, (False, True)):
        # What the buffer takes for each pixel (`vaemem.ESTIMATORS`), before the graph is laid out.
        least = {("decode", False): 6656, ("decode", True): 2816, ("encode", False): 3382, ("encode", True): 1538}
        rough = max(least[op, direct], 160 + height * width // 1024) * height * width
        if 0.9 * rough - MIB < size < 1.1 * rough + MIB and not (height % 8 or width % 8):
            buffer = graph(f"vae-{op}r", height, width, model=model, conv_direct=direct).buffer
            if abs(buffer - size) <= size // 1000:
                how = "sd.cpp --vae-conv-direct" if direct else "sd.cpp"
                run = model, op, height, width, "float32", how
                matches.append(Match(*run, "the compute buffer", buffer, beside=None, played=True))
    matches.sort(key=lambda match: abs(match.bytes - size))
    notes = [f"Graphs are those of {SDCPP_VERSION}."]
    if matches and matches[0].runtime == "sd.cpp":
        how = "vaemem plan MODEL HxW --runtime sd.cpp says how much"
        notes.append(f"--vae-conv-direct and --vae-tiling make it smaller: {how}.")
    if not matches:
        notes.insert(0, "No VAE's graph at a usual size has a compute buffer of as many bytes: it was another model's.")
    return Explanation({"requested": size}, matches[:MOST_MATCHES], notes, None)
