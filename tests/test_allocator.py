"""The simulated CUDA caching allocator against a slow one, against known figures, and under bad input."""

import ctypes
import random
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from allocator_oracle import Oracle
from errors import refused

from vaemem import ArgumentOverflowError, _core
from vaemem.prediction.caching_allocator import CachingAllocator

pytestmark = pytest.mark.core

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OutOfMemory = _core.OutOfMemoryError


# ---- random traces, every setting ----

SETTINGS = {
    "plain": ({}, {}),
    "limit": ({"total_memory": 500 * MIB}, {"total": 500 * MIB}),
    "fraction": (
        {"total_memory": GIB, "memory_fraction": 0.4},
        {"total": GIB, "allowed": int(0.4 * GIB)},
    ),
    "roundup": ({"roundup_power2_divisions": 4}, {"divisions": [4] * 16}),
    "roundup by size": (
        {"roundup_power2_divisions": {4: 1, "16": 2, 64: 8, ">": 16}},
        {"divisions": [1, 1, 1, 0, 2, 0, 8] + [16] * 9},
    ),
    "max split": ({"max_split_size_mb": 30, "total_memory": 300 * MIB}, {"split": 30 * MIB, "total": 300 * MIB}),
    "rounding": (
        {"max_split_size_mb": 24, "max_non_split_rounding_mb": 48, "total_memory": 600 * MIB},
        {"split": 24 * MIB, "rounding": 48 * MIB, "total": 600 * MIB},
    ),
    "collect": (
        {"total_memory": 800 * MIB, "garbage_collection_threshold": 0.3},
        {"total": 800 * MIB, "allowed": 800 * MIB, "threshold": 0.3},
    ),
    "collect, max split": (
        {"total_memory": 600 * MIB, "garbage_collection_threshold": 0.5, "max_split_size_mb": 20},
        {"total": 600 * MIB, "allowed": 600 * MIB, "threshold": 0.5, "split": 20 * MIB},
    ),
    "expandable": ({"expandable_segments": True}, {"expandable": True}),
    "expandable, limit": (
        {"expandable_segments": True, "total_memory": 500 * MIB},
        {"expandable": True, "total": 500 * MIB},
    ),
    "expandable, roundup, max split": (
        {"expandable_segments": True, "roundup_power2_divisions": 8, "max_split_size_mb": 40},
        {"expandable": True, "divisions": [8] * 16, "split": 40 * MIB},
    ),
}

EDGES = [1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 20 * MIB, 30 * MIB]


def draw_bytes(rng):
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(EDGES)
    low, high = (1, 8 * KIB) if kind < 0.35 else (8 * KIB, MIB) if kind < 0.5 else (MIB, 12 * MIB)
    return (
        rng.randint(low, high)
        if kind < 0.8
        else 2 * MIB * rng.randint(5, 50) - rng.choice([0, 0, 512, MIB, 1500 * KIB])
    )


def steps_of(rng, count):
    """(op, argument): malloc (bytes, stream); free or pend a live block, complete a pending one; empty."""
    ops = ["malloc"] * 52 + ["free"] * 42 + ["pend"] * 3 + ["complete"] * 2 + ["empty"]
    for _ in range(count):
        op = rng.choice(ops)
        yield op, (draw_bytes(rng), rng.choice([0, 0, 0, 7])) if op == "malloc" else rng.random()


def shown(allocator):
    return [(a, n, s) for _, a, n, _, _, s, _, _, _ in allocator._blocks()]


def shown_by(oracle):
    state = {"free": "inactive", "pending": "active_pending_free", "live": "active_allocated"}
    return sorted((p.address, p.size, state[p.state]) for _, p in oracle.pieces() if p.mapped)


def compare(allocator, oracle, complete=True):
    figures, stats = oracle.figures(), allocator.stats()
    assert {k: stats[f"{k}.all.current"] for k in figures} == figures
    assert {k: stats[f"{k}.all.peak"] for k in figures} == {k: oracle.peak.get(k, 0) for k in figures}
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (oracle.retries, oracle.ooms)
    assert stats["num_device_alloc"] == oracle.device_calls
    if complete:
        assert shown(allocator) == shown_by(oracle)
        assert [e[:4] for e in allocator._events()] == oracle.events
        for key in figures:
            pools = [stats[f"{key}.{pool}.current"] for pool in ("small_pool", "large_pool")]
            assert sum(pools) == stats[f"{key}.all.current"]
            for pool in ("all", "small_pool", "large_pool"):
                grown = stats[f"{key}.{pool}.allocated"] - stats[f"{key}.{pool}.freed"]
                assert grown == stats[f"{key}.{pool}.current"]


