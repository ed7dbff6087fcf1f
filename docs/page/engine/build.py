"""Writes the calculator into a folder: the page, its scripts, the package's Python and data, and the C core.

    python docs/page/engine/build.py OUT

It runs in an environment with vaemem and the extra [site]: Brython's wheel brings the interpreter, zig's wheel compiles
the core to WebAssembly.
"""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ENGINE = Path(__file__).resolve().parent
PAGE, ROOT = ENGINE.parent, ENGINE.parents[2]
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi", "-Oz"]
SOURCES = ["csrc/**/*.c", "kernels/*.c", "kernels/ref/*.c", "docs/page/engine/*.c"]
SIZES = {"VOID_P": 4, "SIZE_T": 4, "INT": 4, "LONG": 4, "LONG_LONG": 8, "WCHAR_T": 4}
ALLOCATOR = ("Malloc", "Calloc", "Realloc", "Free")
NOT_IN_THE_CORE = {"py_cuda.c", "py_kernels.c", "py_lock.c", "py_model.c", "py_run.c"}  # the page runs no VAE
# The modules that ask.py calls: vaemem's names are imported on first use.
CALLED = [
    "out_of_memory.explanation",
    "pipelines.plan_pipeline",
    "pipelines.predict_pipeline",
    "prediction.predict_vae",
]
CALLED += [f"pipelines.by_{program}" for program in ("comfyui", "diffusers", "mlx", "sdcpp")]
# Of Brython's library, what the package imports in the page, directly or not. lib/ has short ones of our own.
LIBRARY = """
    __future__ _codecs _collections _collections_abc _contextvars _functools _io _io_classes _locale _operator _py_abc
    _py_warnings _thread _weakref _weakrefset abc browser builtins codecs collections contextlib difflib errno
    fractions functools genericpath heapq io itertools keyword math numbers operator os posix posixpath
    reprlib stat sys textwrap time types warnings
""".split()
# Modules that are imported and not needed: each is lib/_absent.py.
ABSENT = """
    _colorize csv ctypes decimal fcntl importlib.util inspect ml_dtypes mmap numpy pickle pkgutil shutil struct
    tempfile threading traceback uuid vaemem.engine.vae zipfile
""".split()


class Strip(ast.NodeTransformer):
    """Removes docstrings and annotations, which nothing in the page reads. A class with fields gets their names as
    __fields__, which lib/dataclasses.py and lib/typing.py read."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        names = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        self.generic_visit(node)
        fields = ast.Tuple([ast.Constant(name.id) for name in names if isinstance(name, ast.Name)], ast.Load())
        node.body = [ast.Assign([ast.Name("__fields__", ast.Store())], fields), *node.body]
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_for_types = isinstance(node.test, ast.Name) and node.test.id.endswith("TYPE_CHECKING")
        return node.orelse if is_for_types else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else ast.Pass()


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module imports, at any time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)


def read_modules() -> dict[str, tuple[ast.Module, bool]]:
    """Read ask.py and all modules that it imports; those of lib/ replace others of their names. Return {name: (code,
    whether it is a package)}. ModuleNotFoundError if one imports, when it is loaded, what the page does not have."""
    found = dict[str, tuple[ast.Module, bool]]()
    ours = [path.stem for path in (ENGINE / "lib").glob("*")]  # Brython's need some
    wanted = ["ask", *(f"vaemem.{name}" for name in CALLED), *ours, *ABSENT]
    while wanted:
        name = wanted.pop()
        wanted += [name.rpartition(".")[0]] * ("." in name)
        parts = ("_absent" if name in ABSENT else name).split(".")
        files = (root.joinpath(*parts).with_suffix(end) for root in (ENGINE / "lib", PAGE, ROOT) for end in ("", ".py"))
        for path in (file / "__init__.py" if file.is_dir() else file for file in files):
            if path.is_file() and name not in found:
                tree = Strip().visit(ast.parse(path.read_text("utf-8")))
                wanted += imports(tree)
                found[name] = ast.fix_missing_locations(tree), path.name == "__init__.py"
    for name, (tree, _) in found.items():
        loaded = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        roots = {one.partition(".")[0] for one in imports(loaded)} & sys.stdlib_module_names
        if lacking := roots - {*LIBRARY, *found}:
            raise ModuleNotFoundError(f"{name}: the page has no {', '.join(sorted(lacking))}")
    return found


def read_library() -> dict[str, list]:
    """Return the page's modules as Brython stores modules: {name: [kind, source, imports, 1 if a package]}."""
    text = (brython_data() / "brython_stdlib.js").read_text("utf-8")
    start, end = text.index("var scripts = ") + len("var scripts = "), text.rindex("\n__BRYTHON__.update_VFS")
    brythons = json.loads(text[start:end])
    found = {name: brythons[name] for name in LIBRARY}
    found["_engine"] = [".js", '__BRYTHON__.addToImported("_engine", globalThis.engine)']
    modules = read_modules().items()
    return found | {name: [".py", ast.unparse(tree), [], *[1] * package] for name, (tree, package) in modules}


