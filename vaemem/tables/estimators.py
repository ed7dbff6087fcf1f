"""Published estimators of a VAE's memory, and their errors on measured rows."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vaemem._common import ELEMENT_BYTES, MIB, OPS, as_csv, choose, distinct, grouped, listed, mib, need, whole
from vaemem._errors import ArgumentError
from vaemem._render import Bullets, Columns, Sheet, Shown, Sizer
from vaemem._saving import write
from vaemem.prediction.predict_vae import predict as predict_vae
from vaemem.prediction.runtimes import WAN
from vaemem.sdcpp.graphs import LATENT_CHANNELS, SDCPP_VERSION, graph
from vaemem.tables.fit import KEY, Fit, FittedLine
from vaemem.tables.table import BYTE_COLUMNS, Row, Table, as_ran, check_complete, in_tiles

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Estimator:
    """A named estimate of a run's memory above its weights.

    Attributes
    ----------
    name : str
    formula : str
        In words; H, W: the image's height and width in pixels, e: bytes of an element.
    source : str
        Who ships it, and where.
    runtime : str
        The program whose memory it estimates.
    function : callable
        Row -> bytes, or None if the estimate does not apply (another model, op or dtype).

    Examples
    --------
    >>> mine = Estimator("mine", "2200 H W e", "a guess", lambda row: 2200 * row["height"] * row["width"] * 2)
    >>> mine({"height": 1024, "width": 1024}) / 2**20
    4400.0
    >>> ESTIMATORS["comfyui"].formula
    '2178 H W e (decode), 1767 H W e (encode); ...decode in tiles: tile^2 e k'
    """

    name: str
    formula: str
    source: str
    function: Callable[[Row], Any]
    runtime: str = "PyTorch"

    def __call__(self, row: Row) -> Any:
        return self.function(row)


def pixels(row: Row) -> int:
    """Count the pixels of a row's image."""
    return int(row["height"] * row["width"])


_SERIES = operator.itemgetter(*KEY, "source", "group")
# Columns that name a compared row.
_SHOWN = (
    *("model", "op", "phase", "height", "width", "batch", "frames", "tokens", "dtype", "tile", "tile_overlap"),
    *("runtime", "device", "group"),
)
# Columns by which errors are grouped.
_GROUP = ("model", "op", "dtype", "tile", "tile_overlap")


def series_of(row: Row) -> tuple[Any, ...]:
    """Return the common key of rows that differ only in size."""
    return tuple(_SERIES(as_ran(row)))


def in_tiles_untold(row: Row) -> bool:
    """Tell whether a row ran in tiles although its op does not say so."""
    return in_tiles(row) and not str(row["op"]).endswith("_tiled")


def _images(row: Row) -> int:
    return row["batch"] or 1


# Bytes that applications reserve for each H W e, by model and op. "" stands for every AutoencoderKL and
# AutoencoderKLFlux2 without constants of its own.
_Constants = Mapping[str, Mapping[str, int]]
_COMFYUI: _Constants = {
    "": {"decode": 2178, "encode": 1767},
    "qwen-image": {"decode": 2200, "encode": 1500},  # of up to four frames of latents
    WAN: {"decode": 2200, "encode": 1500},
    "wan2.2": {"decode": 8000, "encode": 3300},
    "qwen-image-2.1": {"decode": 900, "encode": 600},
    "hunyuanimage-2.1": {"decode": 700, "encode": 700},
}
_INVOKEAI: _Constants = {
    "": {"decode": 2200, "encode": 1100},
    "qwen-image": {"decode": 2900, "encode": 1600},
    WAN: {"decode": 2900, "encode": 1450},
    "wan2.2": {"decode": 2900, "encode": 1450},
}
SHIPPED: Mapping[str, Mapping[str, float]] = {
    op: {"ComfyUI": _COMFYUI[""][op], "InvokeAI": _INVOKEAI[""][op]} for op in OPS
}


