"""The lines of Python that run a pipeline of diffusers in one of a plan's ways.

A script is a list of steps (`vaemem._script`), and `vaemem.pytorch.apply` runs the same steps on a pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem._common import DTYPES, distinct, letters, meant
from vaemem._script import Call, Identifier, Step, call, write_script
from vaemem.engine.configs import config_of
from vaemem.pipelines.components import VAE_STRIDE, Pipeline, is_vae
from vaemem.pipelines.lora import Lora
from vaemem.pipelines.offload_kinds import GroupOffload
from vaemem.pipelines.pipeline_parts import PLACES, SPELT_TYPES, SPOKEN, UNPACKED, WEIGHT_TYPES, is_from_a_file
from vaemem.pipelines.quantising import BITSANDBYTES, QUANTO, SCHEMES, SIXTEEN_BITS
from vaemem.pipelines.recorded_modules import load_program
from vaemem.pipelines.storage import GGML, MIXTURES
from vaemem.prediction.default_dtypes import FIXED
from vaemem.prediction.runtimes import LAST_DIFFUSERS, architecture

_TORCHAO = "torchao.quantization"


def _as_type(dtype: str) -> Identifier:
    return Identifier(f"torch.{dtype}")


def vae_steps(vae: str, limit: int | str | None = None, class_name: str = "AutoencoderKL") -> list[Step]:
    """Return the steps that set how a pipeline's VAE runs: the argument `vae` of `vaemem.predict_pipeline`. class_name:
    the VAE's.

    Examples
    --------
    >>> from vaemem._script import write_steps
    >>> print(write_steps(vae_steps("tiled 256")))
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size = 256
    pipe.vae.tile_latent_min_size = 32
    """
    if vae.endswith("sliced"):
        return [*vae_steps(vae.removesuffix("sliced").removesuffix(" and ")), call("pipe.vae.enable_slicing")]
    how, _, side = vae.partition(" ")
    if how == "vaemem":
        does = Identifier(f"{class_name}.from_module", "vaemem.pytorch")
        return [Step(Call(does, (Identifier("pipe.vae"),), {"memory_limit": limit}), "pipe.vae")]
    if how != "tiled" or not side:
        return [call("pipe.vae.enable_tiling")] * (how == "tiled")
    pixels, stride = int(side), 3 * int(side) // 4
    if class_name in ("AutoencoderKLQwenImage", "AutoencoderKLWan"):  # their tiles share a quarter, as AutoencoderKL's
        return [call("pipe.vae.enable_tiling", pixels, pixels, stride, stride)]
    return [
        call("pipe.vae.enable_tiling"), Step(pixels, "pipe.vae.tile_sample_min_size"),
        Step(pixels // VAE_STRIDE, "pipe.vae.tile_latent_min_size"),
    ]  # fmt: skip


def hires_steps(first: tuple[int, int], height: int, width: int, offload: Any) -> list[Step]:
    """Return the steps that make a second pipeline of a first one's components, for a hires fix.

    Examples
    --------
    >>> from vaemem._script import write_steps
    >>> print(write_steps(hires_steps((512, 768), 1024, 1536, "none")))
    later = AutoPipelineForImage2Image.from_pipe(pipe)
    # image = pipe(prompt, height=512, width=768).images[0].resize((1536, 1024))
    # image = later(prompt, image=image).images[0]
    """
    made = Call(Identifier("AutoPipelineForImage2Image.from_pipe", "diffusers"), (Identifier("pipe"),))
    one = f"pipe(prompt, height={first[0]}, width={first[1]}).images[0].resize(({width}, {height}))"
    return [
        Step(made, "later"), *[call("later.enable_model_cpu_offload")] * (offload == "model"),
        Step(note=f"image = {one}"), Step(note="image = later(prompt, image=image).images[0]"),
    ]  # fmt: skip


def roles_on_cpu(offload: str | Mapping[str, Any]) -> list[str]:
    """Return the components that an `offload` of `vaemem.predict_pipeline` leaves on the CPU."""
    if not isinstance(offload, Mapping) or GroupOffload.read(offload):
        return []
    return [role for role, place in offload.items() if place == "cpu"]


def describe_stay(roles: Sequence[str]) -> str:
    """Say that components stay on the CPU.

    Examples
    --------
    >>> describe_stay(["text_encoder"])
    'text_encoder stays on the CPU'
    """
    return f"{' and '.join(roles)} stay{'s' * (len(roles) == 1)} on the CPU"


def placing_steps(offload: str | Mapping[str, Any], roles: Iterable[str], device: str = "cuda") -> list[Step]:
    """Return the steps that offload a pipeline, or put its components in place.

    Examples
    --------
    >>> from vaemem._script import write_steps
    >>> print(write_steps(placing_steps("block_level 2", ["unet", "vae"])))
    pipe.enable_group_offload(torch.device("cuda"), offload_type="block_level", num_blocks_per_group=2)
    """
    if group := GroupOffload.read(offload):
        return [call("pipe.enable_group_offload", Call(Identifier("torch.device"), (device,)), **group.settings)]
    if on_cpu := roles_on_cpu(offload):
        note = f"{describe_stay(on_cpu)}: pass pipe.encode_prompt's embeddings to the pipeline"
        places = dict.fromkeys(on_cpu, "cpu") | {role: device for role in roles if role not in on_cpu}
        return [Step(note=note), *(call(f"pipe.{role}.to", place) for role, place in places.items())]
    if offload == "none" or isinstance(offload, Mapping):
        return [call("pipe.to", device)]
    return [call(f"pipe.enable_{offload}_cpu_offload", **({} if device == "cuda" else {"device": device}))]


def casting_steps(role: str, dtype: str) -> list[Step]:
    """Return the steps that store a component in float8 and cast each layer for its call. The class of a text encoder
    has no method for it; its embeddings stay.

    Examples
    --------
    >>> from vaemem._script import write_steps
    >>> print(write_steps(casting_steps("unet", "float16")))
    pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float16)
    """
    types = _as_type("float8_e4m3fn"), _as_type(dtype)
    if not role.startswith("text_encoder"):
        return [call(f"pipe.{role}.enable_layerwise_casting", *types)]
    does = Identifier("apply_layerwise_casting", "diffusers.hooks")
    return [call(does, Identifier(f"pipe.{role}"), *types, skip_modules_classes=(Identifier("torch.nn.Embedding"),))]


def dtype_keyword(release: int) -> str:
    """Return the argument of a pipeline's ``from_pretrained`` for its dtype, by the release of diffusers."""
    return "dtype" if release >= 40 else "torch_dtype"


