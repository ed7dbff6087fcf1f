"""The nodes in ComfyUI's own server and executor, on the CPU: COMFYUI names its sources (make check ONLY=apps)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from vaemem.pipelines.components import is_vae
from vaemem.pipelines.workflows import WORKFLOWS

pytestmark = pytest.mark.apps
if "COMFYUI" not in os.environ:
    pytest.skip("COMFYUI names no folder of ComfyUI", allow_module_level=True)
torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
LATENT, MODELS, CLOSE = ["latent", 0], "models", 1e-4


class ComfyUI:
    """A running server, and prompts for it."""

    def __init__(self, root: Path, log: Path):
        self.root, self.log = root, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        stubs = root / "stubs"
        paths = [*filter(None, [os.environ.get("PYTHONPATH")])]
        if importlib.util.find_spec("torchvision") is None:  # which ComfyUI imports and does not use here
            (stubs / "torchvision").mkdir(parents=True)
            (stubs / "torchvision" / "__init__.py").write_text("from . import transforms\n")
            (stubs / "torchvision" / "transforms.py").touch()
            paths.append(str(stubs))
        env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        self.env = env | {"PYTHONPATH": os.pathsep.join([*paths, str(root)])}
        command = [sys.executable, "main.py", "--cpu", "--disable-api-nodes", "--port", self.address.partition(":")[2]]
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, cwd=root, stdout=file, stderr=file, env=self.env)

    def python(self, *words: str) -> str:
        """Run Python that can import ComfyUI's modules; return its output."""
        ran = subprocess.run(
            [sys.executable, *words], cwd=self.root, env=self.env, capture_output=True, text=True, encoding="utf-8"
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        return ran.stdout

    def get(self, path: str, data: object = None):
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(urllib.request.Request(f"http://{self.address}{path}", body), timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def start(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text("utf-8", "replace")[-3000:]
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text("utf-8", "replace")[-3000:])

    def queue(self, graph: dict) -> str:
        """Queue a prompt. graph: {name: (class, inputs)}."""
        prompt = {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in graph.items()}
        try:
            return self.get("/prompt", {"prompt": prompt, "client_id": "tests"})["prompt_id"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def finish(self, prompt: str) -> dict:
        """Wait for a prompt's end. Return its status."""
        while prompt not in (history := self.get(f"/history/{prompt}")):
            assert self.process.poll() is None
            time.sleep(0.1)
        return history[prompt]["status"]

    def run(self, graph: dict) -> dict:
        """Run a prompt. Return the values that it keeps, by name. graph: as in `queue`; a third value keeps outputs."""
        folder = self.root / "kept"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        prompt = {name: node[:2] for name, node in graph.items()}
        for name, node in graph.items():
            for i in range(node[2] if len(node) > 2 else 0):
                prompt[f"{name}-{i}"] = ("Keep", {"value": [name, i], "path": str(folder / f"{name}-{i}")})
        status = self.finish(self.queue(prompt))
        assert status["status_str"] == "success", status["messages"]
        return {path.name.removesuffix("-0"): torch.load(path, weights_only=True) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory):
    source, root = os.path.abspath(os.environ["COMFYUI"]), tmp_path_factory.mktemp("comfyui") / "ComfyUI"
    large = {".git", "models", "output", "user", "custom_nodes"}  # what a user's folder may have, too
    shutil.copytree(source, root, ignore=lambda folder, names: large if folder == source else ())
    for folder in ("models", "output", "user", "custom_nodes"):
        (root / folder).mkdir()
    subprocess.run([sys.executable, "-m", "vaemem", "comfyui", str(root)], check=True)
    shutil.copy(HERE / "comfyui_models.py", root / "custom_nodes" / "vaemem_tests.py")
    server = ComfyUI(root, root.parent / "log.txt")
    try:
        server.start()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


def sampled(width=96, height=64, batch=1, fails=False, latent=("EmptyLatentImage",)) -> dict:
    """The nodes from a prompt to latents."""
    empty = {"width": width, "height": height, "batch_size": batch}
    sampler = {
        "model": [MODELS, 0], "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["start", 0],
        "seed": 1, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0,
    }  # fmt: skip
    return {
        MODELS: ("TinyModels", {"fails": fails}),
        "positive": ("CLIPTextEncode", {"clip": [MODELS, 1], "text": "a cat"}),
        "negative": ("CLIPTextEncode", {"clip": [MODELS, 1], "text": ""}),
        "start": ("EmptyLatentImage", empty),
        "latent": ("KSampler", sampler),
    }


def decoders(vae=MODELS, limit=0.0) -> dict:
    given = {"samples": LATENT, "vae": [vae, 2]}
    return {
        "theirs": ("VAEDecode", given, 1),
        "ours": ("vaemem.VAEDecode", given | {"memory_limit": limit, "device": "auto"}, 1),
        "safe": ("vaemem.DecodeSafely", given, 2),
    }


@pytest.mark.parametrize("batch", [1, 3])
def test_text_to_image(comfyui, batch):
    kept = comfyui.run(sampled(batch=batch) | decoders())
    assert kept["theirs"].shape == kept["ours"].shape == (batch, 64, 96, 3) and kept["theirs"].std() > 0.01
    assert (kept["ours"] - kept["theirs"]).abs().max() < CLOSE
    assert torch.equal(kept["safe"], kept["theirs"]) and kept["safe-1"] == "ComfyUI decoded"


def test_image_to_image(comfyui):
    graph = sampled(batch=2) | {"first": ("VAEDecode", {"samples": LATENT, "vae": [MODELS, 2]})}
    photo = {"pixels": ["first", 0], "vae": [MODELS, 2]}
    crop = {"image": ["first", 0], "x": 3, "y": 5, "width": 93, "height": 59}  # no multiples of 8
    graph |= {
        "cropped": ("ImageCrop", crop),
        "theirs": ("VAEEncode", photo, 1),
        "ours": ("vaemem.VAEEncode", photo | {"memory_limit": 0.1, "device": "cpu"}, 1),
        "theirs-odd": ("VAEEncode", photo | {"pixels": ["cropped", 0]}, 1),
        "ours-odd": ("vaemem.VAEEncode", photo | {"pixels": ["cropped", 0], "memory_limit": 0, "device": "auto"}, 1),
    }
    again = dict(sampled()["latent"][1], latent_image=["ours", 0], denoise=0.5)
    graph["again"] = ("KSampler", again)
    graph["picture"] = ("vaemem.DecodeSafely", {"samples": ["again", 0], "vae": [MODELS, 2]}, 1)
    kept = comfyui.run(graph)
    for odd, shape in {"": (2, 4, 8, 12), "-odd": (2, 4, 7, 11)}.items():
        theirs, ours = kept[f"theirs{odd}"], kept[f"ours{odd}"]
        assert ours.shape == theirs.shape == shape and theirs.std() > 0.01
        assert (ours - theirs).abs().max() < CLOSE
    assert kept["picture"].shape == (2, 64, 96, 3)


def test_a_limit_keeps_the_bits(comfyui):
    """The smallest limit is in the error of a smaller one, and the picture is the same under it."""
    graph = sampled(256, 256)
    failed = comfyui.finish(comfyui.queue(graph | {"ours": decoders(limit=0.005)["ours"][:2]} | keep("ours")))
    assert failed["status_str"] == "error"
    ((_, event),) = (one for one in failed["messages"] if one[0] == "execution_error")
    assert event["node_type"] == "vaemem.VAEDecode" and "memory_limit" in event["exception_message"]
    kept = comfyui.run(graph | {f"ours-{limit}": decoders(limit=limit)["ours"] for limit in (0, 0.015)})
    assert torch.equal(kept["ours-0"], kept["ours-0.015"])


def test_memory_runs_out_in_the_middle(comfyui):
    """The same latents, decoded by vaemem whole, are those of a VAE that does not fail."""
    graph = sampled(batch=2) | {"failing": ("TinyModels", {"fails": True})}
    well, failing = decoders(), decoders("failing")
    kept = comfyui.run(graph | {"ours": well["ours"], "safe": failing["safe"]})
    assert torch.equal(kept["safe"], kept["ours"])
    assert "ran out of memory" in kept["safe-1"] and "vaemem decodes on the CPU" in kept["safe-1"]
    assert "retrying with tiled VAE decoding" in comfyui.log.read_text("utf-8", "replace")  # its flag, and no tiles
    assert comfyui.run(graph | {"safe": well["safe"]})["safe-1"] == "ComfyUI decoded"


def keep(*names: str) -> dict:
    return {f"{name}-kept": ("Keep", {"value": [name, 0], "path": os.devnull}) for name in names}


def test_cancel_and_progress(comfyui):
    """A long decode reports progress and ends when the user cancels; the next prompt runs."""
    aiohttp = pytest.importorskip("aiohttp")
    empty = ("EmptyLatentImage", {"width": 1024, "height": 1024, "batch_size": 1})
    models = ("TinyModels", {"fails": False})
    graph = {MODELS: models, "latent": empty, "ours": decoders(limit=0.05)["ours"][:2]} | keep("ours")

    async def watch() -> tuple[str, list]:
        values = []
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://{comfyui.address}/ws?clientId=tests") as socket,
        ):
            prompt = comfyui.queue(graph)
            async for message in socket:
                if message.type != aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(message.data)
                data = event["data"]
                if event["type"] == "progress" and data["node"] == "ours":
                    values.append((data["value"], data["max"]))
                    if len(values) == 2:
                        await session.post(f"http://{comfyui.address}/interrupt")
                elif event["type"] in ("execution_interrupted", "execution_error", "execution_success"):
                    return event["type"], values
        raise AssertionError(prompt)

    ended, values = asyncio.run(asyncio.wait_for(watch(), 120))
    assert ended == "execution_interrupted"
    assert values[0][1] == 100 and 0 < values[0][0] < values[1][0] < 50
    assert comfyui.run(sampled() | {"ours": decoders()["ours"]})["ours"].shape == (1, 64, 96, 3)


def test_estimate(comfyui):
    size = {"vae": [MODELS, 2], "width": 1024, "height": 768, "batch_size": 1}
    kept = comfyui.run({
        MODELS: ("TinyModels", {"fails": False}),
        "estimate": ("vaemem.VRAMEstimate", size | {"card": "RTX 4060"}, 3),
        "both": ("vaemem.VRAMEstimate", size | {"card": "RTX 4060", "model": [MODELS, 0]}, 3),
    })  # fmt: skip
    assert kept["estimate"].startswith("Fits") and "1024" in kept["estimate"]
    assert 0.1 < kept["estimate-1"] < 2
    assert kept["both"].startswith(f"{kept['estimate']}\n\nSampler: ")
    picture = kept["estimate-2"]
    assert picture.ndim == 4 and picture.shape[-1] == 3 and 0 <= picture.min() < 0.5 < picture.max() <= 1
    unnamed = {"estimate": ("vaemem.VRAMEstimate", size | {"card": ""}), MODELS: ("TinyModels", {"fails": False})}
    failed = comfyui.finish(comfyui.queue(unnamed | keep("estimate")))
    ((_, event),) = (one for one in failed["messages"] if one[0] == "execution_error")
    assert event["exception_message"].startswith("gpu")


def test_whole_workflows(comfyui):
    """ComfyUI's models of known files are recognised, with the VAE that belongs to them."""
    found = [line.split() for line in comfyui.python(str(HERE / "comfyui_workflows.py")).splitlines()]
    assert {name for name, *_ in found} == {name for name, known in WORKFLOWS.items() if is_vae(known.parts["vae"])}
    for name, other, run in found:  # a turbo model's shapes are equal
        assert run.split("-")[0] == (name.split("-")[0] if name == other else "sampler")


def test_the_registry_reads_the_package(comfyui):
    """ComfyUI's own parser of a node package's pyproject.toml."""
    code = (
        "from comfy_config.config_parser import extract_node_configuration as read;"
        "found = read('custom_nodes/vaemem');"
        "print(found.project.name, found.project.dependencies, found.tool_comfy.publisher_id)"
    )
    assert comfyui.python("-c", code).startswith("vaemem-nodes ['vaemem[plot]")


def test_families(comfyui):
    """ComfyUI's classes of every family, with the real shapes."""
    lines = [line.split() for line in comfyui.python(str(HERE / "comfyui_families.py")).splitlines()]
    assert len(lines) >= 7 and {name for name, *_ in lines} >= {
        "sdxl",
        "flux",
        "wan",
        "wan2.2",
        "taesd",
        "hunyuanimage",
    }
    assert [name for name, *numbers in lines if not all(float(number) < CLOSE for number in numbers)] == []
