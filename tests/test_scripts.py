"""Every kind of script that a plan writes runs through diffusers' own loader, on small pipelines in the real layout.

Its weights are where the way says, in the types that it says.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize

import pytest

from vaemem import plan_pipeline
from vaemem._script import write_script
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.lora import Lora
from vaemem.pipelines.offload_kinds import GroupOffload
from vaemem.pipelines.quantising import BITSANDBYTES
from vaemem.pipelines.recipe import diffusers_steps, placing_steps, roles_on_cpu
from vaemem.prediction.default_dtypes import FIXED

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import fake_card
import torch_pipelines

from vaemem.pytorch import autoencoder
from vaemem.pytorch.applying import _group_config, _is_cast
from vaemem.pytorch.converting import modules_of

GROUPS = {"offload_type": "leaf_level"}
CONTROLNET = PIPELINES["sd15-controlnet"].aside["controlnet"].split()[-1]


def save(folder, name: str) -> None:
    """Save a small pipeline where the scripts of a pipeline look for its repository."""
    pipeline, dtype = PIPELINES[name], getattr(torch, PIPELINES[name].dtype)
    make = {"sd15-controlnet": "sd", "sd35-medium": "sd3"}.get(name, name.partition("-")[0].removesuffix("15"))
    pipe = {**torch_pipelines.PIPELINES, **torch_pipelines.LATER}[make](folder)
    for part in modules_of(pipe).values():
        torch.nn.Module.to(part, dtype)
    pipe.save_pretrained(folder / pipeline.repository)
    if pipeline.optional:  # the repository has a safety checker, which the plan leaves out
        index = folder / pipeline.repository / "model_index.json"
        listed = json.loads(index.read_text()) | {
            "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]
        }
        index.write_text(json.dumps(listed))
    if name == "sd15-controlnet":
        diffusers.ControlNetModel.from_unet(pipe.unet).save_pretrained(folder / CONTROLNET)
    if pipeline.upcasts:
        pipe.vae.save_pretrained(folder / FIXED)
    if name == "flux":
        save_gguf(pipe.transformer, folder / "transformer in Q8_0.gguf")


def save_gguf(module, path) -> None:
    """Write a module's weights as a GGUF file: matrices in Q8_0, the rest in float32."""
    gguf = pytest.importorskip("gguf")
    write_tensors(gguf.GGUFWriter(path, "flux"), module.state_dict())


def save_gguf_t5(path):
    """Write a small T5 encoder as a GGUF file, as llama.cpp names its tensors: matrices in Q8_0. Return the encoder."""
    gguf = pytest.importorskip("gguf")
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
    )
    encoder = transformers.T5EncoderModel(config)
    writer = gguf.GGUFWriter(path, "t5encoder")
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, config.num_layers)
    weights = {name: one for name, one in encoder.state_dict().items() if "embed" not in name}
    write_tensors(writer, {names.get_name(name, [".weight"]): one for name, one in weights.items()})
    return encoder


def write_tensors(writer, weights) -> None:
    """Write a GGUF file: matrices in Q8_0, the rest in float32."""
    import gguf

    for name, weight in weights.items():
        array = weight.float().numpy()
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(script: str):
    """Run a script on a machine with a card, as it seems. Return its pipeline, and the bytes that went to the card."""
    names: dict = {}
    with fake_card.Moves() as moves:
        exec(script, names)
    return names["pipe"], moves.bytes


def kind_of(weight) -> str:
    """Name the type in which a weight is stored, as `components` does."""
    if hasattr(weight, "quant_type"):
        return "Q8_0"
    return getattr(weight, "kind", "") if getattr(weight, "is_quantised", False) else str(weight.dtype)[6:]


