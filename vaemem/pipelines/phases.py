"""The phases of diffusers' pipelines: one function per class, written after its ``__call__``.

Read in diffusers 0.42, and those of SD 1.5, SDXL and FLUX.1 in 0.33 too. A function creates the original's tensors in
the original's order, and lets each go where the original does. Its local variables are attributes of `v`. A tensor that
is in no variable is a temporary value, which `drop` frees. What happens within a component is not here: `call`,
`encode` and `decode` play it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vaemem.pipelines.components import CLIP_TOKENS, MOST_SEQUENCE, VAE_STRIDE, count_seen, scale_edited
from vaemem.pipelines.steps import (
    PhaseRun,
    call_unet,
    check_safety,
    count_calls,
    decode_image,
    decode_qwen_image,
    decode_video,
    denoise_by_unet,
    denoise_qwen,
    encode_flux_prompt,
    encode_image,
    encode_qwen_prompt,
    encode_sdxl_prompt,
    encode_text,
    first_denoiser,
    guide,
    guide_apart,
    guide_each,
    join_sdxl_prompts,
    postprocess,
    prepare_condition,
    prepare_flux,
    prepare_latents,
    repeat,
    step_scheduler,
    step_unipc,
)
from vaemem.prediction.held import Tensor


def play_stable_diffusion(run: PhaseRun) -> None:
    """Play StableDiffusionPipeline: SD 1.5 and SD 2.1; and StableDiffusionControlNetPipeline."""
    q, v, batch = run.request, run.v, run.request.batch
    calls = count_calls(q.tokens, CLIP_TOKENS)
    tokens = calls * CLIP_TOKENS

    with run.phase("encode prompt", "text_encoder"):
        embeds = (batch, tokens, q.pipeline.width)
        encoded = encode_text(run, "text_encoder", CLIP_TOKENS, calls)
        v.prompt_embeds = repeat(run, "prompt_embeds", embeds, encoded)
        if q.guidance:
            encoded = encode_text(run, "text_encoder", CLIP_TOKENS, calls)
            v.negative_prompt_embeds = repeat(run, "negative_prompt_embeds", embeds, encoded)
            v.prompt_embeds = run.tensor("prompt_embeds, both", (2, *embeds))
        prepare_condition(run)

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", first_denoiser(run)):
        prepare_latents(run)
        for _ in run.steps(q.steps):
            call_unet(run, tokens)
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


def play_stable_diffusion_xl(run: PhaseRun) -> None:
    """Play SDXL: StableDiffusionXLPipeline, StableDiffusionXLControlNetPipeline and StableDiffusionXLImg2ImgPipeline.
    The refiner is one of the last kind, with the second text encoder alone and an image in every call."""
    q, v, batch = run.request, run.v, run.request.batch
    calls = count_calls(q.tokens, CLIP_TOKENS)
    numbers = 5 if q.pipeline.encodes else 6  # the refiner's scores of beauty take the place of a size

    encode_sdxl_prompt(run, calls, joins=not q.encodes)

    if q.encodes:
        with run.phase("encode image", "vae"):
            encode_image(run)
            join_sdxl_prompts(run, calls)

    with run.phase("denoise", first_denoiser(run)):
        prepare_latents(run)
        v.add_time_ids = run.tensor("add_time_ids", (2 * batch if q.guidance else batch, numbers))
        denoise_by_unet(run, calls)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_stable_diffusion_3(run: PhaseRun) -> None:
    """Play StableDiffusion3Pipeline: SD 3 and SD 3.5. The embeddings of both CLIPs come before those of T5, which are
    zeros if it is missing."""
    q, v, (batch, *latent) = run.request, run.v, run.latent_shape
    _, h, w = latent
    tokens, images = CLIP_TOKENS + q.tokens, 2 * batch if q.guidance else batch

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


def play_pixart_sigma(run: PhaseRun) -> None:
    """Play PixArtSigmaPipeline. Its transformer predicts a variance too, in as many channels as the noise."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape
    images = 2 * batch if q.guidance else batch

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


def play_flux(run: PhaseRun) -> None:
    """Play FluxPipeline: FLUX.1-dev, and FLUX.1-schnell without a guidance input."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape

    encode_flux_prompt(run)

    if q.image:
        with run.phase("encode image", "vae"):
            v.latent_image_ids = run.tensor("latent_image_ids", (h // 2 * (w // 2), 3))
            encode_image(run)
            v.latents = run.tensor("latents, packed", run.latent_shape)

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


def play_flux_kontext(run: PhaseRun) -> None:
    """Play FluxKontextPipeline with an image of the picture's size. Its tokens follow the picture's."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape

    encode_flux_prompt(run)

    with run.phase("encode image", "vae"):
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


