"""Weights that are in memory or in a pipeline's directory, and files that are none of safetensors."""

import re

import numpy as np
import pytest
from errors import refused
from weights_files import CONFIGS, SMALL, autoencoder, make, respell, same, tensors_of

from vaemem import VAE
from vaemem.engine import weights

pytestmark = [pytest.mark.core, pytest.mark.python]


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_a_state_dict_of_arrays(prefix):
    model = make()
    state = {prefix + name: t for name, t in respell(tensors_of(model), "ldm").items()}
    state["global_step"] = 3
    same(weights.load(state), tensors_of(model))
    same(weights.load({"state_dict": state, "epoch": 1}), tensors_of(model))
    vae = VAE.load(state, config=SMALL)
    same(weights.load(vae.state_dict()), tensors_of(model))
    state.pop(prefix + "encoder.conv_in.bias")
    with refused("path", place="state dict", names=[prefix, "encoder.conv_in.bias"]):
        VAE.load(state)
    state[prefix + "encoder.conv_in.bias"] = np.zeros(32)
    with refused("path", names=[prefix, "encoder.conv_in.bias"]):
        VAE.load(state)
    with refused("path", place="state dict"):
        VAE.load({})
    for state in ({1: np.zeros(3)}, {"decoder.conv_in.weight": 5}):  # no names, no arrays
        with refused("path", place="state dict"):
            VAE.load(state)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_module(dtype):
    torch = pytest.importorskip("torch")
    module = autoencoder({**CONFIGS["flux_like"], "sample_size": 72}).to(getattr(torch, dtype))
    vae = VAE.load(module)
    same(vae._core, {name: tensor.float().numpy() for name, tensor in module.state_dict().items()})
    assert vae.arch["scaling_factor"] == 0.5 and vae.sample_size == 72
    same(VAE.load(module.state_dict(), config=module.config)._core, tensors_of(vae._core))
    assert VAE.load(module, config=CONFIGS["flux_like"]).sample_size == 32
    assert VAE.load(module, parts="decoder").parts == "decoder"


def test_a_pipelines_directory(tmp_path):
    vae = VAE.random(config={**SMALL, "sample_size": 96})
    vae.save(tmp_path / "vae")
    with refused("path", "none", kind=FileNotFoundError):
        VAE.load(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    found = VAE.load(tmp_path)
    assert found.sample_size == 96
    same(found._core, tensors_of(vae._core))


@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_without_plain_numbers_are_named():
    torch = pytest.importorskip("torch")
    state, name = tensors_of(make()), "decoder.conv_in.weight"
    weight = torch.from_numpy(state[name])
    for odd, got in (
        (weight.to("meta"), "Tensor (torch.float32, torch.strided, meta)"),
        (weight.to_sparse(), "Tensor (torch.float32, torch.sparse_coo, cpu)"),
        (torch.complex(weight, weight).conj().imag, "resolve_neg"),
        (torch.masked.masked_tensor(weight, weight > 0), "MaskedTensor"),
        (torch.nested.nested_tensor([weight[0], weight[1, :1]]), "Tensor"),
        (torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "qint8"),
        (weight.to(torch.complex64), "complex64"),
        (np.ma.masked_array(state[name], state[name] > 0), f"np.ma.filled({name}, 0)"),
    ):
        with refused(names=[name, got]):
            weights.load(state | {name: odd})
    for odd in (torch.nn.Parameter(weight), np.ma.masked_array(state[name]), np.asfortranarray(state[name])):
        same(weights.load(state | {name: odd}), state)


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "old.ckpt"])
def test_a_pickle_says_how_to_convert_it(tmp_path, name):
    """One of an old PyTorch's. What it says is run, and gives the file."""
    torch = pytest.importorskip("torch")
    module = autoencoder(SMALL)
    state = module.state_dict()
    saved = {"state_dict": state} if name == "old.ckpt" else state
    torch.save(saved, tmp_path / name, _use_new_zipfile_serialization=False)
    with refused("path") as caught:
        VAE.load(tmp_path / name)
    said = re.search(r"VAE\.load\(torch.*\.safetensors'\)", str(caught.value))[0]
    exec(said, {"VAE": VAE, "torch": torch})
    want = {n: t.numpy() for n, t in state.items()}
    same(VAE.load((tmp_path / name).with_suffix(".safetensors"))._core, want)


def test_a_directory_with_a_pickle_alone(tmp_path):
    pytest.importorskip("torch")
    module = autoencoder({**SMALL, "scaling_factor": 0.5})
    module.save_pretrained(tmp_path, safe_serialization=False)
    vae = VAE.load(tmp_path)
    assert vae.arch["scaling_factor"] == 0.5
    same(vae._core, {n: t.numpy() for n, t in module.state_dict().items()})
    (tmp_path / "diffusion_pytorch_model.bin").rename(tmp_path / "other.bin")
    with refused("path", names=["other.bin"], kind=FileNotFoundError):
        VAE.load(tmp_path)
