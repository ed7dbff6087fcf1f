"""Questions for tests/frozen.py: well spread over what the public functions of predictions take, by a seed."""

import random

SHARES = {
    "predict": 1800, "process": 420, "predict_pipeline": 470, "plan_pipeline": 150, "would_fit": 70,
    "predict_largest": 60, "closed_form": 30,
}  # fmt: skip
# The first questions cover VAEs and eight pipelines. The later ones cover every pipeline, way and program.
FIRST, LATER_SHARES = 3000, {"any_pipeline": 1400, "comfyui": 450, "any_plan": 150}
KL = "diffusers invokeai comfyui forge"
UNETS, DITS, OURS = f"{KL} a1111 a1111-medvram", f"{KL} bfl", "diffusers invokeai"
PROGRAMS = {
    **dict.fromkeys(("sd15", "sdxl", "playground-v2.5", "madebyollin/sdxl-vae-fp16-fix"), UNETS.split()),
    **dict.fromkeys(("flux", "sd3", "zimage", "cogview4", "FLUX.1-schnell"), DITS.split()),
    **dict.fromkeys(("flux2", "flux2-small", "qwen-image", "wan2.1"), f"{OURS} comfyui".split()),
    **dict.fromkeys(("wan2.2", "qwen-image-2.1", "hunyuanimage-2.1", "taesd", "taef1", "taef2"), OURS.split()),
}
DTYPES = ["float16", "float16", "bfloat16", "float32", "fp16"]
CARDS = [
    "RTX 3050 Laptop", "RTX 2060", "RTX 4050 Laptop", "RTX 4060", "RTX 3070", "RTX 2080", "RTX 5060", "RTX 3080",
    "2080 Ti", "RTX 3060", "RTX 4070", "RTX 5070", "T4", "RTX 4060 Ti 16GB", "RTX 4080", "RTX 5080", "V100-SXM2-16GB",
    "RTX A4500", "A10G", "L4", "RTX 3090", "RTX 4090", "A30", "RTX 5090", "V100-SXM2-32GB", "A100-SXM4-40GB", "L40S",
    "RTX A6000", "RTX PRO 6000 Blackwell Workstation Edition", "A100 80GB PCIe", "H100 80GB HBM3", "H100 PCIe", "H200",
    "B200", "A100 80GB MIG 3g.40gb", "GTX 1060", "GTX 1650", "GTX 1080 Ti", "Tesla P40", "RX 6600", "RX 7900 XTX",
    "Instinct MI210", "Arc A770", "Arc B580",
]  # fmt: skip
TORCHES = [
    "2.4.1+cu121", "2.5.1", "2.6.0+cu126", "2.7.1", "2.7.1+cu128", "2.8.0", "2.9.1", "2.10.0+cu130", "2.11.0",
    "2.12.0+cu126", "2.13.0", "2.14.0",
]  # fmt: skip
CUDNNS = ["9.1.0", "9.5.1", "9.7.1", "9.8.0", "9.10.2", "9.15.1", "9.19.0", "9.20.0", "9.26.0", "9.28.0"]
CONFS = [
    "expandable_segments:True", "expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:64",
    "roundup_power2_divisions:8", "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "max_split_size_mb:512",
    "max_non_split_rounding_mb:64,max_split_size_mb:256",
]  # fmt: skip
TILES = [None, 128, 256, 384, 512, 512, 768, 1024]
# What is refused, of one question in thirty.
BAD = [
    {"gpu": "RTX 4900"}, {"cudnn_version": "8.9.7"}, {"torch_version": "1.13.1"}, {"memory": "16 MB"}, {"used": "2"},
    {"height": 1028}, {"width": 0}, {"batch": 0}, {"dtype": "int8"}, {"os": "beos"}, {"safe": "perhaps"},
    {"runtime": "mlx"}, {"torch_version": "2.11.0", "gpu": "V100-SXM2-16GB"}, {"batch": 1 << 40}, {"height": 1 << 21},
]  # fmt: skip
ONLY_PREDICT = [
    {"op": "upscale"}, {"protocol": "hot"}, {"cudnn_benchmark": True},
    {"allocator": "garbage_collection_threshold:0.8"}, {"tile": 1000}, {"tile": 64, "op": "decode"},
    {"tile_overlap": 1.0}, {"allocator": "jemalloc"}, {"model": "vqgan"},
]  # fmt: skip
PIPELINES = ["sd15", "sdxl", "flux", "flux-schnell", "zimage-turbo", "flux2", "flux2-klein", "flux2-klein-9b"]
KEPT = ["float16", "bfloat16", "float32", "fp8", "Q8_0", "Q4_K", "Q5_1", "int8", "nf4", "nf4 double", "nf4 on cuda",
        "nf4 from bfloat16", "int8 kept on cuda", "int8 from float16"]  # fmt: skip
