"""diffusers' group offloading, as ``pipe.enable_group_offload`` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vaemem._common import choose, flag, listed, number_in, whole
from vaemem._errors import ArgumentError

GROUPS_SINCE = 42  # the release of diffusers whose hooks were read: 0.42
OFFLOAD_TYPES = ("block_level", "leaf_level")
UNKNOWN = {
    "non_blocking": "nobody compared it; with use_stream diffusers sets it itself",
}
SWITCHES = ("use_stream", "low_cpu_mem_usage", "record_stream")
GROUP_SETTINGS = ("offload_type", "num_blocks_per_group", "offload_to_disk_path", "exclude_modules", *SWITCHES)
_STREAM = " stream"


@dataclass(frozen=True)
class GroupOffload:
    """The arguments of ``enable_group_offload``, under their names there.

    offload_type: "block_level" or "leaf_level"
    num_blocks_per_group: of block_level
    offload_to_disk_path: a folder for the weights in place of the host's memory
    exclude_modules: roles of components that stay on the device
    use_stream: a component's groups come on a stream of its own, each during the call before it
    low_cpu_mem_usage: weights are not pinned in the host's memory ahead
    record_stream: PyTorch waits for the GPU before a group's memory is used again, and not diffusers when it leaves.
        Tensors and their order are the same. If memory would run out, PyTorch waits for all groups first
        (CUDACachingAllocator's release_cached_blocks)
    """

    offload_type: str
    num_blocks_per_group: int | None = None
    offload_to_disk_path: str | None = None
    exclude_modules: tuple[str, ...] = ()
    use_stream: bool = False
    low_cpu_mem_usage: bool = False
    record_stream: bool = False

    @classmethod
    def read(cls, given: Any) -> GroupOffload | None:
        """Read an argument `offload`: None if it means another kind of offloading."""
        if isinstance(given, Mapping) and "offload_type" in given:
            return cls._check(given)
        words = str(given)
        use_stream = words.endswith(_STREAM)
        how, _, count = words.removesuffix(_STREAM).partition(" ")
        if how not in OFFLOAD_TYPES or isinstance(given, Mapping):
            return None
        blocks = {"num_blocks_per_group": number_in(count) or count or 1}
        settings = {"offload_type": how, "use_stream": use_stream}
        return cls._check(settings | (blocks if how == "block_level" or count else {}))

    @classmethod
    def _check(cls, given: Mapping[str, Any]) -> GroupOffload:
        for name in given:
            choose("offload", name, (*GROUP_SETTINGS, *UNKNOWN))
        for name, why in UNKNOWN.items():
            if flag(f"offload[{name!r}]", given.get(name, False)):
                raise ArgumentError(f"offload[{name!r}]", "False", "True", why)
        switches = [flag(f"offload[{name!r}]", given.get(name, False)) for name in SWITCHES]
        use_stream, _, record_stream = switches
        if record_stream and not use_stream:
            raise ArgumentError("offload['record_stream']", "use_stream with it, as diffusers does", "True without it")
        kind = given["offload_type"]
        choose("offload['offload_type']", kind, OFFLOAD_TYPES)
        count = given.get("num_blocks_per_group")
        if kind == "block_level":
            count = whole("offload['num_blocks_per_group']", count)
            count = 1 if use_stream else count  # as diffusers does, with a warning
        elif count is not None:
            raise ArgumentError("offload['num_blocks_per_group']", "None with leaf_level", repr(count))
        path = given.get("offload_to_disk_path")
        excluded = tuple(listed(given.get("exclude_modules") or (), str))
        return cls(kind, count, None if path is None else str(path), excluded, *switches)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments that differ from the method's defaults."""
        named: dict[str, Any] = {"offload_type": self.offload_type, "num_blocks_per_group": self.num_blocks_per_group}
        named |= {"offload_to_disk_path": self.offload_to_disk_path, "exclude_modules": list(self.exclude_modules)}
        named |= {name: getattr(self, name) for name in SWITCHES}
        return {name: value for name, value in named.items() if value}

    def __str__(self) -> str:
        count = f" {self.num_blocks_per_group}" if self.num_blocks_per_group else ""
        disk = f" to {self.offload_to_disk_path}" if self.offload_to_disk_path else ""
        excluded = f" except {' and '.join(self.exclude_modules)}" if self.exclude_modules else ""
        others = "".join(f", {name}" for name in SWITCHES[1:] if getattr(self, name))
        return f"{self.offload_type}{count}{_STREAM * self.use_stream}{disk}{excluded}{others}"

    @property
    def pins(self) -> bool:
        """Whether the host's copies of the weights are pinned ahead."""
        return self.use_stream and not self.low_cpu_mem_usage and self.offload_to_disk_path is None
