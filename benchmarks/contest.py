"""Run several programs in turns on one GPU. Each program gets a row. decode_gpu.py says what is measured."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_vae
from common import Machine, Worker, append_row, commit, median, serve

import vaemem
from vaemem import _core
from vaemem.pytorch.measuring import cudnn_version, driver_version

ELEMENT = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
WARMUPS = 3


@dataclass(frozen=True)
class Case:
    """The run of a contest. dtype: "tf32" is float32 with TF32 products."""

    model: str
    op: str
    size: int
    dtype: str
    batch: int = 1
    small: bool = False

    @property
    def type(self) -> str:
        return "float32" if self.dtype == "tf32" else self.dtype

    @property
    def tf32(self) -> bool:
        return self.dtype == "tf32"

    @property
    def unit(self) -> int:
        """Bytes of T."""
        return 128 * self.size * self.size * ELEMENT[self.dtype]

    @property
    def arch(self) -> dict:
        arch = _core.models()[self.model]
        if self.small:
            arch |= {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
        return arch

    def __str__(self) -> str:
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.model} {self.op} {self.size}x{self.size}{batch} {self.dtype}"


# ---- contestants: a name, time(machine) -> (seconds, host seconds), memory(machine) -> bytes ----


class Contestant:
    notes = ""
    batch = 1  # times are of so many images

    def run(self) -> Any:
        raise NotImplementedError

    def time(self, machine: Machine) -> tuple[float, float]:
        return machine.time(self.run)

    def memory(self, machine: Machine) -> dict[str, int | None]:
        return machine.memory(self.run)


class Ours(Contestant):
    def __init__(self, vae, op: str, x, graphs: bool = False, memory_limit: int | None = None, bytes_out: bool = False):
        self.vae, self.op, self.x, self.batch = vae, op, x, x.shape[0]
        self.settings = {"graphs": graphs, "memory_limit": memory_limit}
        self.output = {"output_type": "uint8"} if bytes_out else {}
        self.record: Any = None

    def run(self):
        for name, value in self.settings.items():
            setattr(self.vae, name, value)
        y = self.vae.decode(self.x, **self.output) if self.op == "decode" else self.vae.encode(self.x).moments
        self.record = self.vae.last_run
        self.notes = "; ".join(self.record.notes)
        return y

    def memory(self, machine):
        self.vae.trim()
        taken = machine.memory(self.run)
        taken |= {
            "weights": self.record.weights_bytes,
            "allocated": self.record.peak_bytes - self.record.weights_bytes,
            "reserved": self.record.reserved_bytes - self.record.weights_bytes,
        }
        return taken


class Peer(Contestant):
    def __init__(self, module, op: str, x, mode: str | None = None, hosted: bool = False):
        self.module, self.x, self.batch, self.mode, self.hosted = module, x, x.shape[0], mode, hosted
        self.call = module.image if op == "decode" else module.moments
        if mode:
            self.call = torch.compile(self.call, mode=mode, dynamic=False)
            start = time.perf_counter()
            self.run()
            self.notes = f"compiled in {time.perf_counter() - start:.0f} s"

    def run(self):
        with torch.inference_mode():
            if self.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            if not self.hosted:
                return self.call(self.x)
            parameter = next(self.module.parameters())
            x = torch.from_numpy(self.x).to(parameter.device, parameter.dtype)
            return self.call(x).float().cpu().numpy()

    def memory(self, machine):
        taken = machine.memory(self.run) | {"weights": sum(p.nbytes for p in self.module.parameters())}
        if self.mode == "reduce-overhead":  # its graphs hold what they use, between runs too: not seen as growth
            taken |= dict.fromkeys(("allocated", "reserved", "device"))
        return taken


class Elsewhere(Contestant):
    """In a process of its own, where settings that a process keeps, or what it has taken besides, do not matter."""

    def __init__(self, what: str, case: Case, device: str):
        self.batch = case.batch
        task = {"what": what, "case": vars(case), "device": device}
        self.worker = Worker(what, __file__, task, {"PYTHONSAFEPATH": ""})

    def time(self, machine):
        answer = self.worker.ask()
        return answer["seconds"], answer["host"]

    def memory(self, machine):
        return self.worker.ask()["memory"]

    def close(self) -> None:
        self.worker.close()


def work(task: dict) -> Callable[[], dict]:
    """The other side of Elsewhere."""
    case = Case(**task["case"])
    if task["what"] == "alone":  # no PyTorch: what is lost beside our own is ours
        vae = open_vae(case, task["device"])
        ours = Ours(vae, case.op, hosted_data(case))

        def alone() -> dict:
            start = time.perf_counter()
            ours.run()
            seconds, run = time.perf_counter() - start, ours.record
            memory = {
                "weights": run.weights_bytes, "allocated": run.peak_bytes - run.weights_bytes,
                "reserved": run.reserved_bytes - run.weights_bytes, "unaccounted": vae.unaccounted_bytes,
            }  # fmt: skip
            return {"seconds": seconds, "host": seconds, "memory": memory}

        return alone
    machine = Machine(task["device"], case.small)
    torch.backends.cudnn.benchmark = True  # plans once found are kept, however they were
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = case.tf32
    setup = Setup(machine, replace(case, batch=1))
    peer = Peer(setup.peer(True), case.op, setup.data(case))
    peer.run()

    def benchmark() -> dict:
        memory = peer.memory(machine)
        seconds, host = peer.time(machine)
        return {"seconds": seconds, "host": host, "memory": memory}

    return benchmark


# ---- who takes part ----


def open_vae(case: Case, device: str, autotune: bool = False, convolution: str = "auto"):
    return vaemem.VAE.random(
        config=case.arch,
        device=device,
        dtype=case.type,
        precision="high" if case.tf32 else "highest",
        autotune=autotune,
        convolution=convolution,
    )


def hosted_data(case: Case, seed: int = 0):
    """float32 noise: latents or pixels."""
    arch, rng = case.arch, np.random.default_rng(seed)
    if case.op == "decode":
        side = case.size // 2 ** (len(arch["block_out_channels"]) - 1)
        return rng.standard_normal((case.batch, arch["latent_channels"], side, side), dtype=np.float32)
    return rng.uniform(-1, 1, (case.batch, arch["in_channels"], case.size, case.size)).astype(np.float32)


class Setup:
    """A model in a dtype, its weights on the machine for everyone who asks."""

    def __init__(self, machine: Machine, case: Case):
        self.machine, self.case = machine, case
        self.open: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.open:
            self.open[key] = make()
        return self.open[key]

    def ours(self, autotune: bool = False, convolution: str = "auto", apart: Any = ()):
        """apart: a VAE for each, where they would give back each other's arena or graphs in turns."""
        device, key = self.machine.device.type, ("ours", autotune, convolution, apart)
        return self._once(key, lambda: open_vae(self.case, device, autotune, convolution))

    def peer(self, channels_last: bool, dtype: str | None = None):
        dtype = dtype or self.case.type

        def make():
            weights = self._once("weights", lambda: vaemem.VAE.random(config=self.case.arch))
            layout = torch.channels_last if channels_last else torch.contiguous_format
            module = torch_vae.peer(weights)
            return module.to(self.machine.device, getattr(torch, dtype)).to(memory_format=layout)

        return self._once((channels_last, dtype), make)

    def data(self, case: Case):
        return self.here(hosted_data(case))

    def here(self, array):
        """On the machine, in the dtype. Ours runs on arrays of the CPU as NumPy has them."""
        return torch.from_numpy(array).to(self.machine.device, getattr(torch, self.case.type))

    def reference(self, case: Case):
        """float32 without TF32, of the input as it is rounded."""
        with self.machine.tf32(False):
            return Peer(self.peer(False, "float32"), case.op, self.data(case).float()).run()


