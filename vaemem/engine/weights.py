"""Read weights files into the core's one packed copy, and write them as safetensors. `layouts` knows the names."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from vaemem import _core
from vaemem._common import choose
from vaemem._errors import ArgumentError, ArgumentTypeError, FileError, Named, NoFileError, inside
from vaemem._numpy import np
from vaemem._saving import replacing, writing_folder
from vaemem.engine import configs, file_tensors, hub, layouts, tiny, torch_files
from vaemem.engine.arguments import as_path, check_mask
from vaemem.engine.configs import CONFIG, Arch, Config, shown
from vaemem.engine.file_tensors import FILE_NAMES, FLOATS, FileTensor, numpy_type, safetensors_start
from vaemem.engine.layouts import Shape
from vaemem.engine.limits import parse_size

PARTS = ("all", "encoder", "decoder")
WEIGHTS = "diffusion_pytorch_model.safetensors"
WEIGHTS_FP16 = "diffusion_pytorch_model.fp16.safetensors"
WEIGHTS_TORCH = "diffusion_pytorch_model.bin"
INDICES = tuple(f"{WEIGHTS}.index{variant}.json" for variant in ("", ".fp16"))  # of weights in several files
PIPELINE = "model_index.json"  # in a pipeline's directory
SAVED_WITH = "vaemem.config"  # metadata key of the config in weights saved to a directory; this config decides
SAVED_LAYOUTS = ("diffusers", "ldm", "bfl")  # layouts that `save` writes
PICKLES = (".bin", ".ckpt", ".pt", ".pth")  # suffixes of PyTorch files and of old diffusers files

KNOWN_SHARE = 0.75  # of a file's tensors, which a guessed architecture must have; fewer are another architecture's

# ---- reading ----


def _config_next_to(path: Any) -> Path | Mapping[str, Any] | None:
    """Return the config next to weights: a module's, or a directory's file, which may not exist; None for a file."""
    if hasattr(path, "state_dict") or isinstance(path, Mapping):
        config = getattr(path, "config", None)
        return config if isinstance(config, Mapping) else None
    folder = _find_folder(as_path(path, "path"))
    return folder / CONFIG if folder.is_dir() else None


def _find_folder(path: Path) -> Path:
    """Return the directory of a pipeline's VAE or of a downloaded repository; any other path unchanged."""
    path = hub.snapshot(path) or path
    return path / "vae" if (path / PIPELINE).is_file() and (path / "vae").is_dir() else path


def _locate(path: Path) -> Path:
    """Return the weights file: the path itself, or the file in a directory."""
    path = _find_folder(path)
    wanted = "a .safetensors, .gguf or .pth file, or a diffusers directory"
    try:
        mode = path.stat().st_mode  # once: another process may make the directory now
    except (OSError, ValueError):
        raise NoFileError("path", wanted, "no such file", hub.how_to_download(path), path=path) from None
    if stat.S_ISREG(mode):
        return path
    if not stat.S_ISDIR(mode):
        raise FileError("path", wanted, "neither", path=path)
    usual = (WEIGHTS, WEIGHTS_FP16, *INDICES, WEIGHTS_TORCH)
    files = [path / name for name in usual if (path / name).is_file()]
    if not files:
        pickles = [file for file in sorted(path.iterdir()) if file.suffix in PICKLES]
        have = f"only {pickles[0].name}" if pickles else "none"
        raise NoFileError(
            "path", f"a directory with {WEIGHTS}", have, _advise_conversion(pickles[0]) if pickles else "", path=path
        )
    return files[0]


def _advise_conversion(pickle: Path) -> str:
    """Return how to convert a file of an old PyTorch, which may run code."""
    config = f", config={str(pickle.parent / CONFIG)!r}" if (pickle.parent / CONFIG).is_file() else ""
    load = f"VAE.load(torch.load({str(pickle)!r}, map_location='cpu', weights_only=True){config})"
    save = f".save({str(pickle.with_suffix('.safetensors'))!r})"
    return f"A pickle may run whatever its maker wrote into it. To convert one that you trust: {load}{save}"


def load(path: Any, *args: Any, **where: Any) -> _core.Model:
    """Return the model of `read`."""
    return read(path, *args, **where)[0]


