"""Check whether `Prediction.upper` and `band` hold for a cuDNN or a card without a recording. Each recorded profile is
left out in turn, and its answers are compared with the bound that is made without it.

There are two trials. One leaves out a version on every card. The other leaves out one card, in each version that was
recorded on another card of the same compute capability. Both trials take each (card, version), model, operation, dtype
and size, in a cold and in a warmed process.

    python benchmarks/left_out.py [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple
from unittest import mock

from vaemem.prediction import profiles, workspace
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.predict_vae import predict

SIZES = ((256, 256), (512, 512), (768, 768), (832, 1216), (1024, 1024), (1536, 1536), (2048, 2048))
CASES = list(itertools.product(("sdxl", "flux"), ("encode", "decode"), ("float16", "float32"), SIZES))
ANY_CARD = {70: "V100", 80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H100 PCIe", 100: "B200", 120: "RTX 5090"}


class Trial(NamedTuple):
    """One answer of a profile, and the bound without it. Sizes in bytes above the baseline."""

    left_out: str  # "version" or "card"
    gpu: str
    cudnn: str
    model: str
    op: str
    dtype: str
    height: int
    width: int
    reserved: int  # as the profile has it, after two warm-up runs
    cold: int
    least: int  # of the band
    most: int
    upper: int


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Hide these profiles, as if they had never been recorded."""
    kept = profiles.Catalogue([name for name in profiles.profile_files() if name not in set(names)])
    with mock.patch.object(workspace, "shipped_catalogue", lambda: kept):
        yield


def recorded() -> list[tuple[str, str, str, list[str]]]:
    """(what to leave out, a GPU, a version, the profiles that go) of every trial."""
    files = {
        name: about for name, about in profiles.profile_files().items() if profiles.load_profile(name).how == "asked"
    }
    found = []
    for name, (sm, keys, number) in files.items():
        gpu = find_gpu(keys[0]).name if keys else ANY_CARD[sm]
        version = profiles.load_profile(name).version
        found.append(("version", gpu, version, [other for other, about in files.items() if about[2] == number]))
        card = [other for other, about in files.items() if about[:2] == (sm, keys)]
        if any(about[0] == sm and other not in card for other, about in files.items()):
            found.append(("card", gpu, version, card))
    return found


def trials(cases: Iterable[tuple[str, str, str, tuple[int, int]]] = CASES) -> Iterator[Trial]:
    cases = list(cases)
    for left_out, gpu, version, names in recorded():
        for model, op, dtype, (height, width) in cases:
            asked = {"dtype": dtype, "gpu": gpu, "cudnn_version": version}
            try:
                truth = predict(model, op, height, width, **asked)
                cold = predict(model, op, height, width, protocol="cold", **asked)
            except ValueError:  # no engine for it
                continue
            if truth.substitutions:  # this profile has no answer of its own
                continue
            with without(names):
                p = predict(model, op, height, width, **asked)
                bounds = *p.band, p.upper
            yield Trial(left_out, gpu, version, model, op, dtype, height, width, truth.reserved, cold.reserved, *bounds)


def summary(found: Iterable[Trial]) -> list[tuple[str, ...]]:
    """Make the table: what was left out, operation, dtype, answers, the share within `upper`, the median excess of
    `upper` over the reserved bytes, and the share within the band. The last line covers all answers."""
    found = list(found)
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for one in found:
        groups.setdefault((one.left_out, one.op, one.dtype), []).append(one)
    lines = []
    for (left_out, op, dtype), group in [*sorted(groups.items()), (("all", "", ""), found)]:
        held = sum(max(one.reserved, one.cold) <= one.upper for one in group)
        within = sum(one.least <= one.reserved <= one.most for one in group)
        excess = median(one.upper / one.reserved - 1 for one in group)
        share = f"{held / len(group):.2%}"
        lines.append((left_out, op, dtype, str(len(group)), share, f"{excess:+.1%}", f"{within / len(group):.2%}"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv")
    options = parser.parse_args()
    found = list(trials())
    lines = [("left out", "op", "dtype", "answers", "upper holds", "median excess", "in the band"), *summary(found)]
    for line in lines:
        print("".join(f"{cell:<15}" for cell in line).rstrip())
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Trial._fields)
            writer.writerows(found)


if __name__ == "__main__":
    main()
