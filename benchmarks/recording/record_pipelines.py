"""Record the texts of pipelines for vaemem/data/pipelines, as vaemem/pipelines/pipeline_text.py plays them.

    python benchmarks/recording/record_pipelines.py [NAME ...]        # without names: all

A pipeline's own code runs at several sizes, without its weights (vaemem/pytorch/text_recorder.py). Each size that it
allocates is fitted as a polynomial, and checked at sizes that the fit has not seen.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from modules import MODULES

from vaemem._common import ELEMENT_BYTES
from vaemem.pipelines.components import PIPELINES, Pipeline, is_vae
from vaemem.pipelines.pipeline_request import text_name, variables_of
from vaemem.pipelines.pipeline_text import PipelineText, load_text
from vaemem.pipelines.recorded_modules import load_program
from vaemem.prediction.request import find_card
from vaemem.pytorch.loading import WORD, build_pipeline
from vaemem.pytorch.module_writer import versions_of
from vaemem.pytorch.text_recorder import Event, record_calls, shapes_of
from vaemem.pytorch.text_writer import check_text, write_text

OUT = Path(__file__).parents[2] / "vaemem" / "data" / "pipelines"
SIBLINGS = {  # classes that begin with an image, by the class that does not
    "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3Img2ImgPipeline",
    "FluxPipeline": "FluxImg2ImgPipeline",
    "ZImagePipeline": "ZImageImg2ImgPipeline",
}
# n, h, w, f, t, s: latents h x w are multiples of 4
POINTS = [
    (1, 64, 96, 3, 40, 6), (2, 48, 80, 2, 64, 7), (3, 80, 40, 5, 33, 8), (1, 36, 100, 4, 77, 9),
    (2, 72, 56, 6, 51, 6), (7, 44, 88, 3, 70, 7), (3, 92, 60, 7, 25, 8), (1, 128, 128, 3, 77, 9),
]  # fmt: skip
FEW = [(*POINTS[number][:5], steps) for number in (3, 5) for steps in (1, 2, 3)]  # steps
TYPES = (  # of the pipeline and of its VAE, with points
    ("float16", "float16", [*POINTS, *FEW]), ("float32", "float32", [*POINTS[3:7], *FEW]),
    ("float16", "float32", [*POINTS[3:7], *FEW]),
)  # fmt: skip
CHECKS = [(2, 104, 76, 4, 60, 10), (1, 52, 116, 9, 45, 6)]
CARD = find_card("H200")


def ask(pipe: Any, kind: Pipeline, at: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of a pipeline's call at a point."""
    known = inspect.signature(type(pipe).__call__).parameters
    height, width = (at[side] * kind.factor for side in "hw")
    image = PIL.Image.new("RGB", (width, height))
    asked: dict[str, Any] = {
        "prompt": " ".join([WORD] * at["t"]), "height": height, "width": width, "num_inference_steps": at["s"],
        "num_images_per_prompt": at["n"], "num_videos_per_prompt": at["n"], "num_frames": 4 * at["f"] - 3,
        "max_sequence_length": at["m"] if kind.class_name.startswith(("ZImage", "Flux2", "Qwen")) else at["t"],
        "guidance_scale": 5.0 if at["g"] else 0.0 if kind.class_name.startswith("ZImage") else 1.0, "strength": 1.0,
        "use_resolution_binning": False, "max_area": height * width, "_auto_resize": False, "control_image": image,
    }  # fmt: skip
    if at["g"]:
        asked |= {"negative_prompt": asked["prompt"], "true_cfg_scale": 4.0}
    if "image" in known and (at["i"] or kind.encodes or "controlnet" in kind.parts):
        asked |= {"image": image, "mask_image": image.convert("L")}
    return {name: value for name, value in asked.items() if name in known}


class _Counted:
    """A tokenizer of Qwen-Image's template: it counts the prompt's words, and tokens of the template and the image."""

    def __init__(self, more: int, seen: int):
        self.more, self.seen = more, seen

    def __call__(self, text: Sequence[str], images: Any = None, **_: Any) -> Any:
        from transformers import BatchEncoding

        counts = [one.count(WORD) + self.more + self.seen for one in text]
        ids = torch.zeros(len(text), max(counts), dtype=torch.int64)
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images is not None:
            found |= {"pixel_values": torch.zeros(4 * self.seen, 2 * 3 * 14 * 14), "image_grid_thw": torch.zeros(1, 3)}
        return BatchEncoding(found)


