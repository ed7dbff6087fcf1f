"""Videos, run by the engine: all frames are those of diffusers, in the same bits under every limit."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading

import numpy as np
import pytest
from engine import BACKENDS, FRAMES, config, error, run_core, small_vae
from errors import refused, warned

import vaemem
from vaemem import VAE, Tiling, _core
from vaemem._common import frames_factor, latent_factor
from vaemem.engine.configs import config_of

pytestmark = pytest.mark.core

# Small, with the levels of the real ones: four or eight frames of a video for one of latents.
_LEVELS = {"dim_mult": [1, 2, 2, 2], "temperal_downsample": [False, True, True]}
CONFIGS = {name: FRAMES[name] | _LEVELS for name in ("wan", "wan22")}
CONFIGS["wan22"] |= {"scale_factor_spatial": 16}
_LTX = {"_class_name": "AutoencoderKLLTX2Video", "latent_channels": 8, "layers_per_block": [1, 2, 1, 1, 1]}
CONFIGS["ltx2"] = _LTX | {"block_out_channels": [16, 32, 64, 128], "decoder_block_out_channels": [16, 32, 64]}
CONFIGS["ltx2"] |= {"decoder_layers_per_block": [1, 2, 1, 1], "decoder_causal": False}
CONFIGS["ltx2.3"] = _LTX | {"block_out_channels": [16, 32, 64, 64], "decoder_block_out_channels": [20, 40, 40, 80]}
CONFIGS["ltx2.3"] |= {"decoder_layers_per_block": [1, 1, 2, 1, 1], "decoder_causal": False}
CONFIGS["ltx2.3"] |= {"decoder_spatio_temporal_scaling": [True] * 4, "upsample_residual": [False] * 4}
CONFIGS["ltx2.3"] |= {"upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"]}
CONFIGS["ltx2.3"] |= {"upsample_factor": [2, 2, 1, 2], "decoder_spatial_padding_mode": "zeros"}
NAMES, WAN = list(CONFIGS), ["wan", "wan22"]
LIMIT = 1e-5


def video_vae(name: str = "wan", **kwargs) -> VAE:
    return VAE.random(config=CONFIGS[name], **kwargs)


def latents(vae: VAE, frames: int, h: int, w: int, batch: int = 1, seed: int = 0) -> np.ndarray:
    shape = (batch, vae.arch["latent_channels"], frames, h, w)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def videos(vae: VAE, frames: int, h: int, w: int, batch: int = 1) -> np.ndarray:
    """Return random videos whose latents have `frames` frames of h by w."""
    shape = (batch, 3, (frames - 1) * frames_factor(vae.arch) + 1, *(side * latent_factor(vae.arch) for side in (h, w)))
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def input_of(vae: VAE, op: str, *size: int, batch: int = 1) -> np.ndarray:
    return (latents if op == "decode" else videos)(vae, *size, batch=batch)


def run(vae: VAE, op: str, data: np.ndarray, **how):
    return vae.decode(data, **how) if op == "decode" else vae.encode(data, **how).moments


@pytest.fixture(scope="module")
def references():
    """diffusers' classes with the weights of `video_vae`, in float64, and functions that run them."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    made = {}

    def reference(name: str, dtype=torch.float64):
        if (name, dtype) not in made:
            vae = video_vae(name)
            settings = {key: value for key, value in config_of(vae.arch).items() if key[0] != "_"}
            theirs = getattr(diffusers, CONFIGS[name]["_class_name"])(**settings).eval()
            core = vae._core
            state = {one: torch.from_numpy(core.get_tensor(one)) for one, _ in core.tensors}
            theirs.load_state_dict(state)
            made[name, dtype] = theirs.to(dtype)
        theirs = made[name, dtype]

        def run(op: str, data: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                said = getattr(theirs, op)(torch.from_numpy(data).to(dtype))
                said = said.sample if op == "decode" else said.latent_dist.parameters
            return said.double().numpy()

        return run

    return reference


# (frames, height, width) of latents: one frame more than pairs of Winograd's fill, and both orientations
SIZES = [(2, 3, 5), (3, 6, 4), (4, 5, 5), (5, 1, 2), (9, 2, 1)]
MIRRORS = "ltx2"  # needs two latents


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "op"), [(name, op) for name in NAMES for op in ("decode", "encode")])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_videos_are_diffusers(references, name, op, size):
    vae = video_vae(name)
    size = tuple(max(side, 2) for side in size) if name == MIRRORS else size
    data = input_of(vae, op, *size, batch=2 if size[0] < 4 else 1)
    got = run(vae, op, data)
    want = references(name)(op, data)
    assert got.shape == want.shape and error(got, want) <= LIMIT


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_bfloat16_is_as_near_as_pytorchs(references, name, op):
    torch = pytest.importorskip("torch")
    data = input_of(video_vae(name), op, 3, 6, 8)
    want = references(name)(op, data)
    theirs = error(references(name, torch.bfloat16)(op, data), want)
    references(name, torch.float64)  # a module is of one type at a time
    assert error(run(video_vae(name, dtype="bfloat16"), op, data), want) <= 1.1 * theirs


