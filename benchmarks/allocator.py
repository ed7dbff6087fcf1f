"""Measure how many events per second the simulated CUDA caching allocator plays: one core, by vm_talloc_run.

Each row is checked (nothing live at the end, the same peak in every repetition); the rate is a median. It counts the
thread's processor time, so that other load on the machine does not matter; elapsed time is shown too.

    python benchmarks/allocator.py [--events 2000000] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time

import numpy as np

from vaemem.prediction.snapshot import CachingAllocator

STEP = np.dtype([("op", "u4"), ("id", "u4"), ("bytes", "u8"), ("stream", "u8")])
MIB = 1 << 20


def vae(events: int) -> list[tuple[int, int, int, int]]:
    """Layers of a decoder at several sizes: input, workspace and output alive in turn, small statistics between."""
    rng = random.Random(1)
    steps, previous = [], None
    for i in range(events // 6):
        t = 128 * rng.choice([256, 512, 768, 1024]) ** 2 // rng.choice([1, 2, 4, 8])
        out, work, small = 3 * i, 3 * i + 1, 3 * i + 2
        steps += [
            (0, small, 512 * rng.randint(1, 8), 0),
            (0, out, t, 0),
            (0, work, 2 * t + 16, 0),
            (1, work, 0, 0),
            (1, small, 0, 0),
        ]
        if previous is not None:
            steps.append((1, previous, 0, 0))
        previous = out
    return [*steps, (1, previous, 0, 0)]


def churn(events: int, live: int) -> list[tuple[int, int, int, int]]:
    """Sizes from 512 B to 64 MiB (log-uniform), `live` tensors alive, dropped in random order on two streams."""
    rng = random.Random(2)
    steps, alive = [], []
    for i in range(events // 2):
        steps.append((0, i, int(512 * 2 ** rng.uniform(0, 17)), i % 2))
        alive.append(i)
        if len(alive) > live:
            k = rng.randrange(live)
            alive[k], alive[-1] = alive[-1], alive[k]
            steps.append((1, alive.pop(), 0, 0))
    return steps + [(1, i, 0, 0) for i in alive]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--csv")
    options = parser.parse_args()
    traces = {
        "vae": vae(options.events),
        "churn, 100 live": churn(options.events, 100),
        "churn, 1000 live": churn(options.events, 1000),
        "churn, 10000 live": churn(options.events, 10_000),
    }
    settings = {
        "default": {},
        "history": {"history": True},
        "max_split_size_mb=32": {"max_split_size_mb": 32},
        "roundup_power2_divisions=8": {"roundup_power2_divisions": 8},
        "expandable_segments": {"expandable_segments": True},
    }
    rows = []
    print(f"{'trace':<20}{'setting':<28}{'events':>10}{'M events/s':>12}{'by the clock':>14}{'peak reserved, MiB':>20}")
    for trace, steps in traces.items():
        array = np.array(steps, STEP)
        addresses = np.zeros(int(array["id"].max()) + 1, np.uint64)
        for name, setting in settings.items():
            busy, clock, peaks = [], [], set()
            for _ in range(options.repeat):
                allocator = CachingAllocator(**{"history": False, **setting})
                start, start_clock = time.thread_time(), time.perf_counter()
                allocator.run(array, addresses)
                busy.append(time.thread_time() - start)
                clock.append(time.perf_counter() - start_clock)
                assert allocator.memory_allocated() == 0
                peaks.add(allocator.max_memory_reserved())
            (peak,) = peaks
            rate, by_clock = (len(array) / statistics.median(seconds) / 1e6 for seconds in (busy, clock))
            print(f"{trace:<20}{name:<28}{len(array):>10}{rate:>12.1f}{by_clock:>14.1f}{peak / MIB:>20.0f}")
            row = {"trace": trace, "setting": name, "events": len(array)}
            rows.append({**row, "million_events_per_second": round(rate, 2), "by_the_clock": round(by_clock, 2)})
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
