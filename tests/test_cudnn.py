"""Questions to an installed cuDNN, and its answers (benchmarks/recording/ask_cudnn.py)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from errors import refused

from vaemem.engine.cudnn_path import find_cudnn
from vaemem.prediction import profiles
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.profiles import Conv

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
if not RECORDING.exists():
    pytest.skip("the sources are not here", allow_module_level=True)
sys.path.insert(0, str(RECORDING))

from ask_cudnn import Cudnn

pytestmark = [pytest.mark.core, pytest.mark.python]

# A cuDNN of 60 lines: it lists four configurations, of which PyTorch's filter refuses the first, the second needs a
# run-time compiler, the third uses tensor cores and the last is plain. The device's name tells it to misbehave.
FAKE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
    if (strstr(d->json, "\"crash\"")) abort();
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
    return Cudnn(path)


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


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_transposed_convolution_in_3d_is_described_as_a_gradient(tmp_path, monkeypatch, layout):
    """The gradient of a convolution by its input: dx is the output, dy the input; the filter is the forward one's."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    cudnn = fake_cudnn(tmp_path)
    x, y, w = (2, 8, 5, 6, 7), (2, 12, 9, 13, 21), (8, 6, 2, 3, 3)
    asked = Conv(
        "float16", n=2, c=8, depth=5, h=6, w=7, k=12, r=(2, 3, 3), stride=(2, 2, 3), padding=(1, 0, 0), dilation=1,
        groups=2, output_padding=(1, 0, 0), layout=layout,
    )  # fmt: skip
    cudnn.conv(named("x").device_json, asked)
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


def test_a_refusal_and_a_crash_are_survived(tmp_path):
    cudnn = fake_cudnn(tmp_path)
    with refused("cuDNN 91000: device properties: BAD_PARAM", kind=RuntimeError):
        cudnn.conv(named("bad").device_json, Conv("float16", **CONV))
    with refused("conv", names=["1x96x1073741824x56"], kind=RuntimeError):
        cudnn.conv(named("x").device_json, Conv("float16", **(CONV | {"h": 1 << 30})))
    with pytest.raises(RuntimeError):
        cudnn.conv(named("crash").device_json, Conv("float16", **CONV))
    assert cudnn.conv(named("x").device_json, Conv("float16", **CONV))["bytes"] == 1002


def test_no_cudnn_to_ask(tmp_path, monkeypatch):
    with refused(names=["9.8", "9.7.1"], kind=OSError):
        fake_cudnn(tmp_path / "old", version=90701)
    with refused(names=["libcudnn.so.9"], kind=OSError):
        Cudnn(str(tmp_path / "nowhere.so"))
    with refused(names=["cudnnBackendCreateDescriptor"], kind=OSError):
        Cudnn(build(tmp_path / "empty", "libcudnn.so.9", ""))
    monkeypatch.setenv("VAEMEM_CUDNN", str(tmp_path))
    with refused("VAEMEM_CUDNN", names=["libcudnn.so.9"], kind=FileNotFoundError):
        find_cudnn()


def test_no_cublaslt_is_said_before_cudnn_aborts(tmp_path):
    probe = "import ctypes\nfor n in (12, 13): ctypes.CDLL(f'libcublasLt.so.{n}')"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0:
        pytest.skip("the loader finds a libcublasLt of its own")
    with refused(names=["libcublasLt"], kind=OSError):
        fake_cudnn(tmp_path, cublas=False)


def test_a_long_refusal_is_cut_between_characters():
    with refused(names=["libcudnn"], kind=OSError) as caught:
        Cudnn("/" + "\u20ac" * 500)
    assert len(str(caught.value).encode()) > 500


# ---- an installed cuDNN, where there is one ----


@pytest.fixture(scope="module")
def installed():
    try:
        return Cudnn(find_cudnn())
    except OSError as error:
        pytest.skip(f"no cuDNN to ask: {error}")


def test_installed_cudnn_says_what_was_recorded(installed):
    gpus = ["RTX 4090", "A100", "H100", "T4"]
    compared = 0
    for gpu in map(find_gpu, gpus):
        profile = profiles.shipped_catalogue().nearest(gpu, installed.version)
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
    """In half precision on a 4090 it copies input, output and filter, as the rule says."""
    for more in (
        dict(h=1, r=(1, 7), padding=(0, 3)), dict(r=(3, 1), padding=(1, 0)), dict(dilation=2, padding=2),
        dict(r=4, stride=2, output_padding=0), dict(depth=5, padding=(0, 1, 1), h=64),
    ):  # fmt: skip
        conv = Conv(**(dict(dtype="float16", n=1, c=128, h=256, w=256, k=128, r=3) | more))
        plan = installed.conv(find_gpu("RTX 4090").device_json, conv, every=True)
        assert plan["bytes"] == pytest.approx(2 * sum(conv.elements), rel=0.02) and plan["least"] == 0, conv
