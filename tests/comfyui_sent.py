"""Compare vaemem's trace of a denoiser that ComfyUI loads in part with a recording of ComfyUI's own code.

    COMFYUI=path/to/ComfyUI python tests/comfyui_sent.py sd15-unet

Every third layer of the model is one that ComfyUI's manager sends for each call. Sending is faked: cast_to makes the
copy that it makes from the host's weights.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import torch
from comfyui_code import version
from comfyui_modules import COMFYUI_MODULES
from record_modules import record_at

from vaemem.pipelines.comfyui_run import layers_of
from vaemem.pipelines.programs import load_program
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.passing import BY_DIFFUSERS, Passing
from vaemem.pytorch.recorder import Recorder, Recording


def sending(code):
    """Return cast_bias_weight with copies of the weights of layers that are sent, as from another device."""

    def send(layer, *args, **kwargs):
        if not getattr(layer, "is_sent", False):
            return code(layer, *args, **kwargs)

        def copy(weight, dtype=None, device=None, **_):
            return torch.empty_like(weight, dtype=dtype, device=device).copy_(weight)

        kept, manager.cast_to = manager.cast_to, copy
        try:
            return code(layer, *args, **kwargs)
        finally:
            manager.cast_to = kept

    import comfy.model_management as manager

    return send


OLDER = "ComfyUI 0.3.64"  # a layer's bias comes before its weight


def main(name):
    import comfy.ops

    module, gpu = COMFYUI_MODULES[name], find_gpu("RTX 4090")
    weights = [(one.name, one.nbytes("bfloat16")) for one in load_program(f"comfyui/{name}").weights]
    layers = [layer for layer in layers_of(weights)[0] if layer.casts]
    built = module.build
    real = {layer: hasattr(m, "comfy_cast_weights") for layer, m in _make(built).named_modules()}
    assert all(real[layer.name] == layer.casts for layer in layers_of(weights)[0])
    sent = {layer.name for layer in sorted(layers)[::3]}

    def build():
        model = built()
        for layer, m in model.named_modules():
            if layer in sent:
                m.comfy_cast_weights = m.is_sent = True
        return model

    comfy.ops.cast_bias_weight = sending(comfy.ops.cast_bias_weight)
    passing = [
        Passing(owner, owner, "weight", size, BY_DIFFUSERS)
        for owner, kind in sorted((one.rpartition(".")[::2] for one, _ in weights), reverse=version() != OLDER)
        for one, size in weights
        if one == f"{owner}.{kind}" and owner in sent
    ]
    for sizes in module.checks[:1]:
        recorded = record_at(module._replace(build=build), sizes, torch.bfloat16, Recorder(Recording(), gpu)).trace
        ours = load_program(f"comfyui/{name}").trace("bfloat16", gpu, passing, **sizes)
        (real_steps, real_peak), (our_steps, our_peak) = map(_read, (recorded, ours))
        print(name, len(our_steps), "steps; peaks in bytes, ComfyUI's and ours:", real_peak, our_peak)
        assert real_steps == our_steps
        assert real_peak <= our_peak <= 1.001 * real_peak


def _read(trace):
    """The trace's steps but for the frees, and its peak. A recording notes a free at the next operator, which may be
    after a weight has come."""
    live, peak, sizes = 0, 0, {}
    for kind, number, size, *_ in trace.steps:
        if kind == "take":
            sizes[number] = size
            live += size
            peak = max(peak, live)
        elif kind == "give":
            live -= sizes.pop(number, 0)
    return [step[:3] for step in trace.steps if step[0] != "give"], peak


def _make(build):
    from modules import default_dtype

    with default_dtype(torch.bfloat16), torch.device("meta"):
        return build()


if __name__ == "__main__":
    main(sys.argv[1])
