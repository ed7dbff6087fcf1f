"""The traces built from architectures beside recordings of the real modules, and what a trace does on its own."""

from __future__ import annotations

import functools
import random

import pytest
from errors import refused
from playing import Playing
from traces import OPS, assert_same, empty_image, left_by

from vaemem import CachingAllocator, OutOfMemoryError, _core

pytestmark = pytest.mark.core

MODELS = _core.models()
PASSING = [("decoder.conv_in", "decoder.conv_in", "weight", 8, 1)]
SMALL = {
    **MODELS["sdxl"], "name": "small", "block_out_channels": (32, 64, 64), "norm_num_groups": 8,
}  # fmt: skip
ODD = {**SMALL, "block_out_channels": (24, 40, 72), "latent_channels": 3, "layers_per_block": 1}
WIDE = {**SMALL, "block_out_channels": (64, 300), "norm_num_groups": 4}  # a head too wide for flash attention
FLAT = {**SMALL, "block_out_channels": (32,)}
PLAIN = {**SMALL, "mid_block_add_attention": False, "use_quant_conv": False, "use_post_quant_conv": False}
BFL = {**SMALL, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159}


def formatted(module, channels_last):
    """The module, its filters in channels_last where that is asked."""
    import torch

    return module.to(memory_format=torch.channels_last) if channels_last else module


def skip_from(release):
    """Skip a test of older releases of diffusers."""
    pytest.importorskip("diffusers")
    from torch_vaes import RELEASE

    if release <= RELEASE:
        pytest.skip(f"before diffusers 0.{release} (make check ONLY=older)")


def diffusers_case(
    arch, op, height, width, batch=1, tile=0, slicing=False, dtype="float16", *, channels_last=False, first=None,
    tile_overlap=0.25,
):  # fmt: skip
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import RELEASE, diffusers_vae

    from vaemem.pytorch import record

    factor, picture = 2 ** (len(arch["block_out_channels"]) - 1), op == "picture"
    op = "encode" if picture else op
    vae = formatted(diffusers_vae(arch, getattr(torch, dtype)), channels_last)
    vae.use_slicing, vae.use_tiling = slicing, bool(tile)
    vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = tile, tile // factor, tile_overlap
    for module in [vae.post_quant_conv, vae.decoder.conv_in, vae.decoder.mid_block] * bool(first):
        module.to(getattr(torch, first))  # as StableDiffusionXLPipeline.upcast_vae does before 0.36
    if op == "decode":
        shape = batch, arch["latent_channels"], height // factor, width // factor
        z = torch.empty(shape, dtype=getattr(torch, first or dtype), device="meta")
        recording = record(vae, z, call=lambda v, z: v.decode(z).sample)
    else:
        image = empty_image(batch, arch["in_channels"], height, width, vae.dtype, picture)
        recording = record(vae, image, call=lambda v, x: v.encode(x).latent_dist)
    built = _core.Trace.vae(
        arch, "diffusers", op, dtype, height, width, batch, tile, slicing, channels_last=channels_last, first=first,
        tile_overlap=tile_overlap, release=RELEASE, picture=picture,
    )  # fmt: skip
    assert_same(built, recording.trace)
    assert recording.unmodelled == {}
    return recording


@pytest.mark.each_value
@pytest.mark.older
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", ["sd15", "sdxl", "flux"])
@pytest.mark.parametrize("size", [(512, 512), (1024, 1024), (832, 1216), (720, 1280), (64, 8)])
def test_diffusers_lives_as_recorded(model, op, size):
    diffusers_case(MODELS[model], op, *size, dtype="float32" if size[0] == 64 else "float16")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(op, dtype):
    diffusers_case(MODELS["sdxl"], op, 256, 256, dtype=dtype)


