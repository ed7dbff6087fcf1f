"""Layers of bitsandbytes, torchao and optimum-quanto, and of GGUF files in diffusers: the tensors that they store and
take, compared with the libraries' own. The first three run on the CPU, in an environment of their own (make
quantised)."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from errors import refused

from vaemem import plan_pipeline, predict_pipeline
from vaemem._core import Program
from vaemem.engine.weights import tensor_types
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.pipeline_parts import Part, parts_of
from vaemem.pipelines.quantising import SCHEMES, SIXTEEN_BITS, UNPACKING, _LinearLayer, layer_working
from vaemem.pipelines.recorded_modules import Weight, load_program
from vaemem.pipelines.storage import Stored, loaded, rule_of, stored, tensor_bytes

wants_torchao = pytest.mark.skipif(
    not importlib.util.find_spec("torchao"), reason="torchao is not installed (make check ONLY=quantised)"
)

pytestmark = [pytest.mark.core, pytest.mark.python]

# Of a linear layer with 384 outputs, 512 inputs and 200 rows in bfloat16, by bitsandbytes 0.50.2, torchao 0.18.0 and
# optimum-quanto 0.2.7: the stored tensors, the most bytes that a call holds, with a bias and without one, and the bytes
# for each number that quantising holds.
MEASURED = {
    "int8": [[196608, 1536], 717600, 717600, None],
    "nf4": [[98304, 12288, 64], 546816, 546816, None],
    "nf4 double": [[98304, 3072, 1024, 64, 48, 4], 571392, 571392, None],
    "int8wo": [[196608, 1536, 384], 546816, 546816, 8],
    "int8dq": [[196608, 1536, 384], 820200, 820200, 8],
    "float8wo": [[196608, 1536], 1966080, 1966080, 13],
    "float8dq": [[196608, 4], 1331204, 1331204, 13],
    "qint8": [[196608, 768, 2, 2], 546816, 546816, 4],
    "qfloat8": [[196608, 768, 2, 2], 786432, 786432, 4],
    "qint4": [[98304, 6144, 2, 2], 307200, 153600, 6],
}


def layer_of(type, outputs, inputs, rows):
    """What `quantised_layers` prints, by the package."""
    peaks = []
    for has_bias in (True, False):
        live, most = {}, 0
        tensors = SCHEMES[type].working(_LinearLayer(outputs, inputs, "bfloat16", has_bias))
        for number, one in enumerate(tensors):
            live[number] = one.bytes + rows * one.row_bytes
            most = max(most, sum(live.values()))
            for earlier, given in enumerate(tensors[:number]):
                if given.lives and earlier + given.lives == number:
                    live.pop(earlier)
        peaks.append(max(most, sum(live.values()) + 2 * outputs * rows))
    (held,) = stored([("weight", (outputs, inputs))], type, rule_of(type, 42))
    assert held.bytes == tensor_bytes((outputs, inputs), type) == sum(held.pieces)
    return [sorted(held.pieces, reverse=True), *peaks, SCHEMES[type].quantising]


@pytest.mark.parametrize("type", MEASURED)
def test_layers_as_they_were_measured(type):
    assert layer_of(type, 384, 512, 200) == MEASURED[type]


@wants_torchao
def test_layers_as_the_libraries_run_them():
    sizes = [(384, 512, 200), (256, 768, 24), (1024, 256, 8)]
    command = [sys.executable, Path(__file__).with_name("quantised_layers.py")]
    command += [",".join(map(str, one)) for one in sizes]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = [*map(json.loads, run.stdout.splitlines())]
    assert measured == [{type: layer_of(type, *one) for type in MEASURED} for one in sizes]


@wants_torchao
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_text_encoders_as_transformers_quantises_them(dtype):
    command = [sys.executable, Path(__file__).with_name("quantised_text_encoders.py"), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    for type, (weights, sizes) in json.loads(run.stdout.splitlines()[-1]).items():
        held = stored(weights, type, rule_of(type, 42), dtype)
        counted = 2 if type == "qint8" else None  # not the two scales of activations, which are buffers
        assert {one.name: sum(one.pieces[:counted]) for one in held} == sizes


@wants_torchao
def test_what_the_libraries_own_functions_quantise():
    """quanto takes convolutions too, and both take T5's wo and the head."""
    import optimum.quanto as quanto
    import torchao.quantization as torchao
    from diffusers import PixArtTransformer2DModel, UNet2DConditionModel
    from transformers import T5Config, T5ForConditionalGeneration

    def models():
        yield UNet2DConditionModel(
            block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        yield PixArtTransformer2DModel(
            num_layers=1, caption_channels=64, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            sample_size=8, norm_num_groups=8, use_additional_conditions=False,
        )  # fmt: skip
        yield T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=1))

    def by_quanto(model):
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)

    def by_torchao(model):
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())

    for type, quantise in (("qint8", by_quanto), ("int8wo", by_torchao)):
        for model in models():
            weights = [(name, tuple(one.shape)) for name, one in model.named_parameters(remove_duplicate=False)]
            quantise(model)
            real = {name for name, one in model.named_parameters() if hasattr(one, "__tensor_flatten__")}
            held = stored(weights, type, rule_of(type, 42, is_direct=True))
            assert {one.name for one in held if one.type == type} == real


