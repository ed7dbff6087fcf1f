"""What stable-diffusion.cpp takes for each component of a pipeline: compute buffers to the byte, weights, FLOPs."""

from __future__ import annotations

import functools
import math
from typing import Any

from vaemem._common import choose, whole
from vaemem.sdcpp import models
from vaemem.sdcpp.layers import Graph

DEFAULT_TILE = 32  # latent pixels: of --vae-tiling
ENCODE_TILE = 1.30539  # what sd.cpp multiplies a tile's side by when it encodes
COMPONENTS: dict[str, type[Any]] = {
    "vae-decoder": models.VaeDecoder, "vae-encoder": models.VaeEncoder, "zimage": models.ZImage,
    "flux-dev": models.FluxDev, "flux-schnell": models.FluxSchnell, "unet-sd15": models.Unet15,
    "unet-sdxl": models.UnetXl, "qwen3-4b": models.Qwen3, "clip-l": models.ClipL, "clip-g": models.ClipG,
    "t5-xxl": models.T5,
}  # fmt: skip


def tile_count(side: int, tile: int, overlap: float = 0.5) -> int:
    """How many tiles lie along a side, both in latent pixels: as many as fit when they overlap by that share of a tile,
    and one more where they then still overlap by less than half."""
    if side <= tile:
        return 1
    shared = int(tile * overlap)
    step = tile - shared
    count = (side - shared) // step
    beyond = ((count + 1) * step + shared) % side
    if beyond != step and beyond <= count * (tile // 2 - shared):
        count += 1
    count = max(count, 2)
    shared = (tile * count - side) // (count - 1)
    return 1 + math.ceil((side - tile) / (tile - shared))


@functools.lru_cache(maxsize=1024)
def graph(
    component: str, height: int = 1024, width: int = 1024, *, tokens: int | None = None, model: str = "flux",
    weight_type: str = "f16", conv_direct: bool = False, flash: bool = False, conv_scale: bool = False,
    tile: int | None = None, backend: str = "cuda",
) -> Graph:  # fmt: skip
    """What one component's graph takes in stable-diffusion.cpp: buffer, pool, weights, FLOPs.

    Parameters
    ----------
    component : str
        One of COMPONENTS.
    height, width : int
        The image's size, multiples of 8 (of 64 for UNets). Text encoders have none.
    tokens : int, optional
        Those of the prompt with its template; needed for Z-Image and Qwen3. By default what sd.cpp pads a short prompt
        to: 77 for CLIP, which takes no more at once, and the UNets; 256 for FLUX and its T5.
    model : "sd15", "sdxl", "sd3" or "flux"
        Whose VAE; Z-Image's is FLUX's.
    weight_type : str
        ggml's name of the type of all matrices that may have one, such as ``"q8_0"``: ``--type``. The weights and the
        pool depend on it. Convolutions are float16; a matrix whose rows are no whole blocks is float32.
    conv_direct : bool
        ``--vae-conv-direct`` or, for UNets, ``--diffusion-conv-direct``: convolutions without im2col.
    flash : bool
        ``--diffusion-fa`` or, for the VAE on a CPU, ``--fa``: CUDA has none for heads as deep as the VAE's, and sd.cpp
        has none in text encoders.
    conv_scale : bool
        The VAE's convolutions scaled, as sd.cpp does with the VAE in an SDXL checkpoint.
    tile : int, optional
        For a VAE: latent pixels of a tile's side, DEFAULT_TILE for ``--vae-tiling``; it encodes in tiles 1.3 times as
        large. None: the whole image.
    backend : "cuda" or "cpu"
        A GPU's buffer holds the inputs, too, and aligns tensors to 128 bytes instead of 32.

    Raises
    ------
    ValueError
        An unknown component, type or backend, or a size that the component cannot have.

    Notes
    -----
    Simulated after sd.cpp's commit SDCPP_COMMIT with ggml's GGML_COMMIT, and in tests equal, to the byte, to what these
    reserve. A GPU holds more: the CUDA context, cuBLAS' workspace, the weights of components that have not left, and
    buffers that were not freed. sd.cpp makes the images of a batch one after the other and runs guidance as a second
    pass, so that no buffer depends on either.

    Examples
    --------
    >>> graph("zimage", tokens=20, weight_type="q8_0", flash=True)
    Graph(buffer=579391872, pool=..., weights=6544989312, flops=..., runs=1)
    """
    choose("component", component, COMPONENTS)
    kind = COMPONENTS[component]
    is_vae = issubclass(kind, models.VaeDecoder)
    for name, side in (("height", height), ("width", width)):
        if kind.STRIDE and whole(name, side, kind.STRIDE) % kind.STRIDE:
            raise ValueError(f"{name}: want a multiple of {kind.STRIDE} for {component}, got {side}")
    made = kind(
        weight_type, conv_direct=conv_direct, flash=flash, conv_scale=conv_scale and is_vae, backend=backend
    )  # fmt: skip
    if is_vae:
        choose("model", model, models.LATENT_CHANNELS)
        sides = [height // 8, width // 8]
        tiles = sides
        if tile is not None:
            tile = int(whole("tile", tile, 4) * (ENCODE_TILE if component == "vae-encoder" else 1))
            tiles = [max(min(tile, side), 4) for side in sides]
        runs = math.prod(map(tile_count, sides, tiles))
        return made.taken(made.build(*tiles, model))._replace(runs=runs)
    if tile is not None:
        raise ValueError(f"tile: want None for {component}, got {tile!r}; sd.cpp tiles the VAE alone")
    count = whole(f"tokens of {component}", kind.TOKENS if tokens is None else tokens)
    if component.startswith("clip") and count != kind.TOKENS:
        raise ValueError(
            f"tokens of {component}: want {kind.TOKENS}, got {count}; longer prompts go through it in parts"
        )
    sides = [height // 8, width // 8] if kind.STRIDE else []
    return made.taken(made.build(*sides, count))


def compute_buffer(component: str, height: int = 1024, width: int = 1024, **options: Any) -> int:
    """The bytes of the compute buffer that stable-diffusion.cpp's log names for a component.

    Parameters
    ----------
    component, height, width, **options
        As of `graph`.

    Examples
    --------
    >>> compute_buffer("vae-decoder", 1024, 1024) / 2**20
    6657.0...
    >>> compute_buffer("vae-decoder", 1024, 1024, conv_direct=True, tile=DEFAULT_TILE) / 2**20
    176.0...
    """
    return graph(component, height, width, **options).buffer
