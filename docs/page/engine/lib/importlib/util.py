"""Nothing can be installed in the page."""


def find_spec(name):
    return None
