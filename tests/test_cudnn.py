"""Asking an installed cuDNN in a process of its own: what it answers, and that no answer meets another's question."""

import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import vaemem
from vaemem.engine.cudnn_path import find_cudnn
from vaemem.prediction import cudnn as asking
from vaemem.prediction import profiles
from vaemem.prediction.cudnn import InstalledCudnn
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.profiles import Conv
from vaemem.prediction.workspace import Workspace

MIB = 1 << 20
ROOT = os.path.dirname(os.path.dirname(vaemem.__file__))

# ---- asking ----

# A cuDNN of 60 lines: it lists four configurations, of which PyTorch's filter refuses the first, the second needs a
# run-time compiler, the third uses tensor cores and the last is plain. The device's name tells it to misbehave.
FAKE = r"""
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { int type, index, mode; char json[4096]; void *device, *config; } desc;
size_t cudnnGetVersion(void) { return VERSION; }
const char *cudnnGetErrorString(int status) { return status == 2000 ? "BAD_PARAM" : "OTHER"; }
void cudnnGetLastErrorString(char *text, size_t room) { snprintf(text, room, "a fake complaint"); }
int cudnnBackendCreateDescriptor(int type, void **out) {
    desc *d = calloc(1, sizeof *d);
    d->type = type;
    *out = d;
    return 0;
}
int cudnnBackendDestroyDescriptor(void *d) { free(d); return 0; }
int cudnnBackendSetAttribute(void *v, int name, int type, int64_t count, const void *values) {
    desc *d = v;
    if (getenv("FAKE_LOG") && (type == 3 || type == 15)) { /* numbers, and which descriptor takes others */
        FILE *log = fopen(getenv("FAKE_LOG"), "a");
        fprintf(log, "%d %d", d->type, name);
        for (int64_t i = 0; type == 3 && i < count; i++) fprintf(log, " %lld", (long long)((const int64_t *)values)[i]);
        fprintf(log, "\n");
        fclose(log);
    }
    if (name == 2702) snprintf(d->json, sizeof d->json, "%.*s", (int)count, (const char *)values);
    if (name == 200) d->mode = *(const int *)values;
    if (name == 204 || name == 407) d->device = *(void *const *)values;
    if (name == 401) d->config = *(void *const *)values;
    return 0;
}
int cudnnBackendFinalize(void *v) {
    desc *d = v;
    if (strstr(d->json, "\"bad\"")) return 2000;
    if (strstr(d->json, "\"signal\"")) { /* the caller gets it between question and reply */
        kill(getppid(), SIGUSR1);
        usleep(200000);
    }
    if (strstr(d->json, "\"crash\"")) { fprintf(stderr, "about to fall\n"); abort(); }
    return d->type == 5 && ((desc *)d->config)->index == 1 ? 3000 : 0;
}
int cudnnBackendGetAttribute(void *v, int name, int type, int64_t room, int64_t *count, void *values) {
    desc *d = v, **out = values;
    (void)type;
    *count = 1;
    if (name == 202) {
        const char *json = ((desc *)d->device)->json;
        *count = strstr(json, "\"none\"") || (strstr(json, "\"fallback\"") && d->mode == 0) ? 0 : 4;
        for (int64_t i = 0; values && i < *count && i < room; i++) out[i]->index = (int)i, out[i]->mode = d->mode;
    } else if (name == 300) out[0]->index = d->index;
    else if (name == 302) out[0]->index = d->index;
    else if (name == 402) *(int64_t *)values = (((desc *)d->config)->mode ? 500 : 1000) + ((desc *)d->config)->index;
    else if (name == 600) *(int *)values = 2;
    else if (name == 601) *(int64_t *)values = 7;
    else if (name == 1301) *(int64_t *)values = 10 + d->index;
    else if (name == 1303) { *(int *)values = d->index == 0 ? 1 : 0; *count = d->index == 0 || d->index == 2; }
    else if (name == 1305) { *(int *)values = 0; *count = d->index == 1; }
    return 0;
}
"""


def build(folder, name, source, *flags):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a fake cuDNN with")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake.c").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", *flags, str(folder / "fake.c"), "-o", str(folder / name)], check=True)
    return str(folder / name)


def fake_cudnn(folder, version=91000, cublas=True):
    if cublas:
        build(folder / "cublas" / "lib", "libcublasLt.so.12", "")
    path = build(folder / "cudnn" / "lib", "libcudnn.so.9", FAKE, f"-DVERSION={version}")
    return InstalledCudnn(path)


def named(name):
    gpu = find_gpu("RTX 4090")
    return gpu._replace(properties=gpu.properties | {"deviceName": name})


CONV = dict(n=1, c=96, h=40, w=56, k=200, r=3, stride=1, padding=1)


