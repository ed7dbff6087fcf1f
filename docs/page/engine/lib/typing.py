"""NamedTuple, by the names that build.py wrote into each class as __fields__, and get_args. The rest does nothing."""

from collections import namedtuple

TYPE_CHECKING = False


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


_OWN = ("__module__", "__qualname__", "__dict__", "__weakref__", "__fields__", "__annotations__", "__annotate__")


class NamedTuple(metaclass=_Named): ...


class _Anything:
    def __getitem__(self, key):
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__


class _Literal(_Anything):
    def __init__(self, args=()):
        self.__args__ = args

    def __getitem__(self, key):
        return _Literal(key if isinstance(key, tuple) else (key,))


class Protocol: ...


class TypedDict(dict): ...


class _Generic:
    def __getitem__(self, key):
        return object


Any = Callable = ClassVar = IO = Optional = Self = TypeAlias = Union = _Anything()
Generic, Literal = _Generic(), _Literal()


def get_args(given):
    return given.__args__


def overload(function):
    return function


def cast(kind, value):
    return value


def get_origin(given):
    return None


def TypeVar(*args, **kwargs):
    return Any


def __getattr__(name):
    return Any
