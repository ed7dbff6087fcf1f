"""benchmarks/measurements: the rows' words, what an estimator answers, and the page."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
from errors import refused

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measurements import clean, scoreboard, scoreboard_page
from measurements.__main__ import main as measurements_main
from measurements.scoreboard import Answer, Estimator, ask, score, wrong_cards
from measurements.vocabulary import SOURCE_COLUMNS, Measurement, parse, read_rows, read_sources

from vaemem.tables.contribution import CONTRIBUTED as COLUMNS
from vaemem.tables.contribution import contribution

pytestmark = [pytest.mark.core, pytest.mark.python]

GOOD = dict.fromkeys(COLUMNS, "") | {
    "source": "somebody/repository#1", "runtime": "diffusers", "model": "sdxl", "op": "decode", "height": "1024",
    "width": "1024", "batch": "1", "dtype": "float16", "device": "NVIDIA GeForce RTX 4090",
    "versions": "torch 2.7.1+cu128, cudnn 9.7.1", "counter": "allocated above", "bytes": "2684354560",
}  # fmt: skip
SHEET = {
    "source": "https://github.com/somebody/repository/pull/12", "program": "diffusers 0.34.0",
    "versions": "torch 2.7.1", "model": "FLUX.1-dev", "op": "pipeline", "phase": "peak", "height": "1024",
    "width": "768", "batch": "1",
    "dtype": "bfloat16", "components": "", "card": "RTX 4090", "offload": "model", "tile": "",
    "metric": "max_memory_reserved", "value_mib": "1000", "doubtful": "", "note": "printed in MiB",
}  # fmt: skip


def row(**changed: str) -> Measurement:
    return parse({**GOOD, **changed})


# ---- rows ----


def test_there_are_a_thousand_rows_of_many_sources():
    rows, sources = read_rows(), read_sources()
    assert len(rows) >= 1000 and len({source["publisher"] for source in sources.values()}) >= 15
    assert {row.source for row in rows} == set(sources)
    for source in sources.values():
        assert source["address"].startswith("https://") or (ROOT / source["address"]).exists(), source["source"]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(
    "column, word",
    [
        ("runtime", "A1111"), ("op", "decoding"), ("phase", "peak"), ("dtype", "fp16"), ("counter", "vram"),
        ("settings", "fast"), ("way", "offload some, VAE whole"), ("way", "offload none, VAE cut"), ("height", "1e3"),
        ("bytes", "0"), ("bytes", ""), ("height", ""), ("note", " a space"), ("batch", "-1"),
        ("versions", "torch=2.7.1"), ("versions", "cuDNN 9.1.0"), ("bytes", "2652"),
    ],
)  # fmt: skip
def test_a_word_that_is_not_in_the_vocabulary(column, word):
    with pytest.raises(ValueError):
        row(**{column: word})


def test_the_line_of_a_wrong_row_is_named(tmp_path):
    for name, lines in {
        "sources.csv": ["source,publisher,address,license,seen,learned", "somebody/repository#1,somebody,,,,"],
        "rows.csv": [",".join(COLUMNS), *(",".join((GOOD | {"versions": "", "width": w}).values()) for w in "89")],
    }.items():  # fmt: skip
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert len(read_rows(tmp_path)) == 2
    good = (tmp_path / "rows.csv").read_text()
    wrong = good.replace("allocated above", "vram", 2).replace("vram", "allocated above", 1)
    (tmp_path / "rows.csv").write_text(wrong)
    with refused("rows.csv, line 3: counter", kind=ValueError):
        read_rows(tmp_path)
    (tmp_path / "rows.csv").write_text(wrong.replace("vram", "reserved").replace("somebody/repository#1", "nobody", 1))
    with refused("rows.csv, line 2: source", names=["'nobody'"], kind=ValueError):
        read_rows(tmp_path)
    for broken, line, names in ((wrong + wrong.splitlines()[1], 4, ["line 2"]),
                                (wrong.replace(",float16", ""), 2, [23, 22]),
                                (wrong.replace("sdxl", "sdxl,"), 2, [23, 24])):  # fmt: skip
        (tmp_path / "rows.csv").write_text(broken.replace("vram", "reserved above"))
        with refused(f"rows.csv, line {line}", names=names, kind=ValueError):
            read_rows(tmp_path)


def test_a_measured_run_is_a_line_of_the_rows(tmp_path):
    """What `vaemem measure --contribute` prints, with an address, is read as rows.csv is."""
    measured = {"source": "measured", "device": "NVIDIA L40S", "runtime": "diffusers", "dtype": "float16", "batch": 1}
    runs = [
        {"model": "sdxl", "op": "decode", "height": 64, "width": 72,
         "allocated_bytes": 2 << 20, "reserved_bytes": 3 << 20},
        {"model": "flux", "op": "pipeline", "phase": "whole", "height": 64, "width": 64, "reserved_bytes": 4 << 20,
         "way": "offload none, VAE whole"},
    ]  # fmt: skip
    runs = [measured | one for one in runs]
    lines = csv.DictReader(contribution(runs).splitlines())
    found = [parse({**line, "source": "somebody/repository#1"}) for line in lines]
    assert [(one.counter, one.bytes, one.phase) for one in found] == [
        ("allocated above", 2 << 20, ""), ("reserved above", 3 << 20, ""), ("reserved", 4 << 20, "")]  # fmt: skip
    for other in ({"device": "cpu"}, {"source": "predicted"}):
        with refused("contribute"):
            contribution([runs[0] | other])


# ---- sheets ----


def test_a_sheets_words_become_the_vocabularys():
    got = clean.clean(dict(SHEET))
    assert got is not None and parse(got)
    told = {
        name: got[name] for name in ("source", "model", "op", "phase", "way", "device", "versions", "counter", "bytes")
    }
    assert told == {
        "source": "somebody/repository#12", "model": "flux", "op": "pipeline", "phase": "",
        "way": "offload model, VAE whole", "device": "NVIDIA GeForce RTX 4090",
        "versions": "torch 2.7.1, diffusers 0.34.0", "counter": "reserved", "bytes": str(1000 << 20),
    }  # fmt: skip
    quantised = clean.clean(
        SHEET | {"components": "transformer and T5 int8_weight_only (torchao)", "card": "not named"}
    )
    assert (quantised["components"], quantised["device"]) == ("transformer int8wo, text_encoder_2 int8wo", "")
    tiled = clean.clean(SHEET | {"note": "VAE tiling, with xformers; fresh process"})
    assert (tiled["way"], tiled["settings"]) == ("offload model, VAE tiled", "attention xformers, cold")
    assert clean.clean(SHEET | {"metric": "vram"})["doubtful"] == "the counter is not named"
    assert clean.clean(SHEET | {"metric": "allocated_lt"}) is None  # a bound
    with refused("model", names=["'Nobody knows'"], kind=ValueError):
        clean.clean(SHEET | {"model": "Nobody knows"})


def test_sheets_are_written_once(tmp_path, monkeypatch, capsys):
    """A value that two sheets have is one row; so is one that differs by its rounding."""
    monkeypatch.setattr(clean, "own_rows", lambda: iter(()))
    (tmp_path / "words.csv").write_text((clean.HERE / "words.csv").read_text())
    (tmp_path / "rows.csv").write_text(",".join(COLUMNS) + "\n")
    (tmp_path / "sources.csv").write_text(",".join(SOURCE_COLUMNS) + "\n")
    monkeypatch.setattr(clean, "HERE", tmp_path)
    clean.words.cache_clear()
    with open(tmp_path / "sheet.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, SHEET)
        writer.writeheader()
        writer.writerows(
            [SHEET, SHEET | {"value_mib": "1000.4"}, SHEET | {"value_mib": "1100"}, SHEET | {"op": "guess"}]
        )
    assert clean.main([str(tmp_path / "sheet.csv")]) == 0
    assert capsys.readouterr().out == "2 rows of 1 sources, 1 lines refused, 0 bounds left out\n"
    assert [row.bytes for row in read_rows(tmp_path)] == [1000 << 20, 1100 << 20]
    first = [(tmp_path / name).read_text() for name in ("rows.csv", "sources.csv")]
    for again in ([], [str(tmp_path / "sheet.csv")]):  # the rows that are there stay
        clean.main(again)
        assert [(tmp_path / name).read_text() for name in ("rows.csv", "sources.csv")] == first
    clean.words.cache_clear()


def test_the_rows_are_those_that_the_script_writes(tmp_path, monkeypatch):
    """The seed table's, those of our runs, and the others as they are."""
    for name in ("rows.csv", "sources.csv"):
        (tmp_path / name).write_text((clean.HERE / name).read_text())
    monkeypatch.setattr(clean, "HERE", tmp_path)
    clean.main([])
    for name in ("rows.csv", "sources.csv"):
        assert (tmp_path / name).read_text() == (ROOT / "benchmarks" / "measurements" / name).read_text()


