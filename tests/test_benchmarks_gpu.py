"""The GPU benchmark as far as no GPU is needed: its peer is diffusers' module; its arithmetic; the whole flow."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from engine import SMALL, config, latents, small_vae

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attention_kernels
import common
import contest
import conv_tiles
import decode_gpu
import torch_vae
from contest import Case

LAYOUTS = [torch.contiguous_format, torch.channels_last]


# ---- the peer ----


def both(name: str, dtype=torch.float32, device="cpu"):
    """diffusers' module and ours, with the same weights where they have any."""
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    arch = small_vae(name).arch
    theirs = diffusers_vae(arch, dtype, device)
    with torch.device(device):
        mine = torch_vae.AutoencoderKL(arch).eval().to(dtype)
    if device != "meta":
        mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def inputs(op: str, name: str, dtype=torch.float32, device="cpu"):
    factor = 2 ** (len(SMALL[name]["block_out_channels"]) - 1)
    channels, scale = (SMALL[name]["latent_channels"], 1) if op == "decode" else (3, factor)
    return torch.randn(2, channels, 6 * scale, 4 * scale, dtype=dtype, device=device)


def run(op: str, vae, x):
    return vae.decode(x, return_dict=False)[0] if op == "decode" else vae.encode(x).latent_dist.sample()


