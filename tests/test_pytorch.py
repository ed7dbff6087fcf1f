"""Predictions for any PyTorch module: what is recorded, and what three well-known ones take."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch import nn
from torch.nn import functional as F

from vaemem.pytorch import predict_peak, record

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_installed_cudnn(monkeypatch):
    from vaemem.prediction.cudnn import InstalledCudnn

    class NoCudnn(InstalledCudnn):
        def _spawn(self):
            return {"error": "not asked in tests"}

    monkeypatch.setattr("vaemem.prediction.cudnn._installed", NoCudnn())


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
    assert [count for _, _, count, _ in recording.trace.kept] == [128]


def test_indexing_by_tensors():
    def run(x, where):
        y = x[where]
        y[where, 0] = 1.0
        return y[[0, 1]]

    recording = record(Calls(run), meta(10, 4, dtype=torch.float32), meta(5, dtype=torch.long))
    assert takes(recording)[0] == 5 * 4 * 4 and recording.trace.kept[0][2] == 2 * 4 * 4
    assert "aten.index_put_.default" in recording.unmodelled


def test_linear_adds_its_bias_as_on_a_gpu():
    layer = on_meta(lambda: nn.Linear(64, 32))
    dense = record(layer, meta(2, 8, 64)).trace
    assert [op for op, *_ in dense.steps] == ["take", "cublaslt"]
    transposed = record(layer, meta(2, 64, 8), call=lambda layer, x: layer(x.transpose(1, 2))).trace
    assert [op for op, *_ in transposed.steps] == ["take", "cublas"]  # a product, the bias in place
    plain = record(on_meta(lambda: nn.Linear(64, 32, bias=False)), meta(8, 64)).trace
    assert [op for op, *_ in plain.steps] == ["take", "cublas"]


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
    assert takes(sliced) == [2 * 8 * 32 * 24 * 2, 2 * 16 * 16 * 12 * 2] and len(sliced.trace.kept) == 1


@pytest.mark.parametrize(
    "make, x",
    [
        (lambda: nn.Conv2d(8, 8, 3, groups=8), (1, 8, 16, 16)),
        (lambda: nn.Conv2d(8, 8, 3, dilation=2), (1, 8, 16, 16)),
        (lambda: nn.Conv2d(8, 8, (1, 3)), (1, 8, 16, 16)),
        (lambda: nn.ConvTranspose2d(8, 8, 2, stride=2), (1, 8, 16, 16)),
        (lambda: nn.Conv1d(8, 8, 3), (1, 8, 16)),
    ],
)
def test_what_is_not_modelled_is_said(make, x):
    recording = record(on_meta(make), meta(*x))
    assert list(recording.unmodelled.values()) == [1] and not recording.trace.convs
    recording = record(Calls(lambda x: torch.sort(x)[0]), meta(100))
    assert "aten.sort.default" in recording.unmodelled


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
    with pytest.raises(ValueError, match="float64"):
        record(Calls(run), meta(1, 1, 8, 8, dtype=torch.float64))


def test_modules_are_left_alone():
    layer = nn.Linear(4, 4)
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
    both = nn.Sequential(a, b)
    assert record(both, meta(2, 8)).weights == [("0.weight", 128)]
    x = meta(2, 8)
    assert record(Calls(lambda x, y: x + y), x, x).inputs == [("input 0", 32)]


def test_data_dependent_modules_are_refused():
    from torch._subclasses.fake_tensor import DataDependentOutputException

    with pytest.raises(DataDependentOutputException):
        record(Calls(lambda x: x if x.sum() > 0 else -x), meta(4))


def test_a_linear_layer():
    p = predict_peak(on_meta(lambda: nn.Linear(4096, 4096)), meta(2048, 4096))
    assert p.allocated == 17 * MIB and p.unmodelled == {}  # output, cuBLASLt's workspace
    assert p.peak_allocated - p.allocated == (32 + 16) * MIB + 8192  # weights, input, bias
    shared = predict_peak(on_meta(lambda: nn.Linear(4096, 4096)), meta(2048, 4096), torch_version="2.12.0")
    assert shared.allocated == 16 * MIB  # cuBLAS's workspace was taken in the warm-up runs
    assert "17.00 MiB" in repr(p) and p.peak_tensors[0].name == "weights" and len(p.timeline) == 2


def test_a_module_on_a_card_that_others_use():
    layer, x = on_meta(lambda: nn.Linear(4096, 4096)), meta(2048, 4096)
    p = predict_peak(layer, x)
    assert p.fits and p.least_reserved <= p.peak_reserved
    less = predict_peak(layer, x, used=p.available - p.least_reserved + (2 << 20))
    assert not less.fits and less.out_of_memory_at.name and "out of memory at" in repr(less)


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
    assert p.upper > p.band[1] >= p.reserved and f"upper {p.upper / 2**20:.0f} MiB" in repr(p)
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
