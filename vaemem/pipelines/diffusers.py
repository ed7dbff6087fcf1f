"""What the pipelines of diffusers do, phase by phase, in the order and with the names of their own code.

Read in StableDiffusionPipeline, StableDiffusionXLPipeline and FluxPipeline of diffusers 0.33, and ZImagePipeline of
0.42. Tensors of prompts, latents and images are followed by the names that hold them; what a scheduler's step makes in
passing is three tensors of the latents' size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vaemem import _core
from vaemem.pipelines.components import CLIP_TOKENS, CLIPS, VAE_STRIDE, Pipeline
from vaemem.pipelines.pipeline_run import PipelineRun
from vaemem.pipelines.storage import BITSANDBYTES
from vaemem.prediction.process import Tensor


@dataclass(frozen=True)
class PipelineCall:
    """The arguments of a pipeline's call, and how its VAE runs."""

    height: int
    width: int
    batch: int
    tokens: int
    guidance: bool
    steps: int
    vae: str
    memory_limit: int
    image: bool = False


def play_pipeline(run: PipelineRun, pipeline: Pipeline, call: PipelineCall) -> None:
    """All phases, into `PipelineRun.phases`."""
    stay = [role for role in run.parts if run.offload == "none" or role in run.resident]
    quantised = [role for role, part in run.parts.items() if part.has(BITSANDBYTES)]
    if stay or quantised:
        with run.phase("load"):
            for role in quantised:  # by from_pretrained, before anything is said about offloading
                run.load(role, quantises=True)
            for role in quantised:
                if role not in stay:
                    run.unload(role)
            for role in stay:
                if role not in quantised:
                    run.load(role)
    encoders = [role for role in pipeline.encoders if role in run.parts]
    with run.phase("encode prompt", *encoders[:1]):
        _encode_prompt(run, pipeline, call)
    if call.image:
        with run.phase("encode image", "vae"):
            _encode_image(run, call)
    with run.phase("denoise", pipeline.denoiser):
        _denoise(run, pipeline, call)
    with run.phase("decode", "vae"):
        _decode(run, pipeline, call)


def _encode_prompt(run: PipelineRun, pipeline: Pipeline, call: PipelineCall) -> None:
    names, dtype = run.names, run.parts[pipeline.denoiser].dtype
    calls, encodes, tokens = pipeline.lengths(call.tokens)
    prompts = ["prompt_embeds", *["negative_prompt_embeds"] * (pipeline.guides and call.guidance)]
    for name in prompts:
        encoded = []
        for role in pipeline.encoders:
            if role not in run.parts:
                continue
            # FLUX's CLIP has its own number of tokens; its pooled output alone is kept.
            own = CLIP_TOKENS if run.parts[role].component in CLIPS else encodes
            for _ in range(calls):
                ids = run.tensor("text_input_ids", (1, own), "int64")
                encoded.append(run.call(role, n=1, t=own))
                run.process.drop(ids)
            if pipeline.pooled and role == pipeline.pools:
                pooled = name.replace("prompt", "pooled_prompt")
                names[pooled] = run.tensor(pooled, (call.batch, pipeline.pooled), dtype)
                if run.parts[role].component == "clip-l-flux":  # which gives that alone
                    run.process.drop(encoded.pop())
        # Joined where several encoders give one, or repeated for each image.
        names[name] = run.tensor(name, (call.batch, tokens, pipeline.width), dtype)
        run.process.drop(*encoded)
    if len(prompts) > 1:
        names["prompt_embeds"] = run.tensor("prompt_embeds, both", (2, *names["prompt_embeds"].shape), dtype)
        if pipeline.pooled:
            names["add_text_embeds"] = run.tensor("add_text_embeds", (2 * call.batch, pipeline.pooled), dtype)


