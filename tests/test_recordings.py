"""`vaemem.pytorch.record_pipeline`: a pipeline's file answers for every size, card and offloading, without PyTorch."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import subprocess
import sys
from random import Random

import pytest
from errors import refused

import vaemem
from vaemem import FileError, predict_pipeline
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.pipeline_text import load_text
from vaemem.prediction.recording_files import component_of, read_recording

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
if int(diffusers.__version__.split(".")[1]) < 42:
    pytest.skip("the tests' pipelines are those of diffusers 0.42", allow_module_level=True)

import torch_pipelines

from vaemem.pytorch import pipeline_files, record_pipeline
from vaemem.pytorch import predict_pipeline as predict_any

# A UNet of the fewest blocks: a recording calls it about thirty times.
FEW = {"block_out_channels": (32,), "down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",)}
FEW |= {"mid_block_type": None}


HOW = {"height": 144, "width": 80, "gpu": "RTX 4090"}  # a size that is not recorded


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    made = torch_pipelines.stable_diffusion(tmp_path_factory.mktemp("clip"))
    made.unet = torch_pipelines.unet(**FEW, cross_attention_dim=32)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def path(pipe, tmp_path_factory):
    file = tmp_path_factory.mktemp("recorded") / "mine.vaemem"
    record_pipeline(pipe, file, prompt="a")
    return str(file)


@pytest.mark.parametrize("way", ["none", "model", "sequential", "leaf_level"])
def test_a_recording_predicts_what_the_pipelines_own_code_and_hooks_do(pipe, path, way):
    """At a size and with steps that were not recorded, next to diffusers' and accelerate's own hooks."""
    how = {"height": 144, "width": 80, "gpu": "RTX 4090"}
    own = predict_any(pipe, "a", num_inference_steps=5, prepare=torch_pipelines.WAYS[way], **how)
    found = predict_pipeline(path, steps=5, offload=way, **how)
    # Buffers that no file has count in load.
    own = {p.name: (p.allocated, p.reserved) for p in own.phases if p.name != "load"}
    assert own == {p.name: (p.allocated, p.reserved) for p in found.phases if p.name != "load"}


def test_a_modular_pipeline_is_recorded_like_others(tmp_path):
    """Its blocks name its inputs. It answers for a size and steps that were not recorded."""
    known = torch_pipelines.stable_diffusion_xl(tmp_path).components
    config = {
        name: value for name, value in known["unet"].config.items() if name.startswith(("addition", "projection"))
    }
    known["unet"] = torch_pipelines.unet(**FEW, **config, cross_attention_dim=64)
    made = diffusers.StableDiffusionXLModularPipeline(workflow="text2image")
    made.update_components(**{role: part for role, part in known.items() if role in made.pretrained_component_names})
    made.set_progress_bar_config(disable=True)
    file = tmp_path / "modular.vaemem"
    record_pipeline(made, file, prompt="a")
    how = {"height": 144, "width": 80, "gpu": "RTX 4090"}
    own = predict_any(made, prompt="a", num_inference_steps=5, **how)
    found = predict_pipeline(str(file), steps=5, **how)
    own = {p.name: (p.allocated, p.reserved) for p in own.phases if p.name != "load"}
    assert own == {p.name: (p.allocated, p.reserved) for p in found.phases if p.name != "load"}
    assert [phase.name for phase in predict_pipeline(str(file), 64, 64, offload="model").phases] == [*own]


def test_a_recording_is_a_pipeline_like_others(path):
    p = predict_pipeline(path, 64, 128, batch=2, gpu="T4", offload="model")
    assert p.verdict == "tight" and "compared" in p.summary and p.pipeline == path
    assert [phase.name for phase in p.phases] == ["encode prompt", "denoise", "decode"]
    assert pickle.loads(pickle.dumps(p)).to_dict() == p.to_dict()
    plan = vaemem.plan_pipeline(path, 128, 128, gpu="T4")
    assert plan.recommended.verdict == "tight" and "compared" in plan.recommended.summary


def test_without_pytorch_and_on_the_command_line(path):
    asked = ["fits", path, "64x96", "--gpu", "T4"]
    code = f"import sys; from vaemem.__main__ import main; main({asked!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "compared" in " ".join(done.stdout.split()), done.stderr


def test_sizes_between_those_that_it_can_make_are_refused(path):
    with refused("height"):
        predict_pipeline(path, 65, 64)


def test_the_prompt_and_the_guidance_are_the_recordings(path):
    with refused("prompt_tokens"):
        predict_pipeline(path, 64, 64, prompt_tokens=77)
    with refused("guidance"):
        vaemem.plan_pipeline(path, 64, 64, gpu="T4", guidance=False)
    with refused("diffusers_version"):
        predict_pipeline(path, 64, 64, diffusers_version="0.33.0")
    assert predict_pipeline(path, 64, 64).request.tokens == torch_pipelines.MAX_LENGTH


def test_a_file_that_was_recorded_again_answers_anew(path, tmp_path):
    file = tmp_path / "again.vaemem"
    data = {name: value for name, value in read_recording(path).items() if name != "digest"}
    file.write_text(json.dumps(data))
    before = predict_pipeline(str(file), 64, 64, gpu="T4")
    larger = data["text"].replace("take", "take 4096 | more\ntake", 1)
    file.write_text(json.dumps(data | {"text": larger, "notes": ["a note"]}))
    after = predict_pipeline(str(file), 64, 64, gpu="T4")
    above = [a.allocated - b.allocated for a, b in zip(after.phases[1:], before.phases[1:], strict=True)]
    assert min(above) == 4096 and "a note" in after.notes and "a note" not in before.notes
    with refused(kind=FileError, path=file):
        pickle.loads(pickle.dumps(before))


def test_what_is_not_counted_is_noted(pipe, path, tmp_path):
    """The safety of the answer: an operator that nobody modelled, and memory that a component keeps, are in the file's
    notes, and so in the answer's."""
    assert read_recording(path)["notes"] == []
    strange = with_unet(pipe, RetainingUNet)
    strange.unet.conv_out.register_forward_hook(lambda module, given, out: out.sort(0)[0])
    record_pipeline(strange, tmp_path / "strange.vaemem", prompt="a")
    notes = predict_pipeline(str(tmp_path / "strange.vaemem"), 64, 64).notes
    assert any(note.startswith("not counted: aten.sort") and "unet" in note for note in notes)
    assert any("the unet keeps" in note for note in notes)


