"""Ways of running a pipeline with stable-diffusion.cpp: where each model's weights are kept, and how its VAE runs.

A way is a few words, such as ``("cond_only", "direct", "tiled")``. They make its name, they stand for options of the
program (`options_of`), and `words_of` reads them from what a user says. Each model is a graph with one buffer for all
that it computes (`vaemem.sdcpp.graphs`), there while the model runs. Weights stay where they were loaded to, but for
what `RESIDENCES` says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vaemem._common import MIB, choose
from vaemem._errors import ArgumentError
from vaemem.engine.weights import told_bytes
from vaemem.prediction.planned import Phase, Way
from vaemem.sdcpp.graphs import COMPONENTS, DEFAULT_TILE, GGML_TYPES, SDCPP_VERSION, Graph, graph

# A CUDA context alone took 426 MiB on an RTX 6000 Ada (unslothai/unsloth-zoo#1053); what ggml's kernels add was not
# measured.
SDCPP_CONTEXT = 426 * MIB
SMALLER_TYPE = "Q4_K"  # tried where nothing fits
PROMPT_TOKENS = 64  # of Z-Image's prompt with its template, which is not padded, where none are told


class Models(NamedTuple):
    """A pipeline's models by the names of `vaemem.sdcpp.graphs`: text encoders by role, the denoiser, whose VAE."""

    encoders: Mapping[str, str]
    denoiser: str
    vae: str

    @property
    def role(self) -> str:
        """The denoiser's, and the kind of its work."""
        return "unet" if self.denoiser.startswith("unet") else "transformer"

    @property
    def type(self) -> str:
        """The type of weights, by default."""
        return "f16" if self.role == "unet" else "q8_0"


MODELS = {
    "sd15": Models({"text_encoder": "clip-l"}, "unet-sd15", "sd15"),
    "sdxl": Models({"text_encoder": "clip-l", "text_encoder_2": "clip-g"}, "unet-sdxl", "sdxl"),
    "flux": Models({"text_encoder": "clip-l", "text_encoder_2": "t5-xxl"}, "flux-dev", "flux"),
    "flux-schnell": Models({"text_encoder": "clip-l", "text_encoder_2": "t5-xxl"}, "flux-schnell", "flux"),
    "zimage-turbo": Models({"text_encoder": "qwen3-4b"}, "zimage", "flux"),
}

_ENCODERS, _DENOISER, _VAE = _ALL = ("text encoders", "denoiser", "VAE")
RUNS = {"load": "", "encode prompt": _ENCODERS, "denoise": _DENOISER, "decode": _VAE}  # which of them each phase runs


class Residence(NamedTuple):
    """Where the models' weights are.

    flags: the program's options; sd-server's, which keeps weights, where they name no program
    on_card: models whose weights are on the card in each of the four phases
    on_cpu: models that run on the host, where their weights stay
    kept: further models whose weights the host's memory holds all the time
    crosses: {model: how often its weights are copied between host and card in a run}
    """

    flags: Mapping[str, object]
    on_card: tuple[tuple[str, ...], ...]
    on_cpu: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    crosses: Mapping[str, int] = {}


_EACH_ONCE, _LATER = dict.fromkeys(_ALL, 1), (_DENOISER, _VAE)
RESIDENCES = {
    "no offload": Residence({}, (_ALL,) * 4),
    # The text encoder goes to the host once the prompt is encoded, and comes back for the next one.
    "cond_only": Residence(
        {"--offload-mode": "cond_only"}, (_ALL, _ALL, _LATER, _LATER), kept=(_ENCODERS,), crosses={_ENCODERS: 2}
    ),
    "--clip-on-cpu": Residence({"--clip-on-cpu": True}, (_LATER,) * 4, on_cpu=(_ENCODERS,)),
    # Each model's weights are copied to the card when it runs, and given back there.
    "--offload-to-cpu": Residence(
        {"--offload-to-cpu": True}, ((), (_ENCODERS,), (_DENOISER,), (_VAE,)), kept=_ALL, crosses=_EACH_ONCE
    ),
    # sd-cli makes one picture: each model's weights are given back when it has run, and are loaded for the next.
    "freed after use": Residence({"program": "sd-cli"}, (_ALL, _ALL, _LATER, (_VAE,)), crosses=_EACH_ONCE),
}
VAE_FLAGS = {"direct": "--vae-conv-direct", "on CPU": "--vae-on-cpu", "tiled": "--vae-tiling"}
FLASH = "--diffusion-fa"
TYPES_BY_WORD = {kind.upper(): kind for kind in GGML_TYPES}
PLANNED_VAES: tuple[tuple[str, ...], ...] = ((), ("direct",), ("tiled",), ("direct", "tiled"), ("on CPU", "tiled"))
# What the names of a model's tensors begin with once sd.cpp has read them.
TENSORS = {"t5-xxl": "text_encoders.t5xxl", "qwen3-4b": "text_encoders.llm"}
TENSORS |= {known.denoiser: "model.diffusion_model" for known in MODELS.values()}
SDCPP_NOTES = (
    f"{SDCPP_VERSION}: compute buffers as its graphs and ggml's allocator make them (docs/GGML.md), beside them what"
    " ggml-cuda takes for the largest product, and 426 MiB for the CUDA context. cond_only is the option of its pull"
    " request 1477, which a server is built on; the others are its own.",
)


