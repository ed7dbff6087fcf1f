"""Not in the page."""


def gettempdir():
    return "/"
