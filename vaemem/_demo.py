"""`python -m vaemem demo`: what vaemem is for, on a picture, as a page to read: out/index.html."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vaemem import plot
from vaemem._common import latent_factor, mib, need, png, render, saved, write
from vaemem._handmade import handmade, picture
from vaemem.engine.device import backends
from vaemem.engine.records import Run
from vaemem.engine.tiling import Tiling
from vaemem.engine.vae import VAE
from vaemem.prediction.predict import predict, predict_largest
from vaemem.reports.document import MARKS, Document
from vaemem.tables.estimators import compare
from vaemem.tables.fit import fit
from vaemem.tables.sweep import estimate_sweep, measure_sweep, tradeoff
from vaemem.tables.table import Table, seed_table

CARDS = ("RTX 3050 Laptop", "RTX 2060", "RTX 4060", "RTX 3060", "RTX 4090")
ASKED = (1024, 1536, 2048, 3072)  # of the images that are asked about
SWEEP, SWEEP_SIZES = ("sdxl", "flux"), (64, 96, 128)
SIDE, SLOW_SIDE = 384, 256  # of the picture; with SSE2 and on the plain C kernels, which are several times slower


def make_demo(out: str | os.PathLike[str] = "out", weights: str | os.PathLike[str] | None = None) -> Path:
    """Predict, encode and decode a picture whole, under a limit and in tiles, compare, sweep, fit: a page of results.

    Weights are as `VAE.load` takes them; without them some are made by hand in SDXL's layout (vaemem/_handmade.py says
    how), which takes 0.4 GB. The folder is made if needed, and files of an earlier demo are overwritten. Gives the
    page's path, ``out/index.html``; ``out/report.md`` says the same.
    """
    need("PIL.Image", "the demo", "matplotlib.figure", "tqdm.auto")  # now, not after minutes of work
    started, folder = time.perf_counter(), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if made_by_hand := weights is None:
        weights = folder / "weights"
        _say(f"make weights by hand, in SDXL's layout: {weights}")
        handmade("sdxl").save(weights)
    _say(f"load {weights}")
    vae = VAE.load(weights)

    document = Document("Does it fit?")
    _cards(document, vae)
    is_slow = next(row["name"] for row in backends() if row["chosen"]) in ("sse", "ref")
    image = picture(SLOW_SIDE if is_slow else SIDE)
    latents, whole = _round_trip(document, vae, image, made_by_hand)
    ours = _less_memory(document, vae, latents, whole)
    write(folder / "latents.npy", saved(np.save, latents))
    both = need("PIL.Image", "the demo").fromarray(np.hstack([image, _bytes(whole)]))
    write(folder / "there_and_back.png", saved(both.save, format="PNG"))
    _beside_pytorch(document, ours)
    _predictions(document)
    _sweep(document, folder)
    seconds = time.perf_counter() - started
    document.text(f"{platform.system()}, {os.cpu_count()} CPUs, {_last(vae).backend} kernels; {seconds:.0f} s in all.")
    page = folder / "index.html"
    write(page, document.html())
    write(folder / "report.md", document.markdown())
    for name, figure in document.figures.items():
        write(folder / f"{name}.png", png(figure))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    _say("\n" + render(("file", "MiB"), [(str(path), mib(path.stat().st_size)) for path in files]))
    _say(f"\nDone in {seconds:.0f} s. Open {page}")
    return page


def _cards(document: Document, vae: VAE) -> None:
    """The answer: PyTorch on cards, the engine here."""
    _say(f"predict SDXL's decode in PyTorch on {', '.join(CARDS)}")
    lines = []
    for card in CARDS:
        asked = [predict("sdxl", "decode", side, side, "float16", gpu=card) for side in ASKED]
        height, width = predict_largest("sdxl", "decode", "float16", gpu=card)
        verdicts = (f"{MARKS[p.verdict]} {p.verdict}" for p in asked)
        lines.append([card, _gib(asked[0].available), *verdicts, f"{height}x{width}"])
    document.text(
        "SDXL's VAE decodes an image in PyTorch: diffusers, float16, nothing else on the card. Predicted, with no GPU "
        "and no PyTorch:"
    )
    sizes = [f"{side}x{side}" for side in ASKED]
    document.table(["card", "GiB to use", *sizes, "largest square"], lines)
    document.text("≈ tight: the prediction fits, but its upper bound does not, or PyTorch has to free its cache first.")
    usual = ["with room to spare", *(_gib(p.peak_reserved) for p in asked)]
    least = ["at least: PyTorch frees its cache when short", *(_gib(p.least_reserved) for p in asked)]
    document.table([f"GiB that it takes on {CARDS[-1]}", *sizes], [usual, least])
    run, smallest = vae.estimate("decode", ASKED[0], ASKED[0]), vae.smallest("decode", ASKED[0], ASKED[0])
    document.text(
        f"vaemem's own decode of {sizes[0]} on this CPU, in float32, takes {mib(run.peak_bytes)} MiB with the weights; "
        f"{mib(smallest)} are enough for the same bits, with more work."
    )


def _round_trip(document: Document, vae: VAE, image: np.ndarray, made_by_hand: bool) -> tuple[np.ndarray, np.ndarray]:
    """The picture's latents, and what they decode to, in floats."""
    size = f"{image.shape[0]}x{image.shape[1]}"
    _say(f"encode and decode a picture of {size}")
    latents = vae.encode(image[None], progress=True).mode()
    seconds = _last(vae).seconds
    whole = vae.decode(latents, progress=True)[0]
    document.heading("A picture, there and back")
    document.text(
        "**The weights are made by hand, nothing is trained.** They fill SDXL's whole layout and carry eight colours, "
        "a shade and shapes of some size through every pass that trained weights take; memory and time do not depend "
        "on what weights say. `vaemem/_handmade.py` tells how they do it, `--weights FILE` takes real ones."
        if made_by_hand
        else "The weights are those that were given. The picture was drawn for others, made by hand, that vaemem has."
    )
    back, about_latents = _bytes(whole), f"its latents, {latents.shape[1]} channels"
    panels = {f"picture, {size}": image, about_latents: _mosaic(latents[0]), "decoded": back}
    document.figure("pictures", "A picture, its latents, and what they decode to", _row(panels))
    took = f"Encoded in {seconds:.1f} s, decoded in {_last(vae).seconds:.1f} s"
    document.text(f"{took}, to within {_psnr(back, image):.1f} dB.")
    return latents, whole


