"""Read what the lines around an out-of-memory message say of the run: its model, operation, size, program and card."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vaemem._common import OPS
from vaemem.out_of_memory.messages import BEGINS
from vaemem.prediction.gpus import Gpu, known_gpu

# (words in a text, its VAE, its pipelines); the first that matches counts. No VAE: the model is unknown.
NAMED = (
    (r"hunyuan.{0,2}video|hyvideo|hy1\.5", "HunyuanVideo", ()), (r"framepack", "FramePack", ()),
    (r"ltx.?video|\bltxv", "LTX-Video", ()), (r"cogvideo", "CogVideoX", ()), (r"mochi", "Mochi", ()),
    (r"animatediff", "AnimateDiff", ()), (r"stable.video.diffusion|\bsvd_", "Stable Video Diffusion", ()),
    (r"kandinsky", "Kandinsky", ()), (r"\bsana\b", "Sana", ()), (r"stable.cascade", "Stable Cascade", ()),
    (r"wan2\.2.{0,9}(?:ti2v|5b)|vae2_2|ti2v.?5b", "wan2.2", ("wan2.2-5b",)),
    (r"\bwan.{0,40}14b|14b.{0,40}\bwan", "wan2.1", ("wan-14b",)),
    (r"\bwan.{0,40}1\.3b|1\.3b.{0,40}\bwan", "wan2.1", ("wan-1.3b",)),
    (r"\bwan|klwan", "wan2.1", ("wan-1.3b", "wan-14b")),
    (r"flux\.?-?2.{0,9}klein", "flux2", ("flux2-klein", "flux2-klein-9b")), (r"flux\.?-?2\b", "flux2", ("flux2",)),
    (r"flux.{0,12}kontext", "flux", ("flux-kontext",)), (r"flux.{0,12}fill", "flux", ("flux-fill",)),
    (r"flux.{0,12}schnell", "flux", ("flux-schnell",)), (r"flux.{0,4}dev", "flux", ("flux",)),
    (r"flux", "flux", ("flux", "flux-schnell")),
    (r"chroma1|chromapipeline", "flux", ("chroma",)),
    (r"qwen.?image.?edit", "qwen-image", ("qwen-image-edit",)), (r"qwen.?image", "qwen-image", ("qwen-image",)),
    (r"z.?image.{0,4}turbo", "zimage", ("zimage-turbo",)), (r"z.?image", "zimage", ("zimage", "zimage-turbo")),
    (r"stable.diffusion.3\.5.large|sd3\.5.large", "sd3", ("sd35-large",)),
    (r"stable.diffusion.3\.5|sd3\.5", "sd3", ("sd35-medium", "sd35-large")),
    (r"stable.diffusion.?3\b|\bsd3\b", "sd3", ("sd3",)), (r"pixart", "sdxl", ("pixart-sigma",)),
    (r"sdxl|stable.?diffusion.?xl|\bxl\b", "sdxl", ("sdxl",)),
    (r"stable.diffusion.v?-?1|sd.?v?1[.-]?[45]|\bsd15\b", "sd15", ("sd15",)),
    (r"stable.diffusion.v?-?2|sd.?v?2[.-]?[01]\b|\bsd21\b", "sd15", ("sd21",)),
)  # fmt: skip
# Parts of a pipeline by files and functions in a traceback, or by the node that ComfyUI names.
_PARTS = {
    "VAE": (
        r"VAE(?:De|En)code|VideoDecode|autoencoder\w{0,60}\.py|[\\/]vae\w{0,60}\.py|first_stage"
        r"|diffusionmodules[\\/]model\.py|\.py decode|\bsd\.py encode\b|(?:de|en)code_tiled"
    ),
    "denoiser": (
        r"KSampler|SamplerCustom|calc_cond_batch|apply_model|k_diffusion|openaimodel\.py|ldm[\\/]\w{1,60}[\\/]model\.py"
        r"|flux[\\/]model\.py|transformer_\w{1,60}\.py|unet_(?!2d_blocks)\w{1,60}\.py|[\\/]attention\.py|\battn1\b"
    ),
    "text encoder": (
        r"CLIPTextEncode|encode_prompt|encode_from_tokens|text_encoders?[\\/]|sd1_clip\.py"
        r"|modeling_\w{1,60}\.py forward|transformers[\\/](?:models|integrations)[\\/]"
    ),
}
_FRAME = re.compile(r'File "([^"]{1,400})", line \d{1,6}, in ([\w<>.]{1,100})')
_NODE = re.compile(r"(?:executing|Node Type:\W{0,4}) ?(\w{1,100})")
_LOADS = re.compile(
    r"module\.py (?:convert|_apply)\b|model_patcher\.py|cast_bias_weight|cast_to_device|set_module_tensor_to_device"
)
_SIDE = r"['\"]?[ =:]{1,3}(\d{2,5})\b"
# (pattern of two sides, whether the width comes first, factor)
_SIZES = (
    (rf"height{_SIDE}.{{0,60}}?width{_SIDE}", False, 1), (rf"width{_SIDE}.{{0,60}}?height{_SIDE}", True, 1),
    (r"-H (\d{2,5}).{0,40}? -W (\d{2,5})", False, 1), (r"-W (\d{2,5}).{0,40}? -H (\d{2,5})", True, 1),
    (r"\bsize['\"]?[ =:]{1,3}'?(\d{2,5}) ?[x*] ?(\d{2,5})", True, 1),
    (r"\[\d{1,3}, (?:4|16)(?:, \d{1,3})?, (\d{1,4}), (\d{1,4})\]", False, 8),  # latents' shape
    (r"\b(?:resolution|image|generat\w{1,5}).{0,12}?\b(\d{3,4}) ?[x\u00d7*] ?(\d{3,4})\b", True, 1),
)  # fmt: skip
_FRAMES = re.compile(r"(?:frame_?num|num_?frames|video.length)['\"]?[ =:]{1,3}(\d{1,4})\b|\b(\d{1,4}) frames\b", re.I)
_GPU = re.compile(r"\b((?:RTX|GTX) ?\d{4}(?: ?Ti)?(?: SUPER)?(?: Laptop)?|A100|H100|H200|L40S?|L4|T4|V100)\b", re.I)


@dataclass(frozen=True)
class Clues:
    """The words of a text about a run. Each is empty if the text does not say it.

    model: the name of its VAE, or of an unknown model; pipelines: its recorded pipelines
    ops: operations of the VAE; programs: programs that may have run it
    sizes: (height, width), in both orders if the text does not say which comes first; frames: of its video
    parts: of a pipeline, as in a traceback; all if it has none
    has_traceback: whether it has a traceback or names a node
    is_weight: whether the traceback moves or casts a weight
    gpu: the card
    """

    model: str
    pipelines: tuple[str, ...]
    is_unknown: bool
    ops: tuple[str, ...]
    programs: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    frames: int
    parts: list[str]
    has_traceback: bool
    is_weight: bool
    gpu: Gpu | None


def read_clues(text: str) -> Clues:
    """Read the lines around the first message in a text without line breaks."""
    begins = [found.start() for found in BEGINS.finditer(text)]
    text = text[: begins[1] if len(begins) > 1 and not text[begins[0] :].startswith("MPS") else None]
    calls = [" ".join(frame) for frame in _FRAME.findall(text)] + _NODE.findall(text)
    where = "\n".join(calls) or text
    parts = [part for part, names in _PARTS.items() if re.search(names, where)]
    model, pipelines = next(
        ((model, pipelines) for words, model, pipelines in NAMED if re.search(words, text, re.I)), ("", ())
    )
    of_video = _FRAMES.search(text)
    gpu = _GPU.search(text)
    return Clues(
        model, pipelines, bool(model) and not pipelines, _find_ops(calls, text),
        _find_programs(text), tuple(dict.fromkeys(_find_sizes(text))),
        int(of_video[1] or of_video[2]) if of_video else 0, parts or [*_PARTS], bool(calls),
        any(_LOADS.search(call) for call in calls), known_gpu(gpu[1]) if gpu else None,
    )  # fmt: skip


def _find_ops(calls: Iterable[str], text: str) -> tuple[str, ...]:
    """Return the operations that a text may be about, from the functions in its traceback."""
    called = " ".join(re.sub(r"(?i)encode_prompt|encode_from_tokens|textencode", "", call) for call in calls)
    pattern = r"(?:vae_?|\.py _?|\b){0}(?:_first_stage|_tiled|\b)|VAE{0}"
    named = [op for op in OPS if re.search(pattern.format(op), called, re.I)]
    if not named:
        named = [op for op in OPS if re.search(rf"{op}(?:_first_stage|_tiled|r\.)|vae[._ ]?{op}", text, re.I)]
    return tuple(named or ("decode", "encode"))


def _find_programs(text: str) -> tuple[str, ...]:
    """Return the programs that a text may come from, by its files and lines."""
    if re.search(r"comfy", text, re.I) or "Device limit" in text:
        return ("comfyui",)
    if re.search(r"webui|decode_first_stage", text):
        return ("a1111",)
    if "diffusers" in text:
        return ("diffusers",)
    return ("diffusers", "comfyui", "a1111")


def _find_sizes(text: str) -> Iterable[tuple[int, int]]:
    """Yield the sizes that a text names, in multiples of 8 pixels."""
    for pattern, is_wide, factor in _SIZES:
        for found in re.finditer(pattern, text, re.I):
            sides = int(found[1]) * factor, int(found[2]) * factor
            height, width = sides[::-1] if is_wide else sides
            if min(height, width) >= 64 and max(height, width) <= 16384:
                yield height // 8 * 8, width // 8 * 8
