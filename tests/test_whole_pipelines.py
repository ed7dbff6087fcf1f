"""diffusers' own pipelines, whole and of full size, with their own schedulers, run under fake tensors next to
`predict_pipeline`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
if not RECORDING.exists():
    pytest.skip("the sources are not here", allow_module_level=True)
sys.path.insert(0, str(RECORDING))

import record_pipelines
from diffusers.pipelines import pipeline_utils
from diffusers.quantizers.quantization_config import QuantizationMethod
from diffusers.utils.import_utils import compare_versions
from packaging.version import parse
from torch.utils._python_dispatch import TorchDispatchMode
from torch_vaes import RELEASE

from vaemem import predict_pipeline
from vaemem.pipelines.components import PIPELINES
from vaemem.prediction.profiles import Conv
from vaemem.pytorch import predict_pipeline as predict_any

CASES = [  # pipeline, whether it begins with an image, side, images, steps, GPU
    ("sd15", False, 512, 1, 2, "T4"),
    ("sd15", True, 768, 1, 3, "RTX 3060"),
    ("sd15-controlnet", False, 512, 1, 2, "T4"),
    ("sd21", False, 768, 2, 1, "T4"),
    ("sdxl", False, 768, 1, 3, "RTX 4090"),
    ("sdxl", True, 768, 1, 1, "RTX 4090"),
    ("sdxl-controlnet", False, 768, 1, 2, "RTX 4090"),
    ("sdxl-refiner", False, 768, 1, 2, "RTX 4090"),
    ("sd3", False, 1024, 1, 2, "RTX 4090"),
    ("sd35-medium", False, 1024, 1, 1, "RTX 4090"),
    ("pixart-sigma", False, 768, 1, 4, "RTX 4090"),
    ("chroma", False, 768, 1, 1, "H200"),
    ("flux", False, 768, 1, 2, "H200"),
    ("flux", True, 1024, 1, 2, "H200"),
    ("flux-kontext", False, 1024, 2, 1, "RTX 4090"),
    ("flux-fill", False, 768, 1, 1, "RTX 4090"),
    ("flux2-klein", False, 768, 1, 2, "H200"),
    ("flux2-klein-base", False, 768, 1, 2, "H200"),
    ("flux2-klein-9b", False, 768, 1, 2, "H200"),
    ("flux2-klein-base-9b", False, 768, 1, 2, "H200"),
    ("flux2", False, 768, 1, 1, "H200"),
    ("flux-schnell", False, 768, 1, 1, "H200"),
    ("sd35-large", False, 768, 1, 2, "H200"),
    ("zimage", False, 768, 1, 2, "RTX 4090"),
    ("zimage-turbo", False, 768, 1, 2, "RTX 4090"),
]


@pytest.mark.one_in(24)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{', image' * case[1]}")
def test_a_pipeline_as_its_own_code_runs(case):
    """What a pipeline's own code allocates in each phase beyond the loaded weights, components included."""
    name, begins, side, images, steps, gpu = case
    kind = PIPELINES[name]
    at = record_pipelines.point_of(name, begins, side, images, steps)
    pipe = record_pipelines.build(name, kind.dtype, "", record_pipelines.sibling(name, begins), at["u"], 0)
    record_pipelines.prepare(pipe, kind, at)
    own = predict_any(pipe, gpu=gpu, **record_pipelines.ask(pipe, kind, at))
    predicted = predict_pipeline(
        name, side, side, images, prompt_tokens=at["t"], guidance=bool(kind.guides), image=begins, steps=steps, gpu=gpu
    )
    known = {phase.name: phase for phase in predicted.phases}
    assert [phase.name for phase in own.phases] == [*known]
    # The allocator fills gaps by the order of loading, which differs for tables that a scheduler or an encoder makes.
    # So blocks differ by up to 2 MiB, and segments by one (34 MiB, 0.22%, for FLUX.2 klein).
    loaded = known["load"].allocated - own.phases[0].allocated
    for phase in own.phases[1:]:
        assert abs(known[phase.name].allocated - phase.allocated - loaded) <= 1 << 21, phase.name
        assert abs(known[phase.name].reserved - phase.reserved) <= 0.0025 * phase.reserved, phase.name


