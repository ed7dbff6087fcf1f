"""Whole pipelines of diffusers', tiny and random, from configs: nothing is downloaded."""

from __future__ import annotations

import json

import accelerate
import diffusers
import tokenizers
import torch
import transformers
from engine import config

MAX_LENGTH = 8
CUDA = torch.device("cuda")


def offload_models(pipe) -> None:
    """Offload whole components. A modular pipeline has no method for it: hook them one by one, as that method does."""
    if hasattr(pipe, "enable_model_cpu_offload"):
        pipe.enable_model_cpu_offload(device="cuda")
        return
    hook = None
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            _, hook = accelerate.cpu_offload_with_hook(part, "cuda", prev_module_hook=hook)


WAYS = {  # how a pipeline comes to a card
    "none": lambda pipe: pipe.to("cuda"),
    "model": offload_models,
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="cuda"),
    "block_level": lambda pipe: pipe.enable_group_offload(CUDA, offload_type="block_level", num_blocks_per_group=1),
    "leaf_level": lambda pipe: pipe.enable_group_offload(CUDA, offload_type="leaf_level"),
}


def autoencoder(name: str, **settings) -> diffusers.AutoencoderKL:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(**{k: v for k, v in (config(name) | settings).items() if k != "_class_name"}).eval()


def clip(folder, projection: bool = False):
    """A tokenizer that knows single letters, and a text encoder of one layer."""
    letters = [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    words = ["<|startoftext|>", "<|endoftext|>", *letters]
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps({word: i for i, word in enumerate(words)}))
    files[1].write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(*map(str, files), model_max_length=MAX_LENGTH, unk_token="<|endoftext|>")
    settings = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        projection_dim=32, max_position_embeddings=MAX_LENGTH, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    build = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return tokenizer, build(settings).eval()


def t5():
    letters = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((letter, -1.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"),
    ]
    fast = tokenizers.Tokenizer(tokenizers.models.Unigram(letters, unk_id=2))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer = transformers.T5TokenizerFast(tokenizer_object=fast, extra_ids=0, model_max_length=MAX_LENGTH)
    settings = transformers.T5Config(vocab_size=len(letters), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return tokenizer, transformers.T5EncoderModel(settings).eval()


def unet(**settings):
    usual = dict(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return diffusers.UNet2DConditionModel(**usual | settings)


def stable_diffusion(folder):
    torch.manual_seed(1)
    tokenizer, encoder = clip(folder)
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder("sd"), tokenizer=tokenizer, text_encoder=encoder, unet=unet(cross_attention_dim=32),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl(folder):
    torch.manual_seed(2)
    tokenizer, encoder = clip(folder)
    size = dict(addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80)
    return diffusers.StableDiffusionXLPipeline(
        vae=autoencoder("sd", scaling_factor=0.13025), tokenizer=tokenizer, text_encoder=encoder, tokenizer_2=tokenizer,
        text_encoder_2=clip(folder, projection=True)[1], unet=unet(cross_attention_dim=64, **size),
        scheduler=diffusers.EulerDiscreteScheduler(), add_watermarker=False,
    )  # fmt: skip


def stable_diffusion_3(folder):
    torch.manual_seed(4)
    tokenizer, encoder = clip(folder, projection=True)
    tokenizer_3, encoder_3 = t5()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, num_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=64,
        caption_projection_dim=32, pooled_projection_dim=64, pos_embed_max_size=8,
    )  # fmt: skip
    encoder_3 = transformers.T5EncoderModel(
        transformers.T5Config.from_dict(encoder_3.config.to_dict() | {"d_model": 64})
    )
    return diffusers.StableDiffusion3Pipeline(
        vae=autoencoder("sd3"), tokenizer=tokenizer, text_encoder=encoder, tokenizer_2=tokenizer,
        text_encoder_2=clip(folder, projection=True)[1], tokenizer_3=tokenizer_3, text_encoder_3=encoder_3.eval(),
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def pixart_sigma(folder):
    torch.manual_seed(5)
    tokenizer, encoder = t5()
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=128, num_layers=1, attention_head_dim=16, num_attention_heads=2, cross_attention_dim=32,
        caption_channels=32, out_channels=8, use_additional_conditions=False,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        vae=autoencoder("sd"), tokenizer=tokenizer, text_encoder=encoder, transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip


def flux(folder):
    torch.manual_seed(3)
    tokenizer, encoder = clip(folder)
    tokenizer_2, encoder_2 = t5()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        vae=autoencoder("flux"), tokenizer=tokenizer, text_encoder=encoder, tokenizer_2=tokenizer_2,
        text_encoder_2=encoder_2, transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def sdxl_refiner(folder):
    parts = dict(stable_diffusion_xl(folder).components) | {"text_encoder": None, "tokenizer": None}
    size = dict(addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=72)
    parts["unet"] = unet(cross_attention_dim=32, **size)
    return diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True, add_watermarker=False)


def flux_kontext(folder, kind: str = "FluxKontextPipeline", channels: int = 64):
    parts = dict(flux(folder).components)
    settings = {**parts["transformer"].config, "guidance_embeds": True, "in_channels": channels, "out_channels": 64}
    parts["transformer"] = diffusers.FluxTransformer2DModel.from_config(settings | {"_use_default_values": []})
    return getattr(diffusers, kind)(**{role: part for role, part in parts.items() if part is not None})


def flux_fill(folder):
    return flux_kontext(folder, "FluxFillPipeline", 64 + 64 + 4 * 4**2)  # this VAE makes 4x4 pixels one


def chroma(folder):
    torch.manual_seed(7)
    tokenizer, encoder = t5()
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.ChromaPipeline(scheduler, autoencoder("flux"), encoder, tokenizer, transformer)


def qwen_image(folder):
    """Its template is cut to the prompts' length, so nothing of it is dropped."""
    torch.manual_seed(6)
    tokenizer, _ = t5()
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=dict(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                num_key_value_heads=2, rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1])),
            vision_config=dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32),
        )
    ).eval()  # fmt: skip
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(**{k: v for k, v in config("qwen").items() if k != "_class_name"}).eval()
    pipe = diffusers.QwenImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, encoder, tokenizer, transformer
    )
    pipe.tokenizer_max_length, pipe.prompt_template_encode_start_idx = MAX_LENGTH, 0
    return pipe


