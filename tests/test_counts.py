"""Sizes and counts: every public function takes NumPy's integers as Python's, and refuses floats and truth values."""

import functools
import inspect
import re

import numpy as np
import pytest
from engine import images, latents, small_vae
from errors import refused

import vaemem
from vaemem import (
    VAE,
    CachingAllocator,
    SimulatedProcess,
    Tiling,
    bound,
    estimate_sweep,
    formula,
    largest_batch,
    measure_sweep,
    plan_pipeline,
    predict,
    predict_largest,
    predict_pipeline,
    predict_sweep,
    replay,
    tradeoff,
)
from vaemem._render import Shown

pytestmark = pytest.mark.python

ONE, SIDES, LIMIT = {"batch": 1}, {"height": 64, "width": 64}, {"memory_limit": 64 << 20}
FEW = {"frames": 1}
CARD = {"gpu": "RTX 3060", "memory": 12 << 30, "used": 1 << 20}
PIPELINE = SIDES | CARD | ONE | {"prompt_tokens": 77, "steps": 2}


@functools.cache
def vae():
    return small_vae()


def simulated(op, **given):
    process = SimulatedProcess("RTX 3060")
    x = process.tensor((1, 3, 64, 64) if op == "encode" else (1, 4, 8, 8), "float16")
    return getattr(process, op)(process.load("sdxl", "float16"), x, **given).shape


def release(storages):
    process = SimulatedProcess()
    process.hold("x", 512)
    process.release(storages)


def snapshot():
    allocator = CachingAllocator()
    allocator.malloc(512)
    return allocator.snapshot()


def measure(**given):
    diffusers = pytest.importorskip("diffusers")
    from vaemem.pytorch import measure

    settings = {"device": "cpu", "dtypes": "float32"}
    table = measure(diffusers.AutoencoderKL(sample_size=32), "decode_tiled", **settings, **given)
    return [(row["height"], row["width"], row["batch"], row["source"]) for row in table]


def measure_pipeline(**given):
    pytest.importorskip("torch")
    from vaemem.pytorch import measure_pipeline

    with refused("pipe", kind=TypeError):  # which is looked at last
        measure_pipeline(None, **given)


def offload(**given):
    pytest.importorskip("diffusers")
    from vaemem.pytorch import OffloadStrategy

    return OffloadStrategy(vaemem.predict_pipeline("sd15", 64, 64, gpu="RTX 3060"), **given)


def predict_peak(**given):
    torch = pytest.importorskip("torch")
    from vaemem.pytorch import predict_peak

    return str(predict_peak(torch.nn.Linear(8, 8).eval(), torch.empty(1, 8), **given))


def read_process():
    process = SimulatedProcess()
    process.hold("x", 512)
    process.read()
    return process


def counted(how, **given):
    process = SimulatedProcess()
    getattr(process, how)(**given)
    process.count(flops=1)
    process.read()
    return process.counted(0)


