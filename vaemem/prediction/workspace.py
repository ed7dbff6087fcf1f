"""The workspace of PyTorch's convolutions on a GPU that need not be there.

PyTorch (eager, ``torch.backends.cudnn.benchmark`` off) gives each convolution a scratch buffer from its caching
allocator: as many bytes as the first plan of cuDNN's instant heuristics asks for. Three sources know how many, in this
order:

1. a profile: cuDNN's answers, recorded beforehand for a GPU and a cuDNN version (``vaemem/data/profiles``), below 9.8
   with what is known of older versions before it (``older.json``);
2. the installed cuDNN, asked without a device (9.8 or later), in a process of its own because it may crash;
3. a rule, with what is known of its error.

Every answer says which it was, and whatever stands in for what was asked is among the `substitutions`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vaemem._common import DTYPES, ELEMENT_BYTES, choose
from vaemem.prediction.cudnn import InstalledCudnn, installed_cudnn
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.profiles import (
    Conv,
    Profile,
    applies,
    formula_bytes,
    kind_of,
    nearest_profile,
    older_rules,
    profiles_near,
    relatives,
    rule_answer,
    sizes,
    version_number,
)
from vaemem.prediction.runtimes import DEFAULT_TORCH

# The cuDNN that PyTorch's wheels for Linux bring, by release and CUDA build: first the build that PyPI has (its package
# metadata), then those of download.pytorch.org (the release branches' generate_binary_build_matrix.py).
CUDNN_OF_TORCH = {
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
# .ci/manywheel/build_cuda.sh, before 2.6 in pytorch/builder; what torch.cuda.get_arch_list() says of some is in
# pytorch/pytorch#144071 and #182250). Between them there are kernels for each major version, which run on its later
# minor ones. No build has PTX for older ones: 12.0's alone is there, which is of no use to cards before it.
KERNELS = {
    **dict.fromkeys(("cu118", "cu121", "cu124", "cu126"), (70, 90)),
    **dict.fromkeys(("cu128", "cu129"), (70, 120)),
    **dict.fromkeys(("cu130", "cu132"), (75, 120)),
}
WITHOUT_VOLTA = {("2.7", "cu128"), ("2.11", "cu128")}  # pytorch/pytorch#157517 brought it back, #172352 ended it


def torch_build(version: str) -> tuple[str, str]:
    """Release and CUDA build, ``("2.7", "cu128")``, of ``"2.7.1+cu128"``; of ``"2.7.1"``, PyPI's build.

    Raises
    ------
    ValueError
        Where it is no version, one whose operators are not modelled, or no CUDA build.
    """
    match = re.fullmatch(r"(\d+\.\d+)(?:\.\d+)*(?:\+([a-z]+)([\w.]*))?", version) if isinstance(version, str) else None
    if not match or match[1] not in CUDNN_OF_TORCH:
        raise ValueError(
            f"torch_version: want one of {', '.join(CUDNN_OF_TORCH)}, such as '2.7.1' or '2.7.1+cu128', got {version!r}"
        )
    if match[2] not in (None, "cu"):
        raise ValueError(
            f"torch_version: want a CUDA build such as '2.7.1+cu128', got {version!r}: only cuDNN's workspaces are"
            " known"
        )
    return match[1], f"cu{match[3]}" if match[2] else next(iter(CUDNN_OF_TORCH[match[1]]))


def torch_release(version: str) -> tuple[int, int]:
    """(2, 7) of ``"2.7.1+cu128"``; ValueError where `torch_build` raises it."""
    major, minor = torch_build(version)[0].split(".")
    return int(major), int(minor)


def cudnn_of_torch(version: str) -> str:
    """The cuDNN of a build of PyTorch; ValueError where it is not known."""
    release, build = torch_build(version)
    known = CUDNN_OF_TORCH[release]
    if build not in known:
        builds = " or ".join(known)
        raise ValueError(f"torch_version: want {release} built for {builds}, or a cudnn_version too, got {version!r}")
    return known[build]


def _has_kernels(gpu: Gpu, release: str, build: str) -> bool:
    least, most = KERNELS[build]
    return max(least, 75 if (release, build) in WITHOUT_VOLTA else 0) <= gpu.sm <= most


def torch_for(gpu: Gpu, version: str | None) -> str:
    """A version that was given, or the usual release's first build that runs on the card.

    Raises
    ------
    ValueError
        It is no version, or its build has no kernels for the card. Builds that are not listed may have any.
    """
    release, build = torch_build(DEFAULT_TORCH if version is None else version)
    builds = CUDNN_OF_TORCH[release]
    if build not in builds or _has_kernels(gpu, release, build):
        return DEFAULT_TORCH if version is None else version
    others = [other for other in builds if _has_kernels(gpu, release, other)]
    if version is None:
        return f"{DEFAULT_TORCH.partition('+')[0]}+{others[0]}"
    runs = [f"{r}+{b}" for r, known in CUDNN_OF_TORCH.items() for b in known if _has_kernels(gpu, r, b)]
    end = f"the first is {runs[0]}" if gpu.sm > KERNELS[build][1] else f"the last is {runs[-1]}"
    such = f"such as {release}+{others[0]} ({end})" if others else end
    raise ValueError(
        f"torch_version: want a build with kernels for compute capability {gpu.capability} ({gpu.name}), {such},"
        f" got {version!r}, which is built for {build}"
    )


def not_cudnn(gpu: Gpu, cudnn_version: str | None, torch_version: str | None, conv: Conv) -> str:
    """Why PyTorch runs a convolution by code of its own; "" where cuDNN does.

    After `use_cudnn`, `needs_64bit_indexing_no_split`, `use_cudnn_depthwise` and, of those for cuDNN 8.2 and later,
    `check_cudnn_depthwise_workload_with_filter` in Convolution.cpp.
    """
    if conv.dtype == "bfloat16" and gpu.sm < 80:
        return f"im2col: no bfloat16 for cuDNN below compute capability 8.0 ({gpu.name} has {gpu.capability})"
    if conv.depth and conv.layout == "nchw" and conv.dtype != "float32" and max(conv.along(conv.r)) > 1:
        avoided = cudnn_version is not None and 90800 <= version_number(cudnn_version) < 91500
        if torch_version and torch_release(torch_version) >= _CONV3D_AVOIDED:
            if avoided or torch_version.startswith("2.9.0"):
                return "im2col: no cuDNN for 3d convolutions in half precision in 2.9.0, nor later below cuDNN 9.15"
    if cudnn_version is not None and version_number(cudnn_version) < 90300 and _items(conv) >= 1 << 31:
        return "im2col: no cuDNN before 9.3 for more than 2^31 elements"
    if is_depthwise(conv) and conv.layout == "nchw" and _items(conv) < 1 << 31 and not _cudnn_depthwise(conv):
        return "own kernels for depthwise convolutions"
    return ""


def _items(conv: Conv) -> int:
    """Elements of the larger of input and output, for each item of the batch."""
    return max(conv.elements[:2]) // conv.n


# PyTorch's first release that keeps 3d convolutions in half precision from cuDNN: 2.9.0 from every one, later ones from
# 9.8 to 9.14 (use_cudnn in Convolution.cpp; pytorch/pytorch#166643).
_CONV3D_AVOIDED = (2, 9)


def is_depthwise(conv: Conv) -> bool:
    """Whether PyTorch takes it for one: a group for each channel of the input."""
    return conv.output_padding is None and conv.c == conv.groups > 1 and conv.k % conv.c == 0


def _cudnn_depthwise(conv: Conv) -> bool:
    """Whether cuDNN is thought to be faster than PyTorch's own kernel, NCHW."""
    vertical, stride = (conv.along(conv.stride) * 2)[:2]
    if conv.dtype != "float16" or conv.depth or conv.c < 32 or max(conv.along(conv.dilation)) > 1:
        return False
    if vertical != stride and conv.h != 1:
        return False
    if conv.h == 1 and stride == 1:
        return True
    r, s = conv.along(conv.r)
    if r != s or r not in (1, 3, 5) or conv.w < 7 or stride > 2:
        return False
    if stride == 1:
        return True
    if conv.n == 1:
        return r > 1 or conv.w <= 28
    if r == 1:
        return conv.n <= 16 and conv.c >= 128 and conv.w <= 7
    return conv.c >= 512 or (conv.c >= 256 and conv.w >= 28)


