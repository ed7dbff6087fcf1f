"""Weights files: names against diffusers' own, round trips of every layout, halves, detection, random weights."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from errors import refused
from safetensors import numpy as safetensors_numpy
from weights_files import CONFIGS, FLUX_LIKE, SMALL, autoencoder, make, respell, same, tensors_of, write

from vaemem import _core
from vaemem.engine import configs, layouts, weights

pytestmark = [pytest.mark.core, pytest.mark.python]

# ---- names, against the real thing ----


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cores_names_and_shapes_are_diffusers(name):
    want = {n: tuple(t.shape) for n, t in autoencoder(CONFIGS[name]).state_dict().items()}
    assert dict(_core.Model(configs.read_config(CONFIGS[name]), "all").tensors) == want


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_full_models_are_diffusers(name):
    torch = pytest.importorskip("torch")
    arch = _core.models()[name]
    keys = [k for k in arch if k not in ("name", "norm_eps", "scaling_factor", "shift_factor")]
    with torch.device("meta"):
        state = autoencoder({k: arch[k] for k in keys}).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == dict(_core.Model(arch, "all").tensors)
    assert sum(t.numel() for t in state.values()) == {"flux": 83_819_683}.get(name, 83_653_863)


@pytest.mark.parametrize("name", ["small", "deep", "flux_like", "no_attention"])
def test_ldm_names_are_those_that_diffusers_converts(tmp_path, name):
    utils = pytest.importorskip("diffusers.loaders.single_file_utils")
    torch = pytest.importorskip("torch")
    model = make(CONFIGS[name])
    layout = "ldm" if model.arch["use_quant_conv"] else "bfl"
    weights.save(model, tmp_path / "a.safetensors", layout)
    saved = safetensors_numpy.load_file(tmp_path / "a.safetensors")
    levels = len(model.arch["block_out_channels"])
    config = {"down_block_types": [None] * levels, "up_block_types": [None] * levels}
    converted = utils.convert_ldm_vae_checkpoint({n: torch.from_numpy(t) for n, t in saved.items()}, config)
    same(model, {n: t.contiguous().numpy() for n, t in converted.items()})


def test_old_names_are_those_that_diffusers_converts(tmp_path):
    """diffusers renames them while it loads: what it makes of our old file must be what we make of it."""
    torch = pytest.importorskip("torch")
    model = make()
    old = respell(tensors_of(model), "diffusers-old")
    assert "decoder.mid_block.attentions.0.proj_attn.weight" in old
    weights.save(model, tmp_path / "vae")
    write(tmp_path / "vae" / weights.WEIGHTS, old)
    state = type(autoencoder(SMALL)).from_pretrained(tmp_path / "vae").state_dict()
    assert all(t.dtype == torch.float32 for t in state.values())
    same(model, {n: t.numpy() for n, t in state.items()})
    same(weights.load(tmp_path / "vae"), {n: t.numpy() for n, t in state.items()})


def test_saved_directory_loads_into_diffusers(tmp_path):
    pytest.importorskip("torch")
    model = make(FLUX_LIKE)
    weights.save(model, tmp_path / "vae")
    theirs, info = type(autoencoder(FLUX_LIKE)).from_pretrained(tmp_path / "vae", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (theirs.config.scaling_factor, theirs.config.shift_factor) == (0.5, 0.25)
    same(model, {n: t.numpy() for n, t in theirs.state_dict().items()})


def test_directory_that_diffusers_saved(tmp_path):
    pytest.importorskip("torch")
    theirs = autoencoder(FLUX_LIKE)
    theirs.save_pretrained(tmp_path / "vae")
    ours = weights.load(tmp_path / "vae")
    same(ours, {n: t.numpy() for n, t in theirs.state_dict().items()})
    assert (ours.arch["scaling_factor"], ours.arch["shift_factor"]) == (0.5, 0.25)


# ---- round trips ----


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
@pytest.mark.parametrize("layout", ["diffusers", "diffusers-old", "ldm", "bfl"])
@pytest.mark.parametrize("square", [True, False], ids=["2d", "4d"])
def test_every_layout_comes_back(tmp_path, layout, prefix, square):
    """Attention matrices as (C, C) and as (C, C, 1, 1), whatever the layout; strangers outside the prefix."""
    model = make(FLUX_LIKE if layout == "bfl" else SMALL)
    tensors = tensors_of(model)
    stored = {n: t.reshape(*t.shape, 1, 1) if t.ndim == 2 and not square else t for n, t in tensors.items()}
    path = write(tmp_path / "a.safetensors", respell(stored, layout, len(model.arch["block_out_channels"])), prefix)
    if prefix:
        held = safetensors_numpy.load_file(path)
        held["model.diffusion_model.middle_block.0.weight"] = np.zeros((2, 2), np.int64)
        write(path, held)
    shapes = {n: t.shape for n, t in safetensors_numpy.load_file(path).items()}
    assert layouts.detect(shapes)[:2] == (layout.removesuffix("-old"), prefix)
    same(weights.load(path), tensors)


@pytest.mark.parametrize(("config", "layout"), [(SMALL, "diffusers"), (SMALL, "ldm"), (FLUX_LIKE, "bfl")])
def test_save_comes_back(tmp_path, config, layout):
    model = make(config)
    weights.save(model, tmp_path / "a.safetensors", layout)
    loaded = weights.load(tmp_path / "a.safetensors")
    same(loaded, tensors_of(model))
    assert loaded.arch["name"] == "custom" and loaded.arch["scaling_factor"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    attention = safetensors_numpy.load_file(tmp_path / "a.safetensors")
    ndims = {t.ndim for n, t in attention.items() if n.endswith((".to_q.weight", ".attn_1.q.weight"))}
    assert ndims == {2 if layout == "diffusers" else 4}


@pytest.mark.parametrize("name", CONFIGS)
def test_save_directory_comes_back(tmp_path, name):
    model = make(CONFIGS[name])
    weights.save(model, tmp_path / "new" / "vae")
    loaded = weights.load(tmp_path / "new" / "vae")
    same(loaded, tensors_of(model))
    assert loaded.arch == model.arch
    assert sorted(p.name for p in (tmp_path / "new" / "vae").iterdir()) == [weights.CONFIG, weights.WEIGHTS]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_exact(tmp_path, dtype):
    halves = {n: t.astype(dtype) for n, t in tensors_of(make()).items()}
    halves["decoder.conv_out.bias"] = np.array([np.inf, -0.0, 1e-7], dtype)  # a subnormal in float16
    path = write(tmp_path / "a.safetensors", halves)
    same(weights.load(path), {n: t.astype(np.float32) for n, t in halves.items()})


def test_mixed_types_out_of_alignment(tmp_path):
    """An odd number of 2-byte elements before float32: the file's pages are not aligned for it."""
    tensors = tensors_of(make())
    text, body = {}, b""
    for i, (name, t) in enumerate([("decoder.conv_out.bias", tensors["decoder.conv_out.bias"]), *tensors.items()]):
        if i and name == "decoder.conv_out.bias":
            continue
        data = t.astype(np.float16 if i == 0 else np.float32)
        text[name] = {"dtype": "F32" if i else "F16", "shape": t.shape, "data_offsets": [len(body)]}
        body += data.tobytes()
        text[name]["data_offsets"].append(len(body))
    header = json.dumps(text).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    first = tensors["decoder.conv_out.bias"].astype(np.float16).astype(np.float32)
    same(weights.load(path), {**tensors, "decoder.conv_out.bias": first})


