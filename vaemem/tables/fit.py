"""Fit a formula to a table: memory (or time) as a*H*W*e + b, with the residuals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from vaemem._common import ELEMENT_BYTES, MIB, MOST_SIDE, choose, chosen, grouped, meant, mib, need, real
from vaemem._errors import ArgumentError
from vaemem._render import Bullets, Columns, Sheet, Sizer, Typeset
from vaemem.prediction.laws import write_equation, write_function
from vaemem.tables.table import BYTE_COLUMNS, Row, Table, as_ran, check_complete, differing, in_words

KEY = ("model", "op", "phase", "dtype", "tile", "tile_overlap", "runtime", "way", "device", "batch", "frames", "tokens")
TARGETS = (*BYTE_COLUMNS, "seconds")


class FitRow(NamedTuple):
    """A row that a formula was fitted to. Figures are in the target's unit: bytes or seconds."""

    height: int
    width: int
    dtype: str
    measured: float
    fitted: float
    residual: float  # measured - fitted
    error: float | None  # fitted / measured - 1: positive if the formula is too high; None if measured is 0
    constant: float  # measured / (H*W*e): the least a of a formula without b that covers this row


@dataclass(frozen=True, repr=False)
class FittedLine(Typeset):
    """The formula `target = a * H*W*e + b` for some rows. The attributes named in `KEY` are the rows' common values, or
    None if the rows differ.

    H and W are the image's height and width in pixels, e the bytes of one element of dtype. Divide `a` by 128 for
    the number of full-size activations (T = 128*H*W*e) that it stands for.

    Attributes
    ----------
    a, b : float
        Bytes (or seconds) per pixel and element byte, and bytes (or seconds).
    a_error, b_error : float or None
        Standard errors; None for a quantile fit and for two rows, which any line fits.
    r2 : float or None
        Share of the variance explained; None for a quantile fit and if all rows are equal.
    rows : tuple of FitRow
        The rows fitted, each with its residual.
    """

    name: str
    model: str | None
    op: str | None
    phase: str | None
    dtype: str | None
    tile: int | None
    tile_overlap: float | None
    runtime: str | None
    way: str | None
    device: str | None
    batch: int | None
    frames: int | None
    tokens: int | None
    target: str
    quantile: float | None
    a: float
    b: float
    a_error: float | None
    b_error: float | None
    r2: float | None
    rows: tuple[FitRow, ...]

    @property
    def n(self) -> int:
        """Rows fitted."""
        return len(self.rows)

    @property
    def max_over(self) -> float:
        """The worst over-estimate as a fraction of the measured value (0.02 is 2% too much); 0 if there is none."""
        return max(0.0, *(row.error or 0.0 for row in self.rows))

    @property
    def max_under(self) -> float:
        """The worst under-estimate as a fraction of the measured value; 0 if there is none."""
        return max(0.0, *(-(row.error or 0.0) for row in self.rows))

    @property
    def constant_median(self) -> float:
        """The rows' median implied constant, measured / (H*W*e)."""
        return statistics.median(row.constant for row in self.rows)

    @property
    def constant_max(self) -> float:
        """The largest of the rows' implied constants. With it as k, k*H*W*e is enough for every row."""
        return max(row.constant for row in self.rows)

    def predict(self, height: int, width: int, dtype: str | None = None) -> float:
        """Return the formula's value at a size.

        Parameters
        ----------
        height, width : int
            The image's size, in pixels, at least 1.
        dtype : str, optional
            float32, float16 or bfloat16; by default the rows' dtype, or float32 if they differ.

        Returns
        -------
        int or float
            Whole bytes (rounded; rounded up for a quantile fit, which is a bound), or seconds.

        Raises
        ------
        ValueError
            A size below 1, an unknown dtype, or a dtype that the formula was not fitted to.
        """
        for name, pixels in (("height", height), ("width", width)):
            if not 1 <= real(pixels) <= MOST_SIDE:
                raise ArgumentError(name, f"from 1 to {MOST_SIDE}", repr(pixels))
        dtype = self.dtype or "float32" if dtype is None else meant("dtype", dtype, ELEMENT_BYTES)
        if self.dtype not in (None, dtype):
            raise ArgumentError("dtype", f"{self.dtype}, which {self.name} was fitted to", repr(dtype))
        value = self.a * (height * width * ELEMENT_BYTES[dtype]) + self.b
        if self.target == "seconds":
            return value
        return round(value) if self.quantile is None else math.ceil(value)

    def python(self) -> str:
        """Write `predict` as a Python function of height, width and element_bytes (needs `math`)."""
        call = "" if self.target == "seconds" else "round" if self.quantile is None else "math.ceil"
        arguments = f"height, width, element_bytes={ELEMENT_BYTES[self.rows[0].dtype]}"
        line = f"return {call}({self.a!r} * (height * width * element_bytes) + {self.b!r})"
        return write_function(f"{self.name}_{self.target}", arguments, self._summary(), [line])

    def latex(self) -> str:
        """Return the formula as a LaTeX equation body, standard errors included."""
        b = f"{'-' if self.b < 0 else '+'} {_pm(abs(self.b), self.b_error)}"
        name = f"{self.target.removesuffix('_bytes')}, {self.name}"
        return write_equation(name, rf"{_pm(self.a, self.a_error)}\,H W e {b}")

    def _data(self) -> dict[str, Any]:
        names = ("n", "max_over", "max_under", "constant_median", "constant_max")
        figures = {name: getattr(self, name) for name in names}
        return {"answer": "fitted line"} | vars(self) | figures | {"rows": [row._asdict() for row in self.rows]}

    def _sheet(self, size: Sizer) -> Sheet:
        return Fit(self.target, self.quantile, [self])._sheet(size)

    @property
    def equation(self) -> str:
        """The formula in text: ``1216.112 * H*W*e + 2098982``."""
        b = format(abs(self.b), ".0f" if self.target != "seconds" else ".4g")
        return f"{self.a:.7g} * H*W*e {'-' if self.b < 0 else '+'} {b}"

    def _summary(self) -> str:
        how = "least squares" if self.quantile is None else f"quantile {self.quantile:g}"
        return f"{how}, {self.n} rows, worst {_percent(self.max_over)} and {_percent(-self.max_under)}"

    def _residuals(self, detail: bool) -> Columns:
        """Make a table with one line per row."""
        unit, show = ("MiB", mib) if self.target != "seconds" else ("s", "{:.3f}".format)
        header = ("size", "dtype", f"table {unit}", f"fitted {unit}", f"residual {unit}", "error", "per H*W*e")
        cells = [
            (f"{r.height}x{r.width}", r.dtype, show(r.measured), show(r.fitted), show(r.residual),
             _percent(r.error), f"{r.constant:.5g}")
            for r in self.rows
        ]  # fmt: skip
        return Columns(header, cells, title=f"{self.name}: {self._summary()}", detail=detail)


