"""The CPU in halves, and float32 at three precisions, as `VAE` gives them: numbers, memory, rounded weights."""

import copy
import os
import pickle
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine import SMALL, config, error, images, latents, run_core, small_vae
from errors import complains, refused, warned
from gpu import LIMIT

import vaemem
from vaemem import VAE, Tiling, _core, estimate_sweep, measure_sweep, tradeoff
from vaemem.__main__ import main

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Beside float32, as gpu.py has it: medium rounds factors to bfloat16 and keeps all else, high keeps 16 bits of them.
NUMBERS = {
    ("float32", "high"): 12 * 2.0**-17,
    ("float32", "medium"): LIMIT["bfloat16"],
    ("float16", "highest"): LIMIT["float16"],
    ("bfloat16", "highest"): LIMIT["bfloat16"],
}
every_number = pytest.mark.parametrize("dtype,precision", NUMBERS)


def in_halves(vae: VAE, dtype: str) -> dict[str, np.ndarray]:
    """Its weights rounded to a type, as a file in that type holds them."""
    return {name: tensor.astype(HALVES[dtype]) for name, tensor in vae.state_dict().items()}


# ---- numbers ----


@every_number
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [(4, 4), (12, 5)])
def test_decode_and_encode(name, size, dtype, precision):
    vae, limit = small_vae(name), NUMBERS[dtype, precision]
    other = small_vae(name, dtype=dtype, precision=precision)
    assert (other.device, other.dtype, other.precision) == ("cpu", dtype, precision)
    z = latents(vae, *size, batch=2)
    got = other.decode(z)
    assert got.dtype == np.float32 and got.shape == (2, 3, 4 * size[0], 4 * size[1])
    assert error(got, vae.decode(z)) < limit
    assert other.last_run.peak_bytes == other.estimate("decode", *got.shape[2:], 2).peak_bytes
    x = images(4 * size[0], 4 * size[1], batch=2)
    encoded = other.encode(x)
    assert encoded.moments.dtype == np.float32
    assert error(encoded.mean, vae.encode(x).mean) < 2 * limit  # means are small beside what they are summed from
    assert other.last_run.peak_bytes == other.estimate("encode", *x.shape[2:], 2).peak_bytes


def test_precisions_in_plain_c():
    """Which has the products of bfloat16 that a fast instruction set may lack: each precision loses what it says."""
    vae = small_vae()
    z = latents(vae, 12, 5)
    want, errors = vae.decode(z), {}
    for precision in ("highest", "high", "medium"):
        got, record = run_core(small_vae(precision=precision)._core, "decode", z, backend="ref")
        errors[precision] = error(got, want)
        assert record["backend"] == "ref"
    assert errors["highest"] < 2e-6 < errors["high"] < NUMBERS["float32", "high"]
    assert NUMBERS["float32", "high"] < errors["medium"] < NUMBERS["float32", "medium"]


@pytest.mark.parametrize("dtype", HALVES)
def test_arrays_are_float32_or_bytes_whatever_the_dtype(dtype):
    vae, halves = small_vae(), small_vae(dtype=dtype)
    z = latents(vae, 4, 4)
    out = np.empty((1, 3, 16, 16), np.float32)
    assert halves.decode(z, out=out) is out and np.array_equal(out, halves.decode(z.astype(np.float64)))
    picture = halves.decode(z, output_type="uint8")
    assert picture.dtype == np.uint8
    assert np.abs(picture.astype(int) - vae.decode(z, output_type="uint8")).mean() < 255 * LIMIT[dtype] + 0.05
    assert error(halves.encode(picture).mean, vae.encode(picture).mean) < 2 * LIMIT[dtype]
    with refused("out"):
        halves.decode(z, out=np.empty((1, 3, 16, 16), np.float16))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["sd", "flux"])
