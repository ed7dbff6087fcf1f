"""Record any pipeline of diffusers once, at several sizes, into a file that answers for every size and card."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from vaemem import _core
from vaemem._common import DTYPES, grouped, meant, whole
from vaemem._errors import ArgumentError
from vaemem._saving import check_writable, write
from vaemem._types import Dtype
from vaemem.engine.arguments import Progress, polling
from vaemem.pipelines.components import CLIP_TOKENS, MOST_SEQUENCE
from vaemem.pipelines.pipeline_text import PipelineText, video_variables
from vaemem.pipelines.recorded_modules import Recorded
from vaemem.prediction.held_tensors import arch_key
from vaemem.prediction.offloaded_weights import pass_vae
from vaemem.prediction.recording_files import FILE_FORMAT, OPTIONAL_FACTS, SUFFIX
from vaemem.prediction.request import find_card
from vaemem.prediction.runtimes import configured_architecture
from vaemem.pytorch.any_pipeline import check_pipeline, open_pipeline
from vaemem.pytorch.contents import ContentsRecorder, PythonCalls
from vaemem.pytorch.converting import arguments_of, modules_of, tensors_of
from vaemem.pytorch.equal_layers import calling_layers
from vaemem.pytorch.fitting import PolynomialFit, evaluate, products
from vaemem.pytorch.loading import WORD, build_row, make_pictures
from vaemem.pytorch.module_writer import (
    ScriptRecorder,
    Writer,
    settle,
    structure_of,
    versions_of,
    weights_text,
)
from vaemem.pytorch.recorder import NEGLIGIBLE, Recording, leaves_of
from vaemem.pytorch.recording import record_by
from vaemem.pytorch.text_recorder import PICTURE, ComponentCall, RecordedCall, record_calls, tensors_in
from vaemem.pytorch.text_writer import Values, check_text, count_before_change, equations_of, write_text

# n images, latents h x w with sides that are multiples of 4, f frames of them, t words of the prompt, s steps.
_POINTS = [
    (1, 16, 24, 2, 40, 6), (2, 12, 20, 3, 64, 7), (3, 20, 8, 4, 33, 8), (1, 36, 28, 3, 77, 9), (2, 24, 16, 5, 51, 6),
    (7, 8, 32, 2, 70, 7), (3, 32, 12, 3, 25, 6), (1, 28, 40, 4, 90, 7), (5, 40, 16, 6, 46, 8), (1, 44, 20, 5, 58, 6),
    (1, 8, 48, 6, 19, 7), (2, 48, 40, 2, 83, 6),
]  # fmt: skip
_POINTS += [(*_POINTS[number][:5], steps) for number in (3, 5) for steps in (1, 2, 3)]
_CHECKS = [(4, 28, 36, 3, 61, 10), (1, 52, 24, 7, 29, 6)]
_UNGUIDED = [*_POINTS[3:9], *_POINTS[-6:]]  # the points without guidance
_MOST_STEPS = 100  # for which the steps before a change of the denoiser are counted
_TRIED_STEPS = 9  # among which a change shows
_MOST_CALLS = 11  # of a component's method that are recorded; the others have the same code
_UNIT = 4  # divisor of the points' sides
# Variables of a module; d: different times that a denoiser gets; o: the number of its call's label.
_OF_MODULES = "n h w f a p t g d o".split()
_HALVED = [f"{side}{level}" for level in "123" for side in "hw"]
_PADDED = {  # sides and frames in a VAE, which convolutions pad by two
    **{f"{side}p{level}": f"{2**level} {side} + 2" for level in range(5) for side in "hw"},
    "fp0": "1 f + 2", "fp1": "2 f + 1", "fp2": "4 f + -1",
}  # fmt: skip
_PADS = "t", "p"  # tokens of the prompt and of the picture, which a denoiser may pad
_COLUMNS = "unguided clip sound least_clips least_steps pieces padded more_points".split()  # of a row, as in `_Calls`
_CARD = "RTX 4090"
_DENOISERS = ("unet", "transformer")
_STEPS = "num_inference_steps"


class _Calls(NamedTuple):
    """How a pipeline is called at the points.

    given: arguments besides sizes
    unguided: arguments that turn guidance off, or None
    words: of the prompt; 0: as many as a point has; None: those of `given`
    pads: whether the tokenizer pads prompts to that length; then there is padding
    unit: divisor of the latents' sides; frames: of a video for a frame of the latents
    most: images or videos in a call; 0: any number
    factor: pixels for each side of a latent's pixel
    clip, sound: as of `Pipeline`; least_clips, least_steps: in a call
    pieces: roles of components whose children are recorded in their place
    padded: the denoiser pads tokens to multiples of this number; 0: it pads none
    more_points: further points, as of `_POINTS`
    are_videos: whether it makes videos; pictures have one frame
    """

    given: Mapping[str, Any]
    factor: int
    unguided: Mapping[str, Any] | None = None
    words: int | None = None
    pads: bool = False
    unit: int = _UNIT
    frames: int = 4
    most: int = 0
    clip: Sequence[int] = (1, 1, 1)
    sound: Sequence[int] = (0, 1)
    least_clips: int = 1
    least_steps: int = 1
    pieces: Sequence[str] = ()
    padded: int = 0
    more_points: Sequence[Sequence[int]] = ()
    are_videos: bool = True

    def points(self, of: Sequence[Sequence[int]], unguided: Sequence[Sequence[int]]) -> list[dict[str, int]]:
        """Return the variables of a text at points. If guidance can be turned off, do so at the others."""
        if self.unguided is None:
            return [self._at(point, 0) for point in of]
        return [*(self._at(point, 1) for point in of), *(self._at(point, 0) for point in unguided)]

    def _at(self, point: Sequence[int], g: int) -> dict[str, int]:
        n, h, w, f, t, s = point
        n = min(n, self.most) if self.most else n
        h, w, t = h // _UNIT * self.unit, w // _UNIT * self.unit, t if self.words == 0 else self.words or 0
        p, m = h // 2 * (w // 2), -(-t // MOST_SEQUENCE) * MOST_SEQUENCE
        s += self.least_steps - 1
        found = {"n": n, "h": h, "w": w, "p": p, "t": t, "s": s, "g": g, "y": h, "x": w, "q": p, "m": m}
        frames = self.frames_of(f + self.least_clips - 2) if self.are_videos else self.clip[0]
        found |= video_variables(frames, self.frames, self.clip, self.sound)
        return found | dict.fromkeys("k u c i e v".split(), 0)

    def frames_of(self, clips: int) -> int:
        """Return how many frames a video with this number of clips has."""
        return self.frames * clips + self.clip[0]

    def ask(self, pipe: Any, at: Values) -> dict[str, Any]:
        """Return the arguments of the pipeline's call at a point. Pictures among them get the size of the point."""
        known = arguments_of(pipe)
        height, width = at["h"] * self.factor, at["w"] * self.factor
        asked: dict[str, Any] = {
            "prompt": "a", "height": height, "width": width, "num_inference_steps": at["s"],
            "num_images_per_prompt": at["n"], "num_videos_per_prompt": at["n"],
            "num_frames": self.frames_of(at["l"]),
        }  # fmt: skip
        if self.words is not None:
            asked |= {"prompt": " ".join([WORD] * (at["t"] - 2 * self.pads)), "max_sequence_length": at["t"]}
            asked |= {"negative_prompt": asked["prompt"]} if at["g"] else {}
        given = {**self.given, **({} if at["g"] else self.unguided or {})}
        asked |= given
        found = {name: value for name, value in asked.items() if name in known or name in given}
        return {name: x.resize((width, height)) if hasattr(x, "resize") else x for name, x in found.items()}


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
        for x in tensors_of(module):
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            memo[id(x)] = torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made
    copied = copy.deepcopy(pipe, memo)
    for module in modules_of(copied).values():
        module.eval()
    return copied


