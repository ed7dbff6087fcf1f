"""Memory limits on a GPU, or on the emulator where there is none (gpu.py): chains, rings and rounds as on a CPU."""

import gpu
import numpy as np
import pytest
from engine import images, latents
from errors import warned
from gpu import LIMIT, on_gpu

from vaemem import VAE

pytestmark = pytest.mark.usefixtures("cuda")
SIZE = 128, 16  # tall, so that a step has few of its rows
TALL = 256, 16  # our own convolution's tiles are up to 16 rows high, and of their decoders some stream only then


def limits_of(there, *ask, **how):
    """Of every plan, the fastest first."""
    return [max(run.peak_bytes, run.reserved_bytes) for run in there.tradeoff(*ask, **how)]


def runner(there, op, height, width, batch=1):
    factor = there._runner.factor
    data = latents(there, height // factor, width // factor, batch) if op == "decode" else images(height, width, batch)
    return lambda **how: there.decode(data, **how) if op == "decode" else there.encode(data, **how).moments


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flux", "bfloat16 own"),
        ("sd", "float16 own"),
        ("qwen", "bfloat16 own"),
        ("flux", "float32"),
        ("sd", "bfloat16"),
        ("qwen", "bfloat16"),
    ],
)
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_every_limit(name, kind, op):
    """Our own convolution gives the same bits for each; with cuDNN the last ones may depend on it. What the driver gave
    is what was planned."""
    there, emulator = on_gpu(name, kind), gpu.emulator()
    tall = kind.endswith("own") and op == "decode" and name != "qwen"
    ask = op, *(TALL if tall else SIZE), 2 if name == "qwen" else 1
    run = runner(there, *ask)
    want, whole = run(), there.last_run
    assert {held for _, held in whole.values} == {"stored"} and whole.work == 1
    every = limits_of(there, *ask)
    limits = [every[0], every[len(every) // 2], there.smallest(*ask)]
    there.trim()
    others = emulator.settled()[0] - there.reserved_bytes
    for limit in limits:
        there.trim()
        emulator.peak()
        got = run(memory_limit=limit)
        taken, planned = there.last_run, there.estimate(*ask, memory_limit=limit)
        assert [f for f in vars(taken) if getattr(taken, f) != getattr(planned, f)] == ["pass_seconds", "seconds"]
        assert max(taken.peak_bytes, taken.reserved_bytes) <= limit
        assert emulator.peak() - others == taken.reserved_bytes
        if kind.endswith("own"):
            assert (got == want).all()
        else:
            assert np.linalg.norm(got - want) <= LIMIT[kind] * np.linalg.norm(want)
    assert "streamed" in {held for _, held in taken.values}
    assert taken.peak_bytes - taken.weights_bytes < 0.8 * (whole.peak_bytes - whole.weights_bytes)


@pytest.mark.parametrize("kind", ["bfloat16 own", "bfloat16"])
def test_nan_comes_as_without_a_limit(kind):
    there = on_gpu("qwen", kind)
    z = latents(there, SIZE[0] // 4, SIZE[1] // 4)
    z[0, 0, 7, 1] = np.nan
    limit = there.smallest("decode", *SIZE)
    with warned("decode"):
        want = there.decode(z)
    with warned("decode"):
        got = there.decode(z, memory_limit=limit)
    assert np.isnan(want).any() and (np.isnan(got) == np.isnan(want)).all()


@pytest.mark.parametrize("kind", ["bfloat16 own", "bfloat16"])
def test_chains_as_graphs(kind):
    """Replayed from the third run on; plans in one arena do not mix."""
    there = on_gpu("qwen", kind)
    there.graphs = True
    run, limits = runner(there, "encode", *SIZE), limits_of(there, "encode", *SIZE)
    there.encode(images(*SIZE))  # an arena that the others find large enough
    want = {limit: run(memory_limit=limit) for limit in (limits[0], limits[-1])}
    for _ in range(2):
        for limit, first in want.items():
            assert (run(memory_limit=limit) == first).all()


@pytest.mark.thorough
def test_graphs_of_too_many_kernels_are_not_kept():
    """The smallest plan of so tall an image has more than 4096 of them."""
    emulator, there, size = gpu.emulator(), on_gpu("qwen", "bfloat16"), (768, 8)
    there.graphs = True
    run, seen = runner(there, "decode", *size), []
    for limit, graphs in ((None, 1), (there.smallest("decode", *size), 0)):
        before, launches = emulator.settled()[6], emulator.launches()
        first = run(memory_limit=limit)
        seen.append(emulator.launches() - launches)
        for _ in range(2):
            assert (run(memory_limit=limit) == first).all()
        assert emulator.live()[6] - before == graphs
    assert seen[0] < 100 and seen[1] > 4096 * 2 / 3  # cuDNN's are not counted: a load and a store for each


def test_progress_counts_every_row():
    there, seen = on_gpu("qwen", "bfloat16 own"), []
    z, limit = latents(there, SIZE[0] // 4, SIZE[1] // 4), there.smallest("decode", *SIZE)
    there.decode(z, memory_limit=limit, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] <= seen[-1][1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["flux", "qwen-image"])
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("convolution", ["cudnn", "own"])
def test_below_one_tensor(name, op, convolution, monkeypatch):
    """On as many multiprocessors as an H100 has, with the workspaces of the cuDNN at hand."""
    monkeypatch.setenv("VAEMEM_EMULATED_MULTIPROCESSORS", "132")
    parts = "decoder" if op == "decode" else "encoder"
    there = VAE.random(name, device="cuda", dtype="bfloat16", parts=parts, convolution=convolution)
    side = 2048
    plans = there.tradeoff(op, side, side, staged=False)
    taken = [max(run.peak_bytes, run.reserved_bytes) for run in plans]
    beside = [(n - plans[0].weights_bytes) / (128 * side * side * 2) for n in taken]
    # conv_wgmma.cu's tiles are 16 rows high, so our own plans' least is larger.
    assert beside == sorted(beside, reverse=True) and beside[-1] < (1.0 if convolution == "own" else 0.9)
    assert plans[0].work == 1 and [run.work for run in plans] == sorted(run.work for run in plans)


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_largest_batch(op):
    """Arrays in the GPU's memory: each image adds its result. Arrays in host memory: two images at most are there."""
    there = on_gpu("sd", "bfloat16")
    inside, copied = ([there.smallest(op, *SIZE, n, staged=staged) for n in (1, 2, 3, 4)] for staged in (False, True))
    image = there.estimate(op, *SIZE, staged=False).output_bytes
    assert inside == [inside[0] + n * image for n in range(4)]
    assert copied[0] < copied[1] == copied[2] == copied[3]
    assert [there.largest_batch(op, *SIZE, limit, staged=False) for limit in (inside[2] - 1, inside[2])] == [2, 3]
    assert [there.largest_batch(op, *SIZE, limit) for limit in copied[:2]] == [1, 1 << 16]
