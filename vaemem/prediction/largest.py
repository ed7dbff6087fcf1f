"""The largest image that a card has room for, by predictions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from vaemem._arguments import shared
from vaemem._common import flag, latent_factor
from vaemem.engine.limits import LARGEST_SIDE, check_aspect, largest_size
from vaemem.prediction.predict import Prediction
from vaemem.prediction.question import ask
from vaemem.prediction.runtimes import architecture

TILED_SIDE = 1 << 14  # pixels: no further in tiles, where a larger image may take no more


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