class Convolutions(TorchDispatchMode):
    """Notes in order the dtypes of every convolution's input and filter, and the filter's side."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.convolution:
            x, filters, *_ = args
            self.seen.append((x.dtype, filters.dtype, filters.shape[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.older
def test_sequential_offload_decodes_in_the_predicted_dtypes(monkeypatch):
    """accelerate brings a weight in the dtype of its stand-in on "meta", which is what `upcast_vae` converts; and it
    empties the cache after each weight."""
    accelerate = pytest.importorskip("accelerate")
    few = {"norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), layers_per_block=1,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time",
        addition_time_embed_dim=2, projection_class_embeddings_input_dim=6 * 2 + 8, **few,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2,
        block_out_channels=(4, 8, 16, 16), norm_num_groups=4, force_upcast=True,
    )  # fmt: skip
    none = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    parts = {"vae": vae.half(), "unet": unet.half(), "scheduler": diffusers.EulerDiscreteScheduler()}
    pipeline = diffusers.StableDiffusionXLPipeline(**parts, **none, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    accelerate.cpu_offload(vae, torch.device("cpu"))  # as enable_sequential_cpu_offload does, but for the device
    decode, convolutions = vae.decode, Convolutions()

    def watched(*args, **kwargs):
        with convolutions:
            return decode(*args, **kwargs)

    vae.decode = watched
    monkeypatch.setattr(accelerate.utils.modeling, "clear_device_cache", lambda: convolutions.seen.append("empty"))
    prompts = {
        f"{kind}{name}_embeds": torch.zeros(shape, dtype=torch.float16)
        for kind in ("", "negative_")
        for name, shape in (("prompt", (1, 77, 8)), ("pooled_prompt", (1, 8)))
    }
    pipeline(**prompts, height=64, width=64, num_inference_steps=1, output_type="pt")
    predicted = predict_pipeline("sdxl", 64, 64, offload="sequential", diffusers_version=diffusers.__version__)
    _, (trace, *_) = predicted._run.calls[-1]
    convs = [Conv(*question) for question in trace.convs]
    asked = [(getattr(torch, conv.dtype),) * 2 + (conv.r,) for conv in convs]
    predicted = [op if op == "empty" else asked[number] for op, number, *_ in trace.steps if op in ("empty", "conv")]
    assert convolutions.seen == predicted
    first = torch.float16 if RELEASE < 36 else torch.float32
    assert [one[0] for one in predicted if one != "empty"] == [first] * 6 + [torch.float32] * 30


@pytest.mark.parametrize(
    ("kind", "flag", "stay"),
    [
        ("int8", "8bit", False),
        ("int8 kept on cuda", "8bit", True),
        ("nf4 on cuda", "4bit", False),
        ("nf4", "4bit", False),
    ],
)
def test_model_offload_moves_what_diffusers_hooks_move(kind, flag, stay, monkeypatch):
    """diffusers' own hooks on small modules that are marked as bitsandbytes' are; where their chain leaves each. int8
    stays with bitsandbytes before 0.48, which need not be installed."""
    pytest.importorskip("accelerate")
    number = "0.47.0" if stay else "0.49.0"
    monkeypatch.setattr(
        pipeline_utils, "is_bitsandbytes_version", lambda how, than: compare_versions(parse(number), how, than)
    )
    monkeypatch.setattr(transformers.modeling_utils, "is_bitsandbytes_available", lambda *_: not stay)
    clip = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    t5 = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    roles = {
        "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=9, **clip)),
        "text_encoder_2": transformers.T5EncoderModel(transformers.T5Config(vocab_size=9, **t5)),
        "transformer": diffusers.FluxTransformer2DModel(
            num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=1, axes_dims_rope=(2, 2, 4)
        ),
        "vae": diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=4),
    }
    quantised = ("text_encoder_2", "transformer")
    for role in quantised:
        setattr(roles[role], f"is_loaded_in_{flag}", True)
        roles[role].quantization_method = QuantizationMethod.BITS_AND_BYTES
    none = dict.fromkeys(("tokenizer", "tokenizer_2"))
    pipeline = diffusers.FluxPipeline(**roles, **none, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    pipeline.enable_model_cpu_offload(device="cpu")
    name = {id(module): role for role, module in roles.items()}
    before = {}  # {what is brought before its call: what leaves then}
    for user in pipeline._all_hooks:
        before[name[id(user.model)]] = name.get(id(getattr(user.hook.prev_module_hook, "model", None)))

    found = predict_pipeline("flux", 512, 512, offload="model", components=dict.fromkeys(quantised, kind))
    held = [{role for role in roles if f"weights of {role}" in dict(p.peak_tensors)} for p in found.phases]
    if "cuda" in kind:
        assert held.pop(0) == set(quantised)  # both were loaded there, before any hook
    there = {role for role in quantised if role not in before}
    assert (there == set(quantised)) == stay
    lie = []
    for role in roles:
        there = there - {before[role]} | {role} if role in before else there
        lie.append(there)
    assert held == lie[1:]  # the second text encoder's call is the larger one
