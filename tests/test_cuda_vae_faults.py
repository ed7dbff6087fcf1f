"""Runs on a GPU, or on the emulator, that are interrupted, refused or fail; threads; what is needed to run at all."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gpu
import numpy as np
import pytest
from engine import error, latents, small_vae
from errors import is_about, refused
from gpu import LIMIT, pair

import vaemem
from vaemem import Tiling, _core

CUDA = Path(__file__).resolve().parents[1] / "kernels" / "cuda"
pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.core]


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


@pytest.mark.one_in(9)
@pytest.mark.parametrize("graphs,dtype", [(False, "float32"), (True, "float32"), (False, "float16 own")])
def test_every_driver_call_fails_once(graphs, dtype):
    """Whatever the driver refuses: an exception with its words, nothing kept, and the next run is right."""
    emulator = gpu.emulator()
    cpu, there = pair("odd", dtype)
    there.graphs = graphs
    z = latents(cpu, 3, 2)
    each = 11 if dtype == "float32" else 97  # the middle of a run is much like itself
    calls = itertools.chain(range(1, 31), range(33 if each == 11 else 97, 100_000, each))
    assert emulator.fail_calls(there, z, cpu.decode(z), LIMIT[dtype], calls) > (10 if graphs else 50)


def test_tiles_when_a_driver_call_fails():
    """It is said, or made up for, and nothing stays."""
    emulator = gpu.emulator()
    cpu, there = pair("odd")
    z, tiling = latents(cpu, 3, 2), Tiling(8, 0)
    given, want, held = gpu.Array(z), cpu.decode(z, tiling=tiling), there.reserved_bytes
    there.decode(given, tiling=tiling)
    start = emulator.calls()
    there.decode(given, tiling=tiling)
    calls = emulator.calls() - start
    failed = 0
    for n in range(1, calls, 17):
        with emulator.failing(n):
            try:
                got = there.decode(given, tiling=tiling).numpy()
            except (RuntimeError, MemoryError) as fault:
                failed += 1
                assert "CUDA" in str(fault), fault
            else:
                assert error(got, want) < LIMIT["float32"], n
        there.trim()
        assert there.reserved_bytes == held, n
    assert failed > calls / 17 / 2
    assert error(there.decode(given, tiling=tiling).numpy(), want) < LIMIT["float32"]


def test_opening_fails_at_every_call_and_keeps_nothing():
    emulator = gpu.emulator()
    small_vae("odd", device="cuda")
    before = emulator.settled()
    for n in range(1, 10_000):
        with emulator.failing(n) as came:
            opened = None
            with contextlib.suppress(RuntimeError, ValueError, MemoryError):
                opened = vaemem.engine.device.Device(0, "float32")
            if not came():
                break
        del opened
        assert emulator.live() == before, n
    assert n > 50


GONE = """
import gpu, numpy as np
from engine import latents, small_vae
from errors import refused
there = small_vae("odd", device="cuda")
z = latents(there, 2, 2)
with gpu.Emulator().failing(1, 709, sticky=True):
    for _ in range(2):
        with refused(names=["CUDA: ", 709], kind=RuntimeError):
            there.decode(z)
del there
with refused(names=["CUDA: ", 709], kind=RuntimeError):
    small_vae("odd", device="cuda")