def _by_constant(constants: _Constants, row: Row) -> int | None:
    """Return H*W*e times the constant of the model's op; None if it has none, or if the dtype's width is unknown."""
    own = constants.get(row["model"], constants[""])
    constant, element = own.get(row["op"].removesuffix("_tiled")), ELEMENT_BYTES.get(row["dtype"])
    return constant * pixels(row) * element if constant and element else None


def _comfyui(row: Row) -> int | None:
    """Reserve one tile for a tiled decode, as ComfyUI; for an encode the whole image, no estimate of tiles."""
    tile = {}
    if in_tiles(row):
        if row["op"] != "decode_tiled" or not row.get("tile"):
            return None
        tile = {side: min(row[side], row["tile"]) for side in ("height", "width")}
    # A batch runs in groups of as many images as fit.
    one = _by_constant(_COMFYUI, row | tile)
    return one and one * _images(row)


def _invokeai(row: Row) -> float | None:
    model, is_tiled = row["model"], in_tiles(row)
    is_sd, is_qwen = model in ("sd15", "sdxl", "playground-v2.5"), model == "qwen-image"
    is_wan = model in (WAN, "wan2.2")
    if _images(row) > 1 or model.startswith("flux2") or (is_tiled and not (is_sd or is_qwen or is_wan)):
        return None  # supports no batch, no FLUX.2, and no tiles but its own
    if is_tiled and not row.get("tile"):
        return None
    estimate = _by_constant(_INVOKEAI, row | ({"height": row["tile"], "width": row["tile"]} if is_tiled else {}))
    if estimate is None:
        return None
    decodes = row["op"].startswith("decode")
    whole_ones = (5 if decodes else 1) if is_tiled and is_qwen else (2 if decodes else 1) if is_wan else 0
    held = 3 * whole_ones * pixels(row) * ELEMENT_BYTES[row["dtype"]]
    is_upcast = is_sd and row["dtype"] == "float32"
    return estimate * (1.25 if is_tiled else 1) + held + (250 * MIB if is_upcast else 0)


# Parameters of stable-diffusion-v1-5: UNet2DConditionModel, AutoencoderKL and CLIPTextModel, from their configs.
SD15_PARAMETERS = {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480}
# The equation's average of a UNet's channels. It is written there as (320 + 640 + 1280) / 3, which is 746.67.
SD15_AVERAGE_CHANNELS = 745


