"""Recorded modules: replayed without PyTorch, the same steps as a fresh recording of the module itself."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from errors import refused
from traces import lifetimes

from vaemem import _core
from vaemem._core import Program
from vaemem.pipelines import recorded_modules
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.offloaded_weights import Passing
from vaemem.prediction.process import SimulatedProcess

pytestmark = [pytest.mark.core, pytest.mark.python]

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
sys.path.insert(0, str(RECORDING))

# Without those that differ in numbers of layers and channels, or in what is kept.
ALIKE = (
    "flux-fill-transformer",
    "sd35-large-transformer",
    "flux-schnell-transformer",
    "flux2-klein-9b-transformer",
    "qwen3-8b-flux2",
    "clip-l-sdxl",
    "wan-14b-transformer",
    "wan2.2-5b-transformer",
    "sdxl-controlnet",
    "sdxl-controlled-unet",
)
KINDS = [name for name in recorded_modules.recorded() if name not in ALIKE]
OLDER = [
    name for name in recorded_modules.recorded() if recorded_modules.older(name, recorded_modules.LAST_OLDER) != name
]
RUNS = {"float16": "T4", "bfloat16": "RTX 4090", "float32": "H200"}  # attention runs otherwise on each


@pytest.fixture(scope="module")
def modules():
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    if not RECORDING.exists():
        pytest.skip("the sources are not here")
    import modules

    return modules.MODULES


@pytest.fixture
def module(modules, name):
    return modules[name]


def peaks(trace, gpu):
    process = SimulatedProcess(gpu)
    process.call(trace)
    return process.peak_allocated, process.peak_reserved


@pytest.mark.one_in(28)
@pytest.mark.parametrize("name", recorded_modules.recorded())
def test_the_replay_takes_the_steps_of_the_module(module, name):
    """At sizes that the fit has not seen, on GPUs whose attention differs: each step and its bytes, and the weights."""
    assert_replayed(name, module)


@pytest.mark.older
@pytest.mark.parametrize("name", OLDER)
def test_the_replay_takes_the_steps_of_the_older_module(module, name):
    from torch_vaes import RELEASE

    if RELEASE > recorded_modules.LAST_OLDER:
        pytest.skip(f"before diffusers 0.{recorded_modules.LAST_OLDER + 1} (make check ONLY=older)")
    assert_replayed(recorded_modules.older(name, RELEASE), module)


def assert_replayed(name, module):
    from record_modules import record_at

    from vaemem.pytorch.module_writer import settle
    from vaemem.pytorch.recorder import Recorder, Recording

    sizes = module.checks[0]
    # In bfloat16 the steps are those of float16, which the file says: one module shows it.
    for dtype in module.dtypes if name == "sd15-unet" else module.dtypes[::2]:
        run = str(dtype).removeprefix("torch.")
        gpu = find_gpu(RUNS[run])
        fresh = record_at(module, sizes, dtype, Recorder(Recording(), gpu))
        replayed = recorded_modules.load_program(name).trace(run, gpu, **sizes)
        assert settle(replayed.steps) == settle(fresh.trace.steps)
        assert replayed.convs == fresh.trace.convs
        assert peaks(replayed, gpu) == peaks(fresh.trace, gpu)
        assert [
            (weight.name, weight.nbytes(run)) for weight in recorded_modules.load_program(name).weights
        ] == fresh.weights


@pytest.mark.one_in(14)
@pytest.mark.parametrize("name", KINDS)
def test_attention_by_the_math_path_takes_the_steps_of_the_module(module, name):
    """On cards without a fused kernel for bfloat16, of one picture or prompt and of several. FLOPs are those of fused
    kernels, but none of them count as a fused attention's."""
    import torch
    from record_modules import record_at

    from vaemem.pytorch.recorder import Recorder, Recording

    gpu, program = find_gpu("T4"), recorded_modules.load_program(name)
    for n in {module.checks[0]["n"], 2}:
        sizes = {**module.checks[0], "n": n}
        fresh = record_at(module, sizes, torch.bfloat16, Recorder(Recording(), gpu)).trace
        replayed = program.trace("bfloat16", gpu, **sizes)
        assert lifetimes(replayed.steps) == lifetimes(fresh.steps) and replayed.convs == fresh.convs
        assert peaks(replayed, gpu) == peaks(fresh, gpu)
        assert replayed.flops == program.trace("bfloat16", find_gpu("H100"), **sizes).flops and not replayed.attended


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sd15-unet", 859520964), ("sdxl-unet", 2567463684), ("flux-transformer", 11901408320),
        ("flux-schnell-transformer", 11891178560), ("zimage-transformer", 6154908736), ("clip-l", 123060480),
        ("openclip-g", 694659840), ("t5-xxl", 4762310656), ("qwen3-4b", 4022468096),
        ("qwen3-4b-flux2", 4022468096), ("qwen3-8b-flux2", 8190735360), ("mistral3-flux2", 24011361280),
        ("flux2-klein-transformer", 3875544576), ("flux2-klein-9b-transformer", 9078581248),
        ("flux2-transformer", 32223281152), ("clip-l-sd3", 123650304), ("t5-xxl-sd3", 4762310656),
        ("sd3-transformer", 2028328000), ("sd35-medium-transformer", 2243171520),
        ("flux-fill-transformer", 11902391360), ("sd21-unet", 865910724), ("openclip-h", 340387840),
        ("sd15-controlnet", 361279120), ("sdxl-controlnet", 1251014160), ("sd15-controlled-unet", 859520964),
        ("sdxl-controlled-unet", 2567463684), ("sd35-large-transformer", 8056627520), ("sdxl-refiner-unet", 2259526660),
        ("pixart-sigma-transformer", 610856096), ("t5-xxl-masked", 4762310656),
        ("chroma-transformer", 8899983424), ("qwen-image-transformer", 20430401088), ("qwen2.5-vl-7b", 8292166656),
        ("umt5-xxl", 5680910336), ("wan-1.3b-transformer", 1418996800), ("wan-14b-transformer", 14288491584),
        ("wan2.2-5b-transformer", 4999787712),
    ],
)  # fmt: skip
def test_parameters_are_as_many_as_published(name, parameters):
    """SD 3.5's numbers are the configs', because none was found. Buffers do not count: positions of CLIP, SD 3 and
    PixArt, frequencies of Qwen3 and Wan."""
    buffers = "position_ids", "inv_freq", "pos_embed.pos_embed", "mod_proj", "freqs_cos", "freqs_sin"
    weights = [w for w in recorded_modules.load_program(name).weights if not w.name.endswith(buffers)]
    assert sum(math.prod(weight.shape) for weight in weights) == parameters


