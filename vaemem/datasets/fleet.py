"""Encode a data set on a Ray cluster. Each task encodes a part of the data set into a folder that all nodes share.

A worker that dies loses at most the shard that it was making. Ray runs its task again, and the task continues behind
the last finished shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike

from vaemem._common import need
from vaemem._errors import ArgumentError
from vaemem.datasets.encoder import Encoder
from vaemem.datasets.folder import Summary
from vaemem.datasets.shards import SHARD, Preparation, Tell, encode_dataset, folder_of, split_shards
from vaemem.datasets.sources import list_images

PARTS_EACH = 4  # for each task that fits the cluster at a time, so that slow ones hold the others up less
DEATHS = 10  # of the workers of one task


def encode_on_ray(
    address: str,
    sources: Iterable[str | PathLike[str]],
    out: str | PathLike[str],
    encoder: Encoder,
    preparation: Preparation,
    shard: int = SHARD,
    tell: Tell = lambda done, total: None,
    report: Callable[[str, str], None] = lambda name, error: None,
) -> Summary:
    """Encode images as `encode_dataset` does, on all nodes of a cluster.

    address: as `ray.init` takes it: ``"auto"``, ``"local"``, which starts a cluster on this machine, or ``host:port``.
    On CPUs, Ray places a task by the encoder's threads and memory limit, on GPUs by its threads and one GPU. tell: gets
    (images done, images to do) after each task. ValueError if no node can run a task, or without a limit on CPUs.
    """
    ray = need("ray", "a Ray cluster")
    files, out = [os.path.abspath(source) for source in sources], os.path.abspath(out)
    weights = os.fspath(encoder.weights)
    weights = weights if "://" in weights else os.path.abspath(weights)
    encoder = replace(encoder, weights=weights, threads=encoder.num_cpus)
    needs = {"CPU": encoder.num_cpus} | ({"memory": encoder.memory_bytes} if encoder.device == "cpu" else {"GPU": 1})
    names = [[item.name for item in items] for items in split_shards(list_images(files), shard)]
    images = sum(map(len, names))

    def encode_part(number: int) -> list[tuple[str, str]]:
        errors = list[tuple[str, str]]()
        encode_dataset(
            files, out, encoder, preparation, shard, (number, parts), report=lambda *error: errors.append(error)
        )
        return errors

    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        tasks = sum(min(int(node.get(name, 0) // need) for name, need in needs.items()) for node in nodes)
        if not tasks:
            raise ArgumentError("ray", f"a node with {needs}", f"{nodes}", "give fewer threads or a smaller limit")
        parts = min(len(names), PARTS_EACH * tasks)
        how = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU"), "memory": needs.get("memory")}
        remote = ray.remote(**how, max_retries=DEATHS)(encode_part)
        left = [remote.remote(number + 1) for number in range(parts)]
        while left:
            (one,), left = ray.wait(left)
            for error in ray.get(one):
                report(*error)
            tell(images * (parts - len(left)) // parts, images)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        ray.shutdown()
    return folder_of(out, preparation).sum_up(names)
