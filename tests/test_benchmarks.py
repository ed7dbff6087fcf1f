"""The CPU's benchmarks as far as no quiet machine is needed: memory limits; whole runs beside peers."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from errors import is_about, refused

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common
import decode
import memory
import passes
import prediction_seconds
import tools
from cases import Attention, Conv
from decode import Bar, Case, Entry
from engine import config

from vaemem import _core, _kernels

NAMES = ["vaemem", "vaemem, 40 T", "vaemem, smallest (for 0.1 T)"]


def run(script: str, words: str, folder: Path, packages: Path | None = None) -> str:
    """What a benchmark says, its results in a folder; `packages` are found before those that are installed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    env |= {"VAEMEM_RESULTS": str(folder), "VAEMEM_PEAK_ROUNDS": "1000000"}
    if packages:
        env["PYTHONPATH"] = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *words.split()], env=env, capture_output=True, text=True
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak resident size")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Of one run at 64x64, where a limit of 40 T changes nothing and one of 0.1 T is below the smallest plan."""
    folder = tmp_path_factory.mktemp("results")
    run("memory.py", "--size 64 --rounds 1 --threads 1 --no-peers --limits 0.1 40", folder)
    return folder


@pytest.fixture
def rows(results, monkeypatch) -> list[dict[str, str]]:
    monkeypatch.setattr(common, "RESULTS", results)
    (rows,) = memory.measured()
    return rows


@pytest.mark.thorough
def test_a_folder_is_encoded_as_diffusers_does(tmp_path):
    """The benchmark compares the latents itself."""
    for package in ("diffusers", "PIL", "safetensors"):
        pytest.importorskip(package)
    (tmp_path / "config.json").write_text(json.dumps(config("sd")))
    words = f"--model {tmp_path}/config.json --size 64 --images 5 --batches 2 --rounds 1 --threads 1"
    run("encode_folder.py", words, tmp_path)
    with open(tmp_path / "encode_folder_64.csv") as f:
        rows = list(csv.DictReader(f))
    assert [(row["contestant"], row["batch"]) for row in rows] == [("vaemem", "1"), ("diffusers", "2")]
    assert all(int(row["base_mib"]) < int(row["peak_mib"]) and float(row["images_per_second"]) for row in rows)


@pytest.mark.thorough
def test_many_threads_are_modelled(tmp_path):
    """On more threads than there are tasks the efficiency is lower."""
    if not tools.runs("gcc"):
        pytest.skip("there is no gcc")
    run("scaling.py", "--model --size 64 --threads 2 256 --limits 0", tmp_path)
    with open(tmp_path / "scaling_model_64.csv") as f:
        found = {row["threads"]: float(row["efficiency"]) for row in csv.DictReader(f) if row["pass"] == "all"}
    assert 0 < found["256"] < found["2"] <= 1


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.resident
def test_the_plan_explains_the_process(rows):
    """Within 8 MiB, as tests/test_memory.py has it of a process that grows."""
    for row in rows:
        grown = int(row["peak_rss_bytes"]) - int(row["base_rss_bytes"])
        assert abs(grown - int(row["planned_bytes"])) <= 0.05 * int(row["planned_bytes"]) + (8 << 20)


@pytest.mark.thorough
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
    with refused(kind=SystemExit, names=["benchmarks/memory.py"]):
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


