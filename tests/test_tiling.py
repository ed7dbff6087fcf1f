"""Tiles: diffusers' own numbers, other ramps beside a plain float64 reference, memory known beforehand, bad input."""

import json
import os
import signal
import sys
import tracemalloc
import types
import warnings

import numpy as np
import pytest
from engine import config, error, images, latents, small_vae
from errors import is_about, refused

from vaemem import VAE, Tiling, _core
from vaemem.engine import configs
from vaemem.engine.model import Runner

pytestmark = pytest.mark.core

PARITY = 1e-5  # of the norm, as for whole images


def pair(name: str, sample_size: int | None, overlap: float = 0.25):
    """diffusers' model that tiles, and ours with its tensors. None: with the tiles of its config."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from torch_vaes import diffusers_vae

    torch.manual_seed(0)
    arch = configs.read_config(config(name))
    theirs = diffusers_vae(arch, torch.float32, "cpu")
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.02 * torch.randn(p.shape)
    core = _core.Model(arch)
    for tensor, _ in core.tensors:
        core.set_tensor(tensor, theirs.state_dict()[tensor].contiguous().numpy())
    theirs.enable_tiling()
    if sample_size is not None:
        theirs.tile_sample_min_size, theirs.tile_latent_min_size = sample_size, sample_size // 4
        theirs.tile_overlap_factor = overlap
    return theirs, VAE(core, config=config(name))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "sample_size", "overlap", "h", "w", "batch"),
    [
        ("sd", None, 0.25, 13, 30, 1),  # the config says nothing: 32 pixels
        ("flux", 32, 0.25, 20, 8, 2),  # one column, and a last row that ends within the one before
        ("odd", 32, 0.5, 9, 11, 1),
        ("sd", 16, 0.25, 5, 10, 1),  # the last tile has one latent
        ("sd", 16, 0.75, 7, 9, 2),  # more than half is shared: borders of borders
        ("flux", 64, 0.0, 18, 33, 1),  # nothing is
        ("sd", 32, 0.25, 8, 8, 2),  # one tile: an ordinary run
        ("odd", 48, 0.25, 5, 2, 1),  # less than a tile
    ],
)
def test_parity(name, sample_size, overlap, h, w, batch):
    """Every number of diffusers' tiled_decode and tiled_encode, by way of its decode and encode."""
    theirs, vae = pair(name, sample_size, overlap)
    import torch

    tiling = Tiling(sample_size, overlap)
    z, x = latents(vae, h, w, batch), images(4 * h, 4 * w, batch)
    with torch.no_grad():
        image = theirs.decode(torch.from_numpy(z)).sample.numpy()
        posterior = theirs.encode(torch.from_numpy(x)).latent_dist
    got = vae.decode(z, tiling=tiling)
    assert got.shape == image.shape and error(got, image) <= PARITY
    got = vae.encode(x, tiling=tiling)
    assert error(got.moments, posterior.parameters.numpy()) <= PARITY
    assert error(got.logvar, posterior.logvar.numpy()) <= PARITY


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_logvar_is_clamped_after_blending(name):
    """Where log-variances leave [-30, 20] in one tile and not in the other, a blend of clamped ones is another."""
    theirs, vae = pair(name, 32)
    import torch

    last = "quant_conv" if vae.arch["use_quant_conv"] else "encoder.conv_out"
    with torch.no_grad():
        for p in theirs.get_submodule(last).parameters():
            p[len(p) // 2 :] *= 60
    for tensor in (f"{last}.weight", f"{last}.bias"):
        vae._core.set_tensor(tensor, theirs.state_dict()[tensor].numpy())
    x, tiling = images(52, 72, 2), Tiling(32)
    with torch.no_grad():
        posterior = theirs.encode(torch.from_numpy(x)).latent_dist
    got, blended = vae.encode(x, tiling=tiling), np.split(posterior.parameters.numpy(), 2, axis=1)[1]
    shared = np.zeros(blended.shape[2:], bool)  # rows 6 and 7 of a tile of 8 are the next one's first
    for start in range(6, max(shared.shape), 6):
        shared[start : start + 2] = shared[:, start : start + 2] = True
    assert (blended[..., shared] < -30).any() and (blended[..., shared] > 20).any()
    # what clamping each tile beforehand makes: the same but in what is shared
    clamped = reference(lambda tile: vae.encode(tile).moments, x, 4, 1, 8, 2, got.moments.shape, lambda t: t)
    assert error(clamped[:, got.mean.shape[1] :], posterior.logvar.numpy()) > 0.01
    assert error(got.logvar, posterior.logvar.numpy()) <= PARITY and got.logvar.min() == -30 and got.logvar.max() == 20
    assert error(got.mean, posterior.mean.numpy()) <= PARITY


def test_refused_where_diffusers_result_has_another_size():
    """Part of a latent shared: its tiles lie a number of latents apart that their kept pixels do not have."""
    theirs, vae = pair("sd", 16, 0.4)
    import torch

    z = latents(vae, 9, 9)
    with torch.no_grad():
        assert theirs.decode(torch.from_numpy(z)).sample.shape != (1, 3, 36, 36)
    with refused("overlap", 0.4):
        vae.decode(z, tiling=Tiling(16, 0.4))


def test_sample_size_is_the_configs(tmp_path):
    def side(vae):
        return vae.sample_size

    small = config("sd")
    assert side(VAE.random(config=small)) == 32  # diffusers' own default
    vae = VAE.random(config={**small, "sample_size": 64})
    assert side(vae) == 64 and side(VAE.random(config={**small, "sample_size": [48, 64]})) == 48
    assert side(VAE(_core.Model(_core.models()["sd15"]))) == 512 and side(small_vae()) == 32
    vae.save(tmp_path / "vae")
    assert json.loads((tmp_path / "vae/config.json").read_text())["sample_size"] == 64
    file = tmp_path / "vae/diffusion_pytorch_model.safetensors"
    assert side(VAE.load(tmp_path / "vae")) == side(VAE.load(file, config=tmp_path / "vae")) == 64
    assert side(VAE.load(file, config={**small, "sample_size": None})) is None
    known = _core.models()
    assert [configs.sample_size_of(known[name], "") for name in ("sd15", "sdxl", "flux")] == [512, 1024, 1024]
    assert configs.sample_size_of(configs.config_of(known["sdxl"]) | {"sample_size": 256}, "sdxl") == 256
    z = latents(vae, 20, 20)
    assert np.array_equal(vae.decode(z, tiling=Tiling()), vae.decode(z, tiling=Tiling(64)))


# ---- ramps ----


def reference(run, data, length_in, length_out, side, shared, shape, ramp):
    """All tiles in float64, kept, then blended above first, left second, pixel by pixel; lengths per latent."""
    step, (height, width) = side - shared, (data.shape[2] // length_in, data.shape[3] // length_in)
    tiles = {}
    for y in range(0, height, step):
        for x in range(0, width, step):
            ys, xs = (slice(at * length_in, (at + side) * length_in) for at in (y, x))
            tiles[y, x] = run(np.ascontiguousarray(data[:, :, ys, xs])).astype(np.float64)
    result = np.full(shape, np.nan)
    for (y, x), tile in tiles.items():
        for axis, before in ((2, (y - step, x)), (3, (y, x - step))):
            if before in tiles:
                n = min(shared * length_out, tile.shape[axis], tiles[before].shape[axis])
                old, new = np.moveaxis(tiles[before], axis, 0), np.moveaxis(tile, axis, 0)
                for i in range(n):
                    new[i] = old[len(old) - n + i] * (1 - ramp(i / n)) + new[i] * ramp(i / n)
        kept = tile[:, :, : step * length_out, : step * length_out]
        y, x = y * length_out, x * length_out
        result[:, :, y : y + kept.shape[2], x : x + kept.shape[3]] = kept
    return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.875])
