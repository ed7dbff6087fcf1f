"""The nodes in InvokeAI's own server and executor, on the CPU (make check ONLY=invokeai)."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.apps, pytest.mark.python]
if importlib.util.find_spec("invokeai") is None:
    pytest.skip("InvokeAI is not installed", allow_module_level=True)

import engine
from PIL import Image

import vaemem

HERE = Path(__file__).parent
SMALL = engine.config("sd") | {
    "block_out_channels": (32, 32, 64, 64), "norm_num_groups": 32, "scaling_factor": 0.2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
ESTIMATES = vaemem.bound("invokeai", ["sdxl", "flux"], gpu="RTX 4090", torch_version="2.9.1", sides=[256, 512])
OWN = {"sd": ("i2l", "l2i"), "flux": ("flux_vae_encode", "flux_vae_decode")}


class InvokeAI:
    """A running server, with VAEs, and graphs for it."""

    def __init__(self, root: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.root, self.log, self.address = root, root.parent / "log.txt", f"http://127.0.0.1:{port}/api"
        self.estimates = root.parent / "estimates.py"
        self.estimates.write_text(ESTIMATES.python())
        (root / "invokeai.yaml").write_text(f"schema_version: 4.0.3\nport: {port}\ndevice: cpu\n")
        subprocess.run([sys.executable, "-m", "vaemem", "invokeai", str(root)], check=True)
        command = [sys.executable, str(HERE / "invokeai_server.py"), "--root", str(root)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                command, cwd=root, stdout=file, stderr=file, env=env | {"VAEMEM_ESTIMATES": str(self.estimates)}
            )

    def start(self) -> None:
        for _ in range(300):
            time.sleep(1)
            try:
                return self.call("/v1/app/version")
            except urllib.error.URLError:
                if self.process.poll() is not None:
                    break
        raise AssertionError(self.log.read_text()[-3000:])

    def call(self, path: str, data: object = None, method: str | None = None):
        body, method = (None, "GET") if data is None else (json.dumps(data).encode(), method or "POST")
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(self.address + path, body, headers, method=method)
        ) as answer:
            got = answer.read()
        return got if "/full" in path else json.loads(got)

    def install(self, path: Path) -> dict:
        """Install a model in place; return what a field of a node names it by."""
        self.call(f"/v2/models/install?{urllib.parse.urlencode({'source': path, 'inplace': True})}", {})
        for _ in range(120):
            time.sleep(0.5)
            (job,) = (one for one in self.call("/v2/models/install") if one["source"]["path"] == str(path))
            if job["status"] == "completed":
                config = job["config_out"]
                return {name: config[name] for name in ("key", "hash", "name", "base", "type")}
            assert job["status"] != "error", job
        raise AssertionError(job)

    def queue(self, nodes: dict, links: str) -> int:
        """Queue a graph. links: such as "noise.noise latents.latents". Return the item's number."""
        nodes = {name: {"id": name, **node} for name, node in nodes.items()}
        edges = []
        for link in links.splitlines():
            (node, field), (to, into) = (end.split(".") for end in link.split())
            source, destination = {"node_id": node, "field": field}, {"node_id": to, "field": into}
            edges.append({"source": source, "destination": destination})
        batch = {"graph": {"id": "graph", "nodes": nodes, "edges": edges}, "runs": 1}
        return self.call("/v1/queue/default/enqueue_batch", {"batch": batch})["item_ids"][0]

    def finish(self, item: int) -> dict:
        for _ in range(600):
            time.sleep(0.2)
            found = self.call(f"/v1/queue/default/i/{item}")
            if found["status"] in ("completed", "failed", "canceled"):
                return found
        raise AssertionError(found)

    def run(self, nodes: dict, links: str) -> dict[str, np.ndarray]:
        """Run a graph; return the images of its nodes."""
        found = self.finish(self.queue(nodes, links))
        assert found["status"] == "completed", found.get("error_traceback")
        session, images = found["session"], {}
        for key, result in session["results"].items():
            if result["type"] == "image_output":
                data = self.call(f"/v1/images/i/{result['image']['image_name']}/full")
                images[session["prepared_source_mapping"][key]] = np.asarray(Image.open(io.BytesIO(data)), np.int16)
        return images


