"""Follow the contents of small tensors while others are fake: schedulers look up their timesteps, and models read masks
and positions. Contents are known if they follow from those of real tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from vaemem._common import setting
from vaemem.pytorch.recorder import Recorder, aten, leaves_of, map_leaves
from vaemem.pytorch.recording import Eager

MOST_KNOWN = 1 << 17  # elements of a tensor whose contents are followed
_READ = (aten._local_scalar_dense, aten.item)
CPU = torch.device("cpu")
_NUMBERS: dict[Any, Any] = {torch.Tensor.__int__: int, torch.Tensor.__index__: int, torch.Tensor.__float__: float}
_UNSET = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class ContentsRecorder(Recorder):
    """Follows storages, and the contents of small tensors.

    guesses: {module: how often it read a number that nobody knows}
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.guesses = Counter[str]()
        self._stale = dict[int, Any]()  # storages of contents that are unknown by now, by address

    def contents(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a real tensor with the contents; None if they are unknown."""
        real = x.__dict__.get("contents") if isinstance(x, FakeTensor) or x.is_meta else x
        return None if real is None or real.untyped_storage()._cdata in self._stale else real

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        """Return the contents for Python's own use. ValueError if they are unknown."""
        real = self.contents(x)
        return super().by_contents(torch.Tensor.tolist, (x,), {}) if real is None else real

    def read(self, x: torch.Tensor) -> Any:
        """Return the number in a tensor. Assume True for an unknown boolean, and note it: masks are mostly true.
        ValueError for another unknown number."""
        if (real := self.contents(x)) is None:
            if x.dtype is torch.bool:
                self.guesses[self.name()] += 1
                return True
            return super().by_contents(aten._local_scalar_dense.default, (x,), {})
        with unset_fake_temporarily():
            return real.item()

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator makes of the contents of its arguments; None if they are unknown."""
        given = args, kwargs
        reals = {id(x): self.contents(x) for x in leaves_of(given) if isinstance(x, torch.Tensor)}
        unset = torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in _UNSET
        if unset or any(real is None or real.numel() > MOST_KNOWN for real in reals.values()):
            if func._schema.is_mutable:
                self._forget(func, args)
            return None
        args, kwargs = map_leaves(lambda x: reals.get(id(x), CPU if isinstance(x, torch.device) else x), given)
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
        to = torch.device(kwargs.get("device") or CPU).type
        if to == "cpu" and not any(isinstance(x, FakeTensor) for x in leaves_of((args, kwargs))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self.read(args[0]) if func.overloadpacket in _READ else self.run(func, types, args, kwargs)

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors, and follow the contents."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        made = [x for x in leaves_of(out) if isinstance(x, FakeTensor)]
        if all(x.numel() <= MOST_KNOWN for x in made):
            reals = [x for x in leaves_of(self.follow(func, args, kwargs)) if isinstance(x, torch.Tensor)]
            for x, real in zip(made, reals, strict=False):
                x.__dict__["contents"] = real
        return out

    def by_contents(self, func: Any, args: Any, kwargs: Any) -> Any:
        real = self.follow(func, args, kwargs)
        return super().by_contents(func, args, kwargs) if real is None else map_leaves(self._put, real)

    def _put(self, real: Any) -> Any:
        """Return a fake tensor on the card with these contents. The recorder binds it as any operator's output."""
        if not isinstance(real, torch.Tensor):
            return real
        with setting(self, _silent=True):
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        made.__dict__["contents"] = real
        return made


class PythonCalls(Eager):
    """Replaces what Python does with a tensor but no operator shows."""

    def __init__(self, recorder: ContentsRecorder, refused: Mapping[str, str] = {}):
        super().__init__(recorder, refused)
        self._contents = recorder
        self._replacements |= dict.fromkeys((torch.nonzero, torch.Tensor.nonzero), _nonzero)

    def number(self, k: Any) -> int:
        return int(self._contents.read(k))

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
            return _NUMBERS[func](self._contents.read(args[0]))
        if func in (torch.Tensor.numpy, torch.Tensor.tolist):
            return func(self._contents.numbers(args[0]), *args[1:], **kwargs)
        if func is torch.tensor and not isinstance(args[0], torch.Tensor):  # which reads each tensor in a list
            args = map_leaves(lambda x: self._contents.read(x) if isinstance(x, FakeTensor) else x, args)
        return super().__torch_function__(func, types, args, kwargs)


def _nonzero(x: Any, as_tuple: bool = False) -> Any:
    found = aten.nonzero.default(x)
    return found.unbind(1) if as_tuple else found


def _with_index(x: Any) -> Any:
    """Name the GPU by its number. A build of PyTorch without CUDA cannot look it up."""
    is_gpu = x == "cuda" if isinstance(x, str) else isinstance(x, torch.device) and x == torch.device("cuda")
    return torch.device("cuda", 0) if is_gpu else x
