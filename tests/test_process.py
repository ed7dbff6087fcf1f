"""What a simulated process holds, by name, and what was live at its peak: the core beside a slow and plain model."""

import gc
import random

import numpy as np
import pytest
from errors import refused
from playing import Playing

from vaemem import CachingAllocator, OutOfMemoryError, SimulatedProcess, _core
from vaemem.prediction.held_tensors import Variables

pytestmark = [pytest.mark.core, pytest.mark.python]

BLAS = {"cublas_bytes": 8 << 20, "cublaslt_bytes": 1 << 20}


def process(use="each", **device):
    allocator = CachingAllocator(history=False, **device)
    return allocator, Playing(allocator, **BLAS, cublaslt_use=use)


def pairs(listed):
    """(name, bytes) of what was live, without what the allocator rounded up."""
    return [(name, size) for name, size, _ in listed]


def peak(core, *reading):
    step, tensors = core.peak(*reading)
    return step, pairs(tensors)


def a_trace(r, names="abc"):
    """A call of a module: takes and gives back, asks a convolution and products, leaves a storage or two."""
    trace, held = _core.Trace(), []
    trace.take(1, "first")
    for _ in range(r.randint(1, 20)):
        what = r.choice("tttgcbl")
        if what == "t":
            size = r.choice([0, 1000, 3 << 20, r.randint(1, 1 << 25)])
            held.append(trace.take(size, r.choice(names), r.choice((0, 0, 1, 3))))
        elif what == "g" and held:
            trace.give(held.pop(r.randrange(len(held))))
        elif what == "c":
            trace.conv(("float16", 1, 64, r.randint(8, 64), 64, 64, 3, 1, 1, "nchw"), "conv [workspace]")
        elif what in "bl":
            trace.blas("product [workspace]", what == "l")
    for one in held[2:]:
        trace.give(one)
    return trace


class Plain:
    """The same by dicts: who is live is listed again after every step."""

    def __init__(self, allocator, use):
        self.allocator, self.use, self.live, self.kept = allocator, use, {}, {}
        self.most, self.outside, self.within, self.step = 0, [], [], None

    def take(self, name, addresses, sizes):
        self.live.update((at, (name, size)) for at, size in zip(addresses, sizes, strict=True) if at)
        self.note()

    def note(self, step=None, within=()):
        if self.allocator.max_memory_allocated() > self.most:
            self.most = self.allocator.max_memory_allocated()
            self.outside, self.within, self.step = list(self.live.values()), list(within), step

    def reset(self):
        self.most, self.outside, self.within, self.step = (
            self.allocator.memory_allocated(), list(self.live.values()), [], None,
        )  # fmt: skip

    def call(self, trace, left, allocated, taken):
        steps, at = trace.steps, int(allocated.argmax())
        held, kept = (
            {},
            [("cublas [workspace]", BLAS["cublas_bytes"]), ("cublaslt [workspace]", BLAS["cublaslt_bytes"])],
        )
        for op, number, size, name in steps[: at + 1]:
            if op == "take":
                held[number] = name, size
            elif op == "give":
                del held[number]
            elif op == "cublas" or (op == "cublaslt" and self.use != "each"):
                held["cublas"] = kept[0]
                if op == "cublaslt" and self.use == "kept":
                    held["cublaslt"] = kept[1]
        op, number, _, name = steps[at]
        if op == "conv":
            held["workspace"] = name, taken[number]
        elif op == "cublaslt" and self.use == "each":
            held["workspace"] = name, BLAS["cublaslt_bytes"]
        there = {name for name, _ in self.live.values()}
        self.note(name, [one for one in held.values() if one not in kept or one[0] not in there])
        used = [op for op, *_ in steps if op == "cublas" or (op == "cublaslt" and self.use != "each")]
        for name, size in kept[: 2 if self.use == "kept" and "cublaslt" in used else bool(used)]:
            if name not in self.kept:
                self.kept[name] = True
                self.live[name] = name, size
        for op, number, size, name in steps:
            if op == "take" and number in left:
                self.live[left[number]] = name, size

    def peak(self):
        names = {}
        for name, size in (*self.outside, *self.within):
            names[name] = names.get(name, 0) + size
        return self.step, [(name, size) for name, size in names.items() if size]


