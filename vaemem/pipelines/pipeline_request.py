"""A request for a pipeline's prediction: its parts and its call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vaemem._common import DTYPES, ELEMENT_BYTES, MOST_BATCH, MOST_SIDE, choose, letters, meant, whole
from vaemem._errors import ArgumentError, Named, inside
from vaemem.pipelines.components import (
    CLIPS,
    MOST_LATENT_FRAMES,
    MOST_SEQUENCE,
    PIPELINES,
    VAE_STRIDE,
    Pipeline,
    count_seen,
    is_vae,
    scale_edited,
)
from vaemem.pipelines.lora import LORAS_SINCE, Lora, read_loras
from vaemem.pipelines.offload_kinds import GROUPS_SINCE, SLICED_TOO, TORCH_WAYS, GroupOffload, check_way
from vaemem.pipelines.pipeline_arguments import PipelineArguments
from vaemem.pipelines.pipeline_parts import Part, has_blocks, is_from_a_file, parts_of
from vaemem.pipelines.pipeline_text import video_variables
from vaemem.pipelines.quantising import (
    SCHEMES,
    UNSENT,
)
from vaemem.pipelines.storage import GGML, MIXTURES
from vaemem.prediction.phases import Phase
from vaemem.prediction.predict_vae import SMALL_TILE
from vaemem.prediction.recording_files import component_of
from vaemem.prediction.request import Card, Request, Software, usual_tile
from vaemem.prediction.runtimes import diffusers_release
from vaemem.prediction.seconds import Machine, peak, vae_work

MOST_TOKENS = 1 << 13  # of a prompt: diffusers' encoders take 77 or 512 at a time
SMALLER = ("Q8_0", "nf4")  # types of weights to try if large ones do not fit: GGUF's and bitsandbytes'


@dataclass(frozen=True)
class PipelineRequest(Request):
    """A run of diffusers, for `predict_pipeline`: the pipeline, its output and its parts; the offloaded parts
    (`offload`) and those on the CPU; and the VAE's settings, with vaemem's limit in bytes."""

    name: str
    height: int
    width: int
    batch: int
    tokens: int
    guidance: bool
    steps: int
    image: bool
    parts: tuple[Part, ...]
    offload: str = "none"
    on_cpu: tuple[str, ...] = ()
    vae: str = "whole"
    vae_limit: int = 0
    group: GroupOffload | None = None  # if it is the kind of offloading
    frames: int = 1  # of a video
    loras: tuple[Lora, ...] = ()
    first: tuple[int, int] | None = None  # the size of the image that the pipeline makes first, to begin with it
    made_of: str = ""  # the requested size, if the pipeline changes it
    model_note: str = ""  # names the model whose modules stand for this one's

    @property
    def pipeline(self) -> Pipeline:
        return PIPELINES[self.name]

    def part(self, role: str) -> Part:
        return next(part for part in self.parts if part.role == role)

    @property
    def size(self) -> str:
        """The image's size, or the video's."""
        return describe_size(self.height, self.width, self.frames if self.pipeline.frames else None)

    @property
    def after(self) -> str:
        """Words for the image that it makes first."""
        return f"after {describe_size(*self.first, None)}" if self.first else ""

    @property
    def guided(self) -> bool:
        """Whether the denoiser sees each image twice."""
        return self.guidance and self.pipeline.guides

    @property
    def latent_frames(self) -> int:
        """Frames of its latents; 1 for an image."""
        return self.variables["f"]

    @property
    def text(self) -> str:
        """The name of the pipeline's text."""
        return text_name(self.name, self.image)

    @property
    def variables(self) -> dict[str, int]:
        """What sizes in the pipeline's text follow from."""
        vae, roles = self.part("vae"), [part.role for part in self.parts]
        return variables_of(
            self.pipeline, self.height, self.width, self.frames, n=self.batch, t=self.tokens, s=self.steps,
            e=ELEMENT_BYTES[self.dtype], v=ELEMENT_BYTES[vae.dtype], g=int(self.guided), u=int(vae.upcast),
            c=int("safety_checker" in roles), i=int(self.image),
        )  # fmt: skip

    @property
    def dtype(self) -> str:
        """Type in which its denoiser computes."""
        return self.part(self.pipeline.denoiser).dtype

    @property
    def tile(self) -> int:
        """The side of the VAE's tiles in pixels; 0 if there are none."""
        how, _, side = self.vae.removesuffix(SLICED_TOO).partition(" ")
        return (int(side) if side else usual_tile(self.part("vae").component)) if how == "tiled" else 0

    @property
    def uncut(self) -> bool:
        """Whether the VAE's tiles cut none of its images."""
        return bool(self.tile) and all(max(one.height, one.width) <= self.tile for one in self.calls)

    @property
    def tilings(self) -> list[str]:
        """Possible tilings of the VAE: the config's tiles, or smaller ones if those do not cut the image."""
        longest = max(self.height, self.width) if is_vae(self.part("vae").component) else 0
        if longest > usual_tile(self.part("vae").component):
            return ["tiled"]
        return [f"tiled {SMALL_TILE}"] if longest > SMALL_TILE else []

    @property
    def encodes(self) -> bool:
        """Whether its VAE encodes an image too."""
        return self.image or self.pipeline.encodes

    @property
    def calls(self) -> tuple[PipelineRequest, ...]:
        """The pipeline's calls in turn: if it begins with an image of its own, the call that makes the image is one."""
        if self.first is None:
            return (self,)
        height, width = self.first
        return replace(self, height=height, width=width, image=False, first=None), self

    @property
    def resident(self) -> tuple[str, ...]:
        """Roles that offloading leaves on the device: parts outside the sequence, and parts kept there. Group
        offloading has no sequence."""
        stay = self.group.exclude_modules if self.group else self.pipeline.optional
        return tuple(part.role for part in self.parts if part.role in stay or part.place == "kept on cuda")

    @property
    def groups_vae(self) -> bool:
        """Whether block_level can offload its VAE: AutoencoderKL and AutoencoderKLWan name their blocks."""
        return has_blocks(self.part("vae").component)

    def work(self, phase: Phase, machine: Machine | None = None) -> dict[str, float]:
        """Return a phase's work after loading, for `vaemem.prediction.seconds.Machine`. If a short prompt is encoded in
        less time than it takes to read the encoders' weights, reading them is the work. A VAE converted to float32
        counts as the FLOPs that take the same time in the pipeline's type, because the rate is for that type.

        Examples
        --------
        >>> p = predict_pipeline("sd15", 512, 512, gpu="T4", offload="model")
        >>> [sorted(p.work(phase)) for phase in p.phases[-2:]]
        [['link', 'unet'], ['link', 'memory', 'vae']]
        """
        vae = self.part("vae")
        work = {self.pipeline.denoiser if phase.kind == "denoise" else "transformer": float(phase.flops)}
        if phase.kind in ("encode image", "decode"):
            is_slower = vae.upcast and self.vae != "vaemem"
            slower = peak(self.card.gpu, vae.dtype) / peak(self.card.gpu, "float32") if is_slower else 1
            work = vae_work(slower * phase.flops, slower * phase.attended, phase.moved)
        if machine and phase.flops and phase.kind == "encode prompt":
            read = {"memory": float(sum(part.nbytes for part in self.parts if part.role in self.pipeline.encoders))}
            work = max(work, read, key=lambda one: machine.seconds(one).likely)
        work |= {"link": float(phase.sent), "cpu": float(phase.host_flops)}
        if (
            self.group and phase.name != "load"
        ):  # its groups come from the disk, or go back to the host unless it has copies
            back = 1 if self.group.use_stream else 2
            work |= {"disk": work["link"]} if self.group.offload_to_disk_path else {"link": back * work["link"]}
        if self.group and self.group.use_stream and machine:  # weights come while the card computes: the longer counts
            moved: dict[str, float] = {name: work.pop(name) for name in ("link", "disk") if name in work}
            work = max(work, moved, key=lambda one: machine.seconds(one).likely)
        return {name: amount for name, amount in work.items() if amount}

    def run_with(self, offload: Any, vae: str, vae_memory_limit: int | str | None = None) -> PipelineRequest:
        """Return a copy with these arguments of `predict_pipeline`. ValueError names an impossible one."""
        group = GroupOffload.read(offload)
        offload, on_cpu, vae, limit = check_way(self.pipeline.parts, offload, vae, vae_memory_limit)
        if self.encodes and (vae == "vaemem" or "vae" in on_cpu):
            got = ("one on the CPU or ", Named("vae", "vaemem"))
            raise ArgumentError("image" if self.image else "vae", "PyTorch's VAE on the device", got)
        if vae != "whole" and not is_vae(self.part("vae").component):
            raise ArgumentError("vae", f"whole with {self.name}", repr(vae), "nobody recorded its VAE otherwise")
        if self.pipeline.frames and vae == "vaemem":
            raise ArgumentError("vae", f"{', '.join(TORCH_WAYS)} for a video", "'vaemem', which decodes one frame")
        check_card(self.parts, self.card)
        for part in self.parts:
            if offload == "sequential" and part.has(UNSENT):
                stored_in = next(type for type in UNSENT if part.has([type]))
                needed = f"none or model with components[{part.role!r}] in {stored_in}"
                raise ArgumentError("offload", needed, "'sequential'", "accelerate does not bring such weights back")
            layers = Counter(pair.module for pair in part.pairs)
            if part.pairs and (group or (offload == "sequential" and max(layers.values()) > 1)):
                wanted = "none, model, or sequential with one LoRA for each layer"
                raise ArgumentError("offload", wanted, repr(offload), "nobody compared how LoRAs are moved otherwise")
        if group:
            self._check_group(group, vae)
        held = self.part("vae").nbytes
        if vae == "vaemem" and limit <= held:
            needed = f"more than the VAE's weights, which count in it and are {held} bytes"
            raise ArgumentError("vae_memory_limit", needed, repr(vae_memory_limit))
        return replace(self, offload=offload, group=group, on_cpu=on_cpu, vae=vae, vae_limit=limit)

    def _check_group(self, group: GroupOffload, vae: str) -> None:
        """Refuse what diffusers' group offloading cannot do."""
        if self.software.release < GROUPS_SINCE:
            got = repr(self.software.diffusers_version)
            raise ArgumentError("diffusers_version", f"0.{GROUPS_SINCE} or None with {str(group)!r}", got)
        if vae == "vaemem" and "vae" not in group.exclude_modules:
            why = "the hooks move PyTorch's weights, and vaemem's decoder has its own"
            raise ArgumentError("offload", "the vae in exclude_modules with vaemem's decoder", repr(str(group)), why)
        for role in group.exclude_modules:
            choose("offload['exclude_modules']", role, [part.role for part in self.parts])
        for part in self.parts:
            if part.role in group.exclude_modules or part.place == "kept on cuda":
                continue
            if part.has(SCHEMES):
                why = "nobody checked how groups move quantised weights"
                wanted = f"{part.role} in exclude_modules, or in another type"
                raise ArgumentError("offload", wanted, repr(str(group)), why)
            if part.role == "vae" and group.num_blocks_per_group and not self.groups_vae:
                why = "its class names no blocks, and a decode does not call the module that would bring its weights"
                wanted = f"leaf_level, or the vae in exclude_modules with {self.name}"
                raise ArgumentError("offload", wanted, repr(str(group)), why)
            if part.upcast and group.use_stream:
                why = "diffusers converts it to float32, its weights come back in float16, and the decode fails"
                wanted = "no stream, the vae in exclude_modules, or components['vae'] in float16"
                raise ArgumentError("offload", wanted, repr(str(group)), why)
            part.sent_by(group)
            repeats = vae != "whole" or self.pipeline.frames or self.first
            if part.role == "vae" and group.use_stream and group.num_blocks_per_group and repeats:
                why = "from its second call on, the decoder prefetches its blocks, which is not predicted"
                wanted = "leaf_level, the vae in exclude_modules, or one image in one whole decode"
                raise ArgumentError("offload", wanted, repr(str(group)), why)


