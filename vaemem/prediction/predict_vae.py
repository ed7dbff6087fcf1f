"""Predict the values of PyTorch's memory counters for a VAE's run on a GPU, without PyTorch and without the GPU.

docs/DESIGN.md, "The life of a prediction", follows a call from its arguments to its bytes and back.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._arguments import shared
from vaemem._common import __version__, flag, latent_factor
from vaemem._errors import ArgumentError, Named, Words
from vaemem._render import Actions, Block, Bullets, Facts, Sizer, share
from vaemem._types import Dtype, Program, TiledOp
from vaemem.engine.limits import LARGEST_SEARCHED, check_aspect, find_largest, size_of
from vaemem.engine.vae import VAE
from vaemem.prediction.answer import ModulePrediction
from vaemem.prediction.benchmark import USUAL_PROTOCOL
from vaemem.prediction.closed_form import derive
from vaemem.prediction.default_dtypes import FIXED, OVERFLOWING, SENDING, held_by, usual_dtypes
from vaemem.prediction.gpus import known_gpu
from vaemem.prediction.held_tensors import arch_key
from vaemem.prediction.request import VAEArguments, VAERequest, resolve_vae, usual_overlap
from vaemem.prediction.runtimes import RUNTIMES, WANS, architecture, followed, parameter_bytes
from vaemem.prediction.seconds import Seconds
from vaemem.prediction.vae_job import MOST
from vaemem.prediction.verdict import DOES_NOT_FIT, FITS

# Limits of the search in tiles, because a larger image may take no more memory: pixels a side, and pixels in all.
# Playing that many pixels takes seconds. So bisection ends at this part of the sides.
TILED_SIDE, TILED_PIXELS, TILED_GRAIN = 1 << 14, 1 << 25, 64
SMALL_TILE = 512  # pixels a side of the tiles to advise if the usual tiles do not cut the image


class Advice(NamedTuple):
    """Another run that was tried and succeeds. Sizes in bytes.

    what: the difference from the predicted run
    verdict: ``"fits"`` or ``"tight"``
    needed, available: bytes that the run takes, and bytes that the card gives; None if it uses the host's memory
    command: the command that shows the run
    """

    what: str
    verdict: str
    needed: int
    available: int | None
    command: str

    def describe(self, size: Sizer) -> str:
        """Return the advice in words. size: formats bytes."""
        if self.available is None:
            return f"{self.what}: takes {size(self.needed)} of the host's memory, and nothing of the card's"
        return f"{self.what}: {self.verdict}, takes {share(self.needed, self.available, size)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as `Prediction.to_dict` shows it.

        Examples
        --------
        >>> from vaemem.prediction.predict_vae import Advice
        >>> Advice("in float16", "fits", 5, 9, "vaemem fits ...").to_dict()["needed_bytes"]
        5
        """
        one = {"what": self.what, "verdict": self.verdict, "needed_bytes": self.needed}
        return one | {"available_bytes": self.available, "command": self.command}


