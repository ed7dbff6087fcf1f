"""What setup.py builds, and how."""

import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from errors import refused

from vaemem import _core

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def extensions(monkeypatch):
    """The names of the extensions that setup.py builds, with these environment variables."""

    def names(**environment):
        monkeypatch.chdir(ROOT)
        for name in ("VAEMEM_CUDA", "CUDA_HOME", "CUDA_PATH", "VAEMEM_TARGET"):
            monkeypatch.delenv(name, raising=False)
        with mock.patch("setuptools.setup") as setup, mock.patch.dict(os.environ, environment):
            runpy.run_path("setup.py")
        return {one.name for one in setup.call_args.kwargs["ext_modules"]}

    return names


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux alone")
def test_cuda_is_built_if_it_is_asked_for(extensions, tmp_path, capsys):
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.touch()
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    for environment in ({}, {"VAEMEM_CUDA": ""}, {"VAEMEM_CUDA": "0"}):
        assert "vaemem._cuda" not in extensions(CUDA_HOME=str(tmp_path), **environment)
        assert "building without CUDA (VAEMEM_CUDA=1 builds its GPU kernels" in capsys.readouterr().out
    for wish in ("1", "auto"):
        assert "vaemem._cuda" in extensions(CUDA_HOME=str(tmp_path), VAEMEM_CUDA=wish)
    nvcc.unlink()
    assert "vaemem._cuda" not in extensions(CUDA_HOME=str(tmp_path), VAEMEM_CUDA="auto")
    assert "building without CUDA: no nvcc" in capsys.readouterr().out
    with refused("vaemem", names=["VAEMEM_CUDA=1", "nvcc"], kind=SystemExit):
        extensions(CUDA_HOME=str(tmp_path), VAEMEM_CUDA="1")
    with refused("vaemem: VAEMEM_CUDA", names=["'yes'"], kind=SystemExit):
        extensions(VAEMEM_CUDA="yes")


@pytest.mark.skipif(sys.platform != "linux", reason="of ELF files")
def test_extensions_are_bound_when_they_are_loaded():
    """Nobody can write to their table of other libraries' functions afterwards."""
    told = subprocess.run(["readelf", "-dlW", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert "GNU_RELRO" in told and "NOW" in told.partition("Dynamic section")[2]
