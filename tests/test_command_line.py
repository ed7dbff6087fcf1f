"""The command line: what each command prints, what it refuses and how it ends."""

import errno
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import runpy
import shlex
import struct
import subprocess
import sys
import types
import zlib

import numpy as np
import pytest
from engine import TWO_LEVELS
from errors import complains

import vaemem
import vaemem.nodes
from vaemem import VAE, Table
from vaemem.__main__ import main
from vaemem._arguments import described
from vaemem.cli.commands import COMMANDS
from vaemem.cli.parsing import make_parser
from vaemem.prediction.gpus import find_gpu, gpu_names

pytestmark = pytest.mark.python


def test_estimate_command(capsys):
    assert main(["estimate", "sdxl", "decode", "512x768", "256", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["height"], row["width"]) for row in rows] == [(512, 768), (256, 256)]
    assert {row["source"] for row in rows} == {"estimated"}


def test_sweep_and_fit_commands(capsys, tmp_path):
    path = tmp_path / "table.csv"
    assert main(["sweep", "estimated", "--models", "sdxl", "--sizes", "64", "64x128", "--csv", str(path)]) == 0
    assert capsys.readouterr().out.startswith("Table, 4 rows; in each: ")
    assert len(Table.from_csv(path)) == 4
    assert main(["fit", str(path), "--op", "decode"]) == 0
    assert capsys.readouterr().out.startswith("sdxl decode: allocated_bytes = ")
    assert main(["fit", str(path), "--op", "tiled"]) == 2
    assert complains(capsys.readouterr().err, "fit", names=["table.csv: ", "op=tiled"])
    assert main(["fit", str(path), "--format", "python", "--target", "output_bytes"]) == 0
    assert "def sdxl_encode_output_bytes(" in capsys.readouterr().out


def test_formula_command(capsys):
    card = ["--gpu", "T4"]
    assert main(["formula", "sd15", "--offload", "model", *card]) == 0
    text = capsys.readouterr().out
    assert re.match(r"At 1024x1024, batch 1: at most [\d.]+ GB reserved, [\d.]+ GB allocated; ", text)
    assert "\nsd15, Tesla T4, offload model, VAE whole: the largest line, with N images, MP =\n" in text
    assert "\ndenoise " in text and len(text.splitlines()) <= 34
    assert main(["formula", "flux", "encode"]) == 0
    assert capsys.readouterr().out.startswith("At 1024x1024, batch 1: ")
    assert main(["formula", "sd15", "--vae", "vaemem", "--vae-memory-limit", "1GB", *card]) == 0
    assert main(["formula", "sd15", "--offload", "text_encoder=cpu", *card]) == 0
    assert "text_encoder" in capsys.readouterr().out
    assert main(["formula", "sdxl", "decode", "--dtype", "fp16", *card, "--format", "python"]) == 0
    functions = {}
    exec(capsys.readouterr().out, functions)
    most = functions["sdxl_decode_float16_diffusers_reserved_bytes"](512, 576)
    assert vaemem.predict("sdxl", "decode", 512, 576, "float16", gpu="T4").reserved <= most
    assert main(["formula", "flux", "encode", *card, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["allocated"]["lines"][0]["where"].startswith("encoder.")
    assert main(["formula", "sd15", "decode", "--offload", "model"]) == 2
    assert complains(capsys.readouterr().err, "formula", "--offload", ["decode"])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("command", ["bound", "sweep predicted"])
def test_long_commands_show_on_stderr_how_far_they_are(command, stream, monkeypatch, capsys):
    """On a terminal one line, which is gone at the end; elsewhere lines. No package is needed."""
    seconds = itertools.count(step=3)
    monkeypatch.setattr("vaemem.cli.progress.time.monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    is_log = stream is not Terminal  # of other sides, because a process makes a bound once
    more = {
        "bound": ["invokeai", "--models", "sd15", "--dtypes", "float16", "--sides", "512", str(1024 + 64 * is_log)],
        "sweep predicted": ["--models", "sdxl", "--sizes", "512", "1024"],
    }
    assert main([*command.split(), *more[command]]) == 0
    said = sys.stderr.getvalue()
    assert re.search(rf"vaemem {command}: (\[#+-+\] )?[1-9]\d?%, \d+ s left", said)
    if stream is Terminal:
        assert "\n" not in said and said.endswith("\r\x1b[K") and "[####" in said
    else:
        assert "\r" not in said and all(re.fullmatch(r".*: \d+%, \d+ s left", line) for line in said.splitlines())
    assert "s left" not in capsys.readouterr().out


@pytest.fixture
def comfyui(tmp_path):
    """A folder that looks like ComfyUI's. Its name has an escape sequence, and a byte that is not UTF-8."""
    folder = tmp_path / "\x1b]0;title\x07\x9b2J\udce9"
    try:
        (folder / "comfy").mkdir(parents=True)
    except (OSError, UnicodeEncodeError):
        pytest.skip("the file system has no such names")
    for name in ("main.py", "nodes.py", "comfy/sd.py"):
        (folder / name).write_text("")
    return folder


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_no_name_of_a_file_controls_the_terminal(stream, comfyui, monkeypatch):
    """Neither in answers nor in errors. Elsewhere it is written as it is."""
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "stderr", stream())
    out, err = sys.stdout, sys.stderr
    assert main(["comfyui", str(comfyui)]) == 0
    assert main(["info", f"{comfyui}/none.safetensors"]) == 2
    for said in (out.getvalue(), err.getvalue()):
        assert ("\\x1b]0;title\\x07\\x9b2J" in said) == (stream is Terminal)
        assert bool(re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)) == (stream is not Terminal)


def test_colours_reach_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = sys.stdout
    assert main("fits sdxl decode 512 --gpu T4".split()) == 0
    assert out.getvalue().startswith("\x1b[1;")


def test_a_name_that_the_encoding_lacks_is_escaped(comfyui, monkeypatch):
    for encoding in ("utf-8", "ascii"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        out = sys.stdout
        assert main(["comfyui", str(comfyui)]) == 0
        assert b"\\udce9" in out.buffer.getvalue()


def test_a_full_disk_is_named_and_the_next_copy_succeeds(comfyui, monkeypatch, capsys):
    write = vaemem.nodes.write

    def fail(path, content):
        if path.suffix == ".py":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(vaemem.nodes, "write", fail)
    assert main(["comfyui", str(comfyui)]) == 2
    said = capsys.readouterr().err
    assert os.strerror(errno.ENOSPC)[1:] in said and ".py" in said and "[(" not in said
    monkeypatch.undo()
    assert main(["comfyui", str(comfyui)]) == 0
    assert (comfyui / "custom_nodes" / "vaemem" / "nodes.py").is_file()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError()])
