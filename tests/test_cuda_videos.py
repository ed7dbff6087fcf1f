"""Videos on a GPU, or on the emulator: the same frames as on the CPU, under every limit, in planned memory."""

from __future__ import annotations

import itertools
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import gpu
import numpy as np
import pytest
from cuda_kernels import THREADS, TYPES, UNIT, Args, Clamp, Memory, Ring, built, every_type, in_blocks, untouched
from engine import error
from errors import refused
from gpu import LIMIT
from test_video_runs import CONFIGS, MIRRORS, NAMES, input_of, latents, run, video_vae, videos

from vaemem import VAE
from vaemem.engine.device import ATTENTION_CHANNELS

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.core]
OPS = ("decode", "encode")
DTYPES = ("float32", "float16", "float16 own", "bfloat16", "bfloat16 own")


def pair(name: str = "wan", dtype: str = "float32") -> tuple[VAE, VAE]:
    """The same VAE on the CPU and there."""
    return video_vae(name), video_vae(name, **gpu.kind_of(dtype))


# Rows that are the picture's columns, and its rows; a single frame; a square.
@pytest.mark.each_value
@pytest.mark.parametrize(("name", "op"), [(name, op) for name in NAMES for op in OPS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(2, 3, 5), (3, 5, 4), (1, 2, 3), (5, 2, 2)], ids=str)
def test_videos_are_the_cpus(name, op, dtype, size):
    cpu, there = pair(name, dtype)
    data = input_of(cpu, op, *size, batch=2)
    got, want = run(there, op, data), run(cpu, op, data)
    assert got.shape == want.shape and error(got, want.astype(np.float64)) <= LIMIT[dtype]
    ran = there.last_run
    planned = there.estimate(op, ran.height, ran.width, 2, frames=ran.frames)
    assert (ran.peak_bytes, ran.reserved_bytes) == (planned.peak_bytes, planned.reserved_bytes)


@pytest.mark.each_value
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16 own", "float32"])
@pytest.mark.parametrize("size", [(2, 3, 5), (3, 6, 4)], ids=str)
@pytest.mark.parametrize("third", range(3))  # of the plans
def test_every_plan(name, op, dtype, size, third):
    """It keeps to its memory, and gives the same frames; on a GPU cuDNN may choose another engine for other stripes."""
    cpu, there = pair(name, dtype)
    data = input_of(cpu, op, *size)
    want = run(there, op, data)
    ran = there.last_run
    plans = there.tradeoff(op, ran.height, ran.width, frames=ran.frames)
    assert len(plans) > 1 or "own" in dtype  # a step of ours has at least a tile
    for plan in plans[third::3]:
        there.trim()
        got = run(there, op, data, memory_limit=max(plan.peak_bytes, plan.reserved_bytes))
        if gpu.place() == "emulator":
            assert got.tobytes() == want.tobytes()
        assert error(got, want.astype(np.float64)) <= (1e-5 if dtype == "float32" else LIMIT[dtype])
        assert there.last_run.peak_bytes <= plan.peak_bytes and there.last_run.reserved_bytes <= plan.reserved_bytes


@pytest.mark.each_value
@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op in OPS for dtype in ("float32", "bfloat16 own")])
@pytest.mark.parametrize(
    "name, multiprocessors, size",
    [("ltx2", 5, (2, 19, 2)), ("ltx2", 8, (3, 7, 2)), ("wan", 3, (2, 9, 2)), ("ltx2.3", 2, (2, 2, 7))],
)
def test_a_short_last_stripe(monkeypatch, name, multiprocessors, size, op, dtype):
    """A stripe has several rows, and the last one has fewer."""
    gpu.emulator()
    monkeypatch.setenv("VAEMEM_EMULATED_MULTIPROCESSORS", str(multiprocessors))
    cpu, there = pair(name, dtype)
    data = input_of(cpu, op, *size)
    assert error(run(there, op, data), run(cpu, op, data).astype(np.float64)) <= LIMIT[dtype]


