"""The traces of VAEs other than AutoencoderKL, of one frame where they are of videos, beside recordings of diffusers'
classes."""

from __future__ import annotations

import itertools
import math

import pytest
from errors import refused
from traces import OPS, assert_same, empty_image

from vaemem import _core, predict
from vaemem._common import latent_factor
from vaemem.prediction.profiles import Conv

pytestmark = pytest.mark.core

QWEN = _core.models()["qwen-image"]
SMALL = {**QWEN, "block_out_channels": (32, 64, 64)}
NARROW = {**QWEN, "block_out_channels": (32, 64, 64, 64)}
FLAT = {**QWEN, "block_out_channels": (24,)}
UNEVEN = {**QWEN, "block_out_channels": (96, 192), "layers_per_block": 1}
NAMES = {"AutoencoderKLWan": "wan2.1", "AutoencoderKLQwenImage": "qwen-image"}
LATER = {
    "wan2.2": "AutoencoderKLWan",
    "qwen-image-2.1": "AutoencoderKLQwenImage21",
    "hunyuanimage-2.1": "AutoencoderKLHunyuanImage",
}


def case(kind, arch, op, height, width, batch=1, dtype="float32", tile=0, slicing=False, tile_overlap=0.25, frames=1):
    diffusers = pytest.importorskip("diffusers")
    if not hasattr(diffusers, kind):  # the older release
        pytest.skip(f"diffusers {diffusers.__version__} has no {kind}")
    arch = arch if arch["name"] == "wan2.2" else arch | {"name": NAMES[kind]}

    def prepare(vae):
        vae.spatial_compression_ratio = latent_factor(arch)
        if tile:
            stride = int(tile * (1 - tile_overlap))
            vae.enable_tiling(tile, tile, stride, stride)

    lives_as_recorded(arch, op, height, width, batch, dtype, tile, slicing, tile_overlap, prepare, kind, frames=frames)


def lives_as_recorded(
    arch, op, height, width, batch, dtype, tile, slicing, tile_overlap, prepare, kind, channels_last=False, frames=1
):
    """prepare: what is done to diffusers' module, of the class that is called so, before it runs."""
    import torch
    from torch_vaes import RELEASE, diffusers_vae, of_config

    from vaemem.engine.configs import config_of
    from vaemem.pytorch import record

    factor, run, picture = latent_factor(arch), getattr(torch, dtype), op == "picture"
    op = "encode" if picture else op
    is_tiny = arch["family"] == "tiny"
    vae = diffusers_vae(arch, run).vae if is_tiny else of_config(config_of(arch) | {"_class_name": kind}, run)
    vae.use_slicing = slicing
    prepare(vae)
    if channels_last:
        vae = vae.to(memory_format=torch.channels_last)
    times = (frames,) * (arch["family"] == "wan")
    latents = arch["latent_channels"], *times, height // factor, width // factor
    x = torch.empty(batch, *latents, dtype=run, device="meta")
    if op == "encode":
        images = (4 * frames - 3,) * len(times)
        x = empty_image(batch, arch["in_channels"], height, width, run, picture, *images)
    posterior = "latents" if is_tiny else "latent_dist"
    call = {"decode": lambda v, x: v.decode(x).sample, "encode": lambda v, x: getattr(v.encode(x), posterior)}[op]
    recording = record(vae, x, call=call)
    built = _core.Trace.vae(
        arch, "diffusers", op, dtype, height, width, batch, tile, slicing, tile_overlap=tile_overlap,
        release=RELEASE, channels_last=channels_last, frames=frames, picture=picture,
    )  # fmt: skip
    assert_same(built, recording.trace)
    if arch["family"] != "hunyuan_image":  # whose attention is matrix products, which a recording does not count
        assert (built.flops, built.attended) == (recording.trace.flops, recording.trace.attended)
    wide = max(arch.get("decoder_block_out_channels", arch["block_out_channels"])) >= 1024
    assert not recording.unmodelled or (wide and {*recording.unmodelled} == {"aten.linalg_vector_norm.default"})
    weights = [(name, math.prod(shape) * run.itemsize) for name, shape, _ in _core.Trace.parameters(arch, "diffusers")]
    assert weights == recording.weights


