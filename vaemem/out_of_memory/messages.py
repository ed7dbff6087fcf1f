"""What an out-of-memory message says, and the lines around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vaemem._common import MIB, OPS
from vaemem._errors import ArgumentError

SEGMENT_STEP = 2 * MIB  # of which all that the native allocator asks for are multiples
SLACK = 64 * MIB  # products' workspaces, and what the allocator rounds up
SMALL_SEGMENTS = (SEGMENT_STEP, 20 * MIB)  # what it asks for, whatever smaller tensor it is for
# By what a text says of a model; the first that it says.
NAMED = {r"flux": "flux", r"sdxl|\bxl\b": "sdxl", r"qwen": "qwen-image", r"\bwan|KLWan": "wan2.1"}
_UNITS = {"b": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40}  # by the first letter
_NUMBER = r"\d{1,12}(?:[.,]\d{1,6})?"
_SIZE = rf"({_NUMBER} ?(?:bytes|[KMGT]i?B))"
# What messages say, by the name of what it is.
_SAYS = {
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
# ggml's, of any backend: CUDA and ROCm, Vulkan, SYCL, Metal, CANN. The graph's allocator says the same for each.
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
LOOK_AHEAD = 1.05  # how much more than a product's copy the pool asks for
_HOST = re.compile(r"DefaultCPUAllocator:.{0,99}? tried to allocate (\d{1,15}) bytes", re.I)
_BARE = re.compile(r"Allocation on device|(CUDA|HIP|XPU|CUDA error:) out of memory", re.I)
_BEGINS = re.compile(r"Tried to allocate|Currently allocated|Could not allocate tensor", re.I)  # a message's figures
_TILED = re.compile(r"tiled_|retrying with tiled|tiled vae|vae\w*tiled", re.I)
# Whose card it is, where it is not NVIDIA's: the makers of cards that answers are coarse for. DirectML runs on
# AMD's mostly.
_MAKERS_SAID = {
    "HIP out of memory": "AMD", "XPU out of memory": "Intel", "MPS backend out of memory": "Apple",
    "not enough GPU video memory": "AMD",
}  # fmt: skip
# What a traceback goes through, by file and function of its frames, or by the node that ComfyUI names.
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
class Said:
    """What a message of PyTorch's says. bytes: its figures by their names; within: how far each may be off, for it is
    printed with two decimals; is_native: whether the native allocator says it; is_tile: whether a run in tiles raised
    it; maker: whose card it is."""

    bytes: dict[str, int]
    within: dict[str, int]
    is_native: bool
    is_tile: bool
    maker: str

    @property
    def is_small(self) -> bool:
        """Whether the request stands for any smaller tensor."""
        return self.is_native and self.bytes["requested"] in SMALL_SEGMENTS

    @property
    def tells(self) -> bool:
        """Whether its figures tell the run: what was allocated, cached and free when it was refused."""
        return {"allocated", "cached", "free"} <= self.bytes.keys()

    @property
    def range(self) -> tuple[int, int]:
        """The tensor has more bytes than the first, and at most the second: a segment is rounded up."""
        size, within = self.bytes["requested"], self.within["requested"]
        return size - within - (SEGMENT_STEP if self.is_native else 1), size + within

    @property
    def spare(self) -> int:
        """Bytes that were cached or free at the most when it was refused, with room for what a trace leaves out."""
        names = "cached", "free"
        known = sum(self.bytes.get(name, 0) + self.within.get(name, 0) for name in names)
        return known + SLACK if self.tells else 0

    @property
    def is_lowered(self) -> bool:
        """Whether the card's library may copy a convolution's input for each element of its filter, as MIOpen does."""
        return self.maker == "AMD" and not self.is_directml

    @property
    def is_directml(self) -> bool:
        """Whether DirectML says it, which names the tensor's own bytes and nothing else."""
        return self.maker == "AMD" and not self.is_native


def host_bytes(text: str) -> int | None:
    """What a message says that the host's memory had not."""
    found = _HOST.search(text)
    return int(found[1]) if found else None


def buffer_bytes(text: str) -> int | None:
    """The bytes of a buffer that a message of ggml's is about."""
    buffer = _first(_BUFFER, text)
    return round(_number(buffer) * (MIB if re.search("[.,]", buffer) else 1)) if buffer else None


def pool_bytes(text: str) -> int | None:
    """The bytes of a product's copy that a message of ggml's says the pool had no room for."""
    pool = _first(_POOL, text)
    return round(_number(pool) * MIB / LOOK_AHEAD) if pool else None


