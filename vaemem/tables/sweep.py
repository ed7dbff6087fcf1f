"""Go through models, operations and sizes: measure or estimate our engine's runs, or predict PyTorch's."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from vaemem import _core
from vaemem._arguments import shared
from vaemem._common import (
    DTYPES,
    OPS,
    TILED_OPS,
    __version__,
    choose,
    chosen,
    frames_factor,
    listed,
    meant,
    spread,
    whole,
)
from vaemem._errors import ArgumentError
from vaemem._types import Dtype, Op, Precision, TiledOp
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.engine.arrays import ends_of
from vaemem.engine.configs import known_arch, named_model
from vaemem.engine.limits import Limit
from vaemem.engine.records import Run
from vaemem.engine.vae import VAE
from vaemem.prediction.predict_vae import Prediction, predict
from vaemem.prediction.request import VAEArguments, find_card, resolve_vae
from vaemem.prediction.runtimes import architecture
from vaemem.tables.table import Row, Table

if TYPE_CHECKING:
    from concurrent.futures import Executor

SweptOp = TiledOp | Literal["pipeline"]
Sizes = int | Sequence[int | tuple[int, int]]
_MODELS, _SIZES = ("sd15", "sdxl", "flux"), (256, 512, (512, 768))
# The cost of a pixel, for the progress bar only: 1117 and 2515 GFLOP at 512x512.
_WORK = {"encode": 4, "decode": 9, "pipeline": 9}
_SWEPT = {"model", "op", "pipeline", "height", "width", "dtype", "batch", "tile", "tile_overlap", "gpu", "workspace"}


class Case(NamedTuple):
    """A run of a model: one operation at one size."""

    op: Any
    height: int
    width: int
    batch: int
    frames: int | None = None  # of a video

    @property
    def work(self) -> int:
        return _WORK[self.op.removesuffix("_tiled")] * self.height * self.width * self.batch * (self.frames or 1)

    def estimate(self, vae: VAE, limit: Limit) -> Run:
        size = self.height, self.width, self.batch
        return vae.estimate(self.op, *size, memory_limit=limit, frames=self.frames or 1)


@shared
def measure_sweep(
    models: Any = _MODELS, ops: Op | Sequence[Op] = OPS, sizes: Sizes = _SIZES,
    dtypes: Dtype | Sequence[Dtype] = "float32", *, device: str = "cpu", batch: int | Sequence[int] = 1,
    repeats: int = 1, progress: Progress = None, memory_limit: Limit = None, precision: Precision = "highest",
    executor: Executor | None = None,
) -> Table:  # fmt: skip
    """Run models at each size on the engine, and measure memory and time.

    Parameters
    ----------
    models, ops, sizes, dtypes, device, batch, memory_limit, precision of a sweep : shared
    repeats : int
        Runs of each case; seconds is their median. The engine frees its arena before each case, so the first run also
        pays for new pages. The median of 3 or more is that of a warm run.
    progress : bool or callable, optional
        True shows a bar (tqdm, ``pip install 'vaemem[progress]'``); a callable gets (work done, work to do).
    executor : shared
        Its models are names. Give each machine one worker: runs that share processors disturb each other's time.

    Returns
    -------
    Table
        One row per case; peaks are the largest of its runs. `allocated_bytes` is activations + scratch (with cuDNN's
        workspace) + output. `reserved_bytes` is the memory held from the system besides the weights.
        On a GPU arrays come from host memory and return there.

    Raises
    ------
    ValueError, TypeError
        A wrong argument, before the first run of that model.
    KeyboardInterrupt, MemoryError, RuntimeError
        An exception that ends the sweep holds the finished rows as its attribute ``table``.

    Examples
    --------
    >>> measured = measure_sweep(vae, "decode", [64, (64, 96)])
    >>> [row["height"] for row in measured], measured[0]["seconds"] > 0
    ([64, 64], True)
    """
    runs = whole("repeats", repeats)
    if executor is None:
        return _engine_table(models, ops, sizes, dtypes, batch, device, precision, memory_limit, runs, progress)
    wanted = _models(_several("models", models, (str, VAE)), _several("dtypes", dtypes))
    if not all(isinstance(model, str) for model, _ in wanted):
        raise ArgumentError("models", "names, which workers know, with an executor", "a VAE")
    cases = _cases(ops, sizes, batch, OPS)
    how = dict(device=device, precision=precision, repeats=runs, memory_limit=memory_limit)
    work = functools.partial(_measure_case, how)
    return _table(_spread_rows(work, [(*pair, case) for pair in wanted for case in cases], progress, executor))


@shared
def estimate_sweep(
    models: Any = _MODELS, ops: Op | Sequence[Op] = OPS, sizes: Sizes = _SIZES,
    dtypes: Dtype | Sequence[Dtype] = "float32", *, device: str = "cpu", batch: int | Sequence[int] = 1,
    memory_limit: Limit = None, precision: Precision = "highest", frames: int = 1,
) -> Table:  # fmt: skip
    """Estimate the engine's memory at each size from its plans, without a run.

    Parameters
    ----------
    models, ops, sizes, dtypes, device, batch, memory_limit, precision of a sweep : shared
    frames : int
        Of each video, 1 more than a multiple of 4 for Wan's VAEs, of 8 for LTX-2's. 1: images.

    Returns
    -------
    Table
        The rows of `measure_sweep`, equal to the byte, without seconds.

    Raises
    ------
    ValueError, TypeError
        A wrong argument.

    Examples
    --------
    >>> estimated = estimate_sweep(vae, "decode", [64, (64, 96)])
    >>> measured = measure_sweep(vae, "decode", [64, (64, 96)])
    >>> [row["allocated_bytes"] for row in measured] == [row["allocated_bytes"] for row in estimated]
    True
    """
    return _engine_table(models, ops, sizes, dtypes, batch, device, precision, memory_limit, frames=frames)


@shared
def predict_sweep(
    models: Any = _MODELS, ops: SweptOp | Sequence[SweptOp] = OPS, sizes: Sizes = _SIZES,
    dtypes: Dtype | Sequence[Dtype] | None = None, *, gpu: str | Sequence[str] | None = None,
    batch: int | Sequence[int] = 1, tile: int | Sequence[int] | None = None,
    tile_overlap: float | Sequence[float] | None = None, prompt_tokens: int | Sequence[int] | None = None,
    frames: int | Sequence[int] | None = None, progress: Progress = None, executor: Executor | None = None,
    **others: Any,
) -> Table:  # fmt: skip
    """Predict PyTorch's memory and time at each size on GPUs.

    Parameters
    ----------
    models : names, configs or VAE objects, or one of them
        Names of VAEs, or configs (a dict or a path). For ``"pipeline"``: names that `vaemem.predict_pipeline` takes.
    ops : str or sequence of str
        ``"encode"``, ``"decode"``, ``"encode_tiled"``, ``"decode_tiled"``, or ``"pipeline"`` for whole pipelines.
    sizes, batch of a sweep : shared
    dtypes : str or sequence of str, optional
        ``"float32"``, ``"float16"``, ``"bfloat16"``; by default the type in which the program runs that model.
    gpu : str or sequence of str, optional
        Cards, as `vaemem.predict` takes them.
    tile : int or sequence of int, optional
        For tiled ops: the side of a tile in pixels, with the default of `vaemem.predict`.
    tile_overlap : float or sequence of float, optional
        For tiled ops: the part of its side that a tile shares with the next.
    prompt_tokens : int or sequence of int, optional
        For pipelines: the length of the prompt.
    frames : int or sequence of int, optional
        For pipelines of videos: the number of frames.
    progress : bool or callable, optional
        As `measure_sweep` takes it.
    executor : shared
    **others
        Further arguments of `vaemem.predict`, or of `vaemem.predict_pipeline`, the same for every row: `runtime`,
        `torch_version`, `memory`, `offload` ... Each op gets only the arguments that the op takes.

    Returns
    -------
    Table
        One row per case and card, with `Prediction.allocated` and `reserved` of a card with enough memory, and
        `Prediction.seconds`: likely, `seconds_low` and `seconds_high`. `versions` names unusual settings and everything
        that replaces a missing cuDNN or card. A pipeline has one row per phase and one for the whole
        (`PipelinePrediction.rows`), with the weights.

    Raises
    ------
    ValueError, TypeError
        A wrong argument, or one that no op takes. The attribute ``table`` holds the finished rows.

    Examples
    --------
    >>> cards = predict_sweep("sdxl", "decode", 1024, "float16", gpu=["RTX 4090", "RTX 4060"])
    >>> [row["reserved_bytes"] >> 20 for row in cards]
    [4258, 4258]
    >>> whole = predict_sweep(["sd15", "sdxl"], "pipeline", (512, 768), gpu="T4", offload="model").filter(phase="whole")
    >>> [(row["model"], row["height"], row["reserved_bytes"] >> 20) for row in whole]
    [('sd15', 512, 1962), ('sd15', 768, 2574), ('sdxl', 512, 5342), ('sdxl', 768, 5536)]
    """
    cases = _cases(ops, sizes, batch, (*TILED_OPS, "pipeline"))
    options = {"tile": tile, "tile_overlap": tile_overlap, "prompt_tokens": prompt_tokens, "frames": frames}
    lists = {name: _several(name, value, ()) for name, value in options.items() if value is not None}
    taken = {case.op: _predictor(case.op)[1] for case in cases}
    for name in (*lists, *others):
        if not any(name in names for names in taken.values()):
            raise ArgumentError(name, "an op that takes it", ", ".join(taken))
    questions = [
        (tuple(zip(names, values, strict=True)), case)
        for case in cases
        for names in [[name for name in lists if name in taken[case.op]]]
        for values in itertools.product(*(lists[name] for name in names))
    ]
    wanted, cards = _several("models", models, (str, Mapping, VAE)), [None] if gpu is None else _several("gpu", gpu)
    found = [find_card(card, others.get("memory")).gpu.name for card in cards]  # raises before the first prediction
    types = [None] if dtypes is None else chosen("dtypes", _several("dtypes", dtypes), DTYPES)
    asked = itertools.product(_configs(wanted, taken), found if gpu is None else cards, types, questions)
    tasks = [(model, card, dtype, *question) for model, card, dtype, question in asked]
    return _table(_spread_rows(functools.partial(_predict_case, others), tasks, progress, executor))


def tradeoff(
    model: str | VAE, op: Op, height: int, width: int, batch: int = 1, dtype: Dtype = "float32",
    precision: Precision = "highest", frames: int = 1,
) -> Table:  # fmt: skip
    """Show the cost of less memory: the plans of one run, from the fastest to the smallest.

    Parameters
    ----------
    model : str or VAE
        If the `last_run` of a VAE on the CPU was the same operation, `seconds` are predicted from it.
    op : {"encode", "decode"}
    height, width, batch : int
        The images' size in pixels, and their number.
    dtype, precision : str
        For a named model, on the CPU, as for `VAE.load`. A VAE has its own.
    frames : int
        Of each video, as for `VAE.estimate`; 1 for images.

    Returns
    -------
    Table
        Each row takes less memory and more `work` than the one before. `streamed` counts the tensors that are never
        whole (`VAE.tradeoff` names them). Pass a row's `limit_bytes` as `memory_limit` to run its plan; the limit
        includes the weights.

    Examples
    --------
    >>> plans = tradeoff(vae, "decode", 256, 256)
    >>> plans[0]["work"], plans[0]["allocated_bytes"] > plans[-1]["allocated_bytes"]
    (1.0, True)
    """
    choose("ops", op, OPS)
    ((model, kind),) = _models([model], meant("dtype", dtype, DTYPES))
    shown = _shown(frames)
    vae = _vae(model, "cpu", kind, precision, shown is not None)
    runs, last = vae.tradeoff(op, height, width, batch, frames=frames), vae.last_run
    speed = last.seconds / sum(last.flops) if last and last.op == op and last.seconds and vae.device == "cpu" else None
    case = Case(op, height, width, batch, shown)
    rows = [_row(vae, case, "estimated", run, limited=True) for run in runs]
    return Table(row | {"seconds": speed and sum(run.flops) * speed} for row, run in zip(rows, runs, strict=True))


def _table(rows: Iterator[Row]) -> Table:
    """Collect the rows. An exception that ends them holds the finished ones as its attribute `table`."""
    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
    except BaseException as error:
        error.table = Table(done)  # type: ignore[attr-defined]
        raise
    return Table(done)


def _several(argument: str, values: Any, single: type | tuple[type, ...] = str) -> list[Any]:
    """List one value or several; ValueError if there is none."""
    if not (found := listed(values, single)):
        raise ArgumentError(argument, "at least one", "none")
    return found


def _shown(frames: int) -> int | None:
    """Return the frames of a video, or None for images."""
    return shown if (shown := whole("frames", frames)) > 1 else None


def _cases(ops: Any, sizes: Any, batch: Any, known: Sequence[str], frames: int = 1) -> list[Case]:
    shown = _shown(frames)
    found, pairs = chosen("ops", _several("ops", ops), known), image_sizes(_several("sizes", sizes, int))
    batches = [whole("batch", one) for one in _several("batch", batch, ())]
    return [Case(op, height, width, n, shown) for op, n, (height, width) in itertools.product(found, batches, pairs)]


def _engine_table(
    models: Any, ops: Any, sizes: Any, dtypes: Any, batch: Any, device: str, precision: str, memory_limit: Limit,
    repeats: int = 0, progress: Progress = None, frames: int = 1,
) -> Table:  # fmt: skip
    """Measure the engine's rows, or estimate them if repeats is 0."""
    cases = _cases(ops, sizes, batch, OPS, frames)
    wanted = _models(_several("models", models, (str, VAE)), _several("dtypes", dtypes))
    return _table(_runs(wanted, cases, device, precision, repeats, progress, memory_limit))