@pytest.mark.older
@pytest.mark.one_in(8)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", list(NAMES))
@pytest.mark.parametrize(
    "sizes",
    [
        (QWEN, 256, 256),
        (QWEN, 96, 64, 2, "bfloat16"),
        (QWEN, 8, 8),
        (QWEN, 512, 8),
        (SMALL, 40, 72, 3, "bfloat16"),
        (FLAT, 16, 24, 2),
        (UNEVEN, 16, 24, 1, "float16"),
    ],
)
def test_one_frame_lives_as_recorded(sizes, kind, op):
    case(kind, sizes[0], op, *sizes[1:])


@pytest.mark.one_in(27)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", list(LATER))
@pytest.mark.parametrize(
    "sizes, tile, tile_overlap",
    [
        ((4, 6, 1, "float32"), 0, 0.25),
        ((1, 1, 1, "float32"), 0, 0.25),
        ((1, 2, 2, "bfloat16"), 0, 0.25),
        ((9, 5, 2, "float16", True), 4, 0.25),
        ((7, 9, 2, "bfloat16"), 4, 0.5),
    ],
)
def test_later_vaes_live_as_recorded(sizes, name, op, tile, tile_overlap):
    """Sizes in latent pixels."""
    pytest.importorskip("diffusers")
    high, wide, batch, dtype, *slicing = sizes
    arch, kind = _core.models()[name], LATER[name]
    factor = latent_factor(arch)
    tile *= factor
    stride = int(tile * (1 - tile_overlap))
    is_shuffled = name == "hunyuanimage-2.1"

    def prepare(vae):
        vae.spatial_compression_ratio = factor
        if tile:
            vae.enable_tiling(*((tile, tile_overlap) if is_shuffled else (tile, tile, stride, stride)))

    size = op, high * factor, wide * factor, batch, dtype, tile, bool(slicing), tile_overlap
    if is_shuffled and tile and op != "decode":  # diffusers' class raises
        with refused("tile", names=["hunyuanimage-2.1"]):
            predict(name, "encode_tiled", *size[1:3])
        return
    lives_as_recorded(arch, *size, prepare, kind)


TINY = {name: arch for name, arch in _core.models().items() if arch.get("family") == "tiny"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "name, case, tile, tile_overlap",
    [
        ("taesd", (256, 256, 1, "float16"), 0, 0.125),
        ("taesd", (64, 96, 2, "bfloat16", True), 0, 0.125),
        ("taesd", (8, 8, 2, "float32"), 0, 0.125),
        ("taesd", (160, 200, 2, "float16", True), 64, 0.125),
        ("taesd", (96, 64, 2, "float32"), 64, 0.5),
        ("taesd", (40, 32, 1, "bfloat16"), 64, 0.25),
        ("taef1", (64, 512, 1, "bfloat16"), 0, 0.125),
        ("taef2", (64, 96, 2, "float32"), 0, 0.125),
        ("taef2", (8, 8, 1, "bfloat16"), 0, 0.125),
    ],
)
def test_tiny_autoencoders_live_as_recorded(name, case, tile, tile_overlap, op):
    pytest.importorskip("diffusers")
    height, width, batch, dtype, *slicing = case

    def prepare(vae):
        vae.use_tiling, vae.tile_overlap_factor = bool(tile), tile_overlap
        vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // 8

    for channels_last in (False, True):
        lives_as_recorded(
            TINY[name], op, height, width, batch, dtype, tile, bool(slicing), tile_overlap, prepare, "", channels_last
        )


