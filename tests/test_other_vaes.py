"""VAEs beside those of SD1.5, SDXL and FLUX.1, from their configs: numbers, bytes, latents as pipelines hold them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engine import BACKENDS, FRAMES, OTHERS, TINY, config, error, images, latents, run_core, small_vae
from errors import refused

from vaemem import VAE, Tiling, _core
from vaemem.engine import configs, layouts

# As for the other models: fp32 roundings of some 60 layers leave 1e-6.
PARITY = 1e-5
SIZE = (24, 40)  # of images, in pixels; a latent is a quarter of a side
FLUX2 = ("flux2", "flux2-small")


def pair(name: str):
    """diffusers' module with every tensor perturbed, in float64, and ours with its tensors."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    torch.manual_seed(0)
    theirs = diffusers_vae(configs.read_config(config(name)), torch.float32, "cpu")
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.02 * torch.randn(p.shape)
        if name in FLUX2:
            theirs.bn.running_mean.normal_()
            theirs.bn.running_var.uniform_(0.5, 4)
    vae = VAE(_core.Model(configs.read_config(config(name))), config=config(name))
    for tensor, _ in vae._core.tensors:
        vae._core.set_tensor(tensor, theirs.state_dict()[tensor].contiguous().numpy())
    return theirs.double(), vae