class Fit(Typeset, Sequence[FittedLine]):
    """The result of `vaemem.fit`: a sequence of formulas, one per model, op, dtype, tile, runtime, device and batch.

    Printing it shows the formulas, and the residuals of a single one; ``to_text(all=True)`` shows all residuals.

    Attributes
    ----------
    target : str
    quantile : float or None
    formulas : tuple of FittedLine
    left_out : Table
        Rows without a fitted line: rows without the target, and rows of groups with only one size.
    """

    def __init__(
        self, target: str, quantile: float | None, formulas: Sequence[FittedLine], left_out: Table | None = None
    ) -> None:
        self.target = target
        self.quantile = quantile
        self.formulas = tuple(formulas)
        self.left_out = Table() if left_out is None else left_out

    def __len__(self) -> int:
        return len(self.formulas)

    @overload
    def __getitem__(self, index: int) -> FittedLine: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[FittedLine, ...]: ...

    def __getitem__(self, index: int | slice) -> FittedLine | tuple[FittedLine, ...]:
        return self.formulas[index]

    def find(self, **key: object) -> FittedLine:
        """Find the only formula with the given values of `KEY`; ValueError if there is none, or several."""
        unknown = [name for name in key if name not in KEY]
        if unknown:
            raise ArgumentError("key", f"names out of {', '.join(KEY)}", ", ".join(unknown))
        found = [f for f in self.formulas if all(getattr(f, name) == value for name, value in key.items())]
        if len(found) != 1:
            wanted = ", ".join(f"{name}={value!r}" for name, value in key.items()) or "any"
            names = ", ".join(formula.name for formula in self.formulas)
            raise ArgumentError("key", "the key of one formula", f"{wanted}, the key of {len(found)} of {names}")
        return found[0]

    def predict(self, height: int, width: int, dtype: str | None = None, **key: object) -> float:
        """`find(dtype=dtype, **key).predict(height, width, dtype)`; a formula of several dtypes serves each of them."""
        if dtype is not None and any(formula.dtype for formula in self.formulas):
            key["dtype"] = meant("dtype", dtype, ELEMENT_BYTES)
        return self.find(**key).predict(height, width, dtype)

    def python(self) -> str:
        """Return the formulas as a Python module."""
        return "import math\n\n\n" + "\n\n".join(formula.python() for formula in self.formulas)

    def latex(self) -> str:
        """Write the formulas as the body of a LaTeX environment; H, W in pixels, e in bytes."""
        return " \\\\\n".join(formula.latex() for formula in self.formulas)

    def _data(self) -> dict[str, Any]:
        formulas = [formula.to_dict() for formula in self.formulas]
        told = {"answer": "fit", "target": self.target, "quantile": self.quantile}
        return told | {"formulas": formulas, "left_out": [*self.left_out]}

    def _sheet(self, size: Sizer) -> Sheet:
        is_alone = len(self) == 1
        is_bytes = self.target != "seconds"
        a, b, a_unit, b_unit = (128, MIB, "T", "MiB") if is_bytes else (1, 1, "s", "s")
        cells = [
            (f.name, _interval(f.a, f.a_error, a), _interval(f.b, f.b_error, b),
             f"{_percent(-f.max_under)}..{_percent(f.max_over)}", str(f.n), "" if f.r2 is None else f"{f.r2:.6f}")
            for f in self
        ]  # fmt: skip
        line = f"{self.target} = {self[0].equation if is_alone else 'a * H*W*e + b'}"
        headline = f"{self[0].name}: {line}" if is_alone else f"{line}, with a and b for each of {len(self)} formulas."
        notes = ["H and W are in pixels, e is in bytes of a number" + "; T = 128*H*W*e" * is_bytes + "."]
        return Sheet(headline, [
            Columns(("formula", f"a, {a_unit}", f"b, {b_unit}", "errors", "rows", "R²"), cells),
            *(formula._residuals(not is_alone) for formula in self),
            Bullets([*notes, *self._notes()]),
        ])  # fmt: skip

    def _notes(self) -> list[str]:
        """Name the left-out rows, in one sentence."""
        lacking = [row for row in self.left_out if row[self.target] is None]
        alone = [_one_size(as_ran(row)) for row in self.left_out if row[self.target] is not None]
        said = [f"{len(lacking)} without {self.target}"] if lacking else []
        said += [f"{len(alone)} in groups with one size ({', '.join(dict.fromkeys(alone))})"] if alone else []
        return [f"Rows left out: {'; '.join(said)}."] if said else []


