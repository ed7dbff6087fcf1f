"""The C core: csrc/python holds its binding. Private; vaemem.VAE and the package's functions are the API."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

# What calls return. These names are for types alone: the module does not have them.

class _Bytes(TypedDict):
    weights: int
    activations: int
    scratch: int
    workspace: int
    output: int

class _Step(TypedDict):
    name: str
    live: _Bytes
    flops: float
    seconds: float
    streamed: bool

class _Plan(TypedDict):
    peak: _Bytes
    reserved: int
    arena: int
    backend: str
    threads: int
    work: float
    steps: list[_Step]
    overflow: bool  # of a run

class _Settings(TypedDict):
    total_memory: int
    allowed_memory: int
    max_split_size: int
    max_non_split_rounding: int
    reservation: int
    divisions: tuple[int, ...]
    gc_threshold: float
    expandable_segments: bool
    driver_pool: bool
    history: bool

_Extents = int | tuple[int, ...]
# dtype, n, c, h, w, k, r, stride, padding, layout; of unusual ones also dilation, groups, output_padding, depth.
_Conv = (
    tuple[str, int, int, int, int, int, _Extents, _Extents, _Extents, str]
    | tuple[
        str, int, int, int, int, int, _Extents, _Extents, _Extents, str, _Extents, int, _Extents | None, int,
    ]
)  # fmt: skip
# op, id, bytes, name
_TraceStep = tuple[Literal["take", "give", "conv", "cublas", "cublaslt"], int, int, str]

def models() -> dict[str, dict[str, Any]]: ...
def backends(dtype: str = "float32", precision: str = "highest") -> list[tuple[str, bool]]: ...
def disable(names: str, /) -> None: ...
def fail_alloc_at(n: int, /) -> int: ...

class Model:
    arch: dict[str, Any]
    parts: str
    dtype: Literal["float32", "float16", "bfloat16"]
    precision: Literal["highest", "high", "medium"]  # of a model on the CPU
    tensors: list[tuple[str, tuple[int, ...]]]
    reserved_bytes: int
    def __init__(
        self,
        arch: dict[str, Any],
        parts: str = "all",
        backend: Any = None,
        dtype: str = "float32",
        precision: str = "highest",
    ) -> None: ...
    def missing(self) -> list[str]: ...
    def rounded(self) -> list[str]: ...
    def set_tensor(self, name: str, array: np.ndarray, /) -> None: ...
    def get_tensor(self, name: str, /) -> np.ndarray: ...
    def plan(
        self, op: str, height: int, width: int, batch: int = 1, pixels: str = "float", threads: int = 1,
        scaled: bool = False, backend: str | None = None, own_output: bool = True, host_arrays: bool = True,
        latents: str = "float", memory_limit: int = 0, frames: int = 1,
    ) -> _Plan: ...  # fmt: skip
    def run(  # input, out: addresses; returns the output's, and what owns it
        self, op: str, input: int, out: int, height: int, width: int, batch: int = 1, pixels: str = "float",
        latents: str = "float", threads: int = 1, scaled: bool = False, backend: str | None = None,
        host_arrays: bool = True, stream: int = 0, wait: bool = True, poll: Callable[[int, int], object] | None = None,
        check: bool = False, scale: float = 1.0, replay: bool = False, own_output: bool = False, memory_limit: int = 0,
        unclamped: bool = False, strides: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
        numbers: tuple[str, int, bool] = ("f", 4, False), frames: int = 1,
    ) -> tuple[int, object | None, _Plan]: ...  # fmt: skip
    def reserve(self, bytes: int, /) -> tuple[int, object]: ...  # an address on the device, and what owns it
    def blend(self, stream: int | None, op: str, format: str, **fields: int) -> None: ...
    def trim(self) -> None: ...

class OutOfMemoryError(MemoryError):
    requested: int
    wanted: int
    total: int
    free: int
    allowed: int
    allocated: int
    reserved: int
    tag: int

class CachingAllocator:
    OutOfMemoryError: type[OutOfMemoryError]
    def __new__(
        cls, total_memory: int, allowed_memory: int, max_split_size: int, max_non_split_rounding: int, reservation: int,
        divisions: Sequence[int], gc_threshold: float, expandable_segments: bool, driver_pool: bool, history: bool,
    ) -> Self: ...  # fmt: skip
    def malloc(self, bytes: int, stream: int = 0) -> int: ...
    def free(self, address: int, pending: bool = False) -> None: ...
    def empty_cache(self) -> None: ...
    def rounded_size(self, bytes: int, /) -> int: ...
    # steps: [(op, id: uint32, bytes, stream: uint64)]; addresses: by id, read and written. Returns the steps taken.
    def run(self, steps: np.ndarray, addresses: NDArray[np.uint64], /) -> int: ...
    def reset_peak_stats(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def memory_allocated(self) -> int: ...
    def max_memory_allocated(self) -> int: ...
    def memory_reserved(self) -> int: ...
    def max_memory_reserved(self) -> int: ...
    def tag(self, number: int, /) -> None: ...
    def _blocks(self) -> list[tuple[bool, int, int, int, int, str, bool, bool, int]]: ...
    def _events(self) -> list[tuple[str, int, int, int, int]]: ...
    def _settings(self) -> _Settings: ...
    def _place(self, address: int, /) -> None: ...
    def _has_whole_segment(self) -> bool: ...
    def _release(self, address: int, /) -> None: ...
    def _restore(self, address: int, size: int, stream: int, small: bool, blocks: list[Any], /) -> None: ...

class Trace:
    convs: list[_Conv]
    steps: list[_TraceStep]
    flops: int
    attended: int
    moved: int
    sent: int
    def __init__(self) -> None: ...
    @classmethod
    def vae(
        cls, arch: Mapping[str, Any], runtime: str, op: str, dtype: str, height: int, width: int, batch: int = 1,
        tile: int = 0, slicing: bool = False, sm: int = 89, multiprocessors: int = 128, free_bytes: int = 0,
        channels_last: bool = False, first: str | None = None,
        passing: Sequence[tuple[Any, ...]] = (), tile_overlap: float = 0.25, release: int = 42,
        frames: int = 1, picture: bool = False,
    ) -> Trace: ...  # fmt: skip
    @staticmethod
    def parameters(arch: Mapping[str, Any], runtime: str, /) -> list[tuple[str, tuple[int, ...], str]]: ...
    def wants(self, low: int, high: int, segments: bool, spare: int = 0, /) -> list[tuple[str, int, int]]: ...
    def take(self, bytes: int, name: str, stream: int = 0, /) -> int: ...
    def give(self, id: int, /) -> None: ...
    def blas(self, name: str, lt: bool = False, /) -> None: ...
    def conv(self, question: tuple[Any, ...], name: str, /) -> None: ...
    @staticmethod
    def choose_kernel(call: tuple[Any, ...], sm: int, cudnn: int, enabled: tuple[str, ...], /) -> str: ...
    def attend(self, call: tuple[Any, ...], kernel: str, sm: int, multiprocessors: int, name: str, /) -> int: ...

class Profile:
    def __new__(
        cls, strict: bool, otherwise: Profile | None, formulas: list[Any], rules: list[dict[str, Any]],
        trees: dict[str, str],
    ) -> Profile: ...  # fmt: skip
    # Bytes, how many profiles further on, and which of its rules, or -1.
    def conv(self, question: tuple[Any, ...], tf32: bool, /) -> tuple[int, int, int] | None: ...

_Card = tuple[str, int, int]  # key, compute capability, multiprocessors
# A rule, the version that answers in its place or 0, the versions from which and before which it holds or 0, compute
# capabilities, and its standing: taken, possible or measured.
_CardRule = tuple[Mapping[str, Any], int, int, int, tuple[int, ...], str]

class Catalogue:
    # Profiles are (compute capability, version, the cards they are limited to).
    def __new__(
        cls, recorded: tuple[tuple[int, int, tuple[_Card, ...]], ...], rules: tuple[_CardRule, ...],
        samples: tuple[_Card, ...], load: Callable[[int], tuple[Profile, bool]],
    ) -> Catalogue: ...  # fmt: skip
    def near(self, card: _Card, version: int, /) -> list[int]: ...
    def nearest(self, card: _Card, version: int, /) -> int: ...
    def relatives(self, sm: int, version: int, /) -> list[int]: ...

class Workspace:
    def __new__(
        cls, catalogue: Catalogue, card: _Card, rules: tuple[_CardRule, ...], coarse: bool, cudnn: int, shipped: int,
        release: int, is_290: bool, is_off: bool, tf32: bool, guess: str,
    ) -> Workspace: ...  # fmt: skip
    def conv(self, question: tuple[Any, ...], /) -> tuple[int, int]: ...
    def answers(self, of: Trace | Script | Workspace, /) -> tuple[list[int], list[int], list[int]]: ...
    def rows(self, every: bool, of: Trace | Script | Workspace, /) -> list[tuple[int, ...]]: ...
    # Why PyTorch runs it itself, rule, recorded profile, profiles further on, its rule, a guess in words, form.
    def sources(self, first: int, /) -> list[tuple[int, int, int, int, int, str | None, int]]: ...
    def known(self, own: bool, /) -> list[_Conv]: ...

def judge_bound(reserved: int, exact: int, /) -> int: ...
def judge(
    fits: bool, guesses: bool, untried: bool, available: int, kept_more: int, most: int, bound: int,
    is_rough: bool = False, /,
) -> tuple[str, str]: ...  # fmt: skip
def conv_sizes(question: tuple[Any, ...], /) -> tuple[int, ...]: ...
def formula_bytes(formula: list[Any], sizes: tuple[int, ...], /) -> int: ...
def im2col_bytes(question: tuple[Any, ...], /) -> int: ...

# What a program does with a device's memory. A storage is known by its handle, 0 for one of 0 bytes.
class Script:
    names: list[str]
    convs: list[_Conv]
    events: int
    # The phase's name; flops, attended, moved, sent, host_flops; bytes outside PyTorch.
    phases: list[tuple[str, int, int, int, int, int, int]]
    def __init__(self) -> None: ...
    def take(self, name: str, sizes: Sequence[int], stamp: str | None = None, /) -> list[int]: ...
    def replace(self, stamp: str, storages: Sequence[int], sizes: Sequence[int], /) -> list[int]: ...
    def give(self, storages: Sequence[int], /) -> None: ...
    def call(self, trace: Trace, /) -> dict[int, int]: ...  # {id: handle} of what stays
    def empty_cache(self) -> None: ...
    def reset_peak(self) -> None: ...
    def count(self, flops: int, attended: int, moved: int, sent: int, host_flops: int, outside: int, /) -> None: ...
    def times(self, times: int, /) -> None: ...
    def read(self, name: str, /) -> None: ...
    def bytes_of(self, storage: int, /) -> int: ...

class Column:
    def tolist(self) -> list[int]: ...

class Play:
    refused: int
    most_reserved: int
    # Bytes allocated and reserved at the height of each step of the last call.
    heights: tuple[Column, Column]
    # (since, until) in events; allocated and reserved at the reset, the same at the peak.
    readings: list[tuple[tuple[int, int], int, int, int, int]]
    def __new__(
        cls, script: Script, allocator: CachingAllocator, memory: int, cublas_bytes: int, cublaslt_bytes: int,
        cublaslt_use: str,
    ) -> Play: ...  # fmt: skip
    def answer(self, workspaces: Sequence[int], next: Sequence[int], /) -> None: ...
    def run(self) -> None: ...
    def follow(self) -> None: ...
    def call(self, trace: Trace, workspaces: Sequence[int], next: Sequence[int], /) -> dict[int, int]: ...
    def elsewhere(self, allocator: CachingAllocator, memory: int, /) -> Play: ...
    def note_heights(self, notes: bool, /) -> None: ...
    # (name, bytes, bytes that the allocator rounded them up by) of what was live.
    def peak(self, reading: int = -1, /) -> tuple[str | None, list[tuple[str, int, int]]]: ...
    def baseline(self) -> list[tuple[str, int, int]]: ...
    def least(self, first_only: bool, low: int, high: int, /) -> int: ...
    # Most bytes reserved in each span.
    def rows(
        self, rows: tuple[Sequence[int], ...], spans: tuple[tuple[int, int], ...], above: bool = True, /
    ) -> list[list[int]]: ...
    # (As it was played, least, most, bound); a phase is (number of its reading, bytes that the reading leaves out,
    # bytes that are exact, whether it counts for the bound alone).
    def takes(
        self, phases: tuple[tuple[int, int, int, bool], ...], above: bool, rows: tuple[Sequence[int], ...],
        likely: int, /,
    ) -> tuple[int, int, int, int]: ...  # fmt: skip

class Program:
    def __init__(self, text: str) -> None: ...
    def trace(
        self, dtype: str, sizes: tuple[int, ...], sm: int, multiprocessors: int, cudnn: int,
        passing: Sequence[tuple[Any, ...]], companions: Sequence[tuple[str, int, int, int]] = (), /,
    ) -> Trace: ...  # fmt: skip

def read_pickle(data: bytes, /, named: bool = False) -> Any: ...
