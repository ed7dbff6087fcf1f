"""Encoders of batches, folders of latents that survive kills, and trainers' caches."""

import base64
import contextlib
import csv
import errno
import gc
import hashlib
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine import config, small_vae
from errors import refused

import vaemem
from vaemem import Decoder, Encoder
from vaemem.__main__ import main
from vaemem.datasets.folder import Folder, Shard
from vaemem.datasets.shards import Preparation, decode_dataset, encode_dataset, read_ahead
from vaemem.datasets.sources import list_images
from vaemem.datasets.trainers import find_cache

pytestmark = pytest.mark.python

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """By name, the path of a small VAE's weights, with its config."""
    folder = tmp_path_factory.mktemp("weights")

    def path(name):
        if not (folder / name).exists() and name == "qwen":  # kept for one frame alone, so `save` refuses it
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config(name)))
            save_file = pytest.importorskip("safetensors.numpy").save_file
            save_file(small_vae(name).state_dict(), folder / name / "diffusion_pytorch_model.safetensors")
        elif not (folder / name).exists():
            small_vae(name).save(folder / name)
        return folder / name

    return path


def drawn(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def file_of(picture, kind="PNG", **how):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **how)
    return file.getvalue()


SIZES = [(32, 40), (16, 16), (32, 40), (24, 16), (16, 16)]


@pytest.mark.parametrize("name", ["sd", "flux2", "tiny"])
@pytest.mark.parametrize("how", [{}, {"sample": "moments"}, {"sample": 5}, {"sample": 5, "scaled": True}])
def test_bits_depend_on_the_image_alone(weights, name, how):
    """Not on the batch, its order, a limit, the threads or the process that unpickled the encoder."""
    if name == "flux2" and how.get("scaled"):
        return  # its latents have no whole patches at these sizes
    pictures = [drawn(*size, seed) for seed, size in enumerate(SIZES)]
    names = [f"{i}.png" for i in range(len(pictures))]
    encode = Encoder(weights(name), threads=1, **how)
    got = encode({"image": pictures, "name": names, "caption": list("abcde")})
    assert got["caption"] == list("abcde") and got["size"].tolist() == [list(size) for size in SIZES]
    backwards = encode({"image": [file_of(one) for one in pictures[::-1]], "name": names[::-1]})["latent"][::-1]
    limited = pickle.loads(pickle.dumps(Encoder(weights(name), threads=3, memory_limit="1 GiB", **how)))
    for i, picture in enumerate(pictures):
        (alone,) = limited({"image": picture[None], "name": names[i : i + 1]})["latent"]
        assert np.array_equal(got["latent"][i], alone) and np.array_equal(backwards[i], alone)
    assert not np.array_equal(got["latent"][1], got["latent"][4])
    vae = vaemem.VAE.load(weights(name))
    encoded = vae.encode(pictures[0][None], scaled=how.get("scaled", False))
    if how.get("sample", "mean") in ("mean", "moments"):
        want = encoded.moments if how else encoded.mode()
        assert np.array_equal(got["latent"][0], want[0])


def test_an_overflow_of_float16_changes_no_other_image(tmp_path):
    tensors = small_vae().state_dict()
    tensors["encoder.conv_in.weight"] *= 100_000
    vaemem.VAE.load(tensors, config=config("sd")).save(tmp_path)
    bright, dark = np.full((16, 16, 3), 255, np.uint8), drawn(16, 16) // 99 + 127
    vae = vaemem.VAE.load(tmp_path, dtype="float16")
    want = vae.encode(dark[None]).mode()[0]
    assert vae.last_run.notes == ()
    vae.encode(bright[None])
    assert vae.last_run.notes != ()
    encode = Encoder(tmp_path, dtype="float16")
    assert np.array_equal(encode({"image": [bright, dark, bright]})["latent"][1], want)


def test_a_latent_beyond_the_range_of_the_dtype_is_its_images_error(tmp_path):
    tensors = small_vae().state_dict()
    tensors["quant_conv.bias"] += 100_000
    vaemem.VAE.load(tensors, config=config("sd")).save(tmp_path / "vae")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(file_of(drawn(16, 16)))
    for dtype, images in (("float32", 1), ("bfloat16", 1), ("float16", 0)):
        summary = encode_dataset([tmp_path / "set"], tmp_path / dtype, Encoder(tmp_path / "vae", dtype=dtype))
        assert summary.images == images and (summary.errors == {}) == bool(images)


def test_decoder_reads_what_the_encoder_gives(weights):
    pictures = [drawn(30, 24, 1), drawn(16, 16, 2)]
    vae = vaemem.VAE.load(weights("sd"))
    for how in ({}, {"sample": "moments"}, {"scaled": True}):
        batch = Encoder(weights("sd"), pad="reflect", **how)({"image": pictures})
        got = Decoder(weights("sd"), scaled=how.get("scaled", False))(batch)
        assert set(got) == {"image"}
        for picture, back in zip(pictures, got["image"], strict=True):
            encoded = vae.encode(picture[None], pad="reflect")
            want = vae.decode(encoded.mode(), output_type="uint8", size=encoded.size)[0]
            assert back.shape == picture.shape
            assert np.abs(back.astype(int) - want).max() <= (1 if how.get("scaled") else 0)


def test_settings():
    encode = Encoder("vae", memory_limit="1 GiB", threads=3, dtype=np.float16)
    assert (encode.memory_bytes, encode.num_cpus, encode.dtype) == (1 << 30, 3, "float16")
    assert pickle.loads(pickle.dumps(encode)) == encode
    for wrong in ({"sample": "mode"}, {"sample": -1}, {"sample": "moments", "scaled": True}, {"scaled": 1}):
        with refused(next(iter(wrong))):
            Encoder("vae", **wrong)
    with refused("pad"):
        Encoder("vae", pad="zeros")
    with refused("threads"):
        Encoder("vae", threads=0)
    with refused("memory_limit"):
        _ = Encoder("vae", memory_limit="auto").memory_bytes
    with refused("weights", kind=TypeError):
        Encoder(small_vae())


def test_columns(weights):
    with refused("batch", got="the columns 'picture'"):
        Encoder(weights("sd"))({"picture": []})
    with refused("batch", wanted="a column 'name'"):
        Encoder(weights("sd"), sample=0)({"image": [drawn(16, 16)]})
    assert Encoder(weights("sd"))({"image": []})["latent"].shape == (0,)
    got = Encoder(weights("sd"), image="jpg")({"jpg": [Image.fromarray(drawn(16, 16))]})
    assert got["latent"].shape == (1, 4, 4, 4)


def test_weights_of_fsspec(weights, tmp_path):
    pytest.importorskip("fsspec")
    small_vae().save(tmp_path / "one.safetensors")
    picture = {"image": [drawn(16, 16)]}
    got, want = (
        Encoder(one, config=config("sd"))(picture)["latent"]
        for one in (f"file://{tmp_path}/one.safetensors", tmp_path / "one.safetensors")
    )
    assert np.array_equal(got, want)


# ---- folders ----

DOCUMENT = Path(__file__).parent.parent / "docs" / "DATASETS.md"