def fit(
    table: Table, target: str = "allocated_bytes", quantile: float | None = None, by: Sequence[str] = KEY
) -> Fit:  # fmt: skip
    """Fit `a*H*W*e + b` to each group of a table's rows: model, op, dtype, tile, runtime, device and batch. Rows of
    whole pipelines are also grouped by phase, way and length of the prompt.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Rows need model, op, height, width and dtype. Rows without the target are left out (`Fit.left_out`).
    target : str
        A column in bytes, or ``"seconds"``.
    quantile : float, optional
        By default the fit is least squares. With a number in (0, 1], the line lies above this share of the rows (linear
        quantile regression). With 1 no row exceeds the line, and its mean is the lowest possible. Needs SciPy (``pip
        install 'vaemem[fit]'``).
    by : sequence of str
        Columns that separate formulas; rows that differ only in other columns share one. ``("model", "op")`` puts every
        dtype into one formula, through e, the bytes of an element. Such a formula suits a runtime if its activations
        scale with e; PyTorch's half and single precision peak at different places.

    Raises
    ------
    ValueError
        Unknown target or quantile, an empty table, a row without a needed value, no row with the target, or
        no group with two distinct H*W*e, which a line needs. A group of one size is left out if others remain.

    Notes
    -----
    Runs that cut their image into tiles never share a formula with runs of whole images. A row counts under the op that
    ran. If one tile holds the whole image, that is the op without tiles.

    The fit is ordinary least squares with unit weights, so large sizes count most. Standard errors assume independent
    errors of one variance. The residuals of a memory model are systematic, so read standard errors as a scale, not as a
    guarantee.

    Examples
    --------
    >>> formulas = fit(seed_table().filter(op="decode"))
    >>> formulas.predict(832, 1216, "float16", model="sdxl") >> 20
    2348
    >>> print(formulas.find(model="flux", dtype="float16").latex())
    M_{\\text{allocated, flux decode float16 bfl}} &= (1088.28 \\pm 0.072)\\,H W e + (2\\,177\\,982 \\pm 318\\,115)
    """
    table = Table(table)
    choose("target", target, TARGETS)
    if quantile is not None and not 0 < real(quantile) <= 1:
        raise ArgumentError("quantile", "a number above 0 and at most 1, or None", repr(quantile))
    if not len(table):
        raise ArgumentError("table", "at least 2 rows", "none")
    known = table.filter(lambda row: row[target] is not None)
    check_complete(known if len(known) else table, target)
    by = chosen("by", by, KEY)
    groups = [*grouped(map(as_ran, known), lambda row: tuple(row[name] for name in by)).values()]
    fitting = [rows for rows in groups if len(set(_sizes(rows))) > 1] or groups
    keys = [_common_key(rows) for rows in fitting]
    # A formula is named by its model, its op, and what else tells it from the others.
    told = {"model", "op", "phase", *differing(keys, KEY)}
    names = [" ".join(in_words(key, (name for name in KEY if name in told))) for key in keys]
    formulas = [_fit_one(*one, target, quantile) for one in zip(names, keys, fitting, strict=True)]
    alone = [row for rows in groups if rows not in fitting for row in rows]
    return Fit(target, quantile, formulas, table.filter(lambda row: row[target] is None or as_ran(row) in alone))


