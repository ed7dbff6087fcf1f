"""ComfyUI's memory management, as vaemem/pipelines/comfyui.py has it, compared with ComfyUI's own decisions."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import comfyui_cases as cases
import pytest

import vaemem
from vaemem import _core
from vaemem.pipelines.comfyui import RELEASES, USAGE, Layer, ManagedModel, Manager, estimate_denoiser, estimate_vae
from vaemem.pipelines.comfyui_run import WORKFLOWS, layers_of
from vaemem.pipelines.components import weights_of
from vaemem.pipelines.programs import load_program
from vaemem.pipelines.storage import stored
from vaemem.prediction.runtimes import architecture

HERE = Path(__file__).parent
RELEASE_OF = {one.name.rpartition(" ")[2]: one for one in RELEASES}  # by version


def golden(version):
    return HERE / f"comfyui_decisions_{version}.txt"


def play(release, size, models, requests, *settings):
    """Yield the models after each request, as the oracle does."""
    manager = Manager(lambda: size - sum(model.bytes_there for model in models), *settings, release=release)
    for index, needed, least, whole in requests:
        manager.load(models[index], needed, least, whole)
        yield [(model.name, model.loaded, model.bytes_there) for model in manager.models]


def play_case(case, asked, release):
    """Every other model computes in float32."""
    models = [
        ManagedModel(
            cases.name(i),
            [
                Layer(size, cases.layer_name(j), casts, 2 * size * (casts and i % 2 and asked.converts))
                for j, (size, casts) in enumerate(layers)
            ],
            rest, references, release,
        )
        for i, (layers, rest, references) in enumerate(case.models)
    ]  # fmt: skip
    return play(release, case.card, models, case.requests, case.reserved, case.state, case.smart)


def real(asked, release):
    """Yield the lines of whole workflows, with the recorded models."""
    for name, (images, *latent) in asked.pipelines.items():
        work = WORKFLOWS[name]
        dtype = work.dtypes[0]
        weights = {
            "text_encoder": (weights_of(work.encoder), work.encoder_dtype),
            "denoiser": (weights_of(work.denoiser), dtype),
            "vae": (_core.Trace.parameters(architecture(name), "comfyui"), "bfloat16"),
        }
        one, both = (estimate_denoiser(USAGE[work.kind], (n * images, *latent), dtype) for n in (1, 2))
        decode = estimate_vae("decode", (images, *latent), "bfloat16", work.vae)
        requests = [(0, 0, None, False), (1, both, one, False), (2, decode, None, False)] * 2
        for card in asked.cards:
            models = [
                ManagedModel(role, *layers_of([(w.name, w.bytes) for w in stored(found, type, "all", type)],
                             2 * (role == "text_encoder" and asked.converts)), release=release)
                for role, (found, type) in weights.items()
            ]  # fmt: skip
            for step, there in enumerate(play(release, card, models, requests)):
                yield cases.line(f"{name}@{card}", step, there)


def estimates(asked):
    for kind, dtype in asked.used:
        for shape in cases.SHAPES:
            yield f"{kind} {dtype} {'x'.join(map(str, shape))} {estimate_denoiser(USAGE[kind], shape, dtype)!r}"
    for kind, op, dtype, shape in itertools.product(
        asked.vaes, ("decode", "encode"), ("float16", "float32"), cases.SHAPES
    ):
        found = estimate_vae(op, cases.with_frames(shape, kind), dtype, kind)
        yield f"{kind} {op} {dtype} {'x'.join(map(str, shape))} {found!r}"


def decodes(asked, release):
    for name, size in itertools.product(asked.decoded, asked.decodes):
        images, h, w, tile = size
        sides = 8 * h, 8 * w
        trace = _core.Trace.vae(
            architecture(name),
            "comfyui",
            "decode",
            "bfloat16",
            *sides,
            images,
            tile=tile,
            older=release is RELEASES[0],
        )
        yield cases.decode_line(name, size, trace.steps)


@pytest.mark.parametrize("version", cases.ASKED)
def test_the_decisions_are_comfyuis(version):
    asked, release = cases.ASKED[version], RELEASE_OF[version]
    found = [
        cases.line(number, step, models)
        for number in range(cases.CASES)
        for step, models in enumerate(play_case(cases.make_case(number), asked, release))
    ]
    lines = [*found, *estimates(asked), *decodes(asked, release), *real(asked, release)]
    assert lines == golden(version).read_text("utf-8").splitlines()


def predict(pipeline, side, gpu, *args, **given):
    return vaemem.predict_pipeline(pipeline, side, side, *args, runtime="comfyui", gpu=gpu, **given)


def test_a_large_card_keeps_all_models():
    p = predict("sdxl", 1024, "RTX 4090")
    loaded = {role: part.nbytes for role, part in p.parts.items()}
    assert {role: size for role, (size, _) in p.placed["decode"].items()} == loaded | {"unet": loaded["unet"] - 10240}
    assert p.left == {"encode prompt": [], "denoise": [], "decode": []} and p.batched and not p.tiled
    assert p.verdict == "fits" and p.estimates["decode"][0] > 1.5 * p.estimates["decode"][1]


def test_a_small_card_loads_in_part():
    p = predict("flux", 1024, "RTX 4060")
    loaded, whole = p.placed["denoise"]["transformer"]
    assert p.left["denoise"] == ["text_encoder"] and loaded < whole / 2 and p.verdict == "fits"
    denoise = next(phase for phase in p.phases if phase.name == "denoise")
    assert loaded <= denoise.weights < loaded + (128 << 20)  # rounded up, and with the running layer
    assert denoise.sent == pytest.approx(loaded + p.request.steps * (whole - loaded), rel=1e-5)  # but for tables
    smaller = predict("flux", 1024, "RTX 4060", offload="--novram")
    assert smaller.placed["denoise"]["transformer"] == (0, whole) and smaller.placed["encode prompt"] == {}
    assert smaller.peak < p.peak


def test_without_room_it_decodes_in_tiles_and_runs_prompts_alone():
    p = predict("sd15", 1024, "RTX 3060", memory="1110 MiB")
    assert p.tiled and not p.batched and p.out_of_memory_at is None and p.verdict == "tight"
    alone = predict("sd15", 1024, "RTX 3060", memory="1110 MiB", vae="tiled")
    assert not alone.tiled and alone.phases[-1].allocated == p.phases[-1].allocated


def test_prompts_of_other_lengths_run_alone():
    """Qwen-Image's: the encoder gets the template, the denoiser the end of it."""
    p = predict("qwen-image", 1024, "H200", batch=2)
    assert p.request.guidance and not p.batched and p.left["decode"] == [] and p.estimates["decode"][0] == 7000 * 2**21
    encode, denoise, _ = p.phases
    gpu, dtype, (encoder, denoiser, _) = p.request.card.gpu, "bfloat16", (part.component for part in p.request.parts)
    encoded = load_program(encoder).trace(dtype, gpu, t=34 + 77 + 5)
    denoised = load_program(denoiser).trace(dtype, gpu, n=2, h=128, w=128, t=77 + 5)
    assert encode.flops == 2 * encoded.flops and denoise.flops == 2 * p.request.steps * denoised.flops
    alone = predict("qwen-image", 1024, "H200", batch=2, guidance=False)
    assert alone.batched and alone.phases[1].flops * 2 == denoise.flops
    small = predict("qwen-image", 1024, "RTX 3060", memory="3.5 GB")
    tiled = predict("qwen-image", 1024, "RTX 3060", memory="3.5 GB", vae="tiled 256")
    assert small.tiled and small.phases[-1].allocated == tiled.phases[-1].allocated and not small.batched


