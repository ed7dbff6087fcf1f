"""Start InvokeAI's server, with vaemem's estimates in its module vae_working_memory, as docs/INTEGRATION.md shows.

The arguments are InvokeAI's. VAEMEM_ESTIMATES names the module's file; a line for each call goes to the file .calls.
"""

import functools
import importlib.util
import os
import warnings

warnings.simplefilter("ignore")
import torch

# torchvision's extension does not load next to a CPU build of torch; its transforms need no operator.
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from invokeai.backend.util import vae_working_memory

path = os.environ["VAEMEM_ESTIMATES"]
spec = importlib.util.spec_from_file_location("vae_working_memory_by_vaemem", path)
ours = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ours)


def record(function):
    @functools.wraps(function)
    def called(**given):
        found = function(**given)
        with open(f"{path}.calls", "a") as file:
            print(function.__name__, given["operation"], *given["image_tensor"].shape, found, file=file)
        return found

    return called


for name in ("sd15_sdxl", "flux", "sd3", "cogview4"):
    name = f"estimate_vae_working_memory_{name}"
    assert hasattr(vae_working_memory, name)
    setattr(vae_working_memory, name, record(getattr(ours, name)))

from invokeai.app.run_app import run_app

run_app()
