"""Encode a data set to a folder, and decode a folder."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

import vaemem
from vaemem._errors import ArgumentError, Named, Words
from vaemem.cli.progress import show_progress


def refuse_flags(args: argparse.Namespace, names: str, why: Words, advice: Words = "") -> None:
    """Raise ArgumentError for the first of these flags that was given."""
    for name in names.split():
        if getattr(args, name) != args.parser.get_default(name):
            raise ArgumentError(name, "", why, advice)


def shared_settings(args: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that an encoder and a decoder share."""
    refuse_flags(args, "tiling", "cannot be used for a folder", "give a memory limit")
    asked = {
        name: value for name, value in asked.items() if name in ("model", "config", "dtype", "precision", "device")
    }
    return asked | {"weights": args.weights, "memory_limit": args.memory_limit}


def encode_folder(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Encode a data set, or check its folder; return 1 if something is missing or damaged, or no image can be read."""
    from vaemem.datasets.fleet import encode_on_ray
    from vaemem.datasets.shards import Preparation, encode_dataset
    from vaemem.datasets.trainers import find_cache

    if args.trainer:
        refuse_flags(args, "scaled", ("cannot be used with ", Named("trainer")), "the trainer's format decides it")
    if args.ray:
        refuse_flags(args, "part check", ("cannot be used with ", Named("ray")))
    encoder, cache = vaemem.Encoder(**shared_settings(args, asked), scaled=args.scaled), None
    if args.trainer:
        cache = find_cache(args.trainer, encoder.open().model)
        encoder = replace(encoder, scaled=False, sample=cache.sample)
    if args.sample is not None:
        encoder = replace(encoder, sample=args.sample)
    sides = tuple(args.bucket_sides) if args.bucket_sides else None
    preparation = Preparation(args.buckets, args.step, args.pad, args.flip, sides, cache)

    def report(name: str, error: str) -> None:
        print(f"vaemem encode: passed over {name}: {error}", file=sys.stderr)

    with show_progress("vaemem encode", "images") as tell:
        given = args.images, args.out, encoder, preparation, args.shard
        if args.ray:
            found = encode_on_ray(args.ray, *given, tell, report)
        else:
            found = encode_dataset(*given, args.part, tell, report, args.check)
    errors = ": " + os.path.join(args.out, ".vaemem" if cache else "", "errors.csv") if found.is_whole else ""
    listed = f", {len(found.errors)} passed over{errors}" if found.errors else ""
    print(f"{args.out}: {found.images} images{listed}")
    for wrong in found.wrong:
        print(f"vaemem encode: {wrong}", file=sys.stderr)
    return 1 if found.wrong or (found.errors and not found.images) else 0


def decode_folder(args: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Decode a folder's latents to PNG files in another folder."""
    from vaemem.datasets.shards import decode_dataset

    refuse_flags(args, "size scaled", "cannot be used for a folder; its records have it")
    with show_progress("vaemem decode") as tell:
        done = decode_dataset(args.latents, args.out, vaemem.Decoder(**shared_settings(args, asked)), tell)
    print(f"{args.out}: {done} images")
