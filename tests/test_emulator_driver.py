"""The stand-in for the CUDA driver: lazy, strict, and countable."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path

import cuda_driver
import numpy as np
import pytest
from cuda_kernels import ProbeArgs
from emulator import build
from errors import refused

if not shutil.which("g++"):
    pytest.skip("the emulator is compiled by g++, which is missing", allow_module_level=True)

PROBE = [build.HERE / "probe.cu"]
NOT_READY, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, DESTROYED = 600, 1, 2, 201, 709
ILLEGAL_ADDRESS, LAUNCH_FAILED, INVALID_HANDLE, CAPTURED, FORBIDDEN = 700, 719, 400, 907, 900
INVALIDATED, ISOLATION, NOT_FOUND, INVALID_IMAGE, NOT_INITIALISED = 901, 905, 500, 200, 3
FATBIN = (0xBA55ED50).to_bytes(4, "little") + bytes(12)


class Failure(Exception):
    """A CUresult."""


class Driver:
    """libcuda.so.1 by ctypes; a call that fails raises Failure(code)."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str):
        def call(*args):
            given = [c_void_p(a) if isinstance(a, int) and a > 0xFFFF else a for a in args]
            if code := getattr(self.library, name)(*given):
                raise Failure(code)

        return call

    def new(self, name: str, *args, kind=c_void_p) -> int:
        out = kind()
        getattr(self, name)(byref(out), *args)
        return out.value

    def live(self) -> list[int]:
        counts = (c_size_t * 9)()
        self.library.emulator_live(counts)
        return list(counts)

    def stream(self) -> int:
        return self.new("cuStreamCreate", 1)

    def memory(self, x: np.ndarray) -> int:
        """Device memory with x in it, put there by hand."""
        at = self.new("cuMemAlloc_v2", c_size_t(x.nbytes))
        ctypes.memmove(at, x.ctypes.data, x.nbytes)
        return at

    def floats(self, at: int, n: int = 1) -> list[float]:
        """What device memory holds now, whatever waits in streams."""
        return list((c_float * n).from_address(at))

    def function(self, name: str) -> int:
        return self.new("cuModuleGetFunction", self.new("cuModuleLoadData", FATBIN), f"vm_probe_{name}".encode())

    def step(self, function: int, at: int, stream: int, n: int = 1) -> None:
        """Enqueues out = 2 out + 1."""
        params = (c_void_p * 1)(ctypes.addressof(args := ProbeArgs(out=at, n=n)))
        self.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params, None)
        args.out = None  # the launch has its own copy


@pytest.fixture(scope="module")
def libcuda():
    if not build.cuda_include():
        pytest.skip("the stand-in driver is compiled with <cuda.h>, which is missing")
    return build.build(PROBE)[0]


@pytest.fixture
def driver(libcuda, capfd):
    d = Driver(libcuda)
    d.cuInit(0)
    d.cuCtxPushCurrent_v2(d.new("cuDevicePrimaryCtxRetain", 0))
    yield d
    d.emulator_fail_at(c_size_t(0), 0, 0)
    if d.library.cuCtxPopCurrent_v2(None) == 0 and d.library.cuDevicePrimaryCtxReset_v2(0):
        raise AssertionError("the context could not be reset")
    assert d.live() == [0] * 9


def fails(code: int):
    return refused(kind=Failure, args=(code,))


def test_streams_are_lazy(driver):
    d = driver
    at, s, f = d.memory(np.float32([1, 0])), d.stream(), d.function("step")
    d.step(f, at, s)
    host = np.zeros(2, np.float32)
    d.cuMemcpyDtoHAsync_v2(host.ctypes.data, at, c_size_t(8), s)
    assert d.floats(at, 2) == [1, 0] and host[0] == 0
    with fails(NOT_READY):
        d.cuStreamQuery(s)
    d.cuStreamSynchronize(s)
    assert d.floats(at, 2) == [3, 0] and host[0] == 3
    d.cuStreamQuery(s)
    # the host's memory is read when the copy runs
    d.cuMemcpyHtoDAsync_v2(at, host.ctypes.data, c_size_t(8), s)
    host[0] = 5
    d.cuStreamSynchronize(s)
    assert d.floats(at) == [5]


