"""Snapshots written, read back and replayed: whole, cut, tampered, and pickles that are no snapshots at all."""

import copy
import pickle
import pickletools
import random
import tracemalloc

import numpy as np
import pytest
from errors import refused

from vaemem import _core
from vaemem.prediction.caching_allocator import CachingAllocator, load_snapshot, parse_conf
from vaemem.prediction.replay import replay

pytestmark = [pytest.mark.core, pytest.mark.python]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def run(seed=1, steps=600, limit_refuses=False, **settings):
    """A simulated process with three streams, pending frees, emptied caches and, with a limit, refusals."""
    rng = random.Random(seed)
    a = CachingAllocator(**settings)
    live = []
    for i in range(steps):
        a.tag(i % 3)
        kind = rng.random()
        if live and kind < 0.42:
            a.free(live.pop(rng.randrange(len(live))), pending=rng.random() < 0.1)
        elif kind < 0.44:
            a.empty_cache()
        else:
            n = rng.choice(
                [rng.randint(1, 64 * KIB), rng.randint(1, MIB), rng.randint(MIB, 12 * MIB), rng.randint(1, 40) * MIB]
            )
            try:
                live.append(a.malloc(n, rng.choice([0, 0, 9, 11])))
            except _core.OutOfMemoryError:
                assert limit_refuses
    return a


# ---- writing ----


@pytest.mark.parametrize("expandable", [False, True])
def test_snapshot_adds_up(expandable):
    a = run(expandable_segments=expandable)
    s = a.snapshot(frames=["one", [{"name": "two", "filename": "f.py", "line": 2}]])
    stats = a.stats()
    assert sum(g["total_size"] for g in s["segments"]) == a.memory_reserved()
    assert sum(g["allocated_size"] for g in s["segments"]) == a.memory_allocated()
    assert sum(g["active_size"] for g in s["segments"]) == stats["active_bytes.all.current"]
    assert sum(g["requested_size"] for g in s["segments"]) == stats["requested_bytes.all.current"]
    for g in s["segments"]:
        assert sum(b["size"] for b in g["blocks"]) == g["total_size"]
        assert [b["address"] for b in g["blocks"]] == sorted(b["address"] for b in g["blocks"])
    frames = {str(b["frames"]) for g in s["segments"] for b in g["blocks"]}
    assert any("'one'" in f for f in frames)
    assert any("'f.py'" in f for f in frames)


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_viz_reads_it(expandable, tmp_path):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    a = run(expandable_segments=expandable)
    a.save_snapshot(tmp_path / "s.pickle", frames=["a", "b", "c"])
    with open(tmp_path / "s.pickle", "rb") as file:
        snapshot = pickle.load(file)
    assert snapshot == a.snapshot(frames=["a", "b", "c"])
    text = viz.segsum(snapshot)  # asserts its own sums
    assert f"total_reserved: {viz.Bytes(a.memory_reserved())}" in text
    assert f"segments: {len(snapshot['segments'])}" in text
    assert f"{len(a._events())} entries" in viz.trace(snapshot)
    for plot in (viz.trace_plot, viz.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)
    flames = viz.memory(snapshot, format_flamegraph=str), viz.segments(snapshot, format_flamegraph=str)
    weighed = sum(int(line.rsplit(" ", 1)[1]) for line in flames[0].splitlines())
    assert weighed == a.memory_reserved()
    assert "active_allocated;vaemem:0:b" in flames[1]


# ---- replaying ----

