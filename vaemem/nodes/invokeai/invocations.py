"""The nodes: what a user can set, and calls of vaemem with InvokeAI's objects."""

# Annotations are not postponed here: InvokeAI reads them when it registers a node.
from collections.abc import Callable
from typing import Literal

from invokeai.app.invocations.baseinvocation import BaseInvocation, invocation
from invokeai.app.invocations.fields import (
    FieldDescriptions,
    ImageField,
    Input,
    InputField,
    LatentsField,
    WithBoard,
    WithMetadata,
)
from invokeai.app.invocations.model import VAEField
from invokeai.app.invocations.primitives import ImageOutput, LatentsOutput
from invokeai.app.services.session_processor.session_processor_common import CanceledException
from invokeai.app.services.shared.invocation_context import InvocationContext
from pydantic import BaseModel

from vaemem.pytorch import invokeai_vae
from vaemem.pytorch.places import Place

_GIB = 1 << 30
_LIMIT = "Memory that the run may take, weights included, in GiB. 0: the memory that is free when it begins."
_DEVICE = "auto: InvokeAI's card if vaemem can use it, otherwise the CPU."


class WithPlace(BaseModel):
    """The fields of a node that say where and in how much memory it runs."""

    memory_limit: float = InputField(default=0, ge=0, le=1024, description=_LIMIT)
    device: Literal["auto", "cpu", "gpu"] = InputField(default="auto", description=_DEVICE)

    @property
    def place(self) -> Place:
        return Place(self.device, int(self.memory_limit * _GIB))


def _poll(context: InvocationContext) -> Callable[[int, int], None]:
    """Return the function that vaemem calls during a run. The function shows progress, and raises if the user
    cancels."""
    shown = -1

    def poll(done: int, total: int) -> None:
        nonlocal shown
        if context.util.is_canceled():
            raise CanceledException
        if (percent := 100 * done // total) != shown:
            shown = percent
            context.util.signal_progress("Running the VAE by vaemem", done / total)

    return poll


@invocation(
    "vaemem_l2i",
    title="Latents to Image (vaemem)",
    tags=["latents", "image", "vae", "l2i", "vaemem"],
    category="latents",
    version="1.0.0",
)
class LatentsToImage(BaseInvocation, WithPlace, WithMetadata, WithBoard):
    """Decode latents without tiles within a memory limit, which does not change the image."""

    latents: LatentsField = InputField(description=FieldDescriptions.latents, input=Input.Connection)
    vae: VAEField = InputField(description=FieldDescriptions.vae, input=Input.Connection)

    def invoke(self, context: InvocationContext) -> ImageOutput:
        latents, loaded = context.tensors.load(self.latents.latents_name), context.models.load(self.vae.vae)
        image = invokeai_vae.decode_whole(loaded, latents, self.vae.seamless_axes, _poll(context), self.place)
        return ImageOutput.build(context.images.save(image=image))


@invocation(
    "vaemem_i2l",
    title="Image to Latents (vaemem)",
    tags=["latents", "image", "vae", "i2l", "vaemem"],
    category="latents",
    version="1.0.0",
)
class ImageToLatents(BaseInvocation, WithPlace):
    """Encode an image without tiles within a memory limit, which does not change the latents."""

    image: ImageField = InputField(description="The image to encode.")
    vae: VAEField = InputField(description=FieldDescriptions.vae, input=Input.Connection)

    def invoke(self, context: InvocationContext) -> LatentsOutput:
        image, loaded = context.images.get_pil(self.image.image_name), context.models.load(self.vae.vae)
        latents = invokeai_vae.encode_whole(loaded, image, _poll(context), self.place)
        name = context.tensors.save(tensor=latents)
        return LatentsOutput.build(latents_name=name, latents=latents, seed=None)
