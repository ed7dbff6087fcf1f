"""A user's project under `mypy --strict`: what it may write, what it gets, and what is refused before it runs."""

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from vaemem import _types, plan_pipeline, predict_pipeline
from vaemem._common import SPELT_DTYPES
from vaemem.pipelines.pipeline_arguments import PipelineArguments, PlanArguments
from vaemem.pipelines.programs import PLANNED_RUNTIMES
from vaemem.prediction.runtimes import PROGRAM_NAMES, PROGRAMS, RUNTIMES

PROJECT = """
import numpy as np
import vaemem

def whole(model: str) -> int:
    p = vaemem.predict_pipeline(model, 1024, 1024, gpu="RTX 4090", offload={"text_encoder": "cpu"})
    reveal_type(p)
    reveal_type(vaemem.predict_pipeline(model, 1024, 1024, runtime="sd.cpp", offload="cond_only"))
    reveal_type(p.formula)
    reveal_type(vaemem.formula(p))
    reveal_type(vaemem.formula("sdxl", "decode"))
    return p.peak

def again(vae: vaemem.VAE) -> vaemem.Run:
    run = vae.estimate("decode", 512, 512, output_type="pil")
    p = vaemem.predict("sdxl", run.op, 512, 512, vae.dtype, runtime="comfyui")
    vaemem.predict("sdxl", p.op, 512, 512, p.dtype, runtime=p.runtime)
    vaemem.predict("sdxl", "encode_tiled", 512, 512, np.float16, weights_dtype=np.dtype("float16"))
    vaemem.predict_sweep("sdxl", ["decode", "pipeline"], dtypes=["fp16", "float32"])
    return vae.copy(dtype=vae.dtype, precision=vae.precision).estimate(run.op, 64, 64)

vaemem.predict("sdxl", "decoed", 512, 512)  # wrong
vaemem.predict("sdxl", "decode", 512, 512, "float61")  # wrong
vaemem.predict("sdxl", "decode", 512, 512, runtime="comfy")  # wrong
vaemem.predict_pipeline("sdxl", 512, 512, runtime="mlx")  # wrong
vaemem.predict_pipeline("sdxl", 512, 512, runtime="sd.cpp", torch_version="2.7.1")  # wrong
vaemem.plan_pipeline("sdxl", 512, 512, runtime="forge")  # wrong
vaemem.VAE.load("vae.safetensors", dtype="int8")  # wrong
vaemem.VAE.random("sdxl").estimate("decode_tiled", 64, 64)  # wrong
vaemem.tradeoff("sdxl", "both", 64, 64)  # wrong
vaemem.measure_sweep("sdxl", "train")  # wrong
"""
REVEALED = ["PipelinePrediction", "GraphPrediction", "Formula", "Formula", "Formula"]


def test_a_strict_project(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "project.py").write_text(PROJECT)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "project.py"]
    where = os.environ | {"MYPYPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=300)
    said = [line.split(":", 3) for line in done.stdout.splitlines()]
    assert {int(line) for _, line, kind, _ in said if kind == " error"} == {
        number for number, line in enumerate(PROJECT.splitlines(), 1) if line.endswith("# wrong")
    }, done.stdout + done.stderr
    revealed = [text for _, _, kind, text in said if kind == " note" and "Revealed type" in text]
    assert [text.rsplit(".", 1)[-1].strip('"') for text in revealed] == REVEALED


def test_the_types_name_what_there_is():
    assert set(PROGRAM_NAMES) == {*RUNTIMES, *PROGRAMS}
    assert {*get_args(_types.DtypeName), *get_args(_types.DtypeSpelt)} == {*SPELT_DTYPES, *SPELT_DTYPES.values()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads")
def test_overloads_have_the_functions_own_parameters():
    from typing import get_overloads

    known = inspect.signature(predict_pipeline).parameters
    by_torch, *others = (inspect.signature(one).parameters for one in get_overloads(predict_pipeline))
    assert {name: one.default for name, one in by_torch.items()} == {name: one.default for name, one in known.items()}
    assert len(others) == 2
    for other in others:
        assert {name: known[name].default for name in other if name != "runtime"} == {
            name: one.default for name, one in other.items() if name != "runtime"
        }


@pytest.mark.parametrize(("function", "kept"), [(predict_pipeline, PipelineArguments), (plan_pipeline, PlanArguments)])
def test_arguments_of_pipelines_are_kept_as_they_came(function, kept):
    """`PipelineArguments` has all parameters of `predict_pipeline` with their defaults, `PlanArguments` those of
    `plan_pipeline`, and the files of programs name no other ones."""
    known = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    required = {name for name, default in known.items() if default is inspect.Parameter.empty}
    made = kept(*required)
    assert required == {"pipeline", "height", "width"}
    assert {name: getattr(made, name) for name in known.keys() - required} == {
        name: default for name, default in known.items() if name not in required
    }
    more = {field.name for field in fields(kept)} - known.keys()
    assert more == (
        {"model_note"} if kept is PipelineArguments else {"model_note", "offload", "vae", "vae_memory_limit"}
    )
    for runtime in PLANNED_RUNTIMES:
        program = import_module(f"vaemem.pipelines.by_{runtime.replace('.', '')}")
        assert {*program.UNUSED} <= {field.name for field in fields(PlanArguments)}
