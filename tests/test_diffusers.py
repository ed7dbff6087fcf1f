"""The drop-in for diffusers' AutoencoderKL: in whole pipelines, and call by call beside diffusers' own."""

import contextlib
import copy
import io
import json
import pickle
import threading

import numpy as np
import pytest
from engine import config, error, small_vae
from errors import is_about, refused, warned

import vaemem

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import torch_pipelines
from torch_pipelines import PIPELINES, autoencoder, pictures
from torch_vaes import RELEASE

from vaemem.pytorch import AutoencoderKL

if hasattr(diffusers, "AutoencoderKLFlux2"):
    from vaemem.pytorch import AutoencoderKLFlux2

# Of float32: 24 bits, some 60 layers, as in test_vae.py. Of halves: both round their results, and diffusers' every
# layer's too, which leaves a few times 2^-8 (bfloat16) or 2^-11 (float16).
PARITY = 1e-5
HALVES = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
PICTURE = 1 / 255


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def pair(name="sd", dtype=torch.float32, **settings):
    theirs = autoencoder(name, **settings).to(dtype)
    return theirs, AutoencoderKL.from_module(theirs)


def tensors(name="sd", height=16, width=12, batch=2, dtype=torch.float32):
    torch.manual_seed(5)
    channels = config(name)["latent_channels"]
    z = torch.randn(batch, channels, height // 4, width // 4).to(dtype)
    return torch.rand(batch, 3, height, width).to(dtype) * 2 - 1, z


def close(got, want, limit=PARITY):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert error(got.double().numpy(), want.double().numpy()) <= limit


# ---- whole pipelines ----


@pytest.mark.older
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_makes_the_same_pictures(tmp_path, name):
    pipe = PIPELINES[name](tmp_path)
    want = pictures(pipe, name)
    pipe.vae = AutoencoderKL.from_module(pipe.vae, memory_limit="64 MiB")
    got = pictures(pipe, name)
    assert want.std() > 0.1 and (got - want).abs().max() < PICTURE / 10
    run = pipe.vae.last_run
    assert (run.op, run.height, run.width) == ("decode", 48, 32)
    assert pipe.device.type == "cpu" and pipe.vae.dtype == torch.float32 and pipe.vae.device == torch.device("cpu")
    assert pictures(pipe, name, output_type="pil")[0].size == (32, 48)


@pytest.mark.older
def test_sdxl_in_float16_upcasts(tmp_path):
    """Before 0.36 that looks at the attention's processor, and at dtypes of single layers; latents stay in float16."""
    pipe = PIPELINES["sdxl"](tmp_path).to(torch.float16)
    want = pictures(pipe, "sdxl")
    pipe.vae = AutoencoderKL.from_module(pipe.vae)
    assert pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast
    seen = []
    decode = pipe.vae._decode
    pipe.vae._decode = lambda z: seen.append((pipe.vae.dtype, z.dtype)) or decode(z)
    got = pictures(pipe, "sdxl")
    assert seen == [(torch.float32, torch.float16 if RELEASE < 36 else torch.float32)]
    assert pipe.vae.dtype == torch.float16 and {p.dtype for p in pipe.vae.parameters()} == {torch.float16}
    # the layers that diffusers 0.33 leaves in float16 even then are computed in float32 here
    assert (got - want).abs().max() < PICTURE


def test_image_to_image_encodes_with_the_generator(tmp_path):
    from torch_pipelines import stable_diffusion

    pipe = diffusers.StableDiffusionImg2ImgPipeline(
        **stable_diffusion(tmp_path).components, requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    image, results = torch.rand(1, 3, 32, 32), []
    for vae in (pipe.vae, AutoencoderKL.from_module(pipe.vae)):
        pipe.vae = vae
        how = dict(num_inference_steps=4, strength=0.5, output_type="pt", generator=torch.Generator().manual_seed(1))
        results.append(pipe("a cat", image=image, **how).images)
    assert (results[0] - results[1]).abs().max() < PICTURE / 10


@pytest.mark.older
def test_a_pipeline_is_saved_and_loaded(tmp_path):
    pipe = PIPELINES["sd"](tmp_path)
    want = pictures(pipe, "sd")
    pipe.save_pretrained(tmp_path / "theirs")
    vae = AutoencoderKL.from_pretrained(tmp_path / "theirs")
    assert vae.config.sample_size == pipe.vae.config.sample_size
    given = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "theirs", vae=vae)
    assert given.vae is vae
    given.save_pretrained(tmp_path / "ours")
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "ours")
    assert type(loaded.vae) is diffusers.AutoencoderKL, "whoever loads it needs no vaemem"
    for other in (given, loaded):
        assert (pictures(other, "sd") - want).abs().max() < PICTURE / 10


