"""What weights take by storage type: beside the formats' own tables, the libraries' own choices and published sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from errors import refused
from safetensors.numpy import save_file

from vaemem.engine.weights import tensor_types
from vaemem.pipelines import recorded_modules
from vaemem.pipelines.components import weights_of
from vaemem.pipelines.storage import GGML, MIXTURES, RULES, TYPES, Stored, rule_of, stored, tensor_bytes

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

FILE = [("a", (64, 32), "Q8_0", 2176), ("b", (64,), "F32", 256)]  # as vaemem.engine.weights.tensor_types lists one


def on_meta(build, *args, **kwargs):
    with torch.device("meta"):
        return build(*args, **kwargs)


def inventory(module) -> list[tuple[str, tuple[int, ...], str]]:
    kept = [f".{name}." for name in getattr(module, "_keep_in_fp32_modules", None) or ()]
    return [
        (name, tuple(tensor.shape), "kept" if any(one in name for one in kept) else "run")
        for name, tensor in module.named_parameters()
    ]


def flux(**settings):
    return on_meta(diffusers.FluxTransformer2DModel, **settings)


def unet():
    return on_meta(diffusers.UNet2DConditionModel, cross_attention_dim=768, attention_head_dim=8)


def sd3():
    settings = {"num_layers": 2, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    return on_meta(diffusers.SD3Transformer2DModel, **settings)


def pixart():
    return on_meta(
        diffusers.PixArtTransformer2DModel, num_layers=2, caption_channels=64, use_additional_conditions=False
    )


def clip():
    return on_meta(transformers.CLIPTextModel, transformers.CLIPTextConfig())


def t5():
    return on_meta(transformers.T5EncoderModel, transformers.T5Config(feed_forward_proj="gated-gelu"))


def qwen3_4b():
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    return on_meta(transformers.Qwen3Model, config)


def total(*args, **kwargs) -> int:
    return sum(tensor.bytes for tensor in stored(*args, **kwargs))


@pytest.mark.parametrize(
    ("shape", "single", "double"), [((96, 80), 4384, 5056), ((3840, 256), 553024, 508212), ((30, 70), 1246, 2179)]
)
def test_nf4_as_bitsandbytes_stores_it(shape, single, double):
    """Measured: the bytes of all tensors that quantize_4bit of bitsandbytes 0.50.2 returned for such a weight."""
    assert tensor_bytes(shape, "nf4") == single
    assert tensor_bytes(shape, "nf4 double") == double


@pytest.mark.parametrize("name", ["sd3-transformer", "pixart-sigma-transformer"])
@pytest.mark.parametrize(("type", "rule"), [("nf4", "bitsandbytes"), ("fp8", "layerwise"), ("Q4_K", "comfyui-gguf")])
def test_tables_of_positions_stay_as_they_are(name, type, rule):
    """They are tensors of three dimensions with a leading 1, and no layer's weight."""
    (table,) = (one for one in stored(weights_of(name), type, rule) if one.name == "pos_embed.pos_embed")
    assert table.type == "bfloat16" and len(table.shape) == 3


@pytest.mark.parametrize(
    ("type", "rule"), [("nf4", "bitsandbytes"), ("int8wo", "torchao"), ("fp8", "layerwise"), ("Q4_K", "comfyui-gguf")]
)
def test_chromas_table_of_modulations_stays_as_it_is(type, rule):
    """A matrix that is no layer's weight."""
    (table,) = (w for w in stored(weights_of("chroma-transformer"), type, rule) if w.name.endswith("mod_proj"))
    assert table.type == "bfloat16"


def test_int8_has_a_scale_a_row():
    assert tensor_bytes((96, 64), "int8") == 96 * 64 + 4 * 96


