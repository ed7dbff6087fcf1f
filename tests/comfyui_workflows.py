"""Print which workflow the node VRAM estimate recognises by models that ComfyUI's own loader makes, without memory.

Run it in ComfyUI's folder.
"""

import logging
import sys
from types import SimpleNamespace

sys.argv = [sys.argv[0], "--cpu"]
logging.disable(logging.CRITICAL)

import comfy.options

comfy.options.enable_args_parsing()

import comfy.model_detection
import comfy.supported_models
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.wan.vae import WanVAE

from vaemem.pipelines.comfyui_run import WORKFLOWS
from vaemem.pipelines.components import weights_of
from vaemem.pytorch import comfyui_vae

PREFIX = "diffusion_model."


def denoiser_of(name):
    """ComfyUI's model for a file with these tensors."""
    known = [one for one in weights_of(WORKFLOWS[name].denoiser) if one.name.startswith(PREFIX)]
    state = {one.name.removeprefix(PREFIX): torch.empty(one.shape, device="meta") for one in known}
    config = comfy.model_detection.model_config_from_unet(state, "")
    config.set_inference_dtype(torch.float32, None)
    return config.get_model({}, device="meta")


def vae_of(family):
    """ComfyUI's VAE of SD, of FLUX, which has no quant convs, of FLUX.2, or Wan's."""
    channels = {"sd": 4, "flux2": 32}.get(family, 16)
    params = {
        "double_z": True, "z_channels": channels, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    place = "comfy.ldm.modules.diffusionmodules.model."
    with torch.device("meta"):
        if family in ("sd", "flux2"):
            more = {"batch_norm_latent": True} if family == "flux2" else {}
            module = AutoencoderKL(ddconfig=params | more, embed_dim=channels)
        elif family == "wan":
            module = WanVAE(
                dim=96, z_dim=channels, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], dropout=0.0,
                temperal_downsample=[False, True, True],
            )  # fmt: skip
        else:
            module = AutoencodingEngine(
                regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
                encoder_config={"target": f"{place}Encoder", "params": params},
                decoder_config={"target": f"{place}Decoder", "params": params},
            )
    return SimpleNamespace(first_stage_model=module, device=torch.device("cpu"), latent_dim=3 if family == "wan" else 2)


class Manager:
    minimum_inference_memory = extra_reserved_memory = staticmethod(lambda: 1 << 30)


OWN = {"qwen-image": ["wan"], "flux2": ["flux2"]}  # an older ComfyUI's WanVAE is refused with other models
for name in WORKFLOWS:
    if name == "flux2" and not hasattr(comfy.supported_models, "Flux2"):
        continue
    model = denoiser_of(name)
    patcher = SimpleNamespace(model=model, model_size=lambda: 1 << 30, memory_required=model.memory_required)
    for family in ("sd", "flux", *OWN.get(name, [])):
        text = comfyui_vae.estimate(vae_of(family), 1024, 1024, "RTX 4090", patcher, Manager).text
        (run,) = (line.split()[1] for line in text.splitlines() if line.startswith("  run "))
        print(name, family, "sampler" if "\n\nSampler: " in text else run)