def options_of(pipeline: str) -> dict[str, Mapping[str, object]]:
    """The program's options that each word stands for, in the order that words have in a way. A type is that of the
    denoiser and of encoders that are no CLIP."""
    if pipeline not in MODELS:
        raise ArgumentError("pipeline", f"one of {', '.join(MODELS)} with sd.cpp", repr(pipeline))
    known = MODELS[pipeline]
    tensors = [TENSORS[model] for model in (known.denoiser, *known.encoders.values()) if model in TENSORS]
    types = {word: ",".join(f"{name}={kind}" for name in tensors) for word, kind in TYPES_BY_WORD.items()}
    options = {word: residence.flags for word, residence in RESIDENCES.items()}
    options |= {word: {flag: True} for word, flag in (*VAE_FLAGS.items(), (FLASH, FLASH))}
    return options | {word: {"--tensor-type-rules": rules} for word, rules in types.items()}


def words_of(pipeline: str, offload: Any, vae: Any = "whole") -> tuple[str, ...]:
    """The words of one way.

    Parameters
    ----------
    pipeline : str
    offload : str or dict
        Where weights are kept, ``"none"`` or one of `RESIDENCES`; or a whole way, by its name, its settings or the
        options as they are typed.
    vae : str
        ``"whole"``, or any of `VAE_FLAGS` such as ``"direct tiled"``, beside what `offload` says of the VAE.

    Raises
    ------
    ValueError
        What is none of these, or two at once of which there is one.

    Examples
    --------
    >>> words_of("flux", "cond_only, VAE direct, tiled") == words_of("flux", "cond_only", "direct tiled")
    True
    >>> words_of("flux", {"--offload-to-cpu": True, "--vae-tiling": True})
    ('--offload-to-cpu', 'tiled')
    >>> words_of("flux", "--offload-to-cpu --vae-tiling --diffusion-fa")
    ('--offload-to-cpu', 'tiled', '--diffusion-fa')
    """
    options, residences = options_of(pipeline), ("none", *RESIDENCES)
    if isinstance(offload, Mapping):
        given = {name: value for name, value in offload.items() if value is not False}
        said = [word for word, flags in options.items() if flags and flags.items() <= given.items()]
        if {name for word in said for name in options[word]} != given.keys():
            raise ArgumentError("offload", f"the settings of a way of {pipeline}", repr(offload))
    else:
        said = _read("offload", offload, options, residences)
    said += _read("vae", vae, VAE_FLAGS, ("whole", *map(" ".join, PLANNED_VAES[1:])))
    for one_of in (RESIDENCES, TYPES_BY_WORD):
        if len({*said} & {*one_of}) > 1:
            raise ArgumentError("offload", f"one of {', '.join(residences)}, and one type", repr(offload))
    said += [] if {*said} & {*RESIDENCES} else ["no offload"]
    return tuple(word for word in options if word in said)


