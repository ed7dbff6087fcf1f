"""Nodes of vaemem for InvokeAI. This file checks InvokeAI's version; invocations.py has the nodes."""

import re

from invokeai.version import __version__ as version

_OLDEST = 6, 14

if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
    known = ".".join(map(str, _OLDEST))
    raise ImportError(f"vaemem's nodes know InvokeAI {known} and later releases; this is InvokeAI {version}: update it")

from .invocations import ImageToLatents, LatentsToImage

__all__ = ["ImageToLatents", "LatentsToImage"]
