"""Formulas for applications to paste: linear in H*W, and at least `upper` of every prediction of a domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vaemem._arguments import shared
from vaemem._common import DTYPES, OPS, __version__, chosen, distinct, listed, meant, spread, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._render import Bullets, Columns, Sheet, Sizer, Typeset
from vaemem._types import Dtype
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.engine.configs import named_model
from vaemem.prediction.applications import APPLICATIONS, PASSES, Estimate
from vaemem.prediction.job import Job
from vaemem.prediction.lines import Point, least_above
from vaemem.prediction.predict import Prediction
from vaemem.prediction.request import Card, Software, VAERequest, find_card
from vaemem.prediction.runtimes import RUNTIMES, architecture
from vaemem.prediction.writing import write_equation, write_sum

if TYPE_CHECKING:
    from concurrent.futures import Executor

# The default sides in pixels. Workspaces jump between small sizes, and cuDNN has other plans for sides that are no
# multiples of 64. benchmarks/bounds.py compares the formulas with predictions of other sizes.
SIDES = 256, 264, 320, 384, 448, 512, 520, 616, 720, 768, 832, 1024, 1088, 1216, 1384, 1408, 1536, 2048
_MADE: dict[str, Bound] = {}  # a process's bounds by their arguments: each takes half a minute
BETWEEN = 1.002  # factor of a formula above the predictions, for the sizes between

_BYTES = """
def _bytes(name, op, height, width, dtype, tile=None):
    is_cut = tile is not None and (tile < height or tile < width)
    key = name, op + "_tiled" * is_cut, str(dtype).removeprefix("torch.")
    if key not in BYTES:
        known = ", ".join(map(" ".join, BYTES))
        raise ValueError(f"expected one of {known}, got {' '.join(key)}: vaemem.bound makes formulas for more")
    return BYTES[key](height * width, _largest(tile, height, width) if is_cut else 0)


