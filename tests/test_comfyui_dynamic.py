"""ComfyUI's dynamic memory management, as vaemem has it, compared with the decisions of ComfyUI and comfy-aimdo.

All random cases are compared, and all numbers must be equal. The cases leave out three things. PyTorch asks the driver
for multiples of 2 MiB, as its own allocator does: the bytes that CUDA's pool takes for a smaller request are unknown.
Other programs hold the same bytes throughout. No weight has another type in its file, and none has a patch.
"""

import os
import re
from pathlib import Path

import comfyui_dynamic_cases as cases
import pytest
from test_comfyui import ask_comfyui, request_of

from vaemem.pipelines.comfyui_dynamic import CHUNK_BYTES, HEADROOM, PAGE_BYTES, least_free, page_nodes, stage_weights
from vaemem.pipelines.comfyui_run import stage_part

pytestmark = pytest.mark.python

GOLDEN = Path(__file__).parent / "comfyui_decisions_dynamic_0.33.0.txt"


def play(label, case, models, layers):
    """Yield the lines of a case, as the oracle prints them. layers: names of those that calls may name, by model."""
    nodes = []
    for name, steps, calls in case.nodes:
        names, places = layers[name], models[name].places
        numbered = cases.number_calls(calls, len(names))
        nodes.append((name, steps, [([names[i] for i in one if names[i] in places], held) for one, held in numbered]))
    loaded = set()
    found = page_nodes(models, nodes, case.capacity, case.free, case.native, case.headroom, case.extra)
    for step, ((name, *_), node) in enumerate(zip(nodes, found, strict=False)):
        if name not in loaded:
            loaded.add(name)
            yield cases.stage_line(label, name, models[name].places, models[name].forced)
        pages = {one: node.pages[one] for one in loaded}
        yield cases.node_line(label, step, pages, node.first, node.last, node.buffers, node.failure)


def stage_case(case):
    """The staged models of a random case, by name."""
    shapes = [cases.shapes_of(modules) for modules in case.models]
    return {name: stage_weights(weights, plain=plain) for name, (weights, plain) in zip("abc", shapes, strict=False)}


def play_random(number):
    case = cases.make_paging(number)
    layers = {name: cases.layers_of_modules(one) for name, one in zip("abc", case.models, strict=False)}
    return play(number, case, stage_case(case), layers)


def play_workflow(name):
    """A workflow on its cards, with the weights that were recorded."""
    request = request_of(name)
    models = {role: stage_part(request.part(role)) for role in cases.ROLES}
    for pipeline, case in cases.make_workflows():
        if pipeline == name:
            called = {role: staged.called for role, staged in models.items()}
            yield from play(f"{name}@{case.capacity >> 20}", case, models, called)


def golden(kinds):
    """The golden file's lines that begin with one of these words."""
    return [line for line in GOLDEN.read_text("utf-8").splitlines() if re.split(r"\.\d+ |[ @]", line)[0] in kinds]


def test_the_decisions_are_comfyuis():
    found = [line for number in range(cases.COUNT) for line in play_random(number)]
    assert found == golden({*map(str, range(cases.COUNT))})


@pytest.mark.parametrize("name", cases.REAL)
def test_the_decisions_for_a_workflow_are_comfyuis(name):
    assert [*play_workflow(name)] == golden({name})


MIB, GIB = 1 << 20, 1 << 30
LAYERS = tuple(f"layer{i}" for i in range(8))  # a page each
MODEL = stage_weights([(f"{name}.weight", (16 << 20,), 2) for name in LAYERS])
STEP = [((name,), 0) for name in LAYERS]


def test_layers_have_places_in_order_of_their_bytes():
    """Layers of 16 KiB and less are forced, those below 64 KiB come first, equal ones by name."""
    sizes = {"small": 8 << 10, "edge": 8193, "large": 1 << 20, "middle": 20 << 10, "b": 100_000, "a": 100_000}
    staged = stage_weights(((f"{name}.weight", (size,), 2) for name, size in sizes.items()))
    assert list(staged.places) == ["middle", "edge", "large", "a", "b"] and staged.forced == 2 * sizes["small"]
    assert staged.places["edge"] == (40 << 10, 17 << 10) and staged.called[0] == "edge"
    first = stage_weights(((f"{name}.weight", (size,), 2) for name, size in sizes.items()), units=["b", "edge"])
    assert list(first.places) == ["b", "edge", "middle", "large", "a"]


