"""Every tile of our own convolution on a GPU, on the passes of a decode and an encode: which is fastest for each.

    python benchmarks/conv_tiles.py [--sizes 1024] [--dtypes bfloat16 float16] [--rounds 9] [--channels 96]

The passes are those of SD1.5, SDXL and FLUX at this size, or of a VAE with --channels at full size, on random numbers:
GroupNorm and SiLU on load, bias, residual and the next norm's sums, and a shortcut that narrows writes in its input's
place. The tiles take turns; a time is that of LAUNCHES launches in a row between two CUDA events, by their number,
medians of rounds. FLOPs are as computed (after 2x, four products of nine). `chosen` is the tile that vm_conv_choose
takes now: where another is faster, its costs in kernels/cuda/cuda.h are wrong. conv_wgmma.cu's tiles run with a
warpgroup ahead of the other, as vm_conv_args.lead says, and with both together; and with filters of e4m3 (`fp8`) where
precision="fp8" has them. The kernels are what `setup.py build_ext --inplace` has left. Rows go to conv_tiles_<gpu>.csv
in benchmarks/results.

On the CPU (--device cpu --small) the emulator of the tests runs them, to see that this script does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Machine, median, parser_of, write_csv
from contest import about, race

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import cuda_driver
from cases import Conv
from cuda_kernels import SM_90, ConvArgs, conv_kernel, conv_tiles, header, number, round_up
from emulator import build

LAUNCHES = 10
SHORT = {"bfloat16": "bf16", "float16": "f16"}
FOR_PIXELS, FOR_1X1 = (16, 16, 1), (4, 256, 1)


def passes(size: int, c: int) -> list[Conv]:
    """List passes of levels with c (128), 2 c, 4 c, 4 c channels: a decoder's from its attention on, an encoder's."""
    n = size // 8
    found = [Conv(4 * c, 12 * c, n, n, k=1, groups=32)]
    for side, x, y in ((n, 4 * c, 4 * c), (2 * n, 4 * c, 4 * c), (4 * n, 4 * c, 2 * c), (8 * n, 2 * c, c)):
        found += [Conv(x, y, side, side, groups=32)] * (x != y)
        found += [Conv(y, y, side, side, groups=32, add="apart")]
        found += [Conv(x, y, side, side, k=1)] * (x != y)
        found += [Conv(y, y, side, side, up=True)] * (side < size)
    for side, x, y in ((8 * n, c, 2 * c), (4 * n, 2 * c, 4 * c), (2 * n, 4 * c, 4 * c)):
        found += [Conv(x, x, side, side, stride=2)]
        found += [Conv(x, y, side // 2, side // 2, groups=32)] * (x != y)
    return found


class Pass:
    """A pass on random numbers, by any tile. blocked: filters are in blocks, as on Hopper GPUs."""

    def __init__(self, case: Conv, dtype: str, device: torch.device, blocked: bool):
        self.case, self.dtype, self.short = case, dtype, SHORT[dtype]
        kind, k, outs = getattr(torch, dtype), 2 if case.up else case.k, round_up(case.out_c)
        y_c, y_h, y_w = case.y
        self.in_place = case.k == 1 and y_c < case.in_c and not case.groups
        parts = -(-(case.h if case.up else y_h) // 4) * -(-(case.w if case.up else y_w) // 16) * (4 if case.up else 1)

        def noise(*shape: int, kind: torch.dtype = kind) -> torch.Tensor:
            return torch.randn(shape, device=device).to(kind)

        self.kept = {
            "x": noise(case.h, case.w, case.in_c),
            # large enough for blocks; kernels that read plain filters read fewer numbers
            "w": noise(4 if case.up else 1, -(-outs // 128) * 128, k, k, -(-case.in_c // 64) * 64)
            * (k * k * case.in_c) ** -0.5,
            "bias": noise(outs, kind=torch.float32),
            "w_scale": torch.ones(outs, device=device),
            "y": noise(y_h, y_w, outs),
            "stats": torch.zeros(parts * (16 + 2 * outs), device=device),  # of tiles of 4 rows or more
            "flags": torch.zeros(1, dtype=torch.int32, device=device),
        }
        if case.groups:
            self.kept |= {name: noise(case.in_c, kind=torch.float32) for name in ("scale", "shift")}
        self.fp8 = blocked and case.groups > 0 and case.k == 3
        if self.fp8:  # numbers up to 1.5
            shape = (-(-outs // 96) * 96 + 128) * k * k * -(-case.in_c // 128) * 128
            self.bytes = torch.randint(0, 0x3D, (shape,), dtype=torch.uint8, device=device)
        if case.add:
            self.kept["add"] = noise(y_h, y_w, outs)
        pitch = outs
        if self.in_place:
            self.kept["y"], pitch = self.kept["x"], case.in_c
        self.args = ConvArgs(
            **{name: tensor.data_ptr() for name, tensor in self.kept.items()},
            x_h=case.h, x_w=case.w, x_pitch=case.in_c, in_c=case.in_c, y_h=y_h, y_w=y_w, y_pitch=pitch, y_c=y_c,
            add_pitch=outs, k=k, stride=case.stride, pad_y=case.pad, pad_x=case.pad, up=case.up,
            act=case.groups > 0 and k > 1, blocked=blocked, clamp=(y_c, 0, 0), out_scale=1, multiply=1, bias_scale=1,
        )  # fmt: skip

    def tiles(self, most_shared: int) -> list[tuple[int, ...]]:
        """Returns the names of the tiles that can compute the pass if a block may use `most_shared` bytes."""
        left_out = {FOR_PIXELS} | ({FOR_1X1} if self.case.k > 1 else set())
        fit = {name: tile for name, tile in conv_tiles(most_shared).items() if header().conv_tile_fits(tile)}
        return [
            name
            for name, tile in fit.items()
            if tile.stride == self.case.stride
            and name not in left_out
            and (
                len(name) == 3 or (self.args.blocked and tile.outs == header().conv_filters(round_up(self.case.out_c)))
            )
            and (not self.in_place or tile.outs >= self.case.out_c)
        ]

    def chosen(self, most_shared: int, multiprocessors: int) -> tuple[int, ...]:
        words = number(self.short), self.args, self.in_place, most_shared, multiprocessors
        return header().conv_choose(*words).name


class Turn:
    """A pass by one tile, as one that takes part in a race."""

    def __init__(
        self, of: Pass, name: tuple[int, ...], lead: int, fp8: bool, launch: Callable[..., None], most_shared: int,
        multiprocessors: int,
    ):  # fmt: skip
        tile = conv_tiles(most_shared)[name]
        args = ConvArgs.from_buffer_copy(of.args)
        args.lead = lead
        if fp8:
            args.fp8, args.w = True, of.bytes.data_ptr()
        args.items = header().conv_items(args, tile)
        grid = header().conv_grid(args, tile, multiprocessors)
        kernel = conv_kernel(of.short, name, fp8)
        self.run = lambda: launch(kernel, (grid,), (tile.threads,), args, tile.shared)

    def time(self, machine: Machine) -> tuple[float, float]:
        device, host = machine.time(lambda: [self.run() for _ in range(LAUNCHES)])
        return device / LAUNCHES, host / LAUNCHES


def table(machine: Machine, args: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    sources = [build.CUDA / name for name in ("conv.cu", "conv_wgmma.cu")]
    with tempfile.TemporaryDirectory() as folder:
        if machine.gpu:
            driver = cuda_driver.Driver(os.environ.get("VAEMEM_LIBCUDA") or "libcuda.so.1")
            launch = cuda_driver.Kernels(
                driver, [cuda_driver.image(source, Path(folder)) for source in sources]
            ).enqueue
            wgmma = driver.target == "sm_90"
            most, count = driver.attribute(cuda_driver.MOST_SHARED), driver.attribute(cuda_driver.MULTIPROCESSORS)
        else:
            launch, most, count, wgmma = build.Kernels(sources).launch, SM_90, 2, True
        ran = about(machine, None)
        for dtype in args.dtypes:
            peak = machine.flops(dtype if machine.gpu else "float32")
            for case in [case for size in args.sizes for case in passes(size, 16 if args.small else args.channels)]:
                one = Pass(case, dtype, machine.device, wgmma and case.k == 3)
                lead = header().wgmma_lead(one.args.k)
                names = one.tiles(most)
                ways = [(name, way, False) for name in names for way in ([lead, 0] if len(name) > 3 else [0])]
                ways += [(name, lead, True) for name in names if len(name) > 3 and one.fp8]
                turns = {way: Turn(one, *way, launch, most, count) for way in ways}
                chosen = one.chosen(most, count)
                failures: dict[str, str] = {}
                times = race(machine, turns, args.rounds, args.case_seconds, failures)
                for way in ways:
                    name, ahead, fp8 = way
                    seconds = median([device for device, _ in times[way]]) if way in times else None
                    kind = (" wgmma" if ahead else " wgmma, together") * (len(name) > 3) + " fp8" * fp8
                    lines.append(
                        {
                            "pass": str(case),
                            "dtype": dtype,
                            "tile": "{}x{}".format(*name) + kind,
                            "chosen": int(name == chosen and not fp8 and (ahead > 0 or len(name) == 3)),
                            "ms": seconds and round(seconds * 1e3, 4),
                            "tflops": seconds and round(case.flops / seconds / 1e12, 1),
                            "share_of_peak": seconds and round(case.flops / seconds / peak / (1 + fp8), 3),
                            "failure": failures.get(way, ""),
                            **ran,
                        }
                    )
                show(str(case), dtype, [line for line in lines if (line["pass"], line["dtype"]) == (str(case), dtype)])
                write_csv(f"conv_tiles_{machine.label}.csv", lines, quiet=True)
    return lines


def show(case: str, dtype: str, lines: list[dict[str, Any]]) -> None:
    each = [
        f"{line['tile']}{'*' * line['chosen']} {line['ms']} ms ({line['tflops']} TFLOP/s)" if line["ms"]
        else f"{line['tile']}: {line['failure']}"
        for line in lines
    ]  # fmt: skip
    print(f"{case} {dtype}: {', '.join(each)}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=9, case_seconds=2, device="cuda", small=False)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024])
    parser.add_argument("--channels", type=int, default=128, help="channels at full size")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=list(SHORT))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"PyTorch {torch.__version__} finds no GPU (--device cpu tries the script)")
    table(Machine(args.device, args.small), args)


if __name__ == "__main__":
    main()
