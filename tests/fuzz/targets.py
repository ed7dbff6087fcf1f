"""The fuzz targets in Python: each takes bytes and returns, or raises what no input may make vaemem raise."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import resource
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vaemem import Table, _core
from vaemem.engine import configs, weights
from vaemem.prediction.caching_allocator import CachingAllocator
from vaemem.prediction.replay import replay

FOLDER = Path(tempfile.mkdtemp(prefix="vaemem-fuzz-"))


class Found(Exception):
    """An answer that is wrong though nothing was raised."""


def unpickle(data: bytes) -> None:
    """A snapshot from a stranger: ValueError or an answer, in memory that the input's size bounds."""
    path = FOLDER / "snapshot.pickle"
    path.write_bytes(data)
    measure = data[-1:] < b"\x10"  # tracing slows: a few of them
    if measure:
        tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            _core.read_pickle(data)
        for addresses in ("recorded", "model"):
            with contextlib.suppress(ValueError):
                str(replay(path, addresses=addresses))
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
    finally:
        tracemalloc.stop()
    if peak > 1000 * len(data) + (1 << 20):
        raise Found(f"{peak} bytes for a pickle of {len(data)}")


def safetensors(data: bytes) -> None:
    """A weights file: ValueError or a model. The safetensors package, where it is here, takes the same headers."""
    path = FOLDER / "a.safetensors"
    ours = _tensors(path, data)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return
    try:
        with safe_open(path, framework="np"):
            theirs = None
    except (SafetensorError, OSError, ValueError) as error:
        theirs = error
    if ours is not None and theirs is not None:  # the other way round they are more lenient: a key twice, say
        raise Found(f"we take a header that safetensors refuses: {theirs}")


def gguf(data: bytes) -> None:
    """The same of the other format, whose package finds the same tensors in what we take."""
    path = FOLDER / "a.gguf"
    ours = _tensors(path, data)
    try:
        from gguf import GGUFReader
    except ImportError:
        return
    if ours is None or not path.stat().st_size:
        return
    theirs = {t.name: (t.tensor_type.name, t.n_bytes, t.n_elements) for t in GGUFReader(path).tensors}
    if theirs != {name: (kind, size, math.prod(shape)) for name, shape, kind, size in ours}:
        raise Found(f"gguf finds other tensors: {theirs}")


def _tensors(path: Path, data: bytes) -> list[tuple] | None:
    """What a weights file holds; None where it is refused. Loading it gives a model or a ValueError."""
    path.write_bytes(data)
    for settings in ({}, {"parts": "decoder"}, {"config": CONFIG}):
        with contextlib.suppress(ValueError):
            weights.load(path, **settings)
    try:
        return weights.tensor_types(path)
    except ValueError:
        return None


def table(data: bytes) -> None:
    """CSV and JSON: ValueError, or a table that prints and comes back from both."""
    for read in (Table.from_csv, Table.from_json):
        path = FOLDER / "table"
        path.write_bytes(data)
        try:
            rows = read(path)
        except ValueError as error:
            if not str(error).isprintable():
                raise Found(f"a message that a terminal would obey: {str(error)!r}") from error
            continue
        repr(rows), rows._repr_html_(), rows.to_json()
        rows.to_csv(path)
        if Table.from_csv(path) != rows:
            raise Found("CSV does not come back")
        rows.to_json(path)
        if Table.from_json(path) != rows:
            raise Found("JSON does not come back")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "unpickle": unpickle,
    "safetensors": safetensors,
    "gguf": gguf,
    "table": table,
}

# ---- inputs to start from ----

CONFIG = {"block_out_channels": [8, 16], "layers_per_block": 1, "latent_channels": 2, "norm_num_groups": 4}


def _snapshot(rng: random.Random) -> bytes:
    settings: dict = rng.choice([{}, {"expandable_segments": True}, {"max_split_size_mb": 24}])
    a = CachingAllocator(**settings)
    live = []
    for _ in range(rng.randrange(24)):
        if live and rng.random() < 0.4:
            a.free(live.pop(rng.randrange(len(live))), pending=rng.random() < 0.2)
        elif rng.random() < 0.2:
            a.empty_cache()
        else:
            live.append(a.malloc(rng.choice([100, 3 << 20, 30 << 20]), rng.randrange(2)))
    snapshot = a.snapshot()
    trace = snapshot["device_traces"][0]
    del trace[: rng.randrange(len(trace) + 1) if rng.random() < 0.5 else 0]
    for _ in range(rng.randrange(4)):
        _spoil(rng, snapshot)
    return pickle.dumps(snapshot, protocol=rng.randrange(2, 6))


ODD = [0, 1, -1, 511, 512, 2 << 20, 1 << 59, 1 << 60, 1 << 61, (1 << 62) - 512, (1 << 63) - 1, None, True, 1.5, "", "x"]


def _spoil(rng: random.Random, root: object) -> None:
    """Puts something odd, or something from elsewhere, into a place of a structure."""
    places: list[tuple] = []
    waiting, values = [root], []
    while waiting:
        at = waiting.pop()
        if any(at is value for value in values):  # what was put inside itself before
            continue
        values.append(at)
        if isinstance(at, dict | list):
            for key in list(at) if isinstance(at, dict) else range(len(at)):
                places.append((at, key))
                waiting.append(at[key])
    if not places:
        return
    where, key = rng.choice(places)
    where[key] = rng.choice(values) if rng.random() < 0.4 else rng.choice([*ODD, [], {}, 10 ** rng.randrange(30)])