# ---- call by call ----


@pytest.mark.parametrize("name", ["sd", "flux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parity(name, dtype):
    theirs, ours = pair(name, dtype)
    x, z = tensors(name, dtype=dtype)
    limit = HALVES.get(dtype, PARITY)
    assert ours.dtype == dtype and dict(ours.config) == dict(theirs.config)
    close(ours.decode(z).sample, theirs.decode(z).sample, limit)
    close(ours.decode(z, return_dict=False)[0], theirs.decode(z, return_dict=False)[0], limit)
    got, want = ours.encode(x).latent_dist, theirs.encode(x, return_dict=False)[0]
    close(got.mean, want.mean, limit)
    close(got.logvar, want.logvar, limit)
    seeds = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    close(got.sample(seeds[0]), want.sample(seeds[1]), limit)
    close(ours(x).sample, theirs(x).sample, 4 * limit)


@pytest.mark.skipif(not hasattr(diffusers, "AutoencoderKLFlux2"), reason="needs diffusers with FLUX.2")
@pytest.mark.parametrize("name", ["flux2", "flux2-small"])
def test_flux2_is_computed_too(name, tmp_path):
    """Its pipelines read the statistics in `bn`. Published configs have a key that the class does not take."""
    theirs = torch_pipelines.flux2(name).vae
    theirs.register_to_config(force_upcast=True)
    ours = AutoencoderKLFlux2.from_module(theirs)
    x, z = torch.rand(2, 3, 16, 24) * 2 - 1, torch.randn(2, 8, 4, 6)
    close(ours.decode(z).sample, theirs.decode(z).sample)
    close(ours.encode(x).latent_dist.mean, theirs.encode(x).latent_dist.mean)
    theirs.enable_tiling()
    theirs.tile_sample_min_size, theirs.tile_latent_min_size = 16, 4
    close(AutoencoderKLFlux2.from_module(theirs).decode(z).sample, theirs.decode(z).sample)
    theirs.disable_tiling()
    ours.save_pretrained(tmp_path)
    loaded = AutoencoderKLFlux2.from_pretrained(tmp_path), diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path)
    for one in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), *loaded):
        assert one.state_dict().keys() == theirs.state_dict().keys()
        for key, buffer in theirs.named_buffers():
            assert torch.equal(one.get_buffer(key), buffer) and torch.equal(one.state_dict()[key], buffer)
    assert (ours.half().bn.running_var.dtype, ours.bn.num_batches_tracked.dtype) == (torch.float16, torch.int64)
    half = AutoencoderKLFlux2(vaemem.VAE.random(config=config(name), parts="decoder"))
    assert half.decode(z).sample.shape == (2, 3, 16, 24) and half.bn.running_mean.numel() == 32


def test_a_copy_logs_no_warning(caplog):
    """diffusers' own `to` warns of every conversion."""
    theirs = autoencoder("sd")
    caplog.clear()
    assert AutoencoderKL.from_module(theirs, torch_dtype=torch.float16).dtype == torch.float16
    assert not caplog.records


def test_any_floating_dtype_goes_in():
    _, ours = pair()
    x, z = tensors()
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        given = z.to(dtype)
        assert torch.equal(ours.decode(given).sample, ours.decode(given.float()).sample)
    assert torch.equal(ours.encode(x.double()).latent_dist.mean, ours.encode(x).latent_dist.mean)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours.encode(channels_last).latent_dist.mean, ours.encode(x).latent_dist.mean)


def test_the_cpu_copies_nothing(monkeypatch):
    """A float32 tensor's memory is what the engine is given, and the result's is what it gave."""
    _, ours = pair()
    z, seen = tensors()[1], []
    decode = ours.vae.decode

    def spy(array, **how):
        seen.append((array, decode(array, **how)))
        return seen[0][1]

    monkeypatch.setattr(ours.vae, "decode", spy)
    image = ours.decode(z).sample
    assert seen[0][0].ctypes.data == z.data_ptr() and seen[0][1].ctypes.data == image.data_ptr()


