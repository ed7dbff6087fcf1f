"""Out-of-memory messages, explained: real ones, and those that predicted runs would give."""

import io
import itertools
import json
import re

import pytest
from errors import complains, refused

import vaemem
from vaemem import _core, explain
from vaemem.__main__ import main
from vaemem._common import shipped
from vaemem.out_of_memory import clues, message_kinds, messages
from vaemem.out_of_memory.other_tensors import A_VAE, ATTENTIONS
from vaemem.out_of_memory.sizes import list_sizes, rank_of
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.diffusers_run import PipelineRun
from vaemem.prediction.runtimes import architecture
from vaemem.sdcpp.graphs import graph

GIB, MIB = 1 << 30, 1 << 20
NATIVE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of {total} of"
    " which {free} is free. Including non-PyTorch memory, this process has 7.49 GiB memory in use. Of the allocated"
    " memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved but"
    " unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {wanted} (GPU 0; {total} total capacity; {allocated} already"
    " allocated; {free} free; {reserved} reserved in total by PyTorch)"
)
ASYNC = (
    "Error occurred when executing VAEDecode: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : {allocated}\nRequested               : {requested}\nDevice limit            : {total}\n"
    "Free (according to CUDA): {free}\nPyTorch limit (set by user-supplied memory fraction)\n"
    "                        : 17179869184.00 GiB"
)


