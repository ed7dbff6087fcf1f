"""The notebooks of docs/notebooks: kept without outputs, they run from top to bottom and show what they promise."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.python

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
# Of each notebook: the number of figures, and text that only a successful run shows.
SHOWN = {
    "which_resolution": (4, ["Fits</b>: ", "1024x1024", "Skipped: ", "RTX 4060", ">decode</td>", "median error, %"]),
    "sweep_fit_formula": (
        2,
        [
            "sweep: 100%",
            r"\begin{aligned}",
            r"\pm",
            "def sdxl_decode_allocated_bytes",
            "The largest line is above the peak",
            "<iframe",
        ],
    ),
    "compared_with_pytorch": (0, ["diffusers 128x128", "a module on", "does as recorded", "total_reserved"]),
    "video_in_little_memory": (
        2,
        ["decode: 100%", "diffusers, in tiles", "the same bits\n", "relative difference from diffusers"],
    ),
    "under_a_limit": (2, ["decode: 100%", "tiles of 128x128", "the same bits\n"]),
    "pipeline_on_a_small_card": (
        2,
        [
            "runs out in denoise",
            r"\begin{aligned}",
            "The largest line is above the peak",
            "At 1024x1024, batch 1: at most ",
            "Take sequential offload",
            "blended where",
            "Skipped: ",
        ],
    ),
}

if not FOLDER.exists():
    pytest.skip("the notebooks are not here", allow_module_level=True)


def test_each_is_looked_at():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_kept_without_outputs(name):
    """Small and diffable: what a run adds stays out, and the text is what one writer would write."""
    text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert not any(cell["metadata"] for cell in notebook["cells"])
    assert "%pip install" in "".join(cells[0]["source"]), "it opens with the install cell for Colab"
    assert not re.search(r"(?<![\w.<])/(home|root|tmp|usr|work|Users)/|[A-Z]:\\\\", text), "no machine's paths"


@pytest.mark.parametrize("name", SHOWN)
def test_the_install_cell(name, tmp_path, monkeypatch):
    """It installs the wheel at an address, an uploaded wheel, or the released package; nothing if vaemem is there; and
    the GPU backend if there is a GPU."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    code = next("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    code = re.sub(r'%pip install -q "(.*?)".*', r'installed.append(f"\1")', code)
    wheel, address = "vaemem-0.1.0-cp311-abi3-manylinux_2_17_x86_64.whl", "https://example.org/vaemem-0.1.0.whl"
    monkeypatch.chdir(tmp_path)

    def installs(code, *tools):
        monkeypatch.setattr(shutil, "which", lambda tool: tool if tool in tools else None)
        exec(code, {"installed": (installed := [])})
        return [re.sub(r"\[.*?\]", "", one) for one in installed]

    assert installs(code) == installs(code, "nvidia-smi") == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installs(code) == ["vaemem"]
    assert installs(code.replace('ADDRESS = ""', f"ADDRESS = {address!r}")) == [f"vaemem @ {address}"]
    (tmp_path / wheel).touch()
    assert installs(code, "nvidia-smi") == [wheel, "vaemem-cuda"]
    (tmp_path / "vaemem_cuda-0.1.0.whl").touch()
    assert installs(code, "nvidia-smi") == [wheel, "vaemem_cuda-0.1.0.whl"]


@pytest.fixture(scope="module", params=SHOWN)
def run(request, tmp_path_factory):
    """(name, the notebook with the outputs of a run on the CPU, where it ran, the page it is rendered to)."""
    for package in ("nbclient", "nbconvert", "ipykernel", "pandas", "matplotlib", "tqdm", "torch", "diffusers"):
        if importlib.util.find_spec(package) is None:  # not imported: a bar asks whether this is a notebook
            pytest.skip(f"{package} is not installed")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(FOLDER)
    import render

    monkeypatch.undo()
    folder = tmp_path_factory.mktemp(request.param)
    path = FOLDER / f"{request.param}.ipynb"
    quiet = "ignore:IProgress not found"  # tqdm warns so without ipywidgets, and huggingface_hub imports tqdm
    notebook = render.run(path, folder, IPYTHONDIR=str(folder), CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS=quiet)
    return request.param, notebook, folder, render.html(notebook, path.stem)


def texts(outputs):
    """What each output holds as text."""
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        yield from (value for kind, value in data.items() if not kind.startswith("image/"))


@pytest.mark.thorough
def test_shows_what_it_promises(run):
    name, notebook, *_ = run
    figures, wanted = SHOWN[name]
    cells = [cell.get("outputs", []) for cell in notebook.cells]
    pictures = [sum("image/png" in output.get("data", ()) for output in outputs) for outputs in cells]
    assert max(pictures) <= 1, "a figure is shown once"
    assert sum(pictures) >= figures
    everything = "\n".join(text for outputs in cells for text in texts(outputs))
    assert [text for text in wanted if text not in everything] == []


@pytest.mark.thorough
def test_shows_nothing_red_and_no_path(run):
    _, notebook, folder, _ = run
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    everything = "\n".join(texts(outputs))
    assert str(folder) not in everything and sys.prefix not in everything
    assert "versions" not in re.sub(r"<iframe.*?</iframe>", "", everything), "a table is no wider than a page"


@pytest.mark.thorough
def test_renders(run):
    name, notebook, _, page = run
    pictures = sum("image/png" in o.get("data", ()) for cell in notebook.cells for o in cell.get("outputs", []))
    assert page.count('src="data:image/png') == pictures
    if name == "sweep_fit_formula":
        assert "MathJax" in page and page.count(r"\begin{aligned}") >= 4, "formulas are left to MathJax"
