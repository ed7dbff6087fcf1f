"""What the README shows is executed, and the tables in it that need no measurement are computed again."""

import io
import json
import re
import shlex
import threading
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from engine import small_vae

import vaemem
from vaemem.__main__ import main
from vaemem.cli.commands import COMMANDS
from vaemem.cli.parsing import make_parser

pytestmark = pytest.mark.python

FILE = Path(__file__).parent.parent / "README.md"
if not FILE.exists():
    pytest.skip("the README is not here", allow_module_level=True)
README = FILE.read_text("utf-8")
PROGRAMS, SHELL = (
    re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL) for kind in ("python", "console")
)


def rows(section, file=FILE):
    """The cells of a section's first table, line by line, without its header."""
    text = file.read_text("utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return text, [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_blocks_are_found():
    fences = re.findall(r"^```(.*)$", README, re.MULTILINE)
    assert len(PROGRAMS) >= 4 and len(SHELL) == 2 and len(fences) == 2 * (len(PROGRAMS) + len(SHELL))
    assert len(README.splitlines()) <= 150


def test_what_is_typed_prints_what_is_shown(capsys):
    for typed, *shown in map(str.splitlines, SHELL):
        main(shlex.split(typed.removeprefix("$ vaemem ")))
        assert [*capsys.readouterr().out.splitlines()[: len(shown) - 1], "..."] == shown


def test_every_command_answers_a_question():
    _, shown = rows("Questions and commands")
    typed = [command for _, commands, _ in shown for command in re.findall(r"`vaemem (.*?)`", commands)]
    assert {command.partition(" ")[0] for command in typed} == {name.partition(" ")[0] for name in COMMANDS}
    for command in typed:
        if " " in command:
            make_parser().parse_args(shlex.split(command))  # which ends where a word is wrong
    for _, _, function in shown:
        for name in re.findall(r"`(?:vaemem|VAE)\.(\w+)`", function):
            assert hasattr(vaemem, name) or hasattr(vaemem.VAE, name)


def test_programs_run(tmp_path, monkeypatch):
    """In their order, in one namespace, with small images; the files that they load are made here."""
    Image = pytest.importorskip("PIL.Image")
    for package in ("torch", "diffusers", "transformers", "pandas", "scipy"):
        pytest.importorskip(package)
    from torch_pipelines import PIPELINES

    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
    Image.fromarray(pixels).save("photo.jpg")
    vaemem.VAE.random("flux").save("ae.safetensors", layout="bfl")
    small_vae("sd").save("pipeline/vae")
    (tmp_path / "pipeline" / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (tmp_path / "parts").mkdir()
    pipe = PIPELINES["sd"](tmp_path / "parts")
    compared = []
    compare = vaemem.compare
    monkeypatch.setattr(vaemem, "compare", lambda table, *how: compared.append(table) or compare(table, *how))
    names = {"image": pixels[None, :, :].repeat(2, axis=0), "button": threading.Event(), "pipe": pipe}
    with redirect_stdout(io.StringIO()) as printed:
        for program in PROGRAMS:
            exec(compile(program, "README.md", "exec"), names)
    assert names["picture"].shape == (2, 40, 56, 3) and "peak" in printed.getvalue()
    assert names["image"].size == (56, 40), "the photo, decoded to its own size"
    assert type(pipe.vae).__module__.startswith("vaemem")
    assert (tmp_path / "sweep.csv").exists()
    assert [{row["source"] for row in table} for table in compared] == [{"measured"}], "no prediction judges itself"


def test_predicted_rows_are_those_that_are_printed(capsys):
    text, shown = rows("Predict PyTorch's memory")
    command = re.search(r"`python -m vaemem (compare .*?)`", text).group(1).split()
    command[1] = str(FILE.parent / command[1])
    assert main(command) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for what, dtype, *numbers in shown:
        model, op = what.lower().replace("sd1.5", "sd15").replace(", tiled", "_tiled").split()
        values = [re.sub(r"^(\d+)(?:\.(\d))?( |$)", lambda m: f"{m[1]}.{m[2] or 0}0{m[3]}", cell) for cell in numbers]
        tiles = ["512", "0.25"] if op.endswith("_tiled") else []
        assert " ".join([model, op, "1024x1024", dtype, *tiles, *values]) in printed
    assert len(shown) == 5


def test_the_pipelines_table_is_what_is_printed(capsys):
    text, shown = rows("An example", FILE.parent / "docs" / "PIPELINES.md")
    for label, *sizes, outcome in shown:
        offload = label.partition(":")[0]
        main(["fits", "sdxl", "1024x1024", "--gpu", "RTX 4060", "--offload", offload, "--format", "json"])
        said = vaemem.predict_pipeline("sdxl", 1024, 1024, gpu="RTX 4060", offload=offload)
        assert json.loads(capsys.readouterr().out) == [json.loads(said.to_json())]
        assert [size for size in sizes if size] == [f"{phase.total / 2**20:.0f}" for phase in said.phases]
        ends = [phase.name for phase in said.phases if phase.fits is False]
        assert outcome == (f"runs out in {ends[0]}" if ends else said.verdict)
        assert f"of {said.available / 2**20:.0f} that" in text
    assert len(shown) == 3


def test_memory_of_the_plans():
    """docs/MEMORY.md: MiB, and T besides the weights."""
    _, table = rows("The memory of the plans", FILE.parent / "docs" / "MEMORY.md")
    assert len(table) == 6
    vae = vaemem.VAE.random("sdxl")
    vae.threads = 2
    for run, *cells in table:
        op, size = run.split()
        side = int(size.partition("x")[0])
        got = vae.estimate(op, side, side)
        parts = got.weights_bytes, got.activations_bytes, got.scratch_bytes, got.output_bytes, got.peak_bytes
        besides = (got.peak_bytes - got.weights_bytes) / (128 * side**2 * 4)
        assert cells == [*(f"{part / 2**20:.1f}" for part in parts), f"{besides:.2f} T"], run
