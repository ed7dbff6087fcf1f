"""The wheels of .ci/wheels.py: built, looked into, and used in empty environments as far as they run here."""

import fcntl
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vaemem
from vaemem._render import in_gb

pytestmark = pytest.mark.packages
ROOT = Path(__file__).resolve().parents[1]
wheels = runpy.run_path(str(ROOT / ".ci" / "wheels.py"))
OUTSIDE = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VAEMEM"))}

QUESTION = ("-m", "vaemem", "fits", "sdxl", "1024", "--gpu", "RTX 3070")


def run(*command, **environment):
    """A program's output. It is read through a pipe: Python under wine cannot write to a file."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=OUTSIDE | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode in (0, 1), f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr * done.returncode


def use(*python, **environment):
    """Use the package by another Python, which answers as this one. Return what .ci/use_wheel.py prints."""
    answer = vaemem.predict_pipeline("sdxl", 1024, 1024, gpu="RTX 3070")
    printed = " ".join(run(*python, *QUESTION, **environment).split())
    assert not answer.fits and printed.startswith(f"Does not fit: it needs at least {in_gb(answer.judged.least)}")
    return run(*python, "-c", (ROOT / ".ci" / "use_wheel.py").read_text(), **environment)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a platform's wheel, once for all processes of the test run."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def build(name):
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return next((folder / name).glob("*.whl"), None) or wheels["build_wheel"](name, folder / name)

    return build


@pytest.mark.parametrize("name", wheels["PLATFORMS"])
def test_a_wheel_keeps_to_the_stable_abi(wheel, name):
    path = wheel(name)
    assert f"-cp311-abi3-{wheels['PLATFORMS'][name].tag}" in path.name
    packed = zipfile.ZipFile(path).namelist()
    assert [file for file in packed if file.endswith((".so", ".pyd", ".dll", ".dylib"))] == [
        "vaemem/_core.pyd" if "windows" in name else "vaemem/_core.abi3.so"
    ]
    assert not [file for file in packed if file.endswith((".c", ".h", ".pyc"))]
    run(sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", path)


def other_pythons():
    """{minor version: a CPython of 3.11 or later}."""
    found = {}
    for minor in (11, 12, 13):
        names = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        for python in (str(name) for name in names if name):
            if not subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode:
                found[minor] = python
    return found


@pytest.mark.parametrize(("minor", "numpy"), [(11, "1.26.4"), (12, "1.26.4"), (13, "2.*")])
def test_linux(wheel, tmp_path, minor, numpy):
    if minor not in other_pythons():
        pytest.skip(f"needs CPython 3.{minor}")
    path = wheel("linux-x86_64")
    assert 'platform tag: "manylinux_2_17_x86_64"' in run(sys.executable, "-m", "auditwheel", "show", path)
    run(other_pythons()[minor], "-m", "venv", "--without-pip", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "-q", "install", path, f"numpy=={numpy}")
    says = use(python)
    assert says.startswith(f"x86_64 linux {numpy.rstrip('*')}") and "cuda the GPU backend is not installed" in says


def test_aarch64(wheel, tmp_path):
    if not shutil.which("qemu-aarch64") or not shutil.which("apt-get"):
        pytest.skip("needs qemu-user and Debian's packages")
    says = use(*wheels["aarch64_environment"](tmp_path / "site", wheel("linux-aarch64")))
    assert says.startswith("aarch64 linux 2.") and "neon" in says


def test_windows(wheel, tmp_path):
    if not shutil.which("wine"):
        pytest.skip("needs wine")
    wheels["windows_environment"](tmp_path / "python", wheel("windows-x86_64"))
    wine = {"WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    run("wine", "reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f", **wine)
    says = use("wine", tmp_path / "python" / "python.exe", **wine)
    assert says.startswith("AMD64 win32 2.0.2") and "it exists only for Linux" in says


@pytest.mark.parametrize(("name", "machine"), [("macos-arm64", 0x0100000C), ("macos-x86_64", 0x01000007)])
def test_macos_library(wheel, tmp_path, name, machine):
    """No Mac is here: this reads the library's load commands."""
    macho = pytest.importorskip("macholib.MachO")
    from macholib import mach_o
    from macholib.SymbolTable import SymbolTable

    path = zipfile.ZipFile(wheel(name)).extract("vaemem/_core.abi3.so", tmp_path)
    [header] = macho.MachO(path).headers
    assert header.header.cputype == machine
    commands = {load.cmd: command for load, command, _ in header.commands}
    assert mach_o.LC_CODE_SIGNATURE in commands or name == "macos-x86_64"  # macOS refuses unsigned code on arm64
    assert commands[mach_o.LC_BUILD_VERSION].minos == 11 << 16
    libraries = [data.rstrip(b"\0") for load, _, data in header.commands if load.cmd == mach_o.LC_LOAD_DYLIB]
    assert libraries == [b"/usr/lib/libSystem.B.dylib"]
    table = SymbolTable(macho.MachO(path))
    assert b"_PyInit__core" in {symbol for _, symbol in table.extdefsyms}
    python = {symbol for _, symbol in table.undefsyms if symbol.startswith((b"_Py", b"__Py"))}
    assert b"_PyModuleDef_Init" in python


def test_the_gpu_backend_is_a_wheel_of_its_own(wheel, tmp_path):
    """The kernels are for one kind of GPU. They are not compiled again if make test compiled them."""
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        pytest.skip("needs nvcc")
    fatbins = {"VAEMEM_FATBINS": str(ROOT / "build" / "fatbins")} if (ROOT / "build" / "fatbins").exists() else {}
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (fatbins | {"VAEMEM_CUDA_ARCHS": os.environ.get("VAEMEM_CUDA_ARCHS") or "90"}).items():
            patch.setenv(variable, value)
        cuda = wheels["build_cuda_wheel"](tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "-q", "install", wheel("linux-x86_64"), cuda)
    assert "cuda CUDA: expected an NVIDIA driver" in use(python, VAEMEM_LIBCUDA="/nowhere/libcuda.so.1")
    package = next((tmp_path / "fresh").glob("lib/python*/site-packages/vaemem_cuda/__init__.py"))
    package.write_text('__version__ = "0"\n')  # as a wheel of another version says
    assert "cuda the GPU backend is not installed: install the wheel of vaemem-cuda" in use(python)
