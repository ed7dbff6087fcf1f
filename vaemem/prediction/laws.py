"""Laws: memory as polynomials of a size. `solve_law` finds a law. A law has a value at each size, and is written as
text, Python or LaTeX. Formulas, closed forms and bounds consist of laws."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from vaemem._common import MIB, distinct
from vaemem._numpy import np

Law = Mapping[str, Any]  # numbers by product of symbols: {"N*MP": 2434, "": 2108}
Language = Literal["text", "python", "latex"]
FINEST = 1 << 13  # denominator of exact coefficients: (64 pixels)^2 per latent pixel, times two

# Symbols as text, as Python and as LaTeX.
SYMBOLS = {
    "N": ("N", "batch", "N"),
    "t": ("t", "prompt_tokens", "t"),
    "e": ("e", "element_bytes", "e"),
    "HW": ("H*W", "pixels", "H W"),
    "(H+W)": ("(H+W)", "(height + width)", "(H + W)"),
    "MP": ("MP", "megapixels", "P"),
    "tile": ("tile", "tile_megapixels", r"P_\text{tile}"),
    "cut": ("tile", "tile", "T"),  # pixels of the largest tile
}
# The column of `SYMBOLS`; what stands between a number and its symbols, and between symbols; a square.
SIGNS: dict[Language, tuple[int, str, str, str]] = {
    "text": (0, " ", "*", "^2"), "python": (1, " * ", " * ", "**2"), "latex": (2, r"\,", r"\,", "^2"),
}  # fmt: skip


def symbols_at(height: Any, width: Any, batch: Any = 1, tokens: Any = 0, tile: Any = 0) -> dict[str, Any]:
    """Return the symbols' values at a size, or at columns of sizes."""
    largest = np.minimum(height, tile) * np.minimum(width, tile)
    symbols = {"N": batch, "t": tokens, "HW": height * width, "(H+W)": height + width, "cut": largest}
    return symbols | {"MP": symbols["HW"] / MIB, "tile": largest / MIB, "": height**0}


def value_of(law: Law, at: Mapping[str, Any]) -> Any:
    """Return a law's value for the symbols' values."""
    return sum(number * math.prod(at[name] for name in power.split("*")) for power, number in law.items())


def solve_law(powers: Sequence[str], at: Mapping[str, Any], wanted: np.ndarray) -> dict[str, float]:
    """Return the law with these powers that is nearest to the wanted values. The law's numbers are exact fractions of
    `FINEST`."""
    columns = np.stack([value_of({power: 1.0}, at) for power in powers], 1)
    scale = np.abs(columns).max(0)  # powers differ by orders of magnitude
    found = np.linalg.lstsq(columns / scale, wanted, rcond=None)[0] / scale
    return {power: round(one * FINEST) / FINEST for power, one in zip(powers, found.tolist(), strict=True)}


def least_above(
    powers: Sequence[str], at: Mapping[str, Any], wanted: np.ndarray, weights: np.ndarray
) -> dict[str, float]:
    """Return the lowest law with these powers above all wanted values. No number of the law is below 0.

    Lowest means the smallest sum of the weighted relative excesses and the largest one. The simplex method solves the
    dual program, which has few rows.
    """
    columns = np.stack([value_of({power: 1.0}, at) for power in powers], 1)
    shares = columns / wanted[:, None]
    scale = np.maximum(shares.max(0), np.finfo(float).tiny)
    shares = shares / scale
    count, width = shares.shape
    cost = np.append(weights @ shares, 1)  # of each coefficient, and of the largest excess
    at_least, at_most = np.hstack([shares, np.zeros((count, 1))]), np.hstack([-shares, np.ones((count, 1))])
    table = np.hstack([at_least.T, at_most.T, np.eye(width + 1), cost[:, None]])
    gain = np.concatenate([np.ones(count), np.zeros(count + width + 2)])
    for _ in range(100 * width):
        enters = int(gain[:-1].argmax())
        if gain[enters] <= 1e-10:
            break
        column = table[:, enters]
        room = np.divide(table[:, -1], column, out=np.full(width + 1, math.inf), where=column > 1e-11)
        leaves = int(room.argmin())
        table[leaves] /= column[leaves]
        others = np.arange(width + 1) != leaves
        table[others] -= np.outer(table[others, enters], table[leaves])
        gain = gain - gain[enters] * table[leaves]
    found = np.maximum(-gain[2 * count : 2 * count + width], 0) / scale
    return dict(zip(powers, (found / (columns @ found / wanted).min()).tolist(), strict=True))


def write_number(value: float | Fraction, language: Language = "text") -> str:
    """Write a number exactly if it is whole or the language is Python, otherwise with seven digits."""
    if value == int(value):
        text = f"{int(value):,}"
    else:
        text = repr(float(value)) if language == "python" else f"{float(value):,.7g}"
    return text.replace(",", r"\," if language == "latex" else "")


def write_sum(law: Law, language: Language = "text") -> str:
    """Write a law in one line, the constant last: ``2434 N*MP + 2108``."""
    spelling, before, between, square = SIGNS[language]
    line = ""
    for power in sorted((power for power in law if law[power]), key=lambda power: not power):
        names = power.split("*") if power else []
        symbols = [(SYMBOLS[name][spelling], names.count(name)) for name in distinct(names)]
        factors = [
            symbol if count == 1 else f"{symbol if symbol.isidentifier() else f'({symbol})'}{square}"
            for symbol, count in symbols
        ]
        value, sign = (-law[power], "-") if law[power] < 0 else (law[power], "+")
        line += f" {sign} " if line else sign.strip("+")
        line += write_number(value, language) + f"{before}{between.join(factors)}" * bool(factors)
    return line or "0"


def write_function(name: str, arguments: str, summary: str, lines: Iterable[str]) -> str:
    """Write a Python function. The function's name replaces all but letters, digits and underscores of `name`."""
    name = re.sub(r"\W+|^(?=\d)", "_", name)
    return "\n".join([f"def {name}({arguments}):", f'    """{summary}"""', *(f"    {line}" for line in lines), ""])


def write_equation(name: str, right: str) -> str:
    """Write the body of a LaTeX equation of memory."""
    escaped = name.replace("_", r"\_")
    return rf"M_{{\text{{{escaped}}}}} &= {right}"
