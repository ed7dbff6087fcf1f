"""Handmade weights, and a picture for them: an encode and a decode to look at, without any training.

Trained weights cannot be shipped. Handmade weights fill the whole layout of SDXL or another model and go through every
pass that trained weights go through; most of the numbers are zero. Handmade weights know eight flat colours, the
corners of a box that three bits span, and a shade that lightens or darkens these colours.

    encode  a threshold (the first residual block) finds the bits of every pixel; the shade is the remainder. Latents
            are means of the three bits and the shade over 8x8 pixels.
    decode  the upsamplers interpolate bits and shade smoothly; a threshold (the last SiLU) turns the bits into edges
            again.

So an edge comes back sharp in its old place, although latents are eight times coarser: the smooth field crosses the
threshold there. Shapes narrower than about 12 pixels are lost, and other colours become the nearest of these.

A signal f passes GroupNorm and SiLU unharmed as the pair f and -f, since silu(f) - silu(-f) = f. The pair shares a
group with a constant and its negative: the group's mean is zero, and its variance is mostly the constant's. The
picture's statistics still affect the contrast a little, as with trained weights, so tiles leave seams. A residual block
whose second convolution is zero returns its input, and so does attention if its output is zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vaemem import _core
from vaemem.engine.configs import known_arch
from vaemem.engine.vae import VAE

# Colours from 0 to 1: the base of all, and what each bit adds. A bit is 1/2 or -1/2, so the middle is grey.
_ROWS = np.array([(0.66, 0.17, 0.05), (0.12, 0.47, 0.06), (0.07, 0.17, 0.50)])
_MIDDLE = np.array([0.11, 0.15, 0.27]) + _ROWS.sum(0) / 2
_COLOURS = ("navy", "blue", "green", "cyan", "red", "pink", "gold", "cream")  # in the order of their bits

_CONSTANT = 0.5  # in the group of a signal
_RAMP_ENCODE, _RAMP_DECODE = 0.12, 0.035  # half the width of a threshold's ramp; a bit steps from -0.5 to 0.5
_BEND = 8.0  # a ramp is this much longer than SiLU's bends
_RISE = 1 / (2 * _BEND)
_LOGVAR = -30.0  # samples are the mean
_SHADE = 2.5  # gain of the shade: enough, compared with the constant, to affect statistics

_HERE = (1.0,)  # kernels of convolutions, for rows and for columns
_MEAN = (0.5, 0.5, 0.0)  # with stride 2
_SOFTEN = (0.05, 0.9, 0.05)  # makes fields lean evenly at edges
_INTERPOLATE = (0.25, 0.5, 0.25)  # after nearest 2x


class _Tensors:
    """The tensors of a model, zero by default."""

    def __init__(self, core: _core.Model) -> None:
        self.groups = core.arch["norm_num_groups"]
        self.arrays = {name: np.zeros(shape, np.float32) for name, shape in core.tensors}

    def _paired(self, channels: int) -> bool:
        """Return whether a signal has its negative and constants next to it: not at the ends (pixels and latents)."""
        return bool(channels >= 4 * self.groups)

    def _channels(self, channels: int, signals: int) -> np.ndarray:
        """Return the channel of each signal. Its negative, the constant and the constant's negative follow it."""
        return np.arange(signals) * (channels // self.groups if self._paired(channels) else 1)

    def convolve(
        self, module: str, matrix: np.ndarray, kernel: Sequence[float] = _HERE, bias: Any = 0.0, normed: bool = False
    ) -> None:
        """Map signals to signals by a matrix (out, in), a kernel and a bias. normed: the input comes from a SiLU, so f
        and -f differ in more than their sign."""
        weight, offsets = self.arrays[f"{module}.weight"], self.arrays[f"{module}.bias"]
        taps = np.zeros(weight.shape[-1])
        margin = (len(taps) - len(kernel)) // 2
        taps[margin : margin + len(kernel)] = kernel
        values = np.einsum("oi,y,x->oiyx", matrix, taps, taps)
        out, of = self._channels(weight.shape[0], len(matrix)), self._channels(weight.shape[1], len(matrix[0]))
        for sign in (1, -1) if self._paired(weight.shape[0]) else (1,):
            to = out if sign == 1 else out + 1
            weight[np.ix_(to, of)] = sign * values
            if normed:
                weight[np.ix_(to, of + 1)] = -sign * values
            offsets[to] = np.multiply(sign, bias)
            if self._paired(weight.shape[0]):
                offsets[to + 2] = sign * _CONSTANT

    def normalise(self, module: str, ramps: Sequence[float]) -> None:
        """Set a norm before a SiLU, for each signal: 0 passes it; r or -r gives the upper or lower end of a ramp from
        -r to r. The difference of both ends, times `_RISE`, rises from 0 to 1."""
        gamma, beta = self.arrays[f"{module}.weight"], self.arrays[f"{module}.bias"]
        gain = _CONSTANT * math.sqrt(2 * self.groups / len(gamma))  # GroupNorm divides by about this
        for channel, ramp in zip(self._channels(len(gamma), len(ramps)), ramps, strict=True):
            if ramp:
                gamma[channel], beta[channel] = gain * _BEND / abs(ramp), math.copysign(_BEND, ramp)
            else:
                gamma[channel : channel + 2] = gain


def handmade(model: str = "sdxl") -> VAE:
    """Make a VAE in a model's layout with handmade weights, in float32 on the CPU."""
    core = _core.Model(known_arch(model))
    made = _Tensors(core)
    kernels: dict[str, Sequence[float]] = {"downsamplers": _MEAN, "upsamplers": _INTERPOLATE}
    kernels |= dict.fromkeys(("conv_shortcut", "decoder.conv_in", "post_quant_conv"), _HERE)
    for name, part in itertools.product(made.arrays, kernels):
        if part in name and name.endswith(".weight"):
            made.convolve(name.removesuffix(".weight"), np.eye(4), kernels[part])  # the three bits and the shade
    _encode(made, core.arch["latent_channels"])
    _decode(made)
    for name, array in made.arrays.items():
        core.set_tensor(name, array)
    return VAE(core)


def _encode(made: _Tensors, latents: int) -> None:
    grey = _SHADE * _ROWS.mean(1)  # lightness of each bit
    to_bits = np.linalg.inv(_ROWS).T
    from_pixels = np.vstack([to_bits, np.full(3, _SHADE / 3)])
    made.convolve("encoder.conv_in", from_pixels / 2, bias=from_pixels @ (0.5 - _MIDDLE))
    block = "encoder.down_blocks.0.resnets.0"
    made.normalise(f"{block}.norm1", [0, 0, 0, 0])
    made.convolve(f"{block}.conv1", np.vstack([np.eye(3, 4)] * 2), normed=True)
    made.normalise(f"{block}.norm2", [_RAMP_ENCODE] * 3 + [-_RAMP_ENCODE] * 3)
    steps = np.hstack([np.eye(3), -np.eye(3)]) * _RISE
    # The signals are now three raw bits, the shade without the bits' lightness, three clean bits.
    to_signals = np.vstack([np.zeros((3, 3)), -grey, np.eye(3)])
    made.convolve(f"{block}.conv2", to_signals @ steps, bias=-to_signals.sum(1) / 2, normed=True)
    made.convolve("encoder.down_blocks.0.downsamplers.0.conv", np.eye(7)[[4, 5, 6, 3]], _MEAN)
    made.normalise("encoder.conv_norm_out", [0, 0, 0, 0])
    made.convolve("encoder.conv_out", np.eye(4), _SOFTEN, normed=True)
    made.arrays["encoder.conv_out.bias"][latents:] = _LOGVAR
    if "quant_conv.weight" in made.arrays:
        made.convolve("quant_conv", np.eye(2 * latents))


def _decode(made: _Tensors) -> None:
    twice = np.eye(4)[[0, 1, 2, 0, 1, 2, 3]]  # the bits for both ends of their ramps, the shade
    made.convolve("decoder.up_blocks.3.resnets.0.conv_shortcut", twice)
    made.normalise("decoder.conv_norm_out", [_RAMP_DECODE] * 3 + [-_RAMP_DECODE] * 3 + [0])
    to_pixels = np.hstack([_ROWS.T * _RISE, -_ROWS.T * _RISE, np.full((3, 1), 1 / _SHADE)])
    made.convolve("decoder.conv_out", 2 * to_pixels, bias=2 * (_MIDDLE - _ROWS.sum(0) / 2) - 1, normed=True)


# ---- the picture ----


def paint(colour: str, shade: Any = 0.0) -> np.ndarray:
    """Return one of the eight colours as red, green and blue from 0 to 1. shade: lightens or darkens; of any shape."""
    bits = np.array([_COLOURS.index(colour) >> i & 1 for i in (2, 1, 0)])
    return np.asarray(_MIDDLE + (bits - 0.5) @ _ROWS + np.asarray(shade)[..., None])


class _Canvas:
    """A square picture from 0 to 1, y downwards. Shapes have soft edges one pixel wide."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.y, self.x = (np.mgrid[:side, :side] + 0.5) / side
        self.pixels = np.zeros((side, side, 3))

    def paint(self, outside: np.ndarray, colour: str, shade: Any = 0.0) -> None:
        """Paint pixels whose distance `outside` a shape is below 0."""
        cover = np.clip(0.5 - outside * self.side, 0, 1)[..., None]
        self.pixels += cover * (paint(colour, shade) - self.pixels)

    def disc(self, x: float, y: float, radius: float) -> np.ndarray:
        """Return the distance from a disc."""
        return np.asarray(np.hypot(self.x - x, self.y - y) - radius)

    def line(self, points: Sequence[tuple[float, float]], width: float) -> np.ndarray:
        """Return the distance from a line through points, with round ends."""
        parts = []
        for (x, y), (to_x, to_y) in itertools.pairwise(points):
            dx, dy = to_x - x, to_y - y
            along = np.clip(((self.x - x) * dx + (self.y - y) * dy) / (dx * dx + dy * dy), 0, 1)
            parts.append(np.hypot(self.x - x - along * dx, self.y - y - along * dy))
        return np.asarray(np.min(parts, 0) - width / 2)

    def polygon(self, *points: tuple[float, float]) -> np.ndarray:
        """Return the distance from the inside of a closed line."""
        inside = np.zeros(self.x.shape, bool)
        for (x, y), (to_x, to_y) in zip(points, points[1:] + points[:1], strict=True):
            if y != to_y:
                inside ^= ((self.y < y) != (self.y < to_y)) & (self.x < x + (self.y - y) * (to_x - x) / (to_y - y))
        edge = self.line([*points, points[0]], 0)
        return np.where(inside, -edge, edge)


Line = list[tuple[float, float]]  # through points
_LETTERS: dict[str, tuple[list[Line], float]] = {  # (lines, width) of a letter of height 1
    "V": ([[(0, 0), (0.42, 1), (0.84, 0)]], 0.84),
    "A": ([[(0, 1), (0.42, 0), (0.84, 1)], [(0.18, 0.68), (0.66, 0.68)]], 0.84),
    "E": ([[(0.6, 0), (0, 0), (0, 1), (0.6, 1)], [(0, 0.5), (0.5, 0.5)]], 0.6),
    "M": ([[(0, 1), (0, 0), (0.5, 0.7), (1, 0), (1, 1)]], 1.0),
}


def picture(side: int = 512) -> np.ndarray:
    """Draw a harbour at noon in the colours that the weights know: (side, side, 3) uint8."""
    c = _Canvas(side)
    c.paint(c.y - 1, "cyan", 0.14 - 0.34 * (1 - c.y / 0.62))
    c.paint(c.disc(0.72, 0.25, 0.155), "cream", 0.02)
    c.paint(c.disc(0.72, 0.25, 0.12), "gold", 0.1 - 0.9 * (c.y - 0.16))
    for x, y, size in ((0.16, 0.16, 0.05), (0.44, 0.1, 0.035)):
        cloud = np.minimum(c.disc(x, y, size), c.disc(x + 1.1 * size, y - 0.5 * size, 1.15 * size))
        cloud = np.minimum(cloud, c.line([(x - size, y + 0.6 * size), (x + 3 * size, y + 0.6 * size)], 1.2 * size))
        c.paint(cloud, "cream", 0.06 - 1.2 * (c.y - y + size))
    c.paint(c.polygon((0.3, 0.64), (0.62, 0.36), (0.74, 0.48), (0.86, 0.4), (1.2, 0.64)), "pink", 0.3 * (0.5 - c.y))
    c.paint(c.polygon((-0.1, 0.64), (0.27, 0.24), (0.62, 0.64)), "navy", 0.5 * (0.62 - c.y))
    c.paint(
        c.polygon((0.27, 0.24), (0.39, 0.376), (0.34, 0.355), (0.29, 0.41), (0.24, 0.36), (0.167, 0.352)),
        "cream", -0.8 * (c.y - 0.3),
    )  # fmt: skip
    c.paint(0.6 - c.y, "blue", 0.22 - 0.9 * (c.y - 0.6))
    for y, x, width in ((0.645, 0.72, 0.3), (0.7, 0.75, 0.22), (0.752, 0.7, 0.14)):
        c.paint(c.line([(x - width / 2, y), (x + width / 2, y)], 0.026), "gold")
    c.paint(c.polygon((0.36, 0.655), (0.36, 0.4), (0.5, 0.655)), "cream", 0.6 * (c.x - 0.4))
    c.paint(c.polygon((0.335, 0.655), (0.335, 0.46), (0.23, 0.655)), "gold", 0.6 * (c.x - 0.3))
    c.paint(c.polygon((0.2, 0.675), (0.54, 0.675), (0.48, 0.745), (0.26, 0.745)), "red", 1.2 * (0.7 - c.y))
    c.paint(c.disc(0.08, 1.32, 0.58), "green", 1.0 * (0.82 - c.y))
    c.paint(c.disc(0.98, 1.15, 0.39), "green", 0.1 + 1.0 * (0.8 - c.y))
    c.paint(0.82 - c.y, "navy", -0.03 + 0.15 * (1 - c.x))
    x, height = 0.07, 0.115
    for letter in "VAEMEM":
        lines, width = _LETTERS[letter]
        for points in lines:
            c.paint(c.line([(x + height * a, 0.86 + height * b) for a, b in points], 0.034), "cream")
        x += height * width + 0.06
    return np.rint(np.clip(c.pixels, 0, 1) * 255).astype(np.uint8)