def test_a_unet_that_quanto_quantises_directly():
    """Convolutions have a scale for each output, and are unpacked for their calls (measured: 2n bytes in int8)."""
    direct, by_config = (
        predict_pipeline("sd15", 512, 512, gpu="T4", components={"unet": type}).parts["unet"]
        for type in ("qint8 directly", "qint8")
    )
    (conv,) = (one for one in direct.weights if one.name == "mid_block.resnets.0.conv1.weight")
    assert conv.pieces == (1280 * 1280 * 9, 2 * 1280, 2, 2)
    assert direct.working["mid_block.resnets.0.conv1"] == [("weight, unpacked", 2 * 1280 * 1280 * 9, 0, 0, 0)]
    assert "mid_block.resnets.0.conv1" not in by_config.working and direct.nbytes < 0.7 * by_config.nbytes


# GiB of max_memory_allocated in the README of github.com/sayakpaul/diffusers-torchao, for FLUX.1-dev at 1024x1024 on an
# H100, with quantize_ after pipe.to("cuda"), neither compiled nor fused. With one image the peak is in load: the whole
# weights, and one matrix's temporary tensors. torchao of 2024 took fewer of these.
@pytest.mark.parametrize(
    ("type", "batch", "gib"),
    [
        ("int8wo", 1, 31.607), ("int8dq", 1, 31.608), ("float8wo", 1, 31.607), ("float8dq", 1, 31.817),
        ("int8wo", 8, 36.457), ("int8dq", 8, 36.458), ("float8wo", 8, 36.434), ("float8dq", 8, 36.428),
    ],
)  # fmt: skip
def test_quantised_on_the_card_as_published(type, batch, gib):
    asked = {"gpu": "H100", "batch": batch, "components": {"transformer": f"{type} from bfloat16 on cuda"}}
    found = predict_pipeline("flux", 1024, 1024, **asked)
    most = max(found.phases, key=lambda phase: phase.allocated)
    assert most.name == ("load" if batch == 1 else "decode")
    assert -0.001 < most.allocated / 2**30 / gib - 1 < (0.016 if batch == 1 else 0.001)


def test_the_order_of_cast_and_move():
    """Cast first, only float8 comes to the card. Published (max_memory_reserved, FLUX.1-dev at 1024x1024, float8 before
    the move, on an H100): 24250.4 MiB loaded, and 15995.9 MiB at the peak of model offload."""
    asked = {"height": 1024, "width": 1024, "gpu": "H100"}
    found = {
        (order, offload): predict_pipeline("flux", **asked, offload=offload, components={"transformer": f"fp8{order}"})
        for order in ("", " from bfloat16", " from bfloat16 on cuda", " from bfloat16 kept on cuda")
        for offload in ("none", "model")
    }
    before = found["", "none"].phases
    assert before == found[" from bfloat16", "none"].phases
    assert before[0].reserved / 2**20 == pytest.approx(24250.4, abs=0.5)
    assert found["", "model"].peak / 2**20 == pytest.approx(15995.9, rel=0.001)
    whole = predict_pipeline("flux", **asked)
    after = found[" from bfloat16 on cuda", "none"]
    assert 0 <= after.phases[0].allocated - whole.phases[0].allocated < 32 << 20
    assert after.phases[0].reserved == pytest.approx(whole.phases[0].reserved, rel=0.01)
    assert after.phases[1].allocated == pytest.approx(before[1].allocated, rel=0.01)
    load, *rest = found[" from bfloat16 on cuda", "model"].phases
    assert load.allocated >= whole.parts["transformer"].nbytes
    assert [one.allocated for one in rest] == [one.allocated for one in found["", "model"].phases]
    kept = found[" from bfloat16 kept on cuda", "model"]
    assert all(phase.weights >= kept.parts["transformer"].nbytes for phase in kept.phases)
    assert any("before it comes" in note for note in after.notes)


