"""Predictions are the same to the byte where addresses have 32 bits, as WebAssembly's have."""

import glob
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import tools

import vaemem

pytestmark = pytest.mark.python

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# What walks and plays, which needs no Python; and what it needs of the core: memory, errors, architectures.
PREDICT = sorted(glob.glob("csrc/predict/**/*.c", root_dir=ROOT, recursive=True))
CORE = ["csrc/arch.c", "csrc/mem.c", "kernels/status.c", "kernels/host.c", "kernels/filters.c", "kernels/os.c"]
GCC = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"]
# WebAssembly's doubles are SSE's, not x87's, whose sums have more digits.
IN_32_BITS = ["-m32", "-msse2", "-mfpmath=sse"]
# Undefined behaviour ends the program. It needs no library of the sanitizer's, which may lack in 32 bits.
TRAPS = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]


def gcc(*flags, cwd=ROOT):
    built = subprocess.run([*GCC, *flags], cwd=cwd, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def build(program, source, objects, *flags):
    gcc(*flags, "-O1", "-o", program, source, *sorted(objects.iterdir()), "-lm", "-lpthread")


def objects_in(folder, *flags):
    """Compiles what the programs share, once for these flags."""
    gcc(*flags, "-O1", "-c", *(os.path.join(ROOT, path) for path in [*PREDICT, *CORE]), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return objects_in(tmp_path_factory.mktemp("narrow"), *IN_32_BITS, *TRAPS)


def run(*command):
    """The lines that a program prints."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stdout[-1000:]}{ran.stderr}"
    return ran.stdout.splitlines()


def walk(program, objects, *flags):
    """The lines of walk_32bit.c, built with these flags."""
    build(program, "tests/walk_32bit.c", objects, *flags)
    return run(program)


@pytest.mark.thorough
@tools.wants_32_bits
def test_walks_in_32_bits(narrow, tmp_path, tmp_path_factory):
    """Steps, workspaces, addresses and peaks of every VAE, up to 8192 x 8192 pixels, and of a recorded module."""
    with ThreadPoolExecutor(2) as pool:
        in_32 = pool.submit(walk, tmp_path / "narrow", narrow, *IN_32_BITS, *TRAPS)
        wide = pool.submit(walk, tmp_path / "wide", objects_in(tmp_path_factory.mktemp("wide"), "-m64"), "-m64")
    pairs = list(zip(in_32.result(), wide.result(), strict=True))
    assert [pair for pair in pairs if pair[0] != pair[1]][:3] == []
    walked = [line for line in wide.result() if " steps, " in line]
    played = [line for line in wide.result() if line.startswith("  allocated")]
    assert len(walked) > 900 and sum("8192 x 8192" in line for line in walked) > 150
    assert len(played) == 4 * len(walked) and sum(int(line.split()[1].strip(",")) >> 32 > 0 for line in played) > 900


def record_calls(calls, returns):
    """Asks 300 frozen questions in a process of its own, and writes which calls their answers make of the core."""
    paths = [os.path.dirname(os.path.dirname(vaemem.__file__)), *sys.path]
    done = subprocess.run(
        [sys.executable, "tests/core_calls.py", calls, returns], cwd=ROOT, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [path.read_text("utf-8").splitlines() for path in (calls, returns)]


@pytest.mark.thorough
@tools.wants_32_bits
@pytest.mark.skipif("VAEMEM_SANITIZED" in os.environ, reason="300 answers take minutes")
def test_answers_in_32_bits(narrow, tmp_path):
    """300 frozen answers: in 32 bits and without Python every call of the core returns what it returns here, and band,
    upper bound and verdict are the same."""
    calls, returns = tmp_path / "calls", tmp_path / "returns"
    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(record_calls, calls, returns)
        build(tmp_path / "answers", "tests/answers_32bit.c", narrow, *IN_32_BITS, *TRAPS)
    called, wide = recorded.result()
    triples = list(zip(called, run(tmp_path / "answers", calls), wide, strict=True))
    assert [triple for triple in triples if triple[1] != triple[2]][:3] == []
    check_spread(called, wide)


def check_spread(called, wide):
    """Of every kind there are many: A1111's calls where memory is short, refusals, verdicts, more than 4 GiB."""
    counts = Counter(line.partition("\t")[0] for line in called)
    rare = {name: count for name, count in counts.items() if count < 15}
    assert counts["question"] == 300 and len(counts) == 29 and rare == {"catalogue": 1}
    a1111 = [line for line in called if line.startswith("vae\t") and "\ta1111\t" in line]
    assert len(a1111) > 30 and sum(not line.endswith(" 0") for line in a1111) > 30  # their free bytes
    assert sum(" full " in line for line in wide) > 30
    verdicts = Counter(re.findall("^verdict: (fits|tight|does not fit), ", "\n".join(wide), re.MULTILINE))
    assert len(verdicts) == 3 and min(verdicts.values()) > 10
    large = [line for line in wide if any(int(number) >> 32 for number in re.findall(r" (\d+)(?= |$)", line))]
    kinds = Counter(line.partition(":")[0] for line in large)
    assert min(kinds[name] for name in ("answers", "call", "peak", "takes")) > 30


@tools.wants_32_bits
def test_no_predicted_size_is_cut_short():
    """No number of 64 bits becomes a size_t of 32 without a cast."""
    gcc(*IN_32_BITS, "-Wconversion", "-Wno-sign-conversion", "-fsyntax-only", *PREDICT)


def test_one_family_of_sums_and_products():
    """The walks' sums and products have 64 bits (sizes.h); those of kernels.h are for this machine's memory."""
    for path in [*PREDICT, "csrc/predict/vae/walk.h"]:
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
        assert not any(name in text for name in ("VM_PRODUCT(", "vm_sum(", "vm_round_up(", "SIZE_MAX"))