@pytest.mark.parametrize("name", SMALL)
def test_modules_are_in_diffusers_order(name):
    theirs, mine = both(name)
    assert [(n, p.shape) for n, p in mine.named_parameters()] == [(n, p.shape) for n, p in theirs.named_parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("name", SMALL)
def test_numbers_are_those_of_diffusers(name, op, layout):
    theirs, mine = (vae.to(memory_format=layout) for vae in both(name))
    x = inputs(op, name)
    outputs = []
    with torch.inference_mode():
        for vae in (theirs, mine):
            torch.manual_seed(0)  # of the sample
            outputs.append(run(op, vae, x))
    assert torch.equal(*outputs)  # the same operators on the same numbers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("name", SMALL)
def test_tensors_live_as_long_as_in_diffusers(name, op, layout):
    from vaemem.pytorch import record

    x = inputs(op, name, torch.float16, "meta")
    steps = []
    for vae in both(name, torch.float16, "meta"):
        recording = record(vae.to(memory_format=layout), x, call=lambda vae, x: run(op, vae, x))
        steps.append([(kind, number, count) for kind, number, count, _ in recording.trace.steps])
    assert steps[0] == steps[1] and len(steps[0]) > 100


def test_tiles_are_refused():
    vae = torch_vae.with_weights(small_vae())
    vae.use_tiling = True
    with pytest.raises(NotImplementedError):
        vae.decode(torch.zeros(1, 4, 2, 2))


@pytest.mark.parametrize("name", SMALL)
def test_weights_come_by_name(name):
    vae = small_vae(name)
    z = latents(vae, 5, 7)
    with torch.inference_mode():
        theirs = torch_vae.with_weights(vae).image(torch.from_numpy(z))
    assert contest.relative_error(vae.decode(z), theirs) < 1e-5  # float32, two orders of summing: the project's bar


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("model", ["sdxl", "flux"])
def test_parts_make_the_whole(model, op):
    case = Case(model, op, 16, "float32", small=True)
    vae = contest.open_vae(case, "cpu")
    module, shapes = torch_vae.with_weights(vae), decode_gpu.shapes_of(case)
    x = torch.from_numpy(contest.hosted_data(case))
    h = residual = None
    with torch.inference_mode():
        want = module.image(x) if op == "decode" else module.moments(x)
        for name in vae.estimate(op, 16, 16).passes:
            part, leaf = decode_gpu.Part(module, name, shapes, 4), name.rpartition(".")[2]
            if leaf in ("conv1", "conv_shortcut"):
                y = part.run(x, None)
                h, residual = (y, x) if leaf == "conv1" else (h, y)
                assert part.x == tuple(x.shape)
            elif leaf in ("to_qkv", "attention"):
                h = part.run(x if leaf == "to_qkv" else h, None)
                h = torch.stack(h) if leaf == "to_qkv" else h
                y = h
            else:
                source = h if part.add else x
                add = residual if leaf == "conv2" else x
                y = x = part.run(source, add if part.add else None)
                assert part.x == tuple(source.shape)
            assert part.y == tuple(y.shape)
            if part.conv:
                assert part.conv(torch.empty(part.conv_x)).shape == y.shape
    assert contest.relative_error(x, want) < 1e-6  # the same operators but for how q, k and v are laid out


def test_bytes_of_a_pass():
    case = Case("sdxl", "decode", 16, "bfloat16", small=True)  # 64 channels at 8x8, then 32 at 16x16
    module = torch_vae.with_weights(contest.open_vae(Case("sdxl", "decode", 16, "float32", small=True), "cpu"))
    shapes = decode_gpu.shapes_of(case)

    def bytes_of(name):
        return decode_gpu.Part(module, f"decoder.{name}", shapes, 2).bytes_moved

    assert bytes_of("up_blocks.1.resnets.0.conv1") == 2 * (64 * 256 + 32 * 256 + 64 * 32 * 9)
    assert bytes_of("up_blocks.1.resnets.0.conv2") == 2 * (3 * 32 * 256 + 32 * 32 * 9)  # and the residual
    assert bytes_of("up_blocks.0.upsamplers.0.conv") == 2 * (64 * 64 + 64 * 256 + 64 * 64 * 9)  # read before the 2x
    assert bytes_of("mid_block.attentions.0.to_qkv") == 2 * (4 * 64 * 64 + 3 * 64 * 64)
    assert bytes_of("mid_block.attentions.0.attention") == 2 * 4 * 64 * 64


# ---- the clock and the counters, on a stand-in ----


class FakeCuda:
    """torch.cuda with a clock that its events read and counters that `take` moves."""

    def __init__(self):
        self.now, self.allocated, self.reserved, self.peak, self.free = 0.0, 100, 200, [0, 0], 10_000
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        self.Event = Event

    def take(self, allocated, reserved, kept):
        self.peak = [max(self.peak[0], self.allocated + allocated), max(self.peak[1], self.reserved + reserved)]
        self.free -= kept

    def reset_peak_memory_stats(self, device):
        self.peak = [self.allocated, self.reserved]

    def empty_cache(self):
        pass

    def synchronize(self, device):
        pass

    def memory_allocated(self, device):
        return self.allocated

    def memory_reserved(self, device):
        return self.reserved

    def max_memory_allocated(self, device):
        return self.peak[0]

    def max_memory_reserved(self, device):
        return self.peak[1]

    def mem_get_info(self, device):
        return self.free, 20_000


def fake_gpu() -> tuple[common.Machine, FakeCuda]:
    machine, cuda = common.Machine("cpu"), FakeCuda()
    machine.torch, machine.gpu = SimpleNamespace(cuda=cuda), True
    return machine, cuda


def test_events_tell_the_time():
    machine, cuda = fake_gpu()

    def work():
        cuda.now += 250.0  # ms

    seconds, host = machine.time(work)
    assert seconds == 0.25 and host >= 0


def test_memory_is_what_a_run_adds():
    machine, cuda = fake_gpu()
    cuda.peak = [9_000, 9_000]  # of what was before
    assert machine.memory(lambda: cuda.take(30, 50, 40)) == {"allocated": 30, "reserved": 50, "device": 40}


def test_tf32_is_switched_and_restored():
    machine = common.Machine("cpu")
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for on in (True, False):
        with machine.tf32(on):
            assert torch.backends.cudnn.allow_tf32 is on and torch.backends.cuda.matmul.allow_tf32 is on
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


# ---- the race and its rows ----


class Runner(contest.Contestant):
    def __init__(self, times, fails_at=None):
        self.times, self.fails_at, self.calls = times, fails_at, 0

    def time(self, machine):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("out of memory\nand much more")
        return self.times[self.calls % len(self.times)], 0.0


def test_race_takes_turns_and_leaves_out_who_fails():
    failures = {}
    runners = {"a": Runner([1.0]), "b": Runner([2.0], fails_at=2), "c": Runner([3.0], fails_at=contest.WARMUPS + 2)}
    times = contest.race(None, runners, 5, 100.0, failures)
    assert times == {"a": [(1.0, 0.0)] * 5}
    assert failures == dict.fromkeys("bc", "RuntimeError: out of memory")


def test_race_ends_by_the_clock_after_three_rounds():
    assert len(contest.race(None, {"a": Runner([1.0])}, 50, 0.0, {})["a"]) == 3


def test_row():
    case = Case("flux", "decode", 64, "tf32", batch=2)
    runner = Runner([])
    runner.notes = "said"
    ours = [(0.2, 0.1), (0.4, 0.1), (0.2, 0.1)]
    times = [(0.4, 0.3), (0.6, 0.3), (0.5, 0.2)]
    memory = {"weights": 7, "allocated": 3 * case.unit, "reserved": None}
    line = contest.row("x", case, runner, times, ours, memory, 1e12, 4e12, 1.5e-3, "")
    assert (line["dtype"], line["tf32"], line["batch"]) == ("float32", 1, 2)
    assert (line["ms"], line["fastest_ms"], line["slowest_ms"], line["host_ms"], line["runs"]) == (
        500,
        400,
        600,
        300,
        3,
    )
    assert line["time_over_vaemem"] == 2.0  # the median of 2, 1.5 and 2.5
    assert (line["tflops"], line["peak_tflops"], line["share_of_peak"]) == (2.0, 4.0, 0.5)
    assert case.unit == 128 * 64 * 64 * 4
    assert (line["allocated_t"], line["reserved_t"], line["device_t"]) == (3.0, None, None)
    assert (line["error"], line["notes"], line["failure"]) == ("1.500e-03", "said", "")
    contest.shown(line)


def test_row_of_who_failed_has_no_figures():
    line = contest.row("x", Case("flux", "decode", 64, "float32"), None, [], [(1.0, 1.0)], {}, 1e12, 4e12, None, "why")
    figures = {k: v for k, v in line.items() if k.endswith(("_ms", "_bytes", "_t", "tflops")) and k != "peak_tflops"}
    assert set(figures.values()) == {None} and line["ms"] is None and line["failure"] == "why"
    assert "why" in contest.shown(line)


def test_error_does_not_hide_nan():
    want = torch.tensor([3.0, 4.0])
    assert contest.relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert not contest.relative_error(torch.tensor([3.0, torch.nan]), want) < 1e9


# ---- the whole flow, on the CPU ----


def main(tmp_path, monkeypatch, *words: str) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    flow = ["--device", "cpu", "--small", "--sizes", "32", "--rounds", "3", "--models", "sdxl"]
    decode_gpu.main([*flow, *words])


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_main_table(tmp_path, monkeypatch):
    main(tmp_path, monkeypatch, "--smallest", "--label", "t")
    lines = table(tmp_path / "decode_gpu_cpu_t.csv")
    names = ["vaemem", "vaemem smallest", "torch eager", "torch channels_last"]
    assert [(line["op"], line["contestant"]) for line in lines] == [
        (op, n) for op in ("decode", "encode") for n in names
    ]
    for line in lines:
        assert line["failure"] == "" and float(line["ms"]) > 0 and float(line["tflops"]) >= 0
        assert float(line["error"]) < 1e-5  # float32, the project's bar
        assert line["torch"] == torch.__version__
    run = contest.open_vae(Case("sdxl", "decode", 32, "float32", small=True), "cpu").estimate("decode", 32, 32)
    assert int(lines[0]["weights_bytes"]) + int(lines[0]["allocated_bytes"]) == run.peak_bytes


def test_passes_and_parts(tmp_path, monkeypatch):
    main(tmp_path, monkeypatch, "--parts")
    lines = table(tmp_path / "passes_gpu_cpu.csv")
    run = contest.open_vae(Case("sdxl", "decode", 32, "float32", small=True), "cpu").estimate("decode", 32, 32)
    assert [line["pass"] for line in lines] == list(run.passes)
    assert [int(line["flops"]) for line in lines] == [round(f) for f in run.flops]
    for line in lines:
        assert float(line["ms"]) > 0 and float(line["floor_ms"]) > 0 and float(line["torch_ms"]) > 0
        assert line["bound_by"] in ("arithmetic", "bytes")


@pytest.mark.thorough
def test_ablation(tmp_path, monkeypatch):
    main(tmp_path, monkeypatch, "--ablation")
    lines = table(tmp_path / "ablation_gpu_cpu.csv")
    assert len({line["contestant"] for line in lines}) == len(lines) > 15
    assert all(line["failure"] == "" and float(line["ms"]) > 0 for line in lines)
    assert {line["contestant"] for line in lines if line["batch"] == "4"} == {
        line["contestant"] for line in lines if "batch 4" in line["contestant"]
    }


@pytest.mark.thorough
def test_ours_on_a_gpu(monkeypatch):
    import gpu  # or the emulator, which has no PyTorch: arrays are NumPy's

    gpu.go(monkeypatch)
    case = Case("flux", "decode", 16, "bfloat16", small=True)
    setup = contest.Setup(common.Machine("cpu"), case)
    open_vae = contest.open_vae
    monkeypatch.setattr(contest, "open_vae", lambda case, device, *how: open_vae(case, "cuda", *how))
    entries = {
        "vaemem": lambda: decode_gpu.ours_here(setup, case),
        "smallest": lambda: decode_gpu.ours_here(setup, case, smallest=True),
        "graphs": lambda: decode_gpu.ours_here(setup, case, graphs=True),
        "alone": lambda: contest.Elsewhere("alone", case, "cuda"),
        "torch": lambda: contest.Peer(setup.peer(True), case.op, setup.data(case)),
    }
    want = setup.reference(case)
    lines = contest.contest(setup, case, entries, SimpleNamespace(rounds=3, case_seconds=1), want)
    by_name = {line["contestant"]: line for line in lines}
    assert all(line["failure"] == "" and line["vaemem_cudnn"] for line in lines)
    for name in ("vaemem", "smallest", "graphs", "torch"):
        assert float(by_name[name]["error"]) < 10 * 2.0**-9  # as tests/gpu.py derives it
    assert isinstance(by_name["alone"]["unaccounted_bytes"], int)
    assert by_name["alone"]["allocated_bytes"] == by_name["vaemem"]["allocated_bytes"]


@pytest.mark.thorough
def test_single_passes_are_checked_and_timed(tmp_path, monkeypatch):
    import passes

    from vaemem import _core

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(passes, "PEAK_ROUNDS", 1_000_000)
    monkeypatch.setattr(sys, "argv", ["passes.py", "--small", "--rounds", "1"])
    passes.main()
    backend = next(name for name, usable in _core.backends() if usable)
    for operation, cases in (("conv", passes.CONVS), ("attention", passes.ATTENTIONS)):
        lines = table(tmp_path / f"{operation}_float32_{backend}_small.csv")
        assert len(lines) == len(passes.small(cases)) and all(float(line["microseconds"]) >= 0 for line in lines)
    wrong = passes.on(passes.CONVS[0], backend, 1)
    wrong.run()
    wrong.y[5] += 1e-3
    with pytest.raises(AssertionError):
        wrong.check()


def test_no_gpu_is_said(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        decode_gpu.main([])
    assert "GPU" in capsys.readouterr().err


WITHOUT_DIFFUSERS = "import torch_vae; torch_vae.diffusers_class = lambda: None"


def test_a_diffusers_that_cannot_be_imported_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert torch_vae.diffusers_class.__wrapped__() is None
    assert "benchmarks/torch_vae.py stands in" in capsys.readouterr().out


def torch_memory(tmp_path, case: str, before: str = "") -> tuple[subprocess.CompletedProcess, list[dict[str, str]]]:
    """In a process of its own, since it forks: what has used torch's threads must not."""
    words = ["--cases", case, "--device", "cpu", "--protocols", "cold"]
    code = f"{before}\nimport torch_memory\ntorch_memory.main({words})"
    env = os.environ | {"PYTHONPATH": str(BENCHMARKS), "VAEMEM_RESULTS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    path = tmp_path / "torch_memory_cpu.csv"
    return done, table(path) if path.exists() else []


@pytest.mark.thorough
def test_torch_memory_without_diffusers(tmp_path):
    from test_measure import cpu_meter_or_skip

    cpu_meter_or_skip()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("flux")))
    done, (row,) = torch_memory(tmp_path, f"{path}:decode:32x16:float32", WITHOUT_DIFFUSERS)
    assert done.returncode == 0
    assert row["protocol"] == "cold" and "module benchmarks/torch_vae.py" in row["versions"]
    assert int(row["measured_reserved_bytes"]) > 0 and not row["failure"]


@pytest.mark.thorough
def test_torch_memory_says_why_a_case_failed(tmp_path):
    done, rows = torch_memory(tmp_path, "sdxl:decode:12x8:float32", WITHOUT_DIFFUSERS)
    assert "ArgumentError: sizes: expected multiples of 8" in done.stdout and done.returncode == 1 and not rows


def test_the_peer_is_diffusers_where_it_is_installed():
    diffusers = pytest.importorskip("diffusers")
    vae = small_vae("sd")
    peer, z = torch_vae.peer(vae), torch.from_numpy(latents(vae, 3, 2))
    assert type(peer).__name__ == "AutoencoderKL" and torch_vae.origin() == f"diffusers {diffusers.__version__}"
    with torch.inference_mode():
        assert torch.equal(peer.image(z), torch_vae.with_weights(vae).image(z))
        x = torch.rand(1, 3, 16, 8)
        assert torch.equal(peer.moments(x), torch_vae.with_weights(vae).moments(x))


@pytest.mark.thorough
def test_tiles_of_our_convolution(tmp_path, monkeypatch):
    """On the emulator: every tile that may compute a pass does, and one of them is what vm_conv_choose takes."""
    seen = []
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(conv_tiles, "LAUNCHES", 1)
    monkeypatch.setattr(conv_tiles.Pass, "__init__", seeing(conv_tiles.Pass.__init__, seen))
    try:
        conv_tiles.main([*"--device cpu --small --sizes 8 --dtypes bfloat16 --rounds 1 --case-seconds 0".split()])
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    with open(tmp_path / "conv_tiles_cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    tiles = {name: {row["tile"] for row in rows if row["pass"] == name} for name in {row["pass"] for row in rows}}
    assert len(tiles) == len(seen) == len(conv_tiles.passes(8, 16)) and set(map(len, tiles.values())) == {2, 6, 7}
    assert {row["tile"] for row in rows if row["tile"].endswith(" fp8")} == {"16x96 wgmma fp8"}
    assert not any(row["failure"] for row in rows) and all(float(row["ms"]) > 0 for row in rows)
    assert {sum(row["chosen"] == "1" for row in rows if row["pass"] == name) for name in tiles} == {1}
    for one in seen:
        assert one.kept["y"].isfinite().all() and one.kept["y"].float().std() > 0.1 and not one.kept["flags"].any()


def test_kernels_of_attention(tmp_path, monkeypatch):
    """On the emulator: the kernel of pairs next to the one of single blocks, both right."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(attention_kernels, "LAUNCHES", 1)
    words = "--device cpu --small --sizes 72 --channels 80 --rounds 1 --case-seconds 0"
    try:
        attention_kernels.main(words.split())
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    with open(tmp_path / "attention_kernels_cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for short in ("bf16", "f16"):
        names = [(row["kernel"], row["chosen"]) for row in rows if f"_{short}_" in row["kernel"]]
        assert names == [(f"vm_attention_{short}_64x128", "0"), (f"vm_attention_{short}_pairs", "1")]
    for row in rows:
        assert not row["failure"] and float(row["ms"]) > 0 and row["pixels"] == "81"
        assert 0 < float(row["error"]) < {"bfloat16": 4e-3, "float16": 5e-4}[row["dtype"]]


def seeing(init, seen):
    def made(self, *args):
        seen.append(self)
        init(self, *args)

    return made