def printed(size):
    """As PyTorch prints sizes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def message(p, form=NATIVE):
    """What PyTorch would say where a prediction runs out."""
    process = p.request.start(p._process.workspace, total_memory=max(p.available, 2 * MIB))
    with pytest.raises(vaemem.OutOfMemoryError) as caught:
        p.request.play(process)
    full = caught.value
    sizes = {name: getattr(full, name) for name in ("wanted", "requested", "free", "allocated", "reserved")}
    sizes |= {"total": p.reported_memory, "cached": full.reserved - full.allocated}
    return form.format(**{name: printed(size) for name, size in sizes.items()}), full


def is_that(match, p):
    size = {match.height, match.width} == {p.height, p.width}
    return size and (match.op, match.runtime) == (p.op, p.runtime) and p.dtype in match.dtype


@pytest.mark.parametrize("form", [NATIVE, OLD])
def test_runs_are_found_by_their_messages(form):
    """Of the runs that do not fit, all are among the matches, and nearly all come first where the op is told."""
    asked = itertools.product(
        ("sdxl", "flux", "sd15"), ("decode", "encode"), ((1024, 1024), (2048, 2048), (832, 1216)),
        ("diffusers", "comfyui"), (("RTX 4060", 0), ("RTX 4060", "5 GB"), ("RTX 3060", "9 GB")),
    )  # fmt: skip
    found, first, count = 0, 0, 0
    for model, op, (height, width), runtime, (gpu, used) in asked:
        p = vaemem.predict(model, op, height, width, gpu=gpu, used=used, runtime=runtime)
        if p.on_card is not None:
            continue
        text, full = message(p, form)
        if full.wanted in (2 * MIB, 20 * MIB):
            continue
        e = explain(text, gpu=gpu, op=op, runtime=runtime)
        count += 1
        found += any(is_that(match, p) for match in e.matches)
        first += bool(e.matches) and is_that(e.matches[0], p)
    assert count > 15 and found == count and first >= 0.9 * count, (found, first, count)


@pytest.mark.parametrize(
    ("model", "op", "height", "width", "gpu", "used"),
    [
        ("qwen-image", "decode", 1328, 1328, "RTX 3080", "6 GB"), ("sdxl", "decode", 1440, 2560, "RTX 3080", 0),
        ("flux2", "decode", 1440, 2560, "RTX 4060", "2 GB"), ("sd15", "encode", 2160, 3840, "RTX 4060", "2 GB"),
    ],
)  # fmt: skip
def test_nothing_need_be_told(model, op, height, width, gpu, used):
    """The figures tell the run: what is cached agrees to the printed digits."""
    p = vaemem.predict(model, op, height, width, gpu=gpu, used=used)
    text, _ = message(p)
    first = explain(text).matches[0]
    assert (first.op, first.height, first.width) == (op, height, width) and p.dtype in first.dtype
    assert first.played and first.agrees


@pytest.mark.parametrize("rank", range(5))
def test_sizes_are_solved_for(rank):
    low, high = 7.0e6, 7.2e6
    found = list(list_sizes(rank, [(low, high)]))
    assert len({*found}) == len(found) and all(rank_of(one) == rank for one in found)
    assert all(low <= h * w <= high and h <= w and not (h % 8 or w % 8) for h, w in found)
    assert ((2488, 2864) in found) == (rank == 4) and ((2624, 2688) in found) == (rank == 2)


@pytest.mark.parametrize(
    ("text", "size", "tensor_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 36.00 GiB. GPU 0 has a total capacity of 23.64 GiB", 4096, 36 * GIB),
        ("HIP out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 15.98 GiB", 512, 9 * GIB // 4),
    ],
)
def test_convolutions_that_are_lowered(text, size, tensor_bytes):
    """Older cuDNN takes no convolution of 2^31 elements, and MIOpen may copy any: nine times the input."""
    matches = explain(text, op="decode", model="sdxl", runtime="diffusers").matches
    lowered = [match for match in matches if match.tensor.endswith("[im2col]")]
    assert (size, size, tensor_bytes) in [(one.height, one.width, one.bytes) for one in lowered], matches


def test_the_answer_begins_with_the_run_and_ends_with_what_would_fit():
    p = vaemem.predict("sdxl", "decode", 2048, 2048, gpu="RTX 4060")
    text, full = message(p)
    e = explain("  File diffusers/models/autoencoders\n" + text, gpu="RTX 4060")
    assert is_that(e.matches[0], p) and e.matches[0].played
    assert (e.matches[0].tensor, e.matches[0].bytes) == tuple(p.out_of_memory_at)
    told = e.to_text(width=999)
    assert told.startswith("It was most likely SD1.5, SDXL decode 2048x2048 float32 by diffusers: decoder.up_blocks.2")
    assert "What would have fitted" in told and "vaemem fits sdxl decode_tiled 2048x2048" in str(e)
    data = json.loads(e.to_json())
    assert (
        data["matches"][0]["height"] == 2048 and data["would_fit"] and data["message_bytes"]["requested"] == full.wanted
    )
    assert abs(e.said["cached"] - (full.reserved - full.allocated)) < 16 * MIB  # two decimals of GiB


def test_the_drivers_pool_says_the_tensors_own_size():
    p = vaemem.predict("sdxl", "decode", 2048, 2048, gpu="RTX 3060", used="8 GB", runtime="comfyui")
    assert p.on_card is None
    text, _ = message(p, ASYNC)
    e = explain(text, gpu="RTX 3060")
    assert {match.runtime for match in e.matches} == {"comfyui"}, "whose message it is"
    assert any(is_that(match, p) for match in e.matches)


# Messages as people posted them.
TILE = (
    "Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding.\nError occurred when"
    " executing VAEDecode: Allocation on device 0 would exceed allowed memory. (out of memory) Currently allocated : "
    "4.58 GiB Requested : 256.00 MiB Device limit : 6.00 GiB Free (according to CUDA): 0 bytes PyTorch limit : none"
)
SPILLED = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 27.12 GiB. GPU 0 has a total capacty of 11.99"
    " GiB of which 0 bytes is free. Of the allocated memory 16.16 GiB is allocated by PyTorch, and 144.59 MiB is"
    " reserved by PyTorch but unallocated."
)
SMALL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; 5.45 GiB already allocated; 0 "
    "bytes free; 5.63 GiB reserved in total by PyTorch)"
)


def test_text_as_it_is_pasted():
    """Wrapped, in other cases, with commas, and a log with two messages, of which the first is explained."""
    text, _ = message(vaemem.predict("sdxl", "decode", 2048, 2048, gpu="RTX 4060"))
    want = explain(text, gpu="RTX 4060").matches
    retried = "Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding."
    for pasted in (
        text.replace(" ", "\r\n"), text.upper(), re.sub(r"(\d)\.(\d\d) ", r"\1,\2 ", text), text.replace(" ", "\xa0 "),
        f"{text}\n{retried}\n{text.replace('4.00 GiB', '1.00 GiB')}",
    ):  # fmt: skip
        assert explain(pasted, gpu="RTX 4060").matches == want and want[0].height == 2048


@pytest.mark.parametrize("broken", ["4.0.0 GiB", f"{'9' * 400} GiB", "GiB", "-4 GiB", "1e9 GiB"])
def test_figures_that_are_none(broken):
    for text in (
        f"CUDA out of memory. Tried to allocate {broken}.",
        f"allocating {broken[:-3]}MiB on device 0: cudaMalloc failed",
        f"failed to allocate CUDA0 buffer of size {'9' * 5000}", "DefaultCPUAllocator:" * 20_000 + " out of memory",
    ):  # fmt: skip
        try:
            explain(text)
        except ValueError as error:
            assert error.argument == "error"


def test_what_is_supposed_of_the_card_is_said():
    alone = explain("CUDA out of memory. Tried to allocate 4.00 GiB.", model="sdxl")  # all models take 20 seconds
    assert "assumed: " in alone.to_text(width=999) and not any(match.played for match in alone.matches)
    assert (alone.matches[0].op, alone.matches[0].height, alone.matches[0].dtype) == ("decode", 2048, "float32")
    text, _ = message(vaemem.predict("sdxl", "decode", 2048, 2048, gpu="RTX 4060"))
    hip = explain(text.replace("CUDA out", "HIP out"))
    assert "--gpu 'AMD Radeon RX" in str(hip) and "(same memory)" in hip.to_text(width=999)
    with refused("error"):
        explain("RESOURCE_EXHAUSTED: quota of requests per minute")


HIP_TILE = (
    "Error occurred when executing VAEDecode: HIP out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacty"
    " of 7.98 GiB of which 1.36 GiB is free. Of the allocated memory 6.06 GiB is allocated by PyTorch, and 190.07 MiB"
    ' is reserved by PyTorch but unallocated.\n  File "/ComfyUI/nodes.py", line 267, in decode\n  File'
    ' "/ComfyUI/comfy/sd.py", line 240, in decode\n    pixel_samples = self.decode_tiled_(samples_in)'
)


@pytest.mark.parametrize("text", [TILE, HIP_TILE])
def test_a_tiled_retry_is_about_the_programs_own_tiles(text):
    """ComfyUI cuts the image three times, and decodes it in tiles of 512x512, 256x1024 and 1024x256."""
    e = explain(text)
    sizes = {(match.height, match.width) for match in e.matches}
    assert (512, 512) in sizes and sizes <= {(512, 512), (256, 1024), (1024, 256)}
    assert any("the size is a tile's" in note for note in e.notes)
    assert e.prediction is None and "tiled" not in str(e), "no tiles are advised"
    if text is HIP_TILE:  # MIOpen's im2col of 256 channels, nine times
        assert {(match.bytes, match.dtype) for match in e.matches} == {(9 * 256 * 512 * 512 * 4, "float32")}


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 47.53 GiB of which"
    " 176.88 MiB is free. Of the allocated memory 47.08 GiB is allocated by PyTorch, and 14.45 MiB is reserved by"
    " PyTorch but unallocated."
)
FRAMES = {
    "denoiser": 'File "samplers.py", line 228, in calc_cond_batch File "comfy/ldm/flux/model.py", line 9, in forward ',
    "text encoder": 'File "/lib/transformers/models/t5/modeling_t5.py", line 9, in forward ',
    "weight": 'File "/lib/torch/nn/modules/module.py", line 1369, in convert ',
}  # fmt: skip


@pytest.mark.parametrize("part", [*FRAMES])
@pytest.mark.parametrize("wanted", ["4.00 GiB", "512.00 MiB"])
def test_no_vae_is_named_where_the_traceback_goes_past_it(part, wanted):
    e = explain(FRAMES[part] + FULL.format(wanted))
    assert all(match.offload for match in e.matches), "only whole pipelines' runs"
    assert not any(match.op in ("decode", "encode", "encode image") for match in e.matches) and not e.is_told
    assert any("VAE runs were not searched" in note for note in e.notes)
    assert any("Not searched:" in note for note in e.notes), "what was not examined is said"


@pytest.mark.parametrize("wanted", ["4.00 GiB", "512.00 MiB"])
def test_a_vae_is_named_where_the_traceback_ends_in_it(wanted):
    in_a_vae = 'File "/diffusers/models/autoencoders/autoencoder_kl.py", line 9, in _decode '
    assert explain(in_a_vae + FULL.format(wanted), op="decode", model="sdxl", runtime="diffusers").matches


def test_weights_of_denoisers_are_known():
    """FLUX.2's largest matrix, moved to the card by Module.to, and with no frames at all."""
    e = explain(FRAMES["weight"] + FULL.format("648.00 MiB"))
    (part,) = e.parts
    assert (part.model, part.bytes, part.alike) == ("flux2-transformer", 648 * MIB, 48)
    assert part.tensor == "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"
    alone = explain(FULL.format("648.00 MiB"))
    assert alone.candidates[0] == part and alone.matches and not alone.is_told and "most likely" not in str(alone)
    assert any("All weights of flux2 do not fit" in note and "vaemem plan flux2" in note for note in alone.notes)
    narrowed = explain(FULL.format("648.00 MiB"), model="sdxl", op="decode", runtime="comfyui")
    assert not narrowed.parts and narrowed.matches and {match.models for match in narrowed.matches} == {"SD1.5, SDXL"}


