"""Formulas: what they say of peaks that are made here, and that no prediction of their grid lies above them."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from errors import refused

from vaemem import formula, predict, predict_pipeline
from vaemem.prediction.closed_form import PlayedPeak
from vaemem.prediction.formula import Formula
from vaemem.prediction.laws import least_above
from vaemem.prediction.peak_equations import RAISED, Grid, Point, _PhaseLine, _uncovered

pytestmark = pytest.mark.python

MIB = 1 << 20


def made(peak, grid=Grid()):  # noqa: B008
    """The formula of one phase: a function of a point that gives bytes, or a `PlayedPeak`."""

    def play(point):
        one = peak(point)
        return {"step": one if isinstance(one, PlayedPeak) else PlayedPeak(one, one, "here", {})}

    return Formula("made", grid, Point(1024, 1024), play)


def check_bounds(found, points=None):
    """Every point of the grid, whether it was played or not, lies below."""
    for point in points or found.grid:
        for name in ("reserved", "allocated"):
            size = max(getattr(peak, name) for peak in found._play(point).values())
            assert size <= getattr(found, name).predict(*point[:3], point.tokens or None), (name, point)


def test_the_lowest_line_above():
    """Against every line through two of the points: none has a smaller sum of the mean and the largest excess."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        x = rng.uniform(1, 100, 12)
        y = 50 + 7 * x * rng.uniform(0.7, 1.3, 12)
        columns = np.stack([x, np.ones(12)], 1)

        def cost(line, columns=columns, y=y):
            above = columns @ line / y
            return above.mean() + above.max() if above.min() > 1 - 1e-9 and min(line) >= 0 else np.inf

        edges = [np.linalg.solve(columns[[i, j]], y[[i, j]]) for i, j in itertools.combinations(range(12), 2)]
        edges += [np.array([0, y.max()]), np.array([(y / x).max(), 0])]
        law = least_above(["MP", ""], {"MP": x, "": np.ones(12)}, y, np.full(12, 1 / 12))
        found = np.array([*law.values()])
        assert found.min() >= 0 and cost(found) <= min(map(cost, edges)) * (1 + 1e-9)


