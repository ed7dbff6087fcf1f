"""The simulated CUDA caching allocator and the snapshots that it reads and writes.

The format is that of ``torch.cuda.memory._snapshot()``: a dict with ``segments`` (the allocator's memory),
``device_traces`` (its events) and ``allocator_settings``. Nothing here needs torch.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vaemem import _core
from vaemem._common import MIB, choose, number_in, whole
from vaemem._errors import ArgumentError, FileError, inside
from vaemem._saving import replacing

UNLIMITED = (1 << 64) - 1  # the core's value if blocks of any size may be split
INTERVALS = 16  # of roundup_power2_divisions: 1 MiB, 2 MiB, ... 32 GiB and above


def _bytes(name: str, value: Any, unit: int = 1) -> int:
    """Return ``value * unit``; None gives 0, which means "not set" to the core."""
    return 0 if value is None else whole(name, value, most=(1 << 60) // unit) * unit


def _divisions(value: Any) -> Sequence[int]:
    """Return the 16 divisions, which the core checks.

    Read a mapping as PyTorch 2.13 reads its list: by size in MiB, ``">"`` for all sizes after the last one. Sizes below
    the first are rounded like the first; sizes between two named sizes are not rounded.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    if not isinstance(value, Mapping):
        return [0 if value is None else value] * INTERVALS
    result = [0] * INTERVALS
    last = 0
    for position, (key, count) in enumerate(value.items()):
        if key == ">":
            result[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        name = "roundup_power2_divisions size in MiB"
        size = whole(name, (isinstance(key, str) and number_in(key)) or key)
        if size & (size - 1):
            raise ArgumentError(name, "a power of two", repr(key))
        last = min(size.bit_length() - 1, INTERVALS - 1)
        if position == 0:
            result[:last] = [count] * last
        result[last] = count
    return result


BACKENDS = ("native", "cudaMallocAsync")


class CachingAllocator(_core.CachingAllocator):
    """PyTorch's CUDA allocator, simulated: addresses and sizes, no memory and no GPU. The allocator is the native
    caching allocator, or the driver's memory pool.

    Parameters
    ----------
    total_memory : int, optional
        Bytes that the device can give, unlimited by default. The CUDA context's own memory is not modelled: subtract
        it.
    max_split_size_mb : int, optional
        Blocks of this many MiB and more are kept whole (at least 20).
    roundup_power2_divisions : int, mapping or sequence of 16 int, optional
        Requests are rounded up to this fraction of a power of two. A mapping has a fraction for each size in MiB, with
        ``">"`` for all larger sizes; a sequence has a fraction for each power of two from 1 MiB.
    expandable_segments : bool
        Whether segments are ranges of addresses that map pages of 2 MiB (small pool) or 20 MiB as they grow.
    garbage_collection_threshold : float, optional
        Share of the allowed memory above which cached segments are freed, oldest first. PyTorch frees them only after
        ``set_per_process_memory_fraction``; therefore `memory_fraction` is 1 by default if this threshold is given.
    memory_fraction : float, optional
        The argument of ``torch.cuda.set_per_process_memory_fraction``.
    max_non_split_rounding_mb : int, optional
        MiB by which a block kept whole may exceed its request (20).
    reservation : int, optional
        Addresses of an expandable segment: 1 1/8 of `total_memory` by default, as PyTorch reserves, or 1 TiB.
    history : bool
        Whether to keep every event, for `snapshot`: 32 bytes each.
    backend : str
        ``"native"``, or ``"cudaMallocAsync"``: each request goes to the driver's pool. With cudaMallocAsync,
        `memory_allocated` is the used part of the pool. `memory_reserved` is the least that the pool can hold, as if it
        wasted nothing between allocations. The pool takes only `total_memory` and `memory_fraction`, and as in PyTorch
        it has no snapshot.

    Raises
    ------
    ValueError
        PyTorch refuses a setting, or the backend does not have it.

    Notes
    -----
    The simulation follows ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.5 to 2.9) and
    ``CUDAMallocAsyncAllocator.cpp``. The driver's part is a model: segments lie at ascending addresses, aligned to 2
    MiB, and no address is used twice. The private pools of CUDA graphs are not modelled. The caller decides when the
    events of ``record_stream`` complete (``free(address, pending=True)``, later ``free(address)``).

    Examples
    --------
    >>> a = CachingAllocator(total_memory=24 << 30)
    >>> x = a.malloc(3 << 20)
    >>> a.memory_allocated() >> 20, a.memory_reserved() >> 20
    (3, 20)
    >>> a.free(x)
    >>> a.empty_cache()
    >>> a.memory_reserved()
    0
    """

    def __new__(
        cls,
        total_memory: int | None = None,
        max_split_size_mb: int | None = None,
        roundup_power2_divisions: int | Mapping[Any, int] | Sequence[int] | None = None,
        expandable_segments: bool = False,
        garbage_collection_threshold: float | None = None,
        *,
        memory_fraction: float | None = None,
        max_non_split_rounding_mb: int | None = None,
        reservation: int | None = None,
        history: bool = True,
        backend: str = "native",
    ) -> CachingAllocator:
        total, threshold = _bytes("total_memory", total_memory), garbage_collection_threshold
        choose("backend", backend, BACKENDS)
        pooled = backend == "cudaMallocAsync"
        native = {
            "max_split_size_mb": max_split_size_mb, "roundup_power2_divisions": roundup_power2_divisions,
            "expandable_segments": expandable_segments, "garbage_collection_threshold": threshold,
            "max_non_split_rounding_mb": max_non_split_rounding_mb, "reservation": reservation,
        }  # fmt: skip
        for name, value in native.items():
            if pooled and value not in (None, False):
                raise ArgumentError(name, "the native backend", f"{value!r} with {backend}")
        if threshold is not None:
            if not 0 < threshold < 1:
                raise ArgumentError("garbage_collection_threshold", "between 0 and 1", repr(threshold))
            memory_fraction = 1.0 if memory_fraction is None else memory_fraction
        if memory_fraction is not None:
            if not 0 < memory_fraction <= 1:
                raise ArgumentError("memory_fraction", "above 0 and at most 1", repr(memory_fraction))
            if not total:
                why = "a memory fraction or a collection threshold needs it"
                raise ArgumentError("total_memory", "bytes", "None", why)
        return super().__new__(
            cls,
            total_memory=total,
            allowed_memory=0 if memory_fraction is None else max(1, int(memory_fraction * total)),
            max_split_size=_bytes("max_split_size_mb", max_split_size_mb, MIB),
            max_non_split_rounding=_bytes("max_non_split_rounding_mb", max_non_split_rounding_mb, MIB),
            reservation=_bytes("reservation", reservation),
            divisions=_divisions(roundup_power2_divisions),
            gc_threshold=threshold or 0.0,
            expandable_segments=expandable_segments,
            driver_pool=pooled,
            history=history and not pooled,
        )

    @classmethod
    def from_conf(cls, conf: str, **settings: Any) -> CachingAllocator:
        """Make an allocator with the settings of ``PYTORCH_CUDA_ALLOC_CONF=conf``.

        Parameters
        ----------
        conf : str
            Such as ``"expandable_segments:True,max_split_size_mb:128"``. Options without effect on the placement of
            memory (``release_lock_on_cudamalloc``, ``pinned_...``) are accepted and ignored.
        **settings
            Settings that the string cannot hold: `total_memory`, `memory_fraction`, `history`.

        Raises
        ------
        ValueError
            An option or backend is unknown, or a value is malformed.

        Examples
        --------
        >>> a = CachingAllocator.from_conf("expandable_segments:True")
        >>> x = a.malloc(30 << 20)
        >>> a.memory_reserved() >> 20  # in pages of 20 MiB
        40
        """
        return cls(**parse_conf(conf), **settings)

    def snapshot(self, frames: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the state and the history in the format of ``torch.cuda.memory._snapshot()``.

        Parameters
        ----------
        frames : sequence, optional
            By tag (see `tag`): a name, or a list of ``{"name", "filename", "line"}`` dicts, shown as the stack of its
            blocks.

        Returns
        -------
        dict
            Plain builtins. ``time_us`` counts events, because a simulation has no clock.

        Raises
        ------
        ValueError
            The backend is cudaMallocAsync; PyTorch also raises then.

        Examples
        --------
        >>> a = CachingAllocator()
        >>> a.free(a.malloc(3 << 20))
        >>> [event["action"] for event in a.snapshot()["device_traces"][0]]
        ['segment_alloc', 'alloc', 'free_requested', 'free_completed']
        """
        if self._settings()["driver_pool"]:
            raise ArgumentError("snapshot", "the native backend", "cudaMallocAsync, which tracks no blocks")
        stacks = [
            [{"name": f, "filename": "vaemem", "line": 0}] if isinstance(f, str) else list(f) for f in frames or ()
        ]

        def stack(tag: int) -> list[Any]:
            return stacks[tag] if tag < len(stacks) else []

        segments: list[dict[str, Any]] = []
        for first, address, size, requested, stream, state, small, expandable, tag in self._blocks():
            if first:
                segment: dict[str, Any] = {"device": 0, "address": address}
                sizes = "total_size", "allocated_size", "active_size", "requested_size"
                segment |= dict.fromkeys(sizes, 0) | {"stream": stream, "segment_type": "small" if small else "large"}
                segment |= {"segment_pool_id": (0, 0), "is_expandable": expandable, "frames": [], "blocks": []}
                segments.append(segment)
            segment["blocks"].append(
                {"address": address, "size": size, "requested_size": requested, "state": state, "frames": stack(tag)}
            )
            segment["total_size"] += size
            if state != "inactive":
                segment["active_size"] += size
                segment["requested_size"] += requested
                segment["allocated_size"] += size if state == "active_allocated" else 0
        trace = []
        for time, (action, address, size, stream, tag) in enumerate(self._events()):
            where = "device_free" if action == "oom" else "addr"
            entry = {"action": action, where: address, "size": size, "stream": stream, "time_us": time}
            trace.append(entry | {"frames": stack(tag)})
        return {
            "segments": segments,
            "device_traces": [trace],
            "allocator_settings": _settings_shown(self._settings()),
            "external_annotations": [],
        }

    def save_snapshot(self, path: str | os.PathLike[str], frames: Sequence[Any] | None = None) -> None:
        """Write `snapshot` as the pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read.

        Examples
        --------
        >>> a = CachingAllocator()
        >>> x = a.malloc(3 << 20)
        >>> a.save_snapshot("history.pickle")
        >>> replay("history.pickle").same
        True
        """
        with replacing(path) as file:
            pickle.dump(self.snapshot(frames), file, protocol=4)


# ---- settings ----

_OPTION = re.compile(r"([^:]+):(\[[^]]*\]|[^\[,][^,]*)(?:,|$)")
_IGNORED = ("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_")


def _read_divisions(text: str) -> int | dict[str, int]:
    if not text.startswith("["):
        return int(text)
    return {size: int(divisions) for size, divisions in (pair.split(":") for pair in text[1:-1].split(","))}


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "max_split_size_mb": int,
    "max_non_split_rounding_mb": int,
    "garbage_collection_threshold": float,
    "expandable_segments": {"True": True, "False": False}.__getitem__,
    "roundup_power2_divisions": _read_divisions,
    "backend": {name: name for name in BACKENDS}.__getitem__,
}


def parse_conf(conf: str) -> dict[str, Any]:
    """Parse a PYTORCH_CUDA_ALLOC_CONF, ``"a:1,b:[2:3,4:5]"``, into `CachingAllocator`'s arguments."""
    result: dict[str, Any] = {}
    text, at = "".join(conf.split()), 0
    while option := _OPTION.match(text, at):
        (key, value), at = option.groups(), option.end()
        if key.startswith(_IGNORED):
            continue
        try:
            result[key] = _OPTIONS[key](value)
        except (KeyError, ValueError):
            got = f"{key}:{value}"[:80]
            raise ArgumentError("conf", "an option of PyTorch's allocators with its value", repr(got)) from None
    if at < len(text):
        raise ArgumentError("conf", "option:value, ...", repr(text[at : at + 80]))
    return result


def _settings_shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the core's settings as ``allocator_settings`` of a snapshot."""
    split, rounding = settings["max_split_size"], settings["max_non_split_rounding"]
    divisions = {str(1 << i): count for i, count in enumerate(settings["divisions"])}
    pairs = ",".join(f"{size}:{count}" for size, count in divisions.items())
    options = {
        f"max_split_size_mb:{split // MIB}": split < UNLIMITED,
        f"max_non_split_rounding_mb:{rounding // MIB}": rounding != 20 * MIB,
        f"garbage_collection_threshold:{settings['gc_threshold']:g}": settings["gc_threshold"],
        "expandable_segments:True": settings["expandable_segments"],
        f"roundup_power2_divisions:[{pairs}]": any(divisions.values()),
    }
    return {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(option for option, is_set in options.items() if is_set),
        "max_split_size": split if split < UNLIMITED else -1,
        "garbage_collection_threshold": settings["gc_threshold"],
        "expandable_segments": settings["expandable_segments"],
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": divisions,
    }


# ---- reading ----


def load_snapshot(path: str | os.PathLike[str], max_bytes: int = 8 << 30) -> dict[str, Any]:
    """Read a snapshot pickle without Python's pickle machine: nothing in it can name a class or run code.

    Parameters
    ----------
    path : str or path
        A file from ``torch.cuda.memory._dump_snapshot`` or `CachingAllocator.save_snapshot`.
    max_bytes : int
        Larger files are refused. The objects take about 20 times the file's size, a hundred times at worst.

    Returns
    -------
    dict
        With ``segments`` and ``device_traces``.

    Raises
    ------
    ValueError
        The file holds anything but plain data (dict, list, tuple, int, float, str, bytes, bool, None), or it is cut,
        corrupt, too large, or not a snapshot.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size  # a pipe's size is 0: it reads as empty, a cut pickle
        if size > max_bytes:
            raise FileError("snapshot", f"at most {max_bytes} bytes (max_bytes)", str(size), path=path)
        data = file.read(size)
    with inside("snapshot", path=path, caught=(ValueError,)):
        snapshot = _core.read_pickle(data)
    return check_snapshot(snapshot)


def want(condition: bool, what: str, got: Any) -> None:
    if not condition:
        if isinstance(got, str):
            got = got[:80]
        elif isinstance(got, int) and got.bit_length() > 64:
            raise ArgumentError("snapshot", what, f"an integer of {got.bit_length()} bits")
        text = repr(got) if isinstance(got, int | float | str | None) else type(got).__name__
        raise ArgumentError("snapshot", what, text[:80])


def check_snapshot(snapshot: Any) -> dict[str, Any]:
    checked: dict[str, Any] = snapshot
    want(isinstance(snapshot, dict), "a dict", snapshot)
    for key in ("segments", "device_traces"):
        want(isinstance(snapshot.get(key), list), f"a list under {key!r}", snapshot.get(key))
    return checked
