"""Compute the bytes of a model's weights, by their stored type and the runtime's rule.

The named type alone is not enough: every runtime stores some tensors in other types, and each runtime chooses other
tensors. `RULES` has the runtimes' choices, each with its source. If a file is available, the file's own list of tensors
replaces a rule.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vaemem._common import choose, distinct
from vaemem._errors import ArgumentError
from vaemem.engine.file_tensors import BLOCKS, QUANTISED
from vaemem.pipelines.quantising import BITSANDBYTES, QUANTO, SCHEMES, TORCHAO, UNPACKING
from vaemem.pipelines.recorded_modules import LAST_OLDER, Weight

__all__ = ["RULES", "TYPES", "Stored", "loaded", "rule_of", "stored", "tensor_bytes"]


GGML = tuple(QUANTISED)
PLAIN = {  # as files spell them
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "fp8": "F8_E4M3", "int64": "I64",
    "bool": "BOOL",
}  # fmt: skip
SPELT = {spelt: name for name, spelt in PLAIN.items()}
TYPES = tuple(distinct((*PLAIN, *GGML, *SCHEMES, *BLOCKS)))
# Mixtures of types in a file, by its name on the Hub: most matrices' type, and the types of kinds of layers. "Q5_K 2
# Q4_K" is Q5_K for the first two. ComfyUI-GGUF's lcpp.patch (img_tensor_get_type) mixes them so.
MIXTURES: dict[str, tuple[str, dict[str, str]]] = {
    "Q3_K_S": ("Q3_K", {}),
    "Q3_K_M": ("Q3_K", {"values": "Q5_K 2 Q4_K", "joined": "Q4_K", "down": "Q4_K"}),
    "Q3_K_L": ("Q3_K", {"values": "Q5_K", "joined": "Q4_K", "down": "Q5_K"}),
    "Q4_K_S": ("Q4_K", {"values": "Q5_K 4 Q4_K", "down": "Q5_K"}),
    "Q4_K_M": ("Q4_K", {"values": "Q6_K", "joined": "Q5_K", "down": "Q6_K"}),
    "Q5_K_S": ("Q5_K", {}),
    "Q5_K_M": ("Q5_K", {"values": "Q6_K", "joined": "Q6_K", "down": "Q6_K"}),
}
# The kinds in diffusers' names. The tool reads the authors' names: FLUX.1's, FLUX.2's and SD 3's double blocks and
# Z-Image's layers have queries, keys and values in one matrix; the last matrix of an MLP has a name that it knows in
# Wan's blocks, Z-Image's layers and UNets.
_KINDS = {
    "values": r"^blocks\.\d+\.attn[12]\.to_v\.|attentions\..*\.attn[12]\.to_v\.",
    "joined": r"^transformer_blocks\.\d+\.attn\.(to|add)_[qkv](_proj)?\.|^layers\.\d+\.attention\.to_[qkv]\.",
    "down": r"^blocks\.\d+\.ffn\.net\.2\.|attentions\..*\.ff\.net\.2\.|^layers\.\d+\.feed_forward\.w2\.",
}


def tensor_bytes(shape: Sequence[int], type: str) -> int:
    """Compute a tensor's bytes.

    Parameters
    ----------
    shape : sequence of int
        The last dimension is the length of a row. Blocks of ggml's types lie within rows.
    type : str
        ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"fp8"`` (e4m3); ``"int8"``, bitsandbytes' LLM.int8(), with a
        float32 scale a row; ``"nf4"`` of bitsandbytes, with a float32 scale for 64 numbers, and ``"nf4 double"``, whose
        scales are in 8 bits; torchao's ``"int8wo"``, ``"int8dq"``, ``"int4wo"``, ``"float8wo"`` and ``"float8dq"``;
        optimum-quanto's ``"qint8"``, ``"qint4"`` and ``"qfloat8"``; ggml's ``"Q8_0"``, ``"Q4_K"``, ``"Q4_0"``,
        ``"Q4_1"``, ``"Q2_K"`` and their like. Names as files spell them also work: ``"F32"``, ``"BF16"``,
        ``"F8_E4M3"``.

    Raises
    ------
    ValueError
        An unknown type, rows that are not a multiple of a block, or scales for a tensor of one dimension.

    Notes
    -----
    With bitsandbytes each layer also has a table of the values of its 4 bits (64 bytes, and with double quantisation
    1024 for the scales and their mean). It is counted.

    Examples
    --------
    >>> from vaemem.pipelines.storage import tensor_bytes
    >>> [tensor_bytes((3840, 10240), type) for type in ("bfloat16", "Q8_0", "nf4")]
    [78643200, 41779200, 22118464]
    """
    choose("type", type, TYPES)
    return _bytes_of(tuple(shape), type)


@functools.lru_cache(maxsize=4096)
def _bytes_of(shape: tuple[int, ...], type: str) -> int:
    """Compute the bytes of a tensor of a known type. A model's tensors have few shapes."""
    numbers, type = math.prod(shape), SPELT.get(type, type)
    if type in SCHEMES:
        return sum(_pieces(shape, type))
    together, size = BLOCKS[PLAIN.get(type, type)]
    if together > 1 and (not shape or shape[-1] % together):
        raise ArgumentError("shape", f"rows of a multiple of {together} for {type}", str(tuple(shape)))
    return numbers // together * size


