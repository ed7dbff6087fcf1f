"""Read an out-of-memory message and the lines around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vaemem._common import MIB, OPS
from vaemem._errors import ArgumentError

SEGMENT_STEP = 2 * MIB  # the native allocator requests multiples of this
SLACK = 64 * MIB  # for workspaces of products and the allocator's rounding
SMALL_SEGMENTS = (SEGMENT_STEP, 20 * MIB)  # requested for any smaller tensor
# {words in a text: model}; the first that matches counts.
NAMED = {r"flux": "flux", r"sdxl|\bxl\b": "sdxl", r"qwen": "qwen-image", r"\bwan|KLWan": "wan2.1"}
_UNITS = {"b": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40}  # by first letter
_NUMBER = r"\d{1,12}(?:[.,]\d{1,6})?"
_SIZE = rf"({_NUMBER} ?(?:bytes|[KMGT]i?B))"
# Patterns of the figures in messages.
_FIGURES = {
    "requested": (
        rf"Tried to allocate {_SIZE}", rf"Requested\s*: ?{_SIZE}", rf"Could not allocate tensor with ({_NUMBER} bytes)",
    ),
    "total": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"Device limit\s*: ?{_SIZE}"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free;", rf"Free \(according to CUDA\)\s*: ?{_SIZE}"),
    "allocated": (
        rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated", rf"Currently allocated\s*: ?{_SIZE}",
    ),
    "cached": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} (?:reserved in total by PyTorch|cached\))",),
    "process": (rf"this process has {_SIZE} memory in use",),
}  # fmt: skip
# ggml's messages with any backend: CUDA and ROCm, Vulkan, SYCL, Metal, CANN. The graph's allocator has one for all.
_BUFFER = (
    r"failed to allocate [\w.:-]+ buffer of size (\d{1,15})\b",
    rf"allocating ({_NUMBER}) MiB on device \d+: \w+ failed",
    r"Device memory allocation of size (\d{1,15}) failed",
    r"can't allocate (\d{1,15}) Bytes of memory on device",
    rf"failed to allocate buffer, size = {{0,8}}({_NUMBER}) MiB",
    rf"vae compute buffer size[:=]? *({_NUMBER}) MB",
    rf"compute buffer size[:=]? *({_NUMBER}) MB",
)
_POOL = (rf"pool\[\d+\]: alloc of ({_NUMBER}) MiB failed",)
LOOK_AHEAD = 1.05  # the pool requests this much more than a product's copy
_HOST = re.compile(r"DefaultCPUAllocator:.{0,99}? tried to allocate (\d{1,15}) bytes", re.I)
_BARE = re.compile(r"Allocation on device|(CUDA|HIP|XPU|CUDA error:) out of memory", re.I)
_BEGINS = re.compile(r"Tried to allocate|Currently allocated|Could not allocate tensor", re.I)  # figures begin here
_TILED = re.compile(r"tiled_|retrying with tiled|tiled vae|vae\w*tiled", re.I)
# Makers of cards other than NVIDIA's, for which answers are coarse. DirectML mostly runs on AMD's.
_MAKERS = {
    "HIP out of memory": "AMD", "XPU out of memory": "Intel", "MPS backend out of memory": "Apple",
    "not enough GPU video memory": "AMD",
}  # fmt: skip
# Parts of a pipeline by files and functions in a traceback, or by the node that ComfyUI names.
_PARTS = {
    "VAE": (
        r"VAE(?:De|En)code|autoencoder\w*\.py|[\\/]vae\w*\.py|first_stage|diffusionmodules[\\/]model\.py|\.py decode"
        r"|\bsd\.py encode\b|(?:de|en)code_tiled"
    ),
    "denoiser": (
        r"KSampler|SamplerCustom|calc_cond_batch|apply_model|k_diffusion|openaimodel\.py|ldm[\\/]\w+[\\/]model\.py"
        r"|flux[\\/]model\.py|transformer_\w+\.py|unet_(?!2d_blocks)\w+\.py"
    ),
    "text encoder": (
        r"CLIPTextEncode|encode_prompt|encode_from_tokens|text_encoders?[\\/]|sd1_clip\.py|modeling_\w+\.py forward"
        r"|transformers[\\/](?:models|integrations)[\\/]"
    ),
}
_FRAME = re.compile(r'File "([^"]{1,400})", line \d{1,6}, in ([\w<>.]{1,100})')
_NODE = re.compile(r"(?:executing|Node Type:\W{0,4}) ?(\w{1,100})")
_LOADS = re.compile(
    r"module\.py (?:convert|_apply)\b|model_patcher\.py|cast_bias_weight|cast_to_device|set_module_tensor_to_device"
)


@dataclass(frozen=True)
class OomMessage:
    """A message of PyTorch's.

    bytes: its figures by name
    within: the largest error of each figure, which is printed with two decimals
    is_native: whether it is the native allocator's
    is_tile: whether a run in tiles raised it
    maker: of the card
    """

    bytes: dict[str, int]
    within: dict[str, int]
    is_native: bool
    is_tile: bool
    maker: str

    @property
    def is_small(self) -> bool:
        """Whether the request may stand for any smaller tensor."""
        return self.is_native and self.bytes["requested"] in SMALL_SEGMENTS

    @property
    def tells(self) -> bool:
        """Whether its figures identify the run: allocated, cached and free at the refusal."""
        return {"allocated", "cached", "free"} <= self.bytes.keys()

    @property
    def range(self) -> tuple[int, int]:
        """The tensor has more bytes than the first number and at most the second, because segments are rounded up."""
        size, within = self.bytes["requested"], self.within["requested"]
        return size - within - (SEGMENT_STEP if self.is_native else 1), size + within

    @property
    def spare(self) -> int:
        """Most bytes that were cached or free at the refusal, with slack for memory that a trace leaves out."""
        names = "cached", "free"
        known = sum(self.bytes.get(name, 0) + self.within.get(name, 0) for name in names)
        return known + SLACK if self.tells else 0

    @property
    def is_lowered(self) -> bool:
        """Whether the card's library may copy a convolution's input for each filter element, as MIOpen does."""
        return self.maker == "AMD" and not self.is_directml

    @property
    def is_directml(self) -> bool:
        """Whether it is DirectML's, which names only the tensor's own bytes."""
        return self.maker == "AMD" and not self.is_native


def read_host_bytes(text: str) -> int | None:
    """Return the bytes of a failed allocation in host memory; None if the text has no such message."""
    found = _HOST.search(text)
    return int(found[1]) if found else None


def read_buffer_bytes(text: str) -> int | None:
    """Return the bytes of the buffer in a message of ggml's, or None."""
    buffer = _first(_BUFFER, text)
    return round(_number(buffer) * (MIB if re.search("[.,]", buffer) else 1)) if buffer else None


