"""Whole runs on a GPU, or on the emulator where there is none (gpu.py): numbers, memory, arrays, faults.

Tolerances. float32 without TF32: 1e-5 of the norm, the project's bar. Halves: 1.1 times PyTorch's own error in the same
type, the project's bar; where torch is not compared, one rounding of size u = 2^-9 (bfloat16) or 2^-12 (float16) for
each of about 30 passes, added as random numbers are, is 6 u: 12 u leaves room for weights, which are rounded too.
"""

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import gpu
import numpy as np
import pytest
from engine import SMALL, config, error, images, latents, small_vae

import vaemem
from vaemem import VAE, _core

CUDA = Path(__file__).resolve().parents[1] / "kernels" / "cuda"
U = {"float32": 1e-6, "float16": 2.0**-12, "bfloat16": 2.0**-9}
LIMIT = {"float32": 1e-5, "float16": 12 * U["float16"], "bfloat16": 12 * U["bfloat16"]}
LIMIT |= {f"{dtype} own": LIMIT[dtype] for dtype in ("float16", "bfloat16")}  # our own convolution
every_dtype = pytest.mark.parametrize("dtype", LIMIT)


@pytest.fixture(autouse=True)
def somewhere(monkeypatch):
    gpu.go(monkeypatch)


def on_gpu(name="sd", dtype="float32"):
    dtype, _, own = dtype.partition(" ")
    return small_vae(name, device="cuda", dtype=dtype, convolution=own or "cudnn")


def pair(name="sd", dtype="float32"):
    return small_vae(name), on_gpu(name, dtype)


# ---- numbers ----


@every_dtype
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [(4, 4), (12, 5), (3, 16)])
def test_decode(name, dtype, size):
    cpu, there = pair(name, dtype)
    z = latents(cpu, *size, batch=2)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT[dtype]


@every_dtype
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [(16, 16), (48, 20), (12, 64)])
def test_encode(name, dtype, size):
    cpu, there = pair(name, dtype)
    x = images(*size, batch=2)
    got, want = there.encode(x), cpu.encode(x)
    assert error(got.mean, want.mean) < LIMIT[dtype] * 2  # means are small beside what they are summed from
    assert error(got.logvar, want.logvar) < LIMIT[dtype] * 2


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float16 own", "bfloat16 own"])
def test_no_worse_than_torch(kind):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    cpu, there = pair("sd", kind)
    dtype = there.dtype
    peer = diffusers.AutoencoderKL(**{k: v for k, v in config("sd").items() if not k.startswith("_")}).eval()
    state = {name: torch.from_numpy(cpu._core.get_tensor(name).reshape(shape)) for name, shape in cpu._core.tensors}
    peer.load_state_dict(state)
    z = latents(cpu, 16, 16)
    with torch.no_grad():
        want = peer.double().decode(torch.from_numpy(z).double()).sample.numpy()
        theirs = peer.to(getattr(torch, dtype)).decode(torch.from_numpy(z).to(getattr(torch, dtype))).sample
    assert error(there.decode(z), want) <= 1.1 * error(theirs.float().numpy(), want)


def test_tf32_is_that_and_said():
    """Factors of 11 bits: an error beyond float32's and within what 12 roundings of 2^-11 make."""
    cpu = small_vae("sd")
    there = small_vae("sd", device="cuda", tf32=True)
    z = latents(cpu, 8, 8)
    assert LIMIT["float32"] < error(there.decode(z), cpu.decode(z)) < 12 * 2.0**-11
    assert "tf32" in there.last_run.backend


@every_dtype
def test_bytes_in_and_out(dtype):
    cpu, there = pair("flux", dtype)
    z = latents(cpu, 6, 5)
    got, want = there.decode(z, output_type="uint8"), cpu.decode(z, output_type="uint8")
    assert got.dtype == np.uint8 and got.shape == want.shape
    assert np.abs(got.astype(int) - want).mean() < 255 * LIMIT[dtype] + 0.05  # a rounding may fall the other way
    moments = there.encode(want).mean
    assert error(moments, cpu.encode(want).mean) < LIMIT[dtype] * 2


