"""Predictions for any PyTorch module: what is recorded, and what three well-known ones take."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
from errors import refused

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch import nn
from torch.nn import functional as F
from traces import left_by, lifetimes

from vaemem._render import in_mib
from vaemem.prediction.benchmark import PROTOCOLS
from vaemem.pytorch import predict_peak, record

MIB = 1 << 20


def meta(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def on_meta(make, dtype=torch.float16):
    with torch.device("meta"):
        return make().eval().to(dtype)


def takes(recording):
    return [count for op, _, count, _ in recording.trace.steps if op == "take"]


class Calls(nn.Module):
    """A module that is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args):
        return self.function(*args)


def test_storages_live_as_long_as_names():
    def run(x):
        a = x + 1
        b = a * 2
        c = b.view(-1)  # no storage of its own
        del a
        d = c + x.view(-1)
        del b
        return d, c

    steps = record(Calls(run), meta(256, dtype=torch.float32)).trace.steps
    assert [(op, number, count) for op, number, count, _ in steps] == [
        ("take", 0, 1024),
        ("take", 1, 1024),
        ("give", 0, 0),
        ("take", 2, 1024),
    ]


def test_in_place_and_numbers():
    def run(x):
        x = x * 2.0
        x += 1
        x[:, 1:3] = x[:, 0:2] * 0.5
        x[0] = 3.0
        x[..., -1] = torch.ones_like(x[..., 0])
        return x[:, None, ::2]

    recording = record(Calls(run), meta(4, 8, dtype=torch.float32))
    assert takes(recording) == [128, 32, 16]
    assert [count for _, _, count, _ in left_by(recording.trace)] == [128]


def test_indexing_by_tensors():
    def run(x, where):
        y = x[where]
        y[where, 0] = 1.0
        return y[[0, 1]]

    recording = record(Calls(run), meta(10, 4, dtype=torch.float32), meta(5, dtype=torch.long))
    assert takes(recording)[0] == 5 * 4 * 4 and left_by(recording.trace)[0][2] == 2 * 4 * 4
    assert "aten.index_put_.default" in recording.unmodelled


def test_indexing_by_a_tensor_that_is_a_number():
    """It is a view, as x[3] is: nothing is taken."""

    def run(x, where):
        x = x * 2
        x[where] = 1.0
        return x[:, where][where]

    recording = record(Calls(run), meta(10, 10, dtype=torch.float32), meta(dtype=torch.long))
    assert takes(recording) == [400] and not recording.unmodelled


def test_linear_adds_its_bias_as_on_a_gpu():
    layer = on_meta(lambda: nn.Linear(64, 32))
    dense = record(layer, meta(2, 8, 64)).trace
    assert [op for op, *_ in dense.steps] == ["take", "cublaslt"]

    def of_transposed():
        """Record the layer's call with an input that is not contiguous. The bias is added in place."""
        return [op for op, *_ in record(layer, meta(2, 64, 8), call=lambda m, x: m(x.transpose(1, 2))).trace.steps]

    assert of_transposed() == [
        "take",
        "take",
        "cublas",
        "give",
    ]  # a copied input (should_fold)
    layer.requires_grad_(False)
    assert of_transposed() == ["take", "cublas"]  # a batched product
    plain = record(on_meta(lambda: nn.Linear(64, 32, bias=False)), meta(8, 64)).trace
    assert [op for op, *_ in plain.steps] == ["take", "cublas"]


def test_inference_mode_changes_nothing():
    def inferring(module, x):
        with torch.inference_mode():
            return module(x)

    x = meta(2, 16, 64)
    for make in (lambda: nn.Linear(64, 32), lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)):
        module = on_meta(make)
        plain, inference = record(module, x), record(module, x, call=inferring)
        assert plain.trace.steps == inference.trace.steps and not inference.unmodelled


def test_what_follows_a_convolution_that_raised_is_recorded():
    def either(layer, x):
        try:
            return layer(x)
        except RuntimeError:
            return 2 * x

    recording = record(on_meta(lambda: nn.Conv2d(3, 16, 3)), meta(1, 4, 8, 8), call=either)
    assert takes(recording) == [4 * 8 * 8 * 2]


def test_convolutions_are_questions():
    layer = on_meta(lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1))
    recording = record(layer, meta(2, 8, 32, 24))
    assert recording.trace.convs == [("float16", 2, 8, 32, 24, 16, 3, 2, 1, "nchw")]
    assert [op for op, *_ in recording.trace.steps] == ["take", "conv"]
    last = meta(2, 8, 32, 24).to(memory_format=torch.channels_last)
    recording = record(layer, last)
    assert recording.trace.convs[0][-1] == "nhwc" and recording.output.is_contiguous(memory_format=torch.channels_last)
    assert takes(recording) == [2 * 16 * 16 * 12 * 2, 16 * 8 * 9 * 2]  # the filter is made channels_last for the call
    sliced = record(layer, meta(2, 8, 64, 48), call=lambda layer, x: layer(x[:, :, ::2, ::2]))
    assert takes(sliced) == [2 * 8 * 32 * 24 * 2, 2 * 16 * 16 * 12 * 2] and len(left_by(sliced.trace)) == 1


