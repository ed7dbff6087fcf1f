"""Tiny autoencoders: files as people have them, configs, what they are beside diffusers' class and the authors' own."""

from __future__ import annotations

import argparse
import collections
import functools
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from engine import BACKENDS, TINY, config, error, images, latents, run_core, small_vae
from errors import refused

from vaemem import VAE, Tiling, _core
from vaemem.engine import configs, layouts
from vaemem.engine.weights import look, tensor_types

pytestmark = pytest.mark.core

PARITY = 1e-5  # as test_other_vaes has it
SHIPPED = ["taesd", "taef1", "taef2"]


def tensors_of(vae: VAE) -> dict[str, np.ndarray]:
    return {name: vae._core.get_tensor(name) for name, _ in vae._core.tensors}


def authors(tensors: dict[str, np.ndarray], half: str = "") -> dict[str, np.ndarray]:
    """By the numbers of TAESD's authors; of one half without its name."""
    layout = f"taesd-{half}" if half else "taesd"
    spelt = layouts.spell(tensors, layout, 3)
    return {spelt[name]: tensor for name, tensor in tensors.items() if name.startswith(half)}


def same(one: VAE, other: VAE) -> bool:
    """Whether the halves that `one` has give the same bits."""
    parts = ("encode", "decode") if one.parts == "all" else ("decode" if one.parts == "decoder" else "encode",)
    given = {"encode": images(16, 24, 2), "decode": latents(one, 4, 6, 2)}
    runs = ([run_core(vae._core, op, given[op])[0] for vae in (one, other)] for op in parts)
    return all(np.array_equal(*results) for results in runs)


# ---- numbers ----


def test_moments_are_latents():
    vae, x = small_vae("tiny"), images(16, 24, 2)
    encoded = vae.encode(x)
    assert encoded.moments.shape == encoded.mean.shape == (2, 4, 4, 6) and encoded.logvar.shape == (2, 0, 4, 6)
    for drawn in (encoded.mode(), encoded.sample(), encoded.sample(3), vae.encode(x, scaled=True).sample(0)):
        assert np.array_equal(drawn, encoded.mean)
    assert vae.decode(encoded.mode(), scaled=True, output_type="uint8").shape == (2, 16, 24, 3)