def _less_memory(document: Document, vae: VAE, latents: np.ndarray, whole: np.ndarray) -> Run:
    """The decode again under a limit and in tiles: what each takes, what comes out, and what every limit would cost.
    `vae` has just decoded the whole: that run is returned."""
    first = _last(vae)
    height, width = whole.shape[1:]
    plans = tradeoff(vae, "decode", height, width)
    most = 0.75 * plans[0]["reserved_bytes"]
    plan = next((plan for plan in plans if plan["reserved_bytes"] <= most), plans[-1])  # the fastest that takes less
    tile = max(height // 16 * 8, latent_factor(vae.arch))
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "under a limit": {"memory_limit": plan["weights_bytes"] + plan["reserved_bytes"]},
        f"in tiles of {tile}": {"tiling": Tiling(tile)},
    }
    pictures, points, lines = {"whole": whole}, {}, []
    for name, how in ways.items():
        if how:
            _say(f"decode {name}")
            pictures[name] = vae.decode(latents, progress=True, **how)[0]
        run, before = _last(vae), vae.estimate("decode", height, width, **how)
        points[name] = run.peak_bytes, sum(run.flops) / sum(first.flops)
        taken = (mib(before.peak_bytes), mib(run.peak_bytes), mib(run.weights_bytes), f"{points[name][1]:.2f}")
        lines.append([name, *taken, f"{run.seconds:.1f}", _same(pictures[name], whole) if how else ""])
    document.heading("The same picture in less memory")
    header = ("decode", "estimated MiB", "measured MiB", "of it weights", "work", "seconds", "beside the whole")
    document.table(header, lines)
    document.text(
        "Estimated before the run, measured during it. Under a limit some passes run more than once, a few rows at a "
        "time, and the picture is the same to the bit. Tiles are what diffusers' `enable_tiling` does: each is "
        "normalised by its own statistics and ends at its own borders, which leaves seams."
    )
    panels = {name: _bytes(pixels) for name, pixels in pictures.items() if name != "whole"}
    tiled = list(panels)[-1]
    panels["what tiles change, of 255"] = _difference(pictures[tiled], whole)
    document.figure("tiles", "Decoded under a limit and in tiles, and what tiles change", _row(panels))
    document.text("What every limit costs is known before any run:")
    document.figure("tradeoff", "Memory against work", plot.tradeoff(plans, {tiled: points[tiled]}))
    document.text(f"The peak of the whole decode is in `{first.peak_pass}`:")
    document.figure("timeline", "Bytes live in each pass of the decode", plot.timeline(first))
    return first


def _beside_pytorch(document: Document, ours: Run) -> None:
    """PyTorch's decode of the same size on this CPU, where it is installed."""
    document.heading("PyTorch beside it, here")
    size = f"{ours.height}x{ours.width}"
    try:
        from vaemem.pytorch import measure

        _say(f"decode {size} in PyTorch")
        asked = [(ours.height, ours.width)]
        (theirs,) = measure("sdxl", "decode", asked, "float32", device="cpu", warmups=0, runs=1)
    except (ImportError, OSError) as error:  # not installed; a system that does not let a process look at its own size
        document.text(f"Not measured: {error}")
        return
    own = ["vaemem", mib(ours.peak_bytes - ours.weights_bytes), f"{ours.seconds:.1f}"]
    other = ["PyTorch", mib(theirs["reserved_bytes"]), f"{theirs['seconds']:.1f}"]
    document.table([f"decode {size}, float32", "MiB beside the weights", "seconds"], [own, other])
    document.text(f"PyTorch's is the growth of the process; each ran once. {theirs['versions']}.")


