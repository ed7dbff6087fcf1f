"""How long the local names of a benchmark's script keep their tensors."""

from __future__ import annotations

from vaemem.prediction.process import SimulatedProcess, Tensor


class Names:
    """The local names of a Python function, on a simulated process.

    A name that is bound anew lets go of its old value only once the new one is there, as in ``x = f(x)``.
    """

    def __init__(self, process: SimulatedProcess):
        self._process = process
        self._held: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        old = self._held.get(name)
        self._held[name] = value
        self._process.drop(old)

    def delete(self, *names: str) -> None:
        """``del name``, for those that are bound."""
        for name in names:
            self._process.drop(self._held.pop(name, None))

    def close(self) -> None:
        """The function returns."""
        self.delete(*self._held)
