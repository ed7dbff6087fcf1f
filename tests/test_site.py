"""The site of the documents: the examples of its pages run, and it builds without warnings and foreign files."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from engine import latents, small_vae

import vaemem
from vaemem.__main__ import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
TASKS = ("fits", "out_of_memory", "less_memory", "in_a_program", "measure_and_fit")
PAGES = [DOCS / "index.md", *(DOCS / "site" / f"{name}.md" for name in TASKS)]
if not PAGES[0].exists():
    pytest.skip("the documents are not here", allow_module_level=True)


def blocks(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run(page, capsys, monkeypatch):
    vae = small_vae()
    monkeypatch.setattr(vaemem.VAE, "load", lambda path: vae)
    for block in blocks(page, "python"):
        exec(block, {"vaemem": vaemem, "latents": latents(vae, 8, 8)})
    capsys.readouterr()
    for typed, *shown in map(str.splitlines, blocks(page, "console")):
        main(shlex.split(typed.removeprefix("$ vaemem ")))
        assert [*capsys.readouterr().out.splitlines()[: len(shown) - 1], "..."] == shown


@pytest.mark.packages
def test_the_site_builds(tmp_path):
    """No warnings, so every internal link leads somewhere; nothing from another host; an entry for each public name."""
    for package in ("sphinx", "furo", "myst_nb", "numpydoc", "diffusers", "matplotlib"):
        pytest.importorskip(package)
    from vaemem import plot, pytorch

    flags = ["-q", "-W", "--keep-going", "-D", "nb_execution_mode=off"]  # tests/test_notebooks.py runs them
    command = [sys.executable, "-m", "sphinx", *flags, "-d", tmp_path / "read", DOCS, tmp_path]
    root = str(Path(vaemem.__file__).parents[1])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert {"index.html", "search.html", *(f"site/{name}.html" for name in TASKS)} <= set(pages)
    foreign = r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|srcset|href)=["']?(?:https?:)?//[^>]*"""
    style = r"""(?:url\(|@import)\s*["']?(?:https?:)?//.*"""
    styles = [path.read_text("utf-8") for path in tmp_path.rglob("*.css")]
    assert [found for text in pages.values() for found in re.findall(foreign, text)] == []
    assert len(styles) > 2 and [found for text in [*pages.values(), *styles] for found in re.findall(style, text)] == []
    entries = {name for text in pages.values() for name in re.findall(r'<dt [^>]*id="vaemem\.([\w.]+)"', text)}
    assert {*vaemem.__all__, *(f"pytorch.{name}" for name in pytorch.__all__)} <= entries
    figures = (
        name for name, one in vars(plot).items() if name[0] != "_" and getattr(one, "__module__", "") == plot.__name__
    )
    assert {f"plot.{name}" for name in figures} <= entries
