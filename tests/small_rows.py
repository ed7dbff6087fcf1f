"""Small configs of pipelines' rows, derived from the released ones: fewer layers, heads and channels."""

from __future__ import annotations

import inspect
import math
import re
from pkgutil import resolve_name

import torch

from vaemem.pytorch.loading import known_components, make_component

LAYERS = 6
# The code of these picks layers of a component by number.
DEEP = ("krea2", "krea2-turbo", "flux3-klein", "flux3-klein-base", "minimax-h3")
PICKS = "spatio_temporal_guidance_blocks"  # an argument of LTX-2's call: layers by number
HEADS = re.compile(r".*_heads|multi_query_group_num")
WIDTHS = re.compile(
    rf"{HEADS.pattern}|(?!.*(head_dim|rope|freq|z_dim|motion))(.*(hidden|intermediate)_size|d_model|d_ff|.*_dim(_t5|_out)?"
    r"|(.*block_out|caption|crossattn_proj_in|encoder_hidden_states)_channels|norm_num_groups)"
)
DEPTHS = re.compile(r"(?!.*(register|text))(.*_)?num_(.*_)?layers|transformer_layers_per_block")


def full_settings(component):
    """The class of a component, its config's class if it has one, and all its settings."""
    if isinstance(component, str) and component in known_components():
        component = known_components()[component]
    if isinstance(component, str):
        with torch.device("meta"):
            made = make_component(component)
        kind = type(made)
        return [f"{kind.__module__}:{kind.__name__}", {k: v for k, v in made.config.items() if not k.startswith("_")}]
    *kinds, told = component
    if len(kinds) > 1:
        return [*kinds, resolve_name(kinds[1])(**told).to_dict()]
    known = inspect.signature(resolve_name(kinds[0]).__init__).parameters.values()
    return [*kinds, {one.name: one.default for one in known if one.default is not one.empty} | told]


def is_module(component):
    told = component and component[0] != "tokenizer"
    return told and (isinstance(component, str) or issubclass(resolve_name(component[0]), torch.nn.Module))


def changed(change, pattern, told):
    """Settings with other numbers under the names that a pattern matches."""

    def of(name, value):
        if isinstance(value, dict):
            return changed(change, pattern, value)
        if not value or isinstance(value, str | bool) or not pattern.fullmatch(str(name)):
            return value
        return [*map(change, value)] if isinstance(value, list | tuple) else change(value)

    return {name: of(name, value) for name, value in told.items()}


def shallow(told):
    """Settings with fewer layers. Lists of layers, and distances between layers, get shorter too."""
    told = {name: shallow(value) if isinstance(value, dict) else value for name, value in told.items()}
    if "vace_layers" in told:
        told["vace_layers"] = [n for n in told["vace_layers"] if n < LAYERS]
    if "inject_face_latents_blocks" in told:
        told["inject_face_latents_blocks"] = LAYERS // 2
    if "text_proj_in_factor" in told:  # the text encoder's layers, and its input
        told["text_proj_in_factor"] = LAYERS + 1
    if told.get("per_layer_config"):
        told["per_layer_config"] = {n: one for n, one in told["per_layer_config"].items() if int(n) < LAYERS}
    if told.get("layer_types"):
        told["layer_types"] = told["layer_types"][:LAYERS]
    return changed(lambda n: min(n, LAYERS), DEPTHS, told)


def small_row(name, row):
    """A row of the same pipeline with a small config. Everywhere the numbers of heads and channels are divided by the
    same number. The C walk knows videos of Wan's VAE at its own size alone."""
    known = {role: full_settings(one) for role, one in row["components"].items() if is_module(one)}
    heads = []
    for *_, told in known.values():
        changed(lambda n: heads.append(n) or n, HEADS, told)
    divisor, parts = math.gcd(8, *(n for n in heads if n > 1)), {}
    for role, (*kinds, told) in known.items():
        if not kinds[0].endswith("AutoencoderKLWan"):
            told = changed(lambda n: max(1, n // divisor), WIDTHS, told)
            parts[role] = [*kinds, told if name in DEEP else shallow(told)]
    call = row["call"] | ({PICKS: [LAYERS // 2]} if row["class"].startswith("LTX2") else {})
    return row | {"components": row["components"] | parts, "call": call}
