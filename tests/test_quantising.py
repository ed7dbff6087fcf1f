"""Layers of torchao and optimum-quanto: the tensors that they store and take, compared with the libraries' own. These
run on the CPU, in an environment of their own (make quantised)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from errors import refused

from vaemem import plan_pipeline, predict_pipeline
from vaemem._core import Program
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.pipeline_request import parts_of
from vaemem.pipelines.quantising import SCHEMES, SIXTEEN_BITS, LinearLayer
from vaemem.pipelines.storage import stored, tensor_bytes

# Of a linear layer with 384 outputs, 512 inputs and 200 rows in bfloat16, by torchao 0.18.0 and optimum-quanto 0.2.7:
# the stored tensors, and the most bytes that a call holds, with a bias and without one.
MEASURED = {
    "int8wo": [[196608, 1536, 384], 546816, 546816],
    "int8dq": [[196608, 1536, 384], 820200, 820200],
    "float8wo": [[196608, 1536], 1966080, 1966080],
    "float8dq": [[196608, 4], 1331204, 1331204],
    "qint8": [[196608, 768, 2, 2], 546816, 546816],
    "qfloat8": [[196608, 768, 2, 2], 786432, 786432],
    "qint4": [[98304, 6144, 2, 2], 307200, 153600],
}


def layer_of(type, outputs, inputs, rows):
    """What `quantised_layers` prints, by the package."""
    peaks = []
    for has_bias in (True, False):
        live, most = {}, 0
        tensors = SCHEMES[type].working(LinearLayer(outputs, inputs, 2, has_bias))
        for number, one in enumerate(tensors):
            live[number] = one.bytes + rows * one.row_bytes
            most = max(most, sum(live.values()))
            for earlier, given in enumerate(tensors[:number]):
                if given.lives and earlier + given.lives == number:
                    live.pop(earlier)
        peaks.append(max(most, sum(live.values()) + 2 * outputs * rows))
    (held,) = stored([("weight", (outputs, inputs))], type, "libraries")
    assert held.bytes == tensor_bytes((outputs, inputs), type) == sum(held.pieces)
    return [sorted(held.pieces, reverse=True), *peaks]


@pytest.mark.parametrize("type", MEASURED)
def test_layers_as_they_were_measured(type):
    assert layer_of(type, 384, 512, 200) == MEASURED[type]


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed (make quantised)")
def test_layers_as_the_libraries_run_them():
    sizes = [(384, 512, 200), (256, 768, 24), (1024, 256, 8)]
    command = [sys.executable, Path(__file__).with_name("quantised_layers.py")]
    command += [",".join(map(str, one)) for one in sizes]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = [*map(json.loads, run.stdout.splitlines())]
    assert measured == [{type: layer_of(type, *one) for type in MEASURED} for one in sizes]


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed (make quantised)")
def test_the_code_of_a_plan_makes_the_libraries_configs():
    """Everything before from_pretrained runs."""
    types = {"transformer": "int8wo", "text_encoder_2": "qint4"}
    plan = plan_pipeline("flux", 1024, 1024, gpu="RTX 4090", components=types)
    code = plan.recommended.way.code.partition("pipe = ")[0]
    told = "\nfor name in ('transformer', 'text_encoder_2'):"
    told += "\n    print(quantization_config._resolve_quant_config(name == 'transformer', name).to_dict())"
    command = [sys.executable, "-W", "ignore", "-c", code + told]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(run.stdout.splitlines()) == 2 and "int4" in run.stdout


def test_a_tensor_that_lives_until_the_next_is_there():
    """The second tensor has 600 bytes for each of the product's 7 rows; the first one is given back after it."""
    program = Program("name m\nvariables n\ncall float16; 1 n = 1\nsize 84 n\nsize 1000 n\nmodule +1 b0 -1\nmodule a=0")
    passing = [("a", "a", "whole", 4096, 0, 0, 0, 1), ("a", "a", "product", 8, 0, 600, 12, 0)]
    plain, found = (
        [step[:3] for step in program.trace("float16", (1,), 89, 128, 0, given).steps] for given in ((), passing)
    )
    taken = [("take", 0, 4096), ("take", 1, 8 + 7 * 600), ("give", 0, 0), ("take", 2, 1000)]
    assert found[:4] == taken and found[-1] == ("give", 1, 0) and len(found) == len(plain) + 4


def test_a_layer_of_a_prediction():
    """The unpacked weight is there until its product is, and the product until the call ends."""
    (part,) = (
        part for part in parts_of(PIPELINES["flux"], "bfloat16", {"transformer": "qint8"}, 42)
        if part.role == "transformer"
    )  # fmt: skip
    assert part.working["transformer_blocks.0.ff.net.2"] == [
        ("weight, unpacked", 2 * 3072 * 12288, 0, 0, 1), ("product", 0, 2 * 3072, 2 * 3072 * 12288, 0),
    ]  # fmt: skip


def test_a_plan_refuses_another_card_too():
    with refused("components['text_encoder_2']", names=["Tesla T4 (7.5)"]):
        plan_pipeline("flux", 1024, 1024, gpu="T4", types=["float8dq"])


def test_stored_sizes_of_a_denoiser():
    """Everything but linear layers stays in bfloat16, and so do matrices that the kernels do not take."""
    plain = predict_pipeline("flux", 512, 512).parts["transformer"]
    for type in SIXTEEN_BITS:
        part = predict_pipeline("flux", 512, 512, components={"transformer": f"{type} from bfloat16"}).parts[
            "transformer"
        ]
        kept = sum(w.bytes for w in part.weights if w.type == "bfloat16")
        small = sum(w.bytes for w in part.weights if w.type == type)
        assert part.file_bytes == plain.nbytes and kept + small == part.nbytes
        assert 0.2 < small / plain.nbytes < 0.52 and kept < 0.002 * plain.nbytes


@pytest.mark.parametrize(
    ("type", "settings", "argument", "got"),
    [
        ("svdquant", {}, "components['transformer']", "'svdquant'"),
        ("torch.compile", {}, "components['transformer']", "'torch.compile'"),
        ("int8wo on cuda", {}, "components['transformer']", "'int8wo on cuda'"),
        ("float8dq", {"gpu": "T4"}, "components['transformer']", "Tesla T4 (7.5)"),
        ("qint4", {"offload": "sequential"}, "offload", "'sequential'"),
        ("int8wo", {"dtype": "float32"}, "components['transformer']", "one in float32"),
    ],
)
def test_what_the_libraries_do_not_run_is_refused(type, settings, argument, got):
    with refused(argument, names=[got]):
        predict_pipeline("flux", 1024, 1024, **{"gpu": "RTX 4090"} | settings, components={"transformer": type})
