"""Ways of running a pipeline with stable-diffusion.cpp: where each model's weights are kept, and how its VAE runs.

A way is a few words, such as ``("cond_only", "direct", "tiled")``. The words make the way's name and stand for options
of the program (`options_of`); `words_of` parses a name. Each model is a graph with one compute buffer
(`vaemem.sdcpp.graphs`) that exists while the model runs. Weights stay where they were loaded, except as `RESIDENCES`
says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vaemem._common import choose
from vaemem._errors import ArgumentError, Named
from vaemem.engine.weights import told_bytes
from vaemem.prediction.phases import Phase, Way
from vaemem.sdcpp.graphs import COMPONENTS, DEFAULT_TILE, GGML_TYPES, SDCPP_VERSION, Graph, graph

SMALLER_TYPE = "Q4_K"  # tried if nothing fits
PROMPT_TOKENS = 64  # default for Z-Image's prompt with its template, which is not padded


class Models(NamedTuple):
    """A pipeline's models by their names in `vaemem.sdcpp.graphs`: text encoders by role, the denoiser, the VAE."""

    encoders: Mapping[str, str]
    denoiser: str
    vae: str

    @property
    def role(self) -> str:
        """The denoiser's role, and the kind of its work."""
        return "unet" if self.denoiser.startswith("unet") else "transformer"

    @property
    def type(self) -> str:
        """The default type of weights."""
        return "f16" if self.role == "unet" else "q8_0"


MODELS = {
    "sd15": Models({"text_encoder": "clip-l"}, "unet-sd15", "sd15"),
    "sdxl": Models({"text_encoder": "clip-l", "text_encoder_2": "clip-g"}, "unet-sdxl", "sdxl"),
    "flux": Models({"text_encoder": "clip-l", "text_encoder_2": "t5-xxl"}, "flux-dev", "flux"),
    "flux-schnell": Models({"text_encoder": "clip-l", "text_encoder_2": "t5-xxl"}, "flux-schnell", "flux"),
    **dict.fromkeys(("zimage", "zimage-turbo"), Models({"text_encoder": "qwen3-4b"}, "zimage", "flux")),
}

_ENCODERS, _DENOISER, _VAE = _ALL = ("text encoders", "denoiser", "VAE")
RUNS = {"load": "", "encode prompt": _ENCODERS, "denoise": _DENOISER, "decode": _VAE}  # the models that each phase runs


class Residence(NamedTuple):
    """The places of the models' weights.

    flags: the program's options; of sd-server, which keeps weights, unless they name another program
    on_card: models with weights on the card in each of the four phases
    on_cpu: models that run on the host and keep their weights there
    kept: other models with weights in host memory all the time
    crosses: {model: copies of its weights between host and card in a run}
    """

    flags: Mapping[str, object]
    on_card: tuple[tuple[str, ...], ...]
    on_cpu: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    crosses: Mapping[str, int] = {}


_EACH_ONCE, _LATER = dict.fromkeys(_ALL, 1), (_DENOISER, _VAE)
RESIDENCES = {
    "no offload": Residence({}, (_ALL,) * 4),
    # The text encoder moves to the host after the prompt is encoded, and back for the next prompt.
    "cond_only": Residence(
        {"--offload-mode": "cond_only"}, (_ALL, _ALL, _LATER, _LATER), kept=(_ENCODERS,), crosses={_ENCODERS: 2}
    ),
    "--clip-on-cpu": Residence({"--clip-on-cpu": True}, (_LATER,) * 4, on_cpu=(_ENCODERS,)),
    # Each model's weights are copied to the card when it runs, and freed there afterwards.
    "--offload-to-cpu": Residence(
        {"--offload-to-cpu": True}, ((), (_ENCODERS,), (_DENOISER,), (_VAE,)), kept=_ALL, crosses=_EACH_ONCE
    ),
    # sd-cli makes one picture: each model's weights are freed after it has run, and loaded again for the next picture.
    "freed after use": Residence({"program": "sd-cli"}, (_ALL, _ALL, _LATER, (_VAE,)), crosses=_EACH_ONCE),
}
VAE_FLAGS = {"direct": "--vae-conv-direct", "on CPU": "--vae-on-cpu", "tiled": "--vae-tiling"}
FLASH = "--diffusion-fa"
TYPES_BY_WORD = {kind.upper(): kind for kind in GGML_TYPES}
PLANNED_VAES: tuple[tuple[str, ...], ...] = ((), ("direct",), ("tiled",), ("direct", "tiled"), ("on CPU", "tiled"))
# Beginnings of tensors' names once sd.cpp has read them.
TENSORS = {"t5-xxl": "text_encoders.t5xxl", "qwen3-4b": "text_encoders.llm"}
TENSORS |= {known.denoiser: "model.diffusion_model" for known in MODELS.values()}
SDCPP_NOTES = (
    f"{SDCPP_VERSION}: compute buffers are those of its graphs and ggml's allocator (docs/GGML.md), plus ggml-cuda's"
    " memory for the largest product. cond_only is the option of pull request 1477,"
    " which a server is built on; the other options are its own.",
)


