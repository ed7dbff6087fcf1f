"""Comparing traces."""

OPS = "encode", "decode", "picture"  # the last encodes a picture: (N, H, W, C) in memory


def empty_image(batch, channels, height, width, dtype, picture, *frames):
    """An image or a video on "meta", with a picture's strides or contiguous."""
    import torch

    like = {"dtype": dtype, "device": "meta"}
    if picture:
        return torch.empty(batch, *frames, height, width, channels, **like).movedim(-1, 1)
    return torch.empty(batch, channels, *frames, height, width, **like)


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


def assert_same(built, recorded):
    ours, real = lifetimes(built.steps), lifetimes(recorded.steps)
    for i, (a, b) in enumerate(zip(ours, real, strict=False)):
        assert a == b, f"step {i}: built {ours[max(0, i - 4) : i + 2]}, recorded {real[max(0, i - 4) : i + 2]}"
    assert len(ours) == len(real)
    assert built.convs == recorded.convs


def left_by(trace):
    """The steps that take what is not given back."""
    given = {number for op, number, *_ in trace.steps if op == "give"}
    return [step for step in trace.steps if step[0] == "take" and step[1] not in given]