def attempt(make: Callable[[], Any], what: str, failures: dict[str, str]) -> Any:
    """make(), or None and why not: one that cannot take part leaves the others their turns."""
    try:
        return make()
    except (Exception, SystemExit) as error:
        failures[what] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        print(f"  {what}: {failures[what]}", flush=True)
        return None


def race(
    machine: Machine, contestants: dict[str, Contestant], rounds: int, seconds: float, failures: dict[str, str]
) -> dict[str, list[tuple[float, float]]]:
    """Times by name; after three rounds the clock may end it. Who fails is out, with the times before."""
    for name, contestant in [*contestants.items()]:
        if attempt(lambda c=contestant: [c.time(machine) for _ in range(WARMUPS)], name, failures) is None:
            del contestants[name]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    start = time.perf_counter()
    for i in range(rounds):
        for name in [*times]:
            if name not in failures:
                taken = attempt(lambda n=name: contestants[n].time(machine), name, failures)
                if taken:
                    times[name].append(taken)
        if i >= 2 and time.perf_counter() - start > seconds:
            break
    return {name: taken for name, taken in times.items() if name not in failures}


def relative_error(got, want) -> float:
    """NaN where got has one."""
    got, want = (torch.as_tensor(t, device=want.device).double() for t in (got, want))
    return float((got - want).norm() / want.norm())


# ---- rows ----


