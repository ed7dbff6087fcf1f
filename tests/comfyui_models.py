"""Nodes for tests, copied into ComfyUI: tiny models with random weights, and one that keeps values. No stand-ins: all
classes are ComfyUI's, but checkpoints of them are too large, and ComfyUI recognises no others by their shapes."""

import comfy.clip_model
import comfy.model_management as management
import comfy.model_patcher
import comfy.sd
import comfy.sd1_clip
import comfy.supported_models
import torch

UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1],
    "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1, "context_dim": 32, "num_heads": 4, "num_head_channels": -1,
    "use_spatial_transformer": True, "use_linear_in_transformer": False, "adm_in_channels": None,
    "use_temporal_attention": False, "legacy": False, "dtype": torch.float32,
}  # fmt: skip
TEXT = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_act": "quick_gelu", "max_position_embeddings": 77, "vocab_size": 49408, "eos_token_id": 49407,
    "layer_norm_eps": 1e-5,
}  # fmt: skip
VAE = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip


def fill(module):
    """Give a module reproducible weights; ComfyUI's layers start with whatever lies in memory."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.7 / weight[0].numel() ** 0.5)
            else:
                weight.uniform_(0.5, 1.0)


class ClipModel(comfy.sd1_clip.SDClipModel):
    def __init__(self, **given):
        super().__init__(layer="last", textmodel_json_config=dict(TEXT), **given)


class Clip(comfy.sd1_clip.SD1ClipModel):
    def __init__(self, device="cpu", dtype=None, model_options={}):  # noqa: B006 (as ComfyUI's)
        super().__init__(device=device, dtype=dtype, model_options=model_options, clip_model=ClipModel)


class Tokenizer(comfy.sd1_clip.SDTokenizer):
    def __init__(self, **given):
        super().__init__(embedding_size=32, **given)


class Tokenizers(comfy.sd1_clip.SD1Tokenizer):
    def __init__(self, embedding_directory=None, tokenizer_data={}):  # noqa: B006 (as ComfyUI's)
        super().__init__(embedding_directory, tokenizer_data, tokenizer=Tokenizer)


class TinyModels:
    """fails: the VAE's decode runs out of memory in its middle, each time."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"fails": ("BOOLEAN", {"default": False})}}

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CLIP", "VAE"), "load", "tests"

    def load(self, fails):
        config = comfy.supported_models.SD15(dict(UNET))
        model = config.get_model({}, "")
        fill(model)
        patcher = comfy.model_patcher.ModelPatcher(
            model, management.get_torch_device(), management.unet_offload_device()
        )
        target = comfy.supported_models.supported_models_base.ClipTarget(Tokenizers, Clip)
        clip = comfy.sd.CLIP(target)
        fill(clip.cond_stage_model)
        vae = comfy.sd.VAE(sd={"none": 0}, config={"params": {"ddconfig": dict(VAE), "embed_dim": 4}})
        fill(vae.first_stage_model)
        if fails:
            vae.first_stage_model.decoder.conv_out.register_forward_pre_hook(self.run_out)
        return patcher, clip, vae

    @staticmethod
    def run_out(*given):
        raise management.OOM_EXCEPTION("Allocation on device would exceed allowed memory. (out of memory)")


class Keep:
    """Save a value of any kind."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*",), "path": ("STRING",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "keep", "tests", True

    def keep(self, value, path):
        torch.save(value["samples"] if isinstance(value, dict) else value, path)
        return {}


NODE_CLASS_MAPPINGS = {"TinyModels": TinyModels, "Keep": Keep}
