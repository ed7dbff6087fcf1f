"""Compare whole decodes and encodes on a GPU with PyTorch's: in one process, with the same weights, in turns.

    python benchmarks/decode_gpu.py [--models flux sdxl] [--dtypes bfloat16 float16 tf32 float32] [--ops decode encode]
        [--sizes 512 1024 2048] [--peers eager channels_last compile compile-autotune compile-graphs]
    python benchmarks/decode_gpu.py --passes --parts     where the time of one run goes
    python benchmarks/decode_gpu.py --ablation           what each option gives

The latter two take the first model, dtype, op and size. The peer is diffusers' AutoencoderKL (torch_vae.py has it in
plain PyTorch). Everyone warms up, is measured once for memory, and then takes turns; times are CUDA events around a
call on arrays that are in the GPU's memory, medians of rounds, and ratios are medians of each round's. `flops` are ours
in every row (a folded upsample has fewer than PyTorch's), so TFLOP/s compare as times do; the peak is a large matrix
product of the same type in the same run. T is 128 * H * W elements. Three columns leave out weights and input:
`allocated` is our plan's figure, and PyTorch's counter; `reserved` is the memory that each holds from the system;
`device` is the loss of free memory on the GPU. The error is |y - reference| / |reference| of a PyTorch run in float32
without TF32. Rows are written as they come, to decode_gpu_<gpu>.csv, passes_gpu_<gpu>.csv and ablation_gpu_<gpu>.csv in
benchmarks/results.

On the CPU (--device cpu) the same flow runs without events and memory, to see that it does.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch_vae
from common import Machine, median, parser_of, write_csv
from contest import ELEMENT, Case, Contestant, Elsewhere, Ours, Peer, Setup, about, attempt, contest, hosted_data
from torch.nn import functional as F
from torch_vae import AutoencoderKL

import vaemem

PEERS = {  # name: (channels_last, mode of torch.compile)
    "eager": (False, None),
    "channels_last": (True, None),
    "compile": (True, "default"),
    "compile-autotune": (True, "max-autotune-no-cudagraphs"),
    "compile-graphs": (True, "reduce-overhead"),
}


# ---- the tables ----


def ours_here(
    setup: Setup, case: Case, autotune: bool = False, convolution: str = "auto", hosted: bool = False,
    smallest: bool = False, **settings: Any,
) -> Ours:  # fmt: skip
    """On arrays in the GPU's memory, or `hosted` in NumPy's, which is all that there is on the CPU; `smallest`: within
    the smallest memory limit that will do."""
    vae, x = setup.ours(autotune, convolution, (smallest, *settings)), hosted_data(case)
    staged = hosted or not setup.machine.gpu
    if smallest:
        settings["memory_limit"] = vae.smallest(case.op, case.size, case.size, case.batch, staged=staged)
    return Ours(vae, case.op, x if staged else setup.here(x), **settings)


def entries_of(setup: Setup, case: Case, args: argparse.Namespace) -> dict[str, Callable[[], Contestant]]:
    entries: dict[str, Callable[[], Contestant]] = {"vaemem": lambda: ours_here(setup, case)}
    if args.graphs:
        entries["vaemem graphs"] = lambda: ours_here(setup, case, graphs=True)
    if setup.machine.gpu and case.type != "float32":
        other = "cudnn" if setup.ours()._device.backend.convolution == "own" else "own"
        entries[f"vaemem {other}"] = lambda: ours_here(setup, case, convolution=other)
        if args.graphs:
            entries[f"vaemem {other}, graphs"] = lambda: ours_here(setup, case, convolution=other, graphs=True)
    if args.smallest:
        entries["vaemem smallest"] = lambda: ours_here(setup, case, smallest=True)
    for name in args.peers:
        channels_last, mode = PEERS[name]
        entries[f"torch {name}"] = lambda c=channels_last, m=mode: Peer(setup.peer(c), case.op, setup.data(case), m)
    if args.alone:
        entries["vaemem numpy, alone"] = lambda: Elsewhere("alone", case, setup.machine.device.type)
    return entries


def main_table(machine: Machine, cases: Iterable[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    setups: dict[tuple[str, str], Setup] = {}
    for case in cases:
        if not any(dtype == case.dtype for _, dtype in setups):
            setups.clear()
            gc.collect()
        setup = setups.setdefault((case.model, case.dtype), Setup(machine, case))
        reference = None
        if case.size <= args.errors_up_to:
            reference = attempt(lambda s=setup, c=case: s.reference(c), f"{case}: the reference", {})
        lines += contest(setup, case, entries_of(setup, case, args), args, reference)
        write_csv(f"decode_gpu_{machine.label}{args.suffix}.csv", lines, quiet=True)
    return lines


def ablation(machine: Machine, case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    setup = Setup(machine, case)
    many = replace(case, batch=4)
    device = machine.device.type
    noise = hosted_data(case), hosted_data(many)
    entries: dict[str, Callable[[], Contestant]] = {
        "vaemem": lambda: ours_here(setup, case),
        "vaemem graphs": lambda: ours_here(setup, case, graphs=True),
        "vaemem autotune": lambda: ours_here(setup, case, autotune=True),
        "vaemem autotune, graphs": lambda: ours_here(setup, case, autotune=True, graphs=True),
    }
    if machine.gpu and case.type != "float32":
        for way in ("own", "cudnn"):
            entries[f"vaemem {way}"] = lambda w=way: ours_here(setup, case, convolution=w)
            entries[f"vaemem {way}, graphs"] = lambda w=way: ours_here(setup, case, convolution=w, graphs=True)
    entries |= {
        "vaemem smallest": lambda: ours_here(setup, case, smallest=True),
        "vaemem smallest, graphs": lambda: ours_here(setup, case, smallest=True, graphs=True),
        "vaemem batch 4": lambda: ours_here(setup, many),
        "vaemem numpy": lambda: ours_here(setup, case, hosted=True),
        "vaemem numpy batch 4": lambda: ours_here(setup, many, hosted=True),
        "vaemem numpy, alone": lambda: Elsewhere("alone", case, device),
        "torch eager": lambda: Peer(setup.peer(False), case.op, setup.data(case)),
        "torch channels_last": lambda: Peer(setup.peer(True), case.op, setup.data(case)),
        "torch channels_last, cudnn.benchmark": lambda: Elsewhere("benchmark", case, device),
        "torch channels_last batch 4": lambda: Peer(setup.peer(True), case.op, setup.data(many)),
        "torch channels_last numpy": lambda: Peer(setup.peer(True), case.op, noise[0], hosted=True),
        "torch channels_last numpy batch 4": lambda: Peer(setup.peer(True), case.op, noise[1], hosted=True),
    }
    if case.op == "decode":
        entries["vaemem uint8"] = lambda: ours_here(setup, case, bytes_out=True)
    lines: list[dict[str, Any]] = []
    name = f"ablation_gpu_{machine.label}{args.suffix}.csv"
    lines += contest(setup, case, entries, args)
    write_csv(name, lines, quiet=True)
    for dtype in ("tf32", "float32", "float16"):  # each type, compared with PyTorch in the same
        other = replace(case, dtype=dtype)
        if machine.gpu and dtype != case.dtype:
            setup = Setup(machine, other)
            peers = argparse.Namespace(
                **vars(args) | {"peers": ["eager", "channels_last"], "graphs": False, "smallest": False, "alone": False}
            )
            lines += contest(setup, other, entries_of(setup, other, peers), args)
            write_csv(name, lines, quiet=True)
    return lines


# ---- pass by pass ----


def shapes_of(case: Case) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of the input and the output of every module of PyTorch's, by name."""
    with torch.device("meta"):
        module = AutoencoderKL(case.arch).eval()
        x = torch.empty(hosted_data(case).shape)
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, part in module.named_modules():
        part.register_forward_hook(
            lambda _, ins, out, n=name: found.update({n: (tuple(ins[0].shape), tuple(out.shape))})
        )
    with torch.inference_mode():
        (module.image if case.op == "decode" else module.moments)(x)
    return found