# ---- modules ----


def _record_module(
    module: torch.nn.Module, called: ComponentCall, recorder: ContentsRecorder | None = None
) -> tuple[Any, list[str]]:
    """Record a component's call. Only the outputs that the pipeline keeps live on. Return the trace, and notes about
    uncounted memory and guesses."""
    layers: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if recorder is None:
        recorder = script = ScriptRecorder(type(module).__name__)
        layers = calling_layers(module, script.repeat)

    def run(m: Any, *args: Any, **kwargs: Any) -> Any:
        call = m if called.method == "forward" else getattr(m, called.method)
        # With numbers: a cache among the arguments may drop a tensor, and an output may then have its address.
        addresses = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        given = {(address, recorder.number_of(address)) for address in addresses}
        return _kept(recorder, call(*args, **kwargs), called.kept, given)

    with layers:
        recording = record_by(recorder, module, called.args, dict(called.kwargs), run, python=PythonCalls)
    missing = (what for what in recording.unmodelled if what not in NEGLIGIBLE)
    notes = [f"not counted: {what} in the {called.role}" for what in missing]
    asked = "asked whether unknown contents are true; True was assumed"
    return recording.trace, [*notes, *(f"{name} {asked}" for name in recorder.guesses)]


def _kept(
    recorder: ContentsRecorder, output: Any, kept: Sequence[int], given: Container[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return the outputs that are kept, by the order in which their storages were made. given: addresses and
    numbers of arguments"""
    by_storage = {x.untyped_storage()._cdata: x for x in tensors_in(output)}
    made = sorted(
        (address for address in by_storage if (address, recorder.number_of(address)) not in given),
        key=lambda address: recorder.number_of(address),
    )
    return [by_storage[made[place]] for place in kept]


def _derived(at: Values, padded: int) -> dict[str, int]:
    """Add the halves of both sides, rounded up, three times; padded sides; and padded tokens, with the padding."""
    found = {name: at[name] for name in _OF_MODULES}
    for name in _PADS if padded else ():
        found[f"{name}{padded}"] = -(-at[name] // padded) * padded
        found[_padding(name, padded)] = found[f"{name}{padded}"] - at[name]
    for name in _HALVED:
        level = int(name[1])
        found[name] = -(-found[f"{name[0]}{level - 1}" if level > 1 else name[0]] // 2)
    return found | {name: evaluate(of, at) for name, of in _PADDED.items()}


def _padding(name: str, padded: int) -> str:
    """Return a polynomial of the padding's tokens, without its first factor."""
    return f"{name}{padded} + -1 {name}"


_AREAS = ["", "h w", "h1 w1", "h2 w2", "h3 w3", "p", *"hw", *_HALVED]
_TOKENS = ["p", "h w", "f p", "f h w"]  # of an image or a video
_MONOMIALS = [
    *products(["", "n"], ["", "f"], _AREAS),
    *products(["", "n"], ["a", "d"]),
    *products(["", "n"], ["t", "t t", *(f"{one} t" for one in _TOKENS), *(f"{one} {one}" for one in _TOKENS)]),
]  # fmt: skip
_OF_VAES = products(["", "n"], ["", "f", "fp0", "fp1", "fp2"], [f"hp{level} wp{level}" for level in range(5)])
_OF_VAES += products(["", "n"], ["fp0", "fp1", "fp2"], ["h w"])


def _write_group(
    group: Sequence[tuple[dict[str, int], Any]], monomials: Sequence[str], dtype: str
) -> list[tuple[Sequence[tuple[dict[str, int], Any]], dict[str, Any]]]:
    """Write calls that take the same steps; those of each label for itself if their sizes have no polynomial."""
    fit = PolynomialFit(monomials, [at for at, _ in group])
    writer = Writer(fit, dtype)
    try:
        writer.write([call for _, call in group])
    except ArgumentError:
        parts = [*grouped(group, lambda one: one[0]["o"]).values()]
        if len(parts) < 2:
            raise
        return [one for part in parts for one in _write_group(part, monomials, dtype)]
    lists = {"convs": writer.convs, "attentions": writer.attentions, "modules": list(writer.modules)}
    return [(group, {"sizes": fit.polynomials, **lists})]


def _make_tables(module: torch.nn.Module, calls: Sequence[tuple[Values, ComponentCall]]) -> None:
    """Call a component once for each label: it may keep tables, which are there from the second call on."""
    for called in {called.label: called for _, called in calls}.values():
        _record_module(module, called)


def _write_module(
    module: torch.nn.Module, dtype: str, calls: Sequence[tuple[Values, ComponentCall]], padded: int
) -> tuple[dict[str, Any], list[str]]:
    """Write a component's program from its calls at several points. Return also the recordings' notes. padded: as of
    `_Calls`"""
    known, notes = dict[tuple[Any, ...], Any](), dict[str, None]()
    _make_tables(module, calls)
    recorded = list[tuple[dict[str, int], Any]]()
    for at, called in calls:
        key = called.label, *shapes_of_all(called)
        if key not in known:
            trace, said = _record_module(module, called)
            known[key] = trace.calls[0]
            notes |= dict.fromkeys(said)
        recorded.append((_derived(at, padded), known[key]))
    of_pads = products(["", "n"], [f"{name}{padded}" for name in _PADS]) if padded else []
    monomials = _MONOMIALS + of_pads + _OF_VAES * ("vae" in calls[0][1].role)
    groups = [*grouped(recorded, lambda one: structure_of(one[1])).values()]
    written = [one for group in groups for one in _write_group(group, monomials, dtype)]
    texts = dict[str, Any]()
    for group, text in written:
        points = [at for at, _ in group]
        others = [at for other, _ in written if other is not group for at, _ in other]
        telling = ["o", *(_padding(name, padded) for name in _PADS if padded), "g", "n", "f"]
        texts[f"{dtype}; {equations_of(points, others, telling)}".removesuffix("; ")] = text
    derived = {name: [f"1 {name[0]}{int(name[1]) - 1 or ''}", 2, 1] for name in _HALVED}
    derived |= {name: [of, 1, 1] for name, of in _PADDED.items()}
    derived |= {f"{name}{padded}": [f"1 {name}", padded, padded] for name in _PADS if padded}
    program = {
        "about": type(module).__name__, "source": versions_of(), "variables": _OF_MODULES, "derived": derived,
        "weights": weights_text(module, getattr(torch, dtype)), "calls": texts,
    }  # fmt: skip
    return program, [*notes]


def _write_weights(module: torch.nn.Module, dtype: str) -> dict[str, Any]:
    """Write the program of a component that the pipeline does not call."""
    call = {"sizes": [], "convs": [], "attentions": [], "modules": [""]}
    return {
        "about": type(module).__name__, "source": versions_of(), "variables": [], "derived": {},
        "weights": weights_text(module, getattr(torch, dtype)), "calls": {dtype: call},
    }  # fmt: skip


def _check_module(
    role: str, data: Mapping[str, Any], module: Any, dtype: str, calls: Sequence[tuple[Values, ComponentCall]]
) -> None:
    """Raise ValueError if a program takes other steps than recordings. Equal calls are recorded once: the second one
    may find tables of the first."""
    gpu, known = find_card(_CARD).gpu, dict[Any, Any]()
    for at, called in calls:
        sizes: dict[str, Any] = {name: at[name] for name in data["variables"]}
        key = called.label, *shapes_of_all(called)
        if key not in known:
            known[key] = settle(_record_module(module, called, ContentsRecorder(Recording(), gpu))[0].steps)
        if settle(Recorded(role, data).trace(dtype, gpu, **sizes).steps) != known[key]:
            wanted = f"a {role} whose sizes follow from those of the picture"
            raise ArgumentError("pipe", wanted, f"others at {dict(at)}")


# ---- the file ----


def _turn_off_tiles(modules: Mapping[str, Any]) -> list[str]:
    """Turn off the tiles of VAEs. Return a note for each VAE that the C walk does not know."""
    tiled = [role for role, module in modules.items() if getattr(module, "use_tiling", False)]
    for role in tiled:
        modules[role].use_tiling = False
    unknown = (role for role in tiled if not _is_walked(modules[role], ()))
    return [f"the {role} was recorded without its tiles" for role in unknown]


def _find_types(modules: Mapping[str, torch.nn.Module], used: Collection[str], mixed: bool) -> dict[str, str]:
    """Return the types of most of modules' weights. All but the VAE have the denoiser's, apart from weights in float32;
    unless types are mixed."""
    types = dict[str, str]()
    for role, module in modules.items():
        counts = Counter[torch.dtype]()
        for weight in module.parameters():
            counts[weight.dtype] += weight.numel()
        types[role] = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    if mixed:
        return types
    usual = types[next((role for role in _DENOISERS if role in used), [*used][-1])]
    others = {types[role] for role in modules if role != "vae"}
    if others - {usual, "float32"}:
        raise ArgumentError("pipe", "components of one type, apart from the VAE", ", ".join(sorted(others)))
    return {role: type if role == "vae" else usual for role, type in types.items()}


def _config_of(module: Any) -> dict[str, Any]:
    given = {name: value for name, value in module.config.items() if not name.startswith("_")}
    return {"_class_name": type(module).__name__, **given}


def _is_walked(module: torch.nn.Module, calls: Sequence[ComponentCall]) -> bool:
    """Tell whether the C walk knows a VAE's calls, also when its weights are sent for its submodules' calls."""
    of_videos = {(one.method, any(len(shape) == 5 and shape[2] > 1 for _, shape in one.shapes)) for one in calls}
    try:
        arch = configured_architecture(_config_of(module))
        passing = pass_vae(arch_key(arch), "float32")
        for method, is_video in of_videos:
            frames = 1 + is_video
            _core.Trace.vae(arch, "diffusers", method, "float32", 64, 64, passing=passing, frames=frames)
    except (ValueError, AttributeError):
        return False
    return True


class _Recorded(NamedTuple):
    """What a pipeline did at points, and what its components are.

    vaes: VAEs that the C walk plays
    labels: of a role's calls
    batched: roles and labels of calls whose first tensor has the images, or the prompts, as its first dimension
    pieces: as of `_Calls`
    most_calls: of a component's method that are recorded; the others have the same code
    """

    fitted: Sequence[tuple[dict[str, int], RecordedCall]]
    checked: Sequence[tuple[dict[str, int], RecordedCall]]
    vaes: Mapping[str, Any]
    labels: Mapping[str, Sequence[str]]
    batched: Collection[tuple[str, str]]
    pieces: Collection[str] = ()
    most_calls: int = _MOST_CALLS

    def variables(self, role: str, label: str, shapes: Any, at: Values) -> dict[str, int]:
        """Return a component's variables: those of the text, with the images of the call; or the sides of what a VAE
        gets, and whether that has a picture's strides. A child of a component gets videos of its own length; a text
        encoder's t is the length of its prompt."""
        if role in self.vaes:
            ((_, (n, _, *frames, h, w)), *_) = shapes
            is_picture = label.startswith("encode") and PICTURE in dict(shapes)
            return {"n": n, "f": frames[0] if frames else 1, "h": h, "w": w} | ({"picture": 1} if is_picture else {})
        n = shapes[0][1][0] if (role, label) in self.batched else at["n"]
        times = dict(shapes).get("timestep", ())
        found = {name: at[name] for name in "hwfaptg"}
        if role in self.pieces and len(shapes[0][1]) == 5:
            found["f"] = shapes[0][1][2]
        if role.startswith("text_encoder") and shapes and len(shapes[0][1]) == 2:
            found["t"] = shapes[0][1][1]
        return found | {"n": n, "d": times[0] if times else 1, "o": self.labels[role].index(label)}

    def calls_of(self, role: str, of: Sequence[tuple[Values, RecordedCall]]) -> list[tuple[Values, ComponentCall]]:
        """Return the different calls of a component at each point, with its variables. ValueError if equal ones have
        other outputs."""
        found, kept, known = list[tuple[Values, ComponentCall]](), dict[Any, Any](), dict[Any, set[Any]]()
        for at, call in of:
            of_role = [called for called in call.calls if called.role == role]
            for called in {(called.label, *shapes_of_all(called)): called for called in of_role}.values():
                values = self.variables(role, called.label, called.shapes, at)
                shapes = known.setdefault((called.label, values["n"] // at["n"]), set())
                if shapes_of_all(called) in shapes or len(shapes) < self.most_calls:
                    shapes.add(shapes_of_all(called))
                    found.append((values, called))
            for called in of_role:
                if kept.setdefault(called.label, called.kept) != called.kept:
                    got = f"{kept[called.label]}, {called.kept}"
                    raise ArgumentError("pipe", f"a {role} of whose outputs the same ones are kept", got)
        return found


def _find_batched(calls: Sequence[tuple[Values, RecordedCall]]) -> set[tuple[str, str]]:
    """Return the roles and labels of calls whose first tensor begins with a number of images: as many as there are
    pictures, two or three times as many, or always the same number."""
    first = dict[tuple[str, str], list[tuple[int, int]]]()
    for at, call in calls:
        for called in call.calls:
            count = called.shapes[0][1][0] if called.shapes and called.shapes[0][1] else 0
            first.setdefault((called.role, called.label), []).append((at["n"], count))
    return {
        key
        for key, pairs in first.items()
        if all(count in (n, 2 * n, 3 * n) for n, count in pairs) or {count for _, count in pairs} in ({1}, {2}, {3})
    }


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
        Sizes that do not follow from the picture's; quantised, compiled or offloaded components.
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
    calls = _Calls(kwargs, whole("vae_scale_factor", getattr(pipe, "vae_scale_factor", 8)))
    row = {"repository": name, "steps": whole("steps", kwargs.get("num_inference_steps", _default(pipe, _STEPS, 50)))}
    contents = _record_file(pipe, calls, row | {"frames": _default(pipe, "num_frames", 0)}, progress)
    write(path, json.dumps(contents, indent=1, default=list))


def record_row(row: Mapping[str, Any], progress: Progress = None, pipe: Any = None) -> dict[str, Any]:
    """Record a pipeline from its row, a file of data/pipelines. Return the contents of a recording. pipe: an object to
    record in place of a pipeline of diffusers"""
    contents = _record_file(*_open_row(row, pipe), row, progress)
    return contents | {"notes": [*contents["notes"], *row.get("notes", ())]}


def find_drift(row: Mapping[str, Any], contents: Mapping[str, Any], pipe: Any = None) -> list[str]:
    """Run a row's pipeline at a few sizes with what is installed. Return in words what its recording says otherwise.
    pipe: as of `record_row`"""
    pipe, calls = _open_row(row, pipe)
    pipe = _on_meta(pipe)
    pipe.set_progress_bar_config(disable=True)
    modules, found = modules_of(pipe), list[str]()
    _turn_off_tiles(modules)
    all_of = _record_points(
        pipe, calls, calls.points(_POINTS[:1], _UNGUIDED[:1]), calls.points(_CHECKS, _CHECKS[:1]), None
    )
    for at, call in all_of.checked:
        with _noting(found):
            check_text(PipelineText(contents["text"]), at, call.events, all_of.variables)
    for role, data in contents["modules"].items():
        with _noting(found):
            dtype = next(iter(data["calls"])).split(";")[0]
            if data["weights"] != weights_text(modules[role], getattr(torch, dtype)):
                raise ArgumentError(role, "the recorded weights", "others")
            _make_tables(modules[role], all_of.calls_of(role, all_of.fitted))
            _check_module(role, data, modules[role], dtype, all_of.calls_of(role, all_of.checked))
    return found


@contextlib.contextmanager
def _noting(found: list[str]) -> Iterator[None]:
    """Add to a list what a check refuses."""
    try:
        yield
    except (ValueError, KeyError) as error:
        found.append(str(error))


def _open_row(row: Mapping[str, Any], pipe: Any) -> tuple[Any, _Calls]:
    """Build a row's pipeline, unless it is given, and tell how it is called."""
    pipe = pipe or build_row(row, "meta")
    factor = row.get("factor") or whole("vae_scale_factor", getattr(pipe, "vae_scale_factor", 8))
    alike = {name: row[name] for name in _COLUMNS if name in row}
    calls = _Calls(
        make_pictures(row["call"], 64, 64), factor, words=0 if row.get("words", True) else row["tokens"],
        pads=row["tokens"] != CLIP_TOKENS, unit=row.get("unit", 2 * factor) // factor,
        are_videos=bool(row.get("frames")), frames=row.get("frame_factor", 4), most=row.get("most_batch", 0), **alike,
    )  # fmt: skip
    return pipe, calls


def _record_file(pipe: Any, calls: _Calls, row: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Record a pipeline's calls, fit them, and check the fit. Return the contents of a recording."""
    pipe = _on_meta(pipe)
    pipe.set_progress_bar_config(disable=True)
    modules = modules_of(pipe)
    notes = _turn_off_tiles(modules)
    points, checks = calls.points([*_POINTS, *calls.more_points], _UNGUIDED), calls.points(_CHECKS, _CHECKS[:1])
    changes = _find_changes(pipe, calls)
    points = [at | {"s": _lengthened(at["s"], changes)} for at in points]
    all_of = _record_points(pipe, calls, points, checks, progress)
    vaes = all_of.vaes
    source = row.get("versions") or versions_of()
    head = f"# {type(pipe).__name__}; {source}"
    text = "\n".join([head, *write_text([(at, call.events) for at, call in all_of.fitted], all_of.variables, changes)])
    if "\nconvert " in text and not vaes:
        raise ArgumentError("pipe", "a VAE whose code is known", "one that the pipeline converts between its calls")
    for at, call in all_of.checked:
        check_text(PipelineText(text), at, call.events, all_of.variables)
    used = dict.fromkeys(called.role for _, call in all_of.fitted for called in call.calls)
    noted = (re.sub(r" \(\d+ times\)", "", note) for _, call in all_of.fitted for note in call.notes)
    notes += dict.fromkeys(noted)
    made, types = dict[str, Any](), _find_types(modules, used, row.get("mixed", False))
    for role in used:
        if role not in vaes:
            made[role], said = _write_module(
                modules[role], types[role], all_of.calls_of(role, all_of.fitted), calls.padded
            )
            notes += said
            _check_module(role, made[role], modules[role], types[role], all_of.calls_of(role, all_of.checked))
    for role in modules.keys() - used:  # pipe.to moves them too
        made[role] = _write_weights(modules[role], types[role])
    sequence = getattr(pipe, "model_cpu_offload_seq", "->".join(used))  # a modular pipeline's is that of its calls
    if not hasattr(pipe, "model_cpu_offload_seq"):
        notes.append(f"{type(pipe).__name__} has no methods to offload it; hooks on its components are predicted")
    chain = [role for role in (sequence or "").split("->") if role in modules]
    roles = [*chain, *(role for role in modules if role not in chain)]
    denoisers = {type(modules[role]).__name__ for role in _DENOISERS if role in made}
    usual = types[next((role for role in _DENOISERS if role in types), next(iter(types)))]
    methods = {(called.role, called.method) for called in all_of.fitted[0][1].calls}
    facts = {
        "dtype": usual, "vae_dtype": "" if types["vae"] == usual else types["vae"],
        "tokens": row.get("tokens") or _tokens(all_of.fitted[0][1]), "steps": row["steps"], "most_batch": calls.most,
        "frames": row.get("frames", 0), "frame_factor": calls.frames, "factor": calls.factor,
        "unit": calls.unit * calls.factor, "has_words": calls.words == 0, "guides": calls.unguided is not None,
        "unguided": not row.get("guides", True), "converts": "\nconvert vae float32" in text,
        "encodes": ("vae", "encode") in methods,
        "longest": _longest(pipe), "loras": hasattr(pipe, "load_lora_weights"),
        "packs": bool(denoisers & {*SINGLE_FILE_LOADABLE_CLASSES}),
        "aside": [role for role in roles if role not in chain],
        **{fact: row[fact] for fact in OPTIONAL_FACTS if fact in row},
    }  # fmt: skip
    return {
        "format": FILE_FORMAT, "about": f"{type(pipe).__name__} of {row['repository']}", "source": source,
        "row": facts, "notes": notes, "roles": roles, "text": text, "modules": made,
        "vaes": {role: _config_of(module) for role, module in vaes.items() if role in used},
    }  # fmt: skip


def _record_points(
    pipe: Any, calls: _Calls, points: Sequence[dict[str, int]], checks: Sequence[dict[str, int]], progress: Progress
) -> _Recorded:
    """Record a pipeline's calls at points, and at others to check them."""
    modules = modules_of(pipe)
    with polling(progress, "record", total=len(points) + len(checks)) as poll:
        found = _record(pipe, [calls.ask(pipe, at) for at in (*points, *checks)], poll, calls.pieces)
    done = [*zip((*points, *checks), found, strict=True)]
    of_vae = [called for call in found for called in call.calls if called.role == "vae"]
    if not of_vae:
        raise ArgumentError("pipe", "a pipeline that calls its component vae", f"one with {', '.join(modules)}")
    vaes = {"vae": modules["vae"]} if _is_walked(modules["vae"], of_vae) else {}
    of_roles = grouped((called for call in found for called in call.calls), lambda called: called.role)
    labels = {role: [*dict.fromkeys(called.label for called in of)] for role, of in of_roles.items()}
    most = _MOST_CALLS + len(calls.more_points)
    fitted, checked = done[: len(points)], done[len(points) :]
    return _Recorded(fitted, checked, vaes, labels, _find_batched(done), calls.pieces, most)


def _find_changes(pipe: Any, calls: _Calls) -> list[int]:
    """Count the steps before a change of the denoiser, with 1, 2, 3, ... steps. Return no counts if there is none. A
    pipeline may know them."""
    if hasattr(pipe, "steps_before_change"):
        return [*map(pipe.steps_before_change, range(1, _MOST_STEPS + 1))] if pipe.steps_before_change(2) < 2 else []
    *_, at = calls.points(_POINTS[:1], _POINTS[:1])

    def count(*steps: int) -> list[tuple[int, int]]:
        asked = [calls.ask(pipe, at | {"s": number}) for number in steps]
        return [count_before_change(call.events) for call in _record(pipe, asked, None, calls.pieces, True)]

    ((before, steps),) = count(_TRIED_STEPS)  # a scheduler may do one step less than asked
    return [] if before == steps else [before for before, _ in count(*range(1, _MOST_STEPS + 1))]


def _lengthened(steps: int, changes: Sequence[int]) -> int:
    """Return the least number of steps with this many before a change, and after it. Up to 3 stay as they are."""
    found = (number for number, before in enumerate(changes, 1) if min(before, number - before) >= steps)
    return next(found, steps) if steps > 3 else steps


def _record(
    pipe: Any, asked: Sequence[Mapping[str, Any]], poll: Any, pieces: Sequence[str], calls_only: bool = False,
) -> list[RecordedCall]:  # fmt: skip
    def call(number: int, given: Mapping[str, Any], copied: Any) -> Any:
        if poll:
            poll(number + 1, len(asked))
        return copied(**given)

    called = [functools.partial(call, i, one) for i, one in enumerate(asked)]
    return record_calls(pipe, called, find_card(_CARD), pieces, calls_only)


def shapes_of_all(called: ComponentCall) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a call's tensors, and how many other arguments it has: tokens may come in lists."""
    leaves = leaves_of((called.args, dict(called.kwargs)))
    shapes = [tuple(x.shape) for x in leaves if hasattr(x, "shape")]
    return (*shapes, (len(leaves) - len(shapes),))


def _tokens(call: RecordedCall) -> int:
    """Count the tokens of the longest prompt that an encoder gets; 1 if there is none."""
    given = (called for called in call.calls if "text_encoder" in called.role)
    ids = (x for called in given for x in leaves_of((called.args, dict(called.kwargs))) if hasattr(x, "shape"))
    return max((int(x.shape[1]) for x in ids if len(x.shape) == 2), default=1)


def _longest(pipe: Any) -> int:
    """Return the tokens of the longest prompt that a pipeline's call accepts; 0 for any."""
    refuses = re.search(r"max_sequence_length > (\d+)", inspect.getsource(type(pipe)))
    return int(refuses[1]) if refuses else 0


def _default(pipe: Any, name: str, otherwise: int) -> int:
    """Return the default of an argument of the pipeline's call, or another number if it has no whole one."""
    default = arguments_of(pipe).get(name)
    return default if isinstance(default, int) else otherwise
