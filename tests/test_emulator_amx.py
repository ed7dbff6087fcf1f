"""The whole core with AMX emulated (VAEMEM_EMULATE_AMX): passes and runs in every kind of numbers that AMX computes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulator.build import HERE, has

pytestmark = pytest.mark.thorough
ROOT = HERE.parents[1]
USABLE = """
from vaemem import _core
kinds = [("bfloat16", "highest"), ("float16", "highest"), ("float32", "high"), ("float32", "medium")]
print([_core.backends(*kind)[0] for kind in kinds], "amx" in dict(_core.backends()))
_core.disable("amx,avx512")
print([_core.backends(*kind)[0] for kind in kinds])
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that imports this package with such a core."""
    pytest.importorskip("setuptools")
    if not has("avx2"):
        pytest.skip("the emulator needs AVX2")
    folder = tmp_path_factory.mktemp("emulated")
    environment = os.environ | {"VAEMEM_EMULATE_AMX": str(HERE), "VAEMEM_KERNELS": "1"}
    environment |= {"VAEMEM_CUDA": "0", "VAEMEM_DISABLE": ""}
    build = ["build_ext", "--build-lib", folder, "--build-temp", folder / "objects"]
    subprocess.run([sys.executable, "setup.py", "-q", *build], cwd=ROOT, env=environment, check=True)
    not_built = shutil.ignore_patterns("*.so*", "__pycache__")
    shutil.copytree(ROOT / "vaemem", folder / "vaemem", ignore=not_built, dirs_exist_ok=True)
    return environment | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def test_where_it_is_used_and_what_it_computes(emulated):
    """In one test, so that one of pytest's processes builds the core."""
    done = subprocess.run([sys.executable, "-c", USABLE], env=emulated, check=True, capture_output=True, text=True)
    assert done.stdout == f"{[('amx', True)] * 4} False\n{[('amx', False)] * 4}\n"
    tests = [*(Path(__file__).parent / f"test_{name}.py" for name in ("kernels", "numbers")), "-k", "amx"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=emulated, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
