"""The default types in which programs run a VAE: of its numbers, and of its weights between runs.

The types were read in diffusers 0.33 to 0.42 (StableDiffusionXLPipeline), ComfyUI (a7631e3, comfy/model_management.py
`vae_dtype`, comfy/sd.py `working_dtypes`), Forge (dfdcbab, backend/memory_management.py `vae_dtype`), A1111 (0027ce1,
modules/processing.py `decode_latent_batch`), InvokeAI (8e71a8a, latents_to_image.py, flux.py `FluxVAELoader`, the UI's
`vaePrecision`) and BFL's flux (cli.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vaemem._common import letters
from vaemem.prediction.runtimes import LAST_DIFFUSERS, LAST_PARTLY_UPCAST, WANS

# The types of diffusers' pipelines, as their documentation loads them (torch_dtype=...), by model.
PIPELINE_DTYPES = {
    "sd15": "float16", "sdxl": "float16", "sd3": "float16", "playground-v2.5": "float16", "flux": "bfloat16",
    "flux2": "bfloat16", "flux2-small": "bfloat16", "zimage": "bfloat16", "cogview4": "bfloat16",
    "qwen-image": "bfloat16", "qwen-image-2.1": "bfloat16", "hunyuanimage-2.1": "bfloat16",
    "wan2.1": "float32", "wan2.2": "float32",  # the VAE; the rest of the pipeline is in bfloat16
}  # fmt: skip
# Models with a VAE that overflows in float16: its config says force_upcast, which StableDiffusionXLPipeline obeys.
OVERFLOWING = ("sdxl", "playground-v2.5")
FIXED = "madebyollin/sdxl-vae-fp16-fix"  # SDXL's with weights that do not overflow
BFLOAT16_SM = 80  # ComfyUI and Forge use bfloat16 from this compute capability on

_OLD, _FIX = "on cards before compute capability 8.0", f"; {FIXED}, which can be named as the model, stays in float16"
_KNOWN = tuple(PIPELINE_DTYPES)
# The first rule that matches holds. A rule has the program, or "" for any; its models, or () for all; the least compute
# capability; the dtype, or "" for that of the model's pipeline; and why.
_RULES: tuple[tuple[str, tuple[str, ...], int, str, str], ...] = (
    *(
        (program, models, sm, dtype, f"in which {name} runs VAEs {where}. Its {flags} change that")
        for program, name, flags in (
            ("comfyui", "ComfyUI", "--fp16-vae, --bf16-vae and --fp32-vae"),
            ("forge", "Forge", "--vae-in-fp16 and its like"),
        )
        for models, sm, dtype, where in (
            ((), BFLOAT16_SM, "bfloat16", "from compute capability 8.0 on"),
            (("qwen-image", "wan2.1"), 70, "float16", _OLD),  # `working_dtypes` lists it
            ((), 0, "float32", _OLD),
        )
    ),
    ("a1111", OVERFLOWING, 0, "float32", f"where A1111 stays once float16 has given NaN{_FIX}"),
    ("a1111", _KNOWN, 0, "", "in which A1111 runs VAEs"),
    ("invokeai", WANS, 0, "bfloat16", "in which InvokeAI loads Wan's VAE whatever its setting"),
    ("invokeai", ("sd15", "sdxl"), 0, "float32",
     "which InvokeAI's setting VAE precision is by default. It may be fp16: name float16 then"),
    ("invokeai", _KNOWN, 0, "", "in which InvokeAI runs it"),
    ("bfl", _KNOWN, 0, "", "in which BFL's scripts decode by autocast. Nothing else of autocast is modelled"),
    ("", WANS, 0, "", "in which diffusers' documentation loads it"),
    ("", _KNOWN, 0, "", "in which its pipeline in diffusers runs it"),
    ("", (), 0, "", "as most VAEs are run"),
)  # fmt: skip


class _Usual(NamedTuple):
    """The types in which a program runs a VAE.

    dtype, weights_dtype: of the run's numbers, and of the weights between runs
    upcast: whether diffusers' ``upcast_vae`` leaves a decode's first blocks in the weights' type
    why: the program with that rule, and how to change it
    """

    dtype: str
    weights_dtype: str
    upcast: bool
    why: str


# Bytes in float16 of the models that a program keeps on the card by default while the VAE runs, by VAE. A1111's
# lowvram.py moves nothing without --medvram or --lowvram.
_SDXL = "the UNet and both text encoders", 5134927368 + 246121576 + 1389320296
HELD = {
    "a1111": {
        "sd15": ("the UNet and the text encoder", 1719041928 + 246121576),
        "sdxl": _SDXL,
        "playground-v2.5": _SDXL,
    }
}
# Programs that first send other models to the host, to free their own estimate of the VAE's memory: ComfyUI and Forge
# in VAE.decode (load_models_gpu with memory_required), InvokeAI in its model cache (_offload_unlocked_models).
SENDING = {"comfyui": "ComfyUI", "forge": "Forge", "invokeai": "InvokeAI"}


def held_by(program: str, name: str) -> tuple[str, int]:
    """Return the other models that a program keeps on the card while the VAE of that name runs, and their bytes."""
    return HELD.get(program, {}).get(name, ("", 0))


def is_fixed(model: Any) -> bool:
    """Return whether a name means SDXL's VAE with weights that do not overflow in float16."""
    return isinstance(model, str) and letters(model).endswith("fp16fix")


def usual_dtypes(runtime: str, name: str, sm: int, fixed: bool, release: int = LAST_DIFFUSERS) -> _Usual:
    """Return the types in which a program runs that VAE on a card of that compute capability. fixed: see `is_fixed`.
    release: diffusers', 42 for 0.42."""
    overflows = name in OVERFLOWING and not fixed
    if runtime == "diffusers" and overflows:
        partly = release <= LAST_PARTLY_UPCAST
        blocks = f" (in 0.{release} all but a decode's first blocks)" * partly
        why = f"because diffusers converts a VAE whose config says force_upcast{blocks}{_FIX}"
        return _Usual("float32", "float16", partly, f"float32 from float16 weights, {why}")
    program = runtime.removesuffix("-medvram")
    own, why = next(
        (own, why)
        for owner, models, least_sm, own, why in _RULES
        if owner in ("", program) and (not models or name in models) and sm >= least_sm
        if overflows or models != OVERFLOWING
    )
    dtype = own or PIPELINE_DTYPES.get(name, "float16")
    return _Usual(dtype, dtype, False, f"{dtype}, {why}")