class Workspace:
    """Workspaces of PyTorch's convolutions on one GPU.

    Parameters
    ----------
    gpu : str or Gpu
        A name for `find_gpu`, or its result.
    cudnn_version : str, optional
        Such as ``"9.10.2"``. By default the one that `torch_version` brings, else the newest that a profile was
        recorded with.
    torch_version : str, optional
        Such as ``"2.9.1"``; chooses cuDNN's version where that is not given.
    tf32 : bool
        ``torch.backends.cudnn.allow_tf32``, on by default in PyTorch.
    cudnn : InstalledCudnn, optional
        Who is asked where no profile answers; the installed one by default.

    Attributes
    ----------
    substitutions : dict
        Its keys say what stood in for the cuDNN and the GPU that were asked for, in the answers so far.
    by_pytorch : set of Conv
        The convolutions so far that PyTorch runs by code of its own, which has no plan that takes less.

    Raises
    ------
    ValueError
        Unknown GPU, cuDNN or PyTorch version.

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
        cudnn: InstalledCudnn | None = None,
    ):
        self.gpu = find_gpu(gpu)
        if cudnn_version is None and torch_version is not None:
            cudnn_version = cudnn_of_torch(torch_version)
        self.cudnn_version, self._torch_version = cudnn_version, torch_version
        self.tf32 = tf32
        self._cudnn = cudnn or installed_cudnn()
        self._profile: Profile | None = nearest_profile(self.gpu, cudnn_version)
        self._rules = older_rules(self.gpu, cudnn_version, "taken") if cudnn_version else []
        self._guess: Callable[[Gpu, int, bool, Conv], tuple[int, str]] = _rule
        self._prefer_installed: bool | None = None
        self._known: dict[Conv, tuple[int, str]] = {}
        self._plans: dict[Conv, dict[str, Any] | None] = {}  # of the installed cuDNN, for the alternatives too
        self.substitutions: dict[str, None] = {}
        self.by_pytorch: set[Conv] = set()

    @property
    def has_plan_without(self) -> bool:
        """Whether this cuDNN is known to have a plan without workspace for each convolution, which PyTorch comes to
        where it cannot have the first one's. Those that can be asked have one (docs/PREDICTION.md)."""
        return self.cudnn_version is None or version_number(self.cudnn_version) >= _ASKABLE

    def conv(self, *question: Any, **more: Any) -> tuple[int, str]:
        """Workspace of one convolution.

        Parameters
        ----------
        *question, **more
            The fields of a `Conv`.

        Returns
        -------
        bytes : int
            What PyTorch allocates for the call besides its output.
        source : str
            Who says so.

        Raises
        ------
        ValueError
            A bad argument, or a convolution that cuDNN has no engine for (PyTorch would raise).
        """
        conv = Conv(*question, **more)
        answer = self._known.get(conv)
        if answer is None:
            answer = self._known[conv] = self._look_up(conv)
        return answer

    def alternatives(self, every: bool = False) -> list[Any]:
        """Other workspaces that may be the true ones: none where nothing was substituted.

        These are the `relatives`, and what takes the most that any of them says of each convolution, because an unknown
        version may answer now as one and now as another; below 9.8 also the inferred profiles and the possible rules of
        ``older.json``; and where a rule had to guess, the least and the most that there can be. Where an inferred
        profile answers, only the nearest version that was asked is tried. There is one workspace for each set of
        answers to the questions so far, and none for this one's. `every`: for a process whose cuDNN is not known.
        """
        others: list[Any] = []
        if every or set(self.substitutions).difference(_RULED.values()):
            version = None if every else self.cudnn_version
            near = profiles_near(self.gpu, version)
            asked = [profile for profile in near if profile.how != "inferred"]
            if not every and self._profile is not None and self._profile.how == "inferred":
                others += map(self._with, self._best_informed(asked)[:1])
            else:
                others += map(self._with, self._best_informed(relatives(self.gpu, version)))
                others.append(_Most(others[:]))
                if possible := older_rules(self.gpu, version, "possible"):
                    others += [self._with(profile) for profile in near if profile.how == "inferred"]
                    others.append(self._with(min(asked, key=lambda p: version_number(p.version)), possible))
        if not set(_RULED.values()).isdisjoint(self.substitutions):
            others += [self._with(self._profile, self._rules, guess) for guess in (_least, _most)]
        found: dict[tuple[int, ...], Any] = {}
        for other in [self, *others]:
            with contextlib.suppress(ValueError):  # it has no engine for one of them: PyTorch would not run
                found.setdefault(tuple(other.conv(*question)[0] for question in self._known), other)
        return list(found.values())[1:]

    def _best_informed(self, profiles: Sequence[Profile]) -> list[Profile]:
        """Those of the profiles that answer most of the questions so far: not every file holds every kind."""
        counts = [sum(bool(profile.conv(conv, self.tf32)) for conv in self._known) for profile in profiles]
        return [profile for profile, count in zip(profiles, counts, strict=True) if count == max(counts)]

    def _with(self, profile: Profile | None, rules: Iterable[dict[str, Any]] = (), guess: Any = None) -> Workspace:
        """The same with other answers, whatever version was wanted."""
        other = copy.copy(self)
        other._profile, other._rules, other._guess = profile, list(rules), guess or self._guess
        other._prefer_installed, other._known, other.substitutions = False, {}, {}
        return other

    def _look_up(self, conv: Conv) -> tuple[int, str]:
        _check(conv)
        why = not_cudnn(self.gpu, self.cudnn_version, self._torch_version, conv)
        if why:
            self.by_pytorch.add(conv)
            return _by_pytorch(conv), f"PyTorch's {why}"
        if not self._ask_first():
            for rule in self._rules:
                if kind_of(conv, self.tf32) == conv.dtype and applies(rule, conv):
                    what = f"{rule['name']}, in cuDNN before {rule['before']}"
                    if found := rule_answer(rule, self.gpu, conv):
                        self._substitute(f"a rule for {what}")
                        return found[0], f"{found[1]}: {what}; from {rule['from']}"
            for profile in self._near():
                if found := profile.conv(conv, self.tf32):
                    self._substitute(self._differs(profile))
                    return found[0], found[1] + self._wanted(profile.version)
        question = conv._asdict()
        question.update(nhwc=question.pop("layout") == "nhwc", tf32=self.tf32)
        try:
            if conv not in self._plans:
                self._plans[conv] = self._cudnn.conv(self.gpu.device_json, **question)
            plan = self._plans[conv]
        except RuntimeError as error:
            wanted = self.cudnn_version or (self._profile and self._profile.version)
            count, why = self._guess(self.gpu, version_number(wanted) if wanted else 0, self.tf32, conv)
            self._substitute(_RULED[conv.layout if conv.is_plain else "other"])
            return count, f"rule: {why}; uncertain (no profile has this convolution; {error})"
        version = self._cudnn.version
        if plan is None:
            raise ValueError(f"conv: cuDNN {version} has no engine for {conv} on {self.gpu.name}; PyTorch would raise")
        wanted = self._wanted(version)
        if wanted:
            self._substitute(f"cuDNN {version} for {self.cudnn_version}")
        unsure = ", after engines that compile at run time and could not be tried" if plan["untried"] else ""
        return plan["bytes"], f"cuDNN {version}, asked without a device{unsure}{wanted}"

    def _near(self) -> Iterator[Profile]:
        """The profile that answers first, then those of the nearest versions: not every file holds every kind."""
        if self._profile is not None:
            yield self._profile
            for profile in profiles_near(self.gpu, self.cudnn_version):
                if profile.how != "inferred":
                    yield profile

    def _substitute(self, what: str) -> None:
        if what:
            self.substitutions[what] = None

    def _differs(self, profile: Profile) -> str:
        """What of a profile is not what was asked for; "" where nothing is."""
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
        """What to add to a source that is not the version that was asked for."""
        wanted = self.cudnn_version
        same = wanted is None or version is None or version_number(wanted) == version_number(version)
        return "" if same else f" ({wanted} was wanted)"

    def _ask_first(self) -> bool:
        """Whether the installed cuDNN is the version wanted and the profile is another's, or another card's."""
        if self._prefer_installed is None:
            wanted = version_number(self.cudnn_version) if self.cudnn_version else 0
            is_other = self._profile is not None and self._differs(self._profile) != ""
            installed = self._cudnn.version if is_other and wanted >= _ASKABLE else None
            self._prefer_installed = installed is not None and version_number(installed) == wanted
        return self._prefer_installed


