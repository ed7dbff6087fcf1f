"""Runs the notebooks next to this file and renders them to HTML: `python docs/notebooks/render.py FOLDER`."""

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from nbconvert import HTMLExporter

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))


def run(path, folder, **environment):
    """The notebook with the outputs of a run in `folder`; of a progress bar, its end."""
    notebook = nbformat.read(path, 4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, **environment})
    return notebook


def html(notebook, title):
    return HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": title}})[0]


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            page = html(run(path, folder), path.stem)
        (out / f"{path.stem}.html").write_text(page, "utf-8")
        print(out / f"{path.stem}.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
