"""The kernels of attention that a GPU can run, on the attention of a VAE: how fast each is, and how exact.

    python benchmarks/attention_kernels.py [--sizes 512 1024 2048] [--dtypes bfloat16 float16] [--rounds 9]

An image of 1024x1024 has 128x128 pixels there, with one head of 512 channels (--channels). q, k and v are random. The
kernels take turns; a time is that of LAUNCHES launches in a row between two CUDA events, by their number, medians of
rounds. `error` is relative to PyTorch's result in float32 from the same numbers. `chosen` is the kernel that
vm_attention_choose takes. The kernels are what `setup.py build_ext --inplace` has left. Rows go to
attention_kernels_<gpu>.csv in benchmarks/results.

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
from contest import about, race, relative_error

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import cuda_driver
from cuda_kernels import SM_90, AttentionArgs, attention_launch
from emulator import build

LAUNCHES = 5
SHORT = {"bfloat16": "bf16", "float16": "f16"}


class Attention:
    """A case on random numbers: n pixels side by side, each with q, k and v of c channels."""

    def __init__(self, n: int, c: int, dtype: str, device: torch.device):
        self.n, self.c, self.dtype = n, c, SHORT[dtype]
        self.x = torch.randn((n, 3, c), device=device).to(getattr(torch, dtype))
        self.y = torch.empty((n, c), device=device, dtype=self.x.dtype)
        self.args = AttentionArgs(
            x=self.x.data_ptr(), y=self.y.data_ptr(), n=n, channels=c, pitch=3 * c, y_pitch=c, scale=c**-0.5
        )

    @property
    def flops(self) -> float:
        return 4.0 * self.n * self.n * self.c

    def exact(self) -> torch.Tensor:
        q, k, v = self.x.float().unbind(1)
        parts = [torch.softmax(some @ k.T * self.c**-0.5, -1) @ v for some in q.split(1024)]
        return torch.cat(parts)


class Turn:
    """A case by one kernel, as one that takes part in a race."""

    def __init__(self, of: Attention, kernels: Any, launch: Callable[..., None], most_shared: int, wgmma: bool):
        self.words = attention_launch(kernels, of.dtype, most_shared, wgmma, of.args)
        self.name, self.of, self.launch = self.words[0], of, launch

    def time(self, machine: Machine) -> tuple[float, float]:
        device, host = machine.time(lambda: [self.launch(*self.words) for _ in range(LAUNCHES)])
        return device / LAUNCHES, host / LAUNCHES

    def error(self, want: torch.Tensor) -> float:
        """NaN if a number was not written."""
        self.of.y.fill_(float("nan"))
        self.launch(*self.words)
        return relative_error(self.of.y, want)


def table(machine: Machine, args: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    sources = [build.CUDA / name for name in ("attention.cu", "attention_wgmma.cu")]
    kernels: cuda_driver.Kernels | build.Kernels
    with tempfile.TemporaryDirectory() as folder:
        if machine.gpu:
            driver = cuda_driver.Driver(os.environ.get("VAEMEM_LIBCUDA") or "libcuda.so.1")
            kernels = cuda_driver.Kernels(driver, [cuda_driver.image(source, Path(folder)) for source in sources])
            launch, most = kernels.enqueue, driver.attribute(cuda_driver.MOST_SHARED)
            hopper = driver.target == "sm_90"
        else:
            kernels = build.Kernels(sources)
            launch, most, hopper = kernels.launch, SM_90, True
        ran = about(machine, None)
        for dtype in args.dtypes:
            peak = machine.flops(dtype if machine.gpu else "float32")
            for size in args.sizes:
                case = Attention((size // 8) ** 2, args.channels, dtype, machine.device)
                turns = {
                    turn.name: turn
                    for turn in (Turn(case, kernels, launch, most, wgmma) for wgmma in (False, True)[: 1 + hopper])
                }
                failures: dict[str, str] = {}
                times = race(machine, dict(turns), args.rounds, args.case_seconds, failures)
                want = case.exact()
                for name, turn in turns.items():
                    seconds = median([device for device, _ in times[name]]) if name in times else None
                    lines.append(
                        {
                            "size": size,
                            "pixels": case.n,
                            "channels": case.c,
                            "dtype": dtype,
                            "kernel": name,
                            "chosen": int(turn is [*turns.values()][-1]),
                            "ms": seconds and round(seconds * 1e3, 4),
                            "tflops": seconds and round(case.flops / seconds / 1e12, 1),
                            "share_of_peak": seconds and round(case.flops / seconds / peak, 3),
                            "error": None if name in failures else f"{turn.error(want):.3e}",
                            "failure": failures.get(name, ""),
                            **ran,
                        }
                    )
                    show(lines[-1])
                write_csv(f"attention_kernels_{machine.label}.csv", lines, quiet=True)
    return lines


def show(line: dict[str, Any]) -> None:
    how = f"{line['ms']} ms ({line['tflops']} TFLOP/s), error {line['error']}" if line["ms"] else line["failure"]
    print(f"{line['size']}x{line['size']} {line['kernel']}{'*' * line['chosen']}: {how}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=9, case_seconds=2, device="cuda", small=False)
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 2048], help="of images, in pixels")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=list(SHORT))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"PyTorch {torch.__version__} finds no GPU (--device cpu tries the script)")
    table(Machine(args.device, args.small), args)


if __name__ == "__main__":
    main()
