"""The package's data."""

import _engine


class File:
    def __init__(self, *parts):
        self.parts = parts
        self.name = parts[-1] if parts else ""

    def joinpath(self, *parts):
        return File(*self.parts, *parts)

    __truediv__ = joinpath

    def read_text(self, encoding=None):
        return _engine.data("/".join(self.parts))

    def iterdir(self):
        return [File(*self.parts, name) for name in _engine.names("/".join(self.parts))]


def files(package):
    return File(*package.split(".")[1:])
