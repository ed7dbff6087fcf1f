"""Load pipelines to measure: from a folder, from the Hub's cache, or of full size with random weights."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from vaemem._common import DTYPES, choose, meant, need, shipped
from vaemem._errors import Named, NoFileError
from vaemem._types import Dtype
from vaemem.pipelines.components import PIPELINES, known_pipeline
from vaemem.pipelines.offload_kinds import OFFLOADS, TORCH_WAYS
from vaemem.pipelines.recipe import dtype_keyword
from vaemem.prediction.runtimes import architecture
from vaemem.pytorch.measuring import find_device, vae_builder

# ---- components ----


@functools.cache
def known_components() -> dict[str, list[Any]]:
    """Return the class and settings of modules by name, with the config's class between them if it has one.

    Settings are those in config.json of the published folders, without the classes' defaults:
    stable-diffusion-v1-5, stabilityai/stable-diffusion-xl-base-1.0, black-forest-labs/FLUX.1-dev and FLUX.1-schnell,
    Tongyi-MAI/Z-Image-Turbo, black-forest-labs/FLUX.2-dev, FLUX.2-klein-4B and -9B. SD 3.5's were read in copies. The
    other configs give the published numbers of parameters (tests/test_programs.py); Qwen-Image's are the class's
    defaults.
    """
    known: dict[str, list[Any]] = json.loads(shipped("components.json"))
    return known


def make_component(component: str | Sequence[Any], **more: Any) -> Any:
    """Make a component in the default dtype on the default device.

    component: a name of `known_components` or a VAE's; or class and settings, with the config's class between them if
        it has one
    more: further settings
    """
    if isinstance(component, str) and component not in known_components():
        return vae_builder(architecture(component), f"a VAE of {component}")().eval()
    told: Sequence[Any] = known_components()[component] if isinstance(component, str) else component
    build, *config, settings = *map(resolve_name, told[:-1]), {**told[-1], **more}
    made = build(config[0](**settings)) if config else build(**settings)
    if isinstance(made, torch.nn.Module):
        _convert_as_loaded(made.eval(), torch.get_default_dtype())
    return made


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build modules in a dtype, as from_pretrained does; a module with a dtype of its own keeps it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- pipelines ----


class Undrawn(TorchFunctionMode):
    """Skips the random initialisation of weights, which takes minutes for FLUX."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        drawn = "normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_"
        return given[0] if getattr(func, "__name__", "") in drawn else func(*args, **(kwargs or {}))


def random_pipeline(name: str, dtype: str) -> Any:
    """Build a pipeline with random weights."""
    pipe = build_pipeline(name, dtype)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) / 50
    for role in PIPELINES[name].parts:
        for weight in getattr(pipe, role).parameters():
            for piece in weight.data.view(-1).split(len(noise)):
                piece.copy_(noise[: len(piece)])
    return pipe


def build_pipeline(
    name: str, dtype: str, vae_dtype: str = "", device: str = "cpu", class_name: str = "", optional: bool = False,
) -> Any:  # fmt: skip
    """Build a pipeline from its row, with weights that nobody set.

    class_name: of a sibling with the same components
    optional: whether it gets its row's optional components
    """
    row = json.loads(shipped("pipelines", f"{name}.json"))
    row |= {"dtype": dtype, "vae_dtype": vae_dtype or row.get("vae_dtype"), "class": class_name or row["class"]}
    return build_row({**row, "components": row["components"] | (row["optional"] if optional else {})}, device)


WORD = "zebra"  # no template has it
_PICTURE = "<|image_pad|>"


