"""Where a program's VAE runs, and in how much memory: `device` and `memory_limit` of the nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vaemem._common import choose
from vaemem._errors import ArgumentError
from vaemem.engine.device import backends
from vaemem.engine.limits import Limit, available_memory

DEVICES = ("auto", "cpu", "gpu")


class Place(NamedTuple):
    """Where and in how much memory vaemem runs. device: one of `DEVICES`. limit: in bytes; 0 means the free memory."""

    device: str = "auto"
    limit: int = 0

    def device_for(self, theirs: torch.device, dtype: Any) -> str:
        """Return "cpu", or a name such as "cuda:0". "auto" means the program's card if vaemem can use it.

        theirs: where the program runs the VAE; dtype: the type of numbers on a card
        """
        choose("device", self.device, DEVICES)
        on_card = theirs.type == "cuda"
        if self.device == "gpu" and not on_card:
            raise ArgumentError("device", "'cpu' or 'auto'", f"'gpu', but the VAE runs on {theirs}")
        if self.device == "cpu" or not on_card:
            return "cpu"
        name = f"cuda:{torch.cuda.current_device() if theirs.index is None else theirs.index}"
        row = next((row for row in backends(dtype) if row["device"] in (name, "cuda")), None)
        if row is None or not row["usable"]:
            if self.device == "gpu":
                raise ArgumentError("device", "'cpu'", "'gpu'", row["why"] if row else f"vaemem finds no {name}")
            return "cpu"
        return name

    def limit_on(self, device: str) -> Limit:
        """Return the limit of a run. On a system that does not report its free memory there is none."""
        if self.limit:
            return self.limit
        return None if device == "cpu" and available_memory() is None else "auto"


ANYWHERE = Place()
