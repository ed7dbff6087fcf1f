"""Pipelines as text: reading, playing, and what the recorder writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from errors import refused

from vaemem import predict_pipeline
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.diffusers_run import play_text
from vaemem.pipelines.pipeline_request import text_name, variables_of
from vaemem.pipelines.pipeline_text import PipelineText, load_text

pytestmark = [pytest.mark.core, pytest.mark.python]

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recording"
AT = dict.fromkeys("n h w f l a p y x q k t m s e v g u c i".split(), 1)


class Run:
    """Writes down what a text does."""

    def __init__(self):
        self.done, self.live = [], {}

    def take(self, name, size):
        self.done.append(f"+{name} {size}")
        self.live[len(self.done)] = name
        return len(self.done)

    def free(self, handle):
        self.done.append(f"-{self.live.pop(handle)}" if handle else "-nothing")

    def call(self, role, method, given, kept, **sizes):
        self.done.append(f"{role}.{method} {sizes} after {self.live.get(given)}")
        return () if role == "missing" else [self.take(role, 0)]

    def enter(self, role, method):
        self.done.append(f"{role}.{method} begins")

    def convert(self, role, dtype):
        self.done.append(f"{role} in {dtype}")

    def multiply(self, lt):
        self.done.append(f"blas {lt}")

    def stand_for(self, steps):
        if steps > 1:
            self.done.append(f"{steps} times")


def play(text, left=None, **at):
    run = Run()
    play_text(PipelineText(text), AT | at, run, {} if left is None else left)
    return run.done


STEPS = """\
case
take 2 n + 3 | x
steps 1 s
step
take 4 | second
each
take 5 | later
last
take 6 | last
end
free 0 | x
"""


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (1, []),
        (2, ["+last 6"]),
        (3, ["+second 4", "+last 6"]),
        (4, ["+second 4", "+later 5", "+last 6"]),
        (9, ["+second 4", "6 times", "+later 5", "+last 6"]),
    ],
)
def test_steps(steps, wanted):
    assert play(STEPS, s=steps, n=7) == ["+x 17", *wanted, "-x"]


CHANGE = """\
case
changes 1 1 2 3
steps 1 s
take 1 | first
each
take 2 | second
change
take 3 | other
each
take 4 | later
last
take 5 | last
end
"""


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (1, []),
        (2, ["+other 3"]),
        (3, ["+second 2", "+other 3"]),
        (4, ["2 times", "+second 2", "+other 3"]),
        (8, ["5 times", "+second 2", "+other 3", "+last 5"]),
        (16, ["11 times", "+second 2", "+other 3", "2 times", "+later 4", "+last 5"]),
    ],
)
def test_steps_after_a_change(steps, wanted):
    """With more steps than the text lists, the same share of them precedes the change."""
    assert play(CHANGE, s=steps) == ["+first 1", *wanted]


def test_lines_do_what_they_say():
    text = """# A comment

