"""What PyTorch's memory counters would say of a VAE's run on a GPU, without PyTorch and without the GPU.

A prediction is a question (question.py), which a simulated process answers (process.py) by playing the benchmark
(benchmark.py): the counters' peaks of its last run.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from vaemem._arguments import shared
from vaemem._common import MIB, flag, latent_factor
from vaemem._core import OutOfMemoryError
from vaemem.engine.limits import LARGEST_SIDE, check_aspect, largest_size
from vaemem.prediction.benchmark import PROTOCOLS, USUAL_PROTOCOL, Reading
from vaemem.prediction.formula import derive
from vaemem.prediction.moments import Moment, PeakTensor
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.question import ModuleQuestion, Question, ask
from vaemem.prediction.runtimes import architecture

# What reserved may be above the worse of a cold and a warmed process, for what else ran before. Of the seed table's
# rows, with their own workspaces, one is 3.7% above it, two are 2.4% and the rest 0.7% or less; a 16th is the largest
# of them with room for sizes that were not measured. A small run may meet one more of the allocator's large segments.
MARGIN = Fraction(17, 16)
SEGMENT = 20 * MIB
PAGE = 2 * MIB  # every segment is a multiple of it
TILED_SIDE = 1 << 14  # pixels: no further in tiles, where a larger image may take no more


def between(least_band: tuple[int, int]) -> str:
    """The least that would do, in MiB."""
    return " to ".join(dict.fromkeys(f"{size / MIB:.0f}" for size in least_band))


def fits_in(outcome: str, available: int) -> str:
    """That a run fits, or may fit, and what decides."""
    unknown = " (cuDNN's next plans decide, and their workspaces are not known)" if outcome == "may fit" else ""
    return f"{outcome} in {available / MIB:.0f} MiB{unknown}"


class _Answer:
    """What a prediction reads off the process that it played."""

    upper_share = 0.9989
    upper_basis = (
        "3568 of 3572 answers of profiles that were left out in turn, a version or a card (benchmarks/left_out.py: SDXL"
        " and FLUX, float16 and float32, whole images one at a time); 98 of 98 rows of the seed table"
    )

    def __init__(self, question: Question | ModuleQuestion):
        self._question, self._process = question, question.start()
        self.protocol, process = question.software.protocol, self._process
        self.allocated, self.reserved, self.peak_allocated, self.peak_reserved = first = question.play(process)
        self._plays = {self.protocol: process}
        self.gpu, self.total_memory = process.gpu.name, process.gpu.total_memory
        self.torch_version = process.torch_version
        self.cudnn_version: str | None = getattr(process.workspace, "cudnn_version", None)
        self.workspace_source, self.available = process.workspace_source, process.available
        self._has_room = process.most_reserved <= self.available  # then nothing is ever refused and all goes as it did
        full, process, last = (None, process, first) if self._has_room else self._within(self.available)
        self.out_of_memory_at, self.on_card = full, last.peak_reserved if last else None
        self.substitutions = process.substitutions
        self.outcome = "does not fit" if full else "may fit" if process.guessed_plans else "fits"

    def _played(self, protocol: str) -> tuple[SimulatedProcess, int]:
        """A process that played the same call by a protocol, and which of the runs that were read is the protocol's."""
        if protocol == "cold":
            for other, process in self._plays.items():
                if len(process._runs) > PROTOCOLS[other].runs or not PROTOCOLS[other].warmups:
                    return process, 0
        if protocol not in self._plays:
            self._plays[protocol] = self._question.start(self._process.workspace)
            self._question.play(self._plays[protocol], protocol)
        return self._plays[protocol], -1

    def _read(self, protocol: str) -> int:
        """The bytes that this process reserved above the baseline."""
        process, run = self._played(protocol)
        return process._runs[run][0]

    def _within(
        self, capacity: int, has_other_plans: bool = True
    ) -> tuple[PeakTensor | None, SimulatedProcess, Reading | None]:
        """The same call where the device gives so many bytes: what could not be had (or None), the process, and what it
        read where it went through."""
        process = self._question.start(self._process.workspace, total_memory=max(capacity, PAGE))
        process.has_other_plans = has_other_plans
        try:
            return None, process, self._question.play(process)
        except OutOfMemoryError as full:
            return PeakTensor(process.frames[full.tag], full.requested), process, None

    @property
    def fits(self) -> bool:
        return self.out_of_memory_at is None

    @functools.cached_property
    def least_reserved(self) -> int:
        return self._least(True)

    @functools.cached_property
    def least_band(self) -> tuple[int, int]:
        return self.least_reserved, self._least(False)

    def _least(self, has_other_plans: bool) -> int:
        most = self._process.most_reserved
        low, high = 0, (min(most, self.available) if self.fits else most) // PAGE
        while self._within(high * PAGE, has_other_plans)[0]:  # with more room A1111 cuts its attention less
            low, high = high, 2 * high
        while high - low > 1:  # in pages: `low` is too little, `high` is enough
            middle = (low + high) // 2
            full, *_ = self._within(middle * PAGE, has_other_plans)
            low, high = (middle, high) if full else (low, middle)
        return high * PAGE

    def _others(self, every: bool, *protocols: str) -> Iterator[int]:
        """Reserved bytes by each of these protocols, with each of the other workspaces that may be the true ones."""
        if alternatives := self._process._alternatives(every):
            for process, run in map(self._played, protocols):
                yield from process._again(alternatives, run)

    @functools.cached_property
    def band(self) -> tuple[int, int]:
        sizes = [self.reserved, *self._others(False, self.protocol)]
        return min(sizes), max(sizes)

    @functools.cached_property
    def upper(self) -> int:
        protocols = tuple(dict.fromkeys((USUAL_PROTOCOL, "cold", self.protocol)))
        known = [self._read(name) for name in protocols]
        others = list(self._others(not self._question.software.has_version, *protocols))
        return math.ceil(max(*known, *self.band, *others) * MARGIN) + SEGMENT

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        process = self._question.start(history=True)
        self._question.play(process)
        process.save_snapshot(path)

    @property
    def peak_tensors(self) -> tuple[PeakTensor, ...]:
        return tuple(self._process.peak_tensors())

    @property
    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self._process.timeline())

    @property
    def _said(self) -> str:
        """For `repr`: what is predicted, how sure it is, whether it fits, and what was substituted."""
        least, most = (f"{size / MIB:.2f}" for size in self.band)
        band = f" ({least} to {most})" if least != most else ""
        verdict, room = fits_in(self.outcome, self.available), ""
        if self.out_of_memory_at:
            name, size = self.out_of_memory_at
            verdict = f"out of memory at {name} ({size / MIB:.2f} MiB) with {self.available / MIB:.0f} MiB"
        if not self._has_room:
            here = "" if self.on_card is None else f", {self.on_card / MIB:.0f} on this one"
            room = f" where there is room{here}, at least {between(self.least_band)}"
        return (
            f"allocated {self.allocated / MIB:.2f} MiB, reserved {self.reserved / MIB:.2f} MiB{band},"
            f" upper {self.upper / MIB:.0f} MiB; of the card {self.peak_reserved / MIB:.0f} MiB{room}; {verdict}"
        ) + (f"; substituted: {', '.join(self.substitutions)}" if self.substitutions else "")

    @property
    def _place(self) -> str:
        cudnn = f", cuDNN {self.cudnn_version}" if self.cudnn_version else ""
        return f"{self.gpu}, torch {self.torch_version}{cudnn}"


