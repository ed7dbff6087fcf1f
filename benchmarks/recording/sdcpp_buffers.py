"""The bytes that stable-diffusion.cpp itself reserves for graphs of several sizes, for tests to compare ours with.

Runs sdcpp_buffers (sdcpp_buffers.cpp says how to build it) and writes results/sdcpp_buffers.csv, a row a graph:

    python benchmarks/recording/sdcpp_buffers.py --program ./sdcpp_buffers --commit SDCPP_COMMIT --ggml GGML_COMMIT
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = "component model backend height width tokens weight_type conv_direct flash conv_scale buffer weights".split()
SIZES = ((512, 512), (1024, 1024), (232, 104), (768, 1344))  # pixels
LARGE = ((1536, 1536), (2048, 2048), (2688, 2688), (4096, 2304))


def case(component: str, backend: str, height: int = 0, width: int = 0, tokens: int = 0, **more: Any) -> dict[str, Any]:
    usual = {"model": "", "weight_type": "f16", "conv_direct": False, "flash": False, "conv_scale": False}
    names = {"component": component, "backend": backend, "height": height, "width": width, "tokens": tokens}
    return usual | names | more


def cases() -> Iterator[dict[str, Any]]:
    for component in ("vae-decoder", "vae-encoder"):
        for model in ("flux", "sdxl"):
            for size in SIZES:
                for direct in (False, True):
                    yield case(component, "cuda", *size, model=model, conv_direct=direct)
                    yield case(component, "cpu", *size, model=model, conv_direct=direct, flash=True)
        for size in LARGE:  # where attention takes most
            for direct in (False, True):
                yield case(component, "cuda", *size, model="flux", conv_direct=direct)
        for side in (256, 328):  # tiles of 32 and 41 latent pixels
            yield case(component, "cuda", side, side, model="flux", conv_direct=True)
        yield case(component, "cuda", 1024, 1024, model="sdxl", conv_scale=True)
        yield case(component, "cpu", 1024, 1024, model="flux")
    for size in (*SIZES, (520, 328)):
        for flash in (False, True):
            yield case("zimage", "cuda", *size, 20, weight_type="q8_0", flash=flash)
            yield case("zimage", "cpu", *size, 77, weight_type="bf16", flash=flash)
            for component in ("flux-dev", "flux-schnell"):
                yield case(component, "cuda", *size, 256, weight_type="q4_0", flash=flash)
    yield case("flux-dev", "cpu", 1024, 1024, 512, weight_type="q8_0")
    for component in ("unet-sd15", "unet-sdxl"):
        for size in ((512, 512), (1024, 1024), (768, 1344)):
            for flash in (False, True):
                yield case(component, "cuda", *size, 77, flash=flash)
                yield case(component, "cpu", *size, 154, weight_type="q8_0", conv_direct=True, flash=flash)
    for tokens in (10, 20, 77, 512):
        for weight_type in ("q8_0", "f16", "bf16", "q4_K"):
            yield case("qwen3-4b", "cuda", tokens=tokens, weight_type=weight_type)
        yield case("qwen3-4b", "cpu", tokens=tokens, weight_type="q4_0")
    for backend in ("cuda", "cpu"):
        for weight_type in ("f16", "q8_0"):
            yield case("clip-l", backend, tokens=77, weight_type=weight_type)
            yield case("clip-g", backend, tokens=77, weight_type=weight_type)
            yield case("t5-xxl", backend, tokens=256, weight_type=weight_type)
            yield case("t5-xxl", backend, tokens=512, weight_type=weight_type)


def measured(program: str, row: dict[str, Any]) -> dict[str, Any]:
    words = [row["component"], row["model"] or "-", row["backend"]]
    words += [row["height"] // 8, row["width"] // 8, row["tokens"]]
    options = ("conv_direct", "flash", "conv_scale")
    words += [row["weight_type"], *(name.removeprefix("conv_") for name in options if row[name])]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True)
    buffer, weights = map(int, done.stdout.split()[-1].split(","))
    flags = {name: int(row[name]) for name in options}
    return row | flags | {"buffer": buffer, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--commit", required=True, help="of stable-diffusion.cpp")
    parser.add_argument("--ggml", required=True, help="ggml's")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parents[1] / "results" / "sdcpp_buffers.csv")
    arguments = parser.parse_args()
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "commit", "ggml"], lineterminator="\n")
        writer.writeheader()
        for row in cases():
            commits = {"commit": arguments.commit[:7], "ggml": arguments.ggml[:7]}
            writer.writerow(measured(arguments.program, row) | commits)


if __name__ == "__main__":
    main()
