"""Pillow's images and files in and out, sizes that are no multiples, batches of several sizes."""

import struct
import zlib

import numpy as np
import pytest
from engine import config, images, latents, small_vae
from errors import refused

from vaemem import VAE

pytestmark = [pytest.mark.core, pytest.mark.python]

Image = pytest.importorskip("PIL.Image", reason="images need the extra 'image'")


def picture(height=8, width=12, mode="RGB", seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def same(a, b):
    return np.array_equal(a.moments, b.moments)


def test_pillow_and_files_are_bytes(tmp_path):
    vae, image = small_vae(), picture()
    image.save(tmp_path / "a.png")
    other = picture(seed=1)
    want = vae.encode(np.stack([np.asarray(image), np.asarray(other)]))
    assert same(vae.encode([image, other]), want)
    assert same(vae.encode((tmp_path / "a.png", other)), want)
    assert same(vae.encode(image), vae.encode(str(tmp_path / "a.png")))
    assert vae.encode(image).size == (8, 12) and vae.last_run.notes == ()
    assert same(vae.encode([np.asarray(image), np.asarray(other)]), want)


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA"])
def test_other_modes_become_rgb(mode):
    vae, image = small_vae(), picture(mode=mode)
    assert same(vae.encode(image), vae.encode(np.asarray(image.convert("RGB"))[None]))
    vae.encode(image)
    assert vae.last_run.notes == (("the image's alpha was dropped",) if "A" in mode else ())


def test_what_an_image_loses_is_noted(tmp_path):
    """Alpha, further frames, and the lower 8 of 16 bits; grey ones of 16 are rounded to the nearest of 8."""
    vae, frames = small_vae(), [picture(seed=seed) for seed in range(3)]
    frames[0].save(tmp_path / "a.tiff", save_all=True, append_images=frames[1:])
    assert same(vae.encode(tmp_path / "a.tiff"), vae.encode(frames[0]))
    vae.encode(tmp_path / "a.tiff")
    assert vae.last_run.notes == ("used only frame 1 of the image's 3",)
    with Image.open(tmp_path / "a.tiff") as several:
        several.seek(2)
        assert same(vae.encode(several), vae.encode(frames[2]))
    deep = np.random.default_rng(0).integers(0, 1 << 16, (8, 12), np.uint16)
    deep[0, :4] = 0, 128, 129, 65535  # 128 / 257 is less than a half
    Image.fromarray(deep).save(tmp_path / "grey.png")
    grey = np.rint(deep / 257).astype(np.uint8)
    assert grey[0, :4].tolist() == [0, 0, 1, 255]
    for given in (tmp_path / "grey.png", Image.fromarray(deep)):
        encoded = vae.encode(given)
        assert vae.last_run.notes == ("the image's 16 bits a channel were reduced to 8",)
        assert same(encoded, vae.encode(np.stack([grey] * 3, axis=-1)[None]))
    (tmp_path / "colour.png").write_bytes(png16(colours := np.stack([deep, deep[::-1], deep[:, ::-1]], axis=-1)))
    encoded = vae.encode(tmp_path / "colour.png")
    assert vae.last_run.notes == ("the image's 16 bits a channel were reduced to 8",)
    assert same(encoded, vae.encode((colours >> 8).astype(np.uint8)[None])), "Pillow's own"


def png16(pixels):
    """A PNG of 16 bits a channel and three channels, which Pillow cannot write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint16"])
@pytest.mark.parametrize("top", [255, 65535])
def test_numbers_with_the_range_of_bytes_are_refused(dtype, top):
    """What is said to do gives the image that was meant."""
    if (top, dtype) == (65535, "float16"):
        pytest.skip("65535 is infinite there")
    vae, white = small_vae(), np.iinfo(np.uint8 if top == 255 else np.uint16).max
    meant = np.random.default_rng(0).integers(0, white + 1, (1, 3, 8, 12)).astype(dtype)
    meant[0, 0, 0, :2] = 0, top
    half = f"{top / 2}"
    with refused("x", names=[top, half]):
        vae.encode(meant)
    vae.encode(meant.astype(np.float32) / float(half) - 1)
    vae.encode(meant.astype(np.float32) / top)  # dark, but an image
    vae.encode(images(8, 12) * 9)  # noise, which has negative numbers


def test_a_file_is_turned_as_its_exif_says(tmp_path):
    vae, image = small_vae(), picture(8, 12)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    encoded = vae.encode(tmp_path / "turned.png")
    assert encoded.size == (12, 8) and same(encoded, vae.encode(image.transpose(Image.Transpose.ROTATE_270)))


def test_pillow_out():
    vae = small_vae()
    z = latents(vae, 3, 5, batch=2)
    want = vae.decode(z, output_type="uint8")
    got = vae.decode(z, output_type="pil")
    assert [image.size for image in got] == [(20, 12)] * 2
    assert all(np.array_equal(np.asarray(image), pixels) for image, pixels in zip(got, want, strict=True))
    assert vae.estimate("decode", 12, 20, 2, output_type="pil").peak_bytes == vae.last_run.peak_bytes


@pytest.mark.parametrize("how", ["reflect", "edge"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_padding_and_cropping(how, as_bytes):
    vae = small_vae()
    x = images(10, 7, 2)
    widths = [(0, 0), (0, 0), (0, 2), (0, 1)]
    if as_bytes:
        x = np.random.default_rng(0).integers(0, 256, (2, 10, 7, 3), np.uint8)
        widths = [(0, 0), (0, 2), (0, 1), (0, 0)]
    encoded = vae.encode(x, pad=how)
    assert vae.last_run.notes == (f"padded from 10x7 to 12x8 ({how})",) and vae.last_run.height == 12
    assert same(encoded, vae.encode(np.pad(x, widths, mode=how))) and encoded.size == (10, 7)
    z = encoded.mode()
    for output_type, index in (("float", np.s_[:, :, :10, :7]), ("uint8", np.s_[:, :10, :7])):
        got = vae.decode(z, size=encoded.size, output_type=output_type)
        assert vae.last_run.notes == ("cropped from 12x8 to 10x7",)
        assert np.array_equal(got, vae.decode(z, output_type=output_type)[index])
    assert vae.decode(z, size=encoded.size, output_type="pil")[1].size == (7, 10)


def test_multiples_are_left_alone():
    vae, x = small_vae(), images(8, 12)
    assert same(vae.encode(x, pad="reflect"), vae.encode(x)) and vae.last_run.notes == ()
    z = latents(vae, 2, 3)
    assert np.array_equal(vae.decode(z, size=(8, 12)), vae.decode(z)) and vae.last_run.notes == ()


def test_padding_in_tiles():
    from vaemem import Tiling

    vae, x = small_vae(), images(30, 50)
    encoded = vae.encode(x, pad="edge", tiling=Tiling(32))
    assert encoded.moments.shape[2:] == (8, 13)
    assert vae.last_run.notes == ("padded from 30x50 to 32x52 (edge)", "6 tiles of 32x32")


def test_what_is_refused(tmp_path):
    vae = small_vae()
    (tmp_path / "a.png").write_bytes(b"no picture")
    depth = Image.fromarray(np.zeros((8, 8), np.float32))
    z, x = latents(vae, 2, 2), images(8, 8)
    masked = np.ma.masked_array(x, x > 0)
    for call, kind, message in (
        (lambda: vae.encode(masked), ValueError, ("x",)),
        (lambda: vae.encode([*masked]), ValueError, ("x",)),
        (lambda: vae.encode(masked.astype(np.uint8).transpose(0, 2, 3, 1)), ValueError, ("x",)),
        (lambda: vae.decode(np.ma.masked_array(z, z > 0)), ValueError, ("z",)),
        (lambda: vae.decode([*np.ma.masked_array(z, z > 0)]), ValueError, ("z",)),
        (lambda: vae.encode([picture(), picture(8, 8)]), ValueError, ("x",)),
        (lambda: vae.encode([images(8, 8)[0], images(8, 4)[0]]), ValueError, ("x", "(3, 8, 8) and (3, 8, 4)")),
        (lambda: vae.encode([picture(), 3]), TypeError, ("x",)),
        (lambda: vae.encode(picture(9, 8)), ValueError, ("height", 9)),
        (lambda: vae.encode(images(8, 8), pad="zeros"), ValueError, ("pad", "'zeros'")),
        (lambda: vae.encode(images(0, 8), pad="edge"), ValueError, ("height", 0)),
        (lambda: vae.encode(tmp_path / "b.png"), FileNotFoundError, ("x",)),
        (lambda: vae.encode(tmp_path / "a.png"), ValueError, ("x", "another")),
        (lambda: vae.encode(tmp_path), ValueError, ("x", "another")),
        (lambda: vae.encode(depth), ValueError, ("x",)),
        (lambda: vae.encode([]), ValueError, ("x", "(0,)")),
        (lambda: vae.decode(z, size=(9, 8)), ValueError, ("size", "9x8")),
        (lambda: vae.decode(z, size=8), TypeError, ("size", 8)),
        (lambda: vae.decode(z, output_type="pil", out=0), ValueError, ("output_type", "'pil'")),
    ):
        with refused(*message, kind=kind):
            call()
    assert np.isfinite(vae.decode(z)).all()


def test_two_channels_are_no_picture():
    vae = VAE.random(config=config("sd") | {"in_channels": 1, "out_channels": 2})
    with refused("output_type", "'pil'"):
        vae.decode(latents(vae, 2, 2), output_type="pil")
    with refused("x", "(1, 8, 12, 3)"):
        vae.encode(picture())