@pytest.mark.parametrize(
    ("type", "pieces"),
    [
        ("nf4", {"absmax": 61440, "weight": 491520, "code": 64}),
        ("nf4 double", {"weight": 491520, "code": 64, "offset": 4, "absmax": 15360, "absmax 2": 240, "code 2": 1024}),
        ("int8", {"SCB": 15360, "CB": 983040}),
        ("float16", {"weight": 1966080}),
    ],
)
def test_the_tensors_that_hold_a_matrix(type, pieces):
    """Measured: each tensor that bitsandbytes 0.50.2 made of such a weight; in the order of its kernels' source."""
    (held,) = stored([("weight", (3840, 256))], type, "all" if type == "float16" else "bitsandbytes")
    assert held.pieces == tuple(pieces.values()) and held.bytes == sum(held.pieces)


def test_plain_types_and_the_spellings_of_files():
    sizes = {"float32": 4, "F32": 4, "float16": 2, "F16": 2, "bfloat16": 2, "BF16": 2, "fp8": 1, "F8_E4M3": 1}
    for name, size in sizes.items():
        assert tensor_bytes((3, 5), name) == 15 * size
    assert tensor_bytes((), "float32") == 4


def test_what_cannot_be_stored_is_refused():
    with refused("shape", names=["Q8_0"]):
        tensor_bytes((64, 30), "Q8_0")
    with refused("shape"):
        tensor_bytes((64,), "nf4")
    with refused("type"):
        tensor_bytes((64,), "Q9")
    with refused("rule"):
        stored([], "Q8_0", "ollama")
    with refused("type"):
        stored([], "Q8_0", "bitsandbytes")
    with refused("type"):
        stored([], None, "sd.cpp")


def test_every_rule_has_types_and_every_type_a_rule():
    assert {name for rule in RULES.values() for name in rule.types} <= {*TYPES, *MIXTURES}
    assert set(GGML) < set(TYPES)
    assert set(GGML) | {"nf4", "nf4 double", "int8", "fp8", "float32"} <= {n for r in RULES.values() for n in r.types}


@pytest.mark.parametrize("build", [flux, unet, sd3, pixart, clip, t5, qwen3_4b])
def test_bitsandbytes_takes_linear_layers_alone(build):
    module = build()
    linear = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    by_type = {tensor.name: tensor.type for tensor in stored(inventory(module), "nf4", "bitsandbytes")}
    kept = {name for name in linear if ".wo." in name}
    assert {name for name, kind in by_type.items() if kind == "nf4"} == linear - kept
    assert set(by_type.values()) <= {"nf4", "bfloat16"} and bool(kept) == (build is t5)


@pytest.mark.parametrize(
    ("type", "release", "in_bfloat16", "in_float16"),
    [
        ("nf4", 42, "bfloat16", "float32"), ("nf4", 34, "float32", "float32"),
        ("int8", 42, "bfloat16", "float32"), ("int8", 34, "float32", "float32"),
        ("int8wo", 42, "int8wo", "int8wo"), ("int8wo", 34, "bfloat16", "float32"),
        ("qint8", 42, "bfloat16", "float32"), ("qint8", 34, "bfloat16", "float32"),
    ],
)  # fmt: skip
def test_t5s_second_layer_by_library_and_release(type, release, in_bfloat16, in_float16):
    """Measured: small T5s and UMT5s loaded by transformers 5.23.0 and 4.57.6. tests/test_quantising.py repeats the
    first."""
    for dtype, expected in (("bfloat16", in_bfloat16), ("float16", in_float16)):
        held = stored(inventory(t5()), type, rule_of(type, release), dtype)
        assert {one.type for one in held if ".wo." in one.name} == {expected}


@pytest.mark.parametrize("build", [flux, unet, sd3, pixart])
def test_layerwise_casting_is_diffusers(build):
    module = build().to(torch.bfloat16)
    module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    cast = {name for name, tensor in module.named_parameters() if tensor.dtype is torch.float8_e4m3fn}
    assert {t.name for t in stored(inventory(module), "fp8", "layerwise") if t.type == "fp8"} == cast != set()


def test_all_is_what_a_cast_module_has():
    module = unet().to(torch.float16)
    assert total(inventory(module), "float16", "all") == sum(2 * x.numel() for x in module.parameters())


