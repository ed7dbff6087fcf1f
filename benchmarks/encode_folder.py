"""Encode a folder of JPEGs to latents: vaemem compared with PyTorch and diffusers, in turns.

    python benchmarks/encode_folder.py [--size 512] [--images 16] [--batches 1 4] [--rounds 3] [--threads 2]

SDXL's VAE with random weights, float32. Each contestant reads the same folder of noisy JPEGs, scales and cuts them to
buckets with the same code and as many reading threads, encodes their means, and writes them as safetensors. A process
for each contestant loads its VAE and encodes one image before it counts. diffusers runs in channels_last, in batches;
the latents of both must agree.

Columns: images per second by the clock; images per second of a core's time, which other programs on the machine disturb
less; the largest resident size of the process, and the size after loading.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Worker, median, parser_of, peak_rss, reset_peak_rss, serve, settled_rss, where, write_csv

MIB = 2**20


def draw(folder: Path, size: int, count: int) -> None:
    """Write JPEGs of many aspects, with twice the pixels of their buckets."""
    from PIL import Image

    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        width = int(size * rng.uniform(1.1, 1.9))
        coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
        picture = Image.fromarray(coarse).resize((width, 2 * size * size // width), Image.Resampling.BICUBIC)
        noise = rng.integers(-8, 9, (*picture.size[::-1], 3))
        Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)).save(folder / f"{i:04d}.jpg")


def our_run(args: dict):
    import vaemem
    from vaemem.datasets.shards import Preparation, encode_dataset

    encoder = vaemem.Encoder(args["weights"], threads=args["threads"])
    encoder({"image": [np.zeros((64, 64, 3), np.uint8)]})
    how = Preparation(side=args["size"], step=64)
    return lambda out: encode_dataset([args["folder"]], out, encoder, how)


def diffusers_run(args: dict):
    import torch
    from diffusers import AutoencoderKL
    from safetensors.torch import save_file

    from vaemem._common import grouped
    from vaemem.datasets.shards import Preparation, read_ahead
    from vaemem.datasets.sources import list_images

    torch.set_num_threads(args["threads"])
    vae = AutoencoderKL.from_pretrained(args["weights"]).eval().to(memory_format=torch.channels_last)
    how = Preparation(side=args["size"], step=64)

    @torch.no_grad()
    def encode(pictures: list[np.ndarray]) -> torch.Tensor:
        x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
        return vae.encode(x.contiguous(memory_format=torch.channels_last)).latent_dist.mode()

    def run(out: Path) -> None:
        items, latents = list_images([args["folder"]]), {}
        ready = list(zip(items, read_ahead(items, lambda read: how.read(read, 8)), strict=True))
        for same in grouped(ready, lambda pair: pair[1].placed.bucket).values():
            for start in range(0, len(same), args["batch"]):
                batch = same[start : start + args["batch"]]
                found = encode([one.picture for _, one in batch])
                latents |= {item.name: latent.contiguous() for (item, _), latent in zip(batch, found, strict=True)}
        out.mkdir()
        save_file(latents, out / "latents-00000.safetensors")

    encode([np.zeros((64, 64, 3), np.uint8)])
    return run


def work(args: dict) -> None:
    """A worker: encode the folder once for every line of stdin."""
    run = (our_run if args["contestant"] == "vaemem" else diffusers_run)(args)
    base, number = settled_rss(), iter(range(10**6))

    def measure() -> dict:
        out = Path(args["out"], f"{args['contestant']}-{args['batch']}-{next(number)}")
        reset_peak_rss()
        seconds, core_seconds = time.perf_counter(), time.process_time()
        run(out)
        seconds, core_seconds = time.perf_counter() - seconds, time.process_time() - core_seconds
        return {"seconds": seconds, "core_seconds": core_seconds, "peak": peak_rss(), "base": base, "out": str(out)}

    serve(measure)


def check_agreement(ours: Path, theirs: Path) -> None:
    from safetensors.numpy import load_file

    one, other = (load_file(folder / "latents-00000.safetensors") for folder in (ours, theirs))
    assert one.keys() == other.keys()
    for name in one:
        error = np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name])
        assert error < 1e-4, f"{name}: {error}"


def main() -> None:
    parser = parser_of(__doc__, size=512, rounds=3, threads=2)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="diffusers' batches")
    parser.add_argument("--model", default="sdxl", help="or a config's path, for tests")
    parser.add_argument("--worker", type=json.loads)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    import vaemem

    with tempfile.TemporaryDirectory() as folder:
        named = args.model in vaemem._core.models()
        vaemem.VAE.random(args.model if named else "sdxl", config=None if named else args.model).save(f"{folder}/vae")
        draw(Path(folder, "photos"), args.size, args.images)
        given = {"weights": f"{folder}/vae", "folder": f"{folder}/photos", "out": folder}
        given |= {"size": args.size, "threads": args.threads}
        contestants = [("vaemem", 1), *(("diffusers", batch) for batch in args.batches)]
        env = {"OMP_NUM_THREADS": str(args.threads)}
        workers = [Worker(name, __file__, given | {"contestant": name, "batch": n}, env) for name, n in contestants]
        for _ in range(args.rounds):
            for worker in workers:
                worker.ask()
        for worker in workers:
            worker.close()
        for worker in workers[1:]:
            check_agreement(Path(workers[0].results[0]["out"]), Path(worker.results[0]["out"]))
    rows = []
    for (name, batch), worker in zip(contestants, workers, strict=True):
        seconds, core_seconds = (median([one[key] for one in worker.results]) for key in ("seconds", "core_seconds"))
        row = {"contestant": name, "batch": batch, "size": args.size, "images": args.images, "threads": args.threads}
        row |= {"images_per_second": round(args.images / seconds, 3)}
        row |= {"images_per_core_second": round(args.images / core_seconds, 3)}
        row |= {"peak_mib": round(max(one["peak"] for one in worker.results) / MIB)}
        row |= {"base_mib": round(worker.results[0]["base"] / MIB)}
        rows.append(row | where())
        print(row)
    write_csv(f"encode_folder_{args.size}.csv", rows)


if __name__ == "__main__":
    main()
