"""Run the steps that need a borrowed GPU, the most valuable first, in calls of a few minutes.

    python benchmarks/gpu_session.py pack              beforehand, without a GPU: build what takes long, into build/gpu
    python benchmarks/gpu_session.py [first] [second]  on the machine with the GPU; or any steps by name
    python benchmarks/gpu_session.py tables ROWS       afterwards: rows.jsonl as CSV files in benchmarks/results
    python benchmarks/gpu_session.py list              the steps
    python benchmarks/gpu_session.py --rehearse ...    without a GPU: tiny sizes, our kernels on the tests' emulator

`first` answers the main questions in at most 480 s: does it run, is it right, how fast is it compared with PyTorch, is
PyTorch's memory as predicted? `second` follows at once with at most 300 s. Each step has its own limit. A step that
fails or takes too long is stopped with SIGINT, so that Python says where it was, and the others have their turns. Steps
that ended well are listed in build/gpu_session/done and skipped in the next call; `--again` runs them all the same.

Everything is written at once: session.log has all output, rows.jsonl a line of JSON for each row, so a call that is
killed loses nothing that was measured. `pack` needs an interpreter of the machine's minor version of Python and nvcc;
the machine needs PyTorch, and fetches nothing. Environment:

    OUT             folder of session.log and rows.jsonl, build/gpu_session by default
    VAEMEM_COMMIT   the measured commit, if there is no git; `pack` notes it
    VAEMEM_FATBINS  machine code that `pack` has compiled, build/gpu/fatbins by default
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu"
WHEELS = ["diffusers==0.42.1", "importlib_metadata", "zipp", "ml_dtypes"]  # that the machine lacks, or may lack
Command = list[str]


@dataclass(frozen=True)
class Scale:
    """The settings of a session's steps: sizes in pixels, and the device of PyTorch."""

    small: bool = False

    @property
    def sizes(self) -> tuple[str, str]:
        return ("16", "32") if self.small else ("1024", "2048")

    @property
    def slower(self) -> int:
        """The factor by which steps may take longer: the emulator is slower than a GPU."""
        return 4 if self.small else 1

    @property
    def torch(self) -> Command:
        """Options of the benchmarks that compare with PyTorch."""
        return ["--device", "cpu", "--small"] if self.small else []

    def check(self, *words: str) -> Command:
        sizes = ["--size", "16", "--compare", "16", "--times", "1"] if self.small else []
        return bench("gpu_checks.py", *words, *sizes)

    def decode(self, size: int, *words: str) -> Command:
        dtypes = [] if self.small else ["--dtypes", "bfloat16"]
        few = ["--rounds", "1"] if self.small else []
        return bench("decode_gpu.py", "--models", "sdxl", *dtypes, "--ops", "decode", "--sizes", self.sizes[size],
                     *words, *few, *self.torch)  # fmt: skip

    def tests(self, *words: str) -> Command:
        most = [] if self.small else ["-n", "12"]
        options = "-p no:cacheprovider --tb=short --maxfail=20 -q -rfE -o faulthandler_timeout=20".split()
        return [sys.executable, "-P", "-m", "pytest", *options, "-m", "not packages", *most, *words]


def bench(script: str, *words: str) -> Command:
    return [sys.executable, f"benchmarks/{script}", *words]


@dataclass(frozen=True)
class Step:
    """Some commands that share a limit in seconds. `gpu`: tests launch kernels on a GPU."""

    seconds: int
    commands: Callable[[Scale], list[Command]]
    env: dict[str, str] = field(default_factory=dict)


VERSIONS = """import importlib.util, platform, sys
def version(name):
    return getattr(__import__(name), "__version__", "there") if importlib.util.find_spec(name) else "missing"
names = "numpy", "torch", "transformers", "diffusers", "pytest", "xdist", "ml_dtypes", "setuptools"
print(sys.version, platform.platform(), *(f"{name} {version(name)}" for name in names))
import torch, vaemem
print("cuDNN", torch.backends.cudnn.version(), "CUDA", torch.version.cuda, "vaemem", vaemem.__file__)
print(*vaemem.backends("bfloat16"), sep="\\n")"""
KERNELS = [
    f"tests/test_{name}.py"
    for name in ("cuda_kernels", "cuda_store", "cuda_attention", "cuda_own_conv", "cuda_conv_video")
]
ON_GPU = {"VAEMEM_TEST_GPU": "1"}
PEERS = ["--graphs", "--case-seconds", "5", "--peers", "eager", "channels_last"]


