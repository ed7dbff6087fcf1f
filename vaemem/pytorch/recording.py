"""Records what a module's call takes from the CUDA caching allocator.

The module runs under fake tensors that say they are on a GPU: no weights, no activations, no GPU, no CUDA build of
PyTorch. Storages are followed from the operator that makes them to the death of their last reference, so the Python
frames of the module decide how long tensors live, as they do in a real run. What CUDA operators take besides their
outputs is added from a table.

Where fake tensors would choose otherwise than a GPU: ``scaled_dot_product_attention`` is modelled whole (the kernel by
PyTorch's conditions and switches), and so are the fast paths of ``nn.MultiheadAttention`` and
``nn.TransformerEncoderLayer``; the bias of a linear layer over a transposed input is added in place; elementwise
operators get the strides that eager ones give. What would be wrong is refused: gradients, recurrent layers, nested
tensors, compiled modules, sizes that depend on the tensors' contents.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map

from vaemem._arguments import shared
from vaemem.prediction.benchmark import USUAL_PROTOCOL
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.predict import ModulePrediction
from vaemem.prediction.question import ModuleQuestion
from vaemem.prediction.values import Software, find_card
from vaemem.pytorch.calls import Eager, as_on_a_gpu, check_module
from vaemem.pytorch.recorder import NO_COMPILER, NO_GRADIENTS, Recorder, Recording

__all__ = ["Recording", "predict_peak", "record"]


@contextlib.contextmanager
def _path(recorder: Recorder, names: Mapping[int, str]) -> Iterator[None]:
    """Keeps the name of the module that runs."""
    root = next(iter(names.values()), "")

    def enter(module: torch.nn.Module, args: Any) -> None:
        recorder.enter(names.get(id(module), root) or type(module).__name__)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        recorder.leave()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record(
    module: torch.nn.Module,
    *args: Any,
    gpu: str = "RTX 4090",
    call: Callable[..., Any] | None = None,
    autocast: torch.dtype | None = None,
    **kwargs: Any,
) -> Recording:
    """Runs a module under fake tensors and records what a CUDA run would take from the caching allocator.

    Parameters
    ----------
    module : torch.nn.Module
        In eval mode, on any device; ``torch.device("meta")`` does. Neither it nor its parameters are changed.
    *args, **kwargs
        What the module is called with. Of tensors, shape, strides and dtype count; they may be meta tensors.
    gpu : str
        Decides between attention kernels, beside the switches of PyTorch (``torch.nn.attention.sdpa_kernel``) as they
        stand around this call or within the module.
    call : callable, optional
        ``call(module, *args, **kwargs)`` in place of ``module(*args, **kwargs)``: ``lambda vae, z:
        vae.decode(z).sample``.
    autocast : torch.dtype, optional
        Runs it all under ``torch.autocast("cuda", autocast)``, where the casts of weights live until its end. Regions
        of the module's own count too.

    Raises
    ------
    ValueError
        The module has a part that is not modelled, and the answer would be wrong; each says its reason: a module in
        training mode, a backward pass, ``torch.enable_grad``, a compiled module; GRU, LSTM and RNN layers; nested
        tensors; a course or sizes that depend on what tensors hold; attention in another dtype than float32, float16
        and bfloat16, or by none of the kernels that are switched on.

    Notes
    -----
    Recorded without gradients. Sizes of storages that the module changes in place later (``resize_``) are not followed.

    Meanwhile a few of PyTorch's own questions, such as ``torch.overrides.has_torch_function``, are answered as on a
    GPU, in other threads too.

    Examples
    --------
    >>> recording = record(torch.nn.Conv2d(3, 8, 3).eval(), torch.empty(1, 3, 64, 64))
    >>> recording.weights, tuple(recording.output.shape)
    ([('weight', 864), ('bias', 32)], (1, 8, 62, 62))
    """
    return record_by(Recorder(Recording(), find_gpu(gpu)), module, args, kwargs, call, autocast)


def record_by(
    recorder: Recorder, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    call: Callable[..., Any] | None = None, autocast: torch.dtype | None = None,
) -> Recording:  # fmt: skip
    """`record` by a recorder of one's own."""
    check_module(module, call)
    recording = recorder.recording
    names = {id(m): name for name, m in module.named_modules()}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        """The same tensor on the GPU, once."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in fakes:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            fakes[id(tensor)] = made
            if tensor.requires_grad and tensor.is_leaf and not tensor._is_view():
                recorder.leaves.add(id(made))
        return fakes[id(tensor)]

    with mode, torch.no_grad():
        state = {}
        for name, tensor in _in_order_of_to(module):
            state[name] = fake(tensor)
            if recorder.adopt(state[name]):
                recording.weights.append((name, state[name].untyped_storage().nbytes()))
        args, kwargs = tree_map(fake, (args, kwargs))
        for i, tensor in enumerate(tree_flatten((args, kwargs))[0]):
            if isinstance(tensor, torch.Tensor) and recorder.adopt(tensor):
                recording.inputs.append((f"input {i}", tensor.untyped_storage().nbytes()))
        with (
            _reparametrize_module(module, state),
            _path(recorder, names),
            as_on_a_gpu(recorder),
            recorder,
            Eager(recorder),
        ):
            region = torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext()
            # A compiled function would run as it was written: its compiler gives way to such modes as the recorder's.
            compiles = "torch._dynamo" in sys.modules
            stance = torch.compiler.set_stance("fail_on_recompile") if compiles else contextlib.nullcontext()
            try:
                with region, stance:
                    recording.output = module(*args, **kwargs) if call is None else call(module, *args, **kwargs)
            except RuntimeError as error:
                reasons = {"does not require grad": NO_GRADIENTS, "torch.compile stance": NO_COMPILER}
                for text, reason in reasons.items():
                    if text in str(error):
                        raise ValueError(f"call: {reason}") from error
                raise
        del args, kwargs
        recorder.sweep()
    return recording


def _in_order_of_to(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers as Module.to goes through them: submodules first."""
    for name, child in module.named_children():
        yield from _in_order_of_to(child, f"{prefix}{name}.")
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is not None:
                yield prefix + name, tensor