"""


class BoundLine(NamedTuple):
    """A linear formula in bytes: at least `upper` of every prediction of its op in the domain.

    Attributes
    ----------
    function : str
        The application's estimate, by its key in the pasted table.
    op : str
        ``"encode"``, ``"decode"``, or ``"encode_tiled"``, ``"decode_tiled"`` for images larger than a tile.
    dtype : str
    passes : sequence of pairs
        Heights and widths of the tiles, in sides of a tile: ComfyUI's three passes cut other shapes, too.
    law : dict of str to int
        Bytes by power: ``"HW"``, the image's pixels; ``"cut"``, the pixels of the largest tile; ``""``, the constant.
    predictions : int
        Number of predictions that the formula was made from.
    overshoot : float
        Largest excess over the largest `upper` of a size, as a share of `upper`.
    at : tuple of int
        The (height, width) of this excess, and the tile of a tiled op.
    """

    function: str
    op: str
    dtype: str
    passes: Sequence[tuple[float, float]] = ((1, 1),)
    law: Mapping[str, int] = {}
    predictions: int = 0
    overshoot: float = 0.0
    at: tuple[int, ...] = ()

    def bytes(self, height: int, width: int, tile: int | None = None) -> int:
        """Return the bytes of an image of this many pixels. tile: its side in pixels, for a tiled op."""
        height, width = whole("height", height), whole("width", width)
        if (tile is not None) != self.op.endswith("_tiled"):
            raise ArgumentError("tile", "a side with the tiled ops and None with others", f"{tile} with {self.op}")
        columns = self._columns(height, width, 0 if tile is None else whole("tile", tile))
        return sum(value * columns[power] for power, value in self.law.items())

    def above(self, uppers: Mapping[Point, Sequence[int]]) -> BoundLine:
        """Return the line with the smallest excess above `upper` of every prediction, raised for the sizes between."""
        sizes = np.array([max(found) for found in uppers.values()], dtype=float)
        rows = [self._columns(point.height, point.width, point.tile) for point in uppers]
        columns = np.array([[*row.values()] for row in rows], dtype=float)
        found = least_above(columns, sizes, np.zeros(len(sizes))) * BETWEEN
        law = {power: math.ceil(value) for power, value in zip(rows[0], found.tolist(), strict=True)}
        excess = columns @ np.array([*law.values()]) / sizes - 1
        point = [*uppers][int(excess.argmax())]
        at = (point.height, point.width, point.tile)[: 3 if point.tile else 2]
        return self._replace(law=law, predictions=sum(map(len, uppers.values())), overshoot=float(excess.max()), at=at)

    def _columns(self, height: int, width: int, tile: int) -> dict[str, int]:
        """Return the powers of a size."""
        cut = max(min(int(tile * high), height) * min(int(tile * wide), width) for high, wide in self.passes)
        return {"HW": height * width} | ({"cut": cut} if tile else {}) | {"": 1}

    @property
    def name(self) -> str:
        return f"{self.function} {self.op} {self.dtype}"

    @property
    def excess(self) -> str:
        """The largest excess in words: ``2.7% at 2048x2048``."""
        height, width, *tile = self.at
        return f"{self.overshoot:.1%} at {height}x{width}" + "".join(f", tile {side}" for side in tile)


class Bound(Typeset):
    """The formulas of `vaemem.bound`. Printing it shows them.

    Attributes
    ----------
    application : str
    lines : tuple of BoundLine
        One for each function, op and dtype.
    domain : str
        The sizes, cards, versions and code that the formulas hold for, in words: a line for each.
    """

    def __init__(self, application: str, lines: Sequence[BoundLine], domain: str):
        self.application, self.lines, self.domain = application, tuple(lines), domain

    def find(self, model: str, op: str, dtype: str) -> BoundLine:
        """Return the formula for a model's op. ValueError if there is none."""
        estimates = APPLICATIONS[self.application].estimates
        for line in self.lines:
            if model in estimates[line.function].models and (line.op, line.dtype) == (op, dtype):
                return line
        known = ", ".join(line.name for line in self.lines)
        raise ArgumentError("find", f"one of {known}", f"{model} {op} {dtype}")

    def python(self) -> str:
        """Write a Python module with the application's functions, to paste. It imports nothing."""
        title, _, source = APPLICATIONS[self.application]
        rows = [
            f'    ("{line.function}", "{line.op}", "{line.dtype}"): lambda pixels, tile:'
            f" {write_sum(line.law, 'python')},  # up to {line.excess}"
            for line in self.lines
        ]
        return "\n".join([
            f'"""The bytes that VAEs need in {title} besides the weights.',
            "",
            f"By vaemem {__version__}. The formulas are at least `upper` of every prediction for",
            *(f"- {line}" for line in self.domain.splitlines()),
            '"""',
            "",
            "# Bytes by the pixels of the image and of its largest tile, and how far they are above the predictions.",
            "BYTES = {",
            *rows,
            "}",
            "",
            _BYTES + source,
        ])  # fmt: skip

    def latex(self) -> str:
        """Write the formulas as the body of a LaTeX environment: bytes for an image of H by W pixels. T has the pixels
        of its largest tile."""
        return " \\\\\n".join(write_equation(line.name, write_sum(line.law, "latex")) for line in self.lines)

    def _data(self) -> dict[str, Any]:
        formulas = [
            {"law_bytes" if key == "law" else key: value for key, value in line._asdict().items()}
            for line in self.lines
        ]
        told = {"answer": "bound", "application": self.application, "domain": self.domain.splitlines()}
        return told | {"formulas": formulas}

    def _sheet(self, size: Sizer) -> Sheet:
        cells = [(line.name, write_sum(line.law), *line.excess.split(" at ")) for line in self.lines]
        played = sum(line.predictions for line in self.lines)
        headline = f"{len(cells)} formulas for {APPLICATIONS[self.application].title}, above all {played} predictions."
        table = Columns(("formula", "bytes", "excess", "at"), cells)
        return Sheet(headline, [table, Bullets(self.domain.splitlines(), title="They hold for:")])


