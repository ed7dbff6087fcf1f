"""ComfyUI's dynamic memory management (comfy-aimdo): weights come to the card page by page, when their layers are
called.

The rules were read in ComfyUI 0.33.0 (comfy/model_patcher.py, ops.py, model_prefetch.py, model_management.py) and
comfy-aimdo 0.4.13, on Linux with an NVIDIA card. tests/comfyui_decisions_dynamic_0.33.0.txt has the decisions of
ComfyUI and comfy-aimdo on 200 random cards and in 18 workflows, and a test compares these rules with the decisions.
Patches (LoRA), files with other types than the model's, and other programs that take or give back memory meanwhile are
not modelled.

Each layer has a fixed place in its model's address space. A call of a layer backs the layer's pages of 32 MiB with
memory, and the pages stay. If memory is short, pages leave from the end of an address space, those of the least recent
model first. The address space stays cut there until a node loads the model again. A layer beyond the cut is sent
through a buffer at each call: two streams take turns, and each stream has a buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from vaemem._common import MIB

PAGE_BYTES, CHUNK_BYTES = 32 * MIB, 16 * MIB  # of an address space; by which a stream's buffer grows
HEADROOM = 256 * MIB  # that it keeps free
NATIVE_HEADROOM = 128 * MIB  # more, when PyTorch's own allocator asks the driver; not with cudaMallocAsync
_SMALL, _FIRST = 16 * 1024, 64 * 1024  # bytes of layers without a place, and of layers in front
_SPACE, _ALIGNED, _STREAMS = 10, 1024, 2  # a space has ten times its model's bytes
_SEGMENT = 2 * MIB  # PyTorch's least request
ENOUGH = 1 << 62  # bytes, for any run

_Weights = Iterable[tuple[str, Sequence[int], int]]  # (name, shape, bytes per element)
_Call = tuple[Sequence[str], int]  # layers that are sent together, and bytes that PyTorch holds then
_Node = tuple[str, int, Sequence[_Call]]  # a model, its steps, the calls of one step


class _Staged(NamedTuple):
    """A model's weights, as ComfyUI places them in the address space.

    places: (first byte, bytes) of each layer in the address space, in the order of the space
    called: names of the placed layers in the order of the model's modules
    forced: bytes of the other weights, which are PyTorch's tensors on the card
    nbytes: of all weights
    """

    places: dict[str, tuple[int, int]]
    called: tuple[str, ...]
    forced: int
    nbytes: int


class _Paged(NamedTuple):
    """The memory that a node has on the card when the node ends.

    pages: pages of each model, the least recent model first
    first, last: bytes of the layers that the node's first and last step sent, each tensor rounded up to 1 KiB
    buffers: bytes of the streams' buffers
    failure: the part that had no room ("PyTorch" or a "buffer"), and the step; or nothing
    """

    pages: dict[str, int]
    first: int
    last: int
    buffers: tuple[int, ...]
    failure: str


def _count(size: int, unit: int) -> int:
    """Count units, the last one in part."""
    return -(-size // unit)


def stage_weights(
    weights: _Weights, computed: int = 0, units: Sequence[str] = (), plain: Collection[str] = ()
) -> _Staged:
    """Return a model's weights as ComfyUI stages them for a card.

    weights: (name, shape, bytes per element) in the order of the model's modules, with buffers
    computed: bytes per element of the type in which the model computes, if its class tells ComfyUI; 4 for text encoders
    units: names of the modules that come first ("dynamic units")
    plain: names of modules with weights whose class is not in comfy/ops.py

    Examples
    --------
    >>> stage_weights([("a.weight", (64, 512), 2), ("b.weight", (64, 1024), 2), ("c.weight", (64,), 2)]).places
    {'b': (0, 131072), 'a': (131072, 65536)}
    """
    owned = dict[str, list[tuple[str, int, int]]]()
    for name, shape, width in weights:
        owner, _, own = name.rpartition(".")
        owned.setdefault(owner, []).append((own, math.prod(shape) * width, width))
    outer = {owner[:at] for owner in owned for at, letter in enumerate(owner) if letter == "."} | {""}
    staged, sent = dict[str, tuple[bool, int, int, str]](), dict[str, list[int]]()
    for owner, held in owned.items():
        nbytes = sum(size for _, size, _ in held)
        main = [(size, width) for own, size, width in held if own in ("weight", "bias")]
        if main and nbytes > _SMALL and owner not in outer and owner not in plain:
            cast = nbytes + sum(size // width * computed for size, width in main if width != computed)
            staged[owner], sent[owner] = (cast >= _FIRST, -cast, nbytes, owner), [size for size, _ in main]
    first = dict.fromkeys(name for unit in units for name in staged if f"{name}.".startswith(f"{unit}."))
    places, end = dict[str, tuple[int, int]](), 0
    for owner in [*first, *sorted(staged.keys() - first, key=staged.__getitem__)]:
        places[owner] = end, sum(_count(size, _ALIGNED) * _ALIGNED for size in sent[owner])
        end += places[owner][1]
    total = sum(size for held in owned.values() for _, size, _ in held)
    return _Staged(places, tuple(staged), total - sum(map(sum, sent.values())), total)


class _Space:
    """A model's address space. Pages from `cut` on cannot be there."""

    def __init__(self, staged: _Staged, capacity: int):
        self.places, self.forced = staged.places, _count(staged.forced, _SEGMENT) * _SEGMENT
        self.pages = self.cut = min(_count(staged.nbytes * _SPACE, PAGE_BYTES), capacity // PAGE_BYTES)
        self.times: dict[int, int] = {}  # how often each page came
        self.there: set[int] = set()
        self.pinned: list[range] = []  # pages of the layers that are running
        self.sent: dict[str, list[int] | None] = {}  # the times of a layer's pages when its weights came

    def pages_of(self, layer: str) -> range:
        first, size = self.places[layer]
        return range(first // PAGE_BYTES, _count(first + size, PAGE_BYTES))

    def absent(self, page: int) -> int:
        """Return the first page from `page` on that is not there, or the cut."""
        return next((one for one in range(page, self.cut) if one not in self.there), max(page, self.cut))

    def drop_last(self) -> bool:
        """Let the page before the cut leave, if no layer runs there. Return whether one left."""
        leaves = self.cut - 1 in self.there and not any(self.cut - 1 in pages for pages in self.pinned)
        self.there -= {self.cut - 1} if leaves else set()
        return leaves


class _Card:
    """A card's memory as comfy-aimdo counts it, and the models' spaces, the least recent first."""

    def __init__(self, capacity: int, free: int, native: bool, headroom: int = HEADROOM, extra: int = 0):
        self.capacity, self.free, self.native, self.headroom = capacity, free, native, headroom
        self.most = min(capacity - headroom, free - HEADROOM) - extra  # beyond that, pages leave
        self.held, self.buffers, self.turn, self.largest = 0, [0] * _STREAMS, 0, ("", 0)
        self.forced, self.peak = dict[str, int](), 0
        self.spaces: dict[str, _Space] = {}

    @property
    def used(self) -> int:
        """Bytes of PyTorch, buffers and pages."""
        pages = sum(len(space.there) for space in self.spaces.values())
        return self.held + sum(self.buffers) + pages * PAGE_BYTES

    def drop(self, size: int) -> None:
        """Let pages of `size` bytes leave (vbars_free)."""
        left = _count(size, PAGE_BYTES)
        for space in self.spaces.values():
            while left > 0 and space.cut:
                left -= space.drop_last()
                space.cut -= 1

    def relieve(self, size: int) -> None:
        """Let pages leave until `size` more bytes leave the headroom free (vbars_free with budget_deficit)."""
        self.drop(self.used + size - self.most)

    def hold(self, held: int) -> None:
        """Let PyTorch hold that many bytes (aimdo_cuda_malloc). PyTorch's own allocator gives no memory back before the
        end."""
        more, margin = held - self.held, NATIVE_HEADROOM * self.native
        if more > 0:
            self.relieve(more + margin)
            if self.used + more > self.free:
                self.drop(more + margin)
            if self.used + more > self.free:
                raise MemoryError("PyTorch")
        if more > 0 or not self.native:
            self.held = held
            self.peak = max(self.peak, self.used)

    def grow(self, stream: int, size: int) -> None:
        """Grow a stream's buffer (vrambuf_grow)."""
        chunks = _count(size - self.buffers[stream], CHUNK_BYTES)
        if chunks > 0:
            self.relieve(chunks * CHUNK_BYTES)
        for _ in range(chunks):
            if self.used + CHUNK_BYTES > self.free:
                self.drop(CHUNK_BYTES)
            if self.used + CHUNK_BYTES > self.free:
                raise MemoryError("buffer")
            self.buffers[stream] += CHUNK_BYTES
            self.peak = max(self.peak, self.used)

    def _make_room(self, own: _Space, end: int, spare: int) -> None:
        """Let pages leave until all pages up to `end` have room (vbars_free_for_vbar)."""
        absent = own.absent(0)

        def is_enough() -> bool:
            nonlocal absent, spare
            while spare >= PAGE_BYTES and absent < min(end, own.cut):
                spare, absent = spare - PAGE_BYTES, own.absent(absent + 1)
            return spare >= 0 and absent >= min(end, own.cut)

        for space in self.spaces.values():
            while not is_enough() and space.cut:
                spare += PAGE_BYTES * space.drop_last()
                is_enough()  # spends that page before the cut moves
                space.cut -= 1

    def fault(self, own: _Space, layer: str) -> list[int] | None:
        """Back a layer's pages. Return their times, or None if they have no room (vbar_fault)."""
        pages, is_first = own.pages_of(layer), True
        self.relieve(0)
        for page in pages:
            if page not in own.there and pages.stop <= own.cut:
                if is_first:
                    is_first, missing = False, (pages.stop - page) * PAGE_BYTES
                    self._make_room(own, pages.stop, self.capacity - self.headroom - self.used - missing)
                if pages.stop <= own.cut and self.used + PAGE_BYTES > self.most:
                    self.drop(PAGE_BYTES)
                if pages.stop <= own.cut:
                    own.there.add(page)
                    own.times[page] = own.times.get(page, 0) + 1
        if pages.stop > own.cut:
            return None
        own.pinned.append(pages)
        return [own.times[page] for page in pages]

    def send(self, own: _Space, layers: Sequence[str]) -> int:
        """Bring layers to the card. Return the bytes that are sent (cast_modules_with_vbar)."""
        sent = offset = 0
        has_turn, is_alone = False, len(layers) == 1
        for layer in layers:
            times, size = self.fault(own, layer), own.places[layer][1]
            if times is not None and times == own.sent.get(layer):
                continue
            own.sent[layer], needed = times, size * (times is None)
            self.turn += not has_turn
            has_turn = True
            if is_alone and needed:  # the largest layer takes the other turn, so as not to grow both buffers
                self.turn += layer == self.largest[0]
                self.largest = (layer, needed) if needed > self.largest[1] else self.largest
            if needed:
                self.grow(self.turn % _STREAMS, offset + needed)
            offset, sent = offset + needed, sent + size
        return sent

    def unpin(self, own: _Space) -> None:
        """End the layers' run. The layers' pages beyond the cut leave (vbar_unpin)."""
        own.there -= {page for pages in own.pinned for page in pages if page >= own.cut}
        own.pinned.clear()

    def run(self, node: _Node) -> _Paged:
        """Run a node: load its model, call its layers, give back the buffers and what PyTorch does not need."""
        model, steps, calls = node
        own = self.spaces[model] = self.spaces.pop(model)
        own.cut, sent, failure, step = own.pages, [0] * steps, "", 0
        self.forced[model] = own.forced
        forced = sum(self.forced.values())
        try:
            self.hold(forced)
            for step, (layers, held) in itertools.product(range(steps), calls):
                sent[step] += self.send(own, layers)
                self.hold(forced + held)
                self.unpin(own)
        except MemoryError as error:
            failure = f"{error} in step {step}"
        pages = {name: len(space.there) for name, space in self.spaces.items()}
        found = _Paged(pages, sent[0], sent[-1], tuple(self.buffers), failure)
        self.held, self.buffers, self.largest = forced, [0] * _STREAMS, ("", 0)
        return found


def page_nodes(
    models: Mapping[str, _Staged], nodes: Iterable[_Node], capacity: int, free: int, native: bool = False,
    headroom: int = HEADROOM, extra: int = 0,
) -> list[_Paged]:  # fmt: skip
    """Return what a workflow's nodes have on the card, until one fails.

    nodes: (model, steps, calls of one step), with one step at least. A call has names of layers, and the bytes that
    PyTorch holds on the card before they end, without forced weights. It has several layers if ComfyUI sends a block's
    layers together, and none if only PyTorch's bytes change
    capacity, free: bytes of the card, and of its memory that is free before the first node
    native: whether PyTorch's own allocator is used, which keeps what it takes until the node ends; otherwise
    cudaMallocAsync
    headroom, extra: bytes of the options ``--reserve-vram`` and ``--vram-headroom``
    """
    card, found = _Card(capacity, free, native, headroom, extra), list[_Paged]()
    card.spaces = {name: _Space(staged, capacity) for name, staged in models.items()}
    for node in nodes:
        found.append(card.run(node))
        if found[-1].failure:
            break
    return found


def least_free(staged: _Staged, steps: int, calls: Sequence[_Call]) -> int:
    """Return the least free bytes with which a node goes through, in chunks of a stream's buffer.

    It is enough to have PyTorch's peak, a call's layers in both buffers, and a call's layers in pages, which cannot
    leave before the call ends. Most nodes need as much as PyTorch's peak and the buffers then, if each call sends its
    layers and no page stays; so this is tried first.
    """

    def run(capacity: int, free: int) -> tuple[_Card, bool]:
        card = _Card(capacity, free, False)
        card.spaces[""] = _Space(staged, capacity)
        return card, not card.run(("", steps, calls)).failure

    card, _ = run(0, ENOUGH)
    own = card.spaces[""]
    sizes = (sum(own.places[layer][1] for layer in layers) for layers, _ in calls)
    pages = (len({page for layer in layers for page in own.pages_of(layer)}) for layers, _ in calls)
    most = _STREAMS * _count(max(sizes, default=0), CHUNK_BYTES) * CHUNK_BYTES + max(pages, default=0) * PAGE_BYTES
    low = own.forced + max((held for _, held in calls), default=0)  # without room for a layer
    high, middle = low + most, card.peak
    while high - low > CHUNK_BYTES:
        fits = run(ENOUGH, middle)[1]
        low, high = (low, middle) if fits else (middle, high)
        is_first = fits and middle == card.peak
        middle = middle - CHUNK_BYTES if is_first else (low + high) // 2
    return high
