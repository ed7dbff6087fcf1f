"""Formulas for applications to paste: linear in H*W, and at least `upper` of every prediction of a domain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from vaemem._arguments import shared
from vaemem._common import DTYPES, MOST_SIDE, OPS, __version__, chosen, distinct, listed, meant, spread, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._render import Bullets, Columns, Sheet, Sizer, Typeset
from vaemem._types import Dtype
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.engine.configs import named_model
from vaemem.prediction.bound_code import APPLICATIONS
from vaemem.prediction.laws import least_above, symbols_at, value_of, write_equation, write_sum
from vaemem.prediction.peak_equations import MOST_PIXELS, Point
from vaemem.prediction.predict_vae import Prediction
from vaemem.prediction.request import Card, Software, VAERequest, find_card
from vaemem.prediction.runtimes import RUNTIMES, architecture, packing
from vaemem.prediction.vae_job import Job

if TYPE_CHECKING:
    from concurrent.futures import Executor

# The default sides in pixels. Workspaces jump between small sizes, and cuDNN has other plans for sides that are no
# multiples of 64. benchmarks/formula_errors.py --bound compares the formulas with predictions of other sizes.
SIDES = 256, 264, 320, 384, 448, 512, 520, 616, 720, 768, 832, 1024, 1088, 1216, 1384, 1408, 1536, 2048
TILES = 512, 768, 1024  # pixels
PASSES = (1, 1), (2, 0.5), (0.5, 2)  # heights and widths of ComfyUI's tiles, in sides; other code cuts squares only
TILED_STEP = 512  # pixels: images in tiles have sides of multiples of it
BETWEEN = 1.002  # factor of a formula above the predictions, for the sizes between
_MADE: dict[str, Bound] = {}  # a process's bounds by their arguments: each takes half a minute
_NO_LAYERS = ("name", "scaling_factor", "shift_factor", "latents_mean", "latents_std")


class _BoundLine(NamedTuple):
    function: str
    op: str
    dtype: str
    passes: Sequence[tuple[float, float]]
    law: Mapping[str, int] = {}
    predictions: int = 0
    overshoot: float = 0.0
    at: tuple[int, ...] = ()

    def bytes(self, height: int, width: int, tile: int | None = None) -> int:
        """Return the bytes of an image of this many pixels. tile: its side in pixels, for a tiled op."""
        height, width = whole("height", height, most=MOST_SIDE), whole("width", width, most=MOST_SIDE)
        if (tile is not None) != self.op.endswith("_tiled"):
            raise ArgumentError("tile", "a side with the tiled ops and None with others", f"{tile} with {self.op}")
        side = 0 if tile is None else whole("tile", tile, most=MOST_SIDE)
        return int(value_of(self.law, self._symbols(height, width, side)))

    def above(self, uppers: Mapping[Point, Sequence[int]]) -> _BoundLine:
        """Return the line with the smallest excess above `upper` of every prediction, raised for the sizes between."""
        powers = ["HW", *["cut"] * self.op.endswith("_tiled"), ""]
        sizes = np.array([max(found) for found in uppers.values()], dtype=float)
        at = self._symbols(*np.array([(point.height, point.width, point.tile) for point in uppers], dtype=float).T)
        found = least_above(powers, at, sizes, np.zeros(len(sizes)))
        law = {power: math.ceil(value * BETWEEN) for power, value in found.items()}
        excess = value_of(law, at) / sizes - 1
        point = [*uppers][int(excess.argmax())]
        size = (point.height, point.width, point.tile)[: 3 if point.tile else 2]
        count = sum(map(len, uppers.values()))
        return self._replace(law=law, predictions=count, overshoot=float(excess.max()), at=size)

    def _symbols(self, height: Any, width: Any, tile: Any) -> dict[str, Any]:
        tiles = [(tile * high // 1, tile * wide // 1) for high, wide in self.passes]
        cut = np.max([np.minimum(height, high) * np.minimum(width, wide) for high, wide in tiles], 0)
        return symbols_at(height, width) | {"cut": cut}

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
    lines : tuple
        A formula for each function, op and dtype. A formula's method ``bytes(height, width, tile=None)`` returns bytes.
        A formula's attributes are:

        - `function`: the application's estimate, by its key in the pasted table;
        - `op`: ``"encode"``, ``"decode"``, or ``"encode_tiled"``, ``"decode_tiled"`` for images larger than a tile;
        - `dtype`;
        - `passes`: heights and widths of the tiles, in sides of a tile (ComfyUI's three passes cut other shapes, too);
        - `law`: bytes by power: ``"HW"``, the image's pixels; ``"cut"``, the pixels of the largest tile; ``""``, the
          constant;
        - `predictions`: number of predictions that the formula was made from;
        - `overshoot`: largest excess over the largest `upper` of a size, as a share of `upper`;
        - `at`: the height and width of this excess, and the tile of a tiled op.
    domain : str
        The sizes, cards, versions and code that the formulas hold for, one line of words for each.
    """

    def __init__(self, application: str, lines: Sequence[_BoundLine], domain: str):
        self.application, self.lines, self.domain = application, tuple(lines), domain

    def find(self, model: str, op: str, dtype: str) -> _BoundLine:
        """Return the formula for a model's op. ValueError if there is none."""
        estimates = _ESTIMATES[self.application]
        for line in self.lines:
            if model in estimates[line.function].models and (line.op, line.dtype) == (op, dtype):
                return line
        known = ", ".join(line.name for line in self.lines)
        raise ArgumentError("find", f"one of {known}", f"{model} {op} {dtype}")

    def python(self) -> str:
        """Write a Python module with the application's functions, to paste. It imports nothing."""
        title, source = APPLICATIONS[self.application]
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
            source,
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
        headline = f"{len(cells)} formulas for {APPLICATIONS[self.application][0]}, above all {played} predictions."
        table = Columns(("formula", "bytes", "excess", "at"), cells)
        return Sheet(headline, [table, Bullets(self.domain.splitlines(), title="They hold for:")])


