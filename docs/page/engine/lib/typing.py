"""NamedTuple, by the names that build.py wrote into each class as __fields__, and Literal. The rest is absent."""

from collections import namedtuple

from _absent import __getattr__ as __getattr__

TYPE_CHECKING = False
_OWN = ("__module__", "__qualname__", "__dict__", "__weakref__", "__fields__", "__annotations__", "__annotate__")


class _Named(type):
    def __new__(cls, name, bases, names):
        if not bases:
            return type.__new__(cls, name, bases, names)
        fields = names["__fields__"]
        made = namedtuple(name, fields, defaults=[names[field] for field in fields if field in names])
        for key, value in names.items():
            if key not in fields and key not in _OWN:
                setattr(made, key, value)
        return made


class NamedTuple(metaclass=_Named): ...


class Literal(tuple):
    def __class_getitem__(cls, names):
        return cls(names)

    def __or__(self, other):
        return self


get_args = tuple