case 1 n = 2; 1 g != 1
case
when 1 n = 2; 1 g != 1
take 8 | x
when 1 n != 2
take 1 | x
take 2 | x
free 1 | x
call unet forward n=2 n; h=3 | 1
free 0 | unet
convert vae float32
blas lt
repeat 1 n + -1
take 7 | y
done
free 0 2 | y
when
free 0 | x
"""
    assert play(text, n=2, g=0) == ["+x 8", "-x"]
    assert play("case\nenter vae decode\ncall vae decoder n=1 n | 0")[0] == "vae.decode begins"
    done = play(text, n=3)
    assert done[:4] == ["+x 1", "+x 2", "-x", "unet.forward {'n': 6, 'h': 3} after None"]
    assert done[4:] == ["+unet 0", "-unet", "vae in float32", "blas True", "+y 7", "+y 7", "-y", "-y", "-x"]


def test_a_missing_component_leaves_nothing():
    assert play("case\ncall missing forward t=1 | 2\nfree 1 | missing\nfree 0 | missing") == [
        "missing.forward {'t': 1} after None",
        "-nothing",
        "-nothing",
    ]


def test_a_second_call_replaces_what_the_first_left():
    text, left, run = PipelineText("case\ntake 4 s | timesteps\ntake 1 | x\nfree 0 | x"), {}, Run()
    play_text(text, AT | {"s": 2}, run, left)
    play_text(text, AT | {"s": 3}, run, left)
    assert run.done == ["+timesteps 8", "+x 1", "-x", "+timesteps 12", "-timesteps", "+x 1", "-x"]
    assert [*run.live.values()] == ["timesteps"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("go on", ["line 3", "'go'"]),
        ("take 3 z | x", ["line 3", "'z'"]),
        ("take many | x", ["line 3", "'many'"]),
        ("take | x", ["line 3"]),
        ("call unet forward n | 1", ["line 3"]),
        ("call unet forward n=1 | some", ["line 3"]),
        ("repeat 1 n", ["repeat"]),
        ("repeat 1 n\nrepeat 1 n", ["line 4", "'repeat'"]),
        ("done", ["line 3", "'done'"]),
        ("convert vae", ["line 3"]),
        ("changes 1 0", ["line 3"]),
    ],
)
def test_a_wrong_line_is_named(line, said):
    with refused(names=said):
        PipelineText(f"case\ntake 1 | x\n{line}\n")


def test_what_was_not_recorded_is_refused():
    with refused("pipeline"):
        next(PipelineText("case 1 n = 2\n").played(AT))


UNCALLED = {  # HunyuanVideo 1.5 and HunyuanImage 2.1 call their second text encoder for quoted text only
    **{name: {"text_encoder_2"} for name in ("hunyuan-video-1.5", "hunyuanimage-2.1", "hunyuanimage-2.1-distilled")},
    "ltx2.5": {"duration_head"},
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_each_pipeline_has_its_text(name):
    """In all cases that a request can have."""
    kind = PIPELINES[name]
    for begun in (False, True) if kind.begins else (False,):
        text = load_text(text_name(name, begun))
        for e, g in ((2, 0), (4, 0), *[(2, 1), (4, 1)] * kind.guides):
            most = kind.most_images(bool(g)) or 9
            for n in (1, 2, most):
                for u, c in {(0, 0), (int(kind.upcasts and e == 2), 0), (0, int(bool(kind.optional)))}:
                    at = variables_of(
                        kind,
                        512,
                        768,
                        max(9, kind.frame_range[0]),
                        n=n,
                        t=40,
                        s=20,
                        e=e,
                        v=e,
                        g=g,
                        u=u,
                        c=c,
                        i=int(begun),
                    )
                    parts = [part for part, _ in text.played(at)]
                    roles = [line.words[0] for part in parts for line in part if line.kind == "call"]
                    called = {*kind.parts} - UNCALLED.get(name, set()) | ({"safety_checker"} if c else set())
                    assert {*roles} == called, (name, at)


def test_what_happens_for_each_step_and_clip_is_there_once():
    """Also if it happens less often than there are clips, or if events are equal. It plays at another point."""
    pytest.importorskip("diffusers")
    from vaemem.pytorch.text_recorder import Event
    from vaemem.pytorch.text_writer import check_text, write_text

    def record(at):
        plan = [Event("take", ("time",), 4), Event("take", ("time",), at["h"])]
        clip = [Event("take", ("clip",), 3 * at["h"]), Event("free", ("clip", "0"))]
        ends = [Event("free", ("time", "0"))] * 2 * at["s"]
        return [*plan * at["s"], *[Event("take", ("x",), 8), Event("step", ())] * at["s"], *clip * (at["l"] - 2), *ends]

    points = [AT | dict(zip("slh", each, strict=True)) for each in ((5, 7, 8), (6, 9, 12), (8, 12, 20), (7, 8, 24))]
    lines = [*write_text([(at, record(at)) for at in points], lambda *_: {})]
    assert [line for line in lines if line.startswith("repeat")] == ["repeat 1 s", "repeat 1 l + -2", "repeat 1 s"]
    at = AT | {"s": 11, "l": 20, "h": 28}
    check_text(PipelineText("\n".join(lines)), at, record(at), lambda *_: {})


def test_what_is_freed_after_a_call_is_counted_with_its_outputs():
    """The second call's output is freed once the third call has its own. It counts from the end, however many there
    are."""
    pytest.importorskip("diffusers")
    from vaemem.pytorch.text_recorder import EventWriter

    writer, outputs = EventWriter(pieces={"vae"}), []
    for _ in range(3):
        writer.call("vae", "decoder", {})
        outputs.append([writer.take(8, "") for _ in range(2)])
        writer.leave([*outputs[-1]])
        if len(outputs) < 3:
            writer.mark("done")
    writer.give(outputs[1][1])
    writer.mark("done")
    assert [event.words for event in writer.events if event.kind == "free"] == [("vae", "-3")]


@pytest.fixture(scope="module")
def recorder():
    for package in ("torch", "diffusers", "transformers"):
        pytest.importorskip(package)
    if not RECORDING.exists():
        pytest.skip("the sources are not here")
    sys.path.insert(0, str(RECORDING))
    import record_pipelines

    return record_pipelines


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", [name for name, kind in PIPELINES.items() if not kind.recording])
def test_a_text_does_what_the_pipeline_does(recorder, name):
    """At a size that was not fitted, event by event. `record_pipelines.check` raises for another event."""
    recorder.check(name, most=1)


def test_predictions_name_tensors_by_the_pipelines_code():
    phases = {phase.name: phase for phase in predict_pipeline("sd15", 512, 512, gpu="T4").phases}
    assert "prompt_embeds" in dict(phases["denoise"].peak_tensors)
