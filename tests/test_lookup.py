"""Recorded workspaces in the core: data that no file should hold, allocations that fail, what PyTorch runs itself."""

import random

import pytest
from errors import refused

from vaemem import _core
from vaemem.prediction import profiles
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.profiles import Conv

pytestmark = [pytest.mark.core, pytest.mark.python]

GOOD = {
    "formulas": [["i+o+f", 0, 0, 0, 16], ["2i+3o", 6, 64, 1000, -5], None],
    "rules": [
        {
            "name": "thin",
            "dtypes": ["float16"],
            "r": 3,
            "stride": 1,
            "channels": [[8, 16], [9, 9]],
            "pixels": [1, 100],
            "formula": ["", 0, 0, 0, 7],
        }
    ],
    "trees": {
        "8,16,3,1,1/float16": "P400 h15 0 1 2",
        "8,16,3,1,1/float32 strict nhwc": "P400 h15 0 1 2",
    },
}


def profile(otherwise=None, **changes):
    return _core.Profile(True, otherwise, **GOOD | changes)


def question(side=12, dtype="float16", **more):
    return Conv(dtype, 1, 8, side, side, 16, 3, **more)


def test_who_answers():
    p, other = profile(), profile(trees={"9,9,3,1,1/float16": "0"})
    i, o, f = (2 * n for n in (8 * 144, 16 * 144, 8 * 16 * 9))
    assert p.conv(question(10), True) == (7, 0, 0)
    assert p.conv(question(12), True) == (i + o + f + 16, 0, -1)
    assert p.conv(question(20), True) == (
        2 * (2 * 8 * 400) + 3 * (2 * 16 * 400) + 128 * (6 * 400 // 128 + 1) + 7 * 1000 - 5, 0, -1,
    )  # fmt: skip
    assert p.conv(question(21), True) is None  # asked, and no engine was found
    assert p.conv(question(12, "float32", layout="nhwc"), False) == (2 * (i + o + f) + 16, 0, -1)
    assert p.conv(question(12, "float32"), True) is None
    assert p.conv(question(12, dilation=2), True) is p.conv(question(12, groups=2), True) is None
    assert profile(p, trees={}).conv(question(12), True) == (i + o + f + 16, 1, -1)
    assert profile(profile(p, trees={}, rules=[]), trees={}, rules=[]).conv(question(10), True) == (7, 2, 0)
    assert other.conv(question(12), True) is None


BAD_TREES = (
    0, ["P", 1, 0, 0], "", " ", "3", "-1", "x1 0 0", "P 0 0", "P1 0", "P1 0 ", "P1 0 0 ", "P1 0 0 0", " P1 0 0",
    "P1  0 0", "P1,0,0", "PP1 0 0", "P-1 0 0", "P1 0 P1 0", "P4611686018427387904 0 0", f"P{10**30} 0 0", "0\0",
    "P1 0 0\0 0", "\udc00", "P1 0 3", "P1 0 99999999999", "8,16,3,1,1/float16", 1000 * "P1 ",
)  # fmt: skip
BAD_KEYS = (
    1, "", "/", "/float16", "8,16,3,1/float16", "8,16,3,1,1", "8,16,3,1,1,/float16", "8,16,3,1,1,1,1/float16",
    "8,16,3,1,1/float64", "8,16,3,1,1/float16 ", "8,16,3,1,1/float16 thin", "8,16,3,1,1/float16 nhwc strict",
    "8,16,3,1,1/float1", "8,16,3,1,-1/float16", " 8,16,3,1,1/float16", f"{10**30},16,3,1,1/float16",
    "8,16,3,1,1/float16\0",
)  # fmt: skip
BAD = [
    {"formulas": [["i+x", 0, 0, 0, 0]]},
    {"formulas": [["i+", 0, 0, 0, 0, 0]]},
    {"formulas": [["io", 0, 0, 0, 0]]},
    {"formulas": [["99999999i", 0, 0, 0, 0]]},
    {"formulas": [["i", -1, 0, 0, 0]]},
    {"formulas": [["i", 0, 0, 1 << 62, 0]]},
    {"formulas": [["i", 0, 0, 0, 1 << 63]]},
    {"formulas": [["i", 0, 0, 0, 0.5]]},
    {"formulas": [["\udc00", 0, 0, 0, 0]]},
    {"formulas": ["i"]},
    *({"trees": {"8,16,3,1,1/float16": tree}} for tree in BAD_TREES),
    *({"trees": {key: "0"}} for key in BAD_KEYS),
    {"trees": "{}"},
    {"rules": [{}]},
    {"rules": [{"dtypes": ["float16"]}]},
    {"rules": [{"dtypes": ["int8"], "formula": ["i", 0, 0, 0, 0]}]},
    {"rules": [{"dtypes": ["float16"], "formula": ["i", 0, 0, 0, 0], "channels": [1]}]},
    {"rules": [{"dtypes": ["float16"], "formula": ["i", 0, 0, 0, 0], "pixels": [1]}]},
    {"rules": [{"dtypes": ["float16"], "formula": ["i", 0, 0, 0, 0], "r": "3"}]},
    {"rules": ["thin"]},
]


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_bad_data_is_refused(changes):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        profile(**changes)


def test_a_tree_of_any_depth_is_read():
    p = profile(trees={"8,16,3,1,1/float16": "".join(f"h{side} 0 " for side in range(1, 100_000)) + "2"})
    assert p.conv(question(10), False)[2] == 0 and p.conv(question(99), False)[2] == -1
    down = "".join(f"h{side} " for side in range(100_000, 0, -1))
    p = profile(trees={"8,16,3,1,1/float16": down + "2" + 100_000 * " 0"})
    assert p.conv(question(13, "float16"), False)[2] == -1


CARD = "4090", 89, 128


def a_catalogue(*profiles, rules=(), samples=()):
    """Each profile is (compute capability, version, cards, profile, whether it was inferred)."""
    about = tuple(one[:3] for one in profiles)
    return _core.Catalogue(about, tuple(rules), tuple(samples), lambda number: profiles[number][3:])


def a_workspace(
    catalogue=None, card=CARD, rules=(), coarse=False, cudnn=91002, shipped=91002, release=209, is_290=False,
    is_off=False, tf32=True, guess="rule", sm=None,
):  # fmt: skip
    catalogue, card = catalogue or a_catalogue(), card if sm is None else ("", sm, 1)
    return _core.Workspace(catalogue, card, rules, coarse, cudnn, shipped, release, is_290, is_off, tf32, guess)


def said(lookup, conv):
    """Bytes, and who answered."""
    count, source = lookup.conv(conv)
    return count, *lookup.sources(source)[0]


def test_the_first_entry_that_answers():
    large = {"dtypes": ["float16"], "pixels": [400, 1000], "formula": ["o", 0, 0, 0, 0]}, 0, 0, 0, (), "taken"
    small = {"dtypes": ["float16"], "pixels": [1, 100]}, 90800, 0, 0, (), "taken"
    known = [(89, version, (), profile(), False) for version in (90800, 91002)]
    lookup = a_workspace(a_catalogue(*known, rules=(large,)), rules=(small,))
    assert said(lookup, question(10)) == (7, 0, 0, 0, 0, 0, None, 0)
    assert said(lookup, question(12))[1:5] == (0, -1, 1, 0)
    assert said(lookup, question(21)) == (2 * 16 * 21 * 21, 0, 1, -1, 0, -1, None, 0)
    i, f = 4 * 8 * 12 * 12, 4 * 8 * 16 * 9
    assert said(lookup, question(12, "float32")) == (i + f, 0, -1, -1, 0, -1, "input + filter, TF32", 0)
    with refused("conv", names=["3x3", "2x2", "0x0"]):
        lookup.conv(question(2, padding=0))
    assert [Conv(*one).h for one in lookup.known(False)] == [10, 12, 21, 12] and lookup.known(True) == []
    assert lookup.conv(question(10)) == (7, 0) and len(lookup.sources(0)) == 4  # nothing is looked up twice
    assert lookup.answers(lookup) == (
        [7, 2 * (8 * 144 + 16 * 144 + 1152) + 16, 14112, i + f],
        [0] * 4,
        [0, 1, 2, 3],
    )
    assert lookup.sources(-1) == lookup.sources(0) and lookup.sources(4) == lookup.sources(1 << 40) == []


def test_guesses():
    wide, pointwise = question(dilation=2), question(padding=0)._replace(r=1)
    i, o, f = (2 * n for n in (8 * 144, 16 * 144, 8 * 16 * 9))
    for guess, count in (("rule", i + o + f), ("least", 0), ("most", i + 3 * o + f), ("columns", 2 * 8 * 9 * 144)):
        assert a_workspace(guess=guess).conv(question()) == (count, 0)
    assert a_workspace(guess="columns").conv(pointwise) == (0, 0)
    with refused("guess", "'none'"):
        a_workspace(guess="none")
    lookup = a_workspace()
    forms = [said(lookup, one)[-1] for one in (question(), question(layout="nhwc"), wide, question(16))]
    assert forms == [0, 1, 2, 0] and len(lookup.sources(0)) == 3
    with refused("conv"):
        lookup.conv(question(groups=3))
    assert lookup.conv(Conv("float16", 1, 1 << 20, 64, 64, 7, 3)) == (0, 3)  # 2^32 elements
    assert lookup.sources(3)[0][5] == "none for an image of 2^31 elements or more"
    assert _core.im2col_bytes(wide) == 2 * 8 * 9 * 100


OWN = [
    (question(dtype="bfloat16"), dict(sm=75), 1),
    (question(dtype="bfloat16"), dict(sm=80), 0),
    (question(depth=5), dict(release=211), 2),
    (question(depth=5), dict(release=211, cudnn=91500), 0),
    (question(depth=5), dict(release=209, cudnn=91500, is_290=True), 2),
    (question(depth=5), dict(release=208), 0),
    (question(depth=5, layout="nhwc"), dict(release=211), 0),
    (Conv("float16", 1, 8, 1 << 14, 1 << 14, 8, 3), dict(cudnn=90100), 3),
    (Conv("float16", 1, 8, 1 << 14, 1 << 14, 8, 3), dict(cudnn=90300), 0),
    (Conv("float16", 2, 7, 1 << 14, 1 << 14, 7, 3), dict(cudnn=90100), 0),
    (Conv("float16", 1, 16, 9, 9, 16, 3, groups=16), {}, 4),
    (Conv("float16", 1, 32, 9, 9, 32, 3, groups=32), {}, 0),
    (Conv("float32", 1, 32, 9, 9, 32, 3, groups=32), {}, 4),
    (Conv("float16", 1, 32, 9, 9, 32, 3, groups=32, layout="nhwc"), {}, 0),
    (question(), dict(is_off=True), 5),
    (question(depth=5), dict(release=208, is_off=True), 5),
    (Conv("float16", 1, 32, 9, 9, 32, 3, groups=32), dict(is_off=True), 4),
]


@pytest.mark.parametrize("conv, torch, why", OWN, ids=str)
def test_what_pytorch_runs_itself(conv, torch, why):
    lookup = a_workspace(**torch, guess="least")
    count, own, *_ = said(lookup, conv)
    assert own == why and bool(lookup.known(True)) == bool(why)
    columns = conv.c * 9 * conv.h * conv.w * (2 if conv.dtype != "float32" else 4)
    deep = 5 * 3 * columns  # five frames, three of the filter
    assert count == {1: columns, 2: deep, 3: columns, 5: deep if conv.depth else columns}.get(why, 0)


def test_every_allocation_fails_once():
    files = [profiles.load_profile(name) for name in ("sm89_cudnn9.10.2.json", "sm89_cudnn9.7.1.json")]
    r = random.Random(0)
    asked = [Conv("float16", 1, 128, r.randint(8, 99), r.randint(8, 99), 128, 3) for _ in range(70)]

    def play():
        made = profile(profile())
        cards = ("4080", 89, 76), ("4070", 89, 46)
        known = (
            (89, 91002, (), files[0].core, False),
            (89, 90701, cards, files[1].core, True),
            (86, 90800, (), made, False),
        )
        rules = (
            (GOOD["rules"][0], 0, 0, 0, (89,), "taken"), (GOOD["rules"][0], 0, 0, 90800, (89,), "possible"),
            ({"dtypes": ["float16"], "pixels": [1, 80]}, 90701, 0, 0, (), "taken"),
        )  # fmt: skip
        catalogue = a_catalogue(*known, rules=rules, samples=(CARD, ("3090", 86, 82)))
        workspace = a_workspace(catalogue, rules=rules[2:], coarse=True, cudnn=90701)
        answers = [said(workspace, one) for one in (*asked, question(10))]
        return answers, *(workspace.rows(every, workspace) for every in (False, True))

    want = play()
    for n in range(1, 1000):
        _core.fail_alloc_at(n)
        try:
            got = play()
        except MemoryError:
            assert _core.fail_alloc_at(0) == 0
        else:
            assert _core.fail_alloc_at(0) > 0 and got == want
            break
    assert n > 15


def test_the_cores_numbers_are_the_documented_ones():
    """The module's docstring says what a formula means."""
    r = random.Random(1)
    for _ in range(300):
        dtype = r.choice(["float16", "bfloat16", "float32"])
        conv = Conv(dtype, r.randint(1, 4), r.randint(1, 99), r.randint(3, 99), r.randint(3, 99), r.randint(1, 99), 3,
                    r.randint(1, 2))  # fmt: skip
        s, size = profiles.sizes(conv), 4 if dtype == "float32" else 2
        up = lambda n, to=16: -(-n // to) * to  # noqa: E731
        (i, o, f), (oh, ow) = conv.elements, conv.out
        c, k = up(conv.c * size), up(conv.k * size)
        assert (s["i"], s["o"], s["f"]) == (up(i * size), up(o * size), up(f * size))
        assert s["I"] == conv.n * conv.h * conv.w * c and s["O"] == conv.n * oh * ow * k
        assert s["F"] == k * c // size * 9 and s["P"] == conv.n * oh * ow and s["Q"] == oh * ow
        assert (s["h"], s["w"], s["n"], s["m"], s["p"]) == (conv.h, conv.w, conv.n, -s["P"] % 128, s["P"])
        index, tile, per_tile, constant = (r.randint(0, 200) for _ in range(4))
        want = 2 * s["i"] + s["F"] + constant
        want += 128 * (index * oh * ow // 128 + 1) if index else 0
        want += per_tile * -(-s["p"] // tile) if tile else 0
        assert profiles.formula_bytes(["2i+F", index, tile, per_tile, constant], s) == want
    with pytest.raises(OverflowError):
        profiles.sizes(Conv("float16", 1 << 30, 1 << 30, 1 << 20, 1 << 20, 1, 1, padding=0))
    assert find_gpu("RTX 4090").sm == 89


def test_tensors_of_more_than_2_31_elements_are_computed_in_parts():
    """The tensors are a part's, the numbers of pixels that trees look at the batch's."""
    whole = profiles.sizes(Conv("float16", 8, 256, 1024, 1024, 256, 3))  # 2^31 exactly
    more = profiles.sizes(Conv("float16", 13, 256, 1024, 1024, 256, 3))
    assert {name for name in whole if whole[name] != more[name]} == {"P", "n"} and more["P"] == 13 << 20
    wide = profiles.sizes(Conv("float16", 3, 64, 2048, 2048, 300, 3))  # the output decides
    assert wide["i"] == 64 * wide["p"] * 2 and wide["p"] == 1 << 22 and wide["P"] == 3 << 22
    large = profiles.sizes(Conv("float16", 2, 128, 4096, 4096, 128, 3))
    assert not any(large[name] for name in "ioIOp") and large["f"] and large["P"] == 1 << 25
    assert profile().conv(Conv("float16", 1, 1 << 20, 64, 64, 1, 1, padding=0), True) == (0, 0, -2)


# ---- data that changes while it is read ----


class Clears(list):
    """A pair whose iteration empties what it is read from."""

    def __init__(self, pair, holder):
        super().__init__(pair)
        self.holder = holder

    def __iter__(self):
        self.holder.clear()
        return iter([8, 16])


class ClearingKey(str):
    """A key whose comparison empties the dict that it is in."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        self.holder.clear()
        return False


def test_rules_that_change_while_they_are_read():
    rule = dict(GOOD["rules"][0])
    channels: list = []
    channels += [Clears([8, 16], channels), [9, 9], [7, 7]]
    p = profile(rules=[rule | {"channels": channels}])
    assert p.conv(question(10), True) == (7, 0, 0) and not channels

    rules: list = []
    changing = dict(rule)
    changing["pixels"] = Clears([1, 100], rules)
    rules += [changing, dict(rule), dict(rule)]
    profile(rules=rules)
    assert not rules

    changing = dict(rule)
    changing["pixels"] = Clears([1, 100], changing)
    profile(rules=[changing])
    assert not changing

    odd = {}
    key = ClearingKey("dtypes")
    key.holder = odd
    odd[key] = ["float16"]
    odd |= {name: value for name, value in rule.items() if name != "dtypes"}
    with refused("profile"):
        profile(rules=[odd])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stride": 0}, (0, "stride")), ({"stride": (1, 0)}, (0, "stride")),
        ({"groups": 0}, (0, "n, c, k and groups")), ({"dilation": 0}, (None, "dilation")),
        ({"padding": -1}, (None, "padding")), ({"r": 0}, (0, "r")), ({"h": 0}, (0, "sizes")),
        ({"h": 2**62}, (None, "sizes")), ({"padding": 2**62}, (None, "padding")),
        ({"dilation": 2**62}, (None, "dilation")), ({"n": -1}, (None, "n, c, k and groups")),
        ({"c": 0}, (None, "n, c, k and groups")), ({"depth": -3}, (None, "sizes")),
    ],
)  # fmt: skip
def test_convolutions_that_there_are_not(change, named):
    """Nothing divides by zero or leaves 64 bits, whichever function is asked."""
    conv = question()._replace(**change)
    for ask in (_core.conv_sizes, lambda conv: profile().conv(conv, True)):
        with refused("conv", *named):
            ask(conv)


# ---- catalogues ----


def constant(count):
    """A profile that says a number of bytes for every convolution of 8 to 16 channels in float16."""
    return _core.Profile(True, None, [["", 0, 0, 0, count]], [], {"8,16,3,1,1/float16": "0"})


def test_the_nearest_version_and_card():
    cards = lambda *sms: tuple((f"card {n}", 89, n) for n in sms)  # noqa: E731
    known = [
        (89, 90800, (), constant(1), False),
        (89, 91000, cards(100), constant(2), False),
        (89, 91000, cards(20, 60), constant(3), False),
        (89, 90701, (), constant(4), True),
        (86, 91000, (), constant(5), False),
        (75, 91000, (), constant(6), False),
    ]
    catalogue = a_catalogue(*known)
    assert catalogue.near(("card 100", 89, 100), 91000) == [1, 0, 3]
    assert catalogue.near(("card 60", 89, 60), 90900) == [2, 0, 3]  # the newer of two that are as near
    assert catalogue.near(("other", 89, 81), 0) == [1, 0, 3]
    assert catalogue.near(("other", 89, 80), 0) == [1, 0, 3]  # of two that are as near the first
    assert catalogue.near(("other", 89, 79), 0) == [2, 0, 3] and catalogue.near(("other", 90, 79), 0) == []
    assert (
        catalogue.nearest(CARD, 90701) == 3 and catalogue.nearest(CARD, 90700) == 0
    )  # inferred ones answer for their own
    assert catalogue.nearest(("other", 90, 1), 0) == -1
    assert catalogue.relatives(89, 90900) == [0, 1, 2]
    assert catalogue.relatives(89, 90700) == catalogue.relatives(89, 0) == catalogue.relatives(90, 0) == [0, 1, 2, 4]
    assert catalogue.relatives(70, 91000) == [5]
    same = a_catalogue((89, 90800, (), known[0][3], False), (89, 91000, (), known[0][3], False))
    assert same.relatives(89, 0) == [0]


def test_rows():
    """What else a convolution may take, by what stands for missing data."""
    known = [
        (89, 90800, (), constant(10), False),
        (89, 91002, (), constant(20), False),
        (86, 91002, (), constant(30), False),
        (89, 90701, (), constant(40), True),
    ]
    possible = {"dtypes": ["float16"], "formula": ["", 0, 0, 0, 50]}, 0, 0, 90800, (89,), "possible"
    catalogue = a_catalogue(*known, rules=[possible], samples=[("v100", 70, 80)])
    other = question()._replace(c=9)  # no profile holds it
    i, o, f = (2 * n for n in (8 * 144, 16 * 144, 8 * 16 * 9))
    i9, o9, f9 = (-(-2 * n // 16) * 16 for n in (9 * 144, 16 * 144, 9 * 16 * 9))

    def rows(conv, every=False, **more):
        workspace = a_workspace(catalogue, **more)
        workspace.conv(conv)
        return [row[0] for row in workspace.rows(every, workspace)]

    assert rows(question()) == []  # asked of this version, on this card
    assert rows(question(), cudnn=90900) == [20]  # between two versions that were asked; 9.10 is no nearer
    assert rows(question(), every=True) == [10, 30, 40, 50]
    assert rows(question(), cudnn=92000) == [10, 30]  # beyond them: the whole family
    assert rows(question(), cudnn=90701) == [10]  # inferred: the nearest that was asked
    assert rows(question(), cudnn=90700) == [20, 30, 40, 50]  # before those that were asked
    assert rows(other) == [0, i9 + 3 * o9 + f9]  # a guess
    assert rows(question(), coarse=True) == [10, i + o + f, 0]  # between two, and a card of each kind
    assert rows(question(), guess="least") == [2 * 8 * 9 * 144] and rows(question(), guess="columns") == [0]
    workspace = a_workspace(catalogue, cudnn=90900)
    assert workspace.rows(False, workspace) == []  # nothing was asked about


def test_a_measured_rule_replaces_nothing():
    """It holds from one version to before another, and widens no band."""
    known = [(89, version, (), constant(10), False) for version in (90800, 91002, 92000)]

    def asked(version, standing):
        rule = {"dtypes": ["float16"], "formula": ["", 0, 0, 0, 50]}, 0, 91000, 92000, (89,), standing
        workspace = a_workspace(a_catalogue(*known, rules=[rule]), cudnn=version)
        count = workspace.conv(question())[0]
        return count, workspace.rows(False, workspace)

    assert asked(91002, "measured") == (50, []) and asked(91002, "taken") == (50, [(10,)])
    assert [asked(version, "measured") for version in (90800, 92000)] == [(10, [])] * 2


def test_bad_catalogues_and_workspaces():
    with refused("card"):
        a_workspace(card=("x" * 64, 89, 1))
    with refused("rule"):
        a_catalogue(rules=[({}, 0, 0, 0, (89,) * 17, "taken")])
    with refused("standing"):
        a_catalogue(rules=[({}, 0, 0, 0, (), "known")])
    for wrong in (dict(card=1), dict(card=("x", 89)), dict(rules=(1,)), dict(rules=((1, 0, 0, 0, (), "taken"),))):
        with pytest.raises((TypeError, ValueError)):
            a_workspace(**wrong)
    for load in (lambda number: 1 / 0, lambda number: (1, False), lambda number: None):
        catalogue = _core.Catalogue(((89, 91002, ()),), (), (), load)
        for use in (lambda c: c.near(CARD, 0), lambda c: c.relatives(89, 0), lambda c: a_workspace(c)):
            with pytest.raises((ZeroDivisionError, TypeError)):
                use(catalogue)
    with refused("catalogue", "int", kind=TypeError):
        a_workspace(7)
    catalogue = _core.Catalogue(((89, 91002, ()), (89, 92000, ())), (), (), lambda number: 1 / 0)
    for version in (-1, -(1 << 31), 1 << 31, 1 << 70):
        for call in (
            lambda v: catalogue.near(CARD, v), lambda v: catalogue.nearest(CARD, v),
            lambda v: catalogue.relatives(89, v), lambda v: _core.Catalogue(((89, v, ()),), (), (), None),
        ):  # fmt: skip
            with refused("version", got=version):
                call(version)
