"""Group offloading: the weights that come and leave, compared with diffusers' own hooks.

The hooks run on real modules of full size under fake tensors, and on small ones. What they move is noted.
"""

from __future__ import annotations

import ast
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
if not RECORDING.exists():
    pytest.skip("the sources are not here", allow_module_level=True)
if int(diffusers.__version__.split(".")[1]) < 42:
    pytest.skip("groups are those of diffusers 0.42", allow_module_level=True)
sys.path.insert(0, str(RECORDING))

from diffusers.hooks import apply_group_offloading, group_offloading, layerwise_casting
from errors import refused
from modules import MODULES, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_vaes import diffusers_vae

from vaemem import _core, plan_pipeline, predict_pipeline
from vaemem._script import write_script, write_steps
from vaemem.pipelines import pipeline_parts
from vaemem.pipelines.components import PIPELINES, weights_of
from vaemem.pipelines.offload_kinds import GroupOffload
from vaemem.pipelines.pipeline_parts import Part, parts_of
from vaemem.pipelines.recipe import casting_steps, placing_steps
from vaemem.pipelines.recorded_modules import Weight
from vaemem.pipelines.storage import stored
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.held_tensors import arch_key
from vaemem.prediction.offloaded_weights import VAE_BLOCKS, block_groups, leaf_groups, pass_vae, tie

STREAM = torch.cpu.Stream()  # with one method more: nothing overlaps on a CPU
STREAM.synchronize = lambda: None


LEAF = GroupOffload("leaf_level")
BLOCK, BLOCKS = (GroupOffload("block_level", count) for count in (1, 3))


class Watched:
    """Notes the bytes of each tensor that the hooks bring, and of each group that they take away."""

    def __init__(self, monkeypatch):
        self.seen, self.there, self.monkeypatch = [], set(), monkeypatch
        group = group_offloading.ModuleGroup

        def transfer(this, tensor, source, stream, real=group._transfer_tensor_to_device):
            real(this, tensor, source, stream)
            if (id(this), id(tensor)) not in self.there:  # a group without blocks names its parameters twice
                self.there.add((id(this), id(tensor)))
                self.seen.append(("come", tensor.nbytes))

        def offload(this):  # both devices are the CPU, so nothing would move; fake tensors refuse to try
            tensors = {key for key in self.there if key[0] == id(this)}
            self.there -= tensors
            if tensors:  # none of them leaves when its hook is set
                self.seen.append(("leave", len(tensors)))

        monkeypatch.setattr(group, "_transfer_tensor_to_device", transfer)
        monkeypatch.setattr(group, "offload_", offload)

    def run_again(self, module, offload, call):
        """Note the second call with a stream, on which diffusers refuses the CPU."""
        group = group_offloading.ModuleGroup
        self.monkeypatch.setattr(group, "_to_cpu", staticmethod(lambda tensor, _: tensor.data))
        self.monkeypatch.setattr(group, "_pinned_memory_tensors", lambda this: nullcontext(this.cpu_param_dict))
        kind = group_offloading.GroupOffloadingType(offload.offload_type)
        config = group_offloading.GroupOffloadingConfig(
            torch.device("cpu"), torch.device("cpu"), kind, False, False, False, offload.num_blocks_per_group,
            stream=STREAM, block_modules=getattr(module, "_group_offload_block_modules", None),
        )  # fmt: skip
        group_offloading._apply_group_offloading(module, config)
        with torch.no_grad():
            call(module)
            self.seen.clear()
            call(module)
        return self.seen

    def run(self, module, offload, call):
        settings = {name: value for name, value in offload.settings.items() if name != "exclude_modules"}
        apply_group_offloading(module, torch.device("cpu"), torch.device("cpu"), **settings)
        with torch.no_grad():
            call(module)
        return self.seen


def predicted(trace):
    """The same of a trace."""
    seen, ours, left = [], set(), 0
    for op, number, size, name in [*trace.steps, ("end", 0, 0, "")]:
        if op == "give" and number in ours:
            left += 1
            continue
        if left and op != "give":
            seen.append(("leave", left))
            left = 0
        if op == "take" and name.startswith("weights of "):
            ours.add(number)
            seen.append(("come", size))
    return seen