class Prediction(ModulePrediction):
    """A predicted run of a VAE, which `predict` returns. Sizes in bytes.

    Attributes
    ----------
    allocated, reserved : int
        Peaks above the baseline, as the seed table counts them: ``max_memory_allocated() - memory_allocated()`` before
        the run, and the same for reserved. The baseline includes weights and input.
    peak_allocated, peak_reserved : int
        The values of ``torch.cuda.max_memory_allocated()`` and ``max_memory_reserved()``. These two and `allocated` and
        `reserved` hold for a card with room for everything that PyTorch allocates; a run can succeed with less. (The
        runtime a1111 cuts its attention by the free memory of this card.)
    band : tuple of int
        Least and most of `reserved`, over the versions of cuDNN that may stand for a missing version on such cards. If
        the missing version is older or newer than all recorded ones, other cards count too. If nothing was substituted,
        both numbers are `reserved`.
    upper : int
        A safe upper bound for `reserved`: 17/16 of a maximum, plus 20 MiB. The maximum is over processes (cold, warmed
        up, or as `protocol` says) and over cuDNN (the version you named, or those behind `band`). If you give neither
        ``cudnn_version`` nor ``torch_version``, the maximum is over every possible version. For a process's whole
        reservation add ``peak_reserved - reserved``. The 16th is derived from the seed table's rows alone.
    upper_share : float
        The share of answers that `upper` covers. The count leaves out each recorded version of cuDNN and each card in
        turn, and predicts the left-out answers from the others. NaN for a coarse card, for a module, and for any
        allocator other than the native one at its defaults: no measurements exist.
    upper_basis : str
        The answers that `upper_share` counts.
    substitutions : tuple of str
        Substitutes for the cuDNN and the card that you named.
    seconds : Seconds or None
        How long the run takes in a warm process, on a card with room for it: ``low``, ``likely``, ``high``, and the
        rates behind them as ``why`` (`vaemem.prediction.seconds`). None if the card's speed is unknown.
    verdict : str
        ``"fits"``: even `upper` fits. ``"tight"``: the run succeeds, but `upper` does not fit, or PyTorch has to free
        cached segments or use cuDNN's next plan for lack of a workspace. (From 9.8 on, one of cuDNN's plans needs
        none; earlier versions are assumed to have such a plan.) ``"does not fit"``: the same process, played with no
        more than `available`, runs out of memory.
    fits : bool
        Whether the verdict is "fits" or "tight"; with ``safe=True`` whether it is "fits".
    tight_because : str
        Why the run is tight, in words.
    summary : str
        The verdict in a sentence with its numbers.
    coarse : bool
        Whether cuDNN's answers were recorded neither for the card nor for a similar card. A coarse answer knows the
        tensors, and its `band` and `upper` span everything from no workspaces to the workspaces of all cards. On AMD's,
        Intel's and Apple's cards they span no workspaces, as in `reserved`, and im2col's workspaces. ComfyUI has
        im2col's workspaces alone on AMD's newer cards.
    spare : int
        Bytes of `available` that the run leaves free; a coarse answer counts the most that the run takes. Below 0 if
        the run fails: at least that many bytes are missing.
    assumed : str
        The types that were chosen because you named no type, the program that chooses them so, and how to change the
        choice.
    assumed_card : str
        A sentence that names the card that stands for yours, if none was named and none is present; "" otherwise.
    would_fit : tuple of Advice
        Other runs that were tried and succeed, each with the command that shows it: the largest image of that shape,
        tiles, another type, nothing else on the card, our own engine on the CPU. The other runs are tried when you read
        this attribute, and when you print a prediction that does not say "fits".
    on_card : int or None
        `peak_reserved` on this card, with the memory that others hold: no more than `available`. None if the run fails
        and so has no peak.
    out_of_memory_at : PeakTensor or None
        ``(name, bytes)`` of the request that runs out of memory: the module with the tensor, and the request's size.
    least_reserved : int
        The least `available` with which the run still succeeds, weights and input included, to 2 MiB. In contrast,
        PyTorch takes `peak_reserved` if there is room. Bisection finds the number when you read it, and in `repr` if
        the card lacks room for `peak_reserved`.
    least_band : tuple of int
        Both numbers are `least_reserved`, unless cuDNN's next plans are unknown. The second number then assumes that
        the next plans need the first plan's workspace.
    available : int
        Bytes of the card that PyTorch's allocator can have: `total_memory`, less 3% and at least 384 MiB if that is a
        nominal size (whole GiB; CUDA reports less), less the CUDA context and its kernels (by the card:
        ``data/contexts.json``), less ``used=``.
    weights_bytes : int
        Bytes of the weights between runs.
    total_memory : int
        The card's memory, as given or as listed.
    peak_tensors : tuple of PeakTensor
        ``(name, bytes)`` of everything allocated at the peak, weights and input included, largest first. The
        allocator's rounding comes last, so the sum is `peak_allocated`.
    workspace_source : str
        The source of the convolutions' workspace sizes: a profile, or a rule.
    timeline : tuple of Moment
        ``(name, allocated, reserved)`` for each step of the model's call; bytes as the counters show them.
    formula : str
        ``allocated`` as a closed form in the image's H and W at this size's peak, or why there is none.
    model, op, height, width, batch, dtype, runtime, gpu, torch_version, cudnn_version, weights_dtype, tile,
    tile_overlap, slicing, protocol, channels_last, allow_tf32, allocator
        The request.
    diffusers_version : str or None
        The release of diffusers that the prediction is for, such as ``"0.42"``. None for a program with its own code.
    settings : tuple of str
        In words: those of the last four that differ from the defaults; for a tiled op, whether the image is cut.

    Examples
    --------
    >>> p = predict("sdxl", "decode", 1024, 1024, "float16", gpu="RTX 4060", used="1 GB")
    >>> p.verdict, p.spare >> 20, p.peak_reserved >> 20, p.least_reserved >> 20
    ('fits', 2247, 4466, 1882)
    >>> p.peak_tensors[0].name
    'decoder.up_blocks.2.upsamplers.0.conv [workspace]'
    >>> p.save_snapshot("decode.pickle")  # for pytorch.org/memory_viz
    """

    kind = "run"
    upper_share = 0.9989
    upper_basis = (
        "3568 of 3572 answers of profiles that were left out in turn, a version or a card (benchmarks/left_out.py: SDXL"
        " and FLUX, float16 and float32, whole images one at a time); 98 of 98 rows of the seed table"
    )
    request: VAERequest

    def __init__(self, request: VAERequest):
        job, software = request.job, request.software
        covers, besides = ", for one frame" if job.arch["name"] in WANS and job.frames == 1 else "", ""
        if request.card.held:
            what, _ = held_by(software.runtime, job.arch["name"])
            besides = f" besides {what}, which A1111 keeps there"
        super().__init__(request, covers, besides)
        self.model: str = job.arch["name"]
        self.op, self.height, self.width, self.batch, self.dtype = job.op, job.height, job.width, job.batch, job.dtype
        self.weights_dtype, self.tile, self.slicing = job.weights_dtype, job.tile, job.slicing
        self.tile_overlap = job.tile_overlap if job.tile and request.code == "diffusers" else None
        self.runtime, self.allocator, self.settings = software.runtime, software.allocator, request.settings
        self.diffusers_version = f"0.{software.release}" if request.code == "diffusers" else None
        self.model_note = request.taken
        self.frames = job.frames
        frames = f" with {job.frames} frames" if job.frames > 1 else ""
        self.assumed, self.title = request.assumed, f"{self.model} {self.op} {self.height}x{self.width}{frames}"
        self.channels_last, self.allow_tf32 = software.channels_last, software.allow_tf32
        if software.allocator != "native":
            self.upper_share, self.upper_basis = math.nan, "nothing: no measurement of this allocator is known"
        elif self.coarse:
            self.upper_share, self.upper_basis = math.nan, "nothing: no answers of cuDNN for such a card are known"

    @functools.cached_property
    def seconds(self) -> Seconds | None:
        q = self.request
        if q.job.frames > 1:  # no time of a video's VAE was measured
            return None
        return None if self.coarse and not q.calibrate else q.machine.seconds(q.work)

    @property
    def formula(self) -> str:
        try:
            if self.tile:
                raise ArgumentError(
                    "op", "encode or decode", self.op, "a tiled peak depends on how H and W fall into tiles"
                )
            return str(derive(self.request))
        except ValueError as error:
            return f"none: {self.allocated} bytes at this size; {error}"

    @property
    def weights_bytes(self) -> int:
        job = self.request.job
        return sum(parameter_bytes(arch_key(job.arch), self.request.code, job.weights_dtype).values())

    @property
    def _run_text(self) -> str:
        weights = "" if self.weights_dtype == self.dtype else f" from {self.weights_dtype} weights"
        images = f", a batch of {self.batch}{', sliced' * self.slicing}" if self.batch > 1 else ""
        settings = "".join(f", {one}" for one in self.settings)
        cudnn = f", cuDNN {self.cudnn_version}" if self.cudnn_version else ""
        run = f"{self.title} in {self.dtype}{weights}{images} by {self.request.software.program}{settings}"
        return f"{run} (torch {self.torch_version}{cudnn})"

    def __repr__(self) -> str:
        return f"<Prediction {self._run_text} on {self.gpu}: {self._described}>"

    @functools.cached_property
    def would_fit(self) -> tuple[Advice, ...]:
        q, job, found = self.request, self.request.job, list[Advice]()
        for what, other in self._alike():
            with contextlib.suppress(ValueError, OverflowError):  # it is impossible, or too large to play
                p = Prediction(other)
                if p.verdict != DOES_NOT_FIT:
                    found.append(Advice(what, p.verdict, p.judged.here[1], p.available, shell_command(other)))
        if job.op == "encode" or job.op == "decode":
            with contextlib.suppress(OverflowError):  # it cannot be addressed here
                arch = {**job.arch, "videos": job.frames > 1}
                run = VAE(_core.Model(arch, dtype="float32")).estimate(
                    job.op, job.height, job.width, job.batch, frames=job.frames
                )
                needed = max(run.peak_bytes, run.reserved_bytes)
                command = shell_command(q, "estimate")
                found.append(Advice("by vaemem on the CPU in float32", FITS, needed, None, command))
        return tuple(found)

    def _alike(self) -> Iterator[tuple[str, VAERequest]]:
        """Yield the largest image of that shape, and other ways to run this one."""
        q, job = self.request, self.request.job
        if not job.is_tiled:
            with contextlib.suppress(ValueError):  # none fits
                most, _ = _largest_size(replace(q, safe=True), job.width / job.height, False)
                yield f"{most.job.height}x{most.job.width}, the largest of that shape", replace(most, safe=q.safe)
        side = min(max(job.height, job.width), job.tile or LARGEST_SEARCHED)
        if RUNTIMES[q.code].tiles:
            op: TiledOp = "encode_tiled" if job.op.startswith("encode") else "decode_tiled"
            given = VAEArguments(job.arch, op, job.height, job.width, runtime=q.code, gpu=q.card.gpu)
            tiled = resolve_vae(given).job.tile
            for tile in dict.fromkeys((tiled, SMALL_TILE)):
                if tile and tile < side:
                    cut = replace(job, op=op, tile=tile)
                    yield f"in tiles of {tile} pixels, blended where they overlap", replace(q, job=cut)
        if job.dtype == "float32" and q.software.runtime != "forge":
            half = replace(job, dtype="float16", weights_dtype="float16", upcast=False)
            fixed = f", with {FIXED}" if self.model in OVERFLOWING else ""
            yield f"in float16{fixed}", replace(q, job=half, assumed="", fixed=bool(fixed))
        if q.card.used or q.card.held:
            alone = replace(q.card, used=0, held=0)
            yield "with nothing else on the card (the other models offloaded)", replace(q, card=alone)

    def _facts(self, size: Sizer) -> list[tuple[str, str]]:
        largest, time = self.peak_tensors[0], ""
        if self.seconds and self.verdict != DOES_NOT_FIT:
            time = str(self.seconds)
        black = f"black: SDXL's own VAE overflows in float16; {FIXED} does not"
        return [
            *super()._facts(size), ("largest", f"{largest.name}, {size(largest.bytes)}"), ("time", time),
            ("assumed", self.assumed), ("pictures", black if self.request.turns_black else ""),
        ]  # fmt: skip

    def _blocks(self, size: Sizer) -> list[Block]:
        advice = [(one.describe(size), one.command) for one in self._tried]
        tried = "What would fit:" if advice else "Nothing that was tried would fit."
        details = [
            ("follows", followed(self.request.job.arch, self.request.code, self.request.software.release)),
            ("rates", self.seconds.why if self.seconds else ""),
        ]  # fmt: skip
        return [
            *[Actions(tried, advice)] * (self.verdict != FITS), Bullets(self.notes), Facts(details, detail=True),
            self._tensors(size), *self._sources(),
        ]  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Models that are not counted, and other models on the card."""
        program, held = SENDING.get(self.runtime), self.request.card.held
        sends = f"{program} sends other models to the host first, by its own estimate; they are not counted."
        models = held_by(self.runtime, self.model)[0]
        keeps = f"{models[:1].upper()}{models[1:]} stay on the card. For --medvram, use the runtime a1111-medvram."
        return (*[sends] * bool(program), *[keeps] * bool(held))

    @property
    def _tried(self) -> tuple[Advice, ...]:
        return () if self.verdict == FITS else self.would_fit

    def _asked_data(self) -> dict[str, Any]:
        names = (
            "model op height width batch dtype weights_dtype runtime tile tile_overlap slicing channels_last"
            " allow_tf32 allocator assumed"
        )
        return {name: getattr(self, name) for name in names.split()}

    def _more_data(self) -> dict[str, Any]:
        more = self._counters_data()
        more["software"]["diffusers"] = self.diffusers_version
        return more | {
            "seconds": self.seconds and self.seconds._asdict(), "weights_bytes": self.weights_bytes,
            "would_fit": [one.to_dict() for one in self._tried],
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return the run as the only row of a `vaemem.Table`.

        Examples
        --------
        >>> predict("sdxl", "decode", 1024, 1024, gpu="RTX 4090").rows()[0]["reserved_bytes"] >> 20
        5812
        """
        cudnn, took = f", cudnn {self.cudnn_version}" if self.cudnn_version else "", self.seconds
        replaced = f" (substituted: {'; '.join(self.substitutions)})" if self.substitutions else ""
        release = [f"diffusers {self.diffusers_version}"] * bool(self.diffusers_version)
        names = "model op height width batch dtype tile tile_overlap runtime weights_bytes"
        row = {name: getattr(self, name) for name in names.split()}
        return [row | {
            "frames": self.frames if self.frames > 1 else None,
            "device": self.gpu, "source": "predicted", "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved, "seconds": took and took.likely,
            "seconds_low": took and took.low, "seconds_high": took and took.high, "versions": ", ".join([
                f"torch {self.torch_version}{cudnn}{replaced}", *release, *self.settings, f"vaemem {__version__}",
            ]),
        }]  # fmt: skip


