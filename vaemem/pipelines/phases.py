"""The phases of diffusers' pipelines: one function per class, written after its ``__call__``.

Read in diffusers 0.42, and those of SD 1.5, SDXL and FLUX.1 in 0.33 too. A function creates the original's tensors in
the original's order, and lets each go where the original does. Its local variables are attributes of `v`. A tensor that
is in no variable is a temporary value, which `drop` frees. What happens within a component is not here: `call`,
`encode` and `decode` play it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from vaemem.pipelines.components import CLIP_TOKENS, MOST_SEQUENCE
from vaemem.pipelines.pipeline_request import PLACES, Part, PipelineRequest
from vaemem.prediction.held import Tensor, Variables


class _PhaseRun(Protocol):
    """A pipeline's run, as the functions below see it. `PipelineRun` is one."""

    request: PipelineRequest
    parts: dict[str, Part]  # by role; a text encoder may be missing, and prompts then come encoded
    moved: list[str]  # roles of the components that offloading moves
    v: Variables

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(batch, channels, height, width) of the latents."""

    def phase(self, name: str, first: str | None = None) -> AbstractContextManager[None]:
        """Begin a phase once its `first` component is on the device; read the counters at its end."""

    def steps(self, count: int) -> Iterator[int]:
        """Loop over the denoiser's steps."""

    def load(self, role: str, quantises: bool = False) -> None:
        """Move a component to the device."""

    def unload(self, role: str) -> None:
        """Move a component to the CPU."""

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


# ---- one function per pipeline ----


def play_stable_diffusion(run: _PhaseRun) -> None:
    """Play StableDiffusionPipeline: SD 1.5 and SD 2.1."""
    q, v, (batch, *latent) = run.request, run.v, run.latent_shape
    _, h, w = latent
    calls = count_calls(q.tokens, CLIP_TOKENS)
    tokens, images = calls * CLIP_TOKENS, 2 * batch if q.guidance else batch

    load_components(run)

    with run.phase("encode prompt", "text_encoder"):
        embeds = (batch, tokens, q.pipeline.width)
        encoded = encode_text(run, "text_encoder", CLIP_TOKENS, calls)
        v.prompt_embeds = repeat(run, "prompt_embeds", embeds, encoded)
        if q.guidance:
            encoded = encode_text(run, "text_encoder", CLIP_TOKENS, calls)
            v.negative_prompt_embeds = repeat(run, "negative_prompt_embeds", embeds, encoded)
            v.prompt_embeds = run.tensor("prompt_embeds, both", (2, *embeds))

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", "unet"):
        prepare_latents(run)
        for _ in run.steps(q.steps):
            if q.guidance:
                v.latent_model_input = run.tensor("latent_model_input", (images, *latent))
            v.noise_pred = run.call("unet", n=images, h=h, w=w, t=tokens)
            if q.guidance:
                guide(run)
            step_scheduler(run)

    with run.phase("decode", "vae"):
        scaled = run.tensor("latents / scaling_factor", run.latent_shape, run.parts["vae"].dtype)
        v.image = run.decode(scaled)
        run.drop(scaled)
        if "safety_checker" in run.parts:
            check_safety(run)
        postprocess(run, "image")