@pytest.mark.parametrize("use", ["each", "kept", "shared"])
@pytest.mark.parametrize("seed", range(20))
def test_as_the_plain_model(seed, use):
    r = random.Random(seed)
    allocator, core = process(use)
    plain, traces = Plain(allocator, use), [a_trace(r) for _ in range(4)]
    for _ in range(200):
        held = [address for address in plain.live if isinstance(address, int)]
        what = r.choice(["hold", "hold", "release", "call", "call", "reset", "copy", "many", "look"])
        if what == "hold":
            size = r.choice([0, 512, r.randint(1, 1 << 26)])
            plain.take("x", core.take("x", [size]), [size])
        elif what == "many":
            sizes = [r.randint(0, 1 << 22) for _ in range(r.randint(0, 90))]
            plain.take("many", core.take("many", sizes), sizes)
        elif what == "release" and held:
            gone = r.sample(held, r.randint(1, len(held)))
            core.give(gone)
            for address in gone:
                del plain.live[address]
        elif what == "copy" and held:
            old = r.sample(held, r.randint(1, min(len(held), 5)))
            new, sizes = list(old), [r.choice([0, r.randint(1, 1 << 24)]) for _ in old]
            core.replace("weights", new, sizes)
            most = plain.most  # of several copies: which one made the peak is seen below, with one copy
            for before, after, size in zip(old, new, sizes, strict=True):
                if not size:
                    assert after == before
                    continue
                name, _ = plain.live[before]
                if len(old) == 1:
                    plain.take(name, [after], [size])
                del plain.live[before]
                plain.live[after] = name, size
            if len(old) > 1 and allocator.max_memory_allocated() > most:
                core.reset_peak()
                plain.reset()
        elif what == "call":
            trace = r.choice(traces)
            wanted = [r.randint(0, 1 << 24) for _ in trace.convs]
            left, allocated, _ = core.call(trace, wanted, wanted)
            plain.call(trace, left, allocated, wanted)
        elif what == "reset":
            core.reset_peak()
            plain.reset()
            assert sum(size for _, size in pairs(core.baseline())) == sum(size for _, size in plain.live.values())
        assert peak(core) == plain.peak()
        for address in r.sample(held, min(len(held), 3)):
            assert core.bytes_of(address) == plain.live.get(address, (None, 0))[1]
    assert core.bytes_of(0) == core.bytes_of(513) == 0


def test_a_full_device():
    """What the failed call took is given back; what was copied before stays copied; a workspace of cuBLAS's stays."""
    allocator, core = process("kept", total_memory=64 << 20)
    first = core.take("a", [10 << 20, 10 << 20])
    with pytest.raises(OutOfMemoryError) as full:
        core.take("b", [10 << 20, 60 << 20])
    assert core.names[full.value.tag] == "b" and full.value.requested == 60 << 20
    assert allocator.memory_allocated() == 20 << 20
    addresses = list(first)
    with pytest.raises(OutOfMemoryError):
        core.replace("weights", addresses, [12 << 20, 60 << 20])
    assert addresses[0] != first[0] and addresses[1] == first[1]
    assert [core.bytes_of(address) >> 20 for address in addresses] == [12, 10] and core.bytes_of(first[0]) == 0
    trace = _core.Trace()
    trace.blas("product")
    trace.take(60 << 20, "too much")
    with pytest.raises(OutOfMemoryError) as full:
        core.call(trace, [], [])
    assert core.names[full.value.tag] == "too much"
    assert allocator.memory_allocated() == (22 << 20) + BLAS["cublas_bytes"]
    short = _core.Trace()
    short.blas("product")
    core.call(short, [], [])
    assert allocator.memory_allocated() == (22 << 20) + BLAS["cublas_bytes"]  # it is not taken twice
    core.reset_peak()
    assert ("cublas [workspace]", BLAS["cublas_bytes"]) in pairs(core.baseline())


def test_next_workspaces():
    _, core = process(total_memory=64 << 20)
    trace = _core.Trace()
    trace.conv(("float16", 1, 64, 64, 64, 64, 3, 1, 1, "nchw"), "conv [workspace]")
    for _ in range(2):  # the plan that ran is kept to
        core.call(trace, [100 << 20], [5 << 20])
        assert core.refused == 1 and peak(core) == ("conv [workspace]", [("conv [workspace]", 5 << 20)])