def _pieces(shape: Sequence[int], type: str) -> tuple[int, ...]:
    """List the bytes of a library's tensors for a matrix, in the order in which quantising makes them."""
    if len(shape) < 2:
        raise ArgumentError("shape", f"a matrix, or a convolution's filters, for {type}", str(tuple(shape)))
    return SCHEMES[type].pieces(shape[0], math.prod(shape[1:]))


EMBEDDINGS = r"(^|\.)(embed_tokens|shared|token_embedding|position_embedding|relative_attention_bias)\."


class _Rule(NamedTuple):
    """The tensors that get the chosen type. A leading dimension of 1 does not count.

    about: the runtime, and the source of the rule
    types: the types that the rule is for
    dims: numbers of dimensions of the tensors that get such a type
    keeps: parts of names of other tensors, as diffusers and transformers and as the original files spell them
    vectors, images: types of tensors of one dimension, and of four; None for their original type
    odd: the type of matrices if their rows are no multiple of the type's block
    single: parts of names of tensors kept in float32
    embeddings: the type of tables of embeddings if a smaller type is chosen
    least: tensors with fewer numbers are kept in float32
    biases: whether a bias goes with its weight
    flat: whether blocks may run over the ends of rows
    """

    about: str
    types: tuple[str, ...]
    dims: tuple[int, ...]
    keeps: str = ""
    vectors: str | None = None
    images: str | None = None
    odd: str | None = None
    single: str = ""
    embeddings: str | None = None
    least: int = 0
    biases: bool = False
    flat: bool = False


