"""The core's threads under ThreadSanitizer: tests/threads/threads.c, with the plain C kernels."""

import os
import subprocess
from pathlib import Path

import pytest
import tools

ROOT = Path(__file__).parent.parent
SOURCES = [
    "csrc/*.c",
    "csrc/engine/*.c",
    "csrc/predict/*.c",
    "csrc/predict/*/*.c",
    "kernels/*.c",
    "kernels/ref/*.c",
    "tests/threads/threads.c",
]
FLAGS = ["-std=gnu11", "-g", "-O1", "-fsanitize=thread"]


@pytest.mark.thorough
@pytest.mark.skipif("VAEMEM_SANITIZED" in os.environ, reason="another sanitizer is at work")
def test_no_races(tmp_path):
    if not tools.runs(tools.c_compiler(), *FLAGS):
        pytest.skip("there is no C compiler whose ThreadSanitizer works")
    program = tmp_path / "threads"
    sources = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    subprocess.run([tools.c_compiler(), *FLAGS, "-o", program, *sources, "-lm", "-lpthread"], check=True, timeout=300)
    options = os.environ | {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, env=options)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]