class _Most:
    """For each convolution the most that any of some workspaces says."""

    def __init__(self, workspaces: Sequence[Workspace]):
        self._workspaces, self.by_pytorch = workspaces, workspaces[0].by_pytorch

    def conv(self, *question: Any, **more: Any) -> tuple[int, str]:
        return max(workspace.conv(*question, **more) for workspace in self._workspaces)


_ASKABLE = version_number("9.8.0")  # the first that answers without a device
_RULED = {
    "nchw": "a rule for convolutions that no cuDNN was asked about",
    "nhwc": "a rule for channels_last convolutions that no cuDNN was asked about",
    "other": "a rule for convolutions that are not square, 2d and whole, and that no cuDNN was asked about",
}


@functools.lru_cache(maxsize=4096)
def _check(conv: Conv) -> None:
    choose("dtype", conv.dtype, DTYPES)
    if conv.layout not in ("nchw", "nhwc"):
        raise ValueError(f"layout: want 'nchw' or 'nhwc', got {conv.layout!r}")
    dims, extents = len(conv.size), (conv.r, conv.stride, conv.padding, conv.dilation, conv.output_padding or 0)
    if any(len(conv.along(extent)) != dims for extent in extents):
        raise ValueError(f"conv: want an int or {dims} of them for each extent, got {conv}")
    least = (conv.n, conv.c, conv.k, conv.groups, *conv.size, *map(min, map(conv.along, extents[:2])))
    if min(least) < 1 or min(conv.along(conv.dilation)) < 1 or min(map(min, map(conv.along, extents))) < 0:
        raise ValueError(f"conv: want sizes and a stride of 1 or more and no negative padding, got {conv}")
    if conv.c % conv.groups or conv.k % conv.groups:
        raise ValueError(f"conv: want channels that fall into {conv.groups} groups, got {conv}")
    if min(conv.out) < 1:
        filters, sides = ("x".join(map(str, conv.along(extent))) for extent in (conv.r, conv.size))
        raise ValueError(
            f"conv: want a {filters} filter within the padded input, got {sides} and padding {conv.padding}"
        )