OFFLOADS = ["none", "model", "sequential", {"text_encoder": "cpu"}, {"vae": "cpu"}]
CPP = {"offload": ["none", "cond_only", "--clip-on-cpu", "--offload-to-cpu", "freed after use",
                   "--offload-to-cpu --diffusion-fa", "cond_only, VAE direct, tiled"],
       "vae": ["whole", "whole", "direct", "tiled", "direct tiled", "on CPU tiled"]}  # fmt: skip
# Latents of models as diffusers has them: channels, and pixels a side of the image.
LATENTS = {"sd15": (4, 8), "sdxl": (4, 8), "flux": (16, 8), "flux2": (32, 8), "qwen-image": (16, 8), "taesd": (4, 8)}


def some(r, **chances):
    """Of each argument (chance, values) one of its values, or none of them."""
    return {name: r.choice(values) for name, (chance, values) in chances.items() if r.random() < chance}


def sides(r, most, steps=(8, 16, 32, 64)):
    """Height and width: usual ones, or multiples of one of these steps."""
    step = r.choice(steps)
    usual = [(n, n) for n in (256, 512, 768, 1024, 1024, 1536, 2048)] + [(832, 1216), (1344, 768)]
    free = [r.randrange(step, most + 1, step) for _ in "hw"]
    height, width = r.choice([one for one in usual if max(one) <= most]) if r.random() < 0.4 else free
    return height, width


