"""The only room of vaemem that imports PyTorch: predictions for any module, measurements, a drop-in for diffusers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

try:
    import torch
except ImportError as error:  # pragma: no cover
    raise ImportError("vaemem.pytorch wants PyTorch: pip install 'vaemem[pytorch]'") from error

from vaemem.prediction.predict import ModulePrediction
from vaemem.pytorch.recording import Recording, predict_peak, record
from vaemem.tables import measure as _measure
from vaemem.tables.table import Table

if TYPE_CHECKING:
    from vaemem.pytorch.autoencoder import AutoencoderKL

__all__ = ["AutoencoderKL", "ModulePrediction", "Recording", "measure", "predict_peak", "record"]


def measure(
    model: Any, op: str, sizes: int | Sequence[int | tuple[int, int]], dtypes: str | Sequence[str] = ("float16",), *,
    runtime: str = "diffusers", device: Any = None, warmups: int = 2, runs: int = 5, tile: int | None = None,
    batch: int = 1, snapshot: str | os.PathLike[str] | None = None, profile: str | os.PathLike[str] | None = None,
) -> Table:  # fmt: skip
    """Measures a VAE's memory and time in PyTorch, the way the seed table was measured.

    Parameters
    ----------
    model : str or torch.nn.Module
        A name that `vaemem.predict` takes, or a config.json: diffusers' module with random weights, on which neither
        memory nor time depends. Or a module of `runtime`; it is put in eval mode, converted and moved to
        `device`, and stays so.
    op : str
        ``"encode"`` (sampled and scaled, as pipelines do), ``"decode"``, ``"encode_tiled"`` or ``"decode_tiled"``.
    sizes : int or sequence of int and (int, int)
        Of the image in pixels, multiples of 8: an int is a square, a pair is (height, width).
    dtypes : str or sequence of str
        Of weights and run: ``"float16"``, ``"bfloat16"``, ``"float32"``.
    runtime : str
        Whose code the module is: ``"diffusers"``, or ``"bfl"`` (AutoEncoder of the flux repository; only as a module).
    device : torch.device or str, optional
        The GPU where PyTorch has one, else the CPU.
    warmups, runs : int
        Runs that are not measured, and those whose mean is taken.
    tile : int, optional
        Side of a tile in pixels for the tiled ops, 512 by default; tiles overlap by a quarter.
    batch : int
        Images in one run.
    snapshot : path, optional
        Gets the allocator's history from before the model is loaded, as `vaemem.replay` and pytorch.org/memory_viz
        read it. Recording slows the runs down. CUDA only.
    profile : path, optional
        Gets a CSV of the workspace that cuDNN takes for each convolution of these runs, in bytes as requested from the
        allocator. CUDA only.

    Returns
    -------
    Table
        A row a dtype and size, source "measured". On CUDA `allocated_bytes` and `reserved_bytes` are the peaks minus
        what was there just before the run. On the CPU `reserved_bytes` is the growth of the resident size, and
        `allocated_bytes` is not known.

    Raises
    ------
    ValueError, TypeError
        An argument that cannot be run, named, before anything is measured.
    ImportError
        No PyTorch, or no diffusers where `model` is a name.
    OSError
        A CPU run where the peak resident size cannot be reset.
    torch.OutOfMemoryError
        A run does not fit.

    Notes
    -----
    Before each run garbage is collected, the cache emptied and the peaks reset. `reserved_bytes` depends on what the
    process did before; what `vaemem.predict` means by default is one size and dtype in a fresh process.

    Examples
    --------
    >>> from diffusers import AutoencoderKL
    >>> (row,) = measure(AutoencoderKL(), "decode", 64, "float32", device="cpu", warmups=0, runs=1)
    >>> row["source"], row["runtime"], row["reserved_bytes"] > 0
    ('measured', 'diffusers', True)
    """
    return _measure.measure(
        torch, model, op, sizes, dtypes, runtime=runtime, device=device, warmups=warmups, runs=runs, tile=tile,
        batch=batch, snapshot=snapshot, profile=profile,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """The drop-in, which alone wants diffusers, when it is asked for."""
    if name == "AutoencoderKL":
        from vaemem.pytorch.autoencoder import AutoencoderKL

        return AutoencoderKL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