def test_no_device_is_large_enough():
    """The search for the least device ends at the largest request that PyTorch takes."""
    _, core = process()
    core.count(0, 0, 0, 0, 0, (1 << 60) - (2 << 20))
    core.read("")
    assert core.least(True, 0, 0) == (1 << 60) - (2 << 20)
    core.count(0, 0, 0, 0, 0, (1 << 60) + 1)
    core.read("")
    with refused(names=["least: "], kind=OverflowError):
        core.least(True, 0, 0)


def test_weights_are_placed():
    allocator, core = process()
    sizes = [1 << 20, 512, 3 << 20]
    addresses = core.take("weights of sd15", sizes, "weights")
    assert [core.bytes_of(address) for address in addresses] == sizes
    assert peak(core) == (None, [("weights of sd15", sum(sizes))]) and core.names == ["weights", "weights of sd15"]
    core.give(addresses)
    assert allocator.memory_allocated() == 0


def test_again():
    """The same steps on a fresh allocator: with the same workspaces as it was, with others as with these at first."""
    r = random.Random(5)
    traces = [a_trace(r) for _ in range(3)]
    takes = {}

    def played(number):
        allocator, core = process("kept")
        held = core.take("held", [3 << 20, 0, 50 << 20])
        for trace in (*traces, *traces):
            wanted = [
                takes.setdefault((conv, number), r.randint(0, 1 << r.choice((12, 20, 25)))) for conv in trace.convs
            ]
            left, *_ = core.call(trace, wanted, wanted)
            core.replace("weights", held[:1], [4 << 20]) if trace is traces[1] else None
            core.give(left.values())
            core.empty_cache()
            held = core.take("held", [5 << 20])
        return core, allocator

    one, two = played(1), played(2)
    for core, _ in (one, two):
        rows = tuple(tuple(takes[conv, number] for conv in core.convs) for number in (1, 2, 1))
        most = [[allocator.max_memory_reserved()] for _, allocator in (one, two, one)]
        assert core.rows(rows, ((0, core.events),)) == most
    with refused("workspaces"):
        one[0].rows(((),), ())
    with refused("rows"):
        one[0].rows((), ((0, one[0].events + 1),))
    with refused("rows"):
        one[0].rows((), ((3, 2),))


@pytest.mark.parametrize("conf", ["", "max_split_size_mb:32", "expandable_segments:True"])
def test_again_of_many_at_once(conf):
    """Rows that make the same segments are played once: each alone says the same as all together."""
    r = random.Random(9)
    core = Playing(CachingAllocator.from_conf(conf, history=False), **BLAS, cublaslt_use="kept")
    traces = [a_trace(r) for _ in range(3)]
    core.take("held", [3 << 20, 50 << 20])
    for trace in (*traces, *traces):
        wanted = [r.randint(0, 1 << 25) for _ in trace.convs]
        left, *_ = core.call(trace, wanted, wanted)
        core.give(left.values())
        core.empty_cache()
    half, steps = core.events // 2, core.events
    rows = [tuple(r.randint(0, 1 << r.choice((12, 19, 21, 26))) for _ in core.convs) for _ in range(20)]
    rows += [tuple(size + r.randint(0, 600) for size in row) for row in rows]
    spans = ((0, steps), (half, steps), (half, steps - 3), (half, half))
    alone = [core.rows((row,), spans)[0] for row in rows]
    assert core.rows(tuple(rows), spans) == alone
    assert len({tuple(most) for most in alone}) > 3 and all(most[3] == 0 for most in alone)


def least_by_whole_plays(core, low, high):
    """The bisection of csrc/predict/judge.c, each play from the script's start."""

    def fits(pages):
        return core.elsewhere(CachingAllocator(history=False, total_memory=max(pages, 1) << 21))[1] is None

    little, enough = low >> 21, high >> 21
    assert fits(enough)
    while enough - little > 1:
        middle = (little + enough) // 2
        little, enough = (little, middle) if fits(middle) else (middle, enough)
    return enough << 21


