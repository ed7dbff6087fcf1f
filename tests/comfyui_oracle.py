"""Run ComfyUI's own memory management on the cases of tests/comfyui_cases.py, and print its decisions.

    COMFYUI=path/to/ComfyUI python tests/comfyui_oracle.py

A GPU is faked: the models' device is no CPU, get_free_memory counts the layers that were moved to it, and moving a
module moves nothing. The modules are ComfyUI's own layers without data. Everything else is ComfyUI's code.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import comfyui_cases as cases

ABSENT = "torchvision", "torchaudio", "torchsde", "kornia", "av", "spandrel", "aiohttp"  # nothing here calls them


class Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def import_comfyui():
    """Import ComfyUI from the folder that COMFYUI names, as on a card; return its manager."""
    sys.path.insert(0, os.environ["COMFYUI"])
    import transformers

    for name in ("CLIPTokenizer", "T5TokenizerFast"):  # first: it looks for torchvision, too
        getattr(transformers, name)
    sys.meta_path.append(Stubs())
    sys.argv = sys.argv[:1]
    from comfy.cli_args import args

    args.cpu = True
    import comfy.model_management as manager

    manager.cpu_state = manager.CPUState.GPU
    manager.is_nvidia = lambda: True
    manager.MIN_WEIGHT_MEMORY_RATIO = 0.0  # an NVIDIA card's
    manager.ENABLE_PYTORCH_ATTENTION = True
    manager.soft_empty_cache = lambda *_: None
    return manager


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
    """Bytes of a model's weights on the card."""
    owners = (m for m in model.modules() if getattr(m, "place", "cpu") != "cpu")
    return sum(p.numel() * p.element_size() for m in owners for p in m._parameters.values() if p is not None)


def run(manager, case):
    """Yield the models after each request: (name, bytes counted, bytes there)."""
    import comfy.model_patcher
    import torch

    def move(module, device):
        for each in module.modules():
            each.place = torch.device(device).type
        return module

    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    manager.vram_state = getattr(manager.VRAMState, {"normal": "NORMAL_VRAM", "novram": "NO_VRAM"}[case.state])
    manager.EXTRA_RESERVED_VRAM, manager.DISABLE_SMART_MEMORY = case.reserved, not case.smart
    manager.current_loaded_models.clear()
    models = [make_model(cases.name(i), layers, rest) for i, (layers, rest, _) in enumerate(case.models)]
    patchers = [comfy.model_patcher.ModelPatcher(model, card, cpu) for model in models]
    held = [patcher for patcher, (*_, more) in zip(patchers, case.models, strict=True) for _ in range(more)]

    def free(device=None, torch_free_too=False):
        total = case.card - sum(map(bytes_there, models))
        return (total, 0) if torch_free_too else total

    torch.nn.Module.to, kept = move, torch.nn.Module.to
    manager.get_free_memory = free
    try:
        for index, needed, least, whole in case.requests:
            manager.load_models_gpu([patchers[index]], needed, minimum_memory_required=least, force_full_load=whole)
            listed = [one.model.model for one in manager.current_loaded_models]
            assert all(one in listed for one in models if bytes_there(one))
            yield [(one.called, one.model_loaded_weight_memory, bytes_there(one)) for one in listed]
    finally:
        torch.nn.Module.to = kept
        held.clear()


def estimates():
    """Yield lines of estimates: of denoisers and of VAEs."""
    import comfy.model_base
    import comfy.sd
    import comfy.supported_models
    import torch

    config = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
              "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}  # fmt: skip
    for kind, dtype in cases.USED:
        model = types.SimpleNamespace(
            memory_usage_factor=getattr(comfy.supported_models, kind).memory_usage_factor, memory_usage_factor_conds=(),
            memory_usage_shape_process={}, get_dtype=lambda: None, manual_cast_dtype=getattr(torch, dtype),
        )  # fmt: skip
        for shape in cases.SHAPES:
            found = comfy.model_base.BaseModel.memory_required(model, list(shape))
            yield f"{kind} {dtype} {'x'.join(map(str, shape))} {found!r}"
    with torch.device("meta"):
        vae = comfy.sd.VAE(sd={}, device=torch.device("cpu"), config={"params": {"ddconfig": config, "embed_dim": 4}})
    for op in ("decode", "encode"):
        for dtype in ("float16", "float32"):
            for shape in cases.SHAPES:
                found = getattr(vae, f"memory_used_{op}")(shape, getattr(torch, dtype))
                yield f"{op} {dtype} {'x'.join(map(str, shape))} {found!r}"


def main():
    import logging

    logging.disable()
    manager = import_comfyui()
    for number in range(cases.CASES):
        for step, models in enumerate(run(manager, cases.make_case(number))):
            print(cases.line(number, step, models))
    for line in estimates():
        print(line)


if __name__ == "__main__":
    main()
