"""What each command does: a function for each, from its parsed arguments to what is printed or written."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import vaemem
from vaemem import _core, _demo
from vaemem._common import ELEMENT_BYTES, MIB, OPS, Message, Named, check_writable, mib, need, render, saved, write
from vaemem.engine import latents, layouts, weights
from vaemem.engine.arguments import open_device
from vaemem.published import reproduce
from vaemem.published.eight_ways import reproduce_plan
from vaemem.published.equation import judge_text
from vaemem.tables.table import Table


def _table(path: str, **missing: Any) -> Table:
    """The table of a CSV file, or of standard input: '-'."""
    return Table.from_csv(sys.stdin if path == "-" else path, **missing)


def _print(result: Any, form: str) -> None:
    text = str(result) if form == "text" else getattr(result, f"to_{form}")()
    print(text.rstrip("\n"))


def _given(args: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """What was given of a function's arguments."""
    pairs = ("components", "calibrate")
    known = inspect.signature(function).parameters
    return {name: dict(value) if name in pairs else value for name, value in vars(args).items() if name in known}


def run_demo(args: argparse.Namespace) -> None:
    _demo.make_demo(args.out, args.weights)


def run_estimate(args: argparse.Namespace) -> None:
    estimates = vaemem.sweep(args.model, args.op, dtypes=args.dtype, measure=False, **_given(args, vaemem.sweep))
    _print(estimates, args.format)
    if args.format == "text":
        print("\nallocated, which leaves out the weights, in T = 128 * height * width * bytes of a number:")
        for row in estimates:
            full = 128 * row["height"] * row["width"] * row["batch"] * ELEMENT_BYTES[row["dtype"]]
            print(f"  {row['op']} {row['height']}x{row['width']}: {row['allocated_bytes'] / full:.2f} T")
        print("limit, the least --memory-limit that allows it, counts the weights too.")


def run_tradeoff(args: argparse.Namespace) -> None:
    asked = _given(args, vaemem.tradeoff)
    _print(Table([row for h, w in args.sizes for row in vaemem.tradeoff(height=h, width=w, **asked)]), args.format)


def run_sweep(args: argparse.Namespace) -> None:
    if args.csv:
        check_writable(args.csv)
    ended: BaseException | None = None
    try:
        table = vaemem.sweep(
            dtypes=args.dtype, measure=not args.estimate, **_given(args, vaemem.sweep),
            progress=sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None,
        )  # fmt: skip
    except BaseException as error:
        table, ended = getattr(error, "table", Table()), error
    if len(table):
        try:
            if args.csv:
                table.to_csv(args.csv)
        finally:
            _print(table, args.format)
    if ended:
        raise ended


def run_fit(args: argparse.Namespace) -> None:
    table = _table(args.table)
    equals = {name: value for name in ("model", "op", "dtype", "source") if (value := getattr(args, name))}
    if not len(chosen := table.filter(**equals)):
        raise ValueError(f"{args.table}: no row has {', '.join(f'{n}={v}' for n, v in equals.items()) or 'anything'}")
    formulas = vaemem.fit(**{**_given(args, vaemem.fit), "table": chosen})
    print(str(formulas) if args.format == "text" else getattr(formulas, args.format)())


def run_compare(args: argparse.Namespace) -> None:
    table = _table(args.table)
    if args.sizes:
        table = Table([row for row in table if (row["height"], row["width"]) in args.sizes])
    estimators = [vaemem.predict, "comfyui", "invokeai"] if args.predict else None
    comparison = vaemem.compare(**{**_given(args, vaemem.compare), "table": table, "estimators": estimators})
    print(comparison.text(rows=args.rows, markdown=args.format == "markdown"))


def run_report(args: argparse.Namespace) -> None:
    missing = {"device": args.device} if args.device else {}
    for file in vaemem.report(_table(args.table, **missing), plots=not args.no_plots).save(args.out):
        print(file)


def _loaded(args: argparse.Namespace, parts: str) -> vaemem.VAE:
    vae = vaemem.VAE.load(args.weights, parts=parts, **_given(args, vaemem.VAE.load))
    if vae.rounded:
        said = f"{len(vae.rounded)} tensors of the weights are rounded to {vae.dtype}"
        print(f"vaemem {args.command}: {said}", file=sys.stderr)
    return vae


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


def run_decode(args: argparse.Namespace) -> None:
    z = latents.read_latents(args.latents)
    stem, suffix = os.path.splitext(args.out)
    known = _written(need("PIL.Image", "decode"))
    if suffix.lower() not in known:
        raise ValueError(f"--out: want a name that ends in one of {' '.join(sorted(known))}, got {args.out!r}")
    check_writable(args.out)
    with _loaded(args, "decoder") as vae:
        pictures = vae.decode(z, args.scaled, "pil", args.progress, memory_limit=args.memory_limit, size=args.size)
        for i, picture in enumerate(pictures):
            name = args.out if len(pictures) == 1 else f"{stem}-{i}{suffix}"
            write(name, saved(picture.save, format=known[suffix.lower()]))
            print(name)
        print(vae.last_run)


