"""The workspace of PyTorch's convolutions on a GPU, without the GPU.

PyTorch (eager, ``torch.backends.cudnn.benchmark`` off) gives each convolution a scratch buffer from its caching
allocator: as many bytes as the first plan of cuDNN's instant heuristics needs. Three sources give the number, in this
order:

1. PyTorch's own code, for the convolutions that cuDNN does not run (``own_bytes`` in csrc/predict/workspace/lookup.c).
2. a profile: cuDNN's answers, recorded beforehand for a GPU and a cuDNN version (``vaemem/data/profiles``). Rules for
   cuDNN before 9.8 take precedence over a profile (``profiles/rules.json``).
3. a rule for all other convolutions (``usual_rule`` there). docs/PREDICTION.md gives its error.

All three sources ship with the package, so a question has the same answer on every machine. Each answer names its
source, and `substitutions` lists the substitutes for missing data.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from vaemem import _core
from vaemem._common import MIB, choose
from vaemem._errors import ArgumentError
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.profiles import (
    Catalogue,
    Conv,
    Profile,
    card_of,
    card_rule,
    number_of,
    shipped_catalogue,
    version_number,
)
from vaemem.prediction.runtimes import DEFAULT_TORCH

# The cuDNN of PyTorch's wheels for Linux, by release and CUDA build: first PyPI's build (from its package metadata),
# then the builds of download.pytorch.org (the release branches' generate_binary_build_matrix.py, and before 2.4
# common/install_cuda.sh of pytorch/builder).
CUDNN_OF_TORCH = {
    "1.13": {"cu117": "8.5.0", "cu116": "8.3.2"},
    "2.0": {"cu117": "8.5.0", "cu118": "8.7.0"},
    "2.1": {"cu121": "8.9.2", "cu118": "8.7.0"},
    "2.2": {"cu121": "8.9.2", "cu118": "8.7.0"},
    "2.3": {"cu121": "8.9.2", "cu118": "8.7.0"},
    "2.4": {"cu121": "9.1.0", "cu118": "9.1.0", "cu124": "9.1.0"},
    "2.5": {"cu124": "9.1.0", "cu118": "9.1.0", "cu121": "9.1.0"},
    "2.6": {"cu124": "9.1.0", "cu118": "9.1.0", "cu126": "9.5.1"},
    "2.7": {"cu126": "9.5.1", "cu118": "9.1.0", "cu128": "9.7.1"},
    "2.8": {"cu128": "9.10.2", "cu126": "9.10.2", "cu129": "9.10.2"},
    "2.9": {"cu128": "9.10.2", "cu126": "9.10.2", "cu130": "9.13.0"},
    "2.10": {"cu128": "9.10.2", "cu126": "9.10.2", "cu130": "9.15.1"},
    "2.11": {"cu130": "9.19.0", "cu126": "9.10.2", "cu128": "9.19.0"},
    "2.12": {"cu130": "9.20.0", "cu126": "9.10.2"},
    "2.13": {"cu130": "9.20.0", "cu126": "9.10.2"},
    "2.14": {"cu130": "9.24.0", "cu126": "9.10.2"},
    "2.15": {"cu132": "9.26.0"},
}
# The least and the most compute capability that these builds have kernels for (TORCH_CUDA_ARCH_LIST in PyTorch's
# .ci/manywheel/build_cuda.sh, before 2.6 in pytorch/builder; pytorch/pytorch#144071 and #182250 show
# torch.cuda.get_arch_list() of some). Each major version between them has kernels, which also run on its later minor
# versions. No build has PTX for older cards: it has only 12.0's, which cannot run on earlier cards.
KERNELS = {
    **dict.fromkeys(("cu116", "cu117"), (70, 89)),
    **dict.fromkeys(("cu118", "cu121", "cu124", "cu126"), (70, 90)),
    **dict.fromkeys(("cu128", "cu129"), (70, 120)),
    **dict.fromkeys(("cu130", "cu132"), (75, 120)),
}
OLDEST_TORCH = 2, 4  # the oldest release with known operators. They stand for the older releases' operators.
SDPA_TORCH = 2, 0  # the first release with scaled_dot_product_attention
WITHOUT_VOLTA = {("2.7", "cu128"), ("2.11", "cu128")}  # pytorch/pytorch#157517 brought it back, #172352 ended it
# PyTorch allocates cuBLASLt's workspace in each call up to the first release. It keeps it up to the second release.
# Later releases use cuBLAS's workspace.
_LAST_EACH, _LAST_KEPT = (2, 8), (2, 11)


_match_version = functools.lru_cache(maxsize=256)(re.compile(r"(\d+\.\d+)(?:\.\d+)*(?:\+([a-z]+)([\w.]*))?").fullmatch)


def torch_build(version: str) -> tuple[str, str]:
    """Split ``"2.7.1+cu128"`` into release and CUDA build, ``("2.7", "cu128")``. ``"2.7.1"`` means PyPI's build.

    Raises
    ------
    ValueError
        It is not a version, its operators are not modelled, or it is not a CUDA build.
    """
    match = _match_torch(version)
    if match[2] not in (None, "cu"):
        why = "only cuDNN's workspaces are known"
        raise ArgumentError("torch_version", "a CUDA build such as '2.7.1+cu128'", repr(version), why)
    return match[1], f"cu{match[3]}" if match[2] else next(iter(CUDNN_OF_TORCH[match[1]]))


def _match_torch(version: str) -> re.Match[str]:
    """Match the release and its build; ValueError if the release's operators are not modelled."""
    match = _match_version(version) if isinstance(version, str) else None
    if not match or match[1] not in CUDNN_OF_TORCH:
        wanted = f"one of {', '.join(CUDNN_OF_TORCH)}, such as '2.7.1' or '2.7.1+cu128'"
        raise ArgumentError("torch_version", wanted, repr(version))
    return match


