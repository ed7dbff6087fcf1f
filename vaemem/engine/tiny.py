"""AutoencoderTiny: what its tensors are called in the files that there are, and which architecture they show.

The core's names are diffusers' own (``decoder.layers.2.conv.0.weight``). TAESD's authors number the modules of a half
alike, but for the decoder, where the bound on its latents comes first and has a number too; ComfyUI writes ``taesd_``
before such names, and each of the authors' files has one half, without its name.

Sources: ``taesd.py`` of madebyollin/taesd, and ``comfy/taesd/taesd.py`` and ``nodes.py`` of ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

AUTHORS, COMFYUI = "taesd", "taesd_"  # a layout, and a prefix of it
HALVES = {f"{AUTHORS}-{half}": half for half in ("encoder", "decoder")}  # layouts of files that have a half alone
_END = r"\d{1,2}\.(?:(?:conv|pool)\.\d\.)?(?:weight|bias)"
_NUMBERED = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


def tiny_layout(names: Iterable[str], prefixes: Iterable[str]) -> tuple[str, str] | None:
    """(layout, prefix) of names most of which are such tensors'; None where they are another model's."""
    names = list(names)
    for prefix in (*prefixes, COMFYUI):
        for layout, start in (("diffusers", r"(?:en|de)coder\.layers\."), (AUTHORS, r"(?:en|de)coder\."), ("half", "")):
            theirs = re.compile(re.escape(prefix) + start + _END)
            if (found := sum(map(bool, map(theirs.fullmatch, names)))) and 2 * found > len(names):
                half = "encoder" if f"{prefix}0.weight" in names else "decoder"
                return f"{AUTHORS}-{half}" if layout == "half" else layout, prefix
    return None


def spell_tiny(name: str, layout: str) -> str:
    """One of the core's names in a layout."""
    if layout not in (AUTHORS, *HALVES):
        return name

    def numbered(found: re.Match[str]) -> str:
        half, number = found[1], int(found[2])
        return ("" if half == HALVES.get(layout) else f"{half}.") + f"{number + (half == 'decoder')}."

    return _NUMBERED.sub(numbered, name)


def shown_by_shapes(shapes: Mapping[str, tuple[int, ...]], layout: str) -> tuple[int, bool]:
    """Channels of the latents, and whether the smallest level has norms, of tensors by a layout's names."""
    half = HALVES.get(layout) or ("decoder" if any(name.startswith("decoder.") for name in shapes) else "encoder")
    convolution = re.compile(rf"(?:{half}\.)?(?:layers\.)?(\d+)\.weight")
    numbers = {int(found[1]): shape for name, shape in shapes.items() if (found := convolution.fullmatch(name))}
    sides = {"encoder": (max, 0), "decoder": (min, 1)}
    end, axis = sides[half]
    latents = numbers[end(numbers)][axis : axis + 1] if numbers else ()
    return latents[0] if latents else 4, any(".pool." in name for name in shapes)