def _sized(size: int, unit: int) -> str:
    """Write bytes as an argument: in GB of `unit` bytes if that gives whole tenths, otherwise as a number."""
    return f"{size / unit:g}GB" if size * 10 % unit == 0 else str(size)


def _program(request: VAERequest) -> str | None:
    """Return the runtime's flag: none for diffusers; for A1111 without its other models, the medvram runtime."""
    runtime, held = request.software.runtime, request.card.held
    if not held and held_by(runtime, request.job.arch["name"])[1]:
        return f"{runtime}-medvram"
    return None if runtime == "diffusers" else runtime


def shell_command(request: VAERequest, verb: str = "fits") -> str:
    """Return the command line of a request. The verb ``"estimate"`` gives our own engine's memory for the same run."""
    job, software, card = request.job, request.software, request.card
    name = FIXED if request.fixed else job.arch["name"]
    words = ["vaemem", verb, name, job.op, f"{job.height}x{job.width}"]
    flags: dict[str, Any] = {"batch": job.batch if job.batch > 1 else None}
    flags |= {"frames": job.frames if job.frames > 1 else None}
    if verb == "fits":
        usual = usual_dtypes(software.runtime, job.arch["name"], card.gpu.sm, request.fixed, software.release)
        found = known_gpu(card.gpu.name)
        is_whole = found and found.total_memory == card.gpu.total_memory  # the name tells its memory
        is_usual = (job.dtype, job.weights_dtype, job.upcast) == usual[:3]
        flags |= {
            "gpu": card.gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce "),
            "memory": None if is_whole else _sized(card.gpu.total_memory, 1 << 30),
            "used": _sized(card.used, 10**9) if card.used else None,
            "os": "windows" if card.is_windows else None, "dtype": None if is_usual else job.dtype,
            "weights-dtype": None if is_usual or job.dtype == job.weights_dtype else job.weights_dtype,
            "runtime": _program(request), "tile": job.tile,
            "tile-overlap": None if job.tile_overlap == usual_overlap(job.arch) else job.tile_overlap,
            "slicing": job.slicing,
            "torch": software.torch_version, "cudnn": software.cudnn_version, "diffusers": software.diffusers_version,
            "protocol": None if software.protocol == USUAL_PROTOCOL else software.protocol,
            "channels-last": software.channels_last, "no-tf32": not software.allow_tf32,
            "allocator": None if software.allocator == "native" else software.allocator,
        }  # fmt: skip
    for name, value in flags.items():
        words += [] if value is None or value is False else [f"--{name}", *([] if value is True else [str(value)])]
    return shlex.join(words)