def quantising_steps(role: str, kind: str) -> list[Step]:
    """Return the steps by which torchao's or quanto's own function quantises a component where it is.

    Examples
    --------
    >>> from vaemem._script import write_steps
    >>> print(write_steps(quantising_steps("unet", "int8wo")))
    quantize_(pipe.unet, Int8WeightOnlyConfig())
    """
    module, quanto = Identifier(f"pipe.{role}"), "optimum.quanto"
    if kind in QUANTO:
        made = call(Identifier("quantize", quanto), module, weights=Identifier(kind, quanto))
        return [made, call(Identifier("freeze", quanto), module)]
    return [call(Identifier("quantize_", _TORCHAO), module, _torchao_config(kind))]


def _torchao_config(kind: str) -> Call:
    return Call(Identifier(SCHEMES[kind].settings.removesuffix("()"), _TORCHAO))


class _Wish(NamedTuple):
    """An item of the argument `components`, as `parts_of` reads it: a type with its place and source, or a file. file:
    its path, or "none" for no component."""

    kind: str
    file: str
    place: str = PLACES[0]
    is_from: bool = False
    is_direct: bool = False

    @classmethod
    def read(cls, given: Any) -> _Wish:
        name = "none" if given is None else os.fspath(given)
        if _is_file(given, name):
            return cls("", name)
        spoken = SPOKEN.fullmatch(name)
        name, direct, source, place = spoken.group("type", "direct", "source", "place") if spoken else (name, *[""] * 3)
        if _is_file(name, name):
            return cls("", name, (place or PLACES[0]).lower())
        packed = next((type for type in (*GGML, *MIXTURES) if letters(type) == letters(name)), "")
        kind = packed or meant("components", name, WEIGHT_TYPES, SPELT_TYPES)
        place = (place or PLACES[bool(source) and kind in BITSANDBYTES]).lower()
        is_direct = bool(direct) or (kind in SIXTEEN_BITS and place != PLACES[0])
        return cls(kind, "", place, bool(source), is_direct)

    @property
    def changes_on_card(self) -> bool:
        """Whether the component is cast or quantised after it came to the card."""
        return self.is_from and self.place != PLACES[0] and self.kind not in BITSANDBYTES

    def changing_steps(self, role: str, dtype: str) -> list[Step]:
        """Return the steps that cast or quantise the loaded component."""
        if self.is_direct:
            return quantising_steps(role, self.kind)
        return casting_steps(role, dtype) if self.kind == "fp8" else []


