# PYTHON_ARGCOMPLETE_OK
"""The command line, `python -m vaemem COMMAND` or `vaemem COMMAND`: its words and options, which `_commands` obeys."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence

from vaemem import _commands, _core
from vaemem._common import DTYPES, OPS, PRECISIONS, TILED_OPS, __version__, need
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.plan import RUNTIMES as PLANNED_RUNTIMES
from vaemem.pipelines.predict import RUNTIMES as PREDICTED_RUNTIMES
from vaemem.prediction.benchmark import PROTOCOLS, USUAL_PROTOCOL
from vaemem.prediction.bound import APPLICATIONS, SIDES
from vaemem.prediction.runtimes import DEFAULT_TORCH, RUNTIMES
from vaemem.tables.fit import TARGETS

SIZE_HELP = "height x width of the image in pixels"


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vaemem", description="Run the VAEs of SD1.5, SDXL, SD3, FLUX and others in a memory known to the byte."
    )
    parser.add_argument("--version", action="version", version=f"vaemem {__version__}")
    parser.set_defaults(function=lambda args: parser.print_help())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=getattr(_commands, f"run_{name}"))
        return sub

    def asked(sub: argparse.ArgumentParser, ops: Sequence[str], sizes: bool = True) -> None:
        sub.add_argument("model", help=", ".join(_core.models()))
        sub.add_argument("op", choices=ops)
        if sizes:
            sub.add_argument("sizes", type=_size, nargs="+", metavar="HxW", help=SIZE_HELP)
        sub.add_argument("--batch", type=_count, default=1)

    def precise(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--precision", default="highest", choices=PRECISIONS, help="of the engine's float32 products")

    def in_numbers(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--dtype", default="float32", type=_dtype, choices=DTYPES)
        precise(sub)

    def placed(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
        in_numbers(sub)

    def on_a_card(sub: argparse.ArgumentParser, dtype: str | None = "float16") -> None:
        sub.add_argument("--dtype", default=dtype, type=_dtype, choices=DTYPES)
        sub.add_argument(
            "--runtime", choices=RUNTIMES, help="whose code (default: diffusers, for flux not in tiles bfl)"
        )
        sub.add_argument("--tile", type=_count, metavar="PIXELS", help="side of a tile of the tiled operations")
        sub.add_argument(
            "--protocol", choices=PROTOCOLS,
            help="what is read off the counters: " + "; ".join(f"{name}, {p.what}" for name, p in PROTOCOLS.items())
            + f" (default: {USUAL_PROTOCOL})",
        )  # fmt: skip
        sub.add_argument("--gpu", help="a card (default: RTX 4090) or a compute capability such as sm_89")
        sub.add_argument("--used", metavar="SIZE", help="what others hold of the card, such as '1.5 GB'")
        card_and_software(sub)
        sub.add_argument("--channels-last", action="store_true", help="the model in PyTorch's channels_last format")
        sub.add_argument("--no-tf32", action="store_true", help="torch.backends.cudnn.allow_tf32 = False")
        sub.add_argument(
            "--allocator", metavar="CONF",
            help="native, cudaMallocAsync or what PYTORCH_CUDA_ALLOC_CONF says, such as expandable_segments:True",
        )  # fmt: skip
        sub.add_argument("--cudnn-benchmark", action="store_true", help="refused: only the card knows what that takes")

    def card_and_software(sub: argparse.ArgumentParser, usual: str = DEFAULT_TORCH) -> None:
        sub.add_argument("--memory", metavar="SIZE", help="of the card, such as '16 GB', where its name leaves it open")
        sub.add_argument("--cudnn", metavar="VERSION", help="such as 9.10.2")
        sub.add_argument(
            "--torch", metavar="VERSION", help=f"such as 2.9.1+cu128; 2.9.1 is PyPI's build (default: {usual})"
        )

    def formatted(sub: argparse.ArgumentParser, forms: Sequence[str] = ("text", "csv", "json", "markdown")) -> None:
        sub.add_argument("--format", choices=forms, default="text", help="of what is printed")

    sub = command(
        "demo",
        "The whole job on a picture: does it fit, encode, decode, limits, tiles, predictions, a formula, as a page.",
    )
    sub.add_argument("--weights", metavar="FILE", help="of a VAE (default: made by hand, nothing trained)")
    sub.add_argument("--out", default="out", help="folder for everything it leaves (default: out)")

    def with_weights(sub: argparse.ArgumentParser, scaled: str) -> None:
        sub.add_argument("--weights", required=True, metavar="FILE", help="safetensors, GGUF, or diffusers' directory")
        sub.add_argument("-o", "--out", required=True, metavar="FILE")
        sub.add_argument("--model", choices=_core.models(), help="where the file leaves it open")
        sub.add_argument("--config", metavar="FILE", help="diffusers' config.json, of any other model")
        sub.add_argument("--scaled", action="store_true", help=scaled)
        sub.add_argument("--memory-limit", metavar="SIZE", help="such as '512 MiB', '2 GB' or auto")
        sub.add_argument("--progress", action="store_true")
        placed(sub)

    sub = command("decode", "Latents to pictures.")
    sub.add_argument("latents", metavar="LATENTS", help=".npy, .safetensors, ComfyUI's .latent, .pt or .pth")
    sub.add_argument("--size", type=_size, metavar="HxW", help="crop the pictures to it")
    with_weights(sub, "the latents are as a pipeline holds them")

    sub = command("encode", "Pictures to latents, as .npy.")
    sub.add_argument("images", nargs="+", metavar="IMAGE", help="files that Pillow reads, of one size")
    sub.add_argument("--pad", choices=["reflect", "edge"], help="where the size is no multiple of the latents'")
    sub.add_argument("--sample", type=_count, metavar="SEED", help="draw from the distribution (default: its mean)")
    with_weights(sub, "the latents become as a pipeline holds them")

    sub = command("info", "What a weights file holds, and what each run with it will take.")
    sub.add_argument("file", metavar="FILE", help="safetensors, GGUF, or diffusers' directory")
    sub.add_argument("--sizes", nargs="+", type=_size, default=[512, 1024, 2048], metavar="HxW")
    in_numbers(sub)

    sub = command("fits", "Whether PyTorch has room for images on a card; ends with 1 where it has none.")
    asked(sub, TILED_OPS)
    on_a_card(sub)

    sub = command("estimate", "The engine's memory before a run, without running it.")
    asked(sub, OPS)
    sub.add_argument("--memory-limit", metavar="SIZE", help="such as '512 MiB', '2 GB' or auto")
    placed(sub)
    formatted(sub)

    sub = command("tradeoff", "What less memory costs: the engine's plans, from the fastest to the smallest.")
    asked(sub, OPS)
    in_numbers(sub)
    formatted(sub)

    sub = command("sweep", "Measure the engine's memory and time over models, operations and sizes.")
    sub.add_argument("--models", nargs="+", default=["sd15", "sdxl", "flux"], metavar="MODEL")
    sub.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    sub.add_argument("--sizes", nargs="+", type=_size, default=[256, 512, (512, 768)], metavar="HxW")
    sub.add_argument("--batch", type=_count, default=1)
    placed(sub)
    sub.add_argument("--repeats", type=_count, default=1, help="runs of each case, of whose times the median is taken")
    sub.add_argument("--estimate", action="store_true", help="ask the plan, run nothing")
    sub.add_argument("--csv", metavar="FILE", help="also write the table there")
    formatted(sub)

    sub = command("fit", "Fit a*H*W*e + b to a table, for each model and operation.")
    sub.add_argument("table", metavar="CSV", help="a table of vaemem's or of the PyTorch benchmark; - reads a pipe")
    sub.add_argument("--target", choices=TARGETS, default="allocated_bytes")
    sub.add_argument("--quantile", type=float, help="a line above this share of the rows (needs SciPy); 1: above all")
    for name in ("model", "op", "dtype", "source"):
        sub.add_argument(f"--{name}", help=f"only rows of this {name}")
    formatted(sub, ("text", "python", "latex", "json"))

    sub = command("compare", "The estimators that people ship beside the rows of a table.")
    sub.add_argument("table", metavar="CSV")
    sub.add_argument("--target", choices=[t for t in TARGETS if t != "seconds"], default="reserved_bytes")
    sub.add_argument("--rows", action="store_true", help="each row, not each model, op and dtype")
    sub.add_argument(
        "--predict", action="store_true", help="vaemem.predict (a fresh process) beside ComfyUI and InvokeAI"
    )
    sub.add_argument("--sizes", type=_size, nargs="+", metavar="HxW", help="only these sizes")
    formatted(sub, ("text", "markdown"))

    sub = command("report", "Report on a table: ratios, scaling, constants, advice, published claims checked.")
    sub.add_argument("table", metavar="CSV")
    sub.add_argument("--out", default="report", help="folder for report.md, report.html and figures (default: report)")
    sub.add_argument("--device", help="where the table does not say it, such as 'RTX 4090'")
    sub.add_argument("--no-plots", action="store_true", help="no figures, which need matplotlib")

    sub = command("predict", "PyTorch's peak allocated and reserved VRAM, with no GPU and no PyTorch.")
    asked(sub, TILED_OPS)
    on_a_card(sub)
    sub.add_argument("--tensors", type=_count, default=6, help="how many of the peak's tensors to show (default: 6)")
    formatted(sub)

    sub = command("largest", "The largest image that PyTorch has room for on a card, and its prediction.")
    asked(sub, TILED_OPS, sizes=False)
    sub.add_argument("--aspect", type=float, default=1.0, help="width over height (default: 1)")
    sub.add_argument("--engine", metavar="SIZE", help="what our own engine has room for in a memory such as '2 GiB'")
    on_a_card(sub, None)  # float16, and of the engine float32
    precise(sub)

    def of_a_pipeline(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("pipeline", help=", ".join(PIPELINES))
        sub.add_argument("size", type=_size, metavar="HxW", help=SIZE_HELP)
        sub.add_argument("--batch", type=_count, default=1)
        sub.add_argument("--used", metavar="SIZE", default=0, help="what others hold of the card, such as '1.5 GB'")
        sub.add_argument("--tokens", type=_count, help="of the prompt (default: what the pipeline pads to)")
        sub.add_argument("--no-guidance", action="store_true", help="SD 1.5 and SDXL denoise each image once")
        sub.add_argument("--image", action="store_true", help="it begins with an image, which is encoded first")
        sub.add_argument("--steps", type=_count)
        sub.add_argument("--dtype", type=_dtype, choices=DTYPES)
        sub.add_argument(
            "--component", type=_pair, action="append", default=[], metavar="ROLE=TYPE",
            help="the type of a component's weights, or a file of them, such as transformer=Q8_0; may come again",
        )  # fmt: skip

    sub = command("pipeline", "What a whole pipeline takes of a card, phase by phase; 1 if it does not fit.")
    of_a_pipeline(sub)
    sub.add_argument("--runtime", choices=PREDICTED_RUNTIMES, default="diffusers")
    sub.add_argument("--gpu", default="RTX 4090", help="a card (default: RTX 4090)")
    sub.add_argument(
        "--offload", default="none", help="none, model or sequential; of sd.cpp its own (--offload-to-cpu)"
    )
    sub.add_argument(
        "--vae", default="whole", help="whole, tiled, sliced or vaemem; of sd.cpp direct, tiled and others"
    )
    sub.add_argument("--vae-memory-limit", metavar="SIZE", help="of vaemem's decoder, such as '1 GB'")
    card_and_software(sub)
    formatted(sub)

    sub = command("plan", "Every way of running a pipeline: which fit, how long they take, which to take.")
    of_a_pipeline(sub)
    sub.add_argument("--runtime", choices=PLANNED_RUNTIMES, default="diffusers")
    sub.add_argument("--gpu", help="a card; without one its --memory, and seconds only where some were --measured")
    sub.add_argument("--host-memory", metavar="SIZE", help="what the host may give, such as '16 GB'")
    sub.add_argument(
        "--measured", type=_measured, action="append", default=[], metavar="WAY=SECONDS",
        help="what a way took on this machine, by its name as the plan prints it; may come again",
    )  # fmt: skip
    sub.add_argument("--flash", action="store_true", help="sd.cpp's --diffusion-fa")
    sub.add_argument("--cache-limit", metavar="SIZE", help="of MLX's allocator")
    sub.add_argument("--time-limit", type=float, metavar="SECONDS", help="more does not count as fitting")
    sub.add_argument("--link", default="PCIe 3.0 x16", help="between host and card (default: PCIe 3.0 x16)")
    sub.add_argument("--cpu", default="AVX2", help="the host's instructions: SSE4.2, AVX, AVX2 or 'no AVX2'")
    sub.add_argument("--cores", type=_count, help="of the host's CPU")
    card_and_software(sub)
    formatted(sub)

    sub = command("bound", "Formulas that ComfyUI and InvokeAI can paste: above every prediction of a domain.")
    sub.add_argument("application", choices=APPLICATIONS)
    sub.add_argument("--models", nargs="+", metavar="MODEL", help="sd15, sdxl, flux (default: all)")
    sub.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    sub.add_argument(
        "--sides", type=_count, nargs="+", default=SIDES, metavar="PIXELS",
        help=f"every pair of these heights and widths is predicted (default: {len(SIDES)} from 256 to 2048)",
    )  # fmt: skip
    sub.add_argument("--gpu", nargs="+", default=["RTX 4090"], metavar="GPU", help="cards or compute capabilities")
    card_and_software(sub, "every cuDNN that is known")
    formatted(sub, ("text", "python"))

    sub = command("reproduce", "The published PyTorch benchmark, row by row: measured, predicted, error.")
    sub.add_argument("table", nargs="?", metavar="CSV", help="by default the copy that comes with vaemem")
    sub.add_argument("--csv", metavar="FILE", help="also write measured and predicted there")
    sub.add_argument("--plan", action="store_true", help="instead: eight published ways to fit a 12 GB card, and ours")
    sub.add_argument("--equation", action="store_true", help="instead: a published equation for SD 1.5, term by term")

    sub = command("backends", "The instruction sets and GPUs that the engine has kernels for, and which it uses here.")
    in_numbers(sub)
    return parser


def _as_options(message: str, args: argparse.Namespace) -> str:
    """What a message says of Python's arguments said of the command's options: pad='edge' as --pad edge."""

    def option(found: re.Match[str]) -> str:
        name, value = f"--{found[1].replace('_', '-')}", found[2].strip("'")
        return name if value in ("", "True") else f"{name} {shlex.quote(value)}"

    return re.sub(rf"(?<![\w/'.-])({'|'.join(vars(args))})=('[^']*'|\d*|True)(?!\.?[\w/-])", option, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 2 for bad input (a sentence on stderr, no traceback), 130 for Ctrl-C."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        need("argcomplete", "completion").autocomplete(parser)
    args, status = parser.parse_args(argv), 0
    try:
        status = args.function(args) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
    except (ValueError, OSError, ImportError, OverflowError, MemoryError, RuntimeError) as error:
        print(f"vaemem {args.command}: {_as_options(str(error), args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vaemem {args.command}: stopped", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
