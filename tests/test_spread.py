"""Sweeps and bounds in the workers of an executor: the results of a serial run, and what a dead worker leaves."""

import multiprocessing
import os
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest
from errors import refused, warned

from vaemem import VAE, bound, measure_sweep, predict_sweep
from vaemem.engine.configs import known_arch

pytestmark = pytest.mark.python

PREDICTED = {"models": ["sdxl", "flux"], "ops": ["encode", "decode_tiled"], "sizes": [1024, (512, 768)]}
PREDICTED |= {"dtypes": "float16", "tile": 512, "gpu": ["RTX 4090", "T4"]}
BOUND = {"models": "sdxl", "dtypes": "float16", "torch_version": "2.7.1+cu128", "sides": (512, 1024)}


@pytest.fixture(scope="module")
def workers():
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


class Deadly(Executor):
    """Its only worker dies after some tasks."""

    def __init__(self, after):
        self._pool, self._left = ProcessPoolExecutor(1, multiprocessing.get_context("spawn")), after

    def submit(self, function, /, *args, **settings):
        if self._left == 0:
            self._pool.submit(os._exit, 1)
        self._left -= 1
        return self._pool.submit(function, *args, **settings)

    def shutdown(self, wait=True, *, cancel_futures=False):
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def test_predicted_rows_are_the_serial_ones(workers):
    told = []
    table = predict_sweep(**PREDICTED, executor=workers, progress=lambda *work: told.append(work))
    assert [*table] == [*predict_sweep(**PREDICTED)] and told[-1][0] == told[-1][1] and len(told) == 16
    whole = {"models": "sd15", "ops": "pipeline", "sizes": 512, "gpu": "T4"}
    assert [*predict_sweep(**whole, executor=workers)] == [*predict_sweep(**whole)]
    config = {"models": dict(known_arch("sd15")), "ops": "decode", "sizes": 512, "gpu": "T4"}
    assert [*predict_sweep(**config, executor=workers)] == [*predict_sweep(**config)]


def test_formulas_are_the_serial_ones(workers):
    assert bound("comfyui", **BOUND, executor=workers).lines == bound("comfyui", **BOUND).lines


def test_measured_rows_are_the_serial_ones(workers):
    asked = {"models": "taesd", "ops": ["encode", "decode"], "sizes": [64, 96]}
    there, here = measure_sweep(**asked, executor=workers), measure_sweep(**asked)
    assert [row | {"seconds": 0} for row in there] == [row | {"seconds": 0} for row in here]
    with refused("models"):
        measure_sweep(VAE.random("taesd"), sizes=64, executor=workers)


def test_what_a_dead_worker_leaves():
    whole = predict_sweep(**PREDICTED)
    names = ["13 of 16", "sdxl RTX 4090 float16 tile 512 decode_tiled 512x768, sdxl T4"]
    with Deadly(3) as executor, warned(names=names) as seen:
        table = predict_sweep(**PREDICTED, executor=executor)
    assert seen[0].filename == __file__
    assert [*table] == [*whole][:3]
    with Deadly(5) as executor, warned(names=["vae encode_tiled float16, vae decode float16"]):
        found = bound("comfyui", **BOUND, executor=executor)
    with Deadly(0) as executor, warned() as seen, refused(names=["executor"], kind=RuntimeError):
        bound("comfyui", **BOUND, executor=executor)
    assert seen[0].filename == __file__
    lines = bound("comfyui", **BOUND).lines
    assert 0 < len(found.lines) < len(lines) and found.lines == lines[: len(found.lines)]


def test_an_error_of_a_task_ends_the_sweep(workers):
    with refused("height") as caught:
        predict_sweep("sdxl", "decode", [512, 1001], gpu="T4", executor=workers)
    assert len(caught.value.table) == 1