PLAIN = (1, 1, None, 0)


@pytest.mark.parametrize(
    "make, x, asked",
    [
        (lambda: nn.Conv2d(8, 16, 3, groups=8), (1, 8, 16, 18), (8, 16, 18, 16, 3, 1, 0, "nchw", 1, 8, None, 0)),
        (lambda: nn.Conv2d(8, 8, 3, dilation=2), (1, 8, 16, 18), (8, 16, 18, 8, 3, 1, 0, "nchw", 2, *PLAIN[1:])),
        (lambda: nn.Conv2d(8, 4, (1, 3), stride=(2, 1)), (1, 8, 16, 18), (8, 16, 18, 4, (1, 3), (2, 1), 0, "nchw")),
        (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), (1, 8, 16, 18), (8, 16, 18, 4, 2, 2, 0, "nchw", 1, 1, 0, 0)),
        (lambda: nn.Conv1d(8, 4, 3, padding=1), (1, 8, 16), (8, 1, 16, 4, (1, 3), 1, (0, 1), "nchw")),
        (
            lambda: nn.ConvTranspose1d(8, 4, 4, 2, output_padding=1),
            (1, 8, 16),
            (8, 1, 16, 4, (1, 4), (1, 2), 0, "nchw", 1, 1, (0, 1), 0),
        ),
        (
            lambda: nn.Conv3d(8, 4, 3, padding=(0, 1, 1)),
            (1, 8, 5, 16, 18),
            (8, 16, 18, 4, 3, 1, (0, 1, 1), "nchw", 1, 1, None, 5),
        ),
    ],
)
def test_every_convolution_is_a_question(make, x, asked):
    module = on_meta(make)
    recording = record(module, meta(*x))
    assert recording.trace.convs == [("float16", 1, *asked)] and not recording.unmodelled
    out = module(torch.empty(x, dtype=torch.float16, device="meta"))
    assert takes(recording) == [out.numel() * 2] and recording.output.shape == out.shape
    p = predict_peak(module, meta(*x))
    assert "not square, 2d and whole" in repr(p) or "own kernels for depthwise" in p.workspace_source


def test_convolutions_of_channels_last_in_3d_and_of_lines():
    layer = on_meta(lambda: nn.Conv3d(8, 16, 3))
    x = meta(1, 8, 5, 16, 18).to(memory_format=torch.channels_last_3d)
    recording = record(layer, x)
    assert recording.trace.convs[0][9] == "nhwc" and takes(recording) == [16 * 3 * 14 * 16 * 2, 16 * 8 * 27 * 2]
    assert recording.output.is_contiguous(memory_format=torch.channels_last_3d)
    lines = record(on_meta(lambda: nn.Conv1d(8, 4, 1)), meta(2, 16, 8), call=lambda layer, x: layer(x.mT))
    assert takes(lines) == [2 * 16 * 8 * 2, 2 * 4 * 16 * 2] and len(left_by(lines.trace)) == 1  # made dense, the result


def test_convolutions_that_pytorch_unfolds():
    """pytorch/pytorch#132300 measured "~9.26 GB", and #128947 could not have 161.37 GiB."""
    video = on_meta(lambda: nn.Conv3d(3, 128, 3, padding=1), torch.bfloat16)
    x = meta(1, 3, 24, 740, 1316, dtype=torch.bfloat16)
    p = predict_peak(video, x, gpu="A100", torch_version="2.4.0")
    assert p.peak_allocated / 2**30 == pytest.approx(9.26, rel=0.005)
    wide = on_meta(lambda: nn.Conv3d(256, 64, 3), torch.float32)
    p = predict_peak(wide, meta(1, 256, 5, 1090, 1922, dtype=torch.float32), gpu="A100", torch_version="2.4.0")
    assert p.out_of_memory_at.name == "Conv3d [workspace]" and p.out_of_memory_at.bytes / 2**30 == pytest.approx(
        161.37, rel=1e-4
    )


def test_what_is_not_modelled_is_said():
    module = Calls(lambda x: torch.sort(x)[0])
    assert "aten.sort.default" in record(module, meta(100)).unmodelled
    assert "not counted: aten.sort.default (1)" in repr(predict_peak(module, meta(100)))


def test_group_norm_copies_what_is_not_dense():
    norm = on_meta(lambda: nn.GroupNorm(4, 16))
    x = meta(2, 16, 8, 8)
    size = 2 * 16 * 64 * 2
    assert takes(record(norm, x)) == [size, 2 * 4 * 2, 2 * 4 * 2, 4 * 32, 4 * 32]
    last = record(norm, x.to(memory_format=torch.channels_last))
    assert takes(last)[:2] == [size, size] and last.output.is_contiguous()


