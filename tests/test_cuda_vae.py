"""Whole runs on a GPU, or on the emulator where there is none (gpu.py): numbers and memory."""

import sys
import warnings
from pathlib import Path

import gpu
import ml_dtypes
import numpy as np
import pytest
from engine import FRAMES, SMALL, TINY, config, error, images, latents, small_vae
from errors import is_about, refused, warned
from gpu import LIMIT, U, every_dtype, on_gpu, pair

from vaemem import VAE, Tiling, _core

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

pytestmark = pytest.mark.usefixtures("cuda")
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


# ---- numbers ----


def sized(*sizes):
    """Every size of the small models, and one of the others, whose passes differ from theirs by few kinds."""
    others = [(name, sizes[0]) for name in (*FRAMES, *TINY, "hunyuan")]
    return pytest.mark.parametrize(("name", "size"), [*((name, size) for name in SMALL for size in sizes), *others])


@pytest.mark.one_in(20)
@every_dtype
@sized((12, 5), (3, 16))
def test_decode(name, dtype, size):
    cpu, there = pair(name, dtype)
    z = latents(cpu, *size, batch=2)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT[dtype]


@pytest.mark.one_in(10)
@every_dtype
@sized((48, 20), (12, 64))
def test_encode(name, dtype, size):
    cpu, there = pair(name, dtype)
    x = images(*size, batch=2)
    got, want = there.encode(x), cpu.encode(x)
    assert error(got.mean, want.mean) < LIMIT[dtype] * 2  # means are small beside what they are summed from
    assert name in TINY or error(got.logvar, want.logvar) < LIMIT[dtype] * 2


@pytest.mark.one_in(3)
@every_dtype
@pytest.mark.parametrize("name", ["flux2-small", "cogview4"])
def test_groups_of_three_and_no_attention(name, dtype):
    """Groups of 3, 6 and 12 in the decoder; and channels that narrow to a quarter."""
    cpu, there = pair(name, dtype)
    z, x = latents(cpu, 6, 4, batch=2), images(16, 24)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT[dtype]
    assert there.last_run.peak_bytes == there.estimate("decode", 24, 16, 2).peak_bytes
    assert error(there.encode(x).mean, cpu.encode(x).mean) < LIMIT[dtype] * 2


@pytest.mark.one_in(4)
@every_dtype
def test_channels_of_one_frame(dtype):
    """As Qwen-Image and Wan have them: 96, 192 and 16 of latents. Numbers beyond [-1, 1] are clamped, of tiles too."""
    settings = config("wan") | {"base_dim": 96, "dim_mult": [1, 2], "temperal_downsample": [False], "num_res_blocks": 1}
    settings |= {"z_dim": 16, "latents_mean": [0.1] * 16, "latents_std": [0.5] * 16}
    cpu, there = (VAE.random(seed=0, config=settings, **how) for how in ({}, gpu.kind_of(dtype)))
    z, x = latents(cpu, 5, 3, batch=2), images(10, 6)
    for vae in (cpu, there):
        vae._core.set_tensor("decoder.conv_out.bias", np.array([2, 0, -2], np.float32))
    for tiling in (None, Tiling(8)):
        got, want = there.decode(z, tiling=tiling), cpu.decode(z, tiling=tiling)
        assert error(got, want) < LIMIT[dtype] and got.max() == 1 and got.min() == -1 and (np.abs(got) < 1).any()
    assert error(there.encode(x).mean, cpu.encode(x).mean) < LIMIT[dtype] * 2


