"""Fuzzes what reads strangers' input and what adds up sizes: `python tests/fuzz/run.py --seconds N [--target NAME]`.

Targets in C (plan, trace, program, script, lookup, allocator) run under clang's libFuzzer, guided by coverage, where
there is clang; elsewhere under a plain random mutator; both with AddressSanitizer and UndefinedBehaviorSanitizer.
Targets in Python (unpickle, safetensors, gguf, table) run under one that knows their formats. An input that fails is
kept in build/fuzz/failed, and the exit code is 1; put it into tests/fuzz/corpus once it is mended, and
tests/test_fuzz.py replays it for good.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IN_C = ("plan", "trace", "program", "script", "lookup", "allocator")
IN_PYTHON = ("unpickle", "safetensors", "gguf", "table")
SOURCES = ("csrc/*.c", "csrc/engine/*.c", "csrc/predict/*.c", "csrc/predict/*/*.c", "kernels/*.c", "kernels/ref/*.c")
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wno-missing-field-initializers", "-fno-sanitize-recover=all"]
SANITIZE = "address,undefined"


def compiler() -> tuple[str, bool]:
    """A C compiler, and whether it has libFuzzer."""
    test = "int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return 0 * *d * (int)n; }"
    for name in (os.environ.get("VAEMEM_CLANG", "clang"), *(f"clang-{n}" for n in range(22, 11, -1))):
        if not shutil.which(name):
            continue
        command = [name, "-x", "c", "-", f"-fsanitize=fuzzer,{SANITIZE}", "-o", os.devnull]
        if subprocess.run(command, input=test, text=True, capture_output=True).returncode == 0:
            return name, True
    found = shutil.which(os.environ.get("CC", "cc"))
    if not found:
        raise SystemExit("fuzz: expected clang or another C compiler, found none")
    return found, False


def build(folder: Path, targets: tuple[str, ...] = IN_C, guided: bool | None = None) -> dict[str, Path]:
    """The programs of the targets in C, linked with a core that is compiled once."""
    name, has_fuzzer = compiler()
    if guided is None:
        guided = has_fuzzer
    folder.mkdir(parents=True, exist_ok=True)
    core = [Path(f) for pattern in SOURCES for f in sorted(glob.glob(str(ROOT / pattern)))]
    ours = [HERE / f"{target}.c" for target in targets] + ([] if guided else [HERE / "alone.c"])
    sanitize = f"-fsanitize={'fuzzer-no-link,' if guided else ''}{SANITIZE}"

    def compile_one(source: Path) -> Path:
        out = folder / ("-".join(source.relative_to(ROOT).parts) + ".o")
        subprocess.run([name, *FLAGS, sanitize, "-c", source, "-o", out], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip([*core, *ours], pool.map(compile_one, [*core, *ours]), strict=True))
    shared = [objects[s] for s in core] + ([] if guided else [objects[HERE / "alone.c"]])
    programs = {}
    for target in targets:
        programs[target] = folder / target
        kind = "-fsanitize=fuzzer," + SANITIZE if guided else f"-fsanitize={SANITIZE}"
        parts = [objects[HERE / f"{target}.c"], *shared]
        subprocess.run([name, kind, *parts, "-o", folder / target, "-lm", "-lpthread", "-ldl"], check=True)
    return programs


def corpus(target: str) -> list[Path]:
    return sorted(path for path in (HERE / "corpus" / target).glob("*") if path.is_file())


def environment() -> dict[str, str]:
    # a refused allocation is one of the answers; a leak is a fault, and so are more than 3 GB
    options = "allocator_may_return_null=1:hard_rss_limit_mb=3000"
    return os.environ | {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=1"}


def keep(target: str, last: Path, folder: Path) -> Path:
    """The failing input under a name of its own."""
    data = last.read_bytes() if last.exists() else b""
    failed = folder / "failed" / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
    failed.parent.mkdir(parents=True, exist_ok=True)
    failed.write_bytes(data)
    return failed


def fuzz(target: str, seconds: int, seed: int, folder: Path, programs: dict[str, Path]) -> bool:
    """One target for so many seconds; whether nothing was found."""
    last = folder / f"{target}.last"
    last.unlink(missing_ok=True)
    files = [str(path) for path in corpus(target)]
    guided = target in IN_C and compiler()[1]
    if guided:
        grown = folder / "corpus" / target  # what covers new code, kept for the next time
        grown.mkdir(parents=True, exist_ok=True)
        command = [programs[target], f"-max_total_time={seconds}", f"-seed={seed or 1}", "-max_len=1024"]
        command += ["-timeout=100"]  # an input that does not end; the longest takes 7 s where nothing else runs
        command += [f"-exact_artifact_path={last}", "-print_final_stats=1", grown]
        command += [HERE / "corpus" / target] if files else []
    elif target in IN_C:
        command = [programs[target], "--seconds", str(seconds), "--seed", str(seed), "--last", last, *files]
    else:
        command = [sys.executable, HERE / "targets.py", target, str(seconds), str(seed), last, *files]
    env = environment() if target in IN_C else os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=seconds + 120)
    except subprocess.TimeoutExpired:
        print(f"{target}: FAILED (does not end); the input is in {keep(target, last, folder)}", flush=True)
        return False
    runs = re.search(r"(\d+) executions|number_of_executed_units: (\d+)", done.stdout + done.stderr)
    cover = re.findall(r"cov: (\d+)", done.stderr)
    count = next((n for n in runs.groups() if n), "0") if runs else "some"
    print(f"{target}: {count} executions" + (f", {cover[-1]} edges covered" if cover else ""), flush=True)
    if done.returncode == 0:
        return True
    said = [line for line in done.stderr.splitlines() if re.search("rror|does not hold|Found|SUMMARY", line)]
    print(f"{target}: FAILED (exit {done.returncode}); the input is in {keep(target, last, folder)}")
    print("\n".join(said[:8] or done.stderr.splitlines()[-8:]), flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=[*IN_C, *IN_PYTHON], help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "fuzz", help="where programs and finds are kept"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    targets = [args.target] if args.target else [*IN_C, *IN_PYTHON]
    in_c = tuple(target for target in targets if target in IN_C)
    if in_c:
        name, guided = compiler()
        print(f"fuzz: {name}, {'libFuzzer' if guided else 'without libFuzzer: changed at random'}", flush=True)
    programs = build(args.folder, in_c) if in_c else {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        good = list(pool.map(lambda target: fuzz(target, args.seconds, args.seed, args.folder, programs), targets))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