@pytest.mark.each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "how", [("float32", "highest"), ("float32", "high"), ("float16", "highest"), ("bfloat16", "highest")]
)
def test_every_instruction_set(references, backend, how):
    from gpu import LIMIT as LIMITS

    dtype, precision = how
    data = latents(video_vae(), 3, 5, 8)
    vae = video_vae(dtype=dtype, precision=precision)
    got, record = run_core(vae._core, "decode", data, backend=backend)
    assert record["backend"] == backend
    limit = {"highest": LIMIT, "high": 1e-4}[precision] if dtype == "float32" else LIMITS[dtype]
    assert error(got, references("wan")("decode", data)) <= limit


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(2, 6, 4), (2, 4, 6), (3, 5, 5)], ids=str)
def test_the_bits_are_those_of_every_plan(name, op, dtype, size):
    """For every plan, number of threads and batch. Before each chain, memory that it must not read becomes NaN; after
    it, memory that it must not write is unchanged; and each run takes what its plan says."""
    vae = video_vae(name, dtype=dtype)
    core, data = vae._core, input_of(vae, op, *size, batch=2)
    want, record = run_core(core, op, data, check=True)
    assert np.isfinite(want).all()
    frames, height, width = data.shape[2:] if op == "encode" else want.shape[2:]
    size = dict(height=height, width=width, batch=2, frames=frames)
    plans = vae.tradeoff(op, **size)
    limits = [0, *(max(plan.peak_bytes, plan.reserved_bytes) for plan in plans)]
    for limit in limits:
        for threads in (1, 2, 5) if limit in (0, limits[-1]) else (2,):
            try:
                planned = core.plan(op, **size, threads=threads, memory_limit=limit)
            except ValueError:  # more threads need more memory
                continue
            core.trim()
            got, record = run_core(core, op, data, threads, check=True, memory_limit=limit)
            assert np.array_equal(got, want) and record["peak"] == planned["peak"]
    one, _ = run_core(core, op, data[1:])
    assert np.array_equal(one[0], want[1])


@pytest.mark.parametrize("op", ["decode", "encode"])
def test_estimates_are_runs(op):
    vae = video_vae()
    data = input_of(vae, op, 3, 3, 5)
    run(vae, op, data)
    (_, _, frames, h, w) = videos(vae, 3, 3, 5).shape
    assert frames == 9 and vae.last_run.frames == 9 and "of 9 frames" in repr(vae.last_run)
    planned = vae.estimate(op, h, w, frames=9)
    assert planned.peak_bytes == vae.last_run.peak_bytes and planned.reserved_bytes == vae.last_run.reserved_bytes
    least = vae.smallest(op, h, w, frames=9)
    want = run(vae, op, data)
    vae.trim()
    assert np.array_equal(run(vae, op, data, memory_limit=least), want)
    assert max(vae.last_run.peak_bytes, vae.last_run.reserved_bytes) <= least
    with refused("memory_limit", names=["with 9 frames"]):
        run(vae, op, data, memory_limit=least - 1)