@shared
def predict(
    model: str | Mapping[str, Any], op: TiledOp, height: int, width: int, dtype: Dtype | None = None, batch: int = 1,
    runtime: Program = "diffusers", gpu: str | None = None, cudnn_version: str | None = None,
    torch_version: str | None = None, weights_dtype: Dtype | None = None, tile: int | None = None,
    slicing: bool = False, *, tile_overlap: float | None = None, memory: int | str | None = None,
    used: int | str = 0, workspace: Any = None,
    protocol: str = USUAL_PROTOCOL, channels_last: bool = False, allow_tf32: bool = True,
    cudnn_benchmark: bool = False, allocator: str = "native", safe: bool = False,
    os: str = "linux", calibrate: Any = None, diffusers_version: str | None = None, frames: int = 1,
) -> Prediction:  # fmt: skip
    """Predict the memory that PyTorch takes for a VAE's run: in a fresh process, with the model loaded. By default one
    measured run follows two warm-up runs.

    Parameters
    ----------
    model, op of a VAE : shared
    height, width : int
        The image's size in pixels, multiples of 8.
    dtype, batch, runtime of a VAE : shared
    gpu, cudnn_version, torch_version : shared
    weights_dtype : str, optional
        The type of the weights between runs. If it differs from `dtype`, the run converts weights and input.
    tile : int, optional
        The side of a tile in pixels for the tiled ops of diffusers, comfyui and a1111. Defaults: the config's
        sample_size for diffusers (512 for sd15, 1024 for the others), 512 for ComfyUI, and the recommendation of
        A1111's Tiled VAE for the card. ComfyUI makes three passes, with tiles that overlap by 64 pixels, but at most by
        a quarter. Tiled VAE pads its tiles on every side, by 11 latents or 32 pixels.
    slicing : bool
        Whether the images of a batch run one after the other (diffusers' ``enable_slicing``).
    tile_overlap : float, optional
        The part of its side that a tile shares with the next, from 0 to less than 1: diffusers' tile_overlap_factor.
        The default is a quarter, or an eighth for tiny autoencoders. Only the tiled ops of diffusers take it, because
        only its class has this setting.
    memory, used : shared
    workspace : object, optional
        The object that answers for the convolutions' workspaces in place of `vaemem.prediction.workspace.Workspace`.
    protocol : str
        What the process does before the counters are read, because `reserved` depends on it:

        - ``"cold"``: the first run of the process;
        - ``"warm"``: the first run after two warm-up runs, while the second one's result is still bound;
        - ``"repeated"``: the second run after two warm-up runs, when none of their results is bound;
        - ``"kept"``: three runs in a row from a cold start, the cache never emptied; the largest of them counts.

        The protocols "cold", "warm" and "repeated" empty the cache and reset the peaks before each run.
        `vaemem.prediction.benchmark.PROTOCOLS` is the table of protocols.
    channels_last : bool
        Whether the program calls ``vae.to(memory_format=torch.channels_last)`` after it loads the model. Convolutions
        then take and return that format, and every GroupNorm copies its input back. PyTorch up to 2.14 only; later
        versions are refused.
    allow_tf32 : bool
        ``torch.backends.cudnn.allow_tf32``, True in PyTorch. False makes cuDNN use other plans in float32 on compute
        capability 8.0 and later.
    cudnn_benchmark : bool
        ``torch.backends.cudnn.benchmark``. True is refused: only the card can tell which plan is the fastest.
    allocator : str
        ``"native"``, ``"cudaMallocAsync"``, or a ``PYTORCH_CUDA_ALLOC_CONF`` (``"expandable_segments:True"``).
        cudaMallocAsync is the driver's memory pool. `Prediction.reserved` is then the least that it can hold, and the
        upper end of `Prediction.band` is the native allocator's reservation.
    safe, os : shared
    calibrate : Table, row or sequence of rows, optional
        Runs of PyTorch that were measured on this card, with their seconds. `Prediction.seconds` then follows from
        them, and not from other people's measurements. Rows of other cards, of the engine, and without seconds are
        left out. A row without a device counts as measured on this card.
    diffusers_version : shared
    frames : int
        Frames of a video, 1 more than a multiple of 4, for the VAEs of Wan 2.1 and 2.2. 1: an image.

    Raises
    ------
    ValueError
        The model, op, dtype, protocol, GPU or version is unknown; the model cannot take that size; the GPU has no
        engine for a convolution; the build of PyTorch has no kernels for the card; a setting of PyTorch is not
        modelled.

    Notes
    -----
    docs/PREDICTION.md explains how it works, what it does not know, and its errors.

    Examples
    --------
    >>> predict("sdxl", "decode", 1024, 1024, dtype="float16", gpu="RTX 4090").allocated / 2**20
    2434.125
    >>> p = predict("sdxl", "decode", 4096, 4096, dtype="float32", gpu="RTX 4060")
    >>> p.fits, p.out_of_memory_at.name
    (False, 'decoder.up_blocks.1.resnets.0')
    >>> print(predict("sdxl", "decode", 1024, 1024, dtype="float16", gpu="RTX 4090").seconds)
    0.14 s (0.12 to 0.17)
    >>> mine = {"model": "sdxl", "op": "decode", "height": 512, "width": 512, "dtype": "float16", "seconds": 0.25}
    >>> print(predict("sdxl", "decode", 1024, 1024, dtype="float16", gpu="RTX 3060", calibrate=mine).seconds)
    1.1 s (0.9 to 1.3)
    """
    return Prediction(resolve_vae(VAEArguments(
        model, op, height, width, dtype, batch, runtime, gpu, cudnn_version, torch_version, weights_dtype, tile,
        slicing, tile_overlap, memory, used, workspace, protocol, channels_last, allow_tf32, cudnn_benchmark,
        allocator, safe, os, calibrate, diffusers_version, frames,
    )))  # fmt: skip