def test_asking_walks_the_list_as_pytorch_does(tmp_path):
    cudnn = fake_cudnn(tmp_path)
    assert cudnn.version == "9.10.0"
    plan = cudnn.conv(named("x").device_json, Conv("float16", **CONV))
    assert plan == {"bytes": 1002, "least": 1002, "engine": "eng12_k2=7", "rank": 2, "untried": 1, "fallback": False}
    every = cudnn.conv(named("x").device_json, Conv("float16", **CONV), every=True)
    assert every == plan | {"least": 502}  # the fallback list's third, after the first list's end
    strict = cudnn.conv(named("x").device_json, Conv("float32", **CONV), tf32=False)
    assert (strict["bytes"], strict["rank"]) == (1003, 3)  # no tensor cores without TF32
    assert cudnn.conv(named("x").device_json, Conv("float32", **CONV))["bytes"] == 1002
    fallback = cudnn.conv(named("fallback").device_json, Conv("float16", **CONV))
    assert fallback["fallback"] and fallback["bytes"] == 502
    assert cudnn.conv(named("none").device_json, Conv("float16", **CONV)) is None
    cudnn.close()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_what_a_transposed_convolution_in_3d_is_asked_as(tmp_path, monkeypatch, layout):
    """The gradient of a convolution by its input: dx is the output, dy the input; the filter is the forward one's."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    cudnn = fake_cudnn(tmp_path)
    x, y, w = (2, 8, 5, 6, 7), (2, 12, 9, 13, 21), (8, 6, 2, 3, 3)
    asked = Conv(
        "float16", n=2, c=8, depth=5, h=6, w=7, k=12, r=(2, 3, 3), stride=(2, 2, 3), padding=(1, 0, 0), dilation=1,
        groups=2, output_padding=(1, 0, 0), layout=layout,
    )  # fmt: skip
    cudnn.conv(named("x").device_json, asked)
    cudnn.close()
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]

    def values(kind, name):
        return [tuple(map(int, line[2:])) for line in log if line[:2] == [str(kind), str(name)]]

    def strides(n, c, d, h, w):
        return (c * d * h * w, d * h * w, h * w, w, 1) if layout == "nchw" else (c * d * h * w, 1, h * w * c, w * c, c)

    tensor, convolution, gradient = 17, 1, 12
    assert values(tensor, 902) == [x, w, y] and values(tensor, 903) == [strides(*x), strides(*w), strides(*y)]
    assert [values(convolution, name) for name in (106, 103, 105, 104, 102)] == [
        [(3,)], [(2, 2, 3)], [(1, 0, 0)], [(1, 0, 0)], [(1, 1, 1)],
    ]  # fmt: skip
    assert [int(line[1]) for line in log if line[0] == str(gradient)] == [710, 709, 711, 708]  # dx, w, dy, convolution


def test_what_the_asked_answer_says(tmp_path):
    cudnn = fake_cudnn(tmp_path)
    conv = ("float16", 1, 96, 40, 56, 200, 3)
    count, source = Workspace(named("x"), "9.10.0", cudnn=cudnn).conv(*conv)
    assert count == 1002
    assert (
        source == "cuDNN 9.10.0, asked without a device, after engines that compile at run time and could not be tried"
    )
    later = Workspace(named("x"), "9.15", cudnn=cudnn)
    assert later.conv(*conv)[1].endswith("(9.15 was wanted)")
    assert list(later.substitutions) == ["cuDNN 9.10.0 for 9.15"]
    with pytest.raises(ValueError, match=r"cuDNN 9\.10\.0 has no engine for .*c=96.*; PyTorch would raise"):
        Workspace(named("none"), cudnn=cudnn).conv(*conv)
    # the installed cuDNN is the version that was wanted, and the nearest profile is another's
    exact = Workspace(named("x"), "9.10.0", cudnn=cudnn)
    assert exact.conv("float16", 1, 128, 512, 512, 128, 3)[0] == 1002 and not exact.substitutions
    cudnn.close()


def test_a_refusal_and_a_crash_are_survived(tmp_path):
    cudnn = fake_cudnn(tmp_path)
    with pytest.raises(RuntimeError, match="cuDNN 91000: device properties: BAD_PARAM: a fake complaint"):
        cudnn.conv(named("bad").device_json, Conv("float16", **CONV))
    with pytest.raises(RuntimeError, match=r"conv: want sizes of 1 to 1048575 .*, got 1x96x1073741824x56"):
        cudnn.conv(named("x").device_json, Conv("float16", **(CONV | {"h": 1 << 30})))
    with pytest.raises(RuntimeError, match=r"cuDNN ended its process \(status -6\): about to fall"):
        cudnn.conv(named("crash").device_json, Conv("float16", **CONV))
    assert cudnn.conv(named("x").device_json, Conv("float16", **CONV))["bytes"] == 1002
    count, source = Workspace(named("crash"), cudnn=cudnn).conv("float16", 1, 96, 40, 56, 200, 3)
    assert count == (96 * 40 * 56 + 200 * 40 * 56 + 200 * 96 * 9) * 2 and source.startswith("rule: ")
    assert "cuDNN ended its process" in source
    cudnn.close()


def test_no_cudnn_to_ask(tmp_path, monkeypatch):
    assert "want 9.8 or later" in fake_cudnn(tmp_path / "old", version=90701).reason
    assert InstalledCudnn(str(tmp_path / "nowhere.so")).version is None
    assert "want libcudnn.so.9" in InstalledCudnn(str(tmp_path / "nowhere.so")).reason
    empty = build(tmp_path / "empty", "libcudnn.so.9", "")
    assert "want a library with cudnnBackendCreateDescriptor" in InstalledCudnn(empty).reason
    monkeypatch.setenv("VAEMEM_CUDNN", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"VAEMEM_CUDNN: want libcudnn\.so\.9 or its folder"):
        find_cudnn()
    assert "VAEMEM_CUDNN" in InstalledCudnn().reason


def test_no_cublaslt_is_said_before_cudnn_aborts(tmp_path):
    probe = "import ctypes\nfor n in (12, 13): ctypes.CDLL(f'libcublasLt.so.{n}')"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0:
        pytest.skip("the loader finds a libcublasLt of its own")
    assert "want libcublasLt beside it" in fake_cudnn(tmp_path, cublas=False).reason


# ---- whose reply it is ----

# The fake's answers differ: 1003 to STRICT, 1002 to HALF.
HALF = (Conv("float16", **CONV),)
STRICT = (Conv("float32", **CONV), False)


@pytest.fixture
def fake(tmp_path):
    cudnn = fake_cudnn(tmp_path)
    yield cudnn
    cudnn.close()


@pytest.fixture
def on_signal():
    """Has a function called between a question and its reply."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda function: signal.signal(signal.SIGUSR1, lambda *_: function())
    signal.signal(signal.SIGUSR1, before)