def sd15_equation(height: int, width: int, prompt_tokens: int = 77) -> dict[str, float]:
    """Evaluate a published equation for a whole run of Stable Diffusion 1.5 in float16, term by term.

    Parameters
    ----------
    height, width : int
        The image's size, in pixels.
    prompt_tokens : int

    Returns
    -------
    dict of str to float
        Bytes of the terms: weights, "encode image", denoise and decode. `overhead` is 20% of the sum of the weights and
        the largest of the other three. `total` is the equation's result.

    Examples
    --------
    >>> {name: round(size / 2**20, 1) for name, size in sd15_equation(512, 512).items()}
    {'weights': 2033.7, 'encode image': 6.0, 'denoise': 18.1, 'decode': 6.0, 'overhead': 410.3, 'total': 2462.1}
    """
    height, width = whole("height", height), whole("width", width)
    prompt_tokens = whole("prompt_tokens", prompt_tokens)
    latent = (height // 8) * (width // 8)
    vae = 4 * height * width * 3 * 2 + 2.0 * 4 * latent  # the image and three temporary ones, in 2 bytes a number
    denoise = 3 * 2.0 * latent * SD15_AVERAGE_CHANNELS + 2.0 * latent * prompt_tokens
    weights = 2.0 * sum(SD15_PARAMETERS.values())
    terms = {"weights": weights, "encode image": vae, "denoise": denoise, "decode": vae}
    held = weights + max(vae, denoise)
    return terms | {"overhead": 0.2 * held, "total": 1.2 * held}


def _sd15_equation(row: Row) -> float | None:
    """Apply the equation to one image in numbers of 2 bytes."""
    is_asked = (row["model"], row["op"], ELEMENT_BYTES.get(row["dtype"]), _images(row)) == ("sd15", "pipeline", 2, 1)
    if not is_asked or row.get("phase") not in (None, "whole"):
        return None
    return sd15_equation(row["height"], row["width"], row.get("tokens") or 77)["total"]


def _mlx_im2col(row: Row) -> int | None:
    one = _by_constant({"": {"decode": 9 * 128}}, row) if row["op"] == "decode" else None
    return one and one * _images(row)


def _sd_cpp(conv_direct: bool, row: Row) -> int | None:
    """Estimate the graph. The program runs in one type for any weights, and on one image at a time."""
    sides = row["height"], row["width"]
    if row["op"] not in OPS or row["model"] not in LATENT_CHANNELS or _images(row) > 1 or any(s % 8 for s in sides):
        return None
    component = "vae-decoder" if row["op"] == "decode" else "vae-encoder"
    return graph(component, *sides, model=row["model"], conv_direct=conv_direct).buffer


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator("comfyui", "2178 H W e (decode), 1767 H W e (encode); Qwen-Image, Wan 2.1: 2200 and 1500, Wan 2.2:"
            " 8000 and 3300, Qwen-Image-2.1: 900 and 600, HunyuanImage: 700; decode in tiles: tile^2 e k",
            "ComfyUI v0.38.1 (2026-11), class VAE in comfy/sd.py; 2.73 times that for SD, FLUX and FLUX.2 on AMD since"
            " v0.3.65; an encode in tiles reserves the whole image's", _comfyui),
        Estimator("invokeai",
            "2200 H W e (decode), 1100 H W e (encode), + 250 MiB for float32 SD; Qwen-Image: 2900 and 1600; in tiles of"
            " SD: tile^2 e k 1.25, of Qwen-Image + 15 H W e (decode), 3 H W e (encode)",
            "InvokeAI 8e71a8a (2026-08-19, after v6.14.0-rc2), vae_working_memory.py on CUDA; the 250 MiB allow"
            " for larger weights; no FLUX.2. Wan: 2900 and 1450, plus 6 or 3 H W e; Anima: without this addition",
            _invokeai),
        Estimator("sd15-equation",
            "1.2 (weights + max of encode, decode: 8 (H/8) (W/8) + 24 H W and UNet: (H/8) (W/8) (4470 + 2 tokens))",
            "A published SD 1.5 VRAM calculator, for whole pipelines. It writes 745 for the average channel count"
            " (320 + 640 + 1280) / 3, which is 746.67. A row without tokens counts as 77",
            _sd15_equation),
        Estimator("mlx-im2col", "9 C_in H W e with C_in = 128: the im2col buffer of one full-size 3x3 convolution",
            "A note on MLX's VAE decode; one buffer, no activations", _mlx_im2col, "MLX"),
        Estimator("sd.cpp-im2col",
            "max(6656, 160 + H W / 1024) H W (decode), max(3382, 160 + H W / 1024) H W (encode), and the input",
            f"the compute buffer of {SDCPP_VERSION} on CUDA, its graph simulated; its log says 6656.25 MB for SDXL"
            " at 1024x1024 (pull request 890)", functools.partial(_sd_cpp, False), "stable-diffusion.cpp"),
        Estimator("sd.cpp-direct",
            "max(2816, 160 + H W / 1024) H W (decode), max(1538, 160 + H W / 1024) H W (encode), and the input",
            "the same buffer with direct convolution; its log says 176 MB for a tile of 256x256 (issue 1154)",
            functools.partial(_sd_cpp, True), "stable-diffusion.cpp"),
    )
}  # fmt: skip


class ComparedRow(NamedTuple):
    """A row and one estimate of it. `error` is estimate / measured - 1: positive if the estimate is too high."""

    row: Row
    estimator: str
    measured: int
    estimate: float
    error: float