@pytest.mark.parametrize(("blend", "ramp"), [("linear", lambda t: t), ("cosine", lambda t: np.sin(np.pi * t / 2) ** 2)])
def test_ramps(blend, ramp, overlap):
    vae = small_vae()
    h, w = (13, 18) if overlap < 0.8 else (10, 12)  # beyond that there is a tile for every latent
    z, x, tiling = latents(vae, h, w, 2), images(4 * h, 4 * w, 2), Tiling(32, overlap, blend)
    shared = int(8 * overlap)
    # the two round differently: a sum of two products in float32 is off by some 1e-7
    want = reference(vae.decode, z, 1, 4, 8, shared, (2, 3, 4 * h, 4 * w), ramp)
    assert error(vae.decode(z, tiling=tiling), want) < 1e-6
    want = reference(lambda tile: vae.encode(tile).moments, x, 4, 1, 8, shared, (2, 8, h, w), ramp)
    assert error(vae.encode(x, tiling=tiling).moments, want) < 1e-6


# ---- formats ----


@pytest.mark.filterwarnings("ignore:decode. the result is not finite")
def test_formats():
    vae = small_vae("flux")
    z, tiling = 3 * latents(vae, 10, 13, 2), Tiling(32)
    z[0, 0, 9, 12] = np.nan
    image = vae.decode(z, tiling=tiling)
    assert np.isnan(image).any() and np.isfinite(image).any()  # in one tile
    got = vae.decode(z, output_type="uint8", tiling=tiling)
    want = np.rint(np.clip(np.nan_to_num((image + 1) * np.float32(127.5)), 0, 255)).transpose(0, 2, 3, 1)
    assert got.dtype == np.uint8 and got.min() == 0 and np.array_equal(got, want)
    for output_type, plain in (("float", image), ("uint8", got)):
        out = np.empty_like(plain)
        assert vae.decode(z, output_type=output_type, out=out, tiling=tiling) is out
        assert np.array_equal(out, plain, equal_nan=output_type == "float") and vae.last_run.output_bytes == 0
    with refused("out"):
        vae.decode(z, out=np.empty((1, 3, 40, 52), np.float32), tiling=tiling)
    z = latents(vae, 10, 13)
    raw = z / np.float32(0.3611) + np.float32(0.1159)
    want = vae.decode(raw, tiling=tiling).astype(np.float64)
    assert error(vae.decode(z, scaled=True, tiling=tiling), want) < 1e-5
    x = (got.astype(np.float32) / np.float32(127.5) - 1).transpose(0, 3, 1, 2)
    plain, scaled = vae.encode(x, tiling=tiling), vae.encode(got, scaled=True, tiling=tiling)
    assert np.array_equal(plain.moments, scaled.moments)
    assert np.allclose(scaled.mode(), (plain.mean - np.float32(0.1159)) * np.float32(0.3611), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_picture_of_what_is_no_number_is_told_once(dtype):
    """Bytes do not show it, in whichever tile it is, and the warning is the caller's."""
    vae, z = small_vae(dtype=dtype), latents(small_vae(), 12, 12)
    z[0, 0, -1, -1] = np.nan
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        vae.decode(z, output_type="uint8", tiling=Tiling(16))
    assert [(is_about(w.message, "decode"), w.filename) for w in seen] == [(True, __file__)]
    assert sum(f"{dtype}: not finite" in note for note in vae.last_run.notes) == 1 and not vae.last_run.finite
    z[0, 0, -1, -1] = 0
    vae.decode(z, output_type="uint8", tiling=Tiling(16))
    assert vae.last_run.notes == ("16 tiles of 16x16",)


def test_any_number_of_threads():
    vae = small_vae()
    z = latents(vae, 12, 20)
    images_ = []
    for vae.threads in (1, 3):
        images_.append(vae.decode(z, tiling=Tiling(32)))
    assert np.array_equal(*images_)


# ---- memory ----


@pytest.mark.parametrize("pixels", ["float", "uint8"])
@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    ("sample_size", "overlap", "h", "w", "batch"),
    [(32, 0.25, 20, 27, 2), (32, 0.75, 6, 21, 1), (128, 0.5, 33, 36, 1), (32, 0, 8, 8, 1)],
)
def test_memory_is_known_beforehand(op, pixels, sample_size, overlap, h, w, batch):
    """Estimate and record agree in every field but the seconds, and NumPy holds what they say it does."""
    vae, tiling = small_vae(), Tiling(sample_size, overlap)
    data = latents(vae, h, w, batch) if op == "decode" else images(4 * h, 4 * w, batch)
    if op == "encode" and pixels == "uint8":
        data = (np.ascontiguousarray(data.transpose(0, 2, 3, 1)) * 127 + 127).astype(np.uint8)
    how = dict(tiling=tiling) if op == "encode" else dict(tiling=tiling, output_type=pixels)
    tracemalloc.start()
    try:
        result = getattr(vae, op)(data, **how)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    got = vae.last_run
    want = vae.estimate(op, 4 * h, 4 * w, batch, output_type=pixels, tiling=tiling)
    assert [field for field in vars(got) if getattr(got, field) != getattr(want, field)] == ["pass_seconds", "seconds"]
    assert got.peak_bytes == max(live for _, live in got.timeline) == dict(got.timeline)[got.peak_pass]
    assert got.peak_bytes <= got.reserved_bytes
    side = sample_size // 4
    rows, columns = (len(range(0, length, side - int(side * overlap))) for length in (h, w))
    if (h, w) == (8, 8):  # an ordinary run
        assert got.notes == ()
        return
    assert got.notes == (f"{rows * columns} tiles of {sample_size}x{sample_size}",)
    nbytes = (result.moments if op == "encode" else result).nbytes
    assert got.output_bytes == nbytes
    first = 4 * min(side, h), 4 * min(side, w)
    tile = vae._core.plan(
        op, *first, batch, threads=vae.threads, own_output=False, pixels=pixels if op == "encode" else "float"
    )
    held = nbytes + got.scratch_bytes - tile["peak"]["scratch"]
    assert got.activations_bytes == tile["peak"]["activations"] and got.weights_bytes == tile["peak"]["weights"]
    assert held <= peak <= held + (160 << 10)  # Python's own objects, and 96 KiB that NumPy works in


