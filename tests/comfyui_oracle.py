"""Run ComfyUI's own memory management on the cases of tests/comfyui_cases.py, and print its decisions.

    COMFYUI=path/to/ComfyUI python tests/comfyui_oracle.py

A GPU is faked: the models' device is no CPU, get_free_memory counts the layers that were moved to it, and moving a
module moves nothing. The modules are ComfyUI's own layers without data. Everything else is ComfyUI's code.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import comfyui_cases as cases

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "recording"))
from comfyui_code import import_comfyui


def make_model(name, layers, rest):
    """A module of ComfyUI's layers. It has other weights of `rest` bytes, which are in no layer."""
    import comfy.ops
    import torch

    with torch.device("meta"):
        model = torch.nn.Module()
        for index, (size, casts) in enumerate(layers):
            kind = comfy.ops.disable_weight_init.Linear if casts else torch.nn.Linear
            layer = kind(1, size // 2, bias=False, dtype=torch.float16)
            setattr(model, cases.layer_name(index), layer)
        if rest:
            model.rest = torch.nn.Parameter(torch.empty(rest, dtype=torch.uint8), requires_grad=False)
    model.called = name
    return model


def bytes_there(model):
    """Bytes of a model's weights on the card, as its state dict has them."""
    owners = [m for m in model.modules() if getattr(m, "place", "cpu") != "cpu"]
    tensors = [t for m in owners for own in (m._parameters, m._buffers) for name, t in own.items()
               if t is not None and name not in m._non_persistent_buffers_set]  # fmt: skip
    return sum(t.numel() * t.element_size() for t in tensors)


def run(manager, size, models, requests, references=(), single=(), stays=()):
    """Yield the models after each request: (name, bytes counted, bytes there).

    single: models that compute in float32. ComfyUI's class CLIP tells its patcher so.
    stays: numbers of models that are offloaded to the card, where their loaders put them
    """
    import comfy.model_patcher
    import torch

    def move(module, device):
        for each in module.modules():
            each.place = torch.device(device).type
        return module

    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    manager.current_loaded_models.clear()
    patchers = [
        comfy.model_patcher.ModelPatcher(model, card, card if i in stays else cpu) for i, model in enumerate(models)
    ]
    for index in stays:
        move(models[index], card)
    for index in range(len(models)):  # no name may keep a patcher: references count
        if models[index] in single:
            patchers[index].set_model_compute_dtype(torch.float32)
    held = [patcher for patcher, more in zip(patchers, references, strict=False) for _ in range(more)]

    def free(device=None, torch_free_too=False):
        total = size - sum(map(bytes_there, models))
        return (total, 0) if torch_free_too else total

    torch.nn.Module.to, kept = move, torch.nn.Module.to
    manager.get_free_memory = free
    try:
        for index, needed, least, whole in requests:
            manager.load_models_gpu([patchers[index]], needed, minimum_memory_required=least, force_full_load=whole)
            listed = [one.model.model for one in manager.current_loaded_models]
            away = [one for i, one in enumerate(models) if i not in stays]
            assert all(one in listed for one in away if bytes_there(one))
            yield [(one.called, one.model_loaded_weight_memory, bytes_there(one)) for one in listed]
        for patcher in patchers:
            patcher.detach()  # the models may run on another card
    finally:
        torch.nn.Module.to = kept
        held.clear()


def run_case(manager, case):
    """Every other model computes in float32."""
    states = {"normal": "NORMAL_VRAM", "novram": "NO_VRAM", "highvram": "HIGH_VRAM"}
    manager.vram_state = getattr(manager.VRAMState, states[case.state])
    manager.EXTRA_RESERVED_VRAM, manager.DISABLE_SMART_MEMORY = case.reserved, not case.smart
    models = [make_model(cases.name(i), layers, rest) for i, (layers, rest, _) in enumerate(case.models)]
    references = [references for *_, references in case.models]
    return run(manager, case.card, models, case.requests, references, models[1::2], case.stays)


def make_workflow(manager, name):
    """ComfyUI's models of a workflow, with its own manager."""
    from comfyui_workflow import Workflow, read_row

    load, free = manager.load_models_gpu, manager.get_free_memory
    workflow = Workflow(read_row(name))
    manager.load_models_gpu, manager.get_free_memory = load, free
    return workflow


def workflows(manager):
    """Yield lines for ComfyUI's own models of whole workflows, with its own estimates."""
    manager.vram_state, manager.DISABLE_SMART_MEMORY = manager.VRAMState.NORMAL_VRAM, False
    manager.EXTRA_RESERVED_VRAM = 400 << 20
    for name, sizes in cases.WORKFLOWS.items():
        workflow = make_workflow(manager, name)
        denoiser, decoder = workflow.transformer, workflow.decoder
        models = [workflow.text_encoder, denoiser, workflow.vae]
        for role, model in zip(cases.ROLES, models, strict=True):
            model.called = role
        kind, dtype, estimates = workflow.latent_format, decoder.vae_dtype, []
        for images, frames, height, width in sizes:
            shape = [images, kind.latent_channels, *[frames] * (kind.latent_dimensions == 3), height, width]
            both = denoiser.memory_required([2 * images, *shape[1:]])
            estimates.append((both, denoiser.memory_required(shape), decoder.memory_used_decode(shape, dtype)))
            yield cases.estimate_line(name, (images, frames, height, width), *estimates[-1])
        both, one, decode = estimates[0]
        requests = [(0, 0, None, False), (1, both, one, False), (2, decode, None, False)] * 2
        for card in cases.cards_of(sum(map(manager.module_size, models))):
            for step, found in enumerate(run(manager, card, models, requests, single=models[:1])):
                yield cases.line(f"{name}@{card}", step, found)


def decodes(manager):
    """Yield lines of the VAEs' whole and tiled decodes, recorded, as decode and decode_tiled call them."""
    import torch

    from vaemem.pytorch import record

    for name, size in itertools.product(cases.DECODED, cases.DECODES):
        n, h, w, tile = size
        workflow = make_workflow(manager, name)
        vae, is_video = workflow.decoder, workflow.decoder.latent_dim == 3
        factor = vae.spacial_compression_decode()
        side, overlap = tile // factor, min(64, tile // 4) // factor
        squares = [(side, side)] if is_video else [(2 * side, side // 2), (side // 2, 2 * side), (side, side)]

        def run(vae, x, tile=tile, overlap=overlap, squares=squares):
            if not tile:
                samples = torch.empty_like(x)  # .to(device)
                vae.decode(samples)
            for sides in squares if tile else ():
                starts = [
                    range(0, s - overlap, t - overlap) if s > t else [0]
                    for s, t in zip(x.shape[-2:], sides, strict=True)
                ]
                for i, j in itertools.product(*starts):
                    part = x[..., i : i + sides[0], j : j + sides[1]]
                    vae.decode(torch.empty(part.shape, dtype=x.dtype, device=x.device)).float()

        shape = n, workflow.latent_format.latent_channels, *[1] * is_video, 8 * h // factor, 8 * w // factor
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        yield cases.decode_line(name, size, record(workflow.vae, x, call=run).trace.steps)


def main():
    import logging

    import torch

    logging.disable()
    manager = import_comfyui()
    manager.NUM_STREAMS = 2  # as on an NVIDIA card
    torch.cuda.synchronize = lambda *_: None
    import comfy.ops

    comfy.ops.disable_weight_init._zero_init_parameter = staticmethod(lambda *_: None)  # weights stay without data
    for number in range(cases.CASES + cases.HIGH_CASES):
        for step, models in enumerate(run_case(manager, cases.make_case(number))):
            print(cases.line(number, step, models))
    for line in itertools.chain(decodes(manager), workflows(manager)):
        print(line)


if __name__ == "__main__":
    main()