def test_slices_and_tiles():
    theirs, ours = pair(sample_size=32)
    x, z = tensors(height=40, width=28)
    want = ours.decode(z).sample
    for vae in (theirs, ours):
        vae.enable_slicing()
    assert torch.equal(ours.decode(z).sample, want) and ours.last_run.batch == 1
    for vae in (theirs, ours):
        vae.enable_tiling()
    close(ours.decode(z).sample, theirs.decode(z).sample)
    assert ours.last_run.notes == ("4 tiles of 32x32",)
    close(ours.encode(x).latent_dist.mean, theirs.encode(x).latent_dist.mean)
    for vae in (theirs, ours):
        vae.tile_overlap_factor, vae.tile_latent_min_size, vae.tile_sample_min_size = 0.5, 4, 16
    close(ours.decode(z).sample, theirs.decode(z).sample)
    assert AutoencoderKL.from_module(ours).use_tiling
    ours.disable_tiling()
    ours.disable_slicing()
    assert torch.equal(ours.decode(z).sample, want)


def test_a_memory_limit_gives_the_same_bits():
    _, ours = pair()
    z = tensors(height=320, width=256, batch=1)[1]
    want = ours.decode(z).sample
    ours.memory_limit = ours.vae.smallest("decode", 320, 256)
    assert ours.memory_limit < ours.last_run.peak_bytes
    assert torch.equal(ours.decode(z).sample, want)
    assert ours.last_run.peak_bytes <= ours.memory_limit and ours.last_run.work > 1
    ours.memory_limit = 1
    with refused("memory_limit"):
        ours.decode(z)


def test_gradients_are_refused():
    _, ours = pair()
    x, z = tensors()
    want = ours.decode(z).sample
    assert torch.equal(ours.decode(z.requires_grad_()).sample, want), "none are wanted under no_grad"
    with torch.enable_grad():
        with refused("z"):
            ours.decode(z)
        with refused("x", names=["x.detach"]):
            ours.encode(x.requires_grad_())
        assert torch.equal(ours.decode(z.detach()).sample, want)
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.make_dual(z.detach(), z.detach())
        with refused("z"):
            ours.decode(tangent)


