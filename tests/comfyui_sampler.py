"""Compare vaemem's phase "denoise" with a recording of ComfyUI's own sampler and model, at its peak.

    COMFYUI=path/to/ComfyUI python tests/comfyui_sampler.py qwen-image

All of sample_euler, sampling_function and apply_model is ComfyUI's code. All weights are on the card.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import torch
from comfyui_modules import COMFYUI_MODULES
from modules import make

import vaemem
from vaemem.pipelines.comfyui_run import WORKFLOWS
from vaemem.pytorch import record

IMAGES, HEIGHT, WIDTH, STEPS = 2, 96, 64, 3
VECTORS = {"sdxl": 2816, "flux": 768}  # and their numbers
WIDTHS = {
    "sd15": 768,
    "sdxl": 2048,
    "qwen-image": 3584,
    "zimage": 2560,
    "zimage-turbo": 2560,
    "flux2": 15360,
}  # channels of the prompt's embeddings


def main(name):
    import comfy.conds
    import comfy.k_diffusion.sampling
    import comfy.model_management
    import comfy.samplers

    work = WORKFLOWS[name]
    p = vaemem.predict_pipeline(
        name, 8 * HEIGHT, 8 * WIDTH, IMAGES, steps=STEPS, gpu="H200", runtime="comfyui", dtype=work.dtypes[0]
    )
    tokens = max(p.request.tokens + work.template[1], work.least_joined)
    kind = comfy.conds.CONDCrossAttn if work.joins else comfy.conds.CONDRegular
    frames = (1,) if work.vae == "WanVAE" else ()
    channels = {"sd15": 4, "sdxl": 4, "flux2": 128}.get(name, 16)

    def prompt(number):
        """A prompt's embeddings in the host's memory; prompts that cannot run in one call differ in length."""
        conds = {"c_crossattn": kind(torch.zeros(1, tokens - (0 if work.joins else number), WIDTHS.get(name, 4096)))}
        if name in VECTORS:
            conds["y"] = comfy.conds.CONDRegular(torch.zeros(1, VECTORS[name]))
        if name.startswith("zimage"):
            conds["num_tokens"] = comfy.conds.CONDConstant(tokens - number)
        if name in ("flux", "flux2"):
            conds["guidance"] = comfy.conds.CONDRegular(torch.zeros(1))
        return [{"model_conds": conds, "uuid": number}]

    def run(model, x):
        """KSAMPLER.sample"""
        positive, negative = prompt(0), prompt(1) if p.request.guidance else None
        noise, latent_image = x.clone(), x.clone()
        sigmas = x.new_zeros(STEPS + 1)

        def denoise(x, sigma):
            return comfy.samplers.sampling_function(model, x, sigma, negative, positive, 4.0 if negative else 1.0)

        scaled = model.model_sampling.noise_scaling(sigmas[0], noise, latent_image, False)
        comfy.k_diffusion.sampling.sample_euler(denoise, scaled, sigmas, disable=True)

    comfy.model_management.get_free_memory = lambda *_: 1 << 50
    model = make(COMFYUI_MODULES[work.denoiser.partition("/")[2]], getattr(torch, work.dtypes[0]))
    model.current_patcher = Patcher()
    x = torch.empty(IMAGES, channels, *frames, HEIGHT // work.packed, WIDTH // work.packed, device="meta")
    recorded = record(model, x, call=run).trace
    held = [
        one.bytes
        for one in p.phases[1].peak_tensors
        if not one.name.startswith(("weights of", "[rounded")) and not one.name.endswith("[workspace]")
    ]
    real, ours = peak_of(recorded), sum(held)
    print(name, "peaks in bytes, ComfyUI's and ours:", real, ours)
    assert real == ours


class Patcher:
    def prepare_state(self, timestep):
        pass

    def apply_hooks(self, hooks):
        return {}


def peak_of(trace):
    live, peak, sizes = 0, 0, {}
    for kind, number, size, *_ in trace.steps:
        if kind == "take":
            sizes[number] = size
            live += size
            peak = max(peak, live)
        elif kind == "give":
            live -= sizes.pop(number, 0)
    return peak


if __name__ == "__main__":
    main(sys.argv[1])
