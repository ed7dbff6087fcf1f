"""VAEs of videos, run for one frame: what is kept of their weights, files as people have them, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from engine import FRAMES, config, error, images, latents, small_vae
from errors import refused

from vaemem import VAE, Tiling, _core
from vaemem.engine import configs, layouts
from vaemem.engine.weights import random_tensors

pytestmark = pytest.mark.core

PARITY = 1e-5  # as test_other_vaes has it


def tensors_of(core: _core.Model) -> dict[str, np.ndarray]:
    return {name: core.get_tensor(name) for name, _ in core.tensors}


def random(name: str, seed: int = 0) -> tuple[VAE, dict[str, np.ndarray]]:
    """A model, and the tensors of a file that has all its slices: those that one frame does not meet are NaN."""
    vae = small_vae(name, seed, videos=False)
    whole = tensors_of(vae._core)
    for tensor in whole.values():
        if tensor.ndim == 5:
            tensor[:, :, :-1] = np.nan
    width = vae.arch["block_out_channels"][-1]
    where = "decoder.up_blocks.0.upsamplers.0.time_conv"
    time = {f"{where}.weight": np.full((2 * width, width, 3, 1, 1), np.nan, np.float32)}
    return vae, whole | time | {f"{where}.bias": np.full(2 * width, np.nan, np.float32)}


@pytest.mark.parametrize("name", FRAMES)
def test_one_frame_meets_the_last_slice_alone(name):
    vae, whole = random(name)
    again = VAE.load(whole, config=config(name), videos=False)
    z, x = latents(vae, 4, 6), images(16, 24)
    assert np.array_equal(again.decode(z), vae.decode(z))
    assert np.array_equal(again.encode(x).moments, vae.encode(x).moments)
    kept = again._core.get_tensor("decoder.conv_in.weight")
    if kept.ndim == 4:  # of images: no slices
        return
    assert not kept[:, :, :-1].any() and np.array_equal(kept[:, :, -1], whole["decoder.conv_in.weight"][:, :, -1])


def test_the_bytes_say_what_is_kept():
    """44.6 of 126.9 million parameters: the file has the other slices and the convolutions over time beside."""
    core = _core.Model(_core.models()["qwen-image"])
    slices = {name: shape[2] if len(shape) == 5 else 1 for name, shape in core.tensors}
    kept = sum(int(np.prod(shape)) // slices[name] for name, shape in core.tensors)
    time = sum(wide * narrow * 3 + wide for wide, narrow in ((192, 192), (384, 384), (768, 384), (768, 384)))
    whole = sum(int(np.prod(shape)) for _, shape in core.tensors) + time
    assert (round(kept / 1e6, 1), round(whole / 1e6, 1)) == (44.6, 126.9)
    assert 4 * kept <= core.reserved_bytes <= 4 * kept * 1.003


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
@pytest.mark.parametrize("name", FRAMES)
def test_the_names_of_wans_authors(tmp_path, name, prefix):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    vae, whole = random(name)
    arch = vae.arch
    spelt = layouts.spell(whole, "wan", len(arch["block_out_channels"]), prefix, arch["layers_per_block"])
    safetensors_numpy.save_file({spelt[n]: t for n, t in whole.items()}, tmp_path / "a.safetensors")
    for parts in ("all", "decoder"):
        again = VAE.load(tmp_path / "a.safetensors", config=config(name), parts=parts, videos=False)
        z = latents(vae, 4, 6)
        assert np.array_equal(again.decode(z), vae.decode(z))


@pytest.mark.parametrize("joined", [True, False])
def test_gguf(tmp_path, joined):
    """Of four sides, as stable-diffusion.cpp joins the first two of five, or in rows of 256 beside their own shape."""
    pytest.importorskip("gguf")
    from test_gguf import write_gguf

    vae, whole = random("wan")
    spelt = layouts.spell(whole, "wan", len(vae.arch["block_out_channels"]), "", vae.arch["layers_per_block"])
    tensors = {spelt[name]: tensor for name, tensor in whole.items()}
    if joined:
        tensors = {n: t.reshape(-1, *t.shape[2:]) if t.ndim == 5 else t for n, t in tensors.items()}
    else:  # those that make no whole rows are joined there too
        tensors = {n: t.reshape(-1, *t.shape[2:]) if t.ndim == 5 and t.size % 256 else t for n, t in tensors.items()}
    write_gguf(tmp_path / "a.gguf", tensors, lambda name, shape: "F32", reshape=not joined)
    z = latents(vae, 4, 6)
    again = VAE.load(tmp_path / "a.gguf", config=config("wan"), videos=False)
    assert np.array_equal(again.decode(z), vae.decode(z))


def test_spelling_is_that_of_wans_authors():
    """Names of wan_2.1_vae.safetensors, which wan/modules/vae.py makes."""
    names = dict(_core.Model(_core.models()["qwen-image"]).tensors)
    spelt = layouts.spell(names, "wan", 4)
    for mine, theirs in (
        ("quant_conv.weight", "conv1.weight"),
        ("post_quant_conv.bias", "conv2.bias"),
        ("encoder.conv_in.weight", "encoder.conv1.weight"),
        ("encoder.down_blocks.0.norm1.gamma", "encoder.downsamples.0.residual.0.gamma"),
        ("encoder.down_blocks.2.resample.1.weight", "encoder.downsamples.2.resample.1.weight"),
        ("encoder.down_blocks.3.conv_shortcut.weight", "encoder.downsamples.3.shortcut.weight"),
        ("encoder.mid_block.resnets.1.conv2.bias", "encoder.middle.2.residual.6.bias"),
        ("encoder.norm_out.gamma", "encoder.head.0.gamma"),
        ("encoder.conv_out.weight", "encoder.head.2.weight"),
        ("decoder.conv_in.bias", "decoder.conv1.bias"),
        ("decoder.mid_block.resnets.0.norm1.gamma", "decoder.middle.0.residual.0.gamma"),
        ("decoder.mid_block.attentions.0.to_qkv.weight", "decoder.middle.1.to_qkv.weight"),
        ("decoder.mid_block.attentions.0.norm.gamma", "decoder.middle.1.norm.gamma"),
        ("decoder.up_blocks.0.resnets.2.norm2.gamma", "decoder.upsamples.2.residual.3.gamma"),
        ("decoder.up_blocks.0.upsamplers.0.resample.1.bias", "decoder.upsamples.3.resample.1.bias"),
        ("decoder.up_blocks.1.resnets.0.conv_shortcut.weight", "decoder.upsamples.4.shortcut.weight"),
        ("decoder.up_blocks.3.resnets.2.conv1.weight", "decoder.upsamples.14.residual.2.weight"),
        ("decoder.norm_out.gamma", "decoder.head.0.gamma"),
    ):
        assert mine in names and spelt[mine] == theirs
    assert len(set(spelt.values())) == len(names)


@pytest.mark.parametrize("layout", ["diffusers", "wan"])
def test_files_without_a_config_are_found_out(layout):
    arch = _core.models()["qwen-image"]
    shapes = dict(_core.Model(arch).tensors)
    spelt = layouts.spell(shapes, layout, 4)
    in_file = {spelt[name]: shape for name, shape in shapes.items()}
    assert layouts.detect(in_file) == (layout, "", arch)
    ends = {"encoder.conv_in.weight": (96, 4, 3, 3, 3), "decoder.conv_out.weight": (4, 96, 3, 3, 3)}
    four = layouts.detect(in_file | {spelt[name]: shape for name, shape in ends.items()})[2]
    assert (four["in_channels"], four["out_channels"], four["name"]) == (4, 4, "custom")
    assert dict(_core.Model(four).tensors).items() >= ends.items()
    half = {n: shape for n, shape in (in_file | {spelt[n]: shape for n, shape in ends.items()}).items()
            if layouts.half_of(n) == "decoder"}  # fmt: skip
    assert layouts.detect(half, "decoder")[2]["out_channels"] == 4


@pytest.mark.parametrize("name", ["Qwen-Image", "Qwen/Qwen-Image-Edit", "wan2.1", "Wan-AI/Wan2.1-T2V-14B-Diffusers"])
def test_what_people_call_it(name):
    assert configs.named_model("model", name) == "qwen-image"


@pytest.mark.parametrize("name", FRAMES)
def test_configs(name):
    arch = configs.read_config(config(name))
    assert (arch["family"], arch["latent_channels"]) == ("wan", 4)
    wider = {"block_out_channels": tuple(2 * c for c in arch["block_out_channels"]), "decoder_block_out_channels": None}
    wider = {key: value for key, value in (arch | wider | {"in_channels": 4, "out_channels": 4}).items() if value}
    wider |= {key: value for key, value in arch.items() if not value}
    usual = {"qwen21": "qwen-image-2.1"}.get(name, "qwen-image")
    for one in (arch, wider, *(_core.models()[named] for named in ("qwen-image", "wan2.2", "qwen-image-2.1"))):
        assert configs.read_config(configs.config_of(one)) == configs.read_config(one) == one
    assert configs.read_config({"_class_name": config(name)["_class_name"]}) == _core.models()[usual]
    assert configs.sample_size_of(config(name), "") == 256  # diffusers' tiles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_out_channels": (96, 200)}, (None, "block_out_channels")),
        ({"decoder_block_out_channels": (32, 32, 128, 128)}, (None, "block_out_channels")),
        ({"decoder_block_out_channels": 5}, (5, "decoder_block_out_channels")),
        ({"block_out_channels": None}, ("None", "block_out_channels")),
        ({"latents_mean": "x"}, ("'x'", "latents_mean")),
        ({"latent_channels": None}, ("None", "z_dim")),
        ({"family": "kl"}, ()),
    ],
)
def test_architectures_that_no_config_says(change, message):
    with refused("config", *message):
        configs.read_config(_core.models()["qwen-image"] | change)
    with refused("arch", "'x'", "family", names=["hunyuan_image"]):
        _core.Model(_core.models()["qwen-image"] | {"family": "x"})


def test_other_ends_and_decoders_are_said():
    arch = _core.models()["qwen-image"]
    for change in ({"out_channels": 4}, {"decoder_block_out_channels": (64, 128, 256, 256)}):
        again = configs.read_config(configs.config_of(arch | change))
        assert _core.Model(again).arch == arch | change | {"name": "custom"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_scales": [0.5]}, ("[0.5]", "attn_scales")),
        ({"dropout": 0.1}, (0.1, "dropout")),
        ({"is_residual": True, "temperal_downsample": [True]}, ("(True,)", "temperal_downsample")),
        ({"patch_size": 2}, (3, "in_channels")),
        ({"patch_size": 4}, (4, "patch_size")),
        ({"dim_mult": [2, 4, 4]}, ("(2, 4, 4)", "dim_mult")),
        ({"dim_mult": [1, "2"]}, ("'2'", "dim_mult[1]")),
        ({"base_dim": 0}, (0, "base_dim")),
        ({"z_dim": 5}, ("(-0.7571, -0.7089, -0.9113, 0.1075)", "latents_mean, latents_std")),
        ({"latents_std": None}, ("None", "latents_std")),
        ({"latents_std": [1, 1, 1, 0]}, (0, "latents_std[3]")),
        ({"block_out_channels": [32]}, ("[32]", "block_out_channels")),
        ({"base_dim": 15, "dim_mult": [1, 3, 3]}, (45, "block_out_channels[1]")),
    ],
)
def test_configs_refused_by_key(change, message):
    with refused("config", *message):
        VAE.random(config=config("wan") | change)


def test_saving_is_refused(tmp_path):
    with refused("custom"):
        small_vae("qwen").save(tmp_path / "a.safetensors")


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_sizes_of_numbers_do_not_matter_to_the_norm(op, factor):
    """A first convolution whose numbers are tiny or huge: what follows divides by their length."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    vae, (h, w) = small_vae("wan"), (16, 24)
    first = "encoder.conv_in" if op == "encode" else "decoder.conv_in"
    for leaf in ("weight", "bias"):
        vae._core.set_tensor(f"{first}.{leaf}", vae._core.get_tensor(f"{first}.{leaf}") * np.float32(factor))
    theirs = diffusers_vae(vae.arch, torch.float64, "cpu")
    state = {name: torch.from_numpy(tensor).double() for name, tensor in tensors_of(vae._core).items()}
    theirs.vae.load_state_dict(state, strict=False)
    x = images(h, w) if op == "encode" else latents(vae, h // 4, w // 4)
    with torch.no_grad():
        said = getattr(theirs, op)(torch.from_numpy(x).double())
    want = (said.latent_dist.mean if op == "encode" else said.sample).numpy()
    got = vae.encode(x).mean if op == "encode" else vae.decode(x)
    assert error(got, want) <= PARITY


def test_images_are_clamped():
    vae = small_vae("wan")
    vae._core.set_tensor("decoder.conv_out.bias", np.array([5, -5, 0], np.float32))
    image = vae.decode(latents(vae, 4, 4))
    assert (image[:, 0] == 1).all() and (image[:, 1] == -1).all() and (abs(image[:, 2]) < 1).any()
    assert (vae.decode(latents(vae, 8, 8), tiling=Tiling(16))[:, 0] == 1).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FRAMES)
