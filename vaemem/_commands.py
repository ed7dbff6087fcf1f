"""What each command does: a function for each, from its parsed arguments to what is printed or written."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import warnings
from typing import Any

import numpy as np

from vaemem import (
    VAE,
    _core,
    _demo,
    backends,
    bound,
    compare,
    fit,
    plan_pipeline,
    predict,
    predict_largest,
    predict_pipeline,
    report,
    sweep,
    tradeoff,
)
from vaemem._common import ELEMENT_BYTES, MIB, OPS, check_writable, mib, need, render, saved, write
from vaemem.engine import latents, layouts, weights
from vaemem.engine.arguments import open_device
from vaemem.published import reproduce
from vaemem.published.eight_ways import reproduce_plan
from vaemem.published.equation import judge_text
from vaemem.tables.table import Table


def _table(path: str, **missing: Any) -> Table:
    """Of a CSV file, or of what is piped in: '-'."""
    return Table.from_csv(sys.stdin if path == "-" else path, **missing)


def _print(result: Any, form: str) -> None:
    text = str(result) if form == "text" else getattr(result, f"to_{form}")()
    print(text.rstrip("\n"))


def run_demo(args: argparse.Namespace) -> None:
    _demo.make_demo(args.out, args.weights)


def run_estimate(args: argparse.Namespace) -> None:
    estimates = sweep(
        args.model, args.op, args.sizes, args.dtype, device=args.device, batch=args.batch, measure=False,
        memory_limit=args.memory_limit, precision=args.precision,
    )  # fmt: skip
    _print(estimates, args.format)
    if args.format == "text":
        print("\nallocated, which leaves out the weights, in T = 128 * height * width * bytes of a number:")
        for row in estimates:
            full = 128 * row["height"] * row["width"] * row["batch"] * ELEMENT_BYTES[row["dtype"]]
            print(f"  {row['op']} {row['height']}x{row['width']}: {row['allocated_bytes'] / full:.2f} T")
        print("limit, the least --memory-limit that allows it, counts the weights too.")


def run_tradeoff(args: argparse.Namespace) -> None:
    rows = [
        row
        for h, w in args.sizes
        for row in tradeoff(args.model, args.op, h, w, args.batch, args.dtype, args.precision)
    ]
    _print(Table(rows), args.format)


def run_sweep(args: argparse.Namespace) -> None:
    if args.csv:
        check_writable(args.csv)
    ended: BaseException | None = None
    try:
        table = sweep(
            args.models, args.ops, args.sizes, args.dtype, device=args.device, batch=args.batch, repeats=args.repeats,
            precision=args.precision, measure=not args.estimate,
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
    formulas = fit(chosen, args.target, args.quantile)
    print(str(formulas) if args.format == "text" else getattr(formulas, args.format)())


def run_compare(args: argparse.Namespace) -> None:
    table = _table(args.table)
    if args.sizes:
        table = Table([row for row in table if (row["height"], row["width"]) in args.sizes])
    estimators = [predict, "comfyui", "invokeai"] if args.predict else None
    comparison = compare(table, estimators, target=args.target)
    print(comparison.text(rows=args.rows, markdown=args.format == "markdown"))


def run_report(args: argparse.Namespace) -> None:
    missing = {"device": args.device} if args.device else {}
    for file in report(_table(args.table, **missing), plots=not args.no_plots).save(args.out):
        print(file)


def _loaded(args: argparse.Namespace, parts: str) -> VAE:
    numbers = {"device": args.device, "dtype": args.dtype, "precision": args.precision}
    vae = VAE.load(args.weights, args.model, args.config, parts, **numbers)
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


def _bare(arch: layouts.Arch, dtype: str, precision: str, parts: str = "all") -> VAE:
    """On the CPU, without weights: for what its plans say."""
    _, where = open_device("cpu", dtype, precision, autotune=False, convolution="cudnn")
    return VAE(_core.Model(arch, parts, **where))


def run_info(args: argparse.Namespace) -> None:
    found = weights.look(args.file)
    vae, config = _bare(found.arch, args.dtype, args.precision, found.parts), layouts.config_of(found.arch)
    alone = "" if found.parts == "all" else f", the {found.parts} alone"
    print(f"{found.file}: {found.layout} layout, {found.tensors} tensors of {', '.join(found.dtypes)}{alone}")
    print(f"model {vae.model}, {vae.parameters:,} parameters, {mib(os.path.getsize(found.file))} MiB on disk")
    print("; ".join(f"{name} {value}" for name, value in config.items() if not name.endswith("_block_types")))
    print(sweep(vae, [op for op in OPS if found.parts in ("all", f"{op}r")], args.sizes, measure=False))


def run_fits(args: argparse.Namespace) -> int:
    """0 where all sizes fit, 1 where one does not."""
    found = [predict(args.model, args.op, h, w, args.dtype, args.batch, **_where(args)) for h, w in args.sizes]
    for p in found:
        print(f"{p.height}x{p.width} {p.outcome}: {p}")
    return 0 if all(p.fits for p in found) else 1


def _where(args: argparse.Namespace) -> dict[str, Any]:
    """What `predict` and `predict_largest` are told of the card and the software on it: what was given, by its option's
    name."""
    given = {
        "gpu": args.gpu, "memory": args.memory, "used": args.used, "cudnn_version": args.cudnn,
        "torch_version": args.torch, "runtime": args.runtime, "protocol": args.protocol, "tile": args.tile,
        "channels_last": args.channels_last or None, "allow_tf32": False if args.no_tf32 else None,
        "cudnn_benchmark": args.cudnn_benchmark or None, "allocator": args.allocator,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def run_largest(args: argparse.Namespace) -> None:
    if args.engine:
        if given := _where(args):
            raise ValueError(
                "--engine: want nothing of a card beside it, since it asks what our own engine has room for in that "
                f"memory, got {', '.join(f'{name}={value!r}' for name, value in given.items())}"
            )
        vae = _bare(layouts.known_arch(args.model), args.dtype or "float32", args.precision)
        height, width = vae.largest(args.op, args.engine, args.aspect, args.batch)
        print(f"{height}x{width}", vae.estimate(args.op, height, width, args.batch, memory_limit=args.engine), sep="\n")
        return
    if args.precision != "highest":
        raise ValueError(f"--precision: want it beside --engine, whose it is, got {args.precision}")
    dtype = args.dtype or "float16"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        height, width = predict_largest(args.model, args.op, dtype, args.batch, aspect=args.aspect, **_where(args))
    print(predict(args.model, args.op, height, width, dtype, args.batch, **_where(args)))
    for warning in said:
        print(f"vaemem largest: {warning.message}", file=sys.stderr)


def run_predict(args: argparse.Namespace) -> None:
    where = _where(args)
    if args.format != "text":
        table = sweep(args.model, args.op, args.sizes, args.dtype, source="predicted", batch=args.batch, **where)
        return _print(table, args.format)
    for height, width in args.sizes:
        prediction = predict(args.model, args.op, height, width, args.dtype, args.batch, **where)
        print(prediction)
        print(f"  workspaces: {prediction.workspace_source}")
        for tensor in prediction.peak_tensors[: args.tensors]:
            print(f"  {tensor.bytes / MIB:10.2f} MiB  {tensor.name}")


def _call(args: argparse.Namespace) -> dict[str, Any]:
    """What `predict_pipeline` and `plan_pipeline` are told of the call, the card and the software on it."""
    height, width = args.size
    return {
        "height": height, "width": width, "batch": args.batch, "dtype": args.dtype,
        "prompt_tokens": args.tokens, "guidance": not args.no_guidance,
        "components": dict(args.component), "image": args.image, "steps": args.steps, "gpu": args.gpu,
        "memory": args.memory, "used": args.used, "cudnn_version": args.cudnn, "torch_version": args.torch,
        "runtime": args.runtime,
    }  # fmt: skip


def run_pipeline(args: argparse.Namespace) -> int:
    """0 where it fits, 1 where it does not."""
    way = {"offload": args.offload, "vae": args.vae, "vae_memory_limit": args.vae_memory_limit}
    prediction = predict_pipeline(args.pipeline, **way, **_call(args))
    _print(prediction, args.format)
    return 0 if prediction.fits else 1


def run_plan(args: argparse.Namespace) -> int:
    """0 where a way fits, 1 where none does."""
    machine = {
        "host_memory": args.host_memory, "calibrate": dict(args.measured), "time_limit": args.time_limit,
        "link": args.link, "cpu": args.cpu, "cores": args.cores, "flash": args.flash, "cache_limit": args.cache_limit,
    }  # fmt: skip
    plan = plan_pipeline(args.pipeline, **machine, **_call(args))
    _print(plan, args.format)
    return 0 if plan.recommended else 1


def run_bound(args: argparse.Namespace) -> None:
    found = bound(
        args.application, args.models, args.dtypes, gpu=args.gpu, memory=args.memory, cudnn_version=args.cudnn,
        torch_version=args.torch, sides=args.sides,
    )  # fmt: skip
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
    rows = backends(args.dtype, args.precision)
    print(render(rows[0], [[str(value) for value in row.values()] for row in rows]))
