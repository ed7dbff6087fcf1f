"""Formulas for applications, as they are pasted: above every prediction of their domain, and what was measured."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from errors import refused

from vaemem import bound, predict, seed_table
from vaemem.__main__ import main
from vaemem._common import OPS
from vaemem.prediction.bound import _ESTIMATES, TILES

TORCH = "2.7.1+cu128"
SIDES = (256, 512, 1000, 2048)


def pasted(b) -> SimpleNamespace:
    names: dict = {}
    exec(b.python(), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})


class _VAE:
    """What an application hands to its estimate: parameters with a dtype."""

    def __init__(self, dtype, tile_sample_min_size=512):
        self.dtype, self.tile_sample_min_size = dtype, tile_sample_min_size

    def parameters(self):
        return iter([SimpleNamespace(dtype=f"torch.{self.dtype}")])  # as str(torch.float16) is


def estimate(functions, application, model, op, height, width, dtype, tile=None):
    """What the pasted source says of a run."""
    packs = application == "comfyui" and model.startswith("flux2")
    scale = (16 if packs else 8) if op == "decode" else 1
    frame = (1,) if model == "qwen-image" else ()
    shape = (1, 4 if op == "decode" else 3, *frame, height // scale, width // scale)
    if application == "comfyui":
        name = f"memory_used_{op}{'_flux2' if packs else '_wan' if frame else ''}"
        return getattr(functions, name)(shape, f"torch.{dtype}", tile and tile // scale)
    tensor = SimpleNamespace(shape=shape)
    if model in ("flux", "zimage"):
        return functions.estimate_vae_working_memory_flux(op, tensor, _VAE(dtype), tile)
    if model not in ("sd15", "sdxl", "playground-v2.5"):
        name = model.removesuffix("-small").replace("-", "_")
        return getattr(functions, f"estimate_vae_working_memory_{name}")(op, tensor, _VAE(dtype))
    return functions.estimate_vae_working_memory_sd15_sdxl(op, tensor, _VAE(dtype), tile, dtype == "float32")


def ways(application, model, dtype):
    """(runtime, weights_dtype) of the runs that an application makes."""
    if application == "comfyui":
        return [("comfyui", dtype)]
    if model in ("flux", "zimage"):
        return [("bfl", dtype), ("diffusers", dtype)]
    is_sd = model in ("sd15", "sdxl", "playground-v2.5")
    return [("diffusers", dtype)] + ([("diffusers", "float16")] if dtype == "float32" and is_sd else [])


@pytest.mark.one_in(9)
@pytest.mark.parametrize("application, gpu", [("comfyui", "RTX 4090"), ("invokeai", "RTX 4090"), ("comfyui", "T4")])
def test_no_prediction_of_the_domain_lies_above_what_is_pasted(application, gpu):
    b = bound(application, gpu=gpu, torch_version=TORCH, sides=SIDES)
    functions, most = pasted(b), {}
    wholes = {line.name: line for line in b.lines if not line.op.endswith("_tiled")}
    for line in wholes.values():
        sides = [side for side in SIDES if side % 16 == 0 or (application, line.function) != ("comfyui", "flux2")]
        most[line.name] = dict.fromkeys(((h, w) for h in sides for w in sides), 0)
    for function in _ESTIMATES[application].values():
        for model, op, dtype in ((m, op, d) for m in function.models for op in OPS for d in function.dtypes):
            line = b.find(model, op, dtype)
            for (height, width), known in most[line.name].items():
                said = estimate(functions, application, model, op, height, width, dtype)
                uppers = [
                    predict(
                        model, op, height, width, dtype, runtime=runtime, weights_dtype=weights, gpu=gpu,
                        torch_version=TORCH,
                    ).upper
                    for runtime, weights in ways(application, model, dtype)
                ]  # fmt: skip
                assert said == line.bytes(height, width) >= max(uppers), (model, op, dtype, height, width)
                most[line.name][height, width] = max(known, *uppers)
    assert len(most) == (18 if application == "comfyui" else 34)
    for name, uppers in most.items():  # the largest excess is the one that is shown
        line = wholes[name]
        assert line.overshoot == max(line.bytes(*size) / upper - 1 for size, upper in uppers.items())


def test_qwen_image_in_tiles_and_what_anima_calls():
    b = bound("invokeai", "qwen-image", "bfloat16", torch_version=TORCH, sides=(512, 1024))
    functions = pasted(b)
    tensor = SimpleNamespace(shape=(1, 16, 1, 128, 64))
    p = predict("qwen-image", "decode_tiled", 1024, 512, "bfloat16", tile=512, torch_version=TORCH)
    for function in (functions.estimate_vae_working_memory_qwen_image, functions.estimate_vae_working_memory_anima):
        assert function("decode", tensor, _VAE("bfloat16"), 512) >= p.upper
        assert function("decode", tensor, _VAE("bfloat16"), None) == b.find("qwen-image", "decode", "bfloat16").bytes(
            1024, 512
        )


@pytest.mark.parametrize("application, model, other", [("comfyui", "sdxl", "sdxl"), ("invokeai", "flux", "sd15")])
def test_what_was_left_out_is_refused_in_words(application, model, other):
    functions = pasted(bound(application, model, "float16", torch_version=TORCH, sides=(512, 1024)))
    assert estimate(functions, application, model, "decode", 512, 512, "float16") > 0
    for name, dtype in ((model, "bfloat16"), (other, "float32")):
        with refused(kind=ValueError, names=["decode_tiled float16", f" decode {dtype}: "]):
            estimate(functions, application, name, "decode", 512, 512, dtype)


@pytest.mark.thorough
def test_no_prediction_in_tiles_lies_above():
    b = bound("invokeai", dtypes="float16", torch_version=TORCH, sides=(512, 1024, 1536))
    assert "tiles: 512, 768, 1024 pixels as diffusers cuts them, in images with sides of 512, 1024, 1536" in b.domain
    functions = pasted(b)
    for model, runtime in (("sdxl", "diffusers"), ("flux", "diffusers")):
        for op in ("encode", "decode"):
            for tile in TILES:
                for height, width in ((1536, 1536), (512, 1536), (1536, 1024)):
                    said = estimate(functions, "invokeai", model, op, height, width, "float16", tile)
                    p = predict(
                        model, f"{op}_tiled", height, width, "float16", runtime=runtime, tile=tile, torch_version=TORCH
                    )
                    assert said == b.find(model, f"{op}_tiled", "float16").bytes(height, width, tile) >= p.upper
    # A tile that covers the image is no tile.
    assert estimate(functions, "invokeai", "sdxl", "decode", 512, 512, "float16", 1024) == estimate(
        functions, "invokeai", "sdxl", "decode", 512, 512, "float16"
    )
    sdxl = functions.estimate_vae_working_memory_sd15_sdxl
    latents = SimpleNamespace(shape=(1, 4, 192, 192))
    assert sdxl("decode", latents, _VAE("float16", 768), 0, False) == sdxl(
        "decode", latents, _VAE("float16"), 768, False
    )


@pytest.mark.parametrize("model", ["sdxl", "flux2"])
def test_no_prediction_in_tiles_of_comfyui_lies_above(model):
    b = bound("comfyui", model, "float16", torch_version=TORCH, sides=(512, 1024, 1536))
    functions = pasted(b)
    assert "tiles: 512, 768, 1024 pixels as ComfyUI cuts them" in b.domain
    for op, tile, size in (("decode", 512, (1536, 1024)), ("decode", 768, (1024, 1536)), ("encode", 768, (1536, 1536))):
        said = estimate(functions, "comfyui", model, op, *size, "float16", tile)
        p = predict(model, f"{op}_tiled", *size, "float16", runtime="comfyui", tile=tile, torch_version=TORCH)
        assert said == b.find(model, f"{op}_tiled", "float16").bytes(*size, tile) >= p.upper
        assert said < (1 if tile > 512 else 0.4) * estimate(functions, "comfyui", model, op, *size, "float16")


def test_flux2_in_comfyui_wants_whole_16_pixels():
    with refused("sides", "others"):
        bound("comfyui", "flux2", "float16", torch_version=TORCH, sides=[1000])


@pytest.mark.thorough
def test_no_measured_row_lies_above():
    """The seed table's rows are of the code that InvokeAI runs: no prediction, and nothing that the lines saw."""
    sides = (512, 768, 1024, 1536, 2048)
    b = bound("invokeai", torch_version=TORCH, sides=sides)
    functions, seen = pasted(b), 0
    for row in seed_table():
        op, _, tiled = row["op"].partition("_")
        if {row["height"], row["width"]} <= set(sides) and (row["model"] == "flux" or row["dtype"] != "bfloat16"):
            tile = 512 if tiled else None
            said = estimate(functions, "invokeai", row["model"], op, row["height"], row["width"], row["dtype"], tile)
            assert said >= row["reserved_bytes"], row
            seen += 1
    assert seen >= 90


