"""The commands: a function for each, from its parsed arguments to the answer that it prints or writes.

The documentation of a function is its command's help: the first line for the list of commands, an example at the end.
A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vaemem
from vaemem._common import ELEMENT_BYTES, MIB, OPS, need, saved
from vaemem._errors import ArgumentError, FileError, Named
from vaemem._render import Bullets, Columns, Facts, Sheet, in_gb, in_mib
from vaemem._saving import check_writable, write
from vaemem.cli import folders, videos
from vaemem.cli.progress import show_progress

if TYPE_CHECKING:
    from vaemem.engine.configs import Arch
    from vaemem.tables.table import Table

_ON_A_CARD = (
    "dtype weights_dtype runtime tile tile_overlap slicing protocol gpu used os memory cudnn_version torch_version"
    " diffusers_version channels_last allow_tf32 allocator cudnn_benchmark"
)
_WEIGHTS, _RUN = "weights output of_model config", "memory_limit progress device dtype precision"
_OF_VAE = (
    "weights_dtype tile tile_overlap slicing protocol channels_last allow_tf32 allocator cudnn_benchmark calibrate_rows"
)
_OF_PIPELINE = "offload vae vae_memory_limit prompt_tokens guidance image hires_from steps components lora"
_PIPELINE = "pipeline size batch used prompt_tokens guidance image hires_from steps dtype components frames lora"
_SECONDS = "calibrate flash cache_limit time_limit link cpu cores"
_SOFTWARE = "memory os cudnn_version torch_version diffusers_version"
_ENGINE_SWEEP = "models ops of_sizes dtypes batches device precision memory_limit"

Action = Callable[[argparse.Namespace, dict[str, Any]], int | None]
COMMANDS: dict[str, tuple[Action, str, str]] = {}  # its function, the source of its arguments, its flags


def command(function: str, flags: str) -> Callable[[Action], Action]:
    """Make a command of a function run_COMMAND; run_sweep_measured is ``vaemem sweep measured``. The command gets all
    flags, and the given flags that are arguments of the function, ``"vaemem:predict"``. Its documentation is the
    command's."""

    def add(run: Action) -> Action:
        COMMANDS[run.__name__.removeprefix("run_").replace("_", " ")] = run, function, flags
        return run

    return add


def load_table(path: str, **missing: Any) -> Table:
    """Read a table from a CSV file; '-' is standard input."""
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
    """Try everything on a picture, and write the results as a web page.

    vaemem demo --out results
    """
    from vaemem._demo import make_demo

    make_demo(**asked)


def _loaded(args: argparse.Namespace, asked: dict[str, Any], parts: str) -> vaemem.VAE:
    vae = vaemem.VAE.load(args.weights, parts=parts, **asked)
    if vae.rounded:
        said = f"{len(vae.rounded)} tensors of the weights are rounded to {vae.dtype}"
        print(f"vaemem {args.command}: {said}", file=sys.stderr)
    return vae


def _print_run(args: argparse.Namespace, vae: vaemem.VAE) -> None:
    """Print the run's memory; on stderr, what was changed or left out."""
    run = vae.last_run
    print(run)
    for note in run.notes if run else ():
        print(f"vaemem {args.command}: {note}", file=sys.stderr)


def _shown_progress(args: argparse.Namespace) -> contextlib.AbstractContextManager[Callable[[int, int], None] | None]:
    return show_progress(f"vaemem {args.command}") if args.progress else contextlib.nullcontext()


def _written(image: Any) -> dict[str, str]:
    """The formats in which Pillow writes pictures in colour, by the ends of names. Pillow also lists formats that it
    only reads, or writes in black and white, so each format is tried with one pixel."""
    known, pixel = image.registered_extensions(), image.new("RGB", (1, 1))
    formats = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that Pillow will drop
        for name in set(known.values()):
            with contextlib.suppress(KeyError, ValueError, OSError):
                saved(pixel.save, format=name)
                formats.add(name)
    return {suffix: name for suffix, name in known.items() if name in formats}


