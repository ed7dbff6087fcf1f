"""benchmarks/published: a guide's and a note's claims. Figures are the library's, commands name scripts that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from errors import refused

import vaemem
from vaemem import predict

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from published import guide, note
from published.claims import FAILS, HOLDS, UNKNOWN

MIB = 1 << 20


HOW = {guide.COUNTED, guide.RUN, guide.PREDICTED, guide.MEASURED, guide.DOCUMENTED, guide.NEEDS_GPU, guide.NOWHERE}


@pytest.fixture(scope="module")
def judged():
    return guide.judge_claims()


def finding(judged, words):
    (found,) = [one for claim, one in judged if words in claim.says]
    return found


def test_every_claim_has_a_verdict_and_what_it_rests_on(judged):
    assert len(judged) == len(guide.GUIDE)
    for claim, one in judged:
        assert one.verdict in (HOLDS, FAILS, UNKNOWN) and claim.source and one.found
        assert set(one.how.split("; ")) <= HOW
        assert one.verdict != UNKNOWN or "python benchmarks/" in one.found or guide.NOWHERE in one.how
    assert {part for _, one in judged for part in one.how.split("; ")} == HOW
    assert len(judged.contradictions()) == sum(one.verdict == FAILS for _, one in judged) > 10


def test_commands_are_of_scripts_and_flags_that_exist(judged):
    commands = {found for _, one in judged for found in re.findall(r"python (benchmarks/\S+\.py[^;.,:]*)", one.found)}
    assert len({command.split()[0] for command in commands}) == 3
    for command in commands:
        script, *words = shlex.split(command)
        text = (ROOT / script).read_text("utf-8")
        for word in words:
            assert f'"{word}"' in text or word in text or word.isdigit(), (script, word)


def test_the_card_is_another_than_it_says(judged):
    assert "12.0 is Blackwell" in finding(judged, "Ada Lovelace").found
    assert "896 GB/s; 504 are those of RTX 4070" in finding(judged, "504 GB/s").found
    assert "1.0 times float32's on this card, 8.0 times on an A100" in finding(judged, "8 times faster").found


def test_overlap_is_judged_by_predictions(judged):
    found = finding(judged, "tile overlap")
    asked = {"gpu": guide.CARD, "tile": 1024}
    none, half = (
        predict("sdxl", "decode_tiled", 2048, 2048, "bfloat16", tile_overlap=part, **asked) for part in (0, 0.5)
    )
    assert found.verdict == FAILS and none.allocated < half.allocated
    assert f"0: {none.allocated / MIB:.0f} and" in found.found and f"0.5: {half.allocated / MIB:.0f} and" in found.found


def test_in_place_steps_are_the_ones_that_an_operand_could_take():
    """ComfyUI's code runs SiLU in place: what its trace has less of is what the guide's pattern counts."""
    p = predict("flux", "decode", 512, 512, "bfloat16")
    found = {moment.name for moment in p.timeline if guide.ELEMENTWISE.search(moment.name)}
    assert {"decoder.up_blocks.3.resnets.2.norm2 [silu]", "decoder.up_blocks.0.resnets.1 [sum]"} <= found
    assert not any("conv" in name.rpartition(".")[2].partition(" ")[0] and "norm" not in name for name in found)
    in_place = predict("flux", "decode", 512, 512, "bfloat16", runtime="comfyui")
    assert not any("resnets" in moment.name and "[silu]" in moment.name for moment in in_place.timeline)


def test_similarity():
    rng = np.random.default_rng(0)
    image = rng.random((3, 24, 32))
    assert guide.ssim(image, image) == pytest.approx(1)
    near, far = (guide.ssim(image + scale * rng.standard_normal(image.shape), image) for scale in (0.02, 0.5))
    assert far < 0.5 < near < 1
    flat = guide.ssim(np.full_like(image, image.mean()), image)  # the mean alone is right: s = c2 / (variance + c2)
    assert flat < 0.1


def test_statements_judged_by_recorded_runs(judged):
    """The graphs' verdict follows from one size at which they are slower."""
    assert finding(judged, "INT8").verdict == FAILS and "1321 is what that makes" in finding(judged, "INT8").found
    assert "first of 11 runs each took 1.4 to 6.9 times" in finding(judged, "first run").found
    graphs = finding(judged, "CUDA graphs")
    assert graphs.verdict == FAILS and "vaemem graphs, decode 2048x2048 in bfloat16, H100: 1.05" in graphs.found
    assert "1869 MiB more than it allocates, and 1869 with" in finding(judged, "fragmentation").found


def test_the_note_on_mlx():
    checked = note.judge_claims()
    assert finding(checked, "7.6 GiB of columns").verdict == HOLDS and finding(checked, "im2col").verdict == FAILS
    assert "11.2 GiB rather than 22.6 GiB" in finding(checked, "unloading").found
    assert finding(checked, "only approach").verdict == FAILS
    assert {one.how for _, one in checked if one.verdict == UNKNOWN} == {note.NOWHERE}


def test_shown(judged):
    said = judged.text("about it")
    answer, about, *_ = said.splitlines()
    told = [int(number) for number in re.findall(r"\d+", answer)]
    verdicts = [one.verdict for _, one in judged]
    assert told == [len(judged), *(verdicts.count(one) for one in (HOLDS, FAILS, UNKNOWN))] and sum(told[1:]) == told[0]
    assert said.count("\n\n") == len(judged) and about == "about it"
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.thorough
def test_its_benchmark_runs_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    script, words = ROOT / "benchmarks" / "guide_gpu.py", "--device cpu --small --tile 64 --rounds 1".split()
    where = {"VAEMEM_RESULTS": str(tmp_path), "PYTHONSAFEPATH": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script), *words], check=True, env=os.environ | where)
    assert len((tmp_path / "guide_gpu_cpu.csv").read_text().splitlines()) == 1 + 5


def test_peaks_by_tile_are_drawn():
    pytest.importorskip("matplotlib")
    asked = {"dtype": "float16", "gpu": "RTX 5070 Ti"}
    made = [
        predict(model, "decode_tiled", 512, 512, tile=tile, tile_overlap=part, **asked)
        for model in ("sd15", "flux") for tile in (384, 256) for part in (0, 0.5)
    ]  # fmt: skip
    whole = predict("sd15", "decode", 512, 512, **asked)
    first, second = vaemem.plot.tile_peaks([*made, whole], "allocated").axes
    (none, half, line), others = first.lines, second.lines
    assert (first.get_title(), second.get_title(), len(others)) == ("sd15", "flux", 2)
    assert list(none.get_xdata()) == [256, 384] and list(half.get_ydata())[1] == made[1].allocated / MIB
    assert set(line.get_ydata()) == {whole.allocated / MIB}
    with refused("predictions", "none"):
        vaemem.plot.tile_peaks([whole])
    with refused("target"):
        vaemem.plot.tile_peaks(made, "seconds")
