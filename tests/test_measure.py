"""Measuring real PyTorch: the protocol on a stand-in for the GPU's counters, rows on the CPU, a GPU if any."""

from __future__ import annotations

import json
import sys
import types
import weakref

import pytest
from errors import complains, is_about, refused

torch = pytest.importorskip("torch")

from engine import config

from vaemem import replay
from vaemem.__main__ import main
from vaemem.prediction.benchmark import benchmark
from vaemem.prediction.predict_vae import predict
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.runtimes import architecture
from vaemem.prediction.vae_job import Job
from vaemem.pytorch import measure, measuring
from vaemem.pytorch.measuring import CpuMeter, CudaMeter


def cpu_meter_or_skip() -> None:
    try:
        CpuMeter()
    except OSError as error:
        pytest.skip(str(error))


# ---- the protocol, on a stand-in ----


class FakeCuda:
    """torch.cuda's counters over tensors that are made known to it; says what was called, in order."""

    def __init__(self):
        self.log: list[str] = []
        self.baselines: list[int] = []
        self.live = self.peak = 0

    def hold(self, tensor, name=""):
        self.live += tensor.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._drop, tensor.nbytes)
        return tensor

    def _drop(self, size):
        self.live -= size

    def synchronize(self, device):
        self.log.append("synchronize")

    def empty_cache(self):
        self.log.append("empty_cache")

    def reset_peak_memory_stats(self, device):
        self.log.append("reset_peak")
        self.peak = self.live

    def memory_allocated(self, device):
        self.log.append("allocated")
        self.baselines.append(self.live)
        return self.live

    def memory_reserved(self, device):
        self.log.append("reserved")
        return 2 * self.live

    def max_memory_allocated(self, device):
        self.log.append("max_allocated")
        return self.peak

    def max_memory_reserved(self, device):
        self.log.append("max_reserved")
        return 2 * self.peak


class FakeVae:
    """Results without a computation: latents are SCALED bytes, images IMAGE; encode's posterior DIST."""

    SCALED, IMAGE, DIST, SAMPLE = 100, 1000, 300, 70

    def __init__(self, cuda):
        self.cuda = cuda

    def _new(self, size):
        return self.cuda.hold(torch.empty(size, dtype=torch.uint8))

    def decode(self, z, return_dict=None):
        self.cuda.log.append("decode")
        image = self._new(self.IMAGE)
        return image if return_dict is None else (image,)

    def encode(self, x):
        self.cuda.log.append("encode")
        dist = types.SimpleNamespace(parameters=self._new(self.DIST), sample=lambda: Latents(self, self.SAMPLE))
        return types.SimpleNamespace(latent_dist=dist)


class Latents:
    """A tensor that counts: dividing and multiplying make another one."""

    def __init__(self, vae, size):
        self.vae, self.size, self.tensor = vae, size, vae._new(size)

    def __truediv__(self, factor):
        return Latents(self.vae, self.size)

    __rmul__ = __truediv__


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(measuring.gc, "collect", lambda: fake.log.append("collect"))
    return fake


CLEAR = ["collect", "empty_cache", "reset_peak"]
BEFORE = ["synchronize", "allocated", "reserved"]
AFTER = ["synchronize", "synchronize", "max_allocated", "max_reserved"]


@pytest.mark.parametrize("op", ["encode", "decode"])
def test_the_calls_come_in_the_seed_tables_order(cuda, op):
    vae = FakeVae(cuda)
    measuring._measurements(vae, op, Latents(vae, vae.SCALED), CudaMeter(cuda, "cuda:0"), 2, 5, 0.5)
    assert cuda.log == [op, *CLEAR] * 2 + [*CLEAR, *BEFORE, op, *AFTER] * 5


def test_decode_holds_what_the_seed_table_held(cuda):
    """A warm-up's image goes when the loop binds its next number; its scaled latents only once run 1 binds its own."""
    vae = FakeVae(cuda)
    latents = Latents(vae, vae.SCALED)
    first, *rest = measuring._measurements(vae, "decode", latents, CudaMeter(cuda, None), 2, 5, 0.5)
    # Run 1: the old scaled latents are in the baseline and alive while the new ones are made, gone when the image is.
    assert first[:2] == (vae.IMAGE, 2 * vae.IMAGE)
    assert all(run[:2] == (vae.SCALED + vae.IMAGE, 2 * (vae.SCALED + vae.IMAGE)) for run in rest) and len(rest) == 4
    assert cuda.baselines == [2 * vae.SCALED, *[vae.SCALED] * 4]  # the input, and what the warm-up left; no image
    assert cuda.live == vae.SCALED