def test_scaled_latents():
    cpu, there = pair("flux")
    z = latents(cpu, 4, 4)
    assert error(there.decode(z, scaled=True), cpu.decode(z, scaled=True)) < LIMIT["float32"]


@pytest.mark.parametrize("stripe_bytes", [1, 20_000, 10**9])
def test_stripes_do_not_show(stripe_bytes):
    cpu, there = pair("odd")
    there.stripe_bytes = stripe_bytes
    z = latents(cpu, 7, 9)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT["float32"]
    x = images(28, 36)
    assert error(there.encode(x).mean, cpu.encode(x).mean) < LIMIT["float32"]


@every_dtype
def test_the_same_bits_again(dtype):
    there = on_gpu("sd", dtype)
    z = latents(there, 8, 8)
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


@pytest.mark.parametrize("kind", ["float16", "float16 own"])
def test_overflow_is_avoided_and_said(kind):
    plain, (cpu, there) = small_vae("flux"), pair("flux", kind)
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


def test_nan_is_not_taken_for_overflow_for_ever():
    there = small_vae("flux", device="cuda", dtype="float16")
    z = latents(there, 4, 4)
    good = there.decode(z)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert np.isnan(there.decode(z * np.nan)).all()
    assert any("not finite" in str(w.message) for w in seen)
    assert (there.decode(z) == good).all()


# ---- memory ----


@every_dtype
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("batch", [1, 2])
def test_estimate_is_what_is_taken(dtype, op, batch):
    there = on_gpu("sd", dtype)
    weights = there.reserved_bytes
    want = there.estimate(op, 48, 32, batch)
    there.decode(latents(there, 12, 8, batch)) if op == "decode" else there.encode(images(48, 32, batch))
    got = there.last_run
    for name in ("weights", "activations", "scratch", "workspace", "output", "reserved"):
        assert getattr(got, f"{name}_bytes") == getattr(want, f"{name}_bytes"), name
    assert got.timeline == want.timeline and got.peak_bytes == want.peak_bytes
    assert there.reserved_bytes == got.reserved_bytes  # all of it is the arena, kept for the next run
    there.trim()
    assert there.reserved_bytes == weights


@every_dtype
def test_the_device_has_given_what_we_say(dtype):
    emulator = gpu.emulator()
    before = emulator.live()[0]
    there = on_gpu("sd", dtype)
    emulator.peak()
    there.decode(latents(there, 8, 8))
    rounding = 2 * 255  # two blocks, weights and arena, which the driver rounds up to 256 bytes
    assert 0 <= emulator.peak() - before - there.last_run.reserved_bytes <= rounding
    assert 0 <= emulator.live()[0] - before - there.reserved_bytes <= rounding
    assert 0 <= there.unaccounted_bytes <= rounding  # the emulator loses nothing else
    del there
    assert emulator.live()[0] == before


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


def test_too_little_memory_says_what_would_fit():
    gpu.emulator()
    there = VAE.random("flux", device="cuda", dtype="bfloat16", parts="decoder")
    z = latents(there, 256, 256)
    with pytest.raises(
        MemoryError, match=r"decode of 2048x2048 needs .* MiB more and .* are free on cuda:0: \d+x\d+ would fit"
    ):
        there.decode(z)
    assert there.reserved_bytes == there.estimate("decode", 8, 8).weights_bytes  # nothing is left of it


# ---- arrays of other libraries ----


@every_dtype
def test_dlpack(dtype):
    cpu, there = pair("flux")
    z = latents(cpu, 6, 4, batch=2)
    got = there.decode(gpu.Array(z))
    assert got.shape == (2, 3, 24, 16) and got.dtype == "float32" and got.__dlpack_device__() == (2, 0)
    assert error(got.numpy(), cpu.decode(z)) < LIMIT["float32"]
    halves = gpu.Array(z.astype(np.float16))
    got = there.decode(halves)
    assert got.dtype == "float16"
    assert error(got.numpy(), cpu.decode(z.astype(np.float16))) < LIMIT["float16"]


