"""Encode and decode: parity with diffusers, determinism, formats, bad input, threads, interruption, faults."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from engine import BACKENDS, SMALL, config, error, images, latents, run_core, small_vae
from errors import is_about, refused, warned

import vaemem
from vaemem import VAE, _core
from vaemem._common import DTYPES, PRECISIONS, latent_factor
from vaemem.engine.arrays import DeviceArrays

pytestmark = [pytest.mark.core, pytest.mark.python]

# fp32 has 24 bits: 6e-8 a rounding. Some 60 layers of sums of up to 4608 terms leave 1e-6 here; a skipped bias or a
# swapped tensor leaves 1e-2 and more.
PARITY = 1e-5


def autoencoder(settings: dict, seed: int = 0):
    """diffusers' own model, initialised by diffusers, every tensor perturbed."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    settings = {k: v for k, v in settings.items() if k != "_class_name"}
    model = diffusers.AutoencoderKL(**settings).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape)
    return model


def ours(model, settings: dict) -> VAE:
    core = _core.Model(vaemem.engine.configs.read_config(settings))
    state = model.state_dict()
    for name, _ in core.tensors:
        core.set_tensor(name, state[name].contiguous().numpy())
    return VAE(core)


def compare(model, vae: VAE, h: int, w: int, batch: int, double: bool) -> None:
    import torch

    factor = latent_factor(vae.arch)
    x, z = images(h, w, batch), latents(vae, h // factor, w // factor, batch)
    dtype = torch.float64 if double else torch.float32
    model = model.to(dtype)
    with torch.no_grad():
        want = model.encode(torch.from_numpy(x).to(dtype)).latent_dist
        image = model.decode(torch.from_numpy(z).to(dtype)).sample.numpy()
    got = vae.encode(x)
    assert error(got.mean, want.mean.numpy()) <= PARITY
    assert error(got.logvar, want.logvar.numpy()) <= PARITY
    assert error(vae.decode(z), image) <= PARITY


@pytest.mark.parametrize("h,w,batch", [(32, 32, 1), (24, 40, 2), (4, 8, 1), (8, 300, 1)])
@pytest.mark.parametrize("name", SMALL)
def test_parity_small(name, h, w, batch):
    model = autoencoder(config(name))
    compare(model, ours(model, config(name)), h, w, batch, double=True)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_parity_full_size(name):
    arch = _core.models()[name]
    settings = {k: v for k, v in arch.items() if k not in ("name", "norm_eps")}
    settings |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    model = autoencoder(settings)
    vae = ours(model, settings)
    assert vae.parameters == sum(p.numel() for p in model.parameters())
    assert vae.parameters == {"sd15": 83_653_863, "sdxl": 83_653_863, "flux": 83_819_683}[name]
    compare(model, vae, 64, 96, 2, double=False)


@pytest.mark.parametrize("name", SMALL)
def test_instruction_sets_agree_and_threads_do_not_matter(name):
    vae = small_vae(name)
    x, z = images(24, 40), latents(vae, 6, 10)
    for op, data in (("encode", x), ("decode", z)):
        first = None
        for backend in BACKENDS:
            results = [run_core(vae._core, op, data, threads=n, backend=backend)[0] for n in (1, 2, 3, 7)]
            assert all(np.array_equal(results[0], r) for r in results), (op, backend)
            first = results[0] if first is None else first
            assert error(results[0], first.astype(np.float64)) <= PARITY


def test_batch_is_its_items():
    vae = small_vae()
    z, x = latents(vae, 5, 3, batch=3), images(20, 12, batch=3)
    assert np.array_equal(vae.decode(z), np.concatenate([vae.decode(z[i : i + 1]) for i in range(3)]))
    assert np.array_equal(vae.encode(x).mean, np.concatenate([vae.encode(x[i : i + 1]).mean for i in range(3)]))


# ---- formats ----


def test_uint8_both_ways():
    vae = small_vae()
    z = latents(vae, 6, 5) * 3
    image = vae.decode(z)
    as_bytes = vae.decode(z, output_type="uint8")
    want = np.rint(np.clip((image + 1) * np.float32(127.5), 0, 255)).transpose(0, 2, 3, 1)
    assert as_bytes.dtype == np.uint8 and as_bytes.shape == (1, 24, 20, 3)
    assert np.array_equal(as_bytes, want)
    assert as_bytes.min() == 0 and image.min() < -1  # the float image was not clamped, the bytes were
    x = (as_bytes.astype(np.float32) / np.float32(127.5) - 1).transpose(0, 3, 1, 2)
    assert np.array_equal(vae.encode(as_bytes).mean, vae.encode(x).mean)


def test_scaled_as_pipelines_do():
    vae = small_vae("flux")
    z = latents(vae, 4, 4)
    raw = z / np.float32(0.3611) + np.float32(0.1159)
    assert error(vae.decode(z, scaled=True), vae.decode(raw).astype(np.float64)) < 1e-5
    x = images(16, 16)
    plain, scaled = vae.encode(x), vae.encode(x, scaled=True)
    assert np.array_equal(plain.mean, scaled.mean)
    assert np.allclose(scaled.mode(), (plain.mean - np.float32(0.1159)) * np.float32(0.3611), rtol=1e-6)
    a, b = scaled.sample(7), scaled.sample(np.random.default_rng(7))
    assert np.array_equal(a, b) and not np.array_equal(a, scaled.sample(8))
    noise = np.random.default_rng(7).standard_normal(plain.mean.shape, dtype=np.float32)
    assert np.allclose(plain.sample(7), plain.mean + np.exp(plain.logvar / 2) * noise, rtol=1e-6)


def test_logvar_is_clamped():
    vae = small_vae()
    name = "quant_conv.bias"
    bias = vae._core.get_tensor(name)
    bias[4:6], bias[6:8], bias[:4] = 1e4, -1e4, 1e4
    vae._core.set_tensor(name, bias)
    got = vae.encode(images(8, 8))
    assert (got.logvar[:, :2] == 20).all() and (got.logvar[:, 2:] == -30).all()
    assert got.mean.max() > 20


def test_out_is_used_and_checked():
    vae = small_vae()
    z = latents(vae, 4, 4)
    want, out = vae.decode(z), np.full((1, 3, 16, 16), np.nan, np.float32)
    assert vae.decode(z, out=out) is out and np.array_equal(out, want)
    assert vae.last_run.output_bytes == 0
    misaligned = np.frombuffer(bytearray(1 + out.nbytes), np.float32, offset=1).reshape(out.shape)
    for bad in (np.zeros((1, 3, 16, 8), np.float32), np.zeros((1, 3, 16, 16)), out[..., ::-1], misaligned):
        with refused("out"):
            vae.decode(z, out=bad)
    out.flags.writeable = False
    with refused("out"):
        vae.decode(z, out=out)
    with refused("out", kind=TypeError):
        vae.decode(z, out=[1])


@pytest.mark.parametrize("output_type", ["float", "uint8"])
def test_out_apart_from_z(output_type):
    """Latents inside the images' memory would be overwritten before the second item is read."""
    vae = small_vae()
    memory = np.zeros(2 * 3 * 16 * 16, np.float32)
    z = memory[-2 * 4 * 4 * 4 :].reshape(2, 4, 4, 4)
    z[:] = latents(vae, 4, 4, batch=2)
    out = (
        memory.reshape(2, 3, 16, 16) if output_type == "float" else memory.view(np.uint8)[-1536:].reshape(2, 16, 16, 3)
    )
    with refused("out"):
        vae.decode(z, out=out, output_type=output_type)
    want = vae.decode(z, output_type=output_type)
    assert np.array_equal(vae.decode(z.copy(), out=out, output_type=output_type), want)
    beside = np.zeros(z.size + out.size, np.float32)
    left, right = beside[: z.size].reshape(z.shape), beside[z.size :].reshape(2, 3, 16, 16)
    left[:] = latents(vae, 4, 4, batch=2)
    assert np.array_equal(vae.decode(left, out=right), vae.decode(left))


def test_out_apart_from_z_on_a_device():
    z = SimpleNamespace(shape=(2, 4, 4, 4), dtype="float32", address=4096, end=4096 + 512)
    out = SimpleNamespace(shape=(2, 3, 16, 16), dtype="float32", address=4096 + 508, end=4096 + 508 + 6144)
    device = SimpleNamespace(
        dtype="float32",
        stream_of=lambda array: (0, True),
        backend=SimpleNamespace(check_stream=lambda stream: None),
        borrow=lambda array, name, stream: array,
    )
    with refused("out"):
        DeviceArrays(small_vae().arch, "decode", z, "float", out, device)


def test_odd_arrays_are_copied():
    vae = small_vae()
    z = latents(vae, 4, 6)
    want = vae.decode(z)
    assert np.array_equal(vae.decode(z.astype(">f4")), want)
    assert np.array_equal(vae.decode(np.asfortranarray(z)), want)
    assert np.array_equal(vae.decode(z.astype(np.float64)), want)
    misaligned = np.frombuffer(b"x" + z.tobytes(), np.float32, offset=1).reshape(z.shape)
    assert np.array_equal(vae.decode(misaligned), want)
    wide = np.repeat(z, 2, axis=3)
    assert np.array_equal(vae.decode(wide[..., ::2]), want)
    readonly = z.copy()
    readonly.flags.writeable = False
    assert np.array_equal(vae.decode(readonly), want)
    import ml_dtypes

    half = z.astype(ml_dtypes.bfloat16)
    assert np.array_equal(vae.decode(half), vae.decode(half.astype(np.float32)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_passes_through(bad):
    vae = small_vae()
    z = latents(vae, 4, 4)
    z[0, 1, 2, 3] = bad
    assert np.isnan(vae.decode(z)).all()  # one group's statistics reach every pixel, as in PyTorch
    assert np.isfinite(vae.decode(latents(vae, 4, 4))).all()


# ---- bad input ----


@pytest.mark.parametrize(
    "call,exception,message",
    [
        (lambda v: v.decode(np.zeros((1, 3, 4, 4))), ValueError, ("z", "(1, 3, 4, 4)")),
        (lambda v: v.decode(np.zeros((4, 4, 4))), ValueError, ("z", "(4, 4, 4)")),
        (lambda v: v.decode(np.zeros((0, 4, 4, 4))), ValueError, ("batch", 0)),
        (lambda v: v.decode(np.zeros((1, 4, 0, 4))), ValueError, ("height", 0)),
        (lambda v: v.decode(np.zeros((1, 4, 4, 4), complex)), TypeError, ("z",)),
        (lambda v: v.decode("latents"), TypeError, ("z",)),
        (lambda v: v.decode(np.zeros((1, 4, 4, 4)), output_type="jpeg"), ValueError, ("output_type", "'jpeg'")),
        (lambda v: v.encode(np.zeros((1, 4, 8, 8))), ValueError, ("x", "(1, 4, 8, 8)")),
        (lambda v: v.encode(np.zeros((1, 3, 10, 8))), ValueError, ("height", 10)),
        (lambda v: v.encode(np.zeros((1, 3, 8, 8), np.uint8)), ValueError, ("x", "(1, 3, 8, 8)")),
        (lambda v: v.estimate("decode", 12, 6), ValueError, ("width", 6)),
        (lambda v: v.estimate("decode", -8, 8), ValueError, ("height", -8)),
        (lambda v: v.estimate("paint", 8, 8), ValueError, ("op", "'paint'")),
        (lambda v: v.estimate("decode", 8.0, 8), TypeError, ("height", 8.0)),
        (lambda v: VAE.random("sd4"), ValueError, ("model", "'sd4'")),
        (lambda v: VAE.random("sdxl", device="tpu"), ValueError, ("device", "'tpu'")),
        (lambda v: VAE.random("sdxl", dtype="quarter"), ValueError, ("dtype", "'quarter'")),
        (lambda v: VAE.random("sdxl", precision="best"), ValueError, ("precision", "'best'")),
        (lambda v: v.copy(precision=False), ValueError, ("precision", "False")),
        (lambda v: v.copy(dtype="bfloat16", precision="high"), ValueError, ("precision", "'high'")),
        (lambda v: VAE.random("sdxl", autotune="no"), ValueError, ("autotune", "'no'")),
        (lambda v: v.decode(np.zeros((1, 4, 4, 4)), scaled="no"), ValueError, ("scaled", "'no'")),
        (lambda v: v.encode(np.zeros((1, 3, 8, 8)), scaled=1), ValueError, ("scaled", 1)),
        (lambda v: v.encode(np.zeros((1, 3, 8, 8))).sample(-1), ValueError, ("generator", -1)),
        (lambda v: v.encode(np.zeros((1, 3, 8, 8))).sample("a"), TypeError, ("generator", "'a'")),
        (lambda v: VAE.random("sdxl", parts="half"), ValueError, ("parts", "'half'")),
    ],
)
def test_bad_input(call, exception, message):
    vae = small_vae()
    want = vae.decode(latents(vae, 2, 2))
    held = vae.reserved_bytes
    with refused(*message, kind=exception):
        call(vae)
    gc.collect()  # the error's frames hold the outputs of a call that failed after its run
    assert vae.reserved_bytes == held
    assert np.array_equal(vae.decode(latents(vae, 2, 2)), want)


def test_sizes_that_no_memory_holds():
    with refused("batch", kind=OverflowError):
        small_vae().estimate("decode", 8, 8, 2**60)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vae_is_pickled_and_copied(dtype):
    vae = small_vae(dtype=dtype)
    vae.threads, vae.memory_limit, vae.sample_size, z = 1, "1 GiB", 99, latents(vae, 2, 2)
    want, state, seen = vae.decode(z), vae.state_dict(), (repr(vae), vae.rounded, vae.precision, vae.last_run)
    made = pickle.loads(pickle.dumps(vae)), copy.deepcopy(vae)
    assert bool(vae.rounded) == (dtype != "float32") and vae.copy().rounded == vae.rounded
    vae.close()
    for one in made:
        assert (one.threads, one.memory_limit, one.sample_size) == (1, "1 GiB", 99)
        assert (repr(one), one.rounded, one.precision, one.last_run) == seen
        assert np.array_equal(one.decode(z), want)
        assert all(np.array_equal(tensor, state[name]) for name, tensor in one.state_dict().items())
    assert pickle.loads(pickle.dumps(vae)).closed


@pytest.mark.parametrize("name", ["sd", "playground", "flux2"])
def test_what_an_encode_gives_is_pickled_and_copied(name):
    vae = small_vae(name)
    for scaled in (False, True):
        encoded = vae.encode(images(16, 8), scaled=scaled)
        for one in (pickle.loads(pickle.dumps(encoded)), copy.copy(encoded), copy.deepcopy(encoded)):
            assert one.size == encoded.size and np.array_equal(one.moments, encoded.moments)
            assert np.array_equal(one.sample(3), encoded.sample(3))
    assert copy.deepcopy(encoded).moments is not encoded.moments


def test_missing_half_and_unknown_scaling():
    arch = vaemem.engine.configs.read_config(config("sd")) | {"scaling_factor": None}
    core = _core.Model(arch, "decoder")
    vaemem.engine.weights.random_tensors(core, 0)
    vae = VAE(core)
    assert np.array_equal(vae.decode(latents(vae, 2, 2)), small_vae("sd").decode(latents(vae, 2, 2)))
    with refused(names=["encode", "encoder"]):
        vae.encode(images(8, 8))
    with refused("scaled"):
        vae.decode(latents(vae, 2, 2), scaled=True)


def test_unset_weights_are_named():
    core = _core.Model(vaemem.engine.configs.read_config(config("sd")))
    with refused(names=["encoder.conv_in.weight"]):
        VAE(core).decode(np.zeros((1, 4, 2, 2)))


@pytest.mark.resident
@pytest.mark.skipif(sys.platform != "linux", reason="the process's size is read from /proc")
def test_more_memory_than_there_is():
    """The system refuses the arena: under a limit of the address space here."""
    import resource

    vae = small_vae()
    vae.threads = 1
    z = latents(vae, 512, 512)
    held = vae.reserved_bytes
    need = vae.estimate("decode", 2048, 2048).reserved_bytes
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + need // 16, hard))
    try:
        with refused("memory", names=[" bytes"], kind=MemoryError):
            vae.decode(z)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert vae.reserved_bytes == held
    assert np.isfinite(vae.decode(latents(vae, 2, 2))).all()


# ---- progress, interruption, threads ----


@pytest.mark.parametrize("op", ["encode", "decode"])
def test_progress_reaches_the_end(op):
    vae = small_vae()
    seen = []
    data = latents(vae, 32, 32, 2) if op == "decode" else images(128, 128, 2)
    getattr(vae, op)(data, progress=lambda done, total: seen.append((done, total)))
    totals = {total for _, total in seen}
    assert len(totals) == 1 and seen[-1] == (totals.pop(),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("given", [3, "yes", [], 0.0])
def test_progress_is_true_false_or_a_function(given):
    vae = small_vae()
    with refused("progress", kind=vaemem.ArgumentTypeError):
        vae.decode(latents(vae, 2, 2), progress=given)
    assert vae.decode(latents(vae, 2, 2), progress=False) is not None


def test_an_exception_in_progress_stops_the_run():
    vae = small_vae()
    z = latents(vae, 128, 128)
    held = vae.reserved_bytes

    def stop(done, total):
        raise error

    error = RuntimeError("enough")
    with pytest.raises(RuntimeError) as caught:
        vae.decode(z, progress=stop)
    assert caught.value is error
    assert vae.last_run is None and vae.reserved_bytes == held
    small = latents(vae, 2, 2)
    assert np.array_equal(vae.decode(small), small_vae().decode(small))


INTERRUPT = """
import os, signal, threading, time
import numpy as np
from vaemem import VAE
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
vae = VAE.random("sdxl", parts="decoder")
vae.threads = 2
held = vae.reserved_bytes
z = np.zeros((1, 4, 64, 64), np.float32)
rows = {}
def interrupt():
    while not any(rows):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    vae.decode(z, progress=rows.setdefault)  # no Python code, which would notice signals itself
    raise SystemExit("was not interrupted")
except KeyboardInterrupt:
    assert 0 < max(rows) < max(rows.values()), rows
assert vae.reserved_bytes == held
assert np.isfinite(vae.decode(z[:, :, :2, :2])).all()
"""


def test_ctrl_c_stops_a_run_midway():
    """A decode that takes many times what a thread needs to send a signal."""
    done = subprocess.run([sys.executable, "-c", INTERRUPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout


def test_two_threads_one_vae_wait_and_two_vaes_do_not():
    vaes = [small_vae("sd", 0), small_vae("sd", 1)]
    z = latents(vaes[0], 16, 16)
    want = [v.decode(z) for v in vaes]
    results = []

    def work(i):
        for _ in range(3):
            results.append(np.array_equal(vaes[i].decode(z), want[i]))

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 18 and all(results)

    # side by side: a run on one VAE, held up in its progress callback, does not hold up the other
    entered, release = threading.Event(), threading.Event()

    def hold(done, total):
        entered.set()
        assert release.wait(60)

    held = threading.Thread(target=lambda: vaes[0].decode(z, progress=hold))
    held.start()
    assert entered.wait(60)
    assert np.array_equal(vaes[1].decode(z), want[1])
    waiting = threading.Thread(target=lambda: vaes[0].decode(z))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()  # the same VAE: waits its turn
    release.set()
    held.join(60), waiting.join(60)
    assert not held.is_alive() and not waiting.is_alive()


def test_a_vae_survives_fork():
    vae = small_vae()
    z = latents(vae, 4, 4)
    want = vae.decode(z)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(vae.decode(z), want) else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert done[1] == 0


# ---- every allocation fails once ----


@pytest.fixture
def few_objects():
    """A collection looks at what a test makes alone; with torch imported there are a million objects more."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("op", ["new", "plan", "encode", "decode"])
def test_every_allocation_fails_in_turn(few_objects, op):
    arch = vaemem.engine.configs.read_config(config("sd"))
    vae = small_vae()
    vae.on_out_of_memory = "raise"
    x, z = images(8, 8), latents(vae, 2, 2)
    want = vae.decode(z)
    calls = {
        "new": lambda: _core.Model(arch),
        "plan": lambda: vae.estimate("decode", 8, 8),
        "encode": lambda: vae.encode(x),
        "decode": lambda: vae.decode(z),
    }
    n = 0
    while True:
        n += 1
        assert n < 200
        gc.collect()
        vae.trim()
        held = vae.reserved_bytes
        _core.fail_alloc_at(n)
        try:
            calls[op]()
        except MemoryError as e:
            assert "memory" in str(e)
            assert _core.fail_alloc_at(0) == 0
            assert vae.reserved_bytes == held, f"allocation {n} leaked"
            assert np.array_equal(vae.decode(z), want)
        else:
            left = _core.fail_alloc_at(0)
            break
    assert left > 0 and n > {"new": 5, "plan": 2, "encode": 4, "decode": 4}[op] - 1


def test_environment():
    """VAEMEM_DISABLE takes sets away, VAEMEM_THREADS sets the threads; nonsense is refused."""
    usable = "[b['name'] for b in vaemem.backends() if b['usable'] and b['device'] == 'cpu']"
    code = f"import vaemem; print({usable}, vaemem.VAE.random(config={config('sd')!r}).threads)"

    def run(**env):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})

    done = run(VAEMEM_DISABLE=",".join(name for name, _ in _core.backends()), VAEMEM_THREADS="3")
    assert done.stdout.strip() == "['ref'] 3", done.stderr
    for unknown in ("avx1024", "a" * 100):
        done = run(VAEMEM_DISABLE=f"{unknown},avx2")
        assert is_about(done.stderr, names=["VAEMEM_DISABLE: ", f"'{unknown}'"]) and "avx2" not in done.stdout
    assert "avx512" not in run(VAEMEM_DISABLE="avx512").stdout
    kinds = [(dtype, precision) for dtype in DTYPES for precision in PRECISIONS[:-1]]
    every = {name for kind in kinds for name, _ in _core.backends(*kind)} - {"ref"}
    done = run(VAEMEM_DISABLE=",".join(every))
    assert done.stdout.startswith("['ref'] ") and "VAEMEM_DISABLE" not in done.stderr
    assert is_about(run(VAEMEM_THREADS="many").stderr, names=["VAEMEM_THREADS: ", 1024, "'many'"])


def test_the_environment_of_a_running_process_changes_nothing(monkeypatch):
    """VAEMEM_DISABLE was read at the import; whoever sets it later is told, where the call stands."""
    vae, before = small_vae(), os.environ.get("VAEMEM_DISABLE", "")
    rows = vaemem.backends()
    monkeypatch.setenv("VAEMEM_DISABLE", "avx512,avx2")
    for ask in (vaemem.backends, lambda: VAE.random(config=config("sd")), vae.copy, lambda: VAE.load(vae.state_dict())):
        with warned("VAEMEM_DISABLE", [repr(before), "'avx512,avx2'"], UserWarning) as said:
            ask()
        assert [warning.filename for warning in said] == [__file__]
    with pytest.warns(UserWarning):
        assert vaemem.backends() == rows
