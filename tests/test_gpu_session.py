"""benchmarks/gpu_session.py without a GPU: what its calls run, and that nothing is lost when one dies."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_session.py"
sys.path.insert(0, str(SCRIPT.parent))

import gpu_session

# A session whose steps are these instead. A measurement is noted in `truth` once common.append_row has returned.
STAND_IN = """
import sys
from pathlib import Path
import gpu_session
from gpu_session import Step
measure = '''
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from common import append_row
for i in range(int(sys.argv[2])):
    append_row("numbers.csv", {{"step": sys.argv[1], "number": i}})
    with open({truth!r}, "a") as file:
        file.write(f"{{sys.argv[1]}} {{i}}\\\\n")
    print(sys.argv[1], i, flush=True)
    time.sleep(float(sys.argv[3]))
'''
def numbers(name, count, seconds):
    return lambda scale: [[sys.executable, "-c", measure, name, str(count), str(seconds)]]
hang = "import time; print('hangs', flush=True); time.sleep(100)"
gpu_session.STEPS = {{
    "first_step": Step(20, numbers("first_step", 30, 0.01)),
    "fails": Step(20, lambda scale: [[sys.executable, "-c", "raise SystemExit(3)"]]),
    "hangs": Step(3, lambda scale: [[sys.executable, "-c", hang]]),
    "last_step": Step(20, numbers("last_step", 5, 0.01)),
}}
gpu_session.CALLS = {{"first": ["first_step", "last_step"], "second": ["fails"]}}
gpu_session.ROOT = Path({root!r})
sys.exit(gpu_session.main(sys.argv[1:]))
"""


class Session:
    def __init__(self, folder: Path, *words: str):
        self.out, self.truth = folder / "out", folder / "truth"
        names = {"benchmarks": str(SCRIPT.parent), "truth": str(self.truth), "root": str(folder)}
        env = os.environ | {"OUT": str(self.out), "PYTHONPATH": str(SCRIPT.parent)}
        command = [sys.executable, "-c", STAND_IN.format(**names), *words]
        self.process = subprocess.Popen(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )

    def wait(self) -> int:
        self.printed, _ = self.process.communicate()
        return self.process.returncode

    def kill(self) -> None:
        """The session and, as at the end of a lease, whatever it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    @property
    def rows(self) -> list[str]:
        found = []
        for line in (self.out / "rows.jsonl").read_text().splitlines() if (self.out / "rows.jsonl").exists() else []:
            row = json.loads(line)
            assert row["table"] == "numbers.csv"
            found.append(f"{row['step']} {row['number']}")
        return found

    @property
    def measured(self) -> list[str]:
        return self.truth.read_text().splitlines() if self.truth.exists() else []


def test_steps_run_in_order_and_those_that_ended_well_are_skipped_the_next_time(tmp_path):
    session = Session(tmp_path)
    assert session.wait() == 0, session.printed
    assert session.rows == [f"first_step {i}" for i in range(30)] + [f"last_step {i}" for i in range(5)]
    log = (session.out / "session.log").read_text()
    assert log == session.printed and "first_step well" in log
    assert sorted(file.name for file in session.out.iterdir()) in (
        ["rows.jsonl", "session.log"],
        ["clocks.csv", "rows.jsonl", "session.log"],
    )
    again = Session(tmp_path, "second")  # first's are done
    assert again.wait() == 1 and "-- session: fails, 300 s" in again.printed
    again = Session(tmp_path, "--again")
    assert again.wait() == 0 and "-- session: first_step last_step" in again.printed


def test_a_step_that_fails_or_hangs_leaves_the_others_their_turns(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control starts what is behind "&"
    try:
        session = Session(tmp_path, "fails", "hangs", "last_step")
    finally:
        signal.signal(signal.SIGINT, before)
    assert session.wait() == 1
    assert "fails: failed with status 3" in session.printed
    assert "KeyboardInterrupt" in session.printed and "hangs stopped after its time" in session.printed
    assert session.rows == [f"last_step {i}" for i in range(5)]
    resumed = Session(tmp_path, "fails", "last_step")
    assert resumed.wait() == 1 and "-- session: fails, 480 s" in resumed.printed


def test_no_step_begins_when_the_call_has_no_time_left(tmp_path):
    session = Session(tmp_path, "hangs", "last_step", "--limit", "3.5")
    assert session.wait() == 1
    assert "last_step not begun: no time is left" in session.printed and not session.rows


def test_what_was_measured_before_a_call_died_is_there(tmp_path):
    """Killed at ten random moments: every measurement that was made is a whole row."""
    seen = set()
    for i in range(10):
        folder = tmp_path / str(i)
        folder.mkdir()
        session = Session(folder)
        until = time.monotonic() + 20
        wanted = random.Random(i).randrange(1, 34)
        while len(session.measured) < wanted and session.process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        session.kill()
        measured = session.measured
        assert len(measured) >= wanted and session.rows[: len(measured)] == measured
        seen.add(len(measured))
    assert len(seen) > 3


def test_the_limits_of_the_calls():
    for name, limit in gpu_session.LIMITS.items():
        assert limit * 0.9 <= sum(gpu_session.STEPS[step].seconds for step in gpu_session.CALLS[name]) <= limit


def test_every_step_names_files_that_are_there():
    for small in (False, True):
        for step in gpu_session.STEPS.values():
            for word in (word for command in step.commands(gpu_session.Scale(small)) for word in command):
                if re.match(r"(tests|benchmarks)/\w+\.py$", word):
                    assert (SCRIPT.parents[1] / word).exists(), word


def test_unknown_steps_are_refused(tmp_path):
    session = Session(tmp_path, "nosuch")
    assert session.wait() == 2 and "unknown nosuch" in session.printed


def test_rows_become_tables(tmp_path, monkeypatch):
    import common

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.delenv("VAEMEM_ROWS", raising=False)
    rows = [{"table": "a.csv", "x": 1}, {"table": "entered", "y": 2}, {"table": "a.csv", "x": 3, "z": 4}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"table": "a.c')
    gpu_session.tables(tmp_path / "rows.jsonl")
    assert (tmp_path / "a.csv").read_text().split() == ["x,z", "1,", "3,4"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.csv", "rows.jsonl"]


@pytest.mark.parametrize(
    "check",
    ["one own", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("one cudnn", "repeats", "limits"))],
)
def test_checks_run_on_the_emulator(check):
    import gpu

    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | gpu._find()[1]
    words = [*check.split(), *"--size 8 --compare 8 --times 1 --dtype float16".split()]
    done = subprocess.run(
        [sys.executable, SCRIPT.parent / "gpu_checks.py", *words], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