def test_to():
    _, ours = pair()
    z = tensors()[1]
    want = ours.decode(z).sample
    assert ours.half().dtype == torch.float16 and ours.decode(z).sample.dtype == torch.float16
    assert ours.to("cpu", torch.bfloat16).dtype == torch.bfloat16
    assert ours.to(memory_format=torch.channels_last).dtype == torch.bfloat16
    with torch.inference_mode():
        assert ours.half().dtype == torch.float16 and ours.post_quant_conv.bias.dtype == torch.float16
    assert torch.equal(ours.float().decode(z).sample, want), "the weights were not rounded on the way"
    with refused("post_quant_conv.weight", kind=RuntimeError):
        ours.post_quant_conv(z)
    for dtype in (torch.float64, torch.float8_e4m3fn):
        with refused("dtype", names=["torch.float"]):
            ours.to(dtype)
    with refused("device", "meta"):
        ours.to("meta")
    assert ours.dtype == torch.float32 and ours.device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):  # PyTorch's own
            ours.cuda()
    assert torch.equal(ours.decode(z).sample, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_computes_in_the_modules_dtype(dtype):
    """On the CPU too, in a copy of the weights; a VAE that is of that type already serves without one."""
    _, ours = pair()
    z, half = tensors()[1], getattr(torch, dtype)
    ours.to(half)
    got = ours.decode(z).sample
    there = ours._engine()
    assert (there.device, there.dtype, ours.vae.dtype) == ("cpu", dtype, "float32") and ours.last_run is there.last_run
    assert torch.equal(got, torch.from_numpy(there.decode(z.numpy())).to(half))
    rounded = AutoencoderKL(small_vae(dtype=dtype), config("sd"))
    assert rounded.dtype == half and rounded._engine() is rounded.vae and rounded.decode(z).sample.dtype == half
    with refused("copy", names=[dtype]):
        rounded.float().decode(z)
    state, rounded = rounded.state_dict(), rounded.to(half)
    assert all(t.dtype == half and torch.equal(t, state[n].to(half)) for n, t in rounded.state_dict().items())


def test_what_is_set_on_the_vae_holds_for_its_copy():
    ours, z = AutoencoderKL(small_vae()).half(), tensors()[1]
    ours.decode(z)
    for threads in (1, 3):
        ours.vae.threads = threads
        ours.decode(z)
        assert ours.last_run.threads == threads
    ours.vae.memory_limit = "1 MiB"
    with refused("memory_limit"):
        ours.decode(z)


def test_precision(monkeypatch, tmp_path):
    """float32's, wherever it is; halves have none."""
    theirs = autoencoder("sd")
    theirs.save_pretrained(tmp_path / "vae")
    vae = small_vae()
    vae.save(tmp_path / "a.safetensors")
    for ours in (
        AutoencoderKL.from_module(theirs, precision="high"),
        AutoencoderKL.from_pretrained(tmp_path / "vae", precision="high"),
        AutoencoderKL.from_single_file(tmp_path / "a.safetensors", config=config("sd"), precision="high"),
        AutoencoderKL(vae.copy(precision="high"), config("sd")),
    ):
        assert ours._engine() is ours.vae and ours.vae.precision == "high"
        assert ours.half()._engine().precision == "highest"
        made = []
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(ours.vae, "copy", lambda *where, made=made: made.append(where) or Elsewhere(vae, *where))
            elsewhere.setattr(AutoencoderKL, "device", property(lambda self: torch.device("cuda:0")))
            ours.float()._engine()
        assert made == [("cuda:0", "float32")]  # whose precision is the copied one's
    with refused("precision", "'best'"):
        AutoencoderKL.from_module(theirs, precision="best")


class Elsewhere:
    """Stands in for a VAE on a GPU, whose memory is the host's: the module's part is to make it and to ask it."""

    def __init__(self, vae, device, dtype):
        self.vae, self.device, self.dtype, self.last_run = vae, device, dtype, None

    def decode(self, z, **how):
        return self.vae.decode(z, **how)


def test_the_vae_of_another_device_is_made_when_wanted(monkeypatch):
    """A pipeline that takes the module to float32 and back makes none of float16."""
    _, ours = pair()
    made = []
    monkeypatch.setattr(ours.vae, "copy", lambda *where: made.append(where) or Elsewhere(ours.vae, *where))
    monkeypatch.setattr(AutoencoderKL, "device", property(lambda self: torch.device("cuda:1")))
    ours.half()
    ours.float()
    ours._engine()
    ours.half()
    ours.float()
    assert ours._engine() is ours._engine() and made == [("cuda:1", "float32")]
    ours.half()
    assert ours._engine().dtype == "float16" and made[1:] == [("cuda:1", "float16")]
    monkeypatch.undo()
    assert ours.float()._engine() is ours.vae


def refuse(*_):
    raise RuntimeError("no such GPU")


def test_moving(monkeypatch):
    """To a GPU that tensors claim to be on: its VAE is made at once and in the new dtype, or all stays as it was."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, ours = pair()
    with FakeTensorMode():
        there = torch.empty(0, device="cuda", dtype=torch.float16)
    with monkeypatch.context() as nowhere, pytest.raises(RuntimeError):
        nowhere.setattr(ours.vae, "copy", refuse)
        ours._apply(lambda tensor: there)
    assert (ours.device.type, ours.dtype, ours._engine()) == ("cpu", torch.float32, ours.vae)
    made = []
    monkeypatch.setattr(ours.vae, "copy", lambda *where: made.append(where) or Elsewhere(ours.vae, *where))
    ours._apply(lambda tensor: there)
    assert made == [("cuda:0", "float16")]
    assert ours.device == torch.device("cuda:0") and ours.dtype == torch.float16
    with refused("z"):
        ours.decode(tensors()[1])
    ours._apply(lambda tensor: torch.empty(0))
    assert ours._engine() is ours.vae and torch.isfinite(ours.decode(tensors()[1]).sample).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype):
    theirs, ours = pair(dtype=torch.float32)
    x, z = (t.cuda() for t in tensors())
    want = theirs.decode(z.cpu()).sample.to(dtype), theirs.encode(x.cpu()).latent_dist.mean.to(dtype)
    ours.to("cuda", dtype)
    limit = HALVES.get(dtype, PARITY)
    image, mean = ours.decode(z.to(dtype)).sample, ours.encode(x.to(dtype)).latent_dist.mean
    assert image.is_cuda and mean.is_cuda and ours.last_run.backend.startswith("cuda")
    close(image.cpu(), want[0], limit)
    close(mean.cpu(), want[1], limit)
    with refused("z", names=["cuda:0"]):
        ours.decode(z.cpu())
    ours.enable_tiling()
    ours.tile_latent_min_size, ours.tile_sample_min_size = 4, 16
    tiled = ours.decode(z.to(dtype)).sample
    assert tiled.is_cuda and tiled.dtype == dtype and "tiles of 16x16" in ours.last_run.notes[0]
    ours.cpu()
    ours.disable_tiling()
    close(ours.float().decode(z.cpu()).sample, theirs.decode(z.cpu()).sample)


def test_what_is_refused():
    _, ours = pair()
    z = tensors()[1]
    for call, kind, message in (
        (lambda: ours.decode(z.to("meta")), ValueError, ("z",)),
        (lambda: ours.decode(z.int()), TypeError, ("z", "torch.int32")),
        (lambda: ours.decode(z.numpy()), TypeError, ("z", "ndarray")),
        (lambda: ours.decode(z[:, :3]), ValueError, ("z", "(2, 3, 4, 3)")),
        (lambda: ours.encode(torch.zeros(1, 3, 16, 18)), ValueError, ("x", "(1, 3, 16, 18)")),
        (lambda: AutoencoderKL.from_module(torch.nn.Linear(1, 1)), TypeError, ("module", "Linear")),
    ):
        with refused(*message, kind=kind):
            call()
    assert torch.isfinite(ours.decode(z).sample).all()


def test_a_layer_alone_is_refused():
    """Its weights have no numbers in PyTorch, whose convolutions would answer with what lies in memory."""
    theirs, ours = pair()
    z, weight = tensors()[1], ours.post_quant_conv.weight
    hidden, attention = torch.randn(1, 64, 4, 3), ours.decoder.mid_block.attentions[0]
    for name, call in (
        ("post_quant_conv.weight", lambda: ours.post_quant_conv(z)),
        ("post_quant_conv.weight", lambda: ours.post_quant_conv.forward(z)),
        ("quant_conv.weight", lambda: ours.quant_conv(torch.cat([z, z], 1))),
        ("decoder.conv_in.weight", lambda: ours.decoder(z)),
        ("decoder.conv_in.weight", lambda: ours.decoder.conv_in(z)),
        ("decoder.mid_block.resnets.0.norm1.weight", lambda: ours.decoder.mid_block(hidden)),
        ("decoder.mid_block.attentions.0.to_q.weight", lambda: attention.to_q(torch.ones(64))),
        ("encoder.conv_in.weight", lambda: ours.encoder(tensors()[0])),
        ("post_quant_conv.weight", lambda: ours.tiled_decode(z)),
        ("post_quant_conv.weight", lambda: torch.nn.functional.conv2d(z, weight)),
        ("post_quant_conv.weight", lambda: torch.nn.functional.conv2d(z, weight.data.float().chunk(2)[0])),
        ("post_quant_conv.weight", lambda: torch.nn.functional.conv2d(z, copy.deepcopy(weight))),
        ("post_quant_conv.weight", lambda: torch.nn.functional.conv2d(z, pickle.loads(pickle.dumps(weight)))),
        ("post_quant_conv.weight", lambda: weight.copy_(theirs.post_quant_conv.weight)),
        ("post_quant_conv.weight", lambda: torch.equal(theirs.post_quant_conv.weight, weight)),
    ):
        with refused(name, kind=RuntimeError):
            call()
    assert isinstance(weight, torch.nn.Parameter) and weight.device.type == "meta" and not weight.requires_grad
    assert weight.shape == (4, 4, 1, 1) and weight.half().dtype == torch.float16
    assert torch.zeros_like(weight, device="cpu").sum() == 0, "what has numbers of its own serves"
    close(ours.decode(z).sample, theirs.decode(z).sample)


def test_weights_that_accelerate_brings():
    """Its hooks give each layer numbers, which the module's state_dict() says, for the layer's own call."""
    accelerate = pytest.importorskip("accelerate")
    theirs, ours = pair()
    z = tensors()[1]
    accelerate.cpu_offload(ours, torch.device("cpu"))
    assert torch.equal(ours.post_quant_conv(z), theirs.post_quant_conv(z))
    assert ours.post_quant_conv.weight.is_meta
    close(ours.decode(z).sample, theirs.decode(z).sample)


def test_copies():
    """Whole, with weights of their own; a trainer or a process pool asks for them."""
    _, ours = pair()
    z = tensors()[1]
    ours.to(torch.bfloat16).enable_slicing()
    ours.memory_limit, ours.vae.threads, ours.progress, ours.cancel = "1 GiB", 1, print, threading.Event()
    want, file = ours.vae.copy(dtype="bfloat16").decode(z.bfloat16().float().numpy()), io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    made = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)
    ours.vae.close()
    for one in made:
        assert torch.equal(one.decode(z.bfloat16()).sample, torch.from_numpy(want).bfloat16())
        assert (one.dtype, one.use_slicing, one.memory_limit, one.vae.threads) == (torch.bfloat16, True, "1 GiB", 1)
        assert (one.progress, one.cancel, dict(one.config)) == (False, None, dict(ours.config))
        assert one.float()._engine() is one.vae
        with refused("post_quant_conv.weight", kind=RuntimeError):
            one.post_quant_conv(z)


@pytest.mark.parametrize("way", ["trace", "make_fx", "export", "functionalize", "vmap"])
def test_a_trace_is_refused(way):
    """It would keep the result as a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    _, ours = pair()
    x, z = tensors()

    def decode(z):
        return ours.decode(z).sample

    call = {
        "trace": lambda: torch.jit.trace(decode, z),
        "make_fx": lambda: make_fx(decode)(z),
        "export": lambda: torch.export.export(ours, (x,), strict=False),
        "functionalize": lambda: torch.func.functionalize(decode)(z),
        "vmap": lambda: torch.vmap(decode)(z[None]),
    }[way]
    with pytest.raises(RuntimeError) as caught:
        call()
    assert is_about(caught.value, "x" if way == "export" else "z")
    assert torch.isfinite(decode(z)).all()


def test_compiled_code_calls_it_as_it_is():
    _, ours = pair()
    z = tensors()[1]
    compiled = torch.compile(lambda z: ours.decode(z).sample * 2, backend="eager")
    for one in (z, z + 1):
        assert torch.equal(compiled(one), ours.decode(one).sample * 2)


def test_cancel_and_progress():
    _, ours = pair()
    z, seen = tensors()[1], []
    ours.progress = lambda done, total: seen.append(done)
    ours.decode(z)
    assert seen
    ours.cancel = threading.Event()
    ours.cancel.set()
    with pytest.raises(vaemem.Cancelled):
        ours.decode(z)
    ours.cancel.clear()
    ours.decode(z)


# ---- where it comes from ----


def test_a_state_dict_is_a_copy(tmp_path):
    theirs, ours = pair()
    state = ours.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[name], t) for name, t in theirs.state_dict().items())
    ours.save_pretrained(tmp_path)
    back = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    assert torch.equal(back.decoder.conv_in.weight, theirs.decoder.conv_in.weight)