def test_a_case_that_was_not_recorded_is_refused():
    """Z-Image pads what is no multiple of 32, which takes other steps, and its batch is a list."""
    module, gpu = recorded_modules.load_program("zimage-transformer"), find_gpu("RTX 4090")
    sizes = [{"n": 1, "h": side, "w": side, "t": t} for side in (128, 130) for t in (64, 65)]
    traces = [module.trace("bfloat16", gpu, **each) for each in sizes]
    assert len({tuple(kind for kind, *_ in trace.steps) for trace in traces}) == 4
    with refused("zimage-transformer"):
        module.trace("bfloat16", gpu, n=5, h=128, w=128, t=64)
    with refused("flux-transformer"):
        recorded_modules.load_program("flux-transformer").trace("bfloat16", gpu, n=1, h=65, w=64, t=512)


def test_equations_of_cases():
    """A call is played where its cases hold, and takes what its polynomials say."""

    def taken(case="1 n = 1", size="8", **sizes):
        names, values = " ".join(sizes), tuple(sizes.values())
        text = f"variables {names}\ncall float16; {case}\nsize {size}\nmodule +0:it -1\nmodule =0"
        return Program(text).trace("float16", values, 89, 128, 0, ()).steps[0][2]

    assert taken("1 h w != 2 t + 1", h=3, w=3, t=5) == 8
    assert taken("1 n = 2", "640 n h h + -5 h + 7", n=2, h=3) == 11512
    for case in ("1 n != 1", "1 n = 2", "2 n + -1 = 0"):
        with refused(got="n = 1"):
            taken(case, n=1)
    for wrong in ("", "n", "2 m", "1 +", "1 n = 1", "1;", "1 n n n n"):
        with refused(names=["polynomial: "], kind=(ValueError, OverflowError)):
            taken("1 = 1", wrong, n=1 << 20)
    for wrong in ("1", "1 n =", "1 n = 1 = 1", "1 = 1; 1"):
        with refused(names=["polynomial"]):
            taken(wrong, n=1)


