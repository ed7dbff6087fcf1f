"""Run ComfyUI's dynamic memory management on the cases of tests/comfyui_dynamic_cases.py, and print its decisions.

    COMFYUI=path/to/ComfyUI PYTHONPATH=path/to/comfy_aimdo python tests/comfyui_dynamic_oracle.py

ComfyUI 0.33.0 and the library of comfy-aimdo 0.4.13 run as they are. The driver is tests/aimdo_card.c, a card that has
only a size: the library finds it as libcuda.so.1, and patches the entries by which PyTorch takes memory. A GPU is faked
elsewhere, too: tensors on it are on the device meta, streams order nothing, and no weight is pinned or copied.
"""

import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import comfyui_dynamic_cases as cases

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "recording"))
from comfyui_code import import_comfyui
from comfyui_oracle import make_workflow

MIB = cases.MIB
FAILURES = {"VRAM": "buffer", "Faul": "page"}  # by the beginning of comfy-aimdo's messages


def build_card():
    """Load the driver, which comfy-aimdo then finds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libcuda.so.1"
        source = Path(__file__).parent / "aimdo_card.c"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source], check=True)
        card = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    card.card_used.restype = ctypes.c_uint64
    return card


class Stream:
    """A stream of PyTorch's that orders nothing."""

    as_context = staticmethod(contextlib.nullcontext)

    def wait_stream(self, other=None):
        pass

    synchronize = wait_stream


class Taken:
    """What PyTorch holds, in parts as it asked the driver for them."""

    def __init__(self, card, native):
        self.take = card.cuMemAlloc if native else lambda *args: card.cuMemAllocAsync(*args, None)
        self.give = card.cuMemFree if native else lambda address: card.cuMemFreeAsync(address, None)
        self.native, self.parts = native, []

    def hold(self, size):
        """Hold `size` bytes. PyTorch's own allocator keeps what it has."""
        more = size - sum(part for _, part in self.parts)
        if more < 0 and not self.native:
            self.shrink(size)
        elif more > 0:
            address = ctypes.c_uint64()
            if self.take(ctypes.byref(address), ctypes.c_size_t(more)):
                raise MemoryError("PyTorch")
            self.parts.append((address, more))

    def shrink(self, size):
        """Give back the last parts until `size` bytes are left; of one part it takes less instead."""
        while size < (held := sum(part for _, part in self.parts)):
            address, part = self.parts.pop()
            self.give(address)
            self.hold(max(size, held - part))


def make_model(modules):
    """A model of ComfyUI's layers and of others, without data."""
    import comfy.ops
    import torch

    blocks, types = torch.nn.Module(), {2: torch.float16, 4: torch.float32}
    with torch.device("meta"):
        for number, (kind, inputs, outputs, has_bias, width) in enumerate(modules):
            types_of = {"dtype": types[width], "device": "meta"}
            made = block = torch.nn.Module()
            if kind == cases.TABLE:
                made.register_buffer("table", torch.empty(inputs, **types_of))
            else:
                linear = torch.nn.Linear if kind == cases.PLAIN else comfy.ops.manual_cast.Linear
                made = linear(inputs, outputs, has_bias, **types_of)
            if kind == cases.OWN:
                made.extra = torch.nn.Parameter(torch.empty(5, 1000, **types_of), requires_grad=False)
            if kind == cases.BLOCK:
                for name, shape in (("scale", (outputs, 3)), ("weight", (outputs,))):
                    block.register_parameter(name, torch.nn.Parameter(torch.empty(shape, **types_of), False))
                block.inner, made = made, block
            blocks.add_module(str(number), made)
    model = torch.nn.Module()
    model.blocks, model.model_loaded_weight_memory = blocks, 0
    return model


