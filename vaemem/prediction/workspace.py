"""The workspace of PyTorch's convolutions on a GPU that need not be there.

PyTorch (eager, ``torch.backends.cudnn.benchmark`` off) gives each convolution a scratch buffer from its caching
allocator: as many bytes as the first plan of cuDNN's instant heuristics asks for. Three sources know how many, in this
order:

1. a profile: cuDNN's answers, recorded beforehand for a GPU and a cuDNN version (``vaemem/data/profiles``);
2. the installed cuDNN, asked without a device (9.8 or later), in a process of its own because it may crash;
3. a rule, with what is known of its error.

Every answer says which it was.
"""

from typing import Any

from vaemem._common import DTYPES, ELEMENT_BYTES, choose
from vaemem.prediction.cudnn import InstalledCudnn, installed_cudnn
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.profiles import Conv, Profile, nearest_profile, version_number

# The cuDNN that PyTorch's own wheels for Linux bring (their package metadata). 2.7 built for CUDA 12.6 brings 9.5.1.
CUDNN_OF_TORCH = {
    "2.5": "9.1.0",
    "2.6": "9.1.0",
    "2.7": "9.7.1",
    "2.8": "9.10.2",
    "2.9": "9.10.2",
    "2.10": "9.10.2",
    "2.11": "9.19.0",
    "2.12": "9.20.0",
    "2.13": "9.20.0",
    "2.14": "9.24.0",
    "2.15": "9.26.0",
}


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

    Raises
    ------
    ValueError
        Unknown GPU or PyTorch version.

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
        self.gpu = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
        if cudnn_version is None and torch_version is not None:
            release = ".".join(torch_version.split("+")[0].split(".")[:2])
            if release not in CUDNN_OF_TORCH:
                known = ", ".join(CUDNN_OF_TORCH)
                raise ValueError(f"torch_version: want one of {known} or a cudnn_version, got {torch_version!r}")
            cudnn_version = CUDNN_OF_TORCH[release]
        self.cudnn_version = cudnn_version
        self.tf32 = tf32
        self._cudnn = cudnn or installed_cudnn()
        self._profile: Profile | None = nearest_profile(self.gpu, cudnn_version)
        self._prefer_installed: bool | None = None
        self._known: dict[tuple[Any, ...], tuple[int, str]] = {}

    def conv(
        self,
        dtype: str,
        n: int,
        c: int,
        h: int,
        w: int,
        k: int,
        r: int,
        stride: int = 1,
        padding: int = 1,
        layout: str = "nchw",
    ) -> tuple[int, str]:
        """Workspace of one forward convolution.

        Parameters
        ----------
        dtype : str
            ``"float16"``, ``"bfloat16"`` or ``"float32"``, of input, filter and output.
        n, c, h, w : int
            Input: batch, channels, height and width, before `padding`.
        k, r : int
            Filters, and their height and width.
        stride, padding : int
            As ``torch.nn.Conv2d`` takes them. A one-sided padding is a padded input with `padding` 0.
        layout : str
            ``"nchw"``, or ``"nhwc"`` for channels_last tensors.

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
        key = (dtype, n, c, h, w, k, r, stride, padding, layout)
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = self._look_up(Conv(*key))
        return answer

    def _look_up(self, conv: Conv) -> tuple[int, str]:
        _check(conv)
        if conv.dtype == "bfloat16" and self.gpu.sm < 80:
            return _im2col(self.gpu, conv)
        if self._profile is not None and conv.layout == "nchw" and self.tf32 and not self._ask_first():
            found = self._profile.conv(conv)
            if found is not None:
                return found[0], found[1] + self._wanted(self._profile.version)
        question = conv._asdict()
        question.update(nhwc=question.pop("layout") == "nhwc", tf32=self.tf32)
        try:
            plan = self._cudnn.conv(self.gpu.device_json, **question)
        except RuntimeError as error:
            wanted = self.cudnn_version or (self._profile and self._profile.version)
            count, why = _rule(self.gpu, version_number(wanted) if wanted else 0, self.tf32, conv)
            return count, f"rule: {why}; uncertain (no profile has this convolution; {error})"
        version = self._cudnn.version
        if plan is None:
            raise ValueError(f"conv: cuDNN {version} has no engine for {conv} on {self.gpu.name}; PyTorch would raise")
        unsure = ", after engines that compile at run time and could not be tried" if plan["untried"] else ""
        return plan["bytes"], f"cuDNN {version}, asked without a device{unsure}{self._wanted(version)}"

    def _wanted(self, version: str | None) -> str:
        """What to add to a source that is not the version that was asked for."""
        wanted = self.cudnn_version
        same = wanted is None or version is None or version_number(wanted) == version_number(version)
        return "" if same else f" ({wanted} was wanted)"

    def _ask_first(self) -> bool:
        """Whether the installed cuDNN is the version wanted and the profile is another's."""
        if self._prefer_installed is None:
            profile = self._profile
            wanted = self.cudnn_version and version_number(self.cudnn_version)
            exact = profile is None or wanted is None or version_number(profile.version) == wanted
            self._prefer_installed = not exact and version_number(self._cudnn.version or "0.0") == wanted
        return self._prefer_installed


