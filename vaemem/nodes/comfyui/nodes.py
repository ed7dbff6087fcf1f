"""The nodes: what a user can set, and calls of vaemem with ComfyUI's objects."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from comfy import model_management, utils
from comfy_api.v0_0_2 import ComfyExtension, io

from vaemem.pytorch import comfyui_vae
from vaemem.pytorch.places import DEVICES, Place

_GIB = 1 << 30
_CATEGORY = "vaemem"


def _poll() -> Callable[[int, int], None]:
    """Return the function that vaemem calls during a run. The function shows progress, and raises if the user
    cancels."""
    bar = utils.ProgressBar(100)

    def poll(done: int, total: int) -> None:
        model_management.throw_exception_if_processing_interrupted()
        if (percent := 100 * done // total) != bar.current:
            bar.update_absolute(percent)

    return poll


def _place_inputs() -> list[Any]:
    limit = "Memory that the run may take, weights included, in GiB. 0: the memory that is free when it begins."
    device = "auto: ComfyUI's card if vaemem can use it, otherwise the CPU."
    return [
        io.Float.Input("memory_limit", default=0.0, min=0.0, max=1024.0, step=0.01, tooltip=limit),
        io.Combo.Input("device", options=list(DEVICES), default="auto", tooltip=device),
    ]


def _place(memory_limit: float, device: str) -> Place:
    return Place(device, int(memory_limit * _GIB))


class VAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="vaemem.VAEDecode",
            display_name="VAE Decode (vaemem)",
            category=_CATEGORY,
            description="Decode latents without tiles within a memory limit, which does not change the picture.",
            inputs=[io.Latent.Input("samples"), io.Vae.Input("vae"), *_place_inputs()],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples: Any, vae: Any, memory_limit: float, device: str) -> io.NodeOutput:
        place = _place(memory_limit, device)
        return io.NodeOutput(comfyui_vae.decode_whole(vae, samples["samples"], model_management, _poll(), place))


class VAEEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="vaemem.VAEEncode",
            display_name="VAE Encode (vaemem)",
            category=_CATEGORY,
            description="Encode pictures without tiles within a memory limit, which does not change the latents.",
            inputs=[io.Image.Input("pixels"), io.Vae.Input("vae"), *_place_inputs()],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, pixels: Any, vae: Any, memory_limit: float, device: str) -> io.NodeOutput:
        place = _place(memory_limit, device)
        return io.NodeOutput({"samples": comfyui_vae.encode_whole(vae, pixels, model_management, _poll(), place)})


class DecodeSafely(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="vaemem.DecodeSafely",
            display_name="Decode, safely (vaemem)",
            category=_CATEGORY,
            description="Decode as ComfyUI does. If that does not fit or runs out of memory, vaemem decodes the same "
            "latents whole, instead of ComfyUI in tiles.",
            inputs=[io.Latent.Input("samples"), io.Vae.Input("vae")],
            outputs=[io.Image.Output(), io.String.Output(display_name="note")],
        )

    @classmethod
    def execute(cls, samples: Any, vae: Any) -> io.NodeOutput:
        pixels, notes = comfyui_vae.decode_safely(vae, samples["samples"], model_management, _poll())
        for note in notes:
            logging.warning("Decode, safely (vaemem): %s", note)
        return io.NodeOutput(pixels.reshape(-1, *pixels.shape[-3:]), "\n".join(notes) or "ComfyUI decoded")


class VRAMEstimate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        card = "A card such as RTX 4060. Empty: the card that ComfyUI runs on."
        model = (
            "SD 1.5, SDXL, FLUX.1, Qwen-Image: the whole workflow is predicted. Others add ComfyUI's own estimate for "
            "the sampler."
        )
        return io.Schema(
            node_id="vaemem.VRAMEstimate",
            display_name="VRAM estimate (vaemem)",
            category=_CATEGORY,
            description="Predict whether a workflow, or its decode, fits a card, before anything runs.",
            inputs=[
                io.Vae.Input("vae"),
                io.Int.Input("width", default=1024, min=16, max=16384, step=8),
                io.Int.Input("height", default=1024, min=16, max=16384, step=8),
                io.String.Input("card", default="", tooltip=card),
                io.Int.Input("batch_size", default=1, min=1, max=4096),
                io.Model.Input("model", optional=True, tooltip=model),
            ],
            outputs=[
                io.String.Output(display_name="verdict"),
                io.Float.Output(display_name="GiB"),
                io.Image.Output(display_name="picture"),
            ],
        )

    @classmethod
    def execute(cls, vae: Any, width: int, height: int, card: str, batch_size: int, model: Any = None) -> io.NodeOutput:
        found = comfyui_vae.estimate(vae, height, width, card.strip(), model, model_management, batch_size)
        return io.NodeOutput(found.text, found.nbytes / _GIB, found.picture)


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [VAEDecode, VAEEncode, DecodeSafely, VRAMEstimate]


async def comfy_entrypoint() -> ComfyExtension:
    return Extension()
