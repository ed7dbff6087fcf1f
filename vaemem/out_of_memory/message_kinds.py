"""The kinds of out-of-memory messages, as one table: how to recognise each, the memory that ran out, and what to do."""

from __future__ import annotations

from typing import NamedTuple

# No pattern has an unbounded repeat, so the time to search a log grows with its length (tests/test_out_of_memory.py).
NUMBER = r"\d{1,12}(?:[.,]\d{1,6})?"
SIZE = rf"({NUMBER} ?(?:bytes|[KMGT]i?B))"
COUNT = r"(\d{1,15})(?!\d)"
SEGMENT, TENSOR, GRAPH, POOL, NO_TENSOR = "segment", "tensor", "graph", "pool", ""


class Kind(NamedTuple):
    """A kind of message.

    pattern: a regular expression that recognises it. The group is the requested size, if the message has one.
    size: the thing that has this size: a segment of PyTorch's allocator, a tensor, a graph's buffer or a product's copy
        in ggml's pool; or NO_TENSOR, if no single tensor has it
    maker: of the card
    meaning: the memory that ran out, in sentences
    advice: what to do, in sentences
    """

    pattern: str
    size: str
    maker: str
    meaning: str = ""
    advice: str = ""


_FREE_CARD = "Close other programs on the card, or run the model in less memory: vaemem plan MODEL HxW --gpu CARD."
_SMALLER = "A smaller image or batch makes smaller tensors."
# The first kind that a text has counts. Sources: PyTorch's CUDACachingAllocator.cpp, CUDAMallocAsyncAllocator.cpp and
# MPSAllocator.mm; torch-directml; ggml's backends and stable-diffusion.cpp's ggml_extend.hpp; MLX's allocator.cpp;
# ONNX Runtime's bfc_arena.cc; XLA's bfc_allocator.cc; Unified Runtime's error names; attention.py of ComfyUI and A1111.
MESSAGE_KINDS = (
    Kind(
        rf"DefaultCPUAllocator:.{{0,99}}? tried to allocate {COUNT} bytes", NO_TENSOR, "",
        "Host memory ran out, not the card's.", "Close other programs, or add swap space.",
    ),
    Kind(
        rf"AllocateRawInternal.{{0,200}}?requested buffer of size {COUNT}", TENSOR, "NVIDIA",
        "ONNX Runtime's arena could not grow for one tensor.", _SMALLER,
    ),
    Kind(rf"pool\[\d{{1,3}}\]: alloc of ({NUMBER} MiB) failed", POOL, ""),
    Kind(rf"failed to allocate .{{1,80}}? buffer of size {COUNT}", GRAPH, ""),
    Kind(rf"allocating ({NUMBER} MiB) on device \d{{1,3}}: \w{{1,40}} failed", GRAPH, ""),
    Kind(rf"Device memory allocation of size {COUNT} failed", GRAPH, ""),
    Kind(rf"can't allocate {COUNT} Bytes of memory on device", GRAPH, ""),
    Kind(rf"failed to allocate buffer, size = {{0,8}}({NUMBER} MiB)", GRAPH, ""),
    Kind(rf"MPS backend out of memory.{{0,200}}?Tried to allocate {SIZE}", TENSOR, "Apple"),
    Kind(
        rf"Invalid buffer size: {SIZE}", TENSOR, "Apple",
        "Metal refuses one buffer above a fixed limit, whatever is free. The size is one tensor's.",
        "Slice the attention (pipe.enable_attention_slicing()), so that its scores are not one tensor.",
    ),
    Kind(
        rf"metal::malloc\] Attempting to allocate {COUNT} bytes", TENSOR, "Apple",
        "MLX requested one array above Metal's largest buffer. The size is one tensor's.", _SMALLER,
    ),
    Kind(rf"Could not allocate tensor with {COUNT} bytes", TENSOR, "AMD"),
    Kind(
        rf"RESOURCE_EXHAUSTED: .{{0,80}}?allocat\w{{1,3}} {COUNT} bytes", NO_TENSOR, "",
        "XLA requests one buffer for all temporary tensors of a compiled program: the size is no single tensor's.",
        "JAX takes 75% of the card when it starts: XLA_PYTHON_CLIENT_PREALLOCATE=false leaves the rest to others.",
    ),
    Kind(rf"HIP out of memory\. Tried to allocate {SIZE}", SEGMENT, "AMD"),
    Kind(rf"XPU out of memory\. Tried to allocate {SIZE}", SEGMENT, "Intel"),
    Kind(rf"Tried to allocate {SIZE}", SEGMENT, "NVIDIA"),
    Kind(rf"Currently allocated ?: ?{SIZE} ?Requested ?: ?{SIZE}", TENSOR, "NVIDIA"),
    Kind(
        rf"Not enough memory, use lower resolution.{{0,60}}?Need: {SIZE} free", NO_TENSOR, "",
        "The program cut the attention's scores into its most parts, and one part still did not fit.",
        "Use attention that stores no scores (xformers or PyTorch's), or a smaller image.",
    ),
    Kind(
        r"CU(?:DNN|BLAS)\w{0,20}_ALLOC_FAILED|(?:MIOPEN|ROCBLAS|HIPBLAS)\w{0,20}(?:ALLOC|MEMORY)\w{0,10}",
        NO_TENSOR, "",
        "A library of the driver's maker found no memory for its own handle or workspace: the card was full.",
        _FREE_CARD,
    ),
    Kind(
        r"(?:UR|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES|HOST_MEMORY)|ZE_RESULT_ERROR_OUT_OF_\w{1,20}",
        NO_TENSOR, "Intel",
        "Level Zero had no device memory left, or one tensor was above its largest allocation.", _SMALLER,
    ),
    Kind(
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Command buffer execution failed.{0,40}Insufficient Memory",
        NO_TENSOR, "Apple",
        "macOS ended a command buffer, because the memory that the GPU shares with all programs ran out.",
        "Close other programs, use a smaller image, or weights of fewer bits.",
    ),
    *(
        Kind(
            rf"{api}(?: driver)? error: out of memory|{api.lower()}Error(?:MemoryAllocation|OutOfMemory)",
            NO_TENSOR, maker,
            "The driver refused memory outside PyTorch's allocator, for the context, a kernel or pinned host memory; or"
            " an earlier call failed.", _FREE_CARD,
        )
        for api, maker in (("CUDA", "NVIDIA"), ("HIP", "AMD"))
    ),
    Kind(
        r"Allocation on device", NO_TENSOR, "NVIDIA", "ComfyUI cuts PyTorch's message: it has no figures.",
        "vaemem fits MODEL HxW --runtime comfyui --gpu CARD says whether a run fits.",
    ),
    *(
        Kind(f"{api} out of memory", NO_TENSOR, maker, "The message has no figures.", _FREE_CARD)
        for api, maker in (("CUDA", "NVIDIA"), ("HIP", "AMD"), ("XPU", "Intel"), ("MPS backend", "Apple"))
    ),
    # stable-diffusion.cpp also writes these three lines when it succeeds, so that any other message counts before them.
    Kind(rf"vae compute buffer size ?[:=]? {{0,4}}({NUMBER} MB)", GRAPH, ""),
    Kind(rf"compute buffer size ?[:=]? {{0,4}}({NUMBER} MB)", GRAPH, ""),
    Kind(rf"params backend buffer (?:size ?[:=]? {{0,4}}|\( ?)({NUMBER} MB)", GRAPH, ""),
    Kind(
        r"ErrorOutOfDeviceMemory", NO_TENSOR, "", "The Vulkan driver refused one buffer, or had no memory left.",
        _SMALLER,
    ),
)  # fmt: skip