SETTINGS = {
    "plain": {},
    "roundup": {"roundup_power2_divisions": {64: 4, ">": 8}},
    "limit": {"total_memory": 400 * MIB, "limit_refuses": True},
    "max split": {"max_split_size_mb": 24, "total_memory": 500 * MIB, "limit_refuses": True},
    "rounding": {
        "max_split_size_mb": 24,
        "max_non_split_rounding_mb": 40,
        "total_memory": 500 * MIB,
        "limit_refuses": True,
    },
    "collect": {"total_memory": 900 * MIB, "garbage_collection_threshold": 0.3, "limit_refuses": True},
    "expandable": {"expandable_segments": True},
    "expandable, limit": {"expandable_segments": True, "total_memory": 500 * MIB, "limit_refuses": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_whole_history_is_reproduced(name, tmp_path):
    a = run(**SETTINGS[name])
    a.save_snapshot(tmp_path / "s.pickle")
    r = replay(tmp_path / "s.pickle")
    assert (r.whole, r.why_not) == (True, [])
    assert r.first_difference is None
    assert r.same
    assert r.recorded_reserved == a.memory_reserved()
    assert r.recorded_reserved_peak == a.max_memory_reserved()
    assert r.recorded_allocated == a.memory_allocated()
    assert [b[:-1] for b in r.allocator._blocks()] == [
        b[:-1] for b in a._blocks()
    ]  # but for tags, which are not recorded
    # A limit is not in a snapshot: what only a limit explains is taken from the record and counted.
    assert bool(r.imposed_releases) == (name in ("max split", "rounding", "collect"))


def test_model_addresses_reproduce_it_too():
    """Where the driver puts segments decides only between blocks of equal size."""
    r = replay(run(steps=300).snapshot(), addresses="model")
    assert r.recorded_reserved == r.simulated_reserved
    assert r.whole


@pytest.mark.parametrize("seed", range(6))
def test_history_cut_at_the_front(seed):
    """As after a full ring buffer: what the trace does not show is rebuilt from the end, and said."""
    snapshot = run(seed, steps=500).snapshot()
    trace = snapshot["device_traces"][0]
    cut = len(trace) // 2
    while trace[cut]["action"] == "alloc" or trace[cut - 1]["action"] == "segment_alloc":
        cut += 1  # an entry's halves stay together
    snapshot["device_traces"][0] = trace[cut:]
    r = replay(snapshot)
    assert not r.whole
    assert any("older than the trace" in reason for reason in r.why_not)
    assert (r.recorded_reserved, r.recorded_segments) == (r.simulated_reserved, r.simulated_segments)
    assert r.recorded_reserved_peak == r.simulated_reserved_peak
    assert r.first_difference is None


def test_cut_expandable_history_is_not_rebuilt():
    snapshot = run(expandable_segments=True).snapshot()
    snapshot["device_traces"][0] = snapshot["device_traces"][0][200:]
    r = replay(snapshot)
    assert not r.whole
    assert any("expandable" in reason for reason in r.why_not)


def without(snapshot, action, nth):
    """The snapshot without the nth entry of that action."""
    result = copy.deepcopy(snapshot)
    trace = result["device_traces"][0]
    del trace[[i for i, e in enumerate(trace) if e["action"] == action][nth]]
    return result


@pytest.mark.parametrize("action", ["alloc", "free_completed", "segment_alloc", "segment_free"])
def test_lost_entries_are_noticed(action):
    snapshot = run(seed=4).snapshot()
    assert replay(snapshot).same
    for nth in (3, 10):
        r = replay(without(snapshot, action, nth))
        assert not (r.whole and r.same), nth


def test_a_lost_segment_is_noticed_where_its_address_was_used_before():
    a = CachingAllocator()
    for _ in range(2):
        a.free(a.malloc(30 * MIB))
        a.empty_cache()
    snapshot = a.snapshot()
    first, second = (e["addr"] for e in snapshot["device_traces"][0] if e["action"] == "segment_alloc")
    for entry in snapshot["device_traces"][0]:  # as a driver may give it again
        entry["addr"] -= (second - first) * (entry["addr"] >= second)
    assert replay(snapshot).whole
    assert not replay(without(snapshot, "segment_alloc", 1)).whole


def test_first_difference_is_named():
    snapshot = run(seed=8, steps=200).snapshot()
    trace = snapshot["device_traces"][0]
    last = max(i for i, e in enumerate(trace) if e["action"] == "alloc")
    trace[last]["addr"] += 512
    r = replay(snapshot)
    assert f"event {last} (alloc of {trace[last]['size']} bytes)" in r.first_difference
    assert not r.same
    assert r.first_difference in " ".join(str(r).split())


def test_wrong_settings_show():
    snapshot = run(seed=2).snapshot()
    r = replay(snapshot, roundup_power2_divisions=2)
    assert r.first_difference
    assert r.simulated_allocated > r.recorded_allocated


def test_devices():
    snapshot = run(steps=20).snapshot()
    snapshot["device_traces"].insert(0, [])
    for segment in snapshot["segments"]:
        segment["device"] = 1
    assert replay(snapshot).device == 1
    assert replay(snapshot, device=1).same
    with refused("device", 0):
        replay(snapshot, device=0)
    snapshot["device_traces"][0] = snapshot["device_traces"][1]
    with refused("device"):
        replay(snapshot)
    with refused("snapshot", "none"):
        replay({"segments": [], "device_traces": [[], []]})
    with refused("addresses"):
        replay(snapshot, addresses="mine")


def test_private_pools_are_named():
    snapshot = run(steps=50).snapshot()
    snapshot["segments"][0]["segment_pool_id"] = (0, 1)
    r = replay(snapshot)
    assert not r.whole
    assert any("CUDA graphs" in reason for reason in r.why_not)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: s.pop("segments"), ["'segments'", None]),
        (lambda s: s.update(device_traces=3), ["'device_traces'", 3]),
        (lambda s: s.update(segments=[1]), ["'segments'", 1]),
        (lambda s: s["device_traces"][0].append("x"), ["'x'"]),
        (lambda s: s["device_traces"][0][5].update(addr=-1), ["'addr'", -1]),
        (lambda s: s["device_traces"][0][5].update(size=1 << 63), ["'size'"]),
        (lambda s: s["device_traces"][0][5].update(stream="0"), ["'stream'", "'0'"]),
        (lambda s: s["segments"][0].pop("total_size"), ["'total_size'", None]),
        (lambda s: s["segments"][0].update(blocks=None), ["'blocks'", None]),
        (lambda s: s["segments"][0]["blocks"].append({"size": []}), ["'size'"]),
        (lambda s: s["segments"][0]["blocks"].append({"size": 1 << 60}), ["'size'", 1 << 60]),
        (lambda s: s["device_traces"][0][5].update(addr=10**5000), ["'addr'", 16610]),
        (lambda s: s["segments"][0].update(segment_pool_id=7), ["'segment_pool_id'", 7]),
        (lambda s: s["segments"].append(s["segments"][0]), ["'blocks'"]),
        (lambda s: s["allocator_settings"].update(roundup_power2_divisions=dict.fromkeys(range(16), "1")), ["'1'"]),
        (lambda s: s["allocator_settings"].update(roundup_power2_divisions=dict.fromkeys(range(16), True)), [True]),
        (
            lambda s: s["allocator_settings"].update(PYTORCH_CUDA_ALLOC_CONF="\x1b[2Jmax_non_split_rounding_mb"),
            [r"'\x1b[2J"],
        ),
        (lambda s: s.update(allocator_settings=7), ["allocator_settings", 7]),
        (
            lambda s: s["allocator_settings"].update(roundup_power2_divisions=dict.fromkeys(range(16), 3)),
            ["roundup_power2_divisions", 3],
        ),
    ],
)
def test_malformed_snapshots(change, names):
    snapshot = run(steps=30).snapshot()
    change(snapshot)
    with refused(names=names):
        replay(snapshot)


