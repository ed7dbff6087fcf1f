"""A published measurement of memory, and the words that its columns may have.

rows.csv has a line for each value that somebody measured and published, in any order: two counters are two lines. A
cell is empty if nobody said. Names are those of vaemem's own tables (`vaemem.tables.table`); these columns are more:

    source      who published it: a row of sources.csv, OWNER/REPOSITORY#ISSUE, OWNER/REPOSITORY@COMMIT:FILE or a page.
                "learned" there: vaemem has rules that follow from its rows
    runtime     the program that ran (`RUNTIMES`)
    frames      of a video; empty for an image
    steps       how often the denoiser ran
    device      the card, as its driver names it: "NVIDIA GeForce RTX 4090"
    versions    "torch 2.7.1+cu126, cudnn 9.5.1, diffusers 0.34.0"
    way         of a pipeline: "offload none, VAE whole" (`OFFLOADS`, `VAE_WAYS`)
    components  other types of weights, by role: "transformer nf4, text_encoder_2 nf4"
    settings    what else is known of the run: "attention xformers, safety_checker" (`SETTINGS`)
    counter     what was read (`COUNTERS`)
    bytes       its value
    doubtful    why the row is not scored, or nothing
    note        what was printed
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vaemem.tables.contribution import CONTRIBUTED as COLUMNS

HERE = Path(__file__).parent
COUNTERS = {
    "allocated": "torch.cuda.max_memory_allocated() of the process",
    "reserved": "torch.cuda.max_memory_reserved() of the process",
    "allocated above": "max_memory_allocated() above what was allocated before the run",
    "reserved above": "max_memory_reserved() above what was reserved before the run",
    "driver": "the driver's count of the process or the card, as nvidia-smi shows it",
    "mlx": "mx.get_peak_memory()",
    "mlx above": "the same above the weights",
    "buffer": "ggml's compute buffer",
    "weights": "ggml's buffer of weights",
    "unnamed": "not said",
}
RUNTIMES = (
    *("diffusers", "bfl", "ldm", "a1111", "forge", "sdnext", "comfyui", "invokeai", "sglang", "vllm-omni", "cache-dit"),
    *("sd.cpp", "mflux", "other"),
)
OPS = ("encode", "decode", "encode_tiled", "decode_tiled", "denoiser", "text", "weights", "pipeline", "image to image")
PHASES = ("", "load", "encode prompt", "encode image", "denoise", "decode")
DTYPES = ("", "float32", "float16", "bfloat16")
OFFLOADS = "none|model|sequential|group|unknown|leaf_level( stream)?|block_level( [0-9]+)?( stream)?"
VAE_WAYS = ("whole", "tiled", "sliced", "tiled and sliced")
SETTINGS = {
    "attention plain": "a matrix of all scores: diffusers before PyTorch 2, without xformers",
    "attention sliced": "attention slicing",
    "attention xformers": "memory-efficient attention",
    "allocator async": "cudaMallocAsync",
    "safety_checker": "the safety checker is loaded",
    "pipeline resident": "the whole pipeline is on the card while the VAE runs",
    "no guidance": "one denoising for each image",
    "direct": "stable-diffusion.cpp's direct convolution",
    "flash": "stable-diffusion.cpp's flash attention",
    "half vae": "SDXL's VAE is not converted to float32",
    "cold": "the process's first run",
    "own tiles": "tiles of an extension of its own",
    "scaled": "stable-diffusion.cpp before July 2025, which copied tensors to scale them",
    "compiled": "torch.compile",
    "other code": "fused projections, LoRA, caches, another compiler",
    "parallel": "spread over several cards",
    "gradients": "without torch.no_grad()",
}
VERSIONS = "([a-z_]+ [^ ,]+(, |$))*"
LEAST = 1 << 20
NUMBERS = ("height", "width", "batch", "frames", "tokens", "steps", "tile", "bytes")
SOURCE_COLUMNS = ("source", "publisher", "address", "license", "seen", "learned")


class Measurement(NamedTuple):
    """A row. Numbers that are not known are None, words that are not known are empty."""

    source: str
    runtime: str
    model: str
    op: str
    phase: str
    height: int | None
    width: int | None
    batch: int | None
    frames: int | None
    tokens: int | None
    steps: int | None
    dtype: str
    components: str
    tile: int | None
    tile_overlap: float | None
    way: str
    device: str
    versions: str
    settings: str
    counter: str
    bytes: int
    doubtful: str
    note: str

    @property
    def offload(self) -> str:
        return self.way.partition(", VAE ")[0].removeprefix("offload ") or "unknown"

    @property
    def vae(self) -> str:
        return self.way.partition(", VAE ")[2] or "whole"

    def has(self, setting: str) -> bool:
        """Tell whether the run had a setting of `SETTINGS`."""
        return setting in self.settings.split(", ")

    @property
    def stored(self) -> dict[str, str]:
        """The types of weights by role."""
        return {role: kind for role, _, kind in (one.partition(" ") for one in self.components.split(", ") if one)}

    def version(self, of: str) -> str | None:
        """Return the version of "torch", "cudnn" or "diffusers"; None if it is not known."""
        found = [one.partition(" ")[2] for one in self.versions.split(", ") if one.startswith(f"{of} ")]
        return found[0] if found else None


def parse(cells: Mapping[str, str]) -> Measurement:
    """Make a row of a line of rows.csv. ValueError if a word is unknown, or a number is none."""
    if tuple(cells) != COLUMNS or None in cells.values():
        found = sum(cell is not None for cell in cells.values()) + len(cells.get(None, ())) - (None in cells)  # type: ignore[call-overload]
        raise ValueError(f"expected {len(COLUMNS)} cells, got {found}")
    values: dict[str, object] = dict(cells)
    for name in NUMBERS:
        values[name] = _number(name, cells[name])
    values["tile_overlap"] = float(cells["tile_overlap"]) if cells["tile_overlap"] else None
    row = Measurement(**values)  # type: ignore[arg-type]
    _expect("runtime", row.runtime, RUNTIMES)
    _expect("op", row.op, OPS)
    _expect("phase", row.phase, PHASES)
    _expect("dtype", row.dtype, DTYPES)
    _expect("counter", row.counter, COUNTERS)
    for setting in filter(None, row.settings.split(", ")):
        _expect("settings", setting, SETTINGS)
    if row.way:
        if not re.fullmatch(OFFLOADS, row.offload):
            raise ValueError(f"way: offload: expected {OFFLOADS}, got {row.offload!r}")
        _expect("way: VAE", row.vae, VAE_WAYS)
    if any(not cell.isprintable() or cell != cell.strip() for cell in cells.values()):
        raise ValueError("expected printable text without spaces around it")
    if not re.fullmatch(VERSIONS, row.versions):
        raise ValueError(f"versions: expected names and versions as 'torch 2.7.1, cudnn 9.5.1', got {row.versions!r}")
    if not row.bytes or row.bytes < LEAST:
        raise ValueError(f"bytes: expected at least {LEAST} bytes, got {row.bytes or 'nothing'}: is it in MiB?")
    if not row.doubtful and row.op != "weights" and not (row.height and row.width):
        raise ValueError("height, width: expected the image's size, got nothing; say in doubtful why it is missing")
    return row


def _number(name: str, cell: str) -> int | None:
    if cell and not (cell.isdecimal() and int(cell) > 0):
        raise ValueError(f"{name}: expected a whole number above 0, got {cell!r}")
    return int(cell) if cell else None


def _expect(what: str, word: str, known: object) -> None:
    if word not in known:  # type: ignore[operator]
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, known))}, got {word!r}")  # type: ignore[call-overload]


def read_sources(folder: Path = HERE) -> dict[str, dict[str, str]]:
    """Read sources.csv: rows by their names."""
    with open(folder / "sources.csv", newline="", encoding="utf-8") as file:
        return {row["source"]: row for row in csv.DictReader(file)}


def read_rows(folder: Path = HERE) -> list[Measurement]:
    """Read rows.csv. ValueError names the line of a row that is wrong, is there twice, or has a source that is not in
    sources.csv."""
    sources, lines = read_sources(folder), dict[Measurement, int]()
    with open(folder / "rows.csv", newline="", encoding="utf-8") as file:
        for number, cells in enumerate(csv.DictReader(file), 2):
            try:
                row = parse(cells)
                if row.source not in sources:
                    raise ValueError(f"source: {row.source!r} is not in sources.csv: add a line there")
                if lines.setdefault(row, number) != number:
                    raise ValueError(f"the same as line {lines[row]}")
            except ValueError as wrong:
                raise ValueError(f"rows.csv, line {number}: {wrong}") from None
    return list(lines)
