"""Steps that phases of several pipelines share, and a pipeline's run as they see it (vaemem/pipelines/phases.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from vaemem.pipelines.components import CLIP_TOKENS, MOST_SEQUENCE
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.prediction.held import Tensor, Variables

PLAYED_STEPS = 2  # of the denoiser; the cache and the sizes are the same from the second one on
# Tokens of the templates before the part that is kept; the most after it without an image.
QWEN_TEMPLATE, QWEN_EDIT_TEMPLATE, QWEN_TOKENS = 34, 64, 1024
QWEN_PATCH = 2 * 3 * 14 * 14  # numbers of a patch of an image, twice in time
QWEN_PLACES, QWEN_ANGLES = 4096, 128  # of the transformer's tables of positions; 64 complex numbers a place


class PhaseRun(Protocol):
    """A pipeline's run, as the functions below see it. `PipelineRun` is one."""

    request: PipelineRequest
    parts: dict[str, Part]  # by role; a text encoder may be missing, and prompts then come encoded
    v: Variables

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(batch, channels, height, width) of the latents; a video's frames come before the height."""

    def phase(self, name: str, first: str | None = None) -> AbstractContextManager[None]:
        """Begin a phase once its `first` component is on the device; read the counters at its end."""

    def steps(self, count: int) -> Iterator[int]:
        """Loop over the denoiser's steps."""

    def call(self, role: str, **sizes: int) -> Tensor:
        """Call a component other than the VAE; return its output."""

    def encode(self, image: Tensor) -> Tensor:
        """Return an image's latents by the VAE, sampled and scaled."""

    def upcast(self) -> str:
        """Convert the VAE for a decode, if the pipeline does so. Return the type of the latents that it takes."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return the VAE's image."""

    def tensor(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        """Create a tensor, in the denoiser's dtype by default."""

    def drop(self, *tensors: Tensor) -> None:
        """Free temporary values."""


def first_encoder(run: PhaseRun) -> str:
    return "text_encoder" if "text_encoder" in run.parts else "text_encoder_2"


def count_calls(tokens: int, most: int) -> int:
    """Count a text encoder's calls for a prompt. Each call takes `most` tokens, the last one with padding."""
    return -(-tokens // most)


def encode_text(
    run: PhaseRun, role: str, tokens: int, calls: int = 1, inputs: Sequence[str] = ("text_input_ids",)
) -> list[Tensor]:
    """Return the text encoder's outputs for one prompt, one per call; none if the encoder is missing."""
    outputs = []
    for _ in range(calls if role in run.parts else 0):
        given = [run.tensor(name, (1, tokens), "int64") for name in inputs]
        outputs.append(run.call(role, n=1, t=tokens))
        run.drop(*given)
    return outputs


def repeat(run: PhaseRun, name: str, shape: Sequence[int], encoded: Sequence[Tensor]) -> Tensor:
    """Play ``prompt_embeds.repeat(...)`` for each image of the batch; free the encoder's outputs."""
    repeated = run.tensor(name, shape)
    run.drop(*encoded)
    return repeated


def prepare_condition(run: PhaseRun) -> None:
    """Play ``prepare_image``: the ControlNet's picture for each image, twice with guidance."""
    if "controlnet" in run.parts:
        q, v, shape = run.request, run.v, (3, run.request.height, run.request.width)
        dtype = run.parts["controlnet"].dtype
        v.image = run.tensor("condition", (q.batch, *shape), dtype)
        if q.guidance:
            v.image = run.tensor("condition, twice", (2 * q.batch, *shape), dtype)


def first_denoiser(run: PhaseRun) -> str:
    return "controlnet" if "controlnet" in run.parts else "unet"


def call_unet(run: PhaseRun, tokens: int) -> None:
    """Call the UNet, after its ControlNet, if it has one. Residuals stay until those of the next step are there."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape
    images = 2 * batch if q.guidance else batch
    if q.guidance:
        v.latent_model_input = run.tensor("latent_model_input", (images, channels, h, w))
    if "controlnet" in run.parts:
        v.residuals = run.call("controlnet", n=images, h=h, w=w, t=tokens)
    v.noise_pred = run.call("unet", n=images, h=h, w=w, t=tokens)


def encode_sdxl_prompt(run: PhaseRun, calls: int, joins: bool = True) -> None:
    """Play the phase ``encode prompt`` of SDXL's pipelines, with one text encoder or two. joins: `join_sdxl_prompts`,
    which image-to-image does later."""
    q, v, batch, tokens = run.request, run.v, run.request.batch, calls * CLIP_TOKENS
    with run.phase("encode prompt", first_encoder(run)):
        embeds, pooled = (batch, tokens, q.pipeline.width), (batch, q.pipeline.pooled)
        prompt_embeds_list: list[Tensor] = []  # pooled outputs are views of it until they are repeated

        def concat(name: str) -> Tensor:
            one = encode_text(run, "text_encoder", CLIP_TOKENS, calls)
            two = encode_text(run, "text_encoder_2", CLIP_TOKENS, calls)
            if one and two:
                prompt_embeds_list.extend([*one, *two])
                return run.tensor(name, embeds)
            return repeat(run, name, embeds, one or two)

        v.prompt_embeds = concat("prompt_embeds")
        if q.guidance:
            v.negative_prompt_embeds = concat("negative_prompt_embeds")
        v.pooled_prompt_embeds = run.tensor("pooled_prompt_embeds", pooled)
        if q.guidance:
            v.negative_pooled_prompt_embeds = run.tensor("negative_pooled_prompt_embeds", pooled)
        run.drop(*prompt_embeds_list)
        prepare_condition(run)
        if joins:
            join_sdxl_prompts(run, calls)


def join_sdxl_prompts(run: PhaseRun, calls: int) -> None:
    """Join the embeddings of the negative prompt and of the prompt, if there is guidance."""
    q, v, batch = run.request, run.v, run.request.batch
    if q.guidance:
        v.prompt_embeds = run.tensor("prompt_embeds, both", (2, batch, calls * CLIP_TOKENS, q.pipeline.width))
        v.add_text_embeds = run.tensor("add_text_embeds", (2, batch, q.pipeline.pooled))


def denoise_by_unet(run: PhaseRun, calls: int) -> None:
    """Play the loop of SDXL's pipelines."""
    q = run.request
    for _ in run.steps(q.steps):
        call_unet(run, calls * CLIP_TOKENS)
        if q.guidance:
            guide(run)
        step_scheduler(run)


def encode_flux_prompt(run: PhaseRun) -> None:
    """Play the phase ``encode prompt`` of FLUX.1's pipelines."""
    q, v, batch = run.request, run.v, run.request.batch
    with run.phase("encode prompt", first_encoder(run)):
        pooled = (batch, q.pipeline.pooled)
        if "text_encoder" in run.parts:
            encoded = encode_text(run, "text_encoder", CLIP_TOKENS)
            v.pooled_prompt_embeds = repeat(run, "pooled_prompt_embeds", pooled, encoded)
        encoded = encode_text(run, "text_encoder_2", q.tokens)
        v.prompt_embeds = repeat(run, "prompt_embeds", (batch, q.tokens, q.pipeline.width), encoded)
        if "text_encoder" not in run.parts:
            v.pooled_prompt_embeds = run.tensor("pooled_prompt_embeds", pooled)
        v.text_ids = run.tensor("text_ids", (q.tokens, 3))


def encode_qwen_prompt(run: PhaseRun, kind: str, seen: int = 0) -> None:
    """Encode a prompt in the template of Qwen-Image's pipelines; keep the tokens after the instruction. seen: an
    image's tokens, for whose encoder nothing is played; with an image nothing is cut"""
    q, v, width = run.request, run.v, run.request.pipeline.width
    tokens = seen + q.tokens + q.pipeline.joined
    kept = tokens if seen else min(tokens, MOST_SEQUENCE)
    tokens = tokens if seen else min(tokens, QWEN_TOKENS)
    whole = tokens + (QWEN_EDIT_TEMPLATE if seen else QWEN_TEMPLATE)
    if "text_encoder" in run.parts:
        returned = [run.tensor(name, (1, whole), "int64") for name in ("input_ids", "attention_mask")]
        if seen:
            returned.append(run.tensor("pixel_values", (4 * seen, QWEN_PATCH), "float32"))
        returned.append(run.call("text_encoder", n=1, t=whole))  # the outputs of all layers, keys, values and logits
        returned.append(run.tensor("selected", (whole, width)))
        joined = run.tensor("split_hidden_states", (tokens, width))
        embeds = run.tensor("prompt_embeds", (1, tokens, width))
        run.drop(joined, *returned)
        setattr(v, f"{kind}prompt_embeds", embeds)
    setattr(v, f"{kind}prompt_embeds", run.tensor(f"{kind}prompt_embeds", (q.batch, kept, width)))


def denoise_qwen(run: PhaseRun, *images: tuple[int, int]) -> None:
    """Play the loop of Qwen-Image's pipelines. images: sides of the latents that the transformer gets, the picture's
    first"""
    q, v, (batch, channels, *_) = run.request, run.v, run.latent_shape
    patches = [h // 2 * (w // 2) for h, w in images]
    prepare_qwen_tables(run, *patches)
    for _ in run.steps(q.steps):
        if len(images) > 1:
            v.latent_model_input = run.tensor("latent_model_input", (batch, sum(patches), 4 * channels))
        v.timestep = run.tensor("timestep", (batch,))
        for kind in ("", "negative_") if q.guidance else ("",):
            divided = run.tensor("timestep / 1000", (batch,))
            tokens = getattr(v, f"{kind}prompt_embeds").shape[1]
            # The recording depends on the number of patches alone.
            noise = run.call("transformer", n=batch, h=2 * sum(patches), w=2, t=tokens)
            setattr(v, "neg_noise_pred" if kind else "noise_pred", noise)
            run.drop(divided)
        if q.guidance:
            guide_by_norm(run)
        step_scheduler(run)


def prepare_qwen_tables(run: PhaseRun, *patches: int) -> None:
    """Make the tables of positions that the transformer's first call makes and keeps: of all places, and of each
    image's patches."""
    for number, rows in enumerate([QWEN_PLACES, QWEN_PLACES, *patches]):
        setattr(run.v, f"table_{number}", run.tensor("table of positions", (rows, QWEN_ANGLES), "float32"))


def prepare_flux(run: PhaseRun, patches: int) -> None:
    """Make the inputs of FLUX.1's transformer besides latents and prompts. patches: of all images together."""
    q, v = run.request, run.v
    if "latent_image_ids" not in v:
        v.latent_image_ids = run.tensor("latent_image_ids", (patches, 3))
    v.timestep = run.tensor("timestep", (q.batch,))
    if q.pipeline.guidance_embeds:
        v.guidance = run.tensor("guidance", (1,), "float32")


def encode_image(run: PhaseRun) -> None:
    """Play ``prepare_latents`` of image-to-image: noise is added to the latents of one image, or of all images that the
    call before made."""
    q, v, dtype = run.request, run.v, run.parts["vae"].dtype
    v.timesteps = run.tensor("timesteps", (q.steps,), "float32")
    v.latent_timestep = run.tensor("latent_timestep", (q.batch,), "float32")
    v.image = run.tensor("image", (q.batch if q.first else 1, 3, q.height, q.width), dtype)
    v.init_latents = run.encode(v.image)
    v.init_latents = run.tensor("init_latents", run.latent_shape)
    v.noise = run.tensor("noise", run.latent_shape)
    v.latents = run.tensor("latents", run.latent_shape)
    del v.image, v.init_latents, v.noise


def prepare_latents(run: PhaseRun, dtype: str | None = None) -> None:
    """Make ``timesteps`` and ``latents``, if no image began them."""
    if "latents" not in run.v:
        run.v.timesteps = run.tensor("timesteps", (run.request.steps,), "float32")
        run.v.latents = run.tensor("latents", run.latent_shape, dtype)


def guide(run: PhaseRun, shape: Sequence[int] = ()) -> None:
    """``noise_pred_uncond + guidance_scale * (noise_pred_text - noise_pred_uncond)``. shape: or the latents'."""
    v, latent = run.v, shape or run.latent_shape
    v.noise_pred_uncond = v.noise_pred_text = v.noise_pred  # ``noise_pred.chunk(2)``: two views of it
    difference = run.tensor("noise_pred_text - noise_pred_uncond", latent)
    scaled = run.tensor("guidance_scale * ...", latent)
    run.drop(difference)
    v.noise_pred = run.tensor("noise_pred", latent)
    run.drop(scaled)


def guide_apart(run: PhaseRun, variable: str) -> None:
    """``neg_noise_pred + guidance_scale * (noise_pred - neg_noise_pred)``, of two calls of the denoiser."""
    difference = run.tensor("noise_pred - neg_noise_pred", run.latent_shape)
    scaled = run.tensor("guidance_scale * ...", run.latent_shape)
    run.drop(difference)
    setattr(run.v, variable, run.tensor(variable, run.latent_shape))
    run.drop(scaled)


def guide_each(run: PhaseRun) -> list[str]:
    """``pos + guidance_scale * (pos - neg)`` in float32, image by image. Return the results' variables."""
    v, (batch, *latent) = run.v, run.latent_shape
    names = [f"pred_{number}" for number in range(batch)]
    for name in names:
        v.pos, v.neg = (run.tensor(name, latent, "float32") for name in ("pos", "neg"))
        difference = run.tensor("pos - neg", latent, "float32")
        scaled = run.tensor("guidance_scale * ...", latent, "float32")
        run.drop(difference)
        setattr(v, name, run.tensor("pred", latent, "float32"))
        run.drop(scaled)
    return names


def guide_by_norm(run: PhaseRun) -> None:
    """``comb_pred * (cond_norm / noise_norm)``."""
    v, latent = run.v, run.latent_shape
    norms = (latent[0], latent[2] // 2 * (latent[3] // 2), 1)
    guide_apart(run, "comb_pred")
    v.cond_norm = run.tensor("cond_norm", norms)
    v.noise_norm = run.tensor("noise_norm", norms)
    ratio = run.tensor("cond_norm / noise_norm", norms)
    v.noise_pred = run.tensor("noise_pred", latent)
    run.drop(ratio)


def step_scheduler(run: PhaseRun, dtype: str | None = None) -> None:
    """``latents = scheduler.step(noise_pred, t, latents)``, which needs two temporary tensors in float32."""
    temporary = [run.tensor("scheduler.step", run.latent_shape, "float32") for _ in range(2)]
    run.v.latents = run.tensor("latents", run.latent_shape, dtype)
    run.drop(*temporary)


def step_unipc(run: PhaseRun, step: int) -> None:
    """UniPCMultistepScheduler's step: it keeps its last two outputs and the last sample. From the third call on, the
    denoiser finds all of them."""
    v, latent = run.v, run.latent_shape
    v.model_outputs_0 = run.tensor("scheduler.model_outputs", latent, "float32")
    if step or run.request.steps > PLAYED_STEPS:
        v.model_outputs_1 = run.tensor("scheduler.model_outputs", latent, "float32")
    temporary = [run.tensor("scheduler.step", latent, "float32") for _ in range(2)]
    v.last_sample = run.tensor("scheduler.last_sample", latent, "float32") if step else v.latents
    v.latents = run.tensor("latents", latent, "float32")
    run.drop(*temporary)


def decode_video(run: PhaseRun) -> None:
    """``latents / latents_std + latents_mean``, the decode, and ``video_processor.postprocess_video``."""
    q, v, dtype, channels = run.request, run.v, run.parts["vae"].dtype, run.latent_shape[1]
    if dtype != "float32":
        v.latents = run.tensor(f"latents in {dtype}", run.latent_shape, dtype)
    v.latents_mean = run.tensor("latents_mean", (channels,), dtype)
    v.latents_std = run.tensor("latents_std", (channels,), dtype)
    divided = run.tensor("latents / latents_std", run.latent_shape, dtype)
    v.latents = run.tensor("latents", run.latent_shape, dtype)
    run.drop(divided)
    v.video = run.decode(v.latents)
    for name in () if "vae" in q.on_cpu else ("frames * 0.5", "frames * 0.5 + 0.5", "frames, clamped"):
        v.frames = run.tensor(name, (q.frames, 3, q.height, q.width), dtype)  # one video after the other


def decode_image(run: PhaseRun) -> None:
    """``upcast_vae``, ``latents = latents / scaling_factor``, ``image = vae.decode(latents)``, the postprocessing."""
    v, dtype = run.v, run.upcast()
    if dtype != run.parts["vae"].dtype:
        v.latents = run.tensor(f"latents in {dtype}", run.latent_shape, dtype)
    v.latents = run.tensor("latents / scaling_factor", run.latent_shape, dtype)
    v.image = run.decode(v.latents)
    postprocess(run, "image")


def decode_qwen_image(run: PhaseRun) -> None:
    """``latents / latents_std + latents_mean``, and the decode."""
    v, channels = run.v, run.latent_shape[1]
    v.latents = run.tensor("latents, unpacked", run.latent_shape)
    v.latents_mean = run.tensor("latents_mean", (channels,))
    v.latents_std = run.tensor("latents_std", (channels,))
    decode_image(run)


def postprocess(run: PhaseRun, variable: str) -> None:
    """Play ``image_processor.postprocess``: it scales the variable's image from -1..1 to 0..1."""
    q, vae = run.request, run.parts["vae"]
    for name in () if "vae" in q.on_cpu else ("image * 0.5", "image * 0.5 + 0.5", "image, clamped"):
        dtype = "float32" if vae.upcast else vae.dtype
        setattr(run.v, variable, run.tensor(name, (q.batch, 3, q.height, q.width), dtype))


def check_safety(run: PhaseRun) -> None:
    """Play ``run_safety_checker``: the checker sees the picture at 224x224."""
    q, v, vae = run.request, run.v, run.parts["vae"]
    v.picture = v.image
    postprocess(run, "picture")
    del v.picture
    v.clip_input = run.tensor("clip_input", (q.batch, 3, 224, 224), "float32" if vae.upcast else vae.dtype)
    v.checked = run.call("safety_checker", n=q.batch)
