"""Simulated buffers of stable-diffusion.cpp next to its own (benchmarks/recording/sdcpp_buffers.py)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from errors import refused

from vaemem.sdcpp.ggml import GGML_COMMIT, Node, flash_attn_ext, mul_mat, nodes_of, reserve
from vaemem.sdcpp.graphs import (
    COMPONENTS,
    DEFAULT_TILE,
    GGML_TYPES,
    SDCPP_COMMIT,
    Builder,
    compute_buffer,
    graph,
    tile_count,
)

pytestmark = pytest.mark.python

MIB = 1 << 20
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "sdcpp_buffers.csv"
FLAGS = ("conv_direct", "flash", "conv_scale")


def measured():
    """(component, options of graph, the measured row) of every row."""
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            options = {name: row[name] for name in ("model", "backend", "weight_type") if row[name]}
            options |= {name: int(row[name]) for name in ("height", "width", "tokens") if int(row[name])}
            yield row["component"], options | {name: row[name] == "1" for name in FLAGS}, row


ROWS = list(measured())


@pytest.mark.parametrize("component", COMPONENTS)
def test_buffers_and_weights_are_those_that_it_reserves(component):
    """To the byte, for each component, on a CPU and as on CUDA, at odd sizes and where attention takes most."""
    rows = [(options, row) for name, options, row in ROWS if name == component]
    assert len(rows) >= 4
    for options, row in rows:
        found = graph(component, **options)
        assert (found.buffer, found.weights) == (int(row["buffer"]), int(row["weights"])), options


def test_the_rows_are_of_the_commits_that_are_simulated():
    assert {(row["commit"], row["ggml"]) for *_, row in ROWS} == {(SDCPP_COMMIT[:7], GGML_COMMIT[:7])}


def test_its_own_logs():
    """6656.25 MB for SDXL's decode at 1024x1024 (its pull request 890) and 176 for a tile with direct convolutions
    (issue 1154) stand in logs that others posted."""
    assert compute_buffer("vae-decoder", 1024, 1024, model="sdxl") // (MIB // 4) == 4 * 6656.25
    assert compute_buffer("vae-decoder", model="sdxl", conv_direct=True, tile=DEFAULT_TILE) // MIB == 176


def test_the_table_in_the_docs():
    """MiB at 1024x1024: plain, with flash attention, with direct convolution, weights."""
    cases = {
        "VAE decode (FLUX": ("vae-decoder", {}),
        "VAE decode, tiles": ("vae-decoder", {"tile": 32}),
        "VAE encode": ("vae-encoder", {}),
        "Z-Image": ("zimage", {"tokens": 20, "weight_type": "q8_0"}),
        "FLUX.1": ("flux-dev", {"weight_type": "q8_0"}),
        "UNet": ("unet-sdxl", {}),
        "Qwen3": ("qwen3-4b", {"tokens": 10, "weight_type": "q8_0"}),
    }
    text = (Path(__file__).parents[1] / "docs" / "GGML.md").read_text("utf-8")
    for name, (component, options) in cases.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {name}"))
        said = [cell.strip() for cell in line.strip("|").split("|")][1:]
        found = [graph(component, **options, **more) for more in ({}, {"flash": True}, {"conv_direct": True})]
        numbers = [found[0].buffer, found[1].buffer, found[2].buffer, found[0].weights]
        assert all(not cell or cell == f"{n / MIB:.2f}" for cell, n in zip(said, numbers, strict=True)), line


def test_tiles_take_what_images_of_their_size_take():
    for component, side in (("vae-decoder", 256), ("vae-encoder", 328)):
        tiled = compute_buffer(component, 2048, 1024, conv_direct=True, tile=DEFAULT_TILE)
        assert tiled == compute_buffer(component, side, side, conv_direct=True)
    assert compute_buffer("vae-decoder", 64, 128, tile=32) == compute_buffer("vae-decoder", 64, 128)


def test_z_image_on_a_card_of_12_gib():
    """1024x1024 in Q8_0: what lies there together in a phase, without context and cuBLAS. The text encoder has to leave
    before attention can store its scores, and im2col decodes only after the diffusion model has left, too."""
    card = 12 * 1024

    def taken(running, *staying):
        return (running.buffer + running.pool + sum(g.weights for g in (running, *staying))) / MIB

    text = graph("qwen3-4b", tokens=10, weight_type="q8_0")
    plain, flash = (graph("zimage", tokens=10, weight_type="q8_0", flash=flag) for flag in (False, True))
    im2col, direct = (graph("vae-decoder", conv_direct=flag) for flag in (False, True))
    assert taken(plain, text, im2col) > card > taken(flash, text, im2col) > 10900
    assert taken(plain, im2col) < 8800
    assert taken(im2col, plain) > card > taken(direct, plain) + 3000
    assert taken(im2col) < 7400


def test_as_many_tiles_as_it_makes():
    """Latent pixels of a side, of a tile, their overlap, and how often its tiling called back."""
    cases = [(120, 32, 0.5, 6), (64, 64, 0.5, 1), (71, 64, 0.5, 2), (99, 41, 0.25, 3), (295, 33, 0, 9)]
    for side, tile, overlap, count in cases:
        assert tile_count(side, tile, overlap) == count
    assert graph("vae-decoder", 1024, 512, tile=DEFAULT_TILE).runs == 7 * 3
    assert graph("vae-decoder", 1024, 1024).runs == graph("unet-sd15").runs == 1


def test_flops_are_those_of_the_layers():
    """By hand: a linear layer, a convolution, attention, 35 layers of Qwen3, and what in a VAE grows by the square."""
    runner = Builder()
    assert runner.measure(runner.linear(runner.input(64, 10), 32)).flops == 2 * 64 * 32 * 10
    for flag in (False, True):
        runner = Builder(conv_direct=flag)
        assert runner.measure(runner.conv(runner.input(8, 6, 16), 32, stride=2)).flops == 2 * 9 * 16 * 32 * 4 * 3
    heads = Node("", (64, 10, 2))
    for scores in (mul_mat(heads, heads), flash_attn_ext(heads, heads, heads)):
        assert scores.flops == 2 * 64 * 10 * 10 * 2 * (1 if scores.op == "mul_mat" else 2)
    hidden, inner, tokens = 2560, 9728, 10
    layer = 2 * tokens * (hidden * (2 * 4096 + 2 * 1024) + 3 * hidden * inner) + 4 * tokens * tokens * 4096
    assert graph("qwen3-4b", tokens=tokens).flops == 35 * layer
    pairs = 4 * 512 * ((128 * 128) ** 2 - 4 * (64 * 64) ** 2)  # queries times keys, then values
    assert graph("vae-decoder", 1024, 1024).flops - 4 * graph("vae-decoder", 512, 512).flops == pairs


def test_pool_holds_the_largest_product():
    """im2col's product of 256 channels at full size as float16; factors of 10240 as q8_1 for a quantised weight."""
    assert graph("vae-decoder", 1024, 1024).pool == 2 * 256 * 1024 * 1024
    assert graph("vae-decoder", 1024, 1024, conv_direct=True).pool == 0
    assert graph("vae-decoder", 1024, 1024, backend="cpu").pool == 0
    rows = 64 * 64 + 32
    assert graph("zimage", tokens=20, weight_type="q8_0").pool == rows * 10240 * 36 // 32 + 128 * 144
    assert graph("zimage", tokens=20, weight_type="f32").pool == 0


