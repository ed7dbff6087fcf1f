"""Find repositories of the Hugging Face Hub that were downloaded to this machine before. Download nothing.

Source: ``constants.py`` and ``file_download.py`` of huggingface_hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def cache_folder() -> Path:
    """Return the folder where huggingface_hub keeps downloads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{above}/huggingface").expanduser() / "hub"


def is_repository(path: Path) -> bool:
    """Return whether a path may be a repository: two names, no weights file's ending, nothing at that path."""
    return bool(_REPOSITORY.fullmatch(path.as_posix())) and not path.exists()


def snapshot(path: Path) -> Path | None:
    """Return the folder of a repository's newest downloaded files; None if there is none."""
    if not is_repository(path):
        return None
    folder = cache_folder() / f"models--{path.as_posix().replace('/', '--')}"
    try:
        found = folder / "snapshots" / (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return found if found.is_dir() and found.parent.name == "snapshots" else None


def how_to_download(path: Path) -> str:
    """Return how to download a repository; empty for a path that cannot be one."""
    if not is_repository(path):
        return ""
    return f"it is not in the Hub's cache {cache_folder()}: download it with 'hf download {path.as_posix()}'"
