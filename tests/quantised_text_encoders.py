"""Load small T5s with each library's config by transformers, and print as JSON {type: [weights, sizes]}: (name, shape,
dtype) as recordings have them, and the bytes of each parameter. Argument: the dtype.
tests/test_quantising.py compares it with the package's rules."""

import json
import sys
import tempfile

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    BitsAndBytesConfig,
    QuantoConfig,
    T5Config,
    T5EncoderModel,
    TorchAoConfig,
    UMT5Config,
    UMT5EncoderModel,
)


def tensors_of(tensor):
    """List the tensors that a parameter holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [one for name in tensor.__tensor_flatten__()[0] for one in tensors_of(getattr(tensor, name))]
    state = getattr(tensor, "quant_state", None)
    scales = (getattr(tensor, "SCB", None), *((state.absmax, state.code) if state else ()))
    return [tensor, *(one for one in scales if one is not None)]


def measure(model_class, config_class, dtype, config):
    settings = config_class(
        vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )  # fmt: skip
    model = model_class(settings).to(dtype)
    kept = tuple(f".{name}." for name in model._keep_in_fp32_modules)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shapes = {name: list(one.shape) for name, one in model.named_parameters()}
        model = model_class.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map={"": "cpu"})
    for name, parameter in model.named_parameters():
        size = sum(one.nbytes for one in tensors_of(parameter))
        yield (name, shapes[name], "kept" if any(one in name for one in kept) else "run"), size


def main():
    dtype = getattr(torch, sys.argv[1])
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    configs = {
        "nf4": four, "int8": BitsAndBytesConfig(load_in_8bit=True),
        "int8wo": TorchAoConfig(Int8WeightOnlyConfig()), "qint8": QuantoConfig(weights="int8"),
    }  # fmt: skip
    classes = {"t5": (T5EncoderModel, T5Config), "umt5": (UMT5EncoderModel, UMT5Config)}
    measured = {}
    for type, config in configs.items():
        weights, sizes = measured[type] = [], {}
        for name, (model, settings) in classes.items():
            for weight, size in measure(model, settings, dtype, config):
                weights.append((f"{name}.{weight[0]}", *weight[1:]))
                sizes[weights[-1][0]] = size
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
