"""Compare the formulas of `vaemem.bound` with predictions of other sizes and of batches.

python benchmarks/bounds.py
"""

from __future__ import annotations

import random
import time

from vaemem import bound, predict

GPU = "RTX 4090"
# (model, dtype, weights_dtype, runtime) of the runs of each application
RUNS = {
    "comfyui": [(m, d, d, "comfyui") for m in ("sdxl", "flux") for d in ("float32", "float16", "bfloat16")],
    "invokeai": [
        ("sdxl", "float16", "float16", "diffusers"), ("sdxl", "float32", "float32", "diffusers"),
        ("sdxl", "float32", "float16", "diffusers"),
        *(("flux", d, d, code) for d in ("float32", "float16", "bfloat16") for code in ("bfl", "diffusers")),
    ],
}  # fmt: skip


def upper(run, op, height, width, batch=1):
    model, dtype, weights, runtime = run
    return predict(model, op, height, width, dtype, batch, runtime, GPU, weights_dtype=weights).upper


for application, runs in RUNS.items():
    began = time.process_time()
    found = bound(application, gpu=GPU)
    print(f"{application}: {time.process_time() - began:.1f} s of CPU time")
    rng, shares = random.Random(1), []
    for height, width in [(rng.randrange(256, 2049, 8), rng.randrange(256, 2049, 8)) for _ in range(150)]:
        for run, op in ((run, op) for run in runs for op in ("encode", "decode")):
            line = found.find(run[0], op, run[1])
            shares.append((upper(run, op, height, width) / line.bytes(height, width) - 1, op, height, width, run))
    count, (share, *where) = sum(one[0] > 0 for one in shares), max(shares)
    print(f"{count} of {len(shares)} predictions of other sizes are above, at most {share:+.2%}: {where}")
    if application == "comfyui":
        batches = [
            upper(run, op, side, side, batch) / (batch * found.find(run[0], op, run[1]).bytes(side, side))
            for run in runs[:2] for op in ("encode", "decode") for side in (512, 640, 768, 1024) for batch in (2, 4)
        ]  # fmt: skip
        print(f"{len(batches)} batches: {min(batches):.2f} to {max(batches):.2f} of the formula times the batch")
both = bound("comfyui", "sdxl", "float16", gpu=[GPU, "RTX 3060"], torch_version="2.9.1", sides=range(512, 2049, 256))
print(both)
