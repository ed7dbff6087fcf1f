"""Whole runs in every kind of numbers, by every instruction set that computes it here: the error beside float32, and
the same bits for any number of threads and with a memory limit.

tests/test_emulator_amx.py runs this once more where AMX is emulated.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine import error, images, latents, run_core, small_vae
from errors import refused

from vaemem import _core

NUMBERS = [("bfloat16", "highest"), ("float16", "highest"), ("float32", "high"), ("float32", "medium")]
RUNS = [(*numbers, name) for numbers in NUMBERS for name, usable in _core.backends(*numbers) if usable]
# Half a step of what a pass stores and of the factors of its products, relative. A number that is split in two loses
# 2^-18 of itself, and the three products that take one's place leave out as much; float16 is split where pairs are
# multiplied.
STEP = {("bfloat16", "highest"): 2.0**-9, ("float32", "medium"): 2.0**-9}
STEP |= {("float16", "highest"): 2.0**-12, ("float32", "high"): 2.0**-18}

every_run = pytest.mark.parametrize("dtype,precision,backend", RUNS)
both_ways = pytest.mark.parametrize("op", ["decode", "encode"])


def model(vae, dtype, precision):
    made = _core.Model(vae.arch, "all", None, dtype, precision)
    for name, tensor in vae.state_dict().items():
        made.set_tensor(name, tensor)
    return made


@pytest.fixture(scope="module", params=["sd", "odd"])
def small(request):
    """A VAE, inputs of both operations, and what comes of them in float32."""
    vae = small_vae(request.param)
    inputs = {"decode": latents(vae, 9, 14), "encode": images(56, 88)}
    exact = model(vae, "float32", "highest")
    return vae, inputs, {op: run_core(exact, op, x)[0] for op, x in inputs.items()}


@pytest.mark.one_in(8)
@every_run
@both_ways
def test_error_beside_float32(small, op, dtype, precision, backend):
    vae, inputs, exact = small
    made = model(vae, dtype, precision)
    got, ran = run_core(made, op, inputs[op], backend=backend, threads=2)
    assert ran["backend"] == backend and ran["overflow"] is False
    # About 40 passes with three roundings each (of x, of weights, of what is stored), independent of each other, so
    # that they add up as their squares do; twice that, since an error is normalised with the rest.
    assert error(got, exact[op]) < 2 * np.sqrt(3 * 40) * STEP[dtype, precision]
    for threads in (1, 3):
        assert np.array_equal(run_core(made, op, inputs[op], backend=backend, threads=threads)[0], got)


@pytest.mark.parametrize("dtype,precision,backend", [run for run in RUNS if run[0] == "float32"])
def test_floats_show_themselves_what_is_not_finite(dtype, precision, backend):
    vae = small_vae("sd")
    z = latents(vae, 4, 4)
    z[0, 1, 2, 3] = np.nan
    got, ran = run_core(model(vae, dtype, precision), "decode", z, backend=backend, threads=2)
    assert np.isnan(got).all() and ran["overflow"] is False


@pytest.mark.parametrize("dtype,precision,backend", [run for run in RUNS if run[2] in ("amx", "avx512bf16")])
@both_ways
def test_streamed_rows_change_no_bit(op, dtype, precision, backend):
    vae = small_vae("sd")
    made, x = model(vae, dtype, precision), latents(vae, 32, 40) if op == "decode" else images(128, 160)
    stored = made.plan(op, 128, 160, threads=2, backend=backend)
    with refused("memory_limit") as caught:
        made.plan(op, 128, 160, threads=2, backend=backend, memory_limit=1)
    least = int("".join(filter(str.isdigit, caught.value.wanted.partition(" bytes")[0])))
    whole = run_core(made, op, x, backend=backend, threads=2)[0]
    got, ran = run_core(made, op, x, backend=backend, threads=2, memory_limit=least)
    assert ran["work"] > stored["work"] and ran["reserved"] < stored["reserved"]
    assert np.array_equal(got, whole)
