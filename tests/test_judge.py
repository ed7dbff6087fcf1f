"""Whether a run fits a card, decided from numbers (csrc/predict/judge.c)."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from vaemem import _core
from vaemem.prediction.planned import Phase
from vaemem.prediction.plays import bound_of
from vaemem.prediction.process import PeakTensor
from vaemem.prediction.verdict import Verdict, judge_phases

MIB = 1 << 20


def test_the_bound_is_a_16th_more_and_a_segment():
    r = random.Random(1)
    for reserved, exact in [(0, 0), (16, 0), (17, 1), *((r.randint(0, 1 << r.randint(1, 60)), 0) for _ in range(200))]:
        assert bound_of(reserved, exact) == exact + math.ceil((reserved - exact) * Fraction(17, 16)) + 20 * MIB
    assert bound_of(100 * MIB, 84 * MIB) == 84 * MIB + 17 * MIB + 20 * MIB  # weights take what they take
    assert bound_of(2**64 - 1) == 2**64 - 1


class Bounds:
    """Stands for the processes that bounds come from."""

    def __init__(self, bound=None):
        self.bound = bound

    def first_bounds(self):
        return ()

    def bounds(self):
        assert self.bound is not None, "it comes last"
        return [self.bound]


@pytest.mark.parametrize("guesses, is_untried", itertools.product([False, True], repeat=2))
def test_the_verdict(guesses, is_untried):
    """Every order of the numbers around the card's size, beside the rule as it is told."""
    for most, bound, kept_more in itertools.product((90, 100, 101), (80, 99, 100, 101), (0, 2)):
        verdict = Verdict(
            100, most, 80, plays=Bounds(bound), kept_more=kept_more, guesses=guesses, untried="new" * is_untried
        )
        reasons = {
            "guesses": guesses, "no room": most > 100, "marginal": bound > 100 - kept_more, "untried": is_untried,
        }  # fmt: skip
        found = [reason for reason, holds in reasons.items() if holds]
        assert (verdict.word, verdict.why) == (("tight", found[0]) if found else ("fits", ""))


def test_what_runs_out_does_not_fit_and_nothing_more_is_needed():
    assert Verdict(100, 50, None, plays=Bounds()).word == "does not fit"
    assert Verdict(100, 200, 80, plays=Bounds()).why == "no room"
    with pytest.raises(AssertionError, match="comes last"):
        _ = Verdict(100, 90, 80, plays=Bounds()).word
    # A card that may give nothing: whatever is taken is too much.
    assert Verdict(0, 0, 0, plays=Bounds(1), kept_more=5).why == "marginal"
    with pytest.raises(TypeError):
        _core.judge(True, False, False, 1, 1, "much", lambda size: True)


def test_without_processes_a_run_takes_what_it_says():
    assert (Verdict(100, 90, 90).word, Verdict(90, 90, 90).word, Verdict(90, 90, 90, kept_more=1).why) == (
        "fits", "fits", "marginal",
    )  # fmt: skip
    fits, full = judge_phases([Phase.planned("a", 5, 6, {})], 11), judge_phases([Phase.planned("a", 5, 6, {})], 10)
    assert (fits.word, fits.took, fits.spare) == ("fits", 11, 0)
    assert (full.word, full.took, full.spare, full.band) == ("does not fit", None, -1, (11, 11))
    assert full.out_of_memory_at == ("a", PeakTensor("compute buffer of a", 6))
