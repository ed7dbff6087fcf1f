"""Predict how long a phase takes: counted FLOPs and bytes, divided by rates. Each rate has a source and a band.

A `Rate` is the speed of some part of a machine, within a factor. Work maps a rate's name to FLOPs or bytes, such
as ``{"unet": 4e13, "link": 5e9}``. A `Machine` turns work into `Seconds`. Measured runs calibrate it: calibration
changes the prior rates as little as the measurements allow.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from vaemem._common import DTYPES, choose, grouped, meant, shipped, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem.prediction.gpus import Gpu, find_gpu, gpu_names

Work = Mapping[str, float]
WORK = ("unet", "transformer", "vae")  # kinds of work with known measurements of whole modules
# Two runs of one configuration differ by this share of their time: 149 and 146 s in the table of eight ways to fit a
# 12 GB card that `make reproduce ONLY=plan` prints.
REPEATS_DIFFER = 0.02
# A 3x3 convolution takes 16 products by Winograd's method, but counts as the 36 products of its definition.
WINOGRAD = 2.25


class Seconds(NamedTuple):
    """A time with its band.

    Attributes
    ----------
    low, likely, high : float
        Seconds. The range from low to high follows from the rates' bands, and is a judgement, not a bound.
    why : str
        The source of the rates.

    Examples
    --------
    >>> print(Seconds(12, 20.0, 41, "an example"))
    20 s (12 to 41)
    """

    low: float
    likely: float
    high: float
    why: str = ""

    def __str__(self) -> str:
        return f"{_short(self.likely)} s ({_short(self.low)} to {_short(self.high)})"


def _short(number: float) -> str:
    """Format a number with two digits, as many as a band justifies."""
    return f"{number:.0f}" if number >= 9.95 else f"{number:.2g}"


class Rate(NamedTuple):
    """The speed of a machine, or of a part of it.

    Attributes
    ----------
    value : float
        FLOPs or bytes in a second.
    factor : float
        The rate is assumed to lie between ``value / factor`` and ``value * factor``.
    unit : str
        ``"FLOP/s"`` or ``"B/s"``.
    why : str
        The source of the rate.

    Examples
    --------
    >>> print(Rate(2.1e13, 1.5, "FLOP/s", "an example"))
    21 TFLOP/s within 1.5 times: an example
    >>> Rate.between(1e9, 4e9, "B/s", "an example").value
    2000000000.0
    """

    value: float
    factor: float
    unit: str
    why: str

    @classmethod
    def between(cls, low: float, high: float, unit: str, why: str) -> Rate:
        """Make a rate from its least and its most."""
        return cls(math.sqrt(low * high), math.sqrt(high / low), unit, why)

    def __str__(self) -> str:
        prefixes = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1))
        prefix, scale = next((pair for pair in prefixes if self.value >= pair[1]), prefixes[-1])
        return f"{_short(self.value / scale)} {prefix}{self.unit} within {self.factor:.2g} times: {self.why}"


# ---- rates ----


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(shipped("rates.json"))  # type: ignore[no-any-return]


def peak(gpu: str | Gpu, dtype: str = "float16") -> float:
    """Return the most FLOP/s that a card's data sheet claims, dense, at its boost clock.

    Parameters
    ----------
    gpu : str or Gpu
        As in `vaemem.predict`.
    dtype : str
        float16 and bfloat16 run on tensor cores with float32 sums; float32 runs as TF32 if the card has it. bfloat16
        before compute capability 8.0, and float32 without TF32, run outside of tensor cores.

    Examples
    --------
    >>> round(peak("RTX 4090") / 1e12), round(peak("RTX 4090", "float32") / 1e12), round(peak("T4", "bfloat16") / 1e12)
    (165, 83, 8)
    """
    card = find_gpu(gpu)
    dtype = meant("dtype", dtype, DTYPES)
    is_late = dtype == "bfloat16" and card.sm < 80
    return _peak(card, "float32" if is_late else "tf32" if dtype == "float32" else "tensor")


def _peak(card: Gpu, kind: str) -> float:
    """Return the peak on tensor cores ("tensor", "tf32"), or in float32 if the card has none for that kind."""
    known = _data()["flops_per_multiprocessor_and_clock"][card.capability]
    kind = kind if kind in known else "float32"
    name = card.card or card.name
    is_half = any(re.search(rf"{half}\b", name) for half in _data()["half_rate"]["cards"])
    flops = known[kind] / (2 if is_half and kind != "float32" and card.sm > 70 else 1)
    return float(card.multiprocessors * flops * card.properties["smClockRateKHz"] * 1000)


@functools.cache
def shares() -> tuple[Mapping[str, Any], ...]:
    """Return the measured runs of data/rates.json with the `share` that each reaches of its card's peak. For a VAE, the
    share leaves out the time for moving its bytes. A row may stand for several `runs`, each `within` a factor of its
    share. Runs shorter than 50 ms are left out: they wait for Python.

    Examples
    --------
    >>> [round(run["share"], 2) for run in shares() if run["work"] == "transformer"]
    [0.38, 0.33]
    """
    data, found = _data(), list[Mapping[str, Any]]()
    for run in data["measured"]:
        seconds, module = 1 / run["per_second"], data["flops"][run["module"]]
        flops = run["samples"] * module["flops"]
        if run["work"] == "vae":
            work = vae_work(module["flops"], module["attended"], module["moved"])
            flops, seconds = work["vae"], seconds - work["memory"] / memory_rate(run["gpu"]).value
        if seconds >= data["shortest_step"]:
            found.append(run | {"share": flops / seconds / peak(run["gpu"]), "runs": 1, "within": 1.0})
    return (*found, data["vae"] | {"work": "vae"})


def _like(run: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of a run's work, and its card's compute capability. UNets and transformers are much alike."""
    return _kind(run["work"]), find_gpu(run["gpu"]).capability