def read(
    path: Any,
    model: str | None = None,
    config: Config | None = None,
    parts: str = "all",
    videos: bool | None = False,
    **where: Any,
) -> tuple[_core.Model, Config | None]:
    """Read weights into a new core model with all tensors set, as in `vaemem.VAE.load`. Return it and its config; the
    config is None if only the tensors' names and shapes describe the model.

    videos: None: those of the classes of videos. where: the core's arguments for the device and the
    numbers. Tensors are copied there one by one: the peak is the
    packed copy plus one tensor as it lies in the file.
    """
    choose("parts", parts, PARTS)
    model = None if model is None else configs.named_model("model", model)
    arch = None if model is None else configs.known_arch(model)
    if config is not None:
        arch = configs.read_config(config)
        if model not in (None, arch["name"]):
            wanted = ("one that ", Named("config"), f" describes ({arch['name']}), or only one of both")
            raise ArgumentError("model", wanted, repr(model))
    state = path.state_dict() if hasattr(path, "state_dict") else path
    file = None if isinstance(state, Mapping) else _locate(as_path(path, "path"))
    name = str(file or "state dict")
    with _open_source(file) if file else contextlib.nullcontext(_source_in_memory(state)) as source:
        if arch is None:
            arch, config = _find_config(source, path)
        try:
            with inside("path", "" if file else name, file or "", (ValueError,)):
                return _load_from(source, arch, parts, videos, config, where), config
        except OSError as error:
            raise OSError(error.errno, f"cannot read: {error.strerror}", name) from None


def with_videos(arch: Arch, videos: bool | None, config: Config | None) -> Arch:
    """Return the architecture of a model that runs videos too, if it is asked for (ValueError if it cannot) or, for
    None, if the config is of such a class."""
    if arch.get("family") == "ltx":
        if videos is False:
            raise ArgumentError(
                "videos", f"True or None: {arch['name']} always runs videos, and an image as one frame", "False"
            )
        return arch
    runs = arch.get("family") == "wan" and arch.get("slices", True)
    if videos and not runs:
        raise ArgumentError(
            "videos", "False: of videos, the VAEs of Wan and of LTX-2 run here", f"True for {arch['name']}"
        )
    if videos is None:
        videos = runs and config is not None and configs.is_of_videos(config)
    return {key: value for key, value in arch.items() if key != "videos"} | ({"videos": True} if videos else {})


def _load_from(
    source: _Source, arch: Arch | None, parts: str, videos: bool | None, config: Config | None, where: Mapping[str, Any]
) -> _core.Model:  # fmt: skip
    shapes = source.shapes
    layout, prefix = layouts.find_layout(shapes)
    is_guessed = arch is None
    if parts == "all" and (half := tiny.HALVES.get(layout)):
        raise ArgumentError("", ("both halves, or ", Named("parts", half)), f"a file of the {half} alone")
    arch = arch or layouts.detect(shapes, parts)[2]
    if videos is None and arch.get("family") == "wan" and not any(".time_conv." in name for name in shapes):
        videos = False  # a file that was cut to what images need
    arch = with_videos(arch, videos, config)
    spelt = _match_names(source, arch, parts, layout, prefix, is_guessed)
    result = _core.Model(arch, parts, **where)
    for tensor, shape in result.tensors:
        result.set_tensor(tensor, source.read(spelt[tensor], shape))
    return result


def _match_names(
    source: _Source, arch: Arch, parts: str, layout: str, prefix: str, is_guessed: bool
) -> dict[str, str]:  # fmt: skip
    """Return {core name: source name}; ValueError unless the source has all tensors in the right shape and type. If the
    architecture is guessed, it must have most of the source's tensors."""
    shapes, tensors = source.shapes, dict(_core.Model(arch, parts).tensors)
    spelt = layouts.spell(tensors, layout, len(arch["block_out_channels"]), prefix, arch["layers_per_block"])
    own = {prefix + name for name in layouts.ours(shapes, prefix, parts)}
    extra = own - set(spelt.values())
    count = sum(shapes.get(spelt[name]) in layouts.file_shapes(name, shape) for name, shape in tensors.items())
    if is_guessed and count < KNOWN_SHARE * len(own):
        raise layouts.unknown_architecture(count, len(own))
    readable, types = ", ".join(source.readable), {name: tensor.dtype for name, tensor in source.tensors.items()}
    faults = {
        name: f"expected {readable}, got {dtype}" for name, dtype in types.items() if dtype not in source.readable
    }
    wanted_by = f"{arch['name']}{'' if parts == 'all' else f' ({parts})'} in layout {layout}"
    layouts.check_shapes(shapes, tensors, spelt, wanted_by, faults, extra)
    return spelt


