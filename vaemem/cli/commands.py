"""What each command does: a function for each, from its parsed arguments to what is printed or written.

A flag that is an argument of its command's function has that argument's description, as the function's documentation
says it, the kind of value that its annotation says, and its default: where it is not given, nothing is handed on.
Only the command that is asked for gets its flags, and imports what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import vaemem
from vaemem._arguments import described
from vaemem._common import (
    ELEMENT_BYTES,
    MIB,
    OPS,
    Message,
    Named,
    check_writable,
    choose,
    letters,
    need,
    render,
    saved,
    write,
)
from vaemem._render import Bullets, Facts, Sheet, in_gb, in_mib
from vaemem.cli.completion import offer
from vaemem.cli.flags import FLAGS, WORDS, FlagSettings, Later, count
from vaemem.cli.progress import show_progress

if TYPE_CHECKING:
    from vaemem.engine.configs import Arch
    from vaemem.tables.table import Table

_ON_A_CARD = (
    "dtype weights_dtype runtime tile tile_overlap slicing protocol gpu used os memory cudnn_version torch_version"
    " channels_last allow_tf32 allocator cudnn_benchmark"
)
_WEIGHTS, _RUN = "weights output of_model config", "memory_limit progress device dtype precision"
_OF_VAE = (
    "weights_dtype tile tile_overlap slicing protocol channels_last allow_tf32 allocator cudnn_benchmark calibrate_rows"
)
_OF_PIPELINE = "offload vae vae_memory_limit prompt_tokens guidance image steps components"
_PIPELINE = "pipeline size batch used prompt_tokens guidance image steps dtype components"
_SECONDS = "calibrate flash cache_limit time_limit link cpu cores"
_SOFTWARE = "memory os cudnn_version torch_version"

# What an argument's annotation says of its flag.
_KINDS: dict[str, FlagSettings] = {
    "int": {"type": count},
    "int | Sequence[int]": {"type": count},
    "float": {"type": float},
    "bool": {"action": "store_true"},
    "int | str": {"metavar": "SIZE"},
    "Limit": {"metavar": "SIZE"},
}

RENAMED = {"predict": "fits", "pipeline": "fits"}  # commands, in this release

Action = Callable[[argparse.Namespace, dict[str, Any]], int | None]
COMMANDS: dict[str, tuple[Action, str, str]] = {}  # what runs it, whose arguments it takes, its flags


def command(function: str, flags: str) -> Callable[[Action], Action]:
    """Makes a command of what is named run_COMMAND. It gets all flags, and those given that are arguments of the
    function of that name, ``"vaemem:predict"``; its documentation is the command's."""

    def add(run: Action) -> Action:
        COMMANDS[run.__name__.removeprefix("run_")] = run, function, flags
        return run

    return add


def _table(path: str, **missing: Any) -> Table:
    """The table of a CSV file, or of standard input: '-'."""
    return vaemem.Table.from_csv(sys.stdin if path == "-" else path, **missing)


def _print(result: Any, args: argparse.Namespace) -> None:
    """Print an answer in one of the formats, each a method: ``to_csv``, or ``latex`` of a formula."""
    write = getattr(result, f"to_{args.format}", None) or getattr(result, args.format, result.__str__)
    shown = {name: getattr(args, name) for name in ("all", "exact") if hasattr(args, name)}
    if shown and args.format == "text":
        shown["colour"] = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(str(write(**shown if args.format in ("text", "markdown") else {})).rstrip("\n"))


