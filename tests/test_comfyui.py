"""ComfyUI's classic memory management and its workflows, compared with ComfyUI's own decisions and memory."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import comfyui_cases as cases
import pytest
from errors import refused

import vaemem
from vaemem import _core
from vaemem._common import MIB
from vaemem.pipelines.comfyui_classic import Layer, ManagedModel, Manager
from vaemem.pipelines.comfyui_run import CLASSIC, COMFYUI_OPTIONS, DYNAMIC, ENCODERS, HIGH, NO, WHOLE, layers_of
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.runtimes import architecture

pytestmark = pytest.mark.python

HERE = Path(__file__).parent
GOLDEN, VERSION = HERE / "comfyui_decisions_0.33.0.txt", "0.33.0"
GIB = 1 << 30
NAME = "zimage-turbo"


def bytes_there(model):
    """Bytes of its weights on the card."""
    if model.stays:
        return model.nbytes
    away = sum(layer.bytes for layer in model.layers if layer.name not in model.there)
    return model.nbytes - away if model.is_whole else sum(layer.bytes for layer in model.layers) - away


def play(size, models, requests, *settings):
    """Yield the models after each request, as the oracle does."""
    manager = Manager(lambda: size - sum(bytes_there(model) for model in models), *settings)
    for index, needed, least, whole in requests:
        manager.load(models[index], needed, least, whole)
        yield [(model.name, model.loaded, bytes_there(model)) for model in manager.models]


def play_case(case):
    """Every other model computes in float32."""
    models = [
        ManagedModel(
            cases.name(i),
            [
                Layer(size, cases.layer_name(j), casts, 2 * size * (casts and i % 2))
                for j, (size, casts) in enumerate(layers)
            ],
            rest,
            references,
            i in case.stays,
        )
        for i, (layers, rest, references) in enumerate(case.models)
    ]
    return play(case.card, models, case.requests, case.reserved, case.state, case.smart)


def golden(kinds):
    """The golden file's lines that begin with one of these words."""
    lines = GOLDEN.read_text("utf-8").splitlines()
    return [line for line in lines if re.split(r"\.\d+ |[ @]", line)[0] in kinds]


def test_the_decisions_are_comfyuis():
    found = [
        cases.line(number, step, models)
        for number in range(cases.CASES + cases.HIGH_CASES)
        for step, models in enumerate(play_case(cases.make_case(number)))
    ]
    assert found == golden({*map(str, range(cases.CASES + cases.HIGH_CASES))})


def test_whole_and_tiled_decodes_are_comfyuis():
    found = []
    for name, vae in cases.DECODED.items():
        for images, h, w, tile in cases.DECODES:
            sides = 8 * h, 8 * w
            trace = _core.Trace.vae(architecture(vae), "comfyui", "decode", "bfloat16", *sides, images, tile=tile)
            found.append(cases.decode_line(name, (images, h, w, tile), trace.steps))
    assert found == golden({"decode"})


