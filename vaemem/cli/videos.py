"""Decode latents to a video or a folder of its frames, and encode one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vaemem._common import need, saved
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._saving import check_writable, write
from vaemem.cli.folders import refuse_flags
from vaemem.engine import video_files
from vaemem.engine.images import to_pillow


def is_video_name(path: str) -> bool:
    """Return whether a name is of a video file or of a folder."""
    return _is_folder(path) or Path(path).suffix.lower() in video_files.VIDEO_SUFFIXES


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) or path.endswith(("/", os.sep)) or not Path(path).suffix


def names_of(args: argparse.Namespace, shape: Sequence[int]) -> list[str]:
    """Return the names to write videos to: files, or folders of PNG files. With a number if there are several. Refuse
    now what would be refused after the run. shape: of the latents"""
    if not is_video_name(args.out):
        ends = " ".join(video_files.VIDEO_SUFFIXES)
        raise ArgumentError("out", f"for a video a name that ends in one of {ends}, or a folder", repr(args.out))
    stem, suffix = (os.path.normpath(args.out), "") if _is_folder(args.out) else os.path.splitext(args.out)
    names = [f"{stem}{f'-{i}' * (shape[0] > 1)}{suffix}" for i in range(shape[0])]
    if suffix:
        need("av", "writing a video")
        if args.size and (args.size[0] % 2 or args.size[1] % 2):
            raise ArgumentError("size", "even sides for a video file", "{}x{}".format(*args.size))
    else:
        need("PIL.Image", "decode")
        refuse_flags(args, "fps", "is for video files")
    for name in names:
        if suffix:
            check_writable(name)
            continue
        os.makedirs(name, exist_ok=True)
        if video_files.pictures_in(name):
            raise ArgumentError(
                "out", "a folder without pictures", repr(name), "its pictures would be mixed with the video's"
            )
    return names


def write_frames(name: str, frames: np.ndarray, fps: float) -> None:
    """Write a video, uint8 (F, H, W, 3), to a file or into a folder."""
    if not _is_folder(name):
        video_files.write_video(name, frames, fps)
        return
    for i, frame in enumerate(frames):
        write(os.path.join(name, f"{i:05}.png"), saved(to_pillow(frame[None])[0].save, format="png"))


def usual_fps(arch: Mapping[str, Any]) -> float:
    """Return the frames in a second that a model's pipeline makes by default, in diffusers."""
    return 24.0 if arch.get("family") == "ltx" else 16.0


def refuse_videos(args: argparse.Namespace) -> None:
    """Refuse video files, where latents do not go to one file."""
    for path in args.images:
        if Path(path).suffix.lower() in video_files.VIDEO_SUFFIXES and not os.path.isdir(path):
            raise ArgumentError("out", "for a video a name that ends in .npy", repr(args.out))


def read_frames(args: argparse.Namespace) -> Any:
    """Return the frames of the one video among the arguments, and notes; None if it is of images."""
    if not any(map(video_files.is_video, args.images)):
        return None
    if len(args.images) > 1:
        raise ArgumentError("images", "one video at a time", f"{len(args.images)} sources")
    return video_files.read_video(args.images[0])


def asked_for(asked: dict[str, Any], frames: int) -> dict[str, Any]:
    """Return arguments of `vaemem.VAE.load` for an image, or for a video of more frames than one."""
    return asked | ({"videos": True} if frames > 1 else {})