def test_no_worse_than_torch(name, dtype):
    """Beside float64: at most 1.1 times the error that PyTorch has in the same type, for these are two draws of such
    errors, and of the small encoder's output there are but 1000 numbers or fewer."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    vae, half = small_vae(name), small_vae(name, dtype=dtype)
    peer = diffusers.AutoencoderKL(**{k: v for k, v in config(name).items() if not k.startswith("_")}).eval()
    peer.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in vae.state_dict().items()})
    z, x, type_ = latents(vae, 8, 8), images(48, 48), getattr(torch, dtype)
    with torch.no_grad():
        peer.double()
        image = peer.decode(torch.from_numpy(z).double()).sample.numpy()
        mean = peer.encode(torch.from_numpy(x).double()).latent_dist.mean.numpy()
        peer.to(type_)
        their_image = peer.decode(torch.from_numpy(z).to(type_)).sample.float().numpy()
        their_mean = peer.encode(torch.from_numpy(x).to(type_)).latent_dist.mean.float().numpy()
    assert error(half.decode(z), image) <= 1.1 * error(their_image, image)
    assert error(half.encode(x).mean, mean) <= 1.1 * error(their_mean, mean)


@pytest.mark.one_in(3)
@every_number
@pytest.mark.parametrize("op", ["encode", "decode"])
def test_no_pass_leaves_its_plan(op, dtype, precision):
    """As in test_memory.py, of every instruction set for such numbers."""
    vae = small_vae("odd", dtype=dtype, precision=precision)
    data = latents(vae, 4, 6, 2) if op == "decode" else images(16, 24, 2)
    for backend in [name for name, usable in _core.backends(dtype, precision) if usable]:
        for threads in (1, 3):
            plain, _ = run_core(vae._core, op, data, threads=threads, backend=backend)
            checked, _ = run_core(vae._core, op, data, threads=threads, backend=backend, check=True)
            assert np.isfinite(plain).all() and np.array_equal(plain, checked)


@pytest.mark.parametrize("dtype", HALVES)
def test_tiles(dtype):
    """Cut and blended in float32, whatever the tiles were computed in."""
    vae, half = small_vae(), small_vae(dtype=dtype)
    z, tiling = latents(vae, 12, 10), Tiling(32)
    got = half.decode(z, tiling=tiling)
    assert half.last_run.peak_bytes == half.estimate("decode", 48, 40, tiling=tiling).peak_bytes
    assert error(got, vae.decode(z, tiling=tiling)) < LIMIT[dtype]


@every_number
def test_threads_and_limits_change_no_bit(dtype, precision):
    vae = small_vae(dtype=dtype, precision=precision)
    z = latents(vae, 16, 16)
    want = vae.decode(z)
    smallest = vae.smallest("decode", 64, 64)
    for threads in (1, 3):
        vae.threads = threads
        assert np.array_equal(vae.decode(z), want)
    assert smallest < vae.estimate("decode", 64, 64).peak_bytes
    vae.threads = 1
    assert np.array_equal(vae.decode(z, memory_limit=vae.smallest("decode", 64, 64)), want)


def test_halves_take_half():
    whole, half = (small_vae(dtype=dtype).estimate("decode", 256, 256) for dtype in ("float32", "bfloat16"))
    assert half.activations_bytes <= 0.51 * whole.activations_bytes
    assert half.weights_bytes <= 0.55 * whole.weights_bytes  # vectors stay float32
    assert half.output_bytes == whole.output_bytes


def test_float16_that_overflows_is_run_again():
    """The first convolution's results are larger than the type's numbers, which GroupNorm takes out again."""
    vae = small_vae()
    state = vae.state_dict()
    for part in ("weight", "bias"):
        state[f"decoder.conv_in.{part}"] *= np.float32(2e5)
    large, z = VAE.load(state, config=config("sd")), latents(vae, 8, 8)
    half = VAE.load(state, config=config("sd"), dtype="float16")
    got = half.decode(z)
    assert any(note.startswith("float16 overflowed: run again with") for note in half.last_run.notes)
    assert error(got, large.decode(z)) < LIMIT["float16"]
    assert np.array_equal(half.decode(z), got) and not half.last_run.notes  # it is remembered
    for one in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert np.array_equal(one.decode(z), got) and not one.last_run.notes
    wide = VAE.load(state, config=config("sd"), dtype="bfloat16")
    assert error(wide.decode(z), large.decode(z)) < LIMIT["bfloat16"] and not wide.last_run.notes


def test_other_numbers_than_float16_take_no_factor():
    for dtype in ("float32", "bfloat16"):
        vae = small_vae(dtype=dtype)
        z = latents(vae, 8, 8)
        assert np.array_equal(run_core(vae._core, "decode", z, scale=2.0**-4)[0], vae.decode(z))


@pytest.mark.parametrize("kind", ["q", "k", "v", "all of v"])
def test_float16_whose_attention_overflows(kind):
    """Softmax does not see the factor, nor does what reads the values. q and k are too large in a channel that makes no
    difference, for where many are, softmax turns rounding into another picture."""
    vae = small_vae()
    state, z = vae.state_dict(), latents(vae, 8, 8)
    attention = "decoder.mid_block.attentions.0"
    if kind == "all of v":
        for name, factor in (("to_v.weight", 2.0**18), ("to_v.bias", 2.0**18), ("to_out.0.weight", 2.0**-8)):
            state[f"{attention}.{name}"] *= np.float32(factor)
    else:
        state[f"{attention}.to_{kind}.bias"][5] = 9e5
        if kind == "v":
            state[f"{attention}.to_out.0.weight"][:, 5] = 0
        else:
            other = f"{attention}.to_{'k' if kind == 'q' else 'q'}"
            state[f"{other}.weight"][5], state[f"{other}.bias"][5] = 0, 0
    half = VAE.load(state, config=config("sd"), dtype="float16")
    assert error(half.decode(z), VAE.load(state, config=config("sd")).decode(z)) < LIMIT["float16"]
    assert half.last_run.notes == ("float16 overflowed: run again with activations multiplied by 1/16",)


def test_float16_that_no_factor_helps():
    """The run says so, and a run of others is as good as ever."""
    vae = small_vae()
    state, z = vae.state_dict(), latents(vae, 8, 8)
    state["decoder.mid_block.attentions.0.group_norm.weight"] *= np.float32(3e9)
    assert np.isfinite(VAE.load(state, config=config("sd")).decode(z)).all()
    half = VAE.load(state, config=config("sd"), dtype="float16")
    x = images(32, 32)
    want = half.encode(x).mean
    with warned("decode"):
        assert np.isnan(half.decode(z)).all()
    assert half.last_run.notes[-1].endswith("the input or the weights are not, or are too large for it")
    assert np.array_equal(half.encode(x).mean, want)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_a_picture_of_what_is_no_number_is_told(dtype):
    """In bytes it would be black and no more."""
    vae = small_vae(dtype=dtype)
    z = latents(vae, 8, 8)
    z[0, 0, 0, 0] = np.nan
    with warned("decode"):
        assert (vae.decode(z, output_type="uint8") == 0).any()
    assert f"{dtype}: not finite" in vae.last_run.notes[-1] and not vae.last_run.finite
    vae.decode(np.zeros_like(z), output_type="uint8")
    assert vae.last_run.notes == () and vae.last_run.finite


# ---- weights ----


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_said(dtype):
    vae = small_vae()
    rounded = small_vae(dtype=dtype)
    assert vae.rounded == () and "rounded" not in repr(vae)
    filters = {name for name, shape in vae._core.tensors if len(shape) > 1}
    assert set(rounded.rounded) == filters
    assert f"cpu {dtype}, {len(filters)} tensors rounded, " in repr(rounded)
    with refused("copy", names=[dtype, len(filters)]):
        rounded.copy(dtype="float32")
    state = rounded.state_dict()
    assert all(np.array_equal(tensor, state[name]) for name, tensor in rounded.copy().state_dict().items())
    exact = VAE.load(in_halves(vae, dtype), config=config("sd"), dtype=dtype)
    assert exact.rounded == () and f"cpu {dtype}, " in repr(exact) and "rounded" not in repr(exact)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_file_in_the_same_type_is_as_it_came(dtype, tmp_path):
    from safetensors.numpy import save_file

    vae = small_vae()
    halves = in_halves(vae, dtype)
    save_file(halves, tmp_path / "a.safetensors")
    kept = VAE.load(tmp_path / "a.safetensors", config=config("sd"), dtype=dtype)
    assert kept.rounded == ()
    want = {name: tensor.astype(np.float32) for name, tensor in halves.items()}
    for made in (kept, kept.copy(), kept.copy(dtype="float32"), VAE.load(kept.state_dict(), config=config("sd"))):
        assert made.rounded == () and made.state_dict().keys() == want.keys()
        assert all(np.array_equal(tensor, want[name]) for name, tensor in made.state_dict().items())
    kept.save(tmp_path / "b.safetensors", layout="ldm")
    again = VAE.load(tmp_path / "b.safetensors", config=config("sd"), dtype=dtype)
    z = latents(vae, 4, 4)
    assert again.rounded == () and np.array_equal(again.decode(z), kept.decode(z))


@pytest.mark.parametrize("layout", ["diffusers", "ldm"])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_kept_is_saved(dtype, layout, tmp_path):
    """In half of the bytes, so that the file in the same type is this VAE again; the package reads it too."""
    from safetensors.numpy import load_file

    rounded, whole = small_vae(dtype=dtype), small_vae()
    rounded.save(tmp_path / "half.safetensors", layout=layout)
    whole.save(tmp_path / "whole.safetensors", layout=layout)
    again = VAE.load(tmp_path / "half.safetensors", config=config("sd"), dtype=dtype)
    z = latents(again, 4, 4)
    assert again.rounded == () and np.array_equal(again.decode(z), rounded.decode(z))
    stored, full = load_file(tmp_path / "half.safetensors"), load_file(tmp_path / "whole.safetensors")
    assert all(t.dtype == (dtype if t.ndim > 1 else "float32") and t.shape == full[n].shape for n, t in stored.items())
    assert all(t.dtype == np.float32 for t in full.values()) and len(stored) == len(whole._core.tensors)
    filters = sum(t.nbytes for t in full.values() if t.ndim > 1)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("whole", "half")]
    assert abs(sizes[0] - sizes[1] - filters / 2) < 200, "but for the header's words"


def test_numbers_that_halves_do_not_reach():
    vae = small_vae()
    state = vae.state_dict()
    state["decoder.conv_in.weight"][0, 0] = np.finfo(np.float32).max  # above bfloat16's largest by half a step of it
    with refused("path", names=["decoder.conv_in.weight"]):
        VAE.load(state, config=config("sd"), dtype="bfloat16")
    state["decoder.conv_in.weight"][0, 0] = 7e4
    with refused("path", names=["decoder.conv_in.weight"]):
        VAE.load(state, config=config("sd"), dtype="float16")
    assert VAE.load(state, config=config("sd"), dtype="bfloat16").dtype == "bfloat16"
    state["decoder.conv_in.weight"][0, 0] = np.nan  # what is none in the file is none in the model
    with warned("decode"):
        assert np.isnan(VAE.load(state, config=config("sd"), dtype="float16").decode(latents(vae, 4, 4))).all()


def test_a_copy_is_of_the_same_numbers_unless_others_are_asked_for():
    high = small_vae(precision="high")
    assert (high.copy().dtype, high.copy().precision) == ("float32", "high")
    assert high.copy(precision="highest").precision == "highest"
    half = high.copy(dtype="bfloat16")
    assert (half.dtype, half.precision) == ("bfloat16", "highest")
    exact = VAE.load(in_halves(high, "bfloat16"), config=config("sd"), dtype="bfloat16")
    assert exact.copy().dtype == "bfloat16" and exact.copy(dtype="float32").rounded == ()


# ---- asked for otherwise ----


def test_the_chosen_kernels_depend_on_the_numbers():
    for dtype, precision in [("float32", "highest"), *NUMBERS]:
        rows = [row for row in vaemem.backends(dtype, precision) if row["device"] == "cpu"]
        (chosen,) = [row["name"] for row in rows if row["chosen"]]
        assert chosen == small_vae(dtype=dtype, precision=precision).estimate("decode", 16, 16).backend
    assert vaemem.backends() == vaemem.backends("float32", "highest")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the processor's vendor is read from /proc")
@pytest.mark.parametrize("dtype,precision", [("bfloat16", "highest"), ("float32", "medium")])
def test_pairs_of_avx512_go_before_floats_where_they_are_faster(dtype, precision):
    """On AMD's processors alone, whether or not there is AMX too. Tests can have the other ones run them."""
    names = [name for name, _ in _core.backends(dtype, precision)]
    if "avx512bf16" not in names:
        pytest.skip("a build for another kind of processor")
    cpuinfo = Path("/proc/cpuinfo").read_text()
    first = min("avx512", "avx512bf16", key=names.index)
    assert (first == "avx512bf16") == ("AuthenticAMD" in cpuinfo)
    usable = dict(_core.backends(dtype, precision))["avx512bf16"]
    assert usable == ("avx512_bf16" in cpuinfo) or os.environ.get("VAEMEM_DISABLE")