def build_row(row: Mapping[str, Any], device: str = "cpu") -> Any:
    """Build a pipeline from its row, a file of data/pipelines, with weights that nobody set.

    "components" has for each role what `make_component` takes. A tokenizer has the name "tokenizer", and settings of
    `_tokenizer`. A modular pipeline's "workflow" chooses its blocks, without the steps that "omits" names.
    """
    diffusers = need("diffusers", f"a pipeline {row['class']}")
    build = getattr(diffusers, row["class"], None)
    if build is None:
        raise ImportError(f"expected a diffusers that has {row['class']}, got {diffusers.__version__}")
    parts = dict[str, Any](row.get("settings", {}))
    for role, component in row["components"].items():
        dtype = (role == "vae" and row.get("vae_dtype")) or row["dtype"]
        if not component or component[0] == "tokenizer":
            parts[role] = _tokenizer(**component[1]) if component else None
        elif isinstance(component, str) or issubclass(resolve_name(component[0]), torch.nn.Module):
            with default_dtype(getattr(torch, dtype)), Undrawn(), torch.device(device):
                parts[role] = make_component(component)
        else:
            parts[role] = make_component(component)
    if "workflow" not in row:
        return build(**parts)
    pipe = build(workflow=row["workflow"])
    if "omits" in row:
        blocks = pipe.blocks
        for step in row["omits"]:
            blocks.sub_blocks.pop(step)
        pipe = build(blocks=blocks)
    pipe.update_components(**parts)
    return pipe


def make_picture(told: Any, width: int, height: int) -> Any:
    """Make what a row's call names as its picture. told: True for one of the output's size; or the sides of one that
    the pipeline scales itself, which comes in a list; and how often, if that is not once"""
    from PIL import Image  # an extra

    return Image.new("RGB", (width, height)) if told is True else [Image.new("RGB", (*told[:2],))] * (*told, 1)[2]


def make_pictures(call: Mapping[str, Any], width: int, height: int) -> dict[str, Any]:
    """Return the arguments of a row's call, with pictures for images (mask_image) and videos (face_video)."""
    shown = [name for name, told in call.items() if told and name.endswith(("image", "video"))]
    return {**call, **{name: make_picture(call[name], width, height) for name in shown}}