def test_work_is_that_of_all_tiles():
    vae = small_vae()
    one = vae.estimate("decode", 32, 32)
    four = vae.estimate("decode", 64, 64, tiling=Tiling(32, 0))
    assert four.flops == tuple(4 * flops for flops in one.flops)
    assert (
        vae.estimate("decode", 2048, 2048, tiling=Tiling(64)).peak_bytes < vae.estimate("decode", 2048, 2048).peak_bytes
    )
    assert vae.estimate("encode", 1 << 16, 1 << 16, tiling=Tiling(64)).output_bytes == 8 * 4 << 28


def test_a_kept_arena_and_earlier_outputs():
    vae, tiling = small_vae(), Tiling(32)
    z = latents(vae, 20, 20)
    kept = vae.decode(z, tiling=tiling)
    held = vae.reserved_bytes  # the result is NumPy's
    assert vae._runner.held_bytes == held, "what memory_limit='auto' counts as the VAE's own"
    assert np.array_equal(kept, vae.decode(z, tiling=tiling)) and vae.reserved_bytes == held
    assert vae.last_run.reserved_bytes == vae.estimate("decode", 80, 80, tiling=tiling).reserved_bytes
    vae.decode(latents(vae, 40, 40))
    vae.decode(z, tiling=tiling)
    assert vae.last_run.reserved_bytes > vae.estimate("decode", 80, 80, tiling=tiling).reserved_bytes
    assert vae.last_run.peak_bytes == vae.estimate("decode", 80, 80, tiling=tiling).peak_bytes


