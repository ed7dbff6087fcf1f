"""A folder of latents:

    manifest.json               the VAE, the settings and the images; every run must agree with it
    latents-00000.safetensors   a tensor for each image, by name; the metadata tell sizes, crops, captions and errors,
                                and name the manifest
    errors.csv                  the images that could not be encoded

Each file of latents is written under another name, synced to disk and renamed. So a shard exists whole or not at all.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from vaemem._common import as_csv, reading
from vaemem._errors import ArgumentError, FileError, NoFileError
from vaemem._saving import replacing, write, writing_folder
from vaemem.datasets.buckets import Placed
from vaemem.datasets.trainers import Cache
from vaemem.engine.file_tensors import (
    FILE_NAMES,
    FLOATS,
    are_sizes,
    read_tensor,
    safetensors_header,
    safetensors_start,
)  # fmt: skip

FORMAT = "vaemem latents 1"
MANIFEST, ERRORS = "manifest.json", "errors.csv"
FLIPPED = " flipped"  # ends the name of a mirrored image's latent


class Shard(NamedTuple):
    """Images by name: how each became its bucket, with its caption; its latent, and the mirrored one; the errors."""

    records: dict[str, dict[str, Any]]
    latents: dict[str, list[np.ndarray]]
    errors: dict[str, str]


class Summary(NamedTuple):
    """The content of a folder or of a part: the number of images, the errors of others by name, a sentence for each
    shard or image that is missing or damaged, and whether all shards were counted."""

    images: int
    errors: dict[str, str]
    wrong: list[str]
    is_whole: bool


class Folder:
    """The files of a data set's latents."""

    _suffix = "safetensors"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._claimed: dict[str, Any] | None = None  # the manifest of this run

    def manifest(self) -> dict[str, Any]:
        """Return the description of the folder's latents; ValueError if there is none."""
        path = self.path / MANIFEST
        if not path.is_file():
            raise NoFileError("out", f"a folder with {MANIFEST}, which vaemem encode writes", "none", path=self.path)
        with reading("out", "a description of latents", path):
            held = json.loads(path.read_bytes())
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            raise FileError("out", f"a description of {FORMAT}", "another", path=path)
        return held

    def claim(self, manifest: Mapping[str, Any], must_exist: bool = False) -> None:
        """Make the folder; ValueError if it has latents that another manifest describes. Of processes that claim it at
        once, one writes its manifest, and the others compare theirs."""
        self._claimed = {"format": FORMAT, **manifest}
        if must_exist:
            self._compare(self._claimed)
            return
        with writing_folder(self.path):
            if (self.path / MANIFEST).exists():
                self._compare(self._claimed)
            else:
                write(self.path / MANIFEST, json.dumps(self._claimed, indent=2) + "\n")

    def _compare(self, manifest: Mapping[str, Any]) -> None:
        """Raise FileError if another manifest describes the folder."""
        old, new = _flat(self.manifest()), _flat(manifest)
        for key in {**new, **old}:
            if old.get(key) != new.get(key):
                wanted, advice = f"a folder whose {key} is {new.get(key)}", "choose another folder or remove this one"
                raise FileError("out", wanted, str(old.get(key)), advice, path=self.path)

    @functools.cached_property
    def _digest(self) -> str:
        """A hash of the manifest, which the shards name."""
        return hashlib.sha256(json.dumps(self._claimed or self.manifest(), sort_keys=True).encode()).hexdigest()

    def _check_manifest(self, path: Path, about: Mapping[str, str]) -> None:
        """Raise FileError for a shard of another manifest, as processes may leave it on file systems without locks."""
        if about.get("manifest", self._digest) != self._digest:
            advice = "remove it and encode again"
            raise FileError("out", f"a shard of this folder's {MANIFEST}", "one of another", advice, path=path)

    def shard(self, number: int) -> Path:
        """Return the path of a shard, which exists once it is whole."""
        return self.path / f"latents-{number:05d}.{self._suffix}"

    def shards(self) -> list[Path]:
        """List the shards that are there."""
        return sorted(self.path.glob(f"latents-*.{self._suffix}"))

    def commit(self, number: int, shard: Shard) -> None:
        """Write a shard, all or nothing."""
        tensors = {
            name + end: np.ascontiguousarray(latent)
            for name, latents in shard.latents.items()
            for end, latent in zip(("", FLIPPED), latents, strict=False)
        }
        records = {name: record | {"sha256": _hash_of(shard.latents[name])} for name, record in shard.records.items()}
        about = {"manifest": self._digest, "records": json.dumps(records), "errors": json.dumps(shard.errors)}
        entries = ((name, FILE_NAMES[latent.dtype.name], latent.shape) for name, latent in tensors.items())
        with replacing(self.shard(number)) as f:
            f.write(safetensors_start(entries, about))
            for latent in tensors.values():
                f.write(latent.view(FLOATS[FILE_NAMES[latent.dtype.name]][0]).data)

    def read(self, path: Path, latents: bool = True) -> Shard:
        """Read a shard, without latents from its header alone. Raise ValueError for a damaged shard, or a shard of
        another manifest."""
        with reading("out", "a shard of latents", path), open(path, "rb") as f:
            tensors, about = safetensors_header(f)
            records, errors = json.loads(about["records"]), json.loads(about["errors"])
            _check_records(records, errors, "sha256", str)
            if lost := records.keys() - {one.name for one in tensors}:
                raise ValueError(f"it has no latent of {min(lost)}")
            held = {one.name: read_tensor(f, one, one.shape) for one in tensors if latents}
        self._check_manifest(path, about)
        found = {name: [held[key] for key in (name, name + FLIPPED) if key in held] for name in records if latents}
        return Shard(records, found, errors)

    def changed(self, shard: Shard) -> Iterator[str]:
        """Yield the images of a shard with latents that have changed."""
        for name, latents in shard.latents.items():
            if _hash_of(latents) != shard.records[name]["sha256"]:
                yield name

    def sum_up(self, names: Sequence[Sequence[str]], part: tuple[int, int] = (1, 1), check: bool = False) -> Summary:
        """Count the images of a part's shards. If all shards of the data set are there, count all and write errors.csv;
        so the last part to end does it. names: of each shard's images. check: read every latent and write nothing."""
        numbers, images, errors, wrong = range(part[0] - 1, len(names), part[1]), 0, dict[str, str](), list[str]()
        if is_ended := not check and {*map(self.shard, range(len(names)))} <= {*self.shards()}:
            numbers = range(len(names))
        for number in numbers:
            path = self.shard(number)
            try:
                shard = self.read(path, latents=check)
            except ValueError as error:
                wrong.append(str(error))
                continue
            images += len(shard.records)
            errors |= shard.errors
            if shard.records.keys() | shard.errors.keys() != {*names[number]}:
                wrong.append(f"{path}: expected the images of this shard, got others")
            wrong += [f"{path}: the latent of {name} has changed" for name in self.changed(shard) if check]
        if is_ended:
            rows = [{"name": name, "error": error} for name, error in errors.items()]
            write(self.path / ERRORS, as_csv(rows, ("name", "error")))
        return Summary(images, errors, wrong, len(numbers) == len(names))