@pytest.mark.thorough
def test_rounds(monkeypatch, tmp_path):
    """What nobody asked for, the smallest plan, runs once."""
    rows = run_small(monkeypatch, tmp_path, lambda args, limit, answer: answer)
    assert [(row["contestant"], row["runs"]) for row in rows] == [
        ("vaemem", 2),
        ("vaemem, 40 T", 2),
        ("vaemem, smallest", 1),
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("alone", [True, False])
def test_other_bits_fail(monkeypatch, tmp_path, alone):
    """In a process of their own, and in turns."""

    def spoil(args: dict, limit: int | None, answer: dict) -> dict:
        return answer | {"bits": "other"} if limit and args["alone"] is alone else answer

    with refused("vaemem, 40 T", kind=SystemExit):
        run_small(monkeypatch, tmp_path, spoil)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_one_bit_is_seen(monkeypatch, op):
    """The last bit of one number of a limited run's result."""
    import vaemem

    monkeypatch.setattr(memory, "ARCHITECTURE", memory.SMALL)
    monkeypatch.setattr(memory, "reset_peak_rss", lambda: None)
    method, bits = getattr(vaemem.VAE, op), []
    for flip in (0, 0, 1):

        def changed(vae, data, memory_limit=None, flip=flip):
            result = method(vae, data, memory_limit=memory_limit)
            array = result if op == "decode" else result.moments
            array.reshape(-1)[7:8].view(np.uint32)[:] ^= flip
            return result

        monkeypatch.setattr(vaemem.VAE, op, changed)
        args = {"op": op, "size": 32, "threads": 1, "limits": [None], "alone": True}
        bits.append(memory.ours(args)()["bits"])
    memory.refuse_difference("same", bits[1], bits[0])
    with refused("changed", kind=SystemExit):
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


# ---- whole runs beside peers ----

STAND_IN = """\
import torch

__version__ = "stand-in"


def convert_model(module, example_input):
    return torch.jit.trace(module, example_input, check_trace=False)


def save_model(model, path, compress_to_fp16):
    assert compress_to_fp16 is False
    torch.jit.save(model, str(path))


class Core:
    def read_model(self, path):
        return Model(path)

    def compile_model(self, model, device, settings):
        assert device == "CPU" and settings["PERFORMANCE_HINT"] == "LATENCY"
        torch.set_num_threads(settings["INFERENCE_NUM_THREADS"])
        model.hint = settings["INFERENCE_PRECISION_HINT"]
        return model


class Model:
    def __init__(self, path):
        self.traced = torch.jit.load(str(path))

    def reshape(self, shape):
        self.shape = shape

    def __call__(self, x):
        assert list(x.shape) == self.shape
        with torch.inference_mode():
            return [self.traced(torch.from_numpy(x)).numpy()]

    def get_property(self, name):
        assert name == "INFERENCE_PRECISION_HINT"
        return self

    def to_string(self):
        return self.hint
"""

TINY = "--small --size 64 --check 32 --rounds 1 --threads 1 --contestants"


def package(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.thorough
def test_contest(tmp_path):
    """One weights file, one input: everybody is near PyTorch in float64, whatever computed it."""
    pytest.importorskip("diffusers")
    packages = package(tmp_path, "openvino", STAND_IN)
    said = run("decode.py", f"{TINY} vaemem vaemem-ref torch openvino", tmp_path, packages)
    rows = table(tmp_path / "decode_64_float32_small_cpu.csv")
    assert [row["contestant"] for row in rows] == ["vaemem", "vaemem-ref", "torch", "openvino"]
    for row in rows:
        assert (row["op"], row["height"], row["dtype"], row["precision"]) == ("decode", "64", "float32", "highest")
        assert row["threads"] == row["runs"] == "1" and float(row["seconds"]) > 0
        assert 0 < float(row["rms_error"]) < 1e-5 and 0 < float(row["max_error"]) < 1e-4
        assert 0 < int(row["base_rss_mib"]) <= int(row["peak_rss_mib"])
        assert float(row["ratio_to_torch"]) > 0 and float(row["ratio_to_openvino"]) > 0
        assert row["ratio_to_torch_tuned"] == "" and row["cpu"] and row["features"] and row["commit"]
        ours = row["contestant"].startswith("vaemem")
        assert bool(row["planned_mib"]) == bool(row["share_of_peak"]) == ours
        assert f"  {row['contestant']} " in said
    assert rows[2]["ratio_to_torch"] == rows[3]["ratio_to_openvino"] == "1.0"
    assert rows[1]["versions"].endswith(" ref") and rows[3]["versions"] == "openvino stand-in f32"


@pytest.mark.thorough
def test_videos(tmp_path):
    pytest.importorskip("diffusers")
    run("videos.py", "memory --frames 5 --sizes 64x64 --dtypes float32", tmp_path)
    (row,) = table(tmp_path / "videos_memory_wan2.1.csv")
    assert 0 < float(row["vaemem_least"]) <= float(row["vaemem"]) < float(row["diffusers"])
    assert 0 < float(row["two_frames_kept"]) < float(row["diffusers"])
    run("videos.py", "time --frames 5 --sizes 32x32 --rounds 1", tmp_path)
    (row,) = table(tmp_path / "videos_time_wan2.1.csv")
    assert float(row["ratio"]) > 0 and float(row["difference"]) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "op"), [("qwen-image", "decode"), ("taesd", "encode")])
