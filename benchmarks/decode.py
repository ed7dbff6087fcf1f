"""Whole decodes and encodes: ours beside PyTorch, in turns, in one run.

    python benchmarks/decode.py [--op decode] [--size 512] [--rounds 5] [--threads 2]

Every contestant is a process of its own (their environments differ) that loads, warms up with one run, and then
waits; each round asks them one after another, so that what the machine does meanwhile falls on all. Medians.
Peers: diffusers' AutoencoderKL in PyTorch, float32, channels_last, with the default malloc, with a malloc told to keep
its memory and use huge pages, and held to AVX2. SSE and plain C are asked once.
"""

from __future__ import annotations

import argparse
import json
import time

from common import Worker, commit, cpu, median, peak_rss, serve, write_csv

TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
AVX2_PEER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CONTESTANTS = {  # name: (who, environment, asked every round)
    "vaemem": ("ours", {}, True),
    "torch": ("torch", {}, True),
    "torch, tuned malloc": ("torch", TUNED, True),
    "vaemem, AVX2": ("ours", {"VAEMEM_DISABLE": "avx512"}, True),
    "torch, AVX2": ("torch", AVX2_PEER, True),
    "vaemem, SSE": ("ours", {"VAEMEM_DISABLE": "avx512,avx2"}, False),
    "vaemem, plain C": ("ours", {"VAEMEM_DISABLE": "avx512,avx2,sse"}, False),
}


def inputs(args: dict):
    import numpy as np

    rng = np.random.default_rng(0)
    if args["op"] == "decode":
        return rng.standard_normal((1, 4, args["size"] // 8, args["size"] // 8), dtype=np.float32)
    return rng.uniform(-1, 1, (1, 3, args["size"], args["size"])).astype(np.float32)


def ours(args: dict):
    import vaemem
    from vaemem import _core

    vae = vaemem.VAE.random("sdxl")
    vae.threads = args["threads"]
    data = inputs(args)
    backend = next(b["name"] for b in vaemem.backends() if b["chosen"])
    getattr(vae, args["op"])(data)

    def measure() -> dict:
        peak = _core.kernel_peak(backend, args["threads"], 10_000_000)
        getattr(vae, args["op"])(data)
        run = vae.last_run
        return {
            "seconds": run.seconds,
            "rss": peak_rss(),
            "flops": sum(run.flops),
            "peak": peak,
            "what": f"vaemem {vaemem.__version__} {backend}",
            "passes": {name: [f, s] for name, f, s in zip(run.passes, run.flops, run.pass_seconds, strict=True)},
        }

    return measure


def torch_vae(args: dict):
    import diffusers
    import torch

    torch.set_num_threads(args["threads"])
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
    )
    vae = vae.eval().to(memory_format=torch.channels_last)
    data = torch.from_numpy(inputs(args)).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def measure() -> dict:
        start = time.perf_counter()
        vae.decode(data) if args["op"] == "decode" else vae.encode(data)
        return {
            "seconds": time.perf_counter() - start,
            "rss": peak_rss(),
            "what": f"torch {torch.__version__} diffusers {diffusers.__version__} channels_last",
        }

    measure()
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="decode", choices=["decode", "encode"])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", type=json.loads)
    args = parser.parse_args()
    if args.worker:
        serve((ours if args.worker["who"] == "ours" else torch_vae)(args.worker))
        return

    workers = {}
    for name, (who, env, _) in CONTESTANTS.items():
        task = {"who": who, "op": args.op, "size": args.size, "threads": args.threads}
        workers[name] = Worker(name, __file__, task, env)
        seconds = workers[name].ask()["seconds"]  # loaded and warm before the next one starts
        print(f"  ready: {name} ({seconds:.2f} s)", flush=True)
        if CONTESTANTS[name][2]:
            workers[name].results.clear()
    for i in range(args.rounds):
        for name, worker in workers.items():
            if CONTESTANTS[name][2]:
                worker.ask()
        taken = {n: round(w.results[-1]["seconds"], 2) for n, w in workers.items() if CONTESTANTS[n][2]}
        print(f"  round {i + 1}: {taken}", flush=True)
    for worker in workers.values():
        worker.close()

    reference = [r["seconds"] for r in workers["torch"].results]
    rows = []
    print(f"\n{args.op} {args.size}x{args.size}, {args.threads} threads, float32, medians of {args.rounds} rounds")
    for name, worker in workers.items():
        seconds = [r["seconds"] for r in worker.results]
        same = len(seconds) == len(reference)
        ratio = (
            median([a / b for a, b in zip(seconds, reference, strict=True)])
            if same
            else median(seconds) / median(reference)
        )
        flops, peak = worker.results[0].get("flops"), [r["peak"] for r in worker.results if "peak" in r]
        gflops = flops / median(seconds) / 1e9 if flops else None
        share = median([r["flops"] / r["seconds"] / r["peak"] for r in worker.results]) if peak else None
        rows.append(
            {
                "contestant": name,
                "op": args.op,
                "height": args.size,
                "width": args.size,
                "threads": args.threads,
                "seconds": round(median(seconds), 3),
                "fastest": round(min(seconds), 3),
                "slowest": round(max(seconds), 3),
                "runs": len(seconds),
                "ratio_to_torch": round(ratio, 3),
                "gflops": gflops and round(gflops, 1),
                "fma_peak_gflops": round(median(peak) / 1e9, 1) if peak else None,
                "share_of_peak": share and round(share, 3),
                "peak_rss_mib": round(max(r["rss"] for r in worker.results) / 2**20),
                "versions": worker.results[0]["what"],
                "cpu": cpu(),
                "commit": commit(),
            }
        )
        share_text = f"  {100 * share:.0f}% of {median(peak) / 1e9:.0f} GFLOP/s" if share else ""
        rss = rows[-1]["peak_rss_mib"]
        print(f"  {name:20s} {median(seconds):7.2f} s  {ratio:5.2f} of torch  {rss:5d} MiB{share_text}")
    print("  ratios are medians of each round's; vaemem, AVX2 beside torch, AVX2: ", end="")
    pairs = zip(workers["vaemem, AVX2"].results, workers["torch, AVX2"].results, strict=True)
    print(f"{median([a['seconds'] / b['seconds'] for a, b in pairs]):.2f}")
    write_csv(f"{args.op}_{args.size}_cpu.csv", rows)


if __name__ == "__main__":
    main()