def test_polling_comes_to_an_end(driver):
    d = driver
    at, s, f, e = d.memory(np.float32([0])), d.stream(), d.function("step"), d.new("cuEventCreate", 0)
    d.cuEventQuery(e)  # never recorded
    for _ in range(5):
        d.step(f, at, s)
    d.cuEventRecord(e, s)
    polls = 0
    while d.library.cuEventQuery(c_void_p(e)) == NOT_READY:
        polls += 1
    assert polls == 5 and d.floats(at) == [31]


def test_events_order_streams(driver):
    d = driver
    at, f, e = d.memory(np.float32([1])), d.function("step"), d.new("cuEventCreate", 2)
    first, second = d.stream(), d.stream()
    d.step(f, at, first)
    d.cuEventRecord(e, first)
    d.step(f, at, first)
    d.cuStreamWaitEvent(second, e, 0)
    host = c_float()
    d.cuMemcpyDtoHAsync_v2(ctypes.addressof(host), at, c_size_t(4), second)
    d.cuStreamSynchronize(second)
    assert host.value == 3 and d.floats(at) == [3]  # the second step is still to come
    d.cuStreamSynchronize(first)
    assert d.floats(at) == [7]
    with fails(INVALID_HANDLE):  # made without timing
        d.cuEventElapsedTime(byref(host), e, e)


def test_null_stream(driver):
    d = driver
    at, f = d.memory(np.float32([1])), d.function("step")
    for flags, want in ((0, 7), (1, 3)):  # a blocking stream's work comes first; a non-blocking one's does not
        s = d.new("cuStreamCreate", flags)
        ctypes.memmove(at, np.float32([1]).ctypes.data, 4)
        d.step(f, at, s)
        d.step(f, at, None)
        d.cuStreamSynchronize(None)
        assert d.floats(at) == [want]
        d.cuStreamDestroy_v2(s)


def test_elapsed_time(driver):
    d, ms = driver, c_float(-1)
    events = [d.new("cuEventCreate", 0) for _ in range(2)]
    s = d.stream()
    with fails(INVALID_HANDLE):
        d.cuEventElapsedTime(byref(ms), *events)
    for e in events:
        d.cuEventRecord(e, s)
    with fails(NOT_READY):
        d.cuEventElapsedTime(byref(ms), *events)
    d.cuEventSynchronize(events[1])
    d.cuEventElapsedTime(byref(ms), *events)
    assert 0 <= ms.value < 1000


def test_graphs(driver):
    d = driver
    at, s, f = d.memory(np.float32([0])), d.stream(), d.function("step")
    status, graph = c_int(), c_void_p()
    d.cuStreamBeginCapture_v2(s, 1)
    d.cuStreamIsCapturing(s, byref(status))
    d.step(f, at, s)
    d.step(f, at, s)
    d.cuStreamEndCapture(s, byref(graph))
    d.cuStreamSynchronize(s)
    assert status.value == 1 and d.floats(at) == [0]
    run = d.new("cuGraphInstantiateWithFlags", graph.value, c_ulonglong(0))
    d.cuGraphDestroy(graph.value)
    for _ in range(2):
        d.cuGraphLaunch(run, s)
    assert d.floats(at) == [0]
    d.cuGraphExecDestroy(run)  # launched already
    d.cuStreamSynchronize(s)
    assert d.floats(at) == [15]
    assert d.live()[5:7] == [0, 0]


