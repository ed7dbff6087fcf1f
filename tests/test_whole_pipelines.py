"""diffusers' own pipelines, whole and of full size, recorded under fake tensors beside `predict_pipeline`.

The tokenizer and the scheduler are stand-ins: the real ones look at what tensors hold, which is not there.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the sources are not here", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

from modules import MODULES, make

from vaemem import SimulatedProcess, predict_pipeline
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.run import RECORDED_VAES
from vaemem.pytorch import record


class Tokenizer:
    """Pads to what is asked for, or to its own length; of no padding, or to the longest, there are 5 tokens."""

    model_max_length = 77
    added_tokens_encoder = ()

    def __call__(self, prompt, padding=None, max_length=77, **_):
        length = max_length if padding == "max_length" else 5
        count = 1 if isinstance(prompt, str) else len(prompt)
        return types.SimpleNamespace(input_ids=torch.zeros(count, length, dtype=torch.int64), attention_mask=None)

    def tokenize(self, prompt):
        return [prompt]


class Scheduler:
    """As Euler's for flow matching, in the two tensors that a step makes."""

    order, init_noise_sigma = 1, 1.0

    def __init__(self):
        self.config = {}

    def set_timesteps(self, steps=None, device=None, sigmas=None, mu=None):
        count = steps if sigmas is None else len(sigmas)
        self.timesteps = torch.arange(count, device=device, dtype=torch.float32)

    def scale_model_input(self, sample, _):
        return sample

    def step(self, noise, _, sample, return_dict=False):
        return ((sample.to(torch.float32) + 0.1 * noise).to(noise.dtype),)


def built(name):
    """A module of the pipeline's components, and the pipeline that calls them, both on the device "meta"."""
    kind = PIPELINES[name]
    dtype = getattr(torch, kind.dtype)
    parts = {role: make(MODULES[RECORDED_VAES.get(part, part)], dtype) for role, part in kind.parts.items()}
    none = {"tokenizer": None, "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)}
    if name == "sd15":
        rest = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = diffusers.StableDiffusionPipeline(**parts, **none, **rest)
    elif name == "sdxl":
        pipeline = diffusers.StableDiffusionXLPipeline(**parts, **none, tokenizer_2=None, add_watermarker=False)
    else:
        parts["vae"].register_to_config(shift_factor=0.1159)
        pipeline = diffusers.FluxPipeline(**parts, **none, tokenizer_2=None)
    pipeline.tokenizer = pipeline.tokenizer_2 = Tokenizer()
    pipeline.scheduler = Scheduler()
    pipeline.set_progress_bar_config(disable=True)
    return torch.nn.ModuleDict(parts).eval(), pipeline


CASES = {  # of each: up to which phase, in how many steps, on which GPU, at which size
    "sd15": (("latent", "denoise", 2, "T4", 512), ("pt", "decode", 2, "T4", 512)),
    "sdxl": (("latent", "denoise", 1, "RTX 4090", 768),),  # to decode it changes weights' dtype, which is not recorded
    "flux": (("pt", "decode", 1, "H200", 768),),
}


@pytest.mark.parametrize("name, case", [(name, case) for name, cases in CASES.items() for case in cases])
def test_a_pipeline_to_the_byte(name, case):
    """All that a pipeline allocates up to a phase's end: at the peak, and reserved, as predicted."""
    output, phase, steps, gpu, side = case
    parts, pipeline = built(name)
    asked = {"height": side, "width": side}
    recording = record(
        parts, gpu=gpu, call=lambda _: pipeline("x", **asked, num_inference_steps=steps, output_type=output).images
    )
    assert not recording.unmodelled
    process = SimulatedProcess(gpu)
    for name_, size in recording.weights:
        process.hold(name_, size)
    process.call(recording.trace)
    predicted = next(p for p in predict_pipeline(name, gpu=gpu, steps=steps, **asked).phases if p.name == phase)
    assert process.peak_above_baseline()[0].endswith(predicted.where)
    assert predicted.allocated == process.peak_allocated
    # One of the allocator's small segments may go another way: when FLUX's prompts are let go was not followed.
    assert abs(predicted.reserved - process.peak_reserved) <= (name == "flux") * (2 << 20)
