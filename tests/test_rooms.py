"""The house's arrows: every import and #include points one way, and none runs in a circle."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vaemem

pytestmark = pytest.mark.python

ROOT = Path(__file__).parent.parent
# Folders and the files between them; each may use what stands before it, and the files of its own folder.
ORDER = (
    "_types", "_core", "_cuda", "_errors", "_numpy", "_common", "_saving", "_render", "_script", "_arguments",
    "engine",
    "datasets", "_handmade", "prediction", "sdcpp", "pipelines", "tables", "out_of_memory", "plot", "reports",
    "pytorch", "nodes", "_demo", "__init__", "cli", "__main__",
)  # fmt: skip
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "vaemem").rglob("*.py")}
MODULES = {name.removesuffix(".__init__") for name in FILES} | {"vaemem._core", "vaemem._cuda"}
HOUSE = [
    path for room in ("csrc", "kernels") for path in (ROOT / room).rglob("*") if path.suffix in (".c", ".h", ".cu")
]

if not HOUSE:
    pytest.skip("the sources are not here", allow_module_level=True)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def imports(name: str) -> list[tuple[str, str]]:
    """(module, where) of every import in a file, wherever it stands; `where` says if it is lazy or for types alone."""

    def walk(node: ast.AST, when: str) -> Iterator[tuple[str, str]]:
        where = f"{FILES[name].relative_to(ROOT)}:{getattr(node, 'lineno', 0)}{when}"
        if isinstance(node, ast.Import):
            yield from ((alias.name, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield (inner if inner in MODULES else module), where
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            when = " (for types alone)"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = " (when called)"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, when)

    return list(walk(tree_of(FILES[name]), ""))


def arrows() -> Iterator[tuple[str, str, str]]:
    for name in FILES:
        own = name.removesuffix(".__init__")
        for module, where in imports(name):
            if module.split(".")[0] == "vaemem":
                yield own, module, where


def place(module: str) -> int:
    """Where a module stands in ORDER; the package itself is its __init__."""
    return ORDER.index(f"{module}.__init__".split(".")[1])


def circle(graph: dict[str, set[str]]) -> str:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def test_no_circle_of_imports():
    graph: dict[str, set[str]] = {}
    for own, module, where in arrows():
        assert module in MODULES, where
        graph.setdefault(own, set()).add(module)
    assert len(graph) > 30 and not circle(graph)


def test_rooms_of_python_point_one_way():
    assert [f"{where}: {module}" for own, module, where in arrows() if place(module) > place(own)] == []


def test_names_that_start_with_an_underscore_stay_at_home():
    """A file takes no private name from another one."""
    taken = []
    for name in FILES:
        for node in ast.walk(tree_of(FILES[name])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vaemem."):
                taken += [f"{name}: {a.name}" for a in node.names if re.match(r"_[^_]", a.name)]
    assert taken == []


def test_attributes_that_start_with_an_underscore_stay_at_home():
    """A room uses no private attribute of another room's objects."""
    private: dict[str, set[str]] = {}  # by room
    used: list[tuple[str, str, str]] = []
    for name, path in FILES.items():
        room = path.parent.relative_to(ROOT).as_posix()
        own = private.setdefault(room, set())
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    used.append((room, node.attr, f"{name}:{node.lineno}"))
    others = {room: set().union(*(private[one] for one in private if one != room)) - private[room] for room in private}
    # Modules; what every NamedTuple, every torch.nn.Module and the core's allocator have.
    known = {"_core", "_cuda", "_make", "_replace", "_asdict", "_parameters", "_buffers"}
    known |= {"_blocks", "_place", "_restore"}
    assert [where for room, attribute, where in used if attribute in others[room] - known] == []


def test_functions_have_few_parameters():
    """Behind the public functions of predictions, eight at most."""
    public = {*vaemem.__all__, "__new__"}
    long = []
    for room in ("prediction", "pipelines"):
        for path in (ROOT / "vaemem" / room).glob("*.py"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.FunctionDef) and node.name not in public:
                    given = node.args
                    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    if len(names) - (names[:1] in (["self"], ["cls"])) > 8:
                        long.append(f"{path.name}: {node.name}")
    assert long == []


