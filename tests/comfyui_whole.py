"""Compare vaemem's phases of a workflow with a recording of ComfyUI's own code, whole, at a size of its own.

    COMFYUI=path/to/ComfyUI python tests/comfyui_whole.py zimage-turbo

Weights are on the card before the first phase, and ComfyUI's manager loads nothing: a phase's bytes besides weights are
compared.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "recording"))
from comfyui_workflow import Workflow, read_row

import vaemem
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.pytorch import predict_pipeline as predict_any

SIDES, TOKENS, STEPS = (88, 56), 61, 3  # latents of the sides


def to_card(pipe):
    for module in pipe.components.values():
        getattr(module, "to", str)("cuda")


def bytes_of(phase):
    """What its tensors ask for at its peak. The allocator's rounding depends on the weights that are there."""
    return sum(one.bytes for one in phase.peak_tensors if not one.name.startswith("[rounded"))


def weights_of(phase):
    return [one.bytes for one in phase.peak_tensors if one.name.startswith("weights of ")]


def main(name):
    known, workflow = WORKFLOWS[name], Workflow(read_row(name))
    height, width = (side * known.factor for side in SIDES)
    tokens = TOKENS if known.has_words else known.tokens
    asked = {"height": height, "width": width, "num_inference_steps": STEPS, "max_sequence_length": tokens}
    asked |= {"num_frames": known.frames} if known.frames else {}
    asked |= {"negative_prompt": "a"} if known.guides else {}
    own = predict_any(workflow, gpu="H200", prepare=to_card, **asked, **workflow.row["call"])
    ours = vaemem.predict_pipeline(
        name, height, width, gpu="H200", runtime="comfyui", steps=STEPS, frames=known.frames or None,
        prompt_tokens=tokens if known.has_words else None,
    )  # fmt: skip
    v = ours.request.variables
    latents = 4 * workflow.latent_format.latent_channels * v["f"] * v["h"] * v["w"]
    loaded = min(sum(weights_of(phase)) for phase in own.phases)  # copies of weights in another type count, too
    for phase, real in zip(ours.phases, own.phases, strict=True):
        assert phase.name == real.name
        found = bytes_of(phase) - sum(weights_of(phase)), bytes_of(real) - loaded
        print(name, phase.name, "bytes besides weights, vaemem's and ComfyUI's:", *found)
        # A recording keeps the latents in float32, which Python frees sooner if it collects a cycle of objects.
        assert 0 <= found[0] - found[1] <= (latents if phase.kind == "decode" else 0)


if __name__ == "__main__":
    main(sys.argv[1])
