"""Ways of running a pipeline with stable-diffusion.cpp: where each model's weights are kept, and how its VAE runs.

Each model is a graph with one buffer for all that it computes (`vaemem.pipelines.ggml`), there while the model runs.
Weights stay where they were loaded to, but for what `RESIDENCES` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vaemem._common import MIB, choose
from vaemem.pipelines.ggml import DEFAULT_TILE, PADDED_TOKENS, graph
from vaemem.pipelines.storage import told_bytes
from vaemem.pipelines.ways import PlannedPhase, Way
from vaemem.prediction.sdcpp import TYPES, Graph

# A CUDA context alone took 426 MiB on an RTX 6000 Ada (unslothai/unsloth-zoo#1053); what ggml's kernels add was not
# measured.
CONTEXT = 426 * MIB
SMALLER = "Q4_K"  # tried where nothing fits
PROMPT_TOKENS = 64  # of Z-Image's prompt with its template, which is not padded, where none are told
ENCODE, DENOISE, DECODE = "encode prompt", "denoise", "decode"


class Models(NamedTuple):
    """A pipeline's models by the names of `vaemem.pipelines.ggml`, in the order of their roles.

    guides: whether the denoiser runs once more with guidance
    kind: of the denoiser's work
    type: of weights, by default
    """

    encoders: Mapping[str, str]
    denoiser: tuple[str, str]
    vae: str
    guides: bool
    kind: str
    type: str


MODELS = {
    "sd15": Models({"text_encoder": "clip-l"}, ("unet", "unet-sd15"), "sd15", True, "unet", "f16"),
    "sdxl": Models(
        {"text_encoder": "clip-l", "text_encoder_2": "clip-g"}, ("unet", "unet-sdxl"), "sdxl", True, "unet", "f16"
    ),
    "flux": Models(
        {"text_encoder": "clip-l", "text_encoder_2": "t5-xxl"}, ("transformer", "flux-dev"), "flux", False,
        "transformer", "q8_0",
    ),
    "flux-schnell": Models(
        {"text_encoder": "clip-l", "text_encoder_2": "t5-xxl"}, ("transformer", "flux-schnell"), "flux", False,
        "transformer", "q8_0",
    ),
    "zimage-turbo": Models(
        {"text_encoder": "qwen3-4b"}, ("transformer", "zimage"), "flux", False, "transformer", "q8_0",
    ),
}  # fmt: skip

ENCODERS, DENOISER, VAE = "text encoders", "denoiser", "VAE"
ALL = (ENCODERS, DENOISER, VAE)
RUNS = {ENCODE: ENCODERS, DENOISE: DENOISER, DECODE: VAE}  # which of them each phase runs


class Residence(NamedTuple):
    """Where the models' weights are.

    on_card: {phase: models whose weights are on the card in it}
    on_cpu: models that run on the host, where their weights stay
    kept: further models whose weights the host's memory holds all the time
    crosses: {model: how often its weights are copied between host and card in a run}
    """

    name: str
    settings: Mapping[str, object]
    on_card: Mapping[str, tuple[str, ...]]
    on_cpu: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    crosses: Mapping[str, int] = {}


def _always(*models: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(("load", ENCODE, DENOISE, DECODE), models)


ONCE = dict.fromkeys(ALL, 1)
RESIDENCES = (
    Residence("no offload", {}, _always(*ALL)),
    # Of a server built on stable-diffusion.cpp: the text encoder goes to the host once the prompt is encoded, and comes
    # back for the next one.
    Residence(
        "cond_only", {"offload_mode": "cond_only"}, _always(DENOISER, VAE) | {"load": ALL, ENCODE: ALL},
        kept=(ENCODERS,), crosses={ENCODERS: 2},
    ),
    Residence("--clip-on-cpu", {"--clip-on-cpu": True}, _always(DENOISER, VAE), on_cpu=(ENCODERS,)),
    # Each model's weights are copied to the card when it runs, and given back there.
    Residence(
        "--offload-to-cpu", {"--offload-to-cpu": True},
        {"load": (), ENCODE: (ENCODERS,), DENOISE: (DENOISER,), DECODE: (VAE,)}, kept=ALL, crosses=ONCE,
    ),
    # What its command line does, which makes one picture: each model's weights are given back when it has run, and are
    # loaded for the next.
    Residence(
        "freed after use", {"free_params_immediately": True},
        {"load": ALL, ENCODE: ALL, DENOISE: (DENOISER, VAE), DECODE: (VAE,)}, crosses=ONCE,
    ),
)  # fmt: skip


class VaeWay(NamedTuple):
    """How the VAE runs."""

    name: str
    direct: bool = False
    tiled: bool = False
    on_cpu: bool = False

    @property
    def settings(self) -> dict[str, bool]:
        given = {"--vae-conv-direct": self.direct, "--vae-tiling": self.tiled, "--vae-on-cpu": self.on_cpu}
        return {name: value for name, value in given.items() if value}


VAE_WAYS = (
    VaeWay("VAE whole"),
    VaeWay("VAE direct", direct=True),
    VaeWay("VAE tiled", tiled=True),
    VaeWay("VAE direct, tiled", direct=True, tiled=True),
    VaeWay("VAE on CPU, tiled", tiled=True, on_cpu=True),
)
NOTES = (
    "stable-diffusion.cpp: compute buffers as its graphs and ggml's allocator make them (docs/GGML.md), beside them "
    "what ggml-cuda takes for the largest product, and 426 MiB for the CUDA context. cond_only is a server's option,"
    " the others are its own.",
)


def ways(
    pipeline: str, height: int, width: int, batch: int, steps: int, guidance: bool, tokens: int | None,
    components: Mapping[str, Any], flash: bool = False, smaller: str | None = None,
) -> list[Way]:  # fmt: skip
    """All of them, the plainest first. Images of a batch are made one after the other.

    Parameters
    ----------
    components : dict
        By role, a type of ggml's such as ``"Q8_0"``, a size such as ``"6.8 GiB"``, or a file.
    flash : bool
        ``--diffusion-fa``.
    smaller : str, optional
        A type for the denoiser and encoders that are no CLIP, where `components` says nothing of them.
    """
    choose("pipeline", pipeline, MODELS)
    known = MODELS[pipeline]
    role, denoiser = known.denoiser
    for name in components:
        choose("components", name, (*known.encoders, role, "vae"))

    if smaller:
        large = [role, *(name for name, of in known.encoders.items() if of in LONG)]
        components = {**dict.fromkeys(large, smaller), **components}

    def made(name: str, of: str, given: str, **options: Any) -> Graph:
        """A model's graph with the weights that it is given."""
        kind, weights = _weights(name, components.get(name, given))
        found = graph(of, height, width, weight_type=kind or given, **options)
        return found if weights is None else found._replace(weights=weights)

    prompts = 2 if known.guides and guidance else 1
    # Z-Image and its encoder take the prompt as long as it is; others pad it.
    length = tokens if denoiser in PADDED_TOKENS else tokens or PROMPT_TOKENS

    def prompted(name: str, of: str, **options: Any) -> Graph:
        return made(name, of, known.type, tokens=length if of in LONG else None, **options)

    models = {
        ENCODERS: _together([prompted(*one) for one in known.encoders.items()])._replace(runs=prompts),
        DENOISER: prompted(role, denoiser, flash=flash)._replace(runs=steps * prompts * batch),
    }
    last = list(known.encoders)[-1]
    quantised = _weights(last, components.get(last, known.type))[0] != "f16"
    found = []
    for residence in RESIDENCES:
        for how in VAE_WAYS:
            vae = made(
                "vae", "vae-decoder", "f16", model=known.vae, conv_direct=how.direct,
                conv_scale=known.vae == "sdxl",  # as of a checkpoint that has its VAE
                tile=DEFAULT_TILE if how.tiled else None, backend="cpu" if how.on_cpu else "cuda",
            )  # fmt: skip
            vae = vae._replace(runs=vae.runs * batch)
            way = _way(residence, how, models | {VAE: vae}, known.kind, quantised)
            found.append(_rounded(way, smaller) if smaller else way)
    return found


