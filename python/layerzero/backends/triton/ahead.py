# mypy: disable-error-code="import-untyped"
"""Compiling ahead of a launch, in another process: what a launch needs is written down there, and compiled here.

Triton compiles for a target, not for a device: no driver is asked and no context is made. What is compiled lies in Triton's
cache under the key that a launch of the same kernel, with arguments of the same kinds, looks for. Those kinds are:
a tensor's dtype and whether its address is a multiple of 16; a number's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

from triton.runtime import cache

from layerzero.backends.triton.launching import KNOWN, Noted, noting, settle_key


def launches(run: Callable[[], object], device: int) -> dict[str, Any] | None:
    """What is launched by something on a CUDA device, as data; `None` where a launch cannot be written down."""
    import torch

    with noting() as noted:
        run()
    return written(noted, torch.cuda.get_device_capability(device))


def written(noted: Iterable[Noted], capability: tuple[int, int]) -> dict[str, Any] | None:
    """Launches for a device of this compute capability, as data; `None` where one cannot be written down."""
    found = []
    for kernel, arguments, options in noted:
        try:
            values = [_written(argument) for argument in arguments]
        except TypeError:
            return None
        found.append({"module": kernel.__module__, "name": kernel.__name__, "arguments": values, "options": options})
    return {"arch": capability[0] * 10 + capability[1], "launches": found}


def _written(argument: Any) -> Any:
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    if not hasattr(argument, "data_ptr"):
        raise TypeError(f"{argument!r} is neither a tensor nor a number nor a text")
    return {"dtype": str(argument.dtype).removeprefix("torch."), "aligned": argument.data_ptr() % 16 == 0}


class _Kind:
    """A tensor as far as Triton looks at it."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        import torch

        self.dtype, self._aligned = getattr(torch, dtype), aligned

    def data_ptr(self) -> int:
        """An address that is a multiple of 16, or is not."""
        return 0 if self._aligned else 1


class _Target:
    """What Triton asks of a driver before it compiles. The number of the device is its architecture's."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Kernels are remembered by device."""
        return self._arch

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0


def merged(needed: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The launches of several calls as one, each once; `None` where they are for different devices."""
    every = list(needed)
    launches: list[dict[str, Any]] = []
    for launch in (launch for one in every for launch in one["launches"]):
        if launch not in launches:
            launches.append(launch)
    archs = {one["arch"] for one in every}
    return {"arch": archs.pop(), "launches": launches} if len(archs) == 1 else None


def compile(needed: dict[str, Any]) -> None:
    """Compiles what :func:`launches` wrote down, into Triton's cache on disk; several launches side by side."""
    from triton.runtime.driver import driver

    from layerzero.compile_worker import side_by_side

    driver.set_active(_Target(needed["arch"]))
    for launch in needed["launches"]:
        import_module(launch["module"])
    if hasattr(cache, "triton_key"):
        # Triton reads all of its own files for that, once in a process.
        cache.triton_key()
    side_by_side([partial(_compile_one, launch) for launch in needed["launches"]])


def _compile_one(launch: dict[str, Any]) -> None:
    kernel = getattr(import_module(launch["module"]), launch["name"])
    settle_key(kernel)
    arguments = [_Kind(**one) if isinstance(one, dict) else one for one in launch["arguments"]]
    _compile_launcher(kernel.warmup(*arguments, grid=(1,), **launch["options"]))


def _compile_launcher(binary: Any) -> None:
    """Has the C compiler build what launches it, which is in the same cache. Without the driver's library it cannot."""
    if not KNOWN:
        return
    from triton.backends.nvidia import driver

    try:
        driver.CudaUtils()
        driver.CudaLauncher(binary.src, binary.metadata)
    except Exception:  # noqa: BLE001
        # The process that launches it builds it, or fails with the reason.
        return
