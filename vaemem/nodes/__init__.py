"""Nodes for ComfyUI and InvokeAI. The folders ``comfyui`` and ``invokeai`` are for these programs, which import them
after `install_comfyui` or `install_invokeai` has copied them; vaemem never imports them.

The nodes pass the programs' objects to `vaemem.pytorch.comfyui_vae` and `vaemem.pytorch.invokeai_vae`, which do the
work.
"""

from __future__ import annotations

import os
from pathlib import Path

from vaemem._errors import FileError, NoFileError
from vaemem._saving import write
from vaemem.engine.arguments import as_path

_HERE = Path(__file__).parent
_README, _TITLE = "README.md", "# vaemem's nodes for "  # a file of the copied folder, and how it begins


def install_comfyui(path: str | os.PathLike[str]) -> Path:
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
    ValueError
        The path is not ComfyUI's folder, or something else lies in ``custom_nodes/vaemem``. Nothing was changed.
    OSError
        A file cannot be written. The next call replaces the part that was.
    """
    marks = ("main.py", "nodes.py", "comfy/sd.py")
    return _install(path, "ComfyUI's folder", marks, "comfyui", "custom_nodes/vaemem")


def install_invokeai(path: str | os.PathLike[str]) -> Path:
    """Copy the nodes into the folder of an InvokeAI. An earlier copy is replaced.

    Parameters
    ----------
    path : path
        InvokeAI's root folder, which has ``invokeai.yaml`` after InvokeAI's first start.

    Returns
    -------
    Path
        The new folder, ``nodes/vaemem_nodes``. InvokeAI imports it by its name, so it cannot be ``vaemem``.

    Raises
    ------
    ValueError
        The path is not InvokeAI's root, or something else lies in ``nodes/vaemem_nodes``. Nothing was changed.
    OSError
        A file cannot be written. The next call replaces the part that was.
    """
    return _install(path, "InvokeAI's root", ("invokeai.yaml",), "invokeai", "nodes/vaemem_nodes")


def _install(path: str | os.PathLike[str], wanted: str, marks: tuple[str, ...], source: str, place: str) -> Path:
    """Copy the folder `source` to `place` in a program's folder, which has the files `marks`."""
    root = as_path(path, "path")
    if not root.is_dir():
        raise NoFileError("path", wanted, "no such folder", path=root)
    if missing := [mark for mark in marks if not (root / mark).is_file()]:
        advice = f"name the folder that {marks[0]} is in"
        raise FileError("path", wanted, f"one without {missing[0]}", advice, path=root)
    target = root / place
    if (target.exists() or target.is_symlink()) and not _is_ours(target):
        raise FileError("path", "no other vaemem among the nodes", "one", "move it away", path=target)
    # First the file that marks a copy as ours, so that the next call replaces a part of one.
    for file in sorted((_HERE / source).rglob("*"), key=lambda file: file.name != _README):
        if file.is_file() and file.parent.name != "__pycache__":
            copy = target / file.relative_to(_HERE / source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            write(copy, file.read_bytes())
    return target


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is an earlier copy."""
    readme = folder / _README
    return not folder.is_symlink() and readme.is_file() and readme.read_text("utf-8", "replace").startswith(_TITLE)
