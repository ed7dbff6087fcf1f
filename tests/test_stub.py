"""The core's type stub beside the core: the same names, and the same parameters where the core tells them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vaemem import _core

pytestmark = [pytest.mark.core, pytest.mark.python]

STUB = ast.parse((Path(__file__).parent.parent / "vaemem/_core.pyi").read_text("utf-8"))


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a stub's module or class has; what is for types alone left out."""
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = node
    return found


CLASSES = {name: members(node.body) for name, node in members(STUB.body).items() if isinstance(node, ast.ClassDef)}


def test_the_modules_names():
    assert set(members(STUB.body)) == {name for name in vars(_core) if not name.startswith("__")}


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"OutOfMemoryError"}))  # whose attributes are its instances'
def test_a_classs_names(name):
    shown = {key for key in vars(getattr(_core, name)) if not key.startswith("__")}
    assert {key for key in CLASSES[name] if not key.startswith("__")} == shown


def functions() -> Iterator[tuple[str, ast.FunctionDef, object]]:
    for name, node in members(STUB.body).items():
        if isinstance(node, ast.FunctionDef):
            yield name, node, getattr(_core, name)
    for cls, inside in CLASSES.items():
        for name, node in inside.items():
            if isinstance(node, ast.FunctionDef) and not name.startswith("__"):
                yield f"{cls}.{name}", node, getattr(getattr(_core, cls), name)


def test_parameters():
    """In order, with their defaults, where the docstring begins with a signature."""
    told = 0
    for name, node, function in functions():
        text = getattr(function, "__text_signature__", None)
        if text is None:
            continue
        told += 1
        bare = ast.parse(f"def f{text.replace('$', '')}: ...").body[0]
        assert isinstance(bare, ast.FunctionDef)
        assert parameters(bare) == parameters(node), name
    assert told > 30


def parameters(node: ast.FunctionDef) -> list[tuple[str, str]]:
    given = [a.arg for a in [*node.args.posonlyargs, *node.args.args] if a.arg not in ("self", "cls", "type", "module")]
    defaults = [ast.unparse(value) for value in node.args.defaults]
    return list(zip(given, [*[""] * (len(given) - len(defaults)), *defaults], strict=True))
