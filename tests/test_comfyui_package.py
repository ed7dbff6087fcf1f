"""The nodes for ComfyUI, without ComfyUI: the copied package, and the VAE's work on a stand-in for ComfyUI's VAE."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import tomllib
import weakref
from types import ModuleType, SimpleNamespace

import pytest
from errors import refused

torch = pytest.importorskip("torch")

import engine

import vaemem
from vaemem.engine.configs import known_arch
from vaemem.nodes import install_comfyui as install
from vaemem.nodes import install_invokeai
from vaemem.pipelines.components import PIPELINES, weights_of
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.runtimes import architecture
from vaemem.pytorch import comfyui_vae
from vaemem.pytorch.places import ANYWHERE, Place

CARD = dict(gpu="RTX 3060", memory=12 << 30, torch_version="2.6.0", cudnn_version="9.1.0")


# ---- the package ----


@pytest.fixture
def root(tmp_path):
    """A folder that looks like ComfyUI's."""
    for name in ("main.py", "nodes.py", "comfy/sd.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_the_package_is_copied(root):
    target = install(root)
    assert target == root / "custom_nodes" / "vaemem"
    assert {path.name for path in target.iterdir()} == {"__init__.py", "nodes.py", "pyproject.toml", "README.md"}
    project = tomllib.loads((target / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["version"] == vaemem.__version__ and project["tool"]["comfy"]["DisplayName"] == "vaemem"
    (target / "nodes.py").write_text("old")
    install(str(root))
    assert "VAEDecode" in (target / "nodes.py").read_text("utf-8")


def test_other_folders_stay_as_they_are(root, tmp_path):
    with refused("path", got="no such folder"):
        install(root / "missing")
    (root / "main.py").unlink()
    with refused("path", got="one without main.py"):
        install(root)
    assert not (root / "custom_nodes").exists()
    (root / "main.py").touch()
    other = root / "custom_nodes" / "vaemem"
    other.mkdir(parents=True)
    (other / "README.md").write_text("# another\n")
    with refused("path"):
        install(root)
    assert [path.name for path in other.iterdir()] == ["README.md"]
    shutil.rmtree(other)
    other.symlink_to(root / "comfy")
    with refused("path"):
        install(root)


def test_the_nodes_for_invokeai(tmp_path):
    with refused("path", got="one without invokeai.yaml"):
        install_invokeai(tmp_path)
    (tmp_path / "invokeai.yaml").touch()
    # InvokeAI imports it by the folder's name, which must not be vaemem.
    for _ in range(2):
        target = install_invokeai(tmp_path)
    assert target == tmp_path / "nodes" / "vaemem_nodes"
    assert {path.name for path in target.iterdir()} == {"__init__.py", "invocations.py", "README.md"}


def load_nodes(root, monkeypatch, version: str, *modules: str) -> ModuleType:
    """Import the copied package as ComfyUI does, next to stand-ins for its modules."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__path__ = []
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    target = install(root)
    spec = importlib.util.spec_from_file_location("a_node_package", target / "__init__.py")
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_node_package", made)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("version", ["0.3.63", "0.2", "unknown"])
def test_an_older_comfyui_is_refused(root, monkeypatch, version):
    with refused(names=["ComfyUI 0.3.64", f"ComfyUI {version}: "], kind=ImportError):
        load_nodes(root, monkeypatch, version)


def test_a_later_comfyui_without_the_api_is_refused(root, monkeypatch):
    with refused(names=["ComfyUI 9.1.0", "-m vaemem comfyui"], kind=ImportError):
        load_nodes(root, monkeypatch, "9.1.0", "comfy_api")


# ---- the VAE's work ----


class AutoencoderKL:
    """ComfyUI's autoencoder. Its decode is vaemem's, so that pictures are the same to the bit."""

    def __init__(self, ours: vaemem.VAE):
        self.ours = ours

    def state_dict(self):
        return {name: torch.from_numpy(numbers) for name, numbers in self.ours.state_dict().items()}

    def parameters(self):
        return iter(self.state_dict().values())

    def buffers(self):
        return iter(())

    def decode(self, z):
        return torch.from_numpy(self.ours.decode(z.numpy()))


class ComfyVAE:
    """The parts of ComfyUI's VAE that are used, with the order of its decode."""

    device = output_device = torch.device("cpu")
    vae_dtype, latent_dim, disable_offload, patcher = torch.float32, 2, False, "a patcher"

    def __init__(self, name="sd"):
        # ComfyUI's norms have 32 groups.
        config = engine.config(name) | (
            {} if name == "wan" else {"block_out_channels": (32, 64, 64), "norm_num_groups": 32}
        )
        self.first_stage_model, self.tiles = AutoencoderKL(vaemem.VAE.random(config=config)), []
        self.memory_used_decode = lambda shape, dtype: 1

    def process_input(self, pixels):
        return pixels * 2 - 1

    def process_output(self, pixels):
        return torch.clamp((pixels + 1) / 2, 0, 1)

    def vae_encode_crop_pixels(self, pixels):
        (top, height), (left, width) = ((side % 4 // 2, side // 4 * 4) for side in pixels.shape[1:3])
        return pixels[:, top : top + height, left : left + width]

    def decode(self, samples):
        failed = False
        try:
            self.needed = self.memory_used_decode(samples.shape, self.vae_dtype)
            pixels = self.process_output(self.first_stage_model.decode(samples))
        except torch.OutOfMemoryError:
            failed = True
        if failed:
            pixels = self.decode_tiled_(samples)
        return pixels.movedim(1, -1)

    def decode_tiled_(self, samples, **how):
        self.tiles.append(samples)
        return samples

    decode_tiled_1d = decode_tiled_3d = decode_tiled_


class Manager:
    """comfy.model_management."""

    def __init__(self):
        self.loaded, self.freed = [], []

    def free_memory(self, needed, device):
        self.freed.append(needed)

    def load_models_gpu(self, models, memory_required, force_full_load):
        self.loaded.append((models, memory_required))


@pytest.fixture
def vae():
    return ComfyVAE()


@pytest.fixture
def z():
    return torch.randn(2, 4, 10, 12, generator=torch.Generator().manual_seed(0))


def ignore(done, total):
    pass


def test_whole_decodes_and_encodes(vae, z):
    calls = []
    want = vae.decode(z)
    got = comfyui_vae.decode_whole(vae, z, Manager(), lambda *rows: calls.append(rows))
    assert torch.equal(got, want) and got.shape == (2, 40, 48, 3) and 0 <= got.min() < got.max() <= 1
    done = [done for done, _ in calls]
    assert done == sorted(done) and calls[-1][0] == calls[-1][1]
    limit = vae.first_stage_model.ours.smallest("decode", 40, 48, 2)
    assert torch.equal(comfyui_vae.decode_whole(vae, z, Manager(), ignore, Place("cpu", limit + (1 << 20))), want)
    with refused("memory_limit"):
        comfyui_vae.decode_whole(vae, z, Manager(), ignore, Place(limit=1 << 16))
    photo = torch.rand(2, 43, 50, 4)  # RGBA, and no multiples of the factor
    latents = comfyui_vae.encode_whole(vae, photo, Manager(), ignore)
    x = vae.process_input(vae.vae_encode_crop_pixels(photo[..., :3])).movedim(-1, 1).contiguous()
    assert torch.equal(latents, torch.from_numpy(vae.first_stage_model.ours.encode(x.numpy()).mode()))
    assert latents.shape == (2, 4, 10, 12)


@pytest.mark.parametrize("op", ["decode_whole", "encode_whole", "decode_safely"])
def test_a_cancelled_run_ends(op, vae, z):
    class Interrupted(Exception):
        pass

    def cancel(done, total):
        raise Interrupted

    def fail(z):
        raise Interrupted

    vae.first_stage_model.decode = fail
    with pytest.raises(Interrupted):
        getattr(comfyui_vae, op)(vae, torch.rand(1, 40, 48, 3) if op == "encode_whole" else z, Manager(), cancel)
    assert vae.tiles == []


def test_places(vae, z):
    with refused("device", "'gpu', but the VAE runs on cpu"):
        comfyui_vae.decode_whole(vae, z, Manager(), ignore, Place("gpu"))
    with refused("device"):
        comfyui_vae.decode_whole(vae, z, Manager(), ignore, Place("tpu"))
    vae.device = torch.device("cuda:7")  # which this machine lacks
    own, wide = comfyui_vae.recognise(vae), known_arch("wan2.2")
    assert comfyui_vae.choose_device(vae, own) == comfyui_vae.choose_device(vae, own, Place("cpu")) == "cpu"
    with refused("device"):
        comfyui_vae.choose_device(vae, own, Place("gpu"))
    assert comfyui_vae.choose_device(vae, wide) == "cpu"
    with refused("device", names=["attention"]):
        comfyui_vae.choose_device(vae, wide, Place("gpu"))


def test_vaes_that_vaemem_does_not_know(vae, z):
    class Other(AutoencoderKL):  # which may compute something else
        pass

    for held in (None, torch.nn.Linear(2, 2), Other(vae.first_stage_model.ours)):
        vae.first_stage_model = held
        for call in (comfyui_vae.decode_whole, comfyui_vae.decode_safely):
            with refused("vae"):
                call(vae, z, Manager(), ignore)


def test_videos_are_refused(vae, z):
    want = comfyui_vae.decode_whole(vae, z, Manager(), ignore)
    assert torch.equal(comfyui_vae.decode_whole(vae, z.unsqueeze(2), Manager(), ignore), want)  # one frame each
    for call in (comfyui_vae.decode_whole, comfyui_vae.decode_safely):
        with refused("latents"):
            call(vae, z.unsqueeze(2).repeat(1, 1, 3, 1, 1), Manager(), ignore)
    vae.latent_dim = 3
    with refused("pixels"):
        comfyui_vae.encode_whole(vae, torch.rand(2, 40, 48, 3), Manager(), ignore)
    assert comfyui_vae.encode_whole(vae, torch.rand(1, 40, 48, 3), Manager(), ignore).shape == (1, 4, 1, 10, 12)


def test_packed_latents():
    vae = ComfyVAE("flux2")
    ours = vae.first_stage_model.ours
    z = torch.randn(1, 4 * ours.arch["latent_channels"], 4, 5)
    want = vae.process_output(torch.from_numpy(ours.decode(z.numpy(), scaled=True))).movedim(1, -1)
    assert torch.equal(comfyui_vae.decode_whole(vae, z, Manager(), ignore), want)
    assert comfyui_vae.encode_whole(vae, torch.rand(1, *want.shape[1:]), Manager(), ignore).shape == z.shape


def test_scaled_latents(vae, z):
    """TAESD's wrapper in ComfyUI has a scale and a shift."""
    want, photo = comfyui_vae.decode_whole(vae, z, Manager(), ignore), torch.rand(1, 40, 48, 3)
    latents = comfyui_vae.encode_whole(vae, photo, Manager(), ignore)
    vae.first_stage_model.vae_scale, vae.first_stage_model.vae_shift = torch.tensor(0.5), torch.tensor(-2.0)
    assert torch.allclose(comfyui_vae.decode_whole(vae, z * 2 - 2, Manager(), ignore), want, atol=1e-5)
    assert torch.equal(comfyui_vae.encode_whole(vae, photo, Manager(), ignore), latents * 2 - 2)


ERRORS = {
    "PyTorch's": torch.OutOfMemoryError("CUDA out of memory."),
    "cuDNN's": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "the CPU's": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_a_decode_runs_out_of_memory(error, vae, z):
    want = vae.decode(z)
    pixels, notes = comfyui_vae.decode_safely(vae, z, Manager(), ignore)
    assert torch.equal(pixels, want) and notes == ()
    made = []

    def fail(samples):
        large = torch.zeros(1000)
        made.append(weakref.ref(large))
        raise type(error)(*error.args)

    vae.first_stage_model.decode = fail
    pixels, notes = comfyui_vae.decode_safely(vae, z, Manager(), ignore)
    assert torch.equal(pixels, want) and len(notes) == 1 and vae.tiles == []
    assert made[0]() is None  # the failed call keeps no tensor
    vae.first_stage_model.decode = lambda samples: 1 / 0
    with pytest.raises(ZeroDivisionError):
        comfyui_vae.decode_safely(vae, z, Manager(), ignore)


def test_prediction_decides(vae, z, monkeypatch):
    """The same latents with more and less free memory: ComfyUI decodes only the former."""
    z, calls, manager, free = torch.randn(2, 4, 40, 40), [], Manager(), {"free": 4 << 30}
    want, theirs = vae.decode(z), vae.first_stage_model.decode
    vae.first_stage_model.decode = lambda z: calls.append(1) or theirs(z)
    monkeypatch.setattr(comfyui_vae, "describe_card", lambda device: CARD | free)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert torch.equal(comfyui_vae.decode_safely(vae, z, manager, ignore).pixels, want) and calls == [1]
    ((models, needed),) = manager.loaded
    arch = comfyui_vae.recognise(vae)
    how = CARD | {"runtime": "comfyui", "protocol": "cold"}
    assert models == [vae.patcher] and needed == vaemem.predict(arch, "decode", 160, 160, "float32", **how).upper
    assert vae.memory_used_decode(z.shape, z.dtype) == 1  # the user's VAE is as it was
    free["free"] = 1 << 20
    pixels, notes = comfyui_vae.decode_safely(vae, z, manager, ignore)
    assert torch.equal(pixels, want) and calls == [1] and "does not fit" in notes[0] and vae.tiles == []
    monkeypatch.setattr(comfyui_vae, "describe_card", lambda device: CARD | free | {"gpu": "an unknown card"})
    assert comfyui_vae.decode_safely(vae, z, manager, ignore).notes == () and calls == [1, 1]


def test_a_card_is_freed_first_and_may_fail(vae, z, monkeypatch):
    """A stand-in for the card: the engine on the CPU. Without one the CPU decodes, and the notes say so."""
    load, asked, want = vaemem.VAE.load, [], vae.decode(z)

    def load_here(tensors, parts, device, dtype, videos):
        asked.append((device, dtype))
        if device != "cpu" and fails:
            raise MemoryError("the card is full")
        return load(tensors, parts=parts)

    monkeypatch.setattr(
        comfyui_vae,
        "choose_device",
        lambda vae, arch, place=ANYWHERE: "cpu" if place.device == "cpu" else "cuda:0",
    )
    monkeypatch.setattr(comfyui_vae.VAE, "load", load_here)
    vae.vae_dtype, vae.memory_used_decode, fails, manager = torch.bfloat16, lambda shape, dtype: 1000, False, Manager()
    limit = 1 << 30
    for place in (Place(), Place("gpu", limit)):
        assert torch.equal(comfyui_vae.decode_whole(vae, z, manager, ignore, place), want)
    weights = sum(one.nbytes for one in vae.first_stage_model.parameters())
    assert manager.freed == [1000 + weights, limit] and asked == [("cuda:0", "bfloat16")] * 2

    def fail(samples):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    vae.first_stage_model.decode = fail
    for fails in (False, True):
        asked.clear()
        pixels, notes = comfyui_vae.decode_safely(vae, z, manager, ignore)
        assert torch.equal(pixels, want) and len(notes) == 1 + fails
        assert asked == [("cuda:0", "bfloat16"), *[("cpu", "float32")] * fails]
    assert "the card is full" in notes[1]


def test_windows_runs_out_where_it_would_spill(vae, z, monkeypatch):
    """ComfyUI decodes within the limit, and its own fallback is vaemem's."""
    within = []

    @contextlib.contextmanager
    def limit(device):
        within.append("limited")
        yield
        within.append("free")

    monkeypatch.setattr(comfyui_vae, "no_spilling", limit)
    decode = vae.first_stage_model.decode
    vae.first_stage_model.decode = lambda samples: within.append("decodes") or decode(samples)
    comfyui_vae.decode_safely(vae, z, Manager(), ignore)
    assert within == ["limited", "decodes", "free"]


def test_an_estimate(vae):
    pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    found = comfyui_vae.estimate(vae, 256, 320, "RTX 4060")
    want = vaemem.predict(
        comfyui_vae.recognise(vae), "decode", 256, 320, gpu="RTX 4060", runtime="comfyui", protocol="cold"
    )
    assert found.text == want.to_text() and found.nbytes == want.peak_reserved - want.reserved + want.upper
    assert (
        found.picture.shape[0] == 1 and found.picture.shape[3] == 3 and found.picture.min() < found.picture.max() <= 1
    )
    with refused("gpu"):
        comfyui_vae.estimate(vae, 256, 320)
    shapes, least, gib = [], 1 << 30, 1 << 30
    inside = {"latent_format": SimpleNamespace(latent_channels=4), "diffusion_model": torch.nn.Linear(1, 1)}
    model = SimpleNamespace(model=SimpleNamespace(**inside))
    model.memory_required = lambda shape: shapes.append(shape) or 2 * gib
    manager = SimpleNamespace(minimum_inference_memory=lambda: least, extra_reserved_memory=lambda: gib)
    for size, rest in ((3 * gib, ""), (6 * gib, "; ComfyUI sends the other 1.48 GB for each step")):
        model.model_size = lambda size=size: size
        more = comfyui_vae.estimate(vae, 256, 320, "RTX 4060", model, manager, 3)
        said = f"{found.text}\n\nSampler: {min(size / gib, want.available / gib - 3):.2f} of the model's"
        assert more.text.replace(" GB of", " of").startswith(said) and more.text.endswith(f"by its own estimate{rest}.")
        assert more.nbytes == size + 3 * gib and shapes[-1] == [6, 4, 64, 80]
        assert more.picture.shape[2] > found.picture.shape[2]


def model_of(kind, dtype=torch.float32, cast=None):
    """A stand-in for ComfyUI's object of a denoiser, with the shapes of the known one."""
    prefix = "diffusion_model."
    denoiser = WORKFLOWS[kind].parts[WORKFLOWS[kind].denoiser]
    known = [one for one in weights_of(denoiser) if one.name.startswith(prefix)]
    weights = {one.name.removeprefix(prefix): torch.empty(one.shape, device="meta") for one in known}
    base = SimpleNamespace(
        diffusion_model=SimpleNamespace(state_dict=lambda: weights), get_dtype=lambda: dtype, manual_cast_dtype=cast,
        latent_format=SimpleNamespace(latent_channels=4),
    )  # fmt: skip
    return SimpleNamespace(model=base, model_size=lambda: 1 << 30, memory_required=lambda shape: 1 << 30)


def test_the_estimate_of_a_known_workflow(monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    kind = "qwen-image"
    monkeypatch.setattr(comfyui_vae, "recognise", lambda vae: architecture("wan2.1"))  # as WanVAE's tensors are
    vae = SimpleNamespace(device=torch.device("cpu"), vae_dtype=torch.bfloat16, latent_dim=3)
    found = comfyui_vae.estimate(vae, 512, 512, "RTX 4060", model_of(kind))
    assert found.text == vaemem.predict_pipeline(kind, 512, 512, gpu="RTX 4060", runtime="comfyui").to_text()

    # Before ComfyUI's pull request 13014: only the workflow is predicted.
    vae.first_stage_model = SimpleNamespace(conv2=SimpleNamespace(_padding=(0,) * 6))
    assert comfyui_vae.estimate(vae, 512, 512, "RTX 4060", model_of(kind)).text == found.text
    with refused("vae", names=["13014"]):
        comfyui_vae.estimate(vae, 512, 512, "RTX 4060")
    del vae.first_stage_model.conv2._padding
    assert comfyui_vae.estimate(vae, 512, 512, "RTX 4060").text

    kind = "zimage-turbo"
    arch = architecture(PIPELINES[kind].parts["vae"])
    monkeypatch.setattr(comfyui_vae, "recognise", lambda vae: arch)
    vae = SimpleNamespace(device=torch.device("cpu"), vae_dtype=torch.float32, latent_dim=2)
    found = comfyui_vae.estimate(vae, 768, 1024, "RTX 4060", model_of(kind))
    want = vaemem.predict_pipeline(kind, 768, 1024, gpu="RTX 4060", runtime="comfyui")
    assert found.text == want.to_text() and found.nbytes == want.upper

    monkeypatch.setattr(comfyui_vae, "describe_card", lambda device: CARD | {"free": 0})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 << 30, 12 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)
    vae.device, vae.vae_dtype = torch.device("cuda"), torch.bfloat16
    found = comfyui_vae.estimate(vae, 768, 1024, "", model_of(kind, torch.bfloat16), None, 2)
    used = (2 << 30) - find_gpu(CARD["gpu"], CARD["memory"]).context
    whole = vaemem.predict_pipeline(kind, 768, 1024, 2, runtime="comfyui", used=used, **CARD)
    assert found.text == whole.to_text()

    # Other types, and another VAE: the decode, and ComfyUI's own estimate for the sampler.
    manager = SimpleNamespace(minimum_inference_memory=lambda: 1 << 30, extra_reserved_memory=lambda: 0)
    fp8, cast = model_of(kind, torch.float8_e4m3fn), model_of(kind, torch.float16, torch.bfloat16)
    for model, vae_arch in ((fp8, arch), (cast, arch), (model_of(kind, torch.bfloat16), architecture("sdxl"))):
        monkeypatch.setattr(comfyui_vae, "recognise", lambda vae, vae_arch=vae_arch: vae_arch)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        assert "\n\nSampler: " in comfyui_vae.estimate(vae, 768, 1024, "", model, manager).text
