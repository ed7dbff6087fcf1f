"""Files that are written: the old one stays whole until the new one is."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from engine import TWO_LEVELS
from errors import refused

from vaemem import VAE, CachingAllocator, _saving, compare, report, seed_table
from vaemem.__main__ import main
from vaemem._saving import check_writable, replacing, write

pytestmark = [pytest.mark.core, pytest.mark.python]


@contextlib.contextmanager
def full_disk(left=100):
    """No file may become longer than that, as where a disk is full: the write that goes on raises OSError."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def a_snapshot(path):
    allocator = CachingAllocator()
    kept = allocator.malloc(3 << 20)
    allocator.save_snapshot(path)
    del kept


WRITERS = {
    "to_csv": lambda path: seed_table().to_csv(path),
    "to_json": lambda path: seed_table().to_json(path),
    "save_snapshot": a_snapshot,
    "report": lambda path: report(seed_table()[:3], path.with_suffix(".md"), html=path, plots=False),
    "compare": lambda path: compare(seed_table()[:9], "comfyui").to_csv(path),
    "VAE.save": lambda path: VAE.random(config=TWO_LEVELS).save(path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_old_file(writer, tmp_path):
    paths = [tmp_path / "old.safetensors", *([tmp_path / "old.md"] if writer == "report" else [])]
    for path in paths:
        path.write_bytes(b"old")
    with full_disk(), refused(names=["old."], kind=OSError):
        WRITERS[writer](paths[0])
    assert [path.read_bytes() for path in paths] == [b"old"] * len(paths)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    WRITERS[writer](paths[0])
    assert paths[0].read_bytes()[:3] != b"old" and sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize("command", ["decode", "encode"])
def test_a_full_disk_leaves_the_old_result(command, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    weights, latents, picture = (str(tmp_path / name) for name in ("vae.safetensors", "z.npy", "a.png"))
    VAE.random(config=TWO_LEVELS).save(weights)
    np.save(latents, np.random.default_rng(0).standard_normal((1, 4, 8, 8), np.float32))
    image.effect_noise((16, 16), 99).convert("RGB").save(picture)
    held = {path: path.read_bytes() for path in tmp_path.iterdir()}
    given, out = (latents, picture) if command == "decode" else (picture, latents)
    with full_disk():
        assert main([command, given, "--weights", weights, "-o", out]) == 2
    assert os.path.basename(out) in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == held


def test_links_and_permissions_stay(tmp_path):
    file, link, new = (tmp_path / name for name in ("file", "link", "new"))
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write(link, "né")
    assert link.is_symlink() and file.read_text("utf-8") == "né" and stat.S_IMODE(file.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        write(new, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_pipe_is_written_directly():
    code = "from vaemem import seed_table; seed_table()[:1].to_csv('/dev/stdout')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == seed_table()[:1].to_csv()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipes_reader_sees_no_end_before_there_is_something(tmp_path):
    select = pytest.importorskip("select")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        seen = select.poll()
        seen.register(reader, select.POLLIN)
        check_writable(tmp_path / "pipe")
        assert not seen.poll(0)
        write(tmp_path / "pipe", "x")
        assert seen.poll(0) and os.read(reader, 9) == b"x"
    finally:
        os.close(reader)
    with refused(kind=OSError, errno=errno.EACCES, filename=tmp_path):
        check_writable(tmp_path)


def test_a_path_in_bytes(tmp_path):
    write(os.fsencode(tmp_path / "a"), "x")
    assert (tmp_path / "a").read_text() == "x"


def test_what_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "file", Path("/dev/fd/9999")):
        for attempt in (check_writable, lambda path: write(path, "")):
            with refused(kind=OSError, filename=path):
                attempt(path)
    with refused(kind=FileNotFoundError, filename=tmp_path / "another"), replacing(tmp_path / "file"):
        open(tmp_path / "another")
    check_writable(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "during"])
def test_another_writer_may_clear_what_is_not_locked_yet(when, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    flock, clears = fcntl.flock, []

    def late(file, how):
        if not clears:
            clears.append(threading.Timer(0.05, lambda: (os.unlink(file.name), other.close())))
            if when == "before":
                write(tmp_path / "other", "other")
                assert not os.path.exists(file.name)
            else:
                other = open(file.name, "r+b")
                flock(other, fcntl.LOCK_EX)
                clears[0].start()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with replacing(tmp_path / "file") as f:
        if when == "during":
            clears[0].join()
        f.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new" and not list(tmp_path.glob(".vaemem-*"))


def test_a_folder_of_many_files_is_seldom_listed(tmp_path, monkeypatch):
    """Each file of n would list n files. A small folder is cleared by the next file, a large one by a later file."""
    pytest.importorskip("fcntl")
    listed = []
    for place, name in ((os, "listdir"), (os, "scandir"), (Path, "glob")):
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, plain=plain: listed.append(given) or plain(*given))
    left = tmp_path / ".vaemem-0.part"
    for i in range(600):
        if i in (10, 400):
            left.write_bytes(b"of a killed process")
        write(tmp_path / f"{i}", "x")
        assert i != 10 or not left.exists()
    assert len(listed) < 250
    assert len(list(tmp_path.iterdir())) == 600


@pytest.mark.parametrize("error", ["EBUSY", "EXDEV", "EACCES", "EROFS"])
def test_a_file_that_cannot_be_replaced_is_written_in_its_place(error, tmp_path, monkeypatch):
    """Where it is a mount, and where its folder may not be written."""
    file, folder, spare = tmp_path / "folder" / "file", tmp_path / "folder", tmp_path / "spare"
    folder.mkdir()
    spare.mkdir()
    file.write_text("old and longer")
    node = file.stat().st_ino

    def refuse(*args):
        raise OSError(getattr(errno, error), error, *args[:1])

    def refusing(path, mode, **more):
        return refuse(str(path)) if mode == "xb" and folder in path.parents else open(path, mode, **more)

    monkeypatch.setattr(os, "replace", refuse)
    if error in ("EACCES", "EROFS"):
        monkeypatch.setattr(_saving, "open", refusing, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    check_writable(file)
    with full_disk(), refused(kind=OSError, filename=file):
        write(file, "x" * 200)
    assert file.read_text() == "old and longer"
    write(file, "new")
    assert file.read_text() == "new" and file.stat().st_ino == node
    with refused(kind=OSError, filename=folder / "absent"):
        write(folder / "absent", "new")
    assert list(folder.iterdir()) == [file] and list(spare.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no /dev")
@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_an_open_file_keeps_what_it_holds(mode, tmp_path, capfd):
    with open(tmp_path / "log", mode, buffering=0) as log:
        log.write(b"old ")
        check_writable(f"/dev/fd/{log.fileno()}")
        write(f"/dev/fd/{log.fileno()}", "new ")
        log.write(b"more")
    assert (tmp_path / "log").read_bytes() == b"old new more"
    os.write(1, b"old ")
    write("/dev/stdout", "new")
    assert capfd.readouterr().out == "old new"