def test_a_result_takes_the_place_of_a_source_that_nobody_else_wants():
    x = Node("", (256,))
    assert reserve(x.apply("scale").apply("unary")) == 1024
    assert reserve(x.apply("norm").apply("scale")) == 2048
    y = x.apply("scale")
    assert reserve(y.apply("add", y.apply("unary"))) == 2048  # both read y
    assert reserve(x.write("scale").apply("unary")) == 2048  # a view is never replaced
    assert reserve(y.view(256).concat(y.apply("unary"), 0)) == 4096  # nor what a view still shows
    assert reserve(Node("", (256,), placed=True).apply("scale")) == 1024  # nor what lies elsewhere


def test_memory_is_free_after_the_last_use_and_given_to_the_best_fit():
    big, small, other = (Node("", (n,)) for n in (1024, 256, 128))
    total = big.apply("norm").make("sum", 1).apply("add", small.make("sum", 1)).apply("add", other.make("sum", 1))
    assert reserve(total) == 4096 + 1024 + 512 + 4096  # the inputs first, then the norm; sums lie where big was
    assert [node.op for node in nodes_of(total)] == ["", "norm", "sum", "", "sum", "add", "", "sum", "add"]
    assert reserve(Node("", (1,)), [Node("", (1,))], "cpu") == 64


def test_shapes():
    x = Node("", (4, 6, 5))
    assert x.permute(2, 0, 1, 3).ne == (6, 5, 4, 1) and not x.permute(2, 0, 1, 3).is_dense
    assert x.permute(2, 0, 1, 3).cont().is_dense and x.view(4, 2, 5).ne == (4, 2, 5, 1)
    assert mul_mat(Node("", (4, 7)), x).ne == (7, 6, 5, 1)
    assert flash_attn_ext(x, x, x).ne == (4, 5, 6, 1)
    with refused("reshape", names=["120"]):
        x.permute(2, 0, 1, 3).reshape(120)
    with refused("reshape", names=["120"]):
        x.reshape(7, 2)


@pytest.mark.parametrize(
    ("component", "options", "words"),
    [
        ("vae", {}, ("component", "'vae'")),
        ("zimage", {}, ("tokens of zimage", "None")),
        ("zimage", {"tokens": 20, "tile": 32}, ("tile", 32)),
        ("zimage", {"tokens": 20, "height": 1001}, ("height",)),
        ("zimage", {"tokens": 20, "weight_type": "int4"}, ("weight_type", "'int4'")),
        ("unet-sdxl", {"width": 1000}, ("width", 1000)),
        ("unet-sdxl", {"tokens": 0}, ("tokens of unet-sdxl", 0)),
        ("clip-l", {"tokens": 154}, ("tokens of clip-l", 154)),
        ("t5-xxl", {"backend": "vulkan"}, ("backend", "'vulkan'")),
        ("vae-decoder", {"tile": 3}, ("tile", 3)),
        ("vae-decoder", {"model": "sd2"}, ("model", "'sd2'")),
        ("vae-decoder", {"height": 100}, ("height",)),
    ],
)
def test_what_cannot_be_is_refused(component, options, words):
    with refused(*words):
        graph(component, **options)


def test_weights_of_no_whole_blocks_are_float32():
    sizes = {}
    for kind in GGML_TYPES:
        runner = Builder(kind, backend="cpu")
        runner.linear(Node("", (320, 1)), 64, bias=False)
        sizes[kind] = runner.weights
    assert sizes["q4_K"] == sizes["f32"] == 4 * 320 * 64 and sizes["q8_0"] == 34 * 10 * 64
