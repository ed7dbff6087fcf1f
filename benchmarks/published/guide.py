"""The "VAE Performance Optimization Guide" of SeedVR2.5, claim by claim.

A count, a prediction, a recorded measurement or a run on this CPU judges a claim. Otherwise the finding names the
command that measures it on a GPU, or says why nothing here can judge it. The guide is about a video VAE; the claims are
judged for the image VAEs that people use it with, and for its card.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from published.claims import HOLDS, UNKNOWN, Checked, Claim, Finding, judged
from vaemem import _core
from vaemem._common import MIB, distinct, shipped
from vaemem._handmade import handmade, picture
from vaemem._types import DtypeName, TiledOp
from vaemem.engine.tiling import Tiling
from vaemem.engine.vae import VAE
from vaemem.prediction.gpus import Gpu, find_gpu, gpu_names
from vaemem.prediction.predict_vae import Prediction, predict, predict_largest
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.seconds import link_rate, peak
from vaemem.tables.table import seed_table

CARD, MODEL = "RTX 5070 Ti", "sdxl"
DTYPE: DtypeName = "bfloat16"
_CARDS = ("RTX 4060", "RTX 3060", CARD, "RTX 4090")  # of 8, 12, 16 and 24 GB
_SIDE, _TILE = 2048, 1024  # pixels
COUNTED, RUN, PREDICTED, NEEDS_GPU = "counted", "run on this CPU", "predicted", "needs a GPU"
MEASURED, DOCUMENTED, NOWHERE = "measured", "documented", "nothing here judges it"
_RESULTS = Path(__file__).parents[1] / "results"
# Names and generations of tensor cores as NVIDIA's architecture white papers have them, by compute capability.
ARCHITECTURES = {"8.0": ("Ampere", 3), "8.6": ("Ampere", 3), "8.9": ("Ada Lovelace", 4), "9.0": ("Hopper", 4),
                 "10.0": ("Blackwell", 5), "12.0": ("Blackwell", 5)}  # fmt: skip
# Steps that could write into an operand and need no tensor of their own: SiLU, the residual sum, its division.
ELEMENTWISE = re.compile(r"( \[silu\]| \[sum\]|\.resnets\.\d+|\.attentions\.\d+)$")
_ON_A_GPU = "python benchmarks/decode_gpu.py --models sdxl --dtypes bfloat16 --ops decode --sizes 1024"
_PARTS = "python benchmarks/guide_gpu.py --parts"


def judge_claims() -> Checked:
    """Judge every claim of the guide."""
    return Checked((claim, claim.check()) for claim in GUIDE)


def judge_guide() -> str:
    """Show every claim of the guide with its verdict."""
    card = find_gpu(CARD).name
    return judge_claims().text(f"Unless a claim says otherwise: {MODEL}'s decode in {DTYPE} by diffusers on {card}.")


@functools.cache
def _predicted(op: TiledOp = "decode_tiled", side: int = _SIDE, model: str = MODEL, **asked: Any) -> Prediction:
    return predict(model, op, side, side, **{"dtype": DTYPE, "gpu": CARD, **asked})


@functools.cache
def _traced(tile: int = _TILE, overlap: float = 0.25) -> _core.Trace:
    arch = _core.models()[MODEL]
    return _core.Trace.vae(arch, "diffusers", "decode", DTYPE, _SIDE, _SIDE, 1, tile, tile_overlap=overlap)


def _sizes(p: Prediction) -> str:
    return f"allocates {p.allocated / MIB:.0f} and reserves {p.reserved / MIB:.0f} MiB"


# ---- the card ----


def _bandwidth(gpu: Gpu) -> float:
    """Return GB/s: two transfers a clock."""
    return float(2 * gpu.properties["memClockRateKHz"] * gpu.properties["memoryBusWidth"] / 8 / 1e6)


def _architecture() -> Finding:
    gpu = find_gpu(CARD)
    name, generation = ARCHITECTURES[gpu.capability]
    found = f"compute capability {gpu.capability} is {name}, whose tensor cores are of generation {generation}"
    return judged((name, generation) == ("Ada Lovelace", 4), COUNTED, found)


def _memory_speed() -> Finding:
    own, stated = _bandwidth(find_gpu(CARD)), 504
    alike = [name for name in gpu_names() if round(_bandwidth(find_gpu(name))) == stated]
    named = ", ".join(name.removeprefix("NVIDIA GeForce ") for name in alike)
    return judged(round(own) == stated, COUNTED, f"{own:.0f} GB/s; {stated} are those of {named}")


def _tensor_rates() -> Finding:
    half, tf32, other = (peak(*asked) / 1e12 for asked in ((CARD,), (CARD, "float32"), ("RTX 4090",)))
    found = (
        f"{half:.0f} TFLOP/s in half precision with float32 sums, as PyTorch's convolutions make, {tf32:.0f} in TF32."
        f" Sums in half precision and half of all weights zero would each double it, to {4 * half:.0f}: 660 is what"
        f" that makes of an RTX 4090 ({4 * other:.0f})"
    )
    return judged(4 * half >= 660, COUNTED, found)


def _int8_rate() -> Finding:
    stated, (own, other) = 1321, (4 * 2 * peak(card) / 1e12 for card in (CARD, "RTX 4090"))
    found = (
        f"INT8 runs at twice the rate of half precision. Sums in half precision double it again, and so does a half of"
        f" all weights at zero: {own:.0f} TOPS. {stated} is what that makes of an RTX 4090 ({other:.0f}). PyTorch runs"
        " no convolution of these VAEs in INT8"
    )
    return judged(own >= stated, COUNTED, found)


def _tf32_speed() -> Finding:
    known = json.loads(shipped("rates.json"))["flops_per_multiprocessor_and_clock"]

    def gain(name: str) -> float:
        gpu = find_gpu(name)
        plain = gpu.multiprocessors * known[gpu.capability]["float32"] * gpu.properties["smClockRateKHz"] * 1e3
        return peak(gpu, "float32") / float(plain)

    found = (
        f"TF32's peak is {gain(CARD):.1f} times float32's on this card, {gain('A100 80GB'):.1f} times on an A100. For"
        f" convolutions PyTorch has it on by default, and in {DTYPE} there is nothing that it changes"
    )
    return judged(gain(CARD) >= 8, COUNTED, found)


def _tf32_support() -> Finding:
    on, off = (_predicted("decode", 1024, dtype="float32", allow_tf32=on) for on in (True, False))
    same = _predicted("decode", 1024, allow_tf32=False).reserved == _predicted("decode", 1024).reserved
    found = (
        f"compute capability {find_gpu(CARD).capability} has it. It takes memory: a decode of 1024x1024 in float32"
        f" {_sizes(on)} with it, {_sizes(off)} without; in {DTYPE} {'the same' if same else 'not the same'} either way"
    )
    return judged(find_gpu(CARD).sm >= 80, PREDICTED, found)


def _benchmark() -> Finding:
    try:
        _predicted("decode", 1024, cudnn_benchmark=True)
        why = "it is predicted"
    except ValueError as error:
        why = str(error).rpartition("got True: ")[2]
    largest = _predicted("decode", 1024).peak_tensors[0].bytes / MIB
    found = f"{why}. Without it the largest workspace is {largest:.0f} MiB. {_ON_A_GPU} --ablation"
    return Finding(UNKNOWN, found, NEEDS_GPU)


# ---- layouts and operations ----


def _contiguous() -> Finding:
    sizes = [(size, name.endswith("[contiguous]")) for op, _, size, name in _traced().steps if op == "take"]
    taken, copied = sum(size for size, _ in sizes), sum(size for size, is_copy in sizes if is_copy)
    found = (
        f"in tiles of {_TILE} at {_SIDE}x{_SIDE} the call takes {taken / MIB:.0f} MiB of tensors, one after the other."
        f" {100 * copied / taken:.1f}% are contiguous copies, which convolutions and GroupNorms make by themselves, of"
        " tiles' slices and of what the attention leaves; all else is contiguous already, where .contiguous() does"
        f" nothing. Time: {_PARTS} contiguous"
    )
    return judged(copied > 0.05 * taken, COUNTED, found)


def _in_place() -> Finding:
    gains, ops = list[float](), (("decode", None), ("encode", None), ("decode_tiled", 512))
    for model, (op, tile), dtype in itertools.product(("sdxl", "flux"), ops, (DTYPE, "float32")):
        p = _predicted(op, 1024, model, tile=tile, dtype=dtype)
        rest = max(moment.allocated for moment in p.timeline if not ELEMENTWISE.search(moment.name))
        gains.append(1 - rest / p.peak_allocated)
    p = _predicted("decode", 1024)
    found = (
        f"a tensor that is overwritten stays, and its result is not taken beside it: only steps that compute element by"
        f" element get lower. Without these steps the peaks of {len(gains)} runs are {100 * max(gains):.1f}% lower at"
        f" most, for they lie at convolutions ({p.peak_tensors[0].name}, {p.peak_tensors[0].bytes / MIB:.0f} MiB)"
    )
    return judged(max(gains) >= 0.1, COUNTED, found)


def _channels_last() -> Finding:
    usual, last = (_predicted("decode", 1024, channels_last=on) for on in (False, True))
    times = _times((("torch channels_last", "torch eager"),))
    found = (
        f"a decode of 1024x1024 {_sizes(usual)}, in channels_last it {_sizes(last)}. Its time, as a share of the usual"
        f" layout's: {_ratios(times)}"
    )
    return judged(max(times.values()) < 1, f"{MEASURED}; {PREDICTED}", found)


def _flash() -> Finding:
    heads = ((1, 1, _TILE, 512), (_TILE * 512, _TILE * 512, 512, 1))
    call = (DTYPE, heads, heads, heads, None, False, False)
    chosen = _core.Trace.choose_kernel(call, find_gpu(CARD).sm, 0, ("flash", "efficient", "math"))
    found = f"of flash, efficient and math PyTorch takes {chosen} for one head of 512 channels, the VAEs' middle block"
    return judged(chosen == "flash", COUNTED, found)


# ---- transfers and blending ----


def _transfers() -> Finding:
    size = 2 * _SIDE * _SIDE * (4 / 64 + 3)
    share = size / link_rate("PCIe 5.0 x16").value / (_traced().flops / peak(CARD))
    found = (
        f"latents and image of {_SIDE}x{_SIDE} have {size / MIB:.0f} MiB, whose copies take {100 * share:.1f}% of the"
        " decode's time at the card's peak, or less; from pinned memory alone they overlap. Time:"
        f" {_PARTS} transfers"
    )
    return Finding(UNKNOWN, found, f"{COUNTED}; {NEEDS_GPU}")


def _preallocated() -> Finding:
    takes = [name for op, _, _, name in _traced().steps if op == "take"]
    result = 3 * _SIDE * _SIDE * 2
    held = _predicted(tile=_TILE).allocated - _predicted("decode", _TILE).allocated
    found = (
        f"{takes.count('cat')} of the {len(takes)} tensors that a decode in tiles takes are put together from others,"
        f" {takes.count('blend')} are lines that are blended, the rest are the model's. The tiles that are kept add"
        f" {held / MIB:.0f} MiB to the peak, a result beside them from the start would have {result / MIB:.0f}. What"
        f" PyTorch's allocator caches it gives again without asking the driver. Time: {_PARTS} pre-allocated"
    )
    return judged(takes.count("cat") > len(takes) / 2, COUNTED, found)


def _weights() -> Iterator[tuple[str, VAE]]:
    yield "sdxl's layout, made by hand", handmade("sdxl")
    yield from ((f"{name}'s, random", VAE.random(name)) for name in ("sdxl", "flux"))


@functools.cache
def _quality(side: int = 96, tile: int = 64) -> tuple[str, float, float]:
    """Compare tiles with the whole image, for several models' weights.

    Return PSNR and SSIM by blend as text, the worst SSIM, and the share of a run in tiles that its ramps take."""
    said, worst, share = list[str](), 1.0, 0.0
    for name, vae in _weights():
        z = vae.encode(picture(side)[None]).mode()
        whole, found = vae.decode(z)[0], list[str]()
        for blend in ("linear", "cosine"):
            tiled = vae.decode(z, tiling=Tiling(tile, 0.25, blend))[0]
            begin = time.perf_counter()
            _ramp(tile // 4)
            made = time.perf_counter() - begin
            assert vae.last_run and vae.last_run.seconds
            share = max(share, 2 * 4 * made / vae.last_run.seconds)  # two for each of 4 tiles
            like = ssim(tiled, whole)
            ratio = np.ptp(whole) / np.sqrt(np.mean((tiled - whole) ** 2))
            found.append(f"{blend} {20 * np.log10(ratio):.1f} dB, SSIM {like:.3f}")
            worst = min(worst, like)
        said.append(f"{name}: {', '.join(found)}")
    return "; ".join(said), worst, share


def _ramp(n: int) -> np.ndarray:
    """Return the shares of the older and of the newer tile in n pixels, as a cosine, (2, n)."""
    newer = (1 - np.cos(np.pi * np.arange(n) / n)) / 2
    return np.array([1 - newer, newer], np.float32)


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the structural similarity of two images (..., height, width).

    As Wang and others (2004) define it, with windows of 7x7 of equal weights. Its constants are shares of b's range.
    """

    def mean(x: np.ndarray) -> np.ndarray:
        return np.asarray(sliding_window_view(x, (7, 7), (-2, -1)).mean((-2, -1)))

    a, b = a.astype(np.float64), b.astype(np.float64)
    c1, c2 = (0.01 * np.ptp(b)) ** 2, (0.03 * np.ptp(b)) ** 2
    ma, mb = mean(a), mean(b)
    spread, joint = mean(a * a) - ma**2 + mean(b * b) - mb**2, mean(a * b) - ma * mb
    return float((((2 * ma * mb + c1) * (2 * joint + c2)) / ((ma**2 + mb**2 + c1) * (spread + c2))).mean())


