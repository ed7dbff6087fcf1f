"""The arrays of a run, in host memory or in a GPU's: checked, and what they ask of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vaemem import _core
from vaemem._common import Message, Named, latent_factor
from vaemem.engine.device import Device, DeviceArray

INPUT_NAMES = {"encode": "x", "decode": "z"}  # of what goes in


def request_of(op: str, height: int, width: int, batch: int, pixels: str, floats: str | None = None) -> dict[str, Any]:
    """Arguments of the core's plan, but for the threads. pixels: "float" or "uint8". floats: the arrays are in a GPU's
    memory, and this is the dtype of those that are no bytes; None: in the host's."""
    request: dict[str, Any] = dict(op=op, height=height, width=width, batch=batch, pixels=pixels)
    if floats:
        request |= dict(host_arrays=False, latents=floats, pixels=floats if pixels == "float" else pixels)
    return request


def ends_of(arch: Mapping[str, Any], op: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(scale, channels) of what goes in, and of what comes out. The scale is how many pixels an array has on a side
    where the latents have one: 1 for latents themselves, 8 for the images of most models."""
    if op == "decode":
        return (1, arch["latent_channels"]), (latent_factor(arch), arch["out_channels"])
    return (latent_factor(arch), arch["in_channels"]), (1, 2 * arch["latent_channels"])


class _Arrays:
    """What goes into a run and what comes out, in the result's shape and dtype. request: arguments of the core's plan,
    of one thread and latents as they are, unless the caller says otherwise. notes: what the caller did to the arrays.
    waits: whether the run is over when the call returns."""

    notes: tuple[str, ...] = ()
    waits = True

    def __init__(self, arch: dict[str, Any], op: str, given: Any, pixels: str, out: Any, floats: str | None = None):
        """given: an array with shape and dtype. pixels: of decode's result; the images that encode is given have their
        own. floats: as for `request_of`."""
        (scale_in, channels), (scale_out, made) = ends_of(arch, op)
        axis = 1  # of the channels
        if op == "decode":
            wanted = f"(N, {channels}, h, w) for {arch['name']}"
        elif given.dtype == "uint8":
            axis, pixels, wanted = 3, "uint8", f"(N, H, W, {channels}) for uint8"
        else:
            pixels, wanted = "float", f"(N, {channels}, H, W)"
        if len(given.shape) != 4 or given.shape[axis] != channels:
            raise ValueError(f"{INPUT_NAMES[op]}: want shape {wanted}, got {given.shape}")
        n, *sides = given.shape[:axis] + given.shape[axis + 1 :]
        for name, side in zip(("height", "width"), sides, strict=True):
            if floats is None and side % scale_in:
                wanted, one = f"{name}: want a positive multiple of {scale_in}, got {side}: ", " makes it one"
                raise ValueError(Message(wanted, Named("pad", "reflect"), " or ", Named("pad", "edge"), one))
        height, width = (side * (latent_factor(arch) // scale_in) for side in sides)
        self.request = request_of(op, height, width, n, pixels, floats)
        self.request |= dict(own_output=out is None, threads=1, scaled=False)
        h, w = (side * scale_out // scale_in for side in sides)
        as_bytes = op == "decode" and pixels == "uint8"
        self.shape = (n, h, w, made) if as_bytes else (n, made, h, w)
        self.dtype = "uint8" if as_bytes else floats or "float32"


class HostArrays(_Arrays):
    """NumPy's arrays. What goes in is read where it lies, whatever its type and strides. For a GPU it is packed
    first, as float32 or bytes."""

    def __init__(self, arch: dict[str, Any], op: str, array: Any, pixels: str, out: Any, becomes_bytes: bool = False):
        """becomes_bytes: the caller makes bytes of a result in floats. Bytes do not show that a number is not finite,
        so this looks for such numbers, as the core does where it makes the bytes."""
        data = np.asarray(array)
        if op == "decode" or data.dtype != np.uint8:
            check_real(data, INPUT_NAMES[op], "(N, C, h, w)" if op == "decode" else f"(N, {arch['in_channels']}, H, W)")
        super().__init__(arch, op, data, pixels, out)
        if out is not None:
            check_out(out, self.shape, self.dtype)
            check_apart(np.lib.array_utils.byte_bounds(data), np.lib.array_utils.byte_bounds(out))
        self.data, self.out, self._becomes_bytes = data, out, becomes_bytes

    def run(self, core: _core.Model, wait: bool, **how: Any) -> tuple[np.ndarray, Any]:
        """The result, and the core's record of the run. how: more arguments of the core's run."""
        asked = {name: self.request[name] for name in ("op", "pixels", "threads", "scaled")}
        result, record = core.run(input=self.data, out=self.out, **asked, **how)
        if self._becomes_bytes and not np.isfinite([result.min(), result.max()]).all():
            record["overflow"] = True
        return result, record


class DeviceArrays(_Arrays):
    """Arrays in a GPU's memory, of any library with DLPack; never copied. The result is the same library's where we
    know how it makes one."""

    def __init__(self, arch: dict[str, Any], op: str, array: Any, pixels: str, out: Any, device: Device):
        self._device, self._like = device, array
        self._out: tuple[Any, Any] = None, None  # and as it was borrowed
        self._stream, known = device.stream_of(array)
        device.backend.check_stream(self._stream)
        self._given = device.borrow(array, INPUT_NAMES[op], self._stream)
        as_bytes = self._given.dtype == "uint8"
        if as_bytes and op == "decode":
            raise ValueError("z: want float32, float16 or bfloat16, got uint8")
        super().__init__(arch, op, self._given, pixels, out, device.dtype if as_bytes else self._given.dtype)
        # A run in halves may have overflowed, which is known when it is over. And where the library is unknown, its
        # next use of the arrays cannot be put behind the run.
        self.waits = device.dtype == "float16" or not known
        if out is not None:
            self._write_to(out)

    def _write_to(self, out: Any) -> None:
        target = self._device.borrow(out, "out", self._stream)
        if (target.shape, target.dtype) != (self.shape, self.dtype):
            want = f"{self.dtype} of shape {self.shape}"
            raise ValueError(f"out: want {want}, got {target.dtype} of shape {target.shape}")
        check_apart((self._given.address, self._given.end), (target.address, target.end))
        self._out = out, target

    def run(self, core: _core.Model, wait: bool, **how: Any) -> tuple[Any, Any]:
        """The result, and the core's record of the run. how: more arguments of the core's run_at."""
        if self._out[0] is None and (made := self._device.empty_like(self._like, self.shape, self.dtype)) is not None:
            self._write_to(made)
        out, target = self._out
        how |= {name: value for name, value in self.request.items() if name not in ("host_arrays", "threads")}
        where = dict(input=self._given.address, out=target.address if target else 0, stream=self._stream)
        address, owner, record = core.run_at(**where, wait=wait, **how)
        if out is not None:
            return out, record
        array = DeviceArray(self._device, address, self.shape, self.dtype, owner)
        return self._device.as_library(array, self._like), record


Arrays = HostArrays | DeviceArrays

# ---- checks ----


def check_real(array: np.ndarray, name: str, shape: str) -> None:
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name}: want an array of real numbers of shape {shape}, got dtype {array.dtype}")


def as_float(value: Any, name: str, shape: str) -> np.ndarray:
    """Contiguous, aligned native float32; anything else that is real numbers is copied to it."""
    array = np.asarray(value)
    check_real(array, name, shape)
    return np.require(array, np.float32, ["C", "A"])


def check_apart(z: tuple[int, int], out: tuple[int, int]) -> None:
    """z and out, as (first byte, end): images written while latents are still to be read would be wrong in silence."""
    if z[0] < out[1] and out[0] < z[1]:
        raise ValueError("out: want memory apart from z, got an array that overlaps it: decode a copy of z")


def check_out(out: Any, shape: tuple[int, ...], dtype: str) -> None:
    want = f"a writable, contiguous and aligned {dtype} array of shape {shape}"
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: want {want}, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        kind = "" if out.flags.c_contiguous else "non-contiguous "
        kind += "" if out.flags.aligned else "misaligned "
        kind += "" if out.flags.writeable else "read-only "
        raise ValueError(f"out: want {want}, got {kind}{out.dtype} {out.shape}")
