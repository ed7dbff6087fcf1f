"""Repositories of the Hugging Face Hub that were downloaded before: where their files lie on this machine.

Nothing is downloaded here. Source: ``constants.py`` and ``file_download.py`` of huggingface_hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it downloads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{above}/huggingface").expanduser() / "hub"


def is_repository(path: Path) -> bool:
    """Whether a path that names nothing here may be a repository: two names, with no weights file's ending."""
    return bool(_REPOSITORY.fullmatch(path.as_posix())) and not path.exists()


def snapshot(path: Path) -> Path | None:
    """The folder of a repository's newest downloaded files; None where it was not downloaded."""
    if not is_repository(path):
        return None
    folder = cache_folder() / f"models--{path.as_posix().replace('/', '--')}"
    try:
        found = folder / "snapshots" / (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return found if found.is_dir() and found.parent.name == "snapshots" else None


def how_to_download(path: Path) -> str:
    """What to do where a repository's files are not here; nothing for a path that is no repository's name."""
    if not is_repository(path):
        return ""
    return f", and not in the Hub's cache {cache_folder()}: download it with 'hf download {path.as_posix()}'"
