"""Nodes of vaemem for ComfyUI. This file checks ComfyUI's version; nodes.py has the nodes."""

import importlib.util
import re

_OLDEST = 0, 3, 64
_API = "comfy_api.v0_0_2"


def _check() -> None:
    """Raise ImportError in a ComfyUI that the nodes do not know; ComfyUI's log then shows the sentence."""
    try:
        from comfyui_version import __version__ as version
    except ImportError:
        version = "unknown"
    known = f"vaemem's nodes know ComfyUI {'.'.join(map(str, _OLDEST))} and later releases that have {_API}"
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if numbers < _OLDEST:
        raise ImportError(f"{known}; this is ComfyUI {version}: update it")
    if importlib.util.find_spec(_API) is None:
        raise ImportError(f"{known}; ComfyUI {version} does not have it: update the nodes (python -m vaemem comfyui)")


_check()

from .nodes import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