def options_of(pipeline: str) -> dict[str, Mapping[str, object]]:
    """Return the program's options for each word, in the order of words in a way. A type applies to the denoiser and to
    encoders other than CLIP. ValueError for a pipeline that sd.cpp does not have here."""
    if pipeline not in MODELS:
        advice = (Named("runtime", "diffusers"), " predicts it")
        raise ArgumentError("pipeline", f"one of {', '.join(MODELS)} with sd.cpp", repr(pipeline), advice)
    known = MODELS[pipeline]
    tensors = [TENSORS[model] for model in (known.denoiser, *known.encoders.values()) if model in TENSORS]
    types = {word: ",".join(f"{name}={kind}" for name in tensors) for word, kind in TYPES_BY_WORD.items()}
    options = {word: residence.flags for word, residence in RESIDENCES.items()}
    options |= {word: {flag: True} for word, flag in (*VAE_FLAGS.items(), (FLASH, FLASH))}
    return options | {word: {"--tensor-type-rules": rules} for word, rules in types.items()}


def words_of(pipeline: str, offload: Any, vae: Any = "whole") -> tuple[str, ...]:
    """Parse the words of one way.

    Parameters
    ----------
    pipeline : str
    offload : str or dict
        Where weights are kept: ``"none"`` or one of `RESIDENCES`. Or a whole way: its name, its settings or the
        options as typed.
    vae : str
        ``"whole"``, or any of `VAE_FLAGS` such as ``"direct tiled"``, in addition to `offload`.

    Raises
    ------
    ValueError
        An unknown word, or two where only one is possible.

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
        words = [word for word, flags in options.items() if flags and flags.items() <= given.items()]
        if {name for word in words for name in options[word]} != given.keys():
            raise ArgumentError("offload", f"the settings of a way of {pipeline}", repr(offload))
    else:
        words = _split_words("offload", offload, options, residences)
    words += _split_words("vae", vae, VAE_FLAGS, ("whole", *map(" ".join, PLANNED_VAES[1:])))
    for one_of in (RESIDENCES, TYPES_BY_WORD):
        if len({*words} & {*one_of}) > 1:
            raise ArgumentError("offload", f"one of {', '.join(residences)}, and one type", repr(offload))
    words += [] if {*words} & {*RESIDENCES} else ["no offload"]
    return tuple(word for word in options if word in words)


def with_direct(pipeline: str, offload: Any, words: tuple[str, ...]) -> tuple[str, ...]:
    """Add "direct" to the words of a way if only a residence was named. A whole way, or the program's options, already
    say how the VAE convolves."""
    is_open = isinstance(offload, str) and offload in ("none", *RESIDENCES) and "on CPU" not in words
    return tuple(word for word in options_of(pipeline) if word in words or (is_open and word == "direct"))


def _split_words(argument: str, text: Any, words: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Split a text at blanks and commas into words; ValueError with `wanted` for an unknown one."""
    plain = " ".join(str(text).replace("VAE ", "").replace(",", " ").split())
    for word, option in VAE_FLAGS.items():
        plain = plain.replace(option, word)
    any_word = "|".join(map(re.escape, sorted(["none", "whole", *words], key=len, reverse=True)))
    found = re.findall(any_word, plain)
    if not found or " ".join(found) != plain or ("whole" in found and {*found} & {*VAE_FLAGS}):
        choose(argument, text, wanted)
    return [word for word in found if word not in ("none", "whole")]


def type_word(argument: str, given: Any) -> str:
    """Return the word for a type in any spelling."""
    word = str(given).upper()
    choose(argument, word if word in TYPES_BY_WORD else given, TYPES_BY_WORD)
    return word


def planned_words(flash: bool = False, kind: str | None = None) -> list[tuple[str, ...]]:
    """List the words of all ways that a plan tries, the plainest first. kind: a type in any spelling."""
    more = (*[FLASH] * flash, *([] if kind is None else [type_word("types", kind)]))
    return [(residence, *vae, *more) for residence in RESIDENCES for vae in PLANNED_VAES]