def test_a_state_dict_of_a_module_around_it_has_its_weights():
    theirs, ours = pair()
    head = torch.nn.Linear(1, 1)
    want, got = (torch.nn.ModuleDict({"head": head, "vae": vae}).state_dict() for vae in (theirs, ours))
    assert got.keys() == want.keys() and all(torch.equal(got[name], t) for name, t in want.items())
    for part in (ours.decoder, ours.post_quant_conv, torch.nn.Sequential(ours.encoder), copy.deepcopy(ours).decoder):
        with refused(names=["state_dict()"], kind=RuntimeError):
            part.state_dict()


@pytest.mark.parametrize("assign", [False, True])
def test_loading_weights_is_refused(assign):
    """By whichever module it comes; a module around it loads its other weights."""
    theirs, ours = pair()
    z, weight = tensors()[1], ours.decoder.conv_in.weight
    want, again = ours.decode(z).sample, pickle.loads(pickle.dumps(ours))
    for one, other in (
        (ours, theirs),
        (again, theirs),
        (copy.deepcopy(ours).decoder, theirs.decoder),
        (ours.decoder, theirs.decoder),
        (ours.decoder.conv_in, theirs.decoder.conv_in),
        (torch.nn.Sequential(ours), torch.nn.Sequential(theirs)),
        (torch.nn.Sequential(ours.decoder), torch.nn.Sequential(theirs.decoder)),
    ):
        for strict in (True, False):
            with refused(names=["the VAE: "], kind=TypeError):
                one.load_state_dict(other.state_dict(), strict=strict, assign=assign)
    assert ours.decoder.conv_in.weight is weight and torch.equal(ours.decode(z).sample, want)
    around = torch.nn.ModuleDict({"head": torch.nn.Linear(1, 1), "vae": ours})
    around.load_state_dict({"head.weight": torch.full((1, 1), 7.0)}, strict=False, assign=assign)
    assert around["head"].weight.item() == 7


