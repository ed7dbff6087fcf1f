"""cuda.h as the host has it: the kernels' arguments, and what it chooses to launch."""

import ctypes
import itertools

import pytest
from cuda_kernels import (
    ARGS,
    F32_NCHW,
    H200,
    ROWS,
    SM_75,
    SM_80,
    SM_86,
    SM_90,
    U8_NHWC,
    ConvArgs,
    conv_tiles,
    header,
    number,
)

NARROW = (16, 16, 1)  # the tile that knows the user's pixels


def test_arguments_lie_as_in_the_header():
    want = []
    for args in ARGS.values():
        want += [ctypes.sizeof(args), *(getattr(args, field).offset for field, _ in args._fields_)]
    assert list((ctypes.c_size_t * len(want)).in_dll(header(), "layout")) == want


@pytest.mark.parametrize(
    "dtype,largest,queries,keys",
    [
        ("f32", SM_75, 64, 64),
        ("f32", SM_90, 64, 64),
        ("f16", SM_75, 32, 64),
        ("f16", SM_86, 64, 64),
        ("f16", 163 << 10, 64, 128),
        ("bf16", SM_75, 0, 0),
        ("bf16", SM_86, 64, 64),
        ("bf16", SM_90, 64, 128),
        ("f32", 48 << 10, 0, 0),
        ("f16", 48 << 10, 0, 0),
    ],
)
def test_choice_of_attention(dtype, largest, queries, keys):
    shape = header().attention_choose(number(dtype), largest, False)
    assert (shape.queries, shape.keys, shape.pairs) == (queries, keys, False)
    hopper = header().attention_choose(number(dtype), largest, True)
    assert hopper.pairs == (largest == SM_90 and dtype != "f32")
    assert hopper.pairs or (hopper.queries, hopper.keys) == (queries, keys)


def test_pairs_of_blocks():
    """As many as hold all queries; an even number."""
    shape = header().attention_choose(number("bf16"), SM_90, True)
    assert [header().attention_blocks(shape, n) for n in (1, 64, 65, 128, 129, 16384)] == [2, 2, 2, 2, 4, 256]
    shape = header().attention_choose(number("bf16"), SM_90, False)
    assert [header().attention_blocks(shape, n) for n in (1, 64, 65, 129)] == [1, 1, 2, 3]


def geometry(h, w, in_c, out, k=3, stride=1, up=False, format=ROWS):
    step = 2 if up else 1
    return ConvArgs(
        x_h=h, x_w=w, x_pitch=in_c, in_c=in_c, y_h=h * step // stride, y_w=w * step // stride, y_c=out,
        k=2 if up else k, stride=stride, up=up, format=format,
    )  # fmt: skip


@pytest.mark.parametrize(
    "dtype,most,pass_,in_place,want",
    [
        ("bf16", SM_90, (1024, 1024, 128, 128), False, (16, 64, 1)),
        ("bf16", SM_90, (512, 512, 256, 256, 3, 1, True), False, (16, 64, 1)),
        ("bf16", SM_90, (1024, 1024, 128, 3), False, (16, 16, 1)),
        ("bf16", SM_90, (1024, 1024, 128, 3, 3, 1, False, U8_NHWC), False, NARROW),
        ("bf16", SM_90, (128, 128, 512, 32, 3, 1, False, F32_NCHW), False, NARROW),
        ("f16", SM_86, (128, 128, 512, 32, 3, 1, False, F32_NCHW), False, NARROW),
        ("f16", SM_75, (128, 128, 512, 32, 3, 1, False, F32_NCHW), False, (0, 0, 0)),
        ("bf16", SM_90, (128, 128, 512, 512), False, (16, 128, 1)),
        ("bf16", SM_90, (8, 8, 512, 512), False, (4, 64, 1)),
        ("bf16", SM_90, (1024, 1024, 128, 128, 3, 2), False, (8, 128, 2)),
        ("bf16", SM_80, (1024, 1024, 128, 128, 3, 2), False, (4, 64, 2)),
        ("f16", SM_80, (1024, 1024, 128, 128), False, (16, 128, 1)),
        ("bf16", SM_90, (1024, 1024, 64, 64), False, (16, 64, 1)),
        ("bf16", SM_80, (1024, 1024, 256, 256), False, (16, 128, 1)),  # no room there for two blocks of 16x64
        ("f16", SM_86, (1024, 1024, 128, 128), False, (8, 128, 1)),
        ("f16", SM_86, (1024, 1024, 128, 128, 3, 2), False, (4, 64, 2)),
        ("f16", SM_75, (1024, 1024, 128, 128), False, (4, 64, 1)),
        ("f16", SM_75, (1024, 1024, 128, 128, 3, 2), False, (0, 0, 0)),
        ("f16", 48 << 10, (1024, 1024, 128, 128), False, (0, 0, 0)),
        ("f32", SM_90, (1024, 1024, 128, 128), False, (0, 0, 0)),
        ("bf16", SM_90, (1024, 1024, 256, 128, 1), True, (16, 128, 1)),
        ("bf16", SM_90, (512, 512, 512, 256, 1), True, (8, 256, 1)),
        ("bf16", SM_86, (512, 512, 512, 256, 1), True, (4, 256, 1)),
        ("bf16", SM_90, (512, 512, 1024, 512, 1), True, (0, 0, 0)),
        ("bf16", SM_90, (512, 512, 512, 256), True, (0, 0, 0)),
        ("bf16", SM_90, (512, 512, 128, 128, 5), False, (0, 0, 0)),
        ("bf16", SM_90, (16, 16, 1 << 16, 7280), False, (8, 128, 1)),
        ("bf16", SM_90, (16, 16, 1 << 16, 7296), False, (0, 0, 0)),  # of 9 * 2^16 * 7296 = 2^32 and more numbers
        ("bf16", SM_90, (512, 512, 128, 128, 3, 3), False, (0, 0, 0)),
    ],
)
def test_choice_of_tile(dtype, most, pass_, in_place, want):
    tile = header().conv_choose(number(dtype), geometry(*pass_), in_place, most, H200)
    assert (tile.rows, tile.outs, tile.stride) == want
    assert tile.shared == (conv_tiles()[want].shared if want[0] else 0) <= most


def test_filters_in_blocks_always_have_a_tile():
    """cuDNN cannot read them: whatever 3x3 convolution has such filters, a tile of ours computes it."""
    for dtype, stride, up, out, in_c, side in itertools.product(
        ("f16", "bf16"), (1, 2), (False, True), (16, 48, 128, 272, 1024), (16, 64, 528, 1024), (1, 9, 64, 1030)
    ):
        for format in (ROWS, F32_NCHW, U8_NHWC):
            if (up and (stride == 2 or format != ROWS)) or (stride == 2 and format != ROWS):
                continue  # no pass is that
            args = geometry(side, side, in_c, out, 3, stride, up, format)
            args.blocked = True
            tile = header().conv_choose(number(dtype), args, False, SM_90, H200)
            assert tile.rows and (len(tile.name) == 3 or (stride == 1 and format == ROWS))


def test_grid():
    """Tiles of pixels are parts; blocks share the items among themselves."""
    args = geometry(17, 33, 64, 130)
    tile = conv_tiles()[16, 128, 1]
    assert header().conv_parts(args, tile) == 6 and header().conv_items(args, tile) == 12
    args.items = 12
    assert header().conv_grid(args, tile, 4) == 4 and header().conv_grid(args, tile, 132) == 12
    args = geometry(17, 33, 64, 130, up=True)
    assert header().conv_parts(args, tile) == 24 and header().conv_items(args, tile) == 48