def test_halves(name, dtype):
    """As near to float32 as tests/gpu.py derives it for a GPU: as many passes, each of which rounds."""
    from gpu import LIMIT

    vae = small_vae(name)
    half = VAE.random(config=config(name), dtype=dtype)
    z, x = latents(vae, 6, 10), images(24, 40)
    assert error(half.decode(z), vae.decode(z).astype(np.float64)) <= LIMIT[dtype]
    assert error(half.encode(x).mean, vae.encode(x).mean.astype(np.float64)) <= LIMIT[dtype]


@pytest.mark.parametrize("name", FRAMES)
def test_the_drop_in_is_diffusers_for_one_frame(name):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    from torch_vaes import of_config

    import vaemem.pytorch

    kind = config(name)["_class_name"]
    theirs = of_config(config(name), torch.float32, "cpu")
    ours = getattr(vaemem.pytorch, kind).from_module(theirs)
    assert isinstance(ours, getattr(diffusers, kind)) and dict(ours.config) == dict(theirs.config)
    x, z = torch.from_numpy(images(16, 24, 2))[:, :, None], torch.randn(2, 4, 1, 4, 6)
    with torch.no_grad():
        for mine, want in (
            (ours.encode(x).latent_dist.parameters, theirs.encode(x).latent_dist.parameters),
            (ours.decode(z).sample, theirs.decode(z).sample),
            (ours(x).sample, theirs(x).sample),
            (ours.decode(z, return_dict=False)[0], theirs.decode(z, return_dict=False)[0]),
        ):
            assert mine.shape == want.shape and error(mine.numpy(), want.double().numpy()) <= PARITY
        if not ours.vae.arch.get("videos"):
            with refused("z", "(2, 4, 2, 4, 6)"):
                ours.decode(z.repeat(1, 1, 2, 1, 1))
        with refused("x", kind=TypeError):
            ours.encode(z.int())
    if not ours.vae.arch.get("videos"):
        with refused("state_dict", kind=RuntimeError):
            ours.state_dict()
    if hasattr(theirs, "enable_tiling"):
        theirs.enable_tiling(16, 16, 12, 12)
        theirs.spatial_compression_ratio = 4
        tiled = getattr(vaemem.pytorch, kind).from_module(theirs)
        with torch.no_grad():
            want = theirs.decode(torch.cat([z, z], 3)).sample
            assert error(tiled.decode(torch.cat([z, z], 3)).sample.numpy(), want.double().numpy()) <= PARITY
            tiled.enable_tiling(16, 16, 12, 8)
            with refused("enable_tiling"):
                tiled.decode(torch.cat([z, z], 3))


