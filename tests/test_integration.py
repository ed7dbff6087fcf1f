"""The recipes of docs/INTEGRATION.md, executed in their order: diffusers itself, stand-ins for the rest."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from errors import refused, warned

diffusers = pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")

import engine

import vaemem

RECIPES = Path(__file__).parent.parent / "docs" / "INTEGRATION.md"
GIB = 1 << 30

if not RECIPES.exists():
    pytest.skip("the sources are not here", allow_module_level=True)


def module(name: str, source: str = "", **attributes) -> ModuleType:
    made = ModuleType(name)
    exec(source, made.__dict__)
    made.__dict__.update(attributes)
    return made


class Card:
    """An RTX 4060 as torch.cuda sees it: who holds how much of it."""

    total, others, cached, allocated = 8 * GIB - 200 * 2**20, 0, 0, 0

    def stand_in(self, monkeypatch):
        taken = self.others + self.cached + self.allocated
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.total - taken, self.total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.allocated + self.cached)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4060")


@pytest.fixture(scope="module")
def stand_ins():
    """Modules that the recipes import, and are none of PyPI's."""
    asked = {"torch_version": "2.9.1", "sides": (512, 1024)}
    return {
        "vaemem_estimates": module("vaemem_estimates"),
        "vaemem_estimates.vae_memory": module("vae_memory", vaemem.bound("comfyui", **asked).python()),
        "vae_working_memory_by_vaemem": module(
            "vae_working_memory_by_vaemem", vaemem.bound("invokeai", **asked).python()
        ),
        "invokeai": module("invokeai"),
        "invokeai.backend": module("invokeai.backend"),
        "invokeai.backend.util": module("invokeai.backend.util"),
        "invokeai.backend.util.vae_working_memory": module("invokeai.backend.util.vae_working_memory"),
    }


