"""Names as people write them: of models, pipelines and types of numbers, and what a refusal says."""

import json
import re
import shlex

import ml_dtypes
import numpy as np
import pytest
from errors import is_about, refused

import vaemem
from vaemem import VAE, predict, predict_pipeline, predict_sweep
from vaemem.__main__ import main
from vaemem._common import DTYPES, SPELT_DTYPES, choose, letters, meant
from vaemem.engine.configs import SAMPLE_SIZES, config_of, known_arch, named_model
from vaemem.engine.names import find_called, whole_names
from vaemem.pipelines.components import PIPELINES, known_pipeline
from vaemem.prediction.process import SimulatedProcess

pytestmark = pytest.mark.python


@pytest.mark.parametrize(
    "written, model",
    [
        ("SDXL", "sdxl"), ("sd1.5", "sd15"), (" SD 1.5 ", "sd15"), ("sd_15", "sd15"), ("SD3.5", "sd3"),
        ("stabilityai/sdxl-vae", "sdxl"), ("stable-diffusion-xl-base-1.0", "sdxl"), ("FLUX.1-dev", "flux"),
        ("black-forest-labs/FLUX.1-schnell", "flux"), ("Tongyi-MAI/Z-Image-Turbo", "zimage"), ("FLUX.2-dev", "flux2"),
        ("Playground v2.5", "playground-v2.5"), ("CogView4", "cogview4"), ("flux2_small", "flux2-small"),
        ("stabilityai/sd-vae-ft-mse", "sd15"),
    ],
)  # fmt: skip
def test_models(written, model):
    assert named_model("model", written) == model
    assert predict(written, "decode", 64, 64).allocated == predict(model, "decode", 64, 64).allocated


def test_tiles_of_a_model_that_shares_its_tensors():
    sides = [predict(name, "decode_tiled", 512, 512).tile for name in ("sd-vae-ft-mse", "SD VAE ft-EMA", "sd15")]
    assert sides == [256, 256, 512]  # as the configs' sample_size has them


@pytest.mark.parametrize(
    "written, dtype",
    [
        ("fp16", "float16"), ("FP16", "float16"), ("half", "float16"), ("torch.float16", "float16"),
        (np.float16, "float16"), (np.dtype("float32"), "float32"), (ml_dtypes.bfloat16, "bfloat16"),
        ("BF16", "bfloat16"), ("Float32", "float32"), ("fp32", "float32"),
    ],
)  # fmt: skip
def test_types_of_numbers(written, dtype):
    assert meant("dtype", written, DTYPES) == dtype
    assert predict("sdxl", "decode", 64, 64, written, weights_dtype=written).weights_dtype == dtype


def test_types_of_torch():
    torch = pytest.importorskip("torch")
    assert [meant("dtype", one, DTYPES) for one in (torch.float16, torch.bfloat16, torch.float32)] == [
        "float16", "bfloat16", "float32",
    ]  # fmt: skip
    process = SimulatedProcess()
    vae = process.load("SDXL", torch.float32)
    process.convert(vae, torch.float16)
    assert vae.dtype == "float16" and vae.arch["name"] == "sdxl"


def test_wherever_they_are_taken():
    with VAE.random("SD 1.5", parts="decoder", dtype="bf16") as vae:
        assert vae.dtype == "bfloat16" and vae.model == "sd15"
    assert {row["dtype"] for row in predict_sweep("SDXL", "decode", 64, dtypes=["fp16", "bf16"])} == {
        "float16", "bfloat16",
    }  # fmt: skip
    assert {row["model"] for row in predict_sweep("sd1.5", "decode", 64)} == {"sd15"}
    assert vaemem.bound("ComfyUI", "FLUX.1-dev", "bf16", sides=256, torch_version="2.8.0").find(
        "flux", "encode", "bfloat16"
    )
    asked = {"components": {"transformer": "q8_0", "text_encoder_2": "NF4", "vae": "BF16"}, "gpu": "H100"}
    usual = {"components": {"transformer": "Q8_0", "text_encoder_2": "nf4", "vae": "bfloat16"}, "gpu": "H100"}
    said = predict_pipeline("black-forest-labs/FLUX.1-dev", 512, 512, dtype="bf16", **asked)
    assert said.pipeline == "flux" and said.phases == predict_pipeline("flux", 512, 512, **usual).phases


