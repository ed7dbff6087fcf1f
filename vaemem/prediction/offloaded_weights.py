"""Weights that pass through a module's calls: offloading sends them to the device for some calls only."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem.prediction.runtimes import parameter_bytes

BY_NONE, BY_ACCELERATE, BY_DIFFUSERS = range(3)  # made there; sent by accelerate's hooks; by diffusers' groups
# Modules of AutoencoderKL whose own blocks are grouped (its _group_offload_block_modules).
VAE_BLOCKS = ("quant_conv", "post_quant_conv", "encoder", "decoder")
# Modules of transformers that share another's weights: T5's and Qwen3's. Each brings them for its own call.
TIED = {"shared": "encoder.embed_tokens", "model.embed_tokens": "lm_head"}


class Passing(NamedTuple):
    """A tensor that comes when the call of `module` begins, and leaves when the call of `until` ends.

    by: who sends it
    row_bytes, row_flops: more bytes for each row of the module's first product, and the FLOPs of such a row
    lives: number of later tensors of the module after which the tensor leaves; 0: it leaves with `until`
    stream: the stream of PyTorch on which it is allocated; memory of streams is kept apart
    early: whether the tensor comes before its own module's call; `name` names that module
    """

    module: str
    until: str
    name: str
    bytes: int
    by: int
    row_bytes: int = 0
    row_flops: int = 0
    lives: int = 0
    stream: int = 0
    early: bool = False


class Group(NamedTuple):
    """Weights that come together when the call of `begins` begins, and leave together when the call of `ends` ends.

    names: of the weights, in the order in which they come
    again: of the weights that come twice from the second call on. The group moves a buffer of a submodule by replacing
        it, and then moves the old buffer too (ModuleGroup.buffers)
    is_rest: the module's weights outside its blocks; use_stream does not apply to them
    """

    begins: str
    ends: str
    names: tuple[str, ...]
    again: tuple[str, ...] = ()
    is_rest: bool = False


_Tree = dict[str, Any]  # submodules by name, and of weights None


def _tree(names: Sequence[str]) -> _Tree:
    tree: _Tree = {}
    for name in names:
        *modules, own = name.split(".")
        at = tree
        for module in modules:
            at = at.setdefault(module, {})
        at[own] = None
    return tree


def _listed(tree: _Tree, prefix: str) -> Iterator[str]:
    """Yield the weights' names in the order of ``Module.parameters``: a module's own before those of its submodules."""
    yield from (f"{prefix}{name}" for name, inner in tree.items() if inner is None)
    for name, inner in tree.items():
        if inner is not None:
            yield from _listed(inner, f"{prefix}{name}.")


def _sorted(names: Iterable[str], buffers: Collection[str]) -> list[str]:
    """List a module's parameters, then its buffers."""
    return sorted(names, key=lambda name: name in buffers)


def leaf_groups(names: Sequence[str], buffers: Collection[str] = ()) -> list[Group]:
    """Group weights as ``apply_group_offloading(..., "leaf_level")`` does: by the module that they belong to. names: in
    the order of ``Module.to``; buffers: those of them that are no parameters."""
    owners: dict[str, list[str]] = {}
    for name in _listed(_tree(names), ""):
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return [Group(owner, owner, tuple(_sorted(found, buffers))) for owner, found in tie(owners).items()]


def tie(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Give a module that shares another's weights its own entry."""
    return {**owners, **{other: owners[one] for one, other in TIED.items() if one in owners and other not in owners}}


def block_groups(
    names: Sequence[str], blocks: int, within: Sequence[str] = (), buffers: Collection[str] = ()
) -> list[Group]:
    """Group weights as ``apply_group_offloading(..., "block_level", num_blocks_per_group=blocks)`` does.

    Lists of submodules are cut into groups of `blocks`. A list's submodules have numbers for names. All other weights
    make one group, which is there for the whole call. within: submodules that are grouped by their own lists.
    """
    return list(_block_groups(_tree(names), "", blocks, within, buffers))


def _block_groups(
    tree: _Tree, path: str, blocks: int, within: Sequence[str], buffers: Collection[str]
) -> Iterator[Group]:
    prefix, rest = f"{path}." if path else "", list[str]()
    for name, inner in tree.items():
        if inner is not None and name in within:
            yield from _block_groups(inner, f"{prefix}{name}", blocks, (), buffers)
        elif inner is not None and all(number.isdecimal() for number in inner):
            yield from _cut(inner, f"{prefix}{name}", blocks, buffers)
        elif inner is not None:
            rest += _sorted(_listed(inner, f"{prefix}{name}."), buffers)
    rest += _sorted((f"{prefix}{name}" for name, inner in tree.items() if inner is None), buffers)
    if rest:
        again = (name for name in rest if name in buffers and "." in name.removeprefix(prefix))
        yield Group(path, path, tuple(rest), tuple(again), is_rest=True)


def _cut(blocks_of: _Tree, path: str, blocks: int, buffers: Collection[str]) -> Iterator[Group]:
    numbers = sorted(map(int, blocks_of))
    for first in range(0, numbers[-1] + 1, blocks):
        group = [number for number in numbers if first <= number < first + blocks]
        if group:
            each = (_sorted(_listed(blocks_of[str(one)], f"{path}.{one}."), buffers) for one in group)
            last = min(first + blocks - 1, numbers[-1])
            yield Group(f"{path}.{first}", f"{path}.{last}", tuple(itertools.chain(*each)))


def pass_groups(
    groups: Sequence[Group], sizes: Mapping[str, int], later: bool = False, stream: int = 0,
    order: Sequence[int] = (),
) -> tuple[Passing, ...]:  # fmt: skip
    """List the weights of groups as they pass. sizes: their bytes, by name; later: after a first call.

    stream: with use_stream, on which the groups come
    order: numbers of the groups as their modules are called. Each group then comes with the group called before it, the
    first with the outermost module. So diffusers prefetches after a first call that taught it the order
    """
    found, before = list[Passing](), dict(zip(order, ["", *(groups[number].begins for number in order)], strict=False))
    for number, group in enumerate(groups):
        begins, early = before.get(number, group.begins), number in before
        is_leaf = all(name.rpartition(".")[0] == group.begins for name in group.names)
        on = 0 if group.is_rest else stream
        for name in (*group.names, *(group.again if later else ())):
            shown = name if early else name.rpartition(".")[2] if is_leaf else ""
            found.append(Passing(begins, group.ends, shown, sizes[name], BY_DIFFUSERS, stream=on, early=early))
    return tuple(sorted(found, key=operator.attrgetter("module", "early")))


@functools.lru_cache(maxsize=64)
def pass_vae(
    arch: tuple[tuple[str, Any], ...], dtype: str, first: str | None = None, groups: tuple[Group, ...] | None = None,
    stream: int = 0,
) -> tuple[Passing, ...]:  # fmt: skip
    """List the weights of diffusers' class for a VAE as they pass: in groups, or each submodule's by accelerate."""
    sizes = parameter_bytes(arch, "diffusers", dtype, first)
    if groups is not None:
        return pass_groups(groups, sizes, stream=stream)
    owned = [(*name.rpartition(".")[::2], size) for name, size in sizes.items()]
    found = [Passing(at, at, own, size, BY_ACCELERATE) for at, own, size in owned]
    return tuple(sorted(found, key=operator.attrgetter("module")))