def drive(allocator, oracle, rng, count, attempt=lambda call: call()):
    """The same random steps on both; `attempt` calls ours."""
    live = []
    for i, (op, argument) in enumerate(steps_of(rng, count)):
        if op == "malloc":
            ours = partial(allocator.malloc, *argument)
            try:
                want = oracle.malloc(*argument)
            except MemoryError:
                with pytest.raises(OutOfMemory):
                    attempt(ours)
            else:
                assert attempt(ours) == want, (i, argument)
                live.append(want)
        elif op in ("free", "pend") and live:
            address = live.pop(int(argument * len(live)))
            oracle.free(address, op == "pend")
            attempt(partial(allocator.free, address, pending=op == "pend"))
        elif op == "complete" and oracle.pending:
            address = oracle.pending[int(argument * len(oracle.pending))]
            oracle.free(address)
            attempt(partial(allocator.free, address))
        elif op == "empty":
            oracle.release_all()
            attempt(allocator.empty_cache)
            if argument < 0.3:
                oracle.reset_peak()
                allocator.reset_peak_stats()
        assert allocator.memory_reserved() == oracle.reserved(), (i, op, argument)
        if i % 50 == 0:
            compare(allocator, oracle, complete=i % 250 == 0)
    compare(allocator, oracle)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_random_traces_equal_the_oracle(name, seed):
    ours, theirs = SETTINGS[name]
    allocator, oracle = CachingAllocator(**ours), Oracle(**theirs)
    drive(allocator, oracle, random.Random(f"{name} {seed}"), 700)
    if "limit" in name or "max split" == name:
        assert oracle.retries and oracle.ooms  # or the trace tested nothing of that
    if "collect" in name:
        assert any(e[0] == "segment_free" for e in oracle.events)


@pytest.mark.parametrize("name", ["plain", "limit", "expandable, limit"])
def test_failing_allocations_leave_it_whole(name):
    """Every allocation of the core's own memory fails in turn; the step is repeated and nothing has changed."""
    ours, theirs = SETTINGS[name]
    allocator, oracle = CachingAllocator(**ours), Oracle(**theirs)
    failures = 0

    def attempt(call):
        nonlocal failures
        _core.fail_alloc_at(1)
        try:
            return call()
        except OutOfMemory:
            raise
        except MemoryError:
            failures += 1
            _core.fail_alloc_at(0)
            return call()
        finally:
            _core.fail_alloc_at(0)

    drive(allocator, oracle, random.Random(5), 400, attempt)
    assert failures >= 3  # elements, table, history
    _core.fail_alloc_at(1)
    with pytest.raises(MemoryError):
        CachingAllocator()
    _core.fail_alloc_at(0)


