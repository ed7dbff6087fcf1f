"""Nodes for ComfyUI. `install` copies the folder ``node_package``, which ComfyUI loads; vaemem never imports it.

The nodes pass ComfyUI's objects to `vaemem.pytorch.comfyui_vae`, which does the work.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vaemem._errors import FileError, NoFileError
from vaemem.engine.arguments import as_path

_SOURCE = Path(__file__).parent / "node_package"
_MARKS = ("main.py", "nodes.py", "comfy/sd.py")  # of ComfyUI's folder
_FOLDER = "custom_nodes/vaemem"
_PROJECT, _NAME = "pyproject.toml", 'name = "vaemem-nodes"'  # a file of the copied folder, and one of its lines


def install(path: str | os.PathLike[str]) -> Path:
    """Copy the nodes into a ComfyUI. An earlier copy is replaced.

    Parameters
    ----------
    path : path
        ComfyUI's folder.

    Returns
    -------
    Path
        The new folder, ``custom_nodes/vaemem``.

    Raises
    ------
    ValueError, OSError
        The path is not ComfyUI's folder, or something else lies in ``custom_nodes/vaemem``. Nothing was changed.
    """
    root = as_path(path, "path")
    if not root.is_dir():
        raise NoFileError("path", "ComfyUI's folder", "no such folder", path=root)
    if missing := [mark for mark in _MARKS if not (root / mark).is_file()]:
        advice = "name the folder that main.py is in"
        raise FileError("path", "ComfyUI's folder", f"one without {missing[0]}", advice, path=root)
    target = root / _FOLDER
    if (target.exists() or target.is_symlink()) and not _is_ours(target):
        raise FileError("path", "no other vaemem among the nodes", "one", "move it away", path=target)
    shutil.copytree(_SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return target


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is an earlier copy."""
    project = folder / _PROJECT
    return not folder.is_symlink() and project.is_file() and _NAME in project.read_text("utf-8", "replace")