assert np.isfinite(small_vae("odd").decode(z)).all()
"""


def test_a_context_that_is_gone():
    """Somebody destroyed it: every call says so, closing does not crash, the CPU works on. Nothing brings it back."""
    gpu.emulator()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def failing(there):
    """1, 2, ...: the allocation of that number fails from then on."""
    there.on_out_of_memory = "raise"
    for n in itertools.count(1):
        there.trim()
        _core.fail_alloc_at(n)
        yield n


def test_every_allocation_fails_once():
    cpu, there = pair("odd")
    z = latents(cpu, 3, 2)
    want = cpu.decode(z)
    for n in failing(there):
        try:
            there.decode(z)
        except MemoryError:
            assert _core.fail_alloc_at(0) == 0
            assert error(there.decode(z), want) < LIMIT["float32"]
            continue
        assert _core.fail_alloc_at(0) > 0 and n > 3
        break


def test_tiles_when_an_allocation_fails():
    """Each one, of the result and of what tiles are blended with too: all is given back while the error is at hand."""
    cpu, there = pair("odd")
    z, tiling, held = latents(cpu, 3, 2), Tiling(8, 0.5), there.reserved_bytes
    given, want = gpu.Array(z), cpu.decode(z, tiling=tiling)
    for n in failing(there):
        if n > 30 and n % 3:  # each tile allocates as the one before did
            continue
        try:
            got = there.decode(given, tiling=tiling)
        except MemoryError:
            assert _core.fail_alloc_at(0) == 0
            there.trim()  # the arena of a tile before
            assert there.reserved_bytes == held
            continue
        assert error(got.numpy(), want) < LIMIT["float32"]
        del got
        if _core.fail_alloc_at(0):
            assert n > 5
            break


def test_tiles_for_which_there_is_no_room(monkeypatch):
    emulator = gpu.emulator()
    there = small_vae("odd", device="cuda")
    z, tiling, weights = latents(there, 12, 8), Tiling(16), there.reserved_bytes
    there.decode(latents(there, 16, 16))  # and its arena is kept
    given, taken = gpu.Array(z), there.estimate("decode", 48, 32, staged=False, tiling=tiling)
    kept = there.reserved_bytes
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + 256))
    assert taken.reserved_bytes < kept
    there.decode(given, tiling=tiling)  # which has given the arena back
    there.trim()
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + taken.output_bytes + 256))
    with refused(names=["cuda:0", "48x32", "0.02 MiB", "0.01 MiB"], kind=MemoryError):
        there.decode(given, tiling=tiling)
    assert there.reserved_bytes == weights


def test_tiles_interrupted_on_it():
    there, tiling = small_vae("odd", device="cuda"), Tiling(8, 0.5)
    z, held = gpu.Array(latents(there, 3, 2)), there.reserved_bytes

    def stop(done, total):
        if done > 8:
            raise KeyboardInterrupt

    want = there.decode(z, tiling=tiling).numpy()
    with pytest.raises(KeyboardInterrupt):
        there.decode(z, tiling=tiling, progress=stop)
    there.trim()
    assert there.reserved_bytes == held
    assert (there.decode(z, tiling=tiling).numpy() == want).all()


@pytest.mark.parametrize("hosted", [True, False])
def test_memory_that_runs_out_is_tried_again_with_a_smaller_plan(hosted):
    cpu, there = pair("odd")
    z = latents(cpu, 12, 8)
    want = cpu.decode(z)
    first = there.estimate("decode", 48, 32, staged=hosted)
    data = z if hosted else gpu.Array(z)
    retried = 0
    for n in range(1, 20):
        there.trim()
        _core.fail_alloc_at(n)
        got = there.decode(data)
        left = _core.fail_alloc_at(0)
        assert error(got if hosted else got.numpy(), want) < LIMIT["float32"]
        if left:
            break
        retried += 1
        (note,) = there.last_run.notes
        assert note.startswith("out of memory: run again within") and there.last_run.peak_bytes < first.peak_bytes
    assert retried > 2 and there.last_run.notes == () and there.last_run.peak_bytes == first.peak_bytes


@pytest.mark.thorough
def test_a_driver_that_refuses_memory_is_asked_for_less():
    """From the allocation of the arena on: code 2 is the driver's for no memory."""
    emulator = gpu.emulator()
    cpu, there = pair("odd")
    z = latents(cpu, 12, 8)
    want, first = cpu.decode(z), there.estimate("decode", 48, 32)
    retried = 0
    for n in range(1, 30):
        there.trim()
        with emulator.failing(n, code=2):
            try:
                got = there.decode(z)
            except RuntimeError as fault:
                assert "CUDA" in str(fault), fault
                continue
        assert error(got, want) < LIMIT["float32"]
        if there.last_run.notes:
            retried += 1
            assert there.last_run.peak_bytes < first.peak_bytes
    assert retried > 0


def test_cudnn_that_has_no_room_for_its_kernels(monkeypatch):
    """It takes that when a plan first runs, when the arena has been taken: a smaller plan leaves room."""
    emulator, (cpu, there) = gpu.emulator(), pair("odd")
    z, first = latents(cpu, 12, 8), there.estimate("decode", 48, 32)
    monkeypatch.setenv("VAEMEM_EMULATED_CUDNN", str(8 << 10))
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + first.reserved_bytes - there.reserved_bytes))
    assert error(there.decode(z), cpu.decode(z)) < LIMIT["float32"]
    assert there.last_run.notes[0].startswith("out of memory: run again within")
    assert there.last_run.reserved_bytes < first.reserved_bytes


