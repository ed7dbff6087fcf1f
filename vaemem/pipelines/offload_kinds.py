"""The kinds of offloading in diffusers, and the ways of running its VAE, as `predict_pipeline` takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vaemem._common import MOST_SIDE, choose, flag, listed, meant, number_in, whole
from vaemem._errors import ArgumentError, Named
from vaemem.engine.limits import parse_size
from vaemem.pipelines.components import VAE_STRIDE

OFFLOADS = ("none", "model", "sequential")
TORCH_WAYS = ("whole", "tiled", "sliced")
VAE_WAYS = (*TORCH_WAYS, "vaemem")
SLICED_TOO = " and sliced"  # after a tiled way
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
    record_stream: PyTorch waits for the GPU before a group's memory is used again; diffusers does not wait when the
        group leaves. Tensors and their order are the same. If memory would run out, PyTorch waits for all groups first
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


def is_tile(side: str, unit: int) -> bool:
    """Tell whether a text is the side of a tile: a multiple of `unit` pixels."""
    pixels = number_in(side) or 0
    return 0 < pixels <= MOST_SIDE and pixels % unit == 0


def check_way(
    roles: Collection[str], offload: Any, vae: Any, vae_memory_limit: int | str | None
) -> tuple[str, tuple[str, ...], str, int]:
    """Check these arguments of `vaemem.predict_pipeline` for a pipeline's roles. Return how the pipeline is offloaded,
    the roles on the CPU, how the VAE runs, and vaemem's limit in bytes or 0."""
    on_cpu: tuple[str, ...] = ()
    if group := GroupOffload.read(offload):
        offload = str(group)
    elif isinstance(offload, Mapping):
        for role, place in offload.items():
            choose("offload", role, roles)
            choose(f"offload[{role!r}]", place, ("cpu", "cuda"))
        on_cpu, offload = tuple(role for role, place in offload.items() if place == "cpu"), "none"
    offload = offload if group else meant("offload", offload, (*OFFLOADS, *OFFLOAD_TYPES))
    vae = f"{str(vae).removeprefix('sliced and ')}{SLICED_TOO}" if str(vae).startswith("sliced and ") else str(vae)
    how, _, side = vae.removesuffix(SLICED_TOO).partition(" ")
    sliced_too = SLICED_TOO if how == "tiled" and vae.endswith(SLICED_TOO) else ""
    if how == "tiled" and side and not is_tile(side, VAE_STRIDE):
        raise ArgumentError("vae", f"the side of a tile, a multiple of {VAE_STRIDE} as in 'tiled 512'", repr(vae))
    vae = vae if how == "tiled" and side else meant("vae", vae.removesuffix(sliced_too), VAE_WAYS) + sliced_too
    if (vae == "vaemem") != (vae_memory_limit is not None):
        wanted = ("a limit with ", Named("vae", "vaemem"), " and None with any other")
        raise ArgumentError("vae_memory_limit", wanted, f"{vae_memory_limit!r} with {vae!r}")
    limit = 0 if vae_memory_limit is None else parse_size("vae_memory_limit", vae_memory_limit)
    return offload, on_cpu, vae, limit