def test_flux_in_stable_diffusion_cpp():
    """What it logged as the "flux params backend buffer size" of dev in q8_0 (leejet/stable-diffusion.cpp#356) and of
    schnell in q2_k (#376), in MiB. These versions, of August 2024, did not keep any layer yet."""
    rule = RULES["sd.cpp"]._replace(keeps="$^")
    assert f"{total(inventory(flux(guidance_embeds=True)), 'Q8_0', rule) / 2**20:.2f}" == "12068.09"
    assert f"{total(inventory(flux()), 'Q2_K', rule) / 2**20:.2f}" == "3732.51"


def test_stable_diffusion_cpp_keeps_first_and_last_layers():
    """As many as tensor_should_be_converted names, in the original layout and in diffusers'."""
    kept = {t.name for t in stored(inventory(flux()), "Q8_0", "sd.cpp") if t.type == "bfloat16"}
    assert {name.split(".")[0] for name in kept} == {
        "x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out"
    }  # fmt: skip
    original = [(f"{name}.weight", (64, 64)) for name in ("img_in", "time_in.in_layer", "final_layer.linear", "double")]
    assert [t.type for t in stored(original, "Q8_0", "sd.cpp")] == ["bfloat16"] * 3 + ["Q8_0"]


def test_qwen3_4b_in_llama_cpp():
    """Beside the bytes of unsloth/Qwen3-4B-GGUF's Q8_0 file, which also has the vocabulary, and beside the sizes that
    bartowski/Qwen_Qwen3-4B-GGUF lists in GB: llama-quantize gave its Q4_0 a few layers in Q4_1."""
    weights = inventory(qwen3_4b())
    vocabulary = 4280405792 - total(weights, "Q8_0", "llama.cpp")
    assert 5.5e6 < vocabulary < 6.5e6
    sizes = {name: (total(weights, name, "llama.cpp") + vocabulary) / 1e9 for name in ("Q8_0", "Q4_0", "Q4_1")}
    assert f"{sizes['Q8_0']:.2f}" == "4.28" and f"{sizes['Q4_1']:.2f}" == "2.60"
    assert sizes["Q4_0"] == pytest.approx(2.38, abs=0.015)