def test_tiny_autoencoders_by_name():
    p = predict("madebyollin/taesdxl", "decode_tiled", 1024, 1024, "float16")
    assert (p.model, p.tile, p.tile_overlap) == ("taesd", 512, 0.125)
    assert "AutoencoderTiny of diffusers 0.42" in p.to_text(all=True, width=999)
    assert "with TAEF2's branch added" in predict("taef2", "encode", 64, 64).to_text(all=True, width=999)
    with refused("tile"):
        predict("taesd3", "encode_tiled", 1024, 1024)
    with refused("tile_overlap", names=["100", "512"]):
        predict("taesd", "encode_tiled", 1024, 1024, tile=512, tile_overlap=100 / 512)
    with refused("runtime", "comfyui"):
        predict("taesd", "decode", 1024, 1024, runtime="comfyui")


@pytest.mark.one_in(18)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("kind", list(NAMES))
@pytest.mark.parametrize(
    "cut",
    [
        (64, 96, 2, "float16", 0, True),
        (64, 96, 2, "float16", 64, True),
        (96, 160, 1, "bfloat16", 64, False, 0.5),
        (112, 176, 2, "float32", 48, False, 0.3),
        (40, 40, 1, "float32", 64),
    ],
)
def test_frames_in_tiles_and_slices_live_as_recorded(cut, kind, op):
    case(kind, SMALL, op, *cut)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "sizes, frames",
    [
        ((NARROW, 24, 40, 2, "bfloat16"), 4),
        ((QWEN, 96, 64), 2),
        ((QWEN, 16, 24), 21),
        ((NARROW, 48, 72, 1, "float32", 48), 3),
        ((NARROW, 48, 72, 2, "float16", 64, True, 0.5), 2),
    ],
)
def test_frames_of_a_video_live_as_recorded(sizes, frames, op):
    case("AutoencoderKLWan", sizes[0], op, *sizes[1:], frames=frames)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("sizes", "frames"),
    [
        ((64, 96), 2), ((64, 96, 2, "bfloat16"), 4), ((16, 16, 1, "float16"), 3), ((32, 48), 6),
        ((96, 128, 1, "float32", 64), 3), ((96, 128, 2, "float16", 64, True, 0.5), 2),
    ],
)  # fmt: skip
def test_frames_of_a_residual_video_live_as_recorded(sizes, frames):
    """Wan 2.2's: a level's input is repeated in time too, and the first latent frame keeps the last of its copies."""
    case("AutoencoderKLWan", _core.models()["wan2.2"], "decode", *sizes, frames=frames)


def test_a_video_with_a_pictures_strides_lives_as_recorded():
    """Its convolutions keep the strides, also after its frames are halved."""
    case("AutoencoderKLWan", NARROW, "picture", 24, 40, frames=4)


