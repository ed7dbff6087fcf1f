"""Build vaemem._core, the C11 core. Each folder of kernels has its own instruction-set flags. VAEMEM_CUDA=1 adds
vaemem._cuda. Builds in place and VAEMEM_KERNELS=1 add vaemem._kernels, which tests and benchmarks use.

The extensions keep to Python's stable ABI, so one build serves every CPython from 3.11 on. Free-threaded CPython has
no stable ABI yet and gets a build of its own. pyproject.toml has everything else. Environment:
  VAEMEM_WERROR=1    warnings are errors (CI)
  VAEMEM_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer
  VAEMEM_KERNELS=1   vaemem._kernels is built where it would not be (make test)
  VAEMEM_CUDA=1      builds vaemem._cuda (its GPU kernels take minutes); auto: builds it if there is nvcc
  VAEMEM_CUDA_ARCHS  the GPUs that get machine code, such as "80 90", instead of all
  VAEMEM_FATBINS     a folder with machine code that was compiled before, used if it is of these sources
  VAEMEM_EMULATE_AMX tests/emulator, on which AMX's products run where there is AVX2 alone, slowly (tests)
  CUDA_HOME          the toolkit, where nvcc is not on the path
  VAEMEM_TARGET      another platform, as zig names it, such as aarch64-linux-gnu.2.28 (make wheels)
  VAEMEM_TARGET_ROOT its folder: include/ with the headers of Python and NumPy, and for Windows libs/python3.lib

For another platform, and on Windows, zig's clang compiles: MSVC has no vector extension. On Windows pip installs zig
for the build (pyproject.toml); that has not been tried.
"""

import glob
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels", "cuda"))
import fatbins

