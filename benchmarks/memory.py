"""Measure the cost of memory limits, compared with PyTorch whole and in tiles.

    python benchmarks/memory.py [--op decode] [--size 1024] [--limits 1.2 0.65 0.45] [--rounds 3] [--threads 2]
        [--no-peers] [--tile 512]
    python benchmarks/memory.py --markdown      prints all existing results as one table
    python benchmarks/memory.py --plot          draws all of them in docs/images/memory.svg

SDXL, float32, random weights. A limit x means the weights plus x T. T = 128 * size * size * 4 bytes is one full-size
activation. The smallest plan comes last. Limits below it are not run, and its row says so.

Seconds: one process runs every limit and the unlimited run in turns, with the same VAE and input. PyTorch's processes
take their turns in the same rounds. Each of our runs allocates its memory again, and its planning counts. Figures are
medians. The smallest plan runs only in the first round, unless it stands for a limit below it. With --rounds 0 the
seconds come from the runs that measure memory: one each, one after another, in processes of their own.

Memory: the peak resident size of a process that does only this run, after it has loaded and has run a small model once.
Its base is its size before loading: the interpreter and libraries.

Each of our results, in either kind of process, has the bits of the unlimited one; otherwise the benchmark fails. The
peers in PyTorch are diffusers' AutoencoderKL (channels_last), whole and with enable_tiling. If one of our plans fits
into the tiles' resident size, that limit is run too: the same memory, exact. Two figures show how far tiles are from
the whole:

- psnr: in dB, of the range of the whole result;
- seam: how far the mean of the error (tiles - whole) of a channel steps from a tile's own part, which it shares with no
  other tile, to its neighbour's; the mean of all steps, in 1/255 of that range.

The input is noise with amplitudes that fall as 1 / frequency, as in photographs. Tiles of white noise would be more
alike than tiles of a picture.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import common
import numpy as np
from common import Worker, median, parser_of, peak_rss, reset_peak_rss, serve, settled_rss, where, write_csv

MIB = 2**20
PICTURE = common.HERE.parent / "docs" / "images" / "memory.svg"
LIMITS = {  # in T, besides the weights
    ("decode", 1024): (1.2, 0.65, 0.45),
    ("decode", 2048): (1.1, 0.6, 0.45, 0.3),
    ("encode", 1024): (1.2, 0.7, 0.4),
}
ARCHITECTURE = {  # SDXL's; what runs first, to load the libraries, has SMALL channels
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
}
SMALL = ARCHITECTURE | {"block_out_channels": (32, 32, 32, 32)}
UNLIMITED, SMALLEST, AS_TILES = "vaemem", "vaemem, smallest", "vaemem, as much as tiles"
WHOLE, TILES = "PyTorch", "PyTorch, tiles"


def inputs(op: str, size: int) -> np.ndarray:
    channels, side = (4, size // 8) if op == "decode" else (3, size)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = np.inf  # no mean
    white = np.random.default_rng(0).standard_normal((1, channels, side, side))
    x = np.fft.irfft2(np.fft.rfft2(white) / frequency, (side, side))
    x /= x.std(axis=(2, 3), keepdims=True)
    return np.ascontiguousarray(x if op == "decode" else x / abs(x).max(), dtype=np.float32)


# ---- the contestants, each in a process of its own ----


def ours(args: dict):
    """The limits of a schedule, one each time; with args["alone"] without having run before."""
    import vaemem

    def load(config: dict) -> vaemem.VAE:
        vae = vaemem.VAE.random(config=config)
        vae.threads = args["threads"]
        return vae

    data = inputs(args["op"], args["size"])
    getattr(load(SMALL), args["op"])(inputs(args["op"], 64))
    base = settled_rss()
    vae, schedule = load(ARCHITECTURE), iter(args["limits"])
    settled_rss()
    run = getattr(vae, args["op"])
    if not args["alone"]:
        run(data)

    def measure() -> dict:
        limit = next(schedule)
        vae.trim()
        reset_peak_rss()
        start = time.perf_counter()
        result = run(data, memory_limit=limit)
        seconds, peak = time.perf_counter() - start, peak_rss()
        array = result if args["op"] == "decode" else result.moments
        return {
            "seconds": seconds,
            "rss": peak,
            "base": base,
            "weights": vae.last_run.weights_bytes,
            "planned": vae.last_run.peak_bytes,
            "work": vae.last_run.work,
            "bits": hashlib.sha256(array).hexdigest(),
            "what": f"vaemem {vaemem.__version__} {next(b['name'] for b in vaemem.backends() if b['chosen'])}",
        }

    return measure


def peer(args: dict):
    """diffusers in PyTorch, whole or in tiles; its first result goes to args["save"]."""
    import diffusers
    import torch

    torch.set_num_threads(args["threads"])
    torch.manual_seed(0)

    def load(config: dict) -> diffusers.AutoencoderKL:
        return diffusers.AutoencoderKL(**config).eval().to(memory_format=torch.channels_last)

    @torch.no_grad()
    def run(vae, x):
        return vae.decode(x).sample if args["op"] == "decode" else vae.encode(x).latent_dist.parameters

    def data(size: int):
        return torch.from_numpy(inputs(args["op"], size)).contiguous(memory_format=torch.channels_last)

    x = data(args["size"])
    run(load(SMALL), data(64))
    base = settled_rss()
    vae = load(ARCHITECTURE)
    settled_rss()
    if args["tile"]:
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = args["tile"], args["tile"] // 8

    def measure() -> dict:
        reset_peak_rss()
        start = time.perf_counter()
        result = run(vae, x)
        seconds, peak = time.perf_counter() - start, peak_rss()
        if not os.path.exists(args["save"]):
            np.save(args["save"], result.numpy())
        return {
            "seconds": seconds,
            "rss": peak,
            "base": base,
            "weights": sum(p.nbytes for p in vae.parameters()),
            "what": f"torch {torch.__version__} diffusers {diffusers.__version__} channels_last",
        }

    return measure


# ---- the figures of their results ----


def refuse_difference(name: str, bits: str, unlimited: str) -> None:
    if bits != unlimited:
        raise SystemExit(f"{name}: the result differs from the unlimited run's, and every bit should be the same")


def quality(tiles: np.ndarray, whole: np.ndarray, tile: int) -> tuple[float, float]:
    """psnr and seam of results (1, channels, side, side); `tile` is a tile's side in them, of which the next shares a
    quarter."""
    error, extent = (tiles.astype(np.float64) - whole)[0], np.ptp(whole)
    psnr = 20 * np.log10(extent / np.sqrt(np.mean(error**2)))
    side, shared = error.shape[-1], tile // 4
    starts = range(0, side, tile - shared)
    own = [slice(start + (shared if start else 0), start + tile - shared) for start in starts if start + shared < side]
    means = np.array([[error[:, rows, columns].mean(axis=(1, 2)) for columns in own] for rows in own])
    steps = np.concatenate([abs(np.diff(means, axis=axis)).ravel() for axis in (0, 1)])
    return float(psnr), float(steps.mean() / extent * 255) if steps.size else 0.0


def ratio(seconds: list[float], others: list[float]) -> float:
    """The median of the rounds that both took part in."""
    return median([a / b for a, b in zip(seconds, others, strict=False)])


# ---- the contest ----


def plan(args: argparse.Namespace) -> tuple[dict[str, int | None], str, int]:
    """Every contestant of ours with its limit in bytes, the last one's name, and the weights' bytes."""
    import vaemem

    vae = vaemem.VAE.random(config=ARCHITECTURE)
    vae.threads = args.threads
    weights = vae.estimate(args.op, args.size, args.size).weights_bytes
    smallest = vae.smallest(args.op, args.size, args.size)
    limits: dict[str, int | None] = {UNLIMITED: None}
    below = []
    for x in sorted(args.limits, reverse=True):
        limit = weights + int(x * args.unit)
        if limit >= smallest:
            limits[f"vaemem, {x:g} T"] = limit
        else:
            below.append(f"{x:g} T")
    last = list(limits)[-1]
    if below or vae.estimate(args.op, args.size, args.size, memory_limit=limits[last]).peak_bytes > smallest:
        last = SMALLEST + (f" (for {', '.join(below)})" if below else "")
        limits[last] = smallest
    return limits, last, weights


def contest(args: argparse.Namespace, folder: str) -> list[dict]:
    limits, last, weights = plan(args)
    task = {"op": args.op, "size": args.size, "threads": args.threads}
    alone: dict[str, dict] = {}  # of each contestant's first run, in a process that has done nothing else
    times: dict[str, list[float]] = {}  # of the rounds

    def ready(name: str, result: dict) -> None:
        alone[name] = result
        beside = (result["rss"] - result["base"] - result["weights"]) / args.unit
        print(f"  {name:32s} {result['seconds']:7.2f} s, {beside:.2f} T resident besides the weights", flush=True)

    peers: dict[str, Worker] = {}
    for name, tile in ((WHOLE, 0), (TILES, args.tile)) if args.peers else ():
        more = {"who": "peer", "tile": tile, "save": os.path.join(folder, f"{name}.npy")}
        peers[name] = Worker(name, __file__, task | more, {})
        ready(name, peers[name].ask())
    said = {}
    if args.peers:
        whole, tiles = (np.load(os.path.join(folder, f"{name}.npy")) for name in (WHOLE, TILES))
        said[TILES] = quality(tiles, whole, args.tile if args.op == "decode" else args.tile // 8)
        of_tiles = weights + alone[TILES]["rss"] - alone[TILES]["base"] - alone[TILES]["weights"]
        if of_tiles >= limits[last]:
            limits = {UNLIMITED: None, AS_TILES: of_tiles, **limits}
        else:
            print("  tiles take less than our smallest plan: none of ours has their memory", flush=True)

    for name, limit in limits.items():
        worker = Worker(name, __file__, task | {"who": "ours", "limits": [limit], "alone": True}, {})
        ready(name, worker.ask())
        worker.close()
        refuse_difference(name, alone[name]["bits"], alone[UNLIMITED]["bits"])

    rounds = [list(limits)] * args.rounds
    if last == SMALLEST:  # nobody asked for it: once
        rounds[1:] = [[name for name in limits if name != last]] * (args.rounds - 1)
    schedule = [limits[name] for names in rounds for name in names]
    workers = dict(peers)
    if rounds:
        one = Worker("vaemem, in turns", __file__, task | {"who": "ours", "limits": schedule, "alone": False}, {})
        workers |= dict.fromkeys(limits, one)
    for i, names in enumerate(rounds):
        for name in (*names, *peers):
            result = workers[name].ask()
            if name in limits:
                refuse_difference(name, result["bits"], alone[UNLIMITED]["bits"])
            times.setdefault(name, []).append(result["seconds"])
            print(f"  round {i + 1}: {name:22s} {result['seconds']:7.2f} s", flush=True)
    for worker in set(workers.values()):
        worker.close()
    if not rounds:
        times = {name: [alone[name]["seconds"]] for name in (*limits, *peers)}
    return [row(args, name, limits.get(name), alone[name], times, said.get(name)) for name in times]


def row(
    args: argparse.Namespace,
    name: str,
    limit: int | None,
    alone: dict,
    times: dict[str, list[float]],
    said: tuple[float, float] | None,
) -> dict:
    """A line of the CSV. Bytes include weights; columns that end in _t leave them out, in T."""

    def beside(size: int | None) -> float | None:
        return None if size is None else round((size - alone["weights"]) / args.unit, 4)

    seconds, exact = times[name], "bits" in alone
    return {
        "contestant": name if name != TILES else f"{TILES} of {args.tile}",
        "op": args.op,
        "height": args.size,
        "width": args.size,
        "threads": args.threads,
        "weights_bytes": alone["weights"],
        "limit_bytes": limit,
        "limit_t": beside(limit),
        "planned_bytes": alone.get("planned"),
        "planned_t": beside(alone.get("planned")),
        "base_rss_bytes": alone["base"],
        "peak_rss_bytes": alone["rss"],
        "rss_t": beside(alone["rss"] - alone["base"]),
        "work": round(alone["work"], 4) if exact else None,
        "seconds": round(median(seconds), 3),
        "fastest": round(min(seconds), 3),
        "slowest": round(max(seconds), 3),
        "runs": len(seconds),
        "ratio_to_unlimited": round(ratio(seconds, times[UNLIMITED]), 3),
        "ratio_to_torch": round(ratio(seconds, times[WHOLE]), 3) if WHOLE in times else None,
        "ratio_to_tiles": round(ratio(seconds, times[TILES]), 3) if TILES in times else None,
        "exact": int(exact) if exact or said else None,  # of the whole by the same program, bit by bit
        "psnr": round(said[0], 2) if said else None,
        "seam": round(said[1], 3) if said else None,
        "versions": alone["what"],
        **where(),
    }


# ---- from the CSV files: a table, a picture ----


def measured() -> list[list[dict[str, str]]]:
    found = []
    for path in sorted(common.RESULTS.glob("memory_*.csv")):
        with open(path, newline="") as file:
            found.append(list(csv.DictReader(file)))
    if not found:
        raise SystemExit(f"no memory_*.csv in {common.RESULTS}: run python benchmarks/memory.py first")
    return found


def title(rows: list[dict[str, str]]) -> str:
    first = rows[0]
    return f"{first['op']} {first['height']}x{first['width']}"


def markdown(tables: list[list[dict[str, str]]]) -> str:
    lines = [
        "| run | which | planned | resident | peak RSS | seconds | of unlimited | of PyTorch | of tiles | result |",
        "|" + "---|" * 10,
    ]
    for r in (r for rows in tables for r in rows):
        result = "exact" if r["exact"] == "1" else f"PSNR {r['psnr']} dB, seam {r['seam']}/255" if r["psnr"] else ""
        planned, resident = (f"{float(r[key]):.2f} T" if r[key] else "" for key in ("planned_t", "rss_t"))
        ratios = (f"{float(r[f'ratio_to_{of}']):.2f}" if r[f"ratio_to_{of}"] else "" for of in (
            "unlimited", "torch", "tiles"))  # fmt: skip
        cells = r["contestant"], planned, resident, f"{int(r['peak_rss_bytes']) / MIB:.0f} MiB", r["seconds"]
        lines.append(f"| {' | '.join((title([r]), *cells, *ratios, result))} |")
    return "\n".join(lines)


def plot(tables: list[list[dict[str, str]]], path: Path) -> None:
    """A panel for each measurement: resident bytes above the base against seconds, ours as a curve."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(4.6 * len(tables), 3.8), layout="constrained")
    for axes, rows in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        points = [
            ((int(r["peak_rss_bytes"]) - int(r["base_rss_bytes"])) / MIB, float(r["seconds"]), r["contestant"])
            for r in rows
        ]
        mine = sorted(point for point in points if point[2].startswith("vaemem"))
        axes.plot(*list(zip(*mine, strict=True))[:2], "o-", color="#0072B2", label="vaemem, exact")
        others = [point for point in points if point not in mine]
        for (x, y, name), colour, marker in zip(others, ("#000000", "#D55E00"), "sD", strict=False):
            axes.plot(x, y, marker, color=colour, label=name)
        axes.set(xscale="log", yscale="log", title=title(rows), xlabel="peak RSS above the base, MiB", ylabel="seconds")
        axes.margins(0.15)
        for axis, ticks in (axes.xaxis, (1, 2, 5)), (axes.yaxis, (1, 1.5, 2, 3, 5, 7)):
            axis.set_major_locator(LogLocator(subs=ticks))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "vaemem"}):  # the same file from the same figures
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"wrote {os.path.relpath(path)}")


