"""Formulas in pieces: what they say of peaks that are made here, and of predictions."""

import math
import random
from fractions import Fraction

import pytest

from vaemem import formula, predict
from vaemem.prediction.cutting import fit_domain, largest_of
from vaemem.prediction.pieces import Domain, PlayedPeak, Point
from vaemem.prediction.process import ROUNDED_UP

SMALL = Domain(256, 1024, (1, 2, 3), step=128)


def fitted(peak, domain=SMALL):
    """The form of a peak: a function of a point that gives bytes, or a `PlayedPeak`."""
    forms, left_out = fit_domain(domain, lambda point: {"made": _seen(peak(point))})
    assert not left_out
    return forms["made"]


def _seen(what):
    return what if isinstance(what, PlayedPeak) else PlayedPeak(what, "step", {})


def check_bounds(form, peak):
    """Every point lies in one piece, and its peak within the bounds."""
    for point in form.domain:
        size = _seen(peak(point)).bytes
        assert sum(piece.holds(point) for piece in form.pieces) == 1
        assert form.lower(*point[:4]) <= size <= form.upper(*point[:4])


def test_tensors_that_are_polynomials_are_exact():
    def tensors(p):
        pixels = p.height * p.width
        return {
            "weights": 12345678, "conv": p.batch * pixels * 128, "scores": 2 * p.batch * (pixels // 64) ** 2,
            "padded": p.batch * (p.height + 8) * (p.width + 8) * 2,
        }  # fmt: skip

    def peak(p):
        made = tensors(p)
        return PlayedPeak(sum(-(-size // 512) * 512 for size in made.values()) + 4096, "here", made, largest_of(made))

    form = fitted(peak)
    (piece,) = form.pieces
    assert piece.is_exact and piece.where == "here" and piece.condition() == "everywhere"
    terms = dict(piece.terms)
    assert terms["scores"] == {"batch*(H*W)^2": Fraction(2, 64**2)} and terms["weights"] == {"": 12345678}
    assert terms["padded"] == {"batch": 128, "batch*H*W": 2, "batch*(H+W)": 16}
    assert 4096 <= terms[ROUNDED_UP][""] <= 4096 + 4 * 512 and piece.largest in ("conv", "scores")
    check_bounds(form, peak)
    for point in (Point(256, 1000, 2), Point(768, 320, 3)):
        assert abs(form.predict(*point[:4]) - peak(point).bytes) <= 512 * len(terms)
    assert form.within == 1 and form.worst < 1e-4


def test_jumps_are_found():
    """A workspace that comes at some size, and another with a second image, cut the domain there and nowhere else."""

    def peak(p):
        pixels = p.height * p.width
        each = 900 if p.batch > 1 else 500 if pixels > 400_000 else 300
        return 10**8 + each * p.batch * pixels

    form = fitted(peak)
    assert sorted(piece.condition() for piece in form.pieces) == [
        "batch <= 1 and H*W <= 401408", "batch <= 1 and H*W > 401408", "batch > 1"
    ]  # fmt: skip
    check_bounds(form, peak)
    assert form.worst < 1e-6 and form.predict(640, 640) == pytest.approx(10**8 + 500 * 640 * 640, rel=1e-6)


def test_a_workspace_that_its_padding_pushes_over_a_page():
    """Where it jumps depends on H + W, not on H*W."""

    def peak(p):
        return 10**8 + (700 if p.batch * (p.height + p.width) > 2000 else 500) * p.batch * p.height * p.width

    form = fitted(peak)
    assert {piece.condition() for piece in form.pieces} == {"batch*(H+W) <= 1984", "batch*(H+W) > 1984"}
    check_bounds(form, peak)
    assert form.worst < 1e-6


def test_peaks_at_several_places_are_numbered():
    """A table says where each piece's peak is by a number, and below it once what the number stands for."""

    def peak(p):
        size, where = max((10**9, "first"), (1000 * p.batch * p.height * p.width, "second"))
        return PlayedPeak(size, where, {})

    lines = str(fitted(peak)).splitlines()
    assert lines[1].split()[-1] == "peak" and lines[-2:] == ["Peak 1 is at first.", "Peak 2 is at second."]
    assert {line.split()[-1] for line in lines[2:-2]} == {"1", "2"}
    assert any(line.startswith("N*H*W > ") for line in lines)


def test_what_is_no_polynomial_has_bounds():
    """Noise of 20% is within them, in no more than 12 pieces, and the middle is as near as it can be."""

    def peak(p):
        return round(1e9 * random.Random(str(p)).uniform(0.9, 1.1)) + 1000 * p.batch * p.height * p.width

    form = fitted(peak)
    assert 1 <= len(form.pieces) <= 12
    check_bounds(form, peak)
    piece = form.pieces[0]
    assert piece.low * piece.high == pytest.approx(1) and not piece.is_exact
    assert "at most 10% at" in form.errors and f"{form.worst:.1%}" in form.errors


def test_between_the_steps():
    """What jumps between the steps of the domain widens the bounds there, and there alone."""

    def peak(p):
        return (10**8 + 1000 * p.batch * p.height * p.width) * (1 if p.height % 128 == p.width % 128 == 0 else 1.3)

    form = fitted(peak)
    assert form.between.below == 1 and 1 < form.between.above <= 1.3 and form.worst < 1e-6
    assert form.between.points == len(SMALL.between(form.between.points))
    for point in SMALL.between(form.between.points):
        assert not SMALL.is_step(point) and form.lower(*point[:3]) <= peak(point) <= form.upper(*point[:3])
    check_bounds(form, peak)
    assert "between the steps, where" in form.errors and "is lower" not in form.errors


def test_sides_that_are_no_steps():
    """The greatest side is played too, and bounds are those of the sides around."""
    domain = Domain(300, 1000, (1,), step=256)
    assert sorted({p.height for p in domain}) == [300, 556, 812, 1000]
    several = {(p.height, p.tokens) for p in Domain(prompt_tokens=(0, 77))}
    assert several >= {(320, 77), (512, 0)} and (320, 0) not in several, (
        "the most tokens alone are played at every side"
    )
    less, more = domain.around(Point(301, 900))
    assert less[:2] == (300, 812) and more[:2] == (556, 1000) and domain.is_step(Point(1000, 300))
    form = fitted(lambda p: 1000 * p.height * p.width, domain)
    assert form.lower(900, 900) <= 1000 * 812 * 812 and form.upper(900, 900) >= 1000 * 1000 * 1000


def test_one_size():
    """What is known of one size alone is a constant, and of several batches a line in these."""
    form = fitted(lambda p: 10**8 + p.height, Domain(512, 512, (2,)))
    assert [piece.equation() for piece in form.pieces] == ["100000512"] and form.between == (0, 1, 1)
    form = fitted(lambda p: 10**8 + 10**6 * p.batch, Domain(512, 512))
    assert list(form.pieces[0].law) == ["", "batch"]


def test_tokens():
    def peak(p):
        return 10**9 + 200_000 * p.tokens + 300 * p.batch * p.height * p.width

    domain = Domain(256, 1024, (1, 2), (1, 100, 512), step=128)
    assert len([p for p in domain if p.tokens == 1]) < len([p for p in domain if p.tokens == 512]) / 4
    form = fitted(peak, domain)
    check_bounds(form, peak)
    assert (
        form.predict(512, 512)
        == form.predict(512, 512, 1, 512)
        == pytest.approx(peak(Point(512, 512, 1, 512)), rel=1e-6)
    )
    assert form.predict(512, 512, 2, 300) == pytest.approx(peak(Point(512, 512, 2, 300)), rel=1e-6)
    with pytest.raises(ValueError, match="prompt_tokens: want 1 to 512, which the formula is of, got 600"):
        form.predict(512, 512, 1, 600)


def test_other_numbers_of_tokens_are_played():
    """The bounds hold at them too, in Python as well."""

    def peak(p):
        return (10**8 + 300 * p.batch * p.height * p.width) * (1 if p.tokens in (1, 100, 512) else 1.2)

    domain = Domain(256, 1024, (1, 2), (1, 100, 512), step=128)
    form = fitted(peak, domain)
    check_bounds(form, peak)
    beside = domain.beside(len([*domain]) // 10 + 1)
    assert len(beside) > 5 and all(domain.is_step(point) for point in beside) and not Domain().beside(10)
    functions = {}
    exec(form.python("made"), functions)
    for point in (*beside, *domain.between(10)):
        least, likely, most = functions["made"](*point[:4])
        assert form.lower(*point[:4]) == math.floor(least) and form.upper(*point[:4]) == math.ceil(most)
        assert form.predict(*point[:4]) == round(likely)
        assert least <= peak(point) <= most or not domain.is_step(point)


def test_attention_of_an_image_and_its_prompt():
    """The scores of both, (H*W/256 + t)^2, and what there is of each place are one exact piece."""

    def peak(p):
        places = p.height * p.width // 256 + p.tokens
        made = {"weights": 10**8, "scores": 48 * p.batch * places**2, "positions": 1024 * places}
        return PlayedPeak(sum(made.values()), "attention", made, "scores")

    domain = Domain(256, 1024, (1, 2, 3), (1, 100, 512), step=128)
    form = fitted(peak, domain)
    (piece,) = form.pieces
    assert dict(piece.terms)["scores"] == {
        "batch*tokens^2": 48, "batch*tokens*H*W": Fraction(3, 8), "batch*(H*W)^2": Fraction(48, 256**2)
    }  # fmt: skip
    assert dict(piece.terms)["positions"] == {"tokens": 1024, "H*W": 4}
    check_bounds(form, peak)
    assert form.worst < 1e-6 and form.predict(512, 768, 2, 300) == pytest.approx(peak(Point(512, 768, 2, 300)).bytes)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ((200, 512), "height: want 256 to 1024, which the formula is of, got 200"),
        ((512, 1025), "width: want 256 to 1024"),
        ((256, 1024 + 1), "width: want 256 to 1024"),
        ((512, 512, 4), "batch: want 1 to 3, which the formula is of, got 4"),
        ((512, 512.5), "width: want a whole number of at least 1, got 512.5"),
        ((0, 512), "height: want a whole number of at least 1, got 0"),
    ],
)
def test_outside_of_the_domain(at, message):
    form = fitted(lambda p: 1000 * p.height * p.width)
    for ask in (form.predict, form.upper, form.lower, form.piece):
        with pytest.raises(ValueError, match=message):
            ask(*at)


def test_shapes_outside_of_the_domain():
    form = fitted(lambda p: 1000 * p.height * p.width, Domain(256, 1024, (1,), step=128, ratio=2))
    with pytest.raises(
        ValueError, match="height, width: want sides of 1:2 at most, which the formula is of, got 256x1024"
    ):
        form.predict(256, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"least": 0}, "least: want a whole number of at least 1, got 0"),
        ({"most": 128}, "most: want at least the least side 256, got 128"),
        ({"batches": ()}, "batches: want one number or more, got none"),
        ({"batches": (0, 1)}, "batches: want a whole number of at least 1, got 0"),
        ({"step": 2.5}, "step: want a whole number"),
    ],
)
def test_domains_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        formula("sdxl", "decode").over(**changes)