def test_what_a_capture_forbids(driver):
    d = driver
    s, other, e, outside = d.stream(), d.stream(), *(d.new("cuEventCreate", 2) for _ in range(2))
    graph = c_void_p()
    d.cuEventRecord(outside, other)

    def refused(code, forbidden, at_end=INVALIDATED, mode=1):
        d.cuStreamBeginCapture_v2(s, mode)
        d.cuEventRecord(e, s)
        with fails(code):
            forbidden()
        with fails(at_end) if at_end else pytest.MonkeyPatch.context():
            d.cuStreamEndCapture(s, byref(graph))
        if not at_end:
            d.cuGraphDestroy(graph.value)

    refused(FORBIDDEN, lambda: d.cuStreamSynchronize(s))
    refused(FORBIDDEN, lambda: d.cuStreamSynchronize(s), mode=2)
    refused(FORBIDDEN, lambda: d.cuEventQuery(outside))
    refused(FORBIDDEN, lambda: d.new("cuMemAlloc_v2", c_size_t(4)))
    refused(ISOLATION, lambda: d.cuStreamWaitEvent(s, outside, 0))
    refused(CAPTURED, lambda: d.cuStreamWaitEvent(other, e, 0), at_end=0)
    refused(CAPTURED, lambda: d.cuEventSynchronize(e), at_end=0, mode=2)
    with fails(CAPTURED):
        d.cuEventQuery(e)


def test_memory(driver, monkeypatch):
    monkeypatch.setenv("VAEMEM_EMULATED_MEMORY", "4096")
    d, free, total = driver, c_size_t(), c_size_t()
    at = d.new("cuMemAlloc_v2", c_size_t(1000))
    assert at % 256 == 0 and np.isnan(d.floats(at, 250)).all()
    d.cuMemGetInfo_v2(byref(free), byref(total))
    assert (free.value, total.value) == (3072, 4096)
    with fails(OUT_OF_MEMORY):
        d.new("cuMemAlloc_v2", c_size_t(3073))
    with fails(INVALID_VALUE):
        d.new("cuMemAlloc_v2", c_size_t(0))
    s = d.stream()
    with fails(INVALID_VALUE):
        d.cuMemsetD8Async(at, 0, c_size_t(1001), s)
    pinned = d.new("cuMemHostAlloc", c_size_t(64), 0)
    assert d.live()[:4] == [1024, 1, 1, 1]
    for address, memory_type in ((at + 999, 2), (pinned, 1)):
        assert d.new("cuPointerGetAttribute", 2, address, kind=c_uint) == memory_type
    for address in (at + 1000, id(d)):
        with fails(INVALID_VALUE):
            d.new("cuPointerGetAttribute", 2, address, kind=c_uint)
    with fails(INVALID_VALUE):
        d.cuMemFree_v2(pinned)
    d.cuMemFreeHost(pinned)
    d.cuMemFree_v2(at)
    assert d.library.emulator_peak() == 1024 and d.live()[:3] == [0, 0, 0]


def test_rows_are_copied(driver):
    d = driver
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    at, s, out = d.memory(x), d.stream(), np.zeros((3, 2), np.float32)
    names = "x y type host device array pitch".split()
    kinds = [c_size_t, c_size_t, c_int, c_void_p, c_void_p, c_void_p, c_size_t]
    side = [(p + n, k) for p in ("from_", "to_") for n, k in zip(names, kinds, strict=True)]
    Copy = type("Copy", (ctypes.Structure,), {"_fields_": [*side, ("width", c_size_t), ("height", c_size_t)]})
    copy = Copy(from_x=4, from_y=1, from_type=2, from_device=at, from_pitch=20, to_type=1, width=8, height=3)
    copy.to_host, copy.to_pitch = out.ctypes.data, 8
    d.cuMemcpy2DAsync_v2(byref(copy), s)
    copy.height = 4  # one row more than there is
    with fails(INVALID_VALUE):
        d.cuMemcpy2DAsync_v2(byref(copy), s)
    d.cuStreamSynchronize(s)
    np.testing.assert_array_equal(out, x[1:, 1:3])


def test_faults_stick(driver, capfd):
    d = driver
    at, s, f = d.memory(np.zeros(64, np.float32)), d.stream(), d.function("step")
    d.step(f, at + 192, s, n=64)  # 16 floats are left there
    with fails(ILLEGAL_ADDRESS):
        d.cuStreamSynchronize(s)
    assert "vm_probe_step, block (0, 0, 0), thread" in capfd.readouterr().err
    with fails(ILLEGAL_ADDRESS):
        d.step(f, at, s)
    with fails(ILLEGAL_ADDRESS):
        d.cuMemFree_v2(at)
    assert d.live()[:2] == [0, 0]  # given back nevertheless