def test_no_error_is_empty(error, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(vaemem, "estimate_sweep", fail)
    assert main(["estimate", "sdxl", "decode", "64"]) == 2
    assert re.fullmatch(r"vaemem estimate: \S.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "module", ["vaemem.cli.completion", "vaemem.cli.parsing", "vaemem.cli.commands", "vaemem._core"]
)
def test_ctrl_c_while_the_command_is_imported(module):
    """It ends with 130, and no traceback."""
    program = f"""
import sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Stop())
from vaemem.__main__ import main
sys.exit(main(["estimate", "sdxl", "decode", "64"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 130
    assert re.fullmatch(r"vaemem( estimate)?: stopped\n", ended.stderr)


class Stopped:
    """Decodes as often as it is let, then Ctrl-C."""

    def __init__(self, monkeypatch, runs):
        self.left, decode = runs, VAE.decode

        def limited(vae, *args, **kwargs):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return decode(vae, *args, **kwargs)

        monkeypatch.setattr(VAE, "random", lambda *args, **kwargs: VAE_RANDOM(config=TWO_LEVELS))
        monkeypatch.setattr(VAE, "decode", limited)


VAE_RANDOM = VAE.random


def test_ctrl_c_keeps_the_finished_rows(monkeypatch, capsys, tmp_path):
    path = tmp_path / "table.csv"
    command = ["sweep", "measured", *"--models sdxl --ops decode --sizes 16 32 48 --csv".split(), str(path)]
    Stopped(monkeypatch, 2)
    assert main(command) == 130
    assert [row["height"] for row in Table.from_csv(path)] == [16, 32]
    output = capsys.readouterr()
    assert output.out.startswith("Table, 2 rows") and complains(output.err, "sweep measured")
    before = path.read_bytes()
    Stopped(monkeypatch, 0)
    assert main(command) == 130 and path.read_bytes() == before


@pytest.mark.parametrize("command", ["sweep estimated", "compare absent.csv"])
def test_a_csv_that_cannot_be_written_is_refused_before_the_first_run(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(vaemem, "estimate_sweep", lambda *args, **kwargs: pytest.fail("it ran"))
    assert main([*command.split(), "--csv", str(tmp_path / "absent" / "table.csv")]) == 2
    assert "absent" in capsys.readouterr().err
    assert main([*command.split(), "--csv", str(tmp_path)]) == 2
    monkeypatch.undo()
    new = tmp_path / "new.csv"
    assert main(["sweep", "estimated", "--models", "sd4", "--csv", str(new)]) == 2 and not new.exists()


def test_backends_command(capsys):
    assert main(["backends"]) == 0
    assert "ref" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (["estimate", "sd4", "decode", "512"], "models"),
        (["estimate", "sdxl", "decode", "511"], None),
        (["estimate", "sdxl", "decode", "1" + "0" * 15 + "x8"], None),
        (["sweep", "measured", "--batch", "0"], "--batch"),
        (["estimate", "sdxl", "decode", "64", "--batch", str(2**62)], None),
        (["estimate", "sdxl", "decode", "64", "--device", "cuda:" + "9" * 5000], "--device"),
        (["fit", "absent.csv"], "table: absent.csv"),
        (["fits", "sdxl", "decode", "512", "--measured", "absent.csv"], "--measured: absent.csv"),
        (["fits", "sd15", "512", "--component", "unet=absent.gguf"], "--component unet: absent.gguf"),
        (["fit", __file__], None),
        (["fits", "sdxl", "512", "--tile", "512"], "--tile"),
        (["fits", "sdxl", "decode", "512", "--offload", "model"], "--offload"),
        (["sweep", "predicted", "--ops", "decode", "--tokens", "7"], "--tokens"),
    ],
)
def test_bad_input_is_a_sentence_not_a_traceback(capsys, arguments, argument):
    assert main(arguments) == 2
    error, command = capsys.readouterr().err, " ".join(arguments[: 2 if arguments[0] == "sweep" else 1])
    assert complains(error, command, argument) and "Traceback" not in error


ESTIMATE = ["estimate", "sdxl", "decode", "64"]
USAGE = [["estimate", "sdxl", "decode", "5x5x5"], ["estimate", "sdxl", "tile", "8"], ["decoed"]]
USAGE += [["estimate", "sdxl", "decode", "9" * 400], *([*ESTIMATE, "--batch", n] for n in ("-1", "1e3", "9" * 5000))]
USAGE += [[*ESTIMATE, "--precision", "best"], [*ESTIMATE, "--tf32"], [*ESTIMATE, "more"], ["--verison"], ["predict"]]
NEAREST = {"--tf32": " --", "--verison": "--version", "decoed": "'decode'", "predict": "fits"}


@pytest.mark.parametrize("arguments", USAGE)
def test_bad_usage(capsys, arguments):
    """One line, with the nearest of what there is, and where to read more."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said, name = capsys.readouterr().err, " estimate" * (arguments[0] == "estimate")
    assert caught.value.code == 2 and said.count("\n") == 1 and said.startswith(f"vaemem{name}: ")
    assert said.endswith(f" (see vaemem{name} --help)\n") and NEAREST.get(arguments[-1], "") in said


def test_a_flag_that_is_none_is_named_before_what_is_missing(capsys):
    with pytest.raises(SystemExit):
        main(["decode", "z.npy", "--wieghts=F", "-o", "x.png"])
    assert complains(capsys.readouterr().err, "decode", names=["--wieghts", "--weights"])


def test_python_dash_m(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vaemem.__main__")  # as in a fresh interpreter
    monkeypatch.setattr(sys, "argv", ["vaemem", "fit", "absent.csv"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("vaemem", run_name="__main__")
    assert caught.value.code == 2 and "absent.csv" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["sweep"]])
def test_alone_it_prints_its_help(words, capsys):
    """One line a command that fits 80 columns, every command once, and examples at the end."""
    assert main(words) == 0
    said = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z]+) +[A-Z].*\.$", said, re.M)
    kinds = {name.split()[-1] for name in COMMANDS if " " in name}
    assert sorted(listed) == sorted(kinds if words else {"sweep", *(name for name in COMMANDS if " " not in name)})
    assert said.startswith("usage: vaemem") and max(map(len, said.splitlines())) <= 80
    assert len(said.partition("\nexample")[2].splitlines()) == (2 if words else 4)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(name):
    said = make_parser(at_once=COMMANDS).commands[name].format_help()
    examples = re.split(r"\nexamples?:\n", said)[-1].strip().splitlines()
    for example in examples:
        assert make_parser().parse_args(shlex.split(example)[1:]).command == name


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert not caught.value.code and capsys.readouterr().out == f"vaemem {vaemem.__version__}\n"