@pytest.mark.older
@pytest.mark.one_in(8)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "case",
    [
        (SMALL, 4, 4),
        (SMALL, 8, 40),
        (SMALL, 40, 8),
        (SMALL, 64, 64, 2),
        (SMALL, 64, 96, 3, 0, True),
        (SMALL, 4, 4, 2),
        (ODD, 32, 48),
        (ODD, 32, 48, 2),
        (WIDE, 16, 32),
        (WIDE, 16, 32, 2),
        (FLAT, 16, 16),
        (FLAT, 16, 16, 2),
        (PLAIN, 32, 32),
        (PLAIN, 32, 32, 2),
        (SMALL, 160, 96, 1, 64),
        (SMALL, 160, 96, 2, 64),
        (SMALL, 64, 96, 2, 64, True),
        (SMALL, 64, 64, 1, 64),
        (SMALL, 100, 36, 1, 48),
        (PLAIN, 96, 64, 1, 48),
        ({**SMALL, "in_channels": 1, "latent_channels": 1}, 48, 64, 1, 32),
    ],
)
def test_small_architectures_batches_slices_tiles(case, op):
    diffusers_case(case[0], op, *case[1:])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", ["sd3", "cogview4", "playground-v2.5", "flux2", "flux2-small"])
def test_other_vaes_live_as_recorded(model, op):
    diffusers_case(MODELS[model], op, 512, 512)
    diffusers_case(MODELS[model], op, 192, 256, batch=2, dtype="float32")
    diffusers_case(MODELS[model], op, 160, 96, tile=64)