@pytest.mark.parametrize("use", ["each", "kept", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_least_begins_late(seed, use):
    """A search begins its plays where too little memory begins to matter. It finds what whole plays find, or it says
    that this machine has no memory."""
    r = random.Random(seed)
    core = Playing(CachingAllocator(history=False), **BLAS, cublaslt_use=use)
    traces, held = [a_trace(r) for _ in range(3)], core.take("held", [r.randint(1, 1 << 24) for _ in range(40)])
    takes = {conv: r.randint(0, 1 << r.choice((12, 20, 27))) for trace in traces for conv in trace.convs}
    for trace in (*traces, *traces):
        core.reset_peak()
        wanted = [takes[conv] for conv in trace.convs]
        left, *_ = core.call(trace, wanted, [size // 2 for size in wanted])
        core.give(left.values())
        core.read("")
        gone = r.sample(held, 5)
        held = [one for one in held if one not in gone] + core.take("more", [r.randint(1, 1 << 25) for _ in range(4)])
        core.give(gone)
        core.empty_cache() if r.random() < 0.4 else None
        copied = held[:3]
        core.replace("weights", copied, [r.randint(1, 1 << 22) for _ in copied])
        held[:3] = copied
    high = core.most_reserved
    for low in (0, max(reading[-2] for reading in core.readings), high - (2 << 20)):
        assert core.least(False, low, high) == least_by_whole_plays(core, low, high)
    want, n, done = core.least(False, 0, high), 1, False
    while not done:
        _core.fail_alloc_at(n)
        try:
            assert core.least(False, 0, high) == want
            done = _core.fail_alloc_at(0) > 0
        except MemoryError:
            assert _core.fail_alloc_at(0) == 0
        n += 1 if n < 60 else n // 8
    assert n > 20


@pytest.mark.each_value
@pytest.mark.parametrize("use", ["each", "kept", "shared"])
@pytest.mark.parametrize("runtime, side", [("comfyui", 640), ("diffusers", 768)])
@pytest.mark.parametrize("mib", [0, 350, 280, 200])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_stretches(runtime, side, use, mib, conf):
    """Tiles and lines that go as one before are passed over: all counts are those of a trace that does not say so."""
    arch, r = _core.models()["sdxl"], random.Random(3)
    trace = _core.Trace.vae(arch, runtime, "decode", "float16", side, side, 1, 256)
    twin = _core.Trace()
    for op, number, size, name in trace.steps:
        if op == "take":
            twin.take(size, name)
        elif op == "give":
            twin.give(number)
        elif op == "conv":
            twin.conv(trace.convs[number], name)
        else:
            twin.blas(name, op == "cublaslt")
    wanted = [r.randint(0, 1 << r.choice((18, 20, 27))) for _ in trace.convs]
    rows = tuple(tuple(r.randint(0, 1 << r.choice((18, 20, 26))) for _ in wanted) for _ in range(6))

    def said(call):
        allocator = CachingAllocator.from_conf(conf, history=False, total_memory=mib << 20 or None)
        core, heights = Playing(allocator, **BLAS, cublaslt_use=use), []
        weights = core.take("weights", [3 << 20, 1 << 12] * 20)
        for _ in range(2):
            core.reset_peak()
            try:
                left, *found = core.call(call, wanted, [size // 2 for size in wanted])
            except OutOfMemoryError as full:
                heights.append(str(full))
            else:
                heights += [one.tolist() for one in found]
                core.give(left.values())
            core.read("")
            core.give([weights.pop()])
        spans = ((0, core.events), (core.events // 2, core.events))
        played = core.readings, core.peak(0), allocator.stats(), core.refused, [] if mib else core.rows(rows, spans)
        return heights, played, core.least(False, 0, core.most_reserved)

    assert said(trace) == said(twin)


def play(core):
    trace = a_trace(random.Random(1))
    held = core.take("held", [1 << 20] * 40)
    core.replace("weights", held, [2 << 20] * 40)
    core.take("weights of sd15", [1 << 20, 512] * 100, "weights")
    core.reset_peak()
    left, *_ = core.call(trace, [1 << 20] * len(trace.convs), [0] * len(trace.convs))
    core.give([*left.values(), *held[::2]])
    core.empty_cache()
    core.rows(tuple([size << 20] * len(core.convs) for size in (1, 9)), ((0, core.events),))
    core.count(1, 2, 3, 4, 5, 6)
    core.read("a phase")
    other, error = core.elsewhere(CachingAllocator(history=False))
    if error:
        raise error
    assert other.readings == core.readings and other.peak(0) == core.peak(0)
    return core.peak(), core.baseline(), core.names, core.readings, core.least(True, 0, core.most_reserved)


def test_phases_have_names_and_work():
    _, core = process()
    core.count(1, 2, 3, 4, 5, 7)
    core.times(10)
    core.count(100, 0, 0, 0, 1, 6)
    core.times(1)
    core.count(1000, 0, 0, 0, 0, 0)
    core.take("x", [1 << 20])
    core.read("denoise")
    core.times(1 << 40)
    core.count(1 << 40, 1 << 23, 0, (1 << 24) - 1, 1, 0)
    core.count(0, 0, 0, 1 << 40, 0, 0)
    core.times(0)
    core.count(1 << 60, 0, 0, 0, 0, 1 << 62)
    core.read("")
    most = (1 << 64) - 1
    assert core.phases == [
        ("denoise", 2001, 2, 3, 4, 15, 7), ("", most, 1 << 63, 0, most, 1 << 40, 1 << 62),
    ]  # fmt: skip
    other, _ = core.elsewhere(CachingAllocator(total_memory=64 << 20, history=False))
    assert other.readings == core.readings
    with pytest.raises(ValueError):
        core.read("a\0b")


def test_a_phase_that_is_not_reached_has_no_reading():
    _, core = process()
    core.count(1, 0, 0, 0, 0, 0)
    core.take("x", [1 << 20])
    core.read("small")
    core.take("y", [1 << 30])
    core.read("large")
    other, full = core.elsewhere(CachingAllocator(total_memory=64 << 20, history=False))
    assert isinstance(full, OutOfMemoryError)
    assert other.readings == core.readings[:1]


def test_what_the_allocator_rounded_up():
    """Of each storage when it is taken: to 512 bytes, and where a large block's remainder is too small to split off."""
    _, core = process()
    small, large = core.take("w", [1, 513, 1024]), core.take("large", [20 << 20, 0])
    assert core.peak()[1] == [("w", 1538, 511 + 511), ("large", 20 << 20, 0)]
    core.give(large[:1])
    core.take("v", [(20 << 20) - 5000])
    core.replace("w", small, [4096, 0, 0])  # its rounding stays what it was
    core.reset_peak()
    assert core.baseline() == [("w", 1537 + 4096, 1022), ("v", (20 << 20) - 5000, 5000)]
    late = core.take("w", [1000])  # what comes after the peak, but in the phase, is rounded up too
    core.give(late)
    core.read("")
    assert core.peak(0)[1][0] == ("w", 1537 + 4096 + 1000, 1022 + 24)
    core.give([*small, *late[:0]])
    core.take("w", [1])
    assert core.peak()[1][0][2] == 511  # none of the earlier ones


def test_every_allocation_fails_once():
    want = play(process()[1])
    for n in range(1, 10_000):
        _, core = process()
        _core.fail_alloc_at(n)
        try:
            got = play(core)
        except MemoryError as error:
            assert not isinstance(error, OutOfMemoryError)
            assert _core.fail_alloc_at(0) == 0
            assert core.peak() is not None and play(process()[1]) == want
        else:
            assert _core.fail_alloc_at(0) > 0 and got == want
            break
    assert n > 30


def test_bad_arguments():
    allocator, core = process()
    trace = a_trace(random.Random(3))
    with refused("storage"):
        core.give([512])
    [address] = core.take("x", [512])
    core.give([address])
    with pytest.raises(ValueError):
        core.give([address])
    with refused("storage"):
        core.replace("weights", [address], [1])
    with refused("bytes", 2):
        core.replace("weights", [address], [1, 2])
    with refused("bytes"):
        core.take("x", [1 << 64])
    with pytest.raises((ValueError, OverflowError)):
        core.take("x", [-1])
    with pytest.raises(OverflowError):
        core.take("x", [(1 << 60) + 1])
    with pytest.raises(TypeError):
        core.take("x", ["1"])
    with refused("workspaces, next"):
        core.call(trace, [1] * (len(trace.convs) + 1), [])
    with refused("trace", kind=TypeError):
        core.call(allocator, [], [])
    with refused("allocator", names=["CachingAllocator"], kind=TypeError):
        _core.Play(core.script, trace, 0, **BLAS, cublaslt_use="each")
    with refused("script", kind=TypeError):
        _core.Play(trace, allocator, 0, **BLAS, cublaslt_use="each")
    with refused("cublaslt_use"):
        Playing(allocator, **BLAS, cublaslt_use="never")
    assert core.peak()[1] == [("x", 512, 0)]


def test_a_process_keeps_what_it_names():
    """A process has its traces' names when these are gone; a circle of objects is collected."""
    allocator, core = process()
    trace = _core.Trace()
    trace.take(1000, "a name of its own")
    left, *_ = core.call(trace, [], [])
    del trace
    gc.collect()
    assert "a name of its own" in core.names and peak(core)[1] == [("a name of its own", 1000)]
    allocator.mine = core
    del allocator, core
    gc.collect()
    assert len(left) == 1


def test_what_is_no_tensor_or_model_is_refused_by_name():
    process = SimulatedProcess()
    vae = process.load("sdxl")
    z = process.tensor((1, 4, 8, 8), "float16")
    for call, said in (
        (lambda: process.decode(vae, None), ("latents", "NoneType")),
        (lambda: process.encode(vae, np.zeros(3)), ("image", "ndarray")),
        (lambda: process.decode("sdxl", z), ("vae", "str")),
        (lambda: process.convert(None, "float32"), ("vae", "NoneType")),
        (lambda: process.elementwise(None), ("x", "NoneType")),
        (lambda: process.sample(vae), ("posterior", "LoadedVAE")),
        (lambda: process.drop(z, 3), ("drop", "int")),
    ):
        with refused(*said, kind=TypeError):
            call()


def test_a_failed_call_leaves_no_trace_in_others():
    """What plays elsewhere raises its own error; an address of someone else's is not freed; a search ends whatever its
    hints are."""
    p = SimulatedProcess("RTX 3060", allocator=CachingAllocator(total_memory=1 << 30, history=False))
    held = p.hold("weights", 600 << 20)
    with pytest.raises(OutOfMemoryError):
        p.hold("more", 1 << 30)
    with refused("judge"):
        p.takes([(0, 0)], first=99)
    before = p.allocated
    foreign = p.allocator.malloc(1 << 20)
    with refused("storage"):
        p.release([foreign])
    assert p.allocated == before + (1 << 20)
    p.allocator.free(foreign)
    assert p.least(low=8 << 30, high=4 << 30) == p.least(low=0, high=4 << 30) == 600 << 20
    p.release([held])


def test_a_trace_that_changes_after_its_call():
    """A script keeps the trace as it was called."""
    _, core = process()
    trace = _core.Trace()
    trace.conv(("float16", 1, 64, 64, 64, 64, 3, 1, 1, "nchw"), "conv [workspace]")
    trace.take(1 << 20, "first")
    core.call(trace, [5 << 20], [0])
    trace.take(2 << 20, "second")
    trace.blas("product")
    core.read("")
    left, *_ = core.call(trace, [5 << 20], [0])
    assert len(left) == 2 and len(core.names) == 7
    other, _ = core.elsewhere(CachingAllocator(history=False))
    assert other.readings == core.readings and core.readings[0][3] == 5 << 20
    assert pairs(other.peak()[1]) == [("first", 2 << 20), ("second", 2 << 20), ("cublas [workspace]", 8 << 20)]


def test_a_script_that_was_written_elsewhere():
    """A process plays it whole, if it is new; a process that plays another's does nothing more."""
    script = _core.Script()
    [held] = script.take("weights", [3 << 30])
    script.read("load")
    p, small = SimulatedProcess(), SimulatedProcess(allocator=CachingAllocator(total_memory=2 << 30, history=False))
    p.play(script)
    assert p.allocated == 3 << 30 and p.counted(0)["name"] == "load"
    assert small.play_of(p).bytes == 3 << 30
    for call in (lambda: small.hold("x", 1), lambda: small.call(_core.Trace()), lambda: small.play_of(p)):
        with refused("process"):
            call()
    with refused("script"):
        p.play(script)
    p.release([held])
    assert p.allocated == 0 and script.events == 3
    with refused("workspaces, next"):
        p._play.answer([1], [])


def test_variables_that_are_not_bound():
    v = Variables(SimulatedProcess())
    assert not hasattr(v, "x") and getattr(v, "x", 7) == 7
    with refused("x", kind=AttributeError):
        _ = v.x