# ---- the driver's pool ----


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"total_memory": 300 * MIB}, {"total_memory": GIB, "memory_fraction": 0.25}])
def test_random_traces_on_the_drivers_pool(settings, seed):
    """What is in use, and the most of it since the pool was trimmed, in pages of 2 MiB."""
    allocator, rng = CachingAllocator(backend="cudaMallocAsync", **settings), random.Random(seed)
    total, allowed = settings.get("total_memory", 1 << 60), 1 << 60
    if "memory_fraction" in settings:
        allowed = int(settings["memory_fraction"] * total)
    live: dict[int, tuple[int, bool]] = {}  # address: bytes, and whether its free waits for another stream
    reserved = refused = 0

    def used(**kinds):
        return sum(-(-size // 512) * 512 for size, pends in live.values() if kinds.get("all") or not pends)

    def pages(size):
        return -(-size // (2 * MIB)) * 2 * MIB

    for op, argument in steps_of(rng, 600):
        if op == "malloc":
            size = argument[0]
            wanted = pages(used(all=True) + -(-size // 512) * 512)
            fits = wanted <= max(reserved, total) and sum(s for s, _ in live.values()) + size <= allowed
            try:
                address = allocator.malloc(*argument)
            except OutOfMemory as full:
                assert not fits and full.requested == size
                refused += 1
            else:
                assert fits
                live[address], reserved = (size, False), max(reserved, wanted)
        elif op in ("free", "pend") and (blocks := [a for a, (_, pends) in live.items() if not pends]):
            address = blocks[int(argument * len(blocks))]
            allocator.free(address, pending=op == "pend")
            size, _ = live.pop(address)
            if op == "pend":
                live[address] = size, True
        elif op == "complete" and (pending := [a for a, (_, pends) in live.items() if pends]):
            address = pending[int(argument * len(pending))]
            allocator.free(address)
            del live[address]
        elif op == "empty":
            allocator.empty_cache()
            live = {a: (size, pends) for a, (size, pends) in live.items() if not pends}
            reserved = pages(used())
        assert (allocator.memory_allocated(), allocator.memory_reserved()) == (used(), reserved)
    assert bool(refused) == bool(settings) and allocator.max_memory_reserved() >= reserved


def test_the_drivers_pool_keeps_no_blocks():
    pool = CachingAllocator.from_conf("backend:cudaMallocAsync", total_memory=64 * MIB)
    first, second = pool.malloc(30 * MIB), pool.malloc(30 * MIB + 1)
    assert pool.memory_allocated() == 60 * MIB + 512 and pool.memory_reserved() == 62 * MIB
    pool.free(first)
    assert pool.memory_reserved() == 62 * MIB and pool.malloc(32 * MIB)  # no gap is too small for it
    with pytest.raises(OutOfMemory) as caught:
        pool.malloc(3 * MIB)
    assert (caught.value.requested, caught.value.total) == (3 * MIB, 64 * MIB)
    pool.free(second)
    pool.empty_cache()
    assert pool.memory_reserved() == 32 * MIB and pool.stats()["num_alloc_retries"] == 0
    with refused("snapshot"):
        pool.snapshot()
    with refused("segment"):
        pool._restore(0x7F0000000000, 2 * MIB, 0, False, [])


# ---- known figures ----


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # more than 1 MiB remains: split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB remains: it stays with the block and counts as allocated
        (129 * MIB + 16, 130 * MIB, 130 * MIB),
    ],
)
def test_sizes(size, allocated, reserved):
    a = CachingAllocator()
    a.malloc(size)
    assert (a.memory_allocated(), a.memory_reserved()) == (allocated, reserved)


def test_roundup_examples():
    """The example of PyTorch's documentation: 1200 between 1024 and 2048 in 4 divisions is 1280 (here in MiB)."""
    a = CachingAllocator(roundup_power2_divisions=4)
    assert a.rounded_size(1200 * MIB) == 1280 * MIB
    assert a.rounded_size(1024 * MIB) == 1024 * MIB
    assert CachingAllocator().rounded_size(1200 * MIB + 1) == 1200 * MIB + 512


@pytest.mark.parametrize("text", ["[4:1,16:2,64:8,>:16]", "[64:8,256:4,>:1]", "[>:2]", "[1:4,2:0,65536:2]", "8"])
def test_roundup_settings_equal_pytorchs(text):
    """The divisions as libc10 itself parses them (its CPU build carries the parser, not the allocator)."""
    torch = pytest.importorskip("torch")
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    divisions = getattr(ctypes.CDLL(str(library)), name, None) if library.exists() else None
    if divisions is None or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this PyTorch does not export its parser")
    divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    torch._C._accelerator_setAllocatorSettings(f"roundup_power2_divisions:{text}")
    try:
        theirs = tuple(divisions(MIB << i) for i in range(16))
    finally:
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[1:0,>:0]")
    assert CachingAllocator.from_conf(f"roundup_power2_divisions:{text}")._settings()["divisions"] == theirs


def test_best_fit_and_coalescing():
    a = CachingAllocator()
    x, y, z = (a.malloc(4 * MIB) for _ in range(3))
    assert (y - x, z - y, a.memory_reserved()) == (4 * MIB, 4 * MIB, 20 * MIB)
    a.free(x)
    a.free(z)
    assert a.stats()["inactive_split.all.current"] == 2
    assert a.malloc(4 * MIB) == x  # the smallest that fits, not the 12 MiB tail
    a.free(x)
    a.free(y)
    assert a.stats()["inactive_split.all.current"] == 0
    assert a._has_whole_segment()


def test_streams_do_not_share():
    a = CachingAllocator()
    a.free(a.malloc(30 * MIB, stream=1))
    a.malloc(30 * MIB, stream=2)
    assert a.memory_reserved() == 60 * MIB


def test_pending_free_is_active_until_complete():
    a = CachingAllocator()
    x = a.malloc(MIB)
    a.free(x, pending=True)
    stats = a.stats()
    assert (stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]) == (0, MIB)
    assert a.malloc(MIB) != x
    a.free(x)
    assert a.stats()["active_bytes.all.current"] == MIB
    assert a.malloc(MIB) == x


def test_out_of_memory_figures():
    a = CachingAllocator(total_memory=100 * MIB)
    a.malloc(30 * MIB)
    cached = a.malloc(40 * MIB)
    a.free(cached)
    figures = ["80.00 MiB", "100.00 MiB", "70.00 MiB free", "30.00 MiB allocated"]  # as read_clues reads them
    with refused(kind=OutOfMemory, names=figures) as caught:
        a.malloc(80 * MIB)
    error = caught.value
    assert (error.requested, error.wanted, error.total) == (80 * MIB, 80 * MIB, 100 * MIB)
    assert (error.free, error.allocated, error.reserved) == (70 * MIB, 30 * MIB, 30 * MIB)  # the cache was given back
    assert isinstance(error, MemoryError)
    a.malloc(70 * MIB)  # still usable
    assert a.memory_reserved() == 100 * MIB


def test_retry_frees_what_is_cached():
    a = CachingAllocator(total_memory=100 * MIB)
    a.free(a.malloc(60 * MIB))
    a.malloc(80 * MIB)
    stats = a.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"], a.memory_reserved()) == (1, 0, 80 * MIB)


def test_expandable_grows_one_segment():
    a = CachingAllocator(expandable_segments=True)
    x = a.malloc(30 * MIB)
    assert a.memory_reserved() == 40 * MIB  # pages of 20 MiB
    y = a.malloc(50 * MIB)
    assert (y - x, a.memory_reserved()) == (30 * MIB, 80 * MIB)
    a.free(x)
    a.empty_cache()
    assert a.memory_reserved() == 60 * MIB  # one whole page of x
    a.free(y)
    a.empty_cache()
    assert (a.memory_reserved(), a._blocks()) == (0, [])


def test_stats_have_pytorchs_names():
    kinds = ["allocation", "segment", "active", "inactive_split"]
    kinds += ["allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"]
    metrics = ["current", "peak", "allocated", "freed"]
    names = {f"{k}.{p}.{m}" for k in kinds for p in ("all", "small_pool", "large_pool") for m in metrics}
    names |= {f"oversize_{k}.{m}" for k in ("allocations", "segments") for m in metrics}
    names |= {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}
    assert set(CachingAllocator().stats()) == names | {"max_split_size"}


# ---- many steps in C ----

STEP = np.dtype([("op", "u4"), ("id", "u4"), ("bytes", "u8"), ("stream", "u8")])


def test_run_equals_single_calls():
    rng = random.Random(3)
    one, many, steps, live = CachingAllocator(), CachingAllocator(), [], {}
    for i in range(500):
        if live and rng.random() < 0.45:
            name = rng.choice(list(live))
            one.free(live.pop(name))
            steps.append((1, name, 0, 0))
        else:
            n, stream = draw_bytes(rng), rng.choice([0, 3])
            live[i] = one.malloc(n, stream)
            steps.append((0, i, n, stream))
    one.empty_cache()
    one.reset_peak_stats()
    addresses = np.zeros(500, np.uint64)
    assert many.run(np.array([*steps, (2, 0, 0, 0), (3, 0, 0, 0)], STEP), addresses) == 502
    assert one.stats() == many.stats()
    assert one._events() == many._events()
    assert all(addresses[name] == address for name, address in live.items())


def test_run_refuses_bad_steps():
    a = CachingAllocator()
    addresses = np.zeros(2, np.uint64)
    with refused("step", 2):
        a.run(np.array([(0, 2, 512, 0)], STEP), addresses)
    with refused("step", 9):
        a.run(np.array([(9, 0, 512, 0)], STEP), addresses)
    with refused("steps, addresses"):
        a.run(b"abc", addresses)
    with pytest.raises(TypeError):
        a.run(np.array([(0, 0, 512, 0)], STEP), bytes(16))


def test_threads_wait_for_each_other():
    a = CachingAllocator(history=False)
    steps = np.array([(k % 2, i, 512 * (i + 1), 0) for _ in range(20) for k in range(2) for i in range(200)], STEP)
    threads = [threading.Thread(target=lambda: a.run(steps, np.zeros(200, np.uint64))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert a.memory_allocated() == 0
    assert a.stats()["allocation.all.allocated"] == 4 * 20 * 200


# ---- settings and bad input ----


def test_from_conf():
    conf = "max_split_size_mb:64, garbage_collection_threshold:0.8,expandable_segments:True,"
    a = CachingAllocator.from_conf(conf + "roundup_power2_divisions:[64:8,256:4,>:1],backend:native", total_memory=GIB)
    settings = a._settings()
    assert settings["max_split_size"] == 64 * MIB
    assert settings["gc_threshold"] == 0.8
    assert settings["allowed_memory"] == GIB  # the threshold acts on a fraction, taken to be 1
    assert settings["expandable_segments"] is True
    assert settings["divisions"] == (8,) * 7 + (0, 4) + (1,) * 7
    shown_settings = a.snapshot()["allocator_settings"]
    again = CachingAllocator.from_conf(shown_settings["PYTORCH_CUDA_ALLOC_CONF"], total_memory=GIB)
    assert again._settings() == settings
    assert CachingAllocator.from_conf("")._settings() == CachingAllocator()._settings()


@pytest.mark.parametrize(
    "conf",
    [
        "max_split_size_mb",
        "max_split_size_mb:x",
        "unknown:1",
        "backend:jemalloc",
        "a:[1:2",
        "expandable_segments:yes",
    ],
)
def test_from_conf_refuses(conf):
    with refused("conf"):
        CachingAllocator.from_conf(conf)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_memory": -1}, ("total_memory",)),
        ({"total_memory": 0}, ("total_memory",)),
        ({"total_memory": 1 << 61}, ("total_memory",)),
        ({"max_split_size_mb": 19}, ("max_split_size",)),
        ({"max_non_split_rounding_mb": 3}, ("max_non_split_rounding",)),
        ({"roundup_power2_divisions": 3}, ("roundup_power2_divisions", 3)),
        ({"roundup_power2_divisions": {3: 4}}, ("roundup_power2_divisions size in MiB", 3)),
        ({"roundup_power2_divisions": [4, 4]}, ("roundup_power2_divisions", 2)),
        ({"garbage_collection_threshold": 0.5}, ("total_memory",)),
        ({"garbage_collection_threshold": 1.0, "total_memory": GIB}, ("garbage_collection_threshold", 1.0)),
        ({"backend": "cudamallocasync"}, ("backend", "'cudamallocasync'")),
        ({"backend": "cudaMallocAsync", "expandable_segments": True}, ("expandable_segments",)),
        ({"backend": "cudaMallocAsync", "max_split_size_mb": 128}, ("max_split_size_mb",)),
        ({"memory_fraction": 1.5, "total_memory": GIB}, ("memory_fraction", 1.5)),
    ],
)
def test_bad_settings(settings, message):
    with refused(*message):
        CachingAllocator(**settings)


def test_bad_calls():
    a = CachingAllocator()
    for bad in (-1, 1 << 64):
        with refused("bytes"):
            a.malloc(bad)
    with refused("bytes", "float", kind=TypeError):
        a.malloc(1.5)
    with refused("bytes", kind=OverflowError):
        a.malloc((1 << 60) + 1)
    with refused("stream"):
        a.malloc(1, stream=-1)
    x = a.malloc(1000)
    a.free(x)
    for address in (x, x + 512, 12345):
        with refused("address"):
            a.free(address)
    assert a.malloc(0) == 0
    a.free(0)
    assert a.memory_allocated() == 0


def test_addresses_never_run_out_silently():
    """Segments of 2^60 bytes: the model's addresses end, and that is an error, not a wrap."""
    a = CachingAllocator(history=False)
    with refused("bytes", kind=ArgumentOverflowError):
        for _ in range(8):
            a.malloc(1 << 60)
    assert a.memory_reserved() < 1 << 62