def _is_file(given: Any, name: str) -> bool:
    """Tell whether an item of `components` is a file, or "none"."""
    ends = ("none", ".safetensors", ".gguf")
    return isinstance(given, os.PathLike) or name.endswith(ends[1:]) or name == ends[0] or os.path.exists(name)


class _Loading:
    """The steps that load a pipeline, filled component by component.

    before, after: steps before and after the pipeline's ``from_pretrained``
    told: arguments of ``from_pretrained``
    types: of components that are loaded in another dtype than the pipeline's
    quantised: settings of libraries, by component
    on_cpu: whether bitsandbytes quantises on the CPU; by default it does on the card
    wishes: items of `components`
    """

    def __init__(self, pipeline: Pipeline, dtype: str, release: int):
        self.pipeline, self.dtype, self.keyword = pipeline, dtype, dtype_keyword(release)
        self.before, self.after = list[Step](), list[Step]()
        self.told, self.types = dict[str, Any](), dict[str, str]()
        self.quantised, self.on_cpu = dict[str, Any](), False
        self.wishes = dict[str, _Wish]()

    def add(self, role: str, given: Any) -> None:
        """Load a component as an item of the argument `components` says."""
        wish = self.wishes[role] = _Wish.read(given)
        kind, file = wish.kind, wish.file
        if file == "none":
            self.told[role] = None
        elif kind in SCHEMES:
            self.quantised |= {} if wish.is_direct else {role: self._configure(role, kind)}
            self.on_cpu |= kind in BITSANDBYTES and not wish.is_from  # a file that is quantised already needs no card
        elif kind in DTYPES:
            self.types |= {} if kind == self.dtype else {role: kind}
        elif kind != "fp8":
            self._load_file(role, file or f"{role} in {kind}.gguf")

    def add_aside(self, role: str, about: str) -> None:
        """Load a component of another repository. about: its class and the repository"""
        class_name, _, repository = about.split()
        named: dict[str, Any] = {self.keyword: _as_type(self.types.pop(role, self.dtype))}
        if settings := self.quantised.pop(role, None):
            named |= {"quantization_config": settings} | ({"device_map": "cpu"} if self.on_cpu else {})
        if role not in self.told:
            self.apart(role, f"{class_name}.from_pretrained", repository, **named)

    def apart(self, role: str, does: str, *given: Any, library: str = "diffusers", **named: Any) -> None:
        """Load a component by itself, and pass it to the pipeline."""
        self.before.append(Step(Call(Identifier(does, library), given, named), role))
        self.told[role] = Identifier(role)

    def _configure(self, role: str, kind: str) -> Call:
        """Return the call that makes the settings of a library of `SCHEMES`."""
        library = "transformers" if role.startswith("text_encoder") else "diffusers"
        scheme = SCHEMES[kind]
        settings = scheme.settings.format(dtype=self.dtype)
        if library == "transformers":
            settings = settings.replace("weights_dtype", "weights")  # QuantoConfig's
        given: tuple[Any, ...] = tuple(map(Identifier, settings.split(", ")))
        if settings.endswith("Config()"):
            given = (_torchao_config(kind),)
        return Call(Identifier(f"{library}.{scheme.config}"), given)

    def _load_file(self, role: str, file: str) -> None:
        """Load a component from a file. A class without a loader for files gets the file's weights afterwards."""
        component, is_packed = {**self.pipeline.parts, **self.pipeline.optional}[role], file.endswith(".gguf")
        if role.startswith("text_encoder") and is_packed:
            encoder = next(does for name, does in UNPACKED.items() if component.startswith(name))
            told: dict[str, Any] = {"gguf_file": file, self.keyword: _as_type(self.dtype)}
            self.apart(role, f"{encoder}.from_pretrained", ".", library="transformers", **told)
            return
        if role.startswith("text_encoder") or not is_from_a_file(component):
            weights = Call(Identifier("load_file", "safetensors.torch"), (file,))
            self.after.append(call(f"pipe.{role}.load_state_dict", weights))
            return
        class_name, named = load_program(component).about.partition(" ")[0], dict[str, Any]()
        named[self.keyword] = _as_type(self.dtype)
        if os.path.isdir(file):
            self.apart(role, f"{class_name}.from_pretrained", file, **named)
            return
        if is_packed:
            config = Identifier("GGUFQuantizationConfig", "diffusers")
            named["quantization_config"] = Call(config, (), {"compute_dtype": _as_type(self.dtype)})
        where = {"config": self.pipeline.repository, "subfolder": role}
        if about := self.pipeline.aside.get(role):
            where = {"config": about.split()[-1]}
        self.apart(role, f"{class_name}.from_single_file", file, **where, **named)

    def place(self, offload: str | Mapping[str, Any], vae: list[Step]) -> list[Step]:
        """Return the steps that cast or quantise the loaded components, set the VAE, and offload or place all, in the
        order that the components' types promise. vae: the steps for the VAE"""
        roles = [role for role in self.pipeline.parts if self.told.get(role, role) is not None]
        wishes = {role: self.wishes[role] for role in roles if role in self.wishes}
        late = [role for role, one in wishes.items() if one.changes_on_card]
        steps = [step for role in wishes if role not in late for step in wishes[role].changing_steps(role, self.dtype)]
        group = GroupOffload.read(offload)
        if offload == "none" or (isinstance(offload, Mapping) and not group):
            # device_map leaves hooks that send the inputs of bitsandbytes' layers to the CPU. Only model and sequential
            # offload remove them.
            steps += [*vae, *[call("pipe.remove_all_hooks")] * self.on_cpu, *placing_steps(offload, roles)]
            return [*steps, *(step for role in late for step in wishes[role].changing_steps(role, self.dtype))]
        early = [role for role, one in wishes.items() if one.place != PLACES[0]]
        early = [role for role in early if self.on_cpu or role not in self.quantised]  # the others are there already
        kept = [role for role, one in wishes.items() if one.place == PLACES[2]]
        steps += [call(f"pipe.{role}.to", "cuda") for role in early]
        for role in early:
            steps += wishes[role].changing_steps(role, self.dtype) if role in late else []
            steps += [call(f"pipe.{role}.to", "cpu")] * (role not in kept)
        steps += [call("pipe.remove_all_hooks")] * bool(group and self.on_cpu)
        if group and kept:
            offload = group.settings | {"exclude_modules": distinct([*group.exclude_modules, *kept])}
        note = f"the plan keeps {' and '.join(kept)} on the card, but diffusers offloads the whole pipeline"
        return [*steps, *vae, *[Step(note=note)] * bool(kept and not group), *placing_steps(offload, roles)]

    def steps(self) -> list[Step]:
        """Return all steps that load the pipeline."""
        named, dtype = self.told, _as_type(self.dtype)
        types = {"default": dtype} | {role: _as_type(type) for role, type in self.types.items()}
        named = {self.keyword: types if self.types else dtype} | named
        before = [*self.before]
        if self.quantised:
            config = Identifier("PipelineQuantizationConfig", "diffusers.quantizers")
            made = Call(config, (), {"quant_mapping": self.quantised})
            before.append(Step(made, "quantization_config"))
            named["quantization_config"] = Identifier("quantization_config")
            wishes = {role: self.wishes[role] for role in self.quantised}
            sent = [role for role, one in wishes.items() if one.kind in BITSANDBYTES and one.place != PLACES[0]]
            sent = [role for role in sent if wishes[role].is_from]
            if self.on_cpu and sent:
                note = f"{' and '.join(sent)}: quantised on the CPU too, and not on the card as the plan says"
                before.append(Step(note=note))
            if self.on_cpu:  # by default bitsandbytes quantises on the card, and its results stay there
                named["device_map"] = "cpu"
        does = Identifier(f"{self.pipeline.class_name}.from_pretrained", "diffusers")
        if self.pipeline.is_modular:  # its components are loaded later
            chosen = {"workflow": self.pipeline.workflow} if self.pipeline.workflow else {}
            made = Call(does, (self.pipeline.repository,), chosen)
            given = {name: value for name, value in named.items() if name not in self.told}
            steps = [Step(made, "pipe"), call("pipe.load_components", **given)]
            return [*before, *steps, *[call("pipe.update_components", **self.told)] * bool(self.told), *self.after]
        made = Call(does, (self.pipeline.repository,), named)
        return [*before, Step(made, "pipe"), *self.after]


