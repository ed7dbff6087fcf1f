"""Play the calls of the seed table's benchmark on a simulated process, in the same order.

The names that the script holds decide which memory is still allocated when a measured run begins.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from vaemem._common import frames_factor
from vaemem.prediction.held_tensors import LoadedVAE, Tensor, Variables
from vaemem.prediction.process import Reading, SimulatedProcess
from vaemem.prediction.runtimes import RUNTIMES
from vaemem.prediction.vae_job import Job

BENCHMARK_TILE = 512  # pixels: the side of the seed table's tiles, regardless of its models' configs


class Protocol(NamedTuple):
    """The runs of a fresh process with its loaded model before the counters are read."""

    warmups: int
    runs: int  # measured ones
    is_emptied: bool  # the cache is emptied, and the peaks are reset, before each run


PROTOCOLS = {
    "cold": Protocol(0, 1, True),  # the first run of the process
    "warm": Protocol(2, 1, True),  # the first run after two warm-up runs, while the second one's result is still bound
    "repeated": Protocol(2, 2, True),  # the second run after two warm-up runs, when none of their results is bound
    "kept": Protocol(0, 3, False),  # three runs in a row; the largest of them counts
}
USUAL_PROTOCOL = "warm"
SEED_TABLE = Protocol(2, 5, True)  # the table has the mean of the five


def benchmark(
    process: SimulatedProcess, vae: LoadedVAE, job: Job, protocol: Protocol = SEED_TABLE,
    input_dtype: str | None = None,
) -> list[Reading]:  # fmt: skip
    """Play the seed table's benchmark: warm-up runs, then measured ones.

    Parameters
    ----------
    process : SimulatedProcess
    vae : LoadedVAE
        Its dtype is the weights'.
    job : Job
        If its dtype differs from the input's, each run converts weights and input, and then converts the weights back.
        With `upcast` it does so as ``upcast_vae`` before diffusers 0.36: a decode's first blocks keep the input's
        dtype.
    protocol : Protocol
    input_dtype : str, optional
        The job's weights_dtype by default.

    Returns
    -------
    list of Reading
        One for each measured run. The first still holds the results that the warm-up runs left bound. An encode is
        sampled and scaled, as in pipelines. If a protocol keeps the cache, it is emptied only before the first
        measured run. Each reading then covers all measured runs so far.
    """
    op, height, width, batch = job.op.removesuffix("_tiled"), job.height, job.width, job.batch
    dtype, weights_dtype, input_dtype = job.dtype, vae.dtype, input_dtype or job.weights_dtype
    warmups, runs, is_emptied = protocol
    method = process.encode if op == "encode" else process.decode
    run = functools.partial(method, vae, tile=job.tile or 0, tile_overlap=job.tile_overlap, slicing=job.slicing)
    v = Variables(process)
    frames = (job.frames,) if job.frames > 1 else ()
    coded = tuple((count - 1) // frames_factor(vae.arch) + 1 for count in frames)
    image = (batch, vae.arch["in_channels"], *frames, height, width)
    latent = (batch, vae.latent_channels, *coded, height // vae.factor, width // vae.factor)
    runtime = RUNTIMES[vae.runtime]
    v.input = process.tensor(image if op == "encode" else latent, input_dtype, host=runtime.host)

    def converted() -> Tensor:
        """Convert the input and the weights to the run's dtype. Return the input."""
        if dtype == input_dtype:
            return v.input
        process.convert(vae, dtype)
        if job.upcast and op == "decode":
            process.convert(vae, dtype, first=input_dtype)
            return v.input
        v.input32 = process.elementwise(v.input, "input", dtype)
        return v.input32

    def call(measured: bool) -> None:
        x = converted()
        if runtime.samples:
            v.result = run(x)  # refused if the runtime has neither
        elif op == "encode":
            v.dist = run(x)
            v.result = process.sample(v.dist)
            if measured:
                v.result = process.elementwise(v.result, "latents")
        else:
            v.scaled = process.elementwise(x, "latents [scaled]")
            v.result = run(v.scaled)

    measurements: list[Reading] = []
    for i in range(warmups + runs):
        is_measured = i >= warmups
        v.delete("result")
        # A first run is cold if nothing was freed before it, because there is no cache to empty.
        is_cold = not i and process.allocated == process.peak_allocated
        if is_cold or (is_measured and (is_emptied or not measurements)):
            process.empty_cache()
            process.reset_peak()
        call(is_measured)
        if is_cold or is_measured:
            measurements.append(process.read())
        process.convert(vae, weights_dtype)
        if is_measured:
            v.delete("result", "dist", "scaled")
        elif is_emptied:
            process.empty_cache()
    v.delete(*v)  # the function returns
    return measurements[-runs:]