def test_latents_are_bounded():
    """3 tanh(z / 3) of numbers however large, and padding that is zero behind it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    vae = small_vae("tiny")
    theirs = diffusers_vae(vae.arch, torch.float64, "cpu")
    theirs.load_state_dict({name: torch.from_numpy(tensor).double() for name, tensor in tensors_of(vae).items()})
    z = latents(vae, 5, 7) * np.geomspace(1e-3, 1e3, 35, dtype=np.float32).reshape(5, 7)
    with torch.no_grad():
        want = theirs.decode(torch.from_numpy(z).double()).sample.numpy()
    for backend in BACKENDS:
        assert error(run_core(vae._core, "decode", z, backend=backend)[0], want) <= PARITY


@pytest.mark.parametrize("name", TINY)
def test_tiles_are_parts(name):
    """Tiles are run alone, as bytes are: away from their borders numbers are those of the whole, where nothing is
    measured over the image."""
    vae = small_vae(name)
    z = latents(vae, 40, 8)
    tiled, whole = vae.decode(z, tiling=Tiling(128, overlap=0.5)), vae.decode(z)
    assert tiled.shape == whole.shape
    assert (error(tiled[:, :, :8], whole[:, :, :8].astype(np.float64)) <= PARITY) == (name == "tiny")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_halves(name, dtype):
    """As near to float32 as tests/gpu.py derives it for a GPU."""
    from gpu import LIMIT

    vae, half = small_vae(name), small_vae(name, dtype=dtype)
    z, x = latents(vae, 6, 10), images(24, 40)
    assert error(half.decode(z), vae.decode(z).astype(np.float64)) <= LIMIT[dtype]
    assert error(half.encode(x).mean, vae.encode(x).mean.astype(np.float64)) <= LIMIT[dtype]


def test_activations_that_float16_cannot_hold():
    """They are kept smaller then, by a power of two that every pass takes along."""
    vae = small_vae("tiny")
    for leaf in ("weight", "bias"):
        name = f"decoder.layers.0.{leaf}"
        vae._core.set_tensor(name, vae._core.get_tensor(name) * np.float32(3e5))
    half = vae.copy(dtype="float16")
    z = latents(vae, 6, 10)
    got = half.decode(z)
    assert any("float16 overflowed" in note for note in half.last_run.notes)
    assert error(got, vae.decode(z).astype(np.float64)) <= 12 * 2.0**-12


# ---- files ----


@pytest.mark.parametrize("prefix", ["", "taesd_", "first_stage_model.", "vae."])
@pytest.mark.parametrize("name", TINY)
def test_the_numbers_of_the_authors(tmp_path, name, prefix):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    vae = small_vae(name)
    tensors = {prefix + spelt: tensor for spelt, tensor in authors(tensors_of(vae)).items()}
    if prefix == "taesd_":  # ComfyUI's, which has these beside
        tensors |= {"vae_scale": np.float32([1]), "vae_shift": np.float32([0])}
    safetensors_numpy.save_file(tensors, tmp_path / "a.safetensors")
    for parts in ("all", "encoder", "decoder"):
        assert same(VAE.load(tmp_path / "a.safetensors", config=config(name), parts=parts), vae)


def test_spelling_is_that_of_the_authors():
    """Names of taesd_encoder.pth and taesd_decoder.pth, which taesd.py makes."""
    spelt = layouts.spell(dict(_core.Model(_core.models()["taef2"]).tensors), "taesd", 4)
    for mine, theirs in (
        ("encoder.layers.0.bias", "encoder.0.bias"),
        ("encoder.layers.1.conv.4.weight", "encoder.1.conv.4.weight"),
        ("encoder.layers.2.weight", "encoder.2.weight"),
        ("encoder.layers.13.pool.1.bias", "encoder.13.pool.1.bias"),
        ("encoder.layers.14.weight", "encoder.14.weight"),
        ("decoder.layers.0.weight", "decoder.1.weight"),
        ("decoder.layers.2.conv.0.weight", "decoder.3.conv.0.weight"),
        ("decoder.layers.4.pool.3.weight", "decoder.5.pool.3.weight"),
        ("decoder.layers.6.weight", "decoder.7.weight"),
        ("decoder.layers.17.conv.2.bias", "decoder.18.conv.2.bias"),
        ("decoder.layers.18.bias", "decoder.19.bias"),
    ):
        assert spelt[mine] == theirs
    assert len(set(spelt.values())) == len(spelt)


@pytest.mark.parametrize("layout", ["diffusers", "taesd", "taesd-encoder", "taesd-decoder"])
@pytest.mark.parametrize("name", SHIPPED)
def test_files_without_a_config_are_found_out(name, layout):
    arch = _core.models()[name]
    half = layout.partition("-")[2]
    shapes = {n: s for n, s in dict(_core.Model(arch).tensors).items() if n.startswith(half)}
    spelt = layouts.spell(shapes, layout, 4)
    assert layouts.detect({spelt[n]: shape for n, shape in shapes.items()}) == (layout, "", arch)


def test_other_latents_are_found_out():
    arch = _core.models()["taesd"] | {"latent_channels": 12}
    assert layouts.detect(dict(_core.Model(arch).tensors))[2] == arch | {"name": "custom"}


def test_a_stray_tensor_is_named():
    shapes = dict(_core.Model(_core.models()["taesd"]).tensors)
    missing = {n: s for n, s in shapes.items() if n != "decoder.layers.11.weight"}
    with refused("path", place="state dict", names=["decoder.layers.11.weight"]):
        VAE.load({n: np.zeros(s, np.float32) for n, s in missing.items()})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_pth_of_a_half(tmp_path, half, dtype):
    torch = pytest.importorskip("torch")
    path, vae = tmp_path / f"taesd_{half}.pth", VAE.random("taef2", dtype=dtype)
    state = {n: torch.from_numpy(t).to(getattr(torch, dtype)) for n, t in authors(tensors_of(vae), half).items()}
    torch.save(state, path)
    again = VAE.load(path, parts=half, dtype=dtype)
    assert again.arch == vae.arch and same(again, VAE.load(state, parts=half, dtype=dtype))
    assert (look(path).parts, look(path).layout) == (half, f"taesd-{half}")
    assert {n: shape for n, shape, *_ in tensor_types(path)} == {n: tuple(t.shape) for n, t in state.items()}
    with refused("path", names=[half]):
        VAE.load(path)


def test_pth_as_programs_write_them(tmp_path):
    """Views of a storage, parameters, a checkpoint with more in it, a module's own state."""
    torch = pytest.importorskip("torch")
    vae = small_vae("tiny")
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of(vae).items()}
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    views = {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    more = {"state_dict": state, "epoch": 3, "lr": 0.1, "rng": torch.get_rng_state(), "callbacks": {ValueError: [1j]}}
    for saved in (state, views, parameters, more):
        torch.save(saved, tmp_path / "a.pth")
        assert same(VAE.load(tmp_path / "a.pth", config=config("tiny")), vae)


def test_what_a_pth_holds_is_not_run(tmp_path):
    """Names and calls are data: a file that would run something is read, or refused, and nothing is run."""
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of(small_vae("tiny")).items()}
    torch.save(state | {"evil": Evil()}, tmp_path / "a.pth")
    VAE.load(tmp_path / "a.pth", config=config("tiny"))
    torch.save({name: Evil() for name in state}, tmp_path / "a.pth")
    with refused("path"):
        VAE.load(tmp_path / "a.pth", config=config("tiny"))
    assert not (tmp_path / "made").exists()