class Oracle:
    """ComfyUI with comfy-aimdo, on a card that has only a size."""

    def __init__(self):
        self.card = build_card()
        self.card.card_begin(ctypes.c_uint64(1 << 30), ctypes.c_uint64(0))
        import comfy_aimdo.control

        self.control = comfy_aimdo.control
        assert self.control.init("cuda", nvml_pressure=True) and self.control.init_devices([(0, 0)])
        manager = self.manager = import_comfyui()
        import comfy.model_patcher
        import comfy.model_prefetch
        import comfy.ops
        import comfy.pinned_memory
        import comfy_aimdo.model_vbar
        import comfy_aimdo.torch
        import torch

        self.device, self.vbars = torch.device("cuda", 0), comfy_aimdo.model_vbar
        manager.NUM_STREAMS, manager.STREAMS[self.device] = 2, [Stream(), Stream()]
        manager.current_stream = lambda device: Stream()
        manager.get_free_memory = lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0
        manager.cast_to_gathered = self.count
        manager.synchronize = lambda: None
        comfy.pinned_memory.get_pin = comfy.pinned_memory.pin_memory = lambda *args, **kwargs: None
        manager.supports_mxfp8_compute = lambda *_: False
        comfy.ops.materialize_meta_param = lambda *args: None
        comfy_aimdo.torch.aimdo_to_tensor = lambda place, _: torch.empty(place[2], dtype=torch.uint8, device="meta")

    def count(self, tensors, *args, **kwargs):
        """Count the bytes of a layer that is sent."""
        import comfy.memory_management

        self.sent += comfy.memory_management.vram_aligned_size(tensors)

    def begin(self, case):
        """Begin with a new card."""
        self.control.lib.cleanup()
        self.card.card_begin(ctypes.c_uint64(case.capacity), ctypes.c_uint64(case.capacity - case.free))
        self.control.lib.set_simple_vram_headroom(case.headroom)
        assert self.control.lib.init((ctypes.c_int * 1)(0), (ctypes.c_uint64 * 1)(case.extra), 1)
        self.control.devctxs = [self.control.get_devctx(0)]
        self.manager.stream_counters.clear()

    def stage(self, model, computed=None):
        """Return a patcher for a model."""
        import comfy.model_patcher
        import torch

        self.manager.archive_model_dtypes(model)
        patcher = comfy.model_patcher.ModelPatcherDynamic(model, self.device, torch.device("cpu"))
        if computed is not None:
            patcher.set_model_compute_dtype(computed)
        return patcher

    def load(self, patcher):
        """Load a model for a node. Return the bytes that go to the card as PyTorch's tensors."""
        from fake_card import Moves

        with Moves() as moves:
            self.manager.load_models_gpu([patcher])
        return moves.bytes

    def places(self, patcher):
        """Return the first byte and the bytes of each layer, in the order of the model's address space."""
        base = patcher._vbar_get().base_addr
        found = {name: (m._v[1] - base, m._v[2]) for name, m in patcher.model.named_modules() if hasattr(m, "_v")}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def call(self, layers):
        """Call layers: send them, cast them, yield as they run, unpin them."""
        import comfy.model_prefetch
        import comfy.ops

        queue = None
        if len(layers) > 1:  # as a block whose layers are sent together
            options = {"prefetch_dynamic_vbars": True}
            queue = comfy.model_prefetch.make_prefetch_queue([layers], self.device, options)
            comfy.model_prefetch.prefetch_queue_pop(queue, self.device, layers[0])
        casts = []
        for layer in layers:
            given = dict.fromkeys(("dtype", "bias_dtype"), layer.weight.dtype)
            casts.append(comfy.ops.cast_bias_weight(layer, device=self.device, offloadable=True, **given))
        yield
        for layer, cast in zip(layers, casts, strict=True):
            comfy.ops.uncast_bias_weight(layer, *cast)
        if queue:
            comfy.model_prefetch.prefetch_queue_pop(queue, self.device, None)

    def end_node(self):
        """End a node, as execution.py does."""
        import comfy.model_prefetch

        self.manager.reset_cast_buffers()
        comfy.model_prefetch.cleanup_prefetch_queues()
        self.vbars.vbars_reset_watermark_limits()

    def buffers(self):
        """Return the bytes of the streams' buffers, as the library has them."""
        found = [self.manager.STREAM_AIMDO_CAST_BUFFERS.get(one) for one in self.manager.STREAMS[self.device]]
        return [0 if one is None else ctypes.c_uint64.from_address(one._ptr + 16).value for one in found]

    def run(self, case, make):
        """Yield the staged models' lines and the nodes' outcomes. make: makes a model of that name, with the names of
        the layers that may be sent, if not all, and the type in which it computes, if ComfyUI is told."""
        self.begin(case)
        taken, patchers, layers, kept = Taken(self.card, case.native), {}, {}, 0
        for number, (name, steps, calls) in enumerate(case.nodes):
            if is_new := name not in patchers:
                model, names, computed = make(name)
                patchers[name] = self.stage(model, computed)
            patcher, sent, failure, step = patchers[name], [0] * steps, "", 0
            forced = self.load(patcher)
            if is_new:
                yield "stage", name, self.places(patcher), forced
                kept += -(-forced // (2 * MIB)) * 2 * MIB
                modules = dict(patcher.model.named_modules())
                layers[name] = [modules[one] for one in names or modules if names or hasattr(modules[one], "_v")]
            numbered = cases.number_calls(calls, len(layers[name]))
            try:
                taken.hold(kept)
                for step, (called, held) in itertools.product(range(steps), numbered):
                    self.sent, chosen = 0, [layers[name][one] for one in called]
                    for _ in self.call([one for one in chosen if hasattr(one, "_v")]):
                        sent[step] += self.sent
                        taken.hold(kept + held)
            except MemoryError as error:
                failure = f"{error} in step {step}"
            except RuntimeError as error:
                failure = f"{FAILURES[str(error)[:4]]} in step {step}"
            pages = {one: sum(page & 1 for page in held._vbar_get().get_residency()) for one, held in patchers.items()}
            yield "node", number, pages, sent[0], sent[-1], self.buffers(), failure
            self.end_node()
            taken.shrink(kept)
            if failure:
                break
        self.manager.current_loaded_models.clear()
        patchers.clear()
        layers.clear()
        del patcher, modules, model
        gc.collect()


def main():
    logging.disable()
    oracle = Oracle()
    workflows = {}  # by name

    def make_random(name):
        modules = case.models["abc".index(name)]
        return make_model(modules), cases.layers_of_modules(modules), None

    def make_role(pipeline, role):
        """Make a model of a workflow: ComfyUI's own."""
        import torch

        if pipeline not in workflows:
            workflows[pipeline] = make_workflow(oracle.manager, pipeline)
        model = copy.deepcopy(getattr(workflows[pipeline], role))
        model.model_loaded_weight_memory = 0
        return model, (), torch.float32 if role == "text_encoder" else None

    for number in range(cases.COUNT):
        case = cases.make_paging(number)
        for kind, *found in oracle.run(case, make_random):
            print(getattr(cases, f"{kind}_line")(number, *found))
    for pipeline, case in cases.make_workflows():
        for kind, *found in oracle.run(case, functools.partial(make_role, pipeline)):
            print(getattr(cases, f"{kind}_line")(f"{pipeline}@{case.capacity >> 20}", *found))


if __name__ == "__main__":
    main()
