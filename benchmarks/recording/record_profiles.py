"""Records cuDNN's workspaces for the convolutions of VAEs and UNets as profile files, with no GPU.

    python benchmarks/recording/record_profiles.py [--cudnn FOLDER] [--capability 8.9,9.0] [--step 32]
    python benchmarks/recording/record_profiles.py --cudnn FOLDER --capability 8.9 --same-as 9.10.2
    python benchmarks/recording/record_profiles.py --cudnn FOLDER --add [--only "frames' VAEs"]
    python benchmarks/recording/record_profiles.py --cudnn FOLDER --batches [--capability 8.9]

For each compute capability: asks an installed cuDNN (9.8 or later) for every convolution of the SD, SDXL and FLUX VAEs,
of the UNets in vaemem/data/modules, of one frame of Qwen-Image's and Wan 2.1's VAE and of the VAEs of 2026, at every
square image up to 2048 pixels in steps of 32, at pairs of common sides, at random rectangles and batches; explains each
answer by a formula; learns the decision tree that picks the formula; and checks it against questions that it has not
seen. About five minutes for each capability. With --same-as it asks for the squares of a profile of another version,
and writes a reference to that profile where every answer is the same. With --add it goes through the files of the
version, keeps what they have and adds the convolutions and kinds of question that they lack. With --batches it queries
batches of the networks that were recorded for single images. If the trees answer differently, it adds a second tree
that is only for batches. At the end it checks each file with 500 new questions.
"""

import argparse
import collections
import functools
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ask_cudnn import Cudnn

from vaemem import _core
from vaemem.engine.cudnn_path import find_cudnn
from vaemem.pipelines import recorded_modules
from vaemem.prediction import profiles
from vaemem.prediction.gpus import Gpu, find_gpu, gpu_names

COMMON = (512, 576, 640, 704, 720, 768, 832, 896, 960, 1024, 1088, 1152, 1216, 1280, 1344, 1536, 1664, 1920, 2048)
FEATURES = ("P", "Q", "h", "w", "m", "n")
LATER = "taesd", "taef1", "taef2", "wan2.2", "qwen-image-2.1", "hunyuanimage-2.1"
OFFSETS = 2303  # bytes beside an index buffer and its tiles, on Volta and Turing
TENSORS = ("", "i+o+f", "i+f", "i+o", "I+O+F", "I+F", "i", "o", "f", "O", "9i")

Shape = tuple[int, ...]  # c, k, r, stride, padding; with three dimensions the frames of input and filter


