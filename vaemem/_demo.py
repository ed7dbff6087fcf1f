"""`python -m vaemem demo`: show what vaemem does, on a picture, as a page to read: out/index.html."""

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
from vaemem._common import latent_factor, mib, need, png, saved
from vaemem._handmade import handmade, picture
from vaemem._render import Columns
from vaemem._saving import write
from vaemem.engine.device import backends
from vaemem.engine.records import Run
from vaemem.engine.tiling import Tiling
from vaemem.engine.vae import VAE
from vaemem.prediction.predict_vae import predict, predict_largest
from vaemem.reports.document import MARKS, Document
from vaemem.tables.estimators import compare
from vaemem.tables.fit import fit
from vaemem.tables.sweep import estimate_sweep, measure_sweep, tradeoff
from vaemem.tables.table import Table, seed_table

CARDS = ("RTX 3050 Laptop", "RTX 2060", "RTX 4060", "RTX 3060", "RTX 4090")
IMAGE_SIDES = (1024, 1536, 2048, 3072)  # of the images to predict
SWEEP, SWEEP_SIZES = ("sdxl", "flux"), (64, 96, 128)
SIDE, SLOW_SIDE = 384, 256  # of the picture; the second for SSE2 and plain C kernels, which are several times slower


def make_demo(out: str | os.PathLike[str] = "out", weights: str | os.PathLike[str] | None = None) -> Path:
    """Predict; encode and decode a picture whole, under a limit and in tiles; compare, sweep and fit; write a page.

    weights: as for `VAE.load`. By default the demo makes weights by hand in SDXL's layout (see vaemem/_handmade.py),
    which need 0.4 GB. The folder is created if needed, and files of an earlier demo are overwritten. Return the page's
    path, ``out/index.html``; ``out/report.md`` has the same contents.
    """
    need("PIL.Image", "the demo", "matplotlib.figure", "tqdm.auto")  # fail now, not after minutes of work
    started, folder = time.perf_counter(), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if is_handmade := weights is None:
        weights = folder / "weights"
        _say(f"make weights by hand, in SDXL's layout: {weights}")
        handmade("sdxl").save(weights)
    _say(f"load {weights}")
    vae = VAE.load(weights)

    document = Document("Does it fit?")
    _cards(document, vae)
    is_slow = next(row["name"] for row in backends() if row["chosen"]) in ("sse", "ref")
    image = picture(SLOW_SIDE if is_slow else SIDE)
    latents, whole = _round_trip(document, vae, image, is_handmade)
    ours = _less_memory(document, vae, latents, whole)
    write(folder / "latents.npy", saved(np.save, latents))
    both = need("PIL.Image", "the demo").fromarray(np.hstack([image, _bytes(whole)]))
    write(folder / "there_and_back.png", saved(both.save, format="PNG"))
    _compare_pytorch(document, ours)
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
    _say("\n" + Columns(("file", "MiB"), [(str(path), mib(path.stat().st_size)) for path in files]).text())
    _say(f"\nDone in {seconds:.0f} s. Open {page}")
    return page


def _cards(document: Document, vae: VAE) -> None:
    """Show the answers for PyTorch on cards, and for the engine here."""
    _say(f"predict SDXL's decode in PyTorch on {', '.join(CARDS)}")
    lines = []
    for card in CARDS:
        predictions = [predict("sdxl", "decode", side, side, "float16", gpu=card) for side in IMAGE_SIDES]
        height, width = predict_largest("sdxl", "decode", "float16", gpu=card)
        verdicts = (f"{MARKS[p.verdict]} {p.verdict}" for p in predictions)
        lines.append([card, _gib(predictions[0].available), *verdicts, f"{height}x{width}"])
    document.text(
        "SDXL's VAE decodes an image in PyTorch: diffusers, float16, nothing else on the card. Predicted, with no GPU "
        "and no PyTorch:"
    )
    sizes = [f"{side}x{side}" for side in IMAGE_SIDES]
    document.table(["card", "GiB to use", *sizes, "largest square"], lines)
    document.text("≈ tight: the prediction fits, but its upper bound does not, or PyTorch must free its cache first.")
    usual = ["with room to spare", *(_gib(p.peak_reserved) for p in predictions)]
    least = ["at least, if PyTorch frees its cache when short", *(_gib(p.least_reserved) for p in predictions)]
    document.table([f"GiB on {CARDS[-1]}", *sizes], [usual, least])
    size = IMAGE_SIDES[0], IMAGE_SIDES[0]
    run, smallest = vae.estimate("decode", *size), vae.smallest("decode", *size)
    document.text(
        f"vaemem's own decode of {sizes[0]} on this CPU, in float32, needs {mib(run.peak_bytes)} MiB with the weights; "
        f"{mib(smallest)} MiB are enough for the same bits, with more work."
    )


