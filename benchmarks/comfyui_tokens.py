"""Prompts of ComfyUI's workflows: numbers of tokens, which only a tokenizer's files would tell from words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Tokens:
    """Takes the place of a tokenizer: a prompt has a number of tokens, and those of the template and of pictures."""

    def __init__(self, row: Mapping[str, Any], length: int):
        self._lengths = {name: count or length for name, count in row["tokens_of"].items()}
        self._before, self._least = _template(row.get("template", 0)), row.get("least_tokens", 0)

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, images: Any = (), **_: Any) -> Any:
        seen = [{"type": "image", "data": image, "original_type": "image"} for image in images]
        lists = {name: [*self._before, *seen, *[1000] * length] for name, length in self._lengths.items()}
        return {name: [self._padded([(one, 1.0, 1) for one in tokens])] for name, tokens in lists.items()}

    def _padded(self, tokens: list[Any]) -> list[Any]:
        """Pad on the left. Recorders count what a call gets: the padding has no numbers of words, as tokens have."""
        return [(0, 1.0)] * (self._least - len(tokens)) + tokens


def _template(count: int) -> list[int]:
    """Return Qwen's tokens before a prompt: <|im_start|>, those of the system's message, <|im_start|>user and a new
    line."""
    return [151644, *[1000] * (count - 4), 151644, 872, 198] if count else []
