"""ComfyUI's memory management, as vaemem/pipelines/comfyui.py has it, compared with ComfyUI's own decisions."""

import os
import subprocess
import sys
from pathlib import Path

import comfyui_cases as cases
import pytest

from vaemem.pipelines.comfyui import USAGE, Layer, ManagedModel, Manager, estimate_denoiser, estimate_vae

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "comfyui.txt"


def play(case):
    """Yield the models after each request, as the oracle does."""
    models = [
        ManagedModel(
            cases.name(i),
            [Layer(size, cases.layer_name(j), casts) for j, (size, casts) in enumerate(layers)],
            rest,
            references,
        )
        for i, (layers, rest, references) in enumerate(case.models)
    ]
    free = lambda: case.card - sum(model.bytes_there for model in models)  # noqa: E731
    manager = Manager(free, case.reserved, case.state, case.smart)
    for index, needed, least, whole in case.requests:
        manager.load(models[index], needed, least, whole)
        yield [(model.name, model.loaded, model.bytes_there) for model in manager.models]


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
        for step, models in enumerate(play(cases.make_case(number)))
    ]
    assert [*found, *estimates()] == GOLDEN.read_text("utf-8").splitlines()


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
