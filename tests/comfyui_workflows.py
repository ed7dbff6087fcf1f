"""Print which workflow the node VRAM estimate recognises by models that ComfyUI's own loader makes, without memory.

Run it in ComfyUI's folder.
"""

import json
import logging
import sys
from importlib import resources
from types import SimpleNamespace

sys.argv = [sys.argv[0], "--cpu"]
logging.disable(logging.CRITICAL)

import comfy.options

comfy.options.enable_args_parsing()

import comfy.model_detection
import comfy.sd
import torch

from vaemem.pipelines.components import is_vae, weights_of
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.pytorch import comfyui_vae

PREFIX = "diffusion_model."
OTHERS = {"sd15": "flux", "sdxl": "flux"}  # a workflow with another VAE; otherwise sd15


def denoiser_of(name):
    """ComfyUI's model for a file with these tensors."""
    denoiser = WORKFLOWS[name].parts[WORKFLOWS[name].denoiser]
    known = [one for one in weights_of(denoiser) if one.name.startswith(PREFIX)]
    state = {one.name.removeprefix(PREFIX): torch.empty(one.shape, device="meta") for one in known}
    config = comfy.model_detection.model_config_from_unet(state, "")
    config.set_inference_dtype(torch.float32, None)
    return config.get_model({}, device="meta")


def row_of(name):
    row = json.loads((resources.files("vaemem") / "data" / "workflows" / f"{name}.json").read_text("utf-8"))
    return {**(row_of(row["like"]) if "like" in row else {}), **row}


def vae_of(name):
    """ComfyUI's VAE for a workflow's file."""
    with torch.device("meta"):
        state = {key: torch.empty(shape) for key, shape in row_of(name)["vae"].items()}
        return comfy.sd.VAE(sd=state, device=torch.device("cpu"))


class Manager:
    minimum_inference_memory = extra_reserved_memory = staticmethod(lambda: 1 << 30)


for name, known in WORKFLOWS.items():
    if not is_vae(known.parts["vae"]):
        continue
    model = denoiser_of(name)
    patcher = SimpleNamespace(model=model, model_size=lambda: 1 << 30, memory_required=model.memory_required)
    for other in (name, OTHERS.get(name, "sd15")):
        text = comfyui_vae.estimate(vae_of(other), 1024, 1024, "RTX 4090", patcher, Manager).text
        (run,) = (line.split()[1] for line in text.splitlines() if line.startswith("  run "))
        print(name, other, "sampler" if "\n\nSampler: " in text else run)