def build(scale: Scale) -> list[Command]:
    """Nothing if what `pack` made can be imported."""
    tried = subprocess.run(
        [sys.executable, "-P", "-c", "import vaemem._cuda"], capture_output=True, env=environment(scale.small)
    )
    return [] if tried.returncode == 0 else [[sys.executable, "setup.py", "-q", "build_ext", "--inplace"]]


STEPS = {
    # ---- first ----
    "build": Step(40, build, {"VAEMEM_CUDA": "1", "VAEMEM_KERNELS": "1"}),
    "versions": Step(25, lambda s: [[sys.executable, "-P", "-c", VERSIONS]]),
    "one": Step(
        30,
        lambda s: [
            s.check("one", "own"),
            s.check("one", "cudnn"),
            *([] if s.small else [s.check("one", "cudnn", "--with-torch")]),
        ],
    ),
    "dlpack": Step(15, lambda s: [] if s.small else [s.check("dlpack")]),
    "headline": Step(45, lambda s: [s.decode(0, *PEERS, "--label", "headline")]),
    "large": Step(50, lambda s: [s.decode(1, *PEERS, "--label", "large")]),
    "predict": Step(100, lambda s: [predict(s)]),
    "compile": Step(60, lambda s: [s.decode(0, *PEERS, "compile", "--label", "compile")]),
    "kernels": Step(
        60, lambda s: [s.tests(*(["tests/test_cuda_store.py", "-k", "one"] if s.small else KERNELS))], ON_GPU
    ),
    "passes": Step(40, lambda s: [passes(s, way) for way in ("own", "cudnn")]),
    # ---- second ----
    "compile_large": Step(75, lambda s: [s.decode(1, *PEERS, "compile", "--label", "compile_large")]),
    "tiles": Step(30, lambda s: [tiles(s)]),
    "limits": Step(60, lambda s: [s.check("limits")]),
    "scaling": Step(40, lambda s: [scaling(s)]),
    "videos": Step(90, lambda s: [s.check("videos", *([] if s.small else ["--with-torch"]))]),
    # ---- only by name ----
    "attention": Step(30, lambda s: [attention(s)]),
    "parts": Step(40, lambda s: [s.decode(0, "--parts", "--rounds", "5", "--label", "parts")]),
    "repeats": Step(25, lambda s: [s.check("repeats")]),
    "vae": Step(90, lambda s: [s.tests("tests/test_cuda_vae.py", "tests/test_cuda_videos.py")], ON_GPU),
    "autotune": Step(60, lambda s: [s.decode(0, "--peers", "compile-autotune", "--label", "autotune")]),
    "ablation": Step(60, lambda s: [s.decode(0, "--ablation")]),
    "encode": Step(40, lambda s: [encode(s)]),
    "types": Step(100, lambda s: [s.decode(0, *PEERS, "--dtypes", "float16", "tf32", "float32", "--label", "types")]),
    "arrays": Step(60, lambda s: [s.tests("tests/test_cuda_vae_arrays.py", "tests/test_cuda_limits.py")], ON_GPU),
    "plans": Step(45, lambda s: [bench("gpu_plans.py")]),
    "memcheck": Step(90, lambda s: [sanitizer("memcheck")], ON_GPU),
    "racecheck": Step(90, lambda s: [sanitizer("racecheck")], ON_GPU),
    "counters": Step(90, lambda s: [counters("regex:^vm_(conv|attention)")]),
    "seed_grid": Step(110, lambda s: [seed_grid(s)]),
    "small_card": Step(110, lambda s: [bench("small_card.py", *(["--small"] if s.small else []))]),
    "guide": Step(
        40, lambda s: [bench("guide_gpu.py", *(["--tile", "64", "--rounds", "1", *s.torch] if s.small else []))]
    ),
    "pipelines": Step(330, lambda s: [pipelines(s)]),
}
CALLS = {
    "first": "build versions one dlpack headline large predict compile kernels passes".split(),
    "second": "compile_large tiles limits scaling videos".split(),
}
LIMITS = {"first": 480, "second": 300}