def test_scores_of_attentions_are_products():
    """SD 1.5 at 512x512: two images, 8 heads, 4096 tokens; and as many as the recorded modules' own attentions have."""
    text = 'File "ldm/models/diffusion/ddpm.py", line 8, in apply_model ' + FULL.format("512.00 MiB")
    e = explain(text, model="sd15")
    assert ("sd15-unet", 512, 512, 2 * 8 * 4096**2 * 2) in [(o.model, o.height, o.width, o.bytes) for o in e.parts]
    for name, (heads, side, text) in ATTENTIONS.items():
        if name != A_VAE:
            data = json.loads(shipped("modules", f"{name}.json"))
            calls = data["calls"].values()
            asked = {tuple(call["sizes"][i] for i in one[2:6:3]) for call in calls for one in call["attentions"]}
            tokens = {8: "1 h w", 16: "1 h1 w1"}[side]
            assert (str(heads), f"1 t + {tokens}" if text else tokens) in asked, name


def test_most_likely_is_said_of_one_run_that_agrees():
    p = vaemem.predict("sdxl", "decode", 2048, 2048, gpu="RTX 4060")
    text, _ = message(p)
    e = explain(text, gpu="RTX 4060", runtime="diffusers")
    assert e.is_told and e.matches[0].agrees and str(e).startswith("It was most likely ")
    bare = explain("CUDA out of memory. Tried to allocate 4.00 GiB.", model="sdxl")
    assert not bare.is_told and "most likely" not in str(bare) and bare.matches