def request_of(name, images=1, frames=1, height=64, width=64):
    """The request of a workflow, for latents of a size."""
    known = WORKFLOWS[name]
    sides = {"height": height * known.factor, "width": width * known.factor}
    video = {"frames": known.frame_factor // known.clip[1] * (frames - 1) + known.clip[0]} if known.frames else {}
    return replace(predict(name, 512, 512).request, batch=images, **sides, **video)


def play_workflow(name):
    """Yield the lines of a workflow: ComfyUI's estimates, and its decisions for recorded models."""
    estimates = []
    for size in cases.WORKFLOWS[name]:
        request = request_of(name, *size)
        one = request.estimate(request.pipeline.denoiser)
        estimates.append((2 * one, one, request.estimate("vae")))
        yield cases.estimate_line(name, size, *estimates[-1])
    both, one, decode = estimates[0]
    requests = [(0, 0, None, False), (1, both, one, False), (2, decode, None, False)] * 2
    parts = [request.part(role) for role in cases.ROLES]
    weights = {part.role: [(weight.name, weight.bytes) for weight in part.weights] for part in parts}
    cards = dict.fromkeys(re.findall(rf"^{re.escape(name)}@(\d+)", GOLDEN.read_text("utf-8"), re.MULTILINE))
    for card in map(int, cards):
        models = [ManagedModel(role, *layers_of(of, 2 if role == ENCODERS else 0)) for role, of in weights.items()]
        for step, there in enumerate(play(card, models, requests)):
            yield cases.line(f"{name}@{card}", step, there)


@pytest.mark.parametrize("name", cases.WORKFLOWS)
def test_the_decisions_for_a_workflow_are_comfyuis(name):
    assert [*play_workflow(name)] == golden({name})


# ---- answers ----


def predict(pipeline=NAME, height=1024, width=1024, *args, gpu="RTX 4090", **given):
    return vaemem.predict_pipeline(pipeline, height, width, *args, runtime="comfyui", gpu=gpu, **given)


def phase_of(p, name):
    return next(phase for phase in p.phases if phase.name == name)


def test_a_large_card_keeps_all_models():
    p = predict(gpu="H200")
    weights = {part.role: part.nbytes for part in p.request.parts}
    assert p.placed["decode"] == {role: (size, size) for role, size in weights.items()}
    assert not any(p.left.values()) and not p.tiled and p.verdict == "fits" and p.host == sum(weights.values())
    assert all(more == 0 for _, more in p.paged.values())
    first = sum(first for first, _ in p.paged.values())
    assert 0.99 * p.host < first <= 1.001 * p.host
    denoise = phase_of(p, "denoise")
    assert denoise.sent >= p.paged["denoise"][0] and denoise.outside % (32 * MIB) == 0


def test_on_a_small_card_pages_leave():
    p = predict(gpu="RTX 4060")
    loaded, whole = p.placed["denoise"]["transformer"]
    assert p.left["denoise"] == ["text_encoder"] and 0 < loaded < whole and p.verdict == "fits"
    first, more = p.paged["denoise"]
    assert whole - loaded < more + 32 * MIB * 2 and 0 < more < first <= 1.001 * whole
    steps = [predict(gpu="RTX 4060", steps=count) for count in (8, 20)]
    sent = [phase_of(one, "denoise").sent for one in steps]
    assert sent[1] - sent[0] == 12 * more and "each step sends them" in str(p)
    smaller = predict(gpu="RTX 4060", memory="6 GB")
    assert smaller.placed["denoise"]["transformer"][0] < loaded and smaller.paged["denoise"][1] > more


@pytest.mark.parametrize("offload", COMFYUI_OPTIONS)
def test_the_least_memory_is_enough(offload):
    """With less than PyTorch's peak the run does not go through."""
    given = {"height": 512, "width": 512, "offload": offload, "vae": "tiled"}
    p = predict(**given)
    assert predict(used=p.available - p.least, **given).out_of_memory_at is None
    peak = max(took for _, took in p.estimates.values())
    less = predict(used=p.available - min(p.least, peak) * 8 // 10, **given)
    assert less.out_of_memory_at and not less.fits and less.verdict == "does not fit"


@pytest.mark.parametrize("offload", COMFYUI_OPTIONS[:2])
def test_without_room_it_decodes_in_tiles(offload):
    whole = predict(height=2048, width=2048, offload=offload)
    few = {"height": 2048, "width": 2048, "offload": offload, "memory": "4 GB"}
    p, alone = predict(**few), predict(vae="tiled 512", **few)
    assert not whole.tiled and not alone.tiled
    assert p.tiled and p.out_of_memory_at is None and "in tiles of 512 pixels" in " ".join(str(p).split())
    assert phase_of(p, "decode").allocated < phase_of(whole, "decode").allocated / 2
    assert p.estimates["decode"][1] == alone.estimates["decode"][1]
    assert p.estimates["decode"][0] == 16 * alone.estimates["decode"][0]  # of the image, and of a tile


def test_the_classic_manager_loads_layers():
    p = predict(gpu="RTX 4060", offload=CLASSIC)
    loaded, whole = p.placed["denoise"]["transformer"]
    assert p.left["denoise"] == ["text_encoder"] and 0 < loaded < whole and not any(map(any, p.paged.values()))
    denoise = phase_of(p, "denoise")
    assert loaded < denoise.weights and denoise.outside == 0
    assert denoise.sent == pytest.approx(loaded + p.request.steps * (whole - loaded), rel=1e-3)
    none = predict(gpu="RTX 4060", offload=NO)
    assert none.placed["denoise"]["transformer"] == (0, whole) and none.peak < p.peak
    assert phase_of(none, "denoise").sent == pytest.approx(none.request.steps * whole, rel=1e-3)


def test_without_smart_memory_models_leave_whole():
    smart, whole = (predict(gpu="H200", offload=offload) for offload in (CLASSIC, WHOLE))
    assert not any(smart.left.values()) and len(smart.placed["decode"]) == 3
    assert whole.left["denoise"] == ["text_encoder"] and [*whole.placed["decode"]] == ["vae"]


def test_with_much_memory_the_denoiser_is_always_there():
    whole, high = (predict(gpu="H200", offload=offload) for offload in (CLASSIC, HIGH))
    size = high.parts["transformer"].nbytes
    prompt, decode = (phase_of(high, name) for name in ("encode prompt", "decode"))
    assert prompt.weights == pytest.approx(phase_of(whole, "encode prompt").weights + size, rel=1e-3)
    assert decode.weights == pytest.approx(phase_of(whole, "decode").weights, rel=1e-3)
    assert not any(high.left.values()) and high.to_text(all=True).count("stays on the card") == 1
    few = predict(gpu="RTX 4060", offload=HIGH)
    assert few.out_of_memory_at and few.verdict == "does not fit" and predict(gpu="RTX 4060", offload=CLASSIC).fits


@pytest.mark.skipif("sd15" not in WORKFLOWS, reason="not recorded yet")
def test_before_compute_capability_8_the_vae_is_in_float32():
    assert predict("sd15", 512, 512, gpu="T4").request.part("vae").dtype == "float32"
    assert predict("sd15", 512, 512, gpu="RTX 3060").request.part("vae").dtype == "bfloat16"


def test_windows_reserves_more():
    here, windows = (predict(gpu="RTX 4060", offload=CLASSIC, os=os) for os in ("linux", "windows"))
    assert windows.placed["denoise"]["transformer"][0] < here.placed["denoise"]["transformer"][0]


def test_a_plan_has_the_ways():
    plan = vaemem.plan_pipeline(NAME, 512, 512, gpu="RTX 3060", runtime="comfyui")
    nodes = ("VAE Decode", "VAE Decode (Tiled)")
    options = ("no option", *COMFYUI_OPTIONS[1:])
    assert {one.way.name for one in plan.outcomes} == {f"{option}, {node}" for option in options for node in nodes}
    way = plan[f"{NO}, VAE Decode (Tiled)"].way
    assert way.code == f"python main.py {NO}  # with the node VAE Decode (Tiled)"
    alone = predict(NAME, 512, 512, gpu="RTX 3060", **way.settings)
    assert [phase.total for phase in way.phases] == [phase.total for phase in alone.phases]
    assert plan["no option, VAE Decode"].way.code == "python main.py  # with the node VAE Decode"


def test_an_answer_is_pickled_and_has_data():
    p = predict(gpu="RTX 4060")
    again = pickle.loads(pickle.dumps(p))
    assert again.to_text(all=True) == p.to_text(all=True)
    data = p.to_dict()
    known = {phase["phase"]: phase for phase in data["comfyui"]["phases"]}
    assert known["denoise"]["step_bytes"] == p.paged["denoise"][1] and data["comfyui"]["tiled"] is False
    assert {role["role"]: role["loaded_bytes"] for role in known["denoise"]["models"]} == {
        role: loaded for role, (loaded, _) in p.placed["denoise"].items()
    }


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [name for name, known in WORKFLOWS.items() if known.frames])
def test_a_video_has_frames(name):
    known = WORKFLOWS[name]
    usual = predict(name, 480, 480, gpu="H200")
    count = usual.request.frames + known.frame_factor * (known.clip[0] if known.clip else 1)
    longer = predict(name, 480, 480, gpu="H200", frames=count)
    assert f"{count} frames" in longer.title or str(count) in longer.title
    assert phase_of(longer, "denoise").allocated > phase_of(usual, "denoise").allocated
    assert longer.estimates["denoise"][0] > usual.estimates["denoise"][0]
    if known.owns_tiles:
        with refused("vae", "'tiled 512'", names=[name]):
            predict(name, 480, 480, gpu="H200", vae="tiled")


def test_videos_shorter_than_recorded_ones_are_refused():
    """A first chunk of Wan's VAE alone does other steps than two chunks."""
    assert predict("wan2.2-5b", 480, 480, gpu="H200", frames=5).fits
    for name in ("wan2.2-5b", "wan-1.3b"):
        with refused("frames"):
            predict(name, 480, 480, gpu="H200", frames=1)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("frames", "tile"), [(121, 512), (241, 512), (121, 256)])