def check(one, pipe, moved: int, name: str) -> None:
    """Compare a pipeline with the way whose script made it."""
    settings, kinds = one.way.settings, one.way.settings.get("components", {})
    offload, on_cpu = settings["offload"], roles_on_cpu(settings["offload"])
    group = GroupOffload.read(offload)
    parts = modules_of(pipe)
    assert set(parts) == {role for role in PIPELINES[name].parts if kinds.get(role) != "none"}
    if settings["vae"] == "vaemem":
        assert isinstance(parts.pop("vae"), autoencoder._DropIn)
    stay = parts.keys() - set(on_cpu) if offload == "none" or on_cpu else set(group.exclude_modules if group else ())
    for role, part in parts.items():
        weights = dict(part.named_parameters())
        places = {weight.device.type for weight in weights.values()}
        if offload == "sequential":
            assert hasattr(part, "_hf_hook") and places == {"meta"}, role
        else:
            assert places == {"meta" if role in stay else "cpu"}, role
        if offload == "none" or on_cpu:  # no hook sends inputs elsewhere
            assert not any(hasattr(module, "_hf_hook") for module in part.modules()), role
        kind, usual = kinds.get(role, ""), PIPELINES[name].vae_dtype if role == "vae" else ""
        dtype = kind if kind in ("float16", "bfloat16", "float32") else usual or settings["dtype"]
        # transformers keeps T5's `wo` in float32 if the rest is in float16.
        found = {kind_of(weight) for name, weight in weights.items() if not name.endswith(".wo.weight")}
        wanted = {"fp8": {"float8_e4m3fn", dtype}, "": {dtype}, dtype: {dtype}}.get(kind, {kind, dtype})
        assert found == wanted, role
        assert _is_cast(part) == (kind == "fp8") and (_group_config(part) is not None) == bool(
            group and role not in stay
        )
        if kind in BITSANDBYTES:  # every linear layer that transformers does not keep
            linear = {n: m for n, m in part.named_modules() if isinstance(m, torch.nn.Linear)}
            assert {kind_of(m.weight) for n, m in linear.items() if not n.endswith((".wo", "lm_head"))} == {kind}
    held = sum(weight.nbytes for role in stay for weight in parts[role].parameters())
    with_buffers = parts if offload == "sequential" else stay
    buffers = sum(buffer.nbytes for role in with_buffers for buffer in parts[role].buffers())
    assert held <= moved <= held + buffers, "nothing else was on the card, not even for a while"
    how = settings["vae"].partition(" ")
    if how[0] != "vaemem":
        assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == (how[0] == "tiled", how[0] == "sliced")
    if how[2] and hasattr(pipe.vae, "tile_sample_min_size"):
        assert pipe.vae.tile_sample_min_size == int(how[2]) == 8 * pipe.vae.tile_latent_min_size


