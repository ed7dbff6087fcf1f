"""The command line: what each command prints, what it refuses and how it ends."""

import io
import json
import re
import runpy
import subprocess
import sys

import pytest

import vaemem
from vaemem import VAE, Table
from vaemem.__main__ import main

# An AutoencoderKL of two levels: an image is twice its latent's size.
SMALL = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
}


def test_estimate_command(capsys):
    assert main(["estimate", "sdxl", "decode", "512x768", "256", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["height"], row["width"]) for row in rows] == [(512, 768), (256, 256)]
    assert {row["source"] for row in rows} == {"estimated"}


def test_sweep_and_fit_commands(capsys, tmp_path):
    path = tmp_path / "table.csv"
    assert main(["sweep", "--models", "sdxl", "--sizes", "64", "64x128", "--estimate", "--csv", str(path)]) == 0
    assert capsys.readouterr().out.startswith("Table, 4 rows\n")
    assert len(Table.from_csv(path)) == 4
    assert main(["fit", str(path), "--op", "decode"]) == 0
    assert capsys.readouterr().out.startswith("sdxl decode: allocated_bytes = ")
    assert main(["fit", str(path), "--op", "tiled"]) == 2
    assert "table.csv: no row has op=tiled" in capsys.readouterr().err
    assert main(["fit", str(path), "--format", "python", "--target", "output_bytes"]) == 0
    assert "def sdxl_encode_output_bytes(" in capsys.readouterr().out


class Stopped:
    """Decodes as often as it is let, then Ctrl-C."""

    def __init__(self, monkeypatch, runs):
        self.left, decode = runs, VAE.decode

        def limited(vae, *args, **kwargs):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return decode(vae, *args, **kwargs)

        monkeypatch.setattr(VAE, "random", lambda *args, **kwargs: VAE_RANDOM(config=SMALL))
        monkeypatch.setattr(VAE, "decode", limited)


VAE_RANDOM = VAE.random


def test_ctrl_c_keeps_the_finished_rows(monkeypatch, capsys, tmp_path):
    path = tmp_path / "table.csv"
    command = ["sweep", "--models", "sdxl", "--ops", "decode", "--sizes", "16", "32", "48", "--csv", str(path)]
    Stopped(monkeypatch, 2)
    assert main(command) == 130
    assert [row["height"] for row in Table.from_csv(path)] == [16, 32]
    output = capsys.readouterr()
    assert output.out.startswith("Table, 2 rows") and output.err == "vaemem sweep: stopped\n"
    before = path.read_bytes()
    Stopped(monkeypatch, 0)
    assert main(command) == 130 and path.read_bytes() == before


@pytest.mark.parametrize("command", ["sweep", "reproduce"])
def test_a_csv_that_cannot_be_written_is_refused_before_the_first_run(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("vaemem.tables.sweep.sweep", lambda *args, **kwargs: pytest.fail("it ran"))
    assert main([command, "--csv", str(tmp_path / "absent" / "table.csv")]) == 2
    assert "absent" in capsys.readouterr().err
    assert main([command, "--csv", str(tmp_path)]) == 2
    monkeypatch.undo()
    new = tmp_path / "new.csv"
    assert main(["sweep", "--models", "sd4", "--csv", str(new)]) == 2 and not new.exists()


def test_backends_command(capsys):
    assert main(["backends"]) == 0
    assert "ref" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "sd4", "decode", "512"], "vaemem estimate: models: want sd15, sdxl, flux"),
        (["estimate", "sdxl", "decode", "511"], "vaemem estimate: .*511"),
        (["estimate", "sdxl", "decode", "1" + "0" * 15 + "x8"], "vaemem estimate: "),
        (["sweep", "--batch", "0"], "vaemem sweep: batch"),
        (["estimate", "sdxl", "decode", "64", "--batch", str(2**62)], "vaemem estimate: "),
        (["estimate", "sdxl", "decode", "64", "--device", "cuda:" + "9" * 5000], "vaemem estimate: device: want cpu"),
        (["fit", "absent.csv"], "vaemem fit: .*absent.csv"),
        (["fit", __file__], "vaemem fit: .*unknown column"),
    ],
)
def test_bad_input_is_a_sentence_not_a_traceback(capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.match(message, error) and "Traceback" not in error


ESTIMATE = ["estimate", "sdxl", "decode", "64"]
USAGE = [["estimate", "sdxl", "decode", "5x5x5"], ["estimate", "sdxl", "tile", "8"], ["decoed"]]
USAGE += [["estimate", "sdxl", "decode", "9" * 400], *([*ESTIMATE, "--batch", n] for n in ("-1", "1e3", "9" * 5000))]


@pytest.mark.parametrize("arguments", USAGE)
def test_bad_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: vaemem" in capsys.readouterr().err


def test_python_dash_m(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vaemem.__main__")  # as in a fresh interpreter
    monkeypatch.setattr(sys, "argv", ["vaemem", "fit", "absent.csv"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("vaemem", run_name="__main__")
    assert caught.value.code == 2 and "absent.csv" in capsys.readouterr().err


def test_alone_it_prints_its_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: vaemem")


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert not caught.value.code and capsys.readouterr().out == f"vaemem {vaemem.__version__}\n"


def test_a_table_from_a_pipe(monkeypatch, capsys):
    assert main(["predict", "sdxl", "decode", "512", "1024", "--format", "csv"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(capsys.readouterr().out))
    assert main(["fit", "-"]) == 0
    assert capsys.readouterr().out.startswith("sdxl decode: allocated_bytes = ")


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "vaemem", "predict", "sdxl", "decode", *["512"] * 300, "--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0