def pickled(value: tuple) -> bytes:
    """A mapping with one entry that says what a call of that name would: a tuple, which is how the core reads calls."""
    return pickle.dumps({"a": value}, protocol=2)


def rebuilt(offset, shape, strides, key="0") -> tuple:
    """What torch.save writes of a tensor."""
    return "torch._utils._rebuild_tensor_v2", (("storage", "torch.FloatStorage", key, "cpu", 1), offset, shape, strides)


PTH = "as a PyTorch file"  # a place in messages


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02}q\x00.", ("none",)),
        (b"\x80\x02].", ("list", PTH)),
        (b"\x80\x02}", (None, PTH)),
        (b"\x80\x02cos\nsyst", (None, PTH)),
        (b"\x80\x02NR.", (None, PTH)),
        (b"\x80\x02N)R.", (None, PTH)),
        (b"\x80\x02b.", (None, PTH)),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", ("str", PTH)),
        (b"\x80\x04\x8c\x02osK\x06\x93.", (None, PTH)),
        (b"\x80\x02(ios\nsystem\n.", (None, f"{PTH}: pickle: byte 3")),
        (b"\x80\x02}" + b"X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n)Rs.", (None, f"{PTH}: a")),
        (pickle.dumps({"a": 1}, protocol=0), ("0x64", f"{PTH}: pickle: byte 1")),
        (pickled(("torch._utils._rebuild_parameter",)), ("none",)),
        (pickled(("torch._utils._rebuild_parameter", 7)), ("none",)),
        (pickled(("torch._utils._rebuild_parameter", ())), ("none",)),
        (pickled(("torch._utils._rebuild_tensor_v2",)), (None, f"{PTH}: a")),
        (pickled(("torch._utils._rebuild_tensor_v2", 7)), (None, f"{PTH}: a")),
        (pickled(("torch._utils._rebuild_tensor_v2", ((1, 2, [3], 4, 5), 0, (1,), 7))), (None, f"{PTH}: a")),
        (pickled(rebuilt(0, {1: 2}, (1,))), (None, f"{PTH}: a")),  # a mapping has no order to go back in
        (pickled(rebuilt(0, "", ())), (None, f"{PTH}: a")),
        (pickled(rebuilt(0, (1,), (1,), key=["0"])), (None, f"{PTH}: a")),
        (pickled(("torch._utils._rebuild_tensor_v3", (1,) * 6)), (None, f"{PTH}: a")),
        (pickled(("torch._tensor._rebuild_from_type_v2", ("torch._utils._rebuild_tensor_v2",))), ("none",)),
    ],
)
def test_broken_pth(tmp_path, data, message):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", bytes(4))
    with refused("path", *message):
        VAE.load(tmp_path / "a.pth", model="taesd")


class Odd:
    """An object of a class that this program does not know."""

    def __init__(self, value=0):
        self.value = value


class OddDict(dict):
    pass


class OddList(list):
    pass


