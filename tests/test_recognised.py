"""What a file is recognised as, by most of its tensors and a checkpoint's other ones; and what is no weights file."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from engine import images, latents
from errors import refused
from safetensors import numpy as safetensors_numpy
from weights_files import SMALL, make, respell, same, tensors_of, write

from vaemem import VAE, _core
from vaemem.__main__ import main
from vaemem.engine import layouts, weights

pytestmark = [pytest.mark.core, pytest.mark.python]

WAN = ("qwen-image", "wan2.2")


def shapes_of(name: str, layout: str = "diffusers") -> dict[str, tuple[int, ...]]:
    arch = _core.models()[name]
    shapes = dict(_core.Model(arch).tensors)
    spelt = layouts.spell(shapes, layout, len(arch["block_out_channels"]), "", arch["layers_per_block"])
    return {spelt[tensor]: shape for tensor, shape in shapes.items()}


def joined(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * shape[1], *shape[2:]) if len(shape) == 5 else shape


def cut(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As of a model of images, into which one frame's filters were put."""
    return shape[:3] if name.endswith("gamma") else shape[:2] + shape[3:] if len(shape) == 5 else shape


@pytest.mark.parametrize("layout", ["diffusers", "wan"])
@pytest.mark.parametrize("name", WAN)
def test_videos_models_in_other_forms(name, layout):
    """Filters with joined sides are the same model; those of one frame alone make one without slices."""
    arch, shapes = _core.models()[name], shapes_of(name, layout)
    assert layouts.detect({n: joined(n, shape) for n, shape in shapes.items()}) == (layout, "", arch)
    found = layouts.detect({n: cut(n, shape) for n, shape in shapes.items()})[2]
    assert found == arch | {"name": "custom", "slices": False}


def test_filters_cut_out_of_a_video_model_give_the_same_images(tmp_path):
    small = _core.models()["qwen-image"] | {"block_out_channels": (16, 32, 32, 32)}
    vae = VAE.random(config=small)
    tensors = {name: vae._core.get_tensor(name) for name, _ in vae._core.tensors}
    flat = {n: t[:, :, -1] if t.ndim == 5 else t.reshape(cut(n, t.shape)) for n, t in tensors.items()}
    again = VAE.load(write(tmp_path / "a.safetensors", flat), config=small | {"slices": False})
    assert np.array_equal(again.decode(latents(vae, 4, 6)), vae.decode(latents(vae, 4, 6)))
    assert np.array_equal(again.encode(images(32, 48)).mean, vae.encode(images(32, 48)).mean)


