"""Without docstrings (build.py) there is none to find."""


def getdoc(made):
    return None


def __getattr__(name):  # contextlib asks what a function is
    return lambda given: False