def test_a_file_is_no_name(tmp_path, monkeypatch):
    """A config that lies where the name would lead is read; a known name is that model all the same."""
    (tmp_path / "SDXL").write_text(json.dumps(config_of(known_arch("flux"), 1024)))
    monkeypatch.chdir(tmp_path)
    assert predict("SDXL", "decode", 64, 64).model == "flux" and predict("sdxl", "decode", 64, 64).model == "sdxl"


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: predict("sdxxl", "decode", 64, 64), ("model", "'sdxxl'")),
        (lambda: predict("stabilityai/sd-vae", "decode", 64, 64), ("model", "'stabilityai/sd-vae'")),
        (lambda: predict("sdxl", "decode", 64, 64, float), ("dtype", "<class 'float'>")),
        (lambda: predict("sdxl", "decode", 64, 64, "fp8"), ("dtype", "'fp8'")),
        (lambda: VAE.random("Flux9"), ("model", "'Flux9'")),
        (lambda: VAE.random(None), ("model", "None")),
        (lambda: predict_pipeline("sdx", 512, 512), ("pipeline", "'sdx'")),
        (lambda: choose("x", "zz", "abc"), ("x", "'zz'")),
        (lambda: choose("op", "decoed", ("encode", "decode")), ("op", "'decoed'")),
    ],
)
def test_refusals(call, said):
    with refused(*said):
        call()


def test_no_name_means_two_things():
    for known, also in (
        (DTYPES, SPELT_DTYPES), (SAMPLE_SIZES, whole_names("vae")), (PIPELINES, whole_names("pipeline"))
    ):  # fmt: skip
        plain = {letters(name): name for name in known}
        assert len(plain) == len(known)
        assert set(also.values()) <= set(known) and all(letters(name) == name for name in also)
    models = {letters(name): name for name in SAMPLE_SIZES}
    assert all(models.get(name, vae) == vae for name, vae in whole_names("vae").items())


# Repositories whose VAE is known, with what `fits` and `pipeline` know of them.
SHARED = [
    ("stabilityai/stable-diffusion-2-1", "sd15", "sd21"), ("stabilityai/sd-turbo", "sd15", "sd21"),
    ("Kwai-Kolors/Kolors-diffusers", "sdxl", "kolors"), ("PixArt-alpha/PixArt-Sigma-XL-2-2K-MS", "sdxl", ""),
    ("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", "sdxl", "pixart-sigma"),
    ("PixArt-alpha/PixArt-XL-2-1024-MS", "sd15", "pixart-alpha"), ("segmind/SSD-1B", "sdxl", ""),
    ("OnomaAIResearch/Illustrious-xl-early-release-v0", "sdxl", "sdxl"), ("Illustrious", "sdxl", "sdxl"),
    ("AstraliteHeart/pony-diffusion-v6-xl", "sdxl", "sdxl"), ("Pony", "sdxl", "sdxl"),
    ("RunDiffusion/Juggernaut-XL-v9", "sdxl", "sdxl"), ("RunDiffusion/Juggernaut-XI-v11", "sdxl", "sdxl"),
    ("SG161222/RealVisXL_V4.0", "sdxl", "sdxl"), ("SG161222/RealVisXL_V5.0", "sdxl", "sdxl"),
    ("lodestones/Chroma1-HD", "flux", "chroma"), ("Alpha-VLLM/Lumina-Image-2.0", "flux", "lumina2"),
    ("HiDream-ai/HiDream-I1-Full", "flux", ""), ("Qwen/Qwen-Image-Edit-2511", "qwen-image", "qwen-image-edit-plus"),
    ("Qwen/Qwen-Image-2512", "qwen-image", "qwen-image"),
    ("Wan-AI/Wan2.1-VACE-14B-diffusers", "wan2.1", "wan2.1-vace-14b"),
    ("wan-ai/wan2.1-vace-1.3b", "wan2.1", "wan2.1-vace-1.3b"),
    ("black-forest-labs/FLUX.1-Depth-dev", "flux", "flux-control"), ("FLUX.1-Canny-dev", "flux", "flux-control"),
    ("Wan-AI/Wan2.1-VACE-14B", "wan2.1", "wan2.1-vace-14b"), ("krea/Krea-2-Turbo", "qwen-image", "krea2-turbo"),
    ("anima", "qwen-image", "anima"), ("Z-Image-Edit", "zimage", ""),
    ("someone/FLUX.1-dev", "flux", "flux"), ("stabilityai/stable-diffusion-3.5-large-turbo", "sd3", "sd35-large"),
]  # fmt: skip


