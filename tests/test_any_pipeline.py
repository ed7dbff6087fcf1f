"""`vaemem.pytorch.predict_pipeline`: a pipeline's own code, run without a GPU and without weights."""

from __future__ import annotations

import copy
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
accelerate = pytest.importorskip("accelerate")
if int(diffusers.__version__.split(".")[1]) < 42:
    pytest.skip("the tests' pipelines are those of diffusers 0.42", allow_module_level=True)

import torch_pipelines
from errors import refused

from vaemem import ArgumentError, SimulatedProcess, predict_pipeline
from vaemem.prediction.request import find_card
from vaemem.pytorch import RecordedPrediction, safe_decode
from vaemem.pytorch import predict_pipeline as predict_any
from vaemem.pytorch.loading import random_pipeline
from vaemem.pytorch.pipeline_recorder import PipelineRecorder, ScriptWriter, recording_pipelines

CUDA, WAYS = torch_pipelines.CUDA, torch_pipelines.WAYS
SIZES = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "pil", "gpu": "RTX 4090"}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    made = torch_pipelines.stable_diffusion(tmp_path_factory.mktemp("clip"))
    made.set_progress_bar_config(disable=True)
    return made


def bytes_of(module):
    return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))


@pytest.fixture(scope="module")
def predictions(pipe):
    return {way: predict_any(pipe, "a", **SIZES, prepare=prepare) for way, prepare in WAYS.items()}


def test_phases_and_weights(pipe, predictions):
    """All weights are there; one component at a time; or fewer."""
    phases = {way: {phase.name: phase for phase in p.phases} for way, p in predictions.items()}
    parts = {"encode prompt": pipe.text_encoder, "denoise": pipe.unet, "decode": pipe.vae}
    assert list(phases["none"]) == ["load", *parts]
    everything = sum(map(bytes_of, parts.values()))
    for name, phase in phases["none"].items():
        assert phase.weights - 512 * 400 < everything <= phase.weights, name
    for way in WAYS.keys() - {"none"}:
        kept = ["load"] * (way == "sequential")  # a text encoder's buffer
        assert list(phases[way]) == kept + list(parts)
    for name, module in parts.items():
        by_way = [phases[way][name].weights for way in ("model", "block_level", "leaf_level")]
        assert by_way[2] < bytes_of(module) <= by_way[0] and by_way[1] <= by_way[0] + 512
        assert 0 < phases["sequential"][name].weights < by_way[0]
    for p in predictions.values():
        assert isinstance(p, RecordedPrediction) and p.verdict == "tight" and "compared" in p.summary
        assert p.peak == max(phase.reserved for phase in p.phases) <= p.upper


def test_the_pipeline_stays_as_it_is(pipe, predictions):
    assert all(x.device.type == "cpu" and type(x) is torch.nn.Parameter for x in pipe.unet.parameters())
    assert not hasattr(pipe.unet, "_hf_hook") and "decode" not in vars(pipe.vae)
    assert not torch.cuda.is_available() and torch.ones(3).sum().item() == 3


def test_a_guarded_pipeline_is_predicted_as_without_its_guards(pipe, predictions):
    guards = [safe_decode(pipe), safe_decode(pipe)]
    p = predict_any(pipe, "a", **SIZES, prepare=WAYS["model"])
    assert [phase.reserved for phase in p.phases] == [phase.reserved for phase in predictions["model"].phases]
    assert pipe.vae.decode is guards[1] and guards[1]._before is guards[0]
    for guard in guards:
        guard.undo()


def test_answers_as_tables(predictions):
    p = predictions["model"]
    assert len(p.to_dict()["phases"]) == len(p.phases)
    assert p.to_csv().count("\n") == 1 + len(p.phases) and len(p.rows()) == 1 + len(p.phases)


@pytest.mark.thorough
def test_a_card_without_room(pipe):
    p = predict_any(pipe, "a", **SIZES, memory="1 GB", used=(512 - 18) << 20)
    assert p.verdict == "does not fit" and p.on_card is None
    assert p.out_of_memory_at[0] in [phase.name for phase in p.phases] and not all(phase.fits for phase in p.phases)


