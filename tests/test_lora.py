"""LoRAs of pipelines: the memory of peft's layers, from a rank or from a file."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from errors import refused
from traces import lifetimes

from vaemem import plan_pipeline, predict_pipeline
from vaemem.pipelines.components import PIPELINES, weights_of
from vaemem.pipelines.lora import Lora
from vaemem.pipelines.recorded_modules import Recorded
from vaemem.prediction.gpus import find_gpu

pytestmark = [pytest.mark.core, pytest.mark.python]

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
sys.path.insert(0, str(RECORDING))


def attach(layer, ranks):
    """A layer with pairs as peft's lora.Linear and lora.Conv2d have them."""
    import torch

    class WithPairs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = layer
            self.pairs = torch.nn.ModuleList()
            for rank in ranks:
                if isinstance(layer, torch.nn.Linear):
                    first = torch.nn.Linear(layer.in_features, rank, bias=False)
                    second = torch.nn.Linear(rank, layer.out_features, bias=False)
                else:
                    how = layer.kernel_size, layer.stride, layer.padding
                    first = torch.nn.Conv2d(layer.in_channels, rank, *how, bias=False)
                    second = torch.nn.Conv2d(rank, layer.out_channels, 1, bias=False)
                self.pairs.append(torch.nn.ModuleList([first, second]))

        def forward(self, x):
            result = self.base_layer(x)
            for first, second in self.pairs:
                result = result + second(first(x)) * 0.5
            return result

    return WithPairs()


def test_pairs_take_what_peft_takes(monkeypatch):
    """Each step and its bytes: of a linear layer with a bias, one without, and a convolution. The sum
    takes the place of the layer's output."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    if not RECORDING.exists():
        pytest.skip("the sources are not here")
    import record_modules
    from modules import MODULES, Module, points, products

    ranks: dict[str, list[int]] = {}

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(4, 12, 3, stride=2, padding=1)
            self.up, self.down = torch.nn.Linear(12, 40), torch.nn.Linear(40, 12, bias=False)
            for name, some in ranks.items():
                setattr(self, name, attach(getattr(self, name), some))

        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2).contiguous()
            return torch.nn.functional.gelu(self.down(self.up(x)) + x)

    def call(sizes, dtype):
        return (torch.empty(sizes["n"], 4, 2 * sizes["h"], 2 * sizes["h"], dtype=dtype),), {}

    small = Module(
        "a small one", Small, call, points("n h", (2, 8), (3, 16), (2, 24), (4, 10)), points("n h", (5, 12)),
        products(["", "n"], ["", "h", "h h"]), dtypes=(torch.float16,),
    )  # fmt: skip
    monkeypatch.setitem(MODULES, "small", small)
    program, gpu, sizes = Recorded("small", record_modules.record("small", lambda _: None)), find_gpu("T4"), {"n": 3}
    sizes |= {"h": 20}
    shapes = {"conv": (12, 4), "up": (40, 12), "down": (12, 40)}
    for some in ({"conv": [5]}, {"up": [8], "down": [3]}, {"conv": [2], "up": [4, 9], "down": [6]}):
        ranks.clear()
        ranks.update(some)
        recorder = record_modules.Recorder(record_modules.Recording(), gpu)
        fresh = record_modules.record_at(small, sizes, torch.float16, recorder).trace
        pairs = [(name, rank, *shapes[name]) for name, all_ in some.items() for rank in all_]
        replayed = program.trace("float16", gpu, (), pairs, **sizes)
        assert lifetimes(replayed.steps) == lifetimes(fresh.steps) and replayed.convs == fresh.convs
        assert replayed.flops > program.trace("float16", gpu, **sizes).flops
    for wrong in (("", 4, 40, 12), ("up", 0, 40, 12)):
        with refused("companions"):
            program.trace("float16", gpu, (), [wrong], **sizes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "component", "targets"),
    [
        ("sd15", "sd15-unet", ["conv1", "proj_in", "to_k", "ff.net.2"]), ("flux", "flux-transformer", []),
        ("sd3", "sd3-transformer", []), ("zimage-turbo", "zimage-transformer", []),
        ("zimage-turbo", "zimage-transformer", ["w1", "w2", "w3", "adaLN_modulation.0"]),
        ("flux2-klein", "flux2-klein-transformer", []), ("chroma", "chroma-transformer", []),
        ("qwen-image", "qwen-image-transformer", ["to_q", "add_k_proj", "img_mlp.net.2"]),
        ("wan-1.3b", "wan-1.3b-transformer", ["to_k", "ffn.net.0.proj"]),
    ],
)  # fmt: skip
def test_pairs_of_full_size_take_what_peft_takes(name, component, targets):
    """peft's own layers in a module of full size: each step, and the weights in order."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    pytest.importorskip("diffusers")
    from modules import MODULES, make
    from torch.nn import Parameter

    from vaemem.pytorch.recorder import Recorder, Recording
    from vaemem.pytorch.recording import record_by

    p = predict_pipeline(name, 512, 512, lora={"rank": 16, "target_modules": targets}, gpu="RTX 4090")
    part = p.parts[p.request.pipeline.denoiser]
    module, dtype, sizes = MODULES[component], getattr(torch, part.dtype), MODULES[component].checks[0]
    built = make(module, dtype)
    layers = sorted({pair.module for pair in part.pairs})
    with torch.device("meta"):
        peft.inject_adapter_in_model(peft.LoraConfig(r=16, target_modules=layers), built)
        args, kwargs = module.call(sizes, dtype)
        args = (*(module.tables(sizes) if module.tables else ()), *args)
    for name, layer in built.named_modules():  # as diffusers leaves them
        for own, weight in layer._parameters.items() if "lora_" in name else ():
            layer._parameters[own] = weight if weight is None else Parameter(weight.data.to(dtype))
    gpu = find_gpu("RTX 4090")
    fresh = record_by(Recorder(Recording(), gpu), built.eval(), args, kwargs, module.run)
    assert lifetimes(part.trace(gpu, "none", **sizes).steps) == lifetimes(fresh.trace.steps)
    assert [weight.bytes for weight in part.weights] == [size for _, size in fresh.weights]


