"""Load pipelines to measure: from a folder, from the Hub's cache, or of full size with random weights."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from vaemem import _core
from vaemem._common import DTYPES, choose, meant, need, shipped
from vaemem._errors import Named, NoFileError
from vaemem._types import Dtype
from vaemem.pipelines.components import CLIP_TOKENS, CLIPS, PIPELINES, known_pipeline
from vaemem.pipelines.pipeline_request import OFFLOADS, TORCH_WAYS
from vaemem.pipelines.recipe import dtype_keyword
from vaemem.prediction.runtimes import WAN, architecture
from vaemem.pytorch.measuring import find_device, vae_builder

# ---- components ----

# Configurations are those in config.json of the published folders, without the classes' defaults:
# stable-diffusion-v1-5, stabilityai/stable-diffusion-xl-base-1.0, black-forest-labs/FLUX.1-dev and FLUX.1-schnell,
# Tongyi-MAI/Z-Image-Turbo, black-forest-labs/FLUX.2-dev, FLUX.2-klein-4B and -9B. SD 3.5's were read in copies. The
# others give the published numbers of parameters (tests/test_programs.py); Qwen-Image's are the class's defaults.


def _make(class_name: str, config_name: str = "", **settings: Any) -> Any:
    """Make a module of a class from settings, or from a configuration with these settings."""
    build = resolve_name(class_name)
    return build(resolve_name(config_name)(**settings)) if config_name else build(**settings)


def _cast(class_name: str, **settings: Any) -> Any:
    """Make a module of a class; convert its buffers, as from_pretrained does in the end."""
    return torch.nn.Module.to(_make(class_name, **settings), torch.get_default_dtype())


def _kept(class_name: str, config_name: str, **settings: Any) -> Any:
    """Make T5. transformers keeps the weights `wo` in float32 if it loads the model in float16."""
    module = _make(class_name, config_name, **settings)
    for name, part in module.named_modules():
        if name.endswith(".wo") and part.weight.dtype is torch.float16:
            part.float()
    return module


def _wan(**settings: Any) -> Any:
    """Make Wan's transformer. diffusers keeps some of its modules in float32 (_keep_in_fp32_modules)."""
    module = _make("diffusers:WanTransformer3DModel", **settings)
    for name, weight in module.named_parameters():
        if {*module._keep_in_fp32_modules} & {*name.split(".")}:
            weight.data = weight.data.float()
    return module


def _vae(model: str) -> Any:
    return vae_builder(architecture(model), f"a VAE of {model}")()


