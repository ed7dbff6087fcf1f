"""The table of the command line: its flags, and the commands with the flags that each one takes.

A flag that is an argument of its command's function has that argument's description, as the function's documentation
says it, and its default: where it is not given, nothing is handed on.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import vaemem
from vaemem import _core, _demo
from vaemem._arguments import described
from vaemem._common import DTYPES, OPS, PRECISIONS, TILED_OPS
from vaemem.cli import commands
from vaemem.pipelines.plan import PLANNED_RUNTIMES
from vaemem.pipelines.predict_pipeline import PREDICTED_RUNTIMES
from vaemem.prediction.benchmark import PROTOCOLS
from vaemem.prediction.bound import APPLICATIONS
from vaemem.prediction.runtimes import RUNTIMES
from vaemem.published import reproduce
from vaemem.tables.fit import TARGETS


def _size(text: str) -> tuple[int, int]:
    """'512x768' (height x width) or '512' (a square)."""
    parts = text.lower().split("x")
    try:
        sides = [int(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1 or max(sides) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"want HEIGHTxWIDTH in pixels, such as 512x768, got {text[:80]!r}")
    return sides[0], sides[-1]


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"want a whole number from 0 to 2^63, got {text[:80]!r}")
    return number


def _dtype(text: str) -> str:
    return {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(text, text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"want NAME=VALUE, got {text[:80]!r}")
    return name, value


def _measured(text: str) -> tuple[str, float]:
    name, value = _pair(text)
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want WAY=SECONDS, got {text[:80]!r}") from None


FlagSettings = dict[str, Any]  # of a flag, as argparse's add_argument takes them


def _flag(option: str, help: str = "", **settings: Any) -> FlagSettings:
    return {"option": option, "help": help, **settings}


def _switch(option: str, help: str = "", action: str = "store_true") -> FlagSettings:
    return {"option": option, "help": help, "action": action}


_SIZES = "The height x width of each image in pixels, such as 512x768; one number is a square."

# By the name of the argument that it is.
FLAGS: dict[str, FlagSettings] = {
    "model": _flag("model", f"One of {', '.join(_core.models())}."),
    "op": _flag("op", "The operation."),
    "sizes": _flag("sizes", _SIZES, type=_size, nargs="+", metavar="HxW"),
    "size": _flag("size", "The height x width of the image in pixels.", type=_size, metavar="HxW"),
    "batch": _flag("--batch", "How many images there are in one run.", type=_count),
    "dtype": _flag("--dtype", type=_dtype, choices=DTYPES),
    "device": _flag("--device", "cpu, cuda or cuda:N."),
    "precision": _flag("--precision", "The precision of the engine's products of float32 numbers.", choices=PRECISIONS),
    "memory_limit": _flag(
        "--memory-limit", "What the run may take, such as '512 MiB', '2 GB' or auto.", metavar="SIZE"
    ),
    "format": _flag("--format", "The format of what is printed.", default="text"),
    "csv": _flag("--csv", "The table is also written to this file.", metavar="FILE"),
    "table": _flag(
        "table", "A table of vaemem's or of the PyTorch benchmark as CSV; - reads it from a pipe.", metavar="CSV"
    ),
    "out": _flag("--out", "The folder for everything that the command leaves."),
    # of files
    "weights": _flag(
        "--weights", "A safetensors or GGUF file, or a directory of diffusers'.", required=True, metavar="FILE"
    ),
    "output": _flag("-o --out", "The file that is written.", required=True, metavar="FILE", dest="out"),
    "of_model": _flag(
        "--model", "Which model the weights are, where the file leaves it open.", choices=_core.models(), dest="model"
    ),
    "config": _flag("--config", "The config.json of diffusers, of any other model.", metavar="FILE"),
    "scaled": _switch("--scaled", "The latents are as a pipeline holds them."),
    "progress": _switch("--progress", "A bar shows how far the run is."),
    "latents": _flag("latents", "Latents as .npy, .safetensors, ComfyUI's .latent, .pt or .pth.", metavar="LATENTS"),
    "cropped": _flag("--size", "The pictures are cropped to this size.", type=_size, metavar="HxW", dest="size"),
    "images": _flag("images", "Files that Pillow reads, all of one size.", nargs="+", metavar="IMAGE"),
    "pad": _flag(
        "--pad", "How to fill up images whose sides are no multiples of the latents'.", choices=["reflect", "edge"]
    ),
    "sample": _flag(
        "--sample", "Draw from the distribution with this seed, instead of taking its mean.", type=_count,
        metavar="SEED",
    ),
    "file": _flag("file", "A safetensors or GGUF file, or a directory of diffusers'.", metavar="FILE"),
    # of tables
    "models": _flag("--models", nargs="+", metavar="MODEL"),
    "ops": _flag("--ops", "The operations.", nargs="+", choices=OPS),
    "of_sizes": _flag("--sizes", _SIZES, type=_size, nargs="+", metavar="HxW", dest="sizes"),
    "repeats": _flag("--repeats", type=_count),
    "estimate": _switch("--estimate", "Ask the plan, and run nothing."),
    "target": _flag("--target", "The column that is meant.", choices=TARGETS),
    "quantile": _flag(
        "--quantile", "Fit a line above this share of the rows, which needs SciPy; 1 is above all of them.", type=float
    ),
    **{
        f"only_{name}": _flag(f"--{name}", f"Take only the rows of this {name}.", dest=name)
        for name in ("model", "op", "dtype", "source")
    },
    "rows": _switch("--rows", "Show each row, instead of each model, op and dtype."),
    "predict": _switch("--predict", "Show vaemem.predict, a fresh process, beside ComfyUI and InvokeAI."),
    "where": _flag("--device", "The device, where the table does not say it, such as 'RTX 4090'.", dest="device"),
    "no_plots": _switch("--no-plots", "Make no figures, which need matplotlib."),
    # of PyTorch on a card
    "runtime": _flag("--runtime", choices=RUNTIMES),
    "tile": _flag("--tile", type=_count, metavar="PIXELS"),
    "protocol": _flag("--protocol", choices=PROTOCOLS),
    "gpu": _flag("--gpu"),
    "used": _flag("--used", metavar="SIZE"),
    "memory": _flag("--memory", metavar="SIZE"),
    "cudnn_version": _flag("--cudnn", metavar="VERSION"),
    "torch_version": _flag("--torch", metavar="VERSION"),
    "channels_last": _switch("--channels-last"),
    "allow_tf32": _switch("--no-tf32", "Predict for torch.backends.cudnn.allow_tf32 = False.", "store_false"),
    "allocator": _flag("--allocator", metavar="CONF"),
    "cudnn_benchmark": _switch(
        "--cudnn-benchmark", "This is refused: which plan is the fastest only the card can tell."
    ),
    "tensors": _flag("--tensors", "How many of the peak's tensors to show.", type=_count, default=6),
    "aspect": _flag("--aspect", "The width over the height.", type=float, default=1.0),
    "engine": _flag(
        "--engine", "Tell what our own engine has room for instead, in a memory such as '2 GiB'.", metavar="SIZE"
    ),
    # of pipelines
    "pipeline": _flag("pipeline"),
    "prompt_tokens": _flag("--tokens", type=_count, metavar="TOKENS"),
    "guidance": _switch("--no-guidance", "SD 1.5 and SDXL denoise each image once.", "store_false"),
    "image": _switch("--image"),
    "steps": _flag("--steps", type=_count),
    "components": _flag(
        "--component", "The type of a component's weights, or a file of them, such as transformer=Q8_0. It may be given"
        " more than once.", type=_pair, metavar="ROLE=TYPE", action="append",
    ),
    "offload": _flag("--offload"),
    "vae": _flag("--vae"),
    "vae_memory_limit": _flag("--vae-memory-limit", metavar="SIZE"),
    "host_memory": _flag("--host-memory", metavar="SIZE"),
    "calibrate": _flag(
        "--measured", "Seconds that a way took on this machine, by its name as the plan prints it. It may be given more"
        " than once.", type=_measured, metavar="WAY=SECONDS", action="append",
    ),
    "flash": _switch("--flash"),
    "cache_limit": _flag("--cache-limit", metavar="SIZE"),
    "time_limit": _flag("--time-limit", type=float, metavar="SECONDS"),
    "link": _flag("--link"),
    "cpu": _flag("--cpu"),
    "cores": _flag("--cores", type=_count),
    # of formulas and published figures
    "application": _flag("application", choices=APPLICATIONS),
    "dtypes": _flag("--dtypes", "The types of numbers.", nargs="+", choices=DTYPES),
    "sides": _flag("--sides", type=_count, nargs="+", metavar="PIXELS"),
    "plan": _switch("--plan", "Show eight published ways to fit a 12 GB card instead, and ours."),
    "equation": _switch("--equation", "Judge a published equation for SD 1.5 instead, term by term."),
}  # fmt: skip


class Command(NamedTuple):
    """A command: what it does in a sentence, the function whose arguments it takes, its flags, and what is not as
    `FLAGS` has it."""

    about: str
    function: Callable[..., Any]
    flags: str
    changes: Mapping[str, FlagSettings] = {}


_OP, _TILED_OP = {"op": {"choices": OPS}}, {"op": {"choices": TILED_OPS}}
_FORMATS = {"format": {"choices": ("text", "csv", "json", "markdown")}}
_ON_A_CARD = (
    "dtype runtime tile protocol gpu used memory cudnn_version torch_version channels_last allow_tf32 allocator"
    " cudnn_benchmark"
)
_WITH_WEIGHTS = "weights output of_model config scaled memory_limit progress device dtype precision"
_PIPELINE = "pipeline size batch used prompt_tokens guidance image steps dtype components runtime gpu"
_SOFTWARE = "memory cudnn_version torch_version"

COMMANDS = {
    "demo": Command(
        "The whole job on a picture: does it fit, encode, decode, limits, tiles, predictions, a formula, as a page.",
        _demo.make_demo, "weights out", {
            "weights": {
                "help": "The weights of a VAE; by default made by hand, nothing trained.", "required": False,
                "default": None,
            },
            "out": {"default": "out"},
        },
    ),
    "decode": Command("Latents to pictures.", vaemem.VAE.load, f"latents cropped {_WITH_WEIGHTS}"),
    "encode": Command("Pictures to latents, as .npy.", vaemem.VAE.load, f"images pad sample {_WITH_WEIGHTS}", {
        "scaled": {"help": "The latents become as a pipeline holds them."},
    }),
    "info": Command(
        "What a weights file holds, and what each run with it will take.", vaemem.VAE.load,
        "file of_sizes dtype precision",
        {"of_sizes": {"default": [512, 1024, 2048]}},
    ),
    "fits": Command(
        "Whether PyTorch has room for images on a card; ends with 1 where it has none.", vaemem.predict,
        f"model op sizes batch {_ON_A_CARD}", _TILED_OP,
    ),
    "estimate": Command(
        "The engine's memory before a run, without running it.", vaemem.sweep,
        "model op sizes batch memory_limit device dtype precision format",
        {**_OP, **_FORMATS, "dtype": {"default": "float32"}},
    ),
    "tradeoff": Command(
        "What less memory costs: the engine's plans, from the fastest to the smallest.", vaemem.tradeoff,
        "model op sizes batch dtype precision format", _OP | _FORMATS,
    ),
    "sweep": Command(
        "Measure the engine's memory and time over models, operations and sizes.", vaemem.sweep,
        "models ops of_sizes batch device dtype precision repeats estimate csv format",
        _FORMATS | {"dtype": {"default": "float32"}},
    ),
    "fit": Command(
        "Fit a*H*W*e + b to a table, for each model and operation.", vaemem.fit,
        "table target quantile only_model only_op only_dtype only_source format",
        {"format": {"choices": ("text", "python", "latex", "json")}},
    ),
    "compare": Command(
        "The estimators that people ship beside the rows of a table.", vaemem.compare,
        "table target rows predict of_sizes format", {
            "target": {"choices": [target for target in TARGETS if target != "seconds"]},
            "of_sizes": {"help": "Take only these sizes.", "default": None},
            "format": {"choices": ("text", "markdown")},
        },
    ),
    "report": Command(
        "Report on a table: ratios, scaling, constants, advice, published claims checked.", vaemem.report,
        "table out where no_plots", {
            "out": {"help": "The folder for report.md, report.html and figures.", "default": "report"},
        },
    ),
    "predict": Command(
        "PyTorch's peak allocated and reserved VRAM, with no GPU and no PyTorch.", vaemem.predict,
        f"model op sizes batch {_ON_A_CARD} tensors format", _TILED_OP | _FORMATS,
    ),
    "largest": Command(
        "The largest image that PyTorch has room for on a card, and its prediction.", vaemem.predict,
        f"model op batch aspect engine {_ON_A_CARD} precision", _TILED_OP | {"precision": {"default": "highest"}},
    ),
    "pipeline": Command(
        "What a whole pipeline takes of a card, phase by phase; 1 if it does not fit.", vaemem.predict_pipeline,
        f"{_PIPELINE} offload vae vae_memory_limit {_SOFTWARE} format",
        _FORMATS | {"runtime": {"choices": PREDICTED_RUNTIMES}},
    ),
    "plan": Command(
        "Every way of running a pipeline: which fit, how long they take, which to take.", vaemem.plan_pipeline,
        f"{_PIPELINE} host_memory calibrate flash cache_limit time_limit link cpu cores {_SOFTWARE} format",
        _FORMATS | {"runtime": {"choices": PLANNED_RUNTIMES}},
    ),
    "bound": Command(
        "Formulas that ComfyUI and InvokeAI can paste: above every prediction of a domain.", vaemem.bound,
        f"application models dtypes sides gpu {_SOFTWARE} format", {
            "gpu": {"nargs": "+", "metavar": "GPU"},
            "format": {"choices": ("text", "python")},
        },
    ),
    "reproduce": Command(
        "The published PyTorch benchmark, row by row: measured, predicted, error.", reproduce.print_all,
        "table csv plan equation", {
            "table": {"help": "The table, by default the copy that comes with vaemem.", "nargs": "?", "default": None},
            "csv": {"help": "What is measured and predicted is also written to this file.", "default": None},
        },
    ),
    "backends": Command(
        "The instruction sets and GPUs that the engine has kernels for, and which it uses here.", vaemem.backends,
        "dtype precision",
    ),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line's words, from the tables above."""
    made = argparse.ArgumentParser(
        prog="vaemem", description="Run the VAEs of SD1.5, SDXL, SD3, FLUX and others in a memory known to the byte."
    )
    made.add_argument("--version", action="version", version=f"vaemem {vaemem.__version__}")
    made.set_defaults(function=lambda args: made.print_help())
    subparsers = made.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(name, help=command.about, description=command.about)
        sub.set_defaults(function=getattr(commands, f"run_{name}"), parser=sub)
        for flag in command.flags.split():
            _add(sub, flag, command)
    return made


def _add(sub: argparse.ArgumentParser, name: str, command: Command) -> None:
    """Adds a flag to a command, with the description and the default of the argument that it is."""
    settings = {**FLAGS[name], **command.changes.get(name, {})}
    names, name = settings.pop("option").split(), settings.pop("dest", name)
    text = settings.pop("help") or described(command.function).get(name, "")
    argument = inspect.signature(command.function).parameters.get(name)
    default = settings.get("default", argument and argument.default)
    if isinstance(default, str | float | int) and not isinstance(default, bool):
        text += f" Default: {default}."
    if names[0].startswith("-"):
        settings["dest"] = name
    if argument:
        settings.setdefault("default", argparse.SUPPRESS)
    sub.add_argument(*names, help=text.replace("%", "%%"), **settings)