def same(ours, real):
    """Groups that leave with nothing in between are one in a trace."""

    def joined(seen):
        found = []
        for kind, number in seen:
            if found and kind == "leave" == found[-1][0]:
                number += found.pop()[1]
            found.append((kind, number))
        return found

    ours, real = joined(ours), joined(real)
    for i, (a, b) in enumerate(zip(ours, real, strict=False)):
        assert a == b, (i, ours[max(0, i - 3) : i + 3], real[max(0, i - 3) : i + 3])
    assert len(ours) == len(real) > 3


COMPONENTS = {
    component: (name, role)
    for name, pipeline in PIPELINES.items()
    for role, component in {**pipeline.parts, **pipeline.optional}.items()
    # Its recording calls the checker's submodules, but the pipeline calls the checker.
    if role != "vae" and component != "safety-checker" and not pipeline.recording
}


# With a stream: the second call, which prefetches. From a disk no buffers come twice, which are not watched here.
STREAMED = [
    GroupOffload("leaf_level", use_stream=True),
    GroupOffload("block_level", 1, offload_to_disk_path="a folder", use_stream=True),
]


@pytest.mark.one_in(30)
@pytest.mark.parametrize("offload", [LEAF, BLOCK, BLOCKS, *STREAMED], ids=str)
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_of_full_size_moves_what_the_hooks_move(component, offload, monkeypatch):
    """Each tensor in order, and how many leave together, during a call."""
    module, (name, role) = MODULES[component], COMPONENTS[component]
    # In float16 T5 converts weights while it is made, which fake tensors cannot.
    dtype, sizes = "bfloat16" if "t5" in component else PIPELINES[name].dtype, module.checks[0]
    part = next(one for one in parts_of(PIPELINES[name], dtype, {role: dtype}, 42) if one.role == role)
    trace = part.trace(find_gpu("H100"), offload, offload.use_stream, **sizes)
    # So do transformers; they are made before. `to_empty` would untie T5's embeddings.
    early = make(module, getattr(torch, dtype)) if "transformer" in component else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = module.call(sizes, getattr(torch, dtype))
        built = early.to_empty(device="cpu") if early else make(module, getattr(torch, dtype), "cpu")
        run = module.run or (lambda it, *args, **kwargs: it(*args, **kwargs))
        watched = Watched(monkeypatch)
        watch = watched.run_again if offload.use_stream else watched.run
        real = watch(built, offload, lambda it: run(it, *args, **kwargs))
    same(predicted(trace), real)
    assert trace.sent == sum(size for kind, size in real if kind == "come")


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("T5EncoderModel", "T5Config", {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}),
        ("Qwen3ForCausalLM", "Qwen3Config", {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}),
    ],
)  # fmt: skip
def test_accelerate_sends_shared_weights_for_each_call(model, config, settings, monkeypatch):
    """The modules that get weights, and their bytes, are those of `tie`."""
    import transformers
    from accelerate import cpu_offload, hooks

    built = getattr(transformers, model)(getattr(transformers, config)(vocab_size=100, **settings)).eval()
    names, sent = {id(module): name for name, module in built.named_modules()}, {}
    owners = {}
    for name, tensor in built.named_parameters():
        owners.setdefault(name.rpartition(".")[0], []).append(tensor.nbytes)

    def watch(module, name, device, value=None, *args, real=hooks.set_module_tensor_to_device, **kwargs):
        if value is not None and str(device) != "meta":
            sent.setdefault(names[id(module)], []).append(value.nbytes)
        return real(module, name, device, value, *args, **kwargs)

    monkeypatch.setattr(hooks, "set_module_tensor_to_device", watch)
    cpu_offload(built, torch.device("cpu"))
    sent.clear()
    with torch.no_grad():
        built(torch.tensor([[1, 2, 3]]))
    called = {name: sizes for name, sizes in tie(owners).items() if name in sent}
    assert called == {name: sizes for name, sizes in sent.items() if sum(sizes)} and len(tie(owners)) > len(owners)


SMALL = {**_core.models()["sdxl"], "name": "small", "block_out_channels": (8, 16, 16), "norm_num_groups": 4}


