"""Arrays of a run, in host memory or in a GPU's: check them and turn them into arguments of the core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vaemem import _core
from vaemem._common import encoded_channels, frames_factor, latent_factor
from vaemem._errors import ArgumentError, ArgumentTypeError, Named
from vaemem._numpy import np
from vaemem.engine.device import Device, DeviceArray, itemsize

INPUT_NAMES = {"encode": "x", "decode": "z"}


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Return (first byte, last byte + 1) of an array. NumPy 1.26 has the function under its old name."""
    bounds: tuple[int, int] = (getattr(np, "byte_bounds", None) or np.lib.array_utils.byte_bounds)(array)
    return bounds


def request_of(
    op: str, height: int, width: int, batch: int, pixels: str, floats: str | None = None, frames: int = 1
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of the core's plan, except the threads.

    pixels: "float" or "uint8". floats: dtype of floats in arrays on a GPU; None for arrays in host memory. frames: of a
    video; 1 for images.
    """
    request: dict[str, Any] = dict(op=op, height=height, width=width, batch=batch, frames=frames, pixels=pixels)
    if floats:
        request |= dict(host_arrays=False, latents=floats, pixels=floats if pixels == "float" else pixels)
    return request


def ends_of(arch: Mapping[str, Any], op: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (scale, channels) of the input and of the output of an operation.

    The scale is the side of an array divided by the side of its latents: 1 for latents, 8 for most models' images.
    """
    if op == "decode":
        return (1, arch["latent_channels"]), (latent_factor(arch), arch["out_channels"])
    return (latent_factor(arch), arch["in_channels"]), (1, encoded_channels(arch))


class _Arrays:
    """Input and output of a run.

    Attributes
    ----------
    request : dict
        Arguments of the core's plan: one thread and raw latents, unless the caller changes them.
    shape, dtype
        Of the result: (N, C, h, w), or (N, H, W, C) for uint8 images; of videos (N, C, F, h, w) and (N, F, H, W, C).
    notes : tuple of str
        What the caller did to the arrays.
    waits : bool
        Whether the run is over when the call returns.
    stream : int or None
        The GPU stream that runs and blending use; None for arrays in host memory.

    Tiles can make up a result: `open_tiles` allocates memory for it, `tile` prepares the run of one tile, and `tiled`
    returns the result. `close_tiles` frees the other memory, which an error's traceback would keep.
    """

    notes: tuple[str, ...] = ()
    waits = True
    stream: int | None = None
    _whole: Any = None  # the result of tiles
    _scratch: Any = None  # one tile's result, and the edges kept of other tiles

    def __init__(self, arch: dict[str, Any], op: str, given: Any, pixels: str, out: Any, floats: str | None = None):
        """given: an array with shape and dtype. pixels: for a decode's result; an encode's images decide for
        themselves. floats: as for `request_of`."""
        (scale_in, channels), (scale_out, out_channels) = ends_of(arch, op)
        axis = 1  # of the channels
        is_video = len(given.shape) == 5 and arch.get("family") in ("wan", "ltx")
        time = "F, " if is_video else ""
        if op == "decode":
            wanted = f"(N, {channels}, {time}h, w) for {arch['name']}"
        elif given.dtype == "uint8":
            axis, pixels, wanted = len(given.shape) - 1, "uint8", f"(N, {time}H, W, {channels}) for uint8"
        else:
            pixels, wanted = "float", f"(N, {channels}, {time}H, W)"
        if arch.get("videos") and not is_video:
            wanted += (
                f"; of videos (N, {'F, H, W, 3' if pixels == 'uint8' and op == 'encode' else f'{channels}, F, h, w'})"
            )
        if len(given.shape) != 4 + is_video or given.shape[axis] != channels:
            raise ArgumentError(INPUT_NAMES[op], f"shape {wanted}", str(given.shape))
        n, *frames, height, width = given.shape[:axis] + given.shape[axis + 1 :]
        sides = height, width
        per_latent = frames_factor(arch)
        count = frames[0] if frames else 1  # of the given array
        shown = (count - 1) * per_latent + 1 if op == "decode" else count  # frames of the video
        if count < 1:
            raise ArgumentError(INPUT_NAMES[op], "at least one frame", "none")
        if count > 1 and not arch.get("videos"):
            raise images_only(INPUT_NAMES[op], f"{count} frames")
        for name, side in zip(("height", "width"), sides, strict=True):
            if floats is None and side % scale_in:
                ways = (Named("pad", "reflect"), " or ", Named("pad", "edge"), " makes it one")
                raise ArgumentError(name, f"a positive multiple of {scale_in}", str(side), ways)
        height, width = (side * (latent_factor(arch) // scale_in) for side in sides)
        self.request = request_of(op, height, width, n, pixels, floats, shown)
        self.request |= dict(own_output=out is None, threads=1, scaled=False)
        h, w = (side * scale_out // scale_in for side in sides)
        as_bytes = op == "decode" and pixels == "uint8"
        made = [shown if op == "decode" else (count - 1) // per_latent + 1 for _ in frames]
        self.shape = (n, *made, h, w, out_channels) if as_bytes else (n, out_channels, *made, h, w)
        self.dtype = "uint8" if as_bytes else floats or "float32"

    def close_tiles(self) -> None:
        """Free the memory of tiles."""
        self._whole = self._scratch = None


def _wrap_memory(address: int, owner: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return memory of the core as an array that keeps `owner` alive."""
    interface = {"version": 3, "data": (address, False), "shape": shape, "typestr": np.dtype(dtype).str}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=owner))


class HostArrays(_Arrays):
    """NumPy arrays. The core reads the input where it lies, whatever its type and strides. For a GPU the input is
    first packed as float32 or bytes."""

    _becomes_bytes = False  # whether this is a tile of a result in bytes

    def __init__(self, arch: dict[str, Any], op: str, array: Any, pixels: str, out: Any, device: Device | None = None):
        data = np.asarray(array)
        if op == "decode" or data.dtype != np.uint8:
            check_real(data, INPUT_NAMES[op], "(N, C, h, w)" if op == "decode" else f"(N, {arch['in_channels']}, H, W)")
        super().__init__(arch, op, data, pixels, out)
        if out is not None:
            check_out(out, self.shape, self.dtype)
            check_apart(_bounds(data), _bounds(out))
        self.data, self.out, self._arch, self._device = data, out, arch, device

    def run(self, core: _core.Model, wait: bool, **how: Any) -> tuple[np.ndarray, Any]:
        """Return the result and the core's record of the run. how: more arguments of the core's run."""
        as_bytes, data = self.request["op"] == "encode" and self.request["pixels"] == "uint8", self.data
        kind = "b" if data.dtype.name == "bfloat16" else data.dtype.kind
        if self._device or (data.dtype.isbuiltin == 2 and kind != "b"):  # a dtype that the core does not know
            data, kind = np.require(data, np.uint8 if as_bytes else np.float32, ["C", "A"]), "f"
        item, *others = data.strides
        *frames, row, pixel, channel = others if as_bytes else (*others[1:], others[0])
        frame = frames[0] if frames else 0
        how |= dict(input=data.ctypes.data, out=0 if self.out is None else self.out.ctypes.data, wait=True)
        numbers = kind, data.itemsize, not data.dtype.isnative
        address, owner, record = core.run(
            strides=(item, channel, frame, row, pixel), numbers=numbers, **self.request, **how
        )
        result = _wrap_memory(address, owner, self.shape, self.dtype) if self.out is None else self.out
        if self._becomes_bytes and not np.isfinite([result.min(), result.max()]).all():
            record["overflow"] = True
        return result, record

    def open_tiles(self, core: _core.Model, floats: int) -> tuple[int, int]:
        """Allocate the result and `floats` float32 of scratch, and return both addresses. Scratch begins with a tile's
        result."""
        self._whole = np.empty(self.shape, self.dtype) if self.out is None else self.out
        self._scratch = np.empty(floats, np.float32)
        return self._whole.ctypes.data, self._scratch.ctypes.data

    def tile(self, request: dict[str, Any], ys: slice, xs: slice) -> HostArrays:
        """Return the arrays of one tile. request: arguments of the core's plan. ys, xs: its part of the input."""
        piece = self.data[:, ys, xs] if request["pixels"] == "uint8" else self.data[:, :, ys, xs]
        one = HostArrays(self._arch, request["op"], piece, "float", None, self._device)
        one.out = self._scratch[: math.prod(one.shape)].reshape(one.shape)
        # Bytes cannot show that a number was not finite, so `run` checks the tile.
        one.request, one._becomes_bytes = request, self.dtype == "uint8"
        return one

    def tiled(self) -> np.ndarray:
        """Return the result of all tiles."""
        whole: np.ndarray = self._whole
        return whole


class DeviceArrays(_Arrays):
    """Arrays in a GPU's memory, of any library with DLPack; never copied. The result is an array of the same library if
    we know how to make one."""

    stream: int

    def __init__(self, arch: dict[str, Any], op: str, array: Any, pixels: str, out: Any, device: Device):
        self._device, self._like = device, array
        self._out: tuple[Any, Any] = None, None  # the array, and the same as `Device.borrow` returns it
        self.stream, known = device.stream_of(array)
        device.backend.check_stream(self.stream)
        self._given = device.borrow(array, INPUT_NAMES[op], self.stream)
        as_bytes = self._given.dtype == "uint8"
        if as_bytes and op == "decode":
            raise ArgumentError("z", "float32, float16 or bfloat16", "uint8")
        super().__init__(arch, op, self._given, pixels, out, device.dtype if as_bytes else self._given.dtype)
        # A run in float16 may overflow, which shows only at its end. And in an unknown library, later work on the
        # arrays cannot be ordered behind the run.
        self.waits = device.dtype == "float16" or not known
        if out is not None:
            self._write_to(out)

    def _write_to(self, out: Any) -> None:
        target = self._device.borrow(out, "out", self.stream)
        if (target.shape, target.dtype) != (self.shape, self.dtype):
            raise ArgumentError("out", f"{self.dtype} of shape {self.shape}", f"{target.dtype} of shape {target.shape}")
        check_apart((self._given.address, self._given.end), (target.address, target.end))
        self._out = out, target

    def _open_output(self) -> tuple[Any, Any]:
        """Return the array to write to, and the same array borrowed: the caller's array or a new one of its library;
        otherwise None and None."""
        if self._out[0] is None and (made := self._device.empty_like(self._like, self.shape, self.dtype)) is not None:
            self._write_to(made)
        return self._out

    def run(self, core: _core.Model, wait: bool, **how: Any) -> tuple[Any, Any]:
        """Run as `HostArrays.run` does."""
        out, target = self._open_output()
        where = dict(input=self._given.address, out=target.address if target else 0, stream=self.stream)
        address, owner, record = core.run(**self.request, wait=wait, **where, **how)
        return self._as_library(address, owner) if out is None else out, record

    def _as_library(self, address: int, owner: Any) -> Any:
        array = DeviceArray(self._device, address, self.shape, self.dtype, owner)
        return self._device.as_library(array, self._like)

    def open_tiles(self, core: _core.Model, floats: int) -> tuple[int, int]:
        """Allocate as `HostArrays.open_tiles` does."""
        _, target = self._open_output()
        self._whole = (target.address, None) if target else core.reserve(math.prod(self.shape) * itemsize(self.dtype))
        self._scratch = core.reserve(floats * itemsize("float32"))
        return self._whole[0], self._scratch[0]

    def tile(self, request: dict[str, Any], ys: slice, xs: slice) -> DeviceTile:
        """Return a tile as `HostArrays.tile` does. The run reads it where it lies."""
        size, (_, *sides) = itemsize(self._given.dtype), self._given.shape
        if request["pixels"] == "uint8":
            height, width, channels = sides
            channel, pixel = 1, channels
        else:
            channels, height, width = sides
            channel, pixel = height * width * size, size
        row = width * pixel
        first = self._given.address + ys.start * row + xs.start * pixel
        strides = channels * height * width * size, channel, 0, row, pixel
        return DeviceTile(request, dict(input=first, out=self._scratch[0], stream=self.stream, strides=strides))

    def tiled(self) -> Any:
        """Return the result of all tiles."""
        return self._as_library(*self._whole) if self._out[0] is None else self._out[0]


class DeviceTile:
    """A part of a `DeviceArrays` input. A tile's result is float32 in the scratch memory of these arrays."""

    waits = True

    def __init__(self, request: dict[str, Any], where: dict[str, Any]) -> None:
        """request: arguments of the core's plan. where: further arguments of its run."""
        self.request, self._where = request, where

    def run(self, core: _core.Model, wait: bool, **how: Any) -> tuple[None, Any]:
        """Run the tile; return the core's record."""
        return None, core.run(**self.request, wait=wait, **self._where, **how)[-1]


Arrays = HostArrays | DeviceArrays

# ---- checks ----


def images_only(argument: str, got: str) -> ArgumentError:
    """Make the error for a video that is given to a VAE of images."""
    advice = ("load it with ", Named("videos", True), ", which keeps the filters for all frames")
    return ArgumentError(argument, "one frame, because the VAE was loaded for images", got, advice)


def check_real(array: np.ndarray, name: str, shape: str) -> None:
    """Raise TypeError unless an array has real numbers."""
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ArgumentTypeError(name, f"an array of real numbers of shape {shape}", f"dtype {array.dtype}")


def as_float(value: Any, name: str, shape: str) -> np.ndarray:
    """Return real numbers as contiguous, aligned, native float32; copy only if needed."""
    array = np.asarray(value)
    check_real(array, name, shape)
    return np.require(array, np.float32, ["C", "A"])


def check_apart(z: tuple[int, int], out: tuple[int, int]) -> None:
    """Refuse two ranges (first byte, end) that overlap: images would overwrite latents that are still to be read."""
    if z[0] < out[1] and out[0] < z[1]:
        raise ArgumentError("out", "memory apart from z", "an array that overlaps it", "decode a copy of z")


def check_out(out: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raise TypeError or ValueError unless `out` can take the result."""
    wanted = f"a writable, contiguous and aligned {dtype} array of shape {shape}"
    if not isinstance(out, np.ndarray):
        raise ArgumentTypeError("out", wanted, type(out).__name__)
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        kind = "" if out.flags.c_contiguous else "non-contiguous "
        kind += "" if out.flags.aligned else "misaligned "
        kind += "" if out.flags.writeable else "read-only "
        raise ArgumentError("out", wanted, f"{kind}{out.dtype} {out.shape}")