def _runs(
    wanted: Sequence[tuple[str | VAE, str]], cases: Sequence[Case], device: str, precision: str, repeats: int,
    progress: Progress, memory_limit: Limit,
) -> Iterator[Row]:  # fmt: skip
    """Yield the engine's rows; with 0 repeats they are estimates."""
    done, work = 0, len(wanted) * repeats * sum(case.work for case in cases)
    with polling(progress if repeats else None, "sweep", total=work, bar_format=BAR) as poll:
        for model, dtype in wanted:
            vae = _vae(model, device, dtype, precision, any(case.frames for case in cases))
            plans = [case.estimate(vae, memory_limit) for case in cases]  # raises before the first run
            for case, plan in zip(cases, plans, strict=True):
                if not repeats:
                    yield _row(vae, case, "estimated", plan, memory_limit is not None)
                    continue
                data, runs = _input(vae, case), list[Any]()
                vae.trim()  # otherwise a larger case's arena would count here
                for _ in range(repeats):
                    tell = poll and functools.partial(_tell, poll, done, case.work, work)
                    getattr(vae, case.op)(data, progress=tell, memory_limit=memory_limit)
                    runs.append(vae.last_run)
                    done += case.work
                vae.trim()
                seconds = statistics.median(run.seconds for run in runs)
                largest = max(runs, key=lambda run: run.peak_bytes)
                yield _row(vae, case, "measured", largest, memory_limit is not None) | {"seconds": seconds}
            del vae  # one model's weights at a time