def test_the_largest_that_fit():
    vae = video_vae()
    limit = vae.smallest("decode", 64, 96, frames=9)
    assert vae.largest_frames("decode", 64, 96, limit) >= 9
    height, width = vae.largest("decode", limit, aspect=1.5, frames=9)
    assert height * width >= 64 * 96
    with refused("memory_limit"):
        vae.largest_frames("decode", 64, 96, 1000)
    with refused("frames", names=["images"]):
        video_vae(videos=False).largest_frames("decode", 64, 96, limit)
    with refused("frames", names=["images"]):
        vaemem.estimate_sweep("sdxl", "decode", [256], frames=5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "height", "width", "frames", "most"),  # GiB besides weights and video
    [
        ("qwen-image", 832, 480, 81, 1.3), ("qwen-image", 480, 832, 81, 1.3), ("qwen-image", 720, 1280, 81, 2.0),
        ("ltx2.3", 480, 832, 121, 1.0), ("ltx2.3", 704, 1280, 121, 1.4),
    ],
)  # fmt: skip
def test_memory_grows_with_one_side_and_the_frames_alone(name, height, width, frames, most):
    """Rows of all frames are streamed along the longer side. So if that side grows, memory grows only by the tensors
    of the middle block, which are stored whole at the size of the latents."""
    vae = VAE.random(name, parts="decoder", videos=True)
    run = vae.estimate("decode", height, width, frames=frames)
    assert vae.estimate("decode", width, height, frames=frames).peak_bytes == run.peak_bytes
    least = vae.smallest("decode", height, width, frames=frames) - run.output_bytes - vae.reserved_bytes
    assert 0.5 * most * 2**30 < least <= most * 2**30


def test_arrays_of_any_kind(tmp_path):
    vae = video_vae()
    z = latents(vae, 2, 2, 3)
    want = vae.decode(z)
    assert np.array_equal(vae.decode(np.asfortranarray(z)), want)
    assert np.array_equal(vae.decode(z.astype(np.float64)), want)
    assert np.array_equal(vae.decode(np.repeat(z, 2, axis=3)[:, :, :, ::2]), want)
    mapped = np.lib.format.open_memmap(tmp_path / "video.npy", "w+", np.float32, want.shape)
    assert vae.decode(z, out=mapped) is mapped and np.array_equal(mapped, want)
    assert vae.last_run.output_bytes == 0
    pictures = vae.decode(z, output_type="uint8")
    assert pictures.shape == (1, 5, 16, 24, 3)
    assert np.array_equal(
        pictures, np.rint((want + 1) * np.float32(127.5)).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 4, 1)
    )
    with refused("out"):
        vae.decode(z, out=mapped[:, :, :4])
    for wrong in (z[0], z[None], z[:, :3], z[:, :, :0]):
        with refused("z"):
            vae.decode(wrong)
    x = np.random.default_rng(2).integers(0, 256, (1, 7, 30, 24, 3), np.uint8)
    encoded = vae.encode(x, pad="edge")
    assert vae.last_run.notes == (
        "used the first 5 of 7 frames: the others fill no latent frame", "padded from 30x24 to 32x24 (edge)",
    )  # fmt: skip
    assert encoded.mean.shape == (1, 4, 2, 4, 3)
    padded = np.pad(x[:, :5], ((0, 0), (0, 0), (0, 2), (0, 0), (0, 0)), mode="edge")
    floats = (padded.astype(np.float32) / np.float32(127.5) - 1).transpose(0, 4, 1, 2, 3)
    assert np.array_equal(vae.encode(floats).mean, encoded.mean)
    assert vae.decode(encoded.mode(), size=encoded.size).shape == (1, 3, 5, 30, 24)
    with refused("tiling", names=["memory_limit"]):
        vae.decode(z, tiling=vaemem.Tiling(16))


def test_pillow_images_of_every_frame():
    pytest.importorskip("PIL.Image")
    vae = video_vae()
    z = latents(vae, 2, 3, 4, batch=2)
    ((first, *others), _) = shown = vae.decode(z, output_type="pil")
    assert len(shown) == 2 and len(others) == 4
    assert np.array_equal(np.asarray(first), vae.decode(z, output_type="uint8")[0, 0])