def main() -> None:
    parser = parser_of(__doc__, size=1024, rounds=3, threads=2)
    parser.add_argument("--op", default="decode", choices=["decode", "encode"])
    parser.add_argument("--limits", type=float, nargs="*", help="in T, besides the weights")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tile", type=int, default=512, help="side of PyTorch's tiles in pixels")
    parser.add_argument("--markdown", action="store_true", help="measure nothing, print what there is")
    parser.add_argument("--plot", action="store_true", help="measure nothing, draw what there is")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve((ours if args.worker["who"] == "ours" else peer)(args.worker))
    if args.markdown:
        print(markdown(measured()))
    if args.plot:
        plot(measured(), PICTURE)
    if args.markdown or args.plot:
        return
    args.unit = 128 * args.size * args.size * 4
    if args.limits is None:
        args.limits = LIMITS.get((args.op, args.size), LIMITS[args.op, 1024])
    print(f"{args.op} {args.size}x{args.size}, {args.threads} threads, float32; T is {args.unit / MIB:g} MiB")
    with tempfile.TemporaryDirectory() as folder:
        rows = contest(args, folder)
    name = f"memory_{args.op}_{args.size}.csv"
    write_csv(name, rows)
    with open(common.RESULTS / name, newline="") as file:
        print(markdown([list(csv.DictReader(file))]))


if __name__ == "__main__":
    main()