def test_each_card_and_version_is_in_it():
    sides = (512, 1024)
    asked = {"models": "sdxl", "dtypes": "float32", "sides": sides}
    both = bound("comfyui", gpu=["RTX 4090", "H200"], **asked)
    for gpu in ("RTX 4090", "H200"):
        for torch_version in (None, "2.5.1", "2.9.1"):
            alone = bound("comfyui", gpu=gpu, torch_version=torch_version, **asked)
            for line, other in zip(both.lines, alone.lines, strict=True):
                tiles = TILES[:2] if line.op.endswith("_tiled") else [None]
                sizes = [(h, w, tile) for tile in tiles for h in sides for w in sides if not tile or tile < max(h, w)]
                for height, width, tile in sizes:
                    assert line.bytes(height, width, tile) >= predict(
                        "sdxl", line.op, height, width, "float32", runtime="comfyui", gpu=gpu,
                        torch_version=torch_version, tile=tile,
                    ).upper  # fmt: skip
                assert line.predictions == 2 * other.predictions == 2 * len(sizes)
    assert "cards: NVIDIA GeForce RTX 4090, NVIDIA H200" in both.domain and "every cuDNN" in both.domain
    assert "versions: PyTorch 2.9.1" in alone.domain


def test_prints(capsys):
    said = f"bound comfyui --models flux --dtypes float16 --torch {TORCH} --sides 512 768 1024".split()
    b = bound("comfyui", "flux", "float16", torch_version=TORCH, sides=range(512, 1025, 256))
    assert main(said) == 0
    assert capsys.readouterr().out == f"{b}\n"
    assert main([*said, "--format", "python"]) == 0
    assert capsys.readouterr().out == b.python()
    for text in (str(b), b.python()):
        assert "every pair of 512, 768, 1024 pixels" in text
        assert "models: flux; one image" in text and f"{100 * b.lines[0].overshoot:.1f}%" in text
    assert [line.predictions for line in b.lines] == [9, 3 + 3] * 2  # in tiles of 512 and 768
    assert b.latex().count("&=") == 4 and r"\text{vae encode\_tiled float16}" in b.latex()