def _find_config(source: _Source, path: Any) -> tuple[Arch | None, Mapping[str, Any] | None]:
    """Return the architecture and the config that belong to weights; (None, None) without a config.

    A config in the weights' metadata decides: weights and config are then one file, which a save replaces at once. Warn
    the caller's caller if config.json differs. FileNotFoundError for a directory with neither.
    """
    neighbour, saved = _config_next_to(path), source.about.get(SAVED_WITH)
    if saved is None:
        if isinstance(neighbour, Path) and not neighbour.is_file():
            advice = ("pass ", Named("model"), " or ", Named("config"))
            raise NoFileError("path", f"a directory with {CONFIG}", "none", advice, path=path)
        return (None, None) if neighbour is None else configs.read_contents(neighbour)
    try:
        arch, own = configs.read_contents(dict(json.loads(saved)))
    except (TypeError, ValueError, RecursionError) as error:
        wanted = f"the config that the weights were saved with, as {SAVED_WITH}"
        raise FileError("path", wanted, shown(saved), str(error), "metadata", path=str(path)) from None
    if neighbour is None:
        return arch, own
    try:
        other, contents = configs.read_contents(neighbour)
        differs = _list_differences(_saved_config(other, contents), _saved_config(arch, own))
    except (OSError, ValueError) as error:
        differs = str(error)
    if not differs:
        return other, contents  # may have more keys
    choice = "save again to make them agree, or pass config= to choose"
    warnings.warn(f"{neighbour}: {differs}; using the config in the weights: {choice}", stacklevel=4)
    return arch, own


def _saved_config(arch: Arch, config: Mapping[str, Any]) -> Arch:
    """Return the config that a save would write."""
    return configs.config_of(arch, configs.sample_size_of(config, arch["name"]))


def _list_differences(got: Arch, wanted: Arch) -> str:
    wrong = [key for key in wanted | got if wanted.get(key) != got.get(key)]
    return ", ".join(f"{key} is {shown(got.get(key))}, not {shown(wanted.get(key))}" for key in wrong)