def flux2(name: str = "flux2"):
    """Without a text encoder: calls take embeddings, as `flux2_pictures` gives them."""
    torch.manual_seed(4)
    settings = {key: value for key, value in config(name).items() if key != "_class_name"}
    vae = diffusers.AutoencoderKLFlux2(**settings).eval()
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=32, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16,
    )  # fmt: skip
    return diffusers.Flux2Pipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, None, None, transformer)


PIPELINES = {"sd": stable_diffusion, "sdxl": stable_diffusion_xl, "flux": flux}
LATER = {
    "sd-refiner": sdxl_refiner, "sd3": stable_diffusion_3, "pixart": pixart_sigma, "kontext": flux_kontext,
    "fill": flux_fill, "chroma": chroma, "qwen": qwen_image,
}  # fmt: skip


def pictures(pipe, name: str, output_type: str = "pt", **settings):
    how = dict(prompt="a cat", height=48, width=32, num_inference_steps=2, output_type=output_type, **settings)
    how |= {} if name.startswith("sd") and name != "sd3" else dict(max_sequence_length=MAX_LENGTH)
    if name == "sd-refiner":  # it takes the image's size
        how = {key: value for key, value in how.items() if key not in ("height", "width")}
        how |= dict(image=torch.rand(1, 3, 48, 32), strength=1.0)
    how |= dict(use_resolution_binning=False) if name == "pixart" else {}
    how |= dict(image=torch.rand(1, 3, 48, 32)) if name in ("kontext", "fill") else {}
    how |= dict(max_area=48 * 32, _auto_resize=False) if name == "kontext" else {}
    how |= dict(mask_image=torch.ones(1, 1, 48, 32)) if name == "fill" else {}
    pipe.set_progress_bar_config(disable=True)
    return pipe(generator=torch.Generator().manual_seed(0), **how).images


def flux2_pictures(pipe, **settings):
    how = dict(height=64, width=48, num_inference_steps=2, output_type="pt", **settings)
    pipe.set_progress_bar_config(disable=True)
    how |= dict(prompt_embeds=torch.linspace(-1, 1, 8 * 32).reshape(1, 8, 32))
    return pipe(generator=torch.Generator().manual_seed(0), **how).images