@shared
def bound(
    application: str, models: str | Sequence[str] | None = None, dtypes: Dtype | Sequence[Dtype] = DTYPES, *,
    gpu: str | Sequence[str] = "RTX 4090", memory: int | str | None = None, cudnn_version: str | None = None,
    torch_version: str | None = None, sides: int | Iterable[int] = SIDES, progress: Progress = None,
    executor: Executor | None = None,
) -> Bound:  # fmt: skip
    """Make formulas for an application's own estimates of a VAE's memory. Each formula is at least `upper` of every
    prediction.

    Predict every size of the domain, on every card, in every way that the application runs it. Each formula is the line
    above these predictions with the smallest excess, raised by 0.2% for the sizes between.

    Parameters
    ----------
    application : str
        ``"comfyui"``: ``memory_used_encode`` and ``memory_used_decode`` of its class VAE, with tiles. Further formulas
        are for FLUX.2 and for one frame of Qwen-Image's and Wan 2.1's VAE. ``"invokeai"``:
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
        for name, estimate in _ESTIMATES[application].items()
    }
    domain = _Domain(
        {name: estimate for name, estimate in estimates.items() if estimate.models},
        [find_card(name, memory) for name in gpus],
        Software(torch_version=torch_version, cudnn_version=cudnn_version),
        pixels,
    )
    sweeps = domain.sweeps(dtypes)
    if not sweeps:
        raise ArgumentError("models, dtypes", f"some that {application} runs", f"{models!r}, {dtypes!r}")
    tasks = [(line, point) for line, points in sweeps for point in points]
    uppers: dict[str, dict[Point, list[int]]] = {line.name: {} for line, _ in sweeps}
    with polling(progress, "bound", total=len(tasks), bar_format=BAR) as poll:
        found = spread(domain.uppers, tasks, executor, lambda task: task[0].name)
        for done, ((line, point), sizes) in enumerate(found, 1):
            uppers[line.name][point] = sizes
            if poll:
                poll(done, len(tasks))
    lines = [line.above(uppers[line.name]) for line, points in sweeps if len(uppers[line.name]) == len(points)]
    if not lines:
        raise RuntimeError("executor: its workers died before a formula was finished; pass one with living workers")
    made = Bound(application, lines, domain.describe())
    if len(lines) == len(sweeps):
        _MADE[question] = made
    return made


class _Estimate(NamedTuple):
    """The runs that a single estimate of an application is for."""

    models: tuple[str, ...]
    runtimes: tuple[str, ...]  # the code that the application runs, in any of its releases
    dtypes: tuple[str, ...] = DTYPES
    is_tiled: bool = False  # the estimate knows the side of a tile
    is_upcast: bool = False  # float32 runs have float16 weights, too

    @property
    def passes(self) -> Sequence[tuple[float, float]]:
        return PASSES if "comfyui" in self.runtimes else PASSES[:1]


class _Domain(NamedTuple):
    estimates: dict[str, _Estimate]
    cards: list[Card]
    software: Software
    sides: Sequence[int]

    def sweeps(self, dtypes: Sequence[str]) -> list[tuple[_BoundLine, list[Point]]]:
        """Return the lines, without their laws, each with the sizes of its predictions."""
        return [
            (_BoundLine(name, op + ending, dtype, estimate.passes), points)
            for name, estimate in self.estimates.items()
            for (op, dtype), (ending, points) in product(product(OPS, estimate.dtypes), self._points(name).items())
            if dtype in dtypes and points
        ]

    def _points(self, name: str) -> dict[str, list[Point]]:
        """Return the sizes of whole images and of images in tiles, by the ending of the op."""
        estimate = self.estimates[name]
        step = max(packing(code, architecture(model)) * 8 for code in estimate.runtimes for model in estimate.models)
        # The prediction itself refuses sides that are no multiples of 8.
        fitting = [side for side in self.sides if step == 8 or side % step == 0]
        images = [Point(*size) for size in product(fitting, repeat=2) if math.prod(size) < MOST_PIXELS]
        if not images:
            raise ArgumentError("sides", f"multiples of {step} for {name}", "others")
        cut = [one for one in images if one.height % TILED_STEP == one.width % TILED_STEP == 0] * estimate.is_tiled
        tiled = [one._replace(tile=tile) for tile in TILES for one in cut if tile < max(one.height, one.width)]
        return {"": images, "_tiled": tiled}

    def uppers(self, task: tuple[Any, Point]) -> list[int]:
        """Return `upper` of one size in every way that the application may run it."""
        line, point = task
        estimate, op, dtype = self.estimates[line.function], line.op, line.dtype
        weights = distinct((dtype, "float16")) if estimate.is_upcast and dtype == "float32" else [dtype]
        runtimes = [code for code in estimate.runtimes if RUNTIMES[code].tiles or not point.tile]
        # Models with the same layers need the same memory.
        archs = map(architecture, estimate.models)
        layers = {tuple(v for k, v in arch.items() if k not in _NO_LAYERS): arch for arch in archs}
        found = []
        for card, arch, runtime, weight in product(self.cards, layers.values(), runtimes, weights):
            job = Job(arch, op, point.height, point.width, dtype, weight, tile=point.tile or None)
            found.append(Prediction(VAERequest(card, replace(self.software, runtime=runtime), job)).upper)
        return found

    def describe(self) -> str:
        """Describe the domain, one line per fact."""
        estimates = self.estimates.values()
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
        for name in [name for name, one in self.estimates.items() if one.is_tiled][:1]:
            points = self._points(name)["_tiled"]
            tiles, images = (
                ", ".join(map(str, sorted({getattr(point, side) for point in points}))) for side in ("tile", "width")
            )
            code = "ComfyUI" if self.estimates[name].passes == PASSES else "diffusers"
            cut = f"{tiles} pixels as {code} cuts them, in images with sides of {images}"
            lines.append(f"tiles: {cut if points else 'none were predicted'}")
        return "\n".join(lines)


_COMFYUI_MODELS = "sd15", "sdxl", "flux", "sd3", "zimage", "playground-v2.5"
_FLUX2_MODELS = "flux2", "flux2-small"
_ESTIMATES = {
    # Its class VAE has one estimate for every AutoencoderKL, and another for the packed latents of FLUX.2.
    "comfyui": {
        "vae": _Estimate(_COMFYUI_MODELS, ("comfyui",), is_tiled=True),
        "flux2": _Estimate(_FLUX2_MODELS, ("comfyui",), is_tiled=True),
        "wan": _Estimate(("qwen-image",), ("comfyui",), is_tiled=True),
    },
    # It runs SD's VAE in one of two dtypes, however the weights are stored. FLUX's and Z-Image's run in its own
    # AutoEncoder, after BFL's, and in diffusers'. FLUX.2's runs without an estimate of its own (8e71a8a).
    "invokeai": {
        "sd15_sdxl": _Estimate(
            ("sd15", "sdxl", "playground-v2.5"), ("diffusers",), ("float16", "float32"), True, is_upcast=True
        ),
        "flux": _Estimate(("flux", "zimage"), ("bfl", "diffusers"), is_tiled=True),
        "flux2": _Estimate(_FLUX2_MODELS, ("diffusers",)),
        "sd3": _Estimate(("sd3",), ("diffusers",)),
        "cogview4": _Estimate(("cogview4",), ("diffusers",)),
        "qwen_image": _Estimate(("qwen-image",), ("diffusers",), is_tiled=True),
    },
}
