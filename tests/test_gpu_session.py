"""benchmarks/gpu_session.sh on a machine without a GPU: its steps in order, with stand-ins for what they call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_session.sh"
STAND_INS = {
    "nvidia-smi": """
case "$*" in
*-lms*) echo "$*"; while sleep 0.01; do echo 1980; done ;;
*compute_cap*) echo 9.0 ;;
esac""",
    "ncu": """
while [ $# -gt 0 ]; do
    if [ "$1" = --log-file ]; then echo counters >"$2"; fi
    if [ "$1" = -c ]; then break; fi
    shift
done
echo "ncu of $4" """,
    "compute-sanitizer": """
while [ "${1#python}" = "$1" ]; do echo "option $1"; shift; done
exec "$@" """,
    "python": """
echo "gpu=$VAEMEM_TEST_GPU archs=$VAEMEM_CUDA_ARCHS: $*"
case "$*" in
*"$FAILS"*) echo "Traceback of it" >&2; exit 3 ;;
*"$HANGS"*) trap 'echo KeyboardInterrupt >&2; exit 130' INT; sleep 1000 & wait ;;
*decode_gpu.py*) echo row >"$VAEMEM_RESULTS/decode_gpu_h100.csv" ;;
esac""",
}


class Session:
    """One call of the script."""

    def __init__(self, folder: Path, *steps: str, fails: str = "nothing", hangs: str = "nothing", limit: int = 570):
        for name, text in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        out = folder / "out"
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": "python", "OUT": str(out)}
        env |= {"LIMIT": str(limit), "FAILS": fails, "HANGS": hangs, "TMPDIR": str(folder)}
        done = subprocess.run(["bash", SCRIPT, *steps], capture_output=True, text=True, env=env)
        self.status, self.said, self.errors = done.returncode, done.stdout, done.stderr
        self.steps = [
            line.split(",")[0][3:] for line in done.stdout.splitlines() if line.startswith("-- ") and ", at " in line
        ]
        self.files, self.parts = sorted(out.iterdir()) if out.exists() else [], {}
        if (out / "session.tgz").exists():
            with tarfile.open(out / "session.tgz") as archive:
                for member in archive.getmembers():
                    if member.isfile():
                        self.parts[Path(member.name).name] = archive.extractfile(member).read().decode()

    def log(self, step: str) -> str:
        return "".join(text for name, text in sorted(self.parts.items()) if name.endswith(f"-{step}.log"))


FIRST = "versions build light headline tiles kernels repeats".split()
SECOND = "build passes profile_own profile_cudnn limits memory faults".split()
THIRD = "build memcheck racecheck pipelines compile ablation cudnn_profile rest".split()


@pytest.mark.parametrize(
    ("asked", "steps"),
    [((), FIRST), (("second",), SECOND), (("third",), THIRD), (("light", "passes"), ["light", "passes"])],
)
def test_steps_in_order(tmp_path, asked, steps):
    session = Session(tmp_path, *asked)
    assert session.status == 0 and "all well" in session.said
    assert list(dict.fromkeys(session.steps)) == steps
    assert [file.name for file in session.files] == ["session.log", "session.tgz"]
    assert session.files[0].read_text() == session.said
    assert all(session.log(step) for step in steps)
    assert "clocks.sm" in session.parts["clocks.csv"]
    assert not [left for left in tmp_path.iterdir() if left.name.startswith("tmp.")]


@pytest.mark.parametrize("call", ["first", "second", "third"])
def test_the_limits_of_a_call_add_up_to_no_more_than_it_has(tmp_path, call):
    """Whatever hangs, all steps have their turn."""
    said = Session(tmp_path, call).said
    limits = [int(found) for found in re.findall(r"^-- \w+, at \d+ s, for (\d+) s: ", said, re.MULTILINE)]
    assert len(limits) > 8 and 500 <= sum(limits) <= 570


def test_what_is_missing_is_installed_from_what_was_brought(tmp_path):
    session = Session(tmp_path, "versions", fails="import pytest")
    assert "pip install -q --no-index --find-links build/wheels pytest" in session.log("versions")
    assert "pip install" not in Session(tmp_path, "versions").log("versions")


def test_what_each_step_calls(tmp_path):
    session = Session(tmp_path)
    assert "archs=90: setup.py" in session.log("build")
    for name in ("test_emulator", "test_cuda_kernels", "test_cuda_store", "test_cuda_attention", "test_cuda_own_conv"):
        assert session.log("kernels").count(f"tests/{name}.py") == 1  # each in a process of its own
    assert "gpu=1" in session.log("kernels") and session.parts["decode_gpu_h100.csv"] == "row\n"
    session = Session(tmp_path, "second")
    assert "gpu=1" in session.log("faults")
    assert len([name for name in session.parts if name.startswith("ncu-") and session.parts[name] == "counters\n"]) == 3
    session = Session(tmp_path, "third")
    for tool in ("memcheck", "racecheck"):
        assert f"option {tool}" in session.log(tool) and "option kns=vm_" in session.log(tool)
        assert "gpu=1" in session.log(tool) and "option application-only" in session.log(tool)


def test_a_step_that_fails_leaves_the_others_their_turns(tmp_path):
    session = Session(tmp_path, fails="tests/test_cuda_store.py")
    assert session.status == 1 and "not all well" in session.said
    assert list(dict.fromkeys(session.steps)) == FIRST
    assert "Traceback of it" in session.log("kernels") and session.log("repeats")


def test_a_step_that_hangs_says_where_and_what_was_before_it_is_kept(tmp_path):
    session = Session(tmp_path, "versions", "headline", "passes", hangs="headline", limit=8)
    assert session.status == 1 and "stopped after its time" in session.said
    assert "KeyboardInterrupt" in session.log("headline") and session.log("versions")
    assert "no time is left" in session.said.partition("-- passes")[2]


def test_unknown_steps_are_refused(tmp_path):
    session = Session(tmp_path, "nosuch")
    assert session.status == 2 and "no step nosuch" in session.errors and not session.steps


def test_every_file_that_is_named_is_there():
    words = {word.strip('"') for word in SCRIPT.read_text().split() if word.startswith(("tests/", "benchmarks/"))}
    root = SCRIPT.parents[1]
    assert len(words) > 8
    for word in words:
        assert list(root.glob(word)), word


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("ONE_DECODE", ["1", "own"], r"own \(1, 3, 8, 8\) 0\.\d+ "),
        ("ONE_DECODE", ["1", "cudnn"], r"cudnn \(1, 3, 8, 8\) 0\.\d+ "),
        ("REPEATS", ["1", "1"], "own launches 0 of 1 repeats have other bits"),
        ("LIMITS", ["1"], r"^\d+ \d+ \d+\.\d+$"),
    ],
)
def test_what_is_written_in_the_script_runs(name, words, says):
    """On the emulator, of the least latents."""
    import gpu

    _, env = gpu._find()
    code = re.search(rf"^{name}='(.*?)'$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code, *words], env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(says, done.stdout, re.MULTILINE), done.stdout
