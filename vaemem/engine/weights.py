"""Weights files: safetensors read into the core's one packed copy, and written back. `_layouts` knows the names."""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from vaemem import _core
from vaemem.engine.layouts import (
    CONFIG,
    DTYPES,
    LAYOUTS,
    Arch,
    Shape,
    as_path,
    check,
    config_of,
    detect,
    find_layout,
    half_of,
    is_attention_matrix,
    ours,
    read_config,
    spell,
)

__all__ = ["detect", "load", "random_tensors", "read_config", "save"]

PARTS = ("all", "encoder", "decoder")
WEIGHTS = "diffusion_pytorch_model.safetensors"
WEIGHTS_FP16 = "diffusion_pytorch_model.fp16.safetensors"

# ---- reading ----


def _read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Name -> {dtype, shape, data_offsets} and where the data starts. The safetensors package judges the file:
    header inside it, offsets in order and without holes, shapes whose products neither overflow nor disagree."""
    try:
        with safe_open(file, framework="np"):
            pass
    except SafetensorError as error:
        raise ValueError(f"path: want a safetensors file, got {file}: {error}") from None
    except OSError as error:  # a file that cannot be mapped; the package does not name it
        raise OSError(f"path: cannot read {file}: {error}") from error
    with open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _read_tensor(file: Path, entry: Mapping[str, Any], start: int, shape: Shape) -> np.ndarray:
    """A view of the file's pages, mapped for this tensor alone: pages that stay mapped count as the process' own,
    so a map of the whole file would come to hold all of it. Copied only where the file did not align it."""
    stored, native = DTYPES[entry["dtype"]]
    begin = start + entry["data_offsets"][0]
    mapped = np.memmap(file, dtype=stored, mode="r", offset=begin, shape=tuple(shape))
    array = mapped.astype(mapped.dtype.newbyteorder("="), copy=False).view(native)
    return np.require(array, requirements=["C_CONTIGUOUS", "ALIGNED"])


def _locate(path: Path, need_config: bool) -> tuple[Path, Path | None]:
    """The weights file, and the config.json beside it where path is a directory and it is needed."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"path: want a .safetensors file or a diffusers directory, got {path}: no such file"
            )
        if not path.is_file():
            raise ValueError(f"path: want a .safetensors file or a diffusers directory, got {path}, which is neither")
        return path, None
    files = [path / name for name in (WEIGHTS, WEIGHTS_FP16) if (path / name).is_file()]
    if not files:
        raise FileNotFoundError(f"path: want a directory with {WEIGHTS}, got {path}, which has none")
    if need_config and not (path / CONFIG).is_file():
        raise FileNotFoundError(f"path: want a directory with {CONFIG} (or pass model= or config=), got {path}")
    return files[0], path / CONFIG if need_config else None


def _arch_asked_for(model: str | None, config: Any) -> Arch | None:
    if model is not None and (not isinstance(model, str) or model not in _core.models()):
        raise ValueError(f"model: want one of {', '.join(_core.models())}, got {model!r}")
    if config is None:
        return None if model is None else _core.models()[model]
    arch = read_config(config)
    if model is not None and arch["name"] != model:
        raise ValueError(f"model: want one that config= describes ({arch['name']}), or only one of both, got {model!r}")
    return arch


def load(
    path: str | os.PathLike[str],
    model: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    parts: str = "all",
    backend: Any = None,
) -> _core.Model:
    """Reads a weights file into a new core model.

    Parameters
    ----------
    path : path
        A safetensors file of any layout (float32, float16 or bfloat16), or a diffusers directory, whose
        ``config.json`` is then the architecture.
    model : str, optional
        ``"sd15"``, ``"sdxl"`` or ``"flux"``: wins over what the file says, and must fit its tensors.
    config : path or mapping, optional
        As `read_config` takes it; wins likewise.
    parts : {"all", "encoder", "decoder"}
        The half to read; the file need not hold the other, and its tensors are not looked at.
    backend : capsule, optional
        Of a GPU: tensors go there one by one.

    Returns
    -------
    _core.Model
        Owns a packed copy of the tensors, all of them set. Nothing of the file stays mapped.

    Raises
    ------
    ValueError
        An unknown model, layout or parts; a file that is damaged or no safetensors file; a tensor that is missing,
        extra, misshapen or of another dtype, by its name in the file, with what was wanted and what came.
    FileNotFoundError
        No such file, or a directory without weights or config.
    MemoryError
        No room for the packed copy.

    Notes
    -----
    The peak while loading is the packed copy plus one tensor as it lies in the file.
    """
    if parts not in PARTS:
        raise ValueError(f"parts: want one of {', '.join(PARTS)}, got {parts!r}")
    arch = _arch_asked_for(model, config)
    file, beside = _locate(as_path(path, "path"), need_config=arch is None)
    if beside:
        arch = read_config(beside)
    header, start = _read_header(file)
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    try:
        layout, prefix = find_layout(shapes)
        if arch is None:
            arch = detect(shapes, parts)[2]
        result = _core.Model(arch, parts, backend)
        tensors = dict(result.tensors)
        spelt = spell(tensors, layout, len(arch["block_out_channels"]))
        extra = [prefix + name for name in ours(shapes, prefix, parts) - set(spelt.values())]
        dtypes = {name: entry["dtype"] for name, entry in header.items()}
        wanted_by = f"{arch['name']}{'' if parts == 'all' else f' ({parts})'} in layout {layout}"
        check(shapes, tensors, spelt, prefix, wanted_by, dtypes, extra)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    for name, shape in tensors.items():
        result.set_tensor(name, _read_tensor(file, header[prefix + spelt[name]], start, shape))
    return result


