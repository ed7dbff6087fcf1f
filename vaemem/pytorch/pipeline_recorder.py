"""Watch a pipeline's whole code run: tensors on the card are fake, those on the host are real, except weights.

Fake tensors have sizes and no contents. But schedulers look up their timesteps on the card. So a small tensor there
keeps its contents, if they follow from the host's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from vaemem._common import setting
from vaemem._errors import ArgumentError
from vaemem.pipelines.recorded import ScriptWriter
from vaemem.prediction.planned import OF_WEIGHTS
from vaemem.prediction.request import Card
from vaemem.pytorch.recorder import Recorder, Recording, aten, leaves_of, map_leaves
from vaemem.pytorch.recording import Eager, imitating_gpu

MOST_KNOWN = 1 << 17  # elements of a tensor whose contents are followed
UNKNOWN_END = "expected a run without record_stream: when the memory is free again depends on the card's speed"
_CPU = torch.device("cpu")
_READ = (aten._local_scalar_dense, aten.item)
_SAME_WEIGHT = {aten._to_copy.default, aten.detach.default, aten.alias.default}  # a weight afterwards, as before
_NUMBERS: dict[Any, Any] = {torch.Tensor.__int__: int, torch.Tensor.__index__: int, torch.Tensor.__float__: float}
_UNSET = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class PipelineRecorder(Recorder):
    """Writes a script of what a pipeline does to the card's memory.

    guesses: {module: how often it read a number that nobody knows}
    """

    def __init__(self, card: Card, cudnn: int = 0):
        super().__init__(Recording(), card.gpu, cudnn)
        self.card, self.script, self.guesses = card, ScriptWriter(), Counter[str]()
        self._trace: Any = self.script
        self._phase, self._begun = "", True  # a phase begins with the first operator that does not move a weight
        self._role = ""  # the component whose weight moves
        self._stale = dict[int, Any]()  # storages of contents that are unknown by now, by address

    def notes(self) -> list[str]:
        """Say what the recording does not count, and what it supposed."""
        missing = [f"not counted: {what} ({count} times)" for what, count in self.recording.unmodelled.items()]
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

    def contents(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a real tensor with the contents; None if they are unknown."""
        real = x.__dict__.get("contents") if isinstance(x, FakeTensor) else x
        return None if real is None or real.untyped_storage()._cdata in self._stale else real

    def guess(self, x: torch.Tensor) -> torch.Tensor:
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
            return self.guess(x).item()

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator makes of the contents of its arguments; None if they are unknown."""
        given = args, kwargs
        reals = {id(x): self.contents(x) for x in leaves_of(given) if isinstance(x, torch.Tensor)}
        unset = torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in _UNSET
        if unset or any(real is None or real.numel() > MOST_KNOWN for real in reals.values()):
            if func._schema.is_mutable:
                self._forget(func, args)
            return None
        args, kwargs = map_leaves(lambda x: reals.get(id(x), _CPU if isinstance(x, torch.device) else x), given)
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _forget(self, func: Any, args: Any) -> None:
        """Note that an operator makes the contents of its arguments unknown."""
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write and isinstance(x, torch.Tensor):
                real = x.__dict__.get("contents") if isinstance(x, FakeTensor) else x
                if real is not None:
                    self._stale[real.untyped_storage()._cdata] = real.untyped_storage()  # which keeps the address

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return func(*args, **kwargs)
        to = torch.device(kwargs.get("device") or _CPU).type
        if to == "cpu" and not any(isinstance(x, FakeTensor) for x in leaves_of((args, kwargs))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.overloadpacket in _READ:
            return self.read(args[0])
        with setting(self, _role=getattr(args[0], "role", "") if func in _SAME_WEIGHT else ""):
            if not self._begun and not self._role and func.namespace == "aten":
                self.sweep()
                self.script.begin(self._phase)
                self._begun = True
            leaves = func is aten._to_copy.default and kwargs.get("device") == _CPU and not self._role
            if leaves and (real := self._follow(func, args, kwargs)) is not None:
                return real
            return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors, and follow the contents."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        made = [x for x in leaves_of(out) if isinstance(x, FakeTensor)]
        if all(x.numel() <= MOST_KNOWN for x in made):
            reals = [x for x in leaves_of(self._follow(func, args, kwargs)) if isinstance(x, torch.Tensor)]
            for x, real in zip(made, reals, strict=False):
                x.__dict__["contents"] = real
        if self._role:
            out.__dict__["role"] = self._role
        return out

    def by_contents(self, func: Any, args: Any, kwargs: Any) -> Any:
        real = self._follow(func, args, kwargs)
        return super().by_contents(func, args, kwargs) if real is None else map_leaves(self._put, real)

    def _put(self, real: Any) -> Any:
        """Return a fake tensor on the card with these contents. The recorder binds it as any operator's output."""
        if not isinstance(real, torch.Tensor):
            return real
        with setting(self, _silent=True):
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        made.__dict__["contents"] = real
        return made


class _Python(Eager):
    """Replaces what Python does with a tensor but no operator shows."""

    def __init__(self, recorder: PipelineRecorder):
        super().__init__(recorder, refused={})
        self._pipeline = recorder
        self._replacements |= dict.fromkeys((torch.nonzero, torch.Tensor.nonzero), _nonzero)

    def number(self, k: Any) -> int:
        return int(self._pipeline.read(k))

    def places(self, mask: Any) -> Sequence[Any]:
        found: Sequence[Any] = aten.nonzero.default(mask).unbind(1)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.pin_memory, torch.Tensor.is_pinned):  # the card's memory is the same
            return args[0].detach() if func is torch.Tensor.pin_memory else False
        if func is torch.Tensor.cuda:
            func, args, kwargs = torch.Tensor.to, (args[0], "cuda"), {}
        args, kwargs = map_leaves(_with_index, (args, kwargs or {}))
        if not any(isinstance(x, FakeTensor) for x in leaves_of((args, kwargs))):
            return func(*args, **kwargs)
        data: Any = torch.Tensor.data
        if func == data.__get__:
            return args[0].detach()
        if func == data.__set__:
            x, other = args
            func(x, other)
            x.__dict__ |= other.__dict__  # the device too
            return None
        if func in _NUMBERS:
            return _NUMBERS[func](self._pipeline.read(args[0]))
        if func in (torch.Tensor.numpy, torch.Tensor.tolist):
            return func(self._pipeline.guess(args[0]), *args[1:], **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _nonzero(x: Any, as_tuple: bool = False) -> Any:
    found = aten.nonzero.default(x)
    return found.unbind(1) if as_tuple else found


def _with_index(x: Any) -> Any:
    """Name the GPU by its number. A build of PyTorch without CUDA cannot look it up."""
    is_gpu = x == "cuda" if isinstance(x, str) else isinstance(x, torch.device) and x == torch.device("cuda")
    return torch.device("cuda", 0) if is_gpu else x


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
        setting(torch.Tensor, record_stream=_refuse_record_stream), recorder, _Python(recorder),
    ):  # fmt: skip
        yield
    recorder.sweep()
