"""`python -m vaemem demo`: the main job on real input, from weights files to a report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vaemem import plot
from vaemem._common import mib, need, render
from vaemem.engine.vae import VAE, backends
from vaemem.tables.fit import Fit, fit
from vaemem.tables.sweep import sweep
from vaemem.tables.table import Table

WEIGHTS = {"sdxl": ("sdxl", "diffusers"), "flux": ("flux/ae.safetensors", "bfl")}  # model: file, layout
_FULL_SIZE_BYTES = 128 * 4  # a pixel of T, one full-size activation in float32


def run(
    out: str | os.PathLike[str] = "out",
    progress: bool = True,
    side: int | None = None,
    sizes: Sequence[int | tuple[int, int]] | None = None,
) -> Path:
    """Write weights, load them, encode and decode a photograph, sweep, fit, and report.

    Parameters
    ----------
    out : path
        Folder for everything; made if needed, files of an earlier demo are overwritten. Takes 0.7 GB.
    progress : bool
        Show what is being done and how far it is.
    side : int, optional
        Of the photograph in pixels, a divisor of 512. By default 512, or 256 on the plain C kernels, which are about
        ten times slower: the demo is to stay under five minutes.
    sizes : sequence of int and (int, int), optional
        For the sweep. By default 128, 256 and 384, or 64, 96 and 128 on plain C.

    Returns
    -------
    pathlib.Path
        The report, ``out/report.md``.

    Raises
    ------
    ImportError
        A package of the extra "demo" is missing (``pip install 'vaemem[demo]'``).
    ValueError
        A side or size that cannot be run.
    OSError
        `out` cannot be written.
    """
    image = need("PIL.Image", "the demo")
    for module in ("skimage.data", "matplotlib.figure", *(["tqdm.auto"] if progress else [])):
        need(module, "the demo")  # now, not after minutes of work
    started = time.perf_counter()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    is_plain_c = next(row["name"] for row in backends() if row["chosen"]) == "ref"
    photograph = _photograph((256 if is_plain_c else 512) if side is None else side)
    image.fromarray(photograph).save(folder / "photograph.png")

    lines = [_round_trip(model, photograph, folder, progress) for model in WEIGHTS]
    sizes = sizes or ((64, 96, 128) if is_plain_c else (128, 256, 384))
    _say(progress, f"sweep: {', '.join(WEIGHTS)} at {', '.join(map(str, sizes))}")
    estimated = sweep(list(WEIGHTS), sizes=sizes, measure=False)
    measured = sweep(list(WEIGHTS), sizes=sizes, progress=progress)
    table = measured + estimated
    table.to_csv(folder / "sweep.csv")
    formulas = fit(measured)
    plot.memory_vs_pixels(table, formulas).savefig(folder / "memory.png")
    seconds = time.perf_counter() - started
    report = folder / "report.md"
    report.write_text(_report(lines, measured, estimated, formulas, seconds), encoding="utf-8")
    _say(progress, f"{formulas}\n\n{_files(folder)}\n\nDone in {seconds:.0f} s. Read {report}")
    return report


def _photograph(side: int) -> np.ndarray:
    """A (side, side, 3) uint8 photograph of Eileen Collins (NASA, public domain), which scikit-image's wheel holds."""
    picture = need("skimage.data", "the demo").astronaut()
    if side < 8 or side % 8 or len(picture) % side:
        raise ValueError(f"side: want a multiple of 8 that divides {len(picture)}, got {side}")
    step = len(picture) // side
    blocks = picture.reshape(side, step, side, step, 3).mean((1, 3))
    return np.asarray(np.rint(blocks), dtype=np.uint8)