# ---- progress, interruption ----


@pytest.mark.parametrize("op", ["encode", "decode"])
def test_progress(op):
    vae = small_vae()
    data = latents(vae, 20, 27, 2) if op == "decode" else images(80, 108, 2)
    seen = []
    getattr(vae, op)(data, tiling=Tiling(32), progress=lambda *rows: seen.append(rows))
    total = 2 * 4 * 5 * (8 + 8 + 8 + 2)  # items, pixels a latent, columns, heights
    assert {rows for _, rows in seen} == {total} and seen[-1][0] == total
    done = [rows for rows, _ in seen]
    assert done == sorted(done) and len(set(done)) >= 20  # the end of each tile, at least


def test_progress_of_a_tile_that_is_run_again(monkeypatch):
    """As float16 does where it overflows."""
    vae, once, seen = small_vae(), Runner.run, []
    monkeypatch.setattr(Runner, "run", lambda *a, **how: (once(*a, **how), once(*a, **how))[1])
    vae.decode(latents(vae, 8, 20), tiling=Tiling(32), progress=lambda done, total: seen.append(done))
    assert seen == sorted(seen) and seen[-1] == 4 * 4 * (8 + 2)


def test_the_bar_says_which_tile(monkeypatch):
    said = []

    class Bar:
        n = total = 0

        def __init__(self, desc, unit):
            self.set_description_str(desc)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            said.append((self.n, self.total))

        def set_description_str(self, desc, refresh=True):
            said.append(desc)

        def update(self, rows):
            self.n += rows

    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    vae = small_vae()
    vae.decode(latents(vae, 8, 16), progress=True, tiling=Tiling(32, 0))
    assert list(dict.fromkeys(said)) == ["decode", "decode, tile 1 of 2", "decode, tile 2 of 2", (64, 64)]
    del said[:]
    vae.decode(latents(vae, 8, 8), progress=True)
    assert said[0] == "decode" and len(said) == 2