def _round_trip(document: Document, vae: VAE, image: np.ndarray, is_handmade: bool) -> tuple[np.ndarray, np.ndarray]:
    """Encode and decode the picture; return the latents and the decoded floats."""
    size = f"{image.shape[0]}x{image.shape[1]}"
    _say(f"encode and decode a picture of {size}")
    latents = vae.encode(image[None], progress=True).mode()
    seconds = _last(vae).seconds
    whole = vae.decode(latents, progress=True)[0]
    document.heading("A picture, there and back")
    document.text(
        "**The weights are made by hand, without training.** They fill SDXL's whole layout and carry eight colours, a "
        "shade and shapes of some size through every pass that trained weights go through. Memory and time do not "
        "depend on the numbers. `vaemem/_handmade.py` explains them; `--weights FILE` uses real ones."
        if is_handmade
        else "The weights are yours. The picture was drawn for vaemem's handmade weights."
    )
    back, about_latents = _bytes(whole), f"its latents, {latents.shape[1]} channels"
    panels = {f"picture, {size}": image, about_latents: _mosaic(latents[0]), "decoded": back}
    document.figure("pictures", "A picture, its latents, and what they decode to", _row(panels))
    times = f"Encoded in {seconds:.1f} s, decoded in {_last(vae).seconds:.1f} s"
    document.text(f"{times}, to within {_psnr(back, image):.1f} dB.")
    return latents, whole


def _less_memory(document: Document, vae: VAE, latents: np.ndarray, whole: np.ndarray) -> Run:
    """Decode again under a limit and in tiles: show memory, results, and the cost of every limit. Return the run of the
    whole decode, which `vae` has just done."""
    first = _last(vae)
    height, width = whole.shape[1:]
    plans = tradeoff(vae, "decode", height, width)
    most = 0.75 * plans[0]["reserved_bytes"]
    plan = next((plan for plan in plans if plan["reserved_bytes"] <= most), plans[-1])  # the fastest within `most`
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
        numbers = (mib(before.peak_bytes), mib(run.peak_bytes), mib(run.weights_bytes), f"{points[name][1]:.2f}")
        lines.append([name, *numbers, f"{run.seconds:.1f}", _compare(pictures[name], whole) if how else ""])
    document.heading("The same picture in less memory")
    header = ("decode", "estimated MiB", "measured MiB", "of it weights", "work", "seconds", "compared with whole")
    document.table(header, lines)
    document.text(
        "Estimated before the run, measured during it. Under a limit some passes run more than once, a few rows at a "
        "time, and the picture has the same bits. Tiles are those of diffusers' `enable_tiling`: each is normalised by "
        "its own statistics and ends at its own borders, which leaves seams."
    )
    panels = {name: _bytes(pixels) for name, pixels in pictures.items() if name != "whole"}
    tiled = list(panels)[-1]
    panels["what tiles change, of 255"] = _difference(pictures[tiled], whole)
    document.figure("tiles", "Decoded under a limit and in tiles, and what tiles change", _row(panels))
    document.text("The cost of every limit is known before a run:")
    document.figure("tradeoff", "Memory against work", plot.tradeoff(plans, {tiled: points[tiled]}))
    document.text(f"The peak of the whole decode is in `{first.peak_pass}`:")
    document.figure("timeline", "Bytes live in each pass of the decode", plot.timeline(first))
    return first


