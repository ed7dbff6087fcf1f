"""An installed cuDNN, asked in a process of its own because it may crash.

Questions and replies are lines of JSON over one socket, and each reply repeats its question's number. Whatever comes
between a question and its reply (an exception, a crash, another number) ends the process, so that no later question can
meet an earlier one's reply; the next question starts another.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import Any

from vaemem.engine.cudnn_path import find_cudnn

__all__ = ["InstalledCudnn", "installed_cudnn"]

# The caller's import path goes along as JSON: it may hold what no environment variable can (colons, and pathlib.Path,
# which imports pass over). Until it is there nothing is imported from the current folder.
START = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; sys.path[:] = json.loads(sys.argv[3]); "
    "from vaemem.prediction.cudnn import serve; serve()"
)


class _Process:
    """One asking process, with one question at a time."""

    def __init__(self, path: str | None):
        package = sys.modules["vaemem"]  # not imported here, for it imports this file
        root = os.path.dirname(os.path.dirname(os.path.abspath(str(package.__file__))))
        stand_ins = [os.path.join(folder, "data", "libcuda.so.1") for folder in package.__path__]
        stand_in = next(filter(os.path.isfile, stand_ins), "")
        paths = [root, *(entry for entry in sys.path if isinstance(entry, str))]
        arguments = [os.path.abspath(path) if path else "", stand_in, json.dumps(paths)]
        self.asked = 0
        self.printed = tempfile.TemporaryFile()  # what cuDNN prints is not a reply, but tells why it fell
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", START, *arguments],
                stdin=theirs.fileno(),
                stdout=self.printed,
                stderr=self.printed,
                start_new_session=True,  # Ctrl-C is for the caller
            )

    def reply(self) -> dict[str, Any]:
        """What it says about the last question, or where nothing was asked, about itself."""
        line = b""
        with contextlib.suppress(ConnectionError):  # it has ended
            while not line.endswith(b"\n") and (more := self.socket.recv(1 << 16)):
                line += more
        if not line.endswith(b"\n"):
            status = self.popen.wait()
            self.printed.seek(0)
            last = self.printed.read().decode(errors="replace").strip().rpartition("\n")[2]
            return {"error": f"cuDNN ended its process (status {status}){': ' + last if last else ''}"}
        number, answer = json.loads(line.partition(b"\n")[0])
        if number != self.asked:
            raise RuntimeError(f"cuDNN: want the reply to question {self.asked}, got that to {number}")
        return answer

    def ask(self, *question: Any) -> dict[str, Any]:
        self.asked += 1
        with contextlib.suppress(ConnectionError):  # the reply says how it ended
            self.socket.sendall(json.dumps([self.asked, *question]).encode() + b"\n")
        return self.reply()

    def forget(self) -> None:
        """Closes our ends of it."""
        self.socket.close()
        self.printed.close()

    def end(self) -> None:
        self.forget()
        self.popen.kill()  # it holds nothing that could be lost
        self.popen.wait()


_all: weakref.WeakSet["InstalledCudnn"] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_all):
        one._after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_after_fork)


class InstalledCudnn:
    """An installed cuDNN in a process of its own, started by the first question.

    Threads take turns. A forked copy starts a process of its own and leaves its parent's alone.

    Parameters
    ----------
    path : str, optional
        libcudnn.so.9; `vaemem.engine.cudnn_path.find_cudnn` by default.

    Attributes
    ----------
    version : str or None
        cuDNN's version, ``"9.28.0"``; None where there is none to ask.
    reason : str
        Why there is none.
    """

    def __init__(self, path: str | None = None):
        self._path = path
        self._greeting: dict[str, str] | None = None  # the first process's, which tells of the others too
        self._process: _Process | None = None
        self._lock = threading.RLock()
        self._busy = False
        _all.add(self)

    @property
    def version(self) -> str | None:
        return (self._greeting or self._talk()).get("version")

    @property
    def reason(self) -> str:
        return (self._greeting or self._talk()).get("error", "")

    def _talk(self, *question: Any) -> dict[str, Any]:
        """The reply to a question, or the greeting where there is none."""
        with self._lock:
            if self._busy:  # by this very thread, since the lock is one that it may take again
                raise RuntimeError("cuDNN: asked from a signal handler or finalizer while it was answering")
            try:
                self._busy = True
                if self._greeting and "error" in self._greeting:
                    return self._greeting
                if self._process is None or self._process.popen.poll() is not None:
                    greeting = self._spawn()
                    self._greeting = self._greeting or greeting
                    if "error" in greeting:
                        return greeting
                assert self._process is not None and self._greeting is not None
                return self._process.ask(*question) if question else self._greeting
            except BaseException:
                self.close()
                raise
            finally:
                self._busy = False

    def _spawn(self) -> dict[str, Any]:
        self.close()  # what is left of one that has ended
        try:
            self._process = _Process(self._path or find_cudnn())
            return self._process.reply()
        except OSError as error:  # no cuDNN where VAEMEM_CUDNN says, or no process to be had
            return {"error": str(error)}

    def conv(
        self, device_json: str, conv: tuple[Any, ...], tf32: bool = True, every: bool = False
    ) -> dict[str, Any] | None:
        """The plan of one convolution (``bytes``, ``engine`` and more), asked with cuDNN's device properties and what
        ``vaemem._core.Cudnn.conv`` takes; None where cuDNN has no engine for it on this device.

        RuntimeError where there is no cuDNN to ask, it refused the question or crashed on it, or a signal handler asks
        while the thread that it interrupted waits for a reply.
        """
        reply = self._talk(device_json, conv, tf32, every)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["plan"]

    def close(self) -> None:
        """Ends the process; the next question starts another."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.end()

    def _after_fork(self) -> None:
        """In the copy, where no other thread is left to give the lock back."""
        self._lock, self._busy = threading.RLock(), False
        process, self._process = self._process, None
        if process is not None:
            process.forget()
            process.popen.returncode = 0  # its parent waits for it

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def serve() -> None:
    """The asking process: ``-c START cudnn stand_in import_path``, with the socket as its standard input."""
    from vaemem._core import Cudnn

    path, no_driver = sys.argv[1:3]
    with socket.socket(fileno=0) as ours, ours.makefile("r") as questions:

        def reply(number: int, **fields: Any) -> None:
            ours.sendall(json.dumps([number, fields]).encode() + b"\n")

        try:
            cudnn = Cudnn(path or None, no_driver or None)
        except OSError as error:
            return reply(0, error=str(error))
        reply(0, version=cudnn.version)
        for line in questions:
            number, device, conv, *how = json.loads(line)
            try:
                reply(number, plan=cudnn.conv(device, tuple(conv), *how))
            except ValueError as error:
                reply(number, error=str(error))


_installed = InstalledCudnn()


def installed_cudnn() -> InstalledCudnn:
    """The installed cuDNN, one asking process for all."""
    return _installed