def test_only_one_class_decodes_and_encodes_frames():
    wan = _core.models()["qwen-image"] | {"name": "wan2.1"}
    assert _core.Trace.vae(wan, "diffusers", "decode", "float32", 64, 64, frames=2).flops
    for arch, runtime, op in (
        (wan, "comfyui", "decode"), (wan, "comfyui", "encode"), (_core.models()["wan2.2"], "diffusers", "encode"),
        (_core.models()["qwen-image-2.1"], "diffusers", "decode"),
        (_core.models()["sd15"], "diffusers", "decode"),
    ):  # fmt: skip
        with refused("frames"):
            _core.Trace.vae(arch, runtime, op, "float32", 64, 64, frames=2)
    with refused("frames"):
        _core.Trace.vae(wan, "diffusers", "decode", "float32", 64, 64, frames=1025)


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "sizes, tile",
    [
        ((QWEN, 256, 256, 1, "bfloat16"), 0),
        ((QWEN, 96, 64, 2, "float32"), 0),
        ((QWEN, 8, 8), 0),
        ((SMALL, 40, 72, 3, "float16"), 0),
        ((FLAT, 16, 24, 2), 0),
        ((UNEVEN, 16, 24, 1, "float16"), 0),
        ((SMALL, 96, 160, 2, "bfloat16"), 64),
        ((SMALL, 64, 48, 1, "float32"), 64),
    ],
)
def test_comfyuis_frames_live_as_they_are_written(sizes, tile, op):
    torch = pytest.importorskip("torch")
    from torch_wan import Model

    from vaemem.pytorch import record

    arch, height, width, batch, dtype = (*sizes, *(1, "float32")[len(sizes) - 3 :])
    if op == "encode":
        batch = 1
    factor, run = 2 ** (len(arch["block_out_channels"]) - 1), getattr(torch, dtype)
    with torch.device("meta"):
        vae = Model(arch).to(run).eval()
    shapes = {"encode": (3, 1, height, width), "decode": (16, 1, height // factor, width // factor)}
    x = torch.empty(batch, *shapes[op], dtype=run, device="meta")
    recording = record(vae, x, call=lambda vae, x: vae.tiles_from_host(op, x, tile) if tile else vae.from_host(op, x))
    built = _core.Trace.vae(arch, "comfyui", op, dtype, height, width, batch, tile)
    assert_same(built, recording.trace)
    assert recording.unmodelled == {}
    weights = [(name, math.prod(shape) * run.itemsize) for name, shape, _ in _core.Trace.parameters(arch, "comfyui")]
    assert weights == recording.weights


def test_releases_differ():
    def steps(release, dtype, tile=0, name="wan2.1"):
        arch = QWEN | {"name": name}
        return _core.Trace.vae(
            arch, "diffusers", "decode", dtype, 512, 512, tile=tile, release=release
        ).steps  # fmt: skip

    assert steps(37, "float32") != steps(38, "float32")  # a name holds the unit vectors
    assert sum(s[2] for s in steps(38, "float16")) > sum(s[2] for s in steps(37, "float16"))  # in float32
    assert len(steps(36, "float16", 256)) == len(steps(35, "float16", 256)) + 2  # the clamp of the tiled decode
    assert steps(36, "float16", 256, "qwen-image") == steps(35, "float16", 256, "qwen-image")
    with refused("tile", names=["0.34", "wan2.1", "0.33"]):
        steps(33, "float16", 256)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"runtime": "bfl"}, ("runtime", "bfl")),
        ({"runtime": "comfyui", "op": "encode", "batch": 2}, ("batch", 2)),
        ({"channels_last": True}, ("channels_last", "True")),
    ],
)
def test_what_frames_cannot_is_refused_by_name(change, message):
    with refused(*message):
        predict("qwen-image", **{"op": "decode", "height": 512, "width": 512} | change)
    with refused("passing"):
        qwen, sent = _core.models()["qwen-image-2.1"], [("decoder", "decoder", "", 1, 2)]
        _core.Trace.vae(qwen, "diffusers", "decode", "float16", 64, 64, passing=sent)
    with refused("channels_last", names=["hunyuanimage-2.1"]):
        predict("hunyuanimage-2.1", "decode", 512, 512, channels_last=True)
    with refused("runtime", "comfyui", names=["wan2.2"]):
        predict("wan2.2", "decode", 512, 512, runtime="comfyui")
    with refused("tile_overlap"):
        predict("qwen-image-2.1", "encode_tiled", 512, 512, tile_overlap=0.1)
    with refused("first"):
        _core.Trace.vae(QWEN, "diffusers", "decode", "float32", 64, 64, first="float16")


