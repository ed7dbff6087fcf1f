"""Compare decodes of videos with diffusers': their memory, or their time.

    python benchmarks/videos.py memory [--model wan2.1] [--sizes 480x832 720x1280] [--frames 81] [--dtypes ...]
    python benchmarks/videos.py time [--model wan2.1] [--sizes 256x256] [--frames 17] [--rounds 3] [--threads 2]

VAEs of Wan 2.1 or of LTX-2.3 (`--model ltx2.3`) with random weights. Memory is in GiB besides the weights and the
video: ours as planned, without a limit and the least; diffusers' largest allocation, whole and in its own tiles, from
`vaemem.pytorch.predict_peak`; and, of Wan's, the two frames that it keeps before each causal convolution, counted from
its calls. Times are medians of rounds in turns.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import diffusers
import numpy as np
import torch
from common import parser_of, write_csv
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

import vaemem
from vaemem._common import frames_factor, latent_factor
from vaemem.engine.configs import config_of, known_arch
from vaemem.pytorch import predict_peak

GIB = 2**30
MODELS = {"wan2.1": "qwen-image", "ltx2.3": "ltx2.3"}  # vaemem's names of the same architectures


def make(model: str, dtype: str) -> vaemem.VAE:
    return vaemem.VAE.random(MODELS[model], parts="decoder", dtype=dtype, videos=True)


def module_of(arch: dict[str, Any], dtype: str = "float32") -> Any:
    """Make diffusers' module."""
    config = config_of(arch)
    module = getattr(diffusers, config.pop("_class_name"))(**config).eval()
    return torch.nn.Module.to(module, getattr(torch, dtype))  # diffusers' own `to` warns


def latents_of(arch: dict[str, Any], size: str, frames: int) -> tuple[int, ...]:
    sides = (int(side) // latent_factor(arch) for side in size.split("x"))
    return 1, arch["latent_channels"], (frames - 1) // frames_factor(arch) + 1, *sides


def kept_frames(vae: Any, z: torch.Tensor) -> int:
    """Bytes of the two earlier frames that the causal convolutions keep."""
    kept: dict[str, int] = {}

    def seen(name: str, x: torch.Tensor) -> None:
        kept[name] = max(kept.get(name, 0), 2 * x[:, :, 0].numel() * x.element_size())

    for name, module in vae.named_modules():
        if isinstance(module, WanCausalConv3d) and module.kernel_size[0] > 1:
            module.register_forward_hook(lambda module, args, y, name=name: seen(name, args[0]))
    vae.decode(z)
    return sum(kept.values())


def theirs(arch: dict[str, Any], size: str, frames: int, dtype: str) -> dict[str, float]:
    with torch.device("meta"):
        vae = module_of(arch, dtype)
        z = torch.empty(latents_of(arch, size, frames), dtype=getattr(torch, dtype))
    video = 3 * frames * z.shape[3] * z.shape[4] * latent_factor(arch) ** 2 * z.element_size()

    def peak() -> float:  # `allocated` leaves out the weights
        return (predict_peak(vae, z, gpu="H100", call=lambda vae, z: vae.decode(z).sample).allocated - video) / GIB

    whole, kept = peak(), {}
    if arch["family"] == "wan":
        kept = {"two_frames_kept": kept_frames(vae, z) / GIB}
    vae.enable_tiling()
    vae.use_framewise_decoding = True  # LTX's
    return {"diffusers": whole, "diffusers_tiled": peak()} | kept


def ours(vae: vaemem.VAE, size: str, frames: int) -> dict[str, float]:
    vae.threads = 2
    height, width = map(int, size.split("x"))
    run = vae.estimate("decode", height, width, frames=frames)
    least = vae.tradeoff("decode", height, width, frames=frames)[-1]
    taken = [max(one.peak_bytes, one.reserved_bytes) - one.weights_bytes - one.output_bytes for one in (run, least)]
    return {"vaemem": taken[0] / GIB, "vaemem_least": taken[1] / GIB, "work_of_least": least.work}


def times(arch: dict[str, Any], size: str, frames: int, dtype: str, rounds: int, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    module = module_of(arch)
    vae = vaemem.VAE.load(module, dtype=dtype, videos=True)
    vae.threads = threads
    torch.nn.Module.to(module, getattr(torch, dtype))
    z = np.random.default_rng(0).standard_normal(latents_of(arch, size, frames), dtype=np.float32)
    given = torch.from_numpy(z).to(getattr(torch, dtype))
    seconds: dict[str, list[float]] = {"vaemem": [], "diffusers": []}
    for _ in range(rounds):
        for name, decode in (("vaemem", lambda: vae.decode(z)), ("diffusers", lambda: module.decode(given).sample)):
            start = time.perf_counter()
            video = decode()
            seconds[name].append(time.perf_counter() - start)
            if name == "vaemem":
                mine = video
    run, wanted = vae.last_run, video.float().numpy()
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    figures = {f"{name}_s": statistics.median(each) for name, each in seconds.items()} | {"ratio": ratio}
    gflops = sum(run.flops) / figures["vaemem_s"] / 1e9
    taken = (run.peak_bytes - run.weights_bytes - run.output_bytes) / GIB
    difference = float(np.linalg.norm(mine - wanted) / np.linalg.norm(wanted))
    return figures | {"vaemem_gib": taken, "gflops": gflops, "difference": difference}


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__, rounds=3, threads=2)
    parser.add_argument("what", choices=["memory", "time"])
    parser.add_argument("--model", choices=MODELS, default="wan2.1")
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--dtypes", nargs="+")
    args = parser.parse_args()
    is_memory = args.what == "memory"
    sizes = args.sizes or (["480x832", "720x1280"] if is_memory else ["256x256"])
    frames, rows = args.frames or (81 if is_memory else 17), []
    for size in sizes:
        for dtype in args.dtypes or (["float32", "bfloat16"] if is_memory else ["float32"]):
            row: dict[str, Any] = {"model": args.model, "size": size, "frames": frames, "dtype": dtype}
            if is_memory:
                vae = make(args.model, dtype)
                row |= ours(vae, size, frames) | theirs(vae.arch, size, frames, dtype)
            else:
                arch = known_arch(MODELS[args.model])
                row |= times(arch, size, frames, dtype, args.rounds, args.threads)
            rows.append(
                {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
            )
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    write_csv(f"videos_{args.what}_{args.model}.csv", rows)


if __name__ == "__main__":
    main()