@pytest.mark.parametrize("op", ["encode", "decode"])
@pytest.mark.parametrize("offload", [LEAF, BLOCK, GroupOffload("block_level", 2)], ids=str)
@pytest.mark.parametrize("tile", [0, 32])
@pytest.mark.parametrize("arch", [SMALL, {**SMALL, "use_quant_conv": False, "use_post_quant_conv": False}])
def test_a_vae_moves_what_the_hooks_move(arch, op, offload, tile, monkeypatch):
    vae = diffusers_vae(arch, torch.float32, "cpu")
    vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size = bool(tile), tile, tile // 4
    x = torch.zeros(1, *((4, 16, 12) if op == "decode" else (3, 64, 48)))
    real = Watched(monkeypatch).run(vae, offload, lambda it: getattr(it, op)(x))
    names = [name for name, *_ in _core.Trace.parameters(arch, "diffusers")]
    blocks = offload.num_blocks_per_group
    groups = tuple(block_groups(names, blocks, VAE_BLOCKS) if blocks else leaf_groups(names))
    passing = pass_vae(arch_key(arch), "float32", None, groups)
    trace = _core.Trace.vae(arch, "diffusers", op, "float32", 64, 48, 1, tile, passing=passing)
    same(predicted(trace), real)
    assert not any(step[0] == "empty" for step in trace.steps)


def test_a_vae_without_blocks_cannot_decode():
    """AutoencoderKLFlux2's only group comes for a call of the whole VAE, which a decode is not."""
    vae = diffusers_vae(_core.models()["flux2"], torch.float32)
    apply_group_offloading(vae, "cpu", "meta", num_blocks_per_group=1)
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        vae.decode(torch.zeros(1, 32, 8, 8))
    with refused("offload", "'block_level 1'"):
        predict_pipeline("flux2-klein", 512, 512, gpu="T4", offload="block_level")
    assert {name.partition(".")[0] for name in (w.name for w in weights_of("flux2"))} > {"encoder", "decoder"}
    kept = {"offload_type": "block_level", "num_blocks_per_group": 1, "exclude_modules": "vae"}
    assert predict_pipeline("flux2-klein", 512, 512, gpu="RTX 4090", offload=kept).host > 0


@pytest.mark.parametrize("name", ["text_encoder", "unet"])
def test_excluded_modules_stay(name):
    gpu = {"height": 512, "width": 512, "gpu": "RTX 4060"}
    settings = {"offload_type": "block_level", "num_blocks_per_group": 2}
    all_, some = (
        predict_pipeline("sd15", offload=settings | more, **gpu) for more in ({}, {"exclude_modules": [name]})
    )
    part = some.parts[name]
    assert all_.phases[0].name == "encode prompt" and some.phases[0].name == "load"
    assert some.phases[0].weights >= part.nbytes and all_.host - some.host == part.nbytes
    kept = predict_pipeline("sd15", offload=settings, components={name: "float16 kept on cuda"}, **gpu)
    assert [(p.name, p.reserved) for p in kept.phases] == [(p.name, p.reserved) for p in some.phases]


def test_the_denoiser_holds_one_group_at_a_time():
    q = {"height": 512, "width": 512, "gpu": "RTX 3060", "steps": 2}
    found = {o: predict_pipeline("flux", offload=o, **q) for o in ("leaf_level", "block_level", "block_level 4")}
    leaf, block, blocks = (next(p for p in f.phases if p.name == "denoise") for f in found.values())
    part = found["block_level"].parts["transformer"]
    rest, *_, largest = sorted(
        sum(one.bytes for one in part.sent_by(BLOCK) if one.module == group.begins) for group in part.groups(BLOCK)
    )
    assert leaf.weights < block.weights < blocks.weights < part.nbytes
    assert largest <= block.weights <= largest + 2 * rest
    assert leaf.sent == block.sent == blocks.sent == 2 * part.nbytes


@pytest.mark.parametrize(
    ("offload", "names"),
    [
        ("block_level zero", ("offload['num_blocks_per_group']", "'zero'")),
        ("leaf_level 2", ("offload['num_blocks_per_group']", "2")),
        ({"offload_type": "block_level"}, ("offload['num_blocks_per_group']", "None")),
        ({"offload_type": "block"}, ("offload['offload_type']", "'block'")),
        ({"offload_type": "leaf_level", "streams": True}, ("offload", "'streams'")),
        ({"offload_type": "leaf_level", "record_stream": True}, ("offload['record_stream']", "True without it")),
        ({"offload_type": "leaf_level", "use_stream": 1}, ("offload['use_stream']", "1")),
        ({"offload_type": "leaf_level", "exclude_modules": ["unets"]}, ("offload['exclude_modules']", "'unets'")),
    ],
)
def test_what_is_refused(offload, names):
    with refused(*names):
        predict_pipeline("sd15", 512, 512, gpu="T4", offload=offload)


