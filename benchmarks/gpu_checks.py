"""Small checks on a GPU, each a process of its own: a fault ends its CUDA context and nothing else.

    python benchmarks/gpu_checks.py one own|cudnn [--size 1024]   decode once, compare with the CPU, say what runs where
    python benchmarks/gpu_checks.py dlpack                        arrays of PyTorch on the GPU, without a copy
    python benchmarks/gpu_checks.py repeats [--times 20]          the same bits from every repeat
    python benchmarks/gpu_checks.py limits [--size 1024]          what each memory limit costs
    python benchmarks/gpu_checks.py videos [--with-torch]         the same of videos, and what diffusers takes

`one` and `limits` run without PyTorch, `--with-torch` imports it first: cuDNN may choose other engines where NVRTC is
loaded, so `one cudnn` prints its plans in both kinds of process. A check that fails exits with 1. Each result is a line
of text and a row in VAEMEM_ROWS.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
from common import append_row, median, parser_of

import vaemem

# The project's bar: 1.1 times PyTorch's own error in the same type. That is 3.2e-2 in bfloat16 on a CPU, and an eighth
# of it in float16, which has three bits more.
TOLERANCE = {"bfloat16": 3.5e-2, "float16": 4.4e-3, "float32": 1e-5}


def decoder(device: str, dtype: str, convolution: str = "cudnn") -> vaemem.VAE:
    return vaemem.VAE.random("sdxl", parts="decoder", device=device, dtype=dtype, convolution=convolution)


def latents(pixels: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, 4, pixels // 8, pixels // 8), dtype=np.float32)


def report(check: str, **row: object) -> None:
    print(f"{check}: " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    append_row("check", {"check": check} | row)


def one(args: argparse.Namespace) -> bool:
    """Decodes a small image and compares it with the CPU's in float32; then times a large one."""
    start = time.perf_counter()
    vae = decoder("cuda", args.dtype, args.convolution)
    kernels = {"convolution": args.convolution, "attention": vae._device.backend.attention}
    report("open", **kernels, seconds=round(time.perf_counter() - start, 2))
    z = latents(args.compare)
    got, want = vae.decode(z), decoder("cpu", "float32").decode(z)
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    right = error < TOLERANCE[args.dtype]  # False for NaN
    report(
        "error", convolution=args.convolution, dtype=args.dtype, size=args.compare, error=f"{error:.3e}", right=right
    )
    taken = []
    for _ in range(args.times):
        vae.decode(latents(args.size))
        taken.append(sum(vae.last_run.pass_seconds))
    run = vae.last_run
    report(
        "time", convolution=args.convolution, dtype=args.dtype, size=args.size,
        first_ms=round(1e3 * taken[0], 2), median_ms=round(1e3 * median(taken), 2),
        peak_bytes=run.peak_bytes, reserved_bytes=run.reserved_bytes, unaccounted_bytes=vae.unaccounted_bytes,
        notes="; ".join(run.notes),
    )  # fmt: skip
    for line in vae._device.backend.cudnn_plans:
        print(f"plan {'with' if 'torch' in sys.modules else 'without'} torch: {line}")
    return right


def dlpack(args: argparse.Namespace) -> bool:
    """Gives and takes PyTorch's tensors; the bits are those of NumPy's way through host memory."""
    import torch

    vae, z = decoder("cuda", "bfloat16", "own"), latents(args.compare)
    want = torch.from_numpy(vae.decode(torch.from_numpy(z).bfloat16().float().numpy())).cuda()
    here = torch.from_numpy(z).cuda().bfloat16()
    got = vae.decode(here)
    same = isinstance(got, torch.Tensor) and got.is_cuda and torch.equal(got.float(), want.bfloat16().float())
    report("dlpack", what="decode", type=type(got).__name__, dtype=str(getattr(got, "dtype", "")), same=same)
    out = torch.full_like(got, float("nan"))
    given = vae.decode(here, out=out)
    written = given.data_ptr() == out.data_ptr() and torch.equal(out, got)
    report("dlpack", what="out", same=written)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whoever does not wait for the stream reads zeros
        late = torch.zeros_like(here)
        torch.cuda._sleep(50_000_000)
        late.copy_(here)
        on_stream = vae.decode(late)
        ordered = torch.equal(on_stream, got)
    report("dlpack", what="stream", same=ordered)
    return same and written and ordered


def repeats(args: argparse.Namespace) -> bool:
    z, different = latents(args.size), 0
    for convolution in ("own", "cudnn"):
        vae = decoder("cuda", args.dtype, convolution)
        for vae.graphs in (False, True):
            first = vae.decode(z)
            others = sum(not np.array_equal(first, vae.decode(z)) for _ in range(args.times))
            report("repeats", convolution=convolution, graphs=vae.graphs, times=args.times, different=others)
            different += others
    return different == 0


