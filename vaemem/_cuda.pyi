from typing import Any

def devices(libcuda: str | None = None, /) -> list[dict[str, Any]]: ...
def borrow(capsule: Any, /) -> dict[str, Any]: ...
def lend(address: int, shape: tuple[int, ...], dtype: str, device: int, owner: object, /) -> Any: ...

class Backend:
    capsule: Any
    stream: int
    granularity: int
    unaccounted: int
    to_come: int
    attention: str
    fp8_weights: int
    cudnn_plans: list[str]
    convolution: str
    cudnn_version: str | None
    def __init__(
        self,
        device: int = 0,
        dtype: str = "float32",
        tf32: bool = False,
        autotune: bool = False,
        libcuda: str | None = None,
        libcudnn: str | None = None,
        convolution: str = "auto",
        wgmma: bool = True,
        fp8: bool = False,
    ) -> None: ...
    def memory(self) -> tuple[int, int]: ...
    def order(self, stream: int, /) -> None: ...
    def check_stream(self, stream: int, /) -> None: ...
    def read(self, address: int, to: Any, /) -> None: ...
