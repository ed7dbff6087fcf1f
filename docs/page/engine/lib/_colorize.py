class _T:
    def __getattr__(self, n):
        return ""


def get_theme(*a, **k):
    return _T()


def can_colorize(*a, **k):
    return False


def get_colors(*a, **k):
    return _T()


def decolor(t):
    return t