def test_from_pretrained(tmp_path):
    theirs = autoencoder("flux", force_upcast=False)
    z = tensors("flux")[1]
    want = theirs.decode(z).sample
    theirs.save_pretrained(tmp_path / "pipeline" / "vae")
    ours = AutoencoderKL.from_pretrained(tmp_path / "pipeline", subfolder="vae", memory_limit="1 GiB")
    close(ours.decode(z).sample, want)
    assert not ours.config.force_upcast and ours.memory_limit == "1 GiB"
    for keyword in ("dtype", "torch_dtype"):
        loaded = AutoencoderKL.from_pretrained(tmp_path / "pipeline/vae", **{keyword: torch.bfloat16})
        assert loaded.dtype == torch.bfloat16
    # the weights' own config decides
    small_vae("flux").save(tmp_path / "saved")
    said = json.loads((tmp_path / "saved/config.json").read_text())
    for text, upcast in ((json.dumps(said | {"force_upcast": False}), False), ("{}", True)):
        (tmp_path / "saved/config.json").write_text(text)
        with contextlib.nullcontext() if not upcast else warned(names=["config.json"], kind=UserWarning):
            ours = AutoencoderKL.from_pretrained(tmp_path / "saved")
        assert ours.config.scaling_factor == 0.3611 and ours.config.force_upcast is upcast
    # what only diffusers reads
    theirs.save_pretrained(tmp_path / "variant", variant="fp32", safe_serialization=False)
    ours = AutoencoderKL.from_pretrained(tmp_path / "variant", variant="fp32", use_safetensors=False)
    close(ours.decode(z).sample, want)