def test_the_least_memory_is_where_it_begins_to_go_through():
    p = predict("sd15", 512, "RTX 3060", torch_version="2.7.1")
    taken = p.available - p.least
    assert predict("sd15", 512, "RTX 3060", used=taken, torch_version="2.7.1").fits
    less = predict("sd15", 512, "RTX 3060", used=taken + (8 << 20), torch_version="2.7.1")
    assert not less.fits and less.out_of_memory_at


def test_a_plan_names_the_options():
    plan = vaemem.plan_pipeline("sd15", 512, 512, gpu="RTX 3060", runtime="comfyui")
    way = plan["--lowvram, VAE Decode (Tiled)"].way
    assert way.code == "python main.py --lowvram  # with the node VAE Decode (Tiled)"
    assert [phase.total for phase in way.phases] == [
        phase.total for phase in predict("sd15", 512, "RTX 3060", **way.settings).phases
    ]


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("offload", {"offload": "comfy-aimdo"}),
        ("offload", {"offload": "model"}),
        ("vae", {"vae": "sliced"}),
        ("vae", {"vae": "tiled 100"}),
        ("vae", {"vae": "tiled \u0665\u0661\u0662"}),
        ("image", {"image": True}),
        ("components", {"components": {"unet": "float16"}}),
        ("dtype", {"dtype": "float32"}),
        ("gpu", {"gpu": "GTX 1650"}),
        ("gpu", {"gpu": "RX 7900 XTX"}),
        ("pipeline", {"pipeline": "sd3"}),
        ("pipeline", {"pipeline": "flux2-klein"}),
        ("gpu", {"pipeline": "flux2"}),
        ("gpu", {"pipeline": "qwen-image"}),
        ("dtype", {"pipeline": "qwen-image", "gpu": "RTX 3060", "dtype": "float16"}),
        ("vae_memory_limit", {"vae_memory_limit": "1 GB"}),
        ("diffusers_version", {"diffusers_version": "0.35.0"}),
    ],
)
def test_what_has_no_answer_is_refused(argument, given):
    with pytest.raises(vaemem.ArgumentError) as refused:
        predict(**{"pipeline": "sd15", "side": 512, "gpu": "T4"} | given)
    assert refused.value.argument == argument