def torch_release(version: str) -> tuple[int, int]:
    """Return (2, 7) for ``"2.7.1+cu128"``; ValueError if the release's operators are not modelled."""
    major, minor = _match_torch(version)[1].split(".")
    return int(major), int(minor)


def torch_substitution(version: str) -> str:
    """Return the note on the release that stands for an older one; "" if its own operators are known."""
    release = torch_release(version)
    if release >= OLDEST_TORCH:
        return ""
    lacks = ", which has no scaled_dot_product_attention" if release < SDPA_TORCH else ""
    return f"PyTorch {'.'.join(map(str, OLDEST_TORCH))} for {version}{lacks}"


def cudnn_of_torch(version: str) -> str:
    """Return the cuDNN of a build of PyTorch; ValueError if it is unknown."""
    release, build = torch_build(version)
    known = CUDNN_OF_TORCH[release]
    if build not in known:
        builds = " or ".join(known)
        raise ArgumentError("torch_version", f"{release} built for {builds}, or a cudnn_version too", repr(version))
    return known[build]


def cudnn_attention(gpu: Gpu, torch_version: str, cudnn_version: str | None) -> int:
    """Return the number of cuDNN's version if PyTorch tries cuDNN's attention first, otherwise 0: from 2.10 on with
    cuDNN above 9.15.0, on compute capability 9.0 and 10.0 (check_prefer_cudnn_attention in sdp_utils.cpp).
    cudnn_version: by default the one that this PyTorch brings."""
    if gpu.maker != "NVIDIA" or gpu.sm not in (90, 100) or torch_release(torch_version) < (2, 10):
        return 0
    number = version_number(cudnn_version or cudnn_of_torch(torch_version))
    return number if number > 91500 else 0


def _has_kernels(gpu: Gpu, release: str, build: str) -> bool:
    least, most = KERNELS[build]
    return max(least, 75 if (release, build) in WITHOUT_VOLTA else 0) <= gpu.sm <= most


