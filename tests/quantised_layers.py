"""Print what real layers of bitsandbytes, torchao and optimum-quanto store and take on the CPU, as JSON: {type: [bytes
of the stored tensors, peak of a call with a bias, peak without one, bytes for each number that quantising holds]}, one
line for each argument OUTPUTS,INPUTS,ROWS. bitsandbytes quantises in one kernel: None.
tests/test_quantising.py compares it with the package's numbers."""

import json
import sys
import weakref
from functools import partial
from unittest.mock import MagicMock

import torch

# bitsandbytes' functions for CUDA, which its operators call on a GPU. Their kernels do nothing: only sizes count here.
KERNELS = {}


def keep_kernel(name, device):
    def keep(function):
        if device in ("default", "cuda"):
            KERNELS[name.replace("::", ".") + ".default"] = function
        return function

    return keep


register_kernel, torch.library.register_kernel = torch.library.register_kernel, keep_kernel
torch._C._cuda_getCurrentRawStream = lambda device: 0
import bitsandbytes
import bitsandbytes.cextension

bitsandbytes.cextension.lib = MagicMock(**{"cigemmlt_32.return_value": 0})
from bitsandbytes.backends.cuda import ops

ops.CUBLAS_Context = MagicMock()
ops._gemm_4bit_use_custom_fn = lambda *given: False  # its kernel for few rows unpacks nothing
torch.library.register_kernel = register_kernel

import optimum.quanto as quanto
import torchao.quantization as torchao
from optimum.quanto.library.qbytes_mm import qbytes_mm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.kernel import intmm


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages that operators make, while they live."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if str(operator) in KERNELS:
            with self:
                return KERNELS[str(operator)](*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if self.is_plain(one)}
        result = operator(*args, **(kwargs or {}))
        for one in filter(self.is_plain, tree_leaves(result)):
            storage = one.untyped_storage()
            key = storage._cdata
            if key not in self.sizes and key not in given:
                self.sizes[key] = storage.nbytes()
                self.peak = max(self.peak, sum(self.sizes.values()))
                weakref.finalize(storage, self.sizes.pop, key)
        return result

    @staticmethod
    def is_plain(one):
        return type(one) in (torch.Tensor, torch.nn.Parameter, bitsandbytes.nn.Int8Params, bitsandbytes.nn.Params4bit)


def stored_bytes(tensor):
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.nbytes]
    return [size for name in tensor.__tensor_flatten__()[0] for size in stored_bytes(getattr(tensor, name))]


def by_torchao(config):
    return lambda model: torchao.quantize_(model, config())


def by_quanto(weights):
    def quantise(model):
        quanto.quantize(model, weights=weights)
        quanto.freeze(model)

    return quantise


def by_bitsandbytes(make, kind):
    def quantise(model):
        (linear,) = model
        layer = make(linear.in_features, linear.out_features, bias=linear.bias is not None).eval()
        layer.bias = linear.bias
        with LiveBytes():
            layer.weight = kind(linear.weight.detach(), requires_grad=False).to("cpu")
        model[0] = layer

    return quantise


def stored_by_bitsandbytes(layer):
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        return [layer.state.CB.nbytes, layer.state.SCB.nbytes]
    state = layer.weight.quant_state
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [one.nbytes for one in (layer.weight, state.absmax, state.code, *nested)]


def measure(quantise, outputs, inputs, rows):
    peaks, given = [], torch.ones(1, rows, inputs, dtype=torch.bfloat16)
    for has_bias in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=has_bias)).to(torch.bfloat16)
        with torch.no_grad(), LiveBytes() as quantising:
            quantise(model)
        with torch.no_grad(), LiveBytes() as live:
            model(given)
        peaks.append(live.peak)
    (layer,) = model
    is_bitsandbytes = type(layer).__module__.startswith("bitsandbytes")
    peaks.append(None if is_bitsandbytes else round(quantising.peak / (outputs * inputs)))
    if is_bitsandbytes:
        sizes = stored_by_bitsandbytes(layer)
    else:
        sizes = stored_bytes(layer.weight) + [one.nbytes for one in layer.buffers()]
    return [sorted(sizes, reverse=True), *peaks]


def main():
    # What runs on a GPU: quanto's operator for CUDA, and torchao's product of whole numbers, which copies the weight.
    torchao.quant_api._check_hardware_support = lambda granularities: None
    torch.ops.quanto.qbytes_mm = qbytes_mm
    intmm._is_device = lambda *given: False
    intmm.safe_int_mm = lambda given, weight: torch._int_mm(given, weight.contiguous())
    eight = partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False, threshold=6.0)
    four = partial(bitsandbytes.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.bfloat16)
    in_four = partial(bitsandbytes.nn.Params4bit, quant_type="nf4")
    ways = {
        "int8": by_bitsandbytes(eight, partial(bitsandbytes.nn.Int8Params, has_fp16_weights=False)),
        "nf4": by_bitsandbytes(four, partial(in_four, compress_statistics=False)),
        "nf4 double": by_bitsandbytes(four, partial(in_four, compress_statistics=True)),
        "int8wo": by_torchao(torchao.Int8WeightOnlyConfig),
        "int8dq": by_torchao(torchao.Int8DynamicActivationInt8WeightConfig),
        "float8wo": by_torchao(torchao.Float8WeightOnlyConfig),
        "float8dq": by_torchao(torchao.Float8DynamicActivationFloat8WeightConfig),
        "qint8": by_quanto(quanto.qint8),
        "qfloat8": by_quanto(quanto.qfloat8),
        "qint4": by_quanto(quanto.qint4),
    }
    for sizes in sys.argv[1:]:
        print(json.dumps({name: measure(way, *map(int, sizes.split(","))) for name, way in ways.items()}))


if __name__ == "__main__":
    main()
