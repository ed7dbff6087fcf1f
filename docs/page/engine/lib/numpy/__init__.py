"""The little of NumPy that predictions need."""

import _engine
from _absent import __getattr__ as __getattr__


class ndarray:
    def tolist(self):
        return _engine.tolist(self)


class finfo:
    max = 3.4028234663852886e38

    def __init__(self, dtype): ...


class float32(float):
    def __new__(cls, value):
        return float.__new__(cls, _engine.fround(value))

    def __str__(self):  # the shortest decimal that rounds to it
        decimals = (f"{float(self):.{digits}g}" for digits in range(1, 10))
        return next(one for one in decimals if _engine.fround(float(one)) == float(self))


class dtype:
    def __init__(self, kind):
        self.name = kind.__name__ if isinstance(kind, type) else str(kind)
