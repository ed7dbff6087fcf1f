"""Tools that a machine may lack beside what the README asks for, and marks of the tests that want one.

A compiler is asked by a small program, not by what it says: its words depend on its version and on what is missing.
`-m tool` picks the tests that are marked; where one lacks its tool it is skipped, or fails where VAEMEM_TOOLS=1 says
that all are installed (tests/conftest.py).
"""

import functools
import os
import shutil
import subprocess
import tempfile

import pytest

PROBE = '#include <errno.h>\n#include <stdio.h>\nint main(void) { errno = 0; return puts("ok") < 0; }\n'


@functools.cache
def runs(*compiler: str, under: str | None = None) -> bool:
    """Whether a small program that includes headers is compiled with these flags, linked, and runs (in an emulator)."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "probe")
        try:
            command = [*compiler, "-xc", "-", "-o", program, "-lm"]
            subprocess.run(command, input=PROBE, text=True, capture_output=True, check=True, timeout=60)
            done = subprocess.run([*filter(None, [under]), program], text=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return False
    return (done.returncode, done.stdout) == (0, "ok\n")


def c_compiler() -> str:
    return os.environ.get("CC", "gcc")


@functools.cache
def arm() -> tuple[list[str], str] | None:
    """A compiler for AArch64, and what runs its programs here."""
    emulator = next(filter(shutil.which, ("qemu-aarch64", "qemu-aarch64-static")), None)
    compilers = ["aarch64-linux-gnu-gcc"], ["clang", "--target=aarch64-linux-gnu"]
    found = (c for c in compilers if emulator and runs(*c, "-static", under=emulator))
    return next(((c, emulator) for c in found), None)


@functools.cache
def dump(page: str, *flags: str) -> str | None:
    """A page as a browser has it after its scripts ran; None without a browser that works."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        return None
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        *flags,
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            command += [f"--user-data-dir={folder}", "--virtual-time-budget=5000", "--dump-dom", page]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout if done.returncode == 0 else None


# What Debian calls it, and whether it is here.
wants_32_bits = pytest.mark.tool("gcc-multilib", lambda: runs("gcc", "-m32"))
wants_arm = pytest.mark.tool("qemu-user with clang and libc6-dev-arm64-cross, or gcc-aarch64-linux-gnu", arm)
wants_browser = pytest.mark.tool("chromium", lambda: "ok" in (dump("data:text/html,<p>ok") or ""))
