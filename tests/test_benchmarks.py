"""The benchmark of memory limits, as far as neither PyTorch nor a quiet machine is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common
import memory

NAMES = ["vaemem", "vaemem, 40 T", "vaemem, smallest (for 0.1 T)"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Of one run at 64x64, where a limit of 40 T changes nothing and one of 0.1 T is below the smallest plan."""
    folder = tmp_path_factory.mktemp("results")
    words = "--size 64 --rounds 1 --threads 1 --no-peers --limits 0.1 40".split()
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "memory.py", *words],
        env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"VAEMEM_RESULTS": str(folder)},
        capture_output=True,
        text=True,
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak resident size")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def rows(results, monkeypatch) -> list[dict[str, str]]:
    monkeypatch.setattr(common, "RESULTS", results)
    (rows,) = memory.measured()
    return rows


def test_rows(rows):
    assert [row["contestant"] for row in rows] == NAMES
    for row in rows:
        assert (row["op"], row["height"], row["width"], row["threads"]) == ("decode", "64", "64", "1")
        assert (row["exact"], row["runs"]) == ("1", "1") and float(row["seconds"]) > 0 and float(row["work"]) >= 1
        assert int(row["weights_bytes"]) < int(row["planned_bytes"])
        assert int(row["base_rss_bytes"]) < int(row["peak_rss_bytes"])
        beside = int(row["planned_bytes"]) - int(row["weights_bytes"])
        assert float(row["planned_t"]) == pytest.approx(beside / (128 * 64 * 64 * 4), abs=1e-4)
        assert row["ratio_to_torch"] == row["psnr"] == "" and row["cpu"] and row["versions"] and row["commit"]
        if row["limit_bytes"]:
            assert int(row["planned_bytes"]) <= int(row["limit_bytes"])
    assert [row["limit_t"] for row in rows[:2]] == ["", "40.0"] and float(rows[2]["limit_t"]) > 0.1
    assert rows[0]["ratio_to_unlimited"] == "1.0"


@pytest.mark.resident
def test_the_plan_explains_the_process(rows):
    """Within 8 MiB, as tests/test_memory.py has it of a process that grows."""
    for row in rows:
        grown = int(row["peak_rss_bytes"]) - int(row["base_rss_bytes"])
        assert abs(grown - int(row["planned_bytes"])) <= 0.05 * int(row["planned_bytes"]) + (8 << 20)


def test_table_and_picture(rows, tmp_path):
    lines = memory.markdown([rows]).splitlines()
    assert len(lines) == 2 + len(rows) and len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| decode 64x64", name] for name in NAMES]
    assert all(line.endswith("| exact |") for line in lines[2:])
    pytest.importorskip("matplotlib")
    peer = rows[0] | {"contestant": "PyTorch", "exact": "", "planned_t": ""}
    memory.plot([[*rows, peer]], tmp_path / "new" / "memory.svg")
    assert "<svg" in (tmp_path / "new" / "memory.svg").read_text()


def test_no_results_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"run python benchmarks/memory\.py first"):
        memory.measured()


# ---- what fails it ----


def run_small(monkeypatch, tmp_path, change) -> list[dict]:
    """The contest, its workers a small model in this process; change(args, limit, answer) may spoil an answer."""

    class Worker:
        def __init__(self, name, script, args, env):
            self.args, self.limits, self.measure = args, iter(args["limits"]), memory.ours(args)

        def ask(self):
            return change(self.args, next(self.limits), self.measure())

        def close(self):
            pass

    monkeypatch.setattr(memory, "ARCHITECTURE", memory.SMALL)
    monkeypatch.setattr(memory, "reset_peak_rss", lambda: None)
    monkeypatch.setattr(memory, "Worker", Worker)
    size, rounds = 64, 2
    args = SimpleNamespace(op="decode", size=size, threads=1, limits=[40.0], rounds=rounds, peers=False, tile=512)
    args.unit = 128 * size * size * 4
    return memory.contest(args, str(tmp_path))