def test_what_torch_would_give_back_is_said(monkeypatch):
    """Where it is imported and uses the GPU. Of 40 MiB it uses 8, and 12 lie beside what it uses."""
    emulator, there = gpu.emulator(), small_vae("odd", device="cuda")
    z, there.on_out_of_memory = latents(there, 12, 8), "raise"
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0]))
    of = {"reserved_bytes": 40 << 20, "active_bytes": 8 << 20, "inactive_split_bytes": 12 << 20}
    stats = {f"{name}.all.current": size for name, size in of.items()}
    for used in (False, True):
        cuda = SimpleNamespace(is_initialized=lambda used=used: used, memory_stats=lambda number: stats)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        with refused(kind=MemoryError) as caught:
            there.decode(z)
        assert is_about(caught.value, names=["20.00 MiB", "torch.cuda.empty_cache()"]) == used


def test_smaller_plans_fit_where_the_first_do_not(monkeypatch):
    """A GPU of which others leave what a plan takes, down to the smallest; and then a little less."""
    emulator = gpu.emulator()
    cpu, there = pair("odd")
    z = latents(cpu, 12, 8)
    want, weights = cpu.decode(z), there.reserved_bytes
    limits = [max(run.peak_bytes, run.reserved_bytes) for run in there.tradeoff("decode", 48, 32)]

    def leave(limit):
        there.trim()
        monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", str(emulator.live()[0] + limit - weights))

    for i, limit in enumerate(limits):
        leave(limit)
        assert error(there.decode(z), want) < LIMIT["float32"]
        assert (
            there.last_run.peak_bytes <= limit and len(there.last_run.notes) >= i
        )  # plans that the curve leaves out too
    leave(there.smallest("decode", 48, 32) - 512)
    says = dict(names=["48x32", "cuda:0: "], kind=MemoryError)
    with refused(**says) as caught:
        there.decode(z)
    side = int(str(caught.value).rpartition("x")[2].split()[0])
    there.decode(latents(there, side // 4, side // 4))
    leave(limits[0] - 512)
    there.on_out_of_memory = "raise"
    with refused(**says):
        there.decode(z)


# ---- refusals ----


def test_bad_arguments():
    for about, asked in (
        (("device", "'gpu'"), {"device": "gpu"}),
        (("dtype", "'int8'"), {"dtype": "int8"}),
        (("convolution", "'mine'"), {"dtype": "float16", "convolution": "mine"}),
        (("convolution", "own"), {"convolution": "own"}),
        (("precision", "'high'"), {"dtype": "float16", "precision": "high"}),
    ):
        with refused(*about):
            small_vae("sd", **{"device": "cuda"} | asked)
    with refused(names=["device", "cuda:77"]):
        small_vae("sd", device="cuda:77")
    there = small_vae("sd", device="cuda")
    with refused("save"):
        there.save("x.safetensors")
    with refused(names=["CPU"]):
        there._core.get_tensor("decoder.conv_in.weight")


def test_bfloat16_wants_ampere(monkeypatch):
    gpu.emulator()
    monkeypatch.setenv("VAEMEM_EMULATED_SM", "75")
    with refused(names=["bfloat16", 7.5]):
        small_vae("sd", device="cuda", dtype="bfloat16")
    with refused(names=["TF32"]):
        small_vae("sd", device="cuda", precision="medium")
    rows = {asked: vaemem.backends(*asked)[-1] for asked in (("float16",), ("bfloat16",), ("float32", "high"))}
    assert [row["usable"] for row in rows.values()] == [True, False, False]
    assert rows["bfloat16",]["why"].endswith("has compute capability 7.5: expected 8.0 or later")
    cpu, there = pair("sd", "float16")
    z = latents(cpu, 4, 4)
    assert error(there.decode(z), cpu.decode(z)) < LIMIT["float16"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_must_be_finite(bad):
    there = small_vae("sd", device="cuda")
    with refused(names=["decoder.conv_in.bias"]):
        there._core.set_tensor("decoder.conv_in.bias", np.full(64, bad, np.float32))
    for dtype, large in (("float16", 7e4), ("bfloat16", np.finfo(np.float32).max)):
        half = small_vae("sd", device="cuda", dtype=dtype)
        with refused(names=["decoder.conv_in.weight", dtype]):
            half._core.set_tensor("decoder.conv_in.weight", np.full((64, 4, 3, 3), large, np.float32))


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
            "CUDA: expected an NVIDIA driver, got /nowhere/libcuda.so.1: cannot open",
        ),
        ("VAEMEM_EMULATED_DRIVER", "11040", "CUDA: expected a driver for CUDA 12.0 or later, got one for 11.4"),
    ):
        environment = os.environ | {name: value}
        done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, env=environment)
        assert why in done.stdout and f"RuntimeError: {why}" in done.stderr, done


