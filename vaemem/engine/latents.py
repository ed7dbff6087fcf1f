"""Convert latents between the VAE, which uses raw latents, and pipelines, which scale latents. Read files of latents.

Sources: diffusers' pipelines of Stable Diffusion XL (latents_mean, latents_std) and of FLUX.2 (``_patchify_latents``,
``_encode_vae_image`` and the end of ``__call__`` in ``pipeline_flux2.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vaemem._common import need, reading
from vaemem._errors import ArgumentError, FileError, Named
from vaemem._numpy import np
from vaemem.engine.arrays import as_float
from vaemem.engine.weights import read_tensors


def read_latents(path: str | os.PathLike[str]) -> np.ndarray:
    """Read one array of latents (N, C, h, w), or of a video's (N, C, F, h, w), from a file; (C, h, w) becomes N = 1.

    The file comes from NumPy, safetensors (also ComfyUI's ``.latent``) or ``torch.save``, which
    ``torch.load(weights_only=True)`` reads. ValueError unless it holds exactly one such array.
    """
    file = Path(path)
    if file.suffix == ".npy":
        with reading("latents", "an array that np.save wrote", path), open(file, "rb") as f:
            held = {file.name: np.lib.format.read_array(f, allow_pickle=False)}
    elif file.suffix in (".pt", ".pth"):
        torch = need("torch", f"reading {file.name}")
        with reading("latents", "tensors that torch.save wrote", path):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            tensors = loaded if isinstance(loaded, Mapping) else {file.name: loaded}
            held = {name: value.float().numpy() for name, value in tensors.items() if hasattr(value, "numpy")}
    elif file.suffix in (".safetensors", ".latent"):
        held = read_tensors(file)
    else:
        raise FileError("latents", "a .npy, .safetensors, .latent, .pt or .pth file", "another", path=path)
    found = {name: array for name, array in held.items() if array.ndim in (3, 4, 5) and array.dtype.kind in "fiu"}
    if len(found) != 1:
        names = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in list(held.items())[:5])
        wanted = "one array of real numbers (N, C, h, w)"
        raise FileError("latents", wanted, f"{len(found)} of {names or 'nothing'}", path=path)
    (array,) = found.values()
    return array if array.ndim > 3 else array[None]


@dataclass(frozen=True)
class Scaling:
    """One factor and one shift for all latents. The core undoes them while it loads latents, and refuses a factor of
    None, which means unknown."""

    factor: float
    shift: float

    def held(self, latents: Any) -> Any:
        """Return latents as pipelines hold them; for arrays of any library with arithmetic, on any device."""
        return latents if (self.factor, self.shift) == (1, 0) else (latents - self.shift) * self.factor


@dataclass(frozen=True)
class Normalised:
    """A mean and a deviation for each channel, for arrays in host memory. FLUX.2's pipeline first packs patches of
    latents (N, C, h, w) into channels: (N, C * rows * columns, h / rows, w / columns)."""

    model: str
    mean: np.ndarray  # (channels, 1, 1) of float32
    std: np.ndarray
    patch: tuple[int, int]

    def held(self, latents: Any) -> np.ndarray:
        """Return latents as pipelines hold them: packed and normalised."""
        if latents.ndim == 5:
            n, c, frames, h, w = latents.shape
            return self.held(latents.reshape(n, c, frames * h, w)).reshape(latents.shape)
        n, c, h, w = latents.shape
        (a, b) = self.patch
        if h % a or w % b:
            raise ArgumentError("scaled", f"latents whose sides are multiples of {self.patch}", str(latents.shape))
        patches = latents.reshape(n, c, h // a, a, w // b, b).transpose(0, 1, 3, 5, 2, 4)
        packed: np.ndarray = (patches.reshape(n, c * a * b, h // a, w // b) - self.mean) / self.std
        return packed

    def raw(self, z: Any) -> np.ndarray:
        """Return what the decoder takes: a float32 copy."""
        (a, b), channels = self.patch, len(self.mean)
        shape = f"(N, {channels}, h, w)"
        z = as_float(z, "z", f"{shape} with scaled=True for {self.model}")
        if z.ndim == 5 and self.patch == (1, 1):
            n, c, frames, h, w = z.shape
            return self.raw(z.reshape(n, c, frames * h, w)).reshape(z.shape)
        if z.ndim != 4 or z.shape[1] != channels:
            scaled = Named("scaled", True)
            raise ArgumentError("z", (f"shape {shape} with ", scaled, f" for {self.model}"), str(z.shape))
        n, _, h, w = z.shape
        latents = (z * self.std + self.mean).reshape(n, -1, a, b, h, w).transpose(0, 1, 4, 2, 5, 3)
        unpacked: np.ndarray = latents.reshape(n, channels // (a * b), h * a, w * b)
        return unpacked


def held_by_pipelines(arch: Mapping[str, Any], tensor: Callable[[str], np.ndarray]) -> Scaling | Normalised:
    """Return how pipelines hold the latents of an architecture. tensor: returns a tensor of its model by name. The core
    refuses an unknown scaling."""

    def column(values: Any) -> np.ndarray:
        return np.asarray(values, np.float32).reshape(-1, 1, 1)

    if arch.get("family") == "ltx":
        mean, std = (column(tensor(f"latents_{name}")) for name in ("mean", "std"))
        return Normalised(arch["name"], mean, std / np.float32(arch["scaling_factor"]), (1, 1))
    if patch := arch.get("patch_size"):
        mean, variance = (column(tensor(f"bn.running_{name}")) for name in ("mean", "var"))
        return Normalised(arch["name"], mean, np.sqrt(variance + np.float32(arch["batch_norm_eps"])), patch)
    if "latents_mean" in arch and arch["scaling_factor"] is not None:
        std = column(arch["latents_std"]) / np.float32(arch["scaling_factor"])
        return Normalised(arch["name"], column(arch["latents_mean"]), std, (1, 1))
    return Scaling(arch["scaling_factor"], arch["shift_factor"])
