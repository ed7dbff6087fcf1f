"""Which families of diffusers have an autoencoder that runs here, told from a tree of made-up pipelines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core, pytest.mark.python]

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "recording" / "families.py"
CALLED = "    def __call__(self, {taken}):\n        return Output(images=[])\n"
SILENT = "    def __call__(self, prompt):\n        pass\n"
BUILT = "    def __init__(self, vae: {kind}):\n        pass\n"
TREE = {
    "flat": f"class FlatPipeline:\n{BUILT.format(kind='AutoencoderKL')}{CALLED.format(taken='prompt: str')}",
    "either": f"class EitherPipeline:\n{BUILT.format(kind='AutoencoderDC | AutoencoderKLWan')}"
    + CALLED.format(taken="prompt: str, image: Image | None = None"),
    "heir": f"class Base:\n{BUILT.format(kind='AutoencoderKLFlux2')}\nclass HeirPipeline(Base):\n"
    + CALLED.format(taken="prompt"),
    "pixels": f"class PixelPipeline:\n{BUILT.format(kind='UNet')}{CALLED.format(taken='prompt')}",
    "other": f"class OtherPipeline:\n{BUILT.format(kind='VQModel')}{CALLED.format(taken='prompt')}",
    "said": f"class SaidPipeline:\n{BUILT.format(kind='AutoencoderKL')}{SILENT}",
    # None of these makes images of text alone.
    "edits": f"class EditPipeline:\n{BUILT.format(kind='AutoencoderKL')}{CALLED.format(taken='prompt, image: Image')}",
    "unasked": f"class UnaskedPipeline:\n{BUILT.format(kind='AutoencoderKL')}{CALLED.format(taken='steps: int')}",
    "films": f"class FilmPipeline:\n{BUILT.format(kind='AutoencoderKL')}{SILENT}",
    "deprecated": f"class OldPipeline:\n{BUILT.format(kind='AutoencoderKL')}{CALLED.format(taken='prompt')}",
}


def test_families_of_a_tree(tmp_path):
    for name, source in TREE.items():
        folder = tmp_path / "pipelines" / name
        folder.mkdir(parents=True)
        (folder / "pipeline.py").write_text(source)
    listing = 'AUTO_TEXT2IMAGE_PIPELINES_MAPPING = OrderedDict([("said", SaidPipeline)])\n'
    (tmp_path / "pipelines" / "auto_pipeline.py").write_text(listing)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=True)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert lines[2:7] == [
        ["AutoencoderKL", "yes", "2", "flat, said"],
        ["AutoencoderDC, AutoencoderKLWan", "yes", "1", "either"],
        ["AutoencoderKLFlux2", "yes", "1", "heir"],
        ["VQModel", "no", "1", "other"],
        ["none", "no", "1", "pixels"],
    ]
    assert done.stdout.splitlines()[-1] == "4 of 6 run."
