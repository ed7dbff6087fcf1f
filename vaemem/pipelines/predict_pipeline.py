"""Predict a pipeline's GPU memory in every phase, without PyTorch and without the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from vaemem._arguments import shared
from vaemem._types import Dtype
from vaemem.pipelines.pipeline_arguments import PipelineArguments
from vaemem.pipelines.programs import PREDICTED_RUNTIMES, PredictedRuntime, read_arguments

if TYPE_CHECKING:
    from vaemem.pipelines.by_comfyui import ComfyUIPrediction
    from vaemem.pipelines.by_diffusers import PipelinePrediction
    from vaemem.pipelines.by_sdcpp import GraphPrediction


@overload
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, dtype: Dtype | None = None, *, components: Mapping[str, Any] | None = None,
    lora: Any = None, offload: str | Mapping[str, Any] = "none", vae: str = "whole",
    vae_memory_limit: int | str | None = None, image: bool | tuple[int, int] = False, steps: int | None = None,
    gpu: str | None = None, memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, runtime: Literal["diffusers"] = "diffusers", safe: bool = False,
    os: str = "linux", diffusers_version: str | None = None, frames: int | None = None,
) -> PipelinePrediction: ...  # fmt: skip


@overload
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, *, runtime: Literal["sd.cpp"], components: Mapping[str, Any] | None = None,
    offload: str | Mapping[str, Any] = "none", vae: str = "whole", steps: int | None = None, gpu: str | None = None,
    memory: int | str | None = None, used: int | str = 0, safe: bool = False, os: str = "linux",
) -> GraphPrediction: ...  # fmt: skip


@overload
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, dtype: Dtype | None = None, *, runtime: Literal["comfyui"],
    components: Mapping[str, Any] | None = None,
    offload: str = "none", vae: str = "whole", steps: int | None = None, gpu: str | None = None,
    memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, safe: bool = False, os: str = "linux",
) -> ComfyUIPrediction: ...  # fmt: skip


@shared
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, dtype: Dtype | None = None, *, components: Mapping[str, Any] | None = None,
    lora: Any = None, offload: str | Mapping[str, Any] = "none", vae: str = "whole",
    vae_memory_limit: int | str | None = None, image: bool | tuple[int, int] = False, steps: int | None = None,
    gpu: str | None = None, memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, runtime: PredictedRuntime = "diffusers", safe: bool = False, os: str = "linux",
    diffusers_version: str | None = None, frames: int | None = None,
) -> PipelinePrediction | GraphPrediction | ComfyUIPrediction:  # fmt: skip
    """Predict a pipeline's GPU memory in each phase: weights, activations, workspaces, and whether it fits.

    Parameters
    ----------
    pipeline : shared
    height, width : int
        The image's size in pixels: multiples of 8, and of 16 for Z-Image. With FLUX, FLUX.2 and Wan, diffusers rounds
        sizes down to multiples of 16 (Wan 2.2's 5B: 32). The prediction is then for the smaller size, and the answer
        says so.
    batch : int
        Images of one prompt.
    prompt_tokens, guidance : shared
    dtype of a pipeline : shared
    components, lora : shared
    offload : str or dict
        The kind of offloading: ``"none"``, ``"model"`` (``enable_model_cpu_offload``) or ``"sequential"``
        (``enable_sequential_cpu_offload``); or a place for some components, such as ``{"text_encoder_2": "cpu"}``. The
        other components run on the GPU. ``"block_level"``, ``"block_level 4"`` and ``"leaf_level"`` are group
        offloading (``enable_group_offload``) with one or four blocks per group, or by leaves. ``"leaf_level stream"``
        and ``"block_level 1 stream"`` also have ``use_stream=True``. A dict of the arguments of
        ``enable_group_offload`` says more: ``{"offload_type": "leaf_level", "exclude_modules": ["vae"]}``.
    vae : str
        How the VAE runs: ``"whole"``, ``"tiled"``, ``"tiled 512"`` with the side of the tiles in pixels, ``"sliced"``,
        ``"tiled and sliced"``, or ``"vaemem"``: by this package, within `vae_memory_limit`.
    vae_memory_limit : int or str, optional
        A limit for vaemem's decoder, weights included: bytes, or ``"1 GB"``.
    image, steps : shared
    gpu, memory, used, cudnn_version, torch_version, safe, os, diffusers_version, frames : shared
    runtime : {"diffusers", "sd.cpp", "comfyui"}
        The program that runs the pipeline. For stable-diffusion.cpp, `offload` is ``"none"``, ``"cond_only"``,
        ``"--clip-on-cpu"``, ``"--offload-to-cpu"`` or ``"freed after use"``. `vae` is ``"whole"``, ``"direct"``,
        ``"tiled"``, ``"direct tiled"`` or ``"on CPU tiled"``. `components` are types of ggml, sizes (``"6.8 GiB"``) or
        files. `dtype`, `image`, `vae_memory_limit` and versions do not apply. `offload` may also be a whole way of
        `plan_pipeline`: its name, such as ``"cond_only, VAE direct, tiled"``; its settings, which are options of the
        program, such as ``{"--offload-to-cpu": True, "--diffusion-fa": True}``; or the same as typed words,
        ``"--offload-to-cpu --diffusion-fa"``. A whole way chooses the VAE's convolution. If neither a way nor
        ``"direct"`` chooses, the answer covers both convolutions: by im2col, as without ``--vae-conv-direct``, and
        direct.

        For ComfyUI, `offload` is ``"none"``, or the options ``"--disable-dynamic-vram"``, ``"--novram"``,
        ``"--highvram"`` or ``"--disable-dynamic-vram --disable-smart-memory"``; its manager decides the rest. `vae` is
        ``"whole"``, which falls back to tiles, or ``"tiled"``, with or without a side. `components` takes ``"fp8"`` for
        text encoders and denoisers. `dtype` does not apply. vaemem/data/generated/workflows.json lists the known
        workflows.

    Returns
    -------
    PipelinePrediction, GraphPrediction for sd.cpp, or ComfyUIPrediction

    Raises
    ------
    ValueError
        An unknown or impossible value; a component that was not recorded, or not in a dtype.

    Notes
    -----
    docs/PIPELINES.md explains how the prediction works, and lists the unknowns.

    Examples
    --------
    >>> p = predict_pipeline("sd15", 512, 512, gpu="T4")
    >>> [(phase.name, phase.allocated >> 20) for phase in p.phases]
    [('load', 2056), ('encode prompt', 2058), ('denoise', 2196), ('decode', 2675)]
    >>> p.fits, p.bottleneck
    (True, 'decode')
    """
    program, given = read_arguments(PipelineArguments(**locals()), PREDICTED_RUNTIMES)
    return program.predict(given)