def test_tensors_that_are_polynomials_are_exact():
    def peak(p):
        pixels = p.height * p.width
        tensors = {
            "weights": 12345678, "conv": p.batch * pixels * 128, "scores": 2 * p.batch * (pixels // 64) ** 2,
            "padded": p.batch * (p.height + 8) * (p.width + 8) * 2,
        }  # fmt: skip
        size = sum(-(-size // 512) * 512 for size in tensors.values()) + 4096
        return PlayedPeak(size, size, "here", tensors)

    found = made(peak)
    (line,) = found.allocated.lines
    assert line.kind == "exact" and line.where == "here" and found.reserved.lines[0].kind == "bound"
    assert line.terms["scores"] == {"N*MP*MP": 2 * MIB / Fraction(64**2)}
    assert line.terms["padded"] == {"N": Fraction(128, MIB), "N*MP": 2, "N*(H+W)": Fraction(16, MIB)}
    assert line.law["N*MP"] == 130 and line.excess < 0.2
    check_bounds(found)


def test_a_line_is_a_bound_if_a_tensor_is_no_polynomial():
    def peak(p):
        tensors = {"conv": p.batch * p.height * p.width * (100 if p.height > 1000 else 90)}
        return PlayedPeak(tensors["conv"], tensors["conv"], "here", tensors)

    (line,) = made(peak).allocated.lines
    assert line.kind == "bound" and not line.terms
    check_bounds(made(peak))


def test_what_is_shown_is_the_bound():
    """Coefficients have four digits, and Python says what `predict` does."""

    def peak(p):
        return round(MIB * (1234.5678 + p.batch * 98.76543 + p.batch * p.height * p.width * 0.001234567))

    found = made(peak)
    (line,) = found.reserved.lines
    assert all(float(f"{value:.4g}") == value for value in line.law.values())
    assert RAISED - 1.001 < line.median < line.excess < RAISED - 0.998
    check_bounds(found)


def test_a_peak_that_never_changes():
    found = made(lambda p: 123 * MIB)
    assert found.reserved.lines[0].equation() == "123" and found.reserved.excess == 0
    assert found.predict(512, 512) == 123 * MIB


def test_a_phase_whose_peak_lies_in_two_places():
    """One line would be far too high: each place has its own."""

    def peak(p):
        pixels = p.batch * p.height * p.width
        scores = p.batch * (p.height * p.width // 64) ** 2 * 20
        size, where = max((9000 * pixels, "up.conv [workspace]"), (scores, "mid [attention]"))
        return PlayedPeak(size, size, where, {where: size})

    found = made(peak)
    assert {line.phase for line in found.allocated.lines} == {"step, workspace", "step, attention"}
    assert found.allocated.excess < 0.02 and r"\text{step, attention}" in found.latex()
    check_bounds(found)


def test_a_line_below_another_is_left_out():
    """Two places of a peak whose lines differ little: the higher line says all."""
    lines = [_PhaseLine(f"step, {name}", "bound", law, 0.0, 0.0, "", {}) for name, law in (
        ("a", {"N*MP": 5.0, "": 2.0}), ("b", {"N*MP": 6.0, "": 2.0}), ("c", {"N*MP": 6.0, "N": 1.0}), ("d", {"": 2.0}),
        ("e", {"N*MP": 6.0, "": 2.0}),
    )]  # fmt: skip
    assert [line.phase for line in _uncovered(lines)] == ["step, b", "step, c"]
    assert [line.phase for line in _uncovered(lines[2:])] == ["step, c", "step, e"]


def test_a_batch_that_takes_less_per_image_than_one_image():
    """One image has its own line, without N, so both are exact."""

    def peak(p):
        name, each = ("copied", 190) if p.batch == 1 else ("kept", 160)
        size = p.batch * p.height * p.width * each
        return PlayedPeak(size, size, name, {name: size})

    found = made(peak)
    assert {line.phase: line.equation() for line in found.allocated.lines} == {
        "step, N=1": "190 MP + 2", "step, N>1": "160 N*MP + 2",
    }  # fmt: skip
    assert all(line.kind == "exact" for line in found.allocated.lines)
    assert "batch" in found.python() and r"\text{step, N=1}" in found.latex()
    check_bounds(found)


def test_prompts():
    """Their length is a variable if it makes a difference, in Python too."""

    def peak(p):
        size = 10**9 + 200_000 * p.batch * p.tokens + 300 * p.batch * p.height * p.width
        return PlayedPeak(size + p.tokens, size, "here", {"all": size})

    found = made(peak, Grid(512))
    assert "prompts of 1 to 512 tokens" in str(found) and "t tokens" in str(found)
    rng = random.Random(0)
    points = [point._replace(tokens=rng.randint(1, 512)) for point in rng.sample([*found.grid], 100)]
    check_bounds(found, points)
    functions = {}
    exec(found.python(), functions)
    for point in points:
        assert functions["made_reserved_bytes"](*point[:4]) == found.predict(*point[:4])
        assert functions["made_allocated_bytes"](*point[:4]) == found.allocated.predict(*point[:4])
    assert found.predict(512, 512) == found.predict(512, 512, 1, 512)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ((200, 512), ("height", 200)),
        ((512, 2049), ("width", 2049)),
        ((512, 512, 5), ("batch", 5)),
        ((2048, 2048, 2), ("batch",)),
        ((256, 1025), ("height, width", "256x1025")),
        ((512, 512, 1, 600), ("prompt_tokens", 600)),
        ((512, 512.5), ("width", 512.5)),
    ],
)
def test_outside_of_the_grid(at, message):
    found = made(lambda p: p.height * p.width, Grid(512))
    with refused(*message):
        found.predict(*at)


def test_sizes_that_pytorch_refuses_are_left_out():
    class Refuses:
        cudnn_version = None

        def conv(self, dtype, n, c, h, w, *others):
            if h > limit:
                raise ValueError("no engine")
            return 600 * h * w, "test"

    limit = 1100
    found = formula("sdxl", "encode", "float16", workspace=Refuses())
    assert min(p.height for p in found.left_out) == 1152
    assert f"PyTorch refuses {len(found.left_out)} more" in str(found)
    limit = 10
    with refused("formula"):
        print(formula("sdxl", "encode", "float16", workspace=Refuses()))


# median and worst excess of what is reserved; an encoder's workspaces jump at small sizes, and without a kernel for its
# type attention writes out its scores.
LIMITS = 0.1, 0.4
VAES = [
    ("sdxl", "decode", "float16", "RTX 4090", LIMITS),
    ("sdxl", "decode_tiled", None, "RTX 4060", LIMITS),
    ("sd15", "encode", None, "T4", LIMITS),
    ("sdxl", "encode", None, "RTX 4060", (0.1, 0.52)),
    ("sdxl", "decode", "bfloat16", "T4", (0.2, 0.6)),
]
PIPELINES = [
    ("sd15", "T4", "none", LIMITS), ("sdxl", "RTX 4060", "model", (0.15, 0.4)), ("flux", "RTX 4090", "model", LIMITS),
    ("flux", "T4", "sequential", LIMITS), ("zimage-turbo", "RTX 3060", "none", LIMITS),
    ("zimage-turbo", "T4", "sequential", LIMITS),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "op", "dtype", "gpu", "limits"), VAES)
def test_the_whole_grid_of_a_vae(model, op, dtype, gpu, limits):
    found = formula(model, op, dtype, gpu=gpu)
    check_bounds(found)
    assert found.reserved.median <= limits[0] and found.reserved.excess <= limits[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("pipeline", "gpu", "offload", "limits"), PIPELINES)
def test_the_whole_grid_of_a_pipeline(pipeline, gpu, offload, limits):
    found = predict_pipeline(pipeline, 512, 512, gpu=gpu, offload=offload).formula
    rng = random.Random(0)
    check_bounds(found)
    if found.grid.tokens:
        points = rng.sample([*found.grid], 300)
        check_bounds(found, [point._replace(tokens=rng.randint(1, found.grid.tokens)) for point in points])
    assert found.reserved.median <= limits[0] and found.reserved.excess <= limits[1]


@pytest.mark.parametrize(("model", "op", "dtype", "gpu"), [one[:4] for one in VAES[:3]])
def test_of_a_vae(model, op, dtype, gpu):
    """Python computes what is said, and predictions lie below."""
    found = formula(model, op, dtype, gpu=gpu)
    functions = {}
    exec(found.python(), functions)
    reserved, allocated = (
        next(f for name, f in functions.items() if name.endswith(f"{what}_bytes")) for what in ("reserved", "allocated")
    )
    for height, width, batch in ((512, 512, 1), (832, 1216, 2), (1024, 1024, 4), (2048, 512, 3), (320, 256, 1)):
        p = predict(model, op, height, width, dtype, batch, gpu=gpu)
        assert p.reserved <= reserved(height, width, batch) == found.predict(height, width, batch)
        assert p.allocated <= allocated(height, width, batch) == found.allocated.predict(height, width, batch)
    text = str(found)
    assert ("No closed form" in text) == (op == "decode_tiled") and len(text.splitlines()) < 40
    assert found.latex().count("&=") == 2 and r"\text{reserved}" in found.latex()
    assert ("tile = MP of H and W up to 1024" in text) == ("tile_mega" in found.python()) == (op == "decode_tiled")
