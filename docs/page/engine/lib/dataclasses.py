"""Dataclasses by the names that build.py wrote into each class, as __fields__."""


class Field:
    def __init__(self, **settings):
        self.__dict__.update(settings)


field = Field


def fields(made):
    return tuple(made.__dataclass_fields__.values())


def replace(made, **changes):
    return type(made)(**{name: getattr(made, name) for name in made.__dataclass_fields__} | changes)


def _initialise(self, *args, **given):
    placed = [name for name, one in self.__dataclass_fields__.items() if not hasattr(one, "kw_only")]
    given |= zip(placed, args, strict=False)
    for name, one in self.__dataclass_fields__.items():
        if name not in given:
            given[name] = one.default_factory() if hasattr(one, "default_factory") else one.default
        object.__setattr__(self, name, given.pop(name))
    if given:
        raise TypeError(f"{type(self).__name__} takes no argument {next(iter(given))}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def dataclass(cls=None, frozen=False, repr=True, eq=True):
    if cls is None:
        return lambda cls: dataclass(cls, frozen, repr, eq)
    found = dict(getattr(cls, "__dataclass_fields__", {}))
    for name in cls.__dict__["__fields__"]:
        default = cls.__dict__.get(name, Field())
        found[name] = default if isinstance(default, Field) else Field(default=default)
        found[name].name = name
        if isinstance(default, Field) and name in cls.__dict__:
            delattr(cls, name)
    cls.__dataclass_fields__, cls.__init__ = found, _initialise

    def values(self):
        return tuple([getattr(self, name) for name in found])

    if eq:
        cls.__eq__ = lambda self, other: values(self) == values(other) if type(other) is cls else NotImplemented
        cls.__hash__ = (lambda self: hash(values(self))) if frozen else None
    if repr:
        cls.__repr__ = lambda self: f"{cls.__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in found)})"
    return cls
