"""Every instruction set beside float64, by tests/isa/isa.c: those of this machine natively, AArch64's under qemu.

The program has no Python in it, so it can be built for any machine that there is a compiler and an emulator for, each
folder of kernels with the flags that setup.py gives it.
"""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import tools
from errors import is_about

from vaemem import _core

ROOT = Path(__file__).parent.parent
ARM = "aarch64"
CORE = ["csrc/*.c", "csrc/engine/*.c", "csrc/predict/*.c", "csrc/predict/*/*.c", "kernels/*.c"]


@pytest.fixture(scope="module")
def setup() -> dict:
    """What setup.py defines; nothing is built by it."""
    pytest.importorskip("setuptools")
    if not (ROOT / "setup.py").exists() or not (ROOT / "kernels").exists():
        pytest.skip("the sources are not here")
    with mock.patch("setuptools.setup"), mock.patch.dict(os.environ, {"VAEMEM_CUDA": "0", "VAEMEM_WERROR": "1"}):
        return runpy.run_path(str(ROOT / "setup.py"))


def build(
    program: Path, compiler: list[str], setup: dict, machine: str, *patterns: str, link: tuple[str, ...] = ()
) -> Path:
    """A program of the sources, of plain C's operations and of all sets that a machine has."""
    sets, have = setup["MACHINES"].get(machine, ([], None))
    patterns += tuple(f"kernels/{name}/*.c" for name in ["ref", *sets])
    sources = [path.relative_to(ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern))]

    def compile_one(source: Path) -> Path:
        out = program.parent / ("-".join([program.name, *source.parts]) + ".o")
        flags = setup["COMMON"] if source.parts[0] == "tests" else setup["flags_for"](str(source))
        command = [*compiler, *flags, "-Werror", *([f"-D{have}"] if have else []), "-c", ROOT / source, "-o", out]
        subprocess.run(command, check=True, timeout=300)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([*compiler, *link, *objects, "-o", program, "-lm", "-lpthread"], check=True, timeout=300)
    return program


def ok(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]


@pytest.fixture(scope="module")
def native(setup, tmp_path_factory) -> Path:
    if not tools.runs(tools.c_compiler()):
        pytest.skip(f"there is no C compiler {tools.c_compiler()}")
    folder = tmp_path_factory.mktemp("native")
    return build(folder / "isa", [tools.c_compiler()], setup, platform.machine().lower(), "tests/isa/isa.c")


@pytest.fixture(scope="module")
def isa_on_arm(setup, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    return build(folder / "isa", tools.arm()[0], setup, ARM, "tests/isa/isa.c", link=("-static",))


SETS = [name for name, usable in _core.backends("bfloat16") if usable and name != "amx"]  # AMX has no operations


@pytest.mark.parametrize("name", SETS)
def test_operations(native, name):
    ok(native, name)


@tools.wants_arm
@pytest.mark.parametrize("name", ["neon", "ref"])
def test_operations_on_arm(isa_on_arm, name):
    ok(tools.arm()[1], isa_on_arm, name)


@pytest.mark.thorough
@tools.wants_arm
def test_models_on_arm(setup, tmp_path):
    """Whole runs on several threads, by the best set that the core finds there: tests/threads/threads.c."""
    compiler, emulator = tools.arm()
    program = build(tmp_path / "threads", compiler, setup, ARM, *CORE, "tests/threads/threads.c", link=("-static",))
    ok(emulator, program)


def test_an_unknown_set_is_refused(native):
    done = subprocess.run([native, "mmx"], capture_output=True, text=True)
    assert done.returncode == 2 and is_about(done.stderr, names=["ref", "mmx"])
