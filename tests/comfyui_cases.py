"""Random cards, models and requests for ComfyUI's memory management: the same numbers on every machine.

tests/comfyui_oracle.py runs ComfyUI's own code on them, and tests/test_comfyui.py the rules of vaemem.
"""

import hashlib
import itertools
from typing import NamedTuple

CASES = 200
MIB = 1 << 20
VAES = {"AutoencoderKL": (), "WanVAE": (1,), "Flux2": ()}  # and the frames of their images
SHAPES = [(1, 4, 64, 64), (2, 4, 128, 128), (3, 16, 131, 77), (4, 16, 96, 160), (1, 16, 1, 1)]


def with_frames(shape, vae):
    """A shape as a VAE of a class takes it."""
    return *shape[:2], *VAES[vae], *shape[2:]


class Random:
    """A linear congruential generator (Knuth's MMIX)."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (6364136223846793005 * self.state + 1442695040888963407) % 2**64
        return (self.state >> 33) % n

    def size(self):
        """A multiple of 2, each power of two up to 1 GiB as likely."""
        return 2 * (1 + self.below(1 << self.below(30)))


class Case(NamedTuple):
    """models: (layers as (bytes, whether it casts), bytes in no layer, references more) of each, named a, b, c.
    requests: (model, bytes needed, least bytes or None, whether whole)."""

    card: int
    reserved: int
    state: str
    smart: bool
    models: list
    requests: list


def make_case(number):
    random = Random(number * 7919 + 17)
    models = []
    for _ in range(2 + random.below(3)):
        count, unit = 1 + random.below(12), MIB * (1 + random.below(80)) if random.below(3) else random.size() // 8
        layers = [(2 * (1 + unit * random.below(16)), random.below(8) > 0) for _ in range(count)]
        if random.below(2):  # layers of any size, and equal ones, as blocks have
            layers += [(random.size(), random.below(8) > 0) for _ in range(1 + random.below(4))]
            layers += layers[: 1 + random.below(4)] * (1 + random.below(3))
        models.append((layers, random.size() // 64 if random.below(3) == 0 else 0, random.below(3)))
    whole = sum(size for layers, *_ in models for size, _ in layers)
    reserved = [400 * MIB, 400 * MIB, 700 * MIB, random.size()][random.below(4)]
    card = reserved + 820 * MIB + random.below(256 * MIB + whole * 5 // 4)
    requests = []
    for _ in range(3 + random.below(5)):
        needed = random.size() if random.below(2) else random.below(1 + card)
        least = needed // 2 if random.below(2) else None
        requests.append((random.below(len(models)), needed, least, random.below(10) == 0))
    return Case(card, reserved, "novram" if random.below(12) == 0 else "normal", random.below(12) > 0, models, requests)


def name(model):
    return "abcd"[model]


def layer_name(index):
    return f"layer{index}"


def line(case, step, models):
    """A line of the golden file. models: (name, bytes counted, bytes there), the last requested first."""
    return " ".join([f"{case}.{step}", *(f"{name}:{loaded}/{there}" for name, loaded, there in models)])


def decode_line(name, size, steps):
    """A line for a decode's steps (kind, number, bytes), with frees that follow each other in their numbers' order."""
    groups = itertools.groupby((step[:3] for step in steps), lambda step: step[0] == "give")
    ordered = [step for are_gives, group in groups for step in (sorted(group) if are_gives else group)]
    digest = hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]
    return f"decode {name} {'x'.join(map(str, size))} {len(ordered)} steps {digest}"


class Asked(NamedTuple):
    """What a release of ComfyUI is asked besides random cases.

    used: classes of denoisers, and dtypes, for estimates
    vaes: classes of VAEs, for estimates
    decoded, decodes: VAEs, and their latents' (images, height, width) with the pixels of a tile's side
    pipelines: whole workflows, and the shapes of their latents; each workflow runs twice
    cards: their bytes
    converts: whether the manager knows which models compute in another dtype
    """

    used: list
    vaes: list
    decoded: list
    decodes: list
    pipelines: dict
    cards: list
    converts: bool = False


def _cards(*sizes):
    return [round(size * 2**30) for size in sizes]


ASKED = {
    "0.3.64": Asked(
        [("SD15", "float16"), ("SDXL", "float16"), ("SDXL", "float32"), ("Flux", "bfloat16"), ("Flux", "float16"),
         ("QwenImage", "bfloat16")], ["AutoencoderKL", "WanVAE"],
        ["sdxl", "flux", "qwen-image"], [(1, 64, 48, 0), (2, 40, 66, 0), (3, 33, 20, 0), (1, 40, 72, 256)],
        {"sd15": (1, 4, 64, 64), "sdxl": (1, 4, 128, 128), "flux": (2, 16, 128, 128),
         "qwen-image": (1, 16, 1, 160, 104)}, _cards(1.4, 3.5, 5.5, 7.5, 11.3, 23),
    ),
    "0.8.0": Asked(
        [("Flux2", "bfloat16"), ("ZImage", "bfloat16")], ["Flux2"],
        ["flux2"], [(1, 64, 48, 0), (2, 40, 66, 0), (3, 34, 20, 0), (1, 80, 144, 512)],
        {"flux2": (1, 128, 64, 64), "zimage": (2, 16, 128, 128)},
        _cards(5.5, 7.5, 11.3, 23, 31, 47, 79, 110), converts=True,
    ),
}  # fmt: skip
ROLES = "text_encoder", "denoiser", "vae"