class Prediction(_Answer):
    """What `predict` returns. Sizes in bytes.

    Attributes
    ----------
    allocated, reserved : int
        Above the baseline, as the seed table counts: ``max_memory_allocated() - memory_allocated()`` before the run,
        likewise reserved; weights and input are in the baseline.
    peak_allocated, peak_reserved : int
        As ``torch.cuda.max_memory_allocated()`` and ``max_memory_reserved()`` report them. These four are those of a
        card with room for all that PyTorch likes to take: on one where it fits with less they stay below. (The runtime
        a1111 cuts its attention by what this card has free.)
    band : tuple of int
        Least and most of `reserved` where something was substituted: as other versions of cuDNN answer on such cards,
        and beyond the oldest and the newest of them on other cards too. Twice `reserved` where nothing was.
    upper : int
        A bound to reserve by, beside `reserved`: 17/16 of the most that any of these says, and 20 MiB: the process
        cold, warmed up or as `protocol` says; the cuDNN that was asked for or what `band` is made of, and where
        neither ``cudnn_version`` nor ``torch_version`` was given, every version that may be. For a process's whole
        reservation add ``peak_reserved - reserved``. The 16th is derived from the seed table's rows alone.
    upper_share : float
        The share of answers that `upper` covers: where recorded versions of cuDNN and cards are left out in turn, and
        predicted from the others. NaN with another allocator than the native one at its defaults, and for a module,
        of which nothing is known.
    upper_basis : str
        What `upper_share` was counted on.
    substitutions : tuple of str
        What stood in for the cuDNN and the card that were asked for.
    fits : bool
        Whether the run goes through on this card: the same process played with no more than `available`, where PyTorch
        gives cached segments back before it gives up, and goes on to cuDNN's next plan where a workspace cannot be had
        (from 9.8 on one of its plans wants no workspace, and this is taken for the next: see `outcome`).
    outcome : str
        ``"fits"``; ``"may fit"`` where it fits only if a cuDNN before 9.8, whose next plans are not known, has plans
        without workspace as later ones have; or ``"does not fit"``.
    on_card : int or None
        What `peak_reserved` is on this card, as full as it is: no more than `available`. None where the run does not
        go through, and so has no peak.
    out_of_memory_at : PeakTensor or None
        ``(name, bytes)`` of what PyTorch raises out of memory for: the module with the tensor, and the request.
    least_reserved : int
        The least `available` with which the run still goes through, weights and input included, to 2 MiB: beside
        `peak_reserved`, which is what PyTorch takes where there is room. Found by bisection when it is asked for, and
        in `repr` where the card has not that room.
    least_band : tuple of int
        `least_reserved` twice; but where cuDNN's next plans are not known, the second is the least where they want what
        the first plan wants, which then has to be had.
    available : int
        What PyTorch's allocator can have of the card: `total_memory`, less 3% where that is a nominal size (whole GiB,
        of which CUDA reports less), less 512 MiB for the CUDA context and its kernels (426 MiB were measured for a
        context alone), less what ``used=`` says.
    total_memory : int
        The card's memory, as it was given or as it is listed.
    peak_tensors : tuple of PeakTensor
        ``(name, bytes)`` of what was allocated at the peak, weights and input included, largest first, and last what
        the allocator rounded up: the sum is `peak_allocated`.
    workspace_source : str
        Who said how much scratch the convolutions take: a profile, an installed cuDNN, or a rule.
    timeline : tuple of Moment
        ``(name, allocated, reserved)`` step by step through the model's call; bytes as the counters stand.
    formula : str
        ``allocated`` as a closed form in the image's H and W at this size's peak, or why there is none.
    model, op, height, width, batch, dtype, runtime, gpu, torch_version, cudnn_version, weights_dtype, tile, slicing,
    protocol, channels_last, allow_tf32, allocator
        What was asked.
    settings : tuple of str
        Which of the last four are not as usual, in words; and of a tiled op whether the image is cut.

    Examples
    --------
    >>> p = predict("sdxl", "decode", 1024, 1024, gpu="RTX 4060", used="1 GB")
    >>> p.fits, p.peak_reserved >> 20, p.least_reserved >> 20
    (True, 4466, 1882)
    >>> p.peak_tensors[0].name
    'decoder.up_blocks.2.upsamplers.0.conv [workspace]'
    >>> p.save_snapshot("decode.pickle")  # for pytorch.org/memory_viz
    """

    def __reduce__(self) -> Any:
        """Copied and pickled as what was asked, which is predicted again."""
        return Prediction, (self._question,)

    def __init__(self, question: Question):
        self._question: Question
        job, software = question.job, question.software
        self.model: str = job.arch["name"]
        self.op, self.height, self.width, self.batch, self.dtype = job.op, job.height, job.width, job.batch, job.dtype
        self.weights_dtype, self.tile, self.slicing = job.weights_dtype, job.tile, job.slicing
        self.runtime, self.allocator, self.settings = software.runtime, software.allocator, question.settings
        self.channels_last, self.allow_tf32 = software.channels_last, software.allow_tf32
        if software.allocator != "native":
            self.upper_share, self.upper_basis = math.nan, "nothing: no measurement of this allocator is known"
        super().__init__(question)

    def _others(self, every: bool, *protocols: str) -> Iterator[int]:
        yield from super()._others(every, *protocols)
        if self.allocator == "cudaMallocAsync":  # how much the driver's pool wastes is not known: as much as PyTorch's?
            workspace, software = self._process.workspace, replace(self._question.software, allocator="native")
            native = Prediction(replace(self._question, software=software, workspace=workspace))
            yield from map(native._read, protocols)
            yield from native._others(every, *protocols)

    @property
    def formula(self) -> str:
        try:
            if self.tile:
                raise ValueError("a tiled peak depends on how H and W fall into tiles")
            return str(derive(self._question))
        except ValueError as error:
            return f"none: {self.allocated} bytes at this size; {error}"

    def __repr__(self) -> str:
        how = ", ".join([self.runtime, self._place, *self.settings])
        weights = "" if self.weights_dtype == self.dtype else f" from {self.weights_dtype} weights"
        images = f" in a batch of {self.batch}{', sliced' * self.slicing}" if self.batch > 1 else ""
        return (
            f"<Prediction {self.model} {self.op} {self.height}x{self.width} {self.dtype}{weights}{images} ({how}): "
            f"{self._said}>"
        )


