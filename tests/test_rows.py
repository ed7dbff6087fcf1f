"""Pipelines that are a row of data and a recording: what ships, and one that this file defines."""

from __future__ import annotations

import contextlib
import json
import math
from importlib import resources
from pathlib import Path

import pytest

from vaemem import predict_pipeline
from vaemem._common import shipped
from vaemem.pipelines.components import PIPELINES, weights_of
from vaemem.prediction.recording_files import PACKAGED

ROWS = [name for name, kind in PIPELINES.items() if kind.recording.startswith(PACKAGED)]
RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
FILES = resources.files("vaemem").joinpath("data", "pipelines")


@pytest.mark.skipif(not RECORDING.is_dir(), reason="needs the sources")
@pytest.mark.parametrize("name", PIPELINES)
def test_the_list_of_facts_says_what_rows_and_recordings_do(name, monkeypatch):
    monkeypatch.syspath_prepend(str(RECORDING))
    import record_rows

    listed = json.loads(shipped("generated", "pipelines.json"))[name]
    assert json.loads(json.dumps(record_rows.facts_of(record_rows.FOLDER / f"{name}.json"))) == listed


@pytest.mark.parametrize("name", ROWS)
def test_a_recording_is_of_its_row(name):
    data, row = (json.loads(shipped("pipelines", f"{name}.{kind}")) for kind in ("vaemem", "json"))
    assert data["about"] == f"{row['class']} of {row['repository']}" and row["source"]


@pytest.mark.parametrize(
    ("name", "role", "billions"),
    [
        ("kolors", "unet", 2.58), ("kolors", "text_encoder", 6.24), ("qwen-image-2.1", "transformer", 7.1),
        ("qwen-image-2.1", "text_encoder", 8.77), ("qwen-image-edit-plus", "transformer", 20.4),
        ("qwen-image-edit-plus", "text_encoder", 8.29), ("hunyuan-video-1.5", "transformer", 8.3),
        ("minimax-h3", "transformer", 61.7 * 2**30 / 2e9), ("minimax-h3", "text_encoder", 62.1 * 2**30 / 2e9),
        ("wan2.2-t2v-a14b", "transformer_2", 14.3), ("sana", "transformer", 1.6), ("sana", "text_encoder", 2.61),
        ("lumina2", "transformer", 2.61), ("lumina2", "text_encoder", 2.61),
        ("pixart-alpha", "text_encoder", 4.76), ("pixart-alpha", "transformer", 0.61),
        ("playground-v2.5", "unet", 2.57), ("sd15-inpaint", "unet", 0.86), ("instruct-pix2pix", "unet", 0.86),
        ("sdxl-inpaint", "unet", 2.57), ("flux3-klein", "transformer", 5.6), ("flux3-klein", "text_encoder", 4.44),
        ("wan2.1-i2v", "transformer", 16.4), ("ltx2.5", "text_encoder", 12.0),
        ("lcm", "unet", 0.86), ("flux-control", "transformer", 11.9), ("cogview4", "transformer", 6.4),
        ("sana-sprint-1.6b", "transformer", 1.6),
        ("ernie-image", "transformer", 8.0), ("hunyuan-dit", "transformer", 1.5),
        ("ovis-image", "transformer", 7.37),
        ("ltx-0.9.5", "transformer", 1.92),
        ("aura-flow", "transformer", 6.8), ("cogview3-plus", "text_encoder", 4.76),
        ("hunyuanimage-2.1", "text_encoder", 8.29), ("wan2.2-animate", "image_encoder", 0.632),
        ("lumina-next", "text_encoder", 2.51), ("svd-xt", "unet", 1.52), ("svd-xt", "vae", 0.0977),
    ],
)  # fmt: skip
def test_numbers_of_parameters_are_the_published_ones(name, role, billions):
    """As in the models' cards, or as their files in 16 bits are large: two digits at least."""
    count = sum(math.prod(weight.shape) for weight in weights_of(PIPELINES[name].parts[role]))
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_recording_is_listed():
    files = {file.name.removesuffix(".vaemem") for file in FILES.iterdir() if file.name.endswith(".vaemem")}
    assert files == {*ROWS} and ROWS


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_offloading_answers(name):
    """Less stays on the card, in this order."""
    unit, peaks, weights = PIPELINES[name].stride, dict[str, int](), dict[str, int]()
    for offload in ("none", "model", "sequential", "leaf_level"):
        p = predict_pipeline(name, 8 * unit, 8 * unit, gpu="H200", offload=offload)
        peaks[offload], weights[offload] = p.peak, max(phase.weights for phase in p.phases)
        assert all(phase.flops for phase in p.phases if phase.kind in ("denoise", "decode"))
    assert peaks["none"] > peaks["model"] > peaks["sequential"]
    assert weights["model"] > weights["leaf_level"]


torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")
if int(diffusers.__version__.split(".")[1]) < 42:
    pytest.skip("rows are of diffusers 0.42", allow_module_level=True)

import torch_pipelines
from small_rows import small_row

from vaemem.pipelines.recorded_modules import Recorded
from vaemem.prediction.gpus import find_gpu
from vaemem.pytorch import predict_pipeline as predict_any
from vaemem.pytorch.converting import arguments_of
from vaemem.pytorch.equal_layers import calling_layers
from vaemem.pytorch.fitting import PolynomialFit, products
from vaemem.pytorch.loading import WORD, _tokenizer, build_row, make_picture, make_pictures
from vaemem.pytorch.module_writer import ModuleCall, ScriptRecorder, Writer, settle, weights_text
from vaemem.pytorch.pipeline_files import _lengthened, find_drift, record_row
from vaemem.pytorch.recorder import Recorder, Recording
from vaemem.pytorch.recording import record_by
from vaemem.pytorch.text_recorder import PICTURE, shapes_of

TINY = {  # SD 1.5's pipeline with a text encoder of two layers
    "class": "StableDiffusionPipeline", "repository": "nobody/tiny", "source": "made up", "dtype": "float16",
    "tokens": 77, "steps": 20, "guides": True, "call": {}, "unguided": {"guidance_scale": 1.0}, "unit": 32,
    "components": {
        "text_encoder": ["transformers:CLIPTextModel", "transformers:CLIPTextConfig", {
            "vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0}],
        "unet": ["diffusers:UNet2DConditionModel", {
            "block_out_channels": [32], "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8,
            "cross_attention_dim": 32, "down_block_types": ["CrossAttnDownBlock2D"],
            "up_block_types": ["UpBlock2D"], "mid_block_type": None}],
        "vae": ["diffusers:AutoencoderKL", {
            "block_out_channels": [32, 64, 64, 64], "norm_num_groups": 8,
            "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}],
        "scheduler": ["diffusers:EulerDiscreteScheduler", {"steps_offset": 1}],
        "tokenizer": ["tokenizer", {"length": 77, "template": 2}],
        "safety_checker": None, "feature_extractor": None,
    },
    "settings": {"requires_safety_checker": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A file with the recording of TINY."""
    path = tmp_path_factory.mktemp("rows") / "tiny.vaemem"
    path.write_text(json.dumps(record_row(TINY), default=list))
    return path


def test_a_new_pipeline_is_a_row_and_a_command(recorded):
    """Then it answers for sizes, numbers of images and steps that were not recorded, with guidance and without."""
    path = str(recorded)
    pipe = build_row(TINY)
    for scale in (5.0, 1.0):
        how = {"height": 224, "width": 96, "gpu": "RTX 4090"}
        call = {"num_inference_steps": 7, "num_images_per_prompt": 3, "guidance_scale": scale}
        own = predict_any(pipe, " ".join([WORD] * 9), negative_prompt=WORD, **call, **how)
        found = predict_pipeline(path, steps=7, batch=3, guidance=scale > 1, **how)
        names = "encode prompt", "denoise", "decode"
        assert [p.allocated for p in own.phases if p.name in names] == [
            p.allocated for p in found.phases if p.name in names
        ]


def test_drift_tells_which_component_differs(recorded):
    contents = json.loads(recorded.read_text())
    assert find_drift(TINY, contents) == []
    encoder = TINY["components"]["text_encoder"]
    wider = [*encoder[:2], encoder[2] | {"intermediate_size": 128}]
    changed = TINY | {"components": TINY["components"] | {"text_encoder": wider}}
    text = contents["text"].replace("denoise", "", 1).replace("take 4", "take 8", 1)
    *of_text, of_encoder = find_drift(changed, contents | {"text": text})
    assert of_text and of_encoder.startswith("text_encoder: expected the recorded weights")


def test_a_call_tells_a_pictures_strides():
    plain, picture = torch.empty(1, 3, 4, 5, device="meta"), torch.empty(1, 4, 5, 3, device="meta").movedim(-1, 1)
    assert shapes_of({"x": plain}) == (("x", (1, 3, 4, 5)),)
    assert shapes_of({"x": picture}) == (("x", (1, 3, 4, 5)), (PICTURE, ()))


def test_as_many_steps_are_recorded_before_a_change_of_denoiser_as_after_it():
    """The change follows one third of the steps, two thirds, or all; with up to three steps it lies where it lies."""
    one, two = ([-(-thirds * number // 3) for number in range(1, 16)] for thirds in (1, 2))
    assert [_lengthened(steps, one) for steps in (1, 3, 4, 5)] == [1, 3, 10, 13]
    assert [_lengthened(steps, two) for steps in (3, 4, 5)] == [3, 12, 15]
    assert _lengthened(5, []) == _lengthened(5, [*range(1, 16)]) == 5


def test_a_tokenizer_counts_instructions_and_pictures():
    """As Sana's instruction, which its code counts; and as Qwen2-VL's processor, a token for 28x28 pixels."""
    words = _tokenizer(99, template=1, instruction=7)
    assert len(words.encode("User's prompt:\n")) == 8 and len(words(f"User's\nprompt: {WORD} {WORD}").input_ids) == 10
    assert len(words(WORD).input_ids) == 2 and len(words("").input_ids) == 1
    text, pictures = f"<|image_pad|> and <|image_pad|> {WORD}", [*make_picture([280, 140], 0, 0)] * 2
    found = _tokenizer(999, template=3, sees=True)(text=[text], images=pictures, return_tensors="pt")
    assert found["input_ids"].tolist() == [[2] * 3 + [3] * 100 + [1]]
    assert found["image_grid_thw"].tolist() == [[1, 10, 20]] * 2 and found["pixel_values"].shape[0] == 400


class Convolutions(torch.nn.Module):
    """Convolutions that are not square, or dilated, grouped, transposed, or of several frames."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.nn.Conv2d(4, 8, (3, 1), padding=(1, 0))
        self.wide = torch.nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.up = torch.nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.deep = torch.nn.Conv3d(4, 6, 3, stride=(1, 2, 2), padding=1)
        self.long = torch.nn.ConvTranspose1d(6, 2, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.wide(self.flat(x)))
        y = self.deep(torch.stack([y, y, y], 2))
        return self.long(y.mean(2).mean(2))


def test_any_convolution_is_recorded_with_its_sizes():
    """Next to a recording at another size: the same steps, questions for cuDNN, and FLOPs."""
    with torch.device("meta"):
        module = Convolutions().eval()

    def run(recorder, n, h, w):
        return record_by(recorder, module, (torch.empty(n, 4, h, w, device="meta"),), {}).trace

    points = [{"n": n, "h": h, "w": w} for n, h, w in ((1, 8, 12), (2, 6, 10), (3, 10, 4), (1, 14, 6), (5, 4, 8))]
    fit = PolynomialFit(products(["", "n"], ["", "h w", "h", "w"]), points)
    writer = Writer(fit, "float32")
    writer.write([run(ScriptRecorder("Convolutions"), **at).calls[0] for at in points])
    call = {"sizes": fit.polynomials, "convs": writer.convs, "attentions": [], "modules": list(writer.modules)}
    data = {
        "about": "", "source": "", "variables": [*"nhw"], "derived": {}, "calls": {"float32": call},
        "weights": weights_text(module, torch.float32),
    }  # fmt: skip
    gpu = find_gpu("RTX 4090")
    own, found = run(Recorder(Recording(), gpu), 2, 12, 16), Recorded("x", data).trace("float32", gpu, n=2, h=12, w=16)
    assert settle(own.steps) == settle(found.steps) and own.convs == found.convs and len(own.convs) == 5
    assert own.flops == found.flops


class Layer(torch.nn.Module):
    """Keeps its input until it returns, and a tensor between its calls if it has to, in itself or in a dict."""

    def __init__(self, wide: bool, keeps: str):
        super().__init__()
        self.sizes, self.keeps, self.kept = (1 + wide,), keeps, None
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, known: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
        more = torch.cat([x] * self.sizes[0])
        self.kept = [more + 2] if self.keeps == "itself" else None
        known |= {str(len(known)): more + 2} if self.keeps == "dict" else {}
        return self.inner(x).relu(), (more[: len(y)] + y).transpose(0, 1).contiguous().t()


@pytest.mark.parametrize("keeps", ["", "itself", "dict"])
def test_a_layer_is_recorded_once_for_all_equal_ones(keeps):
    """The events are the same, in the same order. A layer that keeps memory is no such layer."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(number % 3 == 0, keeps) for number in range(9))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            known: dict[str, object] = {}
            for layer in self.layers:
                x, y = layer(x, y, known)
            return x + y

    def record(layers_once: bool) -> list[object]:
        with torch.device("meta"):
            module, given = Layers().eval(), torch.empty(5, 8)
        recorder, ran = ScriptRecorder("Layers"), []
        follow = calling_layers(module, lambda key, run, *given: recorder.repeat(key, counted(run, ran), *given))
        with follow if layers_once else contextlib.nullcontext():
            record_by(recorder, module, (given, given), {})
        expected = {"": 3, "itself": 9, "dict": 1}  # the first has other strides; a dict that is not empty may change
        assert not layers_once or len(ran) == expected[keeps]
        return listed(recorder.script.calls[0])

    def counted(run, ran):
        return lambda *args, **kwargs: ran.append(1) or run(*args, **kwargs)

    def listed(call):
        return [call.name, *(listed(one) if isinstance(one, ModuleCall) else one for one in call)]

    assert record(True) == record(False)


# Bytes allocated and reserved that a recording differs by; others do not differ. The causes:
# - Qwen-Image 2.1's transformer keeps keys and values of the prompt, which do not count, as a note of its answers says;
#   Qwen-Image-Edit Plus's keeps tables of positions.
# - CogVideoX's are in what the allocator rounds blocks up by: at the peak the same tensors are live (their sums are
#   equal), in other blocks.
# - Playground's, Kolors' and AuraFlow's: while the VAE becomes float32, 2048 bytes more of its float16 weights are
#   still there, because diffusers converts them in another order.
# - Lumina Next's: with model offload, accelerate sends a table of positions to the card for the whole call.
# - OmniGen's: a buffer that the transformer replaces.
# - FLUX.3's, and likely ERNIE-Image's: with model offload the VAE's mean is on the host, so the pipeline copies 256
#   bytes.
# - Kolors' text encoder needs a mask of 64 KiB, unless the prompt fills all 256 tokens, as it does here.
DIFFERENCES = {
    "kolors": (1 << 16, 0), "qwen-image-2.1": (50 << 20, 86 << 20), "qwen-image-edit-plus": (8 << 20, 2 << 20),
    "playground-v2.5": (2048, 0), "flux3-klein": (512, 0),
    "flux3-klein-base": (512, 0),
    "ernie-image": (512, 0),
    "aura-flow": (2048, 0), "cogvideox-5b": (2921472, 0), "cogvideox-2b": (49152, 0),
    "lumina-next": (37203456, 20 << 20), "omnigen": (1024, 0),
}  # fmt: skip
# As DIFFERENCES, with three images: Ovis-Image's peak is in another step, because the allocator rounds other blocks up;
# Qwen-Image 2.1's keys and values are of three images.
OF_THREE = {"ovis-image": (70656, 0), "qwen-image-2.1": (150 << 20, 258 << 20)}
SLOW = (
    "ltx2.3",
    "ltx2.5",
    "qwen-image-edit-plus",
    "wan2.2-animate",
    "hunyuanimage-2.1",
)  # a step of their code takes a minute
# Packages that some code needs beyond the usual ones.
NEEDED = {
    **dict.fromkeys(("wan2.1-i2v", "wan2.2-i2v-a14b", "wan2.1-vace-14b", "wan2.1-vace-1.3b", "wan2.2-animate"), "ftfy"),
    "skyreels-v2": "ftfy",
    "anima": "torchvision",
    "omnigen": "torchvision",
}


def row_of(name):
    """A pipeline's row, if its packages are there."""
    row = json.loads(shipped("pipelines", f"{name}.json"))
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    if "dummy" in getattr(diffusers, row["class"]).__module__:
        pytest.skip(f"{row['class']} needs another package")
    return row


def compare(row, name, steps, ways, differences, images=1):
    """Compare each phase with a run of a row's own code, at a size that was not recorded. Buffers that no file has
    count in load. name: of the pipeline or its recording. differences: of bytes allocated and reserved"""
    pipe, kind = build_row(row, "meta"), PIPELINES[name]
    pipe.vae.use_tiling = False  # as recorded
    pipe.set_progress_bar_config(disable=True)
    known = arguments_of(pipe)
    sizes = {"height": 11 * kind.stride, "width": 18 * kind.stride}
    words = " ".join([WORD] * (kind.tokens - 2 * (kind.tokens != 77)))
    steps = max(steps, row.get("least_steps", 1))
    call = {"num_inference_steps": steps, "max_sequence_length": kind.tokens, "negative_prompt": words} | sizes
    call["num_images_per_prompt"] = images
    frames = {"frames": kind.frame_range[0] + 2 * kind.frame_factor} if kind.frames else {}
    call |= {"num_frames": frames.get("frames"), "prompt": words}
    call = {key: value for key, value in call.items() if key in known}
    if kind.unguided or not kind.guides:
        call.pop("negative_prompt", None)
    call |= make_pictures(row["call"], sizes["width"], sizes["height"])
    allocated, reserved = differences
    # A buffer that OmniGen's transformer replaced begins the phase decode before model offload takes weights away.
    for offload in ways if row["class"] != "OmniGenPipeline" else ["none"]:
        own = predict_any(pipe, gpu="H200", prepare=torch_pipelines.WAYS[offload], **call)
        found = predict_pipeline(name, **sizes, **frames, steps=steps, batch=images, gpu="H200", offload=offload)
        pairs = zip(
            (p for p in own.phases if p.name != "load"), (p for p in found.phases if p.name != "load"), strict=True
        )
        for one, other in pairs:
            assert one.name == other.name
            assert abs(one.allocated - other.allocated) <= allocated, one.name
            assert abs(one.reserved - other.reserved) <= reserved, one.name


# A scheduler's, with one step.
comparing = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")


@pytest.mark.thorough
@comparing
@pytest.mark.parametrize("name", ROWS)
def test_a_shipped_recording_does_what_the_pipelines_own_code_does(name):
    steps, ways = (1, ["model"]) if name in SLOW else (3, ["none", "model"])
    compare(row_of(name), name, steps, ways, DIFFERENCES.get(name, (0, 0)))


@pytest.mark.thorough
@comparing
@pytest.mark.parametrize("name", [one for one in ROWS if not PIPELINES[one].frames and one not in SLOW])
def test_a_shipped_recording_makes_several_images_as_the_pipelines_own_code_does(name):
    most = PIPELINES[name].most_images(guidance=True)
    if 0 < most < 3:
        pytest.skip("larger batches were not recorded")
    compare(row_of(name), name, 2, ["none"], OF_THREE.get(name, DIFFERENCES.get(name, (0, 0))), images=3)


# As DIFFERENCES, of small configs. The causes are the same ones. HunyuanVideo 1.5's differences are in what the
# allocator rounds blocks up by.
SMALL_DIFFERENCES = {
    "kolors": (1 << 16, 0), "qwen-image-2.1": (6722048, 30 << 20), "ernie-image": (512, 0),
    "playground-v2.5": (512, 0), "hunyuan-video-1.5": (753664, 0), "qwen-image-edit-plus": (6513664, 22 << 20),
    "cogvideox-5b": (1817600, 12 << 20), "cogvideox-2b": (1062912, 168 << 20),
    "lumina-next": (3974656, 20 << 20), "omnigen": (1024, 0),
    "flux3-klein": (512, 0), "flux3-klein-base": (512, 0),
}  # fmt: skip
QUICK = ("cogview4",)  # the others take up to a minute each; TINY has a UNet


@comparing
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.thorough] * (one not in QUICK)) for one in ROWS])
def test_a_small_config_recorded_anew_does_what_its_own_code_does(name, tmp_path):
    """Not only the shipped numbers are right, but the recorder."""
    row, path = small_row(name, row_of(name)), tmp_path / "small.vaemem"
    path.write_text(json.dumps(record_row(row), default=list))
    compare(row, str(path), 3, ["model"] if name in QUICK else ["none", "model"], SMALL_DIFFERENCES.get(name, (0, 0)))
