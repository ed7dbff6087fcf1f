"""Whether a run fits a card, decided from numbers (csrc/predict/judge.c)."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from errors import refused

from vaemem import _core, predict
from vaemem.prediction.phases import Phase
from vaemem.prediction.process import PeakTensor, SimulatedProcess
from vaemem.prediction.verdict import SPILLS, Verdict, judge_phases

pytestmark = [pytest.mark.core, pytest.mark.python]

MIB = 1 << 20


def test_the_bound_is_a_16th_more_and_a_segment():
    r = random.Random(1)
    for reserved, exact in [(0, 0), (16, 0), (17, 1), *((r.randint(0, 1 << r.randint(1, 60)), 0) for _ in range(200))]:
        assert _core.judge_bound(reserved, exact) == exact + math.ceil((reserved - exact) * Fraction(17, 16)) + 20 * MIB
    assert _core.judge_bound(100 * MIB, 84 * MIB) == 84 * MIB + 17 * MIB + 20 * MIB  # weights take what they take
    assert _core.judge_bound(2**64 - 1, 0) == 2**64 - 1


class Bounds:
    """Stands for the processes that bounds come from."""

    def __init__(self, bound=None):
        self._bound = bound

    def low_bounds(self):
        return ()

    @property
    def bound(self):
        assert self._bound is not None, "it comes last"
        return self._bound


@pytest.mark.parametrize("guesses, is_untried", [*itertools.product([False, True], repeat=2)])
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
    with pytest.raises(AssertionError):
        _ = Verdict(100, 90, 80, plays=Bounds()).word
    # A card that may give nothing: whatever is taken is too much.
    assert Verdict(0, 0, 0, plays=Bounds(1), kept_more=5).why == "marginal"
    with pytest.raises(TypeError):
        _core.judge(True, False, False, 1, 1, "much", 1)
    assert _core.judge(True, False, False, 10, 1, 9, 9, True) == ("", "")
    assert _core.judge(True, False, False, 10, 1, 9, 10, True) == ("tight", "marginal")


def test_without_processes_a_run_takes_what_it_says():
    assert (Verdict(100, 90, 90).word, Verdict(90, 90, 90).word, Verdict(90, 90, 90, kept_more=1).why) == (
        "fits", "fits", "marginal",
    )  # fmt: skip
    fits, full = judge_phases([Phase.planned("a", 5, 6, {})], 11), judge_phases([Phase.planned("a", 5, 6, {})], 10)
    assert (fits.word, fits.took, fits.spare) == ("fits", 11, 0)
    assert (full.word, full.took, full.spare, full.band) == ("does not fit", None, -1, (11, 11))
    assert full.out_of_memory_at == ("a", PeakTensor("compute buffer of a", 6))


@pytest.mark.parametrize("above", [False, True])
def test_what_a_run_takes_with_other_workspaces(above):
    """Beside the same made of what each phase reserves with each row."""
    r = random.Random(5)
    p = SimulatedProcess("RTX 4090", torch_version="2.7.1+cu128")
    vae = p.load("sd15", "float16")
    for side in (64, 96, 32):
        p.reset_peak()
        p.drop(p.decode(vae, p.tensor((1, 4, side, side), "float16")))
        p.read()
    convs = len(p._script.convs)
    rows = [tuple(r.choice((0, 1 << 20, 300 << 20, 1 << 30)) for _ in range(convs)) for _ in range(9)]
    spans = tuple(span for span, *_ in p._play.readings)
    own = [one.reserved if above else one.peak_reserved for one in p.readings]
    phases = [(r.randrange(1 << 28), r.randrange(1 << 30)) for _ in own]
    for first, likely in ((0, 9), (1, 4), (2, 0), (3, 1)):
        reserved = [own[first:], *(row[first:] for row in p._play.rows(tuple(rows), spans, above))]
        found = [list(zip(row, phases, strict=False)) for row in reserved]
        totals = [max([size + beside for size, (beside, _) in row], default=0) for row in found]
        most = [max(sizes) for sizes in zip(*reserved, strict=True)]
        bounds = [beside + _core.judge_bound(size, exact) for size, (beside, exact) in zip(most, phases, strict=False)]
        bound = max(bounds, default=0)
        counted = totals[: likely + 1]
        want = totals[0], min(counted), max(counted), bound
        assert p.takes(phases[: 3 - first], first, above, rows, likely) == want
    with refused("judge"):
        p.takes(phases, 1)
    with refused("workspaces"):
        p.takes(phases, others=[(1, 2)])


def test_windows_spills_before_pytorch_frees_its_cache():
    """Every verdict says where spilling begins; a tight one promises nothing of the cache."""
    for most, took in ((80, 80), (120, 90), (300, None)):
        full = ("decode", PeakTensor("x", 5)) if took is None else None
        here, there = (
            Verdict(100, most, took, full, kept_more=10, windows=windows).summarize("{} B".format)
            for windows in ("", SPILLS)
        )
        assert there.endswith(SPILLS) and "spilling begins between 90 B and 100 B" in there
        assert "spilling" not in here and "goes through" not in there
    tight = Verdict(100, 120, 90, windows=SPILLS).summarize("{} B".format)
    assert "20 B of that goes to the host's memory" in tight and "could run with 90 of the 100 B" in tight


def test_what_drivers_of_other_makers_do_is_not_nvidias():
    for gpu, is_nvidia in (("RTX 3060", True), ("RX 7900 XTX", False), ("Arc B580", False)):
        summary = predict("sd15", "decode", 512, 512, gpu=gpu, os="windows").judged.summarize("{} B".format)
        assert "spilling begins between" in summary and ("CUDA - Sysmem" in summary) == is_nvidia


def test_the_context_may_keep_more_than_usual():
    verdict = Verdict(100, 90, 90, plays=Bounds(95), kept_more=6)
    assert verdict.word == "tight" and "the CUDA context may keep" in verdict.tight_because
    assert Verdict(100, 90, 90, plays=Bounds(95), kept_more=5).word == "fits"
