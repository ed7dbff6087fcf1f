"""How profiles are made: whose convolutions are asked, formulas for the answers, and trees that pick them."""

import json
import math
import random
import sys
from pathlib import Path

import pytest

from vaemem import _core
from vaemem.prediction import profiles
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.profiles import Conv, formula_bytes

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
if not RECORDING.exists():
    pytest.skip("the sources are not here", allow_module_level=True)
sys.path.insert(0, str(RECORDING))

import record_profiles
import rule_errors
from record_profiles import Learned, Network, Recorder, pick

pytestmark = pytest.mark.python

SHAPE = 320, 640, 3, 1, 1


def answer(n, s):
    """Partial sums of small outputs in two buffers, tiles of 128 pixels and 64 channels, else by the batch."""
    if s["P"] <= 5000:
        tiles = -(-s["P"] // 128) * (640 // 64)
        return s["i"] + s["f"] + s["o"] + tiles * (2 * 4 * 128 * 64 + 4 * 2 + 4) + 175
    return s["i"] + s["f"] + 16 if n == 1 else s["i"] + s["o"]


class Rules:
    """A cuDNN that answers by `answer`."""

    version = "9.99.0"

    def conv(self, _device, conv, tf32):
        assert conv.layout == "nchw" and tf32
        return {"bytes": answer(conv.n, profiles.sizes(conv)), "untried": 0}


def network(*shapes):
    return Network("tests", {shape: {3, 4} for shape in shapes}, ("float16", "float32"), 256, (2, 1), (1, 2, 4))


def test_the_unets_convolutions_are_those_of_the_recorded_modules():
    vaes, unets, *_ = record_profiles.networks()
    assert vaes.convolutions[128, 128, 3, 2, 0] == {0}
    assert unets.convolutions[320, 320, 3, 2, 1] == unets.convolutions[4, 320, 3, 1, 1] == {3}
    assert unets.convolutions[1280, 1280, 3, 1, 1] == {4, 5, 6} and unets.convolutions[2560, 1280, 1, 1, 0] == {5, 6}
    assert not set(vaes.convolutions) & set(unets.convolutions)
    assert "bfloat16" not in unets.asked(find_gpu("T4")) and "bfloat16" in unets.asked(find_gpu("A100"))


def test_frames_convolutions_are_those_of_the_walk():
    """Of one frame in diffusers, encode and decode, at every level."""
    frames, attention = record_profiles.networks()[2:4]
    side, levels = 512, {}
    for op in ("encode", "decode"):
        for conv in _core.Trace.vae(_core.models()["qwen-image"], "diffusers", op, "float16", side, side).convs:
            conv = Conv(*conv)
            r, stride, padding = ((e if isinstance(e, int) else e[-1]) for e in (conv.r, conv.stride, conv.padding))
            shape = conv.c, conv.k, r, stride, padding, *([conv.depth] if conv.depth else [])
            levels.setdefault(shape, set()).add(round(math.log2(side / conv.h)))
            level = round(math.log2(side / conv.h))
            asked = record_profiles.question(shape, "float16", side, side, level, 1)
            assert Conv(**asked).size == conv.size and Conv(**asked).out == conv.out
    assert levels == {shape: at for shape, at in frames.convolutions.items() if shape[5:] != (1,) or shape[2] == 1}
    batch = _core.Trace.vae(_core.models()["qwen-image"], "diffusers", "decode", "float16", side, side, 2).convs
    assert [conv[2:3] + conv[5:9] for conv in batch if conv[9] == "nhwc"] == [*attention.convolutions]


def test_answers_become_formulas_and_a_tree():
    recorder = Recorder(Rules(), find_gpu("RTX 4090"), SHAPE, "float16")
    learned = Learned(recorder, network(SHAPE), random.Random(0), 64)
    per_tile = 10 * (2 * 4 * 128 * 64 + 4 * 2 + 4)
    assert set(learned.formulas) == {("i+o", 0, 0, 0, 0), ("i+f", 0, 0, 0, 16), ("i+o+f", 0, 128, per_tile, 175)}
    for size, count in zip(recorder.sizes, recorder.bytes, strict=True):
        assert formula_bytes(list(learned.formulas[pick(learned.tree, size)]), size) == count
    assert learned.asked == 40 and learned.same >= 38


def test_what_a_profile_lacks_is_added(monkeypatch, tmp_path):
    gpus = [find_gpu("RTX 4090")]
    monkeypatch.setattr(record_profiles, "networks", lambda: (network(SHAPE),))
    first = record_profiles.record(Rules(), gpus, 256)
    assert "added" not in first["recorded"] and set(first["convolutions"]) == {
        f"320,640,3,1,1/{kind}" for kind in ("float16", "float32")
    }
    other = 640, 640, 3, 1, 1
    monkeypatch.setattr(record_profiles, "networks", lambda: (network(SHAPE), network(SHAPE, other)))
    second = record_profiles.record(Rules(), gpus, 256, first)
    (added,) = second["recorded"]["added"]
    assert added["questions"] == first["recorded"]["questions"] and added["kinds"] == ["float16", "float32"]
    assert second["convolutions"].items() > first["convolutions"].items() and len(second["convolutions"]) == 4
    assert record_profiles.record(Rules(), gpus, 256, second) == second
    record_profiles.write(second, tmp_path / "second.json")
    read = json.loads((tmp_path / "second.json").read_text("utf-8"))
    assert read == second
    profile = profiles.Profile(read)
    question = Conv("float32", 2, 640, 64, 64, 640, 3)
    assert profile.conv(question)[0] == answer(2, profiles.sizes(question))


class OfBatches(Rules):
    """A cuDNN that takes input and filter for batches in float16, and the input for all else."""

    def conv(self, _device, conv, tf32):
        s = profiles.sizes(conv)
        return {"bytes": s["i"] + (s["f"] if conv.n > 1 and conv.dtype == "float16" else 16), "untried": 0}


def test_batches_get_trees_where_they_differ(monkeypatch):
    gpu = find_gpu("RTX 4090")
    images = network(SHAPE)._replace(batches=(1,), others=())
    monkeypatch.setattr(record_profiles, "networks", lambda: (images,))
    first = record_profiles.record(OfBatches(), [gpu], 256)
    second = record_profiles.record_batches(OfBatches(), gpu, first)
    half, single = ("320,640,3,1,1/float" + bits for bits in ("16", "32"))
    assert second["convolutions"][half].startswith(f"n1 {first['convolutions'][half]} ")
    assert second["convolutions"][single] == first["convolutions"][single]
    assert second["recorded"]["batches"]["trees"] == 1 and second["recorded"]["batches"]["held_out_same"] >= 495
    profile = profiles.Profile(second)
    for n, h in ((1, 96), (3, 96), (7, 200)):
        question = Conv("float16", n, 320, h, 64, 640, 3)
        assert profile.conv(question)[0] == OfBatches().conv(None, question, True)["bytes"]


def test_a_rule_is_compared_with_cudnn():
    """A cuDNN that copies input, output and filter: the rule is right for most convolutions in half precision."""

    class Copies:
        version = "9.10.2"

        def conv(self, _device, conv):
            s = profiles.sizes(conv)
            return {"bytes": s["i"] + s["o"] + s["f"]}

    answers = rule_errors.answer(Copies(), find_gpu("RTX 4090"), 200)
    assert {one.who for one in answers} == {"profile", "rule", "PyTorch"} and len(answers) == 200
    half = [one for one in answers if one.who == "rule" and one.kind == "half nchw plain" and one.conv.r > 1]
    assert len(half) > 20 and all(abs(one.of_tensors) < 0.001 for one in half)
    name, who, count, share, middle, *_ = rule_errors.row("RTX 4090", "rule", half, 200)
    assert (name, who, count, middle) == ("RTX 4090", "rule", str(len(half)), "0.0%")
    assert share == f"{len(half) / 200:.1%}"