def _without_loss() -> Finding:
    shown, worst, _ = _quality()
    found = f"96x96 in tiles of 64 compared with the whole image, PSNR and SSIM by blend: {shown}"
    return judged(round(worst, 4) == 1, RUN, found)


def _ramps() -> Finding:
    *_, share = _quality()
    found = f"making every ramp of a decode in tiles takes {100 * share:.4f}% of it here. On a card: {_PARTS} ramps"
    return judged(share >= 0.05, RUN, found)


def _separable() -> Finding:
    plane, ramps, border = 4 * _TILE**2, 4 * 2 * _TILE, 2 * _TILE * _TILE // 4
    found = (
        f"weights of a whole tile of {_TILE} have {plane / MIB:.0f} MiB, {100 * plane / _predicted().allocated:.1f}% of"
        f" the peak, two ramps {ramps >> 10} KiB. Blending a tile's two borders is {3 * 3 * border / 1e6:.0f} MFLOP of"
        f" {_traced(0).flops / 4 / 1e12:.0f} TFLOP for the tile. No convolution is a part of it, and diffusers blends"
        " line by line already"
    )
    return judged(ramps < plane, COUNTED, found)


# ---- tiles ----


def _overlap() -> Finding:
    parts = (0.0, 0.125, 0.25, 0.5)
    made = [_predicted(tile=_TILE, tile_overlap=part) for part in parts]
    found = ", ".join(
        f"{part:g}: {p.allocated / MIB:.0f} and {p.reserved / MIB:.0f}" for part, p in zip(parts, made, strict=True)
    )
    work = _traced(_TILE, parts[-1]).flops / _traced(_TILE, parts[0]).flops
    found = (
        f"tiles of {_TILE} at {_SIDE}x{_SIDE} by the part that overlaps, allocated and reserved in MiB: {found}. Half a"
        f" tile makes {work:.1f} times the work of none: more tiles are kept, and none is smaller"
    )
    return judged(made[-1].allocated < made[0].allocated, PREDICTED, found)