@shared
def predict_largest(
    model: str | Mapping[str, Any], op: TiledOp, dtype: Dtype | None = None, batch: int = 1, *, gpu: str | None = None,
    aspect: float = 1.0, used: int | str = 0, every: bool = False, safe: bool = True, **others: Any,
) -> tuple[int, int]:  # fmt: skip
    """Find the largest image that fits on a card, by `predict`. Return its (height, width).

    Parameters
    ----------
    model, op, dtype, batch of a VAE : shared
    gpu, used : shared
    **others
        Other arguments of `predict`: ``memory``, ``runtime``, ``tile``, ``cudnn_version``, ``torch_version`` and more.
    aspect : float
        The width over the height, as nearly as whole latent pixels allow.
    every : bool
        Whether all smaller images of that shape have to fit too.
    safe : bool
        Whether even `Prediction.upper` has to fit, as it does by default; otherwise tight is enough.

    Raises
    ------
    ValueError
        No size fits, or `predict` raises it.

    Warns
    -----
    RuntimeWarning
        The search ended before the card was full, so larger images may fit. For tiled ops the search ends at 16,384
        pixels a side and 33,554,432 in all (8192x4096). The search also ends at the most that can be played (65,536
        tiles, 4,194,304 steps).

    Notes
    -----
    Without ``torch_version`` or ``cudnn_version`` a size has to fit with every known version, so the result is smaller.

    PyTorch's memory does not always grow with the size, because cuDNN plans each size by itself. So every size within
    three tenths of bisection's result is predicted too. Tiled ops take long: bisection alone decides, to a 64th of the
    sides.
    Images of another shape, even of fewer pixels, may not fit.

    Examples
    --------
    >>> predict_largest("sdxl", "decode", "float16", gpu="RTX 4060", used="1 GB")
    (1208, 1208)
    >>> predict_largest("sdxl", "decode", "float16", gpu="RTX 4060", used="1 GB", safe=False)
    (1992, 1992)
    """
    for name in ("height", "width"):
        if name in others:
            raise ArgumentError(name, "None, because it is searched for", repr(others[name]))
    arch = architecture(model)
    side = latent_factor(arch) * arch.get("patch_size", (1, 1))[0]  # a size that all runtimes take
    request = resolve_vae(VAEArguments(model, op, side, side, dtype, batch, gpu=gpu, used=used, safe=safe, **others))
    found, is_last = _largest_size(request, check_aspect(aspect), flag("every", every))
    height, width = found.job.height, found.job.width
    if not is_last:
        what = f"predict_largest: {height}x{width} fits, and larger images were not tried"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
    return height, width


