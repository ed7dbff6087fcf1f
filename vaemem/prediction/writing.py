"""Write polynomials, functions and equations as text, Python and LaTeX, for formulas and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple

from vaemem._common import distinct

Polynomial = Mapping[str, float | Fraction]  # coefficients by product of symbols: {"N*MP": 2434, "": 2108}
Language = Literal["text", "python", "latex"]


class Symbol(NamedTuple):
    text: str
    python: str
    latex: str


SYMBOLS = {
    "N": Symbol("N", "batch", "N"),
    "t": Symbol("t", "prompt_tokens", "t"),
    "e": Symbol("e", "element_bytes", "e"),
    "HW": Symbol("H*W", "pixels", "H W"),
    "(H+W)": Symbol("(H+W)", "(height + width)", "(H + W)"),
    "MP": Symbol("MP", "megapixels", "P"),
    "tile": Symbol("tile", "tile_megapixels", r"P_\text{tile}"),
    "cut": Symbol("tile", "tile", "T"),  # pixels of the largest tile
}
# Between a number and its symbols, between symbols, and a square.
SIGNS: dict[Language, tuple[str, str, str]] = {
    "text": (" ", "*", "^2"), "python": (" * ", " * ", "**2"), "latex": (r"\,", r"\,", "^2"),
}  # fmt: skip


def write_number(value: float | Fraction, language: Language = "text") -> str:
    """Write a number exactly if it is whole or the language is Python, otherwise with seven digits."""
    if value == int(value):
        text = f"{int(value):,}"
    else:
        text = repr(float(value)) if language == "python" else f"{float(value):,.7g}"
    return text.replace(",", r"\," if language == "latex" else "")


def write_sum(law: Polynomial, language: Language = "text") -> str:
    """Write a polynomial in one line, the constant last: ``2434 N*MP + 2108``."""
    before, between, square = SIGNS[language]
    line = ""
    for power in sorted((power for power in law if law[power]), key=lambda power: not power):
        names = power.split("*") if power else []
        symbols = [(getattr(SYMBOLS[name], language), names.count(name)) for name in distinct(names)]
        factors = [
            symbol if count == 1 else f"{symbol if symbol.isidentifier() else f'({symbol})'}{square}"
            for symbol, count in symbols
        ]
        value, sign = (-law[power], "-") if law[power] < 0 else (law[power], "+")
        line += f" {sign} " if line else sign.strip("+")
        line += write_number(value, language) + f"{before}{between.join(factors)}" * bool(factors)
    return line or "0"


def write_function(name: str, arguments: str, summary: str, lines: Iterable[str]) -> str:
    """Write a Python function."""
    return "\n".join([f"def {name}({arguments}):", f'    """{summary}"""', *(f"    {line}" for line in lines), ""])


def write_equation(name: str, right: str) -> str:
    """Write the body of a LaTeX equation in bytes or MiB."""
    escaped = name.replace("_", r"\_")
    return rf"M_{{\text{{{escaped}}}}} &= {right}"