def test_names_say_whose_class_runs():
    qwen, wan = (predict(name, "decode", 256, 256) for name in ("Qwen/Qwen-Image", "Wan-AI/Wan2.1-T2V-14B"))
    assert (qwen.model, qwen.dtype) == ("qwen-image", "bfloat16")
    assert (wan.model, wan.dtype) == ("wan2.1", "float32")
    assert "one frame by AutoencoderKLQwenImage of diffusers 0.42" in qwen.to_text(all=True, width=999)
    assert "AutoencoderKLWan of diffusers 0.42" in wan.to_text(all=True, width=999)
    assert wan.weights_bytes == 2 * qwen.weights_bytes
    later = {name: predict(name, "decode", 256, 256) for name in LATER}
    assert [p.dtype for p in later.values()] == ["float32", "bfloat16", "bfloat16"]
    assert all(f"{LATER[name]} of diffusers 0.42" in p.to_text(all=True, width=999) for name, p in later.items())


def test_comfyui_calls_cudnn_itself_where_pytorch_does_not():
    """In half precision with PyTorch 2.9 and 2.10 and cuDNN 9.10.2 to 9.14, where diffusers' are unfolded."""
    by, comfyui = {}, {}
    for version in ("2.8.0+cu128", "2.9.1+cu128"):
        run = "qwen-image", "decode", 512, 512, "bfloat16"
        by[version] = predict(*run, torch_version=version).allocated
        comfyui[version] = predict(*run, torch_version=version, runtime="comfyui")
    assert by["2.9.1+cu128"] > 1.9 * by["2.8.0+cu128"]
    assert len({p.allocated for p in comfyui.values()}) == 1
    assert "one frame by ComfyUI's WanVAE of 2026" in comfyui["2.8.0+cu128"].to_text(all=True, width=999)
    assert predict("qwen-image", "decode", 64, 64, runtime="comfyui", gpu="T4").dtype == "float16"


@pytest.mark.parametrize(
    "gpu, torch_version", [("RTX 4090", "2.8.0"), ("RTX 3060", "2.12.0"), ("H100", "2.13.0"), ("T4", "2.8.0")]
)
def test_profiles_answer_for_every_convolution_of_a_frame(gpu, torch_version):
    for runtime, op in (("diffusers", "decode"), ("diffusers", "encode"), ("comfyui", "decode")):
        for batch in (1, 2):
            p = predict(
                "wan2.1", op, 512, 768, "float32", batch=batch, gpu=gpu, torch_version=torch_version, runtime=runtime
            )
            assert p.substitutions == () and "rule" not in p.workspace_source and p.band == (p.reserved, p.reserved)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*LATER, *TINY])
@pytest.mark.parametrize("gpu", ["RTX 4090", "RTX 3060", "A100", "RTX 5090", "H100", "T4"])
def test_profiles_answer_for_every_convolution_of_later_vaes(name, gpu):
    for op, dtype in itertools.product(("decode", "encode"), ("float16", "float32")):
        p = predict(name, op, 512, 768, dtype, gpu=gpu, torch_version="2.8.0", cudnn_version="9.10.2")
        assert p.substitutions == () and "rule" not in p.workspace_source


def test_profiles_hold_convolutions_of_as_many_frames_as_their_filters():
    core = _core.Profile(
        True,
        None,
        [["i", 0, 0, 0, 0], ["o", 0, 0, 0, 7]],
        [],
        {"96,96,3,1,0,3/float32": "0", "96,96,3,1,1,1/float32": "1"},
    )
    frame = Conv("float32", 1, 96, 66, 66, 96, (3, 3, 3), (1, 1, 1), (0, 0, 0), depth=3)
    assert core.conv(frame, True)[0] == 4 * 3 * 66 * 66 * 96
    last = frame._replace(h=64, w=64, r=(1, 3, 3), padding=(0, 1, 1), depth=1)
    assert core.conv(last, True)[0] == 4 * 64 * 64 * 96 + 7
    for other in (
        frame._replace(depth=4), frame._replace(r=(3, 3, 1)), frame._replace(padding=(1, 0, 0)),
        frame._replace(stride=(2, 1, 1)), last._replace(depth=0, r=3, stride=1, padding=1),
    ):  # fmt: skip
        assert core.conv(other, True) is None
