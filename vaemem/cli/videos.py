"""Decode latents to a video or a folder of its frames, and encode one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from vaemem._common import saved
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._saving import write
from vaemem.engine import video_files
from vaemem.engine.images import to_pillow


def check_video_name(path: str) -> None:
    """Refuse a name that is of no video and of no folder."""
    if os.path.isdir(path) or Path(path).suffix.lower() in ("", *video_files.VIDEO_SUFFIXES):
        return
    ends = " ".join(video_files.VIDEO_SUFFIXES)
    raise ArgumentError("out", f"for a video a name that ends in one of {ends}, or a folder", repr(path))


def write_frames(args: argparse.Namespace, frames: np.ndarray, number: str) -> str:
    """Write a video, uint8 (F, H, W, 3), to a file or a folder of PNG files, with a number if there are several; return
    its name."""
    stem, suffix = os.path.splitext(args.out)
    name = f"{stem}{number}{suffix}"
    if not suffix:
        os.makedirs(name, exist_ok=True)
        for i, frame in enumerate(frames):
            write(os.path.join(name, f"{i:05}.png"), saved(to_pillow(frame[None])[0].save, format="png"))
        return name
    video_files.write_video(name, frames, args.fps)
    return name


def read_frames(args: argparse.Namespace) -> Any:
    """Return the frames of the one video among the arguments, and notes; None if it is of images."""
    if not any(map(video_files.is_video, args.images)):
        return None
    if len(args.images) > 1:
        raise ArgumentError("images", "one video at a time", f"{len(args.images)} sources")
    return video_files.read_video(args.images[0])


def asked_for(asked: dict[str, Any], frames: int) -> dict[str, Any]:
    """Return arguments of `vaemem.VAE.load` for so many frames."""
    return asked | ({"videos": True} if frames > 1 else {})