def test_dlpack_out_is_written_and_returned():
    cpu, there = pair("flux")
    z = latents(cpu, 4, 4)
    out = gpu.Array(np.full((1, 3, 16, 16), 7, np.float32))
    assert there.decode(gpu.Array(z), out=out) is out
    assert error(out.numpy(), cpu.decode(z)) < LIMIT["float32"]
    out8 = gpu.Array(np.zeros((1, 16, 16, 3), np.uint8))
    there.decode(gpu.Array(z), out=out8, output_type="uint8")
    assert (out8.numpy() == there.decode(z, output_type="uint8")).all()


def test_dlpack_chain_without_waiting():
    """What one run leaves another may read at once: they are ordered on the GPU, not by the host."""
    cpu, there = pair("flux")
    z = latents(cpu, 4, 4)
    image = there.decode(gpu.Array(z))
    back = there.encode(image)
    want = cpu.encode(cpu.decode(z)).moments
    assert error(back.moments.numpy(), want) < 2 * LIMIT["float32"]


def test_dlpack_refusals():
    there = small_vae("flux", device="cuda")
    z = latents(there, 4, 4)
    with pytest.raises(ValueError, match="z: want an array on cuda:0, got one on device"):
        there.decode(gpu.Array(z, device=3))
    with pytest.raises(ValueError, match=r"z: want float32, float16 or bfloat16 of shape \(N, 16, h, w\)"):
        there.decode(gpu.Array(z[:, :3]))
    with pytest.raises(TypeError, match="another dtype"):
        there.decode(Strange(z))
    with pytest.raises(ValueError, match="out: want float32 of shape"):
        there.decode(gpu.Array(z), out=gpu.Array(np.zeros((1, 3, 8, 8), np.float32)))
    with pytest.raises(ValueError, match="x: want shape"):
        there.encode(gpu.Array(z))
    assert there.decode(z).shape == (1, 3, 16, 16)


class Strange:
    """An array of a type that is not ours."""

    def __init__(self, z):
        self.z = z

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream=None):
        return self.z.astype(np.float64).__dlpack__()


def test_torch_on_the_gpu():
    if gpu.place() != "gpu":
        pytest.skip("torch needs a GPU")
    torch = pytest.importorskip("torch")
    cpu, there = pair("flux", "bfloat16")
    z = torch.from_numpy(latents(cpu, 8, 8)).cuda().bfloat16()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = there.decode(z * 1)
        doubled = got * 2
    stream.synchronize()
    want = cpu.decode(z.float().cpu().numpy())
    assert got.dtype == torch.bfloat16 and error(doubled.float().cpu().numpy() / 2, want) < LIMIT["bfloat16"]
    out = torch.empty_like(got)
    assert there.decode(z, out=out) is out and torch.equal(out, got)


def test_reading_while_decoding():
    """An array is read with the same pinned memory that NumPy arrays pass through."""
    cpu, there = pair("flux")
    z = latents(cpu, 4, 4)
    want, image = cpu.decode(z), there.decode(gpu.Array(z))
    first, stop, wrong = image.numpy(), threading.Event(), []

    def read():
        while not stop.is_set():
            if not (image.numpy() == first).all():
                wrong.append("read")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wrong += ["decoded" for _ in range(40) if error(there.decode(z), want) >= LIMIT["float32"]]
    finally:
        stop.set()
        reader.join()
    assert not wrong


def test_a_stream_that_is_captured_is_refused(monkeypatch):
    emulator = gpu.emulator()
    there = small_vae("flux", device="cuda")
    z = Tensor(latents(there, 4, 4))
    stream = emulator.stream()
    current = types.SimpleNamespace(cuda_stream=stream)
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(current_stream=lambda device: current))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with emulator.capturing(stream), pytest.raises(ValueError, match="stream: want one that is not being captured"):
        there.decode(z)


class Tensor(gpu.Array):
    """What a torch tensor on a GPU is to us."""

    __module__ = "torch"