# Names of FLUX's first and last layers.
_FLUX_ENDS = (
    r"img_in\.|txt_in\.|time_in\.|vector_in\.|guidance_in\.|final_layer\."
    r"|^x_embedder\.|^context_embedder\.|^time_text_embed\.|^norm_out\.|^proj_out\."
)
# Names of the tensors that ComfyUI-GGUF's tools leave as they are.
_NOT_PACKED = (
    rf"{_FLUX_ENDS}|(class|time|add)_embedding\.|time_embed\.|label_emb\.|^conv_in\.|^conv_out\.|^input_blocks\.0\.0\."
    r"|^out\.2\.|condition_embedder\.|t_embedder\.|x_embedder\.|cap_embedder\.|context_refiner\.|noise_refiner\.|pos_embed|mod_proj"
)
# Names of tables and heads that no library quantises, and of the layers in transformers' _keep_in_fp32_modules.
_TABLES = rf"pos_embed\.pos_embed|scale_shift_table|mod_proj|{EMBEDDINGS}"
_UNQUANTISED = rf"(^|\.)lm_head\.|{_TABLES}"
_KEPT = r"\.DenseReluDense\.wo\."
RULES = {
    "all": _Rule(
        "every tensor, as module.to(dtype) and checkpoints in one dtype have it", tuple(PLAIN), (0, 1, 2, 3, 4, 5),
    ),
    "layerwise": _Rule(
        "diffusers' enable_layerwise_casting (hooks/layerwise_casting.py, and each model's own patterns): linear layers"
        " and convolutions with biases, but for norms, embeddings of positions and patches, the first and last layer",
        ("fp8",), (2, 3, 4, 5),
        r"norm|pos_embed|patch_embed|^proj_in\.|^proj_out\.|(^|\.)t_embedder\.|cap_embedder\."
        rf"|condition_embedder|adaln_single|scale_shift_table|mod_proj|{EMBEDDINGS}",
        biases=True,
    ),
    "bitsandbytes": _Rule(
        "diffusers and transformers 5 with BitsAndBytesConfig (_replace_with_bnb_linear): every nn.Linear's weight; the"
        " head stays (get_keys_to_not_convert), and so do layers of _keep_in_fp32_modules: T5's and UMT5's wo",
        BITSANDBYTES, (2,), f"{_UNQUANTISED}|{_KEPT}",
    ),
    "bitsandbytes, transformers 4": _Rule(
        "the same with transformers 4.51 to 4.57. Their quantizers set use_keep_in_fp32_modules: wo in float32",
        BITSANDBYTES, (2,), _UNQUANTISED, single=_KEPT,
    ),
    "torchao": _Rule(
        "diffusers and transformers 5 with TorchAoConfig: every nn.Linear's weight, also T5's wo, because"
        " should_convert_module gets the weight's name, which does not end in wo; the head stays, and so do matrices"
        " with sides that the kernels do not take (torchao/quantization/quant_api.py)",
        TORCHAO, (2,), _UNQUANTISED,
    ),
    "torchao, transformers 4": _Rule(
        "the same with transformers 4.51 to 4.57, which compare parts of names: wo stays",
        TORCHAO, (2,), f"{_UNQUANTISED}|{_KEPT}",
    ),
    "quanto": _Rule(
        "diffusers and transformers with QuantoConfig (replace_with_quanto_layers): as with bitsandbytes; matrices that"
        " the kernels do not take stay",
        QUANTO, (2,), f"{_UNQUANTISED}|{_KEPT}",
    ),
    "torchao directly": _Rule(
        "torchao's quantize_ (_is_linear): every nn.Linear's weight, also heads",
        TORCHAO, (2,), _TABLES,
    ),
    "quanto directly": _Rule(
        "quanto.quantize and freeze (nn/qmodule.py): the weights of every nn.Linear and nn.Conv2d",
        QUANTO, (2, 4), _TABLES,
    ),
    "comfyui-gguf": _Rule(
        "ComfyUI-GGUF's tools, convert.py (it flattens a UNet's tensors) and lcpp.patch (for llama-quantize): matrices"
        " except those of first and last layers, embeddings of time, and Z-Image's refiners",
        (*GGML, *MIXTURES), (2, 4), _NOT_PACKED, vectors="float32", least=1025, flat=True,
    ),
    "diffusers-gguf": _Rule(
        "from_single_file of diffusers with GGUFQuantizationConfig and such a file: linear layers stay as they are, and"
        " the rest becomes the dtype of the run (quantizers/gguf/utils.py, models/model_loading_utils.py)",
        (*(type for type in UNPACKING if type in GGML), *MIXTURES), (2,), _NOT_PACKED,
    ),
    "sd.cpp": _Rule(
        "stable-diffusion.cpp's tensor_should_be_converted (model_loader.cpp), and its layers' own types"
        " (ggml_extend.hpp): convolutions stay float16; rows that fit no block and vectors stay float32",
        GGML, (2,),
        rf"{_FLUX_ENDS}|x_embedder\.|t_embedder\.|y_embedder\.|pos_embed|context_embedder\.|time_embed\.|label_emb\."
        "|embedding",
        vectors="float32", images="float16", odd="float32",
    ),
    "llama.cpp": _Rule(
        "llama-quantize without a K mixture (llama_tensor_get_type): matrices; the table of embeddings, which is the"
        " head too, in Q6_K at least",
        GGML, (2,), r"relative_attention_bias\.", vectors="float32", odd="float16", embeddings="Q6_K",
    ),
}  # fmt: skip


