"""Bounds that applications can paste: lines in H*W that no prediction's `upper` lies above, over a stated domain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from vaemem._arguments import shared
from vaemem._common import DTYPES, MIB, OPS, __version__, chosen, distinct, listed, meant, render, whole
from vaemem._types import Dtype
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.engine.configs import named_model
from vaemem.prediction.job import Job
from vaemem.prediction.predict import Prediction
from vaemem.prediction.request import Card, Software, VAERequest, find_card
from vaemem.prediction.runtimes import RUNTIMES, architecture, packing

# The sides that are predicted by default, in pixels: those that people use, and some that are multiples of 8 and of no
# more, for which cuDNN chooses other plans. Without the latter, one size in four is up to 2% above its line.
SIDES = (
    256, 264, 320, 360, 384, 512, 520, 616, 640, 720, 768, 832, 896, 1000, 1024, 1080, 1152, 1216, 1280, 1344, 1384,
    1536, 1720, 1792, 1920, 1928, 2048,
)  # fmt: skip
TILES = (512, 768, 1024)  # pixels
PASSES = (1, 1), (2, 0.5), (0.5, 2)  # heights and widths of ComfyUI's tiles, in sides; others cut squares alone
TILED_STEP = 512  # pixels: the sides of the images that are predicted in tiles


class _Function(NamedTuple):
    """What one estimate of an application is about."""

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    runtimes: tuple[str, ...]  # whose code the application runs, in any of its releases
    is_upcast: bool = False  # float32 runs of float16 weights, too
    is_tiled: bool = False  # it is told a tile's side


class _Application(NamedTuple):
    title: str
    functions: dict[str, _Function]
    source: str  # what is pasted, beside the lines


_LINE = """
def _bytes(name, op, height, width, dtype, tile=None):
    key = name, op, str(dtype).removeprefix("torch.")
    if key not in BYTES:
        known = ", ".join(map(" ".join, BYTES))
        raise ValueError(f"want one of {known}, got {' '.join(key)}: vaemem.bound makes formulas for more")
    per_pixel, constant, *in_tiles = BYTES[key]
    if tile is None or (tile >= height and tile >= width):
        return per_pixel * height * width + constant
    return per_pixel * _largest(tile, height, width) + constant + in_tiles[0] * height * width

"""

_COMFYUI = '''
def _largest(tile, height, width):
    shapes = (tile, tile), (2 * tile, tile // 2), (tile // 2, 2 * tile)  # in three passes
    return max(min(high, height) * min(wide, width) for high, wide in shapes)


def memory_used_encode(shape, dtype, tile=None):
    """Bytes for one image; shape: of the pixels, (N, C, H, W); tile: the side of encode_tiled's, in pixels."""
    return _bytes("vae", "encode", shape[2], shape[3], dtype, tile)


def memory_used_decode(shape, dtype, tile=None):
    """Bytes for one image; shape: of the latents, (N, C, H / 8, W / 8); tile: decode_tiled's, in pixels of latents."""
    return _bytes("vae", "decode", 8 * shape[2], 8 * shape[3], dtype, tile and 8 * tile)


def memory_used_encode_flux2(shape, dtype, tile=None):
    return _bytes("flux2", "encode", shape[2], shape[3], dtype, tile)


def memory_used_decode_flux2(shape, dtype, tile=None):
    """The same of FLUX.2's, (N, 128, H / 16, W / 16)."""
    return _bytes("flux2", "decode", 16 * shape[2], 16 * shape[3], dtype, tile and 16 * tile)


def memory_used_encode_wan(shape, dtype, tile=None):
    return _bytes("wan", "encode", shape[3], shape[4], dtype, tile)


def memory_used_decode_wan(shape, dtype, tile=None):
    """The same of one frame of Qwen-Image's and Wan 2.1's, (N, 16, 1, H / 8, W / 8)."""
    return _bytes("wan", "decode", 8 * shape[3], 8 * shape[4], dtype, tile and 8 * tile)
