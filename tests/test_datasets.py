"""Encoders of batches, folders of latents that survive kills, and trainers' caches."""

import io
import pickle

import numpy as np
import pytest
from engine import config, small_vae
from errors import refused

import vaemem
from vaemem import Decoder, Encoder

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """By name, the path of a small VAE's weights, with its config."""
    folder = tmp_path_factory.mktemp("weights")

    def path(name):
        if not (folder / name).exists():
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
