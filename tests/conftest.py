"""What every test sees."""

import gc
import os
import sys
import zlib
from collections import Counter

import pytest

# While other programs keep the processors busy, a thread of torch's that waits for another one by spinning takes the
# time that the other one needs: several times as much as the work itself. GNU's OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# NumPy's OpenBLAS spins as well, and has no such setting: one thread. The tests' own matrices are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets a terminal's width, but a test reads output as a pipe does

pytest.register_assert_rewrite("errors")  # so that a failed comparison shows both sides

gc.set_threshold(50_000, 20, 20)  # the usual 700 takes a twentieth of the tests' time
FROZEN = [0]  # how many modules there were when they were frozen
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


def number_values(items):
    """Return {test: [its values' number for each parametrize]}, and {test function: [how many each has]}."""
    numbers, seen = {}, {}
    for item in items:
        if item.get_closest_marker("each_value"):
            given = [mark.args[0] for mark in item.iter_markers("parametrize")]
            names = [one.replace(",", " ").split() if isinstance(one, str) else one for one in given]
            known = seen.setdefault(item.nodeid.partition("[")[0], [{} for _ in names])
            values = [tuple(id(item.callspec.params[name]) for name in group) for group in names]
            numbers[item] = [one.setdefault(value, len(one)) for one, value in zip(known, values, strict=True)]
    return numbers, {function: [len(one) for one in known] for function, known in seen.items()}


def is_on_diagonal(numbers, lengths):
    """Return whether a test is kept: the kept tests have each value of each parameter."""
    longest = numbers[lengths.index(max(lengths))]
    return all(number == longest % length for number, length in zip(numbers, lengths, strict=True))


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(config, items):
    known, (numbers, lengths) = set(), number_values(items)
    for item in items:
        one_in, function = item.get_closest_marker("one_in"), item.nodeid.partition("[")[0]
        # Under sanitizers, which take several times as long, one in four of those.
        n = one_in.args[0] * (4 if SANITIZED else 1) if one_in else 0
        if n and function in known and zlib.crc32(item.name.encode()) % n:
            item.add_marker("thorough")
        known.add(function)
        if item in numbers and not is_on_diagonal(numbers[item], lengths[function]):
            item.add_marker("thorough")
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


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    """Leave modules that a test has imported to themselves: a full garbage collection then takes milliseconds, not a
    second."""
    if len(sys.modules) > FROZEN[-1]:
        gc.collect()
        gc.freeze()
        FROZEN.append(len(sys.modules))


@pytest.fixture(autouse=True)
def no_card_is_present(monkeypatch):
    """What is predicted without a card's name is the same on every machine."""
    monkeypatch.setattr("vaemem.prediction.request.present_gpu", lambda: None)


def pytest_runtest_setup(item):
    for debian, there in (mark.args for mark in item.iter_markers("tool")):
        if not there():
            say = pytest.fail if os.environ.get("VAEMEM_TOOLS") == "1" else pytest.skip
            say(f"a tool is not installed, or does not work (Debian: {debian})")


@pytest.hookimpl(trylast=True)  # after xdist has waited for its workers
def pytest_sessionfinish(session):
    """Sum the CPU seconds of this process and of all it has waited for; fail if they exceed VAEMEM_CPU_SECONDS."""
    session.config.cpu_seconds = sum(os.times()[:4])
    limit = float(os.environ.get("VAEMEM_CPU_SECONDS", "inf"))
    if session.config.cpu_seconds > limit and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Print the CPU seconds, and each reason for skips once."""
    terminalreporter.write_line(f"{config.cpu_seconds:.0f} CPU seconds")
    limit = os.environ.get("VAEMEM_CPU_SECONDS")
    if limit and config.cpu_seconds > float(limit):
        terminalreporter.write_line(
            f"error: the tests took more than VAEMEM_CPU_SECONDS={limit}: mark slow or repeating tests thorough "
            "(CONTRIBUTING.md, Quick and thorough), or set VAEMEM_CPU_SECONDS for a slower machine"
        )
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
