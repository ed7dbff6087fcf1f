"""Fake a card and bitsandbytes: scripts for a GPU run on the CPU, and every move to the card is counted."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import types

import torch
from torch.overrides import TorchFunctionMode

CARD, VERSION = torch.device("meta"), "0.50.2"  # the device meta stands for the card


def _is_card(place) -> bool:
    return (isinstance(place, torch.device) and place.type == "cuda") or str(place).startswith("cuda")


class Moves(TorchFunctionMode):
    """Whatever goes to the card goes to the device meta, and its bytes are counted."""

    bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        if func is torch.Tensor.to and args[0].is_meta and any(str(one) == "cpu" for one in given):  # it comes back
            return torch.zeros_like(args[0], device="cpu")
        swapped = any(isinstance(one, str | torch.device) and _is_card(one) for one in given)
        if not swapped or func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **(kwargs or {}))
        place = [CARD if isinstance(one, str | torch.device) and _is_card(one) else one for one in given]
        made = func(*place[: len(args)], **dict(zip(kwargs or {}, place[len(args) :], strict=True)))
        self.bytes += made.nbytes if isinstance(made, torch.Tensor) else 0
        return made


class _Weight(torch.nn.Parameter):
    """A weight that is quantised when it first goes to a device, also to the CPU, as in bitsandbytes 0.50."""

    def __new__(cls, data=None, requires_grad=False, **settings):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data.data, requires_grad)
        self.__dict__.update(settings)
        return self

    def __init__(self, *args, **settings):
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self):
        return type(self)(torch.Tensor.detach(self), **self.__dict__)

    def to(self, *args, **kwargs):
        place, *_ = torch._C._nn._parse_to(*args, **kwargs)
        data = torch.Tensor.detach(self)
        if place is not None and place.type != "meta" and not self.is_quantised:
            data = torch.zeros(self.packed(data), dtype=self.stored)
        return type(self)(data.to(*args, **kwargs), **self.__dict__)

    @property
    def is_quantised(self):
        return self.dtype is self.stored


class Params4bit(_Weight):
    stored, compress_statistics = torch.uint8, False

    @property
    def kind(self):
        return "nf4 double" if self.compress_statistics else "nf4"

    def packed(self, data):
        return (data.numel() + 1) // 2, 1


class Int8Params(_Weight):
    stored, kind = torch.int8, "int8"

    def packed(self, data):
        return data.shape


class Linear4bit(torch.nn.Linear):
    def __init__(self, inputs, outputs, bias=True, compute_dtype=None, quant_storage=None, **settings):
        super().__init__(inputs, outputs, bias)
        self.weight = Params4bit(self.weight, compress_statistics=settings["compress_statistics"])


class Linear8bitLt(torch.nn.Linear):
    def __init__(self, inputs, outputs, bias=True, **settings):
        super().__init__(inputs, outputs, bias)
        self.weight = Int8Params(self.weight)


def put_quantisers_in(monkeypatch) -> list[tuple[str, str, str]]:
    """Put in torchao's and quanto's functions. Return their calls: a name, a type, and the module's device."""
    calls: list[tuple[str, str, str]] = []

    def note(name):
        def called(module, config=None, weights=""):
            kind = type(config).__name__ if config else weights
            calls.append((name, kind, next(module.parameters()).device.type.replace("meta", "cuda")))

        return called

    torchao, quanto = types.ModuleType("torchao.quantization"), types.ModuleType("optimum.quanto")
    torchao.quantize_, quanto.quantize, quanto.freeze = map(note, ("quantize_", "quantize", "freeze"))
    for kind in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"):
        setattr(torchao, kind, type(kind, (), {}))
    quanto.qint8, quanto.qfloat8, quanto.qint4 = "qint8", "qfloat8", "qint4"
    for module in (torchao, quanto):
        monkeypatch.setitem(sys.modules, module.__name__.partition(".")[0], types.ModuleType("outer"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


class _Torch:
    """PyTorch as a module sees it on a machine with a card."""

    def __getattr__(self, name):
        return getattr(torch, name)

    class cuda:
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)


def put_in(monkeypatch) -> None:
    """Let diffusers and transformers see a card and bitsandbytes."""
    import diffusers.pipelines.pipeline_utils
    import diffusers.quantizers.bitsandbytes.bnb_quantizer as quantizer
    import diffusers.quantizers.bitsandbytes.utils
    import diffusers.utils.import_utils
    import transformers.integrations.bitsandbytes
    import transformers.quantizers.quantizer_bnb_4bit as four
    import transformers.quantizers.quantizer_bnb_8bit as eight

    layers = {one.__name__: one for one in (Params4bit, Int8Params, Linear4bit, Linear8bitLt)}
    library = types.ModuleType("bitsandbytes")
    library.nn, library.__version__ = types.SimpleNamespace(**layers), VERSION
    library.supported_torch_devices = {"cpu", "cuda"}
    library.__spec__ = types.SimpleNamespace(name="bitsandbytes", origin="", submodule_search_locations=[])
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: VERSION if name == "bitsandbytes" else installed(name)
    )
    monkeypatch.setattr(diffusers.utils.import_utils, "_bitsandbytes_available", True)
    monkeypatch.setattr(diffusers.utils.import_utils, "_bitsandbytes_version", VERSION)
    for module in (transformers.integrations.bitsandbytes, diffusers.quantizers.bitsandbytes.utils):
        monkeypatch.setattr(module, "bnb", library, raising=False)
    for module in (four, eight):
        monkeypatch.setattr(module, "is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(quantizer, "torch", _Torch())
    stream = types.SimpleNamespace(synchronize=lambda: None)
    fakes = {"Stream": stream, "current_stream": stream, "current_device": 0, "stream": contextlib.nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fake=fake: fake)
    monkeypatch.setattr(diffusers.pipelines.pipeline_utils, "get_device", lambda: "cuda")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