def test_other_programs_have_no_recordings(path):
    with refused("pipeline"):
        predict_pipeline(path, 64, 64, runtime="comfyui")


def test_what_cannot_be_recorded_is_refused(pipe, tmp_path):
    with refused("path"):
        record_pipeline(pipe, tmp_path / "mine.json")
    with refused("pipe", names=["vae"]):
        record_pipeline(pipe, tmp_path / "mine.vaemem", prompt="a", output_type="latent")


class OtherVAE(diffusers.AutoencoderKL):
    """A VAE that vaemem does not know."""


def test_an_unknown_vae_is_a_recorded_module_and_a_component_is_not_called(pipe, tmp_path):
    """The weights of a component that is not called are on the card."""
    other, path = copy.deepcopy(pipe), str(tmp_path / "other.vaemem")
    other.vae = OtherVAE(**{name: value for name, value in pipe.vae.config.items() if not name.startswith("_")}).eval()
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
    )  # fmt: skip
    other.image_encoder = transformers.CLIPVisionModelWithProjection(vision).eval()
    other.register_modules(image_encoder=other.image_encoder)
    record_pipeline(other, path, prompt="a")
    assert read_recording(path)["vaes"] == {} and "vae" in read_recording(path)["modules"]
    own, found = predict_any(other, "a", num_inference_steps=5, **HOW), predict_pipeline(path, steps=5, **HOW)
    assert [p.allocated for p in own.phases[1:]] == [p.allocated for p in found.phases[1:]]
    without = predict_pipeline(path, steps=5, offload="model", **HOW)
    assert max(p.weights for p in without.phases) < found.phases[0].weights
    with refused("vae"):
        predict_pipeline(path, 144, 80, vae="tiled")
    assert vaemem.plan_pipeline(path, 144, 80, gpu="T4").recommended


class ReadingUNet(diffusers.UNet2DConditionModel):
    """A model that reads a mask which follows from sizes, and asks whether unknown numbers are positive."""

    def forward(self, sample, *args, **kwargs):
        mask = torch.arange(sample.shape[-1], device=sample.device) > 2
        kept = sample[..., mask] if (sample > 0).all() else sample
        sample = sample + torch.ones(int(mask.sum()), device=sample.device, dtype=sample.dtype).sum() + kept.mean()
        return super().forward(sample, *args, **kwargs)