SMALL = """name small
variables n t
derived t2 2 1 1 t
call float16 bfloat16; 1 n = 1; 1 t = 2 t2
size 8 n t
size 3
conv run 0 1 0 0 0 1 1 1 0
attention run 0 1 1 0 0 0 0 0 0 0 0 0 0 1 1 1
module +0 c0 b1
module a=0 -1 +1:what
module b=1 a0 =0 -3"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("size 3", "size 3 m"), ("size 3", "size"), ("size 3", "size 99999999999999999999"), ("size 3", "weight 3"),
        ("size 3\n", ""), ("c0 b1", "c1 b1"), ("+0 c0", "+9 c0"), ("c0 b1", "c0 x1"), ("c0 b1", "c0 b"),
        ("=0 -3", "=0 -7"), ("=0 -3", "=2"), ("=0 -3", "a=7"), ("a=0 -1", "a=-1 -1"), ("1 1 1 0\n", "1 1 1 2\n"),
        ("run 0 1 0 0 0 1 1 1 0", "run 0 1 0 0 0 1 1 1"), ("attention run", "attention int8"),
        ("0 0 1 1 1\n", "0 0 1 1 2\n"), ("derived t2 2", "derived t2 0"), ("t2 2 1 1 t", "t2 2 1 1 t3"),
        ("float16 bfloat16", "float64"), ("1 n = 1;", "1 n;"), ("variables n t", "variables n"),
        ("call float16", "called float16"), ("b=1 a0", f"{'b' * 300}=1 a0"),
        ("variables n t", f"variables {' n' * 70}"), ("call", "derived t2 2 1 1 t\n" * 70 + "call"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_program_is_refused(old, new):
    Program(SMALL)
    assert SMALL.count(old) >= 1
    with refused(names=["program: "], kind=(ValueError, OverflowError)):
        Program(SMALL.replace(old, new))


def test_calls_within_calls_come_to_an_end():
    """Each module calls the one before twice: as many steps as two to the power of their number."""
    calls = "".join(f"\nmodule a={i} b={i}" for i in range(40))
    with refused(names=["2^22"]):
        Program("name m\nvariables n\ncall float16\nmodule" + calls)


def test_sizes_that_do_not_fit_are_said():
    program = Program(SMALL)
    for sizes, error in (((1, 1 << 61), OverflowError), ((1, -2), ValueError), ((1, 1 << 70), OverflowError)):
        with pytest.raises(error):
            program.trace("float16", sizes, 89, 128, 0, ())
    with refused("small"):
        program.trace("float16", (1, 3), 89, 128, 0, ())
    with refused("dtype", "float32"):
        program.trace("float32", (1, 2), 89, 128, 0, ())


@pytest.mark.parametrize(("dtype", "sm", "flags"), [("float16", 89, "0 0 0 0"), ("bfloat16", 75, "0 1 1 1")])
def test_every_failing_allocation_is_said(dtype, sm, flags):
    text = SMALL.replace("0 0 0 0 1 1 1\n", f"{flags} 1 1 1\n")

    def ask():
        program = Program(text)
        passing = [("b", "b", "weight", 8, 0), ("b.a", "b.a", "weight", 8, 1)]
        return program.trace(dtype, (1, 8), sm, 128, 0, passing).steps

    expected, nth = ask(), 1
    assert any(name.endswith("[attention]") for *_, name in expected)
    while True:
        _core.fail_alloc_at(nth)
        try:
            assert ask() == expected
        except MemoryError:
            nth += 1
            continue
        finally:
            left = _core.fail_alloc_at(0)
        assert left and nth > 10
        return


def test_a_wrong_fit_is_refused(modules):
    """A size that is no polynomial of the variables, and calls that differ from size to size."""
    from vaemem.pytorch.fitting import PolynomialFit
    from vaemem.pytorch.module_writer import ModuleCall, Writer

    values = [{"n": n, "t": t} for n, t in ((1, 2), (2, 5), (3, 3), (4, 9), (5, 7))]
    fit = PolynomialFit(["", "n", "t", "n t"], values)
    assert fit.polynomials[fit.index(tuple(3 * v["n"] * v["t"] + 7 * v["n"] for v in values))] == "7 n + 3 n t"
    with refused("points"):
        fit.index(tuple(2 ** v["t"] for v in values))
    short, long = ModuleCall("m"), ModuleCall("m")
    long.append(("take", "", 8))
    with refused("m", kind=ValueError):
        Writer(fit, "float16").write([short] * 4 + [long])


def test_other_sizes_are_refused():
    module = recorded_modules.load_program("clip-l")
    with refused("clip-l", "n"):
        module.trace("float16", find_gpu("T4"), n=1)
    with refused("dtype"):
        module.trace("float64", find_gpu("T4"), n=1, t=77)
    with refused("component"):
        recorded_modules.load_program("clip-m")


def test_what_passes_through_lives_for_its_modules_call():
    """Weights that are sent for a submodule's call are there in it alone."""
    module = recorded_modules.load_program("clip-l")
    layer = "encoder.layers.3.mlp.fc1"
    plain = module.trace("float16", find_gpu("T4"), n=1, t=77).steps
    sent = module.trace("float16", find_gpu("T4"), [Passing(layer, layer, "weight", 1000, 0)], n=1, t=77).steps
    takes = [i for i, step in enumerate(sent) if step[2] == 1000]
    assert len(sent) == len(plain) + 2 and len(takes) == 1
    gives = [i for i, step in enumerate(sent) if step[0] == "give" and step[1] == sent[takes[0]][1]]
    within = {step[3] for step in sent[takes[0] : gives[0]] if step[3]}
    assert len(gives) == 1 and within == {f"weights of {layer} [weight]", layer, f"{layer} [workspace]"}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KINDS)