def rule_of(type: str, release: int, is_direct: bool = False) -> str:
    """Name the rule by which diffusers and transformers store a type without a file. release: diffusers', 42 for 0.42;
    up to `LAST_OLDER` transformers is taken to be 4. is_direct: whether the library's own function quantises."""
    old = ", transformers 4" if release <= LAST_OLDER else ""
    rules = {"layerwise": ["fp8"], f"bitsandbytes{old}": BITSANDBYTES, f"torchao{old}": TORCHAO, "quanto": QUANTO,
             "diffusers-gguf": (*GGML, *MIXTURES)}  # fmt: skip
    if is_direct:
        rules = {"torchao directly": TORCHAO, "quanto directly": QUANTO}
    return next((rule for rule, types in rules.items() if type in types), "all")


class Stored(NamedTuple):
    """A tensor as it is stored."""

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int

    @property
    def pieces(self) -> tuple[int, ...]:
        """List the bytes of its tensors: several if a library keeps scales besides the numbers."""
        return _pieces(self.shape, self.type) if self.type in SCHEMES else (self.bytes,)


def stored(
    weights: Iterable[Sequence[Any]], type: str | None, rule: str | _Rule | list[Any], dtype: str = "bfloat16"
) -> list[Stored]:
    """List a model's tensors as they are stored.

    Parameters
    ----------
    weights : iterable of (name, shape) or (name, shape, dtype)
        As diffusers and transformers name them, such as `vaemem.pipelines.recorded_modules.Recorded.weights`. A dtype
        other than ``"run"`` is the tensor's own, and stays.
    type : str or None
        One of the rule's types, as for `tensor_bytes`, or one of `MIXTURES`; None with a file's list.
    rule : str, or list of (name, shape, type, bytes)
        One of `RULES`; or the tensors of a file, as `vaemem.engine.weights.tensor_types` lists them. These are then
        returned, under the file's own names.
    dtype : str
        The type of the tensors that the rule does not change.

    Returns
    -------
    list of Stored
        Tensors by name, shape, type and bytes. If blocks run over the ends of rows, the shape is that of the blocks'
        rows.

    Raises
    ------
    ValueError
        Another rule, a type that the rule does not have, a file with fewer numbers than the model.

    Examples
    --------
    >>> from vaemem.pipelines.storage import stored
    >>> stored([("proj.weight", (64, 32)), ("proj.bias", (64,))], "Q8_0", "llama.cpp")
    [Stored(name='proj.weight', shape=(64, 32), type='Q8_0', bytes=2176),
     Stored(name='proj.bias', shape=(64,), type='float32', bytes=256)]
    """
    tensors = [Weight(name, tuple(shape), *own) for name, shape, *own in weights]
    if isinstance(rule, str):
        choose("rule", rule, RULES)
        rule = RULES[rule]
    if isinstance(rule, list):
        listed = [Stored(name, tuple(shape), kind, size) for name, shape, kind, size in rule]
        # Buffers of integers are the module's own: files omit them.
        buffers = [tensor for tensor in tensors if tensor.dtype == "int64"]
        numbers = sum(math.prod(tensor.shape) for tensor in tensors if tensor.dtype != "int64")
        have = sum(math.prod(tensor.shape) for tensor in listed)
        if have < numbers:
            raise ArgumentError("rule", f"a file that has the model's {numbers} numbers", f"one of {have}")
        there = {name for tensor in listed for name in (tensor.name, tensor.name.partition(".")[2])}
        return listed + [_as(tensor, "int64") for tensor in buffers if tensor.name not in there]
    choose("type", type, rule.types)
    assert type is not None
    shapes, types = {tensor.name: tensor.shape for tensor in tensors}, _mixed(tensors, type)
    return [_store(tensor, shapes, one, rule, dtype) for tensor, one in zip(tensors, types, strict=True)]