# ---- writing ----


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes path's place when the block ends well, and leaves no trace when it does not."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as f:
            yield f
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_tensors(f: IO[bytes], model: _core.Model, layout: str) -> None:
    """The safetensors format: the header's length in 8 bytes, the header in JSON, the tensors end to end. Written
    here because the package wants all tensors in memory at once; this holds one."""
    tensors = model.tensors
    spelt = spell([name for name, _ in tensors], layout, len(model.arch["block_out_channels"]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        stored = (*shape, 1, 1) if layout != "diffusers" and is_attention_matrix(name, shape) else shape
        begin, end = end, end + 4 * math.prod(shape)
        header[spelt[name]] = {"dtype": "F32", "shape": list(stored), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    f.write(len(text).to_bytes(8, "little") + text)
    for name, _ in tensors:
        f.write(model.get_tensor(name).astype("<f4", copy=False).data)


def save(model: _core.Model, path: str | os.PathLike[str], layout: str = "diffusers") -> None:
    """Writes a model's tensors, in float32.

    Parameters
    ----------
    model : _core.Model
        Borrowed; all its tensors are set.
    path : path
        A name that ends in ``.safetensors``: one file. Otherwise, for ``"diffusers"``, a directory, made where there
        is none, that gets ``config.json`` and ``diffusion_pytorch_model.safetensors``.
    layout : {"diffusers", "ldm", "bfl"}
        ``"ldm"`` wants both quant convs, ``"bfl"`` none and the middle attention.

    Raises
    ------
    ValueError
        An unknown layout, one that cannot hold the model, a path of the wrong kind, or tensors that were never set.
    OSError
        The file cannot be written. Whatever was there before is as it was.

    Notes
    -----
    One tensor is in memory at a time. Files without a ``config.json`` do not tell norm_num_groups or the scaling.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: want one of {', '.join(LAYOUTS)}, got {layout!r}")
    arch = model.arch
    quant = (arch["use_quant_conv"], arch["use_post_quant_conv"])
    if layout == "ldm" and not all(quant):
        raise ValueError(
            f"layout: ldm always has both quant convs, and {arch['name']} has {sum(quant)}: want diffusers"
            f"{'' if any(quant) else ' or bfl'}"
        )
    if layout == "bfl" and any(quant):
        raise ValueError(
            f"layout: bfl has no quant convs, and {arch['name']} has {sum(quant)}: want diffusers"
            f"{' or ldm' if all(quant) else ''}"
        )
    if layout == "bfl" and not arch["mid_block_add_attention"]:
        raise ValueError(f"layout: bfl always has the middle attention, and {arch['name']} has none: want diffusers")
    unset = model.missing()
    if unset:
        raise ValueError(f"model: want every tensor set, got {len(unset)} that are not, such as {unset[0]}")
    target = as_path(path, "path")
    if target.suffix == ".safetensors":
        if target.is_dir() or not target.parent.is_dir():
            raise ValueError(f"path: want a file in a directory that exists, got {target}")
        with _replacing(target) as f:
            _write_tensors(f, model, layout)
        return
    if layout != "diffusers":
        raise ValueError(f"path: want a name that ends in .safetensors for layout {layout}, got {target}")
    if {half_of(name) for name, _ in model.tensors} != {"encoder", "decoder"}:
        raise ValueError(f"path: want a name that ends in .safetensors for half a model, got {target}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"path: want a directory or a name that ends in .safetensors, got the file {target}")
    new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with _replacing(target / CONFIG) as c, _replacing(target / WEIGHTS) as f:
            c.write(json.dumps(config_of(arch), indent=2).encode() + b"\n")
            _write_tensors(f, model, layout)
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # not empty: one of the two files is whole already
                target.rmdir()
        raise


# ---- random weights ----


def random_tensors(model: _core.Model, seed: int) -> None:
    """Sets every tensor of a model to random numbers of the size that an untrained one has.

    Convolutions and linear layers as PyTorch initialises them, weight and bias uniform within 1/sqrt(fan_in)
    (``kaiming_uniform_(a=sqrt(5))``); norms unlike PyTorch, 1 + 0.1 N(0, 1) and 0.1 N(0, 1), so that a skipped one
    shows. Numbers are drawn per tensor from (seed, name) with PCG64: half a model has the same as the whole.

    Parameters
    ----------
    model : _core.Model
        Its tensors are set, whatever they were.
    seed : int
        0 or more.

    Raises
    ------
    ValueError, TypeError
        `seed` is negative, or no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed: want an integer, got {type(seed).__name__}")
    if seed < 0:
        raise ValueError(f"seed: want 0 or more, got {seed}")
    shapes: dict[str, Shape] = dict(model.tensors)
    for name, shape in shapes.items():
        stem, _, kind = name.rpartition(".")
        rng = np.random.Generator(np.random.PCG64([int(seed), int.from_bytes(name.encode(), "little")]))
        weight = shapes[f"{stem}.weight"]
        if len(weight) == 1:  # a norm's affine
            values = rng.standard_normal(shape, dtype=np.float32)
            values *= np.float32(0.1)
            values += np.float32(kind == "weight")
        else:
            values = rng.random(shape, dtype=np.float32)
            values -= np.float32(0.5)
            values *= np.float32(2 / math.sqrt(math.prod(weight[1:])))
        model.set_tensor(name, values)