def test_memory_given_back_under_work_is_a_fault(driver, capfd):
    """CUDA leaves it open whether cuMemFree waits for what is in flight."""
    d = driver
    at, other, s, f = d.memory(np.zeros(1, np.float32)), d.memory(np.zeros(1)), d.stream(), d.function("step")
    d.step(f, at, s)
    d.cuCtxSynchronize()
    d.cuMemFree_v2(other)
    d.step(f, at, s)
    with fails(ILLEGAL_ADDRESS):
        d.cuMemFree_v2(at)
    assert capfd.readouterr().err


def test_work_of_another_thread_after_a_wait_is_no_fault(driver):
    """Two threads, each with a model of its own: one enqueues between the other's wait and its cuMemFree."""
    d = driver
    at, other, s, f = d.memory(np.zeros(1, np.float32)), d.memory(np.zeros(1)), d.stream(), d.function("step")
    context = d.new("cuCtxGetCurrent")

    def enqueue():
        d.cuCtxPushCurrent_v2(context)
        d.step(f, at, s)
        d.cuCtxPopCurrent_v2(None)

    thread = threading.Thread(target=enqueue)
    d.cuCtxSynchronize()
    thread.start()
    thread.join()
    d.cuMemFree_v2(other)
    assert d.floats(at) == [0]  # it still waits in its stream
    d.cuCtxSynchronize()
    assert d.floats(at) == [1]
    d.cuMemFree_v2(at)


def test_writes_beside_a_block_are_seen(driver, capfd):
    at = driver.memory(np.zeros(10, np.float32))
    ctypes.memset(at + 40, 0, 1)
    with fails(ILLEGAL_ADDRESS):
        driver.cuMemFree_v2(at)
    assert "40 bytes" in capfd.readouterr().err


def test_injected_failures(driver):
    d = driver
    before = d.library.emulator_calls()
    d.emulator_fail_at(c_size_t(2), OUT_OF_MEMORY, 0)
    s = d.stream()
    with fails(OUT_OF_MEMORY):
        d.stream()
    d.cuStreamDestroy_v2(s)
    assert d.library.emulator_calls() - before == 3
    e = d.new("cuEventCreate", 0)
    d.emulator_fail_at(c_size_t(1), LAUNCH_FAILED, 1)
    for _ in range(2):
        with fails(LAUNCH_FAILED):
            d.stream()
    with fails(LAUNCH_FAILED):
        d.cuEventDestroy_v2(e)
    assert d.live()[3:5] == [0, 0]


def test_contexts(libcuda, driver):
    d = driver
    current = d.new("cuCtxGetCurrent")
    d.memory(np.zeros(4))
    d.cuDevicePrimaryCtxReset_v2(0)
    with fails(DESTROYED):
        d.stream()
    d.cuCtxPopCurrent_v2(None)
    with fails(INVALID_CONTEXT):
        d.stream()
    with fails(DESTROYED):
        d.cuCtxPushCurrent_v2(current)
    assert d.live() == [0] * 9
    assert d.new("cuDevicePrimaryCtxRetain", 0) == current
    d.cuCtxPushCurrent_v2(current)


def test_modules(driver):
    d = driver
    with fails(INVALID_IMAGE):
        d.new("cuModuleLoadData", b"something else..")
    module = d.new("cuModuleLoadData", FATBIN)
    with fails(NOT_FOUND):
        d.new("cuModuleGetFunction", module, b"vm_probe_none")
    function = d.new("cuModuleGetFunction", module, b"vm_probe_reverse")
    x = np.arange(256, dtype=np.float32)
    at, s = d.memory(x), d.stream()
    params = (c_void_p * 1)(ctypes.addressof(args := ProbeArgs(in_=at, out=at, n=1)))
    before = d.library.emulator_launches()
    for shared, taken in ((48 << 10, True), ((48 << 10) + 1, False), (227 << 10, True), ((227 << 10) + 1, False)):
        if shared == 227 << 10:
            d.cuFuncSetAttribute(function, 8, shared)
        with pytest.MonkeyPatch.context() if taken else fails(INVALID_VALUE):
            d.cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, shared, s, params, None)
    assert args.n == 1
    with fails(INVALID_VALUE):
        d.cuFuncSetAttribute(function, 8, (227 << 10) + 1)
    d.cuModuleUnload(module)
    assert d.library.emulator_launches() - before == 2
    assert d.floats(at, 256) == list(x)  # turned twice


