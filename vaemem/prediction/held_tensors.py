"""The things that a simulated process holds: tensors, loaded models, and the variables that keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import MIB, latent_factor
from vaemem._errors import ArgumentTypeError
from vaemem.prediction.offloaded_weights import Passing
from vaemem.prediction.runtimes import packing


def arch_key(arch: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return an architecture as a key of a cache."""
    return tuple(sorted(arch.items()))


class _Held:
    """Storages of a simulated process that a tensor or a model holds until it is dropped."""

    def __init__(self, process: Any, storages: Iterable[int]):
        self._process = process
        self.storages: list[int] | None = list(storages)  # handles, in order; None once dropped

    @property
    def nbytes(self) -> int:
        return sum(map(self._process._script.bytes_of, self.storages or ()))


def storages_of(argument: str, held: Any, *kinds: type[_Held]) -> list[int] | None:
    """Return the handles that a thing of these kinds holds, None after `drop`; TypeError for anything else."""
    if not isinstance(held, kinds):
        wanted = " or ".join(one.__name__ for one in kinds)
        raise ArgumentTypeError(argument, f"a {wanted} of this process", type(held).__name__)
    return held.storages


class Tensor(_Held):
    """A tensor of a simulated process. Call `drop` when the tensor's name goes out of scope.

    Attributes
    ----------
    name : str
        The name of its maker.
    shape : tuple of int
        The tensor's shape, or the shape of the latents that a posterior describes.
    dtype : str
    nbytes : int
        Requested bytes of all its storages.
    picture : bool
        Whether the tensor has a picture's strides, those of (N, H, W, C), as diffusers' VaeImageProcessor makes it.
    """

    def __init__(
        self, process: Any, name: str, shape: Sequence[int], dtype: str, storages: Iterable[int], picture: bool = False,
    ):  # fmt: skip
        super().__init__(process, storages)
        self.name, self.shape, self.dtype, self.picture = name, tuple(shape), dtype, picture

    def __repr__(self) -> str:
        state = "dropped" if self.storages is None else f"{self.nbytes / MIB:.2f} MiB"
        return f"<Tensor {self.name} {'x'.join(map(str, self.shape))} {self.dtype}, {state}>"


class LoadedVAE(_Held):
    """A VAE with its weights on the simulated device.

    Attributes
    ----------
    arch : dict
    runtime : str
        One of `RUNTIMES`.
    dtype : str
        The weights' current type.
    factor, latent_channels : int
        Image pixels a side of one pixel of the latents that the runtime takes and returns, and their channels.
    channels_last : bool
        Whether the convolutions' filters are in the memory format channels_last.
    first : str or None
        The dtype of post_quant_conv, decoder.conv_in and decoder.mid_block, and of latents to decode, if it differs,
        as after ``upcast_vae`` before diffusers 0.36.
    passing : function, optional
        If offloading sends the weights for the submodules' calls: a function that lists these weights, by the VAE's
        dtype and the dtype of its `first` blocks.
    """

    def __init__(
        self, process: Any, arch: Mapping[str, Any], runtime: str, dtype: str, weights: Iterable[int], *,
        first: str | None = None, channels_last: bool = False,
        passing: Callable[[str, str], tuple[Passing, ...]] | None = None,
    ):  # fmt: skip
        super().__init__(process, weights)
        self.arch, self.runtime, self.dtype, self.first = dict(arch), runtime, dtype, first
        self.channels_last, self.passing = channels_last, passing
        packed = packing(runtime, arch)
        self.factor, self.latent_channels = latent_factor(arch) * packed, arch["latent_channels"] * packed * packed
        self.key = arch_key(arch)

    def __repr__(self) -> str:
        return f"<LoadedVAE {self.arch['name']} ({self.runtime}, {self.dtype}), {self.nbytes / MIB:.2f} MiB>"


class Variables:
    """The local variables of a Python function, as attributes. A tensor is freed when no variable holds it:
    ``v.x = f(v.x)`` frees the old tensor after the new one exists."""

    _process: Any

    def __init__(self, process: Any):
        vars(self)["_process"] = process

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"{name}: expected a variable that is bound")

    def __setattr__(self, name: str, tensor: Tensor) -> None:
        old = vars(self).get(name)
        vars(self)[name] = tensor
        self._free(old)

    def __delattr__(self, name: str) -> None:
        self._free(vars(self).pop(name))

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in vars(self) if name != "_process"])

    def delete(self, *names: str) -> None:
        """Call ``del`` on the named variables that are bound."""
        for name in names:
            self._free(vars(self).pop(name, None))

    def _free(self, tensor: Tensor | None) -> None:
        if not any(tensor is other for other in vars(self).values()):
            self._process.drop(tensor)


class Moment(NamedTuple):
    """A step of a call: the module that acted, and the peak bytes that the process had allocated and reserved."""

    name: str
    allocated: int
    reserved: int


def moments(trace: _core.Trace, allocated: Any, reserved: Any, caller: str = "") -> Iterator[Moment]:
    """Yield a call's steps, each with the most bytes that were allocated and reserved in it. `caller` precedes each
    name."""
    owner: dict[int, str] = {}
    for (op, id_, _, name), *counters in zip(trace.steps, allocated.tolist(), reserved.tolist(), strict=True):
        if op == "take":
            owner[id_] = name
        yield Moment(f"free {caller}{owner[id_]}" if op == "give" else caller + name, *counters)
