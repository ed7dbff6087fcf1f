"""Record a layer once for all equal ones: a denoiser has dozens, and running each takes most of a recording's time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from vaemem._common import setting
from vaemem.pytorch.recorder import leaves_of

_PLAIN = (torch.Tensor, torch.dtype, torch.device, str, int, float, bool, type(None))
_SETTINGS = (str, float, bool, tuple, type(None))
# The key of equal calls, the layer's own forward, its arguments -> its outputs
CallLayer = Callable[[Hashable, Callable[..., Any], Any, Any], Any]


def is_plain(x: Any) -> bool:
    """Tell whether nobody can change an object, apart from a tensor's contents."""
    return isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))


def _is_empty(x: Any) -> bool:
    return isinstance(x, dict) and not x


def _kind_of(layer: torch.nn.Module) -> Hashable:
    """Return what a layer has in common with equal ones: its weights' sizes, and its settings. Whole numbers do not
    count, because one may be the layer's place in the list."""
    weights = tuple((name, x.shape, x.dtype) for name, x in layer.named_parameters())
    states = (vars(part).items() for part in layer.modules())
    settings = tuple((name, repr(x)) for state in states for name, x in state if isinstance(x, _SETTINGS))
    return type(layer), weights, settings


@contextlib.contextmanager
def calling_layers(module: torch.nn.Module, call: CallLayer) -> Iterator[None]:
    """Call the layers of lists by a function, if nobody can change their arguments."""
    changing = set[Hashable]()  # kinds of layers that put something into an empty dict

    def calling(kind: Hashable, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            if kind in changing or not all(is_plain(x) or _is_empty(x) for x in given):
                return run(*args, **kwargs)  # it may change an object
            leaves = leaves_of((args, kwargs))
            told = ((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
            out = call((kind, tuple(kwargs), *told), run, args, kwargs)
            if not all(is_plain(x) or _is_empty(x) for x in given):
                changing.add(kind)
            return out

        return called

    with contextlib.ExitStack() as wrapped:
        lists = (m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
        for number, layers in enumerate([m for m in one if m is not None] for one in lists):
            for layer in layers if len(layers) > 2 else ():
                forward = calling((number, _kind_of(layer)), layer.forward)
                wrapped.enter_context(setting(layer, forward=forward))
        yield
