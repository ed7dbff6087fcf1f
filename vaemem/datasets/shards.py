"""Encode a data set into a folder, shard by shard. A kill at any moment loses at most one shard's work.

The images of a shard are chosen before any image is read: the next images in the order of the sources. An image that
cannot be read counts too. So a shard's bytes depend only on its images and the settings, and a resumed run makes the
same files as a run that was never killed.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vaemem._common import latent_factor, need, saved, whole
from vaemem._errors import ArgumentError, Named, inside
from vaemem._saving import write
from vaemem.datasets import buckets
from vaemem.datasets.encoder import Decoder, Encoder
from vaemem.datasets.folder import FLIPPED, MANIFEST, CacheFolder, Folder, Shard, Summary, path_within
from vaemem.datasets.sources import UNREADABLE, Read, SourceImage, digest_of, list_images
from vaemem.datasets.trainers import Cache, stem_of
from vaemem.engine.configs import config_of
from vaemem.engine.images import read_image, to_pillow

SHARD = 256  # images; their latents wait in memory
BATCH_PIXELS = 1 << 20  # of images of one size in a run: one run of many small images is faster than many runs
MOST_BUCKET = 1 << 16  # pixels of a bucket's side: the list of buckets is as long
AHEAD = 32  # images that are read and scaled before their turn
READERS = 4  # threads that read and scale while the engine encodes

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Preparation:
    """How to bring images to the sizes of buckets.

    side: of a square bucket; None keeps the images' sizes. step: divides the sides of buckets. pad: pad instead of
    cropping. flip: encode mirrored images too. sides: the least and the largest side of a bucket. cache: make the files
    of a trainer.
    """

    side: int | None = None
    step: int | None = None
    pad: str | None = None
    flip: bool = False
    sides: buckets.Sides | None = None
    cache: Cache | None = None

    def place(self, size: buckets.Sides, factor: int) -> buckets.Placed:
        """Choose an image's bucket, and how to scale and crop it. factor: the VAE's."""
        if self.cache and self.side:
            return buckets.place(size, *self.cache.bucket(size, self.side, self.step or self.cache.step, self.sides))
        step = self.step or factor
        if self.side is None:
            return buckets.place(size, size, buckets.own_bucket(size, step, self.pad is not None))
        bucket = buckets.aspect_bucket(size, self.side, step, self.sides)
        return buckets.place(size, (buckets.contained if self.pad else buckets.covering)(size, bucket), bucket)

    def read(self, read: Read, factor: int) -> Ready:
        """Read, decode and scale an image."""
        data, caption = read()
        picture = read_image(data, [], turn=self.cache is None or self.cache.turns)
        placed = self.place((picture.shape[1], picture.shape[0]), factor)
        filters = self.cache.filters if self.cache else ("LANCZOS", "LANCZOS")
        return Ready(buckets.fit_picture(picture, placed, self.pad, *filters), placed, caption)

    def check(self, factor: int) -> None:
        """Raise ArgumentError for settings that contradict each other or suit neither the VAE nor the trainer."""
        cache, side = self.cache, self.side
        step = self.step or (cache.step if cache else factor)
        if step % factor:
            raise ArgumentError("step", f"a multiple of {factor} for this VAE", str(step))
        for name, one in (("buckets", side), ("bucket_sides", self.sides and max(self.sides)), ("step", step)):
            if one is not None:
                whole(name, one, most=MOST_BUCKET)
        if side is not None and side < step:
            raise ArgumentError("buckets", f"at least {step}, the step of their sides", str(side))
        if self.sides:
            least, most = self.sides
            if side is None:
                raise ArgumentError("bucket_sides", "", ("cannot be used without ", Named("buckets")))
            if cache and not cache.limits:
                raise ArgumentError("bucket_sides", "", f"{cache.trainer} has its own limits")
            if least % step or most % step or not least <= side <= most:
                wanted = f"multiples of {step}, one of at most {side} and one of at least {side}"
                raise ArgumentError("bucket_sides", wanted, f"{least} and {most}")
        if not cache:
            return
        if side is None:
            raise ArgumentError("buckets", f"the side of {cache.trainer}'s buckets", "None")
        if self.pad:
            raise ArgumentError("pad", f"None for {cache.trainer}, which crops", repr(self.pad))
        if self.flip and not cache.flips:
            raise ArgumentError("flip", "", f"{cache.trainer} keeps no mirrored latents")
        self.place((side, side), factor)


class Ready(NamedTuple):
    """An image that can be encoded."""

    picture: np.ndarray
    placed: buckets.Placed
    caption: str | None


def encode_dataset(
    sources: Iterable[str | PathLike[str]],
    out: str | PathLike[str],
    encoder: Encoder,
    preparation: Preparation = Preparation(),
    shard: int = SHARD,
    part: tuple[int, int] = (1, 1),
    tell: Tell = lambda done, total: None,
    report: Callable[[str, str], None] = lambda name, error: None,
    check: bool = False,
) -> Summary:
    """Encode the images of sources into a folder. Continue a run that was killed.

    sources: see `list_images`. shard: images in a file. part: (k, n) encodes the k-th of n parts. tell: gets (images
    done, images to do) of this run. report: gets the name and the error of an image that is passed over. check: encode
    nothing; list missing and damaged shards and latents. ValueError if the folder has latents of another VAE, other
    settings or other images.
    """
    cache, (k, n) = preparation.cache, part
    folder = folder_of(out, preparation)
    encoder = replace(encoder, scaled=cache.scaled) if cache else encoder
    if cache and encoder.sample == "moments":
        raise ArgumentError("sample", f"a seed or mean for {cache.trainer}", "'moments'")
    need("PIL.Image", "reading images").init()  # now, so that too many open files cannot hide a format later
    vae = encoder.open()
    factor = latent_factor(vae.arch) * (vae.arch.get("patch_size", (1, 1))[0] if encoder.scaled else 1)
    preparation.check(factor)
    whole("shard", shard)
    items = list_images(sources)
    if cache:
        check_names(items, cache)
    folder.claim(_manifest(items, encoder, preparation, shard), must_exist=check)
    parts = split_shards(items, shard)
    if not check:
        todo = [i for i in range(k - 1, len(parts), n) if not folder.shard(i).exists()]
        done, total = 0, sum(len(parts[i]) for i in todo)
        ready = read_ahead((item for i in todo for item in parts[i]), lambda read: preparation.read(read, factor))
        for i in todo:
            batches = _Batches(encoder, preparation.flip)
            for item in parts[i]:
                batches.add(item.name, next(ready))
                done += 1
                tell(done, total)
            made = batches.finish([item.name for item in parts[i]])
            for name, error in made.errors.items():
                report(name, error)
            folder.commit(i, made)
    return folder.sum_up([[item.name for item in items] for items in parts], part, check)


def check_names(items: Iterable[SourceImage], cache: Cache) -> None:
    """Raise ArgumentError if two images have the same files in a trainer's cache."""
    seen = set[str]()
    for stem in (stem_of(item.name) for item in items):
        if (stem := stem if cache.folders else stem.rpartition("/")[2]) in seen:
            wanted = f"images of different names without suffix for {cache.trainer}"
            raise ArgumentError("images", wanted, f"two named {stem!r}")
        seen.add(stem)


