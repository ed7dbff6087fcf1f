"""The source distribution, installed into a fresh environment and used there (minutes: make check ONLY=packages)."""

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
from fnmatch import fnmatch
from pathlib import Path

import gpu
import pytest
from emulator import build
from engine import config

pytestmark = pytest.mark.packages
ROOT = Path(__file__).resolve().parents[1]
BUILT = ("*.so", "*.so.1", "*.o", "*.pyc")
UNTRACKED = (".git", ".venv", ".*_cache", "__pycache__", "build", "dist", "out", "*.egg-info", *BUILT)
HAVE_NVCC = bool(shutil.which("nvcc") and build.cuda_include())


def run(*command, cwd, **environment):
    hidden = {"PYTHONPATH", "PYTHONSAFEPATH", "MAKEFLAGS", "MAKELEVEL", "VAEMEM_WERROR", "VAEMEM_KERNELS"}
    outside = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=outside | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The sources without what was built in them."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "vaemem", ignore=shutil.ignore_patterns(*UNTRACKED))


def make_sdist(tree, folder, **environment):
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, folder, cwd=tree, **environment)
    return next(folder.glob("vaemem-*.tar.gz"))


def names(sdist):
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    """Made where there is no CUDA."""
    return make_sdist(tree, tmp_path_factory.mktemp("sdist"), VAEMEM_CUDA="0")


def use(what, folder, **environment):
    """Installs an archive into a fresh environment, decodes outside the tree; returns what backends() says."""
    run(sys.executable, "-m", "venv", "fresh", cwd=folder)
    python = folder / "fresh" / "bin" / "python"
    install = (python, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    run(*install, what, cwd=folder, **environment)
    code = f"""
        import sys
        import numpy as np, vaemem
        assert vaemem.__file__.startswith(sys.prefix) and vaemem._core.__file__.startswith(sys.prefix)
        vae = vaemem.VAE.random(seed=0, config={config("sd")!r})
        image = vae.decode(np.ones((1, 4, 8, 8), np.float32))
        assert np.isfinite(image).all() and vae.last_run.peak_bytes > 0
        vaemem.predict("sdxl", "decode", 512, 512, dtype="float16", gpu="RTX 4090")
        assert len(vaemem.seed_table()) == 98
        print(image.shape, vaemem.backends())
    """
    said = run(python, "-c", textwrap.dedent(code), cwd=folder)
    assert said.startswith("(1, 3, 32, 32)")
    return said


def test_the_source_distribution_is_the_tree(tree, sdist, tmp_path):
    rooms = ("benchmarks", "csrc", "docs", "kernels", "tests", "vaemem")
    found = (path for room in rooms for path in (tree / room).rglob("*"))
    files = {str(path.relative_to(tree)) for path in found if path.is_file() and path.suffix != ".pyc"}
    assert files <= names(sdist)
    assert not [name for name in names(sdist) for pattern in BUILT if fnmatch(name, pattern)]
    assert {"Makefile", "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names(sdist)
    if HAVE_NVCC:
        assert names(make_sdist(tree, tmp_path, VAEMEM_CUDA="1")) == names(sdist)


def test_the_source_distribution_installs(sdist, tmp_path):
    """With CUDA if there is nvcc, for the oldest GPUs: all seven kinds take minutes, and make test has built one for
    newer ones."""
    said = use(sdist, tmp_path, VAEMEM_CUDA=str(int(HAVE_NVCC)), VAEMEM_CUDA_ARCHS="75")
    assert ("the GPU backend is not installed" in said) != HAVE_NVCC
    if HAVE_NVCC:
        library = next(tmp_path.glob("fresh/lib/python*/site-packages/vaemem/_cuda*.so"))
        assert all((2, 75) in archs for archs in gpu.machine_code(library.read_bytes()))