@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams_one_arena(monkeypatch, graphs):
    """Runs put on two streams of the caller's, none waited for: they share an arena, so each must wait for the one
    before, and the emulator's streams run only when somebody waits, here the last one first."""
    emulator = gpu.emulator()
    cpu, there = pair("flux")
    there.graphs = graphs
    streams = [emulator.stream(), emulator.stream()]
    torch = types.SimpleNamespace(float32=None)
    torch.empty = lambda shape, dtype, device: Tensor(np.full(shape, np.nan, np.float32))
    monkeypatch.setitem(sys.modules, "torch", torch)
    zs = [latents(cpu, 4, 4, seed=i) for i in range(5)]
    images_ = []
    for i, z in enumerate(zs):
        torch.cuda = types.SimpleNamespace(
            current_stream=lambda device, i=i: types.SimpleNamespace(cuda_stream=streams[i % 2])
        )
        images_.append(there.decode(Tensor(z)))
        assert there.last_run.seconds is None
    for stream in streams[::-1]:
        emulator.synchronize(stream)
    for z, image in zip(zs, images_, strict=True):
        assert error(image.numpy(), cpu.decode(z)) < LIMIT["float32"]


# ---- threads, interruption, faults ----


def test_two_vaes_in_two_threads():
    cpu = small_vae("sd")
    z = latents(cpu, 6, 6)
    want, got = cpu.decode(z), {}

    def work(i):
        there = small_vae("sd", device="cuda")
        got[i] = [there.decode(z) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(error(image, want) < LIMIT["float32"] for images_ in got.values() for image in images_)


def test_one_vae_in_two_threads():
    cpu, there = pair("sd")
    zs = [latents(cpu, 6, 6, seed=i) for i in range(4)]
    got = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: there.decode(zs[i])})) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(error(got[i], cpu.decode(zs[i])) < LIMIT["float32"] for i in range(4))


def test_interrupted_and_usable():
    cpu, there = pair("sd")
    z = latents(cpu, 6, 6)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        there.decode(z, progress=stop)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT["float32"]


