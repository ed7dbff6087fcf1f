"""The fuzz targets on their corpus and on every input that once failed. `tests/fuzz/run.py` looks for new ones."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

import run
import targets
import tools


@pytest.mark.parametrize("target", run.IN_PYTHON)
def test_python_targets(target):
    files = run.corpus(target)
    assert files
    for file in files:
        targets.TARGETS[target](file.read_bytes())


def test_programs_in_c_compile():
    """Every C program of tests and benchmarks, with the headers as they are. Most run in thorough tests only."""
    if not tools.runs(tools.c_compiler()):
        pytest.skip(f"there is no C compiler {tools.c_compiler()}")
    programs = sorted(path for folder in ("tests", "benchmarks") for path in (run.ROOT / folder).rglob("*.c"))
    assert {run.HERE / f"{target}.c" for target in run.IN_C} < set(programs)
    subprocess.run([tools.c_compiler(), "-std=gnu11", "-fsyntax-only", *programs], check=True)


@pytest.mark.thorough
def test_targets_in_c(tmp_path):
    if not tools.runs("cc", f"-fsanitize={run.SANITIZE}"):
        pytest.skip("there is no C compiler whose AddressSanitizer works")
    for target, program in run.build(tmp_path, guided=False).items():
        files = run.corpus(target)
        done = subprocess.run([program, *files], env=run.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{len(files)} executions\n"
