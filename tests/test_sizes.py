"""Sizes that do not fit are refused wherever their sum stops fitting, and no plan is smaller than what it holds."""

import glob
import os
import random
import subprocess

import pytest
import tools
from errors import refused

import vaemem
from vaemem._common import MOST_SIDE

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

SMALL = {
    "latent_channels": 4,
    "block_out_channels": [32, 32, 32, 32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def test_huge_sizes_are_refused_or_right():
    """An estimate is at least its largest tensor and its output, or an error says that it cannot be."""
    vae = vaemem.VAE.random("sdxl", parts="decoder", config=SMALL)
    draw = random.Random(0)
    planned = too_large = 0
    for _ in range(2000):
        height, width = (8 * draw.randint(1, 1 << draw.randint(0, 17)) for _ in range(2))
        batch = draw.randint(1, 1 << draw.randint(0, 62))
        vae.threads = draw.choice((1, 2, 64, 1024))
        try:
            run = vae.estimate("decode", height, width, batch)
        except vaemem.ArgumentOverflowError as error:
            assert error.argument == "batch"
            too_large += 1
            continue
        planned += 1
        largest = 32 * height * width * 4
        assert run.output_bytes == 3 * 4 * height * width * batch
        assert run.reserved_bytes >= run.peak_bytes and run.reserved_bytes >= largest + run.output_bytes
        assert max(n for _, n in run.timeline) == run.peak_bytes >= largest + run.output_bytes
        assert all(0 <= n <= run.peak_bytes for _, n in run.timeline)
    assert planned > 200 and too_large > 200


@pytest.mark.parametrize("side", [MOST_SIDE + 8, 1 << 35, 1 << 62])
@pytest.mark.parametrize("name", ["height", "width"])
def test_a_side_has_a_largest_value(name, side):
    """At every door of the engine. Beyond it, products of rows would pass 64 bits."""
    sides, vae = {"height": 64, "width": 64, name: side}, vaemem.VAE.random("sdxl", parts="decoder", config=SMALL)
    for tiling in (None, vaemem.Tiling(64)):
        with refused(name, wanted=f"at most {MOST_SIDE}", got=side):
            vae.estimate("decode", **sides, tiling=tiling)
    size = (sides["height"], sides["width"])
    for call in (
        lambda: vae.smallest("decode", *size),
        lambda: vaemem.tradeoff(vae, "decode", *size),
        lambda: vaemem.estimate_sweep(vae, "decode", [size]),
        lambda: vae.largest_batch("decode", *size, memory_limit="1 GiB"),
    ):
        with refused(name, wanted=f"at most {MOST_SIDE}", got=side):
            call()
    with refused(name, got=side):
        vaemem.predict("sdxl", "decode", *size, gpu="T4")


@pytest.mark.parametrize("batch", [1 << 53, 1 << 62])
def test_a_batch_that_no_memory_holds_is_refused(batch):
    """Also by searches for the least limit."""
    vae = vaemem.VAE.random("sdxl", parts="decoder", config=SMALL)
    for call in (
        lambda: vae.estimate("decode", 64, 64, batch),
        lambda: vae.smallest("decode", 64, 64, batch),
        lambda: vae.tradeoff("decode", 64, 64, batch),
        lambda: vae.largest("decode", "1 GiB", batch=batch),
        lambda: vae.estimate("decode", 1 << 20, 1 << 20, batch, tiling=vaemem.Tiling(1 << 17)),
    ):
        with refused("batch", kind=vaemem.ArgumentOverflowError):
            call()
    for pipeline, how in (("sdxl", {}), ("flux", {"offload": "model"}), ("sdxl", {"runtime": "comfyui"})):
        with refused("batch", wanted="at most 65536"):
            vaemem.predict_pipeline(pipeline, 1024, 1024, batch=batch, gpu="T4", **how)


def test_the_largest_sides_have_plans():
    vae = vaemem.VAE.random("sdxl", parts="decoder", config=SMALL)
    for size in ((MOST_SIDE, MOST_SIDE), (MOST_SIDE, 8), (8, MOST_SIDE)):
        assert vae.estimate("decode", *size).output_bytes == 3 * 4 * size[0] * size[1]


def run_with_core(name, program, *flags):
    """A C program of this folder, built together with the core, ends well."""
    if not tools.runs("gcc"):
        pytest.skip("there is no gcc")
    sources = [
        f for folder in ("csrc", "csrc/engine", "kernels", "kernels/ref") for f in glob.glob(f"{ROOT}/{folder}/*.c")
    ]
    flags = [*flags, "-std=gnu11", "-O1", "-o", program, f"{ROOT}/tests/{name}", *sources, "-lm", "-lpthread"]
    built = subprocess.run(["gcc", *flags], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@tools.wants_32_bits
def test_sizes_in_32_bits(tmp_path):
    """The core built for 32-bit addresses, where a plan for many threads passes 4 GiB at ordinary sizes."""
    run_with_core("plan_sizes.c", tmp_path / "plan_sizes", "-m32")


@pytest.mark.thorough
def test_schedules_of_tall_images(tmp_path):
    """A plan walks the schedule of a chain only until it repeats itself: what it skips are repeats, and walked to its
    end the schedule asks for no byte more."""
    run_with_core("plan_schedule.c", tmp_path / "plan_schedule")
