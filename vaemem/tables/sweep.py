"""Go over models, operations and sizes, and write down what the engine takes, or what PyTorch is predicted to take."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vaemem import _core
from vaemem._common import DTYPES, OPS, TILED_OPS, Message, Named, __version__, choose, chosen, listed, meant, whole
from vaemem._types import Dtype, Op, Precision, TiledOp
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.engine.arrays import ends_of
from vaemem.engine.configs import named_model
from vaemem.engine.limits import Limit
from vaemem.engine.records import Run
from vaemem.engine.vae import VAE
from vaemem.prediction.predict import Prediction, predict
from vaemem.prediction.request import VAEArguments, find_card, resolve_vae
from vaemem.prediction.runtimes import architecture
from vaemem.tables.table import SOURCES, Row, Table

SweptOp = TiledOp | Literal["pipeline"]
# What a pixel costs, encode beside decode (1117 and 2515 GFLOP at 512x512): for the progress bar only.
_WORK = {"encode": 4, "decode": 9, "pipeline": 9}
_SWEPT = {"model", "op", "pipeline", "height", "width", "dtype", "batch", "tile", "tile_overlap", "gpu", "workspace"}


@functools.cache
def _asked(of_pipelines: bool) -> tuple[Callable[..., Any], frozenset[str]]:
    """What is asked for predictions, of a VAE or of a whole pipeline, and those of its arguments that are handed on as
    they are."""
    asked: Callable[..., Any] = predict
    if of_pipelines:
        from vaemem.pipelines.predict_pipeline import predict_pipeline  # half of this package's import

        asked = predict_pipeline
    return asked, frozenset(inspect.signature(asked).parameters) - _SWEPT


class Case(NamedTuple):
    """One thing to run on a model."""

    op: Any
    height: int
    width: int
    batch: int
    tile: int | None = None
    tile_overlap: float | None = None

    @property
    def work(self) -> int:
        return _WORK[self.op.removesuffix("_tiled")] * self.height * self.width * self.batch


def sweep(
    models: Any = ("sd15", "sdxl", "flux"), ops: SweptOp | Sequence[SweptOp] = OPS,
    sizes: int | Sequence[int | tuple[int, int]] = (256, 512, (512, 768)),
    dtypes: Dtype | Sequence[Dtype] | None = None, *, source: str | None = None, device: str | None = None,
    gpu: str | Sequence[str] | None = None, batch: int | Sequence[int] = 1, tile: int | Sequence[int] | None = None,
    tile_overlap: float | Sequence[float] | None = None, prompt_tokens: int | Sequence[int] | None = None,
    measure: bool = True, repeats: int = 1, progress: Progress = None, memory_limit: Limit = None,
    precision: Precision = "highest", **others: Any,
) -> Table:  # fmt: skip
    """Measure or estimate the engine's memory and time, or predict PyTorch's memory on GPUs.

    Parameters
    ----------
    models : names or VAE objects, or one of them
        A name gets random weights, made for this sweep and dropped after: memory and time do not depend on them.
        Predicted, also configs: a dict, or a path.
    ops : str or sequence of str
        ``"encode"``, ``"decode"``; predicted, also ``"encode_tiled"``, ``"decode_tiled"``, and ``"pipeline"``: whole
        pipelines, of which models are the names that `vaemem.predict_pipeline` takes.
    sizes : int or sequence of int and (int, int)
        The image's, in pixels, multiples of 8: an int is a square, a pair is (height, width). ``(512, 768)`` alone
        is two squares, ``[(512, 768)]`` one landscape.
    dtypes : str or sequence of str, optional
        ``"float32"``, ``"float16"``, ``"bfloat16"``; by default float32 for the engine, and predicted what the program
        runs that model in, as `vaemem.predict` does. VAE objects have their own.
    source : {"measured", "estimated", "predicted"}, optional
        "measured" runs each case on the engine; "estimated" asks its plan and runs nothing (no seconds); "predicted"
        asks `vaemem.predict`, or `vaemem.predict_pipeline`, what PyTorch takes on each GPU. By default "predicted" with
        ``"pipeline"`` among the ops, else "measured".
    device : str, optional
        Where the engine runs named models: ``"cpu"`` (default), ``"cuda"``, ``"cuda:1"``. VAE objects run where they
        are.
    gpu : str or sequence of str, optional
        Predicted: the cards, as `vaemem.predict` takes them.
    batch : int or sequence of int
        Images in one run.
    tile : int or sequence of int, optional
        Predicted, of tiled ops: the side of a tile in pixels, as `vaemem.predict` takes it, with the same default.
    tile_overlap : float or sequence of float, optional
        The same: the part of its side that a tile shares with the next.
    prompt_tokens : int or sequence of int, optional
        Of pipelines: how long the prompt is.
    measure : bool
        False is ``source="estimated"``.
    repeats : int
        Runs of each case; seconds is their median. The arena is given back before each case, so the first run also
        pays for its pages: with 3 or more the median is that of a warm run.
    progress : bool or callable, optional
        True shows a bar (tqdm, ``pip install 'vaemem[progress]'``); a callable gets (work done, work to do).
    memory_limit : int or str, optional
        A limit for each run of the engine, as for `VAE.decode`; the columns `work` and `streamed` then say what it
        costs.
    precision : {"highest", "high", "medium"}
        For named models in float32, as for `VAE.load`; other types want "highest". VAE objects have their own.
    **others
        Predicted: `runtime`, `torch_version`, `cudnn_version`, `weights_dtype`, `slicing`, `memory`, `used`,
        `protocol`, `channels_last`, `allow_tf32`, `allocator` and `calibrate`, as `vaemem.predict` takes them, for
        every row; of pipelines `offload`, `vae`, `components`, `guidance`, `image` and what else
        `vaemem.predict_pipeline` takes.

    Returns
    -------
    Table
        One row a case. The engine's have runtime "vaemem"; peaks are the largest of the runs. `allocated_bytes` is
        activations + scratch (cuDNN's workspace too) + output, `reserved_bytes` what was held from the system beside
        the weights. On a GPU arrays come from host memory and return there.
        Predicted rows have the runtime whose code it is, the card's full name as `device`, and `Prediction.allocated`
        and `reserved`, which are those of a card with room for them: whether it fits, `vaemem.predict` says. Their
        `seconds` are `Prediction.seconds`, likely, from `seconds_low` to `seconds_high`. `versions`
        tells what stood in for the cuDNN or the card that was asked for, and the settings that are not as usual: of a
        tiled op the tile's side, or that one tile holds the whole image. A tiled op's `tile` and `tile_overlap` are
        columns too. Of a pipeline there is a row for each phase and one of the whole (`PipelinePrediction.rows`), with
        the weights.

    Raises
    ------
    ValueError, TypeError
        An argument that cannot be run, named, before anything is measured on that model; one that belongs to the engine
        given with "predicted", or the other way round.
    KeyboardInterrupt, MemoryError, RuntimeError
        Whatever ends the sweep has the finished rows as its attribute ``table``.

    Examples
    --------
    >>> measured = sweep(vae, "decode", [64, (64, 96)])
    >>> estimated = sweep(vae, "decode", [64, (64, 96)], source="estimated")
    >>> [row["allocated_bytes"] for row in measured] == [row["allocated_bytes"] for row in estimated]
    True
    >>> cards = sweep("sdxl", "decode", 1024, "float16", source="predicted", gpu=["RTX 4090", "RTX 4060"])
    >>> [row["reserved_bytes"] >> 20 for row in cards]
    [4258, 4258]
    >>> whole = sweep(["sd15", "sdxl"], "pipeline", (512, 768), gpu="T4", offload="model").filter(phase="whole")
    >>> [(row["model"], row["height"], row["reserved_bytes"] >> 20) for row in whole]
    [('sd15', 512, 1962), ('sd15', 768, 2570), ('sdxl', 512, 5342), ('sdxl', 768, 5536)]
    """
    models, asked_for, pairs = listed(models, (str, Mapping, VAE)), listed(ops, str), image_sizes(sizes)
    types, cards = listed(dtypes, str), [None] if gpu is None else listed(gpu, str)
    lengths, tiles, overlaps = (listed(one, ()) for one in (prompt_tokens, tile, tile_overlap))
    batches, repeats = [whole("batch", one) for one in listed(batch, ())], whole("repeats", repeats)
    lists = {"models": models, "ops": asked_for, "sizes": pairs, "dtypes": types, "gpu": cards, "batch": batches,
             "tile": tiles, "tile_overlap": overlaps, "prompt_tokens": lengths}  # fmt: skip
    if lacking := [name for name, values in lists.items() if not values]:
        raise ValueError(f"{lacking[0]}: want at least one, got none")
    if source is None:
        source = "estimated" if not measure else "predicted" if "pipeline" in asked_for else "measured"
    choose("source", source, SOURCES)
    if not measure and source != "estimated":
        raise ValueError(Message("source: want estimated with ", Named("measure", False), f", got {source}"))
    is_predicted, kinds = source == "predicted", {op == "pipeline" for op in asked_for}
    if True in kinds and not is_predicted:
        instead = "whole pipelines are predicted, by source predicted, and measured by `vaemem measure`"
        raise ValueError(f"ops: want encode or decode with source {source}, got pipeline; {instead}")
    told = [*others, *(["prompt_tokens"] if prompt_tokens is not None else [])]
    cut = [name for name, value in (("tile", tile), ("tile_overlap", tile_overlap)) if value is not None]
    for name in told:
        taken_by = {kind for kind in (False, True) if name in _asked(kind)[1]}
        if not taken_by:
            raise TypeError(f"sweep() got an unexpected keyword argument {name!r}")
        if taken_by.isdisjoint(kinds):
            right = "a VAE's op" if True in kinds else "pipeline"
            raise ValueError(f"{name}: want it with {right} among the ops, got it with {', '.join(asked_for)}")
    engine = {"device": device is not None, "repeats": repeats > 1, "memory_limit": memory_limit is not None,
              "precision": precision != "highest"}  # fmt: skip
    foreign = engine if is_predicted else {"gpu": gpu is not None} | dict.fromkeys([*told, *cut], True)
    for name in (name for name, is_given in foreign.items() if is_given):  # which means nothing with this source
        right = "measured or estimated" if is_predicted else "predicted"
        raise ValueError(f"{name}: want it with source {right}, got it with {source}")
    known = (*TILED_OPS, "pipeline") if is_predicted else OPS
    wanted_ops = chosen("ops", asked_for, known)
    if cut and not any(op.endswith("_tiled") for op in wanted_ops):
        raise ValueError(f"{cut[0]}: want it with a tiled op among the ops, got it with {', '.join(wanted_ops)}")
    cases = [
        Case(op, height, width, images, *one)
        for op, images, (height, width) in itertools.product(wanted_ops, batches, pairs)
        for one in (itertools.product(tiles, overlaps) if op.endswith("_tiled") else [()])
    ]
    if is_predicted:
        found = [find_card(card, others.get("memory")).gpu.name for card in cards]  # refuses an unknown one before all
        cards = found if gpu is None else listed(gpu, str)
        types = [None] if dtypes is None else chosen("dtypes", types, DTYPES)
        return _table(_predictions(_configs(models, asked_for), cards, types, cases, progress, others, lengths))
    wanted, place = _models(models, "float32" if dtypes is None else types), "cpu" if device is None else device
    return _table(_runs(wanted, cases, place, precision, repeats * (source == "measured"), progress, memory_limit))


def tradeoff(
    model: str | VAE, op: Op, height: int, width: int, batch: int = 1, dtype: Dtype = "float32",
    precision: Precision = "highest",
) -> Table:  # fmt: skip
    """What less memory costs: the plans of one run, from the fastest to the smallest.

    Parameters
    ----------
    model : str or VAE
        From the `last_run` of a VAE on the CPU, where it was the same operation, `seconds` are predicted by the work to
        do.
    op : {"encode", "decode"}
    height, width, batch : int
        The images' size in pixels, and how many they are.
    dtype, precision : str
        For a named model, on the CPU, as for `VAE.load`. A VAE has its own.

    Returns
    -------
    Table
        Each row takes less memory and more `work` than the one before;
        `streamed` counts the tensors that are never whole (their names: `VAE.tradeoff`). `limit_bytes` as
        ``memory_limit`` gives that plan; it counts the weights too.

    Examples
    --------
    >>> plans = tradeoff(vae, "decode", 256, 256)
    >>> plans[0]["work"], plans[0]["allocated_bytes"] > plans[-1]["allocated_bytes"]
    (1.0, True)
    """
    choose("ops", op, OPS)
    ((model, kind),) = _models([model], meant("dtype", dtype, DTYPES))
    vae = _vae(model, "cpu", kind, precision)
    runs, last = vae.tradeoff(op, height, width, batch), vae.last_run
    speed = last.seconds / sum(last.flops) if last and last.op == op and last.seconds and vae.device == "cpu" else None
    case = Case(op, height, width, batch)
    rows = [_row(vae, case, "estimated", run, limited=True) for run in runs]
    return Table(row | {"seconds": speed and sum(run.flops) * speed} for row, run in zip(rows, runs, strict=True))


def _table(rows: Iterator[Row]) -> Table:
    """The rows; whatever ends them has the finished ones as its attribute `table`."""
    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
    except BaseException as error:
        error.table = Table(done)  # type: ignore[attr-defined]
        raise
    return Table(done)


def _runs(
    wanted: Sequence[tuple[str | VAE, str]], cases: Sequence[Case], device: str, precision: str, repeats: int,
    progress: Progress, memory_limit: Limit,
) -> Iterator[Row]:  # fmt: skip
    """The engine's rows; without repeats they are estimates."""
    done, work = 0, len(wanted) * repeats * sum(case.work for case in cases)
    with polling(progress if repeats else None, "sweep", total=work, bar_format=BAR) as poll:
        for model, dtype in wanted:
            vae = _vae(model, device, dtype, precision)
            plans = [
                vae.estimate(*case[:4], memory_limit=memory_limit) for case in cases
            ]  # refuses all that cannot run
            for case, plan in zip(cases, plans, strict=True):
                if not repeats:
                    yield _row(vae, case, "estimated", plan, memory_limit is not None)
                    continue
                data, runs = _input(vae, case), list[Any]()
                vae.trim()  # or a larger case's arena would count as this one's
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
    """How much of a sweep's work is done, of which one run is a part."""
    poll(before + part * rows // total, work)


def _predictions(
    models: Sequence[Any], gpus: Sequence[str], dtypes: Sequence[str | None], cases: Sequence[Case], progress: Progress,
    others: Mapping[str, Any], lengths: Sequence[int | None],
) -> Iterator[Row]:  # fmt: skip
    """PyTorch's rows on each card."""
    wanted = list(itertools.product(models, gpus, dtypes, cases))
    of_vae, of_pipeline = ({name: others[name] for name in others if name in _asked(kind)[1]} for kind in (False, True))
    done, work = 0, sum(case.work for *_, case in wanted)
    with polling(progress, "sweep", total=work, bar_format=BAR) as poll:
        for model, gpu, dtype, case in wanted:
            run = {**case._asdict(), "dtype": dtype, "gpu": gpu}
            if run.pop("op") == "pipeline":
                del run["tile"], run["tile_overlap"]  # a pipeline's VAE has those of its config
                for tokens in lengths:
                    yield from _asked(True)[0](model, **run, prompt_tokens=tokens, **of_pipeline).rows()
            else:
                yield _predicted(Prediction(resolve_vae(VAEArguments(model, case.op, **run, **of_vae))))
            done += case.work
            if poll:
                poll(done, work)


def _predicted(p: Prediction) -> Row:
    cudnn = f", cudnn {p.cudnn_version}" if p.cudnn_version else ""
    stood_in = f" (substituted: {'; '.join(p.substitutions)})" if p.substitutions else ""
    took = p.seconds
    return {
        "model": p.model, "op": p.op, "height": p.height, "width": p.width, "batch": p.batch, "dtype": p.dtype,
        "tile": p.tile, "tile_overlap": p.tile_overlap,
        "runtime": p.runtime, "device": p.gpu, "source": "predicted", "allocated_bytes": p.allocated,
        "reserved_bytes": p.reserved, "weights_bytes": p.weights_bytes,
        "seconds": took and took.likely, "seconds_low": took and took.low, "seconds_high": took and took.high,
        "versions": ", ".join([f"torch {p.torch_version}{cudnn}{stood_in}", *p.settings, f"vaemem {__version__}"]),
    }  # fmt: skip


def _row(vae: VAE, case: Case, source: str, run: Run, limited: bool) -> Row:
    """limited: whether the row says what a memory limit costs."""
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
    """Noise of the input's shape: time and memory do not depend on the values."""
    (scale, channels), (other, _) = ends_of(vae.arch, case.op)
    shrink = max(scale, other) // scale
    shape = (case.batch, channels, case.height // shrink, case.width // shrink)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _configs(models: Sequence[Any], ops: Sequence[str]) -> list[Any]:
    """What is asked about: the names of pipelines where these are among the ops, else architectures or what means them,
    of which none is refused later."""
    if "pipeline" in ops:
        from vaemem.pipelines.components import known_pipeline

        return [known_pipeline("models", model) for model in models]
    configs = []
    for model in models:
        if not isinstance(model, str | os.PathLike | Mapping | VAE):
            raise ValueError(f"models: want {', '.join(_core.models())}, a config or a VAE, got {model!r}")
        configs.append(model.arch if isinstance(model, VAE) else model)
        architecture(configs[-1])  # refuses what is none before anything is predicted
    return configs


def _models(models: Any, dtypes: str | Sequence[str]) -> list[tuple[str | VAE, str]]:
    """Models with the types of numbers that each runs in: a VAE has one already, whatever the default is."""
    types = chosen("dtypes", dtypes, DTYPES)
    pairs: list[tuple[str | VAE, str]] = []
    for model in listed(models, (str, VAE)):
        if isinstance(model, VAE):
            for other in types:
                if other != model.dtype and types != ["float32"]:
                    raise ValueError(f"dtypes: the VAE on {model.device} computes in {model.dtype}, got {other!r}")
            pairs.append((model, model.dtype))
        else:
            pairs += [(named_model("models", model, "a VAE"), dtype) for dtype in types]
    return pairs


def _vae(model: str | VAE, device: str, dtype: Any, precision: Any) -> VAE:
    if isinstance(model, str):
        return VAE.random(model, device=device, dtype=dtype, precision=precision)
    if precision not in ("highest", model.precision):
        raise ValueError(f"precision: the VAE on {model.device} computes in {model.precision}, got {precision!r}")
    return model


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