def sdcpp_ways(
    pipeline: str, height: int, width: int, batch: int, steps: int, guidance: bool, tokens: int | None,
    components: Mapping[str, Any], wanted: Iterable[tuple[str, ...]],
) -> list[Way]:  # fmt: skip
    """Make the ways for some words. Images of a batch are made one after the other.

    Parameters
    ----------
    guidance : bool
        Whether the denoiser runs twice for each image and step.
    components : dict
        By role: a type of ggml's such as ``"Q8_0"``, a size such as ``"6.8 GiB"``, or a file. Overrides types among
        the words.
    wanted : iterable of tuple of str
        Words of each way, from `words_of` or `planned_words`.
    """
    options, known = options_of(pipeline), MODELS[pipeline]
    models = {**known.encoders, known.role: known.denoiser, "vae": "vae-decoder"}
    for role in components:
        choose("components", role, models)
    stored = {role: _weights(role, given) for role, given in components.items()}
    usual, prompts = known.type, 2 if guidance else 1
    # Z-Image and its encoder take the prompt at its own length; others pad it.
    length = PROMPT_TOKENS if tokens is None and COMPONENTS[known.denoiser].tokens is None else tokens

    def way(words: tuple[str, ...]) -> Way:
        typed = TYPES_BY_WORD.get(words[-1], usual)
        kinds = {role: stored.get(role, (typed if model in TENSORS else usual, None)) for role, model in models.items()}

        def measure(role: str, **options: Any) -> Graph:
            """Simulate a model's graph; its weights may be given."""
            (kind, weights), model = kinds[role], models[role]
            count = length if model in TENSORS and known.role != "unet" else None
            found = graph(model, height, width, tokens=count, weight_type=kind or usual, **options)
            return found if weights is None else found._replace(weights=weights)

        # Encoders run one after the other.
        buffers, pools, weights, flops, *_ = zip(*map(measure, known.encoders), strict=True)
        denoiser = measure(known.role, flash=FLASH in words)
        vae = measure(
            "vae", model=known.vae, conv_direct="direct" in words,
            conv_scale=known.vae == "sdxl",  # as for a checkpoint that contains its VAE
            tile=DEFAULT_TILE if "tiled" in words else None, backend="cpu" if "on CPU" in words else "cuda",
        )  # fmt: skip
        graphs = {
            _ENCODERS: Graph(max(buffers), max(pools), sum(weights), sum(flops), prompts),
            _DENOISER: denoiser._replace(runs=steps * prompts * batch),
            _VAE: vae._replace(runs=vae.runs * batch),
        }
        last, _ = kinds[[*known.encoders][-1]]  # None for a size or a file
        phases, host = _phases(words, graphs, known.role, "cpu" if (last or usual) == "f16" else "cpu Q8_0")
        changes = ["tiles are blended where they overlap"] if "tiled" in words else []
        rounded = [f"weights in {word} are rounded" for word in words if word in TYPES_BY_WORD]
        vae_words = [word for word in words if word in VAE_FLAGS]
        name = ", ".join([words[0], f"VAE {', '.join(vae_words) or 'whole'}", *words[1 + len(vae_words) :]])
        settings = {flag: value for word in words for flag, value in options[word].items()}
        code = " ".join(flag if value is True else shlex.join([flag, str(value)]) for flag, value in settings.items())
        return Way(
            name, settings, phases, host, " and ".join(changes + rounded), SDCPP_NOTES, code=code or "no options",
            rounds=bool(rounded),
        )  # fmt: skip

    return [way(words) for words in wanted]


def _weights(role: str, given: Any) -> tuple[str | None, int | None]:
    """Return (ggml's name of a type, None), or (None, bytes) for a size or a file."""
    size = told_bytes(role, given)
    return (TYPES_BY_WORD[type_word(f"components[{role!r}]", given)], None) if size is None else (None, size)


def _phases(
    words: tuple[str, ...], models: Mapping[str, Graph], role: str, encoders_on_cpu: str
) -> tuple[tuple[Phase, ...], int]:
    """Return the four phases, and the host's bytes. role, encoders_on_cpu: kinds of work of denoiser and encoders."""
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
        if one and works[runs] == "vae":  # the rate of its products excludes the time of its transfers
            work["memory"] = float(one.moved * one.runs)
        if one and runs not in on_cpu:
            added = one.buffer + one.pool
            if runs in residence.crosses:
                work["link"] = float(residence.crosses[runs] * one.weights)
        phases.append(Phase.planned(name, weights, added, work))
    host = sum(models[model].weights for model in {*residence.kept, *on_cpu})
    return tuple(phases), host + max((models[model].buffer for model in on_cpu), default=0)
