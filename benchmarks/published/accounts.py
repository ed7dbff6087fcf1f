"""Two published accounts of whole pipelines, compared with vaemem.

One tried eight ways to fit a card of 12 GB; vaemem plans each. The other is an equation for the memory of Stable
Diffusion 1.5; vaemem predicts each term."""

from __future__ import annotations

from typing import NamedTuple

from vaemem._common import MIB
from vaemem._render import Columns
from vaemem.pipelines.by_mlx import vae_bytes
from vaemem.pipelines.plan_pipeline import plan_pipeline
from vaemem.pipelines.predict_pipeline import predict_pipeline
from vaemem.pipelines.ways import Outcome, PipelinePlan
from vaemem.sdcpp.graphs import graph
from vaemem.tables.estimators import SD15_AVERAGE_CHANNELS, sd15_equation

# ---- eight ways ----


class Tried(NamedTuple):
    """A row of the table. result: oom, success or timeout. seconds: as printed, or None."""

    number: int
    about: str
    residence: str
    vae: str
    result: str
    seconds: float | None


# "Dynamic VRAM Offloading Benchmark Results" of 2026-02-24: Z-Image-Turbo at 1024x1024 in 9 steps, prompt "a cat", by a
# server built on stable-diffusion.cpp, a card of 12 GB that it does not name, a CPU "~10 years old, no AVX2/AVX512".
TRIED = (
    Tried(1, "baseline", "no offload", "whole", "oom", None),
    Tried(2, "no offload, VAE tiling", "no offload", "tiled", "oom", None),
    Tried(3, "cond_only", "cond_only", "whole", "success", 66),
    Tried(4, "cond_only, VAE tiling", "cond_only", "tiled", "success", 149),
    Tried(5, "CLIP on CPU, VAE tiling", "--clip-on-cpu", "tiled", "success", 151),
    Tried(6, "CLIP and VAE on CPU, VAE tiling", "--clip-on-cpu", "on CPU, tiled", "timeout", None),
    Tried(7, "cond_only, VAE on CPU, tiling", "cond_only", "on CPU, tiled", "timeout", None),
    Tried(8, "cond_only, VAE tiling, again", "cond_only", "tiled", "success", 146),
)
TOLD = {"transformer": "6.8 GiB", "text_encoder": "4.0 GiB"}  # its models' sizes as it prints them
CANNOT_TELL = "cannot tell"
TIME_LIMIT = 600.0  # seconds after which it says TIMEOUT
CALIBRATED = (3, 4)  # the rows whose seconds the others' are predicted from
TOKENS = 10  # of its prompt in Qwen3's template


class Judged(NamedTuple):
    """A row and the plan's outcome of the same way."""

    tried: Tried
    outcome: Outcome

    @property
    def ours(self) -> str:
        """Return oom, success or timeout; "cannot tell" if the time limit lies within the band of its seconds."""
        took = self.outcome.seconds
        if self.outcome.fails_in not in (None, "time"):
            return "oom"
        if took and took.low <= TIME_LIMIT <= took.high:
            return CANNOT_TELL
        return "success" if self.outcome.fits else "timeout"


def way_of(tried: Tried, direct: bool) -> str:
    """Return the plan's name for a row."""
    names = {"whole": "direct", "tiled": "direct, tiled"} if direct else {}
    return f"{tried.residence}, VAE {names.get(tried.vae, tried.vae)}"


def judged(plan: PipelinePlan, direct: bool) -> tuple[Judged, ...]:
    """Pair the rows with a plan's outcomes, with the VAE's convolutions direct or by im2col."""
    return tuple(Judged(tried, plan[way_of(tried, direct)]) for tried in TRIED)


def plan_of(direct: bool = True, calibrated: bool = True) -> PipelinePlan:
    """Plan the pipeline that was tried, calibrated with the third and the fourth row."""
    measured = {way_of(row, direct): row.seconds for row in TRIED if row.number in CALIBRATED and row.seconds}
    return plan_pipeline(
        "zimage-turbo", 1024, 1024, memory="12 GB", runtime="sd.cpp", components=TOLD, prompt_tokens=TOKENS,
        cpu="no AVX2", calibrate=measured if calibrated else None, time_limit=TIME_LIMIT,
    )  # fmt: skip


def judge_plan() -> str:
    """Show the published table next to the plan's, and explain the differences."""
    plan = plan_of()
    rows, others = judged(plan, True), judged(plan_of(False, calibrated=False), False)
    header = ("#", "what", "theirs", "ours", "theirs, s", "ours, s", "where", "by im2col instead")
    lines = []
    for row, other in zip(rows, others, strict=True):
        tried, outcome, ours = row.tried, row.outcome, row.ours
        late = f"> {TIME_LIMIT:.0f}" if tried.result == "timeout" else ""
        theirs = f"{tried.seconds:.0f}" if tried.seconds else late
        took = f"{'' if ours == 'oom' else outcome.seconds}{', given' if tried.number in CALIBRATED else ''}"
        direct = "" if "CPU" in tried.vae else other.outcome.verdict
        lines.append([str(tried.number), tried.about, tried.result, ours, theirs, took, outcome.verdict, direct])
    agree = sum(row.ours == row.tried.result for row in rows)
    unsure = sum(row.ours == CANNOT_TELL for row in rows)
    title = f"{plan.title}, {(plan.room.card or 0) / MIB:.0f} MiB of it for the run: {agree} of {len(rows)} rows agree"
    title += f", of {unsure} the band of seconds cannot tell" if unsure else ""
    return "\n".join([title, Columns(header, lines).text(), "", *_why(plan, rows, others)])


