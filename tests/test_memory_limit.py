"""Runs under a memory limit: the same bits, the limit kept, what it costs said beforehand."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import threading
import tracemalloc
from types import SimpleNamespace
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from engine import config, images, latents, run_core, small_vae
from errors import complains, refused

import vaemem
from vaemem import _core
from vaemem.__main__ import main
from vaemem.engine.limits import (
    Plans,
    available_memory,
    find_largest,
    linux_memory,
    needed_bytes,
    parse_size,
    resolve,
)

pytestmark = pytest.mark.core

CASES = int(os.environ.get("VAEMEM_LIMIT_CASES", "150"))
MIB, GIB = 2**20, 2**30


def tiny_vae(dtype="float32", **other) -> vaemem.VAE:
    """One that is planned for in no time, whose smallest plan at 128x128 streams."""
    arch = config("sd") | {"block_out_channels": (16, 16, 16), "layers_per_block": 1} | other
    levels = len(arch["block_out_channels"])
    arch |= {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    vae = vaemem.VAE.random(config=arch, dtype=dtype)
    vae.threads = 2
    return vae


@pytest.fixture(scope="module")
def shared() -> vaemem.VAE:
    return tiny_vae()


@pytest.fixture
def vae(shared):
    yield shared
    shared.memory_limit = shared.cache_limit = None
    shared.on_out_of_memory, shared.threads = "retry", 2
    shared.trim()


# ---- inputs of any type and strides ----


def unaligned(x):
    data = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    data[...] = x
    return data


LAYOUTS = {
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "backwards": lambda x: np.ascontiguousarray(x[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1],
    "a part": lambda x: np.repeat(np.repeat(x, 2, axis=3), 3, axis=0)[1::3, ..., 1::2],
    "the same row again": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    "unaligned": unaligned,
    "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
}
TYPES = ["f2", "f4", "f8", "g", "bfloat16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_an_input_is_read_where_it_lies(vae, op, layout):
    """Every type at these strides gives the bits of a packed float32 copy."""
    given = images(16, 32, batch=2) if op == "encode" else latents(vae, 4, 8, batch=2)
    run = (lambda x: vae.encode(x).mean) if op == "encode" else vae.decode
    for name in TYPES:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        if layout == "swapped" and name == "bfloat16":
            continue  # NumPy has none
        most = 2 if op == "encode" and dtype.kind == "u" and name != "u1" else 100  # more would be no image in [-1, 1]
        x = (given * (1 if dtype.kind in "fV" else 20)).clip(0 if dtype.kind == "u" else -100, most).astype(dtype)
        if op == "encode" and name == "u1":
            x = x.transpose(0, 2, 3, 1)  # bytes, whose channels lie side by side
        x = LAYOUTS[layout](x) if layout else x
        packed = np.ascontiguousarray(x) if x.dtype == np.uint8 and op == "encode" else x.astype(np.float32, order="C")
        assert np.array_equal(run(x), run(packed)), name


def test_no_copy_of_the_input_stands_beside_the_limit(vae):
    x = images(256, 256).astype(np.float64)[..., ::-1]
    vae.memory_limit = vae.smallest("encode", 256, 256)
    tracemalloc.start()
    try:
        vae.encode(x)
        assert tracemalloc.get_traced_memory()[1] < x.nbytes / 8  # NumPy tells it of its arrays
    finally:
        tracemalloc.stop()


def test_numbers_that_only_numpy_can_read(vae):
    z = latents(vae, 8, 8).astype(ml_dtypes.float8_e5m2)
    assert np.array_equal(vae.decode(z), vae.decode(z.astype(np.float32)))


# ---- sizes as people write them ----


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (1, 1), (np.int64(4096), 4096), ("1", 1), ("512 MiB", 512 * MIB), ("2 GB", 2 * 10**9), ("2gib", 2 * GIB),
        (" 1.5 KiB ", 1536), ("0.1 kB", 100), ("7B", 7), ("1 TiB", 2**40), ("412.4 MiB", int(412.4 * MIB)),
    ],
)  # fmt: skip
def test_sizes(given, size):
    assert parse_size("memory_limit", given) == size


BAD = [
    0, -1, True, 1.5, float("nan"), "", "5 apples", "five", "-1 MiB", "0 GB", "1e9", "1 M", "nan", "infinity",
    "\u0661 MiB", b"512 MiB", [512], 2**63, 10**5000, "9" * 30, "99999999999999999999 TiB", object(), np.float32(2),
]  # fmt: skip


@pytest.fixture(params=["cpu", "cuda"])
def anywhere(request, vae):
    """On the CPU and on a GPU, or the emulator."""
    if request.param == "cpu":
        return vae
    request.getfixturevalue("cuda")
    return small_vae("odd", device="cuda")


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_bad_limits_get_one_sentence(anywhere, bad):
    vae = anywhere
    for call in (
        lambda: vae.decode(latents(vae, 2, 2), memory_limit=bad),
        lambda: vae.encode(images(8, 8), memory_limit=bad),
        lambda: vae.estimate("decode", 8, 8, memory_limit=bad),
        lambda: vae.largest("decode", bad),
    ):
        with refused("memory_limit"):
            call()
    vae.memory_limit = bad
    with refused("memory_limit"):
        vae.decode(latents(vae, 2, 2))
    vae.memory_limit, vae.cache_limit = None, bad
    if bad not in (0, "0 GB"):  # nothing stays
        with refused("cache_limit"):
            vae.decode(latents(vae, 2, 2))


# ---- "auto" ----


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="other systems are not asked")
def test_this_system_says_what_is_free():
    assert 1 << 20 < available_memory() < 1 << 50


def test_what_the_system_and_its_cgroups_leave(tmp_path):
    meminfo, cgroup, root = tmp_path / "proc/meminfo", tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    cgroup.parent.mkdir(parents=True)
    assert linux_memory(tmp_path) is None
    meminfo.write_text("MemTotal:       16000000 kB\nMemFree: 5 kB\nMemAvailable:    8000000 kB\n")
    assert linux_memory(tmp_path) == 8000000 * 1024
    cgroup.write_text("0::/user.slice/job\n")
    assert linux_memory(tmp_path) == 8000000 * 1024, "no such folder"
    write(root / "user.slice/job", memory__max="max\n", memory__high="max\n", memory__current=f"{GIB}\n")
    assert linux_memory(tmp_path) == 8000000 * 1024
    write(root / "user.slice", memory__max=f"{4 * GIB}\n", memory__current=f"{3 * GIB}\n")
    assert linux_memory(tmp_path) == GIB, "a group above it"
    write(root / "user.slice", memory__stat=f"anon 5\ninactive_file {MIB}\nactive_file 7\n")
    assert linux_memory(tmp_path) == GIB + MIB, "cache is given back first"
    write(root / "user.slice/job", memory__high=f"{GIB + 5}\n")
    assert linux_memory(tmp_path) == 5
    write(root / "user.slice/job", memory__high="1\n")
    assert linux_memory(tmp_path) == 0


def test_what_an_older_cgroup_leaves(tmp_path):
    cgroup, root = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    cgroup.parent.mkdir(parents=True)
    cgroup.write_text("12:cpu,cpuacct:/docker/x\n5:memory:/docker/x\n0::/\n")
    write(root / "memory", memory__limit_in_bytes=f"{GIB}\n", memory__usage_in_bytes=f"{MIB}\n")
    assert linux_memory(tmp_path) == GIB - MIB, "the host's path is not in the container"
    write(root / "memory", memory__stat=f"inactive_file 5\ntotal_inactive_file {MIB}\n")
    assert linux_memory(tmp_path) == GIB
    write(root / "memory/docker/x", memory__limit_in_bytes="7\n", memory__usage_in_bytes="2\n")
    assert linux_memory(tmp_path) == 5
    cgroup.write_text("nonsense\n\n:::\n5:memory:/../../etc\n")
    linux_memory(tmp_path)  # no error, whatever it says


def test_auto_leaves_something_for_others(vae, monkeypatch):
    free = 800 * MIB
    monkeypatch.setattr("vaemem.engine.limits.available_memory", lambda: free)
    assert resolve("auto", 5, None) == 5 + 700 * MIB
    free = 100 * GIB
    assert resolve(" Auto ", 5, None) == 5 + 99 * GIB
    gpu = SimpleNamespace(room=lambda: 70 * MIB)
    assert resolve("auto", 5, gpu) == 5 + 70 * MIB, "what is free on the GPU"
    free = None
    with refused("memory_limit"):
        vae.estimate("decode", 8, 8, memory_limit="auto")


def test_auto_asks_at_each_run_and_counts_what_the_vae_holds(vae, monkeypatch):
    free, asked = 2**40, []

    def look():
        asked.append(free)
        return free

    monkeypatch.setattr("vaemem.engine.limits.available_memory", look)
    vae.memory_limit = "auto"
    z = latents(vae, 32, 32)
    want = vae.decode(z)
    whole = vae.last_run
    # Nothing more is free, but the arena of the last run is there already, and an output has a place.
    free = 2 * whole.output_bytes
    assert np.array_equal(vae.decode(z), want) and vae.last_run.peak_bytes == whole.peak_bytes
    vae.trim()
    with refused("memory_limit"):
        vae.decode(z)
    assert len(asked) == 3


# ---- weights that are transformed anew ----


# AMX and plain C multiply halves in pairs, and have no weights to transform.
@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype,backend", [
    (dtype, name) for dtype in ("float32", "bfloat16", "float16") for name, usable in _core.backends(dtype, "highest")
    if usable and name != "amx" and (name != "ref" or dtype == "float32")
])  # fmt: skip
@pytest.mark.parametrize("op", ["encode", "decode"])
def test_weights_are_made_anew_where_a_limit_is_tight(op, dtype, backend):
    """No pass leaves its plan then, and the bits are those of weights that are kept."""
    vae = tiny_vae(dtype, block_out_channels=(48, 160, 160))
    how = {"threads": 2, "backend": backend}
    data = latents(vae, 32, 40) if op == "decode" else images(128, 160)
    want, _ = run_core(vae._core, op, data, **how)
    whole, *limited = Plans(vae._core, {"op": op, "height": 128, "width": 160, **how}).curve()
    once, *flops = (sum(step["flops"] for step in record["steps"]) for record in (whole, *limited))
    anew = [record for record, all in zip(limited, flops, strict=True) if record["work"] > 1.01 * all / once]
    assert anew and needed_bytes(anew[-1]) - vae.reserved_bytes < 0.8 * (needed_bytes(whole) - vae.reserved_bytes)
    got, ran = run_core(vae._core, op, data, memory_limit=needed_bytes(anew[-1]), check=True, **how)
    assert ran["work"] == anew[-1]["work"] and np.array_equal(got, want)


def test_the_bar_of_the_smallest_plans():
    """SDXL's, in T = 128 * height * width * bytes of a number, beside the weights. On AMX tiles are twice as high;
    by floats a decode takes less than by pairs, and an encode more."""
    chosen = next(name for name, usable in _core.backends("bfloat16", "highest") if usable)
    decode, encode = {"amx": (0.55, 0.5), "avx512bf16": (0.5, 0.5)}.get(chosen, (0.4, 0.55))
    for dtype, op, size, bar in (
        ("float32", "decode", 1024, 0.35), ("float32", "encode", 1024, 0.3), ("float32", "decode", 2048, 0.3),
        ("bfloat16", "decode", 1024, decode), ("bfloat16", "encode", 512, encode),
    ):  # fmt: skip
        model = _core.Model(_core.models()["sdxl"], dtype=dtype)
        smallest, record = Plans(model, {"op": op, "height": size, "width": size, "threads": 2}).smallest()
        assert smallest - record["peak"]["weights"] <= bar * 128 * size * size * (4 if dtype == "float32" else 2)


# ---- limits below the smallest plan ----


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_smallest_is_the_least_that_will_do(vae, op):
    smallest = vae.smallest(op, 128, 160)
    assert vae.estimate(op, 128, 160).peak_bytes >= smallest
    run = vae.estimate(op, 128, 160, memory_limit=smallest)
    assert run.peak_bytes <= smallest and run.work > 1
    with refused("memory_limit") as caught:
        vae.estimate(op, 128, 160, memory_limit=smallest - 1)
    assert caught.value.smallest == smallest
    data = latents(vae, 32, 40) if op == "decode" else images(128, 160)
    with refused("memory_limit") as caught:
        getattr(vae, op)(data, memory_limit=smallest - 1)
    assert caught.value.smallest == smallest
    getattr(vae, op)(data, memory_limit=smallest)
    assert vae.last_run.peak_bytes == run.peak_bytes


def taken_by(run):
    return max(run.peak_bytes, run.reserved_bytes)


def test_the_sentence_below_the_smallest_plan(vae):
    smallest = vae.smallest("decode", 256, 192, batch=2)
    with pytest.raises(ValueError) as caught:
        vae.estimate("decode", 256, 192, batch=2, memory_limit=smallest - 1)
    text, error = str(caught.value), caught.value
    start, end = "memory_limit: expected at least ", " MiB for a decode of 256x192 in a batch of 2 ("
    assert text.startswith(start) and end in text and "times the work of an unlimited run), got " in text
    named = text.removeprefix(start).split(end)[0] + " MiB"
    assert error.smallest == smallest <= parse_size("", named) <= smallest + MIB / 10, "the sentence's limit will do"
    size, advice = text.rsplit(", which would do for ")[1].split("; ")
    height, width = map(int, size.split("x"))
    assert vae.estimate("decode", height, width, batch=2, memory_limit=smallest - 1).peak_bytes < smallest
    pattern = r"tiling=Tiling\(sample_size=(\d+)\) without a limit takes ([\d.]+) MiB, but is not exact"
    side, said = re.fullmatch(pattern, advice).groups()
    tiled = taken_by(vae.estimate("decode", 256, 192, batch=2, tiling=vaemem.Tiling(int(side))))
    assert tiled / MIB == pytest.approx(float(said), abs=0.01) and tiled < smallest
    with refused("memory_limit", names=["100"]):
        vae.encode(images(64, 64), memory_limit=100)
    with refused("memory_limit"):
        vae.estimate("encode", 64, 64, memory_limit=vae.smallest("encode", 4, 4) - 1)


def test_largest(vae):
    limit = vae.smallest("decode", 256, 256)
    for aspect in (1.0, 2.0, 0.4):
        height, width = vae.largest("decode", limit, aspect)
        assert height % 4 == width % 4 == 0 and abs(width - aspect * height) <= 4 * max(1, aspect)
        assert vae.estimate("decode", height, width, memory_limit=limit).peak_bytes <= limit
    side = vae.largest("decode", limit)[0]
    for more in range(4, 20, 4):
        with refused("memory_limit"):
            vae.estimate("decode", side + more, side + more, memory_limit=limit)
    vae.memory_limit = limit
    assert vae.largest("decode") == (side, side)
    vae.memory_limit = None
    with refused("memory_limit"):
        vae.largest("decode")
    with refused("memory_limit"):
        vae.largest("decode", 100)
    for bad in (0, -1, float("nan"), float("inf"), "1", True, None, 1000):
        with refused("aspect"):
            vae.largest("decode", limit, bad)


def test_find_largest_goes_on_while_a_larger_one_fits():
    some, calls = {1, 2, 4, 7, 11}, []

    def fits(n):
        calls.append(n)
        return n in some

    def find(more, **how):
        return find_largest(fits, 100, around=lambda n: range(n, n + more + 1), **how)

    assert [find(more) for more in range(5)] == [4, 4, 4, 7, 11]
    calls.clear()
    assert find(4, every=True) == 4 and len(calls) == len(set(calls))
    some.clear()
    assert find(4) == 0


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_largest_batch(vae, op):
    """Each image adds its result to the smallest plan, and nothing more."""
    smallest = [vae.smallest(op, 64, 48, n) for n in range(1, 8)]
    image = vae.estimate(op, 64, 48).output_bytes
    assert smallest == [smallest[0] + n * image for n in range(7)]
    for limit in (smallest[0], smallest[4] - 1, smallest[4]):
        assert vae.largest_batch(op, 64, 48, limit) == sum(size <= limit for size in smallest)
    most = vae.largest_batch(op, 64, 48, 64 * MIB)
    assert vae.smallest(op, 64, 48, most) <= 64 * MIB < vae.smallest(op, 64, 48, most + 1)
    assert vae.largest_batch(op, 64, 48, 2**62) == 2**16
    for limit in (smallest[0] - 1, None):
        with refused("memory_limit"):
            vae.largest_batch(op, 64, 48, limit)


def test_where_there_is_one_plan_of_a_size():
    class Core:
        arch: ClassVar = {"block_out_channels": (16, 16, 16)}

        def plan(self, height, width, memory_limit, **other):
            size = 1000 + height * width
            if 0 < memory_limit < size:
                error = ValueError("memory_limit: too low")
                error.smallest = size
                raise error
            peak = {"weights": 1000, "workspace": 0, "output": height * width}
            return {"peak": peak, "reserved": size, "work": 1.0}

    plans = Plans(Core(), dict(op="decode", height=8, width=8))
    assert needed_bytes(plans.within(0)) == needed_bytes(plans.within(1064)) == plans.smallest()[0] == 1064
    assert len(plans.curve()) == 1 and plans.smaller(plans.within(0)) is None
    assert plans.largest(1000 + 40 * 40) == plans.largest(1000 + 43 * 43) == (40, 40)
    assert plans.largest(2**62) == (2**16, 2**16), "where no limit binds, the largest that is looked for"
    with pytest.raises(ValueError) as caught:
        plans.within(1063)
    assert caught.value.smallest == plans.refusal(1063).smallest == 1064
    assert str(plans.refusal(1063)).endswith("expected at least 1064 bytes for a decode of 8x8, got 1063 bytes, "
                                             "which would do for 4x4")  # fmt: skip


# ---- the curve ----


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_tradeoff_falls_in_memory_and_rises_in_work(vae, op):
    runs = vae.tradeoff(op, 192, 128)
    assert len(runs) > 1 and runs[0].work == 1
    for fast, small in itertools.pairwise(runs):
        assert small.peak_bytes < fast.peak_bytes and small.work > fast.work
        assert sum(small.flops) >= sum(fast.flops), "weights that each task transforms count as work, not as FLOPs"
    assert runs[-1].peak_bytes <= vae.smallest(op, 192, 128) <= runs[-1].reserved_bytes
    assert {kind for _, kind in runs[-1].values} == {"stored", "streamed"}
    assert [name for name, _ in runs[0].values] == list(runs[0].passes)
    assert "times the work" in repr(runs[-1]) and "times the work" not in repr(runs[0])


def test_tradeoff_as_a_table_and_a_picture(vae, capsys):
    matplotlib = pytest.importorskip("matplotlib.figure")
    vae.decode(latents(vae, 16, 16))
    vae.last_run = vae.last_run.__class__(**{**vars(vae.last_run), "seconds": 2.0})
    table = vaemem.tradeoff(vae, "decode", 64, 64)
    runs = vae.tradeoff("decode", 64, 64)
    assert [row["work"] for row in table] == [run.work for run in runs]
    assert [row["streamed"] for row in table] == [sum(kind == "streamed" for _, kind in r.values) for r in runs]
    assert [row["allocated_bytes"] + row["weights_bytes"] for row in table] == [run.peak_bytes for run in runs]
    for row, run in zip(table, runs, strict=True):
        assert row["seconds"] == pytest.approx(2.0 * sum(run.flops) / sum(vae.last_run.flops))
        assert vae.estimate("decode", 64, 64, memory_limit=row["limit_bytes"]) == run
        assert row["limit_bytes"] == row["weights_bytes"] + row["reserved_bytes"]
    shown = str(table).split()[-1]
    assert vae.estimate("decode", 64, 64, memory_limit=f"{shown} MiB") == runs[-1], "what is shown does as a limit"
    assert "seconds" not in repr(vaemem.tradeoff(vae, "encode", 64, 64)), "no encode was measured"
    figure = vaemem.plot.tradeoff(table + vaemem.tradeoff(vae, "encode", 64, 64), {"PyTorch": (2 * MIB, 1.0)})
    assert isinstance(figure, matplotlib.Figure) and len(figure.axes[0].lines) == 3
    with refused("table"):
        vaemem.plot.tradeoff(vaemem.Table())
    for message, arguments in (
        (("ops", "'dream'"), (vae, "dream", 64, 64)),
        (("dtype", "['float32', 'float16']"), ("sdxl", "decode", 64, 64, 1, ["float32", "float16"])),
        (("models", "['sdxl']"), (["sdxl"], "decode", 64, 64)),
    ):
        with refused(*message):
            vaemem.tradeoff(*arguments)


def test_sweeps_and_the_command_line(vae, capsys):
    limit = vae.smallest("decode", 128, 128)
    (row,) = vaemem.measure_sweep(vae, "decode", 128, memory_limit=limit)
    assert row["work"] > 1 and row["streamed"] > 0 and row["allocated_bytes"] + row["weights_bytes"] <= limit
    for command in ("estimate", "tradeoff"):
        assert main([command, "sd15", "decode", "64x64"]) == 0
        assert "limit MiB" in capsys.readouterr().out
    assert main(["estimate", "sd15", "decode", "64x64", "--memory-limit", "9 lives"]) == 2
    assert complains(capsys.readouterr().err, "estimate", "--memory-limit", ["'9 lives'"])


# ---- exactness ----


def random_case(draw: random.Random) -> tuple[vaemem.VAE, str, np.ndarray, int, int]:
    """A VAE, an operation with its input, and the image's size."""
    vae = tiny_vae(
        block_out_channels=tuple(draw.choice((16, 24, 32, 64)) for _ in range(draw.randint(1, 3))),
        layers_per_block=draw.randint(1, 2),
        mid_block_add_attention=draw.random() < 0.5,
        norm_num_groups=8,
    )
    factor = 2 ** (len(vae.arch["block_out_channels"]) - 1)
    h, w = (draw.randint(1, 128 // factor) for _ in "hw")
    op, batch = draw.choice(("decode", "encode")), draw.choice((1, 1, 2))
    data = latents(vae, h, w, batch) if op == "decode" else images(h * factor, w * factor, batch)
    return vae, op, data, h * factor, w * factor


def bits(result) -> np.ndarray:
    return result if isinstance(result, np.ndarray) else result.moments


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(10))
def test_the_same_bits_under_any_limit(seed):
    """VAEMEM_LIMIT_CASES=1000 draws as many."""
    draw = random.Random(seed)
    streamed = 0
    for _ in range(max(1, CASES // 10)):
        vae, op, data, height, width = random_case(draw)
        batch = len(data)
        case = f"{op} {height}x{width} batch {batch} of {vae.arch}"
        want = bits(getattr(vae, op)(data))
        whole = vae.last_run
        assert np.isfinite(want).all() and vae.estimate(op, height, width, batch).peak_bytes == whole.peak_bytes
        vae.threads = draw.choice((1, 2, 3, 8))
        limit = draw.randint(whole.peak_bytes // 2, whole.peak_bytes)
        try:
            vae._core.plan(op, height, width, batch, threads=vae.threads, memory_limit=limit)
        except ValueError:
            limit = vae.smallest(op, height, width, batch)
        estimate = vae.estimate(op, height, width, batch, memory_limit=limit)
        if fresh := draw.random() < 0.5:
            vae.trim()
        got = bits(getattr(vae, op)(data, memory_limit=limit))
        run = vae.last_run
        assert np.array_equal(got, want), f"{case}, limit {limit}"
        assert run.peak_bytes <= limit and run.reserved_bytes <= limit, case
        same = ["peak_bytes", "timeline", "work", "values", "flops", "threads", "output_bytes"]
        same += ["reserved_bytes"] if fresh else []  # or the arena of the run before may be a little larger
        assert [getattr(run, name) for name in same] == [getattr(estimate, name) for name in same], case
        streamed += run.work > 1
    assert streamed > 0


@pytest.fixture(scope="module")
def sdxl():
    """Planned for alone: its weights stay unset."""
    vae = vaemem.VAE(_core.Model(_core.models()["sdxl"]))
    vae.threads = 2
    return vae


@pytest.mark.parametrize(
    "op, size, limit, work",
    [
        ("decode", 1024, 2.1, 1.0),
        ("decode", 1024, 1.2, 1.3),
        ("decode", 1024, 0.8, 2.7),
        ("decode", 1024, 0.65, 2.7),
        ("decode", 1024, 0.55, 5.8),
        ("encode", 1024, 1.2, 1.2),
        ("encode", 1024, 0.7, 1.5),
        ("encode", 1024, 0.4, 1.8),
        ("decode", 2048, 1.1, 1.3),
        ("decode", 2048, 0.6, 2.5),
        ("decode", 2048, 0.45, 5.1),
        ("decode", 2048, 0.3, 8.0),
    ],
)
def test_what_limits_cost_sdxl(sdxl, op, size, limit, work):
    """limit: of full-size activations beside the weights; work: FLOPs at most, of those of a run without a limit."""
    weights, full = sdxl.estimate(op, size, size).weights_bytes, 128 * size * size * 4
    run = sdxl.estimate(op, size, size, memory_limit=int(weights + limit * full))
    assert run.peak_bytes - weights <= limit * full and run.work <= work


def test_the_limit_holds_for_out_and_bytes(vae):
    z = latents(vae, 32, 32)
    want = vae.decode(z, output_type="uint8")
    limit = vae.smallest("decode", 128, 128, output_type="uint8")
    out = np.empty_like(want)
    assert vae.decode(z, output_type="uint8", out=out, memory_limit=limit - want.nbytes) is out
    assert np.array_equal(out, want) and vae.last_run.peak_bytes <= limit - want.nbytes and vae.last_run.work > 1


def test_the_arena_of_a_larger_run_is_given_back_for_a_limit(vae):
    vae.decode(latents(vae, 64, 64))
    limit = vae.smallest("decode", 64, 64)
    vae.decode(latents(vae, 16, 16), memory_limit=limit)
    assert vae.last_run.reserved_bytes <= limit


def test_an_arena_that_is_within_the_limit_only_without_the_output_is_given_back(vae):
    z, limit = latents(vae, 64, 64), vae.smallest("decode", 256, 256)
    output = 3 * 256 * 256 * 4
    for side in range(24, 40):  # an output of the caller's is no part of what these runs hold
        vae.trim()
        vae.decode(latents(vae, side, side), out=np.empty((1, 3, 4 * side, 4 * side), np.float32))
        if limit - output < vae.last_run.reserved_bytes <= limit:
            break
    else:
        raise AssertionError("no such arena")
    vae.decode(z, memory_limit=limit)
    assert vae.last_run.reserved_bytes <= limit


# ---- interrupted, refused, changed meanwhile ----


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_a_run_interrupted_in_a_chain_leaves_the_next_exact(vae, part):
    z = latents(vae, 64, 64)
    want, limit = vae.decode(z), vae.smallest("decode", 256, 256)
    held = vae._core.reserved_bytes

    def stop(done, total):
        if done >= part * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vae.decode(z, memory_limit=limit, progress=stop)
    assert vae._core.reserved_bytes < held
    assert np.array_equal(vae.decode(z, memory_limit=limit), want)
    assert np.array_equal(vae.decode(z), want)


def test_every_allocation_fails_once_within_a_limit(vae):
    z = latents(vae, 32, 32)
    want, limit = vae.decode(z), vae.tradeoff("decode", 128, 128)[1].reserved_bytes
    vae.on_out_of_memory = "raise"
    for n in range(1, 100):
        vae.trim()
        held = vae.reserved_bytes
        _core.fail_alloc_at(n)
        try:
            got = vae.decode(z, memory_limit=limit)
        except MemoryError:
            assert _core.fail_alloc_at(0) == 0 and vae.reserved_bytes == held, f"allocation {n}"
            assert np.array_equal(vae.decode(z, memory_limit=limit), want)
        else:
            assert _core.fail_alloc_at(0) > 0 and np.array_equal(got, want)
            break
    assert 4 < n < 99


@pytest.mark.parametrize("limited", [False, True])
def test_memory_that_runs_out_is_tried_again_with_the_next_smaller_plan(vae, limited):
    z = latents(vae, 32, 32)
    want = vae.decode(z)
    runs = vae.tradeoff("decode", 128, 128)
    limit = max(runs[0].reserved_bytes, runs[0].peak_bytes) if limited else None
    first = vae.estimate("decode", 128, 128, memory_limit=limit)
    retried = 0
    for n in range(1, 20):
        vae.trim()
        _core.fail_alloc_at(n)
        out = np.full_like(want, np.nan) if n % 2 else None
        got = vae.decode(z, memory_limit=limit, out=out)
        left = _core.fail_alloc_at(0)
        assert np.array_equal(got, want)
        if left:
            break
        retried += 1
        (note,) = vae.last_run.notes
        assert note.startswith("out of memory: run again within") and vae.last_run.peak_bytes < first.peak_bytes
    assert retried > 2 and vae.last_run.notes == () and vae.last_run.peak_bytes <= first.peak_bytes


def test_memory_that_runs_out_in_the_smallest_plan_is_an_error(vae):
    z, limit = latents(vae, 32, 32), vae.smallest("decode", 128, 128)
    vae.trim()
    _core.fail_alloc_at(3)
    with pytest.raises(MemoryError):
        vae.decode(z, memory_limit=limit)
    _core.fail_alloc_at(0)
    vae.on_out_of_memory = "perhaps"
    with refused("on_out_of_memory"):
        vae.decode(z)


def test_a_limit_changed_during_a_run_has_no_effect_on_it(vae):
    z, limit = latents(vae, 32, 32), vae.smallest("decode", 128, 128)
    vae.memory_limit = limit

    def change(done, total):
        vae.memory_limit = 1
        vae.threads = 1

    want = vae.decode(z, progress=change)
    assert vae.last_run.peak_bytes <= limit and vae.memory_limit == 1
    vae.memory_limit, vae.threads = None, 2
    assert np.array_equal(vae.decode(z), want)


def test_threads_with_limits_of_their_own(vae):
    z = latents(vae, 32, 32)
    want = vae.decode(z)
    limits = [None, *(max(run.reserved_bytes, run.peak_bytes) for run in vae.tradeoff("decode", 128, 128))]
    wrong = []

    def work(limit):
        for _ in range(3):
            if not np.array_equal(vae.decode(z, memory_limit=limit), want):
                wrong.append(limit)

    threads = [threading.Thread(target=work, args=(limit,)) for limit in limits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- what stays between runs ----


def test_cache_limit(vae):
    z = latents(vae, 32, 32)
    vae.trim()
    empty = vae.reserved_bytes
    image = vae.decode(z)
    arena = vae.reserved_bytes - empty - image.nbytes
    vae.cache_limit = arena
    image = vae.decode(z)
    assert vae.reserved_bytes == empty + arena + image.nbytes
    for limit in (arena - 1, 0, "1 KiB"):
        vae.cache_limit = limit
        image = vae.decode(z)
        assert vae.reserved_bytes == empty + image.nbytes
    vae.cache_limit = None
    vae.decode(z)
    vae.cache_limit = arena - 1
    image = vae.decode(latents(vae, 2, 2))
    assert vae.reserved_bytes == empty + image.nbytes, "a larger arena from before the limit"


def test_the_smallest_models_know_their_limits():
    """The models of the other tests too: a limit at each point of the curve is kept."""
    vae = small_vae("odd")
    vae.threads = 2
    z = latents(vae, 40, 24)
    want = vae.decode(z)
    for run in vae.tradeoff("decode", 160, 96):
        limit = max(run.peak_bytes, run.reserved_bytes)
        assert np.array_equal(vae.decode(z, memory_limit=limit), want)
        assert vae.last_run.peak_bytes <= limit