def test_directml_names_the_tensors_bytes():
    """An attention's scores at 1200x1200, as posted: (150 * 150)^2 of 4 bytes."""
    text = "Could not allocate tensor with 2025000000 bytes. There is not enough GPU video memory available!"
    e = explain(
        f'File "ComfyUI/comfy/sd.py", line 340, in decode\n{text}', op="decode", model="sdxl", runtime="comfyui"
    )
    assert e.said == {"requested": 2025000000} and e.prediction is None
    assert ("a VAE", 1200, 1200, 22500**2 * 4) in [(one.model, one.height, one.width, one.bytes) for one in e.parts]
    assert "No tensor of a VAE's" not in str(e)
    exact = explain(text.replace("2025000000", str(512 * 1024**2 * 4)), op="decode", model="sdxl", runtime="comfyui")
    assert all(match.bytes == 2 * GIB for match in exact.matches) and exact.matches


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SPILLED, "Windows' driver had already spilled"),
        (SMALL, "may be for any tensor of less than 10 MiB"),
        ("torch.OutOfMemoryError: Allocation on device ", "has no figures"),
        ("RuntimeError: CUDA error: out of memory", "outside PyTorch's allocator"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried "
            "to allocate 4294967296 bytes.",
            "Host memory ran out, not the card's.",
        ),
        ("CUDA out of memory. Tried to allocate 9.99 GiB (GPU 0; 24.00 GiB total capacity)", "Searched: "),
    ],
)
def test_what_a_message_does_not_tell_is_said(text, said):
    e = explain(text, model="sdxl")  # all models take seconds
    assert said in e.to_text(width=999) and not e.is_told and not (e.matches and text is SMALL)