def read_pool_bytes(text: str) -> int | None:
    """Return the bytes of a product's copy in a message about ggml's pool, or None."""
    pool = _first(_POOL, text)
    return round(_number(pool) * MIB / LOOK_AHEAD) if pool else None


def read_message(text: str) -> OomMessage | None:
    """Read PyTorch's first message in a text; None if it has no figures. ValueError for another text."""
    begins = [found.start() for found in _BEGINS.finditer(text)]
    figures = text[begins[0] : begins[1] if len(begins) > 1 else None] if begins else ""
    read = {name: _bytes(size) for name, patterns in _FIGURES.items() if (size := _first(patterns, figures))}
    if "requested" not in read:
        if not (_BARE.search(text) or begins):
            raise ArgumentError("error", "an out-of-memory message of PyTorch's or ggml's", repr(text[:200]))
        return None
    figures_bytes, within = ({name: one[i] for name, one in read.items()} for i in (0, 1))
    if "reserved" in figures_bytes:
        figures_bytes["cached"] = max(figures_bytes.pop("reserved") - figures_bytes.get("allocated", 0), 0)
        within["cached"] = within.pop("reserved") + within.get("allocated", 0)
    # Text before the figures belongs to their run; text behind them too, unless another message follows.
    is_tile = bool(_TILED.search(text if len(begins) == 1 else text[: begins[0]]))
    maker = next((maker for words, maker in _MAKERS.items() if words.lower() in text.lower()), "NVIDIA")
    return OomMessage(figures_bytes, within, "tried to allocate" in figures.lower(), is_tile, maker)


def _first(patterns: Sequence[str], text: str) -> str:
    """Return the group of the first pattern that matches; "" if none does."""
    return next((found[1] for pattern in patterns if (found := re.search(pattern, text, re.I))), "")


def _number(text: str) -> float:
    return float(text.replace(",", "."))


def _bytes(text: str) -> tuple[int, int]:
    """Return a size and its largest error."""
    number, unit = re.split(r" ?(?=[A-Za-z])", text, maxsplit=1)
    size = _UNITS[unit[0].lower()]
    return round(_number(number) * size), size // 200 + 1


# ---- the lines around a message ----


def find_models(text: str) -> list[str]:
    """Return the model that a text names, in a list; empty if it names none."""
    return [model for words, model in NAMED.items() if re.search(words, text, re.I)][:1]


def find_ops(text: str) -> list[str]:
    """Return the operations that a text may be about, from the functions in its traceback."""
    named: list[str] = [op for op in OPS if re.search(rf"{op}(?:_first_stage|_tiled|r\.)|vae[._ ]?{op}", text, re.I)]
    return named or ["decode", "encode"]


def find_pipeline_parts(text: str) -> list[str]:
    """Return the parts of a pipeline in a traceback, of `_PARTS`; all if it has none."""
    begins = [found.start() for found in _BEGINS.finditer(text)]
    text = text[: begins[1] if len(begins) > 1 else None]
    frames = [" ".join(frame) for frame in _FRAME.findall(text)] + _NODE.findall(text)
    where = "\n".join(frames) or text
    return [part for part, names in _PARTS.items() if re.search(names, where)] or [*_PARTS]


def loads_weights(text: str) -> bool:
    """Return whether a traceback's frames move or cast a weight."""
    return any(_LOADS.search(" ".join(frame)) for frame in _FRAME.findall(text))


def find_programs(text: str) -> list[str]:
    """Return the programs that a text may come from, by its files and lines."""
    if re.search(r"comfy", text, re.I) or "Device limit" in text:
        return ["comfyui"]
    if re.search(r"webui|decode_first_stage", text):
        return ["a1111"]
    if "diffusers" in text:
        return ["diffusers"]
    return ["diffusers", "comfyui", "a1111"]


def interpret(message: OomMessage, has_matches: bool, parts: Sequence[str], is_weight: bool) -> Iterator[str]:
    """Yield notes on a message's figures and on the parts in its traceback."""
    figures = message.bytes
    if message.is_small:
        size = figures["requested"] // MIB
        yield (
            f"PyTorch requested a segment of {size} MiB, which may be for any tensor of less than"
            f" {10 if size == 20 else 1} MiB: it does not identify the run. The card was full before that."
        )
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
    if figures.get("free", -1) >= figures["requested"]:
        yield "The card had more free than was requested: the limit was lower, or the host's page file was full."
