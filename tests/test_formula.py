"""PyTorch's peak in closed form: against figures worked out by hand, the simulation at other sizes, measurements."""

import csv
import json
from fractions import Fraction
from importlib import resources

import pytest
from errors import refused

import vaemem.prediction.closed_form as derivation
from vaemem.prediction.formula import formula
from vaemem.prediction.laws import symbols_at, value_of
from vaemem.prediction.predict_vae import predict

pytestmark = pytest.mark.python

MIB = 1 << 20
L = {4: Fraction(4, 64 * 128), 16: Fraction(16, 64 * 128)}  # latents in T, by channels

# model, op, dtype, T, bytes that the convolution's workspace adds (filter, 16 of cuDNN's own), what the allocator adds
# at 1024x1024: the figures worked out by hand, None where they are not given to the byte
FACTS = [
    ("sd15", "encode", "float16", 6, 0.28125 * MIB + 16, 0),
    ("sdxl", "encode", "bfloat16", 6, 0.28125 * MIB + 16, 0),
    ("flux", "encode", "float16", 6, 0.28125 * MIB + 16, 0),
    ("sdxl", "encode", "float32", 5, 0.5625 * MIB + 16, 0),
    ("sdxl", "decode", "float16", Fraction(19, 2) + L[4], 1.125 * MIB + 16, None),
    ("sdxl", "decode", "float32", Fraction(15, 2) + L[4], 2.25 * MIB + 16, None),
    ("flux", "decode", "float16", Fraction(17, 2) + L[16], 1.125 * MIB + 16, 0.875 * MIB - 512),
    ("flux", "decode", "float32", 7 + L[16], 1.125 * MIB + 16, None),
]


def closed(*given, **more):
    return formula(*given, **more).closed


ODD = [(832, 1216), (720, 1280), (896, 1152), (1344, 768), (600, 1400), (1472, 704)]  # the first two are in HELD_OUT


@pytest.mark.parametrize(("model", "op", "dtype", "t", "b", "added"), FACTS)
def test_facts(model, op, dtype, t, b, added):
    runtime = {"runtime": "bfl"} if model == "flux" else {}
    f = closed(model, op, dtype, **runtime)
    assert f.t == t
    assert f.b == b
    activation = 128 * 1024 * 1024 * f.element_bytes
    rounded = 512 - 16  # the workspace's 16 bytes are all that is no multiple of 512 at this size
    assert f.predict(1024, 1024) == t * activation + b + rounded
    if added is not None:
        assert predict(model, op, 1024, 1024, dtype, **runtime).allocated == f.predict(1024, 1024) + added


def test_facts_where():
    """What is alive at two peaks, and the FLUX encoder's list of activations."""
    f = closed("sdxl", "encode", "float16")
    assert {term.name: term.coefficient / 128 for term in f.terms} == {
        "encoder.conv_in": 1,  # the caller's sample
        "encoder.down_blocks.0.resnets.0": 1,
        "encoder.down_blocks.0.resnets.1.norm1 [silu]": 1,
        "encoder.down_blocks.0.resnets.1.conv1": 1,
        "encoder.down_blocks.0.resnets.1.conv1 [workspace]": 2,
    }
    assert f.terms[0].where == "encoder.down_blocks.0.resnets.1.conv1"
    f = closed("flux", "encode", "float32", "bfl")
    assert f.where == "encoder.down.2.block.1.conv1 [workspace]"
    assert f.t == pytest.approx(6.125, abs=1e-3)  # above 6.125 by an index of cuDNN's, a byte for each 32 pixels
    added = predict("flux", "encode", 1024, 1024, "float32", runtime="bfl").allocated - 6.125 * 128 * 1024 * 1024 * 4
    assert added == pytest.approx(10 * MIB, abs=0.1 * MIB)  # the fact is given to two digits
    assert f.b + f.unsplit[0] <= added <= f.b + f.unsplit[1] + 0.1 * MIB


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", ODD)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("model", "op"), [("sd15", "decode"), ("sdxl", "encode"), ("flux", "encode"), ("flux", "decode")]
)
def test_odd_sizes(model, op, dtype, size):
    """At sizes that are no squares of 64 the form lacks only what the allocator leaves unsplit."""
    f = closed(model, op, dtype)
    p = predict(model, op, *size, dtype)
    rest = p.allocated - f.predict(*size)
    if size in f.checked:
        assert f.unsplit[0] <= rest <= f.unsplit[1]
    assert 0 <= rest <= len(f.terms) * MIB  # the caching allocator splits a block that would leave more than 1 MiB
    simulated = dict(p.peak_tensors)
    pixels = size[0] * size[1] * f.element_bytes
    for term in f.terms:
        # cuDNN rounds the index of a convolution to its tiles: within the allocator's granule
        assert abs(term.coefficient * pixels + term.constant - simulated[term.name]) <= 512, term


