"""Compare ComfyUI's decodes and encodes with vaemem's, with random weights of each family. Print the differences.

Run it in ComfyUI's folder. `UNKNOWN` are families that this ComfyUI's loader lacks.
"""

import logging
import sys
import tempfile
from pathlib import Path

sys.argv = [sys.argv[0], "--cpu"]
logging.disable(logging.CRITICAL)

import comfy.options

comfy.options.enable_args_parsing()

import comfy.ldm.hunyuan_video.vae
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management as manager
import comfy.sd
import comfy.utils
import torch
from comfy.ldm.models.autoencoder import AutoencodingEngine
from comfy.taesd.taesd import TAESD

import vaemem
from vaemem.pytorch import comfyui_vae

UNKNOWN = {"flux2": not hasattr(comfy.sd.VAE, "model_size")}  # before 0.4


def ours(model, layout):
    """Tensors of a model by the names of its authors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vae.safetensors"
        vaemem.VAE.random(model).save(path, layout=layout)
        return comfy.utils.load_torch_file(str(path))


def wan(module, **settings):
    given = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "dropout": 0.0}
    return module.WanVAE(temperal_downsample=[False, True, True], **given, **settings).state_dict()


def hunyuan():
    params = {
        "block_out_channels": [128, 256, 512, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "z_channels": 64,
        "num_res_blocks": 2, "ffactor_spatial": 32, "downsample_match_channel": True, "upsample_match_channel": True,
    }  # fmt: skip
    target = "comfy.ldm.hunyuan_video.vae."
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{target}Encoder", "params": params},
        decoder_config={"target": f"{target}Decoder", "params": params},
    ).state_dict()


FAMILIES = {  # its tensors, and the shape of its latents
    "sdxl": (lambda: ours("sdxl", "ldm"), (2, 4, 4, 6)),
    "flux": (lambda: ours("flux", "bfl"), (2, 16, 4, 6)),
    "flux2": (lambda: ours("flux2", "bfl"), (2, 128, 2, 3)),
    "wan": (lambda: wan(comfy.ldm.wan.vae, dim=96, z_dim=16), (1, 16, 1, 4, 6)),
    "wan2.2": (lambda: wan(comfy.ldm.wan.vae2_2, dim=160, z_dim=48), (1, 48, 1, 2, 3)),
    "wan-videos": (lambda: wan(comfy.ldm.wan.vae, dim=96, z_dim=16), (1, 16, 3, 4, 6)),
    "wan2.2-videos": (lambda: wan(comfy.ldm.wan.vae2_2, dim=160, z_dim=48), (1, 48, 3, 2, 3)),
    "hunyuanimage": (hunyuan, (2, 64, 1, 2)),
    "taesd": (lambda: TAESD(latent_channels=4).state_dict(), (2, 4, 4, 6)),
    "taef1": (lambda: TAESD(latent_channels=16).state_dict(), (2, 16, 4, 6)),
}


def fill(module):
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1 and weight[0].numel() > 1:
                weight.normal_(0, 0.7 / weight[0].numel() ** 0.5)
            else:
                weight.uniform_(0.5, 1.0)
        for name, numbers in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                numbers.uniform_(0.5, 1.0)


def ignore(done, total):
    pass


for name, (tensors, shape) in FAMILIES.items():
    if UNKNOWN.get(name):
        continue
    torch.manual_seed(0)
    vae = comfy.sd.VAE(sd=tensors())
    fill(vae.first_stage_model)
    with torch.inference_mode():
        z = torch.randn(shape)
        theirs = vae.decode(z)
        pixels = theirs.reshape(-1, *theirs.shape[-3:])
        decoded = comfyui_vae.decode_whole(vae, z, manager, ignore)
        encoded = comfyui_vae.encode_whole(vae, pixels, manager, ignore)
        latents = vae.encode(pixels)
    assert pixels.std() > 0.01 and latents.std() > 0.01 and encoded.shape == latents.shape == z.shape
    print(name, float((decoded - pixels).abs().max()), float((encoded - latents).abs().max()))