class Part:
    """One of our passes as PyTorch runs it.

    Attributes
    ----------
    x, y, add : tuple of int or None
        Shapes of what is read and written, and of the residual.
    bytes_moved : int
        x, y, residual and weights, each once.
    run : callable
        run(x, add).
    conv : torch.nn.Conv2d or None
    conv_x : tuple of int
        Its own input's shape: a folded 2x is not ours, so it reads more.
    """

    def __init__(self, vae: AutoencoderKL, name: str, shapes: dict, element: int):
        parent, _, leaf = name.rpartition(".")
        get = vae.get_submodule
        self.add: tuple[int, ...] | None = None
        self.conv, self.conv_x = None, None
        if leaf in ("to_qkv", "attention"):
            block, pixels = get(parent), shapes[f"{parent}.to_q"][0]
            three = (3, *pixels)
            self.x, self.y = (shapes[parent][0], three) if leaf == "to_qkv" else (three, pixels)
            self.run = self.project(block) if leaf == "to_qkv" else self.attend
            weights = 3 * block.to_q.weight.numel() if leaf == "to_qkv" else 0
        elif name.endswith("to_out.0"):
            self.x, self.y = shapes[name][0], shapes[parent.removesuffix(".to_out")][1]
            self.add = self.y
            linear = get(name)
            self.run = lambda x, add: linear(x).transpose(-1, -2).reshape(add.shape) + add
            weights = linear.weight.numel()
        else:
            sizer = parent.endswith(("upsamplers.0", "downsamplers.0"))
            self.conv, self.conv_x = get(name), shapes[name][0]
            self.x, self.y = shapes[parent if sizer else name]
            self.add = self.y if leaf == "conv2" else None
            self.run = self.sized(get(parent)) if sizer else self.normed(self.conv, self.norm_of(vae, parent, leaf))
            weights = self.conv.weight.numel()
        count = sum(torch.Size(shape).numel() for shape in (self.x, self.y, self.add or (0,))) + weights
        self.bytes_moved = element * count

    @staticmethod
    def norm_of(vae: AutoencoderKL, parent: str, leaf: str) -> Any:
        norm = {"conv1": "norm1", "conv2": "norm2", "conv_out": "conv_norm_out"}.get(leaf)
        return vae.get_submodule(f"{parent}.{norm}") if norm else None

    @staticmethod
    def project(block: Any) -> Callable:
        def run(x, add):
            h = block.group_norm(x.flatten(2)).transpose(1, 2)
            return block.to_q(h), block.to_k(h), block.to_v(h)

        return run

    @staticmethod
    def attend(x, add):
        return F.scaled_dot_product_attention(*x.unsqueeze(2)).squeeze(1)

    @staticmethod
    def sized(module: Any) -> Callable:
        return lambda x, add: module(x)

    @staticmethod
    def normed(conv: Any, norm: Any) -> Callable:
        def run(x, add):
            h = conv(x if norm is None else F.silu(norm(x)))
            return h if add is None else (add + h) / 1.0

        return run


