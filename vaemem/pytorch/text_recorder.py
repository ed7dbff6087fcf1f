"""Record what a pipeline's own code does around its components' calls: the events of a pipeline's text.

The components run on "meta", without their weights and without a recorder: only their outputs count here. A tensor is
named by the source code that makes it.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from vaemem._common import setting
from vaemem._errors import ArgumentError
from vaemem.prediction.request import Card
from vaemem.pytorch.converting import modules_of, tensors_of
from vaemem.pytorch.equal_layers import calling_layers, is_plain
from vaemem.pytorch.pipeline_recorder import PipelineRecorder, recording_pipelines
from vaemem.pytorch.recorder import leaves_of, map_leaves

PICTURE = "[picture]"
_INNER = tuple(str(Path(module.__file__ or "").parent) for module in (torch, contextlib, sys.modules["vaemem"]))
_STATEFUL = "scheduler", "guider"  # endings of roles whose components keep something after a call
_MUCH = 1 << 20  # bytes that a component keeps, or gets from the host
_LONGEST = 60  # characters of a tensor's name


class Event(NamedTuple):
    """Something that a pipeline does.

    kind: take, free, call, enter, convert, blas, or step, which ends a step of the scheduler
    words: what has to be the same at every size: a tensor's name; role, method, and how many outputs are kept
    size: bytes
    shapes: of a call's tensors, by the parameter's name; of a list, its first tensor's
    """

    kind: str
    words: tuple[str, ...]
    size: int = 0
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()


def shapes_of(given: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes of a call's tensors, by the parameter's name; of a list, its first tensor's. `PICTURE` follows
    if a tensor has a picture's strides, those of (N, H, W, C)."""
    first = {name: x for name, one in given.items() for x in leaves_of(one)[:1] if isinstance(x, torch.Tensor)}
    is_picture = any(x.dim() > 3 and x.shape[1] > 1 and x.stride(1) == 1 for x in first.values())
    return (*((name, tuple(x.shape)) for name, x in first.items()), *[(PICTURE, ())] * is_picture)


class _Queues:
    """Live storages by name, the oldest first."""

    def __init__(self, piled: Container[str] = ()) -> None:
        """piled: names of outputs that may pile up call by call"""
        self._piled, self._begun = piled, dict[str, list[int]]()  # the first outputs of calls
        self._name = dict[int, str]()
        self._live = dict[str, list[int]]()

    def add(self, number: int, name: str) -> None:
        self._name[number] = name
        self._live.setdefault(name, []).append(number)

    def add_outputs(self, numbers: Sequence[int], name: str) -> None:
        self._begun.setdefault(name, []).append(min(numbers, default=0))
        for number in numbers:
            self.add(number, name)

    def remove(self, number: int) -> tuple[str, ...]:
        """Return the storage's name, and its place in the name's queue. If outputs pile up, those of the last two calls
        have places from the end, apart from the first call's, and from the oldest one of the call before the last."""
        name = self._name.pop(number)
        live = self._live[name]
        place = live.index(number)
        *_, before, last = 0, 0, *self._begun.get(name, [])[1:]
        is_late = name in self._piled and 0 < ((place and before) or last) <= number
        del live[place]
        return name, str(place - len(live) - 1 if is_late else place)

    def __contains__(self, number: int) -> bool:
        return number in self._name