def play_flux_fill(run: PhaseRun) -> None:
    """Play FluxFillPipeline. Each token has the picture's 64 numbers, the masked image's 64 and the mask's 256."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape

    encode_flux_prompt(run)

    with run.phase("encode image", "vae"):
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


def play_chroma(run: PhaseRun) -> None:
    """Play ChromaPipeline: FLUX.1's with a mask of the padding. Guidance is a second call of the transformer."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape
    patches, kinds = h // 2 * (w // 2), ("", "negative_") if q.guidance else ("",)

    with run.phase("encode prompt", "text_encoder"):
        for kind in kinds:
            encoded = encode_text(run, "text_encoder", q.tokens, inputs=("text_input_ids", "attention_mask"))
            embeds = (batch, q.tokens, q.pipeline.width)
            setattr(v, f"{kind}prompt_embeds", repeat(run, f"{kind}prompt_embeds", embeds, encoded))
            setattr(v, f"{kind}prompt_attention_mask", run.tensor("prompt_attention_mask", embeds[:2]))
            setattr(v, f"{kind}text_ids", run.tensor("text_ids", (q.tokens, 3)))

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        v.latent_image_ids = run.tensor("latent_image_ids", (patches, 3))
        for kind in kinds:
            setattr(v, f"{kind}attention_mask", run.tensor("attention_mask", (batch, q.tokens + patches)))
        for _ in run.steps(q.steps):
            v.timestep = run.tensor("timestep", (batch,))
            for kind in kinds:
                divided = run.tensor("timestep / 1000", (batch,))
                noise = run.call("transformer", n=batch, h=h, w=w, t=q.tokens)
                setattr(v, "neg_noise_pred" if kind else "noise_pred", noise)
                run.drop(divided)
            if q.guidance:
                guide_apart(run, "noise_pred")
            step_scheduler(run)

    with run.phase("decode", "vae"):
        decode_image(run)


def play_qwen_image(run: PhaseRun) -> None:
    """Play QwenImagePipeline. Guidance is a second call of the transformer, with a negative prompt of equal length."""
    q, (_, _, h, w) = run.request, run.latent_shape

    with run.phase("encode prompt", "text_encoder"):
        for kind in ("", "negative_") if q.guidance else ("",):
            encode_qwen_prompt(run, kind)

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        denoise_qwen(run, (h, w))

    with run.phase("decode", "vae"):
        decode_qwen_image(run)


