"""Go over models, operations and sizes, and write down what the engine takes, or what PyTorch is predicted to take."""

from __future__ import annotations

import inspect
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vaemem import _core
from vaemem._common import DTYPES, OPS, TILED_OPS, __version__, choose, chosen, latent_factor, listed, whole
from vaemem.engine.arguments import Progress, polling
from vaemem.engine.arrays import ends_of
from vaemem.engine.limits import Limit
from vaemem.engine.vae import VAE, Run
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.predict import Prediction, predict
from vaemem.prediction.runtimes import architecture
from vaemem.tables.table import SOURCES, Row, Table

# What a pixel costs, encode beside decode (1117 and 2515 GFLOP at 512x512): for the progress bar only.
_WORK = {"encode": 4, "decode": 9}
_LAYOUT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
# What a predicted sweep hands on as it is: arguments of `predict` that are neither swept nor its own.
_OTHERS = frozenset(inspect.signature(predict).parameters) - {
    "model", "op", "height", "width", "dtype", "batch", "gpu", "workspace",
}  # fmt: skip


class Case(NamedTuple):
    """One thing to run on a model."""

    op: str
    height: int
    width: int
    batch: int
    dtype: str

    @property
    def work(self) -> int:
        return _WORK[self.op.removesuffix("_tiled")] * self.height * self.width * self.batch


def sweep(
    models: Any = ("sd15", "sdxl", "flux"),
    ops: str | Sequence[str] = OPS,
    sizes: int | Sequence[int | tuple[int, int]] = (256, 512, (512, 768)),
    dtypes: str | Sequence[str] = "float32",
    *,
    source: str = "measured",
    device: str | None = None,
    gpu: str | Sequence[str] | None = None,
    batch: int = 1,
    measure: bool = True,
    repeats: int = 1,
    progress: Progress = None,
    memory_limit: Limit = None,
    precision: str = "highest",
    **others: Any,
) -> Table:
    """Measure or estimate the engine's memory and time, or predict PyTorch's memory on GPUs.

    Parameters
    ----------
    models : names or VAE objects, or one of them
        A name gets random weights, made for this sweep and dropped after: memory and time do not depend on them.
        Predicted, also configs: a dict, or a path.
    ops : str or sequence of str
        ``"encode"``, ``"decode"``; predicted, also ``"encode_tiled"`` and ``"decode_tiled"``.
    sizes : int or sequence of int and (int, int)
        The image's, in pixels, multiples of 8: an int is a square, a pair is (height, width). ``(512, 768)`` alone
        is two squares, ``[(512, 768)]`` one landscape.
    dtypes : str or sequence of str
        ``"float32"``, ``"float16"``, ``"bfloat16"``. VAE objects have their own.
    source : {"measured", "estimated", "predicted"}
        "measured" runs each case on the engine; "estimated" asks its plan and runs nothing (no seconds); "predicted"
        asks `vaemem.predict` what PyTorch takes on each GPU (no seconds).
    device : str, optional
        Where the engine runs named models: ``"cpu"`` (default), ``"cuda"``, ``"cuda:1"``. VAE objects run where they
        are.
    gpu : str or sequence of str, optional
        Predicted: the cards, as `vaemem.predict` takes them; an RTX 4090 by default.
    batch : int
        Images in one run.
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
        Predicted: `runtime`, `torch_version`, `cudnn_version`, `weights_dtype`, `tile`, `slicing`, `memory`, `used`,
        `protocol`, `channels_last`, `allow_tf32` and `allocator`, as `vaemem.predict` takes them, for every row.

    Returns
    -------
    Table
        One row a case. The engine's have runtime "vaemem"; peaks are the largest of the runs. `allocated_bytes` is
        activations + scratch (cuDNN's workspace too) + output, `reserved_bytes` what was held from the system beside
        the weights. On a GPU arrays come from host memory and return there.
        Predicted rows have the runtime whose code it is, the card's full name as `device`, and `Prediction.allocated`
        and `reserved`, which are those of a card with room for them: whether it fits, `vaemem.predict` says. `versions`
        tells what stood in for the cuDNN or the card that was asked for, and the settings that are not as usual: of a
        tiled op the tile's side, or that one tile holds the whole image.

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
    """
    choose("source", source, SOURCES)
    batch, repeats = whole("batch", batch), whole("repeats", repeats)
    engine = {"device": device is not None, "measure": not measure, "repeats": repeats > 1,
              "memory_limit": memory_limit is not None, "precision": precision != "highest"}  # fmt: skip
    _check_given(source, [name for name, given in engine.items() if given], gpu is not None, others)
    known, pairs = TILED_OPS if source == "predicted" else OPS, image_sizes(sizes)
    cases = [Case(op, height, width, batch, "") for op in chosen("ops", ops, known) for height, width in pairs]
    if source == "predicted":
        cards = listed("RTX 4090" if gpu is None else gpu, str)
        for card in cards:
            find_gpu(card, others.get("memory"))  # refuses an unknown one before anything is predicted
        types = chosen("dtypes", dtypes, DTYPES)
        return _table(_predictions(_configs(models), cards, types, cases, progress, others))
    place = "cpu" if device is None else device
    measure = measure and source == "measured"
    return _table(_runs(_models(models, dtypes), cases, place, precision, measure, repeats, progress, memory_limit))


