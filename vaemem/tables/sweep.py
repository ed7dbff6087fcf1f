"""Run the engine over models, operations and sizes, and write down what it took."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vaemem import _core
from vaemem._common import DTYPES, OPS, __version__, choose, latent_factor, listed, whole
from vaemem.engine.arguments import Poll, Progress, polling
from vaemem.engine.device import parse_device
from vaemem.engine.limits import Limit
from vaemem.engine.vae import VAE, Run
from vaemem.tables.table import Row, Table

# What a pixel costs, encode beside decode (1117 and 2515 GFLOP at 512x512): for the progress bar only.
_WORK = {"encode": 4, "decode": 9}


class Case(NamedTuple):
    """One thing to run on a model."""

    op: str
    height: int
    width: int
    batch: int
    dtype: str

    @property
    def work(self) -> int:
        return _WORK[self.op] * self.height * self.width * self.batch


def sweep(
    models: Any = ("sd15", "sdxl", "flux"),
    ops: str | Sequence[str] = OPS,
    sizes: int | Sequence[int | tuple[int, int]] = (256, 512, (512, 768)),
    dtypes: str | Sequence[str] = "float32",
    *,
    device: str = "cpu",
    batch: int = 1,
    measure: bool = True,
    repeats: int = 1,
    progress: Progress = None,
    memory_limit: Limit = None,
) -> Table:
    """Measure, or only estimate, the engine's memory and time.

    Parameters
    ----------
    models : names or VAE objects, or one of them
        A name gets random weights, made for this sweep and dropped after: memory and time do not depend on them.
    ops : str or sequence of str
        ``"encode"``, ``"decode"``.
    sizes : int or sequence of int and (int, int)
        Of the image in pixels, multiples of 8: an int is a square, a pair is (height, width). ``(512, 768)`` alone
        is two squares, ``[(512, 768)]`` one landscape.
    dtypes : str or sequence of str
        ``"float32"`` is the only one that the CPU engine computes in; a GPU also ``"float16"`` and ``"bfloat16"``.
    device : str
        Where named models run: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. VAE objects run where they are.
    batch : int
        Images in one run.
    measure : bool
        True runs each case; False asks the plan and runs nothing (source "estimated", no seconds).
    repeats : int
        Runs of each case; seconds is their median. The arena is given back before each case, so the first run also
        pays for its pages: with 3 or more the median is that of a warm run.
    progress : bool or callable, optional
        True shows a bar (tqdm, ``pip install 'vaemem[progress]'``); a callable gets (work done, work to do).
    memory_limit : int or str, optional
        Of each run, as for `VAE.decode`; the columns `work` and `streamed` then say what it costs.

    Returns
    -------
    Table
        One row a case, runtime "vaemem"; peaks are the largest of the runs. `allocated_bytes` is activations + scratch
        (cuDNN's workspace too) + output, `reserved_bytes` what was held from the system beside the weights. On a GPU
        arrays come from host memory and return there.

    Raises
    ------
    ValueError, TypeError
        An argument that cannot be run, named, before anything is measured on that model.
    KeyboardInterrupt, MemoryError, RuntimeError
        Whatever ends the sweep has the finished rows as its attribute ``table``.

    Examples
    --------
    >>> table = sweep(["sdxl"], ["decode"], [256, (512, 768)])
    >>> estimate = sweep(["sdxl"], ["decode"], [2048], measure=False)
    """
    batch, repeats = whole("batch", batch), whole("repeats", repeats)
    wanted = [(model, dtype) for model in _models(models) for dtype in _dtypes(dtypes, model, device)]
    asked = [Case(op, h, w, batch, "") for op in _ops(ops) for h, w in image_sizes(sizes)]
    rows: list[Row] = []
    done, work = 0, len(wanted) * repeats * sum(case.work for case in asked)
    try:
        layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        with polling(progress if measure else None, "sweep", work, layout) as poll:
            for model, dtype in wanted:
                vae = _vae(model, device, dtype)
                cases = [case._replace(dtype=dtype) for case in asked]
                estimates = _estimates(vae, cases, memory_limit)  # refuses what cannot run, before any does
                for case, estimate in zip(cases, estimates, strict=True):
                    rows.append(_measure(vae, case, repeats, poll, done, work, memory_limit) if measure else estimate)
                    done += repeats * case.work
                del vae  # one model's weights at a time
    except BaseException as error:
        error.table = Table(rows)  # type: ignore[attr-defined]
        raise
    return Table(rows)


def tradeoff(model: str | VAE, op: str, height: int, width: int, batch: int = 1) -> Table:
    """What less memory costs: the plans of one run, from the fastest to the smallest.

    Parameters
    ----------
    model : str or VAE
        Of a VAE on the CPU whose `last_run` was the same operation, `seconds` are predicted from it, by the work to do.
    op : {"encode", "decode"}
    height, width, batch : int
        Of the images, in pixels.

    Returns
    -------
    Table
        Each row takes less memory and more `work` than the one before (on a GPU the same, in smaller stripes);
        `streamed` counts the tensors that are never whole (their names: `VAE.tradeoff`). A limit of weights_bytes +
        reserved_bytes gives that plan.
    """
    _ops(op)
    (vae,) = (_vae(name, "cpu", "float32") for name in _models([model]))
    runs, last = vae.tradeoff(op, height, width, batch), vae.last_run
    speed = last.seconds / sum(last.flops) if last and last.op == op and last.seconds and vae.device == "cpu" else None
    return Table(
        _row(vae, Case(op, height, width, batch, vae.dtype), "estimated", run, limited=True)
        | ({"seconds": sum(run.flops) * speed} if speed else {})
        for run in runs
    )


def _measure(vae: VAE, case: Case, repeats: int, poll: Poll, done: int, work: int, memory_limit: Limit) -> Row:
    data = _input(vae, case)
    vae.trim()  # or a larger case's arena would count as this one's
    runs = []
    for i in range(repeats):

        def report(rows: int, total: int, before: int = done + i * case.work) -> None:
            if poll:
                poll(before + case.work * rows // total, work)

        getattr(vae, case.op)(data, progress=report, memory_limit=memory_limit)
        assert vae.last_run is not None and vae.last_run.seconds is not None  # it has just run
        runs.append((vae.last_run, vae.last_run.seconds))
    vae.trim()
    largest = max((run for run, _ in runs), key=lambda run: run.peak_bytes)
    seconds = statistics.median(seconds for _, seconds in runs)
    return _row(vae, case, "measured", largest, memory_limit is not None) | {"seconds": seconds}


def _estimates(vae: VAE, cases: Sequence[Case], memory_limit: Limit) -> list[Row]:
    runs = [vae.estimate(c.op, c.height, c.width, c.batch, memory_limit=memory_limit) for c in cases]
    limited = memory_limit is not None
    return [_row(vae, case, "estimated", run, limited) for case, run in zip(cases, runs, strict=True)]


def _row(vae: VAE, case: Case, source: str, run: Run, limited: bool = False) -> Row:
    cost = {"work": run.work, "streamed": sum(kind == "streamed" for _, kind in run.values)} if limited else {}
    return (
        cost
        | case._asdict()
        | {
            "model": vae.model,
            "runtime": "vaemem",
            "device": vae.device,
            "source": source,
            "allocated_bytes": run.activations_bytes + run.scratch_bytes + run.workspace_bytes + run.output_bytes,
            "reserved_bytes": run.reserved_bytes - run.weights_bytes,
            "weights_bytes": run.weights_bytes,
            "activations_bytes": run.activations_bytes,
            "scratch_bytes": run.scratch_bytes + run.workspace_bytes,
            "output_bytes": run.output_bytes,
            "versions": versions(run),
        }
    )


def _input(vae: VAE, case: Case) -> np.ndarray:
    """Noise of the input's shape: time and memory do not depend on the values."""
    rng = np.random.default_rng(0)
    if case.op == "encode":
        shape = (case.batch, vae.arch["in_channels"], case.height, case.width)
        return rng.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)
    factor = latent_factor(vae.arch)
    shape = (case.batch, vae.arch["latent_channels"], case.height // factor, case.width // factor)
    return rng.standard_normal(shape, dtype=np.float32)


def versions(run: Run) -> str:
    """What ran, for a table's `versions`: vaemem with its kernels and threads, Python, NumPy, the machine."""
    python, machine = platform.python_version(), platform.machine()
    engine = f"vaemem {__version__} ({run.backend}, {run.threads} threads)"
    return f"{engine}, python {python}, numpy {np.__version__}, {machine}"


# ---- arguments ----


def _models(models: Any) -> list[str | VAE]:
    known = _core.models()
    wanted = listed(models, (str, VAE))
    for model in wanted:
        if not isinstance(model, VAE) and model not in known:
            raise ValueError(f"models: want {', '.join(known)} or a VAE, got {model!r}")
    return wanted


def _vae(model: str | VAE, device: str, dtype: str) -> VAE:
    return VAE.random(model, device=device, dtype=dtype) if isinstance(model, str) else model


def _ops(ops: str | Sequence[str]) -> list[str]:
    wanted = listed(ops, str)
    for op in wanted:
        choose("ops", op, OPS)
    return wanted


def _dtypes(dtypes: str | Sequence[str], model: str | VAE, device: str) -> list[str]:
    """What a model runs in: a VAE has one type already."""
    wanted = listed(dtypes, str)
    if isinstance(model, VAE):
        known: Sequence[str] = (model.dtype,)
        wanted = [model.dtype] if wanted == ["float32"] else wanted
    else:
        known = ("float32",) if parse_device(device) is None else DTYPES
    for dtype in wanted:
        if dtype not in known:
            where = f"the VAE on {model.device}" if isinstance(model, VAE) else f"the engine on {device}"
            raise ValueError(f"dtypes: {where} computes in {', '.join(known)}, got {dtype!r}")
    return wanted


def image_sizes(sizes: Any) -> list[tuple[int, int]]:
    """(height, width) pairs; whether the model can run them is for its plan to say."""
    pairs = []
    for size in listed(sizes, int):
        pair = size if isinstance(size, tuple | list) else (size, size)
        if len(pair) != 2 or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair):
            raise ValueError(f"sizes: want a whole number or (height, width), got {size!r}")
        if min(pair) < 1:
            raise ValueError(f"sizes: want at least 1 pixel a side, got {size!r}")
        pairs.append((int(pair[0]), int(pair[1])))
    return pairs