def _round_trip(model: str, photograph: np.ndarray, folder: Path, progress: bool) -> list[str]:
    """Write the model's weights, load them, encode and decode; a line of the report's first table."""
    name, layout = WEIGHTS[model]
    path = folder / name
    _say(progress, f"{model}: write random weights ({layout} layout) to {path}, load them")
    path.parent.mkdir(parents=True, exist_ok=True)
    VAE.random(model).save(path, layout=layout)
    vae = VAE.load(path)
    _say(progress, f"{model}: encode the photograph, decode its latent")
    latent = vae.encode(photograph[None], scaled=True, progress=progress).mode()
    encode_seconds = _seconds(vae)
    np.save(folder / f"{model}_latent.npy", latent)
    decoded = vae.decode(latent, scaled=True, output_type="uint8", progress=progress)
    need("PIL.Image", "the demo").fromarray(decoded[0]).save(folder / f"{model}_decoded.png")
    if model == "sdxl":
        plot.timeline(vae.last_run).savefig(folder / "timeline.png")
    size = f"{photograph.shape[0]}x{photograph.shape[1]}"
    shape = "x".join(map(str, latent.shape))
    return [model, layout, size, shape, encode_seconds, _seconds(vae)]


def _seconds(vae: VAE) -> str:
    assert vae.last_run is not None and vae.last_run.seconds is not None  # it has just run
    return f"{vae.last_run.seconds:.2f}"


def _report(lines: list[list[str]], measured: Table, estimated: Table, formulas: Fit, seconds: float) -> str:
    weights = " and ".join(dict.fromkeys(mib(row["weights_bytes"]) for row in measured))
    pairs = list(zip(measured, estimated, strict=True))
    equal = sum(m["allocated_bytes"] == e["allocated_bytes"] for m, e in pairs)
    memory = [
        (
            m["model"], m["op"], f"{m['height']}x{m['width']}", mib(e["allocated_bytes"]), mib(m["allocated_bytes"]),
            f"{m['allocated_bytes'] - e['allocated_bytes']:+d}",
            f"{m['allocated_bytes'] / (_FULL_SIZE_BYTES * m['height'] * m['width']):.2f}",
            mib(m["activations_bytes"]), mib(m["scratch_bytes"]), mib(m["output_bytes"]), f"{m['seconds']:.2f}",
        )
        for m, e in pairs
    ]  # fmt: skip
    trips = render(("model", "weights file", "image", "latent", "encode s", "decode s"), lines, markdown=True)
    sizes = render(
        ("model", "op", "size", "estimated", "measured", "difference, bytes", "in T",
         "activations", "scratch", "output", "seconds"),
        memory, markdown=True,
    )  # fmt: skip
    return f"""# vaemem demo

{measured[0]["versions"]}; {platform.system()}, {os.cpu_count()} CPUs. {seconds:.0f} s in all.

## A photograph, there and back

Random weights of the real shapes were written to a file for each model, in the layout that people have it in, and
loaded from there. `photograph.png` (Eileen Collins, by NASA, from scikit-image) was encoded to a latent
(`*_latent.npy`, scaled as pipelines do) and decoded again.

{trips}

**The decoded pictures (`*_decoded.png`) are noise, and should be**: no trained weights come with vaemem, and a random
encoder and decoder undo nothing. That the arithmetic is right is for the tests to show, which compare it with
diffusers on the same weights. Memory and time do not depend on the values.

## Memory

What a run adds to the weights ({weights} MiB): activations, scratch and output at the peak, in MiB. *Estimated* was
known before the run; *measured* was counted during it. They agree to the byte in {equal} of {len(pairs)} cases.
T = 128 * H * W * 4 bytes is one full-size activation.

{sizes}

![Peak memory against pixels](memory.png)

## Formula

`a*H*W*e + b` in bytes (e = 4), least squares over the measured rows, with what it leaves unexplained:

```
{formulas}
```

## Where the peak is

Bytes live in each pass of the SDXL decode:

![Timeline of the SDXL decode](timeline.png)
"""


def _files(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return render(("file", "MiB"), [(str(path), mib(path.stat().st_size)) for path in files])


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, flush=True)
