"""Encode and decode batches: a class that pickles as its settings and opens its VAE once in each process.

A batch is a dict of columns, as Ray Data, datasets, Daft, Spark and DataLoaders pass it.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from vaemem._common import DTYPES, choose, flag, grouped, meant, need, whole
from vaemem._errors import ArgumentError, Named
from vaemem._types import Dtype, Precision
from vaemem.engine import images
from vaemem.engine.arguments import as_path, default_threads
from vaemem.engine.limits import Limit, parse_size
from vaemem.engine.records import Encoded
from vaemem.engine.vae import VAE

Batch = Mapping[str, Any]

_OPEN: weakref.WeakValueDictionary[tuple[object, ...], VAE] = weakref.WeakValueDictionary()  # by process and settings


def noise_of(seed: int, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return an image's noise: standard normal float32 that only the seed, the name and the shape determine."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest())
    return np.random.default_rng([seed, key]).standard_normal(shape, dtype=np.float32)


def _column(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays of one shape as one array, and others as an array of objects."""
    if arrays and len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    column = np.empty(len(arrays), object)
    for i, array in enumerate(arrays):
        column[i] = array
    return column


@dataclass(frozen=True)
class _Worker:
    """The settings of a VAE, which the first batch opens."""

    _parts: ClassVar[str]
    weights: str | os.PathLike[str]
    model: str | None = None
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None
    memory_limit: Limit = None
    dtype: Dtype = "float32"
    precision: Precision = "highest"
    scaled: bool = False
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        as_path(self.weights, "weights", "the path of a file or directory that every worker sees")
        limit, threads = self.memory_limit, self.threads
        self._set("dtype", meant("dtype", self.dtype, DTYPES))
        self._set("scaled", flag("scaled", self.scaled))
        self._set("threads", None if threads is None else whole("threads", threads))
        if limit is not None and limit != "auto":
            self._set("memory_limit", parse_size("memory_limit", limit))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def memory_bytes(self) -> int:
        """Bytes that the VAE needs at most: its `memory_limit`. Images that wait for it come on top. ValueError without
        a limit in bytes.
        """
        if not isinstance(self.memory_limit, int):
            raise ArgumentError("memory_limit", "bytes, such as '2 GiB'", repr(self.memory_limit))
        return self.memory_limit

    @property
    def num_cpus(self) -> int:
        """Threads of a run: `threads`, or by default the processors that this process may use."""
        return default_threads() if self.threads is None else self.threads

    def open(self) -> VAE:
        """Return this process's VAE with these settings. The instance keeps it alive; other instances share it.

        >>> vae.save("model")
        >>> vaemem.Encoder("model").open()
        <VAE custom: ... parameters, parts=encoder, ... MiB held>
        """
        weights = os.fspath(self.weights)
        settings = self.model, str(self.config), self.dtype, self.precision, self.device, self.num_cpus
        key = (os.getpid(), self._parts, weights, *settings)
        if (vae := _OPEN.get(key)) is None:
            if "://" in weights:
                weights = need("fsspec", f"weights={weights!r}").open_local(f"simplecache::{weights}")
            how: dict[str, Any] = {"dtype": self.dtype, "precision": self.precision, "device": self.device}
            vae = _OPEN[key] = VAE.load(weights, self.model, self.config, self._parts, **how)
            vae.threads = self.num_cpus
        self._set("_kept", vae)
        return vae

    def _steps(self, positions: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the positions of the images of each run. Under a limit a run has one image, because a batch needs more
        memory. In float16 too, so that an overflow changes no other image."""
        step = len(positions) if self.memory_limit is None and self.dtype != "float16" else 1
        for start in range(0, len(positions), step):
            yield positions[start : start + step]


def _named(batch: Batch, column: str) -> Any:
    """Return a column; ValueError if it is missing."""
    if column not in batch:
        raise ArgumentError("batch", f"a column {column!r}", f"the columns {', '.join(map(repr, batch)) or 'of none'}")
    return batch[column]


def _without(batch: Batch, column: str) -> dict[str, Any]:
    """Return the columns except one; ValueError if that one is missing."""
    _named(batch, column)
    return {name: batch[name] for name in batch if name != column}


@dataclass(frozen=True)
class Encoder(_Worker):
    """Encode batches of images with a VAE that opens once in each process. Call it with a batch.

    An instance pickles as its settings, so workers get it whole. On CPUs with the same instruction sets, a latent has
    the same bits in every batch, on every worker and with any number of threads.

    Parameters
    ----------
    weights : path
        As for `VAE.load`, at a path that every worker sees, or a URL of one file that fsspec opens, such as
        ``s3://...``.
    model, config, dtype, precision, device
        As for `VAE.load`.
    memory_limit : int or str, optional
        As for `VAE.encode`. With a limit, images are encoded one by one.
    scaled : bool
        Return latents as pipelines hold them, as in `VAE.encode`.
    threads : int, optional
        Threads of a run. If several workers run on one machine, divide its processors among them.
    sample : {"mean", "moments"} or int
        What to return: the mean; mean and log-variance, raw; or a sample with this seed. The noise of an image's sample
        depends on the seed and on the image's name.
    pad : {"reflect", "edge"}, optional
        Pad images to whole latents, as in `VAE.encode`.
    image, name : str
        The columns of the images and of their names. A name, such as a path, must not depend on the batch. Only samples
        need names.

    Notes
    -----
    An image is a uint8 array (H, W, 3), floats (3, H, W) in [-1, 1], a Pillow image, a path, or the bytes of a file.
    Sizes of images may differ. The result has the batch's other columns. Instead of the images it has ``latent`` and
    ``size``: the latents (C, h, w) and the images' height and width before padding. Latents of several sizes become an
    array of objects.

    Examples
    --------
    >>> vae.save("vae.safetensors")
    >>> encode = vaemem.Encoder("vae.safetensors", config=vae.arch, sample=0, threads=1)
    >>> batch = {"image": np.zeros((2, 64, 64, 3), np.uint8), "name": ["a.png", "b.png"]}
    >>> latents = encode(batch)
    >>> latents["latent"].shape, latents["name"]
    ((2, 4, 8, 8), ['a.png', 'b.png'])
    >>> again = encode({"image": batch["image"][1:], "name": ["b.png"]})
    >>> bool((again["latent"][0] == latents["latent"][1]).all())
    True
    """

    _parts: ClassVar[str] = "encoder"
    sample: int | str = "mean"
    pad: str | None = None
    image: str = "image"
    name: str = "name"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sample, str):
            choose("sample", self.sample, ("mean", "moments"))
        else:
            self._set("sample", whole("sample", self.sample, least=0))
        if self.sample == "moments" and self.scaled:
            raise ArgumentError("sample", ("mean or a seed with ", Named("scaled", True)), "'moments', which are raw")
        if self.pad is not None:
            choose("pad", self.pad, images.PADS)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Encode a batch, a dict of columns."""
        others, vae = _without(batch, self.image), self.open()
        pictures = [
            images.read_image(one, []) if images.is_image(one) else np.asarray(one) for one in batch[self.image]
        ]
        names = [] if isinstance(self.sample, str) else [str(name) for name in _named(batch, self.name)]
        latents, sizes = [np.empty(0)] * len(pictures), np.zeros((len(pictures), 2), np.int64)
        alike = grouped(range(len(pictures)), lambda i: (pictures[i].shape, pictures[i].dtype))
        for positions in (step for same in alike.values() for step in self._steps(same)):
            stacked = np.stack([pictures[i] for i in positions])
            if self.dtype == "float16":
                vae.trim()
            encoded = vae.encode(stacked, self.scaled, memory_limit=self.memory_limit, pad=self.pad)
            found = self._taken(encoded, [names[i] for i in positions] if names else [])
            for i, latent in zip(positions, found, strict=True):
                latents[i], sizes[i] = latent, images.image_size(stacked)
        return others | {"latent": _column(latents), "size": sizes}

    def _taken(self, encoded: Encoded, names: Sequence[str]) -> np.ndarray:
        """Return the mean, the moments or a sample, as `sample` says. names: the images', for a sample."""
        if isinstance(self.sample, int):
            shape = encoded.mean.shape[1:]
            noise = np.stack([noise_of(self.sample, name, shape) for name in names])
            return np.asarray(encoded.sample(noise=noise))
        return np.asarray(encoded.moments if self.sample == "moments" else encoded.mode())


@dataclass(frozen=True)
class Decoder(_Worker):
    """Decode batches of latents with a VAE that opens once in each process. Call it with a batch.

    Parameters
    ----------
    weights, model, config, memory_limit, dtype, precision, scaled, threads, device
        As for `Encoder`.

    Notes
    -----
    A batch has the columns that an `Encoder` returns: ``latent``, and, to cut padding off, ``size``. Moments decode as
    their mean. The result has the other columns and ``image``: bytes (H, W, 3). Images of several sizes become an array
    of objects.

    Examples
    --------
    >>> vae.save("vae.safetensors")
    >>> decode = vaemem.Decoder("vae.safetensors", config=vae.arch, threads=1, memory_limit="1 GiB")
    >>> decode({"latent": np.zeros((2, 4, 8, 8), np.float32), "name": ["a", "b"]})["image"].shape
    (2, 64, 64, 3)
    >>> decode.memory_bytes, decode.num_cpus  # for Ray's map_batches, which places workers by them
    (1073741824, 1)
    """

    _parts: ClassVar[str] = "decoder"

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Decode a batch, a dict of columns."""
        others, vae = _without(batch, "latent"), self.open()
        latents, channels = [np.asarray(one) for one in batch["latent"]], vae.arch["latent_channels"]
        if not self.scaled:  # of moments, the means
            latents = [one[:channels] if len(one) == 2 * channels else one for one in latents]
        sizes = [tuple(map(int, size)) for size in others.pop("size", ())] or [()] * len(latents)
        pictures = [np.empty(0)] * len(latents)
        alike = grouped(range(len(latents)), lambda i: (latents[i].shape, latents[i].dtype, sizes[i]))
        for positions in (step for same in alike.values() for step in self._steps(same)):
            stacked = np.stack([latents[i] for i in positions])
            if self.dtype == "float16":
                vae.trim()
            how: dict[str, Any] = {"memory_limit": self.memory_limit, "size": sizes[positions[0]] or None}
            for i, picture in zip(positions, vae.decode(stacked, self.scaled, "uint8", **how), strict=True):
                pictures[i] = picture
        return others | {"image": _column(pictures)}
