"""Predict any pipeline of diffusers: its own code runs here once, without a GPU and without its weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vaemem._arguments import shared
from vaemem._common import DTYPES, flag, meant, need
from vaemem._errors import ArgumentError, NoFileError
from vaemem._types import Dtype
from vaemem.pipelines.own_recordings import RecordedPrediction, RecordedRequest
from vaemem.pipelines.pipeline_text import phase_of
from vaemem.prediction.request import Software, find_card
from vaemem.prediction.workspace import cudnn_attention, torch_for
from vaemem.pytorch.converting import arguments_of, modules_of, tensors_of
from vaemem.pytorch.decoding import SafeDecode
from vaemem.pytorch.loading import Undrawn, default_dtype
from vaemem.pytorch.pipeline_recorder import PipelineRecorder, recording_pipelines
from vaemem.pytorch.recording import check_compiled

RECORDED_STEPS = 2  # nothing changes after the second
_STEPS = "num_inference_steps"


def _to_card(pipe: Any) -> None:
    pipe.to("cuda")


def open_pipeline(source: str, dtype: torch.dtype) -> Any:
    """Build a pipeline from the configs of a folder, with weights on "meta"."""
    diffusers, accelerate = (need(name, "predict_pipeline from a folder") for name in ("diffusers", "accelerate"))
    try:
        index = diffusers.DiffusionPipeline.load_config(source, local_files_only=True)
    except OSError as error:
        wanted = "a pipeline of diffusers, a folder of one, or an id whose files are in the Hub's cache"
        raise NoFileError("pipe", wanted, repr(source)) from error
    parts = dict[str, Any]()
    for role, named in index.items():
        if not isinstance(named, list | tuple) or None in named:
            continue
        library, name = named
        room = getattr(diffusers.pipelines, library, None) or importlib.import_module(library)
        kind = getattr(room, name)
        if not issubclass(kind, torch.nn.Module):
            continue
        where = {"subfolder": role, "local_files_only": True}
        with accelerate.init_empty_weights(), default_dtype(dtype), Undrawn():
            if hasattr(kind, "config_class") and kind.config_class:  # transformers
                parts[role] = kind(kind.config_class.from_pretrained(source, **where))
            else:
                parts[role] = kind.from_config(kind.load_config(source, **where))
        parts[role].eval()
    return diffusers.DiffusionPipeline.from_pretrained(source, **parts, local_files_only=True)


def check_pipeline(pipe: Any) -> None:
    """Refuse what a recording would get wrong."""
    for role, module in modules_of(pipe).items():
        check_compiled(module)
        for x in tensors_of(module):
            if type(x) not in (torch.Tensor, torch.nn.Parameter):
                advice = "vaemem.predict_pipeline knows quantised weights of known pipelines"
                raise ArgumentError("pipe", f"plain weights in {role}", type(x).__name__, advice)
        if any(hasattr(m, "_hf_hook") or hasattr(m, "_diffusers_hook") for m in module.modules()):
            advice = "offload in `prepare`: prepare=lambda pipe: pipe.enable_model_cpu_offload(device='cuda')"
            raise ArgumentError("pipe", f"a {role} without hooks", "one that is offloaded", advice)


def _copy(pipe: Any, recorder: PipelineRecorder) -> Any:
    """Copy a pipeline with fake weights on the host in place of its own, and without guards of `safe_decode`."""
    fakes = dict[int, Any]()
    for role, module in modules_of(pipe).items():
        for x in tensors_of(module):
            fakes.setdefault(id(x), recorder.weight(x, role))
    copied = copy.deepcopy(pipe, fakes)
    for module in modules_of(copied).values():
        while isinstance(guard := vars(module).get("decode"), SafeDecode):
            guard.undo()
    return copied


@contextlib.contextmanager
def _following(pipe: Any, recorder: PipelineRecorder) -> Iterator[None]:
    """Tell the recorder which module runs, and which phase begins with a component's call."""
    modules = modules_of(pipe)
    roles = {id(m): role for role, module in modules.items() for m in module.modules()}
    names = {
        id(m): f"{role}.{name}".strip(".") for role, module in modules.items() for name, m in module.named_modules()
    }

    def enter(m: torch.nn.Module, _: Any) -> None:
        if not recorder.path and id(m) in roles:
            recorder.begin(phase_of(roles[id(m)], "forward"))
        recorder.enter(names.get(id(m)) or type(m).__name__)

    def calling(role: str, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not recorder.path:
                recorder.begin(phase_of(role, method))
            recorder.enter(role)
            try:
                return call(*args, **kwargs)
            finally:
                recorder.leave()

        return called

    for role, module in modules.items():
        for method in {"encode", "decode"} & {*dir(module)}:
            setattr(module, method, calling(role, method, getattr(module, method)))
    with (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(lambda *_: recorder.leave(), always_call=True),
    ):
        yield


@shared
def predict_pipeline(
    pipe: Any, *args: Any, prepare: Callable[[Any], Any] = _to_card, dtype: Dtype = "bfloat16", gpu: str | None = None,
    memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, safe: bool = False, os: str = "linux", **kwargs: Any,
) -> RecordedPrediction:  # fmt: skip
    """Predict the GPU memory of any pipeline of diffusers in each phase. Nobody compared the answer with a run.

    The pipeline's code runs here once. The pipeline's weights, and everything that it puts on the card, have sizes and
    no contents. So the run needs no GPU, no weights, and little memory; but it takes as long as the code without its
    arithmetic, about a minute.

    Parameters
    ----------
    pipe : DiffusionPipeline or str
        A pipeline, which stays as it is; or a folder of one, or an id whose files are in the Hub's cache. Of a folder
        only configs and tokenizers are read.
    *args, **kwargs
        Arguments of the pipeline's call: ``"a cat", height=1024, width=1024``. Two denoising steps are recorded if no
        ``num_inference_steps`` is given, because later steps take the same memory.
    prepare : callable
        Called with the pipeline before its call: ``lambda pipe: pipe.enable_model_cpu_offload(device="cuda")``,
        tiles, slices. By default ``pipe.to("cuda")``.
    dtype : str
        Type of the weights if `pipe` is a folder.
    gpu, memory, used, cudnn_version, torch_version, safe, os : shared

    Returns
    -------
    RecordedPrediction

    Raises
    ------
    ValueError
        The run asks for contents that do not exist, calls ``record_stream``, or has quantised, compiled or offloaded
        components.
    OSError
        Files are missing.

    Notes
    -----
    If the pipeline's code reads a number that only a real run has, 0 is taken, and a note says so.

    Examples
    --------
    >>> vaemem.pytorch.predict_pipeline("cogview4")
    Traceback (most recent call last):
        ...
    vaemem._errors.NoFileError: pipe: expected a pipeline of diffusers, a folder of one, ...
    """
    card = find_card(gpu, memory, used, os)
    software = Software(torch_version=torch_version, cudnn_version=cudnn_version)
    safe, dtype = flag("safe", safe), meant("dtype", dtype, DTYPES)
    source = pipe if isinstance(pipe, str) else ""
    pipe = open_pipeline(source, getattr(torch, dtype)) if source else pipe
    check_pipeline(pipe)
    notes = list[str]()
    if _STEPS in arguments_of(pipe) and _STEPS not in kwargs:
        kwargs[_STEPS] = RECORDED_STEPS
        notes.append(f"{RECORDED_STEPS} steps were recorded; later ones take the same memory")
    recorder = PipelineRecorder(card, cudnn_attention(card.gpu, torch_for(card.gpu, torch_version), cudnn_version))
    with recording_pipelines(recorder):
        pipe = _copy(pipe, recorder)
        with _following(pipe, recorder):
            prepare(pipe)
            if recorder.holds:
                recorder.begin("load")
            output = pipe(*args, **kwargs)
            del pipe
        recorder.sweep()
        del output
    recorder.script.end()
    title, script = source or "a pipeline", recorder.script.script
    request = RecordedRequest(card, software, script, title, safe=safe, notes=(*notes, *recorder.notes()))
    return RecordedPrediction(request)