# ---- the engine ----


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_are_those_of_diffusers(name):
    theirs, vae = pair(name)
    import torch

    for h, w, batch in ((*SIZE, 2), (8, 300, 1)):
        x, z = images(h, w, batch), latents(vae, h // 4, w // 4, batch)
        with torch.no_grad():
            encoded = theirs.encode(torch.from_numpy(x).double())
            image = theirs.decode(torch.from_numpy(z).double()).sample.numpy()
        got = vae.encode(x)
        if name in TINY:
            assert error(got.mean, encoded.latents.numpy()) <= PARITY
        else:
            assert error(got.mean, encoded.latent_dist.mean.numpy()) <= PARITY
            assert error(got.logvar, encoded.latent_dist.logvar.numpy()) <= PARITY
        assert error(vae.decode(z), image) <= PARITY


def test_the_small_decoder_at_full_size():
    """96 channels in 32 groups of three, some of which cross from one block of 16 channels into the next."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    arch = _core.models()["flux2-small"]
    torch.manual_seed(0)
    theirs = diffusers_vae(arch, torch.float32, "cpu")
    core = _core.Model(arch, "decoder")
    for tensor, _ in core.tensors:
        core.set_tensor(tensor, theirs.state_dict()[tensor].contiguous().numpy())
    vae = VAE(core)
    z = latents(vae, 3, 5)
    with torch.no_grad():
        want = theirs.double().decode(torch.from_numpy(z).double()).sample.numpy()
    assert error(vae.decode(z), want) <= PARITY


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in TINY])  # whose tiles are others
def test_numbers_of_tiles_are_those_of_diffusers(name):
    theirs, vae = pair(name)
    import torch
    from torch_vaes import tile

    tile(theirs, 16, 4)
    z = latents(vae, 6, 9)
    with torch.no_grad():
        want = theirs.decode(torch.from_numpy(z).double()).sample.numpy()
    assert error(vae.decode(z, tiling=Tiling(16)), want) <= PARITY


@pytest.mark.one_in(9)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("name", OTHERS)
def test_backends_agree_and_threads_do_not_matter(name, op):
    """Of one backend the same bits; between backends parity. check: nothing leaves its place."""
    vae = small_vae(name)
    x = images(*SIZE, 2) if op == "encode" else latents(vae, SIZE[0] // 4, SIZE[1] // 4, 2)
    first = None
    for backend in BACKENDS:
        one = run_core(vae._core, op, x, threads=1, backend=backend)[0]
        assert np.array_equal(one, run_core(vae._core, op, x, threads=3, backend=backend, check=True)[0])
        first = one if first is None else first
        assert error(one, first.astype(np.float64)) <= PARITY


@pytest.mark.one_in(3)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_least_memory_leaves_the_bits(name, op):
    vae = small_vae(name)
    x = images(160, 160) if op == "encode" else latents(vae, 40, 40)
    free = getattr(vae, op)(x)
    unlimited, smallest = vae.last_run.reserved_bytes, vae.smallest(op, 160, 160)
    vae.trim()
    limited = getattr(vae, op)(x, memory_limit=smallest)
    assert vae.last_run.peak_bytes <= smallest
    # without sums to wait for, a whole run streams already
    assert smallest <= unlimited if name in FRAMES | TINY else smallest < unlimited
    got, want = (limited, free) if op == "decode" else (limited.moments, free.moments)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("name", OTHERS)
def test_estimates_are_what_is_measured(name, op):
    vae = small_vae(name)
    for h, w, batch in ((*SIZE, 2), (64, 20, 1)):
        vae.trim()
        x = images(h, w, batch) if op == "encode" else latents(vae, h // 4, w // 4, batch)
        getattr(vae, op)(x)
        got, want = vae.last_run, vae.estimate(op, h, w, batch)
        for field in ("weights", "activations", "scratch", "output"):
            assert getattr(got, f"{field}_bytes") == getattr(want, f"{field}_bytes"), field
        assert (got.reserved_bytes, got.timeline) == (want.reserved_bytes, want.timeline)


# ---- latents as pipelines hold them ----


def test_latents_of_flux2_are_packed_and_normalised_as_in_its_pipeline():
    theirs, vae = pair("flux2-small")
    import torch
    from torch.nn.functional import pixel_shuffle, pixel_unshuffle

    x = images(*SIZE, 2)
    with torch.no_grad():
        mean = theirs.encode(torch.from_numpy(x).double()).latent_dist.mode()
        held = theirs.bn(pixel_unshuffle(mean, 2))  # in eval mode: the running statistics
        std = torch.sqrt(theirs.bn.running_var + theirs.bn.eps).view(1, -1, 1, 1)
        raw = pixel_shuffle(held * std + theirs.bn.running_mean.view(1, -1, 1, 1), 2)
        image = theirs.decode(raw).sample.numpy()
    encoded = vae.encode(x, scaled=True)
    assert encoded.mode().shape == (2, 32, 3, 5)
    assert error(encoded.mode(), held.numpy()) <= PARITY
    assert error(vae.decode(held.float().numpy(), scaled=True), image) <= PARITY
    assert np.array_equal(encoded.mean, vae.encode(x).mode())  # moments are raw whatever scaled says
    drawn = encoded.sample(3)
    assert drawn.shape == (2, 32, 3, 5) and not np.array_equal(drawn, encoded.mode())
    with refused("z"):
        vae.decode(encoded.mean, scaled=True)
    with refused("z", "(2, 32, 3, 5)"):
        vae.decode(encoded.mode())
    with refused("scaled", names=["(2, 2)"]):
        vae.encode(images(20, 40), scaled=True).mode()


def test_latents_of_playground_have_a_mean_and_a_deviation_by_channel():
    _, vae = pair("playground")
    x = images(*SIZE)
    column = {key: np.array(config("playground")[f"latents_{key}"]).reshape(1, 4, 1, 1) for key in ("mean", "std")}
    encoded = vae.encode(x, scaled=True)
    held = (encoded.mean.astype(np.float64) - column["mean"]) * 0.5 / column["std"]
    assert error(encoded.mode(), held) <= PARITY
    raw = held * column["std"] / 0.5 + column["mean"]
    want = vae.decode(raw).astype(np.float64)
    assert error(vae.decode(held, scaled=True), want) <= PARITY
    assert error(vae.decode(held, scaled=True, tiling=Tiling(64)), want) <= PARITY
    unknown = VAE.random(config=config("playground") | {"scaling_factor": None})
    with refused("scaled"):
        unknown.decode(latents(unknown, 2, 2), scaled=True)


# ---- weights and configs ----


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in FRAMES])
def test_a_directory_keeps_all(tmp_path, name):
    vae = small_vae(name)
    vae.save(tmp_path / "vae")
    again = VAE.load(tmp_path / "vae")
    assert again.arch == vae.arch
    z = latents(vae, 4, 6)
    assert np.array_equal(again.decode(z), vae.decode(z))
    written = json.loads((tmp_path / "vae" / "config.json").read_text())
    for key in ("_class_name", "latents_mean", "latents_std", "decoder_block_out_channels"):
        if key in config(name):
            assert json.dumps(written[key]) == json.dumps(config(name)[key])


def test_files_of_flux2(tmp_path):
    """In BFL's layout the quant convolutions lie within the halves; training's counter is ignored."""
    pytest.importorskip("safetensors")
    from safetensors import numpy as safetensors_numpy

    vae = small_vae("flux2-small")
    path = tmp_path / "a.safetensors"
    vae.save(path, layout="bfl")
    tensors = safetensors_numpy.load_file(path)
    assert {"encoder.quant_conv.bias", "decoder.post_quant_conv.weight", "bn.running_var"} <= set(tensors)
    safetensors_numpy.save_file(tensors | {"bn.num_batches_tracked": np.array(7)}, path)
    z = latents(vae, 2, 4)
    for parts in ("all", "decoder"):
        assert np.array_equal(VAE.load(path, config=config("flux2-small"), parts=parts).decode(z), vae.decode(z))
    with refused("layout"):
        vae.save(path, layout="ldm")
    del tensors["bn.running_mean"]
    safetensors_numpy.save_file(tensors, path)
    with refused("path", names=["bn.running_mean"]):
        VAE.load(path, config=config("flux2-small"))


@pytest.mark.parametrize("layout", ["diffusers", "bfl"])
@pytest.mark.parametrize("name", FLUX2)
def test_flux2_is_detected(name, layout):
    tensors = dict(_core.Model(_core.models()[name]).tensors)
    spelt = layouts.spell(tensors, layout, 4)
    assert layouts.detect({spelt[n]: shape for n, shape in tensors.items()})[2] == _core.models()[name]
    narrow = {n: s for n, s in tensors.items() if n != "decoder.up_blocks.2.resnets.0.conv2.weight"}
    if name == "flux2-small":
        with refused(names=["decoder.up_blocks.2.resnets.0.conv2.weight", "(192,"]):
            layouts.detect(narrow)


TILES = {name: 512 for name, arch in _core.models().items() if arch.get("family") == "tiny"}


@pytest.mark.parametrize("name", _core.models())
def test_shipped_models_are_their_configs(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    arch = _core.models()[name]
    written = configs.config_of(arch)
    assert configs.read_config(written)["name"] == {"zimage": "flux"}.get(name, name)
    assert configs.read_config(json.loads(json.dumps(written))) == configs.read_config(arch)
    assert configs.sample_size_of(written, "") == configs.SAMPLE_SIZES[name]
    state = diffusers_vae(arch, torch.float32).state_dict()
    unused = [n for n in state if n == "bn.num_batches_tracked" or ".time_conv." in n]
    assert {n: tuple(t.shape) for n, t in state.items() if n not in unused} == dict(_core.Model(arch).tensors)


@pytest.mark.parametrize("name", ["sd3", *FLUX2])
def test_what_is_measured_by_name_is_diffusers_module_with_these_weights(name, monkeypatch):
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    from vaemem.pytorch.measuring import vae_builder

    arch = _core.models()[name]
    with monkeypatch.context() as older:
        older.setattr(diffusers, configs.config_of(arch)["_class_name"], None)
        with refused(names=["a test", "AutoencoderKL"], kind=ImportError):
            vae_builder(arch, "a test")
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in vae_builder(arch, "a test")().named_parameters()}
    assert shapes.items() <= dict(_core.Model(arch).tensors).items()


def test_defaults_of_flux2_are_diffusers():
    assert configs.read_config({"_class_name": "AutoencoderKLFlux2"}) == _core.models()["flux2"]
    small = {"_class_name": "AutoencoderKLFlux2", "decoder_block_out_channels": [96, 192, 384, 384]}
    assert configs.read_config(small) == _core.models()["flux2-small"]
    same = {"_class_name": "AutoencoderKLFlux2", "decoder_block_out_channels": [128, 256, 512, 512]}
    assert configs.read_config(same) == _core.models()["flux2"]
    assert configs.sample_size_of({"_class_name": "AutoencoderKLFlux2"}, "") == 1024


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("flux2", {"scaling_factor": 0.5}, (0.5, "scaling_factor")),
        ("sd3", {"patch_size": [2, 2]}, ("[2, 2]", "patch_size")),
        ("sd3", {"decoder_block_out_channels": [8]}, ("[8]", "decoder_block_out_channels")),
        ("flux2", {"patch_size": None}, ("None", "patch_size")),
        ("flux2", {"patch_size": [2]}, ("(2,)", "patch_size")),
        ("flux2", {"decoder_block_out_channels": [32, 32]}, ("(32, 32)", "decoder_block_out_channels")),
        ("flux2", {"decoder_block_out_channels": [32, 32, 0]}, (0, "decoder_block_out_channels[2]")),
        ("flux2", {"batch_norm_eps": "x"}, ("'x'", "batch_norm_eps")),
        ("playground", {"latents_std": None}, ("None", "latents_std")),
        ("playground", {"latents_mean": [0.0] * 3}, ("(0.0, 0.0, 0.0)", "latents_mean")),
        ("playground", {"latents_std": [1, 1, 0, 1]}, ("(1.0, 1.0, 0.0, 1.0)", "latents_std")),
        ("playground", {"latents_std": [1, 1, "1", 1]}, ("'1'", "latents_std[2]")),
        ("playground", {"latents_mean": 0.5}, (0.5, "latents_mean")),
    ],
)
def test_configs_refused_by_key(name, change, message):
    with refused("config", *message):
        configs.read_config(config(name) | change)


@pytest.mark.parametrize(
    "name",
    [
        "AsymmetricAutoencoderKL", "AutoencoderDC", "AutoencoderKLCogVideoX", "AutoencoderKLHunyuanVideo",
        "AutoencoderKLMochi", "ConsistencyDecoderVAE", "VQModel", ["AutoencoderKL"],
    ],
)  # fmt: skip
def test_other_classes_are_refused_by_name(name):
    from vaemem import predict

    other = {"_class_name": name, "encoder_block_out_channels": [64]}
    wanted = "AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan, AutoencoderKLQwenImage21, "
    wanted += "AutoencoderKLHunyuanImage, AutoencoderTiny or AutoencoderKLLTX2Video"
    said = f"config: _class_name: expected {wanted}, got {name!r}"
    if name == "AutoencoderDC":
        said += "; Sana's has linear attention over many channels, which is another kind of network"
    for call in (lambda: VAE.random(config=other), lambda: predict(other, "decode", 512, 512)):
        with pytest.raises(ValueError) as refused:
            call()
        assert str(refused.value) == said


def test_groups_that_do_not_divide_the_small_decoder():
    with refused("config", place="decoder_block_out_channels[0]", names=["norm_num_groups"]):
        VAE.random(config=config("flux2") | {"decoder_block_out_channels": (20, 48, 96)})


# ---- predictions ----


@pytest.mark.parametrize("name", [name for name, arch in _core.models().items() if "family" not in arch])
def test_predictions_by_name_and_by_config(name):
    from vaemem import predict

    by_name = predict(name, "decode", 512, 768)
    assert (by_name.model, by_name.runtime) == (name, "diffusers")
    config = configs.config_of(_core.models()[name])
    by_config = predict(config, "decode", 512, 768, dtype=by_name.dtype)
    by_name = predict(name, "decode", 512, 768, by_name.dtype)
    assert (by_name.allocated, by_name.reserved) == (by_config.allocated, by_config.reserved)
    assert predict(name, "encode_tiled", 2048, 2048).tile == {"sd15": 512}.get(name, 1024)
    assert predict(config, "encode_tiled", 2048, 2048).tile == {"sd15": 512}.get(name, 1024)


def test_the_small_decoder_takes_less():
    from vaemem import formula, predict

    for op, share in (("encode", 1), ("decode", 0.75)):  # 96 channels for 128
        large, small = (predict(name, op, 1024, 1024, "bfloat16").allocated for name in ("flux2", "flux2-small"))
        assert small == pytest.approx(share * large, rel=0.01)
    assert formula("flux2-small", "decode", "bfloat16").closed.predict(1024, 1024) == small


@pytest.mark.parametrize("runtime", ["bfl", "a1111", "forge"])
def test_other_runtimes_of_flux2_are_refused(runtime):
    from vaemem import predict

    with refused("runtime", runtime):
        predict("flux2", "decode", 512, 512, runtime=runtime)


@pytest.mark.parametrize("name", FLUX2)
def test_comfyui_takes_and_gives_packed_latents_of_flux2(name):
    """(N, 128, H/16, W/16): images are of whole 16 pixels, and tiles too."""
    from vaemem import SimulatedProcess, predict, predict_largest

    process = SimulatedProcess("RTX 4090")
    vae = process.load(name, "bfloat16", runtime="comfyui")
    assert (vae.factor, vae.latent_channels) == (16, 128)
    latents = process.encode(vae, process.tensor((1, 3, 256, 512), "bfloat16", host=True))
    assert latents.shape == (1, 128, 16, 32)
    z = process.tensor((1, 128, 16, 32), "bfloat16", host=True)
    assert process.decode(vae, z).shape == (1, 3, 256, 512)
    with refused("decode"):
        process.decode(vae, process.tensor((1, 32, 32, 64), "bfloat16", host=True))
    whole, tiled = (predict(name, op, 1536, 1536, runtime="comfyui") for op in ("decode", "decode_tiled"))
    assert tiled.tile == 512 and tiled.allocated < whole.allocated / 6
    with refused("height", 1000):
        predict(name, "decode", 1000, 1008, runtime="comfyui")
    assert all(side % 16 == 0 for side in predict_largest(name, "decode", runtime="comfyui", gpu="RTX 3060"))
