"""AutoencoderTiny: names of its tensors in the known files, and the architecture that they show.

The core uses diffusers' names (``decoder.layers.2.conv.0.weight``). TAESD's authors number the modules of a half in the
same way, except for the decoder: there the bound on the latents is number 0. ComfyUI puts ``taesd_`` before
such names. Each of the authors' files holds one half of the autoencoder, without the half's name.

Sources: ``taesd.py`` of madebyollin/taesd, and ``comfy/taesd/taesd.py`` and ``nodes.py`` of ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

AUTHORS, COMFYUI = "taesd", "taesd_"  # a layout, and ComfyUI's prefix
HALVES = {f"{AUTHORS}-{half}": half for half in ("encoder", "decoder")}  # layouts of files with one half
_END = r"\d{1,2}\.(?:(?:conv|pool)\.\d\.)?(?:weight|bias)"
_NUMBERED = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


def tiny_layout(names: Iterable[str], prefixes: Iterable[str]) -> tuple[str, str] | None:
    """Return (layout, prefix) if most of the names are an AutoencoderTiny's; otherwise None."""
    names = list(names)
    for prefix in (*prefixes, COMFYUI):
        for layout, start in (("diffusers", r"(?:en|de)coder\.layers\."), (AUTHORS, r"(?:en|de)coder\."), ("half", "")):
            theirs = re.compile(re.escape(prefix) + start + _END)
            if (found := sum(map(bool, map(theirs.fullmatch, names)))) and 2 * found > len(names):
                half = "encoder" if f"{prefix}0.weight" in names else "decoder"
                return f"{AUTHORS}-{half}" if layout == "half" else layout, prefix
    return None


def spell_tiny(name: str, layout: str) -> str:
    """Return a core name in a layout."""
    if layout not in (AUTHORS, *HALVES):
        return name

    def numbered(found: re.Match[str]) -> str:
        half, number = found[1], int(found[2])
        return ("" if half == HALVES.get(layout) else f"{half}.") + f"{number + (half == 'decoder')}."

    return _NUMBERED.sub(numbered, name)


def read_shapes(shapes: Mapping[str, tuple[int, ...]], layout: str) -> tuple[int, bool]:
    """Return the channels of the latents, and whether the smallest level has norms. shapes: by a layout's names."""
    half = HALVES.get(layout) or ("decoder" if any(name.startswith("decoder.") for name in shapes) else "encoder")
    convolution = re.compile(rf"(?:{half}\.)?(?:layers\.)?(\d+)\.weight")
    numbers = {int(found[1]): shape for name, shape in shapes.items() if (found := convolution.fullmatch(name))}
    sides = {"encoder": (max, 0), "decoder": (min, 1)}
    end, axis = sides[half]
    latents = numbers[end(numbers)][axis : axis + 1] if numbers else ()
    return latents[0] if latents else 4, any(".pool." in name for name in shapes)
