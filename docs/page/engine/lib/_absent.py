"""A module that the page imports and does not need (build.py): its names are classes, and calls return None."""


def __getattr__(name):
    return type(name, (), {"__new__": lambda *args, **kwargs: None})
