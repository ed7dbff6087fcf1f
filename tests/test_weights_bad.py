"""Weights files that are damaged, hostile or of another model; saves that fail; what loading and saving take."""

import errno
import json
import math
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from errors import refused, warned
from safetensors import numpy as safetensors_numpy
from weights_files import CONFIGS, FLUX_LIKE, SMALL, make, respell, same, tensors_of, write

from vaemem import VAE, _core
from vaemem.engine import configs, file_tensors, weights

pytestmark = [pytest.mark.core, pytest.mark.python]

# ---- tensors that are not as they should be ----


@pytest.mark.parametrize("layout", ["diffusers", "diffusers-old", "ldm", "given"])
def test_each_tensor_is_named_when_missing_or_misshapen(tmp_path, layout):
    """Without a config too, though the tensor is part of what the architecture is detected from."""
    small = {"block_out_channels": (32, 32), "layers_per_block": 2}
    config, layout = (small, "ldm") if layout == "given" else (None, layout)
    tensors = respell(tensors_of(make(small)), layout)
    path = tmp_path / "a.safetensors"
    for name in tensors:
        write(path, {n: t for n, t in tensors.items() if n != name})
        with refused("path", path=path, names=[name]):
            weights.load(path, config=config)
        if config is None and name in ("encoder.conv_in.weight", "decoder.conv_out.weight"):
            continue  # conv_in alone tells in_channels: another shape is another model
        write(path, {**tensors, name: np.zeros((5, *tensors[name].shape[1:]), np.float32)})
        with refused("path", path=path, names=[name]):
            weights.load(path, config=config)


@pytest.mark.parametrize(
    "name", ["stranger", "decoder.stranger", "decoder.up_blocks.0.resnets.9.conv1.weight", "quant_conv.scale"]
)
def test_extra_tensor_is_named(tmp_path, name):
    path = write(tmp_path / "a.safetensors", {**tensors_of(make()), name: np.zeros((7, 8), np.float32)})
    with refused("path", names=[name, "(7, 8)"]):
        weights.load(path)


def test_what_a_file_says_is_shown_escaped_and_short(tmp_path):
    path = write(tmp_path / "a.safetensors", {**tensors_of(make()), "encoder.\x1b[2J\u202e": np.zeros(7, np.float32)})
    with refused("path", names=["'encoder.\\x1b[2J\\u202e'"]):
        weights.load(path)
    path = write(tmp_path / "a.safetensors", {"x" * 10**6 + "\n": np.zeros(7, np.float32)})
    with refused("path") as caught:
        weights.load(path)
    assert len(str(caught.value)) < 500
    with refused("config", 1, "'\\x1b[2J'"):
        configs.read_config({"\x1b[2J": 1})
    with refused("config", place="scaling_factor"):
        configs.read_config({"scaling_factor": 10**400})


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_training_only_tensors_are_ignored(tmp_path, prefix):
    tensors = tensors_of(make())
    more = {f"{prefix}loss.logvar": np.zeros(1, np.int64), "model_ema.decay": np.zeros(1, np.float64)}
    path = write(tmp_path / "a.safetensors", {**{prefix + n: t for n, t in tensors.items()}, **more})
    same(weights.load(path), tensors)


def test_other_dtypes_are_named(tmp_path):
    tensors = tensors_of(make())
    tensors["decoder.conv_in.bias"] = tensors["decoder.conv_in.bias"].astype(np.float64)
    path = write(tmp_path / "a.safetensors", tensors)
    with refused("path", names=["decoder.conv_in.bias", "F64"]):
        weights.load(path)


def test_both_attention_names_at_once(tmp_path):
    tensors = tensors_of(make())
    name = "decoder.mid_block.attentions.0."
    path = write(tmp_path / "a.safetensors", {**tensors, name + "query.bias": tensors[name + "to_q.bias"]})
    with refused("path", names=["query.bias"]):
        weights.load(path)


def test_unknown_layout(tmp_path):
    for tensors in ({}, {"text_model.encoder.layers.0.weight": np.zeros(3, np.float32)}):
        path = write(tmp_path / "a.safetensors", tensors)
        with refused("path", path=path):
            weights.load(path)


# ---- damaged and hostile files ----


