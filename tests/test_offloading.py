"""Offloading by prediction in diffusers' ComponentsManager: its real hooks, with a faked card."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from errors import refused

from vaemem import predict_pipeline

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", "0.42")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from vaemem.pytorch import OffloadStrategy
from vaemem.pytorch.offloading import choose_fewest

GB = 10**9
CPU, CARD = torch.device("cpu"), torch.device("cuda:0")


class Card:
    """A card's memory. PyTorch's cache keeps all that was ever allocated, and some more."""

    def __init__(self, size: int, cached: int = 0):
        self.size, self.allocated, self.held, self.moved, self.ran_out = size, 0, cached, 0, False

    def take(self, size: int) -> None:
        self.allocated += size
        self.ran_out |= self.allocated > self.size
        self.held = min(max(self.held, self.allocated), self.size)


class Component(torch.nn.Module):
    """A component of a size, with a faked device. Its weights are on the device meta, so they take no memory."""

    def __init__(self, card: Card, size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.card, self.size, self.place = card, size, CPU

    @property
    def device(self):
        return self.place

    def to(self, device):
        device = torch.device(device)
        if device != self.place:
            self.card.take(self.size if device == CARD else -self.size)
            self.card.moved += self.size * (device == CPU)
        self.place = device
        return self

    def forward(self):
        assert self.place == CARD


NAMES = ("UNet2DConditionModel", "AutoencoderKL", "CLIPTextModel", "CLIPTextModelWithProjection", "ControlNetModel")


@pytest.fixture(scope="module")
def strategy():
    return OffloadStrategy(predict_pipeline("sdxl", 1024, 1024, gpu="RTX 4060"))


def test_components_of_recorded_pipelines_are_recognised():
    """Their classes are in the recording, as is the second denoiser's."""
    for name, class_name in (("kolors", "UNet2DConditionModel"), ("wan2.2-t2v-a14b", "WanTransformer3DModel")):
        strategy = OffloadStrategy(predict_pipeline(name, 512, 512, gpu="H200"))
        assert strategy.working_bytes(type(class_name, (torch.nn.Module,), {})()) > 1 << 26


def manage(monkeypatch, card, strategy, sizes):
    """Components of SDXL's classes in a manager that offloads."""
    fakes = {
        "mem_get_info": lambda device=None: (card.size - card.held, card.size),
        "memory_reserved": lambda device=None: card.held, "memory_allocated": lambda device=None: card.allocated,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    manager = diffusers.ComponentsManager()
    made = [type(name, (Component,), {})(card, size) for name, size in zip(itertools.cycle(NAMES), sizes, strict=False)]
    for number, component in enumerate(made):
        manager.add(f"part{number}", component)
    manager.enable_auto_cpu_offload(device="cuda", offload_strategy=strategy)
    return made


@pytest.mark.parametrize("seed", range(200))
def test_the_fewest_bytes_move(seed, strategy, monkeypatch):
    """In 20 calls of random components. The oracle tries every set of the components on the card."""
    draw = random.Random(seed)
    card = Card(draw.randint(4 * GB, 24 * GB), draw.randint(0, 2 * GB))
    made = manage(monkeypatch, card, strategy, [draw.randint(1, 6 * GB) for _ in range(draw.randint(2, 7))])
    for _ in range(20):
        component = draw.choice(made)
        others = [one.size for one in made if one is not component and one.place == CARD]
        is_there, before = component.place == CARD, sum(others)
        working = strategy.working_bytes(component)
        sums = [sum(some) for count in range(len(others) + 1) for some in itertools.combinations(others, count)]
        enough = [size for size in sums if before - size + component.size + working <= card.size]
        card.moved, card.ran_out = 0, False
        component()
        assert card.moved == (0 if is_there else min(enough, default=before))
        if not is_there:
            card.take(working)
            assert card.ran_out is not bool(enough)
            card.take(-working)


def test_working_bytes_are_the_predictions(strategy):
    """By class, however a component is named; a converted VAE counts twice, and strangers have the margin."""
    prediction = predict_pipeline("sdxl", 1024, 1024, gpu="RTX 4060", offload="model")
    phases = {phase.name: phase for phase in prediction.phases}
    stored = {part.role: part.nbytes for part in prediction.request.parts}
    vae, clip = diffusers.AutoencoderKL(), transformers.CLIPTextModel(transformers.CLIPTextConfig(num_hidden_layers=1))
    assert strategy.working_bytes(vae) == phases["decode"].total - stored["vae"]
    assert strategy.working_bytes(clip) == phases["encode prompt"].added
    assert strategy.working_bytes(Component(Card(0), 1)) == 3 * GB
    other = OffloadStrategy(prediction, margin="1 MiB")
    assert other.working_bytes(Component(Card(0), 1)) == 1 << 20 and other.working_bytes(vae) > GB
    with refused("request", "str", kind=TypeError):
        OffloadStrategy("sdxl")


@pytest.mark.parametrize("name", ["sd15", "sd35-medium", "flux", "zimage-turbo", "flux2"])
def test_every_pipeline_has_a_strategy(name):
    made = OffloadStrategy(predict_pipeline(name, 1024, 1024, gpu="RTX 4060", dtype="bfloat16"))
    assert 0 < made.working_bytes(diffusers.AutoencoderKL()) < 30 * GB


def test_parts_that_stay_on_the_card_count_once():
    """Free memory lacks them already. A safety checker is no component of the manager's."""

    def working(name, **components):
        made = OffloadStrategy(predict_pipeline(name, 1024, 1024, gpu="RTX 4090", components=components))
        classes = diffusers.AutoencoderKL, diffusers.FluxTransformer2DModel, diffusers.UNet2DConditionModel
        return [made.working_bytes(type(one.__name__, (Component,), {})(Card(0), 1)) for one in classes]

    for role in ("text_encoder_2", "transformer"):
        loaded = "nf4 from bfloat16"
        assert working("flux", **{role: f"{loaded} kept on cuda"}) == working("flux", **{role: loaded})
    assert working("flux", vae="bfloat16 kept on cuda") == working("flux", vae="bfloat16 on cuda")
    assert working("sd15", safety_checker="float16") == working("sd15")


def test_many_components_take_no_long_time():
    """Choose among 40 components with different sums for all sets: a list of all sets takes days."""
    draw = random.Random(0)
    sizes = [(draw.randint(1, 6 * GB), number) for number in range(40)]
    lacking = sum(size for size, _ in sizes) // 2
    start = time.perf_counter()
    total = sum(dict((number, size) for size, number in sizes)[one] for one in choose_fewest(sizes, lacking))
    assert lacking <= total < 1.001 * lacking and time.perf_counter() - start < 20
    assert len(choose_fewest(sizes, 10**15)) == 40


def test_a_device_without_a_report_of_its_memory_is_refused(strategy):
    with refused("device", "'cpu'"):
        strategy([], "unet", torch.nn.Linear(1, 1), CPU)