def test_the_glossary_has_every_class_once():
    """docs/DESIGN.md explains every public class of predictions, each word once."""
    text = (
        (ROOT / "docs" / "DESIGN.md")
        .read_text("utf-8")
        .partition("Words, each with one meaning")[2]
        .partition("\n## ")[0]
    )
    lines = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    words = [word for line in lines for word in re.findall(r"`(\w+)`", line)]
    classes = {
        node.name
        for room in ("prediction", "pipelines")
        for path in (ROOT / "vaemem" / room).glob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    assert len(words) == len({*words}) and {*words} == classes and len(words) <= 74


def test_torch_is_imported_in_one_room():
    torch = {
        FILES[name].parent.relative_to(ROOT).as_posix()
        for name in FILES
        for module, _ in imports(name)
        if module.split(".")[0] == "torch"
    }
    assert torch == {"vaemem/pytorch"}


def code(path: Path) -> str:
    """Without comments."""
    return re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.S)


def includes(path: Path) -> Iterator[str]:
    text = code(path)
    yield from re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M)


def ours(path: Path, name: str) -> Path | None:
    """The file of ours that an #include means: beside its includer, else in a folder that the build searches."""
    folders = (path.parent, ROOT / "csrc", ROOT / "csrc/python", ROOT / "kernels")
    return next((found for folder in folders if (found := (folder / name).resolve()) in HOUSE), None)


def test_no_circle_of_includes():
    found = {path: [ours(path, name) for name in includes(path)] for path in HOUSE}
    graph = {str(path): {str(include) for include in found[path] if include} for path in HOUSE}
    assert sum(map(len, graph.values())) > 50 and not circle(graph)


def needed_files() -> dict[str, set[str]]:
    """By file in C, the other files whose functions and tables it uses. Names that other files see start like these."""
    name = r"(?:vm|ta|PyInit)_\w+"
    defined = rf"^(?!static|typedef|extern)[a-zA-Z][\w *]*?\b({name})(?:\([^;{{}}]*\)\s*\{{|(?:\[\w*\])* = )"
    text = {str(path.relative_to(ROOT)): code(path) for path in HOUSE if path.suffix == ".c"}
    home = {one: path for path in text for one in re.findall(defined, text[path], re.M)}
    assert len(home) > 350
    return {path: {home[one] for one in re.findall(rf"\b{name}", text[path]) if one in home} - {path} for path in text}


def test_no_circle_of_functions():
    """No two files in C need functions or tables of each other, nor do more of them in a circle."""
    graph = needed_files()
    assert sum(map(len, graph.values())) > 200 and not circle(graph)


def test_kernels_need_nothing_of_the_core():
    """No file in kernels/ includes a file of csrc/ or uses a name that one defines."""
    kernels = [path for path in HOUSE if path.is_relative_to(ROOT / "kernels")]
    found = [f"{path.name}: {name}" for path in kernels for name in includes(path) if "csrc" in str(ours(path, name))]
    needs = {path: names for path, names in needed_files().items() if path.startswith("kernels")}
    found += [f"{path}: {name}" for path, names in needs.items() for name in names if name.startswith("csrc")]
    assert len(needs) > 20 and found == []


def test_rooms_of_c_point_one_way():
    """kernels.h <- csrc <- csrc/python, and kernels.h <- kernels: the core knows no Python, no GPU, no intrinsics."""
    assert [name for name in includes(ROOT / "kernels/kernels.h") if ours(ROOT / "kernels/kernels.h", name)] == []
    core = [path for path in HOUSE if path.is_relative_to(ROOT / "csrc") and "python" not in path.parts]
    wrong = []
    for path in core:
        for name in includes(path):
            found = ours(path, name)
            outside = name == "Python.h" or "python" in Path(name).parts or name.endswith("intrin.h")
            if outside or (found and found.is_relative_to(ROOT / "kernels") and found.parent.name == "cuda"):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


# A name that two files have for one meaning: plot.tradeoff draws what tradeoff gives.
# vaemem.pytorch.predict_pipeline takes pipelines that have no name; ComfyUI's and InvokeAI's VAEs run alike.
# The files of programs have the names of PipelineProgram.
SHARED = {"tradeoff", "predict_pipeline", "recognise", "decode_whole", "encode_whole"}
SHARED |= {"NAMES", "UNUSED", "predict", "plan"}


