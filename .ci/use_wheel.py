"""Use an installed vaemem once: decode, predict, read its data. Print the platform and the backends."""

import platform
import sys

import numpy as np

import vaemem

LEVELS = 3
SMALL = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": (32, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * LEVELS,
    "up_block_types": ("UpDecoderBlock2D",) * LEVELS,
    "layers_per_block": 1,
    "latent_channels": 4,
}

vae = vaemem.VAE.random(seed=0, config=SMALL)
image = vae.decode(np.ones((1, 4, 8, 8), np.float32))
assert image.shape == (1, 3, 32, 32) and np.isfinite(image).all()
assert vae.last_run.peak_bytes == vae.estimate("decode", 32, 32).peak_bytes
assert vaemem.predict("sdxl", "decode", 1024, 1024, dtype="float16", gpu="RTX 4060").verdict == "fits"
assert len(vaemem.seed_table()) == 98
print(platform.machine(), sys.platform, np.__version__)
for row in vaemem.backends():
    print(row["name"], row["why"])