@pytest.mark.parametrize(("sm", "shared"), [(75, 64), (80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_device(driver, monkeypatch, sm, shared):
    monkeypatch.setenv("VAEMEM_EMULATED_SM", str(sm))
    monkeypatch.setenv("VAEMEM_EMULATED_DRIVER", "11080")
    major, minor, most = (driver.new("cuDeviceGetAttribute", which, 0, kind=c_int) for which in (75, 76, 97))
    assert (10 * major + minor, most) == (sm, shared << 10)
    assert driver.new("cuDriverGetVersion", kind=c_int) == 11080
    with fails(101):
        driver.new("cuDeviceGet", 1, kind=c_int)


def test_enqueue(driver):
    """How the stand-in cuDNN puts its work into a stream or a capture."""
    d, calls = driver, []
    callback = ctypes.CFUNCTYPE(None, c_void_p)
    run, free = callback(lambda p: calls.append(("run", p))), callback(lambda p: calls.append(("free", p)))
    s, graph = d.stream(), c_void_p()
    d.emulator_enqueue(s, run, c_void_p(1), free)
    assert calls == []
    d.cuStreamSynchronize(s)
    assert calls == [("run", 1), ("free", 1)]
    d.cuStreamBeginCapture_v2(s, 1)
    d.emulator_enqueue(s, run, c_void_p(2), free)
    d.cuStreamEndCapture(s, byref(graph))
    executable = d.new("cuGraphInstantiateWithFlags", graph.value, c_ulonglong(0))
    for _ in range(2):
        d.cuGraphLaunch(executable, s)
    d.cuGraphDestroy(graph.value)
    d.cuGraphExecDestroy(executable)
    d.cuStreamSynchronize(s)
    assert calls[2:] == [("run", 2), ("run", 2), ("free", 2)]


def test_every_entry_is_there(libcuda):
    """What the backend looks up, and what CUDA's names are for it."""
    library = ctypes.CDLL(str(libcuda))
    text = (build.CUDA / "driver.h").read_text()
    names = re.findall(r'"(cu[A-Z]\w+)"', text)
    assert len(names) > 40
    for name in names:
        assert hasattr(library, name), name


# ---- the tests of kernels, as they reach a GPU ----


@pytest.mark.parametrize(
    ("name", "shared", "n", "says"),
    [
        ("beside", 1024, 1, ["vm_probe_beside: cuCtxSynchronize: ", "(700)"]),
        ("beside", (227 << 10) + 16, 0, ["vm_probe_beside", 232448]),
        ("none", 0, 0, ["vm_probe_none"]),
    ],
)
def test_what_a_driver_refuses_names_the_kernel(libcuda, driver, name, shared, n, says):
    gpu = cuda_driver.Driver(str(libcuda))
    try:
        kernels = cuda_driver.Kernels(gpu, [FATBIN])
        out = gpu.empty(1024)
        with refused(names=says, kind=(RuntimeError, pytest.skip.Exception)):
            kernels.launch(f"vm_probe_{name}", (1,), (256,), ProbeArgs(in_=out, out=out, n=n), shared)
        del out
        assert driver.live()[2] == 0  # pinned blocks
    finally:
        driver.library.cuCtxPopCurrent_v2(None)


def test_kernels_run_through_a_driver(libcuda):
    """The file that a GPU is first given, with the stand-in for its driver."""
    try:
        build.nvcc()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    env = os.environ | {"VAEMEM_TEST_GPU": "1", "VAEMEM_LIBCUDA": str(libcuda)}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rs"]
    done = subprocess.run([*words, build.HERE.parent / "test_emulator.py"], capture_output=True, text=True, env=env)
    counts = dict((kind, int(n)) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout))
    assert done.returncode == 0 and counts["passed"] > 30, done.stdout + done.stderr
    assert done.stdout.count("the emulator's faults and orders of threads") >= 1