def _encode_image(run: PipelineRun, call: PipelineCall) -> None:
    """As the image-to-image pipelines do: the image on the device, its latents, and noise beside them."""
    names, dtype = run.names, run.parts["vae"].dtype
    names["init_image"] = run.tensor("init_image", (call.batch, 3, call.height, call.width), dtype)
    names["init_latents"] = run.encode(names["init_image"], call.vae)
    names["noise"] = run.tensor("noise", names["init_latents"].shape, dtype)


def _denoise(run: PipelineRun, pipeline: Pipeline, call: PipelineCall) -> None:
    names, process = run.names, run.process
    role = pipeline.denoiser
    dtype = run.parts[role].dtype
    kept = dtype if pipeline.latents == "run" else pipeline.latents
    height, width = call.height // VAE_STRIDE, call.width // VAE_STRIDE
    *_, tokens = pipeline.lengths(call.tokens)
    images = call.batch * (2 if pipeline.guides and call.guidance else 1)
    channels = _core.models()[run.parts["vae"].component]["latent_channels"]
    latent = (call.batch, channels, height, width)
    names["timesteps"] = run.tensor("timesteps", (call.steps,), "float32")
    names["latents"] = run.tensor("latents", latent, kept)
    values = {"n": images, "t": tokens, "p": height // 2 * (width // 2)}

    def made(what: Mapping[str, tuple[str, str]]) -> dict[str, Tensor]:
        return {
            name: run.tensor(name, (_core.Program.evaluate(elements, values),), dtype if own == "run" else own)
            for name, (elements, own) in what.items()
        }

    names.held.update(made(pipeline.conditions))
    for _ in run.steps(call.steps):
        if images > call.batch or kept != dtype:
            names["latent_model_input"] = run.tensor("latent_model_input", (images, *latent[1:]), dtype)
        passed = made(pipeline.passes)
        names["noise_pred"] = run.call(role, n=images, h=height, w=width, t=tokens)
        process.drop(*passed.values())
        if images > call.batch:  # uncond + scale * (text - uncond), both parts of what the denoiser gave
            names.delete("noise_pred_uncond, noise_pred_text")
            names.held["noise_pred_uncond, noise_pred_text"] = names.held.pop("noise_pred")
            difference = run.tensor("noise_pred_text - noise_pred_uncond", latent, dtype)
            scaled = run.tensor("guidance_scale * ...", latent, dtype)
            process.drop(difference)
            names["noise_pred"] = run.tensor("noise_pred", latent, dtype)
            process.drop(scaled)
        elif kept != dtype:  # stacked in that dtype, and negated
            names["model_out_list"] = names.held.pop("noise_pred")
            stacked = run.tensor("noise_pred", latent, kept)
            names["noise_pred"] = run.tensor("- noise_pred", latent, kept)
            process.drop(stacked)
        steps = [run.tensor("scheduler.step", latent, "float32") for _ in range(2)]
        names["latents"] = run.tensor("latents", latent, kept)
        process.drop(*steps)


def _decode(run: PipelineRun, pipeline: Pipeline, call: PipelineCall) -> None:
    names, part = run.names, run.parts["vae"]
    kept = "latents" if pipeline.rescales else "latents / scaling_factor"
    names[kept] = run.tensor("latents / scaling_factor", names["latents"].shape, part.dtype)
    names["image"] = run.decode(names[kept], call.vae, call.memory_limit)
    if not pipeline.rescales:
        names.delete(kept)
    dtype = "float32" if part.upcast else part.dtype
    image = call.batch, 3, call.height, call.width
    steps = [] if "vae" in run.on_cpu else ["image * 0.5", "image * 0.5 + 0.5", "image, clamped"]
    if "safety_checker" in run.parts:  # it is shown the finished picture, made small
        for name in steps:
            names["shown"] = run.tensor(name, image, dtype)
        names.delete("shown")
        names["clip_input"] = run.tensor("clip_input", (call.batch, 3, 224, 224), dtype)
        names["checked"] = run.call("safety_checker", n=call.batch)
    for name in steps:
        names["image"] = run.tensor(name, image, dtype)
