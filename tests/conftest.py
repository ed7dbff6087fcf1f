"""What every test sees."""

import os
import sys

import pytest

# While other programs keep the processors busy, a thread of torch's that waits for another one by spinning takes the
# time that the other one needs: several times as much as the work itself. GNU's OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SANITIZED = bool(os.environ.get("VAEMEM_SANITIZED"))


class Refuse:
    """torch and AddressSanitizer do not get on: tests that import these skip, by name."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "diffusers", "transformers"):
            raise ModuleNotFoundError(f"{name} is not imported under sanitizers", name=name)


if SANITIZED:
    sys.meta_path.insert(0, Refuse())


def pytest_configure(config):
    config.addinivalue_line("markers", "resident: looks at the process's own size, which sanitizers change")


def pytest_collection_modifyitems(items):
    for item in items:
        if SANITIZED and item.get_closest_marker("resident"):
            item.add_marker(pytest.mark.skip(reason="the sanitizer's own memory would be measured"))


@pytest.fixture
def cuda(monkeypatch):
    """For one test: the device "cuda" is the GPU, or the emulator."""
    import gpu

    gpu.go(monkeypatch)