def test_rounds(monkeypatch, tmp_path):
    """What nobody asked for, the smallest plan, runs once."""
    rows = run_small(monkeypatch, tmp_path, lambda args, limit, answer: answer)
    assert [(row["contestant"], row["runs"]) for row in rows] == [
        ("vaemem", 2),
        ("vaemem, 40 T", 2),
        ("vaemem, smallest", 1),
    ]


@pytest.mark.parametrize("alone", [True, False])
def test_other_bits_fail(monkeypatch, tmp_path, alone):
    """In a process of their own, and in turns."""

    def spoil(args: dict, limit: int | None, answer: dict) -> dict:
        return answer | {"bits": "other"} if limit and args["alone"] is alone else answer

    with pytest.raises(SystemExit, match="vaemem, 40 T: the result differs"):
        run_small(monkeypatch, tmp_path, spoil)


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_one_bit_is_seen(monkeypatch, op):
    """The last bit of one number of a limited run's result."""
    import vaemem

    monkeypatch.setattr(memory, "ARCHITECTURE", memory.SMALL)
    monkeypatch.setattr(memory, "reset_peak_rss", lambda: None)
    run, bits = getattr(vaemem.VAE, op), []
    for flip in (0, 0, 1):

        def changed(vae, data, memory_limit=None, flip=flip):
            result = run(vae, data, memory_limit=memory_limit)
            array = result if op == "decode" else result.moments
            array.reshape(-1)[7:8].view(np.uint32)[:] ^= flip
            return result

        monkeypatch.setattr(vaemem.VAE, op, changed)
        args = {"op": op, "size": 32, "threads": 1, "limits": [None], "alone": True}
        bits.append(memory.ours(args)()["bits"])
    memory.refuse_difference("same", bits[1], bits[0])
    with pytest.raises(SystemExit, match="changed: the result differs"):
        memory.refuse_difference("changed", bits[2], bits[0])


# ---- the figures ----


def test_quality_of_tiles():
    """Tiles of 8 that share 2: their own parts are [0, 6), [8, 12) and [14, 16) of 16 pixels."""
    whole = np.zeros((1, 2, 16, 16))
    whole[0, 0, 0, 0] = 10  # the range
    tiles = whole + 1
    assert memory.quality(tiles, whole, 8) == (20.0, 0.0)  # a shift of everything leaves no seam
    tiles[..., 7:] += 1  # the second and the third tile of every row of tiles; 6 of the 12 steps go down a column
    psnr, seam = memory.quality(tiles, whole, 8)
    assert psnr == pytest.approx(10 * np.log10(100 / np.mean([1] * 7 + [4] * 9)))
    assert seam == pytest.approx(255 / 10 * 3 / 12)  # a step of 1 once in each of the three rows


def test_own_parts_may_be_missing():
    """The last tile of 13 pixels begins at 12, where the one before reaches."""
    error = np.zeros((1, 1, 13, 13))
    error[..., 12:] = 100
    error[..., 12:, :] = 100
    whole = np.zeros_like(error)
    whole[0, 0, 0, 0] = 1
    assert memory.quality(whole + error, whole, 8)[1] == 0


def test_ratio_is_of_common_rounds():
    assert memory.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2
    assert memory.ratio([6.0], [3.0, 100.0]) == 2


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_input_is_like_a_picture(op):
    x = memory.inputs(op, 128)
    assert x.dtype == np.float32 and x.shape == ((1, 4, 16, 16) if op == "decode" else (1, 3, 128, 128))
    assert abs(x.mean()) < 1e-3 and (op == "decode" or abs(x).max() == 1)
    neighbours = np.corrcoef(x[..., 1:].ravel(), x[..., :-1].ravel())[0, 1]
    assert neighbours > 0.5  # of white noise: about 0