'''

_INVOKEAI = """
def _largest(tile, height, width):
    return min(tile, height) * min(tile, width)


def _of(name, operation, image_tensor, dtype, tile=None):
    scale = 8 if operation == "decode" else 1
    height, width = (scale * side for side in image_tensor.shape[-2:])
    return _bytes(name, operation, height, width, dtype, tile)


def estimate_vae_working_memory_sd15_sdxl(operation, image_tensor, vae, tile_size, fp32):
    tile = vae.tile_sample_min_size if tile_size == 0 else tile_size
    return _of("sd15_sdxl", operation, image_tensor, "float32" if fp32 else "float16", tile)


def estimate_vae_working_memory_flux(operation, image_tensor, vae, tile_size=None):
    tile = tile_size if tile_size is None or tile_size > 0 else 512  # 0: the nodes' default
    return _of("flux", operation, image_tensor, next(vae.parameters()).dtype, tile)


def estimate_vae_working_memory_flux2(operation, image_tensor, vae):
    return _of("flux2", operation, image_tensor, next(vae.parameters()).dtype)


def estimate_vae_working_memory_sd3(operation, image_tensor, vae):
    return _of("sd3", operation, image_tensor, next(vae.parameters()).dtype)


def estimate_vae_working_memory_cogview4(operation, image_tensor, vae):
    return _of("cogview4", operation, image_tensor, next(vae.parameters()).dtype)


def estimate_vae_working_memory_qwen_image(operation, image_tensor, vae, tile_size=None):
    return _of("qwen_image", operation, image_tensor, next(vae.parameters()).dtype, tile_size)


estimate_vae_working_memory_anima = estimate_vae_working_memory_qwen_image  # Wan 2.1's, of the same layers
"""

_FLUX2_MODELS = ("flux2", "flux2-small")
APPLICATIONS = {
    # Its class VAE has one estimate for all AutoencoderKL, and another for latents that FLUX.2's BatchNorm packs.
    "comfyui": _Application(
        "ComfyUI",
        {
            "vae": _Function(
                ("sd15", "sdxl", "flux", "sd3", "zimage", "playground-v2.5"), DTYPES, ("comfyui",), is_tiled=True
            ),
            "flux2": _Function(_FLUX2_MODELS, DTYPES, ("comfyui",), is_tiled=True),
            "wan": _Function(("qwen-image",), DTYPES, ("comfyui",), is_tiled=True),
        },
        _COMFYUI,
    ),
    # It runs SD's VAE in one of two dtypes, whatever the weights are stored in; FLUX's in its own AutoEncoder, after
    # BFL's, and in diffusers', and so Z-Image's. FLUX.2's runs without an estimate of its own (8e71a8a).
    "invokeai": _Application(
        "InvokeAI",
        {
            "sd15_sdxl": _Function(
                ("sd15", "sdxl", "playground-v2.5"), ("float16", "float32"), ("diffusers",), True, True
            ),
            "flux": _Function(("flux", "zimage"), DTYPES, ("bfl", "diffusers"), False, True),
            "flux2": _Function(_FLUX2_MODELS, DTYPES, ("diffusers",)),
            "sd3": _Function(("sd3",), DTYPES, ("diffusers",)),
            "cogview4": _Function(("cogview4",), DTYPES, ("diffusers",)),
            "qwen_image": _Function(("qwen-image",), DTYPES, ("diffusers",), is_tiled=True),
        },
        _INVOKEAI,
    ),
}


class BoundLine(NamedTuple):
    """``per_pixel * H*W + constant`` bytes, H and W the image's in pixels: at least `upper` of every prediction.

    Attributes
    ----------
    function : str
        The application's estimate, by its key in the pasted table.
    op, dtype : str
    per_pixel, constant : int
        Bytes.
    in_tiles : int or None
        With tiles smaller than the image, H and W are the largest tile's, and this is added for each pixel of the
        image; None where the application's estimate knows no tiles.
    predictions : int
        That it was made from and holds for.
    overshoot : float
        The most that it is above the largest `upper` of a size, as a share of that, without tiles.
    at : tuple of int
        (height, width) where that is.
    passes : tuple of pairs
        The heights and widths of its tiles, in sides of a tile: ComfyUI's three passes cut other shapes too.
    """

    function: str
    op: str
    dtype: str
    per_pixel: int
    constant: int
    in_tiles: int | None
    predictions: int
    overshoot: float
    at: tuple[int, int]
    passes: tuple[tuple[float, float], ...] = ((1, 1),)

    def bytes(self, height: int, width: int, tile: int | None = None) -> int:
        """The bytes of an image of so many pixels, in tiles of `tile` pixels a side where that is given."""
        height, width = whole("height", height), whole("width", width)
        tile = None if tile is None else whole("tile", tile)
        if tile is None or (tile >= height and tile >= width):
            return self.per_pixel * height * width + self.constant
        if self.in_tiles is None:
            raise ValueError(f"tile: want none, for {self.function} knows no tiles, got {tile}")
        largest = max(min(int(tile * h), height) * min(int(tile * w), width) for h, w in self.passes)
        return self.per_pixel * largest + self.constant + self.in_tiles * height * width

    @property
    def numbers(self) -> tuple[int, ...]:
        """As the pasted table has them."""
        return self.per_pixel, self.constant, *(() if self.in_tiles is None else (self.in_tiles,))


class Bound:
    """What `vaemem.bound` gives. Printing it shows the lines.

    Attributes
    ----------
    application : str
    lines : tuple of BoundLine
        One for each function, op and dtype.
    domain : str
        What they were checked for, in words.
    """

    def __init__(self, application: str, lines: Sequence[BoundLine], domain: str):
        self.application, self.lines, self.domain = application, tuple(lines), domain

    def find(self, model: str, op: str, dtype: str) -> BoundLine:
        """The line for a model's op; ValueError where there is none."""
        functions = APPLICATIONS[self.application].functions
        for line in self.lines:
            if model in functions[line.function].models and (line.op, line.dtype) == (op, dtype):
                return line
        known = ", ".join(f"{line.function} {line.op} {line.dtype}" for line in self.lines)
        raise ValueError(f"find: want one of {known}, got {model} {op} {dtype}")

    def python(self) -> str:
        """A Python module with the application's functions, to be pasted: it imports nothing."""
        title, _, source = APPLICATIONS[self.application]
        rows = [
            f"    {(line.function, line.op, line.dtype)!r}: {line.numbers!r},"
            f"  # at most {_percent(line.overshoot)} above the predictions, at {_size(line.at)}"
            for line in self.lines
        ]
        tiled = any(line.in_tiles is not None for line in self.lines)
        columns = "bytes for each pixel, bytes beside" + (", and for each pixel of an image in tiles" if tiled else "")
        return "\n".join([
            f'"""The working memory of VAEs in {title}, in bytes: what to reserve beside the weights.',
            "",
            f"By vaemem {__version__}. No `upper` of its predictions lies above, for",
            self.domain,
            '"""',
            "",
            f"# {columns}",
            'BYTES = {',
            *(row.replace("'", '"') for row in rows),
            "}",
            "",
            _LINE + source,
        ])  # fmt: skip

    def __str__(self) -> str:
        header = ["function", "op", "dtype", "bytes per pixel", "and MiB", "in tiles", "predictions", "at most above"]
        cells = [
            (line.function, line.op, line.dtype, str(line.per_pixel), f"{line.constant / MIB:.1f}",
             "" if line.in_tiles is None else str(line.in_tiles), str(line.predictions),
             f"{_percent(line.overshoot)} at {_size(line.at)}")
            for line in self.lines
        ]  # fmt: skip
        return f"{APPLICATIONS[self.application].title}, for\n{self.domain}\n{render(header, cells)}"

    __repr__ = __str__


@shared
def bound(
    application: str, models: str | Sequence[str] | None = None, dtypes: Dtype | Sequence[Dtype] = DTYPES, *,
    gpu: str | Sequence[str] = "RTX 4090", memory: int | str | None = None, cudnn_version: str | None = None,
    torch_version: str | None = None, sides: int | Iterable[int] = SIDES, progress: Progress = None,
) -> Bound:  # fmt: skip
    """Formulas for an application's own estimates of a VAE's memory, which no prediction's `upper` lies above.

    Every size of the domain is predicted, on every card, in every way that the application runs it; the formulas are
    the lines over those predictions that exceed them the least.

    Parameters
    ----------
    application : str
        ``"comfyui"``: ``memory_used_encode`` and ``memory_used_decode`` of its class VAE, with tiles, and the same for
        FLUX.2 and for one frame of Qwen-Image's and Wan 2.1's VAE. ``"invokeai"``:
        ``estimate_vae_working_memory_sd15_sdxl``, ``_flux`` (Z-Image's too), ``_qwen_image`` and ``_anima``, with
        tiles, and ``_flux2``, ``_sd3`` and ``_cogview4``.
    models, dtypes : str or sequence of str, optional
        What the formulas are for: ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"float16"`` ...; by default all that its
        functions are about. What is left out is not in the formulas.
    gpu : str or sequence of str
        Cards or compute capabilities, as `predict` takes them: the formulas hold on each.
    memory : shared
    cudnn_version, torch_version : str, optional
        The versions that run, as `predict` takes them; by default the formulas hold for every version that is known.
    sides : int or iterable of int
        Heights and widths in pixels: every pair of them is a size of the domain. By default 27 from 256 to 2048, which
        makes aspect ratios from 1/8 to 8.
    progress : bool or callable, optional
        True shows a bar (tqdm, ``pip install 'vaemem[progress]'``); a callable gets (sizes done, sizes to do).

    Raises
    ------
    ValueError
        What `predict` raises, an unknown application, or nothing that it runs.

    Notes
    -----
    All sizes on one card take up to a minute where no version is given, for every version counts. Between the sizes of
    the domain the formulas were not checked, and beyond it they are no bound. Images are one at a time.

    Tiles are predicted with 512, 768 and 1024 pixels a side, in images with sides of multiples of 512. FLUX.2's images
    are of whole 16 pixels in ComfyUI: other sides are left out there.

    Examples
    --------
    >>> b = bound("comfyui", "sdxl", "float16", torch_version="2.7.1+cu128", sides=(512, 1024, 2048))
    >>> b.find("sdxl", "decode", "float16").bytes(1024, 1024) / 2**20
    3419.0
    >>> source = b.python()  # to paste
    """
    application, gpus = meant("application", application, APPLICATIONS), listed(gpu, str)
    wanted = None if models is None else [named_model("models", model) for model in listed(models, str)]
    dtypes = chosen("dtypes", dtypes, DTYPES)
    pixels = sorted(distinct(whole("sides", side) for side in listed(sides, int)))
    for name, given in (("sides", pixels), ("gpu", gpus)):
        if not given:
            raise ValueError(f"{name}: want one or more, got none")
    software = Software(torch_version=torch_version, cudnn_version=cudnn_version)
    asked = _Asked([find_card(name, memory) for name in gpus], software)
    functions = {
        name: function._replace(models=tuple(m for m in function.models if wanted is None or m in wanted))
        for name, function in APPLICATIONS[application].functions.items()
    }
    functions = {name: function for name, function in functions.items() if function.models}
    ways = [
        (name, function, op, dtype)
        for name, function in functions.items()
        for op in OPS
        for dtype in function.dtypes
        if dtype in dtypes
    ]
    if not ways:
        raise ValueError(f"models, dtypes: want some that {application} runs, got {models!r}, {dtypes!r}")
    done, work = itertools.count(1), sum(len(_taken(function, pixels)) ** 2 for _, function, _, _ in ways)
    with polling(progress, "bound", total=work, bar_format=BAR) as poll:
        lines = [asked.line(*way, pixels, lambda: poll(next(done), work) if poll else None) for way in ways]
    return Bound(application, lines, asked.domain(functions.values(), pixels))


class _Asked(NamedTuple):
    """On which cards, with which software."""

    cards: list[Card]
    software: Software

    def line(
        self, name: str, function: _Function, op: str, dtype: str, sides: Sequence[int], tell: Callable[[], object]
    ) -> BoundLine:
        """The line over the predictions of all sizes, and what is added in tiles. tell: called after each size."""
        uppers: dict[tuple[int, int], list[int]] = {}
        sides = _taken(function, sides)
        if not sides:
            raise ValueError(f"sides: want one of a multiple of {_step(function)} for {name}, which takes no other")
        for height, width in itertools.product(sides, sides):
            uppers[height, width] = [p.upper for p in self._predictions(function, op, dtype, height, width)]
            tell()
        most = {size: max(found) for size, found in uppers.items()}
        per_pixel, constant = _over([(height * width, size) for (height, width), size in most.items()])
        predicted = sum(map(len, uppers.values()))
        passes = PASSES if "comfyui" in function.runtimes else PASSES[:1]
        line = BoundLine(name, op, dtype, per_pixel, constant, None, predicted, 0.0, (0, 0), passes)
        overshoot, at = max((line.bytes(*size) / upper - 1, size) for size, upper in most.items())
        line = line._replace(overshoot=overshoot, at=at)
        return self._in_tiles(line, function, sides) if function.is_tiled else line

    def _in_tiles(self, line: BoundLine, function: _Function, sides: Sequence[int]) -> BoundLine:
        """The same with what is to be added for each pixel of an image in tiles."""
        in_tiles, count = 0, 0
        images = [side for side in sides if side % TILED_STEP == 0]
        for tile, height, width in ((t, h, w) for t in TILES for h in images for w in images if t < max(h, w)):
            alone = line._replace(in_tiles=0).bytes(height, width, tile)
            for p in self._predictions(function, f"{line.op}_tiled", line.dtype, height, width, tile):
                in_tiles, count = max(in_tiles, -((alone - p.upper) // (height * width))), count + 1
        return line._replace(in_tiles=in_tiles, predictions=line.predictions + count)

    def _predictions(
        self, function: _Function, op: Any, dtype: Any, height: int, width: int, tile: int | None = None
    ) -> Iterator[Prediction]:
        """In every way that the application may run one size."""
        weights = distinct((dtype, "float16")) if function.is_upcast and dtype == "float32" else [dtype]
        runtimes = [code for code in function.runtimes if RUNTIMES[code].tiles or not tile]
        # Models of the same layers take the same memory.
        archs = map(architecture, function.models)
        layers = {tuple(v for k, v in arch.items() if k not in _NO_LAYERS): arch for arch in archs}
        for card, arch, runtime, weight in itertools.product(self.cards, layers.values(), runtimes, weights):
            job = Job(arch, op, height, width, dtype, weight, tile=tile)
            yield Prediction(VAERequest(card, replace(self.software, runtime=runtime), job))

    def domain(self, functions: Collection[_Function], sides: Sequence[int]) -> str:
        """In words, a line a thing."""
        cards = ", ".join(distinct(card.gpu.name for card in self.cards))
        said = {"PyTorch": self.software.torch_version, "cuDNN": self.software.cudnn_version}
        versions = " and ".join(f"{name} {version}" for name, version in said.items() if version)
        lines = [
            f"models: {', '.join(distinct(m for f in functions for m in f.models))}; one image",
            f"heights and widths: every pair of {', '.join(map(str, sides))} pixels",
            f"cards: {cards}",
            f"versions: {versions or 'every cuDNN that vaemem knows, as PyTorch 2.7 uses it'}",
            f"code: {', '.join(distinct(r for f in functions for r in f.runtimes))}",
        ]
        if any(f.is_upcast for f in functions):
            lines.append("weights: of the run's dtype; SD's float32 also from float16")
        if any(f.is_tiled for f in functions):
            images = [side for side in sides if side % TILED_STEP == 0]
            tiles = [str(tile) for tile in TILES if tile < max(images, default=0)]
            who = "ComfyUI" if any("comfyui" in f.runtimes for f in functions) else "diffusers"
            told = f"{', '.join(tiles)} pixels as {who} cuts them, in images of {', '.join(map(str, images))} a side"
            lines.append(f"tiles: {told if tiles else 'none were predicted'}")
        return "\n".join(f"- {line}" for line in lines)


def _step(function: _Function) -> int:
    """Pixels that the sides of its images are multiples of, for its models and for the latents that its code takes."""
    return max(packing(code, architecture(model)) * 8 for code in function.runtimes for model in function.models)


def _taken(function: _Function, sides: Sequence[int]) -> list[int]:
    """Those that its code takes; multiples of 8, which its models want, are left for the prediction to check."""
    return [side for side in sides if _step(function) == 8 or side % _step(function) == 0]


_NO_LAYERS = ("name", "scaling_factor", "shift_factor", "latents_mean", "latents_std")


def _over(points: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(a, b), neither negative: of the lines a*x + b along an edge of the points' upper hull that no (x, y) lies above,
    the one whose worst overshoot, as a share of y, is the least."""
    highest: dict[int, int] = {0: 0}  # the origin keeps b from being negative
    for x, y in points:
        highest[x] = max(y, highest.get(x, 0))
    at, lines = (0, highest[0]), []
    while right := [point for point in highest.items() if point[0] > at[0]]:
        (x, y), at = at, max(right, key=lambda point: (Fraction(point[1] - at[1], point[0] - at[0]), point[0]))
        a = max(0, -((y - at[1]) // (at[0] - x)))  # whole bytes, rounded up
        lines.append((a, max(top - a * pixels for pixels, top in highest.items())))
    del highest[0]
    return min(lines, key=lambda line: max((line[0] * x + line[1]) / y for x, y in highest.items()))


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