def test_attention_kernels():
    def run(q):
        return F.scaled_dot_product_attention(q, q, q)

    q = meta(2, 4, 128, 64)
    rows = 2 * 4 * 128
    assert takes(record(Calls(run), q)) == [rows * 64 * 2, rows * 4]
    assert takes(record(Calls(run), q, gpu="T4")) == [rows * 64 * 2]
    out = record(Calls(run), q).output
    assert out.shape == q.shape and out.stride() == (4 * 128 * 64, 64, 4 * 64, 1)  # (N, L, heads, E) underneath
    masked = record(
        Calls(lambda q, m: F.scaled_dot_product_attention(q, q, q, m)), q, meta(1, 1, 128, 128, dtype=torch.bool)
    )
    assert takes(masked) == [128 * 128 * 2, rows * 64 * 2]
    with refused("scaled_dot_product_attention"):
        record(Calls(run), meta(1, 1, 8, 8, dtype=torch.float64))


def test_modules_are_left_alone():
    layer = nn.Linear(4, 4).eval()
    weight, hooks = layer.weight, len(nn.modules.module._global_forward_pre_hooks)
    before = weight.detach().clone()
    record(layer, torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        record(layer, torch.ones(2, 5))
    assert layer.weight is weight and torch.equal(weight, before) and weight.device.type == "cpu"
    assert len(nn.modules.module._global_forward_pre_hooks) == hooks
    assert torch.equal(layer(torch.ones(1, 4)), F.linear(torch.ones(1, 4), layer.weight, layer.bias))


def test_shared_parameters_count_once():
    a = on_meta(lambda: nn.Linear(8, 8, bias=False))
    b = on_meta(lambda: nn.Linear(8, 8, bias=False))
    b.weight = a.weight
    both = nn.Sequential(a, b).eval()
    assert record(both, meta(2, 8)).weights == [("0.weight", 128)]
    x = meta(2, 8)
    assert record(Calls(lambda x, y: x + y), x, x).inputs == [("input 0", 32)]


compiled = torch.compile(lambda x: x + 1, backend="eager")
encoder = functools.partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True)