def test_sweep_on_it():
    config_vae = small_vae("sd", device="cuda", dtype="bfloat16")
    (row,) = vaemem.measure_sweep(config_vae, "decode", 32)
    (estimate,) = vaemem.estimate_sweep(config_vae, "decode", 32)
    assert row["device"] == "cuda:0" and row["dtype"] == "bfloat16" and row["seconds"] > 0
    assert row["allocated_bytes"] == estimate["allocated_bytes"]
    with refused("dtypes", "'float16'"):
        vaemem.measure_sweep(config_vae, "decode", 32, "float16")


def test_own_convolution_needs_no_cudnn(monkeypatch, tmp_path):
    gpu.emulator()
    (tmp_path / "libcudnn.so.9").write_bytes(b"no library")
    monkeypatch.setenv("VAEMEM_CUDNN", str(tmp_path))
    with refused(names=["libcudnn.so.9"], kind=RuntimeError):
        gpu_process('VAE.random("sdxl", device="cuda", dtype="float16", parts="decoder", convolution="cudnn")')
    gpu_process('VAE.random("sdxl", device="cuda", dtype="float16", convolution="own").estimate("decode", 64, 64)')
    gpu_process('VAE.random("sdxl", device="cuda", dtype="float16", convolution="own").estimate("encode", 64, 64)')


def test_cudnns_plans_are_described():
    gpu.emulator()
    there = small_vae("sd", device="cuda", dtype="float16", convolution="cudnn")
    assert there._device.backend.cudnn_plans == []
    there.decode(np.zeros((1, 4, 2, 2), np.float32))
    plans = there._device.backend.cudnn_plans
    form = r"float16 \d+x\d+x\d+ to \d+, \dx\d stride 1: eng\S+, \d+ bytes of workspace"
    assert len(plans) == len(set(plans)) > 3 and all(re.fullmatch(form, plan) for plan in plans)


def test_which_convolution_auto_is():
    """Our own on compute capability 9.0 in half precision; cuDNN elsewhere, in float32 and to be timed."""
    gpu.emulator()
    code = """import sys
from vaemem import VAE
half = {"dtype": "float16"}
for words in (half, {"dtype": "bfloat16"}, {"dtype": "float32"}, half | {"autotune": True}):
    print(VAE.random("taesd", device="cuda", **words)._device.backend.convolution)"""
    cudnn = "cudnn " * 4
    # 120 registers: of another nvcc, with which the kernel would wait forever.
    kinds = ("90", 128, "own own cudnn cudnn"), ("90", 120, cudnn), ("80", 128, cudnn), ("120", 128, cudnn)
    for sm, registers, want in kinds:
        env = os.environ | {"VAEMEM_EMULATED_SM": sm, "VAEMEM_EMULATED_REGISTERS": str(registers)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.split() == want.split(), done.stderr


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({}, "pairs own pairs own 64x64 cudnn"),
        ({"VAEMEM_EMULATED_REGISTERS": "128"}, "64x128 own 64x128 own 64x64 cudnn"),
        ({"VAEMEM_DISABLE": "wgmma"}, "64x128 cudnn 64x128 cudnn 64x64 cudnn"),
        ({"VAEMEM_EMULATED_SM": "80"}, "64x128 cudnn 64x128 cudnn 64x64 cudnn"),
    ],
)
def test_which_attention_and_convolution_run(more, want):
    """Pairs of blocks on compute capability 9.0 in half precision, if nvcc has given them the registers that they
    share; with others they would wait forever. VAEMEM_DISABLE=wgmma leaves out the kernels for 9.0."""
    gpu.emulator()
    code = """from vaemem import VAE
for dtype in ("float16", "bfloat16", "float32"):
    backend = VAE.random("taesd", device="cuda", dtype=dtype)._device.backend
    print(backend.attention, backend.convolution)"""
    env = os.environ | {"VAEMEM_EMULATED_SM": "90"} | more
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == want.split(), done.stderr


def gpu_process(code):
    """In a process of its own, which has no cuDNN yet."""
    code = f"from vaemem import VAE\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(done.stderr)


def test_every_kernel_is_built_for_the_same_gpus():
    first, *others = found = gpu.machine_code(Path(gpu._cuda.__file__).read_bytes())
    assert len(found) == len(list(CUDA.glob("*.cu")))
    assert (1, 90) in first and any(kind == 2 for kind, _ in first), first
    assert all(archs == first for archs in others), found
