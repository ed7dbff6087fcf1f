"""vaemem._core in the page: the package's own bindings, in WebAssembly (capi.js)."""

import _engine

call, read = _engine.call, _engine.read


def caller(pointer, flags, is_free):
    return lambda *args, **kwargs: call(pointer, flags, is_free, args, kwargs)


def getter(pointer, closure):
    return property(lambda self: read(pointer, self, closure))


globals().update(_engine.start(caller, getter, object.__new__))


class Model:
    def __new__(cls, *args, **kwargs):
        raise OverflowError("the page runs no VAE")