class _Source(NamedTuple):
    """Tensors by name, and a function that reads the numbers of one into a shape of the same size."""

    tensors: dict[str, FileTensor]
    read: Callable[[str, Shape], np.ndarray]
    readable: tuple[str, ...]  # types
    about: dict[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


@contextlib.contextmanager
def _open_source(file: Path) -> Iterator[_Source]:
    """Open a weights file, or all files of an index."""
    if not (file.suffix == ".json" and ".index" in file.suffixes):
        with _open_file(file) as source:
            yield source
        return
    with contextlib.ExitStack() as stack:
        shards = [stack.enter_context(_open_file(shard)) for shard in _shards_of(file)]
        held = {name: shard for shard in shards for name in shard.tensors}
        tensors = {name: shard.tensors[name] for name, shard in held.items()}
        yield _Source(tensors, lambda name, shape: held[name].read(name, shape), shards[0].readable, shards[0].about)


def _shards_of(index: Path) -> list[Path]:
    """Return the files of an index next to it."""
    try:
        names = sorted({*json.loads(index.read_text("utf-8"))["weight_map"].values()})
        files = [index.parent / name for name in names if Path(name).name == name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names, files = [], []
    if not files or len(files) < len(names):
        raise FileError("path", "an index with a weight_map of tensors to files", "none", path=index)
    for file in files:
        if not file.is_file():
            raise NoFileError("path", "every file of the index", "no such file", path=file)
    return files


@contextlib.contextmanager
def _open_file(file: Path) -> Iterator[_Source]:
    """Open a weights file. The first bytes of GGUF and PyTorch files are no valid header length of safetensors."""
    headers = {"GGUF": file_tensors.gguf_header, "PyTorch": torch_files.torch_header}
    headers["safetensors"] = file_tensors.safetensors_header
    with open(file, "rb") as f:
        first = f.peek(64)
        if mistaken := file_tensors.mistaken_for_weights(first[:64]):
            raise FileError("path", "weights", mistaken, path=file)
        is_gguf = first.startswith(file_tensors.MAGIC) or file.suffix == ".gguf"
        kind = "GGUF" if is_gguf else "PyTorch" if first.startswith(torch_files.ARCHIVE) else "safetensors"
        advice = _advise_conversion(file) if file.suffix in PICKLES and kind == "safetensors" else ""
        try:
            with inside("path", f"as a {kind} file", file, (ValueError, RecursionError)):
                tensors, about = headers[kind](f)
        except FileError as error:
            error.advice = error.advice or advice
            raise
        held = {tensor.name: tensor for tensor in tensors}

        def read(name: str, shape: Shape) -> np.ndarray:
            return file_tensors.read_tensor(f, held[name], shape)

        yield _Source(held, read, file_tensors.READABLE if is_gguf else file_tensors.READABLE_FLOATS, about)


def _source_in_memory(tensors: Mapping[str, Any]) -> _Source:
    """Return tensors of NumPy or of torch, without importing torch."""
    given = layouts.unwrap(tensors)
    held = {}
    for name, value in given.items():
        if hasattr(value, "dtype"):
            dtype = str(value.dtype).removeprefix("torch.")
            try:
                shape = tuple(int(side) for side in value.shape)
            except (TypeError, RuntimeError, AttributeError):  # a nested tensor
                raise ArgumentError(name, "a tensor of whole sides", _described(value)) from None
            held[name] = FileTensor(name, shape, FILE_NAMES.get(dtype, dtype), 0, 0)

    def read(name: str, shape: Shape) -> np.ndarray:
        value = given[name]
        check_mask(name, value)
        try:
            numbers = value.detach().cpu().float().numpy() if hasattr(value, "detach") else value
            return np.ascontiguousarray(numbers, np.float32).reshape(shape)
        except (TypeError, RuntimeError) as error:  # a tensor on "meta", a sparse one, or a subclass
            raise ArgumentError(name, "a dense tensor with numbers", _described(value), str(error)) from None

    return _Source(held, read, file_tensors.READABLE_FLOATS, {})


def _described(tensor: Any) -> str:
    """Describe a tensor of any library: its type, and dtype, layout and device if it has them."""
    attributes = [str(getattr(tensor, name)) for name in ("dtype", "layout", "device") if hasattr(tensor, name)]
    return f"{type(tensor).__name__} ({', '.join(attributes)})"


class Contents(NamedTuple):
    """Contents of a weights file, from its header alone."""

    file: Path
    layout: str
    arch: Arch
    parts: str
    dtypes: tuple[str, ...]
    tensors: int


def look(path: Any) -> Contents:
    """Return a weights file's layout and architecture without reading its numbers. Errors are `load`'s."""
    file = _locate(as_path(path, "path"))
    with _open_source(file) as source:
        layout, prefix, arch = layouts.detect(source.shapes)
        found = _find_config(source, path)[0]
        arch = found or arch
        names = layouts.ours(source.shapes, prefix, "all")
        halves = {half for name in names if (half := layouts.half_of(name))}
        parts = halves.pop() if len(halves) == 1 else tiny.HALVES.get(layout, "all")
        with inside("path", path=file, caught=(ValueError,)):
            _match_names(source, arch, parts, layout, prefix, is_guessed=found is None)
    dtypes = tuple(sorted({source.tensors[prefix + name].dtype for name in names}))
    return Contents(file, layout, arch, parts, dtypes, len(names))


def arch_of(state: Mapping[str, Any]) -> Arch:
    """Return the architecture of a whole VAE's tensors in memory, from names and shapes alone. Errors are `load`'s."""
    source = _source_in_memory(state)
    layout, prefix, arch = layouts.detect(source.shapes)
    _match_names(source, arch, "all", layout, prefix, is_guessed=True)
    return arch


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a weights file that has a readable type."""
    with _open_source(file) as source:
        held = source.tensors.values()
        return {one.name: source.read(one.name, one.shape) for one in held if one.dtype in source.readable}


def tensor_types(path: Any) -> list[tuple[str, Shape, str, int]]:
    """List the tensors of a safetensors or GGUF file of any model: name, shape in PyTorch's order, type, bytes.

    Tensors are in file order. Only the header is read, so any size is fast. Types have the format's names: "F32",
    "BF16", "F8_E4M3", "Q8_0", "Q4_K". ValueError, OSError: as in `load`.
    """
    with _open_source(_locate(as_path(path, "path"))) as source:
        return [(one.name, one.shape, one.dtype, one.nbytes) for one in source.tensors.values()]


def told_bytes(role: str, given: str | int | os.PathLike[str]) -> int | None:
    """Return the bytes of a component's weights for a size (bytes, or a text with a unit) or for a weights file, from
    its header. Return None for anything else, such as the name of a type (``"Q8_0"``).

    Examples
    --------
    >>> [told_bytes("unet", given) for given in (4096, "1.6 GiB", "Q8_0", "model.gguf")]
    [4096, 1717986918, None, None]
    """
    if isinstance(given, int) or re.fullmatch(r"\s*[\d.]+ *[kmgt]?i?b\s*", str(given), re.IGNORECASE):
        return parse_size(f"components[{role!r}]", given)
    return sum(size for *_, size in tensor_types(given)) if os.path.exists(given) else None


def make(arch: Arch, parts: str, tensors: Iterable[tuple[str, np.ndarray]], **where: Any) -> _core.Model:
    """Make a model of these tensors. where: as in `read`."""
    result = _core.Model(arch, parts, **where)
    for name, tensor in tensors:
        result.set_tensor(name, tensor)
    return result


def copy(model: _core.Model, **where: Any) -> _core.Model:
    """Copy a model. where: as in `read`."""
    return make(model.arch, model.parts, kept(model), **where)


# ---- writing ----


def _stored_types(model: _core.Model) -> dict[str, str]:
    """Return the type in which each tensor is stored."""
    return {name: FILE_NAMES[model.dtype] if len(shape) > 1 else "F32" for name, shape in model.tensors}


def kept(model: _core.Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield copies of the tensors with their names, one at a time, each in its stored type."""
    for name, kind in _stored_types(model).items():
        yield name, model.get_tensor(name).astype(numpy_type(kind), copy=False)


def _write_tensors(f: IO[bytes], model: _core.Model, layout: str, about: dict[str, str] | None = None) -> None:
    """Write the safetensors format, each tensor in its stored type. The safetensors package needs all tensors in memory
    at once; this needs one."""
    types, tensors = _stored_types(model), dict(model.tensors)
    spelt = layouts.spell(list(tensors), layout, len(model.arch["block_out_channels"]))
    for name, shape in tensors.items():
        if layout != "diffusers" and layouts.is_attention_matrix(name, shape):
            tensors[name] = (*shape, 1, 1)
    entries = ((spelt[name], types[name], shape) for name, shape in tensors.items())
    f.write(safetensors_start(entries, {"format": "pt"} | (about or {})))
    for name, tensor in kept(model):
        f.write(tensor.view(FLOATS[types[name]][0]).data)


def save(
    model: _core.Model, path: str | os.PathLike[str], layout: str = "diffusers", sample_size: int | None = None
) -> None:
    """Write a model's tensors, as in `vaemem.VAE.save`, with one in memory at a time. ValueError if a tensor was never
    set. sample_size: for ``config.json``; None: the model's own, if it is a known one."""
    choose("layout", layout, SAVED_LAYOUTS)
    arch = model.arch
    if arch.get("family") == "wan" and not arch.get("videos"):
        kept = "one with the filters of a single frame"
        advice = ("copy the file that was loaded, or load it with ", Named("videos", True))
        raise ArgumentError(arch["name"], "a model that is kept whole", kept, advice)
    if arch.get("family") in ("tiny", "wan", "ltx") and layout != "diffusers":
        name = "an AutoencoderTiny" if arch["family"] == "tiny" else arch["name"]
        raise ArgumentError("layout", f"diffusers for {name}", layout)
    quant, flux2 = arch["use_quant_conv"] + arch["use_post_quant_conv"], "patch_size" in arch
    holds = {"diffusers": True, "ldm": quant == 2 and not flux2, "bfl": quant == (2 if flux2 else 0)}
    if not holds[layout]:
        always = "always has both quant convs" if layout == "ldm" else "has no quant convs"
        got = f"{quant} and a BatchNorm" if flux2 else quant
        others = " or ".join(name for name in SAVED_LAYOUTS if holds[name])
        wanted = f"{others} for {arch['name']}, which has {got} quant convs"
        raise ArgumentError("layout", wanted, f"{layout}, which {always}")
    if layout == "bfl" and not arch["mid_block_add_attention"]:
        raise ArgumentError("layout", f"diffusers for {arch['name']}, which has no middle attention", "bfl")
    if unset := model.missing():
        raise ArgumentError("model", "every tensor set", f"{len(unset)} that are not, such as {unset[0]}")
    target = as_path(path, "path")
    if target.suffix == ".safetensors":
        if target.is_dir() or not target.parent.is_dir():
            raise ArgumentError("path", "a file in a directory that exists", str(target))
        with replacing(target) as f:
            _write_tensors(f, model, layout)
        return
    if target.suffix in (".gguf", *PICKLES) and not target.is_dir():
        raise ArgumentError("path", "a directory or a name that ends in .safetensors, which is written", str(target))
    if layout != "diffusers" or model.parts != "all":
        what = f"layout {layout}" if layout != "diffusers" else "half a model"
        raise ArgumentError("path", f"a name that ends in .safetensors for {what}", str(target))
    if target.exists() and not target.is_dir():
        raise ArgumentError("path", "a directory or a name that ends in .safetensors", f"the file {target}")
    with writing_folder(target):
        _save_folder(model, target, json.dumps(configs.config_of(arch, sample_size), indent=2) + "\n")


def _save_folder(model: _core.Model, folder: Path, config: str) -> None:
    """Write weights that contain their config, and the same config.json for diffusers. Once the weights are in place,
    the save is done; config.json follows."""
    had_weights = (folder / WEIGHTS).exists()
    try:
        with replacing(folder / CONFIG) as c, replacing(folder / WEIGHTS) as f:
            c.write(config.encode())
            c.flush()
            os.fsync(c.fileno())  # find a full disk before anything is replaced
            _write_tensors(f, model, "diffusers", {SAVED_WITH: config})
    except BaseException:
        if not had_weights:
            with contextlib.suppress(OSError):
                (folder / WEIGHTS).unlink(missing_ok=True)
        raise


# ---- random weights ----


def random_tensors(model: _core.Model, seed: int) -> None:
    """Set every tensor of a model to random numbers of the size that an untrained model has.

    Convolutions and linear layers are initialised as in PyTorch, uniform within 1/sqrt(fan_in)
    (``kaiming_uniform_(a=sqrt(5))``). Norms differ, so that a skipped one shows: 1 + 0.1 N(0, 1) and 0.1 N(0, 1). Each
    tensor's numbers come from PCG64, seeded with (seed, name), so half a model equals that half of the whole.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ArgumentTypeError("seed", "an integer", type(seed).__name__)
    if seed < 0:
        raise ArgumentError("seed", "0 or more", str(seed))
    shapes: dict[str, Shape] = dict(model.tensors)
    for name, shape in shapes.items():
        stem, _, kind = name.rpartition(".")
        rng = np.random.Generator(np.random.PCG64([int(seed), int.from_bytes(name.encode(), "little")]))
        weight = shapes.get(f"{stem}.weight", shape)
        if len(weight) == 1 or kind == "gamma":  # a norm's affine, or running statistics
            values = rng.standard_normal(shape, dtype=np.float32)
            values *= np.float32(0.1)
            values += np.float32(kind in ("weight", "running_var", "gamma", "latents_std"))
        else:
            values = rng.random(shape, dtype=np.float32)
            values -= np.float32(0.5)
            values *= np.float32(2 / math.sqrt(math.prod(weight[1:])))
        model.set_tensor(name, values)
