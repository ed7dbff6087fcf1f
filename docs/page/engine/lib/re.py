"""re by the browser's own regular expressions: the syntax that the package and the library use."""

import _engine

IGNORECASE = I = 2  # noqa: E741
M = MULTILINE = 8
S = DOTALL = 16
U = UNICODE = 32
X = VERBOSE = 64
A = ASCII = 256


class error(Exception): ...


class Pattern:
    def __init__(self, pattern, flags):
        self.pattern, self.flags = pattern, flags
        if isinstance(pattern, bytes):
            return  # json makes one and does not use it
        self.groupindex, self._plain, self._whole = _engine.compile(pattern, flags)

    def _find(self, text, start, sticky, whole=False):
        found = _engine.match(self._whole if whole else self._plain, text, start, sticky)
        return None if found is None else Match(self, text, found)

    def match(self, text, pos=0):
        return self._find(text, pos, True)

    def fullmatch(self, text, pos=0):
        return self._find(text, pos, True, True)

    def search(self, text, pos=0):
        return self._find(text, pos, False)

    def finditer(self, text):
        at = 0
        while at <= len(text) and (found := self.search(text, at)):
            yield found
            at = found.end() + (found.end() == found.start())

    def findall(self, text):
        return [
            found.groups("") if len(found.spans) > 2 else found[len(found.spans) - 1] for found in self.finditer(text)
        ]

    def sub(self, new, text, count=0):
        parts, at = [], 0
        for i, found in enumerate(self.finditer(text)):
            if count and i == count:
                break
            parts += [text[at : found.start()], new(found) if callable(new) else found.expand(new)]
            at = found.end()
        return "".join([*parts, text[at:]])

    def split(self, text, maxsplit=0):
        parts, at = [], 0
        for i, found in enumerate(self.finditer(text)):
            if maxsplit and i == maxsplit:
                break
            parts += [text[at : found.start()], *found.groups()]
            at = found.end()
        return [*parts, text[at:]]


class Match:
    def __init__(self, pattern, text, spans):
        self.re, self.string, self.spans = pattern, text, spans

    def _number(self, group):
        return self.re.groupindex[group] if isinstance(group, str) else group

    def span(self, group=0):
        return self.spans[self._number(group)] or (-1, -1)

    def start(self, group=0):
        return self.span(group)[0]

    def end(self, group=0):
        return self.span(group)[1]

    def _text(self, group, default=None):
        span = self.spans[self._number(group)]
        return default if span is None else self.string[span[0] : span[1]]

    __getitem__ = _text

    def group(self, *groups):
        found = tuple([self._text(group) for group in groups or (0,)])
        return found if len(groups) > 1 else found[0]

    def groups(self, default=None):
        return tuple([self._text(i, default) for i in range(1, len(self.spans))])

    def groupdict(self, default=None):
        return {name: self._text(i, default) for name, i in self.re.groupindex.items()}

    @property
    def lastgroup(self):
        last = [name for name, i in self.re.groupindex.items() if self.spans[i]]
        return last[-1] if last else None

    def expand(self, template):
        def put(found):
            return self._text(found["name"] or int(found["number"]), "")

        return _REFERENCE.sub(put, template) if "\\" in template else template


_compiled = {}


def compile(pattern, flags=0):
    if isinstance(pattern, Pattern):
        return pattern
    if (pattern, flags) not in _compiled:
        _compiled[pattern, flags] = Pattern(pattern, flags)
    return _compiled[pattern, flags]


def match(pattern, text, flags=0):
    return compile(pattern, flags).match(text)


def fullmatch(pattern, text, flags=0):
    return compile(pattern, flags).fullmatch(text)


def search(pattern, text, flags=0):
    return compile(pattern, flags).search(text)


def finditer(pattern, text, flags=0):
    return compile(pattern, flags).finditer(text)


def findall(pattern, text, flags=0):
    return compile(pattern, flags).findall(text)


def sub(pattern, new, text, count=0, flags=0):
    return compile(pattern, flags).sub(new, text, count)


def split(pattern, text, maxsplit=0, flags=0):
    return compile(pattern, flags).split(text, maxsplit)


def escape(text):
    return sub(r"[^\w]", lambda found: "\\" + found[0], text)


_REFERENCE = compile(r"\\(?:(?P<number>\d+)|g<(?P<name>\w+)>)")
