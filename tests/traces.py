"""Comparing traces."""


def lifetimes(steps):
    """Takes and what is given back between them, as sizes: the order among gives has no effect, storages of 0 bytes
    neither."""
    found, given, size = [], [], {}
    for op, number, count, _ in steps:
        if op == "give":
            given.append(size[number])
            continue
        if op == "take":
            size[number] = count
            if not count:
                continue
        if given:
            found.append(("give", *sorted(filter(None, given))))
            given = []
        found.append((op, count) if op == "take" else (op, number))
    return [*found, ("give", *sorted(filter(None, given)))]