def _compare_pytorch(document: Document, ours: Run) -> None:
    """Decode the same size in PyTorch on this CPU, if it is installed."""
    document.heading("PyTorch on the same machine")
    size = f"{ours.height}x{ours.width}"
    try:
        from vaemem.pytorch import measure

        _say(f"decode {size} in PyTorch")
        sizes = [(ours.height, ours.width)]
        (theirs,) = measure("sdxl", "decode", sizes, "float32", device="cpu", warmups=0, runs=1)
    except (ImportError, OSError) as error:  # not installed, or a system that cannot measure a process
        document.text(f"Not measured: {error}")
        return
    own = ["vaemem", mib(ours.peak_bytes - ours.weights_bytes), f"{ours.seconds:.1f}"]
    other = ["PyTorch", mib(theirs["reserved_bytes"]), f"{theirs['seconds']:.1f}"]
    document.table([f"decode {size}, float32", "MiB besides the weights", "seconds"], [own, other])
    document.text(f"PyTorch's is the growth of the process; each ran once. {theirs['versions']}.")


def _predictions(document: Document) -> None:
    """Compare vaemem.predict, ComfyUI and InvokeAI with measurements on a GPU."""
    _say("compare predictions with measurements")
    rows = Table(row for row in seed_table() if (row["height"], row["width"]) == (1024, 1024))
    comparison = compare(rows, [predict, "comfyui", "invokeai"])
    document.heading("How good is the prediction?")
    document.text(
        f"Reserved memory at 1024x1024 on an RTX 4090, measured by others with PyTorch 2.7.1 ({len(rows)} rows), and "
        "the estimates of `vaemem.predict`, ComfyUI and InvokeAI; errors in percent are in brackets. Part of the "
        "prediction was inferred from this table: docs/PREDICTION.md says which."
    )
    document.figure("estimators", "Estimates over measurements", plot.estimator_errors(comparison))
    document.table(*comparison.grid(rows=True))


def _sweep(document: Document, folder: Path) -> None:
    """Measure and estimate memory over sizes, and fit a formula."""
    _say(f"sweep: {', '.join(SWEEP)} at {', '.join(map(str, SWEEP_SIZES))}")
    estimated = estimate_sweep(list(SWEEP), sizes=SWEEP_SIZES)
    measured = measure_sweep(list(SWEEP), sizes=SWEEP_SIZES, progress=True)
    table, formulas = measured + estimated, fit(measured)
    table.to_csv(folder / "sweep.csv")
    equal = sum(m["allocated_bytes"] == e["allocated_bytes"] for m, e in zip(measured, estimated, strict=True))
    document.heading("A sweep and its formula")
    document.text(
        f"vaemem's own runs, without the weights; estimates and measurements agree to the byte in {equal} of "
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
    """Draw pictures side by side; two-dimensional arrays get a scale."""
    figures, size = need("matplotlib.figure", "the demo"), (3.9 * len(panels), 4.9)
    figure = figures.Figure(figsize=size, layout="constrained", dpi=112)
    for axes, (title, pixels) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        if pixels.ndim == 3:
            axes.imshow(pixels)
        else:
            most = np.nanpercentile(pixels, 99.5)  # a few pixels far above the rest would hide it
            shown = axes.imshow(pixels, cmap="magma", interpolation="nearest", vmax=most)
            figure.colorbar(shown, cax=axes.inset_axes((0.1, -0.08, 0.8, 0.04)), orientation="horizontal")
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    return figure


def _mosaic(channels: np.ndarray) -> np.ndarray:
    """Join the channels (C, h, w) of one latent in one picture."""
    across = math.ceil(math.sqrt(len(channels)))
    padded = np.pad(channels, ((0, -len(channels) % across), (1, 1), (1, 1)), constant_values=np.nan)
    return np.vstack([np.hstack(list(padded[i : i + across])) for i in range(0, len(padded), across)])


def _bytes(pixels: np.ndarray) -> np.ndarray:
    """Convert floats from -1 to 1, (3, H, W), to an (H, W, 3) picture of bytes."""
    return np.rint(np.clip(pixels.transpose(1, 2, 0) * 127.5 + 127.5, 0, 255)).astype(np.uint8)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the largest of each pixel's three differences, in steps of 255."""
    return np.asarray(abs(a - b).max(0) * 127.5)


def _compare(a: np.ndarray, b: np.ndarray) -> str:
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