@shared
def bound(
    application: str, models: str | Sequence[str] | None = None, dtypes: Dtype | Sequence[Dtype] = DTYPES, *,
    gpu: str | Sequence[str] = "RTX 4090", memory: int | str | None = None, cudnn_version: str | None = None,
    torch_version: str | None = None, sides: int | Iterable[int] = SIDES, progress: Progress = None,
    executor: Executor | None = None,
) -> Bound:  # fmt: skip
    """Make formulas for an application's own estimates of a VAE's memory. Each is at least `upper` of every prediction.

    Predict every size of the domain, on every card, in every way that the application runs it. Each formula is the line
    above these predictions with the smallest excess, raised by 0.2% for the sizes between.

    Parameters
    ----------
    application : str
        ``"comfyui"``: ``memory_used_encode`` and ``memory_used_decode`` of its class VAE, with tiles. Others are for
        FLUX.2 and for one frame of Qwen-Image's and Wan 2.1's VAE. ``"invokeai"``:
        ``estimate_vae_working_memory_sd15_sdxl``, ``_flux`` (Z-Image's too), ``_qwen_image`` and ``_anima``, with
        tiles, and ``_flux2``, ``_sd3`` and ``_cogview4``.
    models, dtypes : str or sequence of str, optional
        Models and dtypes of the formulas: ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"float16"`` ... By default every model
        and dtype of the application's functions.
    gpu : str or sequence of str
        Cards or compute capabilities, as for `predict`. The formulas hold on each.
    memory : shared
    cudnn_version, torch_version : str, optional
        The installed versions, as for `predict`. By default the formulas hold for every known version.
    sides : int or iterable of int
        Heights and widths in pixels. Every pair is a size of the domain. By default 18 sides from 256 to 2048.
    progress : bool or callable, optional
        True shows a bar (tqdm, ``pip install 'vaemem[progress]'``); a callable gets (sizes done, sizes to do).
    executor : shared
        A formula with a missing size is left out.

    Raises
    ------
    ValueError
        As `predict` does; for an unknown application; and if the application runs none of the models and dtypes.
    RuntimeError
        The executor's workers died before a formula was finished.

    Notes
    -----
    Without a version, all formulas for one card take about half a minute of CPU time. A process makes them once for the
    same arguments. The formulas are checked at the sizes of the domain only, and for one image at a time.

    Tiles have sides of 512, 768 and 1024 pixels, in images with sides of multiples of 512. FLUX.2's images have sides
    of multiples of 16 in ComfyUI; other sides are left out there.

    Examples
    --------
    >>> b = bound("comfyui", "sdxl", "float16", torch_version="2.7.1+cu128", sides=(512, 1024, 2048))
    >>> b.find("sdxl", "decode", "float16").bytes(1024, 1024) >> 20
    3414
    >>> source = b.python()  # to paste
    """
    application, gpus = meant("application", application, APPLICATIONS), listed(gpu, str)
    kept = None if models is None else [named_model("models", model) for model in listed(models, str)]
    dtypes = chosen("dtypes", dtypes, DTYPES)
    pixels = sorted(distinct(whole("sides", side) for side in listed(sides, int)))
    for name, given in (("sides", pixels), ("gpu", gpus)):
        if not given:
            raise ArgumentError(name, "one or more", "none")
    question = repr((application, kept, dtypes, gpus, memory, cudnn_version, torch_version, pixels))
    if executor is None and question in _MADE:
        return _MADE[question]
    estimates = {
        name: estimate._replace(models=tuple(model for model in estimate.models if kept is None or model in kept))
        for name, estimate in APPLICATIONS[application].estimates.items()
    }
    estimates = {name: estimate for name, estimate in estimates.items() if estimate.models}
    software = Software(torch_version=torch_version, cudnn_version=cudnn_version)
    domain = _Domain([find_card(name, memory) for name in gpus], software, pixels)
    sweeps = [
        (BoundLine(name, op + ending, dtype, estimate.passes), estimate, points)
        for name, estimate in estimates.items()
        for op, dtype in itertools.product(OPS, estimate.dtypes)
        for ending, points in domain.points(name, estimate).items()
        if dtype in dtypes and points
    ]
    if not sweeps:
        raise ArgumentError("models, dtypes", f"some that {application} runs", f"{models!r}, {dtypes!r}")
    tasks = [(i, line, estimate, point) for i, (line, estimate, points) in enumerate(sweeps) for point in points]
    uppers: list[dict[Point, list[int]]] = [{} for _ in sweeps]
    with polling(progress, "bound", total=len(tasks), bar_format=BAR) as poll:
        found = spread(partial(_find_uppers, domain), tasks, executor, lambda task: task[1].name)
        for done, ((i, *_, point), sizes) in enumerate(found, 1):
            uppers[i][point] = sizes
            if poll:
                poll(done, len(tasks))
    finished = zip(sweeps, uppers, strict=True)
    lines = [line.above(sizes) for (line, _, points), sizes in finished if len(sizes) == len(points)]
    if not lines:
        raise RuntimeError("executor: its workers died before a formula was finished; pass one with living workers")
    made = Bound(application, lines, domain.describe(estimates.values()))
    if len(lines) == len(sweeps):
        _MADE[question] = made
    return made