def ask_comfyui(script, *args, versions=tuple(RELEASE_OF)):
    """Run a script that imports ComfyUI's code, if it is one of these versions. Return the version and the output."""
    if "COMFYUI" not in os.environ:
        pytest.skip("COMFYUI names no folder of ComfyUI")
    said = Path(os.environ["COMFYUI"], "comfyui_version.py").read_text("utf-8")
    version = next((one for one in versions if f'"{one}"' in said), None)
    if version is None:
        pytest.skip(f"COMFYUI is not {' or '.join(versions)}")
    command = [sys.executable, HERE / script, *args]
    ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    return version, ran.stdout


@pytest.mark.apps
@pytest.mark.parametrize(
    ("version", "name"),
    [("0.3.64", "sd15-unet"), ("0.3.64", "flux-transformer"), ("0.3.64", "qwen-image-transformer"),
     ("0.8.0", "flux2-transformer"), ("0.8.0", "flux2-clip"), ("0.8.0", "zimage-transformer"),
     ("0.8.0", "zimage-clip")],
)  # fmt: skip
def test_layers_come_for_their_calls_as_in_comfyui(version, name):
    ask_comfyui("comfyui_sent.py", name, versions=(version,))


@pytest.mark.apps
@pytest.mark.parametrize("name", [name for name in WORKFLOWS if name not in ("flux-schnell", "zimage-turbo")])
def test_the_sampler_is_comfyuis(name):
    ask_comfyui("comfyui_sampler.py", name, versions=(WORKFLOWS[name].release.name.rpartition(" ")[2],))


@pytest.mark.apps
def test_the_golden_file_is_comfyuis():
    version, printed = ask_comfyui("comfyui_oracle.py")
    if os.environ.get("VAEMEM_GOLDEN") == "1":
        golden(version).write_text(printed, "utf-8")
    assert printed == golden(version).read_text("utf-8")