def _smaller() -> Finding:
    made = {tile: _predicted(tile=tile) for tile in (512, 1024, 1536)}
    works = {tile: _traced(tile).flops / _traced(0).flops for tile in made}
    found = "; ".join(f"{tile}: {_sizes(p)}, {works[tile]:.2f} times the whole's work" for tile, p in made.items())
    whole = _predicted("decode")
    is_so = made[512].reserved < made[1024].reserved < whole.reserved
    return judged(is_so, PREDICTED, f"{found}; whole: {_sizes(whole)}")


@functools.cache
def _largest() -> dict[str, int]:
    return {card: predict_largest(MODEL, "decode", DTYPE, gpu=card)[0] for card in _CARDS}


def _thresholds() -> Finding:
    most = _largest()
    tight = predict_largest(MODEL, "decode", DTYPE, gpu=CARD, safe=False)[0]
    found = ", ".join(f"{card} {side}" for card, side in most.items())
    found = (
        f"the largest square that surely fits whole, in pixels a side: {found}; on the {CARD} up to {tight} go through"
        f" tightly. So 1024 needs no tiles on these, and what is above depends on the card"
    )
    return judged(all(1024 <= side <= 2048 for side in most.values()), PREDICTED, found)


def _recommended() -> Finding:
    p, whole = _predicted(tile=_TILE, tile_overlap=0.125), _predicted("decode", _TILE)
    work = f"{_traced(_TILE, 0.125).flops / _traced(0).flops:.2f} times the whole's work"
    found = f"{_SIDE}x{_SIDE} so {_sizes(p)} of {p.available / MIB:.0f}: {p.verdict}, with {work}"
    more = f" Up to {_largest()[CARD]} pixels a side the whole image surely fits, and has no seams"
    return judged(p.fits and whole.fits, PREDICTED, f"{found}.{more}")


