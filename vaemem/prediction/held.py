"""What a simulated process holds until it is dropped: tensors and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaemem._common import MIB, latent_factor
from vaemem.prediction.runtimes import packing


class _Held:
    """Storages that something of a simulated process holds until it is dropped."""

    def __init__(self, storages: Mapping[int, int]):
        self.storages: dict[int, int] | None = dict(storages)  # address: bytes, in order; None once dropped

    @property
    def nbytes(self) -> int:
        return sum((self.storages or {}).values())


class Tensor(_Held):
    """Storages of a simulated process. `drop` it when the name that held it goes.

    Attributes
    ----------
    name : str
        Who made it.
    shape : tuple of int
        The tensor's, or that of the latents that a posterior describes.
    dtype : str
    nbytes : int
        Requested bytes of all its storages.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: str, storages: Mapping[int, int]):
        super().__init__(storages)
        self.name, self.shape, self.dtype = name, tuple(shape), dtype

    def __repr__(self) -> str:
        state = "dropped" if self.storages is None else f"{self.nbytes / MIB:.2f} MiB"
        return f"<Tensor {self.name} {'x'.join(map(str, self.shape))} {self.dtype}, {state}>"


class LoadedVAE(_Held):
    """A VAE whose weights lie on the simulated device.

    Attributes
    ----------
    arch : dict
    runtime : str
        One of `RUNTIMES`.
    dtype : str
        The weights' type now.
    factor, latent_channels : int
        Image pixels a side of one pixel of the latents that the runtime takes and gives, and their channels.
    channels_last : bool
        Whether the convolutions' filters are in that memory format.
    first : str or None
        The dtype of post_quant_conv, decoder.conv_in and decoder.mid_block, and of latents to decode, where it is
        another, as diffusers' ``upcast_vae`` leaves it.
    sends : bool
        Whether each submodule's weights come for its call, as accelerate's hooks send them; none are there before.
    """

    first: str | None = None

    def __init__(
        self, arch: Mapping[str, Any], runtime: str, dtype: str, weights: Mapping[int, int],
        channels_last: bool = False, sends: bool = False,
    ):  # fmt: skip
        super().__init__(weights)
        self.arch, self.runtime, self.dtype, self.channels_last = dict(arch), runtime, dtype, channels_last
        self.sends = sends
        packed = packing(runtime, arch)
        self.factor, self.latent_channels = latent_factor(arch) * packed, arch["latent_channels"] * packed * packed
        self.key = tuple(sorted(self.arch.items()))

    def __repr__(self) -> str:
        return f"<LoadedVAE {self.arch['name']} ({self.runtime}, {self.dtype}), {self.nbytes / MIB:.2f} MiB>"