SCHEDULERS = (
    "DDIMScheduler", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler",
    "HeunDiscreteScheduler", "LMSDiscreteScheduler", "PNDMScheduler", "UniPCMultistepScheduler",
)  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_find_their_timesteps(name):
    """They read numbers on the card. All of these follow from the host's: nothing is guessed."""
    recorder = PipelineRecorder(find_card("RTX 4090"))
    scheduler = getattr(diffusers, name)()
    wanted = getattr(diffusers, name)()
    if name == "LMSDiscreteScheduler":
        pytest.importorskip("scipy")
    wanted.set_timesteps(4)
    with recording_pipelines(recorder):
        scheduler.set_timesteps(4, device="cuda")
        latents = torch.randn((1, 4, 8, 8), device="cuda") * scheduler.init_noise_sigma
        for t, expected in zip(scheduler.timesteps, wanted.timesteps, strict=True):
            assert recorder.read(t) == float(expected)
            scaled = scheduler.scale_model_input(latents, t)
            assert scaled.is_cuda and scaled.shape == latents.shape
            latents = scheduler.step(torch.randn_like(scaled), t, latents).prev_sample
    assert not recorder.guesses and recorder.contents(latents) is None


def test_contents_follow_until_they_are_unknown():
    recorder = PipelineRecorder(find_card("RTX 4090"))
    with recording_pipelines(recorder):
        x = torch.arange(6, device="cuda").view(2, 3)
        row = x[1]
        row += 10
        assert x.tolist() == [[0, 1, 2], [13, 14, 15]] and int(x[1, 2]) == 15
        assert (x == 14).nonzero().tolist() == [[1, 1]] and x[x > 2].shape == (3,)
        assert torch.tensor([x[0, 1], 7], device="cuda").tolist() == [1, 7]
        assert x.cpu().sum().item() == 45 and not hasattr(x.cpu(), "fake_mode")
        x.copy_(torch.randint(9, (2, 3), device="cuda"))
        assert recorder.contents(row) is None and not recorder.guesses
        assert x.tolist() == [[0] * 3] * 2 and recorder.guesses
        with pytest.raises(ArgumentError):
            x.nonzero()
    assert isinstance(recorder.guesses, Counter)


def test_a_script_frees_in_any_phase():
    script, process = ScriptWriter(), SimulatedProcess("RTX 4090")
    script.begin("a")
    first, second = script.take(1 << 20, "x"), script.take(2 << 20, "y")
    script.end()
    script.begin("a")
    script.give(first)
    third = script.take(4 << 20, "z")
    script.give(third)
    script.give(second)
    script.empty_cache()
    script.end()
    process.play(script.script)
    a, b = process.readings
    assert [name for name, *_ in script.script.phases] == ["a", "a 2"]
    assert (a.peak_allocated, b.peak_allocated) == (3 << 20, 6 << 20)
    assert process.allocated == process.reserved == 0


def test_refusals(pipe):
    offloaded = copy.deepcopy(pipe)
    offloaded.enable_sequential_cpu_offload(device="cpu")
    with refused("pipe"):
        predict_any(offloaded, "a", **SIZES)
    compiled = copy.deepcopy(pipe)
    compiled.unet = torch.compile(compiled.unet)
    with refused(names=["torch.compile"]):
        predict_any(compiled, "a", **SIZES)

    def streams(one):
        one.enable_group_offload(CUDA, offload_type="leaf_level", use_stream=True, record_stream=True)

    with refused("prepare"):
        predict_any(pipe, "a", **SIZES, prepare=streams)
    assert not torch.cuda.is_available()


@pytest.mark.thorough
def test_a_folder_without_weights(pipe, predictions, tmp_path):
    pipe.save_pretrained(tmp_path)
    for file in [*tmp_path.rglob("*.safetensors")]:
        file.unlink()
    p = predict_any(str(tmp_path), "a", **SIZES, dtype="float32")
    assert p.phases == predictions["none"].phases
    with refused("pipe", kind=FileNotFoundError):
        predict_any(str(tmp_path / "none"))


@pytest.mark.thorough
def test_a_pipeline_that_takes_a_picture(pipe):
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    picture = Image.new("RGB", (64, 64))
    p = predict_any(other, "a", picture, strength=1.0, gpu="RTX 4090")
    assert [phase.name for phase in p.phases] == ["load", "encode prompt", "encode image", "denoise", "decode"]
    assert all(phase.where.startswith("vae.") for phase in (p.phases[2], p.phases[4]))


