"""Names as people write them: of models, pipelines and types of numbers, and what a refusal says."""

import json

import ml_dtypes
import numpy as np
import pytest

import vaemem
from vaemem import VAE, predict, predict_pipeline, sweep
from vaemem._common import DTYPES, SPELT_DTYPES, choose, letters, meant
from vaemem.engine.configs import SAMPLE_SIZES, SPELT_MODELS, config_of, known_arch, named_model
from vaemem.pipelines.components import PIPELINES, SPELT_PIPELINES
from vaemem.prediction.process import SimulatedProcess


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
    assert {row["dtype"] for row in sweep("SDXL", "decode", 64, source="predicted", dtypes=["fp16", "bf16"])} == {
        "float16", "bfloat16",
    }  # fmt: skip
    assert {row["model"] for row in sweep("sd1.5", "decode", 64, source="estimated")} == {"sd15"}
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
        (
            lambda: predict("sdxxl", "decode", 64, 64),
            r"model: want one of sd15, .*, got 'sdxxl' \(the nearest is sdxl\)",
        ),
        (
            lambda: predict("stabilityai/sd-vae", "decode", 64, 64),
            "model: want one of sd15, .* a config.json, got 'stab",
        ),
        (lambda: predict("sdxl", "decode", 64, 64, float), "dtype: want one of float32, .*, got <class 'float'>"),
        (lambda: predict("sdxl", "decode", 64, 64, "fp8"), "dtype: want one of float32, float16, bfloat16, got 'fp8'"),
        (lambda: VAE.random("Flux3"), r"model: want one of .*, got 'Flux3' \(the nearest is flux2?\)"),
        (lambda: VAE.random(None), "model: want one of .*, got None"),
        (lambda: predict_pipeline("sdx", 512, 512), "pipeline: want one of .*, got 'sdx' .the nearest is sdxl"),
        (lambda: choose("x", "ab", "abc"), "x: want one of a, b, c, got 'ab'$"),
    ],
)
def test_refusals(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_no_name_means_two_things():
    # repositories that are called as the model is
    same = {
        "zimageturbo",
        "flux2klein9b",
        "qwenimage",
        "qwenimage21",
        "hunyuanimage21",
        "wan22",
        "taesd",
        "taef1",
        "taef2",
    }
    for known, also in ((DTYPES, SPELT_DTYPES), (SAMPLE_SIZES, SPELT_MODELS), (PIPELINES, SPELT_PIPELINES)):
        plain = [letters(name) for name in known]
        assert len(set(plain)) == len(plain) and not set(also) & set(plain) - same
        assert set(also.values()) <= set(known) and all(letters(name) == name for name in also)