def prepare(pipe: Any, kind: Pipeline, at: Mapping[str, int]) -> None:
    """Let the tokenizers return as many tokens as the point has."""
    pipe.set_progress_bar_config(disable=True)
    for role in ("tokenizer", "tokenizer_2"):
        if kind.most_tokens == 77 and getattr(pipe, role, None) is not None:
            getattr(pipe, role).model_max_length = at["t"]
    if kind.class_name.startswith("QwenImage"):
        template = pipe.prompt_template_encode_start_idx + kind.joined
        pipe.tokenizer = pipe.processor = _Counted(template, at["k"] if kind.sees else 0)


def build(name: str, dtype: str, vae_dtype: str, class_name: str, u: int, c: int) -> Any:
    """Build a pipeline on "meta"."""
    kind = PIPELINES[name]
    pipe = build_pipeline(name, dtype, vae_dtype, "meta", class_name, optional=bool(c))
    if kind.upcasts:
        pipe.vae.register_to_config(force_upcast=bool(u))
    if c:  # the checker's last steps are on the host
        pipe.safety_checker.forward = lambda clip_input, images: (images, [False] * len(images))
    if kind.sees:  # the vision tower is not recorded
        encode = pipe.text_encoder.forward
        pipe.text_encoder.forward = (
            lambda input_ids, attention_mask, pixel_values, image_grid_thw, output_hidden_states: encode(
                input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=output_hidden_states
            )
        )
    return pipe


