"""re by the browser's own regular expressions: the syntax that the package and the library use."""

import functools

import _engine

IGNORECASE = I = 2  # noqa: E741
MULTILINE = M = 8
DOTALL = S = 16
UNICODE = U = 32
VERBOSE = X = 64
ASCII = A = 256


class Pattern:
    def __init__(self, pattern, flags):
        self.pattern = pattern
        self.search, self.match, self.fullmatch = map(_finder, _engine.compile(pattern, flags))

    def finditer(self, text):
        at = 0
        while at <= len(text) and (found := self.search(text, at)):
            yield found
            at = found.end() + (not found[0])

    def findall(self, text):
        return [
            found.groups("") if len(found._groups) > 2 else (found._groups[-1] or "") for found in self.finditer(text)
        ]

    def _cut(self, text, most, between):
        parts, at = [], 0
        for i, found in enumerate(self.finditer(text)):
            if most and i == most:
                break
            parts += [text[at : found.start()], *between(found)]
            at = found.end()
        return [*parts, text[at:]]

    def sub(self, new, text, count=0):
        return "".join(self._cut(text, count, lambda found: [new(found) if callable(new) else found.expand(new)]))

    def split(self, text, maxsplit=0):
        return self._cut(text, maxsplit, Match.groups)


class Match:
    def __init__(self, at, groups, names):
        self._at, self._groups, self._names = at, groups, names

    def start(self):
        return self._at

    def end(self):
        return self._at + len(self._groups[0])

    def __getitem__(self, group):
        return self._names[group] if isinstance(group, str) else self._groups[group]

    def group(self, *groups):
        found = tuple([self[group] for group in groups or (0,)])
        return found if len(groups) > 1 else found[0]

    def groups(self, default=None):
        return tuple([default if one is None else one for one in self._groups[1:]])

    @property
    def lastindex(self):
        return max([i for i, one in enumerate(self._groups) if i and one is not None], default=None)

    def expand(self, template):
        return _REFERENCE.sub(lambda found: self[int(found[1])] or "", template) if "\\" in template else template


def _finder(expression):
    def find(text, pos=0):
        found = _engine.find(expression, text, pos)
        return None if found is None else Match(*found)

    return find


@functools.cache
def compile(pattern, flags=0):
    return pattern if isinstance(pattern, Pattern) else Pattern(pattern, flags)


def _named(method):
    return lambda pattern, text, flags=0: getattr(compile(pattern, flags), method)(text)


match, fullmatch, search, finditer, findall = map(_named, ("match", "fullmatch", "search", "finditer", "findall"))


def sub(pattern, new, text, count=0, flags=0):
    return compile(pattern, flags).sub(new, text, count)


def split(pattern, text, maxsplit=0, flags=0):
    return compile(pattern, flags).split(text, maxsplit)


def escape(text):
    return sub(r"[^\w]", lambda found: "\\" + found[0], text)


_REFERENCE = compile(r"\\(\d+)")