@pytest.mark.parametrize("written, vae, pipeline", SHARED)
def test_models_that_have_anothers_vae(written, vae, pipeline):
    """They are answered for that VAE, and the answer says so."""
    found = predict(written, "decode", 64, 64, dtype="float32")
    assert found.model == vae and found.allocated == predict(vae, "decode", 64, 64, dtype="float32").allocated
    assert f" {written} has " in found.to_text(width=999)
    if pipeline:
        assert known_pipeline("pipeline", written) == pipeline
    else:
        with refused("pipeline"):
            predict_pipeline(written, 512, 512)


@pytest.mark.parametrize(
    "name, vae",
    [("black-forest-labs/FLUX.2-small-decoder", "flux2-small"), ("EQ-SDXL-VAE", "sdxl"), ("hidream", "flux")],
)
def test_a_refusal_names_a_command_that_works(name, vae, capsys):
    with refused("pipeline") as caught:
        predict_pipeline(name, 512, 512)
    command = re.search(r"vaemem (fits .* 1024x1024)", caught.value.advice)[1]
    assert main([*shlex.split(command), "--gpu", "H200"]) == 0 and vae in capsys.readouterr().out


def test_refusals_list_the_names_of_the_runtime():
    for runtime, known, missing in (("sd.cpp", "sdxl", "wan-14b"), ("comfyui", "zimage-turbo", "kolors")):
        with refused("pipeline", "'vqgan'") as unknown:
            predict_pipeline("vqgan", 512, 512, runtime=runtime)
        with refused("pipeline", f"'{missing}'") as other:
            vaemem.plan_pipeline(missing, 512, 512, runtime=runtime)
        assert known in unknown.value.wanted and missing not in unknown.value.wanted + other.value.wanted
        assert is_about(other.value, names=["runtime='diffusers'"])
    with refused("pipeline", "'Wan 2.1'") as several:
        predict_pipeline("Wan 2.1", 480, 832, frames=81)
    assert "wan-1.3b or wan-14b" in several.value.wanted
    with refused("components['transformer']", "'Q4_K_X'") as near:
        predict_pipeline("flux", 512, 512, gpu="T4", components={"transformer": "Q4_K_X"})
    assert "'Q4_K" in near.value.advice


def test_the_base_models_of_klein_guide():
    """Model cards of FLUX.2 klein's base models: 50 steps and guidance, which denoises twice; klein itself: 4."""
    base, klein = (predict_pipeline(name, 512, 512, gpu="H200") for name in ("FLUX.2-klein-base-4B", "klein"))
    assert (base.request.name, base.request.steps, klein.request.steps) == ("flux2-klein-base", 50, 4)
    twice, once = (next(phase for phase in p.phases if phase.name == "denoise") for p in (base, klein))
    assert twice.flops / 50 == 2 * once.flops / 4 and 0 < twice.allocated - once.allocated < 2**24


def test_a_pipeline_of_anothers_modules_says_so():
    said = predict_pipeline("RunDiffusion/Juggernaut-XL-v9", 512, 512, gpu="T4")
    assert said.pipeline == "sdxl" and said.phases == predict_pipeline("sdxl", 512, 512, gpu="T4").phases
    assert "Juggernaut-XL-v9 has SDXL's pipeline, and the answer is for that one" in said.to_text(width=999)
    assert predict_pipeline("SDXL", 512, 512, gpu="T4").notes == predict_pipeline("sdxl", 512, 512, gpu="T4").notes
    plan = vaemem.plan_pipeline("Illustrious", 512, 512, gpu="T4")
    assert "Illustrious has SDXL's pipeline, and the answer is for that one" in plan.to_text(width=999)