def play_qwen_image_edit(run: PhaseRun) -> None:
    """Play QwenImageEditPipeline with an image of the picture's proportions. The text encoder's vision tower is not
    played: its memory is less than that of the scores for words."""
    q, v, (batch, channels, h, w) = run.request, run.v, run.latent_shape
    height, width = scale_edited(q.height, q.width)
    image_latent = (batch, channels, height // VAE_STRIDE, width // VAE_STRIDE)

    with run.phase("encode prompt", "text_encoder"):
        for kind in ("", "negative_") if q.guidance else ("",):
            encode_qwen_prompt(run, kind, count_seen(height, width))

    with run.phase("encode image", "vae"):
        v.image = run.tensor("image", (1, 3, height, width))
        v.image_latents = run.encode(v.image)
        v.image_latents = run.tensor("image_latents, normalised", (1, *image_latent[1:]))
        v.image_latents = run.tensor("image_latents", image_latent)
        v.image_latents = run.tensor("image_latents, packed", image_latent)
        del v.image

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        denoise_qwen(run, (h, w), image_latent[2:])

    with run.phase("decode", "vae"):
        decode_qwen_image(run)


def play_z_image(run: PhaseRun) -> None:
    """Play ZImagePipeline: it keeps latents in float32. Its transformer sees the prompt without the padding. The
    negative prompt counts as long as the prompt."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape
    kinds = ("", "negative_") if q.guided else ("",)

    with run.phase("encode prompt", "text_encoder"):
        for kind in kinds:
            encoded = encode_text(run, "text_encoder", MOST_SEQUENCE, count_calls(q.tokens, MOST_SEQUENCE))
            embeds = repeat(run, f"{kind}prompt_embeds", (batch, q.tokens, q.pipeline.width), encoded)
            setattr(v, f"{kind}prompt_embeds", embeds)

    if q.image:
        with run.phase("encode image", "vae"):
            encode_image(run)

    with run.phase("denoise", "transformer"):
        prepare_latents(run, "float32")
        v.timestep = run.tensor("timestep", (batch,), "float32")
        for _ in run.steps(q.steps):
            v.latent_model_input = run.tensor("latent_model_input", run.latent_shape)
            if q.guided:
                v.latents_typed = v.latent_model_input
                v.latent_model_input = run.tensor("latent_model_input, twice", (2, *run.latent_shape))
            v.model_out_list = run.call("transformer", n=len(kinds) * batch, h=h, w=w, t=q.tokens)
            v.delete("noise_pred")
            predicted = guide_each(run) if q.guided else []
            stacked = run.tensor("noise_pred", run.latent_shape, "float32")
            v.delete(*predicted[:-1])
            v.noise_pred = run.tensor("- noise_pred", run.latent_shape, "float32")
            run.drop(stacked)
            step_scheduler(run, "float32")

    with run.phase("decode", "vae"):
        decode_image(run)


def play_flux2(run: PhaseRun) -> None:
    """Play Flux2Pipeline: FLUX.2-dev; and Flux2KleinPipeline without a guidance input. Its base models guide."""
    q, v, (batch, _, h, w) = run.request, run.v, run.latent_shape
    calls, kinds = count_calls(q.tokens, MOST_SEQUENCE), ("", "negative_") if q.guided else ("",)
    tokens = calls * MOST_SEQUENCE

    with run.phase("encode prompt", "text_encoder"):
        for kind in kinds:
            encoded = encode_text(run, "text_encoder", MOST_SEQUENCE, calls, inputs=("input_ids", "attention_mask"))
            embeds = repeat(run, f"{kind}prompt_embeds", (batch, tokens, q.pipeline.width), encoded)
            setattr(v, f"{kind}prompt_embeds", embeds)

    with run.phase("denoise", "transformer"):
        prepare_latents(run)
        for kind in kinds:
            setattr(v, f"{kind}text_ids", run.tensor(f"{kind}text_ids", (batch, tokens, 4), "int64"))
        v.latent_ids = run.tensor("latent_ids", (batch, h // 2 * (w // 2), 4), "int64")
        v.timestep = run.tensor("timestep", (batch,))
        if q.pipeline.guidance_embeds:
            v.guidance = run.tensor("guidance", (1,), "float32")
        for _ in run.steps(q.steps):
            v.latent_model_input = v.latents  # it holds them until the next step, or the end
            for kind in kinds:
                divided = run.tensor("timestep / 1000", (batch,))
                noise = run.call("transformer", n=batch, h=h, w=w, t=tokens)
                setattr(v, "neg_noise_pred" if kind else "noise_pred", noise)
                run.drop(divided)
            if q.guided:
                guide_apart(run, "noise_pred")
            step_scheduler(run)

    with run.phase("decode", "vae"):
        v.latents_bn_std = run.tensor("latents_bn_std", (128,))
        decode_image(run)


def play_wan(run: PhaseRun) -> None:
    """Play WanPipeline, which makes videos: latents in float32. Guidance is a second call of the transformer."""
    q, v, (batch, _, f, h, w) = run.request, run.v, run.latent_shape
    kinds, width = ("", "negative_") if q.guidance else ("",), q.pipeline.width

    with run.phase("encode prompt", "text_encoder"):
        for kind in kinds if "text_encoder" in run.parts else ():
            encoded = encode_text(run, "text_encoder", q.tokens, inputs=("text_input_ids", "mask"))
            cut = run.tensor("prompt_embeds, cut", (1, q.tokens, width))
            stacked = run.tensor("prompt_embeds, stacked", (1, q.tokens, width))
            run.drop(cut, *encoded)
            embeds = repeat(run, f"{kind}prompt_embeds", (batch, q.tokens, width), [stacked])
            setattr(v, f"{kind}prompt_embeds", embeds)

    with run.phase("denoise", "transformer"):
        prepare_latents(run, "float32")
        v.mask = run.tensor("mask", run.latent_shape, "float32")
        for step in run.steps(q.steps):
            v.latent_model_input = run.tensor("latent_model_input", run.latent_shape)
            if q.pipeline.times:
                v.timestep = run.tensor("timestep", (f, h // 2, w // 2), "float32")
            for kind in kinds:
                noise = run.call("transformer", n=batch, f=f, h=h, w=w, t=q.tokens)
                setattr(v, "noise_uncond" if kind else "noise_pred", noise)
            if q.guidance:
                guide_apart(run, "noise_pred")
            step_unipc(run, step)

    with run.phase("decode", "vae"):
        decode_video(run)


PHASES: Mapping[str, Callable[[PhaseRun], None]] = {
    "StableDiffusionPipeline": play_stable_diffusion,
    "StableDiffusionControlNetPipeline": play_stable_diffusion,
    "StableDiffusionXLPipeline": play_stable_diffusion_xl,
    "StableDiffusionXLControlNetPipeline": play_stable_diffusion_xl,
    "StableDiffusionXLImg2ImgPipeline": play_stable_diffusion_xl,
    "StableDiffusion3Pipeline": play_stable_diffusion_3,
    "PixArtSigmaPipeline": play_pixart_sigma,
    "FluxPipeline": play_flux,
    "FluxKontextPipeline": play_flux_kontext,
    "FluxFillPipeline": play_flux_fill,
    "ChromaPipeline": play_chroma,
    "QwenImagePipeline": play_qwen_image,
    "QwenImageEditPipeline": play_qwen_image_edit,
    "ZImagePipeline": play_z_image,
    "Flux2Pipeline": play_flux2,
    "Flux2KleinPipeline": play_flux2,
    "WanPipeline": play_wan,
}