class GroupError(NamedTuple):
    """The errors of one estimator on the rows of one model, op, dtype and tile, as fractions of the measured values. If
    `model` is None, these are the errors on all rows. The op is the one that ran: a tiled one if the image was cut.

    `worst_over` and `worst_under` are 0 if no estimate is too high, or too low. `lowest` and `highest` are the range of
    the signed errors.
    """

    estimator: str
    model: str | None
    op: str | None
    dtype: str | None
    tile: int | None
    tile_overlap: float | None
    rows: int
    median: float
    worst_over: float
    worst_under: float
    lowest: float
    highest: float


class Comparison(Shown):
    """Estimators compared with the rows of a table, as `vaemem.compare` returns them. Printing it shows the errors;
    ``to_text(all=True)`` shows each row, too.

    Attributes
    ----------
    target : str
        The column compared.
    estimators : tuple of Estimator
    rows : tuple of ComparedRow
        One for each row and estimator that applies to it.
    groups : tuple of GroupError
        One for each model, op, dtype, tile and estimator, and one for each estimator with all its rows.
    left_out : Table
        Rows that ran in tiles although their op does not say so (see Notes of `compare`).
    """

    def __init__(
        self, target: str, estimators: tuple[Estimator, ...], rows: tuple[ComparedRow, ...], left_out: Table
    ) -> None:
        self.target, self.estimators, self.rows, self.left_out = target, estimators, rows, left_out
        errors: dict[tuple[Any, ...], list[float]] = {}
        for row in rows:
            ran = as_ran(row.row)
            for key in (tuple(ran[name] for name in _GROUP), (None,) * len(_GROUP)):
                errors.setdefault((row.estimator, *key), []).append(row.error)
        self.groups = tuple(
            GroupError._make((*key, len(e), statistics.median(e), max(0.0, *e), max(0.0, -min(e)), min(e), max(e)))
            for key, e in errors.items()
        )

    def find(
        self, estimator: str, model: str | None = None, op: str | None = None, dtype: str | None = None,
        tile: int | None = None, tile_overlap: float | None = None,
    ) -> GroupError:  # fmt: skip
        """Find one estimator's errors on one model, op, dtype and tile, or on all rows. Leave out the tile if all rows
        have the same. ValueError if the estimator applies to no row, or if several tiles match."""
        found = [
            group
            for group in self.groups
            if group[:4] == (estimator, model, op, dtype)
            and tile in (None, group.tile)
            and tile_overlap in (None, group.tile_overlap)
        ]
        if not found:
            raise ArgumentError("estimator", f"one that applies to a row of {model}, {op}, {dtype}", repr(estimator))
        if len(found) > 1:
            ways = ", ".join(f"tile={group.tile}, tile_overlap={group.tile_overlap}" for group in found)
            raise ArgumentError("tile", f"one of several ({ways})", str(tile))
        return found[0]

    def grid(self, rows: bool = False) -> tuple[list[str], list[list[str]]]:
        """Make header and cells: one line for each model, op, dtype and tile, or with `rows` one for each row."""
        applied = {row.estimator for row in self.rows}
        names = [estimator.name for estimator in self.estimators if estimator.name in applied]
        lines, cut = [], [name for name in ("tile", "tile_overlap") if any(row.row[name] for row in self.rows)]
        columns = ["tile" if name == "tile" else "overlap" for name in cut]
        if rows:
            for compared in grouped(self.rows, lambda row: id(row.row)).values():
                r, measured = compared[0].row, compared[0].measured
                said = {row.estimator: f"{mib(row.estimate)} ({_percent(row.error)})" for row in compared}
                op, size = " ".join(filter(None, (r["op"], r["phase"]))), f"{r['height']}x{r['width']}"
                shown = [said.get(name, "") for name in names]
                tiles = (_shown(r[name]) for name in cut)
                lines.append([r["model"], op, size, r["dtype"], *tiles, mib(measured), *shown])
            return ["model", "op", "size", "dtype", *columns, "rows' MiB", *names], lines
        ordered = sorted(self.groups, key=lambda g: g.model is None)
        for key, groups in grouped(ordered, operator.attrgetter(*_GROUP)).items():
            said = {g.estimator: f"{_percent(g.median)} ({_percent(g.lowest)}..{_percent(g.highest)})" for g in groups}
            count = str(max(group.rows for group in groups))  # of all rows, each estimator has its own
            tiles = (_shown(getattr(groups[0], name)) for name in cut)
            lines.append([*(part or "all" for part in key[:3]), *tiles, count, *(said.get(name, "") for name in names)])
        return ["model", "op", "dtype", *columns, "rows", *names], lines

    def _sheet(self, size: Sizer) -> Sheet:
        totals = [group for group in self.groups if group.model is None]
        figures = [(g.estimator, str(g.rows), *map(_percent, (g.median, g.lowest, g.highest))) for g in totals]
        nearest = min(totals, key=lambda group: (-group.rows, abs(group.median)), default=None)
        headline = f"No estimate of {self.target} applies."
        if nearest:
            headline = f"{nearest.estimator} is nearest to {self.target} on {_count(nearest.rows)}:"
            headline += f" its median error is {_percent(nearest.median)}%."
        which = distinct(f"{r['model']} {r['op']} {r['height']}x{r['width']}" for r in self.left_out)
        out = [f"Left out, because they ran in tiles: {_count(len(self.left_out))} ({', '.join(which)})."] * bool(which)
        return Sheet(headline, [
            Columns(("estimator", "rows", "median error, %", "lowest", "highest"), figures),
            Columns(*self.grid(), title="Median error (lowest..highest), %:"),
            Columns(*self.grid(rows=True), title=f"{self.target}: estimate in MiB (error), %:", detail=True),
            Bullets(out),
        ])  # fmt: skip

    def _data(self) -> dict[str, Any]:
        return {
            "answer": "comparison", "target": self.target, "groups": self._records(rows=False),
            "rows": self._records(rows=True), "left_out": [*self.left_out],
        }  # fmt: skip

    def _records(self, rows: bool) -> list[dict[str, Any]]:
        if not rows:
            return [group._asdict() for group in self.groups]
        names = ("estimator", "measured_bytes", "estimate_bytes", "error")
        return [{key: r.row[key] for key in _SHOWN} | dict(zip(names, r[1:], strict=True)) for r in self.rows]

    def to_pandas(self, rows: bool = False) -> pandas.DataFrame:
        """The groups as a pandas.DataFrame, or with `rows` a line for each row and estimator; errors are fractions."""
        return need("pandas", "to_pandas").DataFrame(self._records(rows))

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write a line for each row and estimator as CSV: what ran, and the target's bytes measured and estimated.

        Parameters
        ----------
        path : path, optional

        Returns
        -------
        str or None
            The text if there is no `path`.

        Examples
        --------
        >>> print(compare(seed_table()[:1], predict).to_csv())
        model,op,phase,height,width,...,estimator,measured_bytes,estimate_bytes,error
        flux,encode,,512,512,...,predict,...
        """
        return write(path, as_csv(self._records(rows=True)))


def compare(table: Table, estimators: Any = None, target: str = "reserved_bytes") -> Comparison:
    """Compute the errors of estimators on the rows of a table.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Rows need model, op, height, width, dtype and the target.
    estimators : name, estimator, or list or dict of them, optional
        By default everything in ``vaemem.ESTIMATORS``. An estimator is one of its names, a `Fit`, one of its formulas,
        any function of a row (a dict) that gives bytes or None, or `vaemem.predict` itself (also as a
        ``functools.partial`` with a gpu or versions). The keys of a dict are the names shown.
    target : str
        A column in bytes: ``"allocated_bytes"`` for the memory of tensors, ``"reserved_bytes"`` for the memory that the
        process holds.

    Raises
    ------
    ValueError
        An unknown target or name; a row without a needed value; a fit of another target; two estimators with one name;
        an estimator that does not return a size; no row; or no row that an estimator applies to.

    Notes
    -----
    If `vaemem.predict` is among the estimators, `vaemem.predict_pipeline` predicts the rows of diffusers' pipelines.
    The function gets the row's size, batch, tokens, dtype, way and card. Rows have no guidance and no types of weights,
    so these keep their defaults.

    A row counts under the op that really ran: whole or in tiles. If one tile holds the whole image, that is the op
    without tiles. If the column `tile` shows tiles but the op does not, the row is left out and listed. Runs in tiles
    are not compared with ComfyUI's and InvokeAI's estimates for whole images. A tiled row without its tile is compared
    neither with them nor with `vaemem.predict`.

    Examples
    --------
    >>> print(compare(seed_table().filter(model="flux", op="decode"), [predict, "comfyui", "invokeai"]))
    predict is nearest to reserved_bytes on 15 rows: its median error is 0.0%.
    ...
    >>> table = seed_table().filter(op="decode", dtype="float16")
    >>> compare(table, {"mine": lambda row: 2000 * row["height"] * row["width"] * 2}).find("mine").worst_under
    0.08...
    """
    table = Table(table)
    choose("target", target, BYTE_COLUMNS)
    chosen = _estimators(estimators, target)
    if not len(table):
        raise ArgumentError("table", "at least one row", "none")
    check_complete(table, target)
    for i, row in enumerate(table):
        if not row[target]:
            wanted, advice = "more than 0, because errors are shares of it", "filter such rows out"
            raise ArgumentError("table", wanted, "0", advice, f"row {i}: {target}")
    left_out = table.filter(in_tiles_untold)
    compared = tuple(
        ComparedRow(row, estimator.name, row[target], estimate, estimate / row[target] - 1)
        for row in table
        if not in_tiles_untold(row)
        for estimator in chosen
        if (estimate := _estimate(estimator, as_ran(row), target)) is not None
    )
    if not compared:
        names, kinds = (", ".join(distinct(all_of)) for all_of in ([one.name for one in chosen], map(_kind, table)))
        raise ArgumentError("estimators", f"one that applies to {kinds}", str(names))
    return Comparison(target, chosen, compared, left_out)


def _kind(row: Row) -> str:
    return f"{row['model']} {row['op']} {row['dtype']}{' on the CPU' if row['device'] == 'cpu' else ''}"


def _estimate(estimator: Estimator, row: Row, target: str) -> float | None:
    value = estimator(dict(row))
    if value is None:
        return None
    if isinstance(value, Mapping):  # a row
        return value[target]  # type: ignore[no-any-return]
    value = getattr(value, target.removesuffix("_bytes"), value)  # a Prediction has .allocated and .reserved
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ArgumentError(f"estimator {estimator.name!r}", "bytes >= 0 or None", repr(value))
    return value


def _estimators(given: Any, target: str) -> tuple[Estimator, ...]:
    given = ESTIMATORS if given is None else given
    is_named = isinstance(given, Mapping)
    pairs = given.items() if is_named else [(None, one) for one in listed(given, (str, Fit))]
    chosen = tuple(_estimator(name, one, target) for name, one in pairs)
    names = [estimator.name for estimator in chosen]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        got = f"several named {', '.join(sorted(twice))}"
        raise ArgumentError("estimators", "distinct names", got, "give a dict of name to estimator")
    return chosen


def _estimator(name: str | None, given: Any, target: str) -> Estimator:
    if isinstance(given, str):
        if given not in ESTIMATORS:
            raise ArgumentError("estimator", f"one of {', '.join(ESTIMATORS)}, or a function of a row", repr(given))
        given = ESTIMATORS[given]
    if isinstance(given, Estimator):
        return given if name is None else replace(given, name=name)
    if isinstance(given, FittedLine | Fit):
        if given.target != target:
            raise ArgumentError("fit", f"a fit of {target}", f"one of {given.target}")
        how = "least squares" if given.quantile is None else f"quantile {given.quantile:g}"
        found = Fit(given.target, given.quantile, listed(given, ()))
        return Estimator(name or "fit", f"a H W e + b by {how}", "vaemem.fit", functools.partial(_fitted, found))
    if not callable(given):
        raise ArgumentError("estimator", "a name, a fit or a function of a row", type(given).__name__)
    inner = given.func if isinstance(given, functools.partial) else given
    called = str(name or getattr(inner, "__name__", type(inner).__name__))
    if {"model", "op", "height", "width", "dtype"} <= set(inspect.signature(given).parameters):
        return Estimator(called, "the run simulated", called, functools.partial(_predicted, given))
    return Estimator(called, "a function of a row", called, given)


def _fitted(formulas: Fit, row: Row) -> float | None:
    """Return the formula of the row's model and op, fitted to its dtype. A value open on either side matches."""

    def suits(formula: FittedLine) -> bool:
        pairs = [(name, getattr(formula, name), row[name]) for name in KEY]
        is_same = all(a == b or (name not in ("model", "op") and None in (a, b)) for name, a, b in pairs)
        return is_same and row["dtype"] in {fitted.dtype for fitted in formula.rows}

    matching = [formula for formula in formulas if suits(formula)]
    if len(matching) > 1:
        raise ArgumentError("fit", "one formula for a row", ", ".join(formula.name for formula in matching))
    return matching[0].predict(row["height"], row["width"], row["dtype"]) if matching else None


