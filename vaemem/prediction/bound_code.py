"""The applications that `bound` knows, and Python to paste into each."""

from __future__ import annotations

from vaemem.prediction.laws import write_function

_BYTES = """
def _bytes(name, op, height, width, dtype, tile=None):
    is_cut = tile is not None and (tile < height or tile < width)
    key = name, op + "_tiled" * is_cut, str(dtype).removeprefix("torch.")
    if key not in BYTES:
        known = ", ".join(map(" ".join, BYTES))
        raise ValueError(f"expected one of {known}, got {' '.join(key)}: vaemem.bound makes formulas for more")
    return BYTES[key](height * width, _largest(tile, height, width) if is_cut else 0)


"""


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


# The title of each, and Python to paste after the formulas.
APPLICATIONS = {
    "comfyui": ("ComfyUI", _BYTES + _write_comfyui()),
    "invokeai": ("InvokeAI", _BYTES + _write_invokeai()),
}