def draw_photos(folder, count, low=40, high=200):
    """Write images with captions, in many modes. Return the names of the unreadable ones."""
    rng, bad = np.random.default_rng(0), []
    turned = Image.Exif()
    turned[0x0112] = 6
    for i in range(count):
        height, width = (int(n) for n in rng.integers(low, high + 1, 2))
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        name, how = f"{'abc'[i % 3]}/{i:05d}.png", {}
        match i % 20:
            case 0 | 1 | 2:
                name, how = name.replace("png", "jpg"), {"exif": turned}
            case 3:
                name, picture = name.replace("png", "jpg"), picture.convert("CMYK")
            case 4:
                picture = Image.fromarray(rng.integers(0, 65536, (height, width), np.uint16))
            case 5 | 6 | 7:
                picture = picture.convert(("LA", "RGBA", "1")[i % 20 - 5])
            case 8:
                name, how = name.replace("png", "gif"), {"save_all": True, "append_images": [picture]}
            case 9:
                picture, how = picture.convert("P"), {"transparency": 3}
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **how)
        if i % 20 in (10, 11):
            path.write_bytes(path.read_bytes()[: (i % 20 - 10) * 500])
            bad.append(name)
        if i % 2:
            path.with_suffix(".txt").write_text(f"caption {i}\n")
    return bad


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def latents_of(folder):
    """By name, all images of a folder: (record, latents)."""
    shards = [Folder(folder).read(path) for path in Folder(folder).shards()]
    return {name: (one.records[name], one.latents[name]) for one in shards for name in one.records}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    return folder, draw_photos(folder, 60, 16, 70)


BUCKETS = Preparation(side=32, step=8)


def test_a_folder_of_odd_images(photos, weights, tmp_path, capsys):
    """Each latent is that of its image, scaled and cut as its record says."""
    folder, bad = photos
    encode = ["encode", str(folder), "--weights", str(weights("sd")), "--buckets", "32", "--step", "8"]
    encode += ["--shard", "25", "--sample", "3", "--flip", "-o", str(tmp_path / "out")]
    assert main(encode) == 0
    printed = capsys.readouterr()
    assert all(f" {name}: " in printed.err for name in bad) and len(bad) == 6
    assert sorted(files_of(tmp_path / "out")) == [
        "errors.csv", *(f"latents-0000{i}.safetensors" for i in range(3)), "manifest.json",
    ]  # fmt: skip
    with open(tmp_path / "out" / "errors.csv", newline="") as f:
        assert [row["name"] for row in csv.DictReader(f)] == sorted(bad)
    found = latents_of(tmp_path / "out")
    assert {*found} == {item.name for item in list_images([folder])} - {*bad}
    one = Encoder(weights("sd"), sample=3)
    for name, (record, latents) in list(found.items())[::5]:
        picture = vaemem.engine.images.read_image(folder / name, [])
        (width, height), (left, top), bucket = record["scaled"], record["crop"], record["bucket"]
        assert picture.shape[1::-1] == tuple(record["size"]) and bucket[0] % 8 == bucket[1] % 8 == 0
        assert bucket[0] * bucket[1] <= 32 * 32 and 0 <= left <= width - bucket[0] and 0 <= top <= height - bucket[1]
        scaled = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))
        cut = scaled[top : top + bucket[1], left : left + bucket[0]]
        names = [name, name + " flipped"]
        assert np.array_equal(latents, one({"image": [cut, cut[:, ::-1]], "name": names})["latent"])
        assert record.get("caption") == (f"caption {int(Path(name).stem)}" if int(Path(name).stem) % 2 else None)
    assert main([*encode, "--check"]) == 0
    assert main(["decode", str(tmp_path / "out"), "--weights", str(weights("sd")), "-o", str(tmp_path / "back")]) == 0
    assert {*files_of(tmp_path / "back")} == {*map(picture_of, found)}


def picture_of(name):
    """Name the picture that `vaemem decode` makes of an image's latents."""
    return name if name.endswith(".png") else f"{name}.png"


def test_without_buckets(photos, weights, tmp_path):
    """Images keep their size: cut to whole latents, or padded, which decoding takes off again."""
    folder, bad = photos
    for pad in (None, "reflect"):
        out = tmp_path / str(pad)
        summary = encode_dataset([folder / "a", folder / "b"], out, Encoder(weights("sd")), Preparation(pad=pad))
        assert summary.images == 40 - len([name for name in bad if name[0] != "c"]) and not summary.wrong
        for record, (latent,) in latents_of(out).values():
            sides = [-(-n // 4) * 4 if pad else n // 4 * 4 for n in record["size"]]
            assert record["scaled"] == record["size"] and record["bucket"] == sides
            assert latent.shape == (4, sides[1] // 4, sides[0] // 4)
    assert main(["decode", str(out), "--weights", str(weights("sd")), "-o", str(tmp_path / "back")]) == 0
    for name, (record, _) in latents_of(out).items():
        with Image.open(tmp_path / "back" / picture_of(name)) as picture:
            assert list(picture.size) == record["size"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "{folder}/x"])
def test_decode_writes_below_its_folder_alone(name, weights, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(file_of(drawn(16, 16)))
    encode_dataset([tmp_path / "photos"], tmp_path / "latents", Encoder(weights("sd")))
    folder = Folder(tmp_path / "latents")
    shard = folder.read(folder.shard(0))
    folder.commit(0, Shard(*({name.format(folder=tmp_path): one for one in part.values()} for part in shard)))
    with refused("latents", path=folder.shard(0)):
        decode_dataset(folder.path, tmp_path / "pictures", Decoder(weights("sd")))
    assert not list(tmp_path.rglob("x.png"))


class Killed(Exception):
    pass


def shards_of(folder, want):
    """The number of shards in a folder. Each is as wanted, to the byte."""
    found = sorted(folder.glob("latents-*"))
    assert [path.name for path in found if path.read_bytes() != want[path.name]] == []
    return len(found)


def test_a_run_that_ended_anywhere_goes_on(photos, weights, tmp_path):
    """Whatever a run left behind, its files are whole, and the next one makes what an uninterrupted one makes. So do
    parts."""
    encoder, how = Encoder(weights("sd"), sample=1), {"preparation": BUCKETS, "shard": 7}
    encode_dataset([photos[0]], tmp_path / "whole", encoder, **how)
    want = files_of(tmp_path / "whole")
    for k in (2, 1, 3):
        encode_dataset([photos[0]], tmp_path / "parts", encoder, part=(k, 3), **how)
    assert files_of(tmp_path / "parts") == want
    counted = []
    for stop, finished in ((1, 0), (9, 1), (23, 4), (10**9, 9)):

        def tell(done, total, stop=stop):
            if done == stop:
                raise Killed
            counted.append(total)

        with pytest.raises(Killed) if finished < 9 else contextlib.nullcontext():
            encode_dataset([photos[0]], tmp_path / "ended", encoder, tell=tell, **how)
        assert shards_of(tmp_path / "ended", want) == finished
        if finished < 9:
            (tmp_path / "ended" / ".vaemem-0.part").write_bytes(b"half a shard")
    assert files_of(tmp_path / "ended") == want and counted[-1] == 60 - 7 - 21


def test_a_limit_passes_over_images_that_are_too_large(photos, weights, tmp_path):
    sources, encoder = [str(photos[0] / "a" / "0000*")], Encoder(weights("sd"), memory_limit=1)
    summary = encode_dataset(sources, tmp_path / "none", encoder)
    assert summary.images == 0 and any("memory_limit" in error for error in summary.errors.values())
    limit = encoder.open().smallest("encode", 32, 32)
    summary = encode_dataset(sources, tmp_path / "some", Encoder(weights("sd"), memory_limit=limit))
    assert summary.images and any("memory_limit" in error for error in summary.errors.values())


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOENT, errno.EACCES])
def test_errors_of_the_system_end_a_run(number, photos, weights, tmp_path, monkeypatch):
    """They pass no image over: the next run encodes it. Files that are missing or private are passed over."""
    given = [photos[0] / "a"], tmp_path, Encoder(weights("tiny")), BUCKETS, 7
    victim, read = sorted((photos[0] / "a").glob("*.png"))[-1], Path.read_bytes

    def fail(path):
        if path == victim:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        if number in (errno.ENOENT, errno.EACCES):
            assert encode_dataset(*given).errors[victim.name] == os.strerror(number)
            return
        with pytest.raises(OSError) as raised:
            encode_dataset(*given)
    assert (raised.value.errno, raised.value.filename) == (number, str(victim))
    assert Folder(tmp_path).shards()
    assert victim.name not in encode_dataset(*given).errors and victim.name in latents_of(tmp_path)


def test_a_damaged_row_group_is_its_images_error(weights, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [file_of(drawn(16, 16, seed)) for seed in range(4)]})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2, compression="none")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[4:10] = b"\xff" * 6  # the header of the first page
    (tmp_path / "x.parquet").write_bytes(data)
    summary = encode_dataset([tmp_path / "x.parquet"], tmp_path / "out", Encoder(weights("tiny")))
    assert (summary.images, [*summary.errors]) == (2, [f"x.parquet/{i:09d}" for i in range(2)])