def text_name(pipeline: str, image: bool) -> str:
    """Return the name of a pipeline's text. image: whether it begins with one, unlike by itself"""
    if path := PIPELINES[pipeline].recording:
        return component_of(path, "text")
    name = PIPELINES[pipeline].text or pipeline
    return f"{name}-image" if image else name


def variables_of(pipeline: Pipeline, height: int, width: int, frames: int = 1, **more: int) -> dict[str, int]:
    """Return the variables of a pipeline's text for the size of an image or a video. more: the other variables"""
    sides = scale_edited(height, width) if pipeline.sees else (height, width)
    (h, w), (y, x) = ((a // pipeline.factor, b // pipeline.factor) for a, b in ((height, width), sides))
    padded = -(-more["t"] // MOST_SEQUENCE) * MOST_SEQUENCE
    patches = {"p": h // 2 * (w // 2), "q": y // 2 * (x // 2), "k": count_seen(*sides)}
    video = video_variables(frames, pipeline.frame_factor, pipeline.clip, pipeline.sound)
    return {"h": h, "w": w, "y": y, "x": x, "m": padded, **patches, **video, **more}


def smaller_roles(pipeline: Pipeline, kind: str) -> list[str]:
    """List the components with which a smaller type of weights is worthwhile: the denoisers, and text encoders other
    than CLIP. GGUF's types are for the denoisers, if their class can load such a file."""
    if letters(kind) in map(letters, (*GGML, *MIXTURES)):
        return pipeline.denoisers * is_from_a_file(pipeline.parts[pipeline.denoiser])
    return [*pipeline.denoisers, *(role for role in pipeline.encoders if pipeline.parts[role] not in CLIPS)]


def check_card(parts: Sequence[Part], card: Card) -> None:
    """Raise ValueError if a part's kernels need another GPU."""
    for part in parts:
        for type, scheme in SCHEMES.items():
            if card.gpu.sm < scheme.sm and part.has([type]):
                needed = f"a GPU of compute capability {scheme.sm / 10:.1f} or more with {type}"
                raise ArgumentError(f"components[{part.role!r}]", needed, f"{card.gpu.name} ({card.gpu.sm / 10:.1f})")


def image_sides(
    height: int, width: int, stride: int = VAE_STRIDE, what: str = "", most: int = MOST_SIDE
) -> tuple[int, int]:
    """Return an image's height and width, unchanged; ValueError if one is impossible; `what` ends its message."""
    sides = {"height": whole("height", height), "width": whole("width", width)}
    for name, value in sides.items():
        if value % stride or value > most:
            raise ArgumentError(name, f"a multiple of {stride} up to {most}{what}", str(value))
    return sides["height"], sides["width"]


def describe_size(height: int, width: int, frames: int | None) -> str:
    """Describe the size of an image, or of a video."""
    return f"{height}x{width}" + ("" if frames is None else f", {frames} frames")


def find_frames(given: PipelineArguments, pipeline: Pipeline) -> int:
    """Return the frames that a pipeline makes: 1 for an image."""
    if pipeline.frames:
        stride, (first, *_), (least, most) = pipeline.frame_factor, pipeline.clip, pipeline.frame_range
        most = most or stride * (MOST_LATENT_FRAMES - 1) + 1
        frames = pipeline.frames if given.frames is None else whole("frames", given.frames, least=least, most=most)
        if first > 1:  # code with clips rounds up to whole ones
            return -(-(frames - first) // stride) * stride + first
        rounds_up = pipeline.class_name.startswith("Wan")  # 80 frames to 81; others' code makes 77 of them
        return (frames if rounds_up else frames - 1) // stride * stride + 1
    if given.frames is not None:
        raise ArgumentError("frames", f"None with {given.pipeline}, which makes images", repr(given.frames))
    return 1


def _made(pipeline: str, height: int, width: int) -> tuple[int, int]:
    """Return the sides of the image that a pipeline makes for these."""
    known = PIPELINES[pipeline]
    if known.floors:
        sides = {"height": height, "width": width}.items()
        height, width = (whole(name, side, least=known.stride) // known.stride * known.stride for name, side in sides)
    return image_sides(height, width, known.stride, f" for {pipeline}", known.most_side)


def resolve_pipeline(given: PipelineArguments, card: Card, software: Software) -> PipelineRequest:
    """Resolve names and defaults, without offloading and with a whole VAE. ValueError names the argument that has no
    answer."""
    pipeline, known, guidance = given.pipeline, given.known, given.guides
    release = diffusers_release(software.diffusers_version, known.class_name)
    if release < known.since:
        needed = f"0.{known.since} or later for {pipeline}, which was not read in older releases"
        raise ArgumentError("diffusers_version", needed, repr(software.diffusers_version))
    if given.image and not known.begins:
        why = "takes an image in every call" if known.encodes else "is not known to begin with an image"
        raise ArgumentError("image", f"False with {pipeline}, which {why}", str(given.image))
    if not known.has_words:
        advice = "record the pipeline with the arguments of your call"
        if given.prompt_tokens is not None:
            raise ArgumentError("prompt_tokens", f"None with {pipeline}", str(given.prompt_tokens), advice)
        if given.guidance is False and not known.guides:
            raise ArgumentError("guidance", "None with a recording of one guidance", "False", advice)
    dtype = known.dtype if given.dtype is None else meant("dtype", given.dtype, DTYPES)
    height, width, frames = given.height, given.width, find_frames(given, known)
    said = describe_size(height, width, given.frames)
    height, width = _made(pipeline, height, width)
    with inside("image"):
        first = None if isinstance(given.image, bool) else _made(pipeline, *given.image)
    made_of = "" if said == describe_size(height, width, given.frames and frames) else said
    tokens = given.prompt_tokens
    tokens = known.tokens if tokens is None else whole("prompt_tokens", tokens, most=MOST_TOKENS)
    batch = whole("batch", given.batch, most=MOST_BATCH)
    most = known.most_images(guidance)
    if 0 < most < batch:
        why = f"at most {most} with {pipeline}: larger batches were not recorded"
        raise ArgumentError("batch", why, str(batch))
    loras = read_loras(pipeline, given.lora, known.loras)
    if loras and release < LORAS_SINCE:
        needed = f"0.{LORAS_SINCE} or later with a LoRA"
        raise ArgumentError("diffusers_version", needed, repr(software.diffusers_version))
    parts = parts_of(known, dtype, given.components or {}, release, loras)
    return PipelineRequest(
        card, software, pipeline, height, width, batch, tokens, guidance, given.step_count,
        bool(given.image), parts, safe=given.safe, loras=loras, frames=frames, first=first, made_of=made_of,
        model_note=given.model_note,
    )  # fmt: skip