def test_the_shell_may_ask_what_comes_next(monkeypatch):
    """Only the commands in the line are given their flags."""
    asked = []

    def autocomplete(parser, validator):
        asked.extend(name for name, one in parser.commands.items() if len(one._actions) > 1)
        assert validator("RTX 4090", "rtx") and not validator("RTX 4090", "gtx")
        raise SystemExit(0)

    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", "vaemem fits sdxl ")
    monkeypatch.setitem(sys.modules, "argcomplete", types.SimpleNamespace(autocomplete=autocomplete))
    with pytest.raises(SystemExit):
        main([])
    assert asked == ["fits"]


def test_missing_extras_are_named_all_at_once(monkeypatch, capsys, tmp_path):
    for package in ("PIL", "PIL.Image", "matplotlib", "matplotlib.figure", "tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    names = ["PIL, matplotlib, tqdm: ", "pip install 'vaemem[image,plot,progress]'"]
    assert complains(capsys.readouterr().err, "demo", names=names)
    assert not (tmp_path / "out").exists()
    for package in ("torch", "diffusers", "transformers", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    for more, missing, extras in (
        ([], "torch, diffusers, transformers", "pytorch,diffusers"),
        (["--offload", "model"], "torch, diffusers, transformers, accelerate", "pytorch,diffusers"),
    ):
        assert main(["measure", "sd15", "512", "--random", *more]) == 2
        assert complains(capsys.readouterr().err, "measure", names=[missing, f"'vaemem[{extras}]'"])


def test_what_tab_offers_is_known():
    offered = {
        (name, action.dest): action.completer()
        for name, sub in make_parser(at_once=COMMANDS).commands.items()
        for action in sub._actions
        if hasattr(action, "completer")
    }
    assert all(names and len(set(names)) == len(names) for names in offered.values())
    cards = offered["fits", "gpu"]
    assert {"RTX 4090", "T4", "RX 7900 XTX", "RTX 4090 Laptop GPU"} <= set(cards)
    found = [find_gpu(name).name for name in cards]
    assert len(set(found)) == len(found) and {*gpu_names()} <= set(found)
    assert {"ltx2", "ltx2.3"} <= set(offered["estimate", "model"])  # vaemem's own runs
    for model in {*offered["estimate", "model"]} - {"ltx2", "ltx2.3"}:
        assert vaemem.predict(model, "decode", 512, 512, gpu="T4").verdict
    for offload in offered["fits", "offload"]:
        assert vaemem.predict_pipeline("sd15", 512, 512, offload=offload, gpu="T4").verdict
    for way in offered["fits", "vae"]:
        limit = {"vae_memory_limit": "1 GB"} if way == "vaemem" else {}
        assert vaemem.predict_pipeline("sd15", 512, 512, vae=way, gpu="T4", **limit).verdict
    assert {"sdxl", "flux-schnell"} <= {*offered["plan", "pipeline"]}
    assert {"flux-schnell", "taesd"} <= {*offered["formula", "model"]} == {*offered["fits", "model"]}


@pytest.mark.parametrize(
    ("line", "want"),
    [("fits sdx", {"sdxl", "sdxl-controlnet", "sdxl-inpaint", "sdxl-refiner"}), ("fits sdxl decode 512 --gpu rtx\\ 409",
      {"RTX 4090", "RTX 4090 D", "RTX 4090 Laptop GPU"}),
     ("plan flux-s", {"flux-schnell"}), ("fits sdxl decode 512 --runtime comf", {"comfyui"})],
)  # fmt: skip
def test_tab(line, want, tmp_path):
    pytest.importorskip("argcomplete", reason="Tab needs the extra 'completion'")
    line, out = f"vaemem {line}", tmp_path / "offered"
    out.touch()
    settings = {"": "1", "_IFS": "\n", "_STDOUT_FILENAME": str(out), "_SHELL": "bash"}
    env = os.environ | {f"_ARGCOMPLETE{name}": value for name, value in settings.items()}
    env |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([sys.executable, "-m", "vaemem"], env=env, check=True, timeout=120)
    assert {name.replace("\\", "").strip() for name in out.read_text().splitlines()} == want


def test_a_table_from_a_pipe(monkeypatch, capsys):
    assert main(["fits", "sdxl", "decode", "512", "1024", "--format", "csv"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(capsys.readouterr().out))
    assert main(["fit", "-"]) == 0
    assert capsys.readouterr().out.startswith("sdxl decode: allocated_bytes = ")


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "vaemem", "fits", "sdxl", "decode", *["512"] * 300, "--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "vae"
    VAE.random(config=TWO_LEVELS).save(path)
    return str(path)


def test_a_picture_there_and_back(weights, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    source, latents, out = (str(tmp_path / name) for name in ("a.png", "z.npy", "b.png"))
    image.fromarray(np.full((61, 50, 3), 99, np.uint8)).save(source)
    assert main(["encode", source, source, "--weights", weights, "-o", latents, "--pad", "edge"]) == 0
    assert np.load(latents).shape == (2, 4, 31, 25)
    assert main(["decode", latents, "--weights", weights, "-o", out, "--size", "61x50", "--memory-limit", "1 GB"]) == 0
    assert [np.asarray(image.open(tmp_path / f"b-{i}.png")).shape for i in range(2)] == [(61, 50, 3)] * 2
    assert "b-1.png" in capsys.readouterr().out
    vae = VAE.load(weights)
    want = vae.decode(np.load(latents), output_type="pil", size=(61, 50))
    np.testing.assert_array_equal(image.open(tmp_path / "b-0.png"), want[0])


def test_tiles_are_advised_and_taken(weights, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    source, latents, out = (str(tmp_path / name) for name in ("a.png", "z.npy", "b.png"))
    image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 300, 4), np.uint8)).save(source)
    vae = VAE.load(weights)
    x = np.asarray(image.open(source).convert("RGB"))[None]
    limit = str(VAE.load(weights, parts="encoder").smallest("encode", 256, 300) - 1)
    encode = ["encode", source, "--weights", weights, "-o", latents]
    assert main([*encode, "--memory-limit", limit]) == 2
    said = capsys.readouterr().err
    advised = re.search(r"; (--tile (\d+)) without a limit takes ([\d.]+) MiB, but is not exact\n", said)
    assert advised, said
    assert main([*encode, *advised[1].split()]) == 0
    error = capsys.readouterr().err
    assert "vaemem encode: the image's alpha was dropped\n" in error
    assert re.search(rf"\nvaemem encode: \d+ tiles of {advised[2]}x{advised[2]}\n", error)
    side = int(advised[2])
    want = vae.encode(x, tiling=vaemem.Tiling(side)).mode()
    np.testing.assert_array_equal(np.load(latents), want)
    assert main(["decode", latents, "--weights", weights, "-o", out, "--tile", str(side)]) == 0
    np.testing.assert_array_equal(image.open(out), vae.decode(want, tiling=vaemem.Tiling(side), output_type="uint8")[0])
    assert main([*encode, "--tile", "64", "--memory-limit", "1 GB"]) == 2
    assert complains(capsys.readouterr().err, "encode", "--memory-limit", ["--tile"])
    assert main([*encode, "--tile", "63"]) == 2
    assert complains(capsys.readouterr().err, "encode", "--tile", [63])


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_latents_of_files(suffix, tmp_path):
    from vaemem.engine.latents import read_latents

    want, path = np.arange(64, dtype=np.float32).reshape(4, 4, 4), tmp_path / f"z.{suffix}"
    if suffix == "npy":
        np.save(path, want)
    elif suffix == "pt":
        torch = pytest.importorskip("torch")
        torch.save({"latents": torch.from_numpy(want), "step": 3}, path)
    else:
        pytest.importorskip("safetensors.numpy").save_file({"latent_tensor": want, "version": want[0, 0, :1]}, path)
    np.testing.assert_array_equal(read_latents(path), want[None])


def test_what_holds_no_latents_is_refused(weights, tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    bad, good = str(tmp_path / "bad.npy"), str(tmp_path / "good.npy")
    np.save(bad, np.zeros(3))
    np.save(good, np.zeros((1, 4, 8, 8), np.float32))
    empty, cut, words, archive = (str(tmp_path / f"{name}.npy") for name in ("empty", "cut", "words", "archive"))
    open(empty, "wb").close()
    with open(good, "rb") as whole, open(cut, "wb") as part:
        part.write(whole.read(200))
    np.save(words, np.full((1, 4, 8, 8), "a"))
    with open(archive, "wb") as f:
        np.savez(f, z=np.zeros((1, 4, 8, 8)))
    for arguments, names in (
        *((["decode", file, "--weights", weights, "-o", "x.png"], [file]) for file in (empty, cut, archive)),
        (["decode", words, "--weights", weights, "-o", "x.png"], [words, "array"]),
        (["decode", bad, "--weights", weights, "-o", "x.png"], [bad, "array"]),
        (["decode", "a.png", "--weights", weights, "-o", "x.png"], ["a.png", ".npy"]),
        *(
            (["decode", good, "--weights", weights, "-o", f"x.{end}"], ["--out: ", f"x.{end}"])
            for end in ("xyz", "psd", "xbm", "hdf")  # unknown, only read, without colours, without a writer
        ),
        (["encode", "a.png", "--weights", weights, "-o", "x.png"], [".npy"]),
        (["info", bad], ["safetensors"]),
        (["largest", "sdxk", "decode", "--engine", "1 GiB"], ["model: "]),
    ):
        assert main(arguments) == 2
        assert complains(capsys.readouterr().err, arguments[0], names=names), arguments


def png_chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(side, data):
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)) + data


def npy(array):
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


BROKEN = {  # by the library whose own kind of error it makes
    "bool.npy": (npy(np.zeros((1, 4, 8, 8), bool)), "expected one array of real numbers (N, C, h, w)"),
    "structured.npy": (npy(np.zeros((1, 4, 8, 8), [("a", "f4")])), "expected one array of real numbers (N, C, h, w)"),
    "cut.npy": (b"\x93NUMPY\x01\x00\x0d\x00{'descr': '<f", "expected an array that np.save wrote"),
    "large.npy": (
        npy(np.zeros(2)).replace(b"(2,), }", b"(9" + b"9" * 12 + b",), }"),
        "expected an array that np.save wrote",
    ),
    "z.pt": (b"", "expected tensors that torch.save wrote"),
    "text.pt": (b"no pickle at all", "expected tensors that torch.save wrote"),
    "table.pt": (b"a,b\n1,2\n", "expected tensors that torch.save wrote"),
    "zip.pt": (b"PK\3\4" + bytes(60), "expected tensors that torch.save wrote"),
    "bomb.png": (png(30000, png_chunk(b"IDAT", b"x")), "expected an image file"),
    "broken.png": (png(8, png_chunk(b"IDAT", b"x") + b"\0\0\0\5ID\0T12345"), "expected an image file"),
    "checksum.icns": (b"icns\0\0\0\x30ic07\0\0\0\x28" + png(128, b"")[:-5] + bytes(11), "expected an image file"),
    "words.csv": (b"\xff\xfe\x00\x01", "expected UTF-8 text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_a_library_raises_about_a_file_is_one_line_that_names_it(name, weights, tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    content, wanted = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    command = {".npy": "decode", ".pt": "decode", ".csv": "compare"}.get(path.suffix, "encode")
    if path.suffix == ".pt":
        pytest.importorskip("torch")
    out = str(tmp_path / {"decode": "x.png", "encode": "x.npy"}.get(command, "x.csv"))
    options = ["--csv", out] if command == "compare" else ["--weights", weights, "-o", out]
    assert main([command, str(path), *options]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and wanted in said and said.count("\n") == 1


def test_what_to_do_is_said_of_options(weights, tmp_path, capsys):
    image, source = pytest.importorskip("PIL.Image"), str(tmp_path / "pad=1.png")
    image.fromarray(np.zeros((61, 50, 3), np.uint8)).save(source)
    latents, alone = str(tmp_path / "z.npy"), str(tmp_path / "alone.safetensors")
    np.save(latents, np.zeros((1, 4, 8, 8), np.float32))
    VAE.random("sdxl", parts="decoder").save(alone)
    for arguments, names in (
        (["encode", source, "--weights", weights, "-o", latents], ["--pad reflect", "--pad edge"]),
        (["encode", "pad=1.jpg", "--weights", weights, "-o", latents], ["x: pad=1.jpg: "]),
        (
            ["decode", latents, "--weights", alone, "-o", str(tmp_path / "x.png"), "--scaled"],
            ["--model", "--config"],
        ),
        (["plan", "sd15", "512", "--memory", "0.5 GB"], ["memory: ", "1 GB"]),
        (["plan", "flux", "512", "--runtime", "mlx", "--steps", "3"], ["steps: ", "--runtime mlx"]),
        (
            ["largest", "sdxl", "decode", "--engine", "1 GB", "--torch", "2.8.0", "--no-tf32"],
            ["--torch 2.8.0, --no-tf32"],
        ),
        (["fits", "sdxl", "decode", "512", "--gpu", "RTX 9"], ["sm_120", "--memory '16 GB'"]),
    ):
        assert main(arguments) == 2
        assert complains(capsys.readouterr().err, arguments[0], names=names), arguments


def test_every_flag_says_what_it_is_for():
    """In whole sentences, which are those of the functions' own documentation where they take the same argument."""
    subparsers = make_parser(at_once=COMMANDS).commands
    for name, sub in subparsers.items():
        for action in sub._actions[1:]:
            assert re.search(r"[.:)\"]$", action.help), (name, action.dest)
            assert ": shared" not in action.help and "`" not in action.help
        said = [sentence for action in sub._actions for sentence in action.help.split(". ") if len(sentence) > 40]
        assert len(set(said)) == len(said), name  # each of them once
    gpu = next(action for action in subparsers["fits"]._actions if action.dest == "gpu")
    assert gpu.help.startswith("A card's name,") and gpu.help.endswith("says which card stands for yours.")


def test_what_functions_share_is_in_the_documentation_of_each():
    for name in vaemem.__all__:
        assert ": shared" not in (getattr(vaemem, name).__doc__ or ""), name
    for function in (vaemem.predict, vaemem.predict_pipeline, vaemem.plan_pipeline):
        assert set(inspect.signature(function).parameters) == set(described(function))
        assert described(function)["used"].startswith("The card's memory that others hold, such as the desktop")


def test_info(weights, capsys):
    assert main(["info", weights, "--sizes", "64"]) == 0
    said = capsys.readouterr().out
    assert "diffusers layout" in said and "block_out_channels" in said and "Table, 2 rows" in said


def test_info_of_a_half(tmp_path, capsys):
    for half, op in (("decoder", "decode"), ("encoder", "encode")):
        vae, path = VAE.random("sdxl", parts=half), str(tmp_path / f"{half}.safetensors")
        vae.save(path)
        assert main(["info", path, "--sizes", "64"]) == 0
        said = capsys.readouterr().out
        assert f"the {half} alone" in said and f" {vae.parameters:,} parameters" in said
        want = vae.estimate(op, 64, 64)
        rows = [line.split() for line in said.splitlines() if line.startswith("sd ")]
        assert [row[1] for row in rows] == [op] and f"{want.weights_bytes / 2**20:.2f}" in rows[0]


def test_fits_says_so_by_its_status(capsys):
    assert main(["fits", "sdxl", "decode", "512", "--gpu", "RTX 4060"]) == 0
    assert capsys.readouterr().out.startswith("Fits: it takes ")
    assert main(["fits", "sdxl", "decode", "512", "4096", "--gpu", "RTX 4060"]) == 1
    said = capsys.readouterr().out
    assert "\n\nDoes not fit: it needs at least" in said and "  sdxl decode 4096x4096 in float32 from" in said
    commands = [shlex.split(line)[1:] for line in said.splitlines() if line.startswith("    vaemem ")]
    assert len(commands) >= 3
    for command in commands:  # as it is printed
        assert main(command) == 0
    capsys.readouterr()
    for safe, status in (([], 0), (["--safe"], 3)):
        assert main(["fits", "sdxl", "decode", "2048", "--gpu", "RTX 4090", *safe]) == status
        assert capsys.readouterr().out.startswith("Tight: it takes ")
    assert main(["fits", "sdxl", "decode", "512", "--gpu", "RTX 4060", "--format", "json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["verdict"], one["asked"]["dtype"], one["asked"]["weights_dtype"]) == ("fits", "float32", "float16")
    assert (
        sum(one["parts_bytes"].values()) == vaemem.predict("sdxl", "decode", 512, 512, gpu="RTX 4060").reported_memory
    )
    assert main(["fits", "sdxl", "decode", "512", "768", "--gpu", "RTX 4060", "--format", "json"]) == 0
    assert [one["asked"]["height"] for one in json.loads(capsys.readouterr().out)] == [512, 768]


def test_the_largest_of_our_own_engine(capsys):
    assert main(["largest", "sdxl", "decode", "--engine", "2 GiB"]) == 0
    assert re.match(r"\d+x\d+\n<Run decode", capsys.readouterr().out)
    for given in (["--gpu", "RTX 4090"], ["--used", "1 GB"], ["--no-tf32"]):
        assert main(["largest", "sdxl", "decode", "--engine", "2 GiB", *given]) == 2
        assert complains(capsys.readouterr().err, "largest", "--engine", given[:1])
    assert main(["largest", "sdxl", "decode", "--precision", "high"]) == 2
    assert complains(capsys.readouterr().err, "largest", "--precision", ["--engine"])


def test_a_pipelines_phases(capsys):
    command = ["fits", "sd15", "512x512", "--gpu", "T4", "--offload", "model", "--vae", "tiled"]
    assert main([*command, "--component", "unet=nf4", "--format", "json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    want = vaemem.predict_pipeline("sd15", 512, 512, gpu="T4", offload="model", vae="tiled", components={"unet": "nf4"})
    assert said == json.loads(want.to_json())
    assert main([*command, "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("model,op,phase,")
    assert main(["fits", "flux", "1024", "--gpu", "RTX 3060", "--memory", "12 GB"]) == 1, "it does not fit"
    assert "runs out in load" in " ".join(capsys.readouterr().out.split())
    assert main(["fits", "sdxl", "1024", "--runtime", "sd.cpp", "--offload=--offload-to-cpu"]) == 0
    assert "--offload-to-cpu" in capsys.readouterr().out
    assert main(["fits", "sd15", "512", "--offload", "cpu"]) == 2
    names = ["none, model, sequential, block_level, leaf_level", "'cpu'"]
    assert complains(capsys.readouterr().err, "fits", "--offload", names)


# ---- closed and broken streams ----


def shell(line: str) -> subprocess.CompletedProcess:
    command = f'vaemem() {{ {shlex.quote(sys.executable)} -m vaemem "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)


def test_closed_streams_are_said_in_a_line():
    done = shell("vaemem fits sdxl decode 512 --gpu T4 >&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "output" in done.stderr
    done = shell("vaemem explain <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "input" in done.stderr


def test_a_pipe_that_nobody_reads_leaves_the_exit_status():
    line = "vaemem fits sdxl decode 4096 --gpu T4 --format json | true; echo ${PIPESTATUS[0]}"
    done = shell(f"sleep 0; {line}")
    assert done.stdout == "1\n" and not done.stderr


def test_the_end_of_a_long_input_is_explained():
    message = "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 7.79 GiB"
    noise = "yes 'a line of a log' | head -c 30000000"
    done = shell(f"({noise}; echo '{message}') | vaemem explain - --model sdxl --op decode")
    alone = shell(f"echo '{message}' | vaemem explain - --model sdxl --op decode")
    assert done.returncode == alone.returncode == 0 and done.stdout == alone.stdout and "1536x1536" in done.stdout


def test_a_path_that_is_not_there_is_no_message():
    done = shell("vaemem explain nowhere/run.log")
    assert done.returncode == 2 and "nowhere/run.log" in done.stderr


def test_plan_prints_the_code_alone(capsys):
    asked = {"gpu": "RTX 3060", "memory": "4GB"}
    assert main(["plan", "sd15", "1024", "--gpu", asked["gpu"], "--memory", asked["memory"], "--code"]) == 0
    assert capsys.readouterr().out == vaemem.plan_pipeline("sd15", 1024, 1024, **asked).recommended.way.code + "\n"


@pytest.mark.parametrize(
    ("command", "flag", "names"),
    [
        ("formula flux --runtime comfyui", "--runtime", ["diffusers"]),
        ("fits zimage-turbo 768 --batch 6", "--batch", [4, "zimage-turbo"]),
        ("fits sdxl 512 --component unet=I8", "--component unet", ["float32, float16, bfloat16, fp8, int8"]),
        ("fits sdxl 512 --component unet=nf4 --component unet=int8", "--component", ["unet", "nf4", "int8"]),
        ("fits sdxl 512 --lora 0", "--lora rank", [1, 0]),
        ("fits sdxl 512 --lora fused", "--lora", []),
        ("fits sdxl 512 --lora absent.safetensors", "--lora: absent.safetensors", []),
        ("fits sdxl 512 --memory -1", "--memory", []),
        ("plan sdxl 512 --measured b=1 --measured b=2", "--measured", ["b", 1.0, 2.0]),
    ],
)
def test_refusals_name_the_flag(command, flag, names, capsys):
    words = command.split()
    if words[0] != "formula":
        words += ["--gpu", "T4"]
    assert main(words) == 2
    assert complains(capsys.readouterr().err, words[0], flag, names)


def test_types_may_be_spelt_as_files_spell_them(capsys):
    for spelt, name in (("F32", "float32"), ("BF16", "bfloat16"), ("F8_E4M3", "fp8"), ("q4_k", "Q4_K")):
        answers = []
        for type in (spelt, name):
            main(["fits", "flux", "512", "--component", f"transformer={type}", "--gpu", "H100", "--format", "json"])
            answers.append(json.loads(capsys.readouterr().out)[0]["peak_bytes"])
        assert answers[0] == answers[1]


def test_a_script_is_all_that_code_prints(capsys):
    assert main(["plan", "sdxl", "1024", "--gpu", "T4", "--time-limit", "1", "--code"]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("Nothing fits.")


def test_backends_and_info_as_json(tmp_path, capsys):
    assert main(["backends", "--format", "json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [row["name"] for row in vaemem.backends()]
    vaemem.VAE.random("taesd").save(tmp_path / "vae")
    assert main(["info", str(tmp_path / "vae"), "--sizes", "64", "--format", "json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert (held["model"], held["layout"], held["parts"]) == ("taesd", "diffusers", "all")
    assert held["parameters"] == vaemem.VAE.random("taesd").parameters and held["runs"]


def test_a_vae_and_modules_complete_by_tab():
    """As IPython asks jedi; and names of modules that are no part of them are not offered."""
    jedi = pytest.importorskip("jedi")
    vae = vaemem.VAE.random("taesd")
    offered = {found.name for found in jedi.Interpreter("vae.", [{"vae": vae}]).complete()}
    assert {"decode", "dtype", "precision", "estimate"} <= offered
    assert "tile_peaks" in dir(vaemem.plot) and not {"np", "Any"} & {*dir(vaemem.plot)}
    if importlib.util.find_spec("torch"):
        pytorch = importlib.import_module("vaemem.pytorch")
        assert {"AutoencoderKL", "AutoencoderKLFlux2", "measure"} <= {*dir(pytorch)}
