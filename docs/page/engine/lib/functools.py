"""The parts of functools that the page uses, in few lines: Brython's own brings inspect and ast."""

WRAPPER_ASSIGNMENTS = ("__module__", "__name__", "__qualname__", "__doc__")
WRAPPER_UPDATES = ("__dict__",)


def update_wrapper(wrapper, wrapped, assigned=WRAPPER_ASSIGNMENTS, updated=WRAPPER_UPDATES):
    for name in assigned:
        if hasattr(wrapped, name):
            setattr(wrapper, name, getattr(wrapped, name))
    wrapper.__wrapped__ = wrapped
    return wrapper


def wraps(wrapped, assigned=WRAPPER_ASSIGNMENTS, updated=WRAPPER_UPDATES):
    return lambda wrapper: update_wrapper(wrapper, wrapped)


class partial:
    def __init__(self, func, *args, **keywords):
        self.func, self.args, self.keywords = func, args, keywords

    def __call__(self, *args, **keywords):
        return self.func(*self.args, *args, **{**self.keywords, **keywords})


def reduce(function, iterable, *initial):
    items = iter(iterable)
    value = initial[0] if initial else next(items)
    for item in items:
        value = function(value, item)
    return value


def lru_cache(maxsize=128, typed=False):
    if callable(maxsize):
        return lru_cache()(maxsize)

    def decorate(function):
        kept = {}

        def cached(*args, **kwargs):
            key = (args, tuple(kwargs.items()))
            if key in kept:
                value = kept.pop(key)
            else:
                value = function(*args, **kwargs)
                if maxsize is not None and len(kept) >= maxsize:
                    del kept[next(iter(kept))]
            kept[key] = value
            return value

        cached.cache_clear = kept.clear
        return update_wrapper(cached, function)

    return decorate


def cache(function):
    return lru_cache(None)(function)


class cached_property:
    def __init__(self, function):
        self.function = function

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, made, owner=None):
        if made is None:
            return self
        value = made.__dict__[self.name] = self.function(made)
        return value


def cmp_to_key(compare):
    class Key:
        def __init__(self, value):
            self.value = value

        def __lt__(self, other):
            return compare(self.value, other.value) < 0

    return Key


def total_ordering(cls):
    return cls


def singledispatch(function):
    function.register = lambda kind: lambda other: other
    return function