def brython_data() -> Path:
    import brython  # of the extra [site]

    return Path(brython.__file__).parent / "data"


def pack(files: dict[str, str]) -> dict[str, Any]:
    """Return texts as their lines, sorted, and for each file the steps from one line to the next. Sorted lines compress
    better, because cuDNN's answers for similar cards are alike."""
    lines = sorted({line for text in files.values() for line in text.split("\n")})
    place = {line: i for i, line in enumerate(lines)}
    places = {name: [0, *(place[line] for line in text.split("\n"))] for name, text in files.items()}
    return {"lines": lines, "files": {name: [b - a for a, b in pairwise(one)] for name, one in places.items()}}


def write_json(path: Path, made: Any) -> None:
    path.write_text(json.dumps(made, separators=(",", ":")), "utf-8")


def compile_core(out: Path) -> None:
    sources = [p for pattern in SOURCES for p in sorted(ROOT.glob(pattern)) if p.name not in NOT_IN_THE_CORE]
    # Python's headers, with the sizes of WebAssembly's types in place of pyconfig.h, and one allocator.
    defined = ["Py_LIMITED_API=0x030B0000", "Py_PYCONFIG_H", *(f"PyMem_{name}={name.lower()}" for name in ALLOCATOR)]
    defined += [f"SIZEOF_{name}={size}" for name, size in SIZES.items()]
    included = [f"-I{sysconfig.get_path('include')}", *(f"-D{one}" for one in defined)]
    flags = ["-std=gnu11", "-fno-sanitize=all", "-fvisibility=hidden", *included]
    flags.append("-Wno-deprecated-declarations")  # getpid, which there is not

    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f"{folder}/{i}.o" for i in range(len(sources))]
        commands = [[*ZIG, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
        exported = ["-Wl,--export-dynamic", "-Wl,--export-table", "-Wl,--export=malloc", "-Wl,--export=free"]
        linked = ["-mexec-model=reactor", "-s", "-Wl,--import-symbols", *exported]
        subprocess.run([*ZIG, *linked, *objects, "-o", str(out)], check=True)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shown = [path for kind in ("html", "css", "js") for path in PAGE.glob(f"*.{kind}")]
    for path in [*shown, *ENGINE.glob("*.js"), brython_data() / "brython.js"]:
        shutil.copy(path, out)
    package = ROOT / "vaemem"
    texts = [*package.glob("data/pipelines/*.txt"), *package.glob("data/*/*.vaemem")]
    files = sorted([*package.glob("data/**/*.json"), *texts])
    data = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in files}
    first = {
        name: data[name] for name in data if not re.search("/(modules|pipelines)/|/workflow|/components|/sm7", name)
    }
    write_json(out / "data.json", pack(first))
    for name in data.keys() - first:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(data[name], "utf-8")
    library = json.dumps(read_library(), separators=(",", ":"))
    script = f"__BRYTHON__.use_VFS = true;\n__BRYTHON__.update_VFS({library});\nconst DATA = {json.dumps([*data])};\n"
    (out / "library.js").write_text(script, "utf-8")
    choices = runpy.run_path(str(PAGE / "choices.py"))["offer_choices"]()
    write_json(out / "choices.json", choices)
    compile_core(out / "core.wasm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