# By the names of public functions: what calls each, and its arguments that are sizes or counts.
CALLS = {
    "CachingAllocator": (
        lambda **given: CachingAllocator(**given)._settings(),
        {"total_memory": 1 << 30, "max_split_size_mb": 32, "roundup_power2_divisions": [4] * 16}
        | {"max_non_split_rounding_mb": 32, "reservation": 1 << 20},
    ),
    "CachingAllocator.free": (lambda **given: CachingAllocator().free(**given), {"address": 0}),
    "CachingAllocator.malloc": (lambda **given: CachingAllocator().malloc(**given), {"bytes": 512, "stream": 1}),
    "CachingAllocator.rounded_size": (lambda bytes: CachingAllocator().rounded_size(bytes), {"bytes": 700}),
    "Decoder": (lambda **given: str(vaemem.Decoder("vae", **given)), LIMIT | {"threads": 2}),
    "Encoder": (lambda **given: str(vaemem.Encoder("vae", **given)), LIMIT | {"threads": 2, "sample": 3}),
    "Encoded.sample": (lambda **given: vae().encode(images(16, 16)).sample(**given), {"generator": 1}),
    "SimulatedProcess": (lambda **given: SimulatedProcess("RTX 3060", **given).reserved, {"used": 1 << 20}),
    "SimulatedProcess.count": (
        lambda **given: counted("count", **given),
        {"flops": 4, "attended": 3, "moved": 0, "sent": 2, "host_flops": 1, "outside": 512},
    ),
    "SimulatedProcess.count_times": (lambda **given: counted("count_times", **given), {"times": 20}),
    "SimulatedProcess.counted": (lambda **given: read_process().counted(**given), {"number": 0}),
    "SimulatedProcess.decode": (lambda **given: simulated("decode", **given), {"tile": 512}),
    "SimulatedProcess.encode": (lambda **given: simulated("encode", **given), {"tile": 512}),
    "SimulatedProcess.hold": (lambda **given: SimulatedProcess().hold("x", **given), {"size": 512}),
    "SimulatedProcess.hold_all": (lambda **given: SimulatedProcess().hold_all("x", **given), {"sizes": [512, 513]}),
    "SimulatedProcess.least": (lambda **given: read_process().least(**given), {"low": 0, "high": 4 << 20}),
    "SimulatedProcess.peak": (lambda **given: str(read_process().peak(**given)), {"reading": 0}),
    "SimulatedProcess.peak_tensors": (lambda **given: read_process().peak_tensors(**given), {"reading": 0}),
    "SimulatedProcess.read": (lambda **given: read_process().read(**given), {"outside": 512}),
    "SimulatedProcess.release": (release, {"storages": [SimulatedProcess().hold("x", 512)]}),
    "SimulatedProcess.takes": (lambda **given: read_process().takes([], **given), {"first": 1, "likely": 0}),
    "SimulatedProcess.tensor": (
        lambda **given: repr(SimulatedProcess().tensor(dtype="float16", **given)),
        {"shape": (1, 4, 8, 8)},
    ),
    "Prediction.to_text": (lambda **given: predict("sdxl", "decode", 64, 64).to_text(**given), {"width": 99}),
    "Tiling": (lambda **given: Tiling(**given), {"sample_size": 64}),
    "VAE.decode": (lambda **given: vae().decode(latents(vae(), 4, 4), **given), LIMIT | {"size": (13, 14)}),
    "VAE.encode": (lambda **given: vae().encode(images(16, 16), **given).mode(), LIMIT),
    "VAE.estimate": (lambda **given: vae().estimate("decode", **given), SIDES | LIMIT | ONE | FEW),
    "VAE.largest": (lambda **given: vae().largest("decode", **given), ONE | FEW | {"memory_limit": 8 << 20}),
    "VAE.largest_batch": (
        lambda **given: vae().largest_batch("encode", **given),
        SIDES | FEW | {"memory_limit": 8 << 20},
    ),
    "VAE.largest_frames": (
        lambda **given: small_vae("wan").largest_frames("decode", **given),
        SIDES | ONE | {"memory_limit": 8 << 20},
    ),
    "VAE.random": (lambda **given: VAE.random(config=vae().arch, **given).state_dict()["quant_conv.bias"], {"seed": 1}),
    "VAE.smallest": (lambda **given: vae().smallest("decode", **given), SIDES | ONE | FEW),
    "VAE.tradeoff": (lambda **given: vae().tradeoff("decode", **given), SIDES | ONE | FEW),
    "bound": (
        lambda **given: str(bound("comfyui", "flux", "float16", **given)),
        {"memory": 24 << 30, "sides": [256, 512]},
    ),
    "estimate_sweep": (
        lambda **given: estimate_sweep(vae(), "decode", **given).to_csv(),
        {"sizes": [64, (64, 32)], "batch": [1, 2]} | LIMIT | FEW,
    ),
    "formula": (lambda **given: str(formula("sdxl", "decode", **given)), SIDES),
    "largest_batch": (lambda **given: largest_batch("sdxl", "encode", **given), SIDES | CARD),
    "measure": (measure, ONE | {"sizes": [64, (64, 32)], "warmups": 0, "runs": 1, "tile": 32}),
    "measure_pipeline": (measure_pipeline, SIDES | ONE | {"steps": 2}),
    "measure_sweep": (
        lambda **given: len(measure_sweep(vae(), "decode", **given)),
        {"sizes": 64, "batch": [1, 2], "repeats": 1} | LIMIT,
    ),
    "plan_pipeline": (
        lambda **given: plan_pipeline("sd15", **given).to_json(),
        PIPELINE | {"host_memory": 8 << 30, "cores": 4},
    ),
    "plan_pipeline of mlx": (
        lambda **given: plan_pipeline("zimage", 512, 512, runtime="mlx", **given).to_json(),
        {"memory": 16 << 30, "cache_limit": 1 << 30},
    ),
    "plot.pipeline": (
        lambda available: vaemem.plot.pipeline(predict_pipeline("sd15", 64, 64), available),
        {"available": 1 << 34},
    ),
    "predict": (
        lambda **given: predict("sdxl", "decode_tiled", **given).to_json(),
        SIDES | CARD | ONE | FEW | {"tile": 64},
    ),
    "predict_largest": (lambda **given: predict_largest("sdxl", "decode", **given), CARD | ONE),
    "predict_peak": (predict_peak, {"used": 1 << 20}),
    "predict_pipeline": (lambda **given: predict_pipeline("sd15", **given).to_json(), PIPELINE),
    "predict_pipeline of a video": (lambda **given: predict_pipeline("wan-1.3b", 64, 64, **given).title, {"frames": 5}),
    "predict_pipeline of an image": (
        lambda **given: predict_pipeline("sd15", 96, 64, **given).title,
        {"image": (72, 64)},
    ),
    "plan_pipeline of an image": (
        lambda **given: plan_pipeline("sd15", 96, 64, runtime="diffusers", **given).title,
        {"image": (72, 64)},
    ),
    "predict_pipeline of vaemem": (
        lambda **given: predict_pipeline("sd15", 512, 512, vae="vaemem", **given).to_json(),
        {"vae_memory_limit": 2 << 30},
    ),
    "predict_sweep": (
        lambda **given: predict_sweep("sd15", "decode_tiled", gpu="RTX 3060", **given).to_csv(),
        {"sizes": 640, "batch": [1, 2], "tile": [512, 256]},
    ),
    "plan_pipeline of a video": (
        lambda **given: plan_pipeline("wan-1.3b", 64, 64, runtime="diffusers", **given).title,
        {"frames": 5},
    ),
    "predict_sweep of videos": (
        lambda **given: predict_sweep("wan-1.3b", "pipeline", 64, gpu="H100", **given).to_csv(),
        {"frames": [5, 9]},
    ),
    "predict_sweep of pipelines": (
        lambda **given: predict_sweep("sd15", "pipeline", 64, gpu="RTX 3060", **given).to_csv(),
        {"prompt_tokens": [77, 90]},
    ),
    "OffloadStrategy": (lambda **given: offload(**given)._margin, {"margin": 1 << 30}),
    "replay": (lambda **given: str(replay(snapshot(), **given)), {"device": 0}),
    "tradeoff": (lambda **given: tradeoff(vae(), "decode", **given).to_csv(), SIDES | ONE | FEW),
}
# Values that vaemem makes: nobody calls these.
MADE = {"DeviceArray", "Encoded", "MeasuredPhase", "ModulePrediction", "Replay", "Run"}