def loaded(held: Iterable[Stored], weights: Iterable[Weight], dtype: str) -> list[Stored]:
    """List a file's tensors as diffusers and transformers load them for a run in a dtype.

    Floats become that dtype, except weights that the model keeps in another one. GGUF's blocks stay as they are. A file
    that bitsandbytes quantised, which has tensors of bytes, stays as it is too.

    Examples
    --------
    >>> from vaemem.pipelines.storage import Stored, loaded
    >>> loaded([Stored("proj.bias", (64,), "F32", 256), Stored("proj.weight", (64, 32), "Q8_0", 2176)], [], "float16")
    [Stored(name='proj.bias', shape=(64,), type='float16', bytes=128),
     Stored(name='proj.weight', shape=(64, 32), type='Q8_0', bytes=2176)]
    """
    tensors = [*held]
    types = {tensor.type for tensor in tensors}
    if types & {"U8", "I8"}:
        return tensors
    floats = {"F64", "F32", "F16", "F8_E4M3", "F8_E5M2", *(() if types & {*GGML} else ("BF16",))}
    own = {weight.name: weight.type_in(dtype) for weight in weights}
    return [
        _as(Weight(one.name, one.shape), own.get(one.name, dtype)) if one.type in floats else one for one in tensors
    ]


def _as(tensor: Weight, type: str) -> Stored:
    return Stored(tensor.name, tensor.shape, type, _bytes_of(tensor.shape, type))


def _mixed(tensors: Sequence[Weight], type: str) -> list[str]:
    """List each tensor's type of a mixture, or the type itself."""
    usual, kinds = MIXTURES.get(type, (type, {}))
    types, seen = [usual] * len(tensors), Counter[str]()
    if not kinds:
        return types
    for i, tensor in enumerate(tensors):
        kind = next((kind for kind in kinds if re.search(_KINDS[kind], tensor.name)), "")
        if kind:
            first, *rest = kinds[kind].split()
            seen[kind] += tensor.name.endswith(".weight")
            types[i] = rest[1] if rest and seen[kind] > int(rest[0]) else first
    return types


def _store(tensor: Weight, shapes: dict[str, tuple[int, ...]], type: str, rule: _Rule, dtype: str) -> Stored:
    """Store a tensor by a rule, in the chosen type or another. shapes: of all tensors, by name."""
    name, shape, own = tensor
    if own not in ("run", "kept") or (own == "kept" and type == "float16"):
        return _as(tensor, tensor.type_in(type))
    goes = name.removesuffix("bias") + "weight" if rule.biases and name.endswith(".bias") else name
    sides = shapes.get(goes, shape)
    dims = len([*itertools.dropwhile(lambda side: side == 1, sides[:-1]), *sides[-1:]])  # without 1 before others
    if (rule.single and re.search(rule.single, name)) or math.prod(shape) < rule.least:
        return _as(tensor, "float32")
    if dims == 1 and 1 not in rule.dims:
        return _as(tensor, rule.vectors or dtype)
    if dims not in rule.dims or (rule.keeps and re.search(rule.keeps, goes)):
        return _as(tensor, (rule.images if dims == 4 else None) or tensor.type_in(dtype))
    if rule.embeddings and type != "Q8_0" and re.search(EMBEDDINGS, name):
        type = rule.embeddings
    together, _ = BLOCKS.get(type, (1, 0))
    if type in SCHEMES:
        sides = (*shape[:1], math.prod(shape[1:]))
        if sides[1] % SCHEMES[type].columns or any(side % SCHEMES[type].both for side in sides):
            return _as(tensor, dtype)
    if rule.flat and shape[-1] % 256 and math.prod(shape) % 256 == 0:
        shape = (math.prod(shape) // 256, 256)
    is_odd = bool(shape) and shape[-1] % together > 0
    return _as(tensor._replace(shape=shape), (rule.odd or dtype) if is_odd else type)