@every_dtype
def test_latents_of_flux2_are_normalised_in_host_memory(dtype):
    cpu, there = pair("flux2-small", dtype)
    x = images(16, 24)
    held = np.random.default_rng(0).standard_normal((1, 32, 2, 3), dtype=np.float32)
    assert there.encode(x, scaled=True).mode().shape == held.shape
    assert error(there.encode(x, scaled=True).mode(), cpu.encode(x, scaled=True).mode()) < LIMIT[dtype] * 4
    assert error(there.decode(held, scaled=True), cpu.decode(held, scaled=True)) < LIMIT[dtype]
    for call in (there.decode, there.encode):
        with refused("scaled"):
            call(gpu.Array(held), scaled=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float16 own", "bfloat16 own"])
def test_no_worse_than_torch(kind):
    torch = pytest.importorskip("torch")
    import torch_vae  # diffusers' numbers without diffusers (test_benchmarks_gpu.py)

    cpu, there = pair("sd", kind)
    peer, z = torch_vae.with_weights(cpu), torch.from_numpy(latents(cpu, 8, 8))
    with torch.no_grad():
        want = peer.double().image(z.double()).numpy()
        theirs = peer.to(getattr(torch, there.dtype)).image(z.to(getattr(torch, there.dtype)))
    assert error(there.decode(z.numpy()), want) <= 1.1 * error(theirs.float().numpy(), want)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_tf32_is_that_and_said(precision):
    """Factors of 11 bits: an error beyond float32's and within what 12 roundings of 2^-11 make."""
    cpu = small_vae("sd")
    there = small_vae("sd", device="cuda", precision=precision)
    z = latents(cpu, 8, 8)
    assert LIMIT["float32"] < error(there.decode(z), cpu.decode(z)) < 12 * 2.0**-11
    assert "tf32" in there.last_run.backend and there.precision == precision
    assert f"cuda:0 float32 {precision}, " in repr(there)


@every_dtype
def test_bytes_in_and_out(dtype):
    cpu, there = pair("flux", dtype)
    z = latents(cpu, 6, 5)
    got, want = there.decode(z, output_type="uint8"), cpu.decode(z, output_type="uint8")
    assert got.dtype == np.uint8 and got.shape == want.shape
    assert np.abs(got.astype(int) - want).mean() < 255 * LIMIT[dtype] + 0.05  # a rounding may fall the other way
    moments = there.encode(want).mean
    assert error(moments, cpu.encode(want).mean) < LIMIT[dtype] * 2


@pytest.mark.one_in(4)
@every_dtype
def test_tiles_of_host_arrays(dtype):
    cpu, there = pair("flux", dtype)
    z, x, tiling = latents(cpu, 9, 6, batch=2), images(20, 36), Tiling(16)
    assert error(there.decode(z, tiling=tiling), cpu.decode(z, tiling=tiling)) < LIMIT[dtype]
    got, want = there.last_run, there.estimate("decode", 36, 24, 2, tiling=tiling)
    assert [f for f in vars(got) if getattr(got, f) != getattr(want, f)] == ["pass_seconds", "seconds"]
    assert got.notes == ("6 tiles of 16x16",)
    one = there.estimate("decode", 16, 16, 2)
    assert got.peak_bytes == one.peak_bytes  # result, tiles and borders are the host's
    assert error(there.encode(x, tiling=tiling).moments, cpu.encode(x, tiling=tiling).moments) < 2 * LIMIT[dtype]


@pytest.mark.one_in(4)
@every_dtype
@pytest.mark.parametrize("tiling", [Tiling(16), Tiling(16, 0.25, "cosine")])
def test_tiles_of_arrays_on_it(dtype, tiling):
    """They are read, blended and written where they lie: as from host memory, where the blending is the host's."""
    there, name = on_gpu("flux", dtype), dtype.partition(" ")[0]
    z, x = (a.astype(NUMPY[name]) for a in (latents(there, 3, 5, batch=2), images(12, 20, batch=2)))
    x8 = np.ascontiguousarray(np.rint((x.transpose(0, 2, 3, 1).astype(np.float32) + 1) * 127.5).astype(np.uint8))
    limit = 4 * U[name]  # the one that is stored, and blending that is fused or not
    before = there.reserved_bytes
    for output_type, out in (("float", NUMPY[name]), ("uint8", np.uint8)):
        there.trim()  # the arena of host arrays is larger
        got = there.decode(gpu.Array(z, name), output_type=output_type, tiling=tiling)
        took, planned = there.last_run, there.estimate("decode", 12, 20, 2, output_type, staged=False, tiling=tiling)
        assert [f for f in vars(took) if getattr(took, f) != getattr(planned, f)] == ["pass_seconds", "seconds"]
        assert took.output_bytes == got.numpy().nbytes == np.prod(got.shape) * np.dtype(out).itemsize
        assert got.numpy().dtype == out and there.reserved_bytes <= took.reserved_bytes
        want = there.decode(z, output_type=output_type, tiling=tiling)
        if output_type == "float":
            assert error(got.numpy(), want) < limit
        else:
            assert np.abs(got.numpy().astype(int) - want).max() <= 1 and (got.numpy() == want).mean() > 0.99
    for given in (x, x8):
        there.trim()
        got = there.encode(gpu.Array(given, "uint8" if given is x8 else name), tiling=tiling).moments
        took, planned = there.last_run, there.estimate("encode", 12, 20, 2, staged=False, tiling=tiling)
        assert took.reserved_bytes == planned.reserved_bytes and took.notes == planned.notes
        assert error(got.numpy(), there.encode(given, tiling=tiling).moments) < limit
    del got
    there.trim()
    assert there.reserved_bytes == before


def test_graphs_of_tiles_do_not_mix():
    """Those of an array on the GPU differ in nothing but their address; those of another one's in its width alone."""
    there, tiling = on_gpu("odd"), Tiling(8, 0.5)
    zs = [gpu.Array(latents(there, 3, width, seed=width)) for width in (2, 3)]
    want = [there.decode(z, tiling=tiling).numpy() for z in zs]
    there.graphs = True
    outs = [gpu.Array(np.zeros_like(image)) for image in want]
    for _ in range(3):
        for z, out, image in zip(zs, outs, want, strict=True):
            assert (there.decode(z, out=out, tiling=tiling).numpy() == image).all()


def test_tiles_of_a_picture_that_is_not_finite_are_told_of():
    there, z = on_gpu("flux"), latents(small_vae("flux"), 6, 6)
    z[0, 0, -1, -1] = np.nan
    for output_type in ("float", "uint8"):
        with warned("decode"):
            got = there.decode(gpu.Array(z), output_type=output_type, tiling=Tiling(16)).numpy()
        assert not there.last_run.finite and (
            output_type == "uint8" or (np.isnan(got).any() and not np.isnan(got).all())
        )


def test_memory_of_tiles_of_arrays_on_it():
    """What the driver gives is what the estimate says."""
    emulator, tiling = gpu.emulator(), Tiling(32)
    before = emulator.settled()[0]
    there = on_gpu("sd")
    z = gpu.Array(latents(there, 14, 8))
    given = z.values.nbytes
    planned = there.estimate("decode", 56, 32, staged=False, tiling=tiling)
    emulator.peak()
    got = there.decode(z, tiling=tiling)
    given += there.unaccounted_bytes
    assert emulator.peak() - before - given == planned.reserved_bytes
    assert emulator.live()[0] - before - given == there.reserved_bytes
    out = gpu.Array(np.zeros(got.shape, np.float32))
    assert there.decode(z, tiling=tiling, out=out) is out and there.last_run.output_bytes == 0
    assert there.last_run.reserved_bytes == planned.reserved_bytes - planned.output_bytes
    assert (out.numpy() == got.numpy()).all()


def test_scaled_latents():
    cpu, there = pair("flux")
    z = latents(cpu, 4, 4)
    assert error(there.decode(z, scaled=True), cpu.decode(z, scaled=True)) < LIMIT["float32"]


@pytest.mark.one_in(4)
@every_dtype
def test_the_same_bits_again(dtype):
    there = on_gpu("sd", dtype)
    z = latents(there, 4, 4)
    first = there.decode(z)
    assert (there.decode(z) == first).all()
    there.graphs = True
    for _ in range(3):
        assert (there.decode(z) == first).all()
    other = there.decode(-z)
    assert not (other == first).all() and (there.decode(z) == first).all()


def test_graphs_of_many_sizes_are_kept_and_dropped():
    cpu, there = pair("sd")
    there.graphs = True
    for side in [*range(2, 13), 2, 3, 12]:
        z = latents(cpu, side, 2)
        assert error(there.decode(z), cpu.decode(z)) < LIMIT["float32"], side


def test_graphs_of_batches_do_not_mix():
    """A batch lays its arrays out otherwise than one item does, in the same arena."""
    cpu, there = pair("sd")
    there.graphs = True
    one, two = latents(cpu, 4, 4), latents(cpu, 4, 4, batch=2, seed=1)
    for z in (two, one, two, one, two, one):
        assert error(there.decode(z), cpu.decode(z)) < LIMIT["float32"]


def test_a_graph_is_launched_and_not_its_kernels():
    emulator = gpu.emulator()
    there = small_vae("sd", device="cuda")
    there.graphs = True
    z = latents(there, 4, 4)
    calls = []
    for _ in range(4):
        before = emulator.calls()
        there.decode(z)
        calls.append(emulator.calls() - before)
    assert (
        calls[2] == calls[3] < calls[0] / 2
    )  # pass by pass, captured, launched, launched; plans are asked for each time


# ---- float16 that overflows ----


def amplify(vae, plain, factor):
    """Makes activations larger by a factor without changing what is decoded: GroupNorm takes it out again."""
    for name in ("decoder.conv_in.weight", "decoder.conv_in.bias"):
        vae._core.set_tensor(name, plain._core.get_tensor(name) * np.float32(factor))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.parametrize("kind", ["float16 own", "float16"])
def test_overflow_is_avoided_and_said(name, kind):
    plain, (cpu, there) = small_vae(name), pair(name, kind)
    z = latents(cpu, 8, 8)
    there.decode(z)
    assert there.last_run.notes == ()
    for vae in (cpu, there):
        amplify(vae, plain, 2e5)
    got = there.decode(z)
    assert any("overflowed" in note for note in there.last_run.notes)
    assert np.isfinite(got).all() and error(got, cpu.decode(z)) < LIMIT["float16"]
    there.decode(z)
    assert there.last_run.notes == ()  # what helped is remembered


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_overflow_in_the_attention(kind):
    """In a channel that makes no difference to what comes of it."""
    cpu, there = pair("flux", "float16")
    attention = "decoder.mid_block.attentions.0"
    bias = np.zeros_like(cpu._core.get_tensor(f"{attention}.to_{kind}.bias"))
    bias[5] = 9e5
    matrix, at = {"q": ("to_k", (5, ...)), "k": ("to_q", (5, ...)), "v": ("to_out.0", (..., 5))}[kind]
    idle = cpu._core.get_tensor(f"{attention}.{matrix}.weight")
    idle[at] = 0
    for vae in (cpu, there):
        vae._core.set_tensor(f"{attention}.to_{kind}.bias", bias)
        vae._core.set_tensor(f"{attention}.{matrix}.weight", idle)
        if kind != "v":
            vae._core.set_tensor(f"{attention}.{matrix}.bias", np.zeros_like(bias))
    z = latents(cpu, 8, 8)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT["float16"]
    assert there.last_run.notes == ("float16 overflowed: run again with activations multiplied by 1/16",)


def test_nan_is_not_taken_for_overflow_for_ever():
    there = small_vae("flux", device="cuda", dtype="float16")
    z = latents(there, 4, 4)
    good = there.decode(z)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert np.isnan(there.decode(z * np.nan)).all()
    assert any(is_about(w.message, "decode") for w in seen)
    assert (there.decode(z) == good).all()


# ---- memory ----


@pytest.mark.one_in(9)
@every_dtype
@pytest.mark.parametrize("name", ["sd", "qwen"])
@pytest.mark.parametrize("op, batch", [("decode", 1), ("encode", 1), ("decode", 2)])
def test_estimate_is_what_is_taken(name, dtype, op, batch):
    there = on_gpu(name, dtype)
    weights = there.reserved_bytes
    want = there.estimate(op, 24, 16, batch)
    there.decode(latents(there, 6, 4, batch)) if op == "decode" else there.encode(images(24, 16, batch))
    got = there.last_run
    for name in ("weights", "activations", "scratch", "workspace", "output", "reserved"):
        assert getattr(got, f"{name}_bytes") == getattr(want, f"{name}_bytes"), name
    assert got.timeline == want.timeline and got.peak_bytes == want.peak_bytes
    assert there.reserved_bytes == got.reserved_bytes  # all of it is the arena, kept for the next run
    there.trim()
    assert there.reserved_bytes == weights


@pytest.mark.one_in(4)
@pytest.mark.parametrize("granularity", [256, 2 << 20])
@every_dtype
def test_the_device_has_given_what_we_say(dtype, granularity, monkeypatch):
    """In the card's granularity: weights, arena and, of arrays on the GPU, the result."""
    emulator = gpu.emulator()
    monkeypatch.setenv("VAEMEM_EMULATED_GRANULARITY", str(granularity))
    before = emulator.settled()[0]
    there, name = on_gpu("sd", dtype), dtype.partition(" ")[0]
    z = latents(there, 8, 8).astype(NUMPY[name])
    for given in (z, gpu.Array(z, name)):
        there.trim()
        others = emulator.settled()[0] - there.reserved_bytes
        emulator.peak()
        result = there.decode(given)
        run, planned = there.last_run, there.estimate("decode", 32, 32, staged=given is z)
        assert run.reserved_bytes == planned.reserved_bytes == emulator.peak() - others
        assert run.reserved_bytes % granularity == 0 <= run.reserved_bytes - run.peak_bytes
        assert there.reserved_bytes == emulator.live()[0] - others
        del result
    assert others - before - granularity * -(-z.nbytes // granularity) == there.unaccounted_bytes
    del there, given
    assert emulator.live()[0] == before


def test_what_is_not_ours_to_plan_is_measured(monkeypatch):
    """Modules when they are loaded, cuDNN's plans when they first run, graphs when they are captured; what others take
    between runs is not in it."""
    emulator = gpu.emulator()
    for name, size in (("MODULE", 1 << 20), ("CUDNN", 3 << 18), ("NODE", 1 << 10)):
        monkeypatch.setenv(f"VAEMEM_EMULATED_{name}", str(size))
    before, *_, modules, _ = emulator.settled()
    there = on_gpu("odd")
    there.graphs = True
    z, seen = latents(there, 3, 2), [there.unaccounted_bytes]
    assert seen[0] == (emulator.live()[-2] - modules << 20) + 256  # of the flags
    others = []
    for _ in range(4):
        there.decode(z)
        seen.append(there.unaccounted_bytes)
        others.append(gpu.Array(np.zeros(1 << 20, np.uint8)))
        assert emulator.live()[0] - before - sum(a.values.nbytes for a in others) == there.reserved_bytes + seen[-1]
    plans, graph = seen[1] - seen[0], seen[2] - seen[1]
    assert plans > 0 == plans % (3 << 18) and graph > 0 == graph % (1 << 10) and seen[2] == seen[3] == seen[4]
    del there, others
    assert emulator.live()[0] == before


def test_auto_leaves_room_for_graphs(monkeypatch):
    emulator, there = gpu.emulator(), on_gpu("odd")
    z, weights, limits = latents(there, 12, 8), there.reserved_bytes, limits_of(there, "decode", 48, 32)
    there.graphs = True
    for i, graph in enumerate((1, limits[1] - weights)):  # what a graph is to take; of the second plan it is less
        monkeypatch.setenv("VAEMEM_EMULATED_NODE", str(graph // max(there._device.backend.to_come // 7, 1)))
        for _ in range(2):
            there.decode(z, memory_limit=limits[i])
    there.trim()
    room = there._device.backend.to_come
    assert room > 6 * (limits[2] - weights)
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + room + limits[2] - weights))
    there.decode(z, memory_limit="auto")
    assert there.last_run.notes == () and there.last_run.reserved_bytes == limits[2]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name,latent", [("flux", 32), ("flux", 64), ("sdxl", 128), ("flux", 256)])
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("convolution", ["cudnn", "own"])
def test_within_three_tensors_and_a_fifth(name, latent, op, convolution):
    """Activations, scratch, workspace and output, in T = 128 H W 2 bytes: at most 3.2. Planned by our planner with the
    workspaces of the cuDNN at hand, which on the emulator are a stand-in's."""
    parts = "decoder" if op == "decode" else "encoder"
    there = VAE.random(name, device="cuda", dtype="bfloat16", parts=parts, convolution=convolution)
    side = latent * 8
    run = there.estimate(op, side, side, staged=False)
    assert (run.peak_bytes - run.weights_bytes) / (128 * side * side * 2) <= 3.2


def test_too_little_memory_says_what_would_fit(monkeypatch):
    emulator, there = gpu.emulator(), on_gpu("flux", "bfloat16")
    z, weights = latents(there, 24, 24), there.reserved_bytes
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + (1 << 18)))
    with refused(names=["96x96", "cuda:0: "], kind=MemoryError):
        there.decode(z)
    assert there.reserved_bytes == weights  # nothing is left of it


