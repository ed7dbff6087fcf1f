"""Random cards, models and requests for ComfyUI's memory management: the same numbers on every machine.

tests/comfyui_oracle.py runs ComfyUI's own code on them, and tests/test_comfyui.py the rules of vaemem.
"""

import hashlib
import itertools
from typing import NamedTuple

CASES, HIGH_CASES = 200, 60  # the second ones with --highvram
MIB = 1 << 20
ROLES = "text_encoder", "transformer", "vae"
SIZES = [(1, 1, 64, 64), (3, 1, 76, 132), (2, 1, 128, 96)]  # of latents: images, frames, height, width
VIDEOS = [(1, 5, 32, 32), (1, 1, 40, 64), (1, 9, 60, 104)]
WORKFLOWS = {
    **dict.fromkeys(("sd15", "sdxl", "flux", "qwen-image", "flux2", "zimage-turbo", "krea2-turbo"), SIZES),
    "wan-1.3b": VIDEOS,
}
DECODED = {"sdxl": "sdxl", "flux": "flux", "qwen-image": "qwen-image", "flux2": "flux2-small"}  # workflows, their VAEs
DECODES = [(1, 64, 48, 0), (2, 40, 66, 0), (3, 34, 20, 0), (1, 80, 144, 512)]  # (images, height, width, tile's pixels)


def cards_of(weights):
    """Bytes of cards for models with these bytes."""
    return [1230 * MIB + weights * percent // 100 for percent in (2, 20, 45, 80, 120)]


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
    requests: (model, bytes needed, least bytes or None, whether whole). stays: numbers of models that
    stay on the card."""

    card: int
    reserved: int
    state: str
    smart: bool
    models: list
    requests: list
    stays: set


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
    state, smart, stays = "novram" if random.below(12) == 0 else "normal", random.below(12) > 0, set()
    if number >= CASES:
        state, stays = "highvram", {i for i in range(len(models)) if random.below(2)}
    return Case(card, reserved, state, smart, models, requests, stays)


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


def estimate_line(name, size, *estimates):
    """A line for a workflow's estimates: of its denoiser for two prompts, for one, and of its decode."""
    return f"{name} {'x'.join(map(str, size))} {' '.join(map(repr, map(float, estimates)))}"