def run_encode(args: argparse.Namespace) -> None:
    if not args.out.endswith(".npy"):
        raise ValueError(f"--out: want a name that ends in .npy, got {args.out!r}")
    check_writable(args.out)
    with _loaded(args, "encoder") as vae:
        encoded = vae.encode(args.images, args.scaled, args.progress, memory_limit=args.memory_limit, pad=args.pad)
        write(args.out, saved(np.save, encoded.mode() if args.sample is None else encoded.sample(args.sample)))
        print(args.out, vae.last_run, sep="\n")


def _bare(arch: layouts.Arch, dtype: str = "float32", precision: str = "highest", parts: str = "all") -> vaemem.VAE:
    """On the CPU, without weights: for what its plans say."""
    _, where = open_device("cpu", dtype, precision, autotune=False, convolution="cudnn")
    return vaemem.VAE(_core.Model(arch, parts, **where))


def run_info(args: argparse.Namespace) -> None:
    found = weights.look(args.file)
    vae, config = _bare(found.arch, parts=found.parts, **_given(args, _bare)), layouts.config_of(found.arch)
    alone = "" if found.parts == "all" else f", the {found.parts} alone"
    print(f"{found.file}: {found.layout} layout, {found.tensors} tensors of {', '.join(found.dtypes)}{alone}")
    print(f"model {vae.model}, {vae.parameters:,} parameters, {mib(os.path.getsize(found.file))} MiB on disk")
    print("; ".join(f"{name} {value}" for name, value in config.items() if not name.endswith("_block_types")))
    print(vaemem.sweep(vae, [op for op in OPS if found.parts in ("all", f"{op}r")], args.sizes, measure=False))


def run_fits(args: argparse.Namespace) -> int:
    """0 where all sizes fit, 1 where one does not."""
    found = [vaemem.predict(height=h, width=w, **_given(args, vaemem.predict)) for h, w in args.sizes]
    for p in found:
        print(f"{p.height}x{p.width} {p.outcome}: {p}")
    return 0 if all(p.fits for p in found) else 1


def run_largest(args: argparse.Namespace) -> None:
    asked = _given(args, vaemem.predict)
    if args.engine:
        usual = {"model": None, "op": None, "batch": 1, "dtype": "float32"}
        model, op, batch, dtype = (asked.pop(name, default) for name, default in usual.items())
        if asked:
            wanted = "--engine: want nothing of a card beside it, since it asks what our own engine has room for in"
            named = [part for one in asked.items() for part in (", ", Named(*one))][1:]
            raise ValueError(Message(f"{wanted} that memory, got ", *named))
        vae = _bare(layouts.known_arch(model), dtype, args.precision)
        height, width = vae.largest(op, args.engine, args.aspect, batch)
        print(f"{height}x{width}", vae.estimate(op, height, width, batch, memory_limit=args.engine), sep="\n")
        return
    if args.precision != "highest":
        raise ValueError(f"--precision: want it beside --engine, whose it is, got {args.precision}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        height, width = vaemem.predict_largest(aspect=args.aspect, **asked)
    print(vaemem.predict(height=height, width=width, **asked))
    for warning in said:
        print(f"vaemem largest: {warning.message}", file=sys.stderr)


def run_predict(args: argparse.Namespace) -> None:
    asked = _given(args, vaemem.predict)
    if args.format != "text":
        of = {"models": asked.pop("model"), "ops": asked.pop("op"), "dtypes": asked.pop("dtype", "float16")}
        return _print(vaemem.sweep(sizes=args.sizes, source="predicted", **of, **asked), args.format)
    for height, width in args.sizes:
        prediction = vaemem.predict(height=height, width=width, **asked)
        print(prediction)
        print(f"  workspaces: {prediction.workspace_source}")
        for tensor in prediction.peak_tensors[: args.tensors]:
            print(f"  {tensor.bytes / MIB:10.2f} MiB  {tensor.name}")


def run_pipeline(args: argparse.Namespace) -> int:
    """0 where it fits, 1 where it does not."""
    height, width = args.size
    prediction = vaemem.predict_pipeline(height=height, width=width, **_given(args, vaemem.predict_pipeline))
    _print(prediction, args.format)
    return 0 if prediction.fits else 1


def run_plan(args: argparse.Namespace) -> int:
    """0 where a way fits, 1 where none does."""
    height, width = args.size
    plan = vaemem.plan_pipeline(height=height, width=width, **_given(args, vaemem.plan_pipeline))
    _print(plan, args.format)
    return 0 if plan.recommended else 1


def run_bound(args: argparse.Namespace) -> None:
    found = vaemem.bound(**_given(args, vaemem.bound))
    print(found if args.format == "text" else found.python().rstrip("\n"))


def run_reproduce(args: argparse.Namespace) -> None:
    if args.plan or args.equation:
        if args.table or args.csv:
            raise ValueError("--plan, --equation: want neither a table nor --csv beside them")
        print("\n\n".join([reproduce_plan()] * args.plan + [judge_text()] * args.equation))
        return
    if args.csv:
        check_writable(args.csv)
    reproduce.print_all(args.table, args.csv)


def run_backends(args: argparse.Namespace) -> None:
    rows = vaemem.backends(**_given(args, vaemem.backends))
    print(render(rows[0], [[str(value) for value in row.values()] for row in rows]))