def _weights(rng: random.Random) -> bytes:
    model = _core.Model(configs.read_config(CONFIG), "all")
    header: dict = {}
    end = 0
    for name, shape in model.tensors:
        kind, size = rng.choice([("F32", 4), ("F32", 4), ("F16", 2)])
        begin, end = end, end + size * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.5:
            _spoil_json(rng, header)
        else:
            name = rng.choice(list(header))
            header[rng.choice(["\x1b[2J", "encoder.x", "decoder.mid.x", name + ".x"])] = header.pop(name)
    with contextlib.suppress(RecursionError, ValueError):  # something put inside itself
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(max(0, end + rng.choice([0, 0, 0, 4, -4])))
    return b""


def _gguf(rng: random.Random) -> bytes:
    """A file of the gguf package's, or with odd numbers in places of its header."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    path = FOLDER / "seed.gguf"
    writer = GGUFWriter(path, "vae")
    if rng.random() < 0.3:
        writer.add_custom_alignment(rng.choice([8, 64, 1024]))
    writer.add_array("tokens", ["a", "bc"])
    kind = rng.choice([GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16])
    for name, shape in _core.Model(configs.read_config(CONFIG), "all").tensors:
        tensor = np.zeros(shape, np.float32)
        if tensor.ndim == 4 and tensor.size % 256 == 0:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
            writer.add_tensor(name, quantize(tensor.reshape(-1, 256), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(4)):
        form, limit = rng.choice([("<I", 1 << 32), ("<Q", 1 << 64)])
        number = rng.choice([n for n in ODD if type(n) is int] + [rng.randrange(45)]) % limit
        struct.pack_into(form, data, rng.randrange(8192), number)
    return bytes(data)


def _spoil_json(rng: random.Random, header: dict) -> None:
    entry = rng.choice(list(header.values()))
    if not isinstance(entry, dict):
        return
    key = rng.choice(["dtype", "shape", "data_offsets"])
    if key == "dtype" or not isinstance(entry.get(key), list) or not entry[key]:
        entry[key] = rng.choice(["I64", "BF16", "F4", "F8_E4M3", 3, None, [], {}])
    else:
        entry[key][rng.randrange(len(entry[key]))] = rng.choice([*ODD, 1 << 32, 1 << 64, 1 << 70, 10**4000, [[]]])


def _table(rng: random.Random) -> bytes:
    numbers = ["1", "512", "", "-1", "1.5", "nan", "inf", "1e400", "9" * 400, "9" * 5000, "1_0", "\u0663", "0x1", " 7"]
    texts = ["sdxl", "decode", "measured", "\x1b[2J", "a,b", '"', "\u202e", "\ud83d", "x" * 300, "FLUX"]
    names = rng.sample([*Table.columns, "allocated_mib", "time_s", "\x1b[2J"], rng.randrange(1, 8))
    rows = [[rng.choice(numbers + texts) for _ in names] for _ in range(rng.randrange(40))]
    if rng.random() < 0.5:
        lines = [",".join(names), *(",".join(row) for row in rows)]
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    def value(text: str) -> object:
        with contextlib.suppress(ValueError):
            return int(text) if len(text) < 4000 else float(text)
        with contextlib.suppress(ValueError):
            return float(text)
        return text

    return json.dumps([{n: value(v) for n, v in zip(names, row, strict=True)} for row in rows]).encode()


SEEDS: dict[str, Callable[[random.Random], bytes]] = {
    "unpickle": _snapshot,
    "safetensors": _weights,
    "gguf": _gguf,
    "table": _table,
}


def change(rng: random.Random, data: bytes) -> bytes:
    """A few bytes put elsewhere: flipped, taken out, put in, repeated, or taken from where they stand."""
    out = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 2, 4, 8])):
        at = rng.randrange(len(out) + 1)
        length = rng.choice([1, 1, 1, 2, 8, 64])
        kind = rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length] * rng.choice([1, 2, 40])
        else:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + length]
    return bytes(out)


def fuzz(target: str, seconds: float, seed: int, files: list[Path], last: Path) -> int:
    """Runs a target on changed inputs; each is in `last` before it runs. How many ran."""
    import time

    rng = random.Random(seed)
    held = [file.read_bytes() for file in files]
    end, runs = time.monotonic() + seconds, 0
    log = os.open(last, os.O_RDWR | os.O_CREAT, 0o600)
    while time.monotonic() < end:
        if runs % 4 == 0:
            held = [*held[-200:], SEEDS[target](rng)]
        data = change(rng, rng.choice(held))[: 1 << 20]
        os.pwrite(log, data, 0)
        os.ftruncate(log, len(data))
        start = time.monotonic()
        TARGETS[target](data)
        if time.monotonic() - start > 20:
            raise Found("more than 20 seconds")
        runs += 1
    os.close(log)
    return runs


def main(arguments: list[str]) -> None:
    target, seconds, seed, last, *files = arguments
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    print(fuzz(target, float(seconds), int(seed), [Path(file) for file in files], Path(last)), "executions")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
