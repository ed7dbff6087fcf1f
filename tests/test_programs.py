"""Recorded modules: replayed without PyTorch, the same steps as a fresh recording of the module itself."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from vaemem.pipelines import programs
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.process import SimulatedProcess

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

GPUS = ("RTX 4090", "T4", "H200")


@pytest.fixture(scope="module")
def modules():
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    if not BENCHMARKS.exists():
        pytest.skip("the sources are not here")
    import modules

    return modules.MODULES


def peaks(trace, gpu):
    process = SimulatedProcess(gpu)
    process.call(trace)
    return process.peak_allocated, process.peak_reserved


@pytest.mark.parametrize("name", programs.recorded())
def test_the_replay_takes_the_steps_of_the_module(modules, name):
    """At sizes that the fit has not seen, on GPUs whose attention differs: each step and its bytes."""
    import torch
    from record_modules import record_at

    from vaemem.pytorch.recorder import Recorder, Recording

    module = modules[name]
    for dtype, gpu in itertools.product(module.dtypes, map(find_gpu, GPUS)):
        if dtype is torch.bfloat16 and gpu.sm < 80:
            continue  # PyTorch's kernels for bfloat16 want compute capability 8.0
        sizes = module.checks[0]
        fresh = record_at(module, sizes, dtype, Recorder(Recording(), gpu)).trace
        replayed = programs.load(name).trace(str(dtype).removeprefix("torch."), gpu, **sizes)
        assert [step[:3] for step in replayed.steps] == [step[:3] for step in fresh.steps]
        assert replayed.convs == fresh.convs
        assert peaks(replayed, gpu) == peaks(fresh, gpu)


@pytest.mark.parametrize("name", programs.recorded())
def test_the_weights_are_the_modules(modules, name):
    import torch
    from record_modules import record_at

    dtype = modules[name].dtypes[0]
    fresh = record_at(modules[name], modules[name].checks[0], dtype).weights
    kept = programs.load(name).weights
    assert [(w.name, w.nbytes(str(dtype).removeprefix("torch."))) for w in kept] == fresh
    assert torch.float16.itemsize == 2


def test_a_wrong_fit_is_refused(modules):
    """A size that is no polynomial of the variables, and calls that differ from size to size."""
    from record_modules import Fit, ModuleCall, Writer

    values = [{"n": n, "t": t} for n, t in ((1, 2), (2, 5), (3, 3), (4, 9), (5, 7))]
    fit = Fit(["", "n", "t", "n t"], values)
    assert fit.polynomials[fit.index(tuple(3 * v["n"] * v["t"] + 7 * v["n"] for v in values))] == "7 n + 3 n t"
    with pytest.raises(ValueError, match="no polynomial"):
        fit.index(tuple(2 ** v["t"] for v in values))
    short, long = ModuleCall("m"), ModuleCall("m")
    long.append(("take", "", 8))
    with pytest.raises(ValueError, match="other steps"):
        Writer(fit, "float16").write([short] * 4 + [long])


def test_other_sizes_are_refused():
    module = programs.load("clip-l")
    with pytest.raises(ValueError, match="clip-l: want n, t, got n"):
        module.trace("float16", find_gpu("T4"), n=1)
    with pytest.raises(ValueError, match="dtype: want"):
        module.trace("float64", find_gpu("T4"), n=1, t=77)
    with pytest.raises(ValueError, match="component: want"):
        programs.load("clip-m")
    with pytest.raises(ValueError, match="fused kernels"):
        programs.load("sd15-unet").trace("bfloat16", find_gpu("T4"), n=2, h=64, w=64, t=77)


def test_what_passes_through_lives_for_its_modules_call():
    """Weights that are sent for a submodule's call are there in it alone."""
    module = programs.load("clip-l")
    layer = "text_model.encoder.layers.3.mlp.fc1"
    plain = module.trace("float16", find_gpu("T4"), n=1, t=77).steps
    sent = module.trace("float16", find_gpu("T4"), {layer: [("weight", 1000)]}, n=1, t=77).steps
    takes = [i for i, step in enumerate(sent) if step[2] == 1000]
    assert len(sent) == len(plain) + 2 and len(takes) == 1
    gives = [i for i, step in enumerate(sent) if step[0] == "give" and step[1] == sent[takes[0]][1]]
    within = {step[3] for step in sent[takes[0] : gives[0]] if step[3]}
    assert len(gives) == 1 and within == {f"{layer} [weight]", layer, f"{layer} [workspace]"}


@pytest.mark.parametrize("name", programs.recorded())
def test_flops_are_those_that_pytorch_counts(modules, name):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    module, dtype = modules[name], modules[name].dtypes[0]
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        built = module.build(dtype).eval()
        args, kwargs = module.call(module.checks[0], dtype)
        module.run(built, *args, **kwargs) if module.run else built(*args, **kwargs)
    flops = programs.load(name).flops(str(dtype).removeprefix("torch."), **module.checks[0])
    assert flops == counter.get_total_flops()


def test_files_are_as_the_recorder_writes_them(modules):
    from record_modules import layout

    for name in programs.recorded():
        text = (BENCHMARKS.parent / "vaemem" / "data" / "modules" / f"{name}.json").read_text("utf-8")
        assert text == layout(json.loads(text)) + "\n"