@pytest.mark.parametrize(
    "run, sentence",
    [
        (lambda: record(nn.Linear(4, 4), meta(2, 4)), "module"),
        (lambda: predict_peak(nn.Linear(4, 4), meta(2, 4)), "module"),
        (lambda: run_linear(lambda m, x: m(x).sum().backward()), "call"),
        (lambda: run_linear(lambda m, x: torch.autograd.grad(m(x).sum(), m.weight)), "call"),
        (lambda: run_linear(lambda m, x: torch.enable_grad()(m)(x)), "Linear"),
        (lambda: record(on_meta(lambda: nn.GRU(4, 4)), meta(2, 3, 4)), "GRU"),
        (lambda: record(on_meta(lambda: nn.LSTM(4, 4, 2)), meta(2, 3, 4)), "LSTM"),
        (lambda: record(on_meta(lambda: nn.RNN(4, 4)), meta(2, 3, 4)), "RNN"),
        (lambda: record(on_meta(lambda: nn.LSTMCell(4, 4)), meta(2, 4)), "LSTMCell"),
        (lambda: record(Calls(lambda x: x if x.sum() > 0 else -x), meta(4)), "Calls"),
        (lambda: record(Calls(lambda x: x * x.max().item()), meta(4)), "Calls"),
        (lambda: record(Calls(lambda x: x[x > 0]), meta(4)), "an index of bools"),
        (lambda: record(Calls(lambda x: x.nonzero()), meta(4)), "Calls"),
        (lambda: record(Calls(lambda x: torch.repeat_interleave(x, x)), meta(4, dtype=torch.long)), "Calls"),
        (lambda: record(torch.compile(nn.Linear(4, 4).eval()), meta(2, 4)), "module"),
        (lambda: run_linear(torch.compile(lambda m, x: m(x))), "call"),
        (lambda: record(Calls(compiled), meta(4)), "call"),
        (
            lambda: record(
                on_meta(lambda: nn.TransformerEncoder(encoder(), 2)), meta(1, 8, 16),
                src_key_padding_mask=torch.zeros(1, 8, dtype=torch.bool),
            ),
            "TransformerEncoder",
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_what_would_be_wrong_is_refused(run, sentence):
    with refused(sentence):
        run()


def run_linear(call):
    return record(on_meta(lambda: nn.Linear(4, 4)), meta(2, 4), call=call)


def test_a_module_compiled_in_place_is_refused():
    layer = nn.Linear(4, 4).eval()
    layer.compile(backend="eager")
    with refused("0"):
        record(nn.Sequential(layer).eval(), meta(2, 4))


# ---- autocast ----


def test_autocast_keeps_the_casts_of_weights():
    layer = on_meta(lambda: nn.Linear(64, 32), torch.float32)
    x = meta(8, 64, dtype=torch.float32)

    def twice(layer, x):
        a = layer(x)
        return a, layer(x), torch.is_autocast_enabled()

    weights, inputs, outputs = [32 * 2, 64 * 32 * 2], 8 * 64 * 2, 8 * 32 * 2
    region = record(layer, x, call=twice, autocast=torch.float16)
    assert region.output[2] and region.output[0].dtype is torch.float16
    assert takes(region) == [*weights, inputs, outputs, inputs, outputs]  # of the second call the input alone
    assert [count for _, _, count, _ in left_by(region.trace)] == [outputs, outputs]  # the region has ended

    def regions(layer, x):
        with torch.autocast("cuda", torch.bfloat16):
            a = layer(x)
        with torch.autocast("cuda", torch.bfloat16):
            return a, layer(x)

    assert takes(record(layer, x, call=regions)) == 2 * [*weights, inputs, outputs]
    layer.requires_grad_(False)  # which autocast does not keep
    assert takes(record(layer, x, call=twice, autocast=torch.float16)) == 2 * [*weights, inputs, outputs]
    assert not torch.is_autocast_enabled()


def test_autocast_where_casts_live():
    """Both weights' casts are there at the end of the region, in it the peak; without it each dies after its layer."""
    module = on_meta(lambda: nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), torch.float32)
    x = meta(4, 1024, dtype=torch.float32)
    kept = predict_peak(module, x, autocast=torch.float16)
    once = predict_peak(module.requires_grad_(False), x, autocast=torch.float16)
    assert kept.allocated - once.allocated == pytest.approx(2 * MIB, rel=0.01)


def test_autocast_as_the_cpu_has_it():
    """The sequence of casts and results, watched where it can be: with the CPU's autocast on real tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if not func.is_view and isinstance(out, torch.Tensor):
                seen.append(out.numel() * out.element_size())
            return out

    module = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.ones(3, 16)
    with torch.no_grad(), Watch(), torch.autocast("cpu", torch.bfloat16):
        module(module[0](x) @ module[0].weight)
    recording = record(module, x, call=lambda m, x: m(m[0](x) @ m[0].weight), autocast=torch.bfloat16)
    assert takes(recording) == seen and len(seen) == 10


# ---- attention ----


def attention(*shapes, gpu="RTX 4090", dtype=torch.float16, **how):
    return record(
        Calls(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how)),
        *(meta(*shape, dtype=dtype) for shape in shapes), gpu=gpu,
    )  # fmt: skip


def test_sdpa_kernel_chooses():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (2, 4, 128, 64)
    rows, out = 2 * 4 * 128, 2 * 4 * 128 * 64 * 2
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert takes(attention(shape, shape, shape)) == [out, rows * 4]
        with refused(names=["flash", "8.0"]):
            attention(shape, shape, shape, gpu="T4")
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert takes(attention(shape, shape, shape)) == [out]
        with refused(names=["efficient", 8]):
            attention(*[(2, 4, 128, 60)] * 3)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        recording = attention(shape, shape, shape)
        assert takes(recording) == [8, 8, out, 256, out]  # the queries lie head by head, so the output is copied
        assert recording.unmodelled == {"the workspace of cuDNN's attention": 1}
        assert not attention(shape, shape, shape, gpu="H100").unmodelled
    with sdpa_kernel(SDPBackend.MATH):
        scores = rows * 128 * 4
        assert takes(attention(shape, shape, shape)).count(scores) == 3 and not attention(*[shape] * 3).unmodelled

    def own(q):
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(q, q, q)

    assert takes(record(Calls(own), meta(*shape))) == [out]


@pytest.mark.parametrize(
    "change, kernel",
    [
        ({}, "flash"),
        ({"dtype": "float32"}, "efficient"),
        ({"sm": 75}, "efficient"),
        ({"sm": 75, "dtype": "bfloat16"}, "math"),
        ({"mask": (8, 8, False)}, "efficient"),
        ({"depth": 512}, "efficient"),
        ({"depth": 60}, "flash"),  # padded
        ({"depth": 60, "mask": (8, 8, False)}, "math"),
        ({"depth": 60, "dtype": "float32"}, "efficient"),
        ({"depth": 62, "dtype": "float32"}, "math"),
        ({"depth": 63, "dtype": "float32", "sm": 75}, "efficient"),
        ({"causal": True}, "flash"),
        ({"causal": True, "keys": 64}, "efficient"),
        ({"heads": 2}, "math"),
        ({"heads": 2, "grouped": True}, "flash"),
        ({"heads": 3, "grouped": True}, "math"),
        ({"heads": 2, "grouped": True, "mask": (8, 8, False)}, "cudnn"),
        ({"step": 2}, "math"),
    ],
)
def test_pytorchs_order_of_kernels(change, kernel):
    from vaemem import _core

    asked = {"dtype": "float16", "sm": 89, "depth": 64, "keys": 128, "heads": 4, "step": 1} | change
    sm, depth, step = asked.pop("sm"), asked.pop("depth"), asked.pop("step")
    length, heads = asked.pop("keys"), asked.pop("heads")

    def tensor(heads, length):
        head = length * depth * step
        return (2, heads, length, depth), (heads * head, head, depth * step, step)

    how = (asked.pop(name, default) for name, default in (("mask", None), ("causal", False), ("grouped", False)))
    call = (asked.pop("dtype"), tensor(4, 128), tensor(heads, length), tensor(heads, length), *how)
    order = ("flash", "efficient", "cudnn", "math") if kernel == "cudnn" else ("flash", "efficient", "math", "cudnn")
    assert _core.Trace.choose_kernel(call, sm, 0, order) == kernel


def test_rows_of_a_mask_that_lie_apart():
    """No fused kernel takes such a mask: T5's bias before transformers 5.23, for one (check_last_dim_stride_equals_1).
    An H200 ran it by the math kernel."""
    from vaemem import _core

    heads = (1, 64, 512, 64), (64 * 512 * 64, 64, 64 * 64, 1)
    order = ("cudnn", "flash", "efficient", "math")
    for strided, kernel in ((False, "cudnn"), (True, "math")):
        call = "bfloat16", heads, heads, heads, (64 * 512 * 512, 512, False, strided), False, False
        assert _core.Trace.choose_kernel(call, 90, 91900, order) == kernel
        q = torch.empty(1, 64, 512, 64, dtype=torch.bfloat16)
        bias = torch.empty(1, 512, 512, 64, dtype=torch.bfloat16).permute(0, 3, 1, 2)
        mask = bias if strided else bias.contiguous()
        found = record(Calls(F.scaled_dot_product_attention), q, q, q, mask).trace
        names = {name for _, _, size, name in found.steps if size == 4 * 64 * 512 * 512}
        assert bool(names) == strided  # the math kernel's scores


@pytest.mark.parametrize(
    "gpu, torch_version, cudnn_version, first",
    [
        ("H100", "2.11.0", None, 91900), ("H200", "2.11.0", None, 91900), ("B200", "2.11.0", None, 91900),
        ("H100", "2.7.1", None, 0), ("H100", "2.10.0", "9.15.0", 0), ("H100", "2.10.0", "9.15.1", 91501),
        ("RTX 5090", "2.11.0", None, 0), ("RTX 4090", "2.11.0", None, 0), ("RX 7900 XTX", "2.11.0", None, 0),
    ],
)  # fmt: skip
def test_where_cudnns_attention_comes_first(gpu, torch_version, cudnn_version, first):
    from vaemem.prediction.gpus import find_gpu
    from vaemem.prediction.workspace import cudnn_attention

    assert cudnn_attention(find_gpu(gpu), torch_version, cudnn_version) == first


def test_a_modules_attention_depends_on_the_release():
    """Flash attention has sums of 4 bytes for each query and head; cuDNN's has none."""
    heads = meta(1, 4096, 8, 64).transpose(1, 2)  # token by token
    module = Calls(lambda q: F.scaled_dot_product_attention(q, q, q))
    old, new = (predict_peak(module, heads, gpu="H100", torch_version=one) for one in ("2.7.1", "2.11.0"))
    assert old.allocated > new.allocated


def test_what_cudnns_attention_takes():
    """As an H200 was seen to: two numbers, the output, 256 bytes. The output lies as the queries do; one that lies head
    by head is copied."""
    from vaemem import _core

    size, sizes = 2 * 4 * 128 * 160 * 2, []
    for strides in ((4 * 128 * 160, 160, 4 * 160, 1), (4 * 128 * 160, 128 * 160, 160, 1)):
        heads = (2, 4, 128, 160), strides
        call = "float16", heads, heads, heads, None, False, False
        trace = _core.Trace()
        trace.attend(call, "cudnn", 90, 132, "x")
        sizes.append([step[2] for step in trace.steps if step[0] == "take"])
    assert sizes == [[8, 8, size, 256], [8, 8, size, 256, size]]
    for cudnn, kernel in ((90900, "flash"), (91000, "cudnn")):  # heads of 160 channels
        assert _core.Trace.choose_kernel(call, 90, cudnn, ("cudnn", "flash", "math")) == kernel
    assert _core.Trace.choose_kernel(call, 100, 91900, ("cudnn", "flash", "math")) == "flash"


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"mask": "float"}, {"mask": "bool"}, {"enable_gqa": True}])
def test_the_math_kernel_as_the_cpu_runs_it(how):
    """The same operators in the same order as those of the installed PyTorch on real tensors; but for the mask, which
    C++ adds in place there, and what a mode sees of a safe softmax as one operator."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    aten, how = torch.ops.aten, dict(how)
    kind = how.pop("mask", None)
    q, heads = torch.ones(2, 4, 6, 8), 2 if how.get("enable_gqa") else 4
    kv = torch.ones(2, heads, 6, 8)
    mask = {None: None, "float": torch.zeros(6, 6), "bool": torch.ones(6, 6, dtype=torch.bool)}[kind]
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            own = (aten.add.Tensor, aten.add_.Tensor, aten._unsafe_view.default)
            if not func.is_view and isinstance(out, torch.Tensor) and func not in own:
                seen.append(out.numel() * out.element_size())
            return out

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        given = mask.float().log() if kind == "bool" else mask  # converted before the operator, as on a GPU
        with Watch():
            torch._scaled_dot_product_attention_math(q, kv, kv, given, 0.0, **how)
        recording = record(Calls(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, **how)), q, kv, kv, mask)
    scores = 2 * 4 * 6 * 6
    soft = [scores * 4, 4, scores, 2 * 4 * 6, 4, scores * 4]  # softmax, -inf, the comparison, its rows, 0, the choice
    at = seen.index(scores * 4, seen.index(scores * 4) + 1)  # after the scores themselves
    converted = [6 * 6 * 4] if kind == "bool" else []
    assert takes(recording) == converted + seen[:at] + soft + seen[at + 1 :]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n, heads, shared, queries, keys", [
    (1, 4, 4, 6, 5), (2, 4, 4, 6, 5), (3, 4, 2, 6, 6), (2, 6, 1, 1, 7), (2, 1, 1, 6, 5), (1, 4, 4, 1, 1),
])  # fmt: skip
def test_the_math_path_takes_what_pytorch_does(dtype, n, heads, shared, queries, keys):
    """`Trace.attend` beside the operators of the installed PyTorch, step by step: each way for tensors to lie, masks,
    is_causal and grouped queries; and the copy that a module makes of its output."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from vaemem import _core

    masks = [None, "causal", (dtype, (n, 1, 1)), (torch.bool, (1, 1, queries))]
    for by_token, how in itertools.product(("", "q", "kv", "v"), masks):
        shapes = {"q": (n, heads, queries, 8), "k": (n, shared, keys, 8), "v": (n, shared, keys, 24)}
        tensors = {}
        for name, (_, h, length, depth) in shapes.items():
            sides = (n, length, h, depth) if name in by_token else (n, h, length, depth)
            lying = torch.empty(sides, dtype=dtype, device="meta")
            tensors[name] = lying.transpose(1, 2) if name in by_token else lying
        kind, sides = how if isinstance(how, tuple) else (None, ())
        mask = None if kind is None else torch.empty(*sides, keys, dtype=kind, device="meta")
        asked = {"is_causal": how == "causal", "enable_gqa": shared < heads}

        def run(*args, asked=asked):
            out = F.scaled_dot_product_attention(*args, **asked)
            return out.transpose(1, 2).reshape(n, queries, -1)

        with sdpa_kernel(SDPBackend.MATH):
            recorded = record(Calls(run), *tensors.values(), mask)
        q, k, v = ((tuple(x.shape), x.stride()) for x in tensors.values())
        size = None if mask is None else (mask.numel(), keys, kind is torch.bool)
        call = (str(dtype).removeprefix("torch."), q, k, v, size, *asked.values())
        trace = _core.Trace()
        trace.attend(call, "math", 75, 40, "attention")
        assert lifetimes(trace.steps) == lifetimes(recorded.trace.steps)


