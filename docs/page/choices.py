"""What the page's form offers, from the package's tables. `make site` writes it to choices.json."""

import json

import vaemem
from vaemem._common import DTYPES, TILED_OPS, shipped
from vaemem.engine.configs import SAMPLE_SIZES
from vaemem.out_of_memory.sizes import COMMON, MADE_SIZES
from vaemem.pipelines.comfyui_run import COMFYUI_OPTIONS
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.offload_kinds import OFFLOADS, TORCH_WAYS
from vaemem.pipelines.pipeline_parts import WEIGHT_TYPES, is_from_a_file
from vaemem.pipelines.pipeline_request import SMALL_TILE
from vaemem.pipelines.storage import RULES
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.gpus import coarse_names, find_gpu, gpu_names
from vaemem.prediction.request import KEPT, TILED_SIDES, VAEArguments, resolve_vae
from vaemem.prediction.runtimes import PROGRAM_NAMES, WAN, shipped_models
from vaemem.sdcpp.running import MODELS, PLANNED_VAES, RESIDENCES, TYPES_BY_WORD

# How the form spells the values of a field, or of one program's field. Others are shown as they are; "" is "as usual".
LABELS = {
    "op": {
        "": "The whole pipeline", "decode": "Only the VAE: decode", "encode": "Only the VAE: encode",
        "decode_tiled": "Only the VAE: decode in tiles", "encode_tiled": "Only the VAE: encode in tiles",
    },
    "runtime": {
        "comfyui": "ComfyUI", "a1111": "A1111", "a1111-medvram": "A1111 with --medvram", "forge": "Forge",
        "invokeai": "InvokeAI", "bfl": "BFL's scripts for FLUX", "sd.cpp": "stable-diffusion.cpp",
    },
    "offload": {"none": "none: all on the card", "model": "model by model", "sequential": "sequential: layer by layer"},
    "comfyui offload": {"none": "no option: ComfyUI decides"},
    "slicing": {"": "all at once", "on": "one by one"},
    "os": {"linux": "Linux", "windows": "Windows"},
}  # fmt: skip

# The form does not offer recordings: reading one takes the page's engine long.
_PLAYED = [name for name, kind in PIPELINES.items() if not kind.recording]


def offer_choices():
    """Return the values of the form's fields. "runs" has them by operation, program and model: a field that is not
    there does not apply. The first value of a list is the default. "with" is a pipeline's VAE."""
    runs = {op: {} for op in ("", *sorted(TILED_OPS, key=lambda op: (len(op), op)))}
    runs[""] = {
        "diffusers": {name: _offer_pipeline(name) for name in _PLAYED}, "sd.cpp": _offer_graphs(),
        "comfyui": {name: _offer_workflow(known) for name, known in WORKFLOWS.items()},
    }  # fmt: skip
    for op in TILED_OPS:
        for program in PROGRAM_NAMES:
            found = {model: _offer_vae(model, op, program) for model in (*shipped_models(), WAN)}
            runs[op][program] = {model: fields for model, fields in found.items() if fields}
    cards = [name.removeprefix("NVIDIA ").removeprefix("GeForce ") for name in gpu_names()]
    cards += [name for maker in ("NVIDIA", "AMD", "Intel") for name in coarse_names(maker)]
    return {
        "runs": {op: {name: models for name, models in programs.items() if models} for op, programs in runs.items()},
        "names": {"pipeline": _names("pipeline"), "vae": _names("vae")},
        "gpus": [[name, f"{round(find_gpu(name).total_memory / (1 << 30))} GB"] for name in cards],
        "sizes": sorted(MADE_SIZES[:COMMON], key=lambda size: (size[0] * size[1], size)),
        "os": list(KEPT), "labels": LABELS,
    }  # fmt: skip


def _names(kind):
    """Return the other names of each pipeline or VAE, as people write them."""
    found = {}
    for entry in json.loads(shipped("models.json"))["models"]:
        if entry.get(kind) and (kind != "vae" or entry[kind] in shipped_models()):
            found.setdefault(entry[kind], []).extend(name for name in entry["names"] if "/" in name and "*" not in name)
    return {name: others for name, others in found.items() if others}


def _offer_pipeline(name):
    known, dtypes = PIPELINES[name], [""]
    for dtype in DTYPES:
        try:
            vaemem.predict_pipeline(name, 256, 256, dtype=dtype, gpu="H200")
        except ValueError:
            continue
        dtypes.append(dtype)
    encoders = ",".join(f"{role}=cpu" for role in known.encoders)
    LABELS["offload"][encoders] = "text encoders on the CPU"
    libraries = [one for one in WEIGHT_TYPES if one not in RULES["diffusers-gguf"].types]
    types = {role: DTYPES if role == "vae" else libraries for role in known.parts}
    if is_from_a_file(known.parts[known.denoiser]):
        types[known.denoiser] = [*libraries, *RULES["diffusers-gguf"].types]
    return {
        "dtype": dtypes, "offload": [*OFFLOADS, encoders], "vae": [*TORCH_WAYS, f"tiled {SMALL_TILE}"], "torch": [],
        "component": {role: ["", *(f"{role}={kind}" for kind in kinds)] for role, kinds in types.items()},
        "with": known.parts["vae"], **_offer_frames(known),
    }  # fmt: skip


def _offer_workflow(known):
    nodes = {} if known.owns_tiles else {"vae": ["whole", "tiled", f"tiled {SMALL_TILE}"]}
    models = {role: ["", f"{role}=fp8"] for role in known.parts if role != "vae"}
    return {"offload": COMFYUI_OPTIONS, **nodes, "torch": [], "component": models, **_offer_frames(known)}


def _offer_frames(known):
    return {"frames": []} if known.frames else {}


def _offer_graphs():
    vaes = ["whole", *(" ".join(words) for words in PLANNED_VAES if words)]
    offloads = ["none", *(name for name, residence in RESIDENCES.items() if residence.flags)]
    return {
        name: {
            "offload": offloads, "vae": vaes,
            "component": {
                role: ["", *(f"{role}={kind}" for kind in TYPES_BY_WORD)] for role in (*known.encoders, known.role)
            },
            "with": PIPELINES[name].parts["vae"],
        }
        for name, known in MODELS.items()
    }  # fmt: skip


def _offer_vae(model, op, program):
    def takes(name, values):
        return [
            value for value in values if _runs(model, op, 1024, 1024, runtime=program, gpu="RTX 3060", **{name: value})
        ]

    if not takes("dtype", [None]):
        return {}
    found = {"dtype": ["", *takes("dtype", DTYPES)], "torch": []}
    if op.endswith("_tiled"):
        sides = {SMALL_TILE, *SAMPLE_SIZES.values(), *(side for sides in TILED_SIDES.values() for _, side in sides)}
        found["tile"] = ["", *map(str, takes("tile", sorted(sides)))]
    return found | ({"slicing": ["", "on"]} if takes("slicing", [True]) else {})


def _runs(*given, **more):
    """Return whether a program runs a VAE so."""
    try:
        return bool(resolve_vae(VAEArguments(*given, **more)).trace)
    except ValueError:
        return False


if __name__ == "__main__":
    print(json.dumps(offer_choices()))