def test_a_recorded_vae_decodes_in_tiles(frames, tile):
    """As VAE.decode and VAEDecodeTiled choose them, here calculated apart: a tile is a decode of its size."""
    asked = {"frames": frames, "offload": DYNAMIC}
    whole, few = (predict("ltx2.3", 1024, 1024, gpu=gpu, **asked) for gpu in ("H200", "RTX 3060"))
    assert not whole.tiled and few.tiled and few.fits and few.verdict == "fits"
    assert "decodes in tiles of 512 pixels" in " ".join(str(few).split())
    f, budget = (frames - 1) // 8 + 1, 0.8 * find_gpu("RTX 3060").total_memory
    assert 2 * 614400 * f * 16 * 16 <= budget < 2 * 614400 * f * 32 * 32  # sides of 16 latents of 32 pixels
    alone = predict("ltx2.3", 512, 512, gpu="H200", **asked)
    assert few.estimates["decode"][1] == pytest.approx(alone.estimates["decode"][1], rel=0.02)
    node = predict("ltx2.3", 1024, 1024, gpu="RTX 3060", vae=f"tiled {tile}", **asked)
    alone = predict("ltx2.3", tile, tile, gpu="RTX 3060", frames=57, offload=DYNAMIC)  # 8 frames of latents
    assert not node.tiled and not alone.tiled and node.request.tile_latents == (tile // 32, 8)
    assert node.estimates["decode"][1] == pytest.approx(alone.estimates["decode"][1], rel=0.02)
    assert node.estimates["decode"][0] == 2 * 614400 * 8 * (tile // 32) ** 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_an_answer(name):
    p = predict(name, 512, 512, gpu="H200")
    kinds = [phase.kind for phase in p.phases]
    assert {"denoise", "decode"} <= {*kinds} and p.fits and p.least < p.peak
    assert all(took > 0 for _, took in p.estimates.values()) and all("  " not in note for note in p.notes)
    most = WORKFLOWS[name].most_batch or 4
    peaks = [predict(name, 512, 768, images, gpu="H200").estimates["denoise"][1] for images in (1, most)]
    assert peaks == sorted(peaks)


def test_a_workflow_encodes_its_picture_as_the_vae_alone():
    p = predict("qwen-image-edit-plus", 512, 512, gpu="H200")
    alone = vaemem.predict("qwen-image", "encode", 1024, 1024, gpu="H200", runtime="comfyui", dtype="bfloat16")
    assert p.estimates["encode image"][1] == alone.allocated
    assert p.estimates["encode image 2"][1] >= alone.allocated


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("offload", {"offload": "model"}),
        ("offload", {"offload": "--lowvram"}),
        ("offload", {"offload": "--gpu-only"}),
        ("vae", {"vae": "sliced"}),
        ("vae", {"vae": "tiled 100"}),
        ("vae", {"vae": "tiled", "pipeline": "minimax-h3"}),
        ("vae", {"vae": "tiled \u0665\u0661\u0662"}),
        ("image", {"image": True}),
        ("components['transformer']", {"components": {"transformer": "nf4"}}),
        ("dtype", {"dtype": "float16"}),
        ("gpu", {"gpu": "GTX 1650"}),
        ("gpu", {"gpu": "T4"}),
        ("gpu", {"gpu": "RX 7900 XTX"}),
        ("batch", {"batch": 5}),
        ("pipeline", {"pipeline": "sd3"}),
        ("pipeline", {"pipeline": "wan2.1"}),
        ("vae_memory_limit", {"vae_memory_limit": "1 GB"}),
        ("diffusers_version", {"diffusers_version": "0.35.0"}),
        ("lora", {"lora": 16}),
    ],
)
def test_what_has_no_answer_is_refused(argument, given):
    with pytest.raises(vaemem.ArgumentError) as refused:
        predict(**{"height": 512, "width": 512} | given)
    assert refused.value.argument == argument


