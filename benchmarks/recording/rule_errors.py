"""Measure how often the rule answers for convolutions of other networks, and how wrong it is.

    python benchmarks/recording/rule_errors.py --cudnn FOLDER [--gpu "RTX 4090" H100 T4] [--count 500]

Draws convolutions of common vision networks at common image sizes, in all types of numbers and both layouts, asks an
installed cuDNN (9.8 or later) for their workspaces, and compares `vaemem.prediction.workspace.Workspace`. Needs no GPU.

Errors are relative to input + output + filter: the median, the ninth in ten, and the shares that are within 3%, too low
and too high. "of workspace" is the median error relative to the workspace. "above" is the share for which cuDNN takes
more than the upper end of the rule's band, i+f+3o.
"""

import argparse
import collections
import random
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from ask_cudnn import Cudnn

from vaemem._render import Columns
from vaemem.engine.cudnn_path import find_cudnn
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.profiles import Conv, formula_bytes, sizes
from vaemem.prediction.workspace import Workspace

SIDES = (224, 256, 320, 384, 448, 512, 576, 640, 720, 768, 832, 896, 960, 1024)
BATCHES = (1, 1, 1, 1, 2, 2, 4, 8)
MOST = ["i+f+3o", 0, 0, 0, 0]  # the upper end of the rule's band
BAR = 0.03  # of input, output and filter: an answer within it counts as right
LARGEST = 2048  # pixels a side of a convolution's input: an upscaler's is larger than its image


class Layer(NamedTuple):
    """A convolution of a network. level: its input's side is the image's, divided by 2^level."""

    c: int
    k: int
    r: int = 3
    level: int = 0
    stride: int = 1
    padding: int | None = None
    more: tuple[tuple[str, Any], ...] = ()


def bottlenecks() -> Iterator[Layer]:
    """ResNet-50, and with the heads of DeepLabV3 and of a feature pyramid."""
    yield Layer(3, 64, 7, 0, 2)
    before = 64
    for level, width in enumerate((64, 128, 256, 512), 2):
        stride, at = (1, level) if level == 2 else (2, level - 1)
        yield Layer(before, width, 1, at)
        yield Layer(width, width, 3, at, stride)
        yield Layer(before, 4 * width, 1, at, stride, 0)
        before = 4 * width
        yield from (Layer(before, width, 1, level), Layer(width, width, 3, level), Layer(width, before, 1, level))
        yield Layer(before, 256, 1, level)
        yield Layer(256, 256, 3, level)
    yield from (Layer(2048, 256, 3, 3, 1, rate, (("dilation", rate),)) for rate in (12, 24, 36))
    yield from (Layer(1280, 256, 1, 3), Layer(256, 21, 1, 3), Layer(256, 91, 1, 2))


def basic_blocks() -> Iterator[Layer]:
    """ResNet-18 and VGG-16."""
    yield Layer(3, 64, 7, 0, 2)
    for level, width in enumerate((64, 128, 256, 512), 2):
        yield Layer(width, width, 3, level)
        if width < 512:
            yield from (Layer(width, 2 * width, 3, level, 2), Layer(width, 2 * width, 1, level, 2, 0))
    for level, (before, width) in enumerate(((3, 64), (64, 128), (128, 256), (256, 512), (512, 512))):
        yield from (Layer(before, width, 3, level), Layer(width, width, 3, level))


def unet() -> Iterator[Layer]:
    """The UNet of segmentation, with transposed convolutions."""
    yield Layer(3, 64)
    for level, width in enumerate((64, 128, 256, 512, 1024)):
        yield Layer(width, width, 3, level)
        if level < 4:
            yield from (Layer(width, 2 * width, 3, level + 1), Layer(2 * width, width, 3, level))
            yield Layer(2 * width, width, 2, level + 1, 2, 0, (("output_padding", 0),))
    yield Layer(64, 2, 1)