# ---- the plan of the last run ----


def test_an_equal_run_is_not_planned_again():
    """Planning allocates in the core. A second run of the same kind allocates less, and gives the same bits."""
    there = small_vae("odd", device="cuda", dtype="bfloat16")

    def run(latent):
        _core.fail_alloc_at(1 << 40)
        image = there.decode(latent)
        return image, (1 << 40) - _core.fail_alloc_at(0)

    one, other = latents(there, 3, 2), latents(there, 2, 3)
    there.decode(one), there.decode(other)  # cuDNN's plans, and an arena that is large enough for both
    first, planned = run(one)
    again, kept = run(one)
    assert kept < planned and (first == again).all()
    assert run(other)[1] > kept and run(one)[1] == planned and run(one)[1] == kept
    there.trim()
    assert run(one)[1] > kept  # the plan went with the arena
    assert (run(one)[0] == first).all()


# ---- limits ----


def latent_sides():
    """A GPU counts pages of 2 MiB, in which all plans of a small image are equal."""
    return (144, 96) if gpu.place() == "gpu" else (12, 8)


def limits_of(there, *ask, **how):
    """Of every plan, the fastest first."""
    return [max(run.peak_bytes, run.reserved_bytes) for run in there.tradeoff(*ask, **how)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["odd", "qwen"])
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_a_limit_is_kept_and_does_not_show(name, dtype, op):
    cpu, there = pair(name, dtype)
    h, w = latent_sides()
    data = latents(cpu, h, w, batch=2) if op == "decode" else images(4 * h, 4 * w, batch=2)

    def run(vae, **limit):
        return vae.decode(data, **limit) if op == "decode" else vae.encode(data, **limit).mean

    want, whole = run(cpu), run(there)
    first = there.last_run
    limits = [*limits_of(there, op, 4 * h, 4 * w, 2), there.smallest(op, 4 * h, 4 * w, 2)]
    assert len(limits) > 3 and limits[-1] == min(limits) < limits[0] == max(limits)
    for limit in limits:
        there.trim()
        got = run(there, memory_limit=limit)
        assert error(got, want) < LIMIT[dtype] * (1 if op == "decode" else 2)
        taken, planned = there.last_run, there.estimate(op, 4 * h, 4 * w, 2, memory_limit=limit)
        assert [f for f in vars(taken) if getattr(taken, f) != getattr(planned, f)] == ["pass_seconds", "seconds"]
        assert max(taken.peak_bytes, taken.reserved_bytes) <= limit
    assert there.last_run.peak_bytes < first.peak_bytes and there.last_run.work > first.work == 1
    there.memory_limit = limits[0]
    assert (run(there) == whole).all() and there.last_run.peak_bytes == first.peak_bytes