def _why(plan: PipelinePlan, rows: tuple[Judged, ...], others: tuple[Judged, ...]) -> list[str]:
    """Explain the table in sentences with numbers."""

    def phases(row: Judged) -> dict[str, str]:
        return {phase.name: f"{phase.total / MIB:.0f} MiB" for phase in row.outcome.way.phases}

    first, tiled, third = (phases(rows[i]) for i in (0, 1, 2))
    float32 = vae_bytes("flux", "all", "float32")
    works = [rows[i].outcome.way.work["vae direct"] for i in (3, 2)]
    assert plan.machine is not None
    rate = str(plan.machine.rates["vae direct"]).partition(" within")[0]
    took = {row.tried.number: row.outcome.seconds.likely for row in rows if row.outcome.seconds and row.ours != "oom"}
    order = ", ".join(str(number) for number in sorted(took, key=lambda number: took[number]))
    return [
        f"Why in diffusion: {first['load']} of weights stay on the card. Encoding the prompt adds next to nothing"
        f" ({first['encode prompt']}); the diffusion model's buffer makes it {first['denoise']}, and"
        f" {third['denoise']} with the text encoder away. Tiles change nothing but the decode, from {first['decode']}"
        f" to {tiled['decode']}, for which row 2 would have had room.",
        f"That the VAE's convolutions ran directly is inferred: by im2col row 3 {others[2].outcome.verdict}, but it"
        f" succeeded. And tiles are {works[0] / works[1]:.1f} times the work of a whole decode: if they add 83 s, the"
        f" VAE ran at {rate}, far below what products on any such card do.",
        f"The VAE's 320 MiB are its size in float32: 83.8 M parameters in 4 bytes are {float32 / MIB:.1f} MiB, and in"
        f" Q8_0 they would be {float32 / MIB * 34 / 128:.0f}. stable-diffusion.cpp keeps convolutions in float16: the"
        f" plan counts {graph('vae-decoder').weights / MIB:.0f} MiB for the decoder.",
        "No card is named: rows 3 and 4 give the rates of denoiser and VAE, the other rows follow. In order of time: "
        f"{order}; theirs: 3, 8, 4, 5, of which the last three differ as repeated runs do, and 6 and 7, which were "
        "stopped. What a CPU without AVX2 does is known within so wide a band that it does not say whether these two "
        "end before the limit.",
        "Theirs recommends row 3, which is the fastest of what was tried here too. Of all ways it is another: "
        f"{plan.reason}",
    ]


# ---- an equation ----


class JudgedTerm(NamedTuple):
    """Bytes of a phase without weights: the equation's (None if it has no such phase) and the predicted ones."""

    phase: str
    theirs: float | None
    ours: int

    @property
    def ratio(self) -> float | None:
        """Return how many times too small the equation's term is."""
        return self.ours / self.theirs if self.theirs else None


def judge_equation(height: int, width: int, prompt_tokens: int = 77, gpu: str = "T4") -> tuple[JudgedTerm, ...]:
    """Compare the equation's terms with `predict_pipeline`'s phases, on the T4 that its author recommends.

    One term each for encode prompt, encode image (its pipeline begins with one), denoise and decode. The last term is
    the total: what the process takes of the card, without a CUDA context.
    """
    theirs = sd15_equation(height, width, prompt_tokens)
    p = predict_pipeline("sd15", height, width, prompt_tokens=prompt_tokens, image=True, gpu=gpu)
    took = {phase.name: phase.allocated - phase.weights for phase in p.phases if phase.name != "load"}
    return tuple(JudgedTerm(name, theirs.get(name), size) for name, size in (*took.items(), ("total", p.peak)))


def judge_equations() -> str:
    """Show `judge_equation` over sizes and prompt lengths, and where the equation is wrong."""
    sizes, tokens, gpu = (512, 768, 1024), (77, 231), "T4"
    judged = {(side, length): judge_equation(side, side, length, gpu) for side in sizes for length in tokens}
    lines = []
    for (side, length), terms in judged.items():
        lines.append([f"{side}x{side}", str(length), *(f"{_mib(term.theirs)} / {_mib(term.ours)}" for term in terms)])
    phases = [term.phase for term in terms]
    lacks = [judge_equation(side, side, gpu=gpu)[-1].ratio or 0.0 for side in (sizes[0], sizes[-1])]
    said = [
        f"SD 1.5 in float16 on {gpu}: the equation / predicted, MiB besides the weights; the total includes them",
        Columns(("size", "tokens", *phases), lines).text(),
        "",
        "decode: image and three copies of it stand for the VAE, whose full-size tensors have 128 channels where a"
        " picture has 3, and whose last upsampling holds 9.5 of them.",
        f"denoise: a tensor of {SD15_AVERAGE_CHANNELS} channels at full size and two copies stand for the UNet. The"
        f" average is written as (320 + 640 + 1280) / 3, which is {(320 + 640 + 1280) / 3:.2f}. Channels grow only"
        " where pixels become fewer, guidance runs two images at once, and PyTorch's attention keeps no scores: a"
        " prompt's length costs next to nothing.",
        "encode prompt: no phase of the equation; its size does not depend on the image.",
        "encode image: as little as for decode, where PyTorch holds 6 tensors of 128 channels.",
        f"total: 20% of the weights stand for what the phases lack. It is {lacks[0]:.1f} times too small at"
        f" {sizes[0]}x{sizes[0]} and {lacks[1]:.1f} times at {sizes[-1]}x{sizes[-1]}, beside what PyTorch reserves"
        " with all weights on the card.",
        "What replaces it:",
        str(predict_pipeline("sd15", sizes[0], sizes[0], image=True, gpu=gpu).formula),
    ]
    return "\n".join(said)


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}" if size < 100 * MIB else f"{size / MIB:.0f}"
