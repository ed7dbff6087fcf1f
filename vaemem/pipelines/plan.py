"""`plan_pipeline`: every way of running a pipeline that makes sense, on a card or within a memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vaemem._arguments import shared
from vaemem._common import DTYPES, Message, Named, choose, flag, listed, real, whole
from vaemem.engine.limits import parse_size
from vaemem.engine.weights import told_bytes
from vaemem.pipelines import ways_diffusers, ways_mlx
from vaemem.pipelines.asked import ask_pipeline
from vaemem.pipelines.components import PIPELINES, Pipeline, refuse
from vaemem.pipelines.pipeline_run import weights_of
from vaemem.pipelines.seconds import cards_of, machine_of
from vaemem.pipelines.ways import PipelinePlan, Room, outcome, planned
from vaemem.prediction.gpus import CONTEXT, Gpu, sold
from vaemem.prediction.values import Card, Software, find_card

PLANNED_RUNTIMES = ("diffusers", "sd.cpp", "mlx")


@shared
def plan_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, *, memory: int | str | None = None,
    host_memory: int | str | None = None, gpu: str | Gpu | None = None, runtime: str = "diffusers",
    prompt_tokens: int | None = None, guidance: bool = True, image: bool = False, steps: int | None = None,
    dtype: str | None = None, components: Mapping[str, Any] | None = None,
    types: str | Sequence[str | None] | None = None, used: int | str = 0,
    calibrate: Mapping[str, float] | None = None, time_limit: float | None = None, flash: bool = False,
    cache_limit: int | str | None = None, link: str = "PCIe 3.0 x16", cpu: str = "AVX2", cores: int | None = None,
    cudnn_version: str | None = None, torch_version: str | None = None,
) -> PipelinePlan:  # fmt: skip
    """Every way of running a pipeline that makes sense: whether it fits, where it runs out, how long it takes.

    Parameters
    ----------
    pipeline : shared
    height, width, batch : int
        The images' size, and how many they are.
    memory : int or str, optional
        What the card has, as cards are sold (``"12 GB"``), where its name does not say it or no card is named.
    host_memory : int or str, optional
        What the host may give for weights that are not on the card. By default it has enough.
    gpu : str or Gpu, optional
        The card. Without one seconds are told only where `calibrate` measured them, and a card of that memory stands
        for it.
    runtime : {"diffusers", "sd.cpp", "mlx"}
        sd.cpp is stable-diffusion.cpp with CUDA (`vaemem.sdcpp.running`). Its `components` are types of ggml's
        such as ``"Q8_0"``, which FLUX and Z-Image have by default, sizes such as ``"6.8 GiB"``, or files. With mlx
        `memory` is the Mac's, of which two thirds are taken to be for Metal; what is known are the denoiser's weights
        and the decode (`vaemem.pipelines.ways_mlx`), and no seconds.
    prompt_tokens, guidance, image, steps : shared
    dtype of a pipeline : shared
    components : shared
    cudnn_version, torch_version : shared
    types : str or sequence of str or None, optional
        Types of the largest components' weights to try; None stands for what they are run in. By default that; with
        diffusers also ``"Q8_0"`` and ``"nf4"`` where the denoiser takes more than half of the card, with sd.cpp
        ``"Q4_K"`` where nothing else fits.
    used : shared
    calibrate : dict of str to float, optional
        Seconds that were measured on this machine, by the names of ways. The machine's rates are moved to where these
        come out, and all others follow.
    time_limit : float, optional
        Seconds after which a way does not count as fitting.
    flash : bool
        Whether stable-diffusion.cpp is run with ``--diffusion-fa``.
    cache_limit : int or str, optional
        What MLX's allocator may keep.
    link : str
        What is between host and card, such as ``"PCIe 4.0 x16"``, as `vaemem.pipelines.seconds` knows it.
    cpu : str
        The instructions of the host's CPU: ``"SSE4.2"``, ``"AVX"``, ``"AVX2"`` or ``"no AVX2"``.
    cores : int, optional
        How many cores the host's CPU has.

    Returns
    -------
    PipelinePlan
        Printing it shows everything; ``.recommended`` and ``.reason`` say which to take.

    Raises
    ------
    ValueError
        What `predict_pipeline` refuses; no card and no memory; a way to calibrate with that is none.

    Notes
    -----
    docs/PIPELINES.md says where seconds come from.

    Examples
    --------
    >>> plan = plan_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB")
    >>> plan["no offload, VAE whole"].verdict
    'runs out in decode, lacks ... MiB'
    >>> plan.recommended.way.name
    'model offload, VAE whole'
    >>> print(plan.recommended.seconds)
    32 s (20 to 53)
    """
    choose("pipeline", pipeline, PIPELINES)
    choose("runtime", runtime, PLANNED_RUNTIMES)
    guidance, image, flash = flag("guidance", guidance), flag("image", image), flag("flash", flash)
    refuse(
        runtime, prompt_tokens=prompt_tokens, steps=steps, dtype=dtype, cudnn_version=cudnn_version,
        torch_version=torch_version, gpu=gpu, host_memory=host_memory, calibrate=calibrate or None,
        time_limit=time_limit, types=types, flash=flash or None, cache_limit=cache_limit, image=image or None,
    )  # fmt: skip
    known, batch = PIPELINES[pipeline], whole("batch", batch)
    height, width = whole("height", height), whole("width", width)
    host = None if host_memory is None else parse_size("host_memory", host_memory)
    title = f"{pipeline} {height}x{width}{f', {batch} images' if batch > 1 else ''} by {runtime}"
    components = components or {}
    if runtime == "mlx":
        return _by_mlx(title, known, height, width, memory, components, cache_limit)
    from vaemem.sdcpp import running  # half of this module's import

    card, notes = _card(gpu, memory, used, dtype or known.dtype)
    room = Room(card.available(CONTEXT if runtime == "diffusers" else running.SDCPP_CONTEXT), host, time_limit)
    steps = known.steps if steps is None else whole("steps", steps)
    if time_limit is not None and not real(time_limit) > 0:
        raise ValueError(f"time_limit: want more than 0 seconds, got {time_limit!r}")
    named = None if gpu is None else card.gpu
    likely = machine_of(named, card.gpu.total_memory, dtype or known.dtype, runtime, link, cpu, cores)
    machine = likely if gpu is not None or calibrate else None  # nothing is known of how fast it is
    kinds = None if types is None else listed(types, str)
    if kinds == []:
        raise ValueError("types: want one type or more, or None, got none")
    if runtime == "sd.cpp":
        make = functools.partial(
            running.sdcpp_ways, pipeline, height, width, batch, steps, guidance, prompt_tokens, components
        )
        ways = make([words for kind in kinds or [None] for words in running.planned_words(flash, kind)])
        if kinds is None and not any(outcome(way, room, None).fits for way in ways):
            ways += make(running.planned_words(flash, running.SMALLER_TYPE))
    else:
        software = Software(torch_version=torch_version, cudnn_version=cudnn_version)
        question = ask_pipeline(
            pipeline, height, width, batch, card, software, prompt_tokens=prompt_tokens, guidance=guidance,
            dtype=dtype, components=components, image=image, steps=steps,
        )  # fmt: skip
        ways = ways_diffusers.ways(question, components, machine, kinds)
    return planned(f"{title}, {steps} steps, on {card.gpu.name}", ways, room, machine, calibrate, notes)


def _by_mlx(
    title: str, known: Pipeline, height: int, width: int, memory: int | str | None, components: Mapping[str, Any],
    cache_limit: int | str | None,
) -> PipelinePlan:  # fmt: skip
    if memory is None:
        raise ValueError("memory: want what the Mac has, such as '16 GB', got None")
    share, of = ways_mlx.WORKING_SET
    given = components.get(known.denoiser, known.dtype)
    ways = ways_mlx.mlx_ways(
        known.parts["vae"], height, width, weights_bytes(known.denoiser, known.parts[known.denoiser], given),
        None if cache_limit is None else parse_size("cache_limit", cache_limit, least=0),
    )  # fmt: skip
    return planned(f"{title} on a Mac of {memory}", ways, Room(sold(memory) * share // of), None)


def weights_bytes(role: str, component: str, given: Any) -> int:
    """Bytes of a component's weights.

    Parameters
    ----------
    role, component : str
        Such as ``"unet"``, played by ``"sd15-unet"``.
    given : str or path
        A size as a program prints it (``"6.8 GiB"``), a file whose header says what is in it, or a dtype.

    Examples
    --------
    >>> weights_bytes("unet", "sd15-unet", "float16"), weights_bytes("unet", "sd15-unet", "1.6 GiB")
    (1719041928, 1717986918)
    """
    told = told_bytes(role, given)
    if told is not None:
        return told
    choose(f"components[{role!r}]", given, DTYPES)
    return sum(weight.nbytes(given) for weight in weights_of(component))


def _card(gpu: Any, memory: int | str | None, used: int | str, dtype: str) -> tuple[Card, list[str]]:
    """The card, and what there is to say of it."""
    if gpu is not None:
        return find_card(gpu, memory, used), []
    if memory is None:
        raise ValueError(
            Message("gpu: want a card's name, or what it has as ", Named("memory", "12 GB"), ", got neither")
        )
    cards = cards_of(sold(memory))
    # Older cards write out the scores of bfloat16's attention, which was not recorded.
    fused = [card for card in cards if dtype != "bfloat16" or card.sm >= 80]
    card = find_card((fused or cards)[0], used=used)
    return card, [f"No card was named: {card.gpu.name} stands for any of that memory."]