def _predicted(predict: Callable[..., Any], row: Row) -> Any:
    """Call `vaemem.predict` for the row. Values missing in the row, or bound by a partial, stay unchanged. Return None
    for a tiled run without the tile's side."""
    bound = predict.keywords if isinstance(predict, functools.partial) else {}
    if row["runtime"] == "vaemem":
        return None  # predicts PyTorch's VAEs, not this engine
    if row["op"] == "pipeline":
        return _pipeline_row(row, bound) if getattr(predict, "func", predict) is predict_vae else None
    said = {name: row[name] for name in ("model", "op", "height", "width", "dtype", "batch", "runtime")}
    said |= {"gpu": row["device"], "tile": row["tile"], "tile_overlap": row["tile_overlap"]}
    if in_tiles(row) and not (row["tile"] or "tile" in bound):
        return None
    known = inspect.signature(predict).parameters.keys() - bound
    asked = {name: value for name, value in said.items() if name in known and value is not None}
    if row["source"] == "predicted" and row["weights_bytes"]:  # weights may have another type than the run
        usual = predict(**{name: value for name, value in asked.items() if name != "dtype"})
        if all(getattr(usual, name, None) == row[name] for name in ("dtype", "weights_bytes")):
            return usual
    return predict(**asked)


def _pipeline_row(row: Row, bound: Mapping[str, Any]) -> Row | None:
    """Return the row of the same phase from `predict_pipeline`; None if it is unknown, or the row is incomplete."""
    from vaemem.pipelines.components import PIPELINES
    from vaemem.pipelines.predict_pipeline import predict_pipeline  # half of this package's import

    known = r"offload (none|model|sequential), VAE (whole|tiled|sliced)"
    way = re.fullmatch(known, row["way"] or "")
    if not way or row["model"] not in PIPELINES or row["runtime"] != "diffusers" or row["device"] == "cpu":
        return None
    said: dict[str, Any] = {name: row[name] for name in ("height", "width", "batch", "frames", "dtype")}
    said |= {"prompt_tokens": row["tokens"], "offload": way[1], "vae": way[2], "image": row["phase"] == "encode image"}
    told = {name: value for name, value in (said | {"gpu": row["device"]}).items() if value is not None}
    made = predict_pipeline(row["model"], **told | dict(bound))
    return next((one for one in Table(made.rows()) if one["phase"] == (row["phase"] or "whole")), None)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _count(rows: int) -> str:
    return f"{rows} row{'s' * (rows != 1)}"


def _percent(error: float) -> str:
    return f"{100 * error + 0.0:+.1f}" if abs(error) >= 0.0005 else "0.0"