def test_an_exception_between_question_and_reply(fake, on_signal):
    def interrupt():
        raise KeyboardInterrupt

    on_signal(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fake.conv(named("signal").device_json, *STRICT)
        assert fake.conv(named("x").device_json, *HALF)["bytes"] == 1002


def test_asked_by_a_signal_handler_meanwhile(fake, on_signal):
    said = []

    def ask():
        with pytest.raises(RuntimeError, match="asked from a signal handler") as raised:
            fake.conv(named("x").device_json, *HALF)
        said.append(raised)

    on_signal(ask)
    assert fake.conv(named("signal").device_json, *STRICT)["bytes"] == 1003
    assert said and fake.conv(named("x").device_json, *HALF)["bytes"] == 1002


def test_a_reply_to_another_question_is_no_answer(fake):
    assert fake.version == "9.10.0"
    process = fake._process
    process.asked = 1  # a question that was sent, and its reply not read
    process.socket.sendall(json.dumps([1, named("x").device_json, *STRICT]).encode() + b"\n")
    with pytest.raises(RuntimeError, match="want the reply to question 2, got that to 1"):
        fake.conv(named("x").device_json, *HALF)
    assert fake.conv(named("x").device_json, *HALF)["bytes"] == 1002


def test_one_that_has_died_is_replaced(fake):
    assert fake.version == "9.10.0"
    first = fake._process.popen
    first.kill()
    first.wait()
    assert fake.conv(named("x").device_json, *HALF)["bytes"] == 1002
    assert fake._process.popen.pid != first.pid


def test_eight_threads_share_one_process(fake, monkeypatch):
    started, barrier, answers = [], threading.Barrier(8), []
    popen = subprocess.Popen
    monkeypatch.setattr(asking.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])

    def ask(i):
        barrier.wait()
        assert fake.version == "9.10.0"
        for k in range(20):
            question, want = ((HALF, 1002), (STRICT, 1003))[(i + k) % 2]
            answers.append(fake.conv(named("x").device_json, *question)["bytes"] == want)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 1 and len(answers) == 160 and all(answers)


