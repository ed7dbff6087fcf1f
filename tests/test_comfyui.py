"""ComfyUI's memory management, as vaemem/pipelines/comfyui.py has it, compared with ComfyUI's own decisions."""

import os
import subprocess
import sys
from pathlib import Path

import comfyui_cases as cases
import pytest

from vaemem import _core
from vaemem.pipelines.comfyui import USAGE, Layer, ManagedModel, Manager, estimate_denoiser, estimate_vae
from vaemem.pipelines.comfyui_run import WORKFLOWS, layers_of
from vaemem.pipelines.components import weights_of
from vaemem.pipelines.storage import stored
from vaemem.prediction.runtimes import architecture

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "comfyui.txt"


def play(size, models, requests, *settings):
    """Yield the models after each request, as the oracle does."""
    manager = Manager(lambda: size - sum(model.bytes_there for model in models), *settings)
    for index, needed, least, whole in requests:
        manager.load(models[index], needed, least, whole)
        yield [(model.name, model.loaded, model.bytes_there) for model in manager.models]


def play_case(case):
    models = [
        ManagedModel(
            cases.name(i),
            [Layer(size, cases.layer_name(j), casts) for j, (size, casts) in enumerate(layers)],
            rest,
            references,
        )
        for i, (layers, rest, references) in enumerate(case.models)
    ]
    return play(case.card, models, case.requests, case.reserved, case.state, case.smart)


def real():
    """Yield the lines of whole workflows, with the recorded models."""
    for name, (images, *latent) in cases.PIPELINES.items():
        work = WORKFLOWS[name]
        dtype = work.dtypes[0]
        weights = {
            "text_encoder": (weights_of(work.encoder), "float16"), "denoiser": (weights_of(work.denoiser), dtype),
            "vae": (_core.Trace.parameters(architecture(name), "comfyui"), "bfloat16"),
        }  # fmt: skip
        one, both = (estimate_denoiser(USAGE[work.kind], (n * images, *latent), dtype) for n in (1, 2))
        decode = estimate_vae("decode", (images, *latent), "bfloat16")
        requests = [(0, 0, None, False), (1, both, one, False), (2, decode, None, False)] * 2
        for card in cases.CARDS:
            models = [
                ManagedModel(role, *layers_of([(w.name, w.bytes) for w in stored(found, type, "all", type)]))
                for role, (found, type) in weights.items()
            ]
            for step, there in enumerate(play(card, models, requests)):
                yield cases.line(f"{name}@{card}", step, there)


def estimates():
    for kind, dtype in cases.USED:
        for shape in cases.SHAPES:
            yield f"{kind} {dtype} {'x'.join(map(str, shape))} {estimate_denoiser(USAGE[kind], shape, dtype)!r}"
    for op in ("decode", "encode"):
        for dtype in ("float16", "float32"):
            for shape in cases.SHAPES:
                yield f"{op} {dtype} {'x'.join(map(str, shape))} {estimate_vae(op, shape, dtype)!r}"


def test_the_decisions_are_comfyuis():
    found = [
        cases.line(number, step, models)
        for number in range(cases.CASES)
        for step, models in enumerate(play_case(cases.make_case(number)))
    ]
    assert [*found, *estimates(), *real()] == GOLDEN.read_text("utf-8").splitlines()


@pytest.mark.apps
def test_the_golden_file_is_comfyuis():
    if "COMFYUI" not in os.environ:
        pytest.skip("COMFYUI names no folder of ComfyUI")
    ran = subprocess.run(
        [sys.executable, HERE / "comfyui_oracle.py"], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert ran.returncode == 0, ran.stderr
    if os.environ.get("VAEMEM_GOLDEN") == "1":
        GOLDEN.write_text(ran.stdout, "utf-8")
    assert ran.stdout == GOLDEN.read_text("utf-8")
