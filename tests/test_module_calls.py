"""The modules are recorded with the arguments that diffusers' own pipelines give them."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
if not RECORDING.exists():
    pytest.skip("the sources are not here", allow_module_level=True)
sys.path.insert(0, str(RECORDING))

import modules
import torch_pipelines

from vaemem.pipelines.components import PIPELINES

HEIGHT, WIDTH = 48, 32  # of torch_pipelines.pictures


def heard(pipe, role: str, run) -> tuple:
    """The arguments of a component's first call."""
    calls = []
    hook = getattr(pipe, role).register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    run()
    hook.remove()
    return calls[0]


def latent(pipe) -> dict[str, int]:
    return {"h": HEIGHT // pipe.vae_scale_factor, "w": WIDTH // pipe.vae_scale_factor}


def described(value):
    """Arguments without what is None: tensors as dtype, sides but for the channels of rows, and whether dense."""
    if isinstance(value, torch.Tensor):
        sides = value.shape if value.dim() > 3 else value.shape[:-1]
        return value.dtype, tuple(sides), value.is_contiguous()
    if isinstance(value, dict):
        return {name: described(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    return value


@pytest.mark.parametrize(
    ("name", "role", "recorded", "n"),
    [
        ("sd", "text_encoder", "clip-l", 1),
        ("sd", "unet", "sd15-unet", 2),
        ("sd", "text_encoder", "openclip-h", 1),
        ("sd", "unet", "sd21-unet", 2),
        ("sdxl", "text_encoder", "clip-l-sdxl", 1),
        ("sdxl", "text_encoder_2", "openclip-g", 1),
        ("sdxl", "unet", "sdxl-unet", 2),
        ("sd-refiner", "text_encoder_2", "openclip-g", 1),
        ("sd-refiner", "unet", "sdxl-refiner-unet", 2),
        ("flux", "text_encoder", "clip-l-flux", 1),
        ("flux", "text_encoder_2", "t5-xxl", 1),
        ("flux", "transformer", "flux-schnell-transformer", 1),
        ("flux dev", "transformer", "flux-transformer", 1),
        ("kontext", "transformer", "flux-transformer", 1),
        ("fill", "transformer", "flux-fill-transformer", 1),
        ("sd3", "text_encoder", "clip-l-sd3", 1),
        ("sd3", "text_encoder_2", "openclip-g", 1),
        ("sd3", "text_encoder_3", "t5-xxl-sd3", 1),
        ("sd3", "transformer", "sd3-transformer", 2),
        ("chroma", "transformer", "chroma-transformer", 1),
        ("qwen", "text_encoder", "qwen2.5-vl-7b", 1),
        ("qwen", "transformer", "qwen-image-transformer", 1),
        ("pixart", "text_encoder", "t5-xxl-masked", 1),
        ("pixart", "transformer", "pixart-sigma-transformer", 2),
    ],
)
def test_calls_are_the_pipelines(name, role, recorded, n, tmp_path):
    model, _, dev = name.partition(" ")
    pipe = (torch_pipelines.PIPELINES | torch_pipelines.LATER)[model](tmp_path)
    if model == "sd":  # SD 1.5's own
        pipe.scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    if dev:
        config = {**pipe.transformer.config, "guidance_embeds": True, "_use_default_values": []}
        pipe.transformer = diffusers.FluxTransformer2DModel.from_config(config)
    pipe.to(torch.bfloat16)
    args, kwargs = heard(pipe, role, lambda: torch_pipelines.pictures(pipe, model, "latent"))
    joined = torch_pipelines.MAX_LENGTH if (model, role) == ("sd3", "transformer") else 0  # CLIP's tokens
    sizes = {"n": n, "t": torch_pipelines.MAX_LENGTH + joined, **latent(pipe)}
    sizes["h"] *= 2 if model == "kontext" else 1  # the image's tokens too
    want, named = modules.MODULES[recorded].call(sizes, torch.bfloat16)
    assert described(args) == described(want)
    assert described(kwargs) == described(named)


def test_z_image_is_called_as_its_pipeline_does():
    """Latents without their first dimension, prompts that are not padded, in lists."""
    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(
        dim=64, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32, axes_dims=[8, 12, 12]
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    vae = torch_pipelines.autoencoder("flux")
    pipe = diffusers.ZImagePipeline(scheduler, vae, None, None, transformer).to(torch.bfloat16)
    prompts = [torch.zeros(9, 32, dtype=torch.bfloat16) for _ in range(2)]
    how = {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 2, "guidance_scale": 0.0, "output_type": "latent"}
    pipe.set_progress_bar_config(disable=True)
    for scale, images in ((0.0, 2), (4.0, 4)):  # Z-Image guides, and Z-Image-Turbo does not
        how |= {"guidance_scale": scale, "negative_prompt_embeds": prompts}
        args, kwargs = heard(pipe, "transformer", lambda: pipe(prompt_embeds=prompts, **how))  # noqa: B023
        want, named = modules.MODULES["zimage-transformer"].call({"n": images, "t": 9, **latent(pipe)}, torch.bfloat16)
        assert described(args) == described(want) and described(kwargs) == described(named)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_longest_prompt_is_the_one_that_its_call_accepts(name):
    kind = getattr(diffusers, PIPELINES[name].class_name, None)
    if kind is None or "dummy" in kind.__module__:  # that of a package which is not there
        pytest.skip(f"this diffusers has no {PIPELINES[name].class_name}")
    refuses = re.search(r"max_sequence_length > (\d+)", inspect.getsource(kind))
    assert PIPELINES[name].longest == (int(refuses[1]) if refuses else 0)