def test_latents_of_pipelines():
    """Scaled latents are normalised channel by channel, as WanPipeline does it."""
    vae = video_vae()
    z = latents(vae, 2, 3, 4)
    mean, std = (
        np.asarray(vae.arch[key], np.float32).reshape(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    assert np.allclose(vae.decode(z, scaled=True), vae.decode(z * std + mean), atol=1e-6)
    x = videos(vae, 2, 3, 4)
    assert np.allclose(vae.encode(x, scaled=True).mode(), (vae.encode(x).mean - mean) / std, atol=1e-6)


@pytest.mark.parametrize("name", WAN)
def test_one_frame_is_an_image(name):
    """A VAE of videos runs one frame as a VAE of images does, to the bit."""
    vae, images = video_vae(name), video_vae(name, videos=False)
    assert images.arch == {key: value for key, value in vae.arch.items() if key != "videos"}
    assert images.reserved_bytes < vae.reserved_bytes / 2
    for op in ("decode", "encode"):
        data = input_of(vae, op, 1, 4, 6, batch=2)
        want = run(images, op, data[:, :, 0])
        for one in (vae, images):
            assert np.array_equal(run(one, op, data)[:, :, 0], want) and np.array_equal(
                run(one, op, data[:, :, 0]), want
            )
        several = input_of(vae, op, 2, 4, 6)
        with refused("z" if op == "decode" else "x", names=["videos=True"]):
            run(images, op, several)
    with refused("frames", names=["videos=True"]):
        images.estimate("decode", 32, 32, frames=5)


@pytest.mark.parametrize("name", ["ltx2", "ltx2.3"])
def test_ltx_is_of_videos_alone(name):
    """An image is a video of one frame."""
    vae = video_vae(name)
    assert vae.arch["videos"] and "latents_std" in vae.state_dict()
    for op in ("decode", "encode"):
        data = input_of(vae, op, 1, 2, 3)
        assert np.array_equal(run(vae, op, data)[:, :, 0], run(vae, op, data[:, :, 0]))
    mean, std = (vae.state_dict()[f"latents_{one}"].reshape(1, -1, 1, 1, 1) for one in ("mean", "std"))
    z = latents(vae, 2, 2, 3)
    assert np.allclose(vae.decode(z, scaled=True), vae.decode(z * std + mean), atol=1e-6)
    with refused("videos", names=["one"]):
        video_vae(name, videos=False)
    with refused("frames", names=["8"]):
        vae.estimate("decode", 64, 64, frames=5)
    if name == MIRRORS:
        with refused("height", names=["64"]):
            vae.decode(latents(vae, 2, 1, 3))


def test_who_runs_videos():
    assert all(small_vae(name).arch.get("videos", False) is (name in NAMES) for name in FRAMES)
    assert VAE.random("qwen-image", videos=True, parts="decoder").arch["videos"]
    assert "videos" not in VAE.random("qwen-image", parts="decoder").arch
    other = CONFIGS["wan"] | {"temperal_downsample": [True, True, True]}
    assert "videos" not in VAE.random(config=other).arch
    for kwargs in ({"model": "sdxl"}, {"config": config("qwen21")}):
        with refused("videos", names=["Wan", "LTX-2"]):
            VAE.random(videos=True, parts="decoder", **kwargs)
    for frames in (0, -3, 2, 7, 1 << 30):
        with refused("frames"):
            VAE.random(config=CONFIGS["wan"]).estimate("decode", 32, 32, frames=frames)
    with refused("config", names=["videos"]):
        _core.Model(_core.models()["sdxl"] | {"videos": True})


def test_copies_and_files(tmp_path):
    vae = video_vae(seed=3)
    z = latents(vae, 3, 3, 4)
    want = vae.decode(z)
    vae.save(tmp_path / "vae")
    for other in (VAE.load(tmp_path / "vae"), copy.deepcopy(vae), pickle.loads(pickle.dumps(vae)), vae.copy()):
        assert other.arch == vae.arch and np.array_equal(other.decode(z), want)
    vae.save(tmp_path / "a.safetensors")
    assert np.array_equal(VAE.load(tmp_path / "a.safetensors", config=CONFIGS["wan"]).decode(z), want)
    images = VAE.load(tmp_path / "vae", videos=False)
    assert np.array_equal(images.decode(z[:, :, 0]), vae.decode(z[:, :, 0]))
    with refused("layout"):
        vae.save(tmp_path / "b.safetensors", layout="ldm")
    with refused(None, names=["videos=True"]):
        images.save(tmp_path / "c")


@pytest.mark.thorough
def test_wans_own_names(tmp_path):
    """wan_2.1_vae.safetensors has the names of wan/modules/vae.py, and no config."""
    from safetensors.numpy import save_file

    from vaemem.engine import layouts

    vae = VAE.random("qwen-image", parts="decoder", videos=True)
    tensors = {name: vae._core.get_tensor(name) for name, _ in vae._core.tensors}
    spelt = layouts.spell(tensors, "wan", 4)
    assert spelt["decoder.up_blocks.0.upsamplers.0.time_conv.weight"] == "decoder.upsamples.3.time_conv.weight"
    save_file({spelt[name]: tensor for name, tensor in tensors.items()}, tmp_path / "wan.safetensors")
    loaded = VAE.load(tmp_path / "wan.safetensors", parts="decoder", videos=True)
    z = latents(vae, 2, 2, 3)
    assert np.array_equal(loaded.decode(z), vae.decode(z))
    assert "videos" not in VAE.load(tmp_path / "wan.safetensors", parts="decoder").arch


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ltx2", "ltx2.3"])
def test_checkpoints_of_ltx(tmp_path, name):
    """The authors' checkpoints have the VAE under ``vae.``, next to the rest of the model, and no config."""
    from safetensors.numpy import save_file

    from vaemem.engine import layouts

    vae = VAE.random(name, parts="decoder", dtype="bfloat16")
    tensors = {one: vae._core.get_tensor(one) for one, _ in vae._core.tensors}
    spelt = layouts.spell(tensors, "ltx", 4)
    assert (
        spelt["decoder.mid_block.resnets.0.conv1.conv.weight"] == "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight"
    )
    assert spelt["decoder.up_blocks.1.upsamplers.0.conv.conv.bias"] == "decoder.up_blocks.3.conv.conv.bias"
    assert spelt["decoder.up_blocks.1.resnets.0.conv1.conv.bias"] == "decoder.up_blocks.4.res_blocks.0.conv1.conv.bias"
    assert spelt["latents_mean"] == "per_channel_statistics.mean-of-means"
    encoder = ["encoder.down_blocks.1.resnets.0.conv1.conv.bias", "encoder.down_blocks.1.downsamplers.0.conv.conv.bias"]
    encoder = [*layouts.spell([*encoder, "encoder.mid_block.resnets.1.conv1.conv.bias"], "ltx", 4).values()]
    assert [one.split(".")[2] for one in encoder] == ["2", "3", "8"]
    stored = {f"vae.{spelt[one]}": tensor for one, tensor in tensors.items()}
    stored |= {f"vae.per_channel_statistics.{one}": np.ones(128, np.float32) for one in ("channel", "mean-of-stds")}
    others = ["audio_vae.decoder.up.0.block.0.conv1.conv.weight", "audio_vae.per_channel_statistics.mean-of-means"]
    stored |= dict.fromkeys([*others, "model.diffusion_model.proj_out.weight"], np.ones((2, 2), np.float32))
    save_file(stored, tmp_path / "ltx.safetensors")
    loaded = VAE.load(tmp_path / "ltx.safetensors", parts="decoder", dtype="bfloat16")
    assert loaded.model == name
    z = latents(vae, 2, 2, 2)
    assert np.array_equal(loaded.decode(z), vae.decode(z))


@pytest.mark.parametrize("name", ["wan", "ltx2"])
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_every_allocation_fails_once(op, name):
    vae = video_vae(name)
    data = input_of(vae, op, 3, 2, 3)
    want = run(vae, op, data)
    vae.on_out_of_memory = "raise"
    failed = 0
    while True:
        vae.trim()
        held = vae.reserved_bytes
        _core.fail_alloc_at(failed + 1)
        try:
            got = run(vae, op, data)
        except MemoryError:
            failed += 1
            assert vae.reserved_bytes == held
        else:
            break
        finally:
            _core.fail_alloc_at(0)
    assert failed >= 3 and np.array_equal(got, want)


def test_progress_and_an_end():
    vae = video_vae()
    z, seen = latents(vae, 3, 8, 8), []
    want = vae.decode(z, progress=lambda done, all: seen.append((done, all)))
    assert seen[-1][0] == seen[-1][1] > 0
    button = threading.Event()
    button.set()
    with pytest.raises(vaemem.Cancelled):
        vae.decode(z, cancel=button)

    def stop(done, all):
        raise KeyError("stop")

    with pytest.raises(KeyError):
        vae.decode(z, progress=stop)
    assert np.array_equal(vae.decode(z), want)


def test_numbers_that_are_not_finite_stay():
    vae = video_vae()
    z = latents(vae, 3, 4, 4)
    z[0, 0, 1, 2, 2] = np.nan
    video = vae.decode(z)
    assert np.isfinite(video[:, :, 0]).all() and np.isnan(video[:, :, 1:]).any()  # no frame sees a later one


# ---- files, PyTorch ----


def test_the_command_line(tmp_path, monkeypatch, capsys):
    """A video file and a folder of frames, both ways; lossy, but of the same frames."""
    pytest.importorskip("av")
    from vaemem.__main__ import main
    from vaemem.engine.video_files import read_video, write_video

    vae = video_vae()
    vae.save(tmp_path / "vae")
    z = latents(vae, 2, 4, 6, batch=2) * 3
    np.save(tmp_path / "z.npy", z)
    monkeypatch.chdir(tmp_path)
    assert main("decode z.npy --weights vae --scaled -o a.mp4".split()) == 0
    assert 0 == main("decode z.npy --weights vae --scaled -o frames".split())
    want = vae.decode(z, scaled=True, output_type="uint8")
    for i in range(2):
        assert np.array_equal(read_video(tmp_path / f"frames-{i}")[0][0], want[i])
        close = read_video(tmp_path / f"a-{i}.mp4")[0][0]
        assert close.shape == want[i].shape and np.abs(close.astype(float) - want[i]).mean() < 20
    main("encode frames-1 --weights vae -o e.npy".split())
    assert np.array_equal(np.load("e.npy"), vae.encode(want[1:]).mode())
    main("encode a-0.mp4 --weights vae --scaled -o e.npy".split())
    assert np.load("e.npy").shape == (1, 4, 2, 4, 6)
    write_video(tmp_path / "grey.webm", np.full((3, 32, 48, 3), 128, np.uint8), 24)
    assert np.abs(read_video(tmp_path / "grey.webm")[0].astype(int) - 128).max() < 3
    (tmp_path / "bad.mp4").write_text("no video")
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for line in (
        "decode z.npy --weights vae -o a.png", "decode z.npy --weights vae -o a.mp4 --tile 32",
        "encode bad.mp4 --weights vae -o e.npy", "encode gone.mp4 --weights vae -o e.npy",
        "encode empty --weights vae -o e.npy", "encode frames-0 frames-1 --weights vae -o e.npy",
        "encode a-0.mp4 --weights vae -o latents/",
    ):  # fmt: skip
        assert main(line.split()) == 2 and capsys.readouterr().err
    np.save("one.npy", z[:1, :, :1])
    assert main("decode one.npy --weights vae --scaled -o one.png".split()) == 0 and os.path.isfile("one.png")
    assert main("decode one.npy --weights vae --scaled -o one.v2/".split()) == 0
    assert os.listdir("one.v2") == ["00000.png"]


def test_a_target_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("av")
    from vaemem.__main__ import main

    vae = video_vae()
    vae.save(tmp_path / "vae")
    monkeypatch.chdir(tmp_path)
    np.save("z.npy", latents(vae, 2, 4, 6))
    os.mkdir("kept")
    (tmp_path / "kept" / "00009.png").write_text("of another video")
    (tmp_path / "file").write_text("no folder")
    os.mkdir("folder.mp4")
    (tmp_path / "folder.mp4" / "1.png").write_text("of another video")
    monkeypatch.setattr(VAE, "decode", lambda *_, **__: pytest.fail("a run"))
    monkeypatch.setattr(VAE, "load", lambda *_, **__: pytest.fail("a load"))
    for given, words in (
        ("-o gone/a.mp4", "gone"), ("-o file", "file"), ("-o kept", "a folder without pictures"),
        ("-o folder.mp4", "a folder without pictures"), ("-o a.mp4 --size 15x16", "even sides"),
        ("-o new --fps 8", "for video files"), ("-o a.mp4 --fps 0", "0.01"), ("-o a.mp4 --fps nan", "0.01"),
    ):  # fmt: skip
        try:
            code = main(f"decode z.npy --weights vae --scaled {given}".split())
        except SystemExit as error:  # of a flag's value
            code = error.code
        assert code == 2 and words in capsys.readouterr().err, given
    monkeypatch.setitem(sys.modules, "av", None)
    assert main("decode z.npy --weights vae --scaled -o a.mp4".split()) and "av" in capsys.readouterr().err


def test_bytes_of_pytorch_and_tiles_of_videos():
    torch = pytest.importorskip("torch")
    vae = video_vae()
    x = np.random.default_rng(1).integers(0, 256, (1, 6, 16, 24, 3), np.uint8)
    assert np.array_equal(vae.encode(torch.from_numpy(x)).mode(), vae.encode(x).mode())
    assert any("frames" in note for note in vae.last_run.notes)
    with refused("tiling", names=["None"]):
        vae.estimate("decode", 128, 128, frames=5, tiling=Tiling(64))
    with refused("tiling", names=["None"]):
        vae.decode(latents(vae, 1, 16, 16), tiling=Tiling(64))
    images = VAE.random(config=CONFIGS["wan"], videos=False)
    for count in (3, 4, 5):
        with refused("x", names=["one"]):
            images.encode(x[:, :count])


def drop_in_of(name: str = "wan"):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    import vaemem.pytorch

    class_name = CONFIGS[name]["_class_name"]
    settings = {key: value for key, value in config_of(video_vae(name).arch).items() if key[0] != "_"}
    torch.manual_seed(0)
    theirs = getattr(diffusers, class_name)(**settings).eval()
    return torch, theirs, getattr(vaemem.pytorch, class_name).from_module(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_the_drop_in_is_diffusers(name):
    torch, theirs, ours = drop_in_of(name)
    z, x = torch.from_numpy(latents(ours.vae, 3, 2, 3)), torch.from_numpy(videos(ours.vae, 2, 2, 3))
    if name in WAN:
        x = torch.cat([x, x[:, :, :2]], 2)  # two frames that diffusers drops
    with torch.no_grad():
        for mine, want in (
            (ours.decode(z).sample, theirs.decode(z).sample),
            (ours.encode(x).latent_dist.parameters, theirs.encode(x).latent_dist.parameters),
            (ours.decode(z[:, :, :1]).sample, theirs.decode(z[:, :, :1]).sample),
        ):
            assert mine.shape == want.shape and error(mine.numpy(), want.double().numpy()) <= LIMIT
        assert ours.to(torch.bfloat16).decode(z.bfloat16()).sample.dtype == torch.bfloat16
    state = ours.float().state_dict()
    assert all(torch.equal(state[key], value) for key, value in theirs.state_dict().items())
    with refused("x"):
        ours.encode(x[..., :-1])


def test_a_pipeline_of_diffusers_makes_a_video():
    """WanPipeline's own code, with vaemem's VAE in place of diffusers'."""
    torch, theirs, ours = drop_in_of()
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(1)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=16, num_layers=1,
    )  # fmt: skip
    scheduler, prompt = FlowMatchEulerDiscreteScheduler(), torch.randn(1, 8, 16)

    def make(vae):
        pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer)
        pipe.set_progress_bar_config(disable=True)
        made = pipe(
            prompt_embeds=prompt, height=32, width=48, num_frames=9, num_inference_steps=2, guidance_scale=1,
            output_type="np", generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return made.frames

    assert error(make(ours), make(theirs).astype(np.float64)) <= 1e-4
    assert ours.last_run.frames == 9


@pytest.mark.parametrize("name", ["wan", "ltx2.3"])
def test_safe_decode_of_a_video(name):
    """If PyTorch runs out of memory, vaemem decodes the video on the CPU."""
    torch, theirs, ours = drop_in_of(name)
    from types import SimpleNamespace

    from vaemem.pytorch import safe_decode

    z = torch.from_numpy(latents(ours.vae, 3, 2, 3))
    with torch.no_grad():
        want = theirs.decode(z).sample

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    theirs.decode = out_of_memory
    safe = safe_decode(SimpleNamespace(vae=theirs))
    with warned(names=["CPU"]):
        got = theirs.decode(z).sample
    assert error(got.numpy(), want.double().numpy()) <= LIMIT and len(safe.notes) == 1


def test_pytorchs_decode_of_a_video_is_predicted(monkeypatch):
    """Before the decode: 81 frames at 480x832 in float32 do not fit 12 GB, and 9 frames do."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    from vaemem.pytorch import decoding

    card = dict(gpu="RTX 3060", memory=12 << 30, free=11 << 30, torch_version="2.6.0", cudnn_version="9.1.0")
    monkeypatch.setattr(decoding, "describe_card", lambda device: dict(card))
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan()
        whole, short = (torch.empty(1, 16, frames, 60, 104) for frames in (21, 3))
    assert "does not fit" in decoding.explain_misfit(vae, whole) and decoding.explain_misfit(vae, short) == ""


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"block_out_channels": (0,)}, ["block_out_channels"]),
        ({"block_out_channels": (16, 32, 64, 0)}, ["block_out_channels"]),
        ({"block_out_channels": (16, 32, 65, 64)}, ["a width that its resampler makes"]),
        ({"decoder_block_out_channels": (20, 40, 41, 80)}, ["decoder_block_out_channels"]),
        ({"decoder_block_out_channels": ()}, ["decoder_block_out_channels"]),
        ({"upsample_factor": (2, 2, 0, 2)}, ["upsample_factor"]),
        ({"upsample_type": ("spatial",) * 4}, ["upsample_type"]),
        ({"upsample_type": ("sideways",) * 4}, ["upsample_type"]),
        ({"downsample_type": "spatial"}, ["downsample_type"]),
        ({"encoder_layers_per_block": (1, 2, 1, 1)}, ["encoder_layers_per_block"]),
        ({"decoder_layers_per_block": (1, 1, 99, 1, 1)}, ["decoder_layers_per_block"]),
        ({"videos": False}, ["videos"]),
        ({"encoder_causal": False}, ["encoder_causal"]),
        ({"family": "lxt"}, ["kl, wan, hunyuan_image, tiny or ltx"]),
    ],
    ids=str,
)
def test_architectures_of_ltx_that_cannot_be(change, names):
    arch = dict(video_vae("ltx2.3").arch) | change
    with refused(None, names=names):
        _core.Model(arch, "decoder")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"timestep_conditioning": True}, "timestep_conditioning"),
        ({"encoder_causal": False}, "encoder_causal"),
        ({"decoder_inject_noise": [True] * 5}, "decoder_inject_noise"),
        ({"decoder_spatial_padding_mode": "replicate"}, "decoder_spatial_padding_mode"),
        ({"upsample_factor": [2, 2, 2]}, "upsample_factor"),
        ({"spatial_compression_ratio": 8}, "spatial_compression_ratio"),
        ({"down_block_types": ["Other"] * 4}, "down_block_types"),
        ({"downsample_type": [1, 2, 3, 4]}, "downsample_type[0]"),
    ],
    ids=str,
)
def test_configs_of_ltx_refused_by_key(change, key):
    with refused("config", place=key):
        VAE.random(config=CONFIGS["ltx2.3"] | change)


def test_what_the_drop_in_of_ltx_refuses():
    """What diffusers refuses, and arrays that are no videos; tiles are ignored with a warning."""
    torch, _, ours = drop_in_of("ltx2.3")
    z, x = torch.from_numpy(latents(ours.vae, 2, 2, 3)), torch.from_numpy(videos(ours.vae, 2, 2, 3))
    with refused("x", names=["8"]):
        ours.encode(x[:, :, :8])
    with refused("z", names=["(N, C, F, h, w)"]):
        ours.decode(z[:, :, 0])
    with refused("causal"):
        ours.decode(z, causal=True)
    want = ours.decode(z).sample
    ours.enable_tiling()
    with warned("decode", ["memory_limit"], UserWarning):
        assert torch.equal(ours.decode(z).sample, want)
    with refused("x", names=["(1, 9, 3, 64, 96)"]):
        ours.vae.encode(np.zeros((1, 9, 3, 64, 96), np.float32))
    with refused("z", names=["(N, 8, F, h, w)"]):
        ours.vae.decode(z[0].numpy())
