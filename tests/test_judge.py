"""Whether a run fits a card, decided from numbers (csrc/predict/judge.c)."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from vaemem import _core
from vaemem.prediction.verdict import CardUse, bound_of, judge

MIB = 1 << 20


def test_the_bound_is_a_16th_more_and_a_segment():
    r = random.Random(1)
    for reserved, sure in [(0, 0), (16, 0), (17, 1), *((r.randint(0, 1 << r.randint(1, 60)), 0) for _ in range(200))]:
        assert bound_of(reserved, sure) == sure + math.ceil((reserved - sure) * Fraction(17, 16)) + 20 * MIB
    assert bound_of(100 * MIB, 84 * MIB) == 84 * MIB + 17 * MIB + 20 * MIB  # weights take what they take
    assert bound_of(2**64 - 1) == 2**64 - 1


@pytest.mark.parametrize("guesses, is_untried", itertools.product([False, True], repeat=2))
def test_the_verdict(guesses, is_untried):
    """Every order of the numbers around the card's size, beside the rule as it is told."""
    for most, bound, unsure in itertools.product((90, 100, 101), (80, 99, 100, 101), (0, 2)):
        use = CardUse(100, 80, most, unsure, guesses, "nobody tried" if is_untried else "")
        verdict, why = judge(use, lambda size, bound=bound: bound >= size)
        reasons = {
            "guesses": guesses, "no room": most > 100, "marginal": bound > 100 - unsure, "untried": is_untried,
        }  # fmt: skip
        found = [reason for reason, holds in reasons.items() if holds]
        assert (verdict, why) == (("tight", found[0]) if found else ("fits", ""))


def test_what_runs_out_does_not_fit_and_nothing_more_is_asked():
    def may_take(size):
        raise AssertionError("it is asked last")

    assert judge(CardUse(100, None, 50), may_take) == ("does not fit", "")
    assert judge(CardUse(100, 80, 200), may_take) == ("tight", "no room")
    with pytest.raises(AssertionError, match="asked last"):
        judge(CardUse(100, 80, 90), may_take)
    # A card that may give nothing: whatever is taken is too much.
    assert judge(CardUse(0, 0, 0, 5), lambda size: size <= 1) == ("tight", "marginal")
    with pytest.raises(TypeError):
        _core.judge(True, False, False, 1, 1, "much", may_take)
