"""What the engine's tests share: small architectures, models with weights, arrays of rows."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vaemem import VAE, _core
from vaemem.engine.arrays import HostArrays

# Every tensor of each differs; (24, 40, 72) has channels that fill no block of 16, and groups of 3, 5 and 9.
SMALL = {
    "sd": {"latent_channels": 4, "block_out_channels": (32, 64, 64), "norm_num_groups": 8},
    "flux": {
        "latent_channels": 16,
        "block_out_channels": (32, 64, 64),
        "norm_num_groups": 8,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.1159,
        "scaling_factor": 0.3611,
    },
    "odd": {"latent_channels": 3, "block_out_channels": (24, 40, 72), "norm_num_groups": 8, "layers_per_block": 1},
}
# Other models, small: groups of 3, 6 and 12 in FLUX.2's small decoder.
_FLUX2 = {"_class_name": "AutoencoderKLFlux2", "latent_channels": 8, "block_out_channels": (32, 64, 64)}
_FLUX2 |= {"layers_per_block": 1, "norm_num_groups": 8}
OTHERS = {
    "sd3": SMALL["flux"] | {"scaling_factor": 1.5305, "shift_factor": 0.0609},
    "cogview4": SMALL["flux"]
    | {
        "block_out_channels": (16, 64, 128),
        "layers_per_block": 3,
        "mid_block_add_attention": False,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
    },
    "playground": SMALL["sd"]
    | {
        "scaling_factor": 0.5,
        "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
        "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
    },
    "flux2": _FLUX2,
    "flux2-small": _FLUX2 | {"decoder_block_out_channels": (24, 48, 96)},
}
# Those of one frame of a video's VAE. Qwen's attention has 72 channels, so that q, k and v fill no whole blocks.
_FRAMES = {"num_res_blocks": 1, "temperal_downsample": [False, True], "z_dim": 4}
_FRAMES |= {"latents_mean": [-0.7571, -0.7089, -0.9113, 0.1075], "latents_std": [2.8184, 1.4541, 2.3275, 2.6558]}
FRAMES = {
    "wan": _FRAMES | {"_class_name": "AutoencoderKLWan", "base_dim": 16, "dim_mult": [1, 2, 4]},
    "qwen": _FRAMES | {"_class_name": "AutoencoderKLQwenImage", "base_dim": 24, "dim_mult": [1, 2, 3]},
}
# Residuals that are moved, with frames and without, from patches of an image, and around pixel shuffles.
_WIDE = {"latents_mean": [0.5, -0.25, 0, 1], "latents_std": [1.5, 0.5, 2, 1], "z_dim": 4, "num_res_blocks": 1}
FRAMES |= {
    "wan22": _WIDE
    | {"_class_name": "AutoencoderKLWan", "base_dim": 16, "decoder_base_dim": 24, "dim_mult": [1, 1]}
    | {"in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True, "temperal_downsample": [True]},
    "qwen21": _WIDE
    | {"_class_name": "AutoencoderKLQwenImage21", "base_dim": 12, "decoder_base_dim": 20, "dim_mult": [1, 2, 2]}
    | {"in_channels": 3, "out_channels": 3, "temperal_downsample": [False, True]},
}
OTHERS |= FRAMES
OTHERS["hunyuan"] = {"_class_name": "AutoencoderKLHunyuanImage", "in_channels": 3, "out_channels": 3}
OTHERS["hunyuan"] |= {"latent_channels": 8, "block_out_channels": (32, 64, 64), "layers_per_block": 1}
OTHERS["hunyuan"] |= {"spatial_compression_ratio": 4, "scaling_factor": 0.75289, "sample_size": 32}
# Tiny autoencoders: TAESD's, and one with norms in the smallest level, as TAEF2 has them; its channels fill no blocks.
_TINY = {"_class_name": "AutoencoderTiny", "num_encoder_blocks": [1, 2, 2], "num_decoder_blocks": [2, 2, 1]}
TINY = {
    "tiny": _TINY | {f"{half}_block_out_channels": [32] * 3 for half in ("encoder", "decoder")},
    "tiny-normed": _TINY
    | {"encoder_block_out_channels": [40] * 3, "decoder_block_out_channels": [24] * 3}
    | {"latent_channels": 8, "use_midblock_gn": True},
}
OTHERS |= TINY
BACKENDS = [name for name, usable in _core.backends() if usable]


def run_core(core: _core.Model, op: str, data: np.ndarray, threads: int = 1, **how) -> tuple[np.ndarray, dict]:
    """The result and the record of a run of the core's on arrays in host memory. how: arguments of the core's run."""
    arrays = HostArrays(core.arch, op, data, "float", None)
    arrays.request["threads"] = threads
    return arrays.run(core, True, **how)


def config(name: str) -> dict:
    """A config.json with what the small models have in common."""
    settings = (SMALL | OTHERS)[name]
    if name in FRAMES | TINY or name == "hunyuan":
        return dict(settings)
    levels = len(settings["block_out_channels"])
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "layers_per_block": 2,
        **settings,
    }


def small_vae(name: str = "sd", seed: int = 0, **kwargs) -> VAE:
    return VAE.random(seed=seed, config=config(name), **kwargs)


def latents(vae: VAE, h: int, w: int, batch: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, vae.arch["latent_channels"], h, w), dtype=np.float32)


def images(h: int, w: int, batch: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (batch, 3, h, w)).astype(np.float32)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative Frobenius error; NaN where got has a NaN, so that it passes no bound."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def up16(n: int) -> int:
    return -(-n // 16) * 16


def to_rows(x: np.ndarray) -> np.ndarray:
    """(c, h, w) -> (h, c/16, w, 16), channels beyond c zero."""
    c, h, w = x.shape
    padded = np.zeros((up16(c), h, w), np.float32)
    padded[:c] = x
    return np.ascontiguousarray(padded.reshape(-1, 16, h, w).transpose(2, 0, 3, 1))


def from_rows(rows: np.ndarray, c: int, h: int, w: int) -> np.ndarray:
    return rows.reshape(h, up16(c) // 16, w, 16).transpose(1, 3, 0, 2).reshape(-1, h, w)[:c]


def pack(weight: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """(out, in, k, k) -> [out/16][in/16][k*k][min(16, in)][16], in halves [out/16][in/32][k*k][pairs][16][2], as
    kernels/filters.c says."""
    out, in_, k, _ = weight.shape
    each = 1 if dtype == "float32" else 2
    steps = math.ceil(in_ / each)
    depth, blocks = min(16, steps), math.ceil(steps / 16)
    padded = np.zeros((up16(out), blocks * depth * each, k * k), np.float32)
    padded[:out, :in_] = weight.reshape(out, in_, k * k)
    packed = padded.reshape(-1, 16, blocks, depth, each, k * k).transpose(0, 2, 5, 3, 1, 4)
    if dtype == "bfloat16":
        return np.ascontiguousarray(packed.astype(ml_dtypes.bfloat16)).view(np.uint16)
    return np.ascontiguousarray(packed.astype(dtype))


def pad16(v: np.ndarray) -> np.ndarray:
    return np.pad(v.astype(np.float32), (0, up16(len(v)) - len(v)))


# An AutoencoderKL of two levels: an image is twice its latent's size.
TWO_LEVELS = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
}