def _kind(work: str) -> str:
    return "vae" if work == "vae" else "denoiser"


def vae_work(flops: float, attended: float, moved: float) -> dict[str, float]:
    """Return the work of a VAE's run, for a `Machine`.

    Parameters
    ----------
    flops, attended, moved : float
        As `vaemem._core.Trace` counts them: FLOPs, the attention's part of them, and bytes that the operators read and
        write.

    Returns
    -------
    dict of str to float
        ``"vae"``: FLOPs. FLOPs of the attention count three times, because they take three times as long. ``"memory"``:
        bytes. The two run one after the other: operators are assumed not to overlap.

    Examples
    --------
    >>> vae_work(10e12, 1e12, 5e9)
    {'vae': 12000000000000.0, 'memory': 5000000000.0}
    """
    return {"vae": flops + (_data()["vae"]["attention"] - 1) * attended, "memory": float(moved)}


def gpu_rate(gpu: str | Gpu, work: str, dtype: str = "float16") -> Rate:
    """Estimate the FLOP/s that PyTorch's eager code reaches on a card.

    Parameters
    ----------
    gpu : str or Gpu
    work : {"unet", "transformer", "vae"}
    dtype : str

    Returns
    -------
    Rate
        The card's peak times the share of a peak that this work reached in published measurements on this card. If
        there are none, the share is from cards of its compute capability, UNets and transformers together; otherwise
        from all cards. A VAE's rate is for its convolutions alone; moving its bytes takes extra time (`vae_work`).

    Examples
    --------
    >>> print(gpu_rate("RTX 4090", "vae"))
    134 TFLOP/s within 1.3 times: 81% of 165 TFLOP/s, as in 98 measured runs on this card (the seed table)
    """
    choose("work", work, WORK)
    card = find_gpu(gpu)
    groups, which = grouped(shares(), lambda run: (run["work"], find_gpu(run["gpu"]).name)), "this card"
    used = groups.get((work, card.card or card.name))
    if not used:
        groups, which = grouped(shares(), _like), f"compute capability {card.capability}"
        used = groups.get((_kind(work), card.capability))
    if used:  # the band is as wide as for the card, or the capability, with the largest spread of runs
        share = _mean_share(used)
        band = max(_off(_mean_share(runs), run) for runs in groups.values() for run in runs)
    else:
        alike = [runs for (kind, _), runs in groups.items() if kind == _kind(work)]
        share, used = _mean(map(_mean_share, alike)), [run for run in shares() if _like(run)[0] == _kind(work)]
        which = f"{len(alike)} other compute capabilities"
        band = max(_off(share, run) for run in used)
    most, count = peak(card, dtype), sum(run["runs"] for run in used)
    sources = "; ".join(dict.fromkeys(_data()["sources"][run["source"]].partition(":")[0] for run in used))
    runs = f"{count} measured run{'s' * (count > 1)}"
    why = f"{share:.0%} of {_short(most / 1e12)} TFLOP/s, as in {runs} on {which} ({sources})"
    return Rate(share * most, band, "FLOP/s", why)


