"""Ray's cluster of two nodes, one of whose workers is killed: each image has its latent once, with the same bits."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from engine import small_vae
from errors import refused

import vaemem
from vaemem import Encoder
from vaemem.__main__ import main
from vaemem.datasets.fleet import encode_on_ray
from vaemem.datasets.shards import Preparation

Image = pytest.importorskip("PIL.Image")
ray = pytest.importorskip("ray")
utils = pytest.importorskip("ray.cluster_utils")
data = pytest.importorskip("ray.data")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
LIMIT = 64 << 20


@pytest.fixture(scope="module")
def address():
    nodes = utils.Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, memory=LIMIT, object_store_memory=80 << 20)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ray")
    small_vae().save(path / "vae")
    (path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        picture = rng.integers(0, 256, (*rng.integers(16, 80, 2), 3), np.uint8)
        Image.fromarray(picture).save(path / "photos" / f"{i:02d}.png")
    (path / "photos" / "bad.png").write_bytes(b"")
    return path


def killed_once(killed):
    """A class of encoders. One process, of any number, dies in its third call."""

    class Mortal(Encoder):
        def __call__(self, batch):
            object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
            if self.calls == 3 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    return Mortal


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_encode_survives_a_worker(address, folder, tmp_path, monkeypatch, capsys):
    command = ["encode", str(folder / "photos"), "--weights", str(folder / "vae"), "--buckets", "32", "--step", "8"]
    command += ["--shard", "4", "--sample", "1", "--memory-limit", str(LIMIT), "-o"]
    assert main([*command, str(tmp_path / "one")]) == 0
    monkeypatch.setenv("VAEMEM_THREADS", "1")
    monkeypatch.setattr(vaemem, "Encoder", killed_once(tmp_path / "killed"))
    assert main([*command, str(tmp_path / "many"), "--ray", address]) == 0
    printed = capsys.readouterr()
    assert (tmp_path / "killed").exists() and printed.err.count(" bad.png") == 2
    assert "many: 60 images, 1 passed over" in printed.out
    want, got = files_of(tmp_path / "one"), files_of(tmp_path / "many")
    assert len(want) == 16 + 2 and got == want


def test_errors_come_back(address, folder, tmp_path):
    given = address, [folder / "photos"], tmp_path
    with refused("memory_limit"):
        encode_on_ray(*given, Encoder(folder / "vae", threads=1), Preparation())
    with refused("ray"):
        encode_on_ray(*given, Encoder(folder / "vae", threads=1, memory_limit=2 * LIMIT), Preparation())
    with refused("model"):  # raised in a worker
        encode_on_ray(*given, Encoder(folder / "vae", "no model", threads=1, memory_limit=LIMIT), Preparation())


def test_ray_data_survives_a_worker(address, folder, tmp_path):
    settings = {"weights": str(folder / "vae"), "threads": 1, "memory_limit": LIMIT, "sample": 1, "pad": "edge"}
    paths = sorted(str(path) for path in Path(folder, "photos").glob("[0-9]*.png"))
    encode = Encoder(**settings)
    want = encode({"image": paths, "name": paths})["latent"]
    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        rows = data.from_items([{"image": path, "name": path} for path in paths], override_num_blocks=10).map_batches(
            killed_once(tmp_path / "killed"),
            fn_constructor_kwargs=settings,
            batch_size=3,
            num_cpus=encode.num_cpus,
            memory=encode.memory_bytes,
            compute=data.ActorPoolStrategy(size=2),
        )
        found = rows.take_all()
    finally:
        ray.shutdown()
    assert (tmp_path / "killed").exists()
    got = {row["name"]: np.asarray(row["latent"]) for row in found}
    assert len(found) == 60 and sorted(got) == paths
    assert all(np.array_equal(got[path], latent) for path, latent in zip(paths, want, strict=True))