@pytest.mark.one_in(4)
@every_number
def test_tables(dtype, precision):
    vae = small_vae(dtype=dtype, precision=precision)
    (row,) = measure_sweep(vae, "decode", 64)
    (estimate,) = estimate_sweep(vae, "decode", 64, dtype)
    assert (row["dtype"], row["allocated_bytes"]) == (dtype, estimate["allocated_bytes"])
    assert (f", precision {precision})" in row["versions"]) == (precision != "highest")
    plans = tradeoff(vae, "decode", 64, 64)
    assert plans[0]["dtype"] == dtype and plans[0]["seconds"] > 0
    with VAE.random("taesd", dtype=dtype, precision=precision) as named:
        assert tradeoff("taesd", "decode", 64, 64, 1, dtype, precision) == tradeoff(named, "decode", 64, 64)
        same = {"dtypes": dtype, "precision": precision}
        assert estimate_sweep("taesd", "decode", 64, **same) == estimate_sweep(named, "decode", 64)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_what_decoding_rounds_is_said(dtype, capsys, tmp_path):
    pytest.importorskip("PIL")
    small_vae().save(tmp_path / "vae")
    np.save(tmp_path / "z.npy", np.zeros((1, 4, 8, 8), np.float32))
    weights, out = ["--weights", str(tmp_path / "vae")], ["-o", str(tmp_path / "a.png")]
    assert main(["decode", str(tmp_path / "z.npy"), *weights, *out, "--dtype", dtype]) == 0
    warned = "" if dtype == "float32" else rf"vaemem decode: \d+ tensors of the weights are rounded to {dtype}\n"
    assert re.fullmatch(warned, capsys.readouterr().err)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_commands(dtype, capsys, tmp_path):
    small_vae().save(tmp_path / "vae")
    said, largest = {}, ["largest", "taesd", "decode", "--engine", "40 MiB"]
    for command in (
        ["info", str(tmp_path / "vae"), "--sizes", "64"],
        ["tradeoff", "taesd", "decode", "64"],
        largest,
        ["backends"],
    ):
        assert main([*command, "--dtype", dtype]) == 0
        said[command[0]] = capsys.readouterr().out
    assert dtype in said["info"] and dtype in said["tradeoff"]
    with vaemem.VAE.random("taesd", dtype=dtype) as vae:
        height, width = vae.largest("decode", "40 MiB")
    assert said["largest"].startswith(f"{height}x{width}\n")
    for command in (["info", str(tmp_path / "vae")], largest, ["backends"]):
        status = main([*command, "--dtype", dtype, "--precision", "high"])
        assert status == (0 if dtype == "float32" else 2)
        assert dtype == "float32" or complains(capsys.readouterr().err, command[0], names=["precision: ", dtype])


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"dtype": "quarter"}, ("dtype", "'quarter'")),
        ({"precision": "best"}, ("precision", "'best'")),
        ({"dtype": "float16", "precision": "medium"}, ("precision", "'medium'")),
    ],
)
def test_bad_numbers(asked, message):
    vae = small_vae()
    for ask in (vaemem.backends, vae.copy, small_vae, lambda **kw: tradeoff("sdxl", "decode", 64, 64, **kw)):
        with refused(*message):
            ask(**asked)