@pytest.mark.parametrize("direct", [False, True])
def test_stable_diffusion_cpps_buffers(direct):
    buffer = graph("vae-decoder", 1024, 1024, model="sdxl", conv_direct=direct).buffer
    for text in (
        f"ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size {buffer}",
        f"[DEBUG] ggml_extend.hpp:1550 - vae compute buffer size: {buffer / MIB:.2f} MB(VRAM)",
        f"allocating {buffer / MIB:.2f} MiB on device 0: cudaMalloc failed: out of memory",
    ):
        e = explain(text)
        match = e.matches[0]
        assert (match.op, match.height, match.width, match.bytes) == ("decode", 1024, 1024, buffer)
        assert match.runtime == ("sd.cpp --vae-conv-direct" if direct else "sd.cpp") and "sd.cpp" in str(e)
    older = explain(f"vae compute buffer size: {buffer // MIB}.00 MB(VRAM)").matches[0]
    assert (older.height, older.bytes) == (1024, buffer), "within a thousandth"
    assert not explain("failed to allocate CUDA0 buffer of size 123456789").matches


@pytest.mark.parametrize(
    "form",
    [
        "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size {bytes}",
        "ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer of size {bytes}",
        "ggml_gallocr_reserve_n: failed to allocate SYCL0 buffer of size {bytes}",
        "ggml_vulkan: Device memory allocation of size {bytes} failed.",
        "Device memory allocation of size {bytes} failed",
        "cuda_buffer_type_alloc_buffer: allocating {mib:.2f} MiB on device 0: cudaMalloc failed: out of memory",
        "alloc_buffer: allocating {mib:.2f} MiB on device 0: aclrtMalloc failed",
        "ggml_backend_sycl_buffer_type_alloc_buffer: can't allocate {bytes} Bytes of memory on device",
        "ggml_metal_buffer_init: error: failed to allocate buffer, size = {mib:8.2f} MiB",
    ],
)
def test_ggmls_messages_of_any_backend(form):
    buffer = graph("vae-decoder", 1024, 1024, model="sdxl").buffer
    e = explain(form.format(bytes=buffer, mib=buffer / MIB))
    first = e.matches[0]
    assert (first.op, first.height, first.width, first.bytes) == ("decode", 1024, 1024, buffer)


def test_the_pool_of_ggml():
    """As posted, of a decode whose compute buffer is of 14978.25 MB: 1.05 times the largest product's copy."""
    e = explain("ROCm pool[0]: alloc of 1209.60 MiB failed, flushing 935.90 MiB of cached buffers and retrying")
    assert (e.matches[0].op, e.matches[0].height, e.matches[0].width) == ("decode", 1536, 1536)
    assert e.matches[0].bytes == 1152 * MIB and all(match.op == "decode" for match in e.matches)
    log = "[DEBUG] unet compute buffer size: 831.00 MB [DEBUG] vae compute buffer size: 14978.25 MB(VRAM)"
    assert (explain(log).matches[0].models, explain(log).matches[0].height) == ("flux", 1536)


