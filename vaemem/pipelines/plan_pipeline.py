"""`plan_pipeline`: every sensible way to run a pipeline on a card or in a given amount of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaemem._arguments import shared
from vaemem._types import Dtype
from vaemem.pipelines.pipeline_arguments import PlanArguments
from vaemem.pipelines.programs import PLANNED_RUNTIMES, PlannedRuntime, read_arguments
from vaemem.pipelines.ways import PipelinePlan
from vaemem.prediction.gpus import Gpu


@shared
def plan_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, *, memory: int | str | None = None,
    host_memory: int | str | None = None, gpu: str | Gpu | None = None, runtime: PlannedRuntime = "diffusers",
    prompt_tokens: int | None = None, guidance: bool | None = None, image: bool | tuple[int, int] = False,
    steps: int | None = None, dtype: Dtype | None = None, components: Mapping[str, Any] | None = None, lora: Any = None,
    types: str | Sequence[str | None] | None = None, used: int | str = 0,
    calibrate: Mapping[str, float] | None = None, time_limit: float | None = None, flash: bool = False,
    cache_limit: int | str | None = None, link: str = "PCIe 3.0 x16", cpu: str = "AVX2", cores: int | None = None,
    cudnn_version: str | None = None, torch_version: str | None = None, safe: bool = True,
    os: str = "linux", diffusers_version: str | None = None, frames: int | None = None,
) -> PipelinePlan:  # fmt: skip
    """List the sensible ways to run a pipeline: whether each fits, where it runs out, how long it takes.

    Parameters
    ----------
    pipeline : shared
    height, width, batch : int
        The images' size in pixels, and their number.
    memory : int or str, optional
        The card's memory, as cards are sold (``"12 GB"``), if its name does not tell it or no card is named.
    host_memory : int or str, optional
        Host memory for weights that are not on the card. By default, if the question is about this machine, its free
        memory: if no card and no memory is named, and the machine has a card. Otherwise 30 GB of a
        machine of 32 GB are assumed, as the first lines say.
    gpu : str or Gpu, optional
        The card. By default this machine's card if no `memory` is given. Otherwise a card of that memory or an RTX 4090
        stands for it, as the first line says. Seconds then need measurements in `calibrate`.
    runtime : {"diffusers", "sd.cpp", "mlx", "comfyui"}
        sd.cpp is stable-diffusion.cpp with CUDA (`vaemem.sdcpp.running`). Its `components` are ggml types such as
        ``"Q8_0"`` (the default of FLUX and Z-Image), sizes such as ``"6.8 GiB"``, or files. With mlx, `memory` is the
        Mac's, and Metal is assumed to get two thirds. An mlx plan is for mflux. It covers all weights and the decode
        (`vaemem.pipelines.by_mlx`), without other activations and seconds.
    prompt_tokens, guidance, image, steps : shared
    dtype of a pipeline : shared
    components, lora : shared
    cudnn_version, torch_version, diffusers_version, frames : shared
    types : str or sequence of str or None, optional
        Types to try for the largest components' weights; None stands for their own type, the default. By default
        diffusers also tries ``"Q8_0"``, for the denoiser alone, and ``"nf4"`` if the denoiser takes more than half of
        the card. sd.cpp also tries ``"Q4_K"`` if nothing else fits.
    used, os : shared
    calibrate : dict of str to float, optional
        Seconds measured on this machine, by names of ways. Measured seconds adjust the machine's rates, and with the
        rates the seconds of all other ways.
    time_limit : float, optional
        A way that takes more seconds does not count as fitting.
    flash : bool
        Whether stable-diffusion.cpp runs with ``--diffusion-fa``.
    cache_limit : int or str, optional
        Freed memory that MLX's allocator may keep, by ``--mlx-cache-limit-gb``.
    link : str
        The link between host and card, such as ``"PCIe 4.0 x16"``, by its name in `vaemem.prediction.seconds`.
    cpu : str
        The host CPU's instruction set: ``"SSE4.2"``, ``"AVX"``, ``"AVX2"`` or ``"no AVX2"``.
    cores : int, optional
        Cores of the host's CPU.
    safe : bool
        Whether to recommend a way that fits before a tight one (`Outcome.verdict`). This is the default.

    Returns
    -------
    PipelinePlan
        Printing it shows everything; ``.recommended`` and ``.reason`` name the best way.

    Raises
    ------
    ValueError
        An argument that `predict_pipeline` refuses, or an unknown way in `calibrate`.

    Notes
    -----
    docs/PIPELINES.md explains the seconds.

    Examples
    --------
    >>> plan = plan_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB", safe=False)
    >>> plan["no offload, VAE whole"].summary
    'runs out in decode, ... short'
    >>> plan.recommended.way.name
    'model offload, VAE whole'
    >>> print(plan.recommended.seconds)
    32 s (20 to 53)
    """
    program, given = read_arguments(PlanArguments(**locals()), PLANNED_RUNTIMES)
    return program.plan(given)