def about_card(r, by_cpp=False):
    """A card, what is used of it, and versions that mostly run on it."""
    used = ["1 GB", "2.5 GB", "700 MiB", 123456789, "6 GB"]
    given = some(r, gpu=(0.93, CARDS), used=(0.3, used), safe=(0.15, [True]), os=(0.12, ["windows"]))
    given |= some(r, memory=(0.05 if "gpu" in given else 0.7, [f"{n} GB" for n in (4, 6, 8, 10, 12, 16, 24, 48, 80)]))
    if r.random() < 0.06:
        given |= {"gpu": r.choice(["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]), "memory": "16 GB"}
    gpu, torches, cudnns = given.get("gpu", ""), TORCHES, CUDNNS
    if any(new in gpu for new in ("RTX 5", "B200", "PRO", "120")):
        torches = ["2.7.1+cu128", "2.8.0", "2.10.0+cu130", "2.11.0", "2.13.0"]
    if "V100" in gpu or gpu == "sm_70":
        torches = ["2.5.1", "2.6.0+cu126", "2.8.0", "2.12.0+cu126"]
    if by_cpp or any(other in gpu for other in ("Arc", "RX", "MI210")):
        torches = cudnns = []
    return given | some(r, torch_version=(0.55 * bool(torches), torches), cudnn_version=(0.12 * bool(cudnns), cudnns))


def about_vae(r, call):
    model = r.choice([*PROGRAMS])
    runtime = r.choice([*PROGRAMS[model], "diffusers"] if r.random() < 0.97 else [*UNETS.split(), "bfl"])
    op = r.choice(("encode", "decode", "decode") + ("encode_tiled", "decode_tiled") * (runtime != "bfl"))
    tiled, plays_diffusers = op.endswith("_tiled"), runtime in OURS
    whole = (32, 64) if model.startswith(("flux2", "wan2.2", "hunyuan", "qwen-image-2.1")) else (8, 16, 32, 64)
    height, width = sides(r, r.choice((1024, 2048) if tiled else (1024, 2048, 4096)), whole)
    asked = {"model": model, "op": op, "height": height, "width": width} | about_card(r)
    asked |= some(
        r, runtime=(runtime != "diffusers", [runtime]), dtype=(0.75, DTYPES), batch=(0.3, [2, 2, 3, 4, 5, 8, 16]),
        weights_dtype=(0.12 * plays_diffusers, DTYPES), protocol=(0.25, ["cold", "repeated", "kept"]),
        channels_last=(0.08, [True]), allow_tf32=(0.08, [False]),
        allocator=(0.25, ["cudaMallocAsync", *CONFS]),
        tile=(tiled, TILES if max(height, width) <= 1024 else TILES[2:]),
        tile_overlap=(0.3 * tiled * plays_diffusers, [0, 0.125, 0.3, 0.5, 0.75]),
        slicing=(0.15 * plays_diffusers, [True]), workspace=(0.01, [0, 1 << 20, 123456789]),
        calibrate=(0.02, [{"model": "sdxl", "op": "decode", "height": 512, "width": 512, "seconds": 0.25}]),
    )  # fmt: skip
    if tiled and (asked.get("batch", 1) > 3 or asked.get("tile_overlap") == 0.75):  # else it takes many seconds
        asked |= {"height": min(height, 512), "width": min(width, 768), "tile": 256}
    if call == "closed_form":
        asked |= {"op": op.removesuffix("_tiled"), "tile": None, "tile_overlap": None}
    if call == "predict_largest":
        asked = {name: value for name, value in asked.items() if name not in ("height", "width", "calibrate")}
        asked |= {"tile": 1024} if tiled else {}
        asked |= some(r, aspect=(0.4, [0.5, 1.5, 1.7778]), every=(0.2 * (not tiled), [True]), safe=(0.3, [False]))
    return asked


def about_pipeline(r, call):
    height, width = sides(r, r.choice((1024, 1024, 2048)), (16, 64, 64, 64, 64))
    plans, by_cpp = call == "plan_pipeline", r.random() < 0.18
    name, asked = r.choice(PIPELINES[:5] if by_cpp else PIPELINES), about_card(r, by_cpp)
    dtypes = ["bfloat16", "float16" if name in ("sd15", "sdxl") else "float32"]
    asked |= {"pipeline": name, "height": height, "width": width} | some(
        r, batch=(0.25, [2, 3, 4]), guidance=(0.2, [False]), steps=(0.2, [1, 4, 20, 30]),
        prompt_tokens=(0.25, [1, 40, 77, 120, 256, 512]), dtype=(0.25 * (not by_cpp), dtypes),
        image=(0.15 * (not by_cpp and "flux2" not in name), [True]),
    )  # fmt: skip
    roles = ["unet" if name in ("sd15", "sdxl") else "transformer", "text_encoder", "text_encoder_2", "vae"]
    known = [*roles[:2], *roles[2:3] * (name in ("sdxl", "flux", "flux-schnell"))]
    kept = ["Q8_0", "Q4_K", "Q2_K", "6.8 GiB"] if by_cpp else KEPT
    parts = {role: r.choice(kept) for role in known if r.random() < 0.4} if r.random() < 0.6 else {}
    if not by_cpp:
        parts |= some(r, vae=(0.1, ["float16", "float32"]), safety_checker=(0.4 * (name == "sd15"), ["float16"]))
        parts |= some(r, text_encoder=(0.05, [None]))
    asked |= {"components": parts} if parts else {}
    if plans:
        asked |= some(
            r, types=(0.2, ["Q8_0", ["nf4", None], ["Q4_K"]]), time_limit=(0.15, [30.0, 200.0]),
            link=(0.2, ["PCIe 4.0 x16"]), host_memory=(0.3, ["8 GB", "16 GB", "32 GB"]),
            flash=(0.4 * by_cpp, [True]), cores=(0.1, [4, 16]),
        )  # fmt: skip
        if r.random() < 0.08:
            only = {"pipeline": name, "height": height, "width": width, "memory": "16 GB", "runtime": "mlx"}
            return only | some(r, cache_limit=(0.5, ["1 GB"]))
        return asked | ({"runtime": "sd.cpp"} if by_cpp else {})
    if by_cpp:
        return asked | {"runtime": "sd.cpp"} | some(r, **{name: (0.8, values) for name, values in CPP.items()})
    ways = some(r, offload=(0.7, [*OFFLOADS[:3], *OFFLOADS]), vae=(0.5, ["tiled", "tiled 512", "sliced", "vaemem"]))
    return asked | ways | ({"vae_memory_limit": r.choice(["1 GB", "3 GB"])} if ways.get("vae") == "vaemem" else {})


def about_process(r, call):
    """Models that are loaded, called and dropped, on a card that may be too small; what was refused is gone on from."""
    steps, held = [], []
    for model in r.sample([*LATENTS], r.choice((1, 2, 2, 3))):
        runtime = r.choice([one for one in PROGRAMS[model] if one not in ("invokeai", "a1111-medvram")])
        dtype, vae, (channels, factor) = r.choice(DTYPES[:4]), f"vae{len(steps)}", LATENTS[model]
        host, packed = runtime in ("comfyui", "forge"), model == "flux2" and runtime == "comfyui"
        options = {} if host else some(r, channels_last=(0.1, [True]))
        steps.append([vae, "load", [model, dtype, runtime], options])
        for i in range(r.randint(1, 4)):
            height, width = (side // 64 * 64 + 64 for side in sides(r, 1400))
            op, n, x, y = r.choice(("encode", "decode", "decode")), r.choice((1, 1, 1, 2, 4)), f"x{len(steps)}", f"y{i}"
            if packed:
                channels, factor = 128, 16
            shape = [n, 3, height, width] if op == "encode" else [n, channels, height // factor, width // factor]
            steps.append([x, "tensor", [shape, dtype], {"host": True} if host else {}])
            tile = some(r, tile=(0.2 * (runtime != "bfl"), [256, 512]), slicing=(0.1, [True]))
            steps += [["", "reset_peak", [], {}]] * (r.random() < 0.3) + [[y, op, [f"${vae}", f"${x}"], tile]]
            if op == "encode" and runtime in ("diffusers", "a1111"):
                steps += [["z", "sample", [f"${y}"], {}], ["", "elementwise", ["$z"], {}], ["", "drop", ["$z"], {}]]
            steps += [["", "drop", [f"${one}"], {}] for one in (x, y) if r.random() < 0.7]
            if r.random() < 0.4:
                held.append(f"held{len(steps)}")
                steps.append([held[-1], "hold", [held[-1], r.randrange(1, r.choice((1 << 20, 1 << 31)))], {}])
            if held and r.random() < 0.4:
                steps.append(["", "release", [[f"${held.pop()}"]], {}])
            if not host and r.random() < 0.25:
                dtype = r.choice(DTYPES[:4])
                steps.append(["", "convert", [f"${vae}", dtype], {}])
            steps += [["", "empty_cache", [], {}]] * (r.random() < 0.3)
        steps += [["", "drop", [f"${vae}"], {}]] * (r.random() < 0.5)
    given = {name: value for name, value in about_card(r).items() if name not in ("memory", "os", "safe")}
    settings = some(r, total_memory=(0.6, [n << 28 for n in (4, 8, 12, 16, 24, 32, 48)]), history=(1, [True, False]))
    if "total_memory" in settings:
        settings |= some(r, memory_fraction=(0.1, [0.7]), garbage_collection_threshold=(0.1, [0.6]))
    return given | {"steps": steps, "settings": settings} | some(r, conf=(0.5, ["backend:cudaMallocAsync", *CONFS]))


EVERY = [
    "sd15", "sd15-controlnet", "sd21", "sdxl", "sdxl-controlnet", "sdxl-refiner", "sd3", "sd35-medium", "sd35-large",
    "pixart-sigma", "flux", "flux-schnell", "flux-kontext", "flux-fill", "chroma", "qwen-image", "qwen-image-edit",
    "zimage-turbo", "flux2", "flux2-klein", "flux2-klein-9b", "wan-1.3b", "wan-14b",
]  # fmt: skip
SCHEMES = [
    "fp8", "Q8_0", "Q4_K", "Q6_K", "nf4", "nf4 double", "nf4 on cuda", "nf4 from bfloat16", "int8", "int8 from float16",
    "int8 kept on cuda", "int8wo", "int8dq", "int4wo", "float8wo", "float8dq", "qint8", "qfloat8", "qint4",
]  # fmt: skip
GROUPS = [
    "block_level", "block_level 1", "block_level 4", "leaf_level", "leaf_level stream", "block_level 1 stream",
    {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
    {"offload_type": "block_level", "num_blocks_per_group": 2, "exclude_modules": ["vae"]},
    {"offload_type": "leaf_level", "offload_to_disk_path": "offloaded"},
]  # fmt: skip
BEGIN = ["sd15", "sd21", "sdxl", "sd3", "sd35-medium", "sd35-large", "flux", "flux-schnell"]
TWO_ENCODERS = ["sdxl", "sdxl-controlnet", "flux", "flux-schnell", "flux-kontext", "flux-fill"]
LORAS = [{"rank": 16}, {"rank": 64, "fused": True}, [{"rank": 8}, {"rank": 32}]]
WORKFLOWS = ["sd15", "sdxl", "flux", "flux-schnell", "qwen-image", "zimage-turbo"]


def about_any_pipeline(r, call):
    """Every pipeline of diffusers, with every kind of offloading, storage and call."""
    name = r.choice(EVERY)
    is_video, plans = name.startswith("wan"), call == "any_plan"
    height, width = (480, 832) if is_video else sides(r, r.choice((1024, 1024, 1536)), (32, 64, 64))
    asked = about_card(r) | {"pipeline": name, "height": height, "width": width}
    asked |= {"frames": r.choice((1, 17, 33, 81))} if is_video else some(r, batch=(0.25, [2, 3, 4, 8]))
    begins, is_old = name in BEGIN, name in PIPELINES
    image, versions = [True, [512, 512], [512, 768]], ["0.36.0", "0.39.0", "0.42.0"]
    asked |= some(
        r, guidance=(0.25, [True, False]), steps=(0.25, [1, 2, 4, 20]), prompt_tokens=(0.3, [1, 40, 77, 150, 300, 512]),
        dtype=(0.1, DTYPES), image=(0.35 * begins + 0.02, image), lora=(0.2 * begins + 0.02, LORAS),
        diffusers_version=(0.2 * is_old + 0.01, versions),
    )  # fmt: skip
    roles = ["unet" if name.startswith(("sd15", "sd21", "sdxl")) else "transformer", "text_encoder"]
    roles += ["text_encoder_2"] * (name in TWO_ENCODERS or name.startswith("sd3"))
    roles += ["text_encoder_3"] * name.startswith("sd3") + ["controlnet"] * name.endswith("controlnet")
    parts = {role: r.choice(SCHEMES) for role in r.sample(roles, r.choice((1, 1, 2)))} if r.random() < 0.45 else {}
    parts |= some(r, vae=(0.1, ["float16", "float32"]), safety_checker=(0.3 * (name == "sd15"), ["float16"]))
    asked |= {"components": parts} if parts else {}
    if plans:
        return asked | some(
            r, types=(0.3, ["Q8_0", ["nf4", None], "int8wo"]), host_memory=(0.5, ["8 GB", "16 GB", "32 GB", "64 GB"]),
            time_limit=(0.1, [60.0]), runtime=(0.2 * (name in WORKFLOWS), ["comfyui"]),
        )  # fmt: skip
    places = ["none", "model", "sequential", {"text_encoder": "cpu"}, {"vae": "cpu"}, *GROUPS]
    ways = some(r, offload=(0.8, places), vae=(0.5, ["tiled", "tiled 512", "tiled 256", "sliced", "vaemem"]))
    return asked | ways | ({"vae_memory_limit": r.choice(["1 GB", "3 GB"])} if ways.get("vae") == "vaemem" else {})


def about_comfyui(r, call):
    """ComfyUI's workflows, with each option of its memory manager and each node for the decode."""
    height, width = sides(r, r.choice((1024, 1536, 2048)), (64,))
    asked = about_card(r) | {"pipeline": r.choice(WORKFLOWS), "height": height, "width": width, "runtime": "comfyui"}
    return asked | some(
        r, offload=(0.5, ["--disable-dynamic-vram", "--novram", "--disable-dynamic-vram --disable-smart-memory"]),
        steps=(0.2, [1, 4, 20]), vae=(0.4, ["tiled", "tiled 256", "tiled 1024"]), batch=(0.25, [2, 4]),
        guidance=(0.25, [True, False]), prompt_tokens=(0.3, [40, 77, 150, 300]),
    )  # fmt: skip


def later(r):
    """One of the later questions: a call of `predict_pipeline` or of `plan_pipeline`."""
    (kind,) = r.choices([*LATER_SHARES], [*LATER_SHARES.values()])
    asked = about_comfyui(r, kind) if kind == "comfyui" else about_any_pipeline(r, kind)
    return {"call": "plan_pipeline" if kind == "any_plan" else "predict_pipeline"} | asked


def questions(count, seed):
    """Return `count` questions as plain JSON. Each call has its share, and each question its own random numbers."""
    made = []
    for number in range(count):
        r = random.Random(f"{seed} {number}")
        if number >= FIRST:
            made.append(later(r))
            continue
        (call,) = r.choices([*SHARES], [*SHARES.values()])
        ask = {"process": about_process, "predict_pipeline": about_pipeline, "plan_pipeline": about_pipeline}
        made.append({"call": call} | ask.get(call, about_vae)(r, call))
        if r.random() < 0.03 and call != "process":
            made[-1] |= r.choice(BAD + ONLY_PREDICT * (call == "predict"))
    return made
