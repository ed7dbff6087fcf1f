"""What a message may be about: a run with the refused tensor, or another tensor of the same size."""

from __future__ import annotations

from typing import Any, NamedTuple

from vaemem._common import MIB
from vaemem.out_of_memory.sizes import MADE_SIZES
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.prediction.request import VAERequest

PLAYED, AGREES = 1, 2  # fits of a run: it is refused there when played; and its figures agree


class Match(NamedTuple):
    """A run that makes the request of a message.

    Attributes
    ----------
    models : str
        VAEs with this tensor.
    op, height, width, dtype, runtime : str or int
        The run; of a tile if the message is about one.
    tensor : str
        The module that allocates, and what.
    bytes : int
        Exact size of the tensor.
    beside : int or None
        Bytes that PyTorch had allocated besides the run's own tensors: all weights, and other models.
    played : bool
        Whether this run, played on such a card with `beside` allocated, runs out at this tensor.
    agrees : bool
        Whether its reserved but unallocated bytes then agree with the message, to the printed digits.
    frames : int
        Frames of the video; 1 for an image.
    offload : str
        How a whole pipeline is offloaded; "" for a VAE alone.
    also : tuple of (int, int)
        Other sizes with the same memory.
    """

    models: str
    op: str
    height: int
    width: int
    dtype: str
    runtime: str
    tensor: str
    bytes: int
    beside: int | None
    played: bool
    agrees: bool = False
    frames: int = 1
    offload: str = ""
    also: tuple[tuple[int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As `Explanation.to_dict` has it, with `beside` as ``beside_bytes``.

        Examples
        --------
        >>> from vaemem.out_of_memory.candidates import Match
        >>> Match("sdxl", "decode", 64, 64, "float16", "diffusers", "conv_in", 9, 5, True).to_dict()["beside_bytes"]
        5
        """
        return {"beside_bytes" if name == "beside" else name: value for name, value in self._asdict().items()}

    def __str__(self) -> str:
        held = "" if self.beside is None else f"; PyTorch held {self.beside / MIB:.0f} MiB besides its tensors"
        size = " or ".join(f"{height}x{width}" for height, width in ((self.height, self.width), *self.also))
        frames = f", {self.frames} frames," if self.frames > 1 else ""
        way = f", offload {self.offload}" if self.offload else ""
        return (
            f"{self.models} {self.op} {size}{frames} {self.dtype} by {self.runtime}{way}: {self.tensor},"
            f" {self.bytes / MIB:.0f} MiB{held}"
        )


class Found(NamedTuple):
    """A match and its request. fit: how well it agrees, from 0; rare: how unusual the run is."""

    match: Match
    request: VAERequest | PipelineRequest
    fit: int
    rare: int

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The likeliest have the least: how well a run agrees comes first, then how common it is."""
        size = self.match.height, self.match.width
        common = MADE_SIZES.index(size) if size in MADE_SIZES else len(MADE_SIZES)
        return -min(self.fit, AGREES), self.rare, -self.fit, common


class OtherTensor(NamedTuple):
    """A weight of a denoiser or text encoder, or an attention's scores, with the bytes of a message.

    Attributes
    ----------
    model : str
        The recorded module, or "a VAE".
    tensor : str
        The first weight of this size, or the scores.
    alike : int
        Number of weights of this size; 1 for scores.
    dtype : str
        Type of its numbers.
    height, width : int or None
        For scores, the image in pixels.
    bytes : int
        Exact size of the tensor.
    """

    model: str
    tensor: str
    alike: int
    dtype: str
    height: int | None
    width: int | None
    bytes: int

    def __str__(self) -> str:
        like = f", one of {self.alike} like it" if self.alike > 1 else ""
        image = f" at {self.height}x{self.width}" if self.height else ""
        return f"{self.model}{image}: {self.tensor} in {self.dtype}, {self.bytes / MIB:.0f} MiB{like}"