@pytest.mark.parametrize(
    "source, short, address",
    [
        ("github.com/a/b@0123456789abcdef:c/d.md", "a/b@0123456:c/d.md", "https://github.com/a/b/blob/0123456/c/d.md"),
        ("https://github.com/a/b/issues/7 (PR)", "a/b#7", "https://github.com/a/b/issues/7"),
        ("a/b issue/PR 7 (2026-05)", "a/b#7", "https://github.com/a/b/issues/7"),
        ("huggingface datasets/a/b (CI)", "hf:a/b", "https://huggingface.co/datasets/a/b"),
        ("https://a.io/cran/b", "a.io/cran/b", "https://a.io/cran/b"),
    ],
)
def test_sources(source, short, address):
    assert clean.source_of(source) == short and clean.address_of(short) == address


# ---- answers ----


def test_the_careful_question_has_what_the_row_says():
    """Of a published run with the safety checker, allocated is right to 0.1%; the plain question misses the checker."""
    one = row(
        op="pipeline", model="sd15", height="512", width="512", device="NVIDIA GeForce GTX 1070", versions="",
        way="offload none, VAE whole", settings="safety_checker", counter="allocated", bytes="3690035610",
    )  # fmt: skip
    careful, plain = ask(one, True), ask(one, False)
    assert abs(careful.bytes / one.bytes - 1) < 1e-3 < 0.1 < 1 - plain.bytes / one.bytes
    assert ask(row(settings="parallel"), True) is None and ask(row(counter="unnamed", doubtful="x"), True) is None