def passes_table(machine: Machine, case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare our passes with the least time that each can take and, with --parts, with PyTorch's time for the same."""
    setup = Setup(machine, case)
    vae, shapes = setup.ours(convolution=args.convolution), shapes_of(case)
    x = setup.data(case) if machine.gpu else hosted_data(case)
    module = setup.peer(True) if args.parts else torch_vae.with_weights(vaemem.VAE.random(config=case.arch))
    runs = []
    for _ in range(2 + args.rounds):
        (vae.decode if case.op == "decode" else vae.encode)(x, progress=lambda done, of: None)  # who asks waits
        runs.append(vae.last_run)
    peak, bandwidth = machine.flops(case.type, case.tf32), machine.bandwidth()
    element = 4 if case.type == "float32" else 2
    lines: list[dict[str, Any]] = []
    known: dict[Any, tuple[float, float | None]] = {}
    for i, name in enumerate(runs[0].passes):
        part = Part(module, name, shapes, element)
        seconds, flops = median([run.pass_seconds[i] for run in runs[2:]]), runs[0].flops[i]
        floors = {"arithmetic": flops / peak, "bytes": part.bytes_moved / bandwidth}
        bound = max(floors, key=floors.__getitem__)
        whole = conv = None
        if args.parts:
            key = (name.rpartition(".")[2], part.x, part.y)
            known[key] = known.get(key) or times_of(machine, case, part)
            whole, conv = known[key]
        lines.append(pass_row(case, name, part, flops, seconds, floors[bound], bound, whole, conv))
    show_passes(lines)
    write_csv(f"passes_gpu_{machine.label}{args.suffix}.csv", [line | about(machine, vae) for line in lines])
    return lines


def times_of(machine: Machine, case: Case, part: Part) -> tuple[float, float | None]:
    """Seconds of PyTorch, channels_last: all that the pass does, and the convolution alone."""

    def noise(shape):
        if shape is None:
            return None
        made = torch.randn(shape, device=machine.device).to(getattr(torch, case.type))
        return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and shape[0] == 1 else made

    def timed(run, *inputs):
        return median([machine.time(lambda: run(*inputs))[0] for _ in range(9)][2:])

    with torch.inference_mode(), machine.tf32(case.tf32):
        return timed(part.run, noise(part.x), noise(part.add)), part.conv and timed(part.conv, noise(part.conv_x))


def pass_row(
    case: Case, name: str, part: Part, flops: float, seconds: float, floor: float, bound: str, whole: float | None,
    conv: float | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model": case.model, "op": case.op, "height": case.size, "width": case.size, "dtype": case.type,
        "tf32": int(case.tf32), "pass": name,
        "x": "x".join(map(str, part.x)), "y": "x".join(map(str, part.y)),
        "flops": round(flops), "bytes": part.bytes_moved,
        "ms": round(seconds * 1e3, 4), "floor_ms": round(floor * 1e3, 6), "bound_by": bound,
        "floor_over_time": round(floor / seconds, 3) if seconds else None,
        "tflops": round(flops / seconds / 1e12, 2) if seconds else None,
        "torch_ms": whole and round(whole * 1e3, 4), "torch_conv_ms": conv and round(conv * 1e3, 4),
        "time_over_torch": round(seconds / whole, 3) if whole else None,
    }  # fmt: skip


def show_passes(lines: list[dict[str, Any]]) -> None:
    def total(column: str) -> float:
        return sum(line[column] or 0 for line in lines)

    print(f"\npasses: {total('ms'):.2f} ms, their floors {total('floor_ms'):.2f}, PyTorch's {total('torch_ms'):.2f}")
    for line in sorted(lines, key=lambda line: line["floor_ms"] - line["ms"]):
        beside = f", torch {line['torch_ms']:.3f} (conv {line['torch_conv_ms'] or 0:.3f})" if line["torch_ms"] else ""
        print(f"  {line['pass']:46s} {line['x']:>18s} {line['ms']:8.3f} ms, floor {line['floor_ms']:.3f}{beside}")


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=15, case_seconds=8, device="cuda", small=False)
    parser.add_argument("--models", nargs="+", default=["flux", "sdxl"], choices=["sd15", "sdxl", "flux"])
    parser.add_argument("--dtypes", nargs="+", choices=list(ELEMENT), help="all four; float32 on the CPU")
    parser.add_argument("--ops", nargs="+", default=["decode", "encode"], choices=["decode", "encode"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024, 2048, 512])
    parser.add_argument("--peers", nargs="*", default=["eager", "channels_last"], choices=list(PEERS))
    parser.add_argument("--graphs", action="store_true", help="also ours as CUDA graphs")
    parser.add_argument("--smallest", action="store_true", help="also ours within the smallest memory limit")
    parser.add_argument("--alone", action="store_true", help="also ours in a process of its own, on NumPy arrays")
    parser.add_argument("--passes", action="store_true", help="this table instead")
    parser.add_argument("--parts", action="store_true", help="with PyTorch's time for each pass; implies --passes")
    parser.add_argument("--convolution", default="auto", choices=["auto", "cudnn", "own"], help="of ours, for --passes")
    parser.add_argument("--ablation", action="store_true", help="this table instead")
    parser.add_argument("--errors-up-to", type=int, default=1024, help="size to which a reference is computed")
    parser.add_argument("--label", default="", help="appended to the CSV files' names")
    args = parser.parse_args(argv)
    args.suffix = f"_{args.label}" if args.label else ""
    args.passes |= args.parts
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"PyTorch {torch.__version__} finds no GPU (--device cpu tries the script)")
    dtypes = args.dtypes or (["float32"] if args.device == "cpu" else ["bfloat16", "float16", "tf32", "float32"])
    machine = Machine(args.device, args.small)
    cases = [
        Case(model, op, size, dtype, small=args.small)
        for dtype in dtypes
        for op in args.ops
        for model in args.models
        for size in args.sizes
    ]
    if args.passes:
        passes_table(machine, cases[0], args)
    if args.ablation:
        ablation(machine, cases[0], args)
    if not args.passes and not args.ablation:
        main_table(machine, cases, args)


if __name__ == "__main__":
    main()
