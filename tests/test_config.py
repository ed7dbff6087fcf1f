"""config.json: diffusers' defaults, the known models, and what is refused."""

import json

import numpy as np
import pytest
from errors import refused
from weights_files import SMALL, autoencoder

from vaemem import VAE, ArgumentError, SimulatedProcess, _core, predict
from vaemem.engine import configs

pytestmark = [pytest.mark.core, pytest.mark.python]


def test_config_defaults_are_diffusers():
    theirs = dict(autoencoder({}).config)
    ours = configs.read_config({})
    assert configs.read_config(theirs) == ours
    assert all(ours[k] == (theirs[k] or 0) for k in ours.keys() & theirs.keys() - {"block_out_channels"})
    assert ours["block_out_channels"] == tuple(theirs["block_out_channels"])


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_config_names_the_known_models(tmp_path, name):
    arch = _core.models()[name]
    config = configs.config_of(arch)
    assert config["scaling_factor"] == {"sd15": 0.18215, "sdxl": 0.13025, "flux": 0.3611}[name]
    assert config["shift_factor"] == {"flux": 0.1159}.get(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (config, arch, tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert configs.read_config(given) == arch
    assert configs.read_config({**config, "scaling_factor": 0.2})["name"] == "custom"
    assert configs.read_config({**config, "scaling_factor": None})["scaling_factor"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_class_name", "AutoencoderDC"),
        ("act_fn", "relu"),
        ("down_block_types", ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"]),
        ("up_block_types", ["UpDecoderBlock2D"]),
        ("up_block_types", "UpDecoderBlock2D"),
        ("latents_std", [1.0] * 4),
        ("block_out_channels", 32),
        ("block_out_channels", []),
        ("block_out_channels", [32, -64]),
        ("layers_per_block", 1.5),
        ("layers_per_block", True),
        ("latent_channels", 0),
        ("in_channels", "3"),
        ("use_quant_conv", 1),
        ("scaling_factor", 0),
        ("scaling_factor", float("nan")),
        ("shift_factor", "0"),
        ("norm_eps", 1e-5),
        ("block_out_chanels", [32]),
    ],
)
def test_config_refused_by_key(key, value):
    with refused("config", names=[key]):
        configs.read_config({**SMALL, key: value})


def test_a_family_beside_a_class_of_another_is_refused():
    with refused("config", "'wan'", "family"):
        configs.read_config({**SMALL, "_class_name": "AutoencoderKL", "family": "wan"})


def test_config_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    with refused("config", "none", path=path, kind=FileNotFoundError):
        configs.read_config(tmp_path)
    for contents in (b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"act_fn": "gelu"}'):
        path.write_bytes(contents)
        with refused("config", path=path):
            configs.read_config(path)
    with refused("config", "int", kind=TypeError):
        configs.read_config(7)


FLUX2 = _core.models()["flux2-small"]
SIZES = [key for key, value in FLUX2.items() if type(np.atleast_1d(value).tolist()[0]) is int]


@pytest.mark.parametrize("key", SIZES)
def test_sizes_of_an_arch_that_are_none_are_refused_by_name(key):
    """By every function that takes an arch, and by the core itself. NumPy's integers are sizes."""
    value = FLUX2[key]
    sizes = tuple(map(np.int64, value)) if isinstance(value, tuple) else np.int64(value)
    floats = list(map(float, value)) if isinstance(value, tuple) else float(value)
    for take in (
        lambda arch: predict(arch, "decode", 64, 64).allocated,
        lambda arch: SimulatedProcess().load(arch).nbytes,
        lambda arch: VAE.random(config=arch, parts="decoder").parameters,
        lambda arch: _core.Model(arch, "decoder").tensors,
    ):
        assert take(FLUX2 | {key: sizes}) == take(FLUX2)
        for bad in (floats, [None], {}, "x", 1.5, -1, [-1], np.float32(2)):
            with pytest.raises(ArgumentError) as caught:
                take(FLUX2 | {key: bad})
            assert caught.value.argument in ("config", "arch")


def test_decimals_are_those_of_single_precision():
    """The shortest decimal with the same single, as NumPy writes it; subnormal numbers and the largest one too."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F800000, 2000, np.uint32)  # of all finite singles, as likely
    singles = [*bits.view(np.float32).tolist(), 0.0, 1e-45, configs.LARGEST]
    near = (np.array(singles) * (1 + rng.uniform(-1e-9, 1e-9, len(singles)))).clip(max=configs.LARGEST).tolist()
    for value in (*singles, *near, *(-one for one in singles)):
        assert configs._decimal(value) == float(str(np.float32(value)))
    assert configs.LARGEST == float(np.finfo(np.float32).max)