def tradeoff(
    model: str | VAE, op: str, height: int, width: int, batch: int = 1, dtype: str = "float32",
    precision: str = "highest",
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
        Each row takes less memory and more `work` than the one before (on a GPU the same, in smaller stripes);
        `streamed` counts the tensors that are never whole (their names: `VAE.tradeoff`). `limit_bytes` as
        ``memory_limit`` gives that plan; it counts the weights too.

    Examples
    --------
    >>> plans = tradeoff(vae, "decode", 256, 256)
    >>> plans[0]["work"], plans[0]["allocated_bytes"] > plans[-1]["allocated_bytes"]
    (1.0, True)
    """
    choose("ops", op, OPS)
    choose("dtype", dtype, DTYPES)
    ((model, dtype),) = _models([model], dtype)
    vae = _vae(model, "cpu", dtype, precision)
    runs, last = vae.tradeoff(op, height, width, batch), vae.last_run
    speed = last.seconds / sum(last.flops) if last and last.op == op and last.seconds and vae.device == "cpu" else None
    return Table(
        _row(vae, Case(op, height, width, batch, vae.dtype), "estimated", run, limited=True)
        | ({"seconds": sum(run.flops) * speed} if speed else {})
        for run in runs
    )


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
    wanted: Sequence[tuple[str | VAE, str]], asked: Sequence[Case], device: str, precision: str, measure: bool,
    repeats: int, progress: Progress, memory_limit: Limit,
) -> Iterator[Row]:  # fmt: skip
    """The engine's rows."""
    done, work = 0, len(wanted) * repeats * sum(case.work for case in asked)

    def tell(part: int) -> None:
        if poll:
            poll(done + part, work)

    with polling(progress if measure else None, "sweep", work, _LAYOUT) as poll:
        for model, dtype in wanted:
            vae = _vae(model, device, dtype, precision)
            cases = [case._replace(dtype=dtype) for case in asked]
            estimates = [
                _estimate(vae, case, memory_limit) for case in cases
            ]  # refuses what cannot run, before any does
            for case, estimate in zip(cases, estimates, strict=True):
                yield _measure(vae, case, repeats, memory_limit, tell) if measure else estimate
                done += repeats * case.work
            del vae  # one model's weights at a time


def _predictions(
    models: Sequence[Any], gpus: Sequence[str], dtypes: Sequence[str], asked: Sequence[Case], progress: Progress,
    others: Mapping[str, Any],
) -> Iterator[Row]:  # fmt: skip
    """PyTorch's rows on each card."""
    wanted = [(m, g, case._replace(dtype=d)) for m in models for g in gpus for d in dtypes for case in asked]
    done, work = 0, sum(case.work for *_, case in wanted)
    with polling(progress, "sweep", work, _LAYOUT) as poll:
        for model, gpu, case in wanted:
            op, height, width, batch, dtype = case
            yield _predicted(model, predict(model, op, height, width, dtype, batch, gpu=gpu, **others))
            done += case.work
            if poll:
                poll(done, work)


def _predicted(model: Any, p: Prediction) -> Row:
    cudnn = f", cudnn {p.cudnn_version}" if p.cudnn_version else ""
    stood_in = f" (substituted: {'; '.join(p.substitutions)})" if p.substitutions else ""
    weights = _core.Trace.weights(architecture(model), p.runtime, p.weights_dtype).steps
    return {
        "model": p.model, "op": p.op, "height": p.height, "width": p.width, "batch": p.batch, "dtype": p.dtype,
        "runtime": p.runtime, "device": p.gpu, "source": "predicted", "allocated_bytes": p.allocated,
        "reserved_bytes": p.reserved, "weights_bytes": sum(size for _, _, size, _ in weights),
        "versions": ", ".join([f"torch {p.torch_version}{cudnn}{stood_in}", *p.settings, f"vaemem {__version__}"]),
    }  # fmt: skip


def _measure(vae: VAE, case: Case, repeats: int, memory_limit: Limit, tell: Callable[[int], None]) -> Row:
    """tell: gets how much of the case's work is done."""
    data = _input(vae, case)
    vae.trim()  # or a larger case's arena would count as this one's
    runs = []
    for i in range(repeats):

        def report(rows: int, total: int, before: int = i * case.work) -> None:
            tell(before + case.work * rows // total)

        getattr(vae, case.op)(data, progress=report, memory_limit=memory_limit)
        assert vae.last_run is not None and vae.last_run.seconds is not None  # it has just run
        runs.append((vae.last_run, vae.last_run.seconds))
    vae.trim()
    largest = max((run for run, _ in runs), key=lambda run: run.peak_bytes)
    seconds = statistics.median(seconds for _, seconds in runs)
    return _row(vae, case, "measured", largest, memory_limit is not None) | {"seconds": seconds}


def _estimate(vae: VAE, case: Case, memory_limit: Limit) -> Row:
    run = vae.estimate(case.op, case.height, case.width, case.batch, memory_limit=memory_limit)
    return _row(vae, case, "estimated", run, memory_limit is not None)


def _row(vae: VAE, case: Case, source: str, run: Run, limited: bool) -> Row:
    """limited: whether the row says what a memory limit costs."""
    cost = {"work": run.work, "streamed": sum(kind == "streamed" for _, kind in run.values)} if limited else {}
    return case._asdict() | cost | {
        "model": vae.model, "runtime": "vaemem", "device": vae.device, "source": source,
        "allocated_bytes": run.peak_bytes - run.weights_bytes,
        "reserved_bytes": run.reserved_bytes - run.weights_bytes,
        "weights_bytes": run.weights_bytes, "activations_bytes": run.activations_bytes,
        "scratch_bytes": run.scratch_bytes + run.workspace_bytes, "output_bytes": run.output_bytes,
        "versions": run_versions(run, vae.precision), "limit_bytes": max(run.peak_bytes, run.reserved_bytes),
    }  # fmt: skip


def _input(vae: VAE, case: Case) -> np.ndarray:
    """Noise of the input's shape: time and memory do not depend on the values."""
    (scale, channels), _ = ends_of(vae.arch, case.op)
    shrink = latent_factor(vae.arch) // scale
    shape = (case.batch, channels, case.height // shrink, case.width // shrink)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def run_versions(run: Run, precision: str) -> str:
    """What ran, for a table's `versions`: vaemem with its kernels, threads and a precision that is not the highest,
    Python, NumPy, the machine."""
    python, machine = platform.python_version(), platform.machine()
    less = "" if precision == "highest" else f", precision {precision}"
    engine = f"vaemem {__version__} ({run.backend}, {run.threads} threads{less})"
    return f"{engine}, python {python}, numpy {np.__version__}, {machine}"


# ---- arguments ----


def _check_given(source: str, engine: Sequence[str], gpu: bool, others: Mapping[str, Any]) -> None:
    """Arguments that mean nothing with the source are refused: those of the engine, and those of `predict`."""
    for name in others:
        if name not in _OTHERS:
            raise TypeError(f"sweep() got an unexpected keyword argument {name!r}")
    if source == "predicted" and engine:
        raise ValueError(f"{engine[0]}: want it with source measured or estimated, got it with predicted")
    foreign = (["gpu"] if gpu else []) + list(others)
    if source != "predicted" and foreign:
        raise ValueError(f"{foreign[0]}: want it with source predicted, got it with {source}")


def _configs(models: Any) -> list[Any]:
    """What `predict` takes for models: of a VAE, its architecture."""
    configs = []
    for model in listed(models, (str, Mapping, VAE)):
        if not isinstance(model, str | Mapping | VAE):
            raise ValueError(f"models: want {', '.join(_core.models())}, a config or a VAE, got {model!r}")
        configs.append(model.arch if isinstance(model, VAE) else model)
        architecture(configs[-1])  # refuses what is none before anything is predicted
    return configs


def _models(models: Any, dtypes: str | Sequence[str]) -> list[tuple[str | VAE, str]]:
    """Models with the types of numbers that each runs in: a VAE has one already, whatever the default is."""
    known, types = _core.models(), chosen("dtypes", dtypes, DTYPES)
    pairs: list[tuple[str | VAE, str]] = []
    for model in listed(models, (str, VAE)):
        if isinstance(model, VAE):
            for other in types:
                if other != model.dtype and types != ["float32"]:
                    raise ValueError(f"dtypes: the VAE on {model.device} computes in {model.dtype}, got {other!r}")
            pairs.append((model, model.dtype))
        elif isinstance(model, str) and model in known:
            pairs += [(model, dtype) for dtype in types]
        else:
            raise ValueError(f"models: want {', '.join(known)} or a VAE, got {model!r}")
    return pairs


def _vae(model: str | VAE, device: str, dtype: str, precision: str) -> VAE:
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