def file_of(path, shapes):
    """A safetensors file of tensors in float16."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path


LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
TEXT = "encoder.layers.0.self_attn.q_proj"


def test_files_in_the_spellings_of_diffusers_and_kohya(tmp_path):
    """They name the same layers and ranks, of the UNet and of both text encoders."""
    shapes = {one.module: one.shape for one in weights_of("sdxl-unet")}[LAYER]
    assert shapes == (640, 640)
    peft = {
        f"unet.{LAYER}.lora_A.weight": [24, 640], f"unet.{LAYER}.lora_B.weight": [640, 24],
        f"text_encoder.text_model.{TEXT}.lora_A.weight": [4, 768],
        f"text_encoder.text_model.{TEXT}.lora_B.weight": [768, 4],
        f"text_encoder_2.text_model.{TEXT}.lora_A.weight": [4, 1280],
        f"text_encoder_2.text_model.{TEXT}.lora_B.weight": [1280, 4],
    }  # fmt: skip
    kohya = {}
    for name, shape in peft.items():
        role, _, rest = name.partition(".")
        layer, _, half = rest.removesuffix(".weight").rpartition(".")
        prefix = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}[role]
        end = {"lora_A": "lora_down", "lora_B": "lora_up"}[half]
        kohya[f"{prefix}{layer.replace('.', '_')}.{end}.weight"] = shape
        kohya[f"{prefix}{layer.replace('.', '_')}.alpha"] = []
    found = []
    for number, tensors in enumerate((peft, kohya)):
        file = file_of(tmp_path / f"{number}.safetensors", tensors)
        p = predict_pipeline("sdxl", 512, 512, gpu="RTX 4090", lora=file)
        found.append({role: part.pairs for role, part in p.parts.items() if part.pairs})
        assert [pair.rank for pairs in found[-1].values() for pair in pairs] == [4, 4, 24]
    assert found[0] == found[1]
    for change, words in (
        ({"unet.down_blocks.9.to_q.lora_B.weight": [640, 24]}, ["down_blocks.9"]),
        ({f"unet.{LAYER}.lokr_w1": [4, 4]}, ["lokr_w1"]),
        ({f"unet.{LAYER}.lora_B.weight": [640]}, ["lora_B", "(640,)"]),
        ({f"unet.{LAYER}.lora_A.weight": []}, ["lora_A", "()"]),
    ):
        file = file_of(tmp_path / "other.safetensors", peft | change)
        with refused("lora", names=words):
            predict_pipeline("sdxl", 512, 512, lora=file)


def test_weights_and_calls_with_a_lora():
    """Its weights come and go with the component's; a fused one takes no part in calls, but stays."""
    for offload in ("none", "model", "sequential"):
        how = {"gpu": "RTX 4090", "offload": offload, "steps": 1}
        plain, with_pairs, fused, both = (
            predict_pipeline("sd15", 512, 512, **how, lora=lora)
            for lora in (None, {"rank": 64, "target_modules": ["ff.net.0.proj"]}, {"rank": 64, "target_modules":
                ["ff.net.0.proj"], "fused": True}, None if offload == "sequential" else [16, "16 fused"])
        )  # fmt: skip
        size = sum(one.nbytes("float16") for pair in with_pairs.parts["unet"].pairs for one in pair.weights)
        last = {name: p.phases[-2] for name, p in (("plain", plain), ("pairs", with_pairs), ("fused", fused))}
        assert last["pairs"].flops > last["plain"].flops == last["fused"].flops
        assert last["pairs"].allocated > last["fused"].allocated >= last["plain"].allocated
        if offload == "sequential":
            assert last["pairs"].sent - last["plain"].sent == size
        else:
            assert 0 <= last["fused"].weights - last["plain"].weights - size < 2 << 20  # the rounding of large blocks
            assert len(both.parts["unet"].pairs) == 2 * 128 and both.notes
    assert with_pairs.to_dict()["asked"]["lora"] == ["rank 64 in ff.net.0.proj"]