class CacheFolder(Folder):
    """A trainer's cache: its files, and the folder .vaemem with the manifest and a record of each shard."""

    _suffix = "json"

    def __init__(self, path: str | os.PathLike[str], cache: Cache) -> None:
        super().__init__(Path(path, ".vaemem"))
        self._cache = cache

    def commit(self, number: int, shard: Shard) -> None:
        """Write the files of each image, and at last the record. A name that becomes too long is its image's error."""
        records, errors = {}, dict(shard.errors)
        for name, record in shard.records.items():
            files = self._cache.files(
                self._cache, name, Placed(*(record[key] for key in Placed._fields)), shard.latents[name]
            )
            try:
                for path, data in files.items():
                    target = path_within(self.path.parent, path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write(target, data)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                errors[name] = str(error.strerror)
                continue
            records[name] = record | {"files": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}}
        about = {"manifest": self._digest, "records": records, "errors": errors}
        write(self.shard(number), json.dumps(about, indent=1) + "\n")

    def read(self, path: Path, latents: bool = True) -> Shard:
        """Read the record of a shard."""
        with reading("out", "the record of a shard", path):
            held = json.loads(path.read_bytes())
            _check_records(held["records"], held["errors"], "files", dict)
        self._check_manifest(path, held)
        return Shard(held["records"], {}, held["errors"])

    def changed(self, shard: Shard) -> Iterator[str]:
        """Yield the images with a file that is missing or has changed."""
        for name, record in shard.records.items():
            for path, sha256 in record["files"].items():
                file = self.path.parent / path
                if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
                    yield name


def path_within(folder: Path, name: str) -> Path:
    """Return the path of a file below a folder; ArgumentError if its name leads out of the folder."""
    steps = PurePath(name)
    if steps.anchor or ".." in steps.parts:
        raise ArgumentError("name", "a path below the folder", repr(name))
    return folder / steps


def _hash_of(latents: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(latent.tobytes() for latent in latents)).hexdigest()


def _check_records(records: Any, errors: Any, more: str, kind: type) -> None:
    """Raise ValueError unless records and errors are as `commit` writes them. more: another key, with its type."""

    def is_whole(record: Any) -> bool:
        if not (isinstance(record, dict) and isinstance(record.get(more), kind)):
            return False
        pairs: list[Any] = [record.get(part) for part in Placed._fields]
        return all(are_sizes(pair) and len(pair) == 2 for pair in pairs)

    if not (isinstance(records, dict) and isinstance(errors, dict) and all(map(is_whole, records.values()))):
        raise ValueError("its records are damaged")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by path."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key} ") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