def _offload() -> Finding:
    p = _predicted(tile=_TILE)
    held = f"between decodes {p.weights_bytes / MIB:.0f} MiB of weights"
    return Finding(HOLDS, f"{held}; the decode's own {p.peak_reserved / MIB:.0f} stay", PREDICTED)


def _empty_cache() -> Finding:
    kept, emptied = (_predicted("decode", 1024, protocol=name) for name in ("kept", "warm"))
    found = (
        f"three decodes of 1024x1024 in a row reserve {kept.peak_reserved / MIB:.0f} MiB, one after an emptied cache"
        f" {emptied.peak_reserved / MIB:.0f}; they go through with {kept.least_reserved / MIB:.0f} and"
        f" {emptied.least_reserved / MIB:.0f}, since PyTorch gives cached segments back before it gives up"
    )
    return judged(emptied.least_reserved < kept.least_reserved, PREDICTED, found)


# ---- first runs, compiling, graphs and streams ----


def _rows(pattern: str, **equals: str) -> list[dict[str, str]]:
    """Return the rows with these values from files in benchmarks/results."""
    files = sorted(_RESULTS.glob(pattern))
    rows = [row for file in files for row in csv.DictReader(file.read_text("utf-8").splitlines())]
    return [row for row in rows if all(row[name] == value for name, value in equals.items())]


