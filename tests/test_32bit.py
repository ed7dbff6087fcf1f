"""Predictions are the same to the byte where addresses have 32 bits, as WebAssembly's have."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import tools

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# What walks and plays, which needs no Python; and what it needs of the core: memory, errors, architectures.
PREDICT = [
    "catalogue.c",
    "judge.c",
    "lookup.c",
    "process.c",
    "process_again.c",
    "process_play.c",
    "process_replay.c",
    "program.c",
    "torch_alloc.c",
    "torch_attention.c",
    "torch_blocks.c",
    "torch_coders.c",
    "torch_expandable.c",
    "torch_frames.c",
    "torch_halves.c",
    "torch_names.c",
    "torch_sdpa.c",
    "torch_segments.c",
    "torch_snapshot.c",
    "torch_tiled_vae.c",
    "torch_tiny.c",
    "torch_trace.c",
    "torch_vae.c",
    "torch_weights.c",
    "workspace.c",
]
PREDICT = [os.path.join("csrc/predict", name) for name in PREDICT]
CORE = ["csrc/arch.c", "csrc/mem.c", "csrc/status.c", "kernels/host.c", "kernels/filters.c", "kernels/os.c"]
GCC = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"]
# WebAssembly's doubles are SSE's, not x87's, whose sums have more digits.
IN_32_BITS = ["-m32", "-msse2", "-mfpmath=sse"]


def gcc(*flags):
    built = subprocess.run([*GCC, *flags], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def walk(program, *flags):
    """The lines of walk_32bit.c, built with these flags."""
    gcc(*flags, "-O1", "-o", program, "tests/walk_32bit.c", *PREDICT, *CORE, "-lm", "-lpthread")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr
    return ran.stdout.splitlines()


@tools.wants_32_bits
def test_walks_in_32_bits(tmp_path):
    """Steps, workspaces, addresses and peaks of every VAE, up to 8192 x 8192 pixels, and of a recorded module."""
    with ThreadPoolExecutor(2) as pool:
        narrow = pool.submit(walk, tmp_path / "narrow", *IN_32_BITS)
        wide = pool.submit(walk, tmp_path / "wide", "-m64")
    pairs = list(zip(narrow.result(), wide.result(), strict=True))
    assert [pair for pair in pairs if pair[0] != pair[1]][:3] == []
    walked = [line for line in wide.result() if " steps, " in line]
    played = [line for line in wide.result() if line.startswith("  allocated")]
    assert len(walked) > 900 and sum("8192 x 8192" in line for line in walked) > 150
    assert len(played) == 4 * len(walked) and sum(int(line.split()[1].strip(",")) >> 32 > 0 for line in played) > 900


@tools.wants_32_bits
def test_no_predicted_size_is_cut_short():
    """No number of 64 bits becomes a size_t of 32 without a cast."""
    gcc(*IN_32_BITS, "-Wconversion", "-Wno-sign-conversion", "-fsyntax-only", *PREDICT)


def test_one_family_of_sums_and_products():
    """The walks' sums and products have 64 bits (sizes.h); those of kernels.h are for this machine's memory."""
    for path in [*PREDICT, "csrc/predict/torch_walk.h"]:
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
        assert not any(name in text for name in ("VM_PRODUCT(", "vm_sum(", "vm_round_up(", "SIZE_MAX"))