def play_stable_diffusion_xl(run: _PhaseRun) -> None:
    """Play StableDiffusionXLPipeline: SDXL."""
    q, v, batch = run.request, run.v, run.request.batch
    calls = count_calls(q.tokens, CLIP_TOKENS)

    load_components(run)
    encode_sdxl_prompt(run, calls)

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", "unet"):
        prepare_latents(run)
        v.add_time_ids = run.tensor("add_time_ids", (2 * batch if q.guidance else batch, 6))
        denoise_by_unet(run, calls)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_sdxl_refiner(run: _PhaseRun) -> None:
    """Play StableDiffusionXLImg2ImgPipeline of SDXL's refiner: the second text encoder alone, and always an image."""
    q, v, batch = run.request, run.v, run.request.batch
    calls = count_calls(q.tokens, CLIP_TOKENS)

    load_components(run)
    encode_sdxl_prompt(run, calls, joins=False)

    with run.phase("encode image", "vae"):
        v.timesteps = run.tensor("timesteps", (q.steps,), "float32")
        v.latent_timestep = run.tensor("latent_timestep", (batch,), "float32")
        v.image = run.tensor("image", (1, 3, q.height, q.width))
        v.init_latents = run.encode(v.image)
        v.init_latents = run.tensor("init_latents", run.latent_shape)
        v.noise = run.tensor("noise", run.latent_shape)
        v.latents = run.tensor("latents", run.latent_shape)
        del v.image, v.init_latents, v.noise
        join_sdxl_prompts(run, calls)

    with run.phase("denoise", "unet"):
        v.add_time_ids = run.tensor("add_time_ids", (2 * batch if q.guidance else batch, 5))
        denoise_by_unet(run, calls)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_stable_diffusion_3(run: _PhaseRun) -> None:
    """Play StableDiffusion3Pipeline: SD 3 and SD 3.5. The embeddings of both CLIPs come before those of T5, which are
    zeros if it is missing."""
    q, v, (batch, *latent) = run.request, run.v, run.latent_shape
    _, h, w = latent
    tokens, images = CLIP_TOKENS + q.tokens, 2 * batch if q.guidance else batch

    load_components(run)

    with run.phase("encode prompt", next(role for role in q.pipeline.parts if role in run.parts)):
        embeds, pooled = (batch, tokens, q.pipeline.width), (batch, q.pipeline.pooled)
        returned: list[Tensor] = []  # variables of encode_prompt, which go when it returns

        def concat(name: str) -> Tensor:
            for role, channels in ("text_encoder", 768), ("text_encoder_2", 1280):
                encoded = encode_text(run, role, CLIP_TOKENS)
                returned.append(repeat(run, f"embeddings by {role}", (batch, CLIP_TOKENS, channels), encoded))
                returned.append(run.tensor(f"pooled embeddings by {role}", (batch, channels)))
            clip = run.tensor("clip_prompt_embeds", (batch, CLIP_TOKENS, 2048))
            encoded = encode_text(run, "text_encoder_3", q.tokens)
            returned.append(repeat(run, "t5_prompt_embed", (batch, q.tokens, q.pipeline.width), encoded))
            returned.append(run.tensor("clip_prompt_embeds, padded", (batch, CLIP_TOKENS, q.pipeline.width)))
            run.drop(clip)
            return run.tensor(name, embeds)

        v.prompt_embeds = concat("prompt_embeds")
        v.pooled_prompt_embeds = run.tensor("pooled_prompt_embeds", pooled)
        if q.guidance:
            v.negative_prompt_embeds = concat("negative_prompt_embeds")
            v.negative_pooled_prompt_embeds = run.tensor("negative_pooled_prompt_embeds", pooled)
        run.drop(*returned)
        if q.guidance:
            v.prompt_embeds = run.tensor("prompt_embeds, both", (2, *embeds))
            v.pooled_prompt_embeds = run.tensor("pooled_prompt_embeds, both", (2, *pooled))

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        for _ in run.steps(q.steps):
            if q.guidance:
                v.latent_model_input = run.tensor("latent_model_input", (images, *latent))
            v.noise_pred = run.call("transformer", n=images, h=h, w=w, t=tokens)
            if q.guidance:
                guide(run)
            step_scheduler(run)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_pixart_sigma(run: _PhaseRun) -> None:
    """Play PixArtSigmaPipeline. Its transformer predicts a variance too, in as many channels as the noise."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape
    images = 2 * batch if q.guidance else batch

    load_components(run)

    with run.phase("encode prompt", "text_encoder"):
        embeds, mask = (batch, q.tokens, q.pipeline.width), (batch, q.tokens)
        for kind in ("", "negative_") if q.guidance else ("",):
            encoded = encode_text(run, "text_encoder", q.tokens, inputs=("text_input_ids", "attention_mask"))
            setattr(v, f"{kind}prompt_embeds", repeat(run, f"{kind}prompt_embeds", embeds, encoded))
            setattr(v, f"{kind}prompt_attention_mask", run.tensor(f"{kind}prompt_attention_mask", mask, "int64"))
        if q.guidance:
            v.prompt_embeds = run.tensor("prompt_embeds, both", (2, *embeds))
            v.prompt_attention_mask = run.tensor("prompt_attention_mask, both", (2, *mask), "int64")

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        for _ in run.steps(q.steps):
            if q.guidance:
                v.latent_model_input = run.tensor("latent_model_input", (images, channels, h, w))
            v.noise_pred = run.call("transformer", n=images, h=h, w=w, t=q.tokens)
            if q.guidance:
                guide(run, (batch, 2 * channels, h, w))
            step_scheduler(run)

    with run.phase("decode", "vae"):
        scaled = run.tensor("latents / scaling_factor", run.latent_shape, run.parts["vae"].dtype)
        v.image = run.decode(scaled)
        run.drop(scaled)
        postprocess(run, "image")


def play_flux(run: _PhaseRun) -> None:
    """Play FluxPipeline: FLUX.1-dev, and FLUX.1-schnell without a guidance input."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape

    load_components(run)
    encode_flux_prompt(run)

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        prepare_flux(run, h // 2 * (w // 2))
        for _ in run.steps(q.steps):
            divided = run.tensor("timestep / 1000", (batch,))
            v.noise_pred = run.call("transformer", n=batch, h=h, w=w, t=q.tokens)
            run.drop(divided)
            step_scheduler(run)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_flux_kontext(run: _PhaseRun) -> None:
    """Play FluxKontextPipeline with an image of the picture's size. Its tokens follow the picture's."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape

    load_components(run)
    encode_flux_prompt(run)

    with run.phase("encode image", "vae"):
        v.text_ids = run.tensor("text_ids", (q.tokens, 3))
        v.image = run.tensor("image", (1, 3, q.height, q.width))
        v.image_latents = run.encode(v.image)
        v.image_latents = run.tensor("image_latents", run.latent_shape)
        v.image_latents = run.tensor("image_latents, packed", run.latent_shape)
        del v.image

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        v.image_ids = run.tensor("image_ids", (h // 2 * (w // 2), 3))
        prepare_flux(run, h * (w // 2))
        for _ in run.steps(q.steps):
            v.latent_model_input = run.tensor("latent_model_input", (batch, channels, 2 * h, w))
            divided = run.tensor("timestep / 1000", (batch,))
            v.noise_pred = run.call("transformer", n=batch, h=2 * h, w=w, t=q.tokens)
            run.drop(divided)
            step_scheduler(run)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_flux_fill(run: _PhaseRun) -> None:
    """Play FluxFillPipeline. Each token has the picture's 64 numbers, the masked image's 64 and the mask's 256."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape

    load_components(run)
    encode_flux_prompt(run)

    with run.phase("encode image", "vae"):
        v.text_ids = run.tensor("text_ids", (q.tokens, 3))
        v.timesteps = run.tensor("timesteps", (q.steps,), "float32")
        v.latent_timestep = run.tensor("latent_timestep", (batch,), "float32")
        v.image = run.tensor("image", (1, 3, q.height, q.width))
        v.image_latents = run.encode(v.image)
        v.noise = run.tensor("noise", run.latent_shape)
        v.latents = run.tensor("latents", run.latent_shape)
        v.latent_image_ids = run.tensor("latent_image_ids", (h // 2 * (w // 2), 3))
        del v.image, v.image_latents, v.noise
        v.masked_image = run.tensor("masked_image", (1, 3, q.height, q.width))
        v.masked_image_latents = run.encode(v.masked_image)
        v.masked_image_latents = run.tensor("masked_image_latents, packed", run.latent_shape)
        v.mask = run.tensor("mask", (batch, 4 * channels, h, w))
        v.masked_image_latents = run.tensor("masked_image_latents, mask", (batch, 5 * channels, h, w))

    with run.phase("denoise", "transformer"):
        prepare_flux(run, h // 2 * (w // 2))
        for _ in run.steps(q.steps):
            given = run.tensor("latents, masked_image_latents", (batch, 6 * channels, h, w))
            divided = run.tensor("timestep / 1000", (batch,))
            v.noise_pred = run.call("transformer", n=batch, h=h, w=w, t=q.tokens)
            run.drop(given, divided)
            step_scheduler(run)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_z_image(run: _PhaseRun) -> None:
    """Play ZImagePipeline: it keeps latents in float32. Its transformer sees the prompt without the padding."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape

    load_components(run)

    with run.phase("encode prompt", "text_encoder"):
        encoded = encode_text(run, "text_encoder", MOST_SEQUENCE, count_calls(q.tokens, MOST_SEQUENCE))
        v.prompt_embeds = repeat(run, "prompt_embeds", (batch, q.tokens, q.pipeline.width), encoded)

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", "transformer"):
        prepare_latents(run, "float32")
        v.timestep = run.tensor("timestep", (batch,), "float32")
        for _ in run.steps(q.steps):
            v.latent_model_input = run.tensor("latent_model_input", run.latent_shape)
            v.noise_pred = v.model_out_list = run.call("transformer", n=batch, h=h, w=w, t=q.tokens)
            stacked = run.tensor("noise_pred", run.latent_shape, "float32")
            v.noise_pred = run.tensor("- noise_pred", run.latent_shape, "float32")
            run.drop(stacked)
            step_scheduler(run, "float32")

    with run.phase("decode", "vae"):
        decode_image(run)


def play_flux2(run: _PhaseRun) -> None:
    """Play Flux2Pipeline: FLUX.2-dev; and Flux2KleinPipeline without a guidance input."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape
    calls = count_calls(q.tokens, MOST_SEQUENCE)
    tokens = calls * MOST_SEQUENCE

    load_components(run)

    with run.phase("encode prompt", "text_encoder"):
        encoded = encode_text(run, "text_encoder", MOST_SEQUENCE, calls, inputs=("input_ids", "attention_mask"))
        v.prompt_embeds = repeat(run, "prompt_embeds", (batch, tokens, q.pipeline.width), encoded)

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        v.text_ids = run.tensor("text_ids", (batch, tokens, 4), "int64")
        v.latent_ids = run.tensor("latent_ids", (batch, h // 2 * (w // 2), 4), "int64")
        v.timestep = run.tensor("timestep", (batch,))
        if q.pipeline.guidance_embeds:
            v.guidance = run.tensor("guidance", (1,), "float32")
        for _ in run.steps(q.steps):
            v.latent_model_input = v.latents  # it holds them until the next step, or the end
            divided = run.tensor("timestep / 1000", (batch,))
            v.noise_pred = run.call("transformer", n=batch, h=h, w=w, t=tokens)
            run.drop(divided)
            step_scheduler(run)

    with run.phase("decode", "vae"):
        v.latents_bn_std = run.tensor("latents_bn_std", (128,))
        decode_image(run)


PHASES: Mapping[str, Callable[[_PhaseRun], None]] = {
    "StableDiffusionPipeline": play_stable_diffusion,
    "StableDiffusionXLPipeline": play_stable_diffusion_xl,
    "StableDiffusionXLImg2ImgPipeline": play_sdxl_refiner,
    "StableDiffusion3Pipeline": play_stable_diffusion_3,
    "PixArtSigmaPipeline": play_pixart_sigma,
    "FluxPipeline": play_flux,
    "FluxKontextPipeline": play_flux_kontext,
    "FluxFillPipeline": play_flux_fill,
    "ZImagePipeline": play_z_image,
    "Flux2Pipeline": play_flux2,
    "Flux2KleinPipeline": play_flux2,
}


# ---- common to several ----


def load_components(run: _PhaseRun) -> None:
    """Play ``from_pretrained``, then ``to("cuda")`` or an offload. If everything starts on the CPU and is offloaded,
    there is no such phase: components move to the device when they are called."""
    early = [role for role, part in run.parts.items() if part.place != PLACES[0]]  # by from_pretrained
    stay = [role for role in run.parts if role not in run.moved]
    if early or stay:
        with run.phase("load"):
            for role in early:
                run.load(role, quantises=bool(run.parts[role].source))
            for role in early:
                if role not in stay:
                    run.unload(role)
            for role in stay:
                if role not in early:
                    run.load(role)


def first_encoder(run: _PhaseRun) -> str:
    return "text_encoder" if "text_encoder" in run.parts else "text_encoder_2"


def count_calls(tokens: int, most: int) -> int:
    """Count a text encoder's calls for a prompt. Each call takes `most` tokens, the last one with padding."""
    return -(-tokens // most)


def encode_text(
    run: _PhaseRun, role: str, tokens: int, calls: int = 1, inputs: Sequence[str] = ("text_input_ids",)
) -> list[Tensor]:
    """Return the text encoder's outputs for one prompt, one per call; none if the encoder is missing."""
    outputs = []
    for _ in range(calls if role in run.parts else 0):
        given = [run.tensor(name, (1, tokens), "int64") for name in inputs]
        outputs.append(run.call(role, n=1, t=tokens))
        run.drop(*given)
    return outputs


def repeat(run: _PhaseRun, name: str, shape: Sequence[int], encoded: Sequence[Tensor]) -> Tensor:
    """Play ``prompt_embeds.repeat(...)`` for each image of the batch; free the encoder's outputs."""
    repeated = run.tensor(name, shape)
    run.drop(*encoded)
    return repeated


def encode_sdxl_prompt(run: _PhaseRun, calls: int, joins: bool = True) -> None:
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
        if joins:
            join_sdxl_prompts(run, calls)


def join_sdxl_prompts(run: _PhaseRun, calls: int) -> None:
    """Join the embeddings of the negative prompt and of the prompt, if there is guidance."""
    q, v, batch = run.request, run.v, run.request.batch
    if q.guidance:
        v.prompt_embeds = run.tensor("prompt_embeds, both", (2, batch, calls * CLIP_TOKENS, q.pipeline.width))
        v.add_text_embeds = run.tensor("add_text_embeds", (2, batch, q.pipeline.pooled))


def denoise_by_unet(run: _PhaseRun, calls: int) -> None:
    """Play the loop of SDXL's pipelines."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape
    images = 2 * batch if q.guidance else batch
    for _ in run.steps(q.steps):
        if q.guidance:
            v.latent_model_input = run.tensor("latent_model_input", (images, channels, h, w))
        v.noise_pred = run.call("unet", n=images, h=h, w=w, t=calls * CLIP_TOKENS)
        if q.guidance:
            guide(run)
        step_scheduler(run)


def encode_flux_prompt(run: _PhaseRun) -> None:
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


def prepare_flux(run: _PhaseRun, patches: int) -> None:
    """Make the inputs of FLUX.1's transformer besides latents and prompts. patches: of all images together."""
    q, v = run.request, run.v
    v.text_ids = run.tensor("text_ids", (q.tokens, 3))
    v.latent_image_ids = run.tensor("latent_image_ids", (patches, 3))
    v.timestep = run.tensor("timestep", (q.batch,))
    if q.pipeline.guidance_embeds:
        v.guidance = run.tensor("guidance", (1,), "float32")


def encode_image(run: _PhaseRun) -> None:
    """Begin image-to-image: make the image's latents, and noise to add to them."""
    q, v, dtype = run.request, run.v, run.parts["vae"].dtype
    v.init_image = run.tensor("init_image", (q.batch, 3, q.height, q.width), dtype)
    v.init_latents = run.encode(v.init_image)
    v.noise = run.tensor("noise", run.latent_shape, dtype)


def prepare_latents(run: _PhaseRun, dtype: str | None = None) -> None:
    """Make ``timesteps`` and ``latents``."""
    run.v.timesteps = run.tensor("timesteps", (run.request.steps,), "float32")
    run.v.latents = run.tensor("latents", run.latent_shape, dtype)


def guide(run: _PhaseRun, shape: Sequence[int] = ()) -> None:
    """``noise_pred_uncond + guidance_scale * (noise_pred_text - noise_pred_uncond)``. shape: or the latents'."""
    v, latent = run.v, shape or run.latent_shape
    v.noise_pred_uncond = v.noise_pred_text = v.noise_pred  # ``noise_pred.chunk(2)``: two views of it
    difference = run.tensor("noise_pred_text - noise_pred_uncond", latent)
    scaled = run.tensor("guidance_scale * ...", latent)
    run.drop(difference)
    v.noise_pred = run.tensor("noise_pred", latent)
    run.drop(scaled)


def step_scheduler(run: _PhaseRun, dtype: str | None = None) -> None:
    """``latents = scheduler.step(noise_pred, t, latents)``, which needs two temporary tensors in float32."""
    temporary = [run.tensor("scheduler.step", run.latent_shape, "float32") for _ in range(2)]
    run.v.latents = run.tensor("latents", run.latent_shape, dtype)
    run.drop(*temporary)


def decode_image(run: _PhaseRun) -> None:
    """``upcast_vae``, ``latents = latents / scaling_factor``, ``image = vae.decode(latents)``, the postprocessing."""
    v, dtype = run.v, run.upcast()
    if dtype != run.parts["vae"].dtype:
        v.latents = run.tensor(f"latents in {dtype}", run.latent_shape, dtype)
    v.latents = run.tensor("latents / scaling_factor", run.latent_shape, dtype)
    v.image = run.decode(v.latents)
    postprocess(run, "image")


def postprocess(run: _PhaseRun, variable: str) -> None:
    """Play ``image_processor.postprocess``: it scales the variable's image from -1..1 to 0..1."""
    q, vae = run.request, run.parts["vae"]
    for name in () if "vae" in q.on_cpu else ("image * 0.5", "image * 0.5 + 0.5", "image, clamped"):
        dtype = "float32" if vae.upcast else vae.dtype
        setattr(run.v, variable, run.tensor(name, (q.batch, 3, q.height, q.width), dtype))


def check_safety(run: _PhaseRun) -> None:
    """Play ``run_safety_checker``: the checker sees the picture at 224x224."""
    q, v, vae = run.request, run.v, run.parts["vae"]
    v.picture = v.image
    postprocess(run, "picture")
    del v.picture
    v.clip_input = run.tensor("clip_input", (q.batch, 3, 224, 224), "float32" if vae.upcast else vae.dtype)
    v.checked = run.call("safety_checker", n=q.batch)