def _times(names: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """Return the time of each first contestant over that of the second, measured in one process, by name and size."""
    found = {}
    for file in sorted(_RESULTS.glob("decode_gpu_*.csv")):
        rows = _rows(file.name)
        card = rows[0]["gpu"].split()[1]
        took = {(r["contestant"], r["op"], r["height"], r["dtype"]): float(r["ms"]) for r in rows}
        for (name, *run), ms in took.items():
            for first, second in names:
                if name == first and (second, *run) in took:
                    op, side, dtype = run
                    found[f"{first}, {op} {side}x{side} in {dtype}, {card}"] = ms / took[second, op, side, dtype]
    return found


def _ratios(times: dict[str, float]) -> str:
    return "; ".join(f"{name}: {ratio:.2f}" for name, ratio in times.items())


def _first_run() -> Finding:
    rows = _rows("torch_memory_*.csv")
    first, later = (
        {(r["model"], r["op"], r["height"], r["dtype"]): float(r["seconds"]) for r in rows if r["protocol"] == how}
        for how in ("cold", "warm")
    )
    more = [seconds / later[run] for run, seconds in first.items() if run in later]
    compiled = distinct(r["notes"] for r in _rows("decode_gpu_*.csv", contestant="torch compile"))
    found = (
        f"on an H100 the first of {len(more)} runs each took {min(more):.1f} to {max(more):.1f} times as long as the"
        " third, without cudnn.benchmark: PyTorch loads kernels and cuDNN chooses plans. torch.compile"
        f" {' and '.join(compiled)}. How much cudnn.benchmark adds is not measured"
    )
    return judged(min(more) > 1, MEASURED, found)


def _dynamic_shapes() -> Finding:
    def shapes(tile: int) -> int:
        return len({conv[1:5] for conv in _traced(tile).convs if conv[2] == 4})

    whole, tiles = shapes(0), shapes(_TILE)
    found = (
        f"a decode has {whole} shape of latents whole and {tiles} in tiles of {_TILE} at {_SIDE}x{_SIDE}, because tiles"
        " at the edges are smaller. With dynamic=False, as the guide has it, torch.compile compiles once for each"
    )
    return judged(tiles > whole, COUNTED, found)


def _mixed() -> Finding:
    runs = {group: len(seed_table().filter(op="encode", model="sdxl", group=group)) for group in (1, 2)}
    found = (
        f"the seed table has {runs[1]} encodes of sdxl with weights and image in float16, and {runs[2]} with weights in"
        " float32 and an image in float16: PyTorch's convolutions refuse two types. They cast by themselves only within"
        " torch.autocast"
    )
    return judged(runs[2] > 0, MEASURED, found)


def _fragmentation() -> Finding:
    gaps, result = list[float](), 3 * _SIDE * _SIDE * 2
    for held in (0, result):
        process = SimulatedProcess(CARD)
        vae, z = process.load(MODEL, DTYPE), process.tensor((1, 4, _SIDE // 8, _SIDE // 8), DTYPE)
        if held:
            process.hold("result", held)
        process.decode(vae, z, tile=_TILE)
        reading = process.read()
        gaps.append((reading.peak_reserved - reading.peak_allocated) / MIB)
    plain, other = (_predicted(tile=_TILE, allocator=name) for name in ("native", "expandable_segments:True"))
    found = (
        f"PyTorch reserves {gaps[0]:.0f} MiB more than it allocates, and {gaps[1]:.0f} with a result of"
        f" {result / MIB:.0f} MiB allocated before the tiles. expandable_segments:True lowers reserved memory from"
        f" {plain.reserved / MIB:.0f} to {other.reserved / MIB:.0f} MiB"
    )
    return judged(gaps[1] < gaps[0], PREDICTED, found)


def _fused() -> Finding:
    times = _times((("torch compile", "torch eager"),))
    shown = _ratios(times)
    found = f"torch.compile fuses norms, SiLU and sums. Its times as shares of the uncompiled ones: {shown}"
    return judged(max(times.values()) < 1, MEASURED, found)


def _graphs() -> Finding:
    times = _times((("vaemem graphs", "vaemem"), ("vaemem cudnn, graphs", "vaemem cudnn")))
    eager = [
        float(r["host_ms"]) / float(r["ms"]) for r in _rows("decode_gpu_nvidia_h100_*.csv", contestant="torch eager")
    ]
    found = (
        f"times as shares of those without graphs: {_ratios(times)}. PyTorch's calls return after"
        f" {100 * min(eager):.0f} to {100 * max(eager):.0f}% of a run's time, so the GPU rarely waits for a launch"
    )
    return judged(max(times.values()) < 1, MEASURED, found)


def _streams() -> Finding:
    p = _predicted(tile=_TILE)
    found = (
        f"no benchmark here runs tiles on several streams, as neither diffusers nor vaemem does. PyTorch's"
        f" allocator gives each stream blocks of its own, so two tiles at once would need up to"
        f" {2 * p.peak_reserved / MIB:.0f} MiB rather than {p.peak_reserved / MIB:.0f}"
    )
    return Finding(UNKNOWN, found, f"{PREDICTED}; {NOWHERE}")


def _requirements() -> Finding:
    spec = importlib.util.find_spec("torch")
    home = Path(spec.origin).parent if spec and spec.origin else None
    if not (home and (home / "_inductor").exists()):
        return Finding(UNKNOWN, "PyTorch is not installed here, and its sources say what torch.compile needs", NOWHERE)
    has_compile = "def compile(" in (home / "__init__.py").read_text("utf-8")
    raises = "raise TritonMissing" in (home / "_inductor" / "scheduler.py").read_text("utf-8")
    found = (
        "torch.compile came with PyTorch 2.0. The sources of the PyTorch that is installed here raise TritonMissing on"
        " a GPU without Triton. On a CPU they need a C++ compiler and no Triton"
    )
    return judged(has_compile and raises, DOCUMENTED, found)


def _use_of_tensor_cores() -> Finding:
    """Judge by the FLOPs of a decode in half precision and the card's own peak, both measured."""
    rows = [row for row in _rows("decode_gpu_*.csv", contestant="torch eager") if row["dtype"] != "float32"]
    shares = [float(row["share_of_peak"]) for row in rows]
    cards = " and ".join(distinct(row["gpu"].split()[1] for row in rows))
    found = (
        f"on {cards} {len(rows)} runs of diffusers reach {100 * min(shares):.0f} to {100 * max(shares):.0f}% of the"
        " products that the same card makes in a large matrix product"
    )
    return judged(min(shares) >= 0.9, MEASURED, found)


def _compiled() -> Finding:
    times = _times((("torch compile", "torch eager"),))
    found = (
        f"the compiled run's time as a share of the usual one's: {_ratios(times)}. That is 15 to 40% faster, and more."
        f" max-autotune was not measured on a GPU: {_COMPILED}"
    )
    return judged(max(times.values()) <= 0.85, MEASURED, found)


def _measured_by(command: str) -> Callable[[], Finding]:
    return lambda: Finding(UNKNOWN, command, NEEDS_GPU)


_COMPILED = (
    f"{_ON_A_GPU} --peers eager channels_last compile compile-graphs compile-autotune; on this CPU, with what compiling"
    " takes (docs/SPEED.md has a run): python benchmarks/decode.py --size 256 --check 256 --contestants torch"
    " torch-default torch-reduce-overhead torch-max-autotune"
)
_STATED: tuple[tuple[str, str, Callable[[], Finding]], ...] = (
    ("overview", "the RTX 5070 Ti has Ada Lovelace architecture, and tensor cores of the 4th generation",
     _architecture),
    ("memory bandwidth", "the RTX 5070 Ti has 504 GB/s", _memory_speed),
    ("tensor cores", "up to 660 TFLOPS in FP16/BF16, 330 in TF32", _tensor_rates),
    ("tensor cores", "up to 1321 TOPS in INT8", _int8_rate),
    ("tensor cores", "mixed precision is handled automatically", _mixed),
    ("tensor cores", "all convolutions use them; the GPU is used to 90-100%", _use_of_tensor_cores),
    ("1, cuDNN", "cudnn.benchmark makes convolutions 10-30% faster", _benchmark),
    ("1, cuDNN; 5, torch.compile", "the first run is slower, all later ones are faster", _first_run),
    ("1, TF32", "TF32 is up to 8 times faster than FP32", _tf32_speed),
    ("1, TF32", "the RTX 5070 Ti fully supports TF32", _tf32_support),
    ("2, contiguous", ".contiguous() makes memory operations 5-15% faster", _contiguous),
    ("2, in-place", "in-place operations are 10-20% faster for large tensors", _measured_by(f"{_PARTS} in-place")),
    ("memory management", "in-place operations and reuse reduce the peak by 10-15%", _in_place),
    ("3, transfers", "non-blocking transfers are effectively free", _transfers),
    ("3, results", "pre-allocated results eliminate repeated allocations", _preallocated),
    ("4, ramps", "cached cosine ramps are 5-10% faster for many tiles", _ramps),
    ("4, blending", "separable blending takes less memory and time", _separable),
    ("5, torch.compile", "15-40% faster, max-autotune the best mode; or 50-100%", _compiled),
    ("5, torch.compile", "requires PyTorch 2.0+ with Triton installed", _requirements),
    ("troubleshooting", "dynamic shapes hurt compilation", _dynamic_shapes),
    ("speedup", "tiled runs are 30-50% faster, others 20-30%", _measured_by(f"{_ON_A_GPU} --ablation; {_PARTS}")),
    ("recommendations", "larger tiles take more VRAM, smaller ones less; less is blended", _smaller),
    ("recommendations", "tiles of 1024 with 128 of overlap for the RTX 5070 Ti", _recommended),
    ("recommendations", "no tiles below 1024x1024, tiles above 2048x2048", _thresholds),
    ("out of memory", "increase tile overlap to reduce VRAM peaks", _overlap),
    ("out of memory", "offload_device, which moves the VAE away between operations", _offload),
    ("fragmentation", "call torch.cuda.empty_cache() before", _empty_cache),
    ("memory bandwidth", "pre-allocation reduces fragmentation", _fragmentation),
    ("future", "CUDA graphs for repetitive operations", _graphs),
    ("future", "fused kernels for common patterns", _fused),
    ("future", "CUDA streams for tiles in parallel", _streams),
    ("future", "flash attention for the VAE's attention", _flash),
    ("future", "channels_last for better convolutions", _channels_last),
    ("conclusion", "faster without any quality loss (cosine ramps, tiles)", _without_loss),
)  # fmt: skip
GUIDE = tuple(Claim(*stated) for stated in _STATED)