def test_a_controlnet(pipe, predictions):
    """A pipeline that has no recording: its weights come on top, and its activations in the steps."""
    widths = {"block_out_channels": (32, 64), "conditioning_embedding_out_channels": (16, 32, 64)}
    net = diffusers.ControlNetModel(
        layers_per_block=1, norm_num_groups=8, attention_head_dim=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), **widths,
    )  # fmt: skip
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    other = diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=net, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    p, plain = predict_any(other, "a", torch.zeros(1, 3, 64, 64), **SIZES), predictions["none"]
    assert [phase.name for phase in p.phases] == [phase.name for phase in plain.phases]
    load, _, denoise, decode = (b.allocated - a.allocated for a, b in zip(plain.phases, p.phases, strict=True))
    assert bytes_of(net) <= load < bytes_of(net) + 512 * 200 and load <= decode < denoise
    assert not [note for note in p.notes if "read a number" in note]


@pytest.mark.thorough
def test_a_video():
    """More frames take more in the steps and in the decode, which goes frame by frame and keeps some."""
    tokenizer, _ = torch_pipelines.t5()
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=64,
        ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip
    settings = transformers.UMT5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4
    )
    encoder, scheduler = transformers.UMT5EncoderModel(settings), diffusers.FlowMatchEulerDiscreteScheduler()
    parts = {"tokenizer": tokenizer, "text_encoder": encoder, "transformer": transformer, "vae": vae}
    pipe = diffusers.WanPipeline(**parts, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    few, many = (predict_any(pipe, "a", height=64, width=64, num_frames=n, gpu="RTX 4090") for n in (5, 13))
    assert [phase.name for phase in few.phases] == ["load", "encode prompt", "denoise", "decode"]
    assert [a.allocated < b.allocated for a, b in zip(few.phases, many.phases, strict=True)][2:] == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["leaf_level", "block_level"])
def test_prefetching_of_full_size(way):
    """A stream's memory is apart: PyTorch reserves as much as diffusers' own hooks make it reserve."""
    settings = {"offload_type": way, "use_stream": True, "num_blocks_per_group": 1 if way == "block_level" else None}
    with accelerate.init_empty_weights():
        pipe = random_pipeline("sd15", "float16")
    how = {"height": 512, "width": 512, "gpu": "RTX 4090"}
    p = predict_any(pipe, "word", **how, prepare=lambda pipe: pipe.enable_group_offload(CUDA, **settings))
    known = predict_pipeline("sd15", **how, offload=settings)
    for one, other in zip(p.phases, known.phases, strict=True):
        assert one.name == other.name and one.reserved == other.reserved
        assert abs(one.allocated - other.allocated) < 3 << 20  # the scheduler's own tensors
    assert p.phases[1].reserved > predict_pipeline("sd15", **how, offload=way).phases[1].reserved


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "way"),
    [("sd15", "block_level"), ("sd3", "sequential"), ("sd3", "block_level"), ("sdxl-controlnet", "model")],
)
def test_a_known_pipeline_of_full_size(name, way):
    """Both ways to predict agree, except for schedulers' own tensors and the allocator's rounding; with sequential
    offload also for frees that recordings note late."""
    most = (20 if way == "sequential" else 2) << 20
    with accelerate.init_empty_weights():
        pipe = random_pipeline(name, "float16")
    if t5 := getattr(pipe, "text_encoder_3", None):  # without weights its tables are two
        t5.encoder.embed_tokens.weight = t5.shared.weight
    known = {phase.name: phase for phase in predict_pipeline(name, 512, 512, gpu="RTX 4090", offload=way).phases}
    more = {"image": torch.zeros(1, 3, 512, 512), "negative_prompt": "x"} if name.endswith("controlnet") else {}
    p = predict_any(pipe, "word", height=512, width=512, gpu="RTX 4090", prepare=WAYS[way], **more)
    there = [phase for phase in p.phases if phase.name in known]  # only here is loading a phase if buffers are loaded
    assert len(there) == len(known)
    for phase in there:
        assert abs(phase.allocated - known[phase.name].allocated) < most, phase.name
