"""The lines of Python that run a pipeline of diffusers in one of a plan's ways."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vaemem._common import distinct
from vaemem.engine.configs import config_of
from vaemem.pipelines.components import VAE_STRIDE, Pipeline
from vaemem.pipelines.group_offload import GroupOffload
from vaemem.pipelines.lora import Lora
from vaemem.pipelines.programs import load_program
from vaemem.pipelines.quantising import SCHEMES
from vaemem.pipelines.storage import GGML
from vaemem.prediction.runtimes import LAST_DIFFUSERS, architecture
from vaemem.prediction.usual import FIXED


def vae_code(vae: str, limit: int | str | None = None, class_name: str = "AutoencoderKL") -> list[str]:
    """Return the lines that set how a pipeline's VAE runs: the argument `vae` of `vaemem.predict_pipeline`. class_name:
    the VAE's.

    Examples
    --------
    >>> vae_code("sliced")
    ['pipe.vae.enable_slicing()']
    """
    how, _, side = vae.partition(" ")
    if how == "sliced":
        return ["pipe.vae.enable_slicing()"]
    if how == "vaemem":
        made = f"pipe.vae = {class_name}.from_module(pipe.vae, memory_limit={_quoted(limit)})"
        return [f"from vaemem.pytorch import {class_name}", made]
    if how != "tiled" or not side:
        return ["pipe.vae.enable_tiling()"] * (how == "tiled")
    if class_name in ("AutoencoderKLQwenImage", "AutoencoderKLWan"):  # their tiles share a quarter, as AutoencoderKL's
        return [f"pipe.vae.enable_tiling({side}, {side}, {3 * int(side) // 4}, {3 * int(side) // 4})"]
    sides = f"{side}, {int(side) // VAE_STRIDE}"
    return ["pipe.vae.enable_tiling()", f"pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = {sides}"]


def hires_code(first: tuple[int, int], height: int, width: int, offload: Any) -> list[str]:
    """Return the lines that make a second pipeline of a first one's components, for a hires fix.

    Examples
    --------
    >>> print(*hires_code((512, 768), 1024, 1536, "none"), sep="\\n")
    from diffusers import AutoPipelineForImage2Image
    <BLANKLINE>
    later = AutoPipelineForImage2Image.from_pipe(pipe)
    # image = pipe(prompt, height=512, width=768).images[0].resize((1536, 1024))
    # image = later(prompt, image=image).images[0]
    """
    again = ["later.enable_model_cpu_offload()"] * (offload == "model")
    calls = [
        f"# image = pipe(prompt, height={first[0]}, width={first[1]}).images[0].resize(({width}, {height}))",
        "# image = later(prompt, image=image).images[0]",
    ]
    made = "later = AutoPipelineForImage2Image.from_pipe(pipe)"
    return ["from diffusers import AutoPipelineForImage2Image", "", made, *again, *calls]


def roles_on_cpu(offload: str | Mapping[str, Any]) -> list[str]:
    """Return the components that an `offload` of `vaemem.predict_pipeline` leaves on the CPU."""
    if not isinstance(offload, Mapping) or GroupOffload.read(offload):
        return []
    return [role for role, place in offload.items() if place == "cpu"]


def describe_stay(roles: Sequence[str]) -> str:
    """Say that components stay on the CPU.

    Examples
    --------
    >>> describe_stay(["text_encoder"])
    'text_encoder stays on the CPU'
    """
    return f"{' and '.join(roles)} stay{'s' * (len(roles) == 1)} on the CPU"


def placing_code(offload: str | Mapping[str, Any], roles: Iterable[str], device: str = "cuda") -> list[str]:
    """Return the lines that offload a pipeline, or put its components in place.

    Examples
    --------
    >>> print(*placing_code("block_level 2", ["unet", "vae"]), sep="\\n")
    import torch
    pipe.enable_group_offload(torch.device("cuda"), offload_type="block_level", num_blocks_per_group=2)
    """
    if group := GroupOffload.read(offload):
        given = [f"{name}={_quoted(value)}" for name, value in group.settings.items()]
        return ["import torch", f"pipe.enable_group_offload(torch.device({_quoted(device)}), {', '.join(given)})"]
    if on_cpu := roles_on_cpu(offload):
        note = f"# {describe_stay(on_cpu)}: pass pipe.encode_prompt's embeddings to the pipeline"
        places = dict.fromkeys(on_cpu, "cpu") | {role: device for role in roles if role not in on_cpu}
        return [note, *(f"pipe.{role}.to({_quoted(place)})" for role, place in places.items())]
    if offload == "none" or isinstance(offload, Mapping):
        return [f"pipe.to({_quoted(device)})"]
    return [f"pipe.enable_{offload}_cpu_offload({'' if device == 'cuda' else f'device={_quoted(device)}'})"]


def casting_code(role: str, dtype: str) -> list[str]:
    """Return the lines that store a component in float8 and cast each layer for its call. The class of a text encoder
    has no method for it; its embeddings stay.

    Examples
    --------
    >>> casting_code("unet", "float16")
    ['pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float16)']
    """
    types = f"torch.float8_e4m3fn, torch.{dtype}"
    if not role.startswith("text_encoder"):
        return [f"pipe.{role}.enable_layerwise_casting({types})"]
    made = f"apply_layerwise_casting(pipe.{role}, {types}, skip_modules_classes=(torch.nn.Embedding,))"
    return ["from diffusers.hooks import apply_layerwise_casting", made]


def _gguf_code(pipeline: Pipeline, kind: str, given: Any, dtype: str) -> list[str]:
    """Return the lines that load the denoiser, of the class `kind`, from a GGUF file."""
    role = pipeline.denoiser
    file = f"{role} in {given}.gguf" if given in GGML else str(given)
    return [
        f"{role} = {kind}.from_single_file(",
        f'    {_quoted(file)}, config="{pipeline.repository}", subfolder="{role}",',
        f"    torch_dtype=torch.{dtype}, quantization_config=GGUFQuantizationConfig(compute_dtype=torch.{dtype}),",
        ")",
    ]


def _quoted(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | list) else repr(value)


def dtype_keyword(release: int) -> str:
    """Return the argument of a pipeline's ``from_pretrained`` for its dtype, by the release of diffusers."""
    return "dtype" if release >= 40 else "torch_dtype"


