"""200 answers of predictions stay what they were: tests/frozen.py wrote them, and compares thousands of others."""

import os
import subprocess
import sys
from pathlib import Path

import frozen
import pytest

import vaemem

pytestmark = [pytest.mark.core, pytest.mark.python]

HERE = Path(__file__).parent


def test_answers_are_what_they_were():
    """In a process of its own, in which no cuDNN, GPU or torch is found. After a change that is meant:
    ``python tests/frozen.py renew tests/frozen_answers.jsonl``."""
    package = str(Path(vaemem.__file__).parents[1])
    command = [sys.executable, "frozen.py", "check", "frozen_answers.jsonl", "--jobs", "1"]
    done = subprocess.run(
        command, cwd=HERE, env=os.environ | {"PYTHONPATH": os.pathsep.join([package, *sys.path])}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0 of 200 answers differ\n"), done.stdout[-8000:]


@pytest.mark.parametrize(
    ("key", "then", "now", "kind"),
    [
        ("timeline[0]", 7, 8, "timelines"), ("timeline[2]", 7, 8, "names"), ("band[1]", 7, 8, "numbers"),
        ("readings.decode[13][0]", "conv_in", "conv_out", "names"), ("readings.decode[13][1]", 7, 8, "numbers"),
        ("readings.out_of_memory_at", ["decode", "conv_in"], None, "names"),
        ("verdict.verdict", "fits", "tight", "numbers"), ("refusal", "ValueError: gpu", "ValueError: size", "numbers"),
    ],
)  # fmt: skip
def test_kinds_of_differences(key, then, now, kind):
    assert frozen.kind_of(key, then, now) == kind