@pytest.mark.parametrize(
    "asked, named",
    [
        (("forge",), ("application", "'forge'")),
        (("comfyui", "sd9"), ("models", "'sd9'")),
        (("comfyui", "flux", "float64"), ("dtypes", "'float64'")),
        (("invokeai", "sdxl", "bfloat16"), ("models, dtypes",)),
        (("comfyui", "flux", "float16", []), ("sides", "none")),
        (("comfyui", "flux", "float16", 512, []), ("gpu", "none")),
        (("comfyui", "flux", "float16", [100]), ("height", 100)),
        (("comfyui", "flux", "float16", math.nan), ("sides", "nan")),
        (("comfyui", 5), ("models", 5)),
        (("comfyui", "flux", "float16", [0]), ("sides", 0)),
    ],
)
def test_what_cannot_be_asked(asked, named):
    names = ("application", "models", "dtypes", "sides", "gpu")
    with refused(*named):
        bound(**dict(zip(names, asked, strict=False)))


@pytest.mark.parametrize("height, width, tile, named", [
    (-1, 1000, None, ("height", -1)),
    (512, math.nan, None, ("width", "nan")),
    (512, 512, 0, ("tile", 0)),
    (512, 512, None, ("tile",)),
])  # fmt: skip
def test_sizes_that_no_image_has_are_refused(height, width, tile, named):
    b = bound("invokeai", "sdxl", "float16", torch_version=TORCH, sides=(512, 1024))
    line = b.find("sdxl", "decode_tiled", "float16")._replace(law={"HW": 1, "cut": 2, "": 3})
    assert line.bytes(10, np.int64(10), 5) == 153
    with refused(*named):
        line.bytes(height, width, tile)


def test_what_is_left_out_is_named():
    b = bound("invokeai", "sdxl", "float16", torch_version=TORCH, sides=[512])
    with refused("find", "flux decode float16"):
        b.find("flux", "decode", "float16")
    assert "models: sdxl;" in b.domain and "bfl" not in b.domain and "tiles: none were predicted" in b.domain


def test_progress():
    calls: list[tuple[int, int]] = []
    asked = {"sides": (264, 520), "torch_version": TORCH}  # other tests have other sides, so this bound is not made yet
    told = bound("comfyui", "sdxl", "float16", progress=lambda *step: calls.append(step), **asked)
    assert calls == [(done, 2 * 4) for done in range(1, 9)]  # encode and decode at four sizes
    assert told is bound("comfyui", "SDXL", "fp16", **asked), "made once for the same arguments"
    assert told.lines != bound("comfyui", "sdxl", "float16", gpu="T4", **asked).lines


def test_sizes_of_a_bound_have_a_limit():
    line = next(one for one in bound("invokeai", "sdxl", "float16", sides=[256, 512]).lines if one.op == "decode")
    for argument, sizes in (("height", (1 << 21, 8)), ("width", (8, 10**20)), ("tile", (8, 8, 8))):
        with refused(argument):
            line.bytes(*sizes)
    assert line.bytes(1 << 20, 8) > line.bytes(8, 8)
