"""GGUF files: every type beside the same weights in safetensors, what other programs write, damage, and memory."""

import math
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from errors import complains, refused
from test_weights_bad import MEASURE
from weights_files import FLUX_LIKE, SMALL, make, respell, same, tensors_of, write

from vaemem import VAE, _core
from vaemem.__main__ import main
from vaemem.engine import file_tensors, layouts, weights

pytestmark = pytest.mark.python

package = pytest.importorskip("gguf")
IDS = {name: number for number, name in file_tensors.KINDS.items()}

# ---- files ----


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def info(name, shape, dtype, offset):
    """A tensor in the header: its shape is given in PyTorch's order, and written the other way round."""
    number = IDS.get(dtype, dtype)
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset)


def value(name, kind, data):
    return text(name) + struct.pack("<I", kind) + data


def file_bytes(infos=(), values=(), data=b"", version=3, counts=None, alignment=32, magic=b"GGUF"):
    counts = counts or (len(infos), len(values))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


def pack(array, dtype):
    """A tensor's bytes in a type. Where the package cannot quantise, blocks of random bytes: each is a block."""
    kind = package.GGMLQuantizationType[dtype]
    try:
        return package.quants.quantize(array, kind)
    except NotImplementedError:
        numbers, size = file_tensors.BLOCKS[dtype]
        packed = np.random.default_rng(array.size).integers(0, 256, (array.size // numbers, size), np.uint8)
        return packed.reshape(*array.shape[:-1], array.shape[-1] // numbers * size)


def unpack(packed, dtype):
    with np.errstate(all="ignore"):
        return package.quants.dequantize(packed, package.GGMLQuantizationType[dtype]).astype(np.float32)


def write_gguf(path, tensors, dtype_of, reshape=False, alignment=32):
    """Written by the gguf package. dtype_of: of a name and a shape. reshape: rows of 256, and the shape that a tensor
    had as ComfyUI-GGUF writes it. The numbers that the file holds."""
    writer = package.GGUFWriter(path, "vae")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])  # what nobody asks for is passed over
    writer.add_array("tokenizer.ggml.scores", [0.5] * 100)
    held = {}
    for name, t in tensors.items():
        rows = t
        if reshape and t.ndim > 1 and t.size % 256 == 0 and t.shape[-1] % 256:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(t.shape))
            rows = t.reshape(-1, 256)
        dtype = dtype_of(name, rows.shape)
        packed = pack(rows, dtype)
        held[name] = unpack(packed, dtype).reshape(t.shape)
        writer.add_tensor(name, packed, raw_dtype=package.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def small(tmp_path, dtype="F32"):
    path = tmp_path / "a.gguf"
    return path, write_gguf(path, tensors_of(make()), lambda name, shape: dtype)


def blocks(dtype):
    """That type wherever a row is a whole number of its blocks; elsewhere float32."""
    return lambda name, shape: dtype if shape[-1] % file_tensors.BLOCKS[dtype][0] == 0 else "F32"


# ---- the same weights ----


def is_decoded(dtype):
    """Whether the installed package knows how."""
    kind = getattr(package.GGMLQuantizationType, dtype, None)
    return dtype in file_tensors.FLOATS or (kind is not None and kind in package.quants._type_traits)


DECODED = [dtype for dtype in file_tensors.READABLE if is_decoded(dtype)]


def test_the_types_are_there():
    assert {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q5_K", "Q6_K", "Q3_K"} <= set(DECODED)


def test_types_and_their_blocks_are_the_packages():
    for number, name in file_tensors.KINDS.items():
        if hasattr(package.GGMLQuantizationType, name):  # an older one lacks the newest
            theirs = package.GGMLQuantizationType(number)
            assert theirs.name == name and package.GGML_QUANT_SIZES[theirs] == file_tensors.BLOCKS[name]
    assert set(file_tensors.READABLE) <= set(file_tensors.KINDS.values())
    assert all(file_tensors.PIECE % file_tensors.BLOCKS[name][0] == 0 for name in file_tensors.BLOCKS)


@pytest.mark.parametrize("dtype", DECODED)
def test_parity_with_safetensors(tmp_path, dtype):
    """Bit for bit, of a model with tensors of more than one step, each shape as it was before its rows were made
    longer."""
    config = {"block_out_channels": (32, 128), "layers_per_block": 1}
    held = write_gguf(tmp_path / "a.gguf", tensors_of(make(config)), blocks(dtype), reshape=True)
    write(tmp_path / "a.safetensors", held)
    ours = weights.load(tmp_path / "a.gguf")
    same(ours, tensors_of(weights.load(tmp_path / "a.safetensors")))
    types = {name: (shape, kind, size) for name, shape, kind, size in weights.tensor_types(tmp_path / "a.gguf")}
    assert {name: shape for name, (shape, *_) in types.items()} == {name: t.shape for name, t in held.items()}
    large = "decoder.up_blocks.0.resnets.0.conv1.weight"
    numbers, size = file_tensors.BLOCKS[dtype]
    assert types[large][1:] == (dtype, 128 * 128 * 9 // numbers * size) and 128 * 128 * 9 > 2 * file_tensors.PIECE


def test_q8_0_by_hand(tmp_path):
    """A block is a float16 and 32 signed bytes that it scales."""
    held = tensors_of(make())
    name = "encoder.mid_block.attentions.0.to_q.weight"
    packed = np.random.default_rng(0).integers(0, 256, (64 * 64 // 32, 34), np.uint8)
    scales = np.linspace(-2, 2, len(packed)).astype("<f2")
    packed[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    held[name] = (scales.astype(np.float32)[:, None] * packed[:, 2:].view(np.int8)).reshape(64, 64)
    infos, data = [], b""
    for tensor, t in held.items():
        infos.append(info(tensor, t.shape, "Q8_0" if tensor == name else "F32", len(data)))
        data += packed.tobytes() if tensor == name else t.tobytes()
        data += b"\0" * (-len(data) % 32)
    (tmp_path / "a.gguf").write_bytes(file_bytes(infos, data=data))
    same(weights.load(tmp_path / "a.gguf"), held)


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
@pytest.mark.parametrize("layout", ["diffusers", "ldm", "bfl"])
@pytest.mark.parametrize("dtype", ["F16", "Q8_0", "Q4_0"])
def test_as_stable_diffusion_cpp_converts(tmp_path, layout, prefix, dtype):
    """Its ModelLoader::tensor_should_be_converted: names stay, biases too, and a type is given to what has whole blocks
    in a row: norms, and attention where it is a matrix, but no 3x3 convolution. Its writer leaves the last tensor
    without padding, and writes no values at all."""
    model = make(FLUX_LIKE if layout == "bfl" else SMALL)
    tensors = respell(tensors_of(model), layout, len(model.arch["block_out_channels"]))
    infos, data, held, kinds = [], b"", {}, set()
    for name, t in tensors.items():
        if layout != "diffusers" and t.ndim == 2:
            t = t.reshape(*t.shape, 1, 1)
        whole = t.shape[-1] % file_tensors.BLOCKS[dtype][0] == 0
        kind = dtype if whole and not name.endswith(".bias") else "F32"
        packed = pack(t, kind)
        held[name] = unpack(packed, kind).reshape(tensors[name].shape)
        data += b"\0" * (-len(data) % 32)
        infos.append(info(prefix + name, t.shape, kind, len(data)))
        data += packed.tobytes()
        kinds.add(kind)
    assert kinds == {"F32", dtype}
    path = tmp_path / "ae.gguf"
    path.write_bytes(file_bytes(infos, data=data))
    loaded, back = weights.load(path), respell(tensors_of(model), layout, len(model.arch["block_out_channels"]))
    assert layouts.detect({prefix + n: t.shape for n, t in back.items()})[:2] == (layout, prefix)
    names = dict(zip(back, tensors_of(model), strict=True))
    same(loaded, {names[name]: t for name, t in held.items()})


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment(tmp_path, alignment):
    held = write_gguf(tmp_path / "a.gguf", tensors_of(make()), blocks("Q5_1"), alignment=alignment)
    same(weights.load(tmp_path / "a.gguf"), held)


def test_version_2_is_read_and_any_name(tmp_path):
    path, held = small(tmp_path)
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    (tmp_path / "vae").write_bytes(data)
    same(weights.load(tmp_path / "vae"), held)


def test_half_of_it_and_a_config(tmp_path):
    path, held = small(tmp_path, "BF16")
    vae = VAE.load(path, config={**SMALL, "scaling_factor": 0.5}, parts="decoder")
    assert vae.arch["scaling_factor"] == 0.5
    same(vae._core, {n: t for n, t in held.items() if n.startswith(("decoder.", "post_quant_conv."))})


# ---- of the header alone ----


def test_tensor_types_of_a_file_of_any_size_without_its_numbers(tmp_path):
    """8 GB in a sparse file; the gguf package is not asked."""
    shapes = {"blk.0.attn_q.weight": (65536, 65536), "blk.0.norm.weight": (256,), "w": (3, 32768, 65536), "one": ()}
    kinds = ["Q8_0", "F32", "Q4_K", "I32"]
    infos, end, want = [], 0, []
    for (name, shape), dtype in zip(shapes.items(), kinds, strict=True):
        numbers, size = file_tensors.BLOCKS[dtype]
        nbytes = math.prod(shape) // numbers * size
        infos.append(info(name, shape, dtype, end))
        want.append((name, shape, dtype, nbytes))
        end += -(-nbytes // 32) * 32
    path = tmp_path / "large.gguf"
    path.write_bytes(file_bytes(infos))
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size + end)
    assert end > 8_000_000_000
    code = f"import sys; from vaemem.engine import weights; print(weights.tensor_types({str(path)!r}))"
    code += "; assert not {'gguf', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{want}\n", done.stderr


def test_tensor_types_of_safetensors(tmp_path):
    write(tmp_path / "a.safetensors", {"a": np.zeros((2, 3), np.float16), "b": np.zeros(4, np.int64)})
    assert sorted(weights.tensor_types(tmp_path / "a.safetensors")) == [
        ("a", (2, 3), "F16", 12),
        ("b", (4,), "I64", 32),
    ]


def test_info(tmp_path, capsys):
    write_gguf(tmp_path / "a.gguf", tensors_of(make()), blocks("Q8_0"))
    assert main(["info", str(tmp_path / "a.gguf"), "--sizes", "64"]) == 0
    said = capsys.readouterr().out
    assert "a.gguf: diffusers layout" in said and "tensors of F32, Q8_0" in said and "in_channels 3" in said


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("double_blocks.0.img_attn.qkv.weight", "a diffusion model"),
        ("model.diffusion_model.input_blocks.0.0.weight", "a diffusion model"),
        ("down_blocks.0.resnets.0.conv1.weight", "a diffusion model"),
        ("context_refiner.0.attention.out.weight", "a diffusion model"),
        ("blk.0.attn_q.weight", "a text encoder"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "a text encoder"),
    ],
)
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_a_file_of_another_part_of_the_pipeline(tmp_path, name, what, form, capsys):
    path = tmp_path / f"a.{form}"
    if form == "gguf":
        write_gguf(path, {name: np.zeros((32, 32), np.float32)}, blocks("Q8_0"))
    else:
        write(path, {name: np.zeros((32, 32), np.float32)})
    with refused("path", path=path, names=[what]):
        VAE.load(path)
    assert main(["info", str(path)]) == 2
    assert complains(capsys.readouterr().err, "info", names=[name, what])


# ---- without the package, or with one that is old ----


def test_without_the_package(tmp_path, monkeypatch):
    path, held = small(tmp_path, "BF16")
    write_gguf(tmp_path / "b.gguf", tensors_of(make()), blocks("Q8_0"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    same(weights.load(path), held)
    assert any(kind == "Q8_0" for _, _, kind, _ in weights.tensor_types(tmp_path / "b.gguf"))
    with refused(kind=ImportError, packages=("gguf",), install="pip install 'vaemem[gguf]'"):
        weights.load(tmp_path / "b.gguf")


@pytest.mark.parametrize("dtype", sorted(set(file_tensors.READABLE) - set(DECODED)))
def test_a_type_that_the_package_does_not_decode(tmp_path, dtype):
    infos, data = [], b""
    for name, shape in make().tensors:
        kind = dtype if shape == (64, 64) and name.startswith("encoder") else "F32"
        shape = (16, 256) if kind == dtype else shape
        numbers, size = file_tensors.BLOCKS[kind]
        infos.append(info(name, shape, kind, len(data)))
        data += b"\0" * (-(-math.prod(shape) // numbers * size // 32) * 32)
    values = [
        value(f"comfy.gguf.orig_shape.{name}", 9, struct.pack("<IQ2i", 5, 2, 64, 64))
        for name, shape in make().tensors
        if shape == (64, 64) and name.startswith("encoder")
    ]
    (tmp_path / "a.gguf").write_bytes(file_bytes(infos, values, data))
    with refused("path", dtype):
        weights.load(tmp_path / "a.gguf")


def test_other_types_are_named(tmp_path):
    shapes = dict(make().tensors)
    infos, data = [], b""
    for name, shape in shapes.items():
        kind = "F64" if name == "decoder.conv_in.bias" else "F32"
        infos.append(info(name, shape, kind, len(data)))
        data += b"\0" * (-(-math.prod(shape) * file_tensors.BLOCKS[kind][1] // 32) * 32)
    (tmp_path / "a.gguf").write_bytes(file_bytes(infos, data=data))
    with refused("path", names=["decoder.conv_in.bias"]):
        weights.load(tmp_path / "a.gguf")


# ---- damaged and hostile files ----

HUGE, MOST = 2**63, 2**64 - 1
U32, TEXT, LIST = 4, 8, 9
F32 = info("a", (4,), "F32", 0)
BAD = {
    "empty": (b"", None),
    "three_bytes": (b"GGU", None),
    "magic": (file_bytes(magic=b"GGML"), "b'GGML'"),
    "version_1": (file_bytes(version=1), 1),
    "version_4": (file_bytes(version=4), 4),
    "big_endian": (file_bytes(version=3 << 24), 50331648),
    "tensors_without_end": (file_bytes(counts=(MOST, 0)), None),
    "tensors_of_a_petabyte": (file_bytes([F32], counts=(2**45, 0)), None),
    "values_without_end": (file_bytes(counts=(0, MOST)), None),
    "one_tensor_too_many": (file_bytes([F32] * 2, counts=(3, 0), data=bytes(40)), None),
    "key_beyond_file": (file_bytes(values=[struct.pack("<Q", MOST) + bytes(64)]), None),
    "key_not_utf8": (file_bytes(values=[value(b"\xff\xfe", U32, bytes(4))]), "b'\\xff\\xfe'"),
    "value_type": (file_bytes(values=[value("a", 13, bytes(8))]), None),
    "text_beyond_file": (file_bytes(values=[value("a", TEXT, struct.pack("<Q", HUGE))]), None),
    "list_beyond_file": (file_bytes(values=[value("a", LIST, struct.pack("<IQ", U32, HUGE))]), None),
    "list_overflows_to_0": (file_bytes(values=[value("a", LIST, struct.pack("<IQ", U32, 2**62))]), None),
    "list_of_texts_beyond_file": (file_bytes(values=[value("a", LIST, struct.pack("<IQ", TEXT, HUGE))]), None),
    "list_of_lists": (file_bytes(values=[value("a", LIST, struct.pack("<IQ", LIST, 1) * 9)]), None),
    "value_twice": (file_bytes(values=[value("a", U32, bytes(4))] * 2), None),
    "alignment_0": (
        file_bytes(values=[value(file_tensors.ALIGNMENT_KEY, U32, bytes(4))]),
        None,
    ),
    "alignment_3": (
        file_bytes(values=[value(file_tensors.ALIGNMENT_KEY, U32, struct.pack("<I", 3))]),
        None,
    ),
    "alignment_text": (file_bytes(values=[value(file_tensors.ALIGNMENT_KEY, TEXT, text("32"))]), None),
    "alignment_float": (
        file_bytes(values=[value(file_tensors.ALIGNMENT_KEY, 6, struct.pack("<f", 32))]),
        None,
    ),
    "name_beyond_file": (file_bytes([struct.pack("<Q", HUGE) + bytes(64)]), None),
    "name_not_utf8": (file_bytes([info(b"\xc3(", (4,), "F32", 0)], data=bytes(16)), "b'\\xc3('"),
    "name_twice": (file_bytes([F32, F32], data=bytes(64)), None),
    "terminal_name": (file_bytes([info("\x1b[2J", (4,), 99, 0)], data=bytes(16)), 99),
    "dimensions": (file_bytes([info("a", (1,) * 6, "F32", 0)], data=bytes(4)), 6),
    "dimensions_huge": (file_bytes([text("a") + struct.pack("<I", 2**32 - 1) + bytes(99)]), 4294967295),
    "type": (file_bytes([info("a", (4,), 4, 0)], data=bytes(16)), 4),
    "type_huge": (file_bytes([info("a", (4,), 2**32 - 1, 0)], data=bytes(16)), 4294967295),
    "type_of_no_file": (file_bytes([info("a", (32,), 9, 0)], data=bytes(36)), 9),
    "row": (file_bytes([info("a", (32, 3), "Q8_0", 0)], data=bytes(102)), 3),
    "scalar_blocks": (file_bytes([info("a", (), "Q8_0", 0)], data=bytes(34)), 1),
    "shape_overflows": (file_bytes([info("a", (HUGE, HUGE, 4), "F32", 0)]), None),
    "shape_overflows_to_0": (file_bytes([info("a", (2**32, 2**32), "F32", 0)]), None),
    "bytes_overflow_to_0": (file_bytes([info("a", (2**31, 2**31), "F32", 0)]), None),
    "shape_beyond_file": (
        file_bytes([info("a", (5,), "F32", 0)], data=bytes(16)),
        None,
    ),
    "offset": (file_bytes([info("a", (4,), "F32", 32)], data=bytes(48)), 32),
    "offset_huge": (file_bytes([info("a", (4,), "F32", MOST)], data=bytes(48)), "18446744073709551615"),
    "offset_unaligned": (file_bytes([F32, info("b", (4,), "F32", 16)], data=bytes(32)), 16),
    "overlap": (file_bytes([F32, info("b", (4,), "F32", 0)], data=bytes(32)), 0),
    "hole": (file_bytes([F32, info("b", (4,), "F32", 64)], data=bytes(80)), 64),
    "trailing": (file_bytes([F32], data=bytes(33)), 97),
    "no_tensors_but_data": (file_bytes(data=bytes(33)), 65),
}
SHAPES = {
    "product": (5, struct.pack("<3i", 2, 2, 2)),
    "negative": (5, struct.pack("<2i", -2, -2)),
    "floats": (6, struct.pack("<2f", 2, 2)),
    "booleans": (7, bytes([1, 1, 1, 1])),
    "long": (5, struct.pack("<6i", 1, 1, 1, 1, 2, 2)),
}
for case, (kind, data) in SHAPES.items():
    sides = len(data) // struct.calcsize(file_tensors.SCALARS[kind])
    given = value("comfy.gguf.orig_shape.a", LIST, struct.pack("<IQ", kind, sides) + data)
    BAD[f"original_shape_{case}"] = (file_bytes([F32], [given], bytes(16)), None)
BAD["original_shape_text"] = (
    file_bytes([F32], [value("comfy.gguf.orig_shape.a", TEXT, text("2x2"))], bytes(16)),
    "None",
)


@pytest.mark.parametrize("case", BAD)
def test_bad_file(tmp_path, case):
    data, got = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with refused("path", got, path=path) as caught:
        weights.load(path, model="sdxl")
    assert str(caught.value).isprintable()
    with refused("path", path=path):
        weights.tensor_types(path)


def test_what_is_good_about_the_bad_ones(tmp_path):
    """The parts that they are made of are taken where nothing is wrong."""
    given = value("comfy.gguf.orig_shape.a", LIST, struct.pack("<IQ2i", 5, 2, 2, 2))
    many = value("b", LIST, struct.pack("<IQ", TEXT, 2) + text("x") + text(""))
    path = tmp_path / "good.gguf"
    path.write_bytes(file_bytes([F32, info("b", (0, 7), "F32", 32)], [given, many], bytes(16)))
    with refused("path", names=["256"]):  # it begins beyond the end
        weights.tensor_types(path)
    path.write_bytes(file_bytes([F32, info("b", (0, 7), "F32", 32)], [given, many], bytes(32)))
    assert weights.tensor_types(path) == [("a", (2, 2), "F32", 16), ("b", (0, 7), "F32", 0)]
    path.write_bytes(file_bytes([F32], [many], bytes(16)))
    assert weights.tensor_types(path) == [("a", (4,), "F32", 16)]
    path.write_bytes(file_bytes())
    assert weights.tensor_types(path) == []


def test_a_huge_header_is_not_read(tmp_path):
    """A text of 1 GB in a sparse file: it lies in the file, and is refused without memory of its size."""
    path = tmp_path / "huge.gguf"
    path.write_bytes(file_bytes(values=[value("a", TEXT, struct.pack("<Q", 1 << 30))]))
    with open(path, "r+b") as f:
        f.truncate(1 << 31)
    with refused("path", names=["1073741824", "100000000"]):
        weights.load(path)


def test_a_small_file_makes_no_large_model(tmp_path):
    """Shapes that claim much and hold little: refused by name before a model of their size is allocated."""
    infos, end = [], 0
    for name, shape in _core.Model(_core.models()["flux"], "all").tensors:
        shape = (65536, *[1] * (len(shape) - 1)) if ".resnets." in name else (0,)
        infos.append(info(name, shape, "F16", end))
        end += 2 * math.prod(shape)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(file_bytes(infos))
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size + end)  # sparse
    with refused("path", path=path, names=["conv2.weight", "(65536, 65536, 3, 3)"]):
        weights.load(path)


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_every_truncation_of_a_real_file(tmp_path, dtype):
    path = tmp_path / "a.gguf"
    write_gguf(path, tensors_of(make()), blocks(dtype))
    whole = path.read_bytes()
    with open(path, "rb") as file:
        last = max(tensor.at + tensor.nbytes for tensor in file_tensors.gguf_header(file)[0])
    for size in sorted({*range(0, 800, 7), *range(800, last, last // 60), last - 1}):
        path.write_bytes(whole[:size])
        with refused("path", path=path):
            weights.load(path)
    path.write_bytes(whole[:last])  # the padding of the last one may be missing
    assert weights.load(path).missing() == []


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    write_gguf(path, tensors_of(make()), blocks("Q8_0"))
    size, read = path.stat().st_size, file_tensors.read_tensor

    def cut(file, tensor, shape):
        if tensor.name == "encoder.conv_in.bias":
            with open(path, "r+b") as f:
                f.truncate(size // 8)
        return read(file, tensor, shape)

    monkeypatch.setattr(file_tensors, "read_tensor", cut)
    with refused("path", path=path):
        weights.load(path)


# ---- memory ----


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", DECODED)
def test_a_tensor_becomes_numbers_a_few_blocks_at_a_time(tmp_path, dtype):
    """What Python and NumPy take meanwhile: the largest tensor's numbers, and one step. All of its blocks
    decoded at once would take 7 MiB more, or above that."""
    tensors = tensors_of(make({"block_out_channels": (32, 256), "layers_per_block": 1}))
    write_gguf(tmp_path / "a.gguf", tensors, blocks(dtype), reshape=True)
    weights.load(tmp_path / "a.gguf")  # what is imported and set up once
    tracemalloc.start()
    try:
        weights.load(tmp_path / "a.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 256 * 256 * 9 * 4 + (2 << 20)  # a step took 1.3 MiB and less


@pytest.mark.resident
@pytest.mark.skipif(sys.platform != "linux", reason="the peak resident size is read from /proc")
def test_peak_memory_of_a_real_size(tmp_path):
    """SDXL's decoder in Q8_0, 50 MiB of 189, in a process: the packed copy and one tensor's numbers."""
    arch, blocks_of = _core.models()["sdxl"], blocks("Q8_0")
    model = _core.Model(arch, "decoder")
    weights.random_tensors(model, 0)
    path = tmp_path / "a.gguf"
    write_gguf(path, tensors_of(model), blocks_of, reshape=True)
    assert path.stat().st_size < 60 << 20
    write_gguf(tmp_path / "small.gguf", tensors_of(make()), blocks_of, reshape=True)
    code = MEASURE.replace("weights.save(model, small)\n", "")
    command = [sys.executable, "-c", code, "float32", tmp_path / "small.gguf", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak resident size")
    assert done.returncode == 0, done.stderr
    grown, reserved = map(int, done.stdout.split())
    largest, slack = 512 * 512 * 9 * 4, 2 << 20  # names, Python's own growth and one step of blocks: 0.5 MiB seen
    assert 0.9 * reserved < grown <= reserved + largest + slack
