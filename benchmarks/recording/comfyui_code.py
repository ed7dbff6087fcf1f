"""Import ComfyUI's code from the folder that the environment variable COMFYUI names, as on an NVIDIA card.

Nothing of it runs on a GPU. Packages that ComfyUI imports and nothing here calls may be missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

UNUSED = "torchvision", "torchaudio", "torchsde", "kornia", "av", "spandrel", "aiohttp"


class StubClass(type):
    """Classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubClass(name, (), {})


class Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubClass(name, (), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the missing ones of `UNUSED`, after all other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_comfyui() -> Any:
    """Return ComfyUI's module model_management."""
    sys.path.insert(0, os.environ["COMFYUI"])
    import transformers

    for name in ("CLIPTokenizer", "T5TokenizerFast"):  # first: transformers looks for torchvision, too
        getattr(transformers, name)
    sys.meta_path.append(Stubs())
    from comfy.cli_args import args

    args.cpu = args.use_pytorch_cross_attention = True
    import comfy.model_management as manager

    manager.cpu_state = manager.CPUState.GPU
    manager.is_nvidia = lambda: True
    for kind in ("fp8", "nvfp4", "mxfp8"):
        setattr(manager, f"supports_{kind}_compute", lambda *_: False)
    manager.should_use_bf16 = lambda *_, **__: True
    manager.MIN_WEIGHT_MEMORY_RATIO = 0.0  # an NVIDIA card's
    manager.soft_empty_cache = lambda *_: None
    return manager


def version() -> str:
    """ComfyUI's version."""
    spec = importlib.util.spec_from_file_location("comfyui_version", f"{os.environ['COMFYUI']}/comfyui_version.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return f"ComfyUI {module.__version__}"