def _rounded(way: Way, kind: str) -> Way:
    """The way with weights in a smaller type."""
    changes = " and ".join(filter(None, [way.changes, f"weights in {kind} are rounded"]))
    return way._replace(name=f"{way.name}, {kind}", settings={**way.settings, "types": kind}, changes=changes)


def way(offload: str, vae: str, *asked: Any) -> Way:
    """One of the `ways`. `offload` is a residence's name, or "none"; `vae` is the name of one of `VAE_WAYS` without
    "VAE" and without commas, such as "direct tiled"; the rest is as `ways` takes it."""
    residences = {"none": RESIDENCES[0].name} | {residence.name: residence.name for residence in RESIDENCES[1:]}
    hows = {how.name.removeprefix("VAE ").replace(",", ""): how.name for how in VAE_WAYS}
    choose("offload", offload, residences)
    choose("vae", vae, hows)
    return next(one for one in ways(*asked) if one.name == f"{residences[offload]}, {hows[vae]}")


LONG = ("qwen3-4b", "zimage", "t5-xxl", "flux-dev", "flux-schnell")  # that take more tokens than 77


def _weights(role: str, given: Any) -> tuple[str | None, int | None]:
    """(ggml's name of a type, None), or (None, bytes) where a size or a file is given."""
    told = told_bytes(role, given)
    if told is not None:
        return None, told
    spelt = {name.lower(): name for name in TYPES}.get(str(given).lower(), given)
    choose(f"components[{role!r}]", spelt, TYPES)
    return spelt, None


def _together(graphs: list[Graph]) -> Graph:
    """Models that run one after the other, as one graph: the largest buffers, and the sums of weights and FLOPs."""
    buffers, pools, weights, flops, _ = zip(*graphs, strict=True)
    return Graph(max(buffers), max(pools), sum(weights), sum(flops))


def _way(residence: Residence, how: VaeWay, models: Mapping[str, Graph], kind: str, quantised: bool) -> Way:
    on_cpu = (*residence.on_cpu, *([VAE] * how.on_cpu))
    kinds = {ENCODERS: "transformer", DENOISER: kind, VAE: "vae direct" if how.direct else "vae"}
    phases = []
    for name, resident in residence.on_card.items():
        weights = sum(models[model].weights for model in resident if model not in on_cpu)
        added, work = 0, {}
        if runs := RUNS.get(name):
            one = models[runs]
            flops = float(one.flops * one.runs)
            if runs in on_cpu:
                work["cpu Q8_0" if quantised and runs == ENCODERS else "cpu"] = flops
            else:
                added, work[kinds[runs]] = one.buffer + one.pool, flops
                if runs in residence.crosses:
                    work["link"] = float(residence.crosses[runs] * one.weights)
        phases.append(PlannedPhase(name, weights, added, work))
    host = sum(models[model].weights for model in dict.fromkeys((*residence.kept, *on_cpu)))
    host += max((models[model].buffer for model in on_cpu), default=0)
    changes = "tiles are blended where they overlap" if how.tiled else ""
    settings = dict(residence.settings) | how.settings
    return Way(f"{residence.name}, {how.name}", settings, tuple(phases), host, changes, NOTES)