@pytest.fixture(scope="module")
def recipes(stand_ins):
    """The names that the recipes define, and what they print."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        for name, made in stand_ins.items():
            patch.setitem(sys.modules, name, made)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(stand_ins[parent], child, made)
        names: dict = {"__package__": "vaemem_estimates"}  # as ComfyUI loads a folder of nodes
        blocks = re.findall(r"^```python\n(.*?)^```", RECIPES.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for block in blocks:
            exec(compile(block, "INTEGRATION.md", "exec"), names)
    return SimpleNamespace(**names, printed=printed.getvalue(), blocks=len(blocks))


def test_every_block_of_python_was_executed(recipes):
    fences = re.findall(r"^```(.*)$", RECIPES.read_text("utf-8"), re.MULTILINE)
    assert recipes.blocks == fences.count("python") > 7 and len(fences) == 2 * recipes.blocks


# ---- diffusers ----


def test_what_others_hold(recipes, monkeypatch):
    card = Card()
    card.others, card.allocated, card.cached = GIB, 2 * GIB, 3 * GIB
    card.stand_in(monkeypatch)
    assert recipes.used_by_others() == 3 * GIB  # the cache can be given back


@pytest.mark.parametrize("side, used, tile", [(1024, 1, None), (2048, 1, 1024), (2048, 6, 768), (2048, 7.4, 0)])
def test_tiles_where_the_whole_image_does_not_fit(recipes, monkeypatch, side, used, tile):
    card = Card()
    card.others = int(used * GIB)
    card.stand_in(monkeypatch)
    found = recipes.tile_for("sdxl", side, side)
    assert found == tile
    asked = {"dtype": "float16", "gpu": "RTX 4060", "used": int(used * GIB)}
    assert vaemem.predict("sdxl", "decode", side, side, **asked).fits is (tile is None)
    if tile:
        assert vaemem.predict("sdxl", "decode_tiled", side, side, tile=tile, **asked).fits


@pytest.mark.thorough
def test_the_vae_cuts_the_tiles_that_it_is_told(recipes):
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        sample_size=512,
    )
    sizes = []
    vae.decoder.register_forward_pre_hook(lambda _, given: sizes.append(tuple(given[0].shape[-2:])))
    for tile in (64, None):
        recipes.set_tiles(vae, tile)
        with torch.no_grad():
            vae.decode(torch.zeros(1, 4, 16, 16))
    assert (max(sizes[:-1]), sizes[-1]) == ((8, 8), (16, 16)) and len(sizes) > 2
    with pytest.raises(MemoryError):
        recipes.set_tiles(vae, 0)


def test_a_pipelines_latents_decoded_within_a_limit(recipes, tmp_path):
    torch.manual_seed(0)
    config = engine.config("sd")
    vae = diffusers.AutoencoderKL.from_config(config).eval()
    vae.save_pretrained(tmp_path)
    latents = torch.randn(2, 4, 12, 16)
    with torch.no_grad():
        image = vae.decode(latents / vae.config.scaling_factor).sample
    wanted = ((image / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1).numpy()
    got = recipes.decode_within(tmp_path, latents, "64 MiB")
    assert got.dtype == np.uint8 and np.abs(got - wanted).max() <= 1
    with refused("memory_limit"):
        recipes.decode_within(tmp_path, latents, "1 MiB")


# ---- the formulas ----


def test_a_decode_that_runs_out_of_memory(recipes, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    import torch_pipelines

    pipe = torch_pipelines.stable_diffusion(tmp_path)
    want = torch_pipelines.pictures(pipe, "sd")

    def fail(x):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(pipe.vae.decoder.conv_out, "forward", fail)
    call = dict(prompt="a cat", height=48, width=32, num_inference_steps=2, output_type="pt")
    with warned(names=["CPU"]):
        got = recipes.make_images(pipe, generator=torch.Generator().manual_seed(0), **call)
    assert (got - want).abs().max() < 1e-4 and "decode" not in vars(pipe.vae)
    monkeypatch.setattr(pipe.image_processor, "postprocess", lambda *args, **how: 1 / 0)
    with pytest.warns(RuntimeWarning), pytest.raises(ZeroDivisionError) as caught:
        recipes.make_images(pipe, **call)
    assert caught.value.latents.shape == (1, 4, 12, 8) and "decode" not in vars(pipe.vae)


def test_components_leave_by_prediction(recipes):
    manager = SimpleNamespace(enable_auto_cpu_offload=lambda **given: vars(manager).update(given))
    recipes.offload_by_prediction(manager, "sdxl", 1024, 1024, gpu="RTX 4060")
    assert manager.device == "cuda:0" and manager.offload_strategy.working_bytes(diffusers.AutoencoderKL()) > 5e9


def test_the_formulas_that_are_shown(recipes):
    assert recipes.printed.startswith(str(recipes.formulas))
    shown = recipes.formulas.find("sdxl", "decode", "float16").bytes(1024, 1024)
    assert recipes.printed.endswith(f"{shown}\n")
    assert textwrap.indent(str(recipes.formulas), "    ") in RECIPES.read_text("utf-8")
    assert shown >= vaemem.predict("sdxl", "decode", 1024, 1024, runtime="comfyui", torch_version="2.9.1").upper


# ---- ComfyUI ----


def test_comfyuis_estimates_are_set(recipes):
    vae = SimpleNamespace(memory_used_encode=None, memory_used_decode=None)
    inputs = recipes.VAEMemory.INPUT_TYPES()["required"]
    (same,) = getattr(recipes.VAEMemory(), recipes.VAEMemory.FUNCTION)(**dict.fromkeys(inputs, vae))
    assert same is vae and recipes.NODE_CLASS_MAPPINGS["VAEMemory"] is recipes.VAEMemory
    for op, shape in (("encode", (1, 3, 1024, 512)), ("decode", (1, 4, 128, 64))):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            estimate = getattr(vae, f"memory_used_{op}")(torch.zeros(shape, device="meta").shape, dtype)
            name = str(dtype).removeprefix("torch.")
            asked = {"dtype": name, "runtime": "comfyui", "torch_version": "2.9.1"}
            assert estimate >= vaemem.predict("sdxl", op, 1024, 512, **asked).upper


# ---- InvokeAI ----


def test_invokeais_functions_are_replaced(recipes, stand_ins):
    theirs = stand_ins["invokeai.backend.util.vae_working_memory"]
    vae = diffusers.AutoencoderKL(sample_size=768).half()
    latents = torch.zeros(1, 4, 128, 64)
    sd = theirs.estimate_vae_working_memory_sd15_sdxl
    for fp32, dtype in ((False, "float16"), (True, "float32")):
        said = sd(operation="decode", image_tensor=latents, vae=vae, tile_size=None, fp32=fp32)
        asked = {"dtype": dtype, "weights_dtype": "float16", "torch_version": "2.9.1"}
        assert said >= vaemem.predict("sdxl", "decode", 1024, 512, **asked).upper
    tiled = sd(operation="decode", image_tensor=latents, vae=vae, tile_size=0, fp32=False)
    assert tiled == sd(operation="decode", image_tensor=latents, vae=vae, tile_size=768, fp32=False)
    flux = theirs.estimate_vae_working_memory_flux
    pixels = torch.zeros(1, 3, 512, 1024)
    said = flux(operation="encode", image_tensor=pixels, vae=vae.to(torch.bfloat16))
    for runtime in ("bfl", "diffusers"):
        asked = {"dtype": "bfloat16", "runtime": runtime, "torch_version": "2.9.1"}
        assert said >= vaemem.predict("flux", "encode", 512, 1024, **asked).upper
    assert flux(operation="encode", image_tensor=pixels, vae=vae, tile_size=512) < said


def test_invokeais_working_memory(recipes):
    gib = recipes.device_working_mem_gb(1024, 1024, "RTX 4090")
    uppers = [vaemem.predict("sdxl", op, 1024, 1024, "float16", gpu="RTX 4090").upper for op in ("encode", "decode")]
    assert gib == max(uppers) / GIB