def split_shards(items: Sequence[SourceImage], shard: int) -> list[Sequence[SourceImage]]:
    """Return the images of each shard."""
    return [items[start : start + shard] for start in range(0, len(items), shard)]


def folder_of(out: str | PathLike[str], preparation: Preparation) -> Folder:
    """Return the folder that keeps latents, or a trainer's cache."""
    return CacheFolder(out, preparation.cache) if preparation.cache else Folder(out)


def _manifest(items: Sequence[SourceImage], encoder: Encoder, preparation: Preparation, shard: int) -> dict[str, Any]:
    """Describe everything that the bytes of the shards depend on: the VAE, the settings and the images."""
    vae = replace(encoder, device="cpu", dtype="float32", precision="highest").open()
    found = hashlib.sha256(json.dumps(config_of(vae.arch), sort_keys=True).encode())
    for name, array in vae.state_dict().items():
        found.update(name.encode() + array.tobytes())
    settings: dict[str, Any] = {name: getattr(encoder, name) for name in ("dtype", "precision", "sample", "scaled")}
    settings |= {name: getattr(preparation, name) for name in ("side", "step", "pad", "flip")}
    settings |= {"sides": preparation.sides and list(preparation.sides), "shard": shard}
    if cache := preparation.cache:
        settings["for"] = f"{cache.trainer}:{cache.name}"
    return {
        "vae": {"model": vae.model, "sha256": found.hexdigest()},
        "settings": settings,
        "images": {"count": len(items), "sha256": digest_of(items)},
    }


