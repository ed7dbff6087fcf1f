"""Find the polynomials that sizes of a recording follow, from values at several points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from vaemem._errors import ArgumentError

MOST_TERMS = 3


def products(*factors: Sequence[str]) -> list[str]:
    """Return every product of one of each: products(["", "n"], ["", "t"]) is ["", "t", "n", "n t"]."""
    made = [""]
    for choices in factors:
        made = [f"{one} {other}".strip() for one in made for other in choices]
    return made


def evaluate(polynomial: str, values: Mapping[str, int]) -> int:
    """Evaluate '640 n h w + 5' with these values."""
    terms = [term.split() for term in polynomial.split(" + ")]
    return sum(math.prod([int(factor), *(values[name] for name in names)]) for factor, *names in terms)


class PolynomialFit:
    """Finds polynomials for values at several points.

    Attributes
    ----------
    polynomials : list of str
        Those that were found, each once.
    """

    def __init__(self, monomials: Sequence[str], values: Sequence[Mapping[str, int]]):
        # Of monomials that are equal at all points, the first one counts; one that is always 0 explains nothing.
        columns = {monomial: tuple(evaluate(f"1 {monomial}", point) for point in values) for monomial in monomials}
        first = {column: monomial for monomial, column in reversed(columns.items()) if any(column)}
        self.monomials = [monomial for monomial in monomials if first.get(columns[monomial]) == monomial]
        self.columns = np.array([columns[monomial] for monomial in self.monomials], dtype=float).T
        self.values = values
        self.sizes: dict[tuple[int, ...], int] = {}
        self.polynomials: list[str] = []

    def index(self, wanted: tuple[int, ...]) -> int:
        """Return the index of the polynomial that has these values."""
        if wanted not in self.sizes:
            self.polynomials.append(self._polynomial(wanted))
            self.sizes[wanted] = len(self.polynomials) - 1
        return self.sizes[wanted]

    def find(self, wanted: tuple[int, ...]) -> str:
        """Return the polynomial that has these values. ValueError if there is none of few terms."""
        return self.polynomials[self.index(wanted)]

    def _polynomial(self, wanted: tuple[int, ...]) -> str:
        if len(set(wanted)) == 1:
            return str(wanted[0])
        y = np.array(wanted, dtype=float)
        for terms in range(1, MOST_TERMS + 1):
            for chosen in itertools.combinations(range(len(self.monomials)), terms):
                part = self.columns[:, chosen]
                factors, _, rank, _ = np.linalg.lstsq(part, y, rcond=None)
                whole = [round(factor) for factor in factors]
                if rank < terms or 0 in whole or not np.allclose(part @ whole, y, rtol=1e-9):
                    continue
                text = " + ".join(f"{f} {self.monomials[i]}".strip() for f, i in zip(whole, chosen, strict=True))
                if all(evaluate(text, p) == value for p, value in zip(self.values, wanted, strict=True)):
                    return text
        raise ArgumentError("points", f"sizes that a polynomial of {MOST_TERMS} terms has", str(wanted))