def test_measured():
    """The seed table's FLUX rows: measured on a GPU, never seen by the derivation."""
    rows = list(csv.DictReader((resources.files("vaemem") / "data" / "seed_table.csv").read_text().splitlines()))
    forms = {}
    seen = 0
    for row in rows:
        key = row["model"].lower(), row["op"], row["dtype"]
        if key[0] != "flux" or key[1] not in ("encode", "decode"):
            continue
        f = forms[key] = forms.get(key) or closed(*key, "bfl")
        height, width = int(row["height"]), int(row["width"])
        if not f.lowest <= height <= f.highest:
            continue
        least, most = (f.predict(height, width) + added for added in f.unsplit)
        measured = float(row["allocated_mib"]) * MIB
        # The table has two decimals; its process had a history that the form's fresh one lacks: another unsplit block.
        slack = 0.01 * MIB + MIB
        assert least - slack <= measured <= most + slack, row
        seen += 1
    assert seen >= 20


def test_range():
    """At the ends of the range the tensors are the form's; one step out they are not, and the form says what rules."""
    f = closed("flux", "encode", "float16", "bfl")
    names = {term.name for term in f.terms}

    def live(side):
        return {name for name, _ in predict("flux", "encode", side, side, "float16", runtime="bfl").peak_tensors}

    assert names <= live(f.lowest) and names <= live(f.highest)
    out = f.lowest - 64
    assert f.lowest > 64 and not names <= live(out)
    above = 4096  # the largest that is looked at: there images of 2^31 elements take no workspace
    assert f.below.startswith(f"at {out}x{out} encoder.") and f.above.startswith(f"at {above}x{above} encoder.")
    with refused("height * width", f"{out}x{out}", names=[f.lowest, f.highest]):
        f.predict(out, out)
    assert f.below.removeprefix(f"at {out}x{out} ") in live(out)
    # sizes that are no multiple of 64 may fall outside of it, which the form tells of those it looked at
    assert f.elsewhere == ((1000, 1000),)
    assert not names <= {
        name for name, _ in predict("flux", "encode", 1000, 1000, "float16", runtime="bfl").peak_tensors
    }


def test_attention():
    """bfloat16 on a T4: PyTorch's own attention holds the scores, and they rule from some size on."""
    f = closed("sdxl", "decode", "bfloat16", gpu="T4", height=2048, width=2048)
    squares = [term for term in f.terms if term.square]
    assert [term.name for term in squares] == ["decoder.mid_block.attentions.0 [attention]"]
    # scores of (H*W/64)^2 elements, at least in their own dtype and once in half precision after it
    assert squares[0].square >= Fraction(2, 64**2)
    p = predict("sdxl", "decode", 1920, 2176, "bfloat16", gpu="T4")
    assert 0 <= p.allocated - f.predict(1920, 2176) <= len(f.terms) * MIB
    assert "(H*W)^2" in str(f) and "(H W)^2" in f.latex()


class _Scratch:
    """Workspaces as a test wants them."""

    cudnn_version = None

    def __init__(self, count):
        self.count = count

    def conv(self, dtype, n, c, h, w, k, r, stride=1, padding=1, layout="nchw"):
        return self.count(c, h, w, k, r), "test"


def test_follows_the_workspace():
    """Nothing of the form is fixed: with other workspaces it is another."""
    copy = closed("sdxl", "decode", "float16", workspace=_Scratch(lambda c, h, w, k, r: 2 * c * h * w))
    # the last upsampler: the caller's sample T, 0.5 T in, 2 T upsampled, its copy, 2 T out
    assert copy.t == Fraction(15, 2) + L[4] and copy.b == 0
    much = closed("sdxl", "encode", "float16", workspace=_Scratch(lambda c, h, w, k, r: 7 * h * w + 5120))
    more = closed("sdxl", "encode", "float16", workspace=_Scratch(lambda c, h, w, k, r: 777 * h * w + 5120))
    assert (much.a, more.a - 4 * 128, more.b) == (5 * 128, Fraction(777, 2), 5120)
    padded = closed("sdxl", "encode", "float16", workspace=_Scratch(lambda c, h, w, k, r: 4096 * (h + 2) * (w + 2)))
    term = padded.terms[0]
    assert (term.coefficient, term.edge, term.constant) == (2048, 4096, 16384)


def test_breaks():
    """Where the same convolution takes another workspace, and where it has none, the range ends and says so."""
    change = closed(
        "sdxl", "encode", "float16", workspace=_Scratch(lambda c, h, w, k, r: (600 if h < 2048 else 700) * h * w)
    )
    assert change.highest == 2048 - 64
    assert change.above == "at 2048x2048 the same tensors in other sizes"

    def refuse(c, h, w, k, r):
        if h > 1281:  # 1281 is 1280, padded for a downsampling
            raise ValueError("no engine")
        return 600 * h * w

    f = closed("sdxl", "encode", "float16", workspace=_Scratch(refuse))
    assert f.highest == 1280 and f.above == "at 1344x1344 no peak within the model's call"