@shared
def predict(
    model: str | Mapping[str, Any], op: str, height: int, width: int, dtype: str = "float16", batch: int = 1,
    runtime: str | None = None, gpu: str = "RTX 4090", cudnn_version: str | None = None,
    torch_version: str | None = None, weights_dtype: str | None = None, tile: int | None = None, slicing: bool = False,
    *, memory: int | str | None = None, used: int | str = 0, workspace: Any = None,
    protocol: str = USUAL_PROTOCOL, channels_last: bool = False, allow_tf32: bool = True,
    cudnn_benchmark: bool = False, allocator: str = "native",
) -> Prediction:  # fmt: skip
    """The memory that PyTorch takes for a VAE's run: a fresh process, the model loaded, by default two warm-up runs,
    one measured.

    Parameters
    ----------
    model, op of a VAE : shared
    height, width : int
        The image's size in pixels, multiples of 8.
    dtype, batch, runtime of a VAE : shared
    gpu, cudnn_version, torch_version : shared
    weights_dtype : str, optional
        The type of the weights between runs; where it is not `dtype`, weights and input are converted within the run.
    tile : int, optional
        The side of a tile in pixels for the tiled ops of diffusers, comfyui and a1111; by default the config's
        sample_size, as in diffusers (512 for sd15, 1024 for the others), ComfyUI's 512, and what A1111's Tiled VAE
        recommends for the card. Tiles overlap by a quarter, diffusers' default; ComfyUI's by 64 pixels, at most a
        quarter, in three passes; those of Tiled VAE are padded on every side, by 11 latents or 32 pixels.
    slicing : bool
        Whether one image of the batch is run after the other (diffusers' ``enable_slicing``).
    memory, used : shared
    workspace : object, optional
        What answers for the convolutions' workspaces in place of `vaemem.prediction.workspace.Workspace`.
    protocol : str
        What the process has done when the counters are read, for `reserved` depends on it:

        - ``"cold"``: the first run, which no other came before;
        - ``"warm"``: the first run after two warm-up runs, while what the second of them left is still bound;
        - ``"repeated"``: the second run after two warm-up runs, when nothing of them is bound any more;
        - ``"kept"``: three runs in a row from a cold start, the cache never emptied, and the most that any of them
          took.

        In the first three the cache is emptied, and the peaks are reset, before each run.
        `vaemem.prediction.benchmark.PROTOCOLS` is the table of them.
    channels_last : bool
        Whether ``vae.to(memory_format=torch.channels_last)`` was called once the model was loaded: convolutions then
        take and give that format, and every GroupNorm copies its input back. PyTorch up to 2.14; later ones are
        refused.
    allow_tf32 : bool
        ``torch.backends.cudnn.allow_tf32``, True in PyTorch; False asks cuDNN for other plans in float32 on compute
        capability 8.0 and later.
    cudnn_benchmark : bool
        ``torch.backends.cudnn.benchmark``. True is refused: which plan is the fastest only the card can tell.
    allocator : str
        ``"native"``, ``"cudaMallocAsync"``, or what ``PYTORCH_CUDA_ALLOC_CONF`` says (``"expandable_segments:True"``).
        cudaMallocAsync is the driver's memory pool: `Prediction.reserved` is then the least that it can hold, and the
        upper end of `Prediction.band` what the native allocator reserves.

    Raises
    ------
    ValueError
        A model, op, dtype, protocol, GPU or version that is unknown; a size that the model cannot take; a convolution
        that the GPU has no engine for; a build of PyTorch without kernels for the card; a setting of PyTorch that
        is not modelled.

    Notes
    -----
    docs/PREDICTION.md tells how it works, what it does not know, and its errors.

    Examples
    --------
    >>> predict("sdxl", "decode", 1024, 1024, dtype="float16", gpu="RTX 4090").allocated / 2**20
    2434.125
    >>> p = predict("sdxl", "decode", 4096, 4096, dtype="float32", gpu="RTX 4060")
    >>> p.fits, p.out_of_memory_at.name
    (False, 'decoder.up_blocks.1.resnets.0')
    """
    return Prediction(ask(**locals()))