def read_ahead(items: Iterable[SourceImage], prepare: Callable[[Read], Ready]) -> Iterator[Ready | str]:
    """Yield each image, or why it cannot be read, in order. Threads read the next images meanwhile. OSError if the
    system
    fails: the image may be good."""

    def attempt(read: Read) -> Ready | str:
        try:
            return prepare(read)
        except ValueError as error:
            if isinstance(error, ArgumentError):
                error.argument = ""  # the name of the image says it
            return str(error)
        except UNREADABLE as error:
            return error.strerror or str(error)

    waiting = deque[tuple[Read, Future[Ready | str]]]()  # a group of rows lives as long as one of them waits
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for item in items:
                read = item.open()
                waiting.append((read, pool.submit(attempt, read)))
                if len(waiting) > AHEAD:
                    yield waiting.popleft()[1].result()
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Batches:
    """Collects a shard. Images wait until those of one size fill a batch."""

    def __init__(self, encoder: Encoder, flip: bool) -> None:
        self._encoder, self._flip = encoder, flip
        self._waiting: dict[buckets.Sides, list[tuple[str, Ready]]] = {}
        self._shard = Shard({}, {}, {})

    def add(self, name: str, one: Ready | str) -> None:
        """Take the next image, or the error of one that cannot be read."""
        if isinstance(one, str):
            self._shard.errors[name] = one
            return
        same = self._waiting.setdefault(one.placed.bucket, [])
        same.append((name, one))
        if len(same) * math.prod(one.placed.bucket) >= BATCH_PIXELS:
            self._encode(self._waiting.pop(one.placed.bucket))

    def finish(self, names: Sequence[str]) -> Shard:
        """Encode the images that wait, and return all in the order of their names."""
        while self._waiting:
            self._encode(self._waiting.popitem()[1])

        def in_order(part: Any) -> dict[str, Any]:
            return {name: part[name] for name in names if name in part}

        return Shard(*map(in_order, self._shard))

    def _encode(self, images: list[tuple[str, Ready]]) -> None:
        names, pictures = [name for name, _ in images], [one.picture for _, one in images]
        if self._flip:
            names, pictures = names + [name + FLIPPED for name in names], pictures + [one[:, ::-1] for one in pictures]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a latent that is not finite is its image's error
            try:
                found = self._encoder({self._encoder.image: pictures, self._encoder.name: names})["latent"]
            except ValueError as error:  # such as a memory limit, for images of this size
                self._shard.errors.update({name: str(error) for name, _ in images})
                return
        for i, (name, one) in enumerate(images):
            with np.errstate(over="ignore"):  # float16 has infinity for numbers beyond its range
                latents = [latent.astype(self._encoder.dtype) for latent in found[i :: len(images)]]
            if all(np.isfinite(latent).all() for latent in latents):
                self._shard.latents[name] = latents
                caption = {} if one.caption is None else {"caption": one.caption}
                self._shard.records[name] = one.placed._asdict() | caption
            else:
                self._shard.errors[name] = "its latent is not finite"


def decode_dataset(
    path: str | PathLike[str], out: str | PathLike[str], decoder: Decoder, tell: Tell = lambda done, total: None
) -> int:
    """Decode the latents of a folder to PNG files, without padding and mirrored ones; return their number. FileError
    if a name leads out of `out`."""
    need("PIL.Image", "writing pictures")
    folder, done = Folder(path), 0
    with inside("latents", path=folder.path / MANIFEST, caught=(KeyError, TypeError)):
        decoder = replace(decoder, scaled=folder.manifest()["settings"]["scaled"])
    shards = folder.shards()
    for number, file in enumerate(shards, 1):
        shard = folder.read(file)
        with inside("latents", path=file):
            files = {name: name if name.lower().endswith(".png") else f"{name}.png" for name in shard.records}
            targets = {name: path_within(Path(out), file) for name, file in files.items()}
        names = list(targets)
        for batch in (names[start : start + AHEAD] for start in range(0, len(names), AHEAD)):
            placed = [buckets.Placed(*(shard.records[name][part] for part in buckets.Placed._fields)) for name in batch]
            latents, sizes = [shard.latents[name][0] for name in batch], [one.inner for one in placed]
            for name, picture in zip(batch, decoder({"latent": latents, "size": sizes})["image"], strict=True):
                targets[name].parent.mkdir(parents=True, exist_ok=True)
                write(targets[name], saved(to_pillow(picture[None])[0].save, format="PNG"))
                done += 1
        tell(number, len(shards))
    return done