class EventWriter:
    """Takes the place of a pipeline recorder's script. Lists events; what a component's call does within is left out,
    and outputs that nobody keeps."""

    def __init__(self, before: EventWriter | None = None, pieces: Container[str] = ()) -> None:
        """before: the writer whose place this one takes; its storages may still be given. pieces: as of
        `record_calls`"""
        self.events = list[Event]()
        self.stream, self.hidden = 0, True
        self._count: int = before._count if before else 0
        self._queues = _Queues(pieces)
        self._call: list[int] | None = None  # outputs of the last call that live, until something else happens
        self._outputs: tuple[int, ...] = ()  # all of them, in the order of their making
        self._freed = list[int]()  # storages that were freed since that call
        self.inside = dict[int, int]()  # bytes of what was allocated where nothing is noted, and lives
        self.kept = list[tuple[int, ...]]()  # for each call, which of its outputs stay

    def take(self, size: int, name: str) -> int:
        self._count += 1
        if self.hidden:
            self.inside[self._count] = size
        if not self.hidden and size:  # no bytes take none
            self._add("take", (name,), size)
            self._queues.add(self._count, name)
        return self._count

    def give(self, number: int) -> None:
        self.inside.pop(number, None)
        if self._call and number in self._call:
            self._call.remove(number)
        elif number in self._queues and self._call is not None:
            self._freed.append(number)
        elif number in self._queues:  # others are weights
            self.events.append(Event("free", self._queues.remove(number)))

    def blas(self, name: str, lt: bool = False) -> None:
        if not self.hidden:
            self._add("blas", ("lt" if lt else "",))

    def conv(self, question: tuple[Any, ...], name: str) -> None:
        if not self.hidden:
            raise ArgumentError("pipe", "convolutions in its components", f"one at {name}")

    def attend(self, *call: Any) -> int:
        if not self.hidden:
            raise ArgumentError("pipe", "attention in its components", f"one at {call[-1]}")
        return self.take(0, "")

    def call(self, role: str, method: str, given: Mapping[str, Any]) -> None:
        self._settle()
        self.events.append(Event("call", (role, method), shapes=shapes_of(given)))

    def leave(self, outputs: list[int]) -> None:
        self._outputs, self._call = tuple(outputs), outputs

    def mark(self, kind: str, *words: str) -> None:
        self._add(kind, words)

    def empty_cache(self) -> None:
        """Only offloading does so here."""

    def end(self) -> None:
        self._settle()

    def _add(self, kind: str, words: tuple[str, ...], size: int = 0) -> None:
        self._settle()
        self.events.append(Event(kind, words, size))

    def _settle(self) -> None:
        """End a call: name the outputs that are kept. Places of what was freed since count them."""
        if self._call is None:
            return
        kept, self._call = self._call, None
        freed, self._freed = self._freed, []
        at = max(i for i, event in enumerate(self.events) if event.kind == "call")
        self.kept.append(tuple(map(self._outputs.index, kept)))
        role, method = self.events[at].words
        self.events[at] = self.events[at]._replace(words=(role, method, str(len(kept))))
        self._queues.add_outputs(kept, role)
        self.events.extend(Event("free", self._queues.remove(number)) for number in freed)


# ---- names ----


@functools.cache
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse(Path(path).read_text("utf-8"))
    except (OSError, SyntaxError):
        return None