# Pipelines whose VAEs are recorded modules.
OWN_VAES = [
    "hunyuan-video-1.5", "ltx2.5", "minimax-h3", "sana", "sana-1.5-4.8b", "sana-1.5-1.6b", "sana-600m",
    "sana-sprint-0.6b", "sana-sprint-1.6b", "ltx-0.9.5", "cogvideox-5b", "cogvideox-2b", "hunyuan-video",
    "svd-xt",
]  # fmt: skip


@pytest.mark.parametrize("name", [*SAMPLE_SIZES, *PIPELINES, "black-forest-labs/FLUX.2-klein-4B", "klein"])
def test_every_name_is_known_to_all_commands(name):
    """A VAE's name, or a pipeline's, is answered or refused with what is known; never as an unknown one."""
    if name in OWN_VAES:
        with refused("model"):
            named_model("model", name)
    else:
        assert named_model("model", name.upper()) in SAMPLE_SIZES
    try:
        assert known_pipeline("pipeline", name.title()) in PIPELINES
    except ValueError as error:
        assert error.argument == "pipeline"
    called = find_called(name)
    assert called is None or called.pipeline or not called.why


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("MiniMaxAI/MiniMax-H3", "minimax-h3"),
        ("Lightricks/LTX-2.5", "ltx2.5"),
        ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "sana"),
        ("tencent/HunyuanVideo-1.5", "hunyuan-video-1.5"),
    ],
)
def test_a_pipeline_whose_vae_alone_is_not_known(name, pipeline):
    assert known_pipeline("pipeline", name) == pipeline
    with refused(names=["model: ", repr(name)]):
        named_model("model", name)


def test_the_vae_of_ltx_runs_but_is_predicted_within_its_pipeline():
    assert named_model("model", "Lightricks/LTX-2.3") == "ltx2.3" == known_pipeline("pipeline", "LTX-2.3")
    for name, known in (("ltx2.3", "ltx2.3"), ("Lightricks/LTX-2", "ltx2")):
        with refused("model", names=[known]):
            vaemem.predict(name, "decode", 512, 768)


@pytest.mark.parametrize(
    "name",
    [
        "Efficient-Large-Model/Sana_600M_512px_diffusers",
        "Efficient-Large-Model/SANA1.5_4.8B_512px_diffusers",
    ],
)
def test_a_model_of_another_architecture_says_so(name):
    for argument, call in (
        ("model", lambda: predict(name, "decode", 64, 64)),
        ("model", lambda: VAE.random(name)),
        ("pipeline", lambda: predict_pipeline(name, 64, 64)),
    ):
        with refused(argument, names=["AutoencoderDC"]):
            call()


@pytest.mark.parametrize(
    "words",
    [
        ["fits", "SDXL", "Decode", "512", "--runtime", "ComfyUI", "--gpu", "rtx 4090"],
        ["fits", "sdxl", "decode-tiled", "512", "--dtype", "FP16", "--os", "Linux"],
        ["fits", "Stable-Diffusion-XL-Base-1.0", "512", "--runtime", "Diffusers", "--offload", "Model"],
    ],
)
def test_the_command_line_does_not_mind_case(words, capsys):
    assert main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["fits", "sdxl", "decoed", "512"], r"op: expected one of encode, .*, got 'decoed'; did you mean 'decode'"),
        (["estimate", "sdxl", "decoed", "512"], r"op: expected encode or decode, got 'decoed'; did you mean 'decode'"),
        (["fits", "sdxl", "512", "--offload", "modle"], r"offload: expected one of .*'modle'; did you mean 'model'"),
        (["fits", "sdxl", "512", "--vae", "tield"], r"vae: expected one of .*'tield'; did you mean 'tiled'"),
        (["fits", "sdxl", "decode", "512", "--runtime", "comfy"], r"--runtime: .*'comfy'; did you mean 'comfyui'"),
    ],
)
def test_typos_get_the_nearest_name(words, said, capsys):
    assert main_status(words) == 2
    assert re.search(said, capsys.readouterr().err)


def main_status(words: list[str]) -> int:
    """A command's exit status, however it ends."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code