_UNET, _FLUX = "diffusers:UNet2DConditionModel", "diffusers:FluxTransformer2DModel"
_FLUX2, _CONTROLNET = "diffusers:Flux2Transformer2DModel", "diffusers:ControlNetModel"
_SDXL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_CLIP: dict[str, Any] = {
    "config_name": "transformers:CLIPTextConfig", "vocab_size": 49408, "bos_token_id": 0, "eos_token_id": 2,
    "pad_token_id": 1,
}  # fmt: skip
_CLIP_L: dict[str, Any] = _CLIP | {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "hidden_act": "quick_gelu",
}  # fmt: skip
_SD3: dict[str, Any] = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
_QWEN3: dict[str, Any] = {
    "config_name": "transformers:Qwen3Config", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_VL: dict[str, Any] = {
    "config_name": "transformers:Qwen2_5_VLConfig", "tie_word_embeddings": False,
    "text_config": dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=128000, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])),
    "vision_config": dict(hidden_size=1280, out_hidden_size=3584),
}  # fmt: skip
# Functions that make each component, in the default dtype on the default device.
BUILDERS: dict[str, Callable[[], Any]] = {
    "safety-checker": partial(
        _make, "diffusers.pipelines.stable_diffusion:StableDiffusionSafetyChecker", "transformers:CLIPConfig",
        projection_dim=768, vision_config=dict(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14,
            image_size=224, projection_dim=768)),
    **dict.fromkeys(
        ("sd15-unet", "sd15-controlled-unet"),
        partial(_make, _UNET, sample_size=64, cross_attention_dim=768, attention_head_dim=8)),
    "sdxl-refiner-unet": partial(
        _make, _UNET, sample_size=128, block_out_channels=(384, 768, 1536, 1536), cross_attention_dim=1280,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(6, 12, 24, 24), transformer_layers_per_block=4, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2560),
    "sd21-unet": partial(
        _make, _UNET, sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20),
        use_linear_projection=True, upcast_attention=True),
    **dict.fromkeys(("sdxl-unet", "sdxl-controlled-unet"), partial(_make, _UNET, sample_size=128, **_SDXL)),
    "sd15-controlnet": partial(_make, _CONTROLNET, cross_attention_dim=768),
    "sdxl-controlnet": partial(
        _make, _CONTROLNET, **{name: value for name, value in _SDXL.items() if name != "up_block_types"}),
    "flux-transformer": partial(_make, _FLUX, guidance_embeds=True),
    "flux-schnell-transformer": partial(_make, _FLUX, guidance_embeds=False),
    "flux-fill-transformer": partial(_make, _FLUX, in_channels=384, out_channels=64, guidance_embeds=True),
    "zimage-transformer": partial(_make, "diffusers:ZImageTransformer2DModel", axes_lens=[1536, 512, 512]),
    **dict.fromkeys(
        ("clip-l", "clip-l-sdxl", "clip-l-flux"), partial(_make, "transformers:CLIPTextModel", **_CLIP_L)),
    "clip-l-sd3": partial(_make, "transformers:CLIPTextModelWithProjection", **_CLIP_L),
    "openclip-h": partial(
        _make, "transformers:CLIPTextModel", **_CLIP, hidden_size=1024, intermediate_size=4096, num_hidden_layers=23,
        num_attention_heads=16, projection_dim=512, hidden_act="gelu"),
    "openclip-g": partial(
        _make, "transformers:CLIPTextModelWithProjection", **_CLIP, hidden_size=1280, intermediate_size=5120,
        num_hidden_layers=32, num_attention_heads=20, projection_dim=1280, hidden_act="gelu"),
    **dict.fromkeys(("t5-xxl", "t5-xxl-sd3", "t5-xxl-masked"), partial(
        _kept, "transformers:T5EncoderModel", "transformers:T5Config", vocab_size=32128, d_model=4096, d_kv=64,
        d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        use_cache=False)),
    "umt5-xxl": partial(
        _kept, "transformers:UMT5EncoderModel", "transformers:UMT5Config", vocab_size=256384, d_model=4096, d_kv=64,
        d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        use_cache=False),
    "qwen3-4b": partial(_make, "transformers:Qwen3Model", **_QWEN3),
    "qwen3-4b-flux2": partial(_make, "transformers:Qwen3ForCausalLM", **_QWEN3),
    "qwen3-8b-flux2": partial(
        _make, "transformers:Qwen3ForCausalLM",
        **_QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}),
    "mistral3-flux2": partial(
        _make, "transformers:Mistral3ForConditionalGeneration", "transformers:Mistral3Config",
        tie_word_embeddings=False, text_config=dict(
            model_type="mistral", vocab_size=131072, hidden_size=5120, intermediate_size=32768, num_hidden_layers=40,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
            rope_theta=1e9, sliding_window=None),
        vision_config=dict(
            model_type="pixtral", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
            num_attention_heads=16, image_size=1540, patch_size=14, head_dim=64)),
    **{
        name: partial(_cast, "diffusers:SD3Transformer2DModel", **settings)
        for name, settings in {
            "sd3-transformer": _SD3 | {"pos_embed_max_size": 192},
            "sd35-medium-transformer": _SD3 | {
                "pos_embed_max_size": 384, "dual_attention_layers": range(13), "qk_norm": "rms_norm"},
            "sd35-large-transformer": {
                "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
                "pos_embed_max_size": 192, "qk_norm": "rms_norm"},
        }.items()
    },
    "pixart-sigma-transformer": partial(
        _cast, "diffusers:PixArtTransformer2DModel", sample_size=128, out_channels=8, caption_channels=4096,
        interpolation_scale=2, use_additional_conditions=False),
    "chroma-transformer": partial(_cast, "diffusers:ChromaTransformer2DModel"),
    "qwen-image-transformer": partial(_make, "diffusers:QwenImageTransformer2DModel"),
    "qwen2.5-vl-7b": partial(_make, "transformers:Qwen2_5_VLForConditionalGeneration", **_QWEN_VL),
    "flux2-transformer": partial(_make, _FLUX2),
    "flux2-klein-transformer": partial(
        _make, _FLUX2, num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680,
        guidance_embeds=False),
    "flux2-klein-9b-transformer": partial(
        _make, _FLUX2, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288,
        guidance_embeds=False),
    "wan-1.3b-transformer": partial(_wan, num_attention_heads=12, ffn_dim=8960, num_layers=30),
    "wan-14b-transformer": partial(_wan),
    "wan2.2-5b-transformer": partial(
        _wan, num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48
    ),
    **{model: partial(_vae, model) for model in (*_core.models(), WAN)},
}  # fmt: skip


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
    name: str, dtype: str, vae_dtype: str = "", device: str = "cpu", class_name: str = "", more: Mapping[str, str] = {},
) -> Any:  # fmt: skip
    """Build a pipeline from configs, with weights that nobody set.

    class_name: of a sibling with the same components
    more: optional components by their roles
    """
    diffusers, kind = need("diffusers", f"random weights of {name}"), PIPELINES[name]
    if kind.recording:
        row = json.loads(shipped("pipelines", f"{name}.json"))
        return build_row({**row, "dtype": dtype, **({"vae_dtype": vae_dtype} if vae_dtype else {})}, device)
    build = getattr(diffusers, class_name or kind.class_name, None)
    if build is None:
        raise ImportError(f"random: expected a diffusers that has {kind.class_name}, got {diffusers.__version__}")
    parts: dict[str, Any] = {}
    for role, component in {**kind.parts, **more}.items():
        usual = (role == "vae" and (vae_dtype or kind.vae_dtype)) or dtype
        with default_dtype(getattr(torch, usual)), Undrawn(), torch.device(device):
            parts[role] = BUILDERS[component]().eval()
        if role in kind.encoders:
            length = CLIP_TOKENS if component in CLIPS else 512
            parts[role.replace("text_encoder", "tokenizer")] = _tokenizer(length)
    shifted = "flux", "flux-kontext", "flux-fill", "qwen-image", "qwen-image-edit"
    flow = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=name in shifted)
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    parts["scheduler"] = {
        **dict.fromkeys(("sd15", "sd15-controlnet"), diffusers.PNDMScheduler(**betas, skip_prk_steps=True)),
        "sd21": diffusers.DDIMScheduler(**betas, clip_sample=False, prediction_type="v_prediction"),
        "pixart-sigma": diffusers.DPMSolverMultistepScheduler(),
        **dict.fromkeys(("sdxl", "sdxl-controlnet", "sdxl-refiner"), diffusers.EulerDiscreteScheduler(**betas)),
        **dict.fromkeys(
            ("wan-1.3b", "wan-14b", "wan2.2-5b"),
            diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        ),
    }.get(name, flow)
    without = dict.fromkeys(("safety_checker", "feature_extractor", "text_encoder", "tokenizer", "processor"))
    without |= {"requires_safety_checker": False, "add_watermarker": False, "is_distilled": not kind.guides}
    without |= {"requires_aesthetics_score": name == "sdxl-refiner", "expand_timesteps": kind.times}
    known = inspect.signature(build).parameters
    if "safety_checker" in more:
        parts["feature_extractor"] = need("transformers", "a safety checker").CLIPImageProcessor()
    return build(**{key: value for key, value in without.items() if key in known} | parts)