def test_one_name_has_one_meaning():
    """No public class, function or constant of that name stands in two files, and no two files have one name."""
    homes: dict[str, set[str]] = {}
    for name, path in FILES.items():
        if path.stem not in ("__init__", "__main__"):
            homes.setdefault(path.name, set()).add(name)
        for node in tree_of(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [item.id for target in targets if target for item in ast.walk(target) if isinstance(item, ast.Name)]
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names = [node.name]
            for found in names:
                if not found.startswith("_"):
                    homes.setdefault(found, set()).add(name)
    assert {name: where for name, where in homes.items() if len(where) > 1 and name not in SHARED} == {}


RETIRED = {"score", "replay", "repeat", "again", "process"}  # a program's text is a script, and a device's run a play
# Replays of a recorded history have PyTorch's own decisions; the other two are PyTorch's names.
KEPT = {"Replay", "replay", "SimulatedProcess", "vm_talloc_count_again", "vm_walk_repeat", "repeat"}


def words_of(name: str) -> set[str]:
    return set(re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", name).lower()))


def test_retired_words():
    """A script is written, a play plays it. Words that meant either are in no name of prediction."""
    public = re.compile(r"^ *(?:def|class) ([A-Za-z]\w*)", re.MULTILINE)
    files = [path for room in ("prediction", "pipelines") for path in (ROOT / "vaemem" / room).glob("*.py")]
    names = {name for path in files for name in public.findall(path.read_text("utf-8"))}
    for header in (ROOT / "csrc/predict").rglob("*.h"):
        names |= set(re.findall(r"\b(vm_\w+)", header.read_text("utf-8")))
    assert len(names) > 700 and {name for name in names - KEPT if words_of(name) & RETIRED} == set()


def test_files_are_short():
    """The rule stands in CONTRIBUTING.md. Tests may be longer: they are lists of cases."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in [*HOUSE, *FILES.values()]
    }
    assert {name: lines for name, lines in lengths.items() if lines > 700} == {}


def test_lines_of_c_keep_within_120_columns():
    """clang-format says nothing of comments and strings that it cannot break."""
    lines = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in HOUSE
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line.replace("\t", " " * 8)) > 120
    ]
    assert lines == []


def test_functions_are_short():
    """At most 80 lines, not counting the signature and the docstring."""
    long = set()
    for name, path in FILES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[bool(ast.get_docstring(node)) :]
                if body and (body[-1].end_lineno or 0) - body[0].lineno >= 80:
                    long.add(f"{name}.{node.name}")
    assert long == set()


# ---- tests ----

WORDS = re.compile(r"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")
MESSAGES = re.compile(r"\.err\b|\bstderr\b|\.message\b|\bstr\((error|caught|wrong|fault)\b")


def quotes(tree: ast.AST) -> Iterator[ast.AST]:
    """The places in a test file that compare the words of an error, a warning or a command's complaint."""

    def has_words(*nodes: ast.AST) -> bool:
        texts = (node.value for one in nodes for node in ast.walk(one) if isinstance(node, ast.Constant))
        return any(isinstance(text, str) and bool(WORDS.search(text)) for text in texts)

    def is_message(node: ast.AST) -> bool:
        return bool(MESSAGES.search(ast.unparse(node)))

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg in ("match", "names")}
            if name in ("pytest.raises", "pytest.warns") and "match" in given:
                yield node
            elif name in ("refused", "warned", "complains", "is_about") and has_words(
                *(given[k] for k in given if k == "names")
            ):
                yield node
            elif isinstance(node.func, ast.Attribute) and is_message(node.func.value) and has_words(*node.args):
                yield node
        elif isinstance(node, ast.Compare) and has_words(node) and any(map(is_message, (node.left, *node.comparators))):
            yield node


def test_tests_quote_no_messages():
    """Another sentence breaks no test: tests/errors.py compares the subject and the values of a message."""
    wrong = ast.parse(
        'pytest.raises(X, match="a")\nassert "no such great file" in str(caught.value)\nrefused("x", names=[1])'
    )
    assert len([*quotes(wrong)]) == 2
    found = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        for node in quotes(tree_of(path))
    ]
    assert found == []
