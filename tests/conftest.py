"""What every test sees."""

import os
import sys
import zlib
from collections import Counter

import pytest

# While other programs keep the processors busy, a thread of torch's that waits for another one by spinning takes the
# time that the other one needs: several times as much as the work itself. GNU's OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets a terminal's width, but a test reads output as a pipe does

pytest.register_assert_rewrite("errors")  # so that a failed comparison shows both sides

SANITIZED = bool(os.environ.get("VAEMEM_SANITIZED"))


class Refuse:
    """torch and AddressSanitizer do not get on: tests that import these skip, by name."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "diffusers", "transformers"):
            raise ModuleNotFoundError(f"{name} is not imported under sanitizers", name=name)


if SANITIZED:
    sys.meta_path.insert(0, Refuse())


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Where no file is named, all tests run, in as many processes as there are processors (`-n 0`: in this one)."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.usepdb
    if whole and config.pluginmanager.has_plugin("xdist") and "PYTEST_XDIST_WORKER" not in os.environ:
        if config.option.numprocesses is None:
            config.option.numprocesses, config.option.dist = min(os.cpu_count() or 1, 8), "worksteal"


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(config, items):
    known = set()
    for item in items:
        one_in, function = item.get_closest_marker("one_in"), item.nodeid.partition("[")[0]
        # Under sanitizers, which take several times as long, one in four of those.
        n = one_in.args[0] * (4 if SANITIZED else 1) if one_in else 0
        if n and function in known and zlib.crc32(item.name.encode()) % n:
            item.add_marker("thorough")
        known.add(function)
        if SANITIZED and item.get_closest_marker("resident"):
            item.add_marker(pytest.mark.skip(reason="the sanitizer's own memory would be measured"))
    # "0/6": the first of six shares of the thorough tests, of those of packages, or of all under sanitizers (.ci/run).
    if share := os.environ.get("VAEMEM_SHARE"):
        mine, shares = map(int, share.split("/"))
        parts: tuple[list, list] = [], []
        for item in items:
            is_shared = SANITIZED or any(item.get_closest_marker(name) for name in ("thorough", "packages"))
            parts[bool(is_shared and zlib.crc32(item.nodeid.encode()) % shares != mine)].append(item)
        items[:], left_out = parts
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def no_card_is_present(monkeypatch):
    """What is predicted without a card's name is the same on every machine."""
    monkeypatch.setattr("vaemem.prediction.request.present_gpu", lambda: None)


def pytest_runtest_setup(item):
    for debian, there in (mark.args for mark in item.iter_markers("tool")):
        if not there():
            say = pytest.fail if os.environ.get("VAEMEM_TOOLS") == "1" else pytest.skip
            say(f"a tool is not installed, or does not work (Debian: {debian})")


def pytest_terminal_summary(terminalreporter):
    """Each reason for skips, once."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture
def cuda(monkeypatch):
    """For one test: the device "cuda" is the GPU, or the emulator."""
    import gpu

    gpu.go(monkeypatch)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not os.path.exists("/usr/bin/chromium"):
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as found:
        root = ["--no-sandbox"] * (os.getuid() == 0)
        browser = found.chromium.launch(executable_path="/usr/bin/chromium", args=root)
        yield browser
        browser.close()