def _tell(poll: Callable[[int, int], object], before: int, part: int, work: int, rows: int, total: int) -> None:
    """Report the sweep's progress from the progress of one run, which is `part` of the work."""
    poll(before + part * rows // total, work)


def _measure_case(how: Mapping[str, Any], task: tuple[str, str, Case]) -> list[Row]:
    model, dtype, case = task
    return list(_runs([(model, dtype)], [case], progress=None, **how))


def _spread_rows(
    work: Callable[[Any], list[Row]], tasks: Sequence[Any], progress: Progress, executor: Executor | None
) -> Iterator[Row]:
    """Yield the rows of tasks, which end with their case, in order. See `spread`."""
    done, total = 0, sum(task[-1].work for task in tasks)
    with polling(progress, "sweep", total=total, bar_format=BAR) as poll:
        for task, rows in spread(work, tasks, executor, _describe):
            yield from rows
            done += task[-1].work
            if poll:
                poll(done, total)


def _describe(task: Sequence[Any]) -> str:
    *words, case = task
    batch = f" batch {case.batch}" if case.batch > 1 else ""
    return " ".join([*filter(None, map(_word, words)), case.op, f"{case.height}x{case.width}{batch}"])


def _word(one: Any) -> str:
    if isinstance(one, tuple):  # arguments by name
        return " ".join(f"{name} {value}" for name, value in one)
    return str(one.get("name", "custom") if isinstance(one, Mapping) else one or "")


@functools.cache
def _predictor(op: str) -> tuple[Callable[..., Any], frozenset[str]]:
    """Return the function that predicts an op, and the argument names that a sweep passes to it."""
    predictor: Callable[..., Any] = predict
    if op == "pipeline":
        from vaemem.pipelines.predict_pipeline import predict_pipeline  # half of this package's import

        predictor = predict_pipeline
    tiles = {"tile", "tile_overlap"} if op.endswith("_tiled") else set()
    return predictor, frozenset(tiles | (inspect.signature(predictor).parameters.keys() - _SWEPT))


def _predict_case(others: Mapping[str, Any], task: Any) -> list[Row]:
    """Predict the rows of one task: (model, card, dtype, arguments of this case only, case)."""
    model, gpu, dtype, options, case = task
    predictor, taken = _predictor(case.op)
    run = {name: value for name, value in others.items() if name in taken} | dict(options) | case._asdict()
    run |= {"dtype": dtype, "gpu": gpu, "frames": dict(options).get("frames") or (None if case.op == "pipeline" else 1)}
    if run.pop("op") == "pipeline":
        return list(predictor(model, **run).rows())
    return list(Prediction(resolve_vae(VAEArguments(model, case.op, **run))).rows())


def _row(vae: VAE, case: Case, source: str, run: Run, limited: bool) -> Row:
    """Make the row of a run. limited: whether it shows the cost of a memory limit."""
    less = "" if vae.precision == "highest" else f", precision {vae.precision}"
    engine = f"vaemem {__version__} ({run.backend}, {run.threads} threads{less})"
    software = f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    cost = {"work": run.work, "streamed": sum(kind == "streamed" for _, kind in run.values)} if limited else {}
    return case._asdict() | cost | {
        "model": vae.model, "dtype": vae.dtype, "runtime": "vaemem", "device": vae.device, "source": source,
        "allocated_bytes": run.peak_bytes - run.weights_bytes,
        "reserved_bytes": run.reserved_bytes - run.weights_bytes,
        "weights_bytes": run.weights_bytes, "activations_bytes": run.activations_bytes,
        "scratch_bytes": run.scratch_bytes + run.workspace_bytes, "output_bytes": run.output_bytes,
        "versions": f"{engine}, {software}", "limit_bytes": max(run.peak_bytes, run.reserved_bytes),
    }  # fmt: skip


def _input(vae: VAE, case: Case) -> np.ndarray:
    """Make noise of the input's shape: time and memory do not depend on the values."""
    (scale, channels), (other, _) = ends_of(vae.arch, case.op)
    shrink = max(scale, other) // scale
    shape = (case.batch, channels, case.height // shrink, case.width // shrink)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _configs(models: Sequence[Any], ops: Container[str]) -> list[Any]:
    """Check the models to predict: names of pipelines if "pipeline" is among the ops, otherwise architectures."""
    if "pipeline" in ops:
        from vaemem.pipelines.components import known_pipeline

        return [known_pipeline("models", model) for model in models]
    configs = []
    for model in models:
        if not isinstance(model, str | os.PathLike | Mapping | VAE):
            raise ArgumentError("models", f"{', '.join(_core.models())}, a config or a VAE", repr(model))
        configs.append(model.arch if isinstance(model, VAE) else model)
        architecture(configs[-1])  # raises before the first prediction
    return configs


def _models(models: Any, dtypes: str | Sequence[str]) -> list[tuple[str | VAE, str]]:
    """Pair models with the types of their runs. A VAE has its own, whatever the default is."""
    types = chosen("dtypes", dtypes, DTYPES)
    pairs: list[tuple[str | VAE, str]] = []
    for model in listed(models, (str, VAE)):
        if isinstance(model, VAE):
            for other in types:
                if other != model.dtype and types != ["float32"]:
                    raise ArgumentError(
                        "dtypes", f"{model.dtype}, in which the VAE on {model.device} computes", repr(other)
                    )
            pairs.append((model, model.dtype))
        else:
            pairs += [(named_model("models", model, "a VAE"), dtype) for dtype in types]
    return pairs


def _vae(model: str | VAE, device: str, dtype: Any, precision: Any, of_videos: bool = False) -> VAE:
    if isinstance(model, str):
        if of_videos and frames_factor(known_arch(model)) == 1:
            raise ArgumentError("frames", f"1 for {model}, a VAE of images", "more")
        return VAE.random(model, device=device, dtype=dtype, precision=precision, videos=of_videos or None)
    if precision not in ("highest", model.precision):
        raise ArgumentError("precision", f"{model.precision}, as the VAE on {model.device} computes", repr(precision))
    return model


def image_sizes(sizes: Any) -> list[tuple[int, int]]:
    """Read (height, width) pairs. The plan checks whether the model can run them."""
    pairs = []
    for size in listed(sizes, int):
        pair = size if isinstance(size, tuple | list) else (size, size)
        if len(pair) != 2 or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair):
            raise ArgumentError("sizes", "a whole number or (height, width)", repr(size))
        if min(pair) < 1:
            raise ArgumentError("sizes", "at least 1 pixel a side", repr(size))
        pairs.append((int(pair[0]), int(pair[1])))
    return pairs