def _check(conv: Conv) -> None:
    dtype, n, c, h, w, k, r, stride, padding, layout = conv
    choose("dtype", dtype, DTYPES)
    if layout not in ("nchw", "nhwc"):
        raise ValueError(f"layout: want 'nchw' or 'nhwc', got {layout!r}")
    if min(n, c, h, w, k, r, stride) < 1 or padding < 0:
        raise ValueError(f"conv: want sizes and a stride of 1 or more and no negative padding, got {conv}")
    if min(h, w) + 2 * padding < r:
        raise ValueError(f"conv: want a {r}x{r} filter within the padded input, got {h}x{w} and padding {padding}")


def _im2col(gpu: Gpu, conv: Conv) -> tuple[int, str]:
    """PyTorch's own convolution: the columns of one batch item, none for a plain 1x1 (ConvolutionMM2d.cu)."""
    source = f"PyTorch's im2col: no bfloat16 for cuDNN below compute capability 8.0 ({gpu.name} has {gpu.capability})"
    if (conv.r, conv.stride, conv.padding) == (1, 1, 0):
        return 0, source
    oh, ow = conv.out
    return conv.c * conv.r * conv.r * oh * ow * ELEMENT_BYTES[conv.dtype], source


def _rule(gpu: Gpu, version: int, tf32: bool, conv: Conv) -> tuple[int, str]:
    """What most large convolutions take: NCHW tensors are copied to NHWC for the tensor cores and back.

    Of the recorded 3x3 convolutions with 128 channels or more, at 256 to 1024 pixels a side, at least seven in ten are
    within 1% in half precision and half of them in float32, on every GPU and version (tests/test_workspace.py counts
    them); of 1x1 and thin ones, about half.
    """
    size = ELEMENT_BYTES[conv.dtype]
    oh, ow = conv.out
    i, o = conv.n * conv.c * conv.h * conv.w * size, conv.n * conv.k * oh * ow * size
    f = conv.k * conv.c * conv.r * conv.r * size
    if conv.layout == "nhwc":
        return 0, "nothing to transpose in channels_last"
    if gpu.sm < 75 and version >= 91100:
        return 0, "none for Volta since cuDNN 9.11"
    if conv.dtype == "float32" and (not tf32 or gpu.sm < 80):
        if (conv.r, conv.stride) == (3, 1) and gpu.sm < 90:
            return 100 * conv.c * conv.k + 4 * conv.k, "Winograd's transformed filter, strict float32"
        return 0, "none in strict float32"
    if conv.dtype == "float32" and gpu.sm not in (90, 100):
        return i + f, "input + filter, TF32"
    return i + o + f, "input + output + filter"