def test_what_other_arguments_refuse():
    with refused("diffusers_version", "'0.33.0'"):
        predict_pipeline("sd15", 512, 512, gpu="T4", offload="leaf_level", diffusers_version="0.33.0")
    ours = {"vae": "vaemem", "vae_memory_limit": "1 GB"}
    with refused("offload", "'leaf_level'"):
        predict_pipeline("sd15", 512, 512, gpu="T4", offload="leaf_level", **ours)
    excluded = {"offload_type": "leaf_level", "exclude_modules": "vae"}
    assert predict_pipeline("sd15", 512, 512, gpu="T4", offload=excluded, **ours).host > 0
    older = plan_pipeline("sd15", 512, 512, gpu="T4", diffusers_version="0.33.0")
    assert not [one for one in older.outcomes if "group" in one.way.name]


def test_recorded_groups_need_as_much():
    """record_stream changes when memory is used again, not the tensors: diffusers' hooks bring and drop the same."""
    plain, recorded = (
        predict_pipeline("flux", 1024, 1024, gpu="RTX 3060", offload={"offload_type": "leaf_level", **settings})
        for settings in ({"use_stream": True}, {"use_stream": True, "record_stream": True})
    )
    assert recorded.phases == plain.phases and recorded.verdict == plain.verdict
    assert sum("record_stream" in note for note in recorded.notes) == 2
    assert not any("record_stream" in note for note in plain.notes)
    assert "record_stream=True" in str(write_steps(placing_steps(recorded.request.group.settings, ["vae"])))


def test_a_disk_replaces_the_hosts_memory():
    settings = {"offload_type": "block_level", "num_blocks_per_group": 1}
    there, disk = (
        predict_pipeline("sd15", 512, 512, gpu="T4", steps=2, offload=settings | more)
        for more in ({}, {"offload_to_disk_path": "weights"})
    )
    assert disk.host == 0 < there.host and disk.peak == there.peak
    (a, b), sent = (one.work(one.phases[-2]) for one in (there, disk)), there.phases[-2].sent
    assert a["link"] == 2 * sent == 2 * b["link"] == 2 * b["disk"] and "disk" not in a


def test_a_stream_prefetches_and_pins():
    """Two groups are on the card at a time, in memory of their own; pinned copies take powers of two."""
    q = {"height": 512, "width": 512, "gpu": "RTX 3060", "steps": 2}
    for way in ("leaf_level", "block_level 1"):
        plain, stream = (predict_pipeline("sd15", offload=way + more, **q) for more in ("", " stream"))
        settings = {"offload_type": way.partition(" ")[0], "use_stream": True, "low_cpu_mem_usage": True}
        settings["num_blocks_per_group"] = 4 if " " in way else None  # diffusers makes it 1
        unpinned = predict_pipeline("sd15", offload=settings, **q)
        assert [p.reserved for p in unpinned.phases] == [p.reserved for p in stream.phases]
        (_, a, _), (_, b, _) = plain.phases, stream.phases
        assert a.weights < b.weights and a.reserved < b.reserved and a.sent == b.sent
        assert plain.work(a)["link"] == 2 * stream.work(b)["link"]
        assert plain.host == unpinned.host < stream.host < 2 * plain.host
        code = write_steps(placing_steps(str(stream.request.group), ["unet"]))
        assert "use_stream=True" in code and ast.parse(code)
    with refused("offload", "'block_level 1 stream'"):
        predict_pipeline("sd15", offload="block_level stream", vae="tiled", **q)
    sdxl = {"height": 1024, "width": 1024, "gpu": "RTX 3060"}
    with refused("offload", "'leaf_level stream'"):  # its VAE would come back in float16
        predict_pipeline("sdxl", offload="leaf_level stream", **sdxl)
    kept = {"offload_type": "leaf_level", "use_stream": True, "exclude_modules": ["vae"]}
    assert predict_pipeline("sdxl", offload=kept, **sdxl).fits
    assert predict_pipeline("sdxl", offload="leaf_level stream", components={"vae": "float16"}, **sdxl).fits
    for way in ("leaf_level stream", "block_level 1 stream"):
        assert str(GroupOffload.read(way)) == way


def test_bitsandbytes_is_refused():
    with refused("offload", "'leaf_level'"):
        predict_pipeline("flux", 512, 512, gpu="T4", offload="leaf_level", components={"transformer": "nf4"})


def test_a_safety_checker_is_moved_too():
    """enable_group_offload takes every component, also one that model offload leaves on the device."""
    found = predict_pipeline(
        "sd15", 512, 512, gpu="RTX 4060", offload="leaf_level", components={"safety_checker": "float16"}
    )
    assert found.phases[0].name != "load" and found.host == sum(part.nbytes for part in found.parts.values())


