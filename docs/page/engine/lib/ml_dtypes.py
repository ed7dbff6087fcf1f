"""Not in the page."""


def __getattr__(name):
    return name