def test_scrambled_snapshots_never_crash():
    """Random numbers in random places: an answer that says it is not whole, or a ValueError."""
    rng = random.Random(0)
    original = run(steps=80).snapshot()
    for _ in range(150):
        snapshot = copy.deepcopy(original)
        for _ in range(rng.randint(1, 6)):
            target = rng.choice(snapshot["device_traces"][0] + snapshot["segments"] + snapshot["segments"][0]["blocks"])
            key = rng.choice([k for k, v in target.items() if isinstance(v, int) and not isinstance(v, bool)])
            target[key] = rng.choice([0, 1, 512, 2 * MIB, rng.getrandbits(40), rng.getrandbits(61), target[key] + 512])
        try:
            replay(snapshot)
        except ValueError:
            pass


def test_work_is_bounded_by_the_size_of_the_pickle(tmp_path):
    """8 KB that name one list of 2000 blocks for 2000 segments, and an option string of many options."""
    block = {"size": 0, "state": "active_allocated"}
    segment = {"address": 0, "total_size": 0, "blocks": [block] * 2000}
    snapshot = {"segments": [segment] * 2000, "device_traces": [[{"action": "alloc", "addr": 0, "size": 512}]]}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot, protocol=4))
    assert (tmp_path / "s.pickle").stat().st_size < 9000
    tracemalloc.start()
    try:
        with refused("snapshot"):
            replay(tmp_path / "s.pickle")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert len(parse_conf("pinned_a:1," * 200_000)) == 0


