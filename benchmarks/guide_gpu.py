"""Habits that a guide recommends for decodes in tiles, each beside what it replaces and beside one tile's decode.

    python benchmarks/guide_gpu.py [--parts in-place contiguous transfers pre-allocated ramps] [--tile 1024]

`make reproduce ONLY=guide` names it if a claim needs a GPU. Medians of rounds in turns, in ms, and what the habit
saves as a share of a tile's decode (SDXL's VAE in bfloat16, torch_vae.py). Writes guide_gpu_<gpu>.csv. --device cpu
--small shows that it runs.
"""

from __future__ import annotations

import math

import torch
import torch_vae
from common import Machine, commit, median, parser_of, write_csv
from contest import Case
from torch.nn import functional as F

import vaemem

PARTS = ("in-place", "contiguous", "transfers", "pre-allocated", "ramps")


def pairs(part: str, tile: int, place: torch.device, module):
    """(as it was, as the guide says), to be called."""
    few, many = (torch.randn(1, c, tile, tile, dtype=torch.bfloat16, device=place) for c in (3, 128))
    if part == "in-place":
        return lambda: (many * 0.5 + 1) / 2, lambda: many.mul_(0.5).add_(1).div_(2)
    if part == "contiguous":
        wide = torch.randn(1, 128, tile, 2 * tile, dtype=torch.bfloat16, device=place)[..., :tile]
        kernel = torch.randn(128, 128, 3, 3, dtype=torch.bfloat16, device=place)
        return lambda: F.conv2d(wide, kernel), lambda: F.conv2d(wide.contiguous(), kernel)
    if part == "transfers":
        z = torch.randn(1, 4, tile // 8, tile // 8, dtype=torch.bfloat16)
        pinned = z.pin_memory() if place.type == "cuda" else z
        return lambda: module.image(z.to(place)), lambda: module.image(pinned.to(place, non_blocking=True))
    if part == "pre-allocated":
        result = torch.empty(1, 3, 2 * tile, 2 * tile, dtype=torch.bfloat16, device=place)

        def written() -> None:
            for i in range(4):
                result[..., i // 2 * tile : (i // 2 + 1) * tile, i % 2 * tile : (i % 2 + 1) * tile] = few

        return lambda: torch.cat([torch.cat([few, few], 3)] * 2, 2), written

    def ramp() -> torch.Tensor:
        return (1 - torch.cos(math.pi * torch.arange(tile // 4, device=place) / (tile // 4))) / 2

    kept = ramp().bfloat16()
    return lambda: few[..., : tile // 4] * ramp().bfloat16(), lambda: few[..., : tile // 4] * kept


def main() -> None:
    parser = parser_of(__doc__, rounds=15, device="cuda", small=False)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--tile", type=int, default=1024)
    args = parser.parse_args()
    machine = Machine(args.device, args.small)
    case = Case("sdxl", "decode", args.tile, "bfloat16", small=args.small)
    module = torch_vae.with_weights(vaemem.VAE.random(config=case.arch)).to(machine.device, torch.bfloat16)
    z = torch.randn(1, 4, args.tile // 8, args.tile // 8, dtype=torch.bfloat16, device=machine.device)
    lines = []
    with torch.inference_mode():
        for part in args.parts or PARTS:
            runs = (*pairs(part, args.tile, machine.device, module), lambda: module.image(z))
            times = [[machine.time(run)[0] for run in runs] for _ in range(args.rounds + 2)][2:]
            before, after, decode = (1e3 * median(list(one)) for one in zip(*times, strict=True))
            lines.append({
                "part": part, "tile": args.tile, "before_ms": round(before, 4), "after_ms": round(after, 4),
                "decode_ms": round(decode, 3), "saves_of_decode": round((before - after) / decode, 5),
                "gpu": machine.name, "torch": torch.__version__, "commit": commit(),
            })  # fmt: skip
            print(f"  {part:14} {before:9.3f} -> {after:9.3f} ms, {100 * (before - after) / decode:+.3f}% of a decode")
    write_csv(f"guide_gpu_{machine.label}.csv", lines)


if __name__ == "__main__":
    main()