def _predictions(document: Document) -> None:
    """vaemem.predict, ComfyUI and InvokeAI beside what was measured on a GPU."""
    _say("compare predictions with measurements")
    rows = Table(row for row in seed_table() if (row["height"], row["width"]) == (1024, 1024))
    comparison = compare(rows, [predict, "comfyui", "invokeai"])
    document.heading("How near is the prediction?")
    document.text(
        f"Reserved memory at 1024x1024 on an RTX 4090, measured by others with PyTorch 2.7.1 ({len(rows)} rows), and "
        "what `vaemem.predict`, ComfyUI and InvokeAI say of it; in brackets the error in percent. Part of the "
        "prediction was inferred from this very table: docs/PREDICTION.md tells which."
    )
    document.figure("estimators", "Estimates over measurements", plot.estimator_errors(comparison))
    document.table(*comparison.grid(rows=True))


def _sweep(document: Document, folder: Path) -> None:
    """Memory over sizes, measured and estimated, and the formula through it."""
    _say(f"sweep: {', '.join(SWEEP)} at {', '.join(map(str, SWEEP_SIZES))}")
    estimated = estimate_sweep(list(SWEEP), sizes=SWEEP_SIZES)
    measured = measure_sweep(list(SWEEP), sizes=SWEEP_SIZES, progress=True)
    table, formulas = measured + estimated, fit(measured)
    table.to_csv(folder / "sweep.csv")
    equal = sum(m["allocated_bytes"] == e["allocated_bytes"] for m, e in zip(measured, estimated, strict=True))
    document.heading("A sweep and its formula")
    document.text(
        f"vaemem's own runs, beside the weights; estimated and measured agree to the byte in {equal} of "
        f"{len(measured)} cases:"
    )
    document.figure("memory", "Peak memory against pixels", plot.memory_vs_pixels(table, formulas))
    lines = []
    for line in formulas:
        errors = (f"{100 * error:.1f}%" for error in (line.max_over, line.max_under))
        lines.append([line.model, line.op, f"{line.a:.1f} H W 4 {line.b:+,.0f}", *errors])
    document.table(["model", "op", "bytes", "too much by at most", "too little by at most"], lines)


# ---- pictures ----


def _row(panels: Mapping[str, np.ndarray]) -> Any:
    """Pictures side by side; numbers, as against colours, with a scale."""
    figures, size = need("matplotlib.figure", "the demo"), (3.9 * len(panels), 4.9)
    figure = figures.Figure(figsize=size, layout="constrained", dpi=112)
    for axes, (title, pixels) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        if pixels.ndim == 3:
            axes.imshow(pixels)
        else:
            most = np.nanpercentile(pixels, 99.5)  # a few pixels far above the rest leave these to be seen
            shown = axes.imshow(pixels, cmap="magma", interpolation="nearest", vmax=most)
            figure.colorbar(shown, cax=axes.inset_axes((0.1, -0.08, 0.8, 0.04)), orientation="horizontal")
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    return figure


def _mosaic(channels: np.ndarray) -> np.ndarray:
    """The channels of one latent as tiles of one picture."""
    across = math.ceil(math.sqrt(len(channels)))
    padded = np.pad(channels, ((0, -len(channels) % across), (1, 1), (1, 1)), constant_values=np.nan)
    return np.vstack([np.hstack(list(padded[i : i + across])) for i in range(0, len(padded), across)])


def _bytes(pixels: np.ndarray) -> np.ndarray:
    """(3, H, W) floats from -1 to 1 as an (H, W, 3) picture."""
    return np.rint(np.clip(pixels.transpose(1, 2, 0) * 127.5 + 127.5, 0, 255)).astype(np.uint8)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest of each pixel's three differences, in steps of 255."""
    return np.asarray(abs(a - b).max(0) * 127.5)


def _same(a: np.ndarray, b: np.ndarray) -> str:
    if np.array_equal(a, b):
        return "the same bits"
    return f"{_psnr(_bytes(a), _bytes(b)):.1f} dB, up to {_difference(a, b).max():.1f} of 255 off"


def _psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(20 * np.log10(255 / np.sqrt(np.mean((a.astype(float) - b) ** 2))))


# ---- words ----


def _last(vae: VAE) -> Run:
    assert vae.last_run is not None  # it has just run
    return vae.last_run


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _say(text: str) -> None:
    print(text, flush=True)
