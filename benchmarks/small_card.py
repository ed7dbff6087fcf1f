"""Run what vaemem advises for a card with little memory, on a large one that a ballast fills.

    python benchmarks/small_card.py [--free 8 12] [--checks ways decode strategy]

The ballast leaves --free GiB. Each check runs in a process of its own:

    ways      SDXL at 1024x1024 by the plan's recommended way and its two next: each was said to fit, does it?
    decode    safe_decode of 2048x2048 in float16, which PyTorch cannot decode there: does it give the picture?
    strategy  diffusers' ComponentsManager with OffloadStrategy: which components leave, and does the run fit?

Rows go to small_card_<gpu>.csv in benchmarks/results. --small runs SD 1.5 at 64x64 on the CPU, without a ballast, to
see that the script runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import Machine, commit, parser_of, write_csv

import vaemem
from vaemem import pytorch

GIB = 1 << 30
Row = dict[str, Any]


class Card:
    """A card with little free memory, and the pipeline and the size of the checks on it."""

    def __init__(self, free: int, small: bool):
        self.small, self.device = small, "cpu" if small else "cuda"
        self.model, self.side = ("sd15", 64) if small else ("sdxl", 1024)
        name = "RTX 4060" if small else torch.cuda.get_device_name()
        held = {} if small else {"used": max(torch.cuda.mem_get_info()[1] - free * GIB - (1 << 29), 0)}
        self.asked: Row = {"gpu": name, **held}

    def pipeline(self, **more: Any) -> Any:
        return pytorch.load_pipeline(self.model, random=True, **more)

    def run(self, pipe: Any) -> Row:
        """Make a picture in two steps. Return its reserved memory, or the out-of-memory message."""
        if not self.small:
            torch.cuda.reset_peak_memory_stats()
        try:
            pipe("a cat", height=self.side, width=self.side, num_inference_steps=2, output_type="np")
        except torch.OutOfMemoryError as full:
            return {"fits": False, "said": str(full).partition(". ")[0]}
        peak = 0 if self.small else torch.cuda.max_memory_reserved()
        return {"fits": True, "reserved_bytes": peak}


def check_ways(card: Card) -> Iterator[Row]:
    plan = vaemem.plan_pipeline(card.model, card.side, card.side, **card.asked)
    fitting = [outcome for outcome in plan.outcomes if outcome.fits][: 1 if card.small else 3]
    for outcome in fitting:
        pipe = card.pipeline()
        applied = pytorch.apply(outcome.way, pipe, device=card.device)
        yield {
            "what": outcome.way.name,
            "verdict": outcome.verdict,
            "predicted_bytes": outcome.way.peak.total,
            **card.run(pipe),
        }
        applied.undo()
        del pipe, applied


def check_decode(card: Card) -> Iterator[Row]:
    pipe = card.pipeline().to(card.device)
    pipe.vae.to(torch.float32 if card.small else torch.float16)
    guard = pytorch.safe_decode(pipe)
    z = torch.randn(1, 4, *[2 * card.side // 8] * 2, device=card.device, dtype=pipe.vae.dtype)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        image = pipe.vae.decode(z).sample
    guard.undo()
    words = "; ".join(str(one.message) for one in said if "vaemem" in str(one.message))[:200]
    good = list(image.shape[-2:]) == [2 * card.side] * 2 and bool(torch.isfinite(image).all())
    yield {"what": "safe_decode", "fits": good, "said": words or "PyTorch decoded"}


def check_strategy(card: Card) -> Iterator[Row]:
    import diffusers

    prediction = vaemem.predict_pipeline(card.model, card.side, card.side, **card.asked)
    pipe, manager = card.pipeline(), diffusers.ComponentsManager()
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            manager.add(name, part)
    if not card.small:  # the manager needs a card
        manager.enable_auto_cpu_offload(device=card.device, offload_strategy=pytorch.OffloadStrategy(prediction))
    yield {"what": "OffloadStrategy", "predicted_bytes": prediction.peak, **card.run(pipe)}


CHECKS: dict[str, Callable[[Card], Iterator[Row]]] = {
    "ways": check_ways, "decode": check_decode, "strategy": check_strategy,
}  # fmt: skip


def run_here(check: str, free: int, small: bool) -> None:
    """Run a check, and print its rows as JSON."""
    try:
        for row in CHECKS[check](Card(free, small)):
            print(json.dumps({"check": check, "free_gib": free} | row), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(
            json.dumps(
                {"check": check, "free_gib": free, "fits": None, "said": f"{type(error).__name__}: {error}"[:300]}
            )
        )


def main() -> int:
    parser = parser_of(__doc__, small=False)
    parser.add_argument("--free", nargs="+", type=int, default=[8, 12], help="GiB that the ballast leaves")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--seconds", type=float, default=60, help="of a check")
    parser.add_argument("--here", choices=CHECKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        run_here(args.here, args.free[0], args.small)
        return 0
    machine, rows, columns = Machine("cpu" if args.small else "cuda"), list[Row](), dict[str, None]()
    for free in args.free[: 1 if args.small else None]:
        ballast = None
        if not args.small:
            ballast = torch.empty(torch.cuda.mem_get_info()[0] - free * GIB, dtype=torch.uint8, device="cuda")
        for check in args.checks:
            words = [sys.executable, __file__, "--here", check, "--free", str(free), *["--small"] * args.small]
            try:
                ran = subprocess.run(words, capture_output=True, text=True, timeout=args.seconds * (1 + 9 * args.small))
                lines, ending = ran.stdout.splitlines(), ran.stderr[-2000:]
            except subprocess.TimeoutExpired:
                lines, ending = [], "stopped after its time"
            found = [json.loads(line) for line in lines if line.startswith("{")]
            found = found or [{"check": check, "free_gib": free, "fits": None, "said": ending[-300:]}]
            for row in found:
                rows.append(row | {"gpu": machine.name, "torch": torch.__version__, "commit": commit()})
                columns |= dict.fromkeys(rows[-1])
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        del ballast
        if not args.small:
            torch.cuda.empty_cache()
    write_csv(f"small_card_{machine.label}.csv", [dict.fromkeys(columns) | row for row in rows])
    return any(row["fits"] is None for row in rows)


if __name__ == "__main__":
    sys.exit(main())