class WithNamed:
    def __new__(cls, *, value):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"value": Odd()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_beside_the_tensors_do_not_stop_the_reader(tmp_path, protocol):
    torch = pytest.importorskip("torch")
    vae = small_vae("tiny")
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of(vae).items()}
    beside = {
        "odd": Odd(Odd({1: 2})), "dict": OddDict(a=OddList([1, Odd()])), "list": OddList([Odd(), 2]),
        "default": collections.defaultdict(list, {"a": [1]}), "counter": collections.Counter("aab"),
        "set": {1, 2}, "frozen": frozenset({3}), "bytes": bytearray(b"123"), "long": 1 << 100, "path": Path("a"),
        "keys": {(1, 2): 3, None: 4}, "array": np.arange(3), "random": np.random.default_rng(0), "when": 1j,
        "namespace": argparse.Namespace(lr=0.1), "type": torch.float16, "device": torch.device("cpu"), "class": Odd,
        "named": WithNamed(value=1), "partial": functools.partial(int, base=2), "slice": slice(1, 2),
    }  # fmt: skip
    for saved in (beside | state, {"hyper": beside, "state_dict": beside | state}):
        torch.save(saved, tmp_path / "a.pth", pickle_protocol=protocol)
        assert same(VAE.load(tmp_path / "a.pth", config=config("tiny")), vae)


def test_tensors_of_other_classes_and_in_fp8(tmp_path):
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):
        pass

    Mine.__module__, Mine.__qualname__ = __name__, "Mine"
    globals()["Mine"] = Mine  # where pickle looks for it
    vae = small_vae("tiny")
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of(vae).items()}
    other = {name: tensor.as_subclass(Mine) for name, tensor in state.items()}
    marked = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in state.items()}
    for parameter in marked.values():
        parameter.mark = 1  # what is pickled as a parameter with state
    for saved in (other, marked):
        torch.save(saved, tmp_path / "a.pth")
        assert same(VAE.load(tmp_path / "a.pth", config=config("tiny")), vae)
    narrow = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items()}
    torch.save(narrow, tmp_path / "a.pth")
    want = VAE.load({name: tensor.float() for name, tensor in narrow.items()}, config=config("tiny"))
    assert same(VAE.load(tmp_path / "a.pth", config=config("tiny")), want)
    assert same(VAE.load(narrow, config=config("tiny")), want)


def test_cut_and_packed_pth(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "a.pth"
    torch.save({"1.weight": torch.zeros(64, 4, 3, 3).transpose(0, 1)}, path)
    with refused("path", names=["(9, 36, 3, 1)"]):
        VAE.load(path, "taesd", parts="decoder")
    torch.save({"1.weight": torch.zeros(64, 4, 3, 3)}, path)
    whole = path.read_bytes()
    for end in range(4, len(whole), 997):
        path.write_bytes(whole[:end])
        with refused("path"):
            VAE.load(path, "taesd", parts="decoder")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
    with refused("path", names=["data.pkl"]):
        VAE.load(path, "taesd")


def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    from test_gguf import write_gguf

    vae = small_vae("tiny")
    write_gguf(tmp_path / "a.gguf", tensors_of(vae), lambda name, shape: "F32")
    assert same(VAE.load(tmp_path / "a.gguf", config=config("tiny")), vae)


def test_saving(tmp_path):
    vae = small_vae("tiny-normed", dtype="bfloat16")
    vae.save(tmp_path / "vae")
    again = VAE.load(tmp_path / "vae", dtype="bfloat16")
    assert again.arch == vae.arch and same(again, vae)
    for layout in ("ldm", "bfl"):
        with refused("layout", layout, names=["AutoencoderTiny"]):
            vae.save(tmp_path / "a.safetensors", layout=layout)


# ---- names and configs ----


@pytest.mark.parametrize(
    ("name", "model"),
    [("TAESD", "taesd"), ("taesdxl", "taesd"), ("TAEXL", "taesd"), ("madebyollin/taesdxl", "taesd"),
     ("taesd3", "taef1"), ("madebyollin/taef1", "taef1"), ("TAEF.2", "taef2"), ("madebyollin/taef2", "taef2")],
)  # fmt: skip
def test_what_people_call_it(name, model):
    assert configs.named_model("model", name) == model


@pytest.mark.parametrize("name", TINY)
def test_configs(name):
    arch = configs.read_config(config(name))
    for one in (arch, *(_core.models()[model] for model in SHIPPED)):
        assert configs.read_config(configs.config_of(one)) == configs.read_config(one) == one
    assert configs.read_config({"_class_name": "AutoencoderTiny"}) == _core.models()["taesd"]
    assert configs.sample_size_of(config(name), "") == 512


def test_a_config_of_diffusers_own():
    diffusers = pytest.importorskip("diffusers")
    module = diffusers.AutoencoderTiny(latent_channels=16)
    vae = VAE.load(module)
    assert vae.arch == _core.models()["taef1"] and vae.model == "taef1"
    assert configs.read_config(dict(module.config)) == vae.arch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "silu"}, ("'silu'", "act_fn")),
        ({"upsampling_scaling_factor": 3}, (3, "upsampling_scaling_factor")),
        ({"upsample_fn": "bilinear"}, ("'bilinear'", "upsample_fn")),
        ({"num_encoder_blocks": [2, 2, 2]}, ("(2, 2, 2)", "num_encoder_blocks")),
        ({"num_decoder_blocks": [1, 2, 2]}, (None, "num_decoder_blocks")),
        ({"num_decoder_blocks": [2, 1]}, (None, "num_decoder_blocks")),
        ({"encoder_block_out_channels": [32, 32, 64]}, ("(32, 32, 64)", "encoder_block_out_channels")),
        ({"decoder_block_out_channels": [32, 32]}, ("(32, 32)", "decoder_block_out_channels")),
        ({"norm_num_groups": 8}, (8, "norm_num_groups")),
        ({"latent_channels": 0}, (0, "latent_channels")),
        ({"use_midblock_gn": 1}, (1, "use_midblock_gn")),
    ],
)
def test_configs_refused_by_key(change, message):
    with refused("config", *message):
        VAE.random(config=config("tiny") | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_out_channels": (64, 32)}, (32, "block_out_channels[1]")),
        ({"norm_num_groups": 3}, (64, "block_out_channels[0]")),
    ],
)
def test_architectures_that_the_core_refuses(change, message):
    with refused("config", *message):
        _core.Model(_core.models()["taesd"] | change)