def torch_for(gpu: Gpu, version: str | None) -> str:
    """Return the version with its build: ``"2.7.1+cu126"`` for ``"2.7.1"``, which means PyPI's build everywhere. None
    means the default release's first build that runs on the card.

    Raises
    ------
    ValueError
        It is not a version, or its build has no kernels for the card. Unlisted builds may have any kernels.
    """
    if gpu.maker != "NVIDIA":
        release, of = (
            (DEFAULT_TORCH.partition("+")[0], None) if version is None else (version, _match_torch(version)[2])
        )
        if of == "cu":
            raise ArgumentError("torch_version", f"no CUDA build with {gpu.name}, such as '2.9.1'", repr(version))
        return release
    release, build = torch_build(DEFAULT_TORCH if version is None else version)
    builds = CUDNN_OF_TORCH[release]
    if build not in builds or _has_kernels(gpu, release, build):
        version = DEFAULT_TORCH if version is None else version
        return version if "+" in version else f"{version}+{build}"
    others = [other for other in builds if _has_kernels(gpu, release, other)]
    if version is None:
        return f"{DEFAULT_TORCH.partition('+')[0]}+{others[0]}"
    runs = [f"{r}+{b}" for r, known in CUDNN_OF_TORCH.items() for b in known if _has_kernels(gpu, r, b)]
    end = f"the first is {runs[0]}" if gpu.sm > KERNELS[build][1] else f"the last is {runs[-1]}"
    such = f"such as {release}+{others[0]} ({end})" if others else end
    wanted = f"a build with kernels for compute capability {gpu.capability} ({gpu.name}), {such}"
    raise ArgumentError("torch_version", wanted, f"{version!r}, which is built for {build}")


# Why PyTorch runs a convolution with its own code, by the core's vm_own_conv.
_OWN = (
    "",
    "im2col: no bfloat16 for cuDNN below compute capability 8.0 ({0.name} has {0.capability})",
    "im2col: no cuDNN for 3d convolutions in half precision in 2.9.0, nor later below cuDNN 9.15",
    "im2col: no cuDNN before 9.3 for more than 2^31 elements",
    "own kernels for depthwise convolutions",
    "im2col: torch.backends.cudnn.enabled is False",
)


# The libraries that run convolutions on other makers' cards.
LIBRARIES = {"AMD": "MIOpen", "Intel": "oneDNN", "Apple": "Metal"}
Convolutions = _core.Trace | _core.Script | _core.Workspace  # types that hold convolutions