@shared
def predict_peak(
    module: torch.nn.Module, *args: Any, gpu: str = "RTX 4090", cudnn_version: str | None = None,
    torch_version: str | None = None, used: int | str = 0, protocol: str = USUAL_PROTOCOL,
    call: Callable[..., Any] | None = None, autocast: torch.dtype | None = None, **kwargs: Any,
) -> ModulePrediction:  # fmt: skip
    """What ``torch.cuda``'s memory counters would say of a module's call: a fresh process, by default two warm-up runs,
    one measured.

    Parameters
    ----------
    module, *args, call, autocast, **kwargs
        As `record` takes them.
    gpu : shared
    cudnn_version, torch_version : str, optional
        2.7.1+cu128 and the cuDNN that this build brings by default. The module's own Python code is that of the
        installed versions.
    used : shared
        See `Prediction.fits`.
    protocol : str
        What the process has done when the counters are read, as `vaemem.predict` takes it: ``"cold"``, ``"warm"``,
        ``"repeated"`` or ``"kept"``. What a run returns is dropped before the next one, so that ``"repeated"`` differs
        from ``"warm"`` by one more run.

    Notes
    -----
    The prediction is of a call under ``torch.no_grad()``. Where gradients are enabled around this call and a parameter
    or an input requires them, the real one keeps more, and `substitutions` says so.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(4096, 4096, dtype=torch.float16).eval()
    ...     x = torch.empty(2048, 4096, dtype=torch.float16)
    >>> predict_peak(layer, x).allocated >> 20
    17
    """
    software = Software(torch_version=torch_version, cudnn_version=cudnn_version, protocol=protocol)
    recording = record(module, *args, gpu=gpu, call=call, autocast=autocast, **kwargs)
    held = [("weights", size) for _, size in recording.weights] + recording.inputs
    given = [*module.parameters(), *tree_flatten((args, kwargs))[0]]
    with_gradients = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given)
    return ModulePrediction(
        ModuleQuestion(find_card(gpu, used=used), software, recording.trace, held), recording.unmodelled,
        ["torch.no_grad() for a call with gradients, which would keep more"] if with_gradients else [],
    )  # fmt: skip