def diffusers_steps(
    pipeline: Pipeline, dtype: str, offload: str | Mapping[str, Any] = "none", vae: str = "whole",
    components: Mapping[str, Any] | None = None, vae_memory_limit: int | str | None = None,
    release: int = LAST_DIFFUSERS, loras: Sequence[Lora] = (),
) -> list[Step]:  # fmt: skip
    """Return the steps of `diffusers_code`."""
    given = dict.fromkeys(pipeline.optional, "none") | ({"vae": pipeline.vae_dtype} if pipeline.vae_dtype else {})
    given |= dict(components or {})
    loading = _Loading(pipeline, dtype, release)
    if given.get("vae") == "float16" and pipeline.upcasts:
        half: dict[str, Any] = {loading.keyword: _as_type("float16")}
        loading.apart("vae", "AutoencoderKL.from_pretrained", FIXED, **half)
        given.pop("vae")
    for role, kind in given.items():
        loading.add(role, kind)
    for role, about in pipeline.aside.items():
        if about:  # otherwise it is in the pipeline's own repository
            loading.add_aside(role, about)
    steps = loading.steps()
    for lora in loras:
        steps.append(call("pipe.load_lora_weights", lora.file or "your LoRA"))
        steps += [call("pipe.fuse_lora")] * lora.fused
    component = pipeline.parts["vae"]
    class_name = config_of(architecture(component))["_class_name"] if is_vae(component) else ""
    return [*steps, *loading.place(offload, vae_steps(vae, vae_memory_limit, class_name))]


def diffusers_code(pipeline: Pipeline, dtype: str, **settings: Any) -> str:
    """Return the program for arguments of `vaemem.predict_pipeline`, up to the call of the pipeline.

    Examples
    --------
    >>> from vaemem.pipelines.components import PIPELINES
    >>> print(diffusers_code(PIPELINES["sd15"], "float16", offload="model", vae="tiled 256"))
    import torch
    from diffusers import StableDiffusionPipeline
    <BLANKLINE>
    pipe = StableDiffusionPipeline.from_pretrained(
        "stable-diffusion-v1-5/stable-diffusion-v1-5", dtype=torch.float16, safety_checker=None
    )
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size = 256
    pipe.vae.tile_latent_min_size = 32
    pipe.enable_model_cpu_offload()
    """
    return write_script(diffusers_steps(pipeline, dtype, **settings))
