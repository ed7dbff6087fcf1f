"""What the C walk of a VAE knows beside memory: FLOPs, and weights that come for each submodule's call, beside
PyTorch's own counter and accelerate's hooks on a small VAE on the CPU."""

from __future__ import annotations

import pytest

from vaemem import _core

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
accelerate = pytest.importorskip("accelerate")

from engine import config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode
from torch_vaes import RELEASE, diffusers_vae, of_config
from traces import assert_same

from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.held_tensors import arch_key
from vaemem.prediction.offloaded_weights import pass_vae
from vaemem.prediction.runtimes import architecture
from vaemem.pytorch import record

MODELS = _core.models()
SMALL = {**MODELS["sdxl"], "name": "small", "block_out_channels": (8, 16, 16), "norm_num_groups": 4}
ODD = {**SMALL, "block_out_channels": (4, 8), "layers_per_block": 1, "use_quant_conv": False}
WHERE = accelerate.utils.modeling


class Watched(TorchDispatchMode):
    """Notes what hooks and convolutions do, in order, and at each weight that comes the bytes of tensors that live."""

    def __init__(self, vae, monkeypatch):
        super().__init__()
        self.seen, self.alive, self.sizes = [], {}, {}
        names = {id(module): name for name, module in vae.named_modules()}
        moves, hooks = WHERE.set_module_tensor_to_device, accelerate.hooks

        def moved(module, name, device, value=None, **rest):
            if value is None:
                self.seen.append(("give", f"{names[id(module)]} [{name}]"))
            else:
                dtype = getattr(module, name).dtype
                there = sum(self.sizes[key] for key, storage in self.alive.items() if not storage.expired())
                size = value.numel() * dtype.itemsize
                self.seen.append(("send", f"{names[id(module)]} [{name}]", size, there))
            self.silent = True
            moves(module, name, device, value, **rest)
            self.silent = False

        monkeypatch.setattr(hooks, "set_module_tensor_to_device", moved)
        monkeypatch.setattr(WHERE, "clear_device_cache", lambda: self.seen.append(("empty",)))
        self.silent = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.silent:
            return out
        if func is torch.ops.aten.convolution.default:
            self.seen.append(("conv", args[0].dtype, args[1].dtype, tuple(args[1].shape)))
        for x in tree_flatten(out)[0]:
            if isinstance(x, torch.Tensor) and not func.is_view:
                storage = x.untyped_storage()
                self.alive[storage._cdata], self.sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


def walked(trace):
    """The same of a trace."""
    seen, names, there, sizes = [], {}, 0, {}
    for op, number, size, name in trace.steps:
        if op == "take" and name.startswith("weights of "):
            names[number] = name.removeprefix("weights of ")
            seen.append(("send", names[number], size, there))
        elif op == "take":
            sizes[number] = size
            there += size
        elif op == "give" and number in names:
            seen.append(("give", names[number]))
        elif op == "give":
            there -= sizes[number]
        elif op == "empty":
            seen.append(("empty",))
        elif op == "conv":
            dtype, _, c, _, _, k, side, *_ = trace.convs[number]
            seen.append(("conv", *[getattr(torch, dtype)] * 2, (k, c, side, side)))
    return seen


