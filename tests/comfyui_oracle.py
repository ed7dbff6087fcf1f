"""Run ComfyUI's own memory management on the cases of tests/comfyui_cases.py, and print its decisions.

    COMFYUI=path/to/ComfyUI python tests/comfyui_oracle.py

A GPU is faked: the models' device is no CPU, get_free_memory counts the layers that were moved to it, and moving a
module moves nothing. The modules are ComfyUI's own layers without data. Everything else is ComfyUI's code.
"""

import itertools
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import comfyui_cases as cases

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from comfyui_code import import_comfyui, version

ASKED = cases.ASKED.get(version().rpartition(" ")[2])


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


def run(manager, size, models, requests, references=(), single=()):
    """Yield the models after each request: (name, bytes counted, bytes there).

    single: models that compute in float32. In 0.8.0, ComfyUI's class CLIP tells its patcher so.
    """
    import comfy.model_patcher
    import torch

    def move(module, device):
        for each in module.modules():
            each.place = torch.device(device).type
        return module

    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    manager.current_loaded_models.clear()
    patchers = [comfy.model_patcher.ModelPatcher(model, card, cpu) for model in models]
    for index in range(len(models) if ASKED.converts else 0):  # no name may keep a patcher: references count
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
            assert all(one in listed for one in models if bytes_there(one))
            yield [(one.called, one.model_loaded_weight_memory, bytes_there(one)) for one in listed]
    finally:
        torch.nn.Module.to = kept
        held.clear()


def run_case(manager, case):
    """Every other model computes in float32."""
    manager.vram_state = getattr(manager.VRAMState, {"normal": "NORMAL_VRAM", "novram": "NO_VRAM"}[case.state])
    manager.EXTRA_RESERVED_VRAM, manager.DISABLE_SMART_MEMORY = case.reserved, not case.smart
    models = [make_model(cases.name(i), layers, rest) for i, (layers, rest, _) in enumerate(case.models)]
    references = [references for *_, references in case.models]
    return run(manager, case.card, models, case.requests, references, models[1::2])


def make_vae(channels, kind="AutoencoderKL"):
    """ComfyUI's VAE of SD and SDXL, of FLUX, of FLUX.2, or Wan's."""
    import comfy.sd
    import torch

    with torch.device("meta"):
        if kind == "WanVAE":
            state = {"decoder.middle.0.residual.0.gamma": torch.empty(384, 1, 1, 1),
                     "decoder.head.0.gamma": torch.empty(96, 1, 1, 1),
                     "decoder.head.2.weight": torch.empty(3, 96, 3, 3, 3),
                     "encoder.conv1.weight": torch.empty(96, 3, 3, 3, 3)}  # fmt: skip
            return comfy.sd.VAE(sd=state, device=torch.device("cpu"), dtype=torch.bfloat16)
        state = {"decoder.conv_in.weight": torch.empty(512, channels, 3, 3),
                 "encoder.down.2.downsample.conv.weight": torch.empty(512, 512, 3, 3)}  # fmt: skip
        if channels in (4, 32):
            state["post_quant_conv.weight"] = torch.empty(channels, channels, 1, 1)
        if kind == "Flux2":
            state["bn.running_mean"] = torch.empty(4 * channels)
        return comfy.sd.VAE(sd=state, device=torch.device("cpu"), dtype=torch.bfloat16)


def make_vae_of(name):
    kinds = {"qwen-image": "WanVAE", "flux2": "Flux2"}
    return make_vae({"sd15": 4, "sdxl": 4, "flux2": 32}.get(name, 16), kinds.get(name, "AutoencoderKL"))


def real(manager):
    """Yield lines for ComfyUI's own models of whole workflows, with its own estimates."""
    import torch
    from comfyui_modules import COMFYUI_MODULES
    from modules import make

    manager.vram_state, manager.DISABLE_SMART_MEMORY = manager.VRAMState.NORMAL_VRAM, False
    manager.EXTRA_RESERVED_VRAM = 400 << 20
    for name, (images, *latent) in ASKED.pipelines.items():
        part = "unet" if name.startswith("sd") else "transformer"
        dtype = torch.float16 if part == "unet" else torch.bfloat16
        for card in ASKED.cards:
            vae = make_vae_of(name)
            models = [make(COMFYUI_MODULES[f"{name}-{one}"], dtype) for one in ("clip", part)]
            models.append(vae.first_stage_model)
            for role, model in zip(cases.ROLES, models, strict=True):
                model.called = role
            one, both = (models[1].memory_required([n * images, *latent]) for n in (1, 2))
            decode = vae.memory_used_decode((images, *latent), torch.bfloat16)
            requests = [(0, 0, None, False), (1, both, one, False), (2, decode, None, False)] * 2
            for step, found in enumerate(run(manager, card, models, requests, single=models[:1])):
                yield cases.line(f"{name}@{card}", step, found)


def estimates():
    """Yield lines of estimates: of denoisers and of VAEs."""
    import comfy.model_base
    import comfy.supported_models
    import torch
    from comfyui_modules import CONFIGS

    for kind, dtype in ASKED.used:
        config = getattr(comfy.supported_models, kind)(CONFIGS[kind])
        model = types.SimpleNamespace(
            memory_usage_factor=config.memory_usage_factor, memory_usage_factor_conds=(),
            memory_usage_shape_process={}, get_dtype=lambda: None, manual_cast_dtype=getattr(torch, dtype),
        )  # fmt: skip
        for shape in cases.SHAPES:
            found = comfy.model_base.BaseModel.memory_required(model, list(shape))
            yield f"{kind} {dtype} {'x'.join(map(str, shape))} {found!r}"
    for kind, op in itertools.product(ASKED.vaes, ("decode", "encode")):
        estimate = getattr(make_vae(32 if kind == "Flux2" else 4, kind), f"memory_used_{op}")
        for dtype, shape in itertools.product(("float16", "float32"), cases.SHAPES):
            found = estimate(cases.with_frames(shape, kind), getattr(torch, dtype))
            yield f"{kind} {op} {dtype} {'x'.join(map(str, shape))} {found!r}"


def decodes():
    """Yield lines of the VAEs' whole and tiled decodes, recorded, as decode and decode_tiled call them."""
    import torch

    from vaemem.pytorch import record

    for name, size in itertools.product(ASKED.decoded, ASKED.decodes):
        n, h, w, tile = size
        is_video, packed = name == "qwen-image", 2 if name == "flux2" else 1
        side, overlap = tile // 8 // packed, min(64, tile // 4) // 8 // packed
        vae = make_vae_of(name).first_stage_model
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

        channels = {"sdxl": 4, "flux2": 128}.get(name, 16)
        shape = cases.with_frames((n, channels, h // packed, w // packed), "WanVAE" if is_video else "AutoencoderKL")
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        yield cases.decode_line(name, size, record(vae.to(torch.bfloat16), x, call=run).trace.steps)


def main():
    import logging

    import torch

    logging.disable()
    manager = import_comfyui()
    manager.NUM_STREAMS = 2  # as on an NVIDIA card; 0.3.64 does not read it
    torch.cuda.synchronize = lambda *_: None
    for number in range(cases.CASES):
        for step, models in enumerate(run_case(manager, cases.make_case(number))):
            print(cases.line(number, step, models))
    for line in itertools.chain(estimates(), decodes(), real(manager)):
        print(line)


if __name__ == "__main__":
    main()