STEP = [("op", "u4"), ("id", "u4"), ("bytes", "u8"), ("stream", "u8")]
TAKE, GIVE, EMPTY = range(3)


def holes(n):
    """Live pages with unmapped ones between them, then requests that fit none of these."""
    pages = [(TAKE, i, 20 * MIB, 0) for i in range(2 * n)]
    return [*pages, *((GIVE, i, 0, 0) for i in range(0, 2 * n, 2)), (EMPTY, 0, 0, 0)] + [
        (TAKE, i, 40 * MIB, 0) for i in range(0, 2 * n, 2)
    ]


def many_streams(n):
    """A live block on each stream, whose segment cannot be given back, and a cache emptied as often."""
    blocks = [(TAKE, i, 512, i) for i in range(n)]
    return blocks + [
        step for i in range(n, 2 * n) for step in ((TAKE, i, 3 * MIB, 0), (GIVE, i, 0, 0), (EMPTY, 0, 0, 0))
    ]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("kind", [holes, many_streams])
def test_work_does_not_grow_with_the_square_of_the_events(kind, expandable):
    """It ends at once; with the square it took minutes."""
    for n, history in ((40_000, False), (4_000, True)):
        a = CachingAllocator(expandable_segments=expandable, reservation=1 << 43, history=history)
        steps = np.array(kind(n), STEP)
        assert a.run(steps, np.zeros(2 * n, "u8")) == len(steps)
    assert replay(a.snapshot()).same


def test_a_setting_that_only_looks_like_one_is_none():
    snapshot = run(steps=30).snapshot()
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "pinned_max_non_split_rounding_mb:1"
    assert replay(snapshot).same


# ---- the pickle reader ----


