"""Dataclasses by the names that build.py wrote into each class, as __fields__."""

_MISSING = object()


class Field:
    def __init__(self, name, default=_MISSING, default_factory=_MISSING, kw_only=False):
        self.name, self.default, self.default_factory, self.kw_only = name, default, default_factory, kw_only


def field(**settings):
    return Field("", **settings)


def fields(made):
    return tuple(made.__dataclass_fields__.values())


def replace(made, **changes):
    return type(made)(**{name: getattr(made, name) for name in made.__dataclass_fields__} | changes)


def _initialise(self, args, given):
    all_fields = self.__dataclass_fields__.values()
    placed = [one.name for one in all_fields if not one.kw_only]
    if len(args) > len(placed):
        raise TypeError(f"{type(self).__name__} takes {len(placed)} arguments, got {len(args)}")
    values = dict(zip(placed, args, strict=False)) | given
    for one in all_fields:
        if one.name in values:
            value = values.pop(one.name)
        elif one.default is not _MISSING:
            value = one.default
        elif one.default_factory is not _MISSING:
            value = one.default_factory()
        else:
            raise TypeError(f"{type(self).__name__} lacks the argument {one.name}")
        object.__setattr__(self, one.name, value)
    if values:
        raise TypeError(f"{type(self).__name__} takes no argument {next(iter(values))}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def dataclass(cls=None, frozen=False, repr=True, eq=True):
    if cls is None:
        return lambda cls: dataclass(cls, frozen, repr, eq)
    found = dict(getattr(cls, "__dataclass_fields__", {}))
    for name in cls.__dict__["__fields__"]:
        default = cls.__dict__.get(name, _MISSING)
        if isinstance(default, Field):
            default.name = name
            found[name] = default
            delattr(cls, name)
            if default.default is not _MISSING:
                setattr(cls, name, default.default)
        else:
            found[name] = Field(name, default)
    names = tuple(found)
    cls.__dataclass_fields__ = found
    cls.__init__ = lambda self, *args, **given: _initialise(self, args, given)

    def values(self):
        return tuple([getattr(self, name) for name in names])

    if eq:
        cls.__eq__ = lambda self, other: values(self) == values(other) if type(other) is cls else NotImplemented
        cls.__hash__ = (lambda self: hash(values(self))) if frozen else None
    if repr:
        cls.__repr__ = lambda self: f"{cls.__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"
    return cls