def test_other_vaes(tmp_path, model, op):
    """One frame of a VAE of videos, beside diffusers' 3D convolutions in float64; a tiny autoencoder."""
    pytest.importorskip("diffusers")
    run("decode.py", f"--model {model} --op {op} {TINY} vaemem", tmp_path)
    (row,) = table(tmp_path / f"{model}_{op}_64_float32_small_cpu.csv")
    assert (row["contestant"], row["model"], row["op"]) == ("vaemem", model, op)
    assert 0 < float(row["rms_error"]) < 1e-5


@pytest.mark.thorough
def test_a_photograph_there_and_back(tmp_path):
    """With random weights nothing but that both agree, and that PSNR is what it is called."""
    pytest.importorskip("diffusers")
    pillow = pytest.importorskip("PIL.Image")
    torch = pytest.importorskip("torch")
    from vaemem import VAE
    from vaemem.engine import layouts

    vae = VAE.random("taef2")
    for half in ("encoder", "decoder"):
        spelt = layouts.spell(vae.state_dict(), f"taesd-{half}", 4)
        state = {spelt[name]: torch.from_numpy(t) for name, t in vae.state_dict().items() if name.startswith(half)}
        torch.save(state, tmp_path / f"taef2_{half}.pth")
    photo = np.random.default_rng(0).integers(0, 256, (40, 52, 3), np.uint8)
    pillow.fromarray(photo).save(tmp_path / "photo.png")
    files = [str(tmp_path / name) for name in ("taef2_encoder.pth", "taef2_decoder.pth", "photo.png", "back.png")]
    said = run("photograph.py", f"{' '.join(files[:3])} --save {files[3]} --crop 0 0 52 40", tmp_path)
    figures = dict(line.split(": ") for line in said.splitlines() if ": " in line)
    back = np.asarray(pillow.open(files[3])).astype(np.float64)
    assert back.shape == (40, 48, 3)  # whole latents of it
    error = np.mean((back - photo[:, :48]) ** 2)
    assert float(figures["ours and the photograph"].split()[0]) == pytest.approx(10 * np.log10(255**2 / error), abs=0.2)
    assert figures["ours and the photograph"] == figures["PyTorch's and the photograph"]
    assert float(figures["ours and PyTorch's"].split()[0]) > 110


def test_peers_that_are_not_installed(tmp_path):
    """They are left out, and said; ours runs."""
    for name in ("diffusers", "openvino"):
        package(tmp_path, name, f"raise ModuleNotFoundError(\"No module named '{name}'\")")
    said = run("decode.py", f"{TINY} vaemem vaemem-nope torch openvino", tmp_path, tmp_path)
    (row,) = table(tmp_path / "decode_64_float32_small_cpu.csv")
    assert row["contestant"] == "vaemem" and row["max_error"] == row["rms_error"] == row["ratio_to_torch"] == ""
    assert re.findall(r"(\S+) is left out", said) == ["vaemem-nope", "torch", "openvino"]
    assert is_about(said, names=["'.[bench]'", "'diffusers'", "'openvino'"])


