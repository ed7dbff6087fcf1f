"""Random cards, models and nodes for ComfyUI's dynamic memory management: the same numbers on every machine.

tests/comfyui_dynamic_oracle.py runs ComfyUI and comfy-aimdo on them, and tests/test_comfyui_dynamic.py the rules of
vaemem. PyTorch takes multiples of 2 MiB from the driver, which are what its own allocator takes.
"""

import hashlib
from typing import NamedTuple

from comfyui_cases import Random

COUNT, MIB = 200, 1 << 20
HEADROOMS = [256 * MIB] * 5 + [0, 100 * MIB, 600 * MIB]
EXTRAS = [0] * 5 + [64 * MIB, 400 * MIB, 33 * MIB + 5]
LAYER, PLAIN, OWN = "layer", "plain", "own"  # of comfy.ops; of PyTorch; of comfy.ops with one more parameter
BLOCK, TABLE = "block", "table"  # a parameter with layers around; a buffer


class Paging(NamedTuple):
    """A case.

    models: modules of each model: (kind, inputs, outputs, whether it has a bias, bytes per element)
    nodes: (model, steps, calls); a call has numbers of layers and the bytes of PyTorch; instead of calls, the bytes
    that PyTorch holds while all layers are called one by one
    """

    capacity: int
    free: int
    native: bool
    headroom: int
    extra: int
    models: list
    nodes: list


def make_modules(random):
    """Modules of a model: small ones, large ones and equal ones."""
    unit = [MIB // 8, 2 * MIB, 12 * MIB, 48 * MIB, 48 * MIB][random.below(5)]  # elements
    modules = []
    for _ in range(3 + random.below(9)):
        kind = ([LAYER] * 8 + [PLAIN, OWN, BLOCK, TABLE])[random.below(12)]
        size = random.size() // 8 if random.below(4) == 0 or kind in (PLAIN, TABLE) else 1 + random.below(unit)
        outputs = [1, 7, 64, 1000][random.below(4)]
        modules.append((kind, max(1, size // outputs), outputs, random.below(2) > 0, [2, 2, 4][random.below(3)]))
    return modules + modules[: random.below(5)] * random.below(9)


def module_name(number):
    return f"blocks.{number}"


def shapes_of(modules):
    """(name, shape, bytes per element) of each weight, as vaemem takes them; and the names of PyTorch's modules."""
    weights, plain = [], []
    for number, (kind, inputs, outputs, has_bias, width) in enumerate(modules):
        name = module_name(number)
        if kind == TABLE:
            weights.append((f"{name}.table", (inputs,), width))
            continue
        if kind == BLOCK:
            weights += [(f"{name}.scale", (outputs, 3), width), (f"{name}.weight", (outputs,), width)]
            name += ".inner"
        weights.append((f"{name}.weight", (outputs, inputs), width))
        weights += [(f"{name}.bias", (outputs,), width)] * has_bias
        weights += [(f"{name}.extra", (5, 1000), width)] * (kind == OWN)
        plain += [name] * (kind == PLAIN)
    return weights, plain


def layers_of_modules(modules):
    """Names of the layers that may be sent, in the order of the modules; also those that turn out to be small."""
    kinds = {LAYER: "", OWN: "", BLOCK: ".inner"}
    return [module_name(i) + kinds[one[0]] for i, one in enumerate(modules) if one[0] in kinds]


def make_calls(random, modules, most, native):
    """The calls of a step. Half of the models call their layers in order; some calls send several layers at once.
    Without native, what PyTorch holds comes and goes."""
    layers = layers_of_modules(modules)
    order = list(range(len(layers)))
    if random.below(2):
        order = [order.pop(random.below(len(order))) for _ in range(len(order))]
    order += order[: random.below(3)] * (random.below(4) == 0)
    calls, held, grouped = [], 0, random.below(3) == 0
    while order:
        count = 1 + random.below(3) if grouped else 1
        if random.below(3) == 0:
            held = 2 * MIB * random.below(1 + most // (2 * MIB))
            if random.below(2):
                calls.append(([], held))
                held = held // 2 // (2 * MIB) * 2 * MIB if random.below(2) else held
        calls.append((list(dict.fromkeys(order[:count])), held))
        order = order[count:]
    return [*calls, ([], 0)]


def make_paging(number):
    """A case. Its models are named a, b and c."""
    random = Random(number * 6007 + 11)
    models = [make_modules(random) for _ in range(1 + random.below(3))]
    total = sum(o * (i + 1) * w for modules in models for _, i, o, _, w in modules)
    capacity = 600 * MIB + random.below(512 * MIB) + total * random.below(16) // 16
    others = [0, 2 * MIB, 300 * MIB, random.below(400 * MIB)][random.below(4)]
    native, headroom, extra = random.below(2) > 0, *(one[random.below(8)] for one in (HEADROOMS, EXTRAS))
    nodes = []
    for _ in range(2 + random.below(3)):
        model = random.below(len(models))
        most = random.below(capacity * [1, 2, 5, 10][random.below(4)] // 10)
        nodes.append(("abc"[model], 1 + random.below(4), make_calls(random, models[model], most, native)))
    return Paging(capacity, capacity - others, native, headroom, extra, models, nodes)


REAL = {
    "sd15": [2.2, 1.4], "sdxl": [7.5, 4.5, 3], "flux": [23.5, 11.5, 7.5], "flux-schnell": [15.5],
    "qwen-image": [47, 23.5, 11.5], "flux2": [79, 31.5, 15.5], "zimage": [15.5, 11.5, 5.5], "krea2-turbo": [31.5, 11.5],
}  # fmt: skip
# Steps, and bytes of PyTorch.
ROLES = {"text_encoder": (2, 300 * MIB), "transformer": (4, 800 * MIB), "vae": (1, 600 * MIB)}


def make_workflows():
    """Yield a name and a case for ComfyUI's own models, on cards of so many GiB: a text encoder, a denoiser and a VAE,
    and the first two again."""
    for name, cards in REAL.items():
        for card in cards:
            nodes = [(role, *ROLES[role]) for role in (*ROLES, "text_encoder", "transformer")]
            capacity = round(card * 1024) * MIB
            yield name, Paging(capacity, capacity - 450 * MIB, card % 1 == 0, 256 * MIB, 0, list(ROLES), nodes)


def number_calls(calls, count):
    """The calls of a node, with numbers of layers."""
    return calls if isinstance(calls, list) else [([], calls), *(([layer], calls) for layer in range(count))]


def stage_line(label, name, places, forced):
    """A line for a staged model. places: (first byte, bytes) of each layer by name, in the order of the space."""
    end = max((first + size for first, size in places.values()), default=0)
    word = hashlib.sha256(repr([(one, *place) for one, place in places.items()]).encode()).hexdigest()[:12]
    return f"{label} {name} {len(places)} layers in {end} bytes {word}, forces {forced}"


def node_line(label, number, pages, first, last, buffers, failure):
    """A line for a node. pages: of the models that were loaded, by name."""
    there = " ".join(f"{name}:{pages[name]}" for name in sorted(pages))
    sizes = "+".join(str(size >> 20) for size in buffers)
    return f"{label}.{number} {there} sends {first}, {last} buffers {sizes} {failure}".strip()