def test_alternating_workspace():
    """A workspace that jumps between constants is told: H200's float32 decode takes 2.25, 4.25 or 4.5 MiB over 4 T."""
    f = closed("sdxl", "decode", "float32", gpu="H200")
    assert f.within == derivation.ALTERNATION and "alternates" in str(f)
    assert f.t == Fraction(19, 2) + L[4]
    assert f.unsplit[0] < 0 and f.lowest <= 512 and f.highest >= 2048
    p = predict("sdxl", "decode", 896, 1152, "float32", gpu="H200")
    assert f.unsplit[0] <= p.allocated - f.predict(896, 1152) <= f.unsplit[1]
    assert closed("sdxl", "decode", "float32").within == 512


def test_upcast():
    """Weights converted for the run are a term: 2 bytes for each of the parameters."""
    f = closed("sdxl", "decode", "float32", weights_dtype="float16")
    weights = next(term for term in f.terms if term.name.startswith("weights"))
    assert (weights.coefficient, weights.constant) == (0, 2 * 83_653_863)
    p = predict("sdxl", "decode", 832, 1216, "float32", weights_dtype="float16")
    assert f.unsplit[0] <= p.allocated - f.predict(832, 1216) <= f.unsplit[1]


def test_batch():
    one, two = (closed("sdxl", "encode", "float16", batch=n) for n in (1, 2))
    assert two.a == 2 * one.a and two.b == one.b and "batch 2" in two.name


@pytest.mark.parametrize(
    "sizes_of",
    [
        lambda s: 512 * s * s + 1024,
        lambda s: 128 * (s // 4 + 1) ** 2,
        lambda s: 3 * s**4 // 4096 + 7 * s * s,
        lambda s: 4096,
        lambda s: 2 * s * s + 128 * (s * s // 64 // 100 + 1),  # an index in whole tiles
    ],
    ids=["affine", "padded", "square", "constant", "tiles"],
)
def test_solve(sizes_of):
    sizes = {side: sizes_of(side) for side in range(64, 4097, 64)}
    law, extent = derivation._solve(sizes, 1024)
    assert extent == list(sizes)
    for side, size in sizes.items():
        assert abs(value_of(law, symbols_at(side, side)) - size) <= 512


def test_prints():
    f = closed("sdxl", "decode", "float16")
    names = {}
    exec(f.python(), names)
    function = names["sdxl_decode_float16_diffusers_allocated_bytes"]
    for size in ODD:
        assert function(*size) == f.predict(*size)
    with refused(names=["64^2", "2880^2"], kind=ValueError):
        function(8, 8)
    data = json.loads(f.to_json())
    assert data["a_exact"] == str(f.a) and data["terms"][0]["name"] == f.terms[0].name
    assert sum(Fraction(term["coefficient_exact"]) for term in data["terms"]) == f.a
    assert f.latex() == (r"M_{\text{allocated, sdxl decode float16 diffusers}} &= 1\,216.062\,H W\,e + 1\,179\,664")
    text = str(f)
    assert text.startswith("sdxl decode float16 diffusers: allocated_bytes = 1216.062 H*W*e + 1179664\n")
    assert "9.500488 T" in text and "holds from 64x64 to 2880x2880" in text and "profile" in text


def test_a_notebook_shows_the_equation_and_the_tensors():
    f = closed("sdxl", "encode", "float16")
    assert repr(f) == str(f) and f.latex() in f._repr_latex_()
    text = f._repr_markdown_()
    assert f._repr_latex_() in text and all(f"| {term.name}" in text for term in f.terms)
    assert text.count("*") == text.count(r"\*") > 0, "Markdown would take a bare star for emphasis"


def test_of_a_prediction():
    p = predict("sdxl", "decode", 832, 1216, "float16")
    text = p.formula
    assert p.formula == text
    assert text.splitlines()[0] == str(closed("sdxl", "decode", "float16")).splitlines()[0]
    tiled = predict("sdxl", "decode_tiled", 1024, 1024, "float16")
    assert tiled.formula.startswith(f"none: {tiled.allocated} bytes at this size; op: expected encode or decode")
    small = predict("flux", "encode", 64, 64, "float16")
    assert small.formula.startswith(f"none: {small.allocated} bytes at this size; formula: expected 3 squares or more")


def test_bad_input():
    with refused("op", names=["'sd15'"]):
        formula("sd15")
    with refused("op"):
        closed("sdxl", "paint")
    with refused("model"):
        closed("sd9", "decode")
    with refused("closed"):
        closed("sdxl", "decode_tiled")
    f = closed("sdxl", "decode")
    with refused("height", 0):
        f.predict(0, 512)
