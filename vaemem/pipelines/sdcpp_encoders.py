"""The graphs of stable-diffusion.cpp's text encoders: after llm.hpp, clip.hpp and t5.hpp (see prediction/sdcpp.py)."""

from __future__ import annotations

from vaemem.prediction.ggml import I32, Tensor
from vaemem.prediction.sdcpp import Runner


class Qwen3(Runner):
    """Qwen3-4B, of which Z-Image takes what the last but one of its 36 layers gives."""

    HIDDEN, HEADS, KEY_HEADS, DEPTH, INNER = 2560, 32, 8, 128, 9728

    def block(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        tokens = x.ne[1]

        def heads(x: Tensor, count: int) -> Tensor:
            return self.linear(x, count * self.DEPTH, bias=False).reshape(self.DEPTH, count, tokens)

        def turned(x: Tensor) -> Tensor:
            x = self.rms_norm(x).apply("rope", positions)
            return x.permute(0, 2, 1, 3).cont().reshape(self.DEPTH, tokens, x.ne[1])

        h = self.rms_norm(x)
        q, k, v = heads(h, self.HEADS), heads(h, self.KEY_HEADS), heads(h, self.KEY_HEADS)
        h = self.attend(turned(q), turned(k), v, mask)
        x = self.linear(h, self.HIDDEN, bias=False).write("add", x)
        h = self.rms_norm(x)
        gate = self.linear(h, self.INNER, bias=False).write("unary")
        h = gate.write("mul", self.linear(h, self.INNER, bias=False))
        return self.linear(h, self.HIDDEN, bias=False).write("add", x)

    def build(self, tokens: int) -> Tensor:
        ids, positions, mask = (
            self.input(tokens, element=I32),
            self.made(tokens, element=I32),
            self.made(tokens, tokens),
        )
        layers = [self.embedding(ids, self.HIDDEN, 151936)]
        for _ in range(36):
            layers.append(self.block(layers[-1], positions, mask))
        self.weight(self.HIDDEN)  # of the last norm, which is not used
        return layers[35]


class Clip(Runner):
    """CLIP's text model: ViT-L/14, or OpenCLIP's ViT-bigG/14, which has a projection."""

    def layer(self, x: Tensor, heads: int, mask: Tensor) -> Tensor:
        n = x.ne[0]
        h = self.norm(x)
        h = self.attention(self.linear(h, n), self.linear(h, n), self.linear(h, n), heads, mask)
        x = x.apply("add", self.linear(h, n))
        h = self.linear(self.norm(x), 4 * n).write("unary")
        return x.apply("add", self.linear(h, n))

    def build(self, tokens: int, hidden: int, heads: int, layers: int, projected: bool) -> Tensor:
        ids, mask = self.input(tokens, element=I32), self.made(tokens, tokens)
        x = self.embedding(ids, hidden, 49408).apply("add")
        self.weight(hidden, tokens)  # of positions
        for _ in range(layers):
            x = self.layer(x, heads, mask)
        if projected:
            self.weight(hidden, hidden)  # for the pooled output
        return self.norm(x)


class T5(Runner):
    """T5-XXL's encoder."""

    HIDDEN, HEADS, INNER = 4096, 64, 10240

    def rms_norm(self, x: Tensor) -> Tensor:
        self.weight(x.ne[0])
        return x.apply("rms_norm").apply("mul")

    def block(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.rms_norm(x)
        q, k, v = (self.linear(h, self.HIDDEN, bias=False) for _ in range(3))
        h = self.attention(q, k.write("scale"), v, self.HEADS, bias)
        x = self.linear(h, self.HIDDEN, bias=False).write("add", x)
        h = self.rms_norm(x)
        gate = self.linear(h, self.INNER, bias=False).write("unary")
        h = gate.write("mul", self.linear(h, self.INNER, bias=False))
        return self.linear(h, self.HIDDEN, bias=False, scaled=True).write("add", x)

    def build(self, tokens: int) -> Tensor:
        x = self.embedding(self.input(tokens, element=I32), self.HIDDEN, 32128)
        distances = self.made(tokens, tokens, element=I32)
        bias = self.embedding(distances, self.HEADS, 32).permute(2, 0, 1, 3).cont()
        for _ in range(24):
            x = self.block(x, bias)
        return self.rms_norm(x)
