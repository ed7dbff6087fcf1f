"""The core's threads under ThreadSanitizer: tests/threads/threads.c, with the plain C kernels."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["csrc/*.c", "csrc/predict/torch_*.c", "kernels/*.c", "kernels/ref/*.c", "tests/threads/threads.c"]
FLAGS = ["-std=gnu11", "-g", "-O1", "-fsanitize=thread"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> str:
    """A C compiler whose ThreadSanitizer works here; some kernels lay out memory as it cannot bear."""
    cc = os.environ.get("CC", "gcc")
    if os.environ.get("VAEMEM_SANITIZED"):
        pytest.skip("another sanitizer is at work")
    probe = tmp_path_factory.mktemp("probe") / "probe"
    try:
        subprocess.run(
            [cc, *FLAGS, "-xc", "-", "-o", probe], input="int main(void) { return 0; }", text=True, check=True
        )
        subprocess.run([probe], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no ThreadSanitizer: {error}")
    return cc


def test_no_races(compiler, tmp_path):
    program = tmp_path / "threads"
    sources = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    subprocess.run([compiler, *FLAGS, "-o", program, *sources, "-lm", "-lpthread"], check=True, timeout=300)
    options = os.environ | {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, env=options)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]