def test_the_command(capsys, monkeypatch, tmp_path):
    (tmp_path / "log.txt").write_text(TILE)
    for argument in (TILE, str(tmp_path / "log.txt")):
        assert main(["explain", argument]) == 0
        assert capsys.readouterr().out.startswith("It may have been one of these:")
    monkeypatch.setattr("sys.stdin", io.StringIO(TILE))
    assert main(["explain", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["matches"]
    assert main(["explain", "it broke"]) == 2
    assert complains(capsys.readouterr().err, "explain", names=["error: ", "broke"])


def test_an_exception_is_a_message_too():
    assert explain(MemoryError(SMALL)).said["requested"] == 20 * MIB
    with refused("model"):
        explain(SMALL, model="sd9")


def test_what_a_trace_wants():
    """As the steps have it, gone over one by one."""
    trace = _core.Trace.vae(architecture("sdxl"), "diffusers", "decode", "float32", 512, 768)
    held, live, most, wanted = {}, 0, 0, []
    for op, number, size, name in trace.steps:
        if op == "take":
            held[number] = -(-size // 512) * 512
            if live + held[number] > most:
                wanted.append((name, size, live))
            live += held[number]
            most = max(most, live)
        elif op == "give":
            live -= held.pop(number)
    assert len(wanted) > 8 and trace.wants(0, 1 << 62, False) == wanted[:8]
    large = [one for one in wanted if 100 * MIB <= one[1] <= 300 * MIB]
    assert large and trace.wants(100 * MIB, 300 * MIB, False) == large[:8] == trace.wants(100 * MIB, 300 * MIB, True)
    with_spare = [name for name, *_ in trace.wants(100 * MIB, 300 * MIB, False, 2 * GIB)]
    assert len(with_spare) == 8 and with_spare[0] == next(
        name for op, _, size, name in trace.steps if op == "take" and 100 * MIB <= size <= 300 * MIB
    ), "whatever fits beside what came before"
    segments = [one for one in wanted if 1 << 20 < one[1] < 10 * MIB]
    assert trace.wants(20 * MIB, 20 * MIB, True) == segments[:8]


# ---- messages that people posted, of other memories and models ----

CUDA = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is free. Of the allocated"
    " memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
)
WAN = CUDA.format("884.00 MiB", "12.00 GiB", "38.73 MiB", "6.68 GiB", "3.96 GiB")
QWEN = CUDA.format("5.06 GiB", "15.56 GiB", "2.74 GiB", "6.55 GiB", "5.53 GiB")
FLUX2 = CUDA.format("648.00 MiB", "47.53 GiB", "176.88 MiB", "47.08 GiB", "14.45 MiB")
SCHNELL = CUDA.format("90.00 MiB", "14.74 GiB", "12.12 MiB", "14.60 GiB", "4.05 MiB")
GITHUB = "https://github.com/"
# (text, source, attributes of the first candidate, words of the answer)
REPORTS = [
    (
        f'File "wan/modules/vae.py", line 34, in forward {WAN} --task t2v-1.3B --size 480*832',
        "Wan-Video/Wan2.1/issues/161",
        {"models": "wan-1.3b", "op": "decode", "frames": 81, "bytes": 96 * 6 * 482 * 834 * 4}, "wan-1.3b",
    ),
    (
        f"{QWEN} Qwen-Image", "pytorch/pytorch/issues/177406",
        {"models": "Qwen-Image", "op": "decode", "height": 1024, "width": 1024, "bytes": 96 * 27 * 1024**2 * 2},
        "with PyTorch 2.9.1",
    ),
    (
        "RuntimeError: Invalid buffer size: 2.25 GB 'height': 768, 'width': 512",
        "invoke-ai/InvokeAI/issues/3168",
        {"model": "sd15-unet", "height": 512, "width": 768, "bytes": 2 * 8 * 6144**2 * 4}, "Metal refuses one buffer",
    ),
    (
        FLUX2, "black-forest-labs/flux2/issues/23", {"model": "flux2-transformer", "bytes": 648 * MIB},
        "All weights of flux2 do not fit",
    ),
    (
        f"FLUX.1-schnell pipe.enable_model_cpu_offload() {SCHNELL}", "black-forest-labs/flux/issues/459",
        {"model": "flux-schnell-transformer", "bytes": 90 * MIB}, "vaemem plan flux-schnell",
    ),
    (
        'File "models/autoencoders/autoencoder_kl_hunyuan_video.py", line 79, in forward CUDA out of memory. Tried to'
        " allocate 14.34 GiB. GPU 0 has a total capacity of 23.51 GiB of which 3.00 GiB is free.",
        "lllyasviel/FramePack/issues/790", None, "HunyuanVideo, which vaemem does not know",
    ),
    (
        "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory unet compute"
        " buffer size: 830.86 MB", "leejet/stable-diffusion.cpp/issues/673",
        {"models": "sdxl", "op": "denoise", "height": 1024, "width": 1024}, "sd.cpp",
    ),
    (
        "t5 params backend buffer size =  5757.05 MB(RAM) (242 tensors)", "leejet/stable-diffusion.cpp/issues/942",
        None, "the weights of t5",
    ),
    (
        "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer of"
        " size 8388608000", "microsoft/onnxruntime/issues/9939", None, "ONNX Runtime's arena",
    ),
    (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes.",
        "google-deepmind/alphafold/issues/1023", None, "no single tensor's",
    ),
    ("RuntimeError: HIP error: out of memory", "Comfy-Org/ComfyUI/issues/7761", None, "outside PyTorch's allocator"),
    ("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "intel/compute-runtime/issues/916", None, "Level Zero"),
    (
        "DefaultCPUAllocator: not enough memory: you tried to allocate 14643363840 bytes.",
        "Suzie1/ComfyUI_Comfyroll_CustomNodes/issues/92", None, "Host memory ran out",
    ),
    (
        'File "ComfyUI/comfy/sd.py", line 641, in encode torch.OutOfMemoryError: Allocation on device',
        "Comfy-Org/ComfyUI/issues/7761", None, "in a VAE, in its encode",
    ),
]  # fmt: skip
UNSOURCED = [  # the programs' own words, with other numbers
    ("[metal::malloc] Attempting to allocate 30601641984 bytes which is greater than the maximum allowed", "MLX"),
    ("Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBuffer", "macOS ended"),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "its own handle"), ("CUDA driver error: out of memory", "The driver"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "its own handle"),
    ("Not enough memory, use lower resolution (max approx. 896x896). Need: 2.0GB free, Have:1.4GB free", "scores"),
    (
        "MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: 18.13 GB)."
        " Tried to allocate 5.00 MB on private pool.", "does not identify the run",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "source", "first", "said"), REPORTS, ids=[one[1] for one in REPORTS])
def test_reports(text, source, first, said):
    e = explain(text, model=None if first or "hunyuan" in text else "sdxl")  # a search of all models takes seconds
    found = e.candidates[0] if e.candidates and first is not None else None
    assert {name: getattr(found, name) for name in first or ()} == (first or {}), (GITHUB + source, e)
    assert said in e.to_text(width=999)


@pytest.mark.parametrize(("text", "said"), UNSOURCED)
def test_other_memories(text, said):
    e = explain(text, model="sdxl")
    assert said in e.to_text(width=999) and e.prediction is None and not e.is_told


@pytest.mark.parametrize(
    ("name", "gpu", "used", "op", "tensor", "frames", "advice"),
    [
        ("sdxl", "RTX 4060", "0.3 GB", "denoise", "up_blocks.1.attentions.1.transformer_blocks.1.ff.net.0", 0, "model"),
        ("sdxl", "RTX 4060", 0, "decode", None, 0, "model"),
        ("wan2.2-5b", "RTX 4090", 0, "decode", "decoder.up_blocks.3.resnets.0.conv1 [pad]", 81, "model --vae tiled"),
        ("wan2.2-5b", "RTX 3060", 0, "denoise", "blocks.0", 61, "sequential"),  # an unusual length
    ],
)
def test_what_fits_predicts_is_explained(name, gpu, used, op, tensor, frames, advice):
    """The message of a pipeline's own prediction, with its model and card, names that run first."""
    size, how = ((704, 1280), {"offload": "model", "frames": frames}) if frames else ((1024, 1024), {})
    p = vaemem.predict_pipeline(name, *size, gpu=gpu, used=used, **how)
    process = p.request.start(total_memory=p.available)
    with pytest.raises(vaemem.OutOfMemoryError) as caught:
        PipelineRun(p.request, process).play()
    full = caught.value
    sizes = {"wanted": full.wanted, "free": full.free, "allocated": full.allocated, "total": p.card.gpu.reported_memory}
    text = NATIVE.format(**{n: printed(v) for n, v in {**sizes, "cached": full.reserved - full.allocated}.items()})
    e = explain(f"height={size[0]}, width={size[1]}: {text}" if frames == 61 else text, model=name, gpu=gpu)
    first = e.candidates[0]
    assert (first.models, first.op, first.height, first.width) == (name, op, *size) and p.out_of_memory_at[0] == op
    assert first.played and first.agrees and e.is_told and (first.tensor, first.bytes) == tuple(p.out_of_memory_at[1])
    assert tensor in (None, first.tensor)
    length = f" --frames {frames}" if frames else ""
    words = f"vaemem fits {name} {size[0]}x{size[1]}{length} --gpu '{gpu}' --offload {advice}"
    assert words in " ".join(str(e).split())


@pytest.mark.parametrize("wanted", ["80.00 MiB", "20.00 MiB"])
def test_weights_that_do_not_fit_end_in_a_plan(wanted):
    e = explain(CUDA.format(wanted, "7.76 GiB", "4.00 MiB", "7.60 GiB", "4.05 MiB"), model="flux", gpu="RTX 4060")
    assert any("All weights of flux do not fit" in note and "vaemem plan flux " in note for note in e.notes)
    assert e.prediction is None or isinstance(e.matches[0].offload, str)


def test_zimage_and_its_turbo_are_told_apart():
    for text, names in (("Z-Image-Turbo", ("zimage-turbo",)), ("Tongyi-MAI/Z-Image", ("zimage", "zimage-turbo"))):
        assert clues.read_clues(f"{text} CUDA out of memory. Tried to allocate 90.00 MiB.").pipelines == names


def test_a_line_of_a_run_that_succeeds_is_no_message():
    """stable-diffusion.cpp writes the size of a buffer whether or not it gets it: the error behind it counts."""
    e = explain("vae compute buffer size: 1664.00 MB(VRAM) CUDA error: out of memory, flux dev on an RTX 4060")
    assert not e.candidates and "outside PyTorch's allocator" in str(e) and "All weights of flux do not fit" in str(e)


def test_an_unknown_models_graph_lists_nothing():
    e = explain("HunyuanVideo: ggml_gallocr_reserve_n: failed to allocate Vulkan0 buffer of size 6976176128")
    assert not e.candidates and "HunyuanVideo, which vaemem does not know" in str(e)


@pytest.mark.parametrize("wanted", ["5.00 MB", "1.00 MiB", "512 bytes", "0 bytes"])
def test_small_requests_identify_nothing(wanted):
    for text in (
        f"CUDA out of memory. Tried to allocate {wanted}.",
        f"Currently allocated : 5.96 GiB Requested : {wanted} Device limit : 12.00 GiB",
    ):
        e = explain(text)
        assert not e.candidates and e.prediction is None and "does not identify the run" in e.to_text(width=999)


def test_sizes_of_equal_memory_are_listed_together():
    buffer = graph("vae-decoder", 896, 1152, model="sdxl").buffer
    e = explain(f"ggml_gallocr_reserve_n: failed to allocate Intel(R) Arc(TM) Graphics buffer of size {buffer}")
    first = e.matches[0]
    assert {(768, 1344), (896, 1152)} <= {(first.height, first.width), *first.also} and "768x1344" in str(first)


def test_no_pattern_takes_longer_than_the_text_is_long():
    """No repeat is without an end: then the time grows with the text."""
    from re import _constants, _parser

    patterns = [kind.pattern for kind in message_kinds.MESSAGE_KINDS] + [words for words, *_ in clues.NAMED]
    for module in (messages, clues):
        for value in vars(module).values():
            of = [value] if isinstance(value, re.Pattern) else value.values() if isinstance(value, dict) else ()
            for one in of:
                patterns += [one.pattern] if isinstance(one, re.Pattern) else [one] if isinstance(one, str) else []
                patterns += [each for each in one if isinstance(each, str)] if isinstance(one, tuple) else []
    patterns += [pattern for pattern, *_ in clues._SIZES]

    def repeats(parsed):
        for op, argument in parsed:
            if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
                yield argument[1]
            for part in argument if isinstance(argument, tuple) else (argument,):
                for each in part if isinstance(part, list) else [part]:
                    if isinstance(each, _parser.SubPattern):
                        yield from repeats(each)

    assert len(patterns) > 60
    for pattern in patterns:
        assert all(most <= 400 for most in repeats(_parser.parse(pattern))), pattern


def test_a_long_log_is_read_at_once():
    for word in ("vae", "autoencoder", 'File "', "unet_", "1 ", "Requested : ", "wan "):
        text = f"{word * (120_000 // len(word))} CUDA error: out of memory"
        assert "outside PyTorch's allocator" in explain(text).to_text(width=999)
    with refused("gpu"):
        vaemem.predict("sdxl", "decode", 512, 512, gpu="- " * 10_000)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_message_about_any_pipeline(pipeline):
    """Also about one whose VAE is a recorded module. No file's name is shown."""
    said = str(explain("CUDA out of memory. Tried to allocate 2.00 GiB", model=pipeline, gpu="RTX 4090"))
    assert said and ".vaemem" not in said