def test_t5_in_bfloat16():
    """The bytes of FLUX.1's T5: its wo, 24 matrices of 4096x10240, stay in bfloat16 with transformers 5."""
    for type, mib in (("nf4", 4115.4), ("int8wo", 4672.1), ("qint8", 5629.1)):
        found = predict_pipeline("flux", 1024, 1024, gpu="RTX 4090", components={"text_encoder_2": type})
        assert found.parts["text_encoder_2"].nbytes / 2**20 == pytest.approx(mib, abs=0.05)
    wan = predict_pipeline("wan-1.3b", 480, 832, gpu="RTX 4090", components={"text_encoder": "nf4"})
    assert {one.type for one in wan.parts["text_encoder"].weights} == {"nf4", "bfloat16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gguf_is_unpacked_as_by_diffusers(dtype):
    """Its functions under fake tensors: each tensor, and how long it lives. Tables have at most 512 bytes."""
    torch, gguf = pytest.importorskip("torch"), pytest.importorskip("gguf")
    utils = pytest.importorskip("diffusers.quantizers.gguf.utils")
    from vaemem.pytorch import record

    assert {type.name for type in utils.SUPPORTED_GGUF_QUANT_TYPES} == UNPACKING.keys()
    rows, columns, kind = 640, 1024, getattr(torch, dtype)
    for type in utils.SUPPORTED_GGUF_QUANT_TYPES:
        numbers, size = gguf.GGML_QUANT_SIZES[type]

        def unpack(module, packed, size=size, numbers=numbers, type=type):
            blocks = packed.view(torch.uint8).reshape(-1, size)
            return utils.dequantize_functions[type](blocks, numbers, size).reshape(rows, columns).to(kind)

        packed = torch.empty(rows, columns // numbers * size, dtype=torch.uint8)
        steps = record(torch.nn.Module().eval(), packed, call=unpack).trace.steps
        order = [number for op, number, bytes, _ in steps if op == "take" and bytes > 512]
        real, seen = dict.fromkeys(order, 0), 0
        for op, number, *_ in steps:
            seen += op == "take" and number in real
            if op == "give" and number in real:
                real[number] = seen - 1 - order.index(number)
        sizes = [bytes for op, number, bytes, _ in steps if op == "take" and number in real]
        ours = layer_working(type.name, (rows, columns), dtype, False)
        assert [(one.bytes, one.lives) for one in ours] == [*zip(sizes, real.values(), strict=True)], type.name


@pytest.fixture(scope="module")
def small_flux(tmp_path_factory):
    """Load a small FLUX.1 from a GGUF file of Q8_0: (a function that loads it, its weights, arguments of a call)."""
    torch, gguf = pytest.importorskip("torch"), pytest.importorskip("gguf")
    pytest.importorskip("diffusers.quantizers.gguf.utils")
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=64,
        pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("flux")
    model.save_config(folder)
    weights = [Weight(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    packed = {one.name for one in stored(weights, "Q8_0", "diffusers-gguf") if one.type == "Q8_0"}
    writer = gguf.GGUFWriter(folder / "flux.gguf", "flux")
    for name, tensor in model.named_parameters():
        kind = gguf.GGMLQuantizationType.Q8_0 if name in packed else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.detach().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def load():
        return FluxTransformer2DModel.from_single_file(
            str(folder / "flux.gguf"), config=str(folder), torch_dtype=torch.bfloat16,
            quantization_config=GGUFQuantizationConfig(compute_dtype=torch.bfloat16),
        )  # fmt: skip

    half = {"dtype": torch.bfloat16}
    given = {
        "hidden_states": torch.randn(1, 16, 64, **half), "encoder_hidden_states": torch.randn(1, 8, 64, **half),
        "pooled_projections": torch.randn(1, 32, **half), "timestep": torch.ones(1, **half),
        "guidance": torch.ones(1, **half), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip
    return load, weights, given, folder / "flux.gguf"


def test_diffusers_loads_of_a_gguf_file_what_is_predicted(small_flux):
    """By type, and from the file's header."""
    load, weights, _, file = small_flux
    real = {name: tensor.nbytes for name, tensor in load().named_parameters()}
    by_type = {one.name: one.bytes for one in stored(weights, "Q8_0", "diffusers-gguf", "bfloat16")}
    by_header = {one.name: one.bytes for one in loaded(stored(weights, None, tensor_types(file)), weights, "bfloat16")}
    assert real == by_type == by_header


def test_offloading_moves_weights_of_a_gguf_file(small_flux):
    """Groups do, and the result stays; accelerate's sequential offload fails."""
    import torch
    from accelerate import cpu_offload
    from diffusers.hooks import apply_group_offloading, group_offloading

    load, weights, given, _ = small_flux
    total = sum(one.bytes for one in stored(weights, "Q8_0", "diffusers-gguf", "bfloat16"))
    with torch.no_grad():
        expected = load()(**given).sample
        for settings in ({"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 1}):
            model, sent, group = load(), {}, group_offloading.ModuleGroup
            with pytest.MonkeyPatch.context() as patch:

                def watch(this, tensor, source, stream, real=group._transfer_tensor_to_device, sent=sent):
                    sent[id(tensor)] = tensor.nbytes
                    real(this, tensor, source, stream)

                patch.setattr(group, "_transfer_tensor_to_device", watch)
                apply_group_offloading(model, torch.device("cpu"), torch.device("cpu"), **settings)
                assert torch.equal(model(**given).sample, expected) and sum(sent.values()) == total
        model = load()
        with pytest.raises(KeyError):
            cpu_offload(model, torch.device("cpu"))
            model(**given)
    with refused("offload", names=["'sequential'"]):
        predict_pipeline("flux", 512, 512, components={"transformer": "Q8_0"}, offload="sequential")


def test_a_gguf_file_with_other_names(tmp_path):
    """A layer has the type of a tensor of its shape, or else the usual one: here Q4_K for joined attentions."""
    names = [(w.name, w.shape) for w in load_program("flux-transformer").weights]
    other = [(f"blocks.{i}", shape) for i, (_, shape) in enumerate(names)]
    held = [
        (name, shape, "Q6_K" if shape == (3072, 12288) else "Q4_K" if len(shape) == 2 and shape[1] >= 256 else "F32",
         tensor_bytes(shape, "Q4_K" if len(shape) == 2 and shape[1] >= 256 else "float32"))
        for name, shape in other
    ]  # fmt: skip
    part = Part("transformer", "flux-transformer", "bfloat16", tuple(Stored(*one) for one in held))
    down, up = (part.working[f"transformer_blocks.0.ff.net.{name}"] for name in ("2", "0.proj"))
    assert len(down) == 11 and len(up) == 19 and down[-1] == up[-1] == ("weight, unpacked", 2 * 3072 * 12288, 0, 0, 0)


@pytest.mark.parametrize(
    ("pipeline", "components", "argument", "got"),
    [
        ("flux", {"text_encoder": "Q8_0"}, "components['text_encoder']", "'Q8_0'"),
        ("qwen-image", {"transformer": "Q4_K_M"}, "components['transformer']", "'Q4_K_M'"),
        ("qwen-image", {"text_encoder": "q5_k_m"}, "components['text_encoder']", "'q5_k_m'"),
        ("flux", {"transformer": "IQ2_XXS"}, "components['transformer']", "'IQ2_XXS'"),
        ("pixart-sigma", {"transformer": "Q8_0"}, "components['transformer']", "'Q8_0'"),
    ],
)
def test_what_diffusers_does_not_load_of_gguf_is_refused(pipeline, components, argument, got):
    with refused(argument, names=[got]):
        predict_pipeline(pipeline, 1024, 1024, gpu="RTX 4090", components=components)


def test_gguf_files_by_their_names_on_the_hub():
    """A mixture on the card; transformers unpacks a text encoder's file."""
    found = predict_pipeline("flux", 1024, 1024, gpu="RTX 4090", components={"transformer": "q4_k_m"})
    types = {one.type for one in found.parts["transformer"].weights}
    assert types == {"Q4_K", "Q5_K", "bfloat16"}
    working = found.parts["transformer"].working["transformer_blocks.0.attn.to_q"]
    assert len(working) > len(found.parts["transformer"].working["transformer_blocks.0.ff.net.2"])  # Q5_K's steps
    whole = predict_pipeline("zimage-turbo", 1024, 1024, gpu="RTX 4090")
    for type in ("Q8_0", "Q5_K_M", "IQ2_XXS"):
        packed = predict_pipeline("zimage-turbo", 1024, 1024, gpu="RTX 4090", components={"text_encoder": type})
        assert packed.phases == whole.phases and any("unpacks its GGUF file" in note for note in packed.notes)


def test_plans_with_a_gguf_file(small_flux):
    """Only the denoiser is packed, and the code loads it."""
    plan = plan_pipeline("flux", 1024, 1024, gpu="RTX 4090", types=["Q8_0"])
    assert all(one.way.settings["components"] == {"transformer": "Q8_0"} for one in plan.outcomes)
    code = plan.outcomes[0].way.code
    assert "FluxTransformer2DModel.from_single_file(" in code and "transformer=transformer" in code
    ast.parse(code)
    assert not [
        one for one in plan_pipeline("pixart-sigma", 1024, 1024, gpu="GTX 1060").outcomes if "Q8" in one.way.name
    ]


@wants_torchao
def test_the_code_of_a_plan_makes_the_libraries_configs():
    """Everything before from_pretrained runs."""
    types = {"transformer": "int8wo", "text_encoder_2": "qint4"}
    plan = plan_pipeline("flux", 1024, 1024, gpu="RTX 4090", components=types)
    code = plan.recommended.way.code.partition("pipe = ")[0]
    told = "\nfor name in ('transformer', 'text_encoder_2'):"
    told += "\n    print(quantization_config._resolve_quant_config(name == 'transformer', name).to_dict())"
    command = [sys.executable, "-W", "ignore", "-c", code + told]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(run.stdout.splitlines()) == 2 and "int4" in run.stdout


def test_a_tensor_that_lives_until_the_next_is_there():
    """The second tensor has 600 bytes for each of the product's 7 rows; the first one is given back after it."""
    program = Program("name m\nvariables n\ncall float16; 1 n = 1\nsize 84 n\nsize 1000 n\nmodule +1 b0 -1\nmodule a=0")
    passing = [("a", "a", "whole", 4096, 0, 0, 0, 1), ("a", "a", "product", 8, 0, 600, 12, 0)]
    plain, found = (
        [step[:3] for step in program.trace("float16", (1,), 89, 128, 0, given).steps] for given in ((), passing)
    )
    taken = [("take", 0, 4096), ("take", 1, 8 + 7 * 600), ("give", 0, 0), ("take", 2, 1000)]
    assert found[:4] == taken and found[-1] == ("give", 1, 0) and len(found) == len(plain) + 4


def test_a_layer_of_a_prediction():
    """The unpacked weight is there until its product is, and the product until the call ends."""
    (part,) = (
        part for part in parts_of(PIPELINES["flux"], "bfloat16", {"transformer": "qint8"}, 42)
        if part.role == "transformer"
    )  # fmt: skip
    assert part.working["transformer_blocks.0.ff.net.2"] == [
        ("weight, unpacked", 2 * 3072 * 12288, 0, 0, 1), ("product", 0, 2 * 3072, 2 * 3072 * 12288, 0),
    ]  # fmt: skip


def test_a_plan_refuses_another_card_too():
    with refused("components['text_encoder_2']", names=["Tesla T4 (7.5)"]):
        plan_pipeline("flux", 1024, 1024, gpu="T4", types=["float8dq"])


def test_stored_sizes_of_a_denoiser():
    """Everything but linear layers stays in bfloat16, and so do matrices that the kernels do not take."""
    plain = predict_pipeline("flux", 512, 512).parts["transformer"]
    for type in SIXTEEN_BITS:
        part = predict_pipeline("flux", 512, 512, components={"transformer": f"{type} from bfloat16"}).parts[
            "transformer"
        ]
        kept = sum(w.bytes for w in part.weights if w.type == "bfloat16")
        small = sum(w.bytes for w in part.weights if w.type == type)
        assert part.file_bytes == plain.nbytes and kept + small == part.nbytes
        assert 0.2 < small / plain.nbytes < 0.52 and kept < 0.002 * plain.nbytes


@pytest.mark.parametrize(
    ("type", "settings", "argument", "got"),
    [
        ("svdquant", {}, "components['transformer']", "'svdquant'"),
        ("torch.compile", {}, "components['transformer']", "'torch.compile'"),
        ("int8wo on cuda", {}, "components['transformer']", "'int8wo on cuda'"),
        ("int4wo from bfloat16 on cuda", {}, "components['transformer']", "'int4wo from bfloat16 on cuda'"),
        ("nf4 directly", {}, "components['transformer']", "'nf4'"),
        ("float8dq", {"gpu": "T4"}, "components['transformer']", "Tesla T4 (7.5)"),
        ("qint4", {"offload": "sequential"}, "offload", "'sequential'"),
        ("int8wo", {"dtype": "float32"}, "components['transformer']", "one in float32"),
    ],
)
def test_what_the_libraries_do_not_run_is_refused(type, settings, argument, got):
    with refused(argument, names=[got]):
        predict_pipeline("flux", 1024, 1024, **{"gpu": "RTX 4090"} | settings, components={"transformer": type})
