"""mflux's memory: MLX's convolutions, its command buffers, and the ways of a plan."""

from __future__ import annotations

import pytest
from errors import refused

from vaemem import plan_pipeline
from vaemem.pipelines import by_mlx

pytestmark = [pytest.mark.core, pytest.mark.python]

GIB = 1 << 30


@pytest.mark.parametrize(("dtype", "gib"), [("bfloat16", 7.6), ("float32", 15.2)])
def test_the_note_on_mlx_gives_its_sizes(dtype, gib):
    """Its example: a 3x3 of 128 channels at 1536x2304, as one buffer of columns."""
    conv = by_mlx.MetalConv("a 3x3", 1536, 2304, 128, 128, 3)
    assert round(by_mlx.workspace(conv, dtype, "im2col") / GIB, 1) == gib


def test_the_largest_convolution_has_twice_the_channels_of_the_note():
    most = by_mlx.decode("flux", 1536, 2304, lowering="im2col", in_flight=0)
    assert most.workspace == 9 * 256 * 1536 * 2304 * 2 and most.at == "decoder.up_blocks.3.resnets.0.conv1"


def test_winograd_by_hand():
    """6 x 6 outputs a tile, 64 numbers each, of channels in and out; a padded input; 64 numbers a filter."""
    conv = by_mlx.MetalConv("a 3x3", 60, 90, 128, 256, 3)
    tiles = 10 * 15
    want = 2 * (62 * 92 * 128 + 64 * tiles * (128 + 256) + 64 * 128 * 256)
    assert by_mlx.workspace(conv, "bfloat16") == want
    for small in (conv._replace(height=45), conv._replace(c=120), conv._replace(k=64), conv._replace(r=1)):
        assert by_mlx.workspace(small, "bfloat16") == 0


def test_the_decoder_of_mlx_is_diffusers_decoder():
    """Its convolutions have the weights of the model's, but for the attention's."""
    weights = by_mlx.vae_bytes("flux", "decoder", "bfloat16") // 2
    counted = sum(conv.c * conv.k * conv.r**2 + conv.k for conv in by_mlx.convs("flux", 512, 512))
    attention = 4 * (512 * 512 + 512)
    norms = weights - counted - attention
    assert 0 < norms < 40_000
    assert by_mlx.vae_bytes("flux", "all", "float32") == 4 * 83_819_683


def test_a_decoder_with_other_channels_than_its_encoder():
    most = by_mlx.decode("flux2-small", 512, 512, lowering="im2col", in_flight=0)
    assert most.workspace == 9 * 192 * 512 * 512 * 2 and most.at == "decoder.up_blocks.3.resnets.0.conv1"


def test_attention_takes_over_where_images_are_large():
    assert by_mlx.decode("flux", 1024, 1024, in_flight=0).at.startswith("decoder.up_blocks")
    large = by_mlx.decode("flux", 4096, 4096, in_flight=0)
    assert large.at == "decoder.mid_block.attentions.0" and large.workspace == 2 * 512**4


@pytest.mark.parametrize(
    ("side", "megabytes"),
    [
        (1024, 9629),  # mflux's issue 407: whole, and tiles of 512 and 256
        (512, 2780),
        (256, 1930),
        (1536, 21000),  # its issue 734, on an M1 Max: "up to about 21 GB"
    ],
)
def test_published_peaks_of_mflux(side, megabytes):
    """Memory above the weights to decode with FLUX.2 klein's VAE in bfloat16."""
    assert by_mlx.decode("flux2", side, side).total / 1e6 == pytest.approx(megabytes, rel=0.021)


def test_command_buffers_hold_memory_until_they_are_done():
    """Three operations of ten numbers each. One after the other, an input and an output live at once. With two
    unfinished command buffers, everything lives at once."""
    for in_flight, want in ((0, 20), (1, 30), (2, 40), (9, 40)):
        queue = by_mlx._MetalQueue(1, in_flight)
        x = queue.allocate(by_mlx.BUFFER_NUMBERS)
        for _ in range(3):
            x = queue.encode(x, numbers=by_mlx.BUFFER_NUMBERS)
        assert queue.peak.total / by_mlx.BUFFER_NUMBERS == want / 10
    queue.encode(x)
    assert queue.peak.total / by_mlx.BUFFER_NUMBERS == 4  # written over its input


def test_a_mac_of_16_gb_does_not_run_klein_as_mflux_runs_by_default():
    """4.4 GB of 4-bit weights and the published decode pass the 10.7 GB that Metal recommends."""
    sizes = {"transformer": "2.2 GB", "text_encoder": "2.2 GB"}
    plan = plan_pipeline("flux2-klein", 1024, 1024, memory="16 GB", runtime="mlx", components=sizes)
    default = plan["mflux without options"]
    assert default.fails_in == "decode" and default.way.phases[-1].total / 1e6 == pytest.approx(14032, rel=0.02)
    least = plan["a script with a memory limit"]
    assert least.verdict == "tight" and least.way.phases[-1].total < default.way.phases[-1].total / 3
    assert plan.recommended.way.name == "--low-ram" and not plan.recommended.way.changes


def test_ways_of_mlx():
    """Weights that leave and a limit of the cache each change the decode by their own bytes."""
    plan = plan_pipeline("flux2-klein", 1536, 2304, memory="16 GB", runtime="mlx")
    limited = plan_pipeline("flux2-klein", 1536, 2304, memory="16 GB", runtime="mlx", cache_limit="1 GiB")
    last = {one.way.name: one.way.phases[-1] for one in plan.outcomes}
    vae = by_mlx.vae_bytes("flux2", "all", "bfloat16")
    low = last["--low-ram"]
    assert low.weights == vae and low.total - vae == by_mlx.decode("flux2", 1536, 2304).total
    assert last["mflux without options"].total - low.total == last["mflux without options"].weights - vae > 15 * 10**9
    assert last["--low-ram --vae-tiling"].added == by_mlx.decode("flux2", 512, 512).total
    assert limited["--low-ram"].way.phases[-1].total - low.total == GIB
    assert plan.machine is None and any("Not known for MLX" in note for note in plan.notes)


def test_low_ram_tiles_unless_the_vae_is_flux2s():
    plan = plan_pipeline("flux-dev", 1024, 1024, memory="64 GB", runtime="mlx")
    assert plan["--low-ram"].way.changes and not plan["mflux without options"].way.changes
    small = plan_pipeline("flux-dev", 512, 512, memory="64 GB", runtime="mlx")
    assert not small["--low-ram"].way.changes  # one tile


def test_components_that_mflux_does_not_have_are_refused():
    with refused("components", "'unet'"):
        plan_pipeline("flux", 1024, 1024, memory="64 GB", runtime="mlx", components={"unet": "bfloat16"})


def test_pipelines_that_mflux_does_not_have_are_refused():
    with refused("pipeline", "'sdxl'", names=["zimage-turbo"]):
        plan_pipeline("sdxl", 1024, 1024, memory="16 GB", runtime="mlx")
