"""The default types in which programs run a VAE: of its numbers, and of its weights between runs.

Read in diffusers 0.33 to 0.42 (StableDiffusionXLPipeline), ComfyUI (a7631e3, comfy/model_management.py `vae_dtype`,
comfy/sd.py `working_dtypes`), Forge (dfdcbab, backend/memory_management.py `vae_dtype`), A1111 (0027ce1,
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
# On older cards they use float16 for these models, from this compute capability on: `working_dtypes` lists it.
FLOAT16_TOO, FLOAT16_SM = ("qwen-image", "wan2.1"), 70


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
    half = PIPELINE_DTYPES.get(name, "float16")
    overflows = name in OVERFLOWING and not fixed
    fix = f"; {FIXED}, which can be named as the model, stays in float16" if overflows else ""
    if runtime in ("comfyui", "forge"):
        less = "float16" if name in FLOAT16_TOO and sm >= FLOAT16_SM else "float32"
        dtype, program = "bfloat16" if sm >= BFLOAT16_SM else less, {"comfyui": "ComfyUI"}.get(runtime, "Forge")
        flags = "--fp16-vae, --bf16-vae and --fp32-vae" if runtime == "comfyui" else "--vae-in-fp16 and its like"
        where = "from compute capability 8.0 on" if sm >= BFLOAT16_SM else "on cards before compute capability 8.0"
        return _Usual(dtype, dtype, False, f"{dtype}, in which {program} runs VAEs {where}. Its {flags} change that")
    if runtime.startswith("a1111") and overflows:
        return _Usual("float32", "float32", False, f"float32, where A1111 stays once float16 has given NaN{fix}")
    if runtime == "invokeai" and name in WANS:
        return _Usual("bfloat16", "bfloat16", False, "bfloat16, in which InvokeAI loads Wan's VAE whatever its setting")
    if runtime == "invokeai" and name in ("sd15", "sdxl"):
        why = "float32, which InvokeAI's setting VAE precision is by default. It may be fp16: name float16 then"
        return _Usual("float32", "float32", False, why)
    if runtime == "diffusers" and overflows:
        partly, blocks = release <= LAST_PARTLY_UPCAST, f" (in 0.{release} all but a decode's first blocks)"
        why = "float32 from float16 weights, because diffusers converts a VAE whose config says force_upcast"
        return _Usual("float32", "float16", partly, why + blocks * partly + fix)
    a1111 = "A1111 runs VAEs"
    whose = {"a1111": a1111, "a1111-medvram": a1111, "invokeai": "InvokeAI runs it"}
    whose["bfl"] = "BFL's scripts decode, by autocast, of which nothing more is modelled"
    loads = "diffusers' documentation loads it" if name in WANS else "its pipeline in diffusers runs it"
    known = f"in which {whose.get(runtime, loads)}"
    return _Usual(half, half, False, f"{half}, {known if name in PIPELINE_DTYPES else 'as most VAEs are run'}")