def _mean(numbers: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(fmean(map(math.log, numbers)))


def _mean_share(runs: Iterable[Mapping[str, Any]]) -> float:
    return _mean(run["share"] for run in runs)


def _off(share: float, run: Mapping[str, Any]) -> float:
    """Return the factor between a share and a run, or the furthest of several runs."""
    return float(run["within"] * max(share / run["share"], run["share"] / share))


def memory_rate(gpu: str | Gpu) -> Rate:
    """Return the B/s at which a card reads its own memory: 70 to 95% of two transfers a clock over the bus.

    Examples
    --------
    >>> print(memory_rate("RTX 3060"))
    294 GB/s within 1.2 times: 70 to 95% of 360 GB/s (memory clock times bus width, two transfers a clock)
    """
    card = find_gpu(gpu)
    most = 2 * card.properties["memClockRateKHz"] * 1000 * card.properties["memoryBusWidth"] / 8
    why = f"70 to 95% of {most / 1e9:.0f} GB/s (memory clock times bus width, two transfers a clock)"
    return Rate.between(0.7 * most, 0.95 * most, "B/s", why)


def link_rate(link: str = "PCIe 3.0 x16") -> Rate:
    """Return the B/s at which weights move between host and card, one way.

    Parameters
    ----------
    link : str
        Generation and lanes, such as ``"PCIe 4.0 x8"``.

    Examples
    --------
    >>> print(link_rate("PCIe 4.0 x16"))
    12 GB/s within 1.9 times: 20 to 76% of PCIe 4.0 x16's 32 GB/s; the host's memory may be pageable or pinned
    """
    known = _data()["links"]
    match = re.fullmatch(r"pcie ?(\d)(?:\.0)? ?x(1|2|4|8|16)", str(link).strip().lower())
    lane = known["PCIe"].get(f"{match[1]}.0") if match else None
    if match is None or lane is None:
        raise ArgumentError(
            "link", f"a link such as 'PCIe 4.0 x16', of generations {', '.join(known['PCIe'])}", repr(link)
        )
    most = lane * int(match[2]) * 1e9
    share = f"{100 * known['low']:.0f} to {known['high']:.0%} of PCIe {match[1]}.0 x{match[2]}'s {most / 1e9:.0f} GB/s"
    why = f"{share}; the host's memory may be pageable or pinned"
    return Rate.between(known["low"] * most, known["high"] * most, "B/s", why)


def disk_rate() -> Rate:
    """Return the B/s at which any disk reads weights.

    Examples
    --------
    >>> print(disk_rate())
    889 MB/s within 8.9 times: 0.1 to 7.9 GB/s, from a hard disk to a drive on PCIe 4.0 x4: a judgement
    """
    low, high = (_data()["disks"][end] for end in ("low", "high"))
    why = f"{low} to {high} GB/s, from a hard disk to a drive on PCIe 4.0 x4: a judgement"
    return Rate.between(low * 1e9, high * 1e9, "B/s", why)


def cpu_rate(instructions: str = "AVX2", cores: int | None = None, weights: str = "float16") -> Rate:
    """Return the FLOP/s of ggml's products on a CPU.

    Parameters
    ----------
    instructions : {"SSE4.2", "AVX", "AVX2", "no AVX2"}
        ``"no AVX2"``: either SSE4.2 or AVX.
    cores : int, optional
        2 to 8 if not given.
    weights : {"float16", "Q8_0"}
        The VAE's convolutions use float16.

    Examples
    --------
    >>> print(cpu_rate("AVX2", 8))
    2... GFLOP/s within 1.6 times: AVX2, 8 cores, float16 weights: ggml was timed on one core; ...
    """
    known = _data()["cpus"]
    sets = [name for name in known if isinstance(known[name], dict)]
    choose("cpu", instructions, (*sets, "no AVX2"))
    choose("weights", weights, known["AVX2"])
    named = sets[: sets.index("AVX2")] if instructions == "no AVX2" else [instructions]
    timed = [rate for name in named for rate in known[name][weights]]
    least, most = (2, 8) if cores is None else (whole("cores", cores), cores)
    many = f"{least} to {most} cores" if cores is None else f"{cores} cores"
    timed_on = "ggml was timed on one core; an older core may reach only half of that"
    why = f"{instructions}, {many}, {weights} weights: {timed_on}"
    return Rate.between(min(timed) * known["older_core"] * least * 1e9, max(timed) * most * 1e9, "FLOP/s", why)


def either(rates: Iterable[Rate], which: str) -> Rate:
    """Return a rate that spans several rates, from the least to the most."""
    rates = list(rates)
    low = min(rate.value / rate.factor for rate in rates)
    high = max(rate.value * rate.factor for rate in rates)
    return Rate.between(low, high, rates[0].unit, which)


# ---- machines ----


class Machine:
    """The rates of a machine, and their joint uncertainty.

    Parameters
    ----------
    rates : dict of str to Rate
        The rates, by the names of work.

    Examples
    --------
    Two runs share their work; neither shows how long a decode takes by itself:

    >>> machine = Machine({"unet": Rate(2e13, 3, "FLOP/s", "a guess"), "vae": Rate(2e13, 3, "FLOP/s", "a guess")})
    >>> print(machine.seconds({"unet": 4e14}))
    20 s (6.7 to 60)
    >>> known = machine.calibrated([({"unet": 4e14, "vae": 1e13}, 36.0), ({"unet": 4e14, "vae": 3e13}, 38.0)])
    >>> print(known.seconds({"unet": 8e14, "vae": 1e13}))
    72 s (69 to 75)
    """

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self.rates = dict(rates)
        # Seconds per unit, and the covariance of their logarithms: a factor is two standard deviations.
        self._cost = [1 / rate.value for rate in self.rates.values()]
        deviations = [(math.log(rate.factor) / 2) ** 2 for rate in self.rates.values()]
        self._spread = [[d * (i == j) for j in range(len(deviations))] for i, d in enumerate(deviations)]

    def _amounts(self, work: Work) -> list[float]:
        if unknown := set(work) - set(self.rates):
            raise ArgumentError("work", f"amounts of {', '.join(self.rates)}", ", ".join(sorted(unknown)))
        return [float(work.get(name, 0)) for name in self.rates]

    def seconds(self, work: Work) -> Seconds:
        """Return how long the work takes, one kind after the other."""
        each = [amount * cost for amount, cost in zip(self._amounts(work), self._cost, strict=True)]
        total = sum(each)
        if not total:
            return Seconds(0, 0, 0, "nothing to do")
        pairs = itertools.product(zip(each, self._spread, strict=True), enumerate(each))
        variance = sum(one * row[j] * other for (one, row), (j, other) in pairs)
        factor = math.exp(2 * math.sqrt(max(0.0, variance)) / total)
        why = "; ".join(f"{name}: {self.rates[name]}" for name, part in zip(self.rates, each, strict=True) if part)
        return Seconds(total / factor, total, total * factor, why)

    def calibrated(self, runs: Iterable[tuple[Work, float]]) -> Machine:
        """Calibrate the machine with measured runs.

        Parameters
        ----------
        runs : sequence of (work, seconds)

        Returns
        -------
        Machine
            Rates that give the measured seconds within 2%, because repeated runs differ by that much. Many rates do.
            The calibrated rates change the prior rates least, relative to each rate's factor.

        Raises
        ------
        ValueError
            There is no run, seconds are not a positive number, or the work is unknown.
        """
        runs = list(runs)
        amounts = np.array([self._amounts(work) for work, _ in runs])
        measured = np.array([seconds for _, seconds in runs], dtype=float)
        if not runs or not (measured > 0).all() or not np.isfinite(measured).all():
            got = ", ".join(f"{seconds!r}" for _, seconds in runs) or "none"
            raise ArgumentError("calibrate", "measured runs of more than 0 seconds", got)
        costs, spread = np.array(self._cost), np.array(self._spread)
        noise = np.diag((REPEATS_DIFFER * measured) ** 2)
        change = np.zeros(len(self.rates))  # of the logarithms; only these make the equations nonlinear
        for _ in range(200):
            slopes = amounts * costs * np.exp(change)
            gain = spread @ slopes.T @ np.linalg.inv(slopes @ spread @ slopes.T + noise)
            step = gain @ (measured - slopes.sum(1) + slopes @ change) - change
            change += np.clip(step, -0.5, 0.5)
            if np.abs(step).max() < 1e-9:
                break
        found = Machine(self.rates)
        found._cost = (costs * np.exp(change)).tolist()
        found._spread = ((np.eye(len(change)) - gain @ slopes) @ spread).tolist()
        for name, cost, variance in zip(self.rates, found._cost, np.diag(found._spread), strict=True):
            if any(work.get(name) for work, _ in runs):
                factor = math.exp(2 * math.sqrt(max(0.0, float(variance))))
                why = f"from {len(runs)} measured run{'s' * (len(runs) > 1)}; before: {self.rates[name]}"
                found.rates[name] = self.rates[name]._replace(value=1 / cost, factor=factor, why=why)
        return found


def vae_machine(gpu: str | Gpu, dtype: str, runs: Iterable[tuple[str, Work, float]] = ()) -> Machine:
    """Return the rates of a card that runs a VAE.

    Parameters
    ----------
    gpu, dtype
        As in `gpu_rate`.
    runs : sequence of (dtype, work, seconds), optional
        Measurements on the card. The rates then give these seconds. The band never gets narrower than the spread of the
        98 runs behind the model, because the model's error differs that much between sizes and operations.

    Raises
    ------
    ValueError
        The runs are faster than the card's peak allows.

    Examples
    --------
    >>> work = vae_work(10e12, 0.5e12, 46e9)
    >>> print(vae_machine("T4", "float16").seconds(work))
    1.2 s (0.25 to 5.6)
    >>> print(vae_machine("T4", "float16", [("float16", work, 2.0)]).seconds(work))
    2 s (1.6 to 2.5)
    """
    machine, runs = Machine({"vae": gpu_rate(gpu, "vae", dtype), "memory": memory_rate(gpu)}), list(runs)
    if not runs:
        return machine
    most = peak(gpu, dtype)
    alike = [({**work, "vae": work["vae"] * most / peak(gpu, of)}, seconds) for of, work, seconds in runs]
    rates = machine.calibrated(alike).rates
    rate = rates["vae"]
    if rate.value > WINOGRAD * most:
        most_told = f"{most / 1e12:.0f} TFLOP/s in {dtype}"
        wanted = f"seconds that were measured on {find_gpu(gpu).name}, which can do {most_told}"
        raise ArgumentError("calibrate", wanted, "faster ones")
    return Machine(rates | {"vae": rate._replace(factor=max(rate.factor, _data()["vae"]["within"]))})


def cards_of(memory: int) -> list[Gpu]:
    """Return the listed cards with `memory` bytes within 5%, or the cards of the nearest size if there are none."""
    listed = [find_gpu(name) for name in gpu_names()]
    nearest = min((card.total_memory for card in listed), key=lambda size: abs(size - memory))
    wanted = memory if 0.95 * memory < nearest < 1.05 * memory else nearest
    return [card for card in listed if 0.95 * wanted < card.total_memory < 1.05 * wanted]


def _direct(card: Gpu) -> Rate:
    """Return the rate of ggml's direct convolution, which does not use tensor cores."""
    most = _peak(card, "float32")
    why = f"1 to 50% of {_short(most / 1e12)} TFLOP/s in float32 without tensor cores: no measurement is known"
    return Rate.between(0.01 * most, 0.5 * most, "FLOP/s", why)


def machine_of(
    gpu: str | Gpu | None = None,
    memory: int | None = None,
    dtype: str = "float16",
    runtime: str = "diffusers",
    link: str = "PCIe 3.0 x16",
    cpu: str = "AVX2",
    cores: int | None = None,
) -> Machine:
    """Return the rates of a machine before any measurement on it.

    Parameters
    ----------
    gpu : str or Gpu, optional
        If none is named: any listed card with `memory`, from the slowest to the fastest.
    memory : int, optional
        Bytes.
    runtime : {"diffusers", "sd.cpp"}
    dtype, link, cpu, cores
        As in `gpu_rate`, `link_rate` and `cpu_rate`.

    Raises
    ------
    ValueError
        A name is unknown, or neither a card nor a memory is given.

    Examples
    --------
    >>> print(machine_of("RTX 3060").rates["vae"].unit)
    FLOP/s
    >>> print(machine_of(memory=12 << 30).rates["memory"])
    4... GB/s within 2.1 times: any of 9 cards with that memory, from NVIDIA GeForce RTX 3060 to NVIDIA ...
    """
    choose("runtime", runtime, ("diffusers", "sd.cpp"))
    if gpu is not None:
        cards = [find_gpu(gpu)]
    elif memory:
        cards = cards_of(memory)
    else:
        raise ArgumentError("gpu", "a card's name, or the memory of one as memory=", "neither")
    first, last = (min(cards, key=peak), max(cards, key=peak))
    which = f"any of {len(cards)} cards with that memory, from {first.name} to {last.name}"

    def of(rate: Callable[[Gpu], Rate]) -> Rate:
        return rate(cards[0]) if len(cards) == 1 else either(map(rate, cards), which)

    rates = {work: of(functools.partial(gpu_rate, work=work, dtype=dtype)) for work in WORK}
    if runtime == "sd.cpp":
        for work, rate in rates.items():
            why = f"PyTorch's {rate.why}; ggml's kernels may reach half or twice that"
            rates[work] = rate._replace(factor=2 * rate.factor, why=why)
        rates["vae direct"] = of(_direct)
    rates |= {"memory": of(memory_rate), "link": link_rate(link), "disk": disk_rate(), "cpu": cpu_rate(cpu, cores)}
    if runtime == "diffusers":
        rate = rates["cpu"]
        why = f"ggml's rate; PyTorch may reach half or twice that: {rate.why}"
        rates["cpu"] = rate._replace(factor=2 * rate.factor, why=why)
    return Machine(rates | {"cpu Q8_0": cpu_rate(cpu, cores, "Q8_0")})
