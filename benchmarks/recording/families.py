"""List the text-to-image families of diffusers, and whether the engine runs their autoencoders. A family is a folder of
diffusers/pipelines that makes images from text alone. The type hints of __init__ name its autoencoders.

    python benchmarks/recording/families.py PATH_TO_DIFFUSERS

The path is that of the package (site-packages/diffusers, or an unpacked wheel). Its sources are read, never imported. A
pipeline makes images from text if diffusers lists it so (AUTO_TEXT2IMAGE_PIPELINES_MAPPING). Otherwise its __call__
must take a prompt, return images, and take pictures only as an option (`image: ... | None`).
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vaemem._common import distinct, grouped
from vaemem._render import Columns
from vaemem.engine.configs import CLASSES

AUTOENCODER = re.compile(r"\w*Autoencoder\w*|\w*VQModel|\w*VAE\w*")
PICTURE = re.compile(r"(control_)?(image|video|adapter_image)s?")
# Other families' models with a control or another guidance, what renders shapes, and what diffusers has given up.
NOT_FAMILIES = ("controlnet", "controlnet_sd3", "pag", "shap_e", "deprecated")


class Family(NamedTuple):
    name: str
    pipelines: list[str]
    autoencoders: list[str]  # none where pixels are denoised themselves, or nothing says what decodes

    @property
    def runs(self) -> bool:
        return any(name in CLASSES for name in self.autoencoders)


def listed(package: Path) -> set[str]:
    """The pipelines that diffusers itself calls text-to-image."""
    path = package / "pipelines" / "auto_pipeline.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ():
        if isinstance(node, ast.Assign) and "AUTO_TEXT2IMAGE_PIPELINES_MAPPING" in map(ast.unparse, node.targets):
            return {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    return set()


def method(pipeline: ast.ClassDef, name: str, known: dict[str, ast.ClassDef]) -> ast.FunctionDef | None:
    """Its own, or the first of its bases in the same folder that has one."""
    for node in pipeline.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    bases = [known[base.id] for base in pipeline.bases if isinstance(base, ast.Name) and base.id in known]
    return next(filter(None, (method(base, name, known) for base in bases)), None)


def arguments(function: ast.FunctionDef) -> dict[str, str]:
    """{name: type} as written."""
    args = [*function.args.args, *function.args.kwonlyargs]
    return {arg.arg: ast.unparse(arg.annotation) if arg.annotation else "" for arg in args}


def makes_images_of_text(call: ast.FunctionDef) -> bool:
    taken = arguments(call)
    wanted = [name for name, kind in taken.items() if PICTURE.fullmatch(name) and not re.search("None|Optional", kind)]
    gives = any(word.arg == "images" for node in ast.walk(call) if isinstance(node, ast.Call) for word in node.keywords)
    return "prompt" in taken and gives and not wanted


def families(package: Path) -> Iterator[Family]:
    known_to_diffusers = listed(package)
    for folder in sorted(path for path in (package / "pipelines").iterdir() if path.is_dir()):
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))]
        classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
        found, autoencoders = [], []
        for name, node in classes.items():
            call, init = (method(node, which, classes) for which in ("__call__", "__init__"))
            if not name.endswith("Pipeline") or call is None or init is None:
                continue
            if name in known_to_diffusers or makes_images_of_text(call):
                found.append(name)
                autoencoders += [one for kind in arguments(init).values() for one in AUTOENCODER.findall(kind)]
        if found and folder.name not in NOT_FAMILIES:
            yield Family(folder.name, found, distinct(autoencoders))


def table(found: list[Family]) -> str:
    """A line for each autoencoder, or for several that a family may have, the most frequent first."""
    lines = [
        [kind or "none", "yes" if of[0].runs else "no", str(len(of)), ", ".join(one.name for one in of)]
        for kind, of in grouped(found, lambda one: ", ".join(one.autoencoders)).items()
    ]
    lines.sort(key=lambda line: (line[1] == "no", -int(line[2])))
    running = sum(one.runs for one in found)
    return f"{Columns(['autoencoder', 'runs', 'families', ''], lines).markdown()}\n\n{running} of {len(found)} run."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("package", type=Path, help="the folder of the package diffusers")
    print(table(list(families(parser.parse_args().package))))