def _sizes(rows: Sequence[Row]) -> list[int]:
    """Compute H*W*e of each."""
    widths = (ELEMENT_BYTES[meant("dtype", row["dtype"], ELEMENT_BYTES)] for row in rows)
    return [row["height"] * row["width"] * e for row, e in zip(rows, widths, strict=True)]


def _one_size(row: Row) -> str:
    return f"{row['model']} {row['op']} {row['height']}x{row['width']} {row['dtype']}"


def _common_key(rows: Sequence[Row]) -> Row:
    """Return the common values of `KEY` in rows; None for a column in which they differ."""
    return {name: rows[0][name] if len({row[name] for row in rows}) == 1 else None for name in KEY}


def _fit_one(name: str, key: Row, rows: list[Row], target: str, quantile: float | None) -> FittedLine:
    sizes = _sizes(rows)
    if len(set(sizes)) < 2:
        only = f"{rows[0]['height']}x{rows[0]['width']} {rows[0]['dtype']}"
        raise ArgumentError(name, "rows of at least 2 distinct height*width*element bytes", f"only {only}")
    x = np.array(sizes, dtype=np.float64)
    y = np.array([row[target] for row in rows], dtype=np.float64)
    a, b = _least_squares(x, y) if quantile is None else _quantile_line(x, y, quantile)
    fitted = a * x + b
    residual = y - fitted
    squares, spread = float(residual @ residual), float(((y - y.mean()) ** 2).sum())
    a_error, b_error = None, None
    if quantile is None and len(x) > 2:
        variance, width = squares / (len(x) - 2), float(((x - x.mean()) ** 2).sum())
        a_error = math.sqrt(variance / width)
        b_error = math.sqrt(variance * (1 / len(x) + x.mean() ** 2 / width))
    r2 = 1 - squares / spread if quantile is None and spread > 0 else None
    fitted_rows = tuple(
        FitRow(r["height"], r["width"], r["dtype"], yi, fi, yi - fi, fi / yi - 1 if yi else None, yi / xi)
        for r, xi, yi, fi in zip(rows, x.tolist(), y.tolist(), fitted.tolist(), strict=True)
    )
    return FittedLine(
        name=name, **key, target=target, quantile=quantile, a=a, b=b, a_error=a_error, b_error=b_error, r2=r2,
        rows=fitted_rows,
    )  # fmt: skip


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    # Centred sums: x reaches 1e8 and y 1e11, whose squares would cancel.
    dx = x - x.mean()
    a = float(dx @ (y - y.mean()) / (dx @ dx))
    return a, float(y.mean() - a * x.mean())