class RetainingUNet(diffusers.UNet2DConditionModel):
    """A model that keeps 4 MiB after a call."""

    def forward(self, sample, *args, **kwargs):
        self.cache = torch.zeros(1 << 20, device=sample.device)
        return super().forward(sample, *args, **kwargs)


def with_unet(pipe, kind):
    other = copy.deepcopy(pipe)
    other.unet = kind(**{name: value for name, value in pipe.unet.config.items() if not name.startswith("_")}).eval()
    return other


def test_a_model_may_read_contents_that_follow_from_sizes(pipe, tmp_path):
    other, path = with_unet(pipe, ReadingUNet), str(tmp_path / "other.vaemem")
    record_pipeline(other, path, prompt="a")
    found = predict_pipeline(path, steps=5, **HOW)
    own = predict_any(other, "a", num_inference_steps=5, **HOW)
    # The recording assumes True, and the whole run 0: the mean of the selected columns differs.
    for one, another in zip(own.phases[1:], found.phases[1:], strict=True):
        assert abs(one.allocated - another.allocated) <= 1 << 16
    assert any("True was assumed" in note for note in found.notes)


def test_a_vae_that_nobody_knows_and_the_pipeline_converts_is_refused(pipe, path, tmp_path):
    file = tmp_path / "other.vaemem"
    data = {name: value for name, value in read_recording(path).items() if name != "digest"}
    module = {**data["modules"]["unet"]}
    text = data["text"].replace("call vae", "convert vae float32\ncall vae", 1)
    file.write_text(json.dumps({**data, "vaes": {}, "modules": {**data["modules"], "vae": module}, "text": text}))
    with refused("text"):
        predict_pipeline(str(file), 64, 64, gpu="T4")


def test_a_missing_file_is_named():
    with refused(kind=OSError, path="nowhere.vaemem"):
        predict_pipeline("nowhere.vaemem", 64, 64)
    assert "nowhere.vaemem" not in [*PIPELINES]


def changed(data, *place, value):
    copied = json.loads(json.dumps(data))
    *outer, last = place
    inner = copied
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return copied


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), 3),
        (("vaes",), {}),
        (("row", "longest"), -1),
        (("row", "frame_factor"), 0),
        (("row", "loras"), 1),
        (("row", "clip"), [1, 1]),
        (("row", "clip"), [0, 1, 1]),
        (("row", "sound"), [1, 0]),
        (("row", "frame_range"), [5, 2]),
        (("row", "workflow"), "a b"),
        (("row", "another"), 1),
        (("text",), "case\nchanges"),
        (("text",), "case\nenter vae"),
        (("text",), "case\ntake 3 z | x"),
        (("text",), "case\nrepeat 99999999999999 n\ntake 1 | x\ndone"),
        (("text",), "case\nfree 0 99999999999 | x"),
        (("text",), "case\nfree 7 | x"),
        (("text",), "case\ntake 99999999999999999999 | x"),
        (("text",), "case\ntake -5 | x"),
        (("text",), 5),
        (("row", "steps"), 0),
        (("row", "factor"), 1 << 40),
        (("row", "dtype"), "int3"),
        (("roles",), ["unet"]),
        (("roles",), "unet"),
        (("modules",), {}),
        (("modules", "unet", "weights"), ["a=0"]),
        (("modules", "unet", "weights"), ["a:run:3", *(f"a={n} b={n}" for n in range(64))]),
        (("modules", "unet", "weights"), ["a:run:x"]),
        (("modules", "unet", "weights"), ["a:rnn:3"]),
        (("modules", "unet", "weights"), ["a:run:-3"]),
        (("modules", "unet", "variables"), [3]),
        (("modules", "unet", "calls"), {}),
        (("modules", "unet", "calls"), {"float32": 3}),
        (("vaes", "vae"), {"_class_name": "AutoencoderKL", "block_out_channels": "x"}),
        (("vaes", "vae"), []),
        (("vaes",), {}),
        (("notes",), 3),
        (("text",), "case\ncall unet forward n=1 | 1"),
        (("text",), "case\ncall vae decode n=1 | 1"),
        (("text",), "case\nconvert unet float32"),
    ],
)
def test_a_file_from_a_stranger_is_refused(path, tmp_path, place, value):
    file = tmp_path / "strange.vaemem"
    file.write_text(json.dumps(changed(read_recording(path), *place, value=value)))
    with pytest.raises((ValueError, OverflowError)):
        predict_pipeline(str(file), 64, 64)