def test_measurements_are_of_autoencoders_of_images():
    pytest.importorskip("torch")
    from vaemem.pytorch.measuring import _find_maker

    with refused("model", names=["'qwen-image'"]):
        _find_maker("qwen-image", "diffusers")


def test_random_gammas_are_near_one():
    core = _core.Model(configs.read_config(config("wan")))
    random_tensors(core, 0)
    gammas = np.concatenate([t.ravel() for name, t in tensors_of(core).items() if name.endswith(".gamma")])
    assert abs(gammas.mean() - 1) < 0.05 and 0.05 < gammas.std() < 0.2


# ---- residuals that are moved ----


@pytest.mark.parametrize(
    ("name", "layout", "pairs"),
    [
        (
            "wan2.2", "wan",
            [
                ("encoder.down_blocks.0.resnets.1.norm1.gamma", "encoder.downsamples.0.downsamples.1.residual.0.gamma"),
                ("encoder.down_blocks.1.downsampler.resample.1.weight",
                 "encoder.downsamples.1.downsamples.2.resample.1.weight"),
                ("encoder.down_blocks.1.resnets.0.conv_shortcut.bias",
                 "encoder.downsamples.1.downsamples.0.shortcut.bias"),
                ("decoder.up_blocks.0.upsampler.resample.1.bias", "decoder.upsamples.0.upsamples.3.resample.1.bias"),
                ("decoder.up_blocks.3.resnets.2.conv2.weight", "decoder.upsamples.3.upsamples.2.residual.6.weight"),
                ("decoder.mid_block.resnets.1.conv1.weight", "decoder.middle.2.residual.2.weight"),
            ],
        ),
        (
            "hunyuanimage-2.1", "hunyuan",
            [
                ("encoder.down_blocks.0.conv1.weight", "encoder.down.0.block.0.conv1.weight"),
                ("encoder.down_blocks.2.conv.weight", "encoder.down.0.downsample.conv.weight"),
                ("encoder.down_blocks.16.norm2.bias", "encoder.down.5.block.1.norm2.bias"),
                ("decoder.up_blocks.3.conv.bias", "decoder.up.0.upsample.conv.bias"),
                ("decoder.up_blocks.22.conv2.weight", "decoder.up.5.block.2.conv2.weight"),
                ("encoder.mid_block.attentions.0.to_q.weight", "encoder.mid.attn_1.q.weight"),
                ("encoder.mid_block.attentions.0.proj.weight", "encoder.mid.attn_1.proj_out.weight"),
                ("decoder.mid_block.attentions.0.norm.weight", "decoder.mid.attn_1.norm.weight"),
                ("decoder.mid_block.resnets.1.conv1.bias", "decoder.mid.block_2.conv1.bias"),
                ("encoder.norm_out.weight", "encoder.norm_out.weight"),
            ],
        ),
    ],
)  # fmt: skip
def test_names_of_their_authors(name, layout, pairs):
    """Those of vae2_2.py of Wan2.2, and of diffusers' convert_hunyuan_image_to_diffusers.py."""
    shapes = dict(_core.Model(_core.models()[name]).tensors)
    spelt = layouts.spell(shapes, layout, len(_core.models()[name]["block_out_channels"]))
    assert [(mine, spelt[mine]) for mine, _ in pairs] == pairs
    assert len(set(spelt.values())) == len(shapes)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("wan2.2", "diffusers"), ("wan2.2", "wan"), ("qwen-image-2.1", "diffusers"),
     ("hunyuanimage-2.1", "diffusers"), ("hunyuanimage-2.1", "hunyuan")],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "vae."])