def test_encode_holds_what_the_seed_table_held(cuda):
    vae = FakeVae(cuda)
    image = Latents(vae, vae.SCALED)
    first, *rest = measuring._measurements(vae, "encode", image, CudaMeter(cuda, None), 2, 3, 0.5)
    assert [run.allocated for run in rest] == [vae.DIST + 2 * vae.SAMPLE] * 2  # sample, and scaled
    # The last warm-up's posterior is in the baseline, and goes when encode has returned the new one.
    assert first.allocated == max(vae.DIST, 2 * vae.SAMPLE)
    assert cuda.baselines == [vae.SCALED + vae.DIST, vae.SCALED, vae.SCALED]
    assert cuda.live == vae.SCALED


def test_bfl_scales_within(cuda):
    vae = FakeVae(cuda)
    runs = measuring._measurements(vae, "decode", Latents(vae, vae.SCALED), CudaMeter(cuda, None), 2, 2, None)
    assert [run.allocated for run in runs] == [vae.IMAGE] * 2


def test_the_simulated_benchmark_is_the_measured_one(cuda):
    """Which run differs from which, by how much: the same in the protocol that is predicted."""
    process = SimulatedProcess("RTX 4090")
    vae = process.load("sdxl", "float16")
    runs = benchmark(process, vae, Job(vae.arch, "decode", 64, 64, "float16", "float16"))
    scaled = -(-4 * 8 * 8 * 2 // 512) * 512
    assert [run.allocated - runs[0].allocated for run in runs] == [0, *[scaled] * 4]


# ---- on the CPU ----


def module():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.AutoencoderKL(**{key: value for key, value in config("sd").items() if key[0] != "_"})


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("sd")))
    return file


def test_rows_on_the_cpu(path):
    pytest.importorskip("diffusers")
    cpu_meter_or_skip()
    table = measure(path, "decode", [64, (32, 48)], ["float32", "bfloat16"], device="cpu", warmups=1, runs=2, batch=2)
    assert [(row["height"], row["width"], row["dtype"]) for row in table] == [
        (64, 64, "float32"), (32, 48, "float32"), (64, 64, "bfloat16"), (32, 48, "bfloat16"),
    ]  # fmt: skip
    weights = sum(p.numel() for p in module().parameters())
    for row in table:
        assert (row["source"], row["runtime"], row["device"], row["batch"]) == ("measured", "diffusers", "cpu", 2)
        assert row["seconds"] > 0 and row["allocated_bytes"] is None and row["reserved_bytes"] >= 0
        assert f"torch {torch.__version__}" in row["versions"] and "diffusers" in row["versions"]
    assert [row["weights_bytes"] for row in table] == [4 * weights] * 2 + [2 * weights] * 2