def test_grouped_queries_are_not_copied_by_flash():
    q, kv = (1, 8, 128, 64), (1, 2, 128, 64)
    assert takes(attention(q, kv, kv, enable_gqa=True)) == [8 * 128 * 64 * 2, 8 * 128 * 4]
    copies = takes(attention(q, kv, kv, enable_gqa=True, dtype=torch.float32))
    assert copies.count(8 * 128 * 64 * 4) > 3 and 8 * 128 * 128 * 4 in copies  # math: repeated heads, scores


# ---- the transformer's own layers ----

WIDTH = 2 * 128 * 256 * 2  # a tensor of two sequences of 128 tokens, 256 channels wide, in half precision


def lives(recording):
    """Bytes alive after each step that takes any."""
    alive, sizes, totals = 0, {}, []
    for op, number, count, _ in recording.trace.steps:
        if op == "take":
            sizes[number] = count
            alive += count
            totals.append(alive)
        elif op == "give":
            alive -= sizes[number]
    return totals


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_takes_its_fast_path(norm_first, activation):
    layer = on_meta(
        lambda: nn.TransformerEncoderLayer(256, 4, 1024, activation=activation, batch_first=True, norm_first=norm_first)
    )
    x = meta(2, 128, 256)
    recording = record(layer, x)
    norm = [WIDTH, 2 * 128 * 4, 2 * 128 * 4]
    attention = [3 * WIDTH, WIDTH, 2 * 4 * 128 * 4, WIDTH]  # q, k, v in one, attended, log-sum-exp, projected
    forward = [4 * WIDTH, WIDTH]
    expected = [*norm, *attention, *norm, *forward] if norm_first else [*attention, *norm, *forward, *norm]
    assert takes(recording) == expected and not recording.unmodelled
    # The feed-forward part's input, its four times wider middle, its output; with norm_first the sum before its norm.
    assert max(lives(recording)) == (6 + norm_first) * WIDTH
    assert [count for _, _, count, _ in left_by(recording.trace)] == [WIDTH]
    slow = record(layer, x, autocast=torch.float16)  # autocast has no fast path
    assert len(takes(slow)) > len(takes(recording))