def _by_pytorch(conv: Conv) -> int:
    """What PyTorch's own convolutions take besides their output.

    Depthwise ones nothing (DepthwiseConv2d.cu, DepthwiseConv3d.cu). The others unfold the input into columns, one batch
    item at a time, none for a plain 1x1 in two dimensions (ConvolutionMM2d.cu; NaiveDilatedConvolution.cu with dilation
    or depth; NaiveConvolutionTranspose2d.cu and 3d), and one group after the other: each has its part of the input and
    of the filter copied, and all outputs are there before they are put together (_convolution in Convolution.cpp).
    """
    if is_depthwise(conv):
        return 0
    size, groups = ELEMENT_BYTES[conv.dtype], conv.groups
    i, o, f = (count * size for count in conv.elements)
    channels, pixels = (conv.c, conv.out) if conv.output_padding is None else (conv.k, conv.size)
    columns = channels // groups * math.prod(conv.along(conv.r)) * math.prod(pixels) * size
    if conv.is_plain and (conv.r, conv.stride, conv.padding) == (1, 1, 0):
        columns = 0
    return columns if groups == 1 else max((i + f) // groups + columns, o)


def _rule(gpu: Gpu, version: int, tf32: bool, conv: Conv) -> tuple[int, str]:
    """What most large convolutions take: NCHW tensors are copied to NHWC for the tensor cores and back.

    Among the recorded 3x3 convolutions with 128 channels or more, at 256 to 1024 pixels a side, seven in ten or more
    are within 1% in half precision, and half of them in float32, on every GPU and version (tests/test_workspace.py
    counts them). A 1x1 filter is the same in both layouts and is not copied: of those in half precision more than half
    are within 1% from compute capability 8.0 on. All this in NCHW with TF32 allowed: the rest is what 3x3 convolutions
    of 128 channels take in cuDNN 9.10.2. 1d, 3d, grouped, dilated, rectangular and transposed ones were asked of cuDNN
    9.10.2 and 9.28 for an RTX 4090 and an H100 (docs/PREDICTION.md): grouped and transposed ones copy the output in
    float32 too.
    """
    size = ELEMENT_BYTES[conv.dtype]
    i, o, f = (count * size for count in conv.elements)
    strict = conv.dtype == "float32" and (not tf32 or gpu.sm < 80)
    if conv.layout == "nhwc":
        if strict:
            return i + o + f, "input + output + filter, strict float32 in channels_last"
        if conv.dtype == "float32" and gpu.sm not in (90, 100):
            return i + f, "input + filter, TF32"
        return 0, "nothing to transpose in channels_last"
    if gpu.sm < 75 and version >= 91100:
        return 0, "none for Volta since cuDNN 9.11"
    if strict:
        if conv.is_plain and (conv.r, conv.stride) == (3, 1) and gpu.sm < 90:
            return 100 * conv.c * conv.k + 4 * conv.k, "Winograd's transformed filter, strict float32"
        return 0, "none in strict float32"
    if conv.dtype == "float32" and gpu.sm not in (90, 100) and conv.groups == 1 and conv.output_padding is None:
        return i + f, "input + filter, TF32"
    if conv.is_plain and conv.r == 1:
        return i + o, "input + output"
    return i + o + f, "input + output + filter"


def _least(_gpu: Gpu, _version: int, _tf32: bool, _conv: Conv) -> tuple[int, str]:
    return 0, "the least there can be"


def _most(_gpu: Gpu, _version: int, _tf32: bool, conv: Conv) -> tuple[int, str]:
    return formula_bytes(["i+f+3o", 0, 0, 0, 0], sizes(conv)), "the most that large convolutions were seen to take"