@command("vaemem:VAE.load", f"latents cropped {_WEIGHTS} scaled tiling fps {_RUN}")
def run_decode(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Decode latents, or a folder of them, to pictures.

    vaemem decode z.npy --weights ae.safetensors --scaled -o picture.png
    vaemem decode latents/ --weights ae.safetensors -o pictures/
    vaemem decode video.safetensors --weights wan_2.1_vae.safetensors --scaled -o video.mp4
    """
    if os.path.isdir(args.latents):
        folders.decode_folder(args, asked)
        return
    from vaemem.engine.latents import read_latents

    z = read_latents(args.latents)
    if z.ndim == 5 and (z.shape[2] != 1 or videos.is_video_name(args.out)):
        _decode_videos(args, asked, z)
        return
    z = z[:, :, 0] if z.ndim == 5 else z
    stem, suffix = os.path.splitext(args.out)
    known = _written(need("PIL.Image", "decode"))
    if suffix.lower() not in known:
        raise ArgumentError("out", f"a name that ends in one of {' '.join(sorted(known))}", repr(args.out))
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


def _decode_videos(args: argparse.Namespace, asked: dict[str, Any], z: Any) -> None:
    """Decode latents of videos to video files, or to folders of PNG files."""
    folders.refuse_flags(args, "tiling", "cannot be used for a video", "give a memory limit: it is exact")
    names = videos.names_of(args, z.shape)
    with _loaded(args, videos.asked_for(asked, z.shape[2]), "decoder") as vae:
        with _shown_progress(args) as tell:
            made = vae.decode(z, args.scaled, "uint8", tell, size=args.size, memory_limit=args.memory_limit)
        for name, frames in zip(names, made, strict=True):
            videos.write_frames(name, frames, args.fps or videos.usual_fps(vae.arch))
            print(name)
        _print_run(args, vae)


_OF_DATASETS = "buckets step bucket_sides flip trainer shard part ray check"


@command("vaemem:VAE.load", f"images pad sample {_WEIGHTS} become_scaled tiling {_RUN} | data sets: {_OF_DATASETS}")
def run_encode(args: argparse.Namespace, asked: dict[str, Any]) -> int | None:
    """Encode pictures, or a whole data set, to latents.

    vaemem encode photo.jpg --weights ae.safetensors --pad reflect -o z.npy
    vaemem encode photos/ --weights ae.safetensors --buckets 1024 --step 64 -o latents/
    vaemem encode video.mp4 --weights wan_2.1_vae.safetensors --scaled -o z.npy
    """
    import numpy as np

    if not args.out.endswith(".npy"):
        videos.refuse_videos(args)
        if os.path.splitext(args.out)[1] and not os.path.isdir(args.out):
            raise ArgumentError("out", "a name that ends in .npy, or a folder", repr(args.out))
        return folders.encode_folder(args, asked)
    folders.refuse_flags(args, _OF_DATASETS, "is for data sets", ("give a folder instead of a file to ", Named("out")))
    check_writable(args.out)
    pictures, frames = args.images, 1
    if video := videos.read_frames(args):
        folders.refuse_flags(args, "tiling", "cannot be used for a video", "give a memory limit: it is exact")
        pictures, notes = video
        frames = pictures.shape[1]
        print(*(f"vaemem encode: {note}" for note in notes), sep="\n", end="\n" if notes else "", file=sys.stderr)
    with _loaded(args, videos.asked_for(asked, frames), "encoder") as vae:
        how = {"tiling": args.tiling, "memory_limit": args.memory_limit}
        with _shown_progress(args) as tell:
            encoded = vae.encode(pictures, args.scaled, tell, pad=args.pad, **how)
        seeded = isinstance(args.sample, int)
        found = (
            encoded.sample(args.sample) if seeded else encoded.moments if args.sample == "moments" else encoded.mode()
        )
        write(args.out, saved(np.save, found))
        print(args.out)
        _print_run(args, vae)
    return None


def _bare(arch: Arch, dtype: str = "float32", precision: str = "highest", parts: str = "all") -> vaemem.VAE:
    """Make a VAE on the CPU without weights, for its plans."""
    from vaemem import _core
    from vaemem.engine.device import open_device

    _, where = open_device("cpu", dtype, precision, autotune=False, convolution="auto")
    return vaemem.VAE(_core.Model(arch, parts, **where))


@command("vaemem:VAE.load", "file usual_sizes dtype precision plain_format")
def run_info(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Show what a weights file holds, and the memory of its runs.

    vaemem info ae.safetensors
    """
    from vaemem.engine.configs import config_of
    from vaemem.engine.weights import look

    found = look(args.file)
    vae, config = _bare(found.arch, parts=found.parts, **asked), config_of(found.arch)
    runs = vaemem.estimate_sweep(vae, [op for op in OPS if found.parts in ("all", f"{op}r")], args.sizes)
    if args.format == "json":
        held = {**found._asdict(), "file": str(found.file), "bytes": os.path.getsize(found.file), "arch": config}
        held |= {"model": vae.model, "parameters": vae.parameters, "runs": json.loads(str(runs.to_json()))}
        print(json.dumps(held, indent=1, ensure_ascii=False))
        return
    alone = "" if found.parts == "all" else f", the {found.parts} alone"
    print(f"{found.file}: {found.layout} layout, {found.tensors} tensors of {', '.join(found.dtypes)}{alone}")
    print(f"model {vae.model}, {vae.parameters:,} parameters, {os.path.getsize(found.file) / MIB:.2f} MiB on disk")
    print("; ".join(f"{name} {value}" for name, value in config.items() if not name.endswith("_block_types")))
    print(runs)


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
    """Return the exit status: 0 if all go through, 1 if one does not, 3 if one is tight with `safe`."""
    from vaemem.prediction.verdict import DOES_NOT_FIT, TIGHT

    verdicts = {answer.verdict for answer in answers}
    return 1 if DOES_NOT_FIT in verdicts else 3 if safe and TIGHT in verdicts else 0


@command(
    "vaemem:predict vaemem:predict_pipeline",
    "model run batch frames gpu memory used os whose_runtime dtype cudnn_version torch_version diffusers_version safe"
    f" all exact answer_format | a VAE's run: {_OF_VAE} | a whole pipeline: {_OF_PIPELINE}",
)
def run_fits(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Say whether a VAE's run or a pipeline fits a card, and what would.
    The exit status is 1 if one does not fit.

    vaemem fits sdxl 1024 --gpu "RTX 4060"
    """
    op, sizes = args.run_words
    function = vaemem.predict if op else vaemem.predict_pipeline
    kind, other = ("a VAE's run", "a whole pipeline") if op else ("a whole pipeline", "a VAE's run")
    named = {"op": op, "model": args.model} if op else {"pipeline": args.model}
    asked = {name: value for name, value in asked.items() if name not in ("model", "op", "pipeline")}
    for name in asked.keys() - inspect.signature(function).parameters.keys():
        raise ArgumentError(name, "", f"only for {other}; {args.model} {op or 'without an op'} is {kind}")
    found: list[Any] = [function(height=h, width=w, **named, **asked) for h, w in sizes]
    _print_all(found, args)
    return _status(*found, safe="safe" in asked)


@command("vaemem:estimate_sweep", "model op sizes batch frames memory_limit device float32 precision format")
def run_estimate(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Estimate the memory of our engine's run, without the run.

    vaemem estimate sdxl decode 1024
    """
    estimates = vaemem.estimate_sweep(args.model, args.op, dtypes=args.dtype, **asked)
    _print(estimates, args)
    if args.format == "text":
        print("\nallocated, which leaves out the weights, in T = 128 * height * width * bytes of a number:")
        for row in estimates:
            shown = row["batch"] * (row["frames"] or 1)
            full = 128 * row["height"] * row["width"] * shown * ELEMENT_BYTES[row["dtype"]]
            print(f"  {row['op']} {row['height']}x{row['width']}: {row['allocated_bytes'] / full:.2f} T")
        print("limit, the least --memory-limit that allows it, counts the weights too.")


@command("vaemem:tradeoff", "model op sizes batch frames dtype precision format")
def run_tradeoff(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Show the cost of less memory: our engine's plans, fastest first.

    vaemem tradeoff sdxl decode 1024
    """
    plans = [row for h, w in args.sizes for row in vaemem.tradeoff(height=h, width=w, **asked)]
    _print(vaemem.Table(plans), args)


def _write_table(args: argparse.Namespace, table: Table) -> None:
    """Write the CSV file if one is named, and print the table."""
    try:
        if args.csv:
            table.to_csv(args.csv)
    finally:
        _print(table, args)


def _sweep(args: argparse.Namespace, sweep: Callable[..., Table], asked: Mapping[str, Any]) -> None:
    """Run a sweep that shows its progress. If it ends early, write the finished rows."""
    try:
        with show_progress(f"vaemem {args.command}") as tell:
            table = sweep(**asked, progress=tell)
    except BaseException as error:
        if len(table := getattr(error, "table", vaemem.Table())):
            _write_table(args, table)
        raise
    _write_table(args, table)


@command("vaemem:measure_sweep", f"{_ENGINE_SWEEP} repeats csv format")
def run_sweep_measured(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Run models at each size on our engine; measure memory and time.

    vaemem sweep measured --models sdxl --sizes 256 512 --csv table.csv
    """
    _sweep(args, vaemem.measure_sweep, asked)


@command("vaemem:estimate_sweep", f"{_ENGINE_SWEEP} frames csv format")
def run_sweep_estimated(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Estimate our engine's memory at each size, without a run.

    vaemem sweep estimated --models sd15 sdxl --ops decode
    """
    _write_table(args, vaemem.estimate_sweep(**asked))


@command(
    "vaemem:predict_sweep",
    "models sweep_ops of_sizes batches sweep_tiles sweep_overlaps prompt_lengths video_lengths dtypes gpus"
    " sweep_runtime sweep_offload sweep_vae csv format",
)
def run_sweep_predicted(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Predict PyTorch's memory and time at each size on GPUs.

    vaemem sweep predicted --models sdxl --gpu T4 "RTX 4060"
    """
    others = {name: value for name in ("runtime", "offload", "vae") if (value := getattr(args, name))}
    _sweep(args, vaemem.predict_sweep, asked | others)


@command("vaemem:fit", "table target quantile by only_model only_op only_dtype only_source all fit_format")
def run_fit(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Fit a*H*W*e + b to a table, per model, operation and type.

    vaemem fit table.csv --op decode
    """
    table = load_table(args.table)
    equals = {name: value for name in ("model", "op", "dtype", "source") if (value := getattr(args, name))}
    if not len(chosen := table.filter(**equals)):
        equal = ", ".join(f"{n}={v}" for n, v in equals.items())
        raise FileError("table", f"a row with {equal or 'anything'}", "none", path=args.table)
    formulas = vaemem.fit(**asked | {"table": chosen})
    _print(formulas, args)


@command("vaemem:compare", "table byte_target predict only_sizes all markdown_format compared_csv")
def run_compare(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Compare published estimators with a table's rows.

    vaemem compare table.csv --predict
    """
    table = load_table(args.table)
    if args.sizes:
        table = vaemem.Table([row for row in table if (row["height"], row["width"]) in args.sizes])
    estimators = [vaemem.predict, "comfyui", "invokeai"] if args.predict else None
    comparison = vaemem.compare(**asked | {"table": table, "estimators": estimators})
    if args.csv:
        comparison.to_csv(args.csv)
    _print(comparison, args)


@command("vaemem:report", "table report_out where no_plots")
def run_report(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Write a report on a table: ratios, scaling, constants, advice.

    vaemem report table.csv --out report
    """
    missing = {"device": args.device} if args.device else {}
    for file in vaemem.report(load_table(args.table, **missing), plots=not args.no_plots).save(args.out):
        print(file)


@command(
    "vaemem:predict", f"model tiled_op batched_size batch aspect engine {_ON_A_CARD} tight highest exact plain_format"
)
def run_largest(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Find the largest image, or the largest batch, that fits a card.

    vaemem largest sdxl encode 1024 --gpu "RTX 4060"
    """
    for name in ("batch", "aspect"):
        if args.size and getattr(args, name, 1) != 1:
            raise ArgumentError(name, "", "cannot be used with a size, because its largest batch is found")
    batch, title = asked.pop("batch", 1), "A batch of {2}" if args.size else "{0}x{1}"
    if args.memory_limit:
        model, op, dtype = asked.pop("model"), asked.pop("op"), asked.pop("dtype", "float32")
        if asked:
            named = [part for one in asked.items() for part in (", ", Named(*one))][1:]
            wanted = "no flag of a card besides, because our own engine runs in that memory"
            raise ArgumentError("memory_limit", wanted, tuple(named))
        from vaemem.engine.configs import known_arch

        vae = _bare(known_arch(model), dtype, args.precision)
        if args.size:
            height, width = args.size
            batch = vae.largest_batch(op, height, width, args.memory_limit)
        else:
            height, width = vae.largest(op, args.memory_limit, args.aspect, batch)
        run = vae.estimate(op, height, width, batch, memory_limit=args.memory_limit)
        print(title.format(height, width, batch), run, sep="\n")
        return
    if args.precision != "highest":
        raise ArgumentError("precision", "", "cannot be used without --engine")

    def find(safe: bool) -> tuple[int, int, int]:
        if args.size:
            height, width = args.size
            return height, width, vaemem.largest_batch(height=height, width=width, safe=safe, **asked)
        return *vaemem.predict_largest(batch=batch, aspect=args.aspect, safe=safe, **asked), batch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runs = dict.fromkeys(map(find, [True, False] if asked.pop("safe", True) else [False]))
    found = [vaemem.predict(height=height, width=width, batch=count, **asked) for height, width, count in runs]
    if args.format == "json":
        _print_all(found, args)
    else:
        size = in_mib if args.exact else in_gb
        lines = [f"{title.format(p.height, p.width, p.batch)} {p.summarize(size)}." for p in found]
        lines[0] = " ".join(filter(None, [lines[0], found[0].assumed_card]))
        print(Sheet(lines[0], [Bullets(lines[1:]), Facts(found[0].facts(size))]).text())
    for text in dict.fromkeys(str(warning.message) for warning in said):
        print(f"vaemem largest: {text}", file=sys.stderr)


@command(
    "vaemem:plan_pipeline",
    f"{_PIPELINE} planned_runtime gpu host_memory {_SECONDS} {_SOFTWARE} tight code all exact format",
)
def run_plan(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """List the ways to run a pipeline on a card, and recommend one.

    vaemem plan sdxl 1024 --gpu "RTX 4060"
    """
    height, width = args.size
    plan = vaemem.plan_pipeline(height=height, width=width, **asked)
    if args.code and plan.recommended:
        print(plan.recommended.way.code)
    else:
        with contextlib.redirect_stdout(sys.stderr if args.code else sys.stdout):  # which expects a script only
            _print(plan, args)
    return 0 if plan.recommended else 1


@command(
    "vaemem:predict_pipeline",
    "formula_of formula_op gpu formula_runtime dtype components offload vae vae_memory_limit image hires_from guidance"
    " memory cudnn_version torch_version diffusers_version all fit_format",
)
def run_formula(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Write the memory of a VAE or a pipeline as an equation.

    vaemem formula sdxl decode --gpu T4
    """
    side = 1024  # the size of the first answer
    of_pipeline = asked.keys() & {"components", "offload", "vae", "vae_memory_limit", "image", "guidance"}
    if args.op is None:
        if (runtime := asked.pop("runtime", "diffusers")) != "diffusers":
            raise ArgumentError("runtime", "diffusers with a whole pipeline, or the op of a VAE", repr(runtime))
        found = vaemem.predict_pipeline(args.model, side, side, **asked).formula
    elif of_pipeline:
        why = f"cannot be used with the VAE's {args.op}, only with a whole pipeline"
        raise ArgumentError(min(of_pipeline), "", why)
    else:
        found = vaemem.formula(args.model, args.op, height=side, width=side, **asked)
    _print(found, args)


@command(
    "vaemem:predict_pipeline",
    "source run random batch steps measured_offload measured_vae dtype prompt call_guidance"
    " contribute measured_csv exact format",
)
def run_measure(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Measure a pipeline or a VAE on this GPU, next to its prediction.
    The exit status is 1 if it runs out of memory.

    vaemem measure sdxl decode 1024
    """
    op, sizes = args.run_words
    offloads = asked.get("offload", "none") != "none"
    others = ["diffusers"] if op else ["diffusers", "transformers", *["accelerate"] * offloads]
    need("torch", "measure", *others)  # names all missing packages at once
    from vaemem.pytorch.measuring import find_device

    if args.contribute and find_device(None).type == "cpu":
        raise ArgumentError("contribute", "a GPU, because a process's resident size is not scored", "a CPU")
    return _measure_vae(args, op, sizes, asked) if op else _measure_pipeline(args, sizes, asked)


def _measure_vae(args: argparse.Namespace, op: Any, sizes: list[tuple[int, int]], asked: dict[str, Any]) -> int:
    """Measure with random weights, which affect neither memory nor time."""
    from vaemem import pytorch
    from vaemem.tables.contribution import contribution

    for name in ("steps", "offload", "vae"):
        if name in asked:
            raise ArgumentError(name, "", f"only for a whole pipeline; {args.source} {op} is a VAE's run")
    is_cpu = pytorch.measuring.find_device(None).type == "cpu"
    dtype = asked.get("dtype", "float32" if is_cpu else "float16")
    try:
        table = pytorch.measure(args.source, op, sizes, dtype, batch=asked.get("batch", 1))
    except pytorch.measuring.OUT_OF_MEMORY as full:
        print(f"vaemem measure: it runs out of memory: {full}".splitlines()[0], file=sys.stderr)
        return 1
    if args.csv:
        table.to_csv(args.csv)
    if args.contribute:
        print(contribution(table), end="")
    elif args.format == "text":
        print(table)
    else:
        _print(table, args)
    for said in filter(None, map(pytorch.measuring.against_prediction, table)):
        print(f"vaemem measure: {said}", file=sys.stderr)
    return 0


def _measure_pipeline(args: argparse.Namespace, sizes: list[tuple[int, int]], asked: dict[str, Any]) -> int:
    from vaemem import pytorch
    from vaemem.pipelines.components import PIPELINES, known_pipeline
    from vaemem.pipelines.pipeline_request import image_sides
    from vaemem.tables.contribution import contribution

    loaded = {name: asked[name] for name in ("dtype", "offload", "vae") if name in asked}
    called: dict[str, Any] = {name: asked[name] for name in ("batch", "steps") if name in asked}
    known = PIPELINES[known_pipeline("source", args.source)] if args.random else None
    if len(sizes) > 1:
        raise ArgumentError("size", "one, because a pipeline is loaded for it", f"{len(sizes)}")
    ((height, width),) = sizes
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
    if args.contribute:
        print(contribution(measured.rows()), end="")
    else:
        _print(measured, args)
    if args.csv:
        measured.to_csv(args.csv)
    return 1 if measured.out_of_memory_at else 0


@command("vaemem:predict_pipeline", "folder recording dtype prompt")
def run_record(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Record any pipeline into a file, a name for other commands.

    vaemem record my_pipeline -o mine.vaemem
    """
    need("torch", "record", "diffusers", "transformers", "accelerate")
    from vaemem import pytorch

    dtype = {"dtype": asked["dtype"]} if "dtype" in asked else {}
    with show_progress("vaemem record") as tell:
        pytorch.record_pipeline(args.folder, args.out, prompt=args.prompt, progress=tell, **dtype)
    print(f'wrote {args.out}; ask for example: vaemem fits {args.out} 1024 --gpu "RTX 4060"')


MOST_OF_A_MESSAGE = 1 << 20  # characters at the end of a log, where the message is


def _piped() -> str:
    """The end of standard input."""
    if sys.stdin is None:
        raise ArgumentError("message", "", "standard input is closed", "give the message or a file's path")
    kept = ""
    while part := sys.stdin.read(MOST_OF_A_MESSAGE):
        kept = (kept + part)[-MOST_OF_A_MESSAGE:]
    return kept


@command("vaemem:explain", "message of_run of_op gpu runtime all exact plain_format")
def run_explain(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Explain an out-of-memory message, and show what would fit.

    vaemem explain "CUDA out of memory. Tried to allocate 2.25 GiB"
    """
    text = "-" if args.message is None else args.message
    if text == "-":
        text = _piped()
    elif len(text.split()) == 1 and (os.sep in text or Path(text).suffix) and not os.path.exists(text):
        raise ArgumentError("message", "a file or a message of several words", text)
    elif os.path.isfile(text):
        data = Path(text).read_bytes()
        coding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
        text = data.decode(coding, "replace")[-MOST_OF_A_MESSAGE:]
    _print(vaemem.explain(text, **asked), args)


@command("vaemem:bound", "application models dtypes sides gpus memory cudnn_version torch_version fit_format")
def run_bound(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Make a formula for ComfyUI or InvokeAI, a bound of predictions.

    vaemem bound comfyui --gpu "RTX 4090"
    """
    with show_progress("vaemem bound") as tell:
        found = vaemem.bound(**asked, progress=tell)
    _print(found, args)


@command("vaemem:backends", "dtype precision plain_format")
def run_backends(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """List instruction sets and GPUs that the engine supports.

    vaemem backends
    """
    rows = vaemem.backends(**asked)
    if args.format == "json":
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    print(Columns([*rows[0]], [[str(value) for value in row.values()] for row in rows]).text())


@command("vaemem.nodes:install_comfyui", "comfyui_path")
def run_comfyui(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Install vaemem's nodes into a ComfyUI.

    vaemem comfyui ComfyUI
    """
    from vaemem.nodes import install_comfyui

    print(f"The nodes are in {install_comfyui(**asked)}.")
    print("Start ComfyUI with a Python that has vaemem and matplotlib. The nodes are in the category vaemem.")


@command("vaemem.nodes:install_invokeai", "invokeai_path")
def run_invokeai(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Install vaemem's nodes into an InvokeAI.

    vaemem invokeai invokeai
    """
    from vaemem.nodes import install_invokeai

    print(f"The nodes are in {install_invokeai(**asked)}.")
    print("Start InvokeAI with a Python that has vaemem. The names of the nodes end in (vaemem).")