def test_fp16_variant_of_a_directory(tmp_path):
    model = make()
    weights.save(model, tmp_path)
    halves = {n: t.astype(np.float16) for n, t in tensors_of(model).items()}
    write(tmp_path / weights.WEIGHTS_FP16, halves)
    same(weights.load(tmp_path), tensors_of(model))  # the whole one wins
    (tmp_path / weights.WEIGHTS).unlink()
    same(weights.load(tmp_path), {n: t.astype(np.float32) for n, t in halves.items()})


# ---- halves ----


@pytest.mark.parametrize("config", [SMALL, FLUX_LIKE], ids=["quant", "no_quant"])
@pytest.mark.parametrize("parts", ["encoder", "decoder"])
def test_half(tmp_path, parts, config):
    whole, half = make(config), make(config, parts)
    same(half, {n: t for n, t in tensors_of(whole).items() if n in dict(half.tensors)})
    weights.save(whole, tmp_path / "whole.safetensors")
    weights.save(half, tmp_path / "half.safetensors")
    for path in (tmp_path / "whole.safetensors", tmp_path / "half.safetensors"):
        loaded = weights.load(path, parts=parts)
        same(loaded, tensors_of(half))
        assert loaded.parts == parts
        assert loaded.arch["use_quant_conv"] == whole.arch["use_quant_conv"]
    with refused("path", path=path):
        weights.load(tmp_path / "half.safetensors")
    with refused("path"):
        weights.save(half, tmp_path / "vae")
    assert not (tmp_path / "vae").exists()


def test_the_other_half_is_not_looked_at(tmp_path):
    tensors = tensors_of(make())
    tensors = {n: t.astype(np.int32) if n.startswith(("encoder.", "quant_conv.")) else t for n, t in tensors.items()}
    del tensors["encoder.conv_in.weight"]
    tensors["encoder.stranger"] = np.zeros(1, np.int8)
    path = write(tmp_path / "a.safetensors", tensors)
    assert weights.load(path, parts="decoder").missing() == []
    with refused("parts", "'both'"):
        weights.load(path, parts="both")


