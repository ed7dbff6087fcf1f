"""Predictions for any module, measurements, and drop-ins for diffusers. No other folder of vaemem imports PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vaemem._common import need

need("torch", "vaemem.pytorch")

from vaemem.pipelines.own_recordings import RecordedPrediction
from vaemem.prediction.answer import ModulePrediction
from vaemem.pytorch.any_pipeline import predict_pipeline
from vaemem.pytorch.applying import Applied, apply
from vaemem.pytorch.decoding import SafeDecode, safe_decode
from vaemem.pytorch.loading import load_pipeline
from vaemem.pytorch.measuring import measure
from vaemem.pytorch.measuring_pipelines import MeasuredPhase, MeasuredPipeline, measure_pipeline
from vaemem.pytorch.offloading import OffloadStrategy
from vaemem.pytorch.pipeline_files import record_pipeline
from vaemem.pytorch.recorder import Recording
from vaemem.pytorch.recording import predict_peak, record

if TYPE_CHECKING:
    from vaemem.pytorch.autoencoder import AutoencoderKL, AutoencoderKLWan, AutoencoderTiny

__all__ = [
    "Applied",
    "AutoencoderKL",
    "AutoencoderKLWan",
    "AutoencoderTiny",
    "MeasuredPhase",
    "MeasuredPipeline",
    "ModulePrediction",
    "OffloadStrategy",
    "RecordedPrediction",
    "Recording",
    "SafeDecode",
    "apply",
    "load_pipeline",
    "measure",
    "measure_pipeline",
    "predict_peak",
    "predict_pipeline",
    "record",
    "record_pipeline",
    "safe_decode",
]  # fmt: skip


# Not in every diffusers.
_NEWER = ("AutoencoderKLFlux2", "AutoencoderKLLTX2Video", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NEWER})


def __getattr__(name: str) -> Any:
    """Import the drop-ins on first use: only they need diffusers."""
    if name in ("AutoencoderKL", "AutoencoderKLWan", "AutoencoderTiny", *_NEWER):
        from vaemem.pytorch import autoencoder

        return getattr(autoencoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