@shared
def largest_batch(
    model: str | Mapping[str, Any], op: TiledOp, height: int, width: int, dtype: Dtype | None = None, *,
    gpu: str | None = None, used: int | str = 0, every: bool = False, safe: bool = True, **others: Any,
) -> int:  # fmt: skip
    """Find the largest batch of images of one size that fits on a card, by `predict`.

    Parameters
    ----------
    model, op of a VAE : shared
    height, width : int
        The images' size in pixels.
    dtype of a VAE : shared
    gpu, used : shared
    every, safe, **others
        As for `predict_largest`.

    Raises
    ------
    ValueError
        Not even one image fits, or `predict` raises it.

    Warns
    -----
    RuntimeWarning
        The search ended before the card was full: at 65,536 images, or at the most that can be played.

    Notes
    -----
    Memory does not always grow with the batch, because cuDNN plans each batch by itself. So every batch within seven
    tenths of bisection's result is predicted too, and of the largest that fits. In tiles, or with slicing, bisection
    alone decides.

    Examples
    --------
    >>> largest_batch("sdxl", "encode", 1024, 1024, "float16", gpu="RTX 4060", used="1 GB")
    2
    """
    if "batch" in others:
        raise ArgumentError("batch", "None, because it is searched for", repr(others["batch"]))
    request = resolve_vae(VAEArguments(model, op, height, width, dtype, gpu=gpu, used=used, safe=safe, **others))
    job = request.job
    found, is_last = _largest(
        lambda n: replace(request, job=replace(job, batch=n)), MOST["batch"], flag("every", every),
        0 if job.is_tiled or job.slicing else 7,
    )  # fmt: skip
    if not is_last:
        what = f"largest_batch: a batch of {found.job.batch} fits, and larger ones were not tried"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
    return found.job.batch


