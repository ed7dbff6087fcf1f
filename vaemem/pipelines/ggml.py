"""What stable-diffusion.cpp takes for each component of a pipeline: compute buffers to the byte, weights, FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vaemem._common import choose, whole
from vaemem.pipelines.sdcpp_denoisers import Flux, Unet, ZImage
from vaemem.pipelines.sdcpp_encoders import T5, Clip, Qwen3
from vaemem.prediction.sdcpp import Graph, vae_graph

DEFAULT_TILE = 32  # latent pixels: of --vae-tiling

_VAES = {"vae-decoder": "decode", "vae-encoder": "encode"}
_DENOISERS: dict[str, Callable[..., Any]] = {
    "zimage": ZImage,
    "flux-dev": functools.partial(Flux, guidance=True),
    "flux-schnell": Flux,
    "unet-sd15": Unet,
    "unet-sdxl": functools.partial(Unet, is_xl=True),
}
_ENCODERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "qwen3-4b": (Qwen3, {}),
    "clip-l": (Clip, {"hidden": 768, "heads": 12, "layers": 12, "projected": False}),
    "clip-g": (Clip, {"hidden": 1280, "heads": 20, "layers": 32, "projected": True}),
    "t5-xxl": (T5, {}),
}
COMPONENTS = (*_VAES, *_DENOISERS, *_ENCODERS)
# Tokens that sd.cpp pads a prompt to. Z-Image's and Qwen3's it does not pad.
PADDED_TOKENS = {"clip-l": 77, "clip-g": 77, "unet-sd15": 77, "unet-sdxl": 77, "t5-xxl": 256, "flux-dev": 256,
                 "flux-schnell": 256}  # fmt: skip


@functools.lru_cache(maxsize=256)
def graph(
    component: str,
    height: int = 1024,
    width: int = 1024,
    *,
    tokens: int | None = None,
    model: str = "flux",
    weight_type: str = "f16",
    conv_direct: bool = False,
    flash: bool = False,
    conv_scale: bool = False,
    tile: int | None = None,
    backend: str = "cuda",
) -> Graph:
    """What one component's graph takes in stable-diffusion.cpp: buffer, pool, weights, FLOPs.

    Parameters
    ----------
    component : str
        One of COMPONENTS.
    height, width : int
        Of the image, multiples of 8 (of 64 for UNets). Text encoders have none.
    tokens : int, optional
        Of the prompt with its template; needed for Z-Image and Qwen3. By default what sd.cpp pads a short prompt to: 77
        for CLIP, which takes no more at once, and the UNets; 256 for FLUX and its T5.
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
        Of a VAE: latent pixels of a tile's side, DEFAULT_TILE for ``--vae-tiling``; it encodes in tiles 1.3 times as
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
    if component in _VAES:
        options: dict[str, Any] = {"conv_direct": conv_direct, "flash": flash, "conv_scale": conv_scale}
        return vae_graph(_VAES[component], height, width, model, tile=tile, backend=backend, **options)
    if tile is not None:
        raise ValueError(f"tile: want None for {component}, got {tile!r}; sd.cpp tiles the VAE alone")
    padded = PADDED_TOKENS.get(component)
    count = whole(f"tokens of {component}", padded if tokens is None else tokens)
    if component.startswith("clip") and count != padded:
        raise ValueError(f"tokens of {component}: want {padded}, got {count}; longer prompts go through it in parts")
    if component in _ENCODERS:
        encoder, sizes = _ENCODERS[component]
        runner = encoder(weight_type, backend=backend)
        return runner.taken(runner.build(count, **sizes))
    multiple = 64 if component.startswith("unet") else 8
    for name, side in (("height", height), ("width", width)):
        if whole(name, side, multiple) % multiple:
            raise ValueError(f"{name}: want a multiple of {multiple} for {component}, got {side}")
    runner = _DENOISERS[component](weight_type, conv_direct=conv_direct, flash=flash, backend=backend)
    return runner.taken(runner.build(height // 8, width // 8, count))


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