def test_a_limit_is_kept_by_the_driver():
    emulator = gpu.emulator()
    before = emulator.settled()[0]
    there = small_vae("odd", device="cuda")
    z, limit = latents(there, 12, 8), there.smallest("decode", 48, 32)
    emulator.peak()
    there.decode(z, memory_limit=limit)
    before += there.unaccounted_bytes
    assert emulator.peak() - before <= limit
    there.decode(z)
    assert emulator.live()[0] - before > limit
    there.decode(z, memory_limit=limit)
    assert emulator.live()[0] - before <= limit, "the arena of the run before it is given back"


def test_limits_of_arrays_on_it():
    cpu, there = pair("odd")
    z = latents(cpu, 12, 8)
    for limit in limits_of(there, "decode", 48, 32, staged=False):
        there.trim()
        assert error(there.decode(gpu.Array(z), memory_limit=limit).numpy(), cpu.decode(z)) < LIMIT["float32"]
        planned = there.estimate("decode", 48, 32, staged=False, memory_limit=limit)
        assert there.last_run.peak_bytes == planned.peak_bytes <= limit
    smallest = there.smallest("decode", 48, 32, staged=False)
    with refused("memory_limit") as caught:
        there.decode(gpu.Array(z), memory_limit=smallest - 1)
    assert caught.value.smallest == smallest <= limit


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("convolution", ["cudnn", "own"])
def test_below_the_smallest_plan(op, convolution):
    there = on_gpu("sd", "bfloat16 own" if convolution == "own" else "bfloat16")
    smallest = there.smallest(op, 32, 24)
    data = latents(there, 8, 6) if op == "decode" else images(32, 24)
    for call in (
        lambda limit: there.estimate(op, 32, 24, memory_limit=limit),
        lambda limit: getattr(there, op)(data, memory_limit=limit),
    ):
        for limit in (smallest - 1, 1):
            with refused("memory_limit", names=["32x24"]) as caught:
                call(limit)
            assert caught.value.smallest == smallest
    getattr(there, op)(data, memory_limit=smallest)
    assert there.last_run.peak_bytes <= smallest
    height, width = there.largest(op, smallest)
    assert there.estimate(op, height, width, memory_limit=smallest).peak_bytes <= smallest
    with refused("memory_limit"):
        there.estimate(op, height + 4, width + 4, memory_limit=smallest)