def _largest_size(request: VAERequest, aspect: float, every: bool) -> tuple[VAERequest, bool]:
    """Return the request at the largest size of that shape that fits, and whether a larger size was played."""
    is_tiled = request.job.is_tiled

    def at(n: int) -> VAERequest:
        height, width = size_of(n, request.unit, aspect)
        if is_tiled and height * width > TILED_PIXELS:
            raise OverflowError("beyond the search")
        return request.at(height, width)

    most = (TILED_SIDE if is_tiled else LARGEST_SEARCHED) // request.unit
    return _largest(at, most, every, 0 if is_tiled else 3, TILED_GRAIN if is_tiled else None)


def _largest(
    at: Callable[[int], VAERequest], most: int, every: bool, tenths: int, grain: int | None = None
) -> tuple[VAERequest, bool]:
    """Return at(n) for the largest n up to `most` that fits, and whether a larger one was played. tenths: the part of
    bisection's result to try one by one around it; 0 if plays take long. grain: as for `find_largest`."""
    refused: dict[int, bool] = {}  # whether it was played; otherwise it is too large to play

    def fits(n: int) -> bool:
        try:
            if Prediction(at(n)).fits:
                return True
            refused[n] = True
        except OverflowError:
            refused[n] = False
        except ArgumentError as error:
            if error.argument != "batch" or n == 1:
                raise
            refused[n] = True  # the program takes no such batch
        return False

    found = find_largest(
        fits, most, around=lambda n: range(n - n * tenths // 10, n + n * tenths // 10 + 1), every=every,
        grain=grain,
    )  # fmt: skip
    if not found:
        smallest = Prediction(at(1))
        advice: Words = ("accept a tight run with ", Named("safe", False))
        if smallest.verdict == DOES_NOT_FIT:
            advice = f"{shell_command(smallest.request)} shows runs that fit"
        raise ArgumentError("gpu, used", "", f"{smallest.title} on {smallest.gpu} {smallest.summary}", advice)
    return at(found), bool(refused and refused[min(refused)])