def with_direct(pipeline: str, offload: Any, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a way with direct convolution too, if only a residence was named. A whole way, or the program's
    options, say how the VAE convolves: its words are then as they were."""
    is_open = isinstance(offload, str) and offload in ("none", *RESIDENCES) and "on CPU" not in words
    return tuple(word for word in options_of(pipeline) if word in words or (is_open and word == "direct"))


def _read(argument: str, text: Any, words: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Words out of a text, between blanks or commas; a ValueError that says what is wanted where there are others."""
    plain = " ".join(str(text).replace("VAE ", "").replace(",", " ").split())
    for word, option in VAE_FLAGS.items():
        plain = plain.replace(option, word)
    any_word = "|".join(map(re.escape, sorted(["none", "whole", *words], key=len, reverse=True)))
    found = re.findall(any_word, plain)
    if not found or " ".join(found) != plain or ("whole" in found and {*found} & {*VAE_FLAGS}):
        choose(argument, text, wanted)
    return [word for word in found if word not in ("none", "whole")]


def type_word(argument: str, given: Any) -> str:
    """The word for a type, however it is spelt."""
    word = str(given).upper()
    choose(argument, word if word in TYPES_BY_WORD else given, TYPES_BY_WORD)
    return word


def planned_words(flash: bool = False, kind: str | None = None) -> list[tuple[str, ...]]:
    """The words of all ways that a plan tries, the plainest first. kind: a type, however it is spelt."""
    more = (*[FLASH] * flash, *([] if kind is None else [type_word("types", kind)]))
    return [(residence, *vae, *more) for residence in RESIDENCES for vae in PLANNED_VAES]


def sdcpp_ways(
    pipeline: str, height: int, width: int, batch: int, steps: int, guidance: bool, tokens: int | None,
    components: Mapping[str, Any], wanted: Iterable[tuple[str, ...]],
) -> list[Way]:  # fmt: skip
    """The ways of some words. Images of a batch are made one after the other.

    Parameters
    ----------
    components : dict
        By role, a type of ggml's such as ``"Q8_0"``, a size such as ``"6.8 GiB"``, or a file.
    wanted : iterable of tuple of str
        The words of each way, as `words_of` and `planned_words` have them. What `components` say of a type goes
        before a type among them.
    """
    options, known = options_of(pipeline), MODELS[pipeline]
    models = {**known.encoders, known.role: known.denoiser, "vae": "vae-decoder"}
    for role in components:
        choose("components", role, models)
    told = {role: _weights(role, given) for role, given in components.items()}
    usual, prompts = known.type, 2 if known.role == "unet" and guidance else 1
    # Z-Image and its encoder take the prompt as long as it is; others pad it.
    length = PROMPT_TOKENS if tokens is None and COMPONENTS[known.denoiser].tokens is None else tokens

    def way(words: tuple[str, ...]) -> Way:
        smaller = TYPES_BY_WORD.get(words[-1], usual)
        kinds = {role: told.get(role, (smaller if model in TENSORS else usual, None)) for role, model in models.items()}

        def made(role: str, **options: Any) -> Graph:
            """A model's graph with the weights that it is given."""
            (kind, weights), model = kinds[role], models[role]
            count = length if model in TENSORS and known.role != "unet" else None
            found = graph(model, height, width, tokens=count, weight_type=kind or usual, **options)
            return found if weights is None else found._replace(weights=weights)

        # Encoders run one after the other.
        buffers, pools, weights, flops, *_ = zip(*map(made, known.encoders), strict=True)
        denoiser = made(known.role, flash=FLASH in words)
        vae = made(
            "vae", model=known.vae, conv_direct="direct" in words,
            conv_scale=known.vae == "sdxl",  # as of a checkpoint that has its VAE
            tile=DEFAULT_TILE if "tiled" in words else None, backend="cpu" if "on CPU" in words else "cuda",
        )  # fmt: skip
        graphs = {
            _ENCODERS: Graph(max(buffers), max(pools), sum(weights), sum(flops), prompts),
            _DENOISER: denoiser._replace(runs=steps * prompts * batch),
            _VAE: vae._replace(runs=vae.runs * batch),
        }
        last, _ = kinds[[*known.encoders][-1]]  # None: of a size or a file
        phases, host = _phases(words, graphs, known.role, "cpu" if (last or usual) == "f16" else "cpu Q8_0")
        changes = ["tiles are blended where they overlap"] if "tiled" in words else []
        changes += [f"weights in {word} are rounded" for word in words if word in TYPES_BY_WORD]
        said = [word for word in words if word in VAE_FLAGS]
        name = ", ".join([words[0], f"VAE {', '.join(said) or 'whole'}", *words[1 + len(said) :]])
        settings = {flag: value for word in words for flag, value in options[word].items()}
        code = " ".join(flag if value is True else shlex.join([flag, str(value)]) for flag, value in settings.items())
        return Way(name, settings, phases, host, " and ".join(changes), SDCPP_NOTES, code=code or "no options")

    return [way(words) for words in wanted]


def _weights(role: str, given: Any) -> tuple[str | None, int | None]:
    """(ggml's name of a type, None), or (None, bytes) where a size or a file is given."""
    told = told_bytes(role, given)
    return (TYPES_BY_WORD[type_word(f"components[{role!r}]", given)], None) if told is None else (None, told)


def _phases(
    words: tuple[str, ...], models: Mapping[str, Graph], role: str, encoders_on_cpu: str
) -> tuple[tuple[Phase, ...], int]:
    """What each phase takes, and the host. role, encoders_on_cpu: the kinds of work that these do."""
    residence, phases = RESIDENCES[words[0]], []
    on_cpu = {_ENCODERS: encoders_on_cpu} if residence.on_cpu else {}
    on_cpu |= {_VAE: "cpu"} if "on CPU" in words else {}
    works = {_ENCODERS: "transformer", _DENOISER: role, _VAE: "vae direct" if "direct" in words else "vae"} | on_cpu
    for (name, runs), resident in zip(RUNS.items(), residence.on_card, strict=True):
        weights = sum(models[model].weights for model in resident if model not in on_cpu)
        one, added, work = models.get(runs), 0, dict[str, float]()
        if name == "load":
            work["disk"] = float(sum(model.weights for model in models.values()))
        if one:
            work[works[runs]] = float(one.flops * one.runs)
        if one and works[runs] == "vae":  # the rate of its products leaves out the time in which its bytes move
            work["memory"] = float(one.moved * one.runs)
        if one and runs not in on_cpu:
            added = one.buffer + one.pool
            if runs in residence.crosses:
                work["link"] = float(residence.crosses[runs] * one.weights)
        phases.append(Phase.planned(name, weights, added, work))
    host = sum(models[model].weights for model in {*residence.kept, *on_cpu})
    return tuple(phases), host + max((models[model].buffer for model in on_cpu), default=0)
