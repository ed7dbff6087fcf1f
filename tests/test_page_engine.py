"""The page's engine: the package in a browser, by Brython and WebAssembly, answers as it does under CPython.

VAEMEM_QUESTIONS is the number of random questions.
"""

import functools
import gzip
import http.server
import json
import os
import random
import runpy
import threading

import pytest

pytestmark = pytest.mark.packages
for package in ("brython", "ziglang", "playwright"):
    pytest.importorskip(package)

from test_page import OOM, PAGE, ROWS, ask, ask_text, choices, run_of, type_run, wait

QUESTIONS = int(os.environ.get("VAEMEM_QUESTIONS", "250"))
LARGEST_TRANSFER = 1_500_000  # bytes, compressed: the page and its first answer
OWN = "by vaemem on the CPU in float32"  # the page plans no run of our own


class Server(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *parts):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build and serve the calculator. Return its folder and its address."""
    folder = tmp_path_factory.mktemp("site")
    runpy.run_path(str(PAGE / "engine" / "build.py"))["main"](folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def engine(browser, site):
    """Ask the worker in a page of its own."""
    page = browser.new_page()
    page.set_default_timeout(0)
    page.goto(site[1] + "page.css")
    page.evaluate("""() => {
        const worker = new Worker("worker.js"), waiting = [];
        const ready = new Promise((resolve, reject) => {
            worker.onmessage = ({ data }) =>
                data.failed ? reject(data.failed) : data.ready ? resolve() : waiting.shift()(data.text);
            worker.onerror = event => reject(event.message);
        });
        self.ask = async text => {
            await ready;
            worker.postMessage({ id: 1, text });
            return new Promise(resolve => waiting.push(resolve));
        };
    }""")
    yield lambda do, run=(), **more: page.evaluate("text => ask(text)", json.dumps({"do": do, "run": run} | more))
    page.close()


def make_question(rng):
    """Make a random question from the form's choices. Some are refused."""
    op = rng.choice(list(choices()["runs"]))
    runtime, models = rng.choice(list(choices()["runs"][op].items()))
    model, fields = rng.choice(list(models.items()))
    height, width = rng.choice(choices()["sizes"]) if rng.random() < 0.3 else (64 * rng.randint(1, 34) for _ in "hw")
    run = {"model": model, "op": op, "runtime": runtime, "height": height, "width": width}
    run["gpu"] = rng.choice(choices()["gpus"])[0]
    for name in ("dtype", "offload", "vae", "tile", "slicing"):
        run[name] = rng.choice(fields.get(name, [""])) if rng.random() < 0.5 else ""
    if "component" in fields and rng.random() < 0.3:
        run["component"] = rng.choice(rng.choice(list(fields["component"].values())))
    if "frames" in fields and rng.random() < 0.3:
        run["frames"] = rng.choice([1, 17, 49])
    more = {
        "batch": [2, 3, 16], "used": ["500MB", "1.5GB", "3 GiB", "much"], "os": choices()["os"],
        "memory": ["6GB", "10GB", "23.5GB"], "torch": ["2.4.1", "2.6.0", "2.7.1", "2.9.1", "2.11.0"],
    }  # fmt: skip
    run |= {name: rng.choice(values) for name, values in more.items() if rng.random() < 0.25}
    return rng.choice(["predict"] * 5 + ["timeline"]), [[name, str(value)] for name, value in run.items() if value]


def test_random_questions_have_the_same_answers(engine):
    rng = random.Random(44)
    for _ in range(QUESTIONS):
        do, run = make_question(rng)
        assert engine(do, run) == ask_text(json.dumps({"do": do, "run": run})), (do, run)


@pytest.mark.parametrize(
    "arguments",
    [
        'qwen-image 1024 --gpu "RTX 3060"',
        'sdxl 1024 --gpu "RTX 3060" --offload --novram --vae tiled',
        'zimage-turbo 1024 --gpu "RTX 4060" --used 7.5GB',
        'wan2.2-t2v-a14b 480x832 --gpu "RTX 4090" --frames 33 --component transformer=fp8',
        'wan2.2-5b 256x640 --gpu "RTX 4070 Ti" --frames 5',
    ],
)
def test_workflows_of_comfyui_have_the_same_answers(engine, arguments):
    run = run_of(f"{arguments} --runtime comfyui")
    found = ask("predict", run)
    assert "error" not in found and json.loads(engine("predict", run)) == found


@pytest.mark.parametrize(
    ("do", "arguments"),
    [
        ("instead", 'sdxl decode 1024 --gpu "RTX 4060"'),
        ("instead", 'flux 1024 --gpu "RTX 3060"'),
        ("largest", 'sdxl decode 1024 --gpu "RTX 4060"'),
        ("plan", 'sdxl 1024 --gpu "RTX 4060"'),
        ("plan", 'zimage-turbo 1024 --gpu "RTX 3060" --runtime sd.cpp'),
        ("plan", 'sd15 512 --gpu "RTX 3060" --runtime comfyui'),
    ],
)
def test_searches_find_the_same(engine, do, arguments):
    expected, found = ask(do, run_of(arguments)), json.loads(engine(do, run_of(arguments)))
    expected["ways"] = [way for way in expected["ways"] if way["what"] != OWN]
    assert found == expected


def test_a_message_is_explained_alike(engine):
    expected, found = ask("explain", message=OOM), json.loads(engine("explain", message=OOM))
    expected["ways"] = [way for way in expected["ways"] if way["what"] != OWN]
    assert found == expected


def test_named_questions_are_answered_on_the_page(browser, site):
    """Five questions, typed. The page and its first answer transfer little, and nothing that is not there."""
    folder, address = site
    page = browser.new_page()
    errors, sent = [], set()
    page.on("request", lambda request: sent.add(request.url.removeprefix(address) or "index.html"))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    wait(page)
    sizes = {name: len(gzip.compress((folder / name).read_bytes(), 9)) for name in sent}
    assert "core.wasm" in sizes and sum(sizes.values()) < LARGEST_TRANSFER, sizes
    assert [name for name in sizes if "workflows" in name] == []
    for question, arguments, verdict in [row for row in ROWS if "--component" not in row[1]][:5]:
        type_run(page, run_of(arguments))
        assert page.inner_text("#verdict").lower().startswith(verdict), question
        assert page.inner_text(".number b") == ask("predict", run_of(arguments))["number"]
    assert errors == []
    page.close()