def test_progress_counts_to_the_end():
    there = small_vae("sd", device="cuda")
    seen = []
    there.decode(latents(there, 6, 6), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


@pytest.mark.parametrize("graphs,dtype", [(False, "float32"), (True, "float32"), (False, "float16 own")])
def test_every_driver_call_fails_once(graphs, dtype):
    """Whatever the driver refuses: an exception with its words, nothing kept, and the next run is right."""
    emulator = gpu.emulator()
    cpu, there = pair("odd", dtype)
    there.graphs = graphs
    z = latents(cpu, 3, 2)
    want = cpu.decode(z)
    there.decode(z)
    for n in range(1, 100_000):
        if n > 30 and n % (97 if dtype != "float32" else 11):  # the middle of a run is much like itself
            continue
        with emulator.failing(n) as came:
            try:
                there.decode(z)
            except (RuntimeError, MemoryError) as fault:
                assert "CUDA" in str(fault), fault
            else:
                if not came():
                    break
        assert error(there.decode(z), want) < LIMIT[dtype], n
    assert n > (10 if graphs else 50)


def test_opening_fails_at_every_call_and_keeps_nothing():
    emulator = gpu.emulator()
    small_vae("odd", device="cuda")
    before = emulator.live()
    for n in range(1, 10_000):
        with emulator.failing(n) as came:
            opened = None
            with contextlib.suppress(RuntimeError, ValueError, MemoryError):
                opened = vaemem.engine.device.Device(0, "float32", False, False)
            if not came():
                break
        del opened
        assert emulator.live() == before, n
    assert n > 50


GONE = """
import gpu, numpy as np, pytest
from engine import latents, small_vae
there = small_vae("odd", device="cuda")
z = latents(there, 2, 2)
with gpu.Emulator().failing(1, 709, sticky=True):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CUDA: .*709"):
            there.decode(z)
del there
with pytest.raises(RuntimeError, match="CUDA: .*709"):
    small_vae("odd", device="cuda")
assert np.isfinite(small_vae("odd").decode(z)).all()
"""


def test_a_context_that_is_gone():
    """Somebody destroyed it: every call says so, closing does not crash, the CPU works on. Nothing brings it back."""
    gpu.emulator()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_every_allocation_fails_once():
    cpu, there = pair("odd")
    z = latents(cpu, 3, 2)
    want, n = cpu.decode(z), 0
    while True:
        n += 1
        there.trim()
        _core.fail_alloc_at(n)
        try:
            there.decode(z)
        except MemoryError:
            assert _core.fail_alloc_at(0) == 0
            assert error(there.decode(z), want) < LIMIT["float32"]
            continue
        assert _core.fail_alloc_at(0) > 0
        break
    assert n > 3


# ---- refusals ----


def test_bad_arguments():
    with pytest.raises(ValueError, match="device: want cpu, cuda or cuda:N, got 'gpu'"):
        small_vae("sd", device="gpu")
    with pytest.raises(ValueError, match=r"device: want one of \d+ \(cuda:0.*\), got cuda:77"):
        small_vae("sd", device="cuda:77")
    with pytest.raises(ValueError, match="dtype: want one of float32, float16, bfloat16, got 'int8'"):
        small_vae("sd", device="cuda", dtype="int8")
    with pytest.raises(ValueError, match="convolution: want cudnn or own, got 'mine'"):
        small_vae("sd", device="cuda", dtype="float16", convolution="mine")
    with pytest.raises(ValueError, match="convolution: our own is for float16 and bfloat16, got dtype float32"):
        small_vae("sd", device="cuda", convolution="own")
    with pytest.raises(ValueError, match="tf32: want dtype float32, got float16"):
        small_vae("sd", device="cuda", dtype="float16", tf32=True)
    there = small_vae("sd", device="cuda")
    with pytest.raises(ValueError, match="save: want a VAE on the cpu"):
        there.save("x.safetensors")
    with pytest.raises(ValueError, match="want a model on the CPU"):
        there._core.get_tensor("decoder.conv_in.bias")
    there.stripe_bytes = 0
    with pytest.raises(ValueError, match="stripe_bytes: want 1 or more"):
        there.estimate("decode", 8, 8)


def test_bfloat16_wants_ampere(monkeypatch):
    gpu.emulator()
    monkeypatch.setenv("VAEMEM_EMULATED_SM", "75")
    with pytest.raises(
        ValueError, match=r"dtype: want a GPU of compute capability 8.0 or later for bfloat16, got .* 7.5"
    ):
        small_vae("sd", device="cuda", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"tf32: want a GPU of compute capability 8.0 or later, got .* 7.5"):
        small_vae("sd", device="cuda", tf32=True)
    cpu, there = pair("sd", "float16")
    z = latents(cpu, 4, 4)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT["float16"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_must_be_finite(bad):
    there = small_vae("sd", device="cuda")
    with pytest.raises(ValueError, match=r"decoder.conv_in.bias: want finite numbers, got Inf or NaN"):
        there._core.set_tensor("decoder.conv_in.bias", np.full(64, bad, np.float32))
    half = small_vae("sd", device="cuda", dtype="float16")
    with pytest.raises(ValueError, match=r"decoder.conv_in.weight: want numbers within float16's range"):
        half._core.set_tensor("decoder.conv_in.weight", np.full((64, 4, 3, 3), 7e4, np.float32))


def test_backends_names_it():
    row = next(row for row in vaemem.backends() if row["device"] != "cpu")
    assert row["usable"] and row["device"] == "cuda:0" and not row["chosen"]


def test_no_driver_and_an_old_one():
    gpu.emulator()
    show = "import vaemem; print(vaemem.backends()[-1]['why']); vaemem.VAE.random('sdxl', device='cuda')"
    for name, value, why in (
        (
            "VAEMEM_LIBCUDA",
            "/nowhere/libcuda.so.1",
            "CUDA: want an NVIDIA driver, got /nowhere/libcuda.so.1: cannot open",
        ),
        ("VAEMEM_EMULATED_DRIVER", "11040", "CUDA: want a driver for CUDA 12.0 or later, got one for 11.4"),
    ):
        environment = os.environ | {name: value}
        done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, env=environment)
        assert why in done.stdout and f"RuntimeError: {why}" in done.stderr, done


def test_run_on_the_cpu_only():
    with pytest.raises(ValueError, match="run_at: want a model on a device"):
        small_vae("sd")._core.run_at("decode", 0, 0, 8, 8)


def test_sweep_on_it():
    config_vae = small_vae("sd", device="cuda", dtype="bfloat16")
    (row,) = vaemem.sweep(config_vae, "decode", 32)
    (estimate,) = vaemem.sweep(config_vae, "decode", 32, measure=False)
    assert row["device"] == "cuda:0" and row["dtype"] == "bfloat16" and row["seconds"] > 0
    assert row["allocated_bytes"] == estimate["allocated_bytes"]
    with pytest.raises(ValueError, match="dtypes: the VAE on cuda:0 computes in bfloat16, got 'float16'"):
        vaemem.sweep(config_vae, "decode", 32, "float16")


def test_own_convolution_needs_no_cudnn(monkeypatch, tmp_path):
    gpu.emulator()
    (tmp_path / "libcudnn.so.9").write_bytes(b"no library")
    monkeypatch.setenv("VAEMEM_CUDNN", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"cuDNN: want libcudnn.so.9"):
        gpu_process('VAE.random("sdxl", device="cuda", dtype="float16", parts="decoder")')
    gpu_process('VAE.random("sdxl", device="cuda", dtype="float16", convolution="own").estimate("decode", 64, 64)')
    gpu_process('VAE.random("sdxl", device="cuda", dtype="float16", convolution="own").estimate("encode", 64, 64)')


def gpu_process(code):
    """In a process of its own, which has no cuDNN yet."""
    code = f"from vaemem import VAE\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(done.stderr)


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


def machine_code(data: bytes):
    """Each fat binary in data: {(kind, architecture)}, kind 1 PTX, 2 machine code."""
    magic = (0xBA55ED50).to_bytes(4, "little")
    at = data.find(magic)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end, found = at + header, at + header + size, set()
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            found.add((kind, *struct.unpack_from("<I", data, entry + 28)))
            entry += entry_header + entry_size
        yield found
        at = data.find(magic, end)


def test_machine_code_for_every_gpu():
    wanted = os.environ.get("VAEMEM_CUDA_ARCHS", "75 80 86 89 90")  # 100 and 120 since nvcc 12.8
    want = {(1, 90)} | {(2, int(arch)) for arch in wanted.split()}
    found = list(machine_code(Path(gpu._cuda.__file__).read_bytes()))
    assert len(found) == len(list(CUDA.glob("*.cu")))
    assert all(want <= archs for archs in found), found


def test_a_device_array_says_what_it_cannot():
    there = small_vae("flux", device="cuda")
    array = there.decode(gpu.Array(latents(there, 2, 2)))
    assert isinstance(array, vaemem.DeviceArray)
    with pytest.raises(TypeError, match=r"DeviceArray on cuda:0: NumPy cannot read it there; .numpy\(\) copies it"):
        np.asarray(array)
    with pytest.raises(TypeError, match=r"take it to a library first"):
        _ = there.encode(array).mean
    with pytest.raises(TypeError, match="VAE: cannot be pickled or copied"):
        pickle.dumps(there)
    with pytest.raises(AttributeError):
        there.device = "cpu"


class Plain:
    """An array of a library with operators and nothing else."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __getitem__(self, index):
        return Plain(self.values[index])

    def __add__(self, other):
        return Plain(self.values + getattr(other, "values", other))

    def __mul__(self, other):
        return Plain(self.values * getattr(other, "values", other))

    def __rpow__(self, base):
        return Plain(base**self.values)


def test_sampling_where_no_function_is_known():
    moments, noise = np.random.default_rng(0).standard_normal((2, 1, 8, 3, 3))
    noise = noise[:, :4]
    got = vaemem.Encoded(Plain(moments), 1.0, 0.0).sample(noise=Plain(noise)).values
    assert np.allclose(got, moments[:, :4] + np.exp(moments[:, 4:] / 2) * noise)