def test_moved_residuals_are_found_out(name, layout, prefix):
    arch = _core.models()[name]
    shapes = dict(_core.Model(arch).tensors)
    spelt = layouts.spell(shapes, layout, len(arch["block_out_channels"]), prefix)
    in_file = {spelt[tensor]: shape for tensor, shape in shapes.items()}
    assert layouts.detect(in_file) == (layout, prefix, arch)
    half = {tensor: shape for tensor, shape in in_file.items() if layouts.half_of(tensor[len(prefix) :]) == "decoder"}
    assert layouts.detect(half, "decoder")[2] == arch


@pytest.mark.parametrize("name", ["wan22", "hunyuan"])
def test_files_of_their_authors(tmp_path, name):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    vae = small_vae(name)
    layout, arch = {"wan22": "wan", "hunyuan": "hunyuan"}[name], vae.arch
    tensors = tensors_of(vae._core)
    spelt = layouts.spell(tensors, layout, len(arch["block_out_channels"]), "", arch["layers_per_block"])
    held = {spelt[n]: t[:, :, None] if name == "hunyuan" and t.ndim == 4 else t for n, t in tensors.items()}
    safetensors_numpy.save_file(held, tmp_path / "a.safetensors")
    z = latents(vae, 4, 6)
    assert np.array_equal(VAE.load(tmp_path / "a.safetensors", config=config(name)).decode(z), vae.decode(z))