@functools.cache
def _variables_from(component: str, method: str) -> dict[str, tuple[str, int]]:
    """Find where a module's variables are among the sides of its call's tensors: {variable: (parameter, dimension)}."""
    module, program = MODULES[component], load_program(component)
    with torch.device("meta"):
        built = module.build()
    probes = [{"n": 3, "h": 34, "w": 46, "t": 21, "f": 5}, {"n": 4, "h": 58, "w": 38, "t": 33, "f": 7}]
    seen = list[dict[str, tuple[int, ...]]]()
    for probe in probes:
        with torch.device("meta"):
            args, kwargs = module.call(probe, torch.float16)
        seen.append(dict(shapes_of(inspect.signature(getattr(built, method)).bind_partial(*args, **kwargs).arguments)))

    def find(value: Callable[[Mapping[str, int]], int]) -> tuple[str, int] | None:
        for name, shape in seen[0].items():
            for dim in range(len(shape)):
                if all(one[name][dim] == value(probe) for one, probe in zip(seen, probes, strict=True)):
                    return name, dim
        return None

    found: dict[str, Any] = {name: find(lambda probe, name=name: probe[name]) for name in program.variables}
    if "h" in found and not (found["h"] and found["w"]):
        found["h"] = found["w"] = find(lambda probe: probe["h"] // 2 * (probe["w"] // 2))
    return found


def _variables_of(parts: Mapping[str, str], role: str, method: str, shapes: Any, _: Any) -> dict[str, int]:
    """Return the component's variables for a call with these shapes."""
    component, sides = parts[role], dict(shapes)
    if is_vae(component):
        ((_, (n, _, *frames, h, w)),) = shapes
        return {"n": n, "f": frames[0] if frames else 1, "h": h, "w": w}
    places = _variables_from(component, method)
    values = {name: sides[place[0]][place[1]] for name, place in places.items()}
    if "h" in places and places["h"] == places["w"]:  # only the number of patches counts
        values |= {"h": 2 * values["h"], "w": 2}
    return values


def sibling(name: str, is_begun: bool) -> str:
    """Return the class that begins with an image, or "" for the pipeline's own."""
    return SIBLINGS[PIPELINES[name].class_name] if is_begun else ""


def point_of(name: str, is_begun: bool, side: int, images: int, steps: int) -> dict[str, int]:
    """Return the variables of a square image with the pipeline's usual prompt, type and guidance."""
    kind = PIPELINES[name]
    e = ELEMENT_BYTES[kind.dtype]
    more = {"e": e, "v": e, "g": int(kind.guides), "u": int(kind.upcasts), "c": 0, "i": int(is_begun)}
    return variables_of(kind, side, side, n=images, t=kind.tokens, s=steps, **more)


def _record_at(
    name: str, is_begun: bool, points: Sequence[tuple[int, ...]], dtype: str, vae_dtype: str, u: int, c: int
) -> list[tuple[dict[str, int], list[Event]]]:
    """Record a pipeline's calls at some points, with guidance and without, if it guides."""
    kind = PIPELINES[name]
    pipe = build(name, dtype, vae_dtype, sibling(name, is_begun), u, c)
    types = {"e": ELEMENT_BYTES[dtype], "v": ELEMENT_BYTES[vae_dtype], "u": u, "c": c, "i": int(is_begun)}
    at = [
        variables_of(kind, h * kind.factor, w * kind.factor, 4 * f - 3, n=n, t=t, s=s, g=g, **types)
        for g in ((1, 0) if kind.guides else (0,))
        for first, h, w, f, t, s in points
        for n in (range(1, kind.most_images(bool(g)) + 1) if kind.most_batch else (first,))
    ]

    def call(point: Mapping[str, int], pipe: Any) -> Any:
        prepare(pipe, kind, point)
        return pipe(**ask(pipe, kind, point))

    found = record_calls(pipe, [functools.partial(call, point) for point in at], CARD)
    if notes := dict.fromkeys(note for one in found for note in one.notes):
        print(f"{name}: {'; '.join(notes)}")
    return [(point, one.events) for point, one in zip(at, found, strict=True)]


def _choices(kind: Pipeline) -> Iterator[tuple[str, str, Sequence[tuple[int, ...]], int, int]]:
    """Yield types of the pipeline and of its VAE, points, whether the VAE is upcast, and whether there is a checker."""
    for types, u, c in itertools.product(TYPES, (1, 0)[not kind.upcasts :], (0, 1)[: 1 + bool(kind.optional)]):
        if not u or types[1] == "float16":
            yield *types, u, c


def record(name: str, is_begun: bool = False, say: Callable[[str], None] = print) -> str:
    """Record a pipeline: return its text."""
    kind, recorded = PIPELINES[name], list[tuple[dict[str, int], list[Event]]]()
    for dtype, vae_dtype, points, u, c in _choices(kind):
        try:
            recorded += _record_at(name, is_begun, points, dtype, vae_dtype, u, c)
        except RuntimeError as error:
            if dtype == vae_dtype:
                raise
            say(f"{name}: {dtype} with a VAE in {vae_dtype} fails: {str(error)[:80]}")
    head = f"# {sibling(name, is_begun) or kind.class_name}; {versions_of()}"
    find = functools.partial(_variables_of, {**kind.parts, **kind.optional})
    text = "\n".join([head, *write_text(recorded, find), ""])
    check(name, is_begun, PipelineText(text))
    cases = ", ".join(line for line in text.splitlines() if line.startswith("case"))
    say(f"{name}{' with an image' * is_begun}: {text.count(chr(10))} lines: {cases}")
    return text


def check(name: str, is_begun: bool = False, text: PipelineText | None = None, most: int | None = None) -> None:
    """Raise ValueError if a text, by default the one that ships, does something else than the pipeline at sizes that
    were not fitted. most: of them"""
    kind = PIPELINES[name]
    text = text or load_text(text_name(name, is_begun))
    for dtype, vae_dtype, _, u, c in _choices(kind):
        if dtype == vae_dtype:
            for at, events in _record_at(name, is_begun, CHECKS[:most], dtype, vae_dtype, u, c):
                check_text(text, at, events, functools.partial(_variables_of, {**kind.parts, **kind.optional}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of PIPELINES; all by default")
    OUT.mkdir(exist_ok=True)
    own = [name for name, kind in PIPELINES.items() if not (kind.text or kind.recording)]
    for name in parser.parse_args().names or own:
        for is_begun in (False, True)[: 1 + PIPELINES[name].begins]:
            (OUT / f"{text_name(name, is_begun)}.txt").write_text(record(name, is_begun), "utf-8")


if __name__ == "__main__":
    main()
