"""Objects that two threads, a callback or a fork reach at once work, wait or say why not; nothing hangs or crashes.

What would take pytest down with it runs in a process of its own, with a limit that a deadlock meets.
"""

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from engine import latents, small_vae
from errors import refused

from vaemem import CachingAllocator, _core

pytestmark = [pytest.mark.core, pytest.mark.python]

LIMIT = 120  # seconds: many times what any of these takes
PROLOGUE = f"""
import gc, os, signal, sys, threading, time
import numpy as np
sys.path.append({str(Path(__file__).parent)!r})
from engine import latents, small_vae
"""


def run(script: str) -> str:
    """The script in a process of its own; small_vae, latents, threading, os and np are there."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROLOGUE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "PYTHONMALLOC": "debug"},  # which overwrites what is freed
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


# ---- two threads ----


def test_a_trace_and_a_script_on_one_allocator():
    """A call of a process comes between the steps of CachingAllocator.run, which lets other threads in now and then."""
    run("""
        from vaemem import CachingAllocator, _core
        allocator = CachingAllocator(history=False)
        trace = _core.Trace()
        for i in range(300):
            trace.take(700 * (i % 7 + 1), f"t{i}")
        for i in range(300):
            trace.give(i)
        steps = np.zeros(40_000, [("op", "u4"), ("id", "u4"), ("bytes", "u8"), ("stream", "u8")])
        steps["id"] = np.arange(40_000) // 2 % 500
        steps["op"] = np.arange(40_000) % 2
        steps["bytes"] = 513 + 64 * (np.arange(40_000) % 91)
        play = _core.Play(_core.Script(), allocator, 0, cublas_bytes=0, cublaslt_bytes=0, cublaslt_use="each")
        stop = threading.Event()
        def script():
            while not stop.is_set():
                allocator.run(steps, np.zeros(500, np.uint64))
        other = threading.Thread(target=script)
        other.start()
        for _ in range(200):
            play.call(trace, [], [])
        stop.set()
        other.join()
        assert allocator.memory_allocated() == 0
    """)


def test_a_trace_built_by_several_threads():
    trace = _core.Trace()

    def build():
        for i in range(2000):
            trace.give(trace.take(64, f"name {i % 50}"))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for t in threads:
        t.start()
    for _ in range(20):
        assert len(trace.steps) <= 16_000
    for t in threads:
        t.join()
    given = [number for op, number, *_ in trace.steps if op == "give"]
    assert len(trace.steps) == 16_000 and sorted(given) == list(range(8000))


def test_an_estimate_does_not_wait_for_a_run_of_another_thread():
    vae = small_vae()
    z = latents(vae, 16, 16)
    entered, release = threading.Event(), threading.Event()

    def hold(done, total):
        entered.set()
        assert release.wait(LIMIT)

    runner = threading.Thread(target=lambda: vae.decode(z, progress=hold))
    runner.start()
    assert entered.wait(LIMIT)
    got = []
    other = threading.Thread(target=lambda: got.append(vae.estimate("decode", 64, 64)))
    other.start()
    other.join(LIMIT / 4)
    answered = len(got) == 1
    release.set()
    runner.join()
    assert answered and got[0].peak_bytes == vae.last_run.peak_bytes


# ---- the same thread again ----


@pytest.mark.parametrize("op", ["encode", "decode"])
def test_estimate_in_a_progress_callback(op):
    vae = small_vae()
    data = latents(vae, 32, 32) if op == "decode" else np.zeros((1, 3, 128, 128), np.float32)
    want = vae.estimate(op, 128, 128)
    seen = []
    getattr(vae, op)(data, progress=lambda done, total: seen.append(vae.estimate(op, 128, 128)))
    assert seen and all(run == want for run in seen)
    # and the run's own figures do not show that somebody asked
    assert vae.last_run.peak_bytes == want.peak_bytes and vae.last_run.reserved_bytes == want.reserved_bytes


def test_what_a_progress_callback_cannot_do_says_so():
    vae = small_vae()
    z = latents(vae, 16, 16)
    want = vae.decode(z)
    calls = {
        "trim": vae.trim,
        "decode": lambda: vae.decode(z),
        "encode": lambda: vae.encode(np.zeros((1, 3, 8, 8), np.float32)),
        "set_tensor": lambda: vae._core.set_tensor("post_quant_conv.bias", np.zeros(4, np.float32)),
    }
    refused = {}

    def progress(done, total):
        for name, call in calls.items():
            with pytest.raises(RuntimeError) as error:
                call()
            refused[name] = str(error.value)

    assert np.array_equal(vae.decode(z, progress=progress), want)
    assert set(refused) == set(calls)
    for name, sentence in refused.items():
        assert sentence.startswith(f"{name}: this thread is in the middle of another call of this same VAE"), sentence
        assert "wait until that call has returned" in sentence
    assert np.array_equal(vae.decode(z), want)


def test_save_in_a_progress_callback(tmp_path):
    """It only reads weights, as the run does; the lock is still held afterwards, and given back at the end."""
    vae = small_vae()
    z = latents(vae, 16, 16)
    want = vae.decode(z)
    vae.save(tmp_path / "before.safetensors")

    def progress(done, total):
        vae.save(tmp_path / "during.safetensors")
        with refused("trim", kind=RuntimeError):
            vae.trim()

    assert np.array_equal(vae.decode(z, progress=progress), want)
    assert (tmp_path / "during.safetensors").read_bytes() == (tmp_path / "before.safetensors").read_bytes()
    vae.trim()
    other = threading.Thread(target=vae.trim)  # would wait for ever for a lock that was kept
    other.start()
    other.join(LIMIT / 4)
    assert not other.is_alive() and np.array_equal(vae.decode(z), want)


def test_a_signal_handler_may_ask_but_not_change():
    run("""
        vae = small_vae()
        seen = []
        def handler(*_):
            seen.append(vae.estimate("decode", 8, 8).peak_bytes > 0)
            try:
                vae.trim()
            except RuntimeError as error:
                seen.append(str(error).partition(":")[0])
        signal.signal(signal.SIGUSR1, handler)
        def progress(done, total):
            if not seen:
                os.kill(os.getpid(), signal.SIGUSR1)
        vae.decode(latents(vae, 16, 16), progress=progress)
        assert seen[:2] == [True, "trim"], seen
    """)


def test_a_signal_is_heard_while_a_long_list_is_made_and_many_steps_are_taken():
    run("""
        from vaemem import CachingAllocator, _core
        trace, heard = _core.Trace(), []
        for i in range(300_000):
            trace.take(8, "x")
        def handler(*_):
            trace.blas("x")
            heard.append(True)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        listed = len(trace.steps)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert heard and 300_000 <= listed < len(trace.steps)
        steps = np.zeros(1 << 22, [("op", "u4"), ("id", "u4"), ("bytes", "u8"), ("stream", "u8")])
        steps["op"], steps["bytes"] = np.arange(1 << 22) % 2, 1000
        signal.signal(signal.SIGALRM, lambda *_: 1 // 0)
        allocator = CachingAllocator(history=False)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            allocator.run(steps, np.zeros(1, np.uint64))
        except ZeroDivisionError:
            assert allocator.memory_allocated() == 0
        else:
            raise SystemExit("the signal was not heard")
    """)


@pytest.mark.parametrize("kind", ["allocator", "trace", "convs"])
def test_a_del_run_by_garbage_collection(kind):
    """Making the items of a list may collect garbage, whose __del__ may change the object that is being read."""
    run(f"""
        from vaemem import CachingAllocator, _core
        allocator, trace = CachingAllocator(), _core.Trace()
        def conv(n):
            trace.conv(("float16", n, 8, 8, 8, 8, 3, 1, 1, "nchw"), f"conv {{n}}")
        for i in range(3000):
            allocator.free(allocator.malloc(1000))
            trace.give(trace.take(8, "x"))
            conv(1 + i)
        change, read = {{
            "allocator": (allocator.malloc, allocator._events),
            "trace": (lambda i: trace.take(8, f"late {{i}}"), lambda: trace.steps),
            "convs": (lambda i: conv(5000 + i), lambda: trace.convs),
        }}[{kind!r}]
        want, seen = read(), []
        class Late:
            def __init__(self):
                self.me = self
            def __del__(self):
                for i in range(10_000):
                    change(1 + i)
                seen.append("done")
        Late()
        gc.set_threshold(50)
        got = read()
        gc.set_threshold(700)
        gc.collect()
        assert got[:len(want)] == want and len(want) >= 3000 and seen == ["done"], (len(want), len(got), seen)
    """)


# ---- the interpreter exits ----


def test_a_daemon_thread_decodes_while_the_interpreter_exits():
    """Python ends that thread inside the run; its stack, where the workers' job lies, goes with it."""
    out = run("""
        import types
        vae = small_vae()
        vae.threads = 4
        z = latents(vae, 128, 128)
        began = threading.Event()
        def decode():
            while True:
                vae.decode(z, progress=lambda done, total: began.set())
        def deep(n):  # a stack of which little is left when the thread ends
            return max([n], key=lambda _: deep(n - 1)) if n else decode()
        threading.Thread(target=lambda: deep(80), daemon=True).start()
        assert began.wait(60)
        class Slow:  # keeps the interpreter from its end while the thread would go on
            def __del__(self, sleep=time.sleep, print=print):
                sleep(1)
                print("done", flush=True)
        sys.modules["slow"] = types.ModuleType("slow")
        sys.modules["slow"].it = Slow()
    """)
    assert out == "done\n"


# ---- fork ----


def test_a_fork_while_another_thread_decodes():
    run("""
        vae = small_vae()
        kept = vae.decode(latents(vae, 4, 4))
        want = vae.estimate("decode", 8, 8).peak_bytes
        entered, release = threading.Event(), threading.Event()
        def hold(done, total):
            entered.set()
            release.wait()
        runner = threading.Thread(target=lambda: vae.decode(latents(vae, 64, 64), progress=hold))
        runner.start()
        assert entered.wait(60)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                vae.decode(latents(vae, 4, 4))
            except RuntimeError as error:
                assert str(error).startswith("decode: this process was forked"), error
            else:
                raise SystemExit("the run was not refused")
            assert vae.estimate("decode", 8, 8).peak_bytes == want and vae.reserved_bytes
            del kept  # charged to an account that the other thread may have been writing
            mine = small_vae()
            assert np.isfinite(mine.decode(latents(mine, 4, 4))).all()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        release.set()
        runner.join()
        assert np.isfinite(vae.decode(latents(vae, 4, 4))).all()
    """)


@pytest.mark.skipif(
    "VAEMEM_SANITIZED" in os.environ,
    reason="the sanitizer's own malloc may be locked by the other thread when the child is made, and stay so in it",
)
def test_forks_at_any_moment_of_a_run():
    """A child can always free what it inherited: no lock of an account is held there by a thread it does not have."""
    run("""
        vae = small_vae()
        vae.threads = 2
        z = latents(vae, 2, 2)
        kept = [vae.decode(z) for _ in range(2)]
        stop = threading.Event()
        def decode():
            while not stop.is_set():
                vae.decode(z)
        runner = threading.Thread(target=decode)
        runner.start()
        try:
            for _ in range(60):
                pid = os.fork()
                if pid == 0:
                    signal.alarm(60)
                    kept.clear()
                    vae.reserved_bytes
                    vae.estimate("decode", 8, 8)
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
        finally:
            stop.set()
            runner.join()
    """)


# A sanitizer's allocator may be locked by another thread while the process forks, and the child waits for it for ever.
@pytest.mark.parametrize(
    "threads", [1, pytest.param(3, marks=pytest.mark.skipif("VAEMEM_SANITIZED" in os.environ, reason="forks threads"))]
)
def test_a_fork_in_a_runs_own_callback(threads):
    """Alone, the child ends the run; where its workers stayed with the parent it says so and can decode again."""
    run(f"""
        vae = small_vae()
        vae.threads = {threads}
        z = latents(vae, 64, 64)
        want = vae.decode(z)
        pids = []
        def fork(done, total):
            if not pids and done < total:
                pids.append(os.fork())
        try:
            got = vae.decode(z, progress=fork)
            assert {threads} == 1 or pids != [0], "the child went on without its workers"
        except RuntimeError as error:
            assert pids == [0] and {threads} > 1 and "fork" in str(error), error
            got = vae.decode(z)
        assert np.array_equal(got, want) and pids
        if pids == [0]:
            os._exit(0)
        assert os.waitpid(pids[0], 0)[1] == 0
    """)


# ---- arguments that change while they are read ----


class Shrinks:
    """A number that empties the list or dict that it is in."""

    def __init__(self, items: list | dict):
        self.items = items

    def __index__(self) -> int:
        self.items.clear()
        gc.collect()
        return 2

    def __bool__(self) -> bool:
        return bool(self.__index__())

    def __float__(self) -> float:
        return float(self.__index__())


def test_divisions_that_shrink_while_they_are_read():
    items: list = [1 << 10] * 16
    items[0] = Shrinks(items)
    settings = CachingAllocator()._settings()
    del settings["divisions"]
    made = _core.CachingAllocator(divisions=items, **settings)
    assert not items and made._settings()["divisions"] == (2, *[1 << 10] * 15)


def test_blocks_that_shrink_while_they_are_read():
    items: list = [None]
    items += [((1 << 30) + 512 * i, 512, 512, i % 2) for i in range(1, 200)]
    items[0] = (1 << 30, 512, 512, Shrinks(items))
    allocator = CachingAllocator()
    allocator._restore(1 << 30, 1 << 21, 0, True, items)
    assert not items and allocator.memory_allocated() == 99 * 512


def test_rows_whose_numbers_change_the_script_that_they_are_for():
    from vaemem import SimulatedProcess

    def conv(n):
        trace = _core.Trace()
        trace.conv(("float16", n, 8, 8, 8, 8, 3, 1, 1, "nchw"), "conv")
        return trace

    class Calls:
        def __index__(self) -> int:
            process.call(conv(2))
            return 0

    process = SimulatedProcess("RTX 4090")
    process.call(conv(1))
    with refused("workspaces"):
        process._play.rows(((Calls(),),), ((0, process._script.events),))
    assert len(process._play.rows(((0, 0),), ((0, process._script.events),))) == 1


@pytest.mark.parametrize("key", ["latents_mean", "latents_std"])
def test_lists_of_an_architecture_that_shrink_while_they_are_read(key):
    items: list = [1e6, 1e6, 1e6, 1e6]
    items[0] = Shrinks(items)
    made = _core.Model({**_core.models()["playground-v2.5"], key: items}, "decoder")
    assert not items and made.arch[key] == (2, 1e6, 1e6, 1e6)


@pytest.mark.parametrize("key", ["scaling_factor", "norm_eps", "use_quant_conv", "batch_norm_eps"])
def test_an_architecture_that_shrinks_while_it_is_read(key):
    arch = {**_core.models()["flux2"], "scaling_factor": 1.0, "shift_factor": 0.0}
    arch[key] = Shrinks(arch)
    made = _core.Model(arch, "decoder")
    assert not arch and made.arch[key] == (True if key.startswith("use") else 2)


def test_a_number_that_frees_itself_is_still_there_to_be_named():
    run("""
        from vaemem import _core
        class Number:
            def __float__(self):
                arch.clear()
                return "text"
        arch = _core.models()["sdxl"]
        arch["norm_eps"] = Number()
        try:
            _core.Model(arch, "decoder")
        except TypeError as error:
            assert "norm_eps: expected a number, got <__main__.Number" in str(error), error
    """)


def test_extents_that_shrink_while_they_are_read():
    for at, name in enumerate(("r", "stride", "padding", "dilation", "output_padding")):
        items: list = [None, 1 << 20, 1 << 20]
        items[0] = Shrinks(items)
        given = [items if i == at else 1 for i in range(5)]
        trace = _core.Trace()
        trace.conv(("float32", 1, 4, 8, 8, 4, *given[:3], "nchw", given[3], 1, given[4], 8), "name")
        (conv,) = trace.convs
        assert not items and (2, 1 << 20, 1 << 20) in conv, name


# ---- names of more than ASCII ----


@pytest.mark.parametrize("lead", range(4))
@pytest.mark.parametrize("letter", ["e", "\u00e9", "\u20ac", "\U0001f600"])
def test_long_names_are_cut_between_characters(letter, lead):
    name = "x" * lead + letter * 100
    trace = _core.Trace()
    trace.take(8, name)
    ((*step, shown),) = trace.steps
    assert step == ["take", 0, 8] and name.endswith(shown) and len(shown.encode()) > 60
    arch = _core.Model({**_core.models()["sdxl"], "name": name}, "decoder").arch
    assert name.startswith(arch["name"]) and len(arch["name"].encode()) > 27


# ---- sums ----


def test_sums_of_a_long_script_pass_what_int64_holds():
    """2^60 bytes again and again: the sums of all that was ever taken are not undefined (UBSan looks on)."""
    allocator = CachingAllocator()
    for _ in range(20):
        allocator.free(allocator.malloc(1 << 60))
    stats = allocator.stats()
    assert stats["allocated_bytes.all.allocated"] % 2**64 == 20 * 2**60 % 2**64
    assert stats["allocated_bytes.all.current"] == 0 and stats["allocated_bytes.all.peak"] == 1 << 60


def test_a_decode_imports_no_masked_arrays():
    """A fork while another thread's first decode imported numpy.ma left the child waiting for the import's lock."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from engine import latents, small_vae
vae = small_vae("sd")
sys.modules.pop("numpy.ma", None)
vae.decode(latents(vae, 2, 2))
assert "numpy.ma" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True)