def test_a_thin_image_takes_no_gigabytes(weights, tmp_path):
    """It covers its bucket only if it is scaled to 128x1280000."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "thin.png").write_bytes(file_of(drawn(10_000, 1)))
    (tmp_path / "photos" / "usual.png").write_bytes(file_of(drawn(16, 16)))
    summary = encode_dataset([tmp_path / "photos"], tmp_path / "out", Encoder(weights("tiny")), Preparation(side=256))
    assert (summary.images, [*summary.errors]) == (1, ["thin.png"])


def test_the_status_is_1_if_no_image_can_be_read(weights, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"")
    encode = ["encode", str(tmp_path / "*.png"), "--weights", str(weights("tiny")), "-o"]
    assert main([*encode, str(tmp_path / "none")]) == main([*encode, str(tmp_path / "none")]) == 1
    (tmp_path / "good.png").write_bytes(file_of(drawn(16, 16)))
    assert main([*encode, str(tmp_path / "one")]) == 0


def test_check_finds_what_is_wrong(photos, weights, tmp_path, capsys):
    encode = ["encode", str(photos[0]), "--weights", str(weights("sd")), "--buckets", "32", "--shard", "20"]
    encode += ["-o", str(tmp_path)]
    assert main([*encode, "--check"]) == 2  # there is no manifest
    assert main(encode) == 0
    one, two, three = Folder(tmp_path).shards()
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    two.unlink()
    three.write_bytes(three.read_bytes()[:-1])
    before = files_of(tmp_path)
    capsys.readouterr()
    assert main([*encode, "--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [str(path) in line for path, line in zip((one, two, three), said, strict=True)] == [True] * 3
    assert files_of(tmp_path) == before
    for path in (one, three):
        path.unlink()
    assert main(encode) == 0 and main([*encode, "--check"]) == 0


@pytest.mark.parametrize(
    ("argument", "trainer", "how"),
    [
        ("step", "", {"step": 6}),
        ("step", "kohya:sdxl", {"side": 64, "step": 6}),
        ("buckets", "", {"side": 32, "step": 64}),
        ("buckets", "kohya:sdxl", {"side": 32}),
        ("buckets", "musubi:zi", {"side": 32, "step": 64}),
        ("bucket_sides", "", {"sides": (16, 64)}),
        ("bucket_sides", "", {"side": 32, "step": 16, "sides": (24, 64)}),
        ("bucket_sides", "kohya:sdxl", {"side": 64, "step": 16, "sides": (16, 72)}),
        ("bucket_sides", "", {"side": 32, "step": 16, "sides": (64, 16)}),
        ("bucket_sides", "", {"side": 32, "step": 16, "sides": (48, 64)}),
        ("bucket_sides", "musubi:zi", {"side": 32, "step": 16, "sides": (16, 64)}),
        ("buckets", "", {"side": 10**12}),
        ("buckets", "kohya:sdxl", {"side": 10**12}),
        ("buckets", "musubi:zi", {"side": 1 << 62}),
        ("bucket_sides", "", {"side": 64, "sides": (8, 8 * 10**12)}),
        ("step", "", {"side": 64, "step": 8 * 10**12}),
    ],
)
def test_buckets_that_cannot_be_are_refused_at_once(argument, trainer, how, weights, tmp_path):
    """Before the images are listed."""
    encoder, cache = Encoder(weights("sd")), find_cache(trainer, "") if trainer else None
    with refused(argument):
        encode_dataset([tmp_path / "none"], tmp_path / "out", encoder, Preparation(cache=cache, **how))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("trainer", ["", "kohya:sdxl", "musubi:zi", "ai-toolkit:sdxl", "simpletuner:sdxl"])
def test_sides_are_multiples_of_any_step(trainer):
    cache = find_cache(trainer, "") if trainer else None
    for step in (8, 24, 96, 104):
        how = Preparation(side=1040 // step * step, step=step, cache=cache)
        small = Preparation(side=step, step=step, cache=cache)
        for size in [(1600, 900), (97, 1000), (640, 640)]:
            bucket, square = how.place(size, 8).bucket, small.place(size, 8).bucket
            assert not any(side % step or side < 1 for side in bucket + square)


def test_no_flag_is_ignored(photos, weights, tmp_path, capsys):
    out, encode = str(tmp_path / "out"), ["encode", str(photos[0]), "--weights", str(weights("tiny")), "-o"]
    of_sets = (
        "--buckets 64|--step 8|--bucket-sides 8 64|--flip|--for kohya:sdxl|--shard 1|--part 1/2|--ray auto|--check"
    )
    commands = [(flag, [*encode, f"{out}.npy", *flag.split()]) for flag in of_sets.split("|")]
    commands += [(flag, [*encode, out, "--ray", "local", *flag.split()]) for flag in ("--part 1/2", "--check")]
    commands += [
        ("--scaled", [*encode, out, "--for", "kohya:sdxl", "--scaled"]),
        ("--tile", [*encode, out, "--tile", "64"]),
    ]
    decode = ["decode", str(photos[0]), "--weights", str(weights("tiny")), "-o", out]
    commands += [(flag, [*decode, *flag.split()]) for flag in ("--size 8", "--scaled", "--tile 64")]
    for flag, command in commands:
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"vaemem {command[0]}: {flag.split()[0]}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("trainer", ["", "kohya:sdxl"])
def test_a_shard_in_the_place_of_another_is_found(trainer, singles, weights, tmp_path):
    encode = ["encode", str(singles), "--weights", str(weights("sd")), "--buckets", "64", "--shard", "1"]
    encode += ["-o", str(tmp_path), *(["--for", trainer, "--step", "16"] if trainer else [])]
    assert main(encode) == 0
    one, two, *_ = sorted(tmp_path.rglob("latents-*"))
    two.write_bytes(one.read_bytes())
    assert main([*encode, "--check"]) == main(encode) == 1
    two.unlink()
    assert main(encode) == main([*encode, "--check"]) == 0


def test_parts_that_end_together_list_all_errors(photos, weights, tmp_path, monkeypatch):
    """A part never writes over the list of another. It reads its own shards, and the last one reads all."""
    given = {"encoder": Encoder(weights("tiny")), "preparation": BUCKETS, "shard": 7}
    encode_dataset([photos[0]], tmp_path / "whole", **given)
    out, write, second = tmp_path / "parts", vaemem.datasets.folder.write, []

    def write_late(path, data):
        if path.name == "errors.csv" and not second:
            second.append(True)
            encode_dataset([photos[0]], out, part=(2, 2), **given)
        write(path, data)

    read, seen = Folder.read, []
    monkeypatch.setattr(Folder, "read", lambda self, path, **how: seen.append(path) or read(self, path, **how))
    with monkeypatch.context() as patch:
        patch.setattr(vaemem.datasets.folder, "write", write_late)
        first = encode_dataset([photos[0]], out, part=(1, 2), **given)
    assert len(seen) == 5 and not first.is_whole
    last = encode_dataset([photos[0]], out, part=(2, 2), **given)
    assert len(seen) == 5 + 9 and last.is_whole and last.images == 54
    assert files_of(out) == files_of(tmp_path / "whole")
    checked = encode_dataset([photos[0]], out, part=(2, 2), check=True, **given)
    assert checked.images + first.images == last.images


def test_two_runs_that_begin_together_share_one_manifest(tmp_path, monkeypatch):
    """One that has found no manifest writes its own before another looks."""
    refusals, write = [], vaemem.datasets.folder.write

    def claim_again():
        with refused("out", names=["seed"], path=tmp_path) as caught:
            Folder(tmp_path).claim({"seed": 2})
        refusals.append(str(caught.value))

    other = threading.Thread(target=claim_again)

    def write_late(path, content):
        if not other.ident:
            other.start()
            other.join(0.5)
        write(path, content)

    monkeypatch.setattr(vaemem.datasets.folder, "write", write_late)
    Folder(tmp_path).claim({"seed": 1})
    other.join(60)
    assert len(refusals) == 1 and Folder(tmp_path).manifest()["seed"] == 1


@pytest.mark.parametrize("trainer", ["", "kohya:sdxl"])
def test_a_shard_of_other_settings_is_found(trainer, singles, weights, tmp_path):
    """As two runs leave it that began together where there are no locks."""
    encode = ["encode", str(singles), "--weights", str(weights("sd")), "--buckets", "64", "--shard", "1"]
    encode += ["--for", trainer, "--step", "16"] if trainer else []
    runs = {seed: [*encode, "--sample", str(seed), "-o", str(tmp_path / str(seed))] for seed in (1, 2)}
    assert [main(run) for run in runs.values()] == [0, 0]
    one, two = (next((tmp_path / str(seed)).rglob("latents-00000.*")) for seed in runs)
    one.write_bytes(two.read_bytes())
    assert main(runs[1]) == main([*runs[1], "--check"]) == 1
    if not trainer:
        assert main(["decode", str(tmp_path / "1"), "--weights", str(weights("sd")), "-o", str(tmp_path / "x")]) == 2
    one.unlink()
    assert main(runs[1]) == main([*runs[1], "--check"]) == 0


def rewritten(path, change):
    """Change the records in a shard's file."""
    data = path.read_bytes()
    if path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(data))))
        return
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    about = {name: json.loads(text) for name, text in header["__metadata__"].items() if name != "manifest"}
    header["__metadata__"] = {name: json.dumps(value) for name, value in change(about).items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("trainer", ["", "kohya:sdxl"])
@pytest.mark.parametrize(
    "change",
    [
        lambda about: {"records": about["records"]},
        lambda about: about | {"records": []},
        lambda about: about | {"errors": []},
        lambda about: about | {"records": {name: [] for name in about["records"]}},
        lambda about: about | {"records": {name: {} for name in about["records"]}},
        lambda about: about | {"records": {n: one | {"crop": [1]} for n, one in about["records"].items()}},
        lambda about: about | {"records": {n: one | {"sha256": 1, "files": 1} for n, one in about["records"].items()}},
        lambda about: about | {"records": {f"{name}x": one for name, one in about["records"].items()}},
    ],
)
def test_damaged_records_are_damaged_shards(change, trainer, singles, weights, tmp_path, capsys):
    encode = ["encode", str(singles), "--weights", str(weights("sd")), "--buckets", "64", "--shard", "1"]
    encode += ["-o", str(tmp_path), *(["--for", trainer, "--step", "16"] if trainer else [])]
    assert main(encode) == 0
    path = next(tmp_path.rglob("latents-00000.*"))
    rewritten(path, change)
    assert main([*encode, "--check"]) == main(encode) == 1
    assert str(path) in capsys.readouterr().err
    if not trainer:
        decode = ["decode", str(tmp_path), "--weights", str(weights("sd")), "-o", str(tmp_path / "x")]
        assert main(decode) == 2 and str(path) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"format": "vaemem', "[]", '{"name": "a web page"}', '{"format": "FORMAT"}'])
def test_a_damaged_manifest_is_named(text, photos, weights, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(text.replace("FORMAT", vaemem.datasets.folder.FORMAT))
    with refused("out", path=path if "FORMAT" not in text else tmp_path):
        encode_dataset([photos[0]], tmp_path, Encoder(weights("tiny")))
    with refused("latents", path=path):
        decode_dataset(tmp_path, tmp_path / "x", Decoder(weights("tiny")))


def test_another_data_set_is_refused(photos, weights, tmp_path):
    """Another VAE, crop, dtype, seed or list of images; not another limit."""
    sources = [photos[0] / "a"]
    encode_dataset(sources, tmp_path, Encoder(weights("sd")), BUCKETS)
    before = files_of(tmp_path)
    encode_dataset(sources, tmp_path, Encoder(weights("sd"), memory_limit="1 GiB", threads=1), BUCKETS)
    small_vae(seed=1).save(tmp_path / "other")
    for encoder, how, place in (
        (Encoder(tmp_path / "other"), BUCKETS, "sha256"),
        (Encoder(weights("sd"), dtype="bfloat16"), BUCKETS, "dtype"),
        (Encoder(weights("sd"), sample=1), BUCKETS, "sample"),
        (Encoder(weights("sd")), Preparation(side=32, step=16), "step"),
        (Encoder(weights("sd")), Preparation(side=32, step=8, pad="edge"), "pad"),
    ):
        with refused("out", names=[place]):
            encode_dataset(sources, tmp_path, encoder, how)
    with refused("out", names=["images"]):
        encode_dataset([photos[0]], tmp_path, Encoder(weights("sd")), BUCKETS)
    with refused("step"):
        encode_dataset(sources, tmp_path, Encoder(weights("sd")), Preparation(side=32, step=6))
    with refused("images", names=["two"]):
        encode_dataset(sources * 2, tmp_path, Encoder(weights("sd")), BUCKETS)
    with refused("images"):
        encode_dataset([tmp_path / "other"], tmp_path, Encoder(weights("sd")), BUCKETS)
    assert {name: data for name, data in files_of(tmp_path).items() if "other" not in name} == before


@pytest.mark.thorough
def test_on_a_gpu(cuda, photos, weights, tmp_path):
    """The manifest's hash is the CPU's, so either can go on, if its settings are the same."""
    sources = [str(photos[0] / "a" / "0000*")]
    for device in ("cuda", "cpu"):
        summary = encode_dataset(sources, tmp_path, Encoder(weights("sd"), dtype="bfloat16", device=device), BUCKETS)
        assert summary.images == 4 and not summary.errors


def packed(photos, kind, path):
    """The readable and the unreadable images of a folder in another container, with their captions."""
    items = list_images([photos])
    if kind == "tar":
        with tarfile.open(path, "w") as tar:
            for item in items:
                tar.add(photos / item.name, f"./{item.name}")
                if (caption := (photos / item.name).with_suffix(".txt")).exists():
                    tar.add(caption, f"./{item.name[:-4]}.txt")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        found, captions = zip(*(item.open()() for item in items), strict=True)
        images = [{"bytes": data, "path": item.name} for data, item in zip(found, items, strict=True)]
        images = [item["bytes"] for item in images] if kind == "binary" else images
        parquet.write_table(arrow.table({"image": images, "text": captions}), path, row_group_size=13)
    return items


@pytest.mark.parametrize("kind", ["tar", "struct", "binary"])
def test_containers_give_what_folders_give(kind, photos, weights, tmp_path):
    path = tmp_path / ("images.tar" if kind == "tar" else "images.parquet")
    items = packed(photos[0], kind, path)
    encoder = Encoder(weights("tiny"))
    for source, out in ((photos[0], "folder"), (tmp_path / "images.*", "packed")):
        encode_dataset([source], tmp_path / out, encoder, BUCKETS)
    want, got = latents_of(tmp_path / "folder"), latents_of(tmp_path / "packed")
    for i, item in enumerate(items):
        name = f"images.tar/{item.name}" if kind == "tar" else f"images.parquet/{i:09d}"
        assert (item.name in want) == (name in got)
        if name in got:
            assert got[name][0] == want[item.name][0] and np.array_equal(got[name][1], want[item.name][1])


def test_a_row_group_is_read_once(tmp_path, monkeypatch):
    """Also at the borders of groups, by four threads. Few are kept at a time, and no file stays open."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [bytes([i]) * 20_000 for i in range(60)], "text": ["x"] * 60})
    for number, rows in enumerate((1, 13, *[60] * 10)):
        how = {"row_group_size": rows, "compression": "none", "use_dictionary": False}
        parquet.write_table(table, tmp_path / f"{number}.parquet", **how)
    opened, closed, loaded = [], [], []
    del table

    class Watched(parquet.ParquetFile):
        def __init__(self, path, **how):
            super().__init__(path, **how)
            self.name = os.path.basename(path)
            opened.append(self.name)

        def close(self, *given):
            super().close(*given)
            closed.append(self.name)

        def read_row_group(self, number, *given, **how):
            loaded.append((self.name, number))
            return super().read_row_group(number, *given, **how)

    monkeypatch.setattr(parquet, "ParquetFile", Watched)
    items = list_images([tmp_path / "*.parquet"])
    gc.collect()
    before = arrow.total_allocated_bytes()
    for part in (items, items[::7]):
        loaded.clear()
        for i, (data, caption) in enumerate(read_ahead(part, lambda read: read())):
            assert (data[:1], caption) == (bytes([items.index(part[i]) % 60]), "x")
            held = arrow.total_allocated_bytes() - before
            # one group in use, and one that is loaded: its bytes in the file and a buffer that grows by doubling
            assert held < 20_000 * 60 * (1 + 1 + 2) + 100_000 or part is not items
        assert len(loaded) == len({*loaded})
    assert len(items) == 720 and arrow.total_allocated_bytes() - before < 20_000
    assert sorted(opened) == sorted(closed) and len(opened) > 6


def test_faults_of_names_and_captions_are_their_images(photos, weights, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    picture = file_of(drawn(16, 16))
    captions = arrow.array([b"a caf\xc3\xa9", b"\xff", None], arrow.binary())
    parquet.write_table(arrow.table({"image": [picture] * 3, "text": captions}), tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"image": [picture] * 2, "text": [["a", "list"], None]}), tmp_path / "b.parquet")
    with tarfile.open(tmp_path / "c.tar", "w") as tar:
        for name in ("good.png", "caf\udce9.png"):
            member = tarfile.TarInfo(name)
            member.size = len(picture)
            tar.addfile(member, io.BytesIO(picture))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "good.png").write_bytes(picture)
    with contextlib.suppress(OSError):  # not all file systems keep such names
        (tmp_path / "d" / "caf\udce9.png").write_bytes(picture)
    sources = [tmp_path / name for name in ("a.parquet", "b.parquet", "c.tar", "d")]
    summary = encode_dataset(sources, tmp_path / "out", Encoder(weights("tiny"), sample=0))
    bad = ["a.parquet/000000001", "b.parquet/000000000", "c.tar/caf\\udce9.png"]
    bad += ["caf\\udce9.png"] * (len(os.listdir(tmp_path / "d")) == 2)
    assert sorted(summary.errors) == bad and summary.images == 5
    assert latents_of(tmp_path / "out")["a.parquet/000000000"][0]["caption"] == "a caf\u00e9"
    with open(tmp_path / "out" / "errors.csv", newline="", encoding="utf-8") as f:
        assert sorted(row["name"] for row in csv.DictReader(f)) == bad


def test_captions_and_sources(tmp_path):
    (tmp_path / "x.jpg").write_bytes(b"")
    (tmp_path / "x.caption").write_text(" a cat\n")
    (tmp_path / ".hidden.jpg").write_bytes(b"")
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "y.png").symlink_to("nowhere")
    item, link = list_images([tmp_path])
    assert (link.name, link.size) == ("y.png", 0)
    assert (item.name, item.size, item.open()()) == ("x.jpg", 0, (b"", "a cat"))
    assert [one.name for one in list_images([str(tmp_path / "*.jpg")])] == ["x.jpg"]
    for wrong in (tmp_path / "none", tmp_path / "notes.md"):
        with refused("images", path=wrong):
            list_images([wrong])
    (tmp_path / "cut.tar").write_bytes(b"no tar" * 200)
    with refused("images", path=tmp_path / "cut.tar"):
        list_images([tmp_path / "cut.tar"])


def tar_of(path, members, **how):
    """Write a tar file of (name, bytes) or (name, type of link, target)."""
    with tarfile.open(path, "w", **how) as tar:
        for name, *held in members:
            one = tarfile.TarInfo(name)
            if len(held) == 1:
                one.size = len(held[0])
            else:
                one.type, one.linkname = held
            tar.addfile(one, io.BytesIO(held[0]) if len(held) == 1 else None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:1024],  # cut between two members
        lambda data: data[: 1024 + 512],  # ... in the middle of a member
        lambda data: data[: 1024 + 100],  # ... and of a header
        lambda data: data[:1024] + b"x" + data[1025:],  # a header that is damaged
        lambda data: data[:1024] + bytes(512) + data[1536:],  # ... or missing
        lambda data: data + data,
        lambda data: data[:124] + (-512).to_bytes(12, signed=True) + data[136:],
        lambda data: with_checksum(data, 124, (-512).to_bytes(12, signed=True)),  # a size before the member
    ],
)
def test_a_tar_file_that_is_cut_or_damaged_is_refused(damage, tmp_path):
    tar_of(tmp_path / "x.tar", [(f"{i}.png", bytes([i]) * 500) for i in range(4)])
    whole = (tmp_path / "x.tar").read_bytes()
    assert len(list_images([tmp_path / "x.tar"])) == 4
    (tmp_path / "x.tar").write_bytes(damage(whole))
    with refused("images", path=tmp_path / "x.tar"):
        list_images([tmp_path / "x.tar"])


def with_checksum(data, at, field):
    """Return a tar file with another field in its first header, and the checksum of that."""
    data = bytearray(data)
    data[at : at + len(field)], data[148:156] = field, b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def test_links_in_a_tar_file_lead_to_members(tmp_path):
    """One that leads nowhere is its image's error."""
    members = [("a/x.png", b"one"), ("./a/x.txt", b"caption"), ("b/y.png", tarfile.LNKTYPE, "a/x.png")]
    members += [("b/z.png", tarfile.SYMTYPE, "../a/x.png"), ("b/z.txt", tarfile.SYMTYPE, "w.txt")]
    members += [("b/w.txt", tarfile.SYMTYPE, "../a/x.txt"), ("pipe.png", tarfile.FIFOTYPE, "")]
    members += [("loop.png", tarfile.SYMTYPE, "loop.png"), ("out.png", tarfile.SYMTYPE, "/etc/hostname")]
    tar_of(tmp_path / "x.tar", members)
    found = {item.name.removeprefix("x.tar/"): item for item in list_images([tmp_path / "x.tar"])}
    good = {"a/x.png": (b"one", "caption"), "b/y.png": (b"one", None), "b/z.png": (b"one", "caption")}
    assert {name: found.pop(name).open()() for name in good} == good
    assert {*found} == {"pipe.png", "loop.png", "out.png"}
    for item in found.values():
        with refused("image"):
            item.open()()


def test_sparse_members_of_a_tar_file_have_their_holes(tmp_path):
    """Members that GNU tar stores without their zeros."""
    picture = file_of(drawn(16, 16))
    with open(tmp_path / "hole.png", "wb") as f:
        f.write(picture)
        f.truncate(1 << 20)
    (tmp_path / "next.png").write_bytes(picture)
    for form in ("oldgnu", "posix"):
        make = ["tar", "--sparse", f"--format={form}", "-cf", f"{form}.tar", "hole.png", "next.png"]
        if subprocess.run(make, cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("there is no GNU tar")
        hole, after = list_images([tmp_path / f"{form}.tar"])
        assert (tmp_path / f"{form}.tar").stat().st_size < 1 << 19 and hole.size == 1 << 20
        assert hole.open()()[0] == (tmp_path / "hole.png").read_bytes() and after.open()()[0] == picture


def test_a_file_that_claims_more_than_it_holds_is_its_images_error(weights, tmp_path):
    """A sparse file of a terabyte, on disk and in a tar file; more rows of Parquet than bytes."""
    (tmp_path / "set").mkdir()
    with open(tmp_path / "set" / "a.png", "wb") as f:
        f.truncate(1 << 40)
    summary = encode_dataset([tmp_path / "set"], tmp_path / "out", Encoder(weights("tiny")))
    assert [*summary.errors] == ["a.png"]
    if not subprocess.run(
        ["tar", "--sparse", "-cf", "a.tar", "set/a.png"], cwd=tmp_path, capture_output=True
    ).returncode:
        summary = encode_dataset([tmp_path / "a.tar"], tmp_path / "tar", Encoder(weights("tiny")))
        assert [*summary.errors] == ["a.tar/set/a.png"]


def test_rows_of_parquet_that_take_no_space(tmp_path):
    """More rows than bytes are refused before they are listed. A picture that many rows share is read once."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"image": arrow.nulls(10**6, arrow.binary())}), path)
    with refused("images", path=path, names=[10**6]):
        list_images([path])
    picture, before = os.urandom(1 << 20), arrow.total_allocated_bytes()
    for image in ([picture] * 500, [{"bytes": picture}] * 500):
        parquet.write_table(arrow.table({"image": image}), path)
        del image
        before = arrow.total_allocated_bytes()
        reads = [item.open() for item in list_images([path])]
        assert path.stat().st_size < 2 << 20 and reads[499]()[0] == picture
        assert arrow.total_allocated_bytes() - before < 16 << 20


def test_two_columns_of_one_name_are_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    picture, path = file_of(drawn(16, 16)), tmp_path / "x.parquet"
    for names in (["image", "image"], ["image", "text", "text"]):
        parquet.write_table(arrow.Table.from_arrays([arrow.array([picture])] * len(names), names), path)
        with refused("images", wanted=f"one column named {names[-1]!r}", path=path):
            list_images([path])


@pytest.mark.skipif(os.name == "nt", reason="pipes and links of POSIX systems")
def test_pipes_among_images_are_passed_over(weights, tmp_path):
    """Nothing waits for a writer, of images or captions."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "good.png").write_bytes(file_of(drawn(16, 16)))
    (tmp_path / "set" / "said.png").write_bytes(file_of(drawn(16, 16)))
    for name in ("pipe.png", "said.txt"):
        os.mkfifo(tmp_path / "set" / name)
    (tmp_path / "set" / "zero.png").symlink_to("/dev/zero")
    summary = encode_dataset([tmp_path / "set"], tmp_path / "out", Encoder(weights("tiny")))
    assert sorted(summary.errors) == ["pipe.png", "said.png", "zero.png"] and summary.images == 1
    os.mkfifo(tmp_path / "x.tar")
    for path in (tmp_path / "x.tar", tmp_path / "set" / "pipe.png"):
        with refused("images", path=path):
            list_images([path])


@pytest.mark.parametrize("trainer", ["", "kohya:sdxl"])
@pytest.mark.parametrize("length", [200, 248, 251, 255])
def test_names_of_any_length(length, trainer, weights, tmp_path):
    """A caption's name, or a cache's, that is too long ends no run."""
    (tmp_path / "set").mkdir()
    name = "x" * (length - 4) + ".png"
    for one in (name, "y.png"):
        (tmp_path / "set" / one).write_bytes(file_of(drawn(64, 64)))
    cache = find_cache(trainer, "") if trainer else None
    how = Preparation(side=64, step=16, cache=cache, sides=(16, 64) if cache else None)
    summary = encode_dataset([tmp_path / "set"], tmp_path / "out", Encoder(weights("sd"), sample=0), how)
    is_kept = length == 200 or not trainer
    assert [*summary.errors] == ([] if is_kept else [name]) and summary.images == 1 + is_kept


@pytest.mark.skipif(os.name == "nt", reason="pipes and links of POSIX systems")
def test_links_that_double_the_paths_are_refused(tmp_path):
    """2^24 paths lead to the last folder."""
    for i in range(25):
        (tmp_path / str(i)).mkdir()
        for name in "ab" * (i < 24):
            (tmp_path / str(i) / name).symlink_to(f"../{i + 1}")
    with refused("images", wanted="at most 16 paths to one folder"):
        list_images([tmp_path / "0"])


@pytest.mark.parametrize(
    "links", [{"a/loop": "."}, {"a/up": "../.."}, {"a/other": "../../other", "../other/back": "../set"}]
)
def test_a_loop_of_links_is_refused(links, tmp_path):
    for name in ("set/a", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "set" / "a" / "x.png").write_bytes(b"")
    assert len(list_images([tmp_path / "set"])) == 1
    for name, target in links.items():
        (tmp_path / "set" / name).symlink_to(target)
    with refused("images", got="a link to a folder around it"):
        list_images([tmp_path / "set"])


def test_links_to_folders_are_followed(tmp_path):
    for name in ("set", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "x.png").write_bytes(b"")
    for name in ("one", "two"):
        (tmp_path / "set" / name).symlink_to("../other")
    assert [item.name for item in list_images([tmp_path / "set"])] == ["one/x.png", "two/x.png"]


def test_an_unreadable_folder_ends_the_run(photos, monkeypatch):
    scan = os.scandir

    def fail(path):
        if os.fspath(path).endswith("b"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(PermissionError) as raised:
        list_images([photos[0]])
    assert raised.value.filename == str(photos[0] / "b")


# ---- trainers' caches, by readers that are written from the trainers' sources (vaemem/datasets/trainers.py) ----

# (trainer, width, height): the answers of the trainer's own code, with buckets of 1024. They are the image's size after
# scaling, and the bucket.
BUCKETS_OF = {
    ("kohya:sdxl", 1600, 900): ((1024, 576), (1024, 576)),
    ("musubi:zi", 1600, 900): ((1365, 768), (1360, 768)),
    ("ai-toolkit:sdxl", 1600, 900): ((1366, 768), (1344, 768)),
    ("simpletuner:sdxl", 1600, 900): ((1820, 1024), (1024, 1024)),
    ("kohya:sdxl", 640, 481): ((1024, 770), (1024, 768)),
    ("musubi:zi", 640, 481): ((1184, 890), (1184, 880)),
    ("ai-toolkit:sdxl", 640, 481): ((682, 512), (640, 512)),
    ("simpletuner:sdxl", 640, 481): ((1362, 1024), (1024, 1024)),
    ("kohya:sdxl", 97, 1000): ((256, 2639), (256, 1024)),
    ("musubi:zi", 97, 1000): ((512, 5278), (512, 2048)),
    ("ai-toolkit:sdxl", 97, 1000): ((128, 1320), (128, 960)),
    ("simpletuner:sdxl", 97, 1000): ((1024, 10556), (1024, 1024)),
}


def read_kohya(folder, name, size, bucket, suffix, sized, flip):
    """Read a cache as strategy_base.py does: it makes the path from the image's, checks the keys, and loads."""
    with np.load(folder / f"{name.rpartition('.')[0]}_{size[0]:04d}x{size[1]:04d}_{suffix}.npz") as held:
        end = f"_{bucket[1] // 4}x{bucket[0] // 4}" if sized else ""
        assert {*held} == {
            f"{key}{end}" for key in ("latents", "original_size", "crop_ltrb", *["latents_flipped"] * flip)
        }
        assert held[f"original_size{end}"].tolist() == list(size)
        left, top, right, bottom = held[f"crop_ltrb{end}"].tolist()
        assert left == 0 or top == 0
        assert abs((right - left) / (bottom - top) - size[0] / size[1]) < 1e-9
        return [held[f"{key}{end}"] for key in ("latents", *["latents_flipped"] * flip)]


def read_musubi(folder, name, size, suffix, architecture, frames):
    """bucket.py and image_video_dataset.py: the size from the path; the key without its type and its size."""
    safetensors = pytest.importorskip("safetensors")
    stem = os.path.basename(name).rpartition(".")[0]
    path = folder / f"{stem}_{size[0]:04d}x{size[1]:04d}_{suffix}.safetensors"
    assert [int(side) for side in path.stem.split("_")[-2].split("x")] == list(size)
    with safetensors.safe_open(path, "numpy") as held:
        about = {"architecture": architecture, "width": str(size[0]), "height": str(size[1]), "format_version": "1.0.1"}
        assert held.metadata() == about
        (key,) = held.keys()
        latent = held.get_tensor(key)
    height, width = latent.shape[-2:]
    assert key == f"latents_{frames}{height}x{width}_{latent.dtype.name}"
    return latent


def read_toolkit(folder, name, size, scaled, crop, bucket, version):
    """Read a cache as dataloader_mixins.py does: a hash of the settings, as JSON with sorted keys, names the file."""
    safetensors = pytest.importorskip("safetensors")
    info = {"crop_height": bucket[1], "crop_width": bucket[0], "crop_x": crop[0], "crop_y": crop[1]}
    info |= {"filename": os.path.basename(name), "latent_space_version": version, "latent_version": 1}
    info |= {"scale_to_height": scaled[1], "scale_to_width": scaled[0]}
    end = base64.urlsafe_b64encode(hashlib.md5(json.dumps(info).encode()).digest()).decode().replace("=", "")
    path = (folder / name).parent / "_latent_cache" / f"{Path(name).stem}_{end}.safetensors"
    with safetensors.safe_open(path, "numpy") as held:
        assert held.metadata()["filename"] == os.path.basename(name)
        return held.get_tensor("latent")


def read_simpletuner(folder, name):
    """vae.py: a bare tensor, by the hash of the stem, in the image's folder."""
    torch = pytest.importorskip("torch")
    path = (folder / name).parent / f"{hashlib.sha256(Path(name).stem.encode()).hexdigest()}.pt"
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def singles(tmp_path_factory):
    """Images whose stems are all different, one of them turned."""
    folder = tmp_path_factory.mktemp("singles")
    turned = Image.Exif()
    turned[0x0112] = 6
    for i, (height, width) in enumerate([(90, 120), (130, 70), (64, 64), (200, 64)]):
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        how = {"exif": turned} if i == 0 else {}
        Image.fromarray(drawn(height, width, i)).save(folder / "ab"[i % 2] / f"{i:03d}.png", **how)
    return folder


CACHED = {
    "kohya:sdxl": ("sd", {"sample": 0}),
    "kohya:flux": ("flux", {"sample": 0, "scaled": True}),
    "kohya:anima": ("qwen", {"scaled": True}),
    "musubi:zi": ("flux", {}),
    "musubi:qi": ("qwen", {"scaled": True}),
    "musubi:f2d": ("flux2", {"scaled": True}),
    "ai-toolkit:flux1": ("flux", {"sample": 0, "scaled": True}),
    "simpletuner:sdxl": ("sd", {"sample": 0, "scaled": True}),
}
FILTERS = {
    "kohya": ("BOX", "LANCZOS"),
    "musubi": ("BOX", "LANCZOS"),
    "ai-toolkit": ("BICUBIC",) * 2,
    "simpletuner": ("LANCZOS",) * 2,
}


@pytest.mark.parametrize(("trainer", "dtype"), [*zip(CACHED, ["float32", "bfloat16"] * 4, strict=True)])
def test_a_trainer_reads_its_cache(trainer, dtype, singles, weights, tmp_path, capsys):
    kind, how = CACHED[trainer]
    house, architecture = trainer.split(":")
    flip, turns = house == "kohya", house in ("ai-toolkit", "simpletuner")
    command = ["encode", str(singles), "--weights", str(weights(kind)), "--buckets", "64", "--for", trainer]
    command += ["--step", "16", "--dtype", dtype, "-o", str(tmp_path), *["--flip"] * flip]
    command += ["--bucket-sides", "32", "128"] if flip else []
    assert main(command) == 0 and main([*command, "--check"]) == 0
    assert "4 images\n" in capsys.readouterr().out
    encode = Encoder(weights(kind), dtype=dtype, **how)
    records = Folder(tmp_path / ".vaemem").path / "latents-00000.json"
    for name, record in json.loads(records.read_text())["records"].items():
        picture = vaemem.engine.images.read_image(singles / name, [], turn=turns)
        size, scaled, (left, top), bucket = (record[key] for key in ("size", "scaled", "crop", "bucket"))
        assert list(picture.shape[1::-1]) == size
        filters = FILTERS[house][scaled[0] > size[0] or scaled[1] > size[1]]
        if scaled != size:
            picture = np.asarray(Image.fromarray(picture).resize(scaled, Image.Resampling[filters]))
        cut = picture[top : top + bucket[1], left : left + bucket[0]]
        names, cuts = [name, name + " flipped"][: 1 + flip], [cut, cut[:, ::-1]][: 1 + flip]
        want = encode({"image": cuts, "name": names})["latent"].astype(dtype)
        if house == "kohya":
            got = read_kohya(tmp_path, name, size, bucket, architecture, architecture != "sdxl", flip)
            assert all(latent.dtype == np.float32 for latent in got)
        elif house == "musubi":
            full = {"zi": "z_image", "qi": "qwen_image", "f2d": "flux_2_dev"}[architecture]
            latent = read_musubi(tmp_path, name, size, architecture, full, "" if architecture == "f2d" else "1x")
            got = [latent[:, 0] if architecture == "qi" else latent]
        elif house == "ai-toolkit":
            got = [read_toolkit(tmp_path, name, size, scaled, (left, top), bucket, architecture)]
        else:
            latent = read_simpletuner(tmp_path, name)
            assert str(latent.dtype) == f"torch.{dtype}"
            got = [latent.float().numpy()]
        for one, other in zip(got, want, strict=True):
            assert np.array_equal(np.asarray(one, np.float32), other.astype(np.float32))
    before = files_of(tmp_path)
    next(path for path in tmp_path.rglob("*[0-9a-z].[nps]*") if path.is_file()).write_bytes(b"")
    assert main([*command, "--check"]) == 1
    records.unlink()
    assert main(command) == 0 and files_of(tmp_path) == before


@pytest.mark.parametrize(("trainer", "width", "height"), BUCKETS_OF)
def test_buckets_are_the_trainers(trainer, width, height):
    cache = find_cache(trainer, "")
    assert cache.bucket((width, height), 1024, cache.step, None) == BUCKETS_OF[trainer, width, height]


def test_what_a_trainer_cannot_have(singles, weights, tmp_path):
    for text, model, known in (("kohya", "sdxl", "sdxl"), ("musubi", "zimage", "zi"), ("ai-toolkit", "flux", "flux1")):
        assert find_cache(text, model).name == known
    for text in ("kohya", "musubi", "musubi:sdxl", "onetrainer"):  # two of FLUX's, none of SDXL's, unknown ones
        with refused("trainer"):
            find_cache(text, "flux" if text == "kohya" else "sdxl")
    with refused("sample"):
        cache = find_cache("kohya:sdxl", "")
        encode_dataset([singles], tmp_path, Encoder(weights("sd"), sample="moments"), Preparation(64, cache=cache))
    encoder, cache = Encoder(weights("sd")), find_cache("simpletuner:sdxl", "")
    for argument, how in (
        ("buckets", {"cache": cache}),
        ("buckets", {"cache": cache, "side": 72}),
        ("pad", {"cache": cache, "side": 64, "pad": "edge"}),
        ("flip", {"cache": cache, "side": 64, "flip": True}),
    ):
        with refused(argument):
            encode_dataset([singles], tmp_path, encoder, Preparation(**how))
    (tmp_path / "twins").mkdir()
    for name in ("a.png", "a.jpg"):
        Image.fromarray(drawn(64, 64)).save(tmp_path / "twins" / name)
    with refused("images"):
        encode_dataset([tmp_path / "twins"], tmp_path, encoder, Preparation(64, cache=cache))


PACKAGES = "daft", "datasets", "pyspark", "ray"


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not here")
@pytest.mark.filterwarnings("ignore")  # other packages'
@pytest.mark.parametrize("package", ["", *(pytest.param(name, marks=pytest.mark.thorough) for name in PACKAGES)])
def test_the_document(package, tmp_path, monkeypatch, capsys):
    """Run the document's commands with smaller buckets, and compare what they print. Run its programs whose packages
    are installed."""
    pytest.importorskip("torch")
    pytest.importorskip(package or "safetensors")
    if package == "pyspark" and not shutil.which("java"):
        pytest.skip("Spark needs Java")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    draw_photos(tmp_path / "photos", 22)
    small_vae().save(tmp_path / "vae")
    small_vae("flux").save(tmp_path / "zimage")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(console|python|text)\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 6
    names = {"__name__": "__main__"}  # programs' classes pickle by value
    for kind, block in blocks:
        if kind == "python":
            if "".join(re.findall(rf"^(?:import|from) ({'|'.join(PACKAGES)})\b", block, re.M)) in ("", package):
                exec(block, names)
            continue
        printed = capsys.readouterr().out
        if kind == "text":
            assert printed == block
        if kind == "text" or ("--ray" in block and package != "ray"):
            continue
        for typed, shown in zip(*[iter(block.splitlines())] * 2, strict=True):
            assert main(shlex.split(typed.replace("1024", "64").removeprefix("$ vaemem "))) == 0
            assert capsys.readouterr().out.splitlines() == [shown]
    assert len(names["latents"]) == 20
    if package in ("daft", "pyspark", "ray"):
        assert len({row["path"] for row in names["rows"]}) == 20
    for row in names.get("rows", []):
        image = "pictures/" + row["path"].rpartition("pictures/")[2]
        (want,) = Encoder("vae")({"image": [image]})["latent"]
        assert np.array_equal(np.reshape(row["latent"], want.shape), want)
    if package == "ray":
        names["ray"].shutdown()
    if package == "pyspark":
        names["spark"].stop()


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_kills_at_random_moments(weights, tmp_path):
    """2,000 images of odd modes in a folder, a tar file and a Parquet file: ten kills change no file. Each kill lands
    between a run's first shard and its last, every second one while a file is being written. The shards are whole."""
    bad = draw_photos(tmp_path / "photos", 2000)
    packed(tmp_path / "photos" / "b", "tar", tmp_path / "b.tar")
    packed(tmp_path / "photos" / "c", "struct", tmp_path / "c.parquet")
    sources = [str(tmp_path / name) for name in ("photos/a", "b.tar", "c.parquet")]
    command = [sys.executable, "-m", "vaemem", "encode", *sources, "--weights", str(weights("tiny"))]
    command += ["--buckets", "64", "--step", "8", "--shard", "50", "--sample", "1", "-o"]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    want, moments, killed = files_of(tmp_path / "whole"), random.Random(0), tmp_path / "killed"

    def poll(happened):
        """Wait for something that happens while the run goes on."""
        while not happened():
            assert run.poll() is None
            time.sleep(0.0005)

    def is_writing():
        """Stop the run, and let it go on unless it is writing a file."""
        if not list(killed.glob(".vaemem-*.part")):
            return False
        run.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(run.pid, os.WUNTRACED)[1])
        if found := list(killed.glob(".vaemem-*.part")):
            return found
        run.send_signal(signal.SIGCONT)
        return False

    for kill in range(10):
        before = len(list(killed.glob("latents-*")))
        run = subprocess.Popen([*command, killed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        poll(lambda before=before: len(list(killed.glob("latents-*"))) > before)  # it is at work
        if kill % 2:
            poll(is_writing)
        else:
            time.sleep(moments.uniform(0, 0.2))
        run.kill()
        assert run.wait() == -signal.SIGKILL
        assert before < shards_of(killed, want) < 40
        assert kill % 2 == 0 or list(killed.glob(".vaemem-*.part"))
    subprocess.run([*command, tmp_path / "killed"], check=True, capture_output=True)
    assert files_of(killed) == want
    assert len(latents_of(tmp_path / "whole")) == 2000 - len(bad)
    assert main([*command[3:], str(tmp_path / "killed"), "--check"]) == 0
