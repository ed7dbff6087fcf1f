"""Builds vaemem._core: the C11 core, and each kernels folder with its own instruction-set flags.

Everything else about the package stands in pyproject.toml. Environment:
  VAEMEM_WERROR=1    warnings are errors (CI)
  VAEMEM_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer
"""

import glob
import os
import platform

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

X86 = platform.machine().lower() in ("x86_64", "amd64")
# -ffp-contract: a*b + c may be one rounding where the instruction set has it; every kernel's tolerance allows for it.
COMMON = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-fvisibility=hidden"]
KERNELS = [*COMMON, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = {
    "csrc": COMMON,
    "kernels": KERNELS,
    "kernels/ref": KERNELS,
    "kernels/avx2": [*KERNELS, "-mavx2", "-mfma"],
    "kernels/avx512": [
        *KERNELS,
        *(f"-mavx512{x}" for x in ("f", "vl", "bw", "dq")),
        "-mfma",
        "-mprefer-vector-width=512",
    ],
}
FOLDERS = ["csrc", "csrc/predict", "csrc/python", "kernels", "kernels/ref"]
FOLDERS += ["kernels/avx2", "kernels/avx512"] if X86 else []


def flags_for(source: str) -> list[str]:
    """Flags of the nearest folder that has its own."""
    folder = os.path.dirname(source)
    while folder not in FLAGS:
        folder = os.path.dirname(folder)
    flags = list(FLAGS[folder])
    if os.environ.get("VAEMEM_WERROR") == "1":
        flags.append("-Werror")
    if os.environ.get("VAEMEM_SANITIZE") == "1":
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    return flags


class BuildPerFolder(build_ext):
    """build_ext that compiles every source with its folder's flags."""

    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler._compile

        def with_folder_flags(obj, src, ext_, cc_args, extra_postargs, pp_opts):
            compile_one(obj, src, ext_, cc_args, list(extra_postargs) + flags_for(src), pp_opts)

        self.compiler._compile = with_folder_flags
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


sources = sorted(path for folder in FOLDERS for path in glob.glob(f"{folder}/*.c"))
sanitize = ["-fsanitize=address,undefined"] if os.environ.get("VAEMEM_SANITIZE") == "1" else []
setup(
    ext_modules=[
        Extension(
            "vaemem._core",
            sources,
            include_dirs=[numpy.get_include()],
            define_macros=[("VM_HAVE_X86", "1")] if X86 else [],
            depends=sorted(glob.glob("csrc/**/*.h", recursive=True) + glob.glob("kernels/**/*.h", recursive=True)),
            libraries=["m", "pthread", "dl"],
            extra_link_args=sanitize,
        ),
        # Not a Python module: what cuDNN finds in place of libcuda where there is no driver (csrc/no_driver).
        Extension("vaemem._no_driver", ["csrc/no_driver/libcuda.c"], extra_link_args=["-Wl,-soname,libcuda.so.1"]),
    ],
    cmdclass={"build_ext": BuildPerFolder},
)