def predict(scale: Scale) -> Command:
    small = ["--cases", "sdxl:decode:64x64:float32", "--device", "cpu", "--protocols", "cold"]
    return bench("torch_memory.py", *(small if scale.small else ["--profile"]))


def passes(scale: Scale, way: str) -> Command:
    return scale.decode(0, "--passes", "--convolution", way, "--rounds", "5", "--label", way)


def tiles(scale: Scale) -> Command:
    small = ["--sizes", "8", *scale.torch] if scale.small else []
    return bench("conv_tiles.py", "--dtypes", "bfloat16", "--rounds", "1", "--case-seconds", "0.5", *small)


def attention(scale: Scale) -> Command:
    """Every kernel of attention, next to each other."""
    small = ["--sizes", "64", "--rounds", "1", *scale.torch] if scale.small else []
    return bench("attention_kernels.py", "--dtypes", "bfloat16", "--case-seconds", "1", *small)


def scaling(scale: Scale) -> Command:
    return bench("scaling.py", *(["--size", "32", "--rounds", "1"] if scale.small else ["--dtypes", "bfloat16"]))


def pipelines(scale: Scale) -> Command:
    small = ["--device", "cpu", "--small", "--cases", "sd15:512x512"] if scale.small else ["--jobs", "6", "--missing"]
    return bench("pipelines_gpu.py", "--seconds", "310", *small)


def seed_grid(scale: Scale) -> Command:
    """The seed table's own runs, and our engine next to them."""
    small = (
        ["--cases", "sdxl:decode:64x64:float32", "--device", "cpu"] if scale.small else ["--grid", "--seconds", "100"]
    )
    return bench("torch_memory.py", "--protocols", "warm", "--engine", *small)


def encode(scale: Scale) -> Command:
    where = scale.torch if scale.small else ["--dtypes", "bfloat16"]
    return bench("decode_gpu.py", "--models", "sdxl", "--ops", "encode", "--sizes", scale.sizes[0], *PEERS, *where)


def sanitizer(tool: str) -> Command:
    """compute-sanitizer on our own kernels in a small decode and in every tile of conv.cu."""
    return ["compute-sanitizer", "--target-processes", "application-only", "--tool", tool, "--kernel-name", "kns=vm_",
            "--report-api-errors", "no", "--error-exitcode", "1", sys.executable, "-P", "-m", "pytest", "-q", "-m",
            "not packages", "tests/test_cuda_own_conv.py", "tests/test_cuda_vae.py", "-k",
            "(test_fused and bf16) or (test_decode and odd and size1)"]  # fmt: skip


def counters(kernels: str) -> Command:
    """ncu's counters of a decode at 1024x1024; the clocks stay as they are."""
    sections = (
        "SpeedOfLight Occupancy LaunchStats WarpStateStats MemoryWorkloadAnalysis ComputeWorkloadAnalysis".split()
    )
    options = [*"--clock-control none --launch-count 70 --csv --page raw --kernel-name".split(), kernels]
    options += [word for name in sections for word in ("--section", name)]
    options += ["--log-file", str(Session.out() / "counters.csv")]
    return ["ncu", *options, *bench("gpu_checks.py", "one", "own", "--times", "1", "--compare", "1024")]


# ---- a call ----


