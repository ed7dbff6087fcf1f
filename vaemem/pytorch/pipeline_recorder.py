"""Watch a pipeline's whole code run: tensors on the card are fake, those on the host are real, except weights.

A small tensor on the card keeps its contents, if they follow from the host's (vaemem/pytorch/contents.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from vaemem import _core
from vaemem._common import setting
from vaemem._errors import ArgumentError
from vaemem.prediction.phases import OF_WEIGHTS
from vaemem.prediction.request import Card
from vaemem.pytorch.contents import CPU, MOST_KNOWN, ContentsRecorder, PythonCalls
from vaemem.pytorch.recorder import NEGLIGIBLE, Recording, aten
from vaemem.pytorch.recording import imitating_gpu

UNKNOWN_END = "expected a run without record_stream: when the memory is free again depends on the card's speed"
_SAME_WEIGHT = {aten._to_copy.default, aten.detach.default, aten.alias.default}  # a weight afterwards, as before


class ScriptWriter:
    """Writes a script like a `Trace`, but with phases. Any of them may empty the cache and free.

    Attributes
    ----------
    script : vaemem._core.Script
        Whole after `end`.
    """

    def __init__(self) -> None:
        self.script = _core.Script()
        self._left: list[dict[int, int]] = []  # by each call, {id: handle}
        self.stream = 0  # PyTorch's current one, by number
        self._phase, self._times = "", Counter[str]()
        self._trace, self._used = _core.Trace(), False
        self._taken: list[tuple[int, int]] = []  # for each storage its call's number, and its id there

    # ---- writing ----

    def take(self, size: int, name: str) -> int:
        """Allocate on the current stream; return the storage's number."""
        return self._number(self._trace.take(size, name, self.stream))

    def give(self, number: int) -> None:
        """Free a storage."""
        call, local = self._taken[number]
        if call == len(self._left):
            self._trace.give(local)
            return
        self._cut()
        if local in self._left[call]:  # no bytes take no block
            self.script.give([self._left[call].pop(local)])

    def blas(self, name: str, lt: bool = False) -> None:
        """Allocate the workspace of matrix products, if there is none yet."""
        self._compute()
        self._trace.blas(name, lt)

    def conv(self, question: tuple[Any, ...], name: str) -> None:
        """Run a convolution with its workspace."""
        self._compute()
        self._trace.conv(question, name)

    def attend(self, call: tuple[Any, ...], kernel: str, sm: int, multiprocessors: int, name: str) -> int:
        """Run an attention; return its output's number."""
        self._compute()
        return self._number(self._trace.attend(call, kernel, sm, multiprocessors, name))

    def empty_cache(self) -> None:
        """Empty the cache."""
        self._cut()
        self.script.empty_cache()

    def begin(self, phase: str) -> None:
        """Begin a phase. The second one of that name is "denoise 2"."""
        self._cut()
        self._times[phase] += 1
        self._phase = phase if self._times[phase] == 1 else f"{phase} {self._times[phase]}"
        self.script.reset_peak()

    def end(self) -> None:
        """End the phase, if one has begun."""
        self._cut()
        if self._phase:
            self.script.read(self._phase)
        self._phase = ""

    def _compute(self) -> None:
        """Note an operator that may have a workspace."""
        if self.stream:
            wanted = "only copies on a stream of its own"
            raise ArgumentError("prepare", wanted, "products", "the workspaces of streams are not predicted")
        self._used = True

    def _number(self, local: int) -> int:
        self._used = True
        self._taken.append((len(self._left), local))
        return len(self._taken) - 1

    def _cut(self) -> None:
        if self._used:
            self._left.append(self.script.call(self._trace))
            self._trace, self._used = _core.Trace(), False