@pytest.mark.resident
def test_the_resident_growth_is_that_of_the_tensors():
    """The growth of a module whose tensors are known."""
    cpu_meter_or_skip()

    class Known(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = torch.nn.Module(), torch.nn.Module()
            self.encoder.conv_in, self.decoder.conv_in = torch.nn.Conv2d(3, 1, 1), torch.nn.Conv2d(4, 1, 1)
            self.encoder.num_resolutions = 4

        def decode(self, z):
            return torch.ones(32 << 20 >> 2) + torch.ones(32 << 20 >> 2)

    # Three tensors of 32 MiB are alive at once; 8 MiB for threads and Python's own (4.2 were seen). A kernel that takes
    # idle pages away during a run makes its growth smaller, so one of three runs is enough.
    for _ in range(3):
        row = measure(Known(), "decode", 64, "float32", runtime="bfl", device="cpu", warmups=1, runs=3)[0]
        if abs(row["reserved_bytes"] - (96 << 20)) < 8 << 20:
            break
    else:
        pytest.fail(f"the growth was {row['reserved_bytes']}")
    assert row["model"] == "custom" and row["runtime"] == "bfl"


def test_a_module_keeps_its_tiling():
    vae, seen = module(), []
    cpu_meter_or_skip()
    real = vae.tiled_decode

    def tiled_decode(*args, **kwargs):
        seen.append((vae.tile_sample_min_size, vae.tile_latent_min_size))
        return real(*args, **kwargs)

    vae.tiled_decode = tiled_decode
    before = vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size
    (row,) = measure(vae, "decode_tiled", 64, "float32", device="cpu", tile=32, warmups=0, runs=1)
    assert seen == [(32, 8)] and (row["tile"], row["tile_overlap"]) == (32, 0.25)
    (whole,) = measure(vae, "decode", 64, "float32", device="cpu", warmups=0, runs=1)
    assert (whole["tile"], whole["tile_overlap"]) == (None, None)
    assert (vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size) == before
    assert not next(vae.parameters()).is_inference()  # it can be trained on


@pytest.mark.parametrize(("name", "channels"), [("taesd", 4), ("taef1", 16), ("taef2", 32)])
def test_tiny_autoencoders_by_name(name, channels):
    """Their encoders give latents, which nothing is drawn from."""
    pytest.importorskip("diffusers")
    cpu_meter_or_skip()
    how = {"device": "cpu", "warmups": 0, "runs": 1}
    try:
        encoded, decoded = (measure(name, op, 32, "float32", **how)[0] for op in ("encode", "decode"))
    except ImportError as error:
        assert name == "taef2" and is_about(error, names=["AutoencoderTiny", "use_midblock_gn"])
        return
    arch = architecture(name)
    assert arch["latent_channels"] == channels and encoded["model"] == decoded["model"] == arch["name"]
    assert encoded["weights_bytes"] == predict(name, "encode", 32, 32, "float32").weights_bytes


def test_tiles_of_a_tiny_autoencoder_share_an_eighth():
    cpu_meter_or_skip()
    pytest.importorskip("diffusers")
    (tiled,) = measure("taesd", "encode_tiled", 96, "float32", tile=64, device="cpu", warmups=0, runs=1)
    assert (tiled["tile"], tiled["tile_overlap"]) == (64, 0.125)
    assert predict("taesd", "encode_tiled", 96, 96, "float32", tile=64).tile_overlap == 0.125


# ---- bad input ----


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"model": "sd4"}, ValueError, ("model", "'sd4'")),
        ({"model": 3}, TypeError, ("model", "int")),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, ("model", "Linear")),
        ({"op": "train"}, ValueError, ("op", "'train'")),
        ({"sizes": [0]}, ValueError, ("sizes", 0)),
        ({"sizes": [36]}, ValueError, ("sizes", "36x36")),
        ({"dtypes": "float64"}, ValueError, ("dtypes", "'float64'")),
        ({"runtime": "onnx"}, ValueError, ("runtime", "'onnx'")),
        ({"runtime": "bfl"}, ValueError, ("model", "'sdxl'")),
        ({"runtime": "bfl", "op": "decode_tiled"}, ValueError, ("op", "'decode_tiled'")),
        ({"device": "quantum"}, ValueError, ("device",)),
        ({"device": "meta"}, ValueError, ("device",)),
        ({"warmups": -1}, ValueError, ("warmups", -1)),
        ({"runs": 0}, ValueError, ("runs", 0)),
        ({"batch": True}, ValueError, ("batch", "True")),
        ({"tile": 64}, ValueError, ("tile", 64)),
        ({"op": "decode_tiled", "tile": 100}, ValueError, ("tile", 100)),
        ({"snapshot": "x.pickle"}, ValueError, ("snapshot", "cpu")),
        ({"profile": "x.csv"}, ValueError, ("profile", "cpu")),
    ],
)
def test_refusals_name_the_argument(change, error, message):
    pytest.importorskip("diffusers")
    cpu_meter_or_skip()
    arguments = {"model": "sdxl", "op": "decode", "sizes": [64], "device": "cpu"} | change
    with refused(*message, kind=error):
        measure(arguments.pop("model"), arguments.pop("op"), arguments.pop("sizes"), **arguments)


def test_without_diffusers_a_name_is_refused(monkeypatch):
    cpu_meter_or_skip()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with refused(kind=ImportError, packages=("diffusers",), install="pip install 'vaemem[diffusers]'"):
        measure("sdxl", "decode", 64, device="cpu")


def test_without_a_gpu_cuda_is_refused():
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with refused("device"):
        measure("sdxl", "decode", 64, device="cuda")


@pytest.mark.parametrize("number, version", [(90701, "9.7.1"), (92000, "9.20.0"), (8902, "8.9.2"), (None, "none")])
def test_cudnn_version(monkeypatch, number, version):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert measuring.cudnn_version() == version


# ---- convolutions ----


def test_the_convolutions_of_a_run():
    vae = module().eval()
    with torch.inference_mode():
        found = measuring._convolutions(vae, "encode", torch.zeros(1, 3, 16, 24))
    assert len(set(found)) == len(found)
    plain = [conv[:10] for conv in found]
    assert plain[0] == ("float32", 1, 3, 16, 24, 32, 3, 1, 1, "nchw")
    assert ("float32", 1, 32, 17, 25, 32, 3, 2, 0, "nchw") in plain  # padded by one before a stride of 2
    assert not any(part._forward_pre_hooks for part in vae.modules())


def test_a_workspace_is_what_was_requested_besides_the_output(monkeypatch):
    out = 4 * 2 * 32 * 16 * 24
    log = []
    stats = [{"requested_bytes.all.current": 1000}, {"requested_bytes.all.peak": 1000 + out + 4096}] * 2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats.pop(0))
    conv = measuring.Conv("float32", 2, 3, 16, 24, 32, 3)
    with torch.inference_mode():
        assert measuring._measure_workspace(conv, torch.device("cpu")) == 4096
    assert log == ["synchronize", "reset", "synchronize"] * 2 and not stats