class Workspace:
    """Workspaces of PyTorch's convolutions on one GPU.

    On a card without cuDNN, workspaces lie between none and im2col's. A library such as AMD's MIOpen has kernels that
    need no workspace, and may also unfold the input. The product of filters and columns then needs all columns at once,
    nine times the input of a 3x3 convolution. The choice depends on the library's version, its settings and its earlier
    measurements. The answer is no workspace, and `alternatives` has im2col's. If the library is off, PyTorch's own code
    unfolds each input, so the columns are certain.

    Parameters
    ----------
    gpu : str or Gpu
        A name for `find_gpu`, or its result.
    cudnn_version : str, optional
        Such as ``"9.10.2"``. By default the version that `torch_version` brings, or the newest version with a recorded
        profile. The version is None on a card without cuDNN.
    torch_version : str, optional
        Such as ``"2.9.1"``; chooses cuDNN's version if that is not given.
    tf32 : bool
        ``torch.backends.cudnn.allow_tf32``, on by default in PyTorch.
    catalogue : Catalogue, optional
        The recorded data; by default everything that ships.
    enabled : bool
        ``torch.backends.cudnn.enabled``, which also turns MIOpen off.

    Attributes
    ----------
    substitutions : dict
        The keys name the substitutes for missing data of the cuDNN and the GPU, in the answers so far.
    by_pytorch : set of Conv
        The convolutions so far that PyTorch runs with its own code, which has no plan that takes less.

    Raises
    ------
    ValueError
        Unknown GPU, cuDNN or PyTorch version, or a version of cuDNN for a card that does not run it.

    Examples
    --------
    >>> Workspace("RTX 4090", "9.10.2").conv("float16", 1, 128, 512, 512, 128, 3)[0]
    134512656
    """

    def __init__(
        self,
        gpu: str | Gpu,
        cudnn_version: str | None = None,
        torch_version: str | None = None,
        tf32: bool = True,
        catalogue: Catalogue | None = None,
        enabled: bool = True,
    ):
        self.gpu = find_gpu(gpu)
        self._library = LIBRARIES.get(self.gpu.maker)  # if it is not cuDNN
        self._has_range = bool(self._library and enabled)
        if self._library:
            if cudnn_version is not None:
                wanted = f"None with {self.gpu.name}, on which no cuDNN runs"
                raise ArgumentError("cudnn_version", wanted, repr(cudnn_version))
            torch_version = None
        shipped = None  # with this PyTorch
        if torch_version and (cudnn_version is None or self.gpu.coarse):
            shipped = cudnn_of_torch(torch_version)
        self.cudnn_version = shipped if cudnn_version is None else cudnn_version
        self.tf32, self._catalogue = tf32, catalogue or shipped_catalogue()
        self._rules = [*self.gpu.rules, *self._catalogue.rules]  # as the core numbers them
        major, minor = torch_release(torch_version) if torch_version else (0, 0)
        is_290 = bool(torch_version and torch_version.startswith("2.9.0"))
        self._core = _core.Workspace(
            self._catalogue.core, card_of(self.gpu), tuple(map(card_rule, self.gpu.rules)), bool(self.gpu.coarse),
            number_of(self.cudnn_version), number_of(shipped), 100 * major + minor, is_290, not enabled,
            tf32, "least" if self._library else "rule",
        )  # fmt: skip
        self._described: list[tuple[str, str]] = []  # the core's sources

    @property
    def substitutions(self) -> dict[str, None]:  # documented above
        coarse = self.gpu.coarse + ", workspaces lie between none and those of im2col" * self._has_range
        return dict.fromkeys(filter(None, (coarse, *(what for _, what in self._sources()))))

    @property
    def by_pytorch(self) -> set[Conv]:  # documented above
        return {Conv(*question) for question in self._core.known(True)}

    @property
    def has_plan_without(self) -> bool:
        """Whether this cuDNN is known to have a plan without workspace for each convolution. PyTorch uses it if it
        cannot get the first plan's workspace. All versions that can be asked have one (docs/PREDICTION.md)."""
        return self.cudnn_version is None or version_number(self.cudnn_version) >= _ASKABLE

    @property
    def between(self) -> str:
        """The upper end of the range of answers on a card without cuDNN, in words; "" if there is no such range."""
        if not self._has_range:
            return ""
        known = "AMD" == self.gpu.maker  # published requests show its behaviour
        why = f"which {self._library} may or may not use" if known else f"because {self._library}'s are unknown"
        return f"with im2col's workspaces, {why}"

    def conv(self, *question: Any, **more: Any) -> tuple[int, str]:
        """Return the workspace of one convolution.

        Parameters
        ----------
        *question, **more
            The fields of a `Conv`.

        Returns
        -------
        bytes : int
            Bytes that PyTorch allocates for the call besides its output.
        source : str
            The source of the number.

        Raises
        ------
        ValueError
            A bad argument.
        """
        conv = Conv(*question, **more)
        choose("layout", conv.layout, ("nchw", "nhwc"))
        try:
            count, source = self._core.conv(conv)
        except TypeError:
            raise ArgumentError("conv", "whole numbers", str(conv)) from None
        return count, self._sources()[source][0]

    def answers(self, of: Convolutions) -> tuple[list[int], list[int], list[str]]:
        """Return for each convolution of a trace or a process: its bytes, the next plan's bytes (used if the first
        cannot be allocated), and the source."""
        counts, following, sources = self._core.answers(of)
        described = self._sources()
        return counts, following, [described[source][0] for source in sources]

    def alternatives(self, every: bool = False, of: Convolutions | None = None) -> list[tuple[int, ...]]:
        """Return every other plausible set of workspaces: bytes of each convolution of a trace or a process, by default
        of all convolutions so far, in that order. Empty if nothing was substituted.

        csrc/predict/workspace/plausible.h defines these sets. Each set appears once, and this workspace's own set does
        not appear. `every`: for a process with an unknown cuDNN.
        """
        return self._core.rows(every, self._core if of is None else of)

    def _sources(self) -> list[tuple[str, str]]:
        """Return the name of each of the lookup's sources, and the substitution that it makes, if any."""
        self._described += [self._describe(*one) for one in self._core.sources(len(self._described))]
        return self._described

    def _describe(
        self, own: int, rule: int, recorded: int, steps: int, number: int, why: str | None, form: int
    ) -> tuple[str, str]:  # fmt: skip
        if own:
            return f"PyTorch's {_OWN[own].format(self.gpu)}", ""
        if why is not None and self._library:
            return f"none, because {self._library} may need none", ""
        if why is not None:
            return f"rule: {why}; uncertain (no profile has this convolution)", _RULED[form]
        profile = self._catalogue.profile(recorded) if recorded >= 0 else None
        source = profile.source(steps, number) if profile else "rule"
        if rule < 0 and profile:
            return source + self._wanted(profile.version), self._differs(profile)
        said = self._rules[rule]
        what = said["name"] + (f", in cuDNN before {said['before']}" if "before" in said else "")
        if said["standing"] == "measured":
            return f"measured: {what}; from {said['from']}", ""
        return f"{source}: {what}; from {said['from']}", f"a rule for {what}"

    def _differs(self, profile: Profile) -> str:
        """Say how a profile differs from the request; "" if it does not."""
        parts = []
        if self._wanted(profile.version):
            parts.append(f"cuDNN {profile.version} for {self.cudnn_version}")
        if profile.how == "inferred":
            parts.append(f"cuDNN {profile.version} as inferred from measurements")
        cards = profile.cards
        if cards and self.gpu.key not in cards:
            parts.append(f"a profile of {find_gpu(cards[0]).name}")
        return ", ".join(parts)

    def _wanted(self, version: str | None) -> str:
        """Return the note to add to a source of another version."""
        wanted = self.cudnn_version
        same = wanted is None or version is None or version_number(wanted) == version_number(version)
        return "" if same else f" ({wanted} was wanted)"


