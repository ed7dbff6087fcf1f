"""The engine's public names, under the path that they have always had."""

from vaemem.engine.arguments import Cancelled
from vaemem.engine.records import Encoded, Run
from vaemem.engine.tiling import Tiling
from vaemem.engine.vae import VAE, backends

__all__ = ["VAE", "Cancelled", "Encoded", "Run", "Tiling", "backends"]
