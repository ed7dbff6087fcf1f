"""benchmarks/usage.py: which share of what people run has a known pipeline. It must not shrink."""

import sys
from pathlib import Path

import pytest

from vaemem.pipelines.components import PIPELINES

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import usage

pytestmark = [pytest.mark.core, pytest.mark.python]


@pytest.mark.parametrize(("program", "least"), [("diffusers", 0.919), ("comfyui", 0.88)])
def test_the_share_of_uses_that_are_known(program, least):
    uses = usage.read_uses()
    assert sum(use.share for use in uses) == pytest.approx(1) and uses[0].share > uses[-1].share
    assert usage.known_share(uses, program) >= least


def test_models_with_and_without_a_pipeline(capsys):
    found = {use.model: use for use in usage.read_uses()}
    assert found["MiniMax H3"].diffusers == found["MiniMax H3"].comfyui == "minimax-h3"
    assert "wan-14b" in found["Wan"].diffusers  # its size is asked for
    assert found["SDXL"].comfyui == "sdxl" and not found["Real-ESRGAN"].diffusers
    assert {use.diffusers for use in found.values() if " " not in use.diffusers} <= {*PIPELINES, ""}
    usage.main()
    assert "SeedVR2" in capsys.readouterr().out