def test_the_bytes_are_those_of_the_parameters():
    """As the authors' table has them: 1,222,532 in the encoder and 1,222,531 in the decoder."""
    counts = [VAE.random("taesd", parts=parts).parameters for parts in ("encoder", "decoder")]
    assert counts == [1222532, 1222531]


def test_large_tensors_of_a_decode_are_streamed():
    """Without norms nothing waits: of a decode at 1024x1024 an eighth of one activation, 64 * H * W, is held."""
    run = VAE.random("taesd", parts="decoder").estimate("decode", 1024, 1024, output_type="uint8")
    assert run.activations_bytes < 0.13 * 4 * 64 * 1024 * 1024 and run.work == 1


def test_the_drop_in_is_diffusers(tmp_path):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    from vaemem.pytorch import AutoencoderTiny

    torch.manual_seed(0)
    theirs = diffusers.AutoencoderTiny(**{k: v for k, v in config("tiny").items() if k != "_class_name"})
    ours = AutoencoderTiny.from_module(theirs)
    assert isinstance(ours, diffusers.AutoencoderTiny) and dict(ours.config) == dict(theirs.config)
    theirs.save_pretrained(tmp_path / "tiny")
    loaded = AutoencoderTiny.from_pretrained(tmp_path / "tiny", memory_limit="4 MiB")
    x, z = torch.from_numpy(images(16, 24, 2)), torch.randn(2, 4, 4, 6)
    theirs.enable_slicing()  # which changes no number
    with torch.no_grad():
        for vae in (ours, loaded):
            for mine, want in (
                (vae.encode(x).latents, theirs.encode(x).latents),
                (vae.encode(x, return_dict=False)[0], theirs.encode(x, return_dict=False)[0]),
                (vae.decode(z).sample, theirs.decode(z).sample),
                (vae.decode(z, return_dict=False)[0], theirs.decode(z, return_dict=False)[0]),
            ):
                assert mine.shape == want.shape and error(mine.numpy(), want.double().numpy()) <= PARITY
        assert ours(x).sample.shape == x.shape
        with refused("x"):
            ours.encode(x[:, :, :15])
        ours.enable_tiling()
        with refused("enable_tiling", names=["AutoencoderTiny"]):
            ours.decode(z)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    with refused("vae", names=["AutoencoderTiny"]):
        AutoencoderTiny(VAE.random("taef2"))
