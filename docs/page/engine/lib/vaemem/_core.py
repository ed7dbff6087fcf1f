"""vaemem._core in the page: the package's own bindings, in WebAssembly (capi.js)."""

from importlib import import_module
from operator import index

import _engine
from numpy import ndarray

call, read = _engine.call, _engine.read


def caller(pointer, flags, free):
    if free:
        return lambda *args, **kwargs: call(pointer, flags, None, args, kwargs)
    return lambda self, *args, **kwargs: call(pointer, flags, self, args, kwargs)


def getter(pointer, closure):
    return property(lambda self: read(pointer, self, closure))


def make_type(name, new, names):
    if new:
        names["__new__"] = lambda cls, *args, **kwargs: call(new, 3, cls, args, kwargs)
        names["__init__"] = lambda self, *args, **kwargs: None
    return type(name.rpartition(".")[2], (object,), names)


def make_exception(name, doc, base):
    return type(name.rpartition(".")[2], (base,), {"__doc__": doc})


def list_items(given):
    return list(given.items())


helpers = ndarray, caller, getter, make_type, make_exception, object.__new__, dict, list_items, import_module, index
globals().update(_engine.start(*helpers))