# ---- layerwise casting ----


CAST = [name for name in MODULES if name.endswith(("-unet", "-transformer", "-controlnet")) and "older" not in name]
CAST += ["clip-l", "openclip-g", "t5-xxl", "qwen3-4b"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("component", CAST)
def test_what_is_stored_in_float8(component):
    """Our code, run on the real module, casts what the prediction stores in float8, and nothing else."""
    name, role = next(
        (name, role) for name, one in PIPELINES.items() for role, part in one.parts.items() if part == component
    )
    pipeline = PIPELINES[name]
    part = next(one for one in parts_of(pipeline, pipeline.dtype, {role: "fp8"}, 42) if one.role == role)
    pipe = SimpleNamespace(**{role: make(MODULES[component], getattr(torch, pipeline.dtype))})
    script = write_script(casting_steps(role, pipeline.dtype))
    exec(script, {"pipe": pipe})
    types = {name: str(tensor.dtype) for name, tensor in getattr(pipe, role).named_parameters()}
    ours = {weight.name for weight in part.weights if weight.type == "fp8"}
    assert ours == {name for name, kind in types.items() if "float8" in kind} != set()
    assert (f"pipe.{role}.enable_layerwise_casting" in script) is not role.startswith("text_encoder")


def test_a_layer_computes_in_the_dtype_of_the_run(monkeypatch):
    """Each cast layer of a real module has its weights in the compute dtype during its call only, as predicted."""
    torch.manual_seed(0)
    config = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    config |= {
        "num_attention_heads": 2,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "axes_dims_rope": (4, 4, 8),
    }
    flux = diffusers.FluxTransformer2DModel(**config).to(torch.bfloat16).eval()
    weights = [(name, tuple(tensor.shape)) for name, tensor in flux.named_parameters()]
    flux.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    held, names = {}, {id(module): name for name, module in flux.named_modules()}
    hook = layerwise_casting.LayerwiseCastingHook

    def watch(this, module, output, real=hook.post_forward):
        held[names[id(module)]] = sum(tensor.nbytes for tensor in module.parameters())
        return real(this, module, output)

    monkeypatch.setattr(hook, "post_forward", watch)
    for module in flux.modules():  # the registry keeps bound methods
        registry = getattr(module, "_diffusers_hook", None)
        for one, reference in zip(registry.hooks.values(), registry._fn_refs, strict=True) if registry else ():
            reference.post_forward = one.post_forward
    half = {"dtype": torch.bfloat16}
    with torch.no_grad():
        flux(torch.zeros(1, 4, 4, **half), torch.zeros(1, 3, 8, **half), torch.zeros(1, 8, **half),
             torch.zeros(1, **half), img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3))  # fmt: skip
    stored_ = tuple(stored(weights, "fp8", "layerwise"))
    part = Part("transformer", "flux-schnell-transformer", "bfloat16", stored_)
    monkeypatch.setattr(pipeline_parts, "weights_of", lambda _: [Weight(*one) for one in weights])
    ours = {module: sum(size for _, size, *_ in made) for module, made in part.working.items()}
    assert ours == held and len(held) > 10
    after = {name for name, tensor in flux.named_parameters() if tensor.dtype is torch.float8_e4m3fn}
    assert after == {weight.name for weight in stored_ if weight.type == "fp8"}


def test_buffers_come_twice_after_the_first_call():
    """As tests/test_any_pipeline.py finds with diffusers' own hooks, for SD 3 (thorough)."""
    pipeline = PIPELINES["sd3"]
    part = next(one for one in parts_of(pipeline, pipeline.dtype, {}, 42) if one.role == "transformer")
    table = next(weight.bytes for weight in part.weights if weight.name == "pos_embed.pos_embed")

    def sent(offload, later):
        return sum(one.bytes for one in part.sent_by(offload, later))

    to_disk = GroupOffload("block_level", 1, "a folder")
    assert sent(BLOCK, False) == sent(to_disk, True) == part.nbytes and sent(BLOCK, True) == part.nbytes + table
    assert sent(LEAF, True) == sent(LEAF, False)
    own = block_groups(["table", "norm.table", "norm.weight"], 1, (), {"table", "norm.table"})
    assert [group.again for group in own] == [("norm.table",)]  # a module's own buffer is moved in place
