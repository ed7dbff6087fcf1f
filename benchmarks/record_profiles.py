"""Records cuDNN's workspaces for the VAEs' convolutions as profile files, with no GPU.

    python benchmarks/record_profiles.py [--cudnn FOLDER] [--capability 8.9,9.0] [--step 32]
    python benchmarks/record_profiles.py --cudnn FOLDER --capability 8.9 --same-as 9.10.2
    python benchmarks/record_profiles.py --cudnn FOLDER --add

For each compute capability: asks an installed cuDNN (9.8 or later) for every convolution of the SD, SDXL and FLUX VAEs
at every square image up to 2048 pixels in steps of 32, at pairs of common sides, at random rectangles and batches;
explains each answer by a formula; learns the decision tree that picks the formula; and checks it against questions that
it has not seen. About three minutes for each capability. With --same-as it asks for the squares of a profile of another
version, and writes a reference to that profile where every answer is the same. With --add it goes through the files of
the version, keeps what they have and adds the kinds of question that they lack.
"""

import argparse
import collections
import itertools
import json
import os
import random
import re
import sys

from vaemem.prediction import profiles
from vaemem.prediction.cudnn import InstalledCudnn
from vaemem.prediction.gpus import Gpu, find_gpu, gpu_names

COMMON = (512, 576, 640, 704, 720, 768, 832, 896, 960, 1024, 1088, 1152, 1216, 1280, 1344, 1536, 1664, 1920, 2048)
KINDS = (
    "float16", "bfloat16", "float32", "float16 nhwc", "bfloat16 nhwc", "float32 nhwc", "float32 strict",
    "float32 strict nhwc",
)  # fmt: skip
FEATURES = ("P", "h", "w", "m")
TENSORS = ("", "i+o+f", "i+f", "i+o", "I+O+F", "I+F", "i", "o", "f", "9i")


def kinds(gpu: Gpu) -> list[str]:
    """What is asked of a GPU: before compute capability 8.0 there is neither bfloat16 nor TF32."""
    return [kind for kind in KINDS if gpu.sm >= 80 or not ("bfloat16" in kind or "strict" in kind)]


def convolutions() -> dict[tuple[int, int, int, int, int], set[int]]:
    """{(c, k, r, stride, padding): levels}: a level's input side is the image's shifted right by it."""
    found: dict[tuple[int, int, int, int, int], set[int]] = collections.defaultdict(set)

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


class Recorder:
    """Asks about one convolution and kind on one GPU, and remembers."""

    def __init__(self, cudnn: InstalledCudnn, gpu: Gpu, conv: tuple[int, int, int, int, int], kind: str):
        self.cudnn, self.gpu, self.conv, self.kind = cudnn, gpu, conv, kind
        self.sizes: list[dict[str, int]] = []
        self.bytes: list[int | None] = []
        self.engines: list[str] = []
        self.untried = 0

    def ask(self, height: int, width: int, level: int, n: int = 1) -> tuple[dict[str, int], int | None, str]:
        """Of an image's height and width."""
        c, k, r, stride, padding = self.conv
        h, w = (height >> level) + (stride == 2), (width >> level) + (stride == 2)  # padded by one before a stride of 2
        dtype = self.kind.split()[0]
        question = dict(dtype=dtype, n=n, c=c, h=h, w=w, k=k, r=r, stride=stride, padding=padding)
        settings = {"nhwc": "nhwc" in self.kind, "tf32": "strict" not in self.kind}
        plan = self.cudnn.conv(self.gpu.device_json, **question, **settings)
        self.untried += plan["untried"] if plan else 0
        return profiles.sizes(profiles.Conv(**question)), plan and plan["bytes"], plan["engine"] if plan else ""

    def learn(self, height: int, width: int, level: int, n: int = 1) -> None:
        size, count, engine = self.ask(height, width, level, n)
        self.sizes.append(size)
        self.bytes.append(count)
        self.engines.append(engine)