def upscalers() -> Iterator[Layer]:
    """ESRGAN (RRDB), its compact network, and SwinIR."""
    yield from (Layer(3, 64), Layer(64, 64), Layer(64, 64, 3, -1), Layer(64, 64, 3, -2), Layer(64, 3, 3, -2))
    yield from (Layer(c, 32) for c in (64, 96, 128, 160))
    yield from (Layer(192, 64), Layer(64, 48), Layer(3, 180), Layer(180, 180), Layer(180, 64), Layer(64, 256))


def controlnet() -> Iterator[Layer]:
    """The condition's embedding, the zero convolutions, and UNets with more channels in their input."""
    widths = (16, 32, 96, 256)
    yield Layer(3, 16)
    for level, (width, after) in enumerate(zip(widths, (*widths[1:], 320), strict=True)):
        yield from (Layer(width, width, 3, level), Layer(width, after, 3, level, 1 if width == 256 else 2))
    yield from (Layer(c, c, 1, level) for c, level in ((320, 3), (320, 4), (640, 4), (640, 5), (1280, 5), (1280, 6)))
    yield from (Layer(8, 320, 3, 3), Layer(9, 320, 3, 3))


def mobile() -> Iterator[Layer]:
    """EfficientNet and MobileNet, and ConvNeXt: depthwise convolutions and those of one pixel."""
    yield from (Layer(3, 32, 3, 0, 2), Layer(3, 96, 4, 0, 4, 0), Layer(320, 1280, 1, 5))
    for level, width in ((1, 16), (2, 24), (3, 40), (4, 80), (4, 112), (5, 192)):
        yield from (Layer(width, 6 * width, 1, level), Layer(6 * width, width, 1, level))
        yield Layer(6 * width, 6 * width, 5 if level % 2 else 3, level, 1, None, (("groups", 6 * width),))
    for level, width in enumerate((96, 192, 384), 2):
        yield Layer(width, width, 7, level, 1, None, (("groups", width),))
        yield Layer(width, 2 * width, 2, level, 2, 0)


def detectors() -> Iterator[Layer]:
    """YOLOv8-s, and what Segment Anything and depth estimators have behind their transformers."""
    yield Layer(3, 32, 3, 0, 2)
    for level, width in enumerate((32, 64, 128, 256), 1):
        yield from (Layer(width, 2 * width, 3, level, 2), Layer(width, width, 3, level))
        yield from (Layer(2 * width, 2 * width, 1, level + 1), Layer(3 * width, 2 * width, 1, level + 1))
    yield from (Layer(128, 80, 1, 3), Layer(768, 256, 1, 4), Layer(256, 128, 3, 1), Layer(128, 32), Layer(32, 1, 1))
    for c, k, level in ((256, 64, 4), (64, 32, 3)):
        yield Layer(c, k, 2, level, 2, 0, (("output_padding", 0),))
    yield from (Layer(3, 768, 16, 0, 16, 0), Layer(3, 1024, 14, 0, 14, 0), Layer(16, 1536, 2, 3, 2, 0))


def translators() -> Iterator[Layer]:
    """pix2pix's generator and discriminator, CycleGAN's, and layers of 5x5."""
    yield from (Layer(3, 64, 4, 0, 2, 1), Layer(6, 64, 4, 0, 2, 1), Layer(512, 1, 4, 5, 1, 1))
    for level, width in enumerate((64, 128, 256), 1):
        yield Layer(width, 2 * width, 4, level, 2, 1)
        yield Layer(2 * width, width, 4, level + 1, 2, 1, (("output_padding", 0),))
        yield Layer(width, 2 * width, 3, level - 1, 2)
    yield from (Layer(3, 64, 7), Layer(64, 3, 7), Layer(256, 256, 3, 2), Layer(64, 192, 5, 2), Layer(3, 64, 9))
    yield from (Layer(64, 64, 5), Layer(32, 64, 5, 1, 2))


NETWORKS = (bottlenecks, basic_blocks, unet, upscalers, controlnet, mobile, detectors, translators)