@functools.cache
def _named_at(code: CodeType, instruction: int) -> str:
    """Name what an instruction makes: the variable, if it is a statement's whole value, or else the expression."""
    positions = [*code.co_positions()][instruction // 2] if hasattr(code, "co_positions") else ()
    tree = _tree(code.co_filename)
    if tree is None or None in positions or not positions:
        return code.co_name
    line, end, column, end_column = positions
    span, found = (line, column, end, end_column), code.co_name
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            if span == _span(node) or any(span == _span(one) for one in _viewed(node.value)):
                return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        elif isinstance(node, ast.expr) and span == _span(node):
            *_, root = _viewed(node)
            found = ast.unparse(root if isinstance(root, ast.Name | ast.Attribute) else node)
    return found if len(found) <= _LONGEST else found[: _LONGEST - 3] + "..."


_VIEWS = {"view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "expand", "chunk", "flatten", "to", "type"}


def _span(node: Any) -> tuple[Any, ...]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _viewed(value: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression; then, if it makes a view, the viewed expression, and so on."""
    yield value
    if isinstance(value, ast.Subscript):
        yield from _viewed(value.value)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS:
        yield from _viewed(value.func.value)


def _name_here() -> str:
    """Name the tensor that the code outside of PyTorch makes now."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return _named_at(frame.f_code, frame.f_lasti).replace("\n", " ") if frame else "call"


# ---- components ----


def _repeat_sizes(known: dict[Any, Any], key: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a layer; or return what an equal call of another one returned, as new tensors. Only the outputs' sizes count
    here."""
    if key in known:
        return map_leaves(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, known[key])
    out = run(*args, **kwargs)
    made = [x for x in leaves_of(out) if isinstance(x, torch.Tensor)]
    given = {x.untyped_storage()._cdata for x in leaves_of((args, kwargs)) if isinstance(x, torch.Tensor)}
    own = {x.untyped_storage()._cdata for x in made}
    is_new = len(own) == len(made) and not own & given and not any(x._is_view() for x in made)
    if is_new and is_plain(out):
        known[key] = out
    return out


class ComponentCall(NamedTuple):
    """A call of a component, with arguments on "meta".

    label: the method's name, with a number if an earlier call had other switches or other arguments
    shapes: of its tensors, as of `shapes_of`
    kept: which of its outputs' storages the pipeline keeps, by the order of their making
    """

    role: str
    method: str
    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    kept: tuple[int, ...] = ()


class _Output(NamedTuple):
    """A call's output on "meta": the order in which its storages were made, the kinds of their devices, and the places
    of the arguments that it has views of, by its storages."""

    copy: Any
    order: Mapping[int, int]
    places: Mapping[int, str]
    viewed: Mapping[int, int]


class TextRecorder(PipelineRecorder):
    """Records the events of a pipeline's call."""

    def __init__(self, card: Card):
        super().__init__(card)
        self.writer = EventWriter()
        self.script: Any = self.writer
        self._trace = self.writer
        self._outputs = dict[Any, _Output]()  # of components' calls, on "meta"
        self.calls = list[ComponentCall]()  # of a pipeline's call
        self.modules = dict[str, Any]()  # by role
        self._is_inside = False  # whether a component runs
        self.retaining = dict[str, None]()  # roles of components that keep memory after a call
        self._forms = dict[tuple[str, str], list[Any]]()  # of a method's calls: their arguments, without sizes
        self._reads = 0  # of contents

    def copy(self, pipe: Any) -> Any:
        """Copy a pipeline, with fake weights on the card."""
        fakes = dict[int, Any]()
        with setting(self, _silent=True):
            for module in modules_of(pipe).values():
                for x in tensors_of(module):
                    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                    made = torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made
                    self.adopt(made)
                    fakes[id(x)] = made
        return copy.deepcopy(pipe, fakes)

    def name(self, what: str = "") -> str:
        return _name_here() if not self.writer.hidden else ""

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        """Leave out what happens: weights move, or a component computes."""
        self.sweep()
        before, self.writer.hidden = self.writer.hidden, True
        yield
        self.sweep()
        self.writer.hidden = before

    def component(self, role: str, method: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a component, and return fake tensors like its outputs. Only they are noted, not what the call does. A
        call like an earlier one has the same outputs. What a component calls is its own."""
        if self._is_inside:
            return run(*args, **kwargs)
        self.sweep()
        bound = inspect.signature(run).bind(*args, **kwargs).arguments
        label = self._label(role, method, bound)
        self.writer.call(role, label, bound)
        del bound
        given = leaves_of((args, kwargs))
        at = {x.untyped_storage()._cdata: i for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        sizes = role, method, *map(self._told, given)
        key = sizes if sizes in self._outputs else (*sizes, *map(self._told_contents, given))
        del given
        meta_args, meta_kwargs = map_leaves(self._on_meta, (args, kwargs))
        shapes = self.writer.events[-1].shapes
        self.calls.append(ComponentCall(role, method, label, meta_args, meta_kwargs, shapes))
        if key not in self._outputs:
            unmodelled, guesses, reads = {**self.recording.unmodelled}, self.guesses.copy(), self._reads
            with self.hiding():
                before = sum(self.writer.inside.values())
                layers = calling_layers(self.modules[role], functools.partial(_repeat_sizes, {}))
                with setting(self, _is_inside=True), layers:
                    output = run(*args, **kwargs)
                del layers  # it holds outputs of layers
                if reads == self._reads and not any(self.contents(x) is not None for x in tensors_in(output)):
                    key = sizes
                self._outputs[key] = self._to_meta(output, at)
                del output
                self.sweep()
                if sum(self.writer.inside.values()) - before > _MUCH:
                    self.retaining[role] = None
            self.recording.unmodelled.clear()
            self.recording.unmodelled.update(unmodelled)
            self.guesses = guesses
        kept = leaves_of((args, kwargs))
        viewed = {address: kept[i] for address, i in self._outputs[key].viewed.items()}
        del args, kwargs, kept
        result, numbers = self._put_back(self._outputs[key], viewed)
        self.writer.leave(numbers)
        return result

    def _label(self, role: str, method: str, bound: Mapping[str, Any]) -> str:
        """Return a method's name. A number follows it if an earlier call had other switches or other arguments."""
        told = (x if x is None or isinstance(x, bool | str) else ... for x in bound.values())
        form = tuple(bound), *told
        known = self._forms.setdefault((role, method), [])
        if form not in known:
            known.append(form)
        number = known.index(form)
        return f"{method}{number + 1}" if number else method

    def read(self, x: torch.Tensor) -> Any:
        self._reads += 1
        return super().read(x)

    def by_contents(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._reads += 1
        return super().by_contents(func, args, kwargs)

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        """Return the contents; zeros if they are unknown, and ones within a component: masks have ones."""
        self._reads += 1
        if self._is_inside and self.contents(x) is None:
            with unset_fake_temporarily():
                return torch.ones(x.shape, dtype=x.dtype)
        return super().numbers(x)

    def notes(self) -> list[str]:
        kept = (f"not counted: memory that the {role} keeps after a call" for role in self.retaining)
        return [*super().notes(), *kept]

    def _told(self, x: Any) -> Any:
        """Return what a call's outputs depend on, apart from contents that only fake tensors have."""
        if not isinstance(x, torch.Tensor):
            return repr(x)
        return x.shape, x.stride(), x.dtype, None if isinstance(x, FakeTensor) else self._told_contents(x)

    def _told_contents(self, x: Any) -> Any:
        """Return a tensor's whole numbers."""
        is_whole = isinstance(x, torch.Tensor) and not x.is_floating_point()
        known = self.contents(x) if is_whole else None
        return None if known is None else known.numpy().tobytes()

    def _on_meta(self, x: Any) -> Any:
        """Copy a tensor to "meta", with its contents; return anything else as it is."""
        if not isinstance(x, torch.Tensor):
            return x
        with setting(self, _silent=True), _disable_current_modes(), torch._C.DisableTorchFunction():
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if (known := self.contents(x)) is not None:
                made.__dict__["contents"] = known.clone()
        made.__dict__["on_host"] = x.device.type == "cpu" and x.nbytes > _MUCH  # the component copies a large table
        return made

    def _to_meta(self, output: Any, given: Mapping[int, int]) -> _Output:
        """Copy an output to "meta". given: the arguments' places, by their storages"""
        whole, order, places = dict[int, torch.Tensor](), dict[int, int](), dict[int, str]()
        viewed = dict[int, int]()

        def copied(x: torch.Tensor) -> torch.Tensor:
            address = x.untyped_storage()._cdata
            with setting(self, _silent=True), _disable_current_modes(), torch._C.DisableTorchFunction():
                if address not in whole:
                    whole[address] = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
                    copy = whole[address].untyped_storage()._cdata
                    places[copy] = "cpu" if x.device.type == "cpu" else "cuda"  # weights are on "meta"
                    order[copy] = self.number_of(address)
                    if address in given:
                        viewed[copy] = given[address]
                made = whole[address].view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
                if (known := self.contents(x)) is not None:
                    made.__dict__["contents"] = known.clone()
            return made

        with setting(self, _silent=True):
            return _Output(_copy_with(output, copied), order, places, viewed)

    def _put_back(self, output: _Output, viewed: Mapping[int, torch.Tensor]) -> tuple[Any, list[int]]:
        """Copy an output on "meta" to where it was. Return also the numbers of its storages on the card, the first made
        first. viewed: the arguments that it has views of, by its storages"""
        storages, made, numbers = dict[int, Any](), dict[int, torch.Tensor](), list[int]()

        def note(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        def copied(x: torch.Tensor) -> torch.Tensor:
            address = x.untyped_storage()._cdata
            whole = viewed[address] if address in viewed else made[address].view(x.dtype)
            own = whole.as_strided(x.shape, x.stride(), x.storage_offset())
            if "contents" in vars(x):
                with unset_fake_temporarily():
                    own.__dict__["contents"] = vars(x)["contents"].clone()
            return own

        _copy_with(output.copy, note)
        with self.hiding():
            for address in sorted({*storages} - {*viewed}, key=lambda address: output.order.get(address, -1)):
                device = output.places[address]
                with setting(self, _silent=True):
                    made[address] = torch.empty(storages[address].nbytes(), dtype=torch.uint8, device=device)
                if device != "cpu":
                    numbers.append(self.writer.take(0, ""))
                    self.bind(made[address], numbers[-1])
            with setting(self, _silent=True):
                return _copy_with(output.copy, copied), numbers


def tensors_in(x: Any) -> list[torch.Tensor]:
    """List the tensors in an object, wherever it holds them."""
    found = list[torch.Tensor]()

    def note(one: torch.Tensor) -> torch.Tensor:
        found.append(one)
        return one

    _copy_with(x, note)
    return found


def _copy_with(x: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Copy an object, with something in place of each tensor in it."""
    with setting(torch.Tensor, __deepcopy__=lambda tensor, memo: change(tensor)), torch._C.DisableTorchFunction():
        return copy.deepcopy(x)


@contextlib.contextmanager
def _following(original: Any, pipe: Any, recorder: TextRecorder, pieces: Container[str], skips: bool) -> Iterator[None]:
    """Note calls of components and of their children, conversions of their weights, and the scheduler's steps.

    pieces: roles of components whose code counts as the pipeline's, apart from their children's
    skips: whether all steps but the first do nothing
    """
    originals, recorder.modules = modules_of(original), modules_of(pipe)
    loaded = dict[str, torch.dtype]()  # types of converted components

    def calling(role: str, method: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def called(*args: Any, **kwargs: Any) -> Any:
            return recorder.component(role, method, run, args, kwargs)

        return called

    def entering(role: str, method: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def entered(*args: Any, **kwargs: Any) -> Any:
            recorder.sweep()
            recorder.writer.mark("enter", role, method)
            return run(*args, **kwargs)

        return entered

    def moving(role: str, to: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any, **kwargs: Any) -> Any:
            types = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
            recorder.sweep()
            for dtype in types:
                loaded.setdefault(role, next(originals[role].parameters()).dtype)
                recorder.writer.mark("convert", role, str(dtype).removeprefix("torch."))
                torch.nn.Module.to(originals[role], dtype=dtype)
            with recorder.hiding():
                return to(*args, **kwargs)

        return moved

    wrapped = contextlib.ExitStack()
    for role, module in modules_of(pipe).items():
        names, note = {"forward", "encode", "decode"} & {*dir(module)}, entering if role in pieces else calling
        methods = {name: note(role, name, getattr(module, name)) for name in names}
        wrapped.enter_context(setting(module, **methods, to=moving(role, module.to)))
        for name, child in module.named_children():
            wrapped.enter_context(setting(child, forward=calling(role, name, child.forward)))
    scheduler = pipe.scheduler
    kind = type(scheduler)
    step = kind.step
    returned = list[Any]()  # by the first step, if the others do nothing

    @functools.wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = returned[0] if returned and self is scheduler else step(self, *args, **kwargs)
        if self is scheduler:  # a copy makes no steps of its own
            returned.extend([out] * skips)
            recorder.sweep()
            recorder.writer.mark("step")
        return out

    with wrapped, setting(kind, step=stepping):
        yield
    with recorder.hiding():  # the next call is the first one too
        for role, dtype in loaded.items():
            recorder.modules[role].to(dtype)
            originals[role].to(dtype)


@contextlib.contextmanager
def _without_cycles() -> Iterator[None]:
    """Let Python's garbage collector free cycles of objects only if it is called, and only cycles of new objects."""
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


class RecordedCall(NamedTuple):
    """What a pipeline did in a call, and its components' calls. notes: what was not counted, or not known"""

    events: list[Event]
    calls: list[ComponentCall]
    notes: list[str]


def record_calls(
    pipe: Any, calls: Iterable[Callable[[Any], Any]], card: Card, pieces: Container[str] = (), calls_only: bool = False,
) -> list[RecordedCall]:  # fmt: skip
    """Record what a pipeline with weights on "meta" does in calls, each of them as if it were the first.

    pieces: roles of components whose children are called in their place
    calls_only: note no tensors, and let all steps of the scheduler but the first do nothing
    """
    recorder, found = TextRecorder(card), list[RecordedCall]()
    with recording_pipelines(recorder), recorder.hiding(), _without_cycles():
        copied = recorder.copy(pipe)
        for call in calls:
            for role in (role for role in pipe.components if role.endswith(_STATEFUL)):
                setattr(copied, role, copy.deepcopy(getattr(pipe, role)))
            recorder.script = recorder._trace = recorder.writer = EventWriter(recorder.writer, pieces)
            recorder.calls = []
            recorder.guesses.clear()
            recorder.recording.unmodelled.clear()
            gc.collect()
            with _following(pipe, copied, recorder, pieces, calls_only):
                recorder.writer.hidden = calls_only
                output = call(copied)
                recorder.sweep()
                del output
                recorder.sweep()
                recorder.writer.hidden = True
            recorder.writer.end()
            kept = zip(recorder.calls, recorder.writer.kept, strict=True)
            calls_made = [one._replace(kept=which) for one, which in kept]
            found.append(RecordedCall(recorder.writer.events, calls_made, recorder.notes()))
    return found
