"""Find cuDNN for the engine that runs it on a GPU."""

import contextlib
import importlib.util
import os

from vaemem._errors import NoFileError


def find_cudnn() -> str | None:
    """Return the path of an installed libcudnn.so.9, or None to leave it to the loader.

    ``VAEMEM_CUDNN`` (the file, or its folder) comes first; FileNotFoundError if it does not exist. Otherwise the
    library is the file in the ``nvidia-cudnn-cu12`` or ``-cu13`` wheel.
    """
    named = os.environ.get("VAEMEM_CUDNN")
    if named:
        path = os.path.join(named, "libcudnn.so.9") if os.path.isdir(named) else named
        if not os.path.isfile(path):
            raise NoFileError("VAEMEM_CUDNN", "libcudnn.so.9 or its folder", repr(named))
        return path
    with contextlib.suppress(ModuleNotFoundError):  # no nvidia package at all
        spec = importlib.util.find_spec("nvidia.cudnn")
        for folder in (spec.submodule_search_locations if spec else None) or []:
            path = os.path.join(folder, "lib", "libcudnn.so.9")
            if os.path.isfile(path):
                return path
    return None
