"""Predict the memory of mflux, which runs diffusers' models with MLX on Apple Silicon.

MLX evaluates a decode's whole graph at once. The CPU encodes operations into command buffers, and allocates outputs and
work space as it encodes. The GPU runs the command buffers, and memory is free again when the last command buffer that
holds it is done. MLX stops encoding while ten command buffers are unfinished, or while more than its memory limit is in
use. In a large decode each operation fills a command buffer, so the memory of eleven operations lives at once
(`_MetalQueue`). These rules were read in MLX at 846d176, of August 2026: mlx/transforms.cpp and eval.cpp, device.cpp,
conv.cpp and allocator.cpp of its Metal backend. Convolutions from 512x512 up are the same at 029bf18, of 2024.

mflux's decoders of FLUX.1 and FLUX.2 normalise in float32. Published peaks of FLUX.2 klein in mflux agree within 2%
(tests/test_mlx.py). Other VAEs are assumed to run the same operations. The activations of denoisers and text encoders
are unknown, and so are all times.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import DTYPES, ELEMENT_BYTES, choose, meant
from vaemem._errors import ArgumentError
from vaemem.engine.limits import parse_size
from vaemem.engine.weights import PARTS, told_bytes
from vaemem.pipelines.components import weights_of
from vaemem.pipelines.pipeline_arguments import PlanArguments
from vaemem.pipelines.ways import PipelinePlan, Room
from vaemem.prediction.gpus import sold
from vaemem.prediction.phases import Phase, Way

# The pipelines of mflux: its models/common/config/model_config.py at 0229d66, and models/chroma.
NAMES = (
    "flux", "flux-schnell", "flux-kontext", "flux-fill", "chroma", "qwen-image", "qwen-image-edit", "zimage",
    "zimage-turbo", "flux2-klein", "flux2-klein-9b", "flux2-klein-base", "flux2-klein-base-9b",
)  # fmt: skip
UNUSED = (
    "gpu", "host_memory", "calibrate", "time_limit", "types", "flash", "image", "steps", "prompt_tokens", "dtype",
    "cudnn_version", "torch_version", "diffusers_version", "frames", "lora", "used", "os", "link", "cpu", "cores",
)  # fmt: skip
# Winograd's F(6x6, 3x3): 64 numbers for each tile of 6 x 6 outputs.
WINOGRAD_TILE, WINOGRAD_NUMBERS = 6, 64
# Unfinished command buffers: MAX_ACTIVE_TASKS in transforms.cpp.
IN_FLIGHT = 10
# A command buffer of an M Max or Ultra ends after more kernels or numbers than these (device.cpp). On other chips it
# ends after 40, so less of a small decode lives at once.
BUFFER_KERNELS, BUFFER_NUMBERS = 50, 50 << 20


class MetalConv(NamedTuple):
    """A convolution of the decoder: name, height, width, channels in and out, and kernel."""

    name: str
    height: int
    width: int
    c: int
    k: int
    r: int


def workspace(conv: MetalConv, dtype: str, lowering: str = "mlx") -> int:
    """Compute a convolution's bytes in addition to its input and output.

    Parameters
    ----------
    conv : MetalConv
    dtype : str
    lowering : {"mlx", "im2col"}
        ``"mlx"`` is the method that MLX chooses: Winograd, or an implicit product, which needs no buffer. ``"im2col"``
        is a buffer of all columns, as MLX uses for other convolutions. MLX chooses Winograd for 3x3 convolutions with
        channels in multiples of 32, at least 256 channels in and out together, and at least 4096 pixels. In October
        2024, 512 channels together were enough at any size; with 256 the input needed 2^18 numbers.

    Examples
    --------
    >>> full = MetalConv("a 3x3 of 128 channels", 1536, 2304, 128, 128, 3)
    >>> [round(workspace(full, dtype, "im2col") / 2**30, 1) for dtype in ("bfloat16", "float32")]
    [7.6, 15.2]
    >>> [round(workspace(full, dtype) / 2**30, 1) for dtype in ("bfloat16", "float32")]
    [3.8, 7.7]
    """
    return ELEMENT_BYTES[dtype] * sum(_scratch(conv, lowering))


def _scratch(conv: MetalConv, lowering: str) -> tuple[int, ...]:
    """List the numbers of each buffer of a convolution's work space."""
    choose("lowering", lowering, ("mlx", "im2col"))
    if lowering == "im2col":
        return (conv.height * conv.width * conv.r * conv.r * conv.c,)
    is_large = conv.c + conv.k >= 256 and conv.height * conv.width >= 4096
    if conv.r != 3 or conv.c % 32 or conv.k % 32 or not is_large:
        return ()
    rows, columns = (-(-side // WINOGRAD_TILE) for side in (conv.height, conv.width))
    padded = (WINOGRAD_TILE * rows + 2) * (WINOGRAD_TILE * columns + 2) * conv.c
    tiles = WINOGRAD_NUMBERS * rows * columns
    return WINOGRAD_NUMBERS * conv.c * conv.k, tiles * conv.c, tiles * conv.k, padded


def convs(model: str, height: int, width: int) -> Iterator[MetalConv]:
    """List the decoder's convolutions in order."""
    choose("model", model, _core.models())
    trace = _core.Trace.vae(_core.models()[model], "diffusers", "decode", "bfloat16", height, width)
    for op, index, _, name in trace.steps:
        name = name.removesuffix(" [workspace]").removesuffix(".conv")
        if op == "conv" and name.startswith("decoder."):
            _, _, c, h, w, k, r = trace.convs[index][:7]
            assert isinstance(r, int)
            yield MetalConv(name, h, w, c, k, r)


@dataclass(eq=False)
class _Buffer:
    """A buffer of MLX: its numbers and bytes, its holders (arrays and command buffers), and whether it is work
    space."""

    numbers: int
    size: int
    holders: int = 1
    is_scratch: bool = False


class _DecodePeak(NamedTuple):
    """The peak of a decode without weights: bytes of work space and in all, and the layer that is being encoded."""

    at: str
    workspace: int
    total: int


class _MetalQueue:
    """Play MLX's evaluation of a graph, with at most `in_flight` unfinished command buffers. With 0, each operation is
    done before the next one begins."""

    def __init__(self, element: int, in_flight: int) -> None:
        self.element, self.in_flight, self.at = element, in_flight, ""
        self.peak = _DecodePeak("", 0, 0)
        self._live: set[_Buffer] = set()
        self._unfinished: deque[list[_Buffer]] = deque()
        self._held: list[_Buffer] = []  # by the command buffer that is being encoded
        self._seen: set[_Buffer] = set()  # the buffers that its kernels read and write
        self._kernels = 0

    def allocate(self, numbers: int, element: int = 0, is_scratch: bool = False) -> _Buffer:
        made = _Buffer(numbers, numbers * (element or self.element), is_scratch=is_scratch)
        self._live.add(made)
        total = sum(one.size for one in self._live)
        if total > self.peak.total:
            self.peak = _DecodePeak(self.at, sum(one.size for one in self._live if one.is_scratch), total)
        return made

    def encode(
        self, *reads: _Buffer, numbers: int = 0, element: int = 0, keep: bool = False, scratch: tuple[int, ...] = (),
    ) -> _Buffer:  # fmt: skip
        """Encode an operation and return its output. Without `numbers`, it is written over the first input. The graph's
        hold on the inputs passes to the command buffer, unless the graph keeps them for later operations."""
        made = self.allocate(numbers, element) if numbers else reads[0]
        taken = [self.allocate(count, is_scratch=True) for count in scratch]
        held = [one for one in reads if one is not made]
        for one in held:
            one.holders += keep
        self._held += held + taken
        self._seen.update((made, *reads, *taken))
        self._kernels += 5 if scratch else 1  # Winograd fills, copies, transforms twice and multiplies
        is_full = self._kernels > BUFFER_KERNELS or sum(one.numbers for one in self._seen) > BUFFER_NUMBERS
        if is_full or not self.in_flight:
            self._unfinished.append(self._held)
            self._held, self._seen, self._kernels = [], set(), 0
            if len(self._unfinished) > self.in_flight:
                self._finish()
        return made

    def _finish(self) -> None:
        """Finish the oldest command buffer."""
        for one in self._unfinished.popleft():
            one.holders -= 1
            if not one.holders:
                self._live.remove(one)

    def normalise(self, x: _Buffer, keep: bool = False) -> _Buffer:
        """GroupNorm in float32 and SiLU. Splitting into groups copies, and so does merging them."""
        wide = self.encode(x, numbers=x.numbers, element=4, keep=keep)
        split = self.encode(wide, numbers=x.numbers, element=4)
        merged = self.encode(self.encode(split), numbers=x.numbers, element=4)
        scaled = self.encode(self.encode(merged))
        return self.encode(self.encode(scaled, numbers=x.numbers))

    def convolve(self, x: _Buffer, conv: MetalConv, lowering: str) -> _Buffer:
        """Convolve and add the bias."""
        self.at = conv.name
        return self.encode(self.encode(x, numbers=conv.height * conv.width * conv.k, scratch=_scratch(conv, lowering)))

    def attend(self, x: _Buffer, pixels: int) -> _Buffer:
        """Attend from every pixel to every other, in one head: MLX has no fused kernel for its 512 channels
        (scaled_dot_product_attention.cpp)."""
        self.at = "decoder.mid_block.attentions.0"
        normal = self.normalise(x, keep=True)
        query, key = (self.encode(normal, numbers=x.numbers, keep=True) for _ in range(2))
        value = self.encode(normal, numbers=x.numbers)
        scores = self.allocate(pixels * pixels, is_scratch=True)
        scores = self.encode(self.encode(scores, query, key))
        attended = self.encode(self.encode(scores, value, numbers=x.numbers), numbers=x.numbers)
        return self.encode(attended, x)


def decode(
    model: str, height: int, width: int, dtype: str = "bfloat16", lowering: str = "mlx", in_flight: int = IN_FLIGHT,
) -> _DecodePeak:  # fmt: skip
    """Compute the peak of mflux's decode of one image, without weights.

    Parameters
    ----------
    model : str
        A VAE that `vaemem.predict` knows.
    height, width : int
        The image's size, in pixels.
    dtype : {"bfloat16", "float16", "float32"}
        The type of latents and weights. If one of them is float32, MLX promotes its computation to float32.
    lowering : {"mlx", "im2col"}
    in_flight : int
        Unfinished command buffers. MLX has at most ten. With 0 each operation is done before the next one begins, so
        the peak is the least. A low `mx.set_memory_limit` has that effect.

    Returns
    -------
    _DecodePeak

    Examples
    --------
    >>> for in_flight in (10, 0):
    ...     peak = decode("flux2", 1024, 1024, in_flight=in_flight)
    ...     print(peak.at, round(peak.total / 2**30, 1))
    decoder.up_blocks.3.resnets.0.conv1 8.9
    decoder.up_blocks.2.upsamplers.0 3.3
    """
    queue = _MetalQueue(ELEMENT_BYTES[meant("dtype", dtype, DTYPES)], in_flight)
    steps, x = [*convs(model, height, width)], None
    for block, members in itertools.groupby(steps, lambda conv: conv.name.rpartition(".")[0]):
        layers = {conv.name.rpartition(".")[2]: conv for conv in members}
        first = next(iter(layers.values()))
        pixels, queue.at = first.height * first.width, first.name
        x = x or queue.allocate(pixels * first.c)
        if "conv1" in layers:
            y = queue.convolve(queue.normalise(x, keep=True), layers["conv1"], lowering)
            y = queue.convolve(queue.normalise(y), layers["conv2"], lowering)
            shortcut = layers.get("conv_shortcut")
            x = queue.encode(y, queue.convolve(x, shortcut, lowering) if shortcut else x)
        elif "attentions" not in block:
            if "upsamplers" in block:  # rows twice, then columns
                x = queue.encode(queue.encode(x, numbers=pixels * first.c // 2), numbers=pixels * first.c)
            for layer, conv in layers.items():
                x = queue.convolve(queue.normalise(x) if layer == "conv_out" else x, conv, lowering)
        if block == "decoder.mid_block.resnets.0" and _core.models()[model]["mid_block_add_attention"]:
            x = queue.attend(x, pixels)
    return queue.peak


# ---- ways of running mflux ----

# The share of the memory that Metal recommends on a Mac of 16 GB (10922 MiB in llama.cpp's logs). With 64 GB it is
# three quarters.
WORKING_SET = (2, 3)
TILE = 512  # pixels of a tile's side (TilingConfig)
LIMITED = "memory limit"
MLX_NOTES = (
    "mflux loads weights when they are first used. Without --low-ram all stay, except that the command line of newer"
    " releases drops the text encoders. With it, text encoders leave before the first step, and the denoiser after the"
    " last.",
    "mflux makes the images of a batch one by one.",
    "MLX encodes up to ten command buffers ahead of the GPU, and each holds its tensors and work space. A cache limit"
    " bounds only freed memory, so it does not lower this peak.",
    "Not known for MLX: activations of the denoiser and the text encoders (1.5 and 1.1 GB were published for FLUX.2"
    " klein at 1024x1024), the memory of quantising while loading, and all times.",
)
SCRIPT = "a script with a memory limit"  # calls mx.set_memory_limit
UNSURE = "mflux has no option for it, and nobody published a run; call mx.set_memory_limit before generate_image"


def vae_bytes(model: str, parts: str, dtype: str) -> int:
    """Compute the bytes of a VAE's weights, or of one half's.

    Examples
    --------
    >>> [round(vae_bytes("flux", parts, "bfloat16") / 2**20) for parts in ("all", "decoder")]
    [160, 95]
    """
    choose("parts", parts, PARTS)
    tensors = _core.Model(_core.models()[model], parts).tensors
    return ELEMENT_BYTES[dtype] * sum(math.prod(shape) for _, shape in tensors)


def _ways(
    model: str, height: int, width: int, encoders: int, denoiser: int, cache_limit: int | None,
) -> list[Way]:  # fmt: skip
    """List ways of running mflux, the plainest first. encoders, denoiser: bytes of their weights. The limit of the
    allocator's cache is added whole, as an upper bound. Without one, MLX takes the cache back when it needs memory, and
    it is not counted."""
    # --low-ram chooses tiles too, but not for FLUX.2's VAE, because they would differ in colour.
    is_flux2 = model.startswith("flux2")
    options: dict[str, tuple[bool, bool, int]] = {  # whether weights leave; tiles; unfinished command buffers
        "mflux without options": (False, False, IN_FLIGHT),
        "--vae-tiling": (False, True, IN_FLIGHT),
        "--low-ram": (True, not is_flux2, IN_FLIGHT),
        **({"--low-ram --vae-tiling": (True, True, IN_FLIGHT)} if is_flux2 else {}),
        SCRIPT: (True, False, 0),
    }
    made, cached, vae = [], cache_limit or 0, vae_bytes(model, "all", "bfloat16")
    for name, (leave, tiled, in_flight) in options.items():
        sides = (min(TILE, height), min(TILE, width)) if tiled else (height, width)
        most, kept = decode(model, *sides, in_flight=in_flight).total, 0 if leave else encoders
        phases = (
            Phase.planned("encode prompt", encoders, cached, {}),
            Phase.planned("denoise", denoiser + kept, cached, {}),
            Phase.planned("decode", vae + (0 if leave else denoiser + kept), most + cached, {}),
        )
        settings = {"low_ram": leave, "tile": TILE if tiled else None, "in_flight": in_flight}
        settings["cache_limit"] = cache_limit
        changes = "tiles are normalised one by one and blended where they overlap" if sides != (height, width) else ""
        unsure = "" if in_flight else UNSURE
        made.append(Way(name, settings, phases, changes=changes, notes=MLX_NOTES, unsure=unsure))
    return made


def weights_bytes(role: str, component: str, given: Any) -> int:
    """Return the bytes of a component's weights.

    Parameters
    ----------
    role, component : str
        Such as ``"unet"``, played by ``"sd15-unet"``.
    given : str or path
        A size as a program prints it (``"6.8 GiB"``), a file with a header that lists its tensors, or a dtype.

    Examples
    --------
    >>> weights_bytes("unet", "sd15-unet", "float16"), weights_bytes("unet", "sd15-unet", "1.6 GiB")
    (1719041928, 1717986918)
    """
    told = told_bytes(role, given)
    if told is not None:
        return told
    dtype = meant(f"components[{role!r}]", given, DTYPES)
    return sum(weight.nbytes(dtype) for weight in weights_of(component))


def plan(given: PlanArguments) -> PipelinePlan:
    """Answer `vaemem.plan_pipeline`."""
    known, parts = given.known, given.components or {}
    if given.memory is None:
        raise ArgumentError("memory", "the memory of the Mac, such as '16 GB'", "None")
    limit = None if given.cache_limit is None else parse_size("cache_limit", given.cache_limit, least=0)
    roles = (*known.encoders, known.denoiser)
    for role in parts:
        choose("components", role, roles)
    sizes = {role: weights_bytes(role, known.parts[role], parts.get(role, known.dtype)) for role in roles}
    denoiser = sizes.pop(known.denoiser)
    ways = _ways(known.parts["vae"], given.height, given.width, sum(sizes.values()), denoiser, limit)
    images, (share, of) = f", {given.batch} images" if given.batch > 1 else "", WORKING_SET
    title = f"{given.pipeline} {given.height}x{given.width}{images} by mlx on a Mac of {given.memory}"
    return PipelinePlan(title, ways, Room(sold(given.memory) * share // of), safe=given.safe)
