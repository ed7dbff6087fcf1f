"""What twenty commands print, in tests/golden. VAEMEM_GOLDEN=1 writes the files again after a change that is meant."""

import json
import os
import shlex
from pathlib import Path

import pytest

import vaemem
from vaemem.__main__ import main

pytestmark = [pytest.mark.core, pytest.mark.python]

jsonschema = pytest.importorskip("jsonschema")

HERE = Path(__file__).parent
SCHEMA = HERE.parent / "docs" / "answer.schema.json"
SEED = "seed_table.csv"  # stands for the copy that comes with vaemem
COMMANDS = {
    "fits": "fits sdxl decode 1024 --gpu 'RTX 4060'",
    "fits_all": "fits sdxl decode 1024 --gpu 'RTX 4060' --torch 2.9.1 --all --exact",
    "fits_not": "fits sdxl decode 4096 --gpu 'RTX 3060' --os windows",
    "fits_coarse": "fits sdxl decode 1024 --gpu 'RX 6800' --runtime comfyui",
    "fits_markdown": "fits sd15 decode 768 512 --gpu T4 --format markdown",
    "fits_json": "fits sd15 decode 512 --gpu T4 --torch 2.9.1 --format json",
    "fits_csv": "fits sd15 decode_tiled 1024 --tile 512 --gpu T4 --torch 2.9.1 --format csv",
    "fits_a1111": "fits sdxl decode 1024 --gpu 'RTX 3060' --runtime a1111",
    "pipeline": "fits sdxl 1024 --gpu 'RTX 3060'",
    "pipeline_json": "fits sd15 512 --gpu T4 --offload model --format json",
    "pipeline_sdcpp": "fits flux-dev 1024 --gpu 'RTX 4060' --runtime sd.cpp",
    "plan": "plan flux-dev 1024 --gpu 'RTX 3060'",
    "plan_all": "plan sd15 768 --gpu 'RTX 3060' --all",
    "plan_nothing": "plan flux-dev 1024 --memory 24GB --runtime mlx",
    "plan_json": "plan sd15 512 --gpu T4 --format json",
    "largest": "largest sdxl decode --gpu 'RTX 4060' --torch 2.9.1",
    "explain": "explain 'CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 11.76 GiB'",
    "formula": "formula sd15 --gpu T4 --offload model",
    "fit": f"fit {SEED} --op decode --model sd15 --dtype float16",
    "refused": "fits sdxl decode 1001 --gpu 'RTX 4069'",
}


# All models and programs are searched for an explanation, for 20 seconds; tests/test_out_of_memory.py has shorter ones.
SLOW = {"explain"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.thorough] * (one in SLOW)) for one in COMMANDS])
def test_a_command_prints_what_it_did(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    seed = str(HERE.parent / "vaemem" / "data" / SEED)
    status = main([seed if word == SEED else word for word in shlex.split(COMMANDS[name])])
    out, err = capsys.readouterr()
    shown, file = f"$ vaemem {COMMANDS[name]}\n{out}{err}exit status {status}\n", HERE / "golden" / f"{name}.txt"
    if os.environ.get("VAEMEM_GOLDEN") == "1":
        file.write_text(shown, "utf-8")
    assert shown == file.read_text("utf-8"), "if it is meant: VAEMEM_GOLDEN=1"
    if name.endswith("json"):
        answers = json.loads(out)
        for answer in answers if isinstance(answers, list) else [answers]:
            jsonschema.validate(answer, json.loads(SCHEMA.read_text("utf-8")))


def measured():
    pytest.importorskip("torch")
    from vaemem.pytorch.measuring_pipelines import MeasuredPhase, MeasuredPipeline

    asked = {"pipeline": "FluxPipeline", "height": 64, "width": 64, "device": "NVIDIA L4"}
    predicted = {"decode": vaemem.predict_pipeline("sd15", 512, 512, gpu="T4").phases[-1]}
    phases = [MeasuredPhase("decode", 3 << 30, 4 << 30, 1.5), MeasuredPhase("more", None, 1, 1.5)]
    return MeasuredPipeline(asked, phases, predicted, "no memory", "torch 2.9.1", ["a note"])


def recorded():
    allocator = vaemem.CachingAllocator()
    allocator.malloc(3 << 20)
    return vaemem.replay(allocator.snapshot())


ANSWERS = {
    "explanation": lambda: vaemem.explain(COMMANDS["explain"], model="sdxl", op="decode"),
    "formula": lambda: vaemem.predict_pipeline("sd15", 512, 512, gpu="T4").formula,
    "closed form": lambda: vaemem.formula("sdxl", "decode", "float16").closed,
    "measurement": measured,
    "bound": lambda: vaemem.bound("comfyui", "sdxl", "float16", torch_version="2.7.1+cu128", sides=(512, 1024)),
    "fit": lambda: vaemem.fit(vaemem.seed_table().filter(op="decode")),
    "fitted line": lambda: vaemem.fit(vaemem.seed_table().filter(op="decode"), "seconds", by=("model", "op"))[0],
    "comparison": lambda: vaemem.compare(vaemem.seed_table().filter(model="sdxl", height=1536)),
    "replay": recorded,
    "plan": lambda: vaemem.plan_pipeline("flux-dev", 1024, 1024, gpu="RTX 4060", runtime="sd.cpp"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_kind_of_answer_follows_the_schema(kind):
    answer, schema = ANSWERS[kind](), json.loads(SCHEMA.read_text("utf-8"))
    said = json.loads(answer.to_json())
    assert said["answer"] == kind and said == json.loads(json.dumps(answer.to_dict()))
    jsonschema.validate(said, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(said | {"more": 1}, schema)
    assert max(len(line) for line in answer.to_text(width=80).splitlines() if "vaemem " not in line) <= 80


def test_every_object_of_the_schema_is_strict():
    def objects(part):
        if isinstance(part, dict):
            yield from [part] * ("properties" in part)
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from objects(inner)

    found = [one for one in objects(json.loads(SCHEMA.read_text("utf-8"))["$defs"]) if "object" in one.get("type", "")]
    assert len(found) > 30 and all(one["additionalProperties"] is False for one in found)


def test_every_file_is_a_commands():
    assert {file.stem for file in (HERE / "golden").iterdir()} == {*COMMANDS} and len(COMMANDS) == 20
