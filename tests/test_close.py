"""A VAE's end, and a run's: close, with, and the event that cancels."""

import threading

import numpy as np
import pytest
from engine import images, latents, small_vae
from errors import refused

import vaemem
from vaemem import VAE, Tiling

pytestmark = [pytest.mark.core, pytest.mark.python]


def test_with_closes(tmp_path):
    with small_vae() as vae:
        assert not vae.closed
        held, z = vae.reserved_bytes, latents(vae, 2, 2)
        image = vae.decode(z)
        assert held > 0
    run = vae.last_run
    assert vae.closed and repr(vae) == "<VAE custom: closed>" and vae.model == "custom" and run.peak_bytes > 0
    assert np.isfinite(image).all(), "results stay"
    vae.close()
    for call in (
        lambda: vae.decode(z),
        lambda: vae.encode(images(8, 8)),
        lambda: vae.estimate("decode", 8, 8),
        lambda: vae.largest("decode", "1 GiB"),
        lambda: vae.save(tmp_path / "a.safetensors"),
        lambda: vae.trim(),
        lambda: vae.reserved_bytes,
        lambda: vae.device,
        lambda: vae.__enter__(),
    ):
        with refused("VAE"):
            call()


def test_with_closes_after_an_error():
    with pytest.raises(ZeroDivisionError), small_vae() as vae:
        raise ZeroDivisionError
    assert vae.closed


@pytest.mark.resident
def test_close_gives_the_memory_back():
    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    vae = VAE.random("sdxl", parts="decoder")
    held, before = vae.reserved_bytes, resident()
    assert held > 150 << 20
    vae.close()
    assert before - resident() > 0.9 * held


def test_closed_during_a_run():
    vae = small_vae()
    z, want = latents(vae, 16, 16), small_vae().decode(latents(vae, 16, 16))
    assert np.array_equal(vae.decode(z, progress=lambda done, total: vae.close()), want)
    assert vae.closed


def test_a_copy_lives_on():
    vae = small_vae()
    z = latents(vae, 2, 2)
    want, copy = vae.decode(z), vae.copy()
    vae.close()
    assert np.array_equal(copy.decode(z), want)


# ---- cancelling ----


@pytest.mark.parametrize("tiling", [None, Tiling(64)])
@pytest.mark.parametrize("op", ["encode", "decode"])
def test_cancelled_from_another_thread(op, tiling):
    """Set when the run has begun, which its progress tells: it ends before its end."""
    vae, event, seen = small_vae(), threading.Event(), []
    held = vae.reserved_bytes
    data = latents(vae, 128, 128) if op == "decode" else images(512, 512)
    begun = threading.Event()
    other = threading.Thread(target=lambda: begun.wait(60) and event.set())
    other.start()

    def progress(done, total):
        begun.set()
        event.wait(60)
        seen.append(done)

    with refused(op, kind=vaemem.Cancelled):
        getattr(vae, op)(data, progress=progress, cancel=event, tiling=tiling)
    other.join()
    assert seen == seen[:1] and vae.last_run is None
    vae.trim()
    assert vae.reserved_bytes == held
    small = latents(vae, 2, 2)
    event.clear()
    assert np.array_equal(vae.decode(small, cancel=event), small_vae().decode(small))


def test_cancelled_without_progress():
    vae, event = small_vae(), threading.Event()
    threading.Timer(0.01, event.set).start()
    with pytest.raises(vaemem.Cancelled):
        for _ in range(10_000):
            vae.decode(latents(vae, 32, 32), cancel=event)


def test_cancelled_before_it_began():
    vae, event = small_vae(), threading.Event()
    event.set()
    with refused("decode", kind=vaemem.Cancelled):
        vae.decode(latents(vae, 2, 2), cancel=event)
    with refused("cancel", "bool", names=["threading.Event"], kind=TypeError):
        vae.decode(latents(vae, 2, 2), cancel=True)