def file_bytes(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HUGE = 2**63
HOSTILE = {
    "empty": b"",
    "seven_bytes": b"\0" * 7,
    "header_size_zero": b"\0" * 8,
    "header_beyond_file": file_bytes({}, size=1 << 20),
    "header_size_overflows": file_bytes({}, size=2**64 - 1),
    "not_json": file_bytes(b"{" * 64),
    "deep_json": file_bytes(b'{"a":' + b"[" * 100_000),
    "not_utf8": file_bytes(b'{"\xff\xfe": {}}  '),
    "json_list": file_bytes([1, 2]),
    "a_pickle": b"\x80\x02}q\x00X\x06\x00\x00\x00config" * 9,
    "offset_beyond_file": file_bytes({"encoder.a": entry([4], 0, 16)}, b"\0" * 8),
    "offsets_backwards": file_bytes({"encoder.a": entry([4], 16, 0)}, b"\0" * 16),
    "offsets_negative": file_bytes({"encoder.a": entry([4], -16, 0)}, b"\0" * 16),
    "offsets_overlap": file_bytes({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, b"\0" * 24),
    "hole": file_bytes({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "trailing_data": file_bytes({"a": entry([1], 0, 4)}, b"\0" * 12),
    "shape_disagrees": file_bytes({"a": entry([5], 0, 16)}, b"\0" * 16),
    "shape_overflows": file_bytes({"a": entry([HUGE, HUGE, 4], 0, 16)}, b"\0" * 16),
    "shape_overflows_to_0": file_bytes({"a": entry([2**32, 2**32], 0, 0)}),
    "shape_negative": file_bytes({"a": entry([-4], 0, 16)}, b"\0" * 16),
    "unknown_dtype": file_bytes({"a": entry([4], 0, 16, "X32")}, b"\0" * 16),
    "no_offsets": file_bytes({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(tmp_path, name):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(HOSTILE[name])
    with refused("path", path=path):
        weights.load(path, model="sdxl")


@pytest.mark.parametrize("side", [0, 1])
def test_a_small_file_makes_no_large_model(tmp_path, side):
    """Shapes that claim much and hold little: refused by name before a model of their size is allocated."""
    header, end = {}, 0
    for name, shape in _core.Model(_core.models()["flux"], "all").tensors:
        shape = [65536, *([side] * (len(shape) - 1))] if ".resnets." in name else [0]
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = entry(shape, begin, end, "F16")
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(file_bytes(header))
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size + end)  # sparse
    with refused("path", path=path, names=["conv2.weight", "(65536, 65536, 3, 3)"]):
        weights.load(path)


def test_every_truncation_of_a_real_file(tmp_path):
    path = tmp_path / "a.safetensors"
    weights.save(make(), path)
    whole = path.read_bytes()
    for size in sorted({*range(0, 64, 7), *range(64, len(whole), len(whole) // 40), len(whole) - 1}):
        path.write_bytes(whole[:size])
        with refused("path", path=path):
            weights.load(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    weights.save(make(), path)
    size, read = path.stat().st_size, file_tensors.read_tensor

    def cut(file, tensor, shape):
        if tensor.name == "encoder.conv_in.bias":
            with open(path, "r+b") as f:
                f.truncate(size // 2)
        return read(file, tensor, shape)

    monkeypatch.setattr(file_tensors, "read_tensor", cut)
    with refused("path", path=path):
        weights.load(path)


def test_nothing_of_the_file_is_mapped(tmp_path, monkeypatch):
    path, read, maps = tmp_path / "a.safetensors", file_tensors.read_tensor, []

    def look(*args):
        array = read(*args)
        maps.append(Path("/proc/self/maps").read_text())
        return array

    weights.save(make(), path)
    monkeypatch.setattr(file_tensors, "read_tensor", look)
    if sys.platform == "linux":
        weights.load(path)
        assert maps and not any("a.safetensors" in text for text in maps)


def test_paths_that_are_no_files(tmp_path):
    with refused("path", names=["nowhere.safetensors"], kind=FileNotFoundError):
        weights.load(tmp_path / "nowhere.safetensors")
    with refused("path", kind=FileNotFoundError):
        weights.load(tmp_path)
    with refused("path", "neither", names=["null"]):
        weights.load("/dev/null")
    with refused("path", "int", kind=TypeError):
        weights.load(3)
    write(tmp_path / weights.WEIGHTS, tensors_of(make()))
    with refused("path", names=["config.json"], kind=FileNotFoundError):
        weights.load(tmp_path)
    assert weights.load(tmp_path, config=SMALL).missing() == []


# ---- saving ----


@pytest.mark.parametrize(
    ("config", "layout", "why"),
    [
        ("flux_like", "ldm", ()),
        ("one_quant_conv", "ldm", ()),
        ("small", "bfl", ()),
        ("one_quant_conv", "bfl", ()),
        ("small", "gguf", ("'gguf'",)),
        ("small", "wan", ("'wan'",)),
        ("small", "diffusers-old", ("'diffusers-old'",)),
    ],
)
def test_layouts_refused(tmp_path, config, layout, why):
    with refused("layout", *why):
        weights.save(make(CONFIGS[config]), tmp_path / "a.safetensors", layout)
    assert not list(tmp_path.iterdir())


def test_bfl_wants_the_attention(tmp_path):
    config = {**FLUX_LIKE, "mid_block_add_attention": False}
    with refused("layout"):
        weights.save(make(config), tmp_path / "a.safetensors", "bfl")


def test_save_refuses_paths_and_unset_tensors(tmp_path):
    model = make()
    (tmp_path / "a.file").write_text("mine")
    (tmp_path / "b.safetensors").mkdir()
    for path, layout in [
        (tmp_path / "vae", "ldm"),
        (tmp_path / "a.file", "diffusers"),
        (tmp_path / "c.gguf", "diffusers"),
        (tmp_path / "c.pt", "ldm"),
        (tmp_path / "b.safetensors", "diffusers"),
        ("", "diffusers"),
        (tmp_path / "no" / "c.safetensors", "diffusers"),
    ]:
        with refused("path"):
            weights.save(model, path, layout)
    with refused("model"):
        weights.save(_core.Model(model.arch, "all"), tmp_path / "d.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.file", "b.safetensors"]


class Failing:
    """A model whose nth tensor cannot be had."""

    def __init__(self, model, nth):
        self.model, self.left = model, nth

    def __getattr__(self, name):
        return getattr(self.model, name)

    def get_tensor(self, name):
        self.left -= 1
        if not self.left:
            raise MemoryError(name)
        return self.model.get_tensor(name)


@pytest.mark.parametrize("nth", [1, 20])
def test_a_failed_save_leaves_what_was_there(tmp_path, nth):
    old, failing = make(seed=1), Failing(make(), nth)
    for path in (tmp_path / "a.safetensors", tmp_path / "vae"):
        with pytest.raises(MemoryError):
            weights.save(failing, path)
        assert not list(tmp_path.iterdir())
        failing.left = nth
    for path in (tmp_path / "a.safetensors", tmp_path / "vae"):
        weights.save(old, path)
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(MemoryError):
            weights.save(failing, path)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        failing.left = nth


def test_a_save_that_fails_between_its_two_files(tmp_path, monkeypatch):
    """The config is on the disk before the weights take their place, so a full disk is found before that. A directory
    that was made for them goes again."""
    seen, replace = [], os.replace

    def fails(source, target):
        seen.append([part.read_bytes()[:1] for part in (tmp_path / "vae").glob(".vaemem-*.part")])
        if len(seen) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with refused(kind=OSError, errno=errno.EIO):
        weights.save(make(), tmp_path / "vae")
    assert b"{" in seen[0]  # the config's part is not empty
    assert not (tmp_path / "vae").exists()


def test_a_config_written_by_others_goes_with_weights_that_mean_the_same(tmp_path):
    """What diffusers adds to a config.json, and what it leaves out, says nothing else."""
    weights.save(make(), tmp_path, sample_size=64)
    config = json.loads((tmp_path / "config.json").read_text())
    assert VAE.load(tmp_path).sample_size == 64
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None} | {"_name": 1}))
    weights.load(tmp_path)


def test_the_config_in_the_weights_decides(tmp_path):
    """Wherever the file lies. What config.json says otherwise is told, whatever it is."""
    weights.save(make({**SMALL, "scaling_factor": 0.5}), tmp_path, sample_size=64)
    file, config = tmp_path / weights.WEIGHTS, json.loads((tmp_path / "config.json").read_text())
    assert VAE.load(file).arch["scaling_factor"] == 0.5 and weights.look(file).arch["scaling_factor"] == 0.5
    for text, said in (
        (json.dumps(config | {"sample_size": 32}), ["sample_size", 32, 64]),
        (json.dumps(config | {"norm_num_groups": 16}), ["norm_num_groups", 16, 32]),
        (json.dumps(config | {"scaling_factor": None}), ["scaling_factor", None, 0.5]),
        (json.dumps(config | {"act_fn": "relu"}), ["act_fn", "silu"]),
        ("{", ["JSON"]),
        ("", ["JSON"]),
        (None, []),
    ):
        (tmp_path / "config.json").unlink() if text is None else (tmp_path / "config.json").write_text(text)
        with warned(tmp_path / "config.json", kind=UserWarning, names=said) as seen:
            vae = VAE.load(tmp_path)
        assert seen[0].filename == __file__
        assert (vae.arch["scaling_factor"], vae.arch["norm_num_groups"], vae.sample_size) == (0.5, 32, 64)
        with warned(kind=UserWarning, names=said):
            assert weights.look(tmp_path).arch == weights.look(file).arch
    vae.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    (tmp_path / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.25}))
    assert VAE.load(tmp_path, config=tmp_path).arch["scaling_factor"] == 0.25


@pytest.mark.parametrize("saved", ["[", "[" * 100000, "1"])
def test_what_weights_say_of_their_config_is_checked(tmp_path, saved):
    weights.save(make(), tmp_path)
    tensors = safetensors_numpy.load_file(tmp_path / weights.WEIGHTS)
    safetensors_numpy.save_file(tensors, tmp_path / weights.WEIGHTS, {weights.SAVED_WITH: saved})
    with refused("path", place="metadata"):
        weights.load(tmp_path)


def test_save_keeps_permissions_follows_links_and_syncs(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)), fsync(fd)))
    real, link = tmp_path / "real" / "a.safetensors", tmp_path / f"{'long' * 58}.safetensors"
    real.parent.mkdir()
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    weights.save(make(), link)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert synced == [False, True]
    same(weights.load(real), tensors_of(make()))
    assert [p.name for p in real.parent.iterdir()] == ["a.safetensors"]


def test_unknown_scaling_stays_unknown(tmp_path):
    weights.save(make(), tmp_path / "a.safetensors")
    weights.save(weights.load(tmp_path / "a.safetensors"), tmp_path / "vae")
    assert json.loads((tmp_path / "vae" / "config.json").read_text())["scaling_factor"] is None
    assert weights.load(tmp_path / "vae").arch["scaling_factor"] is None


# ---- memory ----

MEASURE = """
import sys
from vaemem import VAE, _core
from vaemem.engine import weights
verb, small, path = sys.argv[1:]
arch = _core.models()["sdxl"]

def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key)) * 1024

model = weights.load(small)  # what is imported and set up once
weights.save(model, small)
if verb == "save":
    model = _core.Model(arch, "decoder")
    weights.random_tensors(model, 0)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # VmHWM starts again from here
before = status("VmRSS:")
if verb == "save":
    weights.save(model, path)
else:
    model = weights.load(path, parts="decoder", model="sdxl", dtype=verb)
print(status("VmHWM:") - before, model.reserved_bytes)
"""


@pytest.mark.resident
@pytest.mark.skipif(sys.platform != "linux", reason="the peak resident size is read from /proc")
def test_peak_memory_of_a_real_size(tmp_path):
    """SDXL's decoder, 189 MiB in float32: saving takes one tensor; loading the packed copy and one tensor as it lies in
    the file, whichever types these two are of. The peak of the process counts pages of the mapped file too."""
    small, path, halves = (tmp_path / f"{name}.safetensors" for name in ("small", "float32", "bfloat16"))
    weights.save(make(), small)
    largest = 512 * 512 * 9
    slack = 2 << 20  # headers, names and Python's own growth: under 1 MiB seen

    def grown(verb, file):
        done = subprocess.run([sys.executable, "-c", MEASURE, verb, small, file], capture_output=True, text=True)
        if "clear_refs" in done.stderr:
            pytest.skip("this system does not let a process reset its peak resident size")
        assert done.returncode == 0, done.stderr
        return map(int, done.stdout.split())

    assert next(grown("save", path)) <= 4 * largest + slack
    write(halves, {name: t.astype(ml_dtypes.bfloat16) for name, t in safetensors_numpy.load_file(path).items()})
    held = {}
    for dtype in ("float32", "bfloat16"):
        for file, number in ((path, 4), (halves, 2)):
            peak, held[dtype] = grown(dtype, file)
            assert 0.9 * held[dtype] < peak <= held[dtype] + number * largest + slack, (dtype, file)
    assert held["bfloat16"] < 0.51 * held["float32"]


# ---- other architectures, wrappers and shards ----


def shaped(shapes):
    """Tensors of these shapes that take no memory."""
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("AsymmetricAutoencoderKL", "AsymmetricAutoencoderKL has"),
        ("AutoencoderKLTemporalDecoder", "Stable Video Diffusion's VAE has"),
        ("AutoencoderKLHunyuanVideo", "a VAE of videos"),
        ("AutoencoderKLCogVideoX", "a VAE of videos"),
        ("AutoencoderKLAllegro", "only 248 of 704 tensors"),
        ("AutoencoderKLMagvit", "only 2 of 228 tensors"),
        ("VQModel", "a VQ model"),
    ],
)
def test_a_vae_of_another_architecture_is_unknown(kind, said):
    """diffusers' own classes: an error says what they are, or that they are unknown, and never the nearest model."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    if not hasattr(diffusers, kind):
        pytest.skip(f"this diffusers has no {kind}")
    with torch.device("meta"):
        module = getattr(diffusers, kind)()
    with refused(names=["architecture", said]) as caught:
        weights.arch_of(shaped({name: tensor.shape for name, tensor in module.state_dict().items()}))
    assert not any(f"{name}'s" in str(caught.value) for name in _core.models())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        # taehv.pth: its TPool and TGrow, between blocks like TAESD's
        (["encoder.0.weight", "encoder.2.conv.weight", "encoder.4.conv.0.weight", "decoder.7.conv.weight"], "TAEHV"),
        # Stable Cascade's stage_a.safetensors
        (["in_block.1.weight", "down_blocks.0.depthwise.1.weight", "vquantizer.codebook.weight"], "a VQ model"),
        # svd.safetensors
        (["first_stage_model.decoder.mid.block_1.time_stack.in_layers.0.weight"], "Stable Video Diffusion"),
    ],
)
def test_files_of_other_autoencoders(names, said):
    with refused(names=["architecture", said]):
        weights.arch_of(shaped(dict.fromkeys(names, (8, 8, 3, 3))))


@pytest.mark.parametrize(
    "wrapper",
    "module. _orig_mod. model_state_dict. ema_model.module. net. vae_state_dict. params_ema. a.b.c.".split(),
)
@pytest.mark.parametrize("model", ["sd", "taesd"])
def test_whatever_precedes_every_name_is_a_wrapper(tmp_path, wrapper, model):
    """In flat names and in nested mappings."""
    tensors = tensors_of(make() if model == "sd" else make(_core.models()["taesd"]))
    wrapped = {wrapper + name: tensor for name, tensor in tensors.items()}
    same(weights.load(write(tmp_path / "b.safetensors", wrapped)), tensors)
    nested = tensors
    for key in reversed(wrapper.split(".")[:-1]):
        nested = {key: nested, "epoch": 3, "optimizer": {"state": {0: {}}, "param_groups": []}}
    same(weights.load(nested), tensors)


def test_the_average_over_the_training_comes_first(tmp_path):
    other, tensors = tensors_of(make(seed=1)), tensors_of(make())
    for average in ("ema.", "ema_model.", "params_ema."):
        both = {f"model.{name}": tensor for name, tensor in other.items()}
        both |= {average + name: tensor for name, tensor in tensors.items()}
        same(weights.load(write(tmp_path / "a.safetensors", both)), tensors)


def test_a_vae_in_several_files(tmp_path):
    model_dir = tmp_path / "vae"
    VAE.random("taesd").save(model_dir)
    whole = safetensors_numpy.load_file(model_dir / weights.WEIGHTS)
    (model_dir / weights.WEIGHTS).unlink()
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: names[i % 2] for i, name in enumerate(sorted(whole))}
    for file in names:
        write(model_dir / file, {name: whole[name] for name in whole if where[name] == file})
    index = model_dir / weights.INDICES[0]
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}), "utf-8")
    same(weights.load(model_dir), whole)
    same(weights.load(index), whole)
    for wrong in ("{}", "nonsense", json.dumps({"weight_map": {"a": "../b"}}), json.dumps({"weight_map": {"a": 3}})):
        index.write_text(wrong, "utf-8")
        with refused("path", path=index):
            weights.load(model_dir)
    index.write_text(json.dumps({"weight_map": where | {"more": "absent.safetensors"}}), "utf-8")
    with refused("path", path=model_dir / "absent.safetensors"):
        weights.load(model_dir)