def read_message(text: str) -> Said | None:
    """The figures of the first message of PyTorch's in a text; None where it has none. ValueError for another text."""
    begins = [found.start() for found in _BEGINS.finditer(text)]
    figures = text[begins[0] : begins[1] if len(begins) > 1 else None] if begins else ""
    read = {name: _bytes(told) for name, patterns in _SAYS.items() if (told := _first(patterns, figures))}
    if "requested" not in read:
        if not (_BARE.search(text) or begins):
            raise ArgumentError("error", "an out-of-memory message of PyTorch's or ggml's", repr(text[:200]))
        return None
    said, within = ({name: one[i] for name, one in read.items()} for i in (0, 1))
    if "reserved" in said:
        said["cached"] = max(said.pop("reserved") - said.get("allocated", 0), 0)
        within["cached"] = within.pop("reserved") + within.get("allocated", 0)
    # What stands before the figures is of the run that raised them; behind them, where no other message follows.
    is_tile = bool(_TILED.search(text if len(begins) == 1 else text[: begins[0]]))
    maker = next((maker for words, maker in _MAKERS_SAID.items() if words.lower() in text.lower()), "NVIDIA")
    return Said(said, within, "tried to allocate" in figures.lower(), is_tile, maker)


def _first(patterns: Sequence[str], text: str) -> str:
    """What the first of the patterns that are found has in brackets."""
    return next((found[1] for pattern in patterns if (found := re.search(pattern, text, re.I))), "")


def _number(said: str) -> float:
    return float(said.replace(",", "."))


def _bytes(said: str) -> tuple[int, int]:
    """A size, and how far it may be off."""
    number, unit = re.split(r" ?(?=[A-Za-z])", said, maxsplit=1)
    size = _UNITS[unit[0].lower()]
    return round(_number(number) * size), size // 200 + 1


# ---- what the lines around a message say ----


def models_said(text: str) -> list[str]:
    """The model that a text names; none where it names none."""
    return [model for said, model in NAMED.items() if re.search(said, text, re.I)][:1]


def ops_said(text: str) -> list[str]:
    """The operations that a text may be about, by the functions that a traceback names."""
    named: list[str] = [op for op in OPS if re.search(rf"{op}(?:_first_stage|_tiled|r\.)|vae[._ ]?{op}", text, re.I)]
    return named or ["decode", "encode"]


def parts_said(text: str) -> list[str]:
    """The parts of a pipeline that a traceback goes through, of `_PARTS`; all where it names none."""
    begins = [found.start() for found in _BEGINS.finditer(text)]
    text = text[: begins[1] if len(begins) > 1 else None]
    frames = [" ".join(frame) for frame in _FRAME.findall(text)] + _NODE.findall(text)
    where = "\n".join(frames) or text
    return [part for part, names in _PARTS.items() if re.search(names, where)] or [*_PARTS]


def loads_weights(text: str) -> bool:
    """Whether a traceback's frames move or cast a weight."""
    return any(_LOADS.search(" ".join(frame)) for frame in _FRAME.findall(text))


def programs_said(text: str) -> list[str]:
    """Whose code a text may be about, by its files and lines."""
    if re.search(r"comfy", text, re.I) or "Device limit" in text:
        return ["comfyui"]
    if re.search(r"webui|decode_first_stage", text):
        return ["a1111"]
    if "diffusers" in text:
        return ["diffusers"]
    return ["diffusers", "comfyui", "a1111"]


def notes_on(said: Said, has_matches: bool, parts: Sequence[str], is_weight: bool) -> Iterator[str]:
    """What follows from a message's figures, and from the parts that its traceback goes through, beside the run."""
    figures = said.bytes
    if said.is_small:
        size = figures["requested"] // MIB
        yield (
            f"PyTorch asked for a segment of {size} MiB, which stands for any tensor of less than"
            f" {10 if size == 20 else 1} MiB: it does not tell which run it was. The card was full before that."
        )
    elif is_weight:
        yield "The traceback moves a weight to the card, and no VAE's weight is as large: no VAE's run was looked for."
    elif "VAE" not in parts:
        yield f"The traceback goes through a {' and a '.join(parts)}, not a VAE: no VAE's run was looked for."
    elif not has_matches and said.is_tile:
        yield "No tensor of a tile's run is as large, in tiles of the sides that programs take unless they are told."
    elif not has_matches:
        yield (
            "No tensor of a VAE's run at a usual size is as large: it was another part of the pipeline, such as the"
            " denoiser, or another size. vaemem fits MODEL SIZE shows what each part takes."
        )
    if said.is_tile and has_matches:
        yield "It was raised in tiles, which ComfyUI and Forge retry in: the size is a tile's."
    if "allocated" in figures and figures["allocated"] > figures.get("total", figures["allocated"]):
        yield "More was allocated than the card has: Windows' driver had already spilled to the host's memory."
    if figures.get("free", -1) >= figures["requested"]:
        yield "The card had more free than was asked for: the limit was set lower, or the host's page file was full."
