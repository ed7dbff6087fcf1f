"""The table of the command line's flags."""

from __future__ import annotations

import argparse
import pkgutil
from dataclasses import dataclass
from typing import Any

from vaemem._common import DTYPES, OPS, PRECISIONS, SPELT_DTYPES, TILED_OPS, letters, meant


def _size(text: str) -> tuple[int, int]:
    """'512x768' (height x width) or '512' (a square)."""
    parts = text.lower().split("x")
    try:
        sides = [int(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1 or max(sides) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH in pixels, such as 512x768, got {text[:80]!r}")
    return sides[0], sides[-1]


class _Run(argparse.Action):
    """A VAE's operation, or None for a whole pipeline, and sizes."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        words = list(values)
        try:
            op = None if words[0][:1].isdigit() else meant("op", words.pop(0), TILED_OPS)
            namespace.run_words = op, [_size(word) for word in words]
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if not words:
            raise argparse.ArgumentError(self, "expected a size in pixels, such as 1024 or 512x768, got none")


def count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2^63, got {text[:80]!r}")
    return number


def positive(text: str) -> int:
    if not (number := count(text)):
        raise argparse.ArgumentTypeError("expected a whole number of at least 1, got 0")
    return number


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.01 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"expected a number from 0.01 to 1000, got {text[:80]!r}")
    return number


def _sample(text: str) -> int | str:
    return text if text in ("mean", "moments") else count(text)


def _part(text: str) -> tuple[int, int]:
    k, _, n = text.partition("/")
    part = positive(k), positive(n)
    if part[0] > part[1]:
        raise argparse.ArgumentTypeError(f"expected a part such as 2/8, got {text[:80]!r}")
    return part


def _tiling(text: str) -> Any:
    from vaemem.engine.tiling import Tiling

    return Tiling(positive(text))


def _dtype(text: str) -> str:
    return SPELT_DTYPES.get(letters(text), text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text[:80]!r}")
    return name, value


def _offload(text: str) -> str | dict[str, str]:
    """One word, or the places of components."""
    return dict(_pair(part) for part in text.split(",")) if "=" in text else text


def _measured(text: str) -> tuple[str, float]:
    name, value = _pair(text)
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected WAY=SECONDS, got {text[:80]!r}") from None


@dataclass(frozen=True)
class Later:
    """A setting of a flag that names of the package complete when the flag is added: ``"tables.fit:KEY"``, or a text
    with a ``{}`` for each name."""

    names: str
    text: str = ""

    def __call__(self) -> Any:
        found = [pkgutil.resolve_name(f"vaemem.{name}") for name in self.names.split()]
        lists = [tuple(one() if callable(one) else one) for one in found]
        return self.text.format(*map(", ".join, lists)) if self.text else lists[0]


FlagSettings = dict[str, Any]  # arguments of argparse's add_argument


def _flag(help: str | Later = "", **settings: Any) -> FlagSettings:
    return {"help": help, **settings}


# Positional arguments.
WORDS = "formula_of formula_op model op tiled_op sizes size table no_table latents images file pipeline".split()
WORDS += ["application", "batched_size", "message", "source", "folder", "run", "comfyui_path", "invokeai_path"]

# By the names of arguments.
FLAGS: dict[str, FlagSettings] = {
    "model": _flag(Later("_core:models", "One of {}.")),
    "op": _flag("The operation.", choices=OPS),
    "sizes": _flag("The height x width of each image in pixels, such as 512x768; one number is a square.", type=_size,
        nargs="+", metavar="HxW"),
    "size": _flag("The height x width of the image in pixels.", type=_size, metavar="HxW"),
    "batch": _flag("Images in one run."),
    "dtype": _flag(type=_dtype, choices=DTYPES),
    "device": _flag("cpu, cuda or cuda:N."),
    "precision": _flag("The engine's precision for products. fp8: bfloat16 on a GPU.", choices=PRECISIONS),
    "memory_limit": _flag("A memory limit for the run: '512 MiB', '2 GB' or auto.", metavar="SIZE"),
    "format": _flag("The output format.", default="text", choices=("text", "csv", "json", "markdown")),
    "csv": _flag("Also write the table to this file.", metavar="FILE"),
    "table": _flag("A CSV table of vaemem or of the PyTorch benchmark; - reads a pipe.", metavar="CSV"),
    "out": _flag("The folder for all results."),
    "comfyui_path": _flag("ComfyUI's folder, with main.py in it.", dest="path", metavar="PATH"),
    "invokeai_path": _flag("InvokeAI's root, with invokeai.yaml in it.", dest="path", metavar="PATH"),
    # of files
    "weights": _flag("A safetensors or GGUF file, or a diffusers directory.", required=True, metavar="FILE"),
    "of_run": _flag("The model, if you know it.", metavar="MODEL", dest="model"),
    "of_op": _flag("The operation, if you know it.", dest="op", choices=OPS),
    "formula_op": _flag("The operation of a VAE; omit it for a pipeline.", dest="op", choices=TILED_OPS, nargs="?"),
    "formula_of": _flag(
        Later("pipelines.components:PIPELINES _core:models",
              "A whole pipeline, one of {}; or, with an operation, a VAE, one of {}."),
        metavar="MODEL", dest="model"),
    "of_model": _flag("The model of the weights, if the file does not name it.", metavar="MODEL", dest="model"),
    "config": _flag("The diffusers config.json of any other model.", metavar="FILE"),
    "scaled": _flag("The latents are scaled as a pipeline holds them.", action="store_true"),
    "progress": _flag("Show a progress bar.", action="store_true"),
    "latents": _flag("Latents as .npy, .safetensors, ComfyUI's .latent, .pt or .pth; or a folder of latents.",
        metavar="LATENTS"),
    "fps": _flag("Frames of a video file in one second. By default 16, as Wan 2.1 makes; 24 for LTX-2's.",
        type=_rate, metavar="N"),
    "images": _flag("Files that Pillow reads; for an .npy, all of one size. Or one video, or a folder of "
        "its frames. For a folder also folders, globs, .tar files (WebDataset) and .parquet files with a column of "
        "images.", nargs="+", metavar="SOURCE"),
    # of data sets
    "buckets": _flag("Scale images to about this side squared, in buckets of several aspects. By default images keep "
        "their size.", type=positive, metavar="PIXELS"),
    "step": _flag("Sides of buckets are multiples of this. Default: a latent's, or the trainer's.",
        type=positive, metavar="PIXELS"),
    "bucket_sides": _flag("The least and the largest side of a bucket. Default: half and twice that of --buckets; for "
        "kohya 256, 1024.", type=positive, nargs=2, metavar=("MIN", "MAX")),
    "trainer": _flag("Write the cache of a trainer: kohya, musubi, ai-toolkit or simpletuner, or one of its "
        "architectures, such as musubi:zi (docs/DATASETS.md).", option="--for", metavar="TRAINER"),
    "flip": _flag("Also encode each image mirrored.", action="store_true"),
    "shard": _flag("Images in a file, whose latents wait in memory. A run that is killed loses at most one file.",
        type=positive, metavar="IMAGES", default=256),
    "part": _flag("Encode one part of the data set, such as 2/8. The others can run at the same time, on this machine "
        "or others.", type=_part, metavar="K/N", default=(1, 1)),
    "ray": _flag("Encode on a Ray cluster: auto, local, which starts one here, or its address. Every node needs vaemem "
        "and the same paths. On CPUs give a memory limit.", metavar="ADDRESS"),
    "check": _flag("Encode nothing; check that the folder has every image, unchanged.", action="store_true"),
    "tiling": _flag(
        "Run in tiles of this side, as diffusers cuts and blends them. The result is not exact. Give no memory limit.",
        type=_tiling, metavar="PIXELS", option="--tile"),
    "pad": _flag("How to pad images to whole latents, or to their buckets instead of cropping.",
        choices=["reflect", "edge"]),
    "sample": _flag("Draw a sample with this seed instead of the mean; or write moments, mean and log-variance.",
        type=_sample, metavar="SEED"),
    "message": _flag("The message, a file that holds it, or - to read a pipe (the default).", nargs="?"),
    "file": _flag("A safetensors or GGUF file, or a diffusers directory.", metavar="FILE"),
    # of tables
    "models": _flag(nargs="+", metavar="MODEL"),
    "ops": _flag("The operations.", nargs="+", choices=OPS),
    "target": _flag("The column to fit or compare.", choices=Later("tables.fit:TARGETS")),
    "by": _flag(nargs="+", choices=Later("tables.fit:KEY")),
    "quantile": _flag("Fit a line above this share of the rows; 1 means all. It needs SciPy."),
    **{
        f"only_{name}": _flag(f"Use only rows of this {name}.", dest=name)
        for name in ("model", "op", "dtype", "source")
    },
    "predict": _flag("Compare vaemem.predict (a fresh process), ComfyUI and InvokeAI.", action="store_true"),
    "where": _flag("The device of rows that name none, such as 'RTX 4090'.", dest="device"),
    "no_plots": _flag("Leave out the figures, which need matplotlib.", action="store_true"),
    # of PyTorch on a card
    "runtime": _flag(choices=Later("prediction.runtimes:PROGRAM_NAMES")),
    "safe": _flag("Do not accept tight fits: exit with 3.", action="store_true"),
    "tight": _flag("Also accept tight fits.", action="store_false", dest="safe", option="--tight"),
    "tile": _flag(metavar="PIXELS"),
    "tile_overlap": _flag(metavar="PART"),
    "os": _flag(choices=Later("prediction.request:KEPT")),
    "protocol": _flag(choices=Later("prediction.benchmark:PROTOCOLS")),
    "cudnn_version": _flag(metavar="VERSION", option="--cudnn"),
    "torch_version": _flag(metavar="VERSION", option="--torch"),
    "diffusers_version": _flag(metavar="VERSION", option="--diffusers"),
    "allow_tf32": _flag("Predict for torch.backends.cudnn.allow_tf32 = False.", action="store_false",
        option="--no-tf32"),
    "allocator": _flag(metavar="CONF"),
    "cudnn_benchmark": _flag("Always an error: only the card knows its fastest plan."),
    "all": _flag("Show the details, too.", action="store_true"),
    "code": _flag("Print only the script of the recommended way.", action="store_true"),
    "exact": _flag("Show sizes in MiB. Otherwise they are in GB of 1024 MiB, as cards are sold.", action="store_true"),
    "run": _flag("The run: a VAE's operation and one size or more in pixels, such as decode 1024 or decode 512x768; or"
        " sizes alone, for a whole pipeline.", nargs="+", action=_Run, metavar="[OP] SIZE", dest="run_words"),
    "aspect": _flag("Width divided by height.", type=float, default=1.0),
    "engine": _flag("Answer for our own engine instead, in this memory, such as '2 GiB'.", metavar="SIZE",
        dest="memory_limit", option="--engine"),
    # of pipelines
    "prompt_tokens": _flag(metavar="TOKENS", option="--tokens"),
    "frames": _flag(metavar="N"),
    "offload": _flag(
        "Offloading: none, model (enable_model_cpu_offload), sequential (enable_sequential_cpu_offload), leaf_level or "
        "'block_level 1' with the blocks of a group (enable_group_offload); or places of components, such as "
        "text_encoder=cpu,text_encoder_2=cpu, with the others on the GPU.",
        type=_offload, metavar="OFFLOAD"),
    "guidance": _flag("Denoise each image twice, or once.", action=argparse.BooleanOptionalAction),
    "image": _flag("Begin with an image, as in image-to-image.", action="store_true"),
    "hires_from": _flag(
        "A hires fix: the same process first makes an image of this size, and begins with it.",
        dest="image", option="--hires-from", type=_size, metavar="HxW"),
    "components": _flag(
        "The type of a component's weights, or their file, such as transformer=Q8_0. Repeat it for others.",
        type=_pair, metavar="ROLE=TYPE", action="append", option="--component"),
    "lora": _flag(
        "A LoRA: its file, or a rank such as 16; 'FILE fused' after fuse_lora. Repeat it for others.",
        metavar="FILE or RANK", action="append"),
    "calibrate": _flag(
        "Measured seconds of a way on this machine, by its name in the plan. Repeat it for others.",
        type=_measured, metavar="WAY=SECONDS", action="append", option="--measured"),
    "time_limit": _flag(metavar="SECONDS"),
    "source": _flag(
        Later("pipelines.components:PIPELINES",
              "A diffusers folder, or an id whose files are in the Hub's cache; with --random one of {}. For a VAE's"
              " run a model's name or a config.json.")),
    "folder": _flag("A pipeline's folder as diffusers saves it, or an id whose files are in the Hub's cache."),
    "random": _flag("Build the pipeline at full size with random weights, without files.", action="store_true"),
    "prompt": _flag("The prompt.", default="a photo of a cat"),
    # of formulas
    "application": _flag(choices=Later("prediction.bound_code:APPLICATIONS")),
    "dtypes": _flag("The types of numbers.", type=_dtype, nargs="+", choices=DTYPES),
    "sides": _flag(type=count, nargs="+", metavar="PIXELS"),
}  # fmt: skip


def _like(name: str, **changes: Any) -> FlagSettings:
    return {**FLAGS[name], "dest": name, **changes}


# Variants for some commands.
FLAGS |= {
    "tiled_op": _like("op", choices=TILED_OPS),
    "cropped": _like("size", help="Crop the pictures to this size."),
    "batched_size": _like("size", nargs="?",
        help="The height x width of each image, to find the largest batch; omit it to find the largest image."),
    "of_sizes": _like("sizes"),
    "sweep_ops": _like("ops", choices=(*TILED_OPS, "pipeline"), help="The operations; pipeline means whole pipelines."),
    "batches": _like("batch", help="Images in one run.", type=count, nargs="+", metavar="N"),
    "sweep_tiles": _like("tile", type=positive, nargs="+"),
    "sweep_overlaps": _like("tile_overlap", type=float, nargs="+"),
    "sweep_runtime": _like("runtime", help="The program that runs it.", default=None),
    "sweep_offload": _flag("For pipelines: offloading, none, model or sequential.", default=None,
        dest="offload"),
    "sweep_vae": _flag("For pipelines: the VAE runs whole, tiled or sliced.", default=None, dest="vae"),
    "prompt_lengths": _like("prompt_tokens", type=count, nargs="+"),
    "video_lengths": _like("frames", type=count, nargs="+"),
    "usual_sizes": _like("sizes", default=[512, 1024, 2048]),
    "only_sizes": _like("sizes", help="Take only these sizes."),
    "float32": _like("dtype", default="float32"),
    "highest": _like("precision", default="highest"),
    "byte_target": _like("target", choices=Later("tables.table:BYTE_COLUMNS")),
    "fit_format": _like("format", choices=("text", "markdown", "python", "latex", "json")),
    "markdown_format": _like("format", choices=("text", "markdown", "json")),
    "output": _like("out", option="-o --out", help="The file to write, or the folder of a data set.", required=True,
        metavar="FILE"),
    "recording": _like("out", option="-o --out", help="The file to write, which ends with .vaemem.", required=True,
        metavar="FILE"),
    "report_out": _like("out", help="The folder for report.md, report.html and figures.", default="report"),
    "demo_weights": _like("weights", help="The weights of a VAE; by default untrained ones, made by hand.",
        required=False),
    "become_scaled": _like("scaled", help="Scale the latents as a pipeline holds them."),
    "compared_csv": _like("csv", help="Also write each row and its estimates to this file."),
    "predicted_runtime": _like("runtime", choices=Later("pipelines.programs:PREDICTED_RUNTIMES")),
    "planned_runtime": _like("runtime", choices=Later("pipelines.programs:PLANNED_RUNTIMES")),
    "formula_runtime": _like("runtime", help="The program that runs the VAE."),
    "measured_offload": _flag(
        "How modules are offloaded.", choices=Later("pipelines.offload_kinds:OFFLOADS"),
        dest="offload"),
    "measured_vae": _flag("How the VAE runs.", choices=Later("pipelines.offload_kinds:TORCH_WAYS"), dest="vae"),
    "call_guidance": _like("guidance", help="Call the pipeline with a guidance_scale of 0.", default=True),
    "contribute": _flag("Print lines for the scoreboard instead: paste them into an issue of that name.",
        action="store_true"),
    "measured_csv": _like("csv", option="-o --csv"),
    "whose_runtime": _like("runtime", choices=None,
        help=Later("prediction.runtimes:PROGRAM_NAMES pipelines.programs:PREDICTED_RUNTIMES",
                   "The program that runs it: for a VAE {}; for a pipeline {}.")),
    "answer_format": _like("format", choices=("text", "markdown", "csv", "json")),
    "plain_format": _like("format", choices=("text", "json")),
    "calibrate_rows": _flag(
        "A CSV table of runs measured on this card. Rows without a device count as this card's.",
        metavar="CSV", dest="calibrate", option="--measured"),
    "gpus": _flag(nargs="+", metavar="GPU", dest="gpu"),
}  # fmt: skip