@pytest.fixture
def log(monkeypatch):
    """What is asked of PyTorch's recording of its allocator."""
    log = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: log.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", log.append)
    return log


def test_a_snapshot_is_of_all_that_happened(log):
    with measuring._record_history("s.pickle"):
        log.append("runs")
    assert log == ["all", "runs", "s.pickle", None]


def test_recording_ends_where_a_run_fails(log):
    with pytest.raises(MemoryError), measuring._record_history("s.pickle"):
        raise MemoryError
    assert log == ["all", None]


# ---- on a GPU ----


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("diffusers")
    return torch.cuda.get_device_name()


def test_on_the_gpu(gpu, path, tmp_path):
    snapshot, profile = tmp_path / "s.pickle", tmp_path / "p.csv"
    row = measure(path, "decode", [(64, 96)], snapshot=snapshot, profile=profile)[0]
    assert row["device"] == gpu and 0 < row["allocated_bytes"] <= row["reserved_bytes"]
    replayed = replay(snapshot)
    assert replayed.events > 100 and replayed.simulated_reserved == replayed.recorded_reserved
    header, *lines = profile.read_text().splitlines()
    assert header.startswith("gpu,torch,cudnn,dtype,n,c,h,w,k,r") and len(lines) > 5


def test_the_gpu_agrees_with_the_prediction(gpu):
    row = measure("sdxl", "decode", [(512, 512)], runs=1)[0]
    try:
        said = predict("sdxl", "decode", 512, 512, runtime="diffusers", gpu=gpu, torch_version=torch.__version__)
    except ValueError as error:
        pytest.skip(f"no prediction: {error}")
    if said.workspace_source.startswith("rule"):
        pytest.skip("the workspaces of this GPU and cuDNN are not recorded")
    # Half of one per cent: what a process did before (other tests) moves small blocks.
    assert abs(said.allocated / row["allocated_bytes"] - 1) < 0.005


# ---- next to the prediction, and on the command line ----


def predicted_row(allocated: float, reserved: float, **more) -> dict:
    """A row of a run on an RTX 4090 that takes these shares of its prediction."""
    asked = {"torch_version": "2.7.1+cu128", "cudnn_version": "9.7.1", "gpu": "NVIDIA GeForce RTX 4090"}
    made = predict("sdxl", "decode", 512, 512, "float16", 1, **asked)
    return {
        "model": "sdxl", "op": "decode", "height": 512, "width": 512, "dtype": "float16", "batch": 1, "tile": None,
        "device": asked["gpu"], "versions": "torch 2.7.1+cu128, cudnn 9.7.1, diffusers 0.42.1",
        "allocated_bytes": int(made.allocated * allocated), "reserved_bytes": int(made.reserved * reserved),
    } | more  # fmt: skip


@pytest.mark.parametrize(
    "shares, said, unsaid",
    [
        ((1, 1), "allocated +0.0%, reserved", "differ"),
        ((1.019, 1.019), "allocated +1.9%", "differ"),
        ((1, 1.5), "tensors agree; cuDNN's workspaces or the allocator's segments differ", "tensors differ"),
        ((0.9, 1), "tensors differ (the prediction's largest at its peak: decoder.", "agree"),
    ],
)
def test_a_run_that_contradicts_its_prediction_says_where(shares, said, unsaid):
    got = measuring.against_prediction(predicted_row(*shares))
    assert said in got and unsaid not in got


def test_a_run_without_a_prediction():
    assert measuring.against_prediction({"device": "cpu"}) == ""
    assert measuring.against_prediction(predicted_row(1, 1, device="Nobody's card")).startswith("not predicted: gpu: ")


def test_a_vaes_run_on_the_command_line(path, tmp_path, monkeypatch, capsys):
    """On a CPU the command prints a table and writes a file. It refuses options for pipelines or GPUs. If memory runs
    out, it prints one line."""
    cpu_meter_or_skip()
    pytest.importorskip("diffusers")
    run = ["measure", str(path), "decode", "64"]
    assert main([*run, "-o", str(tmp_path / "run.csv")]) == 0
    assert "decode" in capsys.readouterr().out and "64" in (tmp_path / "run.csv").read_text()
    for more, argument in ((["--steps", "2"], "steps"), (["--contribute"], "contribute")):
        assert main([*run, *more]) == 2
        assert f"--{argument}: " in capsys.readouterr().err

    def runs_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr("vaemem.pytorch.measure", runs_out)
    assert main(run) == 1
    assert complains(capsys.readouterr().err, "measure", names=["memory."])
