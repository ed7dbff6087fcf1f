"""Small models and the files that other programs would make of them, for the tests of weights."""

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from vaemem import _core
from vaemem.engine import configs, layouts, weights

SMALL = {"block_out_channels": (32, 64), "layers_per_block": 1, "latent_channels": 4}
FLUX_LIKE = {"block_out_channels": (32, 96, 64), "latent_channels": 8, "use_quant_conv": False}
FLUX_LIKE.update(use_post_quant_conv=False, scaling_factor=0.5, shift_factor=0.25)
# a config per thing that the names depend on
CONFIGS = {
    "small": SMALL,
    "flux_like": FLUX_LIKE,
    "one_level": {"block_out_channels": (32,)},
    "deep": {"block_out_channels": (8, 8, 16, 16, 24), "layers_per_block": 3, "norm_num_groups": 8},
    "no_attention": {**SMALL, "mid_block_add_attention": False},
    "one_quant_conv": {**SMALL, "use_quant_conv": False},
    "channels": {**SMALL, "in_channels": 1, "out_channels": 2},
}


def make(config=SMALL, parts="all", seed=0):
    model = _core.Model(configs.read_config(config), parts)
    weights.random_tensors(model, seed)
    return model


def tensors_of(model):
    return {name: model.get_tensor(name) for name, _ in model.tensors}


def same(model, tensors):
    mine = tensors_of(model)
    assert mine.keys() == tensors.keys()
    for name, want in tensors.items():
        assert mine[name].shape == want.shape, name
        assert np.array_equal(mine[name].view(np.uint32), want.view(np.uint32)), name  # bit for bit


def write(path, tensors, prefix=""):
    """A file as other programs write it."""
    safetensors_numpy.save_file({prefix + n: np.ascontiguousarray(t) for n, t in tensors.items()}, path)
    return path


def respell(tensors, layout, levels=2):
    return {n: tensors[ours] for ours, n in layouts.spell(tensors, layout, levels).items()}


def autoencoder(config):
    diffusers = pytest.importorskip("diffusers")
    levels = len(config.get("block_out_channels", (64,)))
    return diffusers.AutoencoderKL(
        **config, down_block_types=["DownEncoderBlock2D"] * levels, up_block_types=["UpDecoderBlock2D"] * levels
    )