class Session:
    """One call: runs steps within a limit, writes what they print."""

    def __init__(self, limit: float, scale: Scale, env: dict[str, str]):
        self.start, self.limit, self.scale, self.env = time.monotonic(), limit, scale, env
        self.out().mkdir(parents=True, exist_ok=True)
        self.log = open(self.out() / "session.log", "a", buffering=1)
        self.done = ROOT / "build" / "gpu_session" / ("rehearsed" if scale.small else "done")
        self.done.parent.mkdir(parents=True, exist_ok=True)
        self.ended: dict[str, str] = {}

    @staticmethod
    def out() -> Path:
        return Path(os.environ.get("OUT") or ROOT / "build" / "gpu_session")

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")

    def run(self, names: list[str]) -> bool:
        self.say(f"-- session: {' '.join(names)}, {self.limit:.0f} s")
        for name in names:
            begin = self.now
            ending = self.run_step(name, STEPS[name])
            self.ended[name] = f"{ending}, {self.now - begin:.0f} s"
            if ending == "well":
                with self.done.open("a") as file:
                    file.write(name + "\n")
        self.say(f"-- at {self.now:.0f} s: " + "; ".join(f"{name} {how}" for name, how in self.ended.items()))
        return all(how.startswith("well") for how in self.ended.values())

    def run_step(self, name: str, step: Step) -> str:
        end, ending = self.now + step.seconds * self.scale.slower, "well"
        for command in step.commands(self.scale):
            left = min(end, self.limit) - self.now
            self.say(f"-- {name}, at {self.now:.0f} s, for {left:.0f} s: {shown(command)}")
            if left < 1:
                return "not begun: no time is left"
            status = self.run_command(command, left, self.env | step.env)
            if status != 0:
                ending = "stopped after its time" if status is None else f"failed with status {status}"
                self.say(f"-- {name}: {ending}")
        return ending

    def run_command(self, command: Command, seconds: float, env: dict[str, str]) -> int | None:
        """Returns the exit status, or None if its time was over."""
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", process_group=0,
            )  # fmt: skip
        except FileNotFoundError as error:
            self.say(str(error))
            return 127
        reader = threading.Thread(target=self.copy, args=(process.stdout,), daemon=True)
        reader.start()
        late = False
        for sent, wait in ((None, seconds), (signal.SIGINT, 8.0), (signal.SIGKILL, 5.0)):
            if sent:
                late = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it started and did not end
        reader.join(2)
        return None if late else process.returncode

    def copy(self, lines) -> None:
        for line in lines:
            self.say(line.rstrip("\n"))


def shown(command: Command) -> str:
    words = [word if len(word) < 100 else "..." for word in command]
    return " ".join(["python" if word == sys.executable else word for word in words])


def capability() -> str:
    """Returns the GPU's compute capability, such as "90"; empty without one."""
    with contextlib.suppress(OSError):
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
        )
        return asked.stdout.partition("\n")[0].strip().replace(".", "")
    return ""


def environment(rehearse: bool) -> dict[str, str]:
    """Returns the steps' environment. Files from `pack` come first on the path if they are for this Python."""
    out = Session.out()
    env = dict(os.environ)
    env.pop("PYTHONSAFEPATH", None)  # benchmarks import modules from their own folder
    packed = PACKED / "site"
    usable = (packed / f"python{sys.version_info.major}.{sys.version_info.minor}").exists()
    paths = [str(packed)] if usable and not rehearse else [] if rehearse else [str(ROOT)]
    env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    env["VAEMEM_ROWS"] = str(out / "rows.jsonl")
    # Benchmarks write whole tables too; the rows are what comes back.
    env["VAEMEM_RESULTS"] = str(ROOT / "build" / "gpu_session" / "tables")
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env.setdefault("VAEMEM_FATBINS", str(PACKED / "fatbins"))
    if not env.get("VAEMEM_COMMIT") and (PACKED / "commit").exists():
        env["VAEMEM_COMMIT"] = (PACKED / "commit").read_text().strip()
    target = "" if rehearse else capability()
    if target:
        env["VAEMEM_CUDA_ARCHS"] = target
    if rehearse:
        sys.path.insert(0, str(ROOT / "tests"))
        from emulator import build as emulator

        libcuda, libcudnn = emulator.build()
        env |= {"VAEMEM_LIBCUDA": str(libcuda), "VAEMEM_CUDNN": str(libcudnn)}
    return env


def chosen(names: list[str], again: bool, done: Path) -> list[str]:
    """Returns the steps to run: not those that ended well before; `second` includes the rest of `first`."""
    before = set() if again or not done.exists() else set(done.read_text().split())
    steps = []
    for name in names or ["first"]:
        if name == "second":
            steps += CALLS["first"]
        steps += CALLS.get(name, [name])
    return [step for step in dict.fromkeys(steps) if step not in before]


