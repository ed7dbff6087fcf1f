"""What every test sees."""

import os
import sys

import pytest

SANITIZED = bool(os.environ.get("VAEMEM_SANITIZED"))
if SANITIZED:  # torch and AddressSanitizer do not get on: tests that import these skip, by name
    sys.modules["torch"] = sys.modules["diffusers"] = None  # type: ignore[assignment]


def pytest_configure(config):
    config.addinivalue_line("markers", "resident: looks at the process's own size, which sanitizers change")


def pytest_collection_modifyitems(items):
    for item in items:
        if SANITIZED and item.get_closest_marker("resident"):
            item.add_marker(pytest.mark.skip(reason="the sanitizer's own memory would be measured"))
