"""The lines of Python that run a pipeline of diffusers in one of a plan's ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vaemem.pipelines.components import VAE_STRIDE, Pipeline
from vaemem.pipelines.storage import BITSANDBYTES, FOUR_BITS
from vaemem.prediction.runtimes import LAST_DIFFUSERS
from vaemem.prediction.usual import FIXED

_OFFLOADS = {
    "none": ['pipe.to("cuda")'],
    "model": ["pipe.enable_model_cpu_offload()"],
    "sequential": ["pipe.enable_sequential_cpu_offload()"],
}


def dtype_keyword(release: int) -> str:
    """Return the argument of a pipeline's ``from_pretrained`` for its dtype, by the release of diffusers."""
    return "dtype" if release >= 40 else "torch_dtype"


def diffusers_code(
    pipeline: Pipeline, dtype: str, offload: str | Mapping[str, str] = "none", vae: str = "whole",
    components: Mapping[str, Any] | None = None, vae_memory_limit: int | str | None = None,
    release: int = LAST_DIFFUSERS,
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
    fixed = types.pop("vae", None) == "float16"
    keyword, imports, how = dtype_keyword(release), [pipeline.class_name], vae.split()
    told = [f'"{pipeline.repository}"', f"{keyword}=torch.{dtype}"]
    lines, more = [], []
    quantised = [role for role, kind in types.items() if kind in BITSANDBYTES]
    if quantised:
        kind = types[quantised[0]]
        four = f'"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.{dtype}'
        four += ', "bnb_4bit_use_double_quant": True' if kind == "nf4 double" else ""
        backend = "bitsandbytes_4bit" if kind in FOUR_BITS else "bitsandbytes_8bit"
        more.append("from diffusers.quantizers import PipelineQuantizationConfig  # diffusers 0.34 or later")
        lines += [
            "quantization_config = PipelineQuantizationConfig(", f'    quant_backend="{backend}",',
            f"    quant_kwargs={{{four if kind in FOUR_BITS else chr(34) + 'load_in_8bit' + chr(34) + ': True'}}},",
            f"    components_to_quantize={quantised},".replace("'", '"'), ")",
        ]  # fmt: skip
        told.append("quantization_config=quantization_config")
    for role, kind in types.items():
        if role not in quantised:
            lines.append(f"# {role} in {kind}: load it first, such as from a GGUF file, and pass it as {role}={role}")
            told.append(f"{role}={role}")
    lines += [f"pipe = {pipeline.class_name}.from_pretrained(", f"    {', '.join(told)}", ")"]
    if fixed:
        imports.insert(0, "AutoencoderKL")
        lines.append(f'pipe.vae = AutoencoderKL.from_pretrained("{FIXED}", {keyword}=torch.float16)')
    if how[0] == "tiled":
        lines.append("pipe.vae.enable_tiling()")
        side = int(how[1]) if how[1:] else 0
        sides = f"{side}, {side // VAE_STRIDE}"
        lines += [f"pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = {sides}"] if side else []
    if how[0] == "sliced":
        lines.append("pipe.vae.enable_slicing()")
    if how[0] == "vaemem":
        more.append("from vaemem.pytorch import AutoencoderKL")
        lines.append(f'pipe.vae = AutoencoderKL.from_module(pipe.vae, memory_limit="{vae_memory_limit}")')
    if isinstance(offload, Mapping):
        on_cpu = [role for role, place in offload.items() if place == "cpu"]
        lines.append(f"# {' and '.join(on_cpu)} stay on the CPU: pass pipe.encode_prompt's embeddings to the pipeline")
        lines += [f'pipe.{role}.to("cuda")' for role in pipeline.parts if role not in on_cpu]
    else:
        lines += _OFFLOADS[offload]
    return "\n".join(["import torch", f"from diffusers import {', '.join(imports)}", *more, "", *lines])
