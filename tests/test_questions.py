"""docs/QUESTIONS.md: its questions are asked again on the command line; `predict` agrees with `predict_pipeline`."""

import re
import shlex
from pathlib import Path

import pytest

from vaemem import predict, predict_pipeline
from vaemem.__main__ import main

pytestmark = pytest.mark.python

FILE = Path(__file__).parent.parent / "docs" / "QUESTIONS.md"
if not FILE.exists():
    pytest.skip("the documents are not here", allow_module_level=True)
ROWS = re.findall(r"^\| (.*) \| `(.*)` \| (.*) \|$", FILE.read_text("utf-8"), re.MULTILINE)
STATUS = {"fits": 0, "tight": 0, "does not fit": 1}


def test_there_are_forty():
    assert len(ROWS) == 40 and {answer for _, _, answer in ROWS} > set(STATUS)


@pytest.mark.parametrize(("command", "answer"), [row[1:] for row in ROWS])
def test_the_answer_is_what_is_printed_first(command, answer, capsys):
    status = main(shlex.split(command))
    printed = capsys.readouterr().out
    verb = command.partition(" ")[0]
    if verb == "fits":
        assert re.match(rf"{answer}(, from rough data on such a card)?: it (takes|needs) ", printed, re.IGNORECASE)
        assert status == STATUS[answer] and ("What would fit" in printed or answer == "fits")
    elif verb == "largest":
        assert printed.startswith(f"{answer} fits") and status == 0
    else:
        assert printed.startswith(f"Take {answer}. ") and status == 0


@pytest.mark.parametrize(("model", "pipeline"), [("sdxl", "sdxl"), ("sd15", "sd15"), ("flux", "flux")])
def test_predict_agrees_with_the_decode_of_the_pipeline(model, pipeline):
    """The VAE takes the same tensors at its peak; the pipeline holds its latents and prompts beside."""
    alone = predict(model, "decode", 1024, 1024, gpu="RTX 4090")
    whole = predict_pipeline(pipeline, 1024, 1024, gpu="RTX 4090", offload="model").phases[-1]
    mine, theirs = dict(alone.peak_tensors), dict(whole.peak_tensors)
    own = {name: size for name, size in mine.items() if name.startswith(("decoder.", "post_quant"))}
    assert own and own.items() <= theirs.items()
    beside = whole.allocated - alone.peak_allocated
    assert abs(beside) < 16 << 20