def is_of(one, home):
    return getattr(one, "__module__", "").startswith(home.__name__)


def functions():
    """Public functions, classes and methods by name."""
    pytest.importorskip("diffusers")
    import vaemem.pytorch

    found = {name: getattr(vaemem, name) for name in vaemem.__all__}
    for within, home in (("plot.", vaemem.plot), ("", vaemem.pytorch)):
        found |= {within + name: one for name, one in vars(home).items() if is_of(one, home)}
    for name, one in list(found.items()):
        if inspect.isclass(one) and name not in MADE - {"Encoded"}:
            shared = set(dir(vaemem.Prediction)) & set(vars(Shown)) if name != "Prediction" else set()
            found |= {f"{name}.{of}": method for of, method in inspect.getmembers(one, callable) if of not in shared}
    return {name: one for name, one in found.items() if callable(one) and not re.search(r"(^|\.)_", name)}


def test_every_size_and_count_is_tried():
    wanted = set()
    for name, function in functions().items():
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of an exception
            continue
        counts = {
            argument for argument, it in signature.parameters.items()
            if re.search(r"\bint\b|Limit", str(it.annotation)) and name not in MADE
        }  # fmt: skip
        tried = {key for call, (_, given) in CALLS.items() if call.partition(" of ")[0] == name for key in given}
        wanted |= {f"{name}({one})" for one in counts - tried}
    assert not wanted


def of_type(value, kind):
    """Converts a value to another type of number; of a list or a mapping, each of its items."""
    if isinstance(value, list | tuple):
        return type(value)(of_type(one, kind) for one in value)
    return value if isinstance(value, str) else kind(value)


SLOW = {"formula", "measure"}  # without a faster call


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.thorough) if one in SLOW else one for one in CALLS]
)
def test_integers_of_numpy(name):
    if name == "plot.pipeline":
        pytest.importorskip("matplotlib")
    call, given = CALLS[name]
    want, got = call(**given), call(**{key: of_type(value, np.int64) for key, value in given.items()})
    assert "np.int" not in repr(got)
    if name != "plot.pipeline":
        assert np.array_equal(got, want) and type(got) is type(want)


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, (_, given) in CALLS.items() for one in given if one != "gpu"]
)
@pytest.mark.parametrize("kind", [float, np.bool_])
def test_floats_and_truth_values_are_refused(name, argument, kind):
    call, given = CALLS[name]
    with refused(argument):
        call(**given | {argument: of_type(given[argument], kind)})