# The instruction sets of this machine, and the macro that tells the sources of them.
X86 = (["sse", "avx2", "avx512", "avx512bf16", "amx"], "VM_HAVE_X86")
NEON = (["neon"], "VM_HAVE_NEON")
MACHINES = {"x86_64": X86, "amd64": X86, "aarch64": NEON, "arm64": NEON}
# -ffp-contract: a*b + c may be one rounding where the instruction set has it; every kernel's tolerance allows for it.
COMMON = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-fvisibility=hidden"]
KERNELS = [*COMMON, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
AVX512 = [*(f"-mavx512{x}" for x in ("f", "vl", "bw", "dq")), "-mfma", "-mprefer-vector-width=512"]
SANITIZE = ["-fsanitize=address,undefined"] if os.environ.get("VAEMEM_SANITIZE") == "1" else []
WANTS_CUDA = os.environ.get("VAEMEM_CUDA") or "0"
EMULATOR = os.environ.get("VAEMEM_EMULATE_AMX", "")
AMX = ["-mavx2", "-mfma", "-iquote", EMULATOR] if EMULATOR else [*AVX512, "-mamx-tile", "-mamx-bf16"]
# The platform that zig compiles for; empty if this machine's own compiler does.
TARGET = os.environ.get("VAEMEM_TARGET") or ("x86_64-windows-gnu" if sys.platform == "win32" else "")
CROSS = bool(os.environ.get("VAEMEM_TARGET"))
ROOT = os.environ["VAEMEM_TARGET_ROOT"] if CROSS else sys.base_prefix
INCLUDES = [os.path.join(ROOT, "include")] if CROSS else [numpy.get_include()]
SETS, HAVE_SETS = MACHINES.get(TARGET.partition("-")[0] or platform.machine().lower(), ([], None))
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target", TARGET]
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
# What a library needs beyond its objects: the import library of Python's DLL, or leave to let the loader find Python.
DLL = "python3" if STABLE_ABI else f"python3{sys.version_info[1]}t"
# The table of other libraries' functions is read-only once the library is loaded. This costs nothing while code runs.
# Flags of the compiler, such as -fstack-protector-strong, were tried too: 2 to 5% slower on a busy machine.
HARDENED = ["-Wl,-z,relro,-z,now"] if "linux" in (TARGET or sys.platform) else []
LINK = {"windows": [os.path.join(ROOT, "libs", f"{DLL}.lib")], "macos": ["-undefined", "dynamic_lookup"]}
FLAGS = {
    "csrc": COMMON,
    "kernels": KERNELS,
    "kernels/cuda": COMMON,
    "kernels/cudnn": COMMON,
    "kernels/ref": KERNELS,
    # Without these GCC 12 keeps some of gemm's sums in memory (neon), or copies all of them in every step (sse, which
    # then has 0.85 of the speed). clang has no such flags, and is told not to warn of them.
    "kernels/neon": [*KERNELS, "-fno-schedule-insns", "-Wno-ignored-optimization-argument"],
    "kernels/sse": [*KERNELS, "-fno-tree-ter", "-Wno-ignored-optimization-argument"],
    "kernels/avx2": [*KERNELS, "-mavx2", "-mfma"],
    "kernels/avx512": [*KERNELS, *AVX512],
    "kernels/avx512bf16": [*KERNELS, *AVX512, "-mavx512bf16"],
    "kernels/amx": [*KERNELS, *AMX],
}
FOLDERS = ["csrc", "csrc/engine", "csrc/predict", "csrc/predict/*", "csrc/python", "kernels", "kernels/ref"]
FOLDERS += [f"kernels/{name}" for name in SETS]

# The GPUs that get machine code, as far as this nvcc knows them; later ones compile PTX when they load it.
CUDA_ARCHS = (os.environ.get("VAEMEM_CUDA_ARCHS") or "75 80 86 89 90 100 120").split()


def flags_for(source: str) -> list[str]:
    """Flags of the nearest folder that has its own."""
    folder = os.path.dirname(source)
    while folder not in FLAGS:
        folder = os.path.dirname(folder)
    flags = list(FLAGS[folder])
    if os.environ.get("VAEMEM_WERROR") == "1":
        flags.append("-Werror")
    if SANITIZE:
        # Python's own flags may hold -fwrapv, which would make signed overflow no fault.
        flags += [*SANITIZE, "-fno-sanitize-recover=all", "-fno-wrapv", "-g", "-O1"]
    return flags


def in_parallel(work, items: list) -> list:
    """What map() gives, by as many threads as there are processors for this process."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(own) as pool:
        return list(pool.map(work, items))


def wheel_folders(*names: str) -> list[str]:
    """Folders of the nvidia-* wheels, where these lie in sys.path."""
    return [f for path in sys.path for name in names for f in sorted(glob.glob(os.path.join(path, "nvidia", name)))]


def find_cuda() -> tuple[str, str] | None:
    """nvcc and the folder of <cuda.h>: CUDA_HOME, the path, /usr/local/cuda, or the nvidia-* wheels."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    roots = [os.path.dirname(os.path.dirname(os.path.realpath(on_path)))] if on_path else []
    roots = [named] if named else [*roots, "/usr/local/cuda", *wheel_folders("cu*", "cuda_nvcc")]
    nvccs = [os.path.join(root, "bin", "nvcc") for root in roots]
    includes = [os.path.join(root, "include") for root in [*roots, *wheel_folders("cuda_runtime")]]
    nvcc = next((f for f in nvccs if os.access(f, os.X_OK)), None)
    include = next((f for f in includes if os.path.isfile(os.path.join(f, "cuda.h"))), None)
    return (nvcc, include) if nvcc and include else None


def compile_kernels(nvcc: str) -> str:
    """Returns the folder of the machine code of kernels/cuda/*.cu for every GPU of CUDA_ARCHS, and PTX."""
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    archs = [a for a in CUDA_ARCHS if f"sm_{a}" in known]
    if not archs or (os.environ.get("VAEMEM_CUDA_ARCHS") and archs != CUDA_ARCHS):
        want = f"want numbers such as '80 90', of {' '.join(known)}"
        raise SystemExit(f"vaemem: VAEMEM_CUDA_ARCHS: {want}, got {' '.join(CUDA_ARCHS)!r}")
    print(f"vaemem: building GPU kernels for compute capability {' '.join(archs)} with {nvcc}", flush=True)
    return fatbins.compile_all(nvcc, archs, in_parallel)


class BuildPerFolder(build_ext):
    """build_ext that compiles each source once, with its folder's flags, and GPU kernels before what embeds them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.compiled = set()  # objects, which two extensions may share
        if not self.inplace and os.environ.get("VAEMEM_KERNELS") != "1":
            self.extensions = [ext for ext in self.extensions if ext.name != "vaemem._kernels"]

    def run(self) -> None:
        super().run()
        if self.inplace:
            return
        # What an earlier build left (CUDA, a module that has moved) would be packed too.
        wanted = {*self.get_outputs(), *self.get_finalized_command("build_py").get_outputs()}
        for left in glob.glob(os.path.join(self.build_lib, "vaemem", "**"), recursive=True):
            if os.path.isfile(left) and left not in wanted:
                os.remove(left)

    def get_ext_filename(self, fullname: str) -> str:
        if not CROSS:
            return super().get_ext_filename(fullname)
        *folders, name = fullname.split(".")  # with its folders or without
        return os.path.join(*folders, name + (".pyd" if "windows" in TARGET else ".abi3.so"))

    def build_by_zig(self, ext: Extension) -> None:
        """Compile all sources and link the library, by zig."""
        folders = [*ext.include_dirs, *(INCLUDES if CROSS else self.include_dirs)]
        given = [f"-D{name}={value}" for name, value in ext.define_macros] + [f"-isystem{folder}" for folder in folders]

        def compile_one(source: str) -> str:
            target = os.path.join(self.build_temp, source + ".o")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if self.is_new(target):
                subprocess.run([*ZIG, *flags_for(source), *given, "-c", source, "-o", target], check=True)
            return target

        objects = in_parallel(compile_one, ext.sources)
        made = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(made), exist_ok=True)
        link = next((arguments for system, arguments in LINK.items() if system in TARGET), [])
        subprocess.run(
            [*ZIG, "-shared", "-s", "-o", made, *objects, *link, *(f"-l{x}" for x in ext.libraries)], check=True
        )

    def is_new(self, target: str) -> bool:
        """Return whether this build has not compiled this object yet."""
        new = target not in self.compiled
        self.compiled.add(target)
        return new

    def build_extension(self, ext: Extension) -> None:
        if ext.name == "vaemem._cuda":
            self.force = True  # setuptools would not see that other machine code is to be embedded
            try:
                folder = compile_kernels(NVCC)
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"vaemem: {error} (VAEMEM_CUDA=0 builds without CUDA)") from None
            ext.define_macros.append(("VM_FATBINS", f'"{folder}"'))
        if TARGET:
            self.build_by_zig(ext)
            return

        compile_all, compile_one = self.compiler.compile, self.compiler._compile

        def with_folder_flags(job):
            obj, source, ext_, arguments, more, macros = job
            compile_one(obj, source, ext_, arguments, [*more, *flags_for(source)], macros)

        def compile_in_parallel(sources, **how):
            """What setuptools would compile one after the other, and with the same flags for all."""
            jobs = []
            self.compiler._compile = lambda *job: jobs.append(job) if self.is_new(job[0]) else None
            objects = compile_all(sources, **how)
            in_parallel(with_folder_flags, jobs)
            return objects

        self.compiler.compile = compile_in_parallel
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile, self.compiler._compile = compile_all, compile_one


headers = sorted(glob.glob("csrc/**/*.h", recursive=True) + glob.glob("kernels/**/*.h", recursive=True))
CUDA_ONLY, KERNELS_ONLY = "csrc/python/py_cuda.c", "csrc/python/py_kernels.c"
core = sorted(
    path for folder in FOLDERS for path in glob.glob(f"{folder}/*.c") if path not in (CUDA_ONLY, KERNELS_ONLY)
)
alone = [path for path in core if not path.startswith(("csrc/python/", "csrc/predict/"))]
ABI = [("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else []
extensions = [
    Extension(
        name,
        sources,
        include_dirs=INCLUDES,
        define_macros=[*ABI, *((macro, "1") for macro in (HAVE_SETS, EMULATOR and "VM_EMULATE_AMX") if macro)],
        py_limited_api=STABLE_ABI,
        depends=headers,
        libraries=["m", "pthread"],
        extra_link_args=[*SANITIZE, *HARDENED],
    )
    for name, sources in {
        "vaemem._core": core,
        "vaemem._kernels": [*alone, "csrc/python/py_values.c", KERNELS_ONLY],
    }.items()
]
LINUX = sys.platform == "linux" and (not TARGET or TARGET.startswith(f"{platform.machine()}-linux"))
if WANTS_CUDA not in ("0", "1", "auto"):
    raise SystemExit(f"vaemem: VAEMEM_CUDA: expected 0, 1 or auto, got {WANTS_CUDA!r}")
cuda = find_cuda() if LINUX and WANTS_CUDA != "0" else None
if cuda:
    NVCC, include = cuda
    extensions.append(
        Extension(
            "vaemem._cuda",
            [*sorted(glob.glob("kernels/cuda/*.c")), "kernels/cudnn/cudnn_api.c", "kernels/status.c", CUDA_ONLY],
            include_dirs=[include],
            define_macros=[*ABI],
            py_limited_api=STABLE_ABI,
            depends=headers + sorted(glob.glob("kernels/cuda/*.cu")),
            libraries=["m", "pthread", "dl"],
            extra_link_args=[*SANITIZE, *HARDENED],
        )
    )
elif WANTS_CUDA == "1":
    raise SystemExit("vaemem: VAEMEM_CUDA=1 needs Linux, nvcc and cuda.h: put them on the path or set CUDA_HOME")
elif WANTS_CUDA == "0":
    print("vaemem: building without CUDA (VAEMEM_CUDA=1 builds its GPU kernels, with nvcc)")
elif not LINUX:
    print("vaemem: building without CUDA, which is for Linux alone")
else:
    print("vaemem: building without CUDA: no nvcc with cuda.h (CUDA_HOME, else path, /usr/local/cuda, nvidia-* wheels)")

options = {"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {}
setup(ext_modules=extensions, cmdclass={"build_ext": BuildPerFolder}, options=options)