def draw(rng: random.Random) -> Conv:
    """A convolution of a network, at an image's size."""
    while True:
        layer = rng.choice(list(rng.choice(NETWORKS)()))
        side, dtype = rng.choice(SIDES), rng.choice(("float16", "bfloat16", "float32"))
        layout, n = rng.choice(("nchw", "nchw", "nhwc")), rng.choice(BATCHES)
        at = round(side / 2**layer.level)
        padding = layer.r // 2 if layer.padding is None else layer.padding
        conv = Conv(dtype, n, layer.c, at, at, layer.k, layer.r, layer.stride, padding, layout, **dict(layer.more))
        if at <= LARGEST and min(conv.out) > 0 and max(conv.elements) < 1 << 31:
            return conv


class Answer(NamedTuple):
    """A workspace by the package and by cuDNN. who: "profile", "rule", or "PyTorch" if it has a kernel of its own."""

    conv: Conv
    who: str
    said: int
    true: int

    @property
    def tensors(self) -> int:
        return sum(self.conv.elements) * (4 if self.conv.dtype == "float32" else 2)

    @property
    def of_tensors(self) -> float:
        """The error, relative to input, output and filter; negative if the answer is too low."""
        return (self.said - self.true) / self.tensors

    @property
    def of_workspace(self) -> float:
        """The error, relative to the larger of the two workspaces."""
        return abs(self.said - self.true) / max(self.said, self.true, 1)

    @property
    def kind(self) -> str:
        conv = self.conv
        shape = "grouped" if conv.groups > 1 else "transposed" if conv.output_padding is not None else "plain"
        return f"{'float32' if conv.dtype == 'float32' else 'half'} {conv.layout} {shape}"


def answer(cudnn: Cudnn, gpu: Gpu, count: int) -> list[Answer]:
    """The first `count` convolutions that cuDNN has a plan for, and those before them that PyTorch runs itself."""
    rng, workspace, answers = random.Random(0), Workspace(gpu, cudnn.version), list[Answer]()
    while len(answers) < count:
        conv = draw(rng)
        said, source = workspace.conv(*conv)
        if source.startswith("PyTorch"):
            answers.append(Answer(conv, "PyTorch", said, said))
        elif plan := cudnn.conv(gpu.device_json, conv):
            answers.append(Answer(conv, "profile" if source.startswith("profile") else "rule", said, plan["bytes"]))
    return answers


HEADER = tuple("GPU,by,count,share,median,9 in 10,within 3%,of workspace,too low,too high,above".split(","))


def row(name: str, who: str, answers: list[Answer], all_answers: int) -> tuple[str, ...]:
    off = sorted(abs(a.of_tensors) for a in answers)
    shares = [len(off) / all_answers, median(off), off[len(off) * 9 // 10], sum(x <= BAR for x in off) / len(off)]
    shares.append(median(a.of_workspace for a in answers))
    shares += [sum(sign * a.of_tensors > BAR for a in answers) / len(off) for sign in (-1, 1)]
    shares.append(sum(a.true > formula_bytes(MOST, sizes(a.conv)) for a in answers) / len(off))
    return name, who, str(len(off)), *(f"{share:.1%}" for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cudnn", help="libcudnn.so.9 or its folder; the installed one by default")
    parser.add_argument("--gpu", nargs="+", default=["RTX 4090", "H100", "T4"])
    parser.add_argument("--count", type=int, default=500, help="convolutions for each GPU")
    parser.add_argument("--kinds", action="store_true", help="the rule's errors by type, layout and shape too")
    arguments = parser.parse_args()
    try:
        cudnn = Cudnn(arguments.cudnn or find_cudnn())
    except OSError as error:
        sys.exit(str(error))
    rows = []
    for name in arguments.gpu:
        groups = collections.defaultdict(list)
        for one in answer(cudnn, find_gpu(name), arguments.count):
            groups[one.who].append(one)
            if one.who == "rule" and arguments.kinds:
                groups[f"rule: {one.kind}"].append(one)
        rows += [row(name, who, found, arguments.count) for who, found in sorted(groups.items())]
    print(f"cuDNN {cudnn.version}: errors relative to input + output + filter\n")
    print(Columns(HEADER, rows).text())


if __name__ == "__main__":
    main()