class Network(NamedTuple):
    """Networks whose convolutions are asked in the same way.

    about: whose
    convolutions: by shape the levels that it is at: the input's side is the image's, shifted right and rounded up
    kinds: of question, as profiles have them
    smallest: side of an image in pixels
    batches: of the squares, and of what is held out; the rest is of the first
    others: batches of some more rectangles
    thin: of the rectangles and pairs of common sides that others are asked about, every so many
    """

    about: str
    convolutions: dict[Shape, set[int]]
    kinds: tuple[str, ...]
    smallest: int
    batches: tuple[int, ...]
    others: tuple[int, ...]
    thin: int = 1

    def asked(self, gpu: Gpu) -> list[str]:
        """Its kinds for a GPU: before compute capability 8.0 there is neither bfloat16 nor TF32."""
        return [kind for kind in self.kinds if gpu.sm >= 80 or not ("bfloat16" in kind or "strict" in kind)]

    def rectangles(self, rng: random.Random, count: int) -> list[tuple[int, int]]:
        """Half of them of any size and shape, half of the sizes that people use."""
        least = math.log2(self.smallest / 8)
        any_size = [
            (8 * round(2 ** rng.uniform(least, 8)), 8 * round(2 ** rng.uniform(least, 8))) for _ in range(count // 2)
        ]
        return any_size + [(8 * rng.randint(32, 256), 8 * rng.randint(32, 256)) for _ in range(count - count // 2)]


@functools.cache
def networks() -> tuple[Network, ...]:
    vaes = (
        "float16", "bfloat16", "float32", "float16 nhwc", "bfloat16 nhwc", "float32 nhwc", "float32 strict",
        "float32 strict nhwc",
    )  # fmt: skip
    return (
        Network("VAEs", _of_vaes(), vaes, 8, (1,), (2, 2, 2, 2, 3, 4, 4, 4, 8, 8)),
        Network("UNets", _of_unets(), vaes[:3], 256, (2, 1, 4, 8), (1, 2, 3, 4, 6, 8, 16) * 20),
        Network("frames' VAEs", _of_frames(), (*vaes[:3], vaes[6]), 64, (1,), (2, 2, 4), thin=2),
        Network("attention of frames' VAEs", {(384, 384, 1, 1, 0): {3}}, vaes[3:6], 64, (2,), (3, 4, 4)),
        Network("VAEs of 2026", of_walks(*LATER), (*vaes[:3], vaes[6]), 64, (1,), (2, 2, 4), thin=4),
        Network(
            "attention of HunyuanImage's VAE", {(1024, 1024, 1, 1, 0): {5}}, vaes[3:6], 64, (1,), (2, 2, 4), thin=4
        ),
    )


def _of_vaes() -> dict[Shape, set[int]]:
    found: dict[Shape, set[int]] = collections.defaultdict(set)

    def add(level: int, c: int, k: int, r: int, stride: int = 1) -> None:
        found[c, k, r, stride, 0 if stride == 2 else r // 2].add(level)

    widths = (128, 256, 512, 512)
    add(0, 3, widths[0], 3)
    add(0, widths[0], 3, 3)
    for level, width in enumerate(widths):
        before, after = widths[max(level - 1, 0)], widths[min(level + 1, 3)]
        for other in (before, after):  # going down, going up
            add(level, other, width, 3)
            if other != width:
                add(level, other, width, 1)
        add(level, width, width, 3)
        if level < 3:
            add(level, width, width, 3, stride=2)
            add(level, after, after, 3)  # after the upsampling
    add(3, 512, 512, 1)  # attention as 1x1 convolutions (BFL's code)
    for latent in (4, 16):
        add(3, latent, 512, 3)
        add(3, 512, 2 * latent, 3)
    add(3, 8, 8, 1)
    add(3, 4, 4, 1)
    return found


def _of_frames() -> dict[Shape, set[int]]:
    """List convolutions of one frame. diffusers runs it as the last of three, ComfyUI with the filters' last slices."""
    found: dict[Shape, set[int]] = collections.defaultdict(set)
    widths, latents = (96, 192, 384, 384), 16

    def add(level: int, c: int, k: int) -> None:
        found[c, k, 3, 1, 0, 3].add(level)
        found[c, k, 3, 1, 1, 1].add(level)

    add(0, 3, widths[0])
    add(0, widths[0], 3)
    for level, width in enumerate(widths):
        before = widths[max(level - 1, 0)]
        add(level, before, width)
        add(level, width, width)
        if before != width:
            found[before, width, 1, 1, 0, 1].add(level)
        if level < 3:
            found[width, width, 3, 2, 0].add(level)
            found[widths[level + 1], widths[level + 1] // 2, 3, 1, 1].add(level)  # after the upsampling
    add(2, widths[1], widths[2])  # of half the channels, which the upsampling leaves
    found[widths[1], widths[2], 1, 1, 0, 1].add(2)
    add(3, latents, widths[3])
    add(3, widths[3], 2 * latents)
    for channels in (latents, 2 * latents):
        found[channels, channels, 1, 1, 0, 1].add(3)
    found[widths[3], 3 * widths[3], 1, 1, 0].add(3)
    found[widths[3], widths[3], 1, 1, 0].add(3)
    return found


def of_walks(*models: str) -> dict[Shape, set[int]]:
    """List convolutions of diffusers' modules as `predict` follows them, in NCHW."""
    found: dict[Shape, set[int]] = collections.defaultdict(set)
    side, known = 512, _core.models()
    for model, op in itertools.product(models, ("encode", "decode")):
        for each in _core.Trace.vae(known[model], "diffusers", op, "float16", side, side).convs:
            conv = profiles.Conv(*each)
            r, stride, padding = ((e if isinstance(e, int) else e[-1]) for e in (conv.r, conv.stride, conv.padding))
            shape = conv.c, conv.k, r, stride, padding, *([conv.depth] if conv.depth else [])
            if conv.layout == "nchw":
                found[shape].add(round(math.log2(side / conv.h)))
    return found


def _of_unets() -> dict[Shape, set[int]]:
    found: dict[Shape, set[int]] = collections.defaultdict(set)
    side = 2048
    for name in recorded_modules.recorded():
        if name.endswith("-unet"):
            sizes = {"n": 1, "h": side // 8, "w": side // 8, "t": 77}
            trace = recorded_modules.load_program(name).trace("float16", find_gpu("RTX 4090"), **sizes)
            for _, _, c, h, _, k, r, stride, padding, _ in trace.convs:
                found[c, k, r, stride, padding].add((side // h).bit_length() - 1)
    return found


def question(conv: Shape, kind: str, height: int, width: int, level: int, n: int) -> dict:
    """Return the question for an image's height and width, as arguments of `profiles.Conv`."""
    c, k, r, stride, padding, *frames = conv
    padded = r - stride if r > 1 and not padding else 0  # before it: one side with a stride of 2, else both
    h, w = (-(-side >> level) + padded for side in (height, width))
    asked = dict(dtype=kind.split()[0], n=n, c=c, h=h, w=w, k=k, r=r, stride=stride, padding=padding)
    if not frames:
        return asked
    depth = frames[0]
    return asked | {"r": (depth, r, r), "stride": (1, stride, stride), "padding": (0, padding, padding), "depth": depth}


class Recorder:
    """Asks about one convolution and kind on one GPU, and remembers."""

    def __init__(self, cudnn: Cudnn, gpu: Gpu, conv: Shape, kind: str):
        self.cudnn, self.gpu, self.conv, self.kind = cudnn, gpu, conv, kind
        self.sizes: list[dict[str, int]] = []
        self.bytes: list[int | None] = []
        self.where: list[tuple[int, ...]] = []
        self.untried = 0

    def ask(self, height: int, width: int, level: int, n: int = 1) -> tuple[dict[str, int], int | None]:
        """Query cuDNN for an image's height and width; return the sizes, and the bytes."""
        layout = "nhwc" if "nhwc" in self.kind else "nchw"
        asked = profiles.Conv(**question(self.conv, self.kind, height, width, level, n), layout=layout)
        plan = self.cudnn.conv(self.gpu.device_json, asked, "strict" not in self.kind)
        self.untried += plan["untried"] if plan else 0
        return profiles.sizes(asked), plan and plan["bytes"]

    def learn(self, height: int, width: int, level: int, n: int = 1) -> None:
        size, count = self.ask(height, width, level, n)
        self.where.append((height, width, level, n))
        self.sizes.append(size)
        self.bytes.append(count)


def explain(recorder: Recorder) -> list[tuple | None]:
    """A formula for every answer, as few as a greedy cover finds; None where cuDNN has no engine."""
    sizes, answers = recorder.sizes, recorder.bytes
    cover: dict[tuple | None, set[int]] = collections.defaultdict(set)
    for j, (s, count) in enumerate(zip(sizes, answers, strict=True)):
        if count is None:
            cover[None].add(j)
            continue
        for tensors in TENSORS:
            rest = count - profiles.formula_bytes([tensors, 0, 0, 0, 0], s)
            if rest < 0:
                continue
            cover[tensors, 0, 0, 0, rest].add(j)
            for index in (6, 12, 18):  # an index buffer of precomputed offsets
                more = rest - profiles.formula_bytes(["", index, 0, 0, 0], s)
                if 0 <= more <= 128:
                    cover[tensors, index, 0, 0, more].add(j)
                for tile in (32, 64, 128, 256) if more > OFFSETS else ():  # and a few numbers for each tile
                    per_tile, uneven = divmod(more - OFFSETS, -(-s["p"] // tile))
                    if not uneven and 0 < per_tile <= 64:
                        cover[tensors, index, tile, per_tile, OFFSETS].add(j)
            for formula in _partial_sums(tensors, rest, s["p"], recorder.conv[1]):
                cover[formula].add(j)
    formulas: list[tuple | None] = [None] * len(answers)
    left = set(range(len(answers)))
    while left:  # most answers explained first; of equals, the smaller constants
        best = max(cover, key=lambda f: (len(cover[f] & left), (-f[4], -f[3]) if f else (0, 0)))
        for j in cover[best] & left:
            formulas[j] = best
        left -= cover[best]
    return formulas


def _partial_sums(tensors: str, rest: int, pixels: int, channels: int) -> Iterator[tuple]:
    """The formulas of a split reduction: each tile of the output has partial sums in float32 in some buffers, a counter
    for each of them and one more.

    So were all of 3,024 answers of engines with a knob 17, and none of 13,776 others, about UNets' convolutions on
    seven GPUs with six versions of cuDNN.
    """
    for tile, wide in itertools.product((32, 64, 128, 256), repeat=2):
        per_tile, uneven = divmod(rest - 175, -(-pixels // tile))
        across = -(-channels // wide)
        buffers, more = divmod(per_tile - 4 * across, across * (4 * tile * wide + 4))
        if buffers >= 1 and not uneven and not more:
            yield tensors, 0, tile, per_tile, 175


def grow(sizes: list[dict[str, int]], labels: list[int], members: list[int]) -> object:
    """A decision tree (CART, Gini) that gives every member its label."""
    counts = collections.Counter(labels[j] for j in members)
    if len(counts) == 1:
        return labels[members[0]]
    best = None
    for feature in FEATURES:
        order = sorted(members, key=lambda j: sizes[j][feature])
        left: collections.Counter[int] = collections.Counter()
        right = collections.Counter(counts)
        pure_left, pure_right = 0.0, float(sum(v * v for v in counts.values()))
        for done, (a, b) in enumerate(itertools.pairwise(order), 1):
            label = labels[a]
            pure_left += 2 * left[label] + 1
            pure_right -= 2 * right[label] - 1
            left[label] += 1
            right[label] -= 1
            low, high = sizes[a][feature], sizes[b][feature]
            gain = pure_left / done + pure_right / (len(order) - done)
            if low < high and (best is None or gain > best[0] + 1e-9):
                best = gain, feature, (low + high) // 2
    if best is None:
        return counts.most_common(1)[0][0]  # the same sizes, two answers: cuDNN does not do this
    _, feature, limit = best
    up_to = [j for j in members if sizes[j][feature] <= limit]
    beyond = [j for j in members if sizes[j][feature] > limit]
    return [feature, limit, grow(sizes, labels, up_to), grow(sizes, labels, beyond)]


def pick(tree: object, size: dict[str, int]) -> int:
    while isinstance(tree, list):
        tree = tree[2] if size[tree[0]] <= tree[1] else tree[3]
    return tree


def rounded(count: int | None) -> int | None:
    """Round bytes as PyTorch's allocator does."""
    return count and -(-count // 512) * 512


class Learned:
    """The result for one convolution and kind: formulas, a tree, and its score on unseen questions."""

    def __init__(self, recorder: Recorder, network: Network, rng: random.Random, step: int):
        levels = sorted(network.convolutions[recorder.conv])
        usual = network.batches[0]
        for level, side, n in itertools.product(levels, range(step, 2049, step), network.batches):
            if side >= network.smallest and side >> level:
                recorder.learn(side, side, level, n)
        pairs = [(a, b) for a in COMMON for b in COMMON if a != b][:: network.thin]
        for height, width in pairs + network.rectangles(rng, 240 // network.thin):
            recorder.learn(height, width, rng.choice(levels), usual)
        for (height, width), n in zip(network.rectangles(rng, len(network.others)), network.others, strict=True):
            recorder.learn(height, width, rng.choice(levels), n)
        self._fit(recorder)
        self.asked, self.same, self.worst = 0, 0, 0
        for height, width in network.rectangles(rng, 40):
            size, count = recorder.ask(height, width, rng.choice(levels), rng.choice(network.batches))
            formula = self.formulas[pick(self.tree, size)]
            said = formula and profiles.formula_bytes(list(formula), size)
            self.asked += 1
            self.same += rounded(said) == rounded(count)
            self.worst = max(self.worst, abs((said or 0) - (count or 0)))
        self.questions = len(recorder.sizes)

    def _fit(self, recorder: Recorder) -> None:
        self.formulas, self.tree = fitted(recorder)


def fitted(recorder: Recorder, prunes: bool = False) -> tuple[list[tuple | None], object]:
    """Formulas, and a tree of their numbers, that give a recorder's answers; prunes: with a third of them."""
    explained = explain(recorder)
    formulas = sorted(set(explained), key=lambda f: (f is None, f))
    number = {formula: i for i, formula in enumerate(formulas)}
    labels, members = [number[formula] for formula in explained], range(len(explained))
    if not prunes:
        return formulas, grow(recorder.sizes, labels, [*members])
    tree = grow(recorder.sizes, labels, [j for j in members if j % 3])
    return formulas, pruned(tree, recorder.sizes, labels, [*members[::3]])


def leaves(tree: object) -> set[int]:
    return leaves(tree[2]) | leaves(tree[3]) if isinstance(tree, list) else {tree}


def text_of(tree: object, numbers: dict[int, int]) -> str:
    """A tree as files hold it (`profiles`), with the formulas' numbers in the file."""
    if not isinstance(tree, list):
        return str(numbers[tree])
    feature, limit, *below = tree
    return " ".join([f"{feature}{limit}", *(text_of(t, numbers) for t in below)])


def random_question(rng: random.Random, gpu: Gpu) -> tuple[Shape, str, int, int]:
    """A convolution, a kind, a level that it is at and a batch."""
    network = rng.choice(networks())
    conv = rng.choice(list(network.convolutions))
    level = rng.choice(sorted(network.convolutions[conv]))
    return conv, rng.choice(network.asked(gpu)), level, rng.choice(network.batches)


def agree(cudnn: Cudnn, one: Gpu, other: Gpu, rng: random.Random) -> bool:
    """Whether two GPUs of a capability get the same answers, on 120 questions."""
    for _ in range(120):
        conv, kind, level, n = random_question(rng, one)
        height, width = (8 * rng.randint(32, 256) for _ in range(2))
        first, second = (Recorder(cudnn, gpu, conv, kind).ask(height, width, level, n)[1] for gpu in (one, other))
        if first != second:
            return False
    return True


def alike(cudnn: Cudnn, capability: str) -> list[list[Gpu]]:
    """The GPUs of a capability, those with the same answers together."""
    groups: list[list[Gpu]] = []
    for gpu in map(find_gpu, gpu_names()):
        if gpu.capability == capability:
            group = next((g for g in groups if agree(cudnn, g[0], gpu, random.Random(0))), None)
            if group is None:
                groups.append(group := [])
            group.append(gpu)
    return groups


def record(cudnn: Cudnn, gpus: list[Gpu], step: int, known: dict | None = None, only: str = "") -> dict:
    """The profile of GPUs that answer alike, or what is `known` of it with the questions that it lacks. only: of the
    networks whose name ends so."""
    profile = known or {"capability": gpus[0].capability, "cudnn": cudnn.version, "formulas": [], "convolutions": {}}
    formulas = {formula and tuple(formula): i for i, formula in enumerate(profile["formulas"])}
    trees = dict(profile["convolutions"])
    made = []
    for network in networks():
        if network.about.endswith(only):
            made += ask(cudnn, gpus, step, network, formulas, trees)
    recorded = profile.get("recorded")
    first, *added = ([recorded, *recorded.get("added", [])] if recorded else []) + made
    return {
        **profile,
        "recorded": first | ({"added": added} if added else {}),
        "formulas": [list(formula) if formula else None for formula in formulas],
        "convolutions": trees,
    }


def ask(cudnn: Cudnn, gpus: list[Gpu], step: int, network: Network, formulas: dict, trees: dict) -> list[dict]:
    """Adds a network's questions to formulas and trees where they are not there; how it went, for `recorded`."""
    totals: collections.Counter[str] = collections.Counter()
    kinds = {}
    worst = 0
    for conv in network.convolutions:
        name = ",".join(map(str, conv))
        for kind in network.asked(gpus[0]):
            if f"{name}/{kind}" in trees:
                continue
            recorder = Recorder(cudnn, gpus[0], conv, kind)
            learned = Learned(recorder, network, random.Random(name), step)  # all kinds are asked the same
            numbers = {i: formulas.setdefault(f, len(formulas)) for i, f in enumerate(learned.formulas)}
            tree = text_of(learned.tree, numbers)
            half = kind.replace("bfloat16", "float16")
            same = half != kind and tree == trees[f"{name}/{half}"]
            trees[f"{name}/{kind}"] = f"{name}/{half}" if same else tree
            kinds[kind] = None
            totals.update(
                questions=learned.questions, held_out=learned.asked, same=learned.same, untried=recorder.untried
            )
            worst = max(worst, learned.worst)
    recorded = {
        "networks": network.about,
        "kinds": list(kinds),
        "how": "asked",
        "by": "benchmarks/recording/record_profiles.py",
        "gpus": [gpu.name for gpu in gpus],
        "sizes": f"images of {network.smallest} to 2048 pixels a side: squares in steps of {step}, common and random"
        f" rectangles, batches of 1 to {max(network.batches + network.others)}",
        "questions": totals["questions"],
        "held_out": totals["held_out"],
        "held_out_same": totals["same"],
        "held_out_worst_bytes": worst,
        "answers_after_untried_engines": totals["untried"],
    }
    return [recorded] if kinds else []


PROBES, MOST = 64, 512  # questions about batches of one convolution: the first ones, and in all


def batch_size(rng: random.Random, levels: list[int]) -> tuple[int, int, int, int]:
    """Height and width of an image, a level and a batch: squares, common rectangles and others, up to 2048 pixels."""
    while True:
        side, way = 64 * rng.randint(1, 32), rng.random()
        height, width = side, side
        if way > 0.65:
            height, width = (8 * round(2 ** rng.uniform(5, 8)) for _ in range(2))
        elif way > 0.35:
            height, width = (64 * rng.randint(2, 32) for _ in range(2))
        level = rng.choice(levels)
        if max(height, width) <= 6 * min(height, width) and min(height, width) >> level:
            return height, width, level, rng.choice((2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 14, 16))


def said(profile: profiles.Profile, conv: Shape, kind: str, *where: int) -> int | None:
    """A profile's bytes for what a `Recorder` asks."""
    layout = "nhwc" if "nhwc" in kind else "nchw"
    found = profile.conv(profiles.Conv(**question(conv, kind, *where), layout=layout), "strict" not in kind)
    return found and found[0]


def single(gpu: Gpu) -> list[tuple[Network, Shape, str]]:
    """List the recordings for single images."""
    return [
        (network, conv, kind)
        for network in networks()
        for conv, kind in itertools.product(network.convolutions, network.asked(gpu))
        if network.batches == (1,)
    ]


def pruned(tree: object, sizes: list[dict[str, int]], labels: list[int], members: list[int]) -> object:
    """Removes the splits that do not help the members to get their label: these splits learnt noise."""
    if not isinstance(tree, list):
        return tree
    feature, limit, *below = tree
    parts = [[j for j in members if (sizes[j][feature] <= limit) == is_up_to] for is_up_to in (True, False)]
    kept = [feature, limit, *(pruned(t, sizes, labels, part) for t, part in zip(below, parts, strict=True))]
    if not members:
        return pick(tree, sizes[0])
    label, count = collections.Counter(labels[j] for j in members).most_common(1)[0]
    return label if count >= sum(pick(kept, sizes[j]) == labels[j] for j in members) else kept


NOISY = 0.05  # of a doubling's questions wrong: then a third of all is for pruning


def learn_batches(
    recorder: Recorder, profile: profiles.Profile, levels: list[int]
) -> tuple[list[tuple | None], object] | None:
    """Formulas and a tree for batches; None if the profile answers the first questions. Asks twice as many each time,
    until the tree so far has one in a hundred of the new ones wrong at most. Some answers on Hopper follow no size that
    trees look at; there the tree is pruned."""
    conv, kind, rng = recorder.conv, recorder.kind, random.Random(f"batches of {recorder.conv}")

    def wrong(count: int, answer: Callable[..., int | None]) -> int:
        for _ in range(count):
            recorder.learn(*batch_size(rng, levels))
        asked = zip(recorder.where[-count:], recorder.sizes[-count:], recorder.bytes[-count:], strict=True)
        return sum(rounded(answer(where, size)) != rounded(true) for where, size, true in asked)

    if not wrong(PROBES, lambda where, _: said(profile, conv, kind, *where)):
        return None
    while True:
        formulas, tree = fitted(recorder)

        def answer(_: tuple[int, ...], size: dict[str, int]) -> int | None:
            formula = formulas[pick(tree, size)]  # noqa: B023
            return formula and profiles.formula_bytes(list(formula), size)

        count = len(recorder.bytes)
        missed = wrong(count, answer)
        if (missed <= count // 100 and count > PROBES) or 2 * count >= MOST:
            return fitted(recorder, missed > NOISY * count)


def record_batches(cudnn: Cudnn, gpu: Gpu, data: dict) -> dict:
    """A profile's data with trees for batches: ``n1``, the tree and that of batches where the tree was wrong."""
    profile, trees = profiles.Profile(data), dict(data["convolutions"])
    formulas = {formula and tuple(formula): i for i, formula in enumerate(data["formulas"])}
    questions = 0
    grown: dict[str, str] = {}
    for network, conv, kind in single(gpu):
        name = f"{','.join(map(str, conv))}/{kind}"
        if name not in trees:
            continue
        recorder = Recorder(cudnn, gpu, conv, kind)
        learned = learn_batches(recorder, profile, sorted(network.convolutions[conv]))
        questions += len(recorder.bytes)
        if learned:
            own, tree = learned
            numbers = {i: formulas.setdefault(own[i], len(formulas)) for i in sorted(leaves(tree))}
            grown[name] = text_of(tree, numbers)
    for name, tree in grown.items():
        half = name.replace("bfloat16", "float16")
        if trees[name] == half and grown.get(half) == tree:
            continue  # it still refers to float16's
        trees[name] = f"n1 {resolved(data['convolutions'], name)} {tree}"
    for name, tree in data["convolutions"].items():  # others may refer to what has changed
        if tree in grown and name not in grown:
            trees[name] = resolved(data["convolutions"], name)
    about = {"questions": questions, "trees": len(grown)}
    recorded = {**data["recorded"], "batches": about}
    new = {**data, "recorded": recorded, "convolutions": trees}
    new["formulas"] = [list(formula) if formula else None for formula in formulas]
    about.update(held_out(cudnn, gpu, profiles.Profile(new), 500))
    return new


def resolved(trees: dict[str, str], name: str) -> str:
    return trees.get(trees[name], trees[name])


def held_out(cudnn: Cudnn, gpu: Gpu, profile: profiles.Profile, count: int) -> dict:
    """Test a profile on new questions: batches of 1 to 16, images up to 2048 pixels a side."""
    rng, equal, worst = random.Random(2), 0, 0
    for _ in range(count):
        told = answer = None
        while told is None or answer is None:  # the profile lacks it, or cuDNN has no engine for it
            network, conv, kind = rng.choice(single(gpu))
            height, width = (8 * rng.randint(32, 256) for _ in range(2))
            where = height, width, rng.choice(sorted(network.convolutions[conv])), rng.randint(1, 16)
            told = said(profile, conv, kind, *where)
            answer = Recorder(cudnn, gpu, conv, kind).ask(*where)[1]
        equal += rounded(told) == rounded(answer)
        worst = max(worst, abs(told - answer))
    return {"held_out": count, "held_out_same": equal, "held_out_worst_bytes": worst}


def compare(cudnn: Cudnn, gpu: Gpu, version: str, count: int = 1000) -> dict:
    """A reference to the profile of another version; SystemExit where an answer differs."""
    profile = profiles.shipped_catalogue().nearest(gpu, version)
    if profile is None or profile.version != version:
        raise SystemExit(f"--same-as: expected a version with a profile for {gpu.name}, got {version}")
    rng = random.Random(1)
    for _ in range(count):
        conv, kind, level, n = random_question(rng, gpu)
        side = 64 * rng.randint(4, 32)
        answer = Recorder(cudnn, gpu, conv, kind).ask(side, side, level, n)[1]
        asked = profiles.Conv(**question(conv, kind, side, side, level, n), layout="nhwc" if "nhwc" in kind else "nchw")
        known = profile.conv(asked, "strict" not in kind)
        if (known and known[0]) != answer:
            raise SystemExit(
                f"{gpu.name}: {conv} {kind} at {side} (level {level}): {version} says {known}, this says {answer}"
            )
    return {"same_as": profile.file, "cudnn": cudnn.version, "same_answers": count}


def write(profile: dict, path: str) -> None:
    """One line a formula table and a convolution, so that a difference can be read."""
    head = {key: profile[key] for key in ("capability", "cudnn", "recorded")}
    lines = [f' "{key}": {json.dumps(value)},' for key, value in head.items()]
    lines.append(f' "formulas": {json.dumps(profile["formulas"], separators=(",", ":"))},')
    lines.append(' "convolutions": {')
    lines.append(",\n".join(f'  "{key}": "{tree}"' for key, tree in profile["convolutions"].items()))
    with open(path, "w", encoding="utf-8") as file:
        file.write("{\n" + "\n".join(lines) + "\n }\n}\n")


def recorded_files(cudnn: Cudnn, folder: str, capability: str | None) -> Iterator[tuple[str, dict]]:
    """Yields path and data of a version's files, of one capability or all. Skips references to other files."""
    for name, (sm, _, number) in sorted(profiles.profile_files().items()):
        path = os.path.join(folder, name)
        if number != profiles.version_number(cudnn.version) or (capability and str(sm) != capability.replace(".", "")):
            continue
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        if "same_as" not in known:
            yield path, known


def add(cudnn: Cudnn, folder: str, capability: str | None, step: int, only: str) -> None:
    """The questions that the files of a version lack."""
    for path, known in recorded_files(cudnn, folder, capability):
        first = known["recorded"]["gpus"][0]
        groups = alike(cudnn, known["capability"])
        profile = record(cudnn, next(g for g in groups if first in [gpu.name for gpu in g]), step, known, only)
        write(profile, path)
        print(path, profile["recorded"].get("added", [])[-1:], flush=True)


def add_batches(cudnn: Cudnn, folder: str, capability: str | None) -> None:
    """Trees for batches, to the files of a version that have none."""
    for path, known in recorded_files(cudnn, folder, capability):
        if "batches" not in known["recorded"]:
            profile = record_batches(cudnn, find_gpu(known["recorded"]["gpus"][0]), known)
            write(profile, path)
            print(path, profile["recorded"]["batches"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cudnn", help="libcudnn.so.9 or its folder; the installed one by default")
    parser.add_argument("--capability", help="comma-separated; all that gpus.json has by default")
    parser.add_argument("--step", type=int, default=32, help="of the squares' sides, in pixels")
    parser.add_argument(
        "--same-as", metavar="VERSION", help="refer to this version's profiles where the answers are the same"
    )
    parser.add_argument("--add", action="store_true", help="what the version's files lack, of one --capability or all")
    parser.add_argument("--batches", action="store_true", help="batches, in the version's files that have none")
    parser.add_argument("--only", default="", metavar="NAMES_END", help='with --add: "frames\' VAEs", of some networks')
    parser.add_argument("--out", default="vaemem/data/profiles")
    arguments = parser.parse_args()
    try:
        cudnn = Cudnn(arguments.cudnn or find_cudnn())
    except OSError as error:
        sys.exit(str(error))
    if arguments.add:
        return add(cudnn, arguments.out, arguments.capability, arguments.step, arguments.only)
    if arguments.batches:
        return add_batches(cudnn, arguments.out, arguments.capability)
    every = dict.fromkeys(find_gpu(name).capability for name in gpu_names())
    for capability in arguments.capability.split(",") if arguments.capability else every:
        try:
            groups = alike(cudnn, capability)
            for gpus in groups:
                name = "-".join([f"sm{gpus[0].sm}", *(gpu.key for gpu in gpus if len(groups) > 1)])
                path = os.path.join(arguments.out, f"{name}_cudnn{cudnn.version}.json")
                if arguments.same_as:
                    profile = compare(cudnn, gpus[0], arguments.same_as)
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(json.dumps(profile) + "\n")
                else:
                    profile = record(cudnn, gpus, arguments.step)
                    write(profile, path)
                print(path, profile.get("recorded", profile), flush=True)
        except RuntimeError as error:  # this cuDNN does not answer for this device
            print(f"{capability}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