@pytest.mark.parametrize("contents", [b"", b"[]", b"\xff\xfe", b"{" * 5000, b"null", b'{"format": 1}'])
def test_a_file_that_is_none_is_refused_by_name(tmp_path, contents):
    file = tmp_path / "strange.vaemem"
    file.write_bytes(contents)
    with pytest.raises(FileError) as caught:
        predict_pipeline(str(file), 64, 64)
    assert caught.value.path == str(file)


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_file_answers_or_is_refused(path, tmp_path, seed):
    """Changed bytes never end in another error."""
    random = Random(seed)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for number in range(3):
        broken = text
        for _ in range(random.choice([1, 1, 5])):
            at = random.randrange(len(broken))
            change = random.choice(["", "0", "9", "-", '"', "[", "=", " ", "n", "99999999999999999999"])
            broken = broken[:at] + change + broken[at + random.choice([0, 1, 1, 20]) :]
        damaged = tmp_path / f"damaged {number}.vaemem"
        damaged.write_text(broken, encoding="utf-8")
        with contextlib.suppress(ValueError, OverflowError, MemoryError):
            predict_pipeline(str(damaged), 64, 64, gpu="T4")


class TwoDenoisers(diffusers.DiffusionPipeline):
    """A pipeline in which another UNet makes the last steps."""

    model_cpu_offload_seq = "unet->unet_2->vae"
    boundary = 620  # timestep

    def __init__(self, unet, unet_2, vae, scheduler):
        super().__init__()
        self.register_modules(unet=unet, unet_2=unet_2, vae=vae, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, height=64, width=64, num_inference_steps=20, num_images_per_prompt=1):
        shape = num_images_per_prompt, 4, height // 8, width // 8
        latents = torch.zeros(shape, device=self._execution_device)
        self.scheduler.set_timesteps(num_inference_steps, device=latents.device)
        for t in self.scheduler.timesteps:
            unet = self.unet if t >= self.boundary else self.unet_2
            noise = unet(latents, t).sample
            latents = self.scheduler.step(noise, t, latents).prev_sample
        image = self.vae.decode(latents).sample
        self.maybe_free_model_hooks()
        return (image,)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A pipeline with two denoisers, and its recording."""
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    blocks |= {"layers_per_block": 1, "norm_num_groups": 8, "add_attention": False}
    with torch.device("meta"):
        unets = [
            diffusers.UNet2DModel(in_channels=4, out_channels=4, block_out_channels=channels, **blocks)
            for channels in ([16], [32])
        ]
        vae = diffusers.AutoencoderKL(
            block_out_channels=[16, 16, 16, 16], norm_num_groups=8, down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
        )  # fmt: skip
    made = TwoDenoisers(*unets, vae, diffusers.DDPMScheduler(timestep_spacing="trailing"))
    made.set_progress_bar_config(disable=True)
    file = tmp_path_factory.mktemp("two") / "two.vaemem"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_files, "_MOST_STEPS", 25)
        record_pipeline(made, file)
    return made, str(file)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("way", ["none", "model"])
def test_another_denoiser_makes_the_last_steps(two, way):
    """At sizes and with numbers of steps that were not recorded, and with more than the recording lists."""
    pipe, path = two
    changes = load_text(component_of(path, "text")).changes
    assert len(changes) == 25 and changes[9] == 4  # of the timesteps 999, 899, ..., 99
    for steps in (1, 5, 27):
        how = {"height": 160, "width": 96, "gpu": "RTX 4090"}
        own = predict_any(pipe, num_inference_steps=steps, prepare=torch_pipelines.WAYS[way], **how)
        found = predict_pipeline(path, steps=steps, offload=way, **how)
        # Buffers that no file has count in load.
        own = {p.name: (p.allocated, p.reserved) for p in own.phases if p.name != "load"}
        assert own == {p.name: (p.allocated, p.reserved) for p in found.phases if p.name != "load"}
    assert {"unet", "unet_2"} == {*PIPELINES[path].denoisers}
