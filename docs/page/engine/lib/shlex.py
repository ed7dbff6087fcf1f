"""shlex for commands as the package writes them."""

import re

_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")


def quote(word):
    if word and not re.search(r"[^\w@%+=:,./-]", word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


def join(words):
    return " ".join([quote(word) for word in words])


def split(command):
    return [_QUOTED.sub(lambda found: found[1] or found[2] or "", word) for word in _WORD.findall(command)]