def limits(args: argparse.Namespace) -> bool:
    """Times each plan from the fastest to the smallest."""
    for convolution in ("own", "cudnn"):
        vae, z = decoder("cuda", args.dtype, convolution), latents(args.size)
        for plan in vae.tradeoff("decode", args.size, args.size):
            taken = []
            for _ in range(args.times):
                vae.decode(z, memory_limit=plan.reserved_bytes)
                taken.append(sum(vae.last_run.pass_seconds))
            report(
                "limit", convolution=convolution, size=args.size, reserved_bytes=plan.reserved_bytes,
                peak_bytes=plan.peak_bytes, ms=round(1e3 * median(taken), 3),
            )  # fmt: skip
    return True


# (model, height, width, frames); the first of each model is small, and compared with the CPU.
VIDEOS = [("wan2.1", 64, 96, 9), ("ltx2.3", 64, 96, 9), ("wan2.1", 480, 832, 81), ("wan2.1", 704, 1280, 61)]
VIDEOS += [("ltx2.3", 704, 1280, 121)]


def videos(args: argparse.Namespace) -> bool:
    """Decodes videos: the error of small ones, then times and memory, without a limit and in the smallest plan."""
    from videos import MODELS, latents_of, make

    right = True
    for model, height, width, frames in VIDEOS:
        is_small = frames < 10
        if args.size <= 64 and not is_small:  # a rehearsal
            continue
        want = None
        for convolution in ("own", "cudnn"):
            vae = vaemem.VAE.random(
                MODELS[model], parts="decoder", device="cuda", dtype=args.dtype, videos=True, convolution=convolution
            )
            shape = latents_of(vae.arch, f"{height}x{width}", frames)
            z = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
            row: dict[str, Any] = {
                "model": model,
                "height": height,
                "width": width,
                "frames": frames,
                "dtype": args.dtype,
            }
            if is_small:
                want = make(model, "float32").decode(z).astype(np.float64) if want is None else want
                error = float(np.linalg.norm(vae.decode(z) - want) / np.linalg.norm(want))
                right = right and error < 2 * TOLERANCE[args.dtype]  # False for NaN
                report("video_error", **row, convolution=convolution, error=f"{error:.3e}")
            else:
                time_video(vae, z, row, convolution, args.times)
            vae.close()
        if is_small:
            continue
        if args.with_torch:
            their_video(row, shape)
    return right


def time_video(vae: vaemem.VAE, z: np.ndarray, row: dict[str, Any], convolution: str, times: int) -> None:
    """Reports times and memory without a limit and, with our own convolution, of the smallest plan."""
    least = vae.smallest("decode", row["height"], row["width"], frames=row["frames"], output_type="uint8")
    for limit in (None, least) if convolution == "own" else (None,):
        taken = []
        for _ in range(max(times // 2, 1)):
            vae.decode(z, memory_limit=limit, output_type="uint8")
            taken.append(sum(vae.last_run.pass_seconds))
        run = vae.last_run
        report(
            "video", **row, convolution=convolution, limit=limit or 0, first_s=round(taken[0], 3),
            median_s=round(median(taken), 3),
            peak_bytes=run.peak_bytes, reserved_bytes=run.reserved_bytes, unaccounted_bytes=vae.unaccounted_bytes,
        )  # fmt: skip


def their_video(row: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Times diffusers' decode of the same video, and reports what PyTorch's counters say."""
    import torch
    from videos import MODELS, module_of

    from vaemem.engine.configs import known_arch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = module_of(known_arch(MODELS[str(row["model"])]), str(row["dtype"])).cuda()
    z = torch.randn(shape, device="cuda", dtype=module.dtype)
    try:
        with torch.no_grad():
            for _ in range(2):
                start = time.perf_counter()
                module.decode(z)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        report("video_diffusers", **row, seconds=round(seconds, 3), allocated=allocated, reserved=reserved)
    except torch.OutOfMemoryError as refused:
        report("video_diffusers", **row, refused=str(refused).splitlines()[0])


CHECKS = {"one": one, "dlpack": dlpack, "repeats": repeats, "limits": limits, "videos": videos}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, size=1024)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("convolution", nargs="?", choices=["own", "cudnn"], default="own")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="bfloat16")
    parser.add_argument("--compare", type=int, default=256, help="pixels of the one that is compared with the CPU")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--with-torch", action="store_true", help="import torch first")
    args = parser.parse_args(argv)
    if args.with_torch:
        import torch

        torch.zeros(1, device="cuda")
    return 0 if CHECKS[args.check](args) else 1


if __name__ == "__main__":
    sys.exit(main())