def test_flops_are_those_that_pytorch_counts(module, name):
    import torch
    from modules import make
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    dtype = module.dtypes[0]
    counter = FlopCounterMode(display=False)
    built = make(module, dtype)  # some convert weights, which FakeTensorMode cannot; attention runs as products
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        built.to_empty(device="cpu")
        args, kwargs = module.call(module.checks[0], dtype)
        module.run(built, *args, **kwargs) if module.run else built(*args, **kwargs)
    run, gpu = str(dtype).removeprefix("torch."), find_gpu(recorded_modules.ANY_GPU)
    flops = recorded_modules.load_program(name).trace(run, gpu, **module.checks[0]).flops
    assert flops == counter.get_total_flops()


def test_what_the_recorder_writes_is_replayed(modules, monkeypatch):
    """From recordings at several sizes to a file's data, whose replay is compared at a size beside them."""
    import record_modules
    import torch
    from modules import Module, points

    from vaemem.pytorch.fitting import products

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)

        def forward(self, x):
            heads = self.linear(x).unflatten(-1, (2, 16)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

    small = Module(
        "attention alone", Attention,
        lambda sizes, dtype: ((torch.empty(sizes["n"], sizes["t"], 32, dtype=dtype),), {}),
        points("n t", (2, 8), (3, 16), (2, 24), (4, 40)), points("n t", (5, 32)), products(["", "n"], ["", "t"]),
        dtypes=(torch.float16,),
    )  # fmt: skip
    monkeypatch.setitem(modules, "small", small)
    data = record_modules.record("small", lambda _: None)  # raises where the replay takes other steps
    assert len(data["calls"]["float16"]["attentions"]) == 1 and data["weights"]


def test_files_are_as_the_recorder_writes_them(modules):
    from record_modules import layout

    for name in recorded_modules.recorded():
        text = (RECORDING.parents[1] / "vaemem" / "data" / "modules" / f"{name}.json").read_text("utf-8")
        assert text == layout(json.loads(text)) + "\n"