@pytest.mark.parametrize(
    ("said", "name"),
    [("Wan-AI/Wan2.2-TI2V-5B", "wan2.2"), ("Qwen/Qwen-Image-2.1", "qwen-image-2.1"),
     ("tencent/HunyuanImage-2.1", "hunyuanimage-2.1"), ("Hunyuan-Image", "hunyuanimage-2.1")],
)  # fmt: skip
def test_what_people_call_the_others(said, name):
    assert configs.named_model("model", said) == name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sd15", {"image_patch": 2}, (None, "temperal_downsample, image_patch")),
        ("sd15", {"temperal_downsample": (True,) * 3}, (None, "temperal_downsample, image_patch")),
        ("wan2.2", {"image_patch": 3}, (3, "image_patch")),
        ("hunyuanimage-2.1", {"norm_num_groups": 2, "block_out_channels": (2,) * 6, "latent_channels": 1},
         (2, "block_out_channels")),
    ],
)  # fmt: skip
def test_architectures_that_cannot_be_moved(name, change, message):
    with refused("config", *message):
        _core.Model(_core.models()[name] | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hunyuan", {"downsample_match_channel": False}, ("False", "downsample_match_channel")),
        ("hunyuan", {"spatial_compression_ratio": 8}, (8, "spatial_compression_ratio")),
        ("hunyuan", {"act_fn": "silu"}, ("'silu'", "act_fn")),
        ("qwen21", {"temperal_downsample": [0, 1]}, (0, "temperal_downsample[0]")),
        ("qwen21", {"is_residual": 1}, (1, "is_residual")),
    ],
)
def test_what_cannot_be_moved_is_refused(name, change, message):
    with refused("config", *message):
        VAE.random(config=config(name) | change)


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("wan", {"is_residual": True}, ["encoder.down_blocks.2.avg_shortcut", 32, 64]),
        ("hunyuan", {"latent_channels": 7}, ["encoder.mean", 64, 14]),
        ("hunyuan", {"latent_channels": 48}, ["encoder.mean", 64, 96]),
        ("hunyuan", {"block_out_channels": (32, 96, 64)}, ["encoder.down_blocks.1.shortcut", 32, 96]),
        ("qwen21", {"base_dim": 12, "dim_mult": [1, 2, 3]}, ["avg_shortcut", 24, 36]),
    ],
)
def test_channels_that_cannot_be_averaged_are_refused(name, change, names):
    with refused(names=names):
        VAE.random(config=config(name) | change)


def test_images_of_four_channels():
    vae = VAE.random(config=config("qwen21") | {"in_channels": 4, "out_channels": 4})
    x = np.random.default_rng(0).uniform(-1, 1, (1, 4, 16, 24)).astype(np.float32)
    assert vae.encode(x).mean.shape == (1, 4, 4, 6) and vae.decode(latents(vae, 4, 6)).shape == (1, 4, 16, 24)
