"""Find weights and attention scores of denoisers and text encoders that have the bytes of a message."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from vaemem.out_of_memory.candidates import OtherTensor
from vaemem.out_of_memory.messages import OomMessage
from vaemem.out_of_memory.scope import Scope
from vaemem.out_of_memory.sizes import LARGEST_AREA, list_sizes
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.recorded_modules import load_program, recorded

# Bytes of a number: half precision, float32 (in which LoRAs are added), and fp8.
NUMBERS = {2: "float16 or bfloat16", 4: "float32", 1: "fp8"}
# {recorded module: heads, pixels a side of a token, text tokens} of the attention with most scores. For a VAE in
# programs without a fused kernel.
A_VAE = "a VAE"
ATTENTIONS = {
    A_VAE: (1, 8, 0),
    "sd15-unet": (8, 8, 0), "sd21-unet": (5, 8, 0), "sdxl-unet": (10, 16, 0),
    "sdxl-refiner-unet": (12, 16, 0),
    "flux-transformer": (24, 16, 512), "flux2-transformer": (48, 16, 512), "flux2-klein-transformer": (24, 16, 512),
    "flux2-klein-9b-transformer": (32, 16, 512), "sd3-transformer": (24, 16, 333),
    "sd35-medium-transformer": (24, 16, 333), "sd35-large-transformer": (38, 16, 333),
    "pixart-sigma-transformer": (16, 16, 0), "flux-fill-transformer": (24, 16, 512),
    "qwen-image-transformer": (24, 16, 82), "chroma-transformer": (24, 16, 512),
}  # fmt: skip
NOT_EXAMINED = (
    "Searched: runs of one image by VAEs, runs of one image or video by the pipelines of SD 1.5, SD 2.1, SDXL, SD 3,"
    " PixArt-Sigma, FLUX.1, FLUX.2, Chroma, Qwen-Image, Z-Image, Wan 2.1 and Wan 2.2 5B, their weights, and attention"
    " scores. Not searched: batches and other models."
)


def find_other_tensors(message: OomMessage, scope: Scope) -> list[OtherTensor]:
    """List weights and scores in the parts of a pipeline that the traceback is in."""
    (low, high), parts = message.range, scope.clues.parts
    names = [name for name in recorded() if ("denoiser" if _denoises(name) else "text encoder") in parts]
    if scope.is_named:
        known = {part for name in scope.pipelines for part in PIPELINES[name].parts.values()}
        names = [name for name in names if name in known]
    names = [name for name in names if "controlled" not in name]  # these have the UNet's weights and scores
    found = [
        OtherTensor(name, tensor, count, dtype, None, None, numbers * size)
        for name, (size, dtype) in itertools.product(names, NUMBERS.items())
        for numbers, (tensor, count) in _weights(name).items()
        if low < numbers * size <= high
    ]
    names += [A_VAE] * ("VAE" in parts)
    ranks = range(4) if message.is_exact else range(2)  # exact bytes identify rare sizes
    return found if scope.clues.is_weight else [*found, *_scores(low, high, names, ranks)]


def _denoises(name: str) -> bool:
    return name.endswith(("unet", "transformer", "controlnet"))


@functools.cache
def _weights(name: str) -> dict[int, tuple[str, int]]:
    """Return {number of elements: (the first weight of that size, count)}."""
    found: dict[int, tuple[str, int]] = {}
    for weight in load_program(name).weights:
        numbers = math.prod(weight.shape)
        first, count = found.get(numbers, (weight.name, 0))
        found[numbers] = first, count + 1
    return found


def _scores(low: int, high: int, names: Sequence[str], ranks: Iterable[int]) -> Iterator[OtherTensor]:
    """Yield scores, heads x tokens x tokens, of one image, and of two, which guidance runs at once."""
    for name, images, (size, dtype) in itertools.product(ATTENTIONS, (1, 2), [*NUMBERS.items()][:2]):
        heads, side, text = ATTENTIONS[name]
        is_alone = name.startswith(("flux", "qwen", "chroma", A_VAE))  # guidance is an input, or another call
        if name not in names or (images > 1 and is_alone):
            continue
        least, most = ((max(math.sqrt(at / (heads * images * size)) - text, 0)) * side**2 for at in (low, high))
        for height, width in (one for rank in ranks for one in list_sizes(rank, [(least, min(most, LARGEST_AREA))])):
            tokens = -(-height // side) * -(-width // side) + text
            scores = images * heads * tokens**2 * size
            if low < scores <= high:
                tensor = f"attention's scores, {images} x {heads} x {tokens} x {tokens},"
                yield OtherTensor(name, tensor, 1, dtype, height, width, scores)
