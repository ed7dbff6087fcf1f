"""The applications that `bound` knows: the runs that each estimate is for, and Python to paste into the application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vaemem._common import DTYPES
from vaemem.prediction.laws import write_function
from vaemem.prediction.lines import Grid, Point
from vaemem.prediction.runtimes import architecture, packing

TILES = 512, 768, 1024  # pixels
PASSES = (1, 1), (2, 0.5), (0.5, 2)  # heights and widths of ComfyUI's tiles, in sides; other code cuts squares only
TILED_STEP = 512  # pixels: images in tiles have sides of multiples of it


class Estimate(NamedTuple):
    """The runs that one of an application's estimates is for."""

    models: tuple[str, ...]
    runtimes: tuple[str, ...]  # the code that the application runs, in any of its releases
    dtypes: tuple[str, ...] = DTYPES
    is_tiled: bool = False  # the estimate knows the side of a tile
    is_upcast: bool = False  # float32 runs have float16 weights, too

    @property
    def step(self) -> int:
        """The image's sides are multiples of this many pixels."""
        return max(packing(code, architecture(model)) * 8 for code in self.runtimes for model in self.models)

    @property
    def passes(self) -> Sequence[tuple[float, float]]:
        return PASSES if "comfyui" in self.runtimes else PASSES[:1]

    def points(self, sides: Sequence[int]) -> dict[str, list[Point]]:
        """Return the sizes of whole images and of images in tiles, by the ending of the op."""
        # The prediction itself refuses sides that are no multiples of 8.
        fitting = [side for side in sides if self.step == 8 or side % self.step == 0]
        images = [side for side in fitting if side % TILED_STEP == 0] if self.is_tiled else []
        cut = [point for tile in TILES for point in Grid(tile=tile, sides=images, batches=(1,), ratio=max(sides))]
        return {
            "": [*Grid(sides=fitting, batches=(1,), ratio=max(sides))],
            "_tiled": [point for point in cut if point.tile < max(point.height, point.width)],
        }


class Application(NamedTuple):
    title: str
    estimates: dict[str, Estimate]
    source: str  # Python to paste after the formulas


def _write_comfyui() -> str:
    """Write the functions of the class VAE, for the shape of the pixels or of the latents: (N, C, H, W) or, for Wan,
    (N, C, frames, H, W)."""
    text = """\
def _largest(tile, height, width):
    shapes = (tile, tile), (2 * tile, tile // 2), (tile // 2, 2 * tile)  # in three passes
    return max(min(high, height) * min(wide, width) for high, wide in shapes)
"""
    for ending, estimate, side in (("", "vae", 8), ("_flux2", "flux2", 16), ("_wan", "wan", 8)):
        for op, scale, shape in (("encode", 1, "pixels"), ("decode", side, "latents")):
            sizes = f"{scale} * shape[-2], {scale} * shape[-1], dtype, tile and {scale} * tile"
            text += "\n\n" + write_function(
                f"memory_used_{op}{ending}",
                "shape, dtype, tile=None",
                f"Bytes for one image. shape: of the {shape}; tile: the side of {op}_tiled, in {shape}.",
                [f'return _bytes("{estimate}", "{op}", {sizes})'],
            )
    return text


_INVOKEAI = """\
def _largest(tile, height, width):
    return min(tile, height) * min(tile, width)


def _of(name, operation, image_tensor, dtype, tile=None):
    scale = 8 if operation == "decode" else 1
    height, width = (scale * side for side in image_tensor.shape[-2:])
    return _bytes(name, operation, height, width, dtype, tile)


def estimate_vae_working_memory_sd15_sdxl(operation, image_tensor, vae, tile_size, fp32):
    tile = vae.tile_sample_min_size if tile_size == 0 else tile_size
    return _of("sd15_sdxl", operation, image_tensor, "float32" if fp32 else "float16", tile)


def estimate_vae_working_memory_flux(operation, image_tensor, vae, tile_size=None):
    tile = tile_size if tile_size is None or tile_size > 0 else 512  # 0: the nodes' default
    return _of("flux", operation, image_tensor, next(vae.parameters()).dtype, tile)


def estimate_vae_working_memory_qwen_image(operation, image_tensor, vae, tile_size=None):
    return _of("qwen_image", operation, image_tensor, next(vae.parameters()).dtype, tile_size)


estimate_vae_working_memory_anima = estimate_vae_working_memory_qwen_image  # Wan 2.1's, of the same layers
"""


def _write_invokeai() -> str:
    return "\n\n".join([_INVOKEAI, *(
        write_function(
            f"estimate_vae_working_memory_{name}", "operation, image_tensor, vae", "Bytes for one image.",
            [f'return _of("{name}", operation, image_tensor, next(vae.parameters()).dtype)'],
        )
        for name in ("flux2", "sd3", "cogview4")
    )])  # fmt: skip


_COMFYUI_MODELS = "sd15", "sdxl", "flux", "sd3", "zimage", "playground-v2.5"
_FLUX2_MODELS = "flux2", "flux2-small"
APPLICATIONS = {
    # Its class VAE has one estimate for every AutoencoderKL, and another for the packed latents of FLUX.2.
    "comfyui": Application(
        "ComfyUI",
        {
            "vae": Estimate(_COMFYUI_MODELS, ("comfyui",), is_tiled=True),
            "flux2": Estimate(_FLUX2_MODELS, ("comfyui",), is_tiled=True),
            "wan": Estimate(("qwen-image",), ("comfyui",), is_tiled=True),
        },
        _write_comfyui(),
    ),
    # It runs SD's VAE in one of two dtypes, however the weights are stored. FLUX's and Z-Image's run in its own
    # AutoEncoder, after BFL's, and in diffusers'. FLUX.2's runs without an estimate of its own (8e71a8a).
    "invokeai": Application(
        "InvokeAI",
        {
            "sd15_sdxl": Estimate(
                ("sd15", "sdxl", "playground-v2.5"), ("diffusers",), ("float16", "float32"), True, is_upcast=True
            ),
            "flux": Estimate(("flux", "zimage"), ("bfl", "diffusers"), is_tiled=True),
            "flux2": Estimate(_FLUX2_MODELS, ("diffusers",)),
            "sd3": Estimate(("sd3",), ("diffusers",)),
            "cogview4": Estimate(("cogview4",), ("diffusers",)),
            "qwen_image": Estimate(("qwen-image",), ("diffusers",), is_tiled=True),
        },
        _write_invokeai(),
    ),
}