# ---- with ComfyUI ----


def ask_comfyui(script, *args):
    """Run a script that imports ComfyUI's code, and return its output."""
    if "COMFYUI" not in os.environ:
        pytest.skip("COMFYUI names no folder of ComfyUI")
    if f'"{VERSION}"' not in Path(os.environ["COMFYUI"], "comfyui_version.py").read_text("utf-8"):
        pytest.skip(f"COMFYUI is not {VERSION}")
    command = [sys.executable, HERE / script, *args]
    ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.apps
@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_takes_what_comfyui_takes(name):
    """ComfyUI's own code at a size that no recording was fitted to; weights apart."""
    ask_comfyui("comfyui_whole.py", name)


@pytest.mark.apps
def test_the_golden_file_is_comfyuis():
    printed = ask_comfyui("comfyui_oracle.py")
    if os.environ.get("VAEMEM_GOLDEN") == "1":
        GOLDEN.write_text(printed, "utf-8")
    assert printed == GOLDEN.read_text("utf-8")


def test_float8_halves_what_is_sent_and_copies_each_weight_for_its_call():
    """As weight_dtype fp8_e4m3fn of Load Diffusion Model: all weights have one byte, biases and norms too."""
    half, one = (
        predict("zimage-turbo", 1024, gpu="RTX 4060", components=types) for types in (None, {"transformer": "fp8"})
    )
    assert 2 * one.parts["transformer"].nbytes == pytest.approx(half.parts["transformer"].nbytes, rel=1e-5)
    assert 2 * one.paged["denoise"][0] == pytest.approx(half.paged["denoise"][0], rel=1e-3)
    assert one.paged["denoise"][1] < half.paged["denoise"][1]
    copies = one.parts["transformer"].passing_copies()
    assert sum(copy.bytes for copy in copies) == pytest.approx(half.parts["transformer"].nbytes, rel=1e-5)
    assert not half.parts["transformer"].passing_copies()