class PipelineRecorder(ContentsRecorder):
    """Writes a script of what a pipeline does to the card's memory."""

    def __init__(self, card: Card, cudnn: int = 0):
        super().__init__(Recording(), card.gpu, cudnn)
        self.card, self.script = card, ScriptWriter()
        self._trace: Any = self.script
        self._phase, self._begun = "", True  # a phase begins with the first operator that does not move a weight
        self._role = ""  # the component whose weight moves

    def notes(self) -> list[str]:
        """List operators without counted memory, and unknown numbers that the code read."""
        counts = [(what, count) for what, count in self.recording.unmodelled.items() if what not in NEGLIGIBLE]
        missing = [f"not counted: {what} ({count} times)" for what, count in counts]
        read = "read a number that only a real run has"
        return [*missing, *(f"{name} {read} ({count} times); 0 was taken" for name, count in self.guesses.items())]

    def begin(self, phase: str) -> None:
        """End the phase, unless it is this one. The next begins as soon as the weights for it are there."""
        if phase != self._phase:
            self.sweep()
            self.script.end()
            self._phase, self._begun = phase, False

    @property
    def holds(self) -> bool:
        """Whether there is anything on the card."""
        self.sweep()
        return bool(self._alive)

    def empty_cache(self) -> None:
        """Empty the cache, after noting the storages that died."""
        self.sweep()
        self.script.empty_cache()

    def name(self, what: str = "") -> str:
        return OF_WEIGHTS + self._role if self._role else super().name(what)

    # ---- contents ----

    def weight(self, x: torch.Tensor, role: str) -> torch.Tensor:
        """Return a fake tensor on the host in place of a component's parameter or buffer."""
        with setting(self, _silent=True):
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            made = torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made
        made.__dict__["role"] = role
        if x.device.type == "cpu" and x.numel() <= MOST_KNOWN:
            with unset_fake_temporarily():
                made.__dict__["contents"] = x.detach().clone()
        return made

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        """Return the contents, or zeros."""
        if (real := self.contents(x)) is not None:
            return real
        with unset_fake_temporarily():
            return torch.zeros(x.shape, dtype=x.dtype)

    def read(self, x: torch.Tensor) -> Any:
        """Return the number in a tensor. If it is unknown, note that and return 0: the code may decide by it."""
        if self.contents(x) is None:
            self.guesses[self.name()] += 1
        with unset_fake_temporarily():
            return self.numbers(x).item()

    # ---- operators ----

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with setting(self, _role=getattr(args[0], "role", "") if args and func in _SAME_WEIGHT else ""):
            if not self._begun and not self._role and func.namespace == "aten":
                self.sweep()
                self.script.begin(self._phase)
                self._begun = True
            leaves = func is aten._to_copy.default and kwargs.get("device") == CPU and not self._role
            if leaves and (real := self.follow(func, args, kwargs)) is not None:
                return real
            out = super().run(func, types, args, kwargs)
            if self._role:
                out.__dict__["role"] = self._role
            return out


class FakeGpu(FakeTensorMode):
    """Makes fake tensors on a GPU that is not there, also while PyTorch says that it is."""

    avoid_device_init = True


def _make_fake(cls: Any, first: Any, *args: Any, real: Any = FakeTensor.__new__, **kwargs: Any) -> Any:
    """Make a fake tensor; or a parameter, if `first` is its data: accelerate calls the class of a parameter so."""
    if isinstance(first, torch.Tensor):
        return torch.nn.Parameter(first, *args, **kwargs)
    return real(cls, first, *args, **kwargs)


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swap two fake tensors. `torch.utils.swap_tensors` refuses those that a mode has seen."""
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def _refuse_record_stream(*_: Any) -> None:
    raise ArgumentError("prepare", "", UNKNOWN_END)


class _Stream:
    """A stream or an event of the card that is not there. Everything on it happens at once."""

    def __init__(self, script: ScriptWriter, number: int):
        self._script, self.number = script, number
        self._before = list[int]()

    def __getattr__(self, name: str) -> Any:
        if name not in ("synchronize", "wait_stream", "wait_event", "record_event", "query", "record", "wait"):
            raise ArgumentError("prepare", "streams that only wait for others", f"their {name}")
        return lambda *_: self

    def __enter__(self) -> _Stream:
        self._before.append(self._script.stream)
        self._script.stream = self.number
        return self

    def __exit__(self, *_: object) -> None:
        self._script.stream = self._before.pop()


def _refuse_set_stream(*_: Any) -> None:
    raise ArgumentError("prepare", "with torch.cuda.stream(...)", "torch.cuda.set_stream")


@contextlib.contextmanager
def recording_pipelines(recorder: PipelineRecorder) -> Iterator[None]:
    """Record what Python code does to the card's memory during the block, as if there were a GPU."""
    card, gpu, script, numbers = recorder.card, recorder.card.gpu, recorder.script, itertools.count(1)
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "synchronize": lambda *_: None, "ipc_collect": lambda: None, "empty_cache": recorder.empty_cache,
        "mem_get_info": lambda *_: (card.available(), gpu.total_memory),
        "get_device_capability": lambda *_: divmod(gpu.sm, 10),
        "Stream": lambda *_, **__: _Stream(script, next(numbers)), "set_stream": _refuse_set_stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "current_stream": lambda *_: _Stream(script, script.stream), "default_stream": lambda *_: _Stream(script, 0),
        "Event": lambda *_, **__: _Stream(script, 0),
    }  # fmt: skip
    with (
        FakeGpu(allow_non_fake_inputs=True), torch.no_grad(), imitating_gpu(recorder), setting(torch.cuda, **answers),
        setting(torch.utils, swap_tensors=_swap), setting(FakeTensor, __new__=_make_fake),
        setting(torch.Tensor, record_stream=_refuse_record_stream), recorder, PythonCalls(recorder),
    ):  # fmt: skip
        yield
    recorder.sweep()