def test_plain_float32_pays_for_its_first_engine_where_the_limit_allows():
    """The stand-in's wants more than the 1 MiB that a small image's stripes leave to others; the next one some KiB."""
    gpu.emulator()
    cpu, there = pair("odd")
    z = latents(cpu, 12, 8)
    first, second, *_ = there.tradeoff("decode", 48, 32)
    assert first.workspace_bytes > 1 << 20 > 16 << 10 > second.workspace_bytes
    for limit, want in ((None, first), (limits_of(there, "decode", 48, 32)[0], first), (first.peak_bytes - 1, second)):
        assert error(there.decode(z, memory_limit=limit), cpu.decode(z)) < LIMIT["float32"]
        assert there.last_run.workspace_bytes == want.workspace_bytes
    halves = on_gpu("odd", "float16")
    assert all(run.workspace_bytes <= 16 << 10 for run in halves.tradeoff("decode", 48, 32))


def test_auto_is_what_the_gpu_has_free_when_a_run_begins(monkeypatch):
    """Others take of the GPU between runs: plans become smaller, and then none fit."""
    emulator = gpu.emulator()
    there = small_vae("odd", device="cuda")
    z, weights, limits = latents(there, 12, 8), there.reserved_bytes, limits_of(there, "decode", 48, 32)
    there.memory_limit = "auto"
    for limit in [*limits, there.smallest("decode", 48, 32) - 1]:
        there.trim()
        free = (limit - weights) * 8 // 7  # of which an eighth is for others
        monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + free))
        if limit < min(limits):
            with refused("memory_limit"):
                there.decode(z)
        else:
            there.decode(z)
            run = there.last_run
            assert max(run.peak_bytes, run.reserved_bytes) == limit and run.notes == ()


def test_graphs_of_other_limits_do_not_mix():
    cpu, there = pair("odd")
    there.graphs = True
    h, w = latent_sides()
    z = latents(cpu, h, w)
    want, limits = cpu.decode(z), limits_of(there, "decode", 4 * h, 4 * w)
    there.decode(z)  # an arena that the others find large enough
    for limit in [None, limits[-1], None, limits[1]] * 3:
        assert error(there.decode(z, memory_limit=limit), want) < LIMIT["float32"]


# ---- timed engines ----


@pytest.mark.parametrize("graphs", [False, True])
def test_autotune_times_and_keeps(graphs):
    cpu = small_vae("odd")
    there = small_vae("odd", device="cuda", dtype="bfloat16", autotune=True)
    there.graphs = graphs
    z = latents(cpu, 5, 6)
    want = there.estimate("decode", 20, 24)
    for _ in range(3):
        assert error(there.decode(z), cpu.decode(z)) < LIMIT["bfloat16"]
        assert there.last_run.peak_bytes == want.peak_bytes