_ASKABLE = version_number("9.8.0")  # the first that answers without a device
_RULED = (  # the case behind a guess, by the core's vm_conv_form
    "a rule for convolutions without recorded answers of cuDNN",
    "a rule for channels_last convolutions without recorded answers of cuDNN",
    "a rule for convolutions that are not square, 2d and whole, without recorded answers of cuDNN",
)


def blas_settings(gpu: Gpu, torch_version: str) -> dict[str, Any]:
    """Return the bytes of cuBLAS's and cuBLASLt's workspaces, and how PyTorch keeps the latter (CublasHandlePool.cpp,
    CUDABlas.cpp)."""
    release = torch_release(torch_version)
    use = "each" if release <= _LAST_EACH else "kept" if release <= _LAST_KEPT else "shared"
    cublas = 32 * MIB if gpu.sm == 90 else 2 * 4 * MIB + 8 * 16 * 1024
    return {"cublas_bytes": cublas, "cublaslt_bytes": MIB, "cublaslt_use": use}


def answers_of(workspace: Any, of: _core.Trace | _core.Script) -> tuple[list[int], list[int], list[str]]:
    """Return `Workspace.answers`. If a workspace has only `conv`, build the same from its answers."""
    if hasattr(workspace, "answers"):
        answers: tuple[list[int], list[int], list[str]] = workspace.answers(of)
        return answers
    said = [workspace.conv(*question) for question in of.convs]
    return [count for count, _ in said], [0] * len(said), [source for _, source in said]
