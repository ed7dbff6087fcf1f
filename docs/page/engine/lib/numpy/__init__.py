"""The little of NumPy that predictions need."""

import _engine


class ndarray:
    def tolist(self):
        return _engine.tolist(self)


class bool_: ...


class integer: ...


class floating: ...


class generic: ...


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
    def __init__(self, name):
        self.name = "float32" if name is float32 else str(name)


def __getattr__(name):  # a type's name
    return name
