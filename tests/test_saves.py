"""Saves of a folder by several processes at once, and saves that are killed: what is read is the VAE of one save."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from weights_files import make, same, tensors_of

from vaemem import _saving
from vaemem.engine import weights

pytestmark = pytest.mark.python

LIMIT = 120  # seconds, which a deadlock meets
TINY = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
CONFIGS = [{**TINY, "scaling_factor": factor, "latent_channels": n} for factor, n in ((0.25, 4), (0.5, 8), (2.0, 16))]
PROLOGUE = f"""
import ctypes, itertools, sys
sys.path.append({str(Path(__file__).parent)!r})
from test_saves import *
folder = Path(sys.argv[1])
"""
SAVER = """
number, saves = int(sys.argv[2]), float(sys.argv[3])
model = make(CONFIGS[number], seed=number)
print("ready", flush=True)
sys.stdin.readline()
while saves:
    weights.save(model, folder)
    saves -= 1
"""
KILLED = """
ptrace, TRACEME, SYSCALL = ctypes.CDLL(None).ptrace, 0, 24
old, new = (make(CONFIGS[i], seed=i) for i in (0, 1))
weights.save(new, folder / "first")  # what is imported and set up once

def is_killed(target, stop):
    "Kills a save of `new` at this one of its stops, before and after each system call; False if it has fewer."
    child = os.fork()
    if not child:
        ptrace(TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        weights.save(new, target)
        os._exit(0)
    for _ in range(stop + 1):
        if os.WIFEXITED(os.waitpid(child, 0)[1]):
            return False
        ptrace(SYSCALL, child, None, None)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True

for stop in itertools.count(0, int(sys.argv[2])):
    target, has_old = folder / str(stop), stop % 4 < 2
    if has_old:
        weights.save(old, target)
    if not is_killed(target, stop):
        break
    found = holder(target)
    assert found in (0 if has_old else None, 1), (stop, found)
    weights.save(new, target)
    assert holder(target, silent=True) == 1 and len(list(target.iterdir())) == 2, stop
print(stop)
"""


def holder(folder: Path, silent: bool = False) -> int | None:
    """The number of the config and the weights that a folder holds, which must be one save's; None without weights."""
    with warnings.catch_warnings(record=not silent):
        warnings.simplefilter("error" if silent else "ignore")
        try:
            model = weights.load(folder)
        except FileNotFoundError:
            return None
    number = [config["scaling_factor"] for config in CONFIGS].index(model.arch["scaling_factor"])
    same(model, tensors_of(make(CONFIGS[number], seed=number)))
    return number


def start(script: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROLOGUE + script, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("saves", [4, pytest.param(16, marks=pytest.mark.thorough)])
def test_savers_of_one_folder_and_their_readers(saves, tmp_path):
    """After one that was killed, which keeps nobody waiting."""
    folder, end = tmp_path / "vae", time.monotonic() + LIMIT
    killed, *savers = (start(SAVER, folder, *how) for how in ((0, "inf"), (0, saves), (1, saves), (2, saves)))
    for saver in (killed, *savers):
        assert saver.stdout.readline() == "ready\n"
    print("go", file=killed.stdin, flush=True)
    while holder(folder) is None:
        assert time.monotonic() < end
    killed.kill()
    for saver in savers:
        print("go", file=saver.stdin, flush=True)
    seen = set()
    while any(saver.poll() is None for saver in savers):
        assert time.monotonic() < end
        seen.add(holder(folder))
    for saver in (killed, *savers):
        saver.communicate()
    assert [saver.returncode for saver in savers] == [0, 0, 0]
    assert len(seen) > 1 and None not in seen
    assert holder(folder, silent=True) in (0, 1, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", weights.WEIGHTS]


def test_a_saver_waits_for_another(tmp_path, monkeypatch):
    """Which is between its two files."""
    between, goes_on, replace = threading.Event(), threading.Event(), os.replace

    def late(source, target):
        if threading.current_thread() is first and Path(target).name == "config.json":
            between.set()
            assert goes_on.wait(LIMIT)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    models = [make(CONFIGS[number], seed=number) for number in (0, 1)]
    first, second = (threading.Thread(target=weights.save, args=(model, tmp_path)) for model in models)
    first.start()
    assert between.wait(LIMIT)
    second.start()
    second.join(0.5)
    assert second.is_alive() and holder(tmp_path) == 0
    goes_on.set()
    first.join(LIMIT)
    second.join(LIMIT)
    assert holder(tmp_path, silent=True) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_its_maker_removes_while_another_waits(tmp_path, monkeypatch):
    folder, writing, goes_on, write = tmp_path / "vae", threading.Event(), threading.Event(), weights._write_tensors

    def late(*args):
        if threading.current_thread() is first:
            writing.set()
            assert goes_on.wait(LIMIT)
            raise MemoryError
        write(*args)

    monkeypatch.setattr(weights, "_write_tensors", late)
    models = [make(CONFIGS[number], seed=number) for number in (0, 1)]
    first, second = (threading.Thread(target=weights.save, args=(model, folder)) for model in models)
    first.start()
    assert writing.wait(LIMIT)
    second.start()
    second.join(0.5)
    goes_on.set()
    first.join(LIMIT)
    second.join(LIMIT)
    assert holder(folder, silent=True) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_takes_no_lock_along(tmp_path):
    with _saving.writing_folder(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(LIMIT)
            os._exit(0)
    try:
        saver = threading.Thread(target=weights.save, args=(make(CONFIGS[0]), tmp_path), daemon=True)
        saver.start()
        saver.join(LIMIT / 4)
        assert not saver.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="system calls are counted by Linux's ptrace")
@pytest.mark.parametrize("step", [11, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_save_that_is_killed_at_any_system_call(step, tmp_path):
    """A reader gets the old VAE or the new one. The next saver finds no lock and clears what is left."""
    killer = start(KILLED, tmp_path, step)
    said, _ = killer.communicate(timeout=LIMIT)
    assert killer.returncode == 0 and int(said) > 200