PLANS = {
    "flux": {"types": [None, "Q8_0", "nf4", "fp8"], "gpu": "RTX 4060"},
    "sd15": {}, "sd15, two": {"batch": 2}, "sd15, after a smaller one": {"image": (256, 256)},
    "sd15, an encoder in float32": {"components": {"text_encoder": "float32"}, "types": [None]},
    "sd15-controlnet": {"types": [None, "fp8"]}, "sdxl": {"types": [None, "nf4", "int8"]},
    "sd35-medium": {"components": {"text_encoder_3": "none"}, "types": [None, "nf4"]},
    "chroma": {"types": [None, "nf4 double"]}, "pixart-sigma": {"types": [None, "int8"]},
    "qwen-image": {"types": [None, "nf4"]},
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", PLANS)
def test_scripts_do_what_their_ways_promise(case, tmp_path, monkeypatch):
    name, asked = case.partition(",")[0], {"gpu": "RTX 3060"} | PLANS[case]
    save(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    fake_card.put_in(monkeypatch)
    monkeypatch.setattr(autoencoder._DropIn, "_apply", lambda vae, *_, **__: vae)  # vaemem's copy needs a real card
    seen: set = set()
    for one in plan_pipeline(name, 512, 512, **asked).outcomes:
        place, vae, kind = one.way.settings["offload"], one.way.settings["vae"], one.way.settings.get("components")
        pairs = {repr((place, kind)), repr((vae, kind))}
        if pairs <= seen:
            continue
        seen |= pairs
        pipe, moved = run(one.way.code)
        try:
            check(one, pipe, moved, name)
        except AssertionError as error:
            raise AssertionError(f"{one.way.name}\n{one.way.code}") from error


HOSTILE = ["a\"); raise SystemExit(3)  # .safetensors", "b\nraise SystemExit(3)\n.safetensors", "c'\\.safetensors",
           "C:\\new\\users\\x.safetensors", "\u202e\U0001f600\udcff.safetensors"]  # fmt: skip


@pytest.mark.parametrize("file", HOSTILE)
def test_a_text_from_outside_is_a_literal(file):
    """Whatever it holds: the script has one literal with just this text, and no comment has any of it."""
    packed = f"{file}.gguf"
    cases = [("sd15", {"unet": file, "text_encoder": file}, 4, 0), ("flux", {"transformer": packed}, 2, 1)]
    for name, components, count, gguf in [*cases, ("flux", {"text_encoder_2": packed}, 2, 1)]:
        steps = diffusers_steps(PIPELINES[name], "float16", components=components, loras=[Lora(file)])
        script = write_script([*steps, *placing_steps(GROUPS | {"offload_to_disk_path": file}, ["unet"])])
        nodes = [*ast.walk(ast.parse(script.encode("utf-8")))]
        texts = [one.value for one in nodes if isinstance(one, ast.Constant)]
        assert (texts.count(file), texts.count(packed)) == (count, gguf)
        assert not any(isinstance(one, ast.Raise) for one in nodes)
        tokens = tokenize.generate_tokens(io.StringIO(script).readline)
        assert not any(one.type == tokenize.COMMENT for one in tokens)


def test_files_are_loaded(tmp_path, monkeypatch):
    """A denoiser's file by its class, a text encoder's into the loaded module."""
    from safetensors.torch import load_file, save_file

    save(tmp_path, "sd15")
    monkeypatch.chdir(tmp_path)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(
        PIPELINES["sd15"].repository, dtype=torch.float16, safety_checker=None
    )
    for role in ("unet", "text_encoder"):
        part = getattr(pipe, role)
        for weight in part.parameters():
            torch.nn.init.normal_(weight)
        save_file({name: one.contiguous() for name, one in part.state_dict().items()}, f"{role} '1'.safetensors")
    files = {role: f"{role} '1'.safetensors" for role in ("unet", "text_encoder")}
    steps = diffusers_steps(PIPELINES["sd15"], "float16", components=files)
    loaded, _ = run(write_script(steps).replace('.to("cuda")', '.to("cpu")'))
    for role, file in files.items():
        weights = getattr(loaded, role).state_dict()
        for name, weight in load_file(file).items():
            assert torch.equal(weights[name], weight), name


def run_sd15(tmp_path, monkeypatch, unet: str, offload="none", vae: str = "whole"):
    """Run the script of SD 1.5 with a type of its UNet. Return the script, the pipeline, and the bytes that went to the
    card for the UNet."""
    save(tmp_path, "sd15")
    monkeypatch.chdir(tmp_path)
    fake_card.put_in(monkeypatch)
    script = write_script(
        diffusers_steps(PIPELINES["sd15"], "float16", components={"unet": unet}, offload=offload, vae=vae)
    )
    pipe, moved = run(script)
    others = [pipe.text_encoder, pipe.vae] if offload == "none" else []
    tensors = [one for part in others for one in (*part.parameters(), *part.buffers())]
    return script, pipe, moved - sum(one.nbytes for one in tensors)


@pytest.mark.parametrize("offload", ["none", "model", "leaf_level"])
@pytest.mark.parametrize("form", ["fp8", "fp8 from float16", "fp8 on cuda", "fp8 from float16 on cuda"])
def test_a_component_is_cast_where_its_type_says(form, offload, tmp_path, monkeypatch):
    """On the card it comes there whole: two bytes a number, not one."""
    _, pipe, moved = run_sd15(tmp_path, monkeypatch, form, offload)
    weights = [*pipe.unet.parameters()]
    assert _is_cast(pipe.unet) and {one.device.type for one in weights} == {"meta" if offload == "none" else "cpu"}
    whole, cast = (sum(size * one.numel() for one in weights) for size in (2, 1))
    cast += sum(one.numel() for one in weights if one.dtype == torch.float16)
    comes = offload == "none" or "on cuda" in form
    assert moved == (whole if "from float16 on cuda" in form else cast if comes else 0)


DIRECT = {
    "int8wo from float16 on cuda": [("quantize_", "Int8WeightOnlyConfig", "cuda")],
    "float8wo directly": [("quantize_", "Float8WeightOnlyConfig", "cpu")],
    "qint8 directly": [("quantize", "qint8", "cpu"), ("freeze", "", "cpu")],
    "qfloat8 from float16 on cuda": [("quantize", "qfloat8", "cuda"), ("freeze", "", "cuda")],
}


@pytest.mark.parametrize("offload", ["none", "model"])
@pytest.mark.parametrize("form", DIRECT)
def test_a_library_quantises_where_its_type_says(form, offload, tmp_path, monkeypatch):
    calls = fake_card.put_quantisers_in(monkeypatch)
    run_sd15(tmp_path, monkeypatch, form, offload)
    assert calls == DIRECT[form]


def test_a_kept_component_stays_if_diffusers_can_keep_it(tmp_path, monkeypatch):
    said = "# the plan keeps unet on the card, but diffusers offloads the whole pipeline"
    script, pipe, _ = run_sd15(tmp_path, monkeypatch, "float16 kept on cuda", "leaf_level")
    assert said not in script and {one.device.type for one in pipe.unet.parameters()} == {"meta"}
    script, pipe, _ = run_sd15(tmp_path, monkeypatch, "float16 kept on cuda", "model")
    assert said in script and {one.device.type for one in pipe.unet.parameters()} == {"cpu"}


def test_streams_tiles_and_slices(tmp_path, monkeypatch):
    group = GROUPS | {"use_stream": True, "record_stream": True}
    _, pipe, _ = run_sd15(tmp_path, monkeypatch, "float16", group, "tiled and sliced")
    assert _group_config(pipe.unet).record_stream and pipe.vae.use_tiling and pipe.vae.use_slicing


def test_bitsandbytes_on_both_sides_is_said():
    """device_map is the whole pipeline's, so a script cannot have one component of each."""
    both = {"transformer": "nf4", "text_encoder_2": "nf4 from bfloat16"}
    script = write_script(diffusers_steps(PIPELINES["flux"], "bfloat16", components=both))
    assert "# text_encoder_2: quantised on the CPU too, and not on the card as the plan says" in script
    alone = {"text_encoder_2": "nf4 from bfloat16", "transformer": "bfloat16"}
    assert "device_map" not in write_script(diffusers_steps(PIPELINES["flux"], "bfloat16", components=alone))


def test_gguf_files_by_their_names(tmp_path, monkeypatch):
    """A mixture is a file of that name; a text encoder's file is unpacked by transformers."""
    save(tmp_path, "flux")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "transformer in Q8_0.gguf").rename(tmp_path / "transformer in Q4_K_M.gguf")
    encoder = save_gguf_t5(tmp_path / "text_encoder_2 in IQ4_XS.gguf")
    given = {"transformer": "q4_k_m", "text_encoder_2": "iq4_xs"}
    steps = diffusers_steps(PIPELINES["flux"], "bfloat16", components=given)
    pipe, _ = run(write_script(steps).replace('.to("cuda")', '.to("cpu")'))
    assert "Q8_0" in {kind_of(one) for one in pipe.transformer.parameters()}
    found = dict(pipe.text_encoder_2.named_parameters())
    assert {one.dtype for one in found.values()} == {torch.bfloat16}
    for name, one in encoder.named_parameters():
        assert (found[name].float() - one).abs().max() <= one.abs().max() / 64, name