def rectangles(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Half of them of any size and shape, half of the sizes that people use."""
    any_size = [(8 * round(2 ** rng.uniform(0, 8)), 8 * round(2 ** rng.uniform(0, 8))) for _ in range(count // 2)]
    return any_size + [(8 * rng.randint(32, 256), 8 * rng.randint(32, 256)) for _ in range(count - count // 2)]


def explain(recorder: Recorder) -> list[tuple | None]:
    """A formula for every answer, as few as a greedy cover finds; None where cuDNN has no engine."""
    sizes, answers = recorder.sizes, recorder.bytes
    cover: dict[tuple | None, set[int]] = collections.defaultdict(set)
    split: dict[str, list[int]] = collections.defaultdict(list)
    for j, (s, count) in enumerate(zip(sizes, answers, strict=True)):
        if count is None:
            cover[None].add(j)
            continue
        for tensors in TENSORS:
            rest = count - profiles.formula_bytes([tensors, 0, 0, 0, 0], s)
            if rest < 0:
                continue
            cover[tensors, 0, 0, 0, rest].add(j)
            for index in (6, 12):  # an index buffer of precomputed offsets
                more = rest - profiles.formula_bytes(["", index, 0, 0, 0], s)
                if 0 <= more <= 128:
                    cover[tensors, index, 0, 0, more].add(j)
        if "_k17=" in recorder.engines[j]:  # split along the reduction: partial sums for each tile of pixels
            split[re.sub(r"_k(13|14|15|18|22|23)=-?\d+", "", recorder.engines[j])].append(j)
    for group in split.values():
        for tensors in ("i+o+f", "i+f", "I+O+F", "I+F"):
            for tile in (256, 128, 64, 32, 16):
                formula = _line(recorder, group, tensors, tile)
                if formula:
                    cover[formula].update(group)
    formulas: list[tuple | None] = [None] * len(answers)
    left = set(range(len(answers)))
    while left:  # most answers explained first; of equals, the smaller constants
        best = max(cover, key=lambda f: (len(cover[f] & left), (-f[4], -f[3]) if f else (0, 0)))
        for j in cover[best] & left:
            formulas[j] = best
        left -= cover[best]
    return formulas


def _line(recorder: Recorder, group: list[int], tensors: str, tile: int) -> tuple | None:
    """The formula of answers that grow by the same for each tile of pixels."""
    points: dict[int, set[int]] = collections.defaultdict(set)
    for j in group:
        s = recorder.sizes[j]
        points[-(-s["P"] // tile)].add(recorder.bytes[j] - profiles.formula_bytes([tensors, 0, 0, 0, 0], s))
    if len(points) < 3 or any(len(rests) > 1 for rests in points.values()):
        return None
    line = sorted((tiles, min(rests)) for tiles, rests in points.items())
    (first, low), (last, high) = line[0], line[-1]
    step, uneven = divmod(high - low, last - first)
    if uneven or step < 0 or any(rest != low + step * (tiles - first) for tiles, rest in line):
        return None
    return (tensors, 0, tile, step, low - step * first)


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
    """As PyTorch's allocator rounds it."""
    return count and -(-count // 512) * 512


class Learned:
    """What one convolution and kind comes to: formulas, a tree, and how it did on unseen questions."""

    def __init__(self, recorder: Recorder, levels: set[int], rng: random.Random, step: int):
        for level in sorted(levels):
            for side in range(step, 2049, step):
                if side >> level:
                    recorder.learn(side, side, level)
        pairs = [(a, b) for a in COMMON for b in COMMON if a != b]
        for height, width in rng.sample(pairs, 120) + rectangles(rng, 240):
            recorder.learn(height, width, rng.choice(sorted(levels)))
        for batch in (2, 2, 2, 2, 3, 4, 4, 4, 8, 8):
            recorder.learn(8 * rng.randint(8, 128), 8 * rng.randint(8, 128), rng.choice(sorted(levels)), batch)
        self._fit(recorder)
        self.asked, self.same, self.worst = 0, 0, 0
        for height, width in rectangles(rng, 40):
            size, count, _ = recorder.ask(height, width, rng.choice(sorted(levels)))
            formula = self.formulas[pick(self.tree, size)]
            said = formula and profiles.formula_bytes(list(formula), size)
            self.asked += 1
            self.same += rounded(said) == rounded(count)
            self.worst = max(self.worst, abs((said or 0) - (count or 0)))
        self.questions = len(recorder.sizes)

    def _fit(self, recorder: Recorder) -> None:
        explained = explain(recorder)
        self.formulas = sorted(set(explained), key=lambda f: (f is None, f))
        number = {formula: i for i, formula in enumerate(self.formulas)}
        labels = [number[formula] for formula in explained]
        self.tree = grow(recorder.sizes, labels, list(range(len(labels))))


def relabel(tree: object, numbers: dict[int, int]) -> object:
    return [*tree[:2], *(relabel(t, numbers) for t in tree[2:])] if isinstance(tree, list) else numbers[tree]


def agree(cudnn: InstalledCudnn, one: Gpu, other: Gpu, rng: random.Random) -> bool:
    """Whether two GPUs of a capability get the same answers, on 60 questions."""
    convs = convolutions()
    for _ in range(60):
        conv = rng.choice(list(convs))
        kind = rng.choice(kinds(one))
        ((height, width),) = rectangles(rng, 1)
        level = rng.choice(sorted(convs[conv]))
        first, second = (Recorder(cudnn, gpu, conv, kind).ask(height, width, level)[1] for gpu in (one, other))
        if first != second:
            return False
    return True


def alike(cudnn: InstalledCudnn, capability: str) -> list[list[Gpu]]:
    """The GPUs of a capability, those with the same answers together."""
    groups: list[list[Gpu]] = []
    for gpu in map(find_gpu, gpu_names()):
        if gpu.capability == capability:
            group = next((g for g in groups if agree(cudnn, g[0], gpu, random.Random(0))), None)
            if group is None:
                groups.append(group := [])
            group.append(gpu)
    return groups


def record(cudnn: InstalledCudnn, gpus: list[Gpu], step: int, known: dict | None = None) -> dict:
    """The profile of GPUs that answer alike, or what is `known` of it with the kinds that it lacks."""
    rng = random.Random(0)
    formulas = {formula and tuple(formula): i for i, formula in enumerate(known["formulas"])} if known else {}
    trees = dict(known["convolutions"]) if known else {}
    missing = [kind for kind in kinds(gpus[0]) if not any(key.endswith(f"/{kind}") for key in trees)]
    totals: collections.Counter[str] = collections.Counter()
    worst = 0
    for conv, levels in convolutions().items():
        name = ",".join(map(str, conv))
        for kind in missing:
            recorder = Recorder(cudnn, gpus[0], conv, kind)
            learned = Learned(recorder, levels, rng, step)
            numbers = {i: formulas.setdefault(f, len(formulas)) for i, f in enumerate(learned.formulas)}
            tree = relabel(learned.tree, numbers)
            half = kind.replace("bfloat16", "float16")
            same = half != kind and tree == trees[f"{name}/{half}"]
            trees[f"{name}/{kind}"] = f"{name}/{half}" if same else tree
            totals.update(
                questions=learned.questions, held_out=learned.asked, same=learned.same, untried=recorder.untried
            )
            worst = max(worst, learned.worst)
    recorded = {
        "how": "asked",
        "by": "benchmarks/record_profiles.py",
        "gpus": [gpu.name for gpu in gpus],
        "sizes": f"images up to 2048 pixels a side: squares in steps of {step}, common and random rectangles",
        "questions": totals["questions"],
        "held_out": totals["held_out"],
        "held_out_same": totals["same"],
        "held_out_worst_bytes": worst,
        "answers_after_untried_engines": totals["untried"],
    }
    return {
        "capability": gpus[0].capability,
        "cudnn": cudnn.version,
        "recorded": known["recorded"] | {"added": {"kinds": missing, **recorded}} if known else recorded,
        "formulas": [list(formula) if formula else None for formula in formulas],
        "convolutions": trees,
    }


def compare(cudnn: InstalledCudnn, gpu: Gpu, version: str, count: int = 1000) -> dict:
    """A reference to the profile of another version; SystemExit where an answer differs."""
    profile = profiles.nearest_profile(gpu, version)
    if profile is None or profile.version != version:
        raise SystemExit(f"--same-as: want a version with a profile for {gpu.name}, got {version}")
    rng = random.Random(1)
    convs = convolutions()
    for _ in range(count):
        conv = rng.choice(list(convs))
        kind = rng.choice(kinds(gpu))
        side = 64 * rng.randint(1, 32)
        size, answer, _ = Recorder(cudnn, gpu, conv, kind).ask(side, side, level := rng.choice(sorted(convs[conv])))
        c, k, r, stride, padding = conv
        layout = "nhwc" if "nhwc" in kind else "nchw"
        question = profiles.Conv(kind.split()[0], 1, c, size["h"], size["w"], k, r, stride, padding, layout)
        known = profile.conv(question, "strict" not in kind)
        if (known and known[0]) != answer:
            raise SystemExit(
                f"{gpu.name}: {conv} {kind} at {side} (level {level}): {version} says {known}, this says {answer}"
            )
    return {"same_as": profile.file, "cudnn": cudnn.version, "same_answers": count}


def write(profile: dict, path: str) -> None:
    """One line a formula table and a convolution, so that a difference can be read."""
    dump = lambda value: json.dumps(value, separators=(",", ":"))  # noqa: E731
    head = {key: profile[key] for key in ("capability", "cudnn", "recorded")}
    lines = [f' "{key}": {json.dumps(value)},' for key, value in head.items()]
    lines.append(f' "formulas": {dump(profile["formulas"])},')
    lines.append(' "convolutions": {')
    lines.append(",\n".join(f'  "{key}": {dump(tree)}' for key, tree in profile["convolutions"].items()))
    with open(path, "w", encoding="utf-8") as file:
        file.write("{\n" + "\n".join(lines) + "\n }\n}\n")


def add(cudnn: InstalledCudnn, folder: str, capability: str | None, step: int) -> None:
    """The kinds of question that the files of a version lack, asked of their first GPU."""
    for name, (sm, _, number) in sorted(profiles.profile_files().items()):
        path = os.path.join(folder, name)
        if number != profiles.version_number(cudnn.version) or (capability and str(sm) != capability.replace(".", "")):
            continue
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        if "same_as" not in known:
            profile = record(cudnn, [find_gpu(name) for name in known["recorded"]["gpus"]], step, known)
            write(profile, path)
            print(path, profile["recorded"]["added"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cudnn", help="libcudnn.so.9 or its folder; the installed one by default")
    parser.add_argument("--capability", help="comma-separated; all that gpus.json has by default")
    parser.add_argument("--step", type=int, default=32, help="of the squares' sides, in pixels")
    parser.add_argument(
        "--same-as", metavar="VERSION", help="refer to this version's profiles where the answers are the same"
    )
    parser.add_argument("--add", action="store_true", help="what the version's files lack, of one --capability or all")
    parser.add_argument("--out", default="vaemem/data/profiles")
    arguments = parser.parse_args()
    path = arguments.cudnn
    if path and os.path.isdir(path):
        path = os.path.join(path, "libcudnn.so.9")
    cudnn = InstalledCudnn(path)
    if cudnn.version is None:
        sys.exit(cudnn.reason)
    if arguments.add:
        return add(cudnn, arguments.out, arguments.capability, arguments.step)
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