def about(machine: Machine, vae) -> dict[str, str]:
    """Describe the software and the GPU: the last columns of every row."""
    return {
        "gpu": machine.name,
        "driver": driver_version() if machine.gpu else "",
        "torch": torch.__version__,
        "peer": torch_vae.origin(),
        "torch_cudnn": cudnn_version(),
        "vaemem_cudnn": vae._device.backend.cudnn_version if vae and vae._device else "",
        "vaemem": vaemem.__version__,
        "commit": commit(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def row(
    name: str,
    case: Case,
    contestant: Contestant | None,
    times: list[tuple[float, float]],
    ours: list[tuple[float, float]],
    memory: dict[str, int | None],
    flops: float | None,
    peak: float,
    error: float | None,
    failure: str,
) -> dict[str, Any]:
    """flops: of one run with case.batch images; `ours`: the times that the ratio is to, of such runs too."""
    device = median([t for t, _ in times]) if times else None
    pairs = zip(times, ours, strict=False)
    ratio = median([a / b for (a, _), (b, _) in pairs]) if times and ours else None
    rate = flops / device if flops and device else None

    def rounded(value: float | None, digits: int, by: float = 1.0) -> float | None:
        return None if value is None else round(value * by, digits)

    out: dict[str, Any] = {
        "contestant": name, "model": case.model, "op": case.op, "height": case.size, "width": case.size,
        "batch": case.batch, "dtype": case.type, "tf32": int(case.tf32),
        "ms": rounded(device, 3, 1e3),
        "fastest_ms": rounded(min(t for t, _ in times) if times else None, 3, 1e3),
        "slowest_ms": rounded(max(t for t, _ in times) if times else None, 3, 1e3),
        "host_ms": rounded(median([h for _, h in times]) if times else None, 3, 1e3),
        "runs": len(times),
        "time_over_vaemem": rounded(ratio, 3),
        "tflops": rounded(rate, 2, 1e-12),
        "peak_tflops": rounded(peak, 2, 1e-12),
        "share_of_peak": rounded(rate / peak if rate else None, 3),
    }  # fmt: skip
    for what in ("weights", "allocated", "reserved", "device", "unaccounted"):
        out[f"{what}_bytes"] = memory.get(what)
    for what in ("allocated", "reserved", "device"):
        taken = memory.get(what)
        out[f"{what}_t"] = None if taken is None else round(taken / case.unit, 3)
    out["error"] = None if error is None else f"{error:.3e}"
    return out | {"notes": contestant.notes if contestant else "", "failure": failure}


def shown(line: dict[str, Any]) -> str:
    if line["failure"]:
        return f"  {line['contestant']:38s} {line['failure'][:80]}"
    parts = [f"  {line['contestant']:38s} {line['ms']:9.2f} ms"]
    parts += [f"{line['time_over_vaemem']:6.2f} x ours" if line["time_over_vaemem"] else " " * 13]
    parts += [f"{line['tflops'] or 0:7.1f} TFLOP/s {100 * (line['share_of_peak'] or 0):4.0f}%"]
    parts += [f"{what} {line[f'{what}_t']:5.2f} T" for what in ("allocated", "reserved") if line[f"{what}_t"]]
    parts += [f"error {line['error']}"] * (line["error"] is not None)
    return "  ".join(parts) + (f"  ({line['notes']})" if line["notes"] else "")


def enter(
    make: Callable[[], Contestant], machine: Machine, reference: Any
) -> tuple[Contestant, dict[str, int | None], float | None]:
    """A contestant, what it takes once libraries have what they keep, and its error."""
    machine.clear()  # what one keeps another may need
    contestant = make()
    if isinstance(contestant, Elsewhere):
        return contestant, contestant.memory(machine), None
    error = None if reference is None else relative_error(contestant.run(), reference)
    contestant.run()
    return contestant, contestant.memory(machine), error


def report_entry(
    name: str, case: Case, contestant: Contestant, memory: dict[str, int | None], error: float | None
) -> None:
    """Reports the memory and the error of a contestant before it is timed."""
    taken = ", ".join(f"{what} {value}" for what, value in memory.items())
    print(f"  entered: {name}: error {error and f'{error:.3e}'}, {taken} bytes {contestant.notes}", flush=True)
    append_row("entered", {"contestant": name, "case": str(case), "error": error} | memory)


def contest(
    setup: Setup,
    case: Case,
    entries: dict[str, Callable[[], Contestant]],
    args: argparse.Namespace,
    reference: Any = None,
) -> list[dict[str, Any]]:
    """Everybody's rows. The first entry is ours, to which the ratios are."""
    machine = setup.machine
    failures: dict[str, str] = {}
    print(f"\n{case}", flush=True)
    if "torch._dynamo" in sys.modules:  # or shapes pile up and are compiled as dynamic ones
        torch._dynamo.reset()
    peak = machine.flops(case.type, case.tf32)
    with machine.tf32(case.tf32):
        entered = {}
        for name, make in entries.items():
            entered[name] = attempt(lambda m=make: enter(m, machine, reference), name, failures)
            if entered[name]:  # the race comes later, and may never end
                report_entry(name, case, *entered[name])
        racing = {name: entry[0] for name, entry in entered.items() if entry}
        times = race(machine, dict(racing), args.rounds, args.case_seconds, failures)
    known = about(machine, next((c.vae for c in racing.values() if isinstance(c, Ours)), None))
    flops = next((sum(c.record.flops) / c.batch for c in racing.values() if isinstance(c, Ours)), None)
    lines = []
    for name in entries:
        contestant, memory, error = entered[name] or (None, {}, None)
        batch = contestant.batch if contestant else case.batch
        ours = [(t * batch, h) for t, h in times.get(next(iter(entries)), [])]
        line = row(
            name, replace(case, batch=batch), contestant, times.get(name, []), ours, memory, flops and flops * batch,
            peak, error, failures.get(name, ""),
        )  # fmt: skip
        lines.append(line | known)
        print(shown(line), flush=True)
    for contestant in racing.values():
        if isinstance(contestant, Elsewhere):
            contestant.close()
    return lines


if __name__ == "__main__":  # Elsewhere's process
    serve(work(json.loads(sys.argv[2])))