@contextlib.contextmanager
def clocks(out: Path) -> Iterator[None]:
    """Writes the GPU's clocks twice a second."""
    if not shutil.which("nvidia-smi"):
        yield
        return
    what = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"
    with open(out / "clocks.csv", "a") as file:
        watch = subprocess.Popen(["nvidia-smi", f"--query-gpu={what}", "--format=csv", "-lms", "500"], stdout=file)
        try:
            yield
        finally:
            watch.kill()
            watch.wait()


# ---- before and after ----


def pack(python: str, archs: str) -> None:
    """Builds the package and its machine code for another machine: build/gpu/site and build/gpu/fatbins."""
    shutil.rmtree(PACKED, ignore_errors=True)
    site, work = PACKED / "site", ROOT / "build" / "gpu_pack"
    shutil.rmtree(work, ignore_errors=True)
    site.mkdir(parents=True)
    work.mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "kernels", "vaemem"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=shutil.ignore_patterns("*.so", "*.so.1", "__pycache__"))
        else:
            shutil.copy(source, work / name)
    venv = ROOT / "build" / "gpu_venv"
    own = str(venv / "bin" / "python")
    if not Path(own).exists():
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
    pip = [own, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "setuptools>=77", "numpy>=2"], check=True)
    env = os.environ | {"VAEMEM_CUDA": "1", "VAEMEM_CUDA_ARCHS": archs, "VAEMEM_KERNELS": "1"}
    env["VAEMEM_FATBINS"] = str(ROOT / "build" / "fatbins")
    to_site = [*pip, "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run([*to_site, "--no-build-isolation", str(work)], check=True, env=env)
    subprocess.run([*to_site, *WHEELS], check=True)
    version = subprocess.run(
        [own, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    (site / version.stdout.strip()).touch()
    sys.path.insert(0, str(ROOT / "kernels" / "cuda"))
    import fatbins

    for place in (work / "build" / "fatbins", ROOT / "build" / "fatbins"):
        for folder in place.glob(f"{fatbins.digest()}-*"):
            shutil.copytree(folder, PACKED / "fatbins" / folder.name, dirs_exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    (PACKED / "commit").write_text(commit.stdout)
    size = sum(file.stat().st_size for file in PACKED.rglob("*") if file.is_file())
    print(f"{PACKED}: {size / 2**20:.0f} MiB, commit {commit.stdout.strip()}")


def tables(path: Path) -> None:
    """Writes rows.jsonl as CSV files; names that end in .csv are tables, all others stay rows."""
    from common import RESULTS, write_csv

    found: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a call that was killed
            row = json.loads(line)
            found.setdefault(row.pop("table"), []).append(row)
    for name, rows in found.items():
        if name.endswith(".csv"):
            columns = dict.fromkeys(key for row in rows for key in row)
            write_csv(name, [dict.fromkeys(columns) | row for row in rows])
    log = path.with_name("session.log")
    if log.exists():  # what the steps printed, and when
        shutil.copy(log, RESULTS / "session.log")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="first, second, steps, or: pack, tables ROWS, list")
    parser.add_argument("--limit", type=float, help="seconds for the whole call; 480 for first, 300 for second")
    parser.add_argument("--again", action="store_true", help="also run steps that have ended well before")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at tiny sizes")
    parser.add_argument("--python", default="python3.12", help="for pack: an interpreter of the machine's version")
    parser.add_argument("--archs", default="90", help="for pack: the machine's compute capability")
    args = parser.parse_args(argv)
    # In the background of a shell a session may start with SIGINT ignored. Its steps would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = args.words
    if words[:1] == ["pack"]:
        pack(args.python, args.archs)
        return 0
    if words[:1] == ["tables"]:
        tables(Path(words[1]))
        return 0
    if words[:1] == ["list"]:
        for name, step in STEPS.items():
            print(f"{name:14s} {step.seconds:3d} s")
        return 0
    unknown = [word for word in words if word not in STEPS and word not in CALLS]
    if unknown:
        parser.error(f"words: unknown {', '.join(unknown)}; want first, second, pack, tables, list or a step")
    limit = args.limit or sum(LIMITS.get(word, 0) for word in words or ["first"]) or 480
    scale = Scale(args.rehearse)
    session = Session(limit * scale.slower, scale, environment(args.rehearse))
    with clocks(session.out()):
        return 0 if session.run(chosen(words, args.again, session.done)) else 1


if __name__ == "__main__":
    sys.exit(main())