def test_a_module_around_others_is_no_layer():
    weights = [("block.weight", (1 << 20,), 2), ("block.inner.weight", (1 << 20,), 2), ("block.inner.scale", (99,), 4)]
    staged = stage_weights(weights)
    assert list(staged.places) == ["block.inner"] and staged.forced == (2 << 20) + 4 * 99
    assert stage_weights(weights, plain=["block.inner"]).places == {}


def test_with_room_layers_are_sent_once():
    (node,) = page_nodes({"a": MODEL}, [("a", 3, STEP)], 8 * GIB, 7 * GIB)
    assert node == ({"a": 8}, 8 * PAGE_BYTES, 0, (0, 0), "")


@pytest.mark.parametrize(
    ("free", "headroom", "extra", "pages"),
    [
        (8, HEADROOM, 0, 4),
        (12, HEADROOM, 0, 8),
        (12, 8 * GIB - 9 * PAGE_BYTES, 0, 5),
        (12, HEADROOM, 4, 4),
        (8, 0, 0, 4),
    ],
)
def test_headrooms(free, headroom, extra, pages):
    """When PyTorch takes four pages' bytes, 256 MiB of the free bytes stay free, or --reserve-vram of the card if that
    asks for more; and --vram-headroom is added."""
    card = 8 * GIB, HEADROOM + free * PAGE_BYTES, False, headroom, extra * PAGE_BYTES
    (node,) = page_nodes({"a": MODEL}, [("a", 1, [*STEP, ((), 4 * PAGE_BYTES)])], *card)
    assert node == ({"a": pages}, 8 * PAGE_BYTES, 8 * PAGE_BYTES, (0, 0), "")


def test_pages_of_the_least_recent_model_leave_first():
    nodes = [("a", 1, STEP), ("b", 1, STEP), ("a", 1, STEP)]
    found = page_nodes({"a": MODEL, "b": MODEL}, nodes, 8 * GIB, HEADROOM + 12 * PAGE_BYTES)
    assert [node.pages for node in found] == [{"b": 0, "a": 8}, {"a": 4, "b": 8}, {"b": 4, "a": 8}]
    assert [node.first for node in found] == [8 * PAGE_BYTES, 8 * PAGE_BYTES, 4 * PAGE_BYTES]


def test_pytorchs_own_allocator_needs_more_room():
    """A peak of PyTorch takes the pages for 128 MiB more; those before the cut come back."""
    free, step = HEADROOM + 8 * PAGE_BYTES + 64 * MIB, [*STEP, ((), 64 * MIB)]
    pages = [page_nodes({"a": MODEL}, [("a", 1, step)], 8 * GIB, free, native)[0].pages["a"] for native in (0, 1)]
    assert pages == [8, 4]


def test_layers_that_are_sent_together_share_a_buffer():
    (node,) = page_nodes({"a": MODEL}, [("a", 1, [(LAYERS[:3], 0), (LAYERS[3:5], 0)])], 8 * GIB, 200 * MIB)
    assert node == ({"a": 0}, 5 * PAGE_BYTES, 5 * PAGE_BYTES, (2 * PAGE_BYTES, 3 * PAGE_BYTES), "")


def test_the_least_memory_is_enough_and_no_chunk_less():
    for number in range(cases.COUNT):
        case = cases.make_paging(number)
        models = stage_case(case)
        for name, steps, numbered in case.nodes:
            names = cases.layers_of_modules(case.models["abc".index(name)])
            places = models[name].places
            calls = [([names[i] for i in one if names[i] in places], held) for one, held in numbered]
            enough = least_free(models[name], steps, calls)
            for free in (enough, enough - CHUNK_BYTES):
                (node,) = page_nodes({name: models[name]}, [(name, steps, calls)], 1 << 40, free)
                assert bool(node.failure) == (free < enough)


@pytest.mark.apps
def test_the_golden_file_is_comfyuis():
    """It needs comfy-aimdo and comfy-kitchen, too."""
    printed = ask_comfyui("comfyui_dynamic_oracle.py")
    if os.environ.get("VAEMEM_GOLDEN") == "1":
        GOLDEN.write_text(printed, "utf-8")
    assert printed == GOLDEN.read_text("utf-8")