def test_every_estimator_is_asked_for_what_it_knows():
    decode, names = row(), [of.name for of in scoreboard.BOARD]
    answered = [of.answer(decode) is not None for of in scoreboard.BOARD]
    assert answered == [True, True, True, True, False, False] and "ComfyUI's formula" in names
    run = row(op="pipeline", way="offload model, VAE whole", counter="reserved")
    weights, margin = (of.answer(run) for of in scoreboard.BOARD[4:])
    assert weights.bytes > 6 << 30 and margin.bytes - (3 << 30) < weights.bytes


def test_verdicts():
    gib = 1 << 30
    assert wrong_cards(9 * gib, 7 * gib) == (True, False)  # 8 GiB: said to suffice
    assert wrong_cards(7 * gib, 9 * gib) == (False, True)
    assert wrong_cards(9 * gib, 9.5 * gib) == (False, False)


def test_scores():
    size = 10**7
    rows = [(row(bytes=str(size)), Answer(share * size, bound and bound * size)) for share, bound in
            [(1.01, 1.1), (0.95, 0.99), (1.5, None)]]  # fmt: skip
    own = [(one, Answer((1 + i) * size)) for i, (one, _) in enumerate([*rows, (row(), None)])]
    got = score(Estimator("mine", "", lambda one: None), [*rows, (row(), None)], own)
    assert (got.asked, got.answered, got.within, got.bounded) == (4, 3, 1, 2)
    assert (round(got.median, 3), round(got.worst, 3), round(got.above, 3)) == (0.05, 0.5, 0.045)
    assert got.worst_row is rows[2][0] and got.vaemem == 1


# ---- the page ----


def test_the_page_says_what_the_rows_say(capsys):
    """docs/ESTIMATORS.md, its figure and the errors by source, written again."""
    assert measurements_main(["--check"]) == 0, capsys.readouterr().out


def test_the_figure_has_a_dot_for_each_answer():
    pairs = [(row(bytes=str(10**7)), Answer(size)) for size in (10**5, 10**7, 10**9)] + [(row(), None)]
    drawn = scoreboard_page.figure([("mine & yours", pairs)])
    x = [float(at) for at in re.findall(r'cx="([\d.]+)"', drawn)]
    assert x == [scoreboard_page.LEFT, (scoreboard_page.LEFT + scoreboard_page.WIDTH - scoreboard_page.RIGHT) / 2,
                 scoreboard_page.WIDTH - scoreboard_page.RIGHT]  # fmt: skip
    assert "mine &amp; yours" in drawn


def test_causes_name_rows_that_exist():
    rows = [f"{one.source} {one.model} {one.dtype} {one.components} {one.settings} {one.way} {one.device} {one.counter}"
            for one in read_rows()]  # fmt: skip
    for cause in scoreboard_page.causes():
        assert any(all(word in text for word in cause["words"].split("; ")) for text in rows), cause["words"]
