"""The scoreboard's formulas beside the programs' own code: COMFYUI and INVOKEAI name folders with their sources.

COMFYUI=path INVOKEAI=path .venv/bin/pytest tests/test_estimator_code.py
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measurements.vocabulary import read_rows

from vaemem._common import ELEMENT_BYTES
from vaemem.tables.estimators import ESTIMATORS

pytestmark = [pytest.mark.core, pytest.mark.python]

BYTES = SimpleNamespace(dtype_size=ELEMENT_BYTES.__getitem__)


def source_of(program: str, path: str) -> ast.Module:
    folder = os.environ.get(program)
    if not folder:
        pytest.skip(f"{program} names no sources")
    return ast.parse((Path(folder) / path).read_text(encoding="utf-8"))


def runs(models):
    """Runs of whole images that are rows of the scoreboard, without duplicates."""
    found = {
        (row.model, row.op, row.height, row.width, row.dtype)
        for row in read_rows()
        if row.op in ("encode", "decode") and row.model in models and row.height and row.dtype and not row.tile
    }
    assert len(found) > 20
    return sorted(found)


def ours(name, model, op, height, width, dtype):
    return ESTIMATORS[name](
        {"model": model, "op": op, "height": height, "width": width, "dtype": dtype, "batch": 1, "tile": None}
    )


def test_comfyui():
    """The lambdas that its class VAE begins with, which AutoencoderKL keeps."""
    tree = source_of("COMFYUI", "comfy/sd.py")
    (vae,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "VAE")
    first: dict[str, ast.expr] = {}
    for node in ast.walk(vae):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            first.setdefault(node.targets[0].attr, node.value)
    known = {"model_management": BYTES, "VAE_KL_MEM_RATIO": 1.0}
    theirs = {
        op: eval(compile(ast.Expression(first[f"memory_used_{op}"]), "comfy/sd.py", "eval"), known)
        for op in ("encode", "decode")
    }
    for model, op, height, width, dtype in runs(("sd15", "sdxl", "flux")):
        scale = 8 if op == "decode" else 1
        assert theirs[op]((1, 4, height / scale, width / scale), dtype) == ours(
            "comfyui", model, op, height, width, dtype
        )


def test_invokeai():
    """Its functions, without their imports, which only name types."""
    tree = source_of("INVOKEAI", "invokeai/backend/util/vae_working_memory.py")
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    names = ModuleType("vae_working_memory")
    names.LATENT_SCALE_FACTOR, names.torch = 8, pytest.importorskip("torch")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
    exec(compile(tree, "vae_working_memory.py", "exec"), vars(names))
    for model, op, height, width, dtype in runs(("sd15", "sdxl", "flux", "qwen-image")):
        scale = 8 if op == "decode" else 1
        tensor = SimpleNamespace(shape=(1, 4, height // scale, width // scale))
        vae = SimpleNamespace(
            parameters=lambda size=ELEMENT_BYTES[dtype]: iter([SimpleNamespace(element_size=lambda: size)])
        )
        function = {"flux": "flux", "qwen-image": "qwen_image"}.get(model, "sd15_sdxl")
        more = {"tile_size": None, "fp32": dtype == "float32"} if function == "sd15_sdxl" else {}
        estimate = getattr(names, f"estimate_vae_working_memory_{function}")(op, tensor, vae, **more)
        assert estimate == int(ours("invokeai", model, op, height, width, dtype))