def test_pipelines_take_loras_as_diffusers_do():
    diffusers = pytest.importorskip("diffusers")
    for name, pipeline in PIPELINES.items():
        size = (512, 832) if pipeline.frames else (1024, 1024)
        if "dummy" in getattr(diffusers, pipeline.class_name).__module__:
            continue  # it needs a package that is not there
        if not hasattr(getattr(diffusers, pipeline.class_name), "load_lora_weights"):
            with refused("lora"):
                predict_pipeline(name, *size, gpu="H100", lora=16)
            continue
        pairs = predict_pipeline(name, *size, gpu="H100", lora=16).parts[pipeline.denoiser].pairs
        assert any(pair.module.endswith("to_q") or "to_qkv" in pair.module for pair in pairs)


@pytest.mark.parametrize(
    ("name", "layer", "spellings"),
    [
        ("zimage-turbo", "layers.3.attention.to_q", ["transformer.{}", "diffusion_model.{}", "{}"]),
        ("qwen-image", "transformer_blocks.3.attn.to_k", ["transformer.{}", "{}"]),
        ("wan-1.3b", "blocks.7.ffn.net.2", ["transformer.{}", "diffusion_model.blocks.7.ffn.2"]),
        ("wan-1.3b", "blocks.7.attn2.to_out.0", ["transformer.{}", "diffusion_model.blocks.7.cross_attn.o"]),
    ],
)
def test_files_for_transformers(tmp_path, name, layer, spellings):
    size = (480, 832) if name.startswith("wan") else (1024, 1024)
    denoiser = PIPELINES[name].parts["transformer"]
    (rows, columns) = {one.module: one.shape for one in weights_of(denoiser) if one.name.endswith("weight")}[layer]
    for number, spelling in enumerate(spellings):
        found = spelling.format(layer)
        tensors = {f"{found}.lora_A.weight": [24, columns], f"{found}.lora_B.weight": [rows, 24]}
        file = file_of(tmp_path / f"{number}.safetensors", tensors)
        (pair,) = predict_pipeline(name, *size, gpu="H100", lora=file).parts["transformer"].pairs
        assert (pair.module, pair.rank, pair.shape) == (layer, 24, (rows, columns))


@pytest.mark.parametrize(
    ("how", "argument"),
    [
        ({"pipeline": "pixart-sigma"}, "lora"),
        ({"lora": 0}, "lora['rank']"),
        ({"lora": {"rank": 4, "alpha": 1}}, "lora"),
        ({"lora": {"rank": 4, "target_modules": ["to_x"]}}, "lora"),
        ({"components": {"unet": "fp8"}}, "components['unet']"),
        ({"offload": "leaf_level"}, "offload"),
        ({"offload": "sequential", "lora": [4, 8]}, "offload"),
        ({"diffusers_version": "0.33.0"}, "diffusers_version"),
        ({"runtime": "comfyui"}, "lora"),
    ],
)
def test_what_was_not_compared_is_refused(how, argument):
    with refused(argument):
        predict_pipeline(**{"pipeline": "sdxl", "height": 512, "width": 512, "lora": 8, **how})


def test_a_plan_with_a_lora():
    plan = plan_pipeline("sd15", 512, 512, gpu="RTX 4090", lora="8 fused")
    assert "pipe.load_lora_weights(" in plan.recommended.way.code and "fuse_lora" in plan.recommended.way.code
    assert not [one for one in plan.outcomes if "group" in one.way.name]
    assert str(Lora.read("8 fused")) == "rank 8 fused"