def test_from_the_hubs_cache(tmp_path):
    """As the hub's own files lie in its cache: nothing is downloaded."""
    theirs = autoencoder("sd")
    repo, commit = tmp_path / "models--some--vae", "0123abcd" * 5
    theirs.save_pretrained(repo / "snapshots" / commit / "vae")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    ours = AutoencoderKL.from_pretrained("some/vae", subfolder="vae", cache_dir=tmp_path, local_files_only=True)
    z = tensors()[1]
    close(ours.decode(z).sample, theirs.decode(z).sample)


def test_from_single_file(tmp_path):
    vae = small_vae("flux")
    vae.save(tmp_path / "ae.safetensors", layout="bfl")
    settings = json.loads(json.dumps(config("flux")))
    ours = AutoencoderKL.from_single_file(tmp_path / "ae.safetensors", config=settings, torch_dtype=torch.float16)
    z = tensors("flux")[1]
    want = torch.from_numpy(vae.copy(dtype="float16").decode(z.numpy())).half()
    assert torch.equal(ours.decode(z).sample, want)
    assert ours.config.scaling_factor == pytest.approx(0.3611) and ours.config.shift_factor == pytest.approx(0.1159)


def test_a_scaling_that_is_not_known(tmp_path):
    """A file's tensors do not tell it (SD1.5's and SDXL's are the same), and a pipeline divides by it."""
    small_vae().save(tmp_path / "vae.safetensors")
    with refused("config", names=["scaling_factor", "'sd15'", "'sdxl'"]):
        AutoencoderKL.from_single_file(tmp_path / "vae.safetensors")
    settings = config("sd") | {"scaling_factor": 0.5, "sample_size": 96}
    ours = AutoencoderKL.from_single_file(tmp_path / "vae.safetensors", config=settings)
    assert ours.config.scaling_factor == 0.5 and ours.config.sample_size == 96
    assert sum(p.numel() for p in ours.parameters()) == ours.vae.parameters


def test_half_a_model():
    vae = small_vae(parts="decoder")
    ours = AutoencoderKL(vae)
    x, z = tensors()
    assert np.array_equal(ours.decode(z).sample.numpy(), vae.decode(z.numpy()))
    with refused(names=["encode", "encoder"]):
        ours.encode(x)
