"""The calculator's page: docs/page/ask.py answers as the package does, and a browser shows the answers."""

import contextlib
import functools
import http.server
import json
import os
import re
import runpy
import shlex
import shutil
import struct
import threading
from pathlib import Path

import pytest
from errors import refused

import vaemem
from vaemem.__main__ import main
from vaemem._render import in_gb
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.gpus import find_gpu

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "page"
if not PAGE.exists():
    pytest.skip("the page is not here", allow_module_level=True)
ask_text = runpy.run_path(str(PAGE / "ask.py"))["ask"]
ROWS = re.findall(
    r"^\| (.*) \| `fits (.*)` \| (.*) \|$", (ROOT / "docs" / "QUESTIONS.md").read_text("utf-8"), re.MULTILINE
)
OOM = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 11.76 GiB of which 1.02 GiB is free."
    " Of the allocated memory 9.80 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


def ask(do, run=(), **more):
    return json.loads(ask_text(json.dumps({"do": do, "run": [*run], **more})))


@functools.cache
def choices():
    return json.loads(json.dumps(runpy.run_path(str(PAGE / "choices.py"))["offer_choices"]()))


def run_of(arguments):
    """Return the pairs of a question's arguments."""
    model, *words = shlex.split(arguments)
    run = [["model", model], *([] if words[0][0].isdigit() else [["op", words.pop(0)]])]
    height, *width = words.pop(0).split("x")
    run += [["height", height], ["width", *(width or [height])]]
    return run + [[name.removeprefix("--"), value] for name, value in zip(words[::2], words[1::2], strict=True)]


def needed(answer):
    return answer.judged.least if answer.judged.took is None else answer.judged.here[1]


# ---- ask.py ----


@pytest.mark.parametrize(("arguments", "verdict"), [row[1:] for row in ROWS])
def test_the_questions_are_answered_as_documented(arguments, verdict):
    assert ask("predict", run_of(arguments))["verdict"] == verdict


@pytest.mark.parametrize("op", ["", "decode", "encode_tiled"])
def test_an_answer_is_the_package_s_own(op, capsys):
    size, gpu = {"height": 1024, "width": 768}, {"gpu": "RTX 3060", "used": "7 GB"}
    answer = vaemem.predict("sdxl", op, **size, **gpu) if op else vaemem.predict_pipeline("sdxl", **size, **gpu)
    run = [["model", "sdxl"], *[["op", op]] * bool(op), ["height", "1024"], ["width", "768"], *gpu.items()]
    found, data = ask("predict", run), answer.to_dict()
    assert (found["verdict"], found["bytes"]) == (answer.verdict, needed(answer))
    assert (found["available"], found["size"]) == (answer.available, data["card"]["reported_bytes"])
    assert [size for _, size, *_ in found["parts"]] == [size for size in data["parts_bytes"].values() if size]
    assert [phase[0] for phase in found["phases"]] == [one["phase"] for one in data["phases"] if not op]
    assert main(shlex.split(found["command"])[1:]) == (not answer.fits)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(" ".join(found["sentences"]))
    assert [text for text in (f"{name} {text}" for name, text in found["facts"]) if text not in printed] == []