def test_a_contestant_that_nobody_knows(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--contestants", "tensorflow"])
    with pytest.raises(SystemExit):
        decode.main()
    told = capsys.readouterr().err
    known = ("vaemem-KERNELS", "torch-tuned", "torch-avx2", "torch-reduce-overhead", "openvino", "'tensorflow'")
    assert is_about(told, names=known)


def test_who_takes_part():
    args = SimpleNamespace(contestants=["vaemem", "torch-tuned", "openvino"], precision=["high", "medium"])

    def labels(dtype: str) -> list[tuple[str, str]]:
        return [entry[:2] for entry in decode.entries(args, Case("decode", 64, dtype))]

    assert labels("float32") == [
        ("vaemem high", "high"),
        ("vaemem medium", "medium"),
        ("torch-tuned high", "high"),
        ("openvino", "highest"),
    ]
    assert labels("bfloat16") == [(name, "highest") for name in args.contestants]


def test_who_is_left_out(monkeypatch, tmp_path, capsys):
    """On a machine with AVX2 at best: to be held to that is nothing new, and to more than that cannot be."""

    class Worker:
        def __init__(self, name, script, args, env):
            self.args, self.results, self.greeted = args, [], False

        def ask(self):
            if self.args["who"] != "ours":
                return {"skipped": "not installed"}
            answer = {"seconds": 1.0} if self.greeted else {"backend": "avx2", "what": ""}
            self.greeted = True
            self.results.append(answer)
            return answer

        def close(self):
            pass

    monkeypatch.setattr(decode, "Worker", Worker)
    monkeypatch.setattr(decode, "held_to", lambda *_: {})
    names = ["vaemem-avx512", "vaemem", "vaemem-avx2", "torch"]
    named = {"contestants": names, "precision": ["highest", "high"], "model": "sdxl"}
    args = SimpleNamespace(**named, threads=1, check=32, small=True, rounds=2)
    entered = decode.Contest(Case("decode", 64, "float32"), args, str(tmp_path)).run()
    assert list(entered) == ["vaemem", "vaemem high"]
    assert all(entry.seconds == [1.0, 1.0] and entry.errors is None for entry in entered.values())
    said = capsys.readouterr().out
    assert set(re.findall(r"(\S.*) is left out", said)) >= {"vaemem-avx512", "vaemem-avx2", "torch", "torch high"}


def test_held_to():
    names = [name for name, _ in _core.backends("bfloat16")]
    assert decode.held_to(names[0], "bfloat16", "highest") == {"VAEMEM_DISABLE": ""}
    assert decode.held_to("ref", "bfloat16", "highest") == {"VAEMEM_DISABLE": ",".join(names[:-1])}
    assert decode.held_to("abacus", "bfloat16", "highest") is None


def entry(label: str, *seconds: float) -> Entry:
    worker = SimpleNamespace(results=[{"seconds": s} for s in seconds])
    return Entry(label, "highest", {"what": "", "first": 9.0}, worker, None)


def test_ratios_are_medians_of_rounds():
    others = {"vaemem": entry("vaemem", 1.0, 3.0, 2.0), "torch-tuned": entry("torch-tuned", 4.0, 4.0, 2.0)}
    for e in others.values():
        for result in e.worker.results:
            result |= {"rss": 5 << 20, "base": 3 << 20}
    line = decode.row(
        Case("decode", 512, "float32"), SimpleNamespace(threads=1, model="sdxl"), others["vaemem"], others
    )
    assert (line["ratio_to_vaemem"], line["ratio_to_torch_tuned"], line["ratio_to_torch"]) == (1, 0.75, None)
    assert (line["seconds"], line["fastest"], line["slowest"], line["first"]) == (2, 1, 3, 9)
    assert (line["peak_rss_mib"], line["base_rss_mib"], line["planned_mib"], line["max_error"]) == (5, 3, None, None)


AMX, NO_AMX = "x86_64 avx2 avx512f amx_bf16", "x86_64 avx2"


def test_verdicts():
    case = Case("decode", 512, "bfloat16")

    def verdict(bar: Bar, features: str) -> str:
        ours = {"contestant": "vaemem", "features": features, "ratio_to_torch_tuned": "0.5"}
        return decode.verdict(bar, {"vaemem": ours, "torch-tuned": {}})

    assert verdict(Bar(case, "vaemem", "torch-tuned", 0.5), AMX) == "0.500 kept"
    assert verdict(Bar(case, "vaemem", "torch-tuned", 0.45), AMX) == "0.500 missed"
    no_amx = "not measured: this machine has no AMX (0.500 without)"
    assert verdict(Bar(case, "vaemem", "torch-tuned", 0.45), NO_AMX) == no_amx
    assert verdict(Bar(case, "vaemem", "torch-tuned", 0.45, amx=False), NO_AMX) == "0.500 missed"
    missing = "not measured: openvino is not in decode_512_bfloat16_cpu.csv"
    assert verdict(Bar(case, "vaemem", "openvino", 0.6), AMX) == missing


def test_bars_are_of_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    ours = {"contestant": "vaemem", "features": NO_AMX, "ratio_to_torch": "0.363", "ratio_to_openvino": ""}
    common.write_csv("decode_512_float32_cpu.csv", [ours, ours | {"contestant": "torch"}], quiet=True)
    lines = decode.bars([bar.case for bar in decode.BARS]).splitlines()
    assert len(lines) == len(decode.BARS)
    assert lines.count("  decode 512x512 float32: vaemem at most 0.36 of torch: 0.363 missed") == 1
    assert sum("not measured" in line for line in lines) == len(decode.BARS) - 1
    assert decode.bars([Case("decode", 64, "float32")]) == ""


def test_errors():
    assert decode.errors_of(np.array([3.0, 4.0, -0.5], np.float32), np.array([3.0, 4.0, 0.0])) == (0.5, 0.1)


# ---- pass by pass ----


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_passes_of_a_whole_run(monkeypatch, op):
    monkeypatch.setattr(_kernels, "peak", lambda *args: 1e9)
    names = {"dtype": "float32", "precision": "highest", "threads": 1, "backend": "ref"}
    rows = passes.whole(SimpleNamespace(**names, size=64, rounds=1, small=True), op)
    assert len({row["pass"] for row in rows}) == len(rows) > 20
    assert {f"{op}r.conv_in", f"{op}r.mid_block.attentions.0.attention"} <= {row["pass"] for row in rows}
    assert 0 < sum(row["share_of_run"] for row in rows) <= 1.01
    for row in rows:
        assert names | {"op": op, "height": 64} == {key: row[key] for key in (*names, "op", "height")}
        assert row["share_of_peak"] == pytest.approx(row["gflops"], abs=0.06) and row["peak_gflops"] == 1


@pytest.mark.parametrize("dtype, element", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("case", [Conv(32, 48, 5, 9, groups=8), Conv(24, 24, 3, 5, up=True), Attention(16, 3, 5)])
def test_single_passes(monkeypatch, case, dtype, element):
    """With the clock and the peak at known figures; that the results are right is checked on the way."""
    pytest.importorskip("torch")
    run_pass = _kernels.run_pass
    monkeypatch.setattr(_kernels, "run_pass", lambda *args: (run_pass(*args), 1e-6)[1])
    monkeypatch.setattr(_kernels, "peak", lambda *args: 1e12)
    args = SimpleNamespace(backend="ref", threads=1, rounds=1, small=True, dtype=dtype, precision="highest")
    row = passes.measure(case, args)
    assert (row["dtype"], row["precision"], row["backend"], row["microseconds"]) == (dtype, "highest", "ref", 1)
    assert row["gflops"] == pytest.approx(case.flops / 1e3, abs=0.06) and row["time_ratio_to_torch"] >= 0
    assert row["share_of_peak"] == pytest.approx(case.flops / 1e6, abs=6e-4)
    assert row["gbytes_per_second"] == pytest.approx(case.bytes_moved / 4 * element / 1e3, abs=0.006)
    assert 0 < float(row["rms_error"]) < {4: 1e-6, 2: 1e-2}[element] and float(row["max_error"]) > 0


@pytest.mark.thorough
def test_predictions(tmp_path):
    header, *lines = run("prediction_seconds.py", "--sizes 2", tmp_path).splitlines()
    assert header.startswith("CPU ms, medians")
    names, counts, figures = zip(*(line.split() for line in lines), strict=True)
    assert (names, counts) == (("predict", "predict_pipeline", "plan_pipeline"), ("2", "2", "1"))
    assert all(float(figure) > 0 for figure in figures)
    header, line, *_ = run("prediction_seconds.py", "--commands fits", tmp_path).splitlines()
    assert header.startswith("seconds: CPU, elapsed") and line.startswith("fits sdxl decode 1024")
    assert all(float(seconds) > 0 for seconds in line.split()[-2:])
    sizes = list(prediction_seconds.sizes(400))
    assert len(set(sizes)) == 400 and not any(side % 8 for size in sizes for side in size)