def plain(rng, depth=0):
    """Random plain data, as deep as 4."""
    kind = rng.randrange(11 if depth < 4 else 8)
    if kind < 8:
        return [
            None,
            rng.random() < 0.5,
            rng.choice(
                [0, -1, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), rng.getrandbits(62)]
            ),
            rng.choice([0.0, -1.5, float("inf"), rng.random()]),
            rng.choice(["", "é", "\ud800", "x" * 300, str(rng.random())]),
            rng.choice([b"", b"\0" * 300, b"abc"]),
            (),
            "shared",
        ][kind]
    items = [plain(rng, depth + 1) for _ in range(rng.randrange(6))]
    if kind == 8:
        return items + items[:1]  # the same object twice: memo
    if kind == 9:
        return tuple(items)
    return {rng.choice([str(i), i, float(i), str(i).encode()]): v for i, v in enumerate(items)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_pickle_reads(protocol):
    rng = random.Random(protocol)
    for _ in range(300):
        value = plain(rng)
        data = pickle.dumps(value, protocol=protocol)
        if any(op.name == "GLOBAL" for op, _, _ in pickletools.genops(data)):
            assert protocol == 2  # which writes bytes as a call
            continue
        assert _core.read_pickle(data) == value
        assert _core.read_pickle(pickletools.optimize(data)) == value


def test_shared_and_circular_objects():
    inner = [1]
    both = _core.read_pickle(pickle.dumps([inner, inner]))
    assert both[0] is both[1]
    inner.append(inner)
    circle = _core.read_pickle(pickle.dumps(inner))
    assert circle[1] is circle


called = []


def call():
    called.append(1)


class Evil:
    def __reduce__(self):
        return call, ()


LONG = 1 << 62
HOSTILE = {
    "reduce": pickle.dumps({"segments": Evil()}),
    "reduce, protocol 2": pickle.dumps(Evil(), protocol=2),
    "protocol 0": pickle.dumps([1, 2], protocol=0),
    "global": b"\x80\x02cos\nsystem\n.",
    "inst": b"\x80\x02(ios\nsystem\n.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "persistent": b"\x80\x02K\x01Q.",
    "extension": b"\x80\x02\x82\x01.",
    "set": pickle.dumps({1, 2}),
    "bytearray": pickle.dumps(bytearray(b"x"), protocol=5),
    "complex": pickle.dumps(1j),
    "empty": b"",
    "no stop": b"\x80\x04N",
    "stop on nothing": b"\x80\x04.",
    "two objects": b"\x80\x04NN.",
    "open mark": b"\x80\x04N(.",
    "old protocol": b"\x80\x01N.",
    "new protocol": b"\x80\x09N.",
    "huge text": b"\x80\x04\x8d" + LONG.to_bytes(8, "little") + b"x.",
    "huge bytes": b"\x80\x04\x8e" + (2**64 - 1).to_bytes(8, "little") + b"x.",
    "huge integer": b"\x80\x04\x8b" + (2**31 - 1).to_bytes(4, "little") + b"\1.",
    "negative length": b"\x80\x04\x8b" + b"\xff\xff\xff\xff" + b"\1.",
    "long integer": pickle.dumps(1 << 64),
    "memo bomb": b"\x80\x02]r\xff\xff\xff\xff.",
    "memo unset": b"\x80\x02h\x05.",
    "memo of nothing": b"\x80\x04\x94.",
    "pop past mark": b"\x80\x02N(0.",
    "pop nothing": b"\x80\x02" + b"0.",
    "append to nothing": b"\x80\x02Na.",
    "append to none": b"\x80\x02NNa.",
    "appends without mark": b"\x80\x02]Ne.",
    "item for a list": b"\x80\x02]NNs.",
    "odd items": b"\x80\x02}(NNNu.",
    "list as key": b"\x80\x02}]Ns.",
    "deep tuple as key": b"\x80\x02})" + b"\x85" * 200000 + b"Ns.",
    "tuple of nothing": b"\x80\x02\x87.",
    "broken text": b"\x80\x04\x8c\x02\xff\xfe.",
    "cut float": b"\x80\x02G\0\0.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(name, tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(HOSTILE[name])
    with refused("snapshot", path=path) as caught:
        replay(path)
    assert str(caught.value).count("\n") == 0
    assert not called


def test_deep_nesting_is_read_and_freed():
    deep = _core.read_pickle(b"\x80\x02" + b"]" * 100000 + b"a" * 99999 + b".")
    assert isinstance(deep, list)
    _core.read_pickle(b"\x80\x02)" + b"\x85" * 100000 + b".")


def test_every_cut_is_an_error():
    data = pickle.dumps(run(steps=4).snapshot(), protocol=4)
    for end in range(len(data)):
        with refused(names=["pickle: byte "]):
            _core.read_pickle(data[:end])


def test_flipped_bytes_never_crash(tmp_path):
    rng = random.Random(2)
    original = pickle.dumps(run(steps=10).snapshot(), protocol=4)
    path = tmp_path / "s.pickle"
    for _ in range(400):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            replay(path)
        except ValueError:
            pass


def test_file_limits(tmp_path):
    path = tmp_path / "s.pickle"
    run(steps=10).save_snapshot(path)
    size = path.stat().st_size
    assert load_snapshot(path, max_bytes=size)["segments"]
    with refused("snapshot", size, names=[size - 1]):
        load_snapshot(path, max_bytes=size - 1)
    with pytest.raises(FileNotFoundError):
        load_snapshot(tmp_path / "none")
    path.write_bytes(pickle.dumps([1, 2]))
    with refused("snapshot", "list"):
        load_snapshot(path)
