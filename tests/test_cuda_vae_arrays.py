"""Arrays of other libraries on a GPU, or on the emulator: DLPack, streams, what a DeviceArray cannot."""

import ctypes
import gc
import pickle
import sys
import threading
import types

import gpu
import numpy as np
import pytest
from engine import error, images, latents, small_vae
from errors import refused
from gpu import LIMIT, every_dtype, pair

import vaemem

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.core]


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
    with refused("z"):
        there.decode(gpu.Array(z, device=3))
    with refused("z", "(1, 3, 4, 4)"):
        there.decode(gpu.Array(z[:, :3]))
    with refused("z", "uint8"):
        there.decode(gpu.Array(z.astype(np.uint8)))
    with refused("z", kind=TypeError):
        there.decode(Strange(z))
    with refused("out"):
        there.decode(gpu.Array(z), out=gpu.Array(np.zeros((1, 3, 8, 8), np.float32)))
    with refused("x"):
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
    stream.wait_stream(torch.cuda.current_stream())  # z is made there
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
    with emulator.capturing(stream), refused("stream"):
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


def test_tiles_on_the_callers_stream(monkeypatch):
    """z is on its way on that stream when the call begins, and the library's array is ready when it is over."""
    emulator = gpu.emulator()
    cpu, there = pair("flux")
    stream, tiling = emulator.stream(), vaemem.Tiling(16)
    torch = types.SimpleNamespace(float32=None)
    torch.empty = lambda shape, dtype, device: Tensor(np.full(shape, np.nan, np.float32))
    torch.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream))
    monkeypatch.setitem(sys.modules, "torch", torch)
    z = latents(cpu, 6, 5, batch=2)
    given = Tensor(np.zeros_like(z))
    with given:
        data = ctypes.c_void_p(z.ctypes.data)
        size = ctypes.c_size_t(z.nbytes)
        assert not given.driver.cuMemcpyHtoDAsync_v2(given.address, data, size, ctypes.c_uint64(stream))
    got = there.decode(given, tiling=tiling)
    assert isinstance(got, Tensor) and error(got.numpy(), cpu.decode(z, tiling=tiling)) < LIMIT["float32"]
    out = Tensor(np.zeros((2, 24, 20, 3), np.uint8))
    assert there.decode(given, output_type="uint8", out=out, tiling=tiling) is out
    assert np.abs(out.numpy().astype(int) - cpu.decode(z, output_type="uint8", tiling=tiling)).max() <= 1
    with refused("out"):
        there.decode(given, tiling=tiling, out=out)


def test_a_device_array_says_what_it_cannot():
    there = small_vae("flux", device="cuda")
    array = there.decode(gpu.Array(latents(there, 2, 2)))
    assert isinstance(array, vaemem.DeviceArray)
    with refused(names=["cuda:0: ", ".numpy()"], kind=TypeError):
        np.asarray(array)
    with refused(names=["from_dlpack"], kind=TypeError):
        _ = there.encode(array).mean
    with refused("VAE", kind=TypeError):
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
    got = vaemem.Encoded(Plain(moments)).sample(noise=Plain(noise)).values
    assert np.allclose(got, moments[:, :4] + np.exp(moments[:, 4:] / 2) * noise)


def test_what_wants_host_memory():
    there = small_vae("flux", device="cuda")
    x, z = images(9, 8), latents(there, 2, 2)
    with refused("pad"):
        there.encode(gpu.Array(x), pad="edge")
    with refused("output_type", "'pil'"):
        there.decode(gpu.Array(z), output_type="pil")
    with refused("copy"):
        there.copy()
    with refused("state_dict"):
        there.state_dict()
    cpu = small_vae("flux")
    assert error(there.encode(x, pad="edge").moments, cpu.encode(x, pad="edge").moments) < LIMIT["float32"]
    assert there.decode(z, output_type="pil", size=(7, 5))[0].size == (5, 7)


@every_dtype
def test_a_copy_is_what_random_makes_there(dtype):
    """The same weights, rounded once, on their way to the GPU."""
    kind, _, own = dtype.partition(" ")
    there = gpu.on_gpu("flux", dtype)
    copy = small_vae("flux").copy("cuda", kind, convolution=own or "cudnn")
    z = latents(there, 4, 4)
    assert (copy.device, copy.dtype) == (there.device, there.dtype)
    assert np.array_equal(copy.decode(z), there.decode(z))


def test_cancelled_and_closed():
    emulator = gpu.emulator()
    small_vae("flux", device="cuda").close()  # opens the driver
    before = emulator.settled()
    cpu, there = pair("flux")
    z, event = latents(cpu, 4, 4), threading.Event()
    event.set()
    with pytest.raises(vaemem.Cancelled):
        there.decode(gpu.Array(z), cancel=event)
    event.clear()
    assert error(there.decode(gpu.Array(z), cancel=event).numpy(), cpu.decode(z)) < LIMIT["float32"]
    assert emulator.live()[0] > before[0] and there.last_run.seconds is not None
    there.close()
    gc.collect()
    assert emulator.live()[:8] == before[:8], "but for the contexts that arrays retain"