@pytest.mark.older
@pytest.mark.parametrize("op, first", [("encode", "float32"), ("decode", "float32"), ("decode", "float16")])
@pytest.mark.parametrize(
    "case",
    [
        (SMALL, 16, 24, 1, 0, False),
        (SMALL, 16, 24, 3, 0, True),
        (SMALL, 80, 48, 2, 32, True),
        (ODD, 20, 12, 2, 8, False),
    ],
)
def test_accelerates_hooks_send_what_the_walk_says(case, op, first, monkeypatch):
    if first != "float32" and RELEASE >= 36:
        pytest.skip("before diffusers 0.36 (make check ONLY=older)")
    arch, height, width, batch, tile, slicing = case
    factor = 2 ** (len(arch["block_out_channels"]) - 1)
    vae = diffusers_vae(arch, torch.float32, "cpu")
    accelerate.cpu_offload(vae, torch.device("cpu"))
    for module in [vae.post_quant_conv, vae.decoder.conv_in, vae.decoder.mid_block] * (first != "float32"):
        module.to(torch.float16)
    vae.use_slicing, vae.use_tiling = slicing, bool(tile)
    vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // factor
    small = arch["latent_channels"], height // factor, width // factor
    dtype = getattr(torch, first)
    x = torch.zeros(batch, *(small if op == "decode" else (3, height, width)), dtype=dtype)
    watched = Watched(vae, monkeypatch)
    with torch.no_grad(), watched:
        vae.decode(x) if op == "decode" else vae.encode(x)
    passing = pass_vae(arch_key(arch), "float32", first)
    trace = _core.Trace.vae(
        arch, "diffusers", op, "float32", height, width, batch, tile, slicing, first=first, passing=passing,
        release=RELEASE,
    )  # fmt: skip
    ours, real = walked(trace), watched.seen
    for i, (a, b) in enumerate(zip(ours, real, strict=False)):
        assert a == b, (i, ours[max(0, i - 4) : i + 2], real[max(0, i - 4) : i + 2])
    assert len(ours) == len(real)
    sent = [event for event in real if event[0] == "send"]
    assert trace.sent == sum(size for _, _, size, _ in sent) and max(there for *_, there in sent) > 1000


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("tile", [0, 32])
def test_accelerates_hooks_on_a_vae_of_videos(op, tile, monkeypatch):
    """The same for these VAEs. Their convolutions are left out, because their filters have five dimensions."""
    arch = architecture(config("qwen"))
    vae = of_config(config("qwen"), torch.float32, "cpu")
    accelerate.cpu_offload(vae, torch.device("cpu"))
    vae.use_tiling, vae.tile_sample_min_height, vae.tile_sample_min_width = bool(tile), tile, tile
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 3 * tile // 4
    x = torch.zeros(1, *((4, 1, 16, 12) if op == "decode" else (3, 1, 64, 48)))
    watched = Watched(vae, monkeypatch)
    with torch.no_grad(), watched:
        getattr(vae, op)(x)
    trace = _core.Trace.vae(
        arch, "diffusers", op, "float32", 64, 48, 1, tile, passing=pass_vae(arch_key(arch), "float32")
    )
    ours, real = ([event[:3] for event in seen if event[0] != "conv"] for seen in (walked(trace), watched.seen))
    assert ours == real and trace.sent == sum(event[2] for event in real if event[0] == "send") > 0


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize(
    "arch, batch, tile", [(MODELS["sdxl"], 1, 0), (MODELS["flux"], 2, 0), (MODELS["flux2"], 1, 0), (ODD, 2, 16)]
)
def test_flops_are_pytorchs_own_count(arch, batch, tile, op):
    factor = 2 ** (len(arch["block_out_channels"]) - 1)
    vae = diffusers_vae(arch, torch.float32)
    vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size = bool(tile), tile, tile // factor
    shape = (arch["latent_channels"], 12, 8) if op == "decode" else (3, 12 * factor, 8 * factor)
    x = torch.empty(batch, *shape, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vae.decode(x) if op == "decode" else vae.encode(x)
    built = _core.Trace.vae(arch, "diffusers", op, "float32", 12 * factor, 8 * factor, batch, tile)
    assert built.flops == counter.get_total_flops() > 1e6


@pytest.mark.parametrize("free_bytes", [0, 1 << 20])
@pytest.mark.parametrize("runtime", ["comfyui", "a1111"])
def test_every_runtime_multiplies_as_much(runtime, free_bytes):
    built = [
        _core.Trace.vae(MODELS["sdxl"], of, "decode", "float16", 256, 256, free_bytes=free_bytes)
        for of in (runtime, "diffusers")
    ]
    assert built[0].flops == built[1].flops


def test_flops_of_any_convolution():
    def flops(*conv):
        trace = _core.Trace()
        trace.conv(("float16", *conv), "x")
        return trace.flops

    assert flops(2, 8, 12, 10, 16, (3, 5), (2, 1), (1, 0), "nchw", (1, 2), 4) == 2 * 2 * 2 * 16 * 15 * 6 * 2
    assert flops(1, 8, 12, 10, 16, 3, 2, 1, "nchw", 1, 2, 1) == 2 * 8 * 8 * 9 * 120  # transposed
    assert flops(1, 8, 12, 10, 16, 3, 1, 1, "nchw", 1, 1, None, 6) == 2 * 8 * 16 * 27 * 6 * 120
    assert flops(1 << 31, 1 << 31, 1, 1, 1 << 31, 1, 1, 0, "nchw") == 2**64 - 1  # or more


@pytest.mark.parametrize("gpu", ["T4", "H200"])
@pytest.mark.parametrize("model, dtype", [("sd15", "float16"), ("flux", "bfloat16")])
def test_the_walk_on_gpus_whose_attention_differs(model, dtype, gpu):
    """Each step and its bytes, beside a recording of the module; and what both make of the allocator."""
    vae, card = diffusers_vae(MODELS[model], getattr(torch, dtype)), find_gpu(gpu)
    z = torch.empty(1, MODELS[model]["latent_channels"], 88, 120, dtype=vae.dtype, device="meta")
    recording = record(vae, z, gpu=gpu, call=lambda vae, z: vae.decode(z).sample)
    walk = _core.Trace.vae(
        MODELS[model], "diffusers", "decode", dtype, 704, 960, sm=card.sm, multiprocessors=card.multiprocessors
    )
    assert_same(walk, recording.trace)