@pytest.mark.parametrize("offload", ["none", "--novram"])
def test_a_workflow_of_comfyui_is_answered_as_on_the_command_line(offload, capsys):
    given = {"gpu": "RTX 3060", "runtime": "comfyui", "offload": offload}
    answer = vaemem.predict_pipeline("qwen-image", 1024, 1024, **given)
    found = ask("predict", [["model", "qwen-image"], ["height", "1024"], ["width", "1024"], *given.items()])
    assert (found["verdict"], found["bytes"]) == (answer.verdict, needed(answer))
    assert [phase[0] for phase in found["phases"]] == [*answer.placed]
    placed, (_, more) = dict(found["facts"]), answer.paged["denoise"]
    assert "models on the card" in placed["denoise"]
    if offload == "none":
        assert found["bytes"] == answer.least and found["meaning"].startswith("needed")
        assert in_gb(more) in found["sentences"][-1] and f"sent per step {in_gb(more)}" in placed["denoise"]
        assert "pages of weights" in [name for name, *_ in found["phases"][0][3]]
    assert main(shlex.split(found["command"])[1:]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(" ".join(found["sentences"]))


def test_all_workflows_of_comfyui_are_offered():
    offered = choices()["runs"][""]["comfyui"]
    assert [*offered] == [*WORKFLOWS]
    for name, known in WORKFLOWS.items():
        assert "dtype" not in offered[name] and ("frames" in offered[name]) == bool(known.frames)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", WORKFLOWS)
def test_all_names_of_a_workflow_are_known(name):
    for other in choices()["names"]["pipeline"].get(name, []):
        run = [["model", other], ["runtime", "comfyui"], ["height", "512"], ["width", "512"], ["gpu", "RTX 4090"]]
        assert ask("predict", run)["facts"][0][1].startswith(f"{name} "), other


@pytest.mark.parametrize("one_in", [4, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("op", ["", "decode", "encode", "decode_tiled", "encode_tiled"])
def test_every_choice_is_answered(op, one_in):
    """Models of each program; each value of each field with the program's first model."""
    for program, models in choices()["runs"][op].items():
        plain = [["op", op], ["runtime", program], ["height", "512"], ["width", "512"], ["gpu", "RTX 4060"]]
        runs = [[["model", model], *plain] for model in [*models][::one_in]]
        model, fields = next(iter(models.items()))
        components = [value for values in fields.get("component", {}).values() for value in values]
        for name in ("dtype", "offload", "vae", "tile", "slicing", "component"):
            values = components if name == "component" else fields.get(name, [])
            runs += [[["model", model], *plain, [name, value]] for value in values if value]
        for run in runs:
            found = ask("predict", [pair for pair in run if pair[1]])
            assert found.get("verdict") in ("fits", "tight", "does not fit"), (run, found)


def test_every_other_name_and_card_is_known():
    for kind, op in (("pipeline", []), ("vae", [["op", "decode"]])):
        for names in choices()["names"][kind].values():
            run = [["model", names[-1]], *op, ["height", "512"], ["width", "512"], ["gpu", "RTX 4090"]]
            assert "verdict" in ask("predict", run), names
    assert len(choices()["gpus"]) > 80
    for name, memory in choices()["gpus"]:
        assert f"{round(find_gpu(name).total_memory / 2**30)} GB" == memory


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "model": "sdxxl", "height": "1001", "width": "wide", "gpu": "RTX 4069", "memory": "much", "used": "3",
        "torch": "new", "runtime": "word", "dtype": "int4", "offload": "all", "vae": "none", "batch": "0",
        "component": "unet=int1",
    }.items(),
)  # fmt: skip
def test_an_error_names_its_field(name, value):
    run = dict(run_of('sdxl 1024 --gpu "RTX 4060"')) | {name: value}
    found = ask("predict", run.items())
    assert found["argument"] == name and found["error"]


def test_an_unknown_name_and_no_message_are_errors():
    assert "foo" in ask("predict", run_of("sdxl 1024 --foo 1"))["error"]
    assert ask("explain", message="hello")["argument"] == "message"


@pytest.mark.parametrize(
    "arguments",
    [
        'sdxl decode 1024 --gpu "RTX 4060" --torch 2.7.1 --used 2GB',
        'sdxl 1024x768 --gpu "RTX 4060"',
        'zimage-turbo 1024 --gpu "RTX 3060" --runtime sd.cpp',
    ],
)
def test_what_would_fit_instead_fits_when_it_is_opened(arguments):
    ways = ask("instead", run_of(arguments))["ways"]
    opened = [way for way in ways if way["run"]]
    assert len(opened) > 2
    for way in opened:
        found = ask("predict", way["run"])
        assert found["verdict"] == way["verdict"] in ("fits", "tight")
        number = found["number"].split()[0]
        assert f"takes {number} " in way["outcome"]


@pytest.mark.parametrize(
    ("do", "arguments", "expected"),
    [
        ("largest", 'sdxl decode 1024 --gpu "RTX 4060"', "840x840"),
        ("largest", 'sdxl encode 512 --gpu "RTX 3060" --dtype fp16', "14"),
        ("plan", 'sdxl 1024 --gpu "RTX 4060"', "Take sequential offload, VAE whole."),
        ("plan", 'flux 1024 --gpu "RTX 3060" --component vae=float32', "Take model offload, VAE whole, nf4."),
        ("plan", 'zimage-turbo 1024 --gpu "RTX 3060" --runtime sd.cpp', "Take --offload-to-cpu, VAE whole."),
        ("plan", 'zimage-turbo 1024 --gpu "RTX 3060" --runtime comfyui', "Take no option, VAE Decode."),
    ],
)  # fmt: skip
def test_longer_searches_find_what_the_package_finds(do, arguments, expected):
    found = ask(do, run_of(arguments))
    assert any(expected in text for text in (*found["sentences"], *(way["what"] for way in found["ways"])))
    for way in found["ways"]:
        assert ask("predict", way["run"])["verdict"] == way["verdict"], way


def test_the_page_has_every_module_that_its_modules_load():
    build = runpy.run_path(str(PAGE / "engine" / "build.py"))
    modules = build["read_modules"]()
    assert {"ask", "vaemem.prediction.recording_files", "vaemem.pipelines.plan_pipeline"} <= modules.keys()
    build["LIBRARY"].remove("itertools")
    with refused(names=["itertools"], kind=ModuleNotFoundError):
        build["read_modules"]()


def test_a_timeline_reaches_the_peak():
    run = run_of('sdxl decode 1024 --gpu "RTX 4090"')
    answer, found = vaemem.predict("sdxl", "decode", 1024, 1024, gpu="RTX 4090"), ask("timeline", run)
    assert max(moment[1] for moment in found["moments"]) == answer.peak_allocated
    assert found["at"] in [one.name for one in answer.timeline if one.allocated == answer.peak_allocated]
    assert ask("timeline", run_of("sdxl 1024"))["moments"] == []


def test_a_message_is_explained():
    expected, found = vaemem.explain(OOM), ask("explain", message=OOM)
    shown = [item for _, items in found["lists"] for item in items]
    assert [str(match) for match in expected.matches if str(match) not in shown] == []
    assert len(found["ways"]) == len(expected.prediction.would_fit)
    assert ask("predict", found["run"])["verdict"] == expected.prediction.verdict


# ---- the page in a browser ----

WORKER = """postMessage({ ready: true });
onmessage = async ({ data }) => {
  const answer = await fetch("ask", { method: "POST", body: data.text });
  postMessage({ id: data.id, text: await answer.text() });
};"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder. ask.py answers under CPython."""

    def log_message(self, *parts):
        pass

    def do_POST(self):
        body = ask_text(self.rfile.read(int(self.headers["Content-Length"])).decode()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the page was closed
            self.wfile.write(body)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for name in ("index.html", "page.css", "page.js"):
        shutil.copy(PAGE / name, folder)
    (folder / "choices.json").write_text(json.dumps(choices()))
    (folder / "worker.js").write_text(WORKER)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture
def page(browser, address):
    """Open the page. Any error on its console fails the test."""
    errors, opened = [], []

    def show(run=(), viewport=WIDE, **settings):
        page = browser.new_page(viewport=viewport, **settings)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(address + ("#" + "&".join(f"{name}={value}" for name, value in run) if run else ""))
        wait(page)
        opened.append(page)
        return page

    yield show
    for page in opened:
        page.close()
    assert errors == []


def wait(page):
    """Wait for an answer to the form as it stands now."""
    page.wait_for_timeout(200)
    page.wait_for_selector("#verdict[class]")
    page.wait_for_selector("#answer:not([aria-busy])")


def type_run(page, run):
    """Fill the form as a person does: choose from lists, type into fields."""
    given = dict(run)
    page.select_option("[name=op]", given.pop("op", ""))
    page.select_option("[name=runtime]", given.pop("runtime", "diffusers"))
    model = given.pop("model")
    is_listed = page.locator(f"#models option[value='{model}']").count()
    page.select_option("#models", model if is_listed else "")
    if not is_listed:
        page.fill("[name=model]", model)
        page.press("[name=model]", "Tab")
    for name in ("gpu", "memory", "used", "batch", "frames", "torch"):
        if page.is_visible(f"#form [name={name}]"):
            page.fill(f"#form [name={name}]", given.pop(name, ""))
    for name in ("width", "height"):
        page.fill(f"#form [name={name}]", given.pop(name))
    for name in ("os", "offload", "vae", "dtype", "tile", "slicing"):
        if page.is_visible(f"#form [name={name}]"):
            wanted = {"value": given.pop(name)} if name in given else {"index": 0}
            page.select_option(f"#form [name={name}]", **wanted)
    assert not given
    page.press("#height", "Tab")
    wait(page)


# Ten of the documented questions, from all parts of the list.
TYPED = [row for row in ROWS if "--component" not in row[1]][::3][:10]


@pytest.mark.packages
def test_ten_questions_are_typed_and_answered(page):
    shown = page()
    for question, arguments, verdict in TYPED:
        type_run(shown, run_of(arguments))
        text, expected = shown.inner_text("#verdict"), ask("predict", run_of(arguments))
        assert text.lower().startswith(verdict), question
        assert text.split() == " ".join(expected["sentences"]).split(), question
        assert shown.inner_text(".number b") == expected["number"]
        kept, command = shown.url, shown.inner_text("#command")
        shown.reload()
        wait(shown)
        assert (shown.url, shown.inner_text("#command")) == (kept, command)
        assert shown.inner_text("#verdict").split() == text.split()


@pytest.mark.packages
def test_the_address_goes_back_and_forth(page):
    shown = page(run_of('sdxl decode 1024 --gpu "RTX 4060"'))
    before = shown.inner_text("#verdict")
    shown.click("#instead a >> nth=1")
    wait(shown)
    assert shown.inner_text("#verdict").startswith("Fits")
    assert shown.input_value("[name=op]") == "decode_tiled" and shown.input_value("[name=tile]") == "512"
    assert shown.evaluate("document.activeElement.id") == "answer"
    shown.go_back()
    wait(shown)
    shown.click("#further button")
    shown.wait_for_selector("#further a")
    assert "840x840" in shown.inner_text("#further")
    assert shown.inner_text("#verdict") == before and shown.input_value("[name=op]") == "decode"
    shown.fill("[name=gpu]", "RTX 4069")
    shown.press("[name=gpu]", "Tab")
    wait(shown)
    assert shown.get_attribute("[name=gpu]", "aria-invalid") and "RTX 4060" in shown.inner_text("#verdict")
    assert page([*run_of("sdxl decode 1024"), ["protocol", "cold"]]).input_value("[name=protocol]") == "cold"
    assert page([["model", "flux"]]).inner_text("#command") == "vaemem fits flux 1024x1024"


@pytest.mark.packages
def test_sliders_and_lists_change_the_size(page):
    shown = page()
    shown.focus("[data-for=width]")
    shown.keyboard.press("ArrowRight")
    assert shown.input_value("#width") == "1088"
    shown.select_option("#sizes", "1216x832")
    shown.click("#swap")
    wait(shown)
    assert "width=832" in shown.url and "1216x832" in shown.inner_text("#command")
    shown.select_option("[name=op]", "decode_tiled")
    assert shown.is_visible("[name=tile]") and not shown.is_visible("[name=offload]")


@pytest.mark.packages
def test_workflows_of_comfyui_are_chosen_and_answered(page):
    shown = page()
    for arguments in ('qwen-image 1024 --gpu "RTX 3060"', 'wan-1.3b 480x832 --frames 33 --gpu "RTX 3060"'):
        type_run(shown, run := run_of(f"{arguments} --runtime comfyui"))
        assert shown.inner_text("#verdict").split() == " ".join(ask("predict", run)["sentences"]).split()
    models = shown.locator("#models optgroup >> nth=0").locator("option")
    assert models.evaluate_all("all => all.map(one => one.value)") == [*WORKFLOWS]
    assert "ComfyUI decides" in shown.inner_text("[name=offload] option >> nth=0")
    assert [name for name in ("dtype", "tile", "vae") if shown.is_visible(f"[name={name}]")] == ["vae"]
    shown.select_option("[name=offload]", "--novram")
    shown.select_option("#models", "sdxl")
    wait(shown)
    assert shown.is_visible("[name=vae]") and not shown.is_visible("[name=frames]")
    assert "--offload=--novram" in shown.inner_text("#command")
    assert page(run_of("wan-14b 480 --frames 33")).input_value("[name=frames]") == "33"


@pytest.mark.packages
def test_a_pasted_message_is_explained(page):
    shown = page()
    shown.fill("[name=message]", OOM)
    shown.click("#explain-form button")
    shown.wait_for_selector("#explanation a")
    assert "2048x2048" in shown.inner_text("#explanation")
    shown.click("#explanation a >> nth=0")
    wait(shown)
    assert shown.input_value("#height") == "2048"


@pytest.mark.packages
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("op", ["", "op=decode"], ids=["pipeline", "vae"])
def test_it_is_accessible_and_never_too_wide(page, scheme, viewport, op):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    run = [["model", "sdxl"], *[op.split("=")] * bool(op), ["height", "1024"], ["width", "1024"], ["gpu", "RTX 4060"]]
    shown = page(run, viewport, color_scheme=scheme)
    shown.wait_for_selector("#instead a")
    assert shown.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    found = axe.run(shown).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []


@pytest.mark.packages
def test_it_is_usable_by_keyboard_and_prints(page):
    shown = page()
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.id") == "answer"
    shown.emulate_media(media="print")
    assert not shown.is_visible("#form") and shown.is_visible("#verdict") and shown.is_visible("#command")
    assert shown.pdf()[:4] == b"%PDF"


@pytest.mark.packages
def test_while_the_engine_loads_the_form_is_usable(browser, address):
    page = browser.new_page()
    page.route("**/worker.js", lambda route: route.fulfill(body="setTimeout(() => postMessage({ready: true}), 1e6)"))
    page.goto(address)
    page.select_option("[name=op]", "decode")
    page.select_option("#models", "flux")
    page.fill("[name=gpu]", "RTX 4090")
    assert "Loading" in page.inner_text("#verdict") and "model=flux" in page.url
    page.close()


@pytest.mark.packages
def test_the_picture_of_the_readme(page):
    """VAEMEM_GOLDEN=1 takes it again."""
    shown = page(run_of('sdxl 1024 --gpu "RTX 4060"'), {"width": 1120, "height": 860})
    shown.wait_for_selector("#instead a")
    picture = PAGE.parent / "images" / "calculator.png"
    if os.environ.get("VAEMEM_GOLDEN"):
        shown.screenshot(path=picture)
    size = struct.unpack(">II", picture.read_bytes()[16:24])
    assert size == struct.unpack(">II", shown.screenshot()[16:24])
