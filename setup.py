"""Builds vaemem._core (the C11 core, each kernels folder with its own instruction-set flags) and vaemem._cuda, if
VAEMEM_CUDA asks for it. Tests and benchmarks have vaemem._kernels too, which is built in place and where it is asked
for.

Everything else about the package stands in pyproject.toml. Environment:
  VAEMEM_WERROR=1    warnings are errors (CI)
  VAEMEM_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer
  VAEMEM_KERNELS=1   vaemem._kernels is built where it would not be (make test)
  VAEMEM_CUDA=1      builds vaemem._cuda (its GPU kernels take minutes); auto: builds it if there is nvcc
  VAEMEM_CUDA_ARCHS  the GPUs that get machine code, such as "80 90", instead of all
  VAEMEM_FATBINS     a folder with machine code that was compiled before, used if it is of these sources
  VAEMEM_EMULATE_AMX tests/emulator, on which AMX's products run where there is AVX2 alone, slowly (tests)
  CUDA_HOME          the toolkit, where nvcc is not on the path
  VAEMEM_WINDOWS     the folder of a Windows Python with NumPy, for which Linux builds vaemem._core (make windows)

For Windows zig's clang compiles, since MSVC has no vector extension. On Windows pip installs zig for the build
(pyproject.toml); that has not been tried.
"""

import glob
import os
import platform
import shutil
import subprocess
import sys
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
# The folder of the Windows Python that is built for; empty when not building for Windows.
WINDOWS = os.environ.get("VAEMEM_WINDOWS") or (sys.base_prefix if sys.platform == "win32" else "")
SETS, HAVE_SETS = X86 if WINDOWS else MACHINES.get(platform.machine().lower(), ([], None))
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
NUMPY = numpy.get_include()
if WINDOWS and sys.platform != "win32":
    NUMPY = os.path.join(WINDOWS, "Lib", "site-packages", "numpy", "_core", "include")
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
FOLDERS = ["csrc", "csrc/predict", "csrc/python", "kernels", "kernels/ref"]
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
        *folders, name = fullname.split(".")  # with its folders or without
        if WINDOWS and sys.platform != "win32":
            return os.path.join(*folders, name + ".pyd")
        return super().get_ext_filename(fullname)

    def build_for_windows(self, ext: Extension) -> None:
        """All sources by zig, and the library of them."""
        include = os.path.join(WINDOWS, "include")
        given = [f"-D{name}={value}" for name, value in ext.define_macros] + [f"-I{f}" for f in (include, NUMPY)]

        def compile_one(source: str) -> str:
            target = os.path.join(self.build_temp, source + ".o")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not self.is_new(target):
                return target
            subprocess.run([*ZIG, *flags_for(source), *given, "-c", source, "-o", target], check=True)
            return target

        objects = in_parallel(compile_one, ext.sources)
        made = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(made), exist_ok=True)
        # python311.lib, not the python3.lib of the stable interface, nor that of a debug or free-threaded build
        libraries = glob.glob(os.path.join(glob.escape(os.path.join(WINDOWS, "libs")), "python3*.lib"))
        (python,) = [path for path in libraries if os.path.basename(path)[7:-4].isdecimal()]
        subprocess.run([*ZIG, "-shared", "-o", made, *objects, python, "-lpthread"], check=True)

    def is_new(self, target: str) -> bool:
        """Whether an object is asked for the first time."""
        new = target not in self.compiled
        self.compiled.add(target)
        return new

    def build_extension(self, ext: Extension) -> None:
        if WINDOWS:
            self.build_for_windows(ext)
            return
        if ext.name == "vaemem._cuda":
            self.force = True  # setuptools would not see that other machine code is to be embedded
            try:
                folder = compile_kernels(NVCC)
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"vaemem: {error} (VAEMEM_CUDA=0 builds without CUDA)") from None
            ext.define_macros.append(("VM_FATBINS", f'"{folder}"'))

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
alone = [path for path in core if os.path.dirname(path) not in ("csrc/python", "csrc/predict")]
extensions = [
    Extension(
        name,
        sources,
        include_dirs=[NUMPY],
        define_macros=[(macro, "1") for macro in (HAVE_SETS, EMULATOR and "VM_EMULATE_AMX") if macro],
        depends=headers,
        libraries=["m", "pthread"],
        extra_link_args=SANITIZE,
    )
    for name, sources in {
        "vaemem._core": core,
        "vaemem._kernels": [*alone, "csrc/python/py_values.c", KERNELS_ONLY],
    }.items()
]
LINUX = sys.platform == "linux" and not WINDOWS
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
            depends=headers + sorted(glob.glob("kernels/cuda/*.cu")),
            libraries=["m", "pthread", "dl"],
            extra_link_args=SANITIZE,
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

setup(ext_modules=extensions, cmdclass={"build_ext": BuildPerFolder})