@pytest.mark.parametrize("how", ["raise", "signal"])
def test_an_interrupted_run_leaves_the_vae_usable(how):
    """In the third tile: by an exception in progress, and by Ctrl-C."""
    vae, tiling = small_vae(), Tiling(32)
    z = latents(vae, 20, 20)
    want = vae.decode(z, tiling=tiling)
    vae.trim()
    held, before = vae.reserved_bytes, vae.last_run

    def stop(done, total):
        if done > 2 * 32:
            if how == "raise":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            vae.decode(z, tiling=tiling, progress=stop)
    finally:
        signal.signal(signal.SIGINT, old)
    vae.trim()
    assert vae.reserved_bytes == held and vae.last_run is before
    assert np.array_equal(vae.decode(z, tiling=tiling), want)


def test_settings_changed_meanwhile_are_the_next_runs():
    vae, tiling = small_vae(), Tiling(32)
    vae.threads = 1

    def change(done, total):
        vae.threads = 0  # refused by a run that begins with it

    vae.decode(latents(vae, 20, 20), tiling=tiling, progress=change)
    assert vae.last_run.threads == 1
    with refused("threads", 0, names=["1024"]):
        vae.decode(latents(vae, 20, 20), tiling=tiling)


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "exception", "message"),
    [
        (lambda v, z: Tiling(overlap=1), ValueError, ("overlap", 1)),
        (lambda v, z: Tiling(overlap=-0.25), ValueError, ("overlap", -0.25)),
        (lambda v, z: Tiling(overlap=float("nan")), ValueError, ("overlap", "nan")),
        (lambda v, z: Tiling(overlap="a quarter"), TypeError, ("overlap", "'a quarter'")),
        (lambda v, z: Tiling(overlap=True), TypeError, ("overlap", "True")),
        (lambda v, z: Tiling(sample_size=512.0), TypeError, ("sample_size", 512.0)),
        (lambda v, z: Tiling(sample_size=0), ValueError, ("sample_size", 0)),
        (lambda v, z: Tiling(blend="cosin"), ValueError, ("blend", "'cosin'")),
        (lambda v, z: Tiling(blend=None), ValueError, ("blend", "None")),
        (lambda v, z: v.decode(z, tiling=True), TypeError, ("tiling", "bool")),
        (lambda v, z: v.encode(images(8, 8), tiling=512), TypeError, ("tiling", "int")),
        (lambda v, z: v.decode(z, tiling=Tiling(30)), ValueError, ("tiling", 30)),
        (lambda v, z: v.decode(z, tiling=Tiling(2)), ValueError, ("tiling", 2)),
        (lambda v, z: v.decode(z, tiling=Tiling(8)), ValueError, ("overlap", 0.25)),
        (lambda v, z: v.decode(z, tiling=Tiling(32, 0.3)), ValueError, ("overlap", 0.3)),
        (lambda v, z: v.decode(z, tiling=Tiling(32, 1 - 1e-12)), ValueError, ("overlap", 0.999999999999)),
        (lambda v, z: v.decode(z[0], tiling=Tiling(32)), ValueError, ("z", "(4, 9, 9)")),
        (lambda v, z: v.decode(z[:0], tiling=Tiling(32)), ValueError, ("batch", 0)),
        (lambda v, z: v.decode(z[:, :, :0], tiling=Tiling(32)), ValueError, ("height", 0)),
        (lambda v, z: v.encode(images(64, 42), tiling=Tiling(32)), ValueError, ("width", 42)),
        (lambda v, z: v.estimate("paint", 64, 64, tiling=Tiling(32)), ValueError, ("op", "'paint'")),
        (lambda v, z: v.estimate("decode", 64, -64, tiling=Tiling(32)), ValueError, ("width", -64)),
        (lambda v, z: v.decode(z, out=z, tiling=Tiling(32)), ValueError, ("out",)),
    ],
)  # fmt: skip
def test_bad_input(call, exception, message):
    vae = small_vae()
    z = latents(vae, 9, 9)
    want = vae.decode(z, tiling=Tiling(32))
    with refused(*message, kind=exception):
        call(vae, z)
    with refused("batch", kind=OverflowError):
        vae.estimate("decode", 2**20, 2**20, 2**40, tiling=Tiling(32))
    assert np.array_equal(vae.decode(z, tiling=Tiling(32)), want)


def test_no_config_no_sample_size():
    vae = small_vae()
    vae.sample_size = None
    with refused("sample_size", names=["512"]):
        vae.decode(latents(vae, 20, 20), tiling=Tiling())
    vae.sample_size = 1.5
    with refused("sample_size", 1.5, kind=TypeError):
        vae.decode(latents(vae, 20, 20), tiling=Tiling())
