"""A published equation for the memory of Stable Diffusion 1.5, term by term beside what vaemem predicts."""

from __future__ import annotations

from typing import NamedTuple

from vaemem._common import MIB, render
from vaemem.pipelines.predict_pipeline import predict_pipeline
from vaemem.tables.estimators import SD15_AVERAGE_CHANNELS, sd15_equation


class JudgedTerm(NamedTuple):
    """A phase in the equation and as it is predicted, bytes beside the weights; None where it has no such phase."""

    phase: str
    theirs: float | None
    ours: int

    @property
    def ratio(self) -> float | None:
        """How many times too small the equation's is."""
        return self.ours / self.theirs if self.theirs else None


def judge_equation(height: int, width: int, prompt_tokens: int = 77, gpu: str = "T4") -> tuple[JudgedTerm, ...]:
    """The equation's terms beside `predict_pipeline`'s phases.

    Parameters
    ----------
    height, width, prompt_tokens : int
    gpu : str
        The T4 that the calculator recommends, by default.

    Returns
    -------
    tuple of JudgedTerm
        One each for encode prompt, encode image (its pipeline begins with one), denoise and decode; then the total,
        beside the most that the process takes of the card, without a CUDA context.

    Examples
    --------
    >>> [(term.phase, round(term.ratio or 0)) for term in judge_equation(512, 512)]
    [('encode prompt', 0), ('encode image', 68), ('denoise', 9), ('decode', 107), ('total', 1)]
    """
    theirs = sd15_equation(height, width, prompt_tokens)
    p = predict_pipeline("sd15", height, width, prompt_tokens=prompt_tokens, image=True, gpu=gpu)
    terms = [
        JudgedTerm(phase.name, theirs.get(phase.name), phase.allocated - phase.weights)
        for phase in p.phases
        if phase.name != "load"
    ]
    return (*terms, JudgedTerm("total", theirs["total"], p.peak))


def judge_text(sizes: tuple[int, ...] = (512, 768, 1024), tokens: tuple[int, ...] = (77, 231), gpu: str = "T4") -> str:
    """`judge_equation` over sizes and prompt lengths as a table, and where the equation is wrong.

    Examples
    --------
    >>> print(judge_text((512,), (77,)))
    SD 1.5 in float16 on T4: ...
    """
    judged = {(side, length): judge_equation(side, side, length, gpu) for side in sizes for length in tokens}
    lines = [
        [f"{side}x{side}", str(length), *(f"{_mib(term.theirs)} / {_mib(term.ours)}" for term in terms)]
        for (side, length), terms in judged.items()
    ]
    phases = [term.phase for term in judged[sizes[0], tokens[0]]]
    lacks = [judge_equation(side, side, gpu=gpu)[-1].ratio or 0.0 for side in (sizes[0], sizes[-1])]
    return "\n".join(
        [
            f"SD 1.5 in float16 on {gpu}: the equation / predicted, MiB beside the weights; total with them",
            render(("size", "tokens", *phases), lines),
            "",
            "decode: image and three copies of it stand for the VAE, whose full-size tensors have 128 channels where a"
            " picture has 3, and whose last upsampling holds 9.5 of them.",
            f"denoise: a tensor of {SD15_AVERAGE_CHANNELS} channels at full size and two copies stand for the UNet. The"
            f" average is written as (320 + 640 + 1280) / 3, which is {(320 + 640 + 1280) / 3:.2f}. Channels grow only"
            " where pixels become fewer, guidance runs two images at once, and PyTorch's attention keeps no scores: a"
            " prompt's length costs next to nothing.",
            "encode prompt: no phase of the equation; its size does not depend on the image.",
            "encode image: as little as for decode, where PyTorch holds 6 tensors of 128 channels.",
            f"total: 20% of the weights stand for what the phases lack. It is {lacks[0]:.1f} times too"
            f" small at {sizes[0]}x{sizes[0]} and {lacks[1]:.1f} times at {sizes[-1]}x{sizes[-1]}, beside"
            " what PyTorch reserves with all weights on the card.",
            "What replaces it, as allocated bytes, with e = 2 bytes in float16:",
            str(predict_pipeline("sd15", sizes[0], sizes[0], image=True, gpu=gpu).formula),
        ]
    )


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}" if size < 100 * MIB else f"{size / MIB:.0f}"