@pytest.mark.older
@pytest.mark.one_in(3)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", [(), (2,), (3, 0, True), (1, 128), (2, 128, True)])
def test_upcast_vae_leaves_the_first_blocks_in_half_precision(case, channels_last):
    skip_from(36)
    diffusers_case(
        MODELS["sdxl"], "decode", 192, 256, *case, dtype="float32", first="float16", channels_last=channels_last
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile, overlap", [(72, 0.25), (64, 0.0), (64, 0.125), (64, 0.3), (64, 0.5), (72, 0.7)])
def test_tiles_overlap_as_diffusers_rounds_it(tile, overlap, op):
    """Where a part is no whole latent, diffusers rounds the distance of tiles and what is blended each down."""
    diffusers_case(SMALL, op, 84, 96, tile=tile, tile_overlap=overlap)


def test_tiles_of_a_shipped_model():
    diffusers_case(MODELS["sdxl"], "encode", 768, 640, tile=512)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "case", [(MODELS["flux"], 512, 512), (MODELS["flux"], 256, 384, 2), (BFL, 4, 4), (BFL, 8, 40), (BFL, 32, 32, 2)]
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_bfl_lives_as_recorded(channels_last, case, op):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_ldm import ldm_vae

    from vaemem.pytorch import record

    arch, height, width, batch = (*case, 1)[:4]
    factor = 2 ** (len(arch["block_out_channels"]) - 1)
    vae = formatted(ldm_vae(arch, "bfl", torch.bfloat16), channels_last)
    shape = (
        (batch, arch["latent_channels"], height // factor, width // factor)
        if op == "decode"
        else (batch, 3, height, width)
    )
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    recording = record(vae, x, call=lambda v, x: getattr(v, op)(x))
    built = _core.Trace.vae(arch, "bfl", op, "bfloat16", height, width, batch, channels_last=channels_last)
    assert_same(built, recording.trace)


def ldm_case(runtime, arch, op, height, width, batch=1, tile=0, dtype="float16", *, channels_last=False):
    torch = pytest.importorskip("torch")
    from torch_ldm import ldm_vae

    from vaemem.pytorch import record

    factor = 2 ** (len(arch["block_out_channels"]) - 1)
    vae = formatted(ldm_vae(arch, runtime, getattr(torch, dtype)), channels_last)
    packed = arch["patch_size"][0] if "patch_size" in arch else 1  # FLUX.2's latents in ComfyUI
    factor *= packed
    small = arch["latent_channels"] * packed * packed, height // factor, width // factor
    shape = (batch, *(small if op == "decode" else (arch["in_channels"], height, width)))
    call = getattr(vae, f"{op}_tiled" if tile else op)
    sides = (tile // factor, min(64, tile // 4) // factor) if op == "decode" else (tile, min(64, tile // 4))
    x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    recording = record(vae, x, call=lambda _, x: call(x, *(sides if tile else ())))
    built = _core.Trace.vae(arch, runtime, op, dtype, height, width, batch, tile, channels_last=channels_last)
    assert_same(built, recording.trace)
    # Of a BatchNorm's statistics nothing is known but their bytes, which are in both.
    assert set(recording.unmodelled) <= {"aten.native_batch_norm.default"}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("runtime", ["comfyui", "a1111", "forge"])
@pytest.mark.parametrize(
    "case",
    [
        (MODELS["sd15"], 512, 512),
        (MODELS["sdxl"], 832, 1216),
        (MODELS["sdxl"], 64, 128, 1, 0, "float32"),
        (MODELS["sdxl"], 64, 128, 2, 0, "bfloat16"),
        (SMALL, 64, 96, 3),
        (SMALL, 8, 40),
        (SMALL, 4, 8),
        (ODD, 32, 48, 2),
        (WIDE, 16, 32),
        (FLAT, 16, 16),
        ({**SMALL, "mid_block_add_attention": False}, 32, 32),
    ],
)
def test_ldm_lives_as_its_frames_are_written(runtime, case, op):
    ldm_case(runtime, case[0], op, *case[1:])


@pytest.mark.one_in(16)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "case",
    [
        (MODELS["flux"], 256, 256),
        (BFL, 32, 48, 2),
        (MODELS["sdxl"], 768, 640, 1, 512),
        (SMALL, 160, 96, 2, 64),
        (SMALL, 64, 200, 1, 48, "float32"),
        (SMALL, 32, 32, 1, 64),
    ],
)
@pytest.mark.parametrize("runtime", ["comfyui", "forge"])
def test_comfyui_tiles_and_vaes_without_quant_convolutions(runtime, case, op):
    ldm_case(runtime, case[0], op, *case[1:])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("model", ["flux2", "flux2-small"])
@pytest.mark.parametrize(
    "case", [(256, 256), (192, 256, 2, 0, "float32"), (768, 640, 1, 512), (112, 96, 2, 64), (64, 96, 1, 64)]
)
def test_flux2_in_comfyui_packs_and_normalises_its_latents(case, model, op):
    for channels_last in (False, True) if case[0] == 256 else (op == "encode",):
        ldm_case("comfyui", MODELS[model], op, *case, channels_last=channels_last)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "case",
    [
        (MODELS["sdxl"], 1024, 768, 1, 256),
        (SMALL, 200, 300, 2, 64, "bfloat16"),
        (SMALL, 400, 88, 1, 64, "float32"),
        (SMALL, 100, 100, 1, 64),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a1111_pads_its_tiles(channels_last, case, op):
    torch = pytest.importorskip("torch")
    from torch_ldm import TiledVae

    from vaemem.pytorch import record

    arch, height, width, batch, tile, dtype = (*case, "float16")[:6]
    vae = formatted(TiledVae(arch, getattr(torch, dtype)).eval(), channels_last)
    shape = batch, arch["latent_channels"], height // vae.factor, width // vae.factor
    x = torch.empty(shape if op == "decode" else (batch, 3, height, width), dtype=getattr(torch, dtype), device="meta")
    recording = record(vae, x, call=lambda v, x: getattr(v, op)(x, tile))
    built = _core.Trace.vae(arch, "a1111", op, dtype, height, width, batch, tile, channels_last=channels_last)
    assert_same(built, recording.trace)


@pytest.mark.older
@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "case",
    [
        (MODELS["sdxl"], 512, 512),
        (MODELS["sdxl"], 4096, 2048),  # too large for diffusers to upsample in channels_last
        (SMALL, 32, 32, 64),  # as is such a batch
        (SMALL, 4, 4, 2),
        (SMALL, 8, 40),
        (SMALL, 64, 96, 3, 0, True),
        (ODD, 32, 48, 2),
        (WIDE, 16, 32),
        (FLAT, 16, 16),
        (PLAIN, 32, 32, 2),
        (SMALL, 160, 96, 2, 64),
        ({**SMALL, "in_channels": 1, "latent_channels": 1}, 48, 64, 1, 32),
    ],
)
def test_channels_last_lives_as_recorded(case, op):
    diffusers_case(case[0], op, *case[1:], channels_last=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("runtime", ["comfyui", "a1111", "forge"])
@pytest.mark.parametrize("case", [(MODELS["sd15"], 256, 256), (SMALL, 64, 96, 3), (SMALL, 4, 8), (ODD, 32, 48, 2)])
def test_channels_last_in_code_after_compvis(runtime, case, op):
    ldm_case(runtime, case[0], op, *case[1:], channels_last=True)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("op", ["encode", "decode"])
def test_channels_last_in_tiles_of_comfyui(op):
    ldm_case("comfyui", SMALL, op, 160, 96, 2, 64, channels_last=True)


def test_images_of_comfyui_reach_the_gpu_in_channels_last():
    """What it does with them on the host: (N, H, W, C) seen as (N, C, H, W), cut, times 2, minus 1, another dtype."""
    torch = pytest.importorskip("torch")
    image = torch.rand(1, 64, 96, 3).movedim(-1, 1)
    for x in (image, image.narrow(2, 8, 32).narrow(3, 0, 16)):
        for dtype in (torch.float16, torch.float32):
            moved = (x * 2.0 - 1.0).to(dtype).to("cpu", copy=True)
            assert moved.is_contiguous(memory_format=torch.channels_last) and not moved.is_contiguous()


def test_a1111_takes_queries_in_parts_where_memory_is_short():
    from math import inf

    torch = pytest.importorskip("torch")
    from torch_ldm import SlicedAttention, ldm_vae

    from vaemem.pytorch import record

    tokens, free = 32 * 32, None
    wanted = 2.5 * 2 * tokens**2
    z = torch.empty(1, 4, 32, 32, dtype=torch.float16, device="meta")
    for steps, share in ((1, inf), (2, 0.7), (16, 0.07)):
        vae = ldm_vae(MODELS["sdxl"], "a1111", torch.float16)
        vae.decoder.mid.attn_1.steps = steps
        assert isinstance(vae.decoder.mid.attn_1, SlicedAttention)
        recording = record(vae, z, call=lambda v, z: v.decode(z))
        before = 6 * 512 * tokens * 2 + 4 * tokens * 2  # normed, q, k, v, zeros, the block's input; the latents
        free = 0 if share == inf else int(before - 512 * tokens * 2 + share * wanted)
        built = _core.Trace.vae(MODELS["sdxl"], "a1111", "decode", "float16", 256, 256, free_bytes=free)
        assert_same(built, recording.trace)


@pytest.mark.parametrize(
    "runtime, arch",
    [
        ("diffusers", MODELS["sd15"]),
        ("diffusers", MODELS["flux"]),
        ("diffusers", PLAIN),
        ("diffusers", ODD),
        ("diffusers", MODELS["flux2-small"]),
        ("diffusers", MODELS["cogview4"]),
        ("bfl", MODELS["flux"]),
        ("bfl", BFL),
        ("a1111", MODELS["sd15"]),
        ("comfyui", MODELS["sdxl"]),
        ("comfyui", MODELS["flux"]),
        ("comfyui", MODELS["flux2-small"]),
        ("forge", MODELS["flux"]),
        ("a1111", ODD),
    ],
)
def test_weights_are_moved_in_the_modules_order(runtime, arch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_ldm import ldm_vae
    from torch_vaes import diffusers_vae

    from vaemem.pytorch.recording import _walk_like_to

    make = diffusers_vae if runtime == "diffusers" else functools.partial(ldm_vae, runtime=runtime)
    vae = make(arch, dtype=torch.float16)
    own = {torch.int64: "int64"}
    named = [
        (name.removeprefix("first_stage_model."), tuple(t.shape), own.get(t.dtype, "run"))
        for name, t in _walk_like_to(vae)
    ]
    assert _core.Trace.parameters(arch, runtime) == named


def test_eager_strides_are_pytorchs():
    torch = pytest.importorskip("torch")
    from vaemem.pytorch.eager import eager_strides

    random.seed(0)
    ops = {1: torch.sigmoid, 2: torch.add, 3: torch.addcmul}
    for _ in range(3000):
        shape = [random.choice((1, 1, 2, 3, 4)) for _ in range(random.randint(1, 5))]
        operands = []
        for _ in range(random.choice((1, 2, 2, 3))):
            size = [1 if random.random() < 0.15 else n for n in shape]
            order = random.sample(range(len(size)), len(size)) if random.random() < 0.6 else range(len(size))
            x = torch.empty([size[i] for i in order]).permute([list(order).index(i) for i in range(len(size))])
            # A dimension of size 1 may have any stride, and PyTorch minds it.
            strides = [
                random.choice((1, 2, 6, 60)) if n == 1 and random.random() < 0.5 else s
                for n, s in zip(x.shape, x.stride(), strict=True)
            ]
            operands.append(x.as_strided(x.shape, strides))
        out = ops[len(operands)](*operands)
        shapes = [(tuple(x.shape), x.stride()) for x in operands]
        assert eager_strides(tuple(out.shape), shapes) == out.stride(), shapes


# ---- without torch ----


def test_shapes_of_a_decode():
    trace = _core.Trace.vae(MODELS["sdxl"], "diffusers", "decode", "float16", 512, 512)
    kept = left_by(trace)
    assert [(count, name) for _, _, count, name in kept] == [(3 * 512 * 512 * 2, "decoder.conv_out")]
    taken = {name: count for op, _, count, name in trace.steps if op == "take"}
    assert taken["decoder.up_blocks.2.upsamplers.0.conv [nearest 2x]"] == 256 * 512 * 512 * 2
    assert taken["decoder.mid_block.attentions.0 [attention]"] == 4 * 512 * 64 * 64  # the float sums came last
    assert ("float16", 1, 256, 512, 512, 256, 3, 1, 1, "nchw") in trace.convs
    given = [number for op, number, _, _ in trace.steps if op == "give"]
    assert len(set(given)) == len(given) and not {kept[0][1]} & set(given)


def test_what_encode_leaves():
    moments = 8 * 64 * 64 * 2
    left = left_by(_core.Trace.vae(MODELS["sd15"], "diffusers", "encode", "float16", 512, 512))
    assert [count for _, _, count, _ in left] == [moments, moments // 2, moments // 2, moments // 2]
    left = left_by(_core.Trace.vae(MODELS["flux"], "bfl", "encode", "float16", 512, 512))
    assert [count for _, _, count, _ in left] == [16 * 64 * 64 * 2]


def attention_call(dtype, heads, queries, keys, depth, batch=1, mask=None):
    """Of strides, only their order counts."""
    q, k = (((batch, heads, length, depth), (4, 3, 2, 1)) for length in (queries, keys))
    return dtype, q, k, k, mask, False, False


def test_bytes_that_move():
    """What is taken counts twice; a convolution's input, filters and output, and a norm's input, once more."""
    trace = _core.Trace()
    trace.take(100, "a")
    assert (trace.moved, trace.flops) == (200, 0)
    trace.conv(("float16", 2, 3, 8, 8, 5, 3, 2, 1, "nchw"), "strided")  # of 8x8 it makes 4x4
    assert trace.flops == 2 * 2 * 3 * 5 * 9 * 16
    assert trace.moved == 200 + 2 * (2 * 3 * 64 + 3 * 5 * 9 + 2 * 5 * 16)
    before, size = trace.moved, 2 * 4096 * 40 * 8
    trace.attend(attention_call("float16", 8, 4096, 4096, 40), "flash", 89, 128, "heads")
    assert trace.attended == 4 * 8 * 4096 * 4096 * 40 == trace.flops - 2 * 2 * 3 * 5 * 9 * 16
    assert trace.moved == before + 2 * (size + 4 * 8 * 4096)  # its output, and the log-sum-exp


def test_products_of_the_math_path_are_no_fused_attention():
    """Its scores are read and written once more where a mask is added, which is read."""
    taken, traces = [], [_core.Trace(), _core.Trace()]
    for trace, mask in zip(traces, (None, (64 * 32, 32, False)), strict=True):
        trace.attend(attention_call("bfloat16", 8, 64, 32, 40, mask=mask), "usual", 75, 40, "heads")
        assert trace.flops == 4 * 8 * 64 * 32 * 40 and trace.attended == 0
        assert [op for op, *_ in trace.steps].count("cublas") == 2
        taken.append(sum(count for op, _, count, _ in trace.steps if op == "take"))
    assert taken[0] == taken[1] and traces[0].moved == 2 * taken[0]
    assert traces[1].moved == traces[0].moved + 2 * 4 * 8 * 64 * 32 + 2 * 64 * 32


@pytest.mark.parametrize("runtime", ["diffusers", "comfyui", "a1111"])
def test_bytes_of_a_decode_are_those_of_its_tensors(runtime):
    """Every code moves about as much, though one activates in place and another makes two tensors of it; and twice as
    much in twice the bytes, or of twice the images."""

    def moved(dtype="float16", batch=1, code=runtime):
        return _core.Trace.vae(MODELS["sdxl"], code, "decode", dtype, 512, 512, batch).moved

    assert moved() == pytest.approx(moved(code="diffusers"), rel=0.25)
    assert moved("float32") == pytest.approx(2 * moved(), rel=0.02)  # the attention's float sums are left out
    assert moved(batch=2) == pytest.approx(2 * moved(), rel=0.1)  # two images have another format behind it


@pytest.mark.parametrize(
    "dtype, heads, queries, depth, kernel, sm, extra",
    [
        ("float16", 8, 4096, 40, "usual", 89, [4 * 8 * 4096]),  # flash: log-sum-exp
        ("float16", 1, 4096, 512, "usual", 89, [4 * 4096 * 512]),  # memory-efficient, wide: float sums
        ("float16", 8, 4096, 64, "efficient", 89, []),  # as with a mask: sums in registers
        ("float32", 1, 4096, 512, "usual", 89, []),
        ("float16", 8, 4096, 64, "usual", 75, []),  # no flash before 8.0
        (
            "bfloat16",
            1,
            64,
            8,
            "usual",
            75,
            [4 * 512] * 6 + [4 * 64 * 64] * 3 + [64 * 64, 64, 4, 4, 2 * 64 * 64],
        ),
    ],
)
def test_attention_takes(dtype, heads, queries, depth, kernel, sm, extra):
    trace = _core.Trace()
    out = trace.attend(attention_call(dtype, heads, queries, queries, depth), kernel, sm, 128, "attention")
    size = 4 if dtype == "float32" else 2
    counts = [count for op, number, count, _ in trace.steps if op == "take" and number != out]
    assert sorted(counts) == sorted(extra)
    assert [count for _, number, count, _ in left_by(trace) if number == out] == [heads * queries * depth * size]
    assert len(left_by(trace)) == 1


def test_flash_attention_splits_keys_when_queries_are_few():
    trace = _core.Trace()
    trace.attend(attention_call("float16", 1, 16, 8192, 64), "usual", 89, 128, "few queries")
    counts = [count for op, _, count, _ in trace.steps if op == "take"]
    assert len(counts) == 4  # output, log-sum-exp, both in parts
    parts = counts[2] // counts[1]
    assert parts > 1 and counts[3] == parts * 16 * 64 * 4


@pytest.mark.parametrize(
    "change, named",
    [
        ({"height": 500}, ("height", 500)),
        ({"width": 0}, ("height, width, batch, tile",)),
        ({"width": 1 << 24}, ("width", 16777216)),
        ({"batch": 0}, ("height, width, batch, tile",)),
        ({"tile": 20}, ("tile", 20)),
        ({"tile": 24}, ("tile", 24)),
        ({"op": "train"}, ("op", "'train'")),
        ({"dtype": "int8"}, ("dtype", "'int8'")),
        ({"runtime": "jax"}, ("runtime", "'jax'")),
        ({"runtime": "bfl"}, ("runtime", "bfl")),
        ({"runtime": "bfl", "arch": MODELS["flux"], "tile": 64}, ("tile",)),
        ({"runtime": "a1111", "slicing": True}, ("slicing",)),
        ({"runtime": "comfyui", "tile": 72}, ("tile", 72)),
        ({"runtime": "a1111", "arch": MODELS["flux"]}, ("runtime", "a1111")),
        ({"runtime": "comfyui", "arch": {**SMALL, "use_quant_conv": False}}, ("runtime", "comfyui")),
        (
            {"runtime": "a1111", "op": "encode", "tile": 512, "height": 8, "width": 4096},
            ("encoder.down.0.downsample.conv",),
        ),
        ({"tile": 1 << 21}, ("tile", 2097152)),
        *(({"tile": 64, "tile_overlap": part}, ("tile_overlap",)) for part in (-0.1, 0.9, 1.0, float("nan"))),
        ({"free_bytes": -1}, ("free_bytes", -1)),
        ({"arch": {**SMALL, "norm_num_groups": 7}}, ("config", 32, "block_out_channels[0]")),
        ({"arch": {"name": "nothing"}}, ("arch",)),
    ],
)
def test_what_cannot_be_is_named(change, named):
    call = {
        "arch": MODELS["sdxl"],
        "runtime": "diffusers",
        "op": "decode",
        "dtype": "float16",
        "height": 512,
        "width": 512,
    } | change
    with refused(*named):
        _core.Trace.vae(**call)


@pytest.mark.parametrize(
    "change, names",
    [
        ({}, ["4194304"]),
        ({"tile": 32, "height": 1 << 20, "width": 1 << 20}, ["65536", "43691 x 43691"]),
        ({"tile": 32, "height": 1 << 11, "width": 1 << 11, "batch": 16, "slicing": True}, ["86 x 86 "]),
        ({"slicing": True, "batch": 1 << 16, "tile": 64, "height": 512, "width": 1024}, ["65536"]),
    ],
)
def test_steps_are_bounded(change, names):
    call = {"height": 1 << 15, "width": 1 << 15, "tile": 512} | change
    with refused(names=names, kind=OverflowError):
        _core.Trace.vae(arch=MODELS["sdxl"], runtime="diffusers", op="decode", dtype="float16", **call)


def test_sizes_that_do_not_fit_are_refused():
    """Each of these products is a small number, or 0, modulo 2^64."""

    def overflows(method, *args):
        trace = _core.Trace()
        with refused(kind=OverflowError) as caught:
            getattr(trace, method)(*args, "x")
        assert caught.value.argument.partition(" ")[0] == "x"

    half, most = 1 << 32, (1 << 63) - 1
    overflows("take", (1 << 60) + 1)
    for batch, heads, queries, keys, depth in [
        (half, half, 64, 64, 64), (1, half, half, 64, 64), (1, 1, most, most, 8), (1, 1 << 20, 1 << 20, 16, 1 << 30),
    ]:  # fmt: skip
        for dtype, sm in [("float16", 89), ("float32", 89), ("bfloat16", 75)]:
            overflows("attend", attention_call(dtype, heads, queries, keys, depth, batch), "usual", sm, 128)
    overflows("attend", attention_call("float16", 1, 16, 1 << 59, 60), "usual", 89, 128)  # padded keys, few queries
    overflows("attend", attention_call("bfloat16", 1, half, half, 1), "usual", 75, 128)  # scores
    with refused("encoder.conv_in", kind=OverflowError):
        _core.Trace.vae(MODELS["sdxl"], "diffusers", "encode", "float32", 1 << 20, 1 << 20, 1 << 16)


@pytest.mark.parametrize(
    "runtime, op, change, match",
    [
        ("a1111", "decode", {"passing": PASSING}, ("passing", "a1111")),
        ("comfyui", "decode", {"first": "float16"}, ("first", "comfyui")),
        ("diffusers", "encode", {"first": "float16"}, ("first",)),
        ("diffusers", "decode", {"first": "int8"}, ("dtype", "'int8'")),
    ],
)
def test_what_is_diffusers_alone(runtime, op, change, match):
    with refused(*match):
        _core.Trace.vae(MODELS["sdxl"], runtime, op, "float32", 512, 512, **change)


@pytest.mark.parametrize("multiprocessors", [0, -1])
def test_a_gpu_has_multiprocessors(multiprocessors):
    with refused("multiprocessors", multiprocessors):
        _core.Trace().attend(attention_call("float16", 1, 16, 16, 64), "usual", 89, multiprocessors, "x")


def process(use="each", **device):
    allocator = CachingAllocator(**device)
    return allocator, Playing(allocator, 8519680, 1 << 20, use)


def test_a_run_on_an_allocator():
    trace = _core.Trace()
    x = trace.take(3 << 20, "x")
    trace.conv(("float16", 1, 8, 8, 8, 8, 3, 1, 1, "nchw"), "conv")
    trace.blas("product")
    trace.blas("fused", True)
    y = trace.take(1 << 20, "y")
    trace.give(x)
    allocator, core = process()
    left, allocated, reserved = core.call(trace, [5 << 20], [0])
    assert list(left) == [y] and not core.refused
    assert [n / (1 << 20) for n in allocated] == [3, 8, 11.125, 12.125, 12.125, 9.125]
    assert list(reserved) == sorted(reserved) and reserved[-1] == allocator.memory_reserved()
    assert allocator.memory_allocated() == allocated[-1]
    core.call(trace, [5 << 20], [0])
    assert allocator.memory_allocated() == allocated[-1] + (1 << 20)  # cuBLAS's workspace is taken once


@pytest.mark.parametrize("use, kept", [("each", 0), ("kept", 9.125), ("shared", 8.125)])
def test_cublaslt_by_version(use, kept):
    trace = _core.Trace()
    trace.blas("fused", True)
    allocator, core = process(use)
    core.call(trace, [], [])
    assert (allocator.memory_allocated() >> 10) / 1024 == kept
    core.reset_peak()
    assert [size / (1 << 20) for _, size, _ in core.baseline()] == {9.125: [8.125, 1], 8.125: [8.125], 0: []}[kept]


def test_a_full_device_gives_everything_back():
    trace = _core.Trace.vae(MODELS["sdxl"], "diffusers", "decode", "float16", 512, 512)
    allocator, core = process(total_memory=256 << 20)
    with pytest.raises(OutOfMemoryError) as caught:
        core.call(trace, *[[0] * len(trace.convs)] * 2)
    assert caught.value.requested >= 1 << 20 and caught.value.total == 256 << 20
    assert core.names[caught.value.tag].startswith("decoder.")
    live = allocator.memory_allocated()
    assert live == 8519680  # cuBLAS keeps its own


def test_the_next_plans_workspace():
    trace = _core.Trace()
    x = trace.take(30 << 20, "x")
    trace.conv(("float16", 1, 8, 8, 8, 8, 3, 1, 1, "nchw"), "conv")
    trace.give(x)
    full, core = process(total_memory=70 << 20)
    core.call(trace, [50 << 20], [40 << 20])
    assert core.refused == 1 and full.max_memory_allocated() == 70 << 20
    for following in (50, 60):
        full, core = process(total_memory=70 << 20)
        with pytest.raises(OutOfMemoryError) as caught:
            core.call(trace, [50 << 20], [following << 20])
        assert caught.value.requested == 50 << 20 and core.names[caught.value.tag] == "conv"
    with pytest.raises(OutOfMemoryError) as caught:
        core.call(trace, [50 << 20], [45 << 20])  # which does not fit either
    assert caught.value.requested == 45 << 20 and full.memory_allocated() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: _core.Trace.vae(SMALL, "diffusers", "decode", "float16", 96, 96, 1, 64),
        lambda: _core.Trace.vae(
            SMALL, "diffusers", "decode", "float32", 96, 96, 2, 64, True, first="float16", passing=PASSING
        ),
        lambda: _core.Trace.parameters(SMALL, "diffusers"),
    ],
)
def test_every_failing_allocation_is_said(make):
    for nth in range(1, 200):
        _core.fail_alloc_at(nth)
        try:
            make()
        except MemoryError:
            continue
        finally:
            left = _core.fail_alloc_at(0)
        assert left and nth > 5  # more allocations could have failed than there are: done
        return
    raise AssertionError("no end of allocations")


def test_long_names_keep_their_end():
    trace = _core.Trace()
    trace.take(1, "x" * 200 + ".conv")
    name = trace.steps[0][3]
    assert name.endswith("x.conv") and len(name) == 71
    with refused("id"):
        trace.give(7)