@pytest.fixture(scope="module")
def invokeai(tmp_path_factory):
    root = tmp_path_factory.mktemp("invokeai") / "root"
    root.mkdir()
    server = InvokeAI(root)
    try:
        server.start()
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def save(name: str, folder: Path) -> Path:
    """Save a small VAE of SD, or FLUX's as one file. Distributions have next to no width, so a sample is the mode."""
    vae = vaemem.VAE.random(config=SMALL) if name == "sd" else vaemem.VAE.random("flux")
    state = vae.state_dict()
    last = "quant_conv" if name == "sd" else "encoder.conv_out"
    for kind, value in (("weight", 0), ("bias", -40)):
        numbers = state[f"{last}.{kind}"]
        numbers[len(numbers) // 2 :] = value
    path = folder / ("sd" if name == "sd" else "flux-vae.safetensors")
    with vaemem.VAE.load(state, config=vae.arch) as changed:
        changed.save(path, layout="diffusers" if name == "sd" else "bfl")
    return path


@pytest.fixture(scope="module", params=["sd", "flux"])
def vae(request, invokeai, tmp_path_factory):
    """Names of InvokeAI's own nodes that encode and decode, and a VAE as a field of theirs."""
    path = save(request.param, tmp_path_factory.mktemp(request.param))
    return *OWN[request.param], {"vae": invokeai.install(path)}


def picture(invokeai: InvokeAI) -> dict:
    """Send InvokeAI a picture; return a node's field of it."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (192, 256, 3), np.uint8)).save(file, "PNG")
    lines = [b"--x", b'Content-Disposition: form-data; name="file"; filename="a.png"', b"Content-Type: image/png", b""]
    body = b"\r\n".join([*lines, file.getvalue(), b"--x--", b""])
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    query = "image_category=general&is_intermediate=false"
    asked = urllib.request.Request(f"{invokeai.address}/v1/images/upload?{query}", body, headers)
    with urllib.request.urlopen(asked) as answer:
        return {"image_name": json.loads(answer.read())["image_name"]}


def test_pictures_are_invokeais(invokeai, vae):
    """Latents of either program, decoded by either: a value of the picture differs by one at most."""
    encode, decode, field = vae
    given = {"image": picture(invokeai), "vae": field}
    exact = {} if "flux" in encode else {"fp32": True}  # its node for SD would encode in float16
    nodes = {"theirs": {"type": encode, **given, **exact}, "ours": {"type": "vaemem_i2l", **given, "memory_limit": 1.5}}
    links = []
    for name in ("theirs", "ours"):
        for by, how in ((decode, exact), ("vaemem_l2i", {"memory_limit": 1.5}), ("vaemem_l2i", {"device": "cpu"})):
            to = f"{name}-{by}-{len(links)}"
            nodes[to] = {"type": by, "vae": field, **how}
            links.append(f"{name}.latents {to}.latents")
    images = invokeai.run(nodes, "\n".join(links))
    assert len(images) == 6
    first = images.pop(f"theirs-{decode}-0")
    assert first.shape == (192, 256, 3) and first.std() > 5
    assert [name for name, image in images.items() if np.abs(image - first).max() > 1] == []


def test_estimates_are_vaemems(invokeai, vae):
    """InvokeAI's own nodes ask the module that `vaemem.bound` prints."""
    encode, decode, field = vae
    given = {"image": picture(invokeai), "vae": field}
    invokeai.run(
        {"theirs": {"type": encode, **given}, "back": {"type": decode, "vae": field}}, "theirs.latents back.latents"
    )
    name = "flux" if decode.startswith("flux") else "sd15_sdxl"
    lines = [line.split() for line in Path(f"{invokeai.estimates}.calls").read_text().splitlines()]
    assert all(words[0].endswith(name) for words in lines[-2:])
    found = {(words[1], int(words[-1])) for words in lines[-2:]}
    # Without its option fp32, InvokeAI's node for SD asks for float16, whatever it computes in.
    run = ("flux", "float32") if name == "flux" else ("sdxl", "float16")
    lines = {op: ESTIMATES.find(run[0], op, run[1]) for op in ("encode", "decode")}
    assert found == {(op, line.bytes(192, 256)) for op, line in lines.items()}


def test_a_limit_that_is_too_low(invokeai, vae):
    given = {"image": picture(invokeai), "vae": vae[2]}
    links = "z.latents low.latents"
    low = {"type": "vaemem_l2i", "vae": vae[2], "memory_limit": 0.0001}
    item = invokeai.finish(invokeai.queue({"z": {"type": "vaemem_i2l", **given}, "low": low}, links))
    assert item["status"] == "failed" and item["error_message"].startswith("memory_limit: ")


def test_seamless_axes_are_refused(invokeai, vae):
    given = {"image": picture(invokeai), "vae": vae[2]}
    nodes = {
        "z": {"type": "vaemem_i2l", **given},
        "no": {"type": "vaemem_l2i", "vae": vae[2] | {"seamless_axes": ["x"]}},
    }
    item = invokeai.finish(invokeai.queue(nodes, "z.latents no.latents"))
    assert item["status"] == "failed" and item["error_message"].startswith("vae: ")


def test_cancel(invokeai, tmp_path):
    field = {"vae": invokeai.install(save("sd", tmp_path))}
    nodes = {"noise": {"type": "noise", "width": 4096, "height": 4096}, "slow": {"type": "vaemem_l2i", "vae": field}}
    item = invokeai.queue(nodes, "noise.noise slow.latents")
    while invokeai.call(f"/v1/queue/default/i/{item}")["status"] == "pending":
        time.sleep(0.1)
    invokeai.call(f"/v1/queue/default/i/{item}/cancel", {}, "PUT")
    assert invokeai.finish(item)["status"] == "canceled"
    assert invokeai.call("/v1/queue/default/status")["queue"]["in_progress"] == 0
