"""The GPUs that predictions cover, without a GPU: their device properties and their names."""

import difflib
import functools
import json
import os
import re
from typing import Any, NamedTuple

from vaemem._common import MIB, shipped
from vaemem._errors import ArgumentError, ArgumentTypeError, Named
from vaemem.engine.limits import parse_size

# The bytes by which an RTX 4060 Laptop and an RTX 4070 Laptop report less than 8 GiB: 7.63 GiB
# (robbyant-research/MagicQuill#126, and a log with driver 590.48.01).
KEPT_BY_DRIVER = 384 * MIB


class Gpu(NamedTuple):
    """A GPU as CUDA describes it.

    Attributes
    ----------
    name : str
        CUDA's device name, such as ``"NVIDIA GeForce RTX 4090"``, or the requested name if no card has that name.
    capability : str
        Compute capability, such as ``"8.9"``.
    total_memory : int
        Bytes, as CUDA reports them if `source` says so.
    properties : dict
        Device properties under the keys of cuDNN's device descriptor.
    source : str
        The source of this GPU's figures.
    card : str
        The device name of the card that has the properties, if another card stands for this GPU.
    coarse : str
        Why the substitute card says little about workspaces, if cuDNN's answers for this GPU were not recorded.
    maker : str
        ``"NVIDIA"``, or the maker of the library that runs its convolutions: ``"AMD"``, ``"Intel"``, ``"Apple"``.
    rules : tuple of dict
        Facts about the GPU's workspaces from published measurements, as rules of profiles.
    architecture : str
        AMD's name of the GPU's instruction set, ``"gfx1100"``; "" for other makers' cards, and if the set is unknown.
    """

    name: str
    capability: str
    total_memory: int
    properties: dict[str, Any]
    source: str
    card: str = ""
    coarse: str = ""
    maker: str = "NVIDIA"
    rules: tuple[dict[str, Any], ...] = ()
    architecture: str = ""

    @property
    def key(self) -> str:
        """The card's name without makers, brands and punctuation: ``"4090"``."""
        return _key(self.card or self.name)

    @property
    def reported_memory(self) -> int:
        """`total_memory` as CUDA would report it. A size in whole GiB is nominal. Graphics cards report up to 3% less
        (RTX 3070 2.7%, 4090 2.0%; from the read cards of this list, ECC off), and small ones up to `KEPT_BY_DRIVER`."""
        if self.total_memory % (1 << 30):
            return self.total_memory
        return self.total_memory - max(self.total_memory * 3 // 100, KEPT_BY_DRIVER)

    @property
    def context(self) -> int:
        """Bytes that a process's CUDA context usually takes of the card, with the kernels that it loads. On a card that
        nobody measured, room for it."""
        return int(_contexts()["unmeasured"]) if self.coarse else _context_of(self.properties)

    @property
    def context_most(self) -> int:
        """The most bytes that a context may take: as far above `context` as any reading in ``data/contexts.json``."""
        return self.context + (0 if self.coarse else _context_excess())

    def available(self, used: int | str = 0) -> int:
        """Return the bytes of the card that a process can have, after its CUDA context and other users."""
        return max(self.reported_memory - self.context - parse_size("used", used, least=0), 0)

    @property
    def multiprocessors(self) -> int:
        return int(self.properties["multiProcessorCount"])

    @property
    def sm(self) -> int:
        """Compute capability as a whole number: 89 for 8.9."""
        return int(self.capability.replace(".", ""))

    @property
    def device_json(self) -> str:
        """The device description that cuDNN reads."""
        return json.dumps(self.properties)


_BRANDS = re.compile(r"nvidia|geforce|tesla|quadro|rtx|\bgpu\b|\bgeneration\b|[^a-z0-9]")
MOST_NAME = 100  # characters: no card has a longer name
_CAPABILITY = re.compile(r"sm_?(\d{1,2})(\d)a?|(?:compute capability )?(\d{1,2})\.(\d)")
_SLICE = re.compile(r"(.+?)\W+mig\W+([1-7])g\.(\d+)gb(?:\+me)?")
_SIZED = re.compile(r"(.+?)\W*(?<!\d)([1-9]\d{0,3})\s*g(?:i?b)?", re.IGNORECASE)
# Other makers, by the beginnings of names.
_OTHERS = {
    "AMD": re.compile(r"amd|radeon|instinct|gfx\d|rx ?\d|mi\d|strix|ryzen|80[456]0s"),
    "Intel": re.compile(r"intel|arc\b|xpu"),
    "Apple": re.compile(r"apple|m[1-9] (pro|max|ultra)"),
}
# NVIDIA's unrecorded cards: Kepler to Pascal, cards newer than the recorded ones, and embedded ones.
_UNRECORDED = re.compile(
    r"(nvidia|geforce|tesla|quadro|\W)*(gtx ?(6|7|9|10)\d\d|titan x|[kmp]\d{1,4}\b|g?b300|jetson|orin|"
    r"xavier|thor)"
)


_MAKERS = re.compile(r"amd|radeon|instinct|intel|apple|\barc\b")


@functools.cache
def _contexts() -> dict[str, Any]:
    return dict(json.loads(shipped("contexts.json")))


def _context_of(properties: dict[str, Any]) -> int:
    """Return the bytes of a context on a card with these properties."""
    threads = properties["multiProcessorCount"] * properties["maxThreadsPerSM"]
    return int(_contexts()["base"] + _contexts()["per_thread"] * threads)


@functools.cache
def _context_excess() -> int:
    """Return the most bytes by which a measured context was above its card's usual one."""
    readings = _contexts()["readings"]
    return max(int(one["mib"]) * MIB - _context_of(find_gpu(one["card"]).properties) for one in readings)


def _key(name: str) -> str:
    return _BRANDS.sub("", name.lower().replace("mobile", "laptop"))


@functools.cache
def _coarse() -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Return {key: (name, GB as sold, its kind)} of cards that no cuDNN was asked about. 0 GB: the host's memory.

    A kind is a row of ``gpus.json``: the cards' maker; the card that stands for their tensors; the architecture of
    AMD's cards; and, if the rule for cards without tensor cores applies, whether it is "taken" or "possible".
    """
    return {
        _key(name): (" ".join(filter(None, (kind["maker"], kind["brand"], name))), gigabytes, kind)
        for kind in json.loads(shipped("gpus.json"))["coarse"]
        for name, gigabytes in kind["gigabytes"].items()
    }


def coarse_names(maker: str) -> list[str]:
    """Return the names of a maker's cards of their own memory without recorded answers of cuDNN."""
    return [name for name, gigabytes, _ in _coarse().values() if gigabytes and name.startswith(maker)]


def _find_coarse(name: str, size: int | None) -> Gpu | None:
    """Find a card of that name without recorded answers of cuDNN: a listed one or, if `size` gives its memory, one that
    only sounds like such a card. Return None for any other name."""
    text = name.strip().lower()
    listed = _coarse().get(_key(_MAKERS.sub("", text)))
    if listed is None and size and (unlisted := _kind_of(text)):
        listed = name.strip(), 0, unlisted
    if listed is None:
        return None
    full, gigabytes, kind = listed
    if not size and not gigabytes:
        advice = ("pass its part of that, such as ", Named("memory", "96 GB"), ", for a rough answer")
        raise ArgumentError("gpu", "", f"{full} shares the host's memory", advice)
    card = find_gpu(kind["stand_in"], size or gigabytes << 30)
    why = f"{card.name} for {full}, without cuDNN's answers: tensors are known, workspaces lie in a range"
    if kind["maker"] != "NVIDIA":
        why = f"{card.name} for {full}: tensors are known"  # `Workspace.substitutions` says the rest
    rules: tuple[dict[str, Any], ...] = ()
    if "standing" in kind:
        rules = (json.loads(shipped("gpus.json"))["without_tensor_cores"] | {"standing": kind["standing"]},)
    return card._replace(
        name=full, card=card.name, coarse=why, maker=kind["maker"], rules=rules,
        architecture=kind.get("architecture", ""),
    )  # fmt: skip


def _maker(name: str) -> str:
    """Return a card's maker, by the beginning of its name; NVIDIA if it names no other maker."""
    text = name.strip().lower()
    return next((maker for maker, begins in _OTHERS.items() if begins.match(text)), "NVIDIA")


def _kind_of(text: str) -> dict[str, Any] | None:
    """Return the kind of an unlisted card, by the beginning of its name; None if it means no such card."""
    if (maker := _maker(text)) != "NVIDIA":
        return {"maker": maker, "stand_in": "RTX 3090", "architecture": text if text.startswith("gfx") else ""}
    return {"maker": maker, "stand_in": "T4", "standing": "possible"} if _UNRECORDED.match(text) else None


@functools.cache
def _table() -> tuple[list[Gpu], dict[str, Gpu], dict[str, int | None]]:
    """Return the GPUs; the same by the key of each of their names; and the multiprocessors of one MIG slice by device
    name."""
    data = json.loads(shipped("gpus.json"))
    gpus: list[Gpu] = []
    keys: dict[str, Gpu] = {}
    slices: dict[str, int | None] = {}
    for entry in data["gpus"]:
        name, capability = entry["deviceName"], entry["compute_capability"]
        properties = data["every_gpu"] | data["compute_capability"][capability] | entry
        own = ("compute_capability", "source", "aliases", "migSlice")  # not cuDNN's
        _, source, aliases, slices[name] = (properties.pop(key, None) for key in own)
        gpus.append(Gpu(name, capability, entry["totalGlobalMem"], properties, source))
        keys |= dict.fromkeys(map(_key, (name, *aliases)), gpus[-1])
    return gpus, keys, slices


def gpu_names() -> list[str]:
    """Return the device names of the GPUs with shipped properties."""
    return [gpu.name for gpu in _table()[0]]


def find_gpu(name: str | Gpu, memory: int | str | None = None) -> Gpu:
    """Find the GPU of that name.

    Parameters
    ----------
    name : str or Gpu
        CUDA's device name, or a distinctive part of it (``"RTX 4090"``, ``"4060 Ti 16GB"``, ``"a100-80gb"``); a MIG
        slice as CUDA names it, ``"A100 80GB MIG 3g.40gb"``; or a compute capability, ``"sm_89"``. A capability takes
        the properties and the name of its card with the memory nearest to `memory`. The GPU's name finds the same GPU
        again.
    memory : int or str, optional
        The card's memory, in bytes or as cards are sold: ``"16 GB"`` (of 2^30 bytes here). The shipped figure by
        default.

    Raises
    ------
    TypeError
        The name is not text.
    ValueError
        No shipped GPU has that name. The message gives the nearest names.

    Examples
    --------
    >>> find_gpu("rtx 4090").capability
    '8.9'
    >>> find_gpu("sm_89", "16 GB").name
    'sm_89 (as NVIDIA GeForce RTX 4070 Ti SUPER)'
    """
    size = None if memory is None else sold(memory)
    if isinstance(name, Gpu):
        return _with(name, size)
    if not isinstance(name, str):
        raise ArgumentTypeError("gpu", "a name such as 'RTX 4090'", type(name).__name__)
    if len(name) > MOST_NAME:
        raise ArgumentError("gpu", f"a name of at most {MOST_NAME} characters", f"{len(name)}")
    text = name.strip().lower()
    capability, _, full = text.partition(" (as ")
    if match := _CAPABILITY.fullmatch(capability):
        if full and size is None:  # the name of a Gpu that was found this way
            size = find_gpu(full.removesuffix(")")).total_memory
        return _of_capability(".".join(filter(None, match.groups())), size)
    if match := _SLICE.fullmatch(text):
        return _with(_slice(find_gpu(match[1]), int(match[2]), int(match[3])), size)
    keys = _table()[1]
    card = keys.get(_key(name)) or keys.get(_key(re.sub(r"^(laptop|mobile) (.*)$", r"\2 \1", text)))
    sized = _SIZED.fullmatch(name.strip())
    nominal = int(sized[2]) << 30 if sized else 0
    if card is None and sized and (card := keys.get(_key(f"{sized[1]} {sized[2]}gb")) or keys.get(_key(sized[1]))):
        if size is None and not 0.9 * nominal < card.total_memory <= nominal:  # another variant of the card
            size = nominal
    if card is not None:
        return _with(card, size)
    if coarse := _find_coarse(name, size) or (_find_coarse(sized[1], size or nominal) if sized and nominal else None):
        return coarse
    raise _unknown(name)


def known_gpu(name: Any) -> Gpu | None:
    """Return the GPU of that name, or None if there is none."""
    try:
        return find_gpu(name)
    except ValueError:
        return None


def context_of(name: str, memory: int) -> int:
    """Return `Gpu.context` of the card of that name as a running program sees it."""
    try:
        return (known_gpu(name) or find_gpu(name, memory)).context
    except ValueError:
        return int(_contexts()["unmeasured"])


@functools.cache
def present_gpu() -> Gpu | None:
    """Return this machine's first GPU, as nvidia-smi names it; None if it has none, or only an unknown one."""
    import subprocess  # few callers need it

    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
        name, _, mebibytes = said.partition("\n")[0].rpartition(",")
        return known_gpu(name) or find_gpu(name, int(mebibytes) * MIB)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def sold(memory: int | str) -> int:
    """Return the bytes of a card's memory. Its GB are of 2^30 bytes.

    >>> sold("12 GB")
    12884901888
    """
    parse_size("memory", memory)  # a refusal shows the text that was given
    size = parse_size("memory", re.sub(r"(?i)gb\b", "GiB", memory) if isinstance(memory, str) else memory)
    if size < 1 << 30:
        raise ArgumentError("memory", "1 GB or more, such as '16 GB'", repr(memory))
    return size


def _with(gpu: Gpu, size: int | None, **changes: Any) -> Gpu:
    """Return the same GPU with other memory and properties."""
    if size is not None:
        gpu = gpu._replace(total_memory=size, source=f"{gpu.source}; memory as it was given")
        changes["totalGlobalMem"] = size
    return gpu._replace(properties=gpu.properties | changes) if changes else gpu


def _of_capability(capability: str, size: int | None) -> Gpu:
    """Make a GPU for a compute capability from its card with the nearest memory, or from its first card."""
    alike = [gpu for gpu in _table()[0] if gpu.capability == capability]
    if not alike:
        raise ArgumentError("gpu", f"a compute capability that was recorded ({_capabilities()})", str(capability))
    card = min(alike, key=lambda gpu: abs(gpu.total_memory - size)) if size else alike[0]
    name = f"sm_{card.sm} (as {card.name})"
    return _with(card, size)._replace(name=name, card=card.name, source=f"{card.source}; for its compute capability")


def _slice(gpu: Gpu, slices: int, gigabytes: int) -> Gpu:
    """Make a MIG slice of a card."""
    each = _table()[2].get(gpu.name)
    if each is None or slices * each > gpu.multiprocessors or gigabytes << 30 > 1.1 * gpu.total_memory:
        got = f"{slices}g.{gigabytes}gb of {gpu.name}"
        raise ArgumentError("gpu", "a MIG slice that the card can be cut into", got)
    cut = _with(gpu, gigabytes << 30, multiProcessorCount=slices * each)
    source = f"{gpu.source}; {each} multiprocessors a slice and the nominal memory (CUDA reports 1-5% less)"
    return cut._replace(name=f"{gpu.name} MIG {slices}g.{gigabytes}gb", card=gpu.name, source=source)


def _capabilities() -> str:
    return ", ".join(dict.fromkeys(f"sm_{gpu.sm}" for gpu in _table()[0]))


def _unknown(name: str) -> ArgumentError:
    """Make the error for an unknown card's name."""
    text, maker, (_, cards, _) = name.strip().lower(), _maker(name), _table()
    keys = {key: card.name for key, card in cards.items()} | {key: full for key, (full, *_) in _coarse().items()}
    keys = {key: full for key, full in keys.items() if _maker(full) == maker}
    near = difflib.get_close_matches(_key(_MAKERS.sub("", text)), keys, n=3, cutoff=0.6)
    nearest = " or ".join(dict.fromkeys(repr(keys[key]) for key in near))
    if _kind_of(text):
        nearest = f"; did you mean {nearest}?" if near else ""
        return ArgumentError(
            "gpu", "", f"unlisted card {name!r}", (Named("memory", "16 GB"), f" gives a rough answer{nearest}")
        )
    advice = (f"pass a card such as 'RTX 4090', or one of {_capabilities()} with ", Named("memory", "16 GB"))
    return ArgumentError("gpu", "", f"unknown card {name!r}", f"did you mean {nearest}?" if near else advice)