WORD = "zebra"  # no template has it


def build_row(row: Mapping[str, Any], device: str = "cpu") -> Any:
    """Build a pipeline from its row, a file of data/pipelines, with weights that nobody set.

    "components" has for each role a class and settings, with the config's class between them if it has one. A tokenizer
    has the name "tokenizer", and settings of `_tokenizer`. A modular pipeline's "workflow" chooses its blocks.
    """
    diffusers = need("diffusers", f"a pipeline {row['class']}")
    build = getattr(diffusers, row["class"], None)
    if build is None:
        raise ImportError(f"expected a diffusers that has {row['class']}, got {diffusers.__version__}")
    parts = dict[str, Any](row.get("settings", {}))
    for role, component in row["components"].items():
        usual = (role == "vae" and row.get("vae_dtype")) or row["dtype"]
        class_name, *config_name, settings = component or ["", {}]
        if class_name in ("", "tokenizer"):
            parts[role] = _tokenizer(**settings) if class_name else None
            continue
        if not issubclass(resolve_name(class_name), torch.nn.Module):
            parts[role] = _make(class_name, *config_name, **settings)
            continue
        with default_dtype(getattr(torch, usual)), Undrawn(), torch.device(device):
            module = parts[role] = _make(class_name, *config_name, **settings).eval()
        _convert_as_loaded(module, getattr(torch, usual))
    if "workflow" not in row:
        return build(**parts)
    pipe = build(workflow=row["workflow"])
    pipe.update_components(**parts)
    return pipe


def _convert_as_loaded(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and buffers as from_pretrained does in the end. diffusers keeps some modules in float32, and then
    all buffers as they are; transformers keeps some in float16 only."""
    is_transformers = type(module).__module__.startswith("transformers")
    strict = "_strict" if is_transformers and dtype != torch.float16 else ""
    kept = {*(getattr(module, f"_keep_in_fp32_modules{strict}", None) or ())}
    for name, weight in module.named_parameters():
        if kept & {*name.split(".")}:
            weight.data = weight.data.float()
    if not kept and not is_transformers:
        torch.nn.Module.to(module, dtype)


def _tokenizer(length: int, template: int = 0, system: int = 0, positions: bool = False) -> Any:
    """Make a tokenizer that knows one word, `WORD`, and pads as the real ones do; or a processor of texts.

    template: tokens besides a prompt's words; system: of them, those of the system's message
    positions: whether it also returns position_ids
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    class Words(PreTrainedTokenizerFast):
        @property
        def tokenizer(self) -> Any:
            return self

        def __call__(self, text: Any = None, *args: Any, images: Any = None, videos: Any = None, **kwargs: Any) -> Any:
            found = super().__call__(text, *args, **kwargs)
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

    words = Tokenizer(models.WordLevel({"<pad>": 0, WORD: 1, "<t>": 2, "<image>": 3}, unk_token=WORD))
    if template:
        words.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
        start = " ".join(["<t>"] * template)
        words.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[("<t>", 2)])
    else:
        words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = cast(Any, Words)(tokenizer_object=words, model_max_length=length, pad_token="<pad>", eos_token="<t>")
    made.chat_template = "{{ messages[0].content }}"
    return made


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
        time do not depend on these.
    device : torch.device or str, optional
        Where it runs; by default the GPU if PyTorch has one, otherwise the CPU.

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
    >>> load_pipeline("cogview4", random=True)
    Traceback (most recent call last):
        ...
    vaemem._errors.ArgumentError: source: only the VAE of 'cogview4' is known; ...
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