def _quantile_line(x: np.ndarray, y: np.ndarray, quantile: float) -> tuple[float, float]:
    """Fit the line a*x + b with the least pinball loss; for quantile 1 no y may lie above it.

    As a linear program: y = a*x + b + above - below, minimise quantile * sum(above) + (1 - quantile) * sum(below).
    """
    optimize = need("scipy.optimize", "fit(quantile=)")
    n, x_scale, y_scale = len(x), float(x.max()), float(np.abs(y).max()) or 1.0
    cost = np.concatenate([[0, 0], np.full(n, quantile), np.full(n, 1 - quantile if quantile < 1 else 1)])
    equal = np.hstack([(x / x_scale)[:, None], np.ones((n, 1)), np.eye(n), -np.eye(n)])
    bounds = [(None, None)] * 2 + [(0, None if quantile < 1 else 0)] * n + [(0, None)] * n
    found = optimize.linprog(cost, A_eq=equal, b_eq=y / y_scale, bounds=bounds, method="highs-ds")
    if found.status != 0:
        raise ArgumentError("quantile", "", f"no line was found ({found.message})")
    a, b = float(found.x[0]) * y_scale / x_scale, float(found.x[1]) * y_scale
    # Add the remainder above the line, left by rounding, to b: quantile 1 is then a bound.
    return a, b + max(0.0, float((y - (a * x + b)).max())) if quantile == 1 else b


def _percent(error: float | None) -> str:
    return "" if error is None else f"{round(error, 4) + 0.0:+.2%}"  # + 0.0: no negative zero


def _interval(value: float, error: float | None, unit: float) -> str:
    """Format with two digits of the standard error; omit errors below a millionth."""
    if error is None:
        return f"{value / unit:.5g}"
    digits = min(6, max(0, 1 - math.floor(math.log10(error / unit)))) if error else 6
    return f"{value / unit:.{digits}f} ± {error / unit:.{digits}f}"


def _latex(value: float, digits: int) -> str:
    r"""123456.7 as 123\,457, 1.5e-7 as 1.5 \times 10^{-7}."""
    if abs(value) >= 1e5:
        return f"{value:,.0f}".replace(",", r"\,")
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return rf"{mantissa} \times 10^{{{int(exponent)}}}" if exponent else mantissa


def _pm(value: float, error: float | None) -> str:
    return _latex(value, 6) if error is None else rf"({_latex(value, 6)} \pm {_latex(error, 2)})"