def test_multi_head_attention_with_and_without_weights():
    layer, x = on_meta(lambda: nn.MultiheadAttention(256, 4, batch_first=True)), meta(2, 128, 256)
    scores = 2 * 4 * 128 * 128 * 2
    without = record(layer, x, x, x, need_weights=False)
    assert takes(without) == [3 * WIDTH, WIDTH, 2 * 4 * 128 * 4, WIDTH]
    # With weights: projected, rescaled into heads, scores (softmax in place, context in q's place), context made
    # dense, projected, the mean of the heads.
    weights = record(layer, x, x, x)
    assert takes(weights) == [3 * WIDTH, 3 * WIDTH, scores, WIDTH, WIDTH, scores // 4]
    assert sorted(count for _, _, count, _ in left_by(weights.trace)) == sorted([WIDTH, scores // 4])
    each = record(layer, x, x, x, average_attn_weights=False)
    assert takes(each) == [3 * WIDTH, 3 * WIDTH, scores, WIDTH, WIDTH]
    assert each.output[1].shape == (2, 4, 128, 128)


@pytest.mark.parametrize(("tokens", "extra"), [(128, 1), (2048, 3)])
def test_masked_softmax_of_the_fast_path(tokens, extra):
    """One pass over rows of at most 1024 elements; beyond, the masked scores and another result."""
    layer, x = on_meta(lambda: nn.MultiheadAttention(64, 2, batch_first=True)), meta(1, tokens, 64)
    mask = torch.zeros(1, tokens, dtype=torch.bool, device="meta")
    taken = takes(record(layer, x, x, x, key_padding_mask=mask, need_weights=False))
    assert taken.count(2 * tokens * tokens * 2) == 1 + extra


def test_a_slow_multi_head_attention_goes_by_python():
    """Sequence first has no fast path: what F.multi_head_attention_forward calls is seen."""
    layer, x = on_meta(lambda: nn.MultiheadAttention(256, 4)), meta(128, 2, 256)
    recording = record(layer, x, x, x, need_weights=False)
    assert "MultiheadAttention [attention]" in {name for _, _, _, name in recording.trace.steps}
    assert 2 * 4 * 128 * 128 * 2 not in takes(recording)  # no scores: a fused kernel
    assert 2 * 4 * 128 * 128 * 2 in takes(record(layer, x, x, x))  # they are wanted


def test_fast_paths_as_the_cpu_runs_them():
    """The results have the shapes that the real operators give."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.ones(2, 6, 16)
    with torch.no_grad():
        assert record(layer, x).output.shape == layer(x).shape
        for how in ({}, {"need_weights": False}, {"average_attn_weights": False}):
            real, fake = attention(x, x, x, **how), record(attention, x, x, x, **how).output
            assert real[0].shape == fake[0].shape and real[0].stride() == fake[0].stride()
            assert real[1] is fake[1] is None or real[1].shape == fake[1].shape


# ---- predictions ----


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocols(protocol):
    """The first product takes cuBLAS's workspace: it counts in a process without warm-up runs."""
    module, x = on_meta(lambda: nn.Linear(1024, 1024, bias=False)), meta(1024, 1024)
    p, warm = predict_peak(module, x, protocol=protocol), predict_peak(module, x)
    assert (p.allocated - warm.allocated > 8 * MIB) == (protocol in ("cold", "kept"))
    assert p.peak_allocated == warm.peak_allocated and (protocol in repr(p)) == (protocol != "warm")
    assert p.upper >= warm.band[1]
    with refused("protocol", "'hot'"):
        predict_peak(module, x, protocol="hot")


def test_the_peak_is_the_sum_of_its_tensors():
    layer = on_meta(lambda: nn.TransformerEncoderLayer(256, 4, 1000, batch_first=True))
    for p in (predict_peak(layer, meta(3, 77, 256)), predict_peak(on_meta(nn.Identity), meta(3))):
        assert sum(size for _, size in p.peak_tensors) == p.peak_allocated


def test_a_linear_layer():
    p = predict_peak(on_meta(lambda: nn.Linear(4096, 4096)), meta(2048, 4096))
    assert p.allocated == 17 * MIB and p.unmodelled == {}  # output, cuBLASLt's workspace
    assert p.peak_allocated - p.allocated == (32 + 16) * MIB + 8192  # weights, input, bias
    shared = predict_peak(on_meta(lambda: nn.Linear(4096, 4096)), meta(2048, 4096), torch_version="2.12.0")
    assert shared.allocated == 16 * MIB  # cuBLAS's workspace was taken in the warm-up runs
    assert "allocated 17 MiB" in repr(p) and p.peak_tensors[0].name == "weights" and len(p.timeline) == 2


def test_a_call_with_gradients_is_predicted_without_and_says_so():
    layer, x = on_meta(lambda: nn.Linear(64, 64)), meta(4, 64)
    said = "torch.no_grad() for a call with gradients, which would keep more"
    asked = predict_peak(layer, x)
    assert said in asked.substitutions and said in repr(asked)
    with torch.no_grad():
        plain = predict_peak(layer, x)
    assert said not in repr(plain) and plain.peak_allocated == asked.peak_allocated
    assert said not in repr(predict_peak(layer.requires_grad_(False), x))
    assert said in repr(predict_peak(layer, x.requires_grad_()))


def test_a_module_on_a_card_that_others_use():
    layer, x = on_meta(lambda: nn.Linear(4096, 4096)), meta(2048, 4096)
    p = predict_peak(layer, x)
    assert p.fits and p.least_reserved <= p.peak_reserved == p.on_card
    less = predict_peak(layer, x, used=p.available - p.least_reserved + (2 << 20))
    assert not less.fits and less.out_of_memory_at.name and less.on_card is None
    assert "it runs out at Linear, which tries to allocate 16 MB" in repr(less)
    assert json.loads(less.to_json())["verdict"] == "does not fit" and "a module on" in less._repr_html_()


def test_a_vae_as_predict_has_it():
    from torch_vaes import diffusers_vae

    from vaemem import _core
    from vaemem.prediction.process import SimulatedProcess

    vae = diffusers_vae(_core.models()["sdxl"], torch.float16)
    p = predict_peak(vae, meta(1, 4, 64, 64), call=lambda v, z: v.decode(z).sample)
    process = SimulatedProcess()
    loaded = process.load("sdxl", "float16")
    latents = process.tensor((1, 4, 64, 64), "float16")
    for _ in range(3):
        process.empty_cache()
        process.reset_peak()
        before = process.allocated, process.reserved
        image = process.decode(loaded, latents)
        peaks = process.peak_allocated - before[0], process.peak_reserved - before[1]
        process.drop(image)
    assert (p.allocated, p.reserved) == peaks


def test_unet_of_sd15(tmp_path):
    unet = on_meta(
        lambda: diffusers.UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280)
        )
    )
    inputs = meta(2, 4, 64, 64), torch.tensor(981), meta(2, 77, 768)
    p = predict_peak(unet, *inputs)
    assert p.unmodelled == {}
    assert p.peak_allocated - p.allocated == pytest.approx(859520964 * 2, rel=0.02)  # the published parameters
    # 320 channels of two latents at 64x64 are 5 MiB; the gated MLP there is 16 of these and more at a time.
    assert 80 * MIB < p.allocated < 300 * MIB and p.allocated < p.reserved + 20 * MIB
    assert p.peak_tensors[0].name == "weights" and "transformer_blocks.0.ff" in p.peak_tensors[1].name
    assert p.upper > p.band[1] >= p.reserved and f"at most {in_mib(p.upper)}" in repr(p)
    assert p.upper_share != p.upper_share and "no module" in p.upper_basis  # nothing was counted of modules
    assert all(what in repr(p) for what in p.substitutions) and p.substitutions
    larger = predict_peak(unet, meta(2, 4, 128, 128), *inputs[1:])
    assert 2 * p.allocated < larger.allocated < 6 * p.allocated
    p.save_snapshot(tmp_path / "unet.pickle")
    assert (tmp_path / "unet.pickle").stat().st_size > 10000


def test_clip_text_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    clip = on_meta(lambda: transformers.CLIPTextModel(config))
    ids = torch.zeros(1, 77, dtype=torch.long)
    one, many = predict_peak(clip, ids), predict_peak(clip, ids.expand(32, 77).contiguous())
    assert one.peak_allocated - one.allocated == pytest.approx(
        123060480 * 2 + 8519680, rel=0.01
    )  # and cuBLAS's workspace
    assert one.workspace_source == ""  # no convolution
    hidden = 32 * 77 * 768 * 2
    # Hidden states, norm, four wide before and three of quick GELU (x * sigmoid(1.702 * x)) at 4 times the width: 14
    # to 18.
    assert 12 * hidden < many.allocated < 20 * hidden


def test_flux_style_transformer():
    small = {
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 128,
        "num_attention_heads": 4,
        "joint_attention_dim": 256,
        "pooled_projection_dim": 64,
        "guidance_embeds": True,
    }
    model = on_meta(lambda: diffusers.FluxTransformer2DModel(**small), torch.bfloat16)

    def inputs(tokens):
        half = torch.bfloat16
        return {
            "hidden_states": meta(1, tokens, 64, dtype=half),
            "encoder_hidden_states": meta(1, 64, 256, dtype=half),
            "pooled_projections": meta(1, 64, dtype=half),
            "timestep": meta(1, dtype=half),
            "guidance": meta(1, dtype=half),
            "img_ids": meta(tokens, 3),
            "txt_ids": meta(64, 3),
        }

    p, longer = predict_peak(model, **inputs(1024)), predict_peak(model, **inputs(4096))
    width = 4096 * 512 * 2
    # A single block holds tokens x (inner + 4 inner) of MLP and attention side by side; attention itself is linear in
    # tokens.
    assert 8 * width < longer.allocated < 40 * width
    assert 3 < longer.allocated / p.allocated < 4.5
    assert set(p.unmodelled) <= {"aten.mean.dim"}
