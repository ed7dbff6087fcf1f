"""Record any pipeline of diffusers once, at several sizes, into a file that answers for every size and card."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vaemem._common import DTYPES, check_writable, grouped, meant, whole, write
from vaemem._errors import ArgumentError
from vaemem._types import Dtype
from vaemem.engine.arguments import Progress, polling
from vaemem.engine.configs import read_config
from vaemem.pipelines.programs import Recorded
from vaemem.pipelines.text import PipelineText
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.recordings import FILE_FORMAT, SUFFIX
from vaemem.prediction.request import find_card
from vaemem.pytorch.any_pipeline import check_pipeline, open_pipeline
from vaemem.pytorch.converting import modules_of
from vaemem.pytorch.fitting import PolynomialFit, products
from vaemem.pytorch.module_writer import (
    NEGLIGIBLE,
    ScriptRecorder,
    Writer,
    settle,
    structure_of,
    versions_of,
    weights_text,
)
from vaemem.pytorch.recorder import Recorder, Recording, leaves_of
from vaemem.pytorch.recording import record_by
from vaemem.pytorch.text_recorder import ComponentCall, RecordedCall, record_calls
from vaemem.pytorch.text_writer import Values, check_text, equations_of, write_text

# n images, latents h x w with sides that are multiples of 4, f frames of them, s steps.
_POINTS = [
    (1, 16, 24, 2, 6), (2, 12, 20, 3, 7), (3, 20, 8, 4, 8), (1, 36, 28, 3, 9), (2, 24, 16, 5, 6), (7, 8, 32, 2, 7),
    (3, 32, 12, 3, 6), (1, 28, 40, 4, 7), (5, 40, 16, 6, 8), (1, 44, 20, 5, 6), (1, 8, 48, 6, 7), (2, 48, 40, 2, 6),
]  # fmt: skip
_POINTS += [(*_POINTS[number][:4], steps) for number in (3, 5) for steps in (1, 2, 3)]
_CHECKS = [(4, 28, 36, 3, 10), (1, 52, 24, 7, 6)]
_OF_MODULES = "n h w f p".split()  # variables of a module: the pipeline's
_HALVED = [f"{side}{level}" for level in "123" for side in "hw"]
_CARD = "RTX 4090"


@contextlib.contextmanager
def _advising() -> Iterator[None]:
    """Add to a refusal of the pipeline that one size can be predicted all the same."""
    try:
        yield
    except ArgumentError as error:
        if error.argument == "path" or error.advice:
            raise
        advice = "vaemem.pytorch.predict_pipeline predicts such a pipeline for one size"
        raise type(error)("pipe", error.wanted, error.got, advice, error.place) from error


def _on_meta(pipe: Any) -> Any:
    """Copy a pipeline, with weights on "meta"."""
    memo = dict[int, Any]()
    for module in modules_of(pipe).values():
        for x in (*module.parameters(), *module.buffers()):
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            memo[id(x)] = torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made
    copied = copy.deepcopy(pipe, memo)
    for module in modules_of(copied).values():
        module.eval()
    return copied


def _at(pipe: Any, point: Sequence[int], factor: int) -> dict[str, int]:
    """Return the variables of a text at a point."""
    n, h, w, f, s = point
    p = h // 2 * (w // 2)
    found = dict(zip("nhwfs", point, strict=True)) | {"y": h, "x": w, "p": p, "q": p}
    return found | dict.fromkeys("k t m g u c i".split(), 0) | {"e": 0, "v": 0, "n": n, "f": f, "s": s}


def _ask(pipe: Any, at: Values, factor: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the pipeline's call at a point. Pictures among them get the size of the point."""
    known = inspect.signature(type(pipe).__call__).parameters
    height, width = at["h"] * factor, at["w"] * factor
    asked: dict[str, Any] = {
        "prompt": "a", "height": height, "width": width, "num_inference_steps": at["s"],
        "num_images_per_prompt": at["n"], "num_videos_per_prompt": at["n"], "num_frames": 4 * at["f"] - 3,
    }  # fmt: skip
    asked |= given
    found = {name: value for name, value in asked.items() if name in known or name in given}
    return {name: x.resize((width, height)) if hasattr(x, "resize") else x for name, x in found.items()}