def run_python(code, *arguments, cwd=None):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_forked_copy_asks_for_itself(fake):
    """Forks while another thread waits for a reply (and holds the lock), then both sides ask at once."""
    code = """
        import json, os, signal, sys, threading, time, warnings
        from vaemem.prediction.cudnn import InstalledCudnn
        warnings.simplefilter("ignore", DeprecationWarning)
        path, x, slow, half, strict = sys.argv[1], *map(json.loads, sys.argv[2:])
        cudnn = InstalledCudnn(path)
        cudnn.version
        first = cudnn._process.popen.pid
        asked = []  # no Event: a handler that sets one waits for ever for the lock of the wait that it interrupts
        signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))  # sent by the fake while it thinks
        waiting = threading.Thread(target=lambda: print(cudnn.conv(json.dumps(slow), *strict)["bytes"] == 1003))
        waiting.start()
        while not asked:
            time.sleep(0.001)
        copy = os.fork()
        mine, want = (half, 1002) if copy else (strict, 1003)
        right = all(cudnn.conv(json.dumps(x), *mine)["bytes"] == want for _ in range(20))
        if not copy:
            right = right and cudnn._process.popen.pid != first
            cudnn.close()
            os._exit(not right)
        waiting.join()
        print(right, os.waitpid(copy, 0)[1] == 0, cudnn._process.popen.pid == first)
        cudnn.close()
    """
    devices = [named("x").device_json, named("signal").device_json]
    done = run_python(code, fake._path, *devices, json.dumps(HALF), json.dumps(STRICT))
    assert done.stdout.split() == ["True"] * 4, done.stderr


@pytest.mark.parametrize("entry", [Path("/nowhere"), b"/nowhere", "/with:colon", "", "\udcff"])
def test_anything_may_stand_in_sys_path(tmp_path, monkeypatch, entry):
    cudnn = fake_cudnn(tmp_path)
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    assert cudnn.version == "9.10.0", cudnn.reason
    cudnn.close()


# ---- the driver's stand-in ----


def test_no_import_brings_the_stand_in_driver():
    """Whoever imports every submodule would otherwise have a CUDA driver without cuInit."""
    here = [os.path.dirname(vaemem._core.__file__)]  # not an installed copy beside the tree that is tested
    names = [module.name for module in pkgutil.walk_packages(here, "vaemem.", onerror=lambda _: None)]
    assert "vaemem.data" in names and not [name for name in names if "driver" in name or "libcuda" in name]
    code = """
        import importlib, sys
        sys.modules["torch"] = None  # loads a libcuda of its own where there is one
        import vaemem
        names = sys.argv[1:]
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                assert "torch" in str(error), error
        print([line for line in open("/proc/self/maps") if "libcuda.so" in line])
    """
    done = run_python(code, *names)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_stand_in_driver_is_where_the_asking_process_looks():
    assert any(os.path.isfile(os.path.join(folder, "data", "libcuda.so.1")) for folder in vaemem.__path__)


# ---- an installed cuDNN, where there is one ----


@pytest.fixture(scope="module")
def installed():
    cudnn = InstalledCudnn()
    if cudnn.version is None:
        pytest.skip(f"no cuDNN to ask: {cudnn.reason}")
    yield cudnn
    cudnn.close()


def test_installed_cudnn_says_what_was_recorded(installed):
    gpus = ["RTX 4090", "A100", "H100", "T4"]
    compared = 0
    for gpu in map(find_gpu, gpus):
        profile = profiles.nearest_profile(gpu, installed.version)
        if profile.version != installed.version:
            continue
        for side in (512, 768, 1024):
            for dtype in ("float16", "float32"):
                conv = Conv(dtype, 1, 128, side, side, 128, 3)
                assert installed.conv(gpu.device_json, conv)["bytes"] == profile.conv(conv)[0]
                compared += 1
    if not compared:
        pytest.skip(f"no profile was recorded with cuDNN {installed.version}")


def test_installed_cudnn_answers_for_every_convolution(installed):
    """Half precision on a 4090: input, output and filter are copied, as the rule has it where nobody can be asked."""
    for more in (
        dict(h=1, r=(1, 7), padding=(0, 3)), dict(r=(3, 1), padding=(1, 0)), dict(dilation=2, padding=2),
        dict(r=4, stride=2, output_padding=0), dict(depth=5, padding=(0, 1, 1), h=64),
    ):  # fmt: skip
        conv = Conv(**(dict(dtype="float16", n=1, c=128, h=256, w=256, k=128, r=3) | more))
        plan = installed.conv(find_gpu("RTX 4090").device_json, conv, every=True)
        assert plan["bytes"] == pytest.approx(2 * sum(conv.elements), rel=0.02) and plan["least"] == 0, conv


def test_channels_last_needs_nothing_transposed(installed):
    """Asked with channels that no recorded profile has."""
    workspace = Workspace("RTX 4090", cudnn=installed)
    count, source = workspace.conv("float16", 1, 136, 512, 512, 136, 3, layout="nhwc")
    assert count < MIB and source.startswith("cuDNN ")


def test_asking_works_from_any_folder(installed, tmp_path):
    code = """
        from vaemem.prediction.workspace import Workspace
        print(Workspace("RTX 4090").conv("float16", 1, 96, 64, 64, 96, 3)[1])
    """
    done = run_python(code, cwd=tmp_path)
    assert done.stdout.startswith("cuDNN "), done.stderr