def diffusers_code(
    pipeline: Pipeline, dtype: str, offload: str | Mapping[str, Any] = "none", vae: str = "whole",
    components: Mapping[str, Any] | None = None, vae_memory_limit: int | str | None = None,
    release: int = LAST_DIFFUSERS, loras: Sequence[Lora] = (),
) -> str:  # fmt: skip
    """Return the program for arguments of `vaemem.predict_pipeline`, up to the call of the pipeline.

    Examples
    --------
    >>> from vaemem.pipelines.components import PIPELINES
    >>> print(diffusers_code(PIPELINES["sd15"], "float16", "model", "tiled 256"))
    import torch
    from diffusers import StableDiffusionPipeline
    <BLANKLINE>
    pipe = StableDiffusionPipeline.from_pretrained(
        "stable-diffusion-v1-5/stable-diffusion-v1-5", dtype=torch.float16
    )
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 256, 32
    pipe.enable_model_cpu_offload()
    """
    types = dict(components or {})
    given = types.pop("vae", pipeline.vae_dtype)
    fixed, apart = given == "float16" and not pipeline.vae_dtype, pipeline.vae_dtype and given != dtype
    class_name = config_of(architecture(pipeline.parts["vae"]))["_class_name"]
    keyword, imports = dtype_keyword(release), [pipeline.class_name]
    told = [f'"{pipeline.repository}"', f"{keyword}=torch.{dtype}"]
    lines, more = [], []
    for role, about in pipeline.aside.items():
        if types.get(role, "fp8") != "fp8":
            continue
        kind, _, repository = about.split()
        imports.insert(0, kind)
        lines.append(f'{role} = {kind}.from_pretrained("{repository}", {keyword}=torch.{dtype})')
        told.append(f"{role}={role}")
    quantised = [role for role, kind in types.items() if kind in SCHEMES and role not in pipeline.aside]
    if quantised:
        more.append("from diffusers.quantizers import PipelineQuantizationConfig  # diffusers 0.34 or later")
        lines.append("quantization_config = PipelineQuantizationConfig(quant_mapping={")
        for role in quantised:
            config, settings = SCHEMES[types[role]].config, SCHEMES[types[role]].settings.replace("{dtype}", dtype)
            library = "transformers" if role.startswith("text_encoder") else "diffusers"
            if library == "transformers":
                settings = settings.replace("weights_dtype", "weights")  # QuantoConfig's
            lines.append(f'    "{role}": {library}.{config}({settings}),')
            more.append(f"import {library}")
            if settings.endswith("Config()"):
                more.append(f"from torchao.quantization import {settings.removesuffix('()')}")
        lines.append("})")
        told.append("quantization_config=quantization_config")
    cast = [role for role, kind in types.items() if kind == "fp8"]
    for role, kind in types.items():
        if role not in (*quantised, *cast):
            told.append(f"{role}={role}")
            if role == pipeline.denoiser and (kind in GGML or str(kind).endswith(".gguf")):
                loaded = load_program(pipeline.parts[role]).about.partition(" ")[0]
                imports[:0] = "GGUFQuantizationConfig", loaded
                lines += _gguf_code(pipeline, loaded, kind, dtype)
            else:
                lines.append(f"# {role} in {kind}: load it first, and pass it as {role}={role}")
    if apart:
        imports.insert(0, class_name)
        where = f'"{pipeline.repository}", subfolder="vae", {keyword}=torch.{given}'
        lines.append(f"vae = {class_name}.from_pretrained({where})")
        told.append("vae=vae")
    lines += [f"pipe = {pipeline.class_name}.from_pretrained(", f"    {', '.join(told)}", ")"]
    if fixed:
        imports.insert(0, "AutoencoderKL")
        lines.append(f'pipe.vae = AutoencoderKL.from_pretrained("{FIXED}", {keyword}=torch.float16)')
    for lora in loras:
        lines.append(f'pipe.load_lora_weights("{lora.file or "your LoRA"}")')
        lines += ["pipe.fuse_lora()"] * lora.fused
    lines += [line for role in cast for line in casting_code(role, dtype)]
    lines += [*vae_code(vae, vae_memory_limit, class_name), *placing_code(offload, pipeline.parts)]
    more += [line for line in lines if line.startswith("from ")]
    lines = [line for line in lines if not line.startswith(("from ", "import "))]
    plain = sorted({line for line in more if line.startswith("import ")})
    more = distinct(line for line in more if not line.startswith("import "))
    return "\n".join([*plain, "import torch", f"from diffusers import {', '.join(imports)}", *more, "", *lines])