def test_other_domains():
    found = formula("sdxl", "decode")
    assert found.over(batches=3).domain.batches == (3,)
    with pytest.raises(
        TypeError, match="over: want least, most, batches, prompt_tokens, step, ratio or progress, got foo"
    ):
        found.over(foo=5)
    with pytest.raises(
        ValueError, match="domain: want at most 50000 points, got more: H and W 256 to 2048 in steps of 8"
    ):
        found.over(step=8).predict(512, 512)


VAES = [
    ("sdxl", "decode", "float16", "RTX 4090"),
    ("sdxl", "decode_tiled", None, "RTX 4060"),
    ("sd15", "encode", None, "T4"),
]


@pytest.mark.parametrize(("model", "op", "dtype", "gpu"), VAES)
def test_of_a_vae(model, op, dtype, gpu):
    """Where there is no closed form too; and what Python is written computes what is said."""
    found = formula(model, op, dtype, gpu=gpu).over(least=512, most=1536, step=256, batches=(1, 2))
    functions = {}
    exec(found.python(), functions)
    reserved, allocated = (
        next(f for name, f in functions.items() if name.endswith(f"{what}_bytes")) for what in ("reserved", "allocated")
    )
    for point in found.domain:
        p = predict(model, op, *point[:2], dtype, point.batch, gpu=gpu)
        for form, function, size in ((found.reserved, reserved, p.reserved), (found.allocated, allocated, p.allocated)):
            least, likely, most = function(*point[:3])
            assert form.lower(*point[:3]) == math.floor(least) <= size <= math.ceil(most) == form.upper(*point[:3])
            assert form.predict(*point[:3]) == round(likely)
    for height, width in ((600, 1000), (1536, 520)):
        for form, function in ((found.reserved, reserved), (found.allocated, allocated)):
            least, likely, most = function(height, width)
            assert form.lower(height, width) == math.floor(least) and form.upper(height, width) == math.ceil(most)
            assert form.predict(height, width) == round(likely)
    with pytest.raises(ValueError, match=r"want H and W 512 to 1536 .* got 64x512, batch 1"):
        reserved(64, 512)
    text = str(found)
    assert ("No closed form" in text) == (op == "decode_tiled") and found.reserved.errors in text
    assert found.latex().count("&=") == 2 and r"\text{reserved}" in found.latex()


def test_sizes_that_pytorch_refuses_are_left_out():
    class Refuses:
        cudnn_version = None

        def conv(self, dtype, n, c, h, w, *others):
            if h > 1100:
                raise ValueError("no engine")
            return 600 * h * w, "test"

    found = formula("sdxl", "encode", "float16", workspace=Refuses()).over(least=512, most=1536, step=512, batches=(1,))
    assert {p.height for p in found.left_out} == {1536} and "Left out are 3 points, which PyTorch refuses" in str(found)
    assert found.predict(1024, 1024) > 0
    nothing = found.over(least=1536)
    with pytest.raises(ValueError, match="domain: want a size that sdxl encode float16 diffusers can run"):
        print(nothing)


def test_progress_and_other_domains():
    seen = []
    found = formula("flux", "encode").over(
        lambda done, total: seen.append((done, total)), least=512, most=768, step=128
    )
    assert found.predict(640, 640) and seen[-1] == (40, 40)
    assert found.over(batches=(2,)).domain.batches == (2,) and found.domain.batches == (1, 2, 3, 4)
    assert formula("flux", "encode", batch=2).domain.batches == (2,)
