"""Writes the calculator into a folder: the page, its scripts, the package's Python and data, and the C core.

    python docs/page/engine/build.py OUT

It runs in an environment with vaemem and the extra [site]. Brython runs the Python in the page. Its wheel brings the interpreter; zig's wheel compiles the core to WebAssembly.
"""

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import brython

ENGINE = Path(__file__).resolve().parent
PAGE, ROOT = ENGINE.parent, ENGINE.parents[2]
BRYTHON = Path(brython.__file__).parent / "data"
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi", "-Os"]
SOURCES = ["csrc/*.c", "csrc/predict/*.c", "csrc/python/*.c", "kernels/*.c", "kernels/ref/*.c", "docs/page/engine/*.c"]
NOT_IN_THE_CORE = {"py_cuda.c", "py_kernels.c"}
# Of the package, what no answer needs. Its data are files of their own.
LEFT_OUT = {"cli", "data", "pytorch", "reports", "tables", "plot.py", "__main__.py", "_demo.py", "_handmade.py"}
# Of Brython's library, what the package imports in the page, directly or not. lib/ has short ones of our own.
LIBRARY = """
    __future__ _codecs _collections _collections_abc _contextvars _io _io_classes _json _locale _operator _py_abc
    _py_warnings _thread _weakref _weakrefset abc browser builtins codecs collections contextlib difflib errno
    fractions genericpath heapq io itertools json json.encoder keyword math numbers operator os posix posixpath
    reprlib stat sys textwrap time types warnings
""".split()


class Strip(ast.NodeTransformer):
    """Removes docstrings and annotations. A class with fields gets their names as __fields__, which lib/dataclasses.py
    and lib/typing.py read."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        args = node.args
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
            if arg:
                arg.annotation = None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        names = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        self.generic_visit(node)
        fields = ast.Tuple([ast.Constant(name.id) for name in names if isinstance(name, ast.Name)], ast.Load())
        node.body = [ast.Assign([ast.Name("__fields__", ast.Store())], fields), *node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else ast.Pass()


def read_modules(folder: Path, files: Iterable[Path]) -> dict[str, list]:
    """Read Python files as Brython's file system has them: {name: [kind, source, imports, 1 if a package]}."""
    found = {}
    for path in files:
        *parents, last = path.relative_to(folder).with_suffix("").parts
        is_package = last == "__init__"
        source = ast.unparse(ast.fix_missing_locations(Strip().visit(ast.parse(path.read_text("utf-8")))))
        found[".".join(parents if is_package else [*parents, last])] = [".py", source, [], *[1] * is_package]
    return found


def read_library() -> dict[str, list]:
    """Read the Python that the page runs. A module of lib/ replaces any other of its name."""
    text = (BRYTHON / "brython_stdlib.js").read_text("utf-8")
    start, end = text.index("var scripts = ") + len("var scripts = "), text.rindex("\n__BRYTHON__.update_VFS")
    brythons = json.loads(text[start:end])
    package = (ROOT / "vaemem").rglob("*.py")
    found = {name: brythons[name] for name in LIBRARY}
    found |= read_modules(ROOT, (p for p in package if p.relative_to(ROOT / "vaemem").parts[0] not in LEFT_OUT))
    found |= read_modules(PAGE, [PAGE / "ask.py"]) | read_modules(ENGINE / "lib", (ENGINE / "lib").rglob("*.py"))
    return found | {"_engine": [".js", '__BRYTHON__.addToImported("_engine", globalThis.engine)']}


def compile_core(out: Path) -> None:
    sources = [p for pattern in SOURCES for p in sorted(ROOT.glob(pattern)) if p.name not in NOT_IN_THE_CORE]
    flags = ["-std=gnu11", "-fno-sanitize=all", "-fvisibility=hidden", f"-I{ENGINE / 'include'}"]

    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f"{folder}/{i}.o" for i in range(len(sources))]
        commands = [[*ZIG, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
        exported = [f"-Wl,--export={name}" for name in ("PyInit__core", "malloc", "free")]
        linked = ["-mexec-model=reactor", "-s", "-Wl,--import-symbols", "-Wl,--export-table", *exported]
        subprocess.run([*ZIG, *linked, *objects, "-o", str(out)], check=True)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shown = [path for kind in ("html", "css", "js") for path in PAGE.glob(f"*.{kind}")]
    for path in [*shown, *ENGINE.glob("*.js"), BRYTHON / "brython.js"]:
        shutil.copy(path, out)
    data = sorted(p.relative_to(ROOT / "vaemem").as_posix() for p in (ROOT / "vaemem").glob("data/**/*.json"))
    for name in data:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "vaemem" / name, out / name)
    library = json.dumps(read_library(), separators=(",", ":"))
    script = f"__BRYTHON__.use_VFS = true;\n__BRYTHON__.update_VFS({library});\nconst DATA = {json.dumps(data)};\n"
    (out / "library.js").write_text(script, "utf-8")
    choices = runpy.run_path(str(PAGE / "choices.py"))["offer_choices"]()
    (out / "choices.json").write_text(json.dumps(choices, separators=(",", ":")), "utf-8")
    compile_core(out / "core.wasm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