def test_a_model_of_other_widths_is_not_named():
    """A quarter of every width, as a pruned one has."""
    other = {n: (-(-shape[0] // 4), *shape[1:]) for n, shape in shapes_of("qwen-image").items()}
    with refused(names=["config="]):
        layouts.detect(other)
    narrow = {n: (-(-shape[0] // 2), *shape[1:]) for n, shape in shapes_of("hunyuanimage-2.1").items()}
    with refused(names=["config="]):
        layouts.detect(narrow)


@pytest.mark.parametrize("parts", ["all", "decoder"])
def test_a_decoder_of_larger_images_is_refused_by_name(parts):
    shapes = shapes_of("qwen-image", "wan")
    shapes |= {"decoder.head.2.weight": (12, 96, 3, 3, 3), "decoder.head.2.bias": (12,)}
    shapes = {n: shape for n, shape in shapes.items() if parts == "all" or layouts.half_of(n) == parts}
    with refused("decoder.head.2.weight"):
        layouts.detect(shapes, parts)
    core = _core.Model(_core.models()["qwen-image"] | {"out_channels": 12, "name": "custom"}, "decoder")
    assert dict(core.tensors)["decoder.conv_out.weight"][0] == 12  # as the message advises


@pytest.mark.parametrize(
    ("mark", "model"),
    [
        ("conditioner.embedders.0.transformer.text_model.final_layer_norm.bias", "sdxl"),  # the base model
        ("conditioner.embedders.0.model.ln_final.bias", "sdxl"),  # the refiner
        ("cond_stage_model.transformer.text_model.final_layer_norm.bias", "sd15"),
        ("edm_mean", "playground-v2.5"),
        ("some.other.tensor", "sd"),
        ("model.diffusion_model.joint_blocks.0.context_block.attn.proj.bias", "sd"),  # of a model with other latents
    ],
)
def test_a_whole_checkpoint_tells_its_model(mark, model):
    shapes = {f"first_stage_model.{n}": shape for n, shape in shapes_of("sdxl", "ldm").items()}
    shapes["conditioner.embedders.1.model.ln_final.bias" if mark == "edm_mean" else mark] = (1,)
    assert layouts.detect(shapes | {mark: (1,)})[2]["name"] == model


@pytest.mark.parametrize(("mark", "model"), [("joint_blocks", "sd3"), ("double_blocks", "flux"), ("layers", "flux")])
def test_models_with_16_latents_are_told_apart(mark, model):
    shapes = {f"vae.{n}": shape for n, shape in shapes_of("flux", "bfl").items()}
    found = layouts.detect(shapes | {f"model.diffusion_model.{mark}.0.weight": (1,)})[2]
    assert found == _core.models()[model]


WRAPPERS = ("state_dict", "model", "ema", "vae")


@pytest.mark.parametrize("keys", [*((key,) for key in WRAPPERS), ("model", "vae"), ("ema", "state_dict", "model")])
def test_tensors_under_the_names_that_programs_give_them(tmp_path, keys):
    model = make()
    state = tensors_of(model)
    nested = state
    for key in reversed(keys):
        nested = {key: nested, "epoch": 3, "optimizer": {"a": np.zeros(3, np.float32)}}
    same(weights.load(nested), state)
    path = write(tmp_path / "a.safetensors", state, "".join(f"{key}." for key in keys))
    same(weights.load(path), state)
    torch = pytest.importorskip("torch")

    def tensors(value):
        if isinstance(value, dict):
            return {name: tensors(one) for name, one in value.items()}
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    torch.save(tensors(nested), tmp_path / "a.ckpt")
    same(weights.load(tmp_path / "a.ckpt"), state)


def test_averages_come_before_the_last_step():
    average, last = tensors_of(make(seed=1)), tensors_of(make(seed=2))
    same(weights.load({"state_dict": last, "ema": average, "global_step": 3}), average)
    same(weights.load({"state_dict": last, "ema": {"decay": np.float32(0.9)}}), last)


def test_mappings_that_hold_themselves():
    around = {"epoch": 1}
    around |= {"model": around, "ema": around, "vae": {"model": around} | tensors_of(make())}
    same(weights.load(around), tensors_of(make()))
    deep = tensors_of(make())
    for _ in range(1000):
        deep = {"model": deep}
    with refused("path"):
        weights.load(deep)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_fp8(tmp_path, dtype, capsys):
    """`info` shows what `load` reads."""
    narrow = {name: tensor.astype(dtype) for name, tensor in tensors_of(make()).items()}
    path = tmp_path / "a.safetensors"
    safetensors_numpy.save_file(narrow, path)
    same(weights.load(path), {name: tensor.astype(np.float32) for name, tensor in narrow.items()})
    same(weights.load(narrow), {name: tensor.astype(np.float32) for name, tensor in narrow.items()})
    assert main(["info", str(path)]) == 0
    assert "tensors of F8_E" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["dtype", "missing", "extra"])
def test_info_refuses_what_load_refuses(tmp_path, fault, capsys):
    tensors = respell(tensors_of(make(SMALL)), "ldm")
    if fault == "dtype":
        tensors["decoder.conv_in.bias"] = tensors["decoder.conv_in.bias"].astype(np.float64)
    elif fault == "missing":
        del tensors["decoder.conv_in.bias"]
    else:
        tensors["decoder.scale_weight"] = np.ones(1, np.float32)
    path = write(tmp_path / "a.safetensors", tensors)
    with refused("path") as caught:
        weights.load(path)
    assert main(["info", str(path)]) == 2
    assert str(caught.value) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.safetensors", "a.gguf", "a.pth"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 334643268\n", "a git-lfs pointer"),
        (b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "a web page"),
        (b"\n<html lang='en'>", "a web page"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "a picture"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(99), "a picture"),
        (b"RIFF\x10\0\0\0WEBPVP8 " + bytes(99), "a picture"),
    ],
)
def test_what_people_take_for_weights(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    for read in (weights.load, weights.look, weights.tensor_types):
        with refused("path", names=[name, what]):
            read(tmp_path / name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the Hub, empty as yet."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub"


def test_a_repository_that_was_downloaded(hub, monkeypatch):
    with refused("path", kind=FileNotFoundError):
        VAE.load("someone/a-vae")
    model = make()
    folder = hub / "models--someone--a-vae"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    with refused("path", names=["a-vae", "download someone/a-vae"], kind=FileNotFoundError):  # and no files of it
        VAE.load("someone/a-vae")
    weights.save(model, folder / "snapshots" / "abc")
    same(weights.load("someone/a-vae"), tensors_of(model))
    assert VAE.load("someone/a-vae").arch["block_out_channels"] == SMALL["block_out_channels"]
    assert weights.look("someone/a-vae").file.parent.name == "abc"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.parent / "elsewhere"))
    with refused("path", kind=FileNotFoundError):
        VAE.load("someone/a-vae")
    (folder / "refs" / "main").write_text("../../secret")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    with refused("path", kind=FileNotFoundError):
        VAE.load("someone/a-vae")
    with refused("path", kind=FileNotFoundError):
        VAE.load("no/such/file.safetensors")