# ---- architecture ----


@pytest.mark.parametrize("layout", ["diffusers", "diffusers-old", "ldm"])
@pytest.mark.parametrize("parts", ["all", "encoder", "decoder"])
def test_detected_architecture(layout, parts):
    for name, want in (("sd15", "sd"), ("sdxl", "sd"), ("flux", "flux")):
        arch = _core.models()[name]
        tensors = dict(_core.Model(arch, parts).tensors)
        found = layouts.detect(respell(tensors, layout, 4))[2]
        scaling = None if want == "sd" else arch["scaling_factor"]
        assert found == {**arch, "name": want, "scaling_factor": scaling}
    for config in CONFIGS.values():
        arch = {**configs.read_config(config), "scaling_factor": None, "shift_factor": 0.0}
        if arch["norm_num_groups"] != 32:
            continue
        levels = len(arch["block_out_channels"])
        found = layouts.detect(respell(dict(_core.Model(arch, "all").tensors), layout, levels), parts)[2]
        assert found == arch


def test_groups_cannot_be_detected(tmp_path):
    config = CONFIGS["deep"]
    weights.save(make(config), tmp_path / "a.safetensors")
    with refused("path", names=["a.safetensors", "norm_num_groups"]):
        weights.load(tmp_path / "a.safetensors")
    same(weights.load(tmp_path / "a.safetensors", config=config), tensors_of(make(config)))


def test_model_and_config_win_and_must_fit(tmp_path):
    path = tmp_path / "a.safetensors"
    weights.save(make(), path)
    arch = weights.load(path, config={**SMALL, "scaling_factor": 2.0}).arch
    assert (arch["name"], arch["scaling_factor"]) == ("custom", 2.0)
    with refused("path", names=["encoder.conv_in.weight", "(128, 3, 3, 3)", "(32, 3, 3, 3)"]):
        weights.load(path, model="sdxl")
    with refused("path", names=["resnets.1"]):
        weights.load(path, config={**SMALL, "layers_per_block": 2})
    with refused("path", names=["quant_conv.bias"]):
        weights.load(path, config={**SMALL, "use_post_quant_conv": False})
    with refused("model", "'sd4'"):
        weights.load(path, model="sd4")
    with refused("model"):
        weights.load(path, model="sdxl", config=SMALL)


# ---- random weights ----


def test_random_tensors_are_pytorchs_default_init():
    nn = pytest.importorskip("torch.nn")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    mine = tensors_of(make({"block_out_channels": (64,)}))
    for name, layer in (
        ("encoder.down_blocks.0.resnets.0.conv1", nn.Conv2d(64, 64, 3)),
        ("decoder.mid_block.attentions.0.to_q", nn.Linear(64, 64)),
        ("decoder.conv_in", nn.Conv2d(4, 64, 3)),
    ):
        bound = 1 / np.sqrt(np.prod(layer.weight.shape[1:]))
        for kind in ("weight", "bias"):
            a, b = mine[f"{name}.{kind}"].ravel(), getattr(layer, kind).detach().numpy().ravel()
            assert max(np.abs(a).max(), np.abs(b).max()) <= bound * (1 + 1e-6)  # the bound is rounded to float32
            # standard error of a uniform's mean is bound / sqrt(3 n), of its standard deviation about half of that
            tolerance = 5 * bound / np.sqrt(3 * a.size)
            assert abs(a.mean()) < tolerance and abs(a.std() - bound / np.sqrt(3)) < tolerance
            assert abs(b.std() - bound / np.sqrt(3)) < tolerance
    gamma = np.concatenate([t for n, t in mine.items() if "norm" in n and n.endswith("weight")])
    beta = np.concatenate([t for n, t in mine.items() if "norm" in n and n.endswith("bias")])
    for values, mean in ((gamma, 1), (beta, 0)):
        assert abs(values.mean() - mean) < 5 * 0.1 / np.sqrt(values.size)
        assert abs(values.std() - 0.1) < 5 * 0.1 / np.sqrt(2 * values.size)


def test_random_tensors_by_seed():
    zero, again, one = (tensors_of(make(seed=s)) for s in (0, 0, 1))
    assert all(np.array_equal(zero[n], again[n]) and not np.array_equal(zero[n], one[n]) for n in zero)
    assert len({t.tobytes() for t in zero.values()}) == len(zero)
    with refused("seed", -1):
        make(seed=-1)
    with refused("seed", "float", kind=TypeError):
        make(seed=0.5)