def test_wide_attention_is_refused_before_a_run():
    wide = CONFIGS["wan"] | {"base_dim": (ATTENTION_CHANNELS + 16) // 4, "dim_mult": [1, 1, 4]}
    there = VAE.random(config=wide, parts="decoder", **gpu.kind_of("bfloat16"))
    with refused(None, names=[f"{ATTENTION_CHANNELS} channels"]):
        there.estimate("decode", 64, 64, frames=5)


def test_the_device_takes_what_is_planned():
    emulator = gpu.emulator()
    there = video_vae(**gpu.kind_of("float32"))
    z = gpu.Array(latents(there, 3, 3, 5))
    there.decode(z)
    there.trim()
    before = emulator.settled()[0]
    emulator.peak()
    there.decode(z)
    assert emulator.peak() - before <= there.last_run.reserved_bytes - there.last_run.weights_bytes


def test_arrays_in_the_gpus_memory():
    cpu, there = pair()
    z, x = latents(cpu, 3, 2, 3), videos(cpu, 2, 3, 2)
    assert error(there.decode(gpu.Array(z)).numpy(), cpu.decode(z).astype(np.float64)) <= LIMIT["float32"]
    assert error(there.encode(gpu.Array(x)).moments.numpy(), cpu.encode(x).moments.astype(np.float64)) < 1e-5
    for name, size in (("wan", (3, 2, 3)), ("ltx2.3", (2, 3, 2))):
        cpu, there = pair(name)
        z = latents(cpu, *size)
        want = cpu.decode(z, output_type="uint8")
        for given in (z, gpu.Array(z)):
            got = there.decode(given, output_type="uint8")
            got = got if isinstance(got, np.ndarray) else got.numpy()
            assert got.shape == want.shape and np.abs(got.astype(int) - want).max() <= 1
        pictures = want[:, : (want.shape[1] - 1) // 8 * 8 + 1]
        assert error(there.encode(pictures).mean, cpu.encode(pictures).mean.astype(np.float64)) <= LIMIT["float32"]
    out = gpu.Array(np.zeros((1, 3, 9, 16, 24), np.float32))
    cpu, there = pair()
    z = latents(cpu, 3, 2, 3)
    assert there.decode(gpu.Array(z), out=out) is out
    assert error(out.numpy(), cpu.decode(z).astype(np.float64)) <= LIMIT["float32"]


def test_who_runs_videos_there():
    """The classes of videos do, by their config; then a picture is a video of one frame. videos=False: for images."""
    there = video_vae(**gpu.kind_of("bfloat16"))
    assert there.arch["videos"]
    images = video_vae(videos=False, **gpu.kind_of("bfloat16"))
    assert images.reserved_bytes < there.reserved_bytes / 2
    with refused("z", names=["videos=True"]):
        images.decode(latents(images, 2, 2, 3))
    cpu = video_vae()
    moved = cpu.copy("cuda", dtype="float32")
    z = latents(cpu, 2, 2, 3)
    assert error(moved.decode(z), cpu.decode(z).astype(np.float64)) <= LIMIT["float32"]


@pytest.mark.parametrize(
    ("model", "height", "width", "frames", "most"),
    [
        ("qwen-image", 480, 832, 81, (1.4, 0.7)),
        pytest.param("qwen-image", 720, 1280, 81, (2.0, 1.0), marks=pytest.mark.thorough),
        ("ltx2.3", 704, 1280, 121, (1.4, 0.7)),
    ],
)
def test_little_memory_at_real_sizes(monkeypatch, model, height, width, frames, most):
    """GiB besides weights and video, without a limit and at least, on a GPU as large as an H100. The emulator's cuDNN
    needs little workspace."""
    gpu.emulator()
    monkeypatch.setenv("VAEMEM_EMULATED_MULTIPROCESSORS", "132")
    vae = VAE.random(model, parts="decoder", videos=True, **gpu.kind_of("bfloat16 own"))
    how = {"frames": frames, "staged": False, "output_type": "uint8"}
    least = vae.smallest("decode", height, width, **how)
    for limit, bar in zip((None, least), most, strict=True):
        run = vae.estimate("decode", height, width, memory_limit=limit, **how)
        assert 0.4 * bar < (run.reserved_bytes - run.weights_bytes - run.output_bytes) / 2**30 <= bar


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name, dtype", [("wan", "float32"), ("ltx2", "float32"), ("wan", "bfloat16 own")])
def test_every_driver_call_fails_once(name, dtype):
    emulator = gpu.emulator()
    cpu, there = pair(name, dtype)
    z = latents(cpu, 2, 2, 3)
    calls = itertools.chain(range(1, 20), range(20, 100_000, 29))
    assert emulator.fail_calls(there, z, cpu.decode(z), LIMIT[dtype], calls) > 50


# ---- kernels, one by one ----


class Planes(Args):
    _fields_ = (
        *((name, c_uint32) for name in ("planes", "lines", "width", "slices")),
        *((f"{what}{of}", c_int32) for what in ("row", "frame") for of in ("0", "_plane", "_line", "_slice")),
        ("left", c_int32),
    )


class GatherArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "scale", "shift", "factor")),
        ("x_plane", c_uint64),
        *((f"{name}_step", c_int64) for name in ("row", "column", "frame")),
        ("first_factor", c_uint64),
        ("to", Planes),
        *((name, c_uint32) for name in ("x_h", "x_w", "x_f", "x_c", "x_pitch", "channels")),
        ("x_ring", Ring),
        *((name, c_uint32) for name in ("format", "act", "held", "mirrored", "frame_least")),
        *((name, c_float) for name in ("in_scale", "in_shift", "multiply")),
    )


class ScatterArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("raw", "bias", "add", "y", "flags")),
        ("y_plane", c_uint64),
        *((f"{name}_step", c_int64) for name in ("row", "column", "frame")),
        *((name, c_uint32) for name in ("y_f", "y_w", "y_c", "y_pitch", "add_pitch")),
        *((name, Ring) for name in ("y_ring", "add_ring")),
        *((name, c_uint32) for name in ("row0", "rows", "frame_first", "frame_end", "lines", "width", "groups")),
        *((name, c_uint32) for name in ("channels", "by_frame", "halves", "up", "relu", "format")),
        ("clamp", Clamp),
        *((name, c_float) for name in ("out_scale", "out_shift", "bias_scale")),
    )


class TurnArgs(Args):
    _fields_ = (
        *((name, c_void_p) for name in ("from_", "to")),
        *((name, c_uint32) for name in ("phases", "filters", "taps", "channels", "outs")),
    )


kernels = built("frames")


@every_type
@pytest.mark.parametrize("held, mirrored", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ring", [0, 4])
def test_gather_of_rows(kernels, dtype, held, mirrored, ring):
    """Three rows as channels, in planes of frames and columns: as np.pad makes them. Memory around x is NaN."""
    rng, memory = np.random.default_rng(3), Memory()
    h, f, w, c, pitch, row, rows = 6, 4, 5, 20, 32, 2, 2
    x = rng.standard_normal((h, f, w, c)).astype(TYPES[dtype])
    held_rows = memory.full((ring or h, f, w, pitch), TYPES[dtype], np.nan, around=Memory.NAN)
    for at in range(row - 1, row + rows + 1):
        held_rows[at % ring if ring else at, ..., :c] = x[at]
    out = memory.empty((rows, f + 2, w + 2, 3, pitch), TYPES[dtype])
    first = row - 1
    args = GatherArgs(
        x=held_rows, out=out, x_h=h, x_w=w, x_f=f, x_c=c, x_pitch=pitch, channels=pitch, held=held, mirrored=mirrored,
        x_ring=Ring((first % ring - first) % 2**32, ring) if ring else Ring(), in_scale=2, in_shift=0.5, multiply=0.5,
        to=Planes(
            planes=rows, lines=f + 2, width=w + 2, slices=3, row0=first, row_plane=1, row_slice=1, frame0=-1,
            frame_line=1, left=-1,
        ),
    )  # fmt: skip
    kernels.launch(f"vm_gather_{dtype}", (3,), (THREADS,), args)
    memory.check()
    made = (x.astype(np.float64) * 2 + 0.5) * 0.5
    made = np.pad(made, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="edge" if held else "constant")
    made = np.pad(made, ((0, 0), (0, 0), (1, 1), (0, 0)), mode="reflect" if mirrored else "constant")
    want = np.stack([made[first + s : first + s + rows] for s in range(3)], 3)
    assert (np.abs(out[..., :c].astype(np.float64) - want) <= 2 * UNIT[dtype] * (np.abs(want) + 1)).all()
    assert (out[..., c:] == 0).all()


@every_type
@pytest.mark.parametrize("way", ["same", "halves", "up", "by frame"])
def test_scatter(kernels, dtype, way):
    rng, memory = np.random.default_rng(4), Memory()
    row0, rows, f, w, c, pitch = 2, 4, 5, 6, 20, 48
    groups, each, first = {"halves": 2, "up": 4}.get(way, 1), 32, int(way == "halves")
    lines = {"same": f, "halves": f // 2, "up": rows // 2 + 1, "by frame": rows}[way]
    width, planes = (w // 2 + 1 if way == "up" else w), (f if way in ("up", "by frame") else rows)
    raw = rng.standard_normal((planes, lines, width, groups, each)).astype(TYPES[dtype])
    bias = rng.standard_normal(groups * each).astype(np.float32)
    y = memory.full((row0 + rows, f, w, pitch), TYPES[dtype], 7, around=Memory.NAN)
    flags = memory.copy(np.zeros(1, np.uint32))
    args = ScatterArgs(
        raw=memory.copy(raw, around=Memory.NAN), bias=memory.copy(bias, around=Memory.NAN), y=y, flags=flags, y_f=f,
        y_w=w, y_c=c, y_pitch=pitch, row0=row0, rows=rows, frame_first=first, frame_end=f, lines=lines, width=width,
        groups=groups, channels=each, by_frame=planes == f and way != "same", halves=way == "halves", up=way == "up",
        bias_scale=0.5,
    )  # fmt: skip
    kernels.launch(f"vm_scatter_{dtype}", (2,), (THREADS,), args)
    memory.check()
    assert not flags[0] and (y[:row0] == 7).all() and (y[..., 32:] == 7).all()
    for r, frame, q in itertools.product(range(rows), range(first, f), range(w)):
        phase = r % 2 * 2 + q % 2
        at = {
            "same": (r, frame, q, 0), "halves": (r, (frame - 1) // 2, q, (frame - 1) % 2),
            "up": (frame, r // 2 + r % 2, q // 2 + q % 2, phase), "by frame": (frame, r, q, 0),
        }[way]  # fmt: skip
        lanes = bias[at[3] * each :][:32] if way == "halves" else bias[:32]
        want = raw[at].astype(np.float64) + 0.5 * lanes
        got = y[row0 + r, frame, q, :32].astype(np.float64)
        assert (np.abs(got - want) <= 2 * UNIT[dtype] * (np.abs(want) + 1)).all(), (r, frame, q)


@every_type
@pytest.mark.parametrize("phases, taps", [(1, 3), (4, 2)])
def test_turned_filters(kernels, dtype, phases, taps):
    memory = Memory()
    filters = np.random.default_rng(5).standard_normal((phases, 6, taps, taps, 16)).astype(TYPES[dtype])
    to = memory.empty(filters.shape, TYPES[dtype])
    args = TurnArgs(
        from_=memory.copy(filters, around=Memory.NAN), to=to, phases=phases, filters=6, taps=taps, channels=16
    )
    kernels.launch(f"vm_turn_{dtype}", (1,), (THREADS,), args)
    memory.check()
    want = filters.swapaxes(2, 3)
    want = want.reshape(2, 2, *want.shape[1:]).swapaxes(0, 1).reshape(want.shape) if phases == 4 else want
    assert to.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("outs, channels", [(16, 16), (112, 48)])
def test_turned_filters_in_blocks(kernels, dtype, outs, channels):
    """A 3x3x3 filter's rows and columns change places. Padding is left alone."""
    memory, rng = Memory(), np.random.default_rng(6)
    filters = rng.standard_normal((1, outs, 3, 3, 3 * channels)).astype(TYPES[dtype])  # frames, rows; columns, channels
    rows = filters.reshape(outs, 3, 3, 3, channels).swapaxes(2, 3).reshape(filters.shape)
    given, want, there = (in_blocks(of) for of in (filters, rows, np.ones_like(filters)))
    to = memory.empty(given.shape, TYPES[dtype])
    args = TurnArgs(
        from_=memory.copy(given, around=Memory.NAN), to=to, phases=1, filters=3 * outs, taps=3, channels=channels,
        outs=outs,
    )  # fmt: skip
    kernels.launch(f"vm_turn_{dtype}", (3,), (THREADS,), args)
    memory.check()
    assert to[there == 1].tobytes() == want[there == 1].tobytes() and untouched(to[there == 0])


def test_mirrors_need_two_latents():
    there = video_vae(MIRRORS, **gpu.kind_of("float32"))
    with refused("height", names=["64"]):
        there.decode(latents(there, 2, 1, 3))
    assert CONFIGS[MIRRORS]["decoder_causal"] is False