def test_comfyui_flattens_convolutions():
    """3x3 filters whose numbers fill rows of 256 are quantised in such rows; the first and the last convolution not."""
    by_name = {t.name: t for t in stored(inventory(unet()), "Q4_K", "comfyui-gguf", "float16")}
    filter_ = by_name["down_blocks.0.resnets.0.conv1.weight"]
    assert filter_ == Stored(filter_.name, (320 * 320 * 9 // 256, 256), "Q4_K", 320 * 320 * 9 // 256 * 144)
    assert by_name["conv_in.weight"].type == by_name["time_embedding.linear_1.weight"].type == "float16"
    assert by_name["conv_in.bias"].type == "float32"


def test_tensors_of_their_own_dtype_stay():
    weights = [("ids", (1, 77), "int64"), ("w", (32, 32), "run"), ("wo", (32, 32), "float32")]
    assert [t.type for t in stored(weights, "Q8_0", "llama.cpp")] == ["int64", "Q8_0", "float32"]


def test_a_files_own_list_takes_the_rules_place():
    assert stored([("x", (64, 33))], None, FILE) == [Stored(*row) for row in FILE]
    with refused("rule", names=["2176", "2112"]):
        stored([("x", (64, 34))], None, FILE)


def test_a_files_header_is_such_a_list(tmp_path):
    tensors = {"norm.weight": np.ones(64, np.float32), "proj.weight": np.ones((64, 32), np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = stored([("proj.weight", (64, 32))], None, tensor_types(tmp_path / "model.safetensors"))
    assert {(t.name, t.shape, t.type, t.bytes) for t in found} == {
        ("norm.weight", (64,), "F32", 256), ("proj.weight", (64, 32), "F16", 4096),
    }  # fmt: skip
    assert all(tensor_bytes(t.shape, t.type) == t.bytes for t in found)


def test_published_files_sizes():
    """The files of a published account as `ls -lh` prints sizes: rounded up. Z-Image Turbo in Q8_0 is as ComfyUI-GGUF
    quantises it: its file of that name is published with 7.2 GB; stable-diffusion.cpp's own, of 6577440704 bytes, would
    be 6.2 GiB. The VAE, "Q8_0", has the size of ae.safetensors, which is float32."""
    zimage, qwen = (recorded_modules.load_program(name).weights for name in ("zimage-transformer", "qwen3-4b"))
    sizes = [total(zimage, "Q8_0", "comfyui-gguf"), total(qwen, "Q8_0", "llama.cpp")]
    assert [math.ceil(10 * size / 2**30) / 10 for size in sizes] == [6.8, 4.0]
    vae = sum(weight.nbytes("float32") for weight in weights_of("zimage"))
    assert math.ceil(vae / 2**20) == 320


def test_z_image_as_stable_diffusion_cpps_author_published_it():
    """Beside the bytes of leejet/Z-Image-Turbo-GGUF's Q8_0 file, which also keeps the prompt's embedder, in float32."""
    rule = RULES["sd.cpp"]
    rule = rule._replace(keeps=rf"{rule.keeps}|cap_embedder\.")
    assert (
        0
        < 6577440704 - total(recorded_modules.load_program("zimage-transformer").weights, "Q8_0", rule, "float32")
        < 1e5
    )


def test_files_that_comfyui_gguf_made():
    """Beside the bytes of city96/FLUX.1-dev-gguf, whose one-dimensional tensors are float16, and whose headers are
    small: Q8_0, and Q4_0, which has blocks of the same numbers."""
    rule = RULES["comfyui-gguf"]._replace(vectors="float16")
    weights = recorded_modules.load_program("flux-transformer").weights
    for kind, size in (("Q8_0", 12708281504), ("Q4_0", 6791167136)):
        assert 0 < size - total(weights, kind, rule) < 1e5


# The matrices that ComfyUI-GGUF's lcpp.patch gives another type, counted by hand in the authors' files: their number,
# the numbers in each, and the type. FLUX.1: img_attn.qkv and txt_attn.qkv of 19 double blocks. Z-Image: attention.qkv
# and feed_forward.w2 of 30 layers. Wan 14B: self_attn.v, cross_attn.v and ffn.2 of 40 blocks.
_QKV, _MLP, _V, _FFN = 3 * 3072 * 3072, 3840 * 10240, 5120 * 5120, 5120 * 13824
LIFTED = {
    ("flux", "Q4_K_S"): [], ("flux", "Q3_K_L"): [(38, _QKV, "Q4_K")], ("flux", "Q4_K_M"): [(38, _QKV, "Q5_K")],
    ("flux", "Q5_K_M"): [(38, _QKV, "Q6_K")], ("zimage", "Q4_K_S"): [(30, _MLP, "Q5_K")],
    ("zimage", "Q4_K_M"): [(30, 3 * 3840 * 3840, "Q5_K"), (30, _MLP, "Q6_K")],
    ("wan-14b", "Q3_K_M"): [(2, _V, "Q5_K"), (78, _V, "Q4_K"), (40, _FFN, "Q4_K")],
    ("wan-14b", "Q4_K_S"): [(4, _V, "Q5_K"), (40, _FFN, "Q5_K")],
    ("wan-14b", "Q4_K_M"): [(80, _V, "Q6_K"), (40, _FFN, "Q6_K")], ("wan-14b", "Q5_K_S"): [],
}  # fmt: skip


@pytest.mark.parametrize(("model", "mixture"), LIFTED)
def test_mixtures_as_comfyui_gguf_makes_them(model, mixture):
    weights, usual = weights_of(f"{model}-transformer"), mixture[:4]
    more = sum(
        count * numbers * (tensor_bytes((256,), type) - tensor_bytes((256,), usual)) // 256
        for count, numbers, type in LIFTED[model, mixture]
    )
    for rule in ("comfyui-gguf", "diffusers-gguf"):
        assert total(weights, mixture, rule) - total(weights, usual, rule) == more