@shared
def predict_largest(
    model: str | Mapping[str, Any], op: str, dtype: str = "float16", batch: int = 1, *, gpu: str = "RTX 4090",
    aspect: float = 1.0, used: int | str = 0, every: bool = False, **others: Any,
) -> tuple[int, int]:  # fmt: skip
    """(height, width) of the largest image that PyTorch decodes, or encodes, on a card: of those whose `predict` fits.

    Parameters
    ----------
    model, op, dtype, batch of a VAE : shared
    gpu, used : shared
    **others
        What else `predict` takes: ``memory``, ``runtime``, ``tile``, ``cudnn_version``, ``torch_version`` and others.
    aspect : float
        The width over the height, as nearly as latents of whole pixels can have it.
    every : bool
        Whether all smaller images of that shape have to fit too.

    Raises
    ------
    ValueError
        No size fits; or as `predict` raises it.

    Warns
    -----
    RuntimeWarning
        Where the search ended before the card was full, so that larger images may fit: tiled ops are looked at up to
        16,384 pixels a side, and as far as they can be played (65,536 tiles, 4,194,304 steps).

    Notes
    -----
    Sizes that only may fit count too (`Prediction.outcome`), as those that fit only with another plan of cuDNN before
    9.8 than the first. With ``torch_version="2.8.0"`` or later, or ``cudnn_version``, that is known.

    What PyTorch takes does not always grow with the size, since cuDNN plans each size by itself. So all sizes three
    tenths around what bisection finds are predicted one by one; for tiled ops, which take long, bisection decides.
    Images of another shape, even of fewer pixels, may not fit.

    Examples
    --------
    >>> predict_largest("sdxl", "decode", gpu="RTX 4060", used="1 GB")
    (1952, 1952)
    """
    for name in ("height", "width"):
        if name in others:
            raise ValueError(f"{name}: want none, which is what is looked for, got {others[name]!r}")
    factor = latent_factor(architecture(model))
    question = ask(model, op, factor, factor, dtype=dtype, batch=batch, gpu=gpu, used=used, **others)
    refused: dict[tuple[int, int], bool] = {}  # whether it was played, or is more than can be

    def fits(height: int, width: int) -> bool:
        try:
            if Prediction(question.at(height, width)).fits:
                return True
            refused[height, width] = True
        except OverflowError:
            refused[height, width] = False
        return False

    tiled = question.job.is_tiled
    found = largest_size(
        fits, factor, check_aspect(aspect), TILED_SIDE if tiled else LARGEST_SIDE,
        around=lambda n: range(n, n) if tiled else range(n - n * 3 // 10, n + n * 3 // 10 + 1),
        every=flag("every", every),
    )  # fmt: skip
    if found and not (refused and refused[min(refused)]):
        what = f"predict_largest: {found[0]}x{found[1]} fits, and larger images were not looked at"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
    if found is None:
        smallest = Prediction(question)
        raise ValueError(
            f"gpu: want one with {smallest.least_reserved} bytes for PyTorch, which {op} takes at least,"
            f" got {smallest.gpu} with {smallest.available}"
        )
    return found


class ModulePrediction(_Answer):
    """What `vaemem.pytorch.predict_peak` returns. Sizes in bytes; attributes as in `Prediction`, and:

    Attributes
    ----------
    unmodelled : dict
        What takes memory that is not counted, operators and more, with how often it ran; in `repr` too.
    """

    upper_share = math.nan
    upper_basis = "nothing: no module's measurements are known"

    def __init__(self, question: ModuleQuestion, unmodelled: Mapping[str, int], supposed: Sequence[str] = ()):
        self.unmodelled = dict(unmodelled)
        super().__init__(question)
        self.substitutions = (*supposed, *self.substitutions)

    def __repr__(self) -> str:
        baseline = self.peak_allocated - self.allocated
        protocol = "" if self.protocol == USUAL_PROTOCOL else f", {self.protocol}"
        missing = ", ".join(f"{what} ({count})" for what, count in self.unmodelled.items())
        return (
            f"<ModulePrediction ({self._place}{protocol}): above {baseline / MIB:.2f} MiB of weights and inputs"
            f" {self._said}{f'; not counted: {missing}' if missing else ''}>"
        )