def _convert_as_loaded(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and buffers as from_pretrained does in the end. diffusers keeps some modules in float32, and then
    all buffers as they are; transformers keeps some in float16 only."""
    is_transformers = type(module).__module__.startswith("transformers")
    strict = "_strict" if is_transformers and dtype != torch.float16 else ""
    kept = {*(getattr(module, f"_keep_in_fp32_modules{strict}", None) or ())}
    for name, weight in module.named_parameters():
        if kept & {*name.split(".")}:
            weight.data = weight.data.float()
    tensors = (*module.parameters(), *module.buffers())
    is_mixed = any(x.is_floating_point() and x.dtype != dtype for x in tensors)
    if not kept and not is_transformers and is_mixed:
        torch.nn.Module.to(module, dtype)


def _tokenizer(
    length: int, template: int = 0, system: int = 0, instruction: int = 0, positions: bool = False, sees: bool = False,
) -> Any:  # fmt: skip
    """Make a tokenizer that knows one word, `WORD`, and pads as the real ones do; or a processor of texts.

    template: tokens besides a prompt's words; system: of them, those of the system's message
    instruction: tokens of a text that precedes the words, if there is one
    positions: whether it also returns position_ids
    sees: whether it turns pictures into tokens, as Qwen2-VL's processor does
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    class Words(PreTrainedTokenizerFast):
        @property
        def tokenizer(self) -> Any:
            return self

        def __call__(self, text: Any = None, *args: Any, images: Any = None, videos: Any = None, **kwargs: Any) -> Any:
            seen = _see(images) if sees and images else {}
            counts = [int(one) // 4 for one in seen.get("image_grid_thw", torch.ones(1, 3)).prod(1)]
            pictures = "".join(_PICTURE * count for count in counts)
            found = super().__call__([_show(one, pictures) for one in text] if seen else text, *args, **kwargs)
            found.update(seen)
            if positions:
                found["position_ids"] = torch.arange(found["input_ids"].shape[1]).expand_as(found["input_ids"])
            return found

        def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return [3] if "image_pad" in text else super().encode(text, *args, **kwargs)

        def create_mm_token_type_ids(self, ids: Any) -> Any:
            return [[0] * len(one) for one in ids]

        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            if system and kwargs.get("tokenize"):
                return [[0] * system]
            if kwargs.get("tokenize", True):  # with special tokens, which stand for the template's
                options = {name: kwargs[name] for name in ("padding", "max_length", "truncation") if name in kwargs}
                told = [str(one) for one in (conversation if isinstance(conversation[0], list) else [conversation])]
                return self(told, return_tensors=kwargs.get("return_tensors"), **options)
            return super().apply_chat_template(conversation, *args, **kwargs)

    words = Tokenizer(models.WordLevel({"<pad>": 0, WORD: 1, "<t>": 2, _PICTURE: 3}, unk_token=WORD))
    if template:
        if instruction:
            words.normalizer = normalizers.Replace(Regex(rf"\A(?!{WORD})[\s\S]+?(?={WORD}|\z)"), "<t>" * instruction)
        words.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{WORD}|<t>|{re.escape(_PICTURE)}"), "removed", invert=True)
        start = " ".join(["<t>"] * template)
        words.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[("<t>", 2)])
    else:
        words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = cast(Any, Words)(tokenizer_object=words, model_max_length=length, pad_token="<pad>", eos_token="<t>")
    made.chat_template = "{{ messages[0].content }}"
    return made


def _see(images: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return what Qwen2-VL's processor makes of pictures."""
    process: Any = resolve_name("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil")
    return {**process()(images, return_tensors="pt")}


def _show(text: str, pictures: str) -> str:
    """Put the tokens of all pictures in the place of a text's first picture."""
    before, _, after = text.partition(_PICTURE)
    return before + pictures + after.replace(_PICTURE, "")


def load_pipeline(
    source: str, dtype: Dtype | None = None, offload: str = "none", vae: str = "whole", random: bool = False,
    device: Any = None,
) -> Any:  # fmt: skip
    """Load a pipeline of diffusers to measure; download nothing.

    Parameters
    ----------
    source : str
        A diffusers folder, or an id with files in the Hub's cache. With `random`: ``"sd15"``, ``"sdxl"``,
        or another name that `vaemem.predict_pipeline` takes.
    dtype : str, optional
        Type of the weights; by default float16 for SD 1.5 and SDXL, bfloat16 for others.
    offload : str
        ``"none"``, ``"model"`` or ``"sequential"``, as in `vaemem.predict_pipeline`.
    vae : str
        ``"whole"``, ``"tiled"`` or ``"sliced"``.
    random : bool
        Build it from configs: full size, random weights, a tokenizer that knows one word, no safety checker. Memory and
        time do not depend on the values of weights.
    device : torch.device or str, optional
        Where the pipeline runs; by default the GPU if PyTorch has one, otherwise the CPU.

    Returns
    -------
    diffusers.DiffusionPipeline

    Raises
    ------
    ValueError
        An argument that cannot be used, by name.
    ImportError
        There is no diffusers, or it lacks the pipeline; or there is no accelerate to offload with.
    OSError
        Files are missing.

    Examples
    --------
    >>> from vaemem.pytorch import load_pipeline
    >>> load_pipeline("hidream", random=True)
    Traceback (most recent call last):
        ...
    vaemem._errors.ArgumentError: source: only the VAE of 'hidream' is known; ...
    """
    place = find_device(device)
    choose("offload", offload, OFFLOADS)
    choose("vae", vae, TORCH_WAYS)
    dtype = None if dtype is None else meant("dtype", dtype, DTYPES)
    if offload != "none":
        need("accelerate", f"offload {offload}")
    if random:
        name = known_pipeline("source", source)
        pipe = random_pipeline(name, dtype or PIPELINES[name].dtype)
    else:
        loader = need("diffusers", "load_pipeline").DiffusionPipeline
        try:
            class_name = loader.load_config(source, local_files_only=True)["_class_name"]
        except OSError as error:
            wanted = "a folder of diffusers', an id whose files are in the Hub's cache, or with "
            names = f" one of {', '.join(PIPELINES)}"
            raise NoFileError("source", (wanted, Named("random", True), names), repr(source)) from error
        usual = next((kind.dtype for kind in PIPELINES.values() if kind.class_name == class_name), "bfloat16")
        release = int(need("diffusers", "load_pipeline").__version__.split(".")[1])
        kept = {dtype_keyword(release): getattr(torch, dtype or usual)}
        pipe = loader.from_pretrained(source, **kept, local_files_only=True)
    if vae != "whole":
        pipe.vae.enable_tiling() if vae == "tiled" else pipe.vae.enable_slicing()
    if offload == "none":
        return pipe.to(place)
    getattr(pipe, f"enable_{offload}_cpu_offload")(device=place)
    return pipe
