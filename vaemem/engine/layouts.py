"""Names of tensors in weights files, and the architecture that tensors make.

The core names every tensor as diffusers does (``encoder.mid_block.attentions.0.to_q.weight``). A layout is another
spelling of these names; only `spell` knows the spellings:

=========  ===========================================================================================================
diffusers  the core's names; older files write ``query``, ``key``, ``value``, ``proj_attn`` for ``to_q`` and so on
ldm        CompVis' names, with quant convs; under ``first_stage_model.`` in original Stable Diffusion checkpoints
bfl        the same names in Black Forest Labs' files, without quant convs, or (FLUX.2) with them inside the halves
wan        the names of Wan's authors, in ComfyUI's files of the VAEs of Qwen-Image, Wan 2.1 and Wan 2.2
hunyuan    the names of HunyuanImage's authors: CompVis' with the levels of a decoder in another order
ltx        the names of LTX-2's authors, who number blocks and resamplers through a half
taesd      the numbers of TAESD's authors, in their files of tiny autoencoders (`vaemem.engine.tiny`)
=========  ===========================================================================================================

Sources of the names: ``AutoencoderKL`` of diffusers 0.33, ``AutoencoderKLFlux2`` of its main branch in August 2026,
``ldm/modules/diffusionmodules/model.py`` of CompVis/latent-diffusion, ``flux/modules/autoencoder.py`` of
black-forest-labs/flux, for FLUX.2 diffusers' ``scripts/convert_flux2_to_diffusers.py``, ``wan/modules/vae.py`` of
Wan-Video/Wan2.1, ``vae2_2.py`` of Wan2.2, and diffusers' ``scripts/convert_hunyuan_image_to_diffusers.py`` and
``convert_ltx2_to_diffusers.py``.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vaemem import _core
from vaemem._errors import ArgumentError, Named
from vaemem.engine import tiny
from vaemem.engine.configs import SHORT_REPR, UNKNOWN_ARCH, Arch, known_arch, known_like, shown

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by tensor name
Spelt = Mapping[str, str]  # names in another layout

LAYOUTS = ("diffusers", "ldm", "bfl", "wan", "hunyuan", "ltx", tiny.AUTHORS)
# Whatever precedes a VAE's names is a wrapper, as ``module.`` or ``ema.vae.``.
_WRAPPED = re.compile(r"((?:[^.]+\.)*?)(?:encoder|decoder)\.")
_DEEPEST = 4  # mappings in mappings

# ---- names ----

_QUANT = re.compile(r"(post_)?quant_conv\.")
_WITHIN_HALF = re.compile(r"(encoder|decoder)\.(?=(post_)?quant_conv\.)")
_ATTENTION = "mid_block.attentions.0."
_OLD = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}
_LDM = {"mid_block.resnets.0.": "mid.block_1.", "mid_block.resnets.1.": "mid.block_2.", ".resnets.": ".block."}
_LDM |= {_ATTENTION + "group_norm.": "mid.attn_1.norm.", _ATTENTION + "to_out.0.": "mid.attn_1.proj_out."}
_LDM |= {_ATTENTION + "to_": "mid.attn_1.", ".conv_shortcut.": ".nin_shortcut.", ".conv_norm_out.": ".norm_out."}
_LDM |= {"samplers.0.": "sample."}
# {piece of a core name: the same piece in the layout}; other pieces are the same in both.
_PIECES = {"diffusers": {}, "diffusers-old": {_ATTENTION + k: _ATTENTION + v for k, v in _OLD.items()}}
_WAN = {"mid_block.resnets.0.": "middle.0.", _ATTENTION: "middle.1.", "mid_block.resnets.1.": "middle.2."}
_WAN |= {"norm1.gamma": "residual.0.gamma", "conv1.": "residual.2.", "norm2.gamma": "residual.3.gamma"}
_WAN |= {"conv2.": "residual.6.", ".conv_shortcut.": ".shortcut."}
_WAN |= {".norm_out.": ".head.0.", ".conv_out.": ".head.2.", "coder.conv_in.": "coder.conv1."}
_WAN |= {"post_quant_conv.": "conv2.", "quant_conv.": "conv1."}
_HUNYUAN = {"mid_block.resnets.0.": "mid.block_1.", "mid_block.resnets.1.": "mid.block_2."}
_HUNYUAN |= {_ATTENTION + "proj.": "mid.attn_1.proj_out.", _ATTENTION + "to_": "mid.attn_1."}
_HUNYUAN |= {_ATTENTION: "mid.attn_1."}
_LTX = {".resnets.": ".res_blocks.", "latents_mean": "per_channel_statistics.mean-of-means"}
_LTX |= {"latents_std": "per_channel_statistics.std-of-means"}
_PIECES |= {"ldm": _LDM, "bfl": _LDM, "wan": _WAN, "hunyuan": _HUNYUAN, "ltx": _LTX}
_PIECES |= {layout: {} for layout in (tiny.AUTHORS, *tiny.HALVES)}


def spell(names: Iterable[str], layout: str, levels: int, prefix: str = "", layers: int = 2) -> dict[str, str]:
    """Return {core name: the layout's name under a prefix}. layers: resnets in a level of an encoder; some layouts
    number modules through all levels."""

    def level(found: re.Match[str]) -> str:
        """Count levels from the image's side; in the core a decoder counts from the latents' side."""
        side, i = found[1], int(found[2])
        return f"{side}.{levels - 1 - i if side == 'up' else i}."

    def flat(found: re.Match[str]) -> str:
        """Wan's: one list holds the resnets and the resampler of a level. Lists of all levels stay such lists, and a
        decoder without residual upsamplers has only one."""
        side, i = found[1], int(found[2])
        if found[3] is None:
            return f"{side}samples.{i}."
        j = int(found[4]) if found[4] else layers + (side == "up")
        if found[3] == "upsamplers.0." or (side == "up" and not residual):
            return f"upsamples.{i * (layers + 2) + j}."
        return f"{side}samples.{i}.{side}samples.{j}."

    def levelled(found: re.Match[str]) -> str:
        """HunyuanImage's: resnets and resampler of a level are separate; the core has one list."""
        side, (i, j) = found[1], divmod(int(found[2]), layers + (1 if found[1] == "down" else 2))
        return f"{side}.{i}.block.{j}." if j < layers + (side == "up") else f"{side}.{i}.{side}sample."

    def through(found: re.Match[str]) -> str:
        """LTX-2's: blocks and resamplers alternate in one list, which has the middle block too."""
        if found[1] is None:
            return f"encoder.down_blocks.{2 * levels}." if found[0].startswith("enc") else "decoder.up_blocks.0."
        at = 2 * int(found[2]) + (found[1] == "up") + (not found[3] if found[1] == "up" else bool(found[3]))
        return f"{found[1]}_blocks.{at}."

    numbered = re.compile(r"(down|up)_blocks\.(\d+)\.")
    number = {"ldm": (numbered, level), "bfl": (numbered, level), "hunyuan": (numbered, levelled)}
    number["wan"] = re.compile(rf"{numbered.pattern}((?:resnets\.(\d+)|(?:down|up)sampler(?:s\.0)?)\.)?"), flat
    number["ltx"] = re.compile(rf"{numbered.pattern}((?:down|up)samplers\.0\.)?|(?:en|de)coder\.mid_block\."), through
    spelt, names = {}, list(names)
    residual = any(".upsampler." in name or ".downsampler." in name for name in names)
    for name in names:
        theirs = tiny.spell_tiny(name, layout)
        for mine, piece in _PIECES[layout].items():
            theirs = theirs.replace(mine, piece)
        if layout in number:
            pattern, change = number[layout]
            theirs = pattern.sub(change, theirs)
        if layout == "bfl" and _QUANT.match(name):  # FLUX.2's are inside a half
            theirs = f"{half_of(name)}.{theirs}"
        spelt[name] = prefix + theirs
    return spelt


def file_shapes(name: str, shape: Shape) -> tuple[Shape, ...]:
    """Return the shapes in which files hold a tensor of the core, number for number.

    These are its own shape; for a matrix a 1x1 convolution; a convolution over one frame (HunyuanImage's); in GGUF,
    which has at most four sides, the first two of five as one (stable-diffusion.cpp's ``safetensors_io.cpp``); for a
    norm's factors any sides of 1.
    """
    if is_attention_matrix(name, shape):
        return shape, (*shape, 1, 1)
    if name.endswith(".gamma"):
        return tuple((shape[0], *[1] * sides) for sides in range(4))
    if len(shape) == 4:
        return shape, (*shape[:2], 1, *shape[2:])
    return (shape, (shape[0] * shape[1], *shape[2:])) if len(shape) == 5 else (shape,)


def is_attention_matrix(name: str, shape: Shape) -> bool:
    """Return whether this is a (C, C) matrix that some files hold as a 1x1 convolution (C, C, 1, 1)."""
    return ".attentions." in name and len(shape) == 2


_HALVES = dict.fromkeys(("encoder", "quant_conv", "conv1"), "encoder")
_HALVES |= dict.fromkeys(("decoder", "post_quant_conv", "conv2"), "decoder")


def half_of(name: str) -> str | None:
    """Return the half of a tensor, named in any layout without a prefix; None if it is in neither."""
    return _HALVES.get(name.partition(".")[0])


# ---- prefixes ----


def unwrap(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping's values by name, with those of nested mappings under joined names, as ``ema.encoder...``. Visit
    each mapping once, even if it is referenced twice."""
    found, left, seen = {}, [("", held)], {id(held)}
    while left:
        prefix, mapping = left.pop()
        for name, value in mapping.items():
            if not isinstance(name, str):
                continue
            if not isinstance(value, Mapping):
                found[prefix + name] = value
            elif id(value) not in seen and prefix.count(".") < _DEEPEST:
                seen.add(id(value))
                left.append((f"{prefix}{name}.", value))
    return found


def _prefixes(names: Iterable[str]) -> list[str]:
    """List the prefixes that tensors may have: averages over the training first, longer before shorter. Files of one
    half do not name it, so what all their names share may be a wrapper too."""
    names = list(names)
    found = {match[1] for match in map(_WRAPPED.match, names) if match}
    if names and not found:
        start = re.split(r"\d", names[0])[0]
        shared = start[: start.rfind(".") + 1]
        found = {shared} if all(name.startswith(shared) for name in names) else found
    average = re.compile(r"(.*[._])?ema[._]")
    return sorted({*found, ""}, key=lambda prefix: (average.match(prefix) is None, -len(prefix), prefix))


# ---- checking ----


_OTHER_STATISTICS = tuple(f"per_channel_statistics.{name}" for name in ("channel", "mean-of-stds"))


def ours(names: Iterable[str], prefix: str, parts: str) -> set[str]:
    """Return the names under a prefix, without it, except those of the other half and those for training."""
    stripped = {name[len(prefix) :] for name in names if name.startswith(prefix)}
    other = {"encoder": "decoder", "decoder": "encoder"}.get(parts, "no half")
    unused = ("loss.", "model_ema.", "bn.num_batches_tracked", *_OTHER_STATISTICS)  # for training
    # One frame never uses convolutions over time.
    return {n for n in stripped if half_of(n) != other and not n.startswith(unused) and ".time_conv." not in n}


def check_shapes(
    shapes: Shapes, wanted: Shapes, spelt: Spelt, wanted_by: str, faults: Spelt | None = None, extra: Iterable[str] = ()
) -> None:
    """Raise ValueError unless the file has every wanted tensor in its shape, without faults, and nothing extra.

    shapes: of the file. wanted: by core name. spelt: {core name: the file's}. faults: problems by the file's name.
    """
    problems = []
    for name, shape in wanted.items():
        in_file = spelt[name]
        got = shapes.get(in_file)
        if got is None:
            problems.append(f"missing {in_file}: expected {shape}, got no such tensor")
        elif got not in file_shapes(name, shape):
            problems.append(f"{in_file}: expected {shape}, got {shown(got)}")
        elif faults and in_file in faults:
            problems.append(f"{in_file}: {faults[in_file]}")
    problems += [f"extra {shown(n)}: expected no such tensor, got {shown(shapes[n])}" for n in sorted(extra)]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ArgumentError("", "", f"{len(problems)} tensor(s) unlike {wanted_by}: {'; '.join(problems[:5])}{more}")


# ---- detection ----

# Tensors do not tell these.
_SCALING = ("name", "norm_eps", "scaling_factor", "shift_factor", "latents_mean", "latents_std")
# If several models have the same tensors, the first in the core's order is chosen: FLUX.1, not SD3 or Z-Image. But
# tensors of SD1.5, which SDXL and Playground share, leave the scaling open.
_AMBIGUOUS = {"sd15": {"name": "sd", "scaling_factor": None}}
# Other tensors of a whole checkpoint tell which model it is (``single_file_utils.py`` of diffusers).
_MARKS = {"edm_mean": "playground-v2.5", "conditioner.embedders.": "sdxl", "cond_stage_model.": "sd15"}
_MARKS |= {"model.diffusion_model.joint_blocks.": "sd3", "model.diffusion_model.double_blocks.": "flux"}

# Names in other files of a pipeline that no VAE has: diffusers', the first authors', llama.cpp's.
_DIFFUSION = r"model\.diffusion_model|(input|output|down|up|double|single|joint|transformer)_blocks|\w+_refiner"
_TEXT = r"text_model|text_encoders|cond_stage_model|conditioner|token_embd|(enc\.)?blk|model\.layers"
_TEXT += r"|encoder\.block\.\d+\.layer"
_OTHERS = {"a diffusion model": re.compile(rf"({_DIFFUSION})\."), "a text encoder": re.compile(rf"({_TEXT})\.")}


# Names that only VAEs of other architectures have.
_OTHER_VAES = {
    "TAEHV, a tiny autoencoder of videos,": r"(en|de)coder\.\d+\.conv\.weight",
    "AsymmetricAutoencoderKL": r"decoder\.condition_encoder\.",
    "Stable Video Diffusion's VAE": r"decoder\..*(time_stack|temporal_res_block|time_conv_out|time_mix_conv)\.",
    "a VAE of videos such as HunyuanVideo's": r"(en|de)coder\..*\.conv[12]?\.conv\.weight",
    "a VQ model such as Stable Cascade's stage A": r"(vquantizer|quantize)\.",
}


def _find_ltx(names: list[str]) -> tuple[str, str] | None:
    """Return layout and prefix of LTX-2's VAE, if it is among the names. Whole checkpoints hold one of sound too."""
    spellings = {"ltx": r"(en|de)coder\.(down|up)_blocks\.\d+\.res_blocks\.", "diffusers": r"latents_mean$"}
    for prefix in _prefixes(names):
        for layout, spelling in spellings.items():
            if any(map(re.compile(re.escape(prefix) + spelling).match, names)):
                return layout, prefix
    return None


def find_layout(names: Iterable[str]) -> tuple[str, str]:
    """Return (layout, prefix) of a file's names; old spellings of diffusers are ``"diffusers-old"``. ValueError for
    names of no VAE, or of one that is known and not run here."""
    names = list(names)
    if found := _find_ltx(names):
        return found
    for what, spelling in _OTHER_VAES.items():
        if seen := next(filter(re.compile(rf"(?:[^.]+\.)*?{spelling}").match, names), None):
            raise ArgumentError("", "", f"unknown architecture: {what} has tensors like {shown(seen)}")
    prefixes = _prefixes(names)
    if found := tiny.tiny_layout(names, prefixes):
        return found
    for prefix in prefixes:
        inside = [n[len(prefix) :] for n in names if n.startswith((prefix + "encoder.", prefix + "decoder."))]
        # Every model has a middle block, and each family has its own name for it. The majority decides, so that a
        # single stray tensor is reported.
        pieces = (".mid_block.", ".mid.", ".attentions.0.query.", ".attentions.0.to_q.", ".middle.")
        new, ldm, query, to_q, wan = (sum(piece in name for name in inside) for piece in pieces)
        if wan > max(new, ldm):
            return "wan", prefix
        if ldm > new:
            if "decoder.up.0.upsample.conv.weight" in inside or "encoder.down.4.downsample.conv.weight" in inside:
                return "hunyuan", prefix  # CompVis' decoders have no upsampler at 0, and no five levels
            quant = any(n.startswith((prefix + "quant_conv.", prefix + "post_quant_conv.")) for n in names)
            return "ldm" if quant else "bfl", prefix
        if new:
            return "diffusers-old" if query > to_q else "diffusers", prefix
    got = ", ".join(map(SHORT_REPR.repr, names[:3])) or "none"
    others = [what for what, spelling in _OTHERS.items() if any(map(spelling.match, names))]
    advice = f"these are {others[0]}'s tensors, and the VAE is another file" if others else ""
    raise ArgumentError("", f"a VAE's tensors as {', '.join(LAYOUTS)} name them", got, advice)


_BLOCK = re.compile(r"(encoder\.down|decoder\.up)(?:_blocks)?\.(\d{1,3})\.(?:resnets|block)\.(\d{1,3})\.")


def _count_without_gap(numbers: Iterable[int]) -> int:
    """Return how far numbers continue from 0 without a gap: 3 for 0, 1, 2 and 7."""
    have = set(numbers)
    return next(i for i in itertools.count() if i not in have)


def _blocks_of(shapes: Shapes, half: str, layout: str) -> tuple[list[int], int]:
    """Return the block_out_channels of a half, and layers_per_block."""
    blocks: dict[int, dict[int, list[int]]] = {}  # level -> layer -> first dimensions
    for name, shape in shapes.items():
        found = _BLOCK.match(name)
        if found and name.startswith(half) and shape:
            blocks.setdefault(int(found[2]), {}).setdefault(int(found[3]), []).append(shape[0])
    levels = _count_without_gap(blocks)
    if not levels:
        raise ArgumentError("", f"the resnets of the {half}'s first block", "none")
    widths = [statistics.mode(itertools.chain(*blocks[i].values())) for i in range(levels)]
    layers = statistics.mode(_count_without_gap(blocks[i]) for i in range(levels))
    if half == "encoder":
        return widths, layers
    return widths if layout in ("ldm", "bfl") else widths[::-1], layers - 1


def _find_nearest(archs: Iterable[Arch], in_file: Shapes, layout: str, prefix: str, parts: str) -> Arch:
    """Return the architecture that shares most tensors with the file; ValueError if it shares fewer than half."""
    names, counts = ours(in_file, prefix, parts), []
    for arch in archs:
        tensors = dict(_core.Model(arch).tensors)
        spelt = spell(tensors, layout, len(arch["block_out_channels"]), prefix, arch["layers_per_block"])
        counts.append((sum(in_file.get(spelt[n]) in file_shapes(n, shape) for n, shape in tensors.items()), arch))
    count, nearest = max(counts, key=lambda one: one[0])
    if 2 * count < len(names):
        raise unknown_architecture(count, len(names))
    return nearest


def unknown_architecture(count: int, of: int) -> ArgumentError:
    """Make the error for tensors of no known model."""
    problem = f"unknown architecture: only {count} of {of} tensors have names and shapes of a known model"
    return ArgumentError("", "", problem, ("pass ", Named("config")))


def _find_video_arch(shapes: Shapes, in_file: Shapes, layout: str, prefix: str, parts: str) -> Arch:
    """Return the architecture of Qwen-Image's VAE (which is Wan 2.1's), Wan 2.2's or Qwen-Image-2.1's.

    Filters may be whole or cut to one frame, and images may have any channels. Other widths need a config.
    """
    ends = [(f"encoder.{name}.weight", 1) for name in ("conv_in", "conv1")]
    ends += [(f"decoder.{name}.weight", 0) for name in ("conv_out", "head.2")]
    seen = [(name, shapes[name][axis]) for name, axis in ends if len(shapes.get(name, ())) in (4, 5)]

    def variants() -> Iterator[Arch]:
        for name in ("qwen-image", "wan2.2", "qwen-image-2.1"):
            known = known_arch(name)
            channels = seen[0][1] // known.get("image_patch", 1) ** 2 if seen else 0
            if channels and channels != known["in_channels"]:
                known = known | {"name": "custom", "in_channels": channels, "out_channels": channels}
            yield known
            if "slices" not in known:
                yield known | {"name": "custom", "slices": False}

    found = _find_nearest(variants(), in_file, layout, prefix, parts)
    last = next((one for one in seen if one[0].startswith("decoder.")), None)
    if last and not found.get("image_patch") and last[1] in (12, 16):
        larger = f"{last[1]} channels, which become an image of twice the size (as Wan2.1-VAE-upscale2x's)"
        advice = ("pass ", Named("config"), f" with out_channels {last[1]} to have them as they are")
        raise ArgumentError(last[0], "", f"{larger}, and that is not run here", advice)
    return found


def _find_arch(in_file: Shapes, layout: str, prefix: str, parts: str) -> Arch:
    """Return the architecture of a file's tensors. The majority of the tensors that show a number decides it; the later
    check then names a single missing, extra or misshapen one."""
    shapes = {_WITHIN_HALF.sub("", name): in_file[prefix + name] for name in ours(in_file, prefix, "all")}
    if any(name.endswith(".conv1.conv.weight") for name in shapes):
        try:
            return _find_nearest(map(known_arch, ("ltx2.3", "ltx2")), in_file, layout, prefix, parts)
        except ArgumentError:
            other = "a VAE of videos such as LTX-Video 0.9's, or one like LTX-2's with other widths"
            raise ArgumentError("", "", f"unknown architecture: {other}", ("pass ", Named("config"))) from None
    if any(name.endswith(".gamma") for name in shapes):
        return _find_video_arch(shapes, in_file, layout, prefix, parts)
    if layout == "hunyuan" or any(re.match(r"(en|de)coder\.(down|up)_blocks\.\d+\.conv", name) for name in shapes):
        return _find_nearest(
            [known_arch("hunyuanimage-2.1")], in_file, layout, prefix, parts
        )  # other widths need a config
    if layout.startswith(tiny.AUTHORS) or any(".layers." in name for name in shapes):
        latent_channels, normed = tiny.read_shapes(shapes, layout)
        seen = known_arch("taef2" if normed else "taesd") | {"name": "custom", "latent_channels": latent_channels}
        return known_like(seen, but=("name",)) or seen
    halves = {half_of(name) for name in shapes}
    half = parts if parts in halves else "decoder" if "decoder" in halves else "encoder"
    widths, layers = _blocks_of(shapes, half, layout)
    flux2 = any(name.startswith("bn.") for name in shapes)
    sides = {half: widths}
    if flux2 and parts == "all":  # only then may the halves differ
        sides = {each: _blocks_of(shapes, each, layout)[0] for each in ("encoder", "decoder") if each in halves}

    def votes(*where: tuple[str, int, int]) -> list[int]:
        """Return a number as each tensor shows it. where: (name, axis, factor by which the number is multiplied)."""
        return [shapes[n][axis] // per for n, axis, per in where if len(shapes.get(n, ())) > axis]

    images = votes(("encoder.conv_in.weight", 1, 1)), votes(("decoder.conv_out.weight", 0, 1))
    ends = [("encoder.conv_out", 2), ("post_quant_conv", 1), ("quant_conv", 2)]
    either = [(f"{name}.{kind}", 0, per) for name, per in ends for kind in ("weight", "bias")]
    latents = votes(("decoder.conv_in.weight", 1, 1), *either)
    # A missing half counts as equal to the other. A number that no tensor shows has its default.
    quant = {half_of(name) for name in shapes if _QUANT.match(name)}
    arch = dict(UNKNOWN_ARCH)
    arch |= {
        "in_channels": (images[0] or images[1] or [3])[0],
        "out_channels": (images[1] or images[0] or [3])[0],
        "latent_channels": statistics.mode(latents or [4]),
        "block_out_channels": tuple(sides.get("encoder", widths)),
        "layers_per_block": layers,
        "use_quant_conv": ("encoder" if "encoder" in halves else "decoder") in quant,
        "use_post_quant_conv": ("decoder" if "decoder" in halves else "encoder") in quant,
        "mid_block_add_attention": any(".attentions." in n or ".attn_1." in n for n in shapes if n.startswith(half)),
    }
    if flux2:
        arch |= {key: known_arch("flux2")[key] for key in ("patch_size", "batch_norm_eps")}
    if sides.get("decoder", widths) != sides.get("encoder", widths):
        arch["decoder_block_out_channels"] = tuple(sides["decoder"])
    # Before anything is allocated, the widest tensors must be there, so that the file's size bounds the model's.
    for each, channels in sides.items():
        block, order = ("down", channels) if each == "encoder" else ("up", channels[::-1])
        wanted = {f"{each}.{block}_blocks.{i}.resnets.0.conv2.weight": (c, c, 3, 3) for i, c in enumerate(order)}
        spelt = spell(wanted, layout, len(channels), prefix)
        check_shapes(in_file, wanted, spelt, "the architecture that most of them make")
        if any(c % arch["norm_num_groups"] for c in channels):
            unseen = f"norm_num_groups cannot be seen in tensors, and the usual {arch['norm_num_groups']}"
            divides = f"does not divide block_out_channels {tuple(channels)}"
            raise ArgumentError("", "", f"{unseen} {divides}", ("pass ", Named("config")))
    known = known_like(arch, but=_SCALING)
    for mark, marked in _MARKS.items():
        if known and any(name.startswith(mark) for name in in_file):
            if known_like(known_arch(marked), but=_SCALING) == known:
                return known_arch(marked)
    return known | _AMBIGUOUS.get(known["name"], {}) if known else arch


def detect(shapes: Shapes, parts: str = "all") -> tuple[str, str, Arch]:
    """Return layout, prefix and architecture of a file's tensors; ignore tensors outside the VAE.

    parts: the half that decides if they differ.

    SD1.5, SDXL and Playground have the same tensors. Other tensors of a whole checkpoint tell which model it is; a VAE
    alone is named ``"sd"``, with scaling_factor None. FLUX's tensors alone give ``"flux"`` with its scaling, although
    SD3's VAE has the same ones with another scaling (1.5305, shift 0.0609): pass its name or config. Any other model is
    ``"custom"``, with scaling_factor None.

    ValueError for an unknown layout, or tensors of no architecture. Tensors do not show norm_num_groups: 32 is assumed,
    and if that does not divide the channels the error asks for ``config=``.
    """
    layout, prefix = find_layout(shapes)
    return layout.removesuffix("-old"), prefix, _find_arch(shapes, layout, prefix, parts)