# ---- modules ----


def _record_module(
    module: torch.nn.Module, called: ComponentCall, recorder: Recorder | None = None
) -> tuple[Any, list[str]]:
    """Record a component's call; of its outputs only those live on that the pipeline keeps. Return the trace, and
    operators without counted memory."""
    recorder = recorder or ScriptRecorder(type(module).__name__)

    def run(m: Any, *args: Any, **kwargs: Any) -> Any:
        call = m if called.method == "forward" else getattr(m, called.method)
        return _kept(recorder, call(*args, **kwargs), called.kept)

    recording = record_by(recorder, module, called.args, dict(called.kwargs), run)
    return recording.trace, [what for what in recording.unmodelled if what not in NEGLIGIBLE]


def _kept(recorder: Recorder, output: Any, kept: Sequence[int]) -> list[torch.Tensor]:
    """Return the outputs that are kept, by the order in which their storages were made."""
    by_storage = {x.untyped_storage()._cdata: x for x in leaves_of(output) if isinstance(x, torch.Tensor)}
    made = sorted(by_storage, key=lambda address: recorder.number_of(address))
    return [by_storage[made[place]] for place in kept]


def _derived(at: Values) -> dict[str, int]:
    """Add the halves of both sides, rounded up, three times."""
    found = {name: at[name] for name in _OF_MODULES}
    for name in _HALVED:
        level = int(name[1])
        found[name] = -(-found[f"{name[0]}{level - 1}" if level > 1 else name[0]] // 2)
    return found


def _write_module(
    module: torch.nn.Module, dtype: str, calls: Sequence[tuple[Values, ComponentCall]]
) -> tuple[dict[str, Any], list[str]]:
    """Write a component's program from its calls at several points. Return also what it does not count."""
    known, missing = dict[tuple[Any, ...], Any](), dict[str, None]()
    recorded = list[tuple[dict[str, int], Any]]()
    for at, called in calls:
        shapes = tuple(tuple(x.shape) for x in leaves_of((called.args, dict(called.kwargs))) if hasattr(x, "shape"))
        if shapes not in known:
            trace, unmodelled = _record_module(module, called)
            known[shapes] = trace.calls[0]
            missing |= dict.fromkeys(f"not counted: {what} in {called.role}" for what in unmodelled)
        recorded.append((_derived(at), known[shapes]))
    areas = ["", "h w", "h1 w1", "h2 w2", "h3 w3", "p", *"hw", *_HALVED]
    monomials = [*products(["", "n"], ["", "f"], areas), "p p", "n p p", "f p f p", "n f p f p"]
    groups = grouped(recorded, lambda one: structure_of(one[1]))
    texts = dict[str, Any]()
    for group in groups.values():
        points = [at for at, _ in group]
        others = [at for other in groups.values() if other is not group for at, _ in other]
        case = equations_of(points, others, ["n", "f"])
        fit = PolynomialFit(monomials, points)
        writer = Writer(fit, dtype)
        writer.write([call for _, call in group])
        lists = {"convs": writer.convs, "attentions": writer.attentions, "modules": list(writer.modules)}
        texts[f"{dtype}; {case}".removesuffix("; ")] = {"sizes": fit.polynomials, **lists}
    halves = {name: [f"1 {name[0]}{int(name[1]) - 1 or ''}", 2, 1] for name in _HALVED}
    program = {
        "about": type(module).__name__, "source": versions_of(), "variables": _OF_MODULES, "derived": halves,
        "weights": weights_text(module, getattr(torch, dtype)), "calls": texts,
    }  # fmt: skip
    return program, [*missing]


def _check_module(
    role: str, data: Mapping[str, Any], module: Any, dtype: str, at: Values, called: ComponentCall
) -> None:
    """Raise ValueError if a program takes other steps than a recording."""
    gpu: Gpu = find_card(_CARD).gpu
    sizes: dict[str, Any] = {name: at[name] for name in _OF_MODULES}
    steps = Recorded(role, data).trace(dtype, gpu, **sizes).steps
    recorder = Recorder(Recording(), gpu)
    if settle(steps) != settle(_record_module(module, called, recorder)[0].steps):
        raise ArgumentError("pipe", f"a {role} whose sizes follow from those of the picture", f"others at {dict(at)}")


# ---- the file ----


def _config_of(module: Any) -> dict[str, Any]:
    return {**module.config, "_class_name": type(module).__name__}


def _is_known_vae(module: torch.nn.Module) -> bool:
    try:
        read_config(_config_of(module))
    except (ValueError, AttributeError):
        return False
    return True


def _variables(vaes: Mapping[str, Any], role: str, method: str, shapes: Any, at: Values) -> dict[str, int]:
    """Return a component's variables: those of the text, or the sides of what a VAE gets."""
    if role not in vaes:
        return {name: at[name] for name in _OF_MODULES}
    ((_, (n, _, *frames, h, w)), *_) = shapes
    return {"n": n, "f": frames[0] if frames else 1, "h": h, "w": w}


@_advising()
def record_pipeline(
    pipe: Any, path: str | os.PathLike[str], *, dtype: Dtype = "bfloat16",
    progress: Progress = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Record a pipeline of diffusers into a file that predicts it at any size, on any card and with any offloading.

    The pipeline's own code runs twenty times, at fourteen sizes. Tensors have sizes and no contents, so it needs no
    GPU, no weights and little memory, but some minutes. Then
    ``vaemem.predict_pipeline("mine.vaemem", 1024, 1024, gpu=...)``, `plan_pipeline` and ``vaemem fits mine.vaemem``
    answer without PyTorch, on any machine.

    Parameters
    ----------
    pipe : DiffusionPipeline or str
        A pipeline, which stays as it is; or a folder of one, or an id whose files are in the Hub's cache. Of a folder
        only configs and tokenizers are read.
    path : path-like
        The file to write. It ends with ``.vaemem``.
    dtype : str
        Type of the weights if `pipe` is a folder.
    progress : callable or bool, optional
        Called with the number of finished calls, and of all; or True for a bar of tqdm.
    **kwargs
        Arguments of the pipeline's call, other than its sizes: ``prompt="a cat"``, ``guidance_scale=1.0``. A picture is
        resized. The file answers for these arguments and for this length of the prompt.

    Raises
    ------
    ValueError
        A VAE whose code is not known; sizes that do not follow from the picture's; a component that is called in
        several ways; quantised, compiled or offloaded components.
    OSError
        Files are missing, or the file cannot be written.

    Examples
    --------
    >>> vaemem.pytorch.record_pipeline("cogview4", "cogview4.vaemem")
    Traceback (most recent call last):
        ...
    vaemem._errors.NoFileError: pipe: expected a pipeline of diffusers, a folder of one, ...
    """
    path, dtype = os.fspath(path), meant("dtype", dtype, DTYPES)
    if not path.endswith(SUFFIX):
        raise ArgumentError("path", f"a file that ends with {SUFFIX}", repr(path))
    check_writable(path)
    name = pipe if isinstance(pipe, str) else type(pipe).__name__
    pipe = open_pipeline(pipe, getattr(torch, dtype)) if isinstance(pipe, str) else pipe
    check_pipeline(pipe)
    pipe = _on_meta(pipe)
    pipe.set_progress_bar_config(disable=True)
    modules, factor = modules_of(pipe), whole("vae_scale_factor", getattr(pipe, "vae_scale_factor", 8))
    vaes = {role: module for role, module in modules.items() if hasattr(module, "decode") and _is_known_vae(module)}
    if [role for role, module in modules.items() if hasattr(module, "decode")] != ["vae"] or not vaes:
        got = ", ".join(f"{type(module).__name__} as {role}" for role, module in modules.items())
        raise ArgumentError("pipe", "one VAE, whose role is vae and whose code is known", got)
    at = [_at(pipe, point, factor) for point in (*_POINTS, *_CHECKS)]
    with polling(progress, "record", total=len(at)) as poll:
        found = _record(pipe, [_ask(pipe, one, factor, kwargs) for one in at], poll)
    fitted, checked = list(zip(at, found, strict=True)), list[tuple[dict[str, int], RecordedCall]]()
    fitted, checked = fitted[: len(_POINTS)], fitted[len(_POINTS) :]
    variables = functools.partial(_variables, vaes)
    text = "\n".join(
        [f"# {type(pipe).__name__}; {versions_of()}", *write_text([(a, c.events) for a, c in fitted], variables)]
    )
    for one, call in checked:
        check_text(PipelineText(text), one, call.events, variables)
    types = {role: str(next(module.parameters()).dtype).removeprefix("torch.") for role, module in modules.items()}
    used = dict.fromkeys(called.role for _, call in fitted for called in call.calls)
    made, notes = dict[str, Any](), [*dict.fromkeys(note for _, call in fitted for note in call.notes)]
    for role in used:
        if role not in vaes:
            made[role], missing = _write_module(modules[role], types[role], _calls_of(role, fitted))
            notes += missing
            for point, called in _calls_of(role, checked):
                _check_module(role, made[role], modules[role], types[role], point, called)
    chain = [role for role in (pipe.model_cpu_offload_seq or "").split("->") if role in used]
    roles = [*chain, *(role for role in used if role not in chain)]
    others = {types[role] for role in made}
    usual = types[next((role for role in ("unet", "transformer") if role in made), [*made][-1])]
    if len(others) > 1:
        raise ArgumentError("pipe", "components of one type, apart from the VAE", ", ".join(sorted(others)))
    vae_type = next((types[role] for role in vaes if role in used), usual)
    contents = {
        "format": FILE_FORMAT, "about": f"{type(pipe).__name__} of {name}", "source": versions_of(),
        "row": {
            "dtype": usual, "vae_dtype": "" if vae_type == usual else vae_type, "tokens": _tokens(fitted[0][1]),
            "steps": whole("steps", kwargs.get("num_inference_steps", _steps(pipe))),
            "frames": _frames(pipe), "factor": factor, "unit": 4 * factor,
            "aside": [role for role in roles if role not in chain],
        },
        "notes": notes, "roles": roles, "text": text, "modules": made,
        "vaes": {role: _config_of(module) for role, module in vaes.items() if role in used},
    }  # fmt: skip
    write(path, json.dumps(contents, indent=1, default=list))


def _record(pipe: Any, asked: Sequence[Mapping[str, Any]], poll: Any) -> list[RecordedCall]:
    def call(number: int, given: Mapping[str, Any], copied: Any) -> Any:
        if poll:
            poll(number + 1, len(asked))
        return copied(**given)

    return record_calls(pipe, [functools.partial(call, i, one) for i, one in enumerate(asked)], find_card(_CARD))


def _calls_of(role: str, recorded: Sequence[tuple[Values, RecordedCall]]) -> list[tuple[Values, ComponentCall]]:
    """Return the first call of a component at each point. ValueError if others have other sizes or outputs."""
    found = list[tuple[Values, ComponentCall]]()
    for at, call in recorded:
        first, *others = (called for called in call.calls if called.role == role)
        for other in others:
            if _shown(other) != _shown(first):
                raise ArgumentError("pipe", f"a {role} that is called in one way", f"{_shown(first)}, {_shown(other)}")
        found.append((at, first))
    return found


def _shown(called: ComponentCall) -> Any:
    shapes = [tuple(x.shape) for x in leaves_of((called.args, dict(called.kwargs))) if hasattr(x, "shape")]
    return called.method, shapes, called.kept


def _tokens(call: RecordedCall) -> int:
    """Count the tokens of the longest prompt that an encoder gets; 1 if there is none."""
    given = (called for called in call.calls if "text_encoder" in called.role)
    ids = (x for called in given for x in leaves_of((called.args, dict(called.kwargs))) if hasattr(x, "shape"))
    return max((int(x.shape[1]) for x in ids if len(x.shape) == 2), default=1)


def _steps(pipe: Any) -> int:
    default = inspect.signature(type(pipe).__call__).parameters.get("num_inference_steps")
    return default.default if default and isinstance(default.default, int) else 50


def _frames(pipe: Any) -> int:
    default = inspect.signature(type(pipe).__call__).parameters.get("num_frames")
    return default.default if default and isinstance(default.default, int) else 0