@command("vaemem._demo:make_demo", "demo_weights out")
def run_demo(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """The whole job on a picture: does it fit, encode, decode, limits, tiles, predictions, a formula, as a page."""
    from vaemem._demo import make_demo

    make_demo(**asked)


def _loaded(args: argparse.Namespace, asked: dict[str, Any], parts: str) -> vaemem.VAE:
    vae = vaemem.VAE.load(args.weights, parts=parts, **asked)
    if vae.rounded:
        said = f"{len(vae.rounded)} tensors of the weights are rounded to {vae.dtype}"
        print(f"vaemem {args.command}: {said}", file=sys.stderr)
    return vae


def _print_run(args: argparse.Namespace, vae: vaemem.VAE) -> None:
    """What the run took; on stderr what was changed or left out."""
    run = vae.last_run
    print(run)
    for note in run.notes if run else ():
        print(f"vaemem {args.command}: {note}", file=sys.stderr)


def _shown_progress(args: argparse.Namespace) -> contextlib.AbstractContextManager[Callable[[int, int], None] | None]:
    return show_progress(f"vaemem {args.command}") if args.progress else contextlib.nullcontext()


def _written(image: Any) -> dict[str, str]:
    """The formats in which Pillow writes pictures in colour, by the ends of names. It also lists formats that it only
    reads, or writes in black and white, so each is tried with one pixel."""
    known, pixel = image.registered_extensions(), image.new("RGB", (1, 1))
    formats = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats that Pillow is going to drop
        for name in set(known.values()):
            with contextlib.suppress(KeyError, ValueError, OSError):
                saved(pixel.save, format=name)
                formats.add(name)
    return {suffix: name for suffix, name in known.items() if name in formats}


@command("vaemem:VAE.load", f"latents cropped {_WEIGHTS} scaled tiling {_RUN}")
def run_decode(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Latents to pictures."""
    from vaemem.engine.latents import read_latents

    z = read_latents(args.latents)
    stem, suffix = os.path.splitext(args.out)
    known = _written(need("PIL.Image", "decode"))
    if suffix.lower() not in known:
        raise ValueError(f"--out: want a name that ends in one of {' '.join(sorted(known))}, got {args.out!r}")
    check_writable(args.out)
    with _loaded(args, asked, "decoder") as vae:
        how = {"tiling": args.tiling, "memory_limit": args.memory_limit}
        with _shown_progress(args) as tell:
            pictures = vae.decode(z, args.scaled, "pil", tell, size=args.size, **how)
        for i, picture in enumerate(pictures):
            name = args.out if len(pictures) == 1 else f"{stem}-{i}{suffix}"
            write(name, saved(picture.save, format=known[suffix.lower()]))
            print(name)
        _print_run(args, vae)


@command("vaemem:VAE.load", f"images pad sample {_WEIGHTS} become_scaled tiling {_RUN}")
def run_encode(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Pictures to latents, as .npy."""
    import numpy as np

    if not args.out.endswith(".npy"):
        raise ValueError(f"--out: want a name that ends in .npy, got {args.out!r}")
    check_writable(args.out)
    with _loaded(args, asked, "encoder") as vae:
        how = {"tiling": args.tiling, "memory_limit": args.memory_limit}
        with _shown_progress(args) as tell:
            encoded = vae.encode(args.images, args.scaled, tell, pad=args.pad, **how)
        write(args.out, saved(np.save, encoded.mode() if args.sample is None else encoded.sample(args.sample)))
        print(args.out)
        _print_run(args, vae)


def _bare(arch: Arch, dtype: str = "float32", precision: str = "highest", parts: str = "all") -> vaemem.VAE:
    """On the CPU, without weights: for what its plans say."""
    from vaemem import _core
    from vaemem.engine.device import open_device

    _, where = open_device("cpu", dtype, precision, autotune=False, convolution="auto")
    return vaemem.VAE(_core.Model(arch, parts, **where))


@command("vaemem:VAE.load", "file usual_sizes dtype precision")
def run_info(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """What a weights file holds, and what each run with it will take."""
    from vaemem.engine.configs import config_of
    from vaemem.engine.weights import look

    found = look(args.file)
    vae, config = _bare(found.arch, parts=found.parts, **asked), config_of(found.arch)
    alone = "" if found.parts == "all" else f", the {found.parts} alone"
    print(f"{found.file}: {found.layout} layout, {found.tensors} tensors of {', '.join(found.dtypes)}{alone}")
    print(f"model {vae.model}, {vae.parameters:,} parameters, {os.path.getsize(found.file) / MIB:.2f} MiB on disk")
    print("; ".join(f"{name} {value}" for name, value in config.items() if not name.endswith("_block_types")))
    print(vaemem.sweep(vae, [op for op in OPS if found.parts in ("all", f"{op}r")], args.sizes, measure=False))


def _print_all(answers: Sequence[Any], args: argparse.Namespace) -> None:
    """Print answers: one after the other, as a list in JSON, or as the rows of a table in CSV."""
    if args.format == "json":
        print(json.dumps([answer.to_dict() for answer in answers], indent=1, ensure_ascii=False))
    elif args.format == "csv":
        print(str(vaemem.Table(row for answer in answers for row in answer.rows()).to_csv()).rstrip("\n"))
    else:
        for i, answer in enumerate(answers):
            print("\n" * bool(i), end="")
            _print(answer, args)


def _status(*answers: Any, safe: bool = False) -> int:
    """How a command ends: with 0 where all go through, 1 where one does not, 3 where one is tight and `safe` asked."""
    from vaemem.prediction.verdict import DOES_NOT_FIT, TIGHT

    verdicts = {answer.verdict for answer in answers}
    return 1 if DOES_NOT_FIT in verdicts else 3 if safe and TIGHT in verdicts else 0


@command(
    "vaemem:predict vaemem:predict_pipeline",
    "model run batch gpu memory used os whose_runtime dtype cudnn_version torch_version safe all exact answer_format"
    f" | a VAE's run: {_OF_VAE} | a whole pipeline: {_OF_PIPELINE}",
)
def run_fits(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Tell whether a VAE's run or a whole pipeline fits a card, and what would fit; 1 if it does not."""
    op, sizes = args.run_words
    function = vaemem.predict if op else vaemem.predict_pipeline
    kind, other = ("a VAE's run", "a whole pipeline") if op else ("a whole pipeline", "a VAE's run")
    named = {"op": op, "model": args.model} if op else {"pipeline": args.model}
    asked = {name: value for name, value in asked.items() if name not in ("model", "op", "pipeline")}
    for name in asked.keys() - inspect.signature(function).parameters.keys():
        raise ValueError(Message(Named(name), f" is for {other}, and {args.model} {op or 'without an op'} is {kind}"))
    found: list[Any] = [function(height=h, width=w, **named, **asked) for h, w in sizes]
    _print_all(found, args)
    return _status(*found, safe="safe" in asked)


@command("vaemem:sweep", "model op sizes batch memory_limit device float32 precision format")
def run_estimate(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """The engine's memory before a run, without running it."""
    estimates = vaemem.sweep(args.model, args.op, dtypes=args.dtype, measure=False, **asked)
    _print(estimates, args)
    if args.format == "text":
        print("\nallocated, which leaves out the weights, in T = 128 * height * width * bytes of a number:")
        for row in estimates:
            full = 128 * row["height"] * row["width"] * row["batch"] * ELEMENT_BYTES[row["dtype"]]
            print(f"  {row['op']} {row['height']}x{row['width']}: {row['allocated_bytes'] / full:.2f} T")
        print("limit, the least --memory-limit that allows it, counts the weights too.")


@command("vaemem:tradeoff", "model op sizes batch dtype precision format")
def run_tradeoff(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """What less memory costs: the engine's plans, from the fastest to the smallest."""
    plans = [row for h, w in args.sizes for row in vaemem.tradeoff(height=h, width=w, **asked)]
    _print(vaemem.Table(plans), args)


@command(
    "vaemem:sweep",
    "models sweep_ops of_sizes batches sweep_tiles sweep_overlaps prompt_lengths device sweep_dtypes precision repeats"
    " estimate row_source gpus sweep_runtime sweep_offload sweep_vae csv format",
)
def run_sweep(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Memory and time over models, operations and sizes: the engine's, measured, or PyTorch's, predicted."""
    ended: BaseException | None = None
    others = {name: value for name, value in vars(args).items() if name in ("runtime", "offload", "vae") and value}
    try:
        with show_progress("vaemem sweep") as tell:
            table = vaemem.sweep(dtypes=args.dtype, **asked, **others, progress=tell)
    except BaseException as error:
        table, ended = getattr(error, "table", vaemem.Table()), error
    if len(table):
        try:
            if args.csv:
                table.to_csv(args.csv)
        finally:
            _print(table, args)
    if ended:
        raise ended


@command("vaemem:fit", "table target quantile by only_model only_op only_dtype only_source fit_format")
def run_fit(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Fit a*H*W*e + b to a table, for each model, operation and type."""
    table = _table(args.table)
    equals = {name: value for name in ("model", "op", "dtype", "source") if (value := getattr(args, name))}
    if not len(chosen := table.filter(**equals)):
        raise ValueError(f"{args.table}: no row has {', '.join(f'{n}={v}' for n, v in equals.items()) or 'anything'}")
    formulas = vaemem.fit(**asked | {"table": chosen})
    _print(formulas, args)


@command("vaemem:compare", "table byte_target rows predict only_sizes markdown_format compared_csv")
def run_compare(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """The estimators that people ship beside the rows of a table."""
    table = _table(args.table)
    if args.sizes:
        table = vaemem.Table([row for row in table if (row["height"], row["width"]) in args.sizes])
    estimators = [vaemem.predict, "comfyui", "invokeai"] if args.predict else None
    comparison = vaemem.compare(**asked | {"table": table, "estimators": estimators})
    if args.csv:
        comparison.to_csv(args.csv)
    print(comparison.text(rows=args.rows, markdown=args.format == "markdown"))


@command("vaemem:report", "table report_out where no_plots")
def run_report(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Report on a table: ratios, scaling, constants, advice."""
    missing = {"device": args.device} if args.device else {}
    for file in vaemem.report(_table(args.table, **missing), plots=not args.no_plots).save(args.out):
        print(file)


@command("vaemem:predict", f"model tiled_op batch aspect engine {_ON_A_CARD} tight highest exact plain_format")
def run_largest(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """The largest image that PyTorch surely has room for on a card, and the largest that goes through."""
    if args.engine:
        usual = {"model": None, "op": None, "batch": 1, "dtype": "float32"}
        model, op, batch, dtype = (asked.pop(name, default) for name, default in usual.items())
        if asked:
            wanted = "--engine: want nothing of a card beside it, since it asks what our own engine has room for in"
            named = [part for one in asked.items() for part in (", ", Named(*one))][1:]
            raise ValueError(Message(f"{wanted} that memory, got ", *named))
        from vaemem.engine.configs import known_arch

        vae = _bare(known_arch(model), dtype, args.precision)
        height, width = vae.largest(op, args.engine, args.aspect, batch)
        print(f"{height}x{width}", vae.estimate(op, height, width, batch, memory_limit=args.engine), sep="\n")
        return
    if args.precision != "highest":
        wanted = "want it with --engine, whose products have precisions"
        raise ValueError(f"--precision: {wanted}, got {args.precision} without")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kinds = [True, False] if asked.pop("safe", True) else [False]
        sizes = [vaemem.predict_largest(aspect=args.aspect, safe=safe, **asked) for safe in kinds]
    found = [vaemem.predict(height=height, width=width, **asked) for height, width in dict.fromkeys(sizes)]
    if args.format == "json":
        _print_all(found, args)
    else:
        size = in_mib if args.exact else in_gb
        lines = [f"{p.height}x{p.width} {p.summarize(size)}." for p in found]
        lines[0] = " ".join(filter(None, [lines[0], found[0].assumed_card]))
        print(Sheet(lines[0], [Bullets(lines[1:]), Facts(found[0].facts(size))]).text())
    for text in dict.fromkeys(str(warning.message) for warning in said):
        print(f"vaemem largest: {text}", file=sys.stderr)


@command(
    "vaemem:plan_pipeline", f"{_PIPELINE} planned_runtime gpu host_memory {_SECONDS} {_SOFTWARE} tight all exact format"
)
def run_plan(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Every way of running a pipeline: which fit, how long they take, which to take."""
    height, width = args.size
    plan = vaemem.plan_pipeline(height=height, width=width, **asked)
    _print(plan, args)
    return 0 if plan.recommended else 1


@command(
    "vaemem:predict_pipeline",
    "formula_of formula_op gpu formula_runtime dtype components offload vae vae_memory_limit image guidance memory"
    " cudnn_version torch_version fit_format",
)
def run_formula(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Show what a VAE or a whole pipeline takes of a card as an equation of the size, the batch and the prompt."""
    side = 1024  # the size that is answered first
    of_pipeline = asked.keys() & {"components", "offload", "vae", "vae_memory_limit", "image", "guidance"}
    if args.op is None:
        found = vaemem.predict_pipeline(args.model, side, side, **asked).formula
    elif of_pipeline:
        got = Named(min(of_pipeline), asked[min(of_pipeline)])
        raise ValueError(Message(got, f": want it of a whole pipeline, got it with the VAE's {args.op}"))
    else:
        found = vaemem.formula(args.model, args.op, height=side, width=side, **asked)
    _print(found, args)


@command(
    "vaemem:predict_pipeline",
    "source random size batch steps measured_offload measured_vae dtype prompt call_guidance measured_csv exact format",
)
def run_measure(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """A pipeline of diffusers on this machine's GPU, phase by phase, beside its prediction; 1 if it runs out there."""
    others = ["diffusers", "transformers", *["accelerate"] * (asked.get("offload", "none") != "none")]
    need("torch", "measure", *others)  # all that is missing, at once
    from vaemem import pytorch
    from vaemem.pipelines.components import PIPELINES, known_pipeline
    from vaemem.pipelines.pipeline_request import image_sides

    loaded = {name: asked[name] for name in ("dtype", "offload", "vae") if name in asked}
    called: dict[str, Any] = {name: asked[name] for name in ("batch", "steps") if name in asked}
    known = PIPELINES[known_pipeline("source", args.source)] if args.random else None
    height, width = args.size
    if known:
        image_sides(height, width, known.stride, f" for {args.source}")
        called.setdefault("steps", known.steps)
    if not args.guidance or (known and not known.guides):
        called["guidance_scale"] = 0.0
    elif known:
        called["negative_prompt"] = ""

    def load() -> Any:
        if pytorch.measuring.find_device(None).type == "cpu":
            said = "reserved is the process's resident size, allocated is not known, and nothing is predicted"
            print(f"vaemem measure: PyTorch finds no GPU, so it runs on the CPU: {said}", file=sys.stderr)
        return pytorch.load_pipeline(args.source, random=args.random, **loaded)

    measured = pytorch.measure_pipeline(load, height, width, prompt=args.prompt, **called)
    _print(measured, args)
    if args.csv:
        measured.to_csv(args.csv)
    return 1 if measured.out_of_memory_at else 0


MOST_OF_A_MESSAGE = 1 << 20  # characters: the end of a log, where the message is


def _piped() -> str:
    """The end of standard input."""
    if sys.stdin is None:
        raise ValueError("message: standard input is closed: give the message or a file's path")
    kept = ""
    while part := sys.stdin.read(MOST_OF_A_MESSAGE):
        kept = (kept + part)[-MOST_OF_A_MESSAGE:]
    return kept


@command("vaemem:explain", "message of_run of_op gpu runtime all exact plain_format")
def run_explain(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Which run and which tensor an out-of-memory message is about, and what would have fitted."""
    text = "-" if args.message is None else args.message
    if text == "-":
        text = _piped()
    elif len(text.split()) == 1 and (os.sep in text or Path(text).suffix) and not os.path.exists(text):
        raise ValueError(f"message: there is no file {text}, and a message has several words")
    elif os.path.isfile(text):
        data = Path(text).read_bytes()
        coding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
        text = data.decode(coding, "replace")[-MOST_OF_A_MESSAGE:]
    _print(vaemem.explain(text, **asked), args)


@command("vaemem:bound", "application models dtypes sides gpus memory cudnn_version torch_version python_format")
def run_bound(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Formulas that ComfyUI and InvokeAI can paste: above every prediction of a domain."""
    with show_progress("vaemem bound") as tell:
        found = vaemem.bound(**asked, progress=tell)
    _print(found, args)


@command("vaemem:backends", "dtype precision")
def run_backends(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """The instruction sets and GPUs that the engine has kernels for, and which it uses here."""
    rows = vaemem.backends(**asked)
    print(render(rows[0], [[str(value) for value in row.values()] for row in rows]))


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, which names the nearest flag where there is none of a name."""

    add_flags: Callable[[], None] | None = None  # a command's, when it is asked for

    def complete(self) -> None:
        """Has all flags from now on."""
        add, self.add_flags = self.add_flags, None
        if add:
            add()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        known, words = self._option_string_actions, sys.argv[1:] if args is None else args
        for word in itertools.takewhile(lambda word: word != "--" and (word[:1] == "-" or not self._subparsers), words):
            name = word.partition("=")[0]
            if name[:2] == "--" and " " not in name and not any(flag.startswith(name) for flag in known):
                near = difflib.get_close_matches(name, known, 1, 0)[0]
                self.error(f"there is no {name}; the nearest flag is {near}")
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"want nothing more, got {' '.join(others)}")
        return found, others

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """One of the choices however it is written."""
        value = super()._get_value(action, text)
        if action.choices is None or action.nargs == argparse.PARSER or not isinstance(value, str):
            return value
        return {letters(choice): choice for choice in action.choices}.get(letters(value), value)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.nargs == argparse.PARSER and value in RENAMED:
            self.error(f"{value} is now {RENAMED[value]}, with the same words")
        if action.choices is not None:
            try:
                choose("/".join(action.option_strings) or action.dest, value, action.choices)
            except ValueError as error:
                raise argparse.ArgumentError(None, str(error)) from None


def parser(at_once: Container[str] = ()) -> _Parser:
    """The command line's words, from the tables above. at_once: commands that have their flags before they are run."""
    says = "Run the VAEs of SD1.5, SDXL, SD3, FLUX and others in a memory known to the byte."
    made = _Parser(prog="vaemem", description=says)
    made.add_argument("--version", action="version", version=f"vaemem {vaemem.__version__}")
    made.set_defaults(run=lambda args: made.print_help())
    subparsers = made.add_subparsers(dest="command", metavar="COMMAND")
    for name, (run, function, flags) in COMMANDS.items():
        about = inspect.getdoc(run)
        sub = subparsers.add_parser(name, help=about, description=about)
        sub.add_flags = functools.partial(_add_all, sub, run, function, flags)
        if name in at_once:
            sub.complete()
    return made


def _add_all(sub: _Parser, run: Action, names: str, flags: str) -> None:
    """Adds a command's flags: those of one function or more, and after a | those of a group with a title."""
    known, texts = dict[str, inspect.Parameter](), dict[str, str]()
    for function in map(pkgutil.resolve_name, names.split()[::-1]):
        known |= inspect.signature(function).parameters
        texts |= described(function)
    sub.set_defaults(run=functools.partial(_run, run, known), parser=sub)
    first, *groups = flags.split(" | ")
    for title, words in [("", first), *(group.split(": ") for group in groups)]:
        where = sub.add_argument_group(f"for {title}") if title else sub
        for flag in words.split():
            _add(sub, where, flag, known, texts)


def _run(run: Action, known: Mapping[str, inspect.Parameter], args: argparse.Namespace) -> int | None:
    given = {name: value for name, value in vars(args).items() if name in known}
    given |= {name: dict(given[name]) for name in ("components", "calibrate") if isinstance(given.get(name), list)}
    if isinstance(given.get("calibrate"), str):
        given["calibrate"] = _table(given["calibrate"])
    if getattr(args, "csv", None):
        check_writable(args.csv)
    return run(args, given)


def _add(sub: _Parser, where: Any, flag: str, known: Mapping[str, inspect.Parameter], texts: Mapping[str, str]) -> None:
    """Adds a flag to a command, with the description, the kind and the default of the argument that it is."""
    settings = {key: value() if isinstance(value, Later) else value for key, value in FLAGS.get(flag, {}).items()}
    name = settings.pop("dest", flag)
    argument = known.get(name)
    text = settings.pop("help", "") or texts.get(name, "")
    default = settings.get("default", argument and argument.default)
    if isinstance(default, str | float | int) and not isinstance(default, bool):
        text += f" Default: {default}."
    if argument:
        kind = _KINDS.get(argument.annotation.removesuffix(" | None"), {})
        settings = {"default": argparse.SUPPRESS, **kind, **settings}
    if settings.get("nargs") and settings.get("choices"):  # which argparse would write four times
        settings["metavar"], text = name.upper(), f"{text} Any of {', '.join(settings['choices'])}."
    names = settings.pop("option", name if flag in WORDS else "--" + name.replace("_", "-")).split()
    if names[0].startswith("-"):
        settings["dest"] = name
    text = text.replace("%", "%%")
    said = next((one.option_strings[-1] for one in sub._actions if one.option_strings and one.help == text), None)
    offer(where.add_argument(*names, help=f"See {said}." if said else text, **settings), sub.prog.rpartition(" ")[2])
