"""Read videos from files and from folders of pictures, and write them there. PyAV reads and writes the files."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from vaemem._common import need, reading
from vaemem._errors import ArgumentError, FileError
from vaemem._numpy import np
from vaemem._saving import replacing
from vaemem.engine.images import Notes, read_images

VIDEO_SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi")
_CODECS = {".webm": ("libvpx-vp9", {"crf": "20", "b": "0"})}
_USUAL_CODEC = "libx264", {"crf": "14"}  # hardly any loss
PICTURES = (".png", ".jpg", ".jpeg", ".webp")  # in a folder


def is_video(path: Any) -> bool:
    """Return whether a path is of a video file, by its name, or of a folder."""
    text = isinstance(path, (str, os.PathLike))
    return text and (Path(path).suffix.lower() in VIDEO_SUFFIXES or os.path.isdir(path))


def pictures_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return a folder's pictures, in the order of their names."""
    return sorted(file for file in Path(folder).iterdir() if file.suffix.lower() in PICTURES)


def read_video(path: str | os.PathLike[str]) -> tuple[np.ndarray, Notes]:
    """Return the frames of a video as uint8 (1, F, H, W, 3), and notes of what was lost.

    path: a video file, or a folder of pictures in one size, which are taken in the order of their names. ValueError for
    a file that is no video, and a folder without pictures; OSError if it cannot be read.
    """
    if os.path.isdir(path):
        if not (files := pictures_in(path)):
            raise FileError("images", f"pictures ({', '.join(PICTURES)}) in the folder", "none", path=path)
        frames, notes = read_images(files)
        return frames[None], notes
    av = need("av", "reading a video")
    with reading("images", "a video file", path), av.open(os.fspath(path)) as file:
        if not file.streams.video:
            raise FileError("images", "a video", "a file without pictures", path=path)
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    if not frames:
        raise FileError("images", "a video", "one without frames", path=path)
    return np.stack(frames)[None], ()


def write_video(path: str | os.PathLike[str], frames: np.ndarray, fps: float = 16) -> None:
    """Write frames, uint8 (F, H, W, 3) with even sides, to a video file, which replaces an earlier one once whole."""
    av, target = need("av", "writing a video"), Path(path)
    codec, options = _CODECS.get(target.suffix.lower(), _USUAL_CODEC)
    with replacing(target) as file, av.open(file, "w", format=_format(target.suffix)) as made:
        stream = made.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.pix_fmt, (_, stream.height, stream.width, _) = "yuv420p", frames.shape
        for frame in frames:
            made.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        made.mux(stream.encode())


def _format(suffix: str) -> str:
    """Return the name of PyAV's container."""
    names = {".mkv": "matroska", ".mov": "mov", ".webm": "webm", ".avi": "avi", ".mp4": "mp4"}
    if suffix.lower() not in names:
        raise ArgumentError("out", f"a name that ends in one of {', '.join(VIDEO_SUFFIXES)}, or a folder", repr(suffix))
    return names[suffix.lower()]