class _Domain(NamedTuple):
    cards: list[Card]
    software: Software
    sides: Sequence[int]

    def points(self, name: str, estimate: Estimate) -> dict[str, list[Point]]:
        points = estimate.points(self.sides)
        if not points[""]:
            raise ArgumentError("sides", f"multiples of {estimate.step} for {name}", "others")
        return points

    def predict(self, estimate: Estimate, op: Any, dtype: Any, point: Point) -> Iterator[Prediction]:
        """Predict one size in every way that the application may run it."""
        weights = distinct((dtype, "float16")) if estimate.is_upcast and dtype == "float32" else [dtype]
        runtimes = [code for code in estimate.runtimes if RUNTIMES[code].tiles or not point.tile]
        # Models with the same layers need the same memory.
        archs = map(architecture, estimate.models)
        layers = {tuple(v for k, v in arch.items() if k not in _NO_LAYERS): arch for arch in archs}
        for card, arch, runtime, weight in itertools.product(self.cards, layers.values(), runtimes, weights):
            job = Job(arch, op, point.height, point.width, dtype, weight, tile=point.tile or None)
            yield Prediction(VAERequest(card, replace(self.software, runtime=runtime), job))

    def describe(self, estimates: Collection[Estimate]) -> str:
        """Describe the domain, one line per fact."""
        named = {"PyTorch": self.software.torch_version, "cuDNN": self.software.cudnn_version}
        versions = " and ".join(f"{name} {version}" for name, version in named.items() if version)
        lines = [
            f"models: {', '.join(distinct(model for one in estimates for model in one.models))}; one image",
            f"heights and widths: every pair of {', '.join(map(str, self.sides))} pixels",
            f"cards: {', '.join(distinct(card.gpu.name for card in self.cards))}",
            f"versions: {versions or 'every cuDNN that vaemem knows, as PyTorch 2.7 uses it'}",
            f"code: {', '.join(distinct(code for one in estimates for code in one.runtimes))}",
        ]
        if any(one.is_upcast for one in estimates):
            lines.append("weights: in the run's dtype; for SD's float32 runs also in float16")
        for tiled in [one for one in estimates if one.is_tiled][:1]:
            points = tiled.points(self.sides)["_tiled"]
            tiles, images = (
                ", ".join(map(str, sorted(some)))
                for some in ({point.tile for point in points}, {point.width for point in points})
            )
            code = "ComfyUI" if tiled.passes == PASSES else "diffusers"
            cut = f"{tiles} pixels as {code} cuts them, in images with sides of {images}"
            lines.append(f"tiles: {cut if points else 'none were predicted'}")
        return "\n".join(lines)


_Task = tuple[int, BoundLine, Estimate, Point]  # its line's number first


def _find_uppers(domain: _Domain, task: _Task) -> list[int]:
    _, line, estimate, point = task
    return [prediction.upper for prediction in domain.predict(estimate, line.op, line.dtype, point)]


_NO_LAYERS = ("name", "scaling_factor", "shift_factor", "latents_mean", "latents_std")
